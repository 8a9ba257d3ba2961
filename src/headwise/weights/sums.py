"""What a reading adds up, in terms that the compiled loop knows.

A reading that is made of these sums says so in `Reading.sums`, and the compiled loop adds to its tensors instead of
`take`. Tensors have one row for every head of every sample: (B·H, ...).
"""

import dataclasses
from typing import Literal

from torch import Tensor

from headwise.masks import Mask


@dataclasses.dataclass(frozen=True, eq=False)
class RowSum:
    """Σ w, −Σ w log w or Σ w · |position of the query − key| over the keys of every query, added to `into` (B·H, T)."""

    kind: Literal["mass", "entropy", "distance"]
    into: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ProbeSum:
    """Σ w over the keys where `probe` is True, added to `into` (B·H, T)."""

    probe: Mask
    into: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Largest:
    """The largest log of a weight and its key: raises `best` (B·H, T) and `key`, or (B·H, T, k) in decreasing order."""

    best: Tensor
    key: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class OctaveSum:
    """Σ w over octaves of distance, added to `into` (B·H, octaves), float64."""

    into: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class KeySum:
    """Σ w over the queries, added to `into` (B·H, S), float64; each query counts `by_query` (B·H, T), by default 1."""

    into: Tensor
    by_query: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class CellSum:
    """Σ w, or the largest w, over the cells of a picture `into` (B·H, R, C), float64.

    `row` (T,) and `col` (S,) say where queries and keys fall, -1 for outside; `row` never decreases.
    """

    into: Tensor
    row: Tensor
    col: Tensor
    by_query: Tensor | None = None
    largest: bool = False


Sum = RowSum | ProbeSum | Largest | OctaveSum | KeySum | CellSum
