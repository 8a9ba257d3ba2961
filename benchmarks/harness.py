"""Shared by the benchmark scripts: options, printing, and the memory of a whole process."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from headwise.cli.bench.measurement import judged, tensor_peak
from headwise.cli.bench.sweep import about


def memory(run: Callable[[], object], device: str) -> float:
    """The additional MiB that a run needs: tensors on a GPU, the whole process on the CPU."""
    if device == "cuda":
        return tensor_peak(run, device)
    run()  # warm up, so that torch's own setup is not counted
    Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak to the current memory use
    before = process_kib("VmHWM")
    run()
    return (process_kib("VmHWM") - before) / 2**10


def process_kib(name: str) -> int:
    """A memory figure of this process in KiB, as reported by Linux."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def agree(name: str, output: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor) -> None:
    """Exit if a result is wrong, so that it is never timed."""
    wrong = judged(output, truth, plain).wrong
    if wrong is not None:
        sys.exit(f"{name}: {wrong}")


def table(title: str, rows: list[list[str]], head: list[str]) -> None:
    """Print a table with aligned columns."""
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
    """Print the last line of standard output: one JSON object."""
    head = {name: value for name, value in about(device).items() if name != "versions"}
    print(json.dumps({"subject": subject, **head, "rows": rows}))


def parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    result = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    result.add_argument("--seconds", type=float, default=6.0, help="time per group of candidates (default 6)")
    return result
