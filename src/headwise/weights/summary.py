"""What each head does, in numbers and words.

Attention to the first token can hide everything else a head does. So every number is also given with that token
excluded and the other weights scaled up to 1 (`without_first`), and the description in words is based on those. A is
the matrix of weights, i a query, j a key, k_i the key with the largest weight of query i. Definitions:

    sink          weight on the first key                                          Xiao 2023, Gu 2024
    previous      weight on the key just before the query; next: just after it; self: on its own     Clark 2019
    local         weight at most 8 positions away                                  Kovaleva 2019
    induction     weight on keys that follow an earlier copy of the query's token  Olsson 2022
    same_token    weight on earlier copies of the query's token                    Wang 2022
    delimiter     weight on separators and punctuation                             Clark 2019, Kovaleva 2019
    entropy       −Σ w log w, as a share of that of uniform attention              Clark 2019
    peak          largest weight                                                   Voita 2019 ("confidence")
    positional    share of queries whose peak is at the most common distance       Voita 2019
    distance      mean distance to the keys attended to                            Vig & Belinkov 2019
    one_to_one    A[i, k_i], or 0 if k_i is also the peak of another query: 1 if the head is a permutation
    second_sink   weight on the one key, other than the first, that receives most from the queries that see it;
                  a quarter of the queries, and at least 16, must see it           Gu 2024, for any key
    monotone      A[i, k_i], or 0 if the query is not on the staircase: the queries whose peaks never go back and whose
                  peaks weigh most together; in cross-attention only

Cross-attention has no previous token and no distance, so `previous`, `self`, `next`, `local`, `positional` and
`distance` are left out there, and every copy of the query's token counts as an earlier one.

Each is a mean over the queries, in all samples, that have a choice: they see at least two keys, and for local,
induction, same_token and delimiter both keys of that kind and others. Padding does not count. A query whose
token is new says nothing about induction, and a query whose keys are all near says nothing about looking nearby.
Without such queries the number is 0.

A head is named only for what uniform attention would not do: if n is its number and e that of uniform attention, (n −
e) / (1 − e) must reach a threshold. In a long text e is close to 0; among five words, attending to the previous one is
not a trait. Where e is above one half, the text is too short to tell: in a causal text of up to 30 tokens, no head is
called local, since most tokens are near. A first-token sink is one by its number alone, as printed, so that a table and
a count of it agree; in a text so short that uniform attention comes near that number (up to 7 tokens, if causal) there
are none. For `monotone`, e is at least what the best single key would give, so a sink is not a staircase. A largest
weight counts as a peak for `positional` if it is at least twice the mean of the others. A weight shows where a head
attends. It does not prove that the model uses it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.masks.probes import (
    NO_TOKEN,
    induction,
    local,
    offset,
    previous_token,
    same_token,
    sink,
    token_ids,
    token_is,
)
from headwise.weights import display, padding
from headwise.weights.panel import Panel, TopKeys, checked_probe
from headwise.weights.parts import RowParts
from headwise.weights.readings import column_of

if TYPE_CHECKING:
    from headwise.weights.map import AttentionMap

NEAR = 8  # positions that count as local
SINK = 0.3  # a head whose weight on the first token, as printed, is at least this is a sink: ε of Gu 2024
TOO_SHORT = 0.25  # of uniform attention on the first token: in such a text, no head is a sink
ON_FIRST = f"{SINK * 100:.0f} % or more on the first token"
MOST_EVEN = 0.5  # of uniform attention on keys of a kind: beyond it, no head is named for that kind
# With fewer queries, a head is not named. Among few, chance alone makes patterns: of 400 heads with random scores of
# standard deviation 2 and 8 tokens, 55 would have a second sink; with these limits none has, at nine lengths up to 64.
LEAST = 4
FEWEST = {"one_to_one": 8, "monotone": 8, "second_sink": 16}
FIRST_SINK, SECOND_SINK, MIXED = "first-token sink", "second sink", "mixed"
# What a head is called if this number of it, with the sink excluded, reaches the threshold. The first match is used.
READINGS = (
    ("induction", "induction", 0.4),
    ("previous", "previous-token", 0.4),
    ("self", "own-token", 0.4),
    ("next", "next-token", 0.4),
    ("same_token", "same-token", 0.4),
    ("delimiter", "delimiter", 0.5),
    ("positional", "fixed-offset", 0.9),
    ("monotone", "monotone", 0.4),
    ("one_to_one", "one-to-one", 0.4),
    ("second_sink", SECOND_SINK, SINK),
    ("local", "local", 0.7),
    ("entropy", "broad", 0.8),
)
KINDS = (FIRST_SINK, *(name for _, name, _ in READINGS), MIXED)
# How much a kind says about a head, else 1.
CLARITY = {FIRST_SINK: 0.7, SECOND_SINK: 0.7, "fixed-offset": 0.7, "local": 0.6, "broad": 0.5}
ONE_KEY = ("sink", "previous", "self", "next")  # kinds of which each query has at most one key
LONG_NAME = 8  # letters of a heading on one line
CAPTION = """\
Readings leave out the first token, and scale the other weights of a row up to 1.
Numbers are means over queries and include it; without it they are in head.without_first."""
SEEN_BY = 4  # a second sink is seen by at least one in so many queries


class Trait(NamedTuple):
    """What a head does: a name, the number behind it, and how far that exceeds uniform attention."""

    name: str
    share: float
    beyond: float

    @property
    def clarity(self) -> float:
        """How much it says about the head; being local or broad says less than the others."""
        return CLARITY.get(self.name, 1.0) * self.beyond


@dataclasses.dataclass(frozen=True)
class HeadSummary:
    """One head: its index, its traits, its numbers, and its numbers with the first token excluded."""

    head: int
    traits: tuple[Trait, ...]
    numbers: dict[str, float]
    without_first: dict[str, float]

    @property
    def reading(self) -> str:
        """What it does in a few words, such as "first-token sink 0.71; rest: previous-token 0.62"."""
        return f"{second_of(self.traits, '; rest: ')}".join(f"{x.name} {x.share:.2f}" for x in self.traits) or MIXED

    @property
    def kind(self) -> str:
        """What it is called, such as "previous-token"; for a first-token sink, what else it does."""
        return self.traits[-1].name if self.traits else MIXED

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
        query_ids: Tensor | Sequence[int] | None = None,
    ) -> "Summary":
        """The summary of the map `weights`; `ids`, `delimiters` and `query_ids` are those of `AttentionMap.summary`."""
        return cls.of_rows(weights, *rows_of(weights, ids, delimiters, query_ids))

    @classmethod
    def of_rows(cls, weights: "AttentionMap", plain: "RowStatistics", without: "RowStatistics") -> "Summary":
        """The summary of the map `weights` from the rows of `rows_of`: `plain`, and `without` the first key."""
        means = [_means(plain), _means(without)]
        # All numbers at once: on a GPU, asking for them one by one would take longer than everything else.
        columns = iter(torch.stack([x for part in means for each in part for x in each.values()]).tolist())
        read = [[{name: next(columns) for name in each} for each in part] for part in means]
        heads = []
        for place, name in enumerate(weights._source().axis("head").tolist()):
            (own, even), (rest, rest_even) = (_of_head(place, *part) for part in read)
            heads.append(HeadSummary(name, traits(own, even, rest, rest_even), own, rest))
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
        words = [f"{head.head:>4}  {head.reading}" for head in self.heads]
        return "\n".join(["head  reading", *words, "", *self._numbers(), "", CAPTION])

    def _numbers(self) -> list[str]:
        """The table of numbers; long names take two lines, so that it fits into 100 columns."""
        names = {name: _heading(name) for name in self.heads[0].numbers}
        wide = {name: max(4, *map(len, lines)) for name, lines in names.items()}
        lines = [
            (f"{label:>4} " + " ".join(lines[i].rjust(wide[name]) for name, lines in names.items())).rstrip()
            for i, label in enumerate(("", "head"))
        ]
        for head in self.heads:
            lines.append(f"{head.head:>4} " + " ".join(f"{head[name]:.2f}".rjust(wide[name]) for name in names))
        return lines


def second_of(traits: Sequence[Trait], rest: str) -> str:
    """How the second trait is introduced: as one of the rest of the attention, except that of a second sink."""
    return "; and " if traits and traits[-1].name == SECOND_SINK else rest


def _heading(name: str) -> tuple[str, str]:
    """The name of a number in two lines."""
    first, _, last = name.rpartition("_")
    if not first and len(name) > LONG_NAME:
        first, last = f"{name[:5]}-", name[5:]
    return first.replace("_", " "), last


def rows_of(
    weights: "AttentionMap",
    ids: Tensor | Sequence[int] | None = None,
    delimiters: int | Sequence[int] | Tensor | None = None,
    query_ids: Tensor | Sequence[int] | None = None,
    *,
    histogram: bool = False,
    top: int = 0,
) -> tuple["RowStatistics", "RowStatistics"]:
    """The row statistics a summary is computed from: of the map, and with the first token excluded.

    With `top`, the latter have so many of the largest weights of every query, as they are in the whole map.
    """
    with torch.no_grad():
        weights = weights.detach()
        cross = weights._scoring.cross or query_ids is not None
        probes = probes_of(weights, ids, delimiters, query_ids)
        choice = Choice.of(weights, probes)
        parts = RowParts.of(weights, probes, distance=not cross, histogram=histogram and not cross, top=top)
        plain = _rows(weights, parts.whole(), choice, _second_sink(weights, parts.rest, choice, probes), cross=cross)
        choice = choice.without_first()
        others, panel = parts.without_first(choice.seen > 0)
        without = _rows(others, panel, choice, plain.second_sink, cross=cross)
        return plain._replace(left=parts.left), without._replace(top=parts.rest.topk)


def probes_of(
    weights: "AttentionMap",
    ids: Tensor | Sequence[int] | None = None,
    delimiters: int | Sequence[int] | Tensor | None = None,
    query_ids: Tensor | Sequence[int] | None = None,
) -> dict[str, Mask]:
    """The kinds of keys that a summary measures, the first one excepted, by the name of their number."""
    cross = weights._scoring.cross or query_ids is not None
    probes: dict[str, Mask] = {}
    if not cross:
        probes = {"previous": previous_token(), "self": offset(0), "next": offset(-1), "local": local(NEAR)}
    return probes | _token_probes(weights, ids, delimiters, query_ids, cross)


def _token_probes(
    weights: "AttentionMap",
    ids: Tensor | Sequence[int] | None,
    delimiters: int | Sequence[int] | Tensor | None,
    query_ids: Tensor | Sequence[int] | None,
    cross: bool,
) -> dict[str, Mask]:
    """The probes that compare tokens. In cross-attention most need the tokens of both sides."""
    if ids is None:
        return {}
    tokens = token_ids("summary", ids).to(weights.device)
    real = weights._real_keys()
    if real is not None and real.shape[1] == tokens.shape[1]:  # padding is no copy of anything
        tokens = torch.where(real, tokens, NO_TOKEN)
    found: dict[str, Mask] = {}
    if query_ids is not None:
        asked = token_ids("summary(query_ids)", query_ids).to(weights.device)
        found = {"induction": induction(tokens, asked), "same_token": same_token(tokens, asked)}
    elif not cross:
        found = {"induction": induction(tokens), "same_token": same_token(tokens)}
    return found if delimiters is None else found | {"delimiter": token_is(tokens, delimiters)}


def traits(
    numbers: Mapping[str, float],
    even: Mapping[str, float],
    without_first: Mapping[str, float],
    even_without: Mapping[str, float],
) -> tuple[Trait, ...]:
    """What a head does: whether it attends to the first token, and the first trait that fits with that token excluded.

    A second sink has to be one with that token included.

    Args:
        numbers: of the head.
        even: the same numbers of uniform attention; 1 if there are too few queries.
        without_first: the numbers with the first token excluded.
        even_without: those of uniform attention.
    """
    whole = ("second_sink",) if "second_sink" in numbers else ()
    others = {**without_first, **{name: numbers[name] for name in whole}}
    chance = {**even_without, **{name: even.get(name, 0.0) for name in whole}}

    def trait(name: str, share: float, even: float) -> Trait:
        return Trait(name, share, max(0.0, share - even) / (1 - even) if even <= MOST_EVEN else 0.0)

    first = trait(FIRST_SINK, numbers["sink"], even.get("sink", 0.0))
    found = [first] if round(first.share, 2) >= SINK and even.get("sink", 0.0) < TOO_SHORT else []
    fitting = (
        (trait(name, others[key], chance.get(key, 0.0)), least) for key, name, least in READINGS if key in others
    )
    return (*found, *[found for found, least in fitting if found.beyond >= least][:1])


@dataclasses.dataclass(frozen=True)
class Choice:
    """How many keys each query sees (B, H, T), how many of each kind, and the same for the first key alone."""

    seen: Tensor
    kinds: dict[str, Tensor]
    seen_first: Tensor
    kinds_first: dict[str, Tensor]

    @classmethod
    def of(cls, weights: "AttentionMap", probes: Mapping[str, Mask]) -> "Choice":
        """What the mask allows, for the probes that can match several keys. A padded query sees nothing."""
        source, real = weights._source(), weights._real_keys()
        source = padding.without_padding(source, real)
        several = {name: checked_probe(probe, source) for name, probe in probes.items() if name not in ONE_KEY}
        first = padding.from_first(sink(1), weights._first_keys())

        seen, *kinds = source.keys_seen_each([None, *several.values()])
        kinds_of = dict(zip(several, kinds, strict=True))
        if isinstance(first, padding.FromFirst) or not weights.shape[3]:
            seen_first, *kinds = source.keys_seen_each([first, *(probe & first for probe in several.values())])
            return cls(seen, kinds_of, seen_first, dict(zip(several, kinds, strict=True)))
        seen_first, column = source.keys_seen(first=1), source.grid(slice(None), slice(0, 1))
        hits = {name: probe.visible(column)[..., 0] for name, probe in several.items()}
        return cls(seen, kinds_of, seen_first, {name: seen_first * hit for name, hit in hits.items()})

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
    even: the same numbers of uniform attention, for those that a head can be named for.
    choice: which queries count for a number.
    offset: how far before the query its largest weight is, (B, H, T); None in cross-attention.
    peaked: whether that weight is at least twice the mean of the others.
    second_sink: the key that receives most, the first one excluded, (B, H); -1 if there is none.
    histogram: the share of attention in every octave of distance, (B, H, octaves), if requested.
    queries: how many queries that share is a mean over, (B or 1,).
    left: the share of attention that goes to all keys but the first, (B, H, T), if requested.
    key: the key with the largest weight, (B, H, T).
    top: the largest weights of every query, if requested.
    """

    numbers: dict[str, Tensor]
    even: dict[str, Tensor]
    choice: Choice
    offset: Tensor | None
    peaked: Tensor
    second_sink: Tensor
    histogram: Tensor | None
    queries: Tensor
    left: Tensor | None = None
    key: Tensor | None = None
    top: TopKeys | None = None


def _rows(weights: "AttentionMap", panel: Panel, choice: Choice, second: Tensor, *, cross: bool) -> RowStatistics:
    """The row statistics of a map whose second sink is `second`."""
    assert panel.entropy is not None and panel.peak is not None  # noqa: S101, PT018
    counted, (peak, key) = choice.counted(), panel.peak
    there, seen = column_of(weights._normalised(), second)
    choice = dataclasses.replace(choice, kinds=choice.kinds | {"second_sink": seen * (choice.seen > 0)})
    entropy = panel.entropy / choice.seen.clamp(min=2).log()  # as a share of that of uniform attention
    numbers = panel.masses | {"second_sink": there, "one_to_one": peak * _unique(key, counted, weights.shape[3])}
    plain = choice.even("")
    even = {name: choice.even(name) if name in choice.kinds else plain for name in numbers}
    if cross:
        stairs, best = staircase(key, peak * counted, weights.shape[3])
        numbers["monotone"] = peak * stairs
        even["monotone"] = torch.maximum(plain, peak * (key == best[..., None]))
    numbers |= {"entropy": entropy, "peak": peak}
    even["peak"] = plain
    if panel.distance is not None:
        numbers["distance"] = panel.distance
    return RowStatistics(
        numbers,
        even,
        choice,
        None if cross else weights._source().positions() - key,
        peak * (choice.seen + 1) >= 2,
        second,
        panel.histogram,
        weights.real_tokens().queries.sum(-1),
        key=key,
    )


def _second_sink(weights: "AttentionMap", panel: Panel, choice: Choice, probes: Mapping[str, Mask]) -> Tensor:
    """The key that receives most from those that see it, (B, H), among words that enough queries see; -1 for none.

    Keys that are the first of a text or delimiters are no ordinary words.
    """
    assert panel.received is not None  # noqa: S101
    mean, count, queries = panel.received.mean, panel.received.count, choice.counted().sum(-1)
    B, H, S = mean.shape
    if not S:
        return torch.full((B, H), -1, device=mean.device)
    fewest = (queries / SEEN_BY).clamp(min=FEWEST["second_sink"])
    mean = mean.masked_fill(count < fewest[..., None], -1.0)
    mean = mean.masked_fill(weights._first_of_texts()[:, None], -1.0)
    if "delimiter" in probes:
        table = probes["delimiter"].to_tensor(1, S, device=mean.device)[:, 0]  # (B or 1, 1, S)
        mean = mean.masked_fill(table[weights._source().axis("batch")] if len(table) > 1 else table, -1.0)
    best, key = mean.max(-1)
    return key.masked_fill(best < 0, -1)


def _unique(key: Tensor, counted: Tensor, S: int) -> Tensor:
    """Whether no other counted query of the sample has the same peak, (B, H, T)."""
    place = key.masked_fill(~counted, S).clamp(min=0)
    times = torch.zeros(*key.shape[:2], S + 1, device=key.device).scatter_add_(
        -1, place, torch.ones_like(place).float()
    )
    return (times.gather(-1, place) == 1) & counted


def staircase(key: Tensor, weight: Tensor, S: int) -> tuple[Tensor, Tensor]:
    """The queries of the heaviest chain whose keys never go back, (B, H, T), and the heaviest single key, (B, H).

    Args:
        key: the peak of every query, (B, H, T).
        weight: its weight; 0 for queries that do not count.
        S: how many keys there are.
    """
    B, H, T = key.shape
    keys, added = key.flatten(0, 1).clamp(min=0).cpu(), weight.flatten(0, 1).double().cpu()
    best = torch.zeros(B * H, S, dtype=torch.float64)  # the heaviest chain that ends at this key or before it
    last = torch.full((B * H, S), -1)  # its last query
    before = torch.full((B * H, T), -1)
    for i in range(T):
        at = keys[:, i, None]
        total = best.gather(1, at) + added[:, i, None]
        before[:, i] = last.gather(1, at)[:, 0]
        better = (torch.arange(S) >= at) & (total > best)
        best, last = torch.where(better, total, best), last.masked_fill(better, i)
    found = torch.zeros(B * H, T + 1, dtype=torch.bool)
    query = last[:, -1:] if S else last.new_full((B * H, 1), -1)
    while bool((query >= 0).any()):
        found.scatter_(1, torch.where(query >= 0, query, T), True)
        query = torch.where(query >= 0, before.gather(1, query.clamp(min=0)), query)
    single = torch.zeros(B * H, max(S, 1), dtype=torch.float64).scatter_add_(1, keys, added).argmax(-1)
    return found[:, :T].view(B, H, T).to(key.device), single.view(B, H).to(key.device)


Means = dict[str, Tensor]


def _means(rows: RowStatistics) -> tuple[Means, Means, Means]:
    """Means per head, each (H,), those of uniform attention, and how many queries each of the latter is a mean over."""
    choice = rows.choice
    counted = {name: choice.counted(name) for name in ("", *choice.kinds)}

    def mean(values: Means) -> tuple[Tensor, Tensor]:
        where = torch.stack([counted.get(name, counted[""]) for name in values])
        times = where.sum((1, 3))
        return (torch.stack(list(values.values())) * where).sum((1, 3)) / times.clamp(min=1), times

    found = dict(zip(rows.numbers, mean(rows.numbers)[0], strict=True))
    even, times = (dict(zip(rows.even, x, strict=True)) for x in mean(rows.even))
    even["entropy"], times["entropy"] = torch.zeros_like(even["peak"]), times["peak"]  # only a broad head is named
    if rows.offset is not None:
        distance = found.pop("distance")
        found |= {"positional": _positional(rows, counted[""]), "distance": distance}
        even["positional"], times["positional"] = even["peak"], times["peak"]
    return found, even, times


def _of_head(place: int, *read: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The numbers of one head, and those of uniform attention; 1 if there are too few queries to name it."""
    own, even, times = ({name: x[place] for name, x in each.items()} for each in read)
    even = {name: 1.0 if times[name] < FEWEST.get(name, LEAST) else x for name, x in even.items()}
    return own, even


def _positional(rows: RowStatistics, counted: Tensor) -> Tensor:
    """The share of counted queries whose peak is at the most common distance, (H,)."""
    assert rows.offset is not None  # noqa: S101 - there are distances
    H, offset = counted.shape[1], rows.offset
    if not offset.numel():
        return torch.zeros(H, device=counted.device)
    least, most = offset.aminmax()
    place, width = offset - least, int(most - least) + 1
    place = place + torch.arange(H, device=offset.device)[:, None] * width
    times = place[counted & rows.peaked].bincount(minlength=H * width).view(H, width)
    return times.amax(-1) / counted.sum((0, 2)).clamp(min=1)


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
        return max(self.summary.traits, key=lambda trait: trait.clarity, default=None)

    @property
    def clarity(self) -> float:
        """How clearly the head does one thing."""
        return 0.0 if self.trait is None else self.trait.clarity


def clearest(heads: Sequence[Head], most: int) -> list[Head]:
    """The heads that do one thing most clearly: first one of each kind, then the others; heads of no kind last."""
    order = sorted(heads, key=lambda head: -head.clarity)
    first = {head.summary.kind: head for head in reversed(order) if head.trait}
    return sorted(order, key=lambda head: first.get(head.summary.kind) is not head)[:most]


def kind_counts(heads: Sequence[Head]) -> dict[str, int]:
    """How many heads there are of each kind. Each head counts once: a first-token sink as what else it does, if any."""
    kinds = [head.summary.kind for head in heads]
    return {kind: kinds.count(kind) for kind in KINDS}


def kinds_in_words(heads: Sequence[Head]) -> dict[str, str]:
    """The kinds that occur, in words, such as "1 local" and, for first-token sinks,

    "3 heads put 30 % or more on the first token, 2 with no other pattern".

    With those that have no other pattern, the numbers add up to the number of heads.
    """
    counts = kind_counts(heads)
    sinks = sum(trait.name == FIRST_SINK for head in heads for trait in head.summary.traits)
    words = {}
    if sinks:
        only, many = counts[FIRST_SINK], "1 head puts" if sinks == 1 else f"{sinks} heads put"
        others = "has another pattern too" if sinks == 1 else "all have another pattern too"
        rest = f", {only} with no other pattern" if only else f" and {others}"
        words[FIRST_SINK] = f"{many} {ON_FIRST}{rest if only < sinks else ''}"
    return words | {kind: f"{counts[kind]} {kind}" for kind in KINDS[1:] if counts[kind]}
