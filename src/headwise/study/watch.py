"""`watch`: collect the attention maps of a whole model without changing its code.

>>> from headwise import MultiHeadAttention, sink, watch
>>> model = torch.nn.Sequential(MultiHeadAttention(64, 4), torch.nn.ReLU(), MultiHeadAttention(64, 4))
>>> with watch(model) as seen:
...     y = model(torch.randn(1, 10, 64))
>>> seen["2"].entropy().shape
torch.Size([1, 4, 10])
>>> with watch(model, layers=["2"], statistics={"entropy": True, "masses": {"sink": sink()}}) as seen:
...     y = model(torch.randn(1, 10, 64))
>>> seen["2"]
Panel(entropy=(1, 4, 10), masses['sink']=(1, 4, 10))
"""

import dataclasses
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layer import MultiHeadAttention, compat
from headwise.layer.attached import Attachment, attached
from headwise.shapes import check_flag
from headwise.study.outputs import Outputs
from headwise.study.passes import Hook, Passes, call_name, split_name
from headwise.weights import AttentionMap, Selector, display

Layer = MultiHeadAttention | compat.MultiheadAttention
Statistics = Mapping[str, Any] | Callable[[AttentionMap], Any]


class Watched(Mapping[str, Any]):
    """Attention maps by the name of their layer in the model, or statistics of them; made by `watch`.

    `seen[name]` is from the last pass of the model; `seen.calls[name]` has those of all passes. A module that is called
    several times in one pass is several layers, "name@0", "name@1", ...; `seen["name"]` is then its last call. While a
    function of the user's reduces a map, `seen.current` is the name of its layer.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Layer],
        heads: Selector | None,
        statistics: Statistics | None,
        only: Mapping[str, Collection[int]] | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        self._outputs = outputs
        self.calls: dict[str, list[Any]] = {}
        self.current = ""
        self._layers, self._heads, self._statistics = dict(layers), heads, statistics
        self._passes, self._only = Passes(model, self._layers.values()), dict(only or {})
        self._last: dict[str, str] = {}  # the name of the last call of each layer
        self._model, self._inputs = weakref.ref(model), threading.local()
        self._stack = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise OptionError("this watch is already open; make another with headwise.watch(model).")
        self._is_open = True
        self._stack.enter_context(without_fastpath(self._layers.values()))
        self._stack.enter_context(self._passes)
        self._remember_calls()
        if self._outputs is not None:
            self._stack.enter_context(self._outputs.recording())
        self._stack.enter_context(attached(self._layers, {name: self._attachment(name) for name in self._layers}))
        return self

    @property
    def outputs(self) -> Outputs:
        """What heads read and write, by the name of their layer, if `watch` was asked for outputs."""
        if self._outputs is None:
            raise OptionError("the outputs of heads were not kept; use headwise.watch(model, outputs=True).")
        return self._outputs

    def _remember_calls(self) -> None:
        """Remember what the model is called with, which `AttentionMap.why` and trials of layers need."""

        def remember(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.compiler.is_compiling():
                self._inputs.given = (args, kwargs) if all(map(_is_plain, (*args, *kwargs.values()))) else None
                if self._outputs is not None:
                    self._outputs.given, self._outputs.running = self._inputs.given, True

        def done(*_: Any) -> None:
            if self._outputs is not None:
                self._outputs.running = False

        model = self._model()
        assert model is not None  # noqa: S101 - the caller holds it
        self._stack.callback(model.register_forward_pre_hook(Hook(remember), with_kwargs=True).remove)
        self._stack.callback(model.register_forward_hook(Hook(done), always_call=True).remove)

    def _attachment(self, name: str) -> Attachment:
        watcher = self._watcher(name)
        if self._outputs is None:
            return Attachment(watcher)
        return self._outputs.attachment(name, watcher, lambda: self._index(name))

    def _index(self, name: str) -> int | None:
        """Which call of the layer in its pass this is; None if it is not watched."""
        index = self._passes.index(self._layers[name])
        return None if name in self._only and index not in self._only[name] else index

    def __exit__(self, *problem: object) -> None:
        self._is_open = False
        self._stack.close()

    def _repr_html_(self) -> str:
        return display.html(self)

    def _watcher(self, name: str) -> Callable[[AttentionMap], None]:
        def watcher(weights: AttentionMap) -> None:
            if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
                return  # a backward pass with gradient checkpointing repeats calls that were seen already
            index = self._index(name)
            if index is None:
                return
            if self._heads is not None:
                weights = weights.select(heads=self._heads)
            self.current = self._name(name, index)
            found = self._reduced(weights)
            if isinstance(found, AttentionMap):
                found._origin = Origin(self._model, name, index, getattr(self._inputs, "given", None))
            self.calls.setdefault(self.current, []).append(found)

        return watcher

    def _name(self, layer: str, index: int) -> str:
        """The name of this call: that of the layer, until it is called for the second time in one pass."""
        if index and layer in self.calls:  # it turns out that the calls so far were the first ones of their passes
            first = call_name(layer, 0)
            self.calls = {first if name == layer else name: calls for name, calls in self.calls.items()}
        several = index or layer in self._only or self._last.get(layer, layer) != layer
        self._last[layer] = call_name(layer, index) if several else layer
        return self._last[layer]

    def _reduced(self, weights: AttentionMap) -> Any:
        """The map, or its statistics; the map is then not kept."""
        if self._statistics is None:
            return weights
        with torch.no_grad():
            weights = weights.detach()
            return self._statistics(weights) if callable(self._statistics) else weights.panel(**self._statistics)

    def __getitem__(self, name: str) -> Any:
        name = self._last.get(name, name)
        if name not in self.calls:
            raise KeyError(f"{name!r} was not seen; seen so far: {', '.join(self.calls) or 'none'}.")
        return self.calls[name][-1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        counts = {name: f": {len(calls)} calls" if len(calls) != 1 else "" for name, calls in self.calls.items()}
        return f"Watched({', '.join(f'{name!r}{count}' for name, count in counts.items())})"


def _is_plain(x: Any) -> bool:
    """Whether an argument of a model can be kept: a cache would stay alive, and is changed by the call."""
    return x is None or isinstance(x, Tensor | int | float | str)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a map came from, so that it can be asked why; a map keeps the inputs of the call, but not the model."""

    model: Callable[[], nn.Module | None]
    layer: str
    index: int
    given: tuple[tuple[Any, ...], dict[str, Any]] | None

    def __call__(self, sample: int, head: int, query: int, key: int) -> Any:
        """The `Why` of one pair of a sample."""
        from headwise.study.residual import why_of

        model = self.model()
        if model is None:
            raise OptionError("why(): the model of this map does not exist anymore; keep a reference to it.")
        if self.given is None:
            raise OptionError(
                "why(): the call that made this map had a cache or other objects among its arguments, or was not a "
                "call of the watched model. Watch a call of the whole model with tensors alone."
            )
        names = inspect.signature(model.forward).parameters
        inputs = dict(zip(names, self.given[0], strict=False)) | self.given[1]
        return why_of(model, inputs, (self.layer, self.index), (sample, head, query, key))


def watch(
    model: nn.Module,
    *,
    layers: Collection[str] | Callable[[str], bool] | None = None,
    heads: Selector | None = None,
    statistics: Statistics | None = None,
    outputs: bool = False,
) -> Watched:
    """A context that collects the attention map of every call of every headwise layer in `model`.

    Outputs and speed do not change, and nothing is left on the model afterwards. Only calls of the thread or task that
    opened it are seen, and of tasks started from there; copies of the model are not.

    Args:
        model: the model, or a single layer (whose name is then "").
        layers: names of the layers to watch, as in `model.named_modules()`, or a function from a name to True or False;
            all by default. "name@3" is the fourth call, in every pass, of a layer that is called several times.
        heads: which heads to keep, as in `AttentionMap.select`.
        statistics: what to keep instead of the map: arguments of `AttentionMap.panel`, or a function of the map.
        outputs: also keep what every head reads and writes, in `seen.outputs`.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"watch({type(model).__name__}): expected a torch.nn.Module, such as load_builtin().gpt.")
    if statistics is not None and not callable(statistics) and not isinstance(statistics, Mapping):
        raise OptionError(
            f"watch(statistics={type(statistics).__name__}): expected a dictionary of arguments for panel, "
            f"such as {{'entropy': True}}, or a function of a map."
        )
    chosen, only = _chosen(attention_layers(model, "watch"), layers)
    kept = Outputs(model, chosen) if check_flag("outputs", outputs) else None
    return Watched(model, chosen, heads, statistics, only, kept)


def attention_layers(model: nn.Module, verb: str) -> dict[str, Any]:
    """Every attention layer of a model that runs on headwise, by name; errors begin with `verb`."""
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, Layer)}
    if "headwise.huggingface" in sys.modules:  # without it no model can run on attn_implementation="headwise"
        from headwise.huggingface import attention_modules

        found |= attention_modules(model)
    if not found:
        cure = ""
        if getattr(getattr(model, "config", None), "_attn_implementation", None) == "headwise":
            cure = " It already runs on attn_implementation='headwise', but none of its modules attends through it."
        elif hasattr(model, "set_attn_implementation"):
            cure = " Run `import headwise.huggingface`, then model.set_attn_implementation('headwise')."
        elif any(isinstance(module, nn.MultiheadAttention) for module in model.modules()):
            cure = " It has torch's nn.MultiheadAttention: headwise.replace(model) puts ours in their place."
        raise OptionError(f"{verb}({type(model).__name__}): there is no headwise attention in this model.{cure}")
    return found


class _FastPath:
    """Whether torch's fast path is on, a switch of the whole process, and how many contexts need it off."""

    lock = threading.Lock()
    users = 0
    before = True


@contextmanager
def without_fastpath(layers: Iterable[Any]) -> Iterator[None]:
    """Switch off torch's fast path, in which nn.TransformerEncoderLayer does not call its attention in evaluation."""
    if not any(isinstance(layer, compat.MultiheadAttention) for layer in layers):
        yield
        return
    with _FastPath.lock:
        if _FastPath.users == 0:
            _FastPath.before = torch.backends.mha.get_fastpath_enabled()
        _FastPath.users += 1
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        with _FastPath.lock:
            _FastPath.users -= 1
            if _FastPath.users == 0:
                torch.backends.mha.set_fastpath_enabled(_FastPath.before)


def _chosen(
    found: dict[str, Layer], layers: Collection[str] | Callable[[str], bool] | None
) -> tuple[dict[str, Layer], dict[str, set[int]]]:
    """The layers to watch, and for some of them which calls only."""
    if layers is None:
        return found, {}
    if callable(layers):
        return {name: layer for name, layer in found.items() if layers(name)}, {}
    asked = [split_name(name, found) for name in ([layers] if isinstance(layers, str) else layers)]
    unknown = [name for name, _ in asked if name not in found]
    if unknown:
        raise OptionError(
            f"watch(layers=...): {unknown[0]!r} is not a headwise layer of this model; there are {list(found)}."
        )
    only = {name: {index for other, index in asked if other == name and index is not None} for name, _ in asked}
    whole = {name for name, index in asked if index is None}
    return {name: found[name] for name, _ in asked}, {name: few for name, few in only.items() if name not in whole}
