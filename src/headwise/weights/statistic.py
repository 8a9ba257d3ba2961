"""A statistic of your own: a function of weight, score, positions and tokens, and how its values are combined.

>>> import torch
>>> from headwise.weights import AttentionMap, Statistic
>>> weights = AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16))
>>> squares = Statistic(lambda pair: pair.weight**2)  # Σ w² of every query
>>> weights.read(squares)[0].shape
torch.Size([2, 4, 9])
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.masks import Grid, Mask
from headwise.masks.probes import token_ids
from headwise.shapes import brief
from headwise.weights.panel import checked_probe
from headwise.weights.readings import Reading, unflat, zeros
from headwise.weights.source import RowBlock, Source
from headwise.weights.tiles import Tile

COMBINED = ("sum", "max", "count")


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """Some pairs of a query and a key. Everything here broadcasts to the shape of `weight`, (..., queries, keys).

    weight: the attention weights.
    log_weight: their logarithms; a very low number where a key is hidden.
    score: the input of the softmax.
    position: where the queries are among the keys.
    key: the indices of the keys.
    query_token, key_token: the tokens, if the statistic was given any.
    """

    weight: Tensor
    log_weight: Tensor
    score: Tensor
    position: Tensor
    key: Tensor
    query_token: Tensor | None = None
    key_token: Tensor | None = None

    @property
    def distance(self) -> Tensor:
        """How far the key is before the query; negative if it comes after it."""
        return self.position - self.key


Function = Callable[[Pairs], Tensor]


class Statistic(Reading):
    """Any statistic of single weights, combined over the keys of every query or over the queries of every key.

    `weights.read(statistic)` gives a tuple: the sum or the count, (B, H, T) or (B, H, S); for "max" the largest value
    and the first key, or query, that has it, 0 and -1 if there is none. Pairs that the mask hides do not count.

    Args:
        function: what one pair contributes, a number, or for "count" True or False. It gets `Pairs` and must work on
            tensors of any shape. Sums and the largest values of queries have the gradient that torch finds for it.
        combine: "sum", "max" or "count".
        by: "query" for one result per query, "key" for one per key.
        where: only pairs where this mask is True count. Tiles that it excludes are skipped, so that a statistic of
            `window(8)` or `sink(4)` takes little time.
        tokens: the tokens of the keys, (S,) or (B, S), for `Pairs.query_token` and `Pairs.key_token`.
        kernel: the same function for CUDA, decorated with `@triton.jit`. It gets the fields of `Pairs` and `distance`,
            positions and keys as floats, and shares one pass with the other statistics. Without it, CUDA tensors are
            read tile by tile with `function`, as on the CPU. Either way no T×T matrix exists.
    """

    def __init__(
        self,
        function: Function,
        *,
        combine: str = "sum",
        by: str = "query",
        where: Mask | None = None,
        tokens: Tensor | Sequence[int] | None = None,
        kernel: Any = None,
    ) -> None:
        if not callable(function):
            raise OptionError(f"Statistic({brief(function)}): expected a function of the pairs of queries and keys.")
        if kernel is not None and not hasattr(kernel, "fn"):
            raise OptionError(f"Statistic(kernel={brief(kernel)}): expected a function decorated with @triton.jit.")
        if combine not in COMBINED or by not in ("query", "key"):
            raise OptionError(
                f"Statistic(combine={combine!r}, by={by!r}): expected combine to be one of {', '.join(COMBINED)}, and "
                f'by to be "query" or "key".'
            )
        self.function, self.combine, self.by_row, self.where = function, combine, by == "query", where
        self.kernel = kernel
        self.tokens = None if tokens is None else token_ids("Statistic(tokens)", tokens)
        self.merged = "max" if combine == "max" else "sum"
        self.differentiable = {"sum": (True,), "count": (False,), "max": (self.by_row, False)}[combine]

    def for_ranks(self) -> Reading:
        if self.combine == "max" and not self.by_row:
            raise OptionError(
                "the largest value of every key cannot be found if ranks share the queries: gather() first."
            )
        return self

    def start(self, source: Source) -> None:
        self.source = source
        self.probe = None if self.where is None else checked_probe(self.where, source)
        n = source.shape[2] if self.by_row else source.shape[3]
        dtype = torch.int64 if self.combine == "count" else source.precise if self.by_row else torch.float64
        self.total = zeros(source, n, dtype=dtype)
        if self.combine == "max":
            self.total -= math.inf
            self.place = zeros(source, n, dtype=torch.int64) - 1

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return (0, S) if self.probe is None else self.probe.key_range(start, stop, T, S)

    def take(self, tile: Tile) -> None:
        if self._apart(tile):
            return
        seen = tile.visible
        if self.probe is not None:
            seen = tile.where(self.probe) if seen is None else seen & tile.where(self.probe)
        values = self._values(self._pairs(tile), seen)
        if self.combine == "max":
            self._raise(tile, values)
        else:
            self._total(tile).add_(values.sum(-1 if self.by_row else -2, dtype=self.total.dtype))

    def finish(self) -> tuple[Tensor, ...]:
        dtype = self.total.dtype if self.combine == "count" else self.source.precise
        if self.combine != "max":
            return (unflat(self.total.to(dtype), self.source),)
        largest = self.total.masked_fill(self.place < 0, 0.0)
        return unflat(largest.to(dtype), self.source), unflat(self.place, self.source)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        source, axis = self.source, -1 if self.by_row else -2
        probe = None if self.where is None else checked_probe(self.where, source)
        seen = block.scores > -math.inf
        seen = seen if probe is None else seen & probe.visible(block.grid)
        positions = source.scoring.positions
        grid = block.grid if positions is None else block.grid.placed(positions)
        asked, offered = self._tokens(grid)
        pairs = Pairs(block.weights, block.logs, block.scores, grid.position, grid.col, asked, offered)
        values = self._values(pairs, seen)
        if self.combine != "max":
            return (values.sum(axis),)
        largest, place = values.max(axis)
        nothing = ~seen.any(axis)
        place = place if self.by_row else block.rows.indices(source.shape[2])[0] + place
        return largest.masked_fill(nothing, 0.0), place.masked_fill(nothing, -1)

    def _values(self, pairs: Pairs, seen: Tensor | None) -> Tensor:
        """The function's values (..., t, s), with those that do not count replaced by the neutral one."""
        values: Any = self.function(pairs)
        try:
            values = values.expand(pairs.weight.shape)
        except (AttributeError, RuntimeError) as error:
            what = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise OptionError(
                f"the function of a Statistic gave {what}; expected a tensor that broadcasts to the weights it got, "
                f"{tuple(pairs.weight.shape)}."
            ) from error
        found: Tensor = values != 0 if self.combine == "count" else values.to(pairs.weight.dtype)
        neutral = torch.tensor(-math.inf if self.combine == "max" else 0, dtype=found.dtype, device=found.device)
        return found if seen is None else torch.where(seen, found, neutral)

    def _apart(self, tile: Tile) -> bool:
        """Whether `where` is False in the whole tile."""
        frame = self.source.frame
        lo, hi = self.key_range(*tile.span, frame.T, frame.S)
        return bool(hi <= tile.cols.start or tile.cols.stop <= lo)

    def _pairs(self, tile: Tile) -> Pairs:
        lse = self.source.log_sum_exp
        assert lse is not None  # noqa: S101 - weights were computed from it
        norm = lse.detach().flatten(0, 1)[tile.heads, tile.rows, None]
        asked, offered = (None, None) if self.tokens is None else self._tokens(tile.grid)
        position = tile.position[..., None]
        return Pairs(tile.weights, tile.logs, tile.logs + norm, position, tile.col, asked, offered)

    def _tokens(self, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        """The tokens of the queries and of the keys at these indices."""
        if self.tokens is None:
            return None, None
        tokens = self._checked_tokens(grid.S).to(grid.col.device)
        batch = grid.batch if tokens.shape[0] > 1 else grid.batch * 0
        return tokens[batch, grid.position.clamp(0, grid.S - 1)], tokens[batch, grid.col]

    def token_tables(self, source: Source) -> tuple[Tensor, Tensor] | None:
        """The tokens of all queries (B or 1, T) and keys (B or 1, S), for a kernel."""
        if self.tokens is None:
            return None
        tokens = self._checked_tokens(source.frame.S).to(source.query.device)
        tokens = tokens if len(tokens) == 1 else tokens[source.axis("batch")]
        return tokens[:, source.positions().clamp(0, source.frame.S - 1)].contiguous(), tokens.contiguous()

    def _checked_tokens(self, S: int) -> Tensor:
        assert self.tokens is not None  # noqa: S101 - callers check it
        if self.tokens.shape[1] != S:
            raise OptionError(f"Statistic(tokens): {self.tokens.shape[1]} tokens for {S} keys; expected one for each.")
        return self.tokens

    def _total(self, tile: Tile) -> Tensor:
        return self.total[tile.heads, tile.rows if self.by_row else tile.cols]

    def _raise(self, tile: Tile, values: Tensor) -> None:
        along = tile.rows if self.by_row else tile.cols
        largest, place = values.max(-1 if self.by_row else -2)
        total, known = self.total[tile.heads, along], self.place[tile.heads, along]
        place = place + (tile.cols.start if self.by_row else tile.rows.start)
        # Of equal values the first counts, in whatever order tiles come; where nothing counts there is no place.
        better = (largest > total) | ((largest == total) & (largest > -math.inf) & (place < known))
        known.copy_(torch.where(better, place, known))
        torch.maximum(total, largest.to(total.dtype), out=total)
