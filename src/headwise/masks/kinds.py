"""The kinds of masks: which keys each query may attend to, without a T×S tensor. True means "may attend".

    causal()            no key after the query            window(back, ahead)  keys near the query
    padding(lengths)    no key beyond a sample's length   documents(ids)       keys of the query's own document
    prefix(n)           the first n keys                  chunks(size)         keys of the query's own chunk
    dense(tensor)       any table

Masks combine with `&`, `|` and `~`, and draw themselves when printed:

>>> print(window(2))
■·······
■■······
■■■·····
·■■■····
··■■■···
···■■■··
····■■■·
·····■■■

The last query is aligned with the last key ("bottom-right"): query i is at key position i + S − T, as it is when
the first keys come from a cache. With T = S this is the usual diagonal.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.composite import as_real_tensor
from headwise.masks.mask import Both, Coarse, Edges, Extent, Grid, Mask
from headwise.shapes import brief, whole_number


def causal() -> Mask:
    """Each query sees its own position and everything before it. The last query sees every key (see above)."""
    return Causal()


def window(back: int, ahead: int = 0) -> Mask:
    """Each query sees itself, the `back` keys before it and the `ahead` keys after it; by default, none after it.

    The query's own position is not counted: a model with `sliding_window=W`, which counts it, is `window(W - 1)`.

    >>> print(window(2).draw(4, 4))
    ■···
    ■■··
    ■■■·
    ·■■■
    """
    return Window(count("window(back)", back), count("window(ahead)", ahead))


def padding(keep: Tensor | Sequence[int], *, side: str = "right") -> Mask:
    """Hides the padding of each sample.

    Args:
        keep: integer lengths (B,), where more than S counts as S, or a key mask (B, S), True or 1 for real tokens.
        side: which side is padded, "right" or "left", if `keep` holds lengths.

    >>> print(padding([3, 5]).draw(1, 5))
    ■■■··
    """
    if not isinstance(side, str) or side not in ("right", "left"):
        raise MaskError(f'padding(side={side!r}): expected "right" or "left".')
    keep = as_tensor("padding", keep)
    if keep.dim() == 2:
        return KeyMask(_as_bool(keep, "padding(mask)"))
    if keep.dim() != 1 or not _is_whole(keep):
        raise MaskError(
            f"padding({_shape(keep)} of {keep.dtype}): expected whole-number lengths (B,) or a key mask (B, S) of "
            f"True for real tokens."
        )
    return Lengths(_not_negative("padding", keep), side)


def documents(ids: Tensor | Sequence[int] | None = None, *, lengths: Sequence[int] | None = None) -> Mask:
    """Each query sees only its own document, for several texts packed into one row.

    Args:
        ids: the document number of every key position, (S,) or (B, S).
        lengths: instead of ids, the lengths of the documents in order.

    >>> print(documents(lengths=[2, 3]) & causal())
    ■····
    ■■···
    ··■··
    ··■■·
    ··■■■
    """
    if (ids is None) == (lengths is None):
        raise MaskError("documents(): pass exactly one of ids and lengths=.")
    if lengths is not None:
        counts = as_tensor("documents(lengths=)", lengths)
        if counts.dim() != 1 or not _is_whole(counts):
            raise MaskError(
                f"documents(lengths={_shape(counts)} of {counts.dtype}): expected whole numbers, one per text, such as "
                f"lengths=[3, 5]."
            )
        counts = _not_negative("documents(lengths=)", counts)
        if torch.compiler.is_compiling() or counts.is_meta:  # how many tokens there are is not known
            return Packed(counts.cumsum(0))
        ids = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    ids = as_tensor("documents", ids)
    if ids.dim() not in (1, 2) or not _is_whole(ids):
        raise MaskError(f"documents({_shape(ids)} of {ids.dtype}): expected whole numbers of shape (S,) or (B, S).")
    return Documents(ids if ids.dim() == 2 else ids[None])


def prefix(n: int | Tensor | Sequence[int]) -> Mask:
    """The first `n` keys, for every query; `n` may differ by sample, (B,). A prefix model is `causal() | prefix(n)`."""
    if isinstance(n, list | tuple) or getattr(n, "ndim", 0) == 1:
        n = as_tensor("prefix", n)
        if n.dim() != 1 or not _is_whole(n):
            raise MaskError(f"prefix({_shape(n)} of {n.dtype}): expected a whole number, or one per sample (B,).")
        return Lengths(_not_negative("prefix", n), "right")
    return Prefix(count("prefix", n))


def chunks(size: int) -> Mask:
    """Each query sees only its own chunk of `size` tokens, counted from the start of the text (Llama 4).

    >>> print((causal() & chunks(3)).draw(5))
    ■····
    ■■···
    ■■■··
    ···■·
    ···■■
    """
    if count("chunks", size) < 1:
        raise MaskError(f"chunks({size}): expected a whole number from 1 up.")
    return Chunks(count("chunks", size))


def dense(tensor: Tensor | Sequence[Any]) -> Mask:
    """Any table, a `tensor` of bool or 0/1, (T, S) or (B or 1, H or 1, T or 1, S or 1). True or 1 means may attend."""
    tensor = _as_bool(as_tensor("dense", tensor), "mask")
    if tensor.dim() == 3:
        raise MaskError(
            f"a mask of shape {_shape(tensor)} could be (B, T, S) or (H, T, S). Say which: mask[:, None] makes it "
            f"(B, 1, T, S), mask[None] makes it (1, H, T, S)."
        )
    if tensor.dim() not in (2, 4):
        raise MaskError(f"a mask of shape {_shape(tensor)}: expected (T, S) or (B or 1, H or 1, T or 1, S or 1).")
    return Dense(tensor if tensor.dim() == 4 else tensor[None, None])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """See `causal`."""

    banded = True
    sees_self = True

    def visible(self, grid: Grid) -> Tensor:
        return grid.col <= grid.position

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return 0, _clamp(stop + S - T, S)

    def hides_nothing(self, T: int, S: int) -> bool:
        return T == 1

    def shows_all(self, start: int, stop: int, lo: int, hi: int, T: int, S: int) -> bool:
        return hi - 1 <= start + S - T

    def coarse(self, edges: Edges) -> Coarse:
        first, last = edges.first_position[:, None], edges.last_position[:, None]
        return Coarse(edges.first_key <= last, edges.last_key <= first)

    def __repr__(self) -> str:
        return "causal()"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """See `window`."""

    back: int
    ahead: int
    banded = True
    sees_self = True

    def visible(self, grid: Grid) -> Tensor:
        distance = grid.position - grid.col
        return (distance <= self.back) & (distance >= -self.ahead)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return _clamp(start + S - T - self.back, S), _clamp(stop + S - T + self.ahead, S)

    def hides_nothing(self, T: int, S: int) -> bool:
        return self.back >= S - 1 and self.ahead >= T - 1 and T <= S

    def shows_all(self, start: int, stop: int, lo: int, hi: int, T: int, S: int) -> bool:
        return lo >= stop - 1 + S - T - self.back and hi - 1 <= start + S - T + self.ahead

    def coarse(self, edges: Edges) -> Coarse:
        most = edges.last_position[:, None] - edges.first_key  # distances in a block, which has all in between
        least = edges.first_position[:, None] - edges.last_key
        return Coarse(
            (least <= self.back) & (most >= -self.ahead),
            (most <= self.back) & (least >= -self.ahead),
        )

    def __repr__(self) -> str:
        return f"window({self.back}, {self.ahead})" if self.ahead else f"window({self.back})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """See `prefix`: one number for all samples."""

    n: int
    by_key = True

    def visible(self, grid: Grid) -> Tensor:
        return grid.col < self.n

    def shows_all(self, start: int, stop: int, lo: int, hi: int, T: int, S: int) -> bool:
        return hi <= self.n

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return 0, min(self.n, S)

    def hides_nothing(self, T: int, S: int) -> bool:
        return self.n >= S

    def __repr__(self) -> str:
        return f"prefix({self.n})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunks(Mask):
    """See `chunks`."""

    size: int
    sees_self = True

    def visible(self, grid: Grid) -> Tensor:
        return grid.position // self.size == grid.col // self.size

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        first, last = (start + S - T) // self.size, (stop - 1 + S - T) // self.size
        return _clamp(first * self.size, S), _clamp((last + 1) * self.size, S)

    def hides_nothing(self, T: int, S: int) -> bool:
        return T <= S <= self.size

    def shows_all(self, start: int, stop: int, lo: int, hi: int, T: int, S: int) -> bool:
        return len({i // self.size for i in (start + S - T, stop - 1 + S - T, lo, hi - 1)}) == 1

    def __repr__(self) -> str:
        return f"chunks({self.size})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """See `padding`: a number of keys per sample, counted from one side."""

    lengths: Tensor  # (B,)
    side: str
    by_key = True

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.lengths.shape[0])

    def visible(self, grid: Grid) -> Tensor:
        length = self.lengths[grid.batch]
        from_side = grid.col if self.side == "right" else grid.S - 1 - grid.col
        return from_side < length

    def __repr__(self) -> str:
        return f"padding(lengths of {self.lengths.shape[0]} samples, side={self.side!r})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class KeyMask(Mask):
    """See `padding`: a row of keys per sample."""

    keys: Tensor  # (B, S) bool
    by_key = True

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.keys.shape[0], keys=self.keys.shape[1])

    def visible(self, grid: Grid) -> Tensor:
        return self.keys[grid.batch, grid.col]

    def __repr__(self) -> str:
        return f"padding(keys of shape {_shape(self.keys)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """See `documents`."""

    ids: Tensor  # (B or 1, S)
    sees_self = True

    @property
    def extent(self) -> Extent:
        return Extent(batch=self.ids.shape[0] if self.ids.shape[0] > 1 else None, keys=self.ids.shape[1])

    def visible(self, grid: Grid) -> Tensor:
        batch = grid.batch if self.ids.shape[0] > 1 else grid.batch * 0
        position = grid.position  # negative before the first key: such queries belong to no document
        own = self.ids[batch, position.clamp(min=0)]
        return (own == self.ids[batch, grid.col]) & (position >= 0)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        if not self.ids.is_cpu or torch.compiler.is_compiling() or self.ids.is_inference():
            return 0, S  # reading numbers would make the host wait for the device
        first, last = max(start + S - T, 0), stop + S - T
        if first >= last:
            return 0, 0
        starts, stops = _spans(self, self.ids._version)
        return int(starts[:, first:last].min()), int(stops[:, first:last].max())

    def __repr__(self) -> str:
        return f"documents(ids of shape {_shape(self.ids)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """See `documents`: where every document ends, if how many tokens they have in all is not known."""

    ends: Tensor  # (documents,)
    sees_self = True

    def visible(self, grid: Grid) -> Tensor:
        position = grid.position
        if torch.compiler.is_compiling():  # the check becomes part of the graph
            fits = (self.ends[-1:] == grid.S).all()
            torch._assert_async(fits, "documents(lengths=...) must have as many tokens in all as there are keys")
        own, offered = (torch.bucketize(x, self.ends, right=True) for x in (position, grid.col))
        return (own == offered) & (position >= 0)

    def __repr__(self) -> str:
        return f"documents(lengths of {self.ends.shape[0]} documents)"


@functools.lru_cache(maxsize=8)
def _spans(mask: Documents, version: int) -> tuple[Tensor, Tensor]:
    """For every position the first key of its document and the last + 1, each (B or 1, S)."""
    B, S = mask.ids.shape
    _, names = torch.unique(mask.ids, return_inverse=True)
    place = torch.arange(S).expand(B, S)
    least = torch.full((B, int(names.max()) + 1 if S else 0), S).scatter_reduce(1, names, place, "amin")
    most = torch.zeros_like(least).scatter_reduce(1, names, place + 1, "amax")
    return least.gather(1, names), most.gather(1, names)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """See `dense`."""

    table: Tensor  # (B or 1, H or 1, T or 1, S or 1) bool
    pads = True

    @property
    def extent(self) -> Extent:
        return Extent(*(None if size == 1 else size for size in self.table.shape))

    def visible(self, grid: Grid) -> Tensor:
        return grid.lookup(self.table)

    @property
    def by_key(self) -> bool:
        return self.table.shape[1] == self.table.shape[2] == 1

    def tile(self, rows: slice, cols: slice, T: int, S: int, *, device: torch.device | str | None = None) -> Tensor:
        """A view of the table: no index is computed."""
        return self.table.expand(-1, -1, T, S)[:, :, rows, cols]

    def __repr__(self) -> str:
        return f"dense(mask of shape {_shape(self.table)})"


def reach_back(mask: Mask | None) -> int | None:
    """How many keys back a query can see, if the mask limits that and hides all keys ahead; else None.

    >>> reach_back(causal() & window(4)), reach_back(causal())
    (4, None)
    """
    parts = conjuncts(mask)
    behind = [part.back for part in parts if type(part) is Window]
    behind += [part.size - 1 for part in parts if type(part) is Chunks]
    ahead = any(type(part) is Causal or (type(part) is Window and part.ahead == 0) for part in parts)
    return min(behind) if behind and ahead else None


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` joins."""
    if type(mask) is Both:
        return conjuncts(mask.a) + conjuncts(mask.b)
    return [] if mask is None else [mask]


def as_mask(mask: "Mask | Tensor | None", B: int, T: int, S: int) -> Mask | None:
    """The `Mask` a user meant by `mask`; a tensor that could mean two things is refused.

    A bare 2-D tensor is (T, S). If it could also be (B, S), it is refused.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor):
        raise MaskError(f"mask is a {type(mask).__name__}; expected a headwise mask such as causal(), or a tensor.")
    if mask.dim() == 2:
        rows, cols = mask.shape
        # Not `rows in (1, T)`: while torch.compile traces, `in` takes a symbolic length for another number.
        per_query = (rows == 1 or rows == T) and (cols == 1 or cols == S)
        per_sample = rows == B and cols == S
        if per_query and per_sample and rows > 1:
            raise MaskError(
                f"a mask of shape {_shape(mask)} with B = T = {T} could be (T, S) or (B, S). Say which: "
                f"dense(mask) reads it as (T, S), padding(mask) as (B, S)."
            )
        if per_sample and not per_query:
            raise MaskError(
                f"a mask of shape {_shape(mask)} is (B, S), one row per sample; a bare 2-D mask is read as "
                f"(T, S) = ({T}, {S}). Pass padding(mask), or mask[:, None, None, :]."
            )
        if not per_query:
            raise MaskError(
                f"a mask of shape {_shape(mask)} does not fit: expected (T, S) = ({T}, {S}). "
                f"For one row per sample pass padding(mask) of shape (B, S) = ({B}, {S})."
            )
    return dense(mask)


def _as_bool(mask: Tensor, name: str) -> Tensor:
    """`mask` as a bool tensor; values other than 0 and 1 are refused."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_complex():
        raise MaskError(f"{name} is {mask.dtype}; expected bool, or 0 and 1.")
    binary = ((mask == 0) | (mask == 1)).all()
    if torch.compiler.is_compiling():  # while tracing there are no numbers: the check becomes part of the graph
        torch._assert_async(binary, f"{name} holds values other than 0 and 1; pass an additive mask as attn_bias=")
        return mask != 0
    if mask.is_meta or binary:
        return mask != 0
    raise MaskError(
        f"{name} is {mask.dtype} with values from {mask.min().item():g} to {mask.max().item():g}; a mask holds only "
        f"0 (hidden) and 1 (may attend). If these numbers are meant to be added to the scores, pass them as "
        f"attn_bias=. If they mark hidden keys, pass (mask == 0)."
    )


def as_tensor(name: str, x: object) -> Tensor:
    """`x` as a tensor. An empty list becomes a tensor of integers."""
    if isinstance(x, Tensor):
        return x
    try:
        tensor = as_real_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MaskError(f"{name}({x!r}): expected a tensor or a list of numbers.") from error
    return tensor if tensor.numel() else tensor.long()


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _not_negative(name: str, counts: Tensor) -> Tensor:
    """`counts`, refused if one is negative. Only checked on the CPU, where reading numbers is free."""
    if counts.is_cpu and not torch.compiler.is_compiling() and bool((counts < 0).any()):
        raise MaskError(f"{name}: counts start at 0, and {int(counts.min())} was given.")
    return counts


def count(name: str, n: object, least: int = 0) -> int:
    """`n` as a whole number from `least` up."""
    found = whole_number(n)
    if found is None or found < least:
        raise MaskError(f"{name}={brief(n)}: expected a whole number from {least} up.")
    return found


def _clamp(position: int, S: int) -> int:
    return min(max(position, 0), S)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
