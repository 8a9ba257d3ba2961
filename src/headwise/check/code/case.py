"""One class, function or object to judge, and questions about its text: on which line something stands."""

import ast
import functools
import inspect
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from headwise.check.code.loader import Loaded
from headwise.check.coverage import Coverage
from headwise.check.objects import METHODS
from headwise.check.vocabulary import call_role

STREAMS = {"query", "key", "value"}
DEFINED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Case:
    """One class, function or object to judge, and where it comes from."""

    name: str
    target: Any
    namespace: MutableMapping[str, Any]
    loaded: Loaded | None = None
    progress: Callable[[str], None] = lambda _: None
    thorough: bool = True  # also measure speed and compile
    assignment: Any = None  # the `Assigned` form or `Reference` that it must also fit
    text_only: bool = False  # nothing can be built here: it is another process that runs it

    @functools.cached_property
    def coverage(self) -> Coverage:
        """Which lines of the file have run in calls that returned."""
        return Coverage(self.filename)

    @property
    def namespaces(self) -> list[MutableMapping[str, Any]]:
        """The names of its module, and of the files of its project that the module imports."""
        return [self.namespace] if self.loaded is None else [*self.loaded.namespaces]

    @property
    def filename(self) -> str | None:
        """The file whose lines are reported."""
        if self.loaded is not None:
            return self.loaded.path
        owner = self.target if inspect.isclass(self.target) or inspect.isfunction(self.target) else type(self.target)
        for method in (owner, getattr(owner, "forward", None), getattr(owner, "__init__", None)):
            if inspect.isfunction(method):
                return method.__code__.co_filename
        return None

    @functools.cached_property
    def whole(self) -> str:
        """The text of the whole file; empty where there is none."""
        if self.loaded is not None:
            return self.loaded.source
        return "" if self.filename is None else "".join(linecache.getlines(self.filename))

    @functools.cached_property
    def whole_tree(self) -> ast.Module:
        """The whole file; empty where it is no Python file, such as a page from which code was taken."""
        try:
            return ast.parse(self.whole)
        except (SyntaxError, ValueError):
            return ast.Module([], [])

    @functools.cached_property
    def source(self) -> str:
        """The file, with empty lines for the classes, functions and texts that this one does not use."""
        used = _used_by(self.whole_tree, self.name)
        others = [n for n in self.whole_tree.body if (isinstance(n, DEFINED) or _is_text(n)) and n not in used]
        return without(self.whole, others if used else [])

    @functools.cached_property
    def tree(self) -> ast.Module:
        """What `source` says."""
        return ast.parse(self.source)

    @functools.cached_property
    def own(self) -> str:
        """The same, without what it uses."""
        others = [n for n in self.tree.body if isinstance(n, DEFINED) and n.name != self.name]
        return without(self.source, others if _used_by(self.tree, self.name) else [])

    @functools.cached_property
    def around(self) -> str:
        """The file, with empty lines for all classes but this one."""
        others = [n for n in self.whole_tree.body if isinstance(n, ast.ClassDef) and n.name != self.name]
        return without(self.whole, others)

    def line_with(self, pattern: str) -> int | None:
        """The first line inside the class or function that matches a regular expression."""
        try:
            found = inspect.getsourcelines(self.target)
        except (OSError, TypeError):
            found = (self.whole.splitlines(), 1)
        if self.loaded is not None:
            last = next(reversed(self.definitions()), None)
            start, end = (last.lineno, last.end_lineno) if last is not None else (1, None)
            found = (self.whole.splitlines()[start - 1 : end], start)
        numbers = (n for n, text in enumerate(found[0], found[1]) if re.search(pattern, text.partition("#")[0]))
        everywhere = enumerate(self.source.splitlines() if self.loaded is not None else [], 1)
        further = (n for n, text in everywhere if re.search(pattern, text.partition("#")[0]))
        return next(numbers, None) or next(further, None)

    def definitions(self) -> list[ast.ClassDef | ast.FunctionDef]:
        """All classes or functions of this name in the file, in the order of their lines; the last one counts."""
        nodes = (n for n in ast.walk(self.whole_tree) if isinstance(n, ast.ClassDef | ast.FunctionDef))
        return sorted((n for n in nodes if n.name == self.name), key=_line_of)

    def derived(self) -> list[str]:
        """The classes of the file that inherit from this one."""
        nodes = [n for n in self.whole_tree.body if isinstance(n, ast.ClassDef)]
        return [n.name for n in nodes if any(getattr(base, "id", "") == self.name for base in n.bases)]

    def users(self) -> list[str]:
        """The other classes of the file that make an object of this one, by its name."""
        nodes = [n for n in self.whole_tree.body if isinstance(n, ast.ClassDef) and n.name != self.name]
        made = {n.name: [c.func for c in ast.walk(n) if isinstance(c, ast.Call)] for n in nodes}
        return [name for name, calls in made.items() if any(getattr(f, "id", "") == self.name for f in calls)]

    def replaced(self) -> Iterator[tuple[str, int, int]]:
        """What is defined twice on one level: its name, the line that is lost, and the line that counts."""
        tree = self.whole_tree
        own = next((n for n in reversed(tree.body) if isinstance(n, ast.ClassDef) and n.name == self.name), None)
        for body, names in ((tree.body, {self.name}), ([] if own is None else own.body, None)):
            seen: dict[str, int] = {}
            for node in body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.decorator_list:
                    if node.name in seen and (names is None or node.name in names):
                        yield node.name, seen[node.name], node.lineno
                    seen[node.name] = node.lineno

    def returned_tuple_line(self) -> int | None:
        """The line that returns a tuple of one, in the last definition of this name."""
        own = next(reversed(self.definitions()), None)
        returns = (n for n in ast.walk(own) if isinstance(n, ast.Return)) if own is not None else ()
        return next((n.lineno for n in returns if isinstance(n.value, ast.Tuple) and len(n.value.elts) == 1), None)

    def holds_constant(self, name: str) -> bool:
        """Whether the file sets an attribute of this name to True or False wherever it sets it, or not at all."""
        stored = [n for n in ast.walk(self.whole_tree) if isinstance(n, ast.Assign) and _stores(n, name)]
        return bool(stored) and all(isinstance(n.value, ast.Constant) for n in stored)

    def never_reads_attribute(self, name: str) -> bool:
        """Whether nothing in the file reads `self.name`."""
        nodes = (n for n in ast.walk(self.whole_tree) if isinstance(n, ast.Attribute) and n.attr == name)
        return not any(isinstance(n.ctx, ast.Load) for n in nodes)

    def condition_around(self, line: int | None, word: str) -> int | None:
        """The line of the innermost `if` around a line, or of one that skips it, whose test has this word."""
        tests = [n for n in ast.walk(self.tree) if isinstance(n, ast.If | ast.IfExp)]
        near = [n for n in tests if line is not None and n.lineno <= line + 1 and (n.end_lineno or 0) >= line - 1]
        near = [n for n in near if word in ast.unparse(n.test)]
        return max((n.test.lineno for n in near), default=None)

    def line_of_state(self) -> int | None:
        """The first line outside the constructor that assigns an attribute of self, or appends to one."""
        tree = self.tree
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name != "__init__"]
        functions.sort(key=lambda n: n.name not in ("forward", "__call__"))
        found = (min(map(_line_of, filter(_writes_state, ast.walk(f))), default=None) for f in functions)
        line = next((line for line in found if line is not None), None)
        return self._line_of_shared_default() or self._condition_of_state(line) or line

    def _condition_of_state(self, line: int | None) -> int | None:
        """The line of the `if` that keeps what an attribute holds, around the line that assigns it."""
        held = re.match(r"(self\.\w+)\s*=", self.text(line))
        return None if held is None else self.condition_around(line, f"{held[1]} is None")

    def _line_of_shared_default(self) -> int | None:
        """The line of a dictionary or list that is the default of an argument which the constructor keeps."""
        own = next((n for n in ast.walk(self.tree) if getattr(n, "name", "") == self.name), None)
        inits = [n for n in getattr(own, "body", []) if getattr(n, "name", "") == "__init__"]
        for init in (n for n in inits if isinstance(n, ast.FunctionDef)):
            arguments = [*init.args.posonlyargs, *init.args.args]
            pairs = [*zip(reversed(arguments), reversed(init.args.defaults), strict=False)]
            pairs += [(a, d) for a, d in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True) if d is not None]
            shared = {a.arg: d.lineno for a, d in pairs if isinstance(d, ast.Dict | ast.List)}
            kept = [n.value for n in ast.walk(init) if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name)]
            return next((shared[value.id] for value in kept if value.id in shared), None)
        return None

    def uncalled_method(self, pattern: str) -> tuple[str, int] | None:
        """A method whose name matches and that nothing in the file mentions, with its line."""
        idle = [n for n in self._methods()[1] if re.search(pattern, n.name, re.IGNORECASE)]
        return (idle[0].name, idle[0].lineno) if idle else None

    def only_read_in(self, attribute: str) -> str | None:
        """The method that nothing in the file mentions, where it alone reads this attribute, and attends to nothing."""
        called, idle = self._methods()
        read, left = ([n for n in methods if f"self.{attribute}" in ast.unparse(n)] for methods in (called, idle))
        read = [n for n in read if n.name != "__init__"]
        alone = len(left) == 1 and not read and "softmax" not in ast.unparse(left[0])
        return left[0].name if alone else None

    def _methods(self) -> tuple[list[ast.FunctionDef], list[ast.FunctionDef]]:
        """The methods of the class that the file mentions, and those that it does not."""
        tree = self.whole_tree
        own = next((n for n in reversed(self.definitions()) if isinstance(n, ast.ClassDef)), None)
        methods = [n for n in own.body if isinstance(n, ast.FunctionDef)] if own is not None else []
        mentioned = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)} | {"forward"}
        called = [n for n in methods if n.name in mentioned or n.name.startswith("__")]
        return called, [n for n in methods if n not in called]

    def never_reads(self, name: str) -> bool:
        """Whether the class or function has an argument of this name that no line of it reads."""
        nodes = [n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        own = next((n for n in reversed(nodes) if n.name == self.name), None)
        functions = [n for n in ast.walk(own) if isinstance(n, ast.FunctionDef)] if own is not None else []
        takes = [f for f in functions if name in {a.arg for a in [*f.args.args, *f.args.kwonlyargs]}]
        return bool(takes) and not any(
            isinstance(n, ast.Name) and n.id == name for f in takes for line in f.body for n in ast.walk(line)
        )

    def takes_what_it_ignores(self) -> bool:
        """Whether the call takes any other keyword, as a part of a model does that many callers share."""
        nodes = [n for n in ast.walk(self.tree) if isinstance(n, ast.ClassDef) and n.name == self.name]
        calls = [f for n in nodes[-1:] for f in n.body if isinstance(f, ast.FunctionDef) and f.name in METHODS]
        return any(f.args.kwarg is not None for f in calls)

    def alias_after(self, line: int | None) -> int | None:
        """The first line after this one, in the same function, that only gives a value another name."""
        for function in (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)):
            if line is not None and function.lineno <= line <= (function.end_lineno or 0):
                plain = [n for n in function.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Name)]
                return next((n.lineno for n in plain if n.lineno >= line), None)
        return None

    def return_line(self, inside: int | None = None, several: bool = False) -> int | None:
        """The last `return` of the function around a line, or of forward; with `several`, one of several values."""
        tree = self.tree
        own = next((n for n in reversed(self.definitions()) if isinstance(n, ast.ClassDef)), tree)
        functions = [n for n in ast.walk(tree if inside else own) if isinstance(n, ast.FunctionDef)]
        around = [f for f in functions if inside is not None and f.lineno <= inside <= (f.end_lineno or 0)]
        around = around or [f for f in functions if f.name == self.name]
        around = around or [f for f in functions if f.name in ("forward", "__call__")]
        found = [n for f in around[-1:] for n in ast.walk(f) if isinstance(n, ast.Return)]
        if around and not found and not several:
            return around[-1].body[-1].lineno  # after which it should stand
        found = [n for n in found if not several or len(list(_returned_values(n))) > 1]
        return max((n.lineno for n in found), default=None)

    def returned_count(self, line: int) -> int:
        """How many values the `return` on this line gives."""
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Return) and n.lineno == line]
        return len(list(_returned_values(found[0]))) if found else 0

    def keyword_line(self, line: int | None, pattern: str) -> int | None:
        """The line of a keyword argument with such a name, in a call that starts on this line; otherwise the line."""
        calls = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and n.lineno == line]
        named = (k for call in calls for k in call.keywords if k.arg is not None and re.search(pattern, k.arg))
        return next((k.lineno for k in named), line)

    def return_in_loop(self) -> int | None:
        """The line of a `return` at the end of the body of a loop, so that only its first round is done."""
        own = next((n for n in ast.walk(self.tree) if getattr(n, "name", "") == self.name), None)
        loops = [n for n in ast.walk(own) if isinstance(n, ast.For)] if own is not None else []
        return next((loop.body[-1].lineno for loop in loops if isinstance(loop.body[-1], ast.Return)), None)

    def packing_line(self) -> int | None:
        """The line that puts several values together under a name that forward returns beside the output."""
        line = self.return_line(several=True)
        nodes = [*ast.walk(self.tree)]
        returned = {n.id for n in nodes if isinstance(n, ast.Name) and n.lineno == line}
        packed = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Tuple | ast.List)]
        found = [n.lineno for n in packed if {getattr(target, "id", "") for target in n.targets} & returned]
        return max(found, default=None)

    def idle_line(self) -> int | None:
        """The first line that does nothing, as `scores = scores` or `scores`: something is missing there."""
        nodes = [*ast.walk(self.tree)]
        stored = [n for n in nodes if isinstance(n, ast.Assign) and len(n.targets) == 1]
        idle = [n.lineno for n in stored if ast.unparse(n.targets[0]) == ast.unparse(n.value)]
        idle += [n.lineno for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Name | ast.Attribute)]
        return min(idle, default=None)

    def line_in_training(self, word: str) -> int | None:
        """The line of a condition on `self.training` around a line that uses this word."""
        tests = [n for n in ast.walk(self.tree) if isinstance(n, ast.If) and "training" in ast.unparse(n.test)]
        return next((n.lineno for n in tests if re.search(rf"\b{word}\b", "\n".join(map(ast.unparse, n.body)))), None)

    def line_of_size(self, line: int | None) -> int | None:
        """The line, in the same function, that reads a size under a name which this line uses."""
        for function in (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)):
            if line is not None and function.lineno <= line <= (function.end_lineno or 0):
                nodes = [*ast.walk(function)]
                used = {n.id for n in nodes if isinstance(n, ast.Name) and n.lineno == line}
                stored = [n for n in nodes if isinstance(n, ast.Assign) and n.lineno < line]
                sizes = [n for n in stored if re.search(r"\.(shape|size)\b", ast.unparse(n.value))]
                return next((n.lineno for n in sizes if ast.unparse(n.targets[0]) in used), None)
        return None

    def dead_branch(self) -> int | None:
        """The first `if` of the file whose test is a constant."""
        tests = [n for n in ast.walk(self.tree) if isinstance(n, ast.If | ast.IfExp)]
        return next((n.lineno for n in tests if isinstance(n.test, ast.Constant)), None)

    def alias_line(self, names: Iterable[str]) -> int | None:
        """The first line that only gives one of these names another name, as `q = query`."""
        stored = [n for n in ast.walk(self.tree) if isinstance(n, ast.Assign)]
        return next((n.lineno for n in stored if isinstance(n.value, ast.Name) and n.value.id in names), None)

    def replaces_missing(self, name: str) -> bool:
        """Whether an argument that is None gets a value of its own: `if mask is None: mask = …`."""
        tests = [n for n in ast.walk(self.tree) if isinstance(n, ast.If)]
        tests = [n for n in tests if ast.unparse(n.test) == f"{name} is None"]
        stored = [part for n in tests for part in n.body if isinstance(part, ast.Assign)]
        return any(ast.unparse(target) == name for part in stored for target in part.targets)

    def is_causal_without(self, name: str) -> bool:
        """Whether a call is causal just where this argument is None: `is_causal=mask is None`."""
        words = (n for n in ast.walk(self.tree) if isinstance(n, ast.keyword) and n.arg == "is_causal")
        return any(ast.unparse(n.value) == f"{name} is None" for n in words)

    def last_alias(self) -> int | None:
        """The last line that only gives a value another name, as `out = q`."""
        stored = [n for n in ast.walk(self.tree) if isinstance(n, ast.Assign)]
        plain = [n for n in stored if isinstance(n.value, ast.Name) and isinstance(n.targets[0], ast.Name)]
        return max((n.lineno for n in plain), default=None)

    def overwriting_line(self, names: Iterable[str]) -> int | None:
        """The condition under which, or the line on which, an argument of this name is replaced by another name."""
        stored = [n for n in ast.walk(self.tree) if isinstance(n, ast.Assign)]
        stored = [n for n in stored if isinstance(n.value, ast.Name) and ast.unparse(n.targets[0]) in set(names)]
        return next((self.enclosing_condition(n.lineno) or n.lineno for n in stored), None)

    def skipped_condition(self, name: str, ran: set[int]) -> int | None:
        """The last `if` whose body uses this name and was not executed, unless it asks whether there is none."""
        tests = [n for n in ast.walk(self.tree) if isinstance(n, ast.If)]
        inside = [n for n in tests if any(name in ast.unparse(statement) for statement in n.body)]
        idle = [n for n in inside if not ran & set(range(n.body[0].lineno, (n.body[-1].end_lineno or 0) + 1))]
        idle = [n for n in idle if not re.search(r"\bis None\b|\bnot \w+$", ast.unparse(n.test))]
        return max((n.lineno for n in idle), default=None)

    def discarded_line(self, word: str) -> int | None:
        """The line of a call, with this word in it, whose result is thrown away; not in a constructor."""
        functions = [n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)]
        inside = (n for f in functions if f.name != "__init__" for n in ast.walk(f) if isinstance(n, ast.Expr))
        calls = (n for n in inside if isinstance(n.value, ast.Call) and word in ast.unparse(n.value.func).lower())
        return next((n.lineno for n in calls), None)

    def size_line(self, name: str) -> int | None:
        """The line that computes the width of a layer: of the name in its arguments, or of the layer itself."""
        own = name.partition(".")[0]
        tree = self.tree
        stored = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
        made = next((n for n in stored if any(ast.unparse(t) == f"self.{own}" for t in n.targets)), None)
        layer = None if made is None else next((n for n in ast.walk(made.value) if isinstance(n, ast.Call)), None)
        if made is None or layer is None or len(layer.args) < 2:
            return self.line_of_attribute(name)
        parts = {ast.unparse(n) for n in ast.walk(layer.args[1]) if isinstance(n, ast.Name | ast.Attribute)}
        sizes = [n for n in stored if n.lineno < made.lineno and any(ast.unparse(t) in parts for t in n.targets)]
        return sizes[-1].lineno if sizes else made.lineno

    def shape_line(self, line: int | None) -> int | None:
        """The line that puts together a shape which another line only uses by its name, as in `x.view(shape)`."""
        for function in (n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)):
            calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and n.lineno == line]
            names = {a.id for n in calls for a in n.args if isinstance(a, ast.Name)} if calls else set()
            made = [n for n in ast.walk(function) if isinstance(n, ast.Assign) and n.lineno < (line or 0)]
            made = [n for n in made if any(isinstance(t, ast.Name) and t.id in names for t in n.targets)]
            shapes = [n for n in made if any(isinstance(part, ast.Tuple) for part in ast.walk(n.value))]
            if shapes:
                return shapes[-1].lineno
        return line

    def enclosing_condition(self, line: int | None, unless: str = "") -> int | None:
        """The line of the innermost `if` whose body holds this line, unless its test is only this one."""
        tests = [n for n in ast.walk(self.tree) if isinstance(n, ast.If)]
        around = [n for n in tests if line is not None and n.body[0].lineno <= line <= (n.body[-1].end_lineno or 0)]
        around = [n for n in around if ast.unparse(n.test) != unless]
        return max((n.lineno for n in around), default=None)

    def loop_line(self, line: int | None) -> int | None:
        """The line that says what a loop around this one runs over, where this line uses the loop's variable."""
        loops: list[tuple[ast.expr, ast.expr, ast.AST]] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.For):
                loops.append((node.target, node.iter, node))
            elif isinstance(node, ast.GeneratorExp | ast.ListComp):
                loops += [(part.target, part.iter, node) for part in node.generators]
        for target, over, loop in reversed(loops):
            names = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
            inside = [n for n in ast.walk(loop) if isinstance(n, ast.Name) and n.lineno == line]
            if any(n.id in names and isinstance(n.ctx, ast.Load) for n in inside):
                return over.lineno
        return line

    def passes_twice(self, line: int | None) -> bool:
        """Whether a call on this line passes the same name as two arguments."""
        calls = [n for n in ast.walk(self.tree) if isinstance(n, ast.Call) and n.lineno == line]
        given = [[ast.unparse(a) for a in [*n.args, *(k.value for k in n.keywords)]] for n in calls]
        return any(len(set(values)) < len(values) for values in given)

    def takes_apart(self, name: str) -> bool:
        """Whether the code reads the argument as a pair: `name[0]` and `name[1]`."""
        parts = (n for n in ast.walk(self.tree) if isinstance(n, ast.Subscript))
        read = {getattr(n.slice, "value", None) for n in parts if getattr(n.value, "id", None) == name}
        return {0, 1} <= read

    def exchanged_call(self) -> tuple[int, str, str] | None:
        """A call that passes query, key and value, by their names, in another order than the function takes them.

        The line, what the function calls one of its parameters, and the name that is passed for it.
        """
        nodes = [*ast.walk(self.tree)]
        defined = {n.name: [a.arg for a in n.args.args] for n in nodes if isinstance(n, ast.FunctionDef)}
        defined["scaled_dot_product_attention"] = ["query", "key", "value"]
        for call in (n for n in nodes if isinstance(n, ast.Call)):
            taken = defined.get(getattr(call.func, "attr", getattr(call.func, "id", "")), [])
            taken = [name for name in taken if name != "self"]
            given = dict(zip(taken, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
            pairs = [(name, node.id) for name, node in given.items() if isinstance(node, ast.Name)]
            pairs = [(name, own) for name, own in pairs if call_role(own) in STREAMS and call_role(name) in STREAMS]
            roles = [(call_role(name), call_role(own)) for name, own in pairs]
            if {a for a, _ in roles} == {b for _, b in roles} == STREAMS and len(roles) == len(STREAMS):
                odd = next(((name, own) for name, own in pairs if call_role(name) != call_role(own)), None)
                if odd is not None:
                    return call.lineno, *odd
        return None

    def line_of_attribute(self, name: str) -> int | None:
        """The line that assigns an attribute, given as the name of a parameter in it."""
        return self.line_with(rf"self\.{re.escape(name.partition('.')[0])}\b.*=")

    def text(self, line: int | None) -> str:
        """That line of the file."""
        if self.loaded is not None:
            return self.loaded.line(line)
        return "" if line is None or self.filename is None else linecache.getline(self.filename, line).strip()


def without(text: str, definitions: Iterable[ast.stmt]) -> str:
    """The text with empty lines in place of these definitions, so that all others keep their numbers."""
    lines = text.splitlines(keepends=True)
    for node in definitions:
        first = min((n.lineno for n in getattr(node, "decorator_list", [])), default=node.lineno)
        lines[first - 1 : node.end_lineno] = ["\n"] * ((node.end_lineno or first) - first + 1)
    return "".join(lines)


def _used_by(tree: ast.Module, name: str) -> list[ast.stmt]:
    """What defines this name at module level, and all that it needs from there, by the names that it reads."""
    found: list[ast.stmt] = [n for n in tree.body if isinstance(n, DEFINED) and n.name == name]
    pending = [*found]
    while pending:
        read = {n.id for n in ast.walk(pending.pop()) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        more = [n for n in tree.body if n not in found and _defines(n) & read]
        found += more
        pending += more
    return found


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement only gives a text a name, such as one for the documentation of several classes."""
    value = node.value if isinstance(node, ast.Assign) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _defines(node: ast.stmt) -> set[str]:
    """The names that a statement at module level binds."""
    if isinstance(node, DEFINED):
        return {node.name}
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def _writes_state(node: ast.AST) -> bool:
    """Whether a statement assigns an attribute of self or a part of one, appends to it, or copies into it."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("append", "extend", "update", "copy_") and _is_of_self(node.func.value)
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AugAssign) else targets
    flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]
    return any(_is_of_self(target) for target in flat)


def _is_of_self(node: ast.expr) -> bool:
    """Whether this is `self.name`, or a part of it such as `self.name[0]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"


def _returned_values(statement: ast.Return) -> Iterator[ast.expr]:
    """The values that a `return` gives, in the longest of its branches."""
    value = statement.value
    if isinstance(value, ast.IfExp):
        value = max((value.body, value.orelse), key=lambda branch: isinstance(branch, ast.Tuple))
    yield from value.elts if isinstance(value, ast.Tuple) else []


def _stores(statement: ast.Assign, name: str) -> bool:
    """Whether an assignment sets an attribute of this name."""
    return any(isinstance(n, ast.Attribute) and n.attr == name for t in statement.targets for n in ast.walk(t))
