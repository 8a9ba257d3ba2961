"""Tiles: all weights of a source, one tile at a time, in torch, on any device and for any scoring.

What makes it fast, each measured on 2 Zen 4 cores: scale and log-sum-exp are part of the matrix product, as its factor
and its addend, so nothing is rounded before the sum is complete; weights are computed as powers of two, because
`torch.exp2` takes a third of the time of `torch.exp` (the factor log2(e) is applied after the difference, since
applying it before would double the error); buffers are reused.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.masks import Grid, Mask
from headwise.weights.source import Source, full_precision

if TYPE_CHECKING:
    from headwise.weights.readings import Reading

# Numbers in one tile; three tiles are in memory at a time: 6 MiB each in float32 (CPU caches), 64 MiB on a GPU.
TILE = {"cpu": 3 * 2**19, "cuda": 2**24}
COLUMNS = {"cpu": 512, "cuda": 4096}
ROWS = {"cpu": (128, 1024), "cuda": (128, 4096)}  # at least and at most, if there are that many
KEY_BYTES = 2**26  # keys of one chunk of heads, which are copied if they are not in the precise dtype
MANY_STRIPS = 16  # with more strips, a product with a selector is faster than one sum per strip
HIDDEN = -1e30  # log of a hidden weight: finite, so that exp(HIDDEN) · HIDDEN is 0 and not NaN


class Spot(NamedTuple):
    """Where a tile is, what is visible there, and what its scores are computed from."""

    heads: slice  # of the B·H heads of all samples
    rows: slice  # of the source's queries
    cols: slice  # of the keys
    span: tuple[int, int]  # the first query and the last + 1, as indices into the whole
    visible: Tensor | None  # broadcasts to the tile; None if everything is visible
    queries: Tensor  # (units, group · t, D)
    keys: Tensor  # (units, S, D)
    bias: Tensor | None  # broadcasts to the tile


class Tile:
    """Weights (G, t, s) of some heads, rows and keys, and their logs. Its buffers are overwritten by the next tile.

    Args:
        places: the indices of the source's axes.
        spot: where the tile is.
        logs: the logs of the weights, HIDDEN or less where hidden.
        weights: exp(logs).
        scratch: a buffer of the same shape, free to use.
        strip_rows: the rows of the picture being made, for which `strips` are summed; None if there is none.
    """

    def __init__(
        self, places: "Places", spot: Spot, logs: Tensor, weights: Tensor, scratch: Tensor, strip_rows: int | None
    ) -> None:
        self.heads, self.rows, self.cols, self.span, self.visible = spot[:5]
        self.logs, self.weights, self.scratch, self.strip_rows = logs, weights, scratch, strip_rows
        self._places = places
        self._mass: Tensor | None = None
        self._strips: dict[int | None, Tensor] = {}

    @property
    def col(self) -> Tensor:
        """The keys, (s,)."""
        return self._places.key[self.cols]

    @property
    def position(self) -> Tensor:
        """The positions of the queries among the keys, (t,), or (G, t) where samples differ."""
        found = self._places.position
        return found[self.rows] if found.dim() == 1 else found[self.heads, self.rows]

    @property
    def grid(self) -> Grid:
        """The indices of the tile in the whole; queries at their positions."""
        grid, positions = self._places.grid(self.heads, self.rows, self.cols), self._places.placed
        return grid if positions is None else grid.placed(positions)

    @property
    def mass(self) -> Tensor:
        """Weights summed over the tile's keys, (G, t)."""
        if self._mass is None:
            self._mass = self.weights.sum(-1)
        return self._mass

    def strips(self, R: int | None) -> Tensor:
        """Weights summed over the rows of each strip, (G, strips, s). R strips divide all T rows; None makes it one."""
        if R not in self._strips:
            self._strips[R] = self._summed(self._cuts(R))
        return self._strips[R]

    def where(self, mask: Mask) -> Tensor:
        """This tile of a mask or probe; broadcasts to the weights."""
        return self._places.look(mask, self.heads, self.rows, self.cols)

    def with_weights(self, weights: Tensor) -> "Tile":
        """The same tile with other numbers (G, t, s) in place of its weights; the logs stay."""
        made = copy.copy(self)
        made.weights, made._mass, made._strips = weights, None, {}
        return made

    def _cuts(self, R: int | None) -> list[int]:
        """The rows of the tile, counted from its first, where a strip begins."""
        if R is None:
            return [0]
        T, start, last = len(self._places.row), self.rows.start, self.rows.stop - 1
        return [0, *(-(-r * T // R) - start for r in range(start * R // T + 1, last * R // T + 1))]

    def _summed(self, cuts: list[int]) -> Tensor:
        if len(cuts) > MANY_STRIPS:
            which = torch.bucketize(torch.arange(self.weights.shape[1]), torch.tensor(cuts[1:]), right=True)
            selector = torch.nn.functional.one_hot(which, len(cuts)).T.to(self.weights)
            return torch.bmm(selector.expand(len(self.weights), -1, -1), self.weights)
        strips = self.weights.tensor_split(cuts[1:], dim=1)
        return torch.stack([strip.sum(1) for strip in strips], 1)


class Places:
    """The indices of a source's axes in the whole, as tensors. The heads of all samples form one axis."""

    def __init__(self, source: Source) -> None:
        B, H, _, S = source.shape
        self.T, self.S = source.frame.T, source.frame.S
        self.batch = source.axis("batch").repeat_interleave(H)
        self.head = source.axis("head").repeat(B)
        self.row = source.axis("row")
        self.placed = source.scoring.positions
        position = source.positions()
        self.position = position if position.dim() == 1 else position.expand(B, H, -1).flatten(0, 1)
        self.key = torch.arange(S, device=source.query.device)

    def grid(self, heads: slice, rows: slice, cols: slice) -> Grid:
        """The indices of a tile."""
        batch, head = self.batch[heads, None, None], self.head[heads, None, None]
        return Grid(batch, head, self.row[rows, None], self.key[cols], self.T, self.S)

    def look(self, mask: Mask, heads: slice, rows: slice, cols: slice) -> Tensor:
        """A tile of a mask, with one head if all samples and heads are the same."""
        batch, head, _, _ = mask.extent
        if batch is None and head is None:
            heads = slice(heads.start, heads.start + 1)
        return mask.visible(self.grid(heads, rows, cols))


class TileWalk:
    """A walk over the tiles of a source: chunks of heads, then blocks of rows, then blocks of keys."""

    def __init__(self, source: Source) -> None:
        self.source, self.places = source, Places(source)
        B, _, T, S = source.shape
        D = source.query.shape[3]
        device = "cpu" if source.query.is_cpu else "cuda"
        self.all_units = B * source.key.shape[1]  # a unit is a key head with its group of query heads
        size = torch.finfo(source.precise).bits // 8
        budget, columns, (fewest, most) = TILE[device] * 4 // size, COLUMNS[device], ROWS[device]
        self.columns = max(1, min(S, columns))
        by_tile = budget // max(1, source.group * min(T, fewest) * self.columns)
        by_key = KEY_BYTES // max(1, S * D * size)
        self.units = max(1, min(self.all_units, by_tile, by_key))
        self.rows = max(1, min(T, most, budget // (self.units * source.group * self.columns)))
        room = self.units * source.group * self.rows * self.columns
        self.buffers = torch.empty(3, room, dtype=source.precise, device=source.query.device)
        # Without soft-cap, bias and function the log of a weight is one product: scale · q·k − normalizer.
        self.biased, self.softcap = source.scoring.biased, source.scoring.softcap
        self.folded = not self.biased and source.scoring.linear
        self.scale = source.scoring.scale_for(D)

    def log_sum_exp(self) -> Tensor:
        """The row log-sum-exp (B, H, T), sinks included, by a running maximum; minus infinity for an empty row."""
        source = self.source
        B, H, T, _ = source.shape
        with torch.no_grad(), full_precision(source.query):
            best = torch.full((B * H, T), HIDDEN, dtype=source.precise, device=source.query.device)
            total = torch.zeros_like(best)
            for spot in self._spots(()):
                logs, weights, _ = self._buffers(spot)
                self._write_logs(spot, logs, None)
                top, running = best[spot.heads, spot.rows], total[spot.heads, spot.rows]
                new = torch.maximum(top, logs.amax(-1))
                exp(logs.sub_(new[..., None]), out=weights)
                if spot.visible is not None:  # a row that has seen nothing yet: exp(HIDDEN − HIDDEN) is 1
                    weights.masked_fill_(~spot.visible, 0.0)
                added = weights.sum(-1)
                if source.scoring.score is not None:  # the same if the user's function hides everything
                    added.masked_fill_(new <= HIDDEN, 0.0)
                running.mul_((top - new).exp_()).add_(added)
                top.copy_(new)
            return source.with_sinks(torch.where(total > 0, best + total.log(), -math.inf).view(B, H, T))

    def read(self, log_sum_exp: Tensor, readings: "Sequence[Reading]") -> list[tuple[Tensor, ...]]:
        """The results of the readings, after one pass over all tiles that any of them needs."""
        for reading in readings:
            reading.start(self.source)
        self.feed(log_sum_exp, readings)
        return [reading.finish() for reading in readings]

    def feed(self, log_sum_exp: Tensor, readings: "Sequence[Reading]") -> None:
        """Hand every tile that some reading needs and some query sees to all readings."""
        normalizer = finite_normalizer(log_sum_exp)
        strip_rows = next((reading.strip_rows for reading in readings if reading.strip_rows), None)
        with torch.no_grad(), full_precision(self.source.query):
            for spot in self._spots(readings):
                logs, weights, scratch = self._buffers(spot)
                self._write_logs(spot, logs, normalizer)
                if self.source.scoring.score is not None:  # what its function hides is known only now
                    spot = spot._replace(visible=logs > HIDDEN)
                exp(logs, out=weights)
                tile = Tile(self.places, spot, logs, weights, scratch, strip_rows)
                for reading in readings:
                    reading.take(tile)

    def _spots(self, readings: "Sequence[Reading]") -> Iterator[Spot]:
        """Every tile with something visible that some reading needs; without readings, all of them."""
        source, group = self.source, self.source.group
        T = source.shape[2]
        for unit in range(0, self.all_units, self.units):
            end = min(unit + self.units, self.all_units)
            heads, keys = slice(unit * group, end * group), flat_part(source.key, unit, end).to(source.precise)
            for start in range(0, T, self.rows):
                rows = slice(start, min(start + self.rows, T))
                queries = flat_part(source.query[:, :, rows], heads.start, heads.stop).to(source.precise)
                queries = queries.reshape(end - unit, -1, queries.shape[2])  # the queries of a group in a row
                span = source.frame.span(rows)
                lo, hi = self._reach(span, readings)
                for left in range(lo, hi, self.columns):
                    cols = slice(left, min(left + self.columns, hi))
                    bias = None
                    if self.biased:
                        bias = source.scoring.bias_at(self.places.grid(heads, rows, cols), source.query.dtype)
                    some, visible = self._visible(heads, rows, cols, span, bias)
                    if some:
                        yield Spot(heads, rows, cols, span, visible, queries, keys, bias)

    def _reach(self, span: tuple[int, int], readings: "Sequence[Reading]") -> tuple[int, int]:
        """The range of keys we have that these queries may see and some reading needs."""
        frame, mask, first = self.source.frame, self.source.mask, self.source.first_key
        lo, hi = (0, frame.S) if mask is None else mask.key_range(*span, frame.T, frame.S)
        lo, hi = max(lo, first), min(hi, first + self.source.key.shape[2])
        if not readings:
            return lo, hi
        least, most = hi, lo
        for reading in readings:
            a, b = reading.key_range(*span, frame.T, frame.S)
            if a < b:
                least, most = min(least, a), max(most, b)
        return max(lo, least), min(hi, most)

    def _visible(
        self, heads: slice, rows: slice, cols: slice, span: tuple[int, int], bias: Tensor | None
    ) -> tuple[bool, Tensor | None]:
        """Whether anything in a tile is visible, and what; None if all of it is."""
        frame, mask = self.source.frame, self.source.mask
        if bias is None and (mask is None or mask.shows_all(*span, cols.start, cols.stop, frame.T, frame.S)):
            return True, None
        # Minus infinity in a bias hides a key just as a mask does.
        seen = torch.ones((), dtype=torch.bool, device=self.source.query.device) if bias is None else bias > -math.inf
        if mask is not None:
            seen = seen & self.places.look(mask, heads, rows, cols)
        if seen.is_cpu:  # checking is free here; on a GPU it would make the host wait
            if not seen.any():
                return False, None
            if seen.all():
                return True, None
        return True, seen

    def _buffers(self, spot: Spot) -> tuple[Tensor, Tensor, Tensor]:
        """Three buffers of the shape of a tile."""
        heads, rows, cols = spot[:3]
        shape = (heads.stop - heads.start, rows.stop - rows.start, cols.stop - cols.start)
        a, b, c = self.buffers[:, : math.prod(shape)].view(3, *shape).unbind()
        return a, b, c

    def _write_logs(self, spot: Spot, out: Tensor, normalizer: Tensor | None) -> None:
        """The logs of the weights into `out`; without a normalizer (B·H, T), the scores."""
        added = None
        if self.folded and normalizer is not None:
            added = out.copy_((-normalizer[spot.heads, spot.rows, None]).expand(out.shape))
        first = self.source.first_key
        keys = spot.keys[:, spot.cols.start - first : spot.cols.stop - first]
        flat = out.view(spot.queries.shape[0], -1, out.shape[2])
        flat.baddbmm_(spot.queries, keys.transpose(1, 2), beta=0 if added is None else 1, alpha=self.scale)
        if not self.folded:
            self._finish(spot, out, normalizer)
        if spot.visible is not None:
            out.masked_fill_(~spot.visible, HIDDEN)

    def _finish(self, spot: Spot, out: Tensor, normalizer: Tensor | None) -> None:
        """Soft-cap, the user's function, bias and normalizer."""
        if self.softcap is not None:
            out.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.source.scoring.score is not None:
            grid = self.places.grid(spot.heads, spot.rows, spot.cols)
            grid = grid._replace(batch=grid.batch[:, None], head=grid.head[:, None])  # always four axes: (G, 1, t, s)
            out.copy_(self.source.scoring.changed(out[:, None], grid)[:, 0])
        if spot.bias is not None:
            out.add_(spot.bias)
        if normalizer is not None:
            out.sub_(normalizer[spot.heads, spot.rows, None])
        out.clamp_(min=HIDDEN)


def finite_normalizer(log_sum_exp: Tensor) -> Tensor:
    """(B·H, T): the log-sum-exp; for a row that sees nothing, a number that makes all its weights 0."""
    return torch.where(log_sum_exp == -math.inf, -HIDDEN, log_sum_exp).flatten(0, 1)


def exp(logs: Tensor, out: Tensor) -> None:
    """`logs.exp()`, faster than `torch.exp`."""
    torch.mul(logs, math.log2(math.e), out=out)
    out.exp2_()


def flat_part(heads: Tensor, start: int, stop: int) -> Tensor:
    """`heads.flatten(0, 1)[start:stop]` of (B, H, T, D): a view within one sample, else a copy of that part only."""
    H = heads.shape[1]
    first, last = start // H, (stop - 1) // H
    if first == last:
        return heads[first, start - first * H : stop - first * H]
    return torch.cat([heads[b, max(start - b * H, 0) : min(stop - b * H, H)] for b in range(first, last + 1)])
