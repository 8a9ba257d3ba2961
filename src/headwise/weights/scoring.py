"""What a score is: everything that turns `q·k` into an attention weight.

`Scoring` holds the scale, soft-cap, a function of the user, bias, relative position, sinks and mask. Relative positions
(ALiBi, learned buckets as in T5, and rules of your own) add a number per head and distance to the scaled score. Each is
a rule with a small table, never a T×S tensor: kernels, tiles and single weights ask for the numbers they need.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.masks import Composite, Grid, Mask
from headwise.masks.composite import as_real_tensor
from headwise.masks.lowering import additive, may_empty_a_row, simplify
from headwise.shapes import check_size
from headwise.weights.score import Score, ScoreFunction

WHOLE = slice(None)
LEAST = -1e9  # a lower finite bias would hide no more, and would swamp the scores even in float64


@dataclasses.dataclass(frozen=True, eq=False)
class Relative(Composite, abc.ABC):
    """What is added to a score for the distance from query to key.

    A subclass defines `at` and `num_heads`. Its tensors, `table` and any others, are copied, moved and saved along with
    it, and those of floating point are differentiated.
    """

    table: Tensor

    @abc.abstractmethod
    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        """The numbers to add at these indices; broadcasts to the tile and is differentiable in the tensors."""

    @property
    @abc.abstractmethod
    def num_heads(self) -> int:
        """How many heads there are numbers for."""

    def with_table(self, table: Tensor) -> Self:
        """The same rule with another table."""
        if "__dataclass_fields__" in vars(type(self)):
            return dataclasses.replace(self, table=table)
        return self.map_tensors(lambda x: table if x is self.table else x)

    @property
    def learnable(self) -> tuple[Tensor, ...]:
        """The tensors that can have a gradient."""
        return tuple(x for x in self.tensors() if x.is_floating_point())

    def with_learnable(self, tensors: Sequence[Tensor]) -> Self:
        """The same rule with other tensors in place of `learnable`."""
        given = iter(tensors)
        return self.map_tensors(lambda x: next(given) if x.is_floating_point() else x)

    def check(self, H: int, device: torch.device) -> None:
        """Raise unless this fits H heads on `device`."""
        if self.num_heads != H:
            raise ShapeError(f"{self._name} was made for {self.num_heads} heads and there are {H}. Make it for {H}.")
        for x in self.tensors():
            if x.device != device:
                raise ShapeError(f"{self._name} is on {x.device} and the query on {device}; move one with .to(...).")

    @property
    def _name(self) -> str:
        return type(self).__name__


@dataclasses.dataclass(frozen=True, eq=False)
class Slopes(Relative):
    """ALiBi: −slope · distance. `table` is (H,)."""

    _name = "alibi(...)"

    @property
    def num_heads(self) -> int:
        return self.table.shape[0]

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        return self.table.to(dtype)[grid.head] * -(grid.position - grid.col).abs().to(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class KeyBias(Relative):
    """A number per sample, head and key, added to every score of that key. `table` is (B, H, S)."""

    inner: Relative | None = None  # what was added before

    @property
    def num_heads(self) -> int:
        return self.table.shape[1]

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        added = self.table.to(dtype)[grid.batch, grid.head, grid.col]
        return added if self.inner is None else added + self.inner.at(grid, dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Buckets(Relative):
    """T5: one number per head and bucket of distances. `table` is (buckets, H)."""

    max_distance: int = 128
    bidirectional: bool = True
    _name = "RelativeBias(...)"

    @property
    def num_heads(self) -> int:
        return self.table.shape[1]

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        bucket = bucket_of(grid.col - grid.position, self.table.shape[0], self.max_distance, self.bidirectional)
        return self.table.to(dtype)[bucket, grid.head]


class RenumberedHeads(Relative):
    """Any rule with its heads renumbered: head h is head h + `shift` of `inner`. Ranks that share heads need it."""

    def __init__(self, inner: Relative, shift: int, count: int) -> None:
        self.inner, self.shift, self.count = inner, shift, count

    @property
    def table(self) -> Tensor:
        """The table of the inner rule."""
        return self.inner.table

    @property
    def num_heads(self) -> int:
        return self.count

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        return self.inner.at(grid._replace(head=grid.head + self.shift), dtype)


def bucket_of(ahead: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance `ahead` (key minus query), as in T5.

    Half of the buckets hold one distance each; the others grow logarithmically up to `max_distance`.

    >>> bucket_of(torch.tensor([0, -1, -8, -500, 3]), buckets=32, max_distance=128, bidirectional=True).tolist()
    [0, 1, 8, 15, 19]
    """
    first = torch.zeros_like(ahead)
    if bidirectional:
        buckets //= 2
        first = (ahead > 0) * buckets
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    exact = buckets // 2
    share = (distance.clamp(min=exact).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def alibi(num_heads: int | None = None, *, slopes: Tensor | Sequence[float] | None = None) -> Slopes:
    """ALiBi: slope · distance is subtracted from every score, with one slope per head.

    Args:
        num_heads: use the published slopes, 2^(−8/H), 2^(−16/H), ... If H is not a power of two, these are the slopes
            of the next smaller one and every second slope of the next larger one.
        slopes: (H,), to use instead.

    >>> alibi(4).table.tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if (num_heads is None) == (slopes is None):
        raise OptionError("alibi(): pass exactly one of num_heads and slopes=.")
    if slopes is None:
        return Slopes(as_real_tensor(_published(check_size("num_heads", num_heads))))
    try:
        table = as_real_tensor(slopes, torch.get_default_dtype())
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(f"alibi(slopes={slopes!r}): expected one float per head, (H,).") from error
    if table.dim() != 1 or not table.is_floating_point():
        raise ShapeError(f"slopes of shape {tuple(table.shape)} and {table.dtype}; expected one float per head, (H,).")
    return Slopes(table)


def _published(H: int) -> list[float]:
    whole = 2 ** int(math.log2(H))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    between = [2 ** (-4 * (i + 1) / whole) for i in range(0, 2 * whole, 2)]
    return slopes + between[: H - whole]


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distances, as in T5. To share it, pass the same module to several layers.

    >>> bias = RelativeBias(8, num_buckets=32, max_distance=128, bidirectional=False)
    >>> bias.weight.shape
    torch.Size([32, 8])

    Args:
        num_heads: query heads.
        num_buckets: at least 4 if `bidirectional`, else 2.
        max_distance: all distances from here on share the last bucket.
        bidirectional: whether keys ahead have separate buckets; a decoder sees no keys ahead.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, buckets = check_size("num_heads", num_heads), check_size("num_buckets", num_buckets)
        fewest = 4 if bidirectional else 2
        if buckets < fewest or buckets % fewest:
            raise OptionError(f"num_buckets={num_buckets}: expected a multiple of {fewest}, such as 32.")
        self.max_distance, self.bidirectional = check_size("max_distance", max_distance), bool(bidirectional)
        exact = buckets // fewest
        if self.max_distance <= exact:
            raise OptionError(
                f"max_distance={max_distance}: the first {exact} distances have a bucket each, so it must be more "
                f"than {exact}."
            )
        self.weight = nn.Parameter(torch.empty(buckets, H, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new numbers, from a normal distribution with standard deviation 0.02."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self) -> Buckets:
        """The rule, for `Scoring(relative=...)`."""
        return Buckets(self.weight, self.max_distance, self.bidirectional)

    def extra_repr(self) -> str:
        """The options."""
        buckets, H = self.weight.shape
        return f"{H}, num_buckets={buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring(Composite):
    """score = function(cap(scale · q·k)) + relative + bias, and minus infinity where the mask hides a key.

    Args:
        mask: which keys each query may see; None hides nothing.
        bias: (T, S) or (B or 1, H or 1, T or 1, S or 1), added to the scaled scores; differentiable.
        scale: 1 / sqrt(D) unless given.
        softcap: scaled scores become softcap · tanh(score / softcap), before the bias.
        sinks: (H,), an extra score per head that takes part in the softmax and has no value. True tells a layer to
            learn them.
        relative: added for the distance from query to key, such as `alibi(H)`.
        positions: (B or 1, T), the positions of the queries among the keys, for `relative` and `score`; by default at
            their end.
        score: a function (score, batch, head, query, key) -> score, applied after scale and soft-cap and before
            `relative`, `bias` and `mask`. Minus infinity hides a key.
        cross: whether this is cross-attention: queries and keys are different texts, so a query has no position among
            the keys. No score depends on it, but what summaries look for does.
    """

    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | bool | None = None
    relative: Relative | None = None
    positions: Tensor | None = None
    score: Score | ScoreFunction | None = None
    cross: bool = False
    _later = frozenset({"cross"})

    def __post_init__(self) -> None:
        if self.sinks is False:  # what a layer accepts for "none"
            object.__setattr__(self, "sinks", None)
        if self.score is not None and not isinstance(self.score, Score):
            object.__setattr__(self, "score", Score(self.score))

    @property
    def beyond_sdpa(self) -> bool:
        """Whether there is something that torch's fused attention cannot do."""
        softcap, sinks = self.softcap, self.sinks
        return softcap is not None or sinks is not None or self.relative is not None or self.score is not None

    @property
    def linear(self) -> bool:
        """Whether a score is the scaled dot product, with at most a bias added: what fused kernels compute."""
        return self.softcap is None and self.relative is None and self.score is None

    @property
    def hides_keys(self) -> bool:
        """Whether something other than the mask may hide keys: minus infinity in a bias, or from `score`."""
        return self.bias is not None or self.score is not None

    @property
    def biased(self) -> bool:
        """Whether something is added to the scores."""
        return self.bias is not None or self.relative is not None

    @property
    def learnable(self) -> tuple[Tensor | None, ...]:
        """The bias and the sinks, None if they are not there, then the tensors of `relative` and of `score`."""
        found: tuple[Tensor | None, ...] = (self.bias, self.sinks if isinstance(self.sinks, Tensor) else None)
        for part in (self.relative, self.applied):
            if part is not None:
                found += part.learnable
        return found

    def with_learnable(self, bias: Tensor | None, sinks: Tensor | None, *tables: Tensor | None) -> "Scoring":
        """The same scoring with this `bias`, these `sinks` and these `tables` in place of `learnable`."""
        relative, score, rest = self.relative, self.applied, [x for x in tables if x is not None]
        if relative is not None:
            count = len(relative.learnable)
            relative, rest = relative.with_learnable(rest[:count]), rest[count:]
        if score is not None:
            score = score.with_learnable(rest)
        return dataclasses.replace(self, bias=bias, sinks=sinks, relative=relative, score=score)

    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor this scoring holds; faster than the general search, because every map is made with it."""
        found: tuple[Tensor, ...] = ()
        for x in (self.bias, self.sinks, self.positions):
            if x is not None and isinstance(x, Tensor):
                found += (x,)
        for part in (self.mask, self.relative, self.applied):
            if part is not None:
                found += part.tensors()
        return found

    @property
    def applied(self) -> Score | None:
        """`score`, which is a `Score` once this object is made."""
        return self.score  # type: ignore[return-value]

    def settled(self, sizes: Sequence[int], device: torch.device, dtype: torch.dtype) -> "Scoring":
        """The same scoring with the tensors that `score` reads, checked for scores of these sizes (B, H, T, S)."""
        if self.applied is None or self.applied.held is not None:
            return self
        return dataclasses.replace(self, score=self.applied.settled(sizes, device, self.precision(dtype)))

    def changed(self, scores: Tensor, grid: Grid) -> Tensor:
        """What `score` makes of scaled and capped scores at `grid`, which broadcasts to them."""
        if self.applied is None:
            return scores
        return self.applied(scores, grid if self.positions is None else grid.placed(self.positions))

    def whole_grid(self, query: Tensor, S: int) -> Grid:
        """The indices of all scores of a query (B, H, T, D) and S keys."""
        B, H, T, _ = query.shape
        batch, head, row, col = (torch.arange(n, device=query.device) for n in (B, H, T, S))
        return Grid(batch[:, None, None, None], head[:, None, None], row[:, None], col, T, S)

    def bias_at(self, grid: Grid, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores at `grid`. A bias is rounded to `dtype`, that of the query, as for the output."""
        if self.relative is not None:
            place = grid if self.positions is None else grid.placed(self.positions)
            added = self.relative.at(place, torch.promote_types(dtype, torch.float32))
            bias = dataclasses.replace(self, relative=None).bias_at(grid, dtype)
            return added if bias is None else bias.to(added.dtype) + added
        if self.bias is None:
            return None
        return _rounded(grid.lookup(_with_four_axes(self.bias)), dtype)

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which scores and weights of queries of `dtype` are computed, wherever we compute them ourselves.

        That is float32, or float64 for float64 queries and for a bias: in a row with a bias of -1e9 everywhere, float32
        could not tell one score from another.
        """
        return torch.promote_types(dtype, torch.float32 if self.bias is None else torch.float64)

    def scale_for(self, D: int) -> float:
        """The scale for heads of width D."""
        return 1 / math.sqrt(D) if self.scale is None else self.scale

    def visible(self, T: int, S: int, device: torch.device, rows: slice = WHOLE, cols: slice = WHOLE) -> Tensor | None:
        """The tile `[rows, cols]` of the mask, or None if there is no mask."""
        return None if self.mask is None else self.mask.tile(rows, cols, T, S, device=device)

    def additive(self, query: Tensor, S: int, rows: slice = WHOLE, cols: slice = WHOLE) -> Tensor | None:
        """Mask and bias of the tile `[rows, cols]` as one tensor to add, in the query's dtype."""
        T = query.shape[2]
        visible = self.visible(T, S, query.device, rows, cols)
        if self.bias is None:
            return None if visible is None else additive(visible, query.dtype)
        bias = narrow(_with_four_axes(self.bias), query.dtype)
        bias = bias.expand(-1, -1, T, S)[:, :, rows, cols]
        return bias if visible is None else torch.where(visible, bias, -math.inf)

    def whole_bias(self, query: Tensor, S: int) -> Tensor | None:
        """Everything that is added to the scores of `query` and S keys, as one tensor in the dtype of scores."""
        precise = self.precision(query.dtype)
        if self.relative is None:
            return None if self.bias is None else _rounded(self.bias, query.dtype).to(precise)
        grid = self.whole_grid(query, S)
        if self.bias is None and self.positions is None:
            grid = grid._replace(batch=grid.batch[:1])
        found = self.bias_at(grid, query.dtype)
        assert found is not None  # noqa: S101 - there is a relative part
        return found.to(precise)

    def simplified(self, T: int, S: int) -> "Scoring":
        """The same scoring with the simplest mask for these lengths."""
        return dataclasses.replace(self, mask=simplify(self.mask, T, S))

    def may_empty_a_row(self, T: int, S: int) -> bool:
        """Whether a query might see no key."""
        return self.hides_keys or may_empty_a_row(self.mask, T, S)


def _with_four_axes(bias: Tensor) -> Tensor:
    return bias if bias.dim() == 4 else bias[None, None]


def _rounded(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """`bias` as accurate as `dtype`, and not lower than LEAST unless it hides a key."""
    found = narrow(bias, dtype)
    if torch.finfo(dtype).min > LEAST:  # float16
        return found
    return torch.where(found == -math.inf, found, found.clamp(min=LEAST))


def narrow(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """`bias` in `dtype`. Finite numbers stay finite: -1e9, too large for float16, does not become a mask."""
    if bias.dtype == dtype or torch.finfo(dtype).max >= torch.finfo(bias.dtype).max:
        return bias.to(dtype)
    limit = torch.finfo(dtype).max
    return torch.where(bias.isinf(), bias, bias.clamp(-limit, limit)).to(dtype)
