"""The whole of a map of which every rank has its heads, its queries and keys, or both."""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import ShapeError
from headwise.parallel.heads import Heads, with_table
from headwise.parallel.order import Order, unshard_sequence
from headwise.weights import AttentionMap, Scoring


def gather(weights: AttentionMap, heads: Heads | None, order: Order | None) -> AttentionMap:
    """The map that all ranks together have, on each of them; all must call it."""
    with torch.no_grad():
        source = weights.detach()._normalised()
        query, key, lse, frame, scoring = source.query, source.key, source.log_sum_exp, source.frame, source.scoring
        assert lse is not None  # noqa: S101 - it was normalised
        if order is not None:
            rows, arranged = _arranged(source.axis("row"), order.mesh, 2)
            query, lse, key = arranged(query), arranged(lse), unshard_sequence(key, order.mesh, 2)
            frame = frame._replace(row=rows)
        if heads is not None:
            names, arranged = _arranged(source.axis("head"), heads.mesh, 1)
            grouped = key.shape[1] < query.shape[1]  # whole groups, which are in order
            key = _side_by_side(key, heads.mesh, 1) if grouped else arranged(key)
            query, lse = arranged(query), arranged(lse)
            frame, scoring = frame._replace(head=names), _of_all_heads(scoring, heads)
    return AttentionMap(query, key, scoring, lse, frame)


def _arranged(indices: Tensor, mesh: DeviceMesh, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The indices of all ranks in order, and what brings the parts of a tensor along `dim` into that order."""
    counts: list[int] = [0] * mesh.size()
    dist.all_gather_object(counts, len(indices), group=mesh.get_group())
    if len(set(counts)) > 1:
        raise ShapeError(
            f"gather(): the ranks hold {counts} of what was selected; expected as many on each. Select alike on all "
            f"ranks, or gather first and select then."
        )
    everywhere = _side_by_side(indices, mesh, 0)
    order = everywhere.argsort()
    return everywhere[order].cpu(), lambda x: _side_by_side(x, mesh, dim).index_select(dim, order)


def _side_by_side(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The parts of all ranks, joined along `dim`."""
    part = x.contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part, group=mesh.get_group())
    return torch.cat(parts, dim)


def _of_all_heads(scoring: Scoring, heads: Heads) -> Scoring:
    """The scoring with the sinks and distances of all heads, of which each rank knows its own."""

    def joined(table: Tensor, axis: int) -> Tensor:
        return _side_by_side(heads.ours(table, axis), heads.mesh, axis)

    _, sinks, _ = scoring.learnable
    sinks = None if sinks is None else joined(sinks, 0)
    return dataclasses.replace(scoring, sinks=sinks, relative=with_table(scoring.relative, joined))
