"""FlashAttention-4's two functions as its documentation describes them, by plain matrix products on the CPU."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor


def _flash_attn_fwd(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor | None, ...]:
    assert options.pop("return_lse")
    return *attend(query, key, value, options.pop("learnable_sink"), **options), None, None, None


def _flash_attn_bwd(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad: Tensor, lse: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    sinks = options.pop("learnable_sink")
    given = [x.detach() for x in (query, key, value, *([] if sinks is None else [sinks]))]

    def differentiate() -> tuple[Tensor, ...]:
        inputs = [x.requires_grad_() for x in given]
        again, total = attend(*inputs[:3], inputs[3] if sinks is not None else None, **options)
        torch.testing.assert_close(again, output)
        torch.testing.assert_close(total, lse)
        return torch.autograd.grad(again, inputs, grad)

    with ThreadPoolExecutor(1) as other:  # inside an operator torch records nothing, but in another thread it does
        return other.submit(differentiate).result()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    softmax_scale: float,
    softcap: float,
    causal: bool,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Samples (B, T, H, D), or documents one after the other as (total, H, D); the log-sum-exp is (B, H, T) or
    (H, total). Positions are aligned at the last query and the last used key."""
    assert not causal or (window_size_left, window_size_right) == (None, None)
    band = (None, 0) if causal else (window_size_left, window_size_right)
    options = (sinks, softmax_scale, softcap, band)
    if cu_seqlens_q is None:
        parts = []
        for b in range(query.shape[0]):
            used = key.shape[1] if seqused_k is None else int(seqused_k[b])
            parts.append(one_sample(query[b], key[b, :used], value[b, :used], *options))
        return torch.stack([output for output, _ in parts]), torch.stack([lse for _, lse in parts])
    assert cu_seqlens_k is not None
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_q.diff()
    assert max_seqlen_q == max_seqlen_k
    assert lengths.max() <= max_seqlen_q
    assert (lengths > 0).all()
    parts = [one_sample(query[a:b], key[a:b], value[a:b], *options) for a, b in spans(cu_seqlens_q)]
    return torch.cat([output for output, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def spans(starts: Tensor) -> list[tuple[int, int]]:
    return list(zip(starts.tolist()[:-1], starts.tolist()[1:], strict=True))


def one_sample(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    band: tuple[int | None, int | None],
) -> tuple[Tensor, Tensor]:
    """Tokens first, (T, H, D)."""
    (T, H, _), (S, Hkv, _) = query.shape, key.shape
    key, value = (x.repeat_interleave(H // Hkv, 1) for x in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    distance = torch.arange(T)[:, None] + S - T - torch.arange(S)
    back, ahead = band
    hidden = torch.zeros(T, S, dtype=torch.bool)
    hidden |= distance > back if back is not None else False
    hidden |= distance < -ahead if ahead is not None else False
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(H, T, 1)], 2)
    lse = scores.logsumexp(2)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()[..., :S]
    return torch.einsum("hts,shd->thd", weights, value), lse
