"""Query heads that share a key as rows of one matrix product, for keys and values of different widths.

torch has no fused kernel for grouped heads whose values are not as wide as their keys, or that are wider than 256 on
CUDA: it would repeat every key for every query head. Absorbed latent attention is such a call, with one key for all
heads. Here the query heads of a group become rows of one matrix, so keys are read once and nothing is repeated.
"""

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from headwise.attention.backends.base import Backend, Call
from headwise.weights.source import full_precision, row_blocks

BLOCK_BYTES = 2**28  # scores of one block of rows
HALF = (torch.float16, torch.bfloat16)


class SharedKeys(Backend):
    """Matmul, softmax, matmul, with scores in float32 or better."""

    name = "shared"
    summary = "query heads that share a key as rows of one matrix product"

    def refuses(self, call: Call) -> str | None:
        query, value = call.query, call.value
        if not call.repeats_keys:
            return "it is for grouped heads whose keys and values differ in width"
        if call.scoring.beyond_sdpa:
            return "it supports neither soft-cap nor sinks nor relative positions"
        if query.numel() == 0 or value.numel() == 0:
            return "an axis has size 0"
        return None

    def run(self, call: Call) -> Tensor:
        B, H, T, _ = call.query.shape
        S = call.key.shape[2]
        call = call._replace(scoring=call.scoring.simplified(T, S))
        if T == 1 or torch.compiler.is_compiling():  # looking at other lengths would fix them into the graph
            return read_rows(call, slice(0, T), slice(0, S))
        mask, parts = call.scoring.mask, []
        for rows in row_blocks(T, B * H * S * torch.finfo(_precise(call.query)).bits // 8, BLOCK_BYTES):
            lo, hi = (0, S) if mask is None else mask.key_range(rows.start, rows.stop, T, S)
            if lo == hi:  # rows that see nothing get one key, which is hidden
                lo, hi = min(lo, S - 1), min(lo, S - 1) + 1
            parts.append(read_rows(call, rows, slice(lo, hi)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def read_rows(call: Call, rows: slice, cols: slice) -> Tensor:
    """What the queries `rows` read from the keys `cols`, (B, H, t, Dv)."""
    query, key, value = call.query[:, :, rows], call.key[:, :, cols], call.value[:, :, cols]
    (B, H, t, D), (Hkv, s) = query.shape, key.shape[1:3]
    with full_precision(query) if torch.is_autocast_enabled(query.device.type) else nullcontext():
        scores = _scores(query.reshape(B * Hkv, -1, D), key.reshape(B * Hkv, s, D), call.scoring.scale_for(D))
        bias = call.scoring.additive(call.query, call.key.shape[2], rows, cols)
        weights = _softmax(scores.view(B, H, t, s), bias)
        if call.dropout > 0:
            weights = torch.dropout(weights, call.dropout, train=True)
        weights = weights.view(B * Hkv, -1, s)
        if query.is_cuda:  # as fused kernels do, the second product takes weights in the dtype of the values
            read = weights.to(value.dtype) @ value.reshape(B * Hkv, s, -1)
        else:
            read = (weights @ value.reshape(B * Hkv, s, -1).to(weights.dtype)).to(value.dtype)
    return read.view(B, H, t, -1)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled dot products (N, rows, s) of (N, rows, D) and (N, s, D), in float32 or better."""
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if query.is_cuda and query.dtype in HALF and not learns and not torch.compiler.is_compiling():
        return torch.bmm(query, key.mT, out_dtype=torch.float32).mul_(scale)  # sums are kept in float32
    precise = _precise(query)
    start = torch.zeros((), dtype=precise, device=query.device)
    return torch.baddbmm(start, query.to(precise), key.to(precise).mT, beta=0, alpha=scale)


def _softmax(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Weights (B, H, t, s); zeros in a row that sees nothing."""
    if bias is None:
        return scores.softmax(-1)
    scores = scores + bias.to(scores.dtype)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def _precise(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
