"""Mistakes in the text of a class that keep it from running at all: a method without self, a misspelled method."""

import ast
import inspect
import re
import sys
from collections.abc import Iterator

from torch import nn

from headwise.check.code.case import Case
from headwise.check.explain import nearest
from headwise.check.faults.crashes import definition_of
from headwise.check.mistakes import Finding
from headwise.check.vocabulary import constructor_role, has_usual_value, is_configuration

ALIKE = 0.8  # of two keys of one configuration: `attn_type` is not `attn_drop`
CALLED = {"forward": "forward", "__init__": "init"}  # what torch and Python call, and the word in its name


NOT_THERE = re.compile(r"AttributeError: module '(torch[\w.]*)' has no attribute '(\w+)'")


def misspelled_base(words: str, line: int | None) -> Finding | None:
    """The name in the first line of a class that a module of torch does not have, from what Python said about it."""
    match = NOT_THERE.match(words)
    if match is not None:
        near = nearest(match[2], dir(sys.modules[match[1]]))
        meant = f"; did you mean {near}?" if near else ""
        return Finding("unknown-name", f"{match[1]}.{match[2]}{meant}", line)
    if words.startswith("TypeError: Module.__init__() takes"):
        return Finding("missing-base", "the base is made with parentheses: write nn.Module, not nn.Module()", line)
    if words.startswith("TypeError: module() takes"):
        return Finding("unknown-name", "the base is a module of Python, not a class; did you mean nn.Module?", line)
    return None


def text_mistakes(case: Case) -> list[Finding]:
    """Why a class cannot run, where its text alone is proof."""
    if not inspect.isclass(case.target) or not issubclass(case.target, nn.Module):
        return []
    definition = definition_of(case.whole_tree, case.target.__name__)
    if definition is None:
        return []
    misspelled = [*_misspelled(definition, case.target), *_misspelled_super(definition)]
    return [*misspelled, *_without_self(definition), *_misspelled_keys(definition, case.whole)]


def _methods(definition: ast.ClassDef) -> list[ast.FunctionDef]:
    return [n for n in definition.body if isinstance(n, ast.FunctionDef)]


def _misspelled(definition: ast.ClassDef, cls: type) -> Iterator[Finding]:
    """A method that is named almost as one that Python or torch calls, where the class has none of that name."""
    for name, word in CALLED.items():
        missing = getattr(cls, name) is getattr(nn.Module, name)
        for method in _methods(definition) if missing and cls.__mro__[1] is nn.Module else ():
            plain = method.name.strip("_")
            dunder = name == "forward" or method.name.startswith("_")
            if dunder and "_" not in plain and nearest(plain, [word]) and _fits(method, name):
                yield Finding("misspelled-method", f"{method.name}; did you mean {name}?", method.lineno)


def _misspelled_super(definition: ast.ClassDef) -> Iterator[Finding]:
    """A call of `super()` that means its `__init__` and spells it otherwise."""
    called = [n for n in ast.walk(definition) if isinstance(n, ast.Attribute)]
    others = [n for n in called if ast.unparse(n.value).startswith("super(") and not hasattr(nn.Module, n.attr)]
    for n in [n for n in others if nearest(n.attr.strip("_"), ["init"])][:1]:
        yield Finding("misspelled-method", f"super().{n.attr}(); did you mean super().__init__()?", n.lineno)


def _fits(method: ast.FunctionDef, name: str) -> bool:
    """Whether a method does what one of this name does: give a result, or set attributes."""
    if name == "forward":
        return any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(method))
    stored = [n for n in ast.walk(method) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return any(getattr(n.value, "id", "") == "self" for n in stored)


def _misspelled_keys(definition: ast.ClassDef, source: str) -> Iterator[Finding]:
    """A key of the configuration that nothing defines, and that is almost another one that the class reads."""
    for method in _methods(definition):
        names = {a.arg for a in method.args.args if a.arg != "self" and is_configuration(a.arg)}
        read = [n for n in ast.walk(method) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in names]
        lines = {n.attr: n.lineno for n in reversed(read)}
        known = [key for key in lines if constructor_role(key) is not None or has_usual_value(key)]
        for key in lines.keys() - set(known):
            near = nearest(key, known, ALIKE)
            if near and not re.search(rf"(?<!\.)\b{key}\s*[:=]|[\"']{key}[\"']", source):
                words = f"{ast.unparse(read[0].value)}.{key}; did you mean {near}, as in line {lines[near]}?"
                yield Finding("missing-attribute", words, lines[key])
                return


def _without_self(definition: ast.ClassDef) -> Iterator[Finding]:
    """A plain method that uses self, or is called on it with all of its parameters, and does not take it."""
    calls = [n for n in ast.walk(definition) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    for method in _methods(definition):
        named = [a.arg for a in (*method.args.posonlyargs, *method.args.args)]
        taken = {n.arg for n in ast.walk(method) if isinstance(n, ast.arg)}
        if method.decorator_list or method.args.vararg or "self" in taken:
            continue
        uses = {n.id: n.ctx for n in ast.walk(method) if isinstance(n, ast.Name) and n.id == "self"}
        own = [c for c in calls if c.func.attr == method.name and ast.unparse(c.func.value) == "self"]  # type: ignore[attr-defined]
        full = any(len(c.args) == len(named) and not c.keywords for c in own)
        if (uses and isinstance(uses["self"], ast.Load)) or full:
            shown = ", ".join(["self", *named])
            yield Finding(
                "missing-self", f"{method.name}({', '.join(named)}) should be {method.name}({shown})", method.lineno
            )
            return
