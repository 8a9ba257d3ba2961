"""A long causal window on a GPU, at the speed of the fused causal kernel.

Cut the sequence into chunks as long as the window. A query then sees a part of its own chunk and a part of the previous
one, and each part is a triangle:

    own chunk        keys up to the query: causal
    previous chunk   keys after the query's place: also causal, once queries and keys are reversed

So two calls of torch's causal kernel, with chunks as samples, compute everything, and their log-sum-exps weigh the
parts. The backward pass runs the backward of the same two calls, on the joint output and log-sum-exp.
"""

import importlib.util
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.base import Backend, Call
from headwise.attention.backends.sdpa import CUDNN, CUDNN_KERNEL, HALF, cudnn_gradients, kernels_by_name
from headwise.masks import Both, Causal, Mask, Window
from headwise.masks.lowering import simplify

WORTHWHILE = 2**17  # tokens of a window × width of a head from which two calls beat FlexAttention on an H200
WIDTHS = range(64, 129, 8)


class Triangles(Backend):
    """cuDNN's causal kernel over chunks as long as the window, and again over reversed chunks."""

    name = "triangles"
    summary = "torch's fused causal kernel over chunks as long as the window, and again over reversed chunks"

    def refuses(self, call: Call) -> str | None:
        if not call.query.is_cuda:
            return "it is for CUDA"
        query, key, value, scoring, _ = call
        T, S = query.shape[2], key.shape[2]
        if scoring.bias is not None or scoring.beyond_sdpa:
            return "it supports no bias, soft-cap, relative positions, sinks or score function"
        if query.dtype not in HALF or query.shape[3] not in WIDTHS or not kernels_by_name(call):
            return "it is for head dimensions 64 to 128 in 16 bit, without dropout, autocast, tracing or transforms"
        size = window_size(simplify(scoring.mask, T, S))
        if size is None or T != S:
            return "it is for a causal window with as many keys as queries"
        if size * query.shape[3] < WORTHWHILE or 2 * size > T:
            least = WORTHWHILE // query.shape[3]
            return f"it is for windows of at least {least} tokens, in sequences of at least two windows"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        options: dict[str, Any] = {"scale": scoring.scale, "enable_gqa": call.grouped}
        chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, **options)
        return None if chosen == CUDNN else "torch would not choose cuDNN here"

    def run(self, call: Call) -> Tensor:
        return self.run_with_lse(call)[0]

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        query, key, value, scoring, _ = call
        size = window_size(simplify(scoring.mask, query.shape[2], key.shape[2]))
        output, lse = TwoTriangles.apply(query, key, value, size, scoring.scale)  # type: ignore[no-untyped-call]
        return output, lse


def window_size(mask: Mask | None) -> int | None:
    """How many keys a query sees under a causal window, including itself; None for any other mask."""
    if type(mask) is Window and mask.ahead == 0:
        return mask.back + 1
    if isinstance(mask, Both):
        for one, other in ((mask.a, mask.b), (mask.b, mask.a)):
            if type(one) is Causal and type(other) is Window:
                return other.back + 1
    return None


class TwoTriangles(torch.autograd.Function):
    """Output (B, H, T, D) and log-sum-exp (B, H, T) under a causal window of `size` keys."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, size: int, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Own chunks, the incomplete last one and previous chunks, joined."""
        heads = (query, key, value)
        near = causal_part([chunks(x, size) for x in heads], scale)
        rest = causal_part([remainder(x, size) for x in heads], scale) if query.shape[2] % size else None
        far = causal_part(turned_heads(heads, size), scale)
        output, lse = join(near, rest, far, size, like=query)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.size, ctx.scale = size, scale
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """The backward of the same calls: given the joint output and log-sum-exp, each yields its share."""
        query, key, value, output, lse = ctx.saved_tensors
        size, scale = ctx.size, ctx.scale
        grad = grad.contiguous() if 0 in grad.stride() else grad
        known = (grad, query, key, value, output)
        near = causal_gradients([chunks(x, size) for x in known], chunks(lse[..., None], size), scale)
        rest = None
        if query.shape[2] % size:
            rest = causal_gradients([remainder(x, size) for x in known], remainder(lse[..., None], size), scale)
        turned = [turn(grad, size, 1), *turned_heads((query, key, value), size), turn(output, size, 1)]
        far = causal_gradients(turned, turned_lse(lse, size), scale)
        found = [
            add(near[n], rest and rest[n], far[n], size, shift=n == 0, like=x)
            for n, x in enumerate((query, key, value))
        ]
        return *found, None, None


class TrianglePart(NamedTuple):
    """What some rows read: output (N, H, rows, D) and log-sum-exp (N, H, rows)."""

    output: Tensor
    lse: Tensor


def causal_part(heads: list[Tensor], scale: float | None) -> TrianglePart:
    """One call of the fused kernel, chunks as samples."""
    output, lse, *_ = CUDNN_KERNEL(*heads, None, True, 0.0, True, False, scale=scale)
    return TrianglePart(output, lse.squeeze(3).contiguous())


def causal_gradients(known: list[Tensor], lse: Tensor, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given (gradient, query, key, value, output) and the joint log-sum-exp."""
    return cudnn_gradients(known, lse, True, scale)


def chunks(x: Tensor, size: int) -> Tensor:
    """The whole chunks of (B, H, T, D) as samples: (B · n, H, size, D), a view where strides allow."""
    n = x.shape[2] // size
    split: Tensor = x[:, :, : n * size].unflatten(2, (n, size))
    return split.transpose(1, 2).flatten(0, 1)


def remainder(x: Tensor, size: int) -> Tensor:
    """The tokens after the last whole chunk."""
    return x[:, :, x.shape[2] // size * size :]


def turned_heads(heads: tuple[Tensor, Tensor, Tensor], size: int) -> list[Tensor]:
    """Queries from the second chunk on, keys and values up to the last chunk but one, reversed."""
    query, key, value = heads
    return [turn(query, size, 1), turn(key, size, 0), turn(value, size, 0)]


def turned_lse(lse: Tensor, size: int) -> Tensor:
    """The log-sum-exp of reversed queries, (N, H, size − 1, 1); 0 in rows beyond the sequence."""
    count = -(-lse.shape[2] // size)
    padded: Tensor = F.pad(lse, (0, count * size - lse.shape[2])).unflatten(2, (count, size))
    return padded[:, :, 1:, : size - 1].flip(3).transpose(1, 2).flatten(0, 1)[..., None]


def turn(x: Tensor, size: int, shift: int) -> Tensor:
    """Reversed chunks (B · n, H, size − 1, D) of (B, H, T, D)."""
    from headwise.weights.kernels import triangles

    return triangles.turn(x, size, shift)


def join(
    near: TrianglePart, rest: TrianglePart | None, far: TrianglePart, size: int, like: Tensor
) -> tuple[Tensor, Tensor]:
    """What every query reads from both parts, and its log-sum-exp."""
    from headwise.weights.kernels import triangles

    output, lse = torch.empty_like(like), like.new_empty(like.shape[:3], dtype=torch.float32)
    for first, part in ((0, near), (like.shape[2] // size, rest)):
        if part is not None:
            triangles.join(part, far, (output, lse), size, first)
    return output, lse


def add(near: Tensor, rest: Tensor | None, far: Tensor, size: int, shift: bool, like: Tensor) -> Tensor:
    """The gradient of a tensor from both parts."""
    from headwise.weights.kernels import triangles

    total = torch.empty_like(like)
    for first, part in ((0, near), (like.shape[2] // size, rest)):
        if part is not None:
            triangles.add(part, far, total, size, first, int(shift))
    return total
