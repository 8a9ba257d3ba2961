"""What text promises, what other classes pass on, windows of an image, FlexAttention, and names in other languages."""

import pytest

from headwise.check.verdict import judge_file

START = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class {name}(nn.Module):
    {text}
    def __init__(self, {arguments}):
        super().__init__()
        self.h, self.dk = num_heads, d_model // num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))
        {made}

    def split(self, x):
        return x.view(x.size(0), -1, self.h, self.dk).transpose(1, 2)

    def forward(self, {inputs}):
        q, k, v = self.split(self.wq({q})), self.split(self.wk({k})), self.split(self.wv({v}))
        {steps}
        return self.wo(out.transpose(1, 2).flatten(2))
{after}
"""
MASKED = "out = (q @ k.mT / self.dk**0.5).masked_fill(mask == 0, {fill}).softmax(-1) @ v"
FLEX = """def rule(b, h, i, j):
            return i >= j
        block = create_block_mask(rule, None, None, {lengths}, device="cpu")
        out = flex_attention(q, k, v, block_mask=block)"""
WINDOW = """out = q @ k.mT / self.dk**0.5 + self.table[self.index].permute(2, 0, 1)
        out = out.softmax(-1) @ v"""
WINDOW_MADE = """h, w = window_size
        self.table = nn.Parameter(torch.zeros((2 * h - 1) * (2 * w - 1), num_heads))
        place = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")).flatten(1)
        apart = (place[:, :, None] - place[:, None, :]).permute(1, 2, 0) + torch.tensor([h - 1, w - 1])
        self.register_buffer("index", apart[..., 0] * (2 * w - 1) + apart[..., 1])"""
BLOCK = """

class Block(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.attn = Attention(d_model, num_heads)

    def forward(self, x, memory):
        return x + self.attn({passed})
"""
CHANNELS = "out = ((q.mT @ k / self.dk**0.5).softmax(-1) @ v.mT).mT"


def judged(folder, name="Attention", text='"""Attention."""', arguments="d_model, num_heads", inputs="x", **parts):
    given = {"made": "", "q": "x", "k": "x", "v": "x", "after": ""} | parts
    file = folder / "student.py"
    file.write_text(START.format(name=name, text=text, arguments=arguments, inputs=inputs, **given))
    return judge_file(file, thorough=False)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [('"""Rows that are fully masked give zeros, not NaN."""', "wrong"), ('"""Attention."""', "right")],
    ids=["promised", "not promised"],
)
def test_a_promise_about_rows_without_a_visible_key_is_kept_or_reported(tmp_path, text, verdict):
    report = judged(tmp_path, text=text, inputs="x, mask", steps=MASKED.format(fill="float('-inf')"))
    assert report.verdict == verdict
    assert "nan-empty-row" in [finding.name for finding in report.findings]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [('"""Made for float16."""', "wrong"), ('"""Made for bfloat16."""', "right")],
    ids=["float16", "bfloat16"],
)
def test_a_fill_that_overflows_is_a_mistake_where_float16_is_promised(tmp_path, text, verdict):
    steps = """seen = torch.ones(q.size(2), q.size(2), device=x.device).tril()
        out = (q @ k.mT / self.dk**0.5).masked_fill(seen == 0, -1e9).softmax(-1) @ v"""
    report = judged(tmp_path, name="CausalAttention", text=text, steps=steps)
    assert report.verdict in (("wrong",) if verdict == "wrong" else ("right", "variant"))


@pytest.mark.parametrize(
    ("lengths", "verdicts"),
    [("q.size(2), k.size(2)", ("right", "variant")), ("4, 4", ("wrong", "unknown"))],
    ids=["its lengths", "another length"],
)
def test_flex_attention_is_read_on_the_cpu(tmp_path, lengths, verdicts):
    report = judged(tmp_path, name="CausalAttention", steps=FLEX.format(lengths=lengths))
    assert report.verdict in verdicts


def test_a_window_of_an_image_is_built_for_as_many_places_as_there_are_tokens(tmp_path):
    report = judged(tmp_path, arguments="d_model, num_heads, window_size", steps=WINDOW, made=WINDOW_MADE)
    assert report.verdict in ("right", "variant", "partial")


@pytest.mark.parametrize(
    ("passed", "verdict"),
    [("x, memory, memory", "right"), ("x, memory, x", "wrong"), ("memory, x, memory", "wrong")],
    ids=["keys and values", "values of the queries", "another order"],
)
def test_keys_and_values_that_a_block_takes_from_different_places_are_a_mistake(tmp_path, passed, verdict):
    report = judged(
        tmp_path,
        inputs="query, key, value",
        q="query",
        k="key",
        v="value",
        steps="out = (q @ k.mT / self.dk**0.5).softmax(-1) @ v",
        after=BLOCK.format(passed=passed),
    )
    assert report.verdict == verdict
    if verdict == "wrong":
        assert [f.name for f in report.wrong] == ["wrong-role"]


@pytest.mark.parametrize(
    ("name", "verdict"), [("ChannelAttention", "unknown"), ("Attention", "wrong")], ids=["by its name", "by mistake"]
)
def test_attention_between_channels_is_a_mistake_unless_it_is_meant(tmp_path, name, verdict):
    report = judged(tmp_path, name=name, steps=CHANNELS)
    assert report.verdict == verdict


def test_arguments_are_understood_in_other_languages(tmp_path):
    report = judged(
        tmp_path,
        inputs="chaxun, jian, zhi, yanma=None",
        q="chaxun",
        k="jian",
        v="zhi",
        steps="""out = q @ k.mT / self.dk**0.5
        if yanma is not None:
            out = out.masked_fill(yanma == 0, float("-inf"))
        out = out.softmax(-1) @ v""",
    )
    assert report.verdict == "right"


def test_layers_that_a_list_and_a_module_list_both_hold_are_registered(tmp_path):
    made = "self.all = [self.wq, self.wk, self.wv, self.wo]"
    report = judged(tmp_path, steps="out = (q @ k.mT / self.dk**0.5).softmax(-1) @ v", made=made)
    assert report.verdict == "right"
