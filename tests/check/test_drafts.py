"""Drafts as readers of a book, a homework guide and a handbook write them: each is told by its true cause."""

import linecache
import re

import pytest
from test_consequences import only
from test_public_habits import changed, judged

from headwise.check import check

LONG = """import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.heads, self.depth, self.d_out = num_heads, d_out // num_heads, d_out
        self.W_q = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_k = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_v = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.proj = nn.Linear(d_out, d_out)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("future", torch.ones(context_length, context_length).triu(1))

    def forward(self, x):
        n, t, _ = x.shape
        q = self.W_q(x).view(n, t, self.heads, self.depth)
        k = self.W_k(x).view(n, t, self.heads, self.depth)
        v = self.W_v(x).view(n, t, self.heads, self.depth)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        hidden = self.future[:t, :t].bool()
        scores = q @ k.transpose(2, 3) / self.depth**0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        weights = self.drop(torch.softmax(scores, dim=-1))
        mixed = weights @ v
        mixed = mixed.transpose(1, 2)
        mixed = mixed.reshape(n, t, self.d_out)
        return self.proj(mixed)
"""
MERGE = "mixed.reshape(n, t, self.d_out)"
SCALE = "/ self.depth**0.5"
TURNS = ("q = q.transpose(1, 2)", "k = k.transpose(1, 2)", "v = v.transpose(1, 2)")
LISTED = """import torch
from torch import nn
from headwise.textbook import CausalAttention


class MultiHeadedAttentionWrapper(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.heads = nn.ModuleList(
            [CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)]
        )

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)
"""
JOINED = "torch.cat([head(x) for head in self.heads], dim=-1)"
NARROW = ("CausalAttention(d_in, d_out,", "CausalAttention(d_in, d_out // num_heads,")
OUTSIDE = "batch_size, seq_len, d_model = 4, 100, 768\n"


def lost(*turns):
    return [(turn, turn.partition("= ")[2]) for turn in turns]


# What is changed, the name of the mistake, the start of its line, and words of it.
DRAFTS = {
    "a scale of 8": (LONG, [(SCALE, "/ 8")], "scale-other", "scores = q", "8, a number written into the code"),
    "a scale of 64 ** 0.5": (LONG, [(SCALE, "/ (64 ** 0.5)")], "scale-other", "scores = q", "a number written"),
    "a scale of the head width": (LONG, [(SCALE, "/ self.depth")], "scale-no-sqrt", "scores = q", "divided by 8, not"),
    "a finite fill": (
        LONG, [("-torch.inf", "-20")], "mask-leaks", "scores = scores", "-20 in the softmax, which is not low enough",
    ),
    "a fill of zero": (LONG, [("-torch.inf", "0.0")], "mask-leaks", "scores = scores", "a number near zero"),
    "a mask of numbers": (
        LONG, [(".bool()", "")], "mask-of-numbers", "scores = scores", "hidden holds numbers",
    ),
    "a softmax without an axis": (LONG, [(", dim=-1", "")], "wrong-arguments", "weights =", "gives no dim"),
    "three lost turns": (LONG, lost(*TURNS), "result-dropped", "q.transpose(1, 2)", "and v.transpose(1, 2) leave"),
    "a lost turn before the merge": (
        LONG, [("mixed = mixed.transpose", "mixed.transpose")], "merge-view", "mixed.transpose", "is not assigned",
    ),
    "keys and values that are not split": (
        LONG,
        [(f"self.W_{n}(x).view(n, t, self.heads, self.depth)", f"self.W_{n}(x)") for n in "kv"]
        + [(f"        {turn}\n", "") for turn in TURNS[1:]],
        "product-axes", "k = self.W_k(x)", "k and v are not split into heads",
    ),
    "sizes of the module": (
        LONG + "\n\n" + OUTSIDE,
        [(MERGE, "mixed.contiguous().view(batch_size, seq_len, d_model)")],
        "reads-globals", "mixed = mixed.contiguous", "batch_size, seq_len and d_model are set outside the class",
    ),
    "a mask that is not sliced": (LONG, [("[:t, :t]", "")], "buffer-not-sliced", "scores =", "it runs only when"),
    "heads joined along the batch": (LISTED, [("dim=-1", "dim=0")], "joined-axis", "return", "along the batch"),
    "heads joined along the tokens": (LISTED, [("dim=-1", "dim=1")], "joined-axis", "return", "rows for 5 tokens"),
    "heads that are stacked": (
        LISTED, [(JOINED, JOINED.replace("cat", "stack").replace("-1", "2"))], "joined-axis", "return",
        "stacked on a new axis, and the output is (53 samples, 5 tokens, 4 heads, width 32)",
    ),
    "heads that are chained": (
        LISTED, [(f"return {JOINED}", "for head in self.heads:\n            x = head(x)\n        return x")],
        "heads-chained", "x = head(x)", "not the input",
    ),
    "two arguments in each other's places": (
        LISTED, [("context_length, dropout, qkv_bias)", "dropout, context_length, qkv_bias)")],
        "wrong-arguments", "[CausalAttention(", "dropout is given context_length",
    ),
    "a bias that is not passed on": (
        LISTED, [("dropout, qkv_bias)", "dropout)")], "option-ignored", "[CausalAttention(", "adds no bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "changes", "name", "line", "words"), DRAFTS.values(), ids=DRAFTS)
def test_draft_is_told_by_its_true_cause(tmp_path, text, changes, name, line, words):
    found = only(judged(tmp_path, changed(text, *changes)))
    assert (found.name, found.text[: len(line)]) == (name, line), found
    assert words in found.detail


def test_sizes_of_another_cell_are_named():
    space = {"__name__": "cell"}
    cell = OUTSIDE + changed(LONG, (MERGE, "mixed.contiguous().view(batch_size, seq_len, d_model)"))
    linecache.cache["<cell>"] = len(cell), None, cell.splitlines(keepends=True), "<cell>"
    exec(compile(cell, "<cell>", "exec"), space)  # noqa: S102 - as a notebook does
    found = only(check(space["Attention"]))
    assert found.name == "reads-globals"
    assert found.detail.startswith("batch_size = 4, seq_len = 100 and d_model = 768 are set outside the class")


# Lists of heads.


def test_list_of_narrow_heads_leaves_out_the_projection_on_purpose(tmp_path):
    report = judged(tmp_path, changed(LISTED, NARROW))
    assert report.exit_code == 0, report
    assert "a list of heads side by side, without an output projection" in report.variants


def test_list_of_narrow_heads_that_is_called_multi_head_attention_lacks_a_projection(tmp_path):
    text = changed(LISTED, NARROW)
    name = re.search(r"class (\w*Wrapper)", text)
    assert name is not None
    assert only(judged(tmp_path, text.replace(name[1], "MultiHeadAttention"))).name == "no-out-proj"


def test_list_of_heads_without_a_projection_is_wrong_where_the_document_has_one(tmp_path):
    report = judged(tmp_path, changed(LISTED, NARROW), form="homework")
    found = next(finding for finding in report.wrong if finding.name == "no-out-proj")
    assert "the homework guide has one" in found.detail


def test_list_of_heads_with_a_projection_that_is_never_called_is_wrong(tmp_path):
    made = "        )\n        self.out_proj = nn.Linear(d_out, d_out)\n"
    found = only(judged(tmp_path, changed(LISTED, NARROW, ("        )\n", made))))
    assert found.name == "no-out-proj"
    assert found.detail.startswith("call self.out_proj, which is made in line ")


@pytest.mark.parametrize("joined", ["sum(head(x) for head in self.heads)", JOINED], ids=["sum", "narrow"])
def test_other_width_than_the_assignments_is_not_told_as_another_constructor(joined, tmp_path):
    text = changed(LISTED, (JOINED, joined)) if joined != JOINED else changed(LISTED, NARROW)
    report = judged(tmp_path, text, form="book")
    summed = joined != JOINED
    assert only(report).name == ("heads-averaged" if summed else "form-width")
    assert any("side by side" in words for words in report.variants) is not summed


def test_plain_list_of_heads_is_one_mistake_for_the_book(tmp_path):
    text = changed(LISTED, ("nn.ModuleList(\n            [", "(\n            ["))
    found = only(judged(tmp_path, text, form="book"))
    assert (found.name, found.text) == ("layers-in-list", "self.heads = (")


# Functions and fragments beside an assignment.


def test_function_of_turned_matrices_shows_nothing_of_the_checker(tmp_path):
    text = (
        "import torch\n\n\ndef attention(Q, K, V):\n    return torch.softmax(Q @ K.T / Q.size(-1) ** 0.5, dim=-1) @ V\n"
    )
    report = judged(tmp_path, text, form="handbook")
    assert (report.verdict, report.cause) == ("wrong", "form-constructor"), report
    assert "this is a function" in report.wrong[0].detail


def test_constructor_of_a_block_of_statements_is_not_judged(tmp_path):
    block = "s = Q @ K.transpose(2, 3) / K.size(-1) ** 0.5\nw = torch.softmax(s, dim=-1)\ncontext = w @ V\n"
    report = judged(tmp_path, block, form="homework")
    assert report.exit_code == 0, report
    assert report.fits == ""


def test_object_of_a_fragment_is_not_an_undefined_name(tmp_path):
    blocks = "x = x.view(4, 100, 12, 64)\ns = Q @ K.transpose(2, 3)\nx = x.transpose(1, 2)\nx = x.view(b, seq, d_out)\n"
    report = judged(tmp_path, blocks)
    assert all(finding.name != "undefined-name" for finding in report.findings)
    assert "d_out is d_model" in report.assumed


def test_single_head_takes_no_number_of_heads(tmp_path):
    text = changed(LONG, ("dropout, num_heads, qkv", "dropout, qkv"), ("num_heads, d_out // num_heads,", "1, d_out,"))
    report = judged(tmp_path, text, form="book")
    assert report.wrong[0].detail.endswith("it takes no num_heads"), report


def test_tensor_as_a_condition_is_told_once(tmp_path):
    masked = "if mask:\n            scores = scores.masked_fill(mask == 0, -torch.inf)"
    text = changed(
        LONG, ("scores = scores.masked_fill(hidden, -torch.inf)", masked), ("self, x):", "self, x, mask=None):"),
        ("d_in, d_out, context_length, dropout, num_heads, qkv_bias=False", "d_model, num_heads"),
        ("d_in, d_out, bias=qkv_bias", "d_model, d_model"), ("d_out, d_out", "d_model, d_model"), ("dropout", "0.0"),
        ("d_out // num_heads, d_out", "d_model // num_heads, d_model"),
        ('        self.register_buffer("future", torch.ones(context_length, context_length).triu(1))\n', ""),
        ("        hidden = self.future[:t, :t].bool()\n", ""),
        ("return self.proj(mixed)", "return self.proj(mixed), weights"),
    )  # fmt: skip
    report = judged(tmp_path, text, form="course")
    assert [finding.name for finding in report.wrong] == ["tensor-as-condition"], report


def test_dropout_that_could_not_be_looked_at_is_not_told_to_be_missing(tmp_path):
    report = judged(tmp_path, changed(LONG, ("        super().__init__()\n", "")))
    assert only(report).name == "missing-super"
    assert not any("dropout" in words for words in report.good)


def test_output_of_another_shape_is_shown(tmp_path):
    report = judged(tmp_path, changed(LONG, ("return self.proj(mixed)", "return self.proj(mixed).sum(1)")))
    assert report.exit_code != 0
    assert "(53 samples, width 32)" in str(report), report


def test_unexpected_indent_says_what_to_remove(tmp_path):
    found = only(judged(tmp_path, "import torch\n    x = 1\n"))
    assert "remove the spaces" in found.detail
