"""What heads do, in sentences for people who have never seen one."""

import math
from collections.abc import Sequence

from headwise.masks import Mask
from headwise.masks.probes import sink
from headwise.view.result import View
from headwise.view.tokens import cut, shown
from headwise.weights import AttentionMap
from headwise.weights.summary import (
    FIRST_SINK,
    MIXED,
    NEAR,
    READINGS,
    SECOND_SINK,
    Head,
    HeadSummary,
    Trait,
    probes_of,
    second_of,
)

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

OF_TOKENS = ("fixed-offset",)  # how many tokens do so, not how much of their attention
WHOLE = (FIRST_SINK, SECOND_SINK)  # shares of all attention; others are of what is left without the first token
NUMBERS = {name: number for number, name, _ in READINGS}  # by the names of heads, what they are named for
BROAD = "broad"
# What pictures and percentages leave out, and what examples do not count: one term for each, on the page as well.
WITHOUT_FIRST, BESIDES_FIRST = "without the first token", "besides the first token"


def described(head: HeadSummary) -> str:
    """What a head does, to follow its name.

    >>> from headwise.weights.summary import Trait
    >>> described(HeadSummary(2, (Trait("previous-token", 0.67, 0.6),), {}, {}))
    'attends to the previous token (67\\xa0% without the first token)'
    """
    if not head.traits:
        return "has no single pattern"
    first, *second = head.traits
    more = [f"{second_of(head.traits, '; of the rest, ')}{_share(trait)}{_target(trait)}" for trait in second]
    without = "" if first.name in (*WHOLE, *OF_TOKENS) else f" {WITHOUT_FIRST}"
    return f"attends {_target(first)}{_share(first, f' ({{}}{without})')}{''.join(more)}"


def named(head: HeadSummary) -> str:
    """The names of what a head does, short enough for a picture; the page does the same.

    >>> from headwise.weights.summary import Trait
    >>> named(HeadSummary(2, (Trait(FIRST_SINK, 0.4, 0.3), Trait("broad", 0.9, 0.8)), {}, {}))
    'sink + broad'
    """
    names = (trait.name.replace(FIRST_SINK, "sink").replace("previous-token", "previous") for trait in head.traits)
    return " + ".join(names) or MIXED


def in_short(head: HeadSummary) -> str:
    """The names of what a head does, as in the legend under all heads.

    >>> from headwise.weights.summary import Trait
    >>> in_short(HeadSummary(2, (Trait(FIRST_SINK, 0.4, 0.3), Trait("broad", 0.9, 0.8)), {}, {}))
    'first-token sink 40\\xa0%; rest: broad'
    """
    named = (f"{trait.name} {_share(trait)}".strip() for trait in head.traits)
    return second_of(head.traits, "; rest: ").join(named)


def in_numbers(head: HeadSummary) -> str:
    """What a head does, with its numbers, beside a map that shows the first token, which some of them leave out.

    >>> from headwise.weights.summary import Trait
    >>> in_numbers(HeadSummary(2, (Trait("previous-token", 0.82, 0.8),), {}, {}))
    'previous-token 0.82 without the first token'
    """
    left_out = bool(head.traits) and head.traits[0].name not in WHOLE
    return f"{head.reading}{f' {WITHOUT_FIRST}' * left_out}"


def _target(trait: Trait) -> str:
    """Where the attention goes."""
    return TARGETS.get(trait.name, f"in the way called {trait.name}")


def _share(trait: Trait, form: str = "{} ") -> str:
    """How much of the attention goes there; an entropy is not a share of attention."""
    share = f"{percent(trait.share)}{' of tokens' if trait.name in OF_TOKENS else ''}"
    return "" if trait.name == BROAD else form.format(share)


def example(view: View, head: Head) -> str:
    """What shows best what a head does, besides the first token, such as “looked” 9 → “captain” 8: 0.92.

    It is the largest weight on the keys that the head is named for; for a broad head, the row that is spread over most
    keys, such as “sea” 9 → 9 tokens, ≤ 0.13.
    """
    weights = view.sampled[head.layer].select(heads=[_place(view, head)])
    rest = weights.without(sink(1))
    broad = head.summary.kind == BROAD
    named = None if broad else _named_for(view, head, weights)
    weight, key = (rest if named is None else rest.without(~named)).peak()
    # As they are, not scaled up: as in the page and in JSON.
    weight = weight * (1 - weights.mass(sink(1))) * (1 if named is None else rest.mass(named))
    row = int((rest.entropy() if broad else weight)[0, 0].argmax())
    most = float(weight[0, 0, row])
    if not most > 0:
        return ""
    query = _quoted(view.labels, row if view.queries is None else int(view.queries[row]))
    seen = int((rest[0, 0, row] > 0).sum())
    if broad and seen > 1:
        return f"{query} → {seen:,} tokens, ≤ {math.ceil(100 * most - 1e-6) / 100:.2f}"  # a bound is never rounded down
    return f"{query} → {_quoted(view.key_labels, int(key[0, 0, row]))}: {'< 0.01' if most < 0.005 else f'{most:.2f}'}"


def _named_for(view: View, head: Head, weights: AttentionMap) -> Mask | None:
    """The keys that a head is named for, if its name is about a kind of keys."""
    ids = view.ids if view.ids is not None and len(view.ids) == view.S else None
    asked = view.query_ids if weights._scoring.cross and ids is not None else None
    return probes_of(weights, ids, query_ids=asked).get(NUMBERS.get(head.summary.kind, ""))


def _place(view: View, head: Head) -> int:
    """The index of a head in its map, which may hold only some heads."""
    return [found.head for found in view.summaries[head.layer]].index(head.head)


def _quoted(labels: Sequence[str], at: int) -> str:
    """A token and its position, which tells it from other copies."""
    return str(at) if labels[at] == str(at) else f"“{cut(shown(labels[at]), 16)}” {at}"


def percent(share: float) -> str:
    """A share in whole percent; 100 only if it is all.

    >>> percent(0.674), percent(0.996), percent(1.0)
    ('67\\xa0%', 'over 99\\xa0%', '100\\xa0%')
    """
    whole = round(100 * share)
    return f"{'over 99' if whole == 100 and share < 1 else whole}\u00a0%"
