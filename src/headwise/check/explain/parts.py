"""What does not match in number: parts and names, arguments and parameters, letters and axes, a list for a tensor."""

import ast
import inspect
import re

import torch
from torch import Tensor, nn

from headwise.check.explain.scene import Scene
from headwise.check.mistakes import Finding
from headwise.check.trace import PRODUCTS

CUTS = ("split", "chunk", "unbind", "tensor_split")
OPERAND = re.compile(r"the number of subscripts in the equation \((\d+)\) does not match .*operand (\d+)")
ARGUMENTS = re.compile(r"(?:\w+\.)*(\w+)\(\) (?:missing|takes) ")
LACKS = re.compile(r"missing \d+ required positional arguments?: ['\"]?(\w+)")
OURS = ("forward", "__init__", "__call__")


def cut_parts(scene: Scene) -> Finding | None:
    """A tensor that is cut into more or fewer parts than there are names for them."""
    statement = scene.statement()
    if not isinstance(scene.error, ValueError) or "values to unpack" not in scene.words:
        return None
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return None
    names, call = len(statement.targets[0].elts), statement.value
    shape = scene.value(call)
    if isinstance(shape, torch.Size):
        words = f"{ast.unparse(call)} is {scene.sizes.named(shape)}, and there are {names} names"
        return Finding("parts-count", words, scene.line)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in CUTS:
        return None
    parts = scene.value(call)
    on_torch = scene.value(call.func.value) is torch
    whole = call.args[0] if on_torch and call.args else call.func.value
    x = scene.value(whole)
    if not isinstance(parts, tuple | list) or not isinstance(x, Tensor):
        return None
    words = f"{ast.unparse(call)} gives {len(parts)} of {scene.sizes.named(x.shape)}, and there are {names} names"
    return Finding("parts-count", words, _line_of_layer(scene, whole, parts, names) or scene.line)


def _line_of_layer(scene: Scene, whole: ast.expr, parts: tuple[Tensor, ...] | list[Tensor], names: int) -> int | None:
    """The line that makes the layer whose result is too narrow or too wide for parts of this size."""
    called = whole if isinstance(whole, ast.Call) else getattr(scene.made(whole), "value", None)
    layer = scene.value(called.func) if isinstance(called, ast.Call) else None
    sizes = {part.shape[-1] for part in parts}
    if not isinstance(layer, nn.Linear) or len(sizes) > 1 or layer.out_features == names * scene.sizes.E:
        return None
    made = scene.made(called.func) if isinstance(called, ast.Call) else None
    return made.lineno if made is not None and sizes == {scene.sizes.E} else None


def own_arguments(scene: Scene) -> Finding | None:
    """A method or function of the file that is called with other arguments than it takes."""
    match = ARGUMENTS.match(scene.words) if isinstance(scene.error, TypeError) else None
    for node in scene.parts() if match is not None and match[1] not in OURS else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == (match or "")[1]:
            function = scene.value(node.func)
            given = ", ".join(ast.unparse(a) for a in (*node.args, *(k.value for k in node.keywords)))
            lacks = LACKS.search(scene.words)
            if lacks is not None and callable(function) and getattr(function, "__code__", None) is None:  # of torch
                return Finding("wrong-arguments", f"{ast.unparse(node)} gives no {lacks[1]}", scene.line)
            if callable(function) and getattr(function, "__code__", None) is not None:
                takes = str(inspect.signature(function))
                return Finding("wrong-arguments", f"it takes {takes} and is given ({given})", scene.line)
    return None


def swapped_arguments(scene: Scene) -> Finding | None:
    """Arguments in each other's places, told by names that the parameters have as well."""
    for node in (n for n in scene.parts() if isinstance(n, ast.Call)):
        function = scene.value(node.func)
        try:
            taken = inspect.signature(function).bind(*map(ast.unparse, node.args)).arguments
        except (TypeError, ValueError):  # nothing that can be called, or with a signature of its own
            continue
        crossed = {name: given for name, given in taken.items() if given in taken and given != name}
        if len(crossed) > 1:
            words = " and ".join(f"{name} is given {given}" for name, given in crossed.items())
            return Finding("wrong-arguments", words, node.lineno)
    return None


def list_for_tensor(scene: Scene) -> Finding | None:
    """A list of tensors where one tensor belongs."""
    if not isinstance(scene.error, TypeError | AttributeError) or "list" not in scene.words:
        return None
    for node in scene.parts():
        value = scene.value(node) if isinstance(node, ast.Name) else None
        if isinstance(value, list) and value and all(isinstance(part, Tensor) for part in value):
            made = scene.made(node)
            words = f"{ast.unparse(node)} is a list of {len(value)} tensors {scene.sizes.named(value[0].shape)}"
            return Finding("list-for-tensor", words, made.lineno if made is not None else scene.line)
    return None


def einsum_letters(scene: Scene) -> Finding | None:
    """An equation of `einsum` with more or fewer letters than a tensor has axes, and the product that made it so."""
    match = OPERAND.search(scene.words) if isinstance(scene.error, RuntimeError) else None
    for node in scene.parts() if match is not None else ():
        if match is not None and isinstance(node, ast.Call) and ast.unparse(node.func).endswith("einsum"):
            name = node.args[1 + int(match[2])]
            x = scene.value(name)
            if isinstance(x, Tensor):
                words = f"{ast.unparse(name)} is {scene.sizes.named(x.shape)}, and the equation has {match[1]} letters"
                return Finding("einsum-letters", words, _line_of_axes(scene, x) or scene.line)
    return None


def _line_of_axes(scene: Scene, x: Tensor) -> int | None:
    """Of the weights, the line of the product that gave them their axes."""
    if scene.trace is None or not scene.trace.is_behind_softmax(x):
        return None
    behind = scene.trace.ancestors([scene.trace.source(x)])
    return next((node.line for node in behind if node.op in PRODUCTS), None)
