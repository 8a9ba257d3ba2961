"""Every row of docs/documents.md runs and shows what it says."""

import ast
import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest

from headwise.cli import main

pytest.importorskip("tokenizers")
pytest.importorskip("rich")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| `(.+)` \| (.+?) \|$", PAGE.partition("## Three trials")[0], re.MULTILINE)
MINIMAL = """def forward(self, x):
    b, n, _ = x.shape
    q, k, v = self.W_q(x), self.W_k(x), self.W_v(x)
    q = q.view(b, n, self.h, self.d).transpose(1, 2)
    k = k.view(b, n, self.h, self.d).transpose(1, 2)
    v = v.view(b, n, self.h, self.d).transpose(1, 2)
    scores = q @ k.transpose(-2, -1) / self.d**0.5
    weights = scores.masked_fill(self.mask[:n, :n].bool(), -torch.inf).softmax(-1)
    return self.proj((weights @ v).transpose(1, 2).contiguous().view(b, n, self.d_out))
"""
shown: dict[str, str] = {}  # what a command printed, because several rows point at the same one


@pytest.fixture(scope="module")
def names():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    space: dict = {}
    exec(compile(block, "documents.md", "exec"), space)  # noqa: S102
    return space


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("documents")
    shutil.copytree(ROOT / "examples", made / "examples")
    (made / "minimal.py").write_text(MINIMAL)
    return made


def printed(code, names):
    """What a command prints, or the value of a line of Python and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        if code.startswith("headwise "):
            main(shlex.split(code)[1:])
            return " ".join(out.getvalue().split())
        *before, last = ast.parse(code).body
        exec(compile(ast.Module(before, []), "row", "exec"), names)  # noqa: S102
        value = eval(compile(ast.Expression(last.value), "row", "eval"), names)  # noqa: S307
    return f"{out.getvalue()}{value}"


@pytest.mark.parametrize(("item", "code", "words"), ROWS, ids=[f"{n}" for n in range(len(ROWS))])
def test_a_row_shows_what_it_says(item, code, words, names, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    if code not in shown:
        shown[code] = printed(code, names)
    assert words in shown[code], item


def test_no_row_shows_only_that_something_was_printed():
    says_nothing = re.compile(r"[^\w■]*|head|True|False")
    assert [words for _, _, words in ROWS if says_nothing.fullmatch(words)] == []


def test_every_document_has_its_rows():
    sections = re.split(r"^## ", PAGE.partition("## Three trials")[0], flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "A course's assignment",
        "A book's section",
        "A homework guide",
        "An interview question",
        "A handbook's chapter",
    ]
    assert all(section.count("\n| ") >= 14 for section in sections)
    assert len(ROWS) == sum(section.count("\n| ") for section in sections) - 5, "no row is left out"
