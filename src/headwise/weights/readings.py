"""Readings: statistics of attention weights, computed tile by tile.

A reading gives two definitions of one statistic. `take(tile)` is how it is computed: it sees every tile once and keeps
O(T) numbers. `dense(block)` is the plain formula on some rows, which torch differentiates. Results are (B, H, ...) in
the precise dtype.

    by row      entropy, peak, distance, mass, top keys      one result per query
    summed      received, pooled, histogram                  queries add up
    maximum     pooled peak                                  the largest over queries
"""

import abc
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.masks import Grid, Mask
from headwise.weights.source import RowBlock, Source, full_precision
from headwise.weights.sums import CellSum, KeySum, Largest, OctaveSum, ProbeSum, RowSum, Sum
from headwise.weights.tiles import HIDDEN, Tile


class Reading(abc.ABC):
    """One statistic of a source. Ask for it with `weights.read(reading)`.

    by_row: whether there is one result per query, (B, H, T, ...). Otherwise queries are combined.
    differentiable: for each result, whether it has a gradient; then `dense` must be defined.
    merged: how the results of several ranks, each with some of the queries, are combined if they are not by row: "sum",
        "mean" or "max". None if they cannot be.
    strip_rows: if it makes a picture, how many rows that has; `tile.strips(strip_rows)` is then computed only once.
    """

    source: Source
    by_row: bool = True
    differentiable: tuple[bool, ...] = (True,)
    merged: str | None = None
    strip_rows: int | None = None

    @abc.abstractmethod
    def start(self, source: Source) -> None:
        """Make room for the results."""

    @abc.abstractmethod
    def take(self, tile: Tile) -> None:
        """Add what this tile contributes."""

    @abc.abstractmethod
    def finish(self) -> tuple[Tensor, ...]:
        """The results."""

    def sums(self, source: Source) -> Sequence[Sum] | None:
        """What the compiled loop should add to the tensors of this reading, in place of `take`; None if it cannot.

        It is called after `start`, for the source that is walked over. It is not inherited: a subclass may sum other
        things, so it must say again what it sums.
        """
        return None

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        """The results for these rows alone, differentiable; for a sum over queries, their share of it."""
        raise NotImplementedError(f"{type(self).__name__} has no dense(block)")

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        """A range (lo, hi) outside which keys do not matter for the queries `range(start, stop)`."""
        return 0, S

    def for_ranks(self) -> "Reading":
        """The reading to use if ranks hold some of the queries each; by default this one."""
        return self

    def check_differentiable(self) -> None:
        """Raise if a gradient is wanted that this reading does not define."""
        if any(self.differentiable) and type(self).dense is Reading.dense:
            name = type(self).__name__
            raise OptionError(
                f"{name} has no dense(block), so it has no gradient. Define {name}.dense, set {name}.differentiable to "
                f"False for each result, or read weights.detach()."
            )

    def check_results(self, results: tuple[Tensor, ...]) -> None:
        """Raise unless `differentiable` has one flag for each result."""
        if len(results) != len(self.differentiable):
            name = type(self).__name__
            raise OptionError(
                f"{name}.finish() gave {len(results)} results and {name}.differentiable has {len(self.differentiable)} "
                f"flags; expected one flag for each result."
            )


class RowLogSumExp(Reading):
    """The row log-sum-exp itself, for the gradient of single weights."""

    def start(self, source: Source) -> None:
        self.source = source

    def take(self, tile: Tile) -> None:
        """Nothing: it is known before there are tiles."""

    def sums(self, source: Source) -> Sequence[Sum]:
        return ()

    def finish(self) -> tuple[Tensor, ...]:
        assert self.source.log_sum_exp is not None  # noqa: S101 - it was needed for the tiles
        return (self.source.log_sum_exp.detach().clone(),)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return 0, 0

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        empty = (block.scores == -torch.inf).all(-1)
        return (block.logits.logsumexp(-1).masked_fill(empty, -torch.inf),)


def zeros(source: Source, *tail: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor (B·H, *tail) of zeros for results."""
    B, H = source.shape[:2]
    return torch.zeros(B * H, *tail, dtype=dtype or source.precise, device=source.query.device)


def unflat(result: Tensor, source: Source) -> Tensor:
    """A result (B·H, ...) as (B, H, ...)."""
    B, H = source.shape[:2]
    return result.view(B, H, *result.shape[1:])


def true_mass(mass: Tensor, source: Source) -> Tensor:
    """What to divide rows by so that they sum to 1: rounding the log-sum-exp to float32 scales a row by up to 1e-6.

    With sinks, what a row sums to is not known, and a row that sees nothing stays as it is.
    """
    return torch.where(mass > 0, mass, 1.0) if source.scoring.sinks is None else torch.ones_like(mass)


def column_of(source: Source, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The weight of every query on one key per head, and whether it sees that key, each (B, H, T).

    Args:
        source: what the weights are computed from, with its log-sum-exp.
        keys: (B, H); where it is −1, nothing is seen.
    """
    B, H, T, S = source.shape
    assert source.log_sum_exp is not None  # noqa: S101 - it is given
    if not S or not T:
        return zeros(source, T).view(B, H, T), zeros(source, T, dtype=torch.bool).view(B, H, T)
    place, group = keys.clamp(min=0), torch.arange(H, device=keys.device) // source.group
    key = source.key[torch.arange(B, device=keys.device)[:, None], group, place].to(source.precise)  # (B, H, D)
    grid = Grid(
        source.axis("batch")[:, None, None],
        source.axis("head")[:, None],
        source.axis("row"),
        place[..., None],
        source.frame.T,
        source.frame.S,
    )
    with full_precision(source.query):
        products = torch.einsum("bhtd,bhd->bht", source.query.to(source.precise), key)
    scores = source.finished(products, grid).masked_fill(keys[..., None] < 0, -math.inf)
    lse = source.log_sum_exp
    return (scores - lse.masked_fill(lse == -math.inf, 0.0)).exp(), scores > -math.inf


class EntropyReading(Reading):
    """−Σ w log w over the keys, in nats."""

    def start(self, source: Source) -> None:
        self.source, self.sum, self.mass = source, zeros(source, source.shape[2]), zeros(source, source.shape[2])

    def take(self, tile: Tile) -> None:
        terms = torch.mul(tile.weights, tile.logs, out=tile.scratch)
        self.sum[tile.heads, tile.rows] -= terms.sum(-1)
        self.mass[tile.heads, tile.rows] += tile.mass

    def sums(self, source: Source) -> Sequence[Sum]:
        return RowSum("entropy", self.sum), RowSum("mass", self.mass)

    def finish(self) -> tuple[Tensor, ...]:
        mass = true_mass(self.mass, self.source)
        return (unflat(self.sum / mass + mass.log(), self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        return (-(block.weights * block.logs).sum(-1),)


class PeakReading(Reading):
    """The largest weight of every query, and its key (−1 if the query sees no key)."""

    differentiable = (True, False)

    def start(self, source: Source) -> None:
        T = source.shape[2]
        self.source, self.best, self.mass = source, zeros(source, T) + HIDDEN, zeros(source, T)
        self.key = zeros(source, T, dtype=torch.int64) - 1

    def take(self, tile: Tile) -> None:
        best, key = self.best[tile.heads, tile.rows], self.key[tile.heads, tile.rows]
        top = tile.logs.amax(-1)
        better = top > best
        if tile.logs.is_cpu:  # argmax takes ten times as long as amax, so only where it improves
            place = better.nonzero(as_tuple=True)
            if place[0].numel():
                key[place] = tile.logs[place].argmax(-1) + tile.cols.start
        else:
            key.copy_(torch.where(better, tile.logs.argmax(-1) + tile.cols.start, key))
        torch.maximum(best, top, out=best)
        self.mass[tile.heads, tile.rows] += tile.mass

    def sums(self, source: Source) -> Sequence[Sum]:
        return Largest(self.best, self.key), RowSum("mass", self.mass)

    def finish(self) -> tuple[Tensor, ...]:
        weight = self.best.exp() / true_mass(self.mass, self.source)
        return unflat(weight, self.source), unflat(self.key, self.source)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        weight, key = block.weights.max(-1)
        return weight, key.masked_fill((block.scores == -math.inf).all(-1), -1)


class DistanceReading(Reading):
    """Σ w · |position of the query − key|: the mean distance of every query."""

    def start(self, source: Source) -> None:
        self.source, self.sum, self.mass = source, zeros(source, source.shape[2]), zeros(source, source.shape[2])

    def take(self, tile: Tile) -> None:
        distances = (tile.position[..., None] - tile.col).abs().to(tile.weights.dtype)
        self.sum[tile.heads, tile.rows] += torch.mul(tile.weights, distances, out=tile.scratch).sum(-1)
        self.mass[tile.heads, tile.rows] += tile.mass

    def sums(self, source: Source) -> Sequence[Sum]:
        return RowSum("distance", self.sum), RowSum("mass", self.mass)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum / true_mass(self.mass, self.source), self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        return ((block.weights * _distances(block, self.source)).sum(-1),)


def _distances(block: RowBlock, source: Source) -> Tensor:
    positions = source.scoring.positions
    grid = block.grid if positions is None else block.grid.placed(positions)
    return (grid.position - grid.col).abs()


def octave_count(T: int, S: int) -> int:
    """How many octaves of distance there are: 0, 1, 2–3, 4–7, ..."""
    return max(T - 1, S - 1, 0).bit_length() + 1


def octave(distance: Tensor) -> Tensor:
    """0 for distance 0, else 1 + floor(log2(distance)), exactly."""
    return torch.frexp(distance.double()).exponent.long().clamp(min=0)


class HistogramReading(Reading):
    """The mean share of attention at distance 0, 1, 2–3, 4–7, ..., (B, H, octaves)."""

    by_row = False
    merged = "mean"  # every rank has the same number of queries

    def start(self, source: Source) -> None:
        octaves = octave_count(source.frame.T, source.frame.S)
        self.source, self.sum = source, zeros(source, octaves, dtype=torch.float64)

    def take(self, tile: Tile) -> None:
        bins = octave((tile.position[..., None] - tile.col).abs())  # (t, s) or (G, t, s)
        lo, hi = int(bins.min()), int(bins.max())
        if lo == hi:
            self.sum[tile.heads, lo] += tile.weights.sum((1, 2))
            return
        for bin in range(lo, hi + 1):
            self.sum[tile.heads, bin] += torch.mul(tile.weights, bins == bin, out=tile.scratch).sum((1, 2))

    def sums(self, source: Source) -> Sequence[Sum]:
        return (OctaveSum(self.sum),)

    def finish(self) -> tuple[Tensor, ...]:
        mean = self.sum / max(self.source.shape[2], 1)
        return (unflat(mean.to(self.source.precise), self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        frame = self.source.frame
        share = block.weights.new_zeros(*block.weights.shape[:2], octave_count(frame.T, frame.S))
        bins = octave(_distances(block, self.source)).expand(block.weights.shape).flatten(2)
        return (share.scatter_add(-1, bins, block.weights.flatten(2)) / self.source.shape[2],)


class ReceivedReading(Reading):
    """What every key receives: the sum over queries, and how many queries could see it, (B, H, S)."""

    by_row = False
    differentiable = (True, False)
    merged = "sum"

    def start(self, source: Source) -> None:
        S = source.shape[3]
        self.source = source
        self.sum, self.count = zeros(source, S, dtype=torch.float64), zeros(source, S)

    def take(self, tile: Tile) -> None:
        self.sum[tile.heads, tile.cols] += tile.strips(tile.strip_rows).sum(1)
        seen, t = tile.visible, tile.rows.stop - tile.rows.start
        if seen is not None:  # it may have one row for all t of them
            seen = seen.expand(*seen.shape[:-2], t, seen.shape[-1])
        self.count[tile.heads, tile.cols] += t if seen is None else seen.sum(-2)

    def sums(self, source: Source) -> Sequence[Sum]:
        self.count += source.queries_seeing().flatten(0, 1)
        return (KeySum(self.sum),)

    def finish(self) -> tuple[Tensor, ...]:
        return unflat(self.sum.to(self.source.precise), self.source), unflat(self.count, self.source)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        return block.weights.sum(-2), (block.scores > -math.inf).sum(-2).to(block.weights.dtype)


class PooledReading(Reading):
    """The picture (B, H, rows, cols): weights summed over a cell's keys and averaged over its queries."""

    by_row = False
    merged: str | None = "sum"

    def __init__(self, rows: int, cols: int) -> None:
        self.size, self.strip_rows = (rows, cols), rows

    def for_ranks(self) -> Reading:
        return PooledOverRanks(*self.size)

    def start(self, source: Source) -> None:
        self.source, self.sum = source, zeros(source, *self.size, dtype=torch.float64)

    def take(self, tile: Tile) -> None:
        (T, S), (R, C) = self.source.shape[2:], self.size
        first, last = tile.rows.start * R // T, (tile.rows.stop - 1) * R // T  # query i falls into cell i · R // T
        cells = self.sum[tile.heads, first : last + 1]
        cells.index_add_(2, tile.col * C // S, tile.strips(R).to(cells.dtype))

    def sums(self, source: Source) -> Sequence[Sum]:
        return (CellSum(self.sum, *cells_of(source, *self.size)),)

    def finish(self) -> tuple[Tensor, ...]:
        count = rows_per_cell(self.source.shape[2], self.size[0], self.sum.device)
        return (unflat((self.sum / count).to(self.source.precise), self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        (T, S), (R, C) = self.source.shape[2:], self.size
        B, H, t, _ = block.weights.shape
        rows, keys = (torch.arange(size, device=block.weights.device) for size in (T, S))
        part = block.weights.new_zeros(B, H, t, C).index_add(3, keys * C // S, block.weights)
        picture = block.weights.new_zeros(B, H, R, C).index_add(2, rows[block.rows] * R // T, part)
        return (picture / rows_per_cell(T, R, picture.device),)


def cells_of(source: Source, R: int, C: int) -> tuple[Tensor, Tensor]:
    """The row and the column of a picture where every query and every key fall, (T,) and (S,)."""
    T, S = source.shape[2:]
    device = source.query.device
    return torch.arange(T, device=device) * R // T, torch.arange(S, device=device) * C // S


def rows_per_cell(T: int, R: int, device: torch.device) -> Tensor:
    """How many of T queries are in each of R rows of cells, (R, 1)."""
    edges = -(-torch.arange(R + 1, device=device) * T // R)
    return edges.diff()[:, None].clamp(min=1)


class PooledPeakReading(Reading):
    """The largest weight in every cell of a picture, (B, H, rows, cols)."""

    by_row = False
    differentiable = (False,)
    merged = "max"

    def __init__(self, rows: int, cols: int) -> None:
        self.size = (rows, cols)

    def for_ranks(self) -> Reading:
        return PooledPeakOverRanks(*self.size)

    def start(self, source: Source) -> None:
        self.source, self.best = source, zeros(source, *self.size)

    def sums(self, source: Source) -> Sequence[Sum]:
        return (CellSum(self.best, *cells_of(source, *self.size), largest=True),)

    def take(self, tile: Tile) -> None:
        (T, S), (R, C) = self.source.shape[2:], self.size
        columns = tile.col * C // S
        for r in range(tile.rows.start * R // T, (tile.rows.stop - 1) * R // T + 1):
            first, stop = -(-r * T // R), -(-(r + 1) * T // R)  # the queries of this row of cells
            part = tile.weights[:, max(first - tile.rows.start, 0) : max(stop - tile.rows.start, 0)]
            best = self.best[tile.heads, r]
            best.scatter_reduce_(1, columns.expand(len(best), -1), part.amax(1), "amax")

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.best, self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        (T, S), (R, C) = self.source.shape[2:], self.size
        rows, keys = (torch.arange(size, device=block.weights.device) for size in (T, S))
        cell = (rows[block.rows] * R // T)[:, None] * C + keys * C // S  # (t, S)
        weights = block.weights.flatten(2)
        best = weights.new_zeros(*weights.shape[:2], R * C)
        return (best.scatter_reduce(2, cell.flatten().expand(weights.shape), weights, "amax").unflatten(2, (R, C)),)


class PooledOverRanks(Reading):
    """`PooledReading` if this rank has some of the queries: cells divide the whole text, and ranks add up."""

    by_row = False
    differentiable: tuple[bool, ...] = (False,)
    merged: str | None = "sum"

    def __init__(self, rows: int, cols: int) -> None:
        self.size = (rows, cols)

    def start(self, source: Source) -> None:
        self.source, self.row = source, source.axis("row")
        self.cells = zeros(source, *self.size, dtype=torch.float64)

    def take(self, tile: Tile) -> None:
        rows, columns = self._places(tile)
        narrow = tile.weights.new_zeros(*tile.weights.shape[:2], self.size[1], dtype=torch.float64)
        narrow.index_add_(2, columns, tile.weights.to(torch.float64))
        self.cells[tile.heads] = self.cells[tile.heads].index_add(1, rows, narrow)

    def finish(self) -> tuple[Tensor, ...]:
        count = rows_per_cell(self.source.frame.T, self.size[0], self.cells.device)
        return (unflat((self.cells / count).to(self.source.precise), self.source),)

    def _places(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The row of cells of every query of a tile, and the column of every key."""
        frame = self.source.frame
        return self.row[tile.rows] * self.size[0] // frame.T, tile.col * self.size[1] // frame.S


class PooledPeakOverRanks(PooledOverRanks):
    """`PooledPeakReading` if this rank has some of the queries."""

    merged = "max"

    def take(self, tile: Tile) -> None:
        rows, columns = self._places(tile)
        best = self.cells[tile.heads].flatten(1)
        cell = (rows[:, None] * self.size[1] + columns).flatten()
        best.scatter_reduce_(1, cell.expand(len(best), -1), tile.weights.flatten(1).to(best.dtype), "amax")
        self.cells[tile.heads] = best.view(-1, *self.size)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.cells.to(self.source.precise), self.source),)


class MassReading(Reading):
    """The share of every query's attention on keys where a probe is True."""

    def __init__(self, probe: Mask) -> None:
        self.probe = probe

    def start(self, source: Source) -> None:
        self.source, self.sum = source, zeros(source, source.shape[2])

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return self.probe.key_range(start, stop, T, S)

    def take(self, tile: Tile) -> None:
        frame, probe = self.source.frame, self.probe
        start, stop = tile.span
        lo, hi = probe.key_range(start, stop, frame.T, frame.S)
        if hi <= tile.cols.start or tile.cols.stop <= lo:
            return
        if probe.shows_all(start, stop, tile.cols.start, tile.cols.stop, frame.T, frame.S):
            self.sum[tile.heads, tile.rows] += tile.mass
            return
        hit = torch.mul(tile.weights, tile.where(probe), out=tile.scratch)
        self.sum[tile.heads, tile.rows] += hit.sum(-1)

    def sums(self, source: Source) -> Sequence[Sum]:
        return (ProbeSum(self.probe, self.sum),)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum, self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        return ((block.weights * self.probe.visible(block.grid)).sum(-1),)


class TopKeysReading(Reading):
    """The k largest weights of every query, largest first, and their keys (−1 if it sees fewer)."""

    differentiable = (True, False)

    def __init__(self, k: int) -> None:
        self.k = k

    def start(self, source: Source) -> None:
        T = source.shape[2]
        self.source, self.best = source, zeros(source, T, self.k) + HIDDEN
        self.key = zeros(source, T, self.k, dtype=torch.int64) - 1

    def take(self, tile: Tile) -> None:
        best, key = self.best[tile.heads, tile.rows], self.key[tile.heads, tile.rows]
        enters = (tile.logs.amax(-1) > best[..., -1]).nonzero(as_tuple=True)
        top, place = tile.logs[enters].topk(min(self.k, tile.logs.shape[-1]), sorted=False)
        merged, order = torch.cat([best[enters], top], -1).topk(self.k)
        best[enters] = merged
        key[enters] = torch.cat([key[enters], place + tile.cols.start], -1).gather(-1, order)

    def sums(self, source: Source) -> Sequence[Sum]:
        return (Largest(self.best, self.key),)

    def finish(self) -> tuple[Tensor, ...]:
        key = self.key.masked_fill(self.best <= HIDDEN, -1)
        return unflat(self.best.exp(), self.source), unflat(key, self.source)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        top = block.weights.topk(self.k)
        hidden = block.scores.gather(-1, top.indices) == -math.inf
        return top.values, top.indices.masked_fill(hidden, -1)
