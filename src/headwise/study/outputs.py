"""What heads read and write: `watch(model, outputs=True)` keeps it for every call of every layer.

>>> from headwise import load_builtin, watch
>>> model = load_builtin()
>>> with torch.no_grad(), watch(model.gpt, outputs=True) as seen:
...     logits = model.gpt(model.tokens("The captain looked at the sea."))
>>> layer = seen.outputs["blocks.4.attention"]
>>> layer.read.shape, layer.written(heads=[2]).shape  # (B, H, T, Dv) and (B, 1, T, E)
(torch.Size([1, 8, 8, 32]), torch.Size([1, 1, 8, 256]))
>>> layer.by_value().received().total.shape  # a map of what the head takes, not of where it looks
torch.Size([1, 8, 8])

A head reads z = Σ weight · value. What it adds to the model is z times its part of the output projection. That part is
not looked up by name: the recorder sees which module receives what the heads read, and tries what it does. Some models
(Qwen3-Next) multiply z by a gate first. Whether they do that and nothing else is tried, too, when somebody asks.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.backends import Call
from headwise.errors import OptionError, StaleMapError
from headwise.layer import MultiHeadAttention, compat
from headwise.layer.attached import Attachment, Watcher, attached, detached
from headwise.study.passes import call_name
from headwise.study.samples import closeness, run, samples_of, taken
from headwise.weights import AttentionMap, Selector
from headwise.weights.indexing import axis_of
from headwise.weights.source import take
from headwise.weights.values import Contributions


class HeadOutputs:
    """What the heads of one call of one layer read and write; made by `watch(model, outputs=True)`.

    read: (B, H, T, Dv), what each head reads.
    weights: the attention map of the call.
    """

    def __init__(
        self,
        place: tuple[str, int],
        read: Tensor,
        weights: AttentionMap,
        value: Tensor | None,
        why_not: str,
        projection: "OutputProjection",
    ) -> None:
        self.layer, self.index = place  # the call of the layer in its pass
        self.name = self.layer
        self.read, self.weights, self._value, self._why_not = read, weights, value, why_not
        self._version = -1 if value is None or value.is_inference() else value._version
        self._projection = projection
        self._handed: Tensor | None = None  # what a module received that is not what the heads read, (B, T, H · Dv)

    @property
    def handed(self) -> Tensor:
        """What each head hands to the output projection, (B, H, T, Dv): what it reads, times a gate if there is one."""
        self._out  # noqa: B018 - finds the projection
        if not self._projection.gated:
            return self.read
        if self._handed is None:
            raise OptionError(f"the gates of {self.name!r} were not seen in this call.")
        B, H, T, D = self.read.shape
        return self._handed.reshape(B, T, H, D).transpose(1, 2)

    @property
    def gate(self) -> Tensor | None:
        """The factors by which the layer multiplies what its heads read, (B, H, T, Dv); None if it does not."""
        handed = self.handed
        if handed is self.read:
            return None
        return torch.where(self.read == 0, 0.0, handed / torch.where(self.read == 0, 1.0, self.read))

    @property
    def shape(self) -> torch.Size:
        """(B, H, T, Dv)."""
        return self.read.shape

    def __repr__(self) -> str:
        B, H, T, D = self.read.shape
        return f"HeadOutputs({self.name!r}, B={B}, H={H}, T={T}, Dv={D})"

    @property
    def value(self) -> Tensor:
        """The values (B, heads, S, Dv) that the call read."""
        if self._value is None:
            raise OptionError(f"the values of {self.name!r} are not known: {self._why_not}.")
        if self._version not in (-1, self._value._version):
            raise StaleMapError(f"the values of {self.name!r} were changed in place after the call, as caches do.")
        return self._value

    @property
    def out(self) -> Tensor:
        """The output projection of each head, (H, Dv, E): what it writes is `read @ out`."""
        out = self._out
        if self._projection.gated:
            raise OptionError(
                f"{self.name!r} multiplies what its heads read by a gate before its output projection, so no matrix "
                f"turns one into what they write. Use written(), contributions() or gate."
            )
        return out

    @property
    def _out(self) -> Tensor:
        """The output projection of each head, (H, Dv, E): what it writes is `handed @ _out`."""
        H, D = self.read.shape[1], self.read.shape[3]
        return self._projection.matrix(H * D, self.read).reshape(H, D, -1)

    @property
    def bias(self) -> Tensor:
        """What the output projection adds whatever the heads read, (E,); it belongs to no head."""
        self._out  # noqa: B018 - finds the projection
        return self._projection.constant(self.read)

    def written(self, *, heads: Selector | None = None, rows: Selector | None = None) -> Tensor:
        """What each head adds to the output of its layer, (B, heads, rows, E). The bias belongs to no head.

        Args:
            heads: which heads, as in `AttentionMap.select`; all by default, which takes H times the layer's output.
            rows: which queries.
        """
        read, out = self.handed, self._out
        for dim, item, name in ((1, heads, "head"), (2, rows, "query")):
            axis = range(read.shape[dim]) if item is None else axis_of(item, read.shape[dim], name)
            if axis is None:
                raise OptionError(f"written({item!r}): expected an int, a slice, a list or a 1-D tensor.")
            read = take(read, dim, axis)
            out = take(out, 0, axis) if dim == 1 else out
        return torch.einsum("bhtd,hde->bhte", read, out.to(read.dtype))

    def norms(self) -> Tensor:
        """‖what each head writes‖ at every query, (B, H, T)."""
        H = self.read.shape[1]
        return torch.cat([self.written(heads=head).norm(dim=-1) for head in range(H)], 1)

    def by_value(self, *, projected: bool = True) -> AttentionMap:
        """The map weighted by the norm of what each key's value adds: `AttentionMap.by_value`.

        Args:
            projected: measure values after the output projection, else before it.
        """
        if projected and not _one_factor_per_head(self.gate):
            raise OptionError(
                f"by_value() of {self.name!r}: this layer gates every number that a head reads, so the norm of what a "
                f"value adds differs from query to query. Use by_value(projected=False) or contributions(), in surveys "
                f"by='contribution'."
            )
        return self.weights.by_value(self.value, self._out if projected else None)

    def contributions(self, *, projected: bool = True, rows: Selector | None = None) -> Contributions:
        """The share of each key in what the heads write: `AttentionMap.contributions`.

        Args:
            projected: compare what heads write, after gates and the output projection, else what they read.
            rows: which queries.
        """
        weights, read, gate = self.weights, self.read, self.gate if projected else None
        if rows is not None:
            weights, read = weights.select(rows=rows), self._rows(read, rows)
            gate = None if gate is None else self._rows(gate, rows)
        return weights.contributions(self.value, read, self._out if projected else None, gate=gate)

    def _rows(self, x: Tensor, rows: Selector) -> Tensor:
        axis = axis_of(rows, x.shape[2], "query")
        assert axis is not None  # noqa: S101 - the map has taken these rows
        return take(x, 2, axis)


def as_projected(measure: Callable[..., Any], **options: Any) -> Any:
    """What a method such as `HeadOutputs.by_value` gives, without the output projection where that is not known."""
    try:
        return measure(**options)
    except OptionError:
        return measure(projected=False, **options)


def _one_factor_per_head(gate: Tensor | None) -> bool:
    """Whether gates are the same for all numbers of a head, so that they do not change shares."""
    if gate is None:
        return True
    largest, smallest = gate.amax(-1), torch.where(gate == 0, torch.inf, gate).amin(-1)
    return bool((largest - smallest <= 4 * torch.finfo(gate.dtype).eps * largest.abs()).all())


class Outputs(Mapping[str, HeadOutputs]):
    """What heads read and write, by the name of their layer; `outputs[name]` is from its last call.

    `headwise.patch` takes it as a source, and so do `mean()` and `resampled()`.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, Any]) -> None:
        self.in_order: list[HeadOutputs] = []  # the calls of all layers, as they came
        self._layers, self._model = dict(layers), model
        self._projections = {name: OutputProjection(name, layer, self._gated) for name, layer in layers.items()}
        self.given: tuple[tuple[Any, ...], dict[str, Any]] | None = None  # what the model was called with
        self.running = False  # whether the model is being called

    def __getitem__(self, name: str) -> HeadOutputs:
        calls = self.calls
        found = calls[name] if name in calls else [made for made in self.in_order if made.layer == name]
        if not found:
            raise KeyError(f"{name!r} was not seen; seen so far: {', '.join(calls) or 'none'}.")
        return found[-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def mean(self) -> dict[str, Tensor]:
        """The mean over samples, positions and calls of what each head reads, (1, H, 1, Dv), by layer."""
        found = {}
        for name, calls in self.calls.items():
            total = sum(call.read.detach().double().sum((0, 2)) for call in calls)
            count = sum(call.read.shape[0] * call.read.shape[2] for call in calls)
            found[name] = (total / count).to(calls[0].read.dtype)[None, :, None]  # type: ignore[union-attr]
        return found

    def resampled(self, seed: int = 0) -> dict[str, list[Tensor]]:
        """What heads read for another sample of the batch: samples are permuted, none stays in its place."""
        found: dict[str, list[Tensor]] = {}
        for name, calls in self.calls.items():
            B = calls[0].read.shape[0]
            if B < 2:
                raise OptionError(f"resampled(): {name!r} saw one sample; another run needs at least two in a batch.")
            order = derangement(B, seed).to(calls[0].read.device)
            found[name] = [call.read.detach()[order] for call in calls]
        return found

    @property
    def calls(self) -> dict[str, list[HeadOutputs]]:
        """The outputs of all passes, by the name of the layer, or of the call if a pass has several: "name@1"."""
        several = {made.layer for made in self.in_order if made.index}
        found: dict[str, list[HeadOutputs]] = {}
        for made in self.in_order:
            made.name = call_name(made.layer, made.index) if made.layer in several else made.layer
            found.setdefault(made.name, []).append(made)
        return found

    def attachment(self, name: str, watcher: Watcher, index: Callable[[], int | None]) -> Attachment:
        """What to attach to the layer `name`, so that its calls are kept here and `watcher` sees its maps.

        Args:
            name: the layer.
            watcher: sees every map.
            index: which call of the pass the present one is; None if it is not to be kept.
        """
        layer, projection, here = self._layers[name], self._projections[name], threading.local()

        def see(weights: AttentionMap) -> None:
            here.weights = weights
            watcher(weights)

        def observe(call: Call, read: Tensor) -> None:
            if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
                return  # a backward pass with gradient checkpointing repeats calls that were seen already
            number = index()
            if number is None:
                return
            value, why_not = _value_of(call, read, layer)
            made = HeadOutputs((name, number), read, here.weights, value, why_not, projection)
            projection.expect(made)
            self.in_order.append(made)

        return Attachment(watcher=see, observer=observe)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look for output projections while open."""
        unknown = [projection for projection in self._projections.values() if projection.module is None]
        with ExitStack() as stack:
            if unknown:
                attending = {id(layer) for layer in self._layers.values()}
                holds = [m for m in self._model.modules() if not any(id(x) in attending for x in m.modules())]
                for module in holds:
                    stack.callback(module.register_forward_pre_hook(_seeker(unknown)).remove)
                for projection in unknown:
                    stack.callback(self._layers[projection.name].register_forward_hook(projection.leave).remove)
            yield

    def _gated(self, name: str) -> bool:
        """Whether a layer multiplies what its heads read by factors that do not depend on it; tried once for all."""
        modules = {name: x.last for name, x in self._projections.items() if x.last is not None}
        known = {name: _gates.get(self._layers[name]) for name in modules}
        if known[name] is None and self.given is not None and not self.running:
            found = tried_gates(self._model, self._layers, modules, self.given)
            _gates.update({self._layers[name]: found.get(name, False) for name in modules})
        return _gates.get(self._layers[name], False)


_gates: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()  # layers that were tried


def _value_of(call: Call, read: Tensor, layer: Any) -> tuple[Tensor | None, str]:
    """The values of a call, or why they say nothing about what the heads read."""
    if getattr(layer, "gate", None) is not None:
        return None, "this layer multiplies what heads read by a gate"
    if call.value.shape[3] != read.shape[3]:
        return None, "this layer reads latents, from which values are made later"
    if call.query.shape[2] == 1 and call.key.shape[2] > 1:
        return None, "a generation step does not keep the whole cache alive"
    return call.value, ""


def derangement(count: int, seed: int) -> Tensor:
    """A random permutation of `count` numbers that leaves none in its place."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    found = torch.empty_like(order)
    found[order] = order.roll(1)
    return found


# Output projections ------------------------------------------------------------------------------------------------


class OutputProjection:
    """The map from what heads read, side by side, to the output of a layer, found by watching where it goes.

    Args:
        name: the layer's name.
        layer: the layer.
        try_gates: whether the layer of this name multiplies what its heads read by gates, before `last` receives it.
    """

    def __init__(self, name: str, layer: Any, try_gates: Callable[[str], bool]) -> None:
        self.name = name
        self.module: nn.Module | None = None
        self._candidates: list[nn.Module] = []
        self.last: nn.Module | None = None  # the last module of the layer that received something of this width
        self.gated = False
        self._try_gates, self._inside = try_gates, set(layer.modules())
        self._waiting = threading.local()
        self._known: Tensor | None = None
        if isinstance(layer, MultiHeadAttention | compat.MultiheadAttention):
            self.module = nn.Identity() if layer.out_proj is None else layer.out_proj

    def expect(self, made: HeadOutputs) -> None:
        """From now on, a module that receives what these heads read, merged, may be the output projection."""
        if (self.module is None or self.gated) and not self._candidates:
            self._waiting.made, self._waiting.inside = made, True

    def offer(self, module: nn.Module, x: Any) -> None:
        """Consider a module that is about to be called with `x`."""
        made: HeadOutputs | None = getattr(self._waiting, "made", None)
        if made is None or not isinstance(x, Tensor) or x.numel() != made.read.numel():
            return
        B, H, T, D = made.read.shape
        if x.shape[-1] != H * D:
            return
        if torch.equal(x.detach().reshape(B, T, H, D), made.read.detach().transpose(1, 2)):
            self._candidates.append(module)
            made._handed = None
        elif self._waiting.inside and module in self._inside and not self._candidates:
            self.last, made._handed = module, x

    def leave(self, *_: Any) -> None:
        """The layer returns: only a module outside may still receive what its heads read."""
        self._waiting.inside = False

    def matrix(self, width: int, like: Tensor) -> Tensor:
        """The linear part of the projection, (H·Dv, E)."""
        if self._known is None or self._known.shape[0] != width:
            self._waiting = threading.local()
            self._known = self._found(width, like)
        return self._known

    def constant(self, like: Tensor) -> Tensor:
        """What the projection makes of nothing, (E,)."""
        assert self.module is not None and self._known is not None  # noqa: S101, PT018 - `matrix` was called
        with torch.no_grad():
            found: Tensor = self.module.forward(torch.zeros(1, 1, self._known.shape[0]).to(like))[0, 0]
        return found

    def _found(self, width: int, like: Tensor) -> Tensor:
        for module in [self.module] if self.module is not None else self._candidates:
            found = linear_part(module, width, like)
            if found is not None:
                self.module = module
                return found
        found = None if self._candidates or self.last is None else linear_part(self.last, width, like)
        if found is not None and self._try_gates(self.name):
            self.module, self.gated = self.last, True
            return found
        raise OptionError(
            f"the output projection of {self.name!r} is not known: no linear module of the model receives what its "
            f"heads read. The model may normalize or gate it first, or compute in its own code. What needs no "
            f"projection works: read, by_value(projected=False), contributions(projected=False), silence, importance."
        )


def _seeker(projections: list[OutputProjection]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def offer(module: nn.Module, args: tuple[Any, ...]) -> None:
        for projection in projections:
            projection.offer(module, args[0] if args else None)

    return offer


def tried_gates(
    model: nn.Module, layers: Mapping[str, Any], modules: Mapping[str, nn.Module], given: tuple[Any, Any]
) -> dict[str, bool]:
    """For each layer, whether its module receives what heads read times factors that do not depend on it.

    The model reads one sample in two rows. In the second row, what heads read is multiplied by random numbers: the
    module must receive the same multiples. It then gets the first row twice, so that later layers see two equal rows.
    """
    names = inspect.signature(model.forward).parameters
    inputs = dict(zip(names, given[0], strict=False)) | given[1]
    random: dict[str, Tensor] = {}
    found: dict[str, bool] = {}

    def changed(name: str) -> Callable[[Tensor], Tensor]:
        def change(read: Tensor) -> Tensor:
            first = read.chunk(2)[0]
            generator = torch.Generator().manual_seed(0)
            random[name] = torch.rand(first.shape, generator=generator).to(first) + 0.5
            return torch.cat([first, first * random[name]])

        return change

    def compared(name: str) -> Callable[..., Any]:
        def compare(module: nn.Module, args: tuple[Any, ...]) -> Any:
            first, second = args[0].chunk(2)
            expected = first * random[name].transpose(1, 2).reshape(first.shape)
            tolerance = closeness(first) * expected.abs().max()
            found[name] = bool((second - expected).abs().max() <= tolerance) and found.get(name, True)
            return (torch.cat([first, first]), *args[1:])

        return compare

    with torch.no_grad(), detached(), ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_pre_hook(compared(name)).remove)
        stack.enter_context(attached(layers, {name: Attachment(change=changed(name)) for name in modules}))
        run(model, taken(inputs, torch.tensor([0, 0]), samples_of(inputs, "watch")))
    return found


def linear_part(module: nn.Module, width: int, like: Tensor) -> Tensor | None:
    """The matrix (width, E) of a module that is linear in its input, up to a constant; None for any other.

    It is the module's weight if that explains what the module does, in either orientation, else what the module makes
    of the unit vectors: so adapters and quantized layers work, too.
    """
    try:
        with torch.no_grad():
            return _linear_part(module, width, like)
    except (TypeError, ValueError, RuntimeError, IndexError):  # it takes other arguments, or another shape
        return None


def _linear_part(module: nn.Module, width: int, like: Tensor) -> Tensor | None:
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, width, generator=generator).to(like)
    nothing = module.forward(torch.zeros_like(sample[None, :1]))[0]
    once = module.forward(sample[None])[0] - nothing
    twice = module.forward((sample[:1] - 2 * sample[1:])[None])[0] - nothing
    tolerance = 64 * torch.finfo(like.dtype).eps * (once.abs().max() + nothing.abs().max())
    if not (twice - (once[:1] - 2 * once[1:])).abs().max() <= 4 * tolerance:
        return None
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
        for matrix in (weight.T, weight):
            if matrix.shape == (width, once.shape[1]) and ((sample @ matrix) - once).abs().max() <= tolerance:
                return matrix.detach()
    unit = torch.eye(width).to(like)
    return torch.cat([module.forward(part[None])[0] - nothing for part in unit.split(1024)])
