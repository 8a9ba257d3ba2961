"""The project around a learner's file: where its imports are found, and how they are loaded.

A file inside a project imports its siblings. They are loaded as the file itself is: definitions and constants only,
one statement at a time, so that no training code runs and nothing that fails stops the rest. The `__init__` of a
package runs only when somebody asks the package for a name.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

MARKERS = ("pyproject.toml", "setup.py", "setup.cfg", ".git", "requirements.txt")
LEVELS = 8  # folders above a file that are searched for the root of its project
LEVELS_WITHOUT_ROOT = 3  # folders above a file of no project in which an import may resolve
MODULE = "learner"
PREFIX = "learner_"  # for a package whose name is that of an installed one
Run = Callable[[Path, dict[str, Any]], Callable[[str], bool]]


class ProjectModule(ModuleType):
    """A module of the project. What was not run at first is run when somebody asks for it."""

    def __init__(self, name: str, complete: Callable[["ProjectModule", str], bool]) -> None:
        super().__init__(name)
        self.__dict__["_complete"] = complete

    def __getattr__(self, name: str) -> Any:
        complete = self.__dict__["_complete"]
        if (not name.startswith("__") or name == "__all__") and complete(self, name) and name in self.__dict__:
            return self.__dict__[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class LearnerModule(ModuleType):
    """The learner's own file as a module."""


class Project(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The first import finder while a file is loaded: files of its project, from the nearest folder outward.

    Args:
        path: the learner's file.
        run: executes the definitions of a file in a namespace and returns a function that defines one more name.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = path.resolve(), run
        self.folders = list(search_folders(self.path))
        self.loaded: list[str] = []
        self._later: dict[str, Callable[[str], bool]] = {}
        self.package, self.alias = self._package()

    def _package(self) -> tuple[str, dict[str, Path]]:
        """The package that the file belongs to, and the folder of its top where the name is taken by another."""
        top = self.path.parent
        names: list[str] = []
        while (top / "__init__.py").is_file() and top.parent != top:
            names.insert(0, top.name)
            top = top.parent
        if names and _is_installed_in(names[0], top):  # imported as everybody imports it
            self.folders = []
            return ".".join(names), {}
        if not names:  # relative imports also occur in folders without an __init__: all of the project is one package
            root = [folder for folder in self.folders if folder in self.path.parents][-1]
            return ".".join([PREFIX + "project", *self.path.parent.relative_to(root).parts]), {PREFIX + "project": root}
        if names[0] in sys.modules or names[0] in sys.stdlib_module_names:
            return ".".join([PREFIX + names[0], *names[1:]]), {PREFIX + names[0]: top / names[0]}
        return ".".join(names), {}

    def words(self) -> str:
        """The folders that were searched, for a message."""
        return ", ".join(str(folder) for folder in self.folders[:4])

    def install(self, module: ModuleType) -> None:
        """Become the first finder, in place of the project of the file before; siblings find the file as `module`."""
        for previous in [finder for finder in sys.meta_path if isinstance(finder, Project)]:
            sys.meta_path.remove(previous)
        for name in [name for name, held in sys.modules.items() if isinstance(held, ProjectModule | LearnerModule)]:
            del sys.modules[name]
        sys.modules[MODULE] = module
        for name in self._own_names():
            sys.modules[name] = module
        sys.meta_path.insert(0, self)

    def _own_names(self) -> Iterator[str]:
        """Names under which siblings may import the learner's file."""
        yield f"{self.package}.{self.path.stem}"
        for folder in self.folders:
            parts = self.path.relative_to(folder).with_suffix("").parts if folder in self.path.parents else ()
            if parts and parts[0] not in sys.stdlib_module_names and not _is_installed(parts[0]):
                yield ".".join(parts)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a file or folder of the project; None for everything else."""
        parent, _, name = fullname.rpartition(".")
        if parent:
            inside = isinstance(sys.modules.get(parent), ProjectModule)
            return self._spec(fullname, [Path(p) / name for p in path or ()]) if inside else None
        if name in self.alias:
            return self._spec(fullname, [self.alias[name]])
        if name in sys.stdlib_module_names:
            return None
        return self._spec(fullname, [folder / name for folder in self.folders], installed=_is_installed(name))

    def _spec(
        self, fullname: str, places: list[Path], installed: bool = False
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for the first file or package among the places; folders of the same name count as one package."""
        module = next((p for p in places if p.with_name(p.name + ".py").is_file()), None)
        packages = [p for p in places if (p / "__init__.py").is_file()]
        if not packages and not installed:  # a folder of code without an __init__
            packages = [p for p in places if p.is_dir() and (p in self.alias.values() or _holds_code(p))]
        if packages and (module is None or places.index(packages[0]) <= places.index(module)):
            origin = packages[0] / "__init__.py"
            spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(origin), is_package=True)
            spec.submodule_search_locations = [str(p) for p in packages]
            return spec
        if module is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=str(module.with_name(module.name + ".py")))

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """A module that is completed on demand."""
        return ProjectModule(spec.name, self._complete)

    def exec_module(self, module: ModuleType) -> None:
        """Run the definitions of a file; an `__init__` waits until somebody asks for a name."""
        spec = module.__spec__
        if spec is None or spec.origin is None:
            return
        self.loaded.append(module.__name__)
        if spec.submodule_search_locations is None:
            module.__file__ = spec.origin
            self._later[module.__name__] = self.run(Path(spec.origin), module.__dict__)

    def _complete(self, module: ProjectModule, name: str) -> bool:
        """Try to define a name that a module lacks: from its `__init__`, a submodule, or a statement left out."""
        spec = module.__spec__
        package = spec is not None and spec.submodule_search_locations is not None
        if package and module.__name__ not in self._later:
            self._later[module.__name__] = lambda _: False  # before it runs: it may import itself
            origin = Path(str(spec.origin)) if spec is not None else Path()
            if origin.is_file():
                self._later[module.__name__] = self.run(origin, module.__dict__)
            if name in module.__dict__:
                return True
        later = self._later.get(module.__name__)
        return later is not None and name != "__all__" and later(name)


def search_folders(path: Path) -> Iterator[Path]:
    """The file's folder and those above it up to the root of its project, each with its `src`."""
    above = path.parents[:LEVELS]
    root = next((i for i, folder in enumerate(above) if any((folder / mark).exists() for mark in MARKERS)), None)
    package = next((i for i, folder in enumerate(above) if not (folder / "__init__.py").is_file()), 0)
    named = [i for i, folder in enumerate(above) if folder.name in _imported_by(path)]  # `from src.layers import …`
    outermost = max(package, *(i + 1 for i in named), LEVELS_WITHOUT_ROOT - 1)
    most = outermost + 1 if root is None else root + 1
    outside = {Path.home(), Path(tempfile.gettempdir()).resolve(), Path("/"), Path("/tmp"), Path("/home")}  # noqa: S108
    for folder in above[:most]:
        if folder in outside and folder != path.parent:
            return
        yield folder
        if (folder / "src").is_dir() and folder / "src" not in path.parents:
            yield folder / "src"


def _imported_by(path: Path) -> set[str]:
    """The first parts of the names that a file imports, as far as its text shows."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))


def _holds_code(folder: Path) -> bool:
    """Whether a folder holds Python files, rather than data."""
    return any(any(folder.glob(pattern)) for pattern in ("*.py", "*/*.py", "*/*/*.py"))


def _is_installed(name: str) -> bool:
    """Whether one of Python's own finders knows a package of this name."""
    if name in sys.modules:
        return True
    with contextlib.suppress(Exception):  # a broken package on the path
        return importlib.machinery.PathFinder.find_spec(name) is not None
    return False


def _is_installed_in(name: str, folder: Path) -> bool:
    """Whether importing this name gives the package in this folder, as it does for an installed package."""
    with contextlib.suppress(Exception):  # a broken package on the path
        spec = importlib.machinery.PathFinder.find_spec(name)
        places = [] if spec is None else spec.submodule_search_locations or []
        return any(Path(place).resolve() == folder / name for place in places)
    return False


def is_project_module(name: str) -> bool:
    """Whether a module of this name was loaded from the learner's project."""
    return name == MODULE or isinstance(sys.modules.get(name), ProjectModule)
