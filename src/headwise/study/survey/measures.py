"""From a batch of windows to the sums of every layer: what a survey measures.

By default it measures attention weights. `by` chooses another map of the same heads: weights scaled by what their
values write, or the share of each key in what the head writes. On top of that come statistics of the user's own, what
removing a head would add to the loss, and the passages in which heads were strongest.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import OptionError
from headwise.masks.probes import sink
from headwise.models.text_model import PROBE, TextModel
from headwise.study.finite import NotFiniteError
from headwise.study.importance import importance, logits_of, mean_cross_entropy, next_token_loss
from headwise.study.outputs import HeadOutputs, as_projected
from headwise.study.passes import call_name
from headwise.study.samples import token_embedding
from headwise.study.survey.passages import Passages, Ranking, StrongQuery, WindowTexts
from headwise.study.survey.statistics import OwnStatistic
from headwise.study.survey.tally import WITHOUT_FIRST, Fields, as_integers
from headwise.study.watch import watch
from headwise.weights import AttentionMap, Reading, Statistic
from headwise.weights.readings import MassReading, octave_count
from headwise.weights.source import Source
from headwise.weights.summary import READINGS, Choice, RowStatistics, probes_of, rows_of
from headwise.weights.tiles import Tile
from headwise.weights.values import Contributions

FAR = 64  # peaks are counted by distance up to here, before and after the query
PEAKS = 2 * FAR + 3  # one bin for each distance, and one at either end for everything beyond
# What is surveyed, and how the sentence of a result says so.
WAYS = {
    "weight": "attention weights, which are not importance",
    "value": "weights by value: each attention weight times the norm of what its value writes",
    "contribution": "contributions: the share of each token in what the head writes",
}
IMPORTANCE = "importance: how much the loss would change without the head, by its gradient"
PASSAGES = 3  # kept for each head and number, by default
PEAK = "peak"
TRIED = 8  # tokens that a model is tried with
# The numbers that passages are kept for: those that heads are named for, as far as each query has its own.
SHOWN = (*(key for key, _, _ in READINGS if key != "positional"), PEAK)


Read = Callable[[Sequence[Reading]], list[tuple[Tensor, ...]]]


class LayerSums(NamedTuple):
    """What one layer adds to a survey.

    fields: by name, one number or several per head.
    strongest: by head and number, the queries to quote, the best first.
    texts: the windows that they are in.
    """

    fields: Fields
    strongest: dict[tuple[int, str], list[StrongQuery]]
    texts: Sequence[WindowTexts]


@dataclasses.dataclass(frozen=True)
class Measures:
    """What a survey measures.

    Args:
        by: "weight", "value" or "contribution".
        statistics: of the user's own.
        importance: whether to measure what removing each head would add to the loss.
        evidence: how many passages to keep for each head and number.
    """

    by: str = "weight"
    statistics: tuple[OwnStatistic, ...] = ()
    importance: bool = False
    evidence: int = PASSAGES

    def __post_init__(self) -> None:
        if self.by not in WAYS:
            raise OptionError(f"by={self.by!r}: expected one of {', '.join(map(repr, WAYS))}.")
        if isinstance(self.evidence, bool) or not isinstance(self.evidence, int) or self.evidence < 0:
            raise OptionError(f"evidence={self.evidence!r}: expected how many passages to keep, 0 or more.")

    @property
    def settings(self) -> dict[str, Any]:
        """What results depend on, as plain data."""
        statistics = {each.name: each.digest for each in self.statistics}
        return {"by": self.by, "statistics": statistics, "importance": self.importance, "evidence": self.evidence}

    def of(
        self, model: TextModel, windows: Sequence[Sequence[int]], context: int, known: Sequence[Passages] = ()
    ) -> dict[str, LayerSums]:
        """The sums of every layer over windows of one length. Each map is measured as it appears and not kept.

        Args:
            model: reads the windows.
            windows: their tokens.
            context: the most tokens of a window.
            known: passages found so far; weaker ones are not quoted.
        """
        ids = torch.tensor(windows, device=model.device)
        _check_ids(model, ids)
        octaves = octave_count(context, context)
        with torch.no_grad(), ExitStack() as stack:
            observers = [Observer(self, model, text, octaves, known) for text in texts_of(model, ids)]
            for observer in observers:
                stack.enter_context(observer.watched)
            model.read(ids)
        found = {layer: sums for observer in observers for layer, sums in observer.found().items()}
        if self.importance:
            effects = _importance(model, ids)
            for layer, sums in found.items():
                sums.fields.update(_effects(effects.get(layer), len(ids), len(sums.fields["rows"])))
        return found

    def measured(
        self,
        layer: AttentionMap | HeadOutputs,
        text: "ReadText",
        octaves: int,
        floor: Callable[[int, str], float] = lambda head, number: -math.inf,
    ) -> LayerSums:
        """The sums of one call of a layer, over its samples.

        Args:
            layer: its map, or what its heads read and write.
            text: the tokens.
            octaves: of distance, in the histograms.
            floor: the score, by head and number, that a passage must reach to be quoted.
        """
        looked = self._looked_at(layer, text)
        fields = _fields("", looked.plain, octaves) | _fields(WITHOUT_FIRST, looked.rest, octaves)
        rankings = dict(looked.rankings())
        for name, numbers, counted, by_row in self._own(looked):
            fields |= _named(name, sums_of(numbers, counted, what=f"the statistic {name}"))
            if by_row:
                rankings[name] = looked.text.ranking(numbers, counted, looked.plain)
        heads = range(looked.weights.shape[1])
        strongest = {
            (head, name): candidates
            for name, ranking in (rankings.items() if self.evidence else ())
            for head, candidates in enumerate(ranking.best(self.evidence, [floor(head, name) for head in heads]))
            if candidates
        }
        return LayerSums(fields, strongest, looked.text.windows)

    def _looked_at(self, layer: AttentionMap | HeadOutputs, text: "ReadText") -> "LookedAt":
        """The rows of the map that `by` asks for."""
        if not isinstance(layer, AttentionMap) and self.by == "contribution":
            text, shares = text.of(layer.weights), as_projected(layer.contributions)
            return LookedAt(shares.weights, text, *contribution_rows(shares, text), _one_by_one(shares))
        weights = layer if isinstance(layer, AttentionMap) else as_projected(layer.by_value)
        text = text.of(weights)
        rows = rows_of(weights, text.keys, query_ids=text.queries, histogram=True)
        return LookedAt(weights, text, *rows, weights._read)

    def _own(self, looked: "LookedAt") -> Iterator[tuple[str, Tensor, Tensor, bool]]:
        """For each statistic of the user's own: name, numbers, which of them count, whether there is one per query."""
        readings = [statistic.reading(looked.weights, looked.text.keys) for statistic in self.statistics]
        for statistic, reading, results in zip(self.statistics, readings, looked.read(readings), strict=True):
            numbers = statistic.checked(results, reading, looked.weights.shape)
            counted = looked.plain.choice.counted() if reading.by_row else torch.ones_like(numbers, dtype=torch.bool)
            yield statistic.name, numbers, counted, reading.by_row

    def check(self, model: TextModel) -> None:
        """Find out what layers do to what heads read, and raise if there is no loss that heads could be important for,
        before anything is surveyed."""
        if model.start is not None:
            return
        tokens = torch.tensor([list(model.codec.encode(PROBE))[:TRIED]], device=model.device)
        if self.importance:
            next_token_loss(model.module, tokens)
        if self.by != "weight":
            with torch.no_grad(), watch(model.module, outputs=True) as seen:
                model.module(tokens)
            for layer in seen.outputs.values():  # a gate can be tried only between two runs of the model
                as_projected(lambda layer=layer, projected=True: projected and layer.handed)


class LookedAt(NamedTuple):
    """One call of a layer: the map that is measured, its tokens, its rows with and without the first token.

    read: computes the results of readings of the map.
    """

    weights: AttentionMap
    text: "ReadText"
    plain: RowStatistics
    rest: RowStatistics
    read: Read

    def rankings(self) -> Iterator[tuple[str, Ranking]]:
        """Queries ranked by what they do, the first token excluded: by the weight that really is on these keys.

        For a head that is broad, by how many keys would have the same entropy if all weights were equal: a row of two
        keys may be even, but it is not broad.
        """
        share = self.plain.left
        for name in SHOWN:
            if name in self.rest.numbers:
                scores = self.rest.numbers[name] if share is None else self.rest.numbers[name] * share
                if name == "entropy":
                    scores = self.rest.choice.seen.clamp(min=1) ** self.rest.numbers[name]
                counted = self.rest.choice.counted(name) & (scores > 0)
                yield name, self.text.ranking(scores, counted, self.rest, share)


# What is read -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ReadText:
    """The tokens that the attention of some layers is about.

    Args:
        keys: (B, S).
        queries: (B, T) in cross-attention; None if they are the keys.
        memory: what cross-attention of these layers reads, if there is any.
        layers: which layers these are; None for all.
    """

    keys: Tensor
    queries: Tensor | None = None
    memory: Tensor | None = None
    layers: Callable[[str], bool] | None = None

    def of(self, weights: AttentionMap) -> "ReadText":
        """The tokens of one map."""
        if self.memory is None or not weights._scoring.cross:
            return self
        return ReadText(self.memory, self.keys)

    @functools.cached_property
    def windows(self) -> list[WindowTexts]:
        """The tokens of every window as lists."""
        keys = self.keys.tolist()
        queries = keys if self.queries is None else self.queries.tolist()
        return [WindowTexts(*each) for each in zip(queries, keys, strict=True)]

    def ranking(self, scores: Tensor, counted: Tensor, rows: RowStatistics, share: Tensor | None = None) -> Ranking:
        """Queries ranked by their scores, with the key that each attends to most."""
        assert rows.key is not None  # noqa: S101 - rows of a map have it
        weight = rows.numbers[PEAK] if share is None else rows.numbers[PEAK] * share
        return Ranking(scores, counted & (rows.key >= 0), rows.key, weight, self.windows, self.queries is not None)


def texts_of(model: TextModel, ids: Tensor) -> list[ReadText]:
    """What the layers of a model read: one text, or that of the encoder and that of the decoder."""
    if model.start is None:
        return [ReadText(ids)]
    module: Any = model.module
    inside = {id(part) for part in module.get_encoder().modules()}
    names = {name for name, part in module.named_modules() if id(part) in inside}
    decoded = model.decoder_tokens(ids)
    return [
        ReadText(ids, layers=lambda name: name in names),
        ReadText(decoded, memory=ids, layers=lambda name: name not in names),
    ]


class Observer:
    """Watches layers that read one text while the model runs, and measures each as soon as it can.

    A map alone is measured when it appears. What a head writes is known only after its layer, when the next one runs.
    """

    def __init__(
        self, measures: Measures, model: TextModel, text: ReadText, octaves: int, known: Sequence[Passages]
    ) -> None:
        self.measures, self.text, self.octaves, self.known = measures, text, octaves, known
        self.writes = measures.by != "weight"
        self.watched = watch(model.module, layers=text.layers, statistics=self._see, outputs=self.writes)
        self.sums: dict[str, dict[int, LayerSums]] = {}  # by layer and call

    def _see(self, weights: AttentionMap) -> LayerSums | None:
        if not self.writes:
            return self._measured(weights, self.watched.current)
        self._catch_up()
        return None

    def _catch_up(self) -> None:
        """Measure the layers that are complete, and let go of them."""
        for layer in self.watched.outputs.in_order:
            sums = self._measured(layer, call_name(layer.layer, layer.index) if layer.index else layer.layer)
            self.sums.setdefault(layer.layer, {})[layer.index] = sums
        self.watched.outputs.in_order.clear()

    def _measured(self, layer: AttentionMap | HeadOutputs, name: str) -> LayerSums:
        def floor(head: int, number: str) -> float:
            return max((found.floor((name, head, number)) for found in self.known), default=-math.inf)

        return self.measures.measured(layer, self.text, self.octaves, floor)

    def found(self) -> dict[str, LayerSums]:
        """The sums by layer, or by call if there are several."""
        if self.writes:
            self._catch_up()
            calls: Mapping[str, Sequence[LayerSums]] = {name: list(each.values()) for name, each in self.sums.items()}
        else:
            calls = self.watched.calls
        return {
            layer if len(sums) == 1 else call_name(layer, i): each
            for layer, sums in calls.items()
            for i, each in enumerate(sums)
        }


def _check_ids(model: TextModel, ids: Tensor) -> None:
    """Refuse tokens that the model does not have, before a kernel fails on them."""
    size = getattr(token_embedding(model.module), "num_embeddings", None)
    if size is not None and int(ids.max()) >= size:
        raise OptionError(
            f"{model.name}: the tokenizer gives token {int(ids.max())} and the model has {size} tokens; they do not "
            f"belong together."
        )


# Sums ---------------------------------------------------------------------------------------------------------------


def _fields(kind: str, rows: RowStatistics, octaves: int) -> Fields:
    found: Fields = {}
    for name, numbers in rows.numbers.items():
        found |= _named(f"{kind}{name}", sums_of(numbers, rows.choice.counted(name), rows.even.get(name)))
    found[f"{kind}octaves"] = _finite(_octaves(rows, octaves))
    found[f"{kind}rows"] = rows.choice.counted().sum((0, 2)).tolist()
    found[f"{kind}seeing"] = (rows.choice.seen >= 1).sum((0, 2)).tolist()
    found[f"{kind}peaks"] = _peaks(rows).flatten().tolist()
    return found


def _named(name: str, fields: Fields) -> Fields:
    return {f"{name} {what}": value for what, value in fields.items()}


def sums_of(numbers: Tensor, counted: Tensor, even: Tensor | None = None, what: str = "the model") -> Fields:
    """For numbers (B, H, N), per head: sums over those that count, sums over window means, and the counts."""
    numbers = numbers.double() * counted
    sums, many = numbers.sum(-1), counted.sum(-1)  # (B, H)
    means = sums / many.clamp(min=1)
    uniform = torch.zeros_like(numbers) if even is None else even.double() * counted
    return {
        "sum": _finite(sums.sum(0), what),
        "squares": _finite(numbers.square().sum((0, 2)), what),
        "means": _finite(means.sum(0), what),
        "mean squares": _finite(means.square().sum(0), what),
        "even": _finite(uniform.sum((0, 2)), what),
        "rows": many.sum(0).tolist(),
        "windows": (many > 0).sum(0).tolist(),
    }


def _finite(sums: Tensor, what: str = "the model") -> list[int]:
    if not bool(sums.isfinite().all()):
        raise NotFiniteError(f"{what} produced numbers that are not finite")
    return as_integers(sums)


def _octaves(rows: RowStatistics, octaves: int) -> Tensor:
    """Attention by octave of distance, summed over all queries, (H, octaves)."""
    if rows.histogram is None:  # in cross-attention there is no distance
        return torch.zeros(rows.peaked.shape[1], octaves, dtype=torch.float64)
    found = (rows.histogram.double() * rows.queries[:, None, None]).sum(0)
    return F.pad(found, (0, octaves - found.shape[1]))


def _peaks(rows: RowStatistics) -> Tensor:
    """How many queries have their largest weight at each distance, (H, PEAKS)."""
    heads = torch.arange(rows.peaked.shape[1], device=rows.peaked.device)[:, None]
    if rows.offset is None:
        return torch.zeros(len(heads), PEAKS, dtype=torch.int64)
    bins = rows.offset.clamp(-FAR - 1, FAR + 1) + FAR + 1 + heads * PEAKS
    return bins[rows.choice.counted() & rows.peaked].bincount(minlength=len(heads) * PEAKS).view(len(heads), PEAKS)


# Contributions ------------------------------------------------------------------------------------------------------


class SeveralReadings(Reading):
    """Readings that share the work of a tile; their results are one after the other."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self.readings = readings
        self.differentiable = tuple(False for reading in readings for _ in reading.differentiable)

    def start(self, source: Source) -> None:
        self.source = source
        for reading in self.readings:
            reading.start(source)

    def take(self, tile: Tile) -> None:
        for reading in self.readings:
            reading.take(tile)

    def finish(self) -> tuple[Tensor, ...]:
        return tuple(result for reading in self.readings for result in reading.finish())


def contribution_rows(shares: Contributions, text: ReadText) -> tuple[RowStatistics, RowStatistics]:
    """The contributions of each kind of keys, and those without the first key, which are not scaled up to sum to 1."""
    weights, first = shares.weights, sink(1)
    probes = probes_of(weights, text.keys, None, text.queries)
    choice = Choice.of(weights, probes)
    plain, rest = {"sink": first, **probes}, {name: probe & ~first for name, probe in probes.items()}
    masses = [MassReading(weights._probe(probe)) for probe in (*plain.values(), *rest.values())]
    largest = [
        Statistic(lambda pair: pair.weight, combine="max", where=where) for where in (None, weights._probe(~first))
    ]
    results = shares.read(SeveralReadings([*masses, *largest]))
    both = iter(results[: len(masses)])
    return (
        _contributed({name: next(both) for name in plain}, choice, results[-4:-2], weights),
        _contributed({name: next(both) for name in rest}, choice.without_first(), results[-2:], weights),
    )


def _contributed(
    numbers: dict[str, Tensor], choice: Choice, largest: Sequence[Tensor], weights: AttentionMap
) -> RowStatistics:
    peak, key = largest
    even = {name: choice.even(name) for name in numbers} | {PEAK: choice.even("")}
    queries = weights.real_tokens().queries.sum(-1)
    nothing = torch.zeros_like(choice.seen, dtype=torch.bool)
    no_sink = torch.full(choice.seen.shape[:2], -1)
    return RowStatistics(numbers | {PEAK: peak}, even, choice, None, nothing, no_sink, None, queries, None, key)


def _one_by_one(shares: Contributions) -> Read:
    return lambda readings: [shares.read(reading) for reading in readings]


# Importance ---------------------------------------------------------------------------------------------------------


def _importance(model: TextModel, ids: Tensor) -> Mapping[str, Tensor]:
    """What removing each head would add to the loss of every window, to first order, (B, H) by layer."""
    if model.start is not None:
        return importance(model.module, model.inputs(ids), loss=_decoder_loss, controls=0, batch=len(ids))
    if ids.shape[1] < 2:
        return {}  # a single token has no next one to predict
    return importance(model.module, ids, loss=mean_cross_entropy, controls=0, batch=len(ids))


def _decoder_loss(output: Any, inputs: Any) -> Tensor:
    """The mean cross-entropy of the text that a decoder repeats, of every sample."""
    logits = logits_of(output)
    if logits is None:
        raise OptionError("this model gives no logits, so there is no loss; open it with its language-model head.")
    return F.cross_entropy(logits.transpose(1, 2), inputs["input_ids"], reduction="none").mean(1)


def _effects(effects: Tensor | None, B: int, H: int) -> Fields:
    """The sums of what removing heads adds to the loss of windows, (B, H), and of its size; of none without a loss."""
    counted = torch.full((B, H, 1), effects is not None)
    found = torch.zeros(B, H, 1) if effects is None else effects[..., None]
    return _named("importance", sums_of(found.abs(), counted)) | _named("effect", sums_of(found, counted))
