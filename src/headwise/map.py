"""`AttentionMap`: attention weights that cost nothing until somebody looks.

One weight is exp(score − log-sum-exp of its row), and the log-sum-exp is a by-product of fused attention. So a map
keeps query, key, scoring and that one number per row, and answers any question about the T×S matrix without making it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree

from headwise import engine, mask_form, relative, shapes
from headwise.errors import MapIndexError, OptionError, StaleMapError
from headwise.indexing import NAMES, axis_of, block_axes
from headwise.looking import LIMIT, brief, check_bytes, elements, tile
from headwise.mask_algebra import Grid, Mask
from headwise.narrowing import narrowed
from headwise.panel import Distances, Panel, Peak, Received, TopKeys, checked_probe, octave_edges, take_panel
from headwise.scoring import Scoring
from headwise.source import Axis, Frame, Source, row_blocks
from headwise.tensorlike import TensorLike

if TYPE_CHECKING:
    from headwise.cache import KVCache
    from headwise.parallel.spread import Spread
    from headwise.summary import Summary

WORKING_BYTES = 2**26  # numbers in flight while a dense tensor is filled

STATISTICS = tuple(field.name for field in dataclasses.fields(Panel))

Selector = int | slice | Sequence[int] | Tensor


class AttentionMap(TensorLike):
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
        return _unflatten, _flatten(self)

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
    def ndim(self) -> int:
        """4."""
        return 4

    @property
    def requires_grad(self) -> bool:
        """Whether what is computed from this map has a gradient."""
        tensors = (self._query, self._key, *self._scoring.learnable)
        return any(x is not None and x.requires_grad for x in tensors)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """4."""
        return 4

    def numel(self) -> int:
        """How many weights there are."""
        return self.shape.numel()

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
        block = tile(narrowed(source, batch, heads, rows), cols).to(self.dtype)
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
        result = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for rows in row_blocks(T, B * H * S * 8, WORKING_BYTES):
            part = narrowed(source, range(B), range(H), range(rows.start, rows.stop))
            result[:, :, rows] = tile(part, range(S))
        return result

    def select(
        self, *, batch: Selector | None = None, heads: Selector | None = None, rows: Selector | None = None
    ) -> "AttentionMap":
        """The map of some samples, heads or queries only; nothing is computed. All four axes stay.

        >>> weights = AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16))
        >>> weights.select(heads=[0, 2], rows=slice(-3, None)).shape
        torch.Size([2, 2, 3, 9])
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

    # Statistics.

    def panel(self, **asked: Any) -> Panel:
        """Many statistics at once, which share passes over the weights.

        `weights.panel(entropy=True, received=True, masses={"previous": previous_token()}, pooled=(256, 256))`

        Statistics:
            - `entropy`: True for the entropy of every row.
            - `peak`: True for the largest weight of every row and its key.
            - `distance`: True for the mean distance of every row.
            - `histogram`: True for the share of attention in every octave of distance.
            - `received`: True for what every key receives.
            - `masses`: names to probes.
            - `pooled`: rows and columns of a picture.
            - `pooled_peak`: rows and columns of a picture of largest weights.
            - `topk`: how many of the largest weights of every row.
        """
        unknown = [name for name in asked if name not in STATISTICS]
        if unknown:
            raise TypeError(
                f"panel() got an unexpected keyword argument {unknown[0]!r}; it takes {', '.join(STATISTICS)}."
            )
        return take_panel(self._normalised(), **asked)

    def entropy(self) -> Tensor:
        """−Σ w log w of every row, (B, H, T), in nats: 0 looks at one key, log(S) at all alike."""
        return self.panel(entropy=True).entropy  # type: ignore[return-value]

    def peak(self) -> Peak:
        """The largest weight of every row (B, H, T), and the key it lies on."""
        return self.panel(peak=True).peak  # type: ignore[return-value]

    def distance(self) -> Distances:
        """How far queries look: the mean of every row (B, H, T), and the histogram of every head over octaves."""
        panel = self.panel(distance=True, histogram=True)
        assert panel.distance is not None and panel.histogram is not None  # noqa: S101, PT018 - both were asked for
        return Distances(panel.distance, panel.histogram, octave_edges(panel.histogram.shape[-1]))

    def received(self) -> Received:
        """What every key receives (B, H, S): the sum, and the mean over the queries that could see it."""
        return self.panel(received=True).received  # type: ignore[return-value]

    def topk(self, k: int) -> TopKeys:
        """The k largest weights of every row (B, H, T, k), largest first, and their keys."""
        return self.panel(topk=k).topk  # type: ignore[return-value]

    def mass(self, probe: Mask) -> Tensor:
        """The share of every row's attention that lies where the probe is True, (B, H, T)."""
        return self.panel(masses={"probe": probe}).masses["probe"]

    def pooled(self, rows: int, cols: int | None = None, *, peak: bool = False) -> Tensor:
        """A picture (B, H, rows, cols): weights summed over the keys of a cell and averaged over its queries.

        Picture rows sum to 1 at every size, so that a narrow stripe never fades.

        Args:
            rows: how many rows; at most T are given.
            cols: how many columns, as many as rows unless given; at most S are given.
            peak: the largest weight of each cell instead.
        """
        size = (rows, rows if cols is None else cols)
        if peak:
            return self.panel(pooled_peak=size).pooled_peak  # type: ignore[return-value]
        return self.panel(pooled=size).pooled  # type: ignore[return-value]

    def summary(self, ids: Tensor | Sequence[int] | None = None, **options: Any) -> "Summary":
        """What each head does: a small table with numbers and a reading in words; see `headwise.summary`.

        Args:
            ids: the tokens of the keys, (S,) or (B, S); with them induction and repeated tokens are looked for.
            options: `delimiters`, token ids of punctuation or separators.
        """
        from headwise.summary import summarise

        return summarise(self, ids, **options)

    def plot(self, head: int | Sequence[int] | None = None, **options: Any) -> Any:
        """The map as matplotlib axes: of one head its axes, of several or all an array of axes.

        Long maps are pooled as `pooled` does, so that rows still sum to 1; colours are square roots of shares 0 to 1.

        Args:
            head: which head, or several; all unless given.
            options: `tokens`, a text for every query (and key, where there are as many); `keys`, for every key;
                `sample` of the batch; `ax`, axes to draw on.
        """
        from headwise.view.plotting import plot

        return plot(self, head, **options)

    def _repr_html_(self) -> str:
        """For notebooks: what each head does, computed when it is displayed; of a long map from some queries."""
        from headwise.view.notebook import map_html

        return map_html(self)

    def log_sum_exp(self) -> Tensor:
        """The log of every row's sum of exp(score), (B, H, T), sinks counted; minus infinity where nothing is seen."""
        return engine.log_sum_exp(self._normalised()).clone()

    # Reductions that need no dense tensor.

    def sum(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """As of a tensor; over queries or keys alone it streams."""
        return self._reduced("sum", dim, keepdim, options)

    def mean(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """As of a tensor; over queries or keys alone it streams."""
        return self._reduced("mean", dim, keepdim, options)

    def amax(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """As of a tensor; over keys alone it streams."""
        return self._reduced("amax", dim, keepdim, options)

    def max(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        """As of a tensor; over keys alone, or of everything, it streams."""
        dim = options.pop("axis", dim)
        if dim is None and not _given(options):
            return self.amax(dim=-1).amax()
        if dim in (-1, 3) and not _given(options):
            weight, key = self.peak()
            weight, key = weight.to(self.dtype), key.clamp(min=0)
            found = (weight[..., None], key[..., None]) if keepdim else (weight, key)
            return torch.return_types.max(found)
        return self.to_tensor().max(*(() if dim is None else (dim, keepdim)), **_given(options))

    def _reduced(self, name: str, dim: Any, keepdim: bool, options: dict[str, Any]) -> Tensor:
        dim = options.pop("axis", dim)
        options = _given(options)
        axis = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
        found = None
        if axis is None and name in ("sum", "mean") and not options:
            rows = self._reduced(name, -1, False, {})
            return rows.sum() if name == "sum" else rows.mean()
        if axis in (-1, 3) and not options:
            found = self.peak().weight if name == "amax" else self.mass(_Everything())
        elif axis in (-2, 2) and name != "amax" and not options:
            self._with_keys(f"{name}(dim={dim})")
            found = self.received().total
        if found is None:
            call = {} if dim is None else {"dim": dim, "keepdim": keepdim}
            return getattr(self.to_tensor(), name)(**call, **options)  # type: ignore[no-any-return]
        found = found / self.shape[axis] if name == "mean" else found
        return (found.unsqueeze(axis) if keepdim else found).to(self.dtype)

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
        """The map on another device or in another dtype, with everything it looks at."""
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
        from headwise.saving import save

        save(self, path)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> "AttentionMap":
        """The map that `save` wrote."""
        from headwise.saving import load

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
            self._lse = engine.normalizer(source)
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
        leaves, context = _flatten(self)
        return _unflatten([change(x) for x in leaves], context)


class _Everything(Mask):
    """Every key, for the sum of a row."""

    def visible(self, grid: Grid) -> Tensor:
        return torch.ones((), dtype=torch.bool, device=grid.row.device)

    def hides_nothing(self, T: int, S: int) -> bool:
        return True


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that say something; numpy's own functions pass dtype=None and out=None."""
    return {name: value for name, value in options.items() if value is not None}


def _versions(query: Tensor, key: Tensor, scoring: Scoring) -> tuple[int, ...] | None:
    """A number for each tensor that grows when it is changed in place; None where torch does not count."""
    if query.is_inference() or key.is_inference():
        return None
    return (query._version, key._version, *(x._version for x in scoring.tensors() if not x.is_inference()))


# A pytree node: torch's transforms take the tensors out and put them back.


def _flatten(weights: AttentionMap) -> tuple[list[Any], Any]:
    scoring = weights._scoring
    tensors, description = mask_form.apart(scoring.mask)
    bias, sinks, table = scoring.learnable
    optional = {"log_sum_exp": weights._lse, "bias": bias, "sinks": sinks}
    optional |= {"relative": table, "positions": scoring.positions}
    there = tuple(name for name, x in optional.items() if x is not None)
    leaves = [weights._query, weights._key, *(optional[name] for name in there), *tensors]
    rule = relative.apart(scoring.relative)
    frame = _framed(weights._frame)
    return leaves, (there, description, scoring.scale, scoring.softcap, rule, frame, weights._spread)


def _framed(frame: Frame | None) -> Any:
    """The frame in a form that compares by value."""
    if frame is None:
        return None
    axes = (tuple(x.tolist()) if isinstance(x, Tensor) else (x.start, x.stop, x.step, "range") for x in frame[:3])
    return (*axes, *frame[3:])


def _unframed(plain: Any) -> Frame | None:
    if plain is None:
        return None
    batch, head, row = (
        range(*x[:3]) if len(x) == 4 and x[3] == "range" else torch.tensor(x, dtype=torch.long) for x in plain[:3]
    )
    return Frame(batch, head, row, *plain[3:])


def _unflatten(leaves: Iterable[Any], context: Any) -> AttentionMap:
    there, description, scale, softcap, rule, frame, spread = context
    query, key, *rest = leaves
    optional = dict(zip(there, rest, strict=False))
    mask = mask_form.together(iter(rest[len(there) :]), description)
    distances = None if rule is None else relative.together(optional["relative"], rule)
    scoring = Scoring(
        mask, optional.get("bias"), scale, softcap, optional.get("sinks"), distances, optional.get("positions")
    )
    made = AttentionMap.__new__(AttentionMap)
    made._query, made._key, made._scoring, made._frame = query, key, scoring, _unframed(frame)
    made._lse, made._cache, made._spread = optional.get("log_sum_exp"), None, spread
    plain = (Tensor, torch.nn.Parameter)
    real = type(query) in plain and type(key) in plain and not torch.compiler.is_compiling()
    made._versions = _versions(query, key, scoring) if real else None
    return made


_pytree.register_pytree_node(AttentionMap, _flatten, _unflatten, serialized_type_name="headwise.AttentionMap")
