"""torch's fused scaled-dot-product attention, on CPU and CUDA, in training and inference."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from headwise.attention.backends.base import BEYOND_SDPA, Backend, Call, repeat_heads
from headwise.masks import Causal
from headwise.masks.lowering import lower, simplify

HALF = (torch.float16, torch.bfloat16)


class Sdpa(Backend):
    """The public `scaled_dot_product_attention`; torch picks the kernel (CPU flash, cuDNN, FlashAttention, ...)."""

    name = "sdpa"
    summary = "torch's fused scaled_dot_product_attention"

    def refuses(self, call: Call) -> str | None:
        if call.query.numel() == 0 or call.value.numel() == 0:
            return "an axis has size 0, for which some fused kernels return nothing"
        if call.scoring.beyond_sdpa:
            return BEYOND_SDPA
        if call.repeats_keys:
            return (
                "grouped heads whose keys and values differ in width have no fused kernel: every key would be repeated"
            )
        return None

    def run(self, call: Call) -> Tensor:
        if call.uneven:
            return self.run(call.even())[..., : call.value.size(3)]
        return F.scaled_dot_product_attention(**arguments(call))

    def dense_bytes(self, call: Call) -> int:
        """The size of a mask that torch accepts only as a bias; a bias from the caller exists already."""
        query, key, _, scoring, _ = call
        T, S = query.shape[2], key.shape[2]
        mask = simplify(scoring.mask, T, S)
        if mask is None or (type(mask) is Causal and T == S and scoring.bias is None):
            return 0
        B, H = (1 if size is None else size for size in mask.extent[:2])
        return B * H * T * S * query.element_size()

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        if call.uneven:
            output, lse = self.run_with_lse(call.even())
            return output[..., : call.value.size(3)], lse
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


class Ordinary(Sdpa):
    """The same for ordinary calls (`Call.ordinary`): nothing is lowered, which matters for short sequences."""

    def run(self, call: Call) -> Tensor:
        query, key, value, scoring, dropout = call
        grouped = call.grouped
        if query.size(3) != value.size(3) or (grouped and query.is_cuda and query.dtype not in HALF):
            return super().run(call)
        causal = scoring.mask is not None
        return F.scaled_dot_product_attention(
            query, key, value, None, dropout, causal, scale=scoring.scale, enable_gqa=grouped
        )

    def run_with_lse(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """One fused call, with the row log-sum-exp of cuDNN if torch would choose that."""
        if call.query.is_cuda and kernels_by_name(call) and (found := straight(call)) is not None:
            return found
        return super().run_with_lse(call)


CUDNN_KERNEL = torch.ops.aten._scaled_dot_product_cudnn_attention.default
FLASH, CUDNN = SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value
WORTHWHILE = 2**16  # scores of one head; below, computing a log-sum-exp costs less than asking for torch's kernel


def hands_out_lse(call: Call) -> bool:
    """Whether a kernel's log-sum-exp is available and reliable: kernels disagree on rows that see no key."""
    if not kernels_by_name(call):
        return False
    query, key, _, scoring, _ = call
    T, S = query.shape[2], key.shape[2]
    return not scoring.may_empty_a_row(T, S) and not (
        query.is_cuda and type(simplify(scoring.mask, T, S)) is Causal and T != S
    )


def kernels_by_name(call: Call) -> bool:
    """Whether to call torch's kernels by name, the only way to get their log-sum-exp. Not if the public function does
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
    """An ordinary call straight to cuDNN, if torch would choose it. Small layers gain by skipping the rest."""
    query, key, value, scoring, _ = call
    if query.dtype not in HALF:
        return None
    causal, scale = scoring.mask is not None, scoring.scale
    if torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=call.grouped) != CUDNN:
        return None
    output, lse, *_ = CUDNN_KERNEL(query, key, value, None, True, 0.0, causal, False, scale=scale)
    return output, lse.squeeze(3)


def by_cpu_flash(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """torch's kernel on the CPU."""
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

    If output and log-sum-exp (B, H, T, 1) come from more keys than these, the result is the share of these keys.
    """
    nothing = torch.empty(0, dtype=torch.uint64, device=lse.device)  # no dropout, so no random state
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
    """The arguments for torch's function."""
    call = without_far_keys(call)
    query, key, value, scoring, dropout = call
    enable_gqa = False
    if call.grouped:
        # On CUDA only the half-precision kernels support grouped heads; the others would fall back to a T×S matrix.
        enable_gqa = not query.is_cuda or query.dtype in HALF
        if not enable_gqa:
            key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    attn_mask, is_causal = lowered(call)
    if query.is_cuda and attn_mask is not None and only_bias_learns(call):
        query = query.detach().requires_grad_()
    given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, "dropout_p": dropout}
    return given | {"is_causal": is_causal, "scale": scoring.scale, "enable_gqa": enable_gqa}


def without_far_keys(call: Call) -> Call:
    """The call without keys that no query sees, if the mask then hides nothing that is left.

    In generation, one query under a sliding window then reads the window and not the whole cache.
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
    """Whether the bias requires a gradient and no head does. torch's CUDA kernels then save too little for it."""
    bias = call.scoring.bias
    heads = (call.query, call.key, call.value)
    return (
        bias is not None and torch.is_grad_enabled() and bias.requires_grad and not any(x.requires_grad for x in heads)
    )


def lowered(call: Call) -> tuple[Tensor | None, bool]:
    """`attn_mask` and `is_causal` for torch, whose causal flag is aligned top-left. Ours is bottom-right, so the flag
    is used only if both agree (T = S)."""
    query, scoring = call.query, call.scoring
    T, S = query.shape[2], call.key.shape[2]
    if scoring.bias is None:
        mask = simplify(scoring.mask, T, S)
        if type(mask) is Causal and T < S and query.is_cuda and not torch.compiler.is_compiling():
            from torch.nn.attention.bias import causal_lower_right  # imports sympy, which nothing else needs

            return causal_lower_right(T, S), False  # runs on FlashAttention without a T×S bias
        form = lower(mask, T, S, dtype=query.dtype, device=query.device)
        return form.bias, form.kind == "causal"
    bias = scoring.additive(query, S)
    if bias is not None and bias.shape[-1] > 1 and bias.stride(-1) == 0:
        bias = bias.contiguous()  # fused kernels need a stride along keys
    return bias, False
