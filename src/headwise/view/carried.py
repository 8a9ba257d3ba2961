"""What weights carry: a weight on a token that passes nothing on does nothing.

Everything that a page shows of weights it can also show of two other measures:

    value         weight · ‖what the token passes on‖, with rows rescaled to sum to 1 (Kobayashi et al. 2020)
    contribution  the share of each token in what the head writes; rows sum to 1, and a share may be negative

What a token passes on is its value times the output projection of the head, or its value alone where that projection
is not known. A layer whose values are not known at all, such as a gated one, has neither measure.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import HeadwiseError
from headwise.masks.probes import sink
from headwise.study.outputs import HeadOutputs, Outputs
from headwise.view.pictures import THUMBNAIL, TileWindow, pooled_contributions, whole_tile
from headwise.weights import AttentionMap
from headwise.weights.values import Contributions, value_norms

MEASURES = ("weights", "value", "contribution")
Rows = Tensor | slice | None


class Parts(NamedTuple):
    """What the heads of a layer read (B, H, T, Dv), from which values, and what projects it (H, Dv, E), if known."""

    value: Tensor
    read: Tensor
    out: Tensor | None


class Carried:
    """What the weights of one layer carry.

    Args:
        weights: its map, of one sample.
        parts: its values and what it reads.
    """

    def __init__(self, weights: AttentionMap, parts: Parts) -> None:
        self.weights, self.parts = weights, parts

    @classmethod
    def of(cls, outputs: HeadOutputs) -> "Carried | None":
        """That of a watched call; None if its values are not known."""
        try:
            value = outputs.value.detach()
        except HeadwiseError:
            return None
        try:
            out = outputs.out.detach()
        except HeadwiseError:
            out = None
        return cls(outputs.weights.detach(), Parts(value, outputs.read.detach(), out))

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps in memory besides the map."""
        return [self.parts.value, self.parts.read]

    @functools.cached_property
    def norms(self) -> Tensor:
        """The size of what each token passes on, (H, S)."""
        return value_norms(self.parts.value, self.parts.out, self.weights._source())[0]

    @functools.cached_property
    def by_value(self) -> AttentionMap:
        """The map of weights times what they carry."""
        return self.weights.by_value(self.parts.value, self.parts.out)

    def contributions(self, heads: Sequence[int] | None = None, rows: Rows = None) -> Contributions:
        """The contributions to what some heads write for some queries; all by default."""
        H = self.weights.shape[1]
        chosen = torch.tensor(range(H) if heads is None else list(heads))
        value, read, out = self.parts
        part = self.weights.select(heads=chosen, rows=rows)
        read = read[:, chosen] if rows is None else read[:, chosen][:, :, rows]
        return part.contributions(
            value[:, chosen // (H // value.shape[1])], read, None if out is None else out[chosen].to(read.dtype)
        )

    def tile(self, head: int, level: int, row: int, col: int, queries: Tensor | None = None) -> Tensor:
        """A tile of contributions, as `pictures.tile` is one of weights."""
        T, S = self.weights.shape[2:]
        window = TileWindow.of(T, S, level, row, col)
        shares = self.contributions([head], window.rows if queries is None else queries)
        tall = None if queries is None else 1
        return whole_tile(pooled_contributions(shares, window.span, window.keys, tall)[0])

    def thumbnails(self, measure: str, queries: Tensor | None, *, without_first: bool = False) -> Tensor:
        """Small pictures of all heads, (H, rows, cols), from all queries or from some."""
        if measure == "contribution":
            T, S = self.weights.shape[2:]
            T = T if queries is None else len(queries)
            return self.contributions(rows=queries).pooled(min(THUMBNAIL, T), min(THUMBNAIL, S))[0]
        weights = self.by_value.select(rows=queries)
        weights = weights.without(sink(1)) if without_first else weights
        return weights.pooled(*(min(THUMBNAIL, size) for size in weights.shape[2:]))[0]

    def row(self, measure: str, head: int, query: int) -> Tensor:
        """The shares of all keys for one query, (S,)."""
        if measure == "value":
            return self.by_value.select(heads=[head], rows=[query])[0, 0, 0]
        return self.contributions([head], torch.tensor([query]))[0, 0, 0]

    def rows(self, measure: str, query: int) -> Tensor:
        """The shares of all keys for one query in every head, (H, S)."""
        if measure == "value":
            return self.by_value.select(rows=[query])[0, :, 0]
        return self.contributions(rows=torch.tensor([query]))[0, :, 0]

    def column(self, measure: str, head: int, key: int) -> Tensor:
        """The shares of one key for all queries, (T,)."""
        if measure == "value":
            return self.by_value.select(heads=[head])[0, 0, :, key]
        return self.contributions([head])[0, 0, :, key]


def carried(maps: Mapping[str, AttentionMap], outputs: Outputs) -> tuple[Carried, ...] | None:
    """What the weights of these layers carry; None unless it is known for all of them."""
    calls = outputs.calls
    found = [Carried.of(calls[name][-1]) if name in calls else None for name in maps]
    return None if None in found else tuple(one for one in found if one is not None)
