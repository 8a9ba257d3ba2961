"""The first view and a layer's: they fit a terminal of any width and colours, and show the result's own numbers."""

import re

import pytest
import torch

from headwise import AttentionMap, MultiHeadAttention, OptionError, Scoring, causal, load_builtin, view
from headwise.view.color import Palette
from headwise.view.terminal import LINES, MARKS, drawn, drawn_layer
from headwise.view.tokens import wide

TEXT = "The captain looked at the sea, and the sea looked at the captain. The captain looked at the sea."
DEPTHS = (0, 4, 8, 24)


@pytest.fixture(scope="module")
def result():
    return view(load_builtin(), TEXT)


def bare(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_first_view_fits_a_terminal(result, width, depth):
    text = drawn(result, width, Palette(depth))
    lines = bare(text).splitlines()
    assert len(lines) <= LINES
    assert max(map(wide, lines)) <= width
    assert ("\x1b[" in text) == (depth > 0)


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 60)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_layer_fits_the_width_and_names_every_head(result, size, depth):
    lines = bare(drawn_layer(result, 3, *size, Palette(depth))).splitlines()
    assert max(map(wide, lines)) <= size[0]
    for head in range(8):
        assert any(f"3.{head}" in line for line in lines)
    if size != (40, 12):
        assert len(lines) <= size[1]


def test_a_layer_has_larger_pictures_than_all_layers(result):
    small, large = drawn(result, 80, Palette(24)), drawn_layer(result, 3, 80, 24, Palette(24))
    assert large.count("▀") / 8 > 2 * small.count("▀") / 56


def test_many_layers_and_heads_fit_too():
    maps = [AttentionMap(torch.randn(1, 32, 50, 8), torch.randn(1, 8, 50, 8)) for _ in range(40)]
    result = view(maps)
    lines = drawn(result, 80, Palette(0)).splitlines()
    assert len(lines) <= LINES
    assert any("more layers; --layer" in line for line in lines)
    assert max(map(len, lines)) <= 80
    assert max(map(len, drawn_layer(result, 39, 80, 24, Palette(0)).splitlines())) <= 80


def test_one_token_is_shown():
    assert "1 layer × 3 heads · 1 token" in str(view(AttentionMap(torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8))))


def test_cross_attention_has_words_on_both_sides():
    layer = MultiHeadAttention(16, 2)
    with torch.no_grad():
        _, weights = layer(torch.randn(1, 3, 16), torch.randn(1, 5, 16), return_weights=True)
    result = view(weights, words=list("abc"), keys=list("vwxyz"))
    assert "3 tokens attending to 5" in result.sentence
    assert len(str(result).splitlines()) <= LINES
    assert len(drawn_layer(result, 0, 40, 12, Palette(8)).splitlines()) <= 12


def test_letters_beside_pictures_are_those_of_the_sentence(result):
    lines = drawn(result, 80, Palette(0)).splitlines()
    first = next(line for line in lines if line.startswith(" 3 "))
    marks = [first[3 + place * 9 + 7] if len(first) > 3 + place * 9 + 7 else " " for place in range(8)]
    assert marks == [MARKS[head.kind] for head in result.summaries[3]]
    assert "induction (i)" in " ".join(lines[:3])
    assert len(set(MARKS.values())) == len(MARKS)


def test_strange_tokens_leave_the_terminal_alone():
    result = view(load_builtin(), "a\n\n\tb \x1b[31m <script> ‮ ☃ 漢字 a\n\n\tb")
    for text in (drawn(result, 80, Palette(0)), drawn_layer(result, 2, 80, 24, Palette(0))):
        assert not set(text) & {"\x1b", "\t", "‮"}
        assert max(map(wide, text.splitlines())) <= 80


def test_a_layer_that_is_not_there_is_refused(result):
    with pytest.raises(OptionError, match="layer 7: the model has 7, 0 to 6"):
        drawn_layer(result, 7, 80, 24, Palette(0))


def test_some_queries_give_about_the_numbers_of_all_and_say_so():
    torch.manual_seed(0)
    weights = AttentionMap(torch.randn(1, 3, 701, 8), torch.randn(1, 3, 701, 8), Scoring(causal()))
    part, whole = view(weights, queries=101), view(weights)
    assert "701 tokens · numbers from 101 of these queries" in part.sentence
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
    result = view(load_builtin(), "Once upon a time", progress=lambda *step: told.append(step))
    result.pairs()
    _ = result.summaries
    for stage in ("reading", "counting", "pairing"):
        assert [step for step in told if step[0] == stage] == [(stage, done, 7) for done in range(1, 8)]
