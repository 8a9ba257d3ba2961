"""Samples of different length without padding: a jagged nested tensor becomes one row of packed documents and back."""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.mask_algebra import Mask
from headwise.masks import documents


class Packed(NamedTuple):
    """Samples one after the other."""

    tokens: Tensor  # (1, total, E)
    mask: Mask  # each sees its own
    positions: Tensor  # (total,), counted anew in each
    like: Tensor

    @classmethod
    def of(cls, x: Tensor, key: object, **refused: Any) -> Self:
        """The samples of a jagged nested tensor (B, *, E) in a row."""
        if x.layout != torch.jagged:
            raise ShapeError(
                "a nested tensor in the old strided layout; expected torch.nested.nested_tensor(..., "
                "layout=torch.jagged)."
            )
        if key is not None and key is not x:
            raise OptionError("nested tensors are for self-attention: mha(x). Pad them for mha(query, key, value).")
        for name, value in refused.items():
            if value is not None:
                raise OptionError(f"{name}= beside a nested tensor: leave it out. Masks of the layer and causal= act.")
        offsets: Tensor = x.offsets()  # type: ignore[attr-defined]
        lengths = offsets.diff()
        tokens = x.values()
        steps = torch.arange(tokens.shape[0], device=tokens.device)
        positions = steps - torch.repeat_interleave(offsets[:-1], lengths, output_size=tokens.shape[0])
        ids = torch.repeat_interleave(torch.arange(len(lengths), device=tokens.device), lengths, output_size=len(steps))
        return cls(tokens[None], documents(ids), positions, x)

    def nested(self, output: Tensor) -> Tensor:
        """(1, total, E) as samples again."""
        return torch.nested.nested_tensor_from_jagged(output[0], self.like.offsets())  # type: ignore[attr-defined]
