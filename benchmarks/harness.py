"""What the benchmark scripts share beside `headwise.bench`: options, printing, and the memory of a whole process."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from headwise.cli.bench.machine import about
from headwise.cli.bench.measurement import judged, tensor_peak


def memory(run: Callable[[], object], device: str) -> float:
    """MiB that a run takes beyond what was there: tensors on a GPU, the whole process on the CPU."""
    if device == "cuda":
        return tensor_peak(run, device)
    run()  # once before, so that what torch sets up for itself is not counted
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts again from what is in memory now
    before = process_kib("VmHWM")
    run()
    return (process_kib("VmHWM") - before) / 2**10


def process_kib(name: str) -> int:
    """KiB, as Linux counts them for this process."""
    return int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def agree(name: str, output: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor) -> None:
    """Refuse to time a wrong result."""
    wrong = judged(output, truth, plain).wrong
    if wrong is not None:
        sys.exit(f"{name}: {wrong}")


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
    head = {name: value for name, value in about(device).items() if name != "versions"}
    print(json.dumps({"subject": subject, **head, "rows": rows}))


def parser(text: str | None) -> argparse.ArgumentParser:
    """Options every benchmark has."""
    result = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    result.add_argument("--seconds", type=float, default=6.0, help="time for each group of candidates")
    return result
