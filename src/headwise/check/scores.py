"""How scores became weights: factor, softmax axis, visible keys, added terms."""

import torch
from torch import Tensor

from headwise.check.core import Core
from headwise.check.fits import same
from headwise.check.stages import Scores
from headwise.check.trace import PRODUCTS, Trace

HIDDEN = -50.0  # a score so far below the others has no weight in any precision


def read_scores(core: Core, trace: Trace) -> Scores | None:
    """How weights follow from queries and keys."""
    after, factor = ("", 1.0) if core.softmax is None else _after(core.softmax, core.weights)
    if after == "other":  # masked after the softmax and brought back to a sum of one, which is right
        core.softmax, after = None, ""
    weights = core.weights if core.softmax is None else core.softmax
    finite = torch.isfinite(weights)
    weights = weights.masked_fill(~finite, 0.0)
    finite = finite & ~((weights == 0).all(-1, keepdim=True))  # a fused row that sees nothing is zero, not NaN
    axis, after_factor = _axis(weights, finite)
    if axis is None:
        return None
    visible = weights > 0
    broken = ~finite.all(-1)  # (B, H, T)
    even = visible.all(-1) & ((weights.amax(-1) - weights.amin(-1)) < 1e-12)  # all hidden by one large number
    if axis == 3 and even.any() and not even.all():
        broken, visible = broken | even, visible & ~even[..., None]
    found: Scores | None = None
    for swapped in (False, True):
        raw = core.query @ core.key.transpose(-1, -2)
        raw = raw.transpose(-1, -2) if swapped else raw
        if raw.shape == weights.shape:
            found = _explained(weights, raw, visible, axis)
            found = found or _with_relative(weights, raw, visible, axis, core, trace)
        if found is not None:
            found.swapped = swapped
            break
    if found is None:
        return None
    found.after_factor = after_factor
    found.empty = broken if broken.any() else None
    found.after = after
    found.after_factor *= factor
    return found


NAMES = {3: "keys", 2: "queries", 1: "heads", 0: "batch", (2, 3): "queries and keys together"}
Axis = int | tuple[int, int]


def _axis(weights: Tensor, finite: Tensor) -> tuple[Axis | None, float]:
    """The axis along which weights sum to one, or to one constant."""
    for axis in (3, 2, 1, 0):
        rows = weights.sum(axis)[finite.all(axis)]
        if rows.numel() and weights.shape[axis] > 1 and torch.allclose(rows, rows.new_ones(()), atol=1e-8):
            return axis, 1.0
    if finite.all() and torch.allclose(both := weights.sum((2, 3)), torch.ones_like(both), atol=1e-8):
        return (2, 3), 1.0
    rows = weights.sum(3)[finite.all(3)]
    if rows.numel() and rows.mean() > 0 and torch.allclose(rows, rows.mean(), rtol=1e-8):
        return 3, float(rows.mean())
    return None, 1.0


def _explained(weights: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """Weights as softmax of factor · raw (+ bias), judged on logarithms, where a softmax only adds a constant."""
    logits = weights.clamp_min(1e-300).log()
    a, b = _centred(logits, visible, axis), _centred(raw, visible, axis)
    if float(b.norm()) == 0:
        return None
    factor = float((a * b).sum() / (b * b).sum())
    if float((a - factor * b).norm()) <= 1e-6 * float(a.norm()) + 1e-9:
        return Scores(factor, NAMES[axis], visible)
    factors = (a * b).sum((0, 2, 3)) / (b * b).sum((0, 2, 3)).clamp_min(1e-300)
    if float((a - factors[:, None, None] * b).norm()) <= 1e-6 * float(a.norm()):
        return Scores(float(factors[0]), NAMES[axis], visible, by_head=True)
    return _with_bias(logits, raw, visible, axis) or _leaking(logits, raw, visible, axis)


def _leaking(logits: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """The softmax of scores whose future was set to a constant near zero."""
    T, S = raw.shape[-2:]
    past = torch.ones(T, S, dtype=torch.bool).tril().expand_as(visible)
    if axis != 3 or T != S or not bool(visible.all()):
        return None
    a, b = _centred(logits, past, axis), _centred(raw, past, axis)
    factor = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
    if float((a - factor * b).norm()) > 1e-6 * float(a.norm()):
        return None
    level = (logits - factor * raw).diagonal(dim1=-2, dim2=-1)[..., None]  # minus the logarithm of each row's sum
    future = (logits - level)[~past]
    leaks = float(future.mean()) > HIDDEN
    return Scores(factor, NAMES[axis], past, leaks=leaks) if float(future.std()) < 1e-6 else None


def _with_bias(logits: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """The same with a number added that depends on head and positions only, as relative positions do."""
    if not same(visible.double(), visible[:1].double().expand_as(visible)):
        return None
    a, b = _centred(logits, visible, axis), _centred(raw, visible, axis)
    within_a, within_b = a - a.mean(0), b - b.mean(0)
    factor = float((within_a * within_b).sum() / (within_b * within_b).sum())
    if float((within_a - factor * within_b).norm()) > 1e-6 * float(within_a.norm()):
        return None
    return Scores(factor, NAMES[axis], visible, bias=(a - factor * b).mean(0))


def _with_relative(
    weights: Tensor, raw: Tensor, visible: Tensor, axis: Axis, core: Core, trace: Trace
) -> Scores | None:
    """The softmax of a sum, one part of which is the product of queries and keys: as with relative positions."""
    logits = _centred(weights.clamp_min(1e-300).log(), visible, axis)
    for node in trace.ancestors(core.softmax_nodes[0].parents, PRODUCTS):
        if node.op not in ("add", "add_", "sub") or node.value.numel() != raw.numel():
            continue
        total = _centred(node.value.reshape(raw.shape), visible, axis)
        factor = float((logits * total).sum() / (total * total).sum().clamp_min(1e-300))
        if float((logits - factor * total).norm()) > 1e-6 * float(logits.norm()):
            continue
        for parent in node.parents:
            part = trace.nodes[parent].value
            if part.numel() == raw.numel() and (share := _share(part.reshape(raw.shape), raw)):
                return Scores(factor * share, NAMES[axis], visible, relative=True)
    return None


def _share(part: Tensor, raw: Tensor) -> float:
    """The factor by which a part of the scores is the product; 0 where it is not."""
    factor = float((part * raw).sum() / (raw * raw).sum())
    return factor if same(part, factor * raw, 1e-6) else 0.0


def _centred(x: Tensor, visible: Tensor, axis: Axis) -> Tensor:
    count = visible.sum(axis, keepdim=True).clamp_min(1)
    mean = x.masked_fill(~visible, 0.0).sum(axis, keepdim=True) / count
    return (x - mean).masked_fill(~visible, 0.0)


def _after(softmax: Tensor, weights: Tensor) -> tuple[str, float]:
    """What was done to weights between softmax and values."""
    if same(softmax.nan_to_num(), weights.nan_to_num()):
        return "", 1.0
    kept = weights != 0
    if not kept.any():
        return "masked", 1.0
    ratio = weights[kept] / softmax[kept].clamp_min(1e-300)
    if torch.allclose(ratio, ratio[0], rtol=1e-6):
        factor = float(ratio[0])
        if bool(kept.eq(softmax != 0).all()):
            return "scaled", factor
        return ("masked", 1.0) if abs(factor - 1) < 1e-6 else ("random", factor)
    return "other", 1.0
