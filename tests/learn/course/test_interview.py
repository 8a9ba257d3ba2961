"""The interview: model answers make their own points, numbers are those of the layer, the clock stops."""

import io
import json
import sys

import pytest
import torch

from headwise.cli import course, main
from headwise.learn.course.interview import D_MODEL, HEADS, QUESTIONS, find_question, sizes

SPOKEN = [question for question in QUESTIONS if not question.code]


@pytest.mark.parametrize("question", SPOKEN, ids=lambda q: q.name)
def test_the_model_answer_makes_every_point(question):
    assert question.judge(question.answer(sizes()))[1] == []
    assert question.judge("I do not know.")[0] == []


def test_follow_ups_exist_and_the_issue_of_every_document_is_asked():
    names = {question.name for question in QUESTIONS}
    assert {"parameters", "flops", "memory", "several-heads", "root", "grouped", "cache", "complexity"} <= names
    assert {name for question in QUESTIONS for name in question.follow_ups} <= names


def test_parameters_are_those_of_a_real_layer():
    layer = torch.nn.MultiheadAttention(D_MODEL, HEADS)
    count = sum(p.numel() for p in layer.parameters())
    assert f"{count:,}" in find_question("parameters").answer(sizes())


def test_an_answer_in_words_is_judged_point_by_point(capsys):
    assert main(["course", "--interview", "root", "--answer", "The scores saturate the softmax."]) == 1
    out = capsys.readouterr().out
    assert "✓ large scores saturate the softmax" in out
    assert "· then the gradients vanish" in out
    assert "Model answer: " in out
    assert "Follow-up (several-heads): " in out
    assert main(["course", "--interview", "root", "--answer", "they saturate", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["made"] == ["large scores saturate the softmax"]


def test_an_answer_in_code_goes_to_the_checker(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("import torch\n\nclass MultiHeadAttention(torch.nn.Module):\n    pass\n")
    assert main(["course", "--interview", "code", "--answer", str(path)]) == 1
    assert "the constructor is not the assignment's" in capsys.readouterr().out
    assert main(["course", "--interview", "code", "--answer", "absent.py"]) == 2
    capsys.readouterr()
    assert main(["course", "--interview", "code", "--answer", ""]) == 0
    shown = capsys.readouterr().out
    path.write_text(shown[shown.index("import math") : shown.index("Follow-up")])
    assert main(["course", "--interview", "code", "--answer", str(path)]) == 0, "the model answer is right"


def test_the_interview_asks_until_the_time_is_over(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("They saturate.\nGradients vanish.\n\nno idea\n\n"))
    chosen = (find_question("root"), find_question("mask"))
    assert course.ask_all(chosen, clock=5.0) == 0
    out = capsys.readouterr().out
    assert "[5 min left]" in out
    assert "Your answers made 2 of 8 points" in out
    assert course.ask_all(chosen, clock=1e-9) == 0
    assert "The time is over." in capsys.readouterr().out
