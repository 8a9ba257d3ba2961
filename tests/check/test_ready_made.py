"""Constructors that take a layer or a function ready-made."""

import pytest

from headwise.check.verdict import judge_file

ROTARY = """
class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, base=10000):
        super().__init__()
        self.register_buffer("inv", base ** (-torch.arange(0, head_dim, 2).float() / head_dim))

    def forward(self, x):
        angle = torch.outer(torch.arange(x.size(-2), device=x.device).to(x.dtype), self.inv.to(x.dtype))
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
"""
CORE = """
class ScaledDotProductAttention(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
"""
FUNCTION = """
def scaled_dot_product_attention(q, k, v):
    return (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v
"""


def layer(argument, steps, classes=""):
    return f"""
import math

import torch
from torch import nn

{classes}

class SelfAttention(nn.Module):
    def __init__(self, dim, n_heads, {argument}):
        super().__init__()
        self.h, self.d = n_heads, dim // n_heads
        self.part = {argument}
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, self.d).permute(2, 0, 3, 1, 4)
        {steps}
        return self.o(out.transpose(1, 2).reshape(B, T, C))
"""


def judged(folder, text):
    file = folder / "student.py"
    file.write_text(text)
    return judge_file(file, thorough=False)


PLAIN = "out = (q @ k.mT / math.sqrt(self.d)).softmax(-1) @ v"


@pytest.mark.parametrize(
    "turned",
    ["q, k = self.part(q), self.part(k)", "q, k = self.part(q, k)", "q, k = (self.part.rotate(t) for t in (q, k))"],
)
def test_a_part_that_the_file_does_not_have_is_left_out_and_not_judged(tmp_path, turned):
    report = judged(tmp_path, layer("rope", f"{turned}\n        {PLAIN}"))
    assert report.verdict == "partial", report
    assert any("what the part rope does" in item.words for item in report.certificate)
    unscaled = judged(tmp_path, layer("rope", f"{turned}\n        {PLAIN}").replace(" / math.sqrt(self.d)", ""))
    assert [f.name for f in unscaled.wrong] == ["scale-missing"]


def test_a_part_that_the_file_has_is_made_for_every_size(tmp_path):
    report = judged(tmp_path, layer("rotary", f"q, k = self.part(q), self.part(k)\n        {PLAIN}", ROTARY))
    assert report.verdict == "variant", report
    assert report.variants == ["rotary positions"]
    assert report.certificate[1].status == "verified"


@pytest.mark.parametrize("part", [CORE, FUNCTION], ids=["class", "function"])
def test_the_attention_itself_may_be_such_a_part(tmp_path, part):
    text = layer("attention", "out = self.part(q, k, v)", part)
    assert judged(tmp_path, text).verdict == "right"
    found = judged(tmp_path, text.replace("softmax(-1)", "softmax(-2)")).wrong
    assert [f.name for f in found] == ["softmax-axis"]


def test_a_constructor_may_be_given_a_function_that_makes_layers(tmp_path):
    text = layer("norm_layer", PLAIN).replace("self.part = norm_layer", "self.part = norm_layer(self.d)")
    text = text.replace("q @ k.mT", "self.part(q) @ self.part(k).mT")
    assert judged(tmp_path, text).verdict in ("variant", "partial", "right")
