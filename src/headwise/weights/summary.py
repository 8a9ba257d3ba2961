"""What each head does, in numbers and words.

Attention to the first token can hide everything else a head does. So every number is also given with that token
excluded and the other weights scaled up to 1 (`apart`), and the description in words is based on those. Definitions:

    sink          weight on the first key                                    Xiao 2023, Gu 2024
    previous      weight on the key just before the query; self: on its own  Clark 2019, Elhage 2021
    local         weight at most 8 positions away                            Kovaleva 2019
    entropy       −Σ w log w, as a share of that of uniform attention        Clark 2019
    peak          largest weight                                             Voita 2019 ("confidence")
    positional    share of queries whose peak is at the most common distance Voita 2019
    distance      mean distance to the keys attended to                      Vig & Belinkov 2019
    induction     weight on keys that follow an earlier copy of the query's token  Olsson 2022
    same_token    weight on earlier copies of the query's token              Wang 2022
    delimiter     weight on separators and punctuation                       Clark 2019, Kovaleva 2019

Each is a mean over the queries, in all samples, that have a choice: they see at least two keys, and for local,
induction, same_token and delimiter both keys of that kind and others. A query whose token is new says nothing about
induction, and a query whose keys are all near says nothing about looking nearby. Without such queries the number is 0.

A head is named only for what uniform attention would not do: if n is its number and e that of uniform attention,
(n − e) / (1 − e) must reach a threshold. In a long text e is close to 0; among five words, attending to the previous
one is not a trait. A weight shows where a head attends. It does not prove that the model uses it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.masks.probes import induction, local, offset, previous_token, same_token, sink, token_ids, token_is
from headwise.weights import display
from headwise.weights.panel import checked_probe
from headwise.weights.source import Source

if TYPE_CHECKING:
    from headwise.weights.map import AttentionMap

NEAR = 8  # positions that count as local
SINK = 0.3  # a head whose weight on the first token exceeds this is a sink: ε of Gu 2024
LEAST = 4  # queries; with fewer, a head is not named
# What a head is called if this number of it, with the sink excluded, reaches the threshold. The first match is used.
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
RESTING = "first-token sink"
KINDS = (RESTING, *(name for _, name, _ in READINGS))
WEIGHTS = {RESTING: 0.7, "fixed-offset": 0.7, "local": 0.6, "broad": 0.5}  # how much a kind says about a head, else 1
ONE_KEY = ("sink", "previous", "self", "next")  # kinds of which each query has at most one key


class Trait(NamedTuple):
    """What a head does: a name, the number behind it, and how far that exceeds uniform attention."""

    name: str
    share: float
    beyond: float

    @property
    def telling(self) -> float:
        """How much it says about the head; being local or broad says less than the others."""
        return WEIGHTS.get(self.name, 1.0) * self.beyond


@dataclasses.dataclass(frozen=True)
class HeadSummary:
    """One head: its index, its traits, its numbers, and its numbers with the first token excluded."""

    head: int
    traits: tuple[Trait, ...]
    numbers: dict[str, float]
    apart: dict[str, float]

    @property
    def reading(self) -> str:
        """What it does in a few words, such as "first-token sink 0.71, else previous-token 0.62"."""
        return ", else ".join(f"{trait.name} {trait.share:.2f}" for trait in self.traits) or "mixed"

    @property
    def kind(self) -> str:
        """What it is called, such as "previous-token"; for a first-token sink, what else it does."""
        return self.traits[-1].name if self.traits else "mixed"

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]


@dataclasses.dataclass(frozen=True, repr=False)
class Summary:
    """The heads of a map, in order. Printing it gives a table."""

    heads: tuple[HeadSummary, ...]

    @classmethod
    def of(
        cls,
        weights: "AttentionMap",
        ids: Tensor | Sequence[int] | None = None,
        delimiters: int | Sequence[int] | Tensor | None = None,
    ) -> "Summary":
        """The summary of the map `weights`; `ids` and `delimiters` are those of `AttentionMap.summary`."""
        plain, without = rows_of(weights, ids, delimiters)
        (numbers, chance), (apart, chance_apart) = _means(plain), _means(without)
        chance_apart["sink"] = chance["sink"]
        heads = []
        for place, name in enumerate(weights._source().axis("head").tolist()):
            own, rest, even = (
                {key: float(value[place]) for key, value in x.items()} for x in (numbers, apart, chance_apart)
            )
            heads.append(HeadSummary(name, traits(own["sink"], rest, even), own, rest))
        return cls(tuple(heads))

    def __iter__(self) -> Iterator[HeadSummary]:
        return iter(self.heads)

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, head: int) -> HeadSummary:
        return self.heads[head]

    def _repr_html_(self) -> str:
        return display.html(self)

    def __repr__(self) -> str:
        if not self.heads:
            return "no heads"
        names = list(self.heads[0].numbers)
        wide = max(len(head.reading) for head in self.heads)
        lines = [f"head  {'reading'.ljust(wide)}  " + "  ".join(name.rjust(7) for name in names)]
        for head in self.heads:
            cells = (f"{head.numbers[name]:.2f}".rjust(max(7, len(name))) for name in names)
            lines.append(f"{head.head:>4}  {head.reading.ljust(wide)}  " + "  ".join(cells))
        return "\n".join(lines)


def rows_of(
    weights: "AttentionMap",
    ids: Tensor | Sequence[int] | None = None,
    delimiters: int | Sequence[int] | Tensor | None = None,
    *,
    histogram: bool = False,
) -> tuple["RowStatistics", "RowStatistics"]:
    """The row statistics a summary is computed from: of the map, and with the first token excluded."""
    probes = {"previous": previous_token(), "self": offset(0), "next": offset(-1), "local": local(NEAR)}
    if ids is not None:
        ids = token_ids("summary", ids).to(weights.device)
        probes |= {"induction": induction(ids), "same_token": same_token(ids)}
        if delimiters is not None:
            probes["delimiter"] = token_is(ids, delimiters)
    with torch.no_grad():
        weights = weights.detach()
        whole = Choice.of(weights._source(), probes)
        plain = _rows(weights, {"sink": sink(1), **probes}, whole, histogram)
        return plain, _rows(weights.without(sink(1)), probes, whole.without_first(), histogram)


def traits(resting: float, apart: Mapping[str, float], chance: Mapping[str, float]) -> tuple[Trait, ...]:
    """What a head does: whether it attends to the first token, and the first trait that fits with that token excluded.

    Args:
        resting: weight on the first token.
        apart: the numbers with that token excluded.
        chance: the same numbers of uniform attention; 1 if there are too few queries.
    """

    def trait(name: str, share: float, even: float, least: float) -> list[Trait]:
        beyond = (share - even) / (1 - even) if even < 1 else 0.0
        return [Trait(name, share, beyond)] if beyond >= least else []

    fitting = (trait(name, apart[key], chance.get(key, 0.0), least) for key, name, least in READINGS if key in apart)
    return (*trait(RESTING, resting, chance.get("sink", 0.0), SINK), *next(filter(None, fitting), []))


@dataclasses.dataclass(frozen=True)
class Choice:
    """How many keys each query sees (B, H, T), how many of each kind, and the same for the first key alone."""

    seen: Tensor
    kinds: dict[str, Tensor]
    seen_first: Tensor
    kinds_first: dict[str, Tensor]

    @classmethod
    def of(cls, source: Source, probes: Mapping[str, Mask]) -> "Choice":
        """What the mask allows, for the probes that can match several keys."""
        several = {name: checked_probe(probe, source) for name, probe in probes.items() if name not in ONE_KEY}
        return cls(
            source.keys_seen(),
            {name: source.keys_seen(probe) for name, probe in several.items()},
            source.keys_seen(first=1),
            {name: source.keys_seen(probe, first=1) for name, probe in several.items()},
        )

    def without_first(self) -> "Choice":
        """The same if the first key is hidden."""
        kinds = {name: count - self.kinds_first[name] for name, count in self.kinds.items()}
        return dataclasses.replace(self, seen=self.seen - self.seen_first, kinds=kinds)

    def counted(self, name: str = "") -> Tensor:
        """Which queries count for a number, (B, H, T)."""
        two = self.seen >= 2
        of_kind = self.kinds.get(name)
        return two if of_kind is None else two & (of_kind >= 1) & (of_kind < self.seen)

    def even(self, name: str) -> Tensor:
        """The share that uniform attention gives to a kind of keys, (B, H, T)."""
        return self.kinds.get(name, torch.ones_like(self.seen)) / self.seen.clamp(min=1)


class RowStatistics(NamedTuple):
    """What is measured for every query, before means are taken.

    numbers: by name, each (B, H, T).
    masses: which of them are weights on a kind of keys.
    choice: which queries count for a number, and what uniform attention would give.
    offset: how far before the query its largest weight is, (B, H, T).
    histogram: the share of attention in every octave of distance, (B, H, octaves), if requested.
    """

    numbers: dict[str, Tensor]
    masses: tuple[str, ...]
    choice: Choice
    offset: Tensor
    histogram: Tensor | None


def _rows(weights: "AttentionMap", probes: dict[str, Mask], choice: Choice, histogram: bool) -> RowStatistics:
    panel = weights.panel(entropy=True, peak=True, distance=True, histogram=histogram, masses=probes)
    assert panel.entropy is not None and panel.peak is not None and panel.distance is not None  # noqa: S101, PT018
    entropy = panel.entropy / choice.seen.clamp(min=2).log()  # as a share of that of uniform attention
    numbers = panel.masses | {"entropy": entropy, "peak": panel.peak.weight, "distance": panel.distance}
    offset = weights._source().positions() - panel.peak.key
    return RowStatistics(numbers, tuple(panel.masses), choice, offset, panel.histogram)


def _means(rows: RowStatistics) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Means per head, each (H,), and those of uniform attention; 1 if there are too few queries to name the head."""
    choice = rows.choice
    found = {name: _mean(number, choice.counted(name)) for name, number in rows.numbers.items()}
    distance = found.pop("distance")
    found |= {"positional": _positional(rows.offset, choice.counted()), "distance": distance}
    even = {name: _mean(choice.even(name), choice.counted(name)) for name in rows.masses}
    even |= {name: torch.zeros_like(distance) for name in ("entropy", "positional")}
    few = {name: choice.counted(name).sum((0, 2)) < LEAST for name in even}
    return found, {name: torch.where(few[name], 1.0, value) for name, value in even.items()}


def _mean(rows: Tensor, counted: Tensor) -> Tensor:
    """The mean of (B, H, T) over the queries that count, (H,)."""
    return (rows * counted).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1)


def _positional(offset: Tensor, counted: Tensor) -> Tensor:
    """The share of counted queries whose peak is at the most common distance, (H,)."""
    shares = []
    for head in range(offset.shape[1]):
        found = offset[:, head][counted[:, head]]
        commonest = found.unique(return_counts=True)[1].max() if found.numel() else found.new_zeros(())
        shares.append(commonest / max(found.numel(), 1))
    return torch.stack(shares) if shares else offset.new_zeros(0)


class Head(NamedTuple):
    """One head of one layer, and the summary of what it does."""

    layer: int
    head: int
    summary: HeadSummary

    @property
    def place(self) -> str:
        """Such as "3.5": layer 3, head 5."""
        return f"{self.layer}.{self.head}"

    @property
    def trait(self) -> Trait | None:
        """The trait that says most about the head."""
        return max(self.summary.traits, key=lambda trait: trait.telling, default=None)

    @property
    def telling(self) -> float:
        """How clearly the head does one thing."""
        return 0.0 if self.trait is None else self.trait.telling


def most_telling(heads: Sequence[Head], most: int) -> list[Head]:
    """The heads that do one thing most clearly: first one of each kind, then the others; heads of no kind last."""
    order = sorted(heads, key=lambda head: -head.telling)
    first = {head.summary.kind: head for head in reversed(order) if head.trait}
    return sorted(order, key=lambda head: first.get(head.summary.kind) is not head)[:most]


def kind_counts(heads: Sequence[Head]) -> dict[str, int]:
    """How many heads there are of each kind; a head that also attends to the first token counts as both."""
    names = [trait.name for head in heads for trait in head.summary.traits]
    return {kind: names.count(kind) for kind in KINDS}


def kinds_in_words(heads: Sequence[Head]) -> list[str]:
    """The kinds that occur, such as "3 heads attend mostly to the first token", "2 induction (1 of those 3)"."""
    counts = kind_counts(heads)
    resting = [head for head in heads if RESTING in _kinds(head)]
    both = {kind: sum(kind in _kinds(head) for head in resting) for kind in KINDS[1:]}
    attend = "head attends" if len(resting) == 1 else "heads attend"
    words = [f"{len(resting)} {attend} mostly to the first token"] if resting else []
    shared = {kind: f" ({count} of those {len(resting)})" if count else "" for kind, count in both.items()}
    return words + [f"{counts[kind]} {kind}{shared[kind]}" for kind in KINDS[1:] if counts[kind]]


def _kinds(head: Head) -> set[str]:
    return {trait.name for trait in head.summary.traits}
