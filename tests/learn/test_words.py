"""The ten steps on words: the numbers are the model's, in the terminal, as JSON and in a real browser."""

import html
import json
import re

import pytest
import torch

from headwise import MultiHeadAttention, OptionError, alibi, load_builtin, watch
from headwise.cli import main
from headwise.learn.words import page as page_module
from headwise.learn.words import word_steps, words_page, words_text
from headwise.models import open_model
from headwise.view.tokens import wide

pytest.importorskip("tokenizers")
TEXT = "The quick brown fox"
HOSTILE = "</script><script>window.hacked=1</script>"


@pytest.fixture(scope="module")
def steps():
    return word_steps(TEXT)


def test_weights_and_output_are_those_of_the_model(steps):
    model = load_builtin()
    tokens, block, seen_output = model.tokens(TEXT), model.gpt.blocks[4].attention, []
    hook = block.register_forward_hook(lambda module, args, output: seen_output.append(output))
    with torch.no_grad(), watch(model.gpt) as seen:
        model.gpt(tokens)
    hook.remove()
    torch.testing.assert_close(steps.weights(), seen["blocks.4.attention"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(steps.output(), seen_output[0][0], rtol=1e-4, atol=1e-4)
    assert steps.words == ["<|start|>", "The", "quick", "brown", "fo", "x"]


def test_other_numbers_of_heads_cut_the_same_projections(steps):
    assert list(steps.cuts) == [1, 2, 4, 8, 16]
    values = {heads: cut.value.transpose(0, 1).flatten(1) for heads, cut in steps.cuts.items()}
    for value in values.values():
        torch.testing.assert_close(value, steps.projected()["value"], rtol=1e-4, atol=1e-5)
    assert steps.cuts[2].query.shape == (2, 6, 128)


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_any_transformers_model_is_read(kind):
    transformers = pytest.importorskip("transformers")
    import headwise.huggingface  # noqa: F401

    torch.manual_seed(0)
    if kind == "Llama":
        config = transformers.LlamaConfig(
            hidden_size=24, num_attention_heads=6, num_key_value_heads=2, intermediate_size=8, num_hidden_layers=3,
            vocab_size=131, attn_implementation="headwise",
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_embd=24, n_head=3, n_layer=3, vocab_size=131, attn_implementation="headwise")
        model = transformers.GPT2LMHeadModel(config)
    model = model.eval()
    opened = open_model(model, tokenizer=lambda text: [ord(letter) for letter in text])
    found = word_steps("fox", opened, layer=1)
    with torch.no_grad(), watch(model) as seen:
        model(torch.tensor([[ord(letter) for letter in "fox"]]))
    torch.testing.assert_close(found.weights(), list(seen.values())[1][0], rtol=1e-3, atol=1e-4)
    assert any("share a key/value head" in note for note in found.notes) == (kind == "Llama")


SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 131,
}
OTHERS = {
    "Bert": {},  # sees both directions
    "OPT": {"ffn_dim": 32, "word_embed_proj_dim": 24, "do_layer_norm_before": False},  # norm after
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0},  # no bias, fused, grouped, rotary
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8},  # another scale, and a cap
}


@pytest.mark.parametrize("kind", OTHERS)
def test_weights_are_those_of_the_model_or_a_note_says_that_they_differ(kind):
    transformers = pytest.importorskip("transformers")
    import headwise.huggingface  # noqa: F401

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(attn_implementation="headwise", **SIZES, **OTHERS[kind])
    ending = "Model" if kind == "Bert" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{ending}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)  # so that scores differ enough to tell
    found = word_steps("foxes", open_model(model, tokenizer=lambda text: [ord(letter) for letter in text]), layer=1)
    with torch.no_grad(), watch(model) as seen:
        model(torch.tensor([[ord(letter) for letter in "foxes"]]))
    agrees = torch.allclose(found.weights(), list(seen.values())[1][0], rtol=1e-3, atol=1e-3)
    assert agrees != any("its own weights differ" in note for note in found.notes)
    assert agrees == (kind != "Gemma2")
    assert found.visible.all() == (kind == "Bert")


def test_a_bias_by_distance_is_noted():
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, 3, causal=True, position=alibi(3))
    module = torch.nn.Sequential(torch.nn.Embedding(131, 24), layer)
    opened = open_model(module, tokenizer=lambda text: [ord(letter) for letter in text])
    assert "its own weights differ from these" in word_steps("fox", opened).notes[-1]


def test_a_layer_that_does_more_to_its_scores_says_so():
    torch.manual_seed(0)
    layer = MultiHeadAttention(24, 3, causal=True, softcap=0.01)
    module = torch.nn.Sequential(torch.nn.Embedding(131, 24), layer)
    opened = open_model(module, tokenizer=lambda text: [ord(letter) for letter in text])
    assert "its own weights differ from these" in word_steps("fox", opened).notes[-1]


def test_text_fits_into_eighty_columns_and_shows_every_word_and_head(steps):
    text = words_text(steps, 80)
    assert max(map(wide, text.splitlines())) <= 80
    for word in ("head 7", "(1, 8, 6, 32)", "CONCATENATED", "W_o mixes the heads", "−∞", "quick", "brown"):
        assert word in text
    long = words_text(word_steps("It was a dark evening in November, and the rain fell upon the roofs."), 80)
    assert max(map(wide, long.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80, 100])
def test_headings_and_numbers_are_wrapped_and_not_cut(width):
    text = words_text(word_steps("It was a dark evening in November, and the rain fell upon the roofs."), width)
    lines = text.splitlines()
    assert max(map(wide, lines)) <= width
    assert any(re.search(r"8 heads of width 32$", line) for line in lines[:3])
    assert "4 scores, continued" in text
    assert "a row is a token that looks, a column one it looks at" in text
    assert "its token with the most weight, and its numbers (step 8)" in text
    starts = text[text.index("CONCATENATED") : text.index("OUTPUT")]
    assert len(re.findall(r"\d\.\d\d …", starts)) == 8 * 20


def test_columns_show_their_words_where_there_is_room(steps):
    lines = words_text(steps, 80).splitlines()
    row = lines[lines.index(next(line for line in lines if line.startswith("head 0  "))) + 1]
    assert row.split() == 2 * ["<|st…", "The", "quick", "brown", "fo", "x"]
    numbers = lines[lines.index(row) + 3]
    assert row.index("quick") + len("quick") == numbers.index(" 6 ") + 2, "right-aligned, as the numbers are"


def test_command_prints_text_json_and_a_page(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["steps", TEXT, "--head", "5"]) == 0
    out = capsys.readouterr().out
    assert "HEAD 5 IN NUMBERS" in out
    assert max(map(wide, out.splitlines())) <= 80
    assert main(["steps", TEXT, "--json", "--layer", "2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["place"], len(told["weights"]), len(told["steps"])) == (2, 8, 10)
    path = tmp_path / "fox.html"
    assert main(["steps", TEXT, "--html", str(path)]) == 0
    assert path.stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([TEXT, "--layer", "7"], "layer 7: the model has layers 0 to 6"),
        ([TEXT, "--head", "8"], "--head 8: the layer has heads 0 to 7"),
        ([TEXT, "--heads", "2"], "--heads: a text is read by a real model"),
        ([TEXT, "--causal"], "--causal: a text is read by a real model"),
        (["word " * 40], "tokens long; the steps show at most 32"),
        (["--layer", "2"], "--layer and --head choose what to show of a text"),
    ],
    ids=lambda part: str(part)[:30],
)
def test_wrong_usage_is_named(arguments, words, capsys):
    assert main(["steps", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_layers_without_an_output_projection_are_refused():
    module = torch.nn.Sequential(torch.nn.Embedding(131, 24), MultiHeadAttention(24, 3, out_proj=False))
    opened = open_model(module, tokenizer=lambda text: [ord(letter) for letter in text])
    with pytest.raises(OptionError, match="no output projection"):
        word_steps("fox", opened)


# In the browser -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(browser, steps, tmp_path_factory):
    import dataclasses

    hostile = dataclasses.replace(steps, words=[*steps.words[:5], HOSTILE])
    path = tmp_path_factory.mktemp("page") / "fox.html"
    path.write_text(words_page(hostile), encoding="utf-8")
    context, troubles = browser.new_context(viewport={"width": 1200, "height": 900}), []
    opened = context.new_page()
    opened.on("console", lambda message: troubles.append(message.text))
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on("request", lambda request: troubles.append(request.url) if request.url[:4] == "http" else None)
    opened.goto(f"file://{path}")
    yield opened
    context.close()
    assert not troubles


def numbers(page):
    """The numbers of the tables on the page, row by row."""
    texts = page.locator("#picture td").all_text_contents()
    return [float(text.replace("−", "-").replace("∞", "inf") or 0) for text in texts]


def go(page, step):
    page.locator(f"#lane button:nth-child({step})").click()


def test_the_page_computes_the_weights_of_the_model(page, steps):
    go(page, 7)
    assert torch.allclose(torch.tensor(numbers(page)), steps.weights().flatten(), atol=0.0051)
    assert page.locator("#lane button[aria-current] .shape").text_content() == "(1, 8, 6, 6)"
    assert page.locator("#picture figure").count() == 8
    assert page.locator("#picture thead").first.locator("th").nth(2).text_content() == "The"


def test_every_number_says_what_it_is_made_of(page, steps):
    go(page, 4)
    page.locator("#picture table").nth(2).locator("tbody tr").nth(2).locator("td").nth(1).hover()
    value = float(steps.cut.scores()[2, 2, 1])
    told = page.locator("#made").text_content().replace("−", "-")
    assert f"{value:.4f}" in told
    assert "row “quick” times column “The”, the sum of 32 products" in told
    for step, words in ((1, "the input of this layer"), (2, "unchanged"), (3, "changed by the word’s position")):
        go(page, step)
        page.locator("#picture canvas").first.hover(position={"x": 40, "y": 30})
        assert words in page.locator("#made").text_content()
    go(page, 10)
    page.locator("#picture canvas").first.hover(position={"x": 2, "y": 2})
    told = page.locator("#made").text_content().replace("−", "-")
    assert f"{float(steps.output()[0, 0]):.4f}" in told
    assert "head 7" in told


def test_position_0_changes_nothing_and_the_page_says_so(page):
    go(page, 3)
    page.locator("#picture canvas").first.hover(position={"x": 40, "y": 5})
    assert "the number of step 2: position 0 leaves it as it is" in page.locator("#made").text_content()


def test_the_parts_of_a_head_stand_in_a_row_and_nothing_moves_under_the_pointer(page):
    page.set_viewport_size({"width": 1440, "height": 900})
    go(page, 3)
    triple = page.locator("#picture .triple").nth(1).locator("figure")
    assert triple.count() == 3
    assert len({round(triple.nth(i).bounding_box()["y"]) for i in range(3)}) == 1
    for step in range(1, 11):
        go(page, step)
        cut = "[...document.querySelectorAll('#lane .k')].filter((e) => e.scrollWidth > e.clientWidth).length"
        assert page.evaluate(cut) == 0, step
    go(page, 4)
    cell = page.locator("#picture td").nth(8)
    before = cell.bounding_box()
    cell.hover()
    assert cell.bounding_box() == before
    page.set_viewport_size({"width": 1200, "height": 900})


def test_with_one_head_no_step_speaks_of_several(page):
    page.locator("#heads button").first.click()
    for step in (2, 3, 9, 10):
        go(page, step)
        told = page.locator("#why").text_content().removesuffix(" The model itself has 8.")
        assert not any(words in told for words in ("them all", "side by side", "mixed"))
        assert "ne head" in told
    page.locator("#reset").click()


def test_switches_recompute_in_the_browser(page, steps):
    go(page, 7)
    page.locator("#mask").click()
    assert min(numbers(page)) >= 0
    assert numbers(page)[5] > 0 or sum(numbers(page)[:6]) == pytest.approx(1, abs=0.03), "the first word sees others"
    page.locator("#scale").click()
    unscaled = steps.cut.scores().softmax(-1)
    assert torch.allclose(torch.tensor(numbers(page)), unscaled.flatten(), atol=0.0051)
    page.locator("#reset").click()
    page.locator("#heads button", has_text=re.compile("^2$")).click()
    two = steps.cuts[2].weights(steps.visible)
    assert torch.allclose(torch.tensor(numbers(page)), two.flatten(), atol=0.0051)
    assert page.locator("#lane .shape").nth(1).text_content() == "(1, 6, 2, 128)"
    page.locator("#reset").click()


def test_code_and_reason_are_those_of_the_switches(page):
    def told(step):
        go(page, step)
        return page.locator("#code").text_content(), page.locator("#why").text_content()

    on = {step: told(step) for step in range(1, 11)}
    page.locator("#mask").click()
    assert told(5) == ("scores", "Nothing is hidden: every token reads every token, also those that come after it.")
    assert "0 for hidden keys" in on[7][1]
    assert "No key is hidden" in told(7)[1]
    assert told(6) == on[6]
    page.locator("#scale").click()
    assert told(6)[0] == "scores"
    assert "sqrt" in on[6][0]
    assert "Unscaled" in told(7)[1]
    page.locator("#reset").click()
    page.locator("#heads button", has_text=re.compile("^2$")).click()
    assert on[2][0].endswith("# B = 1, T = 6, H = 8, D = 32")
    assert told(2)[0].endswith("# B = 1, T = 6, H = 2, D = 128")
    assert told(6)[0] == "scores / sqrt(D)  # D = 128"
    page.locator("#reset").click()
    assert {step: told(step) for step in range(1, 11)} == on


def test_a_switch_that_would_do_nothing_is_off(browser, steps, tmp_path):
    import dataclasses

    path = tmp_path / "both.html"
    path.write_text(words_page(dataclasses.replace(steps, visible=torch.ones_like(steps.visible))), encoding="utf-8")
    context = browser.new_context(viewport={"width": 390, "height": 800})
    opened = context.new_page()
    opened.goto(f"file://{path}#8")
    assert opened.locator("#mask").is_disabled()
    assert "hides nothing" in opened.locator("#mask").get_attribute("title")
    go(opened, 5)
    assert opened.locator("#code").text_content() == "scores", "a layer that hides nothing does not mask"
    go(opened, 8)
    opened.locator("#picture canvas").first.hover(position={"x": 40, "y": 30})
    terms = opened.locator("#made .terms")
    assert terms.evaluate("x => x.scrollHeight <= x.clientHeight"), "six terms fit on a phone"
    context.close()


def test_the_slider_and_the_keys_move_through_the_steps(page):
    go(page, 1)
    page.locator("body").press("ArrowRight")
    assert page.locator("#name").text_content() == "2. split"
    page.locator("#step").fill("9")
    assert page.locator("#name").text_content() == "9. concat"


def test_no_word_acts_and_nothing_may_be_loaded(page, steps):
    assert page.evaluate("window.hacked") is None
    assert HOSTILE in page.locator("#text").text_content()
    text = html.unescape(words_page(steps))
    assert "default-src 'none'" in text
    assert "unsafe" not in text.partition("<title>")[0]


def test_zero_is_the_background_and_more_is_more_ink(page):
    go(page, 7)
    cells = page.locator("#picture table").nth(2).locator("tbody tr").nth(2).locator("td")
    shades = [cells.nth(i).evaluate("x => getComputedStyle(x).backgroundColor") for i in range(4)]
    alpha = [float(re.findall(r"[\d.]+", shade)[3]) if shade.count(",") == 3 else 1.0 for shade in shades]
    assert alpha[3] == 0.0
    assert alpha[1] > alpha[0] > 0


def test_orange_is_positive_and_blue_is_negative_as_in_the_page_of_heads(page):
    go(page, 4)
    assert "Orange is positive, blue is negative" in page.locator("#key").text_content()
    found = {}
    for cell in page.locator("#picture table").first.locator("tbody td:not(.off)").all():
        red, _, blue, *_ = re.findall(r"[\d.]+", cell.evaluate("x => getComputedStyle(x).backgroundColor"))
        found.setdefault(cell.text_content()[0] == "−", []).append(float(red) > float(blue))
    assert found.keys() == {False, True}
    assert all(found[False])
    assert not any(found[True])


def test_a_page_without_room_for_the_projections_still_shows_the_model(steps, monkeypatch):
    monkeypatch.setattr(page_module, "MOST_WEIGHTS", 10)
    assert page_module.page_data(steps)["linears"] is None
