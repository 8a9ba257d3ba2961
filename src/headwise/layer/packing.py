"""The head-major layout of a fused projection: head by head, the queries of a group, then its key, then its value.

    q₀ q₁ k₀ v₀ | q₂ q₃ k₁ v₁ | …      each D rows; here two query heads share one key/value head

A contiguous slice of rows is a set of whole heads, so that cutting the weight for tensor parallelism cuts no head.
"""

import torch
from torch import Tensor


def pack(query: Tensor, key: Tensor, value: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Weights (H·D, E), (Hkv·D, E), (Hkv·D, E), or biases without E, as one head-major tensor.

    >>> q, k, v = torch.tensor([1, 2]), torch.tensor([10, 20]), torch.tensor([100, 200])
    >>> pack(q, k, v, num_heads=2, num_kv_heads=2).tolist()  # two heads of width 1
    [1, 10, 100, 2, 20, 200]
    """
    D = query.shape[0] // num_heads
    parts = [x.unflatten(0, (num_kv_heads, -1, D)) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def unpack(packed: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of a head-major tensor, heads in order: the inverse of `pack`."""
    group = num_heads // num_kv_heads
    q, k, v = packed.unflatten(0, (num_kv_heads, group + 2, -1)).split((group, 1, 1), dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)
