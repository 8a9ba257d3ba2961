"""Statistics of whole rows and of rows without their first key, in one pass over the weights.

The first key of a text and all other keys are two parts of every row. What is measured of both parts gives what would
be measured of the whole row, and the second part, scaled up to 1, is the row without the first key. Nothing is
subtracted, so no digits are lost where the first key takes nearly everything. The first part is one key for each query,
which takes hardly any time.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.masks import Mask
from headwise.masks.probes import sink
from headwise.weights import streaming
from headwise.weights.panel import Panel, Peak
from headwise.weights.readings import Reading, true_mass
from headwise.weights.source import Source
from headwise.weights.sums import CellSum, Sum
from headwise.weights.tiles import Tile

if TYPE_CHECKING:
    from headwise.weights.map import AttentionMap

ALL = "all keys of the part"
TINY = 1e-30  # if other keys have less weight than this, some of it may have been rounded to 0


@dataclasses.dataclass(frozen=True, eq=False)
class RowParts:
    """What was measured of the first key and of the others.

    Entropy, peak and distance of a part are those of its weights scaled up to 1. Masses and histograms are not scaled.

    Args:
        weights: the map.
        probes: the probes whose masses are measured, by name.
        first: what was measured of the first key.
        rest: what was measured of the others.
    """

    weights: "AttentionMap"
    probes: Mapping[str, Mask]
    first: Panel
    rest: Panel

    @classmethod
    def of(
        cls, weights: "AttentionMap", probes: Mapping[str, Mask], *, distance: bool, histogram: bool, top: int = 0
    ) -> "RowParts":
        """Measure entropy, peak, masses and what keys other than the first receive; the rest if asked.

        Args:
            weights: the map.
            probes: whose masses to measure, by name.
            distance: measure the mean distance too.
            histogram: and the share of attention in every octave of distance.
            top: how many of the largest weights of every query to find, the first key excluded.
        """
        options = {"entropy": True, "peak": True, "distance": distance, "histogram": histogram}
        masses = {ALL: sink(max(weights.shape[3], 1)), **probes}
        first = weights._within(sink(1)).panel(masses=masses, **options)
        rest = weights._within(~sink(1)).panel(masses=masses, received=True, topk=top or None, **options)
        return cls(weights, probes, first, rest)

    @property
    def on_first(self) -> Tensor:
        """The weight of the first key, (B, H, T)."""
        return self.first.masses[ALL]

    @property
    def left(self) -> Tensor:
        """The weight of all other keys, (B, H, T)."""
        return self.rest.masses[ALL]

    def whole(self) -> Panel:
        """The statistics of whole rows."""
        first, rest = self.first, self.rest
        total = true_mass(self.on_first + self.left, self.weights._source())
        a, b = self.on_first / total, self.left / total
        assert first.entropy is not None and rest.entropy is not None  # noqa: S101, PT018 - they were asked for
        near, histogram = first.distance, first.histogram
        return Panel(
            entropy=a * first.entropy + b * rest.entropy + torch.special.entr(a) + torch.special.entr(b),
            peak=_larger(first.peak, rest.peak, a, b),
            distance=None if rest.distance is None or near is None else a * near + b * rest.distance,
            histogram=None if rest.histogram is None or histogram is None else histogram + rest.histogram,
            received=rest.received,
            masses={"sink": self.on_first} | {name: first.masses[name] + rest.masses[name] for name in self.probes},
        )

    def without_first(self, sees_others: Tensor) -> tuple["AttentionMap", Panel]:
        """The map without its first keys, other weights scaled up to 1, and its statistics.

        Args:
            sees_others: (B, H, T), which queries see a key other than the first.
        """
        rest, left = self.rest, self.left
        others = self.weights._within(~sink(1))
        # Ranks that share a map must agree on the number of passes, so they do not look.
        if self.weights._shards is not None or bool((sees_others & (left < TINY)).any()):
            others._lse = None
            return others, others.panel(
                entropy=True, peak=True, masses=self.probes,
                distance=rest.distance is not None, histogram=rest.histogram is not None,
            )  # fmt: skip
        others._lse = self.weights.log_sum_exp() + left.log()
        scale = torch.where(left > 0, left, 1.0)
        masses = {name: rest.masses[name] / scale for name in self.probes}
        histogram = None if rest.histogram is None else others.panel(histogram=True).histogram
        return others, dataclasses.replace(rest, masses=masses, histogram=histogram)


def _larger(first: Peak | None, rest: Peak | None, a: Tensor, b: Tensor) -> Peak:
    """The peak of rows whose parts have the shares `a` and `b`; of equal weights the first."""
    assert first is not None and rest is not None  # noqa: S101, PT018 - they were asked for
    one, other = a * first.weight, b * rest.weight
    better = (one >= other) & (first.key >= 0)
    return Peak(torch.where(better, one, other), torch.where(better, first.key, rest.key))


# Pictures ------------------------------------------------------------------------------------------------------------

Results = list[tuple[Tensor, ...]]


def read_both(weights: "AttentionMap", whole: Sequence[Reading], rest: Sequence[Reading]) -> tuple[Results, Results]:
    """The results of readings of a map of one sample, and of pictures of it without its first key.

    Args:
        weights: the map.
        whole: readings of all its weights.
        rest: readings that add weights up to pictures, of the weights without the first key scaled up to 1.
    """
    source, others = weights._unpadded(), weights._without_first()
    known, less = streaming.normalizer(source), others.log_sum_exp()
    scale = torch.where(less > -math.inf, known - less, -math.inf)  # the log of what other weights are multiplied by
    if bool((scale > -math.log(TINY)).any()):
        return streaming.read(source, whole), streaming.read(others._unpadded(), rest)
    scale, first = scale.exp().flatten(0, 1), weights._first_of_texts()[0]
    found = streaming.read(source, [*whole, *(WithoutFirst(reading, scale, first) for reading in rest)])
    return found[: len(whole)], found[len(whole) :]


class WithoutFirst(Reading):
    """A picture of the weights without the first key, scaled up to 1, in a pass over all weights.

    Args:
        inner: the picture.
        scale: (H, T), what the weights of a query are multiplied by.
        first: (S,), which keys are left out.
    """

    def __init__(self, inner: Reading, scale: Tensor, first: Tensor) -> None:
        self.inner, self.scale, self.first = inner, scale, first
        self.by_row, self.strip_rows = inner.by_row, inner.strip_rows
        self.differentiable = tuple(False for _ in inner.differentiable)

    def start(self, source: Source) -> None:
        self.source = source
        self.inner.start(source)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return self.inner.key_range(start, stop, T, S)

    def take(self, tile: Tile) -> None:
        scaled = tile.weights * self.scale[tile.heads, tile.rows, None]
        self.inner.take(tile.with_weights(scaled.masked_fill_(self.first[tile.cols], 0.0)))

    def sums(self, source: Source) -> Sequence[Sum] | None:
        asked = self.inner.sums(source) if "sums" in vars(type(self.inner)) else None
        if asked is None or not all(isinstance(part, CellSum) and part.by_query is None for part in asked):
            return None
        return [
            dataclasses.replace(part, by_query=self.scale, col=part.col.masked_fill(self.first, -1))
            for part in asked
            if isinstance(part, CellSum)
        ]

    def finish(self) -> tuple[Tensor, ...]:
        return self.inner.finish()
