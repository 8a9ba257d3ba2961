"""The interview: model answers make their own points, numbers are those of the layer, the clock stops."""

import io
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from headwise.cli import course, main
from headwise.learn.course.interview import D_MODEL, HEADS, QUESTIONS, find_question, sizes
from interview_answers import HELD_OUT, SAID

SPOKEN = [question for question in QUESTIONS if not question.code]


@pytest.mark.parametrize("question", SPOKEN, ids=lambda q: q.name)
def test_the_model_answer_makes_every_point(question):
    assert {found.state for found in question.judge(question.answer(sizes())).values()} == {"said"}
    assert {found.state for found in question.judge("I do not know.").values()} == {"missing"}


def states(said):
    """How often sentences that make a point, and sentences that do not, are called what."""
    counts = {"right": Counter(), "wrong": Counter()}
    for question in SPOKEN:
        for point, (right, wrong) in zip(question.points, said[question.name], strict=True):
            counts["right"].update(point.found_in(sentence).state for sentence in right)
            counts["wrong"].update(point.found_in(sentence).state for sentence in wrong)
    return counts


def test_sentences_that_the_patterns_were_written_with_are_told_apart():
    found = states(SAID)
    assert found["right"] == {"said": 74}
    assert found["wrong"]["said"] == 0


def test_what_sentences_of_others_are_called_is_what_the_document_says():
    found = states(HELD_OUT)
    right, wrong = found["right"], found["wrong"]
    told = (
        f"{right['said']} of {right.total()} right sentences are recognized, {right['perhaps']} are shown as perhaps, "
        f"and {wrong['said']} of {wrong.total()} wrong ones is taken for right"
    )
    assert told in " ".join((Path(__file__).parents[3] / "docs" / "course.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize("text", ["1,050,624", "1050624.", "it is 1 050 624", "4·512² + 4·512 = 1_050_624"])
def test_numbers_are_judged_exactly(text):
    point = find_question("parameters").points[2]
    assert point.found_in(text).state == "said"
    assert point.found_in(text.replace("24", "23")).state == "wrong"
    assert point.found_in("about 1.05 million").state == "perhaps"
    assert point.found_in("The weights are 1,048,576. The biases make it 1,050,624.").state == "said"


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
    assert json.loads(capsys.readouterr().out)["said"] == ["large scores saturate the softmax"]


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
    assert "Found in your words: 2 of 8 points" in out
    assert course.ask_all(chosen, clock=1e-9) == 0
    assert "The time is over." in capsys.readouterr().out
