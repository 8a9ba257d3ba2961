"""Stand-ins for packages that are not installed: enough for a file whose demo code, not its attention, needs them."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn

from headwise.check import einops_stub
from headwise.check.helpers_stub import HELPERS


class StubBase:
    """What a class becomes that inherits from a stand-in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class Stub:
    """Answers every attribute and call with another stand-in; as a decorator it gives back what it decorates."""

    def __init__(self, name: str) -> None:
        self._stub_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._stub_name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Stub):
            return args[0]
        return Stub(f"{self._stub_name}()")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (nn.Module,) if "Module" in self._stub_name or "Model" in self._stub_name else (StubBase,)

    def __iter__(self) -> Any:
        return iter(())

    def __enter__(self) -> "Stub":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __getitem__(self, item: Any) -> "Stub":
        return Stub(f"{self._stub_name}[...]")

    def __or__(self, other: Any) -> Any:
        return Any

    __ror__ = __or__


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last of the finders: what nobody else can import becomes a stand-in, and is written down.

    Only for packages that the learner's file names itself: others test for optional packages by importing them.
    """

    def __init__(self, allowed: set[str]) -> None:
        self.allowed = allowed
        self.missing: list[str] = []
        self.active = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for anything that reaches this place."""
        top = fullname.partition(".")[0]
        if (
            not self.active
            or top not in self.allowed
            or (top in sys.modules and not isinstance(sys.modules[top], StubModule))
        ):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module of stand-ins; einops is small enough to be there in earnest."""
        top = spec.name.partition(".")[0]
        if top not in self.missing:
            self.missing.append(top)
        made = StubModule(spec.name)
        if top == "einops":
            for name in ("rearrange", "repeat", "reduce", "einsum"):
                setattr(made, name, getattr(einops_stub, name))
            if spec.name.endswith("torch"):
                made.Rearrange = einops_stub.Rearrange  # type: ignore[attr-defined]
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


class StubModule(ModuleType):
    """A module whose every attribute is a stand-in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name == "Rearrange":
            return einops_stub.Rearrange
        if name in HELPERS:
            return HELPERS[name]
        return Stub(f"{self.__name__}.{name}")
