"""Multi-head attention on one page, in ten steps, in any dtype.

This file is the truth: every fast path, layout and checkpoint reader is tested against it in float64.
It imports nothing of ours. It makes the whole T×S matrix, so it is for reading, not for speed.

    B batch   H, Hkv query and key/value heads   T, S query and key length   D head width   E model width

True means "may attend". A row that sees no key gives zeros: there is nothing to average.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """One of the ten steps with the real tensors it produced."""

    number: int
    name: str
    tensors: dict[str, Tensor]


class Linear(NamedTuple):
    """A linear map `x @ weight.T + bias`, weight of shape (out, in) as in torch."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """`x` mapped: (..., in) to (..., out)."""
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


def multi_head_attention(
    query: Tensor,  # (B, T, E)
    key: Tensor,  # (B, S, Ekey)
    value: Tensor,  # (B, S, Evalue)
    projections: tuple[Linear, Linear, Linear, Linear | None],  # for query, key, value and output
    num_heads: int,
    num_kv_heads: int | None = None,
    *,
    visible: Tensor | None = None,  # bool, broadcasts to (B, H, T, S)
    bias: Tensor | None = None,  # float, broadcasts to (B, H, T, S), added to the scaled scores
    scale: float | None = None,  # 1 / sqrt(D) by default
    steps: list[Step] | None = None,  # pass a list to receive every intermediate result
) -> tuple[Tensor, Tensor]:
    """The output (B, T, E) and the weights (B, H, T, S) of one multi-head attention layer.

    >>> x, eye = torch.randn(2, 5, 6), Linear(torch.eye(6))
    >>> output, weights = multi_head_attention(x, x, x, (eye, eye, eye, eye), num_heads=3)
    >>> output.shape, weights.shape
    (torch.Size([2, 5, 6]), torch.Size([2, 3, 5, 5]))
    """
    steps = [] if steps is None else steps
    project_q, project_k, project_v, project_out = projections
    Hkv = num_heads if num_kv_heads is None else num_kv_heads

    # 1. Project. Three views of each token: what it looks for, what it offers, and what it passes on.
    query, key, value = project_q(query), project_k(key), project_v(value)
    steps.append(Step(1, "project", {"query": query, "key": key, "value": value}))

    # 2. Split. The last axis is cut into heads; no number moves.
    query, key, value = (
        query.unflatten(-1, (num_heads, -1)),  # -1 works out D, the width of one head
        key.unflatten(-1, (Hkv, -1)),
        value.unflatten(-1, (Hkv, -1)),
    )
    steps.append(Step(2, "split", {"query": query, "key": key, "value": value}))  # (B, T, H, D)

    # 3. Transpose. Heads move beside the batch, so that one matrix product serves them all.
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    steps.append(Step(3, "transpose", {"query": query, "key": key, "value": value}))  # (B, H, T, D)

    # 4. to 8. happen in each head separately.
    heads, weights = attend(query, key, value, visible=visible, bias=bias, scale=scale, steps=steps)

    # 9. Concat. Back to (B, T, H, D), then the heads are side by side again.
    merged = heads.transpose(1, 2).flatten(2)  # (B, T, H·Dv); flatten copies, where view would fail
    steps.append(Step(9, "concat", {"merged": merged}))

    # 10. Project. So far the heads were independent; here they are mixed.
    output = merged if project_out is None else project_out(merged)
    steps.append(Step(10, "project", {"output": output}))
    return output, weights


def attend(
    query: Tensor,  # (B, H, T, D)
    key: Tensor,  # (B, Hkv, S, D)
    value: Tensor,  # (B, Hkv, S, Dv)
    *,
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,  # limits scores smoothly to ± this value
    score: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,  # see step 6
    sinks: Tensor | None = None,  # (H,): an extra score per head, which takes weight and has no value
    dropout: float = 0.0,
    steps: list[Step] | None = None,
) -> tuple[Tensor, Tensor]:
    """Steps 4 to 8: what every head reads (B, H, T, Dv), and its weights (B, H, T, S) before dropout."""
    steps = [] if steps is None else steps
    group = query.shape[1] // key.shape[1]  # grouped heads: this many query heads share one key/value head
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    if bias is not None:  # a bias of minus infinity hides a key just as a mask does
        seen = bias > -math.inf
        visible = seen if visible is None else visible & seen
    if visible is None:
        visible = torch.ones((), dtype=torch.bool, device=query.device)

    # 4. Scores. How well does every query match every key? One dot product each.
    scores = query @ key.transpose(-2, -1)  # (B, H, T, S)
    steps.append(Step(4, "scores", {"scores": scores}))

    # 5. Mask. Minus infinity becomes a weight of exactly 0. Not -1e9: float16 has no such number.
    scores = scores.masked_fill(~visible, -math.inf)
    steps.append(Step(5, "mask", {"scores": scores}))

    # 6. Scale. A dot product of D terms grows like sqrt(D); without this the softmax saturates and stops learning.
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if softcap is not None:  # the cap must not change minus infinity
        scores = (softcap * (scores / softcap).tanh()).masked_fill(~visible, -math.inf)
    if (
        score is not None
    ):  # a function of the user: score(score, batch, head, query, key), positions counted as keys are
        B, H, T, S = scores.shape
        batch, head, row, col = (torch.arange(n, device=query.device) for n in (B, H, T, S))
        places = batch[:, None, None, None], head[:, None, None], row[:, None] + (S - T), col
        scores = score(scores.masked_fill(~visible, 0.0), *places).expand(B, H, T, S)
        visible = visible & (scores > -math.inf)  # it may hide keys, too
        scores = scores.masked_fill(~visible, -math.inf)
    if bias is not None:
        scores = scores + bias
    steps.append(Step(6, "scale", {"scores": scores}))

    # 7. Softmax. Weights that sum to 1, 0 for hidden keys. A row that sees nothing would be 0/0 = NaN: it becomes 0.
    sees_a_key = visible.expand(scores.shape).any(-1, keepdim=True)
    scores = scores.masked_fill(~sees_a_key, 0.0)
    if sinks is None:
        weights = scores.softmax(-1)
    else:  # the sink takes part in the softmax, and its share is dropped: such rows sum to less than 1
        sink = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    weights = weights.masked_fill(~sees_a_key, 0.0)
    steps.append(Step(7, "softmax", {"weights": weights}))

    # 8. Weighted values. Each query reads the average of the values, weighted by its row.
    kept = torch.dropout(weights, dropout, train=True) if dropout > 0 else weights
    output = kept @ value  # (B, H, T, Dv)
    steps.append(Step(8, "weighted values", {"heads": output}))
    return output, weights
