"""The tensors that a statement works with, for errors that are none of the known ones."""

import ast
from collections.abc import Iterator

from torch import Tensor

from headwise.check.explain.scene import Scene

MOST = 3  # of them


def shapes(scene: Scene) -> str:
    """The tensors of the statement that failed and their shapes, such as "future is (5 tokens, 5 tokens)"."""
    found: dict[str, str] = {}
    for node in _read(scene):
        value = scene.value(node)
        if isinstance(value, Tensor) and value.dim():
            found.setdefault(ast.unparse(node), scene.sizes.named(value.shape))
    return ", ".join(f"{text} is {shape}" for text, shape in [*found.items()][:MOST])


def _read(scene: Scene) -> Iterator[ast.expr]:
    """Variables, attributes and elements that are read, whole: of `cache[0]`, not `cache` once more."""
    nodes = [n for n in scene.parts() if isinstance(n, ast.Name | ast.Attribute | ast.Subscript)]
    called = {id(n.func) for n in scene.parts() if isinstance(n, ast.Call)}
    inside = {id(part) for n in nodes if id(n) not in called for part in ast.walk(n) if part is not n}
    for node in nodes:
        if id(node) in called and isinstance(node, ast.Attribute):  # of x.view(…), x
            yield node.value
        elif id(node) not in inside and isinstance(node.ctx, ast.Load):
            yield node
