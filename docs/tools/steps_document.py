"""Writes docs/steps.md and its pictures from a trace of the reference: python docs/tools/steps_document.py"""

from pathlib import Path

from pictures import HUES, Matrix, flow, worded
from torch import Tensor

from headwise.learn import Setting, trace, word_steps
from headwise.learn.steps import SIX, Explained, head_split_text

DOCS = Path(__file__).parents[1]
TEXT = "The quick brown fox"
SETTING = Setting.of(d_model=8, num_heads=2, seq=5, causal=True)

INTRODUCTION = """# The ten steps

This page computes multi-head attention on real numbers, in an example small enough to follow with a pencil:
{headline}. Blue is head 0, orange is head 1, and each row is a token.

`docs/tools/steps_document.py` generates this page from a trace of [`reference.py`](../src/headwise/reference.py).
Shapes and numbers come from its tensors, the explanations are its comments, and a test checks that the page matches the
code. `headwise steps` shows the same for any sizes and for known models ([details](learn.md)).

B is the batch size, T the number of tokens, H the number of heads, and D the head dimension; q, k and v are queries,
keys and values.
"""

ENDING = """
{six}.

## What happens to memory

The table shows what the key operations do to memory, as measured. A stride is the number of elements to skip for one
step along an axis.

| operation | shape | strides | memory |
|---|---|---|---|
{operations}

{picture}

## The same on words

`headwise steps "The quick brown fox"` runs one layer of the built-in model on real words. These are its attention
weights after step 7, all heads side by side: a row is a token that looks, a column one it looks at. Head 2 looks at
the previous token, and several heads attend mostly to the first one.

![The attention weights of eight heads on "The quick brown fox"](images/steps_words.svg)

With `--html fox.html`, the command writes a page that shows what each number is made of. Here it is a weight of head
2 in step 7:

![The page of the ten steps on words, in dark mode](images/words_dark.png)
"""


def page() -> str:
    """The whole page."""
    steps = trace(SETTING)
    rows = []
    for op in SETTING.key_operations():
        shape, strides = f"{op.before.shape}", f"{op.before.strides}"
        if op.after is not None:
            shape, strides = f"{shape} → {op.after.shape}", f"{strides} → {op.after.strides}"
        rows.append(f"| **{op.name}**<br>`{op.code}`<br>{op.why} | {shape} | {strides} | {op.memory} |")
    return (
        INTRODUCTION.format(headline=SETTING.headline())
        + "".join(_section(step) for step in steps)
        + ENDING.format(six=SIX[0].upper() + SIX[1:], operations="\n".join(rows), picture=head_split_text())
    )


def pictures() -> dict[str, str]:
    """The pictures by file name."""
    drawn = {_file(step): flow(*_parts(step), f"step {step.number}, {step.name}") for step in trace(SETTING)}
    words = word_steps(TEXT)
    heads = [(f"head {number}", weights) for number, weights in enumerate(words.weights())]
    return drawn | {"steps_words.svg": worded(heads, words.words, 4, f"the weights of every head on “{TEXT}”")}


def _section(step: Explained) -> str:
    before, after = (", ".join(f"{names} {shape}" for names, shape in part.items()) for part in step.shapes())
    return (
        f"\n## {step.number}. {step.name.capitalize()}\n\n{step.why}\n\n`{step.operation}`\n\n"
        f"{before} → {after}\n\n![{before} becomes {after}](images/{_file(step)})\n"
    )


def _file(step: Explained) -> str:
    return f"step_{step.number:02}.svg"


def _parts(step: Explained) -> tuple[list[Matrix], list[Matrix]]:
    """The matrices before and after the arrow. Steps 2 and 3 show only queries; keys and values change the same way."""
    if step.number in (2, 3):
        return _drawn("q", step.before["query"], step.number - 1), _drawn("q", step.after["query"], step.number)
    short = {"query": "q", "key": "k", "value": "v"}
    before = [m for name, x in step.before.items() for m in _drawn(short.get(name, name), x, step.number - 1)]
    after = [m for name, x in step.after.items() for m in _drawn(short.get(name, name), x, step.number)]
    if step.number in (4, 5, 6, 7, 8):  # every head does the same, so show only the first
        before, after = ([m for m in part if "head 1" not in m.caption] for part in (before, after))
    return before, after


def _drawn(name: str, x: Tensor, made_by: int) -> list[Matrix]:
    """The first sample of a tensor as matrices, in the colors of its heads."""
    own = [HUES["head 0"], HUES["head 1"]]
    if x.dim() == 3:
        D = SETTING.widths.head_dim
        mixed = made_by in (0, 10)  # the input and the output belong to no head
        hues = [HUES["all"] if mixed else own[j // D] for j in range(x.shape[-1])]
        return [Matrix(name, x[0].tolist(), hues)]
    if made_by == 2:  # (B, T, H, D): each token is a small matrix with one row per head
        return [Matrix(f"{name}, token {t}", x[0, t].tolist(), own, by_row=True) for t in range(x.shape[1])]
    return [Matrix(f"{name}, head {h}", x[0, h].tolist(), [own[h]] * x.shape[-1]) for h in range(x.shape[1])]


def main() -> None:
    """Write the page and the pictures."""
    (DOCS / "steps.md").write_text(page(), encoding="utf-8")
    for name, picture in pictures().items():
        (DOCS / "images" / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
