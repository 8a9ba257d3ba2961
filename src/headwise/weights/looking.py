"""Exact weights of a source, where somebody looks: a block of them, or single ones, within a limit of bytes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import MapSizeError
from headwise.masks import Grid
from headwise.weights import engine
from headwise.weights.indexing import pointwise
from headwise.weights.source import Axis, Source, full_precision

LIMIT = 2**30  # bytes a dense tensor may take unless the caller says otherwise


def tile(source: Source, cols: Axis, dtype: torch.dtype | None = None) -> Tensor:
    """All rows of the source and these keys, (B, H, t, s), in this dtype, or the precise one."""
    dtype = dtype or source.precise
    keys = cols if isinstance(cols, Tensor) else slice(cols.start, cols.stop, cols.step)
    if 0 in source.shape or len(cols) == 0:
        B, H, T, _ = source.shape
        return torch.zeros(B, H, T, len(cols), dtype=dtype, device=source.query.device)
    found = by_kernel(source, cols, dtype)
    if found is not None:
        return found
    lse = engine.log_sum_exp(source)
    empty = lse == -torch.inf
    scores = source.scores(cols=keys.to(source.query.device) if isinstance(keys, Tensor) else keys)
    weights = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()  # an empty row has only scores of minus infinity
    return weights.to(dtype)


def by_kernel(source: Source, cols: Axis, dtype: torch.dtype) -> Tensor | None:
    """On CUDA, for neighbouring keys and without a gradient, one kernel writes the weights and nothing else."""
    kernels = engine.kernels_for(source)
    if kernels is None or source.learns or 0 in source.shape or isinstance(cols, Tensor) or cols.step != 1:
        return None
    found: Tensor | None = kernels.weights(source, engine.log_sum_exp(source), cols, dtype)
    return found


def elements(source: Source, index: Any, shape: Sequence[int]) -> Tensor:
    """Weights one by one, for index forms that cut out no block."""
    batch, head, row, col = (x.to(source.query.device) for x in pointwise(index, shape))
    check_bytes(col.numel() * source.query.shape[3], source.precise, LIMIT, "weights[...] element by element")
    frame = source.frame
    query = source.query[batch, head, row].to(source.precise)  # (..., D)
    key = source.key[batch, head // source.group, col].to(source.precise)
    grid = Grid(source.axis("batch")[batch], source.axis("head")[head], source.axis("row")[row], col, frame.T, frame.S)
    with full_precision(query):
        scores = source.finished((query * key).sum(-1), grid)
    lse = engine.log_sum_exp(source)[batch, head, row]
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp().to(source.query.dtype)


def check_bytes(numbers: int, dtype: torch.dtype, limit: int, what: str) -> None:
    """Raise if `what`, so many numbers, takes more than `limit` bytes."""
    size = numbers * torch.finfo(dtype).bits // 8
    if size > limit:
        raise MapSizeError(
            f"{what} would take {_bytes(size)}, more than the limit of {_bytes(limit)}. Look at a part, such as "
            f"weights[0, 3, :256, :256], ask for a statistic (entropy, received, topk, ...) or a picture "
            f"(weights.pooled(512, 512)), or narrow the map with weights.select(...) and pass to_tensor(limit={size})."
        )


def _bytes(size: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024  # type: ignore[assignment]
    return f"{size:.4g} TiB"


def brief(index: Any) -> str:
    """An index as one would write it, without the numbers of tensors."""
    items = index if isinstance(index, tuple) else (index,)
    return ", ".join("..." if x is Ellipsis else "tensor" if isinstance(x, Tensor) else _slice(x) for x in items)


def _slice(item: Any) -> str:
    if not isinstance(item, slice):
        return repr(item)
    parts = ["" if x is None else str(x) for x in (item.start, item.stop)]
    return ":".join(parts) if item.step is None else ":".join([*parts, str(item.step)])
