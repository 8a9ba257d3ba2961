"""Calls somebody's forward: which argument is the query, which the mask, in which layout, and what comes back."""

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from headwise.check import layouts
from headwise.check.names import call_role, plain
from headwise.check.sizes import Sizes
from headwise.check.subject import FunctionWithWeights, entry, signature

INPUTS = ("query", "key", "value", "self", "memory")
NEUTRAL_FLAGS = {
    "isdecoder": False, "training": False, "usecache": False, "outputattentions": False, "startpos": 0,
    "causal": False, "iscausal": False, "returnweights": False, "returnattention": False, "masked": False,
}  # fmt: skip


class Inputs(NamedTuple):
    """What queries, keys and values are to be made from."""

    query: Tensor  # (B, T, E)
    key: Tensor  # (B, S, E)
    value: Tensor


@dataclass(frozen=True)
class Form:
    """How to call: the role of every argument that is passed, fixed values for others, and the layout."""

    roles: dict[str, str]  # argument name → query, key, value, self, memory
    fixed: dict[str, Any] = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    positional: tuple[str, ...] = ()
    layout: str = layouts.PLAIN
    batch: int = 0  # the batch for which fixed tensors were made

    @property
    def cross(self) -> bool:
        """Whether keys can come from elsewhere than queries."""
        given = set(self.roles.values())
        return "memory" in given or "key" in given

    @property
    def separate_values(self) -> bool:
        """Whether values can come from elsewhere than keys."""
        return {"key", "value"} <= set(self.roles.values())

    @property
    def natural(self) -> bool:
        """Whether everything that is passed has a known meaning and a sensible value."""
        known = all(call_role(name) in ("mask", "length") or plain(name) in NEUTRAL_FLAGS for name in self.fixed)
        named = len(self.roles) == 1 or all(call_role(name) in INPUTS for name in self.roles)
        given = not any(value is None for value in self.fixed.values())
        return known and named and given and self.layout == layouts.PLAIN

    @property
    def fixed_tensor(self) -> bool:
        """Whether it must be given a tensor that was made for one length, such as a mask or a table of turns."""
        return any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(self.fixed.values())))

    def words(self) -> str:
        """`query, key, value, mask`"""
        return ", ".join([*self.roles, *self.masks])

    def call(self, thing: Any, inputs: Inputs, masks: dict[str, Any] | None = None) -> Any:
        """The result of the learner's own call."""
        given: dict[str, Any] = tree_map(lambda leaf: self._fitted(leaf, inputs.query), dict(self.fixed))
        for name, role in self.roles.items():
            given[name] = layouts.lay_out(_of_role(inputs, role), self.layout)
        given.update(masks or {})
        method = entry(thing)
        assert method is not None  # noqa: S101 - candidates without a method were left out
        first = [given.pop(name) for name in self.positional if name in given]
        return method(*first, **given)

    def _fitted(self, value: Any, like: Tensor) -> Any:
        """A fixed tensor for a smaller batch, another device or half precision."""
        if not isinstance(value, Tensor):
            return value
        if self.batch and value.dim() > 1 and value.shape[0] == self.batch:
            value = value[: like.shape[0]]
        half = value.is_floating_point() and like.dtype != torch.float64
        return value.to(like.device, like.dtype if half else value.dtype)

    def result(self, returned: Any, inputs: Inputs) -> Tensor | None:
        """The output among what was returned, as (B, T, …)."""
        B, T = inputs.query.shape[:2]
        found = [layouts.taken_back(leaf, self.layout, B, T) for leaf in leaves(returned)]
        found += [layouts.merged(leaf, B, T) for leaf in leaves(returned) if self.layout == layouts.PLAIN]
        return next((output for output in found if output is not None), None)


def leaves(returned: Any) -> list[Tensor]:
    """Floating point tensors in what was returned, in order; objects with attributes are looked into."""
    if not isinstance(returned, Tensor | tuple | list | dict) and hasattr(returned, "__dict__"):
        returned = list(vars(returned).values())
    return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _of_role(inputs: Inputs, role: str) -> Tensor:
    return inputs.query if role == "self" else inputs.key if role == "memory" else getattr(inputs, role)


def make_inputs(
    form: Form, sizes: Sizes, seed: int = 1, cross: bool = False, dtype: torch.dtype = torch.float64
) -> Inputs:
    """Random inputs. Queries, keys and values differ wherever the form lets them; lengths do only when asked for."""
    generator = torch.Generator().manual_seed(seed)
    B = 1 if form.layout == "unbatched" else sizes.B

    def draw(length: int) -> Tensor:
        return torch.randn(B, length, sizes.E, generator=generator, dtype=torch.float64).to(dtype)

    query = draw(sizes.T)
    key = draw(sizes.S if cross else sizes.T) if form.cross else query
    value = draw(sizes.S if cross else sizes.T) if form.separate_values else key
    return Inputs(query, key, value)


def forms(thing: Any, sizes: Sizes) -> Iterator[Form]:
    """Ways to call, most likely first."""
    parameters = thing.free() if isinstance(thing, FunctionWithWeights) else signature(thing)
    plain_form = _by_names(parameters)
    if plain_form is not None:
        yield from _with_fixed(replace(plain_form, batch=sizes.B), parameters, sizes)
    yield from _by_position(parameters)


def _by_names(parameters: list[inspect.Parameter]) -> Form | None:
    roles: dict[str, str] = {}
    masks = []
    sides = _sides(parameters)
    for p in parameters:
        role = None if p.name in sides else call_role(p.name)
        if role == "mask":
            masks.append(p.name)
        elif role in ("query", "key", "value", "self", "memory") and not _is_flag(p) and _passed(p, role):
            roles[p.name] = role
    roles = _settled(roles, {p.name: p for p in parameters})
    if not set(roles.values()) & {"query", "self"}:
        return None
    positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY)
    return Form(roles, {}, tuple(masks), positional)


def _sides(parameters: list[inspect.Parameter]) -> dict[str, int]:
    """Rows and columns of an image whose pixels are the tokens: one row, and as many columns as tokens (here 0)."""
    words = {plain(p.name): p.name for p in parameters}
    pair = next(((a, b) for a, b in (("h", "w"), ("height", "width")) if a in words and b in words), None)
    return {} if pair is None else {words[pair[0]]: 1, words[pair[1]]: 0}


def _passed(p: inspect.Parameter, role: str) -> bool:
    """Required, or a source of keys that may be left out."""
    return p.default is p.empty or (role in ("key", "value", "memory") and p.default is None)


def _is_flag(p: inspect.Parameter) -> bool:
    return isinstance(p.default, bool | int | float | str)


def _settled(roles: dict[str, str], parameters: dict[str, inspect.Parameter]) -> dict[str, str]:
    """One role each: a lone q is the input itself; `x` beside key and value is the query; a second `x` is memory."""
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


def _with_fixed(form: Form, parameters: list[inspect.Parameter], sizes: Sizes) -> Iterator[Form]:
    """Values for required arguments that are no input: None first, then what their name or type suggests."""
    open_names = [p for p in parameters if p.default is p.empty and p.name not in form.roles]
    sides = _sides(parameters)
    choices = [[sides[p.name] or sizes.T] if p.name in sides else _choices(p, sizes) for p in open_names]
    # An optional key or memory is passed first, so that cross-attention is seen; then left out.
    optional = [p.name for p in parameters if p.name in form.roles and p.default is None]
    alone = {n: r for n, r in form.roles.items() if n not in optional}
    for values in itertools.islice(itertools.product(*choices), 40):
        fixed = dict(zip((p.name for p in open_names), values, strict=True))
        yield replace(form, fixed=fixed)
    open_masks = [p for p in parameters if p.name in form.masks and p.default is None]
    if open_masks:  # a mask that may be left out by its default, and not in fact
        for mask in _neutral_masks(sizes):
            yield replace(form, fixed={p.name: mask for p in open_masks[:1]})
    if optional and alone:
        alone = _settled(alone, {p.name: p for p in parameters})
        for values in itertools.islice(itertools.product(*choices), 40):
            yield replace(form, roles=alone, fixed=dict(zip((p.name for p in open_names), values, strict=True)))


def _choices(p: inspect.Parameter, sizes: Sizes) -> list[Any]:
    role, word = call_role(p.name), plain(p.name)
    if role == "mask":
        return [None, *_neutral_masks(sizes)]
    if word in NEUTRAL_FLAGS:
        return [NEUTRAL_FLAGS[word], None]
    if role == "length":
        return [sizes.T, None]
    if role == "rotary":
        embedded = [_position_table(sizes)] if "emb" in word or "enc" in word else []
        return [*embedded, *_rotary_tables(word, sizes)]
    if role == "position":
        return [None, torch.arange(sizes.T), torch.arange(sizes.T)[None], 0, _position_table(sizes)]
    if p.annotation in (bool, "bool"):
        return [False]
    if p.annotation in (int, "int"):
        return [0, sizes.T, sizes.H]
    return [None, False, 0, *itertools.islice(_neutral_masks(sizes), 8)]


def _neutral_masks(sizes: Sizes) -> Iterator[Tensor]:
    """Masks that hide nothing, in the shapes and types people expect: as 1 = keep, as 1 = hide, and to be added."""
    B, T = sizes.B, sizes.T
    for value in (1, 0):
        for shape in ((1, 1, T, T), (B, T, T), (T, T), (B, T), (B, 1, 1, T)):
            whole = torch.full(shape, value)
            yield from (whole.bool(), whole.double())


def _position_table(sizes: Sizes) -> Tensor:
    """An embedding of positions for every sample, as relative attention reads it."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randn(sizes.T, sizes.E, generator=generator, dtype=torch.float64)
    return table.expand(sizes.B, sizes.T, sizes.E).contiguous()


def _rotary_tables(word: str, sizes: Sizes) -> Iterator[Any]:
    angles = torch.arange(sizes.T)[:, None] / 10000 ** (torch.arange(0, sizes.D, 2) / sizes.D)
    angles = angles.double()
    turns = torch.polar(torch.ones_like(angles), angles)
    whole = torch.cat([angles, angles], -1)
    if word == "cos" or word == "sin":
        table = whole.cos() if word == "cos" else whole.sin()
        yield from (table, table[None], table[None, None], table[:, : sizes.D // 2])
        return
    yield from (
        None,
        turns,
        (whole.cos()[None], whole.sin()[None]),
        angles,
        (angles.cos(), angles.sin()),
        (whole.cos(), whole.sin()),
    )


def _by_position(parameters: list[inspect.Parameter]) -> Iterator[Form]:
    """Where names say nothing: one, three or two required arguments are input tensors."""
    required = [p.name for p in parameters if p.default is p.empty]
    masks = tuple(p.name for p in parameters if call_role(p.name) == "mask")
    free = [name for name in required if name not in masks]
    nothing = dict.fromkeys((name for name in required if name in masks), None)
    if len(free) == 1:
        yield Form({free[0]: "self"}, dict(nothing), masks)
    if len(free) >= 3:
        yield Form(
            dict(zip(free, ("query", "key", "value"), strict=False)),
            dict(nothing) | dict.fromkeys(free[3:], None),
            masks,
        )
        yield Form({free[0]: "self"}, dict(nothing) | dict.fromkeys(free[1:], None), masks)
    if len(free) == 2:
        yield Form({free[0]: "query", free[1]: "memory"}, dict(nothing), masks)
        yield Form({free[0]: "self"}, {free[1]: None}, masks)
    if not free and parameters and not nothing:
        yield Form({parameters[0].name: "self"}, {}, masks)
