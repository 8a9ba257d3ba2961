"""The notebooks in examples/ are those of their source, and every cell runs in order."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from headwise.check import check_cell
from headwise.cli import main

pytest.importorskip("tokenizers")
pytest.importorskip("rich")
FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))


class Shell:
    """As much of Jupyter as the notebooks use: cells, `!headwise`, `%load_ext`, `%pip` and `%%headwise_check`."""

    def __init__(self, folder):
        self.user_ns, self.folder, self.execution_count = {"__name__": "__main__"}, folder, 0

    def translated(self, line):
        indent, rest = re.fullmatch(r"(\s*)(.*)", line).groups()
        if rest.startswith("!headwise "):
            return f"{indent}_run({shlex.split(rest)[1:]!r})"
        return f"{indent}pass" if rest.startswith(("%pip ", "%load_ext headwise.check")) else line

    def run(self, cell):
        self.execution_count += 1
        self.user_ns["_run"] = main
        first, _, rest = cell.partition("\n")
        if first.startswith("%%headwise_check"):
            check_cell(self, first.removeprefix("%%headwise_check"), rest)
        else:
            self.run_cell(cell)

    def run_cell(self, cell):
        path = self.folder / f"cell_{self.execution_count}.py"
        text = "\n".join(self.translated(line) for line in cell.splitlines())
        path.write_text(text, encoding="utf-8")
        exec(compile(text, str(path), "exec"), self.user_ns)  # noqa: S102


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    shell = Shell(tmp_path)
    torch.manual_seed(0)
    for cell in cells:
        if cell["cell_type"] == "code":
            shell.run("".join(cell["source"]))
    out = capsys.readouterr().out
    wanted = {
        "course": ["code cell 4, line 18: scores = Q @ K.transpose", "WHAT EVERY HEAD READS", "None of five steps is"],
        "book": ["┼─ concat", "textbook list, 4 heads", "RIGHT"],
        "homework": ["CHECKLIST", "(4, 12, 100, 100)", "RIGHT"],
        "interview": ["RIGHT", "1,050,624", "one thing is wrong"],
        "handbook": ["CONCATENATED", "without head 4.2", "gpt2-xl"],
        "exercises": ["None of four steps is right; the next is the scores"],
    }
    for words in wanted[path.stem]:
        assert words in out


def test_the_first_code_cell_installs():
    for path in PATHS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        first = next("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        assert "%pip install" in first
        assert ".whl" in first


def test_notebooks_are_those_of_their_source():
    import notebooks

    made = notebooks.notebooks()
    assert {path.name for path in PATHS} == set(made)
    for path in PATHS:
        assert path.read_text(encoding="utf-8") == made[path.name], "run: python docs/tools/notebooks.py"
