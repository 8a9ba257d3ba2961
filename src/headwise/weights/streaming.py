"""The tile engine: streams all weights of a source past readings, in torch, on any device and for any scoring.

The tricks, each measured on 2 Zen 4 cores: scale and log-sum-exp are part of the matrix product, as its factor and its
addend, so that none is rounded before it is complete; weights are taken as powers of two, because torch's exp2 takes a
third of the time of its exp (the factor log2(e) comes after the difference: before it, it would double the error);
buffers are reused.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.weights.readings import Pooled, Reading
from headwise.weights.source import HIDDEN, Block, Places, Source, Spot, Tile, full_precision, row_blocks

# Numbers in one tile, of which three lie in memory at a time: 6 MiB each in float32 (CPU caches), 64 MiB on a GPU.
TILE = {"cpu": 3 * 2**19, "cuda": 2**24}
COLUMNS = {"cpu": 512, "cuda": 4096}
ROWS = {"cpu": (128, 1024), "cuda": (128, 4096)}  # fewest and most, if there are so many
KEY_BYTES = 2**26  # keys of one chunk of heads, which are copied where they are not in the dtype we compute in


def stream(source: Source, log_sum_exp: Tensor, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
    """The results of the readings, after one pass over all tiles any of them needs."""
    for reading in readings:
        reading.start(source)
    with torch.no_grad(), full_precision(source.query):
        for tile in tiles(source, log_sum_exp, readings):
            for reading in readings:
                reading.take(tile)
        return [reading.finish() for reading in readings]


def tiles(source: Source, log_sum_exp: Tensor, readings: Sequence[Reading]) -> Iterator[Tile]:
    """Every tile that some reading needs and some query sees; buffers are overwritten by the next one."""
    walk = Walk(source, normalizer_of(log_sum_exp).flatten(0, 1), readings)
    picture = next((reading for reading in readings if isinstance(reading, Pooled)), None)
    for spot in walk:
        logs, weights, scratch = walk.room(spot)
        walk.scores(spot, out=logs)
        exp(logs, out=weights)
        cuts = strip_cuts(picture, spot.rows, source.shape[2])
        yield Tile(source, spot, logs, weights, scratch, walk.places, cuts)


def compute_log_sum_exp(source: Source) -> Tensor:
    """The row log-sum-exp (B, H, T), by a running maximum over tiles. A row that sees nothing: minus infinity."""
    B, H, T, _ = source.shape
    with torch.no_grad(), full_precision(source.query):
        best = torch.full((B * H, T), HIDDEN, dtype=source.precise, device=source.query.device)
        total = torch.zeros_like(best)
        walk = Walk(source, None, [])
        for spot in walk:
            logs, weights, _ = walk.room(spot)
            walk.scores(spot, out=logs)
            top, running = best[spot.heads, spot.rows], total[spot.heads, spot.rows]
            new = torch.maximum(top, logs.amax(-1))
            exp(logs.sub_(new[..., None]), out=weights)
            if spot.visible is not None:  # a row that has seen nothing yet: exp(HIDDEN − HIDDEN) is 1
                weights.masked_fill_(~spot.visible, 0.0)
            running.mul_((top - new).exp_()).add_(weights.sum(-1))
            top.copy_(new)
        return source.with_sinks(torch.where(total > 0, best + total.log(), -math.inf).view(B, H, T))


def normalizer_of(log_sum_exp: Tensor) -> Tensor:
    """The log-sum-exp; for a row that sees nothing, a number that makes all its weights 0."""
    return torch.where(log_sum_exp == -math.inf, -HIDDEN, log_sum_exp)


def exp(logs: Tensor, out: Tensor) -> None:
    """`logs.exp()`, faster than torch has it."""
    torch.mul(logs, math.log2(math.e), out=out)
    out.exp2_()


def strip_cuts(picture: Pooled | None, rows: slice, T: int) -> list[int]:
    """The rows of a tile, counted from its first, at which a row of the picture begins."""
    if picture is None:
        return [0]
    R = picture.size[0]
    starts = (-(-r * T // R) - rows.start for r in range(rows.start * R // T + 1, (rows.stop - 1) * R // T + 1))
    return [0, *starts]


def flat_part(heads: Tensor, start: int, stop: int) -> Tensor:
    """`heads.flatten(0, 1)[start:stop]` of (B, H, T, D), a view within one sample, else a copy of just that."""
    H = heads.shape[1]
    pieces = [heads[b, max(start - b * H, 0) : min(stop - b * H, H)] for b in range(start // H, (stop - 1) // H + 1)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class Walk:
    """The order in which a source is walked: chunks of heads, blocks of rows, blocks of keys.

    Args:
        source: what to walk over.
        normalizer: (B·H, T), subtracted from all scores; None for scores as they are.
        readings: keys none of them asks about are left out; all are visited if there are none.
    """

    def __init__(self, source: Source, normalizer: Tensor | None, readings: Sequence[Reading]) -> None:
        self.source, self.normalizer, self.readings, self.places = source, normalizer, readings, Places(source)
        self.minus_normalizer = None if normalizer is None else -normalizer
        B, _, T, S = source.shape
        D = source.query.shape[3]
        device = "cpu" if source.query.is_cpu else "cuda"
        units = B * source.key.shape[1]
        size = torch.finfo(source.precise).bits // 8
        budget, columns, (fewest, most) = TILE[device] * 4 // size, COLUMNS[device], ROWS[device]
        self.columns = max(1, min(S, columns))
        by_tile = budget // max(1, source.group * min(T, fewest) * self.columns)
        by_key = KEY_BYTES // max(1, S * D * size)
        self.units = max(1, min(units, by_tile, by_key))
        self.rows = max(1, min(T, most, budget // (self.units * source.group * self.columns)))
        room = self.units * source.group * self.rows * self.columns
        self.buffers = torch.empty(3, room, dtype=source.precise, device=source.query.device)
        # Without soft-cap and bias the log of a weight is one product: scale · q·k − normalizer.
        self.folded = not source.scoring.biased and source.scoring.softcap is None
        self.scale = source.scoring.scale_for(D)

    def __iter__(self) -> Iterator[Spot]:
        """Every place where there is something to see."""
        source, group = self.source, self.source.group
        T, units = source.shape[2], source.shape[0] * source.key.shape[1]
        for unit in range(0, units, self.units):
            end = min(unit + self.units, units)
            heads, keys = slice(unit * group, end * group), self._keys(unit, end)
            for start in range(0, T, self.rows):
                rows = slice(start, min(start + self.rows, T))
                queries, span = self._queries(heads, rows), source.frame.span(rows)
                lo, hi = self._reach(span)
                for left in range(lo, hi, self.columns):
                    cols = slice(left, min(left + self.columns, hi))
                    bias = source.scoring.bias_at(self.places.grid(heads, rows, cols), source.query.dtype)
                    anything, visible = self._visible(heads, rows, cols, span, bias)
                    if anything:
                        yield Spot(heads, rows, cols, span, visible, queries, keys, bias)

    def room(self, spot: Spot) -> tuple[Tensor, Tensor, Tensor]:
        """Three buffers of the shape of a tile."""
        shape = [piece.stop - piece.start for piece in (spot.heads, spot.rows, spot.cols)]
        a, b, c = (buffer[: math.prod(shape)].view(shape) for buffer in self.buffers)
        return a, b, c

    def scores(self, spot: Spot, out: Tensor) -> None:
        """Logs of the weights into `out`; without a normalizer, of weights not yet normalised."""
        minus = self.minus_normalizer if self.folded else None
        if minus is not None:
            out.copy_(minus[spot.heads, spot.rows, None].expand(out.shape))
        flat = out.view(spot.queries.shape[0], -1, out.shape[2])
        first = self.source.first_key
        keys = spot.keys[:, spot.cols.start - first : spot.cols.stop - first]
        flat.baddbmm_(spot.queries, keys.transpose(1, 2), beta=0 if minus is None else 1, alpha=self.scale)
        if not self.folded:
            self._cap_and_bias(spot, out)
        if spot.visible is not None:
            out.masked_fill_(~spot.visible, HIDDEN)

    def _cap_and_bias(self, spot: Spot, out: Tensor) -> None:
        softcap = self.source.scoring.softcap
        if softcap is not None:
            out.div_(softcap).tanh_().mul_(softcap)
        if spot.bias is not None:
            out.add_(spot.bias)
        if self.normalizer is not None:
            out.sub_(self.normalizer[spot.heads, spot.rows, None])
        out.clamp_(min=HIDDEN)

    def _queries(self, heads: slice, rows: slice) -> Tensor:
        """(units, group · t, D): the queries of a group in a row."""
        query = flat_part(self.source.query[:, :, rows], heads.start, heads.stop).to(self.source.precise)
        G, t, D = query.shape
        return query.reshape(G // self.source.group, self.source.group * t, D)

    def _keys(self, unit: int, end: int) -> Tensor:
        """(units, S, D)."""
        return flat_part(self.source.key, unit, end).to(self.source.precise)

    def _reach(self, span: tuple[int, int]) -> tuple[int, int]:
        """The keys we have that these queries may see and some reading asks about."""
        frame, mask, first = self.source.frame, self.source.mask, self.source.first_key
        lo, hi = (0, frame.S) if mask is None else mask.key_range(*span, frame.T, frame.S)
        lo, hi = max(lo, first), min(hi, first + self.source.key.shape[2])
        asked = [reading.key_range(*span, frame.T, frame.S) for reading in self.readings]
        asked = [(a, b) for a, b in asked if a < b] if asked else [(lo, hi)]
        if not asked:
            return 0, 0
        return max(lo, min(a for a, _ in asked)), min(hi, max(b for _, b in asked))

    def _visible(
        self, heads: slice, rows: slice, cols: slice, span: tuple[int, int], bias: Tensor | None
    ) -> tuple[bool, Tensor | None]:
        """Whether anything of a tile is seen, and what; None where all of it is."""
        frame, mask = self.source.frame, self.source.mask
        if bias is None and (mask is None or mask.shows_all(*span, cols.start, cols.stop, frame.T, frame.S)):
            return True, None
        # Minus infinity in a bias hides as a mask does.
        seen = torch.ones((), dtype=torch.bool, device=self.source.query.device) if bias is None else bias > -math.inf
        if mask is not None:
            seen = seen & self.places.look(mask, heads, rows, cols)
        if seen.is_cpu:  # looking is free here; on a GPU it would make the host wait
            if not seen.any():
                return False, None
            if seen.all():
                return True, None
        return True, seen


# Answers readings: chooses kernels or tiles, and makes the answers differentiable.

BLOCK_BYTES = 2**26  # a dense block of rows in the backward pass; a few of that size live at a time


def read(source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
    """The results of all readings, in shared passes; differentiable where the source learns."""
    if not source.learns:
        return compute(source, readings)
    scoring = source.scoring
    tensors = (source.query, source.key, *scoring.learnable)
    flat = iter(Streamed.apply(source, readings, *tensors))  # type: ignore[no-untyped-call]
    return [tuple(next(flat) for _ in reading.differentiable) for reading in readings]


def log_sum_exp(source: Source) -> Tensor:
    """The row log-sum-exp (B, H, T), known or computed now; differentiable where the source learns."""
    if not source.learns:
        return normalizer(source)
    return read(source, [RowLogSumExp()])[0][0]


def normalizer(source: Source) -> Tensor:
    """The row log-sum-exp (B, H, T) as a plain number."""
    if source.log_sum_exp is not None:
        return source.log_sum_exp.detach()
    if source.spread is not None and source.keys_apart:
        return source.spread.log_sum_exp(source)
    if 0 in source.shape:
        return torch.full(source.shape[:3], -torch.inf, dtype=source.precise, device=source.query.device)
    kernels = kernels_for(source)
    with torch.no_grad():
        found = None if kernels is None else kernels.log_sum_exp(source)
        return compute_log_sum_exp(source) if found is None else found


def compute(source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
    """The results of all readings, as plain numbers."""
    if source.spread is not None and source.keys_apart:
        return source.spread.read(source, readings)
    B, H, T, S = source.shape
    if not (B and H and T and S):
        for reading in readings:
            reading.start(source)
        return [reading.finish() for reading in readings]
    for reading in readings:
        reading.source = source  # `dense` needs it where kernels answer and `start` is never called
    lse = normalizer(source)
    kernels = kernels_for(source)
    with torch.no_grad():
        answers: dict[int, tuple[Tensor, ...]] = {} if kernels is None else kernels.read(source, lse, readings)
    rest = [i for i in range(len(readings)) if i not in answers]
    for i, result in zip(rest, stream(source, lse, [readings[i] for i in rest]) if rest else [], strict=True):
        answers[i] = result
    return [answers[i] for i in range(len(readings))]


def kernels_for(source: Source) -> Any:
    """The module of kernels where they can run: CUDA with Triton."""
    if not source.query.is_cuda:
        return None
    try:
        from headwise.weights import kernels
    except ImportError:  # a CUDA build of torch without Triton: tiles are slower and as exact
        return None
    return kernels


class RowLogSumExp(Reading):
    """The row log-sum-exp itself, for the gradient of single weights."""

    def start(self, source: Source) -> None:
        self.source = source

    def take(self, tile: Any) -> None:
        """Nothing: it is known before tiles can be made."""

    def finish(self) -> tuple[Tensor, ...]:
        return (normalizer(self.source).clone(),)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return 0, 0

    def dense(self, block: Block) -> tuple[Tensor, ...]:
        scores = block.scores
        empty = (scores == -torch.inf).all(-1)
        if block.sinks is not None:
            scores = torch.cat([scores, block.sinks.expand(*scores.shape[:-1], 1)], -1)
        return (scores.masked_fill(empty[..., None], 0.0).logsumexp(-1).masked_fill(empty, -torch.inf),)


class Streamed(torch.autograd.Function):
    """Readings with a gradient: forwards by the engine, backwards by dense blocks of rows computed again.

    The backward pass takes memory for one block of rows, whatever the length.
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Source,
        readings: Sequence[Reading],
        query: Tensor,
        key: Tensor,
        *learnable: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.source, ctx.readings = source, readings
        ctx.save_for_backward(query, key, *learnable)
        results = compute(source, readings)
        fixed = [
            x
            for r, xs in zip(readings, results, strict=True)
            for x, d in zip(xs, r.differentiable, strict=True)
            if not d
        ]
        ctx.mark_non_differentiable(*fixed)
        return tuple(x for xs in results for x in xs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of query, key and what a scoring can learn, block by block."""
        if torch.is_grad_enabled():  # create_graph=True: a second derivative would silently miss this part
            raise OptionError(
                "statistics of an attention map can be differentiated once, and create_graph=True asks for more. "
                "Compute it from weights.to_tensor(), whose formula torch can differentiate again."
            )
        leaves = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        query, key, *learnable = leaves
        scoring = ctx.source.scoring.with_learnable(*learnable)
        source = dataclasses.replace(ctx.source, query=query, key=key, scoring=scoring)
        wanted = [x for x in leaves if x is not None]
        sums = [torch.zeros_like(x) for x in wanted]
        B, H, T, S = source.shape
        T = T if S else 0  # without keys there is nothing to differentiate
        for rows in row_blocks(T, B * H * S * torch.finfo(source.precise).bits // 8, BLOCK_BYTES):
            with torch.enable_grad():
                block = source.block(rows)
                outputs, grads = _outputs(ctx.readings, block, gradients)
            if outputs:
                parts = torch.autograd.grad(outputs, wanted, grads, allow_unused=True)
                for total, part in zip(sums, parts, strict=True):
                    if part is not None:
                        total += part
        found = iter(sums)
        return None, None, *(None if x is None else next(found) for x in leaves)


def _outputs(
    readings: Sequence[Reading], block: Block, gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """What one block says, differentiably, and the gradient that arrived for each."""
    outputs, grads, incoming = [], [], iter(gradients)
    for reading in readings:
        arriving = [next(incoming) for _ in reading.differentiable]
        if not any(reading.differentiable):
            continue
        for value, grad, wanted in zip(reading.dense(block), arriving, reading.differentiable, strict=True):
            if wanted and value.requires_grad:
                outputs.append(value)
                grads.append((grad[:, :, block.rows] if reading.by_row else grad).to(value.dtype))
    return outputs, grads
