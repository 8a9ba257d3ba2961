"""What a survey counts: exact sums over heads, which can be added in any order and any grouping.

A tally holds integers only. What a head does in one batch of windows is summed in float64 and stored as a multiple of
2^-64; from there on nothing is rounded. So the result does not depend on which process read which document, or on how
often the survey was interrupted.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import add
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from headwise.errors import CheckpointError, HeadwiseError, OptionError
from headwise.models.text_model import TextModel
from headwise.study.watch import watch
from headwise.weights import AttentionMap
from headwise.weights.readings import octave_count
from headwise.weights.summary import RowStatistics, rows_of

ONE = 2.0**64  # how a sum of 1 is stored
LISTED = 10_000  # skipped documents that are listed; all are counted
FAR = 64  # peaks are counted by distance up to here, before and after the query
PEAKS = 2 * FAR + 3  # one bin for each distance, and one at either end for everything beyond
WITHOUT_FIRST = "without_first "  # begins the names of numbers that leave out the first token
KINDS = ("", WITHOUT_FIRST)

Fields = dict[str, list[int]]  # by name, one number or several per head


class Skipped(NamedTuple):
    """Something that could not be read: where, and why. `line` counts from 1: a line of text, or a row of a table."""

    file: str
    line: int | None
    reason: str
    documents: int = 1  # how many documents were lost

    @property
    def place(self) -> str:
        """Such as "corpus.jsonl:17"."""
        return self.file if self.line is None else f"{self.file}:{self.line}"


class Tally:
    """What was counted, what was skipped, and the sums of every head by layer and field."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.layers: dict[str, Fields] = {}
        self.skipped: list[Skipped] = []

    def add(self, other: "Tally") -> None:
        """Add another tally to this one."""
        self.counts.update(other.counts)
        for layer, fields in other.layers.items():
            self.add_layer(layer, fields)
        self.skip(other.skipped)

    def add_layer(self, layer: str, fields: Fields) -> None:
        """Add the sums of one layer."""
        mine = self.layers.get(layer)
        if mine is None:
            self.layers[layer] = dict(fields)
            return
        for name, numbers in fields.items():
            mine[name] = list(map(add, mine[name], numbers))

    def skip(self, skipped: Iterable[Skipped]) -> None:
        """List what was skipped, ordered by place; `counts` counts the documents."""
        skipped = list(skipped)
        if skipped:
            self.skipped = heapq.nsmallest(LISTED, {*self.skipped, *skipped}, key=_order)

    def to_dict(self) -> dict[str, Any]:
        """The tally as plain data; equal tallies give equal JSON."""
        return {
            "counts": dict(sorted(self.counts.items())),
            "layers": self.layers,  # in the order in which the model runs them
            "skipped": [list(each) for each in self.skipped],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The tally that `to_dict` described."""
        tally = cls()
        try:
            tally.counts.update(data["counts"])
            tally.layers = {layer: dict(fields) for layer, fields in data["layers"].items()}
            tally.skipped = [Skipped(*each) for each in data["skipped"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"not the tally of a survey: {error!r}.") from error
        return tally


def _order(skipped: Skipped) -> tuple[str, int, str]:
    return skipped.file, skipped.line or 0, skipped.reason


# From attention maps to sums ----------------------------------------------------------------------------------------


class NotFiniteError(HeadwiseError, ArithmeticError):
    """A model produced numbers that are infinite or NaN."""


def sums_by_layer(model: TextModel, windows: Sequence[Sequence[int]], context: int) -> dict[str, Fields]:
    """The sums of every layer over windows of one length. Each map is measured as it appears and not kept."""
    ids = torch.tensor(windows, device=model.device)
    _check_ids(model, ids)
    octaves = octave_count(context, context)
    with torch.no_grad(), watch(model.module, statistics=lambda weights: sums_of(weights, ids, octaves)) as seen:
        model.read(ids)
    found: dict[str, Fields] = {}
    for layer, calls in seen.calls.items():  # several if the model was not called as a whole
        found |= {layer if len(calls) == 1 else f"{layer}@{i}": fields for i, fields in enumerate(calls)}
    return found


def sums_of(weights: AttentionMap, ids: Tensor, octaves: int) -> Fields:
    """The sums of one map's heads over its samples: of everything that the summary of a map measures."""
    plain, others = rows_of(weights, ids, histogram=True)
    return _fields("", plain, octaves) | _fields(WITHOUT_FIRST, others, octaves)


def _fields(kind: str, rows: RowStatistics, octaves: int) -> Fields:
    found: Fields = {}
    for name, numbers in rows.numbers.items():
        found |= {f"{kind}{name} {what}": value for what, value in _sums(rows, name, numbers).items()}
    found[f"{kind}octaves"] = _finite(_octaves(rows, octaves))
    found[f"{kind}rows"] = rows.choice.counted().sum((0, 2)).tolist()
    found[f"{kind}seeing"] = (rows.choice.seen >= 1).sum((0, 2)).tolist()
    found[f"{kind}peaks"] = _peaks(rows).flatten().tolist()
    return found


def _sums(rows: RowStatistics, name: str, numbers: Tensor) -> Fields:
    """For one number, per head: sums over the queries that count for it, sums over window means, and the counts."""
    counted = rows.choice.counted(name)  # (B, H, T)
    numbers = numbers.double() * counted
    sums, many = numbers.sum(-1), counted.sum(-1)  # (B, H)
    means = sums / many.clamp(min=1)
    even = rows.even[name].double() * counted if name in rows.even else torch.zeros_like(numbers)
    return {
        "sum": _finite(sums.sum(0)),
        "squares": _finite(numbers.square().sum((0, 2))),
        "means": _finite(means.sum(0)),
        "mean squares": _finite(means.square().sum(0)),
        "even": _finite(even.sum((0, 2))),
        "rows": many.sum(0).tolist(),
        "windows": (many > 0).sum(0).tolist(),
    }


def _finite(sums: Tensor) -> list[int]:
    if not bool(sums.isfinite().all()):
        raise NotFiniteError("the model produced numbers that are not finite")
    return as_integers(sums)


def as_integers(sums: Tensor) -> list[int]:
    """Finite float64 numbers as multiples of 2^-64. Numbers from 2^-11 up are stored exactly."""
    return [int(number * ONE) for number in sums.flatten().tolist()]


def _octaves(rows: RowStatistics, octaves: int) -> Tensor:
    """Attention by octave of distance, summed over all queries, (H, octaves)."""
    if rows.histogram is None:  # in cross-attention there is no distance
        return torch.zeros(rows.peaked.shape[1], octaves, dtype=torch.float64)
    found = (rows.histogram.double() * rows.queries[:, None, None]).sum(0)
    return torch.nn.functional.pad(found, (0, octaves - found.shape[1]))


def _peaks(rows: RowStatistics) -> Tensor:
    """How many queries have their largest weight at each distance, (H, PEAKS)."""
    heads = torch.arange(rows.peaked.shape[1], device=rows.peaked.device)[:, None]
    if rows.offset is None:
        return torch.zeros(len(heads), PEAKS, dtype=torch.int64)
    bins = rows.offset.clamp(-FAR - 1, FAR + 1) + FAR + 1 + heads * PEAKS
    return bins[rows.choice.counted() & rows.peaked].bincount(minlength=len(heads) * PEAKS).view(len(heads), PEAKS)


def _check_ids(model: TextModel, ids: Tensor) -> None:
    """Refuse tokens that the model does not have, before a kernel fails on them."""
    embedding = next((m for m in model.module.modules() if isinstance(m, torch.nn.Embedding)), None)
    if embedding is not None and int(ids.max()) >= embedding.num_embeddings:
        raise OptionError(
            f"{model.name}: the tokenizer gives token {int(ids.max())} and the model has {embedding.num_embeddings} "
            f"tokens; they do not belong together."
        )
