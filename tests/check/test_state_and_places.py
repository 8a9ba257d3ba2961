"""State between calls, masks in the wrong place, numbers that hide nothing, and results that keep another shape."""

import pytest

from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")
MASK = 'scores = scores.masked_fill(mask == 0, float("-inf"))'

START = """
import math

import torch
import torch.nn.functional as F
from torch import nn


class {name}(nn.Module):
    def __init__(self, d_model, num_heads{more}):
        super().__init__()
        self.h, self.dk = num_heads, d_model // num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4)){made}

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (w(x).view(B, T, self.h, self.dk).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
"""
END = """
        return self.wo(out.transpose(1, 2).reshape(B, T, C))
"""
PIECES = """
        if self.k is not None:
            k, v = torch.cat([self.k, k], dim=2), torch.cat([self.v, v], dim=2)
        self.k, self.v = k, v
        S = k.size(2)
        scores = q @ k.mT / math.sqrt(self.dk)
        hidden = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
        out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
"""
RESET = """
    def reset_cache(self):
        self.k = self.v = None
"""
MEMORY = """
import torch
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, dim, heads=4, context_dim=None):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.k, self.v = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.o = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        c = x if context is None else context
        q, k, v = (t.unflatten(-1, (self.heads, self.hd)).transpose(1, 2) for t in (self.q(x), self.k(c), self.v(c)))
        weights = (q @ k.mT * self.hd**-0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))
"""
FOLDED = """
        q, k, v = (t.reshape(B * self.h, T, self.dk) for t in (q, k, v))
        out = (torch.bmm(q, k.mT) / math.sqrt(self.dk)).softmax(-1) @ v
        return out
"""
IMAGES = """
import torch
from torch import nn


class ImageAttention(nn.Module):
    def __init__(self, channels, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        B, C, H, W = x.shape
        d = C // self.num_heads
        q, k, v = self.qkv(x).reshape(B, 3 * self.num_heads, d, H * W).chunk(3, dim=1)
        weights = (q.mT @ k * d**-0.5).softmax(-1)
        y = (weights @ v.mT).reshape(B, H * W, C)
        return self.proj(y)
"""
WINDOWS = START + "        out = (q @ k.mT / math.sqrt(self.dk)).softmax(-1) @ v\n" + END


def started(body, name="SelfAttention", more="", made=""):
    return START.format(name=name, more=more, made=made) + body


def judged(folder, text):
    file = folder / "student.py"
    file.write_text(text)
    return judge_file(file, thorough=False)


def told(report):
    return [(f.name, f.text) for f in report.wrong]


def test_values_that_a_mask_sets_to_zero_keep_their_weights(tmp_path):
    text = RIGHT.replace(MASK, "v = v.masked_fill(mask.unsqueeze(-1) == 0, 0.0)").replace("mask=None", "key_mask=None")
    text = text.replace("mask is", "key_mask is").replace("mask.unsqueeze(-1)", "key_mask[:, None, :, None]")
    assert told(judged(tmp_path, text)) == [
        ("mask-on-values", "v = v.masked_fill(key_mask[:, None, :, None] == 0, 0.0)")
    ]


def test_heads_that_are_written_over_each_other_are_named(tmp_path):
    body = """
        att = (q @ k.mT / math.sqrt(self.dk)).softmax(-1) @ v
        out = torch.zeros(B, T, C, dtype=x.dtype)
        for i in range(self.h):
            out[:, :, i * self.dk // 2 : i * self.dk // 2 + self.dk] = att[:, i]
        return self.wo(out)
"""
    report = judged(tmp_path, started(body))
    assert told(report) == [
        ("heads-overwritten", "out[:, :, i * self.dk // 2 : i * self.dk // 2 + self.dk] = att[:, i]")
    ]


def test_a_boolean_mask_that_is_asked_for_and_raises_is_a_crash(tmp_path):
    text = RIGHT.replace(MASK, "scores = scores + (1 - mask) * -1e9")
    asked = text.replace(
        "        batch =", "        # mask: a boolean mask, True for tokens to keep\n        batch =", 1
    )
    assert judged(tmp_path, text).verdict == "right"
    assert told(judged(tmp_path, asked)) == [("mask-crashes", "scores = scores + (1 - mask) * -1e9")]


@pytest.mark.parametrize(
    ("right", "wrong", "verdict"),
    [
        ("", "", "variant"),
        ("triu(S - T + 1)", "triu(1)", "wrong"),
        ("        self.k, self.v = k, v\n", "        self.k, self.v = k[:, :, 1:], v[:, :, 1:]\n", "wrong"),
    ],
    ids=["right", "a causal mask that starts anew", "the first token of every piece is lost"],
)
def test_an_object_that_remembers_until_it_is_reset_is_asked_in_pieces(tmp_path, right, wrong, verdict):
    text = started(PIECES + END, name="CachedAttention", made="\n        self.k = self.v = None") + RESET
    report = judged(tmp_path, text.replace(right, wrong) if right else text)
    assert report.verdict == verdict, report
    if verdict == "wrong":
        assert [f.name for f in report.wrong] == ["cache-differs"]


def test_one_added_to_the_scores_of_later_tokens_hides_nothing(tmp_path):
    body = """
        scores = q @ k.mT / math.sqrt(self.dk) + torch.ones(T, T, dtype=x.dtype).triu(1)
        out = scores.softmax(-1) @ v
"""
    report = judged(tmp_path, started(body + END, name="CausalAttention"))
    assert [f.name for f in report.wrong] == ["mask-leaks"], report
    assert "+1 is added to the scores of later tokens" in report.wrong[0].detail
    distance = "torch.arange(T)[None, :] - torch.arange(T)[:, None]"
    sloped = body.replace("torch.ones(T, T, dtype=x.dtype).triu(1)", f"0.1 * -({distance}).abs()")
    assert judged(tmp_path, started(sloped + END)).verdict == "variant"


def test_a_part_that_is_not_given_the_rate_of_dropout_is_named(tmp_path):
    part = """
class Core(nn.Module):
    def __init__(self, p_drop=0.3):
        super().__init__()
        self.drop = nn.Dropout(p_drop)

    def forward(self, q, k, v):
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return self.drop(weights) @ v


class SelfAttention"""
    text = started("        out = self.core(q, k, v)\n" + END, more=", dropout=0.1",
                   made="\n        self.core = Core()\n        self.drop = nn.Dropout(dropout)")  # fmt: skip
    text = text.replace("class SelfAttention", part).replace("return self.wo(", "return self.drop(self.wo(")
    text = text.replace("reshape(B, T, C))", "reshape(B, T, C)))")
    assert told(judged(tmp_path, text)) == [("dropout-rate", "self.core = Core()")]
    given = judged(tmp_path, text.replace("Core()", "Core(dropout)"))
    assert not given.wrong, given


@pytest.mark.parametrize("name", ["context_dim", "cross_attention_dim", "encoder_dim"])
def test_a_memory_whose_width_is_none_by_default_is_read(tmp_path, name):
    text = MEMORY.replace("context_dim", name)
    assert judged(tmp_path, text).verdict in ("right", "variant")
    swapped = judged(tmp_path, text.replace("self.v(c)", "self.v(x)"))
    assert swapped.verdict == "wrong", swapped


def test_heads_that_stay_in_the_batch_are_an_output_of_another_shape(tmp_path):
    report = judged(tmp_path, started(FOLDED))
    assert [f.name for f in report.wrong] == ["output-shape"], report
    assert "heads that were folded into the batch stay there" in report.wrong[0].detail


def test_an_error_after_the_attention_of_an_image_counts(tmp_path):
    assert told(judged(tmp_path, IMAGES))[0][1] == "return self.proj(y)"
    mended = IMAGES.replace("reshape(B, H * W, C)", "transpose(2, 3).reshape(B, C, H, W)")
    assert judged(tmp_path, mended).verdict in ("right", "variant")


def test_a_window_that_the_caller_cuts_is_not_called_wrong(tmp_path):
    more = {"more": ", window_size=4", "made": "\n        self.window_size = window_size"}
    cut = judged(tmp_path, WINDOWS.format(name="WindowAttention", **more))
    assert cut.verdict == "partial", cut
    assert judged(tmp_path, WINDOWS.format(name="SelfAttention", **more)).cause == "option-ignored"


def test_a_memory_in_channels_first_sequences_is_found(tmp_path):
    text = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, channels, n_heads=4):
        super().__init__()
        self.n_heads, self.d = n_heads, channels // n_heads
        self.conv_q, self.conv_k, self.conv_v, self.conv_o = (nn.Conv1d(channels, channels, 1) for _ in range(4))

    def forward(self, x, c):
        B, C, T = x.shape
        q, k, v = (f.view(B, self.n_heads, self.d, -1) for f in (self.conv_q(x), self.conv_k(c), self.conv_v(c)))
        weights = (q.mT @ k / self.d**0.5).softmax(-1)
        return self.conv_o((weights @ v.mT).mT.reshape(B, C, T))
"""
    assert judged(tmp_path, text).verdict in ("right", "variant", "partial")
    wrong = judged(tmp_path, text.replace("self.conv_k(c)", "self.conv_k(x)"))
    assert wrong.verdict == "wrong", wrong
