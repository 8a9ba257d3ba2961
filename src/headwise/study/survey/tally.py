"""What a survey counts: exact sums over heads, which can be added in any order and any grouping.

Its sums are integers. What a head does in one batch of windows is summed in float64 and stored as a multiple of 2^-64;
from there on nothing is rounded. So the result does not depend on which process read which document, or on how often
the survey was interrupted. The same holds for the passages in which heads were strongest.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from operator import add
from typing import Any, NamedTuple, Self

from torch import Tensor

from headwise.errors import CheckpointError
from headwise.study.survey.passages import Passages

ONE = 2.0**64  # how a sum of 1 is stored
LISTED = 10_000  # skipped documents that are listed; all are counted
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
    """What was counted, what was skipped, the sums of every head by layer and field, and its strongest passages."""

    def __init__(self, passages: int = 0) -> None:
        self.counts: Counter[str] = Counter()
        self.layers: dict[str, Fields] = {}
        self.skipped: list[Skipped] = []
        self.passages = Passages(passages)

    def add(self, other: "Tally") -> None:
        """Add another tally to this one."""
        self.counts.update(other.counts)
        for layer, fields in other.layers.items():
            self.add_layer(layer, fields)
        self.skip(other.skipped)
        self.passages.merge(other.passages)

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
            "most passages": self.passages.most,
            "evidence": self.passages.to_rows(),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The tally that `to_dict` described."""
        tally = cls()
        try:
            tally.counts.update(data["counts"])
            tally.layers = {layer: dict(fields) for layer, fields in data["layers"].items()}
            tally.skipped = [Skipped(*each) for each in data["skipped"]]
            tally.passages = Passages.from_rows(data["evidence"], data["most passages"])
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"not the tally of a survey: {error!r}.") from error
        return tally


def _order(skipped: Skipped) -> tuple[str, int, str]:
    return skipped.file, skipped.line or 0, skipped.reason


def as_integers(sums: Tensor) -> list[int]:
    """Finite float64 numbers as multiples of 2^-64. Numbers from 2^-11 up are stored exactly."""
    return [int(number * ONE) for number in sums.flatten().tolist()]
