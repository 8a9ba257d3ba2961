"""The ten steps on words as one HTML file: point at a number to see what it is made of, and switches recompute it.

The page holds the input, the projections and the heads of one layer. Its script is `page/words.js`; the
Content-Security-Policy holds hashes of script and style, so nothing else runs, and words become text nodes only.
"""

import base64
import hashlib
import json
from html import escape
from string import Template
from typing import Any

import torch
from torch import Tensor

from headwise.learn.forms import FORMS
from headwise.learn.steps import operations, sentences
from headwise.learn.words.trace import NAMES, WordSteps
from headwise.view.page import page_file

PACKAGE = "headwise.learn.words"
MOST_WEIGHTS = 4_000_000  # numbers of the projections that a page holds; above that it says so
WITHOUT: dict[str, dict[int, tuple[str | None, str]]] = {  # code and reason of a step while a switch is off
    "mask": {
        5: ("scores", "Nothing is hidden: every token reads every token, also those that come after it."),
        7: (None, "Weights that sum to 1. No key is hidden, so no weight is exactly 0."),
    },
    "scale": {
        6: ("scores", "Nothing is divided: the sum of D products keeps its size, and the next step is sharper."),
        7: (None, "Weights that sum to 1. Unscaled scores lie further apart, so fewer keys share the weight."),
    },
    "several heads": {
        2: (None, "One head takes all of the numbers, so nothing is cut."),
        3: (None, "With one head there is one matrix product for every text; the axis of the heads has size 1."),
        9: (None, "There is one head, so nothing is put beside it: only the axis of the heads goes."),
        10: (None, "With one head there is nothing to mix; W_o maps what it read back into the model."),
    },
}


def words_page(steps: WordSteps, title: str = "") -> str:
    """The ten steps as one self-contained HTML page.

    Args:
        steps: what `word_steps` found.
        title: the title of the page; the words by default.
    """
    script, style = page_file("words.js", PACKAGE), page_file("words.css", PACKAGE)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(page_data(steps), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Template(page_file("words.html", PACKAGE)).substitute(
        policy=escape(policy),
        title=escape(title or f"Ten steps: {' '.join(steps.words)}"),
        style=style,
        script=script,
        data=data,
    )


def page_data(steps: WordSteps) -> dict[str, Any]:
    """What the script needs, ready for JSON."""
    reasons, code = sentences(), operations(FORMS["course"])
    holds = sum(weight.numel() for weight, _ in steps.linears) <= MOST_WEIGHTS
    return {
        "model": steps.model,
        "headline": steps.headline(),
        "words": steps.words,
        "notes": steps.notes,
        "own": steps.own,
        "visible": steps.visible.int().tolist(),
        "steps": [
            {"name": name, "code": code[number], "why": reasons[number], "without": _without(number, code[number])}
            for number, name in enumerate(NAMES, start=1)
        ],
        "x": _packed(steps.x),
        "projected": {name: _packed(x) for name, x in steps.projected().items()},
        "linears": [
            {"weight": _packed(weight), "bias": None if bias is None else _packed(bias)}
            for weight, bias in steps.linears
        ]
        if holds
        else None,
        "output": _packed(steps.output()),
        "cuts": {
            heads: {name: _packed(getattr(cut, name)) for name in ("query", "key", "value")}
            for heads, cut in steps.cuts.items()
        },
    }


def _without(number: int, code: str) -> dict[str, dict[str, str]]:
    """By switch, what a step is while it is off."""
    said = {switch: steps[number] for switch, steps in WITHOUT.items() if number in steps}
    return {switch: {"code": other or code, "why": why} for switch, (other, why) in said.items()}


def _packed(x: Tensor) -> dict[str, Any]:
    """A tensor as its shape and little-endian numbers in base 64; 16 bits where they are exact."""
    x = x.detach().to(torch.float32).contiguous()
    half = bool((x.half().float() == x).all())
    x = x.half() if half else x
    data = bytes(x.cpu().view(torch.uint8).flatten().tolist())  # without numpy, which may be missing
    return {"shape": list(x.shape), "bits": 16 if half else 32, "data": base64.b64encode(data).decode()}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
