"""`blocks(selected, size)`: attention to chosen blocks of keys, as in native sparse attention and MoBA.

Queries and keys are cut into blocks by their position, and a small table says which blocks of keys each block of
queries sees. Backends read the table: FlexAttention gets a BlockMask from it, and the CPU gathers the chosen keys.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import MaskError
from headwise.masks.kinds import as_tensor, conjuncts, count
from headwise.masks.mask import Coarse, Edges, Extent, Grid, Mask


def blocks(selected: Tensor | Sequence[Any], size: int | tuple[int, int], *, key_blocks: int | None = None) -> Mask:
    """Each block of queries sees the blocks of keys that are selected for it.

    Position p is in block p // size, and the last block may be shorter. Rows end with the block of the last query, as
    masks do: for T queries after a cache, give the rows of their blocks only, or of the whole text. The mask hides
    nothing within a block, so add `& causal()` for a decoder.

    >>> from headwise.masks import causal
    >>> print((blocks([[0, -1], [1, -1], [0, 2]], 2) & causal()).draw(6))
    ■·····
    ■■····
    ··■···
    ··■■··
    ■■··■·
    ■■··■■

    Args:
        selected: bool, (query blocks, key blocks) or (B or 1, H or 1, query blocks, key blocks), True for blocks that
            are seen; or whole numbers, the key blocks that each query block sees, (query blocks, k) or
            (B or 1, H or 1, query blocks, k), with −1 for none.
        size: tokens in a block, or (queries in a block, keys in a block). With one query in a block, every query has
            its own choice.
        key_blocks: how many key blocks there are, if `selected` holds their numbers. Without it the largest number is
            looked up, which a GPU has to wait for and a compiled graph cannot do.
    """
    rows, cols = (size, size) if not isinstance(size, tuple | list) else _pair(size)
    rows, cols = count("blocks(size)", rows, least=1), count("blocks(size)", cols, least=1)
    given = as_tensor("blocks", selected)
    if given.dim() == 3:
        raise MaskError(
            f"blocks(selected of shape {tuple(given.shape)}): the first axis could be samples or heads. Say which: "
            f"selected[:, None] has one for each sample, selected[None] one for each head."
        )
    if given.dim() not in (2, 4):
        raise MaskError(
            f"blocks(selected of shape {tuple(given.shape)}): expected (query blocks, key blocks) or (B or 1, H or 1, "
            f"query blocks, key blocks), or numbers of key blocks, (..., query blocks, k)."
        )
    given = given if given.dim() == 4 else given[None, None]
    table = _table(given, None if key_blocks is None else count("blocks(key_blocks)", key_blocks))
    return Blocks(table, (rows, cols), partial=given.dtype != torch.bool and key_blocks is None)


def _pair(size: Sequence[int]) -> Sequence[int]:
    if len(size) != 2:
        raise MaskError(f"blocks(size={size!r}): expected one number, or (queries in a block, keys in a block).")
    return size


def _table(given: Tensor, key_blocks: int | None) -> Tensor:
    """The choice as a bool table (B or 1, H or 1, query blocks, key blocks)."""
    if given.dtype == torch.bool:
        if key_blocks is not None:
            raise MaskError("blocks(key_blocks=...): it goes with numbers of blocks, and a bool table is given.")
        return given
    if given.is_floating_point() or given.is_complex():
        raise MaskError(
            f"blocks(selected of {given.dtype}): expected bool, or the numbers of the chosen key blocks. If it holds 0 "
            f"and 1, pass selected.bool()."
        )
    traced = torch.compiler.is_compiling() or given.is_meta
    if key_blocks is None:
        if traced:
            raise MaskError("blocks(numbers of blocks): pass key_blocks=, how many key blocks there are.")
        key_blocks = int(given.max()) + 1 if given.numel() else 0
    if not traced and given.is_cpu and given.numel():  # elsewhere, reading numbers would make the host wait
        least, most = (int(x) for x in given.aminmax())
        if least < -1:
            raise MaskError(f"blocks(...): key blocks start at 0, −1 means none, and {least} was given.")
        if most >= key_blocks:
            raise MaskError(f"blocks(...): key block {most} is selected and key_blocks={key_blocks}.")
    table = torch.zeros(*given.shape[:3], key_blocks + 1, dtype=torch.bool, device=given.device)
    return table.scatter(-1, torch.where(given < 0, key_blocks, given).long(), True)[..., :key_blocks]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Blocks(Mask):
    """See `blocks`."""

    table: Tensor  # (B or 1, H or 1, query blocks, key blocks) bool
    size: tuple[int, int]
    partial: bool = False  # whether key blocks after the last column exist, unselected
    fits_all = False

    @property
    def extent(self) -> Extent:
        B, H = (None if size == 1 else size for size in self.table.shape[:2])
        return Extent(B, H)

    def check(self, B: int, H: int, T: int, S: int, device: torch.device) -> None:
        super().check(B, H, T, S, device)
        (rows, cols), (Tb, Sb) = self.size, self.table.shape[2:]
        most, keys = -(-S // rows), -(-S // cols)
        least = most - max(S - T, 0) // rows
        if not least <= Tb <= most:
            expected = f"{least}" if least == most else f"{least}, those of these queries, up to {most}, the whole text"
            raise MaskError(
                f"mask {self!r} has {Tb} blocks of {rows} queries, and there are {T} queries, the last at position "
                f"{S - 1}: expected {expected}."
            )
        if Sb > keys or (Sb < keys and not self.partial):
            raise MaskError(
                f"mask {self!r} has {Sb} blocks of {cols} keys, and {S} keys are {keys} blocks. Select among {keys}."
            )

    def visible(self, grid: Grid) -> Tensor:
        (rows, cols), (Tb, Sb) = self.size, self.table.shape[2:]
        row = grid.position // rows - self.first_block(grid.S)
        col = grid.col // cols
        batch = grid.batch if self.table.shape[0] > 1 else grid.batch * 0
        head = grid.head if self.table.shape[1] > 1 else grid.head * 0
        inside = (row >= 0) & (row < Tb) & (col < Sb)
        return self.table[batch, head, row.clamp(0, Tb - 1), col.clamp(max=Sb - 1)] & inside

    def first_block(self, S: int) -> int:
        """The query block of the table's first row, among all blocks of S positions."""
        return -(-S // self.size[0]) - self.table.shape[2]

    def rows_of(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        """The rows of the table, from and to, for the queries `range(start, stop)`."""
        first, Tb = self.first_block(S), self.table.shape[2]
        lo, hi = (start + S - T) // self.size[0] - first, (stop - 1 + S - T) // self.size[0] + 1 - first
        return max(lo, 0), min(max(hi, 0), Tb)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        if not self.table.is_cpu or torch.compiler.is_compiling() or self.table.is_inference():
            return 0, S  # reading numbers would make the host wait for the device
        lo, hi = self.rows_of(start, stop, T, S)
        if lo >= hi:
            return 0, 0
        starts, stops = _spans(self, self.table._version)
        first, last = int(starts[lo:hi].min()), int(stops[lo:hi].max())
        return (0, 0) if first >= last else (first * self.size[1], min(last * self.size[1], S))

    def coarse(self, edges: Edges) -> Coarse:
        """By sums over rectangles of the table, for blocks of any size."""
        (rows, cols), (Tb, Sb) = self.size, self.table.shape[2:]
        first = self.first_block(edges.S)
        top, bottom = edges.first_position // rows - first, edges.last_position // rows + 1 - first
        left, right = edges.first_key // cols, edges.last_key // cols + 1
        sums = torch.nn.functional.pad(self.table.int().cumsum(2).cumsum(3), (1, 0, 1, 0))

        def upto(row: Tensor, col: Tensor) -> Tensor:
            return sums[:, :, row.clamp(0, Tb)[:, None], col.clamp(0, Sb)]

        chosen = upto(bottom, right) - upto(top, right) - upto(bottom, left) + upto(top, left)
        return Coarse(chosen > 0, chosen == (bottom - top)[:, None] * (right - left))

    def of_heads(self, first: int, count: int) -> Mask:
        return dataclasses.replace(self, table=self.table[:, first : first + count])

    def __str__(self) -> str:
        return self.draw(self.table.shape[2] * self.size[0], self.table.shape[3] * self.size[1])

    def __repr__(self) -> str:
        return f"blocks(selected of shape {tuple(self.table.shape)}, {self.size})"


@functools.lru_cache(maxsize=8)
def _spans(mask: Blocks, version: int) -> tuple[Tensor, Tensor]:
    """For every row of the table the first selected key block and the last + 1, in any sample and head."""
    found = mask.table.flatten(0, 1).any(0)
    place = torch.arange(found.shape[1])
    return torch.where(found, place, found.shape[1]).amin(1), torch.where(found, place + 1, 0).amax(1)


def selection_in(mask: Mask | None) -> tuple[Blocks, list[Mask]] | None:
    """The first `blocks(...)` among the masks that `&` joins, and the others; None if there is none."""
    parts = conjuncts(mask)
    for i, part in enumerate(parts):
        if type(part) is Blocks:
            return part, parts[:i] + parts[i + 1 :]
    return None
