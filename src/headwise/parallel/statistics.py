"""Statistics of weights whose keys lie on several ranks: keys go round, readings take every tile, sums are reduced.

A tile's weights are exp(score − log-sum-exp of the whole row), the true ones wherever the tile lies, so every reading
of `readings.py` serves as it is. What belongs to rows stays with their rank; what is summed over queries is summed over
ranks.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.parallel.order import Order
from headwise.parallel.ring import Passing
from headwise.weights import readings, streaming
from headwise.weights.readings import Reading
from headwise.weights.source import Source, Tile, full_precision


def read(source: Source, asked: Sequence[Reading], order: Order) -> list[tuple[Tensor, ...]]:
    """The results of the readings: of our rows, or of all ranks' together where rows add up."""
    assert source.log_sum_exp is not None  # noqa: S101 - a map knows it before it asks
    used = [_of_the_text(reading) for reading in asked]
    for reading in used:
        reading.start(source)
    with torch.no_grad(), full_precision(source.query):
        for part in parts(source, order):
            for tile in streaming.tiles(part, source.log_sum_exp, used):
                for reading in used:
                    reading.take(tile)
        return [_reduced(reading, order) for reading in used]


def log_sum_exp(source: Source, order: Order) -> Tensor:
    """The row log-sum-exp of our queries, (B, H, t), sinks counted."""
    scoring = source.scoring.with_learnable(source.scoring.bias, None, source.scoring.learnable[2])
    plain = dataclasses.replace(source, scoring=scoring)
    found: Tensor | None = None
    for part in parts(plain, order):
        lse = streaming.compute_log_sum_exp(part)
        found = lse if found is None else torch.logaddexp(found, lse)
    assert found is not None  # noqa: S101 - every rank has keys
    return source.with_sinks(found)


def parts(source: Source, order: Order) -> Iterator[Source]:
    """The source with the keys of one chunk after the other, until all have passed."""
    held = [source.key]
    for step in range(order.ranks):
        passing = Passing(held, order) if step < order.ranks - 1 else None
        chunks = order.chunks((order.rank - step) % order.ranks, held[0].shape[2])
        for chunk, key in zip(chunks, held[0].chunk(2, dim=2), strict=True):
            yield dataclasses.replace(source, key=key, first_key=chunk.start)
        held = [] if passing is None else passing.wait()


def _reduced(reading: Reading, order: Order) -> tuple[Tensor, ...]:
    """A finished reading, over all ranks where it is not by row."""
    results = reading.finish()
    if reading.by_row:
        return results
    operation = dist.ReduceOp.MAX if isinstance(reading, readings.PooledPeak) else dist.ReduceOp.SUM
    results = tuple(x.contiguous() for x in results)
    for result in results:
        dist.all_reduce(result, operation, group=order.group)
    if isinstance(reading, readings.Histogram):  # a mean over as many queries on every rank
        return tuple(x / order.ranks for x in results)
    return results


def _of_the_text(reading: Reading) -> Reading:
    """The reading, or for a picture one whose rows of cells lie over the whole text and not over our rows."""
    kinds: dict[type[Reading], Callable[[int, int], Reading]] = {
        readings.Pooled: Picture,
        readings.PooledPeak: PeakPicture,
    }
    if type(reading) not in kinds:
        return reading
    rows, cols = reading.size  # type: ignore[attr-defined]
    return kinds[type(reading)](rows, cols)


class Picture(Reading):
    """`readings.Pooled` of a text of which we have some rows: the mean over all rows is the sum over ranks."""

    by_row = False

    def __init__(self, rows: int, cols: int) -> None:
        self.size = (rows, cols)

    def start(self, source: Source) -> None:
        self.source, self.sum = source, readings.zeros(source, *self.size, dtype=torch.float64)
        self.row = source.axis("row")

    def cells(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The row of cells of every query of a tile, and the column of every key."""
        frame = self.source.frame
        return self.row[tile.rows] * self.size[0] // frame.T, tile.col * self.size[1] // frame.S

    def take(self, tile: Tile) -> None:
        rows, columns = self.cells(tile)
        narrow = tile.weights.new_zeros(*tile.weights.shape[:2], self.size[1], dtype=torch.float64)
        narrow.index_add_(2, columns, tile.weights.to(torch.float64))
        self.sum[tile.heads] = self.sum[tile.heads].index_add(1, rows, narrow)

    def finish(self) -> tuple[Tensor, ...]:
        count = readings.rows_per_cell(self.source.frame.T, self.size[0], self.sum.device)
        return (readings.unflat((self.sum / count).to(self.source.precise), self.source),)

    def dense(self, block: object) -> tuple[Tensor, ...]:
        raise AssertionError("statistics over a ring of ranks have no gradient")


class PeakPicture(Picture, readings.PooledPeak):
    """`readings.PooledPeak` of a text of which we have some rows."""

    differentiable = (False,)

    def start(self, source: Source) -> None:
        self.source, self.best = source, readings.zeros(source, *self.size)
        self.row = source.axis("row")

    def take(self, tile: Tile) -> None:
        rows, columns = self.cells(tile)
        best = self.best[tile.heads].flatten(1)
        cell = (rows[:, None] * self.size[1] + columns).flatten()
        best.scatter_reduce_(1, cell.expand(len(best), -1), tile.weights.flatten(1), "amax")
        self.best[tile.heads] = best.view(-1, *self.size)

    def finish(self) -> tuple[Tensor, ...]:
        return (readings.unflat(self.best, self.source),)
