"""The ten steps on words as plain text, 80 columns wide: the shapes, one head in numbers, all heads side by side."""

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

WORD = 9  # most columns of a word beside a row
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
        *textwrap.wrap(f"TEN STEPS  {steps.headline()}", width),
        *wrapped(steps.words, width, " "),
        "(tokens: words or pieces of words)",
        "",
        *_lane(steps, width),
        *textwrap.wrap(f"({SIX})", width),
        *(line for note in steps.notes for line in textwrap.wrap(f"also: {note}", width)),
        "",
        f"HEAD {head} IN NUMBERS  a row is a token that looks, a column one it looks at",
        *textwrap.wrap(chosen, width),
        *_squares(steps, head, width),
        "",
        "ALL HEADS  the weights (step 7), in percent; · is hidden or below 1",
        *_all_heads(steps, width),
        *_resting(steps, width),
        "",
        "WHAT EVERY HEAD READS  its token with the most weight, and its numbers (step 8)",
        *_read(steps, width),
        "",
        *_joined(steps, width),
    ]
    return "\n".join(part.rstrip() for part in parts)


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
    blocks = [_block(title, steps.words, matrix, _number) for title, matrix in made.items()]
    return _beside(blocks, width)


def _all_heads(steps: WordSteps, width: int) -> list[str]:
    blocks = [_block(f"head {h}", steps.words, weights, _percent) for h, weights in enumerate(steps.weights())]
    return _beside(blocks, width)


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


def _block(title: str, words: list[str], matrix: Tensor, write: Callable[[float], str]) -> list[str]:
    """A matrix with its words on rows and columns; a column shows as much of its word as fits."""
    cells = [[write(n) for n in row] for row in matrix.tolist()]
    size = max(3, max(len(text) for row in cells for text in row))
    side = min(WORD, max(map(wide, words)))
    head = " ".join(fill(cut(word, size), size) for word in words)
    lines = [title, " " * (side + 1) + head]
    lines += [
        f"{fill(cut(word, side), side)} " + " ".join(f"{text:>{size}}" for text in row)
        for word, row in zip(words, cells, strict=True)
    ]
    return [fill(line, max(map(wide, lines))) for line in lines]


def _beside(blocks: list[list[str]], width: int) -> list[str]:
    """Blocks side by side, as many as fit into the width; lines that are wider are cut."""
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
        lines += [cut("  ".join(parts).rstrip(), width) for parts in zip(*row, strict=True)]
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
            first, second = [fill(cut(word, side), side)], [" " * side]
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
    lines = [f"CONCATENATED (step 9): {steps.own} heads of {D} side by side, {merged.shape[1]} numbers per token"]
    for t, word in enumerate(steps.words):
        starts = [f"{float(merged[t, h * D]):z.2f} …".replace("-", "−") for h in range(steps.own)]
        lines.append(cut(f"{fill(cut(word, side), side)} [{' '.join(starts)}]", width))
    lines += ["", f"OUTPUT (step 10): W_o mixes the heads, {output.shape[1]} numbers per token"]
    lines += [f"{fill(cut(word, side), side)} {_vector(output[t], 6)}" for t, word in enumerate(steps.words)]
    return lines


def _vector(x: Tensor, count: int) -> str:
    return "[" + " ".join(f"{n:z.2f}".replace("-", "−") for n in x[:count].tolist()) + " …]"
