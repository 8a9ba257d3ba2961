"""What a page is shown of a look: first from few of its queries, then from more, in the end from all.

A few heads are measured at a time, so that there is always a moment to stop, or to answer somebody who asks.
"""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch

from headwise.view.data import Data, add_edges, add_reach, manifest
from headwise.view.measuring import Measured, measure
from headwise.view.serve.look import FINISHED, MEASURING, REFINING, Look
from headwise.view.sight import Pair, Sight
from headwise.weights.summary import HeadSummary, Summary

FIRST = 256  # queries of the first picture of a long text
LONG = 1024  # tokens from which on a text is long
STEPS = (2048,)  # queries of the pictures between the first and the last
PAIRS = 20
PORTION = 2**26  # weights that are measured without a pause


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


def stretched(seen: Measured, sight: Sight) -> Measured:
    """What was measured from some queries, in the place of all: each stands for those just before it."""
    if sight.queries is None:
        return seen
    T, count = sight.T, len(sight.queries)
    nearest = torch.searchsorted(sight.queries, torch.arange(T))
    by_row = {name: getattr(seen, name)[:, nearest] for name in ("entropy", "peak", "distance", "log_sum_exp")}
    return dataclasses.replace(seen, received=seen.received * (T / count), **by_row)


def _picture(look: Look, count: int, stage: str) -> Iterator[None]:
    """Measure all heads from so many queries, and show them."""
    sight = Sight(look.maps, look.tokens, look.ids, queries=count)
    total, done = sum(weights.shape[1] for weights in sight.maps), 0
    summaries, measures, pairs = [], [], []
    for layer, weights in enumerate(sight.maps):
        some: list[HeadSummary] = []
        seen: list[Measured] = []
        for heads in _portions(weights.shape[1], count * sight.S):
            look.reached(stage, done / total)
            alone = Sight({"": weights.select(heads=heads)}, None, sight.ids, queries=count)
            pairs += [pair._replace(layer=layer, head=heads.start + pair.head) for pair in alone.pairs(PAIRS)]
            some += alone.summaries[0]
            seen.append(stretched(measure(alone.looked_at[0]), sight))
            done += heads.stop - heads.start
            yield
        summaries.append(Summary(tuple(some)))
        measures.append(_joined(seen))
    sight.summaries, sight._pairs = tuple(summaries), _strongest(pairs)
    look.show(_written(sight, measures, look.model), count)
    yield


def _portions(heads: int, weights: int) -> list[slice]:
    """Heads of so many weights each, in portions that take a fraction of a second."""
    size = max(1, PORTION // max(1, weights))
    return [slice(start, min(start + size, heads)) for start in range(0, heads, size)]


def _strongest(pairs: list[Pair]) -> list[Pair]:
    """Each pair of words once, the strongest first."""
    found: dict[tuple[int, int], Pair] = {}
    for pair in sorted(pairs, key=lambda pair: -pair.weight):
        found.setdefault((pair.query, pair.key), pair)
    return list(found.values())


def _joined(parts: list[Measured]) -> Measured:
    """The measures of a layer's heads as one."""
    names = ("thumbnails", "entropy", "peak", "distance", "received", "log_sum_exp")
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return dataclasses.replace(parts[0], **joined)


def _written(sight: Sight, measures: list[Measured], title: str) -> bytes:
    found = Data(manifest(sight, title), {})
    add_reach(found, sight)
    for layer, seen in enumerate(measures):
        add_edges(found, sight, layer, seen)
    return json.dumps(found.to_dict(), separators=(",", ":")).encode()
