import html.parser
import re

import pytest

from headwise.learn import configs, forms
from headwise.learn.page import steps_page
from headwise.learn.steps import Setting, trace


def page_of(setting):
    return steps_page(setting, trace(setting), setting.key_operations())


class Tags(html.parser.HTMLParser):
    """Checks that every tag is closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


PAGES = {
    "small": Setting.of(causal=True),
    "cross": Setting.of(forms.find("interview"), seq=3, keys=5),
    "list": Setting.of(forms.find("list"), num_heads=3),
    "model": Setting.of(config=configs.find("gemma-3-1b"), seq=9),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_and_needs_nothing_else(name):
    page = page_of(PAGES[name])
    tags = Tags()
    tags.feed(page)
    tags.close()
    assert tags.open == []
    assert page.count("<li>") == 10
    assert not re.search(r"https?:|src=|@import|<script|<link", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_page_shows_numbers_where_they_fit_and_hidden_scores_as_minus_infinity():
    small, large = page_of(PAGES["small"]), page_of(PAGES["model"])
    assert small.count(">−inf<") == 12  # six of four tokens, masked and scaled
    assert '<td class="n"' in small
    assert '<td class="n"' not in large
    assert "(1, 4, 9, 256)" in large


def test_a_cell_has_more_color_the_further_it_is_from_zero_and_a_hidden_score_has_none():
    page = page_of(PAGES["small"])
    query = page[page.index("<caption>query") : page.index("<caption>key")]
    cells = re.findall(r"rgba\(var\(--(\w+)\), ([\d.]+)\)\">(−?)([\d.]+)<", query)
    assert len(cells) == 4 * 8
    assert all(color == ("heat" if sign else "plus") for color, _, sign, _ in cells)
    inks = [float(ink) for _, ink, *_ in sorted(cells, key=lambda cell: float(cell[3]))]
    assert inks == sorted(inks)
    assert 'rgba(var(--heat), 0.00)">−inf<' in page
    most = max(abs(float(number)) for *_, number in cells)
    assert query.startswith(f"<caption>query, color from −{most:.2f} to {most:.2f}</caption>")
    assert re.search(r"<caption>weights?, color from 0 to \d\.\d\d</caption>", page)
    assert "print-color-adjust: exact" in page


def test_page_says_what_a_form_writes_differently_and_a_model_does_besides():
    assert "In this form: torch.cat along the last axis" in page_of(PAGES["list"])
    assert "Also: queries and keys are normalized" in page_of(PAGES["model"])


def test_page_escapes_what_it_shows():
    form = forms.FORMS["course"]
    odd = type(form)(**{**form.__dict__, "title": "<b>bold</b> & more"})
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; more" in page_of(Setting.of(odd))
