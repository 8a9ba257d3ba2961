"""`explain`: which path a call takes, and why each faster one refused."""

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from headwise import attention
from headwise.backends import BACKENDS, Call
from headwise.backends.sdpa import lowered
from headwise.layer import MultiHeadAttention


class Explanation(NamedTuple):
    """The path of one call. Printing it gives the whole story."""

    path: str
    summary: str
    kernel: str | None
    mask: str
    refused: dict[str, str]

    def __str__(self) -> str:
        kernel = f", kernel: {self.kernel}" if self.kernel else ""
        lines = [f"path: {self.path} ({self.summary}{kernel})", f"mask: {self.mask}"]
        lines += [f"refused: {name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines)


def explain(*args: Any, **options: Any) -> Explanation:
    """Which path `attend(...)` or a layer takes with these arguments. Nothing is computed but the projections.

    >>> mha = MultiHeadAttention(64, 4, causal=True).eval()
    >>> explain(mha, torch.randn(1, 8, 64)).path
    'sdpa'
    """
    if args and isinstance(args[0], MultiHeadAttention):
        layer, *inputs = args
        call = layer.plan(*inputs, **options)
    else:
        options.pop("return_weights", None)
        query, key, value = args
        scoring = attention.checked(query, key, value, **options)
        call = Call(query, key, value, scoring, options.get("dropout", 0.0))
    return explain_call(call)


def explain_call(call: Call) -> Explanation:
    """The path of a call that is already checked."""
    refused: dict[str, str] = {}
    for backend in BACKENDS:
        reason = backend.refuses(call)
        if reason is None:
            break
        refused[backend.name] = reason
    kernel = None
    if backend.name == "sdpa":
        kernel, reasons = sdpa_kernel(call)
        refused |= reasons
    mask = "none" if call.scoring.mask is None else repr(call.scoring.mask)
    return Explanation(backend.name, backend.summary, kernel, mask, refused)


def sdpa_kernel(call: Call) -> tuple[str, dict[str, str]]:
    """The kernel torch chooses inside its own attention, and on CUDA why the other fused ones refused."""
    attn_mask, is_causal = lowered(call)
    if attn_mask is not None and type(attn_mask) is not Tensor:
        return "FlashAttention, causal from the lower right", {}
    inputs = (call.query, call.key, call.value, attn_mask, call.dropout, is_causal)
    number = torch._fused_sdp_choice(*inputs, scale=call.scoring.scale, enable_gqa=call.grouped)
    chosen = SDPBackend(number).name.lower()
    reasons = {}
    if call.query.is_cuda:
        parameters = torch.backends.cuda.SDPAParams(*inputs, call.grouped)
        for name in ("cudnn", "flash", "efficient"):
            test = getattr(torch.backends.cuda, f"can_use_{name}_attention")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                usable = test(parameters, debug=True)
            if not usable:
                texts = [str(w.message).split(" (Triggered")[0] for w in said]
                reasons[f"sdpa {name}"] = " ".join(texts) or "torch does not say why"
    return chosen, reasons
