"""How scores became weights: scale, axis of the softmax, visible keys, biases, caps."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.fits import same
from headwise.check.reading.parts import Scores
from headwise.check.trace import Core

HIDDEN = -50.0  # a score this far below the others has no weight in any precision
AXES = {3: "keys", 2: "queries", 1: "heads", 0: "batch", (2, 3): "queries and keys together"}
Axis = int | tuple[int, int]


def read_scores(core: Core) -> Scores | None:
    """How weights follow from queries and keys: factor, softmax axis, visible keys, added terms."""
    after, factor = ("", 1.0) if core.softmax is None else _after_softmax(core.softmax, core.weights)
    if after == "masked" and core.softmax is not None and _is_drawn(core.softmax, core):
        after = "random"
    if after == "other":  # masked after the softmax and normalized again, which is right
        core.softmax, after = None, ""
    weights = core.weights if core.softmax is None else core.softmax
    finite = torch.isfinite(weights)
    weights = weights.masked_fill(~finite, 0.0)
    finite = finite & ~((weights == 0).all(-1, keepdim=True))  # in a fused kernel, a row that sees nothing is zero
    axis, after_factor = _softmax_axis(weights, finite)
    if axis is None:
        return None
    visible = weights > 0
    broken = ~finite.all(-1)  # (B, H, T)
    even = visible.all(-1) & _is_even(weights) & ~_has_even_scores(core)  # all hidden by one large number
    if axis == 3 and even.any() and not even.all():
        broken, visible = broken | even, visible & ~even[..., None]
    found = _of_product(weights, visible, axis, core)
    if found is not None:
        found.empty = broken if broken.any() else None
        found.after, found.after_factor = after, after_factor * factor
    return found


def _is_even(table: Tensor) -> Tensor:
    """For every row, whether its numbers are equal."""
    return (table.amax(-1) - table.amin(-1)) < 1e-12


def _has_even_scores(core: Core) -> Tensor:
    """For every row, whether its scores are equal without a mask, as where a query is 0."""
    raw = core.query @ core.key.mT
    same_rows = raw.shape[:-1] == core.weights.shape[:-1]
    return _is_even(raw) if same_rows and not raw.is_complex() else torch.zeros_like(core.weights[..., 0]).bool()


def _is_drawn(softmax: Tensor, core: Core) -> bool:
    """Whether random numbers were drawn, and other weights are 0 in one sample than in another."""
    gone = (core.weights == 0) & (softmax != 0)
    return core.trace.dropout_line() is not None and not bool((gone == gone[:1]).all())


def _of_product(weights: Tensor, visible: Tensor, axis: Axis, core: Core) -> Scores | None:
    """Weights explained by the query-key product, or by its transpose."""
    raw = core.query @ core.key.mT
    for swapped, product in ((False, raw), (True, raw.mT)):
        if product.shape == weights.shape:
            found = _explained(weights, product, visible, axis)
            found = found or _capped(weights, product, visible, axis, core)
            found = found or _with_relative(weights, product, visible, axis, core)
            if found is not None:
                found.swapped = swapped
                return found
    return None


def _softmax_axis(weights: Tensor, finite: Tensor) -> tuple[Axis | None, float]:
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
    """Weights as softmax of factor · raw (+ bias), compared as logarithms, where a softmax only adds a constant."""
    logits = weights.clamp_min(1e-300).log()
    a, b = _centered(logits, visible, axis), _centered(raw, visible, axis)
    if float(b.norm()) == 0:
        return None
    factor = multiple(a, b, 1e-9)
    if factor is not None:
        return Scores(factor, AXES[axis], visible)
    factors = (a * b).sum((0, 2, 3)) / (b * b).sum((0, 2, 3)).clamp_min(1e-300)
    if float((a - factors[:, None, None] * b).norm()) <= 1e-6 * float(a.norm()):
        return Scores(float(factors[0]), AXES[axis], visible, by_head=True)
    return _with_bias(logits, raw, visible, axis) or _leaking(logits, raw, visible, axis)


def _leaking(logits: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """The softmax of scores whose future was set to a constant."""
    T, S = raw.shape[-2:]
    past = torch.ones(T, S, dtype=torch.bool).tril().expand_as(visible)
    if axis != 3 or T != S or not bool(visible.all()):
        return None
    a, b = _centered(logits, past, axis), _centered(raw, past, axis)
    factor = multiple(a, b)
    if factor is None:
        return None
    level = (logits - factor * raw).diagonal(dim1=-2, dim2=-1)[..., None]  # minus the logarithm of each row's sum
    future = (logits - level)[~past]
    fill = float(future.mean())
    if float(future.std()) >= 1e-6:
        return None
    return Scores(factor, AXES[axis], past, leaks=fill > HIDDEN, fill=fill)


def _with_bias(logits: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """The same with a number added that depends only on head and positions, as relative position biases do."""
    if not same(visible.double(), visible[:1].double().expand_as(visible)):
        return None
    a, b = _centered(logits, visible, axis), _centered(raw, visible, axis)
    factor = multiple(a - a.mean(0), b - b.mean(0))
    return None if factor is None else Scores(factor, AXES[axis], visible, bias=(a - factor * b).mean(0))


def _capped(weights: Tensor, raw: Tensor, visible: Tensor, axis: Axis, core: Core) -> Scores | None:
    """The softmax of cap · tanh(scores / cap), as in Gemma 2."""
    logits = weights.clamp_min(1e-300).log()
    past = torch.ones_like(visible).tril()
    squashed = [n.value for n in core.before_softmax() if n.op == "tanh" and n.value.numel() == raw.numel()]
    for tanh in (table for value in squashed for table in _as_tables(value, raw.shape)):
        for seen in (visible, past) if bool(visible.all()) else (visible,):  # -inf before the cap becomes -cap
            cap = multiple(_centered(logits, seen, axis), _centered(tanh, seen, axis))
            inside = None if cap is None else multiple(tanh.atanh()[seen], raw[seen])
            if cap is not None and inside is not None:
                return Scores(cap * inside, AXES[axis], seen, cap=cap, leaks=seen is past, fill=-cap)
    return None


def _as_tables(value: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Scores as (B, H, T, S), where they were computed in this order or as (B, T, H, S)."""
    B, H, T, S = shape
    if value.shape == (B, T, H, S):
        yield value.transpose(1, 2)
    yield value.reshape(shape)


def _with_relative(weights: Tensor, raw: Tensor, visible: Tensor, axis: Axis, core: Core) -> Scores | None:
    """The softmax of a sum in which one term is the query-key product, as with relative positions."""
    logits = _centered(weights.clamp_min(1e-300).log(), visible, axis)
    for node in core.before_softmax():
        if node.op not in ("add", "add_", "sub") or node.value.numel() != raw.numel():
            continue
        total = _centered(node.value.reshape(raw.shape), visible, axis)
        factor = multiple(logits, total)
        if factor is None:
            continue
        for parent in node.parents:
            part = core.trace.nodes[parent].value
            if part.numel() == raw.numel() and (share := multiple(part.reshape(raw.shape), raw)):
                rest = node.value.reshape(raw.shape) - share * raw
                linear = _is_linear_term(rest, core.query, core.key)
                return Scores(factor * share, AXES[axis], visible, relative=True, relative_is_linear=linear)
    return None


def _is_linear_term(rest: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a term (B, H, T, S) is an affine map of query and key for every head and pair of positions."""
    B, H, T, S = rest.shape
    wide = torch.cat(
        [
            query[:, :, :, None].expand(B, H, T, S, -1),
            key[:, :, None].expand(B, H, T, S, -1),
            rest.new_ones(B, H, T, S, 1),
        ],
        -1,
    )
    if wide.shape[-1] >= B or not torch.isfinite(rest).all():
        return False
    design, y = wide.permute(1, 2, 3, 0, 4), rest.permute(1, 2, 3, 0)[..., None]
    solved = torch.linalg.lstsq(design, y, driver="gelsd").solution
    return bool((design @ solved - y).norm() <= 1e-6 * y.norm())


def multiple(a: Tensor, b: Tensor, rounding: float = 0.0) -> float | None:
    """The factor for which a = factor · b; None where there is none, or for complex numbers."""
    if a.is_complex() or b.is_complex():
        return None
    factor = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
    return factor if float((a - factor * b).norm()) <= 1e-6 * float(a.norm()) + rounding else None


def _centered(x: Tensor, visible: Tensor, axis: Axis) -> Tensor:
    count = visible.sum(axis, keepdim=True).clamp_min(1)
    mean = x.masked_fill(~visible, 0.0).sum(axis, keepdim=True) / count
    return (x - mean).masked_fill(~visible, 0.0)


def _after_softmax(softmax: Tensor, weights: Tensor) -> tuple[str, float]:
    """What was done to the weights between softmax and values, and the factor."""
    if same(softmax.nan_to_num(), weights.nan_to_num()):
        return "", 1.0
    kept = (weights != 0) & torch.isfinite(weights)
    if not kept.any():
        return "masked", 1.0
    ratio = weights[kept] / softmax[kept].clamp_min(1e-300)
    if torch.allclose(ratio, ratio[0], rtol=1e-6):
        factor = float(ratio[0])
        if bool(kept.eq(softmax != 0).all()):
            return "scaled", factor
        return ("masked", 1.0) if abs(factor - 1) < 1e-6 else ("random", factor)
    return "other", 1.0
