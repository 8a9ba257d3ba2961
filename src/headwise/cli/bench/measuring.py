"""Time and memory that can be compared: every candidate in turn, many rounds, the median and its spread."""

import contextlib
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LEAD_CYCLES = 3_000_000  # 1.6 ms on an H200: launches run ahead, so that the GPU's time is seen and not Python's


def timed(run: Callable[[], object], device: str, *, ahead: bool = True) -> float:
    """Milliseconds of one run. On CUDA those of the device, or with `ahead=False` from the call to the result."""
    if device == "cpu":
        return _on_the_clock(run)
    if not ahead:
        torch.cuda.synchronize()
        return _on_the_clock(run, torch.cuda.synchronize)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(LEAD_CYCLES)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _on_the_clock(*runs: Callable[[], object]) -> float:
    start = time.perf_counter()
    for run in runs:
        run()
    return (time.perf_counter() - start) * 1e3


def interleaved(
    runs: dict[str, Callable[[], object]],
    device: str = "cpu",
    rounds: int = 40,
    seconds: float = 6.0,
    *,
    least: int = 13,
    warm: int = 3,
    ahead: bool = True,
) -> dict[str, dict[str, float]]:
    """Median milliseconds and quartile spread of each candidate, in turn, so that drift hits all alike.

    Args:
        runs: candidates by name.
        device: "cpu" or "cuda".
        rounds: at most so many.
        seconds: after these no new round begins, once `least` are done.
        least: rounds that are always done; two at least, or there is no spread.
        warm: runs of each candidate before the first round.
        ahead: see `timed`.
    """
    for run in runs.values():
        for _ in range(warm):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.monotonic()
    order, shuffle = list(runs), random.Random(0).shuffle  # noqa: S311
    for done in range(1, rounds + 1):
        shuffle(order)  # a candidate that leaves the caches cold must not always hit the same neighbour
        for name in order:
            times[name].append(timed(runs[name], device, ahead=ahead))
        if done >= least and time.monotonic() - begin > seconds:
            break
    return {name: summary(values) for name, values in times.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Median, and the distance between the quartiles as a share of it.

    >>> summary([1.0, 2.0, 3.0, 4.0, 5.0])
    {'ms': 3.0, 'spread': 1.0, 'rounds': 5}
    """
    quarter = statistics.quantiles(values, n=4)
    median = statistics.median(values)
    spread = (quarter[2] - quarter[0]) / median
    return {"ms": round(median, 6), "spread": round(spread, 3), "rounds": len(values)}


def tensor_peak(run: Callable[[], object], device: str) -> float:
    """MiB that tensors take at their peak during a run, beyond those that were there: torch's own count.

    >>> round(tensor_peak(lambda: torch.ones(512, 512).exp(), "cpu"), 3)
    2.0
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return float(torch.cuda.max_memory_allocated() - before) / 2**20
    with profiled(profile_memory=True) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 2**20


@contextlib.contextmanager
def profiled(*, cuda: bool = False, profile_memory: bool = False) -> Iterator[Any]:
    """torch's profiler. Its library writes lines of its own to standard error, past Python: they are let go."""
    kinds = torch.profiler.ProfilerActivity
    seen = torch.profiler.profile(activities=[kinds.CPU] + [kinds.CUDA] * cuda, profile_memory=profile_memory)
    with _silent(), seen:
        yield seen


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


class Verdict(NamedTuple):
    """How far a result is from the float64 reference, and how far it may be; both relative."""

    error: float
    allowed: float

    @property
    def wrong(self) -> str | None:
        """Why it must not be timed, if so."""
        if self.error <= self.allowed:  # NaN is not
            return None
        return f"wrong: error {self.error:.2g} against the float64 reference, allowed {self.allowed:.2g}; not timed"


def judged(output: Tensor, truth: Tensor, plain: Tensor) -> Verdict:
    """Against float64, an error of at most twice that of plain PyTorch in the same dtype."""
    size = truth.norm()
    error, rough = ((y.detach().double() - truth).norm() / size for y in (output, plain))
    return Verdict(float(error), float(2 * rough + 1e-6))
