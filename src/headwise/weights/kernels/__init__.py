"""Triton kernels for what no library does: statistics of attention weights without the weights.

Importing this needs Triton; `engine.py` does so only for CUDA tensors. What kernels cannot take (a bias, an arbitrary
mask, float64) they leave to the tile engine.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.masks import Prefix
from headwise.masks.lowering import simplify
from headwise.weights.kernels import launch
from headwise.weights.kernels.structure import FAR, Structure, structure_of
from headwise.weights.readings import (
    Distance,
    Entropy,
    Histogram,
    Mass,
    Peak,
    Pooled,
    PooledPeak,
    Reading,
    Received,
    TopKeys,
    rows_per_cell,
)
from headwise.weights.source import Source

MOST_TOP_KEYS = 16  # beyond, a kernel would search longer than tiles do
Answers = dict[int, tuple[Tensor, ...]]


def log_sum_exp(source: Source) -> Tensor | None:
    """The row log-sum-exp (B, H, T), or None where kernels cannot."""
    structure = _structure(source)
    if structure is None:
        return None
    return source.with_sinks(launch.log_sum_exp(source, structure))


def weights(source: Source, lse: Tensor, cols: range, dtype: torch.dtype) -> Tensor | None:
    """The weights (B, H, T, len(cols)) of neighbouring keys, or None where kernels cannot."""
    structure = _structure(source)
    if structure is None or dtype not in launch.DTYPES:
        return None
    return launch.weights(source, structure, lse.float().contiguous(), cols, dtype)


def read(source: Source, lse: Tensor, readings: Sequence[Reading]) -> Answers:
    """The results of those readings that kernels can answer, by their place in the list."""
    structure = _structure(source)
    if structure is None:
        return {}
    lse = lse.float().contiguous()
    narrow, wide = _probes(source, readings)
    answers = _row_major(source, structure, lse, readings)
    answers |= _key_major(source, structure, lse, readings, answers)
    for i, reading in enumerate(readings):
        if isinstance(reading, Histogram):
            answers[i] = (launch.histogram(source, structure, lse, reading.bins_of(source)) / source.shape[2],)
        elif isinstance(reading, TopKeys) and reading.k <= MOST_TOP_KEYS:
            answers[i] = launch.top_keys(source, structure, lse, reading.k)
    for i, (probe, span) in wide.items():
        answers[i] = (launch.mass(source, structure, lse, probe, span),)
    if narrow:
        found = launch.bands(source, structure, lse, tuple(narrow.values()))
        answers |= {i: (mass,) for i, mass in zip(narrow, found, strict=True)}
    return answers


def _probes(
    source: Source, readings: Sequence[Reading]
) -> tuple[dict[int, launch.Band], dict[int, tuple[Structure, tuple[int, int]]]]:
    """Narrow probes, which share a pass, and wide ones with the range of their keys, which take one each."""
    narrow: dict[int, launch.Band] = {}
    wide: dict[int, tuple[Structure, tuple[int, int]]] = {}
    T, S = source.frame.T, source.frame.S
    for i, reading in enumerate(readings):
        if not isinstance(reading, Mass):
            continue
        probe = reading.probe
        span = probe.key_range(*source.frame.span(slice(None)), T, S)
        if isinstance(probe, Prefix) and span[1] <= launch.NEAR:
            narrow[i] = (FAR, FAR, *span)
            continue
        known = structure_of(probe, source)
        if known is None:
            continue
        band = (known.left, known.right, *span)
        if known.banded_only and launch.is_narrow(band):
            narrow[i] = band
        else:
            wide[i] = (known, span)
    return narrow, wide


def _structure(source: Source) -> Structure | None:
    if launch.refuses(source):
        return None
    found = structure_of(simplify(source.mask, source.frame.T, source.frame.S), source)
    return None if found is None or found.match is not None else found  # matches are for probes alone


def _find(readings: Sequence[Reading], kind: type[Reading]) -> list[int]:
    return [i for i, reading in enumerate(readings) if isinstance(reading, kind)]


def _row_major(source: Source, structure: Structure, lse: Tensor, readings: Sequence[Reading]) -> Answers:
    """Entropy, peak and distance in one pass, which takes along what keys receive and a picture where it can."""
    entropy, peak, distance = (_find(readings, kind) for kind in (Entropy, Peak, Distance))
    if not (entropy or peak or distance):
        return {}
    received, pictures = _find(readings, Received), _find(readings, Pooled)
    size = next((r.size for r in readings if isinstance(r, Pooled)), None)
    # The counts of a mask with tables come from the key-major pass, and so then does everything about keys.
    together = bool(received or pictures) and structure.banded_only
    together = together and (size is None or (len(pictures) == 1 and launch.fits_rows(source, size)))
    found = launch.rows(
        source,
        structure,
        lse,
        entropy=bool(entropy),
        peak=bool(peak),
        distance=bool(distance),
        received=together,
        size=size if together else None,
    )
    answers: Answers = {**dict.fromkeys(entropy, (found.entropy,)), **dict.fromkeys(distance, (found.distance,))}
    answers |= {i: (found.peak, found.peak_key.long()) for i in peak}
    if together:
        answers |= {i: (found.received, launch.band_counts(source, structure)) for i in received}
        answers |= dict.fromkeys(pictures, (found.picture,))
    return answers


def _mean(picture: Tensor, source: Source) -> Tensor:
    return picture / rows_per_cell(source.shape[2], picture.shape[2], picture.device)


def _key_major(
    source: Source, structure: Structure, lse: Tensor, readings: Sequence[Reading], known: Answers
) -> Answers:
    """What keys receive and the first picture in one pass; further pictures in one each."""
    answers: Answers = {}
    found = None
    received = [i for i in _find(readings, Received) if i not in known]
    count = bool(received)
    for i, reading in enumerate(readings):
        if isinstance(reading, Pooled) and i not in known:
            found = launch.columns(source, structure, lse, reading.size, count=count)
            answers[i] = (_mean(found.picture, source),)
        elif isinstance(reading, PooledPeak):
            found = launch.columns(source, structure, lse, reading.size, peaks=True, count=count)
            answers[i] = (found.peaks.view(torch.float32),)
    if received:
        found = launch.columns(source, structure, lse, count=count) if found is None else found
        answers |= dict.fromkeys(received, (found.received, found.counts))
    return answers


__all__ = ["log_sum_exp", "read", "weights"]
