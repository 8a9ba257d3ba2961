"""Reads a learner's file into a namespace: definitions and constants, not the demo or training code below them."""

import __future__

import ast
import builtins
import contextlib
import json
import re
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from headwise.check.helpers_stub import HELPERS
from headwise.check.stubs import Stub, StubFinder, StubModule

# What a file may use without importing it, and the line that is missing.
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
NEIGHBOURS = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "modules",
    "layers",
    "model",
    "models",
    "config",
    "configs",
    "attention",
    "embedding",
    "embeddings",
    "blocks",
    "functions",
    "tools",
    "transformer",
    "constants",
    "mask",
    "masks",
}  # fmt: skip - what people call a file beside theirs; such a package on PyPI is not what they mean
MODULE = "learner"
LONG = (ast.For, ast.While, ast.AsyncFor, ast.With, ast.AsyncWith, ast.Expr, ast.Assert, ast.Delete, ast.Match)


@dataclass
class Loaded:
    """A file as read."""

    path: str
    source: str
    namespace: dict[str, Any] = field(default_factory=dict)
    missing_imports: dict[str, int] = field(default_factory=dict)  # name → first line that uses it
    missing_packages: list[str] = field(default_factory=list)
    assigned: set[str] = field(default_factory=set)  # names that the module itself assigns somewhere
    problems: list[tuple[int, str]] = field(default_factory=list)
    failed_imports: dict[str, tuple[int, str]] = field(default_factory=dict)  # name → line and what is not there
    syntax: SyntaxError | None = None
    skipped: dict[str, ast.stmt] = field(default_factory=dict)  # what was left out, by the names it would define
    only_in_main: set[str] = field(default_factory=set)  # names that only the demo under __main__ assigns
    tried_late: set[str] = field(default_factory=set)
    flags: int = 0  # of `from __future__ import annotations`

    def late(self, name: str) -> bool:
        """Define a name by the statement that was left out at first; False where there is none or it fails."""
        if name not in self.skipped or name in self.tried_late:
            return False
        self.tried_late.add(name)
        _execute(self.skipped[name], self)
        return name in self.namespace

    def line(self, number: int | None) -> str:
        """The text of a line, without its indentation."""
        lines = self.source.splitlines()
        return lines[number - 1].strip() if number is not None and 0 < number <= len(lines) else ""


def read_source(path: Path) -> str:
    """Python source; of a notebook its code cells, of a Markdown or text page its Python blocks.

    Everything else on a page becomes empty lines, so that line numbers stay those of the file.
    """
    text = path.read_bytes().decode("utf-8", errors="replace").removeprefix("\ufeff")
    if path.suffix == ".ipynb":
        cells = json.loads(text).get("cells", [])
        code = ["".join(c.get("source", [])) for c in cells if c.get("cell_type") == "code"]
        return "\n\n".join(code)
    if path.suffix in (".md", ".txt", ".markdown", ".rst") or "\n```python" in text:
        return _blocks(text)
    return text


def _blocks(text: str) -> str:
    """The Python blocks of a page; blocks that are no whole code, as a doctest or a cut snippet, are left out."""
    lines = text.splitlines()
    blocks: list[list[int]] = []
    inside = False
    for number, line in enumerate(lines):
        if re.match(r"\s*```", line):
            inside = bool(re.match(r"\s*```\s*(python|py)\b", line, re.IGNORECASE)) and not inside
            blocks += [[]] if inside else []
        elif inside:
            blocks[-1].append(number)
    whole = [block for block in blocks if _parses("\n".join(lines[number] for number in block))]
    defining = any(re.match(r"\s*(class|def) ", lines[number]) for block in whole for number in block)
    kept = {number for block in (whole if defining else blocks) for number in block}
    return "\n".join(line if number in kept else "" for number, line in enumerate(lines))


def _parses(source: str) -> bool:
    try:
        ast.parse(_without_magics(textwrap.dedent(source)))
    except (SyntaxError, ValueError):
        return False
    return True


def _without_magics(source: str) -> str:
    """A notebook's magics and shell lines as nothing."""
    return re.sub(r"(?m)^(\s*)[%!](?!=).*$", r"\1pass", source)


def load(path: Path) -> Loaded:
    """The file's namespace, with every small lack repaired and noted."""
    loaded = Loaded(str(path), read_source(path))
    tree = _parse(loaded)
    if tree is None:
        return loaded
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module  # dataclasses look their module up
    space = loaded.namespace = module.__dict__
    space.update(__file__=str(path), __builtins__=builtins)
    for name in [name for name, held in sys.modules.items() if isinstance(held, StubModule)]:
        del sys.modules[name]  # of a file read before
    finder, before = StubFinder(_packages(tree)), set(sys.modules)
    sys.meta_path.append(finder)
    sys.path.insert(0, str(path.resolve().parent))
    loaded.assigned |= _assigned(tree)
    demo = [node for node in tree.body if isinstance(node, ast.If) and _is_main(node)]
    rest = ast.Module([node for node in tree.body if node not in demo], [])
    loaded.only_in_main = _assigned(ast.Module(list(demo), [])) - _assigned(rest)
    _inject(loaded, tree)
    try:
        with _no_script_compilation():
            for statement in tree.body:
                _run(statement, loaded, finder)
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(path.resolve().parent))
        _forget_neighbours(path.resolve().parent, before)
    loaded.missing_packages = finder.missing
    return loaded


def _forget_neighbours(folder: Path, before: set[str]) -> None:
    """Take out modules that lay beside the file, so that another file's neighbour of the same name is not mistaken."""
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None)
        if isinstance(origin, str) and folder in Path(origin).resolve().parents:
            del sys.modules[name]


def _parse(loaded: Loaded) -> ast.Module | None:
    """The tree; notebook magics and shell lines are blanked first, then single broken cells."""
    loaded.source = _without_magics(loaded.source)
    try:
        return ast.parse(loaded.source, loaded.path)
    except SyntaxError as error:
        loaded.syntax = error
        return None
    except ValueError as error:
        loaded.syntax = SyntaxError(str(error))
        return None


def _assigned(tree: ast.AST) -> set[str]:
    """Names that statements of the module bind, at whatever depth outside functions and classes."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif not isinstance(node, ast.Lambda):
            found |= _assigned(node)
    return found


def _inject(loaded: Loaded, tree: ast.Module) -> None:
    """Imports that the file uses and forgot."""
    star = any(isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names) for n in ast.walk(tree))
    local = {
        a.arg for n in ast.walk(tree) if isinstance(n, ast.arguments) for a in [*n.args, *n.kwonlyargs, *n.posonlyargs]
    }
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound = loaded.assigned | local | stored | _nested_imports(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in USUAL and node.id not in bound:
            with contextlib.suppress(ImportError):
                exec(USUAL[node.id], loaded.namespace)  # noqa: S102 - a constant of ours
                if not star:
                    first = loaded.missing_imports.get(node.id, node.lineno)
                    loaded.missing_imports[node.id] = min(first, node.lineno)


def _packages(tree: ast.AST) -> set[str]:
    """Top-level packages that the file imports, and einops for those who forgot it."""
    found = {"einops"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _nested_imports(tree: ast.AST) -> set[str]:
    imports = (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))
    return {(a.asname or a.name).partition(".")[0] for n in imports for a in n.names}


def _run(statement: ast.stmt, loaded: Loaded, finder: StubFinder) -> None:
    """Execute one statement of the module, if it defines something."""
    if isinstance(statement, ast.If) and _is_main(statement):
        for inner in statement.body:
            if isinstance(
                inner, ast.Assign | ast.AnnAssign | ast.ClassDef | ast.FunctionDef | ast.Import | ast.ImportFrom
            ):
                _run(inner, loaded, finder)
        return
    if isinstance(statement, LONG):
        return
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and not _cheap(statement):
        loaded.skipped.update(dict.fromkeys(_assigned(statement), statement))
        return
    if isinstance(statement, ast.If | ast.Try):
        _run_block(statement, loaded, finder)
        return
    if isinstance(statement, ast.ImportFrom | ast.Import):
        _import(statement, loaded)
        return
    _execute(statement, loaded)


def _is_main(statement: ast.If) -> bool:
    return "__name__" in ast.dump(statement.test)


def _run_block(statement: ast.If | ast.Try, loaded: Loaded, finder: StubFinder) -> None:
    """A condition or an attempt at module level: whole, if nothing in it takes long."""
    if any(
        isinstance(n, ast.For | ast.While | ast.With) for n in ast.walk(statement) if not isinstance(n, ast.FunctionDef)
    ):
        inner = [n for n in ast.walk(statement) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        for node in inner:
            if not any(node in ast.walk(other) for other in inner if other is not node):
                _execute(node, loaded)
        return
    finder.active = not isinstance(statement, ast.Try)  # `try: import x` wants to know whether x is there
    before = len(loaded.problems)
    _execute(statement, loaded)
    finder.active = True
    if len(loaded.problems) > before:  # not there in any of the ways that were tried
        for name in _nested_imports(statement) - set(loaded.namespace):
            loaded.namespace[name] = Stub(name)


def _import(statement: ast.Import | ast.ImportFrom, loaded: Loaded) -> None:
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        loaded.flags = __future__.annotations.compiler_flag
        return
    try:
        exec(_code(statement, loaded), loaded.namespace)  # noqa: S102 - running the learner's file is the job; see sandbox.py
        _note_neighbour(statement, loaded)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        if "cannot import name" in str(error):
            _note_failed(statement, loaded, str(error).partition(" (")[0])
        module = getattr(statement, "module", None) or "."
        loaded.problems.append((statement.lineno, f"{type(error).__name__}: {error}"))
        for alias in statement.names:
            name = (alias.asname or alias.name).partition(".")[0]
            usual = USUAL.get(name)
            if usual is not None and isinstance(statement, ast.Import):
                with contextlib.suppress(ImportError):
                    exec(usual, loaded.namespace)  # noqa: S102
            loaded.namespace.setdefault(name, HELPERS.get(alias.name) or Stub(f"{module}.{alias.name}"))


def _note_neighbour(statement: ast.Import | ast.ImportFrom, loaded: Loaded) -> None:
    """A file beside this one that is not there."""
    top = (getattr(statement, "module", None) or "").partition(".")[0]
    if top in NEIGHBOURS and isinstance(sys.modules.get(top), StubModule):
        _note_failed(statement, loaded, f"{top} is neither installed nor a file beside this one")


def _note_failed(statement: ast.Import | ast.ImportFrom, loaded: Loaded, words: str) -> None:
    for alias in statement.names:
        loaded.failed_imports[alias.asname or alias.name] = (statement.lineno, words)


CALLS = {
    "device", "dict", "int", "float", "len", "max", "min", "namedtuple", "TypeVar", "getattr", "is_available",
    "list", "tuple", "Namespace", "SimpleNamespace", "NewType", "range", "sqrt", "set", "str", "bool",
    "is_bf16_supported",
}  # fmt: skip


def _cheap(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
    """Whether an assignment is a constant or a configuration rather than data, a model or training."""
    if statement.value is None:
        return True
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in CALLS and "onfig" not in name and not name.endswith("Args"):
                return False
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp | ast.Await):
            return False
    return True


def _execute(statement: ast.stmt, loaded: Loaded) -> None:
    """Run it; what it raises is noted, because a later definition may not need it."""
    try:
        exec(_code(statement, loaded), loaded.namespace)  # noqa: S102 - running the learner's file is the job
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        loaded.problems.append((statement.lineno, f"{type(error).__name__}: {error}"))


def _code(statement: ast.stmt, loaded: Loaded) -> CodeType:
    code: CodeType = compile(ast.Module([statement], []), loaded.path, "exec", loaded.flags, dont_inherit=True)
    return code


@contextlib.contextmanager
def _no_script_compilation() -> Any:
    """`@torch.jit.script` and `@torch.compile` leave functions as they are: a trace must see their lines."""
    import torch

    saved = torch.jit.script, torch.compile
    torch.jit.script = lambda thing=None, *a, **k: thing  # type: ignore[assignment]
    torch.compile = lambda thing=None, *a, **k: thing if thing is not None else (lambda f: f)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.jit.script, torch.compile = saved
