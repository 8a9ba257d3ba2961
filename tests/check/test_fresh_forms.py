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


def test_the_bias_of_the_values_added_to_the_queries_is_foreign(tmp_path):
    source = write("separate").replace("q = self.w_q(query)", "q = F.linear(query, self.w_q.weight, self.w_v.bias)")
    assert "bias-foreign" in found(judged(tmp_path, HEAD + source))
