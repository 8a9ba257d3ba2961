"""`headwise quiz`: find the mistake."""

import argparse
from pathlib import Path

from headwise.check import MISTAKES, Report, sandbox
from headwise.cli.check import show
from headwise.cli.console import add_json, console, paragraph, print_json
from headwise.learn.course.comparison import code_of
from headwise.learn.quiz import EXERCISES, FaultyClass, Quiz

EXAMPLES = """examples:
  headwise quiz
  headwise quiz --hint
  headwise quiz --list
"""


LAST_HINT = 3
FOLDER = Path("quiz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder for the exercises")
    parser.add_argument(
        "--hint", action="store_true", help="a hint for the current exercise: a question, the idea, the line"
    )
    parser.add_argument("--restore", action="store_true", help="bring back the file of the current exercise as it was")
    parser.add_argument("--report", action="store_true", help="print the checker's report, which names the mistake")
    parser.add_argument("--skip", action="store_true", help="skip the current exercise")
    parser.add_argument("--list", action="store_true", help="list solved and remaining exercises")
    add_json(parser, "text")


def run(options: argparse.Namespace) -> int:
    """Write the first exercise, or judge the current one and write the next. Exit 0 solved, 1 wrong, 2 not judged."""
    quiz = Quiz(options.folder)
    exercise = quiz.current
    if options.json:
        print_json({**quiz.to_dict(), "exercises": len(EXERCISES)})
        return 0
    if options.list:
        return listed(quiz)
    if exercise is not None and options.skip:
        quiz.skip(exercise)
        paragraph(f"Exercise {exercise.number} was: {_told(exercise)} See {exercise.place(exercise.source())}")
        exercise = quiz.current
    if exercise is None:
        print(f"All {len(EXERCISES)} exercises are done, {len(quiz.skipped)} of them skipped.")
        return 0
    if quiz.lay_out(exercise) or options.skip:
        return begun(quiz, exercise)
    if options.hint:
        level, words = quiz.hint(exercise)
        paragraph(f"Exercise {exercise.number}, hint {level} of 3: {words}")
        if level == LAST_HINT:
            paragraph(
                "There are no more hints: headwise quiz --report names the mistake, headwise quiz --skip moves on."
            )
        return 0
    if options.restore:
        quiz.restore(exercise)
        return begun(quiz, exercise)
    if not quiz.touched(exercise) and not options.report:
        return begun(quiz, exercise)
    print(f"checking {exercise.path(quiz.folder)} ...")
    is_named = f"class {exercise.judged}" in quiz.text(exercise)  # a class below it is not the answer
    report = sandbox.run(exercise.path(quiz.folder), name=exercise.judged if is_named else None)
    if options.report and report.exit_code != 0:  # to read a report is not a try
        return told(quiz, exercise, report)
    return judged(quiz, exercise, report)


def begun(quiz: Quiz, exercise: FaultyClass) -> int:
    """Print the path of the exercise."""
    print(f"Exercise {exercise.number} of {len(EXERCISES)} is in {exercise.path(quiz.folder)}: one thing is wrong.")
    print("Fix it and run `headwise quiz` again; `headwise quiz --hint` says where to look.")
    return 0


def judged(quiz: Quiz, exercise: FaultyClass, report: Report) -> int:
    """Say whether the answer is right, and hand out the next exercise if it is."""
    quiz.judge(exercise, lambda _: report)
    if report.exit_code != 0:
        still = _still(exercise, report, quiz.text(exercise))
        paragraph(f"Not yet: {still}. For help: headwise quiz --hint, or headwise quiz --report.")
        return int(report.exit_code)
    replaced = quiz.replaced(exercise)
    if replaced is not None:
        paragraph(replaced)
        return 1
    paragraph(f"Right. It was: {_told(exercise)}")
    following = quiz.current
    if following is None:
        print("That was the last one.")
        return 0
    quiz.lay_out(following)
    return begun(quiz, following)


def told(quiz: Quiz, exercise: FaultyClass, report: Report) -> int:
    """Print the checker's report, and the line to repair, which may be another than the one where it shows."""
    show(report)
    if exercise.mistake in [finding.name for finding in report.wrong]:
        paragraph(f"To repair it, look at {exercise.place(quiz.text(exercise))}")
    return int(report.exit_code)


def _told(exercise: FaultyClass) -> str:
    mistake = MISTAKES[exercise.mistake]
    return f"{mistake.title}. {mistake.why}"


def _has_code(answer: str) -> bool:
    """Whether a file holds more than blank lines, comments and docstrings; one that is not Python holds something."""
    try:
        return bool(code_of(answer))
    except SyntaxError:
        return True


def _still(exercise: FaultyClass, report: Report, answer: str) -> str:
    """What is wrong after a try, without naming the mistake of the exercise."""
    others = [finding for finding in report.wrong if finding.name != exercise.mistake]
    if len(others) < len(report.wrong):
        return "the mistake is still there"
    if not _has_code(answer):
        return "the file is empty (headwise quiz --restore brings back the class)"
    if not others:
        return "the checker cannot judge this file any more (headwise quiz --restore brings back the class)"
    where = "" if others[0].line is None else f" ({others[0].place})"
    return f"now something else is wrong: {others[0].title}{where}"


def listed(quiz: Quiz) -> int:
    """Print one line per exercise, without revealing those to come."""
    out = console()
    for exercise in EXERCISES:
        name = exercise.mistake
        tries = f", {quiz.tries[name]} tries" if quiz.tries.get(name, 0) > 1 else ""
        state = "solved" if name in quiz.solved else "skipped" if name in quiz.skipped else "to do"
        title = f": {MISTAKES[name].title}" if state != "to do" else ""
        out.print(f"{exercise.number:>3}  {state}{tries}{title}", markup=False)
    return 0
