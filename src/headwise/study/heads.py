"""The heads of a whole model: where each is, what it does, and which do one thing most clearly."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headwise.weights.summary import READINGS, RESTING, HeadSummary, Trait

KINDS = (RESTING, *(name for _, name, _ in READINGS))
# How much a kind says about a head; 1 unless listed.
WEIGHTS = {RESTING: 0.7, "fixed-offset": 0.7, "local": 0.6, "broad": 0.5}


class Head(NamedTuple):
    """One head of one layer, and the summary of what it does."""

    layer: int
    head: int
    summary: HeadSummary

    @property
    def place(self) -> str:
        """Such as "3.5": layer 3, head 5."""
        return f"{self.layer}.{self.head}"

    @property
    def trait(self) -> Trait | None:
        """The trait that says most about the head; being local or broad says less than others."""
        return max(self.summary.traits, key=_telling, default=None)

    @property
    def telling(self) -> float:
        """How clearly the head does one thing."""
        return 0.0 if self.trait is None else _telling(self.trait)


def _telling(trait: Trait) -> float:
    return WEIGHTS.get(trait.name, 1.0) * trait.beyond


def most_telling(heads: Sequence[Head], most: int) -> list[Head]:
    """The heads that do one thing most clearly: first one of each kind, then the others; heads of no kind last."""
    order = sorted(heads, key=lambda head: -head.telling)
    first = {head.summary.kind: head for head in reversed(order) if head.trait}
    return sorted(order, key=lambda head: first.get(head.summary.kind) is not head)[:most]


def kind_counts(heads: Sequence[Head]) -> dict[str, int]:
    """How many heads there are of each kind; a head that also attends to the first token counts as both."""
    names = [trait.name for head in heads for trait in head.summary.traits]
    return {kind: names.count(kind) for kind in KINDS}


def kinds_in_words(counts: Mapping[str, int]) -> list[str]:
    """The kinds that occur, such as "3 heads attend mostly to the first token", "2 induction"."""
    sinks = counts[RESTING]
    attend = "head attends" if sinks == 1 else "heads attend"
    words = [f"{sinks} {attend} mostly to the first token"] if sinks else []
    return words + [f"{counts[kind]} {kind}" for kind in KINDS[1:] if counts[kind]]
