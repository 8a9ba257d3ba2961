"""Code that is printed fits into 80 columns and still is the same code."""

import ast

import pytest

from headwise.check.assignment.comparison import find_assignment
from headwise.cli import main
from headwise.cli.source import fitted
from headwise.learn.course import EXERCISES

ASSIGNED = ("course", "interview", "handbook", "book")
SOURCES = {name: find_assignment(name, None).solution() for name in ASSIGNED}
SOURCES |= {exercise.name: exercise.solution for exercise in EXERCISES}


@pytest.mark.parametrize("name", SOURCES)
def test_folded_code_is_the_same_code(name):
    for width in (79, 50):
        assert ast.dump(ast.parse(fitted(SOURCES[name], width))) == ast.dump(ast.parse(SOURCES[name]))
    if name in ASSIGNED:  # exercises have longer docstrings, which stay as they are
        assert max(map(len, fitted(SOURCES[name]).splitlines())) <= 80


def test_strings_are_never_broken_and_comments_stand_above():
    line = 'raise ValueError(f"{a, b} and ({c}, d) are too long together", name)  # why, of course'
    assert fitted(line, 40) == (
        '# why, of course\nraise ValueError(\n    f"{a, b} and ({c}, d) are too long together",\n    name)'
    )
    assert fitted("a = b + c + d", 5) == "a = b + c + d", "nothing can be broken here"


def test_the_model_answer_of_the_interview_fits(capsys):
    main(["course", "--interview", "code", "--answer", ""])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
