"""Timing that can be compared: every candidate in turn, many rounds, the median and its spread."""

import argparse
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def timed(run: Callable[[], object], device: str) -> float:
    """Milliseconds of one run."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(3_000_000)  # 1.6 ms: launches run ahead, so that the GPU's time is seen and not Python's
    start_event.record()
    run()
    end_event.record()
    torch.cuda.synchronize()
    return start_event.elapsed_time(end_event)


def interleaved(
    runs: dict[str, Callable[[], object]], device: str = "cpu", rounds: int = 40, seconds: float = 6.0
) -> dict[str, dict[str, float]]:
    """Median milliseconds and quartile spread of each candidate, in turn, so that drift hits all alike."""
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.monotonic()
    order, shuffle = list(runs), random.Random(0).shuffle  # noqa: S311
    for done in range(rounds):
        shuffle(order)  # a candidate that leaves the caches cold must not always hit the same neighbour
        for name in order:
            times[name].append(timed(runs[name], device))
        if done >= 12 and time.monotonic() - begin > seconds:
            break
    return {name: summary(values) for name, values in times.items()}


def summary(values: list[float]) -> dict[str, float]:
    """Median, and the distance between the quartiles as a share of it."""
    quarter = statistics.quantiles(values, n=4)
    median = statistics.median(values)
    spread = (quarter[2] - quarter[0]) / median
    return {"ms": round(median, 6), "spread": round(spread, 3), "rounds": len(values)}


def memory(run: Callable[[], object], device: str) -> float:
    """MiB that a run takes beyond what was there."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        del result
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    run()  # once before, so that what torch sets up for itself is not counted
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from what is in memory now
    before = _status("VmHWM")
    run()
    return (_status("VmHWM") - before) / 2**10


def _status(name: str) -> int:
    """KiB, as Linux counts them for this process."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def agree(name: str, output: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor) -> None:
    """Refuse to time a wrong result: against float64, an error of at most twice that of plain PyTorch."""
    error, allowed = (output.double() - truth).norm(), 2 * (plain.double() - truth).norm() + 1e-6 * truth.norm()
    if not error <= allowed:
        sys.exit(f"{name}: error {error:.3g} against the float64 reference, plain PyTorch has {allowed / 2:.3g}")


def table(title: str, rows: list[list[str]], head: list[str]) -> None:
    """Print columns that line up."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print(f"\n{title}")
    for row in [head, *rows]:
        print(
            "  "
            + "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
        )


def finish(subject: str, device: str, rows: list[dict[str, object]]) -> None:
    """The last line of standard output: one JSON object."""
    root = Path(__file__).parent.parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    about = {
        "subject": subject,
        "device": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }
    print(json.dumps({**about, "rows": rows}))


def parser(text: str | None) -> argparse.ArgumentParser:
    """Options every benchmark has."""
    result = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    result.add_argument("--seconds", type=float, default=6.0, help="time for each group of candidates")
    return result
