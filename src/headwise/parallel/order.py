"""How a sequence lies on ranks: in chunks from both ends, so that under a causal mask all have the same to do.

Cut into 2n chunks, rank r of n has chunk r and chunk 2n − 1 − r: for 4 ranks 0 1 2 3 3 2 1 0. A late chunk sees much
and an early one little; together every pair sees the same number of keys.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import ShapeError
from headwise.parallel.meshes import check_mesh


@dataclasses.dataclass(frozen=True)
class Order:
    """The chunks of every rank of a mesh."""

    mesh: DeviceMesh

    @property
    def ranks(self) -> int:
        """How many ranks share a sequence."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """Which of them we are."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """Through which they talk."""
        return self.mesh.get_group()

    def chunks(self, rank: int, t: int) -> tuple[range, range]:
        """The positions of the two chunks of a rank that holds `t` of them."""
        size = t // 2
        return tuple(range(i * size, (i + 1) * size) for i in (rank, 2 * self.ranks - 1 - rank))  # type: ignore[return-value]

    def positions(self, t: int, device: torch.device | None = None) -> Tensor:
        """Where our `t` tokens stand in the text, (t,)."""
        return torch.cat([torch.arange(c.start, c.stop, device=device) for c in self.chunks(self.rank, t)])

    def check_part(self, t: int) -> None:
        """Raise unless a rank's part of `t` tokens can be two chunks."""
        if t % 2:
            raise ShapeError(
                f"this rank was given {t} tokens; expected two chunks of the same length, as shard_sequence(x, mesh) "
                f"gives each rank of {self.ranks}."
            )

    def check_length(self, T: int) -> None:
        """Raise unless a text of T tokens can be cut into equal chunks."""
        pieces = 2 * self.ranks
        if T % pieces:
            raise ShapeError(
                f"a sequence of {T} tokens cannot be cut into {pieces} equal chunks, two for each of {self.ranks} "
                f"ranks. Pad it to {-(-T // pieces) * pieces}: under a causal mask padding on the right is harmless."
            )


def shard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that all ranks have, cut along the sequence; a copy.

    Args:
        x: tokens, embeddings, labels, position ids: anything with a sequence axis.
        mesh: of one axis.
        dim: the sequence axis, whose length must be a multiple of twice the number of ranks.
    """
    order = Order(check_mesh("shard_sequence", mesh))
    order.check_length(x.shape[dim])
    return x.index_select(dim, order.positions(x.shape[dim] // order.ranks, x.device))


def unshard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """The whole tensor, on every rank, of which each has a part; without gradients.

    Args:
        x: this rank's part, as `shard_sequence` cuts it.
        mesh: of one axis.
        dim: the sequence axis.
    """
    order = Order(check_mesh("unshard_sequence", mesh))
    part = x.detach().contiguous()
    parts = [torch.empty_like(part) for _ in range(order.ranks)]
    dist.all_gather(parts, part, group=order.group)
    t = x.shape[dim]
    early, late = zip(*(each.split(t // 2, dim) for each in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)
