"""The cause of an error in a learner's code, from its traceback, the values that met there, and the text of the file.

`explained` has one reader for every kind of error; to add one, write a function `(Scene) → Finding | None` and put it
into `READERS`. Every axis of a test call has a size of its own, so a shape can be written with the names of its axes.
"""

import ast
import difflib
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.mistakes import Finding
from headwise.check.sizes import CallSizes

NUMBER_FOR_TENSOR = re.compile(r"(\w+)\(\): argument '\w+' \(position 1\) must be Tensor, not (int|float)\b")
NO_ATTRIBUTE = re.compile(r"(?:object|module '[\w.]+') has no attribute '(\w+)'")
PRODUCT_CALLS = {"matmul", "bmm", "mm"}
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


def explained(
    error: BaseException, filename: str | None, sizes: CallSizes, blamed: int | None = None
) -> Finding | None:
    """The cause of an error by name, with its line; None where it is none of those that are known."""
    steps = [(f, n) for f, n in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename == filename]
    if filename is None or not steps:
        return None
    try:
        scene = Scene(error, *steps[-1], blamed, sizes, ast.parse("".join(linecache.getlines(filename))))
    except (SyntaxError, ValueError):
        return None
    with torch.no_grad():
        return next((found for reader in READERS if (found := reader(scene)) is not None), None)


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


def _missing_attribute(scene: Scene) -> Finding | None:
    match = NO_ATTRIBUTE.search(scene.words) if isinstance(scene.error, AttributeError) else None
    if match is None:
        return None
    for node in scene.parts():
        if isinstance(node, ast.Attribute) and node.attr == match[1] and isinstance(node.ctx, ast.Load):
            thing = scene.value(node.value)
            if thing is None or (isinstance(thing, Callable) and not isinstance(thing, nn.Module)):  # type: ignore[arg-type]
                return None
            near = nearest(match[1], names_of(thing))
            said = f"{ast.unparse(node)}; did you mean {near}?" if near else ast.unparse(node)
            own = thing is scene.owner
            return Finding("missing-attribute" if own else "unknown-name", said, scene.line)
    return None


def _uncalled(scene: Scene) -> Finding | None:
    """A layer or method in a place where only its result can stand."""
    if not isinstance(scene.error, TypeError | AttributeError):
        return None
    called = {id(n.func) for n in scene.parts() if isinstance(n, ast.Call)}
    for node in scene.parts():
        value = scene.value(node) if isinstance(node, ast.Name) and id(node) not in called else None
        if inspect.ismethod(value) or isinstance(value, nn.Module):
            made = scene.assigned(node.id)  # type: ignore[attr-defined]
            bare = made is not None and not isinstance(made.value, ast.Call)
            if value is not scene.owner and made is not None and bare:
                return Finding("not-called", f"{ast.unparse(made)} takes the thing itself, not its result", made.lineno)
    return None


def _float_size(scene: Scene) -> Finding | None:
    """A float among the sizes of a view or of a layer, and the division that made it."""
    if not isinstance(scene.error, TypeError) or "float" not in scene.words:
        return None
    given = [a for n in scene.parts() if isinstance(n, ast.Call) for a in (*n.args, *(k.value for k in n.keywords))]
    for node in (part for a in given for part in (a.elts if isinstance(a, ast.Tuple) else [a])):
        value = scene.value(node)
        if isinstance(value, float):
            named = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            made = scene.assigned(named) if named else None
            divided = made is not None and any(isinstance(n, ast.Div) for n in ast.walk(made.value))
            return Finding(
                "float-size", f"{ast.unparse(node)} is {value}", made.lineno if made and divided else scene.line
            )
    return None


def _number_for_tensor(scene: Scene) -> Finding | None:
    match = NUMBER_FOR_TENSOR.match(scene.words) if isinstance(scene.error, TypeError) else None
    calls = (n for n in scene.parts() if match and isinstance(n, ast.Call) and ast.unparse(n.func).endswith(match[1]))
    call = next(calls, None)
    if match is None or call is None:
        return None
    return Finding(
        "root-of-number", f"{ast.unparse(call)} is given the {match[2]} {scene.value(call.args[0])}", scene.line
    )


def _bare_super(scene: Scene) -> Finding | None:
    if "of 'super' object needs an argument" not in scene.words:
        return None
    return Finding("missing-super", "the parentheses after super are missing", scene.line)


def condition(error: BaseException) -> str:
    """What is wrong with a tensor as a condition; empty for another error."""
    return "it has more than one number" if "Boolean value of Tensor" in str(error) else ""


def _tensor_as_condition(scene: Scene) -> Finding | None:
    words = condition(scene.error)
    return Finding("tensor-as-condition", words, scene.line) if words else None


def _view_sizes(scene: Scene) -> Finding | None:
    match = re.match(r"shape '\[([-\d, ]+)\]' is invalid for input of size", scene.words)
    for node in scene.parts() if match is not None else ():
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("view", "reshape")
        ):
            x = scene.value(node.func.value)
            if isinstance(x, Tensor) and match is not None:
                asked, named = [int(size) for size in match[1].split(",")], scene.sizes.named
                said = f"{ast.unparse(node.func.value)} is {named(x.shape)}, and the view asks for {named(asked)}"
                return Finding("view-sizes", said, _narrow_layer(scene, x, asked) or scene.blamed or scene.line)
    return None


def _narrow_layer(scene: Scene, x: Tensor, asked: list[int]) -> int | None:
    """The line that makes the layers whose results are as wide as one head, where all heads are asked for."""
    layers = scene.owner.named_children() if isinstance(scene.owner, nn.Module) else ()
    narrow = [name for name, layer in layers if getattr(layer, "out_features", None) == x.shape[-1] != scene.sizes.E]
    made = scene.assigned(narrow[0]) if narrow and asked[-2:] == [scene.sizes.H, x.shape[-1]] else None
    return None if made is None else made.lineno


def _product(scene: Scene) -> Finding | None:
    """Two factors whose axes do not meet, by name, and which should have met."""
    if not isinstance(scene.error, RuntimeError):
        return None
    for a, b in _factors(scene.parts()):
        x, y = scene.value(a), scene.value(b)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and min(x.dim(), y.dim()) >= 2 and not _fit(x, y):
            named, left, right = scene.sizes.named, ast.unparse(a), ast.unparse(b)
            said = f"{left} is {named(x.shape)}, {right} is {named(y.shape)}; "
            return Finding("product-axes", said + _advice(scene, a, b, x, y), scene.blamed or scene.line)
    return None


def _factors(parts: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    for node in parts:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node.left, node.right
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PRODUCT_CALLS:
            if len(node.args) == 2:
                yield node.args[0], node.args[1]
            elif len(node.args) == 1:
                yield node.func.value, node.args[0]


def _fit(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors can be multiplied."""
    try:
        torch.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except RuntimeError:
        return False
    return x.shape[-1] == y.shape[-2]


def _advice(scene: Scene, a: ast.expr, b: ast.expr, x: Tensor, y: Tensor) -> str:
    """Which of two factors has to change, by the order of its axes."""
    left, right, s = ast.unparse(a), ast.unparse(b), scene.sizes
    heads_last = (s.T, s.H, s.D)
    base = _base(b)
    turned = scene.value(base)
    if base is not b and isinstance(turned, Tensor) and turned.shape[1:] == (s.H, s.T, s.D):
        return f"only the last two axes of {ast.unparse(base)} should change places: transpose(-2, -1)"
    if isinstance(turned, Tensor) and turned.shape[1:] == heads_last:
        right, y = ast.unparse(base), turned
    for text, tensor in ((left, x), (right, y)):
        if tensor.shape[1:] == heads_last:
            return f"in {text} the heads must come before the tokens: transpose(1, 2) is missing"
        if tensor.dim() == 3 and max(x.dim(), y.dim()) == 4:
            return f"{text} is not split into heads"
    if y.shape[-2:] == (s.T, s.T) and x.shape[-1] == s.D:
        return f"the weights come first: {right} @ {left}"
    if x.shape == y.shape:
        return f"the head widths of both must meet: {right} needs transpose(-2, -1)"
    return f"{s.named(x.shape[-1:])[1:-1]} meets {s.named(y.shape[-2:-1])[1:-1]}"


def _base(node: ast.expr) -> ast.expr:
    """The tensor that an expression turns."""
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "H"):
        return node.value
    turns = ("transpose", "permute", "t", "swapaxes")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in turns:
        return node.func.value
    return node


READERS: tuple[Callable[[Scene], Finding | None], ...] = (
    _bare_super, _tensor_as_condition, _number_for_tensor, _uncalled, _float_size, _view_sizes, _product,
    _missing_attribute,
)  # fmt: skip
