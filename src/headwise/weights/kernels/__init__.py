"""Triton kernels for statistics of attention weights, which need no dense weights.

Importing this requires Triton; `streaming.py` does it only for CUDA tensors. What the kernels do not support (a bias,
an arbitrary mask, float64, readings of your own) is computed tile by tile.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.masks import Prefix
from headwise.masks.lowering import simplify
from headwise.weights.kernels import launch
from headwise.weights.readings import (
    DistanceReading,
    EntropyReading,
    HistogramReading,
    MassReading,
    PeakReading,
    PooledPeakReading,
    PooledReading,
    Reading,
    ReceivedReading,
    TopKeysReading,
    octave_count,
    rows_per_cell,
)
from headwise.weights.source import Source
from headwise.weights.structure import FAR, Structure, structure_of

MOST_TOP_KEYS = 16  # with more, the kernel would take longer than tiles
Answers = dict[int, tuple[Tensor, ...]]


def refuses(source: Source) -> str | None:
    """Why kernels cannot read this source, or None."""
    if launch.refuses(source):
        return "they do not support its dtype, head width, bias, score function or selection of queries"
    return None if _structure(source) is not None else f"they do not know the mask {source.mask!r}"


def log_sum_exp(source: Source) -> Tensor | None:
    """The row log-sum-exp (B, H, T), or None if kernels cannot compute it."""
    structure = _structure(source)
    if structure is None:
        return None
    return source.with_sinks(launch.log_sum_exp(source, structure))


def weights(source: Source, lse: Tensor, cols: range, dtype: torch.dtype) -> Tensor | None:
    """The weights (B, H, T, len(cols)) of consecutive keys, or None if kernels cannot compute it."""
    structure = _structure(source)
    if structure is None or dtype not in launch.DTYPES:
        return None
    return launch.weights(source, structure, lse.float().contiguous(), cols, dtype)


def read(source: Source, lse: Tensor, readings: Sequence[Reading]) -> Answers:
    """The results of those readings that kernels support, by their index in the list."""
    structure = _structure(source)
    if structure is None:
        return {}
    lse = lse.float().contiguous()
    narrow, wide = _probes(source, readings)
    answers = _row_major(source, structure, lse, readings)
    answers |= _key_major(source, structure, lse, readings, answers)
    for i, reading in enumerate(readings):
        if type(reading) is HistogramReading:
            octaves = octave_count(source.frame.T, source.frame.S)
            answers[i] = (launch.histogram(source, structure, lse, octaves) / source.shape[2],)
        elif type(reading) is TopKeysReading and reading.k <= MOST_TOP_KEYS:
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
    """Narrow probes, which share a pass, and wide ones with the range of their keys, which need a pass each."""
    narrow: dict[int, launch.Band] = {}
    wide: dict[int, tuple[Structure, tuple[int, int]]] = {}
    T, S = source.frame.T, source.frame.S
    for i, reading in enumerate(readings):
        if type(reading) is not MassReading:
            continue
        probe = reading.probe
        span = probe.key_range(*source.frame.span(slice(None)), T, S)
        if type(probe) is Prefix and span[1] <= launch.NEAR:
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
    return None if found is None or found.match is not None else found  # matches are only supported in probes


def _find(readings: Sequence[Reading], kind: type[Reading]) -> list[int]:
    return [i for i, reading in enumerate(readings) if type(reading) is kind]


def _row_major(source: Source, structure: Structure, lse: Tensor, readings: Sequence[Reading]) -> Answers:
    """Entropy, peak and distance in one pass, together with what keys receive and a picture if possible."""
    entropy, peak, distance = (_find(readings, kind) for kind in (EntropyReading, PeakReading, DistanceReading))
    if not (entropy or peak or distance):
        return {}
    received, pictures = _find(readings, ReceivedReading), _find(readings, PooledReading)
    size = next((r.size for r in readings if type(r) is PooledReading), None)
    # If a mask has tables, its counts, and so everything about keys, come from the key-major pass.
    together = bool(received or pictures) and structure.banded_only
    together = together and (size is None or (len(pictures) == 1 and launch.fits_rows(source, size)))
    wanted = {"entropy": bool(entropy), "peak": bool(peak), "distance": bool(distance), "received": together}
    found = launch.rows(source, structure, lse, **wanted, size=size if together else None)
    answers: Answers = {**dict.fromkeys(entropy, (found.entropy,)), **dict.fromkeys(distance, (found.distance,))}
    answers |= {i: (found.peak, found.peak_key.long()) for i in peak}
    if together:
        answers |= {i: (found.received, launch.band_counts(source, structure)) for i in received}
        answers |= dict.fromkeys(pictures, (found.picture,))
    return answers


def _key_major(
    source: Source, structure: Structure, lse: Tensor, readings: Sequence[Reading], known: Answers
) -> Answers:
    """What keys receive and the first picture in one pass; further pictures in one each."""
    answers: Answers = {}
    found = None
    received = [i for i in _find(readings, ReceivedReading) if i not in known]
    count = bool(received)
    for i, reading in enumerate(readings):
        if type(reading) is PooledReading and i not in known:
            found = launch.columns(source, structure, lse, reading.size, count=count)
            answers[i] = (found.picture / rows_per_cell(source.shape[2], reading.size[0], lse.device),)
        elif type(reading) is PooledPeakReading:
            found = launch.columns(source, structure, lse, reading.size, peaks=True, count=count)
            answers[i] = (found.peaks.view(torch.float32),)
    if received:
        found = launch.columns(source, structure, lse, count=count) if found is None else found
        answers |= dict.fromkeys(received, (found.received, found.counts))
    return answers
