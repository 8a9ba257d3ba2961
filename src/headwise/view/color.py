"""The color maps of every picture (terminal, notebook, page and plots), terminal colors, and PNG files.

Zero is the background and more weight means more ink: darker on a light page, brighter on a dark one. Both color maps
change in steps that look equal (equal distances in OKLab) and are ordered by lightness, so they read the same in
grayscale and to color-blind readers. The steps of the dark one are equal on a screen that reflects some light from the
room, 3 % of its white, which hides differences between the darkest colors. A weight w is drawn at √w along the color
map, so that small weights stay visible. The page's script gets the tables from here.
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

# From the background of a page (see page.css) through sea colors to the strongest ink.
LIGHT = (
    "ffffff d6fbf2 abf1e9 81e4e2 51d5dd 0cc4d8 06b1ce 039ec2 068ab5 0377a8 05659b 14538a 1f4273 21335a 1e2541 181a28 "
    "0f0f0f"
)
DARK = (
    "171b21 1c2c47 203a66 224881 1d5b92 176d9d 0e7f9f 0c90a0 0ea09f 27b09d 44c09d 70cba0 95d6a6 b4dfb4 d3e8c2 e6f1de "
    "fafafa"
)
# For differences and ratios, with the neutral value in the middle; one for light pages and one for dark ones.
DIVERGING_LIGHT = "08306b 2f6db3 8fb8de ffffff f5b266 cc6a12 7a3500"
DIVERGING_DARK = "9ecbff 4a8fdc 25528c 171b21 8a4b10 e08a2e ffd09a"

LETTERS = " .:-=+*#%@"
BLOCKS = "▀▄█·…→×"  # what pictures and captions need beyond ASCII
# The same in the colors of simpler terminals, chosen by hand: the nearest ones would jump from hue to hue.
XTERM_256 = {True: (17, 23, 24, 31, 37, 79, 151, 230), False: (195, 123, 80, 37, 31, 25, 18, 16)}  # by darkness
ANSI_16 = {True: (34, 36, 96, 97), False: (96, 36, 34, 30)}  # foreground codes; background codes are 10 higher
STEPS = 37  # shades of a 24-bit terminal and of a PNG
CURSOR = {24: "38;2;255;64;160", 8: "38;5;205", 4: "95"}  # pink, which is not in the color map
NOTHING = -1  # the level of a pixel without any weight: the background shows


@functools.cache
def table(stops: str = LIGHT, size: int = 256) -> tuple[RGB, ...]:
    """A color map as `size` colors, interpolated between its stops.

    >>> table()[0], table()[255]
    ((255, 255, 255), (15, 15, 15))
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
    maps = {"light": LIGHT, "dark": DARK, "light difference": DIVERGING_LIGHT, "dark difference": DIVERGING_DARK}
    return {name: bytes(part for color in table(stops) for part in color).hex() for name, stops in maps.items()}


def position(weights: Tensor) -> Tensor:
    """Where weights lie on the color map, from 0 to 1: their square roots."""
    return weights.clamp(0, 1).sqrt()


class Palette:
    """Shades of weights from 0 to 1 in one terminal.

    Args:
        depth: bits of color: 24, 8 (256 colors), 4 (16 colors), or 0 for letters.
        dark: whether the terminal has a dark background.
        ascii: whether it can show only ASCII characters.
    """

    def __init__(self, depth: int, *, dark: bool = True, ascii: bool = False) -> None:
        self.depth, self.dark, self.ascii = (0 if ascii else depth), dark, ascii
        self.shades = {24: STEPS, 8: len(XTERM_256[dark]), 4: len(ANSI_16[dark]), 0: len(LETTERS)}[self.depth]

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
        ink = "30" if (level > self.shades // 2) == self.dark else "97"
        return f"\033[{ink};{self.code(level, back=True)}m{text:<{size}}"

    @functools.cache  # noqa: B019
    def code(self, level: int, *, back: bool = False) -> str:
        """The escape code of a shade, as foreground or background."""
        if self.depth == 4:
            return str(ANSI_16[self.dark][level] + (10 if back else 0))
        kind = "48" if back else "38"
        if self.depth == 8:
            return f"{kind};5;{XTERM_256[self.dark][level]}"
        red, green, blue = table(DARK if self.dark else LIGHT, self.shades)[level]
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
    basic = not _can_show(stream, BLOCKS)
    if plain or basic or environment.get("NO_COLOR") or term in ("", "dumb") or not stream.isatty():
        return Palette(0, ascii=basic)
    dark = environment.get("COLORFGBG", "15;0").rpartition(";")[2] not in ("7", "15")
    if environment.get("COLORTERM") in ("truecolor", "24bit") or "direct" in term:
        return Palette(24, dark=dark)
    return Palette(8 if "256" in term else 4, dark=dark)


def _can_show(stream: Any, text: str) -> bool:
    """Whether the encoding of a stream has these characters."""
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


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
