"""One color map for the terminal, the notebook, the page and plots, and the formats it is written in."""

import base64
import io
import itertools
import math
import re
import struct
import zlib
from pathlib import Path

import pytest
import torch

import headwise
from headwise import AttentionMap
from headwise.view.color import (
    DARK,
    DIVERGING_DARK,
    DIVERGING_LIGHT,
    LETTERS,
    LIGHT,
    NOTHING,
    STEPS,
    Palette,
    page_tables,
    palette,
    png,
    png_url,
    table,
)


def bare(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_the_table_goes_through_its_stops():
    stops = [tuple(bytes.fromhex(stop)) for stop in LIGHT.split()]
    assert table(size=len(stops)) == tuple(stops)
    assert len(table()) == 256
    assert (table()[0], table()[-1]) == (stops[0], stops[-1])


def linear(color):
    """A color in linear light."""
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in (part / 255 for part in color)]


def oklab(light, glare=0.0):
    """Linear light as lightness and two hues, in which equal distances look equal (Ottosson 2020)."""
    seen = [(part + glare) / (1 + glare) for part in light]
    to_cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    cones = [sum(a * x for a, x in zip(row, seen, strict=True)) ** (1 / 3) for row in to_cones]
    to_lab = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return [sum(a * x for a, x in zip(row, cones, strict=True)) for row in to_lab]


# What readers without one kind of cone see, in linear light (Machado, Oliveira and Fernandes 2009).
BLINDNESS = {
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
READERS = [None, *BLINDNESS]


def as_seen(color, reader):
    """A color in linear light, as a reader sees it."""
    light = linear(color)
    if reader is None:
        return light
    return [min(1.0, max(0.0, sum(a * x for a, x in zip(row, light, strict=True)))) for row in BLINDNESS[reader]]


@pytest.mark.parametrize(("stops", "glare"), [(LIGHT, 0.0), (DARK, 0.03)], ids=["light", "dark"])
def test_steps_of_weight_look_equal(stops, glare):
    shades = [oklab(linear(color), glare) for color in table(stops, 17)]
    steps = [math.dist(a, b) for a, b in itertools.pairwise(shades)]
    assert max(steps) < 1.2 * min(steps)


@pytest.mark.parametrize("reader", READERS, ids=str)
@pytest.mark.parametrize(("stops", "sign"), [(LIGHT, -1), (DARK, 1)], ids=["light", "dark"])
def test_weights_are_ordered_by_lightness_for_every_reader(stops, sign, reader):
    light = [oklab(as_seen(color, reader))[0] for color in table(stops, 33)]
    assert all(sign * (b - a) > 0.01 for a, b in itertools.pairwise(light))


@pytest.mark.parametrize("stops", [LIGHT, DARK], ids=["light", "dark"])
def test_a_small_weight_differs_from_none(stops):
    light = [oklab(linear(table(stops)[round(255 * weight**0.5)]), 0.03) for weight in (0.0, 0.01)]
    assert math.dist(*light) > 0.05  # two steps of the 17 of the color map


@pytest.mark.parametrize("reader", READERS, ids=str)
@pytest.mark.parametrize(("stops", "sign"), [(DIVERGING_LIGHT, -1), (DIVERGING_DARK, 1)], ids=["light", "dark"])
def test_differences_are_ordered_by_lightness_on_either_side_and_the_sides_differ(stops, sign, reader):
    shades = [oklab(as_seen(color, reader)) for color in table(stops, 13)]
    below, above = [light for light, *_ in shades[6::-1]], [light for light, *_ in shades[6:]]
    for side in (below, above):
        assert all(sign * (b - a) > 0.01 for a, b in itertools.pairwise(side))
    assert all(math.dist(a, b) > 0.05 for a, b in zip(shades[4::-1], shades[8:], strict=True))


def test_weight_zero_is_the_background_of_the_page():
    style = (Path(headwise.__file__).parent / "view" / "page" / "page.css").read_text(encoding="utf-8")
    light, dark = re.search(r"--card: light-dark\(#(\w+), #(\w+)\)", style).groups()
    assert (LIGHT.split()[0], DARK.split()[0]) == (light, dark)
    tables = page_tables()
    for name, card in (("light difference", light), ("dark difference", dark)):
        middle = bytes.fromhex(tables[name])[3 * 127 : 3 * 128]
        assert max(abs(a - b) for a, b in zip(middle, bytes.fromhex(card), strict=True)) < 5


def test_terminal_notebook_page_and_plots_use_one_table():
    shades = table(size=STEPS)
    for dark, stops in ((True, DARK), (False, LIGHT)):
        codes = [Palette(24, dark=dark).code(level) for level in range(STEPS)]
        assert codes == [f"38;2;{r};{g};{b}" for r, g, b in table(stops, STEPS)]
    _, chunks = decoded(base64.b64decode(png_url(torch.ones(1, 1), 1)[0].partition(",")[2]))
    assert chunks[b"PLTE"][3:] == bytes(part for color in shades for part in color)
    assert bytes.fromhex(page_tables()["light"]) == bytes(part for color in table() for part in color)


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
    assert shades.code(shades.shades - 1) == "38;2;250;250;250"
    assert shades.levels(torch.tensor([[0.0, 1e-9]])) == [[NOTHING, 0]]


@pytest.mark.parametrize("depth", [4, 8, 24])
def test_shades_grow_in_brightness(depth):
    def light(code):
        kind, *numbers = map(int, code.split(";")) if ";" in code else (0, int(code))
        if kind == 0:
            return {34: 1, 36: 2, 96: 3, 97: 4}[numbers[0]]
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
    if depth > 4:
        shades = Palette(depth, dark=False)
        found = [light(shades.code(level)) for level in range(shades.shades)]
        assert all(after < before for before, after in itertools.pairwise(found))


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
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, False, 8),
    ],
    ids=str,
)
def test_colours_are_those_the_terminal_has_and_may_show(environment, plain, depth):
    assert palette(Terminal(), environment, plain=plain).depth == depth
    assert palette(io.StringIO(), environment, plain=plain).depth == 0


@pytest.mark.parametrize(("background", "dark"), [("15;0", True), ("0;15", False), ("0;default;7", False)])
def test_a_light_terminal_has_dark_ink(background, dark):
    found = palette(Terminal(), {"TERM": "xterm-256color", "COLORFGBG": background})
    assert found.dark == dark


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1", "ascii"])
def test_a_terminal_without_blocks_gets_letters(encoding):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    stream.isatty = lambda: True
    assert palette(stream, {"TERM": "xterm-256color"}).depth == 0


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
