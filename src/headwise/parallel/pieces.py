"""Which pieces of two chunks, of queries and of keys, have to be computed, and how simply.

Chunks are ranges of positions in the whole text, so the mask language answers as it does on one rank.
"""

from collections.abc import Iterator
from typing import NamedTuple

from headwise.masks import Causal, Mask
from headwise.masks.lowering import simplify

ROWS = 1024  # of queries whose mask is looked at in one go: fewer skip more keys, more take fewer kernels
TILE = 2**24  # entries of a mask in one go


class Piece(NamedTuple):
    """Queries and keys of the whole text that meet: all of them ("all"), the lower triangle ("causal"), or "some"."""

    rows: range
    cols: range
    kind: str


def pieces(mask: Mask | None, rows: range, cols: range, T: int, S: int) -> Iterator[Piece]:
    """The pieces of these queries and keys in which anything is seen, under a mask of the whole (T, S)."""
    mask = simplify(mask, T, S)
    if mask is None or mask.shows_all(rows.start, rows.stop, cols.start, cols.stop, T, S):
        yield Piece(rows, cols, "all")
    elif isinstance(mask, Causal) and rows == cols and T == S:
        yield Piece(rows, cols, "causal")
    else:
        step = max(1, min(ROWS, TILE // max(len(cols), 1)))
        for start in range(rows.start, rows.stop, step):
            part = range(start, min(start + step, rows.stop))
            lo, hi = mask.key_range(part.start, part.stop, T, S)
            seen = range(max(lo, cols.start), min(hi, cols.stop))
            if len(seen):
                full = mask.shows_all(part.start, part.stop, seen.start, seen.stop, T, S)
                yield Piece(part, seen, "all" if full else "some")
