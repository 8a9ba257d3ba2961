"""What attention weights are made of, and any block of them made plainly: query, key, scoring, and where they stand.

A source may be a part of the whole: some samples, heads or queries. Masks, biases and probes speak of the whole, so the
source keeps for each of its axes which indices it shows (`Frame`).
"""

import dataclasses
import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headwise.masks import Grid, Mask
from headwise.weights.scoring import Scoring

if TYPE_CHECKING:
    from headwise.parallel.spread import Spread


import functools

Axis = range | Tensor  # which indices of the whole; a tensor is whole numbers on the CPU


class Frame(NamedTuple):
    """Where a part lies in the whole: its samples, heads and queries, and the sizes (B, H, T, S) of the whole."""

    batch: Axis
    head: Axis
    row: Axis
    B: int
    H: int
    T: int
    S: int

    @property
    def first_row(self) -> int | None:
        """The first query if all follow each other without a gap, else None."""
        rows = self.row
        return rows.start if isinstance(rows, range) and rows.step == 1 else None

    def span(self, rows: slice) -> tuple[int, int]:
        """The queries of the whole that lie in this slice of ours, as (first, last + 1)."""
        part = self.row[rows]
        if isinstance(part, Tensor):
            return int(part.min()), int(part.max()) + 1
        return (part[0], part[-1] + 1) if len(part) else (0, 0)


class Block(NamedTuple):
    """Some rows of weights, dense: (B, H, t, S)."""

    weights: Tensor
    logs: Tensor  # log of the weights, 0 where hidden
    scores: Tensor  # as they enter the softmax, minus infinity where hidden
    sinks: Tensor | None  # (H, 1, 1)
    rows: slice  # of the source
    grid: Grid  # their indices in the whole


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """Query (B, H, T, D), key (B, Hkv, S, D) and how they are scored. `log_sum_exp` is (B, H, T) where known.

    A log-sum-exp counts the sinks; that of a row that sees nothing is minus infinity.

    Where several ranks share the keys, `key` holds only some, from the `first_key` of the whole on; see `spread`.
    """

    query: Tensor
    key: Tensor
    scoring: Scoring
    frame: Frame
    log_sum_exp: Tensor | None = None
    first_key: int = 0
    spread: "Spread | None" = None

    @classmethod
    def whole(cls, query: Tensor, key: Tensor, scoring: Scoring, log_sum_exp: Tensor | None = None) -> "Source":
        """A source that is no part of anything larger."""
        B, H, T, _ = query.shape
        return cls(query, key, scoring, Frame(range(B), range(H), range(T), B, H, T, key.shape[2]), log_sum_exp)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, H, T, S) of the weights."""
        B, H, T, _ = self.query.shape
        return B, H, T, self.frame.S

    @property
    def keys_apart(self) -> bool:
        """Whether other ranks have some of the keys, so that weights can be streamed and not looked up."""
        return self.spread is not None and self.spread.keys_apart

    @property
    def group(self) -> int:
        """How many query heads share a key head."""
        return max(1, self.query.shape[1] // max(1, self.key.shape[1]))

    @property
    def precise(self) -> torch.dtype:
        """The dtype weights and statistics are computed in: float32, or float64 for float64 queries and with a bias.

        A bias may be large: in a row that has -1e9 everywhere, float32 could not tell the log-sum-exp from a score.
        """
        if self.scoring.bias is not None:
            return torch.float64
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def mask(self) -> Mask | None:
        """Who may attend."""
        return self.scoring.mask

    @property
    def learns(self) -> bool:
        """Whether something here wants a gradient."""
        tensors = (self.query, self.key, *self.scoring.learnable)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    def axis(self, name: str) -> Tensor:
        """The indices of one axis of the frame, as a tensor beside the query."""
        indices: Axis = getattr(self.frame, name)
        if isinstance(indices, range):
            return torch.arange(indices.start, indices.stop, indices.step, device=self.query.device)
        return indices.to(self.query.device)

    def positions(self) -> Tensor:
        """Where our queries stand among the keys, (t,), or (B, 1, t) where samples differ."""
        given, rows = self.scoring.positions, self.axis("row")
        if given is None:
            return rows + (self.frame.S - self.frame.T)
        samples = self.axis("batch") if given.shape[0] > 1 else self.axis("batch") * 0
        return given[samples][:, None, rows]

    def grid(self, rows: slice, cols: slice | Tensor = slice(None)) -> Grid:
        """The indices, in the whole, of these rows and columns in all samples and heads."""
        keys = torch.arange(self.frame.S, device=self.query.device)
        return Grid(
            self.axis("batch")[:, None, None, None],
            self.axis("head")[:, None, None],
            self.axis("row")[rows, None],
            keys[cols],
            self.frame.T,
            self.frame.S,
        )

    def keys_seen(self, probe: Mask | None = None, first: int | None = None) -> Tensor:
        """How many keys each query may see, (B, H, T), from the mask and a bias of minus infinity alone.

        Args:
            probe: count only keys where this is True.
            first: count only the first so many keys.
        """
        B, H, T, S = self.shape
        most = S if first is None else min(first, S)
        if self.mask is None and self.scoring.bias is None and probe is None:
            return torch.full((B, H, T), most, device=self.query.device)
        spans = self.key_spans() if probe is None else None
        if spans is not None:
            low, high = spans.clamp(max=most).unbind()
            return (high - low).clamp(min=0).expand(B, H, T)
        counts = torch.zeros(B, H, T, dtype=torch.int64, device=self.query.device)
        for rows in row_blocks(T, B * H * S, 2**24):
            reach = self.reachable(rows)
            cols = slice(min(reach.start, most), min(reach.stop, most))
            seen = self.visible(rows, cols)
            counts[:, :, rows] = (seen if probe is None else seen & probe.visible(self.grid(rows, cols))).sum(-1)
        return counts

    def reachable(self, rows: slice) -> slice:
        """Keys outside this slice are hidden from all these queries."""
        frame = self.frame
        return (
            slice(0, frame.S) if self.mask is None else slice(*self.mask.key_range(*frame.span(rows), frame.T, frame.S))
        )

    def visible(self, rows: slice, cols: slice) -> Tensor:
        """What mask and a bias of minus infinity let these queries see, (t, s), (H, t, s) or (B, H, t, s)."""
        grid = self.grid(rows, cols)
        seen = torch.ones((), dtype=torch.bool, device=self.query.device)
        if self.mask is not None:
            seen = self.mask.visible(grid)
        if self.scoring.bias is not None:  # distances alone hide nothing
            bias = self.scoring.bias_at(grid, self.query.dtype)
            seen = seen if bias is None else seen & (bias > -math.inf)
        whole = seen.new_ones(()).expand(rows.stop - rows.start, cols.stop - cols.start)
        found: Tensor = torch.broadcast_tensors(seen, whole)[0]  # broadcast_shapes would import sympy: 0.3 s
        return found

    def key_spans(self) -> Tensor | None:
        """The first key and the last + 1 that each query sees, (2, T), S and 0 where none; None unless the mask says
        by its rule that every query, of all samples and heads alike, sees all keys between."""
        mask, T, S = self.mask, self.frame.T, self.frame.S
        if (
            mask is None
            or self.scoring.bias is not None
            or mask.extent.batch is not None
            or mask.extent.heads is not None
        ):
            return None
        found = []
        for row in self.axis("row").tolist():
            low, high = mask.key_range(row, row + 1, T, S)
            if low < high and not mask.shows_all(row, row + 1, low, high, T, S):
                return None
            found.append((low, high) if low < high else (S, 0))
        return torch.tensor(found, device=self.query.device).view(-1, 2).T

    def scores(self, rows: slice = slice(None), cols: slice | Tensor = slice(None)) -> Tensor:
        """Scores (B, H, t, s) in the precise dtype, minus infinity where hidden. Differentiable; scores no sink."""
        query, key = self.query[:, :, rows].to(self.precise), self.key[:, :, cols].to(self.precise)
        B, H, t, D = query.shape
        Hkv, s = key.shape[1], key.shape[2]
        with full_precision(query):
            products = query.reshape(B, Hkv, self.group * t, D) @ key.transpose(2, 3)  # the queries of a group in a row
        grid = self.grid(rows, cols)
        return self.finished(products.view(B, H, t, s), grid)

    def finished(self, products: Tensor, grid: Grid) -> Tensor:
        """Scores out of dot products at these indices."""
        scoring = self.scoring
        scores = products * scoring.scale_for(self.query.shape[3])
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        bias = scoring.bias_at(grid, self.query.dtype)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if scoring.mask is not None and grid.S:
            scores = scores.masked_fill(~scoring.mask.visible(grid), -math.inf)
        return scores

    def sink_scores(self) -> Tensor | None:
        """The sinks of our heads, (H, 1, 1) in the precise dtype."""
        _, sinks, _ = self.scoring.learnable
        return None if sinks is None else sinks.to(self.precise)[self.axis("head"), None, None]

    def with_sinks(self, lse: Tensor) -> Tensor:
        """The log-sum-exp (B, H, T) of the keys with the sinks counted; a row that sees nothing stays as it is."""
        sinks = self.sink_scores()
        return lse if sinks is None else torch.where(lse > -math.inf, torch.logaddexp(lse, sinks[..., 0]), lse)

    def softmax(self, scores: Tensor) -> Tensor:
        """Weights out of scores (B, H, t, s) that hold all a row can see; zeros for a row that sees nothing."""
        empty = (scores == -math.inf).all(-1, keepdim=True)
        logits = scores.masked_fill(empty, 0.0)
        sinks = self.sink_scores()
        if sinks is not None:
            logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
        return logits.softmax(-1)[..., : scores.shape[-1]].masked_fill(empty, 0.0)

    def block(self, rows: slice) -> Block:
        """These rows of weights, dense and differentiable in query, key, bias and sinks."""
        scores = self.scores(rows)
        hidden = scores == -math.inf
        empty = hidden.all(-1, keepdim=True)
        logits = scores.masked_fill(empty, 0.0)
        sinks = self.sink_scores()
        if sinks is not None:
            logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
        logs = logits.log_softmax(-1)[..., : scores.shape[-1]]
        hidden = hidden | empty
        weights = logs.exp().masked_fill(hidden, 0.0)
        return Block(weights, logs.masked_fill(hidden, 0.0), scores, sinks, rows, self.grid(rows))


def full_precision(like: Tensor) -> AbstractContextManager[None]:
    """Outside autocast: weights are computed in the dtype we chose."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def row_blocks(T: int, bytes_per_row: int, budget: int) -> list[slice]:
    """Slices of rows, each worth at most `budget` bytes, at least one row each."""
    rows = max(1, min(T, budget // max(bytes_per_row, 1)))
    return [slice(start, min(start + rows, T)) for start in range(0, T, rows)]


# A part of a source: some samples, heads or queries. Keys stay whole, because a row is normalised over all of them.


def narrowed(source: Source, batch: Axis, heads: Axis, rows: Axis) -> Source:
    """The source with only these samples, heads and queries. Slices give views, lists give copies."""
    query = take(take(take(source.query, 0, batch), 1, heads), 2, rows)
    key = _keys_of(take(source.key, 0, batch), heads, source.group)
    lse = source.log_sum_exp
    if lse is not None:
        lse = take(take(take(lse, 0, batch), 1, heads), 2, rows)
    frame = source.frame
    part = Frame(chosen(frame.batch, batch), chosen(frame.head, heads), chosen(frame.row, rows), *frame[3:])
    return dataclasses.replace(source, query=query, key=key, frame=part, log_sum_exp=lse)


def take(tensor: Tensor, axis: int, indices: Axis) -> Tensor:
    """These indices of an axis; a view where they are a range."""
    if isinstance(indices, Tensor):
        return tensor.index_select(axis, indices.to(tensor.device))
    if len(indices) == tensor.shape[axis]:
        return tensor
    index = [slice(None)] * axis + [slice(indices.start, indices.stop, indices.step)]
    return tensor[tuple(index)]


def chosen(axis: Axis, indices: Axis) -> Axis:
    """Indices of the whole, given which of ours are taken."""
    if isinstance(indices, Tensor):
        return axis[indices] if isinstance(axis, Tensor) else axis.start + indices * axis.step
    return axis[slice(indices.start, indices.stop, indices.step)]


def _keys_of(key: Tensor, heads: Axis, group: int) -> Tensor:
    """The key heads of these query heads: whole groups stay groups, anything else gets a key head each."""
    if group == 1:
        return take(key, 1, heads)
    if isinstance(heads, range) and heads.step == 1 and len(heads):
        first, last = heads.start // group, (heads.stop - 1) // group
        if first == last or (heads.start % group == 0 and heads.stop % group == 0):
            return key[:, first : last + 1]
    indices = heads if isinstance(heads, Tensor) else torch.arange(heads.start, heads.stop, heads.step)
    return key.index_select(1, (indices // group).to(key.device))


# One tile of weights on its way past the readings.


MANY_STRIPS = 16  # beyond so many, one product with a selector is faster than single sums
# The log of a hidden weight: finite, so that exp(HIDDEN) · HIDDEN is 0 and not NaN.
HIDDEN = -1e30


class Spot(NamedTuple):
    """One place of a walk: which heads, queries and keys, what is visible, and what the scores are made of."""

    heads: slice  # of the B·H heads of all samples
    rows: slice  # of the source's queries
    cols: slice  # of the keys
    span: tuple[int, int]  # the first query and the last + 1, as indices of the whole
    visible: Tensor | None  # broadcasts to the tile; None where all is seen
    queries: Tensor  # (units, group · t, D)
    keys: Tensor  # (units, S, D)
    bias: Tensor | None  # broadcasts to the tile


class Tile:
    """Weights (G, t, s) of a spot, and their logs.

    Args:
        source: what the tile is of.
        spot: where it lies.
        logs: logs of the weights, HIDDEN or less where hidden.
        weights: exp(logs).
        scratch: room of the same shape for whoever wants it.
        places: where the source's indices lie in the whole.
        cuts: rows at which a new row of the picture begins that is being made; just [0] if none is.
    """

    def __init__(
        self,
        source: Source,
        spot: Spot,
        logs: Tensor,
        weights: Tensor,
        scratch: Tensor,
        places: "Places",
        cuts: list[int],
    ) -> None:
        self.source, self.heads, self.rows, self.cols, self.span, self.visible = source, *spot[:5]
        self.logs, self.weights, self.scratch = logs, weights, scratch
        self._places, self._cuts = places, cuts

    @property
    def col(self) -> Tensor:
        """The keys, (s,)."""
        return self._places.key[self.cols]

    @property
    def position(self) -> Tensor:
        """Where the queries stand among the keys, (t,), or (G, t) where samples differ."""
        found = self._places.position
        return found[self.rows] if found.dim() == 1 else found[self.heads, self.rows]

    @functools.cached_property
    def mass(self) -> Tensor:
        """Weights summed over the tile's keys, (G, t)."""
        return self.weights.sum(-1)

    @functools.cached_property
    def strips(self) -> Tensor:
        """Weights summed over rows, apart for each row of the picture that is being made: (G, strips, s)."""
        cuts = self._cuts
        if len(cuts) > MANY_STRIPS:
            which = torch.bucketize(torch.arange(self.weights.shape[1]), torch.tensor(cuts[1:]), right=True)
            selector = torch.nn.functional.one_hot(which, len(cuts)).T.to(self.weights)
            return torch.bmm(selector.expand(len(self.weights), -1, -1), self.weights)
        strips = self.weights.tensor_split(cuts[1:], dim=1)
        return torch.stack([strip.sum(1) for strip in strips], 1)

    def where(self, mask: Mask) -> Tensor:
        """The tile of a mask or probe, broadcasting to ours."""
        return self._places.look(mask, self.heads, self.rows, self.cols)


class Places:
    """The indices of a source's axes in the whole, as tensors, looked up once."""

    def __init__(self, source: Source) -> None:
        B, H, _, S = source.shape
        frame = source.frame
        self.T, self.S = frame.T, frame.S
        self.batch = source.axis("batch").repeat_interleave(H)
        self.head = source.axis("head").repeat(B)
        self.row = source.axis("row")
        position = source.positions()
        self.position = position if position.dim() == 1 else position.expand(B, H, -1).flatten(0, 1)
        self.key = torch.arange(S, device=source.query.device)

    def grid(self, heads: slice, rows: slice, cols: slice) -> Grid:
        """The indices of a tile; heads of all samples in one axis."""
        batch, head = self.batch[heads, None, None], self.head[heads, None, None]
        return Grid(batch, head, self.row[rows, None], self.key[cols], self.T, self.S)

    def look(self, mask: Mask, heads: slice, rows: slice, cols: slice) -> Tensor:
        """A mask at a tile, with one head where all are alike."""
        batch, head, _, _ = mask.extent
        if batch is None and head is None:
            heads = slice(heads.start, heads.start + 1)
        return mask.visible(self.grid(heads, rows, cols))
