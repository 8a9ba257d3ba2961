"""Makes something that can be judged out of code that is no class: a `forward` alone, bare statements, a function.

What a fragment uses and does not define is inferred by name, and `assumed` lists it for the report.
"""

import ast
import builtins
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.arguments import WEIGHTS_IN, CallSizes, call_role, constructor_role, plain, value_for
from headwise.check.calls import INPUTS
from headwise.check.code.candidates import NAME
from headwise.check.code.loader import USUAL, Loaded
from headwise.check.fits import side_by_side

CLASS = "Fragment"
CORE_SIZES = {"heads": 1, "head_width": -1}  # of queries (B, H, T, D)
LAYER = re.compile(r"^\w*\.?(Linear|LazyLinear|Dropout|LayerNorm|Parameter|Softmax|ModuleList|Conv1d)$")
DATA = re.compile(r"(torch\.)?(rand|randn|ones|zeros|arange|randint|tensor)$")
SHAPING = re.compile(r"view|reshape|expand|repeat|unflatten|zeros|ones|full|empty|arange|range|tril|triu|eye")
LENGTH = re.compile(r"seq|t|s|n|l|time|tokens")  # besides the words for a length that a call may take
SPLITS = re.compile(r"split|to_?heads|transpose_for_scores|separate|reshape_heads", re.IGNORECASE)
MERGES = re.compile(r"merge|combine|concat|join|from_?heads", re.IGNORECASE)
PROJECTED = re.compile(
    r"\b(self\.)?\w*(q|query|queries|qkv|c_attn|to_q|wq)\w*\(|\bq(uery)?\b.*@|matmul\(q", re.IGNORECASE
)


def split_heads(owner: Any, x: Tensor, *_: Any) -> Tensor:
    """(B, T, E) as (B, H, T, D), with the number of heads that the owner says it has."""
    held = (v for k, v in vars(owner).items() if type(v) is int and constructor_role(k) == "heads")
    return x.reshape(*x.shape[:-1], next(held, 1), -1).transpose(1, 2)


def merge_heads(owner: Any, x: Tensor, *_: Any) -> Tensor:
    """(B, H, T, D) as (B, T, E)."""
    return side_by_side(x)


def helper_for(name: str) -> Callable[..., Tensor] | None:
    """What a helper of this name certainly does; None where the name does not say."""
    return split_heads if SPLITS.search(name) else merge_heads if MERGES.search(name) else None


def fragments(loaded: Loaded) -> list[tuple[str, Any]]:
    """A class made of the methods or statements that stand outside any class; nothing where there is a class.

    Statements that begin with queries, keys and values, and that project nothing, become a function.
    """
    tree = ast.parse(loaded.source)
    if any(isinstance(node, ast.ClassDef) for node in tree.body):
        return []
    methods = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_method(node)]
    made = _made(methods, loaded) if methods else None
    if not methods and not any(isinstance(node, ast.FunctionDef) for node in tree.body):
        made = _of_statements(tree, loaded)
    return [] if made is None else [(CLASS, made)]


def _is_method(node: ast.FunctionDef) -> bool:
    return bool(node.args.args) and node.args.args[0].arg == "self"


def _made(methods: list[ast.FunctionDef], loaded: Loaded) -> Any:
    """The class, with a constructor that makes what the methods use; None where no method takes an input."""
    entry = _entry(methods)
    if entry is None:
        return None
    own = any(method.name == "__init__" for method in methods)
    base = ast.Attribute(ast.Name("nn", ast.Load()), "Module", ast.Load())
    definition = ast.ClassDef(CLASS, [base], [], list(methods), [], **_type_parameters())
    space = loaded.namespace
    space.setdefault("nn", nn)
    with contextlib.suppress(Exception):
        code = compile(ast.fix_missing_locations(ast.Module([definition], [])), loaded.path, "exec", loaded.flags)
        exec(code, space)  # noqa: S102 - the learner's own functions, as in the loader
    made = space.get(CLASS)
    if not isinstance(made, type):
        return None
    uses = Uses.of(methods)
    if not own:
        made.__init__ = _constructor(uses)  # type: ignore[misc]
    if entry.name != "forward":
        made.forward = getattr(made, entry.name)  # type: ignore[attr-defined]
    made.assumed = [*([] if own else uses.words()), *_imports(loaded)]  # type: ignore[attr-defined]
    return made


def _type_parameters() -> dict[str, Any]:
    """Python 3.12 wants the list that earlier versions refuse."""
    return {"type_params": []} if "type_params" in ast.ClassDef._fields else {}


def _imports(loaded: Loaded) -> list[str]:
    """Imports that a fragment leaves to the rest of its file."""
    missing, loaded.missing_imports = sorted(loaded.missing_imports), {}
    return [f"the file has {', '.join(USUAL[name] for name in missing)}"] if missing else []


def _entry(methods: list[ast.FunctionDef]) -> ast.FunctionDef | None:
    named = {method.name: method for method in methods}
    takes = [m for m in methods if m.name != "__init__" and any(call_role(a.arg) in INPUTS for a in m.args.args[1:])]
    likely = [m for m in takes if NAME.search(m.name)]
    return named.get("forward") or named.get("__call__") or next(iter(likely or takes), None)


# What is used and not defined.


@dataclass
class Uses:
    """Attributes of `self` that fragments read: those that they call, and the others with the code around them."""

    called: list[str] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)  # name → how many axes of it are indexed
    widths: set[str] = field(default_factory=set)  # those that follow the number of heads in a shape
    hiding: set[str] = field(default_factory=set)  # masks whose ones are filled, so that ones hide

    @classmethod
    def of(cls, methods: list[ast.FunctionDef]) -> "Uses":
        found, defined = cls(), {method.name for method in methods} | set(dir(nn.Module()))
        nodes = [node for method in methods for node in ast.walk(method)]
        stored = {n.attr for n in nodes if _of_self(n) and isinstance(n.ctx, ast.Store)}  # type: ignore[attr-defined]
        called = [n.func.attr for n in nodes if isinstance(n, ast.Call) and _of_self(n.func)]  # type: ignore[attr-defined]
        found.called = [name for name in dict.fromkeys(called) if name not in defined | stored]
        subscripts = [(_converted(n.value), n) for n in nodes if isinstance(n, ast.Subscript)]
        indexed = {value.attr: _axes(n) for value, n in subscripts if _of_self(value)}  # type: ignore[attr-defined]
        for node in nodes:
            if _of_self(node) and node.attr not in {*found.called, *defined, *stored}:  # type: ignore[attr-defined]
                found.read[node.attr] = indexed.get(node.attr, 0)  # type: ignore[attr-defined]
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        found.widths = {name for call in calls for name in _after_heads(call)}
        plain_names = _unchanged(nodes)
        filled = [
            c.args[0] for c in calls if isinstance(c.func, ast.Attribute) and "masked_fill" in c.func.attr and c.args
        ]
        found.hiding = {name for mask in filled for name in plain_names(mask)}
        return found

    def fill(self, thing: nn.Module, sizes: CallSizes) -> None:
        """Give an object everything that is used, by the meaning of its name."""
        for name in self.called:
            setattr(thing, name, _callable(name, thing, sizes))
        for name, axes in self.read.items():
            value = sizes.D if name in self.widths else _value(name, axes, sizes)
            if isinstance(value, Tensor) and name in self.hiding:
                value = 1 - value
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                thing.register_buffer(name, value)
            elif value is not None:
                setattr(thing, name, value)

    def words(self) -> list[str]:
        """What was assumed, for the report."""
        thing, sizes = nn.Module(), CallSizes()
        self.fill(thing, sizes)
        layers = [f"self.{n} is {_described(getattr(thing, n), sizes)}" for n in self.called]
        sized = [f"self.{n} is {_described(getattr(thing, n), sizes)}" for n in self.read if hasattr(thing, n)]
        return layers + sized


def _of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _converted(node: ast.AST) -> ast.AST:
    """What is converted in an expression such as self.mask.bool()."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not _of_self(node.func):
        node = node.func.value
    return node


def _after_heads(call: ast.Call) -> list[str]:
    """Attributes that follow the number of heads among the arguments: (..., self.h, self.d)."""
    pairs = itertools.pairwise(call.args)
    return [
        after.attr  # type: ignore[attr-defined]
        for before, after in pairs
        if _of_self(before) and _of_self(after) and constructor_role(before.attr) == "heads"  # type: ignore[attr-defined]
    ]


def _unchanged(nodes: list[ast.AST]) -> Callable[[ast.AST], set[str]]:
    """A function that names the attributes in an expression that is neither compared, inverted nor computed with."""
    assigned = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    def names(expression: ast.AST, depth: int = 2) -> set[str]:
        parts = list(ast.walk(expression))
        if any(isinstance(part, ast.Compare | ast.UnaryOp | ast.BinOp) for part in parts):
            return set()
        found = {part.attr for part in parts if _of_self(part)}  # type: ignore[attr-defined]
        local = [assigned[part.id] for part in parts if isinstance(part, ast.Name) and part.id in assigned]
        return found.union(*(names(value, depth - 1) for value in local)) if depth else found

    return names


def _axes(node: ast.Subscript) -> int:
    return len(node.slice.elts) if isinstance(node.slice, ast.Tuple) else 1


def _callable(name: str, thing: nn.Module, sizes: CallSizes) -> Any:
    word = plain(name)
    if "drop" in word:
        return nn.Dropout(0.0)
    if "softmax" in word:
        return nn.Softmax(-1)
    if "norm" in word or re.fullmatch(r"ln\w?\d?", word):
        return nn.LayerNorm(sizes.E)
    helper = helper_for(name)
    if helper is not None:
        return lambda x, *rest: helper(thing, x, *rest)
    parts = 3 if "qkv" in word or word in ("cattn", "inproj") else 2 if "kv" in word else 1
    return nn.Linear(sizes.E, parts * sizes.E)


def _value(name: str, axes: int, sizes: CallSizes) -> Any:
    """A size, a scale, a matrix or a causal mask; None where the name does not say."""
    word, c = plain(name), sizes.context
    if word in WEIGHTS_IN:
        return nn.Parameter(torch.randn(sizes.E, sizes.E))
    if re.search(r"mask|tril|causal|^bias$", word) and axes:
        return torch.ones(c, c).tril().view((1,) * max(0, axes - 2) + (c, c))
    if "scale" in word or "scaling" in word:
        return sizes.D**0.5 if "sqrt" in word else sizes.D**-0.5
    role = constructor_role(name)
    return None if role is None else value_for(role, sizes)


def _described(value: Any, sizes: CallSizes) -> str:
    if isinstance(value, nn.Linear):
        parts = value.out_features // sizes.E
        return "nn.Linear(d_model, d_model)" if parts == 1 else f"nn.Linear(d_model, {parts} * d_model)"
    if isinstance(value, nn.Module):
        return f"nn.{type(value).__name__}"
    if isinstance(value, Tensor):
        return "a matrix (d_model, d_model)" if value.shape[-1] == sizes.E else "a causal mask"
    if callable(value):
        return "a right helper of that name"
    names = {sizes.E: "d_model", sizes.H: "num_heads", sizes.D: "d_model // num_heads", sizes.D**-0.5: "1/√head_dim"}
    return names.get(value, str(value))


def _constructor(uses: Uses) -> Callable[..., None]:
    """A constructor that reads no global name, because those of a fragment's methods are looked up in its file."""

    def make(thing: nn.Module, d_model: int, num_heads: int) -> None:
        nn.Module.__init__(thing)
        uses.fill(thing, CallSizes(E=d_model, H=num_heads))
        thing.__dict__.setdefault("num_heads", num_heads)

    def init(self: Any, d_model: int, num_heads: int) -> None:
        make(self, d_model, num_heads)

    return init


# Statements outside any function.


def _of_statements(tree: ast.Module, loaded: Loaded) -> Any:
    """A class, or a function, that returns what the statements compute last; None where they do not look like it."""
    body = [node for node in tree.body if _is_part(node)]
    names = _free(body, loaded)
    sizes = {name: axis for name in names if (axis := _axis(name, body)) is not None}
    inputs = [name for name in names if call_role(name) in (*INPUTS, "mask") and name not in sizes]
    first = next((name for name in inputs if call_role(name) in INPUTS), None)
    last = next((node for node in reversed(body) if isinstance(node, ast.Assign | ast.AnnAssign)), None)
    core = {"query", "key"} <= {call_role(name) for name in inputs} and not _projects(body, names)
    inputs += ["value"] if core and "value" not in map(call_role, inputs) else []  # for the steps after these
    if last is None or first is None or not (core or PROJECTED.search(loaded.source)):
        return None
    if core:
        sizes |= {name: axis for name in names for role, axis in CORE_SIZES.items() if constructor_role(name) == role}
    body = [_OnSelf(set(names) - set(inputs) - set(sizes)).visit(node) for node in body]
    target = last.targets[0] if isinstance(last, ast.Assign) else last.target
    result = ast.parse(ast.unparse(target), mode="eval").body
    returned = ast.copy_location(ast.Return(result), last)
    measured = [ast.parse(f"{name} = {first}.shape[{axis}]").body[0] for name, axis in sizes.items()]
    given = [ast.arg(name) for name in (inputs if core else ["self", *inputs])]
    arguments = ast.arguments([], given, None, [], [], None, [])
    name = CLASS if core else "forward"
    made = ast.FunctionDef(name, arguments, [*measured, *body, returned], [], None, None, **_type_parameters())
    ast.copy_location(made, body[0])
    whole = _made_function(made, loaded) if core else _made([made], loaded)
    if whole is not None:
        whole.open_ended = True
        whole.assumed = [words.removeprefix("self.") if _subject(words) in names else words for words in whole.assumed]
        whole.assumed += [f"{name} is {first}.shape[{axis}]" for name, axis in sizes.items()]
    return whole


def _subject(words: str) -> str:
    """The name in "self.W_q is nn.Linear(d_model, d_model)"."""
    return words.removeprefix("self.").partition(" ")[0]


def _axis(name: str, body: list[ast.stmt]) -> int | None:
    """The axis of the input whose size a name has, where it is only used as a size; None for all other names."""
    calls = [n for node in body for n in ast.walk(node) if isinstance(n, ast.Call)]
    shaping = [call for call in calls if SHAPING.search(ast.unparse(call.func).rpartition(".")[2])]
    slices = [n for node in body for n in ast.walk(node) if isinstance(n, ast.Slice)]
    places = [a for call in shaping for a in (*call.args, *(k.value for k in call.keywords))] + slices
    as_size = {id(n) for place in places for n in ast.walk(place)}
    read = [n for node in body for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
    if not all(id(n) in as_size for n in read):
        return None
    if constructor_role(name) == "batch" or plain(name) == "b":
        return 0
    return -2 if call_role(name) == "length" or LENGTH.fullmatch(plain(name)) else None


def _projects(body: list[ast.stmt], free: list[str]) -> bool:
    """Whether something that these statements do not define is called, and could be a layer with weights."""
    calls = [n.func for node in body for n in ast.walk(node) if isinstance(n, ast.Call)]
    names = [f.attr for f in calls if _of_self(f)]  # type: ignore[attr-defined]
    names += [f.id for f in calls if isinstance(f, ast.Name) and f.id in free]
    weightless = (isinstance(_callable(name, nn.Module(), CallSizes()), nn.Dropout | nn.Softmax) for name in names)
    return not all(weightless)


def _made_function(definition: ast.FunctionDef, loaded: Loaded) -> Any:
    """The function; what it reads from `self` is found in an object of that name."""
    uses, owner, space = Uses.of([definition]), nn.Module(), loaded.namespace
    uses.fill(owner, CallSizes())
    space["self"] = owner
    module = ast.fix_missing_locations(ast.Module([definition], []))
    exec(compile(module, loaded.path, "exec", loaded.flags), space)  # noqa: S102 - as in the loader
    made = space[definition.name]
    made.assumed = [*uses.words(), *_imports(loaded)]
    return made


def _is_part(node: ast.stmt) -> bool:
    """Whether a statement computes something, rather than making data, sizes or layers, or printing."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        maker = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        data = call_role(name) in (*INPUTS, "mask") and DATA.search(maker)
        size = isinstance(node.value, ast.Constant) and constructor_role(name) is not None
        return not (data or size or LAYER.match(maker))
    if isinstance(node, ast.Expr):  # in place, as in scores.masked_fill_(mask, -inf)
        called = getattr(node.value, "func", None)
        return isinstance(called, ast.Attribute) and called.attr.endswith("_")
    return isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.If | ast.For | ast.Raise | ast.Pass)


def _free(body: list[ast.stmt], loaded: Loaded) -> list[str]:
    """Names that are read before any statement gives them a value."""
    known = set(dir(builtins)) | (set(loaded.namespace) - set(_sizes(loaded))) | {"self"}
    free: dict[str, None] = {}
    for node in body:
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        free |= dict.fromkeys(n.id for n in names if isinstance(n.ctx, ast.Load) and n.id not in known)
        known |= {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return list(free)


def _sizes(loaded: Loaded) -> Iterator[str]:
    """Constants of the module that our own sizes replace."""
    yield from (n for n, v in loaded.namespace.items() if type(v) is int and constructor_role(n) is not None)


class _OnSelf(ast.NodeTransformer):
    """Reads free names from the object: `W_q(x)` becomes `self.W_q(x)`."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.Attribute(ast.Name("self", ast.Load()), node.id, ast.Load()), node)
