"""One color map for the terminal, the notebook, the page and plots, and the formats it is written in."""

import base64
import io
import itertools
import re
import struct
import zlib

import pytest
import torch

from headwise import AttentionMap
from headwise.view.color import CIVIDIS, LETTERS, NOTHING, STEPS, Palette, page_tables, palette, png, png_url, table


def bare(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_table_goes_through_its_stops():
    stops = [tuple(bytes.fromhex(stop)) for stop in CIVIDIS.split()]
    assert table(size=len(stops)) == tuple(stops)
    assert len(table()) == 256
    assert (table()[0], table()[-1]) == (stops[0], stops[-1])


def test_it_is_cividis():
    colormaps = pytest.importorskip("matplotlib").colormaps
    for index, color in enumerate(table()):
        assert color == pytest.approx([255 * part for part in colormaps["cividis"](index)[:3]], abs=5)


def test_terminal_notebook_page_and_plots_use_one_table():
    shades = table(size=STEPS)
    assert [Palette(24).code(level) for level in range(STEPS)] == [f"38;2;{r};{g};{b}" for r, g, b in shades]
    _, chunks = decoded(base64.b64decode(png_url(torch.ones(1, 1), 1)[0].partition(",")[2]))
    assert chunks[b"PLTE"][3:] == bytes(part for color in shades for part in color)
    assert bytes.fromhex(page_tables()["share"]) == bytes(part for color in table() for part in color)


def test_plots_use_the_same_table():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    image = AttentionMap(torch.randn(1, 1, 5, 3), torch.randn(1, 1, 5, 3)).plot(0).images[0]
    pyplot.close("all")
    for index in range(256):
        assert tuple(image.cmap(index, bytes=True)[:3]) == table()[index]


def test_a_picture_in_letters():
    picture = torch.tensor([[0.0, 0.25, 1.0]])
    assert Palette(0).lines(picture) == [LETTERS[0] + LETTERS[4] + LETTERS[9]]


def test_half_blocks_hold_two_rows_and_nothing_is_no_colour():
    shades = Palette(24)
    (line,) = shades.lines(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert bare(line) == "▀ "
    assert shades.code(shades.shades - 1) == "38;2;254;232;56"
    assert shades.levels(torch.tensor([[0.0, 1e-9]])) == [[NOTHING, 0]]


@pytest.mark.parametrize("depth", [4, 8, 24])
def test_shades_grow_in_brightness(depth):
    def light(code):
        kind, *numbers = map(int, code.split(";")) if ";" in code else (0, int(code))
        if kind == 0:
            return {34: 1, 90: 2, 33: 3, 93: 4}[numbers[0]]
        if numbers[0] == 2:
            red, green, blue = numbers[1:]
        elif numbers[1] >= 232:
            red = green = blue = 8 + 10 * (numbers[1] - 232)
        else:
            steps = (0, 95, 135, 175, 215, 255)
            place = numbers[1] - 16
            red, green, blue = steps[place // 36], steps[place // 6 % 6], steps[place % 6]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    shades = Palette(depth)
    found = [light(shades.code(level)) for level in range(shades.shades)]
    assert found[-1] > 3 * found[0]
    assert all(after > before for before, after in itertools.pairwise(found))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "plain", "depth"),
    [
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor"}, False, 24),
        ({"TERM": "xterm-direct"}, False, 24),
        ({"TERM": "tmux-256color"}, False, 8),
        ({"TERM": "linux"}, False, 4),
        ({"TERM": "dumb", "COLORTERM": "truecolor"}, False, 0),
        ({}, False, 0),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False, 0),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, False, 8),
        ({"TERM": "xterm-256color"}, True, 0),
    ],
    ids=str,
)
def test_colours_are_those_the_terminal_has_and_may_show(environment, plain, depth):
    assert palette(Terminal(), environment, plain=plain).depth == depth
    assert palette(io.StringIO(), environment, plain=plain).depth == 0


def decoded(data):
    """Rows of an indexed PNG, checked chunk by chunk."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = {}, 8
    while place < len(data):
        size, kind = struct.unpack(">I4s", data[place : place + 8])
        body = data[place + 8 : place + 8 + size]
        assert struct.unpack(">I", data[place + 8 + size : place + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + size
    cols, rows = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = zlib.decompress(chunks[b"IDAT"])
    return torch.tensor([list(lines[row * (cols + 1) + 1 : (row + 1) * (cols + 1)]) for row in range(rows)]), chunks


def test_a_png_holds_what_it_was_given():
    levels = torch.tensor([[0, 1, 2], [2, 1, 0]])
    found, chunks = decoded(png(levels, [(0, 0, 0), (1, 2, 3), (4, 5, 6)]))
    assert torch.equal(found, levels)
    assert chunks[b"PLTE"] == bytes([0, 0, 0, 1, 2, 3, 4, 5, 6])


def test_a_picture_has_square_roots_and_nothing_where_nothing_is():
    address, width, height = png_url(torch.tensor([[0.0, 0.25, 1.0]]), 6)
    found, chunks = decoded(base64.b64decode(address.partition(",")[2]))
    assert (height, width) == found.shape == (2, 6)
    assert found[0].tolist() == [0, 0, 1 + (STEPS - 1) // 2, 1 + (STEPS - 1) // 2, STEPS, STEPS]
    assert chunks[b"tRNS"] == b"\0"
    assert tuple(chunks[b"PLTE"][-3:]) == table()[-1]
