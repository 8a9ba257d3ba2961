"""Every control of the page changes what is seen, at every length; what it shows is what Python computes."""

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import headwise
from headwise import AttentionMap, Scoring, causal, load_builtin, view
from headwise.models import GPT, GPTConfig, LanguageModel

TEXT = "The captain looked at the sea, and the sea looked at the captain. Then the captain laughed at the ship. "
APP = "document.getElementById('headwise').headwise"
# Everything that a hand can use in the page, besides words, heads and rows of tables.
EVERYWHERE = ".tools button, .tools summary, .find"
OF_A_VIEW = ", ".join(
    f".{bar} {kind}" for bar in ("settings", "options", "bar-row") for kind in ("button", "input", "select")
)
VIEWS = {"atlas": ".atlas-body", "words": ".lines-box", "map": ".maps", "table": ".table"}
FRESH = {
    "head": "1.1", "with": "", "show": "difference", "kind": "mass", "at": "", "word": "", "sort": "place",
    "color": "none", "without": "1", "rows": "1", "contrast": "2",
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    tokenizer = load_builtin().tokenizer
    config = GPTConfig(tokenizer.get_vocab_size(), d_model=30, num_heads=3, num_layers=2, context_length=4096)
    return LanguageModel(GPT(config).eval().requires_grad_(False), tokenizer)


@pytest.fixture(scope="module")
def open_view(browser, tmp_path_factory):
    """Opens the page of a view; whatever it complains of fails the test."""
    context = browser.new_context(viewport={"width": 900, "height": 600}, reduced_motion="reduce")
    troubles = []

    def opened(result, fragment="", against=None):
        path = result.save(tmp_path_factory.mktemp("page") / "heads.html", against=against)
        page = context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(f"file://{path}{fragment}")
        until(page, "document.documentElement.dataset.ready === 'true'")
        return page

    yield opened
    context.close()
    assert not troubles


def until(page, expression, seconds=20):
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(20)


def resize(page, width, height):
    """Give the window a size, and wait until the page has drawn for it: it hears of the size with the next frame."""
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")
    until(page, RESTING)


def picture(page, part=None):
    """The pixels of the window, or of what a view shows below its controls, which change by themselves."""
    clip = None
    if part is not None:
        box = page.locator(part).bounding_box()
        clip = {"x": box["x"], "y": box["y"], "width": box["width"], "height": max(50, 600 - box["y"])}
    return page.screenshot(type="jpeg", quality=60, clip=clip)


RESTING = "document.getElementById('headwise').headwise.resting"


def settled(page, part, seconds=20):
    """A picture once it no longer changes."""
    end, before = time.monotonic() + seconds, None
    while True:
        resting, now = page.evaluate(RESTING), picture(page, part)
        if resting and now == before:
            return now
        assert time.monotonic() < end, "the page never comes to rest"
        before = now


def reset(page, name, what):
    """The state in which a page begins, in another view."""
    page.evaluate(
        """(state) => {
            const app = document.getElementById('headwise').headwise;
            app.help.close();
            document.querySelector('.menu').open = false;
            document.documentElement.style.colorScheme = 'light';
            app.reading.find.value = '';
            app.reading.search();
            app.store.set(state);
            app.recolor();
        }""",
        {**FRESH, "view": name, "what": what},
    )
    page.mouse.move(1, 1)


def use(page, control):
    """Use a control as a hand would; whether there was anything to choose."""
    kind = control.evaluate("node => [node.tagName, node.type || '']")
    if kind[0] == "SELECT":
        options = control.evaluate("node => Array.from(node.options, option => option.value)")
        others = [value for value in options if value != control.input_value()]
        control.select_option(others[min(1, len(others) - 1)])
    elif kind[1] == "range":
        control.focus()
        page.keyboard.press("ArrowRight")
    elif kind[1] == "search":
        control.fill("captain")
    else:
        control.click()


def unused(page, selector):
    """The controls that a hand can use and that are not already chosen, as indices."""
    return page.locator(selector).evaluate_all(
        "nodes => nodes.flatMap((node, i) => node.checkVisibility() && !node.disabled"
        " && node.ariaSelected !== 'true' && node.ariaChecked !== 'true' ? [i] : [])"
    )


@pytest.mark.parametrize(("tokens", "what"), [(60, "weights"), (600, "contribution"), (2000, "value")])
def test_every_control_changes_what_is_seen(open_view, model, tokens, what):
    ids = model.tokens(TEXT * (tokens // 20 + 1), most=10**6)[:, :tokens]
    page = open_view(view(model, ids, values=True))
    tried = 0
    for name, selector, part in [
        ("atlas", EVERYWHERE, None),
        *((name, OF_A_VIEW, part) for name, part in VIEWS.items()),
    ]:
        reset(page, name, what)
        for index in unused(page, selector):
            before, control = settled(page, part), page.locator(selector).nth(index)
            label = control.evaluate("node => node.ariaLabel || node.textContent || node.parentNode.textContent")
            use(page, control)
            end = time.monotonic() + 3
            while page.locator(part or "main").count() and picture(page, part) == before:
                assert time.monotonic() < end, f"{name} at {tokens} tokens: {label!r} changes nothing"
            reset(page, name, what)
            tried += 1
    assert tried > 24


# What the page shows of what weights carry.


@pytest.fixture(scope="module")
def builtin():
    return load_builtin()


def matrix(page, measure, kind="mass", size=256):
    found = page.evaluate(
        f"([measure, kind]) => {APP}.side.source.as(measure).tile(4, 2, {APP}.side.manifest.levels, 0, 0, kind)"
        ".then(found => Array.from(found))",
        [measure, kind],
    )
    return torch.tensor(found).view(256, 256)[:size, :size]


def test_what_weights_carry_is_that_of_python(open_view, builtin):
    result = view(builtin, TEXT * 3)
    page, layer, T = open_view(result), result.carried[4], result.T
    torch.testing.assert_close(matrix(page, "value", size=T), layer.by_value[0, 2].float(), atol=1e-6, rtol=1e-4)
    without = layer.by_value.without(headwise.sink(1))[0, 2].float()
    torch.testing.assert_close(matrix(page, "value", "rest", T), without, atol=1e-6, rtol=1e-4)
    shares = layer.contributions()[0, 2].float()
    step = 2 * shares.abs().max().sqrt() / 127  # of the root of a share, in a byte
    assert (matrix(page, "contribution", size=T) - shares).abs().max() < step * shares.abs().max().sqrt()
    torch.testing.assert_close(matrix(page, "weights", size=T), result.maps[4][0, 2], atol=1e-6, rtol=1e-4)


def test_the_sentence_says_what_is_shown_and_the_lists_follow(open_view, builtin):
    result = view(builtin, TEXT)
    page = open_view(result, "#head=4.2")
    assert page.locator(".shown").inner_text().startswith("Shown: attention weights")
    for name, title, words in (
        ("value", "Weights × what they carry", "takes most from"),
        ("contribution", "Contributions", "takes most from"),
    ):
        page.get_by_role("radio", name=title).click()
        told = page.locator(".shown").inner_text()
        assert told.startswith("Shown: " + ("weights × what they carry" if name == "value" else "contributions"))
        page.locator('.word[data-i="9"]').hover()
        until(page, f"document.querySelector('.to h3')?.textContent === '{words}'")
        expected = result.carried[4].row(name, 2, 9).float()
        best = expected[expected.abs().topk(5).indices].tolist()
        until(page, f"Math.abs(parseFloat(document.querySelector('.to .figure').textContent) - {best[0]}) < 0.02")
        found = [float(x.replace("−", "-")) for x in page.locator(".to .figure").all_inner_texts()]
        assert found == pytest.approx(best, abs=0.02)
    until(page, "location.hash.includes('what=contribution')")
    page.keyboard.press("w")
    assert page.locator(".shown").inner_text().startswith("Shown: attention weights")


def test_a_long_page_has_pictures_of_what_weights_carry(open_view, model):
    ids = model.tokens(TEXT * 100, most=10**6)[:, :1500]
    result = view(model, ids, values=True)
    page = open_view(result, "#what=contribution&view=map")
    found = page.evaluate(
        f"Promise.all(['value', 'contribution'].map(async (name) => {{ const source = {APP}.side.source.as(name);"
        " const picture = await source.picture(1, 2, source.depth(1, 2, 'mass'), 'mass');"
        " return [picture.span, picture.rows, Array.from(picture.values)]; }))"
    )
    expected = result.carried[1].by_value, result.carried[1].contributions()
    for (span, rows, values), whole in zip(found, expected, strict=True):
        dense = whole[0, 2].float()
        dense = torch.nn.functional.pad(dense, (0, -1500 % span, 0, -1500 % span))
        pooled = dense.view(rows, span, rows, span).sum(3).mean(1)
        pooled[-1] *= span / (1500 - (rows - 1) * span)
        assert (torch.tensor(values).view(rows, rows) - pooled).abs().max() < 0.03
    page.locator(".limit", has_text="contributions. For every single contribution").wait_for()


def test_heads_are_colored_by_what_they_are_worth(open_view, builtin):
    result = view(builtin, TEXT, importance="silence")
    page = open_view(result)
    told = page.locator('.head[data-place="3.5"] .bar-text').inner_text()
    assert float(told.replace("−", "-")) == pytest.approx(result.worth(3, 5), abs=6e-4)
    assert "its output set to zero" in page.locator(".about").inner_text()
    colors = page.evaluate("Array.from(document.querySelectorAll('.bar-fill'), (x) => x.style.background)")
    assert len(set(colors)) > 20
    page.keyboard.press("4")
    head = page.locator("tbody tr", has=page.get_by_role("button", name="3.5", exact=True))
    assert re.search(r"[+−]0\.\d{3}", head.inner_text())


def test_the_token_that_is_left_out_is_the_first_that_is_not_padding(open_view):
    mask = headwise.padding(torch.tensor([[False] * 4 + [True] * 19])) & headwise.causal()
    weights = headwise.AttentionMap(torch.randn(1, 1, 23, 5), torch.randn(1, 1, 23, 5), headwise.Scoring(mask=mask))
    page = open_view(view(weights))
    found = page.evaluate(f"{APP}.side.source.tile(0, 0, 0, 0, 0, 'rest').then(found => Array.from(found))")
    expected = weights.without(headwise.sink(1))[0, 0]
    real = torch.tensor(found).view(256, 256)[5:23, :23]  # the first real token has nothing else to attend to
    torch.testing.assert_close(real, expected[5:], atol=1e-6, rtol=1e-4)
    assert not real[:, 4].any()


def test_a_comparison_says_what_is_subtracted_from_what(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=4.2&with=3.7")
    assert page.locator(".subject").inner_text().startswith("Heads 4.2 minus 3.7")
    assert "the difference of two heads (4.2 minus 3.7)" in page.locator(".shown").inner_text()
    page.get_by_role("radio", name="Other").click()
    assert page.locator(".shown").inner_text().startswith("Shown: attention weights")


def test_the_sentence_says_that_weights_are_multiples_of_uniform_attention(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=4.2&kind=uniform")
    assert page.locator(".shown").inner_text().startswith("Shown: weights as multiples of uniform attention")
    page.get_by_role("radio", name="All tokens").click()
    assert page.locator(".shown").inner_text().startswith("Shown: attention weights")


def test_the_caption_says_how_heads_are_sorted(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#sort=entropy")
    assert "Sorted by entropy, the highest first" in page.locator(".atlas-tell").inner_text()
    page.get_by_label("Sort by").select_option("place")
    assert "Layers run from top to bottom" in page.locator(".atlas-tell").inner_text()


def test_a_statistic_that_was_not_measured_is_not_shown(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#color=importance&sort=importance")
    assert page.get_by_label("Bars").input_value() == "none"
    assert page.get_by_label("Sort by").input_value() == "place"
    assert page.locator(".bar-text:visible").count() == 0


def test_an_excerpt_has_dots_only_where_it_leaves_something_out(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=4.2")
    page.evaluate(f"{APP}.stage.point({{ query: 9, key: 2 }})")
    page.locator(".snippet.from").wait_for()
    assert page.locator(".snippet.to").inner_text().startswith("…")
    assert page.locator(".snippet.from").inner_text().startswith("<|start|>")


def test_contributions_of_a_short_text_are_as_precise_as_they_look(open_view, builtin):
    result = view(builtin, TEXT)
    page = open_view(result, "#view=map&head=5.4&what=contribution")
    assert page.locator(".noted").inner_text() == ""
    for query, key in ((0, 0), (8, 7), (9, 0)):
        page.evaluate(f"{APP}.stage.point({{ query: {query}, key: {key} }})")
        exact = float(result.carried[5].row("contribution", 4, query)[key])
        until(page, f"Math.abs(document.querySelector('.facts')?.dataset.weight - {exact}) < 6e-4")
        told = page.locator(".fact b").first.inner_text().replace("−", "-").removeprefix("≈ ")
        assert float(told) == pytest.approx(exact, abs=1.1e-3)


@pytest.mark.parametrize("what", ["weights", "contribution"])
def test_numbers_in_bytes_have_no_more_digits_than_are_true(open_view, builtin, what, monkeypatch):
    from headwise.view import page as pages

    monkeypatch.setattr(pages, "PRECISIONS", (63,))
    monkeypatch.setattr(pages, "CELLS", pages.CELLS[1:])
    result = view(builtin, TEXT)
    page = open_view(result, f"#view=map&head=4.2&what={what}&without=")
    assert "in one byte" in page.locator(".noted").inner_text()
    rows = result.maps[4][0, 2] if what == "weights" else result.carried[4].contributions()[0, 2]
    for query in (3, 9, 17):
        key = int(rows[query].argmax())
        page.evaluate(f"{APP}.stage.point({{ query: {query}, key: {key} }})")
        exact = float(rows[query, key])
        until(page, f"Math.abs(document.querySelector('.facts')?.dataset.weight - {exact}) < 0.03")
        told = page.locator(".fact b").first.inner_text()
        digits = len(told.partition(".")[2])
        assert digits < 3
        assert float(told) == pytest.approx(exact, abs=1.1 * 10**-digits)
        if what == "weights":
            times = page.locator(".fact b").nth(1).inner_text().rstrip("×")
            unit = 10.0 ** -len(times.partition(".")[2])
            assert float(times) == pytest.approx(exact * (query + 1), abs=1.1 * unit)


def test_pictures_fade_by_what_is_shown(open_view, builtin):
    result = view(builtin, TEXT)
    page = open_view(result, "#what=value")
    until(page, RESTING)
    faint = page.locator(".head:has(canvas.faint)").evaluate_all("heads => heads.map((head) => head.dataset.place)")
    expected = [
        f"{layer}.{head}"
        for layer, found in enumerate(result.carried)
        for head, rows in enumerate(found.by_value[0, :, 1:, 0].float())
        if rows.mean() > 0.5
    ]
    assert faint == expected
    assert 0 < len(faint) < 28
    page.get_by_role("radio", name="Contributions").click()
    until(page, f"{RESTING} && !document.querySelector('canvas.faint')")
    assert "faint" not in page.locator(".legend-name").first.inner_text()


def test_an_average_leads_back_to_the_head_it_was_chosen_from(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=5.4")
    chooser = page.locator(".controls select").first
    for average in ("5.*", "*.*", "*.4"):
        chooser.select_option(average)
        assert chooser.input_value() == average
        assert chooser.locator("option").count() == 4
        chooser.select_option("5.4")
        assert page.locator(".subject").inner_text().startswith("Head 5.4")


def test_two_maps_stand_side_by_side(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=5.4&with=4.2&show=both")
    resize(page, 1440, 900)
    until(page, RESTING)
    left, right = (frame.bounding_box() for frame in page.locator(".map-frame").all())
    assert left["y"] == right["y"]
    assert right["x"] >= left["x"] + left["width"]
    assert right["y"] + right["height"] <= 900


def told(page, query, key):
    """What the page says about one pair under the cursor."""
    page.evaluate(f"{APP}.stage.tell({{ query: {query}, key: {key} }})")
    until(page, f"{APP}.resting")
    return page.locator(".info").inner_text().replace("\n", " ")


def test_the_other_head_is_named_and_read_where_it_is_drawn(open_view, builtin):
    result = view(builtin, TEXT)
    page = open_view(result, "#view=map&head=5.4&with=4.2&show=b")
    until(page, f"{APP}.resting")
    assert page.locator(".subject b").inner_text() == "Head 4.2"
    weight = float(result.maps[4][0, 2, 9, 8])
    assert f"{weight:.3f} weight" in told(page, 9, 8)


def test_a_difference_is_told_as_it_is_drawn(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=4.2&with=3.7")
    until(page, RESTING)
    words = told(page, 9, 8)
    drawn = page.evaluate(f"{APP}.stage.shown[0].tiles.value(9, 8)")
    number, mine, its = re.match(r".*?([+−]\S+) difference, as drawn \((\S+) here, (\S+) there\)", words).groups()
    assert float(number.replace("−", "-")) == pytest.approx(drawn, abs=6e-4)
    assert float(mine) - float(its) == pytest.approx(drawn, abs=1.1e-3)
    assert words.count("as drawn") == 1


@pytest.fixture(scope="module")
def two_texts(builtin):
    """Views of two texts of different length."""
    return view(builtin, TEXT), view(builtin, "The dog saw the ship, and the ship saw the dog.")


def test_a_small_weight_is_not_told_as_nought(open_view, builtin):
    result = view(builtin, TEXT)
    page = open_view(result, "#view=map&head=5.4&without=")
    until(page, RESTING)
    query, key = divmod(
        int(result.maps[5][0, 4].tril(-1).masked_fill(torch.ones(result.T, result.T).triu().bool(), 1).argmin()),
        result.T,
    )
    assert "< 0.001 weight" in told(page, query, key)
    for value, text in ((0, "< 0.001"), (2.4e-4, "< 0.001"), (0.0006, "0.001"), (0.5, "0.500")):
        assert page.evaluate(f"window.headwise.weightText({value})") == text


def test_a_comparison_names_both_texts_and_offers_the_same_head_first(open_view, two_texts):
    page = open_view(two_texts[0], "#view=map&head=4.2&with=b:4.2", against=two_texts[1])
    heading = page.locator("h1").inner_text()
    assert heading == page.title() == two_texts[0].compared(two_texts[1])
    assert "“The captain" in heading
    assert "compared with “The dog" in heading
    until(page, RESTING)
    options = page.locator(".chooser", has_text="Compare with").locator("option").all_inner_texts()
    assert options[:3] == ["nothing", "dog: 4.2  previous", "0.0  sink"]
    assert page.get_by_role("radio", name="Side by side").get_attribute("aria-checked") == "true"
    page.get_by_role("radio", name="This").click()
    assert page.locator(".map-frame").count() == 1
    assert page.get_by_role("radio", name="This").get_attribute("aria-checked") == "true"


def test_the_map_of_another_text_is_told_in_its_words(open_view, two_texts):
    page = open_view(two_texts[0], "#view=map&head=4.2&with=b:4.2&show=both", against=two_texts[1])
    until(page, RESTING)
    page.locator(".map-canvas").nth(1).hover(position={"x": 130, "y": 150})
    until(page, f"{APP}.resting && document.querySelector('.facts')")
    cell = page.evaluate(f"{APP}.stage.shown[1].cursor")
    words = page.locator(".info").inner_text()
    assert words.split()[0] == two_texts[1].labels[cell["query"]].strip()
    assert page.evaluate(f"{APP}.reading.at") is None, "no word of this text is pointed at"
    assert page.evaluate("getComputedStyle(document.querySelector('.stage-map')).color") == page.evaluate(
        "getComputedStyle(document.querySelector('.main')).color"
    ), "it stays black"


def test_an_excerpt_writes_each_character_once(open_view, builtin):
    page = open_view(view(builtin, "東京 😀 שלום"), "#view=map&head=4.2")
    until(page, RESTING)
    for query in range(view(builtin, "東京 😀 שלום").T):
        told(page, query, 2)
        excerpt = page.locator(".snippet.to").inner_text()
        assert all(excerpt.count(letter) <= 1 for letter in "東京😀שלום"), excerpt


def test_a_pair_behind_the_mask_is_not_said_to_attend(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=4.2")
    until(page, f"{APP}.resting")
    words = told(page, 3, 9)
    assert "may not attend to" in words
    assert "hidden by the mask, so the weight is 0" in words


def test_the_ends_of_a_scale_of_differences_say_that_there_may_be_more(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=5.4&with=4.2&show=difference")
    until(page, f"{APP}.resting")
    ticks = page.locator(".maps-legend .tick, .legend .tick").all_inner_texts()
    assert ticks[0].startswith("≤ −")
    assert ticks[-1].startswith("≥ +")


# What a reader must not have to guess.


def test_every_view_says_in_one_place_which_tokens_count(open_view, builtin):
    result = view(builtin, TEXT)
    page = open_view(result, "#head=4.2")
    weight = float(result.maps[4].without(headwise.sink(1))[0, 2, 9, 8])
    for name in VIEWS:
        page.evaluate(f"{APP}.store.set({{ view: '{name}', without: '1' }})")
        assert page.locator('.settings .kinds [aria-checked="true"]').inner_text() == "Without first token"
        assert "Without the first token, to which" in page.locator(".shown").inner_text()
        page.locator(".settings .kinds").get_by_role("radio", name="All tokens").click()
        assert "All tokens count." in page.locator(".shown").inner_text()
    page.evaluate(f"{APP}.store.set({{ view: 'map', without: '1' }})")
    until(page, RESTING)
    assert page.evaluate(f"{APP}.stage.shown[0].tiles.value(9, 8)") == pytest.approx(weight, abs=1e-6)
    assert f"{weight:.3f} without the first token, as drawn" in told(page, 9, 8)
    assert f"{float(result.maps[4][0, 2, 9, 8]):.3f} weight, where all tokens count" in told(page, 9, 8)


def test_an_address_of_a_map_without_the_first_token_still_opens_it(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&kind=rest&head=4.2")
    assert page.evaluate(f"[{APP}.kind, {APP}.store.get('without')]") == ["rest", "1"]


def test_the_legend_names_the_weight_from_which_lines_are_drawn(open_view, builtin):
    result = view(builtin, TEXT)
    page = open_view(result, "#view=words&head=1.2")
    resize(page, 1440, 1400)
    until(page, f"{RESTING} && {APP}.lines.drawn && {APP}.lines.window()[1] === {result.T}")
    assert "Lines start at 0.02; a word that you point at has all" in page.locator(".legend-name").inner_text()
    strokes = f"""(() => {{
        const context = {APP}.lines.canvas.getContext('2d');
        let count = 0;
        context.stroke = () => count++;
        {APP}.lines.draw();
        delete context.stroke;
        return count;
    }})()"""
    rows = result.maps[1].without(headwise.sink(1))[0, 2]
    assert page.evaluate(strokes) == int((rows >= 0.02).sum())
    page.evaluate(f"{APP}.lock(9)")
    until(page, f"{RESTING} && {APP}.lines.at === 9 && {APP}.lines.drawn")
    assert page.evaluate(strokes) == 9, "every word that it may attend to but the first"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_column_of_the_table_is_cut_on_a_wide_screen(open_view, builtin, scheme):
    page = open_view(view(builtin, TEXT, importance=True), "#view=table")
    page.emulate_media(color_scheme=scheme)
    resize(page, 1440, 900)
    until(page, RESTING)
    beyond = "(({ scrollWidth, clientWidth }) => scrollWidth - clientWidth)(document.querySelector('.table'))"
    assert page.evaluate(beyond) == 0
    until(page, "document.querySelector('#table-note b').hidden")
    resize(page, 700, 900)
    page.locator(".table").evaluate("(box) => box.scrollTo(400, 0)")
    left, box = (page.locator(part).first.bounding_box()["x"] for part in ("tbody th", ".table"))
    assert left - box < 2, "the names of heads stay in view"


def test_the_crosshair_leaves_the_colors_of_the_map_as_they_are(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=4.2")
    resize(page, 1440, 1000)
    until(page, RESTING)
    colors = f"""(() => {{
        const {{ canvas, pads, view }} = {APP}.stage.shown[0];
        const ratio = window.devicePixelRatio;
        const context = new OffscreenCanvas(canvas.width, canvas.height)
            .getContext('2d', {{ willReadFrequently: true }});
        context.drawImage(canvas, 0, 0);
        const at = (i, pad) => Math.round((pad + (i + 0.5) * view.scale) * ratio);
        const found = [];
        for (let q = 0; q < 20; q++) for (let k = 0; k < 20; k++) {{
            const pixel = context.getImageData(at(k, pads.left), at(q, pads.top), 1, 1);
            if (q !== 12 || k !== 5) found.push(...pixel.data);
        }}
        return found.join();
    }})()"""
    before = page.evaluate(colors)
    page.evaluate(f"{APP}.stage.point({{ query: 12, key: 5 }})")
    until(page, f"{RESTING} && document.querySelector('.facts')")
    assert page.evaluate(colors) == before


@pytest.mark.parametrize(("width", "height"), [(800, 1000), (390, 844)])
@pytest.mark.parametrize("name", list(VIEWS))
def test_in_a_narrow_window_controls_stand_above_what_they_change(open_view, builtin, width, height, name):
    page = open_view(view(builtin, TEXT), f"#view={name}")
    resize(page, width, height)
    until(page, RESTING)
    picture = page.locator(VIEWS[name]).bounding_box()
    controls = page.locator(f"{OF_A_VIEW}, .legend-ramp")
    lowest = max(box["y"] + box["height"] for box in (one.bounding_box() for one in controls.all()) if box)
    assert lowest <= picture["y"]
    assert picture["y"] < 0.62 * height, "most of the picture is on the first screen"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_frames_around_heads_are_explained_while_a_word_is_pointed_at(open_view, builtin):
    page = open_view(view(builtin, TEXT))
    page.locator('.word[data-i="9"]').hover()
    until(page, "document.querySelectorAll('.head.top').length === 8")
    assert page.locator(".atlas-tell").inner_text().startswith("Framed: the 8 heads that attend most from this word")
    assert "paler" not in page.locator(".atlas-tell").inner_text(), "framed heads may be faint"
    page.mouse.move(450, 2)
    until(page, "document.querySelector('.atlas-tell').textContent.startsWith('Each picture is one head')")


def test_the_text_ends_in_the_window(open_view, builtin):
    page = open_view(view(builtin, TEXT * 9))
    resize(page, 1440, 900)
    until(page, f"{RESTING} && document.querySelector('.reading').getBoundingClientRect().bottom <= 900")
    assert page.evaluate("document.documentElement.scrollHeight") <= 900


def test_a_map_between_two_texts_has_no_bars_of_distance(open_view):
    weights = headwise.AttentionMap(torch.randn(1, 2, 7, 5), torch.randn(1, 2, 11, 5))
    page = open_view(view(weights, words=list("abcdefg"), keys=list("mnopqrstuvw")), "#view=map")
    resize(page, 1440, 900)
    until(page, f"{RESTING} && {APP}.stage.shown[0].width > 600")
    until(page, RESTING)
    assert "entropy in nats of each query" in page.locator(".edges").inner_text()
    page.locator(".menu summary").click()
    with page.expect_download() as download:
        page.locator(".menu-list button", has_text="SVG").click()
    drawing = Path(download.value.path()).read_text(encoding="utf-8")
    assert "entropy" in drawing
    assert "distance" not in drawing


def test_every_number_of_a_legend_is_on_one_line(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#what=contribution")
    until(page, RESTING)
    heights = page.locator(".tick").evaluate_all("ticks => ticks.map((tick) => tick.getBoundingClientRect().height)")
    assert len(heights) == 3
    assert max(heights) < 20


def test_the_page_of_a_text_longer_than_the_training_says_so(open_view):
    torch.manual_seed(0)
    tokenizer = load_builtin().tokenizer
    config = GPTConfig(tokenizer.get_vocab_size(), d_model=16, num_heads=1, num_layers=1, context_length=16)
    short = LanguageModel(GPT(config).eval().requires_grad_(False), tokenizer)
    ids = short.tokens(TEXT, most=10**6)
    for length, said in [(16, False), (20, True)]:
        page = open_view(view(short, ids[:, :length]))
        assert ("20 tokens and the model was trained for 16" in page.locator(".noted").inner_text()) == said


def test_a_bar_is_as_long_as_its_number_which_stands_beside_it(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#color=entropy")
    resize(page, 1440, 900)
    until(page, RESTING)
    bars = page.evaluate(
        """Array.from(document.querySelectorAll('.bar'), (bar) => {
            const [fill, text] = Array.from(bar.children, (one) => one.getBoundingClientRect());
            return [Number(bar.innerText), fill.width, fill.right, text.left];
        })"""
    )
    longest = max(width / value for value, width, *_ in bars)
    assert len({round(width) for value, width, *_ in bars if value > 0.6}) > 3
    for value, width, right, left in bars:
        assert width == pytest.approx(longest * value, abs=1)
        assert right <= left


def test_the_largest_importance_ends_a_legend_of_its_own(open_view, builtin):
    result = view(builtin, TEXT, importance=True)
    page = open_view(result, "#color=importance")
    until(page, RESTING)
    ticks = page.locator(".legend-scale").nth(1).locator(".tick").all_inner_texts()
    largest = max(
        abs(worth) for layer in result.to_dict()["layers"] for worth in (h["importance"] for h in layer["heads"])
    )
    assert float(ticks[-1].removeprefix("≥ +")) == pytest.approx(largest, rel=0.06)
    assert ticks[0] == ticks[-1].replace("≥ +", "≤ −")


def test_the_caption_says_whether_layers_run_on_in_another_column(open_view):
    weights = AttentionMap(torch.randn(1, 2, 7, 5), torch.randn(1, 2, 7, 5), Scoring(causal()))
    told = []
    for layers in (2, 40):
        page = open_view(view([weights] * layers))
        until(page, RESTING)
        left = "Array.from(document.querySelectorAll('.layer'), (one) => one.getBoundingClientRect().left)"
        told.append(page.locator(".atlas-tell").inner_text().endswith("top to bottom, column by column."))
        assert told[-1] == (page.evaluate(f"new Set({left}).size") > 1)
    assert told[1]


def test_the_text_view_says_that_only_the_map_compares(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=words&head=4.2&with=3.7")
    assert page.locator(".subject").inner_text().endswith("only the map compares it with 3.7")
    assert page.locator(".legend-name").inner_text().endswith("Percent beside a word: the share left out")


def test_the_frame_of_a_head_in_the_top_row_is_whole(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#head=0.0")
    resize(page, 1440, 900)
    box, head = (page.locator(one).bounding_box() for one in (".atlas", '.head[aria-current="true"] .picture'))
    assert head["y"] - box["y"] >= 4


@pytest.mark.parametrize(("width", "least"), [(390, 60), (800, 100)])
def test_the_controls_of_a_comparison_do_not_overlap(open_view, builtin, width, least):
    page = open_view(view(builtin, TEXT), "#view=map&head=0.5&with=1.2")
    resize(page, width, 844)
    until(page, RESTING)
    rows = page.evaluate(
        """['.controls select', '.controls .chooser', '.legend .tick'].map((names) =>
            Array.from(document.querySelectorAll(names), (one) => one.getBoundingClientRect().toJSON()))"""
    )
    for boxes in rows:
        for one, after in pairwise(boxes):
            assert one["right"] <= after["left"] or one["bottom"] <= after["top"]
    assert all(box["width"] >= least for box in rows[0])


def test_marks_of_a_saved_text_stand_beside_its_words_and_end_with_them(open_view, builtin):
    page = open_view(view(builtin, f"{TEXT} " * 4), "#view=words&head=5.4")
    until(page, RESTING)
    written = page.evaluate(
        f"""(() => {{
            const context = document.createElement('canvas').getContext('2d');
            const found = [];
            context.fillText = (text, x, y) => found.push([text, x, y, context.measureText(text).width]);
            {APP}.lines.render(context, {APP}.colors());
            return [found, {APP}.lines.size[1]];
        }})()"""
    )
    (texts, height), marks = written, 0
    for (word, x, y, wide), (text, at, beside, _) in pairwise(texts):
        assert max(y, beside) <= height
        if text.startswith("−"):
            marks += 1
            assert (at, beside) == (pytest.approx(x - wide - 8), y), word
    assert marks > 5


def test_columns_of_numbers_have_one_width(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=table")
    resize(page, 1440, 900)
    until(page, RESTING)
    wide = page.locator(".number-head").evaluate_all("all => all.map((one) => one.offsetWidth)")
    assert max(wide) <= 1.6 * min(wide)
    assert page.locator("td.reading-cell").first.bounding_box()["width"] > 2.5 * max(wide)


# What a fresh reader stumbled over.


@pytest.mark.parametrize("tokens", [60, 600])
def test_the_whole_map_is_in_the_window(open_view, model, tokens):
    ids = model.tokens(TEXT * 30, most=10**6)[:, :tokens]
    page = open_view(view(model, ids), "#view=map&head=1.1")
    for width, height, least in ((1440, 900, 480), (1366, 768, 360), (1280, 720, 340), (800, 900, 360)):
        resize(page, width, height)
        edge = f"{APP}.stage.shown[0].canvas.getBoundingClientRect().bottom + scrollY"
        until(page, f"{edge} <= {height} && {APP}.stage.shown[0].plot.height >= {least}")
        page.evaluate(f"{APP}.store.set({{ with: '0.1', show: 'both' }})")
        until(page, f"{APP}.stage.shown.length === 2 && {RESTING} && {edge} <= {height}")
        page.evaluate(f"{APP}.store.set({{ with: '', show: 'difference' }})")
        until(page, f"{APP}.stage.shown.length === 1 && {RESTING}")


@pytest.mark.parametrize("opened", ["Enter", "3", "click"])
def test_a_map_that_opens_has_the_focus_and_arrow_keys_move_in_it(open_view, builtin, opened):
    page = open_view(view(builtin, TEXT), "#head=4.2")
    if opened == "Enter":
        page.locator('.head[data-place="4.2"]').focus()
    if opened == "click":
        page.locator("#tab-map").click()
    else:
        page.keyboard.press(opened)
    until(page, f"document.activeElement.className === 'map-canvas' && {RESTING}")
    before = page.evaluate(f"{APP}.stage.shown[0].cursor?.query ?? 0")
    page.keyboard.press("ArrowDown")
    until(page, f"{APP}.stage.shown[0].cursor?.query > {before}")
    page.locator(".steps button[aria-label='Next head']").focus()
    page.keyboard.press("Enter")
    until(page, f"{APP}.store.get('head') === '4.3' && {RESTING}")
    assert page.evaluate("document.activeElement.ariaLabel") == "Next head", "the button keeps the focus"


def test_the_text_view_opens_at_the_word_that_was_kept(open_view, builtin):
    result = view(builtin, TEXT * 5)
    page = open_view(result, "#view=words&head=4.2&word=90")
    seen = """(i, side) => {
        const [word, box] = [`.${side}-side [data-i="${i}"]`, ".lines-box"].map((one) => document.querySelector(one));
        const [inside, around] = [word, box].map((one) => one?.getBoundingClientRect());
        return Boolean(word) && inside.top >= around.top && inside.bottom <= around.bottom;
    }"""
    until(page, f"{RESTING} && ({seen})(90, 'from') && ({seen})(89, 'to')")
    page.locator('.text [data-i="90"]').click()
    page.locator('.text [data-i="3"]').scroll_into_view_if_needed()
    page.locator('.text [data-i="3"]').hover()
    until(page, f"{RESTING} && ({seen})(3, 'from')")


def test_a_saved_text_says_which_rows_it_has_and_of_which_word_its_lines_are(open_view, builtin):
    page = open_view(view(builtin, TEXT * 5), "#view=words&head=4.2&word=90")
    until(page, f"{RESTING} && {APP}.lines.told.textContent.includes('attends to')")
    page.locator(".menu summary").click()
    with page.expect_download() as download:
        page.locator(".menu-list button", has_text="SVG").click()
    drawing = Path(download.value.path()).read_text(encoding="utf-8")
    written = " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", drawing))
    first, last, count = map(int, re.search(r"Words (\d+)–(\d+) of (\d+)\.", written).groups())
    assert first <= 90 <= last < count == page.evaluate(f"{APP}.side.manifest.T")
    assert "Lines of word 90 alone: " in written


def test_every_step_of_the_contrast_changes_scaled_pictures(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#contrast=0")
    ticks = []
    for step in range(5):
        page.evaluate(f"{APP}.store.set({{ contrast: '{step}' }})")
        until(page, RESTING)
        ticks.append(page.evaluate(f"{APP}.atlas.scale.place(0.3)"))
    assert ticks == sorted(set(ticks))


def test_lines_of_a_file_with_the_largest_weights_of_rows_say_so(open_view, model):
    ids = model.tokens(TEXT * 100, most=10**6)[:, :1500]
    page = open_view(view(model, ids), "#view=words")
    page.evaluate(f"{APP}.store.set({{ head: {APP}.side.manifest.embedded.keys[0] }})")
    until(page, RESTING)
    told = page.locator(".legend-name").inner_text()
    assert "Lines start at 0.02; this file has only the 8 largest weights of each row" in told


def test_pictures_of_contributions_are_not_said_to_be_single_numbers(open_view, builtin, monkeypatch):
    from headwise.view import page as pages

    monkeypatch.setattr(pages, "CELLS", ((4, 127, 0),))
    page = open_view(view(builtin, TEXT), "#view=map&what=contribution")
    until(page, RESTING)
    assert "pictures of contributions, in which a pixel covers 4 × 4 of them" in page.locator(".noted").inner_text()
    assert "in one byte" not in page.locator(".noted").inner_text()
    assert "covers 4 × 4 contributions" in page.locator(".limit").inner_text()


def test_contributions_take_fewer_steps_before_they_become_pictures(builtin):
    from headwise.view import page as pages

    result = view(builtin, TEXT)
    most, fewer = (pages._contributed(result, 1, steps, 10**9) for steps in (127, 63))
    sizes = [sum(section.size + 40 for section in found.values()) for found in (most, fewer)]
    data = pages._with_weights(pages.PageData(result), 10**7)
    data.sections = {name: x for name, x in data.sections.items() if not name.startswith("contribution")}
    pages._add_carried(data, data.size + sum(sizes) // 2)
    assert data.sections["contribution/4.2"].shape == (result.T, result.T)
    assert data.sections["contribution/4.2"].code.endswith(" 63")
    assert data.manifest["embedded"]["contributions"].endswith(" 63")


def test_key_value_heads_are_bracketed_under_the_smallest_pictures(open_view):
    maps = [AttentionMap(torch.randn(1, 9, 17, 5), torch.randn(1, 3, 17, 5), Scoring(causal())) for _ in range(30)]
    page = open_view(view(maps))
    for width in (1440, 800):
        resize(page, width, 900)
        until(page, RESTING)
        assert page.locator(".atlas.bare").count() == 1
        boxes = page.locator(".bracket").evaluate_all(
            "all => all.map((one) => [one.checkVisibility(), one.getBoundingClientRect().height])"
        )
        assert len(boxes) == 90
        assert all(seen and 3 <= height <= 8 for seen, height in boxes)
        assert (
            page.evaluate(
                "Math.max(...Array.from(document.querySelectorAll('.head'), (x) => x.getBoundingClientRect().bottom))"
            )
            <= 900
        )


def test_bounds_are_rounded_up(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map")
    until(page, RESTING)
    written = page.evaluate(
        f"""(() => {{
            const [map] = {APP}.stage.shown, found = [];
            const context = new Proxy(document.createElement('canvas').getContext('2d'), {{
                get: (target, name) => (name === 'fillText' ? (text) => found.push(text)
                    : typeof target[name] === 'function' ? target[name].bind(target) : target[name]),
                set: (target, name, value) => ((target[name] = value), true),
            }});
            map.render(context, {APP}.colors());
            const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b));
            return [found, most(map.margins.received), most(map.margins.distance), Math.log(map.view.S)];
        }})()"""
    )
    bounds = [float(text.lstrip("≤ ")) for text in written[0] if text.startswith("≤")]
    for bound, true in zip(bounds, [written[3], written[2], written[1]], strict=True):
        assert true - 1e-6 <= bound <= true + 0.1
    assert any("with first" in text for text in written[0])


def test_the_title_quotes_special_tokens_that_were_typed(open_view, builtin):
    page = open_view(view(builtin, "one two <s> three"))
    assert page.locator("h1").inner_text() == page.title()
    assert page.title().endswith(" do with “one two <s> three”")


def test_a_full_margin_bar_is_the_number_printed(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map")
    until(page, RESTING)
    texts, bars, most, sizes = page.evaluate(
        f"""(() => {{
            const [map] = {APP}.stage.shown, texts = [], bars = [], colors = {APP}.colors();
            const context = new Proxy(document.createElement('canvas').getContext('2d'), {{
                get: (target, name) => (name === 'fillText' ? (text) => texts.push(text)
                    : name === 'fillRect' ? (...box) => bars.push(box)
                    : typeof target[name] === 'function' ? target[name].bind(target) : target[name]),
                set: (target, name, value) => ((target[name] = value), true),
            }});
            map.edges(context, colors);
            const largest = (numbers) => numbers.reduce((a, b) => Math.max(a, b));
            const {{ entropy, distance, received }} = map.margins;
            const band = map.pads.right < 80 ? 20 : 44, high = map.view.scale >= 12 ? 18 : 34;
            const side = map.plot.width + 8, next = side + band + 8;
            const of = (keep, size) => Math.max(...bars.filter(keep).map(size));
            return [texts, [
                of(([x]) => x === side, (box) => box[2] / band), of(([x]) => x === next, (box) => box[2] / band),
                of(([x]) => x < side, (box) => (box[3] / high) ** 2)],
                [entropy, distance, received].map(largest), [map.view.scale, map.margins.bin]];
        }})()"""
    )
    assert sizes[0] * sizes[1] >= 1, "each bar is one number, not a mean of several"
    bounds = [float(text.lstrip("≤ ")) for text in texts if text.startswith("≤")]
    assert len(bounds) == 3
    for bar, bound, largest in zip(bars, bounds, most, strict=True):
        assert bar * bound == pytest.approx(largest, rel=1e-4)


def test_differences_leave_no_room_for_bars_that_they_do_not_have(open_view, builtin):
    page = open_view(view(builtin, TEXT), "#view=map&head=4.2")
    until(page, RESTING)
    before = page.evaluate(f"Object.values({APP}.stage.shown[0].pads)")
    page.evaluate(f"{APP}.store.set({{ with: '4.3' }})")
    until(page, f"{RESTING} && {APP}.stage.shown[0].minus")
    after = page.evaluate(f"Object.values({APP}.stage.shown[0].pads)")
    assert after[1] < before[1]
    assert after[2] < before[2]
