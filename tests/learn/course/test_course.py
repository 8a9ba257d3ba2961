"""The course from beginning to end: right answers in other styles pass, typical wrong ones are told what is wrong."""

import json
import linecache

import pytest
import torch

from headwise.cli import main
from headwise.learn.course import EXERCISES, find, grade, train_and_write
from headwise.learn.course import decoder as decoder_exercises
from headwise.learn.course.exercise import skeleton_of
from headwise.learn.course.work import Workspace, code_of, compared, grade_file

# What learners write: an exercise, what they change in the model answer, the part that is then wrong, and the words.
WRONG = [
    ("dot-products", "query @ key.T", "query @ key", "the scores", "raises RuntimeError"),
    ("dot-products", "sum(-1", "sum(0", "the softmax", "softmax(scores)[1, 4] is"),
    ("dot-products", "scores - scores.max(-1, keepdim=True).values", "scores", "the softmax of large scores", "is nan"),
    ("dot-products", "@ value", "@ value.cumsum(0)", "the average of the values", "expected"),
    ("one-head", "self.key(x), self", "self.query(x), self", "the three projections", "the wrong role"),
    ("one-head", "softmax(-1)", "softmax(-2)", "the softmax", "the softmax runs over the wrong axis"),
    ("scale", ".sum(-1).std()", ".std()", "the measurement", "spread(4) is"),
    ("scale", " / math.sqrt(query.shape[-1])", "", "the scale", "scores are not scaled"),
    ("scale", "math.sqrt(query.shape[-1])", "math.sqrt(x.shape[-1])", "the scale", "square root of the model width"),
    ("mask", ".tril()", ".triu()", "the triangle", "causal_mask(5)[0, 1] is 1; expected 0"),
    ("mask", "-math.inf", "0.0", "the future is hidden", "they see the future"),
    ("list-of-heads", "self.out(torch.cat([head(x) for head in self.heads], dim=-1))",
     "torch.cat([head(x) for head in self.heads], dim=-1)", "the output projection", "output projection"),
    ("split-and-merge", "x.view(B, T, num_heads, E // num_heads).transpose(1, 2)",
     "x.view(B, num_heads, T, E // num_heads)", "the numbers of the split", "expected"),
    ("split-and-merge", ".transpose(1, 2).contiguous().view(B, T, H * D)", ".transpose(1, 2).view(B, T, H * D)",
     "the merge", "raises RuntimeError"),
    ("all-heads-at-once", "math.sqrt(D)", "math.sqrt(E)", "scores, scale and mask", "square root of the model width"),
    ("all-heads-at-once", "triu(1)", "triu(2)", "scores, scale and mask", "mask"),
    ("all-heads-at-once", "transpose(1, 2).contiguous().view(B, T, E)", "contiguous().view(B, T, E)", "the merge",
     "heads are merged by a view"),
    ("masks-and-padding", "masked_fill(~mask, -math.inf)", "masked_fill(mask, -math.inf)", "the mask argument", "mask"),
    ("masks-and-padding", "weights = weights.masked_fill(~mask, 0.0)", "pass", "a query that sees nothing", "NaN"),
    ("cross-attention", "self.split(self.value(memory))", "self.split(self.value(x))", "two lengths", "raises"),
    ("dropout", "self.dropout(scores.masked_fill(future, -math.inf).softmax(-1))",
     "nn.functional.dropout(scores.masked_fill(future, -math.inf).softmax(-1), 0.1)", "quiet in evaluation", "differ"),
    ("cache-and-grouped-heads", "triu(S - T + 1)", "triu(1)", "token by token", "the output token by token"),
    ("cache-and-grouped-heads", "repeat_interleave(group, 1), value.repeat_interleave(group, 1)",
     "repeat(1, group, 1, 1), value.repeat(1, group, 1, 1)", "the layer without a cache", ""),
    ("block", "x = x + self.attention", "x = self.attention", "the residual stream", "with all projections at 0"),
    ("block", "causal=True", "causal=False", "the attention", "tokens 0 and 1 changed"),
    ("tiny-gpt", "(tokens) + self.positions(positions)", "(tokens)", "the positions", "does not know positions"),
    ("tiny-gpt", "tokens[:, 1:]", "tokens[:, :-1]", "the loss", "logits at i predict letter i + 1"),
    ("reading-heads", "torch.special.entr(weights)", "(-weights * weights.log())", "the entropy", "0 · log 0"),
    ("reading-heads", "diagonal(-1", "diagonal(0", "the previous token", "previous_token(weights)[0] is"),
]  # fmt: skip
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
    monkeypatch.setattr(decoder_exercises, "STEPS", 60)
    monkeypatch.setattr(decoder_exercises, "PAIRS", 3.2)


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


@pytest.mark.parametrize(("name", "right", "wrong", "part", "words"), WRONG, ids=lambda text: text[:24])
def test_a_typical_mistake_is_found_in_its_own_part(name, right, wrong, part, words, tmp_path):
    exercise = find(name)
    assert right in exercise.solution
    found = grade(exercise, names_in(exercise.solution.replace(right, wrong, 1), tmp_path / "answer.py"))
    assert not found.right
    assert found.next.name == part, found.sentence()
    assert words in found.next.words
    assert f"the next is {part}" in found.sentence()
    earlier = [result.right for result in found.results][: [r.name for r in found.results].index(part)]
    assert all(earlier), "credit for what is right"


def test_every_exercise_has_at_least_one_typical_mistake_among_the_tests():
    assert {name for name, *_ in WRONG} == {exercise.name for exercise in EXERCISES}


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
        path.write_text(space.introduced(exercise, exercise.skeleton.replace("NotImplementedError", "KeyError")))
        assert main(["course"]) == 1
        assert "the next is " in capsys.readouterr().out
        for level in ("a question", "the idea", "the line"):
            assert main(["course", "--hint"]) == 0
            assert level in capsys.readouterr().out
        path.write_text(space.introduced(exercise, exercise.solution))
        assert main(["course"]) == 0
        assert "Right: all " in capsys.readouterr().out
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

    def graded(exercise, path):
        return grade(exercise, names_in(path.read_text(encoding="utf-8"), path))

    monkeypatch.setattr(course, "grade_file", graded)


def test_a_file_is_graded_in_a_process_of_its_own(tmp_path):
    path = tmp_path / "answer.py"
    path.write_text("print('noise')\n" + find("split-and-merge").solution)
    assert grade_file(find("split-and-merge"), path).right
    path.write_text("def split_heads(x, num_heads):\n")
    assert "the file cannot be run: IndentationError" in grade_file(find("split-and-merge"), path).next.words


def test_a_file_that_never_ends_is_stopped(tmp_path):
    import dataclasses

    path = tmp_path / "answer.py"
    path.write_text("while True: pass\n")
    quick = dataclasses.replace(find("split-and-merge"), seconds=0.5)
    assert grade_file(quick, path).next.words == "it takes longer than 0.5 s"


def test_comparison_shows_where_two_answers_differ():
    exercise = find("split-and-merge")
    told = compared(exercise, STYLES["split-and-merge"])
    assert told.startswith("Your answer has 4 lines of code and the model answer 7.")
    assert "+    return heads.transpose(1, 2).contiguous().view(B, T, H * D)" in told
    assert compared(exercise, "def f(:").startswith("your file is not Python yet (line 1")
    assert code_of('"""Doc."""\n\n# a comment\nx = 1\n') == ["x = 1"]


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
    assert "no exercise is called 'sofmax'. Known: 1 to 14, or dot-products" in capsys.readouterr().err
    assert main(["course", "--interview", "salary"]) == 2
    assert "no question is called 'salary'. Known: code, several-heads" in capsys.readouterr().err


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
