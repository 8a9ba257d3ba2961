"""The course in other places: docs/course.md, the HTML page, the notebook and the card say what the exercises say."""

import html.parser
import json
import re
from pathlib import Path

import pytest

from headwise.cli import main
from headwise.learn.course import EXERCISES, card, structure
from headwise.learn.course.notebooks import course_notebook
from headwise.learn.course.page import course_page
from headwise.view.tokens import wide

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_of_the_documents_is_that_of_the_course():
    import course_document

    text = (DOCS / "course.md").read_text(encoding="utf-8")
    assert text == course_document.page(text), "run: python docs/tools/course_document.py"


class Tags(html.parser.HTMLParser):
    """Checks that every tag is closed in order."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_html_page_is_whole_and_needs_nothing_else(tmp_path, capsys):
    page = course_page(EXERCISES)
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    assert not re.search(r"https?:|src=|@import|<script|<link", page)
    assert page.count("A model answer") == len(EXERCISES)
    path = tmp_path / "course.html"
    assert main(["course", "--html", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == page
    assert "wrote" in capsys.readouterr().out


def test_the_solved_notebook_grades_itself_right(capsys, monkeypatch):
    from headwise.learn.course import gpt

    monkeypatch.setattr(gpt, "STEPS", 60)
    monkeypatch.setattr(gpt, "PAIRS", 3.2)
    cells = course_notebook(EXERCISES, solved=True)["cells"]
    assert json.loads(json.dumps(cells)) == cells
    space = {"__name__": "notebook"}
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and "%pip" not in source:
            exec(compile(source, "cell", "exec"), space)  # noqa: S102
    out = capsys.readouterr().out.splitlines()
    assert len(out) == len(EXERCISES)
    assert all(line.startswith("Right: ") for line in out), out


@pytest.mark.parametrize("sizes", [(768, 12), (512, 8)])
def test_the_card_fits_into_eighty_columns(sizes):
    assert max(map(wide, card(*sizes).splitlines())) <= 80
    assert "┼─ concat" in structure(*sizes)
