"""How other libraries arrange the tensors of a layer: each arrangement converts theirs to ours and back, without loss.

Ours are the separate projections of `MultiHeadAttention`: `q_proj.weight` (H·D, E) with the heads one after the other.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """The number of query heads and key/value heads."""

    heads: int
    kv_heads: int


class Arrangement(Protocol):
    """One arrangement of tensors, and its inverse."""

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        """Convert their tensors to ours."""

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        """Convert our tensors to theirs."""


class Correspondence(NamedTuple):
    """Which of our tensors correspond to which of theirs."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    form: Arrangement


class Same:
    """One tensor, unchanged."""

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return theirs

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return ours


class Transposed:
    """A weight stored as (in, out), for `x @ weight`."""

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [x.T for x in theirs]

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [x.T for x in ours]


class SideBySide:
    """One tensor with all queries, then all keys, then all values; (in, out) if `transposed`."""

    def __init__(self, transposed: bool = False) -> None:
        self.transposed = transposed

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        (fused,) = (x.T if self.transposed else x for x in theirs)
        D = fused.shape[0] // (sizes.heads + 2 * sizes.kv_heads)
        return torch.split(fused, [sizes.heads * D, sizes.kv_heads * D, sizes.kv_heads * D])

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        fused = torch.cat(list(ours))
        return [fused.T if self.transposed else fused]


class EqualParts:
    """One tensor in `count` equal parts, whatever the number of heads."""

    def __init__(self, count: int) -> None:
        self.count = count

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return theirs[0].chunk(self.count)

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [torch.cat(list(ours))]


class QueryAndGate:
    """One tensor head by head: the query of a head, then its gate (Qwen3-Next)."""

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        parts = theirs[0].unflatten(0, (sizes.heads, 2, -1)).unbind(1)
        return [part.flatten(0, 1) for part in parts]

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        parts = [x.unflatten(0, (sizes.heads, -1)) for x in ours]
        return [torch.stack(parts, 1).flatten(0, 2)]


class HeadByHead:
    """One tensor in groups: the queries that share a key, the key, the value; see `pack`."""

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return unpack(theirs[0], *sizes)

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        query, key, value = ours
        return [pack(query, key, value, *sizes)]


class HeadsInterleaved:
    """Query heads interleaved: the first of every group, then the second of every group. `axis` holds the heads."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [self._transposed(theirs[0], sizes.heads // sizes.kv_heads, sizes.kv_heads)]

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [self._transposed(ours[0], sizes.kv_heads, sizes.heads // sizes.kv_heads)]

    def _transposed(self, x: Tensor, outer: int, inner: int) -> Tensor:
        parts = x.unflatten(self.axis, (outer, inner, -1))
        swapped: Tensor = parts.transpose(self.axis, self.axis + 1)
        return swapped.flatten(self.axis, self.axis + 2)


class Listed:
    """One tensor per head."""

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [torch.cat(list(theirs))]

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return ours[0].chunk(sizes.heads)


class Kernel:
    """A weight (in, heads, width) or a bias (heads, width), as in Keras and Flax; `which` names the head count."""

    def __init__(self, which: str) -> None:
        self.which = which

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        (x,) = theirs
        return [x.flatten(1).T if x.dim() == 3 else x.flatten()]

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        (x,) = ours
        heads = getattr(sizes, self.which)
        return [x.T.unflatten(1, (heads, -1)) if x.dim() == 2 else x.unflatten(0, (heads, -1))]


class OutKernel:
    """An output weight (heads, width, out)."""

    def ours(self, theirs: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [theirs[0].flatten(0, 1).T]

    def theirs(self, ours: Sequence[Tensor], sizes: Sizes) -> Sequence[Tensor]:
        return [ours[0].T.unflatten(0, (sizes.heads, -1))]


# The order of rows in our fused projection: head by head, the queries of a group, then its key, then its value.


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
    """The three parts of a head-major tensor, with heads in order: the inverse of `pack`."""
    group = num_heads // num_kv_heads
    q, k, v = packed.unflatten(0, (num_kv_heads, group + 2, -1)).split((group, 1, 1), dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)
