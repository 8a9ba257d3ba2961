"""Pictures of attention maps: any tile at any zoom, one single weight, and the numbers that stand beside a picture.

The picture of a whole map is `AttentionMap.pooled`. Here are the same pictures of a window of it, exact, at the cost of
that window alone. A map of T queries and S keys is divided into tiles of 256 × 256 pixels. At level z a pixel covers
2^(Z−z) queries and as many keys: level 0 shows the whole map in one tile, and at level Z a pixel is one weight. A pixel
shows one of:

    mass     weights summed over its keys and averaged over its queries: a row of pixels sums to 1 at every level
    rest     the same without the first key, the other weights rescaled to sum to 1
    peak     the largest weight
    uniform  weight times the number of keys its query sees, averaged over visible pairs: 1 is uniform attention
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.weights import AttentionMap, streaming
from headwise.weights.parts import read_both
from headwise.weights.readings import (
    DistanceReading,
    EntropyReading,
    PeakReading,
    PooledReading,
    Reading,
    ReceivedReading,
    TopKeysReading,
    unflat,
    zeros,
)
from headwise.weights.source import RowBlock, Source, row_blocks
from headwise.weights.sums import CellSum, Sum
from headwise.weights.tiles import Tile
from headwise.weights.values import Contributions

SIDE = 256  # pixels along a tile
KINDS = ("mass", "rest", "peak", "uniform")
THUMBNAIL = 64  # pixels along the picture of a head in the atlas
TOP = 8  # weights per row that are kept where not all can be


def levels(T: int, S: int) -> int:
    """The deepest level Z: the smallest with 256 · 2^Z ≥ T and S."""
    return max(0, (max(T, S, 1) - 1).bit_length() - 8)


def span_at(level: int, T: int, S: int) -> int:
    """How many queries, and how many keys, a pixel of this level covers."""
    deepest = levels(T, S)
    if not isinstance(level, int) or not 0 <= level <= deepest:
        raise OptionError(f"level {level!r}: a map of {T} × {S} has levels 0 to {deepest}.")
    return int(2 ** (deepest - level))


def tile(
    weights: AttentionMap, head: int, level: int, row: int, col: int, kind: str = "mass", queries: Tensor | None = None
) -> Tensor:
    """One tile of one head, (256, 256) in float32 or better; zeros beyond the last query and key.

    It costs the work of its own queries and keys. Without the first key, or where the map has no log-sum-exp yet, it
    costs the work of whole rows. With `queries`, each row of pixels is drawn from one given query only.

    >>> weights = AttentionMap(torch.randn(1, 3, 700, 16), torch.randn(1, 3, 700, 16))
    >>> levels(700, 700), tile(weights, 2, 0, 0, 0).shape, tile(weights, 2, 2, 1, 0)[0].sum() < 1
    (2, torch.Size([256, 256]), tensor(True))
    """
    if kind not in KINDS:
        raise OptionError(f"kind {kind!r}: expected one of {', '.join(KINDS)}.")
    if weights.shape[0] != 1:
        raise ShapeError(f"the map has {weights.shape[0]} samples: take one with weights.select(batch=[0]).")
    T, S = weights.shape[2:]
    window = TileWindow.of(T, S, level, row, col)
    part = weights.select(heads=[head], rows=window.rows if queries is None else queries)
    return whole_tile(pixels(part, window.span, window.keys, kind, tall=None if queries is None else 1)[0])


class TileWindow(NamedTuple):
    """What a tile shows: queries, keys, and how many of each there are in a pixel."""

    span: int
    rows: slice
    keys: range

    @classmethod
    def of(cls, T: int, S: int, level: int, row: int, col: int) -> "TileWindow":
        """That of a tile of a map of T × S; refused if there is no such tile."""
        span, count = span_at(level, T, S), 2**level
        if not (0 <= row < count and 0 <= col < count):
            raise OptionError(f"tile ({row}, {col}) of level {level}: there are {count} × {count}, counted from 0.")
        rows, keys = (slice(index * SIDE * span, (index + 1) * SIDE * span) for index in (row, col))
        return cls(span, rows, range(S)[keys])


def whole_tile(found: Tensor) -> Tensor:
    """A picture of at most 256 × 256 pixels, with zeros up to that size."""
    return F.pad(found, (0, SIDE - found.shape[1], 0, SIDE - found.shape[0]))


def pixels(weights: AttentionMap, span: int, keys: range, kind: str = "mass", tall: int | None = None) -> Tensor:
    """All queries of the map and the given keys, (H, rows, cols), in pixels of `span` queries and keys.

    With `tall`, a pixel covers that many queries instead: for a map of a few queries that represent many.
    """
    return filled(weights, [PooledCells.of(kind, span, keys, tall)], without_sink=kind == "rest")[0].values()


def filled(
    weights: AttentionMap, cells: Sequence["PooledCells"], *, without_sink: bool = False
) -> Sequence["PooledCells"]:
    """The cells, filled in one pass over the map, or over the map without its first key."""
    with torch.no_grad():
        weights = weights.detach()
        streaming.read((weights._without_first() if without_sink else weights)._unpadded(), cells)
    return cells


def pooled_contributions(
    shares: Contributions, span: int, keys: range | None = None, tall: int | None = None
) -> Tensor:
    """Contributions (H, rows, cols) in pixels as in `pixels`: summed over keys, averaged over queries."""
    return shares._read(PooledCells(span, range(shares.shape[3]) if keys is None else keys, tall))[0]


class PooledCells(Reading):
    """Weights in cells of `tall` queries and `span` keys within a window: summed over keys, averaged over queries."""

    by_row = False
    differentiable = (False,)

    def __init__(self, span: int, keys: range, tall: int | None = None) -> None:
        self.span, self.keys, self.tall = span, keys, span if tall is None else tall

    @staticmethod
    def of(kind: str, span: int, keys: range, tall: int | None = None) -> "PooledCells":
        """The cells of a kind of picture; square unless `tall` is given."""
        return {"peak": PeakCells, "uniform": UniformCells}.get(kind, PooledCells)(span, keys, tall)

    def start(self, source: Source) -> None:
        self.source = source
        self.T = source.shape[2]
        self.size = (-(-self.T // self.tall), -(-len(self.keys) // self.span))
        self.sum = zeros(source, *self.size, dtype=torch.float64)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return self.keys.start, self.keys.stop

    def take(self, tile: Tile) -> None:
        lo, hi = max(tile.cols.start, self.keys.start), min(tile.cols.stop, self.keys.stop)
        if lo < hi:
            self.fold(tile, slice(lo - tile.cols.start, hi - tile.cols.start), lo - self.keys.start)

    def fold(self, tile: Tile, cols: slice, first: int) -> None:
        """Add columns of the tile; the first of them is key `first` of the window."""
        self._add(self.sum, tile, tile.weights[..., cols], first)

    def sums(self, source: Source) -> Sequence[Sum]:
        return (CellSum(self.sum, *self._places()),)

    def _places(self) -> tuple[Tensor, Tensor]:
        """The row and the column of the cell where every query and every key fall; -1 for a key outside the window."""
        keys = torch.arange(self.source.shape[3])
        inside = (keys >= self.keys.start) & (keys < self.keys.stop)
        return torch.arange(self.T) // self.tall, torch.where(inside, (keys - self.keys.start) // self.span, -1)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.values(), self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        raise AssertionError("pictures of a window are not differentiated")

    def halved(self) -> "PooledCells":
        """The same sums in cells twice as large."""
        assert type(self) is PooledCells  # noqa: S101 - other kinds cannot be added
        found = PooledCells(2 * self.span, self.keys, 2 * self.tall)
        found.source, found.T = self.source, self.T
        found.size = (-(-self.size[0] // 2), -(-self.size[1] // 2))
        found.sum = _squares(self.sum, 0, 0, 2, 2).sum((2, 4))
        return found

    def values(self) -> Tensor:
        """The picture, (H, rows, cols)."""
        edges = torch.arange(self.size[0] + 1, device=self.sum.device) * self.tall
        queries = edges.clamp(max=self.T).diff()  # in each row of cells
        return (self.sum / queries[:, None]).to(self.source.precise)

    def _add(self, room: Tensor, tile: Tile, values: Tensor, first: int) -> None:
        squares = _squares(values, tile.rows.start, first, self.tall, self.span).sum((2, 4))
        self._under(room, tile, squares, first).add_(squares)

    def _under(self, room: Tensor, tile: Tile, squares: Tensor, first: int) -> Tensor:
        """The cells that these squares belong to."""
        top, left = tile.rows.start // self.tall, first // self.span
        return room[tile.heads, top : top + squares.shape[1], left : left + squares.shape[2]]


class PeakCells(PooledCells):
    """The largest weight of every cell."""

    def fold(self, tile: Tile, cols: slice, first: int) -> None:
        squares = _squares(tile.weights[..., cols], tile.rows.start, first, self.tall, self.span).amax((2, 4))
        under = self._under(self.sum, tile, squares, first)
        torch.maximum(under, squares.to(under.dtype), out=under)

    def sums(self, source: Source) -> Sequence[Sum]:
        return (CellSum(self.sum, *self._places(), largest=True),)

    def values(self) -> Tensor:
        return self.sum.to(self.source.precise)


class UniformCells(PooledCells):
    """Weights as multiples of uniform attention, averaged over the visible pairs of a cell."""

    def start(self, source: Source) -> None:
        super().start(source)
        self.pairs = torch.zeros_like(self.sum)
        self.seen = source.keys_seen().flatten(0, 1).to(source.precise)  # (B·H, T)

    def fold(self, tile: Tile, cols: slice, first: int) -> None:
        weights = tile.weights[..., cols]
        self._add(self.sum, tile, weights * self.seen[tile.heads, tile.rows, None], first)
        seen = torch.ones_like(weights) if tile.visible is None else tile.visible.expand_as(tile.weights)[..., cols]
        self._add(self.pairs, tile, seen.to(weights.dtype), first)

    def sums(self, source: Source) -> Sequence[Sum]:
        B, H = source.shape[:2]
        row, col = self._places()
        self.pairs += pair_counts(source, row, col, self.size).expand(B, H, *self.size).flatten(0, 1)
        return (CellSum(self.sum, row, col, by_query=self.seen),)

    def values(self) -> Tensor:
        return (self.sum / self.pairs.clamp(min=1)).to(self.source.precise)


def pair_counts(source: Source, row: Tensor, col: Tensor, size: tuple[int, int]) -> Tensor:
    """How many pairs of a query and a key it sees fall into each cell, (B or 1, H or 1, rows, cols)."""
    T, S = source.shape[2:]
    spans, inside = source.key_spans(), (col >= 0).nonzero()[:, 0]
    if spans is None:
        part = source.where_it_differs()
        counts = torch.zeros(*part.shape[:2], *size, dtype=torch.float64)
        for rows in row_blocks(T, part.shape[0] * part.shape[1] * S * 8, 2**26):
            seen = part.visible(rows, slice(0, S))[..., inside].expand(*part.shape[:2], -1, -1).float()
            narrow = seen.new_zeros(*seen.shape[:3], size[1]).index_add_(3, col[inside], seen)
            counts.index_add_(2, row[rows], narrow.double())
        return counts
    edges = torch.searchsorted(col[inside], torch.arange(size[1] + 1)) + (int(inside[0]) if len(inside) else 0)
    low, high = spans[:, :, None].cpu()
    seen = (torch.minimum(high, edges[1:]) - torch.maximum(low, edges[:-1])).clamp(min=0)  # (T, cols)
    return torch.zeros(size, dtype=torch.float64).index_add_(0, row, seen.double())[None, None]


def _squares(values: Tensor, row: int, col: int, tall: int, wide: int) -> Tensor:
    """(G, t, s), with its first entry at (row, col), as (G, n, tall, m, wide): cut along the grid, zero-padded."""
    _, t, s = values.shape
    top, left = row % tall, col % wide
    edges = (left, -(left + s) % wide, top, -(top + t) % tall)
    values = F.pad(values, edges) if any(edges) else values
    cut: Tensor = values.unflatten(2, (-1, wide))
    return cut.unflatten(1, (-1, tall))  # type: ignore[no-any-return]


class Cell(NamedTuple):
    """One weight of a map.

    weight: the share of the query's attention that goes to the key.
    logit: the score behind it, minus infinity where the key is hidden.
    rank: 1 for the key with the largest weight of the row; hidden keys come last.
    visible: how many keys the query sees; uniform attention would give each of them 1 / visible.
    """

    weight: float
    logit: float
    rank: int
    visible: int

    @property
    def times_uniform(self) -> float:
        """The weight as a multiple of uniform attention."""
        return self.weight * self.visible


def cell(weights: AttentionMap, head: int, query: int, key: int) -> Cell:
    """One weight of a map of one sample, at the cost of its row.

    >>> weights = AttentionMap(torch.zeros(1, 3, 8, 5), torch.zeros(1, 3, 8, 5))
    >>> cell(weights, 2, 6, 4)
    Cell(weight=0.125, logit=0.0, rank=1, visible=8)
    """
    with torch.no_grad():
        row = weights.detach().select(heads=[head], rows=[query])
        scores = row._source().scores()[0, 0, 0]
    rank = 1 + int((scores > scores[key]).sum())
    return Cell(float(row[0, 0, 0, key]), float(scores[key]), rank, int((scores > -torch.inf).sum()))


@dataclasses.dataclass(frozen=True)
class LayerStatistics:
    """What a page shows of all heads of a layer: thumbnails, numbers by query and by key, the largest weights."""

    thumbnails: Tensor  # (H, rows, cols)
    patterns: Tensor  # the same without the first key
    entropy: Tensor  # (H, T), in nats
    peak: Tensor  # (H, T)
    distance: Tensor  # (H, T)
    received: Tensor  # (H, S), summed over queries
    log_sum_exp: Tensor  # (H, T)
    top_weights: Tensor | None = None  # (H, T, 8)
    top_keys: Tensor | None = None

    @classmethod
    def of(
        cls,
        weights: AttentionMap,
        *,
        top: bool = False,
        cells: Sequence[PooledCells] = (),
        rest: Sequence[PooledCells] = (),
    ) -> "LayerStatistics":
        """Measure a layer in one pass over its weights.

        Args:
            weights: the map, of one sample.
            top: whether to keep the largest weights of every row.
            cells: pictures to fill.
            rest: pictures to fill without the first key.
        """
        T, S = weights.shape[2:]
        size = min(THUMBNAIL, T), min(THUMBNAIL, S)
        readings: list[Reading] = [
            PooledReading(*size),
            EntropyReading(),
            PeakReading(),
            DistanceReading(),
            ReceivedReading(),
        ]
        readings += [TopKeysReading(min(TOP, S))] if top else []
        with torch.no_grad():
            weights = weights.detach()
            found, without = read_both(weights, [*readings, *cells], [PooledReading(*size), *rest])
        thumbnails, entropy, peak, distance, received = (outputs[0][0] for outputs in found[:5])
        top_weights, top_keys = (output[0] for output in found[5]) if top else (None, None)
        return cls(
            thumbnails,
            without[0][0][0],
            entropy,
            peak,
            distance,
            received,
            weights.log_sum_exp()[0],
            top_weights,
            top_keys,
        )

    @classmethod
    def joined(cls, parts: Sequence["LayerStatistics"]) -> "LayerStatistics":
        """The statistics of some heads after those of others."""
        names = ("thumbnails", "patterns", "entropy", "peak", "distance", "received", "log_sum_exp")
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def stretched(self, queries: Tensor | None, T: int) -> "LayerStatistics":
        """Statistics of some queries as an estimate for all T: each represents those just before it."""
        if queries is None:
            return self
        nearest = torch.searchsorted(queries, torch.arange(T))
        by_row = {name: getattr(self, name)[:, nearest] for name in ("entropy", "peak", "distance", "log_sum_exp")}
        return dataclasses.replace(self, received=self.received * (T / len(queries)), **by_row)

    def check_finite(self, name: str) -> None:
        """Refuse a layer whose weights contain NaN."""
        if not (self.entropy.isfinite().all() and self.received.isfinite().all()):
            raise OptionError(
                f"{name}: its weights contain NaN (from NaN or infinite queries, keys or biases), so they cannot be "
                f"drawn. Check the query and key of that layer."
            )


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which keys each query may see: the first, the last and their number; per head where heads differ, else once."""

    first: Tensor  # (1 or H, T); S where none is visible
    last: Tensor  # −1 where none is visible
    count: Tensor


def reach(weights: AttentionMap) -> Reach:
    """The keys that each query may see."""
    source = weights.select(batch=[0])._source()
    H, T, S = source.shape[1:]
    if source.mask is None and not source.scoring.hides_keys:
        first = torch.zeros(1, T, dtype=torch.int64)
        return Reach(first, first + S - 1, first + S)
    alike = not source.scoring.hides_keys and source.mask is not None and source.mask.extent.heads is None
    spans = source.key_spans()
    if spans is not None:
        first, end = spans[:, None].cpu()
        return Reach(first, end - 1, (end - first).clamp(min=0))
    source = weights.select(batch=[0], heads=[0])._source() if alike else source
    found = torch.empty(3, 1 if alike else H, T, dtype=torch.int64)
    for rows in row_blocks(T, found.shape[1] * S, 2**24):
        found[:, :, rows] = _reach_of(source, rows).cpu()
    return Reach(*found)


def _reach_of(source: Source, rows: slice) -> Tensor:
    """First, last and number of visible keys of these rows, (3, H, t)."""
    H, _, S = source.shape[1:]
    cols = source.reachable(rows)
    if cols.start >= cols.stop:
        return torch.tensor([S, -1, 0])[:, None, None].expand(3, H, rows.stop - rows.start)
    seen = source.visible(rows, cols)
    seen = seen.expand(1, H, *seen.shape[-2:])[0]
    nothing = ~seen.any(-1)
    bits = seen.to(torch.uint8)
    first = (cols.start + bits.argmax(-1)).masked_fill(nothing, S)
    last = (cols.stop - 1 - bits.flip(-1).argmax(-1)).masked_fill(nothing, -1)
    return torch.stack([first, last, seen.sum(-1)])
