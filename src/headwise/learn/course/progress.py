"""What a learner has done so far, saved in one file that survives a crash."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from headwise.errors import OptionError
from headwise.learn.course.exercise import Exercise, Part
from headwise.learn.course.grading import Grade
from headwise.learn.course.trial import RAISES
from headwise.models.files import atomically, locked

FORMAT = "headwise course 1"


@dataclasses.dataclass
class Record:
    """What was done on one exercise.

    Args:
        tries: how often it was graded.
        best: the largest share of its parts that was right.
        solved: the day on which all of them were.
        next: the part that was next to do at the last try.
        hints: the level of the last hint, by part.
        looked: whether the solution was shown before it was solved.
        error: what the last try raised, if it raised an error.
        seen: a digest of the file that was graded last, by a try or for a hint.
    """

    tries: int = 0
    best: float = 0.0
    solved: str | None = None
    next: str | None = None
    hints: dict[str, int] = dataclasses.field(default_factory=dict)
    looked: bool = False
    error: str | None = None
    seen: str | None = None

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Self:
        """The record that was saved; raises TypeError or ValueError if it is not one."""
        record = cls(**saved)
        words = (str, type(None))
        kinds: tuple[tuple[str, tuple[type, ...]], ...] = (
            ("tries", (int,)), ("best", (int, float)), ("solved", words), ("next", words), ("hints", (dict,)),
            ("looked", (bool,)), ("error", words), ("seen", words),
        )  # fmt: skip
        for name, kind in kinds:
            if not isinstance(getattr(record, name), kind):
                raise TypeError(f"{name} is {getattr(record, name)!r}")
        return record


def default_path() -> Path:
    """Where progress is saved: in the folder that the system has for the state of programs."""
    home = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(home) if home else Path.home() / ".local" / "state") / "headwise" / "course.json"


def _place(record: Record, grade: Grade, text: str) -> None:
    record.next = None if grade.next is None else grade.next.name
    record.error = grade.next.words if grade.next is not None and grade.next.words.startswith(RAISES) else None
    record.seen = _digest(text)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Progress:
    """The records of all exercises, by name."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = default_path() if path is None else path
        self.records = self._read()

    def of(self, exercise: Exercise) -> Record:
        """The record of an exercise."""
        return self.records.setdefault(exercise.name, Record())

    def knows(self, exercise: Exercise, text: str) -> bool:
        """Whether this text is what was graded last."""
        return self.of(exercise).seen == _digest(text)

    def place(self, exercise: Exercise, grade: Grade, text: str) -> None:
        """Remember what is next to do, without counting a try."""
        with self._changed(exercise) as record:
            _place(record, grade, text)

    def add(self, exercise: Exercise, grade: Grade, text: str) -> None:
        """Remember a try: the grade of a file with this text."""
        with self._changed(exercise) as record:
            record.tries += 1
            record.best = max(record.best, grade.share)
            _place(record, grade, text)
            if grade.right and record.solved is None:
                record.solved = datetime.date.today().isoformat()

    def hint(self, exercise: Exercise) -> tuple[Part, int]:
        """The part that is next to do, and the level of the next hint for it: each call goes one further, up to 3."""
        with self._changed(exercise) as record:
            part = next((part for part in exercise.parts if part.name == record.next), exercise.parts[0])
            level = min(record.hints.get(part.name, 0) + 1, 3)
            record.hints[part.name] = level
        return part, level

    def look(self, exercise: Exercise) -> None:
        """Remember that the solution was shown."""
        with self._changed(exercise) as record:
            record.looked = record.looked or record.solved is None

    @contextlib.contextmanager
    def _changed(self, exercise: Exercise) -> Iterator[Record]:
        """The record of an exercise as it is on disk now, which is saved at the end; other processes wait."""
        self._make_folder()
        with locked(self.path.parent):
            self.records = self._read()
            yield self.of(exercise)
            self.save()

    def _make_folder(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OptionError:
        return OptionError(f"{self.path} cannot be written ({error.strerror}). Name another file with --progress.")

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: dataclasses.asdict(record) for name, record in self.records.items()}

    def save(self) -> None:
        """Write the file, completely or not at all."""
        text = json.dumps({"format": FORMAT, "exercises": self.to_dict()}, indent=1)
        self._make_folder()
        try:
            atomically(self.path, lambda beside: beside.write_text(text, encoding="utf-8"))
        except OSError as error:
            raise self._unwritable(error) from error

    def _read(self) -> dict[str, Record]:
        if not self.path.is_file():
            return {}
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
            return {
                str(name): Record.of(record) for name, record in {FORMAT: saved["exercises"]}[saved["format"]].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise OptionError(f"{self.path} cannot be read ({error}). Move it away to start again.") from error
