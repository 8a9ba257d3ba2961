"""Inputs with more or fewer axes than usual, arguments without effect, and the line to name among several."""

from test_public_habits import RIGHT, changed, judged

VOLUME = """import torch
from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, context):
        B, C, D, H, W = x.shape
        x, context = (t.flatten(2).transpose(1, 2) for t in (x, context))
        q, k, v = (
            layer(t).view(B, -1, self.num_heads, self.head_dim).transpose(1, 2)
            for layer, t in ((self.q, x), (self.k, context), (self.v, context))
        )
        weights = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1)
        out = self.out((weights @ v).transpose(1, 2).reshape(B, -1, C))
        return out.transpose(1, 2).reshape(B, C, D, H, W)
"""
PIXELS = """import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, in_channel, key_filters, value_filters, output_filters, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (key_filters // num_heads) ** -0.5
        self.q, self.k = (nn.Conv2d(in_channel, key_filters, 1) for _ in range(2))
        self.v = nn.Conv2d(in_channel, value_filters, 1)
        self.out = nn.Conv2d(value_filters, output_filters, 1)

    def split(self, x):
        x = x.permute(0, 2, 3, 1)
        return x.reshape(*x.shape[:3], self.num_heads, -1)

    def forward(self, x):
        b, _, h, w = x.shape
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        q, k, v = q.flatten(0, 3), k.flatten(0, 3), v.flatten(0, 3)
        weights = torch.softmax(q @ k.T * self.scale, dim=-1)
        return self.out((weights @ v).view(b, h, w, -1).permute(0, 3, 1, 2))
"""
SWITCH = ("dropout=0.1)", "dropout=0.1, plain=False)")
SWITCHED = ("return self.w_o(merged)", "return merged if self.plain else self.w_o(merged)")


def test_voxels_of_a_volume_are_tokens(tmp_path):
    report = judged(tmp_path, VOLUME)
    assert report.verdict == "right", report
    assert report.call.endswith("volume")


def test_softmax_over_the_keys_of_a_volume_is_judged(tmp_path):
    report = judged(tmp_path, changed(VOLUME, (".softmax(-1)", ".softmax(-2)")))
    assert (report.verdict, report.cause) == ("wrong", "softmax-axis"), report


def test_samples_joined_with_tokens_are_reported_where_they_are_joined(tmp_path):
    report = judged(tmp_path, PIXELS)
    assert (report.verdict, report.cause) == ("wrong", "batch-leak"), report
    assert "flatten(0, 3)" in report.wrong[0].text


def test_shape_taken_apart_under_two_names_is_the_learners_mistake(tmp_path):
    text = changed(
        RIGHT, ("batch = query.size(0)", "batch, length = query.shape"), ("(batch, -1, ", "(batch, length, ")
    )
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "parts-count"), report
    assert "batch, length =" in report.wrong[0].text


def test_switch_that_a_constant_replaces_is_reported_at_the_constant(tmp_path):
    text = changed(RIGHT, SWITCH, SWITCHED, ("super().__init__()", "super().__init__()\n        self.plain = False"))
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "option-ignored"), report
    assert report.wrong[0].text == "self.plain = False"


def test_switch_that_nothing_reads_is_not_called_right(tmp_path):
    report = judged(tmp_path, changed(RIGHT, SWITCH))
    assert report.verdict == "partial", report
    assert any("plain, which is never read" in item.words for item in report.certificate)


def test_mask_against_its_docstring_is_reported_where_it_is_inverted(tmp_path):
    said = ("        batch = query", '        """mask: 1 = keep, 0 = hide"""\n        batch = query')
    hidden = "mask = mask != 0\n            mask = ~mask\n            scores = scores.masked_fill(~mask, "
    report = judged(tmp_path, changed(RIGHT, ("scores = scores.masked_fill(mask == 0, ", hidden), said))
    assert (report.verdict, report.cause) == ("wrong", "mask-convention"), report
    assert report.wrong[0].text == "mask = ~mask"


def test_stored_mask_that_is_not_cut_is_reported_where_it_is_used(tmp_path):
    text = changed(RIGHT, ("d_model, num_heads, dropout=0.1", "dropout=0.1"),
                   ("super().__init__()", "super().__init__()\n        d_model, num_heads = 64, 8"),
                   ("self.dropout =", 'self.register_buffer("seen", torch.ones(8, 8).tril())\n        self.dropout ='),
                   ("query, key, value, mask=None", "x"), ("batch = query.size(0)", "batch = x.size(0)"),
                   ("w_q(query)", "w_q(x)"), ("w_k(key)", "w_k(x)"), ("w_v(value)", "w_v(x)"),
                   ("        if mask is not None:\n    ", ""), ("mask == 0", "self.seen == 0"))  # fmt: skip
    report = judged(tmp_path, text)
    assert (report.verdict, report.cause) == ("wrong", "buffer-not-sliced"), report
    assert "self.seen == 0" in report.wrong[0].text


def test_heads_as_wide_as_the_model_are_meant_where_the_width_is_multiplied(tmp_path):
    text = changed(RIGHT, ("d_model // num_heads", "d_model"),
                   ("(nn.Linear(d_model, d_model) for", "(nn.Linear(d_model, d_model * num_heads) for"),
                   ("w_o = nn.Linear(d_model, d_model)", "w_o = nn.Linear(d_model * num_heads, d_model)"))  # fmt: skip
    assert judged(tmp_path, text).verdict == "variant"
    hidden = changed(text, ("d_model * num_heads", "self.head_dim * num_heads"))
    assert judged(tmp_path, hidden).verdict == "partial"


def test_scale_is_named_before_weights_that_heads_share(tmp_path):
    small = "nn.Linear(d_model // num_heads, d_model // num_heads) for"
    text = changed(RIGHT, ("nn.Linear(d_model, d_model) for", small),
                   ("math.sqrt(self.head_dim)", "math.sqrt(q.size(1) * q.size(3))"),
                   *((f"self.w_{n}({name}).view(batch, -1, self.num_heads, self.head_dim)",
                      f"self.w_{n}({name}.view(batch, -1, self.num_heads, self.head_dim))")
                     for n, name in (("q", "query"), ("k", "key"), ("v", "value"))))  # fmt: skip
    report = judged(tmp_path, text)
    assert [f.name for f in report.wrong] == ["scale-d_model", "heads-share-weights"], report


def test_projection_before_the_packed_one_of_torch_is_a_variant(tmp_path):
    text = """from torch import nn


class CrossAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.memory = nn.Linear(d_model, d_model)
        self.attn = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, x, memory):
        memory = self.memory(memory)
        return self.attn(x, memory, memory)[0]
"""
    report = judged(tmp_path, text)
    assert report.verdict == "variant", report
    assert "two linear layers make the key" in report.variants


def test_widths_of_all_heads_together_are_resized(tmp_path):
    text = changed(RIGHT, ("num_heads, dropout", "kdim, vdim, num_heads, dropout"),
                   ("        self.num_heads, self.head_dim = num_heads, d_model // num_heads",
                    "        assert kdim % num_heads == vdim % num_heads == 0\n        self.num_heads = num_heads"),
                   ("self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))",
                    "self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, n) for n in (kdim, kdim, vdim))"),
                   ("nn.Linear(d_model, d_model)", "nn.Linear(vdim, d_model)"),
                   ("self.num_heads, self.head_dim).tr", "self.num_heads, n // self.num_heads).tr"),
                   ("(self.head_dim)", "(q.size(-1))"),
                   ("-1, self.num_heads * self.head_dim", "-1, v.size(1) * v.size(3)"))  # fmt: skip
    text = text.replace("n // self.num_heads", "self.w_q.out_features // self.num_heads", 2)
    report = judged(tmp_path, text.replace("n // self.num_heads", "self.w_v.out_features // self.num_heads"))
    assert report.verdict in ("right", "variant"), report


def test_key_that_the_code_asks_for_is_also_left_out(tmp_path):
    sizes = 'd_model, num_heads = config["d_model"], config["num_heads"]'
    rate = 'rate = config["dropout"] if "dropout" in config else 0.0'
    text = changed(RIGHT, ("d_model, num_heads, dropout=0.1", "config"), ("nn.Dropout(dropout)", "nn.Dropout(rate)"),
                   ("super().__init__()", f"super().__init__()\n        {sizes}\n        {rate}"))  # fmt: skip
    assert judged(tmp_path, text).verdict == "right"
    report = judged(tmp_path, changed(text, ("else 0.0", "else default")))
    assert report.verdict == "wrong", report
