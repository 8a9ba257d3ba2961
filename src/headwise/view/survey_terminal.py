"""A survey as text: one sentence, a letter per head, a table of heads, and what was skipped."""

from headwise.study.heads import Head
from headwise.study.survey.result import Survey, SurveyedHead
from headwise.view.terminal import KIND_LETTERS, wrapped

SHOWN = ("sink", "previous", "induction", "entropy", "peak", "distance")
NAMED = 10  # skipped documents that are listed


def drawn(survey: Survey, width: int, *, every_head: bool = False) -> str:
    """The whole survey, for a terminal of this width."""
    lines = wrapped(survey.sentence, width)
    if survey.heads:
        heads = survey.placed if every_head else survey.telling()
        lines += ["", *atlas(survey, width), "", *table(heads, width)]
    return "\n".join([*lines, *skipped(survey)])


def atlas(survey: Survey, width: int) -> list[str]:
    """A row per layer and a letter per head, a capital if it also attends mostly to the first token."""
    rows: dict[int, list[str]] = {}
    for head in survey.placed:
        rows.setdefault(head.layer, []).append(letter(head))
    lines = [f"{layer:>5}  {' '.join(letters)}"[:width] for layer, letters in rows.items()]
    there = {head.summary.kind for head in survey.placed}
    legend = [f"{sign} {kind}" for kind, sign in KIND_LETTERS.items() if kind in there]
    return [*lines, *wrapped(" · ".join([*legend, "capital: also attends mostly to the first token"]), width)]


def letter(head: Head) -> str:
    """What a head does, in one letter."""
    sign = KIND_LETTERS[head.summary.kind]
    return sign.upper() if len(head.summary.traits) > 1 else sign


def table(heads: list[Head], width: int) -> list[str]:
    """A line per head: means, and their deviation between windows."""
    names = [name for name in SHOWN if name in heads[0].summary.numbers]
    lines = [" head  " + " ".join(name.rjust(11) for name in names) + "  reading"]
    for head in heads:
        assert isinstance(head.summary, SurveyedHead)  # noqa: S101 - heads of a survey
        cells = (_cell(head.summary.numbers[name], head.summary.spread[name]).rjust(11) for name in names)
        lines.append(f"{head.place:>5}  {' '.join(cells)}  {head.summary.reading}")
    return [line[:width] if width < 100 else line for line in lines]


def skipped(survey: Survey) -> list[str]:
    """The documents that could not be read."""
    if not survey.skipped:
        return []
    lines = [f"{bad.place}: {bad.reason}" for bad in survey.skipped[:NAMED]]
    more = len(survey.skipped) - NAMED
    return ["", "skipped:", *lines, *([f"and {more:,} more, which the saved result lists"] if more > 0 else [])]


def _cell(mean: float, spread: float) -> str:
    digits = 2 if mean < 10 else 0
    return f"{mean:.{digits}f} ±{spread:.{digits}f}"
