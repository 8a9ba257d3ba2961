"""Masks for queries at other positions, for keys whose first ones are gone, and for some of the heads.

A cache needs the first two: samples of different length share its buffer, so their queries are not at the end, and a
sliding window drops keys that no query sees any more. A rank that holds some of the heads needs the last.
"""

import dataclasses

from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.mask import Both, Extent, Grid, Mask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Placed(Mask):
    """See `placed`."""

    inner: Mask
    positions: Tensor  # (B or 1, T)

    @property
    def extent(self) -> Extent:
        B, H, _, S = self.inner.extent
        rows = self.positions.shape[0]
        return Extent(rows if rows > 1 else B, H, self.positions.shape[1], S)

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid.placed(self.positions))

    def __repr__(self) -> str:
        return f"placed({self.inner!r}, positions of shape {tuple(self.positions.shape)})"


def placed(mask: Mask, positions: Tensor) -> Mask:
    """`mask` for queries at `positions` among the keys, (B or 1, T), instead of at their end.

    When a batch of keys holds samples of different length, only the queries of the longest are at the end.
    """
    check_placeable(mask)
    return Placed(mask, positions)


def check_placeable(mask: Mask) -> None:
    """Raise if a mask is tied to queries at the end of the keys."""
    if mask.extent.queries is not None:
        raise MaskError(
            f"mask {mask!r} lists its queries one by one, so they cannot be placed elsewhere. In a batch of samples of "
            f"different length, and with a static cache, use masks of positions: causal(), window(...), documents(...)."
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shifted(Mask):
    """See `shifted`."""

    inner: Mask
    dropped: int

    @property
    def extent(self) -> Extent:
        B, H, T, S = self.inner.extent
        return Extent(B, H, T, None if S is None else S - self.dropped)

    @property
    def by_key(self) -> bool:
        return self.inner.by_key

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid._replace(col=grid.col + self.dropped, S=grid.S + self.dropped))

    def __repr__(self) -> str:
        return f"shifted({self.inner!r}, {self.dropped})"


def shifted(mask: Mask, dropped: int) -> Mask:
    """`mask` for a text whose first `dropped` keys are gone. A mask of distances stays as it is."""
    if mask.banded:
        return mask
    if type(mask) is Both:
        return shifted(mask.a, dropped) & shifted(mask.b, dropped)
    return Shifted(mask, dropped)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class OfHeads(Mask):
    """See `of_heads`."""

    inner: Mask
    first: int
    count: int

    @property
    def extent(self) -> Extent:
        return self.inner.extent._replace(heads=self.count)

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid._replace(head=grid.head + self.first))

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return self.inner.key_range(start, stop, T, S)

    def __repr__(self) -> str:
        return f"of_heads({self.inner!r}, {self.first} to {self.first + self.count - 1})"


def of_heads(mask: Mask, first: int, count: int) -> Mask:
    """`mask` for `count` of its heads, starting at `first`. A mask that is the same for all heads stays as it is."""
    return mask if mask.extent.heads is None else OfHeads(mask, first, count)
