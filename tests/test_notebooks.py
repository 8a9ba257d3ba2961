"""The notebooks in examples/ are those of their source, and every cell runs in a Jupyter kernel."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("rich")
FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
WANTED = {
    "course": ["In [4], line 18: scores = Q @ K.transpose", "WHAT EVERY HEAD READS", "None of five steps is right"],
    "book": ["┼─ concat", "textbook list", "RIGHT"],
    "homework": ["CHECKLIST", "(4, 12, 100, 100)", "RIGHT"],
    "interview": ["Why several heads instead", "RIGHT", "1,050,624", "one thing is wrong"],
    "handbook": ["CONCATENATED", "without head 4.2", "gpt2-xl"],
    "exercises": ['None of four steps is right; the next is "the scores"'],
}


def run(path, folder, monkeypatch):
    """What a kernel of this Python prints for the cells of a notebook."""
    pytest.importorskip("ipykernel")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parents[1] / "src"))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in shown)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path, tmp_path, monkeypatch):
    out = run(path, tmp_path, monkeypatch)
    for words in WANTED[path.stem]:
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
