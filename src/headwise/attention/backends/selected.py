"""Selected blocks on the CPU: the chosen keys of each block of queries are gathered, and nothing else is computed.

torch's CPU kernel has no block mask: under a bias it computes every score. Here the blocks of queries become samples of
one call of that kernel, each with its own chosen keys, so the work is the share of the keys that is chosen.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.base import BEYOND_SDPA, Backend, Call
from headwise.masks import Blocks, Grid, Mask
from headwise.masks.selection import selection_in

WORTHWHILE = 0.4  # the share of keys above which gathering costs more than it saves; measured at T = 2048 to 8192
FEWEST = 512  # keys from which it pays
CHUNK_BYTES = 2**25  # of gathered keys and values at a time


class ChosenKeys(NamedTuple):
    """The keys that every block of queries reads, padded to the same number."""

    rows: Tensor  # (n, queries in a block): rows of the call, outside of 0 to T − 1 where the first or last block ends
    cols: Tensor  # (B or 1, H or 1, n, keys)
    real: Tensor  # the same shape: False for padding
    mask: Mask | None  # what else hides keys


class SelectedBlocks(Backend):
    """Chosen blocks of keys, gathered."""

    name = "selected"
    summary = "the chosen blocks of keys, gathered for each block of queries, on the CPU"

    def refuses(self, call: Call) -> str | None:
        query, key, value, scoring, dropout = call
        if scoring.mask is None or (found := selection_in(scoring.mask)) is None:
            return "the mask is not a choice of blocks, blocks(...) & ..."
        if not query.is_cpu:
            return "it is for the CPU"
        if torch.compiler.is_compiling():
            return "a compiled graph cannot count the chosen blocks"
        if query.numel() == 0 or value.numel() == 0:
            return "an axis has size 0"
        if scoring.beyond_sdpa:
            return BEYOND_SDPA
        if dropout:
            return "torch's CPU kernel does not support dropout"
        T, S = query.shape[2], key.shape[2]
        if T > S or S < FEWEST:
            return f"it is for at least {FEWEST} keys, and no more queries than keys"
        share = int(chosen(*found, T, S).sum(-1).max()) * found[0].size[1] / S
        return None if share <= WORTHWHILE else f"{share:.0%} of the keys are chosen for some block of queries"

    def run(self, call: Call) -> Tensor:
        query, value = call.query, call.value
        found = selection_in(call.scoring.mask)
        assert found is not None  # noqa: S101 - refuses() has checked
        choice = choose_keys(*found, query.shape[2], call.key.shape[2])
        B, H, T, _ = query.shape
        rows, K = choice.rows.shape[1], choice.cols.shape[3]
        per_block = B * H * K * (query.shape[3] + value.shape[3]) * query.element_size()
        step = max(1, CHUNK_BYTES // max(1, per_block))
        parts = [read(call, _part(choice, slice(i, i + step))) for i in range(0, len(choice.rows), step)]
        first = int(choice.rows[0, 0])  # not above 0: the first block may begin before the first query
        whole = torch.cat(parts, 2) if len(parts) > 1 else parts[0]  # (B, H, n, rows, Dv)
        return whole.reshape(B, H, len(choice.rows) * rows, value.shape[3])[:, :, -first : T - first]


def chosen(selection: Blocks, others: list[Mask], T: int, S: int) -> Tensor:
    """Which key blocks each block of queries reads, (B or 1, H or 1, n, key blocks), less those other masks hide."""
    lo, hi = selection.rows_of(0, T, T, S)
    table = selection.table[:, :, lo:hi]
    (rows, cols), first = selection.size, selection.first_block(S) + lo
    starts = torch.arange(table.shape[3]) * cols
    for mask in others:
        spans = []
        for block in range(first, first + table.shape[2]):
            start = max(block * rows - (S - T), 0)
            spans.append(mask.key_range(start, min((block + 1) * rows - (S - T), T), T, S))
        least, most = torch.tensor(spans).view(-1, 2, 1).unbind(1)
        table = table & (starts < most) & (starts + cols > least)
    return table


def choose_keys(selection: Blocks, others: list[Mask], T: int, S: int) -> ChosenKeys:
    """The keys of the chosen blocks, for all blocks of queries."""
    table = chosen(selection, others, T, S)
    rows, cols = selection.size
    count = max(1, int(table.sum(-1).max()))
    order = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :count]
    place = order[..., None] * cols + torch.arange(cols)  # (…, n, count, cols)
    real = table.gather(-1, order)[..., None] & (place < S)
    lo, _ = selection.rows_of(0, T, T, S)
    first = (selection.first_block(S) + lo) * rows - (S - T)
    row = first + torch.arange(table.shape[2] * rows).view(-1, rows)
    joined: Mask | None = None
    for mask in others:
        joined = mask if joined is None else joined & mask
    return ChosenKeys(row, place.clamp(max=S - 1).flatten(3), real.expand(place.shape).flatten(3), joined)


def _part(choice: ChosenKeys, blocks: slice) -> ChosenKeys:
    return ChosenKeys(choice.rows[blocks], choice.cols[:, :, blocks], choice.real[:, :, blocks], choice.mask)


def read(call: Call, choice: ChosenKeys) -> Tensor:
    """What the queries of these blocks read, (B, H, n, rows, Dv)."""
    query, key, value, scoring, _ = call
    B, H, T, D = query.shape
    n, rows = choice.rows.shape
    queries = query[:, :, choice.rows.clamp(0, T - 1)]  # (B, H, n, rows, D)
    bias = added(call, choice)
    keys, values = (gathered(x, choice.cols, H) for x in (key, value))  # (B, H or Hkv, n, K, D)
    heads = keys.shape[1]
    group = H // heads
    # A group of heads that shares its keys becomes rows of one block.
    queries = queries.view(B, heads, group, n, rows, D).transpose(2, 3).reshape(B * heads, n, group * rows, D)
    if bias is not None:
        bias = bias.expand(-1, H if bias.shape[1] > 1 else 1, -1, -1, -1)
        if bias.shape[:2] == (1, 1):
            bias = bias[0].repeat(1, 1, group, 1)  # (1, n, group · rows, K)
        else:
            bias = bias.expand(B, H, -1, -1, -1).reshape(B, heads, group, n, rows, -1).transpose(2, 3)
            bias = bias.reshape(B * heads, n, group * rows, -1)
    output = F.scaled_dot_product_attention(
        queries, keys.flatten(0, 1), values.flatten(0, 1), bias, scale=scoring.scale_for(D)
    )
    return output.view(B, heads, n, group, rows, -1).transpose(2, 3).reshape(B, H, n, rows, -1)


def gathered(x: Tensor, cols: Tensor, H: int) -> Tensor:
    """Keys or values (B, Hkv, S, D) at `cols` (B or 1, H or 1, n, K): (B, H or Hkv, n, K, D)."""
    B, Hkv, S, D = x.shape
    n, K = cols.shape[2:]
    if cols.shape[:2] == (1, 1):
        return x.index_select(2, cols.flatten()).view(B, Hkv, n, K, D)
    heads = H if cols.shape[1] > 1 else Hkv
    own = torch.arange(heads) // (heads // Hkv)  # the key head of each head
    start = (torch.arange(B)[:, None] * Hkv + own)[..., None, None] * S  # (B, heads, 1, 1)
    return x.reshape(B * Hkv * S, D).index_select(0, (start + cols).flatten()).view(B, heads, n, K, D)


def added(call: Call, choice: ChosenKeys) -> Tensor | None:
    """Mask and bias of the chosen keys, to add to their scores: (B or 1, H or 1, n, rows, K), or None."""
    query, S, scoring = call.query, call.key.shape[2], call.scoring
    B, H, T, _ = query.shape
    plain = choice.mask is None and scoring.bias is None
    if plain and bool(choice.real.all()):
        return None
    by_sample, by_head = (None, None) if choice.mask is None else choice.mask.extent[:2]
    samples = B if by_sample is not None or scoring.bias is not None or choice.cols.shape[0] > 1 else 1
    heads = H if by_head is not None or scoring.bias is not None or choice.cols.shape[1] > 1 else 1
    grid = Grid(
        torch.arange(samples)[:, None, None, None, None],
        torch.arange(heads)[:, None, None, None],
        choice.rows.clamp(0, T - 1)[:, :, None],
        choice.cols[:, :, :, None],
        T,
        S,
    )
    seen = choice.real[:, :, :, None]
    seen = seen if choice.mask is None else seen & choice.mask.visible(grid)
    found = scoring.bias_at(grid, query.dtype) if scoring.bias is not None else query.new_zeros(())
    assert found is not None  # noqa: S101 - there is a bias
    rows = choice.rows.shape[1]
    return torch.where(seen, found.to(query.dtype), -math.inf).expand(-1, -1, -1, rows, -1)
