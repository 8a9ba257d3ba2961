"""The exercises as Jupyter notebooks, written from the same source as the files."""

import json
from collections.abc import Sequence
from typing import Any

from headwise.learn.course.exercise import Exercise

INSTALL = """\
# Installs headwise once: from a wheel beside this notebook, or from the repository that the notebook is in.
import os, pathlib, sys

try:
    import headwise
except ImportError:
    folders = [pathlib.Path.cwd(), *pathlib.Path.cwd().parents]
    found = [*folders[0].glob("headwise-*.whl"), *(folder for folder in folders if (folder / "src/headwise").is_dir())]
    if not found:
        raise SystemExit("Put headwise-*.whl beside this notebook, or open the notebook in the repository.")
    %pip install --quiet "{found[0]}[terminal,builtin]"
    import headwise
os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]  # where !headwise is found"""


def notebook(cells: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A notebook from cells: "markdown" or "code", and the text.

    >>> notebook([("code", "1 + 1")])["cells"][0]["source"]
    ['1 + 1']
    """
    made = []
    for number, (kind, text) in enumerate(cells):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number:02}", "metadata": {}}
        cell["source"] = text.splitlines(keepends=True)
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": made,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def exercise_cells(number: int, exercise: Exercise, source: str) -> list[tuple[str, str]]:
    """The cells of one exercise: the idea, the code to write, the grade, and the hints, folded."""
    stars = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
    hints = "\n\n".join(
        f"<details><summary>{part.name}: a question</summary>\n\n{part.question}\n\n<details><summary>the idea"
        f"</summary>\n\n{part.idea}\n\n<details><summary>the line</summary>\n\n`{part.line}`\n\n</details></details>"
        f"</details>"
        for part in exercise.parts
    )
    code = source.split('"""', 2)[2].lstrip("\n").partition('\n\nif __name__ == "__main__":')[0].rstrip()
    return [
        ("markdown", f"## {number}. {exercise.title}\n\n{stars} · about {exercise.minutes} minutes\n\n{exercise.idea}"),
        ("code", code),
        ("code", f'print(grade(find("{exercise.name}"), globals()).sentence())'),
        ("markdown", f"Hints, one level at a time:\n\n{hints}"),
    ]


def course_notebook(exercises: Sequence[Exercise], *, solved: bool = False) -> dict[str, Any]:
    """All exercises in one notebook, or, `solved`, the model answers."""
    title = "# The course: from dot products to a decoder" + (", with answers" if solved else "")
    cells = [("markdown", title), ("code", INSTALL), ("code", "from headwise.learn.course import find, grade")]
    for number, exercise in enumerate(exercises, 1):
        cells += exercise_cells(number, exercise, exercise.solution if solved else exercise.skeleton)
    return notebook(cells)


def as_json(made: dict[str, Any]) -> str:
    """The text of a notebook file."""
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"
