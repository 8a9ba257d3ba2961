"""Mistakes in styles that people write and templates do not have: the verdict, the cause and its line."""

import odd_styles
import pytest

from headwise.check.verdict import judge_file

STYLES = [name for name in vars(odd_styles) if name.isupper()]
# (style, mistake, old text, new text, start of the line that is to blame)
WRONG = [
    ("PARAMETERS", "wrong-role", "memory, self.Wv", "x, self.Wv", "v = einsum"),
    ("PARAMETERS", "unused-projection", "self.Wo) + self.bo", "self.Wo) + 0 * self.bo", "return"),
    ("FUNCTIONS", "dropout-unused", "attn = dropout(attn)", "dropout(attn)", "dropout(attn)"),
    ("FUNCTIONS", "mask-ignored", "v, mask, self.dropout)", "v, None, self.dropout)", "out, attn ="),
    ("FUNCTIONS", "mask-crashes", "mask.unsqueeze(1)", "mask.unsqueeze(2)", "mask = mask.unsqueeze"),
    ("FUNCTIONS", "weights-returned", "return attn @ v, attn", "return attn @ v, scores", "return attn @ v"),
    ("FUSED", "scale-no-sqrt", "        p = self", "        q = q * self.d_head ** -0.5\n        p = self", "q = q *"),
    ("FUSED", "attends-over-heads", "t.reshape(shape).transpose(1, 2)", "t.reshape(shape)", "q, k, v = (t."),
    ("FUSED", "option-ignored", "is_causal=causal_mask", "is_causal=True", "out = sdpa"),
    ("ROTARY", "rotary-absolute", "even * sin + odd * cos", "even * sin - odd * cos", "turned ="),
    ("ROTARY", "rotary-one-side", "        k = rotate(k, self.cos[:T], self.sin[:T])\n", "", "k = k.repeat"),
    ("ROTARY", "rotary-offset", "k = rotate(k, self.cos[:T], self.sin[:T])",
     "k = rotate(k, self.cos[-T:], self.sin[-T:])", "k = rotate"),
    ("ROTARY", "rotary-values", "        y = F", "        v = rotate(v, self.cos[:T], self.sin[:T])\n        y = F",
     "v = rotate"),
    ("ROTARY", "split-view", "self.n_heads, self.head_dim).transpose(1, 2)\n        k",
     "self.n_heads, self.head_dim).reshape(B, -1, T, self.head_dim)\n        k", "q = self.wq"),
    ("ROTARY", "grouped-order", "v = v.repeat_interleave(self.n_rep, dim=1)", "v = v.repeat(1, self.n_rep, 1, 1)",
     "v = v.repeat"),
    ("TWO_MASKS", "mask-on-queries", "mask[:, None, None, :]", "mask[:, None, :, None]", "scores = scores.masked"),
    ("TWO_MASKS", "masks-combined", "if key_padding_mask is", "elif key_padding_mask is", "elif key_padding"),
    ("TWO_MASKS", "weights-returned", "weights.mean(dim=1)) if", "weights.mean(dim=-1)) if", "return (out"),
    ("STACKED", "bias-foreign", "wk, bk), F.linear(value, wv, bv)", "wk, bv), F.linear(value, wv, bk)", "q, k, v = F"),
    ("STACKED", "mask-leaks", "~attn_mask, -torch.inf", "~attn_mask, -1.0", "attn_mask = torch.zeros"),
    ("STACKED", "option-crashes", " if self.in_proj_bias is not None else (None, None, None)", "", "bq, bk, bv ="),
    ("STACKED", "projection-activated", "F.linear(value, wv, bv)", "F.linear(value, wv, bv).relu()", "q, k, v = F"),
    ("LENGTHS", "mask-wrong-sample", "torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)",
     "valid_lens.repeat(self.num_heads)", "valid_lens = valid_lens.repeat"),
    ("CACHE", "causal-cache", "self.tri[s - t:s, :s]", "self.tri[:t, :s]", "att = att.masked"),
    ("CACHE", "cache-differs", "(y, (k, v)) if", "(y, kv_cache) if", "return (y"),
    ("SWITCHES", "option-crashes", "k_norm = nn.LayerNorm(self.head_dim)", "k_norm = nn.LayerNorm(dim)", "k = self.k_"),
    ("SWITCHES", "unused-projection", "k = self.k_norm(k)", "k = self.q_norm(k)", "k = self.q_norm"),
    ("SWITCHES", "dropout-unused", "        attn = self.attn_drop(attn)\n", "", "attn = (q @ k"),
    ("SWITCHES", "dropout-unused", "return self.proj_drop(self.proj(x))", "return self.proj(x)", "return self.proj"),
    ("LIKE_TORCH", "option-ignored", "            out = out.transpose(0, 1)\n", "            pass\n", "if not self.b"),
    ("LIKE_TORCH", "weights-returned", "out, weights.mean(1) if", "out, out.mean(1) if", "return out, out.mean"),
    ("LIKE_TORCH", "weights-returned", "attn_weights else weights", "attn_weights else out", "return out, weights"),
    ("LIKE_TORCH", "mask-convention", "[:, None, None, :].bool()", "[:, None, None, :].bool().logical_not()",
     "hidden = key_padding"),
    ("LIKE_TORCH", "gradient-cut", 'float("-inf"))', 'float("-inf")).detach()', "scores = scores.masked"),
    ("LIKE_TORCH", "dropout-on-scores", 'scores.masked_fill(hidden, float("-inf"))',
     'F.dropout(scores.masked_fill(hidden, -1e9), self.dropout, self.training)', "scores = F.dropout"),
    ("NAMED_CAUSAL", "crashes", "y.transpose(1, 2).reshape(B, T, C)", "x[..., 1:]", "return"),
    ("WIDTHS", "widths-confused", "nn.Linear(context_dim, inner * 2", "nn.Linear(query_dim, inner * 2", "self.to_kv ="),
    ("WIDTHS", "option-ignored", "        inner =", "        dim_head = query_dim // heads\n        inner =",
     "dim_head ="),
    ("WIDTHS", "mask-crashes", "mask.unsqueeze(1)", "mask.unsqueeze(-2)", "mask = mask.unsqueeze"),
    ("NAMED_CAUSAL", "causal-ignored", "is_causal=True", "is_causal=False", "y = F.scaled"),
    ("NAMED_CAUSAL", "grouped-crashes", "q, k, v = self.c_attn", "k, q, v = self.c_attn", "q = q.view"),
    ("LOOP", "mask-some-heads", "if mask is not None:", "if mask is not None and not outputs:", "if mask"),
]  # fmt: skip


def judged(folder, text):
    path = folder / "attention.py"
    path.write_text(text)
    return judge_file(path, thorough=False)


@pytest.mark.parametrize("style", STYLES)
def test_style_is_right(style, tmp_path):
    assert judged(tmp_path, getattr(odd_styles, style)).verdict in ("right", "variant")


def test_a_tensor_made_on_the_cpu_is_fragile_at_the_line_that_makes_it(tmp_path):
    text = odd_styles.LIKE_TORCH.replace("scores = q @ k", "scores = torch.zeros(T, 1) + q @ k")
    report = judged(tmp_path, text)
    assert report.verdict in ("right", "variant"), report
    found = next(finding for finding in report.findings if finding.name == "device-fixed")
    assert found.text.startswith("scores = torch.zeros")
    assert "device-fixed" not in {f.name for f in judged(tmp_path, odd_styles.LIKE_TORCH).findings}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]} {case[1]}")
def test_mistake_is_named_at_its_line(case, tmp_path):
    style, mistake, old, new, start = case
    text = getattr(odd_styles, style)
    assert text.count(old) == 1
    report = judged(tmp_path, text.replace(old, new))
    assert (report.verdict, report.cause) == ("wrong", mistake), report
    assert report.wrong[0].text.startswith(start), report.wrong[0]
