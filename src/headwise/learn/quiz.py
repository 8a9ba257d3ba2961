"""The quiz: classes with one mistake each, to find and fix. The answer must be the same class, repaired."""

import ast
import contextlib
import difflib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from headwise.check import MISTAKES, Report
from headwise.check.templates import shown_by, write
from headwise.errors import OptionError
from headwise.learn.course.comparison import code_of
from headwise.models.files import atomically, locked

FORMAT = 2
STYLES = ("separate", "fused", "listed", "einsum")
APART = 3  # exercises between two of the same kind
LINE = 3  # the level of the hint that names the line
ROOM = 3  # lines that may change in addition to those of the shortest repair
ANY_QUESTION = "What changes between one sample and two, with a mask and without, in training and in evaluation?"
QUESTIONS = {  # the first hint: where to look, without the cure
    "attends-over-heads": "What do the rows and the columns of the weights stand for?",
    "buffer-not-sliced": "Does it run on a text that is shorter than the longest one?",
    "causal-inverted": "Change the last token only. Which outputs change?",
    "causal-off-by-one": "What exactly does the first token see, and what does the second?",
    "contiguous": "Which operation does torch complain about when you call it?",
    "dropout-in-eval": "Call it twice after eval(). Do the results agree?",
    "heads-averaged": "Can the last projection still tell which head said what?",
    "heads-share-weights": "Do any two heads ever attend differently?",
    "layers-in-forward": "Would an optimizer find every weight, and do two calls agree?",
    "layers-in-list": "How many parameters does it report, and how many should it have?",
    "mask-after-softmax": "Hide half of the keys. What do the remaining weights of a row add up to?",
    "mask-crashes": "Have you called it with everything that its signature allows?",
    "mask-discarded": "Print the scores before and after the mask. Do they differ?",
    "mask-ignored": "Does the output change at all when you pass a mask?",
    "mask-leaks": "Change a token that is hidden. Does the output change?",
    "mask-wrong-sample": "Hide a key in one sample of a batch only. Which samples change?",
    "merge-view": "Which tokens do the numbers of one output come from?",
    "missing-attribute": "Does forward find everything that it asks self for?",
    "missing-import": "Does the file run at all in an empty Python session?",
    "missing-super": "Can you construct the class at all?",
    "no-gradient": "Which parameters have a gradient after backward()?",
    "no-out-proj": "Which number of the output depends on more than one head?",
    "no-qkv-proj": "Where could this layer learn what a token looks for?",
    "one-projection": "How many different matrices make q, k and v?",
    "scale-after-softmax": "What do the weights of one row add up to?",
    "scale-batch": "Compute a sample alone, then together with others. Does it keep its weights?",
    "scale-d_model": "How many numbers are summed in one score?",
    "scale-length": "Do the weights of the first tokens stay the same when the text becomes longer?",
    "scale-missing": "In which range are the scores if a head is 64 wide, and what does the softmax make of them?",
    "scale-multiplied": "If heads become wider, do the scores that reach the softmax keep their range?",
    "scale-no-sqrt": "If heads become wider, do the scores that reach the softmax keep their spread?",
    "softmax-axis": "What does the axis along which the weights sum to 1 stand for?",
    "split-view": "Which tokens do the numbers of head 0 for token 0 come from?",
    "too-wide": "How wide is the result, and how wide should it be?",
    "undefined-name": "Is every name in forward defined somewhere above it?",
    "wrong-role": "Pass three different tensors. Which of them does each projection see?",
}
NOTHING = re.compile(r"(?m)^ *(if mask is not None:\n *pass|pass|(\w+) = \2)\n")
INTRODUCTION = '''"""Exercise {number} of {count}. One thing here is wrong.

Fix it, then run `headwise quiz` again. Repair this class; a different one does
not count, even if it is right. `headwise quiz --hint` helps, up to three times;
`headwise quiz --skip` moves on.
"""

'''


class FaultyClass(NamedTuple):
    """A class with one mistake."""

    number: int
    mistake: str
    style: str

    def path(self, folder: Path) -> Path:
        """The path of its file, whose name does not reveal the mistake."""
        return folder / f"exercise_{self.number:02d}.py"

    def source(self) -> str:
        """The text of its file."""
        return INTRODUCTION.format(number=self.number, count=len(EXERCISES)) + _written(self.style, self.mistake)

    def hint(self, level: int, answer: str | None = None) -> str:
        """A hint: from 1, a question, to 3, the line; `answer` is the file as the learner has it."""
        mistake = MISTAKES[self.mistake]
        if level == 1:
            return QUESTIONS.get(self.mistake, ANY_QUESTION)
        return mistake.hint if level == 2 else f"Look at {self.place(answer or self.source())}"

    def place(self, answer: str) -> str:
        """Where to repair a file: its lines, and the text of it if it is one."""
        numbers = self.lines(answer) or self.lines(self.source())
        if len(numbers) > 1:
            return f"lines {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        lines = answer.splitlines()
        return f"line {numbers[0]}" + (f": {lines[numbers[0] - 1].strip()}" if numbers[0] <= len(lines) else "")

    def lines(self, answer: str) -> list[int]:
        """The numbers of the lines that are still to be repaired; where one is missing, that of the line before it."""
        before = INTRODUCTION.count("\n")
        right, wrong = (_written(self.style, name).splitlines() for name in (None, self.mistake))
        pieces = difflib.SequenceMatcher(None, right, wrong, autojunk=False).get_opcodes()
        changed = [n for kind, _, _, start, end in pieces if kind != "equal" for n in range(start, end) or [start - 1]]
        kept = difflib.SequenceMatcher(None, self.source().splitlines(), answer.splitlines(), autojunk=False)
        moved = {b.a + i: b.b + i for b in kept.get_matching_blocks() for i in range(b.size)}
        return [
            moved[before + n] + 1 for n in changed if before + n in moved and (wrong[n].strip() or len(changed) == 1)
        ]

    @property
    def judged(self) -> str:
        """The name of its class; helpers stand above it."""
        return [node.name for node in ast.parse(self.source()).body if isinstance(node, ast.ClassDef)][-1]

    def replaced(self, answer: str) -> str | None:
        """Why an answer is another class and not this one repaired; None if it is this one."""
        given = Counter(code_of(self.source()))
        in_force = _in_force(answer)
        if in_force != answer and self._changed(in_force) > self._changed(answer):
            return (
                f"This class is right, but it is not the one from the exercise: {self.judged} is defined once more "
                "below it. Repair the first one and delete the other."
            )
        gone = self._changed(answer)
        most = (given - Counter(code_of(_written(self.style, None)))).total() + ROOM
        if gone <= most:
            return None
        return (
            f"This class is right, but it is not the one from the exercise: {gone} of its {given.total()} lines are "
            f"gone, and a repair takes at most {most}. Repair it instead; `headwise quiz --restore` brings it back."
        )

    def _changed(self, answer: str) -> int:
        """How many lines of the class are not in an answer."""
        return (Counter(code_of(self.source())) - Counter(code_of(answer))).total()


def _in_force(answer: str) -> str:
    """A source without definitions that a later statement replaces: Python uses the last one of a name."""
    tree = ast.parse(answer)
    last = {name: node for node in tree.body for name in _bound(node)}
    kept = [node for node in tree.body if all(last[name] is node for name in _bound(node))]
    return answer if kept == tree.body else ast.unparse(ast.Module(kept, []))


def _bound(node: ast.stmt) -> list[str]:
    """The names of classes and functions that a statement at the top of a file gives."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _written(style: str, mistake: str | None) -> str:
    """The class of a template, without lines that do nothing, which would show where something is missing."""
    text = write(style) if mistake is None else write(style, mistake)
    return NOTHING.sub("", text)


def _mixed() -> tuple[FaultyClass, ...]:
    """Every mistake that makes a class wrong and that a template can show, mixed: neighbors are of different kinds."""
    by_style = {style: set(shown_by(style)) for style in STYLES}
    wanted = [name for name, mistake in MISTAKES.items() if mistake.severity == "wrong"]
    left = [name for name in wanted if any(name in shown for shown in by_style.values())]
    random.Random(5).shuffle(left)  # noqa: S311 - the same order for everybody
    found: list[FaultyClass] = []
    while left:
        recent = {exercise.mistake.partition("-")[0] for exercise in found[-APART:]}
        name = next((name for name in _by_count(left) if name.partition("-")[0] not in recent), left[0])
        left.remove(name)
        styles = [style for style in STYLES if name in by_style[style]]
        found.append(FaultyClass(len(found) + 1, name, styles[len(found) % len(styles)]))
    return tuple(found)


def _by_count(names: list[str]) -> list[str]:
    """Kinds with many mistakes first, so that they do not gather at the end."""
    counts = Counter(name.partition("-")[0] for name in names)
    return sorted(names, key=lambda name: -counts[name.partition("-")[0]])


EXERCISES = _mixed()


class Quiz:
    """A learner's progress through the exercises, saved in `progress.json` beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.solved, self.skipped, self.tries, self.hints, self.instead = self._read()

    @property
    def current(self) -> FaultyClass | None:
        """The first exercise that is neither solved nor skipped, or None."""
        done = {*self.solved, *self.skipped}
        return next((exercise for exercise in EXERCISES if exercise.mistake not in done), None)

    def lay_out(self, exercise: FaultyClass) -> bool:
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

    def touched(self, exercise: FaultyClass) -> bool:
        """Whether the learner has edited the file."""
        return self.text(exercise) != exercise.source()

    def judge(self, exercise: FaultyClass, judge: Callable[[Path], Report]) -> Report:
        """The checker's report on the learner's file; counts the attempt."""
        report = judge(exercise.path(self.folder))
        with self._changed():
            self._count(exercise, report)
        return report

    def _count(self, exercise: FaultyClass, report: Report) -> None:
        self.tries[exercise.mistake] = self.tries.get(exercise.mistake, 0) + 1
        if report.exit_code == 0 and self.replaced(exercise) is None:
            self.solved = [*dict.fromkeys([*self.solved, exercise.mistake])]
        named = [finding.name for finding in report.wrong]
        self.instead.pop(exercise.mistake, None)
        if named and exercise.mistake not in named:
            self.instead[exercise.mistake] = named[0]

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """What is on disk now, to be changed and saved; other processes wait."""
        self._make_folder()
        with locked(self.folder):
            self.solved, self.skipped, self.tries, self.hints, self.instead = self._read()
            yield
            self._write()

    def replaced(self, exercise: FaultyClass) -> str | None:
        """Why the learner's file is another class and not the one of the exercise repaired, or None."""
        return exercise.replaced(self.text(exercise))

    def hint(self, exercise: FaultyClass) -> tuple[int, str]:
        """The next hint and its level; each call goes one further, up to 3."""
        with self._changed():
            level = min(self.hints.get(exercise.mistake, 0) + 1, 3)
            self.hints[exercise.mistake] = level
        other = self.instead.get(exercise.mistake)
        if other in MISTAKES and level < LINE:  # the class is wrong in another way since the last try
            return level, exercise._replace(mistake=str(other)).hint(level)
        return level, exercise.hint(level, self.text(exercise))

    def text(self, exercise: FaultyClass) -> str:
        """The learner's file."""
        return exercise.path(self.folder).read_text(encoding="utf-8", errors="replace")

    def restore(self, exercise: FaultyClass) -> None:
        """Write the file of an exercise as it was."""
        self._make_folder()
        exercise.path(self.folder).write_text(exercise.source(), encoding="utf-8")

    def skip(self, exercise: FaultyClass) -> None:
        """Skip an exercise."""
        with self._changed():
            self.skipped.append(exercise.mistake)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"format": FORMAT, "solved": self.solved, "skipped": self.skipped, "tries": self.tries} | {
            "hints": self.hints,
            "instead": self.instead,
        }

    def _read(self) -> tuple[list[str], list[str], dict[str, int], dict[str, int], dict[str, str]]:
        path = self.folder / "progress.json"
        if not path.is_file():
            return [], [], {}, {}, {}
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            hints = {1: {}, FORMAT: saved.get("hints", {})}[saved["format"]]  # format 1 had no hints
            done = list(saved["solved"]), list(saved["skipped"])
            return *done, dict(saved["tries"]), dict(hints), dict(saved.get("instead", {}))
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path} cannot be read ({error!r}). Move it away to start again.") from error

    def _write(self) -> None:
        self._make_folder()
        text = json.dumps(self.to_dict(), indent=1)
        atomically(self.folder / "progress.json", lambda beside: beside.write_text(text, encoding="utf-8"))
