"""Where an error was raised, what the names there hold, and where they were assigned."""

import ast
import difflib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from headwise.check.sizes import CallSizes
from headwise.check.trace import Trace

NEAR = 0.6  # how alike two names must be, by difflib


@dataclass
class Scene:
    """Where an error was raised: the innermost frame of the learner's file, its statement, and the line to blame."""

    error: BaseException
    frames: list[tuple[FrameType, int]]  # all that were running, outermost first, with their lines
    filename: str
    blamed: int | None
    sizes: CallSizes
    tree: ast.Module
    trace: Trace | None = None  # what the call had computed
    taken: Collection[str] = ()  # what the arguments of the constructor mean

    @property
    def own(self) -> list[tuple[FrameType, int]]:
        """Those of the learner's functions."""
        return [(frame, line) for frame, line in self.frames if frame.f_code.co_filename == self.filename]

    @property
    def frame(self) -> FrameType:
        return self.own[-1][0]

    @property
    def line(self) -> int:
        return self.own[-1][1]

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

    def expressions(self) -> list[ast.Expr]:
        """Statements before the line, in the same function, that only compute something."""
        functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef) and _holds(n, self.line)]
        around = max(functions, key=lambda f: f.lineno, default=None)
        found = [] if around is None else [n for n in ast.walk(around) if isinstance(n, ast.Expr)]
        return sorted((n for n in found if n.lineno < self.line), key=lambda n: n.lineno)

    def value(self, node: ast.AST, changed: dict[str, Any] | None = None) -> Any:
        """What an expression gives in that frame, with other values for some names; None where it gives nothing."""
        if not isinstance(node, ast.expr) or any(
            isinstance(n, ast.NamedExpr | ast.Await | ast.Yield) for n in ast.walk(node)
        ):
            return None
        try:
            code = compile(ast.Expression(node), "<part>", "eval")
            return eval(code, self.frame.f_globals, {**self.frame.f_locals, **(changed or {})})  # noqa: S307 - it ran a moment ago
        except Exception:  # the part that raised, or that needs a name of an inner scope
            return None

    def assigned(self, name: str) -> ast.Assign | None:
        """The last assignment of a name, or of `self.name`, before the line; in another function, the first one."""
        targets = {name, f"self.{name}"}
        found = [n for n in self._assignments(self.line) if targets & {ast.unparse(t) for t in _targets(n)}]
        before = [n for n in found if n.lineno < self.line]
        return max(before or found[:1], key=lambda n: n.lineno, default=None)

    def is_argument(self, node: ast.AST) -> bool:
        """Whether a name is an argument of the function, or an attribute was assigned from an argument."""
        if isinstance(node, ast.Attribute):
            made = self.assigned(node.attr)
            functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef) and made in [*ast.walk(n)]]
            taken = {n.arg for f in functions for n in ast.walk(f.args) if isinstance(n, ast.arg)}
            return made is not None and isinstance(made.value, ast.Name) and made.value.id in taken
        code = self.frame.f_code
        return isinstance(node, ast.Name) and node.id in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def made(self, node: ast.AST) -> ast.Assign | None:
        """The assignment that gave a name or attribute its value, in this function or in one that passed it on."""
        return next(reversed(self.origins(node)), None)

    def origins(self, node: ast.AST) -> list[ast.Assign]:
        """All assignments that may have given a name or attribute its value, in the order of their lines."""
        if isinstance(node, ast.Attribute):
            made = self.assigned(node.attr)
            return [] if made is None else [made]
        value = self.value(node)
        for frame, line in reversed(self.own):
            names = {name for name, held in frame.f_locals.items() if held is value}
            found = [n for n in self._assignments(line) if names & {ast.unparse(t) for t in _targets(n)}]
            if before := sorted((n for n in found if n.lineno < line), key=lambda n: n.lineno):
                return before
        return []

    def written(self, node: ast.AST) -> tuple[int, int] | None:
        """A whole number of the file that an expression stands for, with its line."""
        if isinstance(node, ast.Constant):
            return (node.value, node.lineno) if type(node.value) is int else None
        value = self.value(node)
        made = self.made(node) if isinstance(node, ast.Name | ast.Attribute) else None
        plain = isinstance(made, ast.Assign) and isinstance(made.value, ast.Constant) and made.value.value == value
        return (value, made.lineno) if plain and made is not None and type(value) is int else None

    def _assignments(self, line: int) -> list[ast.Assign]:
        """Those of attributes, anywhere; those of names, in the function around a line."""
        functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)]
        inside = {id(n): f for f in functions for n in ast.walk(f)}  # of nested functions the innermost
        around = max((f for f in functions if _holds(f, line)), key=lambda f: f.lineno, default=None)
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Assign)]
        return [n for n in found if inside.get(id(n)) is around or not all(isinstance(t, ast.Name) for t in n.targets)]


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _targets(statement: ast.Assign) -> list[ast.expr]:
    """What is assigned, one by one."""
    return [t for n in statement.targets for t in (n.elts if isinstance(n, ast.Tuple | ast.List) else [n])]


def nearest(name: str, known: Iterable[str], least: float = NEAR) -> str | None:
    """The known name that is most like this one.

    >>> nearest("W_out", ["W_q", "W_o", "forward"]), nearest("linear", ["Linear", "Module"])
    ('W_o', 'Linear')
    """
    by_lower = {word.lower(): word for word in known if not word.startswith("__")}
    found = difflib.get_close_matches(name.lower(), by_lower, 1, least)
    return by_lower[found[0]] if found else None


def names_of(thing: Any) -> list[str]:
    """Names that can be read from an object: those of its own first, then what its class defines itself."""
    if not isinstance(thing, nn.Module):
        return dir(thing)
    held = [name for table in (vars(thing), thing._parameters, thing._buffers, thing._modules) for name in table]
    own = [name for name in vars(type(thing)) if not name.startswith("_")]
    return [name for name in held if not name.startswith("_") and name not in vars(nn.Module())] + own
