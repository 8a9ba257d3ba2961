"""Sums, means and largest weights along an axis, as of a tensor, and without making one where there is a way."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise.masks import Grid, Mask

if TYPE_CHECKING:
    from headwise.weights.map import AttentionMap


def reduced(weights: "AttentionMap", name: str, dim: Any, keepdim: bool, options: dict[str, Any]) -> Tensor:
    """`sum`, `mean` or `amax`: over queries or keys alone it streams."""
    dim = options.pop("axis", dim)
    options = _given(options)
    axis = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    found = None
    if axis is None and name in ("sum", "mean") and not options:
        rows = reduced(weights, name, -1, False, {})
        return rows.sum() if name == "sum" else rows.mean()
    if axis in (-1, 3) and not options:
        found = weights.peak().weight if name == "amax" else weights.mass(_Everything())
    elif axis in (-2, 2) and name != "amax" and not options:
        weights._with_keys(f"{name}(dim={dim})")
        found = weights.received().total
    if found is None:
        call = {} if dim is None else {"dim": dim, "keepdim": keepdim}
        return getattr(weights.to_tensor(), name)(**call, **options)  # type: ignore[no-any-return]
    found = found / weights.shape[axis] if name == "mean" else found
    return (found.unsqueeze(axis) if keepdim else found).to(weights.dtype)


def largest(weights: "AttentionMap", dim: Any, keepdim: bool, options: dict[str, Any]) -> Any:
    """`max`: over keys alone, or of everything, it streams."""
    dim = options.pop("axis", dim)
    if dim is None and not _given(options):
        return weights.amax(dim=-1).amax()
    if dim in (-1, 3) and not _given(options):
        weight, key = weights.peak()
        weight, key = weight.to(weights.dtype), key.clamp(min=0)
        found = (weight[..., None], key[..., None]) if keepdim else (weight, key)
        return torch.return_types.max(found)
    return weights.to_tensor().max(*(() if dim is None else (dim, keepdim)), **_given(options))


class _Everything(Mask):
    """Every key, for the sum of a row."""

    def visible(self, grid: Grid) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=grid.row.device)

    def hides_nothing(self, T: int, S: int) -> bool:
        return True


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that say something; numpy's own functions pass dtype=None and out=None."""
    return {name: value for name, value in options.items() if value is not None}
