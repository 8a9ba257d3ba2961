"""Many statistics asked together: they share passes over the weights."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import MaskError, OptionError
from headwise.masks import Mask
from headwise.masks.placement import placed
from headwise.shapes import check_size
from headwise.weights import readings, streaming
from headwise.weights.source import Source


class Peak(NamedTuple):
    """The largest weight of every query (B, H, T), and the key it lies on; -1 where no key is seen."""

    weight: Tensor
    key: Tensor


class Distances(NamedTuple):
    """How far queries look.

    mean: (B, H, T), the mean distance between a query and the keys it attends to.
    histogram: (B, H, octaves), the share of a head's attention at distance 0, 1, 2–3, 4–7, ...
    edges: (octaves + 1,), octave b holds distances from edges[b] to edges[b + 1] - 1.
    """

    mean: Tensor
    histogram: Tensor
    edges: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """What every key receives, (B, H, S): the sum over queries, how many could see it, and the mean over those."""

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over the queries that could see the key."""
        return self.total / self.count.clamp(min=1)


class TopKeys(NamedTuple):
    """The largest weights of every query, largest first (B, H, T, k), and their keys; -1 where fewer are seen."""

    weights: Tensor
    keys: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
    """The statistics that were asked for; the others are None."""

    entropy: Tensor | None = None
    peak: Peak | None = None
    distance: Tensor | None = None
    histogram: Tensor | None = None
    received: Received | None = None
    masses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    pooled: Tensor | None = None
    pooled_peak: Tensor | None = None
    topk: TopKeys | None = None

    def __repr__(self) -> str:
        parts = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                parts.append(f"{field.name}={tuple(value.shape)}")
            elif isinstance(value, dict):
                parts += [f"masses[{name!r}]={tuple(mass.shape)}" for name, mass in value.items()]
            elif value is not None:
                first = value.total if isinstance(value, Received) else value[0]
                parts.append(f"{field.name}={tuple(first.shape)}")
        return f"Panel({', '.join(parts)})"


PLAIN: dict[str, Callable[[], readings.Reading]] = {
    "entropy": readings.Entropy,
    "peak": readings.Peak,
    "distance": readings.Distance,
    "histogram": readings.Histogram,
    "received": readings.Received,
}


def take_panel(
    source: Source, plain: Mapping[str, bool], sized: Mapping[str, Any], masses: Mapping[str, Mask] | None
) -> Panel:
    """The panel of a source; see `AttentionMap.panel`. What is asked for plainly is True, what needs a size has one."""
    if masses is not None and not isinstance(masses, Mapping):
        raise OptionError(f"masses={type(masses).__name__}: expected probes by name, such as {{'sink': sink(4)}}.")
    asked = {name: PLAIN[name]() for name, wanted in plain.items() if wanted}
    asked |= {name: _sized(name, size, source) for name, size in sized.items() if size is not None}
    probes = {f"mass {name}": readings.Mass(checked_probe(probe, source)) for name, probe in dict(masses or {}).items()}
    asked |= probes
    found = dict(zip(asked, streaming.read(source, list(asked.values())), strict=True)) if asked else {}
    named: dict[str, Any] = {name: _shaped(name, result) for name, result in found.items() if name not in probes}
    return Panel(**named, masses={name.removeprefix("mass "): found[name][0] for name in probes})


def _sized(name: str, size: Any, source: Source) -> readings.Reading:
    if name == "topk":
        return readings.TopKeys(_count_of_keys(size, source))
    kind = readings.Pooled if name == "pooled" else readings.PooledPeak
    return kind(*picture_size(name, size, source))


def _shaped(name: str, result: tuple[Tensor, ...]) -> object:
    if name == "peak":
        return Peak(*result)
    if name == "topk":
        return TopKeys(*result)
    if name == "received":
        return Received(*result)
    return result[0]


def octave_edges(octaves: int) -> Tensor:
    """0, 1, 2, 4, 8, ..."""
    return torch.tensor([0, *(2**b for b in range(octaves))])


def picture_size(name: str, size: tuple[int, int] | int, source: Source) -> tuple[int, int]:
    """Rows and columns of a picture, at most one per query and key."""
    rows, cols = (size, size) if isinstance(size, int) or len(size) != 2 else size
    T, S = source.shape[2:]
    return min(check_size(f"{name} rows", rows), max(T, 1)), min(check_size(f"{name} columns", cols), max(S, 1))


def checked_probe(probe: Mask, source: Source) -> Mask:
    """`probe`, refused unless it fits the whole that the source is of."""
    if not isinstance(probe, Mask):
        raise MaskError(
            f"a probe is a mask, and {type(probe).__name__} was given. Use previous_token(), sink(4), causal(), ... or "
            f"wrap a tensor in dense(...)."
        )
    probe.check(source.frame.B, source.frame.H, source.frame.T, source.frame.S, source.query.device)
    positions = source.scoring.positions  # probes ask from where the queries stand; one that lists them knows
    return probe if positions is None or probe.extent.queries is not None else placed(probe, positions)


def _count_of_keys(k: int, source: Source) -> int:
    S = source.shape[3]
    if check_size("topk(k)", k) > S:
        raise OptionError(f"topk({k}): the map has {S} keys, so k is at most {S}.")
    return int(k)
