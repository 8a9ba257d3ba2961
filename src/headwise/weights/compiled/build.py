"""Builds the compiled loop at its first use and loads it.

The library is kept in the user's cache folder, under a name that is the hash of its source, the compiler, its flags and
the processor, so it is built once on each machine and never used on another. `HEADWISE_COMPILED=0` switches it off and
`HEADWISE_CACHE` names another folder. Without a C++ compiler there is no library and `tiles.py` does the work.
"""

import ctypes
import functools
import hashlib
import importlib.resources
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILERS = ("c++", "g++", "clang++")
COMMON = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=fast", "-fno-math-errno")
NATIVE = (("-march=native",), ("-mcpu=native",), ())  # what compilers call "this processor"; some know only one
MOST_SECONDS = 120
SWITCH, FOLDER = "HEADWISE_COMPILED", "HEADWISE_CACHE"


class BuildError(Exception):
    """Why there is no compiled loop."""


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, or why there is none; decided once in a process."""
    try:
        return _loaded()
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        return str(error)


def _loaded() -> ctypes.CDLL:
    if os.environ.get(SWITCH, "1") == "0":
        raise BuildError(f"{SWITCH}=0 switches it off")
    compiler = _compiler()
    source = (importlib.resources.files("headwise.weights.compiled") / "walk.cpp").read_bytes()
    path = cache_folder() / f"walk-{_fingerprint(source, compiler)}.so"
    if not path.is_file():
        _build(compiler, source, path)
    loaded = ctypes.CDLL(str(path))
    for name in ("headwise_lanes", "headwise_panel"):
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def cache_folder() -> Path:
    """Where libraries are kept."""
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "headwise"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwise"


def _compiler() -> str:
    if sys.platform == "win32":
        raise BuildError("it is not built on Windows")
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise BuildError(f"there is no C++ compiler ({', '.join(names)})")
    return found


def _fingerprint(source: bytes, compiler: str) -> str:
    """A hash of everything the library depends on."""
    program = Path(compiler).resolve()
    stamp = program.stat()
    parts = (source, str(program), str(stamp.st_size), str(stamp.st_mtime_ns), repr((COMMON, NATIVE)), _processor())
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What distinguishes the instructions of this processor from those of another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    told = {line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(told)])


def _build(compiler: str, source: bytes, path: Path) -> None:
    """Compile into a temporary file and rename it: another process sees all of it or nothing."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        written, made = Path(folder) / "walk.cpp", Path(folder) / "walk.so"
        written.write_bytes(source)
        for native in NATIVE:
            command = [compiler, *COMMON, *native, str(written), "-o", str(made)]
            run = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False)  # noqa: S603
            if run.returncode == 0:
                made.replace(path)
                return
    said = run.stderr.strip().splitlines()
    raise BuildError(f"{compiler} could not build it: {said[-1] if said else f'exit status {run.returncode}'}")
