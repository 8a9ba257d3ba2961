"""`AttentionMap`: attention weights that cost nothing until somebody looks.

One weight is exp(score − log-sum-exp of its row), and the log-sum-exp is a by-product of fused attention. So a map
keeps query, key, scoring and that one number per row, and answers any question about the T×S matrix without making it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from headwise import shapes
from headwise.errors import MapIndexError, OptionError, StaleMapError
from headwise.masks import Mask
from headwise.weights import display, map_form, reductions, streaming
from headwise.weights.indexing import LIMIT, NAMES, axis_of, block_axes, brief, by_kernel, check_bytes, elements, tile
from headwise.weights.measures import Measures
from headwise.weights.panel import checked_probe
from headwise.weights.scoring import Scoring
from headwise.weights.source import Axis, Frame, Source, narrowed, row_blocks
from headwise.weights.tensorlike import TensorLike

if TYPE_CHECKING:
    from headwise.layer.cache import KVCache
    from headwise.parallel.spread import Spread
    from headwise.weights.summary import Summary

WORKING_BYTES = 2**26  # numbers in flight while a dense tensor is filled

Selector = int | slice | Sequence[int] | Tensor


class AttentionMap(Measures, TensorLike):
    """Attention weights (B, H, T, S) before dropout, computed where and when they are looked at.

    Indexing gives exact tensors and computes only what it gives. Statistics are exact, stream over the weights and take
    memory O(T). All is differentiable in query and key, once; only the largest weight of a picture's cell is not. Maps
    come from `attend(..., return_weights=True)`, from a layer, or from `watch`.

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
        log_sum_exp: (B, H, T) of the scores, sinks counted, minus infinity for a row that sees nothing; computed when
            first needed unless given.
        frame: where this map lies in the whole of which it is a part; a whole one unless given.
        spread: which other ranks have the rest of it; see `headwise.parallel`.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        scoring: Scoring | None = None,
        log_sum_exp: Tensor | None = None,
        frame: Frame | None = None,
        spread: "Spread | None" = None,
    ) -> None:
        if scoring is None:  # made by hand; who passes a scoring has checked it
            scoring = Scoring()
            shapes.check_heads(query, key, key)
        self._query, self._key, self._lse, self._frame, self._spread = query, key, log_sum_exp, frame, spread
        self._cache: tuple[KVCache, int] | None = None
        self._scoring = scoring
        self._versions = None if torch.compiler.is_compiling() else _versions(query, key, self._scoring)

    def __reduce__(self) -> Any:
        """For copy and pickle: versions are counted anew for the copies."""
        return _together, map_form.apart(self)

    # What a tensor would say of itself.

    @property
    def shape(self) -> torch.Size:
        """(B, H, T, S)."""
        S = self._key.shape[2] if self._frame is None else self._frame.S
        return torch.Size((*self._query.shape[:3], S))

    @property
    def dtype(self) -> torch.dtype:
        """That of the query: the dtype dense weights are given in.

        Statistics are float32, or float64 for float64 queries and where there is a bias.
        """
        return self._query.dtype

    @property
    def device(self) -> torch.device:
        """Where the query is."""
        return self._query.device

    @property
    def requires_grad(self) -> bool:
        """Whether what is computed from this map has a gradient."""
        tensors = (self._query, self._key, *self._scoring.learnable)
        return any(x is not None and x.requires_grad for x in tensors)

    def __len__(self) -> int:
        """How many heads there are; iterating gives a map of each."""
        return self.shape[1]

    def __iter__(self) -> Iterator["AttentionMap"]:
        return (self.select(heads=head) for head in range(len(self)))

    def __repr__(self) -> str:
        B, H, T, S = self.shape
        grad = ", requires_grad" if self.requires_grad else ""
        return (
            f"AttentionMap(B={B}, H={H}, T={T}, S={S}, {str(self.dtype).removeprefix('torch.')}, {self.device}{grad})"
        )

    # The weights themselves.

    def __getitem__(self, index: Any) -> Tensor:
        """The exact weights at `index`, as a tensor would give them; only these are computed."""
        source = self._with_keys(f"weights[{brief(index)}]")
        found = block_axes(index, self.shape)
        if found is None:
            return elements(source if source.learns else self._normalised(), index, self.shape)
        (batch, heads, rows, cols), dropped = found
        size = len(batch) * len(heads) * len(rows) * len(cols)
        check_bytes(size, source.precise, LIMIT, f"weights[{brief(index)}]")
        block = tile(narrowed(source, batch, heads, rows), cols, self.dtype)
        return block[tuple(0 if axis in dropped else slice(None) for axis in range(4))]

    def to_tensor(self, *, limit: int = LIMIT) -> Tensor:
        """All weights as a dense tensor (B, H, T, S).

        Args:
            limit: refuse if it would take more bytes than this.
        """
        source = self._with_keys("to_tensor()")
        check_bytes(self.numel(), self.dtype, limit, "to_tensor()")
        if source.learns:
            return source.block(slice(None)).weights.to(self.dtype)
        B, H, T, S = self.shape
        written = by_kernel(source, range(S), self.dtype)
        if written is not None:
            return written
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows in row_blocks(T, B * H * S * 8, WORKING_BYTES):
            part = narrowed(source, range(B), range(H), range(rows.start, rows.stop))
            result[:, :, rows] = tile(part, range(S), self.dtype)
        return result

    def select(
        self, *, batch: Selector | None = None, heads: Selector | None = None, rows: Selector | None = None
    ) -> "AttentionMap":
        """The map of some samples, heads or queries only; nothing is computed. All four axes stay.

        >>> weights = AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16))
        >>> weights.select(heads=[0, 2], rows=slice(-3, None)).shape
        torch.Size([2, 2, 3, 9])

        Args:
            batch: which samples: an int, a slice, a list or a 1-D tensor; all unless given.
            heads: which heads, likewise.
            rows: which queries, likewise.
        """
        axes: list[Axis] = []
        asked = {"batch": batch, "heads": heads, "rows": rows}
        for (argument, item), size, name in zip(asked.items(), self.shape[:3], NAMES[:3], strict=True):
            found = range(size) if item is None else axis_of(item, size, name)
            if found is None:
                raise MapIndexError(f"select({argument}={item!r}): expected an int, a slice, a list or a 1-D tensor.")
            axes.append(found)
        return self._of(narrowed(self._source(), *axes))

    def without(self, probe: Mask) -> "AttentionMap":
        """The map that would be if the keys where `probe` is True were hidden: the rest sums to 1 again.

        `weights.without(sink(1))` shows what heads do apart from resting on the first token.
        """
        source = self._source()
        probe = checked_probe(probe, source)
        mask = ~probe if source.mask is None else source.mask & ~probe
        scoring = dataclasses.replace(self._scoring, mask=mask)
        return self._of(dataclasses.replace(source, scoring=scoring, log_sum_exp=None))

    # Words and pictures.

    def summary(
        self,
        ids: Tensor | Sequence[int] | None = None,
        *,
        delimiters: int | Sequence[int] | Tensor | None = None,
    ) -> "Summary":
        """What each head does: a small table with numbers and a reading in words; see `headwise.weights.summary`.

        Args:
            ids: the tokens of the keys, (S,) or (B, S); with them induction and repeated tokens are looked for.
            delimiters: token ids of punctuation or separators, attention to which is then measured as well.
        """
        from headwise.weights.summary import summarise

        return summarise(self, ids, delimiters=delimiters)

    def plot(
        self,
        head: int | Sequence[int] | None = None,
        *,
        tokens: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        sample: int = 0,
        ax: Any = None,
    ) -> Any:
        """The map as matplotlib axes: of one head its axes, of several or all an array of axes.

        Long maps are pooled as `pooled` does, so that rows still sum to 1; colours are square roots of shares 0 to 1,
        and grey is what a query may not see.

        Args:
            head: which head, or several; all unless given.
            tokens: a text for every query, and for every key where there are as many.
            keys: a text for every key.
            sample: which of the batch.
            ax: axes to draw on, one for each head; new ones unless given.
        """
        return display.plot(self, head, tokens=tokens, keys=keys, sample=sample, ax=ax)

    def _repr_html_(self) -> str:
        """For notebooks: what each head does, computed when it is displayed; of a long map from some queries."""
        return display.html(self)

    # Reductions that need no dense tensor.

    def sum(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """As of a tensor, with its `dim`, `keepdim` and `options`; over queries or keys alone it streams."""
        return reductions.reduced(self, "sum", dim, keepdim, options)

    def mean(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """As of a tensor, with its `dim`, `keepdim` and `options`; over queries or keys alone it streams."""
        return reductions.reduced(self, "mean", dim, keepdim, options)

    def amax(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """As of a tensor, with its `dim`, `keepdim` and `options`; over keys alone it streams."""
        return reductions.reduced(self, "amax", dim, keepdim, options)

    def max(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        """As of a tensor, with its `dim`, `keepdim` and `options`; over keys alone, or of everything, it streams."""
        return reductions.largest(self, dim, keepdim, options)

    # Keeping a look for later.

    def detach(self) -> "AttentionMap":
        """The same map without gradients; it does not keep the graph alive."""
        self._source()
        lse = None if self._lse is None else self._lse.detach()
        learnable = (None if x is None else x.detach() for x in self._scoring.learnable)
        scoring = self._scoring.with_learnable(*learnable)
        found = AttentionMap(self._query.detach(), self._key.detach(), scoring, lse, self._frame, self._spread)
        found._cache = self._cache
        return found

    def kept(self) -> "AttentionMap":
        """The same weights held as numbers, T·S of them, instead of query and key: for few queries of many keys.

        In float32 or better, without gradients; where sinks take part rows cannot be told from others, so not for them.
        """
        self._with_keys("kept()")
        source = self._normalised()
        if source.scoring.learnable[1] is not None:
            raise OptionError("kept() of a map with sinks: its rows sum to less than 1. Use clone().")
        B, H, T, S = self.shape
        with torch.no_grad():
            block = source.block(slice(None))
            logs = block.logs.masked_fill(block.scores == -torch.inf, -torch.inf)
        nothing = logs.new_zeros(1, 1, 1, 1)
        query, key = nothing.expand(B, H, T, 1), nothing.expand(B, H, S, 1)
        empty = (logs == -torch.inf).all(-1)
        lse = logs.new_zeros(B, H, T).masked_fill(empty, -torch.inf)
        return AttentionMap(query, key, Scoring(bias=logs, scale=1.0), lse)

    def to(self, *args: Any, **kwargs: Any) -> "AttentionMap":
        """The map on another device or in another dtype, with all it looks at; `args` and `kwargs` as of a tensor."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        moved = self._mapped(lambda x: x.to(probe.device))
        if probe.dtype == self.dtype:
            return moved
        query, key = moved._query.to(probe.dtype), moved._key.to(probe.dtype)
        return AttentionMap(query, key, moved._scoring, None, self._frame, self._spread)

    def cpu(self) -> "AttentionMap":
        """The map in main memory."""
        return self._mapped(Tensor.cpu)

    def clone(self) -> "AttentionMap":
        """A map with copies of everything it looks at, safe from changes in place."""
        return self._mapped(Tensor.clone)

    def save(self, path: str | Path) -> None:
        """Write everything the map looks at to a safetensors file; see `AttentionMap.load`."""
        from headwise.weights.saving import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "AttentionMap":
        """The map that `save` wrote."""
        from headwise.weights.saving import load

        return load(path, device)

    # The rest of a map of which several ranks have a part.

    def gather(self) -> "AttentionMap":
        """The whole map, on every rank, of which `headwise.parallel` gave each its heads or its queries.

        All ranks must call it. It takes the query and key of the whole, never T×S; after `select(heads=...)` only those
        of these heads. It has no gradients. A map that lies on one rank is whole as it is.
        """
        if self._spread is None:
            return self
        return self._spread.gather(self)

    # Inside.

    def _with_keys(self, what: str) -> Source:
        """The source, refused where other ranks have some of its keys."""
        source = self._source()
        if source.keys_apart:
            raise OptionError(
                f"{what}: the keys of this map lie on several ranks, so there is nothing to look up on one. Ask for a "
                f"statistic (entropy, received, mass, pooled, ...) on all ranks, or look at weights.gather() or "
                f"weights.select(heads=...).gather()."
            )
        return source

    def _source(self) -> Source:
        """What the weights are made of, unless it has been changed since."""
        changed = self._versions is not None and self._versions != _versions(self._query, self._key, self._scoring)
        if self._cache is not None:  # which only writes behind the keys we see, unless it says otherwise
            changed = self._cache[0].rewrites != self._cache[1]
        if changed:
            raise StaleMapError(
                "the query, key, mask or bias of this map was changed in place after the map was made, so its weights "
                "are gone. Read the map before the change, or keep weights.clone()."
            )
        if self._frame is None:
            return Source.whole(self._query, self._key, self._scoring, self._lse)
        return Source(self._query, self._key, self._scoring, self._frame, self._lse, spread=self._spread)

    def _normalised(self) -> Source:
        """The source with its log-sum-exp, which is computed once."""
        source = self._source()
        if self._lse is None and not torch.compiler.is_compiling():
            self._lse = streaming.normalizer(source)
            source = self._source()
        return source

    def _of(self, source: Source) -> "AttentionMap":
        part = AttentionMap(source.query, source.key, source.scoring, source.log_sum_exp, source.frame, source.spread)
        part._cache = self._cache
        return part

    def _of_cache(self, cache: "KVCache") -> "AttentionMap":
        """This map, whose keys lie in a cache."""
        self._cache = (cache, cache.rewrites)
        return self

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "AttentionMap":
        """The map with every tensor changed alike."""
        self._source()
        leaves, context = map_form.apart(self)
        return _together([change(x) for x in leaves], context)


def _versions(query: Tensor, key: Tensor, scoring: Scoring) -> tuple[int, ...] | None:
    """A number for each tensor that grows when it is changed in place; None where torch does not count."""
    if query.is_inference() or key.is_inference():
        return None
    return (query._version, key._version, *(x._version for x in scoring.tensors() if not x.is_inference()))


def _together(leaves: Iterable[Any], context: Any) -> AttentionMap:
    """The map that was taken apart; where torch's transforms put things that are no tensors, versions do not count."""
    made = AttentionMap.__new__(AttentionMap)
    made._query, made._key, made._scoring, made._lse, made._frame, made._spread = map_form.parts(leaves, context)
    plain = (Tensor, torch.nn.Parameter)
    real = type(made._query) in plain and type(made._key) in plain and not torch.compiler.is_compiling()
    made._cache = None
    made._versions = _versions(made._query, made._key, made._scoring) if real else None
    return made


# A pytree node: torch's transforms take the tensors out and put them back.
_pytree.register_pytree_node(AttentionMap, map_form.apart, _together, serialized_type_name="headwise.AttentionMap")
