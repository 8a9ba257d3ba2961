"""How the result comes from the heads: merge, projection, residual, and what happens before and after."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.check.fits import Fit, Role, fit, role, same, side_by_side, tokens, undetermined
from headwise.check.reading.norms import as_tokens, in_any_layout, is_group_norm, is_head_norm, is_norm, same_numbers
from headwise.check.reading.parts import OutputMap
from headwise.check.trace import PRODUCTS, Core, Node, Trace

GATES = ("sigmoid", "silu", "tanh", "gelu", "relu", "softplus")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "elu": F.elu,
    "leaky_relu": F.leaky_relu, "softplus": F.softplus, "relu6": F.relu6, "mish": F.mish, "selu": F.selu,
    "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


def read_output(x: Tensor, core: Core, output: Tensor, parameters: dict[str, Tensor]) -> OutputMap | None:
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
        elif value.dim() in (3, 4, 5) and value.shape[0] == B and value.shape[2:].numel() == T:  # channels first
            yield value.flatten(2).transpose(1, 2)


def _merges(core: Core, x: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """(how heads were merged, what was done to them then, the result as (B, T, H·Dv))"""
    B, H, T, Dv = core.heads.shape
    merged = side_by_side(core.heads)
    yield "heads", "", merged
    later = _between_products(core, merged.numel())
    for node in later:
        for value in as_tokens(node.value, core.heads):
            step = _step_between(merged, value) or ("norm" if is_head_norm(merged, _split(value, H)) else "")
            step = step or ("gate" if _is_gated(merged, value, x, core.trace) else "")
            if step and not same(merged, value):
                yield "heads", step, value
    if H > 1:
        yield "view", "", core.heads.reshape(B, T, H * Dv)
        yield "moved", "", core.heads.transpose(0, 1).reshape(B, T, H * Dv)
        yield "moved", "", core.heads.transpose(2, 3).reshape(B, T, H * Dv)
    for node in later:
        for value in in_any_layout(node.value):
            if value.shape == (B, T, H * Dv) and same_numbers(value, core.heads):
                yield "moved", "", value


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
