"""One tile of weights on its way past the readings."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.masks import Grid, Mask
from headwise.weights.source import Source

MANY_STRIPS = 16  # beyond so many, one product with a selector is faster than single sums
# The log of a hidden weight: finite, so that exp(HIDDEN) · HIDDEN is 0 and not NaN.
HIDDEN = -1e30


class Spot(NamedTuple):
    """One place of a walk: which heads, queries and keys, what is visible, and what the scores are made of."""

    heads: slice  # of the B·H heads of all samples
    rows: slice  # of the source's queries
    cols: slice  # of the keys
    span: tuple[int, int]  # the first query and the last + 1, as indices of the whole
    visible: Tensor | None  # broadcasts to the tile; None where all is seen
    queries: Tensor  # (units, group · t, D)
    keys: Tensor  # (units, S, D)
    bias: Tensor | None  # broadcasts to the tile


class Tile:
    """Weights (G, t, s) of a spot, and their logs.

    Args:
        source: what the tile is of.
        spot: where it lies.
        logs: logs of the weights, HIDDEN or less where hidden.
        weights: exp(logs).
        scratch: room of the same shape for whoever wants it.
        places: where the source's indices lie in the whole.
        cuts: rows at which a new row of the picture begins that is being made; just [0] if none is.
    """

    def __init__(
        self,
        source: Source,
        spot: Spot,
        logs: Tensor,
        weights: Tensor,
        scratch: Tensor,
        places: "Places",
        cuts: list[int],
    ) -> None:
        self.source, self.heads, self.rows, self.cols, self.span, self.visible = source, *spot[:5]
        self.logs, self.weights, self.scratch = logs, weights, scratch
        self._places, self._cuts = places, cuts

    @property
    def col(self) -> Tensor:
        """The keys, (s,)."""
        return self._places.key[self.cols]

    @property
    def position(self) -> Tensor:
        """Where the queries stand among the keys, (t,), or (G, t) where samples differ."""
        found = self._places.position
        return found[self.rows] if found.dim() == 1 else found[self.heads, self.rows]

    @functools.cached_property
    def mass(self) -> Tensor:
        """Weights summed over the tile's keys, (G, t)."""
        return self.weights.sum(-1)

    @functools.cached_property
    def strips(self) -> Tensor:
        """Weights summed over rows, apart for each row of the picture that is being made: (G, strips, s)."""
        cuts = self._cuts
        if len(cuts) > MANY_STRIPS:
            which = torch.bucketize(torch.arange(self.weights.shape[1]), torch.tensor(cuts[1:]), right=True)
            selector = torch.nn.functional.one_hot(which, len(cuts)).T.to(self.weights)
            return torch.bmm(selector.expand(len(self.weights), -1, -1), self.weights)
        strips = self.weights.tensor_split(cuts[1:], dim=1)
        return torch.stack([strip.sum(1) for strip in strips], 1)

    def where(self, mask: Mask) -> Tensor:
        """The tile of a mask or probe, broadcasting to ours."""
        return self._places.look(mask, self.heads, self.rows, self.cols)


class Places:
    """The indices of a source's axes in the whole, as tensors, looked up once."""

    def __init__(self, source: Source) -> None:
        B, H, _, S = source.shape
        frame = source.frame
        self.T, self.S = frame.T, frame.S
        self.batch = source.axis("batch").repeat_interleave(H)
        self.head = source.axis("head").repeat(B)
        self.row = source.axis("row")
        position = source.positions()
        self.position = position if position.dim() == 1 else position.expand(B, H, -1).flatten(0, 1)
        self.key = torch.arange(S, device=source.query.device)

    def grid(self, heads: slice, rows: slice, cols: slice) -> Grid:
        """The indices of a tile; heads of all samples in one axis."""
        batch, head = self.batch[heads, None, None], self.head[heads, None, None]
        return Grid(batch, head, self.row[rows, None], self.key[cols], self.T, self.S)

    def look(self, mask: Mask, heads: slice, rows: slice, cols: slice) -> Tensor:
        """A mask at a tile, with one head where all are alike."""
        batch, head, _, _ = mask.extent
        if batch is None and head is None:
            heads = slice(heads.start, heads.start + 1)
        return mask.visible(self.grid(heads, rows, cols))
