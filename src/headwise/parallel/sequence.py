"""How a sequence is divided over the ranks of a mesh: in chunks from both ends, which balances the work.

Of 2n chunks, rank r of n has chunk r and chunk 2n − 1 − r: for 4 ranks 0 1 2 3 3 2 1 0. Under a causal mask a late
chunk sees many keys and an early one few; each pair sees the same number.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.errors import OptionError, ShapeError


@dataclasses.dataclass(frozen=True)
class Order:
    """The chunks of every rank of a mesh."""

    mesh: DeviceMesh

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This rank."""
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks."""
        return self.mesh.get_group()

    def chunks(self, rank: int, t: int) -> tuple[range, range]:
        """The positions of the two chunks of a rank that holds `t` tokens."""
        size = t // 2
        return tuple(range(i * size, (i + 1) * size) for i in (rank, 2 * self.ranks - 1 - rank))  # type: ignore[return-value]

    def positions(self, t: int, device: torch.device | None = None) -> Tensor:
        """The positions of this rank's `t` tokens in the text, (t,)."""
        return torch.cat([torch.arange(c.start, c.stop, device=device) for c in self.chunks(self.rank, t)])

    def check_part(self, t: int) -> None:
        """Raise unless a rank's `t` tokens can be two chunks."""
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
        mesh: a mesh with one axis.
        dim: the sequence axis, whose length must be a multiple of twice the number of ranks.
    """
    order = Order(check_mesh("shard_sequence", mesh))
    order.check_length(x.shape[dim])
    return x.index_select(dim, order.positions(x.shape[dim] // order.ranks, x.device))


def unshard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """The whole tensor, on every rank, from the parts that the ranks have; without gradients.

    Args:
        x: this rank's part, as `shard_sequence` cuts it.
        mesh: a mesh with one axis.
        dim: the sequence axis.
    """
    mesh = check_mesh("unshard_sequence", mesh)
    parts = all_parts(x.detach(), mesh)
    early, late = zip(*(part.split(x.shape[dim] // 2, dim) for part in parts), strict=True)
    return torch.cat([*early, *reversed(late)], dim)


def all_parts(x: Tensor, mesh: DeviceMesh) -> list[Tensor]:
    """The tensors that the ranks pass, by rank."""
    part = x.contiguous()
    parts = [torch.empty_like(part) for _ in range(mesh.size())]
    dist.all_gather(parts, part, group=mesh.get_group())
    return parts


def check_mesh(what: str, mesh: object) -> DeviceMesh:
    """`mesh`, refused unless it is a mesh with one axis."""
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(
            f"{what}(mesh={type(mesh).__name__}): expected a DeviceMesh of one axis, such as "
            f"torch.distributed.device_mesh.init_device_mesh('cuda', (8,))."
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        cure = f"mesh[{names[0]!r}]" if names else "a mesh with mesh_dim_names=, and then mesh['tp']"
        raise OptionError(f"{what}: the mesh has {mesh.ndim} axes, of shape {tuple(mesh.shape)}; expected one: {cure}.")
    return mesh
