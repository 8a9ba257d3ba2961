"""Faults that the text of a file shows, where the code never gets as far as running, and what comments admit."""

import pytest

from headwise import check
from headwise.check.templates import write
from headwise.check.verdict import judge_file

HEAD = "import torch\nfrom torch import nn\n"
CLASS = """
class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.dk = num_heads, d_model // num_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def split(self, x):
        return (t.unflatten(-1, (self.h, self.dk)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        scores = q @ k.mT / self.dk**0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def judged(tmp_path, source):
    path = tmp_path / "mine.py"
    path.write_text(HEAD + source)
    return judge_file(path, thorough=False)


def test_the_class_itself_is_right(tmp_path):
    assert judged(tmp_path, CLASS).verdict == "right"


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        ("self.dk = num_heads, d_model", "self.dk = num_heads, self.width", "missing-attribute"),
        ("scores.softmax(-1)", "self.dropout(scores.softmax(-1))", "missing-attribute"),
        ("scores.softmax(-1)", "self.activation(scores.softmax(-1))", "missing-attribute"),
        ("        super().__init__()\n", "", "missing-super"),
        ("self.qkv(x)", "self.qkv(x.reshape(batch, sequence_of_mine, -1))", "undefined-name"),
    ],
)
def test_what_is_read_and_never_set_is_named(old, new, mistake, tmp_path):
    report = judged(tmp_path, CLASS.replace(old, new))
    assert report.verdict == "wrong", report
    assert mistake in {finding.name for finding in report.findings}, report


def test_an_attribute_that_is_asked_for_first_is_no_fault(tmp_path):
    guarded = CLASS.replace(
        "q, k, v = self.split(x)", "q, k, v = self.split(x)\n        hasattr(self, 'x') and self.x()"
    )
    assert judged(tmp_path, guarded).verdict == "right"


def test_a_mask_in_the_place_of_another_parameter_is_named_with_its_line(tmp_path):
    helper = """
def scores_of(q, k, positions=None, mask=None):
    scores = q @ k.mT
    scores = scores if positions is None else scores + positions
    scores = scores / q.size(-1) ** 0.5
    return scores if mask is None else scores + mask * -1e9
"""
    lines = [line for line in CLASS.splitlines() if "mask is not" not in line and "masked_fill" not in line]
    text = "\n".join(lines).replace("q @ k.mT / self.dk**0.5", "scores_of(q, k, mask)")
    report = judged(tmp_path, helper + text)
    found = [finding for finding in report.findings if finding.name == "mask-misplaced"]
    assert report.verdict == "wrong", report
    assert [finding.text for finding in found] == ["scores = scores_of(q, k, mask)"]


@pytest.mark.parametrize(("comment", "verdict"), [("", "wrong"), ("  # the mask is ignored here", "right")])
def test_a_mask_that_a_comment_says_is_left_out_is_a_trap_and_no_mistake(comment, verdict, tmp_path):
    lines = [line for line in CLASS.splitlines() if "mask is not" not in line and "masked_fill" not in line]
    text = "\n".join(lines).replace("self.dk**0.5", "self.dk**0.5" + comment)
    report = judged(tmp_path, text)
    assert report.verdict == verdict, report
    assert "mask-ignored" in {finding.name for finding in report.findings}


def test_a_mask_that_is_not_read_beside_a_causal_one_inside_is_a_trap_and_no_mistake(tmp_path):
    lines = [line for line in CLASS.splitlines() if "mask is not" not in line and "masked_fill" not in line]
    hidden = "scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)\n        return self"
    report = judged(tmp_path, "\n".join(lines).replace("return self", hidden))
    assert report.verdict == "variant", report
    assert [finding.severity for finding in report.findings if finding.name == "mask-ignored"] == ["fragile"]


def test_a_layer_called_by_its_prefill_is_judged(tmp_path):
    assert judged(tmp_path, CLASS.replace("def forward", "def prefill")).verdict == "right"


def test_a_head_does_not_speak_for_the_class_around_it(tmp_path):
    head = """
class Head(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x):
        return (self.q(x) @ self.k(x).mT / x.size(-1) ** 0.5).softmax(-1) @ self.v(x)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, secret, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(d_model) for _ in range(num_heads))
        self.secret = secret["a word that nobody guesses"]

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)
"""
    assert judged(tmp_path, head).verdict == "unknown"


def test_a_function_that_leaves_the_softmax_to_another_one_is_found(tmp_path):
    functions = """
def sdpa(q, k, v):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


def mha(X, Wq, Wk, Wv, Wo, n_heads):
    T, d_model = X.shape
    split = lambda M: (X @ M).reshape(T, n_heads, -1).transpose(0, 1)
    return sdpa(split(Wq), split(Wk), split(Wv)).transpose(0, 1).reshape(T, d_model) @ Wo
"""
    report = judged(tmp_path, functions)
    assert report.verdict == "right", report
    assert report.subject.startswith("mha"), report


def test_a_length_that_a_constant_of_the_module_fixes_is_found_out(tmp_path):
    fixed = "n_tokens = 10\n" + CLASS.replace(
        "q, k, v = self.split(x)", "q, k, v = self.split(x.view(-1, n_tokens, x.size(-1)))"
    )
    assert (
        judged(tmp_path, fixed.replace("(self, x, mask=None)", "(self, x)").replace("mask", "None")).verdict
        != "unknown"
    )


def test_escape_codes_in_a_file_do_not_reach_the_terminal(tmp_path):
    path = tmp_path / "attention.py"
    path.write_text(write("separate", "scale-missing").replace("scores =", "'\x1b[2J\x1b]0;owned\x07'; scores =", 1))
    report = check(path)
    assert report.cause == "scale-missing"
    assert "\x1b" not in str(report)
    assert "\x07" not in str(report)
