"""`eviction_scores`: which keys of a cache matter least, by the rules of several papers, at the cost of one pass.

>>> from headwise import MultiHeadAttention, eviction_scores
>>> layer = MultiHeadAttention(64, 8, num_kv_heads=2, causal=True)
>>> _, weights = layer(torch.randn(1, 100, 64), return_weights=True)
>>> scores = eviction_scores(weights, "snapkv", window=16)  # (B, Hkv, S)
>>> kept = scores.topk(50).indices
>>> scores.shape, kept.shape
(torch.Size([1, 2, 100]), torch.Size([1, 2, 50]))

    h2o        Σ_i A_ij, what a key has received in all (Zhang et al. 2023)
    observed   the mean over the queries that can see the key, so that late keys are not at a disadvantage
    snapkv     what the last `window` queries give it, smoothed over neighbors; these last keys always stay (Li et al.
               2024)
    dropkv     Σ_i (A_ij / (1 − A_ij))² ‖v_j − o_i‖², the squared change of all outputs if the key is dropped and the
               other weights of each row grow to sum to 1 again
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import OptionError
from headwise.shapes import check_size
from headwise.weights import AttentionMap
from headwise.weights.readings import Reading, unflat, zeros
from headwise.weights.source import Source
from headwise.weights.tiles import Tile
from headwise.weights.values import OutputReading, checked_value

METHODS = ("h2o", "observed", "snapkv", "dropkv")


def eviction_scores(
    weights: AttentionMap,
    method: str = "h2o",
    *,
    value: Tensor | None = None,
    output: Tensor | None = None,
    window: int = 64,
    kernel: int = 5,
) -> Tensor:
    """A score for every key of the cache, (B, Hkv, S): keys with the lowest can be evicted first.

    Query heads that share a key head are averaged. There are no gradients.

    Args:
        weights: the attention map of a prompt.
        method: "h2o", "observed", "snapkv" or "dropkv".
        value: (B, heads, S, Dv), for "dropkv".
        output: (B, H, T, Dv), what the queries read, for "dropkv" if you have it; computed otherwise.
        window: how many of the last queries "snapkv" asks.
        kernel: over how many neighbors "snapkv" averages; an odd number.
    """
    if method not in METHODS:
        raise OptionError(f"eviction_scores(method={method!r}): expected one of {', '.join(METHODS)}.")
    weights = weights.detach()
    with torch.no_grad():
        if method == "snapkv":
            return _snapkv(weights, check_size("window", window), check_size("kernel", kernel))
        if method == "dropkv":
            return _by_key_head(_dropkv(weights, value, output), weights)
        received = weights.received()
        return _by_key_head(received.total if method == "h2o" else received.mean, weights)


def _by_key_head(scores: Tensor, weights: AttentionMap) -> Tensor:
    """The mean over the query heads that share a key head, (B, Hkv, S)."""
    found: Tensor = scores.unflatten(1, (-1, weights._source().group)).mean(2)
    return found


def _snapkv(weights: AttentionMap, window: int, kernel: int) -> Tensor:
    T, S = weights.shape[2:]
    if kernel % 2 == 0:
        raise OptionError(f"eviction_scores(kernel={kernel}): expected an odd number, so that it has a middle.")
    if not window < min(T + 1, S):
        raise OptionError(
            f"eviction_scores(window={window}): the map has {T} queries and {S} keys; pass a smaller one."
        )
    asked = weights.select(rows=slice(T - window, T)).received().total[..., : S - window] / window
    smooth = F.avg_pool1d(asked, kernel, stride=1, padding=kernel // 2)
    scores = _by_key_head(smooth, weights)
    return F.pad(scores, (0, window), value=scores.max().item())


def _dropkv(weights: AttentionMap, value: Tensor | None, output: Tensor | None) -> Tensor:
    if value is None:
        raise OptionError("eviction_scores(method='dropkv') needs value=, (B, heads, S, Dv), what the keys come with.")
    source = weights._with_keys("eviction_scores()")
    value = checked_value(value, source).detach()
    if output is None:
        output = weights._read([OutputReading(value)], padded=True)[0][0]
    return weights.read(DropReading(value, output.detach()))[0]


class DropReading(Reading):
    """Σ_i (w / (1 − w))² ‖v_j − o_i‖² for every key, (B, H, S). A query that sees one key only loses nothing."""

    by_row = False
    differentiable = (False,)
    merged = "sum"

    def __init__(self, value: Tensor, output: Tensor) -> None:
        self.value, self.output = value, output

    def start(self, source: Source) -> None:
        self.source, self.sum = source, zeros(source, source.shape[3], dtype=torch.float64)
        value = self.value.repeat_interleave(source.shape[1] // self.value.shape[1], 1)
        self.values, self.outputs = value.flatten(0, 1), self.output.flatten(0, 1).to(source.precise)

    def take(self, tile: Tile) -> None:
        value = self.values[tile.heads, tile.cols].to(tile.weights.dtype)
        output = self.outputs[tile.heads, tile.rows]
        apart = torch.cdist(output, value, compute_mode="donot_use_mm_for_euclid_dist")  # exact where both are close
        rest = -torch.expm1(tile.logs)  # 1 − w, without losing digits where w is small
        change = torch.where(rest > 0, tile.weights / rest, 0.0) * apart
        self.sum[tile.heads, tile.cols] += change.square_().sum(1)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum.to(self.source.precise), self.source),)
