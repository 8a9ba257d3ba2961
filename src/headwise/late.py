"""Runs something once another package has been imported, without importing it: `import headwise` stays cheap."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class After(importlib.abc.MetaPathFinder):
    """Waits for one module, steps aside, and adds to its loading that `then` is called."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then, self.looking = name, then, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with its loader extended; None for every other module."""
        if fullname != self.name or self.looking:
            return None
        self.looking = True  # so that the module's own finder answers
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.looking = False
        if spec is not None and spec.loader is not None:
            load, loader = spec.loader.exec_module, spec.loader

            def exec_module(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:  # only now: a spec may be asked for and not used, and a first import may fail
                    sys.meta_path.remove(self)
                self.then()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, then: Callable[[], Any]) -> None:
    """Call `then` as soon as module `name` has been imported: now, if it has been already."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, After(name, then))
