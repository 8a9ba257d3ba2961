"""Values of the wrong kind: a layer that was not called, a float for a size, a name that nobody has."""

import ast
import inspect
import re

import torch
from torch import Tensor, nn

from headwise.check.configuration import is_made_by_us
from headwise.check.explain.scene import Scene, names_of, nearest
from headwise.check.mistakes import Finding

NUMBER_FOR_TENSOR = re.compile(r"(\w+)\(\): argument '\w+' \(position 1\) must be Tensor, not (int|float)\b")
NOT_BOOLEAN = re.compile(r"only supports boolean masks|expected condition to be a boolean")
TURNS = ("transpose", "permute", "swapaxes", "movedim", "view", "reshape", "unflatten", "flatten", "t")
NO_ATTRIBUTE = re.compile(r"(?:object|module '[\w.]+') has no attribute '(\w+)'")


def trailing_comma(scene: Scene) -> Finding | None:
    """A tuple of one, where a comma stands behind an assignment."""
    for node in scene.parts():
        if isinstance(node, ast.Name | ast.Attribute) and type(scene.value(node)) is tuple:
            single = [n for n in scene.origins(node) if isinstance(n.value, ast.Tuple) and len(n.value.elts) == 1]
            if single:
                made = single[-1]
                assert isinstance(made.value, ast.Tuple)  # noqa: S101 - for the type checker
                words = f"{ast.unparse(made.targets[0])} is a tuple of one: {ast.unparse(made.value.elts[0])}"
                return Finding("trailing-comma", words, made.value.end_lineno)
    return None


def dropped_result(scene: Scene) -> Finding | None:
    """A call whose result is not assigned, where the failing statement works with that result."""
    statement = scene.statement()
    if not isinstance(statement, ast.Assign | ast.Return) or statement.value is None:
        return None
    read = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
    for node in reversed(scene.expressions()):
        call = node.value
        owner = call.func.value if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in read and not call.func.attr.endswith("_"):  # type: ignore[attr-defined]
            result = scene.value(call)
            if isinstance(result, Tensor) and scene.value(statement.value, {owner.id: result}) is not None:
                words = f"{ast.unparse(call)} leaves {owner.id} as it is"
                return Finding("result-dropped", words, node.lineno)
    return None


def lost_turns(scene: Scene) -> Finding | None:
    """Axes that do not fit, after calls that should have turned them and whose results are thrown away."""
    if not isinstance(scene.error, RuntimeError | IndexError):
        return None
    lost = [n for n in scene.expressions() if is_turn(n.value) and isinstance(scene.value(n.value), Tensor)]
    return thrown_away(lost) if lost else None


def is_turn(node: ast.AST) -> bool:
    """Whether it is a call such as `x.transpose(1, 2)`, which leaves x as it is."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TURNS


def thrown_away(lost: list[ast.Expr]) -> Finding:
    """Calls whose results nothing uses."""
    calls = " and ".join(ast.unparse(n.value) for n in lost)
    words = f"{calls} {'leave' if len(lost) > 1 else 'leaves'} the tensor as it is"
    return Finding("result-dropped", words, lost[0].lineno)


def not_callable(scene: Scene) -> Finding | None:
    """A number or a tensor that is called like a layer, and where it was set."""
    listed = isinstance(scene.error, NotImplementedError) and "ModuleList" in scene.words
    if not listed and not (isinstance(scene.error, TypeError) and "object is not callable" in scene.words):
        return None
    for node in scene.parts():
        value = scene.value(node.func) if isinstance(node, ast.Call) else None
        if isinstance(node, ast.Call) and listed and isinstance(value, nn.ModuleList):
            words = f"{ast.unparse(node.func)} is a list of {len(value)} layers, which are called one by one"
            return Finding("not-callable", words, scene.line)
        if isinstance(node, ast.Call) and isinstance(value, int | float | str | tuple | Tensor):
            made = scene.made(node.func) if isinstance(value, int | float) else None
            words = f"{ast.unparse(node.func)} is {_kind(value, scene)}"
            return Finding("not-callable", words, made.lineno if made else scene.line)
    return None


def _kind(value: object, scene: Scene) -> str:
    if isinstance(value, Tensor | torch.Size):
        shape = value.shape if isinstance(value, Tensor) else value
        return f"{'a tensor' if isinstance(value, Tensor) else 'the shape'} {scene.sizes.named(shape)}"
    return f"the number {value}" if isinstance(value, int | float) else f"the {type(value).__name__} {value!r}"


def returns_nothing(scene: Scene) -> Finding | None:
    """A value that is None because a method of the file returns nothing."""
    if "NoneType" not in scene.words:
        return None
    for node in scene.parts():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and scene.value(node) is None:
            made = scene.made(node)
            called = made.value.func if made is not None and isinstance(made.value, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            functions = [n for n in ast.walk(scene.tree) if isinstance(n, ast.FunctionDef) and n.name == name]
            idle = [f for f in functions if not any(isinstance(n, ast.Return) for n in ast.walk(f))]
            if idle:
                return Finding("helper-no-return", f"{name} ends without return", idle[-1].body[-1].lineno)
    return None


def missing_attribute(scene: Scene) -> Finding | None:
    """An attribute that an object or module does not have, and the one that was probably meant."""
    match = NO_ATTRIBUTE.search(scene.words) if isinstance(scene.error, AttributeError) else None
    if match is None:
        return None
    for node in scene.parts():
        if isinstance(node, ast.Attribute) and node.attr == match[1] and isinstance(node.ctx, ast.Load):
            thing = scene.value(node.value)
            if hasattr(thing, node.attr):
                continue  # another object in this statement lacks it
            if is_made_by_us(thing):
                return None  # the key is missing in what we know
            if thing is None or (callable(thing) and not isinstance(thing, nn.Module)):
                return None
            if isinstance(thing, int | float | str | tuple | list | dict) and scene.is_argument(node.value):
                return None  # an object was expected there, and we passed a plain value
            near = nearest(match[1], names_of(thing))
            said = f"{ast.unparse(node)}; did you mean {near}?" if near else ast.unparse(node)
            own = thing is scene.owner
            return Finding("missing-attribute" if own else "unknown-name", said, scene.line)
    return None


def uncalled(scene: Scene) -> Finding | None:
    """A layer or method in a place where only its result can stand."""
    if not isinstance(scene.error, TypeError | AttributeError):
        return None
    called = {id(n.func) for n in scene.parts() if isinstance(n, ast.Call)}
    for node in scene.parts():
        value = scene.value(node) if isinstance(node, ast.Name) and id(node) not in called else None
        if inspect.ismethod(value) or isinstance(value, nn.Module):
            made = scene.assigned(node.id)  # type: ignore[attr-defined]
            layer = (
                made is not None and isinstance(made.value, ast.Call) and inspect.isclass(scene.value(made.value.func))
            )
            bare = made is not None and (layer or not isinstance(made.value, ast.Call))
            if value is not scene.owner and made is not None and bare:
                return Finding("not-called", f"{ast.unparse(made)} takes the thing itself, not its result", made.lineno)
    return None


def float_size(scene: Scene) -> Finding | None:
    """A float among the sizes of a view or of a layer, and the division that made it."""
    if not isinstance(scene.error, TypeError) or "float" not in scene.words:
        return None
    given = [a for n in scene.parts() if isinstance(n, ast.Call) for a in (*n.args, *(k.value for k in n.keywords))]
    for node in (part for a in given for part in (a.elts if isinstance(a, ast.Tuple) else [a])):
        value = scene.value(node)
        if isinstance(value, float):
            named = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            made = scene.made(node) or (scene.assigned(named) if named else None)
            divided = made is not None and any(isinstance(n, ast.Div) for n in ast.walk(made.value))
            return Finding(
                "float-size", f"{ast.unparse(node)} is {value}", made.lineno if made and divided else scene.line
            )
    return None


def number_for_tensor(scene: Scene) -> Finding | None:
    """A function of torch that is given a plain number."""
    match = NUMBER_FOR_TENSOR.match(scene.words) if isinstance(scene.error, TypeError) else None
    calls = (n for n in scene.parts() if match and isinstance(n, ast.Call) and ast.unparse(n.func).endswith(match[1]))
    call = next(calls, None)
    if match is None or call is None:
        return None
    return Finding(
        "root-of-number", f"{ast.unparse(call)} is given the {match[2]} {scene.value(call.args[0])}", scene.line
    )


def bare_super(scene: Scene) -> Finding | None:
    """`super` without its parentheses."""
    if "of 'super' object needs an argument" not in scene.words:
        return None
    return Finding("missing-super", "the parentheses after super are missing", scene.line)


def condition(error: BaseException) -> str:
    """What is wrong with a tensor as a condition; empty for another error."""
    return "it has more than one number" if "Boolean value of Tensor" in str(error) else ""


def mask_of_numbers(scene: Scene) -> Finding | None:
    """Numbers where a function takes a mask of booleans only, unless they came as an argument."""
    if not isinstance(scene.error, RuntimeError) or NOT_BOOLEAN.search(scene.words) is None:
        return None
    calls = [n for n in scene.parts() if isinstance(n, ast.Call)]
    for node in (a for call in calls for a in (*call.args, *(k.value for k in call.keywords))):
        value = scene.value(node)
        if isinstance(value, Tensor) and value.dim() > 1 and value.dtype != torch.bool and not scene.is_argument(node):
            return Finding("mask-of-numbers", f"{ast.unparse(node)} holds numbers", scene.line)
    return None


def tensor_as_condition(scene: Scene) -> Finding | None:
    """A tensor that stands where a condition belongs."""
    words = condition(scene.error)
    return Finding("tensor-as-condition", words, scene.line) if words else None
