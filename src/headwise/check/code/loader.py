"""Loads a learner's file: runs its definitions and constants, finds the attention in it, and reads its names.

Demo and training code is not run; forgotten imports are supplied and noted; missing packages get stand-ins.
"""

import __future__

import ast
import builtins
import contextlib
import copy
import dis
import functools
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from headwise.check.arguments import parameters_of
from headwise.check.calls import METHODS
from headwise.check.code.project import MODULE, LearnerModule, Project, is_project_module
from headwise.check.code.source import MULTI, SourceText, imported, read_source
from headwise.check.code.stubs import HELPERS, Stub, StubFinder, StubModule
from headwise.check.coverage import Coverage
from headwise.check.vocabulary import WEIGHTS_IN, call_role, constructor_role, plain

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
    "is_bf16_supported",
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
    flags: int = 0  # of `from __future__ import annotations`
    finder: StubFinder = field(default_factory=lambda: StubFinder(set()))
    siblings: list["Loaded"] = field(default_factory=list)  # files of the project that it imports
    folders: list[str] = field(default_factory=list)  # where they are searched for

    def define_late(self, name: str) -> bool:
        """Define a name by the statement that was skipped at first, here or in a sibling; False where that fails."""
        statement = self.skipped.pop(name, None)
        if statement is not None:
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
        before, active = len(self.problems), self.finder.active
        self.finder.active = active and not isinstance(statement, ast.Try)  # `try: import x` must see that x is missing
        self._execute(statement)
        self.finder.active = active
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
    with _imports_of(project, module, loaded.finder), _no_compilation():
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
PRODUCT = re.compile(r"[\w\])][ \t]*@|matmul|einsum|bmm|scaled_dot_product_attention|MultiheadAttention")
ATTENDS = re.compile(r"softmax|scaled_dot_product_attention|MultiheadAttention")
FOREIGN = re.compile(r"\b(np|numpy|jnp|jax|tf|keras|mx|mlx|flax|haiku|hk|paddle|tinygrad|cupy|cp)\.")
NATIVE = re.compile(r"\btorch\b|\bnn\.|\bF\.|\bTensor\b")
UNFINISHED = re.compile(r"(?s:(?=.*quer)(?=.*key)(?=.*value))", re.IGNORECASE)  # it has no softmax yet
OTHER = re.compile(
    r"block|layer$|transformer|encoder|decoder|model|gpt|config|embedding|test|dataset|feed|norm|mlp|wrapper$|trainer",
    re.IGNORECASE,
)

LAYER = re.compile(r"\bnn\.(Linear|Parameter)\(")  # in the constructor of a class that has no forward yet


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
    native = {name: score for name, score in scores.items() if not _is_foreign(loaded.namespace[name], texts[name])}
    found = {name: score for name, score in (native or scores).items() if score > 0}
    if not any(found[name] > 0 for name in found if inspect.isclass(loaded.namespace[name])):
        # any class that attends itself, whatever its name
        classes = [name for name in native if inspect.isclass(loaded.namespace[name]) and WEIGHTS.search(texts[name])]
        found |= {name: 8 for name in classes if ATTENDS.search(texts[name]) and PRODUCT.search(texts[name])}
        found = found or {name: 1 for name in classes if UNFINISHED.search(texts[name])}
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


def _is_foreign(thing: Any, text: str) -> bool:
    """Whether a class or function is written for another library than PyTorch."""
    bases = thing.__mro__ if inspect.isclass(thing) else ()
    if nn.Module in bases and not any(isinstance(base, Stub) for base in getattr(thing, "__orig_bases__", ())):
        return False
    return FOREIGN.search(text) is not None and NATIVE.search(text) is None


def _class_score(name: str, cls: type, text: str, body: str) -> int:
    called = any(callable(getattr(cls, m, None)) for m in METHODS if m != "__call__")
    if not (issubclass(cls, nn.Module) or called or (NAME.search(name) and LAYER.search(text))):
        return 0
    if cls.__module__.startswith("torch.") or re.search(r"FeedForward|MLP", name):
        return 0
    heads = any(constructor_role(p.name) == "heads" for p in parameters_of(cls))
    score = 40 if NAME.search(name) else 0
    score += 25 if MULTI.search(name) else 0
    score -= 30 if OTHER.search(name) and not re.search(r"(att(entio)?n|MHA)$", name, re.IGNORECASE) else 0
    score -= 2 if "cross" in name.lower() else 0  # self-attention in the same file comes first
    score += 15 if re.search(r"softmax|scaled_dot_product_attention|MultiheadAttention", body) else 0
    score += 20 if heads or re.search(r"n_?u?m?_?heads?\b", text) else 0
    score += 10 if WEIGHTS.search(body) else -25
    attends = re.search(r"softmax|scaled_dot_product|ttention|\bHead\b|heads", body + name) is not None
    attends = attends or NAME.search(name) is not None
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
    core = {"query", "key", "value"} <= {call_role(p) for p in names}
    if core and re.search(r"softmax|scaled_dot_product", body):
        return 5
    return 5 if (NAME.search(name) and core) or name.startswith(("scaled", "attention", "self", "multi")) else 0


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

    @functools.cached_property
    def coverage(self) -> Coverage:
        """Which lines of the file have run in calls that returned."""
        return Coverage(self.filename)

    @property
    def namespaces(self) -> list[MutableMapping[str, Any]]:
        """The names of its module, and of the files of its project that the module imports."""
        return [self.namespace] if self.loaded is None else [*self.loaded.namespaces]

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

    @property
    def source(self) -> str:
        """The text of the whole file; empty where there is none."""
        if self.loaded is not None:
            return self.loaded.source
        return "" if self.filename is None else "".join(linecache.getlines(self.filename))

    def line_with(self, pattern: str) -> int | None:
        """The first line inside the class or function that matches a regular expression."""
        try:
            found = inspect.getsourcelines(self.target)
        except (OSError, TypeError):
            found = (self.source.splitlines(), 1)
        if self.loaded is not None:
            nodes = (n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.ClassDef | ast.FunctionDef))
            first = next((n for n in nodes if n.name == self.name), None)
            start, end = (first.lineno, first.end_lineno) if first is not None else (1, None)
            found = (self.source.splitlines()[start - 1 : end], start)
        numbers = (n for n, text in enumerate(found[0], found[1]) if re.search(pattern, text.partition("#")[0]))
        everywhere = enumerate(self.source.splitlines() if self.loaded is not None else [], 1)
        further = (n for n, text in everywhere if re.search(pattern, text.partition("#")[0]))
        return next(numbers, None) or next(further, None)

    def condition_around(self, line: int | None, word: str) -> int | None:
        """The line of the innermost `if` around a line, or of one that skips it, whose test has this word."""
        tests = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.If | ast.IfExp)]
        near = [n for n in tests if line is not None and n.lineno <= line + 1 and (n.end_lineno or 0) >= line - 1]
        near = [n for n in near if word in ast.unparse(n.test)]
        return max((n.test.lineno for n in near), default=None)

    def line_of_state(self) -> int | None:
        """The first line outside the constructor that assigns an attribute of self, or appends to one."""
        tree = ast.parse(self.source)
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name != "__init__"]
        functions.sort(key=lambda n: n.name not in ("forward", "__call__"))
        found = (min(map(_line_of, filter(_writes_state, ast.walk(f))), default=None) for f in functions)
        return next((line for line in found if line is not None), None)

    def uncalled_method(self, pattern: str) -> tuple[str, int] | None:
        """A method whose name matches and that nothing in the file mentions, with its line."""
        idle = [n for n in self._methods()[1] if re.search(pattern, n.name, re.IGNORECASE)]
        return (idle[0].name, idle[0].lineno) if idle else None

    def only_read_in(self, attribute: str) -> str | None:
        """The method that nothing in the file mentions, where it alone reads this attribute, and attends to nothing."""
        called, idle = self._methods()
        read, left = ([n for n in methods if f"self.{attribute}" in ast.unparse(n)] for methods in (called, idle))
        read = [n for n in read if n.name != "__init__"]
        alone = len(left) == 1 and not read and "softmax" not in ast.unparse(left[0])
        return left[0].name if alone else None

    def _methods(self) -> tuple[list[ast.FunctionDef], list[ast.FunctionDef]]:
        """The methods of the class that the file mentions, and those that it does not."""
        tree = ast.parse(self.source)
        own = next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == self.name), None)
        methods = [n for n in own.body if isinstance(n, ast.FunctionDef)] if own is not None else []
        mentioned = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {"forward"}
        called = [n for n in methods if n.name in mentioned or n.name.startswith("__")]
        return called, [n for n in methods if n not in called]

    def never_reads(self, name: str) -> bool:
        """Whether the class or function has an argument of this name that no line of it reads."""
        nodes = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        own = next((n for n in reversed(nodes) if n.name == self.name), None)
        functions = [n for n in ast.walk(own) if isinstance(n, ast.FunctionDef)] if own is not None else []
        takes = [f for f in functions if name in {a.arg for a in [*f.args.args, *f.args.kwonlyargs]}]
        return bool(takes) and not any(
            isinstance(n, ast.Name) and n.id == name for f in takes for line in f.body for n in ast.walk(line)
        )

    def alias_after(self, line: int | None) -> int | None:
        """The first line after this one, in the same function, that only gives a value another name."""
        for function in (n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.FunctionDef)):
            if line is not None and function.lineno <= line <= (function.end_lineno or 0):
                plain = [n for n in function.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name)]
                return next((n.lineno for n in plain if n.lineno >= line), None)
        return None

    def return_line(self, inside: int | None = None, several: bool = False) -> int | None:
        """The last `return` of the function around a line, or of forward; with `several`, one of several values."""
        tree = ast.parse(self.source)
        own = next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == self.name), tree)
        functions = [n for n in ast.walk(tree if inside else own) if isinstance(n, ast.FunctionDef)]
        around = [f for f in functions if inside is not None and f.lineno <= inside <= (f.end_lineno or 0)]
        around = around or [f for f in functions if f.name == self.name]
        around = around or [f for f in functions if f.name in ("forward", "__call__")]
        found = [n for f in around[-1:] for n in ast.walk(f) if isinstance(n, ast.Return)]
        if around and not found and not several:
            return around[-1].body[-1].lineno  # after which it should stand
        found = [n for n in found if not several or len(list(_returned_values(n))) > 1]
        return max((n.lineno for n in found), default=None)

    def keyword_line(self, line: int | None, pattern: str) -> int | None:
        """The line of a keyword argument with such a name, in a call that starts on this line; otherwise the line."""
        calls = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.Call) and n.lineno == line]
        named = (k for call in calls for k in call.keywords if k.arg is not None and re.search(pattern, k.arg))
        return next((k.lineno for k in named), line)

    def packing_line(self) -> int | None:
        """The line that puts several values together under a name that forward returns beside the output."""
        line = self.return_line(several=True)
        nodes = [*ast.walk(ast.parse(self.source))]
        returned = {n.id for n in nodes if isinstance(n, ast.Name) and n.lineno == line}
        packed = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Tuple | ast.List)]
        found = [n.lineno for n in packed if {getattr(target, "id", "") for target in n.targets} & returned]
        return max(found, default=None)

    def idle_line(self) -> int | None:
        """The first line that does nothing, as `scores = scores` or `scores`: something is missing there."""
        nodes = [*ast.walk(ast.parse(self.source))]
        stored = [n for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1]
        idle = [n.lineno for n in stored if ast.unparse(n.targets[0]) == ast.unparse(n.value)]
        idle += [n.lineno for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Name | ast.Attribute)]
        return min(idle, default=None)

    def line_of_size(self, line: int | None) -> int | None:
        """The line, in the same function, that reads a size under a name which this line uses."""
        for function in (n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.FunctionDef)):
            if line is not None and function.lineno <= line <= (function.end_lineno or 0):
                nodes = [*ast.walk(function)]
                used = {n.id for n in nodes if isinstance(n, ast.Name) and n.lineno == line}
                stored = [n for n in nodes if isinstance(n, ast.Assign) and n.lineno < line]
                sizes = [n for n in stored if re.search(r"\.(shape|size)\b", ast.unparse(n.value))]
                return next((n.lineno for n in sizes if ast.unparse(n.targets[0]) in used), None)
        return None

    def dead_branch(self) -> int | None:
        """The first `if` of the file whose test is a constant."""
        tests = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.If | ast.IfExp)]
        return next((n.lineno for n in tests if isinstance(n.test, ast.Constant)), None)

    def alias_line(self, names: Iterable[str]) -> int | None:
        """The first line that only gives one of these names another name, as `q = query`."""
        stored = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.Assign)]
        return next((n.lineno for n in stored if isinstance(n.value, ast.Name) and n.value.id in names), None)

    def replaces_missing(self, name: str) -> bool:
        """Whether an argument that is None gets a value of its own: `if mask is None: mask = …`."""
        tests = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.If)]
        tests = [n for n in tests if ast.unparse(n.test) == f"{name} is None"]
        stored = [part for n in tests for part in n.body if isinstance(part, ast.Assign)]
        return any(ast.unparse(target) == name for part in stored for target in part.targets)

    def last_alias(self) -> int | None:
        """The last line that only gives a value another name, as `out = q`."""
        stored = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.Assign)]
        plain = [n for n in stored if isinstance(n.value, ast.Name) and isinstance(n.targets[0], ast.Name)]
        return max((n.lineno for n in plain), default=None)

    def overwriting_line(self, names: Iterable[str]) -> int | None:
        """The condition under which, or the line on which, an argument of this name is replaced by another name."""
        stored = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.Assign)]
        stored = [n for n in stored if isinstance(n.value, ast.Name) and ast.unparse(n.targets[0]) in set(names)]
        return next((self.enclosing_condition(n.lineno) or n.lineno for n in stored), None)

    def skipped_condition(self, name: str, ran: set[int]) -> int | None:
        """The last `if` whose body uses this name and was not executed, unless it asks whether there is none."""
        tests = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.If)]
        inside = [n for n in tests if any(name in ast.unparse(statement) for statement in n.body)]
        idle = [n for n in inside if not ran & set(range(n.body[0].lineno, (n.body[-1].end_lineno or 0) + 1))]
        idle = [n for n in idle if not re.search(r"\bis None\b|\bnot \w+$", ast.unparse(n.test))]
        return max((n.lineno for n in idle), default=None)

    def discarded_line(self, word: str) -> int | None:
        """The line of a call, with this word in it, whose result is thrown away; not in a constructor."""
        functions = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.FunctionDef)]
        inside = (n for f in functions if f.name != "__init__" for n in ast.walk(f) if isinstance(n, ast.Expr))
        calls = (n for n in inside if isinstance(n.value, ast.Call) and word in ast.unparse(n.value.func).lower())
        return next((n.lineno for n in calls), None)

    def size_line(self, name: str) -> int | None:
        """The line that computes the width of a layer: of the name in its arguments, or of the layer itself."""
        own = name.partition(".")[0]
        tree = ast.parse(self.source)
        stored = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
        made = next((n for n in stored if any(ast.unparse(t) == f"self.{own}" for t in n.targets)), None)
        layer = None if made is None else next((n for n in ast.walk(made.value) if isinstance(n, ast.Call)), None)
        if made is None or layer is None or len(layer.args) < 2:
            return self.line_of_attribute(name)
        parts = {ast.unparse(n) for n in ast.walk(layer.args[1]) if isinstance(n, ast.Name | ast.Attribute)}
        sizes = [n for n in stored if n.lineno < made.lineno and any(ast.unparse(t) in parts for t in n.targets)]
        return sizes[-1].lineno if sizes else made.lineno

    def shape_line(self, line: int | None) -> int | None:
        """The line that puts together a shape which another line only uses by its name, as in `x.view(shape)`."""
        for function in (n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.FunctionDef)):
            calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and n.lineno == line]
            names = {a.id for n in calls for a in n.args if isinstance(a, ast.Name)} if calls else set()
            made = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and n.lineno < (line or 0)]
            made = [n for n in made if any(isinstance(t, ast.Name) and t.id in names for t in n.targets)]
            shapes = [n for n in made if any(isinstance(part, ast.Tuple) for part in ast.walk(n.value))]
            if shapes:
                return shapes[-1].lineno
        return line

    def enclosing_condition(self, line: int | None, unless: str = "") -> int | None:
        """The line of the innermost `if` whose body holds this line, unless its test is only this one."""
        tests = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.If)]
        around = [n for n in tests if line is not None and n.body[0].lineno <= line <= (n.body[-1].end_lineno or 0)]
        around = [n for n in around if ast.unparse(n.test) != unless]
        return max((n.lineno for n in around), default=None)

    def loop_line(self, line: int | None) -> int | None:
        """The line that says what a loop around this one runs over, where this line uses the loop's variable."""
        loops: list[tuple[ast.expr, ast.expr, ast.AST]] = []
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.For):
                loops.append((node.target, node.iter, node))
            elif isinstance(node, ast.GeneratorExp | ast.ListComp):
                loops += [(part.target, part.iter, node) for part in node.generators]
        for target, over, loop in reversed(loops):
            names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            inside = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.lineno == line]
            if any(n.id in names and isinstance(n.ctx, ast.Load) for n in inside):
                return over.lineno
        return line

    def passes_twice(self, line: int | None) -> bool:
        """Whether a call on this line passes the same name as two arguments."""
        calls = [n for n in ast.walk(ast.parse(self.source)) if isinstance(n, ast.Call) and n.lineno == line]
        given = [[ast.unparse(a) for a in [*n.args, *(k.value for k in n.keywords)]] for n in calls]
        return any(len(set(values)) < len(values) for values in given)

    def line_of_attribute(self, name: str) -> int | None:
        """The line that assigns an attribute, given as the name of a parameter in it."""
        return self.line_with(rf"self\.{re.escape(name.partition('.')[0])}\b.*=")

    def text(self, line: int | None) -> str:
        """That line of the file."""
        if self.loaded is not None:
            return self.loaded.line(line)
        return "" if line is None or self.filename is None else linecache.getline(self.filename, line).strip()


def _line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _writes_state(node: ast.AST) -> bool:
    """Whether a statement assigns an attribute of self or a part of one, appends to it, or copies into it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("append", "extend", "update", "copy_") and _is_of_self(node.func.value)
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AugAssign) else targets
    flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]
    return any(_is_of_self(target) for target in flat)


def _is_of_self(node: ast.expr) -> bool:
    """Whether this is `self.name`, or a part of it such as `self.name[0]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"


def _returned_values(statement: ast.Return) -> Iterator[ast.expr]:
    """The values that a `return` gives, in the longest of its branches."""
    value = statement.value
    if isinstance(value, ast.IfExp):
        value = max((value.body, value.orelse), key=lambda branch: isinstance(branch, ast.Tuple))
    yield from value.elts if isinstance(value, ast.Tuple) else []


def names_used(target: Any) -> set[str]:
    """Global names that a class or function reads, including those read by its helpers in the same project."""
    found: set[str] = set()
    for thing, names, _ in _reads(target):
        found |= names
        if inspect.isclass(thing):
            found |= {base.__name__ for base in thing.__mro__} | {"nn", "torch"}
    return found


def imports_missing_in_siblings(case: Case) -> dict[str, set[str]]:
    """Names that code of the class's project reads and its file forgot to import, by the path of that file."""
    found: dict[str, set[str]] = {}
    for sibling in [] if case.loaded is None else case.loaded.siblings:
        for _, names, space in _reads(case.target):
            if space is sibling.namespace and (missing := names & set(sibling.missing_imports)):
                found.setdefault(str(sibling.path), set()).update(missing)
    return found


def stand_ins_used(target: Any) -> dict[str, str]:
    """Names that a class or its helpers read and that are only stand-ins, with where they should come from."""
    held = {name: space[name] for _, names, space in _reads(target) for name in names if name in space}
    stubs = {name: value._stub_name for name, value in held.items() if isinstance(value, Stub)}
    return stubs | {name: value.__name__ for name, value in held.items() if isinstance(value, StubModule)}


def _reads(target: Any) -> Iterator[tuple[Any, set[str], dict[str, Any]]]:
    """A class or function and its helpers in the same project, the names each member reads, and where it does so."""
    pending, seen = [target], set()
    while pending:
        thing = pending.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing, set(), {}
        for member in _members(thing):
            code = getattr(getattr(member, "__func__", member), "__code__", None)
            if code is not None:
                names = {name for part in _codes(code) for name in part.co_names}
                space = getattr(member, "__globals__", {})
                yield thing, names, space
                pending += [space[n] for n in names if n in space and _is_from_file(space[n])]


def _members(thing: Any) -> list[Any]:
    members = vars(thing).values() if inspect.isclass(thing) else [thing]
    return [inspect.unwrap(member) if callable(member) else member for member in members]


def _is_from_file(thing: Any) -> bool:
    return (inspect.isclass(thing) or inspect.isfunction(thing)) and is_project_module(getattr(thing, "__module__", ""))


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
