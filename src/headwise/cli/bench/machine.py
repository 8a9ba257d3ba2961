"""What was measured on, and with what: device, versions, commit, memory that is free."""

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch

from headwise.cli.bench.peers.peer import version_of

SOURCE = Path(__file__).parents[2]


def about(device: str, packages: Iterable[str] = ()) -> dict[str, object]:
    """The head of every result: device, versions and commit."""
    versions = {package.replace("_", "-"): version_of(package) for package in packages}
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "versions": {package: version for package, version in versions.items() if version is not None},
        "commit": commit(),
    }


def device_name(device: str) -> str:
    """The GPU's name, or the processor's kind and how many threads torch has."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    threads = torch.get_num_threads()
    return f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def commit() -> str:
    """The commit of this source, marked where files were changed after it; "unknown" outside its repository."""
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
    """Memory that a run may still take."""
    if device == "cuda":
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch's own, to be used again
        return int(torch.cuda.mem_get_info()[0]) + reserved
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except OSError:  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
