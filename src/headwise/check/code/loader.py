"""Loads a learner's file: runs its definitions and constants.

Demo and training code is not run; forgotten imports are supplied and noted; missing packages get stand-ins.
"""

import __future__

import ast
import builtins
import contextlib
import copy
import dataclasses
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch

from headwise.check.code.flexible import flex_attention_written_out
from headwise.check.code.project import MODULE, LearnerModule, Project, is_project_module
from headwise.check.code.source import SourceText, imported, read_source
from headwise.check.code.stubs import HELPERS, Stub, StubFinder, StubModule

# Names that files use without importing them, and the missing line.
USUAL = {
    "torch": "import torch", "nn": "import torch.nn as nn", "F": "import torch.nn.functional as F",
    "math": "import math", "np": "import numpy as np", "Tensor": "from torch import Tensor",
    "Optional": "from typing import Optional", "Tuple": "from typing import Tuple",
    "List": "from typing import List", "Dict": "from typing import Dict", "Union": "from typing import Union",
    "Any": "from typing import Any", "Callable": "from typing import Callable",
    "dataclass": "from dataclasses import dataclass", "rearrange": "from einops import rearrange",
    "repeat": "from einops import repeat", "einsum": "from torch import einsum", "copy": "import copy",
    "sqrt": "from math import sqrt", "Literal": "from typing import Literal",
    "partial": "from functools import partial", "os": "import os", "warnings": "import warnings",
    "Parameter": "from torch.nn import Parameter", "numpy": "import numpy", "einops": "import einops",
    "softmax": "from torch.nn.functional import softmax", "Linear": "from torch.nn import Linear",
    "Module": "from torch.nn import Module",
}  # fmt: skip
NOT_RUN = (ast.For, ast.While, ast.AsyncFor, ast.With, ast.AsyncWith, ast.Expr, ast.Assert, ast.Delete, ast.Match)
DEFINITIONS = (ast.Assign, ast.AnnAssign, ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
# Calls in an assignment that make a constant or a configuration, rather than data or a model.
CHEAP_CALLS = {
    "device", "dict", "int", "float", "len", "max", "min", "namedtuple", "TypeVar", "getattr", "is_available",
    "list", "tuple", "Namespace", "SimpleNamespace", "NewType", "range", "sqrt", "set", "str", "bool",
    "is_bf16_supported", "getLogger", "get_logger",
}  # fmt: skip


@dataclass
class Loaded:
    """A file as it was loaded."""

    path: str
    source: str
    origin: SourceText
    namespace: dict[str, Any] = field(default_factory=dict)
    missing_imports: dict[str, int] = field(default_factory=dict)  # name → first line that uses it
    assigned: set[str] = field(default_factory=set)  # names that the module itself assigns somewhere
    problems: list[tuple[int, str]] = field(default_factory=list)
    undefined: dict[str, tuple[int, str]] = field(default_factory=dict)  # classes whose definition raises
    failed_imports: dict[str, tuple[int, str]] = field(default_factory=dict)  # name → line, and what is missing
    skipped: dict[str, ast.stmt] = field(default_factory=dict)  # statements that were not run, by the names they define
    only_in_main: set[str] = field(default_factory=set)  # names that only the demo under __main__ assigns
    unavailable: set[str] = field(default_factory=set)  # names that would come from a file that is not here
    flags: int = 0  # of `from __future__ import annotations`
    finder: StubFinder = field(default_factory=lambda: StubFinder(set()))
    siblings: list["Loaded"] = field(default_factory=list)  # files of the project that it imports
    folders: list[str] = field(default_factory=list)  # where they are searched for

    def define_late(self, name: str) -> bool:
        """Define a name by the statement that was skipped at first, here or in a sibling; False where that fails."""
        statement = self.skipped.pop(name, None)
        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._import(statement)
            return name in self.namespace
        if statement is not None:
            self._define(_read_at_once(statement))
            self._execute(statement)
            return name in self.namespace
        sibling = next((other for other in self.siblings if other.define_late(name)), None)
        if sibling is not None:
            self.namespace.setdefault(name, sibling.namespace[name])
        return sibling is not None

    def run_sibling(self, path: Path, namespace: dict[str, Any]) -> Callable[[str], bool]:
        """Execute the definitions of a file of the project; the function returned defines one more name."""
        sibling = read(path)
        tree = sibling.origin.tree
        if tree is None:
            raise sibling.origin.error or SyntaxError(f"{path} cannot be read")
        sibling.namespace, sibling.finder = namespace, self.finder
        self.finder.allowed |= _packages(tree)
        self.siblings.append(sibling)
        sibling.run(tree)
        return sibling.define_late

    @property
    def namespaces(self) -> list[dict[str, Any]]:
        """The names of the file and of the siblings that it imports."""
        return [self.namespace, *(other.namespace for other in self.siblings)]

    def line(self, number: int | None) -> str:
        """The text of a line, without its indentation."""
        lines = self.source.splitlines()
        return lines[number - 1].strip() if number is not None and 0 < number <= len(lines) else ""

    def definition(self, name: str) -> str:
        """The text of a class, also of one whose definition raises."""
        classes = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.ClassDef) and n.name == name]
        return "\n".join(ast.get_source_segment(self.source, n) or "" for n in classes)

    def run(self, tree: ast.Module) -> None:
        """Execute the statements of the module that define something."""
        self.assigned |= _assigned(tree)
        demo = [node for node in tree.body if isinstance(node, ast.If) and _is_main(node)]
        rest = ast.Module([node for node in tree.body if node not in demo], [])
        self.only_in_main = _assigned(ast.Module(list(demo), [])) - _assigned(rest)
        self._supply_imports(tree)
        for statement in tree.body:
            self._run(statement)

    def _supply_imports(self, tree: ast.Module) -> None:
        """Import what the file uses and forgot to import."""
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        star = any(alias.name == "*" for n in imports for alias in n.names)
        local = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        bound = self.assigned | local | stored | _imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in set(USUAL) - bound:
                with contextlib.suppress(ImportError):
                    exec(USUAL[node.id], self.namespace)  # noqa: S102 - a constant of ours
                    if not star:
                        first = self.missing_imports.get(node.id, node.lineno)
                        self.missing_imports[node.id] = min(first, node.lineno)

    def _run(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.If) and _is_main(statement):
            for inner in statement.body:
                if isinstance(inner, DEFINITIONS):
                    self._run(inner)
        elif isinstance(statement, NOT_RUN):
            if isinstance(statement, ast.With):  # it may read a configuration
                self._skip(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and not self._is_cheap(statement):
            self._skip(statement)
        elif isinstance(statement, ast.If | ast.Try):
            self._run_block(statement)
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            self._import(statement)
        else:
            self._define(_read_at_once(statement))
            self._execute(statement)

    def _skip(self, statement: ast.stmt) -> None:
        """Leave a statement until something needs a name that it defines."""
        self.skipped.update(dict.fromkeys(_assigned(statement) - set(self.namespace), statement))

    def _define(self, names: set[str]) -> None:
        """Run the statements that define these names, where they were left out."""
        for name in sorted(names & set(self.skipped)):
            self.define_late(name)

    def _is_cheap(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
        """Whether an assignment makes a constant or a configuration, and needs nothing that was left out."""
        needs = set() if statement.value is None else _read_at_once(statement)
        return not needs & set(self.skipped) and _is_cheap(statement, self.namespace)

    def _run_block(self, statement: ast.If | ast.Try) -> None:
        """An `if` or `try` at module level: all of it if nothing in it takes long, otherwise its definitions."""
        inside = list(ast.walk(statement))
        if any(isinstance(n, ast.For | ast.While | ast.With) for n in inside):
            if not any(isinstance(n, ast.For | ast.While) for n in inside):
                self._skip(statement)
            definitions = [n for n in inside if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            for node in definitions:
                if not any(node in ast.walk(other) for other in definitions if other is not node):
                    self.skipped.pop(node.name, None)
                    self._execute(node)
            return
        if isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.dump(statement.test):
            imports = [n for n in inside if isinstance(n, ast.Import | ast.ImportFrom)]
            self.skipped.update({name: n for n in imports for name in _imported(n)})  # of a branch that does not run
        before, active = len(self.problems), self.finder.active
        self.finder.active = active and not isinstance(statement, ast.Try)  # `try: import x` must see that x is missing
        self._execute(statement)
        self.finder.active = active
        for name in set(self.skipped) & _imported(statement) & set(self.namespace):
            del self.skipped[name]
        if len(self.problems) > before:  # every alternative failed
            for name in _imported(statement) - set(self.namespace):
                self.namespace[name] = Stub(name)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            self.flags = __future__.annotations.compiler_flag
            return
        error = self._execute(statement)
        if error is None:
            return
        if "cannot import name" in str(error) and not is_project_module(getattr(error, "name", None) or MODULE):
            self._note_failed(statement, str(error).partition(" (")[0])
        self._stand_in(statement)

    def _stand_in(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Define what an import would have defined: the usual module, a helper, or a stand-in."""
        module = getattr(statement, "module", None) or "."
        for alias in statement.names:
            name = (alias.asname or alias.name).partition(".")[0]
            usual = USUAL.get(name)
            if usual is not None and isinstance(statement, ast.Import):
                with contextlib.suppress(ImportError):
                    exec(usual, self.namespace)  # noqa: S102
            self.namespace.setdefault(name, HELPERS.get(alias.name) or Stub(f"{module}.{alias.name}"))

    def _note_failed(self, statement: ast.Import | ast.ImportFrom, words: str) -> None:
        for alias in statement.names:
            self.failed_imports[alias.asname or alias.name] = (statement.lineno, words)

    def _execute(self, statement: ast.stmt) -> BaseException | None:
        """Run a statement; an error is noted and returned, not raised, because the attention may not need it."""
        try:
            code = compile(ast.Module([statement], []), self.path, "exec", self.flags, dont_inherit=True)
            exec(code, self.namespace)  # noqa: S102 - running the learner's file is the job; see sandbox.py
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            if getattr(statement, "decorator_list", None):  # a registry that is not here
                return self._execute(_undecorated(statement))
            name = str(error.name) if isinstance(error, NameError) else ""
            missing = name in self.unavailable
            if missing and isinstance(statement, ast.ClassDef | ast.FunctionDef) and name not in self.namespace:
                self.namespace[name] = Stub(name)
                return self._execute(statement)
            if missing or isinstance(error, OSError):
                self.unavailable |= _assigned(ast.Module([statement], []))
            words = f"{type(error).__name__}: {error}"
            self.problems.append((statement.lineno, words))
            if isinstance(statement, ast.ClassDef):
                steps = [line for frame, line in traceback.walk_tb(error.__traceback__) if _is_in(frame, self.path)]
                self.undefined[statement.name] = (steps[-1] if steps else statement.lineno, words)
            return error
        return None


def _is_in(frame: FrameType, path: str) -> bool:
    return frame.f_code.co_filename == path


def _undecorated(statement: ast.stmt) -> ast.stmt:
    """The same function or class without its decorators."""
    bare = copy.copy(statement)
    bare.decorator_list = []  # type: ignore[attr-defined]
    return bare


def read(path: Path, name: str | None = None) -> Loaded:
    """A file that was read and not yet run; its lines are kept where tracebacks and `inspect` look for them."""
    origin = read_source(path, name)
    loaded = Loaded(str(path), origin.text, origin)
    linecache.cache[loaded.path] = (len(loaded.source), None, loaded.source.splitlines(keepends=True), loaded.path)
    return loaded


def load(path: Path, name: str | None = None) -> Loaded:
    """The file's namespace, with small gaps filled and noted; `name` is the class asked for, if any."""
    loaded = read(path, name)
    tree = loaded.origin.tree
    if tree is None:
        return loaded
    project = Project(path, loaded.run_sibling)
    loaded.folders = [str(folder) for folder in project.folders]
    module = LearnerModule(MODULE)
    loaded.namespace = module.__dict__
    loaded.namespace.update(__file__=str(path), __builtins__=builtins, __package__=project.package)
    loaded.finder = StubFinder(_packages(tree))
    with _imports_of(project, module, loaded.finder), _no_compilation(), flex_attention_written_out(loaded.source):
        loaded.run(tree)
    return loaded


@contextlib.contextmanager
def _imports_of(project: Project, module: ModuleType, finder: StubFinder) -> Iterator[None]:
    """Imports from the file's project, then stand-ins. The project stays until the next file is loaded."""
    for name in [name for name, held in sys.modules.items() if isinstance(held, StubModule)]:
        del sys.modules[name]
    project.install(module)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def _no_compilation() -> Iterator[None]:
    """`@torch.jit.script` and `@torch.compile` leave functions as they are: a trace must see their lines."""
    saved = torch.jit.script, torch.compile
    torch.jit.script = lambda thing=None, *a, **k: thing  # type: ignore[assignment]
    torch.compile = lambda thing=None, *a, **k: thing if thing is not None else (lambda f: f)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.jit.script, torch.compile = saved


def _assigned(tree: ast.AST) -> set[str]:
    """Names that statements of the module bind, at any depth outside functions and classes."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= _imported(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif not isinstance(node, ast.Lambda):
            found |= _assigned(node)
    return found


def _packages(tree: ast.AST) -> set[str]:
    """Top-level packages that the file imports, and einops, whose import is often forgotten."""
    return {"einops"} | imported(tree)


def _imported(tree: ast.AST) -> set[str]:
    """Names that imports bind, at any depth."""
    imports = (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))
    return {(a.asname or a.name).partition(".")[0] for n in imports for a in n.names}


def _is_main(statement: ast.If) -> bool:
    return "__name__" in ast.dump(statement.test)


def _read_at_once(statement: ast.AST) -> set[str]:
    """Names that a statement reads when it runs: of a function, in its defaults and decorators, not in its body."""
    found: set[str] = set()
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        defaults = [*statement.args.defaults, *(d for d in statement.args.kw_defaults if d is not None)]
        parts: list[ast.AST] = [*defaults, *getattr(statement, "decorator_list", [])]
    else:
        parts = list(ast.iter_child_nodes(statement))
    for part in parts:
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            found.add(part.id)
        found |= _read_at_once(part)
    return found


def _is_cheap(statement: ast.Assign | ast.AnnAssign | ast.AugAssign, namespace: Mapping[str, Any]) -> bool:
    """Whether an assignment makes a constant or a configuration rather than data, a model or a training run."""
    if statement.value is None:
        return True
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Call) and not _is_cheap_call(node, namespace):
            return False
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp | ast.Await):
            return False
    return True


def _is_cheap_call(node: ast.Call, namespace: Mapping[str, Any]) -> bool:
    """Whether a call makes a constant or a configuration: by the name of what is called, also under an alias."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    called = namespace.get(name) if isinstance(node.func, ast.Name) else None
    made = dataclasses.is_dataclass(called) or getattr(called, "__name__", "") in CHEAP_CALLS
    return made or name in CHEAP_CALLS or "onfig" in name or name.endswith("Args")
