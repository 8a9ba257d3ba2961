"""Calls the kernels of `triangles.py`."""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from headwise.weights.kernels.triangles import join_kernel, turn_kernel

ROWS = 64  # a program copies this many; what counts is memory, not arithmetic
Read = tuple[Tensor, Tensor]  # output and log-sum-exp


def turn(x: Tensor, size: int, shift: int) -> Tensor:
    """Turned chunks (B · n, H, size − 1, D) of (B, H, T, D): of queries with shift 1, of keys with 0."""
    B, H, T, D = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    count = -(-T // size) - 1
    turned = torch.empty(B * count, H, size - 1, D, dtype=x.dtype, device=x.device)
    arguments = [x, turned, *x.stride()[:3], *turned.stride()[:3], H, T, size, count, shift]
    launch(turn_kernel, (triton.cdiv(size - 1, ROWS), B * count * H), arguments, _options(D))
    return turned


def join(near: Read, far: Read, into: Read, size: int, first: int) -> None:
    """Rows from chunk `first` on, read in two parts, into output (B, H, T, D) and log-sum-exp (B, H, T)."""
    _join(near, far, into, size, first, 1, weighted=True)


def add(near: Tensor, far: Tensor, into: Tensor, size: int, first: int, shift: int) -> None:
    """Rows from chunk `first` on, the sum of two parts, into (B, H, T, D)."""
    _join((near, near), (far, far), (into, into), size, first, shift, weighted=False)


def _join(near: Read, far: Read, into: Read, size: int, first: int, shift: int, weighted: bool) -> None:
    (x, x_lse), (y, y_lse), (joined, lse) = near, far, into
    B, H, T, D = joined.shape
    x, y = (part if part.stride(3) == 1 else part.contiguous() for part in (x, y))
    length, chunks, count = x.shape[2], x.shape[0] // B, y.shape[0] // B
    strides = [*x.stride()[:3], *y.stride()[:3], *joined.stride()[:3]]
    sizes = [H, T, size, length, chunks, first, count, shift]
    arguments = [x, x_lse, y, y_lse, joined, lse, *strides, *sizes]
    launch(join_kernel, (triton.cdiv(length, ROWS), len(x) * H), arguments, {"WEIGHTED": weighted} | _options(D))


def _options(D: int) -> dict[str, int]:
    return {"D": D, "WIDTH": triton.next_power_of_2(D), "BM": ROWS, "num_warps": 4, "num_stages": 1}


def launch(kernel: Any, grid: tuple[int, int], arguments: list[Any], options: dict[str, Any]) -> None:
    """Run on the device of the first tensor."""
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        kernel[grid](*arguments, **options)
