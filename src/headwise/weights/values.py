"""What attention weights carry: weights scaled by the values they read, and the contribution of every key to an output.

A weight says where a head looks, not what it takes from there: many heads put most of their weight on a first token
whose value is close to zero. Kobayashi et al. (2020) therefore scale every weight by the norm of the value it reads.
A·‖v‖ / Σ A·‖v‖ is a softmax with log‖v‖ added to the scores, so it is an `AttentionMap` again, with every statistic.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise import shapes
from headwise.errors import OptionError, ShapeError
from headwise.masks import Mask
from headwise.weights import readings, streaming
from headwise.weights.indexing import LIMIT, block_axes, brief, check_bytes
from headwise.weights.panel import Size, checked_probe, checked_size
from headwise.weights.readings import Reading, unflat, zeros
from headwise.weights.scoring import KeyBias
from headwise.weights.source import RowBlock, Source, full_precision, row_blocks, take
from headwise.weights.spans import SpanReading, Spans, WeightedReading, checked_rows
from headwise.weights.tiles import Tile

if TYPE_CHECKING:
    from headwise.weights.map import AttentionMap

NORM_BYTES = 2**26  # projected values at a time, while their norms are computed


def by_value(weights: "AttentionMap", value: Tensor, out: Tensor | None) -> "AttentionMap":
    """The map whose weights are proportional to weight · ‖value‖; see `AttentionMap.by_value`."""
    source = weights._with_keys("by_value()")
    logs = value_norms(value, out, source).clamp(min=torch.finfo(source.precise).tiny).log()
    frame, scoring = source.frame, source.scoring
    place = (source.axis("batch")[:, None], source.axis("head"))
    table = logs.new_zeros(frame.B, frame.H, frame.S).index_put(place, logs)
    scoring = dataclasses.replace(scoring, relative=KeyBias(table, scoring.relative), sinks=None)
    return weights._of(dataclasses.replace(source, scoring=scoring, log_sum_exp=None))


def value_norms(value: Tensor, out: Tensor | None, source: Source) -> Tensor:
    """‖v‖, or ‖v · out‖, for every head and key, (B, H, S) in the precise dtype; differentiable."""
    value = _by_head(checked_value(value, source).to(source.precise), source)
    if out is None:
        return _norm(value)
    out = checked_projection(out, source, value.shape[3]).to(value)
    B, H, S, _ = value.shape
    norms = []
    for keys in row_blocks(S, B * out.shape[2] * value.element_size(), NORM_BYTES):
        with full_precision(value):
            each = [_norm(value[:, head, keys] @ out[head]) for head in range(H)]
        norms.append(torch.stack(each, 1))
    return torch.cat(norms, 2) if norms else value.new_zeros(B, H, S)


def _norm(vectors: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return found


def checked_value(value: Any, source: Source) -> Tensor:
    """`value`, which must be (B, heads, S, Dv) with a number of heads that divides the map's."""
    B, H, _, S = source.shape
    shapes.check_tensor("value", value)
    good = value.dim() == 4 and value.shape[0] == B and value.shape[2] == S
    if not good or not value.shape[1] or H % value.shape[1]:
        raise ShapeError(
            f"value has shape {tuple(value.shape)}; expected (B, heads, S, Dv) = ({B}, {H}, {S}, Dv), the values that "
            f"this map's keys come with. Fewer heads are fine if they divide {H}."
        )
    return value  # type: ignore[no-any-return]


def checked_projection(out: Any, source: Source, width: int) -> Tensor:
    """`out`, which must be (H, Dv, E): what each head's output is multiplied by."""
    H = source.shape[1]
    shapes.check_tensor("out", out)
    if out.dim() != 3 or out.shape[:2] != (H, width):
        raise ShapeError(
            f"out has shape {tuple(out.shape)}; expected (H, Dv, E) = ({H}, {width}, E). For a linear projection: "
            f"layer.out_proj.weight.T.unflatten(0, ({H}, {width}))."
        )
    return out  # type: ignore[no-any-return]


def _by_head(value: Tensor, source: Source) -> Tensor:
    """Values with one head for each query head."""
    return value.repeat_interleave(source.shape[1] // value.shape[1], 1)


# The contribution of each key --------------------------------------------------------------------------------------


def contributions(
    weights: "AttentionMap", value: Tensor, output: Tensor | None, out: Tensor | None, gate: Tensor | None
) -> "Contributions":
    """The contribution of each key; see `AttentionMap.contributions`."""
    source = weights._with_keys("contributions()")
    value = checked_value(value, source)
    if output is None:
        with torch.no_grad():
            output = weights.detach()._read([OutputReading(value.detach())], padded=True)[0][0]
    expected = (*source.shape[:3], value.shape[3])
    if tuple(output.shape) != expected:
        raise ShapeError(f"output has shape {tuple(output.shape)}; expected (B, H, T, Dv) = {expected}.")
    if gate is not None and tuple(gate.shape) != expected:
        raise ShapeError(f"gate has shape {tuple(gate.shape)}; expected (B, H, T, Dv) = {expected}.")
    return Contributions(weights.detach(), value, output, out, gate)


class Contributions:
    """How much of what each query reads comes from each key: weight · ⟨value, output⟩ / ‖output‖², (B, H, T, S).

    Every row sums to 1, with sinks too; numbers below 0 pull away from the output. Nothing is computed until you ask,
    and nothing needs T×S numbers. There are no gradients. `AttentionMap.contributions` makes it.

    >>> from headwise import AttentionMap
    >>> weights = AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16))
    >>> shares = weights.contributions(torch.randn(2, 4, 9, 5))
    >>> shares[0, 3, 8].shape, shares.received().shape
    (torch.Size([9]), torch.Size([2, 4, 9]))
    """

    def __init__(
        self, weights: "AttentionMap", value: Tensor, output: Tensor, out: Tensor | None, gate: Tensor | None = None
    ) -> None:
        self.weights = weights
        source = weights._normalised()
        self._value, direction = checked_value(value, source).detach(), output.detach().to(source.precise)
        factors = 1.0 if gate is None else gate.detach().to(direction)
        direction = direction * factors
        if out is not None:
            out = checked_projection(out, source, direction.shape[3]).detach().to(direction)
            with full_precision(direction):
                direction = torch.einsum("bhtd,hde,hfe->bhtf", direction, out, out)
        direction = direction * factors  # ⟨gate · v, gate · o⟩ = ⟨v, gate² · o⟩, and so behind a projection
        size = (direction * output.to(direction)).sum(-1, keepdim=True)
        self._direction = direction / torch.where(size > 0, size, 1.0)  # (B, H, T, Dv)

    @property
    def shape(self) -> torch.Size:
        """(B, H, T, S)."""
        return self.weights.shape

    def __repr__(self) -> str:
        B, H, T, S = self.shape
        return f"Contributions(B={B}, H={H}, T={T}, S={S})"

    def __getitem__(self, index: Any) -> Tensor:
        """The contributions at `index`, which selects a block: ints, slices, lists or 1-D tensors."""
        found = block_axes(index, self.shape)
        if found is None:
            raise OptionError(
                f"contributions[{brief(index)}]: expected at most one index per axis: ints, slices or lists."
            )
        (batch, heads, rows, cols), dropped = found
        check_bytes(len(batch) * len(heads) * len(rows) * len(cols), torch.float64, LIMIT, "contributions[...]")
        source = self.weights._normalised()
        dense = streaming.dense_weights(source.narrowed(batch, heads, rows), cols)
        direction = take(take(take(self._direction, 0, batch), 1, heads), 2, rows)
        value = take(take(_by_head(self._value, source), 0, batch), 1, heads)
        value = take(value, 2, cols).to(direction)
        with full_precision(direction):
            block = dense * (direction @ value.transpose(2, 3))
        return block[tuple(0 if axis in dropped else slice(None) for axis in range(4))]

    def to_tensor(self, *, limit: int = LIMIT) -> Tensor:
        """All contributions, (B, H, T, S); an error if they take more than `limit` bytes."""
        check_bytes(self.shape.numel(), torch.float64, limit, "contributions.to_tensor()")
        return self[:, :, :, :]

    def received(self, weights: Tensor | None = None) -> Tensor:
        """The sum over queries of what each key contributes, (B, H, S).

        Args:
            weights: (T,), (B, T) or (B, H, T): a factor for every query; 1 by default.
        """
        source = self.weights._normalised()
        rows = torch.ones(source.shape[2]) if weights is None else weights
        return self._read(WeightedReading(checked_rows(rows, source)))

    def mass(self, probe: Mask) -> Tensor:
        """The share of every query's output from keys where the probe is True, (B, H, T)."""
        return self._read(readings.MassReading(checked_probe(probe, self.weights._source())))

    def mass_on(self, spans: Spans) -> Tensor:
        """The share of every query's output from each span of keys, (B, H, T, spans)."""
        return self._read(SpanReading.of(spans, self.shape[3]))

    def pooled(self, rows: int, cols: int | None = None) -> Tensor:
        """A picture (B, H, rows, cols): summed over the keys of a cell, averaged over its queries."""
        size: Size = (rows, rows if cols is None else cols)
        return self._read(readings.PooledReading(*checked_size("pooled", size, *self.shape[2:])))

    def read(self, reading: Reading) -> tuple[Tensor, ...]:
        """The results of any statistic that adds up or compares weights, with contributions in their place.

        Args:
            reading: an object of a class derived from `headwise.weights.Reading`, such as a `Statistic`. What it reads
                of scores and of the logarithms of weights stays as it is.
        """
        with torch.no_grad():
            return self.weights.detach()._read([Contributed(reading, self._value, self._direction)])[0]

    def _read(self, reading: Reading) -> Tensor:
        return self.read(reading)[0]


class Contributed(Reading):
    """A reading of contributions in place of weights; `inner` may only add weights up."""

    def __init__(self, inner: Reading, value: Tensor, direction: Tensor) -> None:
        self.inner, self.value, self.direction = inner, value, direction
        self.strip_rows, self.differentiable = inner.strip_rows, tuple(False for _ in inner.differentiable)

    def start(self, source: Source) -> None:
        self.source = source
        self.inner.start(source)
        H = source.shape[1]
        flat = torch.arange(source.shape[0] * H, device=self.value.device)
        self.owner = flat // H * self.value.shape[1] + flat % H // (H // self.value.shape[1])  # head of the values
        self.values, self.directions = self.value.flatten(0, 1), self.direction.flatten(0, 1)

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return self.inner.key_range(start, stop, T, S)

    def take(self, tile: Tile) -> None:
        value = self.values[:, tile.cols].index_select(0, self.owner[tile.heads]).to(tile.weights.dtype)
        shares = torch.bmm(self.directions[tile.heads, tile.rows], value.transpose(1, 2))
        self.inner.take(tile.with_weights(shares.mul_(tile.weights)))

    def finish(self) -> tuple[Tensor, ...]:
        return self.inner.finish()


class OutputReading(Reading):
    """Σ_j w · value: what every query reads, (B, H, T, Dv)."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def start(self, source: Source) -> None:
        self.source = source
        self.sum = zeros(source, source.shape[2], self.value.shape[3])
        self.values = _by_head(self.value, source).flatten(0, 1)

    def take(self, tile: Tile) -> None:
        value = self.values[tile.heads, tile.cols].to(tile.weights.dtype)
        self.sum[tile.heads, tile.rows] += torch.bmm(tile.weights, value)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum, self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        return (block.weights @ _by_head(self.value, self.source).to(block.weights),)
