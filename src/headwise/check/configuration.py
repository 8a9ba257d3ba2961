"""Configurations of any kind: what a class asks of one, what the file and its project say, and a stand-in that answers.

`own_configuration` collects defaults from classes, dictionaries, objects, argparse options and files beside the code.
`KeyUses` reads from the source how every key is used. `StandInConfig` answers by the meaning of a key's name, then
from those, and `choices` lists what else a key without a meaning could be.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import json
import linecache
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.check.code.project import is_project_module
from headwise.check.sizes import CallSizes, value_for
from headwise.check.vocabulary import constructor_role, has_usual_value, is_configuration, usual_value

FOLDERS = ("", "conf", "config", "configs", "cfg")
MOST_FILES, MOST_BYTES = 6, 200_000
SECTION = "section"  # a key that holds further keys
NUMBERS = (ast.FloorDiv, ast.Mod, ast.Mult, ast.Div, ast.Pow, ast.Sub, ast.Add)


# How the keys of a configuration are used in the source.


@dataclass
class KeyUses:
    """Keys that code reads from configurations, with the strings they are compared with and the kinds of their uses."""

    strings: dict[str, list[str]] = field(default_factory=dict)
    kinds: dict[str, set[str]] = field(default_factory=dict)  # section, number, flag, count, rate
    optional: set[str] = field(default_factory=set)  # read with a default

    def note(self, key: str, kind: str) -> None:
        self.kinds.setdefault(key, set()).add(kind)


class _Reader(ast.NodeVisitor):
    """Collects the uses of configuration keys from a syntax tree."""

    def __init__(self) -> None:
        self.uses = KeyUses()
        self.aliases: dict[str, str] = {}  # `att = cfg.attention`: variable → key

    def _key(self, node: ast.AST) -> str | None:
        """The key that `config.key`, `self.config.key`, `config["key"]` or `cfg.model.key` reads; None for others."""
        if not isinstance(node, ast.Attribute | ast.Subscript):
            return None
        base: ast.expr = node.value
        key = node.attr if isinstance(node, ast.Attribute) else getattr(node.slice, "value", None)
        name = str(getattr(base, "attr", None) or getattr(base, "id", ""))
        known = (is_configuration(name) and name != "self") or name in self.aliases or self._key(base) is not None
        return key if known and isinstance(key, str) else None

    def visit_Assign(self, node: ast.Assign) -> None:
        if (key := self._key(node.value)) and isinstance(node.targets[0], ast.Name):
            self.aliases[node.targets[0].id] = key
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._section(node.value)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            self._section(node.value)
        if isinstance(node.value, ast.Dict) and (key := self._key(node.slice)):  # {"a": f, "b": g}[config.kind]
            self._strings(key, node.value.keys)
        self.generic_visit(node)

    def _section(self, value: ast.expr) -> None:
        key = self._key(value) or self.aliases.get(getattr(value, "id", ""))
        if key is not None:
            self.uses.note(key, SECTION)

    def _strings(self, key: str, nodes: typing.Iterable[ast.expr | None]) -> None:
        found = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        self.uses.strings.setdefault(key, []).extend(found)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        inside = [getattr(side, "elts", None) or getattr(side, "keys", None) or [side] for side in sides]
        listed = [item for items in inside for item in items]
        for key in filter(None, map(self._key, sides)):
            self._strings(key, listed)
            if any(isinstance(n, ast.Constant) and type(n.value) in (int, float) for n in sides):
                self.uses.note(key, "number")
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        if key := self._key(node.subject):
            patterns = [p for case in node.cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue)]
            self._strings(key, [p.value for p in patterns])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, NUMBERS):
            for key in filter(None, map(self._key, (node.left, node.right))):
                self.uses.note(key, "number")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("getattr", "hasattr", "get", "pop") and node.args:
            self.uses.optional |= {str(a.value) for a in node.args[:2] if isinstance(a, ast.Constant)}
        kind = "rate" if "rop" in name else "count" if name == "range" else "size" if name.startswith("Linear") else ""
        for key in filter(None, map(self._key, [*node.args, *(k.value for k in node.keywords)])):
            if kind:
                self.uses.note(key, kind)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        test = node.test.operand if isinstance(node.test, ast.UnaryOp) else node.test
        if key := self._key(test):
            self.uses.note(key, "flag")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not) and (key := self._key(node.operand)):
            self.uses.note(key, "flag")
        self.generic_visit(node)

    visit_IfExp = visit_If  # noqa: N815 - the name that `NodeVisitor` looks for


@functools.cache
def uses_in(filename: str) -> KeyUses:
    """How the code of a file uses the keys of configurations."""
    reader = _Reader()
    with contextlib.suppress(SyntaxError, ValueError):
        reader.visit(ast.parse("".join(linecache.getlines(filename))))
    return reader.uses


def uses_of(cls: Any) -> KeyUses:
    """The same for the file that defines a class; nothing where that cannot be told."""
    with contextlib.suppress(TypeError, OSError, AttributeError):
        return uses_in(inspect.getfile(cls.__init__ if inspect.isclass(cls) else cls))
    return KeyUses()


# What the file and its project say.


def own_configuration(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of every configuration that the file defines or that lies beside it, nested ones as dictionaries."""
    path = namespace.get("__file__")
    found: dict[str, Any] = {}
    if isinstance(path, str):
        found |= _from_files(Path(path))
        found |= _argparse_defaults(path)
    for name, thing in list(namespace.items()):
        if re.search("config|args|cfg|param|settings|opt$", name.lower()) and not name.startswith("__"):
            found |= as_dictionary(thing)
    return found


def as_dictionary(thing: Any) -> dict[str, Any]:
    """The keys and values of a dictionary, a configuration object, or the defaults of a class."""
    if isinstance(thing, dict):
        return {k: v for k, v in thing.items() if isinstance(k, str)}
    if isinstance(thing, type):
        return _class_defaults(thing)
    held = getattr(thing, "__dict__", {})
    return dict(held) if not callable(thing) and not isinstance(thing, types.ModuleType) else {}


def _class_defaults(cls: type) -> dict[str, Any]:
    found = {k: v for k, v in vars(cls).items() if not k.startswith("_") and isinstance(v, PLAIN_TYPES)}
    with contextlib.suppress(Exception):  # a configuration that needs arguments gives fewer defaults
        for p in inspect.signature(cls).parameters.values():
            if p.default is not p.empty and isinstance(p.default, PLAIN_TYPES):
                found[p.name] = p.default
        found |= vars(cls())
    return found


PLAIN_TYPES = (int, float, str, bool, list, tuple, dict, types.NoneType)


@functools.cache
def _from_files(path: Path) -> dict[str, Any]:
    """Configurations in YAML or JSON, in the file's folder, the two above and their folders for configurations."""
    places = [above / name for above in path.resolve().parents[:3] for name in FOLDERS]
    files = [f for place in places if place.is_dir() for f in sorted(place.glob("*.*")) if _is_settings(f, place)]
    found: dict[str, Any] = {}
    for file in reversed(files[:MOST_FILES]):  # the nearest counts most
        with contextlib.suppress(Exception):  # not every file is what its name says
            found |= as_dictionary(_parsed(file))
    return found


def _is_settings(file: Path, place: Path) -> bool:
    named = re.search("conf|param|setting|model", file.stem.lower()) or place.name in FOLDERS
    return bool(named) and file.suffix in (".yaml", ".yml", ".json") and file.stat().st_size < MOST_BYTES


def _parsed(file: Path) -> Any:
    if file.suffix == ".json":
        return json.loads(file.read_text())
    import yaml  # type: ignore[import-untyped,unused-ignore]

    return yaml.safe_load(file.read_text())


@functools.cache
def _argparse_defaults(filename: str) -> dict[str, Any]:
    """Defaults of the options that a file declares with `add_argument`."""
    found: dict[str, Any] = {}
    with contextlib.suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse("".join(linecache.getlines(filename)))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= _option(node)
    return found


def _option(node: ast.Call) -> dict[str, Any]:
    names = [n.value.lstrip("-") for n in node.args if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    given: dict[str | None, Any] = {}
    for keyword in node.keywords:
        with contextlib.suppress(ValueError):
            given[keyword.arg] = ast.literal_eval(keyword.value)
    switch = {"store_true": False, "store_false": True}.get(given.get("action", ""))
    default = given.get("default", (given.get("choices") or [switch])[0])
    name = given.get("dest") or max(names, key=len, default="")
    return {str(name).replace("-", "_"): default} if name and default is not None else {}


# The stand-in.


class PerLayer(int):
    """A size that some configurations hold once per layer: `config.n_heads` and `config.n_heads[3]` both work."""

    def __getitem__(self, layer: int) -> int:
        return int(self)


class _Absent:
    """The value of a key that is left out."""

    def __repr__(self) -> str:
        return "(left out)"


ABSENT = _Absent()


class StandInConfig:
    """A configuration that answers any attribute or key: from overrides, by the key's meaning, or from the file's own.

    A name without a meaning raises, as a missing key should, so `getattr(config, "flash", False)` gives its default.
    Such names are kept in `missed`, and the next attempt can pass values for them in `extra`.

    Args:
        sizes: what names of sizes mean.
        own: what the file and its project say.
        extra: values that count before everything else.
        kind: the class of the configuration; its properties and methods then work, and `isinstance` holds.
        uses: how the code uses the keys.
    """

    def __init__(
        self,
        sizes: CallSizes,
        own: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        kind: type | None = None,
        uses: KeyUses | None = None,
    ) -> None:
        self.__dict__.update(_sizes=sizes, _own=own or {}, _extra=extra or {}, _kind=kind, _uses=uses or KeyUses())
        self.__dict__.update(
            missed=[], asked=set(), tested=set(), _real=None if kind is None else real_configuration(kind, self)
        )
        if self._real is not None:
            self.__dict__["_own"] = self._own | as_dictionary(self._real)

    @property  # type: ignore[misc] # mypy wants a setter, which nobody needs
    def __class__(self) -> type:
        """The class of the real configuration, for `isinstance`."""
        real = self.__dict__.get("_real")
        return StandInConfig if real is None else type(real)

    def changed(self, sizes: CallSizes, changes: dict[str, Any]) -> "StandInConfig":
        """Another one for these sizes, with some keys changed."""
        return StandInConfig(sizes, self._own, self._extra | changes, self._kind, self._uses)

    @property
    def certain(self) -> bool:
        """Whether every key that was asked for was known."""
        return not self.missed and not self.asked & set(self._extra)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found, value = self._look_up(name)
        if not found:
            self.missed.append(name)
            raise AttributeError(f"config has no {name!r}")
        return value

    def _look_up(self, name: str) -> tuple[bool, Any]:
        self.asked.add(name)
        if name in self._extra:
            return self._extra[name] is not ABSENT, self._extra[name]
        own = self._own.get(name)
        if name not in self._own and self._real is not None and hasattr(self._real, name):
            return True, getattr(self._real, name)  # a property or method
        if isinstance(own, dict) or (
            SECTION in self._uses.kinds.get(name, ()) and not isinstance(own, str | int | float)
        ):
            return True, self._section(own)
        return self._by_name(name, own)

    def _by_name(self, name: str, own: Any) -> tuple[bool, Any]:
        role = constructor_role(name)
        if has_usual_value(name):
            usual = usual_value(name)
            if usual is None and type(own) in (int, float) and "number" in self._uses.kinds.get(name, ()):
                return True, own  # the code computes with it
            return True, own if isinstance(own, bool) or (usual is None and isinstance(own, str)) else usual
        if role is not None and isinstance(own, bool):  # a flag is no size, whatever its name
            return True, own
        if role is not None and (own is None or isinstance(own, int | float)):
            value = value_for(role, self._sizes)
            return True, PerLayer(value) if type(value) is int else value
        return name in self._own, own

    def _section(self, own: Any) -> "StandInConfig":
        """The configuration under a key; what it misses is missed here too."""
        inner = StandInConfig(self._sizes, self._own | as_dictionary(own), self._extra, None, self._uses)
        inner.__dict__.update(missed=self.missed, asked=self.asked, tested=self.tested)
        return inner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        self.tested.add(str(name))
        return self._look_up(str(name))[0]

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def pop(self, name: str, *default: Any) -> Any:
        return getattr(self, name, *default)

    def keys(self) -> list[str]:
        """The keys of the file's own configuration: enough for `Class(**config)`."""
        return list(self._own)

    def items(self) -> list[tuple[str, Any]]:
        return [(name, self[name]) for name in self._own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)


def real_configuration(kind: type, stand_in: StandInConfig) -> Any:
    """An instance of a configuration class, its fields chosen by name and type; None where it cannot be made."""
    hints: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # an annotation may name what is not installed
        hints = typing.get_type_hints(vars(kind)["__init__"]) | typing.get_type_hints(kind)
    given: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # whatever a learner's code raises
        for p in inspect.signature(kind).parameters.values():
            if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL):
                continue
            found, value = stand_in._by_name(p.name, None if p.default is p.empty else p.default)
            meant = p.name in stand_in._extra or (found and constructor_role(p.name) is not None)
            if meant and not (p.default is None and constructor_role(p.name) in ("kv_heads", "head_width")):
                given[p.name] = stand_in._extra.get(p.name, int(value) if isinstance(value, PerLayer) else value)
            elif p.default is p.empty:
                given[p.name] = _of_type(hints.get(p.name, p.annotation), stand_in) if not found else value
        return kind(**given)
    return None


def _of_type(hint: Any, stand_in: StandInConfig) -> Any:
    """A small value of a type: the first of a Literal, None for an Optional, an instance of a configuration class."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return inside[0]
    if origin in (typing.Union, types.UnionType):
        return None if types.NoneType in inside else _of_type(inside[0], stand_in)
    if origin is typing.Annotated:
        return _of_type(inside[0], stand_in)
    simple = {int: stand_in._sizes.E, float: 0.0, bool: False, str: "", list: [], tuple: (), dict: {}}
    if (origin or hint) in simple:
        return simple[origin or hint]
    return real_configuration(hint, stand_in) if isinstance(hint, type) and _is_settings_class(hint) else None


def _is_settings_class(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields") or is_configuration(kind.__name__)


def is_made_by_us(thing: Any) -> bool:
    """Whether it is a stand-in, or a configuration of a class that the project does not define."""
    kind = thing._kind if type(thing) is StandInConfig else type(thing)
    return kind is None or (_is_settings_class(kind) and not is_project_module(kind.__module__))


def configuration_class(annotation: Any, namespace: Mapping[str, Any]) -> type | None:
    """The class of a configuration: the one annotated, or the last that the file defines with a number of heads."""
    named = namespace.get(annotation.strip("\"' ")) if isinstance(annotation, str) else annotation
    members = [named, *typing.get_args(named)]
    told = [m for m in members if isinstance(m, type) and m.__module__ not in ("builtins", "typing", "inspect")]
    if told and not issubclass(told[0], dict):
        return told[0]
    known = [thing for name, thing in namespace.items() if isinstance(thing, type) and is_configuration(name)]
    return next((kind for kind in reversed(known) if any(constructor_role(k) == "heads" for k in _fields(kind))), None)


def _fields(kind: type) -> set[str]:
    named: set[str] = set()
    with contextlib.suppress(TypeError, ValueError):
        named = set(inspect.signature(kind).parameters)
    return named | set(vars(kind)) | set(getattr(kind, "__annotations__", {}))


def choices(key: str, uses: KeyUses, own: Mapping[str, Any], sizes: CallSizes) -> list[Any]:
    """What a key without a meaning could be, most likely first: by its uses in the code, then every plausible kind."""
    kinds = uses.kinds.get(key, set())
    found: list[Any] = [own[key]] if key in own else []
    found += uses.strings.get(key, [])
    found += [0.0] if "rate" in kinds else []
    found += [False, True] if "flag" in kinds else []
    found += [1, 2] if "count" in kinds else []
    found += [sizes.E, sizes.H, 1.0, sizes.D] if kinds & {"number", "size"} else []
    found += [None, False, 0.0, 1, sizes.E, sizes.H, sizes.context]
    kept: list[Any] = []
    for value in found:
        if not any(type(value) is type(other) and value == other for other in kept):
            kept.append(value)
    return kept
