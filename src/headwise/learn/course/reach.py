"""How far a class comes before one of its lines fails: the steps of attention that it has done, rightly, by then.

The definitions are compiled once more, without the expression that failed and what follows it. The checker takes the
rest for unfinished work, and says which steps of that are right.
"""

import ast
import itertools
import linecache
from collections.abc import Iterator
from typing import Any

from headwise.check import Report, check, namespace
from headwise.learn.course.trial import ErrorPlace, Span

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
OWN_SCOPE = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Errors of definitions that need more of the file.
CANNOT_TELL = (SyntaxError, NameError, LookupError, TypeError, AttributeError, StopIteration)
MOST_TRIES, DEPTH = 7, 2  # of what the checker is shown; of these, inside the statement that failed
_numbers = itertools.count()


def steps_before(made: type, failure: ErrorPlace) -> set[int]:
    """The numbers of the steps that a class does rightly before it fails; none if it fails in its constructor.

    What was computed last may be wrong already, and hide from the checker what is right before it. So it is shown less
    and less of it, and every step counts that it finds once.
    """
    done: set[int] = set()
    for fewer in range(MOST_TRIES if failure.function != "__init__" else 0):
        try:
            report = _report_without(made, failure, fewer)
        except CANNOT_TELL:
            report = None
        if report is None:
            break
        done |= {int(step.partition(" ")[0]) for step in report.done}
    return done


def report_with(made: type, failure: ErrorPlace, meant: str) -> Report | None:
    """The checker's report on a class with other code where it fails; None if that cannot be told."""
    lines, failed = linecache.getlines(failure.filename), failure.span
    written = lines[failed.line - 1].encode()
    lines[failed.line - 1] = (written[: failed.column] + meant.encode() + written[failed.end_column :]).decode()
    text = "".join(lines)  # with the same lines, so that findings name those of the answer
    try:
        tree = ast.parse(text)
        tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
        return check(_compiled(tree, made, text))
    except CANNOT_TELL:
        return None


def steps_there(made: type) -> set[int] | None:
    """The numbers of the steps that a class does rightly before it returns; None if that cannot be told."""
    try:
        tree = _returning_nothing(made)
        return {int(step.partition(" ")[0]) for step in check(_compiled(tree, made)).done}
    except CANNOT_TELL:
        return None


def _returning_nothing(made: type) -> ast.Module:
    """The definitions around a class that computes what it returns and then is unfinished."""
    tree = ast.parse("".join(linecache.getlines(made.forward.__code__.co_filename)))  # type: ignore[attr-defined]
    tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == made.__name__]
    forward = next(node for node in classes[-1].body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    stub = ast.parse("raise NotImplementedError").body
    returned = [node.value for node in forward.body if isinstance(node, ast.Return) and node.value]
    kept = [node for node in forward.body if not isinstance(node, ast.Return)]
    forward.body = [*kept, *map(_kept, returned), *stub]
    return ast.fix_missing_locations(tree)


def _kept(value: ast.expr) -> ast.stmt:
    """A statement that keeps a result, because one that is not assigned counts as thrown away."""
    return ast.Assign([ast.Name("result", ast.Store())], value)


def _report_without(made: type, failure: ErrorPlace, fewer: int) -> Report | None:
    """The checker's report on a class without what failed and some operations before it; None if nothing is left."""
    tree = ast.parse("".join(linecache.getlines(failure.filename)))
    tree.body = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    return check(_compiled(tree, made)) if _cut(tree, failure.span, fewer) else None


def _compiled(tree: ast.Module, made: type, source: str = "") -> type:
    """The class of the tree that has the name of another one, among the names around that one.

    A tree that was changed has no source with its lines; it is written anew.
    """
    text, filename = source or ast.unparse(tree), f"<headwise: before the error {next(_numbers)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    space = dict(namespace(made))
    exec(compile(tree if source else text, filename, "exec"), space)  # noqa: S102 - it ran before, as part of the answer
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
            computed, gone = [*_done_before(inside, failed)], max(fewer - DEPTH - 1, 0)
            for _ in range(fewer):
                computed = [part for value in computed for part in _parts(value)]
            stub = ast.parse("raise NotImplementedError").body
            block[max(place - gone, 0) :] = [*(_kept(value) for value in computed if fewer <= DEPTH), *stub]
            ast.fix_missing_locations(tree)
            return bool(place >= gone)
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
