"""Runs: numbers are those of the maps, long texts come from some rows first, heads fall silent, work can be ended."""

import copy
import dataclasses
import inspect
import logging
import threading
import time

import pytest
import torch

import headwise
from headwise import AttentionMap, Scoring, causal, load_builtin
from headwise.view.pictures import LayerStatistics
from headwise.view.result import View
from headwise.view.serve import app, models, runs
from headwise.view.serve import runs as runs_module
from headwise.view.serve.models import outcome
from headwise.view.serve.requests import Limits
from headwise.view.texts import RunTexts
from serving import TEXT, begun, looked, refused, small_model, until

LONG = "The captain looked at the sea and the sea looked back. " * 110  # 1322 tokens


def maps_of(model, text):
    ids = model.tokens(text, most=10**9)
    with torch.no_grad(), headwise.watch(model.gpt) as seen:
        logits = model.gpt(ids)
    return ids, dict(seen), logits


def manifest(client, id):
    return client.get(f"/api/runs/{id}/manifest").json()["manifest"]


# What is found.


@pytest.mark.parametrize("portion", [1, 2**26], ids=["head by head", "layer by layer"])
def test_numbers_are_those_of_a_view(client, portion, monkeypatch):
    monkeypatch.setattr(runs, "PORTION", portion)
    told = looked(client)
    model = load_builtin()
    ids, maps, logits = maps_of(model, TEXT)
    result = View(maps, model.pieces(ids), ids)
    found = manifest(client, told["id"])
    assert found["sentence"] == result.sentence
    assert found["tokens"] == result.tokens
    for layer, expected in zip(found["layers"], result.to_dict()["layers"], strict=True):
        assert layer["name"] == expected["name"]
        for head, wanted in zip(layer["heads"], expected["heads"], strict=True):
            assert head["reading"] == wanted["reading"]
            assert head["numbers"] == pytest.approx(wanted["numbers"], abs=1e-5)
    places = [(p.layer, p.head, p.query, p.key) for p in result.pairs()]
    assert [(p["layer"], p["head"], p["query"], p["key"]) for p in found["pairs"]] == places
    assert [p["weight"] for p in found["pairs"]] == pytest.approx([p.weight for p in result.pairs()], abs=1e-5)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:])
    assert told["outcome"]["loss"] == pytest.approx(float(loss), abs=1e-4)
    best = logits[0, -1].softmax(-1).topk(10)
    assert [x["probability"] for x in told["outcome"]["next"]] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert [x["token"] for x in told["outcome"]["next"]] == model.pieces(best.indices)
    assert told["with_all_heads"] == told["outcome"]


def test_one_token_has_no_loss_and_a_next(client):
    told = until(client, client.post("/api/runs", json={"ids": [0]}).json()["id"], ("finished", "failed"))
    assert told["error"] is None
    assert told["outcome"]["loss"] is None
    assert len(told["outcome"]["next"]) == 10


def test_the_loss_of_a_long_text_does_not_depend_on_its_portions(monkeypatch):
    model = small_model()
    ids = torch.arange(3, 103)[None]
    whole = outcome(model, RunTexts(ids))
    monkeypatch.setattr(models, "CHUNK", 7)
    assert outcome(model, RunTexts(ids)).loss == pytest.approx(whole.loss, abs=1e-5)


def test_a_text_beyond_what_the_model_was_made_for_says_so(client):
    told = looked(client, LONG, maps=False)
    assert "trained on texts of 1,024 tokens and this one has 1,322" in told["note"]


# Long texts.


def test_a_long_text_is_first_seen_from_256_of_its_rows_and_in_the_end_from_all(client):
    with client.server.runs:  # nothing is refined meanwhile
        told = looked(client, LONG, model="small")
        id, first = told["id"], manifest(client, told["id"])
    assert (told["stage"], told["rows"], told["version"]) == ("refining", [256, 1322], 1)
    told = until(client, id, ("finished",))
    assert (told["rows"], told["version"]) == ([1322, 1322], 2)
    assert "numbers from 256" in first["sentence"]
    assert first["T"] == first["S"] == 1322
    last = manifest(client, id)
    assert "numbers from" not in last["sentence"]
    model = small_model()
    ids, maps, _ = maps_of(model, LONG)
    expected = View(maps, model.pieces(ids), ids)
    assert last["sentence"] == expected.sentence
    for layer, summary in zip(last["layers"], expected.summaries, strict=True):
        for head, wanted in zip(layer["heads"], summary, strict=True):
            assert head["numbers"] == pytest.approx(wanted.numbers, abs=1e-4)
    few = View(maps, model.pieces(ids), ids, queries=256)
    for layer, summary in zip(first["layers"], few.summaries, strict=True):
        for head, wanted in zip(layer["heads"], summary, strict=True):
            assert head["numbers"] == pytest.approx(wanted.numbers, abs=1e-4)


@pytest.mark.parametrize(("T", "counts"), [(7, [7]), (512, [512]), (513, [256, 513]), (32768, [256, 2048, 32768])])
def test_pictures_grow_by_steps(T, counts):
    assert runs.query_counts(T) == counts


def test_what_some_rows_tell_stands_for_all():
    weights = AttentionMap(torch.randn(1, 2, 1100, 5), torch.randn(1, 2, 1100, 5), Scoring(mask=causal()))
    result = View({"": weights}, queries=100)
    seen = LayerStatistics.of(result.sampled[0]).stretched(result.queries, result.T)
    exact = LayerStatistics.of(weights)
    torch.testing.assert_close(seen.received.sum(-1), torch.full((2,), 1100.0))  # every query gives 1
    assert seen.entropy.shape == exact.entropy.shape
    for row in result.queries.tolist():
        torch.testing.assert_close(seen.entropy[:, row - 10 : row + 1], exact.entropy[:, row, None].expand(2, 11))
        torch.testing.assert_close(seen.log_sum_exp[:, row], exact.log_sum_exp[:, row])


def test_refining_rests_while_somebody_asks(client):
    runs = client.server.runs
    with runs:
        id = looked(client, LONG, model="small")["id"]
        time.sleep(2 * runs_module.QUIET)
        assert inspect.getgeneratorstate(next(reversed(runs._refining.values()))) == "GEN_CREATED"
        told = client.get(f"/api/runs/{id}").json()
        assert (told["stage"], told["done"], told["rows"], told["version"]) == ("refining", 0, [256, 1322], 1)
    assert until(client, id, ("finished",))["rows"] == [1322, 1322]


# Heads switched off.


def test_silent_heads_change_the_loss_as_zeros_in_the_output_projection_do(client):
    told = looked(client, off=[[0, 3], [4, 2]], maps=False)
    model = load_builtin()
    quiet = copy.deepcopy(model)
    D = quiet.gpt.blocks[0].attention.head_dim
    for layer, head in ((0, 3), (4, 2)):
        quiet.gpt.blocks[layer].attention.out_proj.weight[:, head * D : (head + 1) * D] = 0
    ids = model.tokens(TEXT)
    with torch.no_grad():
        expected, plain = outcome(quiet, RunTexts(ids)), outcome(model, RunTexts(ids))
    assert told["outcome"]["loss"] == pytest.approx(expected.loss, abs=1e-5)
    assert told["with_all_heads"]["loss"] == pytest.approx(plain.loss, abs=1e-5)
    assert told["outcome"]["next"][0]["probability"] == pytest.approx(expected.next[0].probability, abs=1e-5)
    assert abs(expected.loss - plain.loss) > 0.01
    assert told["off"] == [[0, 3], [4, 2]]


def test_maps_of_a_run_with_silent_heads_are_those_of_the_model_without_them(client):
    told = looked(client, off=[[0, 1]], model="small")
    model = small_model()
    with headwise.silence(model.gpt, {"blocks.0.attention": [1]}):
        _, maps, _ = maps_of(model, TEXT)
    row = client.get(f"/api/runs/{told['id']}/row?layer=1&head=2&query=9").json()
    expected = maps["blocks.1.attention"][0, 2, 9].sort(descending=True).values
    assert row["weights"] == pytest.approx(expected[: len(row["weights"])].tolist(), abs=1e-5)
    looked(client, model="small")
    assert "_attached" not in vars(client.server.runs.models["small"].gpt.blocks[0].attention)


def test_what_a_text_gives_with_all_heads_is_computed_once(client, monkeypatch):
    runs = []
    original = runs_module.run_model
    monkeypatch.setattr(
        runs_module, "run_model", lambda *args, **options: runs.append(args) or original(*args, **options)
    )
    looked(client, off=[[0, 0]], maps=False, model="small")
    looked(client, off=[[0, 1]], maps=False, model="small")
    assert len(runs) == 3


def opened(kind, maker, folder, **more):
    """A small transformers model, from a folder on disk."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    tokenizer = load_builtin().tokenizer
    config = transformers.AutoConfig.for_model(kind, vocab_size=tokenizer.get_vocab_size(), **sizes, **more)
    getattr(transformers, maker).from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return headwise.models.open_model(folder)


def test_a_transformers_model_is_looked_at_and_its_heads_fall_silent(client_of, tmp_path):
    model = opened("llama", "AutoModelForCausalLM", tmp_path)
    client = client_of(other=model)
    told = looked(client, model="other", off=[[1, 2]])
    assert len(manifest(client, told["id"])["layers"]) == 2
    quiet = copy.deepcopy(model)
    quiet.module.model.layers[1].self_attn.o_proj.weight[:, 16:] = 0
    ids = model.tokens(TEXT)
    with torch.no_grad():
        assert told["outcome"]["loss"] == pytest.approx(outcome(quiet, RunTexts(ids)).loss, abs=1e-5)
        assert told["with_all_heads"]["loss"] == pytest.approx(outcome(model, RunTexts(ids)).loss, abs=1e-5)
    assert refused(client.post("/api/runs", json={"text": "a", "model": "other", "off": [[0, 3]]}), 422, "has 3 heads")


def test_an_encoder_has_maps_and_says_why_there_is_no_loss(client_of, tmp_path):
    client = client_of(encoder=opened("bert", "AutoModel", tmp_path))
    told = looked(client, model="encoder")
    assert told["outcome"]["loss"] is None
    assert "does not generate text" in told["outcome"]["missing"]
    answer = client.post("/api/runs", json={"text": "the sea " * 600, "model": "encoder"})
    assert refused(answer, 413, "the limit is 512")


# Ends.


def ended(run, seconds=20):
    """Wait until the thread of a cancelled run has left it."""
    end = time.monotonic() + seconds
    while run.stage != "cancelled" and time.monotonic() < end:
        time.sleep(0.01)
    assert run.stage == "cancelled"


class Gate:
    """Holds the work in the middle of a run."""

    def __init__(self, monkeypatch):
        self.reached, self.open, self.passing = threading.Event(), threading.Event(), False
        original = runs_module.run_model

        def held(model, ids, off=(), *, maps=True, progress=lambda _: None):
            passing = self.passing

            def slowly(done):
                if done > 0 and not passing:
                    self.reached.set()
                    assert self.open.wait(20)
                progress(done)

            return original(model, ids, off, maps=maps, progress=slowly)

        monkeypatch.setattr(runs_module, "run_model", held)


def test_a_run_is_ended_between_layers_and_the_model_is_left_as_it_was(client, monkeypatch):
    gate = Gate(monkeypatch)
    id = begun(client, model="small", off=[[0, 0]])
    assert gate.reached.wait(20)
    told = client.get(f"/api/runs/{id}").json()
    assert told["stage"] == "running"
    assert told["ready"] is False
    assert refused(client.get(f"/api/runs/{id}/manifest"), 409, "nothing to show yet")
    assert refused(client.get(f"/api/runs/{id}/tile?layer=0&head=0&level=0&row=0&col=0"), 409, "no map")
    look = client.server.runs[id]
    assert client.delete(f"/api/runs/{id}").status_code == 200
    assert refused(client.get(f"/api/runs/{id}"), 404, "no such run")
    gate.passing = True
    looked(client, model="small")  # the next one is worked at, while the first is still in the middle of a layer
    assert look.stage == "running"
    gate.open.set()
    ended(look)
    assert look.maps == {}
    layer = client.server.runs.models["small"].gpt.blocks[0].attention
    assert not layer._forward_pre_hooks
    assert "_attached" not in vars(layer)
    assert "_attached" not in vars(layer)


def test_a_run_that_waits_can_be_ended(client, monkeypatch):
    gate = Gate(monkeypatch)
    first = begun(client, model="small")
    assert gate.reached.wait(20)
    second = begun(client, model="small")
    assert client.delete(f"/api/runs/{second}").json()["stage"] == "cancelled"
    gate.open.set()
    until(client, first, ("finished",))


def test_more_runs_than_may_wait_are_refused(client_of, monkeypatch):
    gate = Gate(monkeypatch)
    client = client_of(dataclasses.replace(Limits(), waiting=2))
    begun(client, model="small")
    assert gate.reached.wait(20)
    begun(client, model="small")
    begun(client, model="small")
    answer = client.post("/api/runs", json={"text": TEXT, "model": "small"})
    assert refused(answer, 429, "2 runs are already waiting")
    assert answer.headers["retry-after"] == "5"
    gate.open.set()


def test_the_oldest_runs_are_forgotten(client_of):
    client = client_of(dataclasses.replace(Limits(), runs=2))
    ids = [looked(client, f"Text {i}", model="small")["id"] for i in range(4)]
    states = [client.get(f"/api/runs/{id}").status_code for id in ids]
    assert states == [404, 404, 200, 200]


def test_runs_without_maps_are_forgotten_like_the_others(client_of):
    client = client_of(dataclasses.replace(Limits(), runs=3))
    for _ in range(6):
        looked(client, model="small", maps=False)
    assert len(client.server.runs._kept) == 3


def test_runs_are_forgotten_where_their_maps_take_too_much(client_of):
    client = client_of(dataclasses.replace(Limits(), memory=1))
    first, second = (looked(client, f"Text {i}", model="small")["id"] for i in range(2))
    assert client.get(f"/api/runs/{first}").status_code == 404
    assert client.get(f"/api/runs/{second}").status_code == 200


def test_a_failure_of_ours_is_told_without_the_text(client, monkeypatch, caplog):
    def broken(*_, **__):
        raise KeyError("captain")

    monkeypatch.setattr(runs_module, "run_model", broken)
    with caplog.at_level(logging.DEBUG):
        told = until(client, begun(client), ("failed",))
    assert told["error"] == "an internal error of headwise (KeyError)."
    assert "a run failed: KeyError at" in caplog.text
    assert "captain" not in caplog.text


def test_an_answer_that_fails_is_told_without_the_text(client, monkeypatch, caplog):
    told = looked(client, model="small")

    def broken(*_):
        raise KeyError("captain")

    monkeypatch.setattr(app, "largest_of", broken)
    with caplog.at_level(logging.DEBUG):
        answer = client.get(f"/api/runs/{told['id']}/row?layer=0&head=0&query=0")
    assert refused(answer, 500, "an internal error of headwise (KeyError)")
    assert "captain" not in caplog.text


def test_nothing_of_a_text_is_logged(client, caplog, capfd):
    with caplog.at_level(logging.DEBUG):
        looked(client, "Xylophone zebra", model="small")
        client.post("/api/runs", content=b'{"text": "Xylophone', headers={"content-type": "application/json"})
        client.post("/api/runs", json={"text": "Xylophone", "off": [[99, 99]]})
    printed = capfd.readouterr()
    assert "ylophone" not in caplog.text + printed.out + printed.err


def test_closing_ends_what_is_worked_at(client_of, monkeypatch):
    gate = Gate(monkeypatch)
    client = client_of()
    begun(client, model="small")
    assert gate.reached.wait(20)
    threading.Timer(0.1, gate.open.set).start()
    assert client.server.runs.close()


@pytest.mark.parametrize("way", ["silence", "gradient"])
def test_a_sweep_tells_what_importance_measures(client, monkeypatch, way):
    monkeypatch.setattr(models, "SILENCED", 2048 if way == "silence" else 2)
    told = looked(client, model="small", sweep=True)
    model = small_model()
    expected = headwise.study.importance.importance(model.gpt, model.tokens(TEXT), by=way, controls=0)
    assert [tuple(x[:2]) for x in told["effects"]] == [(layer, head) for layer in range(2) for head in range(3)]
    flat = torch.cat([found[0] for found in expected.values()]).tolist()
    assert [x[2] for x in told["effects"]] == pytest.approx(flat, abs=1e-5)
    assert (
        told["way"]
        == {
            "silence": "its output set to zero",
            "gradient": "estimated from the gradient, which can miss a head, be several times too large "
            "or have the wrong sign",
        }[way]
    )


def test_a_sweep_of_a_model_without_a_loss_is_refused(client_of, tmp_path):
    client = client_of(encoder=opened("bert", "AutoModel", tmp_path))
    told = until(client, begun(client, model="encoder", sweep=True), ("failed",))
    assert "does not predict the next token" in told["error"]
    told = until(client, begun(client, "a", ids=None, sweep=True), ("finished", "failed"))
    assert told["stage"] == "finished"
