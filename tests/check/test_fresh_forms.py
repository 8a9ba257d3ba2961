"""What a second set of fresh files showed: configurations, separate biases, scales left out on purpose, file types."""

import pytest

from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")
HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n\n\n"


def judged(folder, source, **options):
    path = folder / "attention.py"
    path.write_text(source)
    return judge_file(path, thorough=False, **options)


def found(report):
    return [finding.name for finding in report.wrong]


FROM_FILE = """
import json
from pathlib import Path
import torch

with open(Path(__file__).with_suffix(".json")) as file:
    SETTINGS = json.load(file)["net"]
WIDTH = SETTINGS["breadth"]


class Aufmerksamkeit(torch.nn.Module):
    def __init__(self, settings=SETTINGS):
        super().__init__()
        self.count, self.per_head = settings["count"], WIDTH // settings["count"]
        self.a, self.b, self.c, self.d = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.count, -1)).transpose(1, 2) for f in (self.a, self.b, self.c))
        weights = (q @ k.mT / self.per_head**0.5).softmax(-1)
        return self.d((weights @ v).transpose(1, 2).flatten(2))
"""


def test_a_definition_that_needs_a_file_read_above_it_is_defined(tmp_path):
    (tmp_path / "attention.json").write_text('{"net": {"breadth": 24, "count": 3}}')
    report = judged(tmp_path, FROM_FILE)
    assert (report.verdict, report.subject) == ("partial", "Aufmerksamkeit(config)"), report


GROUPED = """
import torch
from torch import nn
from types import SimpleNamespace as NS

cfg = NS(d=96, hq=12, hkv=3, dh=8, causal=True)


class Grouped(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, self.g = c, c.hq // c.hkv
        self.fused = nn.Linear(c.d, (c.hq + 2 * c.hkv) * c.dh, bias=False)
        self.back = nn.Linear(c.hq * c.dh, c.d, bias=False)

    def forward(self, x, pad=None):
        c, (B, T, _) = self.c, x.shape
        q, k, v = self.fused(x).split([c.hq * c.dh, c.hkv * c.dh, c.hkv * c.dh], dim=-1)
        q, k, v = q.view(B, T, c.hkv, self.g, c.dh), k.view(B, T, c.hkv, c.dh), v.view(B, T, c.hkv, c.dh)
        s = torch.einsum("bikgd,bjkd->bkgij", q, k) * c.dh**-0.5
        hidden = torch.zeros(B, 1, 1, T, T, dtype=torch.bool)
        if c.causal:
            hidden = hidden | torch.ones(T, T, dtype=torch.bool).triu(1)
        if pad is not None:
            hidden = hidden | pad[:, None, None, None, :]
        s = s.masked_fill(hidden, torch.finfo(s.dtype).min)
        return self.back(torch.einsum("bkgij,bjkd->bikgd", s.softmax(-1), v).reshape(B, T, -1))
"""


def test_a_configuration_made_under_an_alias_is_used_with_short_names_of_grouped_heads(tmp_path):
    report = judged(tmp_path, GROUPED)
    assert report.verdict == "variant", report
    assert "a built-in causal mask" in report.variants


def test_a_group_that_reads_the_wrong_keys_is_still_named_there(tmp_path):
    report = judged(tmp_path, GROUPED.replace("c.dh**-0.5", "c.d**-0.5"))
    assert found(report) == ["scale-d_model"], report


SWITCHED = """
class Positional(nn.Module):
    def __init__(self, dim, heads, table=True):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.table = nn.Parameter(torch.zeros(heads, 64)) if table else None

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT
        if self.table is not None:
            away = (torch.arange(T)[:, None] - torch.arange(T)).abs()
            scores = scores + self.table[:, away]
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
"""


def test_a_switch_that_leaves_the_scale_as_it_was_is_not_blamed_for_it(tmp_path):
    report = judged(tmp_path, HEAD + SWITCHED)
    assert not report.wrong, report


@pytest.mark.parametrize(
    ("says", "wrong"),
    [("The logits are not scaled.", []), ("Scores.", ["scale-missing"]), ("TODO: no scale yet", ["scale-missing"])],
)
def test_a_scale_is_missing_unless_the_file_says_that_there_is_none(tmp_path, says, wrong):
    source = write("separate", "scale-missing")
    assert found(judged(tmp_path, f'"""{says}"""\n' + source)) == wrong


SEPARATE_BIAS = """
class Biased(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.n = n
        self.qkv, self.proj = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(c)), nn.Parameter(torch.zeros(c))

    def forward(self, x):
        B, L, C = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        z = F.linear(x, self.qkv.weight, bias).view(B, L, 3, self.n, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(z[0], z[1], z[2])
        return self.proj(y.transpose(1, 2).reshape(B, L, C))
"""


def test_biases_that_lie_beside_one_matrix_for_all_three_are_their_own(tmp_path):
    assert judged(tmp_path, HEAD + SEPARATE_BIAS).verdict == "right"


PIXELS = """
class PixelAttention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, image):
        B, C, H, W = image.shape
        tokens = self.norm(image).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).view(B, H * W, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, H * W, C)
        return image + self.proj(y).transpose(1, 2).reshape(B, C, H, W)
"""


def test_an_image_that_is_read_as_tokens_by_a_view_is_named_with_its_line(tmp_path):
    assert not judged(tmp_path, HEAD + PIXELS).wrong
    report = judged(tmp_path, HEAD + PIXELS.replace("flatten(2).transpose(1, 2)", "reshape(B, H * W, C)"))
    assert (found(report), report.wrong[0].line) == (["tokens-view"], 15), report


LAYER = """
class Block(nn.Module):
    \"\"\"Input and output are (batch, time, dim).\"\"\"

    def __init__(self, dim, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads)

    def forward(self, h):
        return h + self.attn(h, h, h)[0]
"""


def test_a_layer_that_reads_the_batch_second_contradicts_a_docstring_about_the_input(tmp_path):
    report = judged(tmp_path, HEAD + LAYER)
    assert (found(report), report.wrong[0].line) == (["batch-second"], 12), report
    assert not judged(tmp_path, HEAD + LAYER.replace("batch, time", "time, batch")).wrong


HALF = """
class Served(nn.Module):
    def __init__(self, dim, heads, dtype=torch.float16):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim, dtype=dtype), nn.Linear(dim, dim, dtype=dtype)

    def forward(self, x, valid=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (C // self.heads) ** -0.5
        if valid is not None:
            scores = scores.masked_fill(~valid[:, None, None], -1e9)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
"""


@pytest.mark.parametrize(("dtype", "wrong"), [("float16", ["half-fill"]), ("float32", []), ("bfloat16", [])])
def test_a_number_too_large_for_the_type_that_the_class_is_made_in_is_wrong(tmp_path, dtype, wrong):
    assert found(judged(tmp_path, HEAD + HALF.replace("float16", dtype))) == wrong


PADDED = """
class Decoder(nn.Module):
    \"\"\"SAYS\"\"\"

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, present):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = torch.ones(T, T, dtype=torch.bool).tril() & present[:, None, None]
        scores = (q @ k.mT * (C // self.heads) ** -0.5).masked_fill(~seen, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
"""


@pytest.mark.parametrize(
    ("says", "wrong"),
    [("Prompts are padded on the left.", ["nan-empty-row"]), ("Prompts are padded.", []), ("No left padding.", [])],
)
def test_rows_that_see_only_padding_are_wrong_where_padding_comes_first(tmp_path, says, wrong):
    report = judged(tmp_path, HEAD + PADDED.replace("SAYS", says))
    assert found(report) == wrong, report
    assert report.masks == ["present: 1 keeps a key, 0 hides it, in shapes (B,S)"]


LENGTHS = """
class Joined(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
        if lengths is not None:
            seen = seen & (torch.arange(T) < lengths[:, None])[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o(y.transpose(1, 2).reshape(B, T, C))
"""


@pytest.mark.parametrize(
    ("joined", "wrong"), [("seen & (", []), ("seen | (", ["masks-combined"]), ("(", ["mask-replaces-causal"])]
)
def test_lengths_must_hide_keys_beside_a_causal_mask(tmp_path, joined, wrong):
    source = LENGTHS.replace("seen & (", joined)
    assert found(judged(tmp_path, HEAD + source)) == wrong
    prefix = source.replace("lengths", "prefix_lengths")  # tokens that may all see each other
    assert joined == "seen & (" or "masks-combined" not in found(judged(tmp_path, HEAD + prefix))


MODEL = """
class SelfAttention(nn.Module):
    def __init__(self, dim, heads, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).reshape(B, T, C))


class Model(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = SelfAttention(dim, heads)

    def loss(self, ids):
        inputs, targets = ids[:, :-1], ids[:, 1:]
        return F.cross_entropy(self.attn(inputs), targets)
"""


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [("", "", ["causal-off"]), ("SelfAttention(dim, heads)", "SelfAttention(dim, heads, True)", []),
     ("ids[:, :-1], ids[:, 1:]", "ids, ids", [])],
)  # fmt: skip
def test_a_model_of_the_next_token_must_switch_its_causal_mask_on(tmp_path, old, new, wrong):
    assert found(judged(tmp_path, HEAD + MODEL.replace(old, new))) == wrong


IN_PLACE = """
class Sets(nn.Module):
    def __init__(self, dim_query, dim_set, dim_hidden, heads):
        super().__init__()
        self.heads = heads
        self.fq, self.fk = nn.Linear(dim_query, dim_hidden), nn.Linear(dim_set, dim_hidden)
        self.fv, self.fo = nn.Linear(dim_set, dim_hidden), nn.Linear(dim_hidden, dim_query)

    def forward(self, query, elements, present):
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, x in ((self.fq, query), (self.fk, elements), (self.fv, elements))
        )
        logits = q @ k.mT / q.shape[-1] ** 0.5
        weights = logits.masked_fill(~present[:, None, None], -1e4).softmax(-1)
        weights.masked_fill_(~present[:, None, None], 0.0)
        return self.fo((weights @ v).transpose(1, 2).flatten(2))
"""


def test_a_softmax_that_is_overwritten_is_named_with_its_line(tmp_path):
    report = judged(tmp_path, HEAD + IN_PLACE)
    assert (found(report), report.wrong[0].line) == (["backward-fails"], 21), report
    assert not judged(
        tmp_path, HEAD + IN_PLACE.replace("weights.masked_fill_(", "weights = weights.masked_fill(")
    ).wrong


PATCHES = """
class Patches(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.shapes = {4: (0, 2, 3, 1)}
        self.attn = SelfAttention(dim, heads)

    def forward(self, image):
        return self.attn(image.permute(self.shapes[image.dim()]).flatten(1, 2))
"""


def test_a_missed_key_is_no_crash_while_the_form_of_the_input_is_not_known(tmp_path):
    attention = MODEL.split("class Model")[0]
    report = judged(tmp_path, HEAD + attention.replace("SelfAttention", "注意力") + PATCHES.replace("SelfA", "Multi_a"))
    assert not report.wrong, report


@pytest.mark.parametrize(
    ("old", "new", "name", "text"),
    [
        ("weights = torch.softmax(scores, dim=-1)", "weights = self.turn(scores)", "softmax-axis", "nn.Softmax(dim=2)"),
        ("self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))",
         "self.w_q = nn.Linear(d_model, d_model)\n        self.w_k = self.w_v = nn.Linear(d_model, d_model)",
         "one-projection", "self.w_k = self.w_v"),
    ],
    ids=["a softmax layer", "a layer with two names"],
)  # fmt: skip
def test_a_mistake_in_the_constructor_is_reported_there(tmp_path, old, new, name, text):
    turn = "super().__init__()\n        self.turn = nn.Softmax(dim=2)"
    source = write("separate").replace(old, new).replace("super().__init__()", turn)
    report = judged(tmp_path, source)
    assert (report.cause, text in report.wrong[0].text) == (name, True), report


LISTED = """
class Listed(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (
            nn.ModuleList(nn.Linear(*sizes) for _ in range(heads))
            for sizes in 3 * [(dim, dim // heads)] + [(dim // heads, dim)]
        )

    def forward(self, x):
        total = 0
        for i in range(self.heads):
            head = F.scaled_dot_product_attention(self.q[i](x), self.k[i](x), self.v[i](x))
            total = total + self.o[i](head)
            return total
"""


def test_a_return_inside_the_loop_over_heads_is_named_with_its_line(tmp_path):
    report = judged(tmp_path, HEAD + LISTED)
    assert (found(report), report.wrong[0].text) == (["heads-lost"], "return total"), report
    assert not judged(tmp_path, HEAD + LISTED.replace("            return", "        return")).wrong


def test_lengths_are_judged_as_lengths(tmp_path):
    source = LENGTHS.replace("lengths[:, None])[:, None, None]", "lengths)")
    report = judged(tmp_path, HEAD + source)
    assert (found(report), report.wrong[0].line) == (["mask-crashes"], 18), report


def test_a_mask_of_booleans_that_is_added_contradicts_what_the_file_says(tmp_path):
    said = '"""mask: bool tensor (n, n); False positions are never attended to."""\n'
    old = 'scores = scores.masked_fill(mask == 0, float("-inf"))'
    report = judged(tmp_path, said + write("separate").replace(old, "scores = scores + mask.to(scores.dtype)"))
    assert found(report) == ["mask-convention"], report


KEPT = """
class Kept(nn.Module):
    def __init__(self, dim, heads, past={}):
        super().__init__()
        self.heads, self.past = heads, past
        self.past_of = past
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if "k" in self.past_of:
            k, v = torch.cat([self.past_of["k"], k], 2), torch.cat([self.past_of["v"], v], 2)
        self.past_of["k"], self.past_of["v"] = k.detach(), v.detach()
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(B, T, C))
"""


def test_a_dictionary_that_is_the_default_of_an_argument_is_named_with_its_line(tmp_path):
    report = judged(tmp_path, HEAD + KEPT)
    assert (found(report), report.wrong[0].line) == (["remembers-calls"], 8), report


MEMORY = """
class Whisper(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def new_cache(self, batch):
        return {"size": batch}

    def forward(self, x, audio=None, held=None):
        audio = x if audio is None else audio
        q, k, v = self.q(x), self.k(audio), self.v(audio)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))
"""


def test_an_argument_in_whose_place_the_input_stands_is_a_memory(tmp_path):
    report = judged(tmp_path, HEAD + MEMORY)
    assert report.call == "forward(x, audio)", report


SPANISH = """
class AtencionPropia(nn.Module):
    def __init__(self, ancho, cabezas):
        super().__init__()
        self.n = cabezas
        self.a, self.b = nn.Linear(ancho, ancho), nn.Linear(ancho, ancho)
        self.c, self.d = nn.Linear(ancho, ancho), nn.Linear(ancho, ancho)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.n, -1)).transpose(1, 2) for f in (self.a, self.b, self.c))
        STEP
        return self.d((pesos @ v).transpose(1, 2).flatten(2))
"""


@pytest.mark.parametrize(
    "step", ["pesos = ...", "# paso 1: comparar\n        # paso 2: pesos\n"], ids=["an ellipsis", "comments only"]
)
def test_an_unfinished_class_is_found_whatever_the_language_of_its_names(tmp_path, step):
    report = judged(tmp_path, HEAD + SPANISH.replace("STEP", step))
    assert (report.verdict, report.done) == ("unfinished", ["1 project", "2 split", "3 transpose"]), report


FLAGGED = """
from dataclasses import dataclass, field
import logging

log = logging.getLogger(__name__)


@dataclass
class ModelArgs:
    width: int = 64
    n_head: int = 4
    slow: bool = field(default_factory=lambda: False)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.heads, self.flash = args.n_head, not args.slow
        self.qkv, self.o = nn.Linear(args.width, 3 * args.width), nn.Linear(args.width, args.width)
        if not self.flash:
            log.info("falling back to slow attention")
            self.register_buffer("hidden", torch.ones(64, 64, dtype=torch.bool).triu(1))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(self.hidden[:T, :T], -torch.inf)
            y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(B, T, C))
"""


@pytest.mark.parametrize(("scale", "wrong"), [("-0.5", []), ("-1", ["scale-no-sqrt"])])
def test_a_flag_of_the_configuration_is_tried_where_it_leads_to_lines_that_never_ran(tmp_path, scale, wrong):
    report = judged(tmp_path, HEAD + FLAGGED.replace("-0.5", scale))
    assert (found(report), report.verdict) == (wrong, "wrong" if wrong else "variant"), report
