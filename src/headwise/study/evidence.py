"""`evidence`: for every head, the passages of a corpus where it was strongest, with their text; exact and mergeable.

>>> from headwise import evidence, load_builtin
>>> model = load_builtin()
>>> found = evidence(model, ["The captain looked at the sea.", "The sea looked at the captain."], count=1)
>>> row = found.of("blocks.4.attention", 2)[0]
>>> 0 <= row["score"] <= 1 and "[" in row["text"]
True

A number says that a head does something; the places where it is largest show what. Any statistic of a map that gives
one number per query will do: the largest weight, the mass on a probe, or one of the map by value. Parts of a corpus can
be read anywhere: `a + b` is what one reading of both would have found.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.models.text_model import TextModel
from headwise.shapes import check_size
from headwise.study.outputs import HeadOutputs
from headwise.study.watch import watch

CONTEXT = 8  # tokens shown before and after the query
Statistic = Callable[[HeadOutputs, Tensor], Tensor]


def largest_weight(layer: HeadOutputs, tokens: Tensor) -> Tensor:
    """The largest attention weight of every query, the first token excluded as a key, (B, H, T)."""
    from headwise.masks.probes import sink

    whole = layer.weights.detach()
    return whole.without(sink(1)).peak().weight * (1 - whole.mass(sink(1)))


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """The places where each head was strongest, largest first.

    count: how many places are kept for each head.
    places: by layer and head: document, query, score, and the text around the query.
    """

    count: int
    places: dict[tuple[str, int], list[dict[str, Any]]]

    def of(self, layer: str, head: int) -> list[dict[str, Any]]:
        """The places of one `head` of a `layer`."""
        if (layer, head) not in self.places:
            raise OptionError(
                f"of({layer!r}, {head}): there is no such head; layers are {sorted({n for n, _ in self.places})}."
            )
        return self.places[layer, head]

    def __add__(self, other: "Evidence") -> "Evidence":
        """What one reading of both parts of a corpus would have found; documents need different numbers."""
        if self.count != other.count:
            raise OptionError(f"evidence of {self.count} and of {other.count} places cannot be added.")
        both = {**self.places, **other.places}
        merged = {key: _first(self.places.get(key, []) + other.places.get(key, []), self.count) for key in both}
        return Evidence(self.count, merged)

    def table(self, layer: str, head: int) -> str:
        """The places of one `head` of a `layer`, as text; the query's token is in brackets."""
        return "\n".join(f"{row['score']:.3f}  {row['text']}" for row in self.of(layer, head))

    def to_json(self) -> list[dict[str, Any]]:
        """One object per place."""
        return [{"layer": name, "head": head, **row} for (name, head), rows in self.places.items() for row in rows]


def evidence(
    model: TextModel,
    texts: Iterable[str] | Mapping[int, str],
    statistic: Statistic = largest_weight,
    *,
    count: int = 5,
) -> Evidence:
    """For every head, the queries of a corpus with the largest score.

    Args:
        model: a model with its tokenizer, from `headwise.models.open_model`.
        texts: documents, numbered from 0; or documents by number, for a part of a corpus.
        statistic: a function of a layer's `HeadOutputs` and the tokens (1, T) to scores (1, H, T), such as
            `lambda layer, tokens: layer.by_value().mass(induction(tokens))`; by default the largest weight, the first
            token excluded.
        count: places to keep for each head.
    """
    if not isinstance(model, TextModel):
        raise OptionError(
            f"evidence({type(model).__name__}): expected a model with its tokenizer, from open_model(...)."
        )
    if isinstance(texts, str):
        raise OptionError("evidence(texts=...): one text is given; expected several. Pass [text].")
    kept = Evidence(check_size("count", count), {})
    numbered = texts.items() if isinstance(texts, Mapping) else enumerate(texts)
    for number, text in numbered:
        tokens = model.tokens(text).to(model.device)
        with torch.no_grad(), watch(model.module, outputs=True) as seen:
            model.read(tokens)
        kept = kept + Evidence(count, dict(_places(model, seen.outputs, statistic, tokens, number, count)))
    return kept


def _places(
    model: TextModel, outputs: Mapping[str, HeadOutputs], statistic: Statistic, tokens: Tensor, number: int, count: int
) -> Iterable[tuple[tuple[str, int], list[dict[str, Any]]]]:
    """The strongest places of one document, by layer and head."""
    characters = model.codec.characters(tokens.flatten().tolist())
    for name, layer in outputs.items():
        with torch.no_grad():
            scores = statistic(layer, tokens)
        expected = (1, *layer.shape[1:3])
        if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise OptionError(
                f"evidence: the statistic gave {shape}; expected one score per query, (1, H, T) = {expected}."
            )
        order = scores[0].sort(dim=1, descending=True, stable=True)
        for head in range(layer.shape[1]):
            places = zip(order.values[head, :count].tolist(), order.indices[head, :count].tolist(), strict=True)
            yield (
                (name, head),
                [
                    {"document": number, "query": query, "score": score, "text": _around(characters, query)}
                    for score, query in places
                ],
            )


def _around(characters: list[tuple[str, int]], query: int) -> str:
    """The text around a query, whose token is in brackets; a character of several tokens is there once."""
    own, start = characters[query]
    shown = characters[max(0, query - CONTEXT) : query + 1 + CONTEXT]
    words = {place: text for text, place in shown}
    before, after = (
        "".join(text for place, text in words.items() if place < start),
        "".join(text for place, text in words.items() if place > start),
    )
    return " ".join(f"{before}[{own}]{after}".split())


def _first(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The rows with the largest scores; of equal ones, the first in the corpus, in whatever order parts are merged."""
    return sorted(rows, key=lambda row: (-row["score"], row["document"], row["query"]))[:count]
