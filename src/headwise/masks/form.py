"""A mask taken apart into its tensors and a plain description, and put together again.

Saving a map and passing one through torch's transforms (compile, export, vmap) both need the tensors apart.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from headwise.errors import MaskError
from headwise.masks import kinds, mask, placement, probes
from headwise.masks.mask import Mask

KINDS: dict[str, type[Mask]] = {
    kind.__name__: kind
    for kind in (
        mask.Both,
        mask.Either,
        mask.Not,
        kinds.Causal,
        kinds.Window,
        kinds.Prefix,
        kinds.Lengths,
        kinds.KeyMask,
        kinds.Documents,
        kinds.Dense,
        placement.Placed,
        placement.Shifted,
        probes.Offset,
        probes.Match,
    )
}
TENSOR = "tensor"  # stands in a description where a tensor was


def apart(mask: Mask | None) -> tuple[list[Tensor], Any]:
    """The tensors of a mask, and a description made of tuples, strings and numbers."""
    if mask is None:
        return [], None
    if type(mask) not in KINDS.values():
        raise MaskError(
            f"{mask!r} is a {type(mask).__name__}, a kind of mask that cannot be taken apart. Pass "
            f"dense(mask.to_tensor(T, S)) instead."
        )
    tensors: list[Tensor] = []
    fields = []
    for field in dataclasses.fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, field.name)
        if isinstance(value, Mask):
            inner, value = apart(value)
            tensors += inner
        elif isinstance(value, Tensor):
            tensors.append(value)
            value = TENSOR
        fields.append((field.name, value))
    return tensors, (type(mask).__name__, tuple(fields))


def together(tensors: Iterator[Tensor], description: Any) -> Mask | None:
    """The mask that was taken apart."""
    if description is None:
        return None
    name, fields = description
    values: dict[str, Any] = {}
    for field, value in fields:
        if isinstance(value, tuple | list):
            values[field] = together(tensors, value)
        else:
            values[field] = next(tensors) if value == TENSOR else value
    return KINDS[name](**values)
