"""`headwise quiz`: find the mistake."""

import argparse
import json
from pathlib import Path

from headwise.check import MISTAKES, sandbox
from headwise.cli.check import show
from headwise.cli.terminal import console
from headwise.learn.quiz import EXERCISES, Exercise, Quiz

SUMMARY = "find the mistake: classes to repair, judged by the checker"
EXAMPLES = """examples:
  headwise quiz
  headwise quiz --hint
  headwise quiz --list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--folder", type=Path, default=Path("quiz"), help="where exercises are written (default quiz)")
    parser.add_argument("--hint", action="store_true", help="where to look in the current exercise")
    parser.add_argument("--skip", action="store_true", help="leave the current exercise out")
    parser.add_argument("--list", action="store_true", help="what is solved and what is left")
    parser.add_argument("--json", action="store_true", help="print the progress as one JSON object")


def run(options: argparse.Namespace) -> int:
    """Write the first exercise, or judge the current one and write the next. Exit 0 solved, 1 not yet, 2 not judged."""
    quiz = Quiz(options.folder)
    exercise = quiz.current
    if options.json:
        print(json.dumps({**quiz.to_dict(), "exercises": len(EXERCISES)}))
        return 0
    if options.list:
        return listed(quiz)
    if exercise is not None and options.skip:
        quiz.skip(exercise)
        exercise = quiz.current
    if exercise is None:
        print(f"All {len(EXERCISES)} exercises are done, {len(quiz.skipped)} of them skipped.")
        return 0
    if quiz.lay_out(exercise) or options.skip:
        return begun(quiz, exercise)
    if options.hint:
        print(f"Exercise {exercise.number}: {MISTAKES[exercise.mistake].hint}")
        return 0
    return judged(quiz, exercise) if quiz.touched(exercise) else begun(quiz, exercise)


def begun(quiz: Quiz, exercise: Exercise) -> int:
    """Say where the exercise lies."""
    print(f"Exercise {exercise.number} of {len(EXERCISES)} is in {exercise.path(quiz.folder)}: one thing is wrong.")
    print("Repair it and run `headwise quiz` again; `headwise quiz --hint` says where to look.")
    return 0


def judged(quiz: Quiz, exercise: Exercise) -> int:
    """What the checker says, and the next exercise if it is content."""
    print(f"judging {exercise.path(quiz.folder)} ...")
    report = quiz.judge(exercise, sandbox.run)
    if report.exit_code != 0:
        show(report)
        return int(report.exit_code)
    mistake = MISTAKES[exercise.mistake]
    print(f"Right. It was: {mistake.title}. {mistake.why}")
    following = quiz.current
    if following is None:
        print("That was the last one.")
        return 0
    quiz.lay_out(following)
    return begun(quiz, following)


def listed(quiz: Quiz) -> int:
    """A line per exercise; of those to come only the number."""
    out = console()
    for exercise in EXERCISES:
        name = exercise.mistake
        tries = f", {quiz.tries[name]} tries" if quiz.tries.get(name, 0) > 1 else ""
        state = "solved" if name in quiz.solved else "skipped" if name in quiz.skipped else "to do"
        told = f": {MISTAKES[name].title}" if state != "to do" else ""
        out.print(f"{exercise.number:>3}  {state}{tries}{told}", markup=False)
    return 0
