"""Mistakes in the projections: split, positions, roles, shared weights, and what the maps are made of."""

import contextlib
import functools
import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.check.arguments import CallSizes, batch_for, parameters_of
from headwise.check.binding import Bound
from headwise.check.code.intent import states_norm, states_other_scale
from headwise.check.faults.questions import (
    WEIGHTLESS,
    has_effect,
    has_number,
    idle_role,
    listed,
    named_role,
    near,
    of_stages,
    role_in,
)
from headwise.check.fits import Fit, Role, same, unused_rows
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import modules, tensors
from headwise.check.reading import NONLINEAR, AttentionReading, Projection, multiple, read
from headwise.check.trace import PRODUCTS, VIEWS, Core
from headwise.check.vocabulary import plain

WIDER = 4  # times as wide, for angles of which all but one are zero
SHARED = re.compile(r"shared?|tied", re.IGNORECASE)
TURNED = "row t compares key t with every query, where it should compare query t with every key"
ROTARY = re.compile(r"rope|rotar|rotat|\bcos\b", re.IGNORECASE)
MEMORY = re.compile(r"mem|context|enc|cond|source")  # what only keys and values are made from


@of_stages
def unread_projections(bound: Bound, reading: AttentionReading) -> Found:
    """Queries, keys or values that no map of the input explains."""
    for name in ("query", "key", "value"):
        if name not in reading.projections:
            yield Note("doubt", f"how the {name} of a head follows from the input")


@of_stages
def head_split(bound: Bound, reading: AttentionReading) -> Found:
    """A head must hold a slice of every token, not pieces of several tokens."""
    shuffled = _shuffled(reading)
    if any(part.split == "tokens" for part in reading.projections.values()):
        words = "a token holds numbers of one channel, not the channels of one place"
        yield Finding("tokens-view", words, _line_of_reading(bound))
    elif shuffled:
        words = f"{listed(shuffled)} of one head {'holds' if len(shuffled) == 1 else 'hold'} pieces of several tokens"
        yield Finding("split-view", words, reading.core.split_line(shuffled[0]))
    elif len(reading.projections) == 3:
        yield Note("good", "head split")


def _line_of_reading(bound: Bound) -> int | None:
    """The first view that gives an input with its channels in front the shape (batch, tokens, channels)."""
    nodes, shape = bound.trace.nodes, bound.inputs.query.shape
    for node in (n for n in nodes if n.op in VIEWS and n.parents and n.line is not None):
        before = nodes[node.parents[0]].value.shape
        if node.value.shape == shape and before != shape:
            return node.line
    return next((n.line for n in nodes if n.op in VIEWS and n.value.shape == shape and n.line is not None), None)


def _shuffled(reading: AttentionReading) -> list[str]:
    return [name for name, part in reading.projections.items() if part.split != "heads"]


@of_stages
def norms_and_positions(bound: Bound, reading: AttentionReading) -> Found:
    """What else is done to queries, keys and values."""
    for name, part in reading.projections.items():
        if part.norm:
            yield Note("variant", "the input is normalized first")
        if part.then == "norm":
            yield from _normalized(bound, reading, name)
            if not part.normalized:
                yield Note("doubt", f"the norm of the {name}")
        elif part.then == "nonlinear" and len({p.then for p in reading.projections.values()}) > 1:
            kind, line = reading.core.activation_line(name, NONLINEAR)
            yield Finding("projection-activated", f"the {name} goes through {kind}", line)
        elif part.then:
            yield Note("doubt", f"what happens to the {name} between projection and product")
        if part.position == "added":
            yield Note("variant", "positions are added inside")


def _normalized(bound: Bound, reading: AttentionReading, name: str) -> Found:
    """A norm of queries and keys is a variant; one of them alone, or of the values, is for another purpose."""
    alike = {n for n, part in reading.projections.items() if part.then == "norm"}
    if name != "value" and {"query", "key"} <= alike:
        yield Note("variant", "queries and keys are normalized")
    else:
        yield Note("variant", f"the {name} is normalized")
    if not (name != "value" and {"query", "key"} <= alike) and not states_norm(bound.case, name):
        yield Note("untried", f"why the {name} is normalized" + (" and the other is not" if name != "value" else ""))


@of_stages
def rotary_positions(bound: Bound, reading: AttentionReading) -> Found:
    """A rotation of queries and keys must depend only on their distance; values are not rotated."""
    parts = reading.projections
    if len(parts) < 3 or "rotary" not in (parts["query"].position, parts["key"].position):
        return
    query, key = parts["query"].by_position, parts["key"].by_position
    if query is None or key is None:
        turned, still = ("queries", "keys") if key is None else ("keys", "queries")
        side = parts["key" if key is None else "query"]
        if side.then or side.norm:
            yield Note("doubt", "queries and keys are treated differently by position")
        else:
            line = reading.core.last_step("key" if key is None else "query")
            if parts["value"].position == "rotary":  # rotated in their place
                line = reading.core.same_step_line("value", "query" if key is None else "key") or line
            words = f"{turned} are rotated by their position, {still} are not"
            yield Finding("rotary-one-side", words, line)
        return
    H, T = reading.core.query.shape[1], min(len(query), len(key))
    a, b = query.unflatten(1, (H, -1)), key.unflatten(1, (H, -1))
    near = [torch.einsum("hde,hdf->hef", a[t], b[t]) for t in range(T)]
    next_to = [torch.einsum("hde,hdf->hef", a[t + 1], b[t]) for t in range(T - 1)]
    if all(same(m, near[0], 1e-5) for m in near) and all(same(m, next_to[0], 1e-5) for m in next_to):
        yield Note("variant", "rotary positions")
        yield from _angles(bound, reading, a)
        yield from _offset(bound, reading, a.shape[2])
    elif ROTARY.search(bound.case.source):
        gap = float((near[1] - near[0]).norm() / near[0].norm())
        words = f"moved by one position, two tokens get scores that differ by {gap:.1%}"
        alone = all(
            same(torch.einsum("hde,hdf->hef", m[1], m[0]), torch.einsum("hde,hdf->hef", m[2], m[1]), 1e-5)
            for m in (a, b)
        )
        words += "; queries and keys are each rotated by their distance, but in different pairs" if alone else ""
        yield Finding("rotary-absolute", words, reading.core.step_line("key" if alone else "query"))
    else:
        yield Note("doubt", "the map depends on the position, and not only on the distance")
    if parts["value"].position == "rotary" and re.search(r"rot\w*value|value\w*rot", bound.case.source, re.IGNORECASE):
        yield Note("variant", "values are rotated by position, too")
    elif parts["value"].position == "rotary" and not ROTARY.search(bound.case.source):
        yield Note("untried", "values whose map differs by position")
    elif parts["value"].position == "rotary":
        words = "they differ by position, like queries and keys"
        yield Finding("rotary-values", words, reading.core.same_step_line("value", "query"))


def _offset(bound: Bound, reading: AttentionReading, D: int) -> Found:
    """At the first position neither side, or both, may be rotated."""
    found = [reading.projections[name].role.found for name in ("query", "key")]
    if found[0] == found[1]:
        return
    moved, still = ("key", "query") if found[0] else ("query", "key")
    part = reading.projections[moved]
    first = Fit(part.weight, part.fit.bias, part.fit.residual)
    if _is_only_rotated(replace(part, position="", fit=first), D, bound):
        words = f"at the first position the {moved} is already rotated, the {still} is not"
        yield Finding("rotary-offset", words, reading.core.same_step_line(moved, still))


def _angles(bound: Bound, reading: AttentionReading, maps: Tensor) -> Found:
    """Angles must be those of the table that is stored, or the usual ones."""
    found = _turns(maps)
    if len(found) < 2 < maps.shape[2] and (wider := _maps_of_wider_heads(bound, maps.shape[2])) is not None:
        yield from _angles(bound, reading, wider)
        return
    if len(found) < 2 < maps.shape[2]:
        yield Note("untried", "its rotary angles, of which all but one are zero")
    elif _are_usual(found):
        yield from _base(bound, found, maps.shape[2])
    if len(found) < 2 or _are_usual(found):
        return
    stored = _stored_angles(bound, len(found))
    if stored is None or same(stored, found, 1e-5):
        yield Note("untried", "its rotary angles, which are not a geometric sequence from one")
    else:
        words = f"one position turns the first pair by {float(found[0]):.3g}, the table says {float(stored[0]):.3g}"
        yield Finding("rotary-angle", words, reading.core.step_line("query", outermost=True))


def _maps_of_wider_heads(bound: Bound, D: int) -> Tensor | None:
    """The same (T, H, D, E) with two heads four times as wide, of which more numbers may be rotated."""
    E = 2 * WIDER * D
    if D != bound.sizes.D:
        return None  # this is the wider one
    with contextlib.suppress(Exception):  # its sizes are fixed, or refused
        other = bound.resized(CallSizes(B=batch_for(E), H=2, E=E))
        seen = None if other is None else read(other)
        query = None if seen is None else seen.query
        if seen is not None and query is not None and query.by_position is not None:
            maps: Tensor = query.by_position.unflatten(1, (seen.core.query.shape[1], -1))
            return maps
    return None


def _base(bound: Bound, angles: Tensor, D: int) -> Found:
    """The base of a geometric sequence of angles must be the one that the class was given or names."""
    if len(angles) < 2:
        return
    base = float((angles[0] / angles[1]) ** (D / 2))
    named = {
        n: v for n, v in _settings(bound).items() if re.fullmatch(r"\w*(theta|base)", n) and type(v) in (int, float)
    }
    if named and not any(abs(base / float(v) - 1) < 1e-3 for v in named.values() if v):
        name, value = next(iter(named.items()))
        words = f"the angles fall as with a base of {base:.4g}, where {name} is {value:g}"
        yield Finding("rotary-angle", words, bound.case.line_with(rf"\b{name}\b\s*\*\*|\*\*|pow\("))


def _settings(bound: Bound) -> dict[str, Any]:
    """The values of the constructor's arguments, defaults included."""
    defaults = {p.name: p.default for p in parameters_of(bound.case.target) if p.default is not p.empty}
    return defaults | bound.built.arguments


def _stored_angles(bound: Bound, count: int) -> Tensor | None:
    """The angles of the second row of a stored table of cosines, largest first."""
    for module in modules(bound.thing):
        for table in (b.squeeze() for b in module.buffers() if b.is_floating_point() or b.is_complex()):
            if table.dim() != 2 or len(table) < 2 or table.shape[1] not in (count, 2 * count):
                continue
            row = table[1].angle() if table.is_complex() else table[1].double().clamp(-1, 1).arccos()
            first = table[0].real if table.is_complex() else table[0].double()
            if same(first, torch.ones_like(first), 1e-6):
                return row.abs().double().sort(descending=True).values[:: table.shape[1] // count]
    return None


def _turns(maps: Tensor) -> Tensor:
    """The angles by which the rotation from one position to the next (T, H, D, E) turns, largest first."""
    turn = maps[1, 0] @ torch.linalg.pinv(maps[0, 0])  # (D, D)
    angles = torch.linalg.eigvals(turn).angle().abs().sort(descending=True).values[::2]
    found: Tensor = angles[angles > 1e-12]
    return found


def _are_usual(angles: Tensor) -> bool:
    """Whether they are a geometric sequence from one."""
    if not len(angles) or abs(float(angles[0]) - 1) > 1e-6:
        return False
    if len(angles) < 3:
        return True
    steps = angles.log().diff()
    return bool((steps - steps.mean()).abs().max() < 1e-3 * steps.abs().max())


@of_stages
def rotary_axis(bound: Bound, reading: AttentionReading) -> Found:
    """Queries and keys must not be rotated by the number of their head instead of their position."""
    parts, D = reading.projections, reading.core.query.shape[-1]
    if len(parts) < 3:
        return
    rotated = [name for name in ("query", "key") if _is_only_rotated(parts[name], D, bound)]
    if rotated:
        words = f"{listed(rotated)}: the same rotation at every position"
        yield Finding("rotary-axis", words, reading.core.step_line(rotated[0], outermost=True))


def _is_only_rotated(part: Projection, D: int, bound: Bound) -> bool:
    """Whether a map that does not depend on position equals a parameter up to a rotation inside every head."""
    weight = part.fit.weight
    if part.position or part.then or part.split != "heads" or part.role.found or part.role.plain or weight.shape[0] % D:
        return False
    heads = weight.unflatten(0, (-1, D))
    for parameter in tensors(bound.thing).values():
        if parameter.dim() != 2 or parameter.shape[1] != weight.shape[1] or parameter.shape[0] % D:
            continue
        own = parameter.detach().double().unflatten(0, (-1, D))
        for first in range(len(own) - len(heads) + 1):
            pairs = zip(heads, own[first : first + len(heads)], strict=True)
            if all(multiple(a.T @ a, b.T @ b) is not None for a, b in pairs):
                return True
    return False


@of_stages
def roles(bound: Bound, reading: AttentionReading) -> Found:
    """Inputs and parameters must be used as their names say."""
    parts = reading.projections
    if len(parts) < 3 or _from_one_projection(parts):
        return
    line = functools.partial(_projection_line, bound, reading)
    given = set(bound.form.roles.values())
    if {"query", "key", "value"} <= given:
        turned = (parts["query"].source, parts["key"].source) == ("key", "query") and _is_turned(reading)
        for name, part in parts.items():
            if turned and part.source == "key" and reading.scores is not None and reading.scores.axis == "keys":
                yield Finding("scores-transposed", TURNED, reading.core.turned_line())
            elif part.source != name and not (turned and part.source == "query"):
                whole = part.source in parts and _share_weights(part, parts[part.source])  # another one in its place
                where = _line_of_swap(bound, reading, name, part.source) if whole else line(name)
                exchanged = part.source in parts and parts[part.source].source == name
                passed = reading.core.reader(name).outer if exchanged and named_role(part.role) == part.source else None
                where = passed or where  # where both are passed on, in the other order
                yield Finding("wrong-role", f"the {name} is made from the argument for the {part.source}", where)
    elif "memory" in given and not (given & {"key", "value"}) and parts["query"].source == "query":
        for name in ("key", "value"):
            if parts[name].source == "query":
                memory = [argument for argument, role in bound.form.roles.items() if role == "memory"]
                where = bound.case.overwriting_line(memory) or line(name)
                yield Finding("wrong-role", f"the {name} is made from the queries' input, not from the memory", where)
    elif "memory" in given and not (given & {"key", "value"}) and parts["query"].source == "key":
        memory = [name for name, role in bound.form.roles.items() if role == "memory" and MEMORY.search(plain(name))]
        if memory and {parts["key"].source, parts["value"].source} == {"query"}:
            words = f"the query is made from {memory[0]}, key and value from the tokens that should ask"
            yield Finding("wrong-role", words, line("query"))
    named = {name: named_role(part.role) for name, part in parts.items()}
    for name, part in parts.items():
        other = named[name]
        swapped = other in named and named[other] == name
        if other not in (None, name) and (swapped or _is_unused(bound, parts, name)):
            turned = swapped and {name, other} == {"query", "key"} and reading.scores is not None
            if turned and reading.scores is not None and reading.scores.axis == "queries":
                words = "they sum to one over the axis of the result, not over the one that is summed"
                yield Finding("weights-transposed", words, reading.core.reader("value").line)
                return
            if turned and _is_turned(reading):
                yield Finding("scores-transposed", TURNED, reading.core.turned_line())
                return
            where = _line_of_swap(bound, reading, name, other)
            yield Finding("wrong-role", f"the {name} is made by {part.role.names[0]}", where)
    if not given & {"query", "key", "value"} and not any(named.values()):
        yield from _exchanged_names(bound)
    out = reading.output
    for name, part in parts.items() if out is not None else ():
        shared = out is not None and part.role.names and part.role.names == out.role.names
        if shared and _is_unused(bound, parts, name):
            yield Finding(
                "wrong-role", f"the {name} is made by {part.role.names[0]}, the output projection", line(name)
            )
    if out is not None and named_role(out.role) is not None and not out.role.plain:
        words = f"the output is made by {out.role.names[0]}"
        yield Finding("wrong-role", words, reading.core.output_line())


def _exchanged_names(bound: Bound) -> Found:
    """Names that a call passes in the wrong order; where weights and inputs have no names, nothing else shows it."""
    call = bound.case.exchanged_call()
    if call is not None:
        line, parameter, passed = call
        yield Finding("wrong-role", f"{passed} is passed as {parameter}", line)


def _projection_line(bound: Bound, reading: AttentionReading, name: str) -> int | None:
    """The line that makes queries, keys or values; of a loop that makes several, the line that says from what."""
    line = reading.core.projection_line(name)
    return bound.case.loop_line(line) if reading.core.is_made_with_others(name) else line


def _line_of_swap(bound: Bound, reading: AttentionReading, name: str, other: str | None) -> int | None:
    """The product, where the right projection was made and another tensor used; else the projection."""
    core = reading.core
    own = [t for n, t in tensors(bound.thing).items() if role_in(n) == name and t.dim() >= 2]
    made = any(any(_same_storage(x, t) for x in n.operands for t in own) for n in core.trace.nodes if n.op in PRODUCTS)
    if not made or other is None or core.is_made_with_others(name):
        return _projection_line(bound, reading, name)
    line, reader = core.use_line(name), core.reader(name)
    return reader.line if line == reader.outer and not bound.case.passes_twice(line) else line


def _is_turned(reading: AttentionReading) -> bool:
    """Whether queries and keys change places in the table of weights, not in what is multiplied."""
    core = reading.core
    lines = [core.projection_line(name) for name in ("query", "key")]
    apart = None not in lines and len(set(lines)) == len(lines)
    return apart and core.turned_line() is not None and core.turned_line() not in lines


def _same_storage(x: Tensor, parameter: Tensor) -> bool:
    """Whether an operand holds the numbers of a parameter, in any order of the axes."""
    held = parameter.detach().flatten()
    return x.numel() == held.numel() and torch.equal(x.flatten().sort().values, held.sort().values)


def _is_unused(bound: Bound, parts: dict[str, Projection], name: str) -> bool:
    """Whether a parameter named for this role takes no part in any projection."""
    used = {n for part in parts.values() for n in part.role.names}
    return any(role_in(n) == name and n not in used for n, t in tensors(bound.thing).items() if t.dim() > 1)


@of_stages
def shared_projections(bound: Bound, reading: AttentionReading) -> Found:
    """Query, key and value need weights of their own."""
    parts = reading.projections
    if len(parts) < 3:
        return
    copied = [name for name, part in parts.items() if part.role.plain]
    query, key, value = parts["query"], parts["key"], parts["value"]
    if copied and not tensors(bound.thing):
        yield Note("variant", WEIGHTLESS)
    elif copied and _matter(bound, copied):
        yield Note("doubt", f"how weights for the {copied[0]} act, which is the input itself")
    elif copied:
        given = [argument for argument, role in bound.form.roles.items() if role in (copied[0], "self", "memory")]
        line = bound.case.alias_line(given) or reading.core.first_line(copied[0]) or reading.core.split_line()
        yield Finding("no-qkv-proj", f"{listed(copied)} {'are' if len(copied) > 1 else 'is'} the input itself", line)
    elif _from_one_projection(parts) and SHARED.search(getattr(bound.case.target, "__name__", "")):
        yield Note("variant", "queries, keys and values share a projection")  # as its name says
    elif _from_one_projection(parts):
        words = f"all three use {listed(query.role.names or ['the same weights'])}"
        yield Finding("one-projection", words, _line_of_sharing(bound, reading, "key"))
    elif _share_weights(query, key):
        if _is_unused(bound, parts, "query") or _is_unused(bound, parts, "key"):
            line = _line_of_sharing(bound, reading, "key")
            yield Finding("one-projection", "query and key use the same weights", line)
        else:  # no projection is left over, so it is intended, as in models that share the two
            yield Note("variant", "queries and keys share a projection")
    elif _share_weights(key, value):
        yield Finding("one-projection", "key and value use the same weights", _line_of_sharing(bound, reading, "value"))


def _matter(bound: Bound, names: list[str]) -> bool:
    """Whether there are weights named for each of these, which change the output somewhere else."""
    held = {n: t for n, t in tensors(bound.thing).items() if t.dim() > 1}
    return all(any(role_in(n) == name and has_effect(bound, t) for n, t in held.items()) for name in names)


def _line_of_sharing(bound: Bound, reading: AttentionReading, name: str) -> int | None:
    """The line that uses weights a second time, or that puts one layer into several places."""
    part = reading.projections[name]
    owner = part.role.names[0] if part.role.names else ""
    listed = re.match(r"\w+\.\d+\.", owner) is not None
    left = idle_role(bound, reading)
    if (twice := _assigned_twice(bound, owner)) is not None:
        return twice
    line = _projection_line(bound, reading, name) if left is None else reading.core.use_line(left)
    return (bound.case.line_of_attribute(owner) if listed else None) or line


def _assigned_twice(bound: Bound, owner: str) -> int | None:
    """The line that gives one layer two names."""
    inner = vars(bound.thing).get("_modules", {})
    layer = inner.get(owner.partition(".")[0])
    names = [name for name, other in inner.items() if other is layer and layer is not None]
    return bound.case.line_of_attribute(names[-1]) if len(names) > 1 else None


def _from_one_projection(parts: dict[str, Projection]) -> bool:
    query, key, value = parts["query"], parts["key"], parts["value"]
    copied = any(part.role.plain for part in parts.values())
    return not copied and _share_weights(query, key) and _share_weights(query, value)


def _share_weights(a: Projection, b: Projection) -> bool:
    """Whether two maps without rotary positions are multiples of each other."""
    if "rotary" in (a.position, b.position) or a.fit.weight.shape != b.fit.weight.shape:
        return False
    u, v = a.fit.weight.flatten(), b.fit.weight.flatten()
    return bool(torch.dot(u, v).abs() > (1 - 1e-9) * u.norm() * v.norm())


@of_stages
def weights_of_maps(bound: Bound, reading: AttentionReading) -> Found:
    """Every map must be one of the learner's own weights, used once and not scaled."""
    maps = {name: (part.role, part.fit) for name, part in reading.projections.items() if not part.position}
    if reading.output is not None:
        maps["output"] = (reading.output.role, reading.output.fit)
    core = reading.core
    for name, (role, solved) in maps.items():
        line = core.output_line() if name == "output" else core.projection_line(name)
        if not role.found and not role.plain:
            others = {n for other, (held, _) in maps.items() if other != name for n in held.names}
            others |= {n for n in tensors(bound.thing) if role_in(n) not in (None, name)}
            yield from _product_of_two(bound, core, name, solved.weight, line, others)
        elif role.factor is None and not role.plain and name in ("value", "output"):
            yield Note("untried", f"the rows of the {name} have different factors")
        elif not role.own_bias and not _is_separate_bias(bound, name, maps):
            times, wrong = _repeated_bias(bound, solved.bias), _wrong_bias(bound, name, solved.bias)
            if wrong is not None:
                yield Finding(*wrong, line)
            elif times is None:
                yield Note("untried", f"what is added to the {name} beside its projection")
            else:
                yield Finding("bias-repeated", f"the bias of the {name} is added {times} times", line)
    factors = [maps[name][0].factor for name in ("value", "output") if name in maps]
    averaged = reading.output is not None and reading.output.merge == "mean"
    if len(factors) == 2 and not averaged and None not in factors and not has_number(bound):
        total = math.prod(factor for factor in factors if factor is not None)
        if not near(total, 1.0) and states_other_scale(bound.case) is None:
            first = factors[0] is not None and not near(factors[0], 1.0)
            line = (core.value_scale_line() or core.projection_line("value")) if first else None
            line = line or core.factor_line() or core.output_line()
            yield Finding("values-scaled", f"they are multiplied by {total:.4g}", line)


def _is_separate_bias(bound: Bound, name: str, maps: dict[str, tuple[Role, Fit]]) -> bool:
    """Whether a bias is a parameter beside one matrix for all three that no layer or name gives to another one."""
    role, solved = maps[name]
    others = {n.rpartition(".")[0] for other, (held, _) in maps.items() if other != name for n in held.names}
    for held, tensor in tensors(bound.thing).items():
        owner = held.rpartition(".")[0]
        if tensor.numel() == len(solved.bias) and role_in(held) in (None, name) and not (owner and owner in others):
            own = tensor.detach().double().flatten()
            if any(same(solved.bias, factor * own, 1e-6) for factor in (1.0, role.factor or 1.0)):
                return True
    return False


def _repeated_bias(bound: Bound, bias: Tensor) -> int | None:
    """How many times one of the learner's biases was added, where that is several times."""
    for held in tensors(bound.thing).values():
        if held.dim() == 1 and held.shape == bias.shape:
            own = held.detach().double()
            factor = float((own * bias).sum() / (own * own).sum())
            if same(bias, factor * own, 1e-6) and round(factor) > 1 and near(factor, round(factor)):
                return round(factor)
    return None


def _wrong_bias(bound: Bound, name: str, bias: Tensor) -> tuple[str, str] | None:
    """The mistake, and its words, where a bias is subtracted or comes from another projection's part of a parameter."""
    for held, tensor in tensors(bound.thing).items():
        parts = tensor.detach().double().flatten()
        if tensor.dim() > 2 or len(parts) % len(bias) or not len(parts) <= 3 * len(bias):
            continue
        for number, part in enumerate(parts.unflatten(0, (-1, len(bias)))):
            if same(bias, -part, 1e-6):
                return "bias-subtracted", f"{held} is subtracted from the {name}"
            if same(bias, part, 1e-6):
                return "bias-foreign", f"part {number + 1} of {held} is added to the {name}"
    return None


def _is_made_of(weight: Tensor, product: Tensor) -> bool:
    return weight.shape == product.shape and multiple(weight, product) is not None


def _product_of_two(bound: Bound, core: Core, name: str, weight: Tensor, line: int | None, others: set[str]) -> Found:
    """A map that is a product of two weights: of one with itself, which is a mistake, or of two different ones."""
    held = _matrices(bound)
    for first, a in held.items():
        for second, b in held.items():
            if a.shape[1] == b.shape[0] and any(_is_made_of(weight, m) for m in (a @ b, (a @ b).T)):
                used = [n for n in (first, second) if n in others]
                if first == second or used:
                    line = line if first == second else core.weight_line(held[used[0]]) or line
                    yield Finding("projected-twice", f"the {name} is made by {first} and {second}", line)
                else:
                    yield Note("variant", f"two linear layers make the {name}")
                return
    yield Note("untried", f"which weights make the {name}")


def _matrices(bound: Bound) -> dict[str, Tensor]:
    """Every matrix by its name, and the three parts of one that is three times as high as it is wide."""
    held = {n: t.detach().double() for n, t in tensors(bound.thing).items() if t.dim() == 2}
    packed = {n: t.chunk(3) for n, t in held.items() if t.shape[0] == 3 * t.shape[1]}
    return held | {f"part {i} of {n}": part for n, parts in packed.items() for i, part in enumerate(parts, 1)}


@of_stages
def shared_heads(bound: Bound, reading: AttentionReading) -> Found:
    """Every head needs weights of its own; sharing keys and values is a variant."""
    parts, H = reading.projections, reading.core.weights.shape[1]
    if len(parts) < 3 or H == 1 or _shuffled(reading):
        return
    shared = {name: _is_shared(part, H) for name, part in parts.items()}
    if overlapping := [name for name, part in parts.items() if _overlaps(part, H)]:
        words = f"{listed(overlapping)}: a head has some of its rows in common with another one, but not all"
        yield Finding("heads-overlap", words, reading.core.taken_line(overlapping[0]) or reading.core.split_line())
        return
    sliced = any(part.role.sliced for part in parts.values())
    if all(shared.values()) and sliced:
        line = reading.core.projection_line("query")
        yield Finding("heads-share-weights", "one small matrix is applied to every head's slice of the input", line)
    elif all(shared.values()):
        owner = parts["query"].role.names[0] if parts["query"].role.names else ""
        taken = reading.core.taken_line("query") if _leaves_rows(bound, parts, "query") else None
        line = taken or bound.case.line_of_attribute(owner) or reading.core.projection_line("query")
        yield Finding("heads-share-weights", "every head has the same matrix", line)
    elif shared["query"] and not shared["key"]:
        yield Finding("heads-share-weights", "all heads use the same query")
    elif shared["key"] and shared["value"]:
        yield Note("variant", "one key/value head for all queries (multi-query)")
    elif alike := next((name for name in ("key", "value") if shared[name] and _leaves_rows(bound, parts, name)), None):
        words = f"all heads use the same {alike}; other rows of {parts[alike].role.names[0]} are never read"
        line = reading.core.taken_line(alike) or reading.core.use_line(alike)
        yield Finding("heads-share-weights", words, line)
    elif sliced:
        yield Note("variant", "every head reads only its own slice of the input")


def _leaves_rows(bound: Bound, parts: dict[str, Projection], name: str) -> bool:
    """Whether a parameter that makes this one of the three has rows that no projection reads."""
    held = tensors(bound.thing)
    names = [n for n in parts[name].role.names if held[n].dim() == 2]
    grouped = bool(bound.built.names_with_role("kv_heads"))  # then it may be a matter of groups, which has its names
    return not grouped and any(unused_rows([part.weight for part in parts.values()], held[n]) for n in names)


def _overlaps(part: Projection, H: int) -> bool:
    """Whether two heads are made by some of the same rows, but not by all of them, as whole groups are."""
    rows = part.weight.unflatten(0, (H, -1))  # (H, D, E)
    if rows.shape[1] == 1 or part.role.sliced or part.role.plain:
        return False
    exact = "donot_use_mm_for_euclid_dist"  # a product would leave rounding errors between equal rows
    alike = [[torch.cdist(a, b, compute_mode=exact).amin(1) < 1e-9 * rows.norm() for b in rows] for a in rows]
    pairs = (alike[i][j] for i in range(H) for j in range(i))
    return any(bool(pair.any()) and not bool(pair.all()) for pair in pairs)


def _is_shared(part: Projection, H: int) -> bool:
    """Whether all heads have the same block of weights."""
    width = part.weight.shape[0] // H
    blocks = part.weight.unflatten(0, (H, width))
    if part.role.sliced and not part.role.plain and part.weight.shape[1] >= H * width:
        blocks = torch.stack([blocks[h].narrow(1, h * width, width) for h in range(H)])
    return same(blocks, blocks[:1].expand_as(blocks), 1e-7)
