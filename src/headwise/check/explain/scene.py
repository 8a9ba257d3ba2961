"""Where an error was raised, what the names there hold, and where they were assigned."""

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from headwise.check.sizes import CallSizes

NEAR = 0.6  # how alike two names must be, by difflib


@dataclass
class Scene:
    """Where an error was raised: the innermost frame of the learner's file, its statement, and the line to blame."""

    error: BaseException
    frame: FrameType
    line: int
    blamed: int | None
    sizes: CallSizes
    tree: ast.Module

    @property
    def words(self) -> str:
        return str(self.error)

    @property
    def owner(self) -> Any:
        """The object whose method was running."""
        return self.frame.f_locals.get("self")

    def statement(self) -> ast.stmt | None:
        """The smallest statement around the line."""
        around = [n for n in ast.walk(self.tree) if isinstance(n, ast.stmt) and _holds(n, self.line)]
        return min(around, key=lambda n: (n.end_lineno or n.lineno) - n.lineno, default=None)

    def parts(self) -> Iterator[ast.AST]:
        """Everything inside that statement; of a compound one, what stands before its body."""
        found = self.statement()
        if found is not None:
            heads = [n for n in ast.iter_child_nodes(found) if not isinstance(n, ast.stmt)]
            yield from (node for head in heads for node in ast.walk(head))

    def value(self, node: ast.AST) -> Any:
        """What an expression gives in that frame; None where it gives nothing."""
        if not isinstance(node, ast.expr) or any(
            isinstance(n, ast.NamedExpr | ast.Await | ast.Yield) for n in ast.walk(node)
        ):
            return None
        try:
            code = compile(ast.Expression(node), "<part>", "eval")
            return eval(code, self.frame.f_globals, dict(self.frame.f_locals))  # noqa: S307 - it ran a moment ago
        except Exception:  # the part that raised, or that needs a name of an inner scope
            return None

    def assigned(self, name: str) -> ast.Assign | None:
        """The last assignment of a name, or of `self.name`, before the line; in another function, the first one."""
        targets = {name, f"self.{name}"}
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Assign)]
        found = [n for n in found if any(ast.unparse(t) in targets for target in n.targets for t in _single(target))]
        before = [n for n in found if n.lineno < self.line]
        return max(before or found[:1], key=lambda n: n.lineno, default=None)


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _single(target: ast.expr) -> list[ast.expr]:
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one.

    >>> nearest("W_out", ["W_q", "W_o", "forward"]), nearest("linear", ["Linear", "Module"])
    ('W_o', 'Linear')
    """
    by_lower = {word.lower(): word for word in known if not word.startswith("__")}
    found = difflib.get_close_matches(name.lower(), by_lower, 1, NEAR)
    return by_lower[found[0]] if found else None


def names_of(thing: Any) -> list[str]:
    """Names that can be read from an object: those of its own first, then what its class defines itself."""
    if not isinstance(thing, nn.Module):
        return dir(thing)
    held = [name for table in (vars(thing), thing._parameters, thing._buffers, thing._modules) for name in table]
    own = [name for name in vars(type(thing)) if not name.startswith("_")]
    return [name for name in held if not name.startswith("_") and name not in vars(nn.Module())] + own
