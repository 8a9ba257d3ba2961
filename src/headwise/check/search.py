"""Finds out how to build and call somebody's attention: first by name, then by trial.

`bind` searches; `bind_as_told` follows --build and --call. Missing names and attributes are supplied on the way and
remembered, so that they do not hide everything else.
"""

import ast
import collections
import contextlib
import inspect
import itertools
import linecache
import re
import time
import traceback
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.arguments import (
    OTHER_SIZES,
    SMALL,
    Built,
    CallSizes,
    StandInConfig,
    attempts,
    batch_for,
    constructor_role,
    is_configuration,
    like_example,
    value_for,
)
from headwise.check.binding import Bound, Failure, Instance, stored_lengths
from headwise.check.blame import blamed_line
from headwise.check.calls import (
    OTHERS,
    PICTURES,
    PLAIN,
    ROWS,
    SLICES,
    CallForm,
    forms,
    leaves,
    make_inputs,
    prepare,
    tokens_of,
)
from headwise.check.code.case import Case
from headwise.check.code.constants import constants, own_sizes, restore, write
from headwise.check.code.example import example_arguments
from headwise.check.code.names import globals_read
from headwise.check.code.stubs import Stub, StubModule
from headwise.check.configuration import own_configuration
from headwise.check.environment import Repaired, Repairs, double_by_default, quiet
from headwise.check.explain import explained
from headwise.check.objects import FunctionWithWeights, entry, modules, signature
from headwise.check.trace import (
    PRODUCTS,
    TooLongError,
    Trace,
    error_line,
)
from headwise.errors import OptionError

SECONDS = 8.0  # of processor time, for all attempts together
FORMS_PER_LAYOUT = 3  # other layouts are tried with the likeliest calls only
WIDEST = 2048  # largest width fixed by a class that is tried
MANY_OPERATIONS = 6000  # of one call: smaller sizes show as much, in less time
MOST_FAILURES = 150  # after so many, no other attempt will help
REPAIRS = 6  # in one attempt
LENGTHS = ("seq_len", "T", "seq_length", "n", "t", "num_tokens", "len", "length", "L")


def bind(case: Case) -> tuple[Bound | None, list[Failure]]:
    """The best way that was found to build and call, and every attempt that raised. None where nothing ran."""
    _define_what_it_reads(case)
    search = Search(case)
    best = search.best()
    if time.process_time() > search.deadline:  # not everything was tried: an input of another form might pass
        for failure in search.failures:
            failure.projected = False
    if best is not None:
        best.failures = search.failures
    elif search.failures and all(f.called is None for f in search.failures):
        search.failures[0].refuses_all = search.refuses_all()
    return best, search.failures


class Search:
    """The search for a way to build and call a case's target."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.failures: list[Failure] = []
        self.deadline = time.process_time() + SECONDS
        self.widths: list[int] = []  # inputs that linear layers of built objects expect
        self.shapes: list[tuple[int, int]] = []  # (heads, width) that built objects say they have
        self.too_long = False  # a call made so many operations that smaller sizes are needed

    def best(self) -> Bound | None:
        best, best_rank = None, 0
        for sizes in itertools.chain(self._usual_sizes(), self._small_sizes(), self._expected_sizes()):
            for bound in self._ways(sizes):
                rank = bound.rank
                if rank > best_rank:
                    best, best_rank = bound, rank
                if rank == 4:
                    break
            if best_rank >= 3:
                break
        return best

    def refuses_all(self) -> bool:
        """Whether the likeliest way to construct it raises at every other setting of the sizes, too."""
        for sizes in OTHER_SIZES:
            built = next(self._builds(sizes), None)
            if built is None or not built.certain or self._make(built, sizes) is not None:
                return False
        return True

    def _usual_sizes(self) -> Iterator[CallSizes]:
        """Our sizes, written into the module's constants; then the module's own."""
        calls = (n.func for n in ast.walk(self.case.whole_tree) if isinstance(n, ast.Call))
        called = {n.id for n in calls if isinstance(n, ast.Name)}
        for space in self.case.namespaces:
            _stand_in(space, CallSizes(), called)
        _stand_in_left_out(self.case, CallSizes())
        found = constants(self.case.namespaces)
        write(found, CallSizes())
        yield CallSizes()
        restore(found)
        own = own_sizes(found)
        width = max((v for k, v in own.items() if constructor_role(k) == "width"), default=0)
        heads = next((v for k, v in own.items() if constructor_role(k) == "heads"), 0)
        context = next((v for k, v in own.items() if constructor_role(k) == "context"), 16)
        if 0 < width <= 1024 and heads and width % heads == 0:
            yield CallSizes(B=batch_for(width), H=heads, E=width, context=context)

    def _small_sizes(self) -> Iterator[CallSizes]:
        """For code that loops over single numbers."""
        if self.too_long:
            self.too_long, self.deadline = False, time.process_time() + SECONDS
            write(constants(self.case.namespaces), SMALL)
            yield SMALL

    def _expected_sizes(self) -> Iterator[CallSizes]:
        """Sizes that the class fixes itself: its own heads, or what most of its linear layers take."""
        self.deadline = max(self.deadline, time.process_time() + SECONDS / 2)
        for heads, width in dict.fromkeys(self.shapes):
            if 8 <= width <= WIDEST:
                yield CallSizes(B=batch_for(width), H=heads, E=width)
        for width, _ in collections.Counter(self.widths).most_common(2):
            if width != CallSizes().E and 8 <= width <= 1024:
                heads = 4 if width % 4 == 0 else next((h for h in (3, 2) if width % h == 0), 1)
                yield CallSizes(B=batch_for(width), H=heads, E=width)

    @property
    def _out_of_time(self) -> bool:
        return time.process_time() > self.deadline or self.too_long

    def _ways(self, sizes: CallSizes) -> Iterator[Bound]:
        for built in self._builds(sizes):
            instance = self._make(built, sizes)
            if time.process_time() > self.deadline or len(self.failures) > MOST_FAILURES:
                return
            if instance is None:
                continue
            batched = False
            for form in forms(instance.thing, sizes):
                if self._out_of_time:
                    return
                bound = self.try_form(instance, form)
                if bound is None:
                    continue
                batched = batched or bound.rank >= 3
                yield bound
                if bound.along_batch and (second := self.try_form(instance, replace(form, layout="batch second"))):
                    yield second
            yield from self._with_fitted_length(instance)
            yield from self._with_other_layout(instance, ("unbatched",) if batched else ())

    def _with_fitted_length(self, instance: Instance) -> Iterator[Bound]:
        for length, layout in self._fitting_lengths(instance):
            sizes = replace(instance.sizes, T=length, context=length)
            yield from self._first_that_runs(replace(instance, sizes=sizes), layout)

    def _fitting_lengths(self, instance: Instance) -> Iterator[tuple[int, str]]:
        """Lengths of stored masks, and the one that a constant of the module fixes, also without a batch."""
        yield from ((length, PLAIN) for length in stored_lengths(instance.thing, instance.sizes))
        read, space = globals_read(self.case.target), self.case.namespace
        if any(constructor_role(n) == "context" and type(space.get(n)) is int for n in read):
            yield from ((instance.sizes.context, layout) for layout in (PLAIN, "unbatched"))

    def _with_other_layout(self, instance: Instance, without: tuple[str, ...]) -> Iterator[Bound]:
        for layout in (layout for layout in OTHERS if layout not in without):
            sizes, T = instance.sizes, tokens_of(layout, instance.sizes.T)
            sizes = replace(sizes, T=T, S=T + SLICES * ROWS, context=64) if T != sizes.T else sizes
            yield from self._first_that_runs(replace(instance, sizes=sizes), layout, FORMS_PER_LAYOUT)

    def _first_that_runs(self, instance: Instance, layout: str, most: int | None = None) -> Iterator[Bound]:
        for form in itertools.islice(forms(instance.thing, instance.sizes), most):
            mixed = (False, True) if layout.startswith(PICTURES) and form.cross else (False,)  # pixels ask words
            for plain_memory in mixed:
                if self._out_of_time:
                    return
                bound = self.try_form(instance, replace(form, layout=layout, plain_memory=plain_memory))
                if bound is not None:
                    yield bound
                    return

    def _builds(self, sizes: CallSizes) -> Iterator[Built]:
        target = self.case.target
        if inspect.isclass(target):
            yield from attempts(target, self.case.namespace, sizes)
            like = like_example(target, example_arguments(self.case), sizes)
            yield from [] if like is None else [like]
        elif inspect.isfunction(target):
            wrapped = FunctionWithWeights(target, sizes)
            text = f"{target.__name__}({', '.join(inspect.signature(target).parameters)})"
            if wrapped.held or wrapped.keyed or wrapped.constants:
                yield Built(lambda: FunctionWithWeights(target, sizes), text, {})
            yield Built(lambda: target, text, {})
        else:
            yield Built(lambda: target, type(target).__name__, {})

    def _make(self, built: Built, sizes: CallSizes) -> Instance | None:
        def build() -> Any:
            thing = built.make()
            if entry(thing) is None:
                raise TypeError(f"{built.text} has no forward")
            prepare(thing, sizes)
            return thing

        repaired = Repaired()
        try:
            torch.manual_seed(0)
            thing = self._repairing(build, sizes, repaired)
        except MemoryError:
            raise  # another attempt would not help
        except Exception as error:  # whatever a learner's code raises is a result
            line = error_line(error, self.case.filename)
            cause = explained(error, self.case.filename, sizes)
            self.failures.append(Failure(built.text, None, error, line, repaired, built.certain, explained=cause))
            return None
        self.widths += [m.in_features for m in modules(thing) if isinstance(m, nn.Linear)][:50]
        self.shapes += _own_heads(thing, sizes)
        return Instance(thing, built, sizes, repaired)

    def try_form(self, instance: Instance, form: CallForm) -> Bound | None:
        """One traced call; None where it raises, which is noted among the failures."""
        inputs = make_inputs(form, instance.sizes)
        trace = Trace(self.case.filename)

        def call() -> Any:
            nonlocal trace
            trace = Trace(self.case.filename)
            trace.tokens = (inputs.query.shape[1], inputs.key.shape[1])
            with torch.no_grad(), trace:
                return form.call(instance.thing, inputs)

        lines = dict(instance.repaired.lines)
        try:
            returned = self._repairing(call, instance.sizes, instance.repaired, instance.thing)
        except MemoryError:
            raise  # another attempt would not help
        except TooLongError:
            self.too_long = instance.sizes != SMALL
            return None
        except Exception as error:  # whatever a learner's code raises is a result
            self.failures.append(self._failure(error, instance, form, trace))
            instance.repaired = replace(instance.repaired, lines=lines)  # repairs that did not help do not count
            return None
        if len(trace.nodes) > MANY_OPERATIONS and instance.sizes != SMALL:
            self.too_long = True
            return None
        trace.returned = [trace.source(leaf) for leaf in leaves(returned)]
        made = {"case": self.case, "form": form, "inputs": inputs, "trace": trace, "returned": returned}
        return Bound(**vars(instance), **made, output=form.result(returned, inputs))

    def _failure(self, error: Exception, instance: Instance, form: CallForm, trace: Trace) -> Failure:
        built, sizes = instance.built, instance.sizes
        projected = any(node.op in PRODUCTS for node in trace.nodes)
        width = "shapes cannot be multiplied" in str(error)  # perhaps because of a size that we guessed
        sizes_known = built.guessed <= 1 and built.config is None  # a configuration's numbers may be related otherwise
        tables = (node.value.shape[-2:] for node in trace.softmax_nodes()) if sizes_known else ()
        line = blamed_line(error, trace, self.case.filename, sizes)
        return Failure(
            built.text,
            form.words(),
            error,
            line,
            instance.repaired,
            explained=explained(error, self.case.filename, sizes, line, trace, built.roles)
            if form.layout == PLAIN
            else None,
            natural=form.natural and (built.certain or (projected and not width)),
            guessed=form.fixed_tensor,
            without=bool(form.fixed) and all(value is None for value in form.fixed.values()),
            bare=not form.fixed and form.layout == PLAIN and built.certain,
            projected=projected,
            confused=built.certain and form.layout == PLAIN and _takes_head_width(error, sizes),
            attended=any(shape == (sizes.T, sizes.T) for shape in tables),
            layout=form.layout,
        )

    def _repairing(self, work: Callable[[], Any], sizes: CallSizes, repaired: Repaired, thing: Any = None) -> Any:
        """The result of `work`, run again after every missing name or attribute that could be supplied."""
        for _ in range(REPAIRS):
            try:
                precision = contextlib.nullcontext() if thing is None else double_by_default()
                with Repairs(self.case.filename, repaired), quiet(), precision:
                    return work()
            except NameError as error:
                name, line = getattr(error, "name", None), error_line(error, self.case.filename)
                if name is None or isinstance(error, UnboundLocalError):
                    raise
                if self.case.loaded is not None and self.case.loaded.define_late(name):
                    continue
                if not _supply(self.case.namespace, name, sizes):
                    raise
                repaired.names[name] = line
            except AttributeError as error:
                if "before Module.__init__() call" in str(error) and inspect.isclass(self.case.target):
                    repaired.super_missing = True
                    work = _with_super(self.case.target, work)
                elif not self._supply_attribute(error, thing, sizes, repaired):
                    raise
        return work()

    def _supply_attribute(self, error: AttributeError, thing: Any, sizes: CallSizes, repaired: Repaired) -> bool:
        line = error_line(error, self.case.filename)
        match = re.search(r"object has no attribute '(\w+)'", str(error))
        name = match[1] if match else None
        role = constructor_role(name) if name else None
        if thing is None or name is None or role is None or getattr(error, "obj", thing) is not thing:
            return False
        text = "" if line is None else linecache.getline(self.case.filename or "", line)
        called = re.search(rf"\bself\.{name}\(", text)
        if called and role != "dropout":
            return False
        setattr(thing, name, nn.Identity() if called else value_for(role, sizes))
        repaired.attributes[name] = line
        return True


def _takes_head_width(error: Exception, sizes: CallSizes) -> bool:
    """Whether a linear layer made for the width of a head refused an input of the full width."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer, x = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(layer, nn.Linear) and isinstance(x, Tensor):
            return x.shape[-1] == sizes.E != layer.in_features == sizes.D
    return False


def _stand_in(namespace: MutableMapping[str, Any], sizes: CallSizes, called: Collection[str]) -> None:
    """Replace sizes and configurations imported from a missing file by what their names mean."""
    for name, value in list(namespace.items()):
        if isinstance(value, StubModule) and is_configuration(name):
            namespace[name] = StandInConfig(sizes)
        elif isinstance(value, Stub) and not re.match(r"[A-Z][a-z]", name) and name not in called:  # no class
            role = constructor_role(name)
            if role is not None:
                namespace[name] = value_for(role, sizes)
            elif is_configuration(name):
                namespace[name] = StandInConfig(sizes)


def _stand_in_left_out(case: Case, sizes: CallSizes) -> None:
    """Stand in for a configuration whose statement was not run, such as `args = parser.parse_args()`."""
    for name in [] if case.loaded is None else case.loaded.skipped:
        if is_configuration(name) and name not in case.namespace:
            case.namespace[name] = StandInConfig(sizes, own_configuration(case.namespace))


def _define_what_it_reads(case: Case) -> None:
    """Run the statements left out that define what the class reads; sizes and configurations are ours to choose."""
    if case.loaded is None:
        return
    for name in globals_read(case.target):
        if name in case.loaded.skipped and constructor_role(name) is None and not is_configuration(name):
            case.loaded.define_late(name)


def _supply(namespace: MutableMapping[str, Any], name: str, sizes: CallSizes) -> bool:
    """Define a missing name by its meaning; whether it has one."""
    known: dict[str, Any] = dict.fromkeys(LENGTHS, sizes.T) | dict.fromkeys("NBb", sizes.B) | {"device": "cpu"}
    role = constructor_role(name)
    if name in known:
        namespace[name] = known[name]
    elif role is not None:
        namespace[name] = sizes.T if role == "context" and "max" not in name else value_for(role, sizes)
    elif is_configuration(name):
        namespace[name] = StandInConfig(sizes, own_configuration(namespace))
    return name in known or role is not None or is_configuration(name)


def _with_super(cls: Any, work: Callable[[], Any]) -> Callable[[], Any]:
    """The same work while the class's constructor calls `nn.Module.__init__` first."""
    original = cls.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.Module.__init__(self)
        original(self, *args, **kwargs)

    def patched() -> Any:
        cls.__init__ = init
        try:
            return work()
        finally:
            cls.__init__ = original

    return patched


def _own_heads(thing: Any, sizes: CallSizes) -> list[tuple[int, int]]:
    """(heads, width) where an object's attributes differ from what we asked for."""
    held = {constructor_role(k): v for k, v in getattr(thing, "__dict__", {}).items() if type(v) is int}
    heads, each = held.get("heads"), held.get("head_width")
    return [(heads, heads * each)] if heads and each and heads * each != sizes.E and heads != sizes.H else []


# --build and --call.

ROLES = {"q": "query", "query": "query", "k": "key", "key": "key", "v": "value", "value": "value", "x": "self",
         "memory": "memory", "context": "memory", "y": "memory"}  # fmt: skip


def bind_as_told(case: Case, build: str | None, call: str | None) -> Bound | None:
    """An object made and called as told; an `OptionError` where that is not Python or does not run."""
    built = _default_build(case) if build is None else _told_build(case, build)
    thing = built.make()
    if entry(thing) is None:
        raise OptionError(f"--build {build!r} gives a {type(thing).__name__}, which has no forward.")
    prepare(thing)
    search = Search(case)
    instance = Instance(thing, built, _measured_sizes(thing), Repaired())
    if call is None:
        tried = (search.try_form(replace(instance, repaired=Repaired()), form) for form in forms(thing, instance.sizes))
        found = next((bound for bound in tried if bound is not None), None)
        if found is None and build is not None and search.failures:
            error = search.failures[0].error
            raise OptionError(f"what --build {build!r} gives raises {type(error).__name__}: {error}")
        return found
    bound = search.try_form(instance, _told_form(call, thing))
    if bound is None and search.failures:
        error = search.failures[-1].error
        raise OptionError(f"--call {call!r} raises {type(error).__name__}: {error}")
    return bound


def _told_build(case: Case, build: str, sizes: CallSizes = CallSizes()) -> Built:  # noqa: B008 - it cannot change
    space = dict(case.namespace) | {"E": sizes.E, "H": sizes.H, "D": sizes.D, "context": sizes.context}
    space.setdefault(case.name, case.target)

    def make() -> Any:
        try:
            return eval(build, space)  # noqa: S307 - the learner's own words, in the same process as their file
        except Exception as error:
            raise OptionError(f"--build {build!r} raises {type(error).__name__}: {error}") from error

    named = {node.id for node in ast.walk(ast.parse(build, mode="eval")) if isinstance(node, ast.Name)} & {"E", "H"}
    return Built(make, build, {}, at=(lambda other: _told_build(case, build, other)) if len(named) == 2 else None)


def _default_build(case: Case) -> Built:
    if not isinstance(case.target, type):
        return Built(lambda: case.target, case.name, {})
    return next(attempts(case.target, case.namespace, CallSizes()))


def _measured_sizes(thing: Any) -> CallSizes:
    """Sizes with the width that most of its linear layers take."""
    widths = collections.Counter(m.in_features for m in modules(thing) if isinstance(m, nn.Linear)).most_common(1)
    if not widths or widths[0][0] == CallSizes().E:
        return CallSizes()
    named = (getattr(thing, name, None) for name in ("num_heads", "n_heads", "heads", "h", "n_head"))
    heads = next((value for value in named if isinstance(value, int)), 1)
    return CallSizes(B=batch_for(widths[0][0]), H=heads, E=widths[0][0])


def _told_form(call: str, thing: Any) -> CallForm:
    """The form of `m(x, x, mask=None)`: inputs are x, q, k, v and memory; the rest must be constants or `mask`."""
    try:
        tree = ast.parse(call, mode="eval").body
    except SyntaxError as error:
        raise OptionError(f'--call {call!r} is not Python; write it like "m(x, x, x, mask)".') from error
    if not isinstance(tree, ast.Call):
        raise OptionError(f'--call {call!r} is not a call; write it like "m(x, x, x, mask)".')
    names = [p.name for p in signature(thing)]
    given = list(zip(names, tree.args, strict=False)) + [(k.arg or "", k.value) for k in tree.keywords]
    roles, fixed, masks = {}, {}, []
    three = [getattr(node, "id", "") for _, node in given].count("x") == 3  # query, key and value, in this order
    for position, (name, node) in enumerate(given):
        if isinstance(node, ast.Name) and "mask" in node.id:
            masks.append(name)
        elif isinstance(node, ast.Name) and node.id in ROLES:
            in_order = three and node.id == "x"
            roles[name] = ("query", "key", "value")[min(position, 2)] if in_order else ROLES[node.id]
        else:
            try:
                fixed[name] = ast.literal_eval(node)
            except ValueError as error:
                words = f"{ast.unparse(node)} is neither x, q, k, v, memory, mask nor a constant."
                raise OptionError(f"--call {call!r}: {words}") from error
    return CallForm(roles, fixed, tuple(masks))
