"""What one score is: everything that turns `q·k` into an attention weight.

The reference, every backend and every tile read the same `Scoring`, so they cannot disagree.
"""

import dataclasses
import math
from contextlib import nullcontext

import torch
from torch import Tensor

from headwise import reference
from headwise.lowering import additive, may_empty_a_row, simplify
from headwise.mask_algebra import Mask

WHOLE = slice(None)


def narrow(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """`bias` in `dtype`. A finite number stays finite: -1e9, too large for float16, does not turn into a mask."""
    if bias.dtype == dtype or torch.finfo(dtype).max >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """score = scale · q·k + bias, minus infinity where the mask hides.

    Args:
        mask: who may attend; None hides nothing.
        bias: (T, S) or (B or 1, H or 1, T or 1, S or 1), added to the scaled scores; has a gradient.
        scale: 1 / sqrt(D) unless given.
    """

    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None

    @property
    def plain(self) -> bool:
        """Whether only the scale acts."""
        return self.mask is None and self.bias is None

    def scale_for(self, D: int) -> float:
        """The scale for heads of width `D`."""
        return 1 / math.sqrt(D) if self.scale is None else self.scale

    def visible(self, T: int, S: int, device: torch.device, rows: slice = WHOLE, cols: slice = WHOLE) -> Tensor | None:
        """The mask's tile, or None where there is no mask."""
        return None if self.mask is None else self.mask.tile(rows, cols, T, S, device=device)

    def additive(self, query: Tensor, S: int, rows: slice = WHOLE, cols: slice = WHOLE) -> Tensor | None:
        """Mask and bias of a tile as one tensor to add, in the query's dtype."""
        T = query.shape[2]
        visible = self.visible(T, S, query.device, rows, cols)
        if self.bias is None:
            return None if visible is None else additive(visible, query.dtype)
        bias = narrow(self.bias[(None,) * (4 - self.bias.dim())], query.dtype)
        bias = bias.expand(-1, -1, T, S)[:, :, rows, cols]
        return bias if visible is None else torch.where(visible, bias, -math.inf)

    def simplified(self, T: int, S: int) -> "Scoring":
        """The same scoring at these lengths with its mask in its simplest form."""
        return Scoring(simplify(self.mask, T, S), self.bias, self.scale)

    def may_empty_a_row(self, T: int, S: int) -> bool:
        """Whether some query might see no key."""
        return self.bias is not None or may_empty_a_row(self.mask, T, S)

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """The exact weights (B, H, T, S) before dropout, in the query's dtype; scores are never rounded to half."""
        T, S = query.shape[2], key.shape[2]
        precise = torch.promote_types(query.dtype, torch.float32)
        query, key, dtype = query.to(precise), key.to(precise), query.dtype
        device = query.device.type
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            _, weights = reference.attend(
                query,
                key,
                key[..., :0],
                visible=self.visible(T, S, query.device),
                bias=None if self.bias is None else narrow(self.bias, dtype).to(precise),  # as the output sees it
                scale=self.scale,
            )
        return weights.to(dtype)
