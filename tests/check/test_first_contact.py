"""What fresh files showed: rows in several orders, overlapping heads, modes, chains of shapes, private names."""

import sys

import pytest

from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")

MULTI_QUERY = """
import torch
from torch import nn


class MultiQueryAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.hd = num_heads, dim // num_heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * self.hd, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q = torch.stack(self.q(x).split(self.hd, dim=-1), dim=1)
        k, v = self.kv(x).split(self.hd, dim=-1)
        weights = (torch.einsum("bhqd,bkd->bhqk", q, k) * self.hd**-0.5).softmax(-1)
        return self.o(torch.einsum("bhqk,bkd->bqhd", weights, v).flatten(2))
"""

PIXELS = """
import torch
from torch import nn


class PixelAttention(nn.Module):
    def __init__(self, channels, num_heads=2):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Conv2d(channels, channels, 1)
        self.key = nn.Conv2d(channels, channels, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        N, C, H, W = x.shape
        d = C // self.num_heads
        q, k, v = (f(x).view(N, self.num_heads, d, H * W) for f in (self.query, self.key, self.value))
        weights = (q.transpose(2, 3) @ k / d**0.5).softmax(-1)
        y = (weights @ v.transpose(2, 3)).transpose(2, 3)
        return self.out(y.reshape(N, C, H, W))
"""

LOOP = """
import torch
from torch import nn


class LoopAttention(nn.Module):
    def __init__(self, width, n_heads, mask_type="causal"):
        super().__init__()
        self.n_heads, self.head_width, self.mask_type = n_heads, width // n_heads, mask_type
        self.proj_q = nn.Linear(width, width)
        self.proj_k = nn.Linear(width, width)
        self.proj_v = nn.Linear(width, width)
        self.proj_o = nn.Linear(width, width)

    def forward(self, x):
        Q, K, V, n, outs = self.proj_q(x), self.proj_k(x), self.proj_v(x), x.size(1), []
        for h in range(self.n_heads):
            first = h * self.head_width
            q, k, v = (y[:, :, first : first + self.head_width] for y in (Q, K, V))
            scores = q @ k.transpose(1, 2) / self.head_width**0.5
            if self.mask_type == "causal":
                scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
            outs.append(scores.softmax(-1) @ v)
        return self.proj_o(torch.cat(outs, dim=-1))
"""

ONE_LENGTH = """
import math
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads, self.d_k = n_heads, d_model // n_heads
        self.key = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.fc = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        q = self.query(q)  # N x T x (h d_k)
        k = self.key(k)  # N x T x (h d_k)
        v = self.value(v)  # N x T x (h d_k)
        N, T = q.shape[:2]
        q, k, v = (y.view(N, T, self.n_heads, self.d_k).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            # mask: (N, T) -> mask[:, None, None, :] -> mask: (N, 1, 1, T)
            scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        return self.fc((scores.softmax(-1) @ v).transpose(1, 2).reshape(N, T, -1))
"""

SEQUENCE_FIRST = """
import torch
from torch import nn


class SequenceFirst(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, attn_mask=None):
        # x: (T, B, E)
        T, B, E = x.shape
        q, k, v = (y.reshape(T, B * self.num_heads, -1).transpose(0, 1) for y in self.in_proj(x).chunk(3, dim=-1))
        scores = torch.bmm(q * self.head_dim**-0.5, k.transpose(1, 2))
        if attn_mask is not None:
            scores = scores + attn_mask
        return self.out_proj(torch.bmm(scores.softmax(-1), v).transpose(0, 1).reshape(T, B, E))
"""


def judged(folder, text, name="my_file.py"):
    path = folder / name
    path.write_text(text)
    return judge_file(path, thorough=False)


def changed(text, *pairs):
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize(
    ("text", "verdict"),
    [(MULTI_QUERY, "variant"), (PIXELS, "right"), (LOOP, "variant"), (ONE_LENGTH, "right"), (SEQUENCE_FIRST, "right")],
    ids=["rows in two orders", "pixels", "loop over slices", "one length by comments", "mask of batch × heads"],
)
def test_right_files_of_unusual_form_are_right(text, verdict, tmp_path):
    report = judged(tmp_path, text)
    assert report.verdict == verdict, report


@pytest.mark.parametrize(
    ("text", "cause", "line"),
    [
        (changed(MULTI_QUERY, ("bkd->bqhd", "bkd->bhqd"), ("flatten(2)", "reshape(x.shape)")), "merge-view", "return"),
        (changed(PIXELS, (".transpose(2, 3)).transpose(2, 3)", ".transpose(2, 3))")), "merge-view", "return self.out"),
        (changed(LOOP, ("first = h * self.head_width", "first = h")), "heads-overlap", "q, k, v ="),
        (changed(LOOP, ('== "causal"', '== "casual"')), "option-ignored", "if self.mask_type"),
        (changed(ONE_LENGTH, ("mask[:, None, None, :] == 0, float(\"-inf\")", "mask[:, None, :, None] == 0, -1e9")),
         "mask-on-queries", "scores = scores.masked"),
        ("from my_file import MultiHeadAttention\n" + RIGHT, "imports-itself", "from my_file"),
    ],
    ids=["merge of rows", "merge of pixels", "overlapping", "misspelled mode", "padding of queries", "own import"],
)  # fmt: skip
def test_mistakes_of_unusual_form_are_named_with_their_line(text, cause, line, tmp_path):
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", cause), report
    assert report.wrong[0].text.startswith(line)


def test_name_of_a_class_says_nothing_about_its_private_layers(tmp_path):
    text = changed(MULTI_QUERY, ("self.o", "self.__o"), ("self.kv", "self.__kv"))
    assert judged(tmp_path, text).verdict == "variant"


def test_bias_that_is_written_down_beside_an_option_is_not_called_wrong(tmp_path):
    text = changed(LOOP, ('mask_type="causal"', 'bias=True, mask_type="causal"'),
                   ("proj_q = nn.Linear(width, width)", "proj_q = nn.Linear(width, width, bias=bias)"),
                   ("proj_k = nn.Linear(width, width)", "proj_k = nn.Linear(width, width, bias=bias)"),
                   ("proj_v = nn.Linear(width, width)", "proj_v = nn.Linear(width, width, bias=True)"))  # fmt: skip
    report = judged(tmp_path, text)
    assert report.verdict == "partial", report
    assert "proj_v.bias is meant to stay" in str(report)


def test_default_of_a_pair_is_kept_as_a_pair(tmp_path):
    text = changed(LOOP, ('mask_type="causal"', 'window_size=(3, 3)'), (', mask_type\n', ', "causal"\n'),
                   ("super().__init__()", "super().__init__()\n        rows, columns = window_size"))  # fmt: skip
    assert judged(tmp_path, text).verdict in ("variant", "partial")


def test_initialization_that_is_misspelled_is_told_as_such(tmp_path):
    report = judged(tmp_path, changed(LOOP, ("super().__init__()", "super().__init()")))
    assert (report.verdict, report.cause) == ("wrong", "misspelled-method"), report
    assert "did you mean super().__init__()?" in report.wrong[0].detail


def test_name_that_is_read_in_its_own_first_assignment_is_used_before_it_is_set(tmp_path):
    text = changed(ONE_LENGTH, ("def forward(self, q, k, v", "def forward(self, x, k, v"))
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "used-before-set"), report
    assert report.wrong[0].text.startswith("q = self.query(q)")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 evaluates annotations when asked")
def test_import_that_only_an_annotation_needs_is_missing(tmp_path):
    text = changed(ONE_LENGTH, ("mask=None", "mask: Optional[object] = None"))
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "missing-import"), report
    assert report.wrong[0].detail == "Optional"
    later = judged(tmp_path, "from __future__ import annotations\n" + text)
    assert later.verdict == "right", later


SIZES_IN_THE_CALL = """import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def forward(self, head, d_model, query, key, value, mask=None):
        w_q, w_k, w_v, w_o = (nn.Linear(d_model, d_model) for _ in range(4))
        parts = [w(x).unflatten(-1, (head, -1)).transpose(1, 2) for w, x in ((w_q, query), (w_k, key), (w_v, value))]
        scores = parts[0] @ parts[1].mT / (d_model // head) ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)
        return w_o((scores.softmax(-1) @ parts[2]).transpose(1, 2).flatten(2))
"""


def test_sizes_that_every_call_is_given_are_those_of_the_layer(tmp_path):
    assert judged(tmp_path, SIZES_IN_THE_CALL).cause == "layers-in-forward"


CONVOLVED = """import torch
from torch import nn


class SelfAttentionBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        B, C, H, W = x.shape
        q, k, v = self.qkv(x).flatten(2).chunk(3, dim=1)
        weights = torch.softmax(q.transpose(1, 2) @ k / C**0.5, dim=-1)
        return x + self.proj((v @ weights.transpose(1, 2)).reshape(B, C, H, W))
"""


def test_a_block_with_convolutions_in_place_of_linear_layers_is_judged(tmp_path):
    assert judged(tmp_path, CONVOLVED).verdict == "variant"
    assert judged(tmp_path, CONVOLVED.replace("C**0.5", "C")).cause == "scale-no-sqrt"


WHOLE = """import torch
from torch import nn


class Windowed(nn.Module):
    def __init__(self, d_model: int, n_heads: int, sliding_window: int):
        super().__init__()
        self.n_heads, self.window = n_heads, sliding_window
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        seen = (back >= 0) & (back < min(self.window, x.shape[1]))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def test_an_argument_annotated_as_a_whole_number_is_given_one(tmp_path):
    assert judged(tmp_path, WHOLE).verdict in ("variant", "partial")


CONFUSED = """import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, n_embed, head_size, block_size):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(n_embed, head_size, bias=False) for _ in range(3))
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x, mask=False, enc_out=None):
        memory = x if enc_out is None else enc_out
        scores = self.q(x) @ self.k(memory).mT / self.q.out_features**0.5
        if mask:
            scores = scores.masked_fill(self.tril[: x.shape[1], : x.shape[1]] == 0, float("-inf"))
        return scores.softmax(-1) @ self.v(memory)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_heads, n_embed, head_size, block_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embed, head_size, block_size) for _ in range(n_heads)])
        self.fc_out = nn.Linear(n_heads * head_size, n_embed)

    def forward(self, x, enc_out=None):
        return self.fc_out(torch.cat([head(x, enc_out) for head in self.heads], dim=-1))
"""


def test_an_optional_input_that_always_raises_is_wrong_and_a_switch_inside_of_a_head_is_no_lost_mask(tmp_path):
    report = judged(tmp_path, CONFUSED)
    assert (report.cause, report.wrong[0].text.strip()) == ("tensor-as-condition", "if mask:")
    assert judged(tmp_path, CONFUSED.replace("head(x, enc_out)", "head(x, False, enc_out)")).verdict != "wrong"


GROUPS = """import torch
from torch import nn


class PixelAttention(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm = nn.GroupNorm(32, channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).chunk(3, dim=-1)
        y = self.proj((q @ k.mT / c**0.5).softmax(-1) @ v)
        return x + y.transpose(1, 2).reshape(b, c, h, w)
"""


def test_a_width_that_must_be_divisible_is_tried_with_its_multiples(tmp_path):
    report = judged(tmp_path, GROUPS)
    assert report.verdict == "variant", report
    sizes = next(item.words for item in report.certificate if "three sizes" in item.name)
    multiples = ["32", "224", "160"]  # of 32 and of the number of heads: 4, then 7 and 5, as it is a picture
    assert [part.split()[0] for part in sizes.split(", ")] == multiples


LISTED = """import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, d_in, d_out, context_length):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1).bool())

    def forward(self, x):
        scores = self.q(x) @ self.k(x).mT / self.q.out_features**0.5
        scores = scores.masked_fill(self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
        return scores.softmax(-1) @ self.v(x)


class MultiHeadAttentionWrapper(nn.Module):
    def __init__(self, d_in, d_out, context_length, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([CausalAttention(d_in, d_out, context_length)] * num_heads)

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)
"""


def test_one_head_that_is_listed_several_times_is_told_as_shared_weights_where_the_list_is_made(tmp_path):
    report = judged(tmp_path, LISTED)
    assert [f.name for f in report.wrong] == ["heads-share-weights"], report
    assert "ModuleList" in report.wrong[0].text
    assert not any("averaged" in words for words in report.variants)


ALWAYS = write("fused").replace("dropout=0.0", "causal=False").replace("self.drop = dropout", "self.causal = causal")
ALWAYS = ALWAYS.replace("        att = F.dropout(att, self.drop, self.training)\n", "")
CONFIGURED = """
import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.n_haed, self.n_embd = config.n_haed, config.n_embd
        self.c_attn, self.c_proj = nn.Linear(config.n_embd, 3 * config.n_embd), nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_haed, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))
"""
ARRAYS = """
import numpy as np


def self_attention(Q, K, V):
    scores = Q @ K.transpose(0, 1, 3, 2) / K.shape[-1] ** 0.5
    weights = np.exp(scores) / np.sum(np.exp(scores), axis=-1, keepdims=True)
    return weights @ V


def multi_head_attention(Q, K, V, n_heads):
    b, l, d = Q.shape
    q, k, v = (x.reshape(b, l, n_heads, d // n_heads).transpose(0, 2, 1, 3) for x in (Q, K, V))
    return self_attention(q, k, v).transpose(0, 2, 1, 3).reshape(b, l, d)
"""


def test_a_causal_mask_that_no_switch_turns_off_is_an_option_without_effect(tmp_path):
    report = judged(tmp_path, ALWAYS)
    assert report.cause == "option-ignored"
    assert report.wrong[0].detail == "it is causal with causal=False as well"
    assert "masked_fill" in report.wrong[0].text


def test_a_misspelled_key_of_the_configuration_is_named_with_the_key_that_was_meant(tmp_path):
    found = judged(tmp_path, CONFIGURED).wrong
    assert [f.detail for f in found] == ["config.n_haed; did you mean n_head, as in line 9?"]
    defined = CONFIGURED + "\n\nclass Config:\n    n_haed = 4\n    n_head = 4\n    n_embd = 32\n"
    assert judged(tmp_path, defined).cause != "missing-attribute"


def test_functions_written_for_numpy_are_not_judged(tmp_path):
    report = judged(tmp_path, ARRAYS)
    assert (report.verdict, report.findings) == ("unknown", [])
    beside = judged(tmp_path, f"import torch\n{ARRAYS}\n\nx = torch.zeros(1)\n")
    assert beside.verdict != "wrong", beside


def test_a_comment_on_another_mask_says_nothing_about_the_argument(tmp_path):
    said = "        # an additive mask of shape (1, T, S)\n        future_mask = scores.new_zeros(1, 1, 1)\n"
    report = judged(tmp_path, RIGHT.replace("        weights =", f"{said}        weights =", 1))
    assert report.verdict == "right", report


def test_an_output_projected_back_to_the_input_width_is_not_called_wrong(tmp_path):
    text = LISTED.replace(
        "        self.heads =", "        self.out = nn.Linear(num_heads * d_out, d_in)\n        self.heads ="
    )
    text = text.replace("[CausalAttention(d_in, d_out, context_length)] * num_heads",
                        "CausalAttention(d_in, d_out, context_length) for _ in range(num_heads)")  # fmt: skip
    text = text.replace("return torch.cat([head(x) for head in self.heads], dim=-1)",
                        "return self.out(torch.cat([head(x) for head in self.heads], dim=-1))")  # fmt: skip
    report = judged(tmp_path, text)
    assert report.verdict == "partial", report
    assert any("whether the output should be as wide as the input" in item.words for item in report.certificate)


def test_a_mask_whose_axes_are_told_by_their_sizes_is_wrong_where_sizes_are_equal(tmp_path, one_thread):
    file = tmp_path / "attention.py"
    read = "        if mask is not None:\n"
    assert read in RIGHT
    file.write_text(
        RIGHT.replace(read, f"{read}            mask = mask.transpose(0, 1) if len(mask) == self.num_heads else mask\n")
    )
    report = judge_file(file)
    assert report.verdict == "wrong", report
    assert "4 samples, 4 heads and 4 tokens" in report.findings[0].detail
