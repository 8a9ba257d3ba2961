"""How many keys a query sees and how many queries see a key, in closed form for every mask that is a `Structure`.

Other masks are counted as they are, eight entries at a time.

Keys are sorted by document and token, then by position. Those that a query at position p sees are then neighbors: they
have its document and token and lie from p − left to p + right. Two binary searches count them.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.weights.structure import Structure


class Codes(NamedTuple):
    """What must agree for a query to see a key, as one whole number each, (B or 1, S) by position; -1 agrees with none.

    size: the number of codes.
    """

    query: Tensor
    key: Tensor
    size: int


def codes_of(structure: Structure, S: int, device: torch.device) -> Codes:
    """The documents and tokens of a structure as codes."""
    query = key = torch.zeros(1, S, dtype=torch.int64, device=device)
    size = 1
    for asked, offered in ((structure.documents, structure.documents), structure.match or (None, None)):
        if asked is not None and offered is not None:
            both = torch.cat([asked.flatten(), offered.flatten()])
            values, names = torch.unique(both, return_inverse=True)
            a, b = names.split([asked.numel(), offered.numel()])
            query, key = query * len(values) + a.view(asked.shape), key * len(values) + b.view(offered.shape)
            size *= max(1, len(values))
    return Codes(query, key, size)


def keys_seen(structure: Structure, positions: Tensor, S: int, most: int) -> Tensor:
    """How many of the first `most` keys a query at each of `positions` (T,) sees, (B or 1, T)."""
    device = positions.device
    most = min(most, structure.stop)
    least = min(structure.first, most)
    if structure.plain:
        first, end = (positions - structure.left).clamp(least, most), (positions + structure.right + 1).clamp(0, most)
        return (end - first).clamp(min=0)[None]
    codes = codes_of(structure, S, device)
    key = torch.arange(S, device=device)
    allowed = ((key >= least) & (key < most))[None]
    allowed = allowed if structure.keys is None else allowed & (structure.keys != 0)
    own = _own(codes.query, structure, positions)  # (B or 1, T)
    low, high = positions - structure.left, positions + structure.right + 1
    found = _count(codes.key, key, allowed, own, low, high, S)
    if structure.open_keys is not None:  # those outside the band
        opened = allowed & (structure.open_keys != 0)
        everywhere = _count(codes.key, key, opened, own, torch.zeros_like(low), torch.full_like(high, S), S)
        found = found + everywhere - _count(codes.key, key, opened, own, low, high, S)
    return found


def queries_seeing(structure: Structure, positions: Tensor, S: int) -> Tensor:
    """How many of the queries at `positions` (T,) see each key, (B or 1, S)."""
    device = positions.device
    codes = codes_of(structure, S, device)
    first = int(positions.min()) if len(positions) else 0
    place, width = positions - first, int(positions.max()) - first + 1 if len(positions) else 1
    own = _own(codes.query, structure, positions)
    key = torch.arange(S, device=device) - first
    low, high = key - structure.right, key + structure.left + 1
    found = _count(own, place, own >= 0, codes.key, low, high, width)
    if structure.open_keys is not None:
        everyone = _count(own, place, own >= 0, codes.key, torch.zeros_like(low), torch.full_like(high, width), width)
        found = torch.where(structure.open_keys != 0, everyone, found)
    found = found * ((key + first >= structure.first) & (key + first < structure.stop))
    return found if structure.keys is None else found * (structure.keys != 0)


def equal_codes(structure: Structure, positions: Tensor, S: int) -> tuple[Tensor, Tensor] | None:
    """Codes of the queries at `positions` (B or 1, T) and of the keys (B or 1, S), int32.

    A query may see a key, as far as tables are concerned, if their codes are equal. None if there are no such tables.
    """
    if structure.keys is None and structure.documents is None and structure.match is None:
        return None
    codes = codes_of(structure, S, positions.device)
    offered = codes.key if structure.keys is None else torch.where(structure.keys != 0, codes.key, -2)
    return _own(codes.query, structure, positions).int().contiguous(), offered.int().contiguous()


def code_reach(own: Tensor, others: Tensor) -> Tensor:
    """Where others with the same code lie, for codes (B or 1, n) and (B or 1, m): (B or 1, 4, n), int32.

    The first of them and the last + 1; and the same two if they are neighbors, else m and 0, as for a code below 0.
    """
    B, m = max(len(own), len(others)), others.shape[1]
    every = (others.long() * m + torch.arange(m, device=others.device)).expand(B, -1).sort(-1).values
    begin = (own.long() * m).expand(B, -1).contiguous()
    low, high = torch.searchsorted(every, begin), torch.searchsorted(every, begin + m)
    some = (high > low) & (own >= 0)
    first, last = (every.gather(1, at.clamp(0, m - 1)) - begin for at in (low, high - 1))
    near = some & (last - first == high - 1 - low)
    found = [torch.where(where, *pair) for where in (some, near) for pair in ((first, m), (last + 1, 0))]
    return torch.stack(found, 1).int().contiguous()


def _own(codes: Tensor, structure: Structure, positions: Tensor) -> Tensor:
    """The code of the query at each position, (B or 1, T); -1 before the first key, where there is no document."""
    if not codes.shape[1]:
        return codes.new_full((len(codes), len(positions)), -1)
    found = codes[:, positions.clamp(0, codes.shape[1] - 1)]
    return found.masked_fill(positions < 0, -1) if structure.documents is not None else found


def _count(
    codes: Tensor, place: Tensor, counted: Tensor, asked: Tensor, low: Tensor, high: Tensor, width: int
) -> Tensor:
    """How many things of the code `asked` (B or 1, n) are at places from `low` to `high` − 1, each (n,).

    The things have `codes` (B or 1, m) and `place` (m,), from 0 to `width` − 1, and count if `counted` (B or 1, m).
    """
    B = max(len(codes), len(counted), len(asked))
    sample = torch.arange(B, device=codes.device)[:, None]
    every = (codes * B + sample) * width + place  # (B, m): sorted by code, sample and place
    every = every.expand(B, -1)[counted.expand(B, -1)].sort().values
    group = (asked * B + sample) * width
    low = low.clamp(0, width)
    span = torch.stack([group + low, group + torch.maximum(high.clamp(0, width), low)])
    found = torch.searchsorted(every, span)
    return (found[1] - found[0]).masked_fill(asked < 0, 0)


WORD = 8  # entries of a mask, one byte each, that are added up as one whole number
ADDED = 128  # such numbers at a time: no byte overflows


def true_in_rows(seen: Tensor) -> Tensor:
    """How many entries of each row of (..., t, s) are True, (..., t). `seen.sum(-1)` takes far longer on a CPU."""
    if not seen.is_cpu or not seen.numel():
        return seen.sum(-1)
    width = seen.shape[-1]
    seen = F.pad(seen.contiguous(), (0, -width % (WORD * ADDED)))
    words = seen.view(torch.int64).unflatten(-1, (-1, ADDED)).sum(-1)
    found: Tensor = words.view(torch.uint8).sum(-1)
    return found


def true_in_columns(seen: Tensor) -> Tensor:
    """How many entries of each column of (..., t, s) are True, (..., s)."""
    if not seen.is_cpu or not seen.numel():
        return seen.sum(-2)
    tall, width = seen.shape[-2:]
    seen = F.pad(seen.contiguous(), (0, -width % WORD, 0, -tall % ADDED))
    words = seen.view(torch.int64).unflatten(-2, (-1, ADDED)).sum(-2)
    found: Tensor = words.view(torch.uint8).sum(-2)[..., :width]
    return found
