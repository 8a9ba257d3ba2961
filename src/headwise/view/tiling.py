"""Any tile of a map at any zoom, exact, for the work of that tile alone.

A map of T queries and S keys is laid on squares of 256 pixels. At level z a pixel covers 2^(Z−z) queries and as many
keys: level 0 shows the whole in one square, level Z one weight a pixel. What a pixel can show:

    mass     weights summed over its keys, averaged over its queries: a row of pixels sums to 1 at every level
    rest     the same with the first key taken out and the others scaled up to 1
    peak     the largest weight
    uniform  weight times the number of keys its query sees, averaged over the pairs that see each other: 1 is even
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.masks.probes import sink
from headwise.weights import AttentionMap, streaming
from headwise.weights.readings import Reading, unflat, zeros
from headwise.weights.source import RowBlock, Source
from headwise.weights.tiles import Tile

SIDE = 256  # pixels of a square
KINDS = ("mass", "rest", "peak", "uniform")
CLEAR = 0.01  # what is left of a row beside its first key, from which on float32 tells it to five digits


def levels(T: int, S: int) -> int:
    """Z, the deepest level: the smallest with 256 · 2^Z ≥ T and S."""
    return max(0, (max(T, S, 1) - 1).bit_length() - 8)


def span_at(level: int, T: int, S: int) -> int:
    """How many queries, and keys, a pixel of this level covers."""
    deepest = levels(T, S)
    if not isinstance(level, int) or not 0 <= level <= deepest:
        raise OptionError(f"level {level!r}: a map of {T} × {S} has levels 0 to {deepest}.")
    return int(2 ** (deepest - level))


def tile(weights: AttentionMap, head: int, level: int, row: int, col: int, kind: str = "mass") -> Tensor:
    """One square of one head, (256, 256) in float32 or better; zeros beyond the last query and key.

    It takes the work of its own queries and keys, and of all keys of its queries where the sink is taken out or the
    map does not know its log-sum-exp yet.

    >>> weights = AttentionMap(torch.randn(1, 3, 700, 16), torch.randn(1, 3, 700, 16))
    >>> levels(700, 700), tile(weights, 2, 0, 0, 0).shape, tile(weights, 2, 2, 1, 0)[0].sum() < 1
    (2, torch.Size([256, 256]), tensor(True))
    """
    T, S = _checked(weights, kind)
    span = span_at(level, T, S)
    count = 2**level
    if not (0 <= row < count and 0 <= col < count):
        raise OptionError(f"tile ({row}, {col}) of level {level}: there are {count} × {count}, counted from 0.")
    part = weights.select(heads=[head], rows=slice(row * SIDE * span, (row + 1) * SIDE * span))
    first = col * SIDE * span
    found = pixels(part, span, range(first, max(first, min(S, first + SIDE * span))), kind)[0]
    return F.pad(found, (0, SIDE - found.shape[1], 0, SIDE - found.shape[0]))


def pixels(weights: AttentionMap, span: int, keys: range, kind: str = "mass", tall: int | None = None) -> Tensor:
    """All queries of the map and these keys, (H, rows, cols), in pixels of `span` from the first of each.

    With `tall` a pixel has so many queries instead: for a map of a few queries that stand for many.
    """
    return measured(weights, [Cells.of(kind, span, keys, tall)], kind == "rest")[0].values()


def measured(weights: AttentionMap, cells: Sequence["Cells"], apart: bool = False) -> Sequence["Cells"]:
    """The cells, filled in one pass; of the map without its first key where `apart`."""
    with torch.no_grad():
        weights = weights.detach()
        streaming.read((without_first(weights) if apart else weights)._normalised(), cells)
    return cells


def without_first(weights: AttentionMap) -> AttentionMap:
    """`weights.without(sink(1))`, whose log-sum-exp follows from the known one: lse + log(1 − weight of the first key).

    Where the first key has nearly all of a row, that difference would lose digits, and the row is computed anew.
    """
    rest = weights.without(sink(1))
    left = 1 - streaming.dense_weights(weights._normalised(), range(1))[..., 0]  # (B, H, T)
    rest._lse = weights.log_sum_exp() + left.clamp(min=0).log()
    doubtful = (left < CLEAR).any(1).any(0).nonzero()[:, 0].cpu()
    if len(doubtful):
        rest._lse[:, :, doubtful.to(left.device)] = weights.select(rows=doubtful).without(sink(1)).log_sum_exp()
    return rest


class Cells(Reading):
    """Sums of weights in cells of `tall` queries and `span` keys, within a window; see `Times` and `Peaks`."""

    by_row = False
    differentiable = (False,)

    def __init__(self, span: int, keys: range, tall: int | None = None) -> None:
        self.span, self.keys, self.tall = span, keys, span if tall is None else tall

    @staticmethod
    def of(kind: str, span: int, keys: range, tall: int | None = None) -> "Cells":
        """The cells that show this kind; squares unless it is said how tall they are."""
        return {"peak": Peaks, "uniform": Times}.get(kind, Cells)(span, keys, tall)

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
        """Add the tile's columns, the first of which is the window's key `first`."""
        self._add(self.sum, tile, tile.weights[..., cols], first)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.values(), self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        raise AssertionError("pictures to look at are not differentiated")

    def halved(self) -> "Cells":
        """The same sums in squares twice as wide."""
        assert type(self) is Cells  # noqa: S101 - the others do not add up
        found = Cells(2 * self.span, self.keys, 2 * self.tall)
        found.source, found.T = self.source, self.T
        found.size = (-(-self.size[0] // 2), -(-self.size[1] // 2))
        found.sum = _squares(self.sum, 0, 0, 2, 2).sum((2, 4))
        return found

    def values(self) -> Tensor:
        """What the pixels show, (H, rows, cols)."""
        return (self.sum / self._queries()[:, None]).to(self.source.precise)

    def _queries(self) -> Tensor:
        """How many queries there are in each row of cells."""
        edges = torch.arange(self.size[0] + 1, device=self.sum.device) * self.tall
        return edges.clamp(max=self.T).diff()

    def _add(self, room: Tensor, tile: Tile, values: Tensor, first: int) -> None:
        squares = _squares(values, tile.rows.start, first, self.tall, self.span).sum((2, 4))
        self._under(room, tile, squares, first).add_(squares)

    def _under(self, room: Tensor, tile: Tile, squares: Tensor, first: int) -> Tensor:
        """The cells that these squares lie on."""
        top, left = tile.rows.start // self.tall, first // self.span
        return room[tile.heads, top : top + squares.shape[1], left : left + squares.shape[2]]


class Peaks(Cells):
    """The largest weight of every cell."""

    def fold(self, tile: Tile, cols: slice, first: int) -> None:
        squares = _squares(tile.weights[..., cols], tile.rows.start, first, self.tall, self.span).amax((2, 4))
        under = self._under(self.sum, tile, squares, first)
        torch.maximum(under, squares.to(under.dtype), out=under)

    def values(self) -> Tensor:
        return self.sum.to(self.source.precise)


class Times(Cells):
    """How many times the even share a weight is, averaged over the pairs of a cell that see each other."""

    def start(self, source: Source) -> None:
        super().start(source)
        self.pairs = torch.zeros_like(self.sum)
        self.seen = source.keys_seen().flatten(0, 1).to(source.precise)  # (B·H, T)

    def fold(self, tile: Tile, cols: slice, first: int) -> None:
        weights = tile.weights[..., cols]
        self._add(self.sum, tile, weights * self.seen[tile.heads, tile.rows, None], first)
        seen = torch.ones_like(weights) if tile.visible is None else tile.visible.expand_as(tile.weights)[..., cols]
        self._add(self.pairs, tile, seen.to(weights.dtype), first)

    def values(self) -> Tensor:
        return (self.sum / self.pairs.clamp(min=1)).to(self.source.precise)


def _squares(values: Tensor, row: int, col: int, tall: int, wide: int) -> Tensor:
    """(G, t, s) whose first entry is (row, col) as (G, n, tall, m, wide): cut along the grid, zeros at the edges."""
    _, t, s = values.shape
    top, left = row % tall, col % wide
    edges = (left, -(left + s) % wide, top, -(top + t) % tall)
    values = F.pad(values, edges) if any(edges) else values
    cut: Tensor = values.unflatten(2, (-1, wide))
    return cut.unflatten(1, (-1, tall))  # type: ignore[no-any-return]


def _checked(weights: AttentionMap, kind: str) -> tuple[int, int]:
    if kind not in KINDS:
        raise OptionError(f"kind {kind!r}: expected one of {', '.join(KINDS)}.")
    if weights.shape[0] != 1:
        raise ShapeError(f"a map of {weights.shape[0]} samples: take one with weights.select(batch=[0]).")
    return weights.shape[2], weights.shape[3]
