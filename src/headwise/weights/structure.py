"""The masks that fast paths know: a band, sets of keys, documents, matching tokens. Tiles handle all others."""

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.masks import Both, Causal, Documents, Either, Grid, Mask, Prefix, Window
from headwise.masks.mask import Not
from headwise.masks.probes import Match, Offset

if TYPE_CHECKING:
    from headwise.weights.source import Source

FAR = 2**30  # longer than any sequence, and their sum fits into 32 bits


@dataclasses.dataclass(frozen=True)
class Structure:
    """(within the band, or an open key) and within a range of keys, an allowed key, the same document and a match.

    A query at position p sees key j of the band if p − left <= j <= p + right, and of the range if first <= j < stop.
    Tables are (B or 1, S).
    """

    left: int = FAR
    right: int = FAR
    first: int = 0
    stop: int = FAR
    keys: Tensor | None = None
    open_keys: Tensor | None = None
    documents: Tensor | None = None
    match: tuple[Tensor, Tensor] | None = None

    @property
    def plain(self) -> bool:
        """Whether there is nothing but the band and the range."""
        return self.keys is None and self.open_keys is None and self.documents is None and self.match is None


def structure_of(mask: Mask | None, source: "Source") -> Structure | None:
    """The structure equivalent to `mask`, or None if there is none."""
    if mask is None:
        return Structure()
    if type(mask) is Prefix:
        return Structure(stop=mask.n)
    if isinstance(mask, Not) and type(mask).visible is Not.visible and type(mask.a) is Prefix:
        return Structure(first=mask.a.n)
    if mask.by_key:
        return Structure(keys=_table(mask, source))
    if type(mask) is Causal:
        return Structure(right=0)
    if type(mask) is Window:
        return Structure(min(mask.back, FAR), min(mask.ahead, FAR))
    if type(mask) is Offset and abs(mask.n) < FAR:
        return Structure(mask.n, -mask.n)
    if type(mask) is Documents:
        return Structure(documents=_samples(mask.ids, source))
    if type(mask) is Match:
        return Structure(right=-mask.gap, match=(_samples(mask.asked, source), _samples(mask.offered, source)))
    if type(mask) is Both:
        a, b = structure_of(mask.a, source), structure_of(mask.b, source)
        return None if a is None or b is None else _both(a, b)
    if type(mask) is Either:
        return _either(mask, source)
    return None


def _both(a: Structure, b: Structure) -> Structure | None:
    if a.open_keys is not None or b.open_keys is not None:
        # Open keys only escape the band they came with: the other side may have anything but a band.
        if a.open_keys is not None and b.open_keys is not None:
            return None
        free, other = (a, b) if a.open_keys is not None else (b, a)
        if other.left < FAR or other.right < FAR:
            return None
        a, b = free, other
    if (a.documents is not None and b.documents is not None) or (a.match is not None and b.match is not None):
        return None
    keys = a.keys if b.keys is None else b.keys if a.keys is None else a.keys * b.keys
    return Structure(
        min(a.left, b.left),
        min(a.right, b.right),
        max(a.first, b.first),
        min(a.stop, b.stop),
        keys,
        a.open_keys,
        b.documents if a.documents is None else a.documents,
        b.match if a.match is None else a.match,
    )


def _either(mask: Either, source: "Source") -> Structure | None:
    """A band with some keys open to all, such as `causal() | prefix(n)`."""
    band, opened = (mask.a, mask.b) if mask.b.by_key else (mask.b, mask.a)
    structure = structure_of(band, source)
    if not opened.by_key or structure is None or not structure.plain or (structure.first, structure.stop) != (0, FAR):
        return None
    return dataclasses.replace(structure, open_keys=_table(opened, source))


def _table(mask: Mask, source: "Source") -> Tensor:
    """A mask that depends only on sample and key, as 0 and 1 of shape (B or 1, S)."""
    device, frame = source.query.device, source.frame
    batch = source.axis("batch") if mask.extent.batch is not None else torch.zeros(1, dtype=torch.int64, device=device)
    none = torch.zeros(1, 1, dtype=torch.int64, device=device)
    seen = mask.visible(
        Grid(batch[:, None, None, None], none[..., None], none, torch.arange(frame.S, device=device), frame.T, frame.S)
    )
    return seen.reshape(-1, seen.shape[-1]).expand(-1, frame.S).to(torch.int8).contiguous()


def _samples(table: Tensor, source: "Source") -> Tensor:
    """The rows of a (B or 1, S) table that belong to the source's samples."""
    return table.contiguous() if table.shape[0] == 1 else table[source.axis("batch")].contiguous()
