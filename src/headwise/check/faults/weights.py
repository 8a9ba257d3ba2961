"""What happens to the weights between the softmax and the values: nothing should be added, and nothing become NaN."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from headwise.check.binding import Bound
from headwise.check.faults.mask_meaning import measured
from headwise.check.mistakes import Finding, Found
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import Core, Node

ADDS = ("add", "sub", "add_", "sub_")


def changed_weights(bound: Bound, reading: AttentionReading | None) -> Found:
    """Weights must meet the values as they leave the softmax, also with an argument that might be added to them."""
    if reading is None or not reading.between_tokens:
        return
    found = list(_changed(reading))
    for argument in measured(bound, reading) if not found else ():
        tried = next((t for t in argument.tried if t.error is None), None)
        if argument.meaning or tried is None:
            continue
        seen = read(bound.called({argument.name: tried.mask.clone()}))
        if seen is not None:
            found += [replace(f, detail=f"argument {argument.name}: {f.detail}") for f in _changed(seen)]
    yield from found[:1]


def _changed(reading: AttentionReading) -> Iterator[Finding]:
    core = reading.core
    steps = [n for n in _after_softmax(core) if n.value.is_floating_point() and n.line is not None]
    infinite = next((n for n in steps if not bool(torch.isfinite(n.value).all())), None)
    if not bool(torch.isfinite(core.nodes.softmax[0].value).all()):
        return
    if infinite is not None:
        yield Finding("mask-after-softmax", "minus infinity there makes the result NaN", infinite.line)
        return
    sums = core.weights.sum(-1)
    divided = next((n for n in steps if n.op.rstrip("_") == "div"), None)
    across = core.weights.sum(-2)
    if (
        divided is not None
        and torch.allclose(across, torch.ones_like(across))
        and not torch.allclose(sums, across[..., :1])
    ):
        yield Finding(
            "softmax-axis", "after the softmax, weights are divided by their sums over the queries", divided.line
        )
        return
    added = next((n for n in steps if n.op in ADDS), None)
    if added is not None and not torch.allclose(sums, torch.ones_like(sums)):
        row = [f"{float(number):.4g}" for number in sums.flatten()[:2]]
        yield Finding("bias-after-softmax", f"rows of the weights sum to {', '.join(row)}, …", added.line)


def _after_softmax(core: Core) -> Iterator[Node]:
    """Tables of weights between the softmax and their product with the values."""
    first, end = core.nodes.softmax[0], core.nodes.products[0].index
    reached = core.trace.reaches(first.index)
    for node in core.trace.nodes[first.index + 1 : end]:
        if node.index in reached and node.value.numel() == first.value.numel():
            yield node
