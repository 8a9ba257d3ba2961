"""What a page is shown of a look: first from few of its queries, then from more, in the end from all.

Every head is measured by itself, so that there is always a moment to stop, or to answer somebody who asks.
"""

import dataclasses
import json
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.map import AttentionMap
from headwise.serve.look import FINISHED, MEASURING, REFINING, Look
from headwise.summary import HeadSummary, Summary
from headwise.view.data import Data, add_edges, add_reach, manifest
from headwise.view.measuring import Measured, measure
from headwise.view.sight import Pair, Sight

FIRST = 256  # queries of the first picture of a long text
LONG = 1024  # tokens from which on a text is long
STEPS = (2048,)  # queries of the pictures between the first and the last
PAIRS = 5


def first_picture(look: Look) -> None:
    """Something to see, soon."""
    for _ in _picture(look, counts(look.T)[0], MEASURING):
        pass


def refinements(look: Look) -> Iterator[None]:
    """The same from more queries, head by head; in the end from all of them."""
    for count in counts(look.T)[1:]:
        yield from _picture(look, count, REFINING)
    look.reached(FINISHED, 1.0)


def counts(T: int) -> list[int]:
    """From how many queries pictures are made, one after the other."""
    return [T] if T <= LONG else [FIRST, *(count for count in STEPS if 2 * count < T), T]


def evenly(count: int, T: int) -> Tensor:
    """So many of T queries, evenly spread: the middle one of every stretch."""
    return (torch.arange(count) * 2 + 1) * T // (2 * count)


class PartSight(Sight):
    """A sight that is measured from some of its queries only."""

    def __init__(self, look: Look, rows: Tensor) -> None:
        super().__init__(look.maps, look.tokens, look.ids)
        self.rows, self.whole = rows, self.maps
        self.maps = tuple(part_of(weights, rows) for weights in self.maps)
        self.best: dict[tuple[int, int], Pair] = {}

    def pairs(self, most: int = PAIRS) -> list[Pair]:
        """The strongest that were met so far."""
        return sorted(self.best.values(), key=lambda pair: -pair.weight)[:most]

    def meet(self, layer: int, head: int) -> tuple[HeadSummary, Measured]:
        """Measure one head."""
        weights = self.maps[layer].select(heads=[head])
        alone = Sight({"": weights}, None, self.ids)
        for pair in alone.pairs(PAIRS):
            query = int(self.rows[pair.query])
            known = self.best.get((query, pair.key))
            if known is None or pair.weight > known.weight:
                self.best[query, pair.key] = pair._replace(layer=layer, head=head, query=query)
        return alone.summaries[0][0], stretched(measure(weights), self.rows, self.T)


def part_of(weights: AttentionMap, rows: Tensor) -> AttentionMap:
    """These rows of a map; the map itself where they are all of them."""
    return weights if len(rows) == weights.shape[2] else weights.select(rows=rows)


def stretched(seen: Measured, rows: Tensor, T: int) -> Measured:
    """What was measured from some rows, in the place of all: each row stands for those around it."""
    if len(rows) == T:
        return seen
    nearest = torch.arange(T) * len(rows) // T
    by_row = {name: getattr(seen, name)[:, nearest] for name in ("entropy", "peak", "distance", "log_sum_exp")}
    return dataclasses.replace(seen, received=seen.received * (T / len(rows)), **by_row)


def _picture(look: Look, count: int, stage: str) -> Iterator[None]:
    """Measure all heads from so many queries, and show them."""
    sight = PartSight(look, evenly(count, look.T))
    total = sum(weights.shape[1] for weights in sight.maps)
    summaries, measures, done = [], [], 0
    for layer, weights in enumerate(sight.maps):
        heads = []
        for head in range(weights.shape[1]):
            look.reached(stage, done / total)
            heads.append(sight.meet(layer, head))
            done += 1
            yield
        summaries.append(Summary(tuple(summary for summary, _ in heads)))
        measures.append(_joined([seen for _, seen in heads]))
    sight.summaries = tuple(summaries)
    look.show(_written(sight, measures, look), count)
    yield


def _joined(parts: list[Measured]) -> Measured:
    """The measures of a layer's heads as one."""
    names = ("thumbnails", "entropy", "peak", "distance", "received", "log_sum_exp")
    return Measured(*(torch.cat([getattr(part, name) for part in parts]) for name in names), None, None, {})


def _written(sight: PartSight, measures: list[Measured], look: Look) -> bytes:
    found = Data(manifest(sight, look.model), {})
    whole, sight.maps = sight.maps, sight.whole
    add_reach(found, sight)
    sight.maps = whole
    for layer, seen in enumerate(measures):
        add_edges(found, sight, layer, seen)
    found.manifest["live"] = {"rows": len(sight.rows), "of": sight.T}
    return json.dumps(found.to_dict(), separators=(",", ":")).encode()
