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
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from torch import nn

from headwise.errors import OptionError
from headwise.layer.attached import Attachment, attached
from headwise.study.passes import SilentCalls, split_name
from headwise.study.watch import attention_layers, without_fastpath


class Silenced:
    """A context in which some heads of a model are switched off; made by `silence`."""

    def __init__(self, model: nn.Module, layers: Mapping[str, Any], heads: Mapping[str, tuple[int, ...]]) -> None:
        self.heads = dict(heads)
        self._layers = layers
        self._silent = SilentCalls(model, layers, heads)
        self._stack = ExitStack()
        self._is_open = False

    def __enter__(self) -> Self:
        if self._is_open:
            raise OptionError("these heads are already silent; make another with headwise.silence(model, heads).")
        self._is_open = True
        silent = self._stack.enter_context(self._silent)
        self._stack.enter_context(without_fastpath(self._layers[name] for name in silent))
        self._stack.enter_context(attached(self._layers, {name: Attachment(silent=x) for name, x in silent.items()}))
        return self

    def __exit__(self, *problem: Any) -> None:
        self._is_open = False
        self._stack.__exit__(*problem)

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
    bases = {name: split_name(name, layers)[0] for name in heads}
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
