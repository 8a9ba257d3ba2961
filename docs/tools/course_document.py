"""Writes the tables and exercises of docs/course.md from the course itself: python docs/tools/course_document.py"""

from pathlib import Path

from headwise.learn.course import EXERCISES, Exercise
from headwise.learn.course.interview import QUESTIONS, sizes

PAGE = Path(__file__).parents[1] / "course.md"
BEGIN, END = "<!-- exercises -->", "<!-- end of exercises -->"


def exercises() -> str:
    """The table of exercises, then every exercise, then the interview."""
    head = ["| | exercise | difficulty | minutes | steps that are graded |", "|---|---|---|---|---|"]
    rows = [
        f"| {number} | [{e.title}](#{anchor(number, e)}) | {stars(e)} | {e.minutes} | "
        f"{', '.join(part.name for part in e.parts)} |"
        for number, e in enumerate(EXERCISES, 1)
    ]
    parts = [_exercise(number, exercise) for number, exercise in enumerate(EXERCISES, 1)]
    return "\n".join([*head, *rows, "", *parts, *_interview()])


def stars(exercise: Exercise) -> str:
    """The difficulty as filled circles."""
    return "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)


def anchor(number: int, exercise: Exercise) -> str:
    """The address of an exercise on the page."""
    return f"{number}-{exercise.title.lower().replace(' ', '-')}"


def _exercise(number: int, exercise: Exercise) -> str:
    hints = "\n".join(
        f"- *{part.name}*: {part.question} <details><summary>the idea</summary>{_html(part.idea)} "
        f"<details><summary>the line</summary><code>{_html(part.line)}</code></details></details>"
        for part in exercise.parts
    )
    return (
        f"## {number}. {exercise.title}\n\n{stars(exercise)}, about {exercise.minutes} minutes\n\n{exercise.idea}\n\n"
        f"<!-- not run: a skeleton for the reader -->\n```python\n{_body(exercise.skeleton)}```\n\n{hints}\n\n"
        f"<details><summary>A model answer</summary><pre>{_html(_body(exercise.solution))}</pre></details>\n"
    )


def _interview() -> list[str]:
    lines = ["## The interview", ""]
    for question in QUESTIONS:
        points = "".join(f"<li>{_html(point.name)}</li>" for point in question.points)
        listed = f"<ul>{points}</ul>" if points else ""
        answer = _html(question.answer(sizes()))
        answer = f"<pre>{answer}</pre>" if question.code else answer
        lines.append(f"<details><summary>{_html(question.question)}</summary>{answer}{listed}</details>")
    return lines


def _body(source: str) -> str:
    return source.split('"""', 2)[2].lstrip("\n")


def _html(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def page(text: str) -> str:
    """The page with its generated part renewed."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{exercises()}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
