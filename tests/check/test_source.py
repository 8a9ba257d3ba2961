"""Files are read before anything runs: magics, cells, blocks, broken pieces, and what needs no run to be answered."""

import json
import subprocess
import sys

import pytest

from headwise.check.code.source import parsed, read_source
from headwise.check.mistakes import Finding
from headwise.check.report import Report
from headwise.check.templates import write
from headwise.check.verdict import judge_file

RIGHT = write("separate")
CONTINUED = """import torch
print("%d of %d"
      % (1, 2))
text = '''
%matplotlib inline
!pip install nothing
'''
total = 7 \\
    % 4
"""


def source_of(folder, text, name="attention.py", asked=None):
    path = folder / name
    path.write_text(text)
    return read_source(path, asked)


def notebook(*cells, counts=()):
    numbers = dict(enumerate(counts))
    made = [{"cell_type": "code", "source": cell, "execution_count": numbers.get(i)} for i, cell in enumerate(cells)]
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "# words"}, *made], "nbformat": 4})


@pytest.mark.parametrize("name", ["attention.py", "book.ipynb", "page.md"])
def test_lines_that_start_with_a_percent_sign_inside_an_expression_or_a_string_stay(name, tmp_path):
    text = {"book.ipynb": notebook(CONTINUED), "page.md": f"```python\n{CONTINUED}```\n"}.get(name, CONTINUED)
    source = source_of(tmp_path, text, name)
    assert source.error is None
    assert "      % (1, 2))" in source.text
    assert "\n%matplotlib inline\n!pip install nothing\n'''" in source.text
    assert "\n    % 4" in source.text


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("%matplotlib inline", "pass"),
        ("!pip install torch", "pass"),
        ("!echo it's (", "pass"),
        ("%time x = f(", "pass"),
        ("?print", "pass"),
        ("torch.nn.Linear??", "pass"),
        ("pip install einops", "pass"),
        ("files = !ls", "files = None"),
        ("took = %timeit -o f()", "took = None"),
    ],
)
def test_a_magic_of_a_notebook_becomes_a_statement_that_does_nothing(line, becomes):
    text, tree, error = parsed(f"x = 1\nif x:\n    {line}\ny = 2\n")
    assert (tree is not None, error) == (True, None)
    assert text.split("\n")[2] == f"    {becomes}"


def test_a_magic_takes_the_lines_with_it_that_it_continues_on():
    text, tree, _ = parsed("!pip install a \\\n    b c\nx = 1\n")
    assert tree is not None
    assert text == "pass\n\nx = 1\n"


def test_an_exported_python_file_may_hold_magics(tmp_path):
    assert source_of(tmp_path, "%matplotlib inline\n!pip install x\n" + RIGHT).error is None


@pytest.mark.parametrize("line", ["% 3", "torch?", "pip install torch"])
def test_what_is_no_magic_in_a_python_file_is_a_syntax_error_there(line, tmp_path):
    source = source_of(tmp_path, f"import torch\n{line}\n")
    assert source.error is not None
    assert source.error.lineno == 2


def test_a_syntax_error_below_a_magic_keeps_its_line():
    _, tree, error = parsed("%matplotlib inline\nx = 1\ndef f(:\n    pass\n")
    assert tree is None
    assert error.lineno == 3


@pytest.mark.parametrize("magic", ["%%time", "%%capture out", "%%writefile attention.py", "%%headwise_check"])
def test_a_cell_below_a_cell_magic_is_python(magic, tmp_path):
    source = source_of(tmp_path, notebook(f"{magic}\nx = 1"), "book.ipynb")
    assert source.text == "\nx = 1"


@pytest.mark.parametrize("magic", ["%%bash", "%%html", "%%javascript", "%%sql"])
def test_a_cell_in_another_language_is_left_out(magic, tmp_path):
    source = source_of(tmp_path, notebook(f"{magic}\nclass Attention {{ x }}", "y = 1"), "book.ipynb")
    assert (source.error, source.text.strip(), source.left_out) == (None, "y = 1", [])


def test_the_older_format_of_notebooks_is_read(tmp_path):
    sheet = {"cells": [{"cell_type": "code", "input": ["x = 1\n", "y = 2"], "prompt_number": 4}]}
    source = source_of(tmp_path, json.dumps({"worksheets": [sheet]}), "book.ipynb")
    assert source.text == "x = 1\ny = 2"
    assert source.place(2) == "code cell 1 (In [4]), line 2"


def test_findings_in_a_notebook_name_cell_and_line(tmp_path):
    path = tmp_path / "book.ipynb"
    wrong = write("separate", "scale-d_model")
    path.write_text(notebook("import torch", "%pip install torch\n\nx = 1", "# mine\n" + wrong, counts=(1, 2, 9)))
    report = Report.from_dict(json.loads(json.dumps(judge_file(path, thorough=False).to_dict())))
    finding = report.findings[0]
    assert (finding.name, finding.cell, finding.execution_count) == ("scale-d_model", 3, 9)
    assert ("# mine\n" + wrong).splitlines()[finding.line - 1].strip() == finding.text
    assert f"code cell 3 (In [9]), line {finding.line}: {finding.text}" in str(report)
    right = write("separate")
    unfinished = right[: right.index("        scores = torch.matmul")] + "        raise NotImplementedError\n"
    path.write_text(notebook("import torch", "# mine\n" + unfinished))
    report = Report.from_dict(json.loads(json.dumps(judge_file(path, thorough=False).to_dict())))
    assert f"it ends at code cell 2, line {len(unfinished.splitlines()) + 1}" in str(report)


def test_a_cell_is_named_once_however_often_it_is_looked_up(tmp_path):
    source = source_of(tmp_path, notebook("x = 1\ny = 2", "z = 3"), "book.ipynb")
    finding = Finding("syntax", line=4)
    source.locate(finding)
    source.locate(finding)
    assert (finding.cell, finding.line, finding.place) == (2, 1, "code cell 2, line 1")


def test_a_broken_cell_does_not_stop_the_rest_and_is_mentioned(tmp_path):
    path = tmp_path / "book.ipynb"
    path.write_text(notebook("for i in range(3):\nprint(i)", RIGHT, "model = MultiHeadAttention(8"))
    report = judge_file(path, thorough=False)
    assert report.verdict == "right", report
    assert [place.partition(":")[0] for place in report.left_out] == ["code cell 1, line 2", "code cell 3, line 1"]
    assert "left out, not valid Python: code cell 1, line 2" in str(report)


def test_a_broken_cell_with_the_attention_is_a_syntax_error_with_cell_and_line(tmp_path):
    broken = RIGHT.replace("def forward(self,", "def forward(self")
    helper = "class DotProductAttention:\n    pass"
    report = source_of(tmp_path, notebook("x = 1", helper, broken), "book.ipynb").answer()
    assert (report.verdict, report.cause) == ("wrong", "syntax")
    assert (report.findings[0].cell, "def forward" in report.findings[0].text) == (3, True)


def test_a_broken_draft_of_a_class_that_another_cell_defines_is_left_out(tmp_path):
    draft = RIGHT.replace("def forward(self,", "def forward(self")
    source = source_of(tmp_path, notebook(draft, RIGHT), "book.ipynb")
    assert (source.error, source.answer()) == (None, None)


def test_the_class_asked_for_decides_which_broken_cell_matters(tmp_path):
    broken = "class MultiQueryAttention(\n    pass"
    assert source_of(tmp_path, notebook(RIGHT, broken), "book.ipynb", "MultiHeadAttention").error is None
    assert source_of(tmp_path, notebook(RIGHT, broken), "book.ipynb", "MultiQueryAttention").error is not None


def test_blocks_of_a_page_may_be_indented_and_keep_the_lines_of_the_page(tmp_path):
    page = "1. A step:\n\n   ```python\n   x = 1\n   y = 2\n   ```\n2. The next.\n\n~~~ {.python}\nz = 3\n~~~\n"
    source = source_of(tmp_path, page, "page.md")
    assert [source.line(number) for number in (4, 5, 10)] == ["x = 1", "y = 2", "z = 3"]


@pytest.mark.parametrize("name", ["attention.py", "attention.txt"])
def test_python_with_a_fenced_example_in_its_docstring_is_python(name, tmp_path):
    text = f'"""\n```python\nMultiHeadAttention(8, 2)\n```\n"""\n{RIGHT}'
    assert source_of(tmp_path, text, name).text == text


def test_prose_around_the_code_of_a_python_file_makes_it_a_page(tmp_path):
    source = source_of(tmp_path, f"Here is the class:\n```python\n{RIGHT}```\nAsk if it's unclear.\n")
    assert source.line(3) == RIGHT.splitlines()[0]
    assert source.answer() is None


def test_prose_without_code_holds_no_attention(tmp_path):
    report = source_of(tmp_path, "Attention is softmax of products: it's what heads do.\n", "page.md").answer()
    assert report.doubts == [
        "nothing in this file looks like attention; one step is judged together with those before it"
    ]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("book.ipynb", "[1, 2]", "book.ipynb is no notebook"),
        ("book.ipynb", "", "book.ipynb is no notebook"),
        ("a.py", "", "nothing in this file looks like attention"),
        ("a.py", "import torch\nprint(torch.ones(3).softmax(0))\n", "nothing in this file looks like attention"),
        ("a.py", "import torch\ndef train(model):\n    model.fit()\n", "nothing in this file looks like attention"),
        ("a.py", "import numpy as np\nclass Attention:\n    pass\n", "nothing in this file uses PyTorch"),
        ("a.py", "import jax\nfrom flax import linen as nn\nclass Attention(nn.Module):\n    pass\n", "uses PyTorch"),
    ],
)
def test_what_never_runs_is_answered_from_its_text(name, text, words, tmp_path):
    report = source_of(tmp_path, text, name).answer()
    assert report.verdict == "unknown"
    assert words in report.doubts[0]


def test_a_folder_and_a_file_that_may_not_be_read_are_answered(tmp_path):
    assert read_source(tmp_path).answer().doubts == [f"{tmp_path} is a folder; name a file in it"]
    assert "null bytes" in source_of(tmp_path, "x = 1\0").answer().findings[0].detail


@pytest.mark.parametrize(
    "text",
    [
        RIGHT,
        "def attention(q, k, v):\n    return (q @ k.mT).softmax(-1) @ v\n",
        "from common import *\nclass MHA(Module):\n    pass\n",
    ],
    ids=["class", "function without imports", "star import"],
)
def test_what_may_be_attention_has_to_run(text, tmp_path):
    assert source_of(tmp_path, text).answer() is None


WITHOUT_TORCH = """
import sys
from headwise.cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
heavy = ("torch", "numpy", "headwise.layer", "headwise.check.code.loader")
print(status, [name for name in heavy if name in sys.modules])
"""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["check", "{broken}"], 1),
        (["check", "{broken}", "--json"], 1),
        (["check", "nowhere.py"], 2),
        (["check", "{empty}"], 2),
        (["check", "--list"], 0),
        (["check", "--help"], 0),
        (["--help"], 0),
    ],
    ids=["syntax error", "as json", "no file", "empty", "list", "help of check", "help"],
)
def test_the_command_does_not_import_torch_where_nothing_runs(arguments, status, tmp_path):
    (tmp_path / "broken.py").write_text("import torch\nclass MultiHeadAttention(:\n")
    (tmp_path / "empty.py").write_text("")
    given = [a.format(broken=tmp_path / "broken.py", empty=tmp_path / "empty.py") for a in arguments]
    ended = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *given], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == f"{status} []"
    missing = "headwise check: there is no file nowhere.py. Check its name, and the folder that you are in."
    assert " ".join(ended.stderr.split()) == (missing if "nowhere.py" in arguments else "")


def test_the_command_runs_the_file_in_the_child_only(tmp_path):
    marked = RIGHT.replace(
        "    def __init__", "    import sys\n    sys.modules['numpy.run_here'] = sys\n\n    def __init__", 1
    )
    (tmp_path / "attention.py").write_text(marked)
    given = ["check", str(tmp_path / "attention.py")]
    script = WITHOUT_TORCH.replace('"numpy",', '"numpy.run_here",')
    ended = subprocess.run([sys.executable, "-c", script, *given], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "0 ['torch', 'headwise.check.code.loader']"
    assert [path.name for path in tmp_path.iterdir()] == ["attention.py"]
