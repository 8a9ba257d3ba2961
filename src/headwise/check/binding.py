"""An object that runs: how it was made, how it is called, and the trace of one call."""

import contextlib
import inspect
import math
import re
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.arguments import (
    Built,
    CallSizes,
    batch_for,
    constructor_role,
)
from headwise.check.blame import blamed_line
from headwise.check.calls import PLAIN, CallForm, Inputs, forms, leaves, make_inputs, prepare
from headwise.check.code.case import Case
from headwise.check.code.constants import SIZE_ROLES, constants, restore, write
from headwise.check.code.names import names_used
from headwise.check.environment import Repaired, Repairs, double_by_default, quiet
from headwise.check.fits import same
from headwise.check.mistakes import Finding
from headwise.check.objects import FunctionWithWeights, modules, signature, tensors
from headwise.check.trace import (
    AttentionNodes,
    Trace,
    find_attention,
    in_layer_constructor,
    is_deliberate,
)

DIVISIBLE = re.compile(r"divisib|multiple of", re.IGNORECASE)  # in the words of an error


@dataclass
class Failure:
    """One attempt that raised."""

    built: str
    called: str | None  # None: it failed in the constructor
    error: BaseException
    line: int | None
    repaired: Repaired
    natural: bool = True  # nothing that was passed was a guess, and every key of a configuration was known
    guessed: bool = False  # a mask or table of some shape had to be passed
    without: bool = False  # every fixed argument was None
    bare: bool = False  # nothing but the inputs was passed: what is None is the learner's own default
    projected: bool = False  # the input had passed a projection: its form was right
    attended: bool = False  # it reached weights between tokens, with at most one guessed size
    refuses_all: bool = False  # the constructor raised at every setting of the sizes
    deliberate: bool = False  # a `raise` of the learner's or of a library
    made_layer: bool = False  # it failed while making a layer
    explained: Finding | None = None  # its cause, where it has a name
    layout: str = PLAIN
    confused: bool = False  # a layer that takes the width of a head was given the whole input

    def __post_init__(self) -> None:
        """Read the traceback and drop it: its frames hold every tensor of the call."""
        self.deliberate, self.made_layer = is_deliberate(self.error), in_layer_constructor(self.error)
        self.error.__traceback__ = self.error.__context__ = self.error.__cause__ = None


@dataclass
class Instance:
    """An object that was built, ready to be called."""

    thing: Any
    built: Built
    sizes: CallSizes
    repaired: Repaired


@dataclass
class Bound(Instance):
    """An object that runs: how it was made, how it is called, and the trace of one call."""

    case: Case
    form: CallForm
    inputs: Inputs
    trace: Trace
    returned: Any
    output: Tensor | None
    failures: list[Failure] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)  # what the traced call was given beside its form
    resizes: bool = False  # the module's constants have other sizes while it runs
    in_parts: bool = False  # longer inputs are computed in several parts: this one is as long as one part
    last_trace: Trace | None = None  # of the last call made with `called`, which may have raised

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The environment of every call: small faults repaired, no warnings, double precision."""
        kept = constants(self.case.namespaces) if self.resizes else []
        write(kept, self.sizes)
        try:
            with Repairs(self.case.filename, self.repaired), quiet(), double_by_default(), self.case.coverage:
                yield
        finally:
            restore(kept)

    def call(self, inputs: Inputs, masks: dict[str, Any] | None = None, thing: Any = None) -> Any:
        """What one more call returns."""
        with self.running(), torch.no_grad():
            return self.form.call(self.thing if thing is None else thing, inputs, masks)

    def output_of(self, inputs: Inputs, masks: dict[str, Any] | None = None, thing: Any = None) -> Tensor | None:
        """The output of one more call, or None where it raises or returns something else."""
        try:
            return self.form.result(self.call(inputs, masks, thing), inputs)
        except Exception:  # anything can be raised by a learner's code
            return None

    def called(self, masks: dict[str, Any] | None = None, **changes: Any) -> "Bound":
        """The same with some fields changed, called and traced once more."""
        other = replace(self, **changes, given=dict(masks or {}))
        other.trace = self.last_trace = Trace(self.case.filename)
        other.trace.tokens = (other.inputs.query.shape[1], other.inputs.key.shape[1])
        with other.running(), torch.no_grad(), other.trace:
            other.returned = other.form.call(other.thing, other.inputs, masks)
        other.trace.returned = [other.trace.source(leaf) for leaf in leaves(other.returned)]
        other.output = other.form.result(other.returned, other.inputs)
        return other

    def repeats(self, thing: Any = None) -> bool | None:
        """Whether two calls give the same output; None where one gives none."""
        first, second = self.output_of(self.inputs, thing=thing), self.output_of(self.inputs, thing=thing)
        return None if first is None or second is None else same(first.nan_to_num(), second.nan_to_num())

    def blamed(self, error: BaseException, sizes: CallSizes | None = None) -> int | None:
        """The line to blame for an error that `called` has raised."""
        return blamed_line(error, self.last_trace or self.trace, self.case.filename, sizes or self.sizes)

    def rebuilt(self, **changes: Any) -> Any:
        """A second object, made with some constructor arguments changed."""
        with quiet(), self.case.coverage:
            thing = self.built.remake(self.case.target, self.sizes, changes)
            prepare(thing, self.sizes)
        return thing

    def uncalled(self) -> Any:
        """A new object with the same weights that was never called; None where none can be made."""
        if not inspect.isclass(self.case.target) or not isinstance(self.thing, nn.Module):
            return None
        try:
            thing = self.rebuilt()
            thing.load_state_dict(self.thing.state_dict())
        except Exception:  # it cannot be made again, or keeps something in its state
            return None
        return thing

    def gives(self, output: Tensor | None) -> bool:
        """Whether this is the output of the traced call."""
        return self.output is not None and output is not None and same(output, self.output)

    def rebuilt_from(self, arguments: dict[str, Any]) -> Any:
        """A second object, made with these constructor arguments only."""
        with quiet(), self.case.coverage:
            thing = self.case.target(**arguments)
            prepare(thing, self.sizes)
        return thing

    def resized(self, sizes: CallSizes) -> "Bound | None":
        """The same built and called at other sizes, traced; None where its sizes are fixed. Raises what it raises.

        Where they are refused, the widths of a head are taken for those of all heads together. Where a width must be a
        multiple of some number, as for a norm over groups of channels, it becomes a multiple of the first width.
        """
        try:
            return self._resized(sizes)
        except (AssertionError, ValueError) as error:
            if DIVISIBLE.search(str(error)) and not sizes.O:
                wide = math.lcm(self.sizes.E, sizes.H)
                wide *= 2 if wide == self.sizes.E else 1
                with contextlib.suppress(AssertionError, ValueError):
                    return self._resized(replace(sizes, E=wide, B=batch_for(wide)))
            roles = ("head_width", "value_width") if self.built.config is None else ()
            names = [name for role in roles for name in self.built.names_with_role(role)]
            if not names or not isinstance(self.case.target, type):
                raise
            whole = self.built.changed(self.case.target, dict.fromkeys(names, self.sizes.E))
            return replace(self, built=whole)._resized(sizes)

    def _resized(self, sizes: CallSizes) -> "Bound | None":
        built = self._built_at(sizes)
        if built is None:
            return None
        kept = constants(self.case.namespaces)
        write(kept, sizes)
        try:
            with quiet(), self.case.coverage:
                torch.manual_seed(0)
                thing = built.make()
                prepare(thing, sizes)
            form = self.form_at(thing, sizes)
            made = {"thing": thing, "built": built, "sizes": sizes, "form": form, "resizes": True}
            return self.called(**made, inputs=make_inputs(form, sizes))
        finally:
            restore(kept)

    def of_length(self, T: int, seed: int = 9, thing: Any = None) -> "Bound":
        """The same object, or another one, called and traced with an input of another length."""
        sizes = replace(self.sizes, T=T, S=T)
        form = self.form_at(self.thing, sizes)
        thing = self.thing if thing is None else thing
        return self.called(sizes=sizes, form=form, thing=thing, inputs=make_inputs(form, sizes, seed=seed))

    def _built_at(self, sizes: CallSizes) -> Built | None:
        target = self.case.target
        if isinstance(self.thing, FunctionWithWeights):
            return replace(self.built, make=lambda: FunctionWithWeights(target, sizes))
        if not inspect.isclass(target):
            return self.built if inspect.isfunction(target) else None
        if self.built.at is not None:
            return self.built.at(sizes)
        made = self.built.resized(target, self.sizes, sizes)
        reads = names_used(target) & {constant.through for constant in constants(self.case.namespaces)}
        free = not tensors(self.thing)  # without weights, it takes any width
        return self.built if made is None and (reads or free) else made

    def form_alone(self) -> CallForm | None:
        """The form without keys and memories that may be left out; None where there are none, or nothing is left."""
        optional = {p.name for p in signature(self.thing) if p.name in self.form.roles and p.default is None}
        alone = {n: r for n, r in self.form.roles.items() if n not in optional}
        return replace(self.form, roles=dict.fromkeys(alone, "self")) if optional and alone else None

    def form_at(self, thing: Any, sizes: CallSizes) -> CallForm:
        """The same form with fixed tensors for other sizes."""
        if not self.form.fixed:
            return replace(self.form, batch=sizes.B)
        pairs = zip(forms(self.thing, self.sizes), forms(thing, sizes), strict=False)
        alike = (new for old, new in pairs if old.roles == self.form.roles and old.passes_like(self.form))
        return replace(next(alike, self.form), layout=self.form.layout)

    @property
    def rank(self) -> int:
        """4: attention between tokens and an output; 3: some attention and an output; 2: an output; 1: it ran.

        A call with a length fitted to a stored mask ranks 3, because another may do without.
        """
        nodes = find_attention(self.trace)
        if nodes is None:
            return 2 if self.output is not None and tensors(self.thing) and not self._pairs_samples else 1
        if self._pairs_samples or self.output is None or (self.form.fixed_tensor and not _is_informed(nodes)):
            return 2
        core = next(nodes.arrangements(self.inputs.query.shape[0]), None)
        between = core is not None and tuple(core.weights.shape[-2:]) == (self.sizes.T, self.sizes.T)
        widened = self.form.fixed_tensor and nodes.softmax[0].value.dim() > 4  # by a mask of too many axes
        return 4 if between and not widened and not self.length_fitted else 3

    @property
    def length_fitted(self) -> bool:
        """Whether the length of the input had to be that of a stored mask or constant."""
        return self.form.layout == PLAIN and self.sizes.T != CallSizes().T and not self.in_parts

    @property
    def along_batch(self) -> bool:
        """Whether attention runs along the batch, which may mean that the batch is expected second."""
        nodes = find_attention(self.trace) if self.form.layout == PLAIN else None
        return self._pairs_samples or (nodes is not None and self.sizes.B in nodes.softmax[0].value.shape[-2:])

    @property
    def _pairs_samples(self) -> bool:
        """Whether weights are a table of samples × samples."""
        tables = (n.value.shape for n in self.trace.softmax_nodes())
        return self.form.layout == PLAIN and any(shape.count(self.sizes.B) > 1 for shape in tables)


def _is_informed(nodes: AttentionNodes) -> bool:
    """Whether weights are finite and depend on the scores: a mask that we passed may have hidden every key."""
    weights = nodes.softmax[0].value
    return bool(torch.isfinite(weights).all()) and float(weights.std()) > 1e-9


def module_sizes(namespace: MutableMapping[str, Any]) -> dict[str, int]:
    """Sizes among the module's constants."""
    return {n: value for n, value in namespace.items() if type(value) is int and constructor_role(n) in SIZE_ROLES}


def stored_lengths(thing: Any, sizes: CallSizes) -> list[int]:
    """Sizes of stored square tables: where a mask is not sliced, only an input of that length passes."""
    tables = [b for m in modules(thing) for b in m.buffers()]
    tables += [t for m in modules(thing) for t in vars(m).values() if isinstance(t, Tensor)]
    square = {b.shape[-1] for b in tables if b.dim() >= 2 and b.shape[-1] == b.shape[-2] and 1 < b.shape[-1] <= 64}
    return sorted(square - {sizes.T})
