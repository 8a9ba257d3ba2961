"""Launches the kernels: what they support, their arguments, and their block sizes."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from headwise.weights.kernels.columns import columns_kernel
from headwise.weights.kernels.histogram import histogram_kernel
from headwise.weights.kernels.mass import bands_kernel, mass_kernel
from headwise.weights.kernels.rows import rows_kernel
from headwise.weights.kernels.top_keys import top_keys_kernel
from headwise.weights.kernels.weights import log_sum_exp_kernel, weights_kernel
from headwise.weights.source import Source
from headwise.weights.structure import Structure

WIDEST = 256
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LANES = 8  # columns that a thread of a matrix product holds separately anyway
WARP_ROWS = 16  # rows of a matrix product that one warp holds
NEAR = 256  # the most keys of a narrow probe
Band = tuple[int, int, int, int]  # left, right, first key, last key + 1


class LaunchBlocks(NamedTuple):
    """Block sizes and resources of one launch."""

    queries: int
    keys: int
    warps: int
    stages: int


# Blocks for 16-bit inputs and heads up to 64, 128 and 256 wide, measured on an H200.
TABLE = {
    "rows": (LaunchBlocks(64, 64, 4, 3), LaunchBlocks(64, 64, 4, 3), LaunchBlocks(64, 32, 4, 2)),
    "both": (LaunchBlocks(256, 64, 8, 3), LaunchBlocks(256, 64, 8, 3), LaunchBlocks(64, 32, 4, 2)),
    "short both": (LaunchBlocks(64, 64, 4, 3), LaunchBlocks(64, 64, 4, 3), LaunchBlocks(64, 32, 4, 2)),
    "columns": (LaunchBlocks(128, 64, 4, 3), LaunchBlocks(128, 128, 4, 2), LaunchBlocks(64, 64, 4, 2)),
    "short columns": (LaunchBlocks(128, 64, 4, 3), LaunchBlocks(128, 64, 4, 3), LaunchBlocks(64, 64, 4, 2)),
}
SHORT = 16384  # with fewer keys, larger blocks would leave part of the GPU idle
FLOAT32 = LaunchBlocks(32, 32, 4, 2)  # full-precision products need more registers


def blocks_for(kernel: str, source: Source) -> LaunchBlocks:
    """The fastest measured blocks for this width and dtype."""
    if source.query.dtype == torch.float32:
        return FLOAT32
    D = source.query.shape[3]
    kernel = f"short {kernel}" if kernel != "rows" and source.shape[3] < SHORT else kernel
    return TABLE[kernel][(D > 64) + (D > 128)]


def refuses(source: Source) -> bool:
    """Whether kernels cannot read this source, regardless of its mask."""
    query, key = source.query, source.key
    return (
        query.dtype not in DTYPES
        or key.dtype != query.dtype
        or query.shape[3] > WIDEST
        or query.stride(3) != 1
        or key.stride(3) != 1
        or source.frame.first_row is None
        or source.scoring.biased
        or source.scoring.score is not None
        or max(source.shape[2:]) >= 2**24  # distances are exact floats up to here
    )


def run(
    kernel: Any,
    source: Source,
    structure: Structure,
    blocks: LaunchBlocks,
    first: Sequence[Any],
    last: Sequence[Any] = (),
    *,
    programs: int | None = None,
    **options: Any,
) -> None:
    """Run a kernel for every head of every sample, by default with one program for each block of queries.

    The arguments between `first` and `last` are the same for all kernels: strides, sizes, and the mask's numbers and
    tables. `options` are the kernel's own compile-time settings.
    """
    query, key, scoring = source.query, source.key, source.scoring
    D, (B, H, T, S) = query.shape[3], source.shape
    strides = [*query.stride()[:3], *key.stride()[:3]]
    scale2 = scoring.scale_for(D) * math.log2(math.e)
    sizes = [H, source.group, T, S, offset_of(source), scale2, float(scoring.softcap or 0.0)]
    mask = [structure.left, structure.right, *tables(structure, query)]
    options |= {"D": D, "WIDTH": max(16, triton.next_power_of_2(D)), "CAPPED": scoring.softcap is not None}
    # tf32 would round float32 to 10 bits; with 16-bit inputs the setting has no effect
    options |= {"PRECISION": "ieee" if query.dtype == torch.float32 else "tf32"} | switches(structure)
    options |= {"BM": blocks.queries, "BN": blocks.keys, "num_warps": blocks.warps, "num_stages": blocks.stages}
    grid = (triton.cdiv(T, blocks.queries) if programs is None else programs, B * H)
    launch(kernel, grid, [query, key, *first, *strides, *sizes, *mask, *last], options)


def offset_of(source: Source) -> int:
    """The offset with which query i of the source is at key position i + offset."""
    return (source.frame.first_row or 0) + source.frame.S - source.frame.T


def tables(structure: Structure, filler: Tensor) -> list[Any]:
    """Pointers to keys, open keys and documents, then the stride of each from sample to sample."""
    found = (structure.keys, structure.open_keys, structure.documents)
    return [filler if x is None else x for x in found] + [0 if x is None or len(x) == 1 else x.stride(0) for x in found]


def switches(structure: Structure, prefix: str = "") -> dict[str, bool]:
    """Which tables a structure has."""
    return {
        f"{prefix}KEYS": structure.keys is not None,
        f"{prefix}OPEN": structure.open_keys is not None,
        f"{prefix}DOCUMENTS": structure.documents is not None,
    }


def launch(kernel: Any, grid: tuple[int, int], arguments: list[Any], options: dict[str, Any]) -> None:
    """Run a kernel on the device of its first argument."""
    device = arguments[0].device
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        kernel[grid](*arguments, **options)


def new(source: Source, *tail: int, dtype: torch.dtype = torch.float32, zero: bool = False) -> Tensor:
    """A new tensor (B, H, *tail)."""
    make = torch.zeros if zero else torch.empty
    return make(*source.shape[:2], *tail, dtype=dtype, device=source.query.device)


def log_sum_exp(source: Source, structure: Structure) -> Tensor:
    """The row log-sum-exp (B, H, T), without sinks."""
    lse = new(source, source.shape[2])
    run(log_sum_exp_kernel, source, structure, blocks_for("rows", source), [lse])
    return lse


class RowPass(NamedTuple):
    """Results of the row-major pass, each (B, H, T) unless noted."""

    entropy: Tensor
    peak: Tensor
    peak_key: Tensor
    distance: Tensor
    received: Tensor  # (B, H, S)
    picture: Tensor  # (B, H, R, C), averaged over queries


def rows(
    source: Source,
    structure: Structure,
    lse: Tensor,
    *,
    entropy: bool = False,
    peak: bool = False,
    distance: bool = False,
    received: bool = False,
    size: tuple[int, int] | None = None,
) -> RowPass:
    """What was requested; the rest is empty. `size` requests a picture, which `fits_rows` must allow."""
    blocks = blocks_for("both" if received else "rows", source)
    T, S = source.shape[2:]
    R, C = size or (1, 1)
    row_edge, col_edge = T // R, S // C
    found = RowPass(
        new(source, T if entropy else 0),
        new(source, T if peak else 0),
        new(source, T if peak else 0, dtype=torch.int32),
        new(source, T if distance else 0),
        new(source, S if received else 0, zero=True),
        new(source, R, C, zero=True),
    )
    strip, bunch = min(WARP_ROWS, row_edge), min(blocks.keys, col_edge)
    wanted = {"ENTROPY": entropy, "PEAK": peak, "DISTANCE": distance, "RECEIVED": received, "LANES": LANES}
    wanted |= {"BEHIND": structure.right <= 0, "NORMAL": source.scoring.sinks is None, "PICTURE": size is not None}
    wanted |= {"STRIP": strip, "BUNCH": bunch, "OWNED": (strip, bunch) == (row_edge, col_edge)}
    wanted |= {"WIDE": strip == WARP_ROWS and bunch == blocks.keys, "WARPS": min(blocks.warps, blocks.queries // 16)}
    picture = [R, C, row_edge, col_edge, 1 / row_edge]
    run(rows_kernel, source, structure, blocks, [lse, *found], picture, **wanted)
    return found


def fits_rows(source: Source, size: tuple[int, int]) -> bool:
    """Whether the row-major pass can make this picture: cell sizes must divide blocks or the reverse."""
    (T, S), (R, C) = source.shape[2:], size
    return _divide(T, R) and _divide(S, C)


@functools.lru_cache(maxsize=16)
def _table(bands: tuple[Band, ...], device: torch.device) -> Tensor:
    """The bands on the GPU; cached, because copying them takes longer than the kernel."""
    return torch.tensor(bands, dtype=torch.int32, device=device)


def mass(source: Source, structure: Structure, lse: Tensor, probe: Structure, span: tuple[int, int]) -> Tensor:
    """The mass (B, H, T) where the probe is True; all its keys are within `span`."""
    found = new(source, source.shape[2])
    asked, offered = probe.match or (source.query, source.query)
    matching = [asked, offered, *(0 if probe.match is None or len(x) == 1 else x.stride(0) for x in (asked, offered))]
    probing = [probe.left, probe.right, *span, *tables(probe, source.query), *matching]
    options = switches(probe, "PROBE_") | {"MATCH": probe.match is not None}
    run(mass_kernel, source, structure, blocks_for("rows", source), [lse, found], probing, **options)
    return found


def is_narrow(band: Band) -> bool:
    """Whether a probe covers only the first keys, or only keys near the query."""
    left, right, _, stop = band
    return stop <= NEAR or max(left, right) <= NEAR


def bands(source: Source, structure: Structure, lse: Tensor, probes: tuple[Band, ...]) -> Tensor:
    """The masses (probes, B, H, T) of bands, each given by (left, right, first key, last key + 1)."""
    B, H, T, _ = source.shape
    blocks = LaunchBlocks(32 if source.query.dtype == torch.float32 else 64, 32, 4, 1)
    found = torch.empty(len(probes), B, H, T, device=source.query.device)
    first = [lse, found, _table(probes, source.query.device)]
    run(bands_kernel, source, structure, blocks, first, [B * H * T], COUNT=len(probes))
    return found


def weights(source: Source, structure: Structure, lse: Tensor, cols: range, dtype: torch.dtype) -> Tensor:
    """The weights (B, H, T, len(cols)) of consecutive keys."""
    T = source.shape[2]
    blocks = LaunchBlocks(*((32, 32) if source.query.dtype == torch.float32 else (64, 128)), 4, 1)
    across = triton.cdiv(len(cols), blocks.keys)
    found = new(source, T, len(cols), dtype=dtype)
    last, programs = [cols.start, len(cols), across], triton.cdiv(T, blocks.queries) * across
    run(weights_kernel, source, structure, blocks, [lse, found], last, programs=programs)
    return found


def histogram(source: Source, structure: Structure, lse: Tensor, bins: int) -> Tensor:
    """Summed weights in each octave of distance, (B, H, bins)."""
    found = new(source, bins, zero=True)
    run(histogram_kernel, source, structure, blocks_for("rows", source), [lse, found, bins])
    return found


def top_keys(source: Source, structure: Structure, lse: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest weights (B, H, T, k), largest first, and their keys."""
    T, blocks = source.shape[2], blocks_for("rows", source)
    found, places = new(source, T, k), new(source, T, k, dtype=torch.int32)
    run(top_keys_kernel, source, structure, blocks, [lse, found, places], [k], K=triton.next_power_of_2(k))
    found, order = found.sort(-1, descending=True)
    return found, places.gather(-1, order).long()


class ColumnPass(NamedTuple):
    """Results of the key-major pass."""

    received: Tensor  # (B, H, S)
    counts: Tensor  # (B, H, S), how many queries see each key
    picture: Tensor  # (B, H, R, C), summed weights
    peaks: Tensor  # (B, H, R, C), the bits of the largest weight


def columns(
    source: Source,
    structure: Structure,
    lse: Tensor,
    size: tuple[int, int] | None = None,
    peaks: bool = False,
    count: bool = True,
) -> ColumnPass:
    """What every key receives and how many queries see it; with `size`, also a picture of that size, or its peaks."""
    queries, keys, warps, stages = blocks_for("columns", source)
    T, S = source.shape[2:]
    R, C = size or (1, 1)
    found = ColumnPass(
        new(source, S), new(source, S), new(source, R, C, zero=True), new(source, R, C, dtype=torch.int32, zero=True)
    )
    aligned = not peaks and (size is None or (_divide(T, R) and _divide(S, C)))
    row_blocks = col_blocks = strips = 1
    bunch = 16
    if size is not None and aligned:
        strips = max(1, queries * R // T)
        bunch = min(16, S // C)
    elif not aligned:
        queries, row_blocks = _fit(-(-T // R), queries)
        keys, col_blocks = _fit(-(-S // C), keys)
    options = {"PICTURE": size is not None and not peaks, "PEAKS": peaks, "ALIGNED": aligned, "STRIPS": strips}
    options |= {"BUNCH": min(bunch, keys), "COUNT": count}
    blocks, programs = LaunchBlocks(queries, keys, warps, stages), triton.cdiv(S, keys) if aligned else C * col_blocks
    last = [R, C, row_blocks, col_blocks]
    run(columns_kernel, source, structure, blocks, [lse, *found], last, programs=programs, **options)
    return found


def band_counts(source: Source, structure: Structure) -> Tensor:
    """How many queries see each key (B, H, S), if the mask is only a band."""
    B, H, T, S = source.shape
    counts = _band_counts(T, S, offset_of(source), structure.left, structure.right, source.query.device)
    return counts.expand(B, H, S).clone()


@functools.lru_cache(maxsize=16)
def _band_counts(T: int, S: int, offset: int, left: int, right: int, device: torch.device) -> Tensor:
    """(S,); cached, because a few small launches take as long as a statistic of a short sequence."""
    row = torch.arange(S, device=device) - offset  # the query at each key's position
    lo, hi = (row - right).clamp(0, T), (row + left + 1).clamp(0, T)
    return (hi - lo).float()


def _divide(size: int, cells: int) -> bool:
    """Whether all cells have one width, a power of two, so that cells divide blocks or the reverse."""
    edge = size // cells
    return size % cells == 0 and edge & (edge - 1) == 0


def _fit(edge: int, largest: int) -> tuple[int, int]:
    """The block size, at least 16, for cells at most `edge` wide, and how many blocks a cell needs."""
    block = min(largest, max(16, triton.next_power_of_2(edge)))
    return block, -(-edge // block)
