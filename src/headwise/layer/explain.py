"""`explain`: which backend runs a call, and why each faster one refused."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from headwise import attention
from headwise.attention.attend import CALLED_ELSEWHERE
from headwise.attention.backends import BACKENDS, Call
from headwise.attention.backends.sdpa import HALF, arguments
from headwise.errors import OptionError, unknown_option
from headwise.layer import options
from headwise.layer.inputs import LayerInputs
from headwise.layer.layer import MultiHeadAttention
from headwise.weights import Scoring


class Explanation(NamedTuple):
    """Which backend runs one call, and why. Print it to read everything."""

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


def explain(*args: Any, **given: Any) -> Explanation:
    """Which backend runs `attend(...)` or a layer with these arguments. Only the projections are computed.

    >>> mha = MultiHeadAttention(64, 4, causal=True).eval()
    >>> explain(mha, torch.randn(1, 8, 64)).path
    'sdpa'

    Args:
        args: query, key and value as for `attend`, or a layer and its inputs.
        given: further arguments of `attend` or of the layer.
    """
    if args and isinstance(args[0], MultiHeadAttention):
        return _explain_layer(args[0], _bound(args[0].forward, args[1:], given))
    given = _bound(attention.attend, args, given)
    given.pop("return_weights")
    if unknown := given.pop("unknown"):
        raise unknown_option("attend", next(iter(unknown)), given, CALLED_ELSEWHERE)
    parts = ("scale", "softcap", "sinks", "relative", "score")
    scoring = Scoring(bias=given.pop("attn_bias"), **{name: given.pop(name) for name in parts})
    return explain_call(attention.plan(scoring=scoring, **given))


def _explain_layer(layer: MultiHeadAttention, given: dict[str, Any]) -> Explanation:
    if unknown := given.pop("unknown"):
        raise options.unknown_in_call(next(iter(unknown)), given, type(layer))
    given.pop("return_weights")
    if given["cache"] is not None:
        given["cache"] = given["cache"].preview()
    inputs = LayerInputs(**given)
    nested = isinstance(inputs.query, Tensor) and inputs.query.is_nested
    call = layer.plan(layer._pack(inputs) if nested else inputs)
    if layer._spread is None:
        return explain_call(call)
    local, ring = layer._spread.local(call), layer._spread.ring
    return explain_call(local) if ring is None else Explanation("ring", ring, None, repr(call.scoring.mask), {})


def _bound(function: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, as `function` would receive them."""
    try:
        bound = inspect.signature(function).bind(*args, **named)
    except TypeError as error:
        raise OptionError(
            f"explain takes the arguments of attend, explain(query, key, value, ...), or a headwise layer and its "
            f"inputs, explain(layer, x, ...): {error}."
        ) from error
    bound.apply_defaults()
    return bound.arguments


def explain_call(call: Call) -> Explanation:
    """Which backend runs a checked call."""
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
    """The kernel that torch chooses inside its own attention, and on CUDA why the other fused ones refused."""
    given = arguments(call.even() if call.uneven else call)
    if type(given["attn_mask"]) not in (Tensor, type(None)):
        kernel = "FlashAttention" if call.query.dtype in HALF else "torch's choice with a bias"
        return f"{kernel}, causal, aligned at the lower right", {}
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
