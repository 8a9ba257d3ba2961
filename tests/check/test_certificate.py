"""RIGHT needs every item of the certificate: classes that are right in one call and wrong in another."""

import pytest

from headwise.check.faults import CERTIFICATE
from headwise.check.report import Report
from headwise.check.verdict import judge_file

CLASS = """\
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

class MultiHeadAttention(nn.Module):
    def __init__(self, d_in, d_out, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_out // num_heads
        self.W_q = nn.Linear(d_in, d_out)
        self.W_k = nn.Linear(d_in, d_out)
        self.W_v = nn.Linear(d_in, d_out)
        self.W_o = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, query, key, value, mask=None, causal=False):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if causal:
            scores = scores.masked_fill(torch.ones(q.size(2), k.size(2), device=q.device).triu(1).bool(), float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = scores.softmax(dim=-1)
        context = (self.dropout(weights) @ v).transpose(1, 2).flatten(2)
        output = self.W_o(context)
        return output, weights
"""
# Mistake → (old text, new text, start of the line that is to blame).
WRONG = {
    "attention-unused": ("output = self.W_o(context)", "output = self.W_o(self.W_q(query))", "output ="),
    "projected-twice": ("self.W_o(context)", "self.W_o(self.W_o(context))", "output ="),
    "wrong-role": ("output = self.W_o(context)", "output = self.W_v(context)", "output ="),
    "values-scaled": ("self.split(self.W_v(value))", "self.split(self.W_v(value)) * 2", "q, k, v ="),
    "mask-transposed": ("masked_fill(mask == 0,", "masked_fill(mask.transpose(-2, -1) == 0,", "scores = scores.masked"),
    "mask-some-heads": (
        'scores = scores.masked_fill(mask == 0, float("-inf"))',
        'scores = torch.cat([scores[:, :1].masked_fill(mask == 0, float("-inf")), scores[:, 1:]], 1)',
        "scores = torch.cat",
    ),
    "mask-nan": (
        'scores.masked_fill(mask == 0, float("-inf"))',
        'scores + (1 - mask.double()) * float("-inf")',
        "scores = scores +",
    ),
    "mask-content-ignored": (
        "masked_fill(mask == 0,",
        "masked_fill(torch.ones(q.size(2), k.size(2), device=q.device).triu(1).bool(),",
        "scores = scores.masked_fill(torch.ones",
    ),
    "masks-combined": ("        if mask is not None:", "        if mask is not None and not causal:", ""),
    "dropout-on-scores": ("weights = scores.softmax", "weights = self.dropout(scores).softmax", "weights ="),
    "dropout-biased": (
        "self.dropout(weights) @ v",
        "(weights * (torch.rand_like(weights) > 0.5) if self.training else weights) @ v",
        "context =",
    ),
    "training-differs": ("weights = scores", "weights = (scores * 2 if self.training else scores)", "weights ="),
    "gradient-cut": ("scores.softmax(dim=-1)", "scores.softmax(dim=-1).detach()", "weights ="),
    "weights-detached": ("return output, weights", "return output, weights.detach()", "return output"),
    "weights-returned": ("return output, weights", "return output, scores", ""),
    "widths-confused": ("self.W_v = nn.Linear(d_in, d_out)", "self.W_v = nn.Linear(d_out, d_out)", "self.W_v ="),
    "input-modified": ("        q, k, v = self", "        value.mul_(2)\n        q, k, v = self", "value.mul_"),
    "remembers-calls": (
        "        weights = scores",
        "        self.first = getattr(self, 'first', scores)\n        weights = ((scores + self.first) / 2)",
        "self.first",
    ),
    "softmax-twice": ("scores.softmax(dim=-1)", "scores.softmax(dim=-1).softmax(dim=-1)", "weights ="),
    "cross-length": ("self.split(self.W_k(key))", "self.split(self.W_k(key))[:, :, : query.size(1)]", ""),
    "causal-ignored": ("triu(1).bool()", "triu(9).bool()", ""),
    "mask-crashes": ("if causal:", "if causal:\n            scores = scores + self.bias", ""),
}  # fmt: skip


def judged(tmp_path, source) -> Report:
    path = tmp_path / "attention.py"
    path.write_text(source)
    return judge_file(path, thorough=False)


def test_the_class_itself_gets_the_whole_certificate(tmp_path):
    report = judged(tmp_path, CLASS)
    assert (report.verdict, report.exit_code) == ("right", 0), report
    assert [item.name for item in report.certificate] == list(CERTIFICATE)
    assert {item.status for item in report.certificate} == {"verified"}
    assert all(f"✓ {item.name}" in str(report) for item in report.certificate)
    assert Report.from_dict(report.to_dict()).certificate == report.certificate


@pytest.mark.parametrize("mistake", WRONG)
def test_what_one_call_does_not_show_is_named_with_its_line(mistake, tmp_path):
    old, new, line = WRONG[mistake]
    assert old in CLASS
    report = judged(tmp_path, CLASS.replace(old, new))
    assert report.verdict == "wrong", report
    finding = next((f for f in report.wrong if f.name == mistake), None)
    assert finding is not None, report
    assert finding.text.startswith(line), report


def test_padding_applied_to_queries_is_named(tmp_path):
    old, new = "mask == 0,", "(mask == 0)[:, None, :, None],"
    assert "mask-on-queries" in {f.name for f in judged(tmp_path, CLASS.replace(old, new)).wrong}


def test_a_result_that_is_returned_only_with_a_mask_is_named(tmp_path):
    lines = CLASS.splitlines()
    start = next(i for i, line in enumerate(lines) if "weights = scores" in line)
    source = "\n".join([*lines[:start], *("    " + line for line in lines[start:])])
    report = judged(tmp_path, source)
    assert (report.verdict, report.cause) == ("wrong", "no-return"), report


def test_a_size_that_is_read_from_the_module_instead_of_the_argument_is_named(tmp_path):
    source = "num_heads = 4\n" + CLASS.replace("-1, self.num_heads, self.d_k", "-1, num_heads, self.d_k")
    report = judged(tmp_path, source)
    assert (report.verdict, report.cause) == ("wrong", "reads-globals"), report


def test_a_comment_that_says_the_opposite_of_the_mask_is_held_against_it(tmp_path):
    said = CLASS.replace("        if mask is not None:", "        # mask: True = padding\n        if mask is not None:")
    report = judged(tmp_path, said)
    assert (report.verdict, report.cause) == ("wrong", "mask-convention"), report
    kept = CLASS.replace("        if mask is not None:", "        # mask: 1 = keep\n        if mask is not None:")
    assert judged(tmp_path, kept).verdict == "right"


def test_an_argument_that_could_not_be_tried_makes_it_right_as_far_as_tested(tmp_path):
    source = CLASS.replace("causal=False):", "causal=False, hint=None):").replace("context = (", "context = hint or (")
    report = judged(tmp_path, source)
    assert (report.verdict, report.exit_code) == ("partial", 2), report
    assert [item.words for item in report.certificate if item.status == "not judged"] == ["the argument hint"]


def test_a_norm_or_a_gate_before_the_output_projection_is_a_variant(tmp_path):
    norm = CLASS.replace("self.dropout = nn", "self.norm = nn.LayerNorm(d_out)\n        self.dropout = nn")
    report = judged(tmp_path, norm.replace("self.W_o(context)", "self.W_o(self.norm(context))"))
    assert (report.verdict, report.variants) == ("variant", ["a norm between the heads and the output projection"])
    gate = CLASS.replace("self.dropout = nn", "self.gate = nn.Linear(d_in, d_out)\n        self.dropout = nn")
    report = judged(tmp_path, gate.replace("W_o(context)", "W_o(context * torch.sigmoid(self.gate(query)))"))
    assert (report.verdict, report.variants) == ("variant", ["a gate between the heads and the output projection"])


def test_a_cache_kept_inside_must_give_the_same_result_token_by_token(tmp_path):
    source = CLASS.replace("causal=False):", "causal=False, use_cache=False):").replace(
        "        scores = q @",
        "        if use_cache:\n"
        "            k = torch.cat([getattr(self, 'k', k[:, :, :0]), k], 2)\n"
        "            v = torch.cat([getattr(self, 'v', v[:, :, :0]), v], 2)\n"
        "            self.k, self.v = k, v\n"
        "        scores = q @",
    )
    assert judged(tmp_path, source).verdict == "right"
    wrong = judged(tmp_path, source.replace("'v', v[:, :, :0]), v], 2)", "'v', v[:, :, :0]).flip(2), v], 2)"))
    assert (wrong.verdict, wrong.cause) == ("wrong", "cache-differs"), wrong
