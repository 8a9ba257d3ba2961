"""Solves for the linear map between two tensors, token by token: any projection, however its weights are stored."""

from typing import NamedTuple

import torch
from torch import Tensor

EXACT = 1e-7  # relative residual of a solved map in float64: rounding gives 1e-12, a wrong model gives 1e-1

WIDE = 128  # beyond this, solving takes noticeable time
FEW = 64  # up to this, solving by singular values takes little


class Fit(NamedTuple):
    """`y = x @ weight.T + bias` up to a relative residual."""

    weight: Tensor  # (out, in)
    bias: Tensor
    residual: float

    @property
    def exact(self) -> bool:
        """Whether it is the same map for every token, to rounding."""
        return self.residual < EXACT


def fit(x: Tensor, y: Tensor) -> Fit:
    """The affine map from tokens x (n, in) to tokens y (n, out) with the least squares."""
    x, y = x.double(), y.double()  # some classes compute in float32 inside, whatever comes in
    if not torch.isfinite(y).all() or not torch.isfinite(x).all() or len(x) <= x.shape[1] + 1:
        return Fit(y.new_zeros(y.shape[1], x.shape[1]), y.new_zeros(y.shape[1]), float("inf"))
    design = torch.cat([x, x.new_ones(len(x), 1)], 1)
    rows = min(len(x), x.shape[1] + 64) if x.shape[1] > WIDE else len(x)  # the others only test the solution
    solved = _solved(design, y, rows, "gelsy")
    if solved.residual >= EXACT and x.shape[1] <= FEW:  # inputs that do not span their space, as after a norm
        solved = _solved(design, y, rows, "gelsd")
    return solved


def _solved(design: Tensor, y: Tensor, rows: int, driver: str) -> Fit:
    solution = torch.linalg.lstsq(design[:rows], y[:rows], rcond=1e-11, driver=driver).solution
    error = (design @ solution - y).norm() / y.norm().clamp_min(1e-300)
    return Fit(solution[:-1].T, solution[-1], float(error))


def undetermined(x: Tensor) -> Tensor | None:
    """The direction (in) in which tokens do not vary, as after a layer norm: no fit can tell a weight along it."""
    if len(x) <= x.shape[1] or not torch.isfinite(x).all():
        return None
    _, sizes, directions = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    return directions[-1] if float(sizes[-1]) < 1e-9 * float(sizes[0]) < float(sizes[-2]) else None


def tokens(x: Tensor) -> Tensor:
    """(B, T, E) as (B·T, E)."""
    return x.reshape(-1, x.shape[-1])


def side_by_side(heads: Tensor) -> Tensor:
    """(B, H, T, D) as (B, T, H·D)."""
    return heads.transpose(1, 2).flatten(2)


def same(a: Tensor, b: Tensor, tolerance: float = 1e-8) -> bool:
    """Whether two tensors are equal to rounding, relative to their size."""
    if a.shape != b.shape or not torch.isfinite(a).all() or not torch.isfinite(b).all():
        return False
    return bool((a - b).norm() <= tolerance * (a.norm() + b.norm() + 1e-300))
