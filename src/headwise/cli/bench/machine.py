"""The machine the benchmark runs on: device, versions, commit, free memory, and its measured ceilings."""

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from headwise.cli.bench.measurement import DTYPES, timed
from headwise.cli.bench.peers.packages import version_of

SOURCE = Path(__file__).parents[2]
SIDE = {"cpu": 1024, "cuda": 8192}  # of the square matrices whose product is timed
COPIED = {"cpu": 2**27, "cuda": 2**31}  # bytes of the tensor that is copied: far more than caches hold
TIMES = 12  # runs, of which the fastest is the ceiling


def about(device: str, packages: Iterable[str] = ()) -> dict[str, object]:
    """The header of every result: device, versions and commit."""
    versions = {package.replace("_", "-"): version_of(package) for package in packages}
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "versions": {package: version for package, version in versions.items() if version is not None},
        "commit": commit(),
    }


def device_name(device: str) -> str:
    """The GPU's name, or the processor type and torch's number of threads."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def commit() -> str:
    """The commit of this source, with "-dirty" if files have changed since; "unknown" outside its repository."""
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # an installed package may lie in another repository
        changed = "-dirty" if _git("status", "--porcelain", "--untracked-files=no", ".") else ""
        return _git("rev-parse", "--short", "HEAD") + changed
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    ran = subprocess.run(["git", *words], cwd=SOURCE, capture_output=True, text=True, check=True)  # noqa: S603, S607
    return ran.stdout.strip()


def free_bytes(device: str) -> int:
    """The memory still available to a run."""
    if device == "cuda":
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch's cache, which it can reuse
        return int(torch.cuda.mem_get_info()[0]) + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def ceilings(device: str, dtype: str) -> dict[str, float]:
    """Operations per second in a matrix product of this dtype, and bytes per second read and written by a copy."""
    n, size = SIDE[device], COPIED[device]
    a, b = (torch.randn(n, n, device=device, dtype=DTYPES[dtype]) for _ in range(2))
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    product = min(timed(lambda: a @ b, device) for _ in range(TIMES)) / 1e3
    copy = min(timed(lambda: target.copy_(source), device) for _ in range(TIMES)) / 1e3
    return {"flops": 2 * n**3 / product, "bytes": 2 * size / copy}
