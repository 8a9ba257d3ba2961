"""`Spread`: what a layer, a map and the engine ask where several ranks compute one attention together."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.attention.backends import Call, choose
from headwise.errors import OptionError
from headwise.parallel import gathering, statistics
from headwise.parallel.attention import ring_attend
from headwise.parallel.heads import Heads
from headwise.parallel.order import Order
from headwise.weights import AttentionMap
from headwise.weights.readings import Reading
from headwise.weights.source import Axis, Frame, Source


@dataclasses.dataclass(frozen=True)
class Spread:
    """Which heads this rank has, and in which order the sequence lies on ranks; None where it has all."""

    heads: Heads | None = None
    order: Order | None = None

    @property
    def ring(self) -> str | None:
        """The path of a call in words, where it goes over a ring of ranks."""
        if self.order is None:
            return None
        return f"keys and values handed around {self.order.ranks} ranks, what is read of each merged by log-sum-exp"

    @property
    def keys_apart(self) -> bool:
        """Whether other ranks have some of the keys."""
        return self.order is not None

    def sizes(self, sizes: Sequence[int]) -> tuple[int, int, int, int]:
        """(B, H, T, S) of the whole, of which ours are a part; masks and biases speak of these."""
        B, H, T, S = sizes
        H = H if self.heads is None else self.heads.total
        if self.order is None:
            return B, H, T, S
        self.order.check_part(T)
        return B, H, T * self.order.ranks, S * self.order.ranks

    def positions(self, query: Tensor) -> Tensor | None:
        """Where our queries (B, H, t, D) stand in the text; None where it lies here whole."""
        return None if self.order is None else self.order.positions(query.shape[2], query.device)

    def check_call(self, *, crossing: bool, cached: bool, packed: bool) -> None:
        """Raise where a call is of a kind that cannot be spread."""
        if self.order is None:
            return
        refused = {
            "keys of their own: it is for self-attention": crossing,
            "a cache: generate with tensor_parallel, or on one rank": cached,
            "a nested tensor: pack samples in one row and pass mask=documents(...)": packed,
        }
        for what, given in refused.items():
            if given:
                raise OptionError(f"context parallel does not take {what}.")

    def attend(self, call: Call) -> Tensor:
        """What our queries and heads read, (B, H, t, Dv)."""
        local = self.local(call)
        return choose(local).run(local) if self.order is None else ring_attend(local, self.order)[0]

    def attend_and_look(self, call: Call) -> tuple[Tensor, AttentionMap]:
        """The same, and the map of our queries and heads."""
        local = self.local(call)
        if self.order is None:
            read, lse = choose(local).run_with_lse(local)
        else:
            read, lse = ring_attend(local, self.order)
        scoring = call.scoring if self.heads is None else self.heads.in_whole(call.scoring)
        weights = AttentionMap(call.query, call.key, scoring, lse, self._frame(call), self)
        # Statistics over a ring of ranks have no gradient: the dense rows that one would need lie nowhere.
        return read, weights.detach() if self.keys_apart else weights

    def read(self, source: Source, readings: Sequence[Reading]) -> list[tuple[Tensor, ...]]:
        """The results of readings over keys that lie on several ranks."""
        assert self.order is not None  # noqa: S101 - else they lie on one
        return statistics.read(source, readings, self.order)

    def log_sum_exp(self, source: Source) -> Tensor:
        """The row log-sum-exp of our queries over keys that lie on several ranks."""
        assert self.order is not None  # noqa: S101 - else they lie on one
        return statistics.log_sum_exp(source, self.order)

    def gather(self, weights: AttentionMap) -> AttentionMap:
        """The whole map on every rank."""
        return gathering.gather(weights, self.heads, self.order)

    def local(self, call: Call) -> Call:
        """The call of our heads."""
        if self.order is not None and call.dropout > 0:
            raise OptionError(
                f"context parallel with dropout={call.dropout:g} on attention weights: ranks would have to agree on "
                f"what is dropped. Make the layer with dropout=0, or call model.eval(); other dropout may stay."
            )
        return call if self.heads is None else call._replace(scoring=self.heads.of(call.scoring))

    def _frame(self, call: Call) -> Frame:
        B, h, t, _ = call.query.shape
        _, H, T, S = self.sizes((B, h, t, call.key.shape[2]))
        heads = range(h) if self.heads is None else range(self.heads.first, self.heads.first + h)
        rows: Axis = range(t) if self.order is None else self.order.positions(t, torch.device("cpu"))
        return Frame(range(B), heads, rows, B, H, T, S)
