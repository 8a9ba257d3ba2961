"""The ways to call an object: which argument is the query, which the mask, and in which layout.

`CallForm` is one way, `forms` lists the likely ones, `prepare` makes an object ready: evaluation mode, random weights.
"""

import ast
import contextlib
import inspect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from headwise.check.arguments import CallSizes, source_tree, value_for
from headwise.check.environment import quiet, restored_defaults
from headwise.check.objects import call_parameters, entry, kind_of_weight, modules, random_weight, tensors
from headwise.check.rotary import layout_of, rotary_pairs, rotary_tables
from headwise.check.vocabulary import call_role, constructor_role, has_usual_value, plain, usual_value

# Layouts: the order of axes in which a class takes its input, and the way back to (B, T, E).

PLAIN = "batch first"
OTHERS = ("unbatched", "batch second", "channels first", "image", "image, channels last", "volume")
PICTURES = ("image", "volume")
ROWS, COLUMNS = 2, 3  # of an image whose pixels are the tokens
SLICES = 2  # of such images in a volume


def tokens_of(layout: str, T: int) -> int:
    """The number of tokens: an image needs rows and columns, a single sample needs many tokens."""
    if layout.startswith("image"):
        return ROWS * COLUMNS
    if layout == "volume":
        return SLICES * ROWS * COLUMNS
    return 43 if layout == "unbatched" else T


def lay_out(x: Tensor, layout: str) -> Tensor:
    """(B, T, E) in the layout that the class expects.

    >>> lay_out(torch.zeros(7, 6, 8), "image").shape
    torch.Size([7, 8, 2, 3])
    """
    if layout == "unbatched":
        return x[0]
    if layout == "batch second":
        return x.transpose(0, 1)
    if layout == "channels first":
        return x.transpose(1, 2).contiguous()
    if layout == "image":
        return x.transpose(1, 2).contiguous().view(len(x), x.shape[2], ROWS, -1)  # torch crashes in norms of a view
    if layout == "volume":
        return x.transpose(1, 2).contiguous().view(len(x), x.shape[2], SLICES, ROWS, -1)
    return x.reshape(len(x), ROWS, -1, x.shape[2]) if layout == "image, channels last" else x


def taken_back(leaf: Tensor, layout: str, B: int, T: int) -> Tensor | None:
    """A result in this layout as (B, T, …), or None where it has another shape."""
    shape = tuple(leaf.shape)
    image = (ROWS, T // ROWS)
    if layout == "unbatched":
        return leaf[None] if leaf.dim() == 2 and shape[0] == T else None
    if layout == "batch second":
        return leaf.transpose(0, 1) if leaf.dim() == 3 and shape[:2] == (T, B) else None
    if layout == "channels first":
        return leaf.transpose(1, 2) if leaf.dim() == 3 and shape[0] == B and shape[2] == T else None
    if layout == "image":
        return leaf.flatten(2).transpose(1, 2) if leaf.dim() == 4 and shape[0] == B and shape[2:] == image else None
    if layout == "volume":
        cells = (SLICES, ROWS, T // (SLICES * ROWS))
        return leaf.flatten(2).transpose(1, 2) if leaf.dim() == 5 and shape[0] == B and shape[2:] == cells else None
    if layout == "image, channels last":
        return leaf.flatten(1, 2) if leaf.dim() == 4 and shape[:3] == (B, *image) else None
    if leaf.dim() == 3 and shape[:2] == (B, T):
        return leaf
    return leaf.reshape(B, T, -1) if leaf.dim() == 2 and shape[0] == B * T else None


def merged(leaf: Tensor, B: int, T: int) -> Tensor | None:
    """Heads that were returned as (B, H, T, D), side by side; None for anything else, such as attention weights."""
    if leaf.dim() != 4 or leaf.shape[0] != B or leaf.shape[2] != T or leaf.shape[3] == T:
        return None
    return leaf.transpose(1, 2).flatten(2)


# Forms of a call.

COMBINATIONS = 60  # of values for the required arguments that are not inputs
MASKS_BY_POSITION = 10  # that are tried for an argument without a known name
INPUTS = ("query", "key", "value", "self", "memory")
SOURCE = {"self": "query", "memory": "key"}  # which of `Inputs` they take


class Inputs(NamedTuple):
    """The tensors from which queries, keys and values are made."""

    query: Tensor  # (B, T, E)
    key: Tensor  # (B, S, E)
    value: Tensor

    def copied(self) -> "Inputs":
        """Copies; a tensor in several roles stays one tensor."""
        made = {id(x): x.clone() for x in self}
        return Inputs(*(made[id(x)] for x in self))

    def of_samples(self, count: int) -> "Inputs":
        """The first samples only; a tensor in several roles stays one tensor."""
        made = {id(x): x[:count] for x in self}
        return Inputs(*(made[id(x)] for x in self))


@dataclass(frozen=True)
class CallForm:
    """How to call: the role of every input, fixed values for other arguments, and the layout."""

    roles: dict[str, str]  # argument name → query, key, value, self, memory
    fixed: dict[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    layout: str = PLAIN
    batch: int = 0  # the batch size that fixed tensors were made for
    packed: str | None = None  # the one argument that takes all inputs, `*` for several without names
    keyed: bool = False  # it takes them as a dictionary
    other_length: bool = False  # the output has a length of its own, as where queries are learned
    plain_memory: bool = False  # keys and values come in rows, whatever the layout of the queries
    secret: int = 0  # added to the seeds of random inputs, so that nobody else can predict them

    @property
    def cross(self) -> bool:
        """Whether keys can come from another input than queries."""
        return not {"memory", "key"}.isdisjoint(self.roles.values())

    @property
    def separate_values(self) -> bool:
        """Whether values can come from another input than keys."""
        return {"key", "value"} <= set(self.roles.values())

    @property
    def natural(self) -> bool:
        """Whether everything passed has a known meaning and a sensible value."""
        known = all(call_role(name) in ("mask", "length") or has_usual_value(name) for name in self.fixed)
        named = len(self.roles) == 1 or all(call_role(name) in INPUTS for name in self.roles)
        given = self.packed is not None or not any(value is None for value in self.fixed.values())
        return known and named and given and self.layout == PLAIN

    @property
    def fixed_tensor(self) -> bool:
        """Whether it needs a tensor that was made for one length, such as a mask or a rotary table."""
        return any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(self.fixed.values())))

    def passes_like(self, other: "CallForm") -> bool:
        """Whether its fixed arguments have the names and values of those of another form."""
        return list(self.fixed) == list(other.fixed) and _alike(self.fixed, other.fixed)

    def words(self) -> str:
        """`query, key, value, mask`"""
        return ", ".join([*self.roles, *self.masks])

    def call(self, thing: Any, inputs: Inputs, masks: dict[str, Any] | None = None, as_is: bool = False) -> Any:
        """What a call returns. It gets copies of the inputs, because learners write in place, unless `as_is`.

        Lists and dictionaries that are defaults of its arguments are emptied again: every call is the first.
        """
        with restored_defaults(thing):
            return self.unguarded(thing, inputs if as_is else inputs.copied(), masks)

    def unguarded(self, thing: Any, inputs: Inputs, masks: dict[str, Any] | None = None) -> Any:
        """The same with the inputs themselves; what the call does to its defaults stays."""
        given: dict[str, Any] = tree_map(lambda leaf: self._fitted(leaf, inputs.query), dict(self.fixed))
        for name, role in self.roles.items():
            in_rows = self.plain_memory and role in ("memory", "key", "value")
            given[name] = lay_out(getattr(inputs, SOURCE.get(role, role)), PLAIN if in_rows else self.layout)
        given.update(masks or {})
        if self.packed is not None:
            return self._call_packed(thing, given)
        method = entry(thing)
        assert method is not None  # noqa: S101 - objects without a method were refused when they were built
        first = [given.pop(name) for name in self.positional if name in given]
        return method(*first, **given)

    def _call_packed(self, thing: Any, given: dict[str, Any]) -> Any:
        """A call that takes its inputs in one argument, as a tuple or a dictionary, or as `*inputs`."""
        inside = {name: given.pop(name) for name in [*self.roles, *self.fixed]}
        method = entry(thing)
        assert method is not None  # noqa: S101 - as in `call`
        if self.packed == "*":
            return method(*inside.values(), **given)
        return method(inside if self.keyed else tuple(inside.values()), **given)

    def _fitted(self, value: Any, like: Tensor) -> Any:
        """A fixed tensor for a smaller batch, another device or half precision."""
        if not isinstance(value, Tensor):
            return value
        if self.batch and value.dim() and value.shape[0] == self.batch:
            value = value[: like.shape[0]]
        half = value.is_floating_point() and like.dtype != torch.float64
        return value.to(like.device, like.dtype if half else value.dtype)

    def result(self, returned: Any, inputs: Inputs) -> Tensor | None:
        """The output among the returned tensors, as (B, T, …)."""
        B, T = inputs.query.shape[:2]
        found = [taken_back(leaf, self.layout, B, T) for leaf in leaves(returned)]
        found += [merged(leaf, B, T) for leaf in leaves(returned) if self.layout == PLAIN]
        found += [leaf for leaf in leaves(returned) if self.other_length and leaf.dim() == 3 and len(leaf) == B]
        return next((output for output in found if output is not None), None)


def leaves(returned: Any) -> list[Tensor]:
    """Floating-point tensors among what was returned, in order, including those in the attributes of an object."""
    if not isinstance(returned, Tensor | tuple | list | dict) and hasattr(returned, "__dict__"):
        returned = list(vars(returned).values())
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def make_inputs(
    form: CallForm, sizes: CallSizes, seed: int = 1, cross: bool = False, dtype: torch.dtype = torch.float64
) -> Inputs:
    """Random inputs. They differ by role wherever the form allows it; with `cross`, their lengths differ too."""
    generator = torch.Generator().manual_seed(seed + form.secret)
    B = 1 if form.layout == "unbatched" else sizes.B

    def draw(length: int) -> Tensor:
        return torch.randn(B, length, sizes.E, generator=generator, dtype=torch.float64).to(dtype)

    query = draw(sizes.T)
    key = draw(sizes.S if cross else sizes.T) if form.cross else query
    value = draw(sizes.S if cross else sizes.T) if form.separate_values else key
    return Inputs(query, key, value)


def forms(thing: Any, sizes: CallSizes) -> Iterator[CallForm]:
    """Ways to call, most likely first."""
    parameters = call_parameters(thing)
    plain_form = _by_names(parameters, _replaced(thing, parameters))
    if plain_form is not None:
        yield from _with_fixed(replace(plain_form, batch=sizes.B), parameters, sizes, _tables_of(thing, parameters))
    yield from _packed(thing, parameters)
    yield from _by_position(parameters, sizes)


def _packed(thing: Any, parameters: list[inspect.Parameter]) -> Iterator[CallForm]:
    """Where the body takes one argument apart: `q, k, v = inputs`, `inputs[0]`, `inputs["query"]`."""
    method = getattr(thing, "forward", None) if isinstance(thing, nn.Module) else entry(thing)
    if method is None:
        return
    every = inspect.signature(method).parameters.values()
    star = next((p.name for p in every if p.kind is p.VAR_POSITIONAL), None)
    required = [p.name for p in parameters if p.default is p.empty]
    single = required[0] if len(required) == 1 else None
    name = single or (star if not required else None)
    parts = _parts_of(source_tree(method), name) if name is not None else []
    for keyed, names in parts:
        roles = _part_roles(names)
        fixed = {part: None for part in names if part not in roles}
        if set(roles.values()) & {"query", "self"}:
            order = {part: roles[part] for part in names if part in roles}
            masks = tuple(p.name for p in parameters if call_role(p.name) == "mask")
            yield CallForm(order, fixed, masks, packed="*" if name == star else name, keyed=keyed)


def _parts_of(tree: ast.AST, name: str) -> Iterator[tuple[bool, list[str]]]:
    """The names under which code takes the parts of an argument: whether they are keys, and the names in order."""
    keys: dict[str, None] = {}
    most = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.value, "id", "") == name:
            targets = node.targets[0]
            if isinstance(targets, ast.Tuple | ast.List) and all(isinstance(t, ast.Name) for t in targets.elts):
                yield False, [t.id for t in targets.elts if isinstance(t, ast.Name)]
        elif isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == name:
            index = node.slice.value if isinstance(node.slice, ast.Constant) else None
            keys |= {index: None} if isinstance(index, str) else {}
            most = max(most, index + 1) if type(index) is int else most
    if keys:
        yield True, list(keys)
    if most > 1:
        yield False, ["query", "key", "value", *(f"part{i}" for i in range(3, most))][:most]


def _part_roles(names: list[str]) -> dict[str, str]:
    """The roles of the parts: by name, or query, key and value in this order."""
    roles = {name: role for name in names if (role := call_role(name)) in INPUTS}
    if len(set(roles.values())) == len(roles) and len(roles) >= min(2, len(names)):
        return roles
    return dict(zip(names, ("query", "key", "value"), strict=False))


def _replaced(thing: Any, parameters: list[inspect.Parameter]) -> set[str]:
    """An optional argument in whose place another one stands where it is None: `y = x if y is None else y`."""
    method = getattr(thing, "forward", None) if isinstance(thing, nn.Module) else entry(thing)
    optional = {p.name for p in parameters if p.default is None}
    names = {p.name for p in parameters} - optional
    found: set[str] = set()
    for node in ast.walk(source_tree(method)) if optional and method is not None else ():
        if isinstance(node, ast.IfExp):
            sides = {getattr(node.body, "id", ""), getattr(node.orelse, "id", "")}
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            sides = {getattr(value, "id", "") for value in node.values}
        elif isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Assign):
            sides = {getattr(node.body[0].targets[0], "id", ""), getattr(node.body[0].value, "id", "")}
        else:
            continue
        found |= sides & optional if len(sides) == 2 and sides & names else set()
    return found if len(found) == 1 else set()


def _by_names(parameters: list[inspect.Parameter], memories: set[str]) -> CallForm | None:
    roles: dict[str, str] = {}
    masks = []
    sides = _sides(parameters)
    for p in parameters:
        role = None if p.name in sides else call_role(p.name)
        asks = p.name in memories and plain(p.name) in ("q", "query", "queries")  # the required one is what it reads
        role = "memory" if p.name in memories and role in (None, "self", "query") and not asks else role
        optional_source = (role in ("key", "value", "memory") or asks) and p.default is None
        if role == "mask":
            masks.append(p.name)
        elif role in INPUTS and (p.default is p.empty or optional_source):
            roles[p.name] = role
    roles = _settled(roles, {p.name: p for p in parameters})
    if not set(roles.values()) & {"query", "self"}:
        return None
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY)
    return CallForm(roles, {}, tuple(masks), positional)


def _sides(parameters: list[inspect.Parameter]) -> dict[str, int]:
    """Arguments for the rows and columns of an image: one row, and as many columns as tokens (written 0)."""
    words = {plain(p.name): p.name for p in parameters}
    pair = next(((a, b) for a, b in (("h", "w"), ("height", "width")) if a in words and b in words), None)
    return {} if pair is None else {words[pair[0]]: 1, words[pair[1]]: 0}


def _settled(roles: dict[str, str], parameters: dict[str, inspect.Parameter]) -> dict[str, str]:
    """Roles that fit together: a lone q is the input, `x` beside key and value is the query, a second `x` is memory."""
    given = list(roles.values())
    if "query" not in given and "self" not in given and given:
        required = [n for n in roles if parameters[n].default is inspect.Parameter.empty]
        if len(required) == 1:
            return {required[0]: "self"}
    if given.count("self") == 1 and "query" not in given and "key" in given:
        roles = {n: "query" if r == "self" else r for n, r in roles.items()}
    elif "query" in given and "self" in given and "key" not in given:
        roles = {n: "memory" if r == "self" else r for n, r in roles.items()}
    elif "query" in given and "self" in given:
        roles = {n: r for n, r in roles.items() if r != "self"}
    elif given.count("self") == 2 and "memory" not in given:
        first = next(n for n, r in roles.items() if r == "self")
        roles = {n: "memory" if r == "self" and n != first else r for n, r in roles.items()}
    if list(roles.values()) == ["query"]:
        roles = dict.fromkeys(roles, "self")
    return roles


@dataclass(frozen=True)
class _Tables:
    """What the body says of its arguments for positions."""

    pairs: set[str]  # two tables: the body takes them apart under two names, or they are annotated as a tuple
    needed: set[str]  # None by default, and never compared with None


def _tables_of(thing: Any, parameters: list[inspect.Parameter]) -> _Tables:
    method = getattr(thing, "forward", None) if isinstance(thing, nn.Module) else entry(thing)
    tables = [p for p in parameters if call_role(p.name) in ("rotary", "position")]
    tree = source_tree(method) if tables and method is not None else ast.Module([], [])
    pairs = {p.name for p in tables for _, names in _parts_of(tree, p.name) if len(names) == 2}
    pairs |= {p.name for p in tables if "tuple[" in str(p.annotation).lower()}
    owners = [n.value for n in ast.walk(tree) if isinstance(n, ast.Attribute | ast.Assign)]
    read = {owner.id for owner in owners if isinstance(owner, ast.Name)} - _tested(tree)
    return _Tables(pairs, {p.name for p in tables if p.default is None and p.name in read})


def _tested(tree: ast.AST) -> set[str]:
    """Names that stand in a condition themselves, and not only their attributes."""
    nodes = [*ast.walk(tree)]
    tests = [n.test for n in nodes if isinstance(n, ast.If | ast.IfExp)]
    tests += [n for n in nodes if isinstance(n, ast.Compare | ast.BoolOp)]
    owners = {id(n.value) for n in nodes if isinstance(n, ast.Attribute)}
    inside = (n for test in tests for n in ast.walk(test))
    return {n.id for n in inside if isinstance(n, ast.Name) and id(n) not in owners}


def _with_fixed(
    form: CallForm, parameters: list[inspect.Parameter], sizes: CallSizes, tables: _Tables
) -> Iterator[CallForm]:
    """Values for required arguments that are not inputs: None first, then what their name or type suggests."""
    required = [p for p in parameters if p.default is p.empty or p.name in tables.needed]
    open_names = [p for p in required if p.name not in form.roles]
    sides = _sides(parameters)
    choices = {
        p.name: [sides[p.name] or sizes.T] if p.name in sides else _choices(p, sizes, p.name in tables.pairs)
        for p in open_names
    }
    # An optional key or memory is passed first, so that cross-attention is seen, and left out afterwards.
    optional = [p.name for p in parameters if p.name in form.roles and p.default is None]
    alone = {n: r for n, r in form.roles.items() if n not in optional}
    fixed = list(itertools.islice(_combined(choices), COMBINATIONS))
    yield from (replace(form, fixed=values) for values in fixed)
    open_masks = [p.name for p in parameters if p.name in form.masks and p.default is None]
    if open_masks:  # a mask that is optional by its default but needed in fact
        yield from (replace(form, fixed={open_masks[0]: mask}) for mask in _neutral_masks(sizes))
    rest = [p for p in parameters if p.default is None and call_role(p.name) == "rotary" and p not in open_names]
    given = _combined({p.name: _choices(p, sizes, p.name in tables.pairs) for p in rest}) if rest else ()
    yield from (replace(form, fixed=values | table) for table in given for values in fixed[:1])
    one = [alone | {name: form.roles[name]} for name in optional] if len(optional) > 1 and alone else []
    yield from (replace(form, roles=roles, fixed=values) for roles in one for values in fixed)  # one instead of another
    if optional and alone:
        alone = _settled(alone, {p.name: p for p in parameters})
        yield from (replace(form, roles=alone, fixed=values) for values in fixed)


def _combined(choices: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """Every argument with its likeliest value, then one of them with another, then the rest.

    Rotary tables change together: all of them have one layout.
    """
    tables = [name for name in choices if call_role(name) == "rotary"]
    axes = [tuple(tables)] if tables else []
    axes += [(name,) for name in choices if name not in tables]
    for count in range(len(axes) + 1):
        for changed in itertools.combinations(axes, count):
            ranges = [range(1, max(len(choices[name]) for name in axis)) for axis in changed]
            for places in itertools.product(*ranges):
                at = {name: i for axis, i in zip(changed, places, strict=True) for name in axis}
                yield {name: found[min(at.get(name, 0), len(found) - 1)] for name, found in choices.items()}


def other_tables(form: CallForm, thing: Any, sizes: CallSizes) -> Iterator[tuple[CallForm, set[str]]]:
    """The same form with rotary tables in other layouts, where it is given such tables, and the layouts of these."""
    given = {name for name in form.fixed if call_role(name) == "rotary" and form.fixed[name] is not None}
    for other in forms(thing, sizes) if given else ():
        if other.roles == form.roles and list(other.fixed) == list(form.fixed):
            tables = [other.fixed[name] for name in given]
            rest = (n for n in form.fixed if n not in given)
            if all(table is not None for table in tables) and all(_alike(other.fixed[n], form.fixed[n]) for n in rest):
                yield replace(other, layout=form.layout), {layout_of(leaf) for leaf in tree_leaves(tables)}


def _alike(a: Any, b: Any) -> bool:
    """Whether two arguments have the same value."""
    left, right = tree_leaves(a), tree_leaves(b)
    return len(left) == len(right) and all(map(_equal, left, right))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _choices(p: inspect.Parameter, sizes: CallSizes, pair: bool = False) -> list[Any]:
    role, word, size = call_role(p.name), plain(p.name), constructor_role(p.name)
    if word.startswith(("cuseq", "culen")):  # where every document begins, and where the last one ends
        return [torch.tensor([0, sizes.T]), torch.tensor([0, sizes.T], dtype=torch.int32)]
    if role == "mask" and "len" in word:
        return [None, torch.full((sizes.B,), sizes.T), [sizes.T] * sizes.B, *_neutral_masks(sizes)]
    if role == "mask":
        return [None, *_neutral_masks(sizes)]
    if role == "cache":
        return [None]
    if has_usual_value(p.name):
        return [usual_value(p.name), None]
    if role is None and size is not None:  # every call is given the sizes of the model
        return [value_for(size, sizes), None]
    if role == "length":
        return [sizes.T, None]
    if role == "rotary":
        embedded = [_position_table(sizes)] if "emb" in word or "enc" in word else []
        tables = [*rotary_pairs(sizes), None] if pair else rotary_tables(word, sizes)
        return [*tables] if pair else [*embedded, *tables]
    if role == "position" and p.default is None:
        return [torch.arange(sizes.T).expand(sizes.B, -1), torch.arange(sizes.T)]
    if role == "position":
        return [None, torch.arange(sizes.T), torch.arange(sizes.T)[None], 0, _position_table(sizes)]
    if p.annotation in (bool, "bool"):
        return [False]
    if p.annotation in (int, "int"):
        return [0, sizes.T, sizes.H]
    return [None, False, 0, *itertools.islice(_neutral_masks(sizes), 8)]


def _neutral_masks(sizes: CallSizes) -> Iterator[Tensor]:
    """Masks that hide nothing, in the usual shapes and types: 1 = keep, then 1 = hide or added to the scores."""
    B, T = sizes.B, sizes.T
    for value in (1, 0):
        for shape in ((1, 1, T, T), (B, T, T), (T, T), (B, T), (B, 1, 1, T)):
            whole = torch.full(shape, value)
            yield from (whole.bool(), whole.double())


def _position_table(sizes: CallSizes) -> Tensor:
    """Position embeddings for every sample, as relative attention takes them."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(sizes.T, sizes.E, generator=generator, dtype=torch.float64)
    return table.expand(sizes.B, sizes.T, sizes.E).contiguous()


def _by_position(parameters: list[inspect.Parameter], sizes: CallSizes) -> Iterator[CallForm]:
    """Where names do not help: one, two or three required arguments are inputs, or the last one is a mask."""
    required = [p.name for p in parameters if p.default is p.empty]
    masks = tuple(p.name for p in parameters if call_role(p.name) == "mask")
    free = [name for name in required if name not in masks]
    nothing = dict.fromkeys((name for name in required if name in masks), None)
    if len(free) == 1:
        yield CallForm({free[0]: "self"}, dict(nothing), masks)
    if len(free) >= 3:
        roles = dict(zip(free, ("query", "key", "value"), strict=False))
        yield CallForm(roles, nothing | dict.fromkeys(free[3:], None), masks)
        yield CallForm({free[0]: "self"}, nothing | dict.fromkeys(free[1:], None), masks)
    if len(free) == 2:
        yield CallForm({free[0]: "query", free[1]: "memory"}, dict(nothing), masks)
        yield CallForm({free[0]: "self"}, {free[1]: None}, masks)
    last = list(nothing) or free[-1:]
    if len(set(free) - set(last)) in (1, 2):
        roles = {free[0]: "query", free[1]: "memory"} if len(set(free) - set(last)) == 2 else {free[0]: "self"}
        usual = itertools.islice(_neutral_masks(sizes), MASKS_BY_POSITION)
        yield from (CallForm(roles, nothing | dict.fromkeys(last, mask), masks, batch=sizes.B) for mask in usual)
    if not free and parameters and not nothing:
        yield CallForm({parameters[0].name: "self"}, {}, masks)


# An object made ready for calls.

DRY_CALLS = 24  # that are tried to give lazy layers their shapes


def materialize(thing: Any, sizes: CallSizes) -> None:
    """Give lazy layers, such as `nn.LazyLinear`, their shapes: by one call in the first form that works."""
    for form in itertools.islice(forms(thing, sizes), DRY_CALLS):
        if not any(is_lazy(tensor) for tensor in tensors(thing).values()):
            return
        with contextlib.suppress(Exception), torch.no_grad(), quiet():  # whatever a learner's code raises
            form.call(thing, make_inputs(form, sizes, dtype=torch.get_default_dtype()))


def prepare(thing: Any, sizes: CallSizes | None = None, seed: int = 0) -> None:
    """Switch to double precision and evaluation mode, and make every parameter random, biases and norms included.

    Small initial values would hide wrong scales, and zero biases wrong biases. Lazy layers take the shapes of `sizes`.
    """
    materialize(thing, sizes or CallSizes())
    for module in modules(thing):
        module.double()
        module.eval()
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(thing).values():
        if is_lazy(tensor) or not tensor.is_floating_point() or tensor.device.type == "meta":
            continue
        if tensor.dtype != torch.float64:
            tensor.data = tensor.data.double()
        kind = kind_of_weight(tensor, thing)
        if kind != "constant":
            tensor.data.copy_(random_weight(tensor.shape, kind, generator))
    for module in modules(thing):
        if type(module).train is not nn.Module.train:  # it may keep what evaluation mode makes of the weights
            module.train()
            module.eval()
    held = {} if isinstance(thing, nn.Module) else getattr(thing, "__dict__", {})
    for name, part in list(held.items()):
        if isinstance(part, Tensor) and part.is_floating_point() and part.dtype != torch.float64:
            setattr(thing, name, part.double())
