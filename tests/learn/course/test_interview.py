"""The interview: model answers make their own points, numbers are those of the layer, the clock stops."""

import io
import json
import sys
from collections import Counter

import pytest
import torch

from headwise.cli import interview, main
from headwise.learn.course.interview import D_MODEL, HEADS, QUESTIONS, find_question, sizes
from interview_answers import SAID

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
    assert found["right"] == {"said": 421}
    assert set(found["wrong"]) == {"wrong", "missing"}


def test_no_right_sentence_is_called_wrong():
    for question in SPOKEN:
        for sentence in (sentence for right, _ in SAID[question.name] for sentence in right):
            assert "wrong" not in {found.state for found in question.judge(sentence).values()}, sentence


@pytest.mark.parametrize("text", ["1,050,624", "1050624.", "it is 1 050 624", "4·512² + 4·512 = 1_050_624"])
def test_numbers_are_judged_exactly(text):
    point = find_question("parameters").points[2]
    assert point.found_in(text).state == "said"
    assert point.found_in(text.replace("24", "23")).state == "wrong"
    assert point.found_in("about 1.05 million").state == "rounded"
    assert point.found_in("about 2 million").state == "wrong"
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


@pytest.mark.parametrize(
    "answer",
    [
        "8*n*d^2 + 4*n^2*d = 8*1024*512^2 + 4*1024^2*512 = 4,294,967,296",
        "8 T d^2 + 4 T^2 d, together 4.29 G",
        "8·L·E² for the projections, 4·L²·E for the attention: 2^32",
        "4 × 2 × T × d_model² plus 2 T² d plus 2 T² d = 4294967296",
    ],
)
def test_operations_are_recognized_in_any_spelling(answer, capsys):
    assert main(["course", "--interview", "flops", "--answer", answer]) == 0
    assert "·" not in capsys.readouterr().out.partition("Model answer")[0].replace("8·T·E²", "").replace("4·T²·E", "")


def test_parameters_may_be_arithmetic(capsys):
    said = find_question("parameters").judge("4*(512*512+512)")
    assert [found.state for found in said.values()] == ["said", "said", "said", "missing"]
    wrong = find_question("parameters").judge("4*512*512 + 512")["together 1,050,624"]
    assert wrong == ("wrong", "4*512*512 + 512", "")
    assert main(["course", "--interview", "parameters", "--answer", "3 * 512 * 513"]) == 1
    assert "✗ You say: 3 * 512 * 513. The answer: together 1,050,624." in capsys.readouterr().out


def test_the_interview_names_one_dtype_and_agrees_with_the_cost():
    assert "2 KiB in bfloat16" in find_question("cache").answer(sizes())
    assert "In bfloat16, MHA with 8: cache 2 KiB per token" in find_question("grouped").answer(sizes())


def typed(monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_the_interview_asks_until_the_time_is_over(capsys, monkeypatch):
    typed(monkeypatch, "They saturate.\nGradients vanish.\n\nno idea\n\n")
    chosen = (find_question("root"), find_question("mask"))
    assert interview.ask_all(chosen, 5.0) == 0
    out = capsys.readouterr().out
    assert "[5 min left]" in out
    assert interview._minutes(0.5) == "30 s"
    assert "Points found in your answers: 2 of 7. The interview took less than a minute." in out
    assert interview.ask_all(chosen, 1e-9) == 0
    assert "Time is up." in capsys.readouterr().out


def test_an_answer_that_is_typed_after_the_clock_does_not_count(tmp_path, capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(interview.time, "monotonic", lambda: now[0])
    lines = iter([(30, "They saturate the softmax."), (90, "Gradients vanish."), (91, "")])

    def late(_):
        now[0], line = next(lines)
        return line

    monkeypatch.setattr("builtins.input", late)
    assert interview.ask_all((find_question("root"), find_question("mask")), 1.0) == 0
    out = capsys.readouterr().out
    assert "✓ large scores saturate the softmax" in out, "what was typed in time counts"
    assert "✓ then the gradients vanish" not in out
    assert "Time is up." in out
    assert "Points found in your answers: 1 of 4." in out
    now[0], path = 0.0, tmp_path / "mine.py"
    path.write_text(find_question("code").answer(sizes()))
    lines = iter([(61, str(path))])
    interview.ask_all((find_question("code"),), 1.0)
    out = capsys.readouterr().out
    assert "What you typed last came too late and does not count." in out
    assert "Your code is right" not in out


def test_a_path_is_one_line_and_is_asked_again_until_the_file_exists(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text("import torch\n\nclass MultiHeadAttention(torch.nn.Module):\n    pass\n")
    typed(monkeypatch, f"{tmp_path / 'typo.py'}\n?\n{path}\n\nIt is quadratic in the length.\n\nq\n")
    assert interview.ask_all((find_question("code"),), 9.0) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"There is no file '{tmp_path / 'typo.py'}'." in out
    assert "Six steps: " in out
    assert "the constructor is not the assignment's" in out
    assert "Repair it and type its path again, or an empty line to see the model answer:" in out
    assert "Model answer: import math" in out
    assert "Follow-up complexity" in out
    assert "✓ the scores are quadratic in the length" in out
    assert "Your code is not right yet. Points found in your answers: 1 of 3." in out


@pytest.mark.parametrize("text", ["q\n", "quit\n", ""], ids=["q", "quit", "end of input"])
def test_leaving_is_possible_at_every_prompt(text, capsys, monkeypatch):
    for name in ("code", "root"):
        typed(monkeypatch, text)
        assert interview.ask_all((find_question(name),), None) == 0
        assert capsys.readouterr().out.endswith("\n\nThe interview took less than a minute.\n")


def test_a_question_mark_lists_the_points(capsys, monkeypatch):
    typed(monkeypatch, "?\nThey saturate.\n\n")
    interview.ask_all((find_question("root"),), None)
    out = capsys.readouterr().out
    assert "A good answer makes 4 points:" in out
    assert "✓ large scores saturate the softmax" in out


def test_a_question_and_its_follow_ups_come_once():
    order = [question.name for question, _ in interview._in_order(QUESTIONS)]
    assert sorted(order) == sorted(question.name for question in QUESTIONS)
    assert order == [question.name for question in QUESTIONS], "the list and the document have the same order"


@pytest.mark.parametrize(
    ("name", "answer", "wrong"),
    [
        ("several-heads", "More heads means more parameters", "the cost is the same"),
        ("several-heads", "It is eight times slower.", "the cost is the same"),
        ("cache", "We cache Q, K and V so that nothing is recomputed.", "keys and values of the past"),
        ("cache", "queries, keys and values are cached", "keys and values of the past"),
        ("root", "Divide by sqrt of d_model to normalise", "d is the width of a head"),
        ("root", "the model width", "d is the width of a head"),
        ("complexity", "O(n^2) in length and O(d) in width", "the projections are"),
        ("output-projection", "nothing, W_o is optional", "without it each output"),
        ("memory", "8*1024*1024*2 bytes = 64 MiB", "together 16 MiB"),
    ],
)
def test_a_clear_opposite_is_contradicted(name, answer, wrong):
    found = {point: made.state for point, made in find_question(name).judge(answer).items()}
    assert [point.startswith(wrong) for point, state in found.items() if state == "wrong"] == [True]


@pytest.mark.parametrize(
    ("name", "answer", "point", "state"),
    [
        ("cache", "2 KB per token", "its size", "said"),
        ("cache", "2*2*512 bytes = 2 KiB per token", "its size", "said"),
        ("cache", "We cache K and V, not Q.", "keys and values", "said"),
        ("complexity", "O(n^2) in length and O(d) in width", "the scores", "said"),
        ("root", "softmax gets peaky", "large scores", "said"),
        ("root", "sqrt(d_model) would be too large", "d is the width", "missing"),
        ("flops", "2.1 GMACs", "together", "said"),
        ("flops", "about 4.3 GFLOPs", "together", "said"),
        ("flops", "about 4.2 GFLOPs", "together", "wrong"),
        ("flops", "about 4 GFLOPs", "together", "rounded"),
        ("several-heads", "several let the model attend to different positions and kinds of info at the same time",
         "each head has", "said"),
        ("mask", "after softmax the future would already have been counted in the denominator", "after the", "said"),
        ("cache", "It takes memory growing linearly with the tokens.", "a new token", "missing"),
        ("cache", "The cache of each token adds memory that is O(T).", "a new token", "missing"),
        ("cache", "The key and value of a token are stored, growing linearly.", "a new token", "missing"),
        ("cache", "Memory cost is linear per token.", "a new token", "missing"),
        ("cache", "Memory grows linearly, the time of a step is O(T).", "a new token", "said"),
        ("cache", "O(T) per token instead of O(T²)", "a new token", "said"),
        ("cache", "linear time per step", "a new token", "said"),
        ("cache", "it makes the cost per token linear", "a new token", "said"),
        ("flops", "2,147,483,648 MACs", "together", "said"),
        ("several-heads", "One head has to pick one thing.", "the price", "missing"),
        ("output-projection", "W_o is not optional", "without it", "missing"),
    ],
)  # fmt: skip
def test_an_answer_in_other_words_is_found(name, answer, point, state):
    found = find_question(name).judge(answer)
    assert next(made.state for title, made in found.items() if title.startswith(point)) == state


def test_half_of_the_operations_is_right_if_a_multiply_add_counts_as_one(capsys):
    assert main(["course", "--interview", "flops", "--answer", "about 2.1 billion"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "You say: 2.1 billion. The answer: together 4,294,967,296, or 4.29 G. Yours is right if a multiply-add" in said
    )
    assert main(["course", "--interview", "flops", "--answer", "about 3.1 billion"]) == 1
    assert "Yours is right" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "answer", "said", "wrong"),
    [
        ("flops", "2.15 billion multiply-adds", ["together"], []),
        ("flops", "2.15 billion operations", [], ["together"]),
        ("flops", "4.29 billion multiply-adds", [], ["together"]),
        ("flops", "2^32", ["together"], []),
        ("flops", "8*1024*512*512", ["the projections", "a multiply-add"], []),
        ("flops", "the attention products take 2.15 G", ["the scores"], []),
        ("parameters", "1,050,624 for a head, so 8,404,992", [], ["together"]),
        ("cache", "2 MiB per token", [], ["its size"]),
        ("cache", "1 KB per token", [], ["its size"]),
        ("cache", "1 KB per token for keys, and 1 KB for values", [], []),
        ("cache", "64 KB per token for 32 layers", [], []),
        ("cache", "2 KiB for all tokens", [], []),
        ("cache", "4096 numbers per token", [], []),
        ("cache", "1024 numbers per token", ["its size"], []),
        ("cache", "2 KiB per token, so 2 MiB for 1024 tokens", ["its size"], []),
        ("memory", "16 MiB per head", [], []),
        ("memory", "FlashAttention avoids it", ["a fused"], []),
        ("memory", "FlashAttention writes the whole matrix to memory", [], ["a fused"]),
        ("grouped", "fewer queries are stored", [], ["several query", "the cache"]),
        ("complexity", "O(T E^2) for the scores and O(T^2 E) for the projections", [], ["the scores", "the proj"]),
        ("complexity", "The scores cost T·E², the projections cost T²·E.", [], ["the scores", "the projections"]),
        ("complexity", "projections: O(n^2 d); attention scores: O(n d^2)", [], ["the scores", "the projections"]),
        ("complexity", "O(T^2 E) for the scores and O(T E^2) for the projections", ["the scores", "the proj"], []),
        ("complexity", "projections: O(n d^2); attention scores: O(n^2 d)", ["the scores", "the projections"], []),
        ("memory", "a fused kernel doubles it because it stores the backward pass", [], ["a fused"]),
        (
            "memory",
            "a fused kernel needs twice the memory because it stores the weights for the backward pass",
            [],
            ["a fused"],
        ),
        ("cache", "2048 numbers per token, 4 KiB", [], []),
        ("cache", "1024 numbers per token, 2 KiB", ["its size"], []),
        ("flops", "2.15 GFLOPs for the projections", ["the projections"], []),
        ("flops", "2.1 GFLOP for the projections", ["the projections"], []),
    ],
)
def test_a_number_counts_for_what_it_is_said_of_in_its_own_unit(name, answer, said, wrong):
    found = find_question(name).judge(answer)
    for state, starts in (("said", said), ("wrong", wrong)):
        named = [title for title, made in found.items() if made.state == state]
        assert len(named) == len(starts), (state, named)
        assert all(title.startswith(start) for title, start in zip(named, starts, strict=True))


@pytest.mark.parametrize(
    ("name", "answer", "said", "wrong"),
    [
        ("root", "sqrt of the model dimension so that the weights sum to one", [], ["d is the width"]),
        ("root", "It is for making the softmax sharper.", [], []),
        ("root", "Large scores are making the softmax sharper.", ["large scores"], []),
        ("root", "The softmax needs numbers between 0 and 1, so divide the scores by the spread of d terms", [], []),
        ("root", "the head dimension, number of heads divided by d_model", [], ["d is the width"]),
        ("mask", "-1e9 is the same thing as minus infinity, zero after softmax would also be fine", [],
         ["after the softmax", "−1e9"]),
        ("mask", "-inf gives NaN everywhere so -1e9 is better, it is exactly zero in float16", [], ["a row without"]),
        ("flops", "2·1024·512·512·4 + 2·1024·1024·512", ["the projections", "a multiply-add"], ["together"]),
        ("flops", "each of the two products takes 2·1024·1024·512", ["the scores", "a multiply-add"], []),
        ("parameters", "8 * 4 * 512*512", [], ["together"]),
        ("parameters", "1,050,624, which doubles if you use 16 heads", ["together"], ["the number of heads"]),
        ("grouped", "fewer query heads, which speeds up the projection", [], ["several query"]),
        ("grouped", "several query heads share one K/V head -> smaller cache", ["several query", "the cache"], []),
        ("grouped", "every query head gets its own K/V head, the cache grows", [], ["several query", "the cache"]),
        ("complexity", "T^2 E + T E^2: with T = 2E they balance", ["the scores", "the projections", "which of"], []),
        ("cache", "its size does not depend on the sequence length", [], ["its size"]),
        ("cache", "its size per token does not depend on the sequence length", [], []),
    ],
)  # fmt: skip
def test_what_only_sounds_like_a_point_is_not_called_right(name, answer, said, wrong):
    found = find_question(name).judge(answer)
    for state, starts in (("said", said), ("wrong", wrong)):
        named = [title for title, made in found.items() if made.state == state]
        assert len(named) == len(starts), (state, named)
        assert all(title.startswith(start) for title, start in zip(named, starts, strict=True))


@pytest.mark.parametrize(
    ("name", "answer", "said", "wrong"),
    [
        ("flops", "2.1 G multiply-adds for projections plus 1 G for attention", [], ["together"]),
        ("flops", "2.15 G for the projections plus 2.15 G for the attention", ["the proj", "the scores", "tog"], []),
        ("flops", "1.07 G multiply-adds for the projections and 1.07 G for the scores", ["the proj", "together"], []),
        ("parameters", "four 512x512 matrices and four biases of 512", ["four matrices", "and four biases"], []),
        ("memory", "8 x 1024 x 1024 x 4 bytes = 33.5 MB", ["T² numbers", "together"], []),
        ("memory", "Fused kernels recompute in backward", ["a fused kernel"], []),
        ("root", "variance of the dot product is d_head, so we divide by its standard deviation to keep the softmax in "
         "a region with gradient", ["a dot product", "large scores", "then the", "d is the width"], []),
        ("grouped", "KV cache and its bandwidth fall by H/Hkv; the flops of the scores remain",
         ["the cache", "the scores"], []),
        ("contiguous", "reshape would also work", ["contiguous"], []),
        ("cache", "keeps K, V and Q of past tokens; 3 KiB per token", [], ["keys and values", "its size"]),
    ],
)  # fmt: skip
def test_a_number_is_of_one_kind_and_an_answer_in_a_candidates_spelling_is_found(name, answer, said, wrong):
    found = find_question(name).judge(answer)
    for state, starts in (("said", said), ("wrong", wrong)):
        named = [title for title, made in found.items() if made.state == state]
        assert len(named) == len(starts), (state, named)
        assert all(title.startswith(start) for title, start in zip(named, starts, strict=True))


def test_a_quoted_answer_loses_the_sign_at_its_end(capsys):
    main(["course", "--interview", "cache", "--answer", "We cache the queries and keys; they are large."])
    assert "✗ You say: We cache the queries and keys. The answer: " in " ".join(capsys.readouterr().out.split())
