"""Branches, options and methods that a plain call does not reach."""

import ast

import pytest

from headwise.check import check
from headwise.check.code.choices import compared, kept_as
from headwise.check.coverage import Coverage
from headwise.check.verdict import judge_file

CLASS = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, mode="full", window=None):
        super().__init__()
        self.h, self.d, self.mode, self.window, self.fused = num_heads, d_model // num_heads, mode, window, False
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, mask=None, need_weights=False):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
        if self.fused:
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, E))
        scores = q @ k.mT / self.d**0.5
        if self.mode == "causal":
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        if self.window is not None:
            i = torch.arange(T, device=x.device)
            scores = scores.masked_fill((i[:, None] - i).abs() > self.window, float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = scores.softmax(-1)
        out = self.out((weights @ v).transpose(1, 2).reshape(B, T, E))
        return (out, weights) if need_weights else out
"""
WRONG = {
    "causal-inverted": (".triu(1)", ".tril(-1)", "scores = scores.masked_fill(torch.ones_like"),
    "weights-returned": ("(out, weights) if", "(out, (q @ k.mT / self.d**0.5).softmax(-1)) if", "return (out"),
    "masks-combined": ("if mask is not None:", "if mask is not None and not need_weights:", ""),
    "result-unused": ("scores = q @ k.mT", "turned = q * 2 + k\n        scores = q @ k.mT", "turned ="),
}


def judged(folder, source):
    path = folder / "attention.py"
    path.write_text(source)
    return judge_file(path, thorough=False)


def test_modes_windows_and_switches_inside_are_all_tried(tmp_path):
    report = judged(tmp_path, CLASS)
    assert report.verdict == "right", report
    item = next(item for item in report.certificate if item.name == "every branch was taken")
    assert (item.status, item.words.startswith("self.fused=True")) == ("verified", True)


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_behind_an_option_is_named(mistake, tmp_path):
    old, new, line = WRONG[mistake]
    assert CLASS.count(old) == 1
    report = judged(tmp_path, CLASS.replace(old, new))
    assert (report.verdict, report.cause) == ("wrong", mistake), report
    assert report.wrong[0].text.startswith(line), report


def test_a_branch_that_no_call_takes_leaves_it_right_as_far_as_tested(tmp_path):
    source = CLASS.replace(
        "        weights = scores", "        if T > 4000:\n            scores = scores * 2\n        weights = scores"
    )
    report = judged(tmp_path, source)
    assert report.verdict == "partial", report
    unrun = [item.words for item in report.certificate if item.status == "not judged"]
    assert [words.rpartition(" never ")[2] for words in unrun] == ["ran"], unrun


def test_a_method_that_was_never_called_is_not_judged(tmp_path):
    report = judged(tmp_path, CLASS + "\n    def probe(self, x):\n        return self.out(self.qkv(x)[..., :8])\n")
    assert report.verdict == "partial"
    assert any("probe was never called" in item.words for item in report.certificate)


def test_refusals_messages_and_dead_code_do_not_count_as_branches(tmp_path):
    checks = """        if E % 2:
            message = str(E)
            raise ValueError(message)
        if T < 0:
            print(T)
"""
    source = CLASS.replace("        q, k, v =", checks + "        q, k, v =")
    assert judged(tmp_path, source).verdict == "right"


def test_a_step_method_must_give_what_forward_gives(tmp_path):
    causal = CLASS.replace('if self.mode == "causal":', "if True:").replace("if self.fused:", "if False:")
    step = """
    def reset(self):
        self.seen = None

    def step(self, token):
        self.seen = token if getattr(self, "seen", None) is None else torch.cat([self.seen, token], 1)
        return self.forward(self.seen)[:, -1:]
"""
    assert judged(tmp_path, causal + step).verdict == "variant"
    wrong = judged(
        tmp_path, causal + step.replace("torch.cat([self.seen, token], 1)", "torch.cat([token, self.seen], 1)")
    )
    assert (wrong.verdict, wrong.cause) == ("wrong", "cache-differs"), wrong


def test_a_class_that_cannot_be_defined_is_wrong_at_its_line(tmp_path):
    head = """
class SingleHead(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d)
"""
    source = CLASS.replace("class MultiHeadAttention(nn.Module)", head + "\nclass MultiHeadAttention(nn.module)")
    report = judged(tmp_path, source)
    assert (report.verdict, report.cause) == ("wrong", "unknown-name"), report
    assert report.wrong[0].detail == "torch.nn.module; did you mean Module?"
    assert report.wrong[0].text.startswith("class MultiHeadAttention")


def test_a_mask_must_work_in_the_shape_that_the_example_passes(tmp_path):
    demo = """
x = torch.rand(2, 3, 4)
mask = torch.ones(2, 3, 3)
layer = MultiHeadAttention(4, 2)
print(layer(x, mask))
"""
    report = judged(tmp_path, CLASS + demo)
    assert (report.verdict, report.cause) == ("wrong", "mask-crashes"), report
    assert judged(tmp_path, CLASS + demo.replace("2, 3, 3", "2, 1, 3, 3")).verdict == "right"


def test_a_convention_that_goes_on_in_the_next_line_is_held_against_the_mask(tmp_path):
    doc = '        """mask: a ``True`` entry means that the position\n        is *not* allowed to be attended."""\n'
    report = judged(tmp_path, CLASS.replace("        B, T, E = x.shape\n", doc + "        B, T, E = x.shape\n", 1))
    assert (report.verdict, report.cause) == ("wrong", "mask-convention"), report


def test_layers_left_over_beside_complete_maps_are_no_mistake(tmp_path):
    source = CLASS.replace(
        "        super().__init__()\n", "        super().__init__()\n        self.q = nn.Linear(d_model, d_model)\n"
    )
    report = judged(tmp_path, source)
    assert report.verdict == "right", report
    assert {f.name for f in report.findings} >= {"dead-parameter"}


def test_one_length_that_the_text_states_excuses_keys_of_another(tmp_path):
    three = CLASS.replace("def forward(self, x,", "def forward(self, query, key, value,").replace(
        "        B, T, E = x.shape\n"
        "        q, k, v = self.qkv(x).view(B, T, 3, self.h, self.d).permute(2, 0, 3, 1, 4)\n",
        "        x, (B, T, E) = query, query.shape\n"
        "        parts = zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), (query, key, value))\n"
        "        q, k, v = (F.linear(z, w, b).view(B, T, self.h, self.d).transpose(1, 2) for w, b, z in parts)\n",
    )
    assert judged(tmp_path, three).cause == "cross-length"
    doc = '        """\n        query: (batch, seq_len, d_model)\n        key: (batch, seq_len, d_model)\n        """\n'
    assert judged(tmp_path, three.replace("        x, (B", doc + "        x, (B")).verdict == "right"


def test_a_probability_to_keep_that_drops_everything_is_named(tmp_path):
    source = CLASS.replace("window=None):", "window=None, keep_prob=1.0):").replace(
        "        self.qkv,", "        self.drop = nn.Dropout(keep_prob)\n        self.qkv,"
    )
    report = judged(tmp_path, source.replace("weights = scores.softmax(-1)", "weights = self.drop(scores.softmax(-1))"))
    assert (report.verdict, report.cause) == ("wrong", "dropout-biased"), report
    assert report.wrong[0].text.startswith("self.drop =")


def test_compared_values_are_read_from_every_form_of_comparison():
    source = (
        "mode == 'a'; self.kind in ('b', 'c'); {'d': 1}[how]; match.size > 3\nmatch x:\n    case 'e':\n        pass\n"
    )
    found = compared(ast.parse(source))
    assert {k: v for k, v in found.items() if k in ("mode", "kind", "how", "size", "x")} == {
        "mode": ["a"], "kind": ["b", "c"], "how": ["d"], "size": [3], "x": ["e"],
    }  # fmt: skip
    assert kept_as(ast.parse("self.kind = mode"), "mode") == {"mode", "kind"}


def test_coverage_counts_only_what_returned():
    space: dict = {}
    source = "def f(x):\n    y = 1 if x else 2\n    if x > 1:\n        y = 3\n    return y / (x - 7)\n"
    exec(compile(source, "learner.py", "exec"), space)  # noqa: S102 - ours
    coverage = Coverage("learner.py")
    with coverage:
        space["f"](1)
    with pytest.raises(ZeroDivisionError), coverage:
        space["f"](7)
    assert [(part.node.lineno, ast.unparse(part.node)) for part in coverage.unrun(source)] == [(2, "2"), (4, "y = 3")]
    with coverage:
        space["f"](0), space["f"](2)
    assert not coverage.unrun(source)


def test_a_class_without_source_is_judged_without_branches():
    space: dict = {"__name__": "nowhere"}
    exec(CLASS, space)  # noqa: S102 - ours
    report = check(space["MultiHeadAttention"])
    item = next(item for item in report.certificate if item.name == "every branch was taken")
    assert item.status in ("does not apply", "not judged")
