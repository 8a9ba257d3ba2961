"""Which parameter a solved map is made of, and by what factor: compares rows, so that no layout has to be known."""

from dataclasses import dataclass

import torch
from torch import Tensor

ALIKE = 1 - 1e-9  # cosine of two rows that are multiples of each other


@dataclass
class Role:
    """Rows of a map recognised among the parameters."""

    names: list[str]
    factor: float | None  # map = factor · parameter; None where rows differ in it or are not found
    plain: bool  # the map only copies its input: no parameter is involved
    sliced: bool  # every row reads one head's slice of the input only
    found: bool


def role(weight: Tensor, parameters: dict[str, Tensor], head_width: int, free: Tensor | None = None) -> Role:
    """The role of a solved weight (out, in); along the direction `free` (in) it is not determined."""
    if _copies(weight):
        return Role([], 1.0, True, False, True)
    nonzero = weight.abs() > 1e-9 * weight.abs().max()
    sliced = bool((nonzero.sum(1) <= head_width).all()) and weight.shape[1] > head_width
    rows = _packed(weight, nonzero, head_width) if sliced else weight
    names, factors = [], []
    free = None if sliced else free
    for name, parameter in parameters.items():
        hit, factor = _match(rows, parameter.detach(), free)
        if hit.any():
            names.append(name)
            factors.append((hit, factor))
    if not names:
        return Role([], None, False, sliced, False)
    covered = torch.stack([hit for hit, _ in factors]).any(0)
    values = torch.cat([factor[hit] for hit, factor in factors])
    uniform = bool((values - values[0]).abs().max() <= 1e-6 * values[0].abs())
    complete = bool(covered.all())
    return Role(names, float(values[0]) if uniform and complete else None, False, sliced, complete)


def _copies(weight: Tensor) -> bool:
    """Whether every row is a row of the identity, up to one common factor."""
    largest = weight.abs().max()
    ones = (weight.abs() > 1e-9 * largest).sum(1)
    return bool((ones == 1).all()) and bool(torch.isclose(weight.abs().max(1).values, largest).all())


def _packed(weight: Tensor, nonzero: Tensor, width: int) -> Tensor:
    """The nonzero part of every row, which starts at a multiple of the head width."""
    start = nonzero.float().argmax(1) // width * width
    columns = start[:, None] + torch.arange(width)
    return weight.gather(1, columns.clamp_max(weight.shape[1] - 1))


def _match(rows: Tensor, parameter: Tensor, free: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which rows are multiples of rows of the parameter, along any of its axes, and of what factor."""
    hits = torch.zeros(len(rows), dtype=torch.bool)
    factors = torch.zeros(len(rows), dtype=torch.float64)
    if not parameter.is_floating_point() or parameter.dim() < 2:
        return hits, factors
    for axis, size in enumerate(parameter.shape):
        if size != rows.shape[1]:
            continue
        candidates = parameter.movedim(axis, -1).reshape(-1, size).double()
        if free is not None:
            rows, candidates = (m - (m @ free)[:, None] * free for m in (rows, candidates))
        norms = candidates.norm(dim=1).clamp_min(1e-300)
        cosine = (rows @ candidates.T) / (rows.norm(dim=1).clamp_min(1e-300)[:, None] * norms)
        best, which = cosine.abs().max(1)
        new = (best > ALIKE) & ~hits
        signed = rows.norm(dim=1) / norms[which] * cosine.gather(1, which[:, None])[:, 0].sign()
        factors = torch.where(new, signed, factors)
        hits = hits | new
    return hits, factors
