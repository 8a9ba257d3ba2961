"""Files as they stand in projects: siblings, relative imports, broken packages, missing modules, configurations."""

import json
import sys

import pytest

from headwise.check.code.candidates import candidates
from headwise.check.code.loader import load
from headwise.check.code.project import Project, search_folders
from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")
SPLIT = "def split(x, heads):\n    return x.view(x.shape[0], -1, heads, x.shape[-1] // heads).transpose(1, 2)\n"


def tree(folder, **files):
    """Write files; `__` in a name stands for a slash."""
    for name, text in files.items():
        path = folder / (name.replace("__", "/").replace("/init/", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def package(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text("import no_such_kernels\nraise RuntimeError('needs a GPU')\n")


def using_split(line):
    """The right class with its heads split by a function of another file."""
    source = RIGHT.replace("import math", "import math\n" + line)
    for name in "qkv":
        word = {"q": "query", "k": "key", "v": "value"}[name]
        old = f"self.w_{name}({word}).view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)"
        assert old in source
        source = source.replace(old, f"split(self.w_{name}({word}), self.num_heads)")
    return source


def is_right(path, **options):
    report = judge_file(path, thorough=False, **options)
    assert not report.wrong, report
    return report.verdict in ("right", "variant", "partial")


def test_relative_import_works_although_every_init_fails(tmp_path):
    package(tmp_path, "pkg", "pkg/models")
    tree(tmp_path, pkg__ops=SPLIT, pkg__models__attention=using_split("from ..ops import split"))
    assert is_right(tmp_path / "pkg/models/attention.py")


@pytest.mark.parametrize(
    ("sibling", "file", "line"),
    [("utils__heads", "models__attention", "from utils.heads import split"),
     ("src__proj__ops", "src__proj__nn__attention", "from proj.ops import split"),
     ("src__ops", "attention", "from ops import split"),
     ("models__ops", "models__attention", "from .ops import split")],
    ids=["parent", "src layout", "src beside", "relative without a package"],
)  # fmt: skip
def test_siblings_are_found_up_to_the_root_of_the_project(sibling, file, line, tmp_path):
    (tmp_path / "pyproject.toml").touch()
    tree(tmp_path, **{sibling: SPLIT, file: line + "\n"})
    loaded = load(tmp_path / (file.replace("__", "/") + ".py"))
    assert loaded.namespace["split"].__code__.co_name == "split"
    assert [other.path for other in loaded.siblings] == [str(tmp_path / (sibling.replace("__", "/") + ".py"))]


def test_a_folder_that_the_imports_name_is_found_without_any_mark_of_a_root(tmp_path):
    line = "from src.models.blocks.heads import split"
    tree(tmp_path / "deep", src__models__blocks__heads=SPLIT, src__models__blocks__parts__attention=using_split(line))
    assert is_right(tmp_path / "deep/src/models/blocks/parts/attention.py")


def test_training_code_and_missing_packages_of_a_sibling_do_no_harm(tmp_path):
    sibling = "import no_such_tracker\n" + SPLIT + "no_such_tracker.init()\nwhile True:\n    pass\n"
    tree(tmp_path, train=sibling, attention="from train import *\n")
    assert "split" in load(tmp_path / "attention.py").namespace


def test_what_a_sibling_left_out_is_run_when_asked_for(tmp_path):
    tree(tmp_path, tables="import torch\nTABLE = torch.eye(3)\n", attention="from tables import TABLE\n")
    assert load(tmp_path / "attention.py").namespace["TABLE"].shape == (3, 3)


def test_names_of_an_init_are_there_when_asked_for(tmp_path):
    tree(tmp_path, pkg__ops=SPLIT, pkg__attention="from . import split, VERSION\n")
    (tmp_path / "pkg/__init__.py").write_text("from .attention import X\nfrom .ops import split\nVERSION = 3\n")
    space = load(tmp_path / "pkg/attention.py").namespace
    assert (space["VERSION"], space["split"].__name__) == (3, "split")


def test_modules_of_a_project_are_forgotten_when_the_next_file_is_loaded(tmp_path):
    tree(
        tmp_path,
        a__common="X = 1\n",
        a__one="from common import X\n",
        b__common="X = 2\n",
        b__two="from common import X",
    )
    for name in "ab":
        (tmp_path / name / "setup.py").touch()
    assert load(tmp_path / "a/one.py").namespace["X"] == 1
    assert load(tmp_path / "b/two.py").namespace["X"] == 2
    assert sum(isinstance(finder, Project) for finder in sys.meta_path) == 1


def test_an_installed_package_counts_before_a_folder_of_data(tmp_path):
    (tmp_path / "einops").mkdir()
    tree(tmp_path, einops__data__make="X = 1\n", attention="from einops import rearrange\n")
    assert load(tmp_path / "attention.py").namespace["rearrange"].__module__.startswith("einops")


def test_the_search_ends_at_the_root_of_the_project(tmp_path):
    (tmp_path / "repo/.git").mkdir(parents=True)
    (tmp_path / "repo/a/b").mkdir(parents=True)
    found = list(search_folders(tmp_path / "repo/a/b/file.py"))
    assert found == [tmp_path / "repo/a/b", tmp_path / "repo/a", tmp_path / "repo"]


def test_a_missing_sibling_is_a_doubt_that_says_where_it_was_searched(tmp_path):
    source = RIGHT.replace("import math", "import math\nfrom layers.scores import Scores")
    tree(tmp_path, attention=source.replace("torch.matmul(q", "Scores()(q"))
    report = judge_file(tmp_path / "attention.py", thorough=False)
    assert (report.verdict, report.findings) == ("unknown", []), report
    assert "it needs layers.scores, which is neither installed nor in the project" in report.doubts[0]
    assert "textbook" not in report.doubts[0]  # which has no such file
    assert str(tmp_path) in report.doubts[0]


def test_a_mistake_in_a_sibling_is_found(tmp_path):
    scores = "import math\ndef scores(q, k):\n    return q @ k.transpose(-2, -1) / q.shape[-1]\n"
    source = RIGHT.replace("import math", "import math\nfrom ops import scores as score")
    old = next(line.strip() for line in RIGHT.splitlines() if line.strip().startswith("scores = torch.matmul"))
    tree(tmp_path, ops=scores, attention=source.replace(old, "scores = score(q, k)"))
    assert judge_file(tmp_path / "attention.py", thorough=False).cause == "scale-no-sqrt"


def test_sizes_in_a_sibling_are_written_there_too(tmp_path):
    source = RIGHT.replace("import math", "import math\nimport settings").replace(
        "self, d_model, num_heads, ", "self, ", 1
    )
    sizes = "        d_model, num_heads = settings.d_model, settings.Config.heads\n        super"
    tree(
        tmp_path,
        settings="d_model = 384\nclass Config:\n    heads = 6\n",
        attention=source.replace("        super", sizes, 1),
    )
    assert is_right(tmp_path / "attention.py")


# Configurations.

KINDS = {
    "dataclass": "@dataclass\nclass Settings:\n    width: int\n    n_head: int\n    kind: str\n    rate: float = 0.1\n"
    "    @property\n    def each(self):\n        return self.width // self.n_head\n",
    "pydantic": "from pydantic import BaseModel, Field\nfrom typing import Literal\nclass Settings(BaseModel):\n"
    "    width: int = Field(..., gt=0)\n    n_head: int\n    kind: Literal['dot', 'sum']\n    rate: float\n"
    "    @property\n    def each(self):\n        return self.width // self.n_head\n",
    "plain class": "class Settings:\n    def __init__(self, width=512, n_head=8, **more):\n"
    "        self.width, self.n_head, self.each = width, n_head, width // n_head\n",
    "not here": "from project.settings import Settings\n",
}
CONFIGURED = """
    def __init__(self, settings: Settings):
        super().__init__()
        if settings.kind != "dot":
            raise ValueError(settings.kind)
        dropout, d_model, num_heads = settings.rate, settings.width, settings.n_head
        assert d_model % num_heads == 0 and isinstance(settings, object)
"""


def configured(head, init):
    """The right class with another head of its constructor."""
    start, end = RIGHT.index("    def __init__"), RIGHT.index("        self.num_heads")
    text = RIGHT[:start] + init.lstrip("\n") + RIGHT[end:]
    return text.replace("import math", "import math\nfrom dataclasses import dataclass", 1).replace(
        "\n\nclass ", f"\n\n{head}\n\nclass ", 1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_configuration_of_any_kind_is_answered(kind, tmp_path):
    tree(tmp_path, attention=configured(KINDS[kind], CONFIGURED))
    assert is_right(tmp_path / "attention.py")


def test_nested_configurations_are_read_from_json_beside_the_file(tmp_path):
    init = """
    def __init__(self, cfg):
        super().__init__()
        part = cfg["attention"]
        table = {"naive": 1}[part["impl"]]
        dropout, d_model, num_heads = cfg["model"]["drop"], cfg["model"]["dim"], table * part["heads"]
"""
    (tmp_path / "config.json").write_text(
        json.dumps({"attention": {"impl": "naive", "heads": 8}, "model": {"dim": 64}})
    )
    tree(tmp_path, attention=configured("", init))
    assert is_right(tmp_path / "attention.py")


def test_a_key_without_a_meaning_gets_the_value_that_works(tmp_path):
    init = """
    def __init__(self, conf):
        super().__init__()
        assert conf.zeta % conf.n_head == 0
        if conf.flavour == "plain":
            dropout = conf.rho
        dropout, d_model, num_heads = nn.Dropout(conf.rho).p, conf.zeta, conf.n_head
"""
    tree(tmp_path, attention=configured("", init))
    assert is_right(tmp_path / "attention.py")


def test_options_of_argparse_are_a_configuration(tmp_path):
    head = (
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--mode', choices=['dot', 'sum'])\n"
    )
    init = """
    def __init__(self):
        super().__init__()
        assert args.mode == "dot"
        dropout, d_model, num_heads = 0.1, args.hidden, args.heads
"""
    tree(tmp_path, attention=configured(head + "args = parser.parse_args()", init))
    assert is_right(tmp_path / "attention.py")


# Constructors, calls and classes.

CALL = "def forward(self, query, key, value, mask=None):"
FORMS = {
    "lazy": ("nn.Linear(d_model, d_model", "nn.LazyLinear(d_model"),
    "keys of kwargs": (
        "def __init__(self, d_model, num_heads, dropout=0.1):",
        "def __init__(self, **kw):\n        d_model, num_heads, dropout = kw['dim'], kw.pop('heads'), kw.get('p', 0.0)",
    ),
    "tuple": (CALL, "def forward(self, inputs, mask=None):\n        value, key, query = inputs"),
    "star": (CALL, "def forward(self, *inputs, mask=None):\n        query, key, value = inputs"),
    "dictionary": (
        CALL,
        "def forward(self, inputs, mask=None):\n        query, key, value = inputs['q'], inputs['k'], inputs['v']",
    ),
    "positional": (CALL, "def forward(self, value, query, key, /, mask=None):"),
}


@pytest.mark.parametrize("form", FORMS)
def test_unusual_constructors_and_calls_are_understood(form, tmp_path):
    old, new = FORMS[form]
    assert old in RIGHT
    tree(tmp_path, attention=RIGHT.replace(old, new))
    assert is_right(tmp_path / "attention.py")


OTHERS = {
    "numpy": "import numpy as np\nclass MultiHeadAttention:\n    def __init__(self, d_model, num_heads):\n"
    "        self.w = np.eye(d_model)\n    def softmax(self, x):\n        return np.exp(x)\n"
    "    def forward(self, x):\n        return self.softmax(x @ self.w)\n",
    "flax": "import flax.linen as fnn\nimport jax.numpy as jnp\nclass MultiHeadAttention(fnn.Module):\n"
    "    num_heads: int = 8\n    def __call__(self, x):\n        return jnp.einsum('bd,cd->bc', fnn.softmax(x), x)\n",
}
ATTENDING = """
import torch
from torch import nn
import torch.nn.functional as F
class Norm(nn.Module):
    def __init__(self, dim):
        super().__init__()
class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(dim, 3 * dim)
    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))
class GPT(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.layer = Layer(dim, heads)
    def forward(self, x):
        return self.layer(x)
"""


@pytest.mark.parametrize("other", OTHERS)
def test_the_class_of_another_library_is_never_the_candidate(other, tmp_path):
    tree(tmp_path, attention=OTHERS[other] + ATTENDING.replace("Layer", "TorchAttention"))
    assert next(name for name, _ in candidates(load(tmp_path / "attention.py"))) == "TorchAttention"


def test_the_class_that_attends_is_found_where_none_is_called_attention(tmp_path):
    tree(tmp_path, attention=ATTENDING)
    assert next(name for name, _ in candidates(load(tmp_path / "attention.py"))) == "Layer"


def test_a_file_of_the_book_that_is_missing_is_replaced_by_an_import_of_ours(tmp_path):
    wrapper = (
        "import torch\nfrom torch import nn\nfrom casual_attention import CausalAttention\n\n\n"
        "class MultiHeadedAttentionWrapper(nn.Module):\n"
        "    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):\n"
        "        super().__init__()\n"
        "        made = [CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads)]\n"
        "        self.heads = nn.ModuleList(made)\n\n"
        "    def forward(self, x):\n        return torch.cat([h(x) for h in self.heads], dim=-1)\n"
    )
    path = tmp_path / "wrapper.py"
    path.write_text(wrapper)
    line = "from headwise.textbook import CausalAttention"
    doubt = judge_file(path, thorough=False).doubts[0]
    assert doubt.endswith(f"this line replaces the import: {line}")
    path.write_text(wrapper.replace("from casual_attention import CausalAttention", line))
    assert judge_file(path, thorough=False).doubts == []


def test_sizes_from_a_file_that_is_not_here_are_ours_to_choose(tmp_path):
    settings = "with open('sizes.yml') as f:\n    sizes = f.read()\n\n"
    settings += "WIDTH = sizes['width']\nHEADS = sizes['heads']\n\n\nclass"
    source = RIGHT.replace("class", settings, 1).replace("d_model, num_heads,", "d_model=WIDTH, num_heads=HEADS,")
    path = tmp_path / "attention.py"
    path.write_text(source)
    assert is_right(path)
    path.write_text(source.replace("math.sqrt(self.head_dim)", "math.sqrt(query.size(-1))"))
    assert judge_file(path, thorough=False).cause == "scale-d_model"
