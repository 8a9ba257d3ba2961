"""What a page shows of one layer, measured in one pass over its weights."""

import dataclasses

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.view.tiling import Cells
from headwise.weights import AttentionMap, streaming
from headwise.weights.readings import (
    DistanceReading,
    EntropyReading,
    PeakReading,
    PooledReading,
    Reading,
    ReceivedReading,
    TopKeysReading,
)
from headwise.weights.source import Source, row_blocks

THUMBNAIL = 64  # pixels
TOP = 8  # keys of a row that are kept where not all are


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of all heads of a layer: thumbnails, numbers by query and by key, the largest weights, cells by kind."""

    thumbnails: Tensor  # (H, rows, cols)
    entropy: Tensor  # (H, T), in nats
    peak: Tensor  # (H, T)
    distance: Tensor  # (H, T)
    received: Tensor  # (H, S), summed over queries
    log_sum_exp: Tensor  # (H, T)
    top_weights: Tensor | None  # (H, T, 8)
    top_keys: Tensor | None
    cells: dict[str, Cells]


def measure(weights: AttentionMap, *, top: bool = False, cells: dict[str, Cells] | None = None) -> Measured:
    """One pass over a layer.

    Args:
        weights: the map, of one sample.
        top: whether to keep the largest weights of every row.
        cells: to fill, by name.
    """
    T, S = weights.shape[2:]
    thumbnails = PooledReading(min(THUMBNAIL, T), min(THUMBNAIL, S))
    asked: list[Reading] = [thumbnails, EntropyReading(), PeakReading(), DistanceReading(), ReceivedReading()]
    asked += [TopKeysReading(min(TOP, S))] if top else []
    cells = cells or {}
    with torch.no_grad():
        source = weights.detach()._normalised()
        found = streaming.read(source, [*asked, *cells.values()])
    pictures, entropy, (peak, _), distance, (received, _), *rest = (x[0] if len(x) == 1 else x for x in found)
    best, keys = rest[0] if top else (None, None)
    assert source.log_sum_exp is not None  # noqa: S101 - it is normalised
    return Measured(
        pictures[0], entropy[0], peak[0], distance[0], received[0], source.log_sum_exp[0],
        None if best is None else best[0], None if keys is None else keys[0], cells,
    )  # fmt: skip


def refuse_broken(measured: Measured, name: str) -> None:
    """Raise unless every number is one."""
    if not (measured.entropy.isfinite().all() and measured.received.isfinite().all()):
        raise OptionError(
            f"{name}: its weights are not all numbers (NaN or infinite queries, keys or biases), so that no picture of "
            f"them would be true. Look at the query and key of that layer."
        )


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which keys each query may see: the first, the last, and how many; per head where heads differ, else once."""

    first: Tensor  # (1 or H, T); S where none is seen
    last: Tensor  # −1 where none is seen
    count: Tensor

    def same_as(self, other: "Reach") -> bool:
        """Whether both say the same."""
        mine, theirs = (self.first, self.last, self.count), (other.first, other.last, other.count)
        return all(a.shape == b.shape and bool((a == b).all()) for a, b in zip(mine, theirs, strict=True))


def reach(weights: AttentionMap) -> Reach:
    """The keys that mask and bias let each query see, found block by block of rows."""
    source = weights.select(batch=[0])._source()
    H, T, S = source.shape[1:]
    if source.mask is None and source.scoring.bias is None:
        first = torch.zeros(1, T, dtype=torch.int64)
        return Reach(first, first + S - 1, first + S)
    alike = source.scoring.bias is None and source.mask is not None and source.mask.extent.heads is None
    spans = source.key_spans()
    if spans is not None:
        first, end = spans[:, None].cpu()
        return Reach(first, end - 1, (end - first).clamp(min=0))
    source = weights.select(batch=[0], heads=[0])._source() if alike else source
    found = torch.empty(3, 1 if alike else H, T, dtype=torch.int64)
    for rows in row_blocks(T, found.shape[1] * S, 2**24):
        found[:, :, rows] = _reach_of(source, rows).cpu()
    return Reach(*found)


def _reach_of(source: Source, rows: slice) -> Tensor:
    """First, last and number of visible keys of these rows, (3, H, t)."""
    H, _, S = source.shape[1:]
    cols = source.reachable(rows)
    if cols.start >= cols.stop:
        return torch.tensor([S, -1, 0])[:, None, None].expand(3, H, rows.stop - rows.start)
    seen = source.visible(rows, cols)
    seen = seen.expand(1, H, *seen.shape[-2:])[0]
    nothing = ~seen.any(-1)
    bits = seen.to(torch.uint8)
    first = (cols.start + bits.argmax(-1)).masked_fill(nothing, S)
    last = (cols.stop - 1 - bits.flip(-1).argmax(-1)).masked_fill(nothing, -1)
    return torch.stack([first, last, seen.sum(-1)])
