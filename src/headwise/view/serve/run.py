"""One look at a text: where it stands, and what has been found so far."""

import dataclasses
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.view.data import Data, add_edges, add_reach, manifest
from headwise.view.pictures import Measured, measure
from headwise.view.result import Pair, Sight
from headwise.view.serve.models import Outcome, Pairs, Stopped
from headwise.weights import AttentionMap
from headwise.weights.summary import HeadSummary, Summary

WAITING, RUNNING, MEASURING, REFINING = "waiting", "running", "measuring", "refining"
FINISHED, CANCELLED, FAILED = "finished", "cancelled", "failed"
ENDED = (FINISHED, CANCELLED, FAILED)


class Look:
    """A text, a model, and what is known of them. One thread works at it, others read.

    Args:
        model: the name of the model.
        ids: the tokens, (1, T).
        tokens: what they stand for.
        off: pairs of layer and head that are silent.
        wants_maps: False for the outcome alone.
        note: what should be known about this text and this model.
    """

    def __init__(
        self, model: str, ids: Tensor, tokens: list[str], off: Pairs = (), wants_maps: bool = True, note: str = ""
    ) -> None:
        self.id = secrets.token_urlsafe(12)
        self.model, self.ids, self.tokens, self.off = model, ids, tokens, tuple(off)
        self.wants_maps, self.note = wants_maps, note
        self.stage, self.done = WAITING, 0.0
        self.maps: Mapping[str, AttentionMap] = {}
        self.outcome: Outcome | None = None
        self.with_all_heads: Outcome | None = None
        self.manifest: bytes | None = None
        self.rows = 0  # queries the manifest was measured from
        self.version = 0  # of the manifest
        self.error: str | None = None
        self.stop = threading.Event()

    @property
    def T(self) -> int:
        """How many tokens there are."""
        return int(self.ids.shape[1])

    @property
    def memory(self) -> int:
        """What its queries and keys take."""
        held = {}
        for weights in self.maps.values():
            for tensor in (weights._query, weights._key):
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())

    def reached(self, stage: str, done: float = 0.0) -> None:
        """Note where it stands; ends the work if nobody wants it any more."""
        if self.stop.is_set():
            raise Stopped
        self.stage, self.done = stage, done

    def show(self, manifest: bytes, rows: int) -> None:
        """Something to see is there, made from so many queries."""
        self.manifest, self.rows, self.version = manifest, rows, self.version + 1

    def layer(self, index: int) -> AttentionMap:
        """The map of a layer."""
        return list(self.maps.values())[index]

    def told(self) -> dict[str, Any]:
        """How it stands, as plain data."""
        return {
            "id": self.id,
            "model": self.model,
            "stage": self.stage,
            "done": round(self.done, 3),
            "tokens": self.T,
            "rows": [self.rows, self.T],
            "ready": self.manifest is not None or (not self.wants_maps and self.outcome is not None),
            "version": self.version,
            "off": [list(pair) for pair in self.off],
            "outcome": _plain(self.outcome),
            "with_all_heads": _plain(self.with_all_heads),
            "note": self.note,
            "error": self.error,
        }


def _plain(outcome: Outcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return outcome._asdict() | {"next": [following._asdict() for following in outcome.next]}


# What a page is shown of a look: first from few of its queries, then from more, in the end from all.

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
