"""Probes: masks that measure where attention goes.

`weights.mass(probe)` is the share of each query's attention on the keys where the probe is True. Every mask is a probe
(`causal()`, `window(4)`, `documents(ids)`, ...); the ones below are made for this purpose. They combine with `&`, `|`
and `~` like all masks.

    previous_token()     the key before the query      same_token(ids)       earlier keys with the query's own token
    offset(n)            the key n before the query    induction(ids)        keys that follow an earlier copy of it
    sink(n)              the first n keys              token_is(ids, which)  keys with one of these tokens
    local(n)             keys at most n away

>>> print(induction([5, 6, 7, 5, 6, 7]))
······
······
······
·■····
··■···
···■··
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.composite import as_real_tensor
from headwise.masks.kinds import dense, prefix, window
from headwise.masks.mask import Extent, Grid, Mask
from headwise.shapes import brief, whole_number

NO_TOKEN = torch.iinfo(torch.int64).min


def previous_token() -> Mask:
    """The key just before the query."""
    return offset(1)


def offset(n: int) -> Mask:
    """The key `n` positions before the query; 0 is the query's own position, -1 the one after it."""
    found = whole_number(n)
    if found is None:
        raise MaskError(f"offset({brief(n)}): expected a whole number; 1 is the previous token, -1 the next.")
    return Offset(found)


def sink(n: int = 1) -> Mask:
    """The first `n` keys, where many heads put attention they have no other use for."""
    return prefix(n)


def local(n: int) -> Mask:
    """Keys at most `n` positions before or after the query."""
    return window(n, n)


def same_token(ids: Tensor | Sequence[int], queries: Tensor | Sequence[int] | None = None) -> Mask:
    """Earlier keys that are the query's own token.

    Args:
        ids: the token of every key position, (S,) or (B, S).
        queries: in cross-attention, the token of every query, (T,) or (B, T); then all its copies among the keys count.
    """
    tokens = token_ids("same_token", ids)
    if queries is not None:
        return CrossMatch(token_ids("same_token(queries)", queries), tokens, "same_token")
    return Match(tokens, tokens, 1, "same_token")


def induction(ids: Tensor | Sequence[int], queries: Tensor | Sequence[int] | None = None) -> Mask:
    """Keys right after an earlier copy of the query's token: where a head looks to continue a repetition.

    Args:
        ids: the token of every key position, (S,) or (B, S).
        queries: in cross-attention, the token of every query, (T,) or (B, T); then all its copies among the keys count.
    """
    tokens = token_ids("induction", ids)
    before = torch.cat([torch.full_like(tokens[:, :1], NO_TOKEN), tokens[:, :-1]], 1)
    if queries is not None:
        return CrossMatch(token_ids("induction(queries)", queries), before, "induction")
    return Match(tokens, before, 0, "induction")


def token_is(ids: Tensor | Sequence[int], which: int | Sequence[int] | Tensor) -> Mask:
    """Keys whose token is one of `which`: delimiters, a name, all punctuation.

    Args:
        ids: the token of every key position, (S,) or (B, S).
        which: one token id or several.
    """
    tokens = token_ids("token_is", ids)
    try:
        wanted = torch.as_tensor(which, device=tokens.device).flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(f"token_is(which={which!r}): expected a token id or several.") from error
    if wanted.numel() and (wanted.is_floating_point() or wanted.is_complex() or wanted.dtype == torch.bool):
        raise MaskError(f"token_is(which of {wanted.dtype}): expected a token id or several, whole numbers.")
    return dense(torch.isin(tokens, wanted)[:, None, None, :])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Offset(Mask):
    """See `offset`."""

    n: int
    banded = True

    def visible(self, grid: Grid) -> Tensor:
        return grid.position - grid.col == self.n

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        lo = min(max(start + S - T - self.n, 0), S)
        return lo, max(lo, min(stop + S - T - self.n, S))

    def __repr__(self) -> str:
        return f"offset({self.n})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Match(Mask):
    """Keys whose `offered` value equals the query's `asked` value, at least `gap` positions before it."""

    asked: Tensor  # (B or 1, S), by the query's position
    offered: Tensor  # (B or 1, S), by key
    gap: int
    name: str

    @property
    def extent(self) -> Extent:
        B, S = self.asked.shape
        return Extent(batch=B if B > 1 else None, keys=S)

    def visible(self, grid: Grid) -> Tensor:
        batch = grid.batch if self.asked.shape[0] > 1 else grid.batch * 0
        position = grid.position
        asked = self.asked[batch, position.clamp(min=0)]
        return (asked == self.offered[batch, grid.col]) & (position - grid.col >= self.gap)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return 0, min(max(stop + S - T - self.gap, 0), S)

    def __repr__(self) -> str:
        return f"{self.name}(ids of shape {tuple(self.asked.shape)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CrossMatch(Mask):
    """Keys whose `offered` value equals the query's `asked` value, where queries and keys are different texts."""

    asked: Tensor  # (B or 1, T), by query
    offered: Tensor  # (B or 1, S), by key
    name: str

    @property
    def extent(self) -> Extent:
        B, T, S = max(len(self.asked), len(self.offered)), self.asked.shape[1], self.offered.shape[1]
        return Extent(batch=B if B > 1 else None, queries=T, keys=S)

    def visible(self, grid: Grid) -> Tensor:
        own, there = (grid.batch if len(x) > 1 else grid.batch * 0 for x in (self.asked, self.offered))
        return self.asked[own, grid.row] == self.offered[there, grid.col]

    def __repr__(self) -> str:
        return f"{self.name}(ids of shape {tuple(self.offered.shape)}, queries of shape {tuple(self.asked.shape)})"


def token_ids(name: str, ids: Tensor | Sequence[int]) -> Tensor:
    """Token ids as int64, (B or 1, S)."""
    try:
        tokens = as_real_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(f"{name}({ids!r}): expected token ids, (S,) or (B, S).") from error
    if tokens.dim() not in (1, 2) or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise MaskError(
            f"{name}({tuple(tokens.shape)} of {tokens.dtype}): expected token ids, whole numbers of shape (S,) or "
            f"(B, S)."
        )
    return tokens.long() if tokens.dim() == 2 else tokens.long()[None]
