"""One run: a text, a model, how far it is, and what has been found so far.

The page of a long text is first made from a few of its queries, then from more, finally from all. A few heads are
measured at a time, so that the work can be stopped, or paused for a request, between them.
"""

import enum
import json
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from headwise.view.data import PageData
from headwise.view.pictures import LayerStatistics
from headwise.view.result import Pair, View
from headwise.view.serve.models import Cancelled, HeadPairs, Outcome
from headwise.weights import AttentionMap
from headwise.weights.summary import HeadSummary, Summary

FIRST = 256  # queries of the first page of a long text
LONG = 1024  # tokens beyond which a text is long
STEPS = (2048,)  # queries of the pages between the first and the last
PAIRS = 20
PORTION = 2**26  # weights that are measured without a pause


class Stage(enum.StrEnum):
    """How far a run is."""

    WAITING = "waiting"
    RUNNING = "running"
    MEASURING = "measuring"
    REFINING = "refining"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self in (Stage.FINISHED, Stage.CANCELLED, Stage.FAILED)


class Run:
    """A text, a model, and what is known about them. One thread works on it, others read it.

    Args:
        model: the name of the model.
        ids: the token ids, (1, T).
        tokens: their text.
        off: pairs of layer and head that are switched off.
        wants_maps: False for the outcome only.
        note: what the user should know about this text and this model.
    """

    def __init__(
        self, model: str, ids: Tensor, tokens: list[str], off: HeadPairs = (), wants_maps: bool = True, note: str = ""
    ) -> None:
        self.id = secrets.token_urlsafe(12)
        self.model, self.ids, self.tokens, self.off = model, ids, tokens, tuple(off)
        self.wants_maps, self.note = wants_maps, note
        self.stage, self.done = Stage.WAITING, 0.0
        self.maps: Mapping[str, AttentionMap] = {}
        self.outcome: Outcome | None = None
        self.with_all_heads: Outcome | None = None
        self.manifest: bytes | None = None
        self.rows = 0  # queries that the manifest was measured from
        self.version = 0  # of the manifest
        self.error: str | None = None
        self.stop = threading.Event()

    @property
    def T(self) -> int:
        """The number of tokens."""
        return int(self.ids.shape[1])

    @property
    def memory(self) -> int:
        """Bytes of its queries and keys."""
        held = {}
        for weights in self.maps.values():
            for tensor in (weights._query, weights._key):
                storage = tensor.untyped_storage()
                held[storage.data_ptr()] = storage.nbytes()
        return sum(held.values())

    def layer(self, index: int) -> AttentionMap:
        """The map of a layer."""
        return list(self.maps.values())[index]

    def reached(self, stage: Stage, done: float = 0.0) -> None:
        """Record progress; raises if the run has been cancelled."""
        if self.stop.is_set():
            raise Cancelled
        self.stage, self.done = stage, done

    def to_dict(self) -> dict[str, Any]:
        """Its state, as plain data."""
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
            "outcome": None if self.outcome is None else self.outcome.to_dict(),
            "with_all_heads": None if self.with_all_heads is None else self.with_all_heads.to_dict(),
            "note": self.note,
            "error": self.error,
        }

    # The page.

    def measure(self) -> None:
        """Make the first page, quickly."""
        for _ in self._page(query_counts(self.T)[0], Stage.MEASURING):
            pass

    def refinements(self) -> Iterator[None]:
        """Make the page again from more queries, a few heads at a time, and finally from all of them."""
        for count in query_counts(self.T)[1:]:
            yield from self._page(count, Stage.REFINING)
        self.reached(Stage.FINISHED, 1.0)

    def _page(self, count: int, stage: Stage) -> Iterator[None]:
        """Measure all heads at `count` queries, then publish the page."""
        view = View(self.maps, self.tokens, self.ids, queries=count)
        total, done = sum(weights.shape[1] for weights in view.maps), 0
        summaries, layers, pairs = [], [], []
        for layer, weights in enumerate(view.maps):
            heads: list[HeadSummary] = []
            parts: list[LayerStatistics] = []
            for portion in _portions(weights.shape[1], count * view.S):
                self.reached(stage, done / total)
                part = View({"": weights.select(heads=portion)}, None, view.ids, queries=count)
                pairs += [pair._replace(layer=layer, head=portion.start + pair.head) for pair in part.pairs(PAIRS)]
                heads += part.summaries[0]
                parts.append(LayerStatistics.of(part.sampled[0]).stretched(view.queries, view.T))
                done += portion.stop - portion.start
                yield
            summaries.append(Summary(tuple(heads)))
            layers.append(LayerStatistics.joined(parts))
        view.summaries, view._pairs = tuple(summaries), _strongest(pairs)
        self._publish(view, layers, count)
        yield

    def _publish(self, view: View, layers: list[LayerStatistics], rows: int) -> None:
        data = PageData(view, self.model)
        for layer, statistics in enumerate(layers):
            data.add_layer(layer, statistics)
        self.manifest = json.dumps(data.to_dict(), separators=(",", ":")).encode()
        self.rows, self.version = rows, self.version + 1


def query_counts(T: int) -> list[int]:
    """The numbers of queries that successive pages are made from."""
    return [T] if T <= LONG else [FIRST, *(count for count in STEPS if 2 * count < T), T]


def _portions(heads: int, weights: int) -> list[slice]:
    """Heads of `weights` weights each, in portions that take a fraction of a second."""
    size = max(1, PORTION // max(1, weights))
    return [slice(start, min(start + size, heads)) for start in range(0, heads, size)]


def _strongest(pairs: list[Pair]) -> list[Pair]:
    """Each pair of tokens once, the strongest first."""
    found: dict[tuple[int, int], Pair] = {}
    for pair in sorted(pairs, key=lambda pair: -pair.weight):
        found.setdefault((pair.query, pair.key), pair)
    return list(found.values())
