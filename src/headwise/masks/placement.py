"""Masks for queries, keys and heads that stand elsewhere than a mask assumes.

A cache needs queries that are not at the end, because samples of different length share its room, and keys without the
first ones, because a sliding window drops what nobody sees any more. A rank that has some of the heads needs those.
"""

import dataclasses
from typing import Self

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.mask import Both, Extent, Grid, Mask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Placed(Mask):
    """See `placed`."""

    inner: Mask
    positions: Tensor  # (B or 1, T)

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.inner.tensors(), self.positions)

    @property
    def extent(self) -> Extent:
        B, H, _, S = self.inner.extent
        rows = self.positions.shape[0]
        return Extent(rows if rows > 1 else B, H, self.positions.shape[1], S)

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid.placed(self.positions))

    def to(self, device: torch.device | str) -> Self:
        return dataclasses.replace(self, inner=self.inner.to(device), positions=self.positions.to(device))

    def __repr__(self) -> str:
        return f"placed({self.inner!r}, positions of shape {tuple(self.positions.shape)})"


def placed(mask: Mask, positions: Tensor) -> Mask:
    """`mask` for queries that stand at `positions` among the keys, (B or 1, T), and not at their end.

    With samples of different length in one batch of keys, no query but that of the longest stands at the end.
    """
    check_placeable(mask)
    return Placed(mask, positions)


def check_placeable(mask: Mask) -> None:
    """Raise if a mask cannot be seen from elsewhere than the end of the keys."""
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

    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors()

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid._replace(col=grid.col + self.dropped, S=grid.S + self.dropped))

    def to(self, device: torch.device | str) -> Self:
        return dataclasses.replace(self, inner=self.inner.to(device))

    def __repr__(self) -> str:
        return f"shifted({self.inner!r}, {self.dropped})"


def shifted(mask: Mask, dropped: int) -> Mask:
    """`mask` of a text whose first `dropped` keys are no longer there. Where only distances count, it is the same."""
    if mask.banded:
        return mask
    if isinstance(mask, Both):
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

    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors()

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid._replace(head=grid.head + self.first))

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return self.inner.key_range(start, stop, T, S)

    def to(self, device: torch.device | str) -> Self:
        return dataclasses.replace(self, inner=self.inner.to(device))

    def __repr__(self) -> str:
        return f"of_heads({self.inner!r}, {self.first} to {self.first + self.count - 1})"


def of_heads(mask: Mask, first: int, count: int) -> Mask:
    """`mask` for `count` of its heads from `first` on. Where it is the same for all heads, it is the same."""
    return mask if mask.extent.heads is None else OfHeads(mask, first, count)
