"""Sums of weights over chosen keys and queries: the mass on spans of keys, and what keys receive from some queries."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise import shapes
from headwise.errors import OptionError, ShapeError
from headwise.weights import streaming
from headwise.weights.panel import Received
from headwise.weights.readings import Reading, ReceivedReading, unflat, zeros
from headwise.weights.source import RowBlock, Source
from headwise.weights.tiles import HIDDEN, Tile

if TYPE_CHECKING:
    from headwise.weights.map import AttentionMap

Spans = Sequence[tuple[int, int] | slice | range] | Tensor  # keys from start to stop − 1


class SpanReading(Reading):
    """The mass of every query on each span of keys, (B, H, T, spans). Spans may overlap."""

    def __init__(self, spans: list[tuple[int, int]]) -> None:
        self.spans = spans

    @classmethod
    def of(cls, spans: Spans, S: int) -> "SpanReading":
        """The reading of spans that a user gave for S keys."""
        return cls(checked_spans(spans, S))

    def start(self, source: Source) -> None:
        self.source, self.sum = source, zeros(source, source.shape[2], len(self.spans))

    def key_range(self, start: int, stop: int, T: int, S: int) -> tuple[int, int]:
        return min((lo for lo, _ in self.spans), default=0), max((hi for _, hi in self.spans), default=0)

    def take(self, tile: Tile) -> None:
        first, last = tile.cols.start, tile.cols.stop
        for number, (lo, hi) in enumerate(self.spans):
            if lo < last and first < hi:
                inside = tile.weights[:, :, max(lo - first, 0) : max(hi - first, 0)]
                self.sum[tile.heads, tile.rows, number] += inside.sum(-1)

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum, self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        parts = [block.weights[..., lo:hi].sum(-1) for lo, hi in self.spans]
        return (torch.stack(parts, -1) if parts else block.weights[..., :0],)


class WeightedReading(Reading):
    """Σ over queries of row · weight for every key, (B, H, S), with one factor for each query; `rows` is (B, H, T)."""

    by_row = False
    merged = "sum"

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def start(self, source: Source) -> None:
        self.source, self.sum = source, zeros(source, source.shape[3], dtype=torch.float64)
        self.flat = self.rows.to(source.precise).flatten(0, 1)

    def take(self, tile: Tile) -> None:
        rows = self.flat[tile.heads, None, tile.rows]  # (G, 1, t)
        self.sum[tile.heads, tile.cols] += torch.bmm(rows, tile.weights)[:, 0]

    def finish(self) -> tuple[Tensor, ...]:
        return (unflat(self.sum.to(self.source.precise), self.source),)

    def dense(self, block: RowBlock) -> tuple[Tensor, ...]:
        rows = self.rows[:, :, block.rows].to(block.weights)
        return ((rows[..., None] * block.weights).sum(-2),)


def received_by_weight(weights: "AttentionMap", rows: Tensor) -> Received:
    """What keys receive if each query counts by a factor; see `AttentionMap.received`."""
    source = weights._normalised() if weights._real_keys() is None else weights._unpadded()
    rows = checked_rows(rows, source)
    if source.learns or torch.compiler.is_compiling():
        (total,), (_, count) = weights._read([WeightedReading(rows), ReceivedReading()])
        return Received(total, count)
    total, count = _shifted(source, rows.clamp(min=0))
    if bool((rows < 0).any()):
        total = total - _shifted(source, -rows.clamp(max=0))[0]
    return Received(total, count)


def _shifted(source: Source, rows: Tensor) -> tuple[Tensor, Tensor]:
    """What keys receive by factors that are not negative, and how many queries see them.

    row · exp(score − lse) is exp(score − (lse − log row)): any code that sums weights over queries does it all.
    """
    lse = streaming.normalizer(source)
    shift = rows.to(lse.dtype).log().clamp(min=HIDDEN)
    total, count = streaming.read(dataclasses.replace(source, log_sum_exp=lse - shift), [ReceivedReading()])[0]
    return total, count


def checked_rows(rows: Any, source: Source) -> Tensor:
    """Factors for the queries as (B, H, T)."""
    B, H, T, _ = source.shape
    shapes.check_tensor("weights", rows)
    good = {(T,): (1, 1, T), (B, T): (B, 1, T), (1, T): (1, 1, T), (B, H, T): (B, H, T), (B, 1, T): (B, 1, T)}
    if tuple(rows.shape) not in good:
        raise ShapeError(
            f"weights has shape {tuple(rows.shape)}; expected a factor for every query: (T,) = ({T},), (B, T) = "
            f"{(B, T)} or (B, H, T) = {(B, H, T)}."
        )
    if rows.requires_grad and torch.is_grad_enabled():
        raise OptionError("received(weights=...) has no gradient in these factors; pass weights.detach().")
    return rows.reshape(good[tuple(rows.shape)]).expand(B, H, T).to(source.query.device)  # type: ignore[no-any-return]


def checked_spans(spans: Any, S: int) -> list[tuple[int, int]]:
    """Spans as pairs (start, stop) with 0 <= start <= stop <= S."""
    if isinstance(spans, Tensor):
        spans = spans.tolist()
    if not isinstance(spans, Sequence) or isinstance(spans, str | range):
        raise OptionError(f"spans={spans!r}: expected a list of spans of keys, such as [(0, 4), (4, 9)].")
    return [_checked_span(span, S) for span in spans]


def _checked_span(span: Any, S: int) -> tuple[int, int]:
    if isinstance(span, slice | range):
        step = span.step or 1
        stop = S if span.stop is None else span.stop
        span = (span.start or 0, stop) if step == 1 else None
    pair = tuple(span) if isinstance(span, Sequence) and not isinstance(span, str) else ()
    if len(pair) != 2 or not all(isinstance(x, int) for x in pair) or not 0 <= pair[0] <= pair[1] <= S:
        raise OptionError(
            f"the span {span!r}: expected (start, stop) with 0 <= start <= stop <= {S}, the number of keys."
        )
    return pair[0], pair[1]
