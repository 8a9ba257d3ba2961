"""Mistakes between the product of queries and keys and the weights: scale, softmax axis, built-in masks."""

import contextlib
import inspect
import math
import re

from headwise.check import lines
from headwise.check.bound import Bound
from headwise.check.diagnosis import Diagnosis
from headwise.check.names import plain
from headwise.check.patterns import pattern
from headwise.check.stages import Reading
from headwise.check.subject import modules, signature, tensors


def judge_scores(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    """Findings about scale, softmax and what a built-in mask hides."""
    scores, core = reading.scores, reading.core
    if scores is None and (rounded := lines.rounding(bound.trace, core)) is not None:
        detail = "scores are rounded to whole numbers before the softmax (// is a division that rounds down)"
        result.wrong("scale-other", detail, rounded.line)
        return
    if scores is None:
        result.doubts.append("how weights follow from queries and keys")
        return
    node = core.softmax_nodes[0]
    if scores.axis != "keys":
        result.wrong("softmax-axis", f"weights sum to 1 over {scores.axis}, not over keys", node.line)
    else:
        result.good.append("softmax axis")
    if scores.after == "random":
        result.wrong("dropout-in-eval", "weights are dropped at random after eval()", lines.dropout_line(bound.trace))
    if scores.after == "masked":
        result.wrong("mask-after-softmax", "weights are set to zero after the softmax", node.line)
    if scores.leaks:
        result.wrong("mask-leaks", "scores of the future are set to a number near zero", _mask_line(bound, reading))
        _scale(bound, reading, result)
        return
    if scores.relative:
        result.variants.append("a term by relative position is added to the scores")
    if scores.bias is not None:
        result.variants.append("a bias by position is added to the scores")
    _scale(bound, reading, result)
    _visible(bound, reading, result)


def _scale(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    scores, query, key = reading.scores, reading.query, reading.key
    assert scores is not None  # noqa: S101
    D = reading.core.query.shape[-1]
    line = lines.scale_line(bound.trace, reading.core)
    right = 1 / math.sqrt(D)
    if scores.factor is None:
        result.doubts.append("the scale of the scores")
        return
    factors = [1.0 if p is None or p.role.factor is None else abs(p.role.factor) for p in (query, key)]
    unknown = any(p is None or p.role.factor is None for p in (query, key))
    total = abs(scores.factor) * factors[0] * factors[1]
    if any(p is not None and p.then == "norm" for p in (query, key)):
        return  # the norm decides how large scores are
    if _learned_temperature(bound, reading) or scores.by_head:
        result.variants.append("a learned scale")
        return
    if _near(total, right):
        if _near(abs(scores.after_factor), 1.0):
            result.good.append(f"scale 1/√{D}")
    elif _near(total, 1.0) and (scores.bias is not None or _may_add_positions(bound)):
        result.variants.append("scores are not scaled, beside a bias (as in T5)")
    elif unknown:
        result.doubts.append(f"the scale of the scores: {total:.4g} was measured where 1/√{D} = {right:.4g} is usual")
    else:
        name = _scale_name(total, D, bound)
        result.wrong(name, _scale_words(total, D), line)
    if not _near(abs(scores.after_factor), 1.0) and scores.after != "random":
        result.findings = [f for f in result.findings if f.name != "scale-missing"]
        result.wrong(
            "scale-after-softmax", f"weights are multiplied by {scores.after_factor:.4g} after the softmax", line
        )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * abs(b)


def _scale_name(total: float, D: int, bound: Bound) -> str:
    E, (B, T) = bound.sizes.E, bound.inputs.query.shape[:2]
    known = {
        "scale-missing": 1.0, "scale-d_model": E**-0.5, "scale-multiplied": D**0.5, "scale-no-sqrt": 1 / D,
        "scale-batch": B**-0.5, "scale-length": T**-0.5,
    }  # fmt: skip
    return next((name for name, value in known.items() if _near(total, value)), "scale-other")


def _scale_words(total: float, D: int) -> str:
    right = f"√{D} = {math.sqrt(D):.3f}, the root of the head's width"
    if _near(total, 1.0) or total == 0:
        return f"they should be divided by {right}"
    return f"they are divided by {1 / total:.4g}, not by {right}"


def _learned_temperature(bound: Bound, reading: Reading) -> bool:
    """A parameter of one number, or of one for each head, that takes part in the scores."""
    H = reading.core.weights.shape[1]
    small = [t for t in tensors(bound.thing).values() if t.numel() in {1, H} and t.numel() <= H and t.requires_grad]
    return bool(small) and any(t.dim() != 1 or t.numel() == 1 or t.numel() == H for t in small)


def _visible(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    assert reading.scores is not None  # noqa: S101
    scores, node = reading.scores, reading.core.softmax_nodes[0]
    visible = scores.visible if scores.after != "masked" else reading.core.weights != 0
    if scores.after == "random":
        return
    result.visible = pattern(visible)
    line = _mask_line(bound, reading) or node.line
    if result.visible == "causal":
        result.variants.append("causal inside")
    elif result.visible in ("future", "later"):
        result.wrong("causal-inverted", "a token sees the tokens after it and not those before", line)
    elif result.visible == "strict":
        result.wrong("causal-off-by-one", "a token does not see itself", line)
    elif result.visible == "ahead":
        result.wrong("causal-off-by-one", "a token sees the one after it", line)
    elif result.visible != "full":
        result.variants.append("a fixed pattern of visible keys")
    discarded = lines.discarded_mask(bound.trace, reading.core)
    if discarded is not None and result.visible == "full":
        result.wrong("mask-discarded", "the masked scores are not assigned to anything", discarded.line)
    idle = lines.idle_mask(bound.trace, reading.core)
    if result.visible == "full" and idle is not None and not bound.form.fixed_tensor and _stores_a_triangle(bound):
        result.wrong("causal-ignored", "a triangular mask is stored, and what is read of it hides nothing", idle.line)


def _may_add_positions(bound: Bound) -> bool:
    """Whether the class has a switch or an argument for a bias by position, which is off here."""
    names = [p.name for p in signature(bound.thing)]
    with contextlib.suppress(TypeError, ValueError):
        names += list(inspect.signature(bound.target).parameters)
    return any(re.search(r"(pos|rel)\w*bias", plain(name)) for name in names)


def _stores_a_triangle(bound: Bound) -> bool:
    tables = (b for m in modules(bound.thing) for b in m.buffers() if b.dim() >= 2 and b.shape[-1] == b.shape[-2] > 1)
    return any(bool((b == b.tril()).all()) != bool((b == b.triu()).all()) for b in tables)


def _mask_line(bound: Bound, reading: Reading) -> int | None:
    found = [n for n in bound.trace.nodes if n.op.rstrip("_") in ("masked_fill", "where", "tril", "triu") and n.line]
    before = [n for n in found if n.index < reading.core.softmax_nodes[0].index]
    return before[-1].line if before else None
