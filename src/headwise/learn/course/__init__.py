"""The course: fourteen exercises from dot products to a decoder, graded by results, with hints and saved progress.

The exercises are in `scores`, `heads`, `inputs`, `decoder` and `gpt`; `grading` judges answers, `work` keeps the
learner's files, `progress` remembers, `interview` asks questions, `notebooks` and `page` write the exercises elsewhere.
"""

from headwise.errors import OptionError, suggestion
from headwise.learn.course.card import card, structure
from headwise.learn.course.decoder import EXERCISES as DECODER
from headwise.learn.course.exercise import Exercise, Part
from headwise.learn.course.gpt import EXERCISES as GPT
from headwise.learn.course.grading import Grade, PartResult, grade
from headwise.learn.course.heads import EXERCISES as HEADS
from headwise.learn.course.inputs import EXERCISES as INPUTS
from headwise.learn.course.scores import EXERCISES as SCORES
from headwise.learn.course.work import train_and_write

EXERCISES = (*SCORES, *HEADS, *INPUTS, *DECODER, *GPT)

__all__ = [
    "EXERCISES",
    "Exercise",
    "Grade",
    "Part",
    "PartResult",
    "card",
    "find",
    "grade",
    "structure",
    "train_and_write",
]


def find(name: str) -> Exercise:
    """The exercise with this name, number or title.

    >>> find("mask").title, find("4").title
    ('The mask', 'The mask')
    """
    by_name = {str(number): exercise for number, exercise in enumerate(EXERCISES, 1)}
    by_name |= {exercise.title.lower(): exercise for exercise in EXERCISES}
    by_name |= {exercise.name: exercise for exercise in EXERCISES}
    wanted = name.strip().lower().lstrip("0")
    if wanted not in by_name:
        names = [exercise.name for exercise in EXERCISES]
        numbers = f" They are numbered 1 to {len(EXERCISES)}." if name.isdecimal() else ""
        raise OptionError(
            f"no exercise is called {name!r}.{numbers}{suggestion(name, names, 'headwise course --list')}"
        )
    return by_name[wanted]
