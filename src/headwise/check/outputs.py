"""How the result comes from the heads: merge, output projection, residual."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.bound import Bound
from headwise.check.core import Core
from headwise.check.fits import Fit, fit, same, side_by_side, tokens
from headwise.check.roles import role
from headwise.check.stages import Output
from headwise.check.trace import PRODUCTS, Trace


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
        elif value.dim() in (3, 4) and value.shape[0] == B and value.shape[2:].numel() == T:  # channels first, an image
            yield value.flatten(2).transpose(1, 2)


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
