"""`silence`: heads switched off, to see what a model does without them.

>>> from headwise import MultiHeadAttention, silence
>>> model = torch.nn.Sequential(MultiHeadAttention(64, 4), torch.nn.ReLU(), MultiHeadAttention(64, 4))
>>> with silence(model, {"2": [0, 3]}):
...     y = model(torch.randn(1, 10, 64))

A silent head looks as ever, and what it has read counts as zeros: the same as zeros in its columns of the output
projection. What the model's other heads do may change with it, so that this tells more than the head's weights do.
"""

import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from headwise.errors import OptionError
from headwise.layer import compat
from headwise.study.watch import attention_layers


class Silenced:
    """A context in which some heads of a model are switched off; made by `silence`."""

    def __init__(self, layers: Mapping[str, Any], heads: Mapping[str, tuple[int, ...]]) -> None:
        self.heads = dict(heads)
        self._layers = layers
        self._before: dict[str, tuple[int, ...]] = {}
        self._torchs_shortcut = True

    def __enter__(self) -> Self:
        if self._before:
            raise OptionError("these heads are already silent; make another with headwise.silence(model, heads).")
        for name, heads in self.heads.items():
            layer = self._layers[name]
            self._before[name] = getattr(layer, "_silent", ())
            layer._silent = tuple(sorted({*self._before[name], *heads}))
        # In evaluation nn.TransformerEncoderLayer would pass its attention by and use the parameters itself.
        self._torchs_shortcut = torch.backends.mha.get_fastpath_enabled()
        if any(isinstance(self._layers[name], compat.MultiheadAttention) for name in self.heads):
            torch.backends.mha.set_fastpath_enabled(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, before in self._before.items():
            self._layers[name]._silent = before
            if not before:
                del self._layers[name]._silent  # back to the class's own, or to none
        self._before.clear()
        torch.backends.mha.set_fastpath_enabled(self._torchs_shortcut)

    def __repr__(self) -> str:
        return f"Silenced({self.heads})"


def silence(model: nn.Module, heads: Mapping[str, int | Iterable[int]]) -> Silenced:
    """A context in which some heads of a model add nothing; after it nothing is left on the model.

    Args:
        model: the model, or a single layer (whose name is then "").
        heads: which heads of which layers, by the layer's name in `model.named_modules()`.
    """
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"silence({type(model).__name__}): expected a torch.nn.Module, such as model.gpt of a built-in."
        )
    layers = attention_layers(model, "silence")
    if not isinstance(heads, Mapping):
        raise OptionError(
            f"silence(heads={heads!r}): expected heads by layer, such as {{{next(iter(layers))!r}: [0]}}."
        )
    unknown = [name for name in heads if name not in layers]
    if unknown:
        raise OptionError(f"silence: {unknown[0]!r} is no headwise layer of this model; there are {list(layers)}.")
    shared = [name for name in heads if getattr(layers[name], "_spread", None) is not None]
    if shared:
        raise OptionError(f"silence: {shared[0]!r} is spread over ranks; silence heads of the model before it is.")
    asked = {name: _checked(name, layers[name], which) for name, which in heads.items()}
    return Silenced(layers, {name: which for name, which in asked.items() if which})


def _checked(name: str, layer: Any, heads: int | Iterable[int]) -> tuple[int, ...]:
    """The heads as whole numbers; how many there are, only headwise layers say before they run."""
    which = tuple(heads) if isinstance(heads, Iterable) else (heads,)
    most = getattr(layer, "num_heads", None)
    most = most if isinstance(most, int) else sys.maxsize
    for head in which:
        if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head < most:
            there = f"one of 0 to {most - 1}" if most < sys.maxsize else "a whole number from 0 up"
            raise OptionError(f"silence({name!r}: {head!r}): expected {there}.")
    return which
