"""How tokens are written, in the terminal, the notebook and plots; test_page compares the page with it."""

import sys
import unicodedata

import pytest

from headwise.view.tokens import HIDDEN, SIGNS, cut, fill, shown, wide


def test_every_unprintable_character_is_hidden():
    for letter in map(chr, range(sys.maxunicode + 1)):
        hidden = unicodedata.category(letter)[0] in HIDDEN
        assert hidden == (not letter.isprintable()) or letter == " "


def test_signs_are_printable():
    assert "".join(SIGNS.values()).isprintable()


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (" sea", "sea"), ("\n", "⏎"), ("  ", "␣␣"), ("\x1b[31m", "\\x1b[31m"), ("\u202e", "\\x202e"), ("", "∅"),
        ("\t", "⇥"), ("a\u200bb", "a\\x200bb"),
    ],
)  # fmt: skip
def test_tokens_are_shown_as_what_they_are(token, text):
    assert shown(token) == text


def test_wide_letters_are_counted_as_two():
    assert wide("漢字a") == 5
    assert wide("e\u0301") == 1
    assert cut("漢字漢字", 5) == "漢字…"
    assert fill("漢", 4) == "漢  "
    assert cut("abc", 0) == ""
