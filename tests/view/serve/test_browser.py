"""The live page in a real browser: type, run, switch heads off; no token acts, no other page gets in."""

import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headwise.view.serve import runs
from serving import TEXT, TOKEN, Process, listening, translator

HOSTILE = (
    "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'> <s> </textarea> "
    "\u202eevil \u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f680 a\u200bb \x07\x1b[31m ${window.hacked=3}"
)


@pytest.fixture
def page(browser):
    """A tab; whatever it complains of fails the test, unless the test takes it out of `troubles`."""
    context = browser.new_context(viewport={"width": 1200, "height": 860}, accept_downloads=True)
    opened = context.new_page()
    opened.troubles = []
    opened.on("console", lambda m: m.type in ("error", "warning") and opened.troubles.append(m.text))
    opened.on("pageerror", lambda error: opened.troubles.append(str(error)))
    yield opened
    context.close()
    assert not opened.troubles


def ask(page, text, model="builtin"):
    """Bring a text and a model, and run them; the page may be quicker, since it runs a short text by itself."""
    page.wait_for_selector(f".live option[value='{model}']", state="attached")
    if model != page.input_value(".live select"):
        page.select_option(".live select", model)
    page.fill(".ask-text", text)
    page.press(".ask-text", "Control+Enter")


def wait(page, expression, seconds=20):
    """Until this is true in the page. (The page's own policy forbids what playwright's wait_for_function does.)"""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(20)


def atlas(page, heads):
    """Wait for the pictures of what the fields ask for, not of the example that the page begins with."""
    current = "document.querySelector('.go').dataset.state === 'current'"
    wait(page, f"{current} && document.querySelectorAll('#headwise .head').length === {heads}")


def test_a_text_is_typed_and_the_atlas_appears(live, page):
    page.goto(live.address)
    assert page.url.endswith(f":{live.door.port}/")  # the token does not stay in the address
    ask(page, TEXT)
    atlas(page, 56)
    page.get_by_role("radio", name="All tokens").click()
    assert "7 layers × 8 heads · 16 tokens" in page.inner_text(".sentence")
    assert "nats per token" in page.inner_text(".loss")
    assert page.locator(".next tbody td").count() >= 6
    page.click("#headwise .head[data-place='1.4']")
    wait(page, "document.getElementById('headwise').headwise.stage.shown[0].tiles?.value(5, 4) > 0.1")
    found = page.evaluate("document.getElementById('headwise').headwise.stage.shown[0].tiles.value(5, 4)")
    look = next(iter(live.runs._kept.values()))
    assert found == pytest.approx(float(look.layer(1)[0, 4, 5, 4]), abs=1e-6)
    page.reload()  # the tab has kept the token
    page.wait_for_selector(".live option", state="attached")


def test_a_reload_brings_text_model_run_and_window_back(live, page):
    page.goto(live.address)
    ask(page, TEXT, "small")
    atlas(page, 6)
    page.click("#headwise .head[data-place='1.2']")
    wait(page, "location.hash.includes('head=1.2')")
    before = list(live.runs._kept)
    page.reload()
    page.wait_for_selector(".map-canvas")
    assert page.input_value(".ask-text") == TEXT
    assert page.input_value(".live select") == "small"
    assert page.inner_text(".subject").startswith("Head 1.2")
    assert list(live.runs._kept) == before, "the same run, not another"


def test_what_is_typed_before_the_server_answers_is_neither_lost_nor_mixed_with_the_example(live, page):
    answers = threading.Event()
    page.route("**/api/models", lambda route: (page.held.append(route), answers.set()))
    page.held = []
    page.goto(live.address)
    page.fill(".ask-text", TEXT)
    wait(page, "!window.headwiseLive.pending")  # the page would have asked by itself
    assert page.get_attribute(".go", "data-state") == "running"
    assert answers.wait(20)
    page.held[0].continue_()
    page.unroute("**/api/models")
    atlas(page, 56)
    assert page.input_value(".ask-text") == TEXT


def test_a_reload_runs_anew_where_the_server_has_forgotten(live, page):
    page.goto(live.address)
    ask(page, TEXT)
    atlas(page, 56)
    page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
    page.wait_for_selector(".loss .before")
    page.click(".silent .again")
    wait(page, "document.querySelector('h1').textContent.endsWith(' without 1.4')")
    for name in list(live.runs._kept):
        live.runs.cancel(name)
    page.reload()
    wait(page, "document.querySelector('h1')?.textContent.endsWith(' without 1.4')")
    assert page.inner_text(".chip.off") == "1.4 ×"
    page.troubles.clear()  # the browser notes that the old run is not there


def test_a_reload_brings_a_file_back(live, page, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(TEXT, encoding="utf-8-sig")
    page.goto(live.address)
    page.set_input_files(".picker", book)
    atlas(page, 56)
    page.reload()
    atlas(page, 56)
    assert page.inner_text(".file-name") == "book.txt"
    page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
    page.wait_for_selector(".loss .before")


def test_a_head_is_switched_off_and_the_loss_changes(live, page):
    page.goto(live.address)
    ask(page, TEXT)
    atlas(page, 56)
    before = page.inner_text(".loss .after")
    page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
    page.wait_for_selector(".loss .before")
    assert page.inner_text(".loss .before") == before
    assert page.inner_text(".loss .after") != before
    assert "without 1 head" in page.inner_text(".next")
    assert page.get_attribute("#headwise .head[data-place='1.4']", "data-off") is not None
    page.click(".silent .again")
    wait(page, "document.getElementById('headwise').headwise.sides.length === 2")  # with all heads, to compare
    assert page.inner_text("h1").endswith(" without 1.4")
    page.click("#headwise .head[data-place='1.4']")
    others = page.locator(".chooser", has_text="Compare with").locator("option").all_inner_texts()
    assert any(other.startswith("all heads: 1.4") for other in others)
    assert page.inner_text(".silent .again") == "Run again with all heads"
    page.click(".silent .chip")
    wait(page, "!document.querySelector('.loss .before')")
    assert page.inner_text(".loss .after") == before
    assert page.inner_text("h1").endswith(" without 1.4"), "the maps are still those"
    wait(page, "document.querySelector('.go').dataset.state === 'changed'")
    page.click(".go")
    wait(page, "!document.querySelector('h1').textContent.includes('without')")
    assert page.locator(".silent .again").count() == 0


def test_maps_asked_for_at_once_are_not_given_up_for_the_loss(live, page):
    page.goto(live.address)
    ask(page, TEXT)
    atlas(page, 56)
    page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
    page.click(".silent .again")  # before the loss without the head was asked for
    wait(page, "document.querySelector('h1').textContent.endsWith(' without 1.4')")
    page.wait_for_selector(".loss .before")


def test_the_o_key_switches_the_open_head(live, page):
    page.goto(live.address)
    ask(page, TEXT, "small")
    atlas(page, 6)
    page.click("#headwise .head[data-place='1.2']")
    page.keyboard.press("o")
    page.wait_for_selector(".chip.off")
    assert page.inner_text(".chip.off") == "1.2 ×"


def test_hostile_tokens_stay_text(live, page):
    page.goto(live.address)
    ask(page, HOSTILE)
    atlas(page, 56)
    page.click("#headwise .head[data-place='0.0']")
    page.wait_for_selector(".map-canvas")
    wait(page, "document.getElementById('headwise').headwise.resting")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('img, #headwise script, #live script').length") == 0
    assert "</script><script>window.hacked=1</script>" in page.inner_text(".text").replace("\n", "")


def test_a_file_is_brought_and_a_binary_one_is_refused_in_words(live, page, tmp_path):
    good, bad = tmp_path / "book.txt", tmp_path / "picture.png"
    good.write_text(TEXT, encoding="utf-8")
    bad.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(256))
    page.goto(live.address)
    page.set_input_files(".picker", bad)
    page.wait_for_selector(".status.wrong")
    assert "not UTF-8 text" in page.inner_text(".status")
    page.troubles.clear()  # the browser notes every refusal
    page.set_input_files(".picker", good)
    atlas(page, 56)
    assert page.inner_text(".file-name") == "book.txt"
    page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
    page.wait_for_selector(".loss .before")


def test_an_empty_text_is_refused_in_words(live, page):
    page.goto(live.address)
    atlas(page, 56)
    page.fill(".ask-text", "")
    assert page.inner_text(".status").startswith("Type or paste a text.")
    assert not page.is_visible(".results"), "losses and next tokens are those of the text before"
    assert page.is_disabled(".go")
    page.click(".write")
    assert "The text is empty" in page.inner_text(".status.wrong")
    faint = "Number(getComputedStyle(document.querySelector('.headwise')).opacity)"
    assert page.evaluate(faint) == 0.4, "what is shown is of the text before"
    page.fill(".ask-text", TEXT)
    assert page.evaluate(faint) == 1
    assert page.is_visible(".results")


def test_the_button_says_whether_the_pictures_are_those_of_the_text(live, page):
    page.goto(live.address)
    atlas(page, 56)
    assert page.inner_text(".go") == "✓ Up to date"
    assert page.is_disabled(".go")
    long = "The captain looked at the sea. " * 140  # more than the page runs by itself
    page.fill(".ask-text", long)
    assert page.inner_text(".go") == "Run"
    wait(page, "!window.headwiseLive.pending")
    assert page.inner_text(".go") == "Run", "the pictures are still those of the example"
    page.select_option(".live select", "small")  # which runs
    atlas(page, 6)
    page.fill(".ask-text", long + "Then he laughed.")
    page.click(".go")
    atlas(page, 6)
    assert page.locator("#headwise .text").text_content().endswith("Then he laughed.")
    page.fill(".ask-text", TEXT)
    assert page.inner_text(".go") in ("Updating…", "✓ Up to date")
    atlas(page, 6)
    assert "16 tokens" in page.inner_text(".sentence")


def test_it_begins_with_a_title_a_model_an_example_and_its_picture(live, page):
    page.goto(live.address)
    atlas(page, 56)
    assert "built-in model" in page.title()
    assert page.input_value(".ask-text").startswith("The captain looked")
    assert page.input_value(".live select") == "builtin"
    assert page.locator(".candidate").count() >= 6


def test_the_picture_follows_while_one_types(live, page):
    page.goto(live.address)
    atlas(page, 56)
    page.locator(".ask-text").press("End")
    page.locator(".ask-text").press_sequentially(" old ship")
    wait(page, "document.querySelector('#headwise .text')?.innerText.includes('old ship')")
    assert page.evaluate("document.activeElement.className") == "ask-text", "typing goes on"


def test_a_clicked_candidate_is_appended_and_the_model_continues(live, page):
    page.goto(live.address)
    atlas(page, 56)
    before, shown = page.input_value(".ask-text"), page.locator(".candidate").first.inner_text()
    assert shown.startswith("␣"), "its leading space is marked"
    word = shown[1:]
    page.locator(".candidate").first.click()
    wait(page, f"document.querySelector('.ask-text').value === {before + ' ' + word!r}")
    wait(page, f"document.querySelector('#headwise .text')?.innerText.endsWith({word!r})")
    page.click(".write")
    wait(page, f"document.querySelector('.ask-text').value.length > {len(before) + len(word) + 20}")
    atlas(page, 56)


@pytest.fixture(scope="module")
def two_texts(live, tmp_path_factory):
    """The server also offers an encoder–decoder model."""
    live.runs.models.add("two", translator("bart", tmp_path_factory.mktemp("two")))
    return live


def test_an_encoder_and_a_decoder_show_three_parts_and_two_texts(two_texts, page):
    page.goto(two_texts.address)
    atlas(page, 56)
    assert page.is_hidden(".parts")
    assert page.is_hidden(".ask-target")
    ask(page, TEXT, "two")
    atlas(page, 9)
    assert page.locator(".parts button").all_inner_texts() == ["Encoder", "Decoder", "Cross-attention"]
    assert page.is_hidden("text=color words by their loss"), "words of the encoder have no loss"
    page.get_by_role("radio", name="Cross-attention").click()
    atlas(page, 6)
    assert "(cross-attention)" in page.inner_text("h1")
    assert "attending to 15" in page.inner_text(".sentence")
    written = page.get_attribute(".ask-target", "placeholder").partition(": ")[2]
    assert written == two_texts.runs[page.evaluate("window.headwiseLive.id")].written
    page.fill(".ask-target", "The sea looked back.")
    atlas(page, 6)
    assert "6 tokens attending to 15" in page.inner_text(".sentence")
    page.click("#headwise .head[data-place='1.2']")
    run = two_texts.runs[page.evaluate("window.headwiseLive.id")]
    expected = float(run.layer(1)[0, 2, 4, 11])
    value = "document.getElementById('headwise').headwise.stage.shown[0].tiles?.value(4, 11)"
    wait(page, f"Math.abs({value} - {expected}) < 1e-6")
    page.get_by_label("color words by their loss").check()
    wait(page, "document.querySelector('.text.by-number') !== null")
    page.locator(".candidate").first.click()
    wait(page, "document.querySelector('.sentence').textContent.includes('7 tokens attending to 15')")
    page.reload()
    wait(page, "document.querySelector('.sentence')?.textContent.includes('7 tokens attending to 15')")
    assert page.input_value(".ask-target").startswith("The sea looked back.")
    page.select_option(".live select", "builtin")
    wait(page, "document.querySelector('.sentence').textContent.startsWith('7 layers')")
    assert page.is_hidden(".parts")


def test_words_are_colored_by_their_loss(live, page):
    page.goto(live.address)
    atlas(page, 56)
    page.get_by_label("color words by their loss").check()
    wait(page, "document.querySelector('.text.by-number') !== null")
    shares = page.evaluate(
        "Array.from(document.querySelectorAll('.word'), (x) => x.style.getPropertyValue('--number'))"
    )
    run = live.runs[page.evaluate("window.headwiseLive.id")]
    expected = [f"{min(100, round(100 * (loss or 0) / 8))}%" for loss in run.outcome.losses]
    assert [abs(int(a[:-1]) - int(b[:-1])) <= 1 for a, b in zip(shares, expected, strict=True)].count(False) == 0
    page.locator('.word[data-i="3"]').hover()
    page.locator(".details-title", has_text=f"loss {run.outcome.losses[3]:.2f} nats").wait_for()
    page.focus(".text")
    page.keyboard.press("Home")
    page.locator(".details[aria-live=polite] .details-title", has_text="no loss: nothing comes before it").wait_for()
    page.keyboard.press("ArrowRight")
    page.locator(".details-title", has_text=f"loss {run.outcome.losses[1]:.2f} nats").wait_for()
    page.get_by_label("color words by their loss").uncheck()
    wait(page, "!document.querySelector('.details').textContent.includes('loss')")
    assert sum(x or 0 for x in run.outcome.losses) / (run.T - 1) == pytest.approx(run.outcome.loss, abs=1e-4)


def test_a_sweep_colors_every_head_by_what_it_adds_to_the_loss(live, page):
    page.goto(live.address)
    ask(page, TEXT, "small")
    atlas(page, 6)
    page.click(".sweep")
    wait(page, "document.querySelector('.status').textContent.startsWith('Each head was switched off')")
    assert page.inner_text(".about").startswith("Bars: what removing the head adds to the loss")
    told = page.locator(".head .bar-text").all_inner_texts()
    page.get_by_label("click a head to switch it off").check()
    page.click("#headwise .head[data-place='1.2']")
    page.wait_for_selector(".loss .change")
    change = float(page.inner_text(".loss .change").replace("−", "-"))
    assert float(told[5].replace("−", "-")) == pytest.approx(change, abs=0.0015)


def test_a_sweep_is_not_shown_for_another_text(live, page):
    page.goto(live.address)
    ask(page, TEXT, "small")
    atlas(page, 6)
    page.click(".sweep")
    wait(page, "document.querySelector('.status').textContent.startsWith('Each head was switched off')")
    assert page.locator(".bar-text:visible").count() == 6
    ask(page, "Another text, of other words.", "small")
    wait(page, "document.querySelector('#headwise h1').textContent.includes('Another text')")
    assert page.locator(".bar-text:visible").count() == 0
    assert page.get_by_label("Bars").input_value() == "none"


def test_what_weights_carry_is_shown_of_a_live_run(live, page):
    page.goto(live.address)
    ask(page, TEXT)
    atlas(page, 56)
    weights = page.evaluate("document.querySelector('.head[data-place=\\'4.2\\'] canvas').toDataURL()")
    page.get_by_role("radio", name="Contributions").click()
    assert page.inner_text(".shown").startswith("Shown: contributions")
    wait(page, f"document.querySelector('.head[data-place=\\'4.2\\'] canvas').toDataURL() !== {weights!r}")
    page.click("#headwise .head[data-place='4.2']")
    run = live.runs[page.evaluate("window.headwiseLive.id")]
    expected = float(run.carried[4].contributions()[0, 2, 9, 8])
    value = "document.getElementById('headwise').headwise.stage.shown[0].tiles?.value(9, 8)"
    wait(page, f"Math.abs({value} - {expected}) < 1e-4")


def test_a_word_ranks_the_heads_of_the_model(live, page):
    page.goto(live.address)
    ask(page, TEXT)
    atlas(page, 56)
    page.locator('.word[data-i="9"]').hover()
    wait(page, "document.querySelectorAll('.ranked li').length === 8")
    run = live.runs[page.evaluate("window.headwiseLive.id")]
    best = max(float(run.layer(layer)[0, :, 9, 1:].max()) for layer in range(7))
    assert float(page.locator(".ranked .figure").first.inner_text()) == pytest.approx(best, abs=0.006)


def test_all_heads_are_in_the_window_and_nothing_is_wider_than_a_phone(live, page):
    page.goto(live.address)
    atlas(page, 56)
    wait(page, "!document.querySelector('.outcome').hidden")
    bottoms = "Array.from(document.querySelectorAll('#headwise .head'), (head) => head.getBoundingClientRect().bottom)"
    wait(page, f"Math.max(...{bottoms}) <= 860")
    page.set_viewport_size({"width": 390, "height": 800})
    wait(page, "innerWidth === 390 && document.documentElement.scrollWidth <= 390")


def test_the_whole_map_is_in_the_window_under_the_text(live, page):
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(live.address)
    atlas(page, 56)
    page.click("#headwise .head[data-place='4.2']")
    page.wait_for_selector(".map-canvas")
    map = "document.getElementById('headwise').headwise.stage.shown[0]"
    for width, height, least in ((1440, 900, 380), (1366, 768, 240), (1280, 720, 220), (800, 900, 240)):
        page.set_viewport_size({"width": width, "height": height})
        edges = f"innerWidth === {width} && {map}.canvas.getBoundingClientRect().bottom + scrollY <= {height}"
        wait(page, f"{edges} && {map}.plot.height >= {least}")


def test_a_long_text_says_from_how_many_rows_it_is_shown(live, page):
    page.goto(live.address)
    with live.runs:  # nothing is refined meanwhile
        ask(page, "The captain looked at the sea and the sea looked back. " * 110, "small")
        atlas(page, 6)
        wait(page, "document.querySelector('.status').textContent.includes('256 of 1,322 rows')")
        assert "numbers from 256" in page.inner_text(".sentence")
        page.click("#headwise .head[data-place='1.2']", modifiers=["Shift"])
        page.wait_for_selector(".loss .before")
    wait(page, "!document.querySelector('.sentence').textContent.includes('numbers from')")
    wait(page, "document.querySelector('.status').textContent === ''")
    assert "without 1 head" in page.inner_text(".next")


def test_a_run_is_cancelled(live, page, monkeypatch):
    page.goto(live.address)
    atlas(page, 56)

    def endless(*args, progress, **options):
        while True:
            progress(0.5)  # raises when it is cancelled
            time.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "run_model", endless)
        ask(page, "The captain looked back.")
        page.click(".stop")
        wait(page, "document.querySelector('.status').textContent.startsWith('Cancelled. The pictures are those')")
        assert not page.is_visible(".outcome")  # the loss and the next tokens of the text before
        assert page.inner_text(".go") == "Run"
        wait_for_end = time.monotonic() + 20
        while any(look.stage == "running" for look in live.runs._kept.values()):
            assert time.monotonic() < wait_for_end
            time.sleep(0.01)
    ask(page, TEXT)
    atlas(page, 56)


def test_heads_stay_off_while_one_types_and_as_they_were_after_cancel(live, page):
    page.goto(live.address)
    atlas(page, 56)
    page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
    page.wait_for_selector(".loss .before")
    page.fill(".ask-text", TEXT)
    wait(page, "document.querySelector('h1').textContent.endsWith(' without 1.4')")
    atlas(page, 56)
    assert page.locator(".chip.off").all_inner_texts() == ["1.4 ×"]
    assert "without 1 head" in page.inner_text(".next")
    page.route("**/api/runs", lambda route: None)  # never answered
    page.click("#headwise .head[data-place='2.1']", modifiers=["Shift"])
    page.wait_for_selector(".stop:visible")
    assert page.locator(".chip.off").count() == 2
    page.click(".stop")
    assert page.locator(".chip.off").all_inner_texts() == ["1.4 ×"]
    page.unroute("**/api/runs")
    page.select_option(".live select", "small")
    atlas(page, 6)
    assert page.locator(".chip.off").count() == 0, "another model has other heads"


def test_two_tabs_do_not_disturb_each_other(live, browser):
    context = browser.new_context()
    tabs = [context.new_page() for _ in range(2)]
    for tab, model in zip(tabs, ("builtin", "small"), strict=True):
        tab.goto(live.address)
        ask(tab, TEXT, model)
    for tab, heads in zip(tabs, (56, 6), strict=True):
        atlas(tab, heads)
    context.close()


def test_a_server_that_was_killed_and_started_again_is_found(page):
    with Process() as first:
        port = first.port
        page.goto(first.address)
        ask(page, TEXT)
        atlas(page, 56)
        first.send(signal.SIGKILL)
        page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
        page.wait_for_selector(".banner:not([hidden])")
        assert "Your text is kept here" in page.inner_text(".banner")
    with listening(port):  # with the same token, as HEADWISE_TOKEN makes it
        page.wait_for_selector(".loss .before", timeout=20_000)
        assert page.is_hidden(".banner")
        assert page.input_value(".ask-text") == TEXT
    page.click("#headwise .head[data-place='1.4']", modifiers=["Shift"])
    with listening(port, token=TOKEN[::-1]) as other:
        page.wait_for_selector(".banner.locked", timeout=20_000)
        assert "a new token" in page.inner_text(".banner")
        page.fill(".banner .address", other.address)
        page.click(".banner button")
        wait(page, "document.querySelector('.banner').hidden")
        atlas(page, 56)
        assert page.input_value(".ask-text") == TEXT
        page.close()
    page.troubles.clear()  # the browser notes every request that failed


@pytest.fixture
def elsewhere():
    """Another page on this computer."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_another_page_of_the_same_browser_gets_nothing(live, page, elsewhere):
    page.goto(live.address)
    atlas(page, 56)  # of the example
    root = live.address.partition("#")[0]
    page.goto(elsewhere)
    assert page.evaluate("[document.cookie, sessionStorage.length]") == ["", 0]
    asked = """async ([address, options]) => {
      try { const answer = await fetch(address, options); return `${answer.type} ${answer.status}`; }
      catch (error) { return "refused"; }
    }"""
    own = {"credentials": "include", "headers": {"Authorization": "Bearer guessed"}}
    post = {"method": "POST", "body": "hello", "headers": {"Content-Type": "text/plain"}}
    before = set(live.runs._kept)
    assert page.evaluate(asked, [f"{root}api/models", own]) == "refused"
    assert page.evaluate(asked, [f"{root}api/models", {"credentials": "include"}]) == "refused"
    assert page.evaluate(asked, [f"{root}api/runs", {"credentials": "include", **post}]) == "refused"
    assert page.evaluate(asked, [f"{root}api/runs", {"credentials": "include", "mode": "no-cors", **post}]) == "refused"
    assert page.evaluate(asked, [root, {"credentials": "include", "mode": "no-cors"}]) == "refused"
    assert set(live.runs._kept) <= before, "no new run; the example's is dropped when its page is left"
    framed = """async (address) => { const frame = document.createElement("iframe"); frame.src = address;
      document.body.append(frame); await new Promise((done) => { frame.onload = done; });
      try { return frame.contentDocument === null ? "closed" : frame.contentDocument.body.textContent; }
      catch { return "closed"; } }"""
    assert page.evaluate(framed, live.address) == "closed"
    script = """async (address) => new Promise((done) => { const made = document.createElement("script");
      made.src = address; made.onload = () => done("ran"); made.onerror = () => done("refused");
      document.head.append(made); })"""
    assert page.evaluate(script, f"{root}static/page.js") == "refused"
    page.troubles.clear()  # the browser notes every refusal


def test_a_name_that_is_made_to_point_here_is_refused(live, browser):
    context = browser.new_context()
    tab = context.new_page()
    port = live.door.port
    answer = tab.goto(f"http://localtest.localhost:{port}/#token={TOKEN}")  # browsers send .localhost here
    assert answer.status == 403
    assert "does not name this server" in tab.inner_text("body")
    context.close()


def test_another_server_of_this_computer_never_gets_the_token(live, browser):
    heard = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append((self.path, dict(self.headers)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = browser.new_context()
    tab = context.new_page()
    tab.goto(live.address)
    tab.wait_for_selector(".live option", state="attached")
    tab.goto(f"http://127.0.0.1:{server.server_port}/")
    context.close()
    server.shutdown()
    server.server_close()
    assert heard
    assert TOKEN not in repr(heard)


def test_a_tab_without_the_token_asks_for_the_address(live, page):
    page.goto(live.address.partition("#")[0])
    page.wait_for_selector(".banner.locked")
    assert "needs the token" in page.inner_text(".banner")
    page.fill(".banner .address", live.address)
    page.click(".banner button")
    page.wait_for_selector(".live option", state="attached")
    page.troubles.clear()  # the browser notes the refusal


def test_every_likely_token_has_a_column_and_parts_of_characters_are_told_apart(live, page):
    page.goto(live.address)
    atlas(page, 56)
    following = [
        {"token": token, "text": text, "id": id, "probability": share}
        for token, text, id, share in [
            ("‹E6 9D›", "", 7, 0.3), ("‹E4 BA›", "", 8, 0.2), (" sea", " sea", 9, 0.1), ("sea", "sea", 10, 0.05),
            ("same", "same", 11, 0.04), ("same", "same", 12, 0.03),
        ]
    ]  # fmt: skip
    outcome = {"loss": 1.5, "missing": None, "next": following}
    page.evaluate("run => window.headwiseLive.outcome.show(run)", {"off": [], "outcome": outcome})
    assert page.locator(".next thead th").all_inner_texts()[1:] == [
        "‹E6 9D›", "‹E4 BA›", "␣sea", "sea", "same #11", "same #12",
    ]  # fmt: skip
    assert page.locator(".next tbody td").all_inner_texts() == ["30 %", "20 %", "10 %", "5.0 %", "4.0 %", "3.0 %"]
    assert page.locator(".next .candidate").count() == 4, "a part of a character cannot be appended"
    less = [{**one, "probability": 0.5 - one["probability"]} for one in following]
    with_off = {"off": [[0, 0]], "outcome": {**outcome, "next": less[::-1]}, "with_all_heads": outcome}
    page.evaluate("run => window.headwiseLive.outcome.show(run)", with_off)
    shares = page.locator(".next .after td").all_inner_texts()
    assert shares == ["47 %", "46 %", "45 %", "40 %", "30 %", "20 %"]
    assert page.locator(".next .before td").first.inner_text() == "3.0 %"
