"""Turns what a program prints in a terminal, with its colors, into a page of HTML."""

import re
from html import escape

from headwise.view.color import RGB

BACKGROUND, FOREGROUND = "#171b21", "#e9e6e0"
PAGE = """<!doctype html><meta charset="utf-8"><style>body {{ margin: 0; background: {back}; color: {front}; }}
pre {{ margin: 0; padding: 14px 18px; display: inline-block; font: 15px/18px "DejaVu Sans Mono", monospace; }}</style>
<pre>{lines}</pre>"""
CODES = re.compile(r"\x1b\[([0-9;]*)m")


def html(text: str) -> str:
    """A page with the text in the colors that its escape codes ask for (24 bits, bold, faint, black and white)."""
    style: dict[str, str] = {}
    parts = []
    for place, part in enumerate(CODES.split(text)):
        if place % 2:
            style = changed(style, [int(code or 0) for code in part.split(";")])
        elif part:
            css = ";".join(f"{name}:{value}" for name, value in style.items())
            parts.append(f'<span style="{css}">{escape(part)}</span>')
    return PAGE.format(back=BACKGROUND, front=FOREGROUND, lines="".join(parts))


def changed(style: dict[str, str], codes: list[int]) -> dict[str, str]:
    """The style after these codes."""
    style = dict(style)
    while codes:
        code = codes.pop(0)
        if code == 0:
            style = {}
        elif code in (1, 2):
            style |= {"font-weight": "bold"} if code == 1 else {"opacity": "0.65"}
        elif code in (30, 97):
            style["color"] = "#000" if code == 30 else "#fff"
        elif code in (38, 48) and codes[:1] == [2]:
            color: RGB = (codes[1], codes[2], codes[3])
            style["color" if code == 38 else "background"] = f"rgb{color}"
            del codes[:4]
    return style
