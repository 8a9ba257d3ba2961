"""Exercises: classes with one mistake each, to be found and repaired; the checker judges."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from headwise.check import MISTAKES, Report
from headwise.check.templates import shown_by, write
from headwise.errors import OptionError
from headwise.models.files import atomically

FORMAT = 1
STYLES = ("separate", "fused", "listed", "einsum")
INTRODUCTION = '''"""Exercise {number} of {count}. One thing here is wrong. Repair it, then run `headwise quiz` again.

`headwise quiz --hint` says where to look, `headwise quiz --skip` moves on.
"""

'''


class Exercise(NamedTuple):
    """A class with one mistake."""

    number: int
    mistake: str
    style: str

    def path(self, folder: Path) -> Path:
        """Where the learner finds it; the name does not give it away."""
        return folder / f"exercise_{self.number:02d}.py"

    def source(self) -> str:
        """The file as the learner gets it."""
        return INTRODUCTION.format(number=self.number, count=len(EXERCISES)) + write(self.style, self.mistake)


def _exercises() -> tuple[Exercise, ...]:
    """Every mistake that a template can show and that makes a class wrong, in the table's order, styles in turn."""
    by_style = {style: set(shown_by(style)) for style in STYLES}
    found: list[Exercise] = []
    for name, mistake in MISTAKES.items():
        styles = [style for style in STYLES if name in by_style[style]]
        if mistake.severity == "wrong" and styles:
            found.append(Exercise(len(found) + 1, name, styles[len(found) % len(styles)]))
    return tuple(found)


EXERCISES = _exercises()


class Quiz:
    """A learner's way through the exercises, kept in `progress.json` beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.solved, self.skipped, self.tries = self._read()

    @property
    def current(self) -> Exercise | None:
        """The first that is neither solved nor skipped; None when all are."""
        done = {*self.solved, *self.skipped}
        return next((exercise for exercise in EXERCISES if exercise.mistake not in done), None)

    def lay_out(self, exercise: Exercise) -> bool:
        """Write the file of an exercise, unless the learner has it already; whether it was written."""
        path = exercise.path(self.folder)
        if path.exists():
            return False
        self._make_folder()
        path.write_text(exercise.source(), encoding="utf-8")
        return True

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"--folder {self.folder}: {error.strerror}. Name a folder that can be made.") from error

    def touched(self, exercise: Exercise) -> bool:
        """Whether the learner has changed the file."""
        return exercise.path(self.folder).read_text(encoding="utf-8", errors="replace") != exercise.source()

    def judge(self, exercise: Exercise, judge: Callable[[Path], Report]) -> Report:
        """What the checker says of the learner's file; counted."""
        report = judge(exercise.path(self.folder))
        self.tries[exercise.mistake] = self.tries.get(exercise.mistake, 0) + 1
        if report.exit_code == 0:
            self.solved.append(exercise.mistake)
        self._write()
        return report

    def skip(self, exercise: Exercise) -> None:
        """Leave one out."""
        self.skipped.append(exercise.mistake)
        self._write()

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"format": FORMAT, "solved": self.solved, "skipped": self.skipped, "tries": self.tries}

    def _read(self) -> tuple[list[str], list[str], dict[str, int]]:
        path = self.folder / "progress.json"
        if not path.is_file():
            return [], [], {}
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            known = {FORMAT: (list(told["solved"]), list(told["skipped"]), dict(told["tries"]))}
            return known[told["format"]]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path} cannot be read ({error!r}). Move it away to begin again.") from error

    def _write(self) -> None:
        self._make_folder()
        told = json.dumps(self.to_dict(), indent=1)
        atomically(self.folder / "progress.json", lambda beside: beside.write_text(told, encoding="utf-8"))
