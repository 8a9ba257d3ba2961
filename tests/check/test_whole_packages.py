"""What files in whole packages showed: other classes, flags, bases, precisions, and what a file says on purpose."""

import re

import pytest

from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")
HEAD = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


def layer(name="MultiHeadAttention", given="", text="", made="", before="", mask="", scale="math.sqrt(D)", rest=""):
    """A right layer with fused projections, and what a test puts into it."""
    return f'''{HEAD}class {name}(nn.Module):
    """{text}"""

    def __init__(self, d_model, num_heads{given}):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)
        {made or "pass"}

    def forward(self, x, mask=None):
        B, T, E = x.shape
        H, D = self.num_heads, E // self.num_heads
        q, k, v = self.qkv(x).view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)
        {before or "pass"}
        scores = q @ k.transpose(-2, -1) / {scale}
        if mask is not None:
            {mask or "scores = scores.masked_fill(mask == 0, -1e9)"}
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
{rest}'''


def judged(tmp_path, text, name=None, file="layer.py"):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return judge_file(path, name=name)


def names(report):
    return [finding.name for finding in report.wrong]


OTHER = '''

class Other(nn.Module):
    """mask: 1 hides a key, 0 keeps it, of shape (batch, seq_len). A causal layer, seq first: x (T, B, E)."""

    def forward(self, x, mask):
        return x
'''


def test_what_another_class_says_of_its_mask_does_not_count(tmp_path):
    text = layer(rest=OTHER, text="Attention of several heads; mask 1 keeps a key.")
    assert judged(tmp_path, text, "MultiHeadAttention").verdict == "right"


def test_a_text_of_the_module_that_the_class_does_not_use_does_not_count(tmp_path):
    shared = '\n\nDOCS = """\n    mask: padding mask of shape `(batch_size, sequence_length)`\n"""\n'
    report = judged(tmp_path, layer(rest=shared), "MultiHeadAttention")
    assert not report.wrong, report


def test_a_line_under_the_name_of_another_mask_speaks_of_that_one(tmp_path):
    text = layer(text="Takes two masks.").replace(
        "def forward(self, x, mask=None):\n",
        "def forward(self, x, mask=None, pad_mask=None):\n"
        '        """\n        pad_mask : Tensor\n            Mask of padding, of shape `(batch_size, source_length)`.\n'
        "        mask : Tensor\n"
        '            Which keys are seen, of shape `(T, S)`.\n        """\n',
    )
    text = text.replace(
        "        return self.out",
        "        if pad_mask is not None:\n"
        "            scores = scores.masked_fill(pad_mask[:, None, None] == 0, -1e9)\n"
        "        return self.out",
    )
    assert not judged(tmp_path, text).wrong


def test_a_class_that_refuses_to_be_used_without_a_subclass_is_not_judged(tmp_path):
    made = 'if not hasattr(self, "axis"):\n            raise ValueError("choose an axis")'
    text = layer("BaseAttention", made=made, rest="\n\nclass RowAttention(BaseAttention):\n    axis = 1\n")
    report = judged(tmp_path, text, "BaseAttention")
    assert (report.verdict, report.wrong) == ("unknown", [])
    assert "--name RowAttention" in str(report)


def test_a_flag_that_the_constructor_asks_for_is_passed(tmp_path):
    text = layer(given=", self_attention=False, cross_attention=False", made="assert self_attention ^ cross_attention")
    report = judged(tmp_path, text)
    assert report.verdict in ("right", "partial"), report
    refused = layer(given=", self_attention=False", made="assert self_attention and d_model < 0")
    assert judged(tmp_path, refused).verdict == "unknown"


def test_a_size_that_is_zero_by_default_is_ours_to_choose(tmp_path):
    text = layer(given=", resolution=0", made="self.table = torch.arange(1 - resolution, resolution)")
    report = judged(tmp_path, text)
    assert (report.verdict, report.wrong) == ("unknown", []), report
    assert "resolution" in str(report)


def test_a_raise_in_a_folder_that_is_called_torch_is_a_refusal(tmp_path):
    text = layer(before='if T > 9:\n            raise ValueError("at most nine tokens")')
    report = judged(tmp_path, text, file="my_torch_models/layer.py")
    assert not report.wrong, report
    assert report.verdict == "partial"


def test_a_norm_in_single_precision_is_no_mistake(tmp_path):
    norm = "q = F.layer_norm(q.to(torch.float32), (D,), self.g, None).to(x.dtype)"
    text = layer(given=", qk_norm=False", made="self.g = nn.Parameter(torch.ones(d_model // num_heads))")
    text = text.replace("        pass\n        scores", f"        if self.qk_norm:\n            {norm}\n        scores")
    text = text.replace("self.num_heads = num_heads", "self.num_heads, self.qk_norm = num_heads, qk_norm")
    assert "option-crashes" not in names(judged(tmp_path, text))


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("muP: scores are divided by D", "variant"),
        ("divided by D rather than sqrt(D)", "variant"),
        ("Scaled.", "wrong"),
    ],
)
def test_another_scale_is_a_variant_if_the_text_says_so(tmp_path, said, verdict):
    assert judged(tmp_path, layer(text=said, scale="D")).verdict == verdict


def test_a_mask_may_bring_the_causal_one_with_it(tmp_path):
    causal = "scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)"
    body = "        if mask is None:\n            " + causal + "\n        else:\n            {}\n        return"
    for own, wrong in (
        ("scores = scores + mask", ["mask-replaces-causal"]),
        ("causal_mask = mask\n            scores = scores + causal_mask", []),
    ):
        text = re.sub(r"        if mask is not None:\n.*\n        return", body.format(own), layer())
        assert names(judged(tmp_path, text)) == wrong


BESIDE = """
        if mask is not None:
            seen = torch.ones(B, S, dtype=torch.bool) if context_mask is None else context_mask
            scores = scores.masked_fill(~(mask[:, None, :, None] & seen[:, None, None]), -1e9)
"""
CROSS = f"""{HEAD}class CrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x, context, mask=None, context_mask=None):
        B, T, E = x.shape
        S, H = context.shape[1], self.heads
        q = self.q(x).view(B, T, H, -1).transpose(1, 2)
        k, v = self.kv(context).view(B, S, 2, H, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(E // H){BESIDE}
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def test_a_mask_beside_one_for_the_memory_speaks_of_the_queries(tmp_path):
    report = judged(tmp_path, CROSS)
    assert (report.verdict, report.wrong) == ("partial", []), report


LOOPED = """
        out = []
        for h in range(H):
            s = scores[:, h]
            if mask is not None:
                mask = ~mask
                s = s.masked_fill(mask, -1e9)
            out.append(s.softmax(-1) @ v[:, h])
        return self.out(torch.cat(out, -1))
"""


def test_a_mask_that_every_head_turns_again_is_told_with_the_line_that_turns_it(tmp_path):
    text = re.sub(r"\n        if mask is not None:\n.*\n        return.*\n", LOOPED, layer())
    report = judged(tmp_path, text)
    assert names(report) == ["mask-turned"]
    assert "~mask" in report.wrong[0].text


@pytest.mark.parametrize(("said", "severity"), [("", "fragile"), ("mask: int64 of 1 (word) and 0", "wrong")])
def test_a_mask_of_whole_numbers_that_is_inverted_by_its_bits_is_found(tmp_path, said, severity):
    text = layer(text=said, mask="scores = scores.masked_fill((~mask).bool(), -1e9)")
    report = judged(tmp_path, text)
    assert [(f.name, f.severity) for f in report.findings if f.name == "mask-integers"] == [("mask-integers", severity)]


def test_a_maximum_over_queries_changes_a_softmax_by_hand(tmp_path):
    by_hand = "scores = scores - scores.max({}, keepdim=True).values\n        e = scores.exp()\n        return"
    text = (
        layer()
        .replace("        return", "        " + by_hand, 1)
        .replace("scores.softmax(-1)", "e / e.sum(-1, keepdim=True)")
    )
    assert names(judged(tmp_path, text.format("-2"))) == ["softmax-axis"]
    assert judged(tmp_path, text.format("-1")).verdict == "right"


SLOW = f"""{HEAD}class SlowAttention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n, self.d = n_heads, d_model // n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        rows = []
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                parts = [slice(h * self.d, (h + 1) * self.d) for h in range(self.n)]
                weights = [(k[b, : t + 1, p] @ q[b, t, p] / self.d**0.5).softmax(0) for p in parts]
                rows.append(torch.cat([w @ v[b, : t + 1, p] for w, p in zip(weights, parts)]))
        return self.o(torch.stack(rows).view(x.shape))
"""


def test_a_loop_over_heads_inside_one_over_queries_is_read(tmp_path):
    report = judged(tmp_path, SLOW)
    assert (report.verdict, report.variants) == ("partial", ["a built-in causal mask"]), report


def test_attention_that_is_not_understood_is_not_called_unfinished(tmp_path):
    text = SLOW.replace("rows.append", "rows.insert(len(rows), 1 * 1.0 if False else 0) if False else rows.append")
    text = text.replace("@ q[b, t, p]", "* q[b, t, p]").replace(" / self.d**0.5)", ").sum(-1)")
    assert judged(tmp_path, text).verdict != "unfinished"


WIDTHS = f"""{HEAD}class PictureAttention(nn.Module):
    def __init__(self, dim, dim_out, num_heads):
        super().__init__()
        self.heads, self.wide = num_heads, dim_out
        self.qkv, self.proj = nn.Linear(dim, 3 * dim_out), nn.Linear(dim_out, dim_out)

    def forward(self, x):
        B, H, W, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, H * W, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.proj(y.reshape(B, H, W, -1))
"""


def test_other_widths_of_pictures_can_be_split_into_heads(tmp_path):
    assert not judged(tmp_path, WIDTHS).wrong


def test_a_file_is_found_in_a_package_that_is_deep(tmp_path):
    folder = tmp_path / "deep" / "one" / "two" / "three"
    folder.mkdir(parents=True)
    for part in (folder, *[p for p in folder.parents if p.is_relative_to(tmp_path / "deep")]):
        (part / "__init__.py").write_text("")
    (tmp_path / "deep" / "sizes.py").write_text("ROOT = 0.5\n")
    text = layer(scale="D**ROOT").replace("import torch\n", "import torch\nfrom deep.sizes import ROOT\n", 1)
    assert judged(tmp_path, text, file="deep/one/two/three/layer.py").verdict == "right"


def test_a_remark_on_what_torch_expects_is_no_promise_of_the_class(tmp_path):
    mask = "# In PyTorch's kernel, True means keep\n            scores = scores.masked_fill(mask, -1e9)"
    text = layer(text="mask: boolean, True indicates masked positions", mask=mask)
    assert not judged(tmp_path, text).wrong


def test_a_class_that_says_it_is_not_causal_need_not_be(tmp_path):
    assert judged(tmp_path, layer("NonCausalAttention", text="Non-causal attention.")).verdict == "right"


LIST = f"""{HEAD}class Head(nn.Module):
    def __init__(self, d_in, d_out, context_length):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), 1).bool())

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(1, 2)
        scores = scores.masked_fill(self.mask[: x.shape[1], : x.shape[1]], -torch.inf)
        return torch.softmax(scores / WIDTH**0.5, -1) @ v


class Wrapper(nn.Module):
    def __init__(self, d_in, d_out, context_length, num_heads):
        super().__init__()
        self.heads = nn.ModuleList([Head(d_in, d_out, context_length) for _ in range(num_heads)])

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)
"""


@pytest.mark.parametrize(("width", "wrong"), [("k.shape[-1]", []), ("x.shape[-1]", ["scale-d_model"])])
def test_a_wrapper_is_tried_with_an_output_width_of_its_own(tmp_path, width, wrong):
    assert names(judged(tmp_path, LIST.replace("WIDTH", width))) == wrong


def test_half_of_a_scale_is_not_taken_for_the_width_of_the_model(tmp_path):
    assert names(judged(tmp_path, layer(scale="math.sqrt(D) / 2"))) == ["scale-other"]
    assert names(judged(tmp_path, layer(scale="math.sqrt(E)"))) == ["scale-d_model"]


def test_weights_that_are_divided_by_sums_over_queries_are_found(tmp_path):
    text = layer().replace("scores.softmax(-1)", "p / p.sum(-2, keepdim=True)")
    text = text.replace("        return", "        p = scores.softmax(-1)\n        return", 1)
    assert names(judged(tmp_path, text)) == ["softmax-axis"]


def test_a_mode_that_keeps_what_it_makes_of_the_weights_is_entered_after_they_are_made_random(tmp_path):
    train = """
    def train(self, mode=True):
        super().train(mode)
        self.kept = None if mode else self.table.detach().clone()
        return self
"""
    made = "self.table = nn.Parameter(torch.zeros(1, num_heads, 1, 1))\n        self.kept = None"
    text = layer(made=made, before="bias = self.table if self.training else self.kept", rest=train)
    text = text.replace(" / math.sqrt(D)", " / math.sqrt(D) + bias")
    assert not judged(tmp_path, text).wrong


def test_an_assertion_in_training_mode_is_no_difference(tmp_path):
    text = layer(before="assert not self.training or T % 13 == 0")
    report = judged(tmp_path, text)
    assert (report.verdict, report.wrong) == ("partial", []), report


@pytest.mark.parametrize(
    ("made", "verdict"), [("self.soft = nn.Softmax(-1)", "partial"), ("self.act = nn.ReLU()", "variant")]
)
def test_an_activation_of_the_heads_is_meant_where_there_is_a_layer_for_it(tmp_path, made, verdict):
    used = "self.act(y)" if "act" in made else "y.relu()"
    text = (
        layer(made=made)
        .replace("        return self.out((", "        y = ((")
        .replace("reshape(B, T, E))", "reshape(B, T, E))\n")
    )
    assert judged(tmp_path, text + f"        return self.out({used})\n").verdict == verdict


def test_a_view_of_no_numbers_asks_for_a_longer_input(tmp_path):
    report = judged(tmp_path, layer(before="q = q.reshape(B, H, 64, T // 64, D).mean(3)"))
    assert (report.verdict, report.wrong) == ("unknown", []), report
    assert "too short" in str(report)
