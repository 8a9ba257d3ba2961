"""What a survey has done so far, on disk, so that a kill loses a few seconds and nothing is counted twice.

Every process keeps one file, in a folder beside the result: which units it has done, and their tally. The file is
replaced as a whole, so that units and sums always belong together, and it stays as small as one tally however long the
survey is. All files of the folder together are the survey, whoever wrote them, so the number of processes may change.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Self

from headwise.errors import CheckpointError, OptionError
from headwise.models.files import atomically
from headwise.study.survey.tally import Tally

FORMAT = "headwise survey 1"
FILES = "files"  # beside the journals: what the documents were when the survey began
DIGESTS = {  # settings whose values mean nothing to a reader
    "files": "other files, or another order of them",
    "fingerprint": "a model of this name that has other weights or another tokenizer",
}
TOLD = 5  # changed files that are named


class Journal:
    """Units done and their tally: by all processes so far (`done`), and by this one.

    Args:
        folder: where journals lie; None keeps nothing on disk.
        rank: of this process.
        settings: what must not change when a survey goes on.
        units: how many there are.
        every: seconds between two saves.
    """

    def __init__(
        self, folder: Path | None, rank: int, settings: dict[str, Any], units: int, every: float = 10.0
    ) -> None:
        self.folder, self.settings, self.every = folder, settings, every
        self.path = None if folder is None else folder / f"{rank}.json"
        self.done = bytearray(units)
        self.mine = bytearray(units)
        self.tally = Tally()
        self._lock: IO[str] | None = None
        self._saved = time.monotonic()

    def __enter__(self) -> Self:
        """Read what was done, and let no other process write here."""
        if self.path is not None:
            self._lock = lock(self.path.with_suffix(".lock"))
            try:
                self._read(self.path.parent)
            except BaseException:
                self._lock.close()
                raise
        return self

    def __exit__(self, *problem: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def add(self, unit: int, tally: Tally) -> None:
        """A unit is done. It is on disk within `every` seconds."""
        self.tally.add(tally)
        self.done[unit] = self.mine[unit] = 1
        if time.monotonic() - self._saved >= self.every:
            self.save()

    def save(self) -> None:
        """Put what this process has done on disk, and see that it is there."""
        if self.path is None:
            return
        told = {"format": FORMAT, "settings": self.settings, "done": spans(self.mine), "tally": self.tally.to_dict()}
        atomically(self.path, lambda beside: write_down(beside, json.dumps(told).encode()))
        self._saved = time.monotonic()

    def whole(self) -> Tally:
        """The tally of all processes, refused unless every unit is in it once."""
        if self.folder is None:
            return self.tally
        whole, count = Tally(), bytearray(len(self.done))
        for path, told in journals(self.folder, self.settings):
            mark(count, told["done"], path)
            whole.add(Tally.from_dict(told["tally"]))
        if 0 in count:
            raise CheckpointError(
                f"{self.folder}: {count.count(0)} of {len(count)} units are in no journal; unit {count.find(0)} is the "
                f"first. Go on with --resume."
            )
        return whole

    def remove(self) -> None:
        """The result is written: the journals are no longer needed."""
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def _read(self, folder: Path) -> None:
        for path, told in journals(folder, self.settings):
            mark(self.done, told["done"], path)
            if path == self.path:
                self.tally = Tally.from_dict(told["tally"])
                mark(self.mine, told["done"], path)


def digest(files: Mapping[str, str]) -> str:
    """A short text that differs for other files, or another order of them."""
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def prepare(folder: Path, settings: dict[str, Any], files: Mapping[str, str], *, resume: bool) -> None:
    """Make the folder of journals, or see that the one there is of this survey and may be gone on with."""
    if folder.is_dir() and any(folder.glob("*.json")):
        if not resume:
            raise OptionError(
                f"{folder} holds an unfinished survey. Pass --resume to go on with it, or delete the folder."
            )
        for path in folder.glob("*.lock"):  # of a process that outlived the others
            lock(path).close()
        _check_files(folder, files)
        for _ in journals(folder, settings):
            pass
        return
    try:
        folder.mkdir(exist_ok=True)
        atomically(folder / FILES, lambda beside: write_down(beside, json.dumps(files).encode()))
    except OSError as error:
        raise OptionError(f"{folder}: {error.strerror}. Name an --out in a folder that exists.") from error


def _check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Raise with the names of files that are not as they were."""
    try:
        before = dict(json.loads((folder / FILES).read_bytes()))
    except (OSError, ValueError, TypeError):
        return  # the digest in the journals tells as well, though not which
    new = [f"{name} is new" for name in files if name not in before]
    gone = [f"{name} is gone" for name in before if name not in files]
    changed = [f"{name} has changed" for name in files if before.get(name, files[name]) != files[name]]
    told = changed + gone + new
    if told:
        more = f", and {len(told) - TOLD} more" if len(told) > TOLD else ""
        raise OptionError(
            f"{folder} is a survey of other files: {', '.join(told[:TOLD])}{more}. Go on with what it began with, or "
            f"delete the folder to start again."
        )


def journals(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The journals of a folder, refused where they are of another survey."""
    for path in sorted(folder.glob("*.json")):
        try:
            told = json.loads(path.read_bytes())
            if told["format"] != FORMAT:
                raise CheckpointError(f"{path} has the format {told['format']!r}; this version reads {FORMAT!r}.")
            before = dict(told["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error!r}). Delete it: its units are then read again."
            ) from error
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            name = changed[0]
            told = DIGESTS.get(name, f"another {name}: {before.get(name)!r} there, {settings[name]!r} now")
            raise OptionError(
                f"{folder} is a survey with {told}. Go on with what it began with, or delete the folder to start again."
            )
        yield path, told


def spans(marks: bytearray) -> list[list[int]]:
    """Marked numbers as [first, last] of every run.

    >>> spans(bytearray([1, 1, 0, 1]))
    [[0, 1], [3, 3]]
    """
    runs = []
    for marked, run in groupby(enumerate(marks), key=lambda pair: pair[1]):
        if marked:
            places = [place for place, _ in run]
            runs.append([places[0], places[-1]])
    return runs


def mark(marks: bytearray, runs: list[list[int]], path: Path) -> None:
    """Mark the units of a journal; one that is marked already would count twice."""
    for first, last in runs:
        if not 0 <= first <= last < len(marks) or 1 in marks[first : last + 1]:
            raise CheckpointError(
                f"{path}: units {first} to {last} are out of range or in another journal as well. Delete the folder "
                f"and start again."
            )
        marks[first : last + 1] = b"\x01" * (last + 1 - first)


def write_down(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def lock(path: Path) -> IO[str]:
    """A file that only one living process holds: two surveys must not write one journal."""
    file = path.open("a+")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows has no such lock
        return file
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise OptionError(
            f"{path.parent} is being written by another survey (process {owner}). Wait for it, or end it first."
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
