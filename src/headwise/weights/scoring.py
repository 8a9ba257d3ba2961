"""What a score is: everything that turns `q·k` into an attention weight.

The reference, every backend and every tile read the same `Scoring`, so they cannot disagree.
"""

import dataclasses
import math

import torch
from torch import Tensor

from headwise.masks import Composite, Grid, Mask
from headwise.masks.lowering import additive, may_empty_a_row, simplify
from headwise.weights.relative import Relative

WHOLE = slice(None)
LEAST = -1e9  # a lower finite bias would hide no more, and would swamp the scores even in float64


def narrow(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """`bias` in `dtype`. Finite numbers stay finite: -1e9, too large for float16, does not become a mask."""
    if bias.dtype == dtype or torch.finfo(dtype).max >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring(Composite):
    """score = cap(scale · q·k) + relative + bias, and minus infinity where the mask hides a key.

    Args:
        mask: which keys each query may see; None hides nothing.
        bias: (T, S) or (B or 1, H or 1, T or 1, S or 1), added to the scaled scores; differentiable.
        scale: 1 / sqrt(D) unless given.
        softcap: scaled scores become softcap · tanh(score / softcap), before the bias.
        sinks: (H,), an extra score per head that takes part in the softmax and has no value. True tells a layer to
            learn them.
        relative: added for the distance from query to key, such as `alibi(H)`.
        positions: (B or 1, T), the positions of the queries among the keys, for `relative`; by default at their end.
    """

    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | bool | None = None
    relative: Relative | None = None
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        if self.sinks is False:  # what a layer accepts for "none"
            object.__setattr__(self, "sinks", None)

    @property
    def plain(self) -> bool:
        """Whether there is nothing but the scale."""
        return self.mask is None and self.bias is None and not self.beyond_sdpa

    @property
    def beyond_sdpa(self) -> bool:
        """Whether there is something that torch's fused attention cannot do."""
        return self.softcap is not None or self.sinks is not None or self.relative is not None

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores."""
        return self.bias is not None or self.relative is not None

    @property
    def learnable(self) -> tuple[Tensor | None, ...]:
        """The bias, the sinks and the tensors of `relative`; None for a bias or sinks that are not there."""
        sinks = self.sinks if isinstance(self.sinks, Tensor) else None
        return (self.bias, sinks) if self.relative is None else (self.bias, sinks, *self.relative.learnable)

    def with_learnable(self, bias: Tensor | None, sinks: Tensor | None, *tables: Tensor | None) -> "Scoring":
        """The same scoring with other tensors in place of `learnable`."""
        relative = self.relative
        if relative is not None:
            relative = relative.with_learnable([x for x in tables if x is not None])
        return dataclasses.replace(self, bias=bias, sinks=sinks, relative=relative)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this scoring holds; faster than the general search, because every map is made with it."""
        found: tuple[Tensor, ...] = ()
        for x in (self.bias, self.sinks, self.positions):
            if x is not None and isinstance(x, Tensor):
                found += (x,)
        for part in (self.mask, self.relative):
            if part is not None:
                found += part.tensors()
        return found

    def bias_at(self, grid: Grid, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores at `grid`. A bias is rounded to `dtype`, that of the query, as for the output."""
        if self.relative is not None:
            place = grid if self.positions is None else grid.placed(self.positions)
            added = self.relative.at(place, torch.promote_types(dtype, torch.float32))
            bias = dataclasses.replace(self, relative=None).bias_at(grid, dtype)
            return added if bias is None else bias.to(added.dtype) + added
        if self.bias is None:
            return None
        table = self.bias[(None,) * (4 - self.bias.dim())]
        index = zip(table.shape, (grid.batch, grid.head, grid.row, grid.col), strict=True)
        found = narrow(table[tuple(x if size > 1 else x * 0 for size, x in index)], dtype)  # size 1: one for all
        if torch.finfo(dtype).min > LEAST:  # float16
            return found
        return torch.where(found == -math.inf, found, found.clamp(min=LEAST))

    def scale_for(self, D: int) -> float:
        """The scale for heads of width D."""
        return 1 / math.sqrt(D) if self.scale is None else self.scale

    def visible(self, T: int, S: int, device: torch.device, rows: slice = WHOLE, cols: slice = WHOLE) -> Tensor | None:
        """The tile `[rows, cols]` of the mask, or None if there is no mask."""
        return None if self.mask is None else self.mask.tile(rows, cols, T, S, device=device)

    def additive(self, query: Tensor, S: int, rows: slice = WHOLE, cols: slice = WHOLE) -> Tensor | None:
        """Mask and bias of the tile `[rows, cols]` as one tensor to add, in the query's dtype."""
        T = query.shape[2]
        visible = self.visible(T, S, query.device, rows, cols)
        if self.bias is None:
            return None if visible is None else additive(visible, query.dtype)
        bias = narrow(self.bias[(None,) * (4 - self.bias.dim())], query.dtype)
        bias = bias.expand(-1, -1, T, S)[:, :, rows, cols]
        return bias if visible is None else torch.where(visible, bias, -math.inf)

    def whole_bias(self, query: Tensor, S: int) -> Tensor | None:
        """Everything that is added to the scores, as one tensor in the query's dtype."""
        if self.relative is None:
            return None if self.bias is None else narrow(self.bias, query.dtype)
        B, H, T, _ = query.shape
        batch, head, row, col = (torch.arange(n, device=query.device) for n in (B, H, T, S))
        batch = batch if self.bias is not None or self.positions is not None else batch[:1]
        grid = Grid(batch[:, None, None, None], head[:, None, None], row[:, None], col, T, S)
        found = self.bias_at(grid, query.dtype)
        assert found is not None  # noqa: S101 - there is a relative part
        return narrow(found, query.dtype)

    def simplified(self, T: int, S: int) -> "Scoring":
        """The same scoring with the simplest mask for these lengths."""
        return dataclasses.replace(self, mask=simplify(self.mask, T, S))

    def may_empty_a_row(self, T: int, S: int) -> bool:
        """Whether a query might see no key."""
        return self.bias is not None or may_empty_a_row(self.mask, T, S)
