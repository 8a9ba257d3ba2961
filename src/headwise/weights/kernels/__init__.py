"""Triton kernels for statistics of attention weights, which need no dense weights.

`walk.py` is the kernel, for any number of statistics at once; `terms.py` has the statistics. Importing this requires
Triton; `streaming.py` does it only for CUDA tensors. What the kernels do not support (a bias, an arbitrary mask,
float64, readings of your own without a kernel) is computed tile by tile.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from headwise.weights.kernels import launch, terms
from headwise.weights.kernels.launch import KeyRule, LaunchBlocks, Term, new
from headwise.weights.kernels.walk import NARROW
from headwise.weights.panel import checked_probe
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
from headwise.weights.statistic import Statistic
from headwise.weights.structure import FAR

MOST_TOP_KEYS = 16  # with more, the kernel would take longer than tiles
MOST_TERMS = 16  # of one walk: with more, registers run out
Answers = dict[int, tuple[Tensor, ...]]
EVERYTHING = KeyRule()
SUM = (terms.sum_start, terms.sum_step)
MASS = (*SUM, terms.weight_of)


def refuses(source: Source) -> str | None:
    """Why kernels cannot read this source, or None."""
    if launch.refuses(source):
        return "they do not support its dtype, head width, bias, score function, positions or selection of queries"
    return None if _mask(source) is not None else f"they do not know the mask {source.mask!r}"


def _mask(source: Source) -> KeyRule | None:
    return None if launch.refuses(source) else launch.rule_of(source.mask, source)


def log_sum_exp(source: Source) -> Tensor | None:
    """The row log-sum-exp (B, H, T), or None if kernels cannot compute it."""
    mask = _mask(source)
    if mask is None:
        return None
    found = new(source, source.shape[2])
    term = Term(terms.lse_start, terms.lse_step, 0, terms.lse_end, (found,))
    launch.walk(source, mask, None, [term], launch.blocks_for(source))
    return source.with_sinks(found)


def weights(source: Source, lse: Tensor, cols: range, dtype: torch.dtype) -> Tensor | None:
    """The weights (B, H, T, len(cols)) of consecutive keys, or None if kernels cannot compute it."""
    mask = _mask(source)
    if mask is None or dtype not in launch.DTYPES:
        return None
    return launch.weights(source, mask, lse.float().contiguous(), cols, dtype)


@dataclasses.dataclass(frozen=True)
class KernelQuestion:
    """A reading for the kernels.

    by_query: the term for a walk over the keys of every query, given the blocks; None if it cannot come from that.
    by_key: the term for a walk over the queries of every key.
    answer: the results, once the term has been computed.
    normal: the term is divided by the sum of the row.
    bounds: a tensor (B, H, T) that must hold before the walk what k of the row's log2 weights reach, and k.
    crowded: the term needs so many registers that blocks must be small.
    """

    answer: Callable[[], tuple[Tensor, ...]]
    by_query: Callable[[LaunchBlocks], Term] | None = None
    by_key: Callable[[LaunchBlocks], Term] | None = None
    normal: bool = False
    bounds: tuple[Tensor, int] | None = None
    crowded: bool = False


def read(source: Source, lse: Tensor, readings: Sequence[Reading]) -> Answers:
    """The results of those readings that kernels support, by their index in the list."""
    mask = _mask(source)
    if mask is None:
        return {}
    asked = {i: question for i, reading in enumerate(readings) if (question := question_of(reading, source))}
    questions = list(asked.values())
    for i in range(0, len(questions), MOST_TERMS):
        _compute(source, mask, lse.float().contiguous(), questions[i : i + MOST_TERMS])
    return {i: question.answer() for i, question in asked.items()}


def _compute(source: Source, mask: KeyRule, lse: Tensor, questions: list[KernelQuestion]) -> None:
    """One walk over the keys of every query for all; or, if that would visit few keys, one over queries as well."""
    S, any_blocks = source.shape[3], launch.blocks_for(source)
    either = [q for q in questions if q.by_query is not None and q.by_key is not None]
    rows = [q.by_query for q in questions if q.by_query is not None and q.by_key is None]
    if any(term(any_blocks).reach(S) != NARROW.value for term in rows):
        rows, either = rows + [q.by_query for q in either if q.by_query is not None], []
    small = mask.left < FAR or mask.codes is not None or any(q.crowded for q in questions)
    blocks = launch.blocks_for(source, len(rows), small=small)
    for q in questions:
        if q.bounds is not None:
            out, k = q.bounds
            term = Term(terms.bound_start, terms.bound_step, k, terms.bound_end, (out,), blocks.walk)
            launch.walk(source, mask, lse, [term], blocks)
    if rows:
        made = [term(blocks) for term in rows]
        normal = any(q.normal for q in questions) and source.scoring.sinks is None
        if normal:
            made = [Term(*MASS, terms.nothing_end, (lse,)), *made]
        launch.walk(source, mask, lse, made, blocks, normal=normal)
    keys = [q.by_key for q in questions if q.by_key is not None and (q.by_query is None or q in either)]
    if keys:
        blocks = launch.blocks_for(source, by_key=True)
        launch.walk(source, mask, lse, [term(blocks) for term in keys], blocks, by_key=True)


# Readings as questions.


def question_of(reading: Reading, source: Source) -> KernelQuestion | None:
    """The reading for the kernels, or None if they do not support it; a subclass may mean something else."""
    make = QUESTIONS.get(type(reading))
    return None if make is None else make(reading, source)


def _entropy(reading: Reading, source: Source) -> KernelQuestion:
    out = (new(source, source.shape[2]),)
    term = Term(*SUM, terms.surprise_of, terms.entropy_end, out)
    return KernelQuestion(lambda: out, lambda blocks: term, normal=True)


def _distance(reading: Reading, source: Source) -> KernelQuestion:
    out = (new(source, source.shape[2]),)
    diagonal = KeyRule(0, 0)
    term = Term(terms.sum_start, terms.distance_step, 0, terms.mean_end, out, 0, diagonal, cut=True)
    return KernelQuestion(lambda: out, lambda blocks: term, normal=True)


def _mass(reading: MassReading, source: Source) -> KernelQuestion | None:
    rule = launch.rule_of(reading.probe, source)
    if rule is None:
        return None
    out = (new(source, source.shape[2]),)
    narrow = rule.reach(source.shape[3]) == NARROW.value
    functions = (terms.few_start, terms.few_step) if narrow else SUM
    term = Term(*functions, terms.weight_of, terms.mean_end, out, 0, rule)
    return KernelQuestion(lambda: out, lambda blocks: term)


def _peak(reading: Reading, source: Source) -> KernelQuestion:
    T = source.shape[2]
    out = new(source, T), new(source, T, dtype=torch.int64)
    functions = (terms.largest_start, terms.largest_step, terms.log_weight_of, terms.peak_end)
    return KernelQuestion(lambda: out, lambda blocks: Term(*functions, out), normal=True)


def _top(reading: TopKeysReading, source: Source) -> KernelQuestion | None:
    T, k = source.shape[2], reading.k
    if k > MOST_TOP_KEYS:
        return None
    found, places, bound = new(source, T, k), new(source, T, k, dtype=torch.int64), new(source, T)

    def answer() -> tuple[Tensor, ...]:
        weights, order = found.sort(-1, descending=True)
        return weights, places.gather(-1, order)

    functions, size = (terms.top_start, terms.top_step, k, terms.top_end), triton.next_power_of_2(k)
    return KernelQuestion(answer, lambda blocks: Term(*functions, (found, places, bound), size), bounds=(bound, k))


def _histogram(reading: Reading, source: Source) -> KernelQuestion:
    octaves = octave_count(source.frame.T, source.frame.S)
    out = new(source, octaves, zero=True)
    term = Term(terms.octave_start, terms.octave_step, octaves, terms.octave_end, (out,))
    return KernelQuestion(lambda: (out / source.shape[2],), lambda blocks: term)


def _received(reading: Reading, source: Source) -> KernelQuestion:
    out = new(source, source.shape[3], zero=True)

    def across(blocks: LaunchBlocks) -> Term:
        warps = min(blocks.warps, blocks.own // launch.WARP_ROWS)
        return Term(terms.across_start, terms.across_step, terms.weight_of, terms.nothing_end, (out,), warps)

    def answer() -> tuple[Tensor, ...]:
        return out, source.queries_seeing().float().contiguous()

    return KernelQuestion(answer, across, lambda blocks: Term(*MASS, terms.sum_end, (out,)))


def _picture(reading: PooledReading | PooledPeakReading, source: Source) -> KernelQuestion | None:
    (R, C), (T, S) = reading.size, source.shape[2:]
    largest = type(reading) is PooledPeakReading
    if max(R, C) > launch.MOST_CELLS:
        return None
    out = new(source, R, C, dtype=torch.int32 if largest else torch.float32, zero=True)

    def whole(blocks: LaunchBlocks) -> bool:
        """Whether every tile lies in one column of cells."""
        return S % C == 0 and S // C % blocks.walk == 0

    def term(blocks: LaunchBlocks) -> Term:
        strip = 1 << min(launch.WARP_ROWS, max(1, T // R)).bit_length() - 1  # no cell has fewer queries
        if largest:
            return Term(terms.peaks_start, terms.peaks_step, 0, terms.nothing_end, (out, R, C), strip)
        if whole(blocks):
            return Term(terms.whole_start, terms.whole_step, S // C // blocks.walk, terms.whole_end, (out, R, C), strip)
        most = max(16, triton.next_power_of_2(triton.cdiv(blocks.walk * C, S) + 1))
        step = terms.exact_step if source.query.dtype == torch.float32 else terms.mixed_step
        places = (out, R, C, _cells(S, C, out.device))
        return Term(terms.mixed_start, step, most, terms.nothing_end, places, strip)

    def answer() -> tuple[Tensor, ...]:
        return (out.view(torch.float32) if largest else out / _cell_rows(T, R, out.device),)

    return KernelQuestion(answer, term, crowded=not whole(launch.SMALL))


@functools.lru_cache(maxsize=16)
def _cells(S: int, C: int, device: torch.device) -> Tensor:
    """The cell of every key, (S,)."""
    return (torch.arange(S, device=device) * C // max(S, 1)).int()


@functools.lru_cache(maxsize=16)
def _cell_rows(T: int, R: int, device: torch.device) -> Tensor:
    """`rows_per_cell`; cached, because a few small launches take as long as a picture of a short sequence."""
    return rows_per_cell(T, R, device)


def _statistic(reading: Statistic, source: Source) -> KernelQuestion | None:
    """A statistic of the user's own that has a kernel."""
    rule = EVERYTHING if reading.where is None else launch.rule_of(checked_probe(reading.where, source), source)
    if reading.kernel is None or rule is None:
        return None
    size = source.shape[2 if reading.by_row else 3]
    out: tuple[Tensor, ...] = (new(source, size), new(source, size, dtype=torch.int64))
    functions = (terms.largest_start, terms.largest_step, reading.kernel, terms.largest_end)
    if reading.combine != "max":
        out, functions = out[:1], (terms.sum_start, terms.seen_step, reading.kernel, terms.sum_end)
    term = Term(*functions, out, int(reading.combine == "count"), rule, reading.token_tables(source))

    def answer() -> tuple[Tensor, ...]:
        return (out[0].long(),) if reading.combine == "count" else out

    if reading.by_row:
        return KernelQuestion(answer, lambda blocks: term)
    return KernelQuestion(answer, None, lambda blocks: term)


QUESTIONS: dict[type[Reading], Callable[..., KernelQuestion | None]] = {
    EntropyReading: _entropy,
    PeakReading: _peak,
    DistanceReading: _distance,
    HistogramReading: _histogram,
    MassReading: _mass,
    TopKeysReading: _top,
    ReceivedReading: _received,
    PooledReading: _picture,
    PooledPeakReading: _picture,
    Statistic: _statistic,
}
