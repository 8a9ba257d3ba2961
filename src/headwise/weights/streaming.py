"""Answers readings of a source: chooses kernels or tiles, and makes the results differentiable."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.masks import Grid
from headwise.weights import compiled
from headwise.weights.readings import Reading, RowLogSumExp
from headwise.weights.source import Axis, RowBlock, Source, full_precision, row_blocks
from headwise.weights.sums import Sum
from headwise.weights.tiles import TileWalk, finite_normalizer

BLOCK_BYTES = 2**26  # a dense block of rows in the backward pass; a few of that size exist at a time


def read(source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
    """The results of all readings, in shared passes; differentiable if the source learns."""
    if torch.compiler.is_compiling():
        return traced(source, readings)
    if not source.learns:
        return compute(source, readings)
    for reading in readings:
        reading.check_differentiable()
    tensors = (source.query, source.key, *source.scoring.learnable)
    flat = iter(Streamed.apply(source, readings, *tensors))  # type: ignore[no-untyped-call]
    return [tuple(next(flat) for _ in reading.differentiable) for reading in readings]


def traced(source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
    """The results in a compiled graph, by the plain formulas on all rows: tiles would fix the length into the graph.

    The graph then holds the whole T×S matrix, unless the compiler can avoid it.
    """
    if source.keys_apart:
        raise OptionError(f"statistics of keys on several ranks cannot be compiled. {OUTSIDE}")
    block = source.block(slice(None))
    for reading in readings:
        reading.source = source  # `start` is not called
        if type(reading).dense is Reading.dense:
            name = type(reading).__name__
            raise OptionError(f"{name} has no dense(block), which a compiled graph needs. Define it, or: {OUTSIDE}")
    return [
        tuple(x if flag else x.detach() for x, flag in zip(reading.dense(block), reading.differentiable, strict=True))
        for reading in readings
    ]


OUTSIDE = "Return the map from the compiled function and compute this outside of it, where it streams over the weights."


def check_not_compiling(what: str) -> None:
    """Raise while torch.compile or torch.export traces: `what` needs numbers, and a graph has none."""
    if torch.compiler.is_compiling():
        raise OptionError(f"{what} inside a compiled function needs numbers that are not known yet. {OUTSIDE}")


def compute(source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
    """The results of all readings, without gradients. Afterwards `source.log_sum_exp` is known."""
    if source.keys_apart:
        normalizer(source)
        return source.shards.read(source, readings)  # type: ignore[union-attr]
    if 0 in source.shape:
        normalizer(source)
        for reading in readings:
            reading.start(source)
        return [reading.finish() for reading in readings]
    if source.query.is_cuda:
        return _compute_on_cuda(source, readings)
    lse = normalizer(source)
    for reading in readings:
        reading.start(source)
    feed(source, lse, readings)
    return [reading.finish() for reading in readings]


def feed(source: Source, lse: Tensor, readings: Sequence[Reading]) -> None:
    """Hand all weights of the source to readings that have started, by the compiled loop where it can or by tiles."""
    rest = list(readings) if compiled.refuses(source) else _feed_compiled(source, lse, readings)
    if rest:
        TileWalk(source).feed(lse, rest)


def _feed_compiled(source: Source, lse: Tensor, readings: Sequence[Reading]) -> list[Reading]:
    """Have the compiled loop add up what it can; the readings that it cannot serve."""
    rest: list[Reading] = []
    sums: list[Sum] = []
    for reading in readings:
        # What a subclass sums may differ from what its base does, so it must say so itself.
        asked = reading.sums(source) if "sums" in vars(type(reading)) else None
        if asked is None or not all(compiled.supports(part, source) for part in asked):
            rest.append(reading)
        else:
            sums += asked
    compiled.add(source, finite_normalizer(lse), sums)
    return rest


def _compute_on_cuda(source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
    """The results of kernels for the readings they support, and of tiles for the rest."""
    for reading in readings:
        reading.source = source  # `dense` needs it, and `start` is not called if kernels answer
    lse = normalizer(source)
    kernels = kernels_for(source)
    with torch.no_grad():
        answers: dict[int, tuple[Tensor, ...]] = {} if kernels is None else kernels.read(source, lse, readings)
    rest = [i for i in range(len(readings)) if i not in answers]
    if rest:
        answers |= zip(rest, TileWalk(source).read(lse, [readings[i] for i in rest]), strict=True)
    return [answers[i] for i in range(len(readings))]


def path(source: Source) -> str:
    """How statistics of this source are computed, in a sentence."""
    if source.query.is_cuda:
        kernels = kernels_for(source)
        reason = "Triton is not installed" if kernels is None else kernels.refuses(source)
        return "Triton kernels" if reason is None else f"tiles in torch, because Triton kernels cannot run: {reason}"
    reason = compiled.refuses(source)
    return compiled.ABOUT if reason is None else f"tiles in torch, because the compiled loop cannot run: {reason}"


def log_sum_exp(source: Source) -> Tensor:
    """The row log-sum-exp (B, H, T), known or computed now; differentiable if the source learns."""
    return read(source, [RowLogSumExp()])[0][0] if source.learns else normalizer(source)


def normalizer(source: Source) -> Tensor:
    """The row log-sum-exp (B, H, T) without a gradient; the source keeps it."""
    if source.log_sum_exp is None:
        source.log_sum_exp = _normalizer(source)
    return source.log_sum_exp.detach()


def _normalizer(source: Source) -> Tensor:
    if source.keys_apart:
        return source.shards.log_sum_exp(source)  # type: ignore[union-attr]
    if torch.compiler.is_compiling():
        return traced(source, [RowLogSumExp()])[0][0].detach()
    if 0 in source.shape:
        return torch.full(source.shape[:3], -torch.inf, dtype=source.precise, device=source.query.device)
    kernels = kernels_for(source)
    with torch.no_grad():
        found: Tensor | None = None if kernels is None else kernels.log_sum_exp(source)
        if found is None and not compiled.refuses(source):
            found = source.with_sinks(compiled.log_sum_exp(source))
        return TileWalk(source).log_sum_exp() if found is None else found


def kernels_for(source: Source) -> Any:
    """The module of kernels, if they can run: CUDA with Triton."""
    if not source.query.is_cuda or torch.compiler.is_compiling():
        return None
    try:
        from headwise.weights import kernels
    except ImportError:  # a CUDA build of torch without Triton: tiles are slower and just as exact
        return None
    return kernels


# The weights themselves.


def dense_weights(source: Source, cols: Axis, dtype: torch.dtype | None = None) -> Tensor:
    """All rows of the source and these keys, (B, H, t, s), in `dtype`, by default the precise one."""
    dtype = dtype or source.precise
    if 0 in source.shape or len(cols) == 0:
        return torch.zeros(*source.shape[:3], len(cols), dtype=dtype, device=source.query.device)
    found = dense_by_kernel(source, cols, dtype)
    if found is not None:
        return found
    lse = log_sum_exp(source)
    keys = cols.to(source.query.device) if isinstance(cols, Tensor) else slice(cols.start, cols.stop, cols.step)
    scores = source.scores(cols=keys)  # of an empty row, all minus infinity
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp().to(dtype)


def dense_by_kernel(source: Source, cols: Axis, dtype: torch.dtype) -> Tensor | None:
    """The same from one kernel: on CUDA, for consecutive keys and without a gradient; else None."""
    kernels = kernels_for(source)
    if kernels is None or source.learns or 0 in source.shape or isinstance(cols, Tensor) or cols.step != 1:
        return None
    found: Tensor | None = kernels.weights(source, normalizer(source), cols, dtype)
    return found


def single_weights(source: Source, batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """Weights one by one, at these indices, which have one shape."""
    frame = source.frame
    # In float64: a float32 sum over the width would have a larger error than the matrix product of dense weights.
    query = source.query[batch, head, row].to(torch.float64)  # (..., D)
    key = source.key[batch, head // source.group, col].to(torch.float64)
    grid = Grid(source.axis("batch")[batch], source.axis("head")[head], source.axis("row")[row], col, frame.T, frame.S)
    with full_precision(query):
        scores = source.finished((query * key).sum(-1), grid)
    lse = log_sum_exp(source)[batch, head, row]
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp().to(source.query.dtype)


class Streamed(torch.autograd.Function):
    """Readings with a gradient: forward by kernels or tiles, backward by dense blocks of rows computed again.

    The backward pass needs memory for one block of rows, whatever the length.
    """

    @staticmethod
    def forward(
        ctx: Any, source: Source, readings: Sequence[Reading], query: Tensor, key: Tensor, *learnable: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.source, ctx.readings = source, readings
        ctx.save_for_backward(query, key, *learnable)
        computed = compute(source, readings)
        for reading, found in zip(readings, computed, strict=True):
            reading.check_results(found)
        results = [x for found in computed for x in found]
        wanted = [flag for reading in readings for flag in reading.differentiable]
        ctx.mark_non_differentiable(*(x for x, flag in zip(results, wanted, strict=True) if not flag))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key and the learnable tensors of the scoring, block by block."""
        if torch.is_grad_enabled():  # create_graph=True: a second derivative would silently lack this part
            raise OptionError(
                "statistics of an attention map can be differentiated once, and create_graph=True asks for more. "
                "Compute it from weights.to_tensor(), which torch can differentiate again."
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
    readings: Sequence[Reading], block: RowBlock, gradients: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The differentiable results of one block, and the gradient that arrived for each."""
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
