"""What attention weights are computed from: query, key and scoring, and where they lie in the whole.

A source may hold only some samples, heads or queries. Masks, biases and probes refer to the whole, so the source keeps
the indices it covers along each axis (`Frame`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.masks import Grid, Mask
from headwise.masks.lowering import simplify
from headwise.weights import counting
from headwise.weights.memory import BoundedMemory
from headwise.weights.scoring import Scoring
from headwise.weights.structure import Structure, structure_of

if TYPE_CHECKING:
    from headwise.weights.readings import Reading

COUNTS = BoundedMemory()
COUNTED = {"cpu": 2**24, "cuda": 2**26}  # entries of a mask that are counted together
Axis = range | Tensor  # indices into the whole; a tensor holds integers and is on the CPU


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
        """The first query if the queries are consecutive, else None."""
        rows = self.row
        return rows.start if isinstance(rows, range) and rows.step == 1 else None

    def span(self, rows: slice) -> tuple[int, int]:
        """The queries of the whole covered by `rows` of this part, as (first, last + 1)."""
        part = self.row[rows]
        if isinstance(part, Tensor):
            return int(part.min()), int(part.max()) + 1
        return (part[0], part[-1] + 1) if len(part) else (0, 0)


class Shards(Protocol):
    """What a map asks of the ranks that hold its other heads, queries or keys; see `headwise.parallel`."""

    @property
    def keys_apart(self) -> bool:
        """Whether other ranks hold some of the keys."""

    def read(self, source: "Source", readings: "Sequence[Reading]") -> list[tuple[Tensor, ...]]:
        """The results of readings over keys on several ranks."""

    def log_sum_exp(self, source: "Source") -> Tensor:
        """The row log-sum-exp over keys on several ranks."""

    def gather(self, weights: Any) -> Any:
        """The whole `AttentionMap`, on every rank."""


class RowBlock(NamedTuple):
    """Some rows of weights, dense: (B, H, t, S)."""

    weights: Tensor
    logs: Tensor  # log of the weights, 0 where hidden
    scores: Tensor  # the input of the softmax, minus infinity where hidden
    logits: Tensor  # finite scores, with a column for the sinks if there are any
    rows: slice  # of the source
    grid: Grid  # their indices in the whole


@dataclasses.dataclass(eq=False)
class Source:
    """Query (B, H, T, D), key (B, Hkv, S, D) and scoring. Once made, it is not changed.

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D). If several ranks share the keys, only those from `first_key` on.
        scoring: mask, scale, bias and so on, for the whole.
        frame: where this part lies in the whole.
        log_sum_exp: (B, H, T), sinks included, minus infinity for a row that sees nothing; None until it is known.
        first_key: the index of the first key.
        shards: the ranks that hold the rest.
    """

    query: Tensor
    key: Tensor
    scoring: Scoring
    frame: Frame
    log_sum_exp: Tensor | None = None
    first_key: int = 0
    shards: Shards | None = None
    shape: tuple[int, int, int, int] = dataclasses.field(init=False)  # (B, H, T, S) of the weights
    group: int = dataclasses.field(init=False)  # how many query heads share a key head
    mask: Mask | None = dataclasses.field(init=False)
    precise: torch.dtype = dataclasses.field(init=False)  # in which weights and statistics are computed

    def __post_init__(self) -> None:
        query, scoring = self.query, self.scoring
        B, H, T, _ = query.shape
        self.shape = (B, H, T, self.frame.S)
        self.group = max(1, H // max(1, self.key.shape[1]))
        self.mask = scoring.mask
        self.precise = scoring.precision(query.dtype)

    @classmethod
    def whole(cls, query: Tensor, key: Tensor, scoring: Scoring, log_sum_exp: Tensor | None = None) -> "Source":
        """A source that is not a part of anything larger."""
        B, H, T, _ = query.shape
        sizes = (B, H, T, key.shape[2])
        if torch.compiler.is_compiling():  # a range would fix the length into the graph
            batch, head, row = (torch.arange(size, device=query.device) for size in (B, H, T))
            return cls(query, key, scoring, Frame(batch, head, row, *sizes), log_sum_exp)
        return cls(query, key, scoring, Frame(range(B), range(H), range(T), *sizes), log_sum_exp)

    def narrowed(self, batch: Axis, heads: Axis, rows: Axis) -> "Source":
        """The source with only these samples, heads and queries. Ranges give views, tensors give copies.

        All keys stay, because a row is normalized over all of them.
        """

        def part_of(x: Tensor) -> Tensor:
            return take(take(take(x, 0, batch), 1, heads), 2, rows)

        query, key = part_of(self.query), _keys_of(take(self.key, 0, batch), heads, self.group)
        lse = None if self.log_sum_exp is None else part_of(self.log_sum_exp)
        frame = self.frame
        part = Frame(chosen(frame.batch, batch), chosen(frame.head, heads), chosen(frame.row, rows), *frame[3:])
        return dataclasses.replace(self, query=query, key=key, frame=part, log_sum_exp=lse)

    @property
    def keys_apart(self) -> bool:
        """Whether other ranks hold some of the keys: then weights can be streamed but not looked up."""
        return self.shards is not None and self.shards.keys_apart

    @property
    def learns(self) -> bool:
        """Whether anything here needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        return any(x is not None and x.requires_grad for x in (self.query, self.key, *self.scoring.learnable))

    def axis(self, name: str) -> Tensor:
        """The indices along one axis of the frame, as a tensor on the query's device."""
        indices: Axis = getattr(self.frame, name)
        if isinstance(indices, range):
            return torch.arange(indices.start, indices.stop, indices.step, device=self.query.device)
        return indices.to(self.query.device)

    def positions(self) -> Tensor:
        """The positions of the queries among the keys, (t,), or (B, 1, t) where samples differ."""
        given, rows = self.scoring.positions, self.axis("row")
        if given is None:
            return rows + (self.frame.S - self.frame.T)
        samples = self.axis("batch") if given.shape[0] > 1 else self.axis("batch") * 0
        return given[samples][:, None, rows]

    def grid(self, rows: slice, cols: slice | Tensor = slice(None)) -> Grid:
        """The indices, in the whole, of these rows and columns of all samples and heads."""
        keys = torch.arange(self.frame.S, device=self.query.device)
        return Grid(
            self.axis("batch")[:, None, None, None],
            self.axis("head")[:, None, None],
            self.axis("row")[rows, None],
            keys[cols],
            self.frame.T,
            self.frame.S,
        )

    # What the mask, and a bias of minus infinity, let queries see.

    def keys_seen(self, probe: Mask | None = None, first: int | None = None) -> Tensor:
        """How many keys each query may see, (B, H, T); computed once for a mask.

        Args:
            probe: count only keys where this is True.
            first: count only this many keys from the first.
        """
        S = self.shape[3]
        most = S if first is None else min(first, S)
        count = self._remembered(("keys", most), probe, lambda: self._keys_seen([probe], most)[0])
        return count.expand(self.shape[:3])

    def keys_seen_each(self, probes: Sequence[Mask | None]) -> list[Tensor]:
        """`keys_seen(probe)` for each of them; a mask that has no closed form is looked at once for all."""
        S, counts = self.shape[3], list[Tensor]()

        def count(i: int) -> Tensor:
            counts[:] = counts or self._keys_seen(probes, S)
            return counts[i]

        found = [self._remembered(("keys", S), x, functools.partial(count, i)) for i, x in enumerate(probes)]
        return [each.expand(self.shape[:3]) for each in found]

    def queries_seeing(self) -> Tensor:
        """How many queries may see each key, (B, H, S); computed once for a mask."""
        B, H, _, S = self.shape
        return self._remembered(("queries",), None, self._queries_seeing).expand(B, H, S)

    def _remembered(self, what: tuple[Any, ...], probe: Mask | None, count: Callable[[], Tensor]) -> Tensor:
        """What `count` gives, (B or 1, H or 1, ...), or gave for the same mask."""
        scoring, frame = self.scoring, self.frame
        listed = any(isinstance(axis, Tensor) for axis in frame[:3])
        if scoring.score is not None or scoring.applied is not None or listed:
            return count()
        return COUNTS.get([self.mask, probe, scoring.bias, scoring.positions], (*what, frame, self.query.device), count)

    def _keys_seen(self, probes: Sequence[Mask | None], most: int) -> list[Tensor]:
        """Counts (B or 1, H or 1, T) for each probe, in closed form or by one look at the mask."""
        S, position = self.shape[3], self.positions()
        structures = [self._counted(probe) for probe in probes]
        found = [
            None if structure is None else counting.keys_seen(structure, position, S, most)[:, None]
            for structure in structures
        ]
        rest = [probe for probe, known in zip(probes, found, strict=True) if known is None]
        others = iter(self._looked_at(rest, most) if rest else ())
        return [next(others) if known is None else known for known in found]

    def _looked_at(self, probes: Sequence[Mask | None], most: int) -> Tensor:
        """How many of the first `most` keys each query sees of each probe, (probes, B or 1, H or 1, T)."""
        part = self.where_it_differs(*probes)
        counts = torch.zeros(len(probes), *part.shape[:3], dtype=torch.int64, device=self.query.device)
        for rows in part._counted_rows():
            reach = part.reachable(rows)
            cols = slice(min(reach.start, most), min(reach.stop, most))
            seen = part.visible(rows, cols)
            for count, probe in zip(counts, probes, strict=True):
                hits = seen if probe is None else seen & probe.visible(part.grid(rows, cols))
                count[:, :, rows] = counting.true_in_rows(hits)
        return counts

    def _queries_seeing(self) -> Tensor:
        S = self.shape[3]
        structure = self._counted()
        if structure is not None:
            return counting.queries_seeing(structure, self.positions(), S)[:, None]
        part = self.where_it_differs()
        counts = torch.zeros((*part.shape[:2], S), dtype=torch.int64, device=self.query.device)
        for rows in part._counted_rows():
            counts += counting.true_in_columns(part.visible(rows, slice(0, S)))
        return counts

    def _counted_rows(self) -> list[slice]:
        """Rows whose mask is looked at together."""
        B, H, T, S = self.shape
        return row_blocks(T, B * H * S, COUNTED["cuda" if self.query.is_cuda else "cpu"])

    def _counted(self, probe: Mask | None = None) -> Structure | None:
        """The structure of the keys to count, if it has one."""
        if self.scoring.hides_keys or self.scoring.positions is not None:
            return None
        mask = simplify(self.mask, self.frame.T, self.frame.S)
        return structure_of(mask if probe is None else probe if mask is None else mask & probe, self)

    def where_it_differs(self, *probes: Mask | None) -> "Source":
        """This source with one sample and one head where all of them see the same keys."""
        B, H, T, _ = self.shape
        extents = [] if self.scoring.hides_keys else [mask.extent for mask in (self.mask, *probes) if mask is not None]
        same = not self.scoring.hides_keys and self.scoring.positions is None
        alone = (same and all(x.batch is None for x in extents), same and all(x.heads is None for x in extents))
        batch, heads = (range(min(n, 1) if one else n) for n, one in zip((B, H), alone, strict=True))
        return self.narrowed(batch, heads, range(T))

    def reachable(self, rows: slice) -> slice:
        """Keys outside this slice are hidden from all these queries."""
        T, S = self.frame.T, self.frame.S
        return slice(0, S) if self.mask is None else slice(*self.mask.key_range(*self.frame.span(rows), T, S))

    def visible(self, rows: slice, cols: slice) -> Tensor:
        """Which of these keys these queries see, (t, s), (H, t, s) or (B, H, t, s)."""
        grid = self.grid(rows, cols)
        seen = torch.ones((), dtype=torch.bool, device=self.query.device)
        if self.mask is not None:
            seen = self.mask.visible(grid)
        if self.scoring.bias is not None:  # relative positions alone hide nothing
            bias = self.scoring.bias_at(grid, self.query.dtype)
            seen = seen if bias is None else seen & (bias > -math.inf)
        if self.scoring.score is not None:  # a function hides a key if it makes minus infinity of a score of 0
            B, H, _, _ = self.shape
            sizes = (B, H, rows.stop - rows.start, cols.stop - cols.start)
            zeros = torch.zeros(sizes, dtype=self.precise, device=seen.device)
            seen = seen & (self.scoring.changed(zeros, grid) > -math.inf)
        whole = seen.new_ones(()).expand(rows.stop - rows.start, cols.stop - cols.start)
        found: Tensor = torch.broadcast_tensors(seen, whole)[0]  # broadcast_shapes would import sympy: 0.3 s
        return found

    def key_spans(self) -> Tensor | None:
        """The first key each query sees and the last + 1, (2, T); S and 0 if it sees none.

        None unless the mask states that each query, in all samples and heads, sees all keys between the two.
        """
        mask, T, S = self.mask, self.frame.T, self.frame.S
        if mask is None or self.scoring.hides_keys or mask.extent[:2] != (None, None):
            return None
        structure = self._counted()
        if structure is not None and structure.plain:
            first = (self.positions() - structure.left).clamp(min(structure.first, S), S)
            end = (self.positions() + structure.right + 1).clamp(0, min(structure.stop, S))
            return torch.stack([torch.where(first < end, first, S), torch.where(first < end, end, 0)])
        found = []
        for row in self.axis("row").tolist():
            low, high = mask.key_range(row, row + 1, T, S)
            if low < high and not mask.shows_all(row, row + 1, low, high, T, S):
                return None
            found.append((low, high) if low < high else (S, 0))
        return torch.tensor(found, device=self.query.device).view(-1, 2).T

    # Scores and weights, dense and differentiable.

    def scores(self, rows: slice = slice(None), cols: slice | Tensor = slice(None)) -> Tensor:
        """Scores (B, H, t, s) in the precise dtype, sinks excluded, minus infinity where hidden; differentiable."""
        query, key = self.query[:, :, rows].to(self.precise), self.key[:, :, cols].to(self.precise)
        B, H, t, D = query.shape
        Hkv, s = key.shape[1], key.shape[2]
        with full_precision(query):
            products = query.reshape(B, Hkv, self.group * t, D) @ key.transpose(2, 3)  # the queries of a group in a row
        return self.finished(products.view(B, H, t, s), self.grid(rows, cols))

    def finished(self, products: Tensor, grid: Grid) -> Tensor:
        """Scores from dot products at these indices."""
        scoring = self.scoring
        scores = products * scoring.scale_for(self.query.shape[3])
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        scores = scoring.changed(scores, grid) if grid.S else scores
        bias = scoring.bias_at(grid, self.query.dtype)
        if bias is not None:
            scores = scores + bias.to(scores.dtype)
        if scoring.mask is not None and grid.S:
            scores = scores.masked_fill(~scoring.mask.visible(grid), -math.inf)
        return scores

    def sink_scores(self) -> Tensor | None:
        """The sinks of these heads, (H, 1, 1) in the precise dtype."""
        sinks = self.scoring.sinks
        return sinks.to(self.precise)[self.axis("head"), None, None] if isinstance(sinks, Tensor) else None

    def with_sinks(self, lse: Tensor) -> Tensor:
        """The log-sum-exp (B, H, T) of the keys with the sinks included; a row that sees nothing stays as it is."""
        sinks = self.sink_scores()
        return lse if sinks is None else torch.where(lse > -math.inf, torch.logaddexp(lse, sinks[..., 0]), lse)

    def softmax(self, scores: Tensor) -> Tensor:
        """Weights from scores (B, H, t, s) of all keys a row can see; zeros for a row that sees nothing."""
        logits, empty = self._logits(scores)
        return logits.softmax(-1)[..., : scores.shape[-1]].masked_fill(empty, 0.0)

    def block(self, rows: slice) -> RowBlock:
        """These rows of weights, dense and differentiable in query, key and what the scoring learns."""
        scores = self.scores(rows)
        logits, empty = self._logits(scores)
        logs = logits.log_softmax(-1)[..., : scores.shape[-1]]
        hidden = (scores == -math.inf) | empty
        weights = logs.exp().masked_fill(hidden, 0.0)
        return RowBlock(weights, logs.masked_fill(hidden, 0.0), scores, logits, rows, self.grid(rows))

    def _logits(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Finite logits with a column for the sinks, and which rows see nothing, (B, H, t, 1)."""
        empty = (scores == -math.inf).all(-1, keepdim=True)
        logits, sinks = scores.masked_fill(empty, 0.0), self.sink_scores()
        if sinks is not None:
            logits = torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1)
        return logits, empty


def full_precision(like: Tensor) -> AbstractContextManager[None]:
    """Turns autocast off, because weights are computed in a dtype chosen here."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def row_blocks(T: int, bytes_per_row: int, budget: int) -> list[slice]:
    """Slices of rows, each of at most `budget` bytes and at least one row."""
    rows = max(1, min(T, budget // max(bytes_per_row, 1)))
    return [slice(start, min(start + rows, T)) for start in range(0, T, rows)]


def take(tensor: Tensor, axis: int, indices: Axis) -> Tensor:
    """These indices along an axis; a view if they are a range."""
    if isinstance(indices, Tensor):
        return tensor.index_select(axis, indices.to(tensor.device))
    if len(indices) == tensor.shape[axis]:
        return tensor
    index = [slice(None)] * axis + [slice(indices.start, indices.stop, indices.step)]
    return tensor[tuple(index)]


def chosen(axis: Axis, indices: Axis) -> Axis:
    """The indices in the whole, given those of the part."""
    if isinstance(indices, Tensor):
        return axis[indices] if isinstance(axis, Tensor) else axis.start + indices * axis.step
    return axis[slice(indices.start, indices.stop, indices.step)]


def _keys_of(key: Tensor, heads: Axis, group: int) -> Tensor:
    """The key heads of these query heads: whole groups share one, otherwise each query head gets a copy."""
    if group == 1:
        return take(key, 1, heads)
    if isinstance(heads, range) and heads.step == 1 and len(heads):
        first, last = heads.start // group, (heads.stop - 1) // group
        if first == last or (heads.start % group == 0 and heads.stop % group == 0):
            return key[:, first : last + 1]
    indices = heads if isinstance(heads, Tensor) else torch.arange(heads.start, heads.stop, heads.step)
    return key.index_select(1, (indices // group).to(key.device))
