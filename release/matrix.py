"""Install the package with several versions of Python and torch, and run a part of the tests with each.

    python release/matrix.py                          Python 3.11, 3.12 and 3.13; oldest and newest torch
    python release/matrix.py --python 3.13 --torch 2.11 2.13
    python release/matrix.py --tests tests            all tests, which takes a quarter of an hour for each cell

A version that is not on this machine, or that pip cannot install, is skipped, and the table says why. The exit status
is 1 if a cell failed.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lock
from packaging.requirements import Requirement

PYTHONS = ("3.11", "3.12", "3.13")
TESTS = ("tests/test_reference.py", "tests/attention", "tests/masks", "tests/layer/test_layer.py",
         "tests/weights/test_map.py", "tests/models/test_builtin.py")  # fmt: skip


def oldest_torch() -> str:
    """The lower bound in pyproject.toml."""
    need = Requirement(lock.project()["project"]["dependencies"][0])
    return next(iter(need.specifier)).version


def find_python(version: str) -> str | None:
    """A Python of this version that starts, including one that pyenv has installed but not activated."""
    places = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for place in filter(None, places):
        ran = subprocess.run([str(place), "-c", "import venv"], capture_output=True, check=False)
        if ran.returncode == 0:
            return str(place)
    return None


def cell(python: str, torch: str, tests: list[str], folder: Path) -> tuple[str, str]:
    """The result of one cell: "passed", "failed" or "skipped", and why."""
    environment = folder / "venv"
    steps: list[tuple[str, list[object]]] = [
        ("skipped", [python, "-m", "venv", environment]),
        ("skipped", ["-m", "pip", "install", "--quiet", f"torch=={torch}.*" if torch != "newest" else "torch"]),
        ("skipped", ["-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", lock.LOCKS / "run.txt"]),
        ("skipped", ["-m", "pip", "install", "--quiet", "pytest", "pytest-xdist", "hypothesis"]),
        ("failed", ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", lock.ROOT]),
        ("failed", ["-m", "pytest", "-n", "2", "--tb=line", "-p", "no:cacheprovider", *tests]),
    ]
    last = ""
    for number, (otherwise, command) in enumerate(steps):
        whole = command if number == 0 else [environment / "bin" / "python", *command]
        ran = subprocess.run(
            list(map(str, whole)), cwd=lock.ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        last = (ran.stdout.strip().splitlines() or [""])[-1]
        if ran.returncode:
            print(_reasons(ran.stdout), file=sys.stderr)
            return otherwise, last
    return "passed", last


def _reasons(told: str) -> str:
    """The end of what a command printed, and before it every error line of pytest once, with how often it occurred."""
    errors = re.findall(r"^(?:E  +|/\S+:\d+: )(\S*(?:Error|Exception|Deadline\w*)\b.*)", told, re.MULTILINE)
    counted = [f"{count} × {words[:300]}" for words, count in collections.Counter(errors).most_common(20)]
    return "\n".join([*counted, told[-3000:]])


def main() -> int:
    """Run all cells and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS), help="versions of Python")
    parser.add_argument("--torch", nargs="+", default=[oldest_torch(), "newest"], help="versions of torch, or newest")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="what pytest runs")
    options = parser.parse_args()
    failed = 0
    for version in options.python:
        python = find_python(version)
        for torch in options.torch:
            begin = time.monotonic()
            if python is None:
                result, why = "skipped", f"there is no Python {version} on this machine"
            else:
                with tempfile.TemporaryDirectory() as folder:
                    result, why = cell(python, torch, options.tests, Path(folder))
            failed += result == "failed"
            print(
                f"Python {version:<5} torch {torch:<7} {result:<8} {time.monotonic() - begin:5.0f} s  {why}", flush=True
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
