"""Objects made of tensors and plain values, such as masks: they copy, move and save from their own definition.

A subclass of `Composite` needs no code for any of that. Whatever it keeps in its attributes is found there: tensors,
numbers, strings, other composites, and tuples, lists or dicts of these. Anything else is refused by name.

>>> class Marked(Composite):
...     def __init__(self, keys):
...         self.keys = keys
>>> tensors, plan = take_apart(Marked((torch.zeros(3), 7)))
>>> list(tensors)
['keys.0']
>>> put_together(plan, tensors).keys[1]
7
"""

import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from headwise.errors import CheckpointError, OptionError

Json = None | bool | int | float | str | list["Json"]
JSON = (type(None), bool, int, float, str)
# Values that hold no tensor, so that they stay as they are when an object is copied or moved.
PLAIN: tuple[type, ...] = (
    *(*JSON, complex, bytes, range, slice, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.SymInt, torch.SymFloat, torch.SymBool),
)

_known: dict[str, type["Composite"]] = {}


class Composite:
    """An object that consists of tensors and plain values."""

    _slotted = False  # whether some attributes are not in `__dict__`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _known[name_of(cls)] = cls
        cls._slotted = any(vars(base).get("__slots__") for base in cls.__mro__)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this object holds, those of nested objects included."""
        found: list[Tensor] = []
        _collect(_state(self).values() if self._slotted else vars(self).values(), found)
        return tuple(found)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy of this object in which `change` has been applied to every tensor."""
        tensors, plan = take_apart(self)
        made: Self = put_together(plan, {name: change(x) for name, x in tensors.items()})
        return made

    def to(self, device: torch.device | str) -> Self:
        """This object with its tensors on `device`."""
        return self.map_tensors(lambda x: x.to(device)) if self.tensors() else self


class Plan(NamedTuple):
    """How to rebuild a value from its tensors. Plans compare by value.

    kind: "tensor", "plain", "object", "tuple", "list" or "dict".
    what: the name of the tensor, the plain value, or the type to build.
    parts: the attributes or items of what is built, as (name or key, plan).
    """

    kind: str
    what: Any
    parts: tuple[tuple[Any, "Plan"], ...] = ()


def take_apart(value: Any) -> tuple[dict[str, Tensor], Plan]:
    """The tensors in `value`, named by where they are, and the plan that puts it together again."""
    tensors: dict[str, Tensor] = {}
    return tensors, _plan(value, "", tensors, type(value).__name__)


def put_together(plan: Plan, tensors: Mapping[str, Any]) -> Any:
    """The inverse of `take_apart`. No constructor runs, so anything may take the place of a tensor."""
    kind, what, parts = plan
    if kind == "tensor":
        return tensors[what]
    if kind == "plain":
        return what
    values = [put_together(part, tensors) for _, part in parts]
    if kind == "object":
        made = object.__new__(what)
        for (name, _), value in zip(parts, values, strict=True):
            object.__setattr__(made, name, value)
        return made
    if kind == "dict":
        return what(zip((key for key, _ in parts), values, strict=True))
    return what._make(values) if hasattr(what, "_make") else what(values)


def _plan(value: Any, path: str, tensors: dict[str, Tensor], owner: str) -> Plan:
    if isinstance(value, Tensor):
        tensors[path] = value
        return Plan("tensor", path)
    if isinstance(value, PLAIN):
        return Plan("plain", value)
    if isinstance(value, Composite) or dataclasses.is_dataclass(value):
        kind, owner = "object", type(value).__name__
        items: dict[Any, Any] = _state(value)
    elif isinstance(value, dict):
        kind, items = "dict", value
    elif isinstance(value, tuple | list):
        kind, items = "tuple" if isinstance(value, tuple) else "list", dict(enumerate(value))
    else:
        raise OptionError(
            f"{owner} keeps a {type(value).__name__} in {path!r}, which cannot be copied, moved or saved with it. Keep "
            f"tensors, numbers, strings, dataclasses, or tuples, lists and dicts of these."
        )
    parts = ((key, _plan(x, f"{path}.{key}" if path else str(key), tensors, owner)) for key, x in items.items())
    return Plan(kind, type(value), tuple(parts))


def _state(value: object) -> dict[str, Any]:
    """The attributes of an object, without those it can compute again."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = getattr(value, name)
    for name in list(found):
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del found[name]
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Composite):
            found.extend(value.tensors())
        elif isinstance(value, tuple | list):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _collect(_state(value).values(), found)


def name_of(cls: type) -> str:
    """What a class is called in a saved file. Ours keep their name when they move to another module."""
    return f"{cls.__module__.partition('.')[0] if _ours(cls) else cls.__module__}.{cls.__qualname__}"


def _ours(cls: type) -> bool:
    return cls.__module__.startswith("headwise.")


def plan_to_json(plan: Plan) -> Json:
    """The plan as JSON. What JSON cannot hold, and classes that are no composites, are refused by name."""
    kind, what, parts = plan
    if kind == "plain" and not isinstance(what, JSON):
        raise OptionError(
            f"a {type(what).__name__} cannot be saved: {what!r}. Files hold numbers, strings and tensors."
        )
    if kind == "object" and not issubclass(what, Composite):
        raise OptionError(f"a {what.__name__} cannot be saved: make it a subclass of headwise.masks.Composite.")
    if kind in ("tuple", "list", "dict") and what not in (tuple, list, dict):
        raise OptionError(f"a {what.__name__} cannot be saved. Use a plain tuple, list or dict.")
    name = name_of(what) if kind == "object" else what if kind in ("plain", "tensor") else None
    return [kind, name, [[_key(key), plan_to_json(part)] for key, part in parts]]


def _key(key: Any) -> Json:
    if isinstance(key, JSON):
        return key
    raise OptionError(f"a dict with the key {key!r} cannot be saved. Use strings or numbers as keys.")


def plan_from_json(written: Any) -> Plan:
    """The plan that `plan_to_json` wrote. Only classes that are already defined are used; nothing is imported."""
    containers = {"tuple": tuple, "list": list, "dict": dict}
    match written:
        case ["object", str(name), list(items)]:
            parts = _parts_from_json(items)
            return Plan("object", _class_for(name, [key for key, _ in parts]), parts)
        case ["tuple" | "list" | "dict" as kind, None, list(items)]:
            return Plan(kind, containers[kind], _parts_from_json(items))
        case ["tensor", str(name), []]:
            return Plan("tensor", name)
        case ["plain", None | bool() | int() | float() | str() as value, []]:
            return Plan("plain", value)
    raise CheckpointError(f"the description of a saved map is broken: {written!r}.")


def _parts_from_json(items: list[Any]) -> tuple[tuple[Any, Plan], ...]:
    if not all(isinstance(item, list) and len(item) == 2 and isinstance(item[0], JSON) for item in items):
        raise CheckpointError(f"the description of a saved map is broken: {items!r}.")
    return tuple((key, plan_from_json(part)) for key, part in items)


def _class_for(name: str, attributes: list[Any]) -> type[Composite]:
    cls = _known.get(name)
    if cls is None:
        raise CheckpointError(
            f"the saved map uses the class {name}, which is not defined yet. Import the module that defines it before "
            f"you load the map."
        )
    fields: list[str] = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    if not set(fields) <= set(attributes):
        raise CheckpointError(f"the saved {name} has the fields {attributes}, and the class now has {fields}.")
    return cls
