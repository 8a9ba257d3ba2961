"""What a report says beside a mistake is true of the judged class, too."""

import runpy

import pytest
import torch

from headwise.check.explain import explained
from headwise.check.sizes import CallSizes
from headwise.check.verdict import judge_file

RIGHT = """import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model, self.num_heads, self.d_k = d_model, num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, x, mask=None):
        Q = self.split_heads(self.W_q(x))
        K = self.split_heads(self.W_k(x))
        V = self.split_heads(self.W_v(x))
        scores = Q @ K.transpose(-2, -1) / self.d_k ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        attention = F.softmax(scores, dim=-1)
        output = (attention @ V).transpose(1, 2).contiguous().view(x.size(0), x.size(1), self.d_model)
        output = self.W_o(output)
        return output, attention
"""
READY = """import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, x, mask=None):
        return self.mha(x, x, x, attn_mask=mask)
"""


def report(folder, *pairs, text=RIGHT, form=None):
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    path = folder / "student.py"
    path.write_text(text)
    return judge_file(path, form=form)


def named(found):
    return {finding.name for finding in found.wrong}


def test_a_reference_without_an_output_projection_is_not_compared_with(tmp_path):
    scale, merge = ("self.d_k ** 0.5", "self.num_heads ** 0.5"), ("        output = self.W_o(output)\n", "")
    both = report(tmp_path, scale, merge)
    assert "no-out-proj" in named(both)
    assert (both.proof, both.difference) == ("", "")


def test_rows_that_do_not_sum_to_one_are_not_said_to(tmp_path):
    late = report(tmp_path, (" / self.d_k ** 0.5", ""), ("dim=-1)", "dim=-1) / self.d_k ** 0.5"))
    assert named(late) == {"scale-after-softmax"}
    assert not any("sum to one" in words for words in late.good)


def test_queries_of_zero_hide_no_key(tmp_path):
    found = report(tmp_path, ("self.split_heads(self.W_q(x))", "self.split_heads(F.relu(self.W_q(x)))"))
    assert found.verdict == "wrong"
    assert not any("pattern of visible keys" in words for words in found.variants)


def test_weights_that_are_dropped_by_hand_are_not_masked_after_the_softmax(tmp_path):
    found = report(tmp_path, ("dim=-1)", "dim=-1) * (torch.rand_like(scores) > 0.1)"))
    assert named(found) == {"dropout-in-eval"}
    assert not found.masks, "nothing can be measured, and that is no mistake of the mask"
    assert "those that are kept do not grow by 1 / (1 − p)" in found.wrong[0].detail
    assert not any("sum to one" in words for words in found.good)


@pytest.mark.parametrize(
    ("pair", "fits"),
    [
        (("d_model, num_heads):", "num_heads, d_model):"), "call, return value and mask; what differs: constructor"),
        (("masked_fill(mask == 0,", "masked_fill((1.0 - mask).bool(),"), "what differs: mask"),
        (("return output, attention", "return output + x, attention"), "but the input is added to the output"),
    ],
)
def test_what_differs_from_the_assignment_is_not_said_to_fit(pair, fits, tmp_path):
    found = report(tmp_path, pair, form="course")
    assert fits in found.fits


def test_attributes_are_named_as_attributes_and_a_mask_of_either_kind_has_a_cure(tmp_path):
    other = RIGHT.replace("self.num_heads", "self.heads")
    found = report(tmp_path, ("masked_fill(mask == 0,", "masked_fill((1.0 - mask).bool(),"), text=other, form="course")
    told = {finding.name: finding.detail for finding in found.findings}
    assert "self.num_heads, not found here" in told["form-name"]
    assert "mask == 0 takes numbers and booleans" in told["form-mask"]


def test_weights_that_are_averaged_over_heads_are_named_so(tmp_path):
    found = report(tmp_path, text=READY)
    (item,) = (item for item in found.certificate if item.name.startswith("returned weights"))
    assert "they are the mean over heads, not the weights of a head" in item.words


def test_swapped_sizes_of_a_linear_layer_are_named_so(tmp_path):
    (tmp_path / "head.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Head(nn.Module):\n    def __init__(self, d_model, d_head):\n"
        "        super().__init__()\n        self.q = nn.Linear(d_head, d_model)\n\n    def forward(self, x):\n"
        "        q = self.q(x)\n        return (q @ q.mT).softmax(-1) @ q\n"
    )
    space = runpy.run_path(str(tmp_path / "head.py"))
    try:
        space["Head"](13, 7)(torch.randn(2, 5, 13))
    except RuntimeError as error:
        found = explained(error, str(tmp_path / "head.py"), CallSizes(B=2, T=5, S=5, H=1, E=13, O=7))
    assert found.name == "layer-width"
    assert "the two sizes of nn.Linear are swapped" in found.detail
    assert found.line == 8
