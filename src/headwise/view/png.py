"""A small picture as a PNG, written by ourselves: rows of numbers into a table of colours."""

import base64
import struct
import zlib
from collections.abc import Sequence

from torch import Tensor

from headwise.view.colours import STEPS, between


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
