"""Parts that a constructor takes ready-made, such as `rope`: a class or function of the file, or a stand-in."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headwise.check.sizes import CallSizes
from headwise.check.vocabulary import plain

SHORT = 3  # letters of a name that may stand in another one by chance


@dataclass(frozen=True)
class StandIn:
    """A part that changes nothing: it gives back its first argument, or the first few; or it makes such layers."""

    count: int
    methods: frozenset[str] = frozenset()
    makes_layers: bool = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        """As many arguments as the caller takes apart."""
        if self.makes_layers:
            return nn.Identity()
        first = (*given, *named.values())
        if len(first) < self.count:
            raise AttributeError(f"a stand-in for a part of the caller's takes at least {self.count}, not {len(first)}")
        return first[0] if self.count == 1 else first[: self.count]

    def __getattr__(self, name: str) -> "StandIn":
        if not name.startswith("_") and name in self.methods:
            return self
        raise AttributeError(f"a stand-in for a part of the caller's has no {name}")


@dataclass(frozen=True)
class FreshLayer:
    """A layer that is made anew for every object, of these sizes."""

    made_of: type
    make: Callable[[type, CallSizes], Any]
    sizes: CallSizes

    def at(self, sizes: CallSizes) -> "FreshLayer":
        """The same layer for other sizes."""
        return replace(self, sizes=sizes)


def ready_made(
    cls: type, names: list[str], tree: ast.AST, namespace: Mapping[str, Any], part_of: Callable[[type], FreshLayer]
) -> dict[str, Any]:
    """Those of these arguments that the class calls, each with a part; `part_of` is one of a class of the file."""
    found: dict[str, Any] = {}
    for name in names:
        held = {name, *_attributes(tree, name)}
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node)[0] in held]
        if calls:
            own = _of_file(cls, name, namespace)
            found[name] = _stand_in(tree, name, calls) if own is None else part_of(own) if inspect.isclass(own) else own
    return found


def with_parts(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with the layers made that they stand for."""
    return {name: v.make(v.made_of, v.sizes) if isinstance(v, FreshLayer) else v for name, v in arguments.items()}


def _attributes(tree: ast.AST, name: str) -> Iterator[str]:
    """What of `self` holds this argument."""
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.Assign)):
        pairs = [(target, node.value) for target in node.targets]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        yield from (f"self.{t.attr}" for t, v in pairs if isinstance(t, ast.Attribute) and getattr(v, "id", "") == name)


def _called(call: ast.Call) -> tuple[str, str | None]:
    """What is called, and its method: `rope(…)`, `self.rope(…)`, `self.rope.rotate(…)`."""
    name = ast.unparse(call.func)
    head, _, last = name.rpartition(".")
    return (name, None) if head in ("", "self") else (head, last)


def _stand_in(tree: ast.AST, name: str, calls: list[ast.Call]) -> StandIn:
    makes_layers = any(_called(call) == (name, None) for call in calls)
    counts = [1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.value in calls and isinstance(node.targets[0], ast.Tuple):
            counts.append(len(node.targets[0].elts))
    methods = frozenset(method for call in calls if (method := _called(call)[1]) is not None)
    return StandIn(max(counts), methods, makes_layers)


def _of_file(cls: type, name: str, namespace: Mapping[str, Any]) -> Any:
    """The layer or function of the file that has this name in its own."""
    word = plain(name)
    for key, thing in namespace.items():
        own = getattr(thing, "__module__", None) == cls.__module__ and thing is not cls
        layer = inspect.isclass(thing) and issubclass(thing, nn.Module)
        if own and len(word) > SHORT and word in plain(key) and (layer or inspect.isfunction(thing)):
            return thing
    return None
