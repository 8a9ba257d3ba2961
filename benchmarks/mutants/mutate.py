"""Every mutant of a style: one small change at one place, the rest of the text as it was.

    >>> [mutant.describe() for mutant in mutants("separate")][0]
    'separate: missing-import, line 1: import math → '

Changes are made in the text by the positions of the syntax tree, so that lines keep their numbers.
"""

import ast
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from mutants.drivers import source_of


class Edit:
    """A replacement of the text from `start` to `end`, counted in bytes, as the syntax tree counts."""

    def __init__(self, start: int, end: int, text: str) -> None:
        self.start, self.end, self.text = start, end, text


@dataclass(frozen=True)
class Mutant:
    """A style with one mistake, or several. `lines` are those of the statement that was changed, in the new text."""

    style: str
    operator: str
    line: int
    lines: tuple[int, ...]
    before: str
    after: str
    source: str
    number: int = 0  # among all of the style

    def describe(self) -> str:
        """One line of text."""
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.style}: {self.operator}, line {self.line}: {before} → {after}"


class Tree:
    """A source text with its syntax tree: positions, parents, functions, and what its names stand for."""

    def __init__(self, source: str) -> None:
        self.source, self.bytes = source, source.encode()
        self.root = ast.parse(source)
        self.starts = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.root) for child in ast.iter_child_nodes(node)}

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node starts and ends, in bytes."""
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        """A node as it is written."""
        start, end = self.span(node)
        return self.bytes[start:end].decode()

    def edit(self, node: ast.AST, text: str) -> Edit:
        """A node replaced."""
        return Edit(*self.span(node), text)

    def insertion(self, node: ast.AST, before: str, after: str) -> Edit:
        """A node with text around it."""
        return self.edit(node, before + self.text(node) + after)

    def enclosing(self, node: ast.AST, kind: type | tuple[type, ...]) -> ast.AST | None:
        """The nearest node of that kind around a node."""
        found = self.parents.get(node)
        while found is not None and not isinstance(found, kind):
            found = self.parents.get(found)
        return found

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that holds a node."""
        return node if isinstance(node, ast.stmt) else self.enclosing(node, ast.stmt) or node

    def functions(self) -> list[ast.FunctionDef]:
        """All functions and methods, in the order of the text."""
        return [node for node in ast.walk(self.root) if isinstance(node, ast.FunctionDef)]

    def nodes(self, kind: type | tuple[type, ...], within: ast.AST | None = None) -> Iterator[ast.AST]:
        """Nodes of a kind inside functions, annotations and docstrings excluded."""
        tops = [within] if within is not None else self.functions()
        for top in tops:
            for node in ast.walk(top):
                if isinstance(node, kind) and not self._is_annotation(node):
                    yield node

    def _is_annotation(self, node: ast.AST) -> bool:
        while node in self.parents:
            parent = self.parents[node]
            if isinstance(parent, ast.arg) or (isinstance(parent, ast.FunctionDef) and parent.returns is node):
                return True
            if isinstance(parent, ast.Expr) and isinstance(node, ast.Constant):
                return True
            node = parent
        return False

    def padded(self, edits: list[Edit]) -> list[Edit]:
        """Edits that take no line away: blank lines stand where there was more."""
        gone = sum(self.bytes[e.start : e.end].count(b"\n") - e.text.count("\n") for e in edits)
        last = max(edits, key=lambda e: e.start)
        return [e if e is not last else Edit(e.start, e.end, e.text + "\n" * gone) for e in edits]

    def apply(self, edits: Iterable[Edit]) -> str:
        """The text with replacements."""
        text = self.bytes
        for edit in sorted(edits, key=lambda e: e.start, reverse=True):
            text = text[: edit.start] + edit.text.encode() + text[edit.end :]
        return text.decode()


@cache
def mutants(style: str) -> tuple[Mutant, ...]:
    """All mutants of a style, in the same order every time."""
    return tuple(mutate(source_of(style), style))


def mutate(source: str, style: str = "") -> list[Mutant]:
    """All mutants of a text, each text once; what is not valid Python is left out."""
    from mutants.operators import OPERATORS

    tree, seen, found = Tree(source), {source}, []
    for name, operator in OPERATORS.items():
        for node, asked in operator(tree):
            edits = tree.padded(asked)
            text = tree.apply(edits)
            if text in seen or not _is_valid(text):
                continue
            seen.add(text)
            found.append(_mutant(tree, style, name, node, edits, text))
    return [replace(mutant, number=number) for number, mutant in enumerate(found)]


def _mutant(tree: Tree, style: str, operator: str, node: ast.AST, edits: list[Edit], text: str) -> Mutant:
    statement = tree.statement(node)
    held = node if hasattr(statement, "body") else statement
    lines = {*range(held.lineno, held.end_lineno + 1)}
    for edit in edits:  # a statement that moved may be named where it was or where it is
        first = tree.bytes[: edit.start].count(b"\n") + 1
        lines |= {*range(first, first + edit.text.count("\n") + 1)}
    before = " … ".join(tree.bytes[e.start : e.end].decode() for e in edits)
    after = " … ".join(e.text for e in edits)
    line = tree.bytes[: min(e.start for e in edits)].count(b"\n") + 1
    return Mutant(style, operator, line, tuple(sorted(lines)), before, after, text)


def _is_valid(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def pairs(style: str, count: int, seed: int) -> list[Mutant]:
    """Mutants with two mistakes, made one after the other at random places."""
    draw, found = random.Random(f"{style} {seed}"), {}  # noqa: S311 - a sample, not a secret
    while len(found) < count:
        first = draw.choice(mutants(style))
        second = draw.choice(mutate(first.source, style))
        if second.source != source_of(style):
            found[second.source] = replace(
                second,
                operator=f"{first.operator} + {second.operator}",
                lines=tuple(sorted({*first.lines, *second.lines})),
                before=f"{first.before} / {second.before}",
                after=f"{first.after} / {second.after}",
            )
    return [replace(mutant, number=number) for number, mutant in enumerate(found.values())]
