"""`ring_attend`: exact attention over a sequence that no rank holds whole.

Queries stay where they are. Keys and values are handed around the ring of ranks, one hop while the last block is being
computed; what a query reads in each block is merged by its log-sum-exp. Backwards, keys and values go round once more,
and their gradients travel one hop behind, collecting from every rank until they are home:

    forward    (n − 1) hops of key and value
    backward   (n − 1) hops of key and value, and as many of their gradients, in float32 or better
"""

import math
from typing import Any

import torch
from torch import Tensor

from headwise.backends.base import Call
from headwise.parallel.blocks import Engine, Gradients, engine_for, merge
from headwise.parallel.order import Order
from headwise.parallel.pieces import Piece, pieces
from headwise.parallel.ring import Passing


def ring_attend(call: Call, order: Order) -> tuple[Tensor, Tensor]:
    """What this rank's queries read, (B, H, t, Dv), and their log-sum-exp (B, H, t), which has no gradient.

    Args:
        call: this rank's query, key and value, in the order of `order`; its scoring is that of the whole text.
        order: how the text lies on ranks.
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
        walk = Walk(order, call)
        B, H, t, _ = query.shape
        precise = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(B, H, t, value.shape[3], dtype=precise, device=query.device)
        lse = torch.full((B, H, t), -math.inf, dtype=precise, device=query.device)
        held: list[Tensor] = [key, value]
        for step in range(order.ranks):
            passing = Passing(held, order) if step < order.ranks - 1 else None
            for piece, rows, cols in walk.pieces(step):
                read, read_lse = walk.engine.forward(piece, query[:, :, rows], *(x[:, :, cols] for x in held))
                merge(output[:, :, rows], lse[:, :, rows], read, read_lse)
                del read, read_lse
            held = [] if passing is None else passing.wait()
        lse = _with_sinks(output, lse, learnable[1])
        output = output.to(query.dtype)
        ctx.order, ctx.call = order, call._replace(query=query[:0], key=key[:0], value=value[:0])
        ctx.save_for_backward(query, key, value, output, lse, *learnable)
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of query, key, value and of what the scoring learns; those of keys come from all ranks."""
        query, key, value, output, lse, *learnable = ctx.saved_tensors
        order: Order = ctx.order
        scoring = ctx.call.scoring.with_learnable(*learnable)
        walk = Walk(order, ctx.call._replace(query=query, key=key, value=value, scoring=scoring))
        finite = lse.masked_fill(lse == -math.inf, 0.0)  # such a row's scores are all minus infinity
        to_query = torch.zeros_like(query, dtype=lse.dtype)
        learned = [None if x is None else torch.zeros_like(x) for x in learnable]

        def add_up(step: int, keys: Tensor, values: Tensor, to_key: Tensor, to_value: Tensor) -> None:
            for piece, rows, cols in walk.pieces(step):
                place = (query[:, :, rows], keys[:, :, cols], values[:, :, cols])
                whole_rows = (x[:, :, rows] for x in (output, finite, grad))
                found = walk.engine.backward(piece, *place, *whole_rows)
                to_query[:, :, rows] += found.query
                to_key[:, :, cols] += found.key
                to_value[:, :, cols] += found.value
                _add_learned(learned, found)

        passing = Passing([key, value], order) if order.ranks > 1 else None
        coming: Passing | None = None
        for step in range(1, order.ranks):
            assert passing is not None  # noqa: S101 - there is another rank
            held = passing.wait()
            passing = Passing(held, order) if step < order.ranks - 1 else None
            gathered = _zeros(held, lse.dtype) if coming is None else coming.wait()
            add_up(step, *held, *gathered)
            held = []
            coming = Passing(gathered, order)
            del gathered
        home = _zeros([key, value], lse.dtype) if coming is None else coming.wait()
        add_up(0, key, value, *home)  # our own last, into what the others have collected for us
        if learned[1] is not None:
            learned[1] += _gradient_of_sinks(grad, output, lse, learnable[1])
        to_key, to_value = (x.to(key.dtype) for x in home)
        return None, None, to_query.to(query.dtype), to_key, to_value, *learned


class Walk:
    """The pieces of this rank's queries and of the keys that lie here at each step of the ring."""

    def __init__(self, order: Order, call: Call) -> None:
        self.order, self.t = order, call.query.shape[2]
        self.T = self.t * order.ranks
        self.mask = call.scoring.mask
        self.engine: Engine = engine_for(call, self.T, self.T)

    def pieces(self, step: int) -> list[tuple[Piece, slice, slice]]:
        """Pieces, with the slices of our queries and of the keys that are here after `step` hops."""
        owner = (self.order.rank - step) % self.order.ranks
        size, found = self.t // 2, []
        for i, rows in enumerate(self.order.chunks(self.order.rank, self.t)):
            for j, cols in enumerate(self.order.chunks(owner, self.t)):
                for piece in pieces(self.mask, rows, cols, self.T, self.T):
                    here = _moved(piece.rows, i * size - rows.start), _moved(piece.cols, j * size - cols.start)
                    found.append((piece, *here))
        return found


def _moved(positions: range, by: int) -> slice:
    return slice(positions.start + by, positions.stop + by)


def _zeros(like: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in like]


def _add_learned(learned: list[Tensor | None], found: Gradients) -> None:
    for total, part in zip(learned, found.learnable, strict=False):
        if total is not None and part is not None:
            total += part


def _with_sinks(output: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """The log-sum-exp with the sinks counted; the output is made smaller by what they take, in place."""
    if sinks is None:
        return lse
    total = torch.where(lse > -math.inf, torch.logaddexp(lse, sinks.to(lse.dtype)[:, None]), lse)
    output.mul_((lse - total.masked_fill(total == -math.inf, 0.0)).exp_()[..., None])
    return total


def _gradient_of_sinks(grad: Tensor, output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink hands over nothing: what it takes is missing from the output."""
    taken = (sinks.to(lse.dtype)[:, None] - lse).exp_().masked_fill_(lse == -math.inf, 0.0)  # (B, H, t)
    balance = (grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
    return -(taken * balance).sum((0, 2)).to(sinks.dtype)
