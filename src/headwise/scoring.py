"""What one score is: everything that turns `q·k` into an attention weight.

The reference, every backend and every tile read the same `Scoring`, so they cannot disagree.
"""

import dataclasses
import math

import torch
from torch import Tensor

from headwise.lowering import additive, may_empty_a_row, simplify
from headwise.mask_algebra import Grid, Mask

WHOLE = slice(None)
LEAST = -1e9  # a finite bias below this hides nothing more, and would drown the scores even in float64


def narrow(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """`bias` in `dtype`. A finite number stays finite: -1e9, too large for float16, does not turn into a mask."""
    if bias.dtype == dtype or torch.finfo(dtype).max >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """score = cap(scale · q·k) + bias, minus infinity where the mask hides; a sink may take part of every row.

    Args:
        mask: who may attend; None hides nothing.
        bias: (T, S) or (B or 1, H or 1, T or 1, S or 1), added to the scaled scores; has a gradient.
        scale: 1 / sqrt(D) unless given.
        softcap: scaled scores become softcap · tanh(score / softcap), before the bias.
        sinks: (H,), one more score per head, which takes part in the softmax and hands over nothing.
    """

    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether only the scale acts."""
        return self.mask is None and self.bias is None and not self.beyond_sdpa

    @property
    def beyond_sdpa(self) -> bool:
        """Whether there is something torch's fused attention does not know."""
        return self.softcap is not None or self.sinks is not None

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it looks at, the mask's last."""
        own = tuple(x for x in (self.bias, self.sinks) if x is not None)
        return own if self.mask is None else own + self.mask.tensors()

    def bias_at(self, grid: Grid, dtype: torch.dtype) -> Tensor | None:
        """The bias at these indices, rounded as the output sees it: to `dtype`, that of the query."""
        if self.bias is None:
            return None
        table = self.bias[(None,) * (4 - self.bias.dim())]
        index = zip(table.shape, (grid.batch, grid.head, grid.row, grid.col), strict=True)
        found = narrow(table[tuple(x if size > 1 else x * 0 for size, x in index)], dtype)  # size 1: the same for all
        if torch.finfo(dtype).min > LEAST:  # float16
            return found
        return torch.where(found == -math.inf, found, found.clamp(min=LEAST))

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
        return dataclasses.replace(self, mask=simplify(self.mask, T, S))

    def may_empty_a_row(self, T: int, S: int) -> bool:
        """Whether some query might see no key."""
        return self.bias is not None or may_empty_a_row(self.mask, T, S)
