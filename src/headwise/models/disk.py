"""Files that are there whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path


def atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file beside its place, then put it there: a failure or a kill leaves what was there.

    A device, a pipe and the like are written to as they are: nothing may take their place.
    """
    path = path.resolve() if path.is_symlink() and path.is_file() else path
    if (path.exists() and not path.is_file()) or path.parent == Path("/dev"):
        write(path)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
