"""What heads do, in sentences for people who have never seen one."""

from headwise.view.result import View
from headwise.view.tokens import cut, shown
from headwise.weights.summary import RESTING, Head, HeadSummary

# What a head of each kind does. Kinds that are not listed are named as they are.
ACTIONS = {
    RESTING: "attends to the first token",
    "induction": "finds an earlier copy of the word and attends to what followed it",
    "previous-token": "attends to the previous token",
    "own-token": "attends to the token itself",
    "next-token": "attends to the next token",
    "same-token": "attends to earlier copies of the word",
    "delimiter": "attends to punctuation",
    "fixed-offset": "attends at a fixed distance",
    "local": "attends to the last few tokens",
    "broad": "spreads its attention over the whole text",
}


def described(head: HeadSummary) -> str:
    """One sentence about a head.

    >>> from headwise.weights.summary import Trait
    >>> described(HeadSummary(2, (Trait("previous-token", 0.67, 0.6),), {}, {}))
    'attends to the previous token (67 % of its attention)'
    """
    if not head.traits:
        return "has no single pattern"
    texts = []
    for trait in head.traits:
        action = ACTIONS.get(trait.name, f"is {trait.name}")
        of = "of the rest" if texts else "of its attention"
        texts.append(action if trait.name == "broad" else f"{action} ({trait.share:.0%} {of})".replace("%", " %"))
    return ", otherwise ".join(texts)


def example(view: View, head: Head) -> str:
    """The strongest pair of a head, without the first token, such as “looked” → “captain” 0.92."""
    weights = view.sampled[head.layer].select(heads=[_place(view, head)])
    found = view.strongest_pair(weights)
    if found is None:
        return ""
    query, key, weight = found
    return f"{_quoted(view.labels[query])} → {_quoted(view.key_labels[key])} {weight:.2f}"


def _place(view: View, head: Head) -> int:
    """The index of a head in its map, which may hold only some heads."""
    return [found.head for found in view.summaries[head.layer]].index(head.head)


def _quoted(token: str) -> str:
    return f"“{cut(shown(token), 16)}”"
