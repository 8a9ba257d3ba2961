"""What a class reads and nobody ever sets, by its text alone: for code that never gets as far as running."""

import ast
import builtins
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from headwise.check.case import Case
from headwise.check.findings import Finding
from headwise.check.usage import globals_read

INDIRECT = {"setattr", "vars", "__dict__", "__getattr__", "exec", "eval", "locals", "globals"}  # sets by other ways
REGISTERING = {"register_buffer", "register_parameter", "add_module", "register_module"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def faults_of_text(case: Case) -> list[Finding]:
    """Attributes and names that are certainly missing, and a module that is never set up."""
    if case.loaded is None or case.loaded.syntax is not None:
        return []
    tree = ast.parse(case.loaded.source)
    found = []
    if inspect.isclass(case.target):
        definition = _definition(tree, case.target.__name__)
        if definition is not None and _only_torch_above(case.target):
            found += _never_set_up(definition, case.target) + _unset(definition, case.target)
    return found + _undefined(tree, case)


def _definition(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((n for n in reversed(tree.body) if isinstance(n, ast.ClassDef) and n.name == name), None)


def _only_torch_above(cls: type) -> bool:
    """Whether everything it inherits from is known."""
    return all(base is object or base.__module__.startswith("torch.") for base in cls.__mro__[1:])


def _never_set_up(definition: ast.ClassDef, cls: type) -> list[Finding]:
    init = next((n for n in definition.body if isinstance(n, Function) and n.name == "__init__"), None)
    if init is None or not issubclass(cls, nn.Module):
        return []
    called = any(
        (isinstance(n, ast.Name) and n.id == "super") or (isinstance(n, ast.Attribute) and n.attr == "__init__")
        for n in ast.walk(init)
    )
    return [] if called else [Finding("missing-super", "", init.lineno)]


def _unset(definition: ast.ClassDef, cls: type) -> list[Finding]:
    words = {n.id for n in ast.walk(definition) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(definition) if isinstance(n, ast.Attribute)}
    if words & INDIRECT:
        return []
    known = set(dir(cls)) | set(dir(nn.Module())) | {"training"} | set(_set_somewhere(definition))
    asked = set(_asked_for(definition))
    missing: dict[str, int] = {}
    for name, line in sorted(_read(definition), key=lambda pair: pair[1]):
        if name not in known | asked:
            missing.setdefault(name, line)
    if not missing:
        return []
    return [Finding("missing-attribute", ", ".join(f"self.{name}" for name in missing), next(iter(missing.values())))]


def _of_self(definition: ast.ClassDef) -> Iterator[ast.Attribute]:
    for method in definition.body:
        if isinstance(method, Function) and method.args.args:
            first = method.args.args[0].arg
            for node in ast.walk(method):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == first:
                    yield node


def _set_somewhere(definition: ast.ClassDef) -> Iterator[str]:
    yield from (node.attr for node in _of_self(definition) if not isinstance(node.ctx, ast.Load))
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in REGISTERING:
            named = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")]
            # A name put together at run time may be any.
            yield from (str(n.value) if isinstance(n, ast.Constant) else "*" for n in named)


def _read(definition: ast.ClassDef) -> Iterator[tuple[str, int]]:
    if "*" not in set(_set_somewhere(definition)):
        yield from ((node.attr, node.lineno) for node in _of_self(definition) if isinstance(node.ctx, ast.Load))


def _asked_for(definition: ast.ClassDef) -> Iterator[str]:
    """Names in `hasattr(self, "…")` and `getattr(self, "…", …)`."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            yield from (str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant))


def _undefined(tree: ast.Module, case: Case) -> list[Finding]:
    """Names that the class looks up in its module, and that no line of the file binds, in whatever place."""
    if any(isinstance(n, ast.ImportFrom) and any(a.name == "*" for a in n.names) for n in ast.walk(tree)):
        return []
    bound = set(dir(builtins)) | set(_bound_names(tree)) | {"__file__", "__name__", "__class__"}
    if case.loaded is not None:
        bound |= set(case.loaded.missing_imports)  # said apart
    missing = {name: line for name, line in globals_read(case.target).items() if name not in bound}
    return [Finding("undefined-name", ", ".join(missing), min(missing.values()))] if missing else []


def _bound_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name).partition(".")[0] for a in node.names)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            yield from node.names
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def never_read(case: Case, name: str) -> bool:
    """Whether an argument of forward is nowhere mentioned in its body: neither read nor replaced."""
    definition = None if case.loaded is None else _definition(ast.parse(case.loaded.source), case.name)
    if definition is None:
        return False
    methods = [n for n in definition.body if isinstance(n, Function) and name in {a.arg for a in n.args.args}]
    return bool(methods) and not any(
        isinstance(n, ast.Name) and n.id == name for m in methods for line in m.body for n in ast.walk(line)
    )


def misplaced_mask(case: Case) -> list[Finding]:
    """A mask given by position to another parameter of a function of the same file that has one called mask."""
    if case.loaded is None:
        return []
    tree = ast.parse(case.loaded.source)
    takes = {n.name: n.args for n in ast.walk(tree) if isinstance(n, Function)}
    definition = _definition(tree, getattr(case.target, "__name__", ""))
    for call in ast.walk(definition) if definition is not None else ():
        if not isinstance(call, ast.Call) or any(isinstance(a, ast.Starred) for a in call.args):
            continue
        method = isinstance(call.func, ast.Attribute)
        name: Any = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
        names = [a.arg for a in takes[name].args] if name in takes else []
        names = names[1:] if method and names[:1] == ["self"] else names
        given = dict(zip(names, call.args, strict=False))
        filled = set(given) | {k.arg for k in call.keywords}
        for place, value in given.items():
            if isinstance(value, ast.Name) and value.id == "mask" != place and "mask" in names and "mask" not in filled:
                return [Finding("mask-misplaced", f"{name}(…) takes it as {place!r}", call.lineno)]
    return []
