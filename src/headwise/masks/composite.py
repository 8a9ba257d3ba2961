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
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from headwise.errors import CheckpointError, DeviceError, OptionError

Value = TypeVar("Value")


class Opaque:
    """A value that stays as it is when the object that keeps it is copied or moved. It holds no tensors of its own."""

    def __deepcopy__(self, memo: object) -> Self:
        return self


Json = None | bool | int | float | str | list["Json"]
JSON = (type(None), bool, int, float, str)
CONTAINERS: dict[str, type] = {"tuple": tuple, "list": list, "dict": dict}
# Values that hold no tensor, so that they stay as they are when an object is copied or moved.
PLAIN: tuple[type, ...] = (
    *(*JSON, complex, bytes, range, slice, enum.Enum, type, types.FunctionType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.SymInt, torch.SymFloat, torch.SymBool, Opaque),
)
SIMPLE = frozenset(JSON)  # the exact types of most values, for speed

_known: dict[str, type["Composite"]] = {}


class Composite:
    """An object that consists of tensors and plain values."""

    _slots: tuple[str, ...] = ()  # attributes that are not in `__dict__`
    _derived: frozenset[str] = frozenset()  # attributes that are computed again when needed
    _later: ClassVar[frozenset[str]] = frozenset()  # fields that older files lack; they have their default then

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _known[name_of(cls)] = cls
        attributes = {name: x for base in reversed(cls.__mro__) for name, x in vars(base).items()}
        cls._slots = tuple(name for base in cls.__mro__ for name in _slots_of(base))
        cls._derived = frozenset(name for name, x in attributes.items() if isinstance(x, functools.cached_property))

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this object holds, those of nested objects included."""
        found: list[Tensor] = []
        _collect(_attributes(self).values(), found)
        return tuple(found)

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """A copy of this object in which `change` has been applied to every tensor."""
        return map_tensors(self, change)

    def to(self, device: torch.device | str) -> Self:
        """This object with its tensors on `device`."""
        tensors = self.tensors()
        if not tensors:
            return self
        if any(x.is_meta for x in tensors) and torch.device(device).type != "meta":
            raise DeviceError(
                f"this {type(self).__name__} was made from tensors on the meta device, so its numbers are lost. Make "
                f"it from numbers or from tensors outside of torch.device('meta'); it moves with its layer."
            )
        return self.map_tensors(lambda x: x.to(device))


def as_real_tensor(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """`x` as a tensor that holds its numbers, even where the default device is meta. A tensor stays as it is."""
    if isinstance(x, Tensor):
        return x
    lost = not torch.compiler.is_compiling() and torch.get_default_device().type == "meta"
    return torch.as_tensor(x, dtype=dtype, device="cpu" if lost else None)


class Plan(NamedTuple):
    """How to rebuild a value from its tensors. Plans compare by value.

    kind: "tensor", "plain" or "parts".
    what: the name of the tensor, the plain value, or the type to build.
    parts: the attributes or items of what is built, as (name or key, plan).
    """

    kind: str
    what: Any
    parts: tuple[tuple[Any, "Plan"], ...] = ()


def take_apart(value: Any) -> tuple[dict[str, Tensor], Plan]:
    """The tensors in `value`, named by where they are, and the plan that puts it together again."""
    tensors: dict[str, Tensor] = {}

    def plan(value: Any, path: str, owner: str) -> Plan:
        if type(value) in SIMPLE:
            return Plan("plain", value)
        if isinstance(value, Tensor):
            tensors[path] = value
            return Plan("tensor", path)
        parts = _parts(value, path, owner)
        if parts is None:
            return Plan("plain", value)
        within, name = f"{path}." if path else "", type(value).__name__
        items = tuple((key, plan(x, f"{within}{key}", name)) for key, x in parts.items())
        return Plan("parts", type(value), items)

    return tensors, plan(value, "", "")


def put_together(plan: Plan, tensors: Mapping[str, Any]) -> Any:
    """The inverse of `take_apart`. No constructor runs, so anything may take the place of a tensor."""
    kind, what, parts = plan
    if kind == "parts":
        return _build(what, {key: put_together(part, tensors) for key, part in parts})
    return tensors[what] if kind == "tensor" else what


def map_tensors(value: Value, change: Callable[[Tensor], Tensor], path: str = "", owner: str = "") -> Value:
    """A copy of `value` in which `change` has been applied to every tensor."""
    if type(value) in SIMPLE:
        return value
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    parts = _parts(value, path, owner)
    if parts is None:
        return value
    name = type(value).__name__
    made: Value = _build(type(value), {key: map_tensors(x, change, str(key), name) for key, x in parts.items()})
    return made


def _parts(value: Any, path: str, owner: str) -> dict[Any, Any] | None:
    """The attributes or items of a value that may hold tensors; None for a plain value."""
    if isinstance(value, Composite) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return _attributes(value)
    if isinstance(value, dict):
        return value
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if isinstance(value, PLAIN):
        return None
    raise OptionError(
        f"{owner} keeps a {type(value).__name__} in {path!r}, which cannot be copied, moved or saved with it. Keep "
        f"tensors, numbers, strings, dataclasses, or tuples, lists and dicts of these."
    )


def _build(cls: type, parts: dict[Any, Any]) -> Any:
    """The inverse of `_parts`."""
    if issubclass(cls, dict):
        return cls(parts)
    if issubclass(cls, tuple | list):
        return cls._make(parts.values()) if hasattr(cls, "_make") else cls(parts.values())
    made = object.__new__(cls)
    for name, value in parts.items():
        object.__setattr__(made, name, value)
    return made


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, without those it can compute again."""
    if not isinstance(value, Composite):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not (value._slots or value._derived):
        return vars(value)
    found = {name: getattr(value, name) for name in value._slots if hasattr(value, name)}
    return found | {name: x for name, x in vars(value).items() if name not in value._derived}


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    """Add all tensors in these values to `found`."""
    for value in values:
        if type(value) in SIMPLE:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, Composite):
            found.extend(value.tensors())
        elif isinstance(value, tuple | list):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            _collect(_attributes(value).values(), found)


def name_of(cls: type) -> str:
    """What a class is called in a saved file. Ours keep their name when they move to another module."""
    module = cls.__module__
    return f"{'headwise' if module.startswith('headwise.') else module}.{cls.__qualname__}"


def plan_to_json(plan: Plan) -> Json:
    """The plan as JSON. What JSON cannot hold, and classes that are not composites, are refused by name."""
    kind, what, parts = plan
    if kind == "tensor":
        return ["tensor", what]
    if kind == "plain":
        if isinstance(what, types.FunctionType):
            return ["function", *_address(what)]
        if not isinstance(what, JSON):
            cure = " Define it at the top of a module, or save weights.kept()." if isinstance(what, Opaque) else ""
            raise OptionError(f"{what!r} cannot be saved. Files hold tensors, numbers and strings.{cure}")
        return ["plain", what]
    items: list[Json] = [[_key(key), plan_to_json(part)] for key, part in parts]
    if what in CONTAINERS.values():
        return [what.__name__, items]
    if not issubclass(what, Composite):
        raise OptionError(
            f"a {what.__name__} cannot be saved. Use a plain tuple, list or dict, or derive the class from "
            f"headwise.masks.Composite."
        )
    return ["object", name_of(what), items]


def _address(function: types.FunctionType) -> tuple[str, str]:
    """The module and name by which a function is found again; refused if there are none, as for a lambda."""
    module, name = function.__module__, function.__qualname__
    if not has_address(function):
        raise OptionError(
            f"the function {module}.{name} cannot be saved, because it cannot be found by name. Define it at the "
            f"top of a module; or save weights.kept(), which needs no function."
        )
    return module, name


def has_address(value: object) -> bool:
    """Whether `value` is a function that its module and name lead to."""
    return isinstance(value, types.FunctionType) and _found(value.__module__, value.__qualname__) is value


def _found(module: str, name: str) -> Any:
    """The value of this name in a module that is already imported; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _function(module: str, name: str) -> types.FunctionType:
    found = _found(module, name)
    if not isinstance(found, types.FunctionType):
        raise CheckpointError(
            f"the saved map uses the function {module}.{name}, which is not defined yet. Import the module that "
            f"defines it before you load the map."
        )
    return found


def _key(key: Any) -> Json:
    if isinstance(key, JSON):
        return key
    raise OptionError(f"a dict with the key {key!r} cannot be saved. Use strings or numbers as keys.")


def plan_from_json(written: Any) -> Plan:
    """The plan that `plan_to_json` wrote. Only classes that are already defined are used; nothing is imported."""
    match written:
        case ["tensor", str(name)]:
            return Plan("tensor", name)
        case ["plain", None | bool() | int() | float() | str() as value]:
            return Plan("plain", value)
        case ["function", str(module), str(name)]:
            return Plan("plain", _function(module, name))
        case ["tuple" | "list" | "dict" as kind, list(items)]:
            return Plan("parts", CONTAINERS[kind], _parts_from_json(items))
        case ["object", str(name), list(items)]:
            parts = _parts_from_json(items)
            return Plan("parts", _class_for(name, [key for key, _ in parts]), parts)
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
    if not set(fields) - cls._later <= set(attributes):
        raise CheckpointError(f"the saved {name} has the fields {attributes}, and the class now has {fields}.")
    return cls
