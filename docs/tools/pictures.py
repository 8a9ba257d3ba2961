"""Draws SVG pictures for the documentation: matrices of numbers, and maps of attention weights.

The background is white, so that the pictures look the same on light and dark pages.
"""

import base64
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from torch import Tensor

from headwise.view.color import png

CELL, LINE, GAP = (38, 20), 18, 14  # width and height of a number, height of a caption, margin
INK, SOFT, GRID = "#1c2430", "#5b6675", "#d9d4c7"
HUES = {"head 0": "#0b6e99", "head 1": "#c46a00", "all": "#5c6b46"}
RAMP = ((255, 255, 255), (158, 202, 219), (11, 110, 153), (4, 38, 56))  # from weight 0 to weight 1


def _between(shade: float) -> tuple[int, int, int]:
    """The color of the ramp at a position from 0 to 1."""
    place, share = divmod(shade * (len(RAMP) - 1), 1)
    low, high = RAMP[int(place)], RAMP[min(int(place) + 1, len(RAMP) - 1)]
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return red, green, blue


PALETTE = [_between(shade / 255) for shade in range(256)]


class Matrix(NamedTuple):
    """A matrix with a caption and a hue for every column or row."""

    caption: str
    rows: list[list[float]]
    hues: Sequence[str]
    by_row: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        return max(CELL[0] * len(self.rows[0]), 8 * len(self.caption)), LINE + CELL[1] * len(self.rows)


def svg(width: float, height: float, body: str, title: str) -> str:
    """A complete SVG picture."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12">'
        f"<title>{escape(title)}</title>"
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#ffffff"/>{body}</svg>\n'
    )


def text(x: float, y: float, words: str, color: str = INK, anchor: str = "start", size: int = 12) -> str:
    """A line of text."""
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'


def flow(before: Sequence[Matrix], after: Sequence[Matrix], title: str) -> str:
    """Matrices, an arrow, and the matrices that result."""
    (wide, tall), (wide_after, tall_after) = (_stacked(part) for part in (before, after))
    height = max(tall, tall_after)
    arrow = GAP + wide + 34
    body = _column(before, GAP, GAP + (height - tall) / 2) + _column(after, arrow + 34, GAP + (height - tall_after) / 2)
    body += text(arrow - 8, GAP + height / 2 + 6, "→", SOFT, size=22)
    return svg(arrow + 34 + wide_after + GAP, height + 2 * GAP, body, title)


def _stacked(matrices: Sequence[Matrix]) -> tuple[int, int]:
    return max(m.size[0] for m in matrices), sum(m.size[1] + GAP for m in matrices) - GAP


def _column(matrices: Sequence[Matrix], x: float, y: float) -> str:
    body = ""
    for matrix in matrices:
        body += _matrix(matrix, x, y)
        y += matrix.size[1] + GAP
    return body


def _matrix(matrix: Matrix, x: float, y: float) -> str:
    body = text(x, y + 12, matrix.caption, SOFT)
    largest = max((abs(n) for row in matrix.rows for n in row if math.isfinite(n)), default=1.0) or 1.0
    width, height = CELL
    for i, row in enumerate(matrix.rows):
        for j, n in enumerate(row):
            left, top = x + j * width, y + LINE + i * height
            shade = 0.0 if not math.isfinite(n) else 0.6 * abs(n) / largest
            hue = matrix.hues[i if matrix.by_row else j]
            body += (
                f'<rect x="{left:g}" y="{top:g}" width="{width}" height="{height}" fill="{hue}" '
                f'fill-opacity="{shade:.2f}" stroke="{GRID}"/>'
            )
            words, color = (f"{n:z.2f}".replace("-", "−"), INK) if math.isfinite(n) else ("−inf", SOFT)
            body += text(left + width - 4, top + 14, words, color, "end", 11)
    return body


def maps(pictures: Sequence[tuple[str, Tensor]], columns: int, side: int, title: str, *, labels: int = 11) -> str:
    """Maps of weights side by side, each with a caption.

    Darker means more weight. Shades encode the square root of the weight, so that small weights stay visible.
    """
    rows = -(-len(pictures) // columns)
    step_x, step_y = side + GAP, side + LINE + 6
    body = ""
    for place, (caption, picture) in enumerate(pictures):
        x, y = GAP + place % columns * step_x, GAP + place // columns * step_y
        body += text(x, y + 10, caption, INK, size=labels)
        body += (
            f'<image x="{x}" y="{y + LINE}" width="{side}" height="{side}" style="image-rendering: pixelated" '
            f'href="{address(picture)}"/>'
            f'<rect x="{x}" y="{y + LINE}" width="{side}" height="{side}" fill="none" stroke="{GRID}"/>'
        )
    return svg(GAP + columns * step_x, GAP + rows * step_y, body, title)


def worded(heads: Sequence[tuple[str, Tensor]], words: Sequence[str], columns: int, title: str) -> str:
    """Matrices of weights with words on rows and columns and the numbers in the cells; zero is the background."""
    side, beside = 26, 8 + 7 * max(map(len, words))
    wide, tall = beside + side * len(words) + 2 * GAP, beside + LINE + side * len(words) + GAP
    body = ""
    for place, (caption, weights) in enumerate(heads):
        x, y = GAP + place % columns * wide, GAP + place // columns * tall
        body += text(x, y + 12, caption, INK, size=13)
        left, top = x + beside, y + LINE + beside - 8
        for i, word in enumerate(words):
            across = left + i * side + side / 2 + 4
            body += text(left - 6, top + i * side + 17, word, SOFT, "end", 11)
            body += (
                f'<g transform="translate({across:g} {top - 6:g}) rotate(-90)">{text(0, 0, word, SOFT, size=11)}</g>'
            )
        body += _cells(weights, left, top, side)
    rows = -(-len(heads) // columns)
    return svg(GAP + columns * wide, GAP + rows * tall, body, title)


def _cells(weights: Tensor, left: float, top: float, side: int) -> str:
    body = ""
    for i, row in enumerate(weights.tolist()):
        for j, weight in enumerate(row[: i + 1]):
            x, y, shade = left + j * side, top + i * side, max(weight, 0.0) ** 0.5
            body += (
                f'<rect x="{x:g}" y="{y:g}" width="{side}" height="{side}" fill="{HUES["head 0"]}" '
                f'fill-opacity="{shade:.2f}" stroke="{GRID}"/>'
            )
            color = "#ffffff" if shade > 0.6 else INK
            body += text(x + side / 2, y + 17, f"{weight:.2f}".removeprefix("0"), color, "middle", 10)
    return body


def address(picture: Tensor) -> str:
    """A picture (rows, cols) of numbers from 0 to 1 as a data URL."""
    shades = (picture.double().clamp(0, 1).sqrt() * 255).round().int()
    return "data:image/png;base64," + base64.b64encode(png(shades, PALETTE)).decode()
