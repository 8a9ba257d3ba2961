"""What each head does, in numbers and words.

All numbers are means over the queries that see at least two keys, in all samples. Where papers define them:

    sink          weight on the first key                                    Xiao 2023, Gu 2024
    previous      weight on the key just before the query; self: on its own  Clark 2019, Elhage 2021
    local         weight at most 8 places away                               Kovaleva 2019
    entropy       −Σ w log w, as a share of that of even attention           Clark 2019
    peak          largest weight                                             Voita 2019 ("confidence")
    positional    share of queries whose peak lies at one and the same distance  Voita 2019
    distance      mean distance to the keys attended to                      Vig & Belinkov 2019
    induction     weight on keys that follow an earlier copy of the query's token  Olsson 2022
    same_token    weight on earlier copies of the query's token              Wang 2022
    delimiter     weight on separators and punctuation                       Clark 2019, Kovaleva 2019

A head that rests on the first token drowns everything else it does, so every number is also given with that token taken
out and the rest scaled up to 1 (`apart`), and the reading in words looks at those. A weight shows where a head looks;
it is no proof of what the model uses.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.mask_algebra import Mask
from headwise.probes import induction, local, offset, previous_token, same_token, sink, token_is

if TYPE_CHECKING:
    from headwise.map import AttentionMap

NEAR = 8  # places that count as local
SINK = 0.3  # a head whose weight on the first token exceeds this is a sink: ε of Gu 2024
# What a head is called, if this number of it, apart from the sink, is at least so large. The first that fits is taken.
READINGS = (
    ("induction", "induction", 0.4),
    ("previous", "previous-token", 0.4),
    ("self", "own-token", 0.4),
    ("next", "next-token", 0.4),
    ("same_token", "same-token", 0.4),
    ("delimiter", "delimiter", 0.5),
    ("positional", "fixed-offset", 0.9),
    ("local", "local", 0.7),
    ("entropy", "broad", 0.8),
)


class Rows(NamedTuple):
    """What is measured of every query, before any mean is taken.

    numbers: by name, (B, H, T) each.
    seen: how many keys each query may see, (B, H, T).
    offset: how far behind the query its largest weight lies, (B, H, T).
    histogram: the share of attention in every octave of distance, (B, H, octaves), if it was asked for.
    """

    numbers: dict[str, Tensor]
    seen: Tensor
    offset: Tensor
    histogram: Tensor | None

    @property
    def counted(self) -> Tensor:
        """Which queries means are taken over: one that sees a single key has no choice."""
        return self.seen >= 2


@dataclasses.dataclass(frozen=True)
class HeadSummary:
    """One head: its number, a reading in words, the numbers, and the numbers apart from the first token."""

    head: int
    reading: str
    numbers: dict[str, float]
    apart: dict[str, float]

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]


@dataclasses.dataclass(frozen=True)
class Summary:
    """The heads of a map, in order. Printing it gives a table."""

    heads: tuple[HeadSummary, ...]

    def __iter__(self) -> Iterator[HeadSummary]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, head: int) -> HeadSummary:
        return self.heads[head]

    def __str__(self) -> str:
        if not self.heads:
            return "no heads"
        names = list(self.heads[0].numbers)
        wide = max(len(head.reading) for head in self.heads)
        lines = [f"head  {'reading'.ljust(wide)}  " + "  ".join(name.rjust(7) for name in names)]
        for head in self.heads:
            cells = (f"{head.numbers[name]:.2f}".rjust(max(7, len(name))) for name in names)
            lines.append(f"{head.head:>4}  {head.reading.ljust(wide)}  " + "  ".join(cells))
        return "\n".join(lines)


def summarise(
    weights: "AttentionMap",
    ids: Tensor | Sequence[int] | None = None,
    *,
    delimiters: int | Sequence[int] | Tensor | None = None,
) -> Summary:
    """The summary of a map; see `AttentionMap.summary`."""
    numbers, apart = (_means(rows) for rows in rows_of(weights, ids, delimiters))
    source = weights._source()
    names = source.axis("head").tolist()
    heads = []
    for place, name in enumerate(names):
        own = {key: float(value[place]) for key, value in numbers.items()}
        rest = {key: float(value[place]) for key, value in apart.items()}
        heads.append(HeadSummary(name, reading(own["sink"], rest), own, rest))
    return Summary(tuple(heads))


def rows_of(
    weights: "AttentionMap",
    ids: Tensor | Sequence[int] | None = None,
    delimiters: int | Sequence[int] | Tensor | None = None,
    *,
    histogram: bool = False,
) -> tuple[Rows, Rows]:
    """What a summary is made of: the rows of a map, and those apart from the first token."""
    probes = probes_for(weights, ids, delimiters)
    with torch.no_grad():
        weights = weights.detach()
        plain = _rows(weights, {"sink": sink(1), **probes}, histogram)
        return plain, _rows(weights.without(sink(1)), probes, histogram)


def probes_for(
    weights: "AttentionMap",
    ids: Tensor | Sequence[int] | None,
    delimiters: int | Sequence[int] | Tensor | None,
) -> dict[str, Mask]:
    """The masses a summary asks for; those about tokens only if tokens are given."""
    found = {"previous": previous_token(), "self": offset(0), "next": offset(-1), "local": local(NEAR)}
    if ids is None:
        return found
    ids = torch.as_tensor(ids, device=weights.device)
    found |= {"induction": induction(ids), "same_token": same_token(ids)}
    return found if delimiters is None else found | {"delimiter": token_is(ids, delimiters)}


def reading(resting: float, apart: dict[str, float]) -> str:
    """In a few words what a head does."""
    found = next((f"{name} {apart[key]:.2f}" for key, name, least in READINGS if apart.get(key, 0.0) >= least), None)
    if resting < SINK:
        return found or "mixed"
    return f"first-token sink {resting:.2f}" + (f", else {found}" if found else "")


def _rows(weights: "AttentionMap", probes: dict[str, Mask], histogram: bool) -> Rows:
    panel = weights.panel(entropy=True, peak=True, distance=True, histogram=histogram, masses=probes)
    assert panel.entropy is not None and panel.peak is not None and panel.distance is not None  # noqa: S101, PT018
    source = weights._source()
    seen = source.keys_seen()
    even = seen.clamp(min=2).log()  # the entropy of even attention
    numbers = {"entropy": panel.entropy / even, "peak": panel.peak.weight, "distance": panel.distance}
    return Rows(panel.masses | numbers, seen, source.positions() - panel.peak.key, panel.histogram)


def _means(rows: Rows) -> dict[str, Tensor]:
    """Means per head, (H,) each."""
    precise = next(iter(rows.numbers.values())).dtype
    counted = rows.counted.to(precise)
    many = counted.sum((0, 2)).clamp(min=1)
    found = {name: (number * counted).sum((0, 2)) / many for name, number in rows.numbers.items()}
    distance = found.pop("distance")
    return found | {"positional": _positional(rows), "distance": distance}


def _positional(rows: Rows) -> Tensor:
    """The share of counted queries whose peak lies at the commonest distance, (H,)."""
    shares = []
    for head in range(rows.offset.shape[1]):
        found = rows.offset[:, head][rows.counted[:, head]]
        commonest = found.unique(return_counts=True)[1].max() if found.numel() else found.new_zeros(())
        shares.append(commonest / max(found.numel(), 1))
    return torch.stack(shares) if shares else rows.offset.new_zeros(0)
