"""Passages in which the behavior a head is named for was strongest, quoted from the texts that it was surveyed on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.models import TextModel
from headwise.study.survey.result import Survey
from headwise.study.watch import watch
from headwise.view.tokens import readable
from headwise.weights import AttentionMap
from headwise.weights.summary import READINGS, rows_of

MOST = 3  # passages of a head
AROUND = 10  # tokens that are quoted on either side
NUMBER_OF = {name: key for key, name, _ in READINGS}  # by the name of a kind, the number it is judged by


class Passage(NamedTuple):
    """A query, the key it attends to most, and the share of its attention that counts, in a text."""

    share: float
    words: tuple[str, ...]
    query: int
    key: int


def passages(survey: Survey, model: TextModel, windows: Iterable[Sequence[int]]) -> dict[str, list[Passage]]:
    """The best passages of every head that has a name, by its place, such as "4.2"."""
    found: dict[str, list[Passage]] = {}
    kinds = {head.place: head.summary.kind for head in survey.placed if head.summary.kind in NUMBER_OF}
    for ids in windows:
        tokens = torch.tensor([list(ids)], device=model.device)
        words = [readable(text) for text in model.pieces(tokens)]
        with torch.no_grad(), watch(model.module) as seen:
            model.read(tokens)
        for layer, name in enumerate(survey.layers):
            if name in seen:
                for head, passage in _best(seen[name], tokens[0], words, layer, kinds):
                    found.setdefault(f"{layer}.{head}", []).append(passage)
    return {place: sorted(each, key=lambda one: -one.share)[:MOST] for place, each in found.items()}


def _best(
    weights: AttentionMap, ids: Tensor, words: list[str], layer: int, kinds: Mapping[str, str]
) -> Iterator[tuple[int, Passage]]:
    """For each named head of a layer, the query that does most what the head is named for."""
    rest = rows_of(weights, ids)[1]
    for index, head in enumerate(weights._source().axis("head").tolist()):
        number = NUMBER_OF.get(kinds.get(f"{layer}.{head}", ""), "")
        if number in rest.numbers and rest.offset is not None:
            shares = (rest.numbers[number] * rest.choice.counted(number))[0, index]
            query = int(shares.argmax())
            yield head, _quoted(float(shares[query]), words, query, query - int(rest.offset[0, index, query]))


def _quoted(share: float, words: list[str], query: int, key: int) -> Passage:
    """The words around the query, and those around the key if it is far away."""
    first, last = min(query, key), max(query, key)
    if last - first <= 2 * AROUND:
        start = max(0, first - AROUND)
        return Passage(share, tuple(words[start : last + AROUND]), query - start, key - start)
    start, middle = max(0, first - AROUND), last - AROUND
    near = words[start : first + AROUND // 2]
    joined = (*near, " … ", *words[middle : last + AROUND])
    places = {first: first - start, last: len(near) + 1 + last - middle}
    return Passage(share, joined, places[query], places[key])
