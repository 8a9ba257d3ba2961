"""Tiles, rows, columns and single weights are those of the dense matrix, and bad addresses are refused."""

import array
import dataclasses
import threading

import pytest
import torch

import headwise
from headwise import AttentionMap, Scoring, causal
from headwise.view import pictures
from headwise.view.pictures import KINDS, SIDE, levels
from headwise.view.serve import app
from headwise.view.serve.requests import Limits
from serving import looked, refused, small_model

WEIGHTS = app.Shown("weights", None)
LONG = "The captain looked at the sea and the sea looked back. " * 45  # 542 tokens


@pytest.fixture(scope="module")
def dense():
    """The weights of the run, (layers, H, T, S)."""
    model = small_model()
    with torch.no_grad(), headwise.watch(model.gpt) as seen:
        model.gpt(model.tokens(LONG))
    return torch.stack([weights[0] for weights in seen.values()])


@pytest.fixture
def look(client):
    return f"/api/runs/{looked(client, LONG, model='small')['id']}"


def picture(answer):
    assert answer.status_code == 200, answer.text
    return torch.tensor(array.array("f", answer.content)).view(SIDE, SIDE)


def test_the_deepest_tiles_are_single_weights(client, look, dense):
    T = dense.shape[2]
    assert levels(T, T) == 2
    for row, col in ((0, 0), (1, 0), (2, 2), (3, 3)):
        answer = client.get(f"{look}/tile?layer=1&head=2&level=2&row={row}&col={col}")
        part = dense[1, 2, row * SIDE : (row + 1) * SIDE, col * SIDE : (col + 1) * SIDE]
        expected = torch.zeros(SIDE, SIDE)
        expected[: part.shape[0], : part.shape[1]] = part
        torch.testing.assert_close(picture(answer), expected, atol=1e-6, rtol=1e-4)
        rows = max(0, min(T - row * SIDE, SIDE))
        assert answer.headers["x-rows"] == f"{rows}/{rows}"


def test_rows_of_the_whole_sum_to_one(client, look):
    whole = picture(client.get(f"{look}/tile?layer=0&head=1&level=0&row=0&col=0"))
    sums = whole.sum(-1)
    torch.testing.assert_close(sums[: 542 // 4], torch.ones(542 // 4))
    assert not sums[-1]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_that_of_the_tiling(client, look, kind):
    weights = client.server.runs[look.rsplit("/", 1)[1]].layer(0)
    expected = pictures.tile(weights, 0, 1, 0, 0, kind)
    found = picture(client.get(f"{look}/tile?layer=0&head=0&level=1&row=0&col=0&kind={kind}"))
    torch.testing.assert_close(found, expected.float())


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_tile_comes_from_one_query_for_each_row_of_pixels_and_says_so(kind):
    T = 9000  # pixels of 64 queries
    weights = AttentionMap(torch.randn(1, 2, T, 5) * 2, torch.randn(1, 2, T, 5), Scoring(mask=causal()))
    quick = app.tile_data(weights, app.TileWanted(1, 0, 0, 0, kind, exact=False), WEIGHTS)
    pixels = -(-T // 64)
    assert (quick.rows, quick.of) == (pixels, T)
    rows = (torch.arange(pixels) * 64 + 32).clamp(max=T - 1)
    matrix = (weights.without(headwise.sink(1)) if kind == "rest" else weights).select(heads=[1], rows=rows)[0, 0]
    groups = torch.nn.functional.one_hot(torch.arange(T) // 64).float()
    if kind == "peak":
        expected = torch.nn.functional.max_pool1d(matrix[None], 64, ceil_mode=True)[0]
    elif kind == "uniform":
        seen = (torch.arange(T) <= rows[:, None]).float()
        expected = (matrix * (rows[:, None] + 1)) @ groups / (seen @ groups).clamp(min=1)
    else:
        expected = matrix @ groups
    found = torch.tensor(array.array("f", quick.data)).view(SIDE, SIDE)
    torch.testing.assert_close(found[:pixels, :pixels], expected, atol=1e-5, rtol=1e-4)
    assert not found[pixels:].any()


def test_a_wide_tile_is_exact_when_asked_for():
    T = 4200  # pixels of 32 queries
    weights = AttentionMap(torch.randn(1, 1, T, 5) * 2, torch.randn(1, 1, T, 5), Scoring(mask=causal()))
    exact = app.tile_data(weights, app.TileWanted(0, 0, 0, 0, "mass", exact=True), WEIGHTS)
    assert (exact.rows, exact.of) == (T, T)
    found = torch.tensor(array.array("f", exact.data)).view(SIDE, SIDE)
    expected = torch.zeros(SIDE, SIDE)
    cells = -(-T // 32)
    expected[:cells, :cells] = pictures.pixels(weights, 32, range(T))[0]
    torch.testing.assert_close(found, expected)


def test_a_tile_beyond_the_last_query_is_empty_and_quick():
    T = 4200
    weights = AttentionMap(torch.randn(1, 1, T, 5), torch.randn(1, 1, T, 5), Scoring(mask=causal()))
    found = app.tile_data(weights, app.TileWanted(0, 2, 3, 0, "mass", exact=False), WEIGHTS)
    assert (found.rows, found.of) == (0, 0)
    assert not any(found.data)


def test_a_row_and_a_column_are_given_strongest_first(client, look, dense):
    row = client.get(f"{look}/row?layer=0&head=1&query=37").json()
    assert row["whole"]
    assert sorted(row["keys"]) == list(range(38))
    assert row["weights"] == sorted(row["weights"], reverse=True)
    assert row["weights"] == pytest.approx([float(dense[0, 1, 37, key]) for key in row["keys"]], abs=1e-6)
    column = client.get(f"{look}/column?layer=0&head=1&key=37").json()
    assert len(column["queries"]) == app.MOST
    assert not column["whole"]
    best = dense[0, 1, :, 37].topk(app.MOST).values
    assert column["weights"] == pytest.approx(best.tolist(), abs=1e-6)


def test_one_weight_has_its_logit_rank_and_number_of_visible_keys(client, look, dense):
    row = dense[1, 0, 41]
    cell = client.get(f"{look}/cell?layer=1&head=0&query=41&key=17").json()
    assert cell["weight"] == pytest.approx(float(row[17]), abs=1e-6)
    assert cell["rank"] == int((row > row[17]).sum()) + 1
    assert cell["visible"] == 42
    other = client.get(f"{look}/cell?layer=1&head=0&query=41&key=3").json()
    difference = cell["logit"] - other["logit"]
    assert difference == pytest.approx(float((row[17] / row[3]).log()), abs=1e-4)
    hidden = client.get(f"{look}/cell?layer=1&head=0&query=41&key=42").json()
    assert hidden == {"weight": 0.0, "logit": None, "rank": None, "visible": 42}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("tile?layer=2&head=0&level=0&row=0&col=0", "layer: expected an integer from 0 to 1"),
        ("tile?layer=0&head=3&level=0&row=0&col=0", "head: expected an integer from 0 to 2"),
        ("tile?layer=0&head=0&level=3&row=0&col=0", "level: expected an integer from 0 to 2"),
        ("tile?layer=0&head=0&level=1&row=2&col=0", "row: expected an integer from 0 to 1"),
        ("tile?layer=0&head=0&level=1&row=0&col=-1", "col: expected an integer from 0 to 1"),
        ("tile?layer=0&head=0&level=0&row=0&col=0&kind=nice", "kind: expected one of mass"),
        ("tile", "layer: expected"),
        ("tile?layer=0x0", "layer: expected"),
        ("tile?layer=%C2%B2", "layer: expected"),
        ("tile?layer=" + "9" * 5000, "layer: expected"),
        ("row?layer=0&head=0&query=542", "query: expected an integer from 0 to 541"),
        ("column?layer=0&head=0&key=542", "key: expected an integer from 0 to 541"),
        ("cell?layer=0&head=0&query=0&key=1e3", "key: expected"),
    ],
    ids=lambda x: x[:44],
)
def test_places_that_are_not_there_are_refused(client, look, path, words):
    assert refused(client.get(f"{look}/{path}"), 422, words)


def test_a_run_that_is_not_there_is_refused(client):
    assert refused(client.get("/api/runs/nowhere/tile?layer=0"), 404, "no such run")


def test_more_questions_than_may_wait_are_refused(client_of, monkeypatch):
    client = client_of(dataclasses.replace(Limits(), tiles=1, queue=1))
    look = f"/api/runs/{looked(client, model='small')['id']}"
    begun, go = threading.Event(), threading.Event()

    def slow(*_):
        begun.set()
        assert go.wait(20)
        return {}

    monkeypatch.setattr(app, "largest_of", slow)
    statuses = []

    def ask():
        statuses.append(client.get(f"{look}/row?layer=0&head=0&query=0").status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads[:1]:
        thread.start()
    assert begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    for _ in range(400):
        if len(statuses) == 2:
            break
        threading.Event().wait(0.01)
    go.set()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 200, 429, 429]


# What weights carry.


@pytest.fixture(scope="module")
def outputs():
    """What the heads of the run read, layer by layer."""
    model = small_model()
    with torch.no_grad(), headwise.watch(model.gpt, outputs=True) as seen:
        model.gpt(model.tokens(LONG))
        return list(seen.outputs.values())


@pytest.mark.parametrize("measure", ["value", "contribution"])
def test_tiles_rows_columns_and_cells_of_what_weights_carry_are_those_of_the_definition(client, look, outputs, measure):
    layer, head, query, key = 1, 2, 401, 307
    whole = outputs[layer].by_value() if measure == "value" else outputs[layer].contributions()
    expected = whole[0, head].float()
    place = f"layer={layer}&head={head}&measure={measure}"
    found = picture(client.get(f"{look}/tile?{place}&level=2&row=1&col=1"))
    part = expected[SIDE : 2 * SIDE, SIDE : 2 * SIDE]
    torch.testing.assert_close(found[: len(part), : part.shape[1]], part, atol=1e-5, rtol=1e-3)
    row = client.get(f"{look}/row?{place}&query={query}").json()
    assert row["weights"] == pytest.approx(expected[query, row["keys"]].tolist(), abs=1e-5)
    assert sorted(row["weights"], key=abs, reverse=True) == row["weights"]
    column = client.get(f"{look}/column?{place}&key={key}").json()
    assert column["weights"] == pytest.approx(expected[column["queries"], key].tolist(), abs=1e-5)
    cell = client.get(f"{look}/cell?{place}&query={query}&key={key}").json()
    assert cell["weight"] == pytest.approx(expected[query, key].item(), abs=1e-5)
    assert cell["plain"] == pytest.approx(float(outputs[layer].weights[0, head, query, key]), abs=1e-5)
    best = client.get(f"{look}/ranking?query={query}&measure={measure}").json()[0]
    place = [int(part) for part in best["place"].split(".")]
    whole = outputs[place[0]].by_value() if measure == "value" else outputs[place[0]].contributions()
    assert best["weight"] == pytest.approx(float(whole[0, place[1], query, 1:].max()), abs=1e-5)


def test_small_pictures_of_what_weights_carry_come_a_layer_at_a_time(client, look):
    value, shared = (
        client.get(f"{look}/thumbnails?layer=1&measure={measure}").json() for measure in ("value", "contribution")
    )
    assert value["shape"] == shared["shape"] == [3, 64, 64]
    assert value["code"] == "sqrt 255"
    assert shared["code"].startswith("signed")


def test_measures_that_there_are_not_are_refused(client, look):
    place = "layer=1&head=2&level=0&row=0&col=0"
    assert refused(client.get(f"{look}/tile?{place}&measure=worth"), 422, "weights, value, contribution")
    assert refused(client.get(f"{look}/tile?{place}&measure=contribution&kind=peak"), 422, "mass only")
    assert refused(client.get(f"{look}/thumbnails?layer=1"), 422, "the manifest has the pictures of weights")
