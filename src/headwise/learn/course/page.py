"""The course as one self-contained HTML page: every exercise with its skeleton, folded hints and folded answer."""

from collections.abc import Sequence
from html import escape
from string import Template

from headwise.learn.course.exercise import Exercise, Part
from headwise.learn.course.interview import QUESTIONS, Question, sizes
from headwise.view.static_page import static_page

STYLE = """
* { box-sizing: border-box; }
body { max-width: 54rem; }
h2 { margin: 2.6rem 0 .2rem; }
h2 small { font-weight: 400; color: var(--soft); font-size: .9rem; margin-left: .5rem; white-space: nowrap; }
nav ol { columns: 2; padding-left: 1.4rem; }
nav a { color: var(--mark); text-decoration: none; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: .84rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
details { margin: .3rem 0; }
details details { margin-left: 1.2rem; }
summary { cursor: pointer; color: var(--mark); }
code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; font-size: .88em; overflow-wrap: anywhere; }
@media (max-width: 40rem) { nav ol { columns: 1; } h2 small { display: block; margin: 0; } }
"""
BODY = Template("""
<h1>The course: from dot products to a decoder</h1>
<p>$count exercises, about $hours hours. Write the code in a file or a notebook and have it graded by what
it computes: any style passes. <code>headwise course</code> hands out the files, grades them, gives hints and saves your
progress.</p>
<nav><ol>$contents</ol></nav>
$exercises
<h2 id="interview">The interview</h2>
<p class="soft">Answer first, in words, then unfold. <code>headwise course --interview</code> asks, with a clock if you
like; its numbers are for 512 wide, 8 heads.</p>
$questions
""")


def course_page(exercises: Sequence[Exercise]) -> str:
    """The whole page."""
    body = BODY.substitute(
        count=len(exercises),
        hours=round(sum(exercise.minutes for exercise in exercises) / 60),
        contents="".join(f'<li><a href="#{e.name}">{escape(e.title)}</a></li>' for e in exercises),
        exercises="\n".join(_exercise(number, exercise) for number, exercise in enumerate(exercises, 1)),
        questions="\n".join(map(_question, QUESTIONS)),
    )
    return static_page("The course: from dot products to a decoder", STYLE, body)


def _exercise(number: int, exercise: Exercise) -> str:
    stars = "●" * exercise.difficulty + "○" * (5 - exercise.difficulty)
    return (
        f'<h2 id="{exercise.name}">{number}. {escape(exercise.title)} <small>{stars} about {exercise.minutes} minutes'
        f"</small></h2>\n<p>{escape(exercise.idea)}</p>\n<pre>{escape(exercise.skeleton)}</pre>\n"
        + "\n".join(map(_part, exercise.parts))
        + f"\n<details><summary>A model answer</summary><pre>{escape(exercise.solution)}</pre></details>"
        + f'\n<p class="soft">{escape(exercise.more)}</p>'
    )


def _part(part: Part) -> str:
    line = f"<details><summary>The line</summary><p><code>{escape(part.line)}</code></p></details>"
    idea = f"<details><summary>The idea</summary><p>{escape(part.idea)}</p>{line}</details>"
    return f"<details><summary>Hint: {escape(part.name)}</summary><p>{escape(part.question)}</p>{idea}</details>"


def _question(question: Question) -> str:
    points = "".join(f"<li>{escape(point.name)}</li>" for point in question.points)
    listed = f"<p>A good answer says:</p><ul>{points}</ul>" if points else ""
    tag = "pre" if question.code else "p"
    answer = f"<{tag}>{escape(question.answer(sizes()))}</{tag}>"
    return f"<details><summary>{escape(question.question)}</summary>{answer}{listed}</details>"
