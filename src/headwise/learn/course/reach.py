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

from headwise.check import Report, check, namespace

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
OWN_SCOPE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_TRIES, DEPTH = 6, 2  # of what the checker is shown; of these, inside the statement that failed
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

    What was computed last may be wrong already, and hide from the checker what is right before it. So it is shown less
    and less, as long as it finds more.
    """
    best: set[int] = set()
    for fewer in range(MOST_TRIES if failure.function != "__init__" else 0):
        try:
            report = _report_without(made, failure, fewer)
        except (SyntaxError, NameError, LookupError, TypeError, AttributeError):  # definitions that need more of it
            return best
        found = set() if report is None else {int(step.partition(" ")[0]) for step in report.done}
        if report is None or (best and len(found) <= len(best)):
            return best
        best = found or best
    return best


def _report_without(made: type, failure: Failure, fewer: int) -> Report | None:
    """The checker's report on a class without what failed and some operations before it; None if nothing is left."""
    tree = ast.parse("".join(linecache.getlines(failure.filename)))
    tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    return check(_compiled(tree, made)) if _cut(tree, failure.span, fewer) else None


def _compiled(tree: ast.Module, made: type) -> type:
    """The class of the tree that has the name of another one, among the names around that one."""
    text, filename = ast.unparse(tree), f"<headwise: before the error {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space = dict(namespace(made))
    exec(compile(text, filename, "exec"), space)  # noqa: S102 - it ran before, as part of the answer
    found: type = space[made.__name__]
    return found


def _cut(tree: ast.Module, failed: Span, fewer: int) -> bool:
    """End the function at the expression that failed, or a few operations before it; False if nothing would be left."""
    block: Any = tree.body
    while (inside := _statement(block, failed)) is not None:
        place = block.index(inside)
        if not isinstance(inside, DEFINITIONS):
            del block[place + 1 :]
        following = next((b for b in _blocks(inside) if _statement(b, failed) is not None), None)
        if following is None:
            computed, gone = [*_done_before(inside, failed)], max(fewer - DEPTH, 0)
            for _ in range(fewer):
                computed = [part for value in computed for part in _parts(value)]
            stub = ast.parse("raise NotImplementedError").body
            block[max(place - gone, 0) :] = [*(ast.Expr(value) for value in computed if not gone), *stub]
            return place >= gone
        block = following
    return False


def _statement(block: list[ast.stmt], span: Span) -> ast.stmt | None:
    return next((node for node in block if Span.of(node).holds(span)), None)


def _blocks(node: ast.stmt) -> Iterator[list[ast.stmt]]:
    yield from (getattr(node, name, []) for name in ("body", "orelse", "finalbody"))


def _done_before(node: ast.AST, failed: Span) -> Iterator[ast.expr]:
    """What a statement has computed when one of its expressions fails."""
    for child in _parts(node):
        span = Span.of(child)
        if span == failed:
            yield from _parts(child)
            return
        if span.holds(failed):
            yield from _done_before(child, failed)
            return
        yield child


def _parts(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that one is computed from; none of those that have variables of their own."""
    for child in ast.iter_child_nodes(node) if not isinstance(node, OWN_SCOPE) else ():
        if isinstance(child, ast.keyword):
            yield child.value
        elif isinstance(child, ast.expr) and not isinstance(getattr(child, "ctx", None), ast.Store):
            yield child
