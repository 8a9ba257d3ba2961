"""The first view and a layer's: they fit a terminal of any width and colours, and show the sight's own numbers."""

import io
import itertools
import re

import pytest
import torch

from headwise import AttentionMap, MultiHeadAttention, OptionError, Scoring, causal, load_builtin, view
from headwise.view.color import LETTERS, NOTHING, Palette, palette
from headwise.view.terminal import LINES, MARKS, drawn, drawn_layer
from headwise.view.tokens import cut, fill, shown, wide

TEXT = "The captain looked at the sea, and the sea looked at the captain. The captain looked at the sea."
DEPTHS = (0, 4, 8, 24)


@pytest.fixture(scope="module")
def sight():
    return view(load_builtin(), TEXT)


def bare(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_first_view_fits_a_terminal(sight, width, depth):
    text = drawn(sight, width, Palette(depth))
    lines = bare(text).splitlines()
    assert len(lines) <= LINES
    assert max(map(wide, lines)) <= width
    assert ("\x1b[" in text) == (depth > 0)


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 60)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_layer_fits_the_width_and_names_every_head(sight, size, depth):
    lines = bare(drawn_layer(sight, 3, *size, Palette(depth))).splitlines()
    assert max(map(wide, lines)) <= size[0]
    for head in range(8):
        assert any(f"3.{head}" in line for line in lines)
    if size != (40, 12):
        assert len(lines) <= size[1]


def test_a_layer_has_larger_pictures_than_all_layers(sight):
    small, large = drawn(sight, 80, Palette(24)), drawn_layer(sight, 3, 80, 24, Palette(24))
    assert large.count("▀") / 8 > 2 * small.count("▀") / 56


def test_many_layers_and_heads_fit_too():
    maps = [AttentionMap(torch.randn(1, 32, 50, 8), torch.randn(1, 8, 50, 8)) for _ in range(40)]
    sight = view(maps)
    lines = drawn(sight, 80, Palette(0)).splitlines()
    assert len(lines) <= LINES
    assert any("more layers; --layer" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert max(map(len, drawn_layer(sight, 39, 80, 24, Palette(0)).splitlines())) <= 80


def test_one_token_is_shown():
    assert "1 layer × 3 heads · 1 token" in str(view(AttentionMap(torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8))))


def test_cross_attention_has_words_on_both_sides():
    layer = MultiHeadAttention(16, 2)
    with torch.no_grad():
        _, weights = layer(torch.randn(1, 3, 16), torch.randn(1, 5, 16), return_weights=True)
    sight = view(weights, words=list("abc"), keys=list("vwxyz"))
    assert "3 tokens looking at 5" in sight.sentence
    assert len(str(sight).splitlines()) <= LINES
    assert len(drawn_layer(sight, 0, 40, 12, Palette(8)).splitlines()) <= 12


def test_letters_beside_pictures_are_those_of_the_sentence(sight):
    lines = drawn(sight, 80, Palette(0)).splitlines()
    first = next(line for line in lines if line.startswith(" 3 "))
    marks = [first[3 + place * 9 + 7] if len(first) > 3 + place * 9 + 7 else " " for place in range(8)]
    assert marks == [MARKS[head.kind] for head in sight.summaries[3]]
    assert "induction (i)" in " ".join(lines[:3])
    assert len(set(MARKS.values())) == len(MARKS)


def test_a_picture_of_letters_is_the_pooled_map(sight):
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


@pytest.mark.parametrize(
    ("token", "text"),
    [
        (" sea", "sea"), ("\n", "⏎"), ("  ", "␣␣"), ("\x1b[31m", "\\x1b[31m"), ("\u202e", "\\x202e"), ("", "∅"),
        ("\t", "⇥"), ("a\u200bb", "a\\x200bb"),
    ],
)  # fmt: skip
def test_tokens_are_shown_as_what_they_are(token, text):
    assert shown(token) == text


def test_wide_letters_are_counted_as_two():
    assert wide("漢字a") == 5
    assert wide("e\u0301") == 1
    assert cut("漢字漢字", 5) == "漢字…"
    assert fill("漢", 4) == "漢  "
    assert cut("abc", 0) == ""


def test_strange_tokens_leave_the_terminal_alone():
    sight = view(load_builtin(), "a\n\n\tb \x1b[31m <script> ‮ ☃ 漢字 a\n\n\tb")
    for text in (drawn(sight, 80, Palette(0)), drawn_layer(sight, 2, 80, 24, Palette(0))):
        assert not set(text) & {"\x1b", "\t", "‮"}
        assert max(map(wide, text.splitlines())) <= 80


def test_a_layer_that_is_not_there_is_refused(sight):
    with pytest.raises(OptionError, match="layer 7: the model has 7, 0 to 6"):
        drawn_layer(sight, 7, 80, 24, Palette(0))


def test_some_queries_give_about_the_numbers_of_all_and_say_so():
    torch.manual_seed(0)
    weights = AttentionMap(torch.randn(1, 3, 701, 8), torch.randn(1, 3, 701, 8), Scoring(causal()))
    part, whole = view(weights, queries=101), view(weights)
    assert "701 tokens · numbers from 101 of them" in part.sentence
    assert part.queries[-1] == 700
    assert len(part.queries) == 101
    expected = weights.select(rows=part.queries).summary()
    assert part.summaries[0] == expected
    for one, other in zip(part.summaries[0], whole.summaries[0], strict=True):
        assert one["entropy"] == pytest.approx(other["entropy"], abs=0.02)
    assert {pair.query for pair in part.pairs()} <= set(part.queries.tolist())
    assert view(weights, queries=701).queries is None


def test_progress_is_told_layer_by_layer():
    told = []
    sight = view(load_builtin(), "Once upon a time", progress=lambda *step: told.append(step))
    sight.pairs()
    _ = sight.summaries
    for stage in ("reading", "counting", "pairing"):
        assert [step for step in told if step[0] == stage] == [(stage, done, 7) for done in range(1, 8)]
