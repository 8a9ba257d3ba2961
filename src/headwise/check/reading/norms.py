"""Whether one tensor is another one normalized, or holds the same numbers in another order."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.fits import same, side_by_side

LARGE = 500_000  # numbers; of more, no norm over tokens and groups is looked for


def is_head_norm(before: Tensor, heads: Tensor) -> bool:
    """Whether heads (B, H, T, D) are a norm of every head's slice of (B, T, H·D)."""
    return is_norm(before.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2), heads)


def is_group_norm(before: Tensor, after: Tensor) -> bool:
    """Whether (B, T, E) was normalized over all tokens and groups of channels, up to a scale and shift of each."""
    if before.shape != after.shape or before.dim() != 3 or before.numel() > LARGE:
        return False
    groups = [n for n in (1, 2, 4, 8, 16, 32) if before.shape[-1] % n == 0]
    return any(_is_scaled(_unit_groups(before, n), after) for n in groups)


def _unit_groups(x: Tensor, groups: int) -> Tensor:
    pieces = x.unflatten(-1, (groups, -1))
    plain = pieces - pieces.mean((1, 3), keepdim=True)
    return torch.flatten(plain / plain.pow(2).mean((1, 3), keepdim=True).sqrt(), 2)


def _is_scaled(unit: Tensor, after: Tensor) -> bool:
    """Whether one is the other up to a scale and shift for each channel; a norm's epsilon is unknown."""
    x, y = unit.flatten(0, -2), after.flatten(0, -2)
    x, y = x - x.mean(0), y - y.mean(0)
    slope = (x * y).sum(0) / (x * x).sum(0)
    return float((y - slope * x).norm()) < 1e-3 * float(y.norm())


def is_norm(before: Tensor, after: Tensor) -> bool:
    """Whether this is a layer norm or RMS norm over the last axis, up to a scale and shift for each channel."""
    if before.shape != after.shape:
        return False
    for plain in (before, before - before.mean(-1, keepdim=True)):
        if _is_scaled(plain / plain.pow(2).mean(-1, keepdim=True).sqrt(), after):
            return True
    return False


def as_tokens(value: Tensor, heads: Tensor) -> Iterator[Tensor]:
    """A tensor as (B, T, anything), where its shape says how."""
    B, _, T, _ = heads.shape
    if value.shape[:2] == (B, T):
        yield value.reshape(B, T, -1)
    elif value.shape[:2] == (T, B):
        yield value.reshape(T, B, -1).transpose(0, 1)
    elif value.dim() == 4 and value.shape[0] == B and value.shape[2] == T:
        yield side_by_side(value)
    elif value.shape[0] == B * T:
        yield value.reshape(B, T, -1)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers in any order."""
    return same(a.flatten().sort().values, b.flatten().sort().values)


def in_any_layout(value: Tensor) -> Iterator[Tensor]:
    """Readings as (B, T, E): batch first, batch second, channels first, an image, or a volume."""
    if value.dim() == 3:
        yield from (value, value.transpose(0, 1), value.transpose(1, 2))
    elif value.dim() == 4:
        yield from (value.flatten(2).transpose(1, 2), value.flatten(1, 2))
    elif value.dim() == 5:
        yield value.flatten(2).transpose(1, 2)
