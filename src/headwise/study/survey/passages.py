"""Evidence: for every head and number, the passages of the corpus in which the head was strongest.

Every query of the corpus is considered. What is kept is small: a few passages for each head and number, best first. Of
equal scores the first in the corpus wins, and a passage that occurs several times counts once. So passages can be
merged like sums: in any order and grouping, the result is that of the whole corpus.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.models.text_model import MOST_PARTS, TokenCodec

AROUND = 10  # tokens that are quoted on either side
GAP = " … "  # between two parts of a text
MORE = 4  # times as many candidates as passages are looked at first, since some may be copies of others
Key = tuple[str, int, str]  # layer, head, and the name of the number


class Passage(NamedTuple):
    """A query that did most of something, the key that it attends to most, and the text around them.

    score: the number of this query; for the numbers of a summary, the weight on the keys that count, the first token
        excluded; for "entropy", how many keys the rest is spread over.
    weight: the weight on the key.
    file, line: the document.
    unit, window: which window of the file, counted from 0: windows are numbered within units of work.
    query, key: their places in the window, counted from 0.
    words: the text of the quoted tokens; that of a character is with the first of its tokens, and the others are empty.
    tokens: their ids; -1 for a gap.
    marks: the places of query and key among the words.
    """

    score: float
    weight: float
    file: str
    line: int | None
    unit: int
    window: int
    query: int
    key: int
    words: tuple[str, ...]
    tokens: tuple[int, ...]
    marks: tuple[int, int]

    @property
    def place(self) -> str:
        """Such as "corpus.jsonl:17"."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    @property
    def text(self) -> str:
        """The words, with the query in [brackets] and the key in {braces}."""
        query, key = self.characters
        words = list(self.words)
        words[key] = f"{{{words[key]}}}"
        words[query] = f"[{words[query]}]"
        return "".join(words)

    @property
    def characters(self) -> tuple[int, int]:
        """The places of the words that hold the text of query and key."""
        query, key = (next((i for i in range(mark, 0, -1) if self.words[i]), 0) for mark in self.marks)
        return query, key

    @property
    def order(self) -> tuple[object, ...]:
        """The best first; of equal ones, the first in the corpus. Texts in memory may share a place, so all counts."""
        return -self.score, self.file, self.unit, self.window, self.query, self.line or 0, *self[1:2], *self[7:]

    @property
    def copy_of(self) -> tuple[object, ...]:
        """Equal for passages that say the same."""
        return self.tokens, self.marks


class Passages:
    """The best passages for every head and number, at most `most` for each."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.best: dict[Key, list[Passage]] = {}

    def add(self, key: Key, passage: Passage) -> None:
        """Keep a passage if it is among the best."""
        kept = self.best.setdefault(key, [])
        same = next((each for each in kept if each.copy_of == passage.copy_of), None)
        if same is not None:
            if same.order <= passage.order:
                return
            kept.remove(same)
        kept.append(passage)
        kept.sort(key=lambda each: each.order)
        del kept[self.most :]

    def merge(self, other: "Passages") -> None:
        """Add the passages of another part of the corpus."""
        self.most = max(self.most, other.most)
        for key, passages in other.best.items():
            for passage in passages:
                self.add(key, passage)

    def floor(self, key: Key) -> float:
        """The score that a passage must reach to be kept."""
        kept = self.best.get(key, ())
        return -math.inf if len(kept) < self.most or not kept else kept[-1].score

    def of(self, layer: str, head: int, number: str) -> list[Passage]:
        """The passages of one head and number, the best first."""
        return self.best.get((layer, head, number), [])

    def to_rows(self) -> list[dict[str, Any]]:
        """One dictionary per passage; equal passages give equal rows."""
        return [
            {"layer": layer, "head": head, "number": number, **passage._asdict()}
            for (layer, head, number), passages in sorted(self.best.items())
            for passage in passages
        ]

    @classmethod
    def from_rows(cls, rows: Iterable[dict[str, Any]], most: int) -> "Passages":
        """The passages that `to_rows` described."""
        found = cls(most)
        for row in rows:
            fields = {name: row[name] for name in Passage._fields}
            lists = {name: tuple(fields[name]) for name in ("words", "tokens", "marks")}
            found.best.setdefault((row["layer"], row["head"], row["number"]), []).append(Passage(**(fields | lists)))
        return found


# Quoting ------------------------------------------------------------------------------------------------------------


class QuotePart(NamedTuple):
    """Some tokens of a window: of the text of the keys or of that of the queries, the same text in most models."""

    of_keys: bool
    start: int
    stop: int


class Quote(NamedTuple):
    """What to quote of a window, and the places of the query and the key among the quoted words."""

    parts: tuple[QuotePart, ...]
    marks: tuple[int, int]

    @classmethod
    def of(cls, query: int, key: int, keys: int, *, cross: bool) -> "Quote":
        """The text around a query and its key: two parts if they are far apart, or in two texts.

        Args:
            query: a place in the window.
            key: the same; in cross-attention, in the other text, which is quoted first.
            keys: how many there are.
            cross: whether there are two texts.
        """
        first, last = (key, query) if cross or key <= query else (query, key)
        if not cross and last - first <= 2 * AROUND:
            start = max(0, first - AROUND)
            return cls((QuotePart(False, start, last + AROUND + 1),), (query - start, key - start))
        start, other = max(0, first - AROUND), max(0, last - AROUND)
        parts = (
            QuotePart(cross, start, min(first + AROUND // 2 + 1, keys)),
            QuotePart(False, other, last + AROUND + 1),
        )
        near, far = first - start, parts[0].stop - start + 1 + last - other
        return cls(parts, (far, near) if first == key else (near, far))

    def tokens(self, window: "WindowTexts") -> tuple[int, ...]:
        """The ids of the quoted tokens."""
        return tuple(_joined(([window.of(part)[part.start : part.stop] for part in self.parts]), -1))

    def words(self, window: "WindowTexts", codec: TokenCodec) -> tuple[str, ...]:
        """The quoted words. A few more tokens are decoded, so that characters at the edges are whole."""
        found = []
        for part in self.parts:
            start = max(0, part.start - MOST_PARTS)
            words = codec.characters(window.of(part)[start : part.stop + MOST_PARTS])
            quoted = words[part.start - start : part.stop - start]
            before = [None, *(at for _, at in quoted)]
            found.append([text if at != last else "" for (text, at), last in zip(quoted, before, strict=False)])
        return tuple(_joined(found, GAP))


class WindowTexts(NamedTuple):
    """The tokens of a window that its queries stand for, and those of its keys."""

    queries: Sequence[int]
    keys: Sequence[int]

    def of(self, part: QuotePart) -> Sequence[int]:
        """The text that a part is from."""
        return self.keys if part.of_keys else self.queries


def _joined(parts: Sequence[Sequence[Any]], gap: Any) -> Iterator[Any]:
    for number, part in enumerate(parts):
        if number:
            yield gap
        yield from part


@functools.lru_cache(4)
def remembering(codec: TokenCodec) -> TokenCodec:
    """The codec, which decodes each token only once."""
    return dataclasses.replace(codec, decode=functools.lru_cache(2**16)(codec.decode))


# Finding ------------------------------------------------------------------------------------------------------------


class StrongQuery(NamedTuple):
    """A query of a batch of windows that did most of something."""

    score: float
    weight: float
    window: int  # in the batch
    query: int
    key: int
    quote: Quote
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Ranking:
    """The queries of a batch, ranked by a number.

    Args:
        scores: (B, H, T).
        counted: which queries count, (B, H, T).
        key: what they attend to most, (B, H, T).
        weight: how much, (B, H, T).
        texts: of every window.
        cross: whether queries and keys are of two texts.
    """

    scores: Tensor
    counted: Tensor
    key: Tensor
    weight: Tensor
    texts: Sequence[WindowTexts]
    cross: bool

    def best(self, most: int, floors: Sequence[float]) -> list[list[StrongQuery]]:
        """For every head, its `most` best queries in different passages, the best first.

        Args:
            most: how many.
            floors: for every head, the score that they must reach.
        """
        B, H, T = self.scores.shape
        ranks = _ranks(self.scores, self.counted)  # (H, B·T), all different
        count = min(MORE * most, B * T)
        found = self._different(ranks, range(H), most, count, floors)
        short = [head for head, candidates in enumerate(found) if candidates is None]
        if short:  # so many copies that all queries of these heads must be looked at
            more = self._different(ranks, short, most, B * T, [floors[head] for head in short])
            found = [each if each is not None else more.pop(0) for each in found]
        return [each or [] for each in found]

    def _different(
        self, ranks: Tensor, heads: Sequence[int], most: int, count: int, floors: Sequence[float]
    ) -> list[list[StrongQuery] | None]:
        """For some heads, the best queries whose quotes differ; None if the `count` best are too few to tell."""
        B, _, T = self.scores.shape
        chosen = torch.tensor(heads, dtype=torch.long, device=ranks.device)
        place = ranks[chosen].topk(count).indices  # (heads, count)

        def at(numbers: Tensor) -> list[list[Any]]:
            found: list[list[Any]] = numbers.transpose(0, 1).flatten(1)[chosen[:, None], place].tolist()
            return found

        columns = (at(self.counted), at(self.scores.float()), at(self.weight), place.tolist(), at(self.key))
        found: list[list[StrongQuery] | None] = []
        for *rows, floor in zip(*columns, floors, strict=True):
            different: dict[object, StrongQuery] = {}
            for counts, score, weight, index, key in zip(*rows, strict=True):
                if len(different) == most or not counts or score < floor:
                    break
                each = self._candidate(score, weight, index // T, index % T, key)
                different.setdefault((each.tokens, each.quote.marks), each)
            else:
                found.append(list(different.values()) if len(different) == most or count == B * T else None)
                continue
            found.append(list(different.values()))
        return found

    def _candidate(self, score: float, weight: float, window: int, query: int, key: int) -> StrongQuery:
        text = self.texts[window]
        quote = Quote.of(query, key, len(text.keys), cross=self.cross)
        return StrongQuery(score, weight, window, query, key, quote, quote.tokens(text))


def _ranks(scores: Tensor, counted: Tensor) -> Tensor:
    """Integers (H, B·T) in the order of the scores; of equal ones the first is larger. What does not count is last.

    A number of 32 bits is ordered like its bits, those of a negative number being reversed; the place fills the rest.
    """
    bits = scores.float().add(0.0).view(torch.int32).long()  # adding 0 makes -0 equal to 0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).masked_fill(~counted, -(2**31))
    flat = ordered.transpose(0, 1).flatten(1)
    return (flat << 32) + torch.arange(flat.shape[1] - 1, -1, -1, device=flat.device)
