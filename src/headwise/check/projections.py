"""How queries, keys and values come from the input: the map is solved for, whatever the layout of weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.fits import fit, same, side_by_side, tokens, undetermined
from headwise.check.roles import Role, role
from headwise.check.stages import Projection
from headwise.check.trace import PRODUCTS, Node, Trace


def project(
    heads: Tensor, nodes: list[int | None], sources: dict[str, Tensor], trace: Trace, parameters: dict[str, Tensor]
) -> Projection | None:
    """The map from an input to these heads (B, H, T, D): direct, of a normalised input, by position, or shuffled."""
    width = heads.shape[-1]
    for found in _direct(heads, sources):
        return _named(found, parameters, width)
    normed = _normalised(trace, sources)
    for found in _direct(heads, normed):
        found.norm, found.free = True, undetermined(tokens(normed[found.source]))
        return _named(found, parameters, width)
    for found in _by_position(heads, sources | normed):
        return _named(found, parameters, width)
    for found in _earlier(heads, nodes, sources | normed, trace):
        found.norm = found.source in normed
        return _named(found, parameters, width)
    return None


def _named(found: Projection, parameters: dict[str, Tensor], width: int) -> Projection:
    weight = found.fit.weight if found.by_position is None else found.by_position[0]
    found.role = role(weight, parameters, width, found.free)
    found.source = found.source.removeprefix("normalised ").partition("#")[0]
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
        if node.op in PRODUCTS or "convolution" in node.op:
            break
        if node.op in ("view", "clone", "transpose", "permute", "_to_copy"):
            continue
        for value in _in_any_layout(node.value):
            if value.shape in shapes and not any(same(value, x) for x in sources.values()):
                found[f"normalised {_resembled(value, sources)}#{len(found)}"] = value
                break
    return dict(list(found.items())[-3:])


def _resembled(value: Tensor, sources: dict[str, Tensor]) -> str:
    """The input that a normalised tensor comes from: a norm changes the length of a token more than its direction."""

    def likeness(x: Tensor) -> float:
        if x.shape != value.shape:
            return -1.0
        a, b = (y.double() - y.double().mean(-1, keepdim=True) for y in (x, value))
        return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())

    return max(sources, key=lambda name: likeness(sources[name]))


def _in_any_layout(value: Tensor) -> Iterator[Tensor]:
    """What may be (B, T, E): the batch second, channels first, or an image."""
    if value.dim() == 3:
        yield from (value, value.transpose(0, 1), value.transpose(1, 2))
    elif value.dim() == 4:
        yield from (value.flatten(2).transpose(1, 2), value.flatten(1, 2))


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
    between: list[Node] = []
    for node in trace.ancestors(nodes, PRODUCTS):
        if node.value.numel() == heads.numel() and node.value.is_floating_point():
            for y in _as_tokens(node.value, heads):
                for name, x in sources.items():
                    if x.shape[:2] == y.shape[:2] and (found := fit(tokens(x), tokens(y))).exact:
                        kind = "moved" if _same_numbers(node.value, heads) else "heads"
                        then = _in_words([n.op for n in between]) if kind == "heads" else ""
                        normal = then == "norm" and (_is_norm(y, heads) or _turned_norm(y, heads, between))
                        yield Projection(name, found, kind, _NOBODY, then=then, normalised=normal)
        between.append(node)


def _turned_norm(before: Tensor, heads: Tensor, between: list[Node]) -> bool:
    """Whether heads were normalised and then turned by position."""
    for node in between:
        if node.value.numel() == heads.numel() and node.value.is_floating_point():
            for y in _as_tokens(node.value, heads):
                normed = y.unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)
                if _is_norm(before, normed) and any(_by_position(heads, {"": y})):
                    return True
    return False


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
