"""The example that a file ends with: which shapes it passes to the class, found without running the class."""

import ast
import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from headwise.check.arguments import parameters_of
from headwise.check.code.case import Case
from headwise.check.code.intent import Stated
from headwise.check.vocabulary import call_role

SHAPES = {"bt": "(B,S)", "btt": "(B,T,S)", "tt": "(T,S)", "b1tt": "(B,1,T,S)", "b11t": "(B,1,1,S)", "b1t": "(B,1,S)"}
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign)


def example_shape(case: Case, name: str) -> Stated | None:
    """The shape of the mask that the file's own example passes as this argument; None where it passes none."""
    if not isinstance(case.target, type) or case.loaded is None:
        return None
    parameters = list(inspect.signature(case.target.forward).parameters)[1:] if hasattr(case.target, "forward") else []
    statements = list(_statements(case.whole_tree))
    for position, call in _calls(statements, case.name):
        given = dict(zip(parameters, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
        inputs = [node for n, node in given.items() if call_role(n) in ("self", "query")]
        if name in given and inputs:
            with contextlib.suppress(Exception):  # it needs something that is not here
                keys = [node for n, node in given.items() if call_role(n) in ("key", "memory")][:1]
                mask, *given_inputs = _values(statements[:position], [given[name], inputs[0], *keys], case)
                shape = _in_words(mask, *given_inputs)
                return None if shape is None else Stated(shape, call.lineno)
    return None


def example_arguments(case: Case) -> dict[str, Any]:
    """What the file's own example passes to the constructor, by the names of the parameters; empty without one."""
    if not isinstance(case.target, type) or case.loaded is None:
        return {}
    parameters = [p.name for p in parameters_of(case.target)]
    statements = list(_statements(case.whole_tree))
    for position, statement in enumerate(statements):
        for call in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
            given = dict(zip(parameters, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
            if getattr(call.func, "id", "") == case.name and given:
                with contextlib.suppress(Exception):  # it needs something that is not here
                    return dict(zip(given, _values(statements[:position], list(given.values()), case), strict=True))
    return {}


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Simple statements at module level, and those of the demo under `if __name__ == "__main__"`."""
    for node in tree.body:
        if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            yield from node.body
        elif isinstance(node, (*SIMPLE, ast.Expr)):
            yield node


def _calls(statements: list[ast.stmt], target: str) -> Iterator[tuple[int, ast.Call]]:
    """Calls of objects that were made from this class, with their positions."""
    made: set[str] = set()
    for position, statement in enumerate(statements):
        for node in ast.walk(statement):
            direct = isinstance(node, ast.Call) and getattr(getattr(node.func, "func", None), "id", "") == target
            if isinstance(node, ast.Call) and (direct or getattr(node.func, "id", "") in made):
                yield position, node
        if isinstance(statement, ast.Assign) and any(getattr(n, "id", "") == target for n in ast.walk(statement.value)):
            made |= {t.id for t in statement.targets if isinstance(t, ast.Name)}


def _values(before: list[ast.stmt], wanted: list[ast.expr], case: Case) -> list[Any]:
    """What these expressions are after the assignments that they depend on."""
    needed = {n.id for node in wanted for n in ast.walk(node) if isinstance(n, ast.Name)}
    slice_: list[ast.stmt] = []
    for statement in reversed(before):
        stored = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if isinstance(statement, SIMPLE) and stored & needed:
            needed |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)}
            slice_.insert(0, statement)
    space = dict(case.namespace)
    exec(compile(ast.Module(slice_, []), "example", "exec"), space)  # noqa: S102 - lines of the learner's file
    return [eval(compile(ast.Expression(node), "example", "eval"), space) for node in wanted]  # noqa: S307


def _in_words(mask: Any, *inputs: Any) -> str | None:
    """`(B,T,S)` for a mask of one table for every sample; None where sizes do not tell the axes apart."""
    if not all(isinstance(x, Tensor) and x.dim() == 3 for x in inputs) or not isinstance(mask, Tensor):
        return None
    batch, lengths = inputs[0].shape[0], {x.shape[1] for x in inputs}
    if lengths & {1, batch} or batch == 1:
        return None
    letters = {1: "1", batch: "b"} | dict.fromkeys(lengths, "t")
    return SHAPES.get("".join(letters.get(size, "?") for size in mask.shape))
