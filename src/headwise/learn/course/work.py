"""A learner's files: writing the skeletons, grading a file in a process of its own, comparing it with the solution."""

import ast
import contextlib
import difflib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headwise.errors import OptionError
from headwise.learn.course import decoder
from headwise.learn.course.exercise import Exercise, Grade, PartResult, Space, grade

HEADER = """{quotes}Exercise {number} of {count}: {title} (difficulty {difficulty} of 5, about {minutes} minutes).

{idea}

Write the code, then run `headwise course {number}`. `headwise course {number} --hint` gives three hints for each step.
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
        import textwrap

        body = source.split('"""', 2)[2].lstrip("\n")  # without the docstring of the solution
        idea = "\n".join(textwrap.wrap(exercise.idea, 100))
        number, count = self.number(exercise), len(self.exercises)
        sizes = {"difficulty": exercise.difficulty, "minutes": exercise.minutes, "title": exercise.title}
        return HEADER.format(quotes='"""', number=number, count=count, idea=idea, **sizes) + "\n" + body

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

    def touched(self, exercise: Exercise) -> bool:
        """Whether the learner has written anything."""
        return self.path(exercise).read_text(encoding="utf-8", errors="replace") != self.text(exercise)


def grade_file(exercise: Exercise, path: Path) -> Grade:
    """The grade of a file. It runs in a process of its own, with a time limit."""
    if not path.is_file():
        raise OptionError(f"there is no file {path}. Run `headwise course` to get it.")
    with tempfile.TemporaryDirectory(prefix="headwise-course-") as folder:
        result = Path(folder) / "grade.json"
        command = [sys.executable, "-m", "headwise.learn.course.work", exercise.name, str(path), str(result)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=exercise.seconds)  # noqa: S603
        except subprocess.TimeoutExpired:
            return _failed(exercise, f"it takes longer than {exercise.seconds:g} s")
        if not result.is_file():
            said = ran.stderr.strip().splitlines() or ["the process ended without a message"]
            lines = re.findall(rf'File "{re.escape(str(path))}", line (\d+)', ran.stderr)
            where = f" (line {lines[-1]})" if lines else ""
            return _failed(exercise, f"the file cannot be run: {said[-1]}{where}")
        return Grade.from_dict(json.loads(result.read_text(encoding="utf-8")))


def _failed(exercise: Exercise, words: str) -> Grade:
    return Grade(tuple(PartResult(part.name, False, words) for part in exercise.parts))


def names_in(path: Path) -> Space:
    """What a file defines, after it ran as a module."""
    spec = importlib.util.spec_from_file_location("answer", path)
    assert spec is not None  # noqa: S101 - for a path that ends in .py
    assert spec.loader is not None  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    sys.modules["answer"] = module
    spec.loader.exec_module(module)
    return vars(module)


def compared(exercise: Exercise, answer: str) -> str:
    """The learner's code beside the model answer: how long both are, and where they differ, without docstrings."""
    ours = code_of(exercise.solution)
    try:
        theirs = code_of(answer)
    except SyntaxError as error:
        return f"your file is not Python yet (line {error.lineno}: {error.msg})"
    same = "They are the same." if ours == theirs else "Yours is marked with -, the model answer with +:"
    lines = difflib.unified_diff(theirs, ours, "yours", "the model answer", lineterm="", n=2)
    counts = f"Your answer has {len(theirs)} lines of code and the model answer {len(ours)}. {same}"
    return "\n".join([counts, *list(lines)[2:]])


def code_of(source: str) -> list[str]:
    """The lines of a source without comments, docstrings and blank lines, written uniformly."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return [line for line in ast.unparse(tree).splitlines() if line.strip()]


def train_and_write(space: dict[str, Any], seconds: float = 60.0, prompt: str = "THE FOX AND THE ") -> str:
    """Train the `TinyGPT` of exercise 13 on the fables, printing its loss, and let it write; returns what it wrote.

    Args:
        space: the names of the answer: `globals()`.
        seconds: how long to train.
        prompt: how the fable begins.
    """
    import torch

    text = decoder.fables()
    alphabet, tokens = sorted(set(text)), decoder.letters(text)
    torch.manual_seed(0)
    context, end = 64, time.monotonic() + seconds
    model = space["TinyGPT"](len(alphabet), 64, 4, 2, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    while time.monotonic() < end:
        starts = torch.randint(len(tokens) - context, (16,))  # one letter more than the model reads: it is predicted
        value = space["loss"](model, torch.stack([tokens[i : i + context + 1] for i in starts.tolist()]))
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


def _main(name: str, path: str, result: str) -> None:
    import torch

    from headwise.learn.course import find

    torch.set_num_threads(1)
    exercise = find(name)
    with contextlib.redirect_stdout(None):
        found = grade(exercise, names_in(Path(path)))
    Path(result).write_text(json.dumps(found.to_dict()), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])
