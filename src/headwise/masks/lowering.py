"""The cheapest form of a mask that a backend accepts.

From cheap to expensive: nothing at all, an `is_causal` flag, a `BlockMask` that skips hidden blocks, a bias of 0 and
minus infinity. Only the last has T·S numbers.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.masks.kinds import Causal, Window
from headwise.masks.mask import Both, Edges, Grid, Mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


BLOCK = 128  # queries and keys of a block of FlexAttention
STRIP_BYTES = 2**26  # of the mask, examined at a time


class Lowered(NamedTuple):
    """A mask as torch's fused attention takes it. `kind` is "nothing", "causal" or "bias"."""

    kind: str
    bias: Tensor | None = None


def lower(
    mask: Mask | None, T: int, S: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None
) -> Lowered:
    """The cheapest form of `mask` that torch's fused attention takes.

    >>> from headwise.masks import causal, window
    >>> lower(causal(), 5, 5).kind, lower(causal(), 1, 9).kind, lower(causal() & window(2), 5, 5).kind
    ('causal', 'nothing', 'bias')
    """
    mask = simplify(mask, T, S)
    if mask is None:
        return Lowered("nothing")
    if type(mask) is Causal and T == S:
        return Lowered("causal")
    return Lowered("bias", bias=additive(mask.to_tensor(T, S, device=device), dtype))


def simplify(mask: Mask | None, T: int, S: int) -> Mask | None:
    """The simplest mask that is the same at these lengths; None if it hides nothing.

    >>> from headwise.masks import causal, window
    >>> simplify(causal() & window(7), 5, 5)
    causal()
    """
    if mask is None or not _known(T, S):
        return mask
    if mask.hides_nothing(T, S):
        return None
    if type(mask) is Both:
        a, b = simplify(mask.a, T, S), simplify(mask.b, T, S)
        if a is None or b is None:
            return b if a is None else a
        for one, other in ((a, b), (b, a)):  # with causal, how far a window looks ahead does not matter
            if type(one) is Causal and (type(other) is Causal or (type(other) is Window and other.back >= S - 1)):
                return one
        return mask if a is mask.a and b is mask.b else Both(a, b)
    if type(mask) is Window and mask.ahead == 0 and mask.back >= S - 1:
        return Causal()
    return mask


def _known(T: int, S: int) -> bool:
    """Whether these lengths may be looked at: not those of an exported graph that are to stay open."""
    if not torch.compiler.is_exporting():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

    return has_static_value(T) and has_static_value(S)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible and minus infinity elsewhere, in `dtype`.

    It is never bool and never of another dtype: given a bool mask, the cuDNN path returns garbage for a row that sees
    nothing, and given a float32 bias with float64 queries, the CPU path is silently wrong.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)


def may_empty_a_row(mask: Mask | None, T: int, S: int) -> bool:
    """Whether a query might see no key. False only if the mask rules it out without its numbers."""
    return mask is not None and not (mask.sees_self and T <= S)


def block_mask(mask: Mask, T: int, S: int, *, device: torch.device | str | None = None) -> "BlockMask":
    """The mask for FlexAttention: which blocks have visible entries, found strip by strip, and the rule within them."""
    from torch.nn.attention.flex_attention import BlockMask  # slow to import and rarely needed

    where = torch.device(device if device is not None else next((t.device for t in mask.tensors()), "cpu"))
    some, every = occupied(mask, T, S, where)

    def mask_mod(batch: Tensor, head: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return mask.visible(Grid(batch, head, row, col, T, S))

    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every), *_ordered(every), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(T, S)
    )


def occupied(mask: Mask, T: int, S: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Whether any of each 128×128 block may be visible, and whether all of it is, each (B or 1, H or 1, rows, cols).

    Masks that know this without looking at pairs are asked; others are examined strip by strip.
    """
    B, H = (1 if size is None else size for size in mask.extent[:2])
    known = mask.coarse(Edges.of(BLOCK, T, S, device))
    if known is not None:
        sizes = (B, H, -(-T // BLOCK), -(-S // BLOCK))
        return known.some.expand(sizes), known.every.expand(sizes)
    strip = max(1, STRIP_BYTES // (B * H * S * BLOCK)) * BLOCK
    some: list[Tensor] = []
    every: list[Tensor] = []
    for start in range(0, T, strip):
        seen = mask.tile(slice(start, min(start + strip, T)), slice(None), T, S, device=device)
        rows, cols = seen.shape[2], seen.shape[3]
        room = (0, -cols % BLOCK, 0, -rows % BLOCK)
        for found, value, reduce in ((some, False, torch.any), (every, True, torch.all)):
            padded = torch.nn.functional.pad(seen, room, value=value)
            blocks = padded.unflatten(3, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            found.append(reduce(reduce(blocks, 5), 3))
    return torch.cat(some, 2), torch.cat(every, 2)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their indices, first and in order."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts, indices.contiguous()
