"""What a class may be excused for needs evidence: rates, biases, windows, norms and caches are measured."""

import pytest
from test_public_habits import RIGHT, changed, judged

from headwise.check.templates import write

ALIBI = '''import math
import torch
from torch import nn


class Attention(nn.Module):
    """Causal attention; each head subtracts its slope times the distance."""

    def __init__(self, dim, num_heads, window=4):
        super().__init__()
        self.num_heads, self.head_dim, self.window = num_heads, dim // num_heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, num_heads + 1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        i = torch.arange(t, device=x.device)
        away = i[:, None] - i
        scores = scores - self.slopes[:, None, None] * away.clamp(min=0)
        visible = (away >= 0) & (away < self.window)
        out = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(b, t, c))
'''
WRONG_BIAS = {
    "one slope for all heads": ("self.slopes[:, None, None]", "self.slopes[0]", "bias-heads"),
    "a sum of all slopes": ("self.slopes[:, None, None]", "self.slopes.sum()", "bias-heads"),
    "the distance to later keys": ("away.clamp(min=0)", "(-away).clamp(min=0)", "bias-constant"),
    "a window that is a number": ("away < self.window", "away < 4", "option-ignored"),
    "no window": (" & (away < self.window)", "", "option-ignored"),
    "a window on both sides": ("(away >= 0) & (away < self.window)", "away.abs() < self.window", "causal-ignored"),
    "a window without the token itself": ("away >= 0", "away > 0", "causal-off-by-one"),
}


def test_window_with_a_bias_by_distance_is_right(tmp_path):
    report = judged(tmp_path, ALIBI)
    assert report.verdict == "variant", report


@pytest.mark.parametrize(("old", "new", "cause"), WRONG_BIAS.values(), ids=WRONG_BIAS)
def test_bias_and_window_must_do_what_is_stored_and_said_for_them(tmp_path, old, new, cause):
    report = judged(tmp_path, changed(ALIBI, (old, new)))
    assert (report.verdict, report.cause) == ("wrong", cause), report
    assert new.strip(" &") in report.wrong[0].text


TWO_RATES = changed(
    RIGHT,
    ("dropout=0.1)", "attn_drop=0.1, proj_drop=0.1)"),
    (
        "self.dropout = nn.Dropout(dropout)",
        "self.early = nn.Dropout(attn_drop)\n        self.late = nn.Dropout(proj_drop)",
    ),
    ("self.dropout(weights)", "self.early(weights)"),
    ("return self.w_o(merged)", "return self.late(self.w_o(merged))"),
)
RATES = {
    "a number": (("nn.Dropout(proj_drop)", "nn.Dropout(0.1)"),),
    "half of it": (("nn.Dropout(attn_drop)", "nn.Dropout(attn_drop / 2)"),),
    "swapped": (("nn.Dropout(attn_drop)", "nn.Dropout(swapped)"), ("nn.Dropout(proj_drop)", "nn.Dropout(attn_drop)"),
                ("swapped", "proj_drop")),
}  # fmt: skip


def test_two_rates_of_dropout_are_right(tmp_path):
    assert judged(tmp_path, TWO_RATES).verdict == "right"


@pytest.mark.parametrize("pairs", RATES.values(), ids=RATES)
def test_dropout_must_act_at_the_rate_and_the_place_of_its_argument(tmp_path, pairs):
    report = judged(tmp_path, changed(TWO_RATES, *pairs))
    assert (report.verdict, report.cause) == ("wrong", "dropout-rate"), report


@pytest.mark.parametrize("name", ["q", "v"])
def test_norm_of_one_alone_is_not_called_right(tmp_path, name):
    scores = "        scores = torch.matmul"
    text = changed(RIGHT, (scores, f"        {name} = nn.functional.normalize({name}, dim=-1)\n{scores}"))
    assert judged(tmp_path, text).verdict == "partial"


def test_hidden_ones_with_a_large_number_beside_a_causal_mask_are_right(tmp_path):
    hidden = """        if padding is not None:
            att = att + padding[:, None, None, :].to(att.dtype) * -1e4
        att = F.softmax("""
    text = changed(
        write("fused"),
        ("def forward(self, x", "def forward(self, x, padding=None"),
        ("        att = F.softmax(", hidden),
    )
    report = judged(tmp_path, text)
    assert report.verdict == "variant", report
