"""A learner's files: writing the skeletons, grading a file in a process of its own, training its model."""

import ast
import contextlib
import dataclasses
import importlib.util
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headwise.check import sandbox
from headwise.errors import OptionError
from headwise.learn.course import gpt
from headwise.learn.course.exercise import Exercise, Space
from headwise.learn.course.grading import CHECK_SECONDS, Grade, PartResult, grade
from headwise.learn.course.trial import EndlessPartError, place

STOPPED, UNREADABLE = "your file stops before it defines {}", "your file cannot be read yet"
LOADING = 10.0  # seconds for the statements of a file

WIDTH = 79  # columns of the text in a file
HEADER = """{quotes}Exercise {number} of {count}: {title}.

Difficulty {difficulty} of 5, about {minutes} minutes.

{idea}

Write the code, then run `headwise course {number}`.
`headwise course {number} --hint` gives three hints for each step.
{quotes}
"""


class Workspace:
    """A folder with one file for every exercise."""

    def __init__(self, folder: Path, exercises: Sequence[Exercise]) -> None:
        self.folder, self.exercises = folder, exercises

    def number(self, exercise: Exercise) -> int:
        """Its number, from 1."""
        return self.exercises.index(exercise) + 1

    def path(self, exercise: Exercise) -> Path:
        """The learner's file."""
        return self.folder / f"{self.number(exercise):02}_{exercise.name.replace('-', '_')}.py"

    def text(self, exercise: Exercise) -> str:
        """The file as the learner gets it."""
        return self.introduced(exercise, exercise.skeleton)

    def introduced(self, exercise: Exercise, source: str) -> str:
        """A source with what the exercise is about in its docstring."""
        body = source.split('"""', 2)[2].lstrip("\n")  # without the docstring of the solution
        idea = "\n".join(textwrap.wrap(exercise.idea, WIDTH))
        number, count = self.number(exercise), len(self.exercises)
        sizes = {"difficulty": exercise.difficulty, "minutes": exercise.minutes, "title": exercise.title}
        return HEADER.format(quotes='"""', number=number, count=count, idea=idea, **sizes) + "\n" + _folded(body)

    def lay_out(self, exercise: Exercise) -> bool:
        """Write the file unless it exists; returns whether it was written."""
        path = self.path(exercise)
        if path.exists():
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.write_text(self.text(exercise), encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"--folder {self.folder}: {error.strerror}. Name a folder that can be created."
            ) from error
        return True

    def written(self, exercise: Exercise) -> str:
        """The learner's file as it is now."""
        return self.path(exercise).read_text(encoding="utf-8", errors="replace")

    def touched(self, exercise: Exercise) -> bool:
        """Whether the learner has written anything."""
        return self.written(exercise) != self.text(exercise)


def _folded(source: str) -> str:
    """A source with its docstrings in lines that fit."""
    lines = source.splitlines()
    documented = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in documented:
        text = node.body[0]
        for n in range(text.lineno - 1, text.end_lineno or text.lineno) if ast.get_docstring(node) else ():
            indent = lines[n][: -len(lines[n].lstrip())]
            lines[n] = textwrap.fill(lines[n], WIDTH, subsequent_indent=indent) if lines[n].strip() else ""
    return "\n".join(lines) + "\n"


def grade_file(exercise: Exercise, path: Path, progress: Callable[[str], None] = lambda _: None) -> Grade:
    """The grade of a file. It runs in a process of its own, in the jail of `headwise check`, with a time limit."""
    if not path.is_file():
        raise OptionError(f"there is no file {path}. Run `headwise course` to get it.")
    heard, most = _Grading(progress), exercise.seconds + LOADING + CHECK_SECONDS
    request = {"exercise": exercise.name, "seconds": exercise.seconds, "file": str(path.resolve())}
    status, error = sandbox.confined(
        "headwise.learn.course.work:grade_here", request, heard, sandbox.readable(path), most
    )
    if heard.grade is not None:
        return heard.grade
    ended = (
        f"it was stopped after {most:g} s" if status == -signal.SIGKILL else f"it made Python exit (status {status})"
    )
    said = error.strip().splitlines()[-1:]
    words = ": ".join([f"{ended} while grading {heard.stage}", *said])
    return Grade(tuple(PartResult(part.name, False, words) for part in exercise.parts))


class _Grading(sandbox.Listener):
    """Hears the grade."""

    grade: Grade | None = None

    def take(self, told: dict[str, Any]) -> None:
        """Keep one message."""
        super().take(told)
        if "grade" in told:
            self.grade, self.done = Grade.from_dict(told["grade"]), True


def grade_here(request: dict[str, Any], line: sandbox.TaskChannel) -> None:
    """The task in the child: load the file, as far as it goes, and grade what it defines."""
    import torch

    from headwise.learn.course import find

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    line.tell("progress", "loading your file")
    space, note = names_in(Path(request["file"]))
    exercise = dataclasses.replace(find(request["exercise"]), seconds=request["seconds"])
    missing = STOPPED if space else UNREADABLE
    said = {"missing": missing} if note else {}
    found = grade(exercise, space, progress=lambda words: line.tell("progress", words), limited=limited, **said)
    line.tell("grade", dataclasses.replace(found, note=note).to_dict())


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `EndlessPartError`, with the line that was running, after so many seconds."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except sandbox.TooLong as error:
        raise EndlessPartError(f"still running after {seconds:g} s; is there an infinite loop?{place(error)}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)


def names_in(path: Path) -> tuple[Space, str]:
    """What a file defines, after it ran as a module, and why it stopped if it did not run to its end."""
    spec = importlib.util.spec_from_file_location("answer", path)
    assert spec is not None  # noqa: S101 - for a path that ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules["answer"] = module
    sys.path.insert(0, str(path.parent))
    try:
        with limited(LOADING):
            spec.loader.exec_module(module)
    except EndlessPartError as failure:
        return vars(module), f"Your file does not finish running: {failure}."
    except SyntaxError as error:
        return {}, f"Your file is not Python yet: {error.msg} (line {error.lineno}){_near(error)}"
    except (Exception, SystemExit) as error:
        return vars(module), f"Your file stops with {type(error).__name__}: {error}{place(error)}."
    return vars(module), ""


def _near(error: SyntaxError) -> str:
    """The text of the line, and where else to look for what Python only notices there."""
    text = "." if error.text is None else f": {error.text.strip()}"
    quotes = error.msg.startswith(("invalid character", "unterminated triple"))
    return text + (" (is every docstring closed?)" if quotes else "")


def train_and_write(space: dict[str, Any], seconds: float = 60.0, prompt: str = "THE FOX AND THE ") -> str:
    """Train the `TinyGPT` of exercise 13 on the fables, printing its loss, and let it write; returns what it wrote.

    Args:
        space: the names of the answer: `globals()`.
        seconds: how long to train.
        prompt: how the fable begins.
    """
    import torch

    text = gpt.fables()
    alphabet, tokens = sorted(set(text)), gpt.letters(text)
    torch.manual_seed(0)
    context, end = 64, time.monotonic() + seconds
    model = space["TinyGPT"](len(alphabet), 64, 4, 2, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    while time.monotonic() < end:
        starts = torch.randint(len(tokens) - context, (16,))
        value = space["loss"](model, torch.stack([tokens[i : i + context] for i in starts.tolist()]))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:>5}  loss {float(value.detach()):.2f}", flush=True)
        step += 1
    ids = [alphabet.index(letter) for letter in prompt]
    with torch.no_grad():
        for _ in range(400):
            logits = model.eval()(torch.tensor([ids[-context:]]))[0, -1]
            ids.append(int(torch.multinomial((logits / 0.7).softmax(-1), 1)))
    written = "".join(alphabet[n] for n in ids)
    print(f"\n{written}")
    return written
