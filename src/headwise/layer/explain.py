"""`explain`: which path a call takes, and why each faster one refused."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from headwise import attention
from headwise.attention.backends import BACKENDS, Call
from headwise.attention.backends.sdpa import HALF, arguments
from headwise.errors import OptionError
from headwise.layer import ragged
from headwise.layer.arguments import check_known
from headwise.layer.layer import MultiHeadAttention


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

    Args:
        args: query, key and value as for `attend`, or a layer and what it is called with.
        options: what else `attend` or the layer is called with.
    """
    if args and isinstance(args[0], MultiHeadAttention):
        layer, *inputs = args
        given = _bound(layer.forward, inputs, options)
        check_known("a call", given.pop("unknown"), given)
        given.pop("return_weights")
        if given["cache"] is not None:
            given["cache"] = given["cache"].preview()
        if isinstance(given["query"], Tensor) and given["query"].is_nested:
            causal, packed = given.pop("causal"), ragged.Packed.of(layer, given.pop("query"), **given)
            given = {"query": packed.tokens, "mask": packed.mask, "positions": packed.positions}
            given |= {"causal": causal, "packed": True}
        call = layer.plan(**given)
        if layer._spread is None:
            return explain_call(call)
        local, ring = layer._spread.local(call), layer._spread.ring
        return explain_call(local) if ring is None else Explanation("ring", ring, None, repr(call.scoring.mask), {})
    given = _bound(attention.attend, args, options)
    given.pop("return_weights")
    scoring = attention.checked(**given)
    return explain_call(Call(given["query"], given["key"], given["value"], scoring, given["dropout"]))


def _bound(function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as `function` would receive them."""
    try:
        bound = inspect.signature(function).bind(*args, **options)
    except TypeError as error:
        raise OptionError(
            f"explain takes what attend takes, explain(query, key, value, ...), or a headwise layer and its inputs, "
            f"explain(layer, x, ...): {error}."
        ) from error
    bound.apply_defaults()
    return bound.arguments


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
    given = arguments(call)
    if type(given["attn_mask"]) not in (Tensor, type(None)):
        kernel = "FlashAttention" if call.query.dtype in HALF else "torch's choice with a bias"
        return f"{kernel}, causal from the lower right", {}
    number = torch._fused_sdp_choice(**given)
    chosen = SDPBackend(number).name.lower()
    reasons = {}
    if call.query.is_cuda:
        order = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "enable_gqa")
        parameters = torch.backends.cuda.SDPAParams(*(given[name] for name in order))
        for name in ("cudnn", "flash", "efficient"):
            test = getattr(torch.backends.cuda, f"can_use_{name}_attention")
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                usable = test(parameters, debug=True)
            if not usable:
                texts = [str(w.message).split(" (Triggered")[0] for w in said]
                reasons[f"sdpa {name}"] = " ".join(texts) or "torch does not say why"
    return chosen, reasons
