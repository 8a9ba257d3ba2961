"""Which call of a layer this is, within one forward pass of its model.

A model may call one module several times in a pass: ALBERT runs one layer twelve times. Every call is then a layer of
its own, named "attention@0", "attention@1", ... in the order of the calls. Generating text, on the other hand, runs
many passes, and call 0 of each is the same layer. A pass is a call of the outermost module that contains the layer.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from headwise.errors import OptionError

SIGN = "@"
Things = tuple[Any, ...]


def call_name(name: str, index: int) -> str:
    """The name of one call of a layer."""
    return f"{name}{SIGN}{index}"


def split_name(name: str, layers: Iterable[str]) -> tuple[str, int | None]:
    """The layer and the number of the call that a name stands for; None for all its calls."""
    base, _, index = name.rpartition(SIGN) if isinstance(name, str) else (name, "", "")
    if name in layers or base not in layers or not (index.isascii() and index.isdigit()):
        return name, None
    return base, int(index)


class Hook:
    """A hook of a module. A copy of the module gets one that does nothing."""

    keeps_output = True  # it returns nothing, so callers get what the module returned

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self.call = call

    def __call__(self, *arguments: Any) -> None:
        if self.call is not None:
            self.call(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Hook":
        return Hook()

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


class Passes:
    """A context that counts the calls of some layers of a model; made for one `watch` or `silence`.

    Each thread counts its own passes.

    Args:
        model: the model.
        layers: some layers of it.
        breaks: whether to count in compiled models too, where each count is a graph break; otherwise every call counts
            as a pass of its own there.
    """

    def __init__(self, model: nn.Module, layers: Iterable[nn.Module], *, breaks: bool = False) -> None:
        self.layers, self.breaks = list(layers), breaks
        inside = {id(layer) for layer in self.layers}
        modules = list(model.modules()) if inside else []
        self.around = [
            module
            for module in modules
            if id(module) not in inside and any(id(part) in inside for part in module.modules())
        ]
        self.most: Counter[int] = Counter()  # by id: the most calls of a layer in one pass
        self._here = threading.local()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        handles: list[Any] = []
        for module in self.around:
            handles.append(module.register_forward_pre_hook(self._hook(self._begin)))
            handles.append(module.register_forward_hook(self._hook(self._end), always_call=True))
        handles += [layer.register_forward_pre_hook(self._hook(self._count), prepend=True) for layer in self.layers]
        for handle in handles:
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def _hook(self, call: Callable[..., None]) -> Hook:
        return Hook(torch.compiler.disable(call) if self.breaks else call)

    def index(self, layer: nn.Module) -> int:
        """How many calls of the layer preceded the present one in this pass."""
        return max(self._counts[id(layer)] - 1, 0)

    @property
    def _counts(self) -> Counter[int]:
        if not hasattr(self._here, "counts"):
            self._here.counts, self._here.depth = Counter(), 0
        found: Counter[int] = self._here.counts
        return found

    def _begin(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            counts = self._counts
            if self._here.depth == 0:
                counts.clear()
            self._here.depth += 1

    def _end(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._counts is not None:
            self._here.depth = max(self._here.depth - 1, 0)

    def _count(self, layer: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        counts = self._counts
        if self._here.depth == 0:  # called alone
            counts.clear()
        counts[id(layer)] += 1
        self.most[id(layer)] = max(self.most[id(layer)], counts[id(layer)])


class ByCall:
    """A context that knows what is done to the heads of each layer, in every call or in some.

    Entering it gives, by the name of the layer, the things to do, or a function that returns those of the present call.

    Args:
        model: the model.
        layers: its layers by name.
        things: what to do, by the name of a layer or of a call: heads to silence, or changes to make.
        verb: what errors begin with.
    """

    def __init__(
        self, model: nn.Module, layers: Mapping[str, Any], things: Mapping[str, Things], verb: str = "silence"
    ) -> None:
        self.layers, self.verb = layers, verb
        self.calls: dict[str, dict[int | None, Things]] = {}  # by layer and call; None is every call
        for name, which in things.items():
            base, index = split_name(name, layers)
            self.calls.setdefault(base, {})[index] = which
        single = [layers[name] for name, calls in self.calls.items() if set(calls) != {None}]
        self.passes = Passes(model, single, breaks=True)

    def __enter__(self) -> dict[str, Things | Callable[[], Things]]:
        self.passes.__enter__()
        return {name: self._things(name) for name in self.calls}

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        self.passes.__exit__(kind, *problem)
        if kind is None:
            self._check()

    def _things(self, name: str) -> Things | Callable[[], Things]:
        calls, layer = self.calls[name], self.layers[name]
        if set(calls) == {None}:
            return calls[None]

        def of_this_call() -> Things:
            if torch._C._current_graph_task_id() != -1:
                raise OptionError(
                    f"{self.verb}({name!r}): when gradient checkpointing repeats a call, it is not known which one it "
                    f"was. Run the model without it, or {self.verb} every call: {name!r} without @."
                )
            return (*calls.get(None, ()), *calls.get(self.passes.index(layer), ()))

        return torch.compiler.disable(of_this_call)  # type: ignore[no-any-return]

    def _check(self) -> None:
        """Raise if the model never made a call in which something should have been done."""
        for name, calls in self.calls.items():
            times = self.passes.most[id(self.layers[name])]
            late = [index for index in calls if index is not None and index >= times > 0]
            if late:
                raise OptionError(
                    f"{self.verb}: {call_name(name, late[0])!r} was never called; a pass of this model calls {name!r} "
                    f"{times} time{'s' * (times != 1)}, counted from 0."
                )
