"""The statistics of a matrix that is read and not stored, and those reductions of a tensor that stream over it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise import shapes
from headwise.errors import OptionError
from headwise.masks import Mask, prefix
from headwise.weights import readings
from headwise.weights.panel import (
    PLAIN,
    Distances,
    Panel,
    Peak,
    Size,
    TopKeys,
    checked_size,
    octave_edges,
)
from headwise.weights.source import Source
from headwise.weights.spans import SpanReading, Spans
from headwise.weights.tensorlike import TensorLike


class LazyMatrix(TensorLike):
    """Weights (B, H, T, S) of which everything is computed when it is asked for.

    Statistics are exact, stream over the weights and need O(T) memory.
    """

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of dense weights."""
        raise NotImplementedError

    def _read(self, asked: Sequence[readings.Reading], *, padded: bool = False) -> list[tuple[Tensor, ...]]:
        """The results of readings; unless `padded`, a padded query counts as one that sees no key."""
        raise NotImplementedError

    def _probe(self, probe: Mask) -> Mask:
        """A probe after its checks."""
        raise NotImplementedError

    def _with_keys(self, what: str) -> Source:
        """What the weights are computed from; an error that names `what` if other ranks hold some of its keys."""
        raise NotImplementedError

    def read(self, reading: readings.Reading) -> tuple[Tensor, ...]:
        """The results of any statistic, such as one of your own; docs/design.md shows how to write one.

        Args:
            reading: an object of a class derived from `headwise.weights.Reading`.
        """
        if not isinstance(reading, readings.Reading):
            raise OptionError(
                f"read({getattr(reading, '__name__', type(reading).__name__)}): expected an object of a class derived "
                f"from headwise.weights.Reading."
            )
        return self._read([reading])[0]

    def panel(
        self,
        *,
        entropy: bool = False,
        peak: bool = False,
        distance: bool = False,
        histogram: bool = False,
        received: bool = False,
        masses: Mapping[str, Mask] | None = None,
        pooled: Size | None = None,
        pooled_peak: Size | None = None,
        topk: int | None = None,
    ) -> Panel:
        """Several statistics at once, which share passes over the weights.

        `weights.panel(entropy=True, received=True, masses={"previous": previous_token()}, pooled=(256, 256))`

        Args:
            entropy: the entropy of every row.
            peak: the largest weight of every row, and its key.
            distance: the mean distance of every row.
            histogram: the share of attention in every octave of distance.
            received: what every key receives.
            masses: probes by name, for the share of every row on keys where the probe is True.
            pooled: rows and columns of a picture.
            pooled_peak: rows and columns of a picture of the largest weights.
            topk: how many of the largest weights of every row.
        """
        if masses is not None and not isinstance(masses, Mapping):
            raise OptionError(f"masses={type(masses).__name__}: expected probes by name, such as {{'sink': sink(4)}}.")
        wanted = {"entropy": entropy, "peak": peak, "distance": distance, "histogram": histogram, "received": received}
        asked = {name: PLAIN[name]() for name, flag in wanted.items() if shapes.check_truth(name, flag)}
        for name, size in (("pooled", pooled), ("pooled_peak", pooled_peak)):
            if size is not None:
                asked[name] = self._pooled_reading(name, size)
        if topk is not None:
            asked["topk"] = self._topk_reading(topk)
        probes = {name: self._mass_reading(probe) for name, probe in dict(masses or {}).items()}
        every = [*asked.values(), *probes.values()]
        found = self._read(every) if every else []
        return Panel.of(dict(zip(asked, found, strict=False)), dict(zip(probes, found[len(asked) :], strict=True)))

    def entropy(self) -> Tensor:
        """−Σ w log w of every row, (B, H, T), in nats: 0 if all weight is on one key, log(S) if it is uniform."""
        return self._read([readings.EntropyReading()])[0][0]

    def peak(self) -> Peak:
        """The largest weight of every row (B, H, T), and its key."""
        return Peak(*self._read([readings.PeakReading()])[0])

    def distance(self) -> Distances:
        """How far queries look: the mean of every row (B, H, T), and a histogram over octaves for every head."""
        (mean,), (histogram,) = self._read([readings.DistanceReading(), readings.HistogramReading()])
        return Distances(mean, histogram, octave_edges(histogram.shape[-1]))

    def mass_on(self, spans: Spans) -> Tensor:
        """The share of every query's attention on each span of keys, (B, H, T, spans).

        >>> from headwise import AttentionMap
        >>> weights = AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16))
        >>> weights.mass_on([(0, 4), (4, 9)]).shape
        torch.Size([2, 4, 9, 2])

        Args:
            spans: pairs (start, stop), slices or ranges; they may overlap.
        """
        return self._read([SpanReading.of(spans, self.shape[3])])[0][0]

    def topk(self, k: int) -> TopKeys:
        """The k largest weights of every row (B, H, T, k), largest first, and their keys."""
        return TopKeys(*self._read([self._topk_reading(k)])[0])

    def mass(self, probe: Mask) -> Tensor:
        """The share of every row's attention on keys where the probe is True, (B, H, T)."""
        return self._read([self._mass_reading(probe)])[0][0]

    def pooled(self, rows: int, cols: int | None = None, *, peak: bool = False) -> Tensor:
        """A picture (B, H, rows, cols): weights summed over the keys of a cell and averaged over its queries.

        The rows of the picture sum to 1 at every size, so a narrow stripe does not fade.

        Args:
            rows: the number of rows, at most T.
            cols: the number of columns, at most S; by default as many as rows.
            peak: show the largest weight of each cell instead.
        """
        name = "pooled_peak" if peak else "pooled"
        return self._read([self._pooled_reading(name, (rows, rows if cols is None else cols))])[0][0]

    def _pooled_reading(self, name: str, size: Size) -> readings.Reading:
        kind = readings.PooledReading if name == "pooled" else readings.PooledPeakReading
        return kind(*checked_size(name, size, *self.shape[2:]))

    def _topk_reading(self, k: int) -> readings.Reading:
        S = self.shape[3]
        if shapes.check_size("topk(k)", k) > S:
            raise OptionError(f"topk({k}): the map has {S} keys, so k is at most {S}.")
        return readings.TopKeysReading(int(k))

    def _mass_reading(self, probe: Mask) -> readings.Reading:
        return readings.MassReading(self._probe(probe))

    # Reductions that need no dense tensor.

    def sum(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """Like `Tensor.sum`, with its `dim`, `keepdim` and `options`; over queries or keys alone it streams."""
        return self._reduced("sum", options.pop("axis", dim), keepdim, options)

    def mean(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """Like `Tensor.mean`, with its `dim`, `keepdim` and `options`; over queries or keys alone it streams."""
        return self._reduced("mean", options.pop("axis", dim), keepdim, options)

    def amax(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor:
        """Like `Tensor.amax`, with its `dim`, `keepdim` and `options`; over keys alone it streams."""
        return self._reduced("amax", options.pop("axis", dim), keepdim, options)

    def max(self, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
        """Like `Tensor.max`, with its `dim`, `keepdim` and `options`; over keys alone, or over all, it streams."""
        dim, options = options.pop("axis", dim), _given(options)
        if dim is None and not options:
            return self.amax(dim=-1).amax()
        if dim in (-1, 3) and not options:
            weight, key = self._read([readings.PeakReading()], padded=True)[0]
            weight, key = weight.to(self.dtype), key.clamp(min=0)
            found = (weight[..., None], key[..., None]) if keepdim else (weight, key)
            return torch.return_types.max(found)
        return self.to_tensor().max(*(() if dim is None else (dim, keepdim)), **options)

    def _reduced(self, name: str, dim: Any, keepdim: bool, options: dict[str, Any]) -> Tensor:
        """The sum, mean or largest weight along `dim`, as a tensor would give it."""
        options = _given(options)
        axis = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
        found = None
        if axis is None and name != "amax" and not options:
            rows = self._reduced(name, -1, False, {})
            return rows.sum() if name == "sum" else rows.mean()
        if axis in (-1, 3) and not options:
            reading = readings.PeakReading() if name == "amax" else readings.MassReading(prefix(self.shape[3]))
            found = self._read([reading], padded=True)[0][0]
        elif axis in (-2, 2) and name != "amax" and not options:
            self._with_keys(f"{name}(dim={dim})")
            found = self._read([readings.ReceivedReading()], padded=True)[0][0]
        if found is None:
            call = {} if dim is None else {"dim": dim, "keepdim": keepdim}
            return getattr(self.to_tensor(), name)(**call, **options)  # type: ignore[no-any-return]
        found = found / self.shape[axis] if name == "mean" else found
        return (found.unsqueeze(axis) if keepdim else found).to(self.dtype)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are set; numpy's functions pass dtype=None and out=None."""
    return {name: value for name, value in options.items() if value is not None}
