"""Loads a learner's file: runs its definitions and constants, finds the attention in it, and reads its names.

Demo and training code is not run; forgotten imports are supplied and noted; missing packages get stand-ins.
"""

import __future__

import ast
import builtins
import contextlib
import dis
import inspect
import json
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from headwise.check.arguments import WEIGHTS_IN, call_role, constructor_role, parameters_of, plain
from headwise.check.calls import METHODS
from headwise.check.stubs import HELPERS, Stub, StubFinder, StubModule

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
# What people call a file beside theirs: a package of this name on PyPI is not what they mean.
NEIGHBORS = {
    "utils", "util", "helpers", "helper", "common", "modules", "layers", "model", "models", "config", "configs",
    "attention", "embedding", "embeddings", "blocks", "functions", "tools", "transformer", "constants", "mask", "masks",
}  # fmt: skip
MODULE = "learner"
NOT_RUN = (ast.For, ast.While, ast.AsyncFor, ast.With, ast.AsyncWith, ast.Expr, ast.Assert, ast.Delete, ast.Match)
DEFINITIONS = (ast.Assign, ast.AnnAssign, ast.ClassDef, ast.FunctionDef, ast.Import, ast.ImportFrom)
# Calls in an assignment that make a constant or a configuration, rather than data or a model.
CHEAP_CALLS = {
    "device", "dict", "int", "float", "len", "max", "min", "namedtuple", "TypeVar", "getattr", "is_available",
    "list", "tuple", "Namespace", "SimpleNamespace", "NewType", "range", "sqrt", "set", "str", "bool",
    "is_bf16_supported",
}  # fmt: skip


@dataclass
class Loaded:
    """A file as it was loaded."""

    path: str
    source: str
    namespace: dict[str, Any] = field(default_factory=dict)
    missing_imports: dict[str, int] = field(default_factory=dict)  # name → first line that uses it
    assigned: set[str] = field(default_factory=set)  # names that the module itself assigns somewhere
    problems: list[tuple[int, str]] = field(default_factory=list)
    failed_imports: dict[str, tuple[int, str]] = field(default_factory=dict)  # name → line, and what is missing
    syntax: SyntaxError | None = None
    skipped: dict[str, ast.stmt] = field(default_factory=dict)  # statements that were not run, by the names they define
    only_in_main: set[str] = field(default_factory=set)  # names that only the demo under __main__ assigns
    flags: int = 0  # of `from __future__ import annotations`
    finder: StubFinder = field(default_factory=lambda: StubFinder(set()))

    def define_late(self, name: str) -> bool:
        """Define a name by the statement that was skipped at first; False where there is none or it fails."""
        statement = self.skipped.pop(name, None)
        if statement is None:
            return False
        self._execute(statement)
        return name in self.namespace

    def line(self, number: int | None) -> str:
        """The text of a line, without its indentation."""
        lines = self.source.splitlines()
        return lines[number - 1].strip() if number is not None and 0 < number <= len(lines) else ""

    def parse(self) -> ast.Module | None:
        """The syntax tree; None after a syntax error, which is kept."""
        try:
            return ast.parse(self.source, self.path)
        except (SyntaxError, ValueError) as error:
            self.syntax = error if isinstance(error, SyntaxError) else SyntaxError(str(error))
        return None

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
            return
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and not _is_cheap(statement):
            self.skipped.update(dict.fromkeys(_assigned(statement), statement))
        elif isinstance(statement, ast.If | ast.Try):
            self._run_block(statement)
        elif isinstance(statement, ast.ImportFrom | ast.Import):
            self._import(statement)
        else:
            self._execute(statement)

    def _run_block(self, statement: ast.If | ast.Try) -> None:
        """An `if` or `try` at module level: all of it if nothing in it takes long, otherwise its definitions."""
        inside = list(ast.walk(statement))
        if any(isinstance(n, ast.For | ast.While | ast.With) for n in inside):
            definitions = [n for n in inside if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            for node in definitions:
                if not any(node in ast.walk(other) for other in definitions if other is not node):
                    self._execute(node)
            return
        self.finder.active = not isinstance(statement, ast.Try)  # `try: import x` must see that x is missing
        before = len(self.problems)
        self._execute(statement)
        self.finder.active = True
        if len(self.problems) > before:  # every alternative failed
            for name in _imported(statement) - set(self.namespace):
                self.namespace[name] = Stub(name)

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            self.flags = __future__.annotations.compiler_flag
            return
        error = self._execute(statement)
        if error is None:
            self._note_missing_neighbor(statement)
            return
        if "cannot import name" in str(error):
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

    def _note_missing_neighbor(self, statement: ast.Import | ast.ImportFrom) -> None:
        top = (getattr(statement, "module", None) or "").partition(".")[0]
        if top in NEIGHBORS and isinstance(sys.modules.get(top), StubModule):
            self._note_failed(statement, f"{top} is neither installed nor a file beside this one")

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
            self.problems.append((statement.lineno, f"{type(error).__name__}: {error}"))
            return error
        return None


def load(path: Path) -> Loaded:
    """The file's namespace, with small gaps filled and noted."""
    loaded = Loaded(str(path), _without_magics(read_source(path)))
    tree = loaded.parse()
    if tree is None:
        return loaded
    module = ModuleType(MODULE)
    sys.modules[MODULE] = module  # dataclasses look up their module
    loaded.namespace = module.__dict__
    loaded.namespace.update(__file__=str(path), __builtins__=builtins)
    loaded.finder = StubFinder(_packages(tree))
    with _imports_beside(path.resolve().parent, loaded.finder), _no_compilation():
        loaded.run(tree)
    return loaded


@contextlib.contextmanager
def _imports_beside(folder: Path, finder: StubFinder) -> Iterator[None]:
    """Imports from the file's own folder, then stand-ins; neither is left behind for the next file."""
    for name in [name for name, held in sys.modules.items() if isinstance(held, StubModule)]:
        del sys.modules[name]
    before = set(sys.modules)
    sys.meta_path.append(finder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:
            origin = getattr(sys.modules[name], "__file__", None)
            if isinstance(origin, str) and folder in Path(origin).resolve().parents:
                del sys.modules[name]


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


def read_source(path: Path) -> str:
    """Python source: the file, the code cells of a notebook, or the Python blocks of a Markdown or text page.

    Everything else on a page becomes empty lines, so that line numbers stay those of the file.
    """
    text = path.read_bytes().decode("utf-8", errors="replace").removeprefix("\ufeff")
    if path.suffix == ".ipynb":
        cells = json.loads(text).get("cells", [])
        return "\n\n".join("".join(c.get("source", [])) for c in cells if c.get("cell_type") == "code")
    if path.suffix in (".md", ".txt", ".markdown", ".rst") or "\n```python" in text:
        return _python_blocks(text)
    return text


def _python_blocks(text: str) -> str:
    """The Python blocks of a page, without blocks that are not complete code, such as doctests and cut snippets."""
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
    """The source with a notebook's magics and shell lines replaced by `pass`."""
    return re.sub(r"(?m)^(\s*)[%!](?!=).*$", r"\1pass", source)


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
    found = {"einops"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _imported(tree: ast.AST) -> set[str]:
    """Names that imports bind, at any depth."""
    imports = (n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom))
    return {(a.asname or a.name).partition(".")[0] for n in imports for a in n.names}


def _is_main(statement: ast.If) -> bool:
    return "__name__" in ast.dump(statement.test)


def _is_cheap(statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> bool:
    """Whether an assignment makes a constant or a configuration rather than data, a model or a training run."""
    if statement.value is None:
        return True
    for node in ast.walk(statement.value):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name not in CHEAP_CALLS and "onfig" not in name and not name.endswith("Args"):
                return False
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp | ast.Await):
            return False
    return True


# Candidates: what in a file looks like multi-head attention.

NAME = re.compile(r"attn|attention|mha|mhsa|msa|multihead|selfatt|crossatt|multi_head", re.IGNORECASE)
WEIGHTS = re.compile(r"Linear|Parameter|einsum|Conv1d|randn|MultiheadAttention")
MULTI = re.compile(r"mult|mha|mhsa|msa|heads", re.IGNORECASE)
OTHER = re.compile(
    r"block|layer$|transformer|encoder|decoder|model|gpt|config|embedding|test|dataset|feed|norm|mlp|wrapper$|trainer",
    re.IGNORECASE,
)


def candidates(loaded: Loaded) -> list[tuple[str, Any]]:
    """Names and objects of everything that looks like attention, best first."""
    texts = _definitions(loaded)
    scores = {}
    for name, thing in loaded.namespace.items():
        if name.startswith("__") or name not in texts:
            continue
        used = [text for other, text in texts.items() if other != name and re.search(rf"\b{other}\b", texts[name])]
        body = "\n".join([texts[name], *used])  # with the definitions it mentions
        if inspect.isclass(thing):
            scores[name] = _class_score(name, thing, texts[name], body)
        elif inspect.isfunction(thing):
            scores[name] = _function_score(name, thing, body)
    found = {name: score for name, score in scores.items() if score > 0}
    if not found:  # any class with a softmax and weights, whatever its name
        classes = [name for name, thing in loaded.namespace.items() if inspect.isclass(thing) and name in texts]
        found = {name: 1 for name in classes if "softmax" in texts[name] and WEIGHTS.search(texts[name])}
    order = {name: i for i, name in enumerate(texts)}
    return [(name, loaded.namespace[name]) for name in sorted(found, key=lambda name: (-found[name], -order[name]))]


def _definitions(loaded: Loaded) -> dict[str, str]:
    """The source of every definition at module level; of two with the same name the last counts, as in Python."""
    tree = ast.parse(loaded.source)
    lines = loaded.source.splitlines()
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in loaded.namespace:
            if isinstance(node, ast.FunctionDef) and node.col_offset > 0:
                continue
            found.pop(node.name, None)
            found[node.name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def _class_score(name: str, cls: type, text: str, body: str) -> int:
    if not (issubclass(cls, nn.Module) or any(callable(getattr(cls, m, None)) for m in METHODS if m != "__call__")):
        return 0
    if cls.__module__.startswith("torch.") or re.search(r"FeedForward|MLP", name):
        return 0
    heads = any(constructor_role(p.name) == "heads" for p in parameters_of(cls))
    score = 40 if NAME.search(name) else 0
    score += 25 if MULTI.search(name) else 0
    score -= 30 if OTHER.search(name) else 0
    score -= 2 if "cross" in name.lower() else 0  # self-attention in the same file comes first
    score += 15 if re.search(r"softmax|scaled_dot_product_attention|MultiheadAttention", body) else 0
    score += 20 if heads or re.search(r"n_?u?m?_?heads?\b", text) else 0
    score += 10 if WEIGHTS.search(body) else -25
    attends = re.search(r"softmax|scaled_dot_product|ttention|\bHead\b|heads", body) is not None
    return score if attends and score >= 30 else 0


def _function_score(name: str, function: Any, body: str) -> int:
    names = list(inspect.signature(function).parameters)
    weights = sum(plain(p) in WEIGHTS_IN for p in names)
    heads = any(constructor_role(p) == "heads" for p in names)
    inputs = any(call_role(p) in ("query", "self") for p in names)
    if not inputs or not re.search(r"softmax|scaled_dot_product|attention", body):
        return 0
    if weights >= 2 or (heads and NAME.search(name)):
        return 30 + 5 * weights + (10 if MULTI.search(name) else 0)
    return 5 if NAME.search(name) and name.startswith(("scaled", "attention", "self", "multi")) else 0


@dataclass
class Case:
    """One class, function or object to judge, and where it comes from."""

    name: str
    target: Any
    namespace: MutableMapping[str, Any]
    loaded: Loaded | None = None
    progress: Callable[[str], None] = lambda _: None
    thorough: bool = True  # also measure speed and compile
    assignment: Any = None  # the `Assigned` form or `Reference` that it must also fit

    @property
    def filename(self) -> str | None:
        """The file whose lines are reported."""
        if self.loaded is not None:
            return self.loaded.path
        owner = self.target if inspect.isclass(self.target) or inspect.isfunction(self.target) else type(self.target)
        for method in (owner, getattr(owner, "forward", None), getattr(owner, "__init__", None)):
            if inspect.isfunction(method):
                return method.__code__.co_filename
        return None

    def text(self, line: int | None) -> str:
        """That line of the file."""
        if self.loaded is not None:
            return self.loaded.line(line)
        return "" if line is None or self.filename is None else linecache.getline(self.filename, line).strip()


def names_used(target: Any) -> set[str]:
    """Global names that a class or function reads, including those read by its helpers in the same file."""
    found: set[str] = set()
    pending, seen = [target], set()
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if inspect.isclass(thing):
            found |= {base.__name__ for base in thing.__mro__} | {"nn", "torch"}
        for member in _members(thing):
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None:
                names = set(code.co_names) | {n for c in code.co_consts if hasattr(c, "co_names") for n in c.co_names}
                found |= names
                space = getattr(member, "__globals__", {})
                pending += [space[n] for n in names if n in space and _is_from_file(space[n])]
    return found


def _members(thing: Any) -> list[Any]:
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    return [inspect.unwrap(member) if callable(member) else member for member in members]


def _is_from_file(thing: Any) -> bool:
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and getattr(thing, "__module__", "") == MODULE


def globals_read(target: Any) -> dict[str, int]:
    """Names that the target's own methods look up in the module, and the first line that does so."""
    found: dict[str, int] = {}
    for member in _members(target):
        for part in _codes(getattr(member, "__code__", None)):
            for step in dis.get_instructions(part):
                if step.opname == "LOAD_GLOBAL" and step.positions is not None and step.positions.lineno is not None:
                    found.setdefault(str(step.argval), step.positions.lineno)
    return found


def _codes(code: CodeType | None) -> Iterator[CodeType]:
    """A code object and those nested in it."""
    if code is not None:
        yield code
        for part in code.co_consts:
            if isinstance(part, CodeType):
                yield from _codes(part)
