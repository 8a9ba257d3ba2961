"""`attend`: check the arguments, choose a backend, run it."""

import dataclasses
import inspect
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from headwise import masks, shapes
from headwise.attention.backends import Call, choose
from headwise.errors import OptionError, unknown_option
from headwise.masks import Mask
from headwise.weights import AttentionMap, Scoring
from headwise.weights.score import ScoreFunction
from headwise.weights.scoring import Relative

# What arguments of a call are called elsewhere: torch's SDPA and nn.MultiheadAttention, transformers, FlashAttention.
CALLED_ELSEWHERE = {
    "bias": "attn_bias=, since bias= is for the projections of a layer",
    "attn_mask": "mask=~attn_mask if it is bool (here True means visible), attn_bias=attn_mask if it is float",
    "key_padding_mask": "mask=padding(~key_padding_mask), True for real tokens",
    "attention_mask": "mask=padding(attention_mask), 1 for real tokens",
    "padding_mask": "mask=padding(...), True for real tokens",
    "position_bias": "attn_bias=",
    "alibi_slopes": "relative=alibi(slopes=...) of attend, position=alibi(slopes=...) of a layer",
    "score_mod": "score=, a function of the same arguments that works on tensors which broadcast",
    "block_mask": "mask=, as in mask=causal() & documents(ids)",
    "need_weights": "return_weights=",
    "output_attentions": "return_weights=",
    "average_attn_weights": "return_weights=True and weights.mean(1)",
    "is_causal": "causal=",
    "dropout_p": "dropout=",
    "softmax_scale": "scale=",
    "scaling": "scale=",
    "window_size": "mask=window(back, ahead)",
    "sliding_window": "mask=window(sliding_window - 1)",
    "s_aux": "sinks=",
    "learnable_sink": "sinks=",
    "enable_gqa": "not needed: key heads are shared if there are fewer of them",
    "position_ids": "positions=, of a layer with a rotary",
    "past_key_value": "cache=, from layer.make_cache(batch)",
    "past_key_values": "cache=, from layer.make_cache(batch)",
    "kv_cache": "cache=, from layer.make_cache(batch)",
    "use_cache": "cache=, from layer.make_cache(batch)",
    "layer_past": "cache=, from layer.make_cache(batch)",
}


@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    attn_bias: Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    relative: Relative | None = ...,
    score: ScoreFunction | None = ...,
    dropout: float = ...,
    return_weights: Literal[False] = ...,
) -> Tensor: ...
@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    attn_bias: Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    relative: Relative | None = ...,
    score: ScoreFunction | None = ...,
    dropout: float = ...,
    return_weights: Literal[True],
) -> tuple[Tensor, AttentionMap]: ...
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    attn_bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative: Relative | None = None,
    score: ScoreFunction | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, AttentionMap]:
    """What every head reads: softmax(scale · query·key + attn_bias, where the mask allows) · value, (B, H, T, Dv).

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D); Hkv divides H, and H / Hkv query heads share one key/value head.
        value: (B, Hkv, S, Dv).
        mask: a mask such as `causal() & window(128)`, or a tensor of bool or 0/1, True for "may attend", of shape
            (T, S) or (B or 1, H or 1, T or 1, S or 1). A query that sees no key reads zeros.
        attn_bias: float, same shapes, added to the scaled scores; differentiable.
        causal: the same as `mask=causal()`, in addition to `mask`.
        scale: above 0; 1 / sqrt(D) by default.
        softcap: above 0; scaled scores become softcap · tanh(score / softcap).
        sinks: (H,), an extra score per head that takes part in the softmax and has no value.
        relative: added according to the distance from query to key: `alibi(H)`, or the result of calling a
            `RelativeBias` module.
        score: a function of your own, (score, batch, head, query, key) -> score, as FlexAttention's `score_mod` but on
            tensors that broadcast. It gets scaled and capped scores; what it returns is biased and masked.
        dropout: probability of dropping a weight. It applies whenever it is above 0: pass 0 in evaluation.
        return_weights: also return the weights (B, H, T, S) before dropout, as an `AttentionMap`: exact, and computed
            only when they are read.
        unknown: refused; the error says what the option is called here.

    >>> q, k = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 7, 16)
    >>> attend(q, k, k, causal=True).shape
    torch.Size([2, 6, 5, 16])
    """
    if unknown:
        raise unknown_option("attend", next(iter(unknown)), inspect.signature(attend).parameters, CALLED_ELSEWHERE)
    scoring = Scoring(None, attn_bias, scale, softcap, sinks, relative, score=score)
    call = plan(query, key, value, scoring, mask=mask, causal=causal, dropout=dropout)
    if not (return_weights is True or shapes.check_truth("return_weights", return_weights)):
        return choose(call).run(call)
    output, lse = choose(call).run_with_lse(call)
    weights = AttentionMap(query, key, call.scoring, lse)
    if torch.compiler.is_compiling():
        return output, weights
    # Torch does not track changes to inference tensors, so a map of such tensors gets copies.
    inference = not torch.compiler.is_compiling() and any(
        x.is_inference() for x in (query, key, *call.scoring.tensors())
    )
    return output, weights.clone() if inference else weights


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> Call:
    """The checked call of these arguments of `attend`; `scoring` holds all that is added to or done with scores."""
    shapes.check_heads(query, key, value)
    shapes.check_probability("dropout", dropout)
    shapes.check_factor("scale", scoring.scale, "1 / sqrt(D)")
    shapes.check_factor("softcap", scoring.softcap, "no cap")
    if scoring.sinks is not None:
        shapes.check_sinks(scoring.sinks, query.shape[1], query.device)
    sizes = (*query.shape[:3], key.shape[2])
    always = masks.causal() if shapes.check_truth("causal", causal) else None
    joined = check_scores(sizes, query.device, mask, scoring.bias, always)
    relative: Any = scoring.relative
    if relative is not None:
        if not isinstance(relative, Relative):
            raise OptionError(
                f"relative={relative!r}: expected alibi(...), or the result of calling a RelativeBias module."
            )
        relative = relative.to(query.device) if query.is_meta else relative
        relative.check(query.shape[1], query.device)
        scoring = scoring if relative is scoring.relative else dataclasses.replace(scoring, relative=relative)
    scoring = scoring.settled(sizes, query.device, query.dtype)
    return Call(query, key, value, dataclasses.replace(scoring, mask=joined), dropout)


def check_scores(
    sizes: Sequence[int],
    device: torch.device,
    mask: Mask | Tensor | None,
    bias: Tensor | None,
    always: Mask | None = None,
) -> Mask | None:
    """The `mask` a caller passed, combined with `always`; raise unless it and `bias` fit scores of these sizes."""
    B, H, T, S = sizes
    if bias is not None:
        shapes.check_attn_bias(bias, B, H, T, S, device)
    found = masks.as_mask(mask, B, T, S)
    if found is not None and device.type == "meta":  # only shapes matter there
        found = found.to(device)
    joined = always if found is None else found if always is None else always & found
    if joined is not None:
        joined.check(B, H, T, S, device)
    return joined
