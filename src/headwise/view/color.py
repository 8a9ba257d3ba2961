"""How a terminal shows shares from 0 to 1: half blocks in as many colours as it has, or letters."""

import base64
import functools
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

LETTERS = " .:-=+*#%@"
# From dark to bright in equal steps for the eye, also for the colour-blind: cividis, ten of its colours.
RAMP = (
    (0, 34, 78), (18, 53, 112), (59, 73, 108), (87, 93, 109), (112, 113, 115), (138, 134, 120), (165, 156, 116),
    (195, 179, 105), (225, 204, 85), (254, 232, 56),
)  # fmt: skip
# The same in the colours of lesser terminals, by hand: the nearest ones would jump from hue to hue.
OF_256 = (17, 18, 238, 60, 102, 144, 185, 227)
SIXTEEN = (34, 90, 33, 93)  # blue, grey, brown, yellow: codes of the foreground; the background's are 10 more
STEPS = 37  # shades of a terminal with 24-bit colour: four steps from one colour of the ramp to the next
CURSOR = {24: "38;2;255;64;160", 8: "38;5;205", 4: "95"}  # pink, which the ramp has not
NOTHING = -1  # a pixel without any weight: the background shows


class Palette:
    """Shades for one terminal.

    Args:
        depth: bits of colour: 24, 8 (256 colours), 4 (16 colours), or 0 for letters.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.shades = {24: STEPS, 8: len(OF_256), 4: len(SIXTEEN), 0: len(LETTERS)}[depth]

    def levels(self, picture: Tensor) -> list[list[int]]:
        """Shares (rows, cols) as numbers of shades; square roots, so that small ones show. No weight is no shade."""
        picture = picture.nan_to_num()
        if self.depth == 0:
            return (picture.clamp(0, 1).sqrt() * (self.shades - 0.001)).int().tolist()
        levels = (picture.clamp(0, 1).sqrt() * (self.shades - 1)).round().int()
        return levels.masked_fill(picture <= 0, NOTHING).tolist()

    def lines(self, picture: Tensor) -> list[str]:
        """A picture (rows, cols) as text: two rows a line in colours, one in letters."""
        levels = self.levels(picture)
        if self.depth == 0:
            return ["".join(LETTERS[level] for level in row) for row in levels]
        levels += [[NOTHING] * len(levels[0])] * (len(levels) % 2)
        return ["".join(map(self.halves, *levels[i : i + 2])) + self.reset for i in range(0, len(levels), 2)]

    @functools.cache  # noqa: B019 - a palette lives as long as the program
    def halves(self, upper: int, lower: int) -> str:
        """Two pixels, one above the other."""
        if upper == NOTHING and lower == NOTHING:
            return "\033[0m "
        if upper == NOTHING:
            return f"\033[0;{self.code(lower)}m▄"
        if lower == NOTHING:
            return f"\033[0;{self.code(upper)}m▀"
        return f"\033[{self.code(upper)};{self.code(lower, back=True)}m▀"

    def cell(self, level: int, text: str, size: int, *, cursor: bool = False) -> str:
        """A cell one line high and `size` columns wide, with text in it; in black or white, whichever stands out."""
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
        """The number of a shade's colour as terminals take it."""
        if self.depth == 4:
            return str(SIXTEEN[level] + (10 if back else 0))
        kind = "48" if back else "38"
        if self.depth == 8:
            return f"{kind};5;{OF_256[level]}"
        red, green, blue = between(level / (self.shades - 1))
        return f"{kind};2;{red};{green};{blue}"

    def painted(self, text: str, share: float) -> str:
        """Text in the colour of a share."""
        return f"\033[{self.code(round(share * (self.shades - 1)))}m{text}{self.reset}" if self.depth else text

    def strong(self, text: str) -> str:
        """Text to be seen first."""
        return f"\033[1m{text}{self.reset}" if self.depth else text

    def faint(self, text: str) -> str:
        """Text to be seen last."""
        return f"\033[2m{text}{self.reset}" if self.depth else text

    @property
    def reset(self) -> str:
        """Back to the terminal's own colours."""
        return "\033[0m" if self.depth else ""


def palette(stream: Any, environment: Mapping[str, str] = os.environ, *, plain: bool = False) -> Palette:
    """The palette for what is written to a stream: letters unless it is a terminal that has, and may show, colours."""
    term = environment.get("TERM", "")
    if plain or environment.get("NO_COLOR") or term in ("", "dumb") or not stream.isatty():
        return Palette(0)
    if environment.get("COLORTERM") in ("truecolor", "24bit") or "direct" in term:
        return Palette(24)
    return Palette(8 if "256" in term else 4)


def between(share: float) -> tuple[int, int, int]:
    """The colour of the ramp at a share of its length."""
    place = share * (len(RAMP) - 1)
    low = min(int(place), len(RAMP) - 2)
    red, green, blue = (round(a + (place - low) * (b - a)) for a, b in zip(RAMP[low], RAMP[low + 1], strict=True))
    return red, green, blue


# A small picture as a PNG, written by ourselves: rows of numbers into a table of colours.


def png(levels: Tensor, colours: Sequence[tuple[int, int, int]]) -> bytes:
    """An image of whole numbers (rows, cols), each a colour of the table; 0 is nothing, and shows what lies below."""
    rows, cols = levels.shape
    head = struct.pack(">IIBBBBB", cols, rows, 8, 3, 0, 0, 0)  # 8 bits a pixel, which look up a colour
    table = bytes(part for colour in colours for part in colour)
    lines = b"".join(b"\0" + bytes(row) for row in levels.tolist())  # each begins with its filter: none
    chunks = ((b"IHDR", head), (b"PLTE", table), (b"tRNS", b"\0"), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def picture_address(picture: Tensor, side: int) -> tuple[str, int, int]:
    """Shares (rows, cols) as the address of an image about `side` pixels wide, its width and its height.

    Square roots, as everywhere; no weight at all is no colour.
    """
    levels = 1 + (picture.clamp(0, 1).sqrt() * (STEPS - 1)).round().int()
    grow = max(1, round(side / max(levels.shape)))
    levels = levels.masked_fill(picture <= 0, 0).repeat_interleave(grow, 0).repeat_interleave(grow, 1)
    colours = [(0, 0, 0), *(between(level / (STEPS - 1)) for level in range(STEPS))]
    rows, cols = levels.shape
    return "data:image/png;base64," + base64.b64encode(png(levels, colours)).decode(), cols, rows
