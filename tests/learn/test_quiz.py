"""The quiz: every exercise is a wrong class that the checker names, and repairing it is progress."""

import json
import re

import pytest

from headwise import check
from headwise.check import MISTAKES
from headwise.check.templates import write
from headwise.cli import main
from headwise.learn.quiz import ANY_QUESTION, EXERCISES, QUESTIONS, Quiz


@pytest.mark.parametrize("exercise", EXERCISES[::5], ids=lambda x: x.mistake)
def test_an_exercise_is_wrong_by_its_own_mistake(exercise):
    names = {}
    exec(exercise.source(), names)  # noqa: S102
    kind = [x for x in names.values() if isinstance(x, type) and x.__module__ not in ("torch.nn", "math")][-1]
    report = check(kind)
    assert report.verdict == "wrong"
    assert exercise.mistake in [finding.name for finding in report.findings]


def test_there_is_an_exercise_for_most_mistakes_and_names_do_not_tell():
    assert len(EXERCISES) >= 20
    assert [exercise.number for exercise in EXERCISES] == list(range(1, len(EXERCISES) + 1))
    for exercise in EXERCISES:
        assert exercise.mistake not in exercise.source()


def pasted_for(exercise):
    """A right class in another style."""
    return write(next(style for style in ("separate", "fused", "listed") if style != exercise.style))


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda x: x.mistake)
def test_only_the_repaired_class_itself_is_accepted(exercise):
    assert exercise.replaced(exercise.source()) is None
    assert exercise.replaced(write(exercise.style)) is None
    assert "it is not the one from the exercise" in exercise.replaced(pasted_for(exercise))


def test_a_right_class_below_the_broken_one_does_not_count(tmp_path, capsys):
    exercise, arguments = EXERCISES[0], ["quiz", "--folder", str(tmp_path)]
    right = write(exercise.style)
    assert "is defined once more below it" in exercise.replaced(f"{exercise.source()}\n{right}")
    renamed = right.replace(f"class {exercise.judged}", "class GoodAttention")
    assert "once more" in exercise.replaced(f"{exercise.source()}\n{renamed}\n{exercise.judged} = GoodAttention\n")
    assert exercise.replaced(f"{right}\ndef helper():\n    pass\n") is None, "other definitions do no harm"
    assert main(arguments) == 0
    exercise.path(tmp_path).write_text(f"{exercise.source()}\n{renamed}")
    assert main(arguments) == 1
    assert "the mistake is still there" in capsys.readouterr().out
    exercise.path(tmp_path).write_text(renamed)
    assert main(arguments) == 0, "the class itself, repaired and renamed"


def test_neighbors_have_different_kinds_of_mistakes():
    kinds = [exercise.mistake.partition("-")[0] for exercise in EXERCISES]
    for place in range(len(kinds) - 3):
        assert len(set(kinds[place : place + 4])) == 4
    assert {exercise.style for exercise in EXERCISES[:6]} >= {"separate", "fused", "listed"}


def triples(text):
    """Three words in a row, by which a question would give the answer away."""
    words = re.findall(r"[\w√]+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))


def test_a_mistake_without_a_question_gets_a_general_one(monkeypatch):
    monkeypatch.delitem(QUESTIONS, EXERCISES[0].mistake)
    assert EXERCISES[0].hint(1) == ANY_QUESTION


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda x: x.mistake)
def test_hints_go_from_a_question_to_the_line(exercise):
    question, idea, line = (exercise.hint(level) for level in (1, 2, 3))
    assert question == QUESTIONS[exercise.mistake]
    assert question.endswith("?")
    mistake = MISTAKES[exercise.mistake]
    assert not triples(question) & (triples(mistake.title) | triples(mistake.hint) | triples(mistake.why))
    assert idea == mistake.hint
    number = int(re.match(r"Look at lines? (\d+)", line)[1])
    wrong = exercise.source().splitlines()[number - 1]
    assert wrong.strip()
    if line.startswith("Look at line "):
        assert line.endswith(f": {wrong.strip()}")


def test_the_line_is_the_one_of_the_file_as_it_is_now():
    exercise = EXERCISES[0]
    (number,) = exercise.lines(exercise.source())
    assert "sqrt(batch)" in exercise.source().splitlines()[number - 1]
    assert exercise.lines("# a note\n# another\n" + exercise.source()) == [number + 2]
    assert exercise.lines(exercise.source().replace("sqrt(batch)", "sqrt(self.head_dim)")) == []


def test_nothing_in_a_class_shows_where_a_line_was_taken_out():
    for exercise in EXERCISES:
        assert not re.search(r"(?m)^ *(pass|(\w+) = \2)$", exercise.source()), exercise
        compile(exercise.source(), "exercise", "exec")


def test_the_way_through(tmp_path, capsys):
    folder = tmp_path / "quiz"
    arguments = ["quiz", "--folder", str(folder)]
    assert main(arguments) == 0
    assert "exercise_01.py: one thing is wrong" in capsys.readouterr().out
    assert main([*arguments, "--hint"]) == 0
    assert "Exercise 1, hint 1 of 3: Compute a sample alone, then together with others." in capsys.readouterr().out
    assert main(arguments) == 0
    assert "one thing is wrong" in capsys.readouterr().out, "nothing is given away before it was tried"
    assert main([*arguments, "--report"]) == 1
    assert "scores are scaled by the batch size" in capsys.readouterr().out, "the report is printed if it is asked for"
    (folder / "exercise_01.py").write_text(EXERCISES[0].source() + "\n# a try\n")
    assert main(arguments) == 1, "not repaired yet"
    shown = capsys.readouterr().out
    assert "Not yet: the mistake is still there." in shown
    assert "batch" not in shown
    assert main([*arguments, "--report"]) == 1
    assert "scores are scaled by the batch size" in capsys.readouterr().out
    source = EXERCISES[0].source()
    (folder / "exercise_01.py").write_text(source.replace("sqrt(batch)", "sqrt(self.head_dim)").replace("=-1", "=-2"))
    assert main(arguments) == 1, "another mistake was made"
    shown = " ".join(capsys.readouterr().out.split())
    assert "Not yet: now something else is wrong: the softmax runs over the wrong axis" in shown
    assert "NEXT" not in shown, "the report is printed only if it is asked for"
    (folder / "exercise_01.py").write_text(pasted_for(EXERCISES[0]))
    assert main(arguments) == 1, "a right class that is not this one"
    assert "it is not the one from the exercise: " in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--restore"]) == 0
    assert (folder / "exercise_01.py").read_text() == EXERCISES[0].source()
    capsys.readouterr()
    (folder / "exercise_01.py").write_text(write(EXERCISES[0].style))
    assert main(arguments) == 0
    assert "Right. It was: " in capsys.readouterr().out
    assert (folder / "exercise_02.py").is_file()
    assert main([*arguments, "--skip"]) == 0
    assert f"was: {MISTAKES[EXERCISES[1].mistake].title}" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["solved"] == [EXERCISES[0].mistake]
    assert told["skipped"] == [EXERCISES[1].mistake]
    assert told["tries"] == {EXERCISES[0].mistake: 4}
    assert main([*arguments, "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("  1  solved, 4 tries: ")
    assert shown[2] == "  3  to do"


def test_the_end_is_said(tmp_path, capsys):
    quiz = Quiz(tmp_path)
    while (exercise := quiz.current) is not None:
        quiz.skip(exercise)
    assert main(["quiz", "--folder", str(tmp_path)]) == 0
    assert f"All {len(EXERCISES)} exercises are done" in capsys.readouterr().out


def test_a_damaged_progress_file_is_named(tmp_path, capsys):
    (tmp_path / "progress.json").write_text("{}")
    assert main(["quiz", "--folder", str(tmp_path)]) == 2
    assert "progress.json cannot be read" in capsys.readouterr().err
