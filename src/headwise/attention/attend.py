"""`attend`: check, choose a path, run."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from headwise import masks, shapes
from headwise.attention.backends import Call, choose
from headwise.errors import OptionError
from headwise.masks import Mask
from headwise.weights import AttentionMap, Scoring
from headwise.weights.relative import Relative


@overload
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    relative: Relative | None = ...,
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
    bias: Tensor | None = ...,
    causal: bool = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    relative: Relative | None = ...,
    dropout: float = ...,
    return_weights: Literal[True],
) -> tuple[Tensor, AttentionMap]: ...
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative: Relative | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, AttentionMap]:
    """What every head reads: softmax(scale · query·key + bias, where the mask allows) · value, (B, H, T, Dv).

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D); Hkv divides H, and H / Hkv query heads share one key/value head.
        value: (B, Hkv, S, Dv).
        mask: a mask such as `causal() & window(128)`, or a tensor of bool or 0/1, True for "may attend", of shape
            (T, S) or (B or 1, H or 1, T or 1, S or 1). A query that sees no key reads zeros.
        bias: float, same shapes, added to the scaled scores; has a gradient.
        causal: the same as `mask=causal()`, in addition to `mask`.
        scale: above 0; 1 / sqrt(D) unless given.
        softcap: above 0; scaled scores become softcap · tanh(score / softcap).
        sinks: (H,), one more score per head, which takes part of every row and hands over nothing.
        relative: added for the distance from query to key: `alibi(H)`, or what a `RelativeBias` module returns.
        dropout: probability with which a weight is dropped. It acts whenever it is above 0: pass 0 in evaluation.
        return_weights: also return the weights (B, H, T, S) from before dropout, as an `AttentionMap`: exact, and
            computed only where they are looked at.

    >>> q, k = torch.randn(2, 6, 5, 16), torch.randn(2, 3, 7, 16)
    >>> attend(q, k, k, causal=True).shape
    torch.Size([2, 6, 5, 16])
    """
    scoring = checked(query, key, value, mask, bias, causal, scale, softcap, sinks, relative, dropout)
    if not return_weights:
        return run(query, key, value, scoring, dropout)
    call = Call(query, key, value, scoring, dropout)
    output, lse = choose(call).run_with_lse(call)
    weights = AttentionMap(query, key, scoring, lse)
    looked_at = (query, key, *scoring.tensors())
    # Torch cannot tell whether inference tensors change later, so such a map gets its own.
    return output, weights.clone() if any(x.is_inference() for x in looked_at) else weights


def checked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    relative: Relative | None = None,
    dropout: float = 0.0,
) -> Scoring:
    """The scoring these arguments of `attend` mean, after all checks."""
    shapes.check_heads(query, key, value)
    shapes.check_probability("dropout", dropout)
    shapes.check_factor("scale", scale, "1 / sqrt(D)")
    shapes.check_factor("softcap", softcap, "no cap")
    if sinks is not None:
        shapes.check_sinks(sinks, query.shape[1], query.device)
    sizes = (*query.shape[:3], key.shape[2])
    scoring = scoring_for(sizes, query.device, mask, bias, masks.causal() if causal else None, scale)
    if relative is not None:
        if not isinstance(relative, Relative):
            raise OptionError(f"relative={relative!r}: expected alibi(...), or module() of a RelativeBias module.")
        relative.check(query.shape[1], query.device)
    return dataclasses.replace(scoring, softcap=softcap, sinks=sinks, relative=relative)


def scoring_for(
    sizes: Sequence[int],
    device: torch.device,
    mask: Mask | Tensor | None,
    bias: Tensor | None,
    always: Mask | None,
    scale: float | None,
) -> Scoring:
    """A `Scoring` of what a caller passed for `sizes` (B, H, T, S): `mask` checked and joined with `always`."""
    B, H, T, S = sizes
    if bias is not None:
        shapes.check_bias(bias, B, H, T, S, device)
    found = masks.as_mask(mask, B, T, S)
    joined = always if found is None else found if always is None else always & found
    if joined is not None:
        joined.check(B, H, T, S, device)
    return Scoring(joined, bias, scale)


def run(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, dropout: float) -> Tensor:
    """What every head reads, by the first path of the table that takes the call. Nothing is checked here."""
    call = Call(query, key, value, scoring, dropout)
    return choose(call).run(call)
