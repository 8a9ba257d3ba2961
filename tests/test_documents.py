"""What the documents say is true: examples run, the README draws every room, every public name is documented."""

import ast
import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import headwise

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "headwise"
# A block may say that it cannot run here, and why, or that it needs a process and environment of its own.
BLOCK = re.compile(r"(?:<!-- (not run|in a process of its own): (.+?) -->\n)?```python\n(.*?)```", re.DOTALL)
PAGES = [path for path in sorted((ROOT / "docs").glob("*.md")) if "```python" in path.read_text(encoding="utf-8")]
MODULES = [m.name for m in pkgutil.walk_packages(headwise.__path__, "headwise.") if m.name != "headwise.__main__"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.failed == 0


def test_python_blocks_of_the_readme_run_in_order():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3  # one for each kind of reader
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)  # noqa: S102


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_the_docs_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for how, said, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if how == "in a process of its own":
            run_apart(block, tmp_path / "block.py", dict([said.split("=")]))
        elif how != "not run":
            exec(compile(block, page.name, "exec"), names)  # noqa: S102


def run_apart(block, path, environment):
    path.write_text(block, encoding="utf-8")
    subprocess.run([sys.executable, str(path)], env=os.environ | environment, check=True)


def test_explanation_in_the_documents_is_what_is_printed():
    text = (ROOT / "docs" / "layer.md").read_text()
    shown = re.findall(r"^# (path: .*|mask: .*|refused: .*)$", text, re.MULTILINE)
    layer = headwise.MultiHeadAttention(512, 8, num_kv_heads=2, causal=True, dropout=0.1).eval()
    torch = importlib.import_module("torch")
    assert str(headwise.explain(layer, torch.randn(1, 1000, 512))).splitlines() == shown


def test_the_readme_draws_every_room_and_fits_on_two_screens():
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"```text\nsrc/headwise/\n(.*?)```", text, re.DOTALL)[1]
    technical = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}
    there = {p.name + "/" * p.is_dir() for p in PACKAGE.iterdir() if p.name not in technical}
    assert {line.split()[0] for line in tree.splitlines()} == there
    assert len(there) <= 16
    assert text.count("\n") <= 130


def test_no_class_name_is_used_twice():
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    names = Counter(node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_speed_tables_are_those_of_the_results():
    readme_table = importlib.import_module("readme_table")
    assert readme_table.table() in (ROOT / "docs/performance.md").read_text()


def test_table_of_peers_in_the_readme_is_that_of_the_results():
    readme_table = importlib.import_module("readme_table")
    assert readme_table.peers_table() in (ROOT / "README.md").read_text()


def test_maps_table_is_that_of_the_results():
    readme_table = importlib.import_module("readme_table")
    assert readme_table.maps_table() in (ROOT / "docs/performance.md").read_text()


def test_options_table_is_that_of_the_results():
    readme_table = importlib.import_module("readme_table")
    assert readme_table.options_table() in (ROOT / "docs/performance.md").read_text()


@pytest.mark.parametrize("name", ["bench_table", "ladder_table", "looking_table"])
def test_tables_against_peers_are_those_of_the_results(name):
    readme_table = importlib.import_module("readme_table")
    assert getattr(readme_table, name)() in (ROOT / "docs/performance.md").read_text()


def test_every_result_against_peers_has_its_picture():
    readme_table = importlib.import_module("readme_table")
    assert readme_table.bench_results()
    assert [file for file in readme_table.bench_results() if not readme_table.picture(file).is_file()] == []


def test_serve_table_is_that_of_the_results():
    readme_table = importlib.import_module("readme_table")
    assert readme_table.serve_table() in (ROOT / "docs/serve.md").read_text()


def test_scaling_tables_are_those_of_the_script():
    scaling, page = importlib.import_module("scaling"), (ROOT / "docs/scaling.md").read_text()
    assert scaling.tables() in page
    assert scaling.memory_table() in page


def test_changelog_and_citation_name_the_version():
    assert f"## {headwise.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {headwise.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_importing_headwise_imports_nothing_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import headwise;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; print(sorted(new))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"triton", "numpy", "sympy"} & set(ast.literal_eval(out))
