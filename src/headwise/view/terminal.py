"""A view as text: a sentence, every head as a small picture, the most telling heads and pairs; and a survey as text."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from headwise.errors import printable
from headwise.study.survey.result import Survey, SurveyedHead
from headwise.view.color import Palette
from headwise.view.result import View
from headwise.view.tokens import cut, fill, shown
from headwise.weights.summary import READINGS, RESTING, Head, HeadSummary, kinds_in_words

LINES = 22  # a terminal has 24: one is for the path of the page, one for the prompt
# Numbers of telling heads, lines of pairs and empty lines, from generous to sparse; pictures have priority.
SPACINGS = ((4, 2, 2), (4, 2, 1), (3, 2, 0), (3, 1, 0))
# What a head does, in one letter: "c" for a copy of the same token, since "s" is a sink.
KIND_LETTERS = {RESTING: "s"} | {name: name[0] for _, name, _ in READINGS} | {"same-token": "c", "mixed": "·"}
MARKS = KIND_LETTERS | {"mixed": " "}  # beside a picture, where a dot would look like a part of it
LARGEST = 24  # columns of a picture in the view of one layer
SURVEYED = ("sink", "previous", "induction", "entropy", "peak", "distance")  # columns of a survey's table
NAMED = 10  # skipped documents that are listed


def drawn(view: View, width: int, palette: Palette) -> str:
    """All layers in at most 22 lines."""
    lines = _sentence(view, width, palette)
    layers = len(view.maps)

    def tall(spacing: tuple[int, int, int]) -> int:
        return min(3, (LINES - len(lines) - 1 - sum(spacing)) // layers)

    telling, pairs, empty = max(SPACINGS, key=tall)  # the first of several equals
    space = [[""] * (empty > 0), [""] * (empty > 1)]
    lines += _atlas(view, width, LINES - len(lines) - telling - pairs - empty, palette)
    lines += [*space[0], *(_bar(head, width, palette) for head in view.telling(telling) if head.trait)]
    return "\n".join([*lines, *space[1], *_pairs(view, width, pairs)])


def drawn_layer(view: View, layer: int, width: int, height: int, palette: Palette) -> str:
    """One layer, with pictures as large as fit."""
    view.check_place(layer)
    heads = list(view.summaries[layer])
    across, wide = _largest(len(heads), view.T, width, height - 4)
    tall = max(1, wide // 2)
    pictures = view.sampled[layer].pooled(tall if palette.depth == 0 else 2 * tall, wide)[0]
    size = max(wide, (width + 1) // across - 1)
    lines = [*wrapped([f"layer {layer} ({printable(view.names[layer])})", *view.sentence.split(" · ")], width)[:2], ""]
    for start in range(0, len(heads), across):
        row = range(start, min(start + across, len(heads)))
        drawings = [palette.lines(pictures[i]) for i in row]
        space = " " * (size - pictures.shape[2] + 1)  # escape codes take no columns
        lines += [space.join(parts).rstrip(" ") for parts in zip(*drawings, strict=True)]
        captions = (fill(f"{layer}.{heads[i].head} {_caption(heads[i])}", size) for i in row)
        lines += [palette.strong(cut(" ".join(captions).rstrip(), width)), ""]
    return "\n".join(lines[:-1])


def drawn_survey(survey: Survey, width: int, *, every_head: bool = False) -> str:
    """The whole survey, for a terminal of this width."""
    lines = wrapped(survey.sentence.split(" · "), width)
    if survey.heads:
        heads = survey.placed if every_head else survey.telling()
        lines += ["", *_letters(survey, width), "", *_table(heads, width)]
    return "\n".join([*lines, *_skipped(survey)])


def _caption(head: HeadSummary) -> str:
    """What a head does, short enough to stand under a picture."""
    return f"{head.kind.removeprefix('first-token ')} {head.traits[-1].share:.2f}" if head.traits else head.kind


def _largest(heads: int, T: int, width: int, height: int) -> tuple[int, int]:
    """How many pictures fit side by side and how many columns each may have, at least 4."""
    best = (max(1, (width + 1) // 5), 4)
    for across in range(1, heads + 1):
        rows = -(-heads // across)
        wide = min(LARGEST, T, (width + 1) // across - 1, 2 * (height // rows - 2))
        if wide > best[1]:
            best = (across, wide)
    return best


def _sentence(view: View, width: int, palette: Palette) -> list[str]:
    """The sentence, with the letters that stand beside the pictures."""
    there = [kind for kind, count in view.counts.items() if count]
    marks = {text: MARKS[kind] for text, kind in zip(kinds_in_words(view.heads), there, strict=True)}
    parts = []
    for part in view.sentence.split(" · "):
        mark = marks.get(part)
        also = " or capitals" if mark == MARKS[RESTING] else ""
        parts.append(f"{part} ({mark}{also})" if mark else part)
    first, *rest = wrapped(parts, width)[:3]
    return [palette.strong(first), *rest]


def _atlas(view: View, width: int, room: int, palette: Palette) -> list[str]:
    """A row of pictures per layer, as large as there is room for."""
    layers = len(view.maps)
    heads = max(weights.shape[1] for weights in view.maps)
    room -= 1  # for the numbers of the heads
    tall = max(1, min(3, room // layers))
    shown_layers = layers if layers * tall <= room else room - 1
    wide = max(1, min(8, (width - 2) // heads - 2))
    most = min(heads, (width - 2) // (wide + 2))
    label = f"{heads} heads" if heads == most else f"{most} of {heads} heads"
    rows = tall if palette.depth == 0 else max(2, 2 * tall - 1)  # half a line stays free between layers
    pictures = view.pictures(rows, wide)
    wide = pictures[0].shape[-1]  # pictures of few tokens are narrower
    numbers = "".join(fill(str(head), wide + 2) for head in range(most)) if wide >= 3 else label
    lines = [palette.faint(f"   {numbers}".rstrip())]
    for layer in range(shown_layers):
        lines += _layer(view, layer, pictures[layer][:most], tall, palette)
    if shown_layers < layers:
        lines.append(f"   and {layers - shown_layers} more layers; --layer {shown_layers} shows the next")
    return lines


def _layer(view: View, layer: int, pictures: Tensor, tall: int, palette: Palette) -> list[str]:
    """The pictures of a layer side by side, with its number and a letter for what each head does."""
    drawings = [palette.lines(picture) for picture in pictures]
    marks = [letter(head, MARKS) for head in view.summaries[layer]]
    lines = []
    for line in range(min(tall, len(drawings[0]))):
        label = palette.faint(f"{layer:>2} ") if line == 0 else "   "
        letters = marks if line == 0 else [" "] * len(marks)
        parts = (f"{drawing[line]}{letter} " for drawing, letter in zip(drawings, letters, strict=False))
        lines.append((label + "".join(parts)).rstrip(" "))
    return lines


def letter(head: HeadSummary, letters: Mapping[str, str] = KIND_LETTERS) -> str:
    """What a head does, in one letter; a capital if it also attends mostly to the first token."""
    return letters[head.kind].upper() if len(head.traits) > 1 else letters[head.kind]


def _bar(head: Head, width: int, palette: Palette) -> str:
    """A head, the share of its most telling trait as a bar, and what it does in words."""
    share = 0.0 if head.trait is None else head.trait.share
    size = max(4, min(24, width - 56))
    filled = round(size * min(1.0, share))
    bar = palette.painted("━" * filled, share) + palette.faint("·" * (size - filled))
    return f"{head.place:>5}  {bar} {share:.2f}  {cut(head.summary.reading, width - size - 14)}"


def _pairs(view: View, width: int, most: int) -> list[str]:
    """The strongest pairs of tokens, in at most `most` lines."""
    texts = []
    for pair in view.pairs():
        words = f"{cut(shown(view.tokens[pair.query]), 14)} → {cut(shown(view.keys[pair.key]), 14)}"
        texts.append(f"{words} {pair.weight:.2f} ({pair.layer}.{pair.head})")
    return wrapped(texts, width, "   ")[:most] if texts else []


def wrapped(parts: Sequence[str], width: int, separator: str = " · ") -> list[str]:
    """Parts with separators between them, broken into lines between parts."""
    lines = [parts[0]]
    for part in parts[1:]:
        joined = f"{lines[-1]}{separator}{part}"
        if len(joined) > width:
            lines.append(part)
        else:
            lines[-1] = joined
    return [cut(line, width) for line in lines]


def _letters(survey: Survey, width: int) -> list[str]:
    """A row per layer and a letter per head, then what the letters mean."""
    rows: dict[int, list[str]] = {}
    for head in survey.placed:
        rows.setdefault(head.layer, []).append(letter(head.summary))
    lines = [f"{layer:>5}  {' '.join(letters)}"[:width] for layer, letters in rows.items()]
    there = {head.summary.kind for head in survey.placed}
    legend = [f"{sign} {kind}" for kind, sign in KIND_LETTERS.items() if kind in there]
    return [*lines, *wrapped([*legend, "capital: also attends mostly to the first token"], width)]


def _table(heads: list[Head], width: int) -> list[str]:
    """A line per head: means, and their deviation between windows."""
    names = [name for name in SURVEYED if name in heads[0].summary.numbers]
    lines = [" head  " + " ".join(name.rjust(11) for name in names) + "  reading"]
    for head in heads:
        assert isinstance(head.summary, SurveyedHead)  # noqa: S101 - heads of a survey
        cells = (_cell(head.summary.numbers[name], head.summary.spread[name]).rjust(11) for name in names)
        lines.append(f"{head.place:>5}  {' '.join(cells)}  {head.summary.reading}")
    return [line[:width] if width < 100 else line for line in lines]


def _skipped(survey: Survey) -> list[str]:
    if not survey.skipped:
        return []
    lines = [printable(f"{bad.place}: {bad.reason}") for bad in survey.skipped[:NAMED]]
    more = len(survey.skipped) - NAMED
    return ["", "skipped:", *lines, *([f"and {more:,} more, which the saved result lists"] if more > 0 else [])]


def _cell(mean: float, spread: float) -> str:
    digits = 2 if mean < 10 else 0
    return f"{mean:.{digits}f} ±{spread:.{digits}f}"
