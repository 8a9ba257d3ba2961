"""How tokens are displayed: every character visible, none that moves the cursor, and of known width.

Terminal, notebook and plots call these functions. The page's script follows the same table, which it gets from here.
"""

import functools
import unicodedata
from collections.abc import Sequence
from typing import Any

SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅"}
JOINERS = "\u200c\u200d"  # shown as they are between letters and signs that they join, such as the parts of an emoji
PARTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"  # digits that say which token of a character that takes several
HIDDEN = ("C", "Z")  # Unicode categories (control and format characters, separators) written as \x and a number


def page_rules() -> dict[str, Any]:
    """The table for the page's script."""
    return {"signs": SIGNS, "hidden": HIDDEN, "joiners": JOINERS, "parts": PARTS}


def labels(tokens: Sequence[str], starts: Sequence[int] | None) -> list[str]:
    """The tokens as labels: those that make up one character are numbered.

    >>> labels(["a", "東", "東", "東"], [0, 1, 1, 1])
    ['a', '東¹', '東²', '東³']
    """
    if starts is None:
        return list(tokens)
    several = {start for place, start in enumerate(starts) if start != place}
    numbers = (_part(1 + place - start) if start in several else "" for place, start in enumerate(starts))
    return [token + number for token, number in zip(tokens, numbers, strict=True)]


def _part(number: int) -> str:
    return "".join(PARTS[int(digit)] for digit in str(number))


def shown(token: str) -> str:
    """A token as one visible word, without the spaces around it; whitespace and control characters become signs.

    >>> shown(" sea"), shown("\\n"), shown("a\\x1b")
    ('sea', '⏎', 'a\\\\x1b')
    """
    return readable(token.strip(" ") or token).replace(" ", SIGNS[" "]) or SIGNS[""]


def readable(text: str) -> str:
    """A text with every character visible but its spaces, and none that moves the cursor.

    >>> readable("the sea\\n")
    'the sea⏎'
    """
    near = zip(" " + text, text, text[1:] + " ", strict=False)
    keeps = [letter == " " or _joins(before, letter, after) for before, letter, after in near]
    return "".join(letter if kept else _visible(letter) for letter, kept in zip(text, keeps, strict=True))


def _joins(before: str, letter: str, after: str) -> bool:
    """Whether a joiner stands between two characters that it can join."""
    return letter in JOINERS and all(unicodedata.category(near) in ("So", "Sk", "Lo", "Mn") for near in (before, after))


@functools.cache
def _visible(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    return f"\\x{ord(letter):02x}" if unicodedata.category(letter)[0] in HIDDEN else letter


def wide(text: str) -> int:
    """How many columns a text takes in a terminal; what a joiner joins takes the room of one character."""
    return sum(0 if before == "\u200d" else _columns(letter) for before, letter in zip(" " + text, text, strict=False))


@functools.cache
def _columns(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Me", "Mn", "Cf"):
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
