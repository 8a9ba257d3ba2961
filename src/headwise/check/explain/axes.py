"""Tensors whose axes do not fit: in a product, in a view."""

import ast
import math
import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from headwise.check.explain.scene import Scene
from headwise.check.mistakes import Finding
from headwise.check.sizes import value_for
from headwise.check.vocabulary import constructor_role

NUMBER_OF = {"heads": "number of heads", "tokens": "number of tokens", "samples": "number of samples"}
SIZED = ("width", "out_width", "heads", "head_width", "batch")  # roles of names that tell the size
PRODUCT_CALLS = {"matmul", "bmm", "mm"}


def linear_layer(scene: Scene) -> Finding | None:
    """A linear layer that was made for another width than it gets, and which of the two is wrong."""
    running = (f.f_locals for f, _ in scene.frames if isinstance(f.f_locals.get("self"), nn.Linear))
    held = next((names for names in running if isinstance(names.get("input"), Tensor)), None)
    if held is None or "shapes cannot be multiplied" not in scene.words:
        return None
    layer, x, s = held["self"], held["input"], scene.sizes
    name = next((n for n, m in scene.owner.named_modules() if m is layer), "") if scene.owner is not None else ""
    if not name.isidentifier():
        return None
    words = f"self.{name} takes {s.counted(layer.in_features)} and gets {s.named(x.shape)}"
    attended = scene.trace is not None and scene.trace.is_behind_softmax(x)
    if attended and x.dim() == 4 and layer.in_features == s.H * x.shape[-1]:
        return Finding("out-proj-per-head", f"{words}; the heads are not concatenated yet", scene.line)
    if s.H > 1 and x.dim() == 3 and x.shape[1] in (s.H * s.T, s.H * s.S) and x.shape[-1] != layer.in_features:
        return Finding("joined-axis", f"{words} for {s.T} tokens and {s.H} heads", scene.blamed or scene.line)
    made = scene.assigned(name)
    call = made.value if made is not None and isinstance(made.value, ast.Call) else None
    if not attended and layer.out_features == x.shape[-1] != layer.in_features and made is not None:
        swapped = f"{words}: the two sizes of nn.Linear are swapped, the width of its input comes first"
        return Finding("layer-width", swapped, made.lineno)
    given = [] if call is None else [*call.args[:1], *(k.value for k in call.keywords if k.arg == "in_features")]
    number = scene.written(given[0]) if given else None
    if number is not None and {"width", "heads"} & set(scene.taken):
        return _fixed_size(number, x.shape[-1], scene, ast.unparse(given[0]))
    if attended and x.shape[-1] == s.H * s.E and layer.in_features == s.E:
        return Finding("too-wide", f"{words}: {s.H} heads of {s.E}", _whole_width(scene) or scene.blamed)
    return Finding("layer-width", words, scene.blamed or scene.line) if attended else None


def _whole_width(scene: Scene) -> int | None:
    """The line that gives a list of heads the whole width: a plain `a = b` before it, or the list itself."""
    lists = [n for n in ast.walk(scene.tree) if isinstance(n, ast.Assign) and "ModuleList" in ast.unparse(n.value)]
    made = next((n for n in lists if isinstance(n.targets[0], ast.Attribute)), None)
    if made is None:
        return None
    names = {n.id for n in ast.walk(made.value) if isinstance(n, ast.Name)}
    assigned = [n for n in ast.walk(scene.tree) if isinstance(n, ast.Assign) and n.lineno < made.lineno]
    plain = [n for n in assigned if isinstance(n.value, ast.Name) and ast.unparse(n.targets[0]) in names]
    return plain[-1].lineno if plain else made.lineno


def _fixed_size(number: tuple[int, int], needed: int, scene: Scene, name: str) -> Finding:
    """A size that is written into the code as a number."""
    held, line = number
    axis = scene.sizes.axis(needed)
    what = str(held) if name == str(held) else f"{name} = {held}"
    meant = f"{needed}, the {NUMBER_OF.get(axis, axis)}" if axis else str(needed)
    return Finding("size-fixed", f"{what} is written into the code, where this call needs {meant}", line)


def _written_size(scene: Scene, sizes: Iterable[ast.expr], x: Tensor) -> Finding | None:
    """The number of the file among the sizes of a view that keeps it from holding so many values.

    A -1 is taken for the size that the axis had before.
    """
    given = [(size, scene.value(size), scene.written(size)) for size in sizes]
    old = [*x.shape, *[-1] * len(given)]
    given = [(size, old[i] if value == -1 else value, n) for i, (size, value, n) in enumerate(given)]
    count = x.numel()
    numbers = [(size, number) for size, value, number in given if number is not None and value not in (1, 2, 3)]
    known = math.prod(v for _, v, n in given if isinstance(v, int) and v > 0 and (n is None or v in (1, 2, 3)))
    if not numbers or not known or count % known or any(not isinstance(value, int) for _, value, _ in given):
        return None
    rest = count // known
    if len(numbers) > 1 and rest == scene.sizes.E:  # heads × head width
        wanted: tuple[int, ...] = (scene.sizes.H, scene.sizes.D)
    else:
        wanted = (rest,)
    pairs = [(s, n, w) for (s, n), w in zip(numbers, wanted, strict=False) if n[0] != w]
    wrong = next(iter(pairs), None)
    if wrong is None or rest == 1 or not {"width", "heads"} & set(scene.taken):
        return None
    return _fixed_size(wrong[1], wrong[2], scene, ast.unparse(wrong[0]))


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
                given = node.args[0].elts if node.args and isinstance(node.args[0], ast.Tuple) else node.args
                if (fixed := _written_size(scene, given, x)) is not None:
                    return fixed
                if outside := _from_outside(scene, given):
                    words = f"{outside}; {ast.unparse(node.func.value)} is {scene.sizes.named(x.shape)}"
                    return Finding("reads-globals", words, scene.line)
                asked, named = [int(size) for size in match[1].split(",")], scene.sizes.named
                said = f"{ast.unparse(node.func.value)} is {named(x.shape)}, and the view asks for {named(asked)}"
                return Finding("view-sizes", said, _narrow_layer(scene, x, asked) or scene.blamed or scene.line)
    return None


def _from_outside(scene: Scene, sizes: Iterable[ast.expr]) -> str:
    """The variables of the module among the sizes of a view, where one of them is none of the sizes of this call."""
    names = [n.id for size in sizes for n in ast.walk(size) if isinstance(n, ast.Name)]
    space, own = scene.frame.f_globals, scene.frame.f_locals
    found = (
        {n: space[n] for n in names if n not in own and type(space.get(n)) is int} if scene.owner is not None else {}
    )
    right = {n: value_for(role, scene.sizes) for n in found if (role := constructor_role(n)) in SIZED}
    if all(value == right.get(n) if n in right else scene.sizes.axis(value) for n, value in found.items()):
        return ""
    *others, last = [f"{n} = {value}" for n, value in found.items()]
    return f"{', '.join(others)} and {last} are set outside the class" if others else f"{last} is set outside the class"


def _narrow_layer(scene: Scene, x: Tensor, asked: list[int]) -> int | None:
    """The line that makes the layers whose results are as wide as one head, where all heads are asked for."""
    layers = scene.owner.named_children() if isinstance(scene.owner, nn.Module) else ()
    narrow = [name for name, layer in layers if getattr(layer, "out_features", None) == x.shape[-1] != scene.sizes.E]
    made = scene.assigned(narrow[0]) if narrow and asked[-2:] == [scene.sizes.H, x.shape[-1]] else None
    return None if made is None else made.lineno


def elementwise(scene: Scene) -> Finding | None:
    """`*` between two tensors that do not broadcast, where `@` would fit."""
    if not isinstance(scene.error, RuntimeError) or "must match the size of tensor" not in scene.words:
        return None
    for node in scene.parts():
        sides = _multiplied(node)
        x, y = (scene.value(side) for side in sides) if sides else (None, None)
        if sides and isinstance(x, Tensor) and isinstance(y, Tensor) and min(x.dim(), y.dim()) >= 3 and _fit(x, y):
            left, right = map(ast.unparse, sides)
            named = scene.sizes.named
            words = f"{left} is {named(x.shape)}, {right} is {named(y.shape)}; {left} @ {right} fits"
            return Finding("elementwise-product", words, scene.line)
    return None


def _multiplied(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """The two sides of a product number by number."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return node.left, node.right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("mul", "multiply"):
        return (node.args[0], node.args[1]) if len(node.args) == 2 else (node.func.value, node.args[0])
    return None


def product(scene: Scene) -> Finding | None:
    """Two factors whose axes do not meet, by name, and which should have met."""
    if not isinstance(scene.error, RuntimeError):
        return None
    for a, b in _factors(scene.parts()):
        x, y = scene.value(a), scene.value(b)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and min(x.dim(), y.dim()) >= 2 and not _fit(x, y):
            if (earlier := _scores_by_number(scene, x)) is not None:
                return earlier
            named, left, right = scene.sizes.named, ast.unparse(a), ast.unparse(b)
            met = f"{left} is {named(x.shape)}, {right} is {named(y.shape)}"
            late = _heads_behind_tokens(scene)
            if len(late) > 1 or (late and x.shape[1:] == (scene.sizes.T, scene.sizes.H, scene.sizes.H)):
                names = " and ".join([", ".join([*late][:-1]), [*late][-1]][len(late) == 1 :])
                advice = f"in {names} the heads must come before the tokens: transpose(1, 2) is missing"
                return Finding("product-axes", f"{met}; {advice}", next(iter(late.values())))
            said = f"{met}; {_advice(scene, a, b, x, y)}"
            return Finding("product-axes", said, _unsplit(scene, (a, x), (b, y)) or scene.blamed or scene.line)
    return None


def _heads_behind_tokens(scene: Scene) -> dict[str, int]:
    """The variables before the softmax in which the heads stand behind the tokens, and where each was assigned."""
    found: dict[int, tuple[str, int]] = {}
    for name, held in scene.frame.f_locals.items():
        made = scene.assigned(name) if isinstance(held, Tensor) else None
        if made is None or held.shape[1:] != (scene.sizes.T, scene.sizes.H, scene.sizes.D):
            continue
        if scene.trace is None or not scene.trace.is_behind_softmax(held):
            found[id(held)] = (name, made.lineno)
    return dict(sorted(found.values(), key=lambda place: place[1]))


def _unsplit(scene: Scene, *factors: tuple[ast.expr, Tensor]) -> int | None:
    """The line that assigns the factor without heads, where the other one has them."""
    if {tensor.dim() for _, tensor in factors} != {3, 4}:
        return None
    name = next(_base(node) for node, tensor in factors if tensor.dim() == 3)
    made = scene.made(name) if isinstance(name, ast.Name) else None
    return None if made is None else made.lineno


def unsplit(scene: Scene) -> Finding | None:
    """A factor without an axis of heads, turned as if it had one, beside one that has it."""
    if not isinstance(scene.error, IndexError) or "Dimension out of range" not in scene.words:
        return None
    for factors in _factors(scene.parts()):
        held = {node: x for node in map(_base, factors) if isinstance(x := scene.value(node), Tensor)}
        flat = next((node for node, x in held.items() if x.dim() == 3), None)
        if flat is not None and sorted(x.dim() for x in held.values()) == [3, 4]:
            met = ", ".join(f"{ast.unparse(node)} is {scene.sizes.named(x.shape)}" for node, x in held.items())
            late = _assigned_alike(scene, held[flat])
            names = " and ".join(late) or ast.unparse(flat)
            words = f"{met}; {names} {'are' if len(late) > 1 else 'is'} not split into heads"
            return Finding("product-axes", words, min(late.values(), default=scene.line))
    return None


def _assigned_alike(scene: Scene, like: Tensor) -> dict[str, int]:
    """The variables of the function with this shape, other than arguments, and where each was assigned."""
    held = {n: x for n, x in scene.frame.f_locals.items() if isinstance(x, Tensor) and x.shape == like.shape}
    made = {n: scene.assigned(n) for n in held if not scene.is_argument(ast.Name(n, ast.Load()))}
    return {n: statement.lineno for n, statement in made.items() if statement is not None}


def _scores_by_number(scene: Scene, weights: Tensor) -> Finding | None:
    """The line that multiplies queries and keys number by number, where no product of them made these weights."""
    node = None if scene.trace is None else scene.trace.elementwise_scores(weights)
    if node is None:
        return None
    words = f"queries and keys give {scene.sizes.named(node.value.shape)}, not a table of tokens × tokens"
    return Finding("elementwise-product", words, node.line)


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
    right_way = y.shape[1:] == (s.H, s.D, s.T)
    if base is not b and not right_way and isinstance(turned, Tensor) and turned.shape[1:] == (s.H, s.T, s.D):
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
    if x.shape[-1] == y.shape[-2]:
        pairs = zip(reversed(x.shape[:-2]), reversed(y.shape[:-2]), strict=False)
        one, other = next((n, m) for n, m in pairs if n != m and 1 not in (n, m))
        return f"the last two axes fit, but before them {s.counted(one)} meet {s.counted(other)}"
    if x.shape[-1] == y.shape[-1] and x.dim() == y.dim():
        return f"the head widths of both must meet: {right} needs transpose(-2, -1)"
    return f"{s.counted(x.shape[-1])} and {s.counted(y.shape[-2])} meet, which must be equal"


def _base(node: ast.expr) -> ast.expr:
    """The tensor that an expression turns."""
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT", "H"):
        return node.value
    turns = ("transpose", "permute", "t", "swapaxes")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in turns:
        return node.func.value
    return node
