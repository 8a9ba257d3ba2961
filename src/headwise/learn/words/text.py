"""The ten steps on words as plain text: the shapes, one head in numbers, all heads side by side."""

import textwrap
from collections.abc import Callable

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.learn.forms import FORMS
from headwise.learn.steps import SIX, operations, sentences
from headwise.learn.words.trace import NAMES, WordSteps
from headwise.view.terminal import wrapped
from headwise.view.tokens import cut, fill, wide

WORD = 9  # most columns of a word beside a row, or over a column
LEAST = 3  # columns of a word over a column; more where there is room
NO_BREAK = "\u00a0"
REASON = "it looks least at the first token"


def words_text(steps: WordSteps, width: int = 80, head: int | None = None) -> str:
    """The whole text.

    Args:
        steps: what to show.
        width: columns of the terminal.
        head: the head whose numbers are shown; by default the one that looks least at the first token.
    """
    chosen = "" if head is not None or steps.own == 1 else f"Of {steps.own} heads, {REASON}; --head N shows another."
    head = _telling(steps.weights()) if head is None else head
    if not 0 <= head < steps.own:
        raise OptionError(f"--head {head}: the layer has heads 0 to {steps.own - 1}.")
    parts = [
        *_by_commas(f"TEN STEPS  {steps.headline()}", width),
        *wrapped(steps.words, width, " "),
        "(tokens: words or pieces of words)",
        "",
        *_lane(steps, width),
        *textwrap.wrap(f"({SIX})", width),
        *(line for note in steps.notes for line in textwrap.wrap(f"also: {note}", width)),
        "",
        *_titled(f"HEAD {head} IN NUMBERS", "a row is a token that looks, a column one it looks at", width),
        *textwrap.wrap(chosen, width),
        *_squares(steps, head, width),
        "",
        *_titled("ALL HEADS", "the weights (step 7), in percent; · is hidden or below 1", width),
        *_all_heads(steps, width),
        *_resting(steps, width),
        "",
        *_titled("WHAT EVERY HEAD READS", "its token with the most weight, and its numbers (step 8)", width),
        *_read(steps, width),
        "",
        *_joined(steps, width),
    ]
    return "\n".join(part.rstrip().replace(NO_BREAK, " ") for part in parts)


def _titled(title: str, told: str, width: int) -> list[str]:
    """A title and what it means, in a line of their own where they do not fit side by side."""
    both = f"{title}  {told}"
    return [both] if wide(both) <= width else [title, *textwrap.wrap(told, width)]


def _by_commas(text: str, width: int) -> list[str]:
    """A text in lines that end at a comma, where they can."""
    whole = ", ".join(part.replace(" ", NO_BREAK) for part in text.split(", "))
    return [line.replace(NO_BREAK, " ") for line in textwrap.wrap(whole, width)]


def _telling(weights: Tensor) -> int:
    return int(weights[:, 1:, 0].mean(1).argmin()) if weights.shape[1] > 1 else 0


def _lane(steps: WordSteps, width: int) -> list[str]:
    """One line for every step: number, name, shape, code; the reason below it."""
    code, reasons, lines = operations(FORMS["course"]), sentences(), []
    for number, (name, shape) in enumerate(zip(NAMES, steps.shapes(), strict=True), 1):
        start = f"{number:>2}  {name:<16}{shape:<16}"
        lines += [start + code[number]] if len(start + code[number]) <= width else [start, f"    {code[number]}"]
        lines += textwrap.wrap(reasons[number], width, initial_indent="    ", subsequent_indent="    ")
    return lines


def _squares(steps: WordSteps, head: int, width: int) -> list[str]:
    """The matrices of steps 4 to 7 of one head, as many side by side as fit."""
    raw, root = steps.cut.scores()[head], steps.cut.query.shape[-1] ** 0.5
    masked = raw.masked_fill(~steps.visible, -torch.inf)
    made = {"4 scores": raw, "5 mask": masked, "6 scale": masked / root, "7 softmax": steps.weights()[head]}
    return _matrices(made, steps.words, _number, width)


def _all_heads(steps: WordSteps, width: int) -> list[str]:
    return _matrices({f"head {h}": weights for h, weights in enumerate(steps.weights())}, steps.words, _percent, width)


def _resting(steps: WordSteps, width: int) -> list[str]:
    """How many heads put most of their weight on the first token."""
    weights = steps.weights()
    count = int((weights[:, 1:, 0].mean(1) > 0.5).sum()) if weights.shape[1] > 1 else 0
    if not count:
        return []
    told = (
        f"{count} of {steps.own} heads put most of their weight on the first token, {steps.words[0]}: an attention "
        "sink. A row must sum to 1, so a head that finds nothing to read puts its weight there."
    )
    return ["", *textwrap.wrap(told, width)]


def _number(n: float) -> str:
    if n == -torch.inf:
        return "−∞"
    return f"{n:z.1f}".replace("-", "−") if abs(n) >= 1 else f"{n:z.2f}".replace("-", "−").replace("0.", ".", 1)


def _percent(n: float) -> str:
    return "·" if n < 0.005 else f"{100 * n:.0f}"


def _matrices(made: dict[str, Tensor], words: list[str], write: Callable[[float], str], width: int) -> list[str]:
    """Matrices with their words, as many side by side as fit; the words over columns take the room that is left."""
    cells = {title: [[write(n) for n in row] for row in matrix.tolist()] for title, matrix in made.items()}

    def arranged(most: int) -> list[str]:
        parts = (_parts(title, words, rows, most, width) for title, rows in cells.items())
        return _beside([block for blocks in parts for block in blocks], width)

    lines = arranged(LEAST)
    for most in range(LEAST + 1, WORD + 1):
        wider = arranged(most)
        lines = wider if len(wider) == len(lines) else lines
    return lines


def _parts(title: str, words: list[str], rows: list[list[str]], most: int, width: int) -> list[list[str]]:
    """A matrix with its words on rows and columns, in several blocks if it has more columns than fit."""
    side = min(WORD, max(map(wide, words)))
    numbers = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes = [max(LEAST, min(most, wide(word)), size) for word, size in zip(words, numbers, strict=True)]
    starts, room = [0], width - side
    for place, size in enumerate(sizes):
        if size + 1 > room and place > starts[-1]:
            starts, room = [*starts, place], width - side
        room -= size + 1
    ends = [*starts[1:], len(words)]
    return [_block(title, words, rows, side, sizes, slice(*columns)) for columns in zip(starts, ends, strict=True)]


def _block(
    title: str, words: list[str], rows: list[list[str]], side: int, sizes: list[int], columns: slice
) -> list[str]:
    """Some columns of a matrix, each of its own size, as lines of equal width."""
    chosen = sizes[columns]

    def line(word: str, texts: list[str]) -> str:
        parts = (" " * (size - wide(text)) + text for text, size in zip(texts, chosen, strict=True))
        return f"{fill(word, side)} {' '.join(parts)}"

    heads = [cut(word, size) for word, size in zip(words[columns], chosen, strict=True)]
    more = f"{title}, continued" if columns.start else title
    lines = [more, line("", heads), *(line(word, row[columns]) for word, row in zip(words, rows, strict=True))]
    return [fill(text, max(map(wide, lines))) for text in lines]


def _beside(blocks: list[list[str]], width: int) -> list[str]:
    """Blocks side by side, as many as fit into the width."""
    lines: list[str] = []
    rows: list[list[list[str]]] = []
    room = 0
    for block in blocks:
        size = wide(block[0]) + 2
        if not rows or size > room:
            rows.append([])
            room = width + 2
        rows[-1].append(block)
        room -= size
    for row in rows:
        lines += ["  ".join(parts).rstrip() for parts in zip(*row, strict=True)]
        lines.append("")
    return lines[:-1]


def _read(steps: WordSteps, width: int) -> list[str]:
    """One table for a few heads at a time: word, then what the head reads most and its first numbers."""
    weights, heads, words = steps.weights(), steps.heads(), steps.words
    side, column = min(WORD, max(map(wide, words))), 17
    few = max(1, (width - side) // (column + 1))
    lines = []
    for start in range(0, steps.own, few):
        chosen = range(start, min(start + few, steps.own))
        lines.append(" " * side + "".join(f" {f'head {h}':<{column}}" for h in chosen))
        for t, word in enumerate(words):
            first, second = [fill(word, side)], [" " * side]
            for h in chosen:
                best = int(weights[h, t].argmax())
                first.append(fill(f"{cut(words[best], WORD)} {weights[h, t, best]:.2f}", column))
                second.append(fill(_vector(heads[h, t], 2), column))
            lines += [" ".join(first), " ".join(second)]
        lines.append("")
    return lines[:-1]


def _joined(steps: WordSteps, width: int) -> list[str]:
    """The concatenation and the output: the first numbers of every head side by side, then those of the output."""
    merged, output, D = steps.merged(), steps.output(), steps.cut.query.shape[-1]
    side = min(WORD, max(map(wide, steps.words)))
    told = f"CONCATENATED (step 9): {steps.own} heads of {D} side by side, {merged.shape[1]} numbers per token"
    lines = textwrap.wrap(told, width)
    for t, word in enumerate(steps.words):
        starts = [f"{float(merged[t, h * D]):z.2f}{NO_BREAK}…".replace("-", "−") for h in range(steps.own)]
        first, *rest = wrapped(f"[{' '.join(starts)}]".split(" "), width - side - 1, " ")
        lines += [f"{fill(word, side)} {first}", *(f"{'':{side}}  {line}" for line in rest)]
    lines += ["", *textwrap.wrap(f"OUTPUT (step 10): W_o mixes the heads, {output.shape[1]} numbers per token", width)]
    lines += [f"{fill(word, side)} {_vector(output[t], 6)}" for t, word in enumerate(steps.words)]
    return lines


def _vector(x: Tensor, count: int) -> str:
    return "[" + " ".join(f"{n:z.2f}".replace("-", "−") for n in x[:count].tolist()) + " …]"
