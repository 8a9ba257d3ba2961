"""The quiz: classes with one mistake each, for the learner to find and fix; the checker judges them."""

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
INTRODUCTION = '''"""Exercise {number} of {count}. One thing here is wrong. Fix it, then run `headwise quiz` again.

`headwise quiz --hint` says where to look; `headwise quiz --skip` moves on.
"""

'''


class Exercise(NamedTuple):
    """A class with one mistake."""

    number: int
    mistake: str
    style: str

    def path(self, folder: Path) -> Path:
        """The path of its file, whose name does not reveal the mistake."""
        return folder / f"exercise_{self.number:02d}.py"

    def source(self) -> str:
        """The text of its file."""
        return INTRODUCTION.format(number=self.number, count=len(EXERCISES)) + write(self.style, self.mistake)


def _exercises() -> tuple[Exercise, ...]:
    """Every mistake that makes a class wrong and that a template can show, in table order, in alternating styles."""
    by_style = {style: set(shown_by(style)) for style in STYLES}
    found: list[Exercise] = []
    for name, mistake in MISTAKES.items():
        styles = [style for style in STYLES if name in by_style[style]]
        if mistake.severity == "wrong" and styles:
            found.append(Exercise(len(found) + 1, name, styles[len(found) % len(styles)]))
    return tuple(found)


EXERCISES = _exercises()


class Quiz:
    """A learner's progress through the exercises, saved in `progress.json` beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.solved, self.skipped, self.tries = self._read()

    @property
    def current(self) -> Exercise | None:
        """The first exercise that is neither solved nor skipped, or None."""
        done = {*self.solved, *self.skipped}
        return next((exercise for exercise in EXERCISES if exercise.mistake not in done), None)

    def lay_out(self, exercise: Exercise) -> bool:
        """Write the file of an exercise unless it exists; returns whether it was written."""
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
            raise OptionError(
                f"--folder {self.folder}: {error.strerror}. Name a folder that can be created."
            ) from error

    def touched(self, exercise: Exercise) -> bool:
        """Whether the learner has edited the file."""
        return exercise.path(self.folder).read_text(encoding="utf-8", errors="replace") != exercise.source()

    def judge(self, exercise: Exercise, judge: Callable[[Path], Report]) -> Report:
        """The checker's report on the learner's file; counts the attempt."""
        report = judge(exercise.path(self.folder))
        self.tries[exercise.mistake] = self.tries.get(exercise.mistake, 0) + 1
        if report.exit_code == 0:
            self.solved.append(exercise.mistake)
        self._write()
        return report

    def skip(self, exercise: Exercise) -> None:
        """Skip an exercise."""
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
            saved = json.loads(path.read_text(encoding="utf-8"))
            known = {FORMAT: (list(saved["solved"]), list(saved["skipped"]), dict(saved["tries"]))}
            return known[saved["format"]]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path} cannot be read ({error!r}). Move it away to start again.") from error

    def _write(self) -> None:
        self._make_folder()
        text = json.dumps(self.to_dict(), indent=1)
        atomically(self.folder / "progress.json", lambda beside: beside.write_text(text, encoding="utf-8"))
