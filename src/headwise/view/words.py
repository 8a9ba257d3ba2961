"""What heads do, in sentences for people who have never seen one."""

from headwise.masks.probes import sink
from headwise.view.result import View
from headwise.view.tokens import cut, shown
from headwise.weights.summary import FIRST_SINK, Head, HeadSummary, Trait

# Where a head of each kind attends. Kinds that are not listed are named as they are.
TARGETS = {
    FIRST_SINK: "to the first token",
    "induction": "to what followed an earlier copy of the token",
    "previous-token": "to the previous token",
    "own-token": "to the token itself",
    "next-token": "to the next token",
    "same-token": "to earlier copies of the token",
    "delimiter": "to punctuation",
    "fixed-offset": "at one fixed distance",
    "local": "to the last few tokens",
    "monotone": "along the other text, step by step",
    "one-to-one": "to one key for each token, a different one each time",
    "second sink": "to one ordinary word",
    "broad": "broadly, to the whole text",
}


def described(head: HeadSummary) -> str:
    """What a head does, to follow its name.

    >>> from headwise.weights.summary import Trait
    >>> described(HeadSummary(2, (Trait("previous-token", 0.67, 0.6),), {}, {}))
    'attends to the previous token (67\\xa0%)'
    """
    if not head.traits:
        return "has no single pattern"
    return "attends " + ", otherwise ".join(map(_target, head.traits))


def _target(trait: Trait) -> str:
    """Where the attention goes, and how much of it; an entropy is not a share of attention."""
    target = TARGETS.get(trait.name, f"in the way called {trait.name}")
    return target if trait.name == "broad" else f"{target} ({trait.share * 100:.0f}\u00a0%)"


def example(view: View, head: Head) -> str:
    """The strongest pair of a head, without the first token, such as “looked” → “captain” 0.92."""
    weights = view.sampled[head.layer].select(heads=[_place(view, head)])
    rest = weights.without(sink(1)).peak()
    largest = (rest.weight * (1 - weights.mass(sink(1))))[0, 0]
    row = int(largest.argmax())
    if not largest[row] > 0:
        return ""
    query, key = row if view.queries is None else int(view.queries[row]), int(rest.key[0, 0, row])
    return f"{_quoted(view.labels[query])} → {_quoted(view.key_labels[key])} {largest[row]:.2f}"


def _place(view: View, head: Head) -> int:
    """The index of a head in its map, which may hold only some heads."""
    return [found.head for found in view.summaries[head.layer]].index(head.head)


def _quoted(token: str) -> str:
    return f"“{cut(shown(token), 16)}”"
