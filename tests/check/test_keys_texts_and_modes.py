"""Keys of configurations under another spelling, texts of several arguments, base classes, modes and helpers."""

import pytest

from headwise.check.verdict import judge_file

CLASS = '''
import math
from types import SimpleNamespace

import torch
from torch import nn


class Attention(nn.Module):
    """{text}"""

    def __init__(self, cfg):
        super().__init__()
        self.heads, self.width = cfg.heads, cfg.dim // cfg.heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(cfg.dim, cfg.dim) for _ in range(4))
        self.drop = nn.Dropout(getattr(cfg, {key!r}, 0.0))
        self.register_buffer("tri", torch.ones(cfg.context, cfg.context).tril(), persistent=False)

    def split(self, t):
        return t.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

    def forward(self, {inputs}):
        """{forward_text}"""
        q, k, v = self.split(self.to_q({asks})), self.split(self.to_k({answers})), self.split(self.to_v({answers}))
        scores = q @ k.mT / math.sqrt(self.width)
        {masked}
        y = self.drop(scores.softmax(-1)) @ v
        return self.to_out(y.transpose(1, 2).flatten(2))


layer = Attention(SimpleNamespace(dim=32, heads=4, context=9, dropout=0.1))
'''
TRIANGLE = "scores = scores.masked_fill(self.tri[:x.size(1), :x.size(1)] == 0, -torch.inf)"
SLOTS = {
    "text": "Attention of the tokens before.", "key": "dropout", "inputs": "x", "asks": "x", "answers": "x",
    "forward_text": "x: (batch, tokens, dim)", "masked": TRIANGLE,
}  # fmt: skip
INHERITED = '''
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.looks_back = heads, False
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.looks_back)
        return self.o(y.transpose(1, 2).flatten(2))


class Decoder(Base):
    """Masked self-attention: a token sees itself and what came before."""

    def __init__(self, dim, heads):
        {before}super().__init__(dim, heads)
        {after}
'''


@pytest.fixture
def judged(tmp_path, one_thread):
    def judge(source, name=None):
        file = tmp_path / "attention.py"
        file.write_text(source)
        return judge_file(file, name=name)

    return judge


def written(**slots):
    return CLASS.format(**SLOTS | slots)


def test_a_class_that_reads_its_configuration_rightly_is_right(judged):
    assert judged(written()).verdict == "variant"


def test_a_key_of_the_configuration_that_is_read_under_another_spelling_is_named(judged):
    report = judged(written(key="drop_out"))
    assert report.verdict == "wrong"
    assert report.cause == "option-ignored"
    assert "the configuration has dropout; the code reads drop_out" in str(report.findings[0].detail)
    assert "drop_out" in report.findings[0].text


def test_a_mask_that_hides_in_training_mode_only_is_told_by_its_condition(judged):
    report = judged(written(masked=f"if self.training:\n            {TRIANGLE}"))
    assert report.cause == "causal-ignored"
    assert report.findings[0].text == "if self.training:"


def test_queries_from_the_memory_are_a_wrong_role(judged):
    slots = {"inputs": "tokens, memory", "forward_text": "", "masked": "pass"}
    right, swapped = (
        written(**slots, asks=asks, answers=answers).replace("self.register_buffer", "#")
        for asks, answers in (("tokens", "memory"), ("memory", "tokens"))
    )
    assert judged(right).verdict == "right"
    report = judged(swapped)
    assert report.cause == "wrong-role"
    assert "the query is made from memory" in report.findings[0].detail


def test_arguments_that_one_line_describes_keep_their_own_shapes(judged):
    steps = "scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)\n"
    steps += "        if lengths is not None:\n"
    steps += "            real = torch.arange(x.size(1)) < lengths[:, None]\n"
    steps += "            scores = scores.masked_fill(~real[:, None, None], -1e9)"
    text = "lengths: (b,) number of real tokens; mask: (n, n) for all samples, 0 = hidden"
    report = judged(
        written(inputs="x, lengths=None, mask=None", forward_text=text, masked=steps).replace(
            "self.register_buffer", "#"
        )
    )
    assert report.verdict == "right", report


def test_a_flag_that_the_base_class_sets_back_does_not_make_a_class_causal(judged):
    late = INHERITED.format(before="", after="self.looks_back = True")
    assert judged(late, "Decoder").verdict == "variant"
    early = INHERITED.format(before='self.__dict__["looks_back"] = True\n        ', after="")
    report = judged(early, "Decoder")
    assert report.cause == "causal-ignored", report


def test_scores_among_three_results_of_a_helper_are_told_where_they_are_chosen(judged):
    source = written().replace("y = self.drop(scores.softmax(-1)) @ v", "y, weights, raw = self.mix(scores, v)")
    source = source.replace("self.to_out(y.transpose(1, 2).flatten(2))", "self.to_out(y.mT.flatten(1, 2).mT), raw")
    mix = ("def mix(self, scores, v):", "    w = scores.softmax(-1)", "    return self.drop(w) @ v, w, scores", "")
    report = judged(source.replace("    def forward", "\n    ".join(["    " + mix[0], *mix[1:], "def forward"])))
    assert report.cause == "weights-returned", report
    assert report.findings[0].text.endswith(", raw")


PIXELS = """
from torch import nn


class PixelsAskWords(nn.Module):
    def __init__(self, channels, num_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, num_heads, dropout=0.1, batch_first=True)

    def forward(self, image, text):
        B, C, H, W = image.shape
        pixels = image.flatten(2).transpose(1, 2)
        out, _ = self.attention(query=pixels, key=text, value=text)
        return out.transpose(1, 2).reshape(B, C, H, W)
"""


def test_pixels_that_ask_the_words_of_a_text_are_judged(judged):
    report = judged(PIXELS)
    assert report.verdict == "right", report
    assert "it has no dropout" not in report.good


INNER = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim_out, dim_hidden=32, num_heads=4):
        super().__init__()
        assert dim_hidden % num_heads == 0, "heads share dim_hidden"
        self.heads = num_heads
        self.q, self.k, self.v = (nn.Linear(dim_out, dim_hidden) for _ in range(3))
        self.o = nn.Linear(dim_hidden, dim_out)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))
"""


def test_a_width_that_lies_between_input_and_output_is_not_confused_with_that_of_the_input(judged):
    report = judged(INNER)
    assert report.verdict == "partial", report
    assert report.cause is None


def test_a_causal_mask_of_the_longest_input_only_is_not_sliced(judged):
    source = INNER.replace("num_heads=4):", "num_heads=4, causal=False, seq_len=16):").replace(
        "self.heads = num_heads",
        'self.heads = num_heads\n        self.register_buffer("tri", MASK if causal else None)',
    )
    source = source.replace("MASK", "torch.ones(seq_len, seq_len).tril()")
    apply = "{0} if self.tri is None else ({0}).masked_fill(self.tri{1} == 0, -torch.inf)"
    scores = "q @ k.mT / q.size(-1) ** 0.5"
    sliced, whole = (
        source.replace(f"({scores})", f"({apply.format(scores, rows)})") for rows in ("[: x.size(1), : x.size(1)]", "")
    )
    assert not judged(sliced).wrong
    assert judged(whole).cause == "buffer-not-sliced"


CACHED = """
import torch
from torch import nn


class CausalAttention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.heads = num_heads
        self.c_attn, self.c_proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, layer_past=None, attention_mask=None, use_cache=False):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(hidden_states).chunk(3, -1))
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), -2), torch.cat((layer_past[1], v), -2)
        scores = q @ k.mT / q.size(-1) ** 0.5
        T, S = scores.shape[-2:]
        earlier = torch.ones(S, S, dtype=torch.bool).tril()[S - T :]
        scores = scores.masked_fill(~earlier, torch.finfo(scores.dtype).min)
        if attention_mask is not None:
            scores = scores + {sign}attention_mask
        out = self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out, (k, v) if use_cache else None
"""


def test_a_mask_that_is_added_beside_a_causal_one_is_confirmed(tmp_path, one_thread):
    import headwise

    file = tmp_path / "attention.py"
    file.write_text(CACHED.format(sign=""))
    assert headwise.check(file).verdict in ("variant", "partial"), headwise.check(file)
    file.write_text(CACHED.format(sign="2 * "))
    assert headwise.check(file).verdict == "wrong"


MASK_OBJECT = """
from torch import nn


class FullAttention(nn.Module):
    def __init__(self, scale=None):
        super().__init__()
        self.scale = scale

    def forward(self, queries, keys, values, attn_mask):
        scores = queries @ keys.mT * (self.scale or queries.size(-1) ** -0.5)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask.{attribute}, -1e9)
        return scores.softmax(-1) @ values


class AttentionLayer(nn.Module):
    def __init__(self, attention, d_model, n_heads):
        super().__init__()
        self.inner, self.n_heads = attention, n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, queries, keys, values, attn_mask=None):
        streams = (self.q(queries), self.k(keys), self.v(values))
        q, k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in streams)
        return self.o(self.inner(q, k, v, attn_mask).transpose(1, 2).flatten(2))
"""


def test_a_mask_that_is_an_object_with_a_table_inside_is_not_judged(judged):
    report = judged(MASK_OBJECT.format(attribute="table"))
    assert report.subject.startswith("AttentionLayer(")
    assert report.verdict == "partial", report
    assert judged(MASK_OBJECT.format(attribute="maskd_fill()")).cause == "mask-crashes"


@pytest.mark.parametrize(("arguments", "verdict"), [("x, mask=None", "variant"), ("x, memory, mask=None", "wrong")])
def test_causal_unless_a_mask_is_given_is_a_convention_of_self_attention_only(arguments, verdict, judged):
    memory = "memory" if "memory" in arguments else "x"
    rate = "dropout_p=self.drop.p if self.training else 0.0"
    steps = f"y = nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, {rate})"
    source = written(inputs=arguments, answers=memory, masked=steps, forward_text="")
    source = source.replace("y = self.drop(scores.softmax(-1)) @ v", "pass").replace("self.register_buffer", "#")
    assert judged(source).verdict == verdict


def test_the_last_rows_of_a_stored_mask_are_no_window(judged):
    rows = TRIANGLE.replace("[:x.size(1), :x.size(1)]", "[-x.size(1):, :x.size(1)]")
    report = judged(written(masked=rows))
    assert report.cause == "causal-some-lengths", report
    assert "-x.size(1):" in report.findings[0].text


def test_heads_that_follow_from_the_width_of_a_head_ignore_their_number(judged):
    source = written(masked="pass").replace("self.register_buffer", "#")
    own = source.replace("cfg.dim // cfg.heads", "cfg.head_dim")
    own = own.replace(
        "nn.Linear(cfg.dim, cfg.dim) for _ in range(4)",
        "nn.Linear(cfg.dim, cfg.heads * cfg.head_dim) for _ in range(4)",
    )
    own = own.replace("self.drop =", "self.to_out = nn.Linear(cfg.heads * cfg.head_dim, cfg.dim)\n        self.drop =")
    assert not judged(own).wrong
    ignored = source.replace("cfg.heads, cfg.dim // cfg.heads", "cfg.heads, cfg.head_dim")
    ignored = ignored.replace("(self.heads, self.width)", "(-1, self.width)")
    report = judged(ignored)
    assert report.cause == "option-ignored", report
    assert "there are still 4 heads" in report.findings[0].detail


def test_a_shape_that_the_text_refuses_need_not_work(judged):
    steps = "scores = scores if mask is None else scores.masked_fill(mask == 0, -1e9)"
    text = "mask: (n, n), (b, n) is NOT supported"
    source = written(inputs="x, mask=None", forward_text=text, masked=steps).replace("self.register_buffer", "#")
    assert judged(source).verdict == "right"


FUNCTION = """
import torch


def multi_head_attention(x, params, num_heads):
    q, k, v = (x @ params[name] for name in ("wq", "wk", "wv"))
    q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in (q, k, v))
    weights = (q @ k.mT * q.size(-1) ** -0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ params["wo"]
"""


def test_a_function_that_takes_its_weights_in_a_dictionary_is_judged(judged):
    source = FUNCTION.replace(
        '(x @ params[name] for name in ("wq", "wk", "wv"))', 'x @ params["wq"], x @ params["wk"], x @ params["wv"]'
    )
    assert judged(source).verdict == "right"
    assert judged(source.replace("q.size(-1) ** -0.5", "x.size(-1) ** -0.5")).cause == "scale-d_model"


def test_a_bias_beside_is_causal_is_judged_as_the_kernel_on_the_cpu_computes_it(judged):
    steps = "places = torch.arange(x.size(1))\n        near = -(places[:, None] - places).abs().to(q)"
    steps += (
        "\n        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=near[None, None], is_causal=True)"
    )
    source = written(masked=steps).replace("y = self.drop(scores.softmax(-1)) @ v", "pass")
    source = source.replace("self.register_buffer", "#").replace("self.drop =", "#")
    report = judged(source)
    assert not report.wrong, report
    assert "a built-in causal mask" in report.variants


def test_a_mask_that_is_kept_from_the_first_call_is_remembered(judged):
    steps = "if mask is not None:\n            {kept}scores = scores + self.bias"
    kept = "self.bias = (1.0 - mask[:, None, None, :]) * torch.finfo(scores.dtype).min\n            "
    source = written(inputs="x, mask=None", masked=steps.format(kept=kept)).replace("self.register_buffer", "#")
    assert judged(source).verdict == "right"
    once = "if self.bias is None:\n                " + kept
    source = written(inputs="x, mask=None", masked=steps.format(kept=once)).replace("self.register_buffer", "#")
    report = judged(source.replace("self.drop =", "self.bias = None\n        self.drop ="))
    assert report.cause == "remembers-calls", report
    assert report.findings[0].text == "if self.bias is None:"


def test_an_optional_query_asks_what_is_always_given(judged):
    source = written(inputs="x, q=None", answers="x", asks="q", masked="pass", forward_text="")
    source = source.replace("self.register_buffer", "#").replace(
        "        q, k, v =", "        q = x if q is None else q\n        q, k, v ="
    )
    report = judged(source)
    assert report.verdict == "right", report
    assert report.call == "forward(x, q)"


def test_a_module_of_settings_that_is_missing_is_stood_in_for(judged):
    source = written(masked="pass").replace("self.register_buffer", "#").split("\n\nlayer")[0]
    source = source.replace("(self, cfg)", "(self)").replace("import math", "import math\nimport config as cfg")
    assert judged(source).verdict == "right", source


def test_a_function_of_a_missing_file_is_no_size(judged):
    source = written(masked="q, k = apply_rotary_emb(q, k)").replace("self.register_buffer", "#")
    report = judged(source.replace("import math", "import math\nfrom rope_of_mine import apply_rotary_emb"))
    assert report.verdict == "unknown", report
    assert "rope_of_mine" in " ".join(report.doubts)


def test_torchs_own_layer_may_refuse_to_be_causal_without_a_mask(judged):
    layer = PIXELS.replace("image, text", "x, mask=None, is_causal=False").replace("text", "x")
    layer = layer.replace("        B, C, H, W = image.shape\n        pixels = image.flatten(2).transpose(1, 2)\n", "")
    layer = layer.replace("query=pixels", "query=x").replace("value=x", "value=x, attn_mask=mask, is_causal=is_causal")
    layer = layer.replace("out.transpose(1, 2).reshape(B, C, H, W)", "out")
    assert not judged(layer).wrong
