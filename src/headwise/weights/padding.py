"""Which tokens of a map are padding.

A key that no query may see is padding: `padding(lengths)`, a dense mask, an additive mask and the `attention_mask` of
transformers all say it this way (`Mask.pads`; what a window or a selection of blocks hides is not padding). In
self-attention, the query at the position of such a key is padding too; in cross-attention, a query that may see no key
is, such as with `dense(real[:, None, :, None])`. If there are more keys than queries, as with a
cache, that needs a mask of positions, such as `causal()`; otherwise the keys may be of another text. For statistics, a
padded query counts as one that sees no key, and the first token is the first that is not padding. Where `documents`
packs several texts into one row, each has a first token of its own. The weights themselves stay as they are.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.masks import Documents, Extent, Grid, Mask
from headwise.masks.kinds import Packed, conjuncts
from headwise.masks.mask import Not, Placed, placed
from headwise.weights.scoring import LEAST
from headwise.weights.source import Source, row_blocks

BLOCK = 2**24  # entries of a mask that are looked at together


class RealTokens(NamedTuple):
    """True for tokens of the text, False for padding: queries (B, T) and keys (B, S)."""

    queries: Tensor
    keys: Tensor


class Excluded(Not):
    """Keys that a statistic leaves out. They are hidden, but they are not padding."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FromFirst(Mask):
    """A probe that counts positions from the first real token of each text instead of from key 0."""

    inner: Mask
    first: Tensor  # (B or 1, S), for every key the first of its text

    @property
    def extent(self) -> Extent:
        B, S = self.first.shape
        return self.inner.extent._replace(batch=B if B > 1 else self.inner.extent.batch, keys=S)

    @property
    def by_key(self) -> bool:
        return self.inner.by_key

    def visible(self, grid: Grid) -> Tensor:
        batch = grid.batch if len(self.first) > 1 else grid.batch * 0
        first, own = self.first[batch, grid.col], self.first[batch, grid.position.clamp(0, grid.S - 1)]
        return self.inner.visible(grid._replace(row=grid.row - own, col=grid.col - first)) & (grid.col >= first)

    def __repr__(self) -> str:
        return f"{self.inner!r} from the first real token"


def real_keys(source: Source) -> Tensor | None:
    """Which keys of all samples of the whole map are not padding, (B or 1, S); None if all are certain to be real."""
    found = [_seen(part, source) for part in _parts(source.mask) if part.pads]
    bias = source.scoring.bias
    if bias is not None and bias.shape[-1] > 1:
        bias = bias if bias.dim() == 4 else bias[None, None]
        found.append((bias.detach() > LEAST).any(2).any(1))  # what is this low hides a key as well as minus infinity
    if not found or source.frame.S == 0:
        return None
    real = found[0]
    for other in found[1:]:
        real = real & other
    return real if torch.compiler.is_compiling() or not bool(real.all()) else None


def _parts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` joins, also inside one for other positions, without keys that a statistic leaves out."""
    parts: list[Mask] = []
    for part in conjuncts(mask):
        if type(part) is Placed:
            parts += _parts(part.inner)  # masks that list their queries cannot be placed, so all queries are there
        elif not isinstance(part, Excluded):
            parts.append(part)
    return parts


def _seen(mask: Mask, source: Source, axis: int = 2) -> Tensor:
    """The keys that some query of the whole map sees, (B or 1, S); with axis 3, queries that see a key, (B or 1, T)."""
    _, _, _, B, H, T, S = source.frame
    device = source.query.device
    samples = torch.arange(B if mask.extent.batch is not None else 1, device=device)
    heads = torch.arange(H if mask.extent.heads is not None else 1, device=device)
    keys = torch.arange(S, device=device)
    T = min(T, 1) if mask.by_key else T  # all queries see the same keys
    found = []
    for rows in row_blocks(T, len(samples) * len(heads) * S, BLOCK):
        row = torch.arange(rows.start, rows.stop, device=device)
        grid = Grid(samples[:, None, None, None], heads[:, None, None], row[:, None], keys, source.frame.T, S)
        part = mask.visible(grid)
        part = part[(None,) * (4 - part.dim())].expand(-1, -1, len(row), S)
        found.append(part.any(axis).any(1))
    if axis == 3:
        return torch.cat(found, -1)
    return torch.stack(found).any(0) if found else torch.zeros(len(samples), S, dtype=torch.bool, device=device)


def _among_keys(source: Source) -> bool:
    """Whether the queries are some of the keys, as far as can be determined."""
    frame, scoring = source.frame, source.scoring
    placed = scoring.positions is not None or any(part.sees_self for part in _parts(source.mask))
    return not scoring.cross and (frame.T == frame.S or placed)


def real_queries(source: Source, keys: Tensor | None) -> Tensor:
    """Which queries of the source are not padding, (B or 1, T), given which keys of the whole map are not."""
    T = source.shape[2]
    found = torch.ones(1, T, dtype=torch.bool, device=source.query.device)
    if not _among_keys(source):
        for part in _parts(source.mask):
            if part.pads and part.extent.queries is not None and source.frame.S:
                seeing = _seen(part, source, 3)[:, source.axis("row")]
                found = found & (seeing[source.axis("batch")] if len(seeing) > 1 else seeing)
        return found
    if keys is None:
        return found
    keys = keys[source.axis("batch")] if len(keys) > 1 else keys
    position = source.positions()
    position = position[:, 0] if position.dim() == 3 else position[None]
    position = position.expand(max(len(keys), len(position)), T)
    inside = (position >= 0) & (position < keys.shape[1])
    found = keys.expand(len(position), -1).gather(1, position.clamp(0, keys.shape[1] - 1))
    return found | ~inside  # a query before the first key has no key of its own to tell


def share_of_queries(source: Source, keys: Tensor) -> Tensor:
    """Which share of the queries is not padding, (B or 1,), of all ranks where results are merged over ranks."""
    if source.keys_apart and _among_keys(source):
        source = dataclasses.replace(source, frame=source.frame._replace(row=range(source.frame.T)))
        position = source.positions()
        assert position.dim() == 1  # noqa: S101 - ranks that share a sequence have no positions of their own
        real = (keys[source.axis("batch")] if len(keys) > 1 else keys)[:, position]
    else:
        real = real_queries(source, keys)
    return real.double().mean(-1).clamp(min=1 / max(real.shape[-1], 1))


def without_padding(source: Source, keys: Tensor | None) -> Source:
    """The source in which padded queries see no key; `keys` is what `real_keys` found."""
    if keys is None or not _among_keys(source):
        return source
    # Padding is a document of its own: its queries see its keys alone, which are hidden from everyone.
    apart: Mask = Documents(keys.long())
    if source.scoring.positions is not None:
        apart = placed(apart, source.scoring.positions)
    mask = apart if source.mask is None else source.mask & apart
    return dataclasses.replace(source, scoring=dataclasses.replace(source.scoring, mask=mask))


def first_keys(source: Source, keys: Tensor | None) -> Tensor | None:
    """For every key of the whole map the first real key of its text, (B or 1, S); None if that is key 0 everywhere.

    `keys` is what `real_keys` found.
    """
    S, device = source.frame.S, source.query.device
    found = [_documents(part, S, device) for part in _parts(source.mask)]
    tables = [ids for ids in found if ids is not None]
    if not S or (keys is None and not tables):
        return None
    names = torch.zeros(1, S, dtype=torch.int64, device=device)
    for ids in tables:
        names = names * S + _ranks(ids)
    padded = torch.zeros_like(names[:1]) if keys is None else (~keys).long()
    first = _first_of_each(names, padded)
    return first if torch.compiler.is_compiling() or bool(first.any()) else None


def _documents(mask: Mask, S: int, device: torch.device) -> Tensor | None:
    """The document of every key, (B or 1, S), if the mask separates documents."""
    if type(mask) is Packed:
        return torch.bucketize(torch.arange(S, device=device), mask.ends, right=True)[None]
    return mask.ids if type(mask) is Documents else None


def _ranks(ids: Tensor) -> Tensor:
    """Numbers from 0 to S − 1 that are equal where the ids of a row are. Not by `unique`, which cannot be compiled."""
    found, order = ids.sort(-1)
    new = found.diff(dim=-1, prepend=found[:, :1]) != 0
    return torch.empty_like(order).scatter(-1, order, new.cumsum(-1))


def _first_of_each(names: Tensor, padded: Tensor) -> Tensor:
    """For every key the first of the same name that is not padded, (B or 1, S); S if there is none."""
    B, S = max(len(names), len(padded)), names.shape[1]
    names, padded = names.expand(B, S), padded.expand(B, S)
    order = (names * 2 + padded).sort(dim=-1, stable=True).indices  # by name, then what is not padded, then by place
    name = names.gather(-1, order)
    begins = torch.where(name.diff(dim=-1, prepend=name[:, :1] - 1) != 0, torch.arange(S, device=names.device), 0)
    leader = order.gather(-1, begins.cummax(-1).values)
    leader = torch.where(padded.gather(-1, leader) != 0, S, leader)
    return torch.empty_like(order).scatter(-1, order, leader)


def from_first(probe: Mask, first: Tensor | None) -> Mask:
    """`probe`, counting positions from the first token of each text, unless it lists its keys or depends on distances.

    `first` is what `first_keys` found.
    """
    if first is None or probe.banded or probe.extent.keys is not None or probe.extent.queries is not None:
        return probe
    return FromFirst(probe, first)
