"""Reads a traced call stage by stage: projections, scores, output, each explained by that stage's own input.

Linear maps are solved for from the recorded numbers, so the layout of the weights does not have to be known.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.check.binding import Bound
from headwise.check.calls import tensors
from headwise.check.fits import Fit, Role, fit, role, same, side_by_side, tokens, undetermined
from headwise.check.trace import PRODUCTS, Core, Node, Trace, find_attention

LARGE = 500_000  # numbers; of more, no norm over tokens and groups is looked for
GATES = ("sigmoid", "silu", "tanh", "gelu", "relu", "softplus")
NONLINEAR = {"relu", "relu_", "elu", "tanh", "sigmoid", "gelu", "silu", "leaky_relu", "_softmax", "softplus"}
HIDDEN = -50.0  # a score this far below the others has no weight in any precision
AXES = {3: "keys", 2: "queries", 1: "heads", 0: "batch", (2, 3): "queries and keys together"}
Axis = int | tuple[int, int]
NO_ROLE = Role([], None, False, False, False)


@dataclass
class Projection:
    """How queries, keys or values come from the input."""

    source: str  # query, key or value: which input it reads
    fit: Fit
    split: str  # heads: right; view: split without a transpose; moved: tokens shuffled in some other way
    role: Role = field(default_factory=lambda: NO_ROLE)
    position: str = ""  # rotary, added, or empty
    by_position: Tensor | None = None  # (T, H·D, E) where the map differs by position
    biases: Tensor | None = None  # (T, H·D)
    norm: bool = False  # the input was normalized first
    then: str = ""  # what happened between the map and the product: norm, nonlinear or other
    normalized: bool = False  # that was exactly a norm of every head
    free: Tensor | None = None  # a direction of the weights that the inputs do not determine

    @property
    def weight(self) -> Tensor:
        """(H·D, E); at the first position where the map differs by position."""
        return self.fit.weight if self.by_position is None else self.by_position[0]


@dataclass
class Scores:
    """How scores became weights."""

    factor: float  # of the query-key product, inside the softmax
    axis: str  # the axis along which weights sum to one: keys, queries, heads, batch
    visible: Tensor  # (B, H, T, S), True where a weight is not zero
    bias: Tensor | None = None  # (H, T, S) that was added
    swapped: bool = False  # rows belong to the second operand
    leaks: bool = False  # future scores are one constant that is not small: a causal mask that hides nothing
    by_head: bool = False  # every head has its own factor
    cap: float = 0.0  # scores are cap · tanh(scores / cap); 0 for none
    relative: bool = False  # a term that depends on query and distance is added
    relative_is_linear: bool = False  # that term is linear in query and key at every pair of positions
    after: str = ""  # what happened after the softmax: masked, scaled, random
    after_factor: float = 1.0
    empty: Tensor | None = None  # rows that are not numbers


@dataclass
class OutputMap:
    """How the result comes from the heads."""

    fit: Fit
    merge: str  # heads: right; view, moved: tokens shuffled; mean: heads added up
    role: Role
    residual: float  # factor of the input that is added; 0 for none
    last: bool  # whether this is what the learner returns, or something follows
    before: str = ""  # what happens to the merged heads before the map: norm, gate, or the name of an activation
    after: str = ""  # what follows the map, where something does: norm, the name of an activation, or other


@dataclass
class AttentionReading:
    """Everything that was understood of one call; a stage that was not understood is None."""

    core: Core
    query: Projection | None
    key: Projection | None
    value: Projection | None
    scores: Scores | None
    output: OutputMap | None
    between_tokens: bool  # the weights are a table of queries × keys
    used: bool = True  # the result depends on the heads
    mask_arguments: list[Any] | None = None  # what was measured about every mask argument, once it was

    @property
    def projections(self) -> dict[str, Projection]:
        """Those of query, key and value that were understood, by name."""
        parts = {"query": self.query, "key": self.key, "value": self.value}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def understood(self) -> int:
        """How many of the five stages are explained to rounding."""
        return len(self.projections) + (self.scores is not None) + (self.output is not None)

    @property
    def visible(self) -> Tensor:
        """(B, H, T, S), True where a key has weight when it meets the values."""
        if self.scores is None or self.scores.after == "masked":
            return (self.core.weights != 0) & torch.isfinite(self.core.weights)
        return self.scores.visible

    @property
    def pattern(self) -> str:
        """The name of the pattern of visible keys; `full` where none could be read."""
        readable = self.scores is not None and not self.scores.leaks and self.scores.after != "random"
        return pattern(self.visible) if readable and self.between_tokens else "full"


def pattern(visible: Tensor) -> str:
    """The name of a (B, H, T, S) pattern of visible keys.

    full, causal, strict (a token does not see itself), ahead (it sees the next one), future (itself and later ones),
    later (later ones only), causal and more (a part of the past), or other.
    """
    T, S = visible.shape[-2:]
    table = visible[0, 0]
    if not bool((visible == table).all()):
        return "other"
    if bool(table.all()):
        return "full"
    if T != S:
        return "other"
    ones = torch.ones(T, S, dtype=torch.bool)
    shapes = {
        "causal": ones.tril(), "strict": ones.tril(-1), "ahead": ones.tril(1),
        "future": ones.triu(), "later": ones.triu(1),
    }  # fmt: skip
    for name, expected in shapes.items():
        rows = expected.any(-1)  # rows that see nothing come out as even weights in some code, as NaN in other
        if bool((table[rows] == expected[rows]).all()):
            return name
    return "causal and more" if bool((table <= ones.tril()).all()) else "other"


def read(bound: Bound) -> AttentionReading | None:
    """The reading that explains most, or None where the trace holds no attention."""
    nodes = find_attention(bound.trace)
    if nodes is None:
        return None
    best: AttentionReading | None = None
    for core in nodes.arrangements(*bound.inputs.query.shape[:2]):
        reading = _read(bound, core)
        if best is None or _quality(reading) > _quality(best):
            best = reading
        if best.understood == 5 and _quality(best) >= 8:
            break
    return best


def _quality(reading: AttentionReading) -> int:
    right = [p for p in reading.projections.values() if p.split == "heads"]
    return reading.understood + len(right) + (reading.output is not None and reading.output.merge == "heads")


def _read(bound: Bound, core: Core) -> AttentionReading:
    parameters = tensors(bound.thing)
    scores = _scores(core)
    feeds = [_feeds(core.nodes.scores, 0), _feeds(core.nodes.scores, 1)]
    if scores is not None and scores.swapped:
        core.query, core.key = core.key, core.query
        feeds.reverse()
    feeds.append(_feeds(core.nodes.products, 1 if core.weights_first else 0))
    query, key, value = (
        _projection(heads, nodes, bound.inputs._asdict(), core.trace, parameters)
        for heads, nodes in zip((core.query, core.key, core.value), feeds, strict=True)
    )
    output = None if bound.output is None else _output(bound.inputs.query, core, bound.output, parameters)
    between = tuple(core.weights.shape[-2:]) == (bound.inputs.query.shape[1], bound.inputs.key.shape[1])
    return AttentionReading(core, query, key, value, scores, output, between, used=_is_used(bound, core))


def _is_used(bound: Bound, core: Core) -> bool:
    """Whether what is returned as the output depends on a product of weights and values."""
    size = 0 if bound.output is None else bound.output.numel()
    ends = [node for node in core.trace.returned if node is not None and core.trace.nodes[node].value.numel() == size]
    reached = {index for node in core.nodes.products for index in core.trace.reaches(node.index)}
    return not ends or any(end in reached for end in ends)


def _feeds(nodes: list[Node], side: int) -> list[int | None]:
    return [node.operand_nodes[side - 2] for node in nodes]


# Projections.


def _projection(
    heads: Tensor, nodes: list[int | None], sources: dict[str, Tensor], trace: Trace, parameters: dict[str, Tensor]
) -> Projection | None:
    """The map from an input to these heads (B, H, T, D): direct, of a normalized input, by position, or shuffled."""
    found = next(_candidates(heads, nodes, sources, trace), None)
    if found is not None:
        varied = found.norm or found.position != "" or found.then != ""
        solved = Fit(found.weight, found.fit.bias, found.fit.residual)
        found.role = role(solved, parameters, heads.shape[-1], found.free, any_bias=varied)
        found.source = found.source.removeprefix("normalized ").partition("#")[0]
    return found


def _candidates(
    heads: Tensor, nodes: list[int | None], sources: dict[str, Tensor], trace: Trace
) -> Iterator[Projection]:
    yield from _direct(heads, sources)
    normed = _normalized(trace, sources)
    for found in _direct(heads, normed):
        x = sources[found.source.removeprefix("normalized ").partition("#")[0]]
        found.norm, found.free = True, undetermined(tokens(normed[found.source]))
        known = is_norm(x, normed[found.source]) or is_group_norm(x, normed[found.source])
        found.then = found.then or ("" if known else "other")
        yield found
    yield from _by_position(heads, sources | normed)
    for found in _earlier(heads, nodes, sources | normed, trace):
        found.norm = found.source in normed
        yield found


def _direct(heads: Tensor, sources: dict[str, Tensor]) -> Iterator[Projection]:
    """Maps of whole tokens, with heads split rightly, by a view, or by a view across samples."""
    B, H, T, D = heads.shape
    viewed = heads.reshape(B, T, H * D)  # undoes a view that should have been followed by a transpose
    tiled = heads.transpose(0, 1).reshape(B, T, H * D)  # the same where batch and heads were folded in one view
    for split, y in (("heads", side_by_side(heads)), ("view", viewed), ("moved", tiled)):
        for name, x in sources.items():
            if x.shape[:2] == y.shape[:2]:
                found = fit(tokens(x), tokens(y))
                if found.exact:
                    yield Projection(name, found, split)


def _normalized(trace: Trace, sources: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs after a norm, or whatever else was done to them before the first product."""
    found: dict[str, Tensor] = {}
    shapes = {x.shape for x in sources.values()}
    for node in trace.nodes:
        if node.op in PRODUCTS or "convolution" in node.op:
            break
        if node.op in ("view", "clone", "transpose", "permute", "_to_copy"):
            continue
        for value in _in_any_layout(node.value):
            if value.shape in shapes and not any(same(value, x) for x in sources.values()):
                found[f"normalized {_most_alike(value, sources)}#{len(found)}"] = value
                break
    return dict(list(found.items())[-3:])


def _most_alike(value: Tensor, sources: dict[str, Tensor]) -> str:
    """The input that a normalized tensor comes from: a norm changes a token's length more than its direction."""

    def likeness(x: Tensor) -> float:
        if x.shape != value.shape:
            return -1.0
        a, b = (y.double() - y.double().mean(-1, keepdim=True) for y in (x, value))
        return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())

    return max(sources, key=lambda name: likeness(sources[name]))


def _in_any_layout(value: Tensor) -> Iterator[Tensor]:
    """Readings as (B, T, E): batch first, batch second, channels first, or an image."""
    if value.dim() == 3:
        yield from (value, value.transpose(0, 1), value.transpose(1, 2))
    elif value.dim() == 4:
        yield from (value.flatten(2).transpose(1, 2), value.flatten(1, 2))


def _by_position(heads: Tensor, sources: dict[str, Tensor]) -> Iterator[Projection]:
    """Maps that differ by position, as with rotary or added positions."""
    viewed = heads.reshape(heads.shape[0], heads.shape[2], -1)
    for split, y in (("heads", side_by_side(heads)), ("view", viewed)):
        for name, x in sources.items():
            if x.shape[:2] != y.shape[:2] or x.shape[0] <= x.shape[2] + 4 or x.shape[2] > 256:
                continue
            fits = list(itertools.takewhile(lambda f: f.exact, (fit(x[:, t], y[:, t]) for t in range(x.shape[1]))))
            if len(fits) == x.shape[1]:
                weights, biases = torch.stack([f.weight for f in fits]), torch.stack([f.bias for f in fits])
                rotated = not same(weights[0].expand_as(weights), weights, 1e-7)
                kind = "rotary" if rotated else "added"
                yield Projection(name, fits[0], split, position=kind, by_position=weights, biases=biases)


def _earlier(heads: Tensor, nodes: list[int | None], sources: dict[str, Tensor], trace: Trace) -> Iterator[Projection]:
    """The last tensor before these heads that is a linear map of the input, and what was done to it afterwards."""
    between: list[Node] = []
    for node in trace.ancestors(nodes, PRODUCTS):
        if node.value.numel() == heads.numel() and node.value.is_floating_point():
            for y in _as_tokens(node.value, heads):
                for name, x in sources.items():
                    if x.shape[:2] == y.shape[:2] and (found := fit(tokens(x), tokens(y))).exact:
                        kind = "moved" if _same_numbers(node.value, heads) else "heads"
                        then = _operation([n.op for n in between]) if kind == "heads" else ""
                        normal = then == "norm" and (_is_norm(y, heads) or _is_rotated_norm(y, heads, between))
                        yield Projection(name, found, kind, then=then, normalized=normal)
        between.append(node)


def _is_rotated_norm(before: Tensor, heads: Tensor, between: list[Node]) -> bool:
    """Whether heads were normalized and then rotated by position."""
    for node in between:
        if node.value.numel() == heads.numel() and node.value.is_floating_point():
            for y in _as_tokens(node.value, heads):
                normed = y.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)
                if _is_norm(before, normed) and any(_by_position(heads, {"": y})):
                    return True
    return False


def _is_norm(before: Tensor, heads: Tensor) -> bool:
    """Whether heads (B, H, T, D) are a norm of every head's slice of (B, T, H·D)."""
    return is_norm(before.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2), heads)


def is_group_norm(before: Tensor, after: Tensor) -> bool:
    """Whether (B, T, E) was normalized over all tokens and groups of channels, up to a scale and shift of each."""
    if before.shape != after.shape or before.dim() != 3 or before.numel() > LARGE:
        return False
    groups = [n for n in (1, 2, 4, 8, 16, 32) if before.shape[-1] % n == 0]
    return any(_is_scaled(_unit_groups(before, n), after) for n in groups)


def _unit_groups(x: Tensor, groups: int) -> Tensor:
    pieces = x.unflatten(-1, (groups, -1))
    plain = pieces - pieces.mean((1, 3), keepdim=True)
    return torch.flatten(plain / plain.pow(2).mean((1, 3), keepdim=True).sqrt(), 2)


def _is_scaled(unit: Tensor, after: Tensor) -> bool:
    """Whether one is the other up to a scale and shift for each channel; a norm's epsilon is unknown."""
    x, y = unit.flatten(0, -2), after.flatten(0, -2)
    x, y = x - x.mean(0), y - y.mean(0)
    slope = (x * y).sum(0) / (x * x).sum(0)
    return float((y - slope * x).norm()) < 1e-3 * float(y.norm())


def is_norm(before: Tensor, after: Tensor) -> bool:
    """Whether this is a layer norm or RMS norm over the last axis, up to a scale and shift for each channel."""
    if before.shape != after.shape:
        return False
    for plain in (before, before - before.mean(-1, keepdim=True)):
        if _is_scaled(plain / plain.pow(2).mean(-1, keepdim=True).sqrt(), after):
            return True
    return False


def _as_tokens(value: Tensor, heads: Tensor) -> Iterator[Tensor]:
    B, _, T, _ = heads.shape
    if value.shape[:2] == (B, T):
        yield value.reshape(B, T, -1)
    elif value.shape[:2] == (T, B):
        yield value.reshape(T, B, -1).transpose(0, 1)
    elif value.dim() == 4 and value.shape[0] == B and value.shape[2] == T:
        yield side_by_side(value)
    elif value.shape[0] == B * T:
        yield value.reshape(B, T, -1)


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    return same(a.flatten().sort().values, b.flatten().sort().values)


def _operation(ops: list[str]) -> str:
    if {"native_layer_norm", "rsqrt", "_fused_rms_norm", "linalg_vector_norm"} & set(ops):
        return "norm"
    return "nonlinear" if NONLINEAR & set(ops) else "other"


# Scores.


def _scores(core: Core) -> Scores | None:
    """How weights follow from queries and keys: factor, softmax axis, visible keys, added terms."""
    after, factor = ("", 1.0) if core.softmax is None else _after_softmax(core.softmax, core.weights)
    if after == "other":  # masked after the softmax and normalized again, which is right
        core.softmax, after = None, ""
    weights = core.weights if core.softmax is None else core.softmax
    finite = torch.isfinite(weights)
    weights = weights.masked_fill(~finite, 0.0)
    finite = finite & ~((weights == 0).all(-1, keepdim=True))  # in a fused kernel, a row that sees nothing is zero
    axis, after_factor = _softmax_axis(weights, finite)
    if axis is None:
        return None
    visible = weights > 0
    broken = ~finite.all(-1)  # (B, H, T)
    even = visible.all(-1) & ((weights.amax(-1) - weights.amin(-1)) < 1e-12)  # all hidden by one large number
    if axis == 3 and even.any() and not even.all():
        broken, visible = broken | even, visible & ~even[..., None]
    found = _of_product(weights, visible, axis, core)
    if found is not None:
        found.empty = broken if broken.any() else None
        found.after, found.after_factor = after, after_factor * factor
    return found


def _of_product(weights: Tensor, visible: Tensor, axis: Axis, core: Core) -> Scores | None:
    """Weights explained by the query-key product, or by its transpose."""
    raw = core.query @ core.key.mT
    for swapped, product in ((False, raw), (True, raw.mT)):
        if product.shape == weights.shape:
            found = _explained(weights, product, visible, axis)
            found = found or _capped(weights, product, visible, axis, core)
            found = found or _with_relative(weights, product, visible, axis, core)
            if found is not None:
                found.swapped = swapped
                return found
    return None


def _softmax_axis(weights: Tensor, finite: Tensor) -> tuple[Axis | None, float]:
    """The axis along which weights sum to one, or to one constant."""
    for axis in (3, 2, 1, 0):
        rows = weights.sum(axis)[finite.all(axis)]
        if rows.numel() and weights.shape[axis] > 1 and torch.allclose(rows, rows.new_ones(()), atol=1e-8):
            return axis, 1.0
    if finite.all() and torch.allclose(both := weights.sum((2, 3)), torch.ones_like(both), atol=1e-8):
        return (2, 3), 1.0
    rows = weights.sum(3)[finite.all(3)]
    if rows.numel() and rows.mean() > 0 and torch.allclose(rows, rows.mean(), rtol=1e-8):
        return 3, float(rows.mean())
    return None, 1.0


def _explained(weights: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """Weights as softmax of factor · raw (+ bias), compared as logarithms, where a softmax only adds a constant."""
    logits = weights.clamp_min(1e-300).log()
    a, b = _centered(logits, visible, axis), _centered(raw, visible, axis)
    if float(b.norm()) == 0:
        return None
    factor = multiple(a, b, 1e-9)
    if factor is not None:
        return Scores(factor, AXES[axis], visible)
    factors = (a * b).sum((0, 2, 3)) / (b * b).sum((0, 2, 3)).clamp_min(1e-300)
    if float((a - factors[:, None, None] * b).norm()) <= 1e-6 * float(a.norm()):
        return Scores(float(factors[0]), AXES[axis], visible, by_head=True)
    return _with_bias(logits, raw, visible, axis) or _leaking(logits, raw, visible, axis)


def _leaking(logits: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """The softmax of scores whose future was set to a constant near zero."""
    T, S = raw.shape[-2:]
    past = torch.ones(T, S, dtype=torch.bool).tril().expand_as(visible)
    if axis != 3 or T != S or not bool(visible.all()):
        return None
    a, b = _centered(logits, past, axis), _centered(raw, past, axis)
    factor = multiple(a, b)
    if factor is None:
        return None
    level = (logits - factor * raw).diagonal(dim1=-2, dim2=-1)[..., None]  # minus the logarithm of each row's sum
    future = (logits - level)[~past]
    leaks = float(future.mean()) > HIDDEN
    return Scores(factor, AXES[axis], past, leaks=leaks) if float(future.std()) < 1e-6 else None


def _with_bias(logits: Tensor, raw: Tensor, visible: Tensor, axis: Axis) -> Scores | None:
    """The same with a number added that depends only on head and positions, as relative position biases do."""
    if not same(visible.double(), visible[:1].double().expand_as(visible)):
        return None
    a, b = _centered(logits, visible, axis), _centered(raw, visible, axis)
    factor = multiple(a - a.mean(0), b - b.mean(0))
    return None if factor is None else Scores(factor, AXES[axis], visible, bias=(a - factor * b).mean(0))


def _capped(weights: Tensor, raw: Tensor, visible: Tensor, axis: Axis, core: Core) -> Scores | None:
    """The softmax of cap · tanh(scores / cap), as in Gemma 2."""
    logits = weights.clamp_min(1e-300).log()
    past = torch.ones_like(visible).tril()
    squashed = [n.value for n in core.before_softmax() if n.op == "tanh" and n.value.numel() == raw.numel()]
    for tanh in (table for value in squashed for table in _as_tables(value, raw.shape)):
        for seen in (visible, past) if bool(visible.all()) else (visible,):  # -inf before the cap becomes -cap
            cap = multiple(_centered(logits, seen, axis), _centered(tanh, seen, axis))
            inside = None if cap is None else multiple(tanh.atanh()[seen], raw[seen])
            if cap is not None and inside is not None:
                return Scores(cap * inside, AXES[axis], seen, cap=cap, leaks=seen is past)
    return None


def _as_tables(value: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Scores as (B, H, T, S), where they were computed in this order or as (B, T, H, S)."""
    B, H, T, S = shape
    if value.shape == (B, T, H, S):
        yield value.transpose(1, 2)
    yield value.reshape(shape)


def _with_relative(weights: Tensor, raw: Tensor, visible: Tensor, axis: Axis, core: Core) -> Scores | None:
    """The softmax of a sum in which one term is the query-key product, as with relative positions."""
    logits = _centered(weights.clamp_min(1e-300).log(), visible, axis)
    for node in core.before_softmax():
        if node.op not in ("add", "add_", "sub") or node.value.numel() != raw.numel():
            continue
        total = _centered(node.value.reshape(raw.shape), visible, axis)
        factor = multiple(logits, total)
        if factor is None:
            continue
        for parent in node.parents:
            part = core.trace.nodes[parent].value
            if part.numel() == raw.numel() and (share := multiple(part.reshape(raw.shape), raw)):
                rest = node.value.reshape(raw.shape) - share * raw
                linear = _is_linear_term(rest, core.query, core.key)
                return Scores(factor * share, AXES[axis], visible, relative=True, relative_is_linear=linear)
    return None


def _is_linear_term(rest: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a term (B, H, T, S) is an affine map of query and key for every head and pair of positions."""
    B, H, T, S = rest.shape
    wide = torch.cat(
        [
            query[:, :, :, None].expand(B, H, T, S, -1),
            key[:, :, None].expand(B, H, T, S, -1),
            rest.new_ones(B, H, T, S, 1),
        ],
        -1,
    )
    if wide.shape[-1] >= B or not torch.isfinite(rest).all():
        return False
    design, y = wide.permute(1, 2, 3, 0, 4), rest.permute(1, 2, 3, 0)[..., None]
    solved = torch.linalg.lstsq(design, y, driver="gelsd").solution
    return bool((design @ solved - y).norm() <= 1e-6 * y.norm())


def multiple(a: Tensor, b: Tensor, rounding: float = 0.0) -> float | None:
    """The factor for which a = factor · b; None where there is none, or for complex numbers."""
    if a.is_complex() or b.is_complex():
        return None
    factor = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
    return factor if float((a - factor * b).norm()) <= 1e-6 * float(a.norm()) + rounding else None


def _centered(x: Tensor, visible: Tensor, axis: Axis) -> Tensor:
    count = visible.sum(axis, keepdim=True).clamp_min(1)
    mean = x.masked_fill(~visible, 0.0).sum(axis, keepdim=True) / count
    return (x - mean).masked_fill(~visible, 0.0)


def _after_softmax(softmax: Tensor, weights: Tensor) -> tuple[str, float]:
    """What was done to the weights between softmax and values, and the factor."""
    if same(softmax.nan_to_num(), weights.nan_to_num()):
        return "", 1.0
    kept = (weights != 0) & torch.isfinite(weights)
    if not kept.any():
        return "masked", 1.0
    ratio = weights[kept] / softmax[kept].clamp_min(1e-300)
    if torch.allclose(ratio, ratio[0], rtol=1e-6):
        factor = float(ratio[0])
        if bool(kept.eq(softmax != 0).all()):
            return "scaled", factor
        return ("masked", 1.0) if abs(factor - 1) < 1e-6 else ("random", factor)
    return "other", 1.0


# Output.


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "elu": F.elu,
    "leaky_relu": F.leaky_relu, "softplus": F.softplus, "relu6": F.relu6, "mish": F.mish, "selu": F.selu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


def _output(x: Tensor, core: Core, output: Tensor, parameters: dict[str, Tensor]) -> OutputMap | None:
    """The map from heads to the result, or to the last tensor before it for which there is one."""
    if not torch.isfinite(core.heads).all():
        return None
    for index, candidate in enumerate(_results(core, output)):
        for merge, before, merged in _merges(core, x):
            found = _mapped(merged, candidate, x) if merged.shape[:2] == candidate.shape[:2] else None
            if found is not None:
                result, residual = found
                free = undetermined(tokens(merged)) if before == "norm" else None
                own = _output_role(result, parameters, core.heads.shape[-1], before, free)
                after = "" if index == 0 else _step_between(candidate, output) or "other"
                return OutputMap(result, _mean_or(merge, result, core), own, residual, index == 0, before, after)
    return None


def _output_role(solved: Fit, parameters: dict[str, Tensor], head_width: int, before: str, free: Tensor | None) -> Role:
    """The weights of the output map; after a norm, up to the norm's own scale of every column."""
    found = role(solved, parameters, head_width, free, any_bias=before != "")
    width = solved.weight.shape[1]
    scales = [p.detach().double() for p in parameters.values() if p.dim() == 1 and width % len(p) == 0 and len(p) > 1]
    for scale in scales if before == "norm" and not found.found else ():
        plain = Fit(solved.weight / scale.repeat(width // len(scale)), solved.bias, solved.residual)
        turned = (
            None if free is None else torch.nn.functional.normalize(free * scale.repeat(width // len(scale)), dim=0)
        )
        if (other := role(plain, parameters, head_width, turned, any_bias=True)).found:
            return other
    return found


def _step_between(before: Tensor, after: Tensor) -> str:
    """The name of the norm or activation that makes one tensor out of the other; empty where none does."""
    if before.shape != after.shape:
        return ""
    if is_norm(before, after) or is_group_norm(before, after):
        return "norm"
    return next((name for name, function in ACTIVATIONS.items() if same(function(before), after)), "")


def _mapped(merged: Tensor, candidate: Tensor, x: Tensor) -> tuple[Fit, float] | None:
    """The linear map from merged heads to a result, and the factor of the input that was added."""
    alone = fit(tokens(merged), tokens(candidate))
    if alone.exact and float(alone.weight.norm()) > 1e-9:
        return alone, 0.0
    if x.shape == candidate.shape:
        both = fit(torch.cat([tokens(merged), tokens(x)], 1), tokens(candidate))
        own = both.weight[:, merged.shape[-1] :]
        factor = float(own.diagonal().mean())
        if both.exact and same(own, factor * torch.eye(len(own), dtype=own.dtype), 1e-6) and abs(factor) > 1e-9:
            weight = both.weight[:, : merged.shape[-1]]
            if float(weight.norm()) > 1e-9:
                return Fit(weight, both.bias, both.residual), factor
    return None


def _mean_or(merge: str, found: Fit, core: Core) -> str:
    """`mean` where all heads have the same weight in the output: they were added up or averaged."""
    H = core.heads.shape[1]
    if merge != "heads" or H == 1:
        return merge
    blocks = found.weight.unflatten(1, (H, -1))
    return "mean" if same(blocks, blocks[:, :1].expand_as(blocks), 1e-7) else merge


def _results(core: Core, output: Tensor) -> Iterator[Tensor]:
    """The output, then earlier tensors that depend on the heads, last first, as (B, T, E)."""
    yield output
    last = max(node.index for node in core.nodes.products)
    reached: set[int] = set()
    for node in core.nodes.products:
        reached |= core.trace.reaches(node.index)
    B, T = output.shape[:2]
    for index in sorted((i for i in reached if i > last), reverse=True):
        value = core.trace.nodes[index].value
        if value.dim() == 3 and value.shape[:2] == (B, T):
            yield value
        elif value.dim() == 3 and value.shape[:2] == (T, B):
            yield value.transpose(0, 1)
        elif value.dim() == 2 and value.shape[0] == B * T:
            yield value.unflatten(0, (B, T))
        elif value.dim() in (3, 4) and value.shape[0] == B and value.shape[2:].numel() == T:  # channels first, an image
            yield value.flatten(2).transpose(1, 2)


def _merges(core: Core, x: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """(how heads were merged, what was done to them then, the result as (B, T, H·Dv))"""
    B, H, T, Dv = core.heads.shape
    merged = side_by_side(core.heads)
    yield "heads", "", merged
    later = _between_products(core, merged.numel())
    for node in later:
        for value in _as_tokens(node.value, core.heads):
            step = _step_between(merged, value) or ("norm" if _is_norm(merged, _split(value, H)) else "")
            step = step or ("gate" if _is_gated(merged, value, x, core.trace) else "")
            if step and not same(merged, value):
                yield "heads", step, value
    if H > 1:
        yield "view", "", core.heads.reshape(B, T, H * Dv)
        yield "moved", "", core.heads.transpose(0, 1).reshape(B, T, H * Dv)
        yield "moved", "", core.heads.transpose(2, 3).reshape(B, T, H * Dv)
    for node in later:
        if node.value.shape == (B, T, H * Dv) and _same_numbers(node.value, core.heads):
            yield "moved", "", node.value


def _split(merged: Tensor, H: int) -> Tensor:
    B, T, width = merged.shape
    return merged.reshape(B, T, H, width // H).transpose(1, 2)


def _between_products(core: Core, size: int) -> list[Node]:
    """Operations of this size after the weights met the values and before the first product that reads them."""
    reached = {index for node in core.nodes.products for index in core.trace.reaches(node.index)}
    found = []
    for node in core.trace.nodes[max(n.index for n in core.nodes.products) + 1 :]:
        if node.index in reached and node.op in PRODUCTS:
            break
        if node.index in reached and node.value.numel() == size and node.value.is_floating_point():
            found.append(node)
    return found


def _is_gated(merged: Tensor, value: Tensor, x: Tensor, trace: Trace) -> bool:
    """Whether merged heads were multiplied by an activation of a linear map of the input."""
    size = merged.numel()
    gates = [n.value.reshape(merged.shape) for n in trace.nodes if n.value.numel() == size and n.op in GATES]
    if not any(same(merged * gate, value) for gate in gates):
        return False
    gate = next(gate for gate in gates if same(merged * gate, value))
    maps = [n.value.reshape(merged.shape) for n in trace.nodes if n.value.numel() == size and n.op in PRODUCTS]
    return any(_step_between(made, gate) and fit(tokens(x), tokens(made)).exact for made in maps)
