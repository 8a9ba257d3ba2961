"""The indices that `weights[...]` selects along each axis, with the rules of torch.

Ints, slices, an ellipsis and at most one list or 1-D tensor select a block, and only that block is computed. Anything
else that torch accepts (several tensors, None, bool masks) is looked up element by element.
"""

from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from headwise.errors import MapIndexError, MapSizeError, OptionError
from headwise.weights.source import Axis

AXES = ("sample", "head", "query", "key")
LIMIT = 2**30  # bytes that a dense tensor may take by default


def block_axes(index: Any, shape: Sequence[int]) -> tuple[list[Axis], list[int]] | None:
    """The indices along each axis and the axes to drop (ints); None if this is not a block."""
    items = _complete(index, len(shape))
    if items is None:
        return None
    axes: list[Axis] = []
    dropped, lists = [], 0
    for number, (item, size) in enumerate(zip(items, shape, strict=True)):
        found = axis_of(item, size, AXES[number])
        if found is None:
            return None
        if isinstance(item, SupportsIndex) and not _is_list(item):
            dropped.append(number)
        lists += isinstance(found, Tensor)
        axes.append(found)
    return None if lists > 1 else (axes, dropped)


def axis_of(item: Any, size: int, name: str) -> Axis | None:
    """The indices `item` selects from an axis of `size`; None unless it is an int, a slice, a list or a 1-D tensor."""
    if isinstance(item, slice):
        return _from_slice(item, size, name)
    if _is_list(item):
        return _from_list(item, size, name)
    if isinstance(item, bool) or not isinstance(item, SupportsIndex):
        return None
    place = item.__index__()
    if not -size <= place < size:
        raise _out_of_range(place, size, name)
    return range(place % size, place % size + 1)


def pointwise(index: Any, shape: Sequence[int]) -> list[Tensor]:
    """The coordinates of every element of `tensor[index]`: one tensor per axis, of the shape of the result."""
    coordinates = []
    items = index if isinstance(index, tuple) else (index,)
    if not torch.compiler.is_compiling():  # a graph stays on its device
        items = tuple(item.cpu() if isinstance(item, Tensor) else item for item in items)
    index, device = tuple(items), next((item.device for item in items if isinstance(item, Tensor)), None)
    for number, size in enumerate(shape):
        ramp = (
            torch.arange(size, device=device).view(-1, *[1] * (len(shape) - number - 1)).expand(*shape)
        )  # a view of any size
        try:
            coordinates.append(ramp[index])
        except (IndexError, TypeError, RuntimeError) as error:
            raise MapIndexError(f"weights[{index!r}] on a map of shape {tuple(shape)}: {error}.") from error
    return coordinates


def _complete(index: Any, axes: int) -> list[Any] | None:
    """One item per axis, with the ellipsis expanded; None if an item does not belong to one axis."""
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
    """Whether an item is a single bool tensor, which torch reads as a mask of a new axis."""
    return isinstance(item, Tensor) and item.dim() == 0 and item.dtype in (torch.bool, torch.uint8)


def _is_list(item: Any) -> bool:
    """Whether an item selects many: a list, an array, or a tensor with axes."""
    return hasattr(item, "__len__") and not isinstance(item, str) and getattr(item, "shape", None) != ()


def _from_slice(item: slice, size: int, name: str) -> range:
    if item.step is not None and item.step < 1:
        raise MapIndexError(f"{name} slice {item}: the step must be above 0. Use .flip() on the result to reverse it.")
    found = range(size)[item]
    return found if len(found) else range(0)


def _from_list(item: Any, size: int, name: str) -> Tensor | None:
    if torch.compiler.is_compiling():
        return _from_traced_list(item, size, name)
    try:
        tensor = torch.as_tensor(item)
    except (TypeError, ValueError, RuntimeError) as error:
        raise MapIndexError(f"{name} index {item!r}: expected whole numbers or bool. {error}.") from error
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
        raise _out_of_range(int(worst[0]), size, name)
    return tensor % size


def _from_traced_list(item: Any, size: int, name: str) -> Tensor | None:
    """The same in a compiled graph, where the numbers of a tensor are not known: torch checks them when it runs."""
    if not isinstance(item, Tensor):
        wrong = [place for place in item if not -size <= place < size]
        if wrong:
            raise _out_of_range(wrong[0], size, name)
        return torch.tensor([place % size for place in item])
    if item.dim() != 1:
        return None
    if item.dtype in (torch.bool, torch.uint8):
        raise MapIndexError(
            f"{name} mask inside a compiled function: how many it selects is not known yet. Return the map from the "
            f"compiled function and index it outside, or pass whole numbers."
        )
    return torch.where(item < 0, item + size, item)


def _out_of_range(place: int, size: int, name: str) -> MapIndexError:
    return MapIndexError(f"{name} {place} is out of range: the map has {size} {_plural(name)}, 0 to {size - 1}.")


def _plural(name: str) -> str:
    return "queries" if name == "query" else f"{name}s"


def check_bytes(numbers: int, dtype: torch.dtype, limit: int, what: str) -> None:
    """Raise if this many numbers for `what` take more than `limit` bytes."""
    if isinstance(limit, bool) or not isinstance(limit, int | float):
        raise OptionError(f"{what} with limit={limit!r}: expected a number of bytes.")
    size = numbers * torch.finfo(dtype).bits // 8
    if size > limit:
        raise MapSizeError(
            f"{what} would take {_bytes(size)}, more than the limit of {_bytes(limit)}. Take a part, such as "
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
    """An index as it would be written, without the numbers of tensors."""
    items = index if isinstance(index, tuple) else (index,)
    return ", ".join("..." if x is Ellipsis else "tensor" if isinstance(x, Tensor) else _slice(x) for x in items)


def _slice(item: Any) -> str:
    if not isinstance(item, slice):
        return repr(item)
    parts = ["" if x is None else str(x) for x in (item.start, item.stop)]
    return ":".join(parts) if item.step is None else ":".join([*parts, str(item.step)])
