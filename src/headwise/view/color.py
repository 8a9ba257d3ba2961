"""The color maps of every picture (terminal, notebook, page and plots), terminal colors, and PNG files.

Attention weights use cividis, which gets brighter in steps that look equal, also to color-blind readers. A weight w is
drawn at √w along the color map, so that small weights stay visible. The page's script gets the tables from here.
"""

import base64
import functools
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

RGB = tuple[int, int, int]

CIVIDIS = (
    "00224e 002656 002a5f 002d68 003070 083370 163770 203a6f 273e6e 2e416d 34456c 3a486c 3f4c6c 444f6c 49536c 4e566c "
    "535a6d 575d6d 5c616e 60646f 656870 696b71 6d6f72 727274 767676 7a7a78 7e7d78 838179 888578 8d8878 928c78 969077 "
    "9b9476 a09875 a59c74 aaa073 afa471 b5a86f baac6d bfb06b c4b468 c9b965 cfbd62 d4c15f dac65b dfca57 e5cf52 ead34c "
    "f0d846 f6dd3f fce236 fee838"
)
# For differences and ratios, with the neutral value in the middle; one for light pages and one for dark ones.
DIVERGING_LIGHT = "08306b 2f6db3 8fb8de f3f1ec f5b266 cc6a12 7a3500"
DIVERGING_DARK = "9ecbff 4a8fdc 25528c 1b2027 8a4b10 e08a2e ffd09a"

LETTERS = " .:-=+*#%@"
# Cividis in the colors of simpler terminals, chosen by hand: the nearest ones would jump from hue to hue.
XTERM_256 = (17, 18, 238, 60, 102, 144, 185, 227)
ANSI_16 = (34, 90, 33, 93)  # blue, gray, brown, yellow: foreground codes; background codes are 10 higher
STEPS = 37  # shades of a 24-bit terminal and of a PNG
CURSOR = {24: "38;2;255;64;160", 8: "38;5;205", 4: "95"}  # pink, which is not in the color map
NOTHING = -1  # the level of a pixel without any weight: the background shows


@functools.cache
def table(stops: str = CIVIDIS, size: int = 256) -> tuple[RGB, ...]:
    """A color map as `size` colors, interpolated between its stops.

    >>> table()[0], table()[255]
    ((0, 34, 78), (254, 232, 56))
    """
    return tuple(_interpolated(stops, index / (size - 1)) for index in range(size))


def _interpolated(stops: str, position: float) -> RGB:
    points = [bytes.fromhex(stop) for stop in stops.split()]
    place = position * (len(points) - 1)
    low = min(int(place), len(points) - 2)
    red, green, blue = (round(a + (place - low) * (b - a)) for a, b in zip(points[low], points[low + 1], strict=True))
    return red, green, blue


def page_tables() -> dict[str, str]:
    """The color maps for the page's script: 256 colors each, six hexadecimal digits per color."""
    maps = {"share": CIVIDIS, "light": DIVERGING_LIGHT, "dark": DIVERGING_DARK}
    return {name: bytes(part for color in table(stops) for part in color).hex() for name, stops in maps.items()}


def position(weights: Tensor) -> Tensor:
    """Where weights lie on the color map, from 0 to 1: their square roots."""
    return weights.clamp(0, 1).sqrt()


class Palette:
    """Shades of weights from 0 to 1 in one terminal.

    Args:
        depth: bits of color: 24, 8 (256 colors), 4 (16 colors), or 0 for letters.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.shades = {24: STEPS, 8: len(XTERM_256), 4: len(ANSI_16), 0: len(LETTERS)}[depth]

    def levels(self, picture: Tensor) -> list[list[int]]:
        """Weights (rows, cols) as indices of shades; `NOTHING` where colors show no weight at all."""
        picture = picture.nan_to_num()
        if self.depth == 0:
            return (position(picture) * (self.shades - 0.001)).int().tolist()
        levels = (position(picture) * (self.shades - 1)).round().int()
        return levels.masked_fill(picture <= 0, NOTHING).tolist()

    def lines(self, picture: Tensor) -> list[str]:
        """A picture (rows, cols) as text: two rows per line in colors, one in letters."""
        levels = self.levels(picture)
        if self.depth == 0:
            return ["".join(LETTERS[level] for level in row) for row in levels]
        levels += [[NOTHING] * len(levels[0])] * (len(levels) % 2)
        return ["".join(map(self.halves, *levels[i : i + 2])) + self.reset for i in range(0, len(levels), 2)]

    @functools.cache  # noqa: B019 - a palette lives as long as the program
    def halves(self, upper: int, lower: int) -> str:
        """Two pixels, one above the other, in one character."""
        if upper == NOTHING and lower == NOTHING:
            return "\033[0m "
        if upper == NOTHING:
            return f"\033[0;{self.code(lower)}m▄"
        if lower == NOTHING:
            return f"\033[0;{self.code(upper)}m▀"
        return f"\033[{self.code(upper)};{self.code(lower, back=True)}m▀"

    def cell(self, level: int, text: str, size: int, *, cursor: bool = False) -> str:
        """A cell one line high and `size` columns wide, with text in black or white, whichever contrasts more."""
        if self.depth == 0:
            text = f"{text or LETTERS[level]}›" if cursor else text
            return text.ljust(size, " " if text else LETTERS[level])[:size]
        if cursor:
            return f"\033[0;7;{CURSOR[self.depth]}m{text:<{size}}\033[0m"
        if level == NOTHING:
            return f"\033[0m{text:<{size}}"
        ink = "30" if level > self.shades // 2 else "97"
        return f"\033[{ink};{self.code(level, back=True)}m{text:<{size}}"

    @functools.cache  # noqa: B019
    def code(self, level: int, *, back: bool = False) -> str:
        """The escape code of a shade, as foreground or background."""
        if self.depth == 4:
            return str(ANSI_16[level] + (10 if back else 0))
        kind = "48" if back else "38"
        if self.depth == 8:
            return f"{kind};5;{XTERM_256[level]}"
        red, green, blue = table(size=self.shades)[level]
        return f"{kind};2;{red};{green};{blue}"

    def painted(self, text: str, weight: float) -> str:
        """Text in the color of a weight."""
        level = round(min(1.0, weight) ** 0.5 * (self.shades - 1))
        return f"\033[{self.code(level)}m{text}{self.reset}" if self.depth else text

    def strong(self, text: str) -> str:
        """Text in bold."""
        return f"\033[1m{text}{self.reset}" if self.depth else text

    def faint(self, text: str) -> str:
        """Dimmed text."""
        return f"\033[2m{text}{self.reset}" if self.depth else text

    @property
    def reset(self) -> str:
        """Back to the terminal's own colors."""
        return "\033[0m" if self.depth else ""


def palette(stream: Any, environment: Mapping[str, str] = os.environ, *, plain: bool = False) -> Palette:
    """The palette for a stream: letters, unless it is a terminal with colors and colors are allowed."""
    term = environment.get("TERM", "")
    if plain or environment.get("NO_COLOR") or term in ("", "dumb") or not stream.isatty():
        return Palette(0)
    if environment.get("COLORTERM") in ("truecolor", "24bit") or "direct" in term:
        return Palette(24)
    return Palette(8 if "256" in term else 4)


def png(levels: Tensor, colors: Sequence[RGB]) -> bytes:
    """A PNG image of whole numbers (rows, cols), each an index into the colors; 0 is transparent."""
    rows, cols = levels.shape
    head = struct.pack(">IIBBBBB", cols, rows, 8, 3, 0, 0, 0)  # 8 bits per pixel, an index into the palette
    palette_data = bytes(part for color in colors for part in color)
    lines = b"".join(b"\0" + bytes(row) for row in levels.tolist())  # each line begins with its filter: none
    chunks = ((b"IHDR", head), (b"PLTE", palette_data), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(lines, 9)))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in (*chunks, (b"IEND", b"")))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_url(picture: Tensor, side: int) -> tuple[str, int, int]:
    """Weights (rows, cols) as a data URL of an image about `side` pixels wide, with its width and height."""
    levels = 1 + (position(picture) * (STEPS - 1)).round().int()
    grow = max(1, round(side / max(levels.shape)))
    levels = torch.where(picture > 0, levels, 0).repeat_interleave(grow, 0).repeat_interleave(grow, 1)
    rows, cols = levels.shape
    image = png(levels, [(0, 0, 0), *table(size=STEPS)])
    return "data:image/png;base64," + base64.b64encode(image).decode(), cols, rows
