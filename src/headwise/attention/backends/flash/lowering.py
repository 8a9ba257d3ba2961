"""What a call means to FlashAttention-4: a band of keys around every query, documents, lengths, soft-cap and sinks."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends.base import Call
from headwise.masks import Causal, Mask, Window
from headwise.masks.kinds import Documents, Lengths, Packed, conjuncts
from headwise.masks.lowering import simplify
from headwise.weights.memory import BoundedMemory

LAYOUTS = BoundedMemory()


class Band(NamedTuple):
    """Which keys a query sees by its position: `back` before it and `ahead` after it; None is all of them."""

    back: int | None = None
    ahead: int | None = None

    def __and__(self, other: "Band") -> "Band":
        return Band(_least(self.back, other.back), _least(self.ahead, other.ahead))


class FlashArguments(NamedTuple):
    """The arguments of the library apart from query, key, value and sinks.

    `starts` (documents + 1,) is where every document starts among the tokens of all samples, and `longest` an upper
    bound on their lengths. `lengths` (B,) is how many keys a sample has.
    """

    scale: float
    softcap: float
    band: Band
    starts: Tensor | None = None
    longest: int = 0
    lengths: Tensor | None = None


def lower(call: Call) -> FlashArguments | str:
    """The call in the library's terms, or why there are none for it."""
    query, key, _, scoring, _ = call
    T, S = query.shape[2], key.shape[2]
    if scoring.bias is not None or scoring.relative is not None or scoring.score is not None:
        return "it supports no bias, relative positions or score function"
    plain = FlashArguments(scoring.scale_for(query.shape[3]), scoring.softcap or 0.0, Band())
    for part in conjuncts(simplify(scoring.mask, T, S)):
        found = with_part(plain, part, call)
        if isinstance(found, str):
            return found
        plain = found
    if plain.lengths is not None and (plain.starts is not None or plain.band != Band()):
        return "with padding, it would count positions from the last real key"
    if plain.band.ahead is not None and T > S:
        return "some queries see no key"
    return plain


def with_part(plain: FlashArguments, part: Mask, call: Call) -> FlashArguments | str:
    """The same with one more mask, or why the library does not know it."""
    B, _, T, _ = call.query.shape
    S = call.key.shape[2]
    if type(part) is Causal:
        return plain._replace(band=plain.band & Band(ahead=0))
    if type(part) is Window:
        return plain._replace(band=plain.band & Band(part.back, part.ahead))
    if type(part) is Lengths and part.side == "right":
        lengths = part.lengths.clamp(max=S).to(torch.int32)
        return plain._replace(lengths=lengths.expand(B).contiguous())
    if isinstance(part, Documents | Packed):
        if T != S or plain.starts is not None:
            return "it supports one set of documents, with as many keys as queries"
        layout = kept_layout(part, B, S)
        return layout if isinstance(layout, str) else plain._replace(starts=layout[0], longest=layout[1])
    return f"it has no form of {part!r}"


def kept_layout(mask: Documents | Packed, B: int, S: int) -> tuple[Tensor, int] | str:
    """The layout of documents. It is remembered, since finding one makes the host wait for the GPU."""
    if isinstance(mask, Packed):
        return repeated(F.pad(mask.ends, (1, 0)), B, S), S
    if torch.compiler.is_compiling():
        return "where documents start is known only outside a compiled graph; documents(lengths=...) can be compiled"
    return LAYOUTS.get([mask.ids], B, lambda: layout(mask.ids, B))


def layout(ids: Tensor, B: int) -> tuple[Tensor, int] | str:
    """Where documents with these ids (B or 1, S) start, and the length of the longest."""
    rows, S = ids.shape
    first = torch.ones_like(ids, dtype=torch.bool)
    first[:, 1:] = ids[:, 1:] != ids[:, :-1]
    names = torch.unique(ids, return_inverse=True)[1] + torch.arange(rows, device=ids.device)[:, None] * ids.numel()
    starts = first.flatten().nonzero().flatten()
    if starts.numel() != torch.unique(names).numel():
        return "the tokens of some document are not in one piece"
    starts = F.pad(starts, (0, 1), value=rows * S)
    longest = int(starts.diff().max())
    return (repeated(starts, B, S) if rows < B else starts.to(torch.int32)), longest


def repeated(starts: Tensor, B: int, S: int) -> Tensor:
    """The starts of the same documents in B samples of S tokens, one after the other."""
    shift = torch.arange(B, device=starts.device)[:, None] * S
    return F.pad((starts[:-1] + shift).flatten(), (0, 1), value=B * S).to(torch.int32)


def visible_keys(call: Call, lowered: FlashArguments) -> float:
    """About how many keys a query sees, for judging how much work a call is."""
    S = call.key.shape[2]
    back, ahead = lowered.band
    seen = S / 2 if ahead == 0 and back is None else S if back is None else min(S, back + 1 + (ahead or 0))
    return min(seen, lowered.longest) if lowered.starts is not None else seen


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
