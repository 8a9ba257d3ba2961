"""The reference with single steps changed: what a learner's class computes, as deviations from the right one."""

import math
from dataclasses import dataclass, fields

from torch import Tensor

from headwise import reference

Maps = tuple[reference.Linear, reference.Linear, reference.Linear, reference.Linear | None]


@dataclass(frozen=True)
class Recipe:
    """One choice for every step; the defaults are the reference. A mutant has one deviation, some code has several."""

    split: str = "heads"  # or view: no transpose
    scale: float | None = None  # 1/√D unless given
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
    """Output and weights of the changed reference. With a plain recipe it *is* the reference.

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
    """(B, T, H·D) as (B, H, T, D), or what a bare view makes of it."""
    B, T, width = x.shape
    if how == "view":
        return x.reshape(B, num_heads, T, width // num_heads)
    return x.reshape(B, T, num_heads, -1).transpose(1, 2)


def merge(heads: Tensor, how: str) -> Tensor:
    """(B, H, T, D) as (B, T, H·D), or what a bare view makes of it."""
    B, H, T, D = heads.shape
    if how == "view":
        return heads.reshape(B, T, H * D)
    return heads.transpose(1, 2).flatten(2)
