"""Passages that show what a head is named for: the strongest queries of its own kind, quoted from the corpus."""

import re

import pytest

from headwise import load_builtin, survey
from headwise.cli import main
from headwise.view.evidence import passages
from headwise.view.static_page import page

TEXT = "The captain looked at the sea, and the sea looked at the captain. <b>Then</b> the captain laughed. " * 3


@pytest.fixture(scope="module")
def quoted():
    model = load_builtin()
    found = survey(model, texts=[TEXT], context=64)
    windows = [model.tokens(TEXT)[0, :61].tolist(), model.tokens("The captain looked. " * 4)[0].tolist()]
    return found, passages(found, model, windows)


def test_a_previous_token_head_is_quoted_at_its_strongest_pairs(quoted):
    found, evidence = quoted
    place = next(head.place for head in found.placed if head.summary.kind == "previous-token")
    shares = [passage.share for passage in evidence[place]]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5
    best = evidence[place][0]
    assert best.key == best.query - 1
    assert "".join(best.words).strip()


def test_only_heads_with_a_name_are_quoted(quoted):
    found, evidence = quoted
    named = {head.place for head in found.placed if head.summary.kind not in ("mixed", "first-token sink")}
    assert set(evidence) <= named
    assert evidence


def test_the_page_shows_passages_as_text(quoted):
    found, evidence = quoted
    html = page(found, evidence)
    place = next(iter(evidence))
    assert f'id="passages-{place}"' in html
    section = html[html.index("<h2>Passages</h2>") :]
    assert "&lt;" in section
    for text in re.findall(r"<bdi>(.*?)</bdi>", section):
        assert set(re.findall(r"</?(\w+)", text)) <= {"mark", "b"}
        assert text.count("<b>") + text.count("<mark>") <= 2, "one token attends, one is attended to"
    assert "Passages" not in page(found)


def test_the_verb_writes_them(tmp_path, capsys):
    corpus, out = tmp_path / "corpus.txt", tmp_path / "survey.html"
    corpus.write_text(TEXT, encoding="utf-8")
    assert main(["survey", str(corpus), "--context", "64", "--html", str(out)]) == 0
    assert "<h2>Passages</h2>" in out.read_text(encoding="utf-8")
    capsys.readouterr()
