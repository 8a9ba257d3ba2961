"""How a sequence is divided over ranks, and `ring_attend`: exact attention over a sequence that no rank holds whole.

Of 2n chunks, rank r of n has chunk r and chunk 2n − 1 − r: for 4 ranks 0 1 2 3 3 2 1 0. That balances the work: under a
causal mask a late chunk sees many keys and an early one few, and each pair sees the same number.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.attention.backends.base import Call
from headwise.errors import OptionError, ShapeError
from headwise.parallel.blocks import BlockEngine, Gradients, Known, Met, Piece, engine_for, merge, pieces


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


def shard_sequence(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that all ranks have, cut along the sequence; a copy.

    Args:
        x: tokens, embeddings, labels, position ids: anything with a sequence axis.
        mesh: a mesh with one axis.
        dim: the sequence axis, whose length must be a multiple of twice the number of ranks.
    """
    order = Order(check_mesh("shard_sequence", mesh))
    T, chunks = x.shape[dim], 2 * order.ranks
    if T % chunks:
        raise ShapeError(
            f"a sequence of {T} tokens cannot be cut into {chunks} equal chunks, two for each of {order.ranks} ranks. "
            f"Pad it to {-(-T // chunks) * chunks}: under a causal mask padding on the right is harmless."
        )
    return x.index_select(dim, order.positions(T // order.ranks, x.device))


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


def ring_attend(call: Call, order: Order) -> tuple[Tensor, Tensor]:
    """The output of this rank's queries, (B, H, t, Dv), and their log-sum-exp (B, H, t), which has no gradient.

    Args:
        call: this rank's query, key and value, in the order of `order`; its scoring is that of the whole text.
        order: how the text is divided over ranks.
    """
    learnable = call.scoring.learnable
    output, lse = RingAttention.apply(order, call, call.query, call.key, call.value, *learnable)  # type: ignore[no-untyped-call]
    return output, lse


class RingAttention(torch.autograd.Function):
    """Attention over the ring, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, order: Order, call: Call, query: Tensor, key: Tensor, value: Tensor, *learnable: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        walk = RingWalk(order, call)
        B, H, t, _ = query.shape
        precise = torch.promote_types(query.dtype, torch.float32)
        # In memory as (B, t, H, Dv), so that heads are merged without a copy.
        output = torch.zeros(B, t, H, value.shape[3], dtype=precise, device=query.device).transpose(1, 2)
        lse = torch.full((B, H, t), -math.inf, dtype=precise, device=query.device)
        held = _halves(key, value)
        for step in range(order.ranks):
            for half in (0, 1):
                passing = Passing(held[half], order) if step < order.ranks - 1 else None
                for piece, rows, cols in walk.pieces(step, half):
                    keys, values = (x[:, :, cols] for x in held[half])
                    read = walk.engine.forward(piece, Met(query[:, :, rows], keys, values))
                    merge(output[:, :, rows], lse[:, :, rows], *read)
                    del read, keys, values
                held[half] = [] if passing is None else passing.wait()
        lse = _with_sinks(output, lse, learnable[1])
        output = output.to(query.dtype)
        ctx.order, ctx.scoring = order, call.scoring
        ctx.save_for_backward(query, key, _let_go(value, query), output, lse, *learnable)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value and the scoring's learnable tensors; those of keys come from all ranks."""
        query, key, value, output, lse, *learnable = ctx.saved_tensors
        order: Order = ctx.order
        walk = RingWalk(order, Call(query, key, value, ctx.scoring.with_learnable(*learnable), 0.0))
        finite = lse.masked_fill(lse == -math.inf, 0.0)  # all scores of such a row are minus infinity
        to_query = torch.zeros_like(query, dtype=lse.dtype)
        learned = [None if x is None else torch.zeros_like(x) for x in learnable]

        def add_up(step: int, half: int, held: list[Tensor], collected: list[Tensor]) -> None:
            for piece, rows, cols in walk.pieces(step, half):
                (keys, values), (to_keys, to_values) = ([x[:, :, cols] for x in pair] for pair in (held, collected))
                met = Met(query[:, :, rows], keys, values)
                known = Known(output[:, :, rows], finite[:, :, rows], grad[:, :, rows])
                walk.engine.backward(piece, met, known, Gradients(to_query[:, :, rows], to_keys, to_values, learned))

        held = _halves(key, value)
        if order.ranks > 1:
            held = [Passing(half, order).wait() for half in held]
        coming: list[Passing | None] = [None, None]
        for step in range(1, order.ranks):
            for half in (0, 1):
                before = coming[half]
                collected = _zeros(held[half], lse.dtype) if before is None else before.wait()
                coming[half] = before = None
                passing = Passing(held[half], order) if step < order.ranks - 1 else None
                add_up(step, half, held[half], collected)
                coming[half] = Passing(collected, order)
                held[half] = [] if passing is None else passing.wait()
        halves = []
        for half, keys in enumerate(_halves(key, value)):  # this rank's own last, added to what arrives
            before = coming[half]
            halves.append(_zeros(keys, lse.dtype) if before is None else before.wait())
            add_up(0, half, keys, halves[half])
        to_key, to_value = (torch.cat(parts, 2).to(key.dtype) for parts in zip(*halves, strict=True))
        if learned[1] is not None:
            learned[1] += _gradient_of_sinks(grad, output, lse, learnable[1])
        return None, None, to_query.to(query.dtype), to_key, to_value, *learned


class RingWalk:
    """The pieces of this rank's queries with the keys that are here at each step of the ring."""

    def __init__(self, order: Order, call: Call) -> None:
        self.order, self.t = order, call.query.shape[2]
        self.T = self.t * order.ranks
        self.mask = call.scoring.mask
        self.engine: BlockEngine = engine_for(call, self.T, self.T)

    def pieces(self, step: int, half: int) -> list[tuple[Piece, slice, slice]]:
        """The pieces with one chunk of the keys here after `step` hops, and their slices of queries and chunk."""
        owner = (self.order.rank - step) % self.order.ranks
        cols, found = self.order.chunks(owner, self.t)[half], []
        for i, rows in enumerate(self.order.chunks(self.order.rank, self.t)):
            for piece in pieces(self.mask, rows, cols, self.T, self.T):
                here = _moved(piece.rows, i * len(rows) - rows.start), _moved(piece.cols, -cols.start)
                found.append((piece, *here))
        return found


def _halves(key: Tensor, value: Tensor) -> list[list[Tensor]]:
    """Key and value of the first chunk and of the second, which travel separately to need less memory at a time."""
    return [list(pair) for pair in zip(key.chunk(2, 2), value.chunk(2, 2), strict=True)]


def _let_go(value: Tensor, query: Tensor) -> Tensor:
    """The values to save for the backward pass: a copy if a view would keep other tensors alive.

    After a rotary or a norm, queries and keys no longer share the memory of the fused projection, but values do.
    """
    shared = value.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
    return value if shared else value.contiguous()


def _moved(positions: range, by: int) -> slice:
    return slice(positions.start + by, positions.stop + by)


def _zeros(like: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in like]


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The log-sum-exp with the sinks included; the output is scaled down in place by what they take."""
    if sinks is None:
        return lse
    total = torch.where(lse > -math.inf, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]), lse)
    output.mul_((lse - total.masked_fill(total == -math.inf, 0.0)).exp_()[..., None])
    return total


def _gradient_of_sinks(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of the sinks, which have no value: what they take is missing from the output."""
    taken = (sinks.to(lse.dtype)[:, None] - lse).exp_().masked_fill_(lse == -math.inf, 0.0)  # (B, H, t)
    balance = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
    return -(taken * balance).sum((0, 2)).to(sinks.dtype)


class Passing:
    """Tensors being sent to the next rank while those of the previous rank arrive."""

    def __init__(self, tensors: Sequence[Tensor], order: Order) -> None:
        sent = [x.contiguous() for x in tensors]
        self.arriving = [torch.empty_like(x) for x in sent]
        after, before = ((order.rank + step) % order.ranks for step in (1, -1))
        sends = [dist.P2POp(dist.isend, x, group=order.group, group_peer=after) for x in sent]
        receives = [dist.P2POp(dist.irecv, x, group=order.group, group_peer=before) for x in self.arriving]
        self._works = dist.batch_isend_irecv(sends + receives)
        self._sent = sent  # kept until they are sent

    def wait(self) -> list[Tensor]:
        """The tensors of the previous rank, once they have arrived and ours are sent."""
        for work in self._works:
            work.wait()
        self._sent = []
        return self.arriving
