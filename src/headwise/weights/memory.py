"""Remembers what was computed from masks, so that asking again costs nothing."""

import collections
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

MOST = 32  # results that are kept; each has at most a few numbers per token
Result = TypeVar("Result")


class BoundedMemory:
    """Results by the objects they come from and by a key. The oldest are forgotten first.

    An object is recognized by its identity, and by how often its tensors were changed in place. It is not kept alive.
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.kept: collections.OrderedDict[Hashable, tuple[list[weakref.ref[Any]], Any]] = collections.OrderedDict()

    def get(self, objects: Sequence[Any], key: Hashable, make: Callable[[], Result]) -> Result:
        """What `make` gives, or gave for these masks and tensors and this key."""
        objects = [x for x in objects if x is not None]
        try:
            place = (tuple(map(id, objects)), tuple(x._version for x in _tensors(objects)), key)
            owners = [weakref.ref(x) for x in objects]
        except (RuntimeError, TypeError):  # inference tensors count no changes, and some classes have no references
            return make()
        if torch.compiler.is_compiling():
            return make()
        known = self.kept.get(place)
        if known is None or any(ref() is not x for ref, x in zip(known[0], objects, strict=True)):
            known = self.kept[place] = (owners, make())
        self.kept.move_to_end(place)
        while len(self.kept) > self.most:
            self.kept.popitem(last=False)
        result: Result = known[1]
        return result


def _tensors(objects: Sequence[Any]) -> list[Tensor]:
    """The tensors of masks, and those given as they are."""
    return [t for x in objects for t in ([x] if isinstance(x, Tensor) else x.tensors())]
