"""The proof: the reference with the steps changed that were read differently, which must predict new outputs."""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headwise import reference
from headwise.check.binding import Bound
from headwise.check.calls import Inputs, make_inputs
from headwise.check.fits import same, side_by_side
from headwise.check.reading import AttentionReading, OutputMap, Projection, Scores, pattern

TOLERANCE = 1e-6  # of a float64 prediction; scales given as float32 tensors cost 1e-7
ALIKE = 1e-5  # relative difference of two solutions for one map
Maps = tuple[reference.Linear, reference.Linear, reference.Linear, reference.Linear | None]


@dataclass(frozen=True)
class Recipe:
    """One choice for every step of attention; the defaults are the reference."""

    split: str = "heads"  # or view: no transpose
    scale: float | None = None  # 1/√D unless given
    cap: float = 0.0  # scores are cap · tanh(scores / cap); 0 for none
    axis: str = "keys"  # or queries, heads, batch
    after_factor: float = 1.0  # weights multiplied after the softmax
    masked_after: bool = False  # the mask zeroes weights instead of scores
    merge: str = "heads"  # or view
    residual: float = 0.0  # the input, times this, is added

    @property
    def deviations(self) -> list[str]:
        """The steps that differ from the reference."""
        plain = Recipe()
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)]


AXES = {"batch": 0, "heads": 1, "queries": 2, "keys": 3}


def attention(
    query: Tensor,  # (B, T, E)
    key: Tensor,
    value: Tensor,
    maps: Maps,
    num_heads: int,
    recipe: Recipe,
    *,
    visible: Tensor | None = None,  # broadcasts to (B, H, T, S)
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and weights of the changed reference; with a plain recipe they are those of the reference itself.

    >>> x, eye = torch.randn(2, 5, 6), reference.Linear(torch.eye(6))
    >>> right, _ = attention(x, x, x, (eye, eye, eye, eye), 3, Recipe())
    >>> wrong, _ = attention(x, x, x, (eye, eye, eye, eye), 3, Recipe(merge="view"))
    >>> torch.equal(right, wrong)
    False
    """
    if not [name for name in recipe.deviations if name != "scale"]:
        return reference.multi_head_attention(
            query, key, value, maps, num_heads, visible=visible, bias=bias, scale=recipe.scale
        )
    q, k, v = (split(m(x), num_heads, recipe.split) for m, x in zip(maps[:3], (query, key, value), strict=True))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if recipe.scale is None else recipe.scale)
    scores = recipe.cap * (scores / recipe.cap).tanh() if recipe.cap else scores
    scores = scores if bias is None else scores + bias
    if visible is not None and not recipe.masked_after:
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(AXES[recipe.axis]) * recipe.after_factor
    if visible is not None and recipe.masked_after:
        weights = weights.masked_fill(~visible, 0.0)
    merged = merge(weights @ v, recipe.merge)
    output = merged if maps[3] is None else maps[3](merged)
    return (output + recipe.residual * query if recipe.residual else output), weights


def split(x: Tensor, num_heads: int, how: str) -> Tensor:
    """(B, T, H·D) as (B, H, T, D), rightly or by a view."""
    B, T, width = x.shape
    if how == "view":
        return x.reshape(B, num_heads, T, width // num_heads)
    return x.reshape(B, T, num_heads, -1).transpose(1, 2)


def merge(heads: Tensor, how: str) -> Tensor:
    """(B, H, T, D) as (B, T, H·D), rightly or by a view."""
    B, H, T, D = heads.shape
    return heads.reshape(B, T, H * D) if how == "view" else side_by_side(heads)


def recipe(reading: AttentionReading) -> tuple[Recipe, Maps] | None:
    """What was understood, as a changed reference with the learner's own weights; None where it is not enough."""
    parts, out, scores = list(reading.projections.values()), reading.output, reading.scores
    if len(parts) < 3 or any(p.position or p.then or p.norm for p in parts) or out is None or scores is None:
        return None
    splits = {p.split for p in parts}
    if scores.relative or scores.axis not in AXES or len(splits) > 1 or not splits <= {"heads", "view"}:
        return None
    if out.merge not in ("heads", "view", "mean") or not out.last or out.before:
        return None
    query, key, value = (reference.Linear(p.fit.weight, p.fit.bias) for p in parts)
    made = Recipe(
        splits.pop(), scores.factor, scores.cap, scores.axis, scores.after_factor if scores.after != "random" else 1.0,
        scores.after == "masked", "heads" if out.merge == "mean" else out.merge, out.residual,
    )  # fmt: skip
    return made, (query, key, value, reference.Linear(out.fit.weight, out.fit.bias))


def prediction_error(bound: Bound, reading: AttentionReading) -> float | None:
    """The largest difference between prediction and output for new inputs; None if nothing is predicted."""
    made, scores = recipe(reading), reading.scores
    if made is None or scores is None or scores.after == "random":
        return None
    inputs = make_inputs(bound.form, bound.sizes, seed=7)
    output = bound.output_of(inputs)
    if output is None:
        return None
    visible, H = reading.visible, reading.core.heads.shape[1]
    visible = visible[:1].expand(visible.shape)
    predicted, _ = attention(*inputs, made[1], H, made[0], visible=visible, bias=scores.bias)
    gap = (output - predicted).abs()
    if scores.empty is not None:
        gap = gap[torch.isfinite(output)]
    return float(gap.max()) if gap.numel() else None


def expected_output(reading: AttentionReading, inputs: Inputs, mask: Tensor | None = None) -> Tensor | None:
    """What was understood, applied to inputs of any length, full or causal; None where that is not enough.

    `mask` (B, H, T, S) is True where a key may be seen.
    """
    made, scores = recipe(reading), reading.scores
    if made is None or scores is None or scores.bias is not None or scores.empty is not None:
        return None
    T, S = inputs.query.shape[1], inputs.key.shape[1]
    visible = torch.ones(T, S, dtype=torch.bool).tril() if reading.pattern == "causal" else None
    visible = mask if visible is None else visible if mask is None else visible & mask
    return attention(*inputs, made[1], reading.core.heads.shape[1], made[0], visible=visible)[0]


def reference_output(bound: Bound, reading: AttentionReading) -> Tensor | None:
    """What the reference gives with the learner's own weights on the traced inputs; None if that is not known."""
    made, scores = recipe(reading), reading.scores
    if made is None or scores is None or pattern(scores.visible) not in ("full", "causal"):
        return None
    factors = [part.role.factor for name, part in reading.projections.items() if name != "value"]
    if any(factor is None for factor in factors):
        return None
    D, H = reading.core.query.shape[-1], reading.core.heads.shape[1]
    scale = D**-0.5 / abs(math.prod(factor for factor in factors if factor is not None))
    plain = Recipe(scale=scale, cap=made[0].cap, residual=made[0].residual)
    return attention(*bound.inputs, made[1], H, plain, visible=scores.visible[:1], bias=scores.bias)[0]


def changed_maps(first: AttentionReading, second: AttentionReading | None) -> list[str]:
    """The steps that were read differently from another call of the same object with other inputs."""
    if second is None:
        return ["the attention"]
    found = [name for name, part in first.projections.items() if not _is_same_map(part, second.projections.get(name))]
    if (first.scores is None) != (second.scores is None) or not _are_same_scores(first.scores, second.scores):
        found.append("scores")
    if first.output is not None and not _is_same_output(first.output, second.output):
        found.append("output")
    return found


def _is_same_output(a: OutputMap, b: OutputMap | None) -> bool:
    if b is None or (a.merge, a.before, a.after, a.last) != (b.merge, b.before, b.after, b.last):
        return False
    biases = bool(((a.fit.bias - b.fit.bias).abs() <= ALIKE * (1 + a.fit.bias.abs())).all())
    return same(a.fit.weight, b.fit.weight, ALIKE) and biases


def _is_same_map(a: Projection, b: Projection | None) -> bool:
    if b is None or (a.source, a.split, a.position, a.norm, a.then) != (b.source, b.split, b.position, b.norm, b.then):
        return False
    if a.by_position is not None and b.by_position is not None:
        return same(a.by_position, b.by_position, ALIKE)
    return same(a.fit.weight, b.fit.weight, ALIKE)


def _are_same_scores(a: Scores | None, b: Scores | None) -> bool:
    if a is None or b is None:
        return a is b
    if (a.axis, a.after, a.swapped, a.leaks) != (b.axis, b.after, b.swapped, b.leaks) or abs(a.cap - b.cap) > ALIKE:
        return False
    return abs(a.factor - b.factor) <= ALIKE * abs(a.factor) and torch.equal(a.visible, b.visible)
