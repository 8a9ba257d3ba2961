"""What a file says and promises: shapes and meanings of masks, return values, slopes; and every way through it."""

import pytest
from test_excuses import ALIBI
from test_public_habits import RIGHT, changed, judged

from headwise.check.code.intent import _shape
from headwise.check.templates import write

SOFTMAX = "        weights = torch.softmax(scores, dim=-1)\n"
MASKED = '            scores = scores.masked_fill(mask == 0, float("-inf"))\n'


def test_softmax_only_with_a_mask_is_missing_without_one(tmp_path):
    text = changed(RIGHT, (SOFTMAX, ""), (MASKED, f"{MASKED}            scores = torch.softmax(scores, dim=-1)\n"),
                   ("weights = self.dropout(weights)", "weights = self.dropout(scores)"))  # fmt: skip
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "softmax-missing"), report
    assert "without mask" in report.wrong[0].detail


def test_minus_infinity_after_the_softmax_is_a_mask_after_the_softmax(tmp_path):
    late = SOFTMAX + "        if mask is not None:\n            weights = weights.masked_fill(mask == 0, -torch.inf)\n"
    text = changed(RIGHT, (f"        if mask is not None:\n{MASKED}{SOFTMAX}", late))
    assert judged(tmp_path, text).cause == "mask-after-softmax"


def test_every_shape_that_a_comment_states_must_work(tmp_path):
    widened = f"            # mask is (batch, seq, seq) or (seq, seq)\n            mask = mask.unsqueeze(1)\n{MASKED}"
    report = judged(tmp_path, changed(RIGHT, (MASKED, widened.replace("unsqueeze(1)", "unsqueeze(1).unsqueeze(1)"))))
    assert (report.verdict, report.cause) == ("wrong", "mask-crashes"), report
    assert "shape (T,S), as line" in report.wrong[0].detail


CONTRADICTED = """import torch
from torch import nn


class MaskedAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.qkv, self.out = num_heads, nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def forward(self, x, mask):
        # mask: (batch, seq_len, seq_len)
        q, k, v = (part.unflatten(-1, (self.h, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5 + mask.unsqueeze(1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


if __name__ == "__main__":
    mask = torch.zeros(10, 10)
    MaskedAttention(16, 2)(torch.randn(3, 10, 16), mask)
"""


def test_an_example_that_contradicts_the_stated_shape_of_a_mask_is_fragile(tmp_path):
    report = judged(tmp_path, CONTRADICTED)
    assert report.exit_code == 0, report
    assert "mask-crashes" in [f.name for f in report.findings], report
    assert judged(tmp_path, CONTRADICTED.replace("# mask: (batch, seq_len, seq_len)", "")).cause == "mask-crashes"


SHAPES = {"batch, seq_len": "(B,S)", "B, 1, T, T": "(B,1,T,S)", "seq, seq": "(T,S)", "B, heads, T, S": "(B,H,T,S)",
          "1, 1, t, s": "(1,1,T,S)", "width, height": "", "batch, 4": "",
          "batch, seq_q, d_model": "", "batch, keys": "(B,S)"}  # fmt: skip


@pytest.mark.parametrize(("axes", "shape"), SHAPES.items())
def test_shapes_in_words_are_read(axes, shape):
    assert _shape(axes.split(",")) == shape


def test_shape_of_something_else_on_the_next_line_is_not_that_of_the_mask(tmp_path):
    said = '''        """
        mask: (batch, 1, seq_q, seq_k)
        return: (batch, seq_q, seq_k)
        """
        batch ='''
    assert judged(tmp_path, changed(RIGHT, ("        batch =", said))).verdict == "right"


def test_meaning_in_a_sentence_of_two_lines_is_read(tmp_path):
    said = '''MultiHeadAttention(nn.Module):
    """mask: booleans of shape (B, 1, T, S); as in other layers, True
    marks a key that has to be ignored."""
'''
    report = judged(tmp_path, changed(RIGHT, ("MultiHeadAttention(nn.Module):\n", said)))
    assert (report.verdict, report.cause) == ("wrong", "mask-convention"), report


def test_weights_before_the_output_are_wrong_where_the_text_says_otherwise(tmp_path):
    text = changed(RIGHT, ("return self.w_o(merged)", "return weights, self.w_o(merged)"))
    said = changed(text, ("        batch =", '        """Returns (output, weights)."""\n        batch ='))
    assert judged(tmp_path, text).verdict == "right"
    assert judged(tmp_path, said).cause == "weights-returned"


def test_asking_for_weights_must_not_change_the_output(tmp_path):
    asked = "return (self.w_o(merged), weights) if need_weights else self.w_o(merged)"
    text = changed(RIGHT, ("mask=None):", "mask=None, need_weights=False):"), ("return self.w_o(merged)", asked))
    assert judged(tmp_path, text).verdict == "right"
    report = judged(
        tmp_path, changed(text, (SOFTMAX, f"        if need_weights:\n            scores = scores * 2\n{SOFTMAX}"))
    )
    assert (report.verdict, report.cause) == ("wrong", "paths-differ"), report


def test_slopes_must_be_those_of_the_paper_if_the_text_says_so(tmp_path):
    named = changed(ALIBI, ("Causal attention;", "Causal attention with the slopes of the paper;"))
    assert judged(tmp_path, named).cause == "bias-slopes"
    paper = "2.0 ** (-8.0 * torch.arange(1.0, num_heads + 1) / num_heads)"
    assert judged(tmp_path, changed(named, ("2.0 ** -torch.arange(1.0, num_heads + 1)", paper))).verdict == "variant"


def test_mask_that_is_as_large_as_the_model_is_wide_is_wrong(tmp_path):
    text = changed(write("fused"), ("torch.ones(block_size, block_size)", "torch.ones(n_embd, n_embd)"))
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "size-fixed"), report


def test_weights_as_the_exponential_of_their_logarithm_are_right(tmp_path):
    text = changed(
        RIGHT, (SOFTMAX, "        weights = (scores - torch.logsumexp(scores, dim=-1, keepdim=True)).exp()\n")
    )
    assert judged(tmp_path, text).verdict == "right"


def test_activation_of_the_scores_is_named(tmp_path):
    report = judged(tmp_path, changed(RIGHT, ("torch.softmax(scores, dim=-1)", "torch.softmax(scores.relu(), dim=-1)")))
    assert (report.verdict, report.cause) == ("wrong", "scores-activated"), report


def test_missing_scale_is_reported_at_the_product_beside_a_mask_of_positions(tmp_path):
    text = changed(write("fused"), (" * D ** -0.5", ""), ("self.bias[:T, :T] == 0", "hidden"),
                   ("        att = (q", "        i = torch.arange(T, device=x.device)\n"
                    "        hidden = i + 1 > i[:, None] + 1\n        att = (q"))  # fmt: skip
    report = judged(tmp_path, text)
    assert report.cause == "scale-missing"
    assert report.wrong[0].text.startswith("att = (q")


def test_model_without_attention_is_not_judged(tmp_path):
    text = """import torch
from torch import nn


class Reader(nn.Module):
    def __init__(self, vocab, hidden=64):
        super().__init__()
        self.rnn = nn.GRU(vocab, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    @torch.no_grad()
    def forward(self, x):
        return self.head(self.rnn(x)[0]).softmax(-1)
"""
    assert judged(tmp_path, text).verdict == "unknown"


CACHED = """import math
import torch
from torch import nn


class KVCache:
    def __init__(self):
        self.k = self.v = None

    def update(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v


class CausalAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, cache=None):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v)
        s = k.size(2)
        visible = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        scores = (q @ k.mT / math.sqrt(self.width)).masked_fill(~visible, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
"""


def test_cache_that_is_an_object_of_the_file_is_judged(tmp_path):
    assert judged(tmp_path, CACHED).verdict == "variant"
    report = judged(tmp_path, changed(CACHED, (".tril(s - t)", ".tril()")))
    assert (report.verdict, report.cause) == ("wrong", "cache-differs"), report
    assert report.wrong[0].text.startswith("visible =")


def test_weights_that_are_summed_over_the_queries_are_transposed(tmp_path):
    text = changed(RIGHT, ("torch.matmul(weights, v)", "torch.einsum('bhij,bhid->bhjd', weights, v)"))
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "weights-transposed"), report
    assert "einsum" in report.wrong[0].text


def test_mask_that_only_the_first_call_can_set_is_remembered(tmp_path):
    kept = """            if self.kept is None or self.kept.shape[-1] != key.size(1):
                self.kept = mask == 0
            scores = scores.masked_fill(self.kept, float("-inf"))
"""
    none = "torch.zeros(1, 1, 1, key.size(1)).bool()"
    text = changed(RIGHT, (f"        if mask is not None:\n{MASKED}", kept.replace("            ", "        ")),
                   ("self.kept = mask == 0", f"self.kept = {none} if mask is None else mask == 0"),
                   ("        self.dropout = nn", "        self.kept = None\n        self.dropout = nn"))  # fmt: skip
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "remembers-calls"), report
