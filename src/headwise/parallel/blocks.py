"""Attention in blocks: the pieces of a chunk of queries and a chunk of keys, and engines that compute them.

Chunks are ranges of positions in the whole text, so masks work as they do on one rank. Pieces of a row are merged by
their log-sum-exp. In the backward pass the log-sum-exp of the whole row gives every piece its true weights, so the
gradients of pieces simply add up.

    FusedEngine     torch's kernel on the CPU, for mask and scale
    CudaEngine      torch's kernels on CUDA in half precision, for pieces that are visible fully or below the diagonal
    ProductEngine   matrix products in full precision, for everything: soft-cap, positions, bias, any device and width
"""

import abc
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.base import Call
from headwise.attention.backends.sdpa import CUDNN, HALF, by_cuda_flash, by_cudnn, cudnn_gradients
from headwise.masks import Causal, Mask
from headwise.masks.lowering import additive, simplify
from headwise.weights.source import Frame, Source, full_precision, row_blocks

HEAD_PARTS = 4  # the heads are divided into this many parts, whose gradients are computed one after another
ROWS = 1024  # queries whose mask is examined at a time: fewer skip more keys, more need fewer kernels
TILE = 2**24  # entries of a mask at a time
BLOCK_BYTES = 2**25  # scores of one block of rows; a few of that size exist at a time


class Piece(NamedTuple):
    """Queries and keys of the whole text, of which "all", the lower triangle ("causal") or "some" pairs are visible."""

    rows: range
    cols: range
    kind: str


def pieces(mask: Mask | None, rows: range, cols: range, T: int, S: int) -> Iterator[Piece]:
    """The pieces of these queries and keys with anything visible, under a mask of the whole (T, S)."""
    mask = simplify(mask, T, S)
    if mask is None or mask.shows_all(rows.start, rows.stop, cols.start, cols.stop, T, S):
        yield Piece(rows, cols, "all")
    elif type(mask) is Causal and rows == cols and T == S:
        yield Piece(rows, cols, "causal")
    else:
        step = max(1, min(ROWS, TILE // max(len(cols), 1)))
        for start in range(rows.start, rows.stop, step):
            part = range(start, min(start + step, rows.stop))
            lo, hi = mask.key_range(part.start, part.stop, T, S)
            seen = range(max(lo, cols.start), min(hi, cols.stop))
            if len(seen):
                full = mask.shows_all(part.start, part.stop, seen.start, seen.stop, T, S)
                yield Piece(part, seen, "all" if full else "some")


class Met(NamedTuple):
    """Queries (B, H, t, D) of a piece, and its keys and values, (B, Hkv, s, D) and (B, Hkv, s, Dv)."""

    query: Tensor
    key: Tensor
    value: Tensor


class Known(NamedTuple):
    """What is known about whole rows: output (B, H, t, Dv), finite log-sum-exp (B, H, t), and output gradient."""

    output: Tensor
    lse: Tensor
    grad: Tensor


class Gradients(NamedTuple):
    """Where the gradients of query, key, value and the scoring's learnable tensors are accumulated."""

    query: Tensor
    key: Tensor
    value: Tensor
    learnable: Sequence[Tensor | None]


class BlockEngine(abc.ABC):
    """A way to compute the pieces of a call whose whole is (T, S)."""

    def __init__(self, call: Call, T: int, S: int) -> None:
        self.scoring, self.T, self.S = call.scoring, T, S

    @abc.abstractmethod
    def forward(self, piece: Piece, met: Met) -> tuple[Tensor, Tensor]:
        """The output (B, H, t, Dv) and the log-sum-exp (B, H, t), minus infinity for a row that sees nothing."""

    @abc.abstractmethod
    def backward(self, piece: Piece, met: Met, known: Known, into: Gradients) -> None:
        """Add the gradients of a piece, given what is known about the whole rows."""

    def bias(self, piece: Piece, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The mask of a piece as a bias, and which of its rows see nothing, (B or 1, H or 1, t)."""
        mask = self.scoring.mask
        if piece.kind != "some" or mask is None:
            return None, None
        rows, cols = (slice(x.start, x.stop) for x in (piece.rows, piece.cols))
        visible = mask.tile(rows, cols, self.T, self.S, device=like.device)
        return additive(visible, like.dtype), ~visible.any(-1)


class FusedEngine(BlockEngine):
    """torch's kernel on the CPU, which accepts a mask as a bias."""

    @staticmethod
    def takes(call: Call) -> bool:
        """Whether torch's kernel supports this call; sinks are added afterwards."""
        query, value, scoring = call.query, call.value, call.scoring
        return query.is_cpu and value.shape[3] == query.shape[3] and not scoring.biased and scoring.linear

    def forward(self, piece: Piece, met: Met) -> tuple[Tensor, Tensor]:
        query, key, value = met
        bias, empty = self.bias(piece, query)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, piece.kind == "causal", attn_mask=bias, scale=self.scoring.scale
        )
        return output, lse if empty is None else lse.masked_fill_(empty, -math.inf)  # the kernel returns 0

    def backward(self, piece: Piece, met: Met, known: Known, into: Gradients) -> None:
        query, key, value = met
        output, lse, grad = known
        bias, _ = self.bias(piece, query)
        group, Hkv = query.shape[1] // key.shape[1], key.shape[1]
        step = -(-Hkv // HEAD_PARTS)
        for first in range(0, Hkv, step):  # some heads at a time, to keep the kernel's outputs small
            few, many = slice(first, first + step), slice(first * group, (first + step) * group)
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, many],
                query[:, many],
                key[:, few],
                value[:, few],
                output[:, many],
                lse[:, many],
                0.0,
                piece.kind == "causal",
                attn_mask=bias if bias is None or bias.shape[1] == 1 else bias[:, many],
                scale=self.scoring.scale,
            )
            for total, heads, part in zip(into, (many, few, few), found, strict=False):
                total[:, heads] += part  # type: ignore[index]


class ProductEngine(BlockEngine):
    """Matrix products, a block of rows at a time."""

    def forward(self, piece: Piece, met: Met) -> tuple[Tensor, Tensor]:
        query, key, value = met
        outputs, sums = [], []
        for rows in self._blocks(query, key):
            scores = self._scores(piece, rows, query, key, self.scoring.learnable)
            lse = scores.logsumexp(-1)
            weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()
            outputs.append(_per_group(weights, value.to(weights.dtype)))
            sums.append(lse)
        return torch.cat(outputs, 2), torch.cat(sums, 2)

    def backward(self, piece: Piece, met: Met, known: Known, into: Gradients) -> None:
        query, key, value = met
        output, lse, grad = known
        leaves = query.detach().requires_grad_(), key.detach().requires_grad_()
        learnable = [None if x is None else x.detach().requires_grad_() for x in self.scoring.learnable]
        wanted = [*leaves, *(x for x in learnable if x is not None)]
        totals = [into.query, into.key, *(x for x in into.learnable if x is not None)]
        precise = value.to(lse.dtype)
        for rows in self._blocks(query, key):
            with torch.enable_grad():
                scores = self._scores(piece, rows, *leaves, learnable)
            weights = (scores.detach() - lse[:, :, rows, None]).exp_()
            arriving = grad[:, :, rows].to(lse.dtype)
            into.value.add_(_summed_over_group(weights, arriving, value.shape[1]))
            reaching = _per_group(arriving, precise.transpose(2, 3))  # (B, H, t, s)
            balance = (arriving * output[:, :, rows].to(lse.dtype)).sum(-1, keepdim=True)
            parts = torch.autograd.grad(scores, wanted, weights * (reaching - balance), allow_unused=True)
            for total, part in zip(totals, parts, strict=True):
                if part is not None:
                    total += part

    def _blocks(self, query: Tensor, key: Tensor) -> list[slice]:
        B, H, t, _ = query.shape
        return row_blocks(t, B * H * key.shape[2] * 8, BLOCK_BYTES)

    def _scores(
        self, piece: Piece, rows: slice, query: Tensor, key: Tensor, learnable: Sequence[Tensor | None]
    ) -> Tensor:
        """The scores (B, H, t, s) before the softmax, differentiable in all arguments."""
        B, H, _, _ = query.shape
        frame = Frame(range(B), range(H), piece.rows[rows], B, H, self.T, self.S)
        source = Source(query[:, :, rows], key, self.scoring.with_learnable(*learnable), frame)
        with full_precision(query):
            products = _per_group(source.query.to(source.precise), key.to(source.precise).transpose(2, 3))
        return source.finished(products, source.grid(slice(None), slice(piece.cols.start, piece.cols.stop)))


class CudaEngine(BlockEngine):
    """torch's choice of cuDNN or FlashAttention. They support only causal masks; the rest uses matrix products."""

    def __init__(self, call: Call, T: int, S: int) -> None:
        super().__init__(call, T, S)
        self.plain = ProductEngine(call, T, S)
        qkv = (call.query, call.key, call.value)
        self.cudnn = torch._fused_sdp_choice(*qkv, scale=call.scoring.scale, enable_gqa=call.grouped) == CUDNN

    @staticmethod
    def takes(call: Call) -> bool:
        """Whether torch's kernels support this call."""
        query, value, scoring = call.query, call.value, call.scoring
        D = query.shape[3]
        fits = query.is_cuda and query.dtype in HALF and value.shape[3] == D and D % 8 == 0 and D <= 256
        return fits and not scoring.biased and scoring.linear

    def forward(self, piece: Piece, met: Met) -> tuple[Tensor, Tensor]:
        if piece.kind == "some":
            return self.plain.forward(piece, met)
        given = {**met._asdict(), "is_causal": piece.kind == "causal", "scale": self.scoring.scale}
        return by_cudnn(given) if self.cudnn else by_cuda_flash(given)

    def backward(self, piece: Piece, met: Met, known: Known, into: Gradients) -> None:
        if piece.kind == "some":
            return self.plain.backward(piece, met, known, into)
        causal, scale = piece.kind == "causal", self.scoring.scale
        if self.cudnn:
            found = cudnn_gradients((known.grad, *met, known.output), known.lse[..., None], causal, scale)
        else:
            nothing = torch.empty(0, dtype=torch.uint64, device=met.query.device)  # no dropout, no random numbers
            lse = known.lse.contiguous()  # kernels ignore its strides
            sizes = (met.query.shape[2], met.key.shape[2], 0.0, causal)
            found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                known.grad, *met, known.output, lse, None, None, *sizes, nothing, nothing, scale=scale
            )
        for total, part in zip((into.query, into.key, into.value), found, strict=True):
            total += part
        return None


def engine_for(call: Call, T: int, S: int) -> BlockEngine:
    """The fastest engine that supports a call."""
    kind = FusedEngine if FusedEngine.takes(call) else CudaEngine if CudaEngine.takes(call) else ProductEngine
    return kind(call, T, S)


def merge(output: Tensor, lse: Tensor, read: Tensor, read_lse: Tensor) -> None:
    """Merge the output of one more piece into the output of rows, in place."""
    total = torch.logaddexp(lse, read_lse)
    finite = total.masked_fill(total == -math.inf, 0.0)
    output.mul_((lse - finite).exp_()[..., None]).addcmul_(read.to(output.dtype), (read_lse - finite).exp_()[..., None])
    lse.copy_(total)


def _per_group(left: Tensor, right: Tensor) -> Tensor:
    """(B, H, t, a) @ (B, Hkv, a, b), with H / Hkv heads of the left for each of the right: (B, H, t, b)."""
    B, H, t, a = left.shape
    Hkv = right.shape[1]
    return (left.reshape(B, Hkv, H // Hkv * t, a) @ right).view(B, H, t, right.shape[3])


def _summed_over_group(weights: Tensor, grad: Tensor, Hkv: int) -> Tensor:
    """weightsᵀ @ grad, (B, Hkv, s, Dv), summed over the heads of a group."""
    B, H, t, s = weights.shape
    flat = weights.reshape(B, Hkv, H // Hkv * t, s)
    return flat.transpose(2, 3) @ grad.reshape(B, Hkv, H // Hkv * t, grad.shape[3])
