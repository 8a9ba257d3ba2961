"""FlashAttention-4's two functions, with heads as (B, H, T, D) and one form for samples and documents.

They run as an autograd function, and inside compiled graphs as operators of torch, which cost more for every call.
"""

import functools
import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from headwise.attention.backends.flash.lowering import FlashArguments

PACKAGE, LIBRARY = "flash-attn-4", "flash_attn.cute.interface"
Found = tuple[Tensor, Tensor]


@functools.cache
def installed() -> bool:
    """Whether FlashAttention-4 is there. Looking for its module would import FlashAttention-2, its namesake."""
    try:
        importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def library() -> Any:
    """The module with the library's functions."""
    return importlib.import_module(LIBRARY)


def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: FlashArguments) -> Found:
    """Output (B, H, T, Dv) and row log-sum-exp (B, H, T), which has no gradient."""
    flat = (how.scale, how.softcap, *how.band, how.longest)
    if torch.compiler.is_compiling():
        found: Found = flash_attention(query, key, value, sinks, how.starts, how.lengths, *flat)
    else:
        found = FlashFunction.apply(query, key, value, sinks, how.starts, how.lengths, *flat)  # type: ignore[no-untyped-call]
    return found[0], found[1].detach()


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    softcap: float,
    back: int | None,
    ahead: int | None,
    longest: int,
) -> Found:
    """One call of the library."""
    B, _H, T, _ = query.shape
    heads = [tokens_first(x, starts) for x in (query, key, value)]
    options = shared_options(starts, lengths, back, ahead, longest)
    output, lse, *_ = library()._flash_attn_fwd(
        *heads, softmax_scale=scale, softcap=softcap, learnable_sink=sinks, return_lse=True, **options
    )
    if starts is not None:
        output, lse = output.unflatten(0, (B, T)), lse.unflatten(1, (B, T)).transpose(0, 1)
    return output.transpose(1, 2), lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    softcap: float,
    back: int | None,
    ahead: int | None,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and sinks; those of the sinks are empty if there are none."""
    B = query.shape[0]
    heads = [tokens_first(x, starts) for x in (query, key, value, output, grad)]
    lse = lse.contiguous() if starts is None else lse.transpose(0, 1).flatten(1).contiguous()
    options = shared_options(starts, lengths, back, ahead, longest)
    found = library()._flash_attn_bwd(
        *heads, lse, softmax_scale=scale, softcap=softcap, learnable_sink=sinks, **options
    )
    if starts is not None:
        found = (*(x.unflatten(0, (B, -1)) for x in found[:3]), *found[3:])
    query_grad, key_grad, value_grad = (x.transpose(1, 2) for x in found[:3])
    return query_grad, key_grad, value_grad, found[3] if sinks is not None else query.new_empty(0)


def shared_options(
    starts: Tensor | None, lengths: Tensor | None, back: int | None, ahead: int | None, longest: int
) -> dict[str, Any]:
    """What forward and backward pass take alike."""
    options: dict[str, Any] = {"causal": False, "window_size_left": back, "window_size_right": ahead}
    if (back, ahead) == (None, 0):
        options = {"causal": True}
    if starts is not None:
        options |= {f"cu_seqlens_{side}": starts for side in "qk"} | {f"max_seqlen_{side}": longest for side in "qk"}
    if lengths is not None:
        options["seqused_k"] = lengths
    return options


def tokens_first(x: Tensor, starts: Tensor | None) -> Tensor:
    """Heads as (B, T, H, D), or for documents as (B · T, H, D): a view if the tokens of a sample lie together."""
    x = x.transpose(1, 2)
    if x.stride(-1) != 1 or 0 in x.stride():
        x = x.contiguous()
    return x if starts is None else x.flatten(0, 1)


class FlashFunction(torch.autograd.Function):
    """`forward` and `backward` as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Found:
        output, lse = forward(*given)
        remember(ctx, given, (output, lse))
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return differentiate(ctx, backward, grads[0])


def remember(ctx: Any, inputs: tuple[Any, ...], output: Found) -> None:
    """Keep what the backward pass needs."""
    query, key, value, sinks, starts, lengths, *ctx.flat = inputs
    ctx.save_for_backward(query, key, value, *output, sinks, starts, lengths)


def differentiate(ctx: Any, function: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs of `forward`."""
    *found, sinks_grad = function(grad, *ctx.saved_tensors, *ctx.flat)
    sinks = ctx.saved_tensors[5]
    return *found, None if sinks is None else sinks_grad, *(None,) * (2 + len(ctx.flat))


def like_forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Found:
    """Tensors with the shapes and strides of what `forward` returns."""
    B, H, T, _ = query.shape
    output = query.new_empty(B, T, H, value.shape[3]).transpose(1, 2)
    if rest[1] is not None:  # documents
        return output, query.new_empty(H, B, T, dtype=torch.float32).transpose(0, 1)
    return output, query.new_empty(B, H, T, dtype=torch.float32)


def like_backward(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tensors with the shapes and strides of what `backward` returns."""
    query, key, value = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in given[:3])
    sinks = given[5]
    return query, key, value, torch.empty_like(sinks) if sinks is not None else query.new_empty(0)


flash_attention = torch.library.custom_op("headwise::flash_attention", forward, mutates_args=())
flash_attention_backward = torch.library.custom_op("headwise::flash_attention_backward", backward, mutates_args=())
flash_attention.register_fake(like_forward)
flash_attention_backward.register_fake(like_backward)
flash_attention.register_autograd(
    lambda ctx, grad, _: differentiate(ctx, flash_attention_backward, grad),
    setup_context=lambda ctx, inputs, output: remember(ctx, inputs, output),
)
