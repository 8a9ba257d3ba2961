"""Answers readings: chooses kernels or tiles, and makes the answers differentiable."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.weights import tiles
from headwise.weights.readings import Reading
from headwise.weights.source import Block, Source, row_blocks

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
        return tiles.compute_log_sum_exp(source) if found is None else found


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
    for i, result in zip(rest, tiles.stream(source, lse, [readings[i] for i in rest]) if rest else [], strict=True):
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
