"""A long page lists and draws the numbers of what it shows, and says where it has averages only."""

import re

import pytest
import torch

from headwise import load_builtin, view
from headwise.models import GPT, GPTConfig, LanguageModel
from headwise.view import page as pages

T = 1031  # too long to store every weight
TEXT = "The captain looked at the sea, and the sea looked at the captain. Then the captain laughed at the ship. "
APP = "document.getElementById('headwise').headwise"
HEAD, WORD = (1, 2), 447


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    tokenizer = load_builtin().tokenizer
    config = GPTConfig(tokenizer.get_vocab_size(), d_model=30, num_heads=3, num_layers=2, context_length=2 * T)
    network = GPT(config).eval().requires_grad_(False)
    for parameter in network.parameters():
        parameter *= 3  # clear preferences, so that the measures differ
    model = LanguageModel(network, tokenizer)
    return view(model, model.tokens(TEXT * 60, most=10**6)[:, :T], values=True)


@pytest.fixture(scope="module")
def saved(result, tmp_path_factory):
    return result.save(tmp_path_factory.mktemp("long") / "heads.html")


@pytest.fixture
def opened(browser):
    """Opens a page; whatever it complains of fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 800}, reduced_motion="reduce")
    troubles = []

    def open_at(path, fragment):
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(f"file://{path}#head={HEAD[0]}.{HEAD[1]}&{fragment}")
        page.wait_for_selector("html[data-ready=true]", state="attached")
        return page

    yield open_at
    context.close()
    assert not troubles


def pooled_row(result, what, span):
    """What the page may say of the queries around WORD, in ranges of `span` keys."""
    layer, head = HEAD
    dense = {
        "weights": lambda: result.maps[layer],
        "value": lambda: result.carried[layer].by_value,
        "contribution": lambda: result.carried[layer].contributions(),
    }[what]()[0, head].float()
    start = WORD // span * span
    rows = dense[start : start + span].mean(0)
    return torch.nn.functional.pad(rows, (0, -T % span)).view(-1, span).sum(1)


@pytest.mark.parametrize("what", ["value", "contribution"])
def test_the_lists_of_a_long_page_are_of_the_measure_that_is_shown(opened, result, saved, what):
    page = opened(saved, f"what={what}&word={WORD}")
    page.locator(".to .figure").first.wait_for()
    told = page.locator(".to").inner_text()
    span = page.evaluate(f"{APP}.data.spanOf({APP}.subject(), 'mass')")
    assert span > 1
    start = WORD // span * span
    assert f"averages over tokens {start}–{start + span - 1}" in told
    expected = pooled_row(result, what, span)
    best = expected[expected.abs().topk(5).indices].tolist()
    found = page.evaluate(f"{APP}.data.row({APP}.subject(), {WORD})")["weights"][:5]
    assert found == pytest.approx(best, abs=0.02)
    listed = [float(text.strip("<").replace("−", "-")) for text in page.locator(".to .figure").all_inner_texts()]
    assert listed == pytest.approx(found, abs=0.051)
    assert "not in this file" in page.locator(".from").inner_text()


def test_the_text_view_of_a_long_page_draws_what_is_shown(opened, saved):
    drawn = {}
    for what in ("weights", "value", "contribution"):
        page = opened(saved, f"view=words&what={what}&word={WORD}")
        page.wait_for_selector(".lines-tell .figure")
        drawn[what] = page.evaluate(f"{APP}.lines.row({WORD}).then((row) => [row.keys, row.weights])")
        coarse = "A bar is a group of" in page.locator(".legend").inner_text()
        assert coarse == (what != "weights")
    assert drawn["weights"] != drawn["value"] != drawn["contribution"] != drawn["weights"]


def test_where_numbers_are_of_groups_no_word_seems_to_attend_to_a_later_one(opened, saved):
    page = opened(saved, f"view=words&what=contribution&word={WORD}")
    page.locator(".lines-tell", has_text="is one of tokens").wait_for()
    span = page.evaluate(f"{APP}.lines.span")
    assert span > 1
    lit = page.locator(".word.lit").evaluate_all("words => words.map((word) => Number(word.dataset.i))")
    assert lit
    assert max(lit) <= WORD
    assert page.locator(".to-side .lines-word[style*=background]").count() == 0, "the bar of a group has the color"
    page.keyboard.press("Escape")
    drawn = page.evaluate(
        f"""(async () => {{
            const ends = [], {{ lines }} = {APP}, context = {{}};
            for (const name of ["fillRect", "beginPath", "moveTo", "stroke"]) context[name] = () => null;
            context.bezierCurveTo = (a, start, b, to, c, end) => ends.push([start, end]);
            for (const query of lines.queries(0, {T}))
                lines.curve(context, await lines.row(query), query, 0, 300, new Map());
            return ends;
        }})()"""
    )
    assert len(drawn) > 50
    assert all(end <= start for start, end in drawn)
    assert 50 < len({start for start, _ in drawn}) <= -(-T // span), "one for each group that has a line"


@pytest.mark.parametrize(
    ("what", "kind", "said"), [("weights", "mass", True), ("weights", "rest", False), ("contribution", "mass", False)]
)
def test_single_cells_are_announced_only_where_they_are_drawn(opened, saved, what, kind, said):
    page = opened(saved, f"view=map&what={what}&kind={kind}")
    page.locator(".limit", has_text="One pixel of this file covers").wait_for()
    assert ("drawn as single cells" in page.locator(".limit").inner_text()) == said


def test_hovering_over_a_long_map_of_contributions_gives_no_weight(opened, result, saved):
    page = opened(saved, "view=map&what=contribution")
    page.evaluate(f"{APP}.stage.point({{ query: {WORD}, key: {WORD - 1} }})")
    page.locator(".fact", has_text="tokens together").wait_for()
    span = page.evaluate(f"{APP}.data.spanOf({APP}.subject(), 'mass')")
    expected = float(pooled_row(result, "contribution", span)[(WORD - 1) // span])
    found = page.evaluate(f"{APP}.data.cell({APP}.subject(), {WORD}, {WORD - 1})")
    assert found["sum"] == pytest.approx(expected, abs=0.02)
    assert found["weight"] is None


@pytest.mark.parametrize(
    ("kind", "said"), [("peak", "largest attention weight of 4 × 4"), ("uniform", "uniform attention")]
)
def test_the_number_of_a_pixel_is_of_the_kind_that_is_drawn(opened, saved, kind, said):
    page = opened(saved, "view=map")
    drawn, pixel = page.evaluate(
        f"""(async () => {{
            const source = {APP}.data.source({APP}.subject());
            const [layer, head] = {list(HEAD)}, level = source.depth(layer, head, '{kind}');
            const {{ values, cols, span }} = await source.picture(layer, head, level, '{kind}');
            const at = Math.floor({WORD} / span) * cols + Math.floor({WORD - 1} / span);
            return [values[at], await source.pixel(layer, head, {WORD}, {WORD - 1}, '{kind}')];
        }})()"""
    )
    assert pixel["sum"] == drawn
    told = page.evaluate(
        f"{APP}.stage.figures({{ weight: null, sum: 1.25, span: 4, kind: '{kind}', error: 0 }}).innerText"
    )
    assert said in told
    assert ("1.25×" in told) == (kind == "uniform")


def test_the_heads_of_a_word_are_ranked_by_its_own_weights(opened, result, saved):
    page = opened(saved, f"word={WORD}")
    page.locator(".ranked li").first.wait_for()
    rows = {f"{layer}.{head}": result.maps[layer][0, head, WORD, 1:] for layer in range(2) for head in range(3)}
    expected = sorted(rows, key=lambda place: -float(rows[place].max()))
    assert page.locator(".ranked b").all_inner_texts() == expected
    found = [float(text) for text in page.locator(".ranked .figure").all_inner_texts()]
    assert found == pytest.approx([float(rows[place].max()) for place in expected], abs=0.011)
    keys = [int(text) for text in page.locator(".ranked .place").all_inner_texts()]
    assert keys == [1 + int(rows[place].argmax()) for place in expected]


def test_a_ranking_from_pictures_says_how_many_tokens_it_averages(opened, result, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RANKING", 0)
    page = opened(result.save(tmp_path / "heads.html"), f"word={WORD}")
    page.locator(".ranked", has_text="averages over tokens").wait_for()
    assert "tokens" in page.locator(".ranked li").first.inner_text()


def test_the_bars_of_a_long_map_say_how_many_tokens_each_covers(opened, saved):
    page = opened(saved, "view=map")
    page.locator(".edges", has_text="Each bar covers 2 tokens").wait_for()


def test_a_weight_stored_as_nought_has_no_rank_of_its_own(opened, saved):
    page = opened(saved, "view=map")
    told = page.evaluate(
        f"[0, 0.5].map((weight) => {APP}.stage.rank({{ weight, error: 1e-5, rank: 57, visible: 372 }})[0].innerText)"
    )
    assert told == ["below #56 of 372 in its row", "≈ #57 of 372 in its row"]


def test_the_number_of_a_word_is_written_alike_everywhere(opened, saved):
    page = opened(saved, "word=1030&without=")
    page.locator(".list li").first.wait_for()
    title = page.locator(".details-title").inner_text()
    assert " 1,030 · " in title
    assert not re.search(r"\d{4}", page.locator(".details").inner_text())
