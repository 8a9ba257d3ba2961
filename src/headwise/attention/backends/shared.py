"""Query heads that share a key as rows of one matrix product, for keys and values of different widths.

torch has no fused kernel for grouped heads whose values are not as wide as their keys, or that are wider than 256 on
CUDA: it would repeat every key for every query head. Absorbed latent attention is such a call, with one key for all
heads. Here the query heads of a group become rows of one matrix, so keys are read once and nothing is repeated.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.base import Backend, Call
from headwise.weights.source import full_precision, row_blocks

BLOCK_BYTES = 2**28  # scores of one block of rows
PART = 2**21  # numbers of a key or value that are converted to float32 at a time
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
        if _fits_one_kernel(call):
            return read_as_one_head(call)
        if T == 1 or torch.compiler.is_compiling():  # looking at other lengths would fix them into the graph
            return read_rows(call, slice(0, T), slice(0, S))
        mask, parts = call.scoring.mask, []
        for rows in row_blocks(T, B * H * S * torch.finfo(_precise(call.query)).bits // 8, BLOCK_BYTES):
            lo, hi = (0, S) if mask is None else mask.key_range(rows.start, rows.stop, T, S)
            if lo == hi:  # rows that see nothing get one key, which is hidden
                lo, hi = min(lo, S - 1), min(lo, S - 1) + 1
            parts.append(read_rows(call, rows, slice(lo, hi)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _fits_one_kernel(call: Call) -> bool:
    """Whether torch's CPU kernel runs the call if the query heads of a group are queries of one head and keys serve as
    values: one query per head, and values that are the first columns of the keys, as in absorbed latent attention.
    In float16 that kernel takes three times as long as float32 with two conversions."""
    query, key, value, _, dropout = call
    if torch.compiler.is_compiling() or not query.is_cpu or query.dtype == torch.float16 or query.size(2) != 1:
        return False
    if dropout or type(query) is not Tensor or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return not call.learns and key.stride() == value.stride() and key.data_ptr() == value.data_ptr()


def read_as_one_head(call: Call) -> Tensor:
    """What one query per head reads, (B, H, 1, Dv), by one fused call."""
    query, key, value, scoring, _ = call
    (B, H, _, D), (Hkv, S) = query.shape, key.shape[1:3]
    bias = scoring.additive(query, S)
    if bias is not None and bias.shape[1] > 1:
        bias = bias.view(-1, Hkv, H // Hkv, S)
    with full_precision(query) if torch.is_autocast_enabled("cpu") else nullcontext():
        heads = query.reshape(B, Hkv, H // Hkv, D)
        read = F.scaled_dot_product_attention(heads, key, key, bias, scale=scoring.scale_for(D))
    return read[..., : value.size(3)].reshape(B, H, 1, -1)


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
            read = _read(weights, value.reshape(B * Hkv, s, -1)).to(value.dtype)
    return read.view(B, H, t, -1)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled dot products (N, rows, s) of (N, rows, D) and (N, s, D), in float32 or better."""
    learns = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    if query.is_cuda and query.dtype in HALF and not learns and not torch.compiler.is_compiling():
        return torch.bmm(query, key.mT, out_dtype=torch.float32).mul_(scale)  # sums are kept in float32
    precise = _precise(query)
    if query.is_cpu and query.dtype in HALF and not learns and not torch.compiler.is_compiling():
        query, scores = query.to(precise) * scale, query.new_empty(*query.shape[:2], key.shape[1], dtype=precise)
        for sample, cols in _parts(key):
            torch.mm(query[sample], key[sample, cols].to(precise).mT, out=scores[sample, :, cols])
        return scores
    start = torch.zeros((), dtype=precise, device=query.device)
    return torch.baddbmm(start, query.to(precise), key.to(precise).mT, beta=0, alpha=scale)


def _read(weights: Tensor, value: Tensor) -> Tensor:
    """Weights (N, rows, s) times values (N, s, Dv) in the dtype of the weights."""
    learns = torch.is_grad_enabled() and (weights.requires_grad or value.requires_grad)
    if value.dtype == weights.dtype or learns or torch.compiler.is_compiling():
        return weights @ value.to(weights.dtype)
    read = weights.new_zeros(*weights.shape[:2], value.shape[2])
    for sample, cols in _parts(value):
        read[sample].addmm_(weights[sample, :, cols], value[sample, cols].to(weights.dtype))
    return read


def _parts(tensor: Tensor) -> Iterator[tuple[int, slice]]:
    """Parts of (N, s, D) small enough to convert one at a time: converting a whole cache takes ten times as long,
    because the system has to hand out fresh memory for it at every call."""
    N, s, D = tensor.shape
    return ((sample, cols) for sample in range(N) for cols in row_blocks(s, D, PART))


def _softmax(scores: Tensor, bias: Tensor | None) -> Tensor:
    """Weights (B, H, t, s); zeros in a row that sees nothing."""
    if bias is None:
        return scores.softmax(-1)
    scores = scores + bias.to(scores.dtype)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)


def _precise(query: Tensor) -> torch.dtype:
    return torch.promote_types(query.dtype, torch.float32)
