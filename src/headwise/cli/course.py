"""`headwise course`: exercises from dot products to a decoder, and the interview."""

import argparse
import sys
from pathlib import Path

from headwise.check.report import wrapped
from headwise.cli import quiz
from headwise.cli.console import add_json, columns, late_status, paragraph, print_json, write_file
from headwise.errors import OptionError
from headwise.learn.course import EXERCISES, Exercise, Grade, card, find
from headwise.learn.course.comparison import compared
from headwise.learn.course.grading import WAITING, PartResult
from headwise.learn.course.notebooks import as_json, course_notebook
from headwise.learn.course.page import course_page
from headwise.learn.course.progress import Progress, default_path
from headwise.learn.course.trial import UNWRITTEN
from headwise.learn.course.work import UNREADABLE, Workspace, grade_file
from headwise.learn.quiz import EXERCISES as FAULTY
from headwise.learn.quiz import Quiz

EXAMPLES = """examples:
  headwise course
  headwise course --list
  headwise course --card
  headwise course 4 --hint
  headwise course --interview --list
  headwise course --html course.html
  headwise course --notebook course.ipynb
"""
NO_OPTIONS = {"skip": False, "restore": False}  # of the quiz, which has them as a verb of its own
LEVELS = {1: "a question", 2: "the idea", 3: "the line"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("exercise", nargs="?", help="its number or name (default: the first that is not solved)")
    parser.add_argument("--folder", type=Path, default=Path("course"), help="folder for your files")
    parser.add_argument(
        "--progress",
        type=Path,
        metavar="FILE",
        help="keep the progress in this file; default: one file of yours, whatever the folder",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the exercises and how far you are, or the questions of the interview"
    )
    parser.add_argument("--hint", action="store_true", help="a hint for the next step: a question, the idea, the line")
    parser.add_argument("--solution", action="store_true", help="compare your file with the model answer, after a try")
    parser.add_argument("--report", action="store_true", help="also print the checker's whole report")
    parser.add_argument(
        "--interview", nargs="?", const="", metavar="QUESTION", help="answer interview questions: all, or one by name"
    )
    parser.add_argument("--answer", metavar="TEXT", help="your answer in words, or a file with code, to one question")
    parser.add_argument("--clock", type=float, metavar="MINUTES", help="stop the interview after this time")
    parser.add_argument(
        "--quiz", action="store_true", help="find and fix mistakes: headwise quiz, in the folder of the course"
    )
    parser.add_argument("--card", action="store_true", help="the reference card: shapes, formulas, reasons, checklist")
    parser.add_argument("--notebook", type=Path, metavar="FILE", help="write all exercises as a Jupyter notebook")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write all exercises as one page")
    add_json(parser, "text")


def run(options: argparse.Namespace) -> int:
    """Hand out, grade, hint, compare or ask. Exit status: 0 right or nothing to grade, 1 not right, 2 wrong usage."""
    if options.card:
        print(card())
        return 0
    if options.notebook is not None:
        write_file("--notebook", options.notebook, as_json(course_notebook(EXERCISES)), sys.stdout)
        return 0
    if options.html is not None:
        write_file("--html", options.html, course_page(EXERCISES), sys.stdout)
        return 0
    _check_options(options)
    if options.interview is not None:
        from headwise.cli.interview import interview

        return interview(options)
    if options.quiz:
        return quiz.run(argparse.Namespace(**vars(options) | {"folder": _quiz_folder(options), **NO_OPTIONS}))
    progress, space = Progress(options.progress), Workspace(options.folder, EXERCISES)
    if options.list or (options.json and options.exercise is None):
        outside = quiz.FOLDER if quiz.FOLDER.is_dir() else None
        other = None if outside is None else Quiz(outside)
        return listed(progress, Quiz(_quiz_folder(options)), other, as_json=options.json)
    exercise = _current(progress) if options.exercise is None else find(options.exercise)
    if exercise is None:
        print(f"All {len(EXERCISES)} exercises are solved. Next: headwise course --interview, or headwise quiz.")
        return 0
    if options.hint:
        return hinted(progress, space, exercise)
    if options.solution:
        return solution(progress, space, exercise)
    is_new = not space.folder.exists()
    if space.lay_out(exercise) or not space.touched(exercise):
        if is_new:
            _say_progress(progress, space)
        return introduced(space, exercise)
    return judged(progress, space, exercise, options)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse what would be ignored: options of the interview without it, and options given as exercises."""
    for name in ("answer", "clock"):
        if getattr(options, name) is not None and options.interview is None:
            raise OptionError(f"--{name} is for the interview. Add --interview, or --interview and a question's name.")
    if options.exercise in ("interview", "quiz", "card", "list"):
        raise OptionError(f"{options.exercise} is an option. Did you mean headwise course --{options.exercise}?")


def _quiz_folder(options: argparse.Namespace) -> Path:
    return Path(options.folder) / "quiz"


def _current(progress: Progress) -> Exercise | None:
    return next((exercise for exercise in EXERCISES if progress.of(exercise).solved is None), None)


def _say_progress(progress: Progress, space: Workspace) -> None:
    """Say in a new folder what was solved in others."""
    solved = sum(record.solved is not None for record in progress.records.values())
    if solved:
        paragraph(
            f"Solved before, in another folder: {solved} of {len(EXERCISES)}. Progress is kept in {progress.path}. To "
            f"begin anew here: headwise course --folder {space.folder} --progress {space.folder}/progress.json"
        )
        print()


def introduced(space: Workspace, exercise: Exercise) -> int:
    """Print what the exercise is about and where its file is."""
    number = space.number(exercise)
    stars = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
    print(f"{number}. {exercise.title}   {stars}   about {exercise.minutes} minutes\n")
    paragraph(exercise.idea)
    print(f"\nWrite it in {space.path(exercise)}, then run: headwise course {number}")
    paragraph("Steps: " + "; ".join(part.name for part in exercise.parts) + ".")
    return 0


def judged(progress: Progress, space: Workspace, exercise: Exercise, options: argparse.Namespace) -> int:
    """Grade the file, and hand out the next exercise if it is right."""
    text, found = space.written(exercise), _graded(space, exercise)
    number = space.number(exercise)
    if found.results[0].words == UNREADABLE and not options.json:
        paragraph(found.note)
        print(f"Nothing is graded before Python can read it. Then: headwise course {number}")
        return 1
    progress.add(exercise, found, text)
    if options.json:
        print_json({"exercise": exercise.name, "right": found.right, "share": found.share, **found.to_dict()})
        return 0 if found.right else 1
    show(found)
    if options.report and found.report:
        print()
        for line in (part for whole in found.report.splitlines() for part in wrapped(whole, columns(sys.stdout, 80))):
            print(line)
    if not found.right:
        print(f"\nA hint: headwise course {number} --hint")
        return 1
    print()
    paragraph(exercise.more)
    print(f"Compare with the model answer: headwise course {number} --solution")
    following = _current(progress)
    if options.exercise is None and following is not None:
        space.lay_out(following)
        print()
        return introduced(space, following)
    return 0


def _graded(space: Workspace, exercise: Exercise) -> Grade:
    with late_status() as progress_shown:
        return grade_file(exercise, space.path(exercise), lambda words: progress_shown(f"grading: {words}"))


def show(found: Grade) -> None:
    """Print the grade: one sentence, then every step."""
    if found.note:
        paragraph(found.note)
    paragraph(found.sentence())
    for result in found.results:
        paragraph(f"  {'✓' if result.right else '·'} {result.name}{_reason(result, found.next)}", "    ")


def _reason(result: PartResult, told: PartResult | None) -> str:
    """Why a step is not right, unless the sentence above has told it."""
    if result.right or (told is not None and result.words == told.words):
        return ""
    if result.words == UNWRITTEN:
        return " (not written yet)"
    return f" ({result.words})" if result.words in WAITING else f": {result.words}"


def hinted(progress: Progress, space: Workspace, exercise: Exercise) -> int:
    """Print the next hint for the next step, or that there is no next step."""
    space.lay_out(exercise)
    number, text = space.number(exercise), space.written(exercise)
    if space.touched(exercise) and not progress.knows(exercise, text):  # written since the last try
        found = _graded(space, exercise)
        if found.results[0].words == UNREADABLE:
            paragraph(found.note)
            return 0
        progress.place(exercise, found, text)
    record = progress.of(exercise)
    if record.seen is not None and record.next is None:
        following = _current(progress)
        print(f"{number}. {exercise.title} is solved: nothing is left to hint at.")
        print("All exercises are solved." if following is None else f"Next: headwise course {space.number(following)}")
        return 0
    if record.error is not None:
        paragraph(f"Your last try stopped with an error, so repair that first: {record.error}.")
    part, level = progress.hint(exercise)
    paragraph(f"{number}. {exercise.title}, {part.name}: {LEVELS[level]} (hint {level} of 3)")
    if level < len(LEVELS):
        paragraph(part.hint(level), "  ")
        return 0
    print(f"  {part.hint(level)}")  # code stays on its line
    print(f"There are no more hints for this step. After a try: headwise course {number} --solution")
    return 0


def solution(progress: Progress, space: Workspace, exercise: Exercise) -> int:
    """Compare the learner's file with the model answer."""
    record, path = progress.of(exercise), space.path(exercise)
    if not record.tries or not path.is_file():
        number = space.number(exercise)
        raise OptionError(f"try exercise {number} first: edit {path} and run `headwise course {number}`.")
    progress.look(exercise)
    print(compared(exercise, path.read_text(encoding="utf-8", errors="replace")))
    return 0


def listed(progress: Progress, repaired: Quiz, other: Quiz | None = None, *, as_json: bool) -> int:
    """Print every exercise and how far the learner is; `other` is the quiz outside the folder of the course."""
    if as_json:
        fields = ("name", "title", "difficulty", "minutes")
        rows = [{field: getattr(exercise, field) for field in fields} for exercise in EXERCISES]
        found = {"exercises": rows, "progress": progress.to_dict(), "saved": str(progress.path)}
        print_json(found | {"quiz": repaired.to_dict()})
        return 0
    for number, exercise in enumerate(EXERCISES, 1):
        record = progress.of(exercise)
        tries = f", {record.tries} {'try' if record.tries == 1 else 'tries'}" if record.tries else ""
        state = f"solved{tries}" if record.solved else f"{record.best:.0%}{tries}" if record.tries else ""
        stars = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
        print(f"{number:>3}  {exercise.title:<26} {stars}  {exercise.minutes:>2} min  {state}".rstrip())
    print(f"\nquiz  {len(repaired.solved)} of {len(FAULTY)} classes repaired: headwise course --quiz")
    if other is not None:
        print(f"      {len(other.solved)} in {other.folder}: headwise quiz")
    print("Then: headwise course --interview")
    if progress.path == default_path():
        print()
        paragraph(f"Your progress, in any folder, is kept in {progress.path}")
        print("(another course beside it: headwise course --folder DIR --progress FILE)")
    else:
        print(f"\nThis progress is kept in {progress.path}")
    return 0
