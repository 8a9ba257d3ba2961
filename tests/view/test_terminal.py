"""The first view and a layer's: they fit a terminal of any width and colours, and show the result's own numbers."""

import re

import pytest
import torch

from headwise import AttentionMap, MultiHeadAttention, OptionError, Scoring, causal, load_builtin, view
from headwise.view.color import Palette
from headwise.view.terminal import EXAMPLE, HEIGHT, drawn, drawn_layer, letters_of
from headwise.view.tokens import wide
from headwise.view.words import example, percent
from headwise.weights.summary import Head, Trait

TEXT = "The captain looked at the sea, and the sea looked at the captain. The captain looked at the sea."
DEPTHS = (0, 4, 8, 24)


@pytest.fixture(scope="module")
def result():
    return view(load_builtin(), TEXT)


def bare(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(("width", "height"), [(40, 24), (80, 24), (100, 50), (200, 60)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_first_view_fits_a_terminal(result, width, height, depth):
    text = drawn(result, width, Palette(depth), height)
    lines = bare(text).splitlines()
    assert len(lines) < height
    assert max(map(wide, lines)) <= width
    assert ("\x1b[" in text) == (depth > 0)


def test_the_first_view_names_model_text_and_what_heads_do(result):
    lines = bare(drawn(result, 120, Palette(24), 40))
    assert "the built-in model" in lines
    assert "The captain looked at the sea" in lines
    assert "attends to the previous token" in lines.replace("\n", " ")
    assert "rows: layers" in lines


@pytest.mark.parametrize("width", [80, 100, 160])
def test_what_a_large_picture_says_of_its_head_is_not_cut(width):
    found = view(load_builtin(), "The captain looked at the sea, and the sea looked at the captain. Then he laughed.")
    lines = bare(drawn(found, width, Palette(24), 24)).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("Head "))
    assert not any("…" in line for line in lines[start : start + 3])
    kinds = {head.place: head.summary for head in found.heads}
    shown = re.findall(r"Head (\d+\.\d+)", lines[start])
    assert any(len(kinds[place].traits) > 1 for place in shown), "there is much to say of some"


def test_the_clearest_heads_have_the_words_of_their_rows_at_the_left(result):
    lines = bare(drawn(result, 80, Palette(24), 40)).splitlines()
    rows = [line for line in lines if "▀" in line or "▄" in line]
    assert any(re.search(r"captain / looked +[▀▄]+", line) for line in rows)
    assert sum("Head " in line for line in lines) >= 1


def test_in_a_longer_text_each_line_has_the_word_of_its_upper_row_alone():
    words = [f"w{i}" for i in range(211)]
    maps = AttentionMap(torch.zeros(1, 3, 211, 5), torch.zeros(1, 3, 211, 5), Scoring(causal()))
    lines = bare(drawn(view(maps, words=words), 80, Palette(24), 50)).splitlines()
    found = [re.findall(r"w\d+", line) for line in lines if re.match(r" *w\d+ [▀▄]", line)]
    tall = len({row[0] for row in found})
    assert [row[0] for row in found[:tall]] == [f"w{2 * i * 211 // (2 * tall)}" for i in range(tall)]
    assert len(found[0]) >= 2, "several heads"
    assert all(len(set(row)) == 1 for row in found)
    assert "tokens a cell · words name upper rows\nwithout the first token" in "\n".join(lines)


def test_the_numbers_of_heads_stand_over_their_cells(result):
    lines = bare(drawn(result, 80, Palette(24), 24)).splitlines()
    place = next(i for i, line in enumerate(lines) if re.fullmatch(r"( +\d){16} *", line))
    numbers = [match.start() for match in re.finditer(r"\d", lines[place])]
    letters = [match.start() for match in re.finditer(r"[a-zA-Z·]", lines[place + 1])]
    assert numbers == letters


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_what_is_said_is_wrapped_and_not_cut(result, width, depth):
    heading, *lines = bare(drawn(result, width, Palette(depth), 48)).splitlines()
    said = " ".join(line for line in lines if not re.search("[▀▄]", line)).replace("\u00a0", " ")
    for wanted in (
        "captain looked at the sea",
        "with no other pattern",
        "attention is not importance",
        "s and capitals",
    ):
        assert wanted in " ".join([heading, said])
    assert ("rows attend to columns" in said) == ("more color: more clearly" in said) == (depth > 0)
    assert depth or f"what it does {EXAMPLE}" in " ".join(said.split()) or width == 60
    assert "…" not in said.replace("…”", ""), "but for the text, of which the heading has the beginning"


@pytest.mark.parametrize("width", [60, 80])
def test_a_small_terminal_says_what_rows_columns_and_colors_are(width):
    lines = bare(drawn(view(load_builtin(), "To be, or not to be, that is the question."), width, Palette(24), 24))
    for wanted in ("rows attend to columns", "without the first token", "more color: more clearly", "with no"):
        assert wanted in lines
    assert "▀" in lines
    assert "…" not in "".join(line.removesuffix("· …") for line in lines.splitlines()[1:])


@pytest.mark.parametrize("depth", DEPTHS)
def test_that_no_head_has_a_pattern_is_said_in_the_width(depth):
    text = bare(drawn(view(load_builtin(), "hello"), 60, Palette(depth)))
    assert "No head has a clear pattern in this text; a longer one may show some." in text.replace("\n", " ")
    assert depth or "with “hello”" in text.replace("\n", " "), "with colors, these lines are for pictures"
    assert max(map(wide, text.splitlines())) <= 60


@pytest.mark.parametrize("width", [60, 80])
def test_the_largest_weight_of_a_long_row_is_whole(width):
    maps = AttentionMap(torch.zeros(1, 1, 2000, 5), torch.zeros(1, 1, 2000, 5), Scoring(causal()))
    words = [f"some{i}" for i in range(2000)]
    said = drawn(view(maps, words=words), width, Palette(0)).replace("\n", " ").replace("\u00a0", " ")
    assert re.search(r"→ +([\w,]+ +)*tokens, ≤ 0\.01", " ".join(said.split()))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(("text", "tokens"), [("Hi there", 4), ("To be, or not to be, that is the question", 13)])
def test_a_layer_draws_every_token_of_a_short_text(text, tokens, depth):
    result = view(load_builtin(), text)
    lines = bare(drawn_layer(result, 3, 80, 24, Palette(depth))).splitlines()
    assert tokens == result.T
    end = next(i for i, line in enumerate(lines) if line.startswith("3.0"))
    start = next(i for i, line in enumerate(lines) if line.endswith("tokens")) + 2
    assert end - start == (tokens if depth == 0 else -(-tokens // 2))
    assert not any("tokens a cell" in line for line in lines)


def test_a_larger_terminal_shows_more_heads(result):
    small, large = (bare(drawn(result, *size)) for size in ((80, Palette(24), 24), (160, Palette(24), 48)))
    assert large.count("Head ") >= 2 * small.count("Head ") > 0


def test_without_colors_there_is_a_table(result):
    lines = drawn(result, 80, Palette(0)).splitlines()
    place = next(i for i, line in enumerate(lines) if "what it does" in line)
    rows = [line for line in lines[place + 1 :] if "→" in line]
    assert len(rows) >= 3
    assert all(re.match(r" +\d+\.\d+  attends ", line) for line in rows)


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (200, 60)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_layer_fits_the_width_and_names_every_head(result, size, depth):
    lines = bare(drawn_layer(result, 3, *size, Palette(depth))).splitlines()
    assert max(map(wide, lines)) <= size[0]
    for head in range(8):
        assert any(f"3.{head}" in line for line in lines)
    if size != (40, 12):
        assert len(lines) <= size[1]


@pytest.mark.parametrize("depth", [0, 8, 24])
def test_under_a_picture_stands_all_that_its_head_does_and_what_is_left_out(result, depth):
    said = " ".join(bare(drawn_layer(result, 5, 160, 40, Palette(depth))).split())
    for head in result.summaries[5]:
        first, *rest = head.traits or [Trait("mixed", 0, 0)]
        assert f"5.{head.head} {first.name.removeprefix('first-token ')}" in said
        for trait in rest:
            assert f"rest: {trait.name} {trait.share:.2f}" in said
    assert sum(len(head.traits) > 1 for head in result.summaries[5]) >= 2
    assert "without the first token; sink: the weight on it" in said


def test_the_pictures_of_a_layer_leave_out_the_first_token(result):
    whole = bare(drawn_layer(result, 5, 160, 60, Palette(0))).splitlines()
    pictures = whole[3 : next(i for i, line in enumerate(whole) if line.startswith("5.0"))]
    assert result.maps[5][0, 0, 1:, 0].mean() > 0.3, "a sink, which would be the heaviest column"
    assert {line[:1] for line in pictures} <= {" ", ""}
    assert all(line[1:].strip() for line in pictures[1:])


def test_many_layers_and_heads_fit_too():
    maps = [AttentionMap(torch.randn(1, 32, 50, 8), torch.randn(1, 8, 50, 8)) for _ in range(40)]
    result = view(maps)
    for depth in (0, 24):
        lines = bare(drawn(result, 80, Palette(depth))).splitlines()
        assert len(lines) <= HEIGHT + 4
        assert any("more layers; --layer" in line for line in lines)
        assert max(map(wide, lines)) <= 80
    assert max(map(len, drawn_layer(result, 39, 80, 24, Palette(0)).splitlines())) <= 80


def test_thirty_layers_stand_side_by_side():
    result = view([AttentionMap(torch.randn(1, 9, 11, 5), torch.randn(1, 3, 11, 5)) for _ in range(30)])
    lines = bare(drawn(result, 120, Palette(24), 40)).splitlines()
    assert len(lines) < 40
    assert any(re.match(r" +0 .* 10 ", line) or re.match(r" +0 .* 15 ", line) for line in lines)


def test_one_token_is_shown():
    assert "1 layer × 3 heads · 1 token" in str(view(AttentionMap(torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8))))


def test_cross_attention_has_words_on_both_sides():
    layer = MultiHeadAttention(16, 2)
    with torch.no_grad():
        _, weights = layer(torch.randn(1, 3, 16), torch.randn(1, 5, 16), return_weights=True)
    result = view(weights, words=list("abc"), keys=list("vwxyz"))
    assert "3 tokens attending to 5" in result.sentence
    assert len(str(result).splitlines()) <= HEIGHT
    assert len(drawn_layer(result, 0, 40, 12, Palette(8)).splitlines()) <= 12


def test_every_head_has_the_letter_of_its_kind(result):
    lines = drawn(result, 80, Palette(0)).splitlines()
    letters = letters_of(head.summary.kind for head in result.heads)
    assert len(set(letters.values())) == len(letters)
    row = next(line for line in lines if line.startswith("  3 "))[4:].split()
    expected = [letters[head.kind] for head in result.summaries[3]]
    assert [sign.lower() for sign in row] == [sign.lower() for sign in expected]
    assert any("i induction" in line for line in lines)


def test_a_kind_that_nobody_knows_gets_a_letter_too():
    assert letters_of(["induction", "inward", "local"]) == {"induction": "i", "local": "l", "inward": "n"}


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


def test_the_pair_of_a_head_is_its_largest_weight_besides_the_first_token(result):
    for layer, number in ((4, 2), (3, 4), (1, 6)):
        weights = result.maps[layer][0, number].clone()
        weights[:, 0] = 0
        query, key = divmod(int(weights.argmax()), weights.shape[1])
        told = example(result, Head(layer, number, result.summaries[layer][number]))
        assert re.search(rf" {query} → .* {key}: {weights.max():.2f}$", told)


def test_a_broad_head_is_shown_by_a_row_that_is_spread_over_many_keys(result):
    found = [head for head in result.heads if head.summary.kind == "broad"]
    assert len(found) > 5
    for head in found:
        query, seen, most = map(float, re.search(r" (\d+) → (\d+) tokens, ≤ ([\d.]+)$", example(result, head)).groups())
        row = result.maps[head.layer][0, head.head, int(query), 1:]
        assert seen == (row > 0).sum() == query > 4
        assert 0 <= most - row.max().item() + 1e-6 < 0.0101, "a bound is never rounded down"


def test_the_pair_of_a_head_is_of_the_kind_that_the_head_is_named_for(result):
    ids = result.ids.tolist()
    for head in result.heads:
        pair = re.search(r" (\d+) → .* (\d+): ", example(result, head))
        query, key = map(int, pair.groups()) if pair else (0, 0)
        if head.summary.kind == "previous-token":
            assert query - key == 1
        if head.summary.kind == "induction":
            assert ids[key - 1] == ids[query]


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_says_what_its_numbers_leave_out(result, width):
    said = " ".join(drawn(result, width, Palette(0)).split())
    assert "example besides the first token" in said
    assert "% on the first token or a second sink: of all attention; other %: without the first token" in said
    assert "Weights in examples: as they are." in said


def test_a_table_of_many_layers_says_it_too():
    torch.manual_seed(0)
    key = torch.randn(1, 9, 40, 8)
    maps = [AttentionMap(0.01 * torch.randn(1, 9, 40, 8), key, Scoring(causal())) for _ in range(30)]
    said = " ".join(drawn(view(maps), 80, Palette(0)).split())
    assert "other %: without the first token" in said


def test_only_all_is_a_hundred_percent():
    assert [percent(share) for share in (1.0, 0.9951, 0.994, 0.5)] == [
        f"{text}\u00a0%" for text in ("100", "over 99", "99", "50")
    ]


def test_the_importance_of_heads_is_listed_if_it_was_measured(result):
    assert "Importance" not in drawn(result, 80, Palette(0), 48)
    measured = view(load_builtin(), TEXT, importance="silence")
    told = " ".join(drawn(measured, 80, Palette(0), 48).split())
    found = re.search(r"Importance, in nats per token \(its output set to zero\): (.*)\.$", told)[1].split(", ")
    effects = {head.place: measured.worth(head.layer, head.head) for head in measured.heads}
    assert len(found) == 8
    most = sorted(effects, key=lambda place: -abs(effects[place]))[:8]
    assert [one.split()[0] for one in found] == most
    assert float(found[0].split()[1].replace("−", "-")) == pytest.approx(effects[most[0]], abs=6e-4)
