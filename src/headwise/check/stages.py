"""Reads a traced call stage by stage: each is compared with what the reference would make of that stage's own input."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.check import core as cores
from headwise.check.bound import Bound
from headwise.check.core import Core
from headwise.check.fits import Fit, fit, same, side_by_side, tokens
from headwise.check.roles import Role, role
from headwise.check.subject import tensors
from headwise.check.trace import PRODUCTS, Node, Trace


@dataclass
class Projection:
    """How queries, keys or values come from the input."""

    source: str  # query, key or value: which input it reads
    fit: Fit
    split: str  # heads: right; view: cut without a transpose; moved: some other shuffle of tokens
    role: Role
    position: str = ""  # rotary, added, or empty
    by_position: Tensor | None = None  # (T, H·D, E) where the map differs by position
    biases: Tensor | None = None  # (T, H·D)
    norm: bool = False  # the input was normalised first
    then: str = ""  # what happened between the map and the product
    normalised: bool = False  # that it was a norm of every head, and nothing else


@dataclass
class Scores:
    """How scores became weights."""

    factor: float | None  # of the product, inside the softmax
    axis: str  # keys, queries, heads, batch; empty where nothing sums to one
    visible: Tensor  # (B, H, T, S), True where a weight is not zero
    bias: Tensor | None = None  # (H, T, S) that was added
    swapped: bool = False  # rows belong to the second operand
    leaks: bool = False  # future scores are one constant that is not small: a causal mask that hides nothing
    by_head: bool = False  # every head has its own factor
    after: str = ""  # what happened after the softmax: masked, scaled, random
    after_factor: float = 1.0
    empty: Tensor | None = None  # rows that are not numbers


@dataclass
class Output:
    """How the result comes from the heads."""

    fit: Fit
    merge: str  # heads, view, moved, mean
    role: Role
    residual: float  # factor of the input that is added; 0 for none
    last: bool  # whether that is what the learner returns, or something follows
    norm: bool = False


@dataclass
class Reading:
    """Everything that was understood."""

    core: Core
    query: Projection | None
    key: Projection | None
    value: Projection | None
    scores: Scores | None
    output: Output | None
    notes: list[str] = field(default_factory=list)

    @property
    def understood(self) -> int:
        """How many of the five stages are explained to rounding."""
        parts = (self.query, self.key, self.value, self.scores, self.output)
        return sum(part is not None for part in parts)


def read(bound: Bound, trace: Trace | None = None, output: Tensor | None = None) -> Reading | None:
    """The reading that explains most, or None where there is no attention in the trace."""
    trace = bound.trace if trace is None else trace
    output = bound.output if output is None else output
    parts = cores.find(trace)
    if parts is None:
        return None
    best: Reading | None = None
    for core in cores.arrangements(parts, bound.inputs.query.shape[0]):
        reading = _read(bound, trace, core, output)
        if best is None or _score(reading) > _score(best):
            best = reading
        if best.understood == 5 and _score(best) >= 8:
            break
    return best


def _score(reading: Reading) -> int:
    right = [p for p in (reading.query, reading.key, reading.value) if p is not None and p.split == "heads"]
    return reading.understood + len(right) + (reading.output is not None and reading.output.merge == "heads")


def _read(bound: Bound, trace: Trace, core: Core, output: Tensor | None) -> Reading:
    parameters = tensors(bound.thing)
    query_nodes, key_nodes = _feeds(core.score_nodes, 0), _feeds(core.score_nodes, 1)
    value_nodes = _feeds(core.value_nodes, 1 if core.weights_first else 0)
    sources = {"query": bound.inputs.query, "key": bound.inputs.key, "value": bound.inputs.value}
    scores = read_scores(core)
    if scores is not None and scores.swapped:
        core.query, core.key = core.key, core.query
        query_nodes, key_nodes = key_nodes, query_nodes
    projections = [
        project(heads, nodes, sources, trace, parameters)
        for heads, nodes in ((core.query, query_nodes), (core.key, key_nodes), (core.value, value_nodes))
    ]
    out = None if output is None else read_output(bound, trace, core, output, parameters)
    return Reading(core, projections[0], projections[1], projections[2], scores, out)


def _feeds(nodes: list[Node], side: int) -> list[int | None]:
    return [node.operand_nodes[side - 2] for node in nodes]


# -- projections ------------------------------------------------------------------------------------------------------


def project(
    heads: Tensor, nodes: list[int | None], sources: dict[str, Tensor], trace: Trace, parameters: dict[str, Tensor]
) -> Projection | None:
    """The map from an input to these heads (B, H, T, D): direct, of a normalised input, by position, or shuffled."""
    width = heads.shape[-1]
    for found in _direct(heads, sources):
        return _named(found, parameters, width)
    normed = _normalised(trace, sources)
    for found in _direct(heads, normed):
        found.norm = True
        return _named(found, parameters, width)
    for found in _by_position(heads, sources | normed):
        return _named(found, parameters, width)
    for found in _earlier(heads, nodes, sources | normed, trace):
        found.norm = found.source in normed
        return _named(found, parameters, width)
    return None


def _named(found: Projection, parameters: dict[str, Tensor], width: int) -> Projection:
    weight = found.fit.weight if found.by_position is None else found.by_position[0]
    found.role = role(weight, parameters, width)
    found.source = found.source.removeprefix("normalised ")
    return found


_NOBODY = Role([], None, False, False, False)


def _direct(heads: Tensor, sources: dict[str, Tensor]) -> Iterator[Projection]:
    for split, y in (("heads", side_by_side(heads)), ("view", _viewed(heads)), ("moved", _tiled(heads))):
        for name, x in sources.items():
            if y is not None and x.shape[:2] == y.shape[:2]:
                found = fit(tokens(x), tokens(y))
                if found.exact:
                    yield Projection(name, found, split, _NOBODY)


def _viewed(heads: Tensor) -> Tensor:
    """(B, H, T, D) in memory order as (B, T, H·D): undoes a view that should have been followed by a transpose."""
    B, H, T, D = heads.shape
    return heads.reshape(B, T, H * D)


def _tiled(heads: Tensor) -> Tensor | None:
    """The same where batch and heads were cut at once: (B·H, T, D) read straight from (B, T, E) across samples."""
    B, H, T, D = heads.shape
    return heads.transpose(0, 1).reshape(B, T, H * D)


def _normalised(trace: Trace, sources: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs after a norm or whatever else was done to them, before the first product."""
    found: dict[str, Tensor] = {}
    shapes = {x.shape for x in sources.values()}
    for node in trace.nodes:
        if node.op in PRODUCTS:
            break
        moved = node.op in ("view", "clone", "transpose", "permute", "_to_copy")
        if node.value.shape in shapes and not moved and not any(same(node.value, x) for x in sources.values()):
            found[f"normalised {len(found)}"] = node.value
    return dict(list(found.items())[-3:])


def _by_position(heads: Tensor, sources: dict[str, Tensor]) -> Iterator[Projection]:
    y = side_by_side(heads)
    for name, x in sources.items():
        if x.shape[:2] != y.shape[:2] or x.shape[0] <= x.shape[2] + 4 or x.shape[2] > 256:
            continue
        fits = [fit(x[:, t], y[:, t]) for t in range(x.shape[1])]
        if all(f.exact for f in fits):
            weights, biases = torch.stack([f.weight for f in fits]), torch.stack([f.bias for f in fits])
            turned = not same(weights[0].expand_as(weights), weights, 1e-7)
            kind = "rotary" if turned else "added"
            yield Projection(name, fits[0], "heads", _NOBODY, kind, weights, biases)


def _earlier(heads: Tensor, nodes: list[int | None], sources: dict[str, Tensor], trace: Trace) -> Iterator[Projection]:
    """The last tensor before these heads that is a linear map of the input, and what was done to it then."""
    between: list[str] = []
    for node in trace.ancestors(nodes, PRODUCTS):
        if node.value.numel() == heads.numel() and node.value.is_floating_point():
            for y in _as_tokens(node.value, heads):
                for name, x in sources.items():
                    if x.shape[:2] == y.shape[:2] and (found := fit(tokens(x), tokens(y))).exact:
                        kind = "moved" if _same_numbers(node.value, heads) else "heads"
                        then = _in_words(between) if kind == "heads" else ""
                        normal = then == "norm" and _is_norm(y, heads)
                        yield Projection(name, found, kind, _NOBODY, then=then, normalised=normal)
        between.append(node.op)


def _is_norm(before: Tensor, heads: Tensor) -> bool:
    """Whether heads are a norm of what came before: of size or of spread, then channel by channel linear."""
    pieces = before.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)
    centred = pieces - pieces.mean(-1, keepdim=True)
    for plain in (pieces, centred):
        unit = plain / plain.pow(2).mean(-1, keepdim=True).sqrt()
        x, y = unit.flatten(0, 2), heads.flatten(0, 2)
        x, y = x - x.mean(0), y - y.mean(0)
        slope = (x * y).sum(0) / (x * x).sum(0)
        if float((y - slope * x).norm()) < 1e-3 * float(y.norm()):  # a norm's epsilon is not ours to know
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


def _in_words(ops: list[str]) -> str:
    if "native_layer_norm" in ops or "rsqrt" in ops or "_fused_rms_norm" in ops or "linalg_vector_norm" in ops:
        return "norm"
    if any(op in ops for op in ("relu", "elu", "tanh", "sigmoid", "gelu", "silu")):
        return "nonlinear"
    return "other"


# -- scores -----------------------------------------------------------------------------------------------------------


def read_scores(core: Core) -> Scores | None:
    """How weights follow from queries and keys."""
    after, factor = ("", 1.0) if core.softmax is None else _after(core.softmax, core.weights)
    if after == "other":  # masked after the softmax and brought back to a sum of one, which is right
        core.softmax, after = None, ""
    weights = core.weights if core.softmax is None else core.softmax
    finite = torch.isfinite(weights)
    weights = weights.masked_fill(~finite, 0.0)
    axis, after_factor = _axis(weights, finite)
    if axis is None:
        return None
    visible = weights > 0
    broken = ~finite.all(-1)  # (B, H, T)
    even = visible.all(-1) & ((weights.amax(-1) - weights.amin(-1)) < 1e-12)  # all hidden by one large number
    if axis == 3 and even.any() and not even.all():
        broken, visible = broken | even, visible & ~even[..., None]
    found: Scores | None = None
    for swapped in (False, True):
        raw = core.query @ core.key.transpose(-1, -2)
        raw = raw.transpose(-1, -2) if swapped else raw
        if raw.shape == weights.shape:
            found = _explained(weights, raw, visible, axis)
        if found is not None:
            found.swapped = swapped
            break
    if found is None:
        return None
    found.after_factor = after_factor
    found.empty = broken if broken.any() else None
    found.after = after
    found.after_factor *= factor
    return found


NAMES = {3: "keys", 2: "queries", 1: "heads", 0: "batch"}


def _axis(weights: Tensor, finite: Tensor) -> tuple[int | None, float]:
    """The axis along which weights sum to one, or to one constant."""
    for axis in (3, 2, 1, 0):
        rows = weights.sum(axis)[finite.all(axis)]
        if rows.numel() and weights.shape[axis] > 1 and torch.allclose(rows, rows.new_ones(()), atol=1e-8):
            return axis, 1.0
    rows = weights.sum(3)[finite.all(3)]
    if rows.numel() and rows.mean() > 0 and torch.allclose(rows, rows.mean(), rtol=1e-8):
        return 3, float(rows.mean())
    return None, 1.0


def _explained(weights: Tensor, raw: Tensor, visible: Tensor, axis: int) -> Scores | None:
    """Weights as softmax of factor · raw (+ bias), judged on logarithms, where a softmax only adds a constant."""
    logits = weights.clamp_min(1e-300).log()
    a, b = _centred(logits, visible, axis), _centred(raw, visible, axis)
    if float(b.norm()) == 0:
        return None
    factor = float((a * b).sum() / (b * b).sum())
    if float((a - factor * b).norm()) <= 1e-6 * float(a.norm()) + 1e-9:
        return Scores(factor, NAMES[axis], visible)
    factors = (a * b).sum((0, 2, 3)) / (b * b).sum((0, 2, 3)).clamp_min(1e-300)
    if float((a - factors[:, None, None] * b).norm()) <= 1e-6 * float(a.norm()):
        return Scores(float(factors[0]), NAMES[axis], visible, by_head=True)
    return _with_bias(logits, raw, visible, axis) or _leaking(logits, raw, visible, axis)


def _leaking(logits: Tensor, raw: Tensor, visible: Tensor, axis: int) -> Scores | None:
    """The softmax of scores whose future was set to a constant near zero."""
    T, S = raw.shape[-2:]
    past = torch.ones(T, S, dtype=torch.bool).tril().expand_as(visible)
    if axis != 3 or T != S or not bool(visible.all()):
        return None
    a, b = _centred(logits, past, axis), _centred(raw, past, axis)
    factor = float((a * b).sum() / (b * b).sum().clamp_min(1e-300))
    if float((a - factor * b).norm()) > 1e-6 * float(a.norm()):
        return None
    level = (logits - factor * raw).diagonal(dim1=-2, dim2=-1)[..., None]  # minus the logarithm of each row's sum
    future = (logits - level)[~past]
    return Scores(factor, NAMES[axis], past, leaks=True) if float(future.std()) < 1e-6 else None


def _with_bias(logits: Tensor, raw: Tensor, visible: Tensor, axis: int) -> Scores | None:
    """The same with a number added that depends on head and positions only, as relative positions do."""
    if not same(visible.double(), visible[:1].double().expand_as(visible)):
        return None
    a, b = _centred(logits, visible, axis), _centred(raw, visible, axis)
    within_a, within_b = a - a.mean(0), b - b.mean(0)
    factor = float((within_a * within_b).sum() / (within_b * within_b).sum())
    if float((within_a - factor * within_b).norm()) > 1e-6 * float(within_a.norm()):
        return None
    return Scores(factor, NAMES[axis], visible, bias=(a - factor * b).mean(0))


def _centred(x: Tensor, visible: Tensor, axis: int) -> Tensor:
    count = visible.sum(axis, keepdim=True).clamp_min(1)
    mean = x.masked_fill(~visible, 0.0).sum(axis, keepdim=True) / count
    return (x - mean).masked_fill(~visible, 0.0)


def _after(softmax: Tensor, weights: Tensor) -> tuple[str, float]:
    """What was done to weights between softmax and values."""
    if same(softmax.nan_to_num(), weights.nan_to_num()):
        return "", 1.0
    kept = weights != 0
    if not kept.any():
        return "masked", 1.0
    ratio = weights[kept] / softmax[kept].clamp_min(1e-300)
    if torch.allclose(ratio, ratio[0], rtol=1e-6):
        factor = float(ratio[0])
        if bool(kept.eq(softmax != 0).all()):
            return "scaled", factor
        return ("masked", 1.0) if abs(factor - 1) < 1e-6 else ("random", factor)
    return "other", 1.0


# -- output -----------------------------------------------------------------------------------------------------------


def read_output(bound: Bound, trace: Trace, core: Core, output: Tensor, parameters: dict[str, Tensor]) -> Output | None:
    """The map from heads to the result, or to the last tensor before it that is one."""
    if not torch.isfinite(core.heads).all():
        return None
    x = bound.inputs.query
    for index, candidate in enumerate(_results(trace, core, output)):
        for merge, merged in _merges(core, trace):
            if merged.shape[:2] != candidate.shape[:2]:
                continue
            found = _mapped(merged, candidate, x)
            if found is not None:
                result, residual = found
                head_width = core.heads.shape[-1]
                kind = _mean(result, merge, core)
                return Output(result, kind, role(result.weight, parameters, head_width), residual, index == 0)
    return None


def _mapped(merged: Tensor, candidate: Tensor, x: Tensor) -> tuple[Fit, float] | None:
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


def _mean(found: Fit, merge: str, core: Core) -> str:
    """Heads that were added up or averaged instead of put side by side all have one weight."""
    H = core.heads.shape[1]
    if merge != "heads" or H == 1:
        return merge
    blocks = found.weight.unflatten(1, (H, -1))
    return "mean" if same(blocks, blocks[:, :1].expand_as(blocks), 1e-7) else merge


def _results(trace: Trace, core: Core, output: Tensor) -> Iterator[Tensor]:
    yield output
    last = max(node.index for node in core.value_nodes)
    reached: set[int] = set()
    for node in core.value_nodes:
        reached |= trace.reaches(node.index)
    B, T = output.shape[:2]
    for index in sorted((i for i in reached if i > last), reverse=True):
        value = trace.nodes[index].value
        if value.dim() == 3 and value.shape[:2] == (B, T):
            yield value
        elif value.dim() == 3 and value.shape[:2] == (T, B):
            yield value.transpose(0, 1)
        elif value.dim() == 2 and value.shape[0] == B * T:
            yield value.unflatten(0, (B, T))


def _merges(core: Core, trace: Trace) -> Iterator[tuple[str, Tensor]]:
    B, H, T, Dv = core.heads.shape
    yield "heads", side_by_side(core.heads)
    if H > 1:
        yield "view", core.heads.reshape(B, T, H * Dv)
        yield "moved", core.heads.transpose(0, 1).reshape(B, T, H * Dv)
        yield "moved", core.heads.transpose(2, 3).reshape(B, T, H * Dv)
    for node in trace.nodes[max(n.index for n in core.value_nodes) + 1 :]:
        if node.op in PRODUCTS:
            return
        if node.value.shape == (B, T, H * Dv):
            yield "moved", node.value
