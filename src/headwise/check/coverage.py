"""Which parts of a learner's functions have run in the calls of a check, and which never have.

What never ran was never compared with anything, so nothing can be said about it. Counted are statements and the two
sides of `a if test else b`, in functions that were called at all; refusals (`raise`, `assert`), messages and handlers
of errors do not count.
"""

import ast
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

SILENT = (ast.Pass, ast.Raise, ast.Assert, ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MESSAGES = ("print", "warn", "warning", "info", "debug", "error", "log", "warn_once", "warning_once")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Spot = tuple[int, int]  # line and column


class CodePart(NamedTuple):
    """A statement or one side of a conditional expression, and the tests that lead to it."""

    node: ast.stmt | ast.expr
    tests: tuple[ast.expr, ...]

    @property
    def start(self) -> Spot:
        """Where it begins."""
        return self.node.lineno, self.node.col_offset

    @property
    def end(self) -> Spot:
        """Where it ends; of an `if` or a loop, where its head ends."""
        head = getattr(self.node, "test", None) or getattr(self.node, "iter", None)
        last = head if head is not None and isinstance(self.node, ast.stmt) else self.node
        return int(last.end_lineno or 0), int(last.end_col_offset or 0)


class Coverage:
    """Records, while it is entered, the instructions of one file that run; a call that raises counts for nothing."""

    def __init__(self, filename: str | None) -> None:
        self.filename = filename
        self.ran: dict[CodeType, set[int]] = {}
        self.blocked = False  # another tracer, such as a debugger, was active
        self._now: dict[CodeType, set[int]] = {}
        self._depth = 0

    def __enter__(self) -> "Coverage":
        self._depth += 1
        if self._depth == 1:
            self._now, self.blocked = {}, self.blocked or sys.gettrace() is not None
            if not self.blocked and self.filename is not None:
                sys.settrace(self._called)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            if not self.blocked:
                sys.settrace(None)
            for code, offsets in self._now.items() if kind is None else ():
                self.ran.setdefault(code, set()).update(offsets)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self.filename:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._now.setdefault(frame.f_code, set()).add(frame.f_lasti)
        return self._stepped

    def unrun(self, source: str, entry: CodeType | None = None) -> list[CodePart]:
        """The outermost parts of called functions that never ran, in the order of the file.

        A part of a helper that depends on an argument which nothing that ran passes is left out; `entry` is the
        method that we call ourselves, with every argument.
        """
        functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, FUNCTIONS)]
        entered = {code: n for code in self.ran for n in functions if _is_code_of(code, n)}
        calls = [call for n in entered.values() for call in ast.walk(n) if isinstance(call, ast.Call)]
        found: list[CodePart] = []
        for code, function in entered.items():
            ours = code is entry or entry is None
            parts = self._unrun_in(code, function)
            found += [part for part in parts if ours or _can_be_reached(part, function, calls)]
        return sorted(found, key=lambda part: part.start)

    def _unrun_in(self, code: CodeType, function: Function) -> Iterator[CodePart]:
        places = list(code.co_positions())
        every = {_start(place) for place in places}
        ran = {_start(places[offset // 2]) for offset in self.ran[code] if offset // 2 < len(places)}
        skipped: Spot = (0, 0)
        for part in parts(function.body):
            inside = [spot for spot in every if spot is not None and part.start <= spot < part.end]
            if part.start < skipped or not inside or any(spot in ran for spot in inside):
                continue
            skipped = (int(part.node.end_lineno or 0), int(part.node.end_col_offset or 0))
            yield part


def _start(place: tuple[int | None, int | None, int | None, int | None]) -> Spot | None:
    line, _, column, _ = place
    return None if line is None or column is None else (line, column)


def _can_be_reached(part: CodePart, function: Function, calls: list[ast.Call]) -> bool:
    """Whether one of these calls passes the optional arguments that the last test before this part asks for."""
    listed = [a.arg for a in function.args.args]
    own = listed[1:] if listed[:1] == ["self"] else listed
    optional = {*listed[len(listed) - len(function.args.defaults) :], *(a.arg for a in function.args.kwonlyargs)}
    asked = {n.id for n in ast.walk(part.tests[-1]) if isinstance(n, ast.Name)} if part.tests else set()
    near = [call for call in calls if _may_call(call, function.name)]
    return all(any(_passes(call, name, own) for call in near) for name in asked & optional)


def _may_call(call: ast.Call, name: str) -> bool:
    """Whether a call may be one of this function: by its name, or of an object of which it is the method."""
    if isinstance(call.func, ast.Attribute):
        of_self = getattr(call.func.value, "id", "") == "self"
        return call.func.attr == name or (name in ("forward", "__call__", "__init__") and of_self)
    return isinstance(call.func, ast.Name | ast.Subscript)


def _passes(call: ast.Call, name: str, own: list[str]) -> bool:
    """Whether a call passes this argument, or something that may hold it."""
    spread = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
    position = own.index(name) if name in own else len(call.args)
    return spread or position < len(call.args) or any(k.arg == name for k in call.keywords)


def _is_code_of(code: CodeType, function: Function) -> bool:
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    return code.co_name == function.name and code.co_firstlineno == first


def parts(body: list[ast.stmt], tests: tuple[ast.expr, ...] = ()) -> Iterator[CodePart]:
    """The parts of a block that are worth running, outer ones first."""
    if body and isinstance(body[-1], ast.Raise):
        return  # it refuses its input
    for statement in body:
        if isinstance(statement, SILENT + FUNCTIONS) or _is_message(statement):
            continue
        yield CodePart(statement, tests)
        yield from _sides(statement, tests)
        yield from _blocks(statement, tests)


def _blocks(statement: ast.stmt, tests: tuple[ast.expr, ...]) -> Iterator[CodePart]:
    """The parts inside a compound statement; handlers of errors are left out."""
    if isinstance(statement, ast.If):
        yield from parts(statement.body, (*tests, statement.test))
        yield from parts(statement.orelse, (*tests, statement.test))
    elif isinstance(statement, ast.Match):
        for case in statement.cases:
            yield from parts(case.body, (*tests, statement.subject))
    else:
        for name in ("body", "orelse", "finalbody"):
            yield from parts(getattr(statement, name, []), tests)


def _sides(statement: ast.stmt, tests: tuple[ast.expr, ...]) -> Iterator[CodePart]:
    """Both sides of every conditional expression in a statement, without the statements inside it."""
    pending: list[ast.AST] = [n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.expr)]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.IfExp):
            yield CodePart(node.body, (*tests, node.test))
            yield CodePart(node.orelse, (*tests, node.test))
        if not isinstance(node, ast.Lambda):
            pending += list(ast.iter_child_nodes(node))


def _is_message(statement: ast.stmt) -> bool:
    """Whether a statement only says something: a docstring, or a call of print or of a logger."""
    if not isinstance(statement, ast.Expr):
        return False
    called = statement.value.func if isinstance(statement.value, ast.Call) else None
    name = getattr(called, "attr", None) or getattr(called, "id", "")
    return isinstance(statement.value, ast.Constant) or name in MESSAGES
