"""How tokens are displayed: every character visible, none that moves the cursor, and of known width.

Terminal, notebook and plots call these functions. The page's script follows the same table, which it gets from here.
"""

import functools
import unicodedata
from typing import Any

SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅"}
HIDDEN = ("C", "Z")  # Unicode categories (control and format characters, separators) written as \x and a number


def page_rules() -> dict[str, Any]:
    """The table for the page's script."""
    return {"signs": SIGNS, "hidden": HIDDEN}


def shown(token: str) -> str:
    """A token as one visible word, without the spaces around it; whitespace and control characters become signs.

    >>> shown(" sea"), shown("\\n"), shown("a\\x1b")
    ('sea', '⏎', 'a\\\\x1b')
    """
    text = token.strip(" ") or token
    return "".join(map(_visible, text)) or SIGNS[""]


@functools.cache
def _visible(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    return f"\\x{ord(letter):02x}" if unicodedata.category(letter)[0] in HIDDEN else letter


def wide(text: str) -> int:
    """How many columns a text takes in a terminal."""
    return sum(map(_columns, text))


@functools.cache
def _columns(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def cut(text: str, most: int) -> str:
    """The text in at most `most` columns; … stands for the rest."""
    if wide(text) <= most:
        return text
    kept, used = [], 0
    for letter in text:
        used += _columns(letter)
        if used > most - 1:
            break
        kept.append(letter)
    return "".join(kept) + "…" if most > 0 else ""


def fill(text: str, size: int) -> str:
    """The text in exactly `size` columns."""
    text = cut(text, size)
    return text + " " * (size - wide(text))
