"""What heads do, in sentences for people who have never seen one."""

from collections.abc import Sequence

from headwise.masks.probes import sink
from headwise.view.result import View
from headwise.view.tokens import cut, shown
from headwise.weights.summary import FIRST_SINK, NEAR, SECOND_SINK, Head, HeadSummary, Trait, second_of

# Where a head of each kind attends. Kinds that are not listed are named as they are.
TARGETS = {
    FIRST_SINK: "to the first token",
    "induction": "to what followed an earlier copy, where there is one",
    "previous-token": "to the previous token",
    "own-token": "to the token itself",
    "next-token": "to the next token",
    "same-token": "to earlier copies of the token, where there are any",
    "delimiter": "to punctuation",
    "fixed-offset": "at one fixed distance",
    "local": f"within {NEAR} tokens",
    "monotone": "along the other text, step by step",
    "one-to-one": "to one key for each token, a different one each time",
    SECOND_SINK: "to one other token, a second sink",
    "broad": "broadly, to the whole text",
}

WHOLE = (FIRST_SINK, SECOND_SINK)  # shares of all attention; others are of what is left without the first token
PAIR = "largest weight, first token aside"  # what `example` gives


def described(head: HeadSummary) -> str:
    """What a head does, to follow its name.

    >>> from headwise.weights.summary import Trait
    >>> described(HeadSummary(2, (Trait("previous-token", 0.67, 0.6),), {}, {}))
    'attends to the previous token (67\\xa0%, first token aside)'
    """
    if not head.traits:
        return "has no single pattern"
    first, *second = head.traits
    more = [f"{second_of(head.traits, '; of the rest, ')}{_share(trait)}{_target(trait)}" for trait in second]
    aside = "" if first.name in WHOLE else ", first token aside"
    return f"attends {_target(first)}{_share(first, f' ({{}}{aside})')}{''.join(more)}"


def _target(trait: Trait) -> str:
    """Where the attention goes."""
    return TARGETS.get(trait.name, f"in the way called {trait.name}")


def _share(trait: Trait, form: str = "{} ") -> str:
    """How much of the attention goes there; an entropy is not a share of attention."""
    return "" if trait.name == "broad" else form.format(f"{trait.share * 100:.0f}\u00a0%")


def example(view: View, head: Head) -> str:
    """The largest weight of a head that is not on the first token, such as “looked” 9 → “captain” 8: 0.92."""
    weights = view.sampled[head.layer].select(heads=[_place(view, head)])
    rest = weights.without(sink(1)).peak()
    largest = (rest.weight * (1 - weights.mass(sink(1))))[0, 0]  # not rescaled: as in the page and in JSON
    row = int(largest.argmax())
    if not largest[row] > 0:
        return ""
    query, key = row if view.queries is None else int(view.queries[row]), int(rest.key[0, 0, row])
    return f"{_quoted(view.labels, query)} → {_quoted(view.key_labels, key)}: {largest[row]:.2f}"


def _place(view: View, head: Head) -> int:
    """The index of a head in its map, which may hold only some heads."""
    return [found.head for found in view.summaries[head.layer]].index(head.head)


def _quoted(labels: Sequence[str], at: int) -> str:
    """A token and its position, which tells it from other copies."""
    return str(at) if labels[at] == str(at) else f"“{cut(shown(labels[at]), 16)}” {at}"
