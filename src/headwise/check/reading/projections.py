"""How queries, keys and values come from the input: the map is solved for, then looked up among the parameters."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.fits import Fit, fit, role, same, side_by_side, tokens, undetermined
from headwise.check.reading.norms import as_tokens, in_any_layout, is_group_norm, is_head_norm, is_norm, same_numbers
from headwise.check.reading.parts import Projection
from headwise.check.trace import PRODUCTS, Node, Trace

NONLINEAR = {"relu", "relu_", "elu", "tanh", "sigmoid", "gelu", "silu", "leaky_relu", "_softmax", "softplus"}


def read_projection(
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
    for found in _by_position(heads, sources | normed):
        if found.source in normed:
            found.norm, found.free = True, undetermined(tokens(normed[found.source]))
        yield found
    for found in _earlier(heads, nodes, sources | normed, trace):
        found.norm = found.source in normed
        yield found
    for found in _direct(heads, {name: _read_in_order(x) for name, x in (sources | normed).items()}):
        found.norm, found.split = found.source in normed, "tokens"
        yield found


def _read_in_order(x: Tensor) -> Tensor:
    """What (B, T, E) becomes where channels come before tokens in memory, and a view reads them as tokens."""
    return x.transpose(1, 2).contiguous().view(x.shape)


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
        for value in in_any_layout(node.value):
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
            for y in as_tokens(node.value, heads):
                for name, x in sources.items():
                    if x.shape[:2] == y.shape[:2] and (found := fit(tokens(x), tokens(y))).exact:
                        kind = "moved" if same_numbers(node.value, heads) else "heads"
                        then = _operation([n.op for n in between]) if kind == "heads" else ""
                        normal = then == "norm" and (_is_normed(y, heads) or _is_rotated_norm(y, heads, between))
                        yield Projection(name, found, kind, then=then, normalized=normal)
        between.append(node)


def _is_normed(before: Tensor, heads: Tensor) -> bool:
    """Whether heads are a norm of (B, T, H·D), of every head's slice or of all of them together."""
    return is_head_norm(before, heads) or is_norm(before, side_by_side(heads))


def _is_rotated_norm(before: Tensor, heads: Tensor, between: list[Node]) -> bool:
    """Whether heads were normalized and then rotated by position, or the other way round."""
    for node in between:
        if node.value.numel() == heads.numel() and node.value.is_floating_point():
            for y in as_tokens(node.value, heads):
                inside = y.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)
                if _is_normed(before, inside) and any(_by_position(heads, {"": y})):
                    return True
                if _is_normed(y, heads) and any(_by_position(inside, {"": before})):
                    return True
    return False


def _operation(ops: list[str]) -> str:
    if {"native_layer_norm", "rsqrt", "_fused_rms_norm", "linalg_vector_norm"} & set(ops):
        return "norm"
    return "nonlinear" if NONLINEAR & set(ops) else "other"
