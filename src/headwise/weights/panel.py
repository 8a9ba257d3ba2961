"""The results of statistics: of one, and of several in a `Panel`."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.errors import MaskError, OptionError
from headwise.masks import Mask
from headwise.masks.mask import placed
from headwise.shapes import check_size
from headwise.weights import readings
from headwise.weights.source import Source

Size = tuple[int, int] | int  # rows and columns of a picture, or one number for both


class Peak(NamedTuple):
    """The largest weight of every query (B, H, T), and its key; -1 if the query sees no key."""

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
    """What every key receives, (B, H, S): the sum over queries, how many can see it, and the mean over those."""

    total: Tensor
    count: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over the queries that can see the key."""
        return self.total / self.count.clamp(min=1)


class TopKeys(NamedTuple):
    """The largest weights of every query, largest first (B, H, T, k), and their keys; -1 if it sees fewer."""

    weights: Tensor
    keys: Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Panel:
    """The statistics that were requested; the others are None."""

    entropy: Tensor | None = None
    peak: Peak | None = None
    distance: Tensor | None = None
    histogram: Tensor | None = None
    received: Received | None = None
    masses: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    pooled: Tensor | None = None
    pooled_peak: Tensor | None = None
    topk: TopKeys | None = None

    @classmethod
    def of(cls, found: Mapping[str, tuple[Tensor, ...]], masses: Mapping[str, tuple[Tensor, ...]]) -> "Panel":
        """The panel of the results `found` for each statistic and of the `masses`, both by name."""
        shaped: dict[str, Any] = {
            name: SHAPED[name](*result) if name in SHAPED else result[0] for name, result in found.items()
        }
        return cls(**shaped, masses={name: mass for name, (mass,) in masses.items()})

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


SHAPED: dict[str, Callable[..., Any]] = {"peak": Peak, "topk": TopKeys, "received": Received}
PLAIN: dict[str, Callable[[], readings.Reading]] = {
    "entropy": readings.EntropyReading,
    "peak": readings.PeakReading,
    "distance": readings.DistanceReading,
    "histogram": readings.HistogramReading,
    "received": readings.ReceivedReading,
}


def octave_edges(octaves: int) -> Tensor:
    """0, 1, 2, 4, 8, ..."""
    return torch.tensor([0, *(2**b for b in range(octaves))])


def checked_size(name: str, size: Size, T: int, S: int) -> tuple[int, int]:
    """Rows and columns of a picture, at most one per query and key."""
    both = (size, size) if not isinstance(size, Sequence | Tensor) or getattr(size, "shape", None) == () else size
    if len(both) != 2:
        raise OptionError(f"{name}={size!r}: expected rows and columns of a picture, or one number for both.")
    rows, cols = both
    return min(check_size(f"{name} rows", rows), max(T, 1)), min(check_size(f"{name} columns", cols), max(S, 1))


def checked_probe(probe: Mask, source: Source) -> Mask:
    """`probe`, after a check that it fits the whole map that the source belongs to."""
    if not isinstance(probe, Mask):
        raise MaskError(
            f"a probe is a mask, and {type(probe).__name__} was given. Use previous_token(), sink(4), causal(), ... or "
            f"wrap a tensor in dense(...)."
        )
    probe.check(source.frame.B, source.frame.H, source.frame.T, source.frame.S, source.query.device)
    positions = source.scoring.positions  # probes are relative to the queries' positions, unless they list queries
    return probe if positions is None or probe.extent.queries is not None else placed(probe, positions)
