"""Tokens as text on a screen: nothing invisible, nothing that moves the cursor, and as wide as is counted."""

import functools
import unicodedata

SIGNS = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅"}


def shown(token: str) -> str:
    """A token as one visible word: its leading space left out, spaces, line ends and control characters as signs."""
    text = token.strip(" ") or token
    return "".join(map(_visible, text)) or SIGNS[""]


@functools.cache
def _visible(letter: str) -> str:
    if letter in SIGNS:
        return SIGNS[letter]
    return letter if letter.isprintable() else f"\\x{ord(letter):02x}"


def wide(text: str) -> int:
    """How many columns a text takes."""
    return sum(map(_columns, text))


@functools.cache
def _columns(letter: str) -> int:
    if unicodedata.combining(letter) or unicodedata.category(letter) in ("Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def cut(text: str, most: int) -> str:
    """A text of at most so many columns; what is cut off shows as …"""
    if wide(text) <= most:
        return text
    kept, used = [], 0
    for letter in text:
        used += _columns(letter)
        if used > most - 1:
            break
        kept.append(letter)
    return "".join(kept) + "…" if most > 0 else ""


def fill(text: str, size: int, *, right: bool = False) -> str:
    """A text of exactly so many columns."""
    text = cut(text, size)
    space = " " * (size - wide(text))
    return space + text if right else text + space
