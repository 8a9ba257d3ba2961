"""The course from beginning to end: right answers in other styles pass, typical wrong ones are told what is wrong."""

import dataclasses
import json
import linecache
import subprocess
import sys

import pytest
import torch

from course_answers import IGNORING, OTHER_STYLES, RAISING, SAME, WRONG
from headwise.cli import main
from headwise.cli.course import hinted, show
from headwise.learn.course import EXERCISES, Grade, find, grade, train_and_write
from headwise.learn.course import gpt as gpt_exercises
from headwise.learn.course.comparison import code_of, compared
from headwise.learn.course.exercise import WAITS, skeleton_of
from headwise.learn.course.grading import NOT_TRIED, SAME_CAUSE, WAITING, PartResult
from headwise.learn.course.progress import Progress
from headwise.learn.course.work import Workspace, grade_file

# The same function in other styles than the model answer.
STYLES = {
    "dot-products": """
import torch
def scores(query, key): return torch.einsum("td,sd->ts", query, key)
def softmax(scores): return (scores - scores.logsumexp(1, True)).exp()
def attend(query, key, value): return torch.einsum("ts,sd->td", softmax(scores(query, key)), value)
""",
    "one-head": """
import torch
class Head(torch.nn.Module):
    def __init__(self, d_model, d_head):
        super().__init__()
        self.all = torch.nn.Linear(d_model, 3 * d_head, bias=False)
    def forward(self, x):
        q, k, v = self.all(x).chunk(3, dim=-1)
        return torch.softmax(torch.bmm(q, k.permute(0, 2, 1)), dim=2).bmm(v)
""",
    "split-and-merge": """
def split_heads(x, num_heads): return x.reshape(*x.shape[:2], num_heads, -1).permute(0, 2, 1, 3)
def merge_heads(heads): return heads.swapaxes(1, 2).flatten(2)
""",
    "all-heads-at-once": """
import torch
import torch.nn.functional as F
class MultiHeadAttention(torch.nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.qkv, self.o = num_heads, torch.nn.Linear(d_model, 3 * d_model), torch.nn.Linear(d_model, d_model)
    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
""",
}


def names_in(source, path):
    """What an answer defines. It is a file, because the checker reads sources."""
    path.write_text(source, encoding="utf-8")
    linecache.checkcache(str(path))
    space = {"__name__": "answer"}
    exec(compile(source, str(path), "exec"), space)  # noqa: S102
    return space


@pytest.fixture(autouse=True)
def short_training(monkeypatch):
    monkeypatch.setattr(gpt_exercises, "STEPS", 60)
    monkeypatch.setattr(gpt_exercises, "PAIRS", 3.2)


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda e: e.name)
def test_model_answers_are_right_and_skeletons_are_not(exercise, tmp_path):
    right = grade(exercise, names_in(exercise.solution, tmp_path / "right.py"))
    assert right.right, right.sentence()
    empty = grade(exercise, names_in(exercise.skeleton, tmp_path / "empty.py"))
    assert empty.share == 0
    assert empty.sentence().startswith("None of ")


@pytest.mark.parametrize("name", STYLES)
def test_any_style_passes(name, tmp_path):
    found = grade(find(name), names_in(STYLES[name], tmp_path / "answer.py"))
    assert found.right, found.sentence()


@pytest.mark.parametrize(("name", "right", "other"), SAME, ids=lambda text: text[:24])
def test_another_order_that_means_the_same_passes(name, right, other, tmp_path):
    found = grade(find(name), names_in(find(name).solution.replace(right, other, 1), tmp_path / "answer.py"))
    assert found.right, found.sentence()


@pytest.mark.parametrize(("name", "right", "wrong", "part", "words"), WRONG, ids=lambda text: text[:24])
def test_a_typical_mistake_is_found_in_its_own_part(name, right, wrong, part, words, tmp_path):
    exercise = find(name)
    assert right in exercise.solution
    found = grade(exercise, names_in(exercise.solution.replace(right, wrong, 1), tmp_path / "answer.py"))
    assert not found.right
    assert found.next.name == part, found.sentence()
    assert words in found.next.words
    assert f'the next is "{part}"' in found.sentence()
    earlier = found.results[: [r.name for r in found.results].index(part)]
    assert all(result.right or result.words == WAITS for result in earlier), "credit for what is right"


@pytest.mark.parametrize(
    ("name", "right", "wrong", "part", "words"), IGNORING, ids=[f"{row[0]} {row[2][:32]}" for row in IGNORING]
)
def test_an_answer_that_ignores_an_argument_or_changes_the_order_of_the_task_is_not_right(
    name, right, wrong, part, words, tmp_path
):
    exercise = find(name)
    assert right in exercise.solution
    source = exercise.solution.replace(right, wrong).replace("import torch\n", "import math\n\nimport torch\n", 1)
    found = grade(exercise, names_in(source, tmp_path / "answer.py"))
    assert found.next is not None, "it is called right"
    assert found.next.name == part, found.sentence()
    assert words in found.next.words


@pytest.mark.parametrize(("name", "source"), OTHER_STYLES.values(), ids=OTHER_STYLES)
def test_what_is_tried_with_other_arguments_refuses_no_other_style(name, source, tmp_path):
    found = grade(find(name), names_in(source, tmp_path / "answer.py"))
    assert found.right, found.sentence()


@pytest.mark.parametrize(
    ("name", "right", "wrong", "part", "words", "before"), RAISING, ids=[f"{row[0]} {row[2][:24]}" for row in RAISING]
)
def test_an_error_is_told_in_the_part_where_it_happens_and_nothing_after_it_is_right(
    name, right, wrong, part, words, before, tmp_path
):
    exercise = find(name)
    assert right in exercise.solution
    found = grade(exercise, names_in(exercise.solution.replace(right, wrong, 1), tmp_path / "answer.py"))
    assert found.next.name == part, found.sentence()
    assert words in found.next.words
    marks = ["✓" if result.right else "·" for result in found.results]
    place = [result.name for result in found.results].index(part)
    assert before is None or marks[:place] == before
    assert "✓" not in marks[place:]
    assert all(result.words in WAITING for result in found.results if not result.right and result.name != part) or (
        name == "cache-and-grouped-heads"
    )


LISTED = "return self.out(torch.cat([head(x) for head in self.heads], dim=-1))"
WIDE = "d_model // num_heads) for _"
ATTENDED = "x = x + self.attention(self.first_norm(x))"
FED = "return x + self.down(nn.functional.gelu(self.up(self.second_norm(x))))"
BETWEEN_HEADS = {
    ".transpose(1, 2)": "", ".masked_fill(future, -math.inf)": "",
    "future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)": "pass",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "marks", "words"),
    [
        ("list-of-heads", {LISTED: "return x"}, "···", "no gradient flows through the result"),
        ("list-of-heads", {LISTED: "return [head(x) for head in self.heads]"}, "✓··", "the call returns a list"),
        ("list-of-heads", {LISTED: "return sum(h(x) for h in self.heads)"}, "✓··", "added up instead"),
        ("list-of-heads", {WIDE: "d_model) for _", LISTED: "return sum(h(x) for h in self.heads)"}, "✓··", "added up"),
        ("list-of-heads", {WIDE: "d_model) for _", LISTED: "return self.out(sum(h(x) for h in self.heads))"}, "✓·✓",
         "added up"),
        ("all-heads-at-once", BETWEEN_HEADS, "✓·✓·✓✓✓", "between the heads of one token"),
        ("dot-products", {"powers.sum(-1": "powers.sum(0"}, "✓···", "expected 0.1282"),
        ("one-head", {"self.query(x), self.key(x), self.value(x)": "x, x, x"}, "·✓✓✓", "are not projected"),
        ("one-head", {"key.transpose(-2, -1)": "key.transpose(-2, -1) / 7"}, "✓·✓✓", "a scale other than"),
        ("block", {ATTENDED: "pass", FED: "return x"}, "✓····", "where is the attention?"),
        ("block", {ATTENDED: "pass"}, "✓✓··✓", "where is the attention?"),
        ("block", {FED: "return x"}, "✓✓·✓·", "is linear"),
        ("block", {ATTENDED: "x = self.attention(self.first_norm(x))"}, "✓··✓✓", "a block returns its input"),
        ("block", {FED: "return self.second_norm(x + self.down(nn.functional.gelu(self.up(x))))"}, "✓··✓✓",
         "the stream itself is normalized"),
        ("block", {ATTENDED: "x = x + self.first_norm(self.attention(x))"}, "✓✓·✓✓", "a norm reads what attention"),
        ("block", {FED: FED.removeprefix("return ")}, "·····", "Block returns nothing"),
    ],
)  # fmt: skip
def test_a_step_that_is_not_there_gets_no_credit_and_is_not_blamed_for_another(name, changes, marks, words, tmp_path):
    source = find(name).solution
    for right, wrong in changes.items():
        assert right in source
        source = source.replace(right, wrong)
    found = grade(find(name), names_in(source, tmp_path / "answer.py"))
    assert "".join("✓" if result.right else "·" for result in found.results) == marks, found.sentence()
    assert words in found.next.words


GROWN = "cache, S = (key, value), key.shape[2]"
REPEATED = "key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)"


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        # An error is told in the part whose line raises it, and the parts before it are judged.
        ("all-heads-at-once", {"/ math.sqrt(D)": "* math.sqrt(D)", "self.out(merged)": "self.outt(merged)"},
         {"scores and scale": "multiplied by √D instead", "the output projection": "self.outt; did you mean"}),
        ("one-head", {"        self.value = nn.Linear(d_model, d_head, bias=False)\n": "", ", value = ": " = ",
                      ", self.value(x)": "", "scores.softmax(-1) @ value": "F.softmax(scores, dim=-1) @ x"},
         {"the three projections": "value is the input itself", "the softmax": "name 'F' is not defined",
          "the weighted values": "not reached"}),
        ("one-head", {"softmax(-1) @ value": "softmax(-1) @ key"}, {"the weighted values": "the value is made by key"}),
        ("all-heads-at-once", {"self.num_heads = num_heads": "self.num_heads = 8"},
         {"the split": "it works for one size only: the constructor"}),
        ("masks-and-padding", {"if mask is not None:\n        ": "if mask:\n        "},
         {"the mask argument": "a tensor is used as a condition", "a query that sees nothing": "not reached"}),
        ("cross-attention", {"softmax(-1)": "softmax(-2)"},
         {"who reads whom": "not judged", "the rest of the layer": "the softmax runs over the wrong axis"}),
        ("scale", {"math.sqrt(query.shape[-1])": "2.828"}, {"the scale": "always divided by 2.828, which is √8"}),
        ("scale", {"return float((first * second).sum(-1).std())": "return math.sqrt(width)"},
         {"the measurement": "spread(4) is exactly √4: nothing is measured"}),
        ("cache-and-grouped-heads", {GROWN: "S = key.shape[2]", REPEATED: REPEATED + "; cache = (key, value)"},
         {"what the cache holds": "expected keys and values (1, 2, 5, 4)", "token by token": "it raises RuntimeError"}),
        ("block", {"self.second_norm(x)": "self.first_norm(x)"}, {"the norms": "second_norm is made and never used"}),
        ("tiny-gpt", {"nn.Sequential(*(Block(d_model, num_heads) for _ in range(num_layers)))":
                      "[Block(d_model, num_heads) for _ in range(num_layers)]",
                      "self.norm(self.blocks(x))": "self.norm(self.blocks[1](self.blocks[0](x)))"},
         {"it learns": "layers are kept in a plain list: self.blocks."}),
        ("tiny-gpt", {"self.logits(self.norm(self.blocks(x)))": "self.logits(self.blocks(x))"},
         {"it learns": "norm is made and never used"}),
        ("tiny-gpt", {"tokens[:, 1:].flatten())": "tokens[:, 1:].flatten(), reduction='sum')"},
         {"the loss": "yours is the sum over 14 letters, 14 times their mean", "it learns": "not judged"}),
        ("reading-heads", {"return layer, head": "return shares.max(), layer, head"},
         {"the head": "4, 2; expected two whole numbers, the layer and the head"}),
        # What an error is about.
        ("list-of-heads", {"d_model // num_heads) for _": "d_model / num_heads) for _"},
         {"the heads": "d_head is 4.0; / gives a float, // a whole number (line 33)"}),
        ("all-heads-at-once", {"self.num_heads = num_heads": "assert num_heads % d_model == 0"},
         {"the projections": "num_heads % d_model == 0 is false; num_heads is 3, d_model is 12 (line"}),
        ("dot-products", {"return softmax(scores(query, key)) @ value": "return softmax(scores(query, key)) * value"},
         {"the average of the values": "softmax(scores(query, key)) is (3, 5), value is (5, 2)"}),
        ("mask", {"causal_mask(x.shape[1]).to": "causal_mask(x.shape[0]).to"},
         {"the scaled head": "not judged", "the future is hidden": "~visible is (2 samples, 2 samples)"}),
        # What the same weights make of it in another way.
        ("cache-and-grouped-heads", {REPEATED: "query = query.unflatten(1, (group, -1)).transpose(1, 2)",
                                     "query @ key.transpose(-2, -1)": "torch.einsum('bgrtd,bgsd->bgrts', query, key)",
                                     "(weights @ value).transpose(1, 2)":
                                     "torch.einsum('bgrts,bgsd->btrgd', weights, value)"},
         {"the layer without a cache": "query heads 0 to 5 read key/value heads 0, 1, 0, 1, 0, 1; expected 0, 0, 0"}),
        ("masks-and-padding", {"weights = weights.masked_fill(~mask, 0.0)": "pass",
                               "reshape(B, T, E))": "reshape(B, T, E)).nan_to_num(0.0)"},
         {"a query that sees nothing": "with heads of 0, the bias of the output projection remains"}),
        *(("list-of-heads", {"d_model // num_heads) for": f"{width}) for", "nn.Linear(d_model, d_model)": out},
           {"the heads": f"every head is {wide} wide; expected d_model / num_heads = 4"})
          for width, wide, out in (("d_model", 12, "nn.Linear(num_heads * d_model, d_model)"),
                                   ("d_model // num_heads * 2", 8, "nn.Linear(2 * d_model, d_model)"))),
        ("tiny-gpt", {"self.norm = ": "self.place = nn.Parameter(torch.zeros(7))\n        self.norm = "},
         {"it learns": "place is made and never used"}),
    ],
)  # fmt: skip
def test_every_mistake_is_told_where_it_is_and_nowhere_else(name, changes, told, tmp_path):
    source = find(name).solution
    for right, wrong in changes.items():
        assert right in source
        source = source.replace(right, wrong)
    found = grade(find(name), names_in(source, tmp_path / "answer.py"))
    wrong = {result.name: result.words for result in found.results if not result.right}
    assert all(words in wrong.get(part, "right") for part, words in told.items()), wrong
    waiting = {part for part, words in wrong.items() if words in WAITING}
    assert {*wrong} - waiting <= {*told}, wrong


def test_a_cause_is_told_once_and_not_of_a_function_that_is_wrong_itself(tmp_path):
    exercise = find("mask")
    found = grade(exercise, names_in(exercise.solution.replace("-math.inf", "0.0"), tmp_path / "zero.py"))
    assert "the cause may be that masked keys keep some weight: future scores are set to a number" in found.next.words
    assert found.results[-1].words == SAME_CAUSE
    found = grade(exercise, names_in(exercise.solution.replace(".tril()", ".tril(-1)"), tmp_path / "strict.py"))
    assert found.next.words == "causal_mask(5)[0, 0] is False; expected True"


def test_a_step_of_another_function_is_not_explained_by_a_mistake_in_the_class(tmp_path):
    source = find("scale").solution.replace(".std())", ".var())").replace(" / math.sqrt(query.shape[-1])", "")
    found = grade(find("scale"), names_in(source, tmp_path / "both.py"))
    assert "spread(4) is" in found.next.words
    assert "the cause may be" not in found.next.words
    assert found.results[-1].words.startswith("scores are not scaled")


def test_a_hidden_row_that_averages_hidden_keys_is_not_a_query_that_sees_nothing(tmp_path):
    source = find("masks-and-padding").solution.replace("-math.inf", "-1e9")
    assert grade(find("masks-and-padding"), names_in(source, tmp_path / "zeroed.py")).right
    source = source.replace("weights = weights.masked_fill(~mask, 0.0)", "pass")
    found = grade(find("masks-and-padding"), names_in(source, tmp_path / "average.py"))
    assert [result.right for result in found.results] == [True, True, True, False]
    assert "still reads an even average of all tokens" in found.next.words


def test_a_mask_that_fills_with_0_is_told_what_exp_makes_of_it(tmp_path):
    source = find("all-heads-at-once").solution.replace("-math.inf", "0")
    found = grade(find("all-heads-at-once"), names_in(source, tmp_path / "zero.py"))
    assert "exp(0) is 1, and only exp(−∞) is 0" in found.next.words


@pytest.mark.parametrize(
    ("name", "right", "other"),
    [
        ("one-head", "bias=False", "bias=True"),
        ("scale", "float((first * second).sum(-1).std())", "(first * second).sum(-1).std()"),
    ],
)
def test_what_passes_is_what_the_docstring_asks_for(name, right, other, tmp_path):
    exercise = find(name)
    assert "without bias" not in exercise.skeleton
    assert "Return a float" not in exercise.skeleton
    assert grade(exercise, names_in(exercise.solution.replace(right, other), tmp_path / "answer.py")).right


def test_the_title_of_a_hint_fits_the_terminal(tmp_path, capsys):
    progress, space = Progress(tmp_path / "progress.json"), Workspace(tmp_path / "course", EXERCISES)
    longest = max(EXERCISES, key=lambda e: len(e.title) + max(len(part.name) for part in e.parts))
    for part in longest.parts:
        results = tuple(PartResult(other.name, other is not part) for other in longest.parts)
        space.lay_out(longest)
        progress.add(longest, Grade(results), space.written(longest))
        hinted(progress, space, longest)
        out = capsys.readouterr().out
        assert part.name.split()[-1] in out
        assert max(len(line) for line in out.splitlines()) <= 79


def test_a_class_with_another_signature_is_told_how_it_is_called(tmp_path):
    exercise = find("all-heads-at-once")
    other = exercise.solution.replace("self, x: Tensor)", "self, x: Tensor, key: Tensor, value: Tensor)")
    found = grade(exercise, names_in(other, tmp_path / "answer.py"))
    assert found.next.name == "the projections"
    assert "makes MultiHeadAttention(12, 3) and calls it with (2, 5, 12): it raises TypeError" in found.next.words
    assert [result.name for result in found.results if not result.right] == ["the projections", "the mask"]
    misspelt = grade(exercise, names_in(exercise.solution.replace("def forward", "def foward"), tmp_path / "other.py"))
    assert misspelt.next.words == "there is no method forward; is foward meant to be it?"


def test_a_definition_under_another_name_is_named_once(tmp_path, capsys):
    exercise = find("all-heads-at-once")
    for name in ("MultiheadAttention", "Mine"):
        other = exercise.solution.replace("class MultiHeadAttention", f"class {name}")
        found = grade(exercise, names_in(other, tmp_path / f"{name}.py"))
        assert found.next.words == f"MultiHeadAttention is not defined; is {name} meant to be it?"
        show(found)
        assert capsys.readouterr().out.count("meant to be it") == 1
    function = find("dot-products").solution.replace("def softmax", "def soft_max")
    found = grade(find("dot-products"), names_in(function, tmp_path / "function.py"))
    assert found.next.words == "softmax is not defined; is soft_max meant to be it?"
    assert "meant" not in grade(exercise, names_in("import torch\n", tmp_path / "none.py")).next.words
    alone = "def score(query, key):\n    return query @ key.T\n"
    found = grade(find("dot-products"), names_in(alone, tmp_path / "alone.py"))
    assert [("score meant" in result.words) for result in found.results] == [True, False, False, False]


def test_a_mask_that_means_the_opposite_is_not_called_right(tmp_path):
    exercise = find("masks-and-padding")
    found = grade(exercise, names_in(exercise.solution.replace("~mask", "mask"), tmp_path / "opposite.py"))
    assert found.next.name == "the mask argument"
    assert found.next.words.startswith("the mask means the opposite")
    assert "reads the tokens" in found.results[3].words  # and no even average, for it is none


def test_queries_of_the_memory_are_not_called_right(tmp_path):
    exercise = find("cross-attention")
    swapped = exercise.solution.replace("self.query(x)", "self.query(memory)")
    found = grade(exercise, names_in(swapped, tmp_path / "swapped.py"))
    assert not any(result.right for result in found.results)
    assert found.results[1].words == "output 3 does not depend on token 3 of x: the queries come from x"


def test_a_tensor_that_does_not_fit_into_memory_is_told_with_its_size(tmp_path):
    huge = find("dot-products").solution.replace("query @ key.T", "query @ key.T + torch.ones(10**6, 10**7, 4).sum()")
    found = grade(find("dot-products"), names_in(huge, tmp_path / "huge.py"))
    assert "there is not enough memory for a tensor of 160,000,000,000,000 bytes (line" in found.next.words


def test_two_courses_can_be_kept_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    path = Workspace(tmp_path / "course", EXERCISES).path(EXERCISES[0])
    assert main(["course"]) == 0
    path.write_text(EXERCISES[0].solution)
    assert main(["course"]) == 0
    capsys.readouterr()
    assert main(["course", "--folder", "again"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Solved before, in another folder: 1 of 14." in shown
    assert "--folder again --progress again/progress.json" in shown
    assert "2. One head" in shown
    assert main(["course", "--folder", "new", "--progress", "new/progress.json"]) == 0
    assert "1. Dot products and softmax" in capsys.readouterr().out
    assert main(["course", "--list"]) == 0
    assert "Your progress, in any folder, is kept in" in capsys.readouterr().out


def test_a_name_that_comes_after_the_end_of_a_file_is_not_called_missing(tmp_path):
    stops = "raise RuntimeError('too early')\n" + find("split-and-merge").solution
    assert graded_file(tmp_path, stops).next.words == "your file stops before it defines split_heads"
    unclosed = find("split-and-merge").solution.replace('heads."""', "heads.", 1).replace("D numbers.", "D numbers")
    found = graded_file(tmp_path, unclosed.replace('"""', "", 1))
    assert "is every docstring closed?" in found.note or "not Python yet" in found.note
    assert {result.words for result in found.results} == {"your file cannot be read yet"}


def test_a_class_that_waits_for_a_mask_is_not_causal(tmp_path):
    exercise = find("all-heads-at-once")
    own = next(line for line in exercise.solution.splitlines(keepends=True) if "triu(1)" in line)
    waits = (
        exercise.solution.replace(own, "")
        .replace("x: Tensor)", "x: Tensor, mask: Tensor | None = None)")
        .replace(
            "weights = scores.masked_fill(future, -math.inf).softmax(-1)",
            "weights = (scores if mask is None else scores.masked_fill(mask == 0, -math.inf)).softmax(-1)",
        )
    )
    found = grade(
        exercise,
        names_in(waits, tmp_path / "a.py"),
    )
    assert [result.name for result in found.results if not result.right] == ["the mask"]
    assert "come in exercise 8" in found.next.words
    pair = waits.replace("return self.out(merged)", "return self.out(merged), weights")
    found = grade(exercise, names_in(pair, tmp_path / "pair.py"))
    assert found.results[-1].words == "the call returns 2 results; expected one, the output"


def test_the_piece_of_a_part_that_is_not_written_is_named(tmp_path):
    exercise = find("list-of-heads")
    half = exercise.solution.replace(
        "return scores.masked_fill(future, -math.inf).softmax(-1) @ value", "raise NotImplementedError"
    )
    found = grade(exercise, names_in(half, tmp_path / "a.py"))
    assert "not written yet" in found.next.words
    assert "the softmax" in found.next.words
    assert "the scores" not in found.next.words


def test_every_step_of_every_exercise_has_a_typical_mistake_among_the_tests():
    steps = {(exercise.name, part.name) for exercise in EXERCISES for part in exercise.parts}
    assert {(name, part) for name, _, _, part, _ in WRONG} == steps


def test_hints_lead_from_a_question_to_a_line_of_the_model_answer():
    for exercise in EXERCISES:
        for part in exercise.parts:
            assert part.question.endswith("?"), part.question
            assert len({part.hint(level) for level in (1, 2, 3)}) == 3
            code = part.line.replace("...", "").strip()
            assert code


def test_skeletons_keep_signatures_docstrings_and_shapes():
    for exercise in EXERCISES:
        assert "raise NotImplementedError" in exercise.skeleton
        assert "→" in exercise.skeleton or "(length, length)" in exercise.skeleton
        compile(exercise.skeleton, exercise.name, "exec")
    assert skeleton_of("def f():\n    return 1\n") == "def f():\n    return 1\n", "without a docstring it is given"


def test_the_whole_course_in_the_terminal(tmp_path, monkeypatch, capsys):
    """A learner's way through every exercise: the file, a wrong try, hints, the right one, the comparison."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    space = Workspace(tmp_path / "course", EXERCISES)
    assert main(["course"]) == 0
    for number, exercise in enumerate(EXERCISES, 1):
        capsys.readouterr()
        assert main(["course"]) == 0
        assert f"{number}. {exercise.title}" in capsys.readouterr().out
        path = space.path(exercise)
        assert path.is_file()
        assert main(["course", str(number), "--solution"]) == 2, "not before a try"
        capsys.readouterr()
        right, wrong, part, words = next(rest for name, *rest in WRONG if name == exercise.name)
        path.write_text(space.introduced(exercise, exercise.solution.replace(right, wrong, 1)))
        assert main(["course"]) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert f'the next is "{part}": ' in shown
        assert words in shown
        for level in ("a question", "the idea", "the line"):
            assert main(["course", "--hint"]) == 0
            assert level in capsys.readouterr().out
        path.write_text(space.introduced(exercise, exercise.solution))
        assert main(["course"]) == 0
        assert "Right: all " in capsys.readouterr().out
        assert main(["course", exercise.name, "--hint"]) == 0
        assert "is solved: nothing is left to hint at." in capsys.readouterr().out
        assert main(["course", exercise.name, "--solution"]) == 0
        assert "They are the same." in capsys.readouterr().out
    assert main(["course"]) == 0
    assert f"All {len(EXERCISES)} exercises are solved." in capsys.readouterr().out
    assert main(["course", "--list"]) == 0
    assert capsys.readouterr().out.count("solved, 2 tries") == len(EXERCISES)
    assert main(["course", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert all(record["hints"] and record["best"] == 1 for record in told["progress"].values())


def in_this_process(monkeypatch):
    """Grade files here: starting torch for each of them would take a minute."""
    from headwise.cli import course

    def graded(exercise, path, progress):
        return grade(exercise, names_in(path.read_text(encoding="utf-8"), path))

    monkeypatch.setattr(course, "grade_file", graded)


def graded_file(tmp_path, source, name="split-and-merge", **changes):
    path = tmp_path / "answer.py"
    path.write_text(source)
    return grade_file(dataclasses.replace(find(name), **changes), path)


def test_a_file_is_graded_in_a_process_of_its_own(tmp_path):
    assert graded_file(tmp_path, "print('noise')\n" + find("split-and-merge").solution).right


def test_a_file_that_is_not_python_yet_is_named(tmp_path):
    found = graded_file(tmp_path, "def split_heads(x, num_heads):\n")
    assert found.note.startswith("Your file is not Python yet: expected an indented block")
    assert found.note.endswith("(line 1): def split_heads(x, num_heads):")
    assert found.share == 0


def test_a_file_that_stops_is_graded_as_far_as_it_goes(tmp_path):
    found = graded_file(tmp_path, find("split-and-merge").solution + "\nprint(heads)\n")
    lines = find("split-and-merge").solution.count("\n") + 2
    assert found.note == f"Your file stops with NameError: name 'heads' is not defined (line {lines})."
    assert found.right


def test_an_endless_loop_is_stopped_with_its_line_and_the_credit_of_the_steps_before(tmp_path):
    loop = "    while True:\n        heads = heads\n"
    head, _, tail = find("split-and-merge").solution.partition("    B, H, T, D = heads.shape\n")
    told = []
    path = tmp_path / "answer.py"
    path.write_text(head + loop + tail)
    found = grade_file(dataclasses.replace(find("split-and-merge"), seconds=0.5), path, told.append)
    line = head.count("\n") + 1
    assert [result.right for result in found.results] == [True, True, False]
    assert found.next.words.startswith("still running after 0.5 s; is there an infinite loop? (line ")
    assert found.next.words[-3:-1] in (str(line), str(line + 1))
    assert "the merge" in told


def test_steps_after_an_endless_one_are_not_tried(tmp_path):
    source = "def scores(query, key):\n    while True: pass\n"
    found = graded_file(tmp_path, source, "dot-products", seconds=0.3)
    assert [result.words for result in found.results][1:] == [NOT_TRIED] * 3


@pytest.mark.skipif(sys.platform != "linux", reason="the jail needs Linux")
def test_a_file_is_graded_inside_the_jail(tmp_path):
    secret = tmp_path / "home" / "secret"
    secret.parent.mkdir()
    secret.write_text("x")
    folder = tmp_path / "work"
    folder.mkdir()
    tries = f"open({str(secret)!r}, 'a')", "import socket; socket.create_connection(('127.0.0.1', 1))"
    for line in tries:
        note = graded_file(folder, f"{line}\n").note
        assert "PermissionError" in note or "OSError" in note, note
    assert secret.read_text() == "x"


def test_comparison_shows_where_two_answers_differ():
    exercise = find("split-and-merge")
    told = compared(exercise, STYLES["split-and-merge"])
    assert told.startswith("Your answer has 4 lines of code and the model answer 7.")
    assert "\n    return heads.transpose(1, 2).contiguous().view(B, T, H * D)" in told
    assert "Yours does it in another way. The model answer:" in told
    near = exercise.solution.replace("x.view(B, T, num_heads", "x.reshape(B, T, num_heads")
    assert "-    return x.reshape(B, T, num_heads, E // num_heads).transpose(1, 2)" in compared(exercise, near)
    same = exercise.solution.replace("(heads", "(h").replace(" heads.", " h.").replace("B, T, E", "b, t, e")
    same = same.replace("x.view(B, T, num_heads, E //", "x.view(b, t, num_heads, e //").replace(": Tensor", "")
    assert "They are the same, under other names." in compared(exercise, same)
    assert compared(exercise, "def f(:").startswith("your file is not Python yet (line 1")
    assert code_of('"""Doc."""\n\n# a comment\nx = 1\n') == ["x = 1"]


def test_a_loss_of_all_logits_but_the_last_trains_as_one_of_all_tokens_but_the_last(tmp_path):
    whole = find("tiny-gpt").solution.replace("logits = model(tokens[:, :-1])", "logits = model(tokens)[:, :-1]")
    assert whole != find("tiny-gpt").solution
    space = names_in(whole, tmp_path / "gpt.py")
    assert gpt_exercises.trained(space, 2)[1] > 0


def test_the_tiny_gpt_trains_and_writes(tmp_path, capsys):
    space = names_in(find("tiny-gpt").solution, tmp_path / "gpt.py")
    written = train_and_write(space, seconds=1.0)
    assert written.startswith("THE FOX AND THE ")
    assert len(written) == len("THE FOX AND THE ") + 400
    assert "step     0  loss 4." in capsys.readouterr().out


def test_the_quiz_is_part_of_the_course(tmp_path, capsys):
    folder = ["--folder", str(tmp_path)]
    assert main(["course", "--quiz", *folder]) == 0
    assert "exercise_01.py: one thing is wrong" in capsys.readouterr().out
    assert main(["course", "--quiz", "--hint", *folder]) == 0
    assert "hint 1 of 3" in capsys.readouterr().out
    assert main(["course", "--list", *folder]) == 0
    assert "quiz  0 of 36 classes repaired" in capsys.readouterr().out


def test_unknown_exercises_and_questions_are_named(capsys):
    assert main(["course", "sofmax"]) == 2
    assert "no exercise is called 'sofmax'. All of them: headwise course --list." in capsys.readouterr().err
    for typed, meant in (("split", "split-and-merge"), ("All heads at onc", "all-heads-at-once"), ("msak", "mask")):
        assert main(["course", typed]) == 2
        assert f"Did you mean {meant}?" in capsys.readouterr().err
    assert find("All heads at once").name == "all-heads-at-once"
    assert main(["course", "15"]) == 2
    assert "They are numbered 1 to 14." in capsys.readouterr().err
    assert main(["course", "--interview", "salary"]) == 2
    assert "no question is called 'salary'. Known: code, complexity" in capsys.readouterr().err


def test_a_damaged_progress_file_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "headwise").mkdir()
    for text in ("{}", "[]", '{"format": "headwise course 1", "exercises": {"mask": {"tries": "many"}}}'):
        (tmp_path / "headwise" / "course.json").write_text(text)
        assert main(["course", "--list"]) == 2
        assert "course.json cannot be read" in capsys.readouterr().err


def test_grading_leaves_the_random_numbers_alone(tmp_path):
    space = names_in(find("scale").solution, tmp_path / "answer.py")
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    grade(find("scale"), space)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_method_without_self_and_a_function_without_return_are_named_with_their_lines(tmp_path):
    exercise = find("all-heads-at-once")
    for parameters in ("x: Tensor", "x: Tensor, mask=None"):
        source = exercise.solution.replace("self, x: Tensor", parameters)
        line = source[: source.index("def forward")].count("\n") + 1
        found = grade(exercise, names_in(source, tmp_path / "answer.py"))
        assert found.next.words == f"forward has no self: the first parameter of a method is self (line {line})"
        assert found.share == 0, "no step ran"
    source = find("split-and-merge").solution.replace("return x.view", "x.view")
    found = grade(find("split-and-merge"), names_in(source, tmp_path / "answer.py"))
    assert found.next.words.startswith("split_heads returns nothing: is there a return? (line ")


def test_after_an_error_the_hint_begins_with_it_and_a_misspelt_name_with_the_near_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    space, exercise = Workspace(tmp_path / "course", EXERCISES), find("mask")
    space.lay_out(exercise)
    space.path(exercise).write_text(exercise.solution.replace("masked_fill", "masked_fil"))
    assert main(["course", "4"]) == 1
    assert "(not judged, because of the error)" in capsys.readouterr().out
    assert main(["course", "4", "--hint"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "stopped with an error, so repair that first: it raises AttributeError" in shown
    assert "did you mean masked_fill?" in shown


def test_a_hint_before_a_try_is_for_the_first_step_that_is_not_right(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    space, exercise = Workspace(tmp_path / "course", EXERCISES), find("split-and-merge")
    space.lay_out(exercise)
    space.path(exercise).write_text(exercise.solution.replace("heads.transpose(1, 2).contiguous()", "heads"))
    assert main(["course", "6", "--hint"]) == 0
    assert "Split and merge, the merge: a question" in capsys.readouterr().out
    space.path(exercise).write_text(exercise.solution)
    assert main(["course", "6", "--hint"]) == 0
    assert "is solved: nothing is left to hint at." in capsys.readouterr().out
    space.path(exercise).write_text(exercise.solution.replace("num_heads, E", "3, E"))
    assert main(["course", "6", "--hint"]) == 0
    assert "the shape of the split: a question" in capsys.readouterr().out
    assert "tries" not in space.written(exercise)
    assert Progress().of(exercise).tries == 0, "a hint is no try"


def test_commands_at_the_same_time_keep_each_others_progress(tmp_path):
    path, right = tmp_path / "progress.json", Grade((PartResult("the mask", True),))
    one, other = Progress(path), Progress(path)
    one.add(EXERCISES[0], right, "a")
    other.add(EXERCISES[1], right, "b")
    one.hint(EXERCISES[2])
    assert {*Progress(path).records} == {exercise.name for exercise in EXERCISES[:3]}
    program = (
        "import sys; from pathlib import Path; from headwise.learn.course import find\n"
        "from headwise.learn.course.progress import Progress\n"
        "path, exercise = Path(sys.argv[1]), find(sys.argv[2])\n"
        "for _ in range(20): Progress(path).hint(exercise); Progress(path).look(exercise)"
    )
    names = ("mask", "block")
    running = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in names]
    assert [process.wait() for process in running] == [0, 0]
    records = Progress(path).records
    assert all(records[name].looked and records[name].hints for name in names)


def test_options_that_would_be_ignored_are_refused(capsys):
    assert main(["course", "--answer", "x"]) == 2
    assert "--answer is for the interview." in capsys.readouterr().err
    assert main(["course", "interview"]) == 2
    assert "Did you mean headwise course --interview?" in capsys.readouterr().err
    assert main(["cost", "gpt2"]) == 2
    assert "Did you mean headwise cost --model gpt2?" in capsys.readouterr().err


def test_solutions_fit_a_terminal_and_stay_python():
    for exercise in EXERCISES:
        told = compared(exercise, "x = 1\n")
        assert max(map(len, told.splitlines())) <= 80
        compile(told.partition("The model answer:")[2], exercise.name, "exec")
    mask = find("mask")
    assert "They are the same." in compared(mask, mask.solution.replace(", bias=False", ""))
