"""The page in a real browser: it draws, answers, and lets no token act."""

import csv
import re
import time
from pathlib import Path

import pytest
import torch

import headwise
from headwise import AttentionMap, OptionError, Scoring, causal, load_builtin, view, window
from headwise.masks.probes import sink
from headwise.view.color import DARK, LIGHT, Palette, table
from headwise.view.page import document, policy
from headwise.view.terminal import WITHOUT, drawn
from headwise.view.tokens import shown
from headwise.view.words import described

TEXT = "The captain looked at the sea, and the sea looked at the captain. The captain looked at the sea."
HOSTILE = [
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror='window.hacked=2'>",
    "<s>",
    "<!--",
    "]]>",
    "שלום",
    "\u202eevil",
    "👩‍🚀",
    "a\u200bb",
    "\x00\x1b[31m",
    "\ud800",
    "\u2028",
    "${window.hacked=3}",
    "\n",
    "",
]


@pytest.fixture
def open_page(browser):
    """Opens a file; whatever the page complains of fails the test."""
    contexts, troubles = [], []

    def open_file(path, fragment="", **options):
        context = browser.new_context(viewport={"width": 1200, "height": 860}, accept_downloads=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: message.type in ("error", "warning") and troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda request: troubles.append(request.url) if request.url[:4] == "http" else None)
        page.goto(f"file://{path}{fragment}")
        until(page, "document.documentElement.dataset.ready === 'true'")
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert not troubles


@pytest.fixture(scope="module")
def result():
    return view(load_builtin(), TEXT)


@pytest.fixture(scope="module")
def short(result, tmp_path_factory):
    return result.save(tmp_path_factory.mktemp("page") / "heads.html")


RESTING = "document.getElementById('headwise').headwise.resting"

APP = "document.getElementById('headwise').headwise"


def until(page, expression, seconds=20):
    """Wait for it; asked from outside, because the page allows no script but its own."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(20)


def settled(page):
    """Wait until the map has what it asked for and is drawn."""
    until(
        page,
        "(() => { const [map] = document.getElementById('headwise').headwise.stage.shown;"
        " return map && map.drawn > 0 && map.reach && map.tiles.waiting === 0 && !map.frame; })()",
    )


def point_at(page, query, key):
    """Move the pointer onto a pair on the map."""
    x, y = page.evaluate(
        """([query, key]) => {
            const [map] = document.getElementById('headwise').headwise.stage.shown;
            const box = map.canvas.getBoundingClientRect();
            return [box.left + map.pads.left + (key + 0.5 - map.view.x) * map.view.scale,
                    box.top + map.pads.top + (query + 0.5 - map.view.y) * map.view.scale];
        }""",
        [query, key],
    )
    page.mouse.move(x, y)
    return x, y


def test_the_first_view_has_the_sentence_the_text_and_every_head(open_page, short, result):
    page = open_page(short)
    assert page.locator(".sentence").inner_text() == result.sentence
    assert page.locator("h1").inner_text() == page.title() == result.heading
    assert "built-in model" in result.heading
    assert "The captain looked at the sea" in result.heading
    assert page.locator(".head").count() == 56
    assert page.locator(".text").inner_text() == "".join(result.tokens)
    assert page.locator('.head[data-place="1.4"]').get_attribute("aria-label") == (
        f"Head 1.4 {described(result.summaries[1][4])}"
    )
    painted = page.evaluate(
        "Array.from(document.querySelectorAll('.head canvas'),"
        " c => c.getContext('2d').getImageData(0, c.height - 1, 1, 1).data[3])"
    )
    assert set(painted) == {255}


def test_figures_are_the_same_in_python_page_and_terminal(open_page, short, result):
    page = open_page(short, "#view=table&without=")
    names = page.locator("thead th").all_inner_texts()
    rows = [row.locator("th, td").all_inner_texts() for row in page.locator("tbody tr").all()[8:12]]
    for head, cells in zip(result.summaries[1].heads[:4], rows, strict=True):
        assert cells[:2] == [f"1.{head.head}", described(head)]
        for name, cell in zip(names[2:], cells[2:], strict=True):
            digits = ".1f" if name == "distance" else ".2f"
            assert cell == format(head.numbers[name.replace(" ", "_").replace("-", "_")], digits)
    terminal = drawn(result, 200, Palette(0), 60)
    for head in (found for found in result.heads if f" {found.place} " in terminal):
        assert described(head.summary).replace(WITHOUT, "") in terminal
    assert "other %: without the first token" in terminal, "said once for all heads"
    page.keyboard.press("1")
    for pair in result.pairs(5):
        assert page.locator(".pair", has_text=f"{pair.weight:.2f} head {pair.layer}.{pair.head}").count() >= 1


def test_tokens_and_colors_are_written_as_in_python(open_page, short):
    page = open_page(short)
    tokens = [
        *HOSTILE,
        " sea",
        "  ",
        " ",
        "\t",
        "\r\n",
        "a\xa0b",
        "\u2029",
        "\U000e0001",
        "漢字",
        "e\u0301",
        "constructor",
    ]
    found = page.evaluate("tokens => tokens.map(token => window.headwise.wordOf(token, 1000))", tokens)
    assert found == [shown(token) for token in tokens]
    weights = [0.0, 1e-5, 0.01, 0.25, 0.7, 1.0]
    scale = "new window.headwise.Scale('share')"
    for dark, stops in ((False, LIGHT), (True, DARK)):
        colors = page.evaluate(
            f"([weights, dark]) => weights.map(weight => {scale}.color(weight, dark))", [weights, dark]
        )
        expected = [table(stops)[round(255 * weight**0.5)] for weight in weights]
        assert colors == [f"rgb({red} {green} {blue})" for red, green, blue in expected]


def test_a_click_opens_a_head_and_zoom_ends_at_one_weight(open_page, short, result):
    page = open_page(short, "#without=")
    page.locator('.head[data-place="2.1"]').click()
    settled(page)
    assert page.locator(".subject").inner_text().startswith("Head 2.1")
    query, key = 17, 14
    x, y = point_at(page, query, key)
    for _ in range(12):
        page.mouse.wheel(0, -200)
    settled(page)
    page.mouse.move(x + 1, y)
    facts = page.locator(".facts[data-weight]")
    facts.wait_for()
    weights = result.maps[2]
    expected = weights[0, 1, query, key].item()
    until(page, f"Math.abs(document.querySelector('.facts').dataset.weight - {expected}) < 1e-7")
    logit = weights._source().scores()[0, 1, query, key].item()
    assert float(facts.get_attribute("data-logit")) == pytest.approx(logit, abs=1e-4)
    text = page.locator(".info").inner_text()
    row = weights[0, 1, query]
    assert f"#{int((row > row[key]).sum()) + 1} of {query + 1} in its row" in re.sub(r"\s+", " ", text)
    shown = page.evaluate(f"document.getElementById('headwise').headwise.stage.shown[0].tiles.value({query}, {key})")
    assert shown == pytest.approx(expected, abs=1e-7)
    until(page, "location.hash.includes('at=')")


def test_every_colour_that_a_canvas_asks_for_is_declared():
    folder = Path(headwise.__file__).parent / "view" / "page"
    names = re.search(r"const names = \[(.*?)\]", (folder / "app.js").read_text(encoding="utf-8"))[1]
    declared = re.findall(r"--(\w+):", (folder / "page.css").read_text(encoding="utf-8"))
    assert set(re.findall(r"\w+", names)) <= set(declared)


def test_a_saved_picture_has_no_miniature(open_page, short):
    page = open_page(short, "#view=map&head=1.4&at=0,0,5")
    settled(page)
    frame = """(canvas) => {
        const { stage, palette } = document.getElementById('headwise').headwise;
        const { x, y, w, h } = stage.shown[0].mini;
        const colour = palette.second.match(/\\d+/g).map(Number);
        const pixels = canvas.getContext('2d').getImageData(x - 1, y - 1, w + 2, h + 2).data;
        const alike = (i) => colour.every((value, k) => Math.abs(pixels[i + k] - value) < 3);
        return [...pixels.keys()].filter((i) => i % 4 === 0 && alike(i)).length;
    }"""
    assert page.evaluate(f"({frame})(document.querySelector('.map-canvas'))") > 20
    assert page.evaluate(f"({frame})(document.getElementById('headwise').headwise.saving.canvas())") == 0


def test_a_zoomed_window_is_the_same_when_its_address_is_opened_again(open_page, short):
    page = open_page(short, "#view=map&head=4.2")
    settled(page)
    point_at(page, 11, 7)
    page.evaluate("() => { window.turns = 0; addEventListener('wheel', () => { window.turns += 1; }); }")
    for _ in range(5):
        page.mouse.wheel(0, -200)
    until(page, "window.turns === 5")
    settled(page)
    until(page, "location.hash.includes(`at=${document.getElementById('headwise').headwise.stage.view.text}`)")
    window = """(() => {
        const { view } = document.getElementById('headwise').headwise.stage;
        return [view.x, view.y, view.x + view.width / view.scale, view.y + view.height / view.scale];
    })()"""
    before = page.evaluate(window)
    assert before[0] > 1, "zoomed in"
    page.reload()
    until(page, "document.documentElement.dataset.ready === 'true'")
    settled(page)
    assert page.evaluate(window) == pytest.approx(before, abs=1e-3)


@pytest.mark.parametrize("kind", ["mass", "rest", "peak", "uniform"])
def test_pictures_are_those_of_python_at_every_level(open_page, tmp_path, kind):
    from headwise.view.pictures import levels, tile

    weights = AttentionMap(torch.randn(1, 1, 331, 5) * 2, torch.randn(1, 1, 331, 5), Scoring(mask=causal()))
    page = open_page(view(weights).save(tmp_path / "heads.html"))
    for level in range(levels(331, 331) + 1):
        found = page.evaluate(
            "([level, kind]) => document.getElementById('headwise').headwise.side.source"
            ".tile(0, 0, level, 0, 0, kind).then(found => Array.from(found))",
            [level, kind],
        )
        expected = tile(weights, 0, level, 0, 0, kind)
        torch.testing.assert_close(torch.tensor(found).view(256, 256), expected, rtol=2e-3, atol=2e-6)


def test_a_word_shows_where_it_looks_and_who_looks_at_it(open_page, short, result):
    page = open_page(short, "#head=2.1")
    page.locator('.word[data-i="9"]').hover()
    until(page, "document.querySelector('.details-title')?.textContent.includes(' 9 ')")
    weights = result.maps[2][0, 1]
    best = weights[9].topk(5)
    told = page.locator(".to .figure").all_inner_texts()
    assert [float(x) for x in told] == pytest.approx(best.values.tolist(), abs=6e-4)
    best = weights[:, 9].topk(5)
    told = page.locator(".from .figure").all_inner_texts()
    assert [float(x) for x in told] == pytest.approx(best.values.tolist(), abs=6e-4)
    page.locator('.word[data-i="9"]').click()
    page.locator('.word[data-i="3"]').hover()
    assert " 9 " in page.locator(".details-title").inner_text(), "locked"
    page.locator(".find").fill("sea")
    assert page.locator(".word.match").count() == sum("sea" in token for token in result.tokens)
    page.keyboard.press("Enter")
    assert page.locator(".found").inner_text().startswith("1 of")


def test_everything_can_be_done_by_keys(open_page, short, result):
    page = open_page(short, "#head=0.0")
    page.locator('.head[data-place="0.0"]').focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.place") == "1.1"
    page.keyboard.press("Enter")
    settled(page)
    page.locator(".map-canvas").focus()
    for key in ("+", "+", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    page.locator(".facts").wait_for()
    cell = page.evaluate("document.getElementById('headwise').headwise.stage.shown[0].cursor")
    expected = result.maps[1][0, 1, cell["query"], cell["key"]].item()
    until(page, f"Math.abs(document.querySelector('.facts').dataset.weight - {expected}) < 1e-7")
    page.keyboard.press("Enter")
    assert page.evaluate("document.getElementById('headwise').headwise.locked()") == cell["query"]
    for key, kind in (("m", "mass"), ("r", "rest"), ("u", "uniform")):
        page.keyboard.press(key)
        assert page.evaluate("document.getElementById('headwise').headwise.kind") == kind
    page.keyboard.press("]")
    assert page.locator(".subject").inner_text().startswith("Head 1.2")
    page.keyboard.press("?")
    assert page.locator("dialog.help[open]").count() == 1
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert page.locator(".atlas").count() == 1
    page.locator(".text").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('.details-title')?.textContent.includes(' 1 ')")


def test_hostile_tokens_are_text_and_never_run(open_page, tmp_path):
    tokens = HOSTILE + ["end"] * (17 - len(HOSTILE))
    weights = AttentionMap(torch.randn(1, 2, 17, 5), torch.randn(1, 2, 17, 5), Scoring(mask=causal()))
    path = view(weights, words=tokens).save(tmp_path / "heads.html", title="</title><script>window.hacked=4</script>")
    page = open_page(path)
    for i, token in enumerate(tokens[:3]):
        assert page.locator(f'.word[data-i="{i}"]').inner_text() == token
        page.locator(f'.word[data-i="{i}"]').hover()
    assert page.locator('.word[data-i="6"]').inner_text() == "\\x202eevil"
    assert page.locator('.word[data-i="9"]').inner_text() == "\\x00\\x1b[31m"
    page.locator(".head").first.click()
    settled(page)
    for query in range(17):
        point_at(page, query, 0)
    for name in ("PNG", "SVG", "heads (CSV)", "JSON", "window"):
        page.locator(".menu summary").click()
        with page.expect_download() as download:
            page.locator(".menu-list button", has_text=name).click()
        content = Path(download.value.path()).read_bytes()
        assert len(content) > 100
        if name == "SVG":
            assert b"<script" not in content
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0


def test_two_pages_side_by_side_keep_their_own_state(browser, open_page, short, tmp_path):
    first = open_page(short, "#view=map&head=1.4&kind=uniform")
    second = open_page(short, "#view=map&head=3.0")
    settled(first)
    settled(second)
    assert first.locator(".subject").inner_text().startswith("Head 1.4")
    assert second.locator(".subject").inner_text().startswith("Head 3.0")
    assert first.locator('[role="radio"][aria-checked="true"]').last.inner_text() == "× uniform"


def test_heads_averages_and_texts_can_be_compared(open_page, tmp_path, result):
    other = view(load_builtin(), TEXT.replace("sea", "ship"))
    path = result.save(tmp_path / "heads.html", against=other)
    page = open_page(path, "#view=map&head=2.1&with=b:2.1&without=")
    settled(page)
    source = "document.getElementById('headwise').headwise"
    found = page.evaluate(f"{source}.stage.shown[0].tiles.value(12, 9)")
    expected = result.maps[2][0, 1, 12, 9] - other.maps[2][0, 1, 12, 9]
    assert found == pytest.approx(expected.item(), abs=1e-6)
    page.goto(f"file://{path}#view=map&head=2.*&without=")
    until(page, f"!{source}.stage.minus && {source}.stage.shown[0].tiles.value(12, 9) !== null")
    found = page.evaluate(f"{source}.stage.shown[0].tiles.value(12, 9)")
    assert found == pytest.approx(result.maps[2][0, :, 12, 9].mean().item(), abs=1e-6)


def test_cross_attention_has_words_on_both_sides(open_page, tmp_path):
    weights = AttentionMap(torch.randn(1, 4, 3, 5), torch.randn(1, 2, 7, 5))
    page = open_page(view(weights, words=list("abc"), keys=list("tuvwxyz")).save(tmp_path / "heads.html"))
    assert page.locator('.word[data-side="key"]').all_inner_texts() == list("tuvwxyz")
    assert page.locator(".bracket").all_inner_texts() == ["key head 0", "key head 1"]
    assert page.locator(".pairs .note").inner_text() == "besides the first token; each pair of positions once"
    page.locator('.word[data-side="query"]').nth(1).hover()
    until(page, "document.querySelectorAll('.to .figure').length === 5")
    page.keyboard.press("3")
    settled(page)


@pytest.fixture(scope="module")
def long_maps():
    T = 16384
    place = torch.arange(T)[:, None] * torch.tensor([2.0, 0.3])
    turns = torch.cat([place.cos(), place.sin()], -1)[None, None] * 6
    return AttentionMap(turns.roll(1, 2), turns, Scoring(mask=causal() & window(300)))  # quick to measure


@pytest.fixture(scope="module")
def long(long_maps, tmp_path_factory):
    return view(long_maps).save(tmp_path_factory.mktemp("long") / "heads.html")


def test_sixteen_thousand_tokens_open_and_zoom(open_page, long, long_maps):
    T = 16384
    assert long.stat().st_size < 5_000_000
    page = open_page(long, "#view=map")
    settled(page)
    point_at(page, T // 2, T // 2 - 1)
    for _ in range(30):
        page.mouse.wheel(0, -240)
    settled(page)
    app = "document.getElementById('headwise').headwise"
    assert page.evaluate(f"{app}.stage.view.scale") > 20
    best = long_maps.select(rows=[9001]).topk(8)
    row = page.evaluate(f"{app}.data.row({app}.subject(), 9001)")
    assert row["keys"] == best.keys[0, 0, 0].tolist()
    assert row["weights"] == pytest.approx(best.weights[0, 0, 0].tolist(), rel=1e-3)
    assert "headwise serve" in page.locator(".limit.at-end").inner_text()


@pytest.mark.parametrize("kind", ["mass", "rest", "peak", "uniform"])
def test_every_mode_of_a_long_text_has_a_picture(open_page, long, kind):
    page = open_page(long, f"#view=map&kind={kind}")
    settled(page)
    inked = """(() => {
        const { canvas, pads } = document.getElementById('headwise').headwise.stage.shown[0];
        const data = canvas.getContext('2d').getImageData(pads.left, pads.top, 300, 300).data;
        const color = (_, i) => data.slice(4 * i, 4 * i + 3).join();
        return new Set(Array.from({ length: 90000 }, color)).size;
    })()"""
    assert page.evaluate(inked) > 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 900, 1440])
def test_nothing_is_wider_than_the_window(browser, short, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 860}, color_scheme=scheme, reduced_motion="reduce")
    page.goto(f"file://{short}#view=map&word=5&with=1.4")
    until(page, "document.documentElement.dataset.ready === 'true'")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_on_a_phone_the_whole_atlas_is_on_one_screen_and_a_tap_shows_the_map(browser, short):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    page.goto(f"file://{short}")
    until(page, "document.documentElement.dataset.ready === 'true'")
    boxes = page.evaluate(
        "Array.from(document.querySelectorAll('.picture'), (one) => { const box = one.getBoundingClientRect();"
        " return [box.left, box.right, box.bottom]; })"
    )
    assert len(boxes) == 56
    assert all(left >= 0 and right <= 390 and bottom <= 844 for left, right, bottom in boxes)
    page.locator('.head[data-place="4.2"]').tap()
    settled(page)
    top, bottom = page.evaluate(
        "(() => { const box = document.querySelector('.map-canvas').getBoundingClientRect();"
        " return [box.top, box.bottom]; })()"
    )
    assert 0 <= top < bottom <= 844
    context.close()


def test_a_tap_on_the_map_shows_what_the_mouse_shows_and_keeps_the_row(browser, short):
    phone = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    seen = []
    for context in (browser.new_context(viewport={"width": 390, "height": 844}), phone):
        page = context.new_page()
        page.goto(f"file://{short}#view=map&head=4.2")
        settled(page)
        # Taps of a test follow each other so fast that they are double taps, which zoom.
        page.evaluate("document.addEventListener('dblclick', (event) => event.stopPropagation(), true)")
        seen.append([])
        for query, key in ((9, 4), (9, 2), (11, 2)):
            x, y = page.evaluate(
                f"""(() => {{
                    const [map] = {APP}.stage.shown, box = map.canvas.getBoundingClientRect();
                    return [box.left + map.pads.left + ({key} + 0.5 - map.view.x) * map.view.scale,
                            box.top + map.pads.top + ({query} + 0.5 - map.view.y) * map.view.scale];
                }})()"""
            )
            if context is phone:
                page.touchscreen.tap(x, y)
                until(page, f"{APP}.store.get('word') == '{query}'")
            else:
                page.mouse.move(x, y)
            until(
                page,
                f"[['to', {query}], ['from', {key}]].every(([side, at]) =>"
                " document.querySelector(`.info .${side}-word`)?.textContent.endsWith(` ${at}`))",
            )
            seen[-1].append(page.locator(".info").inner_text())
        if context is phone:
            page.touchscreen.tap(x, y)
            until(page, f"{APP}.store.get('word') === ''")
            assert page.locator(".info").inner_text() == seen[-1][-1], "the second tap lets go of the row only"
        context.close()
    pointed, tapped = seen
    assert tapped == pointed
    assert len(set(tapped)) == 3
    assert all(name in text for text in tapped for name in ("weight", "uniform attention", "in its row", "logit"))


def test_thirty_layers_fit_one_screen(open_page, tmp_path):
    maps = [AttentionMap(torch.randn(1, 9, 17, 5), torch.randn(1, 3, 17, 5), Scoring(causal())) for _ in range(30)]
    page = open_page(view(maps).save(tmp_path / "heads.html"))
    boxes = page.evaluate(
        "Array.from(document.querySelectorAll('.picture'), (one) => { const box = one.getBoundingClientRect();"
        " return [box.right, box.bottom, box.width]; })"
    )
    assert len(boxes) == 270
    assert all(right <= 1200 and bottom <= 860 and width > 18 for right, bottom, width in boxes)


def test_a_wide_window_has_one_row_for_every_layer(open_page, short):
    page = open_page(short)
    tops = "Array.from(document.querySelectorAll('.head'), (head) => head.getBoundingClientRect().top)"
    assert len(set(page.evaluate(tops))) == 7


@pytest.mark.parametrize(
    ("scale", "value", "text"),
    [
        ("share", 0, "0"),
        ("share", 0.004, "<.01"),
        ("share", 0.0051, ".01"),
        ("share", 0.53, ".53"),
        ("difference", -0.004, "≈0"),
        ("difference", -0.25, "−.25"),
        ("ratio", 0.03, "<.1"),
        ("ratio", 0.3, "0.3"),
        ("ratio", 0, "0"),
    ],
)
def test_a_cell_prints_nought_for_nought_alone(open_page, short, scale, value, text):
    page = open_page(short, "#view=map")
    settled(page)
    map_of = "document.getElementById('headwise').headwise.stage.shown[0]"
    figure = page.evaluate(
        f"([scale, value]) => {map_of}.figure.call({{ scale: {{ name: scale }} }}, value)", [scale, value]
    )
    assert figure == text


def test_the_text_forgets_the_word_when_the_pointer_leaves_the_map(open_page, short):
    page = open_page(short, "#view=map&head=2.1")
    settled(page)
    point_at(page, 9, 4)
    until(page, "document.querySelector('.word.here')?.dataset.i === '9'")
    page.mouse.move(600, 2)
    until(page, "!document.querySelector('.word.here, .word.lit')")
    assert "Point at a word" in page.locator(".details").inner_text()
    page.locator('.word[data-i="5"]').click()
    point_at(page, 9, 4)
    page.mouse.move(600, 2)
    until(page, RESTING)
    assert page.locator(".word.here").get_attribute("data-i") == "5", "a locked word stays"


def test_every_mode_of_five_hundred_tokens_comes_from_the_weights(open_page, tmp_path):
    maps = [AttentionMap(torch.randn(1, 7, 512, 5) * 2, torch.randn(1, 7, 512, 5), Scoring(causal())) for _ in range(2)]
    path = view(maps).save(tmp_path / "heads.html", budget=1_900_000)
    assert path.stat().st_size < 1_900_000
    page = open_page(path)
    app = "document.getElementById('headwise').headwise"
    assert page.evaluate(f"{app}.side.manifest.embedded.weights") == "bytes"
    depth = f"(kind) => [[0, 0], [0, 6], [1, 6]].map(([l, h]) => {app}.side.source.depth(l, h, kind))"
    depths = page.evaluate(f"['mass', 'rest', 'peak', 'uniform'].flatMap({depth})")
    assert set(depths) == {1}, "down to single weights in every mode"
    found = page.evaluate(f"{app}.side.source.row(1, 6, 500)")
    expected = maps[1][0, 6, 500].topk(3)
    assert found["weights"][:3] == pytest.approx(expected.values.tolist(), abs=0.03)


def test_the_text_view_draws_lines_and_follows_the_word(open_page, short, result):
    page = open_page(short, "#view=words&head=4.2&without=")
    app = "document.getElementById('headwise').headwise"
    until(page, f"{app}.lines.drawn === true")
    words = page.locator(".to-side .lines-word")
    assert words.count() == len(result.tokens)
    page.locator('.from-side .lines-word[data-i="9"]').hover()
    until(page, "document.querySelector('.lines-tell .figure') !== null")
    best = result.maps[4][0, 2, 9].topk(3)
    told = [float(text) for text in page.locator(".lines-tell .figure").all_inner_texts()]
    assert told == pytest.approx(best.values.tolist(), abs=0.006)
    inked = page.locator(f'.to-side .lines-word[data-i="{int(best.indices[0])}"]').evaluate(
        "one => one.style.background"
    )
    assert inked.startswith("rgb")
    assert page.locator(".word.here").get_attribute("data-i") == "9", "the text pane follows"
    page.locator(".lines-box").focus()
    page.keyboard.press("ArrowDown")
    until(page, "document.querySelector('.word.here')?.dataset.i === '10'")


def test_a_word_ranks_the_heads_of_the_whole_atlas(open_page, short, result):
    page = open_page(short)
    page.locator('.word[data-i="9"]').hover()
    until(page, "document.querySelectorAll('.ranked li').length === 8")
    rows = torch.stack([weights[0, :, 9, 1:].amax(-1) for weights in result.maps])
    best = rows.flatten().topk(8)
    told = [float(text) for text in page.locator(".ranked .figure").all_inner_texts()]
    assert told == pytest.approx(best.values.tolist(), abs=0.006)
    marked = page.evaluate("Array.from(document.querySelectorAll('.head.top'), (one) => one.dataset.place)")
    assert set(marked) == {f"{place // 8}.{place % 8}" for place in best.indices.tolist()}
    page.mouse.move(600, 2)
    until(page, "!document.querySelector('.head.top')")


MANY_BYTES = "東京 😀 שלום עולם é 👩‍🚀!"


def test_characters_of_several_tokens_are_read_as_characters(open_page, tmp_path):
    result = view(load_builtin(), MANY_BYTES)
    assert MANY_BYTES in result.text
    page = open_page(result.save(tmp_path / "heads.html"))
    assert MANY_BYTES in page.locator(".text").inner_text()
    assert "�" not in page.locator("body").inner_text()
    labels = page.evaluate("document.getElementById('headwise').headwise.side.manifest.labels")
    assert labels == result.labels
    assert labels[1:4] == ["東¹", "東²", "東³"]
    letters = page.evaluate(
        """(text) => Array.from(text, (letter) => {
            const word = Array.from(document.querySelectorAll('.word')).find((one) => one.textContent === letter);
            return word.getBoundingClientRect().left;
        })""",
        "שלום",
    )
    assert letters == sorted(letters, reverse=True), "Hebrew runs from right to left"


def test_contrast_and_scaled_rows_change_the_pictures_and_the_legend(open_page, short):
    page = open_page(short)
    ink = """Array.from(document.querySelectorAll('.picture canvas'), (one) => one.toDataURL()).join("")"""
    until(page, RESTING)
    page.evaluate(f"window.before = {ink}")
    ticks = page.locator(".settings .tick").all_inner_texts()
    page.locator(".contrast input").focus()
    page.keyboard.press("End")
    until(page, f"{ink} !== window.before")
    assert page.locator(".settings .tick").all_inner_texts() != ticks
    assert page.evaluate("document.activeElement.type") == "range", "the slider keeps the focus"
    until(page, RESTING)
    page.evaluate(f"window.before = {ink}")
    page.locator(".check", has_text="scale each row").click()
    until(page, f"{ink} !== window.before")
    page.get_by_role("radio", name="All tokens").click()
    assert page.locator(".legend-name").first.inner_text() == "attention weight"


def test_pictures_say_what_is_left_out_with_the_first_token(open_page, short, result):
    page = open_page(short, "#head=5.4")
    until(page, "document.querySelectorAll('canvas.faint').length")
    faint = page.locator(".head:has(canvas.faint)").evaluate_all("heads => heads.map((head) => head.dataset.place)")
    assert faint == [head.place for head in result.heads if head.summary["sink"] > 0.5]
    assert "faint: more than half is left out" in page.locator(".legend-name").first.inner_text()
    page.keyboard.press("2")
    until(page, "document.querySelector('.lines-word[data-left^=\"−\"]')")
    share = result.maps[5].mass(sink(1))[0, 4]
    until(page, "document.getElementById('headwise').headwise.lines.drawn")
    marks = page.locator(".from-side .lines-word").evaluate_all("words => words.map((word) => word.dataset.left || '')")
    assert len(marks) > 9  # those in the window
    most = [100 if one == 1 else 99 for one in share]  # 100 only if all is left out
    rounded = [min(most, round(100 * float(one))) for most, one in zip(most, share, strict=True)]
    assert marks == [f"−{one} %" if one else "" for one in rounded[: len(marks)]], "of every row, however little"
    assert "attention weight without the first token" in page.locator(".legend-name").inner_text()
    page.keyboard.press("4")
    assert (
        "averaged over the tokens after it; every other column is without" in page.locator("#table-note").inner_text()
    )
    assert "next" not in page.locator("thead th").all_inner_texts(), "no token of a causal model sees the next one"


def test_a_difference_is_drawn_on_a_scale_that_fits_it(open_page, tmp_path, result):
    path = result.save(tmp_path / "heads.html")
    page = open_page(path, "#view=map&head=0.5&with=1.3")
    settled(page)
    limit = page.evaluate("document.getElementById('headwise').headwise.stage.shown[0].scale.limit")
    largest = (result.maps[0][0, 5] - result.maps[1][0, 3]).abs().max().item()
    assert largest * 0.3 <= limit <= max(1.0, 3 * largest)


def test_a_screen_reader_finds_tabs_with_panels_options_and_a_table(open_page, short):
    page = open_page(short)
    assert page.get_by_role("listbox", name="The text").get_by_role("option").count() > 10
    for name in ("Heads", "Text", "Map", "Table"):
        page.get_by_role("tab", name=name).click()
        assert page.get_by_role("tabpanel", name=name).count() == 1
    assert page.get_by_role("table").get_by_role("row").count() == 57
    page.get_by_role("tab", name="Table").press("ArrowLeft")
    assert page.get_by_role("tab", selected=True).inner_text() == "Map"
    page.locator(".text").focus()
    until(
        page, "document.getElementById(document.querySelector('.text').getAttribute('aria-activedescendant')) !== null"
    )


@pytest.mark.parametrize("name", ["atlas", "words", "map"])
def test_printing_gives_one_page(open_page, short, name):
    page = open_page(short, f"#view={name}&head=4.2")
    until(page, RESTING)
    printed = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page[^s]", printed)) == 1


# What is drawn before the next frame, as far as the browser waits.
PRINTED = """async () => {
    dispatchEvent(new Event('beforeprint'));
    for (let turn = 0; turn < 1000; turn++) await null;
    return %s;
}"""


@pytest.mark.parametrize("name", ["atlas", "words", "map"])
def test_the_dark_theme_is_printed_in_the_colors_of_the_light_one(open_page, short, name):
    drawn = "Array.from(document.querySelectorAll('.main canvas'), (one) => one.toDataURL()).join()"
    light = open_page(short, f"#view={name}&head=4.2", color_scheme="light")
    dark = open_page(short, f"#view={name}&head=4.2", color_scheme="dark")
    for page in (light, dark):
        until(page, RESTING)
    before = dark.evaluate(drawn)
    assert before != light.evaluate(drawn)
    assert dark.evaluate(PRINTED % drawn) == light.evaluate(PRINTED % drawn), "at once: the browser waits for no frame"
    dark.evaluate("dispatchEvent(new Event('afterprint'))")
    dark.wait_for_timeout(50)
    until(dark, RESTING)
    assert dark.evaluate(drawn) == before


def test_printing_a_table_gives_every_row(open_page, short):
    page = open_page(short, "#view=table")
    page.emulate_media(media="print")
    assert (
        page.evaluate(
            "(({ scrollHeight, clientHeight }) => scrollHeight - clientHeight)(document.querySelector('.table'))"
        )
        == 0
    )


def test_a_printed_part_of_a_text_is_whole_rows_and_says_which(open_page, tmp_path):
    page = open_page(view(load_builtin(), f"{TEXT} " * 6).save(tmp_path / "heads.html"), "#view=words")
    until(page, RESTING)
    box = "document.querySelector('.lines-box')"
    page.evaluate(f"{box}.scrollTop = 1003")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    first, last, words = re.search(
        r"Words (\d+)–(\d+) of (\d+)\.", page.locator(".lines-tell").get_attribute("data-rows")
    ).groups()
    assert first == "41"
    assert words == str(view(load_builtin(), f"{TEXT} " * 6).T)
    for at, edge in ((first, "top"), (last, "bottom")):
        word, around = (
            page.evaluate(f"document.querySelector('{one}').getBoundingClientRect().{edge}")
            for one in (f'.from-side [data-i="{at}"]', ".lines-box")
        )
        assert word == pytest.approx(around, abs=2)


def test_printing_gives_the_picture_alone(open_page, short):
    page = open_page(short)
    page.emulate_media(media="print")
    assert page.locator(".tools").is_hidden()
    assert page.locator(".reading").is_hidden()
    assert page.locator(".head").first.is_visible()
    assert page.locator("h1").is_visible()
    assert page.locator(".legend-scale").first.is_visible()


@pytest.mark.parametrize("name", ["atlas", "words", "map"])
def test_a_saved_drawing_has_a_title_words_and_a_legend(open_page, short, result, name):
    page = open_page(short, f"#view={name}&head=4.2")
    until(page, RESTING)
    page.locator(".menu summary").click()
    with page.expect_download() as download:
        page.locator(".menu-list button", has_text="SVG").click()
    drawing = Path(download.value.path()).read_text(encoding="utf-8")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    written = " ".join(words)
    assert result.heading in written, "in as many lines as it needs"
    assert (result.sentence if name == "atlas" else described(result.summaries[4][2])) in written
    page.set_content(drawing)
    assert page.evaluate(
        """() => {
            const [svg, ...texts] = document.querySelectorAll('svg, text');
            const whole = svg.getBoundingClientRect();
            const inside = (box) => box.right <= whole.right && box.bottom <= whole.bottom;
            return texts.every((text) => inside(text.getBoundingClientRect()));
        }"""
    )
    assert "textLength" not in drawing, "no letter is squeezed"
    assert {"0", "0.25", "1"} <= set(words)
    assert any("weight" in word for word in words)
    assert any(word.startswith("captain") for word in words) == (name != "atlas")
    assert "<image" in drawing


@pytest.mark.parametrize("name", ["atlas", "words", "table"])
def test_weights_are_saved_from_a_view_without_a_map(open_page, short, result, name):
    page = open_page(short, f"#view={name}")
    page.get_by_text("Save", exact=True).click()
    with page.expect_download() as download:
        page.get_by_text("Weights in the window (CSV)").click()
    with Path(download.value.path()).open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    size = len(result.tokens)
    assert len(rows) == size * (size + 1) // 2


@pytest.mark.parametrize("wanted", ["the sea", "ptain lo", "captain", "a ship"])
def test_a_search_finds_words_of_several_tokens(open_page, short, wanted):
    page = open_page(short)
    page.locator(".find").fill(wanted)
    assert page.locator(".found").inner_text() == f"{TEXT.lower().count(wanted)} found"


def test_a_number_that_no_word_can_have_is_a_dash_and_empty_in_the_file(open_page, tmp_path):
    page = open_page(view(load_builtin(), "The captain looked").save(tmp_path / "heads.html"), "#view=table")
    names = page.locator(".table th").all_inner_texts()
    assert page.locator(".table tbody tr").first.locator("td, th").nth(names.index("second sink")).inner_text() == "–"
    page.get_by_text("Save", exact=True).click()
    with page.expect_download() as download:
        page.get_by_text("All heads (CSV)").click()
    with Path(download.value.path()).open(encoding="utf-8", newline="") as file:
        assert {row["second_sink"] for row in csv.DictReader(file)} == {""}


def test_saved_heads_are_as_faint_and_named_as_on_the_screen(open_page, short):
    page = open_page(short)
    until(page, RESTING)
    shares = page.evaluate(
        """(() => {
            const { saving, atlas } = document.getElementById('headwise').headwise;
            const drawn = [], words = [];
            const context = { drawImage: (canvas) => drawn.push([canvas.className, context.globalAlpha]),
                fillText: (text) => words.push(text), strokeRect: () => {} };
            saving.atlas(context);
            return { drawn, words, opacity: getComputedStyle(atlas.body.querySelector('canvas.faint')).opacity };
        })()"""
    )
    assert {name for name, _ in shares["drawn"]} == {"faint", ""}
    assert all(alpha == (float(shares["opacity"]) if name else 1) for name, alpha in shares["drawn"])
    assert "sink + broad" in shares["words"]


def test_escape_lets_go_of_a_kept_word(open_page, short):
    page = open_page(short)
    page.locator('.word[data-i="3"]').click()
    page.mouse.move(1190, 850)
    page.get_by_text("kept; click it again").wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Point at a word to see").wait_for()
    assert page.locator(".word.here").count() == 0


def test_the_average_without_the_first_token_gives_the_number_that_is_drawn(open_page, short, result):
    page = open_page(short, "#view=map&head=*.*")
    settled(page)
    point_at(page, 9, 8)
    page.locator(".fact", has_text="as drawn").wait_for()
    expected = torch.stack([weights.without(sink(1))[0, :, 9, 8] for weights in result.maps]).mean().item()
    told = page.locator(".fact", has_text="as drawn").inner_text().split()[0]
    assert float(told) == pytest.approx(expected, abs=0.01)


def test_a_text_of_one_word_is_not_torn_apart(open_page, tmp_path):
    found = view(load_builtin(), "Hello")
    assert found.T > 2
    page = open_page(found.save(tmp_path / "heads.html"))
    assert page.locator(".text").inner_text() == "<|start|>Hello"
    assert page.locator(".text.spaced").count() == 0
    maps = AttentionMap(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3))
    page = open_page(view(maps, words=["sea", "ship"]).save(tmp_path / "words.html"))
    assert page.locator(".text.spaced").count() == 1


def test_captions_under_pictures_are_whole(open_page, tmp_path):
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 12, 19, 8)
    key[:, ::2, 0] *= 4
    page = open_page(view([AttentionMap(query, key)] * 6).save(tmp_path / "heads.html"))
    page.set_viewport_size({"width": 1440, "height": 900})
    page.evaluate("for (const trait of document.querySelectorAll('.trait')) trait.textContent = 'sink +\\nsame-token';")
    caption = page.locator(".caption").nth(11)
    assert caption.evaluate("x => [x.scrollHeight - x.clientHeight, x.scrollWidth - x.clientWidth]") == [0, 0]
    assert caption.is_visible()
    assert not page.locator(".atlas.corner").count()


# Without a browser.


def test_the_page_without_data_is_small_and_asks_for_nothing():
    page = document([])
    assert len(page.encode()) <= 200_000
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)
    assert "default-src 'none'" in policy()
    assert "unsafe" not in policy()


def test_what_the_page_of_documents_says_runs(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    text = (Path(__file__).parents[2] / "docs" / "view.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/view.md", "exec"), names)  # noqa: S102
    assert {path.name for path in tmp_path.iterdir()} == {"heads.html", "two.html"}


def test_the_same_sight_gives_the_same_bytes(result, short, tmp_path):
    assert result.save(tmp_path / "again.html").read_bytes() == short.read_bytes()


def test_a_failed_save_leaves_what_was_there(result, tmp_path, monkeypatch):
    path = tmp_path / "heads.html"
    path.write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space left"):
        result.save(path)
    assert path.read_text() == "before"
    assert [x.name for x in tmp_path.iterdir()] == ["heads.html"]


@pytest.mark.parametrize("budget", [0, 100_000, True, 5e6])
def test_a_budget_too_small_is_refused(result, tmp_path, budget):
    with pytest.raises(OptionError, match="expected bytes, at least 200,000"):
        result.save(tmp_path / "heads.html", budget=budget)
