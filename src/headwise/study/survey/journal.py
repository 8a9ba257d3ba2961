"""The progress of a survey on disk, so that a kill loses only a few seconds and nothing is counted twice.

Every process keeps one file, in a folder beside the result: which units it has done, and their tally. The file has a
checksum and is replaced atomically, so units and sums always agree, and it stays as small as one tally however long the
survey is. All files in the folder together are the survey, no matter which process wrote them, so the number of
processes may change.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Self

from headwise.errors import CheckpointError, HeadwiseError, OptionError
from headwise.models.files import sync, write_synced
from headwise.study.survey.disk import retried, why
from headwise.study.survey.tally import Tally

FORMAT = "headwise journal 3"
FILES = "files"  # beside the journals: the state of the corpus when the survey began
CHANGES = {  # settings whose values mean nothing to a reader
    "files": "other files, or the same files in another order",
    "fingerprint": "a model of the same name with other weights or another tokenizer",
}
NAMED = 5  # changed files named in an error


class Journal:
    """The units that all processes have done (`done`), and those that this process has done, with their tally.

    Args:
        folder: where the journals are; None keeps nothing on disk.
        rank: of this process.
        settings: what must not change when a survey is resumed.
        units: how many units there are.
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
        """Read what was done, and lock this process's journal."""
        if self.folder is not None and self.path is not None:
            self._lock = lock(self.path.with_suffix(".lock"))
            try:
                self._read(self.folder)
            except BaseException:
                self._lock.close()
                raise
        return self

    def __exit__(self, *problem: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def add(self, unit: int, tally: Tally) -> None:
        """Record a finished unit. It is on disk within `every` seconds."""
        self.tally.add(tally)
        self.done[unit] = self.mine[unit] = 1
        if time.monotonic() - self._saved >= self.every:
            self.save()

    def save(self) -> None:
        """Write what this process has done to disk, and wait until it is there."""
        if self.path is None:
            return
        data = {"format": FORMAT, "settings": self.settings, "done": spans(self.mine), "tally": self.tally.to_dict()}
        write_checked(self.path, data)
        self._saved = time.monotonic()

    def whole(self) -> Tally:
        """The tally of all processes; an error unless every unit is in it exactly once."""
        if self.folder is None:
            return self.tally
        whole, count = Tally(), bytearray(len(self.done))
        for path, data in journals(self.folder, self.settings):
            mark(count, data["done"], path)
            whole.add(Tally.from_dict(data["tally"]))
        if 0 in count:
            raise CheckpointError(
                f"{self.folder}: {count.count(0)} of {len(count)} units are in no journal, the first of them unit "
                f"{count.find(0)}. Continue with --resume."
            )
        return whole

    def remove(self) -> None:
        """Delete the journals, once the result is on disk: all at once, by a new name, and then one by one."""
        if self.folder is not None:
            old = _removed(self.folder)
            clear(self.folder)
            with writing(self.folder, "deleted"):
                retried(lambda: self.folder and self.folder.rename(old))
                retried(lambda: sync(old.parent))
                retried(lambda: shutil.rmtree(old))

    def _read(self, folder: Path) -> None:
        for path, data in journals(folder, self.settings):
            mark(self.done, data["done"], path)
            if path == self.path:
                self.tally = Tally.from_dict(data["tally"])
                mark(self.mine, data["done"], path)


def digest(files: Mapping[str, str]) -> str:
    """A digest that changes with the files and with their order."""
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()


def check_free(folder: Path, *, resume: bool) -> None:
    """Raise if the folder holds a survey that this one may not continue."""
    if not resume and is_begun(folder):
        raise OptionError(f"{folder} holds an unfinished survey. Pass --resume to continue it, or delete the folder.")


def is_begun(folder: Path) -> bool:
    """Whether there are journals."""
    return folder.is_dir() and any(folder.glob("*.json"))


def prepare(folder: Path, settings: dict[str, Any], files: Mapping[str, str], *, resume: bool) -> None:
    """Make the folder of journals; if there is one already, check that this survey may continue it."""
    clear(folder)
    if is_begun(folder):
        check_free(folder, resume=resume)
        for path in folder.glob("*.lock"):  # a process of the earlier run may still be alive
            lock(path).close()
        _check_files(folder, files)
        list(journals(folder, settings))  # raises if one belongs to another survey
        return
    try:
        retried(lambda: folder.mkdir(exist_ok=True))
        retried(lambda: sync(folder.parent))
        write_checked(folder / FILES, dict(files))
    except OSError as error:
        raise OptionError(f"{folder}: {why(error)}. Name an --out in a folder that can be written to.") from error


def _check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Raise with the names of files that have changed."""
    before = read_checked(folder / FILES)
    new = [f"{name} is new" for name in files if name not in before]
    gone = [f"{name} is gone" for name in before if name not in files]
    changed = [f"{name} has changed" for name in files if before.get(name, files[name]) != files[name]]
    all_changes = changed + gone + new
    if all_changes:
        more = f", and {len(all_changes) - NAMED} more" if len(all_changes) > NAMED else ""
        raise OptionError(
            f"{folder} is a survey of other files: {', '.join(all_changes[:NAMED])}{more}. Continue with the files it "
            f"began with, or delete the folder to start again."
        )


def journals(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The journals in a folder; an error if one belongs to another survey."""
    for path in sorted(folder.glob("*.json")):
        data = read_checked(path)
        if data["format"] != FORMAT:
            raise CheckpointError(f"{path} has the format {data['format']!r}; this version reads {FORMAT!r}.")
        before = dict(data["settings"])
        changed = [name for name in settings if before.get(name) != settings[name]]
        if changed:
            name = changed[0]
            change = CHANGES.get(name, f"another {name}: {before.get(name)!r} there, {settings[name]!r} now")
            raise OptionError(
                f"{folder} is a survey with {change}. Continue with the original settings, or delete the folder to "
                f"start again."
            )
        yield path, data


def sealed_files(folder: Path) -> dict[str, str]:
    """The state of the corpus as the first process has sealed it."""
    return read_checked(folder / FILES)


def write_checked(path: Path, data: Mapping[str, Any]) -> None:
    """Write JSON and, on a second line, its checksum. When this returns, both are on disk."""
    text = json.dumps(data)
    with writing(path):
        retried(lambda: write_synced(path, f"{text}\n{_sha256(text.encode())}\n"))


@contextmanager
def writing(path: Path, done: str = "written") -> Iterator[None]:
    """Say what cannot be written, and that nothing is lost."""
    try:
        yield
    except OSError as error:
        raise JournalError(
            error.errno,
            f"{path} cannot be {done}: {why(error)}. What was saved before is kept. Make room, or make the folder "
            f"writable, and continue with --resume.",
        ) from error


def read_checked(path: Path) -> dict[str, Any]:
    """What `write_checked` wrote."""
    try:
        text, _, checksum = retried(path.read_bytes).rstrip(b"\n").rpartition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {why(error)}.") from error
    if _sha256(text).encode() != checksum:
        cure = "Delete the folder and start again" if path.name == FILES else "Delete it: its units are then read again"
        raise CheckpointError(f"{path} is damaged (its checksum does not match). {cure}.")
    return dict(json.loads(text))


def clear(folder: Path) -> None:
    """Delete what a process left that was killed while it deleted the journals of a finished survey."""
    shutil.rmtree(_removed(folder), ignore_errors=True)


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _removed(folder: Path) -> Path:
    """What the folder is called while it is being deleted."""
    return folder.with_name(f".{folder.name}.removed")


class JournalError(HeadwiseError, OSError):
    """The progress of a survey could not be written."""

    def __str__(self) -> str:
        return str(self.strerror)


def spans(marks: bytearray) -> list[list[int]]:
    """The marked numbers as [first, last] of every run.

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
    """Mark the units of a journal; a unit that is marked already would count twice."""
    for first, last in runs:
        if not 0 <= first <= last < len(marks) or 1 in marks[first : last + 1]:
            raise CheckpointError(
                f"{path}: units {first} to {last} are out of range or in another journal as well. Delete the folder "
                f"and start again."
            )
        marks[first : last + 1] = b"\x01" * (last + 1 - first)


def lock(path: Path) -> IO[str]:
    """A file that only one running process can hold: two surveys must not write one journal."""
    with writing(path):
        file = retried(lambda: path.open("a+"))
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not on Windows
        return file
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise OptionError(
            f"{path.parent} is being written by another survey (process {owner}). Wait for it, or stop it first."
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
