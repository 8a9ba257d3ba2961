"""What notebooks show: the page in a frame, a static picture beside it, the same numbers; and matplotlib axes."""

import html
import re
import sys
import time

import pytest
import torch

from headwise import (
    AttentionMap,
    MissingExtraError,
    OptionError,
    Scoring,
    ShapeError,
    causal,
    load_builtin,
    view,
    watch,
)
from headwise.view.notebook import static_html
from headwise.view.words import described, named

HOSTILE = ["<script>alert(1)</script>", "</td>", '"onerror="x', "<s>", "&amp;", "‮", "\x1b[31m", "a", "b", "a", "b"]


def random_map(B=1, H=3, T=11, S=11, D=5, **scoring):
    return AttentionMap(torch.randn(B, H, T, D), torch.randn(B, H, S, D), Scoring(causal(), **scoring))


@pytest.mark.parametrize(
    "make", [lambda s: s, lambda s: s.maps[0], lambda s: s.summaries[0]], ids=["result", "map", "summary"]
)
def test_nothing_in_it_runs_and_tokens_are_text(make):
    shown = make(view(random_map(), words=HOSTILE))._repr_html_()
    static = re.sub(r'srcdoc="[^"]*"', "", shown)
    tags = set(re.findall(r"<(\w+)", static))
    safe = {"div", "p", "b", "table", "tr", "td", "th", "img", "br", "small", "code"}
    assert tags <= safe | {"iframe", "details", "summary"}
    for tag in re.findall(r"<[^>]*>", re.sub(r'="[^"]*"', "", static)):
        assert not re.search(r"\bon\w+=|javascript:|https?:", tag)
    assert not set(static) & {"\x1b", "‮"}


def test_the_page_is_in_a_frame_that_cannot_reach_the_notebook():
    result = view(random_map(), words=HOSTILE)
    (frame,) = re.findall(r"<iframe[^>]*>", result._repr_html_())
    assert 'sandbox="allow-scripts' in frame
    assert "allow-same-origin" not in frame
    page = html.unescape(re.search(r'srcdoc="([^"]*)"', frame)[1])
    assert page.startswith("<!doctype html>")
    assert "default-src 'none'" in html.unescape(page)


def test_the_page_in_the_frame_draws(browser, tmp_path):
    result = view([random_map(), random_map()], words=HOSTILE)
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{result._repr_html_()}", encoding="utf-8")
    page = browser.new_page()
    page.goto(f"file://{path}")
    inside = page.frame_locator("iframe")
    assert inside.locator(".head").first.is_visible()
    assert inside.locator(".head").count() == 6
    page.close()


# The strictest policy that VS Code puts on outputs (notebook.experimental.enableCsp), which frames inherit.
EDITOR = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src https: data:; "
    "connect-src https:; child-src https: data:"
)


def in_editor(shown):
    return f'<!doctype html><meta http-equiv="Content-Security-Policy" content="{EDITOR}">{shown}'


def in_a_frame(shown):
    """As Colab does: the whole output is in a frame of another origin."""
    return (
        f'<!doctype html><iframe sandbox="allow-scripts" width=900 height=900 srcdoc="{html.escape(shown)}"></iframe>'
    )


def in_a_hidden_part(shown):
    """As JupyterLab does below the window: an output gets its size long after it was inserted."""
    return f'<!doctype html><div id="part" style="display: none; width: 640px">{shown}</div>'


def cut_off(inside):
    """Whether the last picture is cut off at the right."""
    box, frame = inside.locator(".head").last.bounding_box(), inside.locator("html").bounding_box()
    return box["x"] + box["width"] > frame["x"] + frame["width"]


@pytest.mark.parametrize("around", [in_editor, in_a_frame, in_a_hidden_part])
def test_the_page_draws_in_what_notebooks_put_around_it(browser, tmp_path, around):
    path = tmp_path / "notebook.html"
    path.write_text(around(view([random_map(H=7)] * 2, words=HOSTILE)._repr_html_()), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    page.goto(f"file://{path}")
    if around is in_a_hidden_part:
        page.evaluate("document.getElementById('part').style.display = 'block'")
    inside = page.frame_locator("iframe")
    inside = inside.frame_locator("iframe") if around is in_a_frame else inside
    inside.locator(".head canvas").last.wait_for()
    end = time.monotonic() + 20
    while cut_off(inside):
        assert time.monotonic() < end, "a picture is cut off"
        page.wait_for_timeout(20)
    assert inside.locator(".head").count() == 14
    page.close()


def test_an_output_is_smaller_than_a_notebook_may_hold():
    shown = view(load_builtin(), "The captain looked at the sea. " * 90)._repr_html_()
    assert len(shown) < 3_000_000


def test_watched_layers_are_shown_as_one_view():
    model = load_builtin()
    with torch.no_grad(), watch(model.gpt) as seen:
        model.gpt(model.tokens("The captain looked"))
    assert "7 layers × 8 heads" in seen._repr_html_()
    with torch.no_grad(), watch(model.gpt, statistics=lambda weights: 1) as seen:
        model.gpt(model.tokens("The captain looked"))
    assert "without attention maps" in seen._repr_html_()


def test_hostile_words_of_pairs_are_escaped():
    result = view(random_map(), words=["<script>"] * 11)
    assert result.pairs()
    assert html.escape("<script>") in result._repr_html_()


def test_it_shows_every_head_with_its_reading():
    result = view([random_map(), random_map()], words=HOSTILE)
    shown = result._repr_html_()
    for head in result.heads:
        assert f"{head.place} {html.escape(described(head.summary))}" in shown
    assert shown.count("<img") == 6
    assert html.escape(result.sentence) in shown


def test_a_summary_shows_its_numbers_as_printed():
    summary = random_map().summary()
    shown = summary._repr_html_()
    for head in summary:
        for value in head.numbers.values():
            assert f"<td>{value:.2f}</td>" in shown
    assert repr(summary) == str(summary)
    assert repr(summary).startswith("head  reading")


@pytest.mark.parametrize(
    "make",
    [
        lambda: static_html(view([random_map(H=32, T=70, S=70) for _ in range(7)])),
        lambda: static_html(view(random_map(H=64, T=300, S=300))),
        lambda: random_map(H=301, T=2, S=2).summary()._repr_html_(),
    ],
    ids=["result", "map", "summary"],
)
def test_what_is_static_stays_under_300_kilobytes(make):
    assert len(make().encode()) <= 300_000


def test_a_saved_notebook_stays_small():
    assert len(view([random_map(H=8, T=211, S=211) for _ in range(7)])._repr_html_()) < 3_000_000


def test_many_heads_are_told_to_be_more():
    assert "The 64 clearest of 96 heads" in view([random_map(H=32) for _ in range(3)])._repr_html_()
    assert "and 45 more heads" in random_map(H=301, T=2, S=2).summary()._repr_html_()


def test_of_a_long_map_some_queries_are_looked_at_and_it_says_so(monkeypatch):
    from headwise.view import notebook

    monkeypatch.setattr(notebook, "WORK", 3 * 101 * 17)
    weights = random_map(T=101, S=101)
    assert "numbers from 17 of these queries" in weights._repr_html_()


def test_printing_a_map_computes_nothing():
    weights = random_map()
    assert repr(weights) == "AttentionMap(B=1, H=3, T=11, S=11, float32, cpu)"
    assert weights._lse is None


def test_samples_gradients_and_maps_without_numbers_are_displayed():
    assert "The first sample" in random_map(B=2)._repr_html_()
    learning = AttentionMap(torch.randn(1, 2, 5, 3, requires_grad=True), torch.randn(1, 2, 5, 3))
    assert learning._repr_html_().count("<img") == 2
    nothing = AttentionMap(torch.empty(1, 2, 5, 3, device="meta"), torch.empty(1, 2, 5, 3, device="meta"))
    assert "meta" in nothing._repr_html_()
    query = torch.randn(1, 2, 5, 3)
    stale = AttentionMap(query, torch.randn(1, 2, 5, 3))
    query.zero_()
    assert "changed in place" in stale._repr_html_()


def test_those_that_show_no_html_get_text():
    result = view(random_map())
    bundle = result._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == str(result)
    assert bundle["text/html"] == result._repr_html_()


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_a_plot_shows_the_weights_between_the_words(pyplot):
    weights = random_map()
    words = [f"${i}<" for i in range(11)]
    ax = weights.plot(head=2, tokens=words)
    torch.testing.assert_close(torch.tensor(ax.images[0].get_array().filled(0)), weights[0, 2])
    assert ax.images[0].norm.vmin == 0
    assert ax.images[0].norm.vmax == 1
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key (attended token)", "query (attending token)")
    assert [label.get_text() for label in ax.get_xticklabels()] == words
    ax.figure.canvas.draw()


@pytest.mark.parametrize("T", [11, 701])
def test_a_plot_shows_hidden_keys_in_a_colour_of_their_own(pyplot, T):
    weights = AttentionMap(torch.randn(1, 1, T, 5) * 9, torch.randn(1, 1, T, 5), Scoring(mask=causal()))
    ax = weights.plot(0)
    image = ax.get_images()[0]
    picture = image.get_array()
    cells = torch.ones(picture.shape, dtype=torch.bool)
    assert (torch.from_numpy(picture.mask.copy()) == cells.triu(1)).all()
    grey = image.to_rgba(picture)[0, -1]
    assert abs(grey[0] - grey[2]) < 1e-6
    assert grey[0] < 0.95 < image.cmap(0.0)[0], "no weight is white, hidden keys are gray"
    assert [bar.get_ylabel() for bar in ax.figure.axes if bar is not ax] == ["attention weight (gray: hidden)"]


def test_several_heads_have_axes_each(pyplot):
    weights = random_map(H=7)
    assert [ax.get_title() for ax in weights.plot([5, 1])] == ["head 5", "head 1"]
    assert len(weights.plot()) == 7
    _, axes = pyplot.subplots(1, 2)
    assert list(weights.plot([5, 1], ax=axes)) == list(axes)
    assert weights.plot(3, ax=axes[0]) is axes[0]


def test_a_long_plot_is_pooled_and_its_rows_sum_to_one(pyplot):
    ax = random_map(H=1, T=701, S=701).plot(0)
    shown = torch.tensor(ax.images[0].get_array().filled(0))
    assert shown.shape == (512, 512)
    torch.testing.assert_close(shown.sum(-1), torch.ones(512))
    assert ax.get_xlim() == (-0.5, 700.5)


def test_a_view_plots_with_its_own_words(pyplot):
    result = view(random_map(T=3, S=3), words=list("abc"))
    assert [label.get_text() for label in result.plot(0, 1).get_yticklabels()] == list("abc")
    cross = view(random_map(T=3, S=5), words=list("abc"), keys=list("vwxyz"))
    assert [label.get_text() for label in cross.plot(0, 1).get_xticklabels()] == list("vwxyz")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w: w.plot(0, tokens=["a"]), ShapeError, "tokens: 1 given, but the map has 11"),
        (lambda w: w.plot(0, tokens="a" * 11), ShapeError, "one string per token"),
        (lambda w: w.plot([]), OptionError, "nothing to plot"),
        (lambda w: w.plot([0, 1], ax=[1]), OptionError, "1 axes given for 2 heads"),
        (lambda w: w.plot(3), IndexError, "3"),
    ],
)
@pytest.mark.usefixtures("pyplot")
def test_bad_plots_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(random_map())


def test_without_matplotlib_a_plot_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"\[plot\]"):
        random_map().plot(0)


def test_the_static_picture_names_and_fades_heads_as_the_page_does():
    result = view(load_builtin(), "The captain looked at the sea, and the sea looked at the captain.")
    cells = re.findall(r'<img [^>]*style="([^"]*)"[^>]*><br><small>(\S+) ([^<]*)</small>', static_html(result))
    assert [name for _, _, name in cells] == [named(head.summary) for head in result.heads]
    assert "sink + broad" in {name for _, _, name in cells}
    faint = [place for style, place, _ in cells if "opacity" in style]
    assert faint == [head.place for head in result.heads if head.summary["sink"] > 0.5]
    assert "faint: more than half is left out" in static_html(result)


def test_the_map_of_a_watched_layer_is_named_and_numbered_as_in_its_model():
    model = load_builtin()
    with torch.no_grad(), watch(model.module) as seen:
        model.read(model.tokens("The captain looked at the sea."))
    name = list(seen)[4]
    shown = html.unescape(seen[name]._repr_html_())
    assert f"What the attention heads of {name} do with 8 tokens" in shown
    assert '"number":4' in shown
    assert "heads 0" not in shown
    assert "<small>4.2 " in shown
