"""`View`: what the heads of a model do with one text, from the attention maps of all layers and the tokens.

Terminal, page and notebook all read this object, so they show the same numbers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.masks.probes import offset, previous_token, sink
from headwise.models.files import atomically
from headwise.shapes import check_size
from headwise.study.heads import Head, kind_counts, kinds_in_words, most_telling
from headwise.view.pictures import Cell, cell
from headwise.weights import AttentionMap
from headwise.weights.summary import Summary

NEAR = sink(1) | offset(0) | previous_token()  # where most heads put most of their weight
MOST_PAIRS = 32  # kept; `pairs` returns the first of them

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, of: int) -> None:
    """Report no progress."""


class Pair(NamedTuple):
    """A query token, a key token, and the weight between them in one head."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


class View:
    """What every head does with one text: print it, save it as a page, or query it; made by `headwise.view`."""

    def __init__(
        self,
        maps: Mapping[str, AttentionMap],
        tokens: Sequence[str] | None = None,
        ids: Tensor | None = None,
        keys: Sequence[str] | None = None,
        *,
        queries: int | None = None,
        progress: Progress = silent,
    ) -> None:
        if not maps:
            raise OptionError("there is nothing to view: no attention map was given.")
        self.names = tuple(maps)
        self.maps = tuple(weights.detach() for weights in maps.values())
        shapes = {weights.shape[2:] for weights in self.maps}
        if any(weights.shape[0] != 1 for weights in self.maps) or len(shapes) > 1:
            raise ShapeError(
                f"maps of shapes {[tuple(weights.shape) for weights in self.maps]}: expected one sample, and the same "
                f"number of queries and keys in every layer. Take one sample with weights.select(batch=[0]), or some "
                f"layers with view(..., layers=...)."
            )
        self.T, self.S = self.maps[0].shape[2:]
        self.tokens = _words(tokens, self.T, "tokens")
        self.keys = self.tokens if keys is None and self.S == self.T else _words(keys, self.S, "keys")
        self.ids = None if ids is None else torch.as_tensor(ids).flatten()
        self.queries, self.progress = _spread(self.T, queries), progress

    @property
    def sampled(self) -> tuple[AttentionMap, ...]:
        """The maps behind numbers and small pictures: of all queries, or of an evenly spaced sample of them."""
        if self.queries is None:
            return self.maps
        return tuple(weights.select(rows=self.queries) for weights in self.maps)

    @functools.cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """What each head does, layer by layer."""
        ids = self.ids if self.ids is not None and len(self.ids) == self.S else None
        found = []
        for done, weights in enumerate(self.sampled, 1):
            found.append(weights.summary(ids))
            self.progress("counting", done, len(self.maps))
        return tuple(found)

    @property
    def heads(self) -> list[Head]:
        """All heads, layer by layer."""
        return [Head(i, head.head, head) for i, summary in enumerate(self.summaries) for head in summary]

    def telling(self, most: int = 5) -> list[Head]:
        """The `most` heads that do one thing most clearly: first one of each kind, then the rest."""
        return most_telling(self.heads, most)

    @property
    def counts(self) -> dict[str, int]:
        """The number of heads of each kind; a head may attend mostly to the first token and also be of another kind."""
        return kind_counts(self.heads)

    @property
    def sentence(self) -> str:
        """A one-line summary: the size of the model and the text, and the number of heads of each kind."""
        heads = sorted({weights.shape[1] for weights in self.maps})
        size = f"{_count(len(self.maps), 'layer')} × {' or '.join(map(str, heads))} head{'s' * (heads != [1])}"
        size += f" · {_count(self.T, 'token')}"
        size += f" attending to {self.S:,}" if self.S != self.T else ""
        size += "" if self.queries is None else f" · numbers from {len(self.queries):,} of these queries"
        return " · ".join([size, *kinds_in_words(self.counts), "attention is not importance"])

    def pairs(self, most: int = 8) -> list[Pair]:
        """The `most` largest weights, except on the first token, itself and the previous one; each pair once."""
        return self._pairs[:most]

    @functools.cached_property
    def _pairs(self) -> list[Pair]:
        """The largest weights of all layers."""
        best: dict[tuple[int, int], Pair] = {}
        for layer, weights in enumerate(self.sampled):
            elsewhere = weights.without(NEAR)
            peak = elsewhere.panel(peak=True).peak
            assert peak is not None  # noqa: S101 - asked for
            scale = 1 - weights.mass(NEAR)
            for head, row, key, weight in _largest(peak.weight[0] * scale[0], peak.key[0], 4 * MOST_PAIRS):
                query = row if self.queries is None else int(self.queries[row])
                known = best.get((query, key))
                if weight > 0 and (known is None or weight > known.weight):
                    best[query, key] = Pair(layer, head, query, key, weight)
            self.progress("pairing", layer + 1, len(self.maps))
        return sorted(best.values(), key=lambda pair: -pair.weight)[:MOST_PAIRS]

    def pictures(self, rows: int, cols: int) -> list[Tensor]:
        """Small pictures (H, rows, cols) of the heads of every layer; picture rows sum to 1."""
        return [weights.pooled(rows, cols)[0] for weights in self.sampled]

    def cell(self, layer: int, head: int, query: int, key: int) -> Cell:
        """One weight, of a `query` and a `key` in a `layer` and `head`: its size, logit and rank in the row, and how
        many keys the query sees."""
        return cell(self.maps[layer], head, query, key)

    def check_place(self, layer: int, head: int | None = None) -> None:
        """Refuse a `layer`, or a `head` of it, that does not exist."""
        if not 0 <= layer < len(self.maps):
            raise OptionError(f"layer {layer}: the model has {len(self.maps)}, 0 to {len(self.maps) - 1}.")
        heads = self.maps[layer].shape[1]
        if head is not None and not 0 <= head < heads:
            raise OptionError(f"head {layer}.{head}: layer {layer} has {heads} heads, 0 to {heads - 1}.")

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data, ready for JSON."""
        return {
            "sentence": self.sentence,
            "tokens": self.tokens,
            "queries": None if self.queries is None else self.queries.tolist(),
            "layers": [
                {
                    "name": name,
                    "heads": [
                        {"head": head.head, "reading": head.reading, "numbers": head.numbers, "apart": head.apart}
                        for head in summary
                    ],
                }
                for name, summary in zip(self.names, self.summaries, strict=True)
            ],
            "pairs": [pair._asdict() for pair in self.pairs()],
        }

    def plot(self, layer: int, head: int | Sequence[int] | None = None, **options: Any) -> Any:
        """The heads of one `layer` as matplotlib axes, labelled with the tokens.

        `head` and `options` as in `AttentionMap.plot`.
        """
        return self.maps[layer].plot(head, **{"tokens": self.tokens, "keys": self.keys, **options})

    def _repr_html_(self) -> str:
        from headwise.view.notebook import view_html

        return view_html(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """HTML for notebooks, and plain text for those that do not show HTML."""
        return {"text/html": self._repr_html_(), "text/plain": str(self)}

    def save(
        self, path: str | Path, *, against: "View | None" = None, budget: int | None = None, title: str = ""
    ) -> Path:
        """Write one self-contained HTML file; an existing file is kept if writing fails.

        Args:
            path: where to write it.
            against: another view to compare with, of another text or another model.
            budget: the largest file size in bytes, 5 MB by default; the page says what did not fit.
            title: the title of the page.
        """
        from headwise.view.page import standalone

        path = Path(path)
        page = standalone(self, against=against, budget=budget, title=title)
        atomically(path, lambda beside: beside.write_text(page, encoding="utf-8"))
        return path

    def __repr__(self) -> str:
        return f"View({len(self.maps)} layers, {self.T} tokens): print it to see the heads"

    def __str__(self) -> str:
        from headwise.view.color import Palette
        from headwise.view.terminal import drawn

        return drawn(self, 80, Palette(0))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _words(tokens: Sequence[str] | None, count: int, name: str) -> list[str]:
    """The tokens as text; their positions if no text is given."""
    if tokens is None:
        return [str(i) for i in range(count)]
    if isinstance(tokens, str) or len(tokens) != count:
        raise ShapeError(f"{name}: {len(tokens)} given, but the maps have {count}; expected one string per token.")
    return [str(token) for token in tokens]


def _spread(T: int, queries: int | None) -> Tensor | None:
    """Evenly spaced positions of so many of T queries, including the last; None for all."""
    if queries is None or check_size("queries", queries) >= T:
        return None
    return (torch.arange(1, queries + 1) * T) // queries - 1


def _largest(weights: Tensor, keys: Tensor, most: int) -> list[tuple[int, int, int, float]]:
    """Head, query, key and weight of the largest entries (H, T)."""
    values, places = weights.flatten().topk(min(most, weights.numel()))
    T = weights.shape[1]
    chosen = keys.flatten()[places]
    rows = zip(places.tolist(), chosen.tolist(), values.tolist(), strict=True)
    return [(place // T, place % T, key, value) for place, key, value in rows]
