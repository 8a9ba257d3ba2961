"""A survey as text: one sentence, a letter for every head, a table of heads, and what was skipped."""

from headwise.study.survey.result import Survey, SurveyedHead
from headwise.view.result import Head
from headwise.view.terminal import wrapped
from headwise.weights.summary import RESTING

LETTERS = {
    RESTING: "s",
    "induction": "i",
    "previous-token": "p",
    "own-token": "o",
    "next-token": "n",
    "same-token": "c",
    "delimiter": "d",
    "fixed-offset": "f",
    "local": "l",
    "broad": "b",
    "mixed": "·",
}
SHOWN = ("sink", "previous", "induction", "entropy", "peak", "distance")
NAMED = 10  # skipped documents that are shown


def drawn(survey: Survey, width: int, *, every_head: bool = False) -> str:
    """The whole, for a terminal of this width."""
    lines = wrapped(survey.sentence, width)
    if survey.heads:
        heads = survey.placed if every_head else survey.telling()
        lines += ["", *atlas(survey, width), "", *table(heads, width)]
    return "\n".join([*lines, *skipped(survey)])


def atlas(survey: Survey, width: int) -> list[str]:
    """A row per layer and a letter per head, large where the head rests on the first token besides."""
    rows: dict[int, list[str]] = {}
    for head in survey.placed:
        rows.setdefault(head.layer, []).append(letter(head))
    lines = [f"{layer:>5}  {' '.join(letters)}"[:width] for layer, letters in rows.items()]
    there = {head.summary.kind for head in survey.placed}
    legend = [f"{sign} {kind}" for kind, sign in LETTERS.items() if kind in there]
    return [*lines, *wrapped(" · ".join([*legend, "large: rests on the first token as well"]), width)]


def letter(head: Head) -> str:
    """What a head does, in one letter."""
    kind = head.summary.kind
    resting = len(head.summary.traits) > 1 and head.summary.traits[0].name == RESTING
    return LETTERS[kind].upper() if resting else LETTERS[kind]


def table(heads: list[Head], width: int) -> list[str]:
    """A line per head: means, and how much they differ between windows."""
    names = [name for name in SHOWN if name in heads[0].summary.numbers]
    lines = [" head  " + " ".join(name.rjust(11) for name in names) + "  reading"]
    for head in heads:
        assert isinstance(head.summary, SurveyedHead)  # noqa: S101 - heads of a survey
        cells = (_cell(head.summary.numbers[name], head.summary.spread[name]).rjust(11) for name in names)
        lines.append(f"{head.place:>5}  {' '.join(cells)}  {head.summary.reading}")
    return [line[:width] if width < 100 else line for line in lines]


def skipped(survey: Survey) -> list[str]:
    """What could not be read."""
    if not survey.skipped:
        return []
    lines = [f"{bad.place}: {bad.reason}" for bad in survey.skipped[:NAMED]]
    more = len(survey.skipped) - NAMED
    return ["", "skipped:", *lines, *([f"and {more:,} more, which the result names"] if more > 0 else [])]


def _cell(mean: float, spread: float) -> str:
    digits = 2 if mean < 10 else 0
    return f"{mean:.{digits}f} ±{spread:.{digits}f}"
