"""Statistics of attention weights, each written twice: over passing tiles, and on a dense block of rows.

`take(tile)` is the way to compute it: it sees every tile once and keeps O(T). `dense(block)` is the plain formula; its
gradient is what makes the statistic differentiable. Results are (B, H, ...) in the precise dtype.

    by row   (Entropy, Peak, Distance, Mass, TopKeys)       one result per query
    summed   (Received, Pooled, Histogram)                  queries add up
    PooledPeak                                              queries take the maximum
"""

import abc
import math

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.weights.source import HIDDEN, Block, Source, Tile


class Reading(abc.ABC):
    """One statistic of a source, while it is being computed."""

    source: Source
    by_row = True
    differentiable: tuple[bool, ...] = (True,)  # for each result

    @abc.abstractmethod
    def start(self, source: Source) -> None:
        """Make room for the results."""

    @abc.abstractmethod
    def take(self, tile: Tile) -> None:
        """Add what this tile says."""

    @abc.abstractmethod
    def finish(self) -> tuple[Tensor, ...]:
        """The results."""

    @abc.abstractmethod
    def dense(self, block: Block) -> tuple[Tensor, ...]:
        """The differentiable results of these rows alone; what is summed is their share of the sum."""

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        """Keys outside `range(lo, hi)` say nothing about the queries `range(start, stop)`."""
        return 0, S


def zeros(source: Source, *tail: int, dtype: torch.dtype | None = None) -> Tensor:
    """Room for one number per flat head and `tail`."""
    B, H = source.shape[:2]
    return torch.zeros(B * H, *tail, dtype=dtype or source.precise, device=source.query.device)


def unflat(result: Tensor, source: Source) -> Tensor:
    """(B·H, ...) as (B, H, ...)."""
    B, H = source.shape[:2]
    return result.view(B, H, *result.shape[1:])


def true_mass(mass: Tensor, source: Source) -> Tensor:
    """What to divide rows by that should sum to 1: a log-sum-exp rounded to float32 scales a whole row by up to 1e-6.

    With sinks it is not known what rows sum to, and a row that sees nothing stays as it is.
    """
    return torch.where(mass > 0, mass, 1.0) if source.scoring.sinks is None else torch.ones_like(mass)


class Entropy(Reading):
    """−Σ w log w over the keys, in nats."""

    def start(self, source: Source) -> None:
        self.source, self.sum, self.mass = source, zeros(source, source.shape[2]), zeros(source, source.shape[2])

    def take(self, tile: Tile) -> None:
        terms = torch.mul(tile.weights, tile.logs, out=tile.scratch)
        self.sum[tile.heads, tile.rows] -= terms.sum(-1)
        self.mass[tile.heads, tile.rows] += tile.mass

    def finish(self) -> tuple[Tensor, ...]:
        mass = true_mass(self.mass, self.source)
        return (unflat(self.sum / mass + mass.log(), self.source),)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        return (-(block.weights * block.logs).sum(-1),)


class Peak(Reading):
    """The largest weight of every query, and the key it lies on (−1 where no key is seen)."""

    differentiable = (True, False)

    def start(self, source: Source) -> None:
        T = source.shape[2]
        self.source, self.best = source, zeros(source, T) + HIDDEN
        self.key = zeros(source, T, dtype=torch.int64) - 1

    def take(self, tile: Tile) -> None:
        best, key = self.best[tile.heads, tile.rows], self.key[tile.heads, tile.rows]
        top = tile.logs.amax(-1)
        better = top > best
        if tile.logs.is_cpu:  # finding the place takes ten times as long as the maximum: only where it improves
            place = better.nonzero(as_tuple=True)
            if place[0].numel():
                key[place] = tile.logs[place].argmax(-1) + tile.cols.start
        else:
            key.copy_(torch.where(better, tile.logs.argmax(-1) + tile.cols.start, key))
        torch.maximum(best, top, out=best)

    def finish(self) -> tuple[Tensor, ...]:
        return unflat(self.best.exp(), self.source), unflat(self.key, self.source)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        return (block.weights.amax(-1), block.weights.argmax(-1))


class Distance(Reading):
    """Σ w · |position of the query − key|: how far a query looks on average."""

    def start(self, source: Source) -> None:
        self.source, self.sum, self.mass = source, zeros(source, source.shape[2]), zeros(source, source.shape[2])

    def take(self, tile: Tile) -> None:
        apart = (tile.position[..., None] - tile.col).abs().to(tile.weights.dtype)
        self.sum[tile.heads, tile.rows] += torch.mul(tile.weights, apart, out=tile.scratch).sum(-1)
        self.mass[tile.heads, tile.rows] += tile.mass

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum / true_mass(self.mass, self.source), self.source),)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        return ((block.weights * _apart(block, self.source)).sum(-1),)


def _apart(block: Block, source: Source) -> Tensor:
    positions = source.scoring.positions
    grid = block.grid if positions is None else block.grid.placed(positions)
    return (grid.position - grid.col).abs()


def octave_count(T: int, S: int) -> int:
    """How many octaves hold all distances: 0, 1, 2–3, 4–7, ..."""
    return max(T - 1, S - 1, 0).bit_length() + 1


def octave(distance: Tensor) -> Tensor:
    """0 for distance 0, else 1 + floor(log2(distance)), exactly."""
    return torch.frexp(distance.double()).exponent.long().clamp(min=0)


class Histogram(Reading):
    """The mean share of attention at distance 0, 1, 2–3, 4–7, ..., (B, H, octaves)."""

    by_row = False

    def start(self, source: Source) -> None:
        self.source, self.sum = source, zeros(source, self.bins_of(source), dtype=torch.float64)

    @staticmethod
    def bins_of(source: Source) -> int:
        """How many octaves the longest distance takes."""
        return octave_count(source.frame.T, source.frame.S)

    def take(self, tile: Tile) -> None:
        bins = octave((tile.position[..., None] - tile.col).abs())  # (t, s) or (G, t, s)
        lo, hi = int(bins.min()), int(bins.max())
        if lo == hi:
            self.sum[tile.heads, lo] += tile.weights.sum((1, 2))
            return
        for bin in range(lo, hi + 1):
            self.sum[tile.heads, bin] += torch.mul(tile.weights, bins == bin, out=tile.scratch).sum((1, 2))

    def finish(self) -> tuple[Tensor, ...]:
        mean = self.sum / max(self.source.shape[2], 1)
        return (unflat(mean.to(self.source.precise), self.source),)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        share = block.weights.new_zeros(*block.weights.shape[:2], self.bins_of(self.source))
        bins = octave(_apart(block, self.source)).expand(block.weights.shape).flatten(2)
        return (share.scatter_add(-1, bins, block.weights.flatten(2)) / self.source.shape[2],)


class Received(Reading):
    """What every key receives: the sum over queries, and how many queries could see it, (B, H, S)."""

    by_row = False
    differentiable = (True, False)

    def start(self, source: Source) -> None:
        S = source.shape[3]
        self.source = source
        self.sum, self.count = zeros(source, S, dtype=torch.float64), zeros(source, S)

    def take(self, tile: Tile) -> None:
        self.sum[tile.heads, tile.cols] += tile.strips.sum(1)
        seen = tile.visible
        t = tile.rows.stop - tile.rows.start
        self.count[tile.heads, tile.cols] += t if seen is None else _rows_seeing(seen, t)

    def finish(self) -> tuple[Tensor, ...]:
        return unflat(self.sum.to(self.source.precise), self.source), unflat(self.count, self.source)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        return block.weights.sum(-2), (block.scores > -math.inf).sum(-2).to(block.weights.dtype)


def _rows_seeing(seen: Tensor, t: int) -> Tensor:
    """How many of the tile's t rows see each key; `seen` may have one row for all."""
    return seen.expand(*seen.shape[:-2], t, seen.shape[-1]).sum(-2)


class Pooled(Reading):
    """The picture (B, H, rows, cols): weights summed over a cell's keys and averaged over its queries."""

    by_row = False

    def __init__(self, rows: int, cols: int) -> None:
        self.size = (rows, cols)

    def start(self, source: Source) -> None:
        self.source, self.sum = source, zeros(source, *self.size, dtype=torch.float64)

    def take(self, tile: Tile) -> None:
        T, S = self.source.shape[2:]
        R, C = self.size
        first, last = tile.rows.start * R // T, (tile.rows.stop - 1) * R // T  # query i falls into cell i · R // T
        columns = tile.col * C // S
        cells = self.sum[tile.heads, first : last + 1]
        cells.index_add_(2, columns, tile.strips.to(cells.dtype))

    def finish(self) -> tuple[Tensor, ...]:
        count = rows_per_cell(self.source.shape[2], self.size[0], self.sum.device)
        return (unflat((self.sum / count).to(self.source.precise), self.source),)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        (T, S), (R, C) = self.source.shape[2:], self.size
        B, H, t, _ = block.weights.shape
        rows, keys = (torch.arange(size, device=block.weights.device) for size in (T, S))
        part = block.weights.new_zeros(B, H, t, C).index_add(3, keys * C // S, block.weights)
        picture = block.weights.new_zeros(B, H, R, C).index_add(2, rows[block.rows] * R // T, part)
        return (picture / rows_per_cell(T, R, picture.device),)


def rows_per_cell(T: int, R: int, device: torch.device) -> Tensor:
    """How many of T queries fall into each of R rows of cells, (R, 1)."""
    edges = -(-torch.arange(R + 1, device=device) * T // R)
    return edges.diff()[:, None].clamp(min=1)


class PooledPeak(Reading):
    """The largest weight in every cell of a picture, (B, H, rows, cols)."""

    by_row = False
    differentiable = (False,)

    def __init__(self, rows: int, cols: int) -> None:
        self.size = (rows, cols)

    def start(self, source: Source) -> None:
        self.source, self.best = source, zeros(source, *self.size)

    def take(self, tile: Tile) -> None:
        T, S = self.source.shape[2:]
        R, C = self.size
        columns = tile.col * C // S
        for r in range(tile.rows.start * R // T, (tile.rows.stop - 1) * R // T + 1):
            first, stop = -(-r * T // R), -(-(r + 1) * T // R)  # the queries of this row of cells
            part = tile.weights[:, max(first - tile.rows.start, 0) : max(stop - tile.rows.start, 0)]
            best = self.best[tile.heads, r]
            best.scatter_reduce_(1, columns.expand(len(best), -1), part.amax(1), "amax")

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.best, self.source),)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        raise AssertionError("a maximum over queries is not differentiated")


class Mass(Reading):
    """The share of every query's attention that lies where a probe is True."""

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

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum, self.source),)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        return ((block.weights * self.probe.visible(block.grid)).sum(-1),)


class TopKeys(Reading):
    """The k largest weights of every query, largest first, and their keys (−1 where fewer are seen)."""

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

    def finish(self) -> tuple[Tensor, ...]:
        key = self.key.masked_fill(self.best <= HIDDEN, -1)
        return unflat(self.best.exp(), self.source), unflat(key, self.source)

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        top = block.weights.topk(self.k)
        return top.values, top.indices
