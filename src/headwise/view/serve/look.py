"""One look at a text: where it stands, and what has been found so far."""

import secrets
import threading
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headwise.view.serve.outcomes import Outcome
from headwise.view.serve.running import Pairs, Stopped
from headwise.weights import AttentionMap

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
