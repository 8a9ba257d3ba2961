"""`AttentionMap`: attention weights that are computed only when they are used.

A weight is exp(score − log-sum-exp of its row), and fused attention returns the log-sum-exp anyway. So a map keeps
query, key, scoring and that one number per row, and computes what you ask of the T×S matrix without storing it.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree

from headwise import shapes
from headwise.errors import MapIndexError, OptionError, StaleMapError
from headwise.masks import Mask
from headwise.masks.composite import put_together, take_apart
from headwise.masks.probes import sink
from headwise.weights import display, padding, readings, storage, streaming, values
from headwise.weights.indexing import AXES, LIMIT, axis_of, block_axes, brief, check_bytes, pointwise
from headwise.weights.lazymatrix import LazyMatrix
from headwise.weights.panel import Received, checked_probe
from headwise.weights.scoring import Scoring
from headwise.weights.source import Axis, Frame, Shards, Source, row_blocks
from headwise.weights.spans import received_by_weight

if TYPE_CHECKING:
    from headwise.weights.summary import Summary

CLEAR = 0.01  # if the first key leaves at least this much of a row, float32 gives the rest to five digits
WORKING_BYTES = 2**26  # buffers used while a dense tensor is filled

Selector = int | slice | Sequence[int] | Tensor


class Cache(Protocol):
    """A key/value cache that holds the keys of a map."""

    rewrites: int  # how often keys that maps use may have been overwritten


class AttentionMap(LazyMatrix):
    """Attention weights (B, H, T, S) before dropout, computed where and when they are used.

    Indexing gives exact tensors and computes only what it returns. Statistics are exact, stream over the weights and
    need O(T) memory. Everything is differentiable once in query and key, except the largest weight of a picture's cell.
    Maps come from `attend(..., return_weights=True)`, from a layer, or from `watch`.

    >>> weights = AttentionMap(torch.randn(2, 4, 1000, 16), torch.randn(2, 4, 1000, 16))
    >>> weights
    AttentionMap(B=2, H=4, T=1000, S=1000, float32, cpu)
    >>> weights[0, 3, 10:20].shape
    torch.Size([10, 1000])
    >>> weights.entropy().shape
    torch.Size([2, 4, 1000])

    Args:
        query: (B, H, T, D).
        key: (B, Hkv, S, D).
        scoring: what turns a dot product into a weight: mask, scale, bias, soft-cap, sinks.
        log_sum_exp: (B, H, T) of the scores, sinks included, minus infinity for a row that sees nothing; computed when
            first needed unless given.
        frame: where this map lies in a larger one; by default it is whole.
        shards: the ranks that hold the rest of it; see `headwise.parallel`.
    """

    _placeholders: tuple[dict[str, Any], Any] | None = None  # what stands for the tensors inside torch's transforms
    # What `padding.real_keys` and `padding.first_keys` found, once it is known.
    _real: tuple[Tensor | None, Tensor | None] | None = None
    _origin: Callable[[int, int, int, int], Any] | None = None  # what `why` asks, if `watch` took this map

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        scoring: Scoring | None = None,
        log_sum_exp: Tensor | None = None,
        frame: Frame | None = None,
        shards: Shards | None = None,
    ) -> None:
        if scoring is None:  # made by hand; callers that pass a scoring have checked the shapes
            scoring = Scoring()
            shapes.check_heads(query, key, key)
        elif not isinstance(scoring, Scoring):
            raise OptionError(f"scoring={shapes.brief(scoring)}: expected a headwise.Scoring.")
        self._query, self._key, self._lse, self._frame, self._shards = query, key, log_sum_exp, frame, shards
        self._scoring = scoring
        self._cache: tuple[Cache, int] | None = None
        self._watch_changes(not torch.compiler.is_compiling())

    def _watch_changes(self, possible: bool) -> None:
        """Remember how often each tensor has been changed in place. Torch does not count it for inference tensors."""
        self._watched: list[Tensor] = []
        if possible and not (self._query.is_inference() or self._key.is_inference()):
            self._watched = [self._query, self._key]
            self._watched += [x for x in self._scoring.tensors() if not x.is_inference()]
        self._versions = [x._version for x in self._watched]

    # Properties of a tensor.

    @property
    def shape(self) -> torch.Size:
        """(B, H, T, S)."""
        S = self._key.shape[2] if self._frame is None else self._frame.S
        return torch.Size((*self._query.shape[:3], S))

    @property
    def _whole_shape(self) -> tuple[int, ...]:
        """(B, H, T, S) of the map that this is a part of."""
        return tuple(self.shape if self._frame is None else self._frame[3:])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the query and of dense weights.

        Statistics are float32, or float64 for float64 queries and if there is a bias.
        """
        return self._query.dtype

    @property
    def device(self) -> torch.device:
        """The device of the query."""
        return self._query.device

    @property
    def requires_grad(self) -> bool:
        """Whether results computed from this map have a gradient."""
        tensors = (self._query, self._key, *self._scoring.learnable)
        return any(x is not None and x.requires_grad for x in tensors)

    def __len__(self) -> int:
        """The number of heads; iterating gives a map for each."""
        return self.shape[1]

    def __iter__(self) -> Iterator["AttentionMap"]:
        return (self.select(heads=head) for head in range(len(self)))

    def __repr__(self) -> str:
        B, H, T, S = self.shape
        dtype, grad = str(self.dtype).removeprefix("torch."), ", requires_grad" if self.requires_grad else ""
        return f"AttentionMap(B={B}, H={H}, T={T}, S={S}, {dtype}, {self.device}{grad})"

    # The weights themselves.

    def __getitem__(self, index: Any) -> Tensor:
        """The exact weights at `index`, as a tensor would give them; only these are computed."""
        source = self._with_keys(f"weights[{brief(index)}]")
        found = block_axes(index, self.shape)
        if found is None:
            return self._elements(source, index)
        (batch, heads, rows, cols), dropped = found
        size = len(batch) * len(heads) * len(rows) * len(cols)
        check_bytes(size, source.precise, LIMIT, f"weights[{brief(index)}]")
        block = streaming.dense_weights(source.narrowed(batch, heads, rows), cols, self.dtype)
        return block[tuple(0 if axis in dropped else slice(None) for axis in range(4))]

    def _elements(self, source: Source, index: Any) -> Tensor:
        """Weights one by one, for an index that is not a block."""
        source = source if source.learns else self._normalised()
        places = [x.to(self.device) for x in pointwise(index, self.shape)]
        check_bytes(places[3].numel() * self._query.shape[3], source.precise, LIMIT, "weights[...] element by element")
        return streaming.single_weights(source, *places)

    def to_tensor(self, *, limit: int = LIMIT) -> Tensor:
        """All weights as a dense tensor (B, H, T, S).

        Args:
            limit: raise an error instead of using more bytes than this.
        """
        source = self._with_keys("to_tensor()")
        check_bytes(self.numel(), self.dtype, limit, "to_tensor()")
        if source.learns or torch.compiler.is_compiling():
            return source.block(slice(None)).weights.to(self.dtype)
        B, H, T, S = self.shape
        written = streaming.dense_by_kernel(source, range(S), self.dtype)
        if written is not None:
            return written
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows in row_blocks(T, B * H * S * 8, WORKING_BYTES):
            part = source.narrowed(range(B), range(H), range(rows.start, rows.stop))
            result[:, :, rows] = streaming.dense_weights(part, range(S), self.dtype)
        return result

    def select(
        self, *, batch: Selector | None = None, heads: Selector | None = None, rows: Selector | None = None
    ) -> "AttentionMap":
        """The map of some samples, heads or queries only; nothing is computed. All four axes remain.

        >>> weights = AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16))
        >>> weights.select(heads=[0, 2], rows=slice(-3, None)).shape
        torch.Size([2, 2, 3, 9])

        Args:
            batch: which samples: an int, a slice, a list or a 1-D tensor; by default all.
            heads: which heads.
            rows: which queries.
        """
        axes: list[Axis] = []
        asked = {"batch": batch, "heads": heads, "rows": rows}
        for (argument, item), size, name in zip(asked.items(), self.shape[:3], AXES[:3], strict=True):
            found = range(size) if item is None else axis_of(item, size, name)
            if found is None:
                raise MapIndexError(f"select({argument}={item!r}): expected an int, a slice, a list or a 1-D tensor.")
            axes.append(found)
        part = self._of(self._source().narrowed(*axes))
        part._origin = self._origin
        return part

    def without(self, probe: Mask) -> "AttentionMap":
        """The map as it would be if the keys where `probe` is True were hidden: the other weights sum to 1 again.

        `weights.without(sink(1))` shows what heads do besides attending to the first token.
        """
        source = self._source()
        others = padding.Excluded(self._probe(probe))
        mask = others if source.mask is None else source.mask & others
        scoring = dataclasses.replace(self._scoring, mask=mask)
        return self._of(dataclasses.replace(source, scoring=scoring, log_sum_exp=None))

    def _within(self, probe: Mask) -> "AttentionMap":
        """The same weights on the keys where `probe` is True, and no others: rows sum to what these keys receive."""
        source, found = self._normalised(), self._probe(probe)
        mask = found if source.mask is None else source.mask & found
        part = self._of(dataclasses.replace(source, scoring=dataclasses.replace(self._scoring, mask=mask, sinks=None)))
        part._real = self._text()  # what the probe hides is not padding
        return part

    def _without_first(self) -> "AttentionMap":
        """`without(sink(1))`, whose log-sum-exp is derived from the known one: lse + log(what the first key leaves).

        Rows where that is a small difference, which would lose digits, are computed again.
        """
        rest = self.without(sink(1))
        if torch.compiler.is_compiling() or self._source().shards is not None:
            return rest
        left = 1 - self.mass(sink(1)).to(self._source().precise)
        rest._lse = self.log_sum_exp() + left.clamp(min=0).log()
        doubtful = (left < CLEAR).any(1).any(0).nonzero()[:, 0].cpu()
        if len(doubtful):
            rest._lse[:, :, doubtful.to(left.device)] = self.select(rows=doubtful).without(sink(1)).log_sum_exp()
        return rest

    def why(self, query: int, key: int, *, head: int | None = None, sample: int = 0) -> Any:
        """Why a query attends to a key: their score, split over the residual stream of both tokens, a `headwise.Why`.

        The map must come from `headwise.watch(model)`, and the model must still exist: it runs again. `headwise.why` is
        the same without a map.

        Args:
            query: the position of the query in this map.
            key: the position of the key.
            head: the head of this map; needed if there are several.
            sample: the sample of this map.
        """
        if self._origin is None:
            raise OptionError(
                "why(): this map does not know its model. Take it from `with watch(model) as seen: ...`, or use "
                "headwise.why(model, tokens, layer, head, query, key)."
            )
        B, H, T, S = self.shape
        if head is None and H > 1:
            raise OptionError(f"why({query}, {key}): this map has {H} heads; pass head=, from 0 to {H - 1}.")
        head = 0 if head is None else head
        for name, place, size in (("sample", sample, B), ("head", head, H), ("query", query, T), ("key", key, S)):
            if not 0 <= place < size:
                raise OptionError(
                    f"why({name}={place}): the map is (B, H, T, S) = {tuple(self.shape)}, counted from 0."
                )
        if self._frame is not None:
            axes = (self._frame.batch, self._frame.head, self._frame.row)
            sample, head, query = (int(axis[i]) for axis, i in zip(axes, (sample, head, query), strict=True))
        return self._origin(sample, head, query, key)

    # Statistics.

    def explain(self) -> str:
        """How the statistics of this map are computed: by kernels, by the compiled loop or by tiles, and why.

        It builds the compiled loop if that has not been done yet.
        """
        return streaming.path(self._source())

    def _read(self, asked: Sequence[readings.Reading], *, padded: bool = False) -> list[tuple[Tensor, ...]]:
        """The results of readings; unless `padded`, a padded query counts as one that sees no key."""
        keys = None if padded else self._real_keys()
        source = self._source() if keys is None else self._unpadded()
        found = streaming.read(source, asked)
        if keys is None:
            if self._lse is None and not torch.compiler.is_compiling():
                self._lse = source.log_sum_exp
            return found
        factor = padding.share_of_queries(source, keys).reciprocal()[:, None, None]  # means are over real queries only
        return [
            tuple(x * factor.to(x.dtype) for x in results) if reading.merged == "mean" else results
            for reading, results in zip(asked, found, strict=True)
        ]

    def _unpadded(self) -> Source:
        """The source with its log-sum-exp, in which padded queries see no key."""
        return padding.without_padding(self._normalised(), self._real_keys())

    def _real_keys(self) -> Tensor | None:
        """What `padding.real_keys` finds; computed once."""
        return self._text()[0]

    def _first_keys(self) -> Tensor | None:
        """What `padding.first_keys` finds; computed once."""
        return self._text()[1]

    def _first_of_texts(self) -> Tensor:
        """Which keys are the first token of their text, (B or 1, S)."""
        first, key = self._first_keys(), torch.arange(self.shape[3], device=self.device)
        if first is None:
            return (key == 0)[None]
        return (first[self._source().axis("batch")] if len(first) > 1 else first) == key

    def _text(self) -> tuple[Tensor | None, Tensor | None]:
        if self._real is not None and not torch.compiler.is_compiling():
            return self._real
        real = padding.real_keys(self._source())
        found = (real, padding.first_keys(self._source(), real))
        self._real = None if torch.compiler.is_compiling() else found
        return found

    def real_tokens(self) -> padding.RealTokens:
        """Which queries (B, T) and keys (B, S) are tokens of the text; the others are padding.

        A key that no query may see is padding, and so is the query at its position. In cross-attention, a query is
        padding if it may see no key.
        Statistics leave padded queries out: all their numbers are zero, as for a query that sees no key.
        """
        B, _, T, S = self.shape
        source, keys = self._source(), self._real_keys()
        queries = padding.real_queries(source, keys).expand(B, T)
        if keys is None:
            return padding.RealTokens(queries, torch.ones(B, S, dtype=torch.bool, device=self.device))
        return padding.RealTokens(queries, (keys[source.axis("batch")] if len(keys) > 1 else keys).expand(B, S))

    def received(self, weights: Tensor | None = None) -> Received:
        """What every key receives (B, H, S): the sum, and the mean over the queries that can see it.

        Args:
            weights: a factor for every query, (T,), (B, T) or (B, H, T), in the sum: attention rollout, for example,
                is `r = (r + weights.received(r).total.mean(1)) / 2`, layer by layer downwards.
        """
        if weights is None:
            return Received(*self._read([readings.ReceivedReading()])[0])
        return received_by_weight(self, weights)

    # What the weights carry.

    def by_value(self, value: Tensor, out: Tensor | None = None) -> "AttentionMap":
        """The map whose weights are proportional to weight · ‖value‖: where a head looks, by what it takes from there.

        This is the norm-based analysis of Kobayashi et al. (2020). Rows sum to 1 again, sinks excluded. It is an
        ordinary map, differentiable in query, key and value; in a row whose values are all 0, weights stay as they are.

        >>> weights = AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16))
        >>> weights.by_value(torch.randn(2, 4, 9, 5)).entropy().shape
        torch.Size([2, 4, 9])

        Args:
            value: (B, heads, S, Dv), what the keys come with; fewer heads if query heads share them.
            out: (H, Dv, E), the output projection of each head, to use the norm of what it writes: ‖value · out‖.
        """
        return values.by_value(self, value, out)

    def contributions(
        self,
        value: Tensor,
        output: Tensor | None = None,
        out: Tensor | None = None,
        *,
        gate: Tensor | None = None,
    ) -> "values.Contributions":
        """How much of what each query reads comes from each key: weight · ⟨value, output⟩ / ‖output‖².

        Args:
            value: (B, heads, S, Dv), what the keys come with.
            output: (B, H, T, Dv), what the queries read, if you have it; computed otherwise.
            out: (H, Dv, E), the output projection of each head, to compare what it writes instead.
            gate: (B, H, T, Dv), factors that what queries read is multiplied by, before the projection.
        """
        return values.contributions(self, value, output, out, gate)

    def log_sum_exp(self) -> Tensor:
        """The log of every row's sum of exp(score), (B, H, T), sinks included; minus infinity if it sees nothing."""
        return streaming.log_sum_exp(self._normalised()).clone()

    def _probe(self, probe: Mask) -> Mask:
        """A probe after its checks, which counts positions from the first real token of each text."""
        source = self._source()
        counted = padding.from_first(probe, self._first_keys()) if isinstance(probe, Mask) else probe
        return checked_probe(counted, source)

    # Summaries and plots.

    def summary(
        self,
        ids: Tensor | Sequence[int] | None = None,
        *,
        query_ids: Tensor | Sequence[int] | None = None,
        delimiters: int | Sequence[int] | Tensor | None = None,
    ) -> "Summary":
        """What each head does: a small table of numbers and a description in words; see `headwise.weights.summary`.

        Args:
            ids: the tokens of the keys, (S,) or (B, S), to look for induction and repeated tokens.
            query_ids: in cross-attention, the tokens of the queries, (T,) or (B, T). A map that is given them is taken
                for cross-attention: it has no previous token and no distance.
            delimiters: token ids of punctuation or separators, to measure attention to them as well.
        """
        from headwise.weights.summary import Summary

        streaming.check_not_compiling("summary()")
        return Summary.of(self, ids, delimiters, query_ids)

    def plot(
        self,
        head: int | Sequence[int] | None = None,
        *,
        tokens: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        sample: int = 0,
        ax: Any = None,
    ) -> Any:
        """The map drawn with matplotlib: the axes of one head, or an array of axes for several.

        Long maps are pooled like `pooled`, so that rows still sum to 1. The color shows the square root of the share,
        from 0 to 1; gray marks keys that a query may not see.

        Args:
            head: which head or heads; by default all.
            tokens: a text for every query, and for every key if there are as many.
            keys: a text for every key.
            sample: which sample of the batch.
            ax: axes to draw on, one for each head; by default new ones.
        """
        streaming.check_not_compiling("plot()")
        return display.plot(self, head, tokens=tokens, keys=keys, sample=sample, ax=ax)

    def _repr_html_(self) -> str:
        """For notebooks: what each head does, computed when it is displayed; a long map is sampled."""
        return display.html(self)

    # Copies, and maps on disk.

    def detach(self) -> "AttentionMap":
        """The same map without gradients; it does not keep the graph alive."""
        self._source()
        lse = None if self._lse is None else self._lse.detach()
        learnable = (None if x is None else x.detach() for x in self._scoring.learnable)
        scoring = self._scoring.with_learnable(*learnable)
        found = AttentionMap(self._query.detach(), self._key.detach(), scoring, lse, self._frame, self._shards)
        found._cache = self._cache
        return found

    def kept(self) -> "AttentionMap":
        """The same weights stored as T·S numbers instead of query and key; smaller for few queries of many keys.

        They are float32 or better and have no gradient. Maps with sinks are refused.
        """
        self._with_keys("kept()")
        source = self._normalised()
        if source.scoring.sinks is not None:
            raise OptionError("kept() of a map with sinks: its rows sum to less than 1. Use clone().")
        B, H, T, S = self.shape
        with torch.no_grad():
            block = source.block(slice(None))
        hidden, mask, positions = block.scores == -torch.inf, source.mask, self._scoring.positions
        empty = hidden.all(-1)
        if self._frame is not None:  # the mask is for the whole, of which this is a part
            mask, positions = None, source.positions().reshape(-1, T)
        elif mask is not None:  # it says which tokens are padding
            hidden = hidden & mask.visible(block.grid)
        logs = block.logs.masked_fill(hidden, -torch.inf)
        nothing = logs.new_zeros(1, 1, 1, 1)
        query, key = nothing.expand(B, H, T, 1), nothing.expand(B, H, S, 1)
        lse = logs.new_zeros(B, H, T).masked_fill(empty, -torch.inf)
        scoring = Scoring(mask, logs, 1.0, positions=positions, cross=self._scoring.cross)
        return AttentionMap(query, key, scoring, lse)

    def to(self, *args: Any, **kwargs: Any) -> "AttentionMap":
        """The map on another device or in another dtype; `args` and `kwargs` as for `Tensor.to`."""
        like = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        moved = self._mapped(lambda x: x.to(like.device))
        if like.dtype == self.dtype:
            return moved
        query, key = moved._query.to(like.dtype), moved._key.to(like.dtype)
        return AttentionMap(query, key, moved._scoring, None, self._frame, self._shards)

    def cpu(self) -> "AttentionMap":
        """The map in main memory."""
        return self._mapped(Tensor.cpu)

    def clone(self) -> "AttentionMap":
        """A map with copies of all its tensors, which later changes in place do not affect."""
        return self._mapped(Tensor.clone)

    def save(self, path: str | Path) -> None:
        """Write the map to a safetensors file; see `AttentionMap.load`."""
        streaming.check_not_compiling("save()")
        if not isinstance(path, str | os.PathLike):
            raise OptionError(f"save({type(path).__name__}): expected the path of a file, such as 'map.safetensors'.")
        weights = self.detach()
        weights._with_keys("save()")
        weights._normalised()  # so that a reader need not compute it
        tensors, (_, plan, frame, _) = weights._taken_apart()
        storage.write(path, storage.MapParts(tensors, plan, frame))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "AttentionMap":
        """The map that `save` wrote. If it has a mask or position of your own, import its class first."""
        with storage.reading(path) as (tensors, plan, frame):
            moved = {name: x.to(device) for name, x in tensors.items()}
            made = _together(moved.values(), (tuple(moved), plan, frame, None))
            made._check_one_row()
            return made

    def gather(self) -> "AttentionMap":
        """The whole map, on every rank, if `headwise.parallel` gave each rank some of its heads or queries.

        All ranks must call it. It needs query and key of the whole, never T×S, and after `select(heads=...)` only those
        of these heads. It has no gradients. A map on one rank is whole already.
        """
        return self if self._shards is None else self._shards.gather(self)

    # Internals.

    def _check_one_row(self) -> None:
        """Raise unless the parts of a map from a file fit together; one row is computed for that."""
        shapes.check_heads(self._query, self._key, self._key)
        shapes.check_alike(query=self._query, key=self._key)
        if 0 not in self.shape:
            self[0, 0, 0]

    def _source(self) -> Source:
        """What the weights are computed from; an error if it has changed since."""
        if self._cache is not None:  # it only writes after the keys of this map, unless it counts a rewrite
            changed = self._cache[0].rewrites != self._cache[1]
        else:
            changed = [x._version for x in self._watched] != self._versions
        if changed:
            raise StaleMapError(
                "the query, key, mask or bias of this map was changed in place after the map was made, so its weights "
                "cannot be computed anymore. Read the map before the change, or keep weights.clone()."
            )
        if self._scoring.applied is not None and self._scoring.applied.held is None:
            self._scoring = self._scoring.settled(self._whole_shape, self.device, self.dtype)
        if self._frame is None:
            return Source.whole(self._query, self._key, self._scoring, self._lse)
        return Source(self._query, self._key, self._scoring, self._frame, self._lse, shards=self._shards)

    def _normalised(self) -> Source:
        """The source with its log-sum-exp, which is computed once."""
        source = self._source()
        if self._lse is None and not torch.compiler.is_compiling():
            self._lse = streaming.normalizer(source)
        return source

    def _with_keys(self, what: str) -> Source:
        """The source; an error if other ranks hold some of its keys."""
        source = self._source()
        if source.keys_apart:
            raise OptionError(
                f"{what}: the keys of this map are on several ranks, so no rank can look up weights alone. Ask for a "
                f"statistic (entropy, received, mass, pooled, ...) on all ranks, or use weights.gather() or "
                f"weights.select(heads=...).gather()."
            )
        return source

    def _of(self, source: Source) -> "AttentionMap":
        part = AttentionMap(source.query, source.key, source.scoring, source.log_sum_exp, source.frame, source.shards)
        part._cache = self._cache
        return part

    def _of_cache(self, cache: Cache) -> "AttentionMap":
        """This map, whose keys are in a cache."""
        self._cache = (cache, cache.rewrites)
        return self

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "AttentionMap":
        """The map with `change` applied to every tensor."""
        self._source()
        lse = None if self._lse is None else change(self._lse)
        scoring = self._scoring.map_tensors(change)
        return AttentionMap(change(self._query), change(self._key), scoring, lse, self._frame, self._shards)

    def _taken_apart(self) -> tuple[dict[str, Tensor], Any]:
        """The tensors of the map by name, and everything else, which compares by value."""
        if self._placeholders is not None:
            return self._placeholders
        parts = {"query": self._query, "key": self._key, "log_sum_exp": self._lse, "scoring": self._scoring}
        tensors, plan = take_apart(parts)
        return tensors, (tuple(tensors), plan, storage.plain_frame(self._frame), self._shards)

    def __reduce__(self) -> Any:
        """For copy and pickle. Changes in place are counted from now on."""
        return _together, _flatten(self)


def _flatten(weights: AttentionMap) -> tuple[list[Any], Any]:
    tensors, context = weights._taken_apart()
    return list(tensors.values()), context


def _together(leaves: Iterable[Any], context: Any) -> AttentionMap:
    """The map that was taken apart. Torch's transforms may put anything in the place of its tensors."""
    names, plan, frame, shards = context
    named = dict(zip(names, leaves, strict=True))
    parts = put_together(plan, named)
    made = AttentionMap.__new__(AttentionMap)
    made._query, made._key = parts["query"], parts["key"]
    made._lse, made._scoring = parts["log_sum_exp"], parts["scoring"]
    made._frame, made._shards, made._cache = storage.frame_from(frame), shards, None
    if not all(isinstance(x, Tensor) for x in named.values()):
        made._placeholders = (named, context)
    real = {type(made._query), type(made._key)} <= {Tensor, torch.nn.Parameter}
    made._watch_changes(real and not torch.compiler.is_compiling())
    return made


# A pytree node: torch's transforms take the tensors out and put them back.
_pytree.register_pytree_node(AttentionMap, _flatten, _together, serialized_type_name="headwise.AttentionMap")
