"""`headwise course --interview`: asks, judges answers in code and words, and goes on to the follow-up questions."""

import argparse
import time
from pathlib import Path

from headwise.check import Report, check
from headwise.cli.check import show as show_report
from headwise.cli.console import can_ask, check_positive, paragraph, print_json
from headwise.cli.source import fitted
from headwise.errors import OptionError, suggestion
from headwise.learn.course.interview import QUESTIONS, Question, find_question, sizes
from headwise.learn.course.points import PointFound

LEAVE = ("q", "quit", "exit")
SIX_STEPS = "Six steps: project, split into heads, transpose, attend, concatenate, project."


def interview(options: argparse.Namespace) -> int:
    """Ask the questions, or judge one answer."""
    if options.clock is not None:
        check_positive("--clock", options.clock)
    asked = QUESTIONS if not options.interview else (_question(options.interview),)
    if options.answer is not None:
        if len(asked) > 1:
            raise OptionError("--answer is for one question. Name it: --interview root --answer '...'.")
        return answered(asked[0], options.answer, as_json=options.json)
    if options.json or options.list or not can_ask():
        return _print_questions(asked, as_json=options.json)
    return ask_all(asked, options.clock)


def _question(name: str) -> Question:
    question = find_question(name)
    if question is None:
        raise OptionError(f"no question is called {name!r}.{suggestion(name, [q.name for q in QUESTIONS])}")
    return question


def _print_questions(asked: tuple[Question, ...], *, as_json: bool) -> int:
    if as_json:
        cost = sizes()
        print_json([{"name": q.name, "question": q.question, "answer": q.answer(cost)} for q in asked])
        return 0
    for question in asked:
        paragraph(f"{question.name}: {question.question} ({question.minutes:g} min)")
    print("\nAnswer one: headwise course --interview NAME --answer 'words, or a file'.")
    print("An empty answer, --answer '', shows the model answer.")
    return 0


# In the terminal ----------------------------------------------------------------------------------------------------


class LeftError(Exception):
    """The candidate leaves the interview."""


class LateError(Exception):
    """A line was typed when the time was over."""


class Clock:
    """The time of an interview, in minutes; without a limit it never ends."""

    def __init__(self, limit: float | None = None) -> None:
        self.limit, self.begun = limit, time.monotonic()

    @property
    def taken(self) -> float:
        """How long it has been running."""
        return (time.monotonic() - self.begun) / 60

    @property
    def left(self) -> float | None:
        """How much time is left, if there is a limit."""
        return None if self.limit is None else self.limit - self.taken

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.left is not None and self.left <= 0

    def line(self) -> str:
        """One line that is typed; raises `LeftError` if it ends the interview, and `LateError` if it comes too late."""
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            raise LeftError from None
        if line.lower() in LEAVE:
            raise LeftError
        if self.is_over:
            raise LateError
        return line


def ask_all(asked: tuple[Question, ...], limit: float | None) -> int:
    """Ask in the terminal until time is up or the candidate leaves: each question, then its follow-ups."""
    print("Type ? for what a good answer says, and q to leave (or Ctrl-D).")
    clock, score = Clock(limit), PointCount()
    try:
        for question, is_follow_up in _in_order(asked):
            if clock.is_over:
                print("\nTime is up.")
                break
            _put(question, clock.left, is_follow_up=is_follow_up)
            if question.code:
                score.code = solved(question, clock)
            else:
                score.add(question, said(question, clock))
    except LateError:
        print("\nTime is up. What you typed last came too late and does not count.")
    except LeftError:
        print()
    print()
    paragraph(score.sentence(clock.taken))
    return 0


def _in_order(asked: tuple[Question, ...]) -> list[tuple[Question, bool]]:
    """The questions, each followed by its follow-ups that did not come before, and whether it is one."""
    order: list[tuple[Question, bool]] = []
    for question in asked:
        following = [found for name in question.follow_ups if (found := find_question(name)) is not None]
        known = [placed for placed, _ in order]
        order += [(new, new is not question) for new in (question, *following) if new not in known]
    return order


def _put(question: Question, left: float | None, *, is_follow_up: bool) -> None:
    time_left = "" if left is None else f"[{_minutes(left)} left] "
    print(f"\n{time_left}{'Follow-up ' if is_follow_up else ''}{question.name} ({question.minutes:g} min)")
    paragraph(question.question)


def _minutes(left: float) -> str:
    return f"{left:.0f} min" if left >= 1 else f"{60 * left:.0f} s"


def solved(question: Question, clock: Clock) -> str:
    """Whether the candidate's code is right, in words; a file can be repaired and named again."""
    print("The path of your file, or an empty line to see the model answer:")
    words = ""
    while path := read_path(clock):
        if answered(question, path, as_json=False, names_follow_ups=False) == 0:
            return "Your code is right. "
        words = "Your code is not right yet. "
        print("Repair it and type its path again, or an empty line to see the model answer:")
    answered(question, "", as_json=False, names_follow_ups=False)
    return words


def read_path(clock: Clock) -> str:
    """The path of a file that exists, on one line, or nothing."""
    while True:
        line = clock.line()
        if line == "?":
            print(SIX_STEPS)
        elif not line or Path(line).expanduser().is_file():
            return line and str(Path(line).expanduser())
        else:
            paragraph(
                f"There is no file {line!r}. Type its path again, an empty line for the model answer, or q to leave."
            )


def said(question: Question, clock: Clock) -> str:
    """The candidate's answer in words, after it was judged."""
    answer = read_words(question, clock)
    answered(question, answer, as_json=False, names_follow_ups=False)
    return answer


def read_words(question: Question, clock: Clock) -> str:
    """The answer that is typed, up to an empty line."""
    print("Your answer, then an empty line:")
    lines: list[str] = []
    while True:
        try:
            line = clock.line()
        except (LeftError, LateError):  # what was typed before counts
            if not lines:
                raise
            return "\n".join(lines)
        if line == "?":
            _hint(question)
        elif not line:
            return "\n".join(lines)
        else:
            lines.append(line)


def _hint(question: Question) -> None:
    print(f"A good answer makes {len(question.points)} points:")
    for point in question.points:
        paragraph(f"· {point.name}", "  ")


class PointCount:
    """What was answered so far."""

    def __init__(self) -> None:
        self.made, self.count, self.code = 0, 0, ""

    def add(self, question: Question, answer: str) -> None:
        """Count the points of an answer in words."""
        found = question.judge(answer).values()
        self.made, self.count = self.made + sum(point.state == "said" for point in found), self.count + len(found)

    def sentence(self, minutes: float) -> str:
        """The whole interview in words.

        >>> PointCount().sentence(0.2)
        'The interview took less than a minute.'
        """
        whole = round(minutes)
        took = "less than a minute" if minutes < 1 else f"{whole} minute{'' if whole == 1 else 's'}"
        words = f"Points found in your answers: {self.made} of {self.count}. " if self.count else ""
        return f"{self.code}{words}The interview took {took}."


# Judging ------------------------------------------------------------------------------------------------------------


def answered(question: Question, answer: str, *, as_json: bool, names_follow_ups: bool = True) -> int:
    """Say which points an answer makes, then the model answer and the follow-ups. Exit 0 if all were found, else 1."""
    if question.code and answer.strip():
        status = _code_answered(answer.strip(), as_json=as_json)
        if status and names_follow_ups and not as_json:
            print("The model answer: headwise course --interview code --answer ''")
    else:
        status = _words_answered(question, answer, as_json=as_json)
    for name in question.follow_ups if names_follow_ups and not as_json else ():
        following = find_question(name)
        if following is not None:
            paragraph(f"Follow-up ({name}): {following.question}")
    return status


def _words_answered(question: Question, answer: str, *, as_json: bool) -> int:
    found, model = question.judge(answer), question.answer(sizes())
    is_complete = all(point.state == "said" for point in found.values())
    if as_json:
        states = ("said", "rounded", "wrong", "missing")
        print_json(
            {"name": question.name, "answer": model}
            | {state: [name for name, point in found.items() if point.state == state] for state in states}
        )
        return 0 if is_complete else 1
    for name, point in found.items() if answer.strip() else ():
        paragraph(_judged(name, point), "  ")
    if answer.strip() and any(point.state == "missing" for point in found.values()):
        print("  (✓ found in your answer; · not found, but you may have said it in other words)")
    if question.code:
        print(f"Model answer:\n\n{fitted(model)}")
    else:
        paragraph(f"Model answer: {model}")
    return 0 if is_complete else 1


def _judged(name: str, point: PointFound) -> str:
    """One point, as it was found."""
    if point.state == "wrong":
        remark = point.remark and f" {point.remark}."
        return f"✗ You say: {point.words.strip().rstrip('.;:, ')}. The answer: {name}.{remark}"
    if point.state == "rounded":
        return f"? You say: {point.words}, which is rounded. The answer: {name}."
    return f"{'✓' if point.state == 'said' else '·'} {name}."


def _code_answered(answer: str, *, as_json: bool) -> int:
    path = Path(answer)
    if not path.is_file():
        raise OptionError(f"{answer}: this question is answered with a file of code; there is no such file.")
    report: Report = check(path, form="interview")
    if as_json:
        print_json(report.to_dict())
    else:
        show_report(report)
    return report.exit_code
