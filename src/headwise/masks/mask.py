"""What a mask is, how masks combine with `&`, `|` and `~`, and masks for some heads or other positions.

A `Mask` says True where a query may attend, for any tile of the T×S grid; it never needs the whole grid. The kinds of
masks are in `kinds.py`.
"""

import abc
import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import DeviceError, MaskError
from headwise.masks.composite import Composite
from headwise.shapes import brief, whole_number


class Grid(NamedTuple):
    """The indices of one tile, which broadcast to (B, H, t, s), and the full lengths T and S."""

    batch: Tensor  # (B, 1, 1, 1), or (1, 1, 1, 1) if nothing depends on the sample
    head: Tensor  # (1, H, 1, 1) or (1, 1, 1, 1)
    row: Tensor  # (t, 1)
    col: Tensor  # (s,)
    T: int
    S: int

    @property
    def position(self) -> Tensor:
        """The position of each query among the keys."""
        return self.row + (self.S - self.T)

    def placed(self, positions: Tensor) -> "Grid":
        """The same tile with the queries at `positions`, (B or 1, T), instead of at the end of the keys."""
        batch = self.batch if positions.shape[0] > 1 else self.batch * 0
        return self._replace(row=positions[batch, self.row], T=self.S)

    def lookup(self, table: Tensor) -> Tensor:
        """The entries of a (B or 1, H or 1, T or 1, S or 1) table; an axis of size 1 has one entry for all."""
        index = zip(table.shape, (self.batch, self.head, self.row, self.col), strict=True)
        return table[tuple(x if size > 1 else x * 0 for size, x in index)]


class Extent(NamedTuple):
    """The sizes (B, H, T, S) that a mask requires; None where any size will do."""

    batch: int | None = None
    heads: int | None = None
    queries: int | None = None
    keys: int | None = None


class Edges(NamedTuple):
    """The blocks into which queries and keys are cut: the first and last position of each, inclusive."""

    first_position: Tensor  # (rows,), of queries, among the keys
    last_position: Tensor
    first_key: Tensor  # (cols,)
    last_key: Tensor
    T: int
    S: int

    @classmethod
    def of(cls, edge: int, T: int, S: int, device: torch.device | str | None = None) -> "Edges":
        """Blocks of `edge` queries and keys; the last ones may be shorter."""
        rows, cols = torch.arange(0, T, edge, device=device), torch.arange(0, S, edge, device=device)
        last_row, last_col = (rows + edge).clamp(max=T) - 1, (cols + edge).clamp(max=S) - 1
        return cls(rows + (S - T), last_row + (S - T), cols, last_col, T, S)


class Coarse(NamedTuple):
    """A mask block by block: whether some of each block may be visible, and whether all of it is certain to be.

    Each broadcasts to (B or 1, H or 1, rows, cols).
    """

    some: Tensor
    every: Tensor


NOUNS = ("samples", "heads", "queries", "keys")


class Mask(Composite, abc.ABC):
    """Which keys each query may attend to. Combine masks with `&`, `|` and `~`.

    A subclass defines `visible`; everything else has a safe default. Its tensors and other values, kept in attributes
    or dataclass fields, are copied, moved and saved along with it.
    """

    @abc.abstractmethod
    def visible(self, grid: Grid) -> Tensor:
        """True where the query may attend; broadcasts to the tile of `grid`. This alone defines the mask."""

    # Shortcuts for the fast paths, which must not look at numbers. Each default is the cautious answer.

    @property
    def extent(self) -> Extent:
        """The sizes this mask requires. A mask that differs by sample or head must say how many there are."""
        return Extent()

    @property
    def fits_all(self) -> bool:
        """Whether the mask fits scores of any size."""
        return self.extent == Extent()

    @property
    def banded(self) -> bool:
        """Whether the mask depends only on the distance from query to key."""
        return False

    @property
    def sees_self(self) -> bool:
        """Whether every query is certain to see its own position, so that no row is empty if T ≤ S."""
        return False

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        """A range (lo, hi) outside which all keys are hidden from the queries `range(start, stop)`."""
        return 0, S

    def hides_nothing(self, T: int, S: int) -> bool:
        """Whether the mask is certain to be True everywhere at these lengths."""
        return False

    def shows_all(self, start: int, stop: int, lo: int, hi: int, T: int, S: int) -> bool:
        """Whether the queries `range(start, stop)` are certain to see all keys `range(lo, hi)`."""
        return self.hides_nothing(T, S)

    @property
    def by_key(self) -> bool:
        """Whether the mask depends only on the sample and the key: all queries and heads see the same keys."""
        return False

    @property
    def pads(self) -> bool:
        """Whether a key that this mask hides from every query is padding, so that statistics leave it out."""
        return self.by_key

    def coarse(self, edges: Edges) -> Coarse | None:
        """Which blocks, cut at `edges`, may be visible, without looking at pairs; None if the mask cannot tell."""
        return None

    def of_heads(self, first: int, count: int) -> "Mask":
        """This mask, which differs by head, for `count` of its heads, starting at `first`."""
        return OfHeads(self, first, count)

    # What every mask can do.

    def tile(self, rows: slice, cols: slice, T: int, S: int, *, device: torch.device | str | None = None) -> Tensor:
        """The tile `[rows, cols]` as a bool tensor that broadcasts to (B, H, t, s).

        >>> from headwise.masks import causal
        >>> causal().tile(slice(0, 2), slice(0, 3), T=5, S=5).shape
        torch.Size([1, 1, 2, 3])
        """
        device = next((x.device for x in self.tensors()), None) if device is None else device
        B, H = (1 if size is None else size for size in self.extent[:2])
        grid = Grid(
            torch.arange(B, device=device)[:, None, None, None],
            torch.arange(H, device=device)[:, None, None],
            _indices(rows, T, device)[:, None],
            _indices(cols, S, device),
            T,
            S,
        )
        if S == 0:  # there is nothing to look up
            return torch.zeros(B, H, grid.row.shape[0], 0, dtype=torch.bool, device=device)
        result = self.visible(grid)
        return result[(None,) * (4 - result.dim())].expand(-1, -1, grid.row.shape[0], grid.col.shape[0])

    def to_tensor(self, T: int, S: int | None = None, *, device: torch.device | str | None = None) -> Tensor:
        """The whole mask as a bool tensor (B or 1, H or 1, T, S). It has T·S entries, so use it for small sizes."""
        if not torch.compiler.is_compiling():
            T, S = self._checked_lengths(T, S)
        return self.tile(slice(None), slice(None), T, T if S is None else S, device=device)

    def _checked_lengths(self, T: object, S: object) -> tuple[int, int]:
        """T and S, which is T if it is None; an error unless they are lengths that this mask can have."""
        found = {"queries": whole_number(T), "keys": whole_number(T if S is None else S)}
        for (name, length), given, made in zip(found.items(), (T, S), self.extent[2:], strict=True):
            if length is None or length < 0:
                raise MaskError(f"mask {self!r} for {brief(given)} {name}: expected a whole number from 0 up.")
            if made is not None and made != length:
                raise MaskError(f"mask {self!r} is made for {made} {name}, and {length} are asked for.")
        return found["queries"] or 0, found["keys"] or 0

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        """Raise unless this mask fits scores of shape (B, H, T, S) on `device`."""
        sizes = (B, H, T, S)
        for name, given, size in zip(NOUNS, self.extent, sizes, strict=True):
            if given is not None and given != size:
                raise MaskError(
                    f"mask {self!r} is made for {given} {name}, and the scores, (B, H, T, S) = {sizes}, have {size}. "
                    f"Make the mask for {size} {name}."
                )
        for tensor in self.tensors():
            if tensor.device != device:
                cure = f"Move it once with mask.to({str(device)!r})."
                cure = "A meta tensor has no numbers: make the mask again." if tensor.is_meta else cure
                raise DeviceError(f"mask {self!r} is on {tensor.device} and the query on {device}. {cure}")

    def draw(self, T: int = 8, S: int | None = None, *, sample: int = 0, head: int = 0, width: int = 64) -> str:
        """The mask as text: ■ visible, · hidden. Beyond `width` keys a sign stands for a block, ▒ if it is mixed.

        `sample` and `head` choose which one to draw where they differ.
        """
        T, S = self._checked_lengths(T, S)
        block = max(1, -(-max(T, S) // width))
        lines = []
        for start in range(0, T, block):
            rows = self.tile(slice(start, start + block), slice(None), T, S)
            seen = rows[min(sample, rows.shape[0] - 1), min(head, rows.shape[1] - 1)]
            cells = [seen[:, left : left + block] for left in range(0, S, block)]
            lines.append("".join("■" if c.all() else "▒" if c.any() else "·" for c in cells))
        return "\n".join(lines)

    def __str__(self) -> str:
        _, _, T, S = self.extent
        return self.draw(next(size for size in (T, S, 8) if size is not None), S)

    def __and__(self, other: "Mask") -> "Mask":
        return Both(self, _operand(other, "&"))

    def __or__(self, other: "Mask") -> "Mask":
        return Either(self, _operand(other, "|"))

    def __rand__(self, other: object) -> "Mask":
        return _operand(other, "&") & self

    def __ror__(self, other: object) -> "Mask":
        return _operand(other, "|") | self

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskError(f"mask {self!r} is neither true nor false: combine masks with &, | and ~, not and, or, not.")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Combination(Mask):
    """Two masks combined by `&` or `|`."""

    a: Mask
    b: Mask

    @property
    def extent(self) -> Extent:
        sizes = []
        for name, x, y in zip(NOUNS, self.a.extent, self.b.extent, strict=True):
            if x is not None and y is not None and x != y:
                raise MaskError(f"{self.a!r} is made for {x} {name} and {self.b!r} for {y}; combined masks must agree.")
            sizes.append(x if x is not None else y)
        return Extent(*sizes)

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        super().check(B, H, T, S, device)
        for mask in (self.a, self.b):
            mask.check(B, H, T, S, device)

    @property
    def fits_all(self) -> bool:
        return self.a.fits_all and self.b.fits_all

    @property
    def banded(self) -> bool:
        return self.a.banded and self.b.banded

    @property
    def by_key(self) -> bool:
        return self.a.by_key and self.b.by_key


class Both(Combination):
    """`a & b`."""

    def visible(self, grid: Grid) -> Tensor:
        return self.a.visible(grid) & self.b.visible(grid)

    @property
    def sees_self(self) -> bool:
        return self.a.sees_self and self.b.sees_self

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        (lo_a, hi_a), (lo_b, hi_b) = self.a.key_range(start, stop, T, S), self.b.key_range(start, stop, T, S)
        lo = max(lo_a, lo_b)
        return lo, max(lo, min(hi_a, hi_b))

    def hides_nothing(self, T: int, S: int) -> bool:
        return self.a.hides_nothing(T, S) and self.b.hides_nothing(T, S)

    def shows_all(self, start: int, stop: int, lo: int, hi: int, T: int, S: int) -> bool:
        return all(mask.shows_all(start, stop, lo, hi, T, S) for mask in (self.a, self.b))

    def coarse(self, edges: Edges) -> Coarse | None:
        a, b = self.a.coarse(edges), self.b.coarse(edges)
        return None if a is None or b is None else Coarse(a.some & b.some, a.every & b.every)

    def of_heads(self, first: int, count: int) -> Mask:
        return of_heads(self.a, first, count) & of_heads(self.b, first, count)

    def __repr__(self) -> str:
        return f"{_inner(self.a)} & {_inner(self.b)}"


class Either(Combination):
    """`a | b`."""

    def visible(self, grid: Grid) -> Tensor:
        return self.a.visible(grid) | self.b.visible(grid)

    @property
    def sees_self(self) -> bool:
        return self.a.sees_self or self.b.sees_self

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        (lo_a, hi_a), (lo_b, hi_b) = self.a.key_range(start, stop, T, S), self.b.key_range(start, stop, T, S)
        return min(lo_a, lo_b), max(hi_a, hi_b)

    def hides_nothing(self, T: int, S: int) -> bool:
        return self.a.hides_nothing(T, S) or self.b.hides_nothing(T, S)

    def shows_all(self, start: int, stop: int, lo: int, hi: int, T: int, S: int) -> bool:
        return any(mask.shows_all(start, stop, lo, hi, T, S) for mask in (self.a, self.b))

    def coarse(self, edges: Edges) -> Coarse | None:
        a, b = self.a.coarse(edges), self.b.coarse(edges)
        return None if a is None or b is None else Coarse(a.some | b.some, a.every | b.every)

    def __repr__(self) -> str:
        return f"{_inner(self.a)} | {_inner(self.b)}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """`~a`."""

    a: Mask

    def visible(self, grid: Grid) -> Tensor:
        return ~self.a.visible(grid)

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        self.a.check(B, H, T, S, device)

    @property
    def fits_all(self) -> bool:
        return self.a.fits_all

    @property
    def extent(self) -> Extent:
        return self.a.extent

    @property
    def banded(self) -> bool:
        return self.a.banded

    @property
    def by_key(self) -> bool:
        return self.a.by_key

    def coarse(self, edges: Edges) -> Coarse | None:
        found = self.a.coarse(edges)
        return None if found is None else Coarse(~found.every, ~found.some)

    def __repr__(self) -> str:
        return f"~{_inner(self.a)}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Placed(Mask):
    """See `placed`."""

    inner: Mask
    positions: Tensor  # (B or 1, T)

    @property
    def extent(self) -> Extent:
        B, H, _, S = self.inner.extent
        rows = self.positions.shape[0]
        return Extent(rows if rows > 1 else B, H, self.positions.shape[1], S)

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid.placed(self.positions))

    def __repr__(self) -> str:
        return f"placed({self.inner!r}, positions of shape {tuple(self.positions.shape)})"


def placed(mask: Mask, positions: Tensor) -> Mask:
    """`mask` for queries at `positions` among the keys, (B or 1, T), instead of at their end.

    When a batch of keys holds samples of different length, only the queries of the longest are at the end.
    """
    check_placeable(mask)
    return Placed(mask, positions)


def check_placeable(mask: Mask) -> None:
    """Raise if a mask is tied to queries at the end of the keys."""
    if mask.extent.queries is not None:
        raise MaskError(
            f"mask {mask!r} lists its queries one by one, so they cannot be placed elsewhere. In a batch of samples of "
            f"different length, and with a static cache, use masks of positions: causal(), window(...), documents(...)."
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shifted(Mask):
    """See `shifted`."""

    inner: Mask
    dropped: int

    @property
    def extent(self) -> Extent:
        B, H, T, S = self.inner.extent
        return Extent(B, H, T, None if S is None else S - self.dropped)

    @property
    def by_key(self) -> bool:
        return self.inner.by_key

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid._replace(col=grid.col + self.dropped, S=grid.S + self.dropped))

    def __repr__(self) -> str:
        return f"shifted({self.inner!r}, {self.dropped})"


def shifted(mask: Mask, dropped: int) -> Mask:
    """`mask` for a text whose first `dropped` keys are gone. A mask of distances stays as it is."""
    if mask.banded:
        return mask
    if type(mask) is Both:
        return shifted(mask.a, dropped) & shifted(mask.b, dropped)
    return Shifted(mask, dropped)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class OfHeads(Mask):
    """See `of_heads`."""

    inner: Mask
    first: int
    count: int

    @property
    def extent(self) -> Extent:
        return self.inner.extent._replace(heads=self.count)

    def visible(self, grid: Grid) -> Tensor:
        return self.inner.visible(grid._replace(head=grid.head + self.first))

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return self.inner.key_range(start, stop, T, S)

    def __repr__(self) -> str:
        return f"of_heads({self.inner!r}, {self.first} to {self.first + self.count - 1})"


def of_heads(mask: Mask, first: int, count: int) -> Mask:
    """`mask` for `count` of its heads, starting at `first`. A mask that is the same for all heads stays as it is."""
    return mask if mask.extent.heads is None else mask.of_heads(first, count)


def _indices(piece: slice, size: int, device: torch.device | str | None) -> Tensor:
    """`range(size)[piece]` as a tensor."""
    if isinstance(piece, slice) and piece == slice(None):  # `slice.indices` would turn a symbolic size into a number
        return torch.arange(size, device=device)
    if not isinstance(piece, slice):
        raise MaskError(f"tile {brief(piece)}: expected a slice of rows or columns, such as slice(0, 128).")
    start, stop, step = piece.indices(size)
    if step < 0:
        raise MaskError(f"tile {piece}: rows and columns run forwards; expected a positive step.")
    return torch.arange(start, max(start, stop), step, device=device)


def _operand(other: object, sign: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise MaskError(
        f"mask {sign} {type(other).__name__}: both sides must be headwise masks. Wrap a tensor in dense(...)."
    )


def _inner(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, Both | Either) else repr(mask)
