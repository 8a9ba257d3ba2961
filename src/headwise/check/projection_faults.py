"""Mistakes in how queries, keys and values are made: roles, sharing, splits, turns by position."""

import torch
from torch import Tensor

from headwise.check import lines
from headwise.check.bound import Bound
from headwise.check.diagnosis import Diagnosis, listed
from headwise.check.fits import same
from headwise.check.names import plain
from headwise.check.stages import Projection, Reading
from headwise.check.subject import tensors


def judge_projections(bound: Bound, reading: Reading, result: Diagnosis) -> None:
    """Findings about the three projections."""
    parts = {"query": reading.query, "key": reading.key, "value": reading.value}
    for name, part in parts.items():
        if part is None:
            result.doubts.append(f"how the {name} of a head follows from the input")
    known = {name: part for name, part in parts.items() if part is not None}
    shuffled = [name for name, part in known.items() if part.split != "heads"]
    if shuffled:
        line = lines.split_line(bound.trace, reading.core)
        result.wrong("split-view", f"{listed(shuffled)} of one head hold pieces of several tokens", line)
    elif len(known) == 3:
        result.good.append("head split")
    for name, part in known.items():
        _extras(name, part, result)
    if len(known) == 3:
        _positions(known, reading, result)
        _turned_by_head(bound, known, reading, result)
        _roles(bound, reading, known, result)
        _sharing(bound, reading, known, result)


def _extras(name: str, part: Projection, result: Diagnosis) -> None:
    if part.norm and "the input is normalised first" not in result.variants:
        result.variants.append("the input is normalised first")
    if part.then == "norm":
        result.variants.append("queries and keys are normalised")
        if not part.normalised:
            result.doubts.append(f"the norm of the {name}")
    elif part.then:
        result.doubts.append(f"what happens to the {name} between projection and product")
    if part.position == "added" and "positions are added inside" not in result.variants:
        result.variants.append("positions are added inside")


def _positions(known: dict[str, Projection], reading: Reading, result: Diagnosis) -> None:
    """A turn of queries and keys must depend on their distance alone; values are not turned."""
    query, key = known["query"], known["key"]
    if query.position != "rotary" and key.position != "rotary":
        return
    if query.by_position is None or key.by_position is None:
        result.doubts.append("queries and keys are treated differently by position")
        return
    H = reading.core.query.shape[1]
    a, b = query.by_position.unflatten(1, (H, -1)), key.by_position.unflatten(1, (H, -1))
    T = min(len(a), len(b))
    near = [torch.einsum("hde,hdf->hef", a[t], b[t]) for t in range(T)]
    next_to = [torch.einsum("hde,hdf->hef", a[t + 1], b[t]) for t in range(T - 1)]
    if all(same(m, near[0], 1e-5) for m in near) and all(same(m, next_to[0], 1e-5) for m in next_to):
        result.variants.append("rotary positions")
    else:
        result.doubts.append("the map depends on the position, and not only on the distance")
    if known["value"].position == "rotary":
        result.variants.append("values are turned by position, too")


def _turned_by_head(bound: Bound, known: dict[str, Projection], reading: Reading, result: Diagnosis) -> None:
    """Queries and keys that are turned, every head by its own angle and every position by the same."""
    D = reading.core.query.shape[-1]
    turned = [name for name in ("query", "key") if _only_turned(known[name], D, tensors(bound.thing))]
    if turned:
        line = reading.core.score_nodes[0].line
        result.wrong("rotary-axis", f"{listed(turned)}: the same turn at every position", line)


def _only_turned(part: Projection, D: int, parameters: dict[str, Tensor]) -> bool:
    """Whether a map that knows no position equals a parameter up to a turn inside every head."""
    weight = part.fit.weight
    if part.position or part.then or part.split != "heads" or part.role.found or part.role.plain or weight.shape[0] % D:
        return False
    heads = weight.unflatten(0, (-1, D))
    for parameter in parameters.values():
        if parameter.dim() != 2 or parameter.shape[1] != weight.shape[1] or parameter.shape[0] % D:
            continue
        own = parameter.detach().double().unflatten(0, (-1, D))
        for first in range(len(own) - len(heads) + 1):
            pairs = zip(heads, own[first : first + len(heads)], strict=True)
            if all(same(a.T @ a, b.T @ b, 1e-6) for a, b in pairs):
                return True
    return False


def _roles(bound: Bound, reading: Reading, known: dict[str, Projection], result: Diagnosis) -> None:
    """Inputs and parameters against their names."""
    stated = set(bound.form.roles.values())
    if {"query", "key", "value"} <= stated:
        for name, part in known.items():
            if part.source != name:
                line = lines.projection_line(bound.trace, reading.core, name)
                result.wrong("wrong-role", f"the {name} is made from the argument for the {part.source}", line)
    for name, part in known.items():
        others = {_role_in(n) for n in part.role.names} - {None}
        if len(others) == 1 and others != {name} and _unused(bound, known, name):
            line = lines.projection_line(bound.trace, reading.core, name)
            result.wrong("wrong-role", f"the {name} is made by {part.role.names[0]}", line)


def _role_in(parameter: str) -> str | None:
    words = [plain(p) for p in parameter.split(".")]
    for word in words:
        stripped = (
            word.removesuffix("weight").removesuffix("proj").removesuffix("s").removeprefix("w").removeprefix("proj")
        )
        for role in ("query", "key", "value"):
            if role in word or stripped == role[0] or stripped in (f"to{role[0]}", f"fc{role[0]}", f"linear{role[0]}"):
                return role
    return None


def _unused(bound: Bound, known: dict[str, Projection], name: str) -> bool:
    used = {n for part in known.values() for n in part.role.names}
    return any(_role_in(n) == name and n not in used for n, t in tensors(bound.thing).items() if t.dim() > 1)


def _sharing(bound: Bound, reading: Reading, known: dict[str, Projection], result: Diagnosis) -> None:
    """Between query, key and value, and between heads."""
    parts = {n: p for n, p in known.items() if p.position != "rotary"}
    bare = [name for name, part in known.items() if part.role.plain]
    if bare and not tensors(bound.thing):
        result.variants.append("it has no weights of its own")
    elif bare:
        verb = "are" if len(bare) > 1 else "is"
        result.wrong("no-qkv-proj", f"{listed(bare)} {verb} the input itself")
    elif len(parts) == 3 and all(_proportional(parts["query"], parts[n]) for n in ("key", "value")):
        result.wrong("one-projection", f"all three use {listed(parts['query'].role.names) or 'the same weights'}")
    elif "query" in parts and "key" in parts and _proportional(parts["query"], parts["key"]):
        if _unused(bound, known, "query") or _unused(bound, known, "key"):
            result.wrong("one-projection", "query and key use the same weights")
        else:  # no projection lies idle: it was meant so, as in models that share the two
            result.variants.append("queries and keys share a projection")
    elif "value" in parts and "key" in parts and _proportional(parts["key"], parts["value"]):
        result.wrong("one-projection", "key and value use the same weights")
    H = reading.core.weights.shape[1]
    if H > 1 and not any(f.name == "split-view" for f in result.findings):
        _between_heads(H, reading, known, result)


def _proportional(a: Projection, b: Projection) -> bool:
    if a.fit.weight.shape != b.fit.weight.shape:
        return False
    u, v = a.fit.weight.flatten(), b.fit.weight.flatten()
    return bool(torch.dot(u, v).abs() > (1 - 1e-9) * u.norm() * v.norm())


def _between_heads(H: int, reading: Reading, known: dict[str, Projection], result: Diagnosis) -> None:
    shared = {}
    for name, part in known.items():
        weight = part.fit.weight if part.by_position is None else part.by_position[0]
        width = weight.shape[0] // H
        blocks = weight.unflatten(0, (H, width))
        if part.role.sliced and not part.role.plain:
            whole = weight.shape[1] >= H * width
            own = blocks if not whole else torch.stack([blocks[h].narrow(1, h * width, width) for h in range(H)])
            shared[name] = same(own, own[:1].expand_as(own), 1e-7)
        else:
            shared[name] = same(blocks, blocks[:1].expand_as(blocks), 1e-7)
    if all(shared.values()):
        small = any(part.role.sliced for part in known.values())
        how = (
            "one small matrix is applied to every head's slice of the input"
            if small
            else "every head has the same matrix"
        )
        result.wrong("heads-share-weights", how)
    elif shared["query"] and not shared["key"]:
        result.wrong("heads-share-weights", "all heads ask with the same query")
    elif shared["key"] and shared["value"]:
        result.variants.append("one key/value head for all queries (multi-query)")
    elif any(part.role.sliced for part in known.values()):
        result.variants.append("every head reads only its own slice of the input")
