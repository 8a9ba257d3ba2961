"""Tensors whose axes do not fit: in a product, in a view."""

import ast
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from headwise.check.explain.scene import Scene
from headwise.check.mistakes import Finding

PRODUCT_CALLS = {"matmul", "bmm", "mm"}


def view_sizes(scene: Scene) -> Finding | None:
    """A view that asks for another number of values than there are."""
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


def product(scene: Scene) -> Finding | None:
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
