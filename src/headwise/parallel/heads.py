"""Which heads a rank has, and what of a scoring belongs to them."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from headwise.masks.placement import of_heads
from headwise.weights import Scoring
from headwise.weights.relative import Buckets, Relative


@dataclasses.dataclass(frozen=True)
class Heads:
    """Query heads `first` to `first + count − 1` of `total`, on this rank of `mesh`."""

    mesh: DeviceMesh
    first: int
    count: int
    total: int

    def of(self, scoring: Scoring) -> Scoring:
        """The scoring of our heads alone."""
        bias, sinks, _ = scoring.learnable
        return dataclasses.replace(
            scoring,
            mask=None if scoring.mask is None else of_heads(scoring.mask, self.first, self.count),
            bias=self.ours(bias, 1) if bias is not None and bias.dim() == 4 and bias.shape[1] > 1 else bias,
            sinks=None if sinks is None else self.ours(sinks, 0),
            relative=with_table(scoring.relative, self.ours),
        )

    def in_whole(self, scoring: Scoring) -> Scoring:
        """The scoring of all heads as far as this rank knows it: numbers of heads that are not ours are 0.

        A map of our heads speaks of the whole, and never asks for the others.
        """
        _, sinks, _ = scoring.learnable
        sinks = None if sinks is None else self._padded(sinks, 0)
        return dataclasses.replace(scoring, sinks=sinks, relative=with_table(scoring.relative, self._padded))

    def ours(self, table: Tensor, axis: int) -> Tensor:
        """Our part of a table that is sharded already, or whole on every rank, as ALiBi's slopes are."""
        return table.to_local() if isinstance(table, DTensor) else table.narrow(axis, self.first, self.count)

    def _padded(self, table: Tensor, axis: int) -> Tensor:
        if not isinstance(table, DTensor):
            return table
        local = table.to_local()
        after = self.total - self.first - self.count
        room = [local.new_zeros(*local.shape[:axis], n, *local.shape[axis + 1 :]) for n in (self.first, after)]
        return torch.cat([room[0], local, room[1]], axis)


def with_table(relative: Relative | None, change: Callable[[Tensor, int], Tensor]) -> Relative | None:
    """The same rule with its table changed along the axis of heads: of slopes (H,), or of buckets (buckets, H)."""
    axis = 1 if isinstance(relative, Buckets) else 0
    return None if relative is None else relative.with_table(change(relative.table, axis))
