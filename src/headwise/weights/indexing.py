"""What `weights[...]` means: for every axis of a map which indices, in torch's own terms.

Ints, slices, an ellipsis and at most one list or 1-D tensor cut out a block, and only that block is computed. Anything
else that torch takes (several tensors, None, masks of bool) is answered element by element.
"""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from headwise.errors import MapIndexError, MapSizeError
from headwise.masks import Grid
from headwise.weights import streaming
from headwise.weights.source import Axis, Source, full_precision

NAMES = ("sample", "head", "query", "key")


def block_axes(index: Any, shape: Sequence[int]) -> tuple[list[Axis], list[int]] | None:
    """The indices of each axis and the axes to drop (ints); None if this is no block."""
    items = _complete(index, len(shape))
    if items is None:
        return None
    axes: list[Axis] = []
    dropped, lists = [], 0
    for number, (item, size) in enumerate(zip(items, shape, strict=True)):
        found = axis_of(item, size, NAMES[number])
        if found is None:
            return None
        if isinstance(item, SupportsIndex) and not _is_list(item):
            dropped.append(number)
        lists += isinstance(found, Tensor)
        axes.append(found)
    return None if lists > 1 else (axes, dropped)


def axis_of(item: Any, size: int, name: str) -> Axis | None:
    """The indices `item` takes from an axis of `size`; None if it is no int, slice, list or 1-D tensor."""
    if isinstance(item, slice):
        return _from_slice(item, size, name)
    if _is_list(item):
        return _from_list(item, size, name)
    if isinstance(item, bool) or not isinstance(item, SupportsIndex):
        return None
    place = item.__index__()
    if not -size <= place < size:
        raise MapIndexError(f"{name} {place} is out of range: the map has {size} {_plural(name)}, 0 to {size - 1}.")
    return range(place % size, place % size + 1)


def pointwise(index: Any, shape: Sequence[int]) -> list[Tensor]:
    """For every element of `tensor[index]`, its coordinates: one tensor per axis, of the shape of the result."""
    coordinates = []
    items = index if isinstance(index, tuple) else (index,)
    index = tuple(item.cpu() if isinstance(item, Tensor) else item for item in items)
    for number, size in enumerate(shape):
        ramp = torch.arange(size).view(-1, *[1] * (len(shape) - number - 1)).expand(*shape)  # a view, however large
        try:
            coordinates.append(ramp[index])
        except (IndexError, TypeError, RuntimeError) as error:
            raise MapIndexError(f"weights[{index!r}] on a map of shape {tuple(shape)}: {error}.") from error
    return coordinates


def _complete(index: Any, axes: int) -> list[Any] | None:
    """One item per axis, with the ellipsis spelled out; None if an item does not belong to one axis."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(item is None or isinstance(item, bool) or _is_flag(item) for item in items):
        return None
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(dots) > 1:
        raise MapIndexError("weights[..., ...]: an index can only have one ellipsis.")
    if len(items) - len(dots) > axes:
        raise MapIndexError(f"weights[...] with {len(items) - len(dots)} indices: a map has {axes} axes, (B, H, T, S).")
    fill = [slice(None)] * (axes - len(items) + len(dots))
    at = dots[0] if dots else len(items)
    return [*items[:at], *fill, *items[at + 1 :]]


def _is_flag(item: Any) -> bool:
    """Whether an item is a single truth value, which torch reads as a mask of a new axis."""
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in (torch.bool, torch.uint8)


def _is_list(item: Any) -> bool:
    """Whether an item selects many: a list, an array, or a tensor with axes."""
    return hasattr(item, "__len__") and not isinstance(item, str) and getattr(item, "shape", None) != ()


def _from_slice(item: slice, size: int, name: str) -> range:
    if item.step is not None and item.step < 1:
        raise MapIndexError(
            f"{name} slice {item}: the step must be above 0. Use .flip() on the result to turn it round."
        )
    found = range(size)[item]
    return found if len(found) else range(0)


def _from_list(item: Any, size: int, name: str) -> Tensor | None:
    tensor = torch.as_tensor(item)
    if tensor.dim() != 1:
        return None
    if tensor.dtype in (torch.bool, torch.uint8):  # torch still reads uint8 as a mask
        if len(tensor) != size:
            raise MapIndexError(f"{name} mask of length {len(tensor)}: the map has {size} {_plural(name)}.")
        return tensor.nonzero()[:, 0].cpu()
    if tensor.numel() == 0:
        return tensor.long().cpu()
    if tensor.is_floating_point() or tensor.is_complex():
        raise MapIndexError(f"{name} index of {tensor.dtype}: expected whole numbers or bool.")
    tensor = tensor.long().cpu()
    worst = tensor[(tensor < -size) | (tensor >= size)]
    if len(worst):
        raise MapIndexError(
            f"{name} {int(worst[0])} is out of range: the map has {size} {_plural(name)}, 0 to {size - 1}."
        )
    return tensor % size


def _plural(name: str) -> str:
    return "queries" if name == "query" else f"{name}s"


# Exact weights of a source, where somebody looks: a block of them, or single ones, within a limit of bytes.

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
    lse = streaming.log_sum_exp(source)
    empty = lse == -torch.inf
    scores = source.scores(cols=keys.to(source.query.device) if isinstance(keys, Tensor) else keys)
    weights = (scores - lse.masked_fill(empty, 0.0)[..., None]).exp()  # an empty row has only scores of minus infinity
    return weights.to(dtype)


def by_kernel(source: Source, cols: Axis, dtype: torch.dtype) -> Tensor | None:
    """On CUDA, for neighbouring keys and without a gradient, one kernel writes the weights and nothing else."""
    kernels = streaming.kernels_for(source)
    if kernels is None or source.learns or 0 in source.shape or isinstance(cols, Tensor) or cols.step != 1:
        return None
    found: Tensor | None = kernels.weights(source, streaming.log_sum_exp(source), cols, dtype)
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
    lse = streaming.log_sum_exp(source)[batch, head, row]
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
