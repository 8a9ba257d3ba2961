"""Finds out how to build and call somebody's attention, by names first and by trying then."""

import collections
import contextlib
import inspect
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check import building, core
from headwise.check.calling import Form, Inputs, forms, make_inputs
from headwise.check.configs import Config
from headwise.check.names import constructor_role, value_for
from headwise.check.repairs import Repaired, Repairs, error_line, in_a_constructor, on_purpose
from headwise.check.sizes import Sizes, batch_for
from headwise.check.subject import FunctionWithWeights, entry, modules, prepare, tensors
from headwise.check.trace import Trace

SECONDS = 8.0  # for all attempts together
SIZES = ("width", "heads", "context", "head_width")
MANY = 150  # attempts that raised, after which no other will help
FEW = 6  # repairs of one attempt


@dataclass
class Failure:
    """One attempt that raised."""

    built: str
    called: str | None  # None: it failed in the constructor
    error: BaseException
    line: int | None
    repaired: Repaired = field(default_factory=Repaired)
    natural: bool = True  # nothing was passed that we had to guess
    on_purpose: bool = False
    in_constructor: bool = False

    def __post_init__(self) -> None:
        """Keep what the traceback tells, and not the traceback: its frames hold every tensor of the call."""
        self.on_purpose, self.in_constructor = on_purpose(self.error), in_a_constructor(self.error)
        self.error.__traceback__ = self.error.__context__ = self.error.__cause__ = None


@dataclass
class Bound:
    """An object that runs, with the trace of one call."""

    thing: Any
    target: Any
    built: building.Built
    form: Form
    sizes: Sizes
    namespace: MutableMapping[str, Any]
    filename: str | None
    repaired: Repaired
    inputs: Inputs
    trace: Trace
    returned: Any
    output: Tensor | None
    failures: list[Failure] = field(default_factory=list)

    def call(self, inputs: Inputs, masks: dict[str, Any] | None = None, thing: Any = None) -> Any:
        """One more call, untraced."""
        with Repairs(self.filename, self.repaired), torch.no_grad(), quiet(), double_by_default():
            return self.form.call(self.thing if thing is None else thing, inputs, masks)

    def traced(self, inputs: Inputs, masks: dict[str, Any] | None = None) -> tuple[Any, Trace]:
        """One more call and its trace."""
        trace = Trace(self.filename)
        with Repairs(self.filename, self.repaired), torch.no_grad(), quiet(), double_by_default(), trace:
            return self.form.call(self.thing, inputs, masks), trace

    def again(self, **changes: Any) -> Any:
        """A second object, made with some constructor arguments changed."""
        if self.built.config is not None:
            config = Config(self.sizes, self.built.config._own, self.built.config._extra | changes)
            arguments = {k: config if v is self.built.config else v for k, v in self.built.arguments.items()}
            made = self.target(**arguments)
        else:
            made = self.target(**(self.built.arguments | changes))
        return made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings of the learner's code or of torch about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    """Tensors that a call makes itself are double, too, unless it says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass
class Attempt:
    """Everything that attempts share."""

    target: Any
    namespace: MutableMapping[str, Any]
    filename: str | None
    failures: list[Failure] = field(default_factory=list)
    deadline: float = 0.0
    late: Callable[[str], bool] | None = None  # defines a name by a statement of the file that was left out
    widths: list[int] = field(default_factory=list)  # inputs that linear layers of built objects expect


def bind(
    target: Any,
    namespace: MutableMapping[str, Any],
    filename: str | None,
    late: Callable[[str], bool] | None = None,
) -> tuple[Bound | None, list[Failure]]:
    """The best way found, and every attempt that raised. None where nothing ran."""
    attempt = Attempt(target, namespace, filename, [], time.monotonic() + SECONDS, late)
    best, best_rank = None, 0
    for sizes in itertools.chain(_sizes_to_try(namespace), _expected_sizes(attempt)):
        for bound in _all(attempt, sizes):
            rank = _rank(bound)
            if rank > best_rank:
                best, best_rank = bound, rank
            if rank == 4:
                break
        if best_rank >= 3:
            break
    if best is not None:
        best.failures = attempt.failures
    return best, attempt.failures


def _sizes_to_try(namespace: MutableMapping[str, Any]) -> Iterator[Sizes]:
    """Ours, written into the module's own constants; then the module's own."""
    own = {name: value for name, value in namespace.items() if type(value) is int and constructor_role(name) in SIZES}
    wanted = Sizes()
    for name in own:
        namespace[name] = value_for(str(constructor_role(name)), wanted)
    yield wanted
    namespace.update(own)
    width = max((v for k, v in own.items() if constructor_role(k) == "width"), default=0)
    heads = next((v for k, v in own.items() if constructor_role(k) == "heads"), 0)
    context = next((v for k, v in own.items() if constructor_role(k) == "context"), 16)
    if 0 < width <= 1024 and heads and width % heads == 0:
        yield Sizes(B=batch_for(width), H=heads, E=width, context=context)


def _expected_sizes(attempt: Attempt) -> Iterator[Sizes]:
    """A width that the class fixes by itself: what most of its linear layers take."""
    attempt.deadline = max(attempt.deadline, time.monotonic() + SECONDS / 2)
    counts = collections.Counter(attempt.widths)
    for width, _ in counts.most_common(2):
        if width != Sizes().E and 8 <= width <= 1024:
            heads = 4 if width % 4 == 0 else next((h for h in (3, 2) if width % h == 0), 1)
            yield Sizes(B=batch_for(width), H=heads, E=width)


def _all(attempt: Attempt, sizes: Sizes) -> Iterator[Bound]:
    for built in _built(attempt, sizes):
        repaired = Repaired()
        thing = _make(attempt, built, sizes, repaired)
        if time.monotonic() > attempt.deadline or len(attempt.failures) > MANY:
            return
        if thing is None:
            continue
        for form in forms(thing, sizes):
            if time.monotonic() > attempt.deadline:
                return
            bound = _try(attempt, thing, built, form, sizes, repaired)
            if bound is None:
                continue
            yield bound
            other = _other_layout(bound)
            if other is not None:
                second = _try(attempt, thing, built, replace(form, layout=other), sizes, repaired)
                if second is not None:
                    yield second
        for length in _stored_lengths(thing, sizes):
            fixed = replace(sizes, T=length, context=length)
            for form in forms(thing, fixed):
                bound = _try(attempt, thing, built, form, fixed, repaired)
                if bound is not None:
                    yield bound
                    break
        for layout in ("unbatched", "batch second"):
            first = next(iter(forms(thing, sizes)), None)
            if first is not None and time.monotonic() < attempt.deadline:
                small = replace(sizes, T=43, context=64) if layout == "unbatched" else sizes
                bound = _try(attempt, thing, built, replace(first, layout=layout), small, repaired)
                if bound is not None:
                    yield bound


def _stored_lengths(thing: Any, sizes: Sizes) -> list[int]:
    """Sizes of stored square tables: an input of that length passes where a mask is used whole."""
    tables = [b for m in modules(thing) for b in m.buffers()] + [
        t for m in modules(thing) for t in vars(m).values() if isinstance(t, Tensor)
    ]
    square = {b.shape[-1] for b in tables if b.dim() >= 2 and b.shape[-1] == b.shape[-2] and 1 < b.shape[-1] <= 64}
    return sorted(square - {sizes.T})


def _built(attempt: Attempt, sizes: Sizes) -> Iterator[building.Built]:
    target = attempt.target
    if inspect.isclass(target):
        yield from building.attempts(target, attempt.namespace, sizes)
    elif inspect.isfunction(target):
        wrapped = FunctionWithWeights(target, sizes)
        names = ", ".join(inspect.signature(target).parameters)
        if wrapped.held or wrapped.constants:
            yield building.Built(lambda: FunctionWithWeights(target, sizes), f"{target.__name__}({names})", {})
        yield building.Built(lambda: target, f"{target.__name__}({names})", {})
    else:
        yield building.Built(lambda: target, type(target).__name__, {})


def _make(attempt: Attempt, built: building.Built, sizes: Sizes, repaired: Repaired) -> Any:
    def build() -> Any:
        thing = built.make()
        if entry(thing) is None:
            raise TypeError(f"{built.text} has no forward")
        prepare(thing)
        return thing

    try:
        torch.manual_seed(0)
        thing = _repairing(build, None, attempt, sizes, repaired)
    except MemoryError:
        raise  # trying again in another way would not help
    except Exception as error:  # whatever a learner's code raises is a result
        line = error_line(error, attempt.filename)
        attempt.failures.append(Failure(built.text, None, error, line, repaired, built.natural))
        return None
    attempt.widths += [m.in_features for m in modules(thing) if isinstance(m, nn.Linear)][:50]
    return thing


def _try(
    attempt: Attempt, thing: Any, built: building.Built, form: Form, sizes: Sizes, repaired: Repaired
) -> Bound | None:
    inputs = make_inputs(form, sizes)
    trace = Trace(attempt.filename)

    def call() -> Any:
        nonlocal trace
        trace = Trace(attempt.filename)
        with torch.no_grad(), trace:
            return form.call(thing, inputs)

    try:
        returned = _repairing(call, thing, attempt, sizes, repaired)
    except MemoryError:
        raise  # trying again in another way would not help
    except Exception as error:  # whatever a learner's code raises is a result
        line, natural = error_line(error, attempt.filename), form.natural and built.natural
        attempt.failures.append(Failure(built.text, form.words(), error, line, repaired, natural))
        return None
    output = form.result(returned, inputs)
    space, filename = attempt.namespace, attempt.filename
    return Bound(thing, attempt.target, built, form, sizes, space, filename, repaired, inputs, trace, returned, output)


def _repairing(work: Any, thing: Any, attempt: Attempt, sizes: Sizes, repaired: Repaired) -> Any:
    """Run, and where a name or an attribute is missing, supply it, remember it and run again."""
    for _ in range(FEW):
        try:
            with (
                Repairs(attempt.filename, repaired),
                quiet(),
                contextlib.nullcontext() if thing is None else double_by_default(),
            ):
                return work()
        except NameError as error:
            name, line = getattr(error, "name", None), error_line(error, attempt.filename)
            if name is None or isinstance(error, UnboundLocalError):
                raise
            if attempt.late is not None and attempt.late(name):
                continue
            if not _supply(attempt.namespace, name, sizes):
                raise
            repaired.names[name] = line
        except AttributeError as error:
            line = error_line(error, attempt.filename)
            if "before Module.__init__() call" in str(error) and inspect.isclass(attempt.target):
                repaired.super_missing = True
                work = _with_super(attempt.target, work)
            elif not _supply_attribute(error, thing, sizes, repaired, line):
                raise
    return work()


def _with_super(cls: Any, work: Any) -> Any:
    """The same work while the class's constructor first does what `super().__init__()` would have done."""
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


def _supply(namespace: MutableMapping[str, Any], name: str, sizes: Sizes) -> bool:
    lengths = ("seq_len", "T", "seq_length", "n", "t", "num_tokens", "len", "length", "L")
    known: dict[str, Any] = (
        dict.fromkeys(lengths, sizes.T) | dict.fromkeys(("N", "B", "b"), sizes.B) | {"device": "cpu"}
    )
    role = constructor_role(name)
    if name in known:
        namespace[name] = known[name]
    elif role is not None:
        namespace[name] = sizes.T if role == "context" and "max" not in name else value_for(role, sizes)
    else:
        return False
    return True


def _supply_attribute(error: AttributeError, thing: Any, sizes: Sizes, repaired: Repaired, line: int | None) -> bool:
    match = re.search(r"object has no attribute '(\w+)'", str(error))
    name = match[1] if match else None
    role = constructor_role(name) if name else None
    if thing is None or name is None or role is None or getattr(error, "obj", thing) is not thing:
        return False
    setattr(thing, name, value_for(role, sizes))
    repaired.attributes[name] = line
    return True


def _rank(bound: Bound) -> int:
    """4: attention between tokens, and an output; 3: some attention and an output; 2: an output; 1: it ran.

    An attempt with a length fitted to a stored mask ranks 3: another way may do without.
    """
    parts = core.find(bound.trace)
    if parts is None:
        return 2 if bound.output is not None and tensors(bound.thing) else 1
    lengths = _lengths(bound, parts)
    if bound.output is None:
        return 2
    widened = bound.form.fixed_tensor and parts.softmax[0].value.dim() > 4  # by a mask of too many axes
    fitted = bound.form.layout != "unbatched" and bound.sizes.T != Sizes().T
    return 4 if lengths == (bound.sizes.T, bound.sizes.T) and not widened and not fitted else 3


def _lengths(bound: Bound, parts: core.Parts) -> tuple[int, int] | None:
    B = bound.inputs.query.shape[0]
    arranged = next(iter(core.arrangements(parts, B)), None)
    return None if arranged is None else (arranged.weights.shape[-2], arranged.weights.shape[-1])


def _other_layout(bound: Bound) -> str | None:
    """Attention that runs along the batch may mean that the batch is expected second."""
    parts = core.find(bound.trace)
    if parts is None or bound.form.layout != "batch first":
        return None
    sizes = parts.softmax[0].value.shape
    return "batch second" if sizes[-1] == bound.sizes.B or bound.sizes.B in sizes[-2:] else None
