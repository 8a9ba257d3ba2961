"""Finds the places in a learner's source that are still to be written: `pass`, `...`, NotImplementedError, TODO."""

import ast
import builtins
import inspect
import io
import itertools
import linecache
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headwise.check.explain import nearest
from headwise.check.faults.crashes import bound_names
from headwise.check.objects import METHODS

if TYPE_CHECKING:
    from headwise.check.code.case import Case

Function = ast.FunctionDef | ast.AsyncFunctionDef
TO_DO = re.compile(
    r"\bto-?do\b|\bfixme\b|your (code|implementation|solution|turn)|code here|fill (this |it )?in\b|"
    r"not (yet )?(implemented|done|finished)|unfinished|\bwip\b|implement (this|me|here)|complete (this|me|the)|"
    r"still (to|missing)|continue here|\bxxx\b|write (this|your)|^#\s*\.\.\.\s*$",
    re.IGNORECASE,
)
# A wish for later, not a gap.
WISH = re.compile(
    r"optimi|speed|fast|refactor|clean|docs?\b|docstring|test|typ(e|ing)|rename|support|cache|flash|effici|better|"
    r"maybe|improve|vectori|perf|memory|benchmark|nicer|cite|link",
    re.IGNORECASE,
)
# Words in a comment that name a step; the keys are the steps of `headwise steps`.
STEP_WORDS = {
    1: r"project|\bq(uery|ueries)?\b|linear|layers?", 2: r"split|heads\b|reshape|view", 3: r"transpose|permute|split",
    4: r"scores?|dot product|\bqk|logits", 5: r"mask|causal|tril|padding", 6: r"scal|sqrt|√|divide",
    7: r"softmax|normali", 8: r"values?\b|weighted|\bv\b|context", 9: r"merge|concat|combine|heads back",
    10: r"out\w*\b|final|w_?o\b",
}  # fmt: skip


@dataclass(frozen=True)
class Placeholder:
    """One gap: where it is, and whether something that must run is certainly missing there."""

    line: int
    where: str = ""  # the function that it is in
    steps: tuple[int, ...] = ()  # that a comment names
    open: bool = True  # nothing was written after it
    refuses: bool = False  # it raises NotImplementedError, under a condition


@dataclass
class Gaps:
    """All gaps of one class or function and of the helpers in its file that it uses."""

    found: list[Placeholder] = field(default_factory=list)
    empty: dict[str, int] = field(default_factory=dict)  # functions of which nothing is written → line

    @property
    def open(self) -> bool:
        """Whether something is certainly still to be written."""
        return any(gap.open for gap in self.found)

    def names(self, step: int) -> bool:
        """Whether a comment says that this step is still to be written."""
        return any(step in gap.steps for gap in self.found)

    def inside(self, function: str) -> bool:
        """Whether something is certainly still to be written in this function."""
        return any(gap.open and gap.where == function for gap in self.found)


def gaps_of(case: "Case") -> Gaps:
    """The gaps in the source of a case; none where there is no source."""
    source = source_of(case)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return Gaps()
    functions = [function for definition in _used(tree, case) for function in _reached(definition)]
    bound = {*dir(builtins), *bound_names(tree), *(n.arg for n in ast.walk(tree) if isinstance(n, ast.arg))}
    found = [gap for function in functions for gap in (*_in_function(function), *_comments(source, function))]
    found += [gap for function in functions for gap in _unmade(source, function, bound)]
    empty = {function.name: function.lineno for function in functions if _is_empty(function)}
    return Gaps(sorted(set(found), key=lambda gap: gap.line), empty)


def source_of(case: "Case") -> str:
    """The text of the file that a case comes from, or nothing."""
    if case.loaded is not None:
        return case.loaded.source
    return "".join(linecache.getlines(case.filename or ""))


def _used(tree: ast.Module, case: "Case") -> list[ast.stmt]:
    """The definition of the target and of everything at module level that it mentions, directly or not."""
    definitions = {n.name: n for n in tree.body if isinstance(n, Function | ast.ClassDef)}
    name = getattr(case.target, "__name__", type(case.target).__name__)
    pending = [name] if name in definitions else list(_methods_at_module_level(case.target, definitions))
    seen: dict[str, ast.stmt] = {}
    while pending:
        name = pending.pop()
        if name not in seen:
            seen[name] = definitions[name]
            words = {getattr(n, "id", None) or getattr(n, "attr", None) for n in ast.walk(definitions[name])}
            pending += [word for word in words if word in definitions]
    return list(seen.values())


def _methods_at_module_level(target: Any, definitions: dict[str, Any]) -> Iterator[str]:
    """For a class that was put together from a fragment: the functions it was made of."""
    if inspect.isclass(target):
        yield from (name for name in vars(target) if name in definitions)


def _reached(definition: ast.stmt) -> list[Function]:
    """A function itself; of a class the methods that a call comes to, by their names."""
    if isinstance(definition, Function):
        return [definition]
    methods = {node.name: node for node in getattr(definition, "body", []) if isinstance(node, Function)}
    pending, seen = [name for name in ("__init__", *METHODS) if name in methods], set()
    while pending:
        name = pending.pop()
        if name not in seen:
            seen.add(name)
            words = {n.attr for n in ast.walk(methods[name]) if isinstance(n, ast.Attribute)}
            pending += [word for word in words if word in methods]
    return [method for name, method in methods.items() if name in seen and not _is_abstract(method)]


def _is_abstract(function: Function) -> bool:
    return any("abstract" in ast.dump(d) or "overload" in ast.dump(d) for d in function.decorator_list)


def _in_function(function: Function) -> Iterator[Placeholder]:
    name, body = function.name, _body(function)
    if not body:
        yield Placeholder(function.body[0].end_lineno or function.lineno, name)
    for statement in body:
        if isinstance(statement, ast.Pass) and len(body) > 1:
            continue  # beside other statements it only does nothing
        if _is_gap(statement) or (
            len(body) == 1 and isinstance(statement, ast.Return) and _is_nothing(statement.value)
        ):
            yield Placeholder(statement.lineno, name)
        elif isinstance(statement, ast.If) and all(_is_gap(s) and not isinstance(s, ast.Pass) for s in statement.body):
            refuses = isinstance(statement.body[-1], ast.Raise)
            yield Placeholder(statement.lineno, name, steps_in(ast.unparse(statement.test)), False, refuses)
    for node in ast.walk(function):
        value = isinstance(node, ast.Assign | ast.AnnAssign) and _is_gap_value(node, function)
        if value or (isinstance(node, ast.Return) and _is_ellipsis(node.value)):
            yield Placeholder(node.lineno, name)  # type: ignore[attr-defined]


def _body(function: Function) -> list[ast.stmt]:
    """What a function does, without its docstring."""
    return function.body[1:] if _is_docstring(function.body[0]) else function.body


def steps_in(text: str) -> tuple[int, ...]:
    """The steps that a text names."""
    return tuple(step for step, words in STEP_WORDS.items() if re.search(words, text, re.IGNORECASE))


def _is_empty(function: Function) -> bool:
    nothing = [
        s for s in _body(function) if not _is_gap(s) and not (isinstance(s, ast.Return) and _is_nothing(s.value))
    ]
    return not nothing and not _is_abstract(function)


def _is_docstring(statement: ast.stmt) -> bool:
    held = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return held and isinstance(statement.value.value, str)  # type: ignore[attr-defined]


def _is_gap(statement: ast.stmt) -> bool:
    """`pass`, `...` or `raise NotImplementedError` that is not under a condition."""
    if isinstance(statement, ast.Raise):
        return "NotImplemented" in ast.dump(statement)
    return isinstance(statement, ast.Pass) or (isinstance(statement, ast.Expr) and _is_ellipsis(statement.value))


def _is_ellipsis(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is Ellipsis


def _is_nothing(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None) or _is_ellipsis(value)


def _is_gap_value(node: ast.Assign | ast.AnnAssign, function: Function) -> bool:
    """Whether it assigns `...`, or a None that is read later and never replaced."""
    if node.value is None or not _is_nothing(node.value):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return _is_ellipsis(node.value) or any(_is_read_as_it_is(target, function) for target in targets)


def _is_read_as_it_is(target: ast.expr, function: Function) -> bool:
    """Whether a local name gets no other value in this function and is used without a test for None."""
    if not isinstance(target, ast.Name):
        return False
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == target.id]
    tested = {id(n) for c in ast.walk(function) if isinstance(c, ast.Compare) for n in ast.walk(c)}
    calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
    options = {id(value) for c in calls for value in (*c.args[2:], *(k.value for k in c.keywords))}  # None may be meant
    reads = [n for n in names if isinstance(n.ctx, ast.Load) and id(n) not in tested | options]
    return len([n for n in names if isinstance(n.ctx, ast.Store)]) == 1 and bool(reads)


# Comments.


def _comments(source: str, function: Function) -> Iterator[Placeholder]:
    """Comments that announce code, open where no code follows in their block."""
    lines = source.splitlines()
    for line, text in comments(source):
        inside = function.lineno <= line <= (function.end_lineno or line) + _trailing(lines, function)
        if inside and TO_DO.search(text) and not WISH.search(text):
            yield Placeholder(line, function.name, steps_in(text), _nothing_follows(lines, line))


def _unmade(source: str, function: Function, bound: set[str]) -> Iterator[Placeholder]:
    """A paragraph of comments, before the first use of a name that nothing in the file gives a value."""
    lines = source.splitlines()
    notes = dict(comments(source))
    reads = [
        n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id not in bound and not nearest(n.id, bound)
    ]
    line = min((n.lineno for n in reads), default=0) - 1
    while line > function.lineno and not lines[line - 1].strip():
        line -= 1
    paragraph = list(itertools.takewhile(lambda n: n in notes and lines[n - 1].lstrip()[:1] == "#", range(line, 0, -1)))
    apart = bool(paragraph) and not lines[paragraph[0]].strip()  # an empty line comes before the next code
    if apart or len(paragraph) > 1:
        words = " ".join(notes[n] for n in paragraph)
        yield Placeholder(paragraph[-1], function.name, steps_in(words))


def comments(source: str) -> list[tuple[int, str]]:
    """Every comment with its line."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError):
        return []
    return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]


def _trailing(lines: list[str], function: Function) -> int:
    """How many lines after a function are comments indented like its body, which belong to it."""
    count = 0
    for text in lines[function.end_lineno or 0 :]:
        if text.strip() and not re.match(rf"\s{{{function.col_offset + 1},}}#", text):
            break
        count += 1
    return count


def _nothing_follows(lines: list[str], line: int) -> bool:
    """Whether the next code is outside the block of this comment, returns, or is a placeholder itself."""
    before, _, _ = lines[line - 1].partition("#")
    if before.strip():  # behind code: only a placeholder value
        return bool(re.search(r"=\s*(None|\.\.\.|0|0\.0)\s*$", before.rstrip()))
    here = len(before)
    for text in lines[line:]:
        if text.strip() and not text.lstrip().startswith("#"):
            outside = len(text) - len(text.lstrip()) < here
            return outside or bool(
                re.match(r"(return\b|pass\b|\.\.\.|raise NotImpl|\w+ = (None|\.\.\.))", text.lstrip())
            )
    return True
