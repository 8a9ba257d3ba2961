"""Sizes that stand in a learner's module, in its siblings and in their configuration objects, and can be changed."""

import contextlib
import re
import types
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.check.code.stubs import Stub
from headwise.check.configuration import StandInConfig
from headwise.check.sizes import CallSizes, value_for
from headwise.check.vocabulary import constructor_role

SIZE_ROLES = ("width", "out_width", "heads", "context", "head_width", "value_width", "batch")
HOLDER = re.compile(r"config|cfg|args|param|setting|hyper|opt$|^hp$", re.IGNORECASE)


@dataclass(frozen=True)
class Constant:
    """One size: where it is held, its name and value, and the module's name through which code reaches it."""

    holder: Any
    name: str
    value: int
    through: str

    @property
    def role(self) -> str:
        """What its name means."""
        return str(constructor_role(self.name))

    def fit(self, sizes: CallSizes) -> None:
        """Give it the value that its name means."""
        self._write(int(value_for(self.role, sizes)))

    def restore(self) -> None:
        """Give it the value that it had."""
        self._write(self.value)

    def _write(self, value: int) -> None:
        """Change it where it is held; a frozen configuration stays as it is."""
        if isinstance(self.holder, MutableMapping):
            self.holder[self.name] = value
        else:
            with contextlib.suppress(Exception):
                setattr(self.holder, self.name, value)


@dataclass(frozen=True)
class StandInSizes:
    """The sizes of a stand-in for a configuration that the module holds."""

    holder: StandInConfig
    value: CallSizes
    through: str

    def fit(self, sizes: CallSizes) -> None:
        """Let it answer with these sizes."""
        self.holder.__dict__["_sizes"] = sizes

    def restore(self) -> None:
        """Let it answer with the sizes that it had."""
        self.fit(self.value)


Place = Constant | StandInSizes


def constants(namespaces: Iterable[MutableMapping[str, Any]]) -> list[Place]:
    """Every size in these modules and in the configurations that they hold."""
    return [place for space in namespaces for place in _in_module(space)]


def _in_module(space: MutableMapping[str, Any]) -> Iterator[Place]:
    yield from (Constant(space, name, value, name) for name, value in _sizes_in(space))
    for name, thing in list(space.items()):
        if isinstance(thing, StandInConfig):
            yield StandInSizes(thing, thing._sizes, name)
        elif HOLDER.search(name) and not name.startswith("__") and not isinstance(thing, Stub):
            yield from _in_configuration(thing, name)


def _in_configuration(thing: Any, through: str, depth: int = 0) -> Iterator[Constant]:
    """Sizes of a dictionary, an object or a class that holds settings."""
    if isinstance(thing, types.ModuleType) or (isinstance(thing, type) and issubclass(thing, nn.Module)):
        return
    held = thing if isinstance(thing, dict) else getattr(thing, "__dict__", {})
    yield from (Constant(thing, name, value, through) for name, value in _sizes_in(held))
    if depth < 2 and isinstance(thing, dict | types.SimpleNamespace):
        for inner in list(held.values()):
            if isinstance(inner, dict | types.SimpleNamespace):
                yield from _in_configuration(inner, through, depth + 1)


def _sizes_in(held: Any) -> list[tuple[str, int]]:
    named = [(name, value) for name, value in list(held.items()) if isinstance(name, str) and type(value) is int]
    return [(name, value) for name, value in named if constructor_role(name) in SIZE_ROLES]


def write(found: Iterable[Place], sizes: CallSizes) -> None:
    """Give every one of these the value that its name means."""
    for place in found:
        place.fit(sizes)


def restore(found: Iterable[Place]) -> None:
    """Give every one of these the value that it had."""
    for place in found:
        place.restore()


def own_sizes(found: Iterable[Place]) -> dict[str, int]:
    """Names and values as the project has them, those of the file itself before those of its siblings."""
    return {place.name: place.value for place in reversed(list(found)) if isinstance(place, Constant)}
