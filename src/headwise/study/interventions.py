"""Interventions: `silence` switches heads off, to see what a model does without them.

>>> from headwise import MultiHeadAttention, silence
>>> model = torch.nn.Sequential(MultiHeadAttention(64, 4), torch.nn.ReLU(), MultiHeadAttention(64, 4))
>>> with silence(model, {"2": [0, 3]}):
...     y = model(torch.randn(1, 10, 64))

A silent head still attends, but its output is zero, as if its columns of the output projection were zero. The model's
output and its later heads may change, which says more about a head's importance than its attention weights do. A name
such as "attention@3" stands for one call of a layer that the model calls several times in a pass; see `watch`.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from headwise.errors import OptionError
from headwise.layer.attached import Attachment, attached
from headwise.study.passes import Passes, call_name, split_name
from headwise.study.watch import attention_layers, without_fastpath


class Silenced:
    """A context in which some heads of a model are switched off; made by `silence`."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Any], heads: Mapping[str, tuple[int, ...]]) -> None:
        self.heads = dict(heads)
        self._layers = layers
        self._calls: dict[str, dict[int | None, tuple[int, ...]]] = {}  # by layer and call; None is every call
        for name, which in self.heads.items():
            base, index = split_name(name, layers)
            self._calls.setdefault(base, {})[index] = which
        single = [layers[name] for name, calls in self._calls.items() if set(calls) != {None}]
        self._passes = Passes(model, single, breaks=True)
        self._stack = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise OptionError("these heads are already silent; make another with headwise.silence(model, heads).")
        self._is_open = True
        self._stack.enter_context(without_fastpath(self._layers[name] for name in self._calls))
        self._stack.enter_context(self._passes)
        silent = {name: Attachment(silent=self._silent(name)) for name in self._calls}
        self._stack.enter_context(attached(self._layers, silent))
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        self._is_open = False
        self._stack.close()
        if kind is None:
            self._check_calls()

    def _silent(self, name: str) -> tuple[int, ...] | Callable[[], tuple[int, ...]]:
        """The heads of a layer to switch off, or a function that knows which call this is."""
        calls, layer = self._calls[name], self._layers[name]
        if set(calls) == {None}:
            return calls[None]

        def of_this_call() -> tuple[int, ...]:
            if torch._C._current_graph_task_id() != -1:
                raise OptionError(
                    f"silence({name!r}): when gradient checkpointing repeats a call, it is not known which one it was. "
                    f"Run the model without it, or silence every call: {name!r} without @."
                )
            return (*calls.get(None, ()), *calls.get(self._passes.index(layer), ()))

        return torch.compiler.disable(of_this_call)  # type: ignore[no-any-return]

    def _check_calls(self) -> None:
        """Raise if the model never made a call whose heads should have been silent."""
        for name, calls in self._calls.items():
            times = self._passes.most[id(self._layers[name])]
            late = [index for index in calls if index is not None and index >= times > 0]
            if late:
                raise OptionError(
                    f"silence: {call_name(name, late[0])!r} was never called; a pass of this model calls {name!r} "
                    f"{times} time{'s' * (times != 1)}, counted from 0."
                )

    def __repr__(self) -> str:
        return f"Silenced({self.heads})"


def silence(model: nn.Module, heads: Mapping[str, int | Iterable[int]]) -> Silenced:
    """A context in which some heads of a model output zeros. Nothing is left on the model afterwards.

    It holds for calls of the thread or task that opened it, and of tasks started from there.

    Args:
        model: the model, or a single layer (whose name is then "").
        heads: which heads of which layers, by the layer's name in `model.named_modules()`. In a layer that is called
            several times in a pass, they are silent in every call; "name@3" is its fourth call alone.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(f"silence({type(model).__name__}): expected a torch.nn.Module, such as load_builtin().gpt.")
    layers = attention_layers(model, "silence")
    if not isinstance(heads, Mapping):
        raise OptionError(
            f"silence(heads={heads!r}): expected heads by layer, such as {{{next(iter(layers))!r}: [0]}}."
        )
    bases = {name: split_name(name, layers)[0] if isinstance(name, str) else name for name in heads}
    unknown = [name for name in heads if bases[name] not in layers]
    if unknown:
        raise OptionError(f"silence: {unknown[0]!r} is not a headwise layer of this model; there are {list(layers)}.")
    shared = [name for name in heads if getattr(layers[bases[name]], "_spread", None) is not None]
    if shared:
        raise OptionError(f"silence: {shared[0]!r} is sharded over ranks; silence heads before sharding.")
    asked = {name: _checked(name, layers[bases[name]], which) for name, which in heads.items()}
    return Silenced(model, layers, {name: which for name, which in asked.items() if which})


def _checked(name: str, layer: Any, heads: int | Iterable[int]) -> tuple[int, ...]:
    """The heads as integers, checked against the number of heads if the layer knows it."""
    which = tuple(heads) if isinstance(heads, Iterable) else (heads,)
    most = getattr(layer, "num_heads", None)
    most = most if isinstance(most, int) else sys.maxsize
    for head in which:
        if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head < most:
            there = f"one of 0 to {most - 1}" if most < sys.maxsize else "an integer from 0 up"
            raise OptionError(f"silence({name!r}: {head!r}): expected {there}.")
    return which
