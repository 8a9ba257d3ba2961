"""Sums that can be added in any order and any grouping, and give the same to the last bit.

A tally holds whole numbers only. What a head does in one batch of windows is summed in float64 and written down as a
whole number of 2^-64; from there on nothing is rounded. So it does not matter which process read which document, nor
how often a survey was interrupted.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from operator import add
from typing import Any, Self

from torch import Tensor

from headwise.errors import CheckpointError
from headwise.study.survey.documents import Bad

ONE = 2.0**64  # a sum of 1, written down
LISTED = 10_000  # skipped documents that are named; all are counted

Fields = dict[str, list[int]]  # by name, one number per head, or several


def written(sums: Tensor) -> list[int]:
    """Finite float64 numbers in order, as whole numbers of 2^-64. Those from 2^-11 up lose nothing."""
    return [int(number * ONE) for number in sums.flatten().tolist()]


class Tally:
    """What was counted, what was skipped, and the sums of every head by layer and field."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.layers: dict[str, Fields] = {}
        self.skipped: list[Bad] = []

    def add(self, other: "Tally") -> None:
        """Count all of it in."""
        self.counts.update(other.counts)
        for layer, fields in other.layers.items():
            self.add_layer(layer, fields)
        self.skip(other.skipped)

    def add_layer(self, layer: str, fields: Fields) -> None:
        """Count in the sums of one layer."""
        mine = self.layers.get(layer)
        if mine is None:
            self.layers[layer] = dict(fields)
            return
        for name, numbers in fields.items():
            mine[name] = list(map(add, mine[name], numbers))

    def skip(self, bad: Iterable[Bad]) -> None:
        """Note what was skipped, in the order of places; the count of documents is kept by `counts`."""
        bad = list(bad)
        if bad:
            self.skipped = heapq.nsmallest(LISTED, {*self.skipped, *bad}, key=_order)

    def to_dict(self) -> dict[str, Any]:
        """As plain data; the same tally gives the same text."""
        return {
            "counts": dict(sorted(self.counts.items())),
            "layers": self.layers,  # in the order in which the model runs them
            "skipped": [list(bad) for bad in self.skipped],
        }

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Self:
        """What `to_dict` gave."""
        tally = cls()
        try:
            tally.counts.update(told["counts"])
            tally.layers = {layer: dict(fields) for layer, fields in told["layers"].items()}
            tally.skipped = [Bad(*bad) for bad in told["skipped"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"no tally of a survey: {error!r}.") from error
        return tally


def _order(bad: Bad) -> tuple[str, int, str]:
    return bad.file, bad.line or 0, bad.reason
