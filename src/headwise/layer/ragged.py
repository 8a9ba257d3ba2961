"""Samples of different length without padding: a jagged nested tensor becomes one row of packed documents and back."""

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.layer.positions import Rotary
from headwise.masks import Mask, documents

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention


class Packed(NamedTuple):
    """Samples one after the other."""

    tokens: Tensor  # (1, total, E)
    mask: Mask  # each sees its own
    positions: Tensor | None  # (total,), counted anew in each, for a rotary
    offsets: Tensor

    @classmethod
    def of(cls, layer: "MultiHeadAttention", x: Tensor, key: object, **refused: Any) -> Self:
        """The samples of a jagged nested tensor (B, *, E) in a row."""
        _check(layer, x, key, refused)
        if x.lengths() is not None:  # type: ignore[attr-defined]
            x = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)  # without the holes
        offsets: Tensor = x.offsets()  # type: ignore[attr-defined]
        lengths, tokens = offsets.diff(), x.values()
        total = tokens.shape[0]
        if layer.context_length is not None and lengths.numel() and int(lengths.max()) > layer.context_length:
            raise ShapeError(
                f"the longest sample has {int(lengths.max())} tokens and this layer was made for context_length="
                f"{layer.context_length}. Make it longer, or leave context_length out."
            )
        samples = torch.arange(len(lengths), device=tokens.device)
        ids = torch.repeat_interleave(samples, lengths, output_size=total)
        positions = None
        if isinstance(layer.position, Rotary):
            positions = torch.arange(total, device=tokens.device) - offsets[:-1][ids]
        return cls(tokens[None], documents(ids), positions, offsets)

    def nested(self, output: Tensor) -> Tensor:
        """(1, total, E) as samples again."""
        return torch.nested.nested_tensor_from_jagged(output[0], self.offsets)


def _check(layer: "MultiHeadAttention", x: Tensor, key: object, refused: dict[str, Any]) -> None:
    if x.layout != torch.jagged or x.dim() != 3 or x._ragged_idx != 1:  # type: ignore[attr-defined]
        raise ShapeError(
            "a nested tensor that is not (B, *, E) in jagged layout; expected "
            "torch.nested.nested_tensor([(t, E), ...], layout=torch.jagged)."
        )
    if key is not None and key is not x:
        raise OptionError("nested tensors are for self-attention: mha(x). Pad them for mha(query, key, value).")
    for name, value in refused.items():
        if value is not None:
            raise OptionError(f"{name}= beside a nested tensor: leave it out. Masks of the layer and causal= act.")
    if layer.mask is not None and not layer.mask.banded:
        raise OptionError(
            f"this layer's mask {layer.mask!r} names single keys, and packed samples have other numbers. Pad the "
            f"samples, or use masks of distances: causal(), window(...)."
        )
