"""What a model's heads do with one text: the maps of all layers, the tokens, and what can be said about them.

Everything that shows heads (terminal, page, notebook) reads this object, so that all show the same numbers.
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
from headwise.view.pictures import Cell, cell
from headwise.weights import AttentionMap
from headwise.weights.summary import READINGS, RESTING, HeadSummary, Summary, Trait

NEAR = sink(1) | offset(0) | previous_token()  # where most heads look most of the time
KINDS = (RESTING, *(name for _, name, _ in READINGS))
WEIGHTS = {RESTING: 0.7, "fixed-offset": 0.7, "local": 0.6, "broad": 0.5}  # how much being so tells of a head


MOST_PAIRS = 32

Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, of: int) -> None:
    """Progress that nobody asked for."""


class Head(NamedTuple):
    """One head of one layer: where it is and what it does."""

    layer: int
    head: int
    summary: HeadSummary

    @property
    def place(self) -> str:
        """Such as "3.5": layer 3, head 5."""
        return f"{self.layer}.{self.head}"

    @property
    def trait(self) -> Trait | None:
        """What tells most about it: beyond what even attention does; being local or broad tells less."""
        return max(self.summary.traits, key=_telling, default=None)

    @property
    def telling(self) -> float:
        """How clearly it does one thing."""
        return 0.0 if self.trait is None else _telling(self.trait)


def _telling(trait: Trait) -> float:
    return WEIGHTS.get(trait.name, 1.0) * trait.beyond


class Pair(NamedTuple):
    """A word that looks and the word it looks at."""

    layer: int
    head: int
    query: int
    key: int
    weight: float


class Sight:
    """What every head does with one text, to print, to save as a page, and to ask; made by `headwise.view`."""

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
            raise OptionError("there is nothing to see: no map is given.")
        self.names = tuple(maps)
        self.maps = tuple(weights.detach() for weights in maps.values())
        shapes = {weights.shape[2:] for weights in self.maps}
        if any(weights.shape[0] != 1 for weights in self.maps) or len(shapes) > 1:
            raise ShapeError(
                f"maps of shapes {[tuple(weights.shape) for weights in self.maps]}: expected one sample, and as many "
                f"queries and keys in every layer. Take one sample with weights.select(batch=[0]), or some layers "
                f"with view(..., layers=...)."
            )
        self.T, self.S = self.maps[0].shape[2:]
        self.tokens = _words(tokens, self.T, "tokens")
        self.keys = self.tokens if keys is None and self.S == self.T else _words(keys, self.S, "keys")
        self.ids = None if ids is None else torch.as_tensor(ids).flatten()
        self.queries, self.progress = _spread(self.T, queries), progress

    @property
    def looked_at(self) -> tuple[AttentionMap, ...]:
        """The maps that numbers and small pictures are taken from: all queries, or some of them, evenly spread."""
        if self.queries is None:
            return self.maps
        return tuple(weights.select(rows=self.queries) for weights in self.maps)

    @functools.cached_property
    def summaries(self) -> tuple[Summary, ...]:
        """What each head does, layer by layer."""
        ids = self.ids if self.ids is not None and len(self.ids) == self.S else None
        found = []
        for done, weights in enumerate(self.looked_at, 1):
            found.append(weights.summary(ids))
            self.progress("counting", done, len(self.maps))
        return tuple(found)

    @property
    def heads(self) -> list[Head]:
        """All heads in order."""
        return [Head(i, head.head, head) for i, summary in enumerate(self.summaries) for head in summary]

    def telling(self, most: int = 5) -> list[Head]:
        """The heads that do one thing most clearly: first one of every kind, then the others, those of no kind last."""
        return most_telling(self.heads, most)

    @property
    def counts(self) -> dict[str, int]:
        """How many heads there are of each kind; one that rests on the first token and else does something is both."""
        return counted(self.heads)

    @property
    def sentence(self) -> str:
        """All of it in one line of numbers."""
        heads = sorted({weights.shape[1] for weights in self.maps})
        size = f"{_count(len(self.maps), 'layer')} × {' or '.join(map(str, heads))} head{'s' * (heads != [1])}"
        size += f" · {_count(self.T, 'token')}"
        size += f" looking at {self.S:,}" if self.S != self.T else ""
        size += "" if self.queries is None else f" · numbers from {len(self.queries):,} of them"
        return " · ".join([size, *told_kinds(self.counts), "weights, not importance"])

    def pairs(self, most: int = 8) -> list[Pair]:
        """The `most` strongest looks further back: not at the first token, itself or the one before; each once."""
        return self._pairs[:most]

    @functools.cached_property
    def _pairs(self) -> list[Pair]:
        """The strongest of every layer, together."""
        best: dict[tuple[int, int], Pair] = {}
        for layer, weights in enumerate(self.looked_at):
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
        """Every layer's heads as small pictures (H, rows, cols) whose rows sum to 1."""
        return [weights.pooled(rows, cols)[0] for weights in self.looked_at]

    def cell(self, layer: int, head: int, query: int, key: int) -> Cell:
        """The weight of a `layer` and `head` from a `query` to a `key`, with its logit, its rank in the row and how
        many keys the query sees."""
        return cell(self.maps[layer], head, query, key)

    def to_dict(self) -> dict[str, Any]:
        """All numbers as plain data."""
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
        """The heads of one `layer` as matplotlib axes, with the words beside them.

        `head` and `options` as in `AttentionMap.plot`.
        """
        return self.maps[layer].plot(head, **{"tokens": self.tokens, "keys": self.keys, **options})

    def _repr_html_(self) -> str:
        from headwise.view.notebook import sight_html

        return sight_html(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """For notebooks, and for those that show no HTML."""
        return {"text/html": self._repr_html_(), "text/plain": str(self)}

    def save(
        self, path: str | Path, *, against: "Sight | None" = None, budget: int | None = None, title: str = ""
    ) -> Path:
        """Write one HTML file that shows all of it and needs nothing else; what was there stays if that fails.

        Args:
            path: where to.
            against: another sight to compare with: of another text, or of another model.
            budget: bytes the file may take, 5 MB unless given; what does not fit is left out, and the page says so.
            title: what to call it.
        """
        from headwise.view.page import standalone

        path = Path(path)
        page = standalone(self, against=against, budget=budget, title=title)
        atomically(path, lambda beside: beside.write_text(page, encoding="utf-8"))
        return path

    def __repr__(self) -> str:
        return f"Sight({len(self.maps)} layers, {self.T} tokens): print(sight) shows it"

    def __str__(self) -> str:
        from headwise.view.color import Palette
        from headwise.view.terminal import drawn

        return drawn(self, 80, Palette(0))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def most_telling(heads: Sequence[Head], most: int) -> list[Head]:
    """The heads that do one thing most clearly: first one of every kind, then the others, those of no kind last."""
    order = sorted(heads, key=lambda head: -head.telling)
    first = {head.summary.kind: head for head in reversed(order) if head.trait}
    return sorted(order, key=lambda head: first.get(head.summary.kind) is not head)[:most]


def counted(heads: Sequence[Head]) -> dict[str, int]:
    """How many heads there are of each kind; one that rests on the first token and else does something is both."""
    names = [trait.name for head in heads for trait in head.summary.traits]
    return {kind: names.count(kind) for kind in KINDS}


def told_kinds(counts: Mapping[str, int]) -> list[str]:
    """The kinds there are, in words."""
    told = [f"{counts[KINDS[0]]} rest on the first token"] if counts[KINDS[0]] else []
    return told + [f"{counts[kind]} {kind}" for kind in KINDS[1:] if counts[kind]]


def _words(tokens: Sequence[str] | None, count: int, name: str) -> list[str]:
    """The tokens as text; their numbers where there is none."""
    if tokens is None:
        return [str(i) for i in range(count)]
    if isinstance(tokens, str) or len(tokens) != count:
        raise ShapeError(f"{name}: {len(tokens)} are given and the maps have {count}; expected one text per token.")
    return [str(token) for token in tokens]


def _spread(T: int, queries: int | None) -> Tensor | None:
    """So many of T queries, evenly spread, the last among them; None for all."""
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
