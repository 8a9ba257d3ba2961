"""Encoder–decoder models: every part is shown, with a text for the decoder or with what the model writes."""

import pytest
import torch

import headwise
from headwise import load_builtin
from headwise.models.text_model import TokenCodec
from headwise.view import texts
from headwise.view.serve.models import Models
from serving import TEXT, looked, refused, translator

TARGET = "The sea looked back."


def manifest(client, id):
    return client.get(f"/api/runs/{id}/manifest").json()["manifest"]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_every_part_of_an_encoder_and_a_decoder_has_the_maps_and_the_loss_of_the_model(client_of, tmp_path, kind):
    model = translator(kind, tmp_path)
    client = client_of(two=model)
    ids, target = model.tokens(TEXT), texts.target_of(model, TARGET)
    with torch.no_grad(), headwise.watch(model.module) as seen:
        logits = model.module(input_ids=ids, decoder_input_ids=target, use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], target[0, 1:])
    sizes = {"encoder": (15, 15, 3), "decoder": (6, 6, 2), "cross-attention": (6, 15, 2)}
    for part, (T, S, layers) in sizes.items():
        told = looked(client, model="two", target=TARGET, part=part)
        assert (told["part"], told["parts"]) == (part, list(sizes))
        assert told["written"] is None
        assert told["outcome"]["loss"] == pytest.approx(float(expected), abs=1e-5)
        found = manifest(client, told["id"])
        assert (found["T"], found["S"], len(found["layers"])) == (T, S, layers)
        assert f"of the model two ({part}) do with" in found["title"]
        assert found["measures"] == ["weights", "value", "contribution"]
        name = found["layers"][1]["name"]
        row = client.get(f"/api/runs/{told['id']}/row?layer=1&head=2&query=3").json()
        there = seen[name][0, 2, 3]
        assert row["weights"] == pytest.approx(there[row["keys"]].tolist(), abs=1e-6)
    assert "".join(found["keys"]).strip() == TEXT
    assert "".join(found["tokens"]).endswith(TARGET)


def test_a_folder_is_opened_with_its_decoder(tmp_path):
    translator("t5", tmp_path)
    models = Models([str(tmp_path)])
    model = models[models.names[0]]
    assert model.start == 5


def test_what_the_decoder_reads_is_what_the_model_writes_with_all_heads(client_of, tmp_path):
    model = translator("t5", tmp_path)
    client = client_of(two=model)
    told = looked(client, model="two", part="cross-attention")
    expected = model.module.generate(model.tokens(TEXT), max_new_tokens=texts.WRITTEN, do_sample=False)
    assert told["tokens"] == 1 + texts.WRITTEN == expected.shape[1]
    assert told["written"] == "".join(map(model.codec.decode, expected[0, 1:].tolist()))
    quiet = looked(client, model="two", part="encoder", off=[[1, 2]])
    assert quiet["written"] == told["written"]
    assert quiet["with_all_heads"]["loss"] == pytest.approx(told["outcome"]["loss"], abs=1e-5)
    assert quiet["outcome"]["loss"] != pytest.approx(told["outcome"]["loss"], abs=1e-5)


def test_a_sweep_of_a_part_is_what_silencing_its_heads_does(client_of, tmp_path):
    client = client_of(two=translator("bart", tmp_path))
    asked = {"model": "two", "target": TARGET, "part": "cross-attention"}
    told = looked(client, sweep=True, **asked)
    assert [effect[:2] for effect in told["effects"]] == [[layer, head] for layer in range(2) for head in range(3)]
    quiet = looked(client, off=[[1, 2]], maps=False, **asked)
    change = quiet["outcome"]["loss"] - quiet["with_all_heads"]["loss"]
    assert told["effects"][-1][2] == pytest.approx(change, abs=1e-5)


def test_a_decoder_continues_its_own_text(client_of, tmp_path):
    model = translator("bart", tmp_path)
    client = client_of(two=model)
    asked = {"text": TEXT, "model": "two", "target": TARGET}
    found = client.post("/api/continuation", json=asked).json()["text"]
    target = texts.target_of(model, TARGET)
    expected = model.module.generate(
        model.tokens(TEXT), decoder_input_ids=target, max_new_tokens=16, do_sample=False, num_beams=1
    )
    assert found == "".join(map(model.codec.decode, expected[0, target.shape[1] :].tolist()))


def test_parts_and_targets_of_a_model_that_reads_one_text_are_refused(client_of, tmp_path):
    client = client_of(two=translator("t5", tmp_path))
    asked = {"text": TEXT, "model": "builtin"}
    assert refused(client.post("/api/runs", json={**asked, "part": "decoder"}), 422, "has no parts")
    assert refused(client.post("/api/runs", json={**asked, "target": TARGET}), 422, "has no decoder")
    asked["model"] = "two"
    assert refused(client.post("/api/runs", json={**asked, "part": "middle"}), 422, "expected one of encoder, decoder")
    assert refused(client.post("/api/runs", json={**asked, "off": [[2, 0]], "part": "decoder"}), 422, "has 2 layers")


def test_a_decoder_that_writes_nothing_reads_the_text_of_its_encoder(client_of, tmp_path):
    transformers = pytest.importorskip("transformers")
    translator("bart", tmp_path / "whole")
    bare = transformers.BartModel.from_pretrained(tmp_path / "whole")
    bare.save_pretrained(tmp_path / "bare")
    load_builtin().tokenizer.save(str(tmp_path / "bare" / "tokenizer.json"))
    client = client_of(two=headwise.models.open_model(tmp_path / "bare", both=True))
    told = looked(client, model="two", part="cross-attention")
    assert "does not generate text" in told["outcome"]["missing"]
    found = manifest(client, told["id"])
    assert found["tokens"][1:] == found["keys"][:-1]


@pytest.mark.parametrize("spaced", [True, False], ids=["words", "bytes"])
def test_a_likely_token_brings_the_space_that_its_tokenizer_writes_before_it(spaced):
    words = {1: "the", 2: "sea", 3: "s"}
    join = (lambda ids: " ".join(words[i] for i in ids)) if spaced else (lambda ids: "".join(words[i] for i in ids))
    codec = TokenCodec(lambda text: [], words.__getitem__, join=join)
    assert texts.added(codec, [1], [2]) == (" sea" if spaced else "sea")
    assert texts.added(codec, [], [2, 3]) == ("sea s" if spaced else "seas")
