"""Time, memory, kernel launches and growth, measured so that candidates can be compared with each other."""

import contextlib
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
MOST_DOUBT = 0.05  # that a median lies outside its interval
LEAD_CYCLES = 3_000_000  # 1.6 ms on an H200: Python launches ahead meanwhile, so the GPU is timed and not Python


def timed(run: Callable[[], object], device: str, *, ahead: bool = True) -> float:
    """Milliseconds for one run. On CUDA this is device time, or with `ahead=False` the time from call to result."""
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
    """Median milliseconds and quartile spread of each candidate: `summary` of `rounds_of`."""
    times = rounds_of(runs, device, rounds, seconds, least=least, warm=warm, ahead=ahead)
    return {name: summary(values) for name, values in times.items()}


def rounds_of(
    runs: dict[str, Callable[[], object]],
    device: str = "cpu",
    rounds: int = 40,
    seconds: float = 6.0,
    *,
    least: int = 13,
    warm: int = 3,
    ahead: bool = True,
) -> dict[str, list[float]]:
    """Milliseconds of each candidate in every round. They take turns, so that drift affects all alike.

    Args:
        runs: candidates by name.
        device: "cpu" or "cuda".
        rounds: the maximum number of rounds.
        seconds: no new round starts after this time, once `least` rounds are done.
        least: the minimum number of rounds; the spread needs at least two.
        warm: warm-up runs of each candidate.
        ahead: see `timed`.
    """
    for run in runs.values():
        for _ in range(warm):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.monotonic()
    order, shuffle = list(runs), random.Random(0).shuffle  # noqa: S311
    for done in range(1, rounds + 1):
        shuffle(order)  # a candidate that leaves the caches cold must not always precede the same one
        for name in order:
            times[name].append(timed(runs[name], device, ahead=ahead))
        if done >= least and time.monotonic() - begin > seconds:
            break
    return times


class Ratio(NamedTuple):
    """How long one candidate took compared with another, round by round: the median and where that may lie."""

    median: float
    low: float
    high: float

    @property
    def is_certain(self) -> bool:
        """Whether the two differ by more than the noise."""
        return not self.low <= 1 <= self.high


def ratio(times: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of times measured in the same rounds, with a 95 % interval of its median, which needs six rounds.

    >>> ratio([2.0, 2.2, 1.8, 2.0, 2.1, 9.0], [4.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    Ratio(median=0.512, low=0.45, high=2.25)
    """
    values = sorted(one / other for one, other in zip(times, others, strict=True))
    n = len(values)
    tail, cut = 2 / 2**n, 0  # how likely it is that the median lies outside the values from `cut` on
    while cut < n // 2 and (tail := tail + 2 * math.comb(n, cut + 1) / 2**n) <= MOST_DOUBT:
        cut += 1
    return Ratio(*(round(value, 3) for value in (statistics.median(values), values[cut], values[n - 1 - cut])))


def summary(values: list[float]) -> dict[str, float]:
    """Median, and the interquartile range as a fraction of it.

    >>> summary([1.0, 2.0, 3.0, 4.0, 5.0])
    {'ms': 3.0, 'spread': 1.0, 'rounds': 5}
    """
    quarter = statistics.quantiles(values, n=4)
    median = statistics.median(values)
    spread = (quarter[2] - quarter[0]) / median
    return {"ms": round(median, 6), "spread": round(spread, 3), "rounds": len(values)}


def tensor_peak(run: Callable[[], object], device: str) -> float:
    """Peak MiB of tensors allocated during a run, not counting those that existed before, as torch reports it.

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
    """torch's profiler. Kineto logs to file descriptor 2 directly; those lines are dropped."""
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
    """The relative error of a result against the float64 reference, and the largest error allowed."""

    error: float
    allowed: float

    @property
    def wrong(self) -> str | None:
        """Why the result must not be timed, or None."""
        if self.error <= self.allowed:  # False for NaN
            return None
        return f"wrong: error {self.error:.2g} against the float64 reference, allowed {self.allowed:.2g}; not timed"


def judged(output: Tensor, truth: Tensor, plain: Tensor) -> Verdict:
    """The verdict on `output`: its error may be at most twice that of plain PyTorch in the same dtype."""
    size = truth.norm()
    error, rough = ((y.detach().double() - truth).norm() / size for y in (output, plain))
    return Verdict(float(error), float(2 * rough + 1e-6))


class OperatorCounter(TorchDispatchMode):
    """Counts dispatched operators. Views compute nothing and are not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ARG002, RUF100
        """Count the operator and run it."""
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(run: Callable[[], object], device: str) -> int:
    """Kernels, copies and fills launched on the GPU; on the CPU, operators that compute. Includes the backward pass.

    >>> launches(lambda: torch.ones(2, 3).transpose(0, 1) + 1, "cpu")
    2
    """
    if device == "cpu":
        counter = OperatorCounter()
        with counter:
            run()
        return counter.count
    run()
    torch.cuda.synchronize()
    with profiled(cuda=True) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profile.events())


class Exponent(NamedTuple):
    """The exponent of a fitted power law, and the number of points it was fitted to."""

    exponent: float
    points: int


def fitted(points: Sequence[tuple[float, float]]) -> Exponent | None:
    """The exponent of y against x by least squares on logarithms; None with fewer than two positive points.

    Only the upper half of the points is used: at short lengths fixed costs hide the growth.

    >>> fitted([(1, 5), (2, 9), (4, 3.0), (8, 12.0), (16, 48.0)])
    Exponent(exponent=2.0, points=3)
    """
    usable = sorted((x, y) for x, y in points if x > 0 and y > 0)
    upper = usable[-max(2, math.ceil(len(usable) / 2)) :]
    if len({x for x, _ in upper}) < 2:
        return None
    slope = statistics.linear_regression([math.log(x) for x, _ in upper], [math.log(y) for _, y in upper]).slope
    return Exponent(round(slope, 3), len(upper))


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float] | None]]:
    """The exponents of time and memory for every candidate."""

    def exponent(name: str, key: str) -> dict[str, float] | None:
        found = fitted([(row["tokens"], row[key]) for row in rows if row["name"] == name])
        return None if found is None else found._asdict()

    return {
        name: {key: exponent(name, key) for key in ("ms", "MiB")} for name in dict.fromkeys(r["name"] for r in rows)
    }


def is_doubtful(found: dict[str, float]) -> bool:
    """Whether an exponent was fitted to only two points, which any line passes through."""
    return found["points"] < 3
