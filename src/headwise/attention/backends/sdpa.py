"""torch's fused scaled-dot-product attention, on CPU and CUDA, in training and inference."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from headwise.attention.backends.base import Call, repeat_heads
from headwise.masks import Causal
from headwise.masks.lowering import lower, simplify

HALF = (torch.float16, torch.bfloat16)


class Sdpa:
    """The public `scaled_dot_product_attention`; torch picks the kernel (CPU flash, cuDNN, FlashAttention, ...)."""

    name = "sdpa"
    summary = "torch's fused scaled_dot_product_attention"

    def refuses(self, call: Call) -> str | None:
        """It takes everything that has a size."""
        if call.query.numel() == 0 or call.value.numel() == 0:
            return "an axis has size 0, for which some fused kernels return nothing"
        if call.scoring.beyond_sdpa:
            return "torch's fused attention knows neither soft-cap nor sinks"
        return None

    def run(self, call: Call) -> Tensor:
        """One fused call."""
        query, key, value, scoring, dropout = call
        if scoring.plain and not call.grouped:  # the shortest way, for short sequences
            return F.scaled_dot_product_attention(query, key, value, None, dropout, scale=scoring.scale)
        return F.scaled_dot_product_attention(**arguments(call))

    def dense_bytes(self, call: Call) -> int:
        """A mask that torch takes only as a bias; a bias of the caller is there already."""
        query, key, _, scoring, _ = call
        T, S = query.shape[2], key.shape[2]
        mask = simplify(scoring.mask, T, S)
        if mask is None or (isinstance(mask, Causal) and T == S and scoring.bias is None):
            return 0
        B, H = (1 if size is None else size for size in mask.extent[:2])
        return B * H * T * S * query.element_size()

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """One fused call, which leaves the row log-sum-exp where torch's kernel for it can hand it out."""
        if call.query.is_cuda and call.ordinary and kernels_by_name(call) and (found := straight(call)) is not None:
            return found
        if not hands_out_lse(call):
            return self.run(call), None
        given = arguments(call)
        kernel = torch._fused_sdp_choice(**given)
        if kernel == FLASH and call.query.is_cpu:
            return by_cpu_flash(given)
        if kernel == CUDNN and given["attn_mask"] is None:
            return by_cudnn(given)
        if kernel == FLASH and given["attn_mask"] is None:
            return by_cuda_flash(given)
        return F.scaled_dot_product_attention(**given), None


CUDNN_KERNEL = torch.ops.aten._scaled_dot_product_cudnn_attention.default
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
WORTHWHILE = 2**16  # scores of one head; below, a log-sum-exp costs less than asking which kernel torch would take


def hands_out_lse(call: Call) -> bool:
    """Whether a kernel's log-sum-exp can be had and trusted: kernels disagree on that of a row that sees nothing."""
    if not kernels_by_name(call):
        return False
    query, key, _, scoring, _ = call
    T, S = query.shape[2], key.shape[2]
    return not scoring.may_empty_a_row(T, S) and not (
        query.is_cuda and isinstance(simplify(scoring.mask, T, S), Causal) and T != S
    )


def kernels_by_name(call: Call) -> bool:
    """Whether to call torch's kernels by name, which alone gives the log-sum-exp. Never where the public function does
    more than call one: under autocast, while tracing or transforming, for subclasses of Tensor."""
    query, key, value, _, dropout = call
    if torch.compiler.is_compiling() or dropout or type(query) is not Tensor:
        return False
    D = query.size(3)
    return (
        query.size(2) * key.size(2) >= WORTHWHILE
        and (query.is_cpu or (query.is_cuda and D % 8 == 0))
        and value.size(3) == D
        and not torch.is_autocast_enabled(query.device.type)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def straight(call: Call) -> tuple[Tensor, Tensor] | None:
    """An ordinary call to cuDNN without detours, where that is torch's choice; a model of small layers feels them."""
    query, key, value, scoring, _ = call
    if query.dtype not in HALF:
        return None
    causal, scale = scoring.mask is not None, scoring.scale
    if torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=call.grouped) != CUDNN:
        return None
    output, lse, *_ = CUDNN_KERNEL(query, key, value, None, True, 0.0, causal, False, scale=scale)
    return output, lse.squeeze(3)


def by_cpu_flash(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The kernel behind torch's attention on the CPU."""
    tensors = (given[name] for name in ("query", "key", "value"))
    options = {"attn_mask": given["attn_mask"], "scale": given["scale"]}
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *tensors, 0.0, given["is_causal"], **options
    )
    return output, lse


def by_cudnn(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """cuDNN's kernel."""
    tensors = (given[name] for name in ("query", "key", "value"))
    output, lse, *_ = CUDNN_KERNEL(*tensors, None, True, 0.0, given["is_causal"], False, scale=given["scale"])
    return output, lse.squeeze(3)


def cudnn_gradients(
    known: Sequence[Tensor], lse: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value by cuDNN's kernel, given (gradient, query, key, value, output).

    With the output and log-sum-exp (B, H, T, 1) of more keys than these, the share of these keys.
    """
    nothing = torch.empty(0, dtype=torch.uint64, device=lse.device)  # no dropout, no random numbers
    _, query, key, *_ = known
    sizes = (query.shape[2], key.shape[2], 0.0, causal)
    q, k, v = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *known, lse.contiguous(), nothing, nothing, None, None, None, *sizes, scale=scale
    )
    return q, k, v


def by_cuda_flash(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """FlashAttention's kernel."""
    tensors = (given[name] for name in ("query", "key", "value"))
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        *tensors, 0.0, given["is_causal"], False, scale=given["scale"]
    )
    return output, lse


def arguments(call: Call) -> dict[str, Any]:
    """What torch's function is called with."""
    call = without_far_keys(call)
    query, key, value, scoring, dropout = call
    enable_gqa = False
    if call.grouped:
        # Only the half-precision kernels of CUDA know grouped heads; its others would fall to a T×S path.
        enable_gqa = not query.is_cuda or query.dtype in HALF
        if not enable_gqa:
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    attn_mask, is_causal = lowered(call)
    if query.is_cuda and attn_mask is not None and only_bias_learns(call):
        query = query.detach().requires_grad_()
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout}
    return given | {"is_causal": is_causal, "scale": scoring.scale, "enable_gqa": enable_gqa}


def without_far_keys(call: Call) -> Call:
    """The same call without the keys before and after those its mask shows at all, where then nothing is hidden.

    One query under a sliding window, as when a text is generated, reads the window and not the whole cache.
    """
    query, key, value, scoring, _ = call
    T, S = query.shape[2], key.shape[2]
    if scoring.mask is None or scoring.bias is not None or torch.compiler.is_compiling():
        return call
    lo, hi = scoring.mask.key_range(0, T, T, S)
    if hi - lo in (0, S) or not scoring.mask.shows_all(0, T, lo, hi, T, S):
        return call
    seen = dataclasses.replace(scoring, mask=None)
    return call._replace(key=key[:, :, lo:hi], value=value[:, :, lo:hi], scoring=seen)


def only_bias_learns(call: Call) -> bool:
    """Whether the bias wants a gradient and no head does. torch's CUDA kernels then keep too little to give one."""
    bias = call.scoring.bias
    heads = (call.query, call.key, call.value)
    return (
        bias is not None and torch.is_grad_enabled() and bias.requires_grad and not any(x.requires_grad for x in heads)
    )


def lowered(call: Call) -> tuple[Tensor | None, bool]:
    """`attn_mask` and `is_causal` for torch. torch's own `is_causal` is top-left aligned, ours bottom-right, so the
    flag is used only where both agree (T = S)."""
    query, scoring = call.query, call.scoring
    T, S = query.shape[2], call.key.shape[2]
    if scoring.bias is None:
        mask = simplify(scoring.mask, T, S)
        if isinstance(mask, Causal) and T < S and query.is_cuda and not torch.compiler.is_compiling():
            from torch.nn.attention.bias import causal_lower_right  # imports sympy, which only this path needs

            return causal_lower_right(T, S), False  # runs on FlashAttention without a T×S bias
        form = lower(mask, T, S, dtype=query.dtype, device=query.device)
        return form.bias, form.kind == "causal"
    bias = scoring.additive(query, S)
    if bias is not None and bias.shape[-1] > 1 and bias.stride(-1) == 0:
        bias = bias.contiguous()  # fused kernels read along keys and cannot stand still
    return bias, False
