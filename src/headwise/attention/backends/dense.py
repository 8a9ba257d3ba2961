"""Two backends for every call: blocks of rows by matrix products, and the reference with its whole T×S matrix."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headwise import reference
from headwise.attention.backends.base import Backend, Call
from headwise.weights.source import Source, full_precision, row_blocks


class Whole(Backend):
    """`reference.attend` on the whole T×S grid, in full precision: what a compiled graph runs if no kernel can."""

    name = "reference"
    summary = "the reference, with the whole T×S matrix"

    def refuses(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> Tensor:
        query, key, value, scoring, dropout = call
        visible = scoring.visible(query.shape[2], key.shape[2], query.device)
        bias = scoring.whole_bias(query, key.shape[2])
        options: dict[str, Any] = {"scale": scoring.scale, "softcap": scoring.softcap, "sinks": scoring.learnable[1]}
        if scoring.score is not None:
            grid = scoring.whole_grid(query, key.shape[2])
            options["score"] = lambda scores, *_: scoring.changed(scores, grid)
        heads = (x.to(scoring.precision(query.dtype)) for x in (query, key, value))
        with full_precision(query):
            read, _ = reference.attend(*heads, visible=visible, bias=bias, dropout=dropout, **options)
        return read.to(value.dtype)

    def dense_bytes(self, call: Call) -> int:
        B, H, T, _ = call.query.shape
        return B * H * T * call.key.shape[2] * torch.finfo(call.scoring.precision(call.query.dtype)).bits // 8


BLOCK_BYTES = 2**26  # scores of one block


class RowByRow(Backend):
    """One block of rows after the other: any scoring, any device, memory for one block at a time."""

    name = "rows"
    summary = "blocks of rows, each whole in memory, by matrix products in full precision"

    def refuses(self, call: Call) -> str | None:
        if call.query.numel() == 0 or call.value.numel() == 0:
            return "an axis has size 0"
        if torch.compiler.is_compiling():
            return "blocks would fix the length into a compiled graph"
        return None

    def run(self, call: Call) -> Tensor:
        query, key, value, scoring, dropout = call
        B, H, T, _ = query.shape
        S = key.shape[2]
        source = Source.whole(query, key, scoring.simplified(T, S))
        blocks = row_blocks(T, B * H * S * torch.finfo(source.precise).bits // 8, BLOCK_BYTES)
        # Recomputing a block needs saved-tensor hooks, which torch.func does not support.
        if len(blocks) == 1 or not call.learns or torch._C._functorch.peek_interpreter_stack() is not None:
            parts = [read_block(source, value, rows, dropout) for rows in blocks]
        else:
            parts = [_computed_again(source, value, rows, dropout) for rows in blocks]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def read_block(source: Source, value: Tensor, rows: slice, dropout: float) -> Tensor:
    """What the queries `rows` read, (B, H, t, Dv)."""
    T, S = source.shape[2:]
    lo, hi = (0, S) if source.mask is None else source.mask.key_range(rows.start, rows.stop, T, S)
    if lo == hi:
        lo, hi = min(lo, S - 1), min(lo, S - 1) + 1  # one key, which is hidden
    weights = source.softmax(source.scores(rows, slice(lo, hi)))
    if dropout > 0:
        weights = torch.dropout(weights, dropout, train=True)
    B, H, t, s = weights.shape
    Hkv, Dv = value.shape[1], value.shape[3]
    with full_precision(value):
        read = weights.reshape(B, Hkv, source.group * t, s) @ value[:, :, lo:hi].to(weights.dtype)
    return read.view(B, H, t, Dv).to(value.dtype)


def _computed_again(source: Source, value: Tensor, rows: slice, dropout: float) -> Tensor:
    """The same, saving only its inputs for the backward pass."""

    def run(query: Tensor, key: Tensor, value: Tensor, *learnable: Any) -> Tensor:
        scoring = source.scoring.with_learnable(*learnable)
        return read_block(Source(query, key, scoring, source.frame), value, rows, dropout)

    tensors = (source.query, source.key, value, *source.scoring.learnable)
    return checkpoint(run, *tensors, use_reentrant=False, preserve_rng_state=dropout > 0)  # type: ignore[no-any-return]
