"""What the other classes of a file pass to the class that is judged, such as a block to its attention."""

import ast
from collections.abc import Iterator

from headwise.check.arguments import call_role
from headwise.check.binding import Bound
from headwise.check.mistakes import Finding, Found
from headwise.check.objects import signature
from headwise.check.reading import AttentionReading


def callers(bound: Bound, reading: AttentionReading | None) -> Found:
    """Keys and values come from the same place."""
    names = [p.name for p in signature(bound.thing)]
    roles = {name: call_role(name) for name in names}
    if bound.case.loaded is None or not isinstance(bound.case.target, type) or bound.form.roles.keys() - roles.keys():
        return
    for call in _calls_of(bound):
        given = dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        streams = {roles[name]: value for name, value in given.items() if roles.get(name) in ("query", "key", "value")}
        if len(streams) == 3:
            yield from _judged(call, *(streams[role] for role in ("query", "key", "value")))


def _judged(call: ast.Call, query: ast.expr, key: ast.expr, value: ast.expr) -> Iterator[Finding]:
    q, k, v = (ast.unparse(part) for part in (query, key, value))
    if q == v != k and not _names(query) & _names(key):
        words = f"{ast.unparse(call.func)} gets {k} as key and {v} as value; the values of the keys are those of {k}"
        yield Finding("wrong-role", words, call.lineno)


def _names(node: ast.expr) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {"self"}


def _calls_of(bound: Bound) -> Iterator[ast.Call]:
    """Calls of this class, as a layer that another class of the file keeps."""
    for owner in (n for n in bound.case.whole_tree.body if isinstance(n, ast.ClassDef)):
        nodes = [*ast.walk(owner)]
        kept = {
            ast.unparse(n.targets[0])
            for n in nodes
            if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and _is(n.value.func, bound.case.name)
        }
        yield from (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in kept)


def _is(function: ast.expr, name: str) -> bool:
    return getattr(function, "id", None) == name
