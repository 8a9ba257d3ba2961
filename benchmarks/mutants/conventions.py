"""Right attention under another convention: masks inverted, weights stored or results returned in another order."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mutants.compare import Original, first_difference, results, training_difference
from mutants.drivers import SIZES, Call, Inputs, Size
from mutants.observe import Seen, observe, same

Layout = Callable[[Tensor], Tensor]
Plan = tuple[tuple[str, ...], int, int, int]  # where q, k, v come from, and layouts of q and k, of v, of the output


def convention(right: Original, modules: list[nn.Module], seen: list[dict[str, Seen]]) -> str:
    """The convention under which a mutant that differs is right; empty if there is none."""
    if any(one.error for sized in seen for one in sized.values()):
        return _expanded(right, modules) or _other_shape(right, modules, seen)
    plain = next(iter(right.seen[0]))  # a call without a mask: which weights are meant shows here, not what masks mean
    differs = first_difference([{plain: right.seen[0][plain]}], [{plain: seen[0][plain]}])
    found = _returned_order(right, seen) or _other_default(right, modules)
    return found or (_relabeled(right, modules) if differs else _flipped(right, seen))


def is_right_in_float32(right: Original, modules: list[nn.Module]) -> bool:
    """Whether a mutant that raises in float64 is right in float32."""
    mine = [
        results(copy.deepcopy(m).float(), right.driver, s, torch.float32) for m, s in zip(modules, SIZES, strict=True)
    ]
    ours = [
        results(copy.deepcopy(m).float(), right.driver, s, torch.float32)
        for m, s in zip(right.modules, SIZES, strict=True)
    ]
    return not first_difference(ours, mine, tolerance=1e-4)


def _other_default(right: Original, modules: list[nn.Module]) -> str:
    """Whether only a default of the call is another one."""
    forward, wanted = type(modules[0]).forward, type(right.modules[0]).forward.__defaults__
    if forward.__defaults__ == wanted or len(forward.__defaults__ or ()) != len(wanted or ()):
        return ""
    kept, forward.__defaults__ = forward.__defaults__, wanted
    mine = [results(m, right.driver, s) for m, s in zip(modules, SIZES, strict=True)]
    forward.__defaults__ = kept
    return "" if first_difference(right.seen, mine) else f"defaults {kept}"


def _expanded(right: Original, modules: list[nn.Module]) -> str:
    """Whether it does the same with masks that already have the axes of the scores: (B, 1, 1, S) or (B, 1, T, S)."""
    names, forward = () if right.driver.states_shape else right.driver.masks, type(modules[0]).forward

    def shaped(self: nn.Module, *args: Any, **options: Any) -> Any:
        given = {k: _four(v, len(args[0])) if k in names else v for k, v in options.items()}
        return forward(self, *args, **given)

    type(modules[0]).forward = shaped  # type: ignore[method-assign]
    mine = [results(m, right.driver, s) for m, s in zip(modules, SIZES, strict=True)] if names else []
    type(modules[0]).forward = forward  # type: ignore[method-assign]
    return "masks in the shape of the scores" if names and not first_difference(right.seen, mine) else ""


def _other_shape(right: Original, modules: list[nn.Module], seen: list[dict[str, Seen]]) -> str:
    """Whether it takes a mask of every key (B, S), or a table for all samples (T, S), and raises for what it was given.

    Both then get masks that can be written in either shape. A call that runs and gives another result is no convention.
    """
    calls = [(a[name], b[name]) for a, b in zip(right.seen, seen, strict=True) for name in a]
    names = () if right.driver.states_shape else right.driver.masks
    if not names or any(not b.error and not all(map(same, a.outputs, b.outputs)) for a, b in calls):
        return ""
    for kind in ("keys", "table"):
        ours = _with_masks(right, right.modules, lambda mask, T, B: _alike(mask, B, kind))  # noqa: B023
        mine = _with_masks(right, modules, lambda mask, T, B: _reduced(_alike(mask, B, kind), T, B, kind))  # noqa: B023
        if not first_difference(ours, mine):
            return f"masks of another shape: {kind}"
    return ""


def _with_masks(right: Original, modules: list[nn.Module], change: Callable[..., Any]) -> list[dict[str, Seen]]:
    """What modules do with every mask changed, which is a function of the mask, the queries and the batch."""
    cls, forward = type(modules[0]), type(modules[0]).forward

    def shaped(self: nn.Module, *args: Any, **options: Any) -> Any:
        B, T = args[0].shape[:2]
        given = {k: change(v, T, B) if k in right.driver.masks else v for k, v in options.items()}
        return forward(self, *args, **given)

    cls.forward = shaped  # type: ignore[method-assign]
    found = [results(m, right.driver, s) for m, s in zip(modules, SIZES, strict=True)]
    cls.forward = forward  # type: ignore[method-assign]
    return found


def _alike(mask: Any, B: int, kind: str) -> Any:
    """A mask whose rows are the same for every query, or whose tables are the same for every sample."""
    if not isinstance(mask, Tensor) or mask.dim() > 3 or (mask.dim() == 2 and len(mask) != B):
        return mask
    if kind == "keys":
        return mask if mask.dim() == 2 else mask[:, :1].expand_as(mask)
    return mask[:1].expand_as(mask)


def _reduced(mask: Any, T: int, B: int, kind: str) -> Any:
    """The same mask as (B, S) or as (T, S)."""
    if not isinstance(mask, Tensor) or mask.dim() > 3 or (mask.dim() == 2 and len(mask) != B):
        return mask
    if kind == "keys":
        return mask if mask.dim() == 2 else mask[:, 0]
    return mask[0] if mask.dim() == 3 else mask[0].expand(T, -1)


def _four(mask: Any, B: int) -> Any:
    """A mask of every sample with an axis for heads, and for queries where it has none."""
    if not isinstance(mask, Tensor) or mask.dim() > 3 or (mask.dim() == 2 and len(mask) != B):
        return mask
    return mask[:, None] if mask.dim() == 3 else mask[:, None, None]


def _returned_order(right: Original, seen: list[dict[str, Seen]]) -> str:
    pairs = [(a[n], b[n]) for a, b in zip(right.seen, seen, strict=True) for n in a]
    if all(all(map(same, a.outputs, b.outputs)) for a, b in pairs):
        return ""  # it is something else that differs
    same_form = all(len(a.outputs) == len(b.outputs) and b.steady and b.untouched and all(b.attached) for a, b in pairs)
    return "returned in another order" if same_form and all(_is_permuted(a, b) for a, b in pairs) else ""


def _is_permuted(one: Seen, two: Seen) -> bool:
    order = range(len(one.outputs))
    return any(
        all(same(one.outputs[i], two.outputs[j]) for i, j in zip(order, p, strict=True))
        for p in itertools.islice(itertools.permutations(order), 24)
    )


def _flipped(right: Original, seen: list[dict[str, Seen]]) -> str:
    """The mask arguments that the original must be given inverted to do the same."""
    for count in range(1, len(right.driver.masks) + 1):
        for names in itertools.combinations(right.driver.masks, count):
            sized = zip(right.modules, SIZES, strict=True)
            ours = [results(m, right.driver, s, flip=frozenset(names)) for m, s in sized]
            if not first_difference(ours, seen):
                return f"{', '.join(names)} inverted"
    return ""


def _relabeled(right: Original, modules: list[nn.Module]) -> str:
    """The order in which the original's projections must be stored in a mutant for it to do the same."""
    if right.driver.slots is None:
        return ""
    calls = [next(iter(right.driver.calls(Inputs(size)))) for size in SIZES]
    plans = itertools.product(itertools.permutations("qkv"), range(4), range(3), range(3))
    for plan in itertools.islice(plans, 1, None):
        if all(_fits(right, modules, index, calls[index], plan) for index in (0, 1)):
            for index in range(len(SIZES)):
                _relabel(right, modules, index, plan)
            mine = [results(m, right.driver, s) for m, s in zip(modules, SIZES, strict=True)]
            if (
                not first_difference(right.seen, mine, weights=False)
                and not training_difference(right, modules, False)[0]
            ):
                return f"weights stored in another order: {plan}"
    return ""


def _fits(right: Original, modules: list[nn.Module], index: int, call: Call, plan: Plan) -> bool:
    if not _relabel(right, modules, index, plan):
        return False
    seen, wanted = observe(modules[index], call, backward=False), right.seen[index][call.name]
    return not seen.error and bool(seen.outputs) and same(seen.outputs[0], wanted.outputs[0])


@torch.no_grad()
def _relabel(right: Original, modules: list[nn.Module], index: int, plan: Plan) -> bool:
    """Store the original's projections in a mutant by a plan; False where the shapes forbid it."""
    order, scored, value, output = plan
    size, driver = SIZES[index], right.driver
    ours, mine = driver.slots(right.modules[index], size), driver.slots(modules[index], size)
    jobs = [*zip("qkv", order, (scored, scored, value), strict=True), ("o", "o", output)]
    for role, origin, number in jobs:
        rows = torch.cat([weight for weight, _ in ours[origin]])
        layout = _layout(number, *_heads(ours, origin, size), driver.rotary)
        if layout is None or rows.shape != torch.cat([weight for weight, _ in mine[role]]).shape:
            return False
        biases = [bias for _, bias in ours[origin] if bias is not None]
        _store(mine[role], layout(rows), layout(torch.cat(biases)) if biases else None)
    return True


def _heads(slots: Any, role: str, size: Size) -> tuple[int, int]:
    """The number of heads of a role and their width."""
    count = {role: sum(weight.shape[0] for weight, _ in slots[role]) for role in slots}
    heads = size.H if role in "qo" else count["k"] // size.D
    return heads, count[role] // heads


def _layout(number: int, heads: int, width: int, rotary: bool) -> Layout | None:
    """An order in which the rows of heads may be stored."""
    if number == 0:
        return lambda rows: rows
    if number == 3:
        return (lambda rows: rows.unflatten(0, (heads, 2, -1)).flip(1).flatten(0, 2)) if rotary else None
    first = heads if number == 1 else width
    return lambda rows: rows.unflatten(0, (first, -1)).transpose(0, 1).flatten(0, 1)


def _store(slots: Any, rows: Tensor, biases: Tensor | None) -> None:
    lengths = [weight.shape[0] for weight, _ in slots]
    for (weight, _), part in zip(slots, rows.split(lengths), strict=True):
        weight.copy_(part)
    if biases is not None:
        for (_, bias), part in zip(slots, biases.split(lengths), strict=True):
            bias.copy_(part)
