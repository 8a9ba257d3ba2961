"""The values that code itself names for its options: what a name is compared with, looked up in, or annotated as."""

import ast
import typing
from collections.abc import Iterable
from typing import Any

MOST = 6  # values of one option


class _Comparisons(ast.NodeVisitor):
    """Collects, for every name and attribute, the strings and numbers that it is compared with."""

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}

    def _note(self, node: ast.expr, others: Iterable[ast.expr | None]) -> None:
        """Literals beside a name; `mode.lower()` counts as `mode`."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
            node = node.func.value
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        literals = [n.value for n in others if isinstance(n, ast.Constant) and type(n.value) in (str, int)]
        if name is not None:
            self.values.setdefault(str(name), []).extend(literals)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        flat = [
            part for side in sides for part in (getattr(side, "elts", None) or getattr(side, "keys", None) or [side])
        ]
        for side in sides:
            self._note(side, [part for part in flat if part is not side])
        self.generic_visit(node)

    def visit_Match(self, node: ast.Match) -> None:
        patterns = [p for case in node.cases for p in ast.walk(case.pattern) if isinstance(p, ast.MatchValue)]
        self._note(node.subject, [p.value for p in patterns])
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, ast.Dict):  # {"a": f, "b": g}[mode]
            self._note(node.slice, node.value.keys)
        self.generic_visit(node)


def _parts(side: ast.expr) -> list[ast.expr | None]:
    """The members of a tuple, list or set, the keys of a dictionary, or the expression itself."""
    return getattr(side, "elts", None) or getattr(side, "keys", None) or [side]


def compared(tree: ast.AST) -> dict[str, list[Any]]:
    """Names and attributes with the literals that code compares them with."""
    found = _Comparisons()
    found.visit(tree)
    return {name: list(dict.fromkeys(values))[:MOST] for name, values in found.values.items() if values}


def kept_as(tree: ast.AST, name: str) -> set[str]:
    """The names under which an argument is known: its own, and the attributes that it is assigned to."""
    stored = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and getattr(n.value, "id", "") == name]
    return {name} | {t.attr for n in stored for t in n.targets if isinstance(t, ast.Attribute)}


def annotated(annotation: Any) -> list[Any]:
    """The values of `Literal["a", "b"]`."""
    return list(typing.get_args(annotation)) if typing.get_origin(annotation) is typing.Literal else []
