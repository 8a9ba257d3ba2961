"""Tensors handed on from rank to rank around a ring, while the ranks compute."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from headwise.parallel.order import Order


class Passing:
    """Tensors on their way to the next rank, and those of the rank before on their way here."""

    def __init__(self, tensors: Sequence[Tensor], order: Order) -> None:
        sent = [x.contiguous() for x in tensors]
        self.arriving = [torch.empty_like(x) for x in sent]
        after, before = ((order.rank + step) % order.ranks for step in (1, -1))
        sends = [dist.P2POp(dist.isend, x, group=order.group, group_peer=after) for x in sent]
        receives = [dist.P2POp(dist.irecv, x, group=order.group, group_peer=before) for x in self.arriving]
        self._works = dist.batch_isend_irecv(sends + receives)
        self._sent = sent  # until they have gone

    def wait(self) -> list[Tensor]:
        """The tensors of the rank before, once they are here and ours are gone."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self.arriving
