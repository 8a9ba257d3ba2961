"""`Sharding`: attention that several ranks compute together, and its maps.

Ranks share the heads, the sequence, or both. A layer asks for the output and the map of this rank's heads and queries;
a map asks for statistics over keys on other ranks, and for the whole.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from headwise.attention.backends import Call, choose
from headwise.errors import OptionError, ShapeError
from headwise.masks.composite import put_together, take_apart
from headwise.masks.mask import of_heads
from headwise.parallel.ring import Order, Passing, all_parts, ring_attend, unshard_sequence
from headwise.weights import AttentionMap, Reading, Relative, Scoring
from headwise.weights.scoring import RenumberedHeads
from headwise.weights.source import Axis, Frame, Source
from headwise.weights.tiles import TileWalk

MERGES = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclasses.dataclass(frozen=True)
class Heads:
    """Query heads `first` to `first + count − 1` of `total`, on this rank of `mesh`."""

    mesh: DeviceMesh
    first: int
    count: int
    total: int

    def of(self, scoring: Scoring) -> Scoring:
        """The scoring of this rank's heads, numbered from 0."""
        bias, sinks, *_ = scoring.learnable
        return dataclasses.replace(
            scoring,
            mask=None if scoring.mask is None else of_heads(scoring.mask, self.first, self.count),
            bias=self._own(bias, 1) if bias is not None and bias.dim() == 4 and bias.shape[1] > 1 else bias,
            sinks=None if sinks is None else self._own(sinks, 0),
            relative=None if scoring.relative is None else self._own_relative(scoring.relative),
            score=None if scoring.applied is None else scoring.applied.of_heads(self.first),
        )

    def in_whole(self, scoring: Scoring) -> Scoring:
        """The scoring as a map of this rank's heads needs it, with heads numbered in the whole.

        What is known only for this rank's heads is 0 or undefined for the others, which the map never asks for.
        """
        _, sinks, *_ = scoring.learnable
        if isinstance(sinks, DTensor):
            after = self.total - self.first - self.count
            sinks = torch.nn.functional.pad(sinks.to_local(), (self.first, after))
        relative = scoring.relative
        if relative is not None and _is_sharded(relative):
            relative = ShardedHeads(relative, self)
        return dataclasses.replace(scoring, sinks=sinks, relative=relative)

    def joined(self, scoring: Scoring) -> Scoring:
        """The inverse of `in_whole`: the scoring of all heads, from all ranks."""
        _, sinks, *_ = scoring.learnable
        sinks = None if sinks is None else torch.cat(all_parts(self._own(sinks, 0), self.mesh))
        relative = scoring.relative
        if isinstance(relative, ShardedHeads):
            relative = relative.joined(self.mesh)
        return dataclasses.replace(scoring, sinks=sinks, relative=relative)

    def _own(self, x: Tensor, axis: int) -> Tensor:
        """This rank's part of a tensor that is sharded, or whole on every rank."""
        return x.to_local() if isinstance(x, DTensor) else x.narrow(axis, self.first, self.count)

    def _own_relative(self, relative: Relative) -> Relative:
        """The rule for this rank's heads, numbered from 0. Its tensors are sharded, or whole as ALiBi's slopes are."""
        return _local(relative) if _is_sharded(relative) else RenumberedHeads(relative, self.first, self.count)


class ShardedHeads(RenumberedHeads):
    """A rule whose tensors are sharded over ranks by head, for a map that numbers heads in the whole."""

    def __init__(self, relative: Relative, heads: Heads) -> None:
        super().__init__(_local(relative), -heads.first, heads.total)
        tensors, _ = take_apart(relative)
        sharded = {name: x.placements for name, x in tensors.items() if isinstance(x, DTensor)}
        self.axes = {name: next(p.dim for p in found if isinstance(p, Shard)) for name, found in sharded.items()}

    def joined(self, mesh: DeviceMesh) -> Relative:
        """The rule for all heads, from all ranks."""
        tensors, plan = take_apart(self.inner)
        for name, axis in self.axes.items():
            tensors[name] = torch.cat(all_parts(tensors[name], mesh), axis)
        made: Relative = put_together(plan, tensors)
        return made


def _is_sharded(relative: Relative) -> bool:
    return any(isinstance(x, DTensor) for x in relative.tensors())


def _local(relative: Relative) -> Relative:
    return relative.map_tensors(lambda x: x.to_local() if isinstance(x, DTensor) else x)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """This rank's heads, and the order of the sequence over ranks; None where this rank has all of it."""

    heads: Heads | None = None
    order: Order | None = None

    @property
    def ring(self) -> str | None:
        """A description of the path of a call, if it uses a ring of ranks."""
        if self.order is None:
            return None
        return f"keys and values passed around {self.order.ranks} ranks, partial results merged by log-sum-exp"

    # Called by layers.

    def sizes(self, sizes: Sequence[int]) -> tuple[int, int, int, int]:
        """(B, H, T, S) of the whole, to which masks and biases refer, from those of this rank."""
        B, H, T, S = sizes
        H = H if self.heads is None else self.heads.total
        if self.order is None:
            return B, H, T, S
        self.order.check_part(T)
        return B, H, T * self.order.ranks, S * self.order.ranks

    def positions(self, query: Tensor) -> Tensor | None:
        """The positions of this rank's queries (B, H, t, D) in the text; None if the rank has all of it."""
        return None if self.order is None else self.order.positions(query.shape[2], query.device)

    def check_call(self, *, crossing: bool, cached: bool, packed: bool) -> None:
        """Raise if a call is of a kind that cannot be sharded."""
        if self.order is None:
            return
        refused = {
            "cross-attention, only self-attention": crossing,
            "a cache: generate with tensor_parallel, or on one rank": cached,
            "a nested tensor: pack samples in one row and pass mask=documents(...)": packed,
        }
        for what, given in refused.items():
            if given:
                raise OptionError(f"context parallel does not support {what}.")

    def agreed(self, number: int) -> int:
        """The `number` of the first rank, on every rank that shares the heads."""
        if self.heads is None:
            return number
        mesh = self.heads.mesh
        told = torch.tensor(number, device=mesh.device_type)
        dist.broadcast(told, group=mesh.get_group(), group_src=0)
        return int(told)

    def local(self, call: Call) -> Call:
        """The call of this rank's heads."""
        if self.order is not None and call.dropout > 0:
            raise OptionError(
                f"context parallel with dropout={call.dropout:g} on attention weights: ranks would have to agree on "
                f"what is dropped. Make the layer with dropout=0, or call model.eval(); other dropout may stay."
            )
        return call if self.heads is None else call._replace(scoring=self.heads.of(call.scoring))

    def attend(self, call: Call) -> Tensor:
        """The output of this rank's queries and heads, (B, H, t, Dv)."""
        local = self.local(call)
        return choose(local).run(local) if self.order is None else ring_attend(local, self.order)[0]

    def attend_and_look(self, call: Call) -> tuple[Tensor, AttentionMap]:
        """The same, and the map of this rank's queries and heads."""
        local = self.local(call)
        if self.order is None:
            output, lse = choose(local).run_with_lse(local)
        else:
            output, lse = ring_attend(local, self.order)
        scoring = call.scoring if self.heads is None else self.heads.in_whole(call.scoring)
        weights = AttentionMap(call.query, call.key, scoring, lse, self._frame(call), self)
        # Statistics over a ring of ranks have no gradient: no rank has the dense rows that it would need.
        return output, weights.detach() if self.keys_apart else weights

    def _frame(self, call: Call) -> Frame:
        B, h, t, _ = call.query.shape
        _, H, T, S = self.sizes((B, h, t, call.key.shape[2]))
        heads = range(h) if self.heads is None else range(self.heads.first, self.heads.first + h)
        rows: Axis = range(t) if self.order is None else self.order.positions(t, torch.device("cpu"))
        return Frame(range(B), heads, rows, B, H, T, S)

    # Called by maps.

    @property
    def keys_apart(self) -> bool:
        """Whether other ranks hold some of the keys."""
        return self.order is not None

    def read(self, source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
        """The results of readings: of this rank's rows, or merged over ranks if they are not by row.

        The weights of a tile are exp(score − log-sum-exp of the whole row), the true ones on every rank, so every
        reading works as it does on one. All ranks must call this, because keys pass around the ring.
        """
        order = self._order
        assert source.log_sum_exp is not None  # noqa: S101 - it was computed first
        used = [reading.for_ranks() for reading in readings]
        for reading in used:
            if not reading.by_row and reading.merged not in MERGES:
                name = type(reading).__name__
                raise OptionError(
                    f"{name} combines queries, and the queries of this map are on {order.ranks} ranks. Set "
                    f"{name}.merged to 'sum', 'mean' or 'max', which says how to merge the results of the ranks, or "
                    f"read weights.gather()."
                )
        for reading in used:
            reading.start(source)
        for part in _parts(source, order):
            TileWalk(part).feed(source.log_sum_exp, used)
        return [_merged(reading, order) for reading in used]

    def log_sum_exp(self, source: Source) -> Tensor:
        """The row log-sum-exp of this rank's queries, (B, H, t), sinks included."""
        plain = dataclasses.replace(source, scoring=dataclasses.replace(source.scoring, sinks=None))
        found: Tensor | None = None
        for part in _parts(plain, self._order):
            lse = TileWalk(part).log_sum_exp()
            found = lse if found is None else torch.logaddexp(found, lse)
        assert found is not None  # noqa: S101 - every rank has keys
        return source.with_sinks(found)

    @torch.no_grad()
    def gather(self, weights: AttentionMap) -> AttentionMap:
        """The whole map on every rank; all ranks must call it."""
        source = weights.detach()._normalised()
        query, key, lse, frame, scoring = source.query, source.key, source.log_sum_exp, source.frame, source.scoring
        assert lse is not None  # noqa: S101 - it is normalized
        if self.order is not None:
            rows, arranged = _arranged(source.axis("row"), self.order.mesh, 2)
            query, lse, key = arranged(query), arranged(lse), unshard_sequence(key, self.order.mesh, 2)
            frame = frame._replace(row=rows)
        if self.heads is not None:
            mesh = self.heads.mesh
            names, arranged = _arranged(source.axis("head"), mesh, 1)
            grouped = key.shape[1] < query.shape[1]  # whole groups, which are in order
            key = torch.cat(all_parts(key, mesh), 1) if grouped else arranged(key)
            query, lse = arranged(query), arranged(lse)
            frame, scoring = frame._replace(head=names), self.heads.joined(scoring)
        return AttentionMap(query, key, scoring, lse, frame)

    @property
    def _order(self) -> Order:
        assert self.order is not None  # noqa: S101 - otherwise this rank has all keys
        return self.order


def _parts(source: Source, order: Order) -> Iterator[Source]:
    """The source with the keys of one chunk after another, until all have passed."""
    held = [source.key]
    for step in range(order.ranks):
        passing = Passing(held, order) if step < order.ranks - 1 else None
        chunks = order.chunks((order.rank - step) % order.ranks, held[0].shape[2])
        for chunk, key in zip(chunks, held[0].chunk(2, dim=2), strict=True):
            yield dataclasses.replace(source, key=key, first_key=chunk.start)
        held = [] if passing is None else passing.wait()


def _merged(reading: Reading, order: Order) -> tuple[Tensor, ...]:
    """The results of a reading, merged over ranks unless they are by row."""
    results = reading.finish()
    if reading.by_row or reading.merged is None:
        return results
    results = tuple(x.contiguous() for x in results)
    for result in results:
        dist.all_reduce(result, MERGES[reading.merged], group=order.group)
    return tuple(x / order.ranks for x in results) if reading.merged == "mean" else results


def _arranged(indices: Tensor, mesh: DeviceMesh, dim: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The indices of all ranks, sorted, and a function that joins the ranks' parts of a tensor in that order."""
    counts: list[int] = [0] * mesh.size()
    dist.all_gather_object(counts, len(indices), group=mesh.get_group())
    if len(set(counts)) > 1:
        raise ShapeError(
            f"gather(): the ranks selected {counts} of the queries or heads; expected the same number on each. "
            f"Select as many on all ranks, or gather first and then select."
        )
    everywhere = torch.cat(all_parts(indices, mesh))
    order = everywhere.argsort()
    return everywhere[order].cpu(), lambda x: torch.cat(all_parts(x, mesh), dim).index_select(dim, order)
