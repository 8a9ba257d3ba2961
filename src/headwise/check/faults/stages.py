"""Mistakes in the stages of attention: projections, scores, output. Each function checks one thing in the reading."""

import ast
import functools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from headwise.check.arguments import constructor_role, parameters_of, plain
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, Inputs, leaves, make_inputs, modules, signature, tensors
from headwise.check.code.loader import NAME, Case
from headwise.check.fits import Role, same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.proof import TOLERANCE, changed_maps, prediction_error
from headwise.check.reading import AttentionReading, Projection, pattern, read
from headwise.check.trace import PRODUCTS, unnormalized_scores

WEIGHTLESS = "it has no weights of its own"
SINGLE = "a single head"
MULTI_HEAD = re.compile(r"multi_?head|mha\b|mhsa\b", re.IGNORECASE)
# A layer named for the output, and as wide as its input: not the one that predicts words or classes.
OUTPUT_LAYER = re.compile(
    r"self\.(\w*proj\w*|\w*out\w*|w_?o|dense|fc_?o\w*|o|linear)\s*=\s*[\w.]*Linear\(\s*([\w.]+)\s*,\s*(\2)\s*[,)]",
    re.IGNORECASE,
)
PARTIAL = re.compile(r"window|local|block|axial|swin|chunk|spars|stride|dilat|band|longformer|bigbird", re.IGNORECASE)
OUTPUT_NAME = re.compile(r"^(\w*proj\w*|\w*out\w*|[wb]_?o|dense|fc_?o\w*|o|unify\w*)$", re.IGNORECASE)
MOVED = 1e-9  # relative change that counts; everything is computed in double precision
OUTPUT_CLASS = re.compile(r"\w*(Self|Attention|Attn)\w*Output\b")

Fault = Callable[[Bound, AttentionReading | None], Found]


def of_stages(question: Callable[[Bound, AttentionReading], Found]) -> Fault:
    """Run a check only where attention between tokens was read."""

    @functools.wraps(question)
    def asked(bound: Bound, reading: AttentionReading | None) -> Found:
        if reading is not None and reading.between_tokens:
            yield from question(bound, reading)

    return asked


def unread_attention(bound: Bound, reading: AttentionReading | None) -> Found:
    """There must be a product of queries and keys that goes through a softmax to the values."""
    if reading is not None:
        return
    logarithm = next((n for n in bound.trace.nodes if n.op == "_log_softmax" and n.value.dim() >= 3), None)
    if logarithm is not None:
        yield Finding("softmax-missing", "a log-softmax takes its place", logarithm.line)
        return
    bare = unnormalized_scores(bound.trace, bound.inputs.query.shape[1])
    if bare is not None:
        line = bound.case.alias_after(bare.line) or bare.line
        yield Finding("softmax-missing", "scores are multiplied with the values as they are", line)
        return
    divided = bound.trace.misaligned_softmax()
    if divided is not None:
        sums = divided.value.sum(-1).flatten()
        words = f"exponentials are divided by sums of another axis: rows sum to {_numbers(sums)}"
        yield Finding("softmax-axis", words, divided.line)
        return
    yield from _isolated_tokens(bound)
    yield Note("doubt", "no product of queries and keys that goes through a softmax to values was seen")


def _numbers(values: Tensor) -> str:
    """The first two of many numbers."""
    return f"{float(values[0]):.4g}, {float(values[1]):.4g}, …"


def _isolated_tokens(bound: Bound) -> Iterator[Finding]:
    """Tokens that no other token influences, or only some do although the class name does not say so."""
    named = NAME.search(getattr(bound.case.target, "__name__", "")) is not None
    projects = len({role_in(name) for name in tensors(bound.thing)} - {None}) == 3
    moved = influence(bound) if bound.trace.softmax_nodes() or (named and projects) else None
    if moved is None or len(moved) < 3:
        return
    alone = torch.eye(len(moved), dtype=torch.bool)
    part = moved.diagonal().all() and torch.equal(moved, moved.T) and not moved.all()
    if not (moved & ~alone).any():
        line = bound.trace.line_of_values()
        yield Finding("tokens-alone", "a token's output stays the same whatever the other tokens are", line)
    elif part and not PARTIAL.search(getattr(bound.case.target, "__name__", "")):
        row = int((~moved).any(1).nonzero()[0])
        unseen = ", ".join(str(int(j)) for j in (~moved[row]).nonzero()[:3])
        yield Finding("sees-a-part", f"token {row} and token {unseen} do not influence each other")


def influence(bound: Bound) -> Tensor | None:
    """(T, T), True where a change of input token j changes output token i; None where that cannot be measured."""
    T, before = bound.inputs.query.shape[1], bound.output
    if bound.inputs.key.shape[1] != T or before is None or before.dim() != 3 or before.shape[1] != T:
        return None
    found = torch.zeros(T, T, dtype=torch.bool)
    for j in range(T):
        after = bound.output_of(_changed(bound.inputs, j))
        if after is None or after.shape != before.shape:
            return None
        found[:, j] = (after - before).abs().amax((0, 2)) > MOVED * before.abs().max()
    return found


def _changed(inputs: Inputs, j: int) -> Inputs:
    """The same inputs with another token at position j; a tensor in several roles stays one tensor."""
    made: dict[int, Tensor] = {}
    for x in inputs:
        if id(x) not in made:
            other = x.clone()
            other[:, j] = other[:, j].flip(-1) + 1
            made[id(x)] = other
    return Inputs(*(made[id(x)] for x in inputs))


@of_stages
def unused_attention(bound: Bound, reading: AttentionReading) -> Found:
    """The result must depend on the product of weights and values."""
    if not reading.used:
        words = "what is returned does not depend on the product of weights and values"
        ends = [reading.core.trace.nodes[n].line for n in reading.core.trace.returned if n is not None]
        yield Finding("attention-unused", words, next((n for n in ends if n), reading.core.trace.last_line()))


def attention_table(bound: Bound, reading: AttentionReading | None) -> Found:
    """The weights must be a table of queries × keys."""
    if reading is None or reading.between_tokens:
        return
    rows, columns = reading.core.weights.shape[-2:]
    T, S = bound.inputs.query.shape[1], bound.inputs.key.shape[1]
    H, line = asked_heads(bound) or bound.sizes.H, reading.core.score_line
    words = f"the weights are a table of {rows}×{columns} for {T} tokens"
    if columns == rows and rows in (bound.sizes.D, bound.sizes.E) and rows != H:
        yield Finding("attends-over-features", words, line)
    elif columns == rows == H or columns in (bound.sizes.H, bound.sizes.D):
        yield Finding("attends-over-heads", f"{words} and {H} heads", line)
    elif columns == rows == bound.inputs.query.shape[0]:
        yield Finding("attends-over-batch", words, line)
    else:
        yield Note("doubt", f"the weights are a table of {rows}×{columns} for {T} queries and {S} keys")


def asked_heads(bound: Bound) -> int | None:
    """The number of heads that the constructor was given."""
    given = [v for k, v in bound.built.arguments.items() if constructor_role(k) == "heads" and type(v) is int]
    if not given and bound.built.config is not None:
        return bound.sizes.H
    return given[0] if given else None


def _listed(words: list[str]) -> str:
    """`query, key and value`"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


# Projections.


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
    if shuffled:
        words = f"{_listed(shuffled)} of one head hold pieces of several tokens"
        yield Finding("split-view", words, reading.core.split_line())
    elif len(reading.projections) == 3:
        yield Note("good", "head split")


def _shuffled(reading: AttentionReading) -> list[str]:
    return [name for name, part in reading.projections.items() if part.split != "heads"]


@of_stages
def norms_and_positions(bound: Bound, reading: AttentionReading) -> Found:
    """What else is done to queries, keys and values."""
    for name, part in reading.projections.items():
        if part.norm:
            yield Note("variant", "the input is normalized first")
        if part.then == "norm":
            yield Note("variant", "queries and keys are normalized")
            if not part.normalized:
                yield Note("doubt", f"the norm of the {name}")
        elif part.then:
            yield Note("doubt", f"what happens to the {name} between projection and product")
        if part.position == "added":
            yield Note("variant", "positions are added inside")


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
            yield Finding(
                "rotary-one-side",
                f"{turned} are rotated by their position, {still} are not",
                reading.core.projection_line("query" if key is None else "key"),
            )
        return
    H, T = reading.core.query.shape[1], min(len(query), len(key))
    a, b = query.unflatten(1, (H, -1)), key.unflatten(1, (H, -1))
    near = [torch.einsum("hde,hdf->hef", a[t], b[t]) for t in range(T)]
    next_to = [torch.einsum("hde,hdf->hef", a[t + 1], b[t]) for t in range(T - 1)]
    if all(same(m, near[0], 1e-5) for m in near) and all(same(m, next_to[0], 1e-5) for m in next_to):
        yield Note("variant", "rotary positions")
        if not _has_usual_angles(a):
            yield Note("untried", "its rotary angles, which are not a geometric sequence from one")
    else:
        yield Note("doubt", "the map depends on the position, and not only on the distance")
    if parts["value"].position == "rotary":
        yield Note("variant", "values are rotated by position, too")


def _has_usual_angles(maps: Tensor) -> bool:
    """Whether the rotation from one position to the next (T, H, D, E) turns by angles in a geometric sequence."""
    turn = maps[1, 0] @ torch.linalg.pinv(maps[0, 0])  # (D, D)
    angles = torch.linalg.eigvals(turn).angle().abs().sort(descending=True).values[::2]
    angles = angles[angles > 1e-12]
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
    rotated = [name for name in ("query", "key") if _is_only_rotated(parts[name], D, tensors(bound.thing))]
    if rotated:
        words = f"{_listed(rotated)}: the same rotation at every position"
        yield Finding("rotary-axis", words, reading.core.score_line)


def _is_only_rotated(part: Projection, D: int, parameters: dict[str, Tensor]) -> bool:
    """Whether a map that does not depend on position equals a parameter up to a rotation inside every head."""
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


@of_stages
def roles(bound: Bound, reading: AttentionReading) -> Found:
    """Inputs and parameters must be used as their names say."""
    parts = reading.projections
    if len(parts) < 3 or _from_one_projection(parts):
        return
    line = reading.core.projection_line
    given = set(bound.form.roles.values())
    if {"query", "key", "value"} <= given:
        for name, part in parts.items():
            if part.source != name:
                yield Finding("wrong-role", f"the {name} is made from the argument for the {part.source}", line(name))
    elif "memory" in given and not (given & {"key", "value"}) and parts["query"].source == "query":
        for name in ("key", "value"):
            if parts[name].source == "query":
                yield Finding(
                    "wrong-role", f"the {name} is made from the queries' input, not from the memory", line(name)
                )
    named = {name: _named_role(part.role) for name, part in parts.items()}
    for name, part in parts.items():
        other = named[name]
        swapped = other in named and named[other] == name
        if other not in (None, name) and (swapped or _is_unused(bound, parts, name)):
            where = _line_of_swap(bound, reading, name, other)
            yield Finding("wrong-role", f"the {name} is made by {part.role.names[0]}", where)
    out = reading.output
    for name, part in parts.items() if out is not None else ():
        shared = out is not None and part.role.names and part.role.names == out.role.names
        if shared and _is_unused(bound, parts, name):
            yield Finding(
                "wrong-role", f"the {name} is made by {part.role.names[0]}, the output projection", line(name)
            )
    if out is not None and _named_role(out.role) is not None and not out.role.plain:
        words = f"the output is made by {out.role.names[0]}"
        yield Finding("wrong-role", words, reading.core.output_line())


def _line_of_swap(bound: Bound, reading: AttentionReading, name: str, other: str | None) -> int | None:
    """The product, where the right projection was made and another tensor used; else the projection."""
    core = reading.core
    own = [t for n, t in tensors(bound.thing).items() if role_in(n) == name and t.dim() == 2]
    made = any(any(_same_storage(x, t) for x in n.operands for t in own) for n in core.trace.nodes if n.op in PRODUCTS)
    if not made or other is None:
        return core.projection_line(name)
    node = core.nodes.products[0] if name == "value" else core.nodes.scores[0]
    return node.outer or node.line


def _same_storage(x: Tensor, parameter: Tensor) -> bool:
    """Whether an operand holds the numbers of a parameter, transposed or not."""
    held = parameter.detach()
    return any(x.shape == m.shape and torch.equal(x, m) for m in (held, held.T))


def _named_role(role: Role) -> str | None:
    """The one role that the names of the parameters say, if they all say one."""
    named = {role_in(name) for name in role.names}
    return named.pop() if len(named) == 1 else None


def role_in(parameter: str) -> str | None:
    """Which of query, key and value the name of a parameter says it makes; None where it says none or several."""
    for word in (plain(part) for part in parameter.split(".")):
        short = (
            word.removesuffix("weight").removesuffix("proj").removesuffix("s").removeprefix("w").removeprefix("proj")
        )
        for role in ("query", "key", "value"):
            if role in word or short in (role[0], f"b{role[0]}", f"to{role[0]}", f"fc{role[0]}", f"linear{role[0]}"):
                return role
    return None


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
    elif copied:
        line = reading.core.first_line(copied[0]) or reading.core.split_line()
        yield Finding("no-qkv-proj", f"{_listed(copied)} {'are' if len(copied) > 1 else 'is'} the input itself", line)
    elif _from_one_projection(parts):
        words = f"all three use {_listed(query.role.names or ['the same weights'])}"
        yield Finding("one-projection", words, _line_of_sharing(bound, reading, "key"))
    elif _share_weights(query, key):
        if _is_unused(bound, parts, "query") or _is_unused(bound, parts, "key"):
            line = _line_of_sharing(bound, reading, "key")
            yield Finding("one-projection", "query and key use the same weights", line)
        else:  # no projection is left over, so it is intended, as in models that share the two
            yield Note("variant", "queries and keys share a projection")
    elif _share_weights(key, value):
        yield Finding("one-projection", "key and value use the same weights", _line_of_sharing(bound, reading, "value"))


def _line_of_sharing(bound: Bound, reading: AttentionReading, name: str) -> int | None:
    """The line that uses weights a second time, or that puts one layer into several places."""
    part = reading.projections[name]
    owner = part.role.names[0] if part.role.names else ""
    listed = re.match(r"\w+\.\d+\.", owner) is not None
    return (bound.case.line_of_attribute(owner) if listed else None) or reading.core.projection_line(name)


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
            yield from _product_of_two(bound, name, solved.weight, line, others)
        elif role.factor is None and not role.plain and name in ("value", "output"):
            yield Note("untried", f"the rows of the {name} have different factors")
        elif not role.own_bias:
            times = _repeated_bias(bound, solved.bias)
            if times is None:
                yield Note("untried", f"what is added to the {name} beside its projection")
            else:
                yield Finding("bias-repeated", f"the bias of the {name} is added {times} times", line)
    factors = [maps[name][0].factor for name in ("value", "output") if name in maps]
    averaged = reading.output is not None and reading.output.merge == "mean"
    if len(factors) == 2 and not averaged and None not in factors and not _has_number(bound):
        total = math.prod(factor for factor in factors if factor is not None)
        if not _near(total, 1.0):
            first = factors[0] is not None and not _near(factors[0], 1.0)
            line = (core.value_scale_line() or core.projection_line("value")) if first else None
            line = line or core.factor_line() or core.output_line()
            yield Finding("values-scaled", f"they are multiplied by {total:.4g}", line)


def _repeated_bias(bound: Bound, bias: Tensor) -> int | None:
    """How many times one of the learner's biases was added, where that is several times."""
    for held in tensors(bound.thing).values():
        if held.dim() == 1 and held.shape == bias.shape:
            own = held.detach().double()
            factor = float((own * bias).sum() / (own * own).sum())
            if same(bias, factor * own, 1e-6) and round(factor) > 1 and _near(factor, round(factor)):
                return round(factor)
    return None


def _product_of_two(bound: Bound, name: str, weight: Tensor, line: int | None, others: set[str]) -> Found:
    """A map that is a product of two weights: of one with itself, which is a mistake, or of two different ones."""
    held = {n: t.detach().double() for n, t in tensors(bound.thing).items() if t.dim() == 2}
    for first, a in held.items():
        for second, b in held.items():
            if a.shape[1] == b.shape[0] and any(_is_multiple(weight, m) for m in (a @ b, (a @ b).T)):
                used = [n for n in (first, second) if n in others]
                if first == second or used:
                    yield Finding("projected-twice", f"the {name} is made by {first} and {second}", line)
                else:
                    yield Note("variant", f"two linear layers make the {name}")
                return
    yield Note("untried", f"which weights make the {name}")


def _is_multiple(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    factor = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
    return same(a, factor * b, 1e-7)


def _has_number(bound: Bound) -> bool:
    """Whether there is a parameter of a single number: a learned gate."""
    return any(t.numel() == 1 and t.requires_grad for t in tensors(bound.thing).values())


@of_stages
def shared_heads(bound: Bound, reading: AttentionReading) -> Found:
    """Every head needs weights of its own; sharing keys and values is a variant."""
    parts, H = reading.projections, reading.core.weights.shape[1]
    if len(parts) < 3 or H == 1 or _shuffled(reading):
        return
    shared = {name: _is_shared(part, H) for name, part in parts.items()}
    sliced = any(part.role.sliced for part in parts.values())
    if all(shared.values()) and sliced:
        line = reading.core.projection_line("query")
        yield Finding("heads-share-weights", "one small matrix is applied to every head's slice of the input", line)
    elif all(shared.values()):
        owner = parts["query"].role.names[0] if parts["query"].role.names else ""
        line = bound.case.line_of_attribute(owner) or reading.core.projection_line("query")
        yield Finding("heads-share-weights", "every head has the same matrix", line)
    elif shared["query"] and not shared["key"]:
        yield Finding("heads-share-weights", "all heads use the same query")
    elif shared["key"] and shared["value"]:
        yield Note("variant", "one key/value head for all queries (multi-query)")
    elif sliced:
        yield Note("variant", "every head reads only its own slice of the input")


def _is_shared(part: Projection, H: int) -> bool:
    """Whether all heads have the same block of weights."""
    width = part.weight.shape[0] // H
    blocks = part.weight.unflatten(0, (H, width))
    if part.role.sliced and not part.role.plain and part.weight.shape[1] >= H * width:
        blocks = torch.stack([blocks[h].narrow(1, h * width, width) for h in range(H)])
    return same(blocks, blocks[:1].expand_as(blocks), 1e-7)


# Scores.


@of_stages
def unread_scores(bound: Bound, reading: AttentionReading) -> Found:
    """Weights that do not follow from queries and keys."""
    if reading.scores is not None:
        return
    rounded, twice = reading.core.rounding(), reading.core.earlier_softmax()
    if twice is not None:
        words = "the result of one softmax goes through another"
        yield Finding("softmax-twice", words, twice.line)
    elif not bool(torch.isfinite(reading.core.weights).all()):
        rows = ~torch.isfinite(reading.core.weights).all(-1)
        words = f"without any mask argument, {int(rows.sum())} of {rows.numel()} rows of weights are NaN"
        yield Finding("mask-nan", words, reading.core.mask_line())
    elif rounded is None:
        yield Note("doubt", "how weights follow from queries and keys")
    else:
        words = "scores are rounded to whole numbers before the softmax (// is a division that rounds down)"
        yield Finding("scale-other", words, rounded.line)


@of_stages
def softmax(bound: Bound, reading: AttentionReading) -> Found:
    """Weights must sum to one over the keys, and in evaluation mode nothing may happen to them afterwards."""
    scores, core = reading.scores, reading.core
    if scores is None:
        return
    if scores.axis == "keys":
        yield Note("good", "softmax axis")
    else:
        yield Finding("softmax-axis", f"weights sum to 1 over {scores.axis}, not over keys", core.softmax_line)
    if scores.empty is not None and int(scores.empty[0, 0].sum()) > 1:
        words = f"without any mask argument, {int(scores.empty[0, 0].sum())} rows of weights in a table are NaN"
        yield Finding("mask-nan", words, core.mask_line() or core.softmax_line)
    if scores.after == "random":
        yield Finding("dropout-in-eval", "weights are dropped at random after eval()", core.trace.dropout_line())
    if scores.after == "masked":
        yield Finding("mask-after-softmax", "weights are set to zero after the softmax", core.softmax_line)
    if scores.leaks:
        yield Finding("mask-leaks", "future scores are set to a number near zero", core.mask_line())
    if scores.relative:
        yield Note("variant", "a relative position term is added to the scores")
        if not scores.relative_is_linear:
            yield Note("untried", "the term that is added to the scores")
    if scores.bias is not None:
        yield Note("variant", "a bias by position is added to the scores")
        if _grows_with_distance(scores.bias, scores.visible[0]):
            words = "the bias grows with the distance, so that far tokens get more weight"
            yield Finding("bias-sign", words, core.bias_line())


def _grows_with_distance(bias: Tensor, visible: Tensor) -> bool:
    """Whether a bias (H, T, S) is a positive multiple of the distance in every head, where a key is visible."""
    H, T, S = bias.shape
    away = (torch.arange(T)[:, None] - torch.arange(S)).abs().to(bias.dtype).expand(H, T, S)
    count = visible.sum(-1, keepdim=True).clamp_min(1)
    away = (away - (away * visible).sum(-1, keepdim=True) / count) * visible
    slope = (away * bias).sum((1, 2)) / (away * away).sum((1, 2)).clamp_min(1e-300)
    return bool((slope > 1e-9).all()) and same(bias * visible, slope[:, None, None] * away, 1e-6)


@of_stages
def scale(bound: Bound, reading: AttentionReading) -> Found:
    """Scores must be divided by √D; to give another scale a name of its own, add it to `_scale_name`."""
    scores, D = reading.scores, reading.core.query.shape[-1]
    if scores is None or any(p is not None and p.then == "norm" for p in (reading.query, reading.key)):
        return  # a norm decides the size of the scores
    if _has_learned_scale(bound, reading):
        yield Note("variant", "a learned scale")
        return
    if scores.by_head:
        yield Note("untried", "every head has its own scale, and no parameter explains it")
        return
    factors = [None if p is None else p.role.factor for p in (reading.query, reading.key)]
    total = scores.factor * math.prod(1.0 if factor is None else factor for factor in factors)
    right, after, line = 1 / math.sqrt(D), scores.after_factor, reading.core.scale_line()
    if _near(total, right):
        if _near(after, 1.0):
            yield Note("good", f"scale 1/√{D}")
    elif _near(total, 1.0) and (scores.bias is not None or _may_add_positions(bound)):
        yield Note("variant", "scores are not scaled, beside a bias (as in T5)")
    elif None in factors:
        yield Note("doubt", f"the scale of the scores: {total:.4g} was measured where 1/√{D} = {right:.4g} is usual")
    else:
        line = _line_of_stored_scale(bound, reading, right) or line
        yield Finding(_scale_name(total, D, bound), _scale_words(total, D), line)
    if not _near(after, 1.0) and scores.after != "random":
        words = f"weights are multiplied by {scores.after_factor:.4g} after the softmax"
        yield Finding("scale-after-softmax", words, line)


def _line_of_stored_scale(bound: Bound, reading: AttentionReading, right: float) -> int | None:
    """The line of the constructor that computes a wrong scale, where the line that applies it only reads it."""
    text = bound.case.text(reading.core.scale_line())
    for name in re.findall(r"self\.(\w+)", text):
        value = getattr(bound.thing, name, None)
        number = float(value) if isinstance(value, float | Tensor) and torch.as_tensor(value).numel() == 1 else None
        inverse = "scal" in name.lower() and _is_multiplied(text, name)  # a scale is what scores are multiplied with
        good = (right, right**0.5) if inverse else (right, 1 / right, right**0.5, right**-0.5)
        if number and not any(_near(number, value) for value in good):
            return bound.case.line_of_attribute(name)
    return None


def _is_multiplied(text: str, name: str) -> bool:
    """Whether a line multiplies with an attribute rather than dividing by it."""
    return re.search(rf"/\s*(math\.sqrt\()?self\.{name}\b", text) is None


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-4 * abs(b)


def _scale_name(total: float, D: int, bound: Bound) -> str:
    E, (B, T) = bound.sizes.E, bound.inputs.query.shape[:2]
    known = {
        "scale-missing": 1.0, "scale-d_model": E**-0.5, "scale-multiplied": D**0.5, "scale-no-sqrt": 1 / D,
        "scale-batch": B**-0.5, "scale-length": T**-0.5,
    }  # fmt: skip
    return next((name for name, value in known.items() if _near(total, value)), "scale-other")


def _scale_words(total: float, D: int) -> str:
    right = f"√{D} = {math.sqrt(D):.3f}, the root of the head width"
    if _near(total, 1.0) or total == 0:
        return f"they should be divided by {right}"
    return f"they are divided by {1 / total:.4g}, not by {right}"


def _has_learned_scale(bound: Bound, reading: AttentionReading) -> bool:
    """Whether the scale follows a parameter of one number, or of one for each head."""
    H = reading.core.weights.shape[1]
    small = [t for t in tensors(bound.thing).values() if t.numel() in {1, H} and t.requires_grad]
    return any(_scale_follows(bound, reading, parameter) for parameter in small)


def _scale_follows(bound: Bound, reading: AttentionReading, parameter: Tensor) -> bool:
    """Whether another value of this parameter gives another scale."""
    kept = parameter.data.clone()
    parameter.data.add_(0.25)
    try:
        other = read(bound.called())
    except Exception:  # anything can be raised by a learner's code
        return False
    finally:
        parameter.data.copy_(kept)
    before, after = reading.scores, None if other is None else other.scores
    if before is None or after is None:
        return False
    return before.by_head or not _near(after.factor, before.factor)


def _may_add_positions(bound: Bound) -> bool:
    """Whether the class has a switch or an argument for a position bias, which is off here."""
    names = [p.name for p in signature(bound.thing) + parameters_of(bound.case.target)]
    return any(re.search(r"(pos|rel)\w*bias", plain(name)) for name in names)


@of_stages
def built_in_mask(bound: Bound, reading: AttentionReading) -> Found:
    """A pattern of visible keys must be causal, or at least not look like a causal mask gone wrong."""
    kind, line = reading.pattern, reading.core.mask_line() or reading.core.softmax_line
    if kind == "causal":
        yield Note("variant", "causal inside")
    elif kind in ("future", "later"):
        yield Finding("causal-inverted", "a token sees the tokens after it and not those before", line)
    elif kind == "strict":
        yield Finding("causal-off-by-one", "a token does not see itself", triangle_line(bound.case, reading) or line)
    elif kind == "ahead":
        yield Finding("causal-off-by-one", "a token sees the one after it", triangle_line(bound.case, reading) or line)
    elif kind != "full":
        yield from _other_pattern(bound, reading, line)


def triangle_line(case: Case, reading: AttentionReading) -> int | None:
    """The line that makes a triangle, in the call or in the constructor."""
    made = (n.line for n in reading.core.trace.nodes if n.op in ("tril", "triu") and n.line is not None)
    return next(made, None) or case.line_with(r"\b(tril|triu)\w*\(")


def _other_pattern(bound: Bound, reading: AttentionReading, line: int | None) -> Found:
    """A pattern that is neither full nor causal: of some heads only, of the distance only, or unknown."""
    visible = reading.visible
    by_head = [pattern(visible[:, h : h + 1]) for h in range(visible.shape[1])]
    table = visible[0, 0]
    if len(set(by_head)) > 1 and {"full", "causal"} <= set(by_head):
        causal, full = by_head.index("causal"), by_head.index("full")
        yield Finding("mask-some-heads", f"head {causal} is causal, head {full} sees every token", line)
    elif bool((visible == table).all()) and _is_of_distance(table):
        yield Note("variant", "a fixed window of visible keys")
    elif PARTIAL.search(getattr(bound.case.target, "__name__", "")):
        yield Note("variant", "a fixed pattern of visible keys")
    else:
        yield Note("variant", "a fixed pattern of visible keys")
        yield Note("untried", "its pattern of visible keys, which is none that is known")


def _is_of_distance(table: Tensor) -> bool:
    """Whether a key is visible or not by its distance from the query alone, and every query sees itself."""
    T = len(table)
    lines = (table.diagonal(offset) for offset in range(1 - T, T))
    return bool(table.diagonal().all()) and all(bool((line == line[0]).all()) for line in lines)


@of_stages
def masks_without_effect(bound: Bound, reading: AttentionReading) -> Found:
    """A built-in mask must hide something."""
    scores, core = reading.scores, reading.core
    if scores is None or scores.leaks or scores.after == "random" or reading.pattern != "full":
        return
    discarded, idle = core.discarded_mask(), core.idle_mask()
    if discarded is not None:
        yield Finding("mask-discarded", "the masked scores are not assigned to anything", discarded.line)
    built_in = idle is not None and (_stores_a_triangle(bound) or core.is_of_positions(idle))
    if discarded is None and idle is None and _stores_a_triangle(bound) and not _has_causal_switch(bound):
        words = "a triangular mask is stored and never used"
        yield Finding("causal-ignored", words, triangle_line(bound.case, reading))
    if idle is not None and not bound.form.fixed_tensor and built_in:
        words = "a mask by position is applied, but the part that is read hides nothing"
        yield Finding("causal-ignored", words, idle.line)


def _has_causal_switch(bound: Bound) -> bool:
    """Whether an argument of the constructor or the call, or an attribute, may switch a mask on."""
    names = [p.name for p in signature(bound.thing) + parameters_of(bound.case.target)]
    names += [k for m in modules(bound.thing) for k, v in vars(m).items() if isinstance(v, bool) and k != "training"]
    return any(re.search(r"causal|mask|decoder|autoregress|flash|sdp", plain(name)) for name in names)


def _stores_a_triangle(bound: Bound) -> bool:
    tables = (b for m in modules(bound.thing) for b in m.buffers() if b.dim() >= 2 and b.shape[-1] == b.shape[-2] > 1)
    return any(bool((b == b.tril()).all()) != bool((b == b.triu()).all()) for b in tables)


# Output.


@of_stages
def head_merge(bound: Bound, reading: AttentionReading) -> Found:
    """Heads must be put side by side, token by token."""
    out, core = reading.output, reading.core
    if not reading.used:
        return
    if out is None:
        if reading.scores is None or torch.isfinite(core.heads).all():
            yield Note("doubt", "how the output follows from the heads")
    elif out.merge in ("view", "moved"):
        yield Finding("merge-view", "the output of one token holds heads of several tokens", core.merge_line())
    elif out.merge == "mean" and core.heads.shape[1] > 1 and same(core.value, core.value[:, :1].expand_as(core.value)):
        yield Note("variant", "heads share their values and are averaged (interpretable multi-head attention)")
    elif out.merge == "mean":
        words = "every head enters the output with the same weight"
        yield Finding("heads-averaged", words, core.output_line())
    elif _is_per_head(reading):
        words = "every slice of the output depends on one head only"
        yield Finding("out-proj-per-head", words, core.output_line())
    else:
        yield Note("good", "head merge")


def _is_per_head(reading: AttentionReading) -> bool:
    """Whether the output map consists of one block for every head."""
    out, (H, Dv) = reading.output, reading.core.heads.shape[1::2]
    if out is None or H == 1 or out.role.plain or out.fit.weight.shape[0] % H:
        return False
    blocks = out.fit.weight.unflatten(0, (H, -1)).unflatten(2, (H, Dv)).norm(dim=(1, 3))  # (H, H)
    return bool((blocks - blocks.diag().diag()).max() < 1e-9 * blocks.max())


@of_stages
def around_output(bound: Bound, reading: AttentionReading) -> Found:
    """What else contributes to the output is a variant, if it is known."""
    out = reading.output
    if out is None or not reading.used:
        return
    if out.before:
        yield Note("variant", f"a {out.before} between the heads and the output projection")
        if out.before not in ("norm", "gate") and not any(
            type(m).__module__.endswith("activation") for m in modules(bound.thing)
        ):
            yield Note("untried", f"whether the {out.before} of the heads is meant")
    if out.residual:
        yield Note("variant", "the input is added to the output (residual)")
        if not _near(out.residual, 1.0) and not _has_number(bound):
            words = f"it is added {out.residual:.4g} times"
            yield Finding("residual-scaled", words, reading.core.trace.last_line())
    if not out.last:
        known = out.after == "norm"
        yield Note("variant", f"a {out.after} follows the attention" if known else "something follows the attention")
        if not known:
            yield Note("untried", "what follows the attention in this class")


@of_stages
def head_count(bound: Bound, reading: AttentionReading) -> Found:
    """There must be as many heads as asked for."""
    asked, seen = asked_heads(bound), reading.core.heads.shape[1]
    if reading.between_tokens and asked and 1 < seen != asked:
        words = f"{asked} heads were asked for, {seen} are computed"
        yield Finding("heads-lost", words, reading.core.score_line)
    if reading.output is None or seen > 1:
        return
    asked, Dv = _heads_of_layer(bound, reading), reading.core.heads.shape[-1]
    if asked and asked > 1:
        yield Finding("single-head", f"{asked} heads were asked for; the weights are one table of all {Dv} numbers")
    elif not asked and MULTI_HEAD.search(type(bound.thing).__name__):
        yield Finding("single-head", "it is called multi-head, but nothing is split into heads")
    elif not asked:
        yield Note("variant", SINGLE)


def _heads_of_layer(bound: Bound, reading: AttentionReading) -> int | None:
    """The number of heads asked for; None for one of several heads, which only knows their number."""
    asked, (H, Dv) = asked_heads(bound), reading.core.heads.shape[1::2]
    return None if H == 1 and asked and Dv * asked == bound.sizes.E else asked


@of_stages
def output_width(bound: Bound, reading: AttentionReading) -> Found:
    """The output must be as wide as asked for, and heads must fill the width unless they have one of their own."""
    out, sizes, (H, Dv) = reading.output, bound.sizes, reading.core.heads.shape[1::2]
    if out is None or out.role.plain or not out.last or not bound.built.names_with_role("width"):
        return
    width = out.fit.weight.shape[0]
    line = bound.case.line_of_attribute(out.role.names[0]) if out.role.names else None
    if width not in (sizes.E, sizes.out, sizes.D, sizes.H * sizes.Dv, 3 * sizes.E, H * Dv):
        yield Finding("output-width", f"it is {width} wide where {sizes.out} was asked for", line)
    own = bound.built.names_with_role("head_width") or bound.built.names_with_role("value_width")
    if not own and bound.built.config is None and asked_heads(bound) == H and H * Dv < min(sizes.E, sizes.out):
        words = f"{H} heads of {Dv} numbers for a width of {sizes.out}"
        yield Finding("head-width", words, reading.core.split_line())


@of_stages
def output_projection(bound: Bound, reading: AttentionReading) -> Found:
    """The concatenated heads need one more projection."""
    out, H, E = reading.output, reading.core.heads.shape[1], bound.sizes.E
    if (
        out is None
        or not reading.used
        or not out.role.plain
        or not out.last
        or out.merge == "mean"
        or not tensors(bound.thing)
    ):
        return
    if H == 1 and not _heads_of_layer(bound, reading):
        return
    width, line = out.fit.weight.shape[0], reading.core.trace.last_line()
    if width == H * E and H > 1:
        if bound.built.names_with_role("out_width"):
            yield Note(
                "variant", "every head has the output width, and nothing follows their concatenation (a wrapper)"
            )
            return
        yield Finding("too-wide", f"{H} heads of {E} give {width} where {E} was asked for", line)
    separate = not any(leaf.shape[:-1] == bound.inputs.query.shape[:-1] for leaf in leaves(bound.returned))
    where = _projecting_class(bound)
    if where is not None and not separate:
        yield Note("variant", f"the output projection is in {where}")
    else:
        how = "one by one, (B, H, T, D)" if separate and bound.form.layout == PLAIN else "side by side"
        yield Finding("no-out-proj", f"the heads are returned {how}", line)


def _projecting_class(bound: Bound) -> str | None:
    """Another class of the file that calls this one and projects its output, as in BERT."""
    name = getattr(bound.case.target, "__name__", "")
    if bound.case.filename is None or not name or not Path(bound.case.filename).is_file():
        return None
    try:
        source = Path(bound.case.filename).read_text(encoding="utf-8", errors="replace")
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name != name:
            text = ast.get_source_segment(source, node) or ""
            if re.search(rf"\b{name}\(", text) and (OUTPUT_LAYER.search(text) or OUTPUT_CLASS.search(text)):
                return node.name
    return None


STAGES: tuple[Fault, ...] = (
    unread_attention,
    unused_attention,
    attention_table,
    unread_projections,
    head_split,
    norms_and_positions,
    rotary_positions,
    rotary_axis,
    roles,
    shared_projections,
    shared_heads,
    weights_of_maps,
    unread_scores,
    softmax,
    scale,
    built_in_mask,
    masks_without_effect,
    head_merge,
    around_output,
    head_count,
    output_width,
    output_projection,
)


def stage_findings(bound: Bound, reading: AttentionReading | None) -> list[Finding]:
    """The mistakes in all stages, for another call of the same object."""
    return [found for fault in STAGES for found in fault(bound, reading) if isinstance(found, Finding)]


@of_stages
def fresh_inputs(bound: Bound, reading: AttentionReading) -> Found:
    """What was understood must hold for inputs that were not used to understand it."""
    error = prediction_error(bound, reading)
    if error is None:
        again = bound.called(inputs=make_inputs(bound.form, bound.sizes, seed=7))
        changed = changed_maps(reading, read(again))
        if changed:
            yield Note("doubt", f"on new inputs, {_listed(changed)} {'is' if len(changed) == 1 else 'are'} another")
        else:
            yield Note("good", "every step is the same map on new inputs")
    elif error < TOLERANCE:
        yield Note("good", f"largest difference {error:.0e}")
    else:
        yield Note("doubt", f"on new inputs the output differs by {error:.2g} from what was understood")
