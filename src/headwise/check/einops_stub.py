"""The part of einops that attention needs, for machines without it: rearrange, repeat, reduce and einsum."""

import re
from typing import Any

import torch
from torch import Tensor, nn

Axes = list[list[str]]


def _axes(side: str) -> Axes:
    """`b n (h d)` as [[b], [n], [h, d]]."""
    found: Axes = []
    for group, single in re.findall(r"\(([^)]*)\)|(\S+)", side):
        found.append([] if single in ("1", "()") else group.split() if not single else [single])
    return found


def _widened(axes: Axes, dims: int, other: Axes) -> tuple[Axes, Axes]:
    """An ellipsis written out."""
    flat = [name for group in axes for name in group]
    if "..." not in flat:
        return axes, other
    names = [f"_{i}" for i in range(dims - len(axes) + 1)]

    def spread(groups: Axes) -> Axes:
        return [g for group in groups for g in ([[n] for n in names] if group == ["..."] else [group])]

    return spread(axes), spread(other)


def _split(x: Tensor, axes: Axes, sizes: dict[str, int]) -> Tensor:
    """Every axis of its own, with the sizes that follow from the shape written into `sizes`."""
    shape: list[int] = []
    for group, size in zip(axes, x.shape, strict=True):
        unknown = [name for name in group if name not in sizes]
        known = 1
        for name in group:
            known *= sizes.get(name, 1)
        if len(unknown) == 1:
            sizes[unknown[0]] = size // known
        if group and known * (sizes[unknown[0]] if unknown else 1) != size:
            raise ValueError(f"cannot split an axis of {size} into {group} with {sizes}")
        shape += [sizes[name] for name in group]
    return x.reshape(shape)


def rearrange(x: Any, pattern: str, /, **sizes: int) -> Tensor:
    """As einops.rearrange."""
    return repeat(x, pattern, **sizes)


def repeat(x: Any, pattern: str, /, **sizes: int) -> Tensor:
    """As einops.repeat, and rearrange where no axis is new."""
    x = torch.stack(list(x)) if isinstance(x, list | tuple) else x
    left, right = (_axes(side) for side in pattern.split("->"))
    left, right = _widened(left, x.dim(), right)
    x = _split(x, left, sizes)
    flat_left = [name for group in left for name in group]
    flat_right = [name for group in right for name in group]
    for name in [name for name in flat_right if name not in flat_left]:
        x = x.unsqueeze(-1).expand(*x.shape, sizes[name])
        flat_left.append(name)
    x = x.permute([flat_left.index(name) for name in flat_right])
    result: Tensor = x.reshape([_product(group, sizes) for group in right])
    return result


def _product(group: list[str], sizes: dict[str, int]) -> int:
    result = 1
    for name in group:
        result *= sizes[name]
    return result


def reduce(x: Tensor, pattern: str, how: str, /, **sizes: int) -> Tensor:
    """As einops.reduce for mean, sum and max."""
    left, right = (_axes(side) for side in pattern.split("->"))
    left, right = _widened(left, x.dim(), right)
    x = _split(x, left, sizes)
    flat_left = [name for group in left for name in group]
    flat_right = [name for group in right for name in group]
    gone = [i for i, name in enumerate(flat_left) if name not in flat_right]
    x = x.amax(gone) if how == "max" else getattr(x, how)(gone)
    kept = [name for name in flat_left if name in flat_right]
    x = x.permute([kept.index(name) for name in flat_right])
    return x.reshape([_product(group, sizes) for group in right])


def einsum(*operands: Any) -> Tensor:
    """As einops.einsum: tensors first, names of several letters."""
    *tensors, pattern = operands
    names = sorted(set(re.findall(r"[A-Za-z_]\w*", pattern)))
    letters = {name: chr(ord("a") + i) for i, name in enumerate(names)}
    short = re.sub(r"[A-Za-z_]\w*", lambda m: letters[m[0]], pattern)
    return torch.einsum(short.replace(" ", ""), *tensors)


class Rearrange(nn.Module):
    """As einops.layers.torch.Rearrange."""

    def __init__(self, pattern: str, **sizes: int) -> None:
        super().__init__()
        self.pattern, self.sizes = pattern, sizes

    def forward(self, x: Tensor) -> Tensor:
        """The rearranged tensor."""
        return rearrange(x, self.pattern, **self.sizes)
