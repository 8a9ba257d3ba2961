"""A survey as text and as a page: every head, what it does, and the passages that show it."""

import re

import pytest

from headwise import load_builtin, survey
from headwise.cli import main
from headwise.study.survey.passages import GAP, Passage
from headwise.view.survey import drawn_survey, page, quoted, told
from headwise.view.tokens import wide
from headwise.weights import Statistic

TEXT = "The captain looked at the sea, and the sea looked at the captain. <b>Then</b> the captain laughed. " * 3


@pytest.fixture(scope="module")
def found():
    squares = Statistic(lambda pair: pair.weight**2)
    return survey(load_builtin(), texts=[TEXT], context=64, importance=True, statistics={"squares": squares})


@pytest.mark.parametrize("width", [40, 57, 80, 101, 160])
def test_no_line_is_wider_than_the_terminal(found, width):
    lines = drawn_survey(found, width, every_head=True).splitlines()
    assert max(map(wide, lines)) <= width
    assert "…" not in "".join(lines[:3]), "the sentence is broken into lines, not cut"


def test_the_table_explains_its_numbers_and_says_what_did_not_fit(found):
    narrow, whole = drawn_survey(found, 80), drawn_survey(found, 160)
    assert "means ± standard deviation between windows" in narrow
    assert re.search(r"a wider terminal, --json and --html also show [\w ,\n]*distance", narrow)
    assert "a wider terminal" not in whole
    head = next(line for line in whole.splitlines() if line.startswith(" head"))
    assert head.split()[4:] == [
        "squares",
        "importance",
        "effect",
        *["sink", "previous", "induction", "entropy", "peak", "distance"],
    ]


def test_every_head_of_the_table_has_its_strongest_passage(found):
    text = drawn_survey(found, 120)
    best = found.evidence(4, 2)[0]
    assert f"  4.2  {best.score:.2f}  {quoted(best, 107)}" in text
    assert f"{{{best.words[best.marks[1]]}}}" in text
    assert f"[{best.words[best.marks[0]]}]" in text


def test_a_long_part_is_broken_between_words():
    assert told(["one two", "three four five", "six"], 9) == ["one two", "three", "four five", "six"]
    assert told([], 9) == []


def test_a_passage_is_cut_around_its_query_and_its_key():
    words = tuple(f" w{i}" for i in range(20))
    passage = Passage(1.0, 1.0, "file", None, 0, 0, 9, 8, words, tuple(range(20)), (9, 8))
    assert quoted(passage, 24) == "w6 w7{ w8}[ w9] w10 w11"
    assert quoted(passage, 13) == "{ w8}[ w9]"


def test_a_query_far_from_its_key_keeps_the_text_around_both():
    words = tuple(f" w{i}" for i in range(40))
    passage = Passage(1.0, 1.0, "file", None, 0, 0, 37, 2, words, tuple(range(40)), (37, 2))
    assert quoted(passage, 34) == "w1{ w2} w3 … w35 w36[ w37] w38 w39"
    assert quoted(passage, 13) == "{ w2} … [ w…]"  # the marks stay, whatever the room
    two = Passage(*passage[:8], (*words[:5], GAP, *words[35:]), (*range(5), -1, *range(35, 40)), (8, 2))
    assert quoted(two, 50) == "w0 w1{ w2} w3 w4 … w35 w36[ w37] w38 w39", "a gap that is there is not doubled"


def test_wide_words_of_a_passage_are_counted_as_two_columns():
    words = tuple("東京は日本の首都です")
    passage = Passage(1.0, 1.0, "file", None, 0, 0, 9, 0, words, tuple(range(10)), (9, 0))
    for room in range(11, 30):
        text = quoted(passage, room)
        assert wide(text) <= room
        assert {"{", "[", "]"} <= set(text)


def test_the_page_shows_passages_as_text(found):
    html = page(found)
    section = html[html.index('<section id="4.2">') :]
    section = section[: section.index("</section>")]
    assert "attends to the previous token" in section
    assert "passages ranked by: share on the previous token" in section
    assert "ranked by: squares" in section
    texts = re.findall(r"<bdi>(.*?)</bdi>", html)
    assert any("&lt;" in text for text in texts)
    for text in texts:
        assert set(re.findall(r"</?(\w+)", text)) <= {"mark", "b"}
        assert text.count('<b class="frame">') == text.count("<mark>") == 1, "one token attends, one is attended to"


def test_the_page_names_every_number_it_shows(found):
    html = page(found)
    shown = re.findall(r"<th>([a-z ]+)</th>", html)
    assert {"squares", "importance", "effect", "sink", "distance"} <= set(shown)
    about = html[html.index('<ul class="about soft">') :]
    for name in set(shown) - {"head"}:
        assert f"<b>{name}</b>" in about[: about.index("</ul>")]


def test_the_page_says_what_is_shown():
    model = load_builtin()
    weights, values, shares = (
        page(survey(model, texts=[TEXT], context=64, by=by)) for by in ("weight", "value", "contribution")
    )
    assert "attention weights, which are not importance" in weights
    assert "weights by value: each attention weight times the norm of what its value writes" in values
    assert "contributions: the share of each token in what the head writes" in shares
    assert "by distance" in weights
    assert "by distance" not in shares, "contributions have no distances"
    assert "Head by head" not in page(survey(model, texts=[TEXT], context=64, evidence=0))


def test_the_verb_writes_them(tmp_path, capsys):
    corpus, out = tmp_path / "corpus.txt", tmp_path / "survey.html"
    corpus.write_text(TEXT, encoding="utf-8")
    assert main(["survey", str(corpus), "--context", "64", "--html", str(out)]) == 0
    assert "<h2>Head by head</h2>" in out.read_text(encoding="utf-8")
    capsys.readouterr()
