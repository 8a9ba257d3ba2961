"""Files as they come: imports forgotten, packages missing, demo code below, sizes in globals, pages and notebooks."""

import json
import textwrap

import pytest

from headwise.check.code.loader import load
from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")


def judged(folder, source, name="attention.py", **options):
    path = folder / name
    path.write_text(source)
    return judge_file(path, thorough=False, **options)


def test_names_that_were_never_imported_are_listed_and_judging_goes_on(tmp_path):
    report = judged(tmp_path, write("listed", "missing-import", "scale-missing"))
    assert [f.name for f in report.findings if f.severity == "wrong"] == ["missing-import", "scale-missing"]
    assert report.findings[0].detail == "nn"


def test_demo_code_below_the_class_is_not_run(tmp_path):
    demo = "\nmodel = MultiHeadAttention(10**6, 8)\nwhile True:\n    pass\n"
    assert judged(tmp_path, RIGHT + demo).verdict == "right"


def test_exit_at_module_level_does_no_harm(tmp_path):
    assert judged(tmp_path, "import sys\n" + RIGHT + "\nsys.exit(3)\nexit()\n").verdict == "right"


def test_missing_packages_of_the_demo_code_do_not_matter(tmp_path):
    head = (
        "import no_such_plotting as plt\nfrom no_such_hub import Trainer, Callback\n\nclass C(Callback):\n    pass\n\n"
    )
    path = tmp_path / "attention.py"
    path.write_text(head + RIGHT)
    assert judge_file(path, thorough=False).verdict == "right"
    assert load(path).finder.missing == ["no_such_plotting", "no_such_hub"]


def test_sizes_and_configurations_of_a_file_that_is_not_here_are_read_from_their_names(tmp_path):
    head = "from project.settings import N_HEADS, D_MODEL, config\n"
    source = RIGHT.replace("import math", "import math\n" + head).replace("self, d_model, num_heads, ", "self, ", 1)
    report = judged(
        tmp_path, source.replace("        super", "        d_model, num_heads = D_MODEL, N_HEADS\n        super", 1)
    )
    assert report.verdict == "right", report
    report = judged(
        tmp_path,
        source.replace("        super", "        d_model, num_heads = config.n_emb, N_HEADS\n        super", 1),
    )
    assert report.verdict == "right", report


def test_an_import_that_fails_in_every_way_does_not_take_the_class_with_it(tmp_path):
    head = "try:\n    from .settings import Config\nexcept ImportError:\n    from settings import Config\n"
    source = RIGHT.replace("import math", "import math\n" + head).replace("num_heads, ", "num_heads: Config, ", 1)
    assert judged(tmp_path, source).verdict == "right"


def test_an_output_projection_in_the_class_around_it_is_a_variant(tmp_path):
    block = "\n\nclass Block(nn.Module):\n    def __init__(self, d):\n        super().__init__()\n"
    block += "        self.attention = MultiHeadAttention(d, 4)\n        self.proj = nn.Linear(d, d)\n"
    report = judged(tmp_path, write("separate", "no-out-proj", out_layer="pass") + block)
    assert (report.verdict, report.variants) == ("variant", ["the output projection is in Block"])


def test_optional_import_is_seen_to_be_missing(tmp_path):
    head = "try:\n    import no_such_kernel\n    FAST = True\nexcept ImportError:\n    FAST = False\n"
    path = tmp_path / "attention.py"
    path.write_text(head)
    assert load(path).namespace["FAST"] is False


def test_a_flag_of_a_missing_package_is_off(tmp_path):
    head = "from no_such_kernels import is_available, Fast\nFAST = bool(is_available())\n"
    path = tmp_path / "attention.py"
    path.write_text(head)
    space = load(path).namespace
    assert (space["FAST"], isinstance(1, space["Fast"])) == (False, False)


def test_a_class_defined_in_several_cells_is_whole(tmp_path):
    start = RIGHT.index("    def forward")
    method = "\n@book.add_to_class(MultiHeadAttention)\n" + textwrap.dedent(RIGHT[start:])
    source = "from no_such_course import torch as book\n" + RIGHT[:start] + method
    assert judged(tmp_path, source).verdict == "right"


def test_einops_works_without_einops(tmp_path):
    source = RIGHT.replace("import math", "import math\nfrom einops import rearrange")
    source = source.replace(".view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)", "")
    split = "q, k, v = (rearrange(y, 'b n (h d) -> b h n d', h=self.num_heads) for y in (q, k, v))"
    source = source.replace("scores = torch.matmul", split + "\n        scores = torch.matmul")
    assert judged(tmp_path, source).verdict == "right"


GLOBALS = """
import torch, torch.nn as nn
from torch.nn import functional as F
batch_size = 16
block_size = 32
n_embd = 48
n_head = 6
dropout = 0.0
text = open("no_such_input.txt").read()

class Head(nn.Module):
    def __init__(self, head_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.shape
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * SCALE
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)

class MultiHeadAttention(nn.Module):
    def __init__(self, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([Head(head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))
"""


@pytest.mark.parametrize(("scale", "cause"), [("k.shape[-1] ** -0.5", None), ("C ** -0.5", "scale-d_model")])
def test_sizes_in_module_globals_are_understood(scale, cause, tmp_path):
    report = judged(tmp_path, GLOBALS.replace("SCALE", scale))
    assert report.cause == cause
    assert report.variants == ["a built-in causal mask"]


def test_hard_wired_width_is_found_out(tmp_path):
    report = judged(tmp_path, GLOBALS.replace("n_embd,", "40,").replace("SCALE", "k.shape[-1] ** -0.5"))
    assert report.verdict == "partial", report  # right at its one width, which is all that can be tried


def test_constants_under_the_main_guard_are_available(tmp_path):
    source = RIGHT.replace("num_heads, d_model // num_heads", "num_heads, WIDTH // num_heads")
    report = judged(tmp_path, source + '\nif __name__ == "__main__":\n    WIDTH = 32\n    train()\n')
    assert report.verdict == "right", report


def test_annotations_may_be_postponed(tmp_path):
    source = "from __future__ import annotations\n" + RIGHT.replace("mask=None", "mask: NoSuchType | None = None")
    assert judged(tmp_path, source).verdict == "right"


def test_a_hard_wired_gpu_is_fragile_not_fatal(tmp_path):
    source = RIGHT.replace("/ math.sqrt(self.head_dim)", '/ torch.tensor(self.head_dim).cuda().sqrt().to("cuda:0")')
    report = judged(tmp_path, source)
    assert (report.verdict, "cuda-only" in {f.name for f in report.findings}) == ("right", True), report


def test_python_blocks_of_a_page_are_judged_with_the_lines_of_the_page(tmp_path):
    page = "# Attention\n\nSome words.\n\n```python\n" + write("separate", "scale-d_model") + "```\n\nmore `words`\n"
    report = judged(tmp_path, page, "page.md")
    finding = report.findings[0]
    assert finding.name == "scale-d_model"
    assert page.splitlines()[finding.line - 1].strip() == finding.text


def test_a_notebook_is_judged(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["# no code"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install x\n"]},
        {"cell_type": "code", "source": [RIGHT]},
    ]
    assert judged(tmp_path, json.dumps({"cells": cells}), "book.ipynb").verdict == "right"


def test_a_syntax_error_is_named_with_its_line(tmp_path):
    report = judged(tmp_path, "import torch\n\ndef f(:\n    pass\n")
    assert (report.verdict, report.cause, report.findings[0].line) == ("wrong", "syntax", 3)


@pytest.mark.parametrize("source", ["", "x = 1\n", "class Config:\n    pass\n"], ids=["empty", "number", "config"])
def test_a_file_without_attention_is_not_judged(source, tmp_path):
    report = judged(tmp_path, source)
    assert (report.verdict, report.exit_code) == ("unknown", 2)
    assert "nothing in this file looks like attention" in report.doubts[0]


def test_the_attention_is_found_among_other_classes(tmp_path):
    others = """
class FeedForward(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_model, d_model), nn.ReLU())

    def forward(self, x):
        return self.net(x)

class TransformerBlock(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.attention, self.ff = MultiHeadAttention(d_model, num_heads), FeedForward(d_model)

    def forward(self, x):
        return self.ff(self.attention(x, x, x))
"""
    report = judged(tmp_path, RIGHT + others)
    assert report.subject.startswith("MultiHeadAttention(")
    assert report.verdict == "right"


def test_a_name_can_be_chosen_and_a_wrong_name_is_answered(tmp_path):
    assert judged(tmp_path, RIGHT, name="a.py").verdict == "right"
    path = tmp_path / "a.py"
    report = judge_file(path, "Nobody")
    assert report.doubts == ["a.py defines no 'Nobody'; it defines MultiHeadAttention"]


def test_a_name_defined_by_demo_code_is_fetched_and_no_fault(tmp_path):
    source = RIGHT.replace("math.sqrt(self.head_dim)", "(ROOT * math.sqrt(self.head_dim))")
    report = judged(tmp_path, source + "\nROOT = torch.ones(1).item()\n")
    assert report.verdict == "right", report


def test_a_class_that_needs_a_missing_file_is_not_called_wrong(tmp_path):
    source = RIGHT.replace("import math", "import math\nfrom no_such_neighbour import Projection")
    report = judged(tmp_path, source.replace("self.w_q(query)", "Projection(3)(query).sum()"))
    assert report.verdict == "unknown", report


def test_an_argument_nobody_can_guess_is_not_a_fault(tmp_path):
    source = RIGHT.replace("num_heads, dropout=0.1", "num_heads, frobnicator").replace(
        "nn.Dropout(dropout)", "frobnicator.make()"
    )
    report = judged(tmp_path, source)
    assert report.verdict == "unknown"
    assert any("frobnicator" in attempt for attempt in report.tried)


PAGE = """A class:
```python
{right}```
Its use, and one that is cut short:
```python
>>> m = MultiHeadAttention(8, 2)
```
```python
class Cut(
    ...
```
"""
NUMPY = """import numpy as np

class MultiHeadAttention:
    def __init__(self, d_model, num_heads):
        self.w = np.eye(d_model)

    def forward(self, x):
        return x.transpose(0, 2, 1) @ self.w
"""


def test_blocks_of_a_page_that_are_no_whole_code_are_left_out(tmp_path):
    assert judged(tmp_path, PAGE.format(right=RIGHT), "page.md").verdict == "right"


def test_a_class_that_is_no_pytorch_cannot_be_judged(tmp_path):
    report = judged(tmp_path, NUMPY)
    assert report.verdict == "unknown"
    assert "only PyTorch can be judged" in report.doubts[0]


def test_an_input_in_the_wrong_role_is_named_with_its_line(tmp_path):
    report = judged(tmp_path, RIGHT.replace("self.w_v(value)", "self.w_v(key)"))
    finding = next(f for f in report.findings if f.name == "wrong-role")
    assert finding.text.startswith("v = self.w_v(key)")
