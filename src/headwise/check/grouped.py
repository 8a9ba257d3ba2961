"""Grouped heads in earnest: a class that takes a number of key/value heads is tried with fewer of them than heads."""

import inspect
import re
from dataclasses import replace

import torch
from torch import Tensor

from headwise.check import diagnosing
from headwise.check.bound import Bound, quiet
from headwise.check.findings import Finding
from headwise.check.fits import same
from headwise.check.names import constructor_role
from headwise.check.reading import read
from headwise.check.repairs import error_line, on_purpose
from headwise.check.stages import Projection, Reading
from headwise.check.subject import prepare

GROUPED = re.compile(r"group|gqa", re.IGNORECASE)


def grouped_heads(bound: Bound, reading: Reading | None) -> list[Finding]:
    """Findings with half as many key/value heads as heads."""
    names, fewer = _kv_names(bound), bound.sizes.H // 2
    if offered(bound, reading) is None:
        return []
    try:
        with quiet():
            thing = bound.again(**dict.fromkeys(names, fewer))
            prepare(thing)
        other = replace(bound, thing=thing)
        returned, other.trace = other.traced(bound.inputs)
    except Exception as error:
        if isinstance(error, AssertionError) or on_purpose(error):
            return []
        words = f"{names[0]}={fewer} for {bound.sizes.H} heads: {type(error).__name__}: {str(error).splitlines()[0]}"
        severity = "wrong" if GROUPED.search(getattr(bound.target, "__name__", "")) else ""  # then it is the very point
        return [Finding("grouped-crashes", words[:200], error_line(error, bound.filename), severity=severity)]
    other.output = other.form.result(returned, other.inputs)
    seen = read(other)
    return [] if seen is None else _judged(other, seen, f"with {names[0]}={fewer}", fewer)


def offered(bound: Bound, reading: Reading | None) -> str | None:
    """In words, that fewer key/value heads can be asked for, and were."""
    names, fewer = _kv_names(bound), bound.sizes.H // 2
    if not names or fewer < 2 or reading is None or reading.understood < 5:
        return None
    return f"grouped heads (also tried with {names[0]}={fewer})"


def _kv_names(bound: Bound) -> list[str]:
    if bound.built.config is not None:
        return [name for name in bound.built.config.asked if constructor_role(name) == "kv_heads"]
    try:
        return [n for n in inspect.signature(bound.target).parameters if constructor_role(n) == "kv_heads"]
    except (TypeError, ValueError):
        return []


def _judged(bound: Bound, seen: Reading, when: str, fewer: int) -> list[Finding]:
    found = [f for f in diagnosing.diagnose(bound, seen).findings if f.severity == "wrong"]
    for finding in found:
        finding.detail += f" ({when})"
    groups = [_groups(part, seen.core.weights.shape[1]) for part in (seen.key, seen.value)]
    if found or None in groups:
        return found
    if groups[0] != groups[1]:
        words = f"{when}: heads share keys as {groups[0]} and values as {groups[1]}"
        return [Finding("grouped-order", words, seen.core.score_nodes[0].line)]
    H = len(groups[0] or [])
    if groups[0] != [h // (H // fewer) for h in range(H)] and len(set(groups[0] or [])) == fewer:
        words = f"{when}: heads share keys and values as {groups[0]}, where neighbours are usual"
        return [Finding("grouped-order", words, seen.core.score_nodes[0].line, severity="fragile")]
    return []


def _groups(part: Projection | None, H: int) -> list[int] | None:
    """For every head the number of the first head with the same weights, counted from 0 without gaps."""
    if part is None or part.split != "heads":
        return None
    weight: Tensor = part.fit.weight if part.by_position is None else part.by_position[0]
    blocks = list(torch.unbind(weight.unflatten(0, (H, -1))))
    first = [next(i for i, other in enumerate(blocks) if same(block, other, 1e-6)) for block in blocks]
    order = list(dict.fromkeys(first))
    return [order.index(i) for i in first]
