"""Reversed chunks of rows, and joining the results, for `attention/backends/triangles.py`.

A chunk is C rows. Its turned copy has C − 1 rows in reverse order: all but the last of a query chunk (`shift` 1), all
but the first of a key chunk (`shift` 0). Row t of turned chunk c is row (c + shift)·C + C − 1 − shift − t.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl
from torch import Tensor

from headwise.weights.kernels.launch import launch


@triton.jit
def turn_kernel(
    source, turned, s_batch, s_head, s_row, t_chunk, t_head, t_row, H, T, C, count, shift,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """The turned chunks (B · count, H, C − 1, D) of (B, H, T, D); rows beyond T become 0."""
    flat = tl.program_id(1)
    head, chunk = flat % H, flat // H
    batch, number = chunk // count, chunk % count
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    row = (number + shift) * C + C - 1 - shift - t
    columns = tl.arange(0, WIDTH)[None, :]
    source += batch.to(tl.int64) * s_batch + head.to(tl.int64) * s_head
    turned += chunk.to(tl.int64) * t_chunk + head.to(tl.int64) * t_head
    fits = (t < C - 1)[:, None] & (columns < D)
    x = tl.load(source + row.to(tl.int64)[:, None] * s_row + columns, mask=fits & (row < T)[:, None], other=0.0)
    tl.store(turned + t.to(tl.int64)[:, None] * t_row + columns, x, mask=fits)


@triton.jit
def join_kernel(
    near, near_lse, far, far_lse, joined, lse,
    n_chunk, n_head, n_row, f_chunk, f_head, f_row, j_batch, j_head, j_row,
    H, T, C, length, chunks, first, count, shift,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Join near chunks (B · chunks, H, length, D), starting at chunk `first` of the sequence, and the turned far parts
    of their rows into (B, H, T, D): weighted by their log-sum-exps (near_lse, far_lse contiguous), or just added."""
    flat = tl.program_id(1)
    head, chunk = flat % H, flat // H
    batch, number = chunk // chunks, chunk % chunks + first
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    t = C - 1 - shift - i
    far_chunk = number - shift
    both = (i < length) & (t >= 0) & (t < C - 1) & (far_chunk >= 0) & (far_chunk < count)
    columns = tl.arange(0, WIDTH)[None, :]
    inside = (i < length)[:, None] & (columns < D)
    beside = both[:, None] & (columns < D)
    far_flat = (batch * count + far_chunk).to(tl.int64)

    near += chunk.to(tl.int64) * n_chunk + head.to(tl.int64) * n_head
    far += far_flat * f_chunk + head.to(tl.int64) * f_head
    joined += batch.to(tl.int64) * j_batch + head.to(tl.int64) * j_head
    row = (number * C + i).to(tl.int64)
    x = tl.load(near + i.to(tl.int64)[:, None] * n_row + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(far + t.to(tl.int64)[:, None] * f_row + columns, mask=beside, other=0.0).to(tl.float32)
    if WEIGHTED:
        a = tl.load(near_lse + flat.to(tl.int64) * length + i, mask=i < length, other=0.0)
        b = tl.load(far_lse + (far_flat * H + head) * (C - 1) + t, mask=both, other=float("-inf"))
        most = tl.maximum(a, b)
        of_near, of_far = tl.exp(a - most), tl.exp(b - most)
        total = of_near + of_far
        x = x * (of_near / total)[:, None] + y * (of_far / total)[:, None]
        # Not over near_lse: several warps read a row's number, and one might read what another has written.
        tl.store(lse + (batch * H + head).to(tl.int64) * T + row, most + tl.log(total), mask=i < length)
    else:
        x += y
    tl.store(joined + row[:, None] * j_row + columns, x.to(joined.dtype.element_ty), mask=inside)


ROWS = 64  # rows per program; the time is spent on memory, not arithmetic
Read = tuple[Tensor, Tensor]  # output and log-sum-exp


def turn(x: Tensor, size: int, shift: int) -> Tensor:
    """Turned chunks (B · n, H, size − 1, D) of (B, H, T, D): shift 1 for queries, 0 for keys."""
    B, H, T, D = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    count = -(-T // size) - 1
    turned = torch.empty(B * count, H, size - 1, D, dtype=x.dtype, device=x.device)
    arguments = [x, turned, *x.stride()[:3], *turned.stride()[:3], H, T, size, count, shift]
    launch(turn_kernel, (triton.cdiv(size - 1, ROWS), B * count * H), arguments, _options(D))
    return turned


def join(near: Read, far: Read, into: Read, size: int, first: int) -> None:
    """Merge two parts of the rows from chunk `first` on into output (B, H, T, D) and log-sum-exp (B, H, T)."""
    _join(near, far, into, size, first, 1, weighted=True)


def add(near: Tensor, far: Tensor, into: Tensor, size: int, first: int, shift: int) -> None:
    """Add two parts of the rows from chunk `first` on into (B, H, T, D)."""
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
