"""The reference card: what to know about multi-head attention, on one page of 80 columns."""

import math

from headwise.check import MISTAKES

MATRICES = {
    "W_q": ("makes queries", "what am I looking for?"),
    "W_k": ("makes keys", "what do I offer?"),
    "W_v": ("makes values", "what do I pass on?"),
    "W_o": ("mixes the heads", "what do we say together?"),
}
STEPS = (
    ("Project", "q, k, v = W_q(x), W_k(x), W_v(x)", "(B, T, E)"),
    ("Split", "q.view(B, T, H, D)", "(B, T, H, D)"),
    ("Transpose", "q.transpose(1, 2)", "(B, H, T, D)"),
    ("Attend", "softmax(q @ k.transpose(-2, -1) / sqrt(D)) @ v", "(B, H, T, D)"),
    ("Concat", "heads.transpose(1, 2).contiguous().view(B, T, E)", "(B, T, E)"),
    ("Project", "W_o(merged)", "(B, T, E)"),
)
OPERATIONS = {
    "view": "the same memory read in another shape; cuts or joins adjacent axes",
    "transpose": "two axes swap strides; no number moves",
    "@": "a matrix product on the last two axes, for every sample and head",
    "contiguous": "copies into reading order, so that a view can join axes again",
}
REASONS = {
    "Why scale by √D?": "A dot product of D terms spreads like √D; unscaled, the softmax saturates and "
    "gradients vanish.",
    "Why a mask?": "A token must not see what it is trained to predict, nor padding. A hidden score is −∞, "
    "so its weight is 0 and the row still sums to 1.",
    "Why several heads?": "Each has weights of its own, so a token attends in several ways at once, for the "
    "same parameters and operations as one large head.",
}
CHECKLIST = (
    ("six steps, in order: P S T A C P", "headwise steps"),
    ("E = H · D, and D is the width in √D", "headwise cost"),
    ("view, transpose, @, contiguous", "headwise steps (MEMORY)"),
    ("the output has the shape of the input", "headwise check your.py"),
    ("why scale, why mask, why several heads", "headwise course --interview"),
)
SHOWN = 3  # heads in the diagram; of more, the first two and the last
COMMON = ("split-view", "contiguous", "scale-d_model", "no-out-proj", "mask-after-softmax", "softmax-axis")


def card(d_model: int = 768, num_heads: int = 12) -> str:
    """The card as text, for these sizes.

    >>> print(card().splitlines()[0])
    MULTI-HEAD ATTENTION: split, attend, concat, project.  E = H · D: 768 = 12 · 64
    """
    D = d_model // num_heads
    lines = [
        f"MULTI-HEAD ATTENTION: split, attend, concat, project.  E = H · D: {d_model} = {num_heads} · {D}",
        "",
        *structure(d_model, num_heads).splitlines(),
        "",
        "SIX STEPS: Project, Split, Transpose, Attend, Concat, Project",
        *(f"  {n} {name:<10}{code:<50}{shape}" for n, (name, code, shape) in enumerate(STEPS, 1)),
        "",
        "FORMULAS",
        "  Attention(q, k, v) = softmax(q·kᵀ / √D) · v",
        "  head i = Attention(x·W_q, x·W_k, x·W_v), with the columns of head i",
        "  MultiHead(x) = Concat(head 0, …, head H−1) · W_o",
        f"  parameters 4·E² + 4·E = {4 * d_model**2 + 4 * d_model:,};  √D = {math.sqrt(D):g}",
        "",
        "FOUR MATRICES",
        *(f"  {name:<5}{does:<18}{asks}" for name, (does, asks) in MATRICES.items()),
        "",
        "FOUR OPERATIONS",
        *(f"  {name:<12}{does}" for name, does in OPERATIONS.items()),
        "",
        "THREE REASONS",
        *(line for question, answer in REASONS.items() for line in _wrapped(question, answer)),
        "",
        "COMMON MISTAKES (headwise check names them, headwise quiz lets you find them)",
        *(f"  · {MISTAKES[name].title}" for name in COMMON),
        "",
        "CHECKLIST",
        *(f"  □ {item:<46}{command}" for item, command in CHECKLIST),
    ]
    return "\n".join(line.rstrip() for line in lines)


def structure(d_model: int = 512, num_heads: int = 8) -> str:
    """The structure as a diagram: every head a small attention of its own, then concat and one projection."""
    D = d_model // num_heads
    numbers = [*range(num_heads)] if num_heads <= SHOWN else [0, 1, None, num_heads - 1]
    last, joint = len(numbers) - 1, min(1, len(numbers) // 3)
    lines = []
    for i, number in enumerate(numbers):
        head = "…" if number is None else f"head {number}: W_q W_k W_v, attention"
        left, right = _corners(i, last, is_joint=i == joint)
        start, end = ("  x ───", "─ concat ─── W_o ─── output") if i == joint else ("       ", "")
        dash = " " if number is None else "─"
        lines.append(f"{start}{left}{dash} {head:<33}{dash}{right}{end}")
    sizes = f"  (B, T, {d_model})   (B, T, {D}) from each head      (B, T, {d_model})   (B, T, {d_model})"
    return "\n".join([*lines, sizes])


def _corners(i: int, last: int, *, is_joint: bool) -> tuple[str, str]:
    if is_joint:
        corner = "─" if last == 0 else "┬" if i == 0 else "┼"
        return corner, corner
    if i in (0, last):
        return ("┌", "┐") if i == 0 else ("└", "┘")
    return "│", "│"


def _wrapped(question: str, answer: str) -> list[str]:
    import textwrap

    return textwrap.wrap(f"{question} {answer}", 78, initial_indent="  ", subsequent_indent="    ")
