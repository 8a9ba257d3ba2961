"""How far a class comes before one of its lines fails: the steps of attention that it has done, rightly, by then.

The definitions are compiled once more, without the expression that failed and what follows it. The checker takes the
rest for unfinished work, and says which steps of that are right.
"""

import ast
import itertools
import linecache
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NamedTuple

from headwise.check import check, namespace

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
OWN_SCOPE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_TRIES = 5  # of what the checker is shown
_numbers = itertools.count()


class Span(NamedTuple):
    """A piece of source, from a line and column to another; columns count bytes, as in `ast`."""

    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of(cls, node: Any) -> "Span":
        """Where a node of a tree is."""
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)

    def holds(self, other: "Span") -> bool:
        """Whether another piece is inside this one."""
        return (self.line, self.column) <= (other.line, other.column) and (other.end_line, other.end_column) <= (
            self.end_line,
            self.end_column,
        )


class Failure(NamedTuple):
    """Where an error came from, in a learner's code."""

    filename: str
    function: str
    span: Span

    @property
    def line(self) -> int:
        """Its line."""
        return self.span.line


def failure_in(trace: TracebackType | None, installed: tuple[str, ...]) -> Failure | None:
    """The last expression of a traceback that is not in one of the `installed` folders."""
    own = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(installed)]
    if not own or own[-1].lineno is None:
        return None
    frame, line = own[-1], own[-1].lineno or 0
    span = Span(line, frame.colno or 0, frame.end_lineno or line, frame.end_colno or 0)
    return Failure(frame.filename, frame.name, span)


def steps_before(made: type, failure: Failure) -> set[int]:
    """The numbers of the steps that a class does rightly before it fails; none if it fails in its constructor.

    Where the checker understands nothing of what was computed by then, because something in it is wrong already, it
    sees less of it.
    """
    source = "".join(linecache.getlines(failure.filename))
    if failure.function == "__init__":
        return set()
    for fewer in range(MOST_TRIES):
        try:
            tree = ast.parse(source)
            tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
            report = check(_compiled(tree, made)) if _cut(tree, failure.span, fewer) else None
        except (SyntaxError, NameError, LookupError, TypeError, AttributeError):  # definitions that need more of it
            return set()
        if report is None or report.done:
            return set() if report is None else {int(step.partition(" ")[0]) for step in report.done}
    return set()


def _compiled(tree: ast.Module, made: type) -> type:
    """The class of the tree that has the name of another one, among the names around that one."""
    text, filename = ast.unparse(tree), f"<headwise: before the error {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space = dict(namespace(made))
    exec(compile(text, filename, "exec"), space)  # noqa: S102 - it ran before, as part of the answer
    found: type = space[made.__name__]
    return found


def _cut(tree: ast.Module, failed: Span, fewer: int) -> bool:
    """End the function at the expression that failed, or, `fewer`, so many statements before it; False if none is left."""
    block: Any = tree.body
    while (inside := _statement(block, failed)) is not None:
        place = block.index(inside)
        if not isinstance(inside, DEFINITIONS):
            del block[place + 1 :]
        following = next((b for b in _blocks(inside) if _statement(b, failed) is not None), None)
        if following is None:
            computed = [ast.Expr(value) for value in _done_before(inside, failed)] if not fewer else []
            block[max(place + 1 - max(fewer, 1), 0) :] = [*computed, *ast.parse("raise NotImplementedError").body]
            return place + 1 >= fewer
        block = following
    return False


def _statement(block: list[ast.stmt], span: Span) -> ast.stmt | None:
    return next((node for node in block if Span.of(node).holds(span)), None)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    yield from (getattr(node, name, []) for name in ("body", "orelse", "finalbody"))


def _done_before(node: ast.AST, failed: Span) -> Iterator[ast.expr]:
    """What a statement has computed when one of its expressions fails."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr) or isinstance(getattr(child, "ctx", None), ast.Store):
            continue
        span = Span.of(child)
        if span == failed:
            yield from (inner for inner in ast.iter_child_nodes(child) if isinstance(inner, ast.expr))
            return
        if span.holds(failed):
            if not isinstance(child, OWN_SCOPE):
                yield from _done_before(child, failed)
            return
        yield child
