"""Encoder–decoder models: every part is shown, with a text for the decoder or with what the model writes."""

import pytest
import torch

import headwise
from headwise import OptionError, load_builtin
from headwise.cli import main
from headwise.view import texts
from serving import TEXT, translator

TARGET = "The sea looked back."
SIZES = {"encoder": (15, 15, 3), "decoder": (6, 6, 2), "cross-attention": (6, 15, 2)}


@pytest.fixture(scope="module", params=["t5", "bart"])
def model(request, tmp_path_factory):
    return translator(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("part", list(SIZES))
def test_every_part_of_a_model_can_be_viewed(model, part):
    ids, target = model.tokens(TEXT), texts.target_of(model, TARGET)
    with torch.no_grad(), headwise.watch(model.module) as seen:
        model.module(input_ids=ids, decoder_input_ids=target, use_cache=False)
    found = headwise.view(model, TEXT, part=part, target=TARGET)
    assert (found.T, found.S, len(found.maps)) == SIZES[part]
    assert f"of the model {model.name} ({part}) do with" in found.heading
    for name, weights in zip(found.names, found.maps, strict=True):
        torch.testing.assert_close(weights.to_tensor(), seen[name].to_tensor())
    assert "".join(found.tokens).endswith(TEXT if part == "encoder" else TARGET)
    assert "".join(found.keys).endswith(TARGET if part == "decoder" else TEXT)
    assert found.measures == ("weights", "value", "contribution")


def test_the_encoder_is_shown_first_and_the_decoder_reads_what_the_model_writes(model):
    assert "(encoder)" in headwise.view(model, TEXT).heading
    found = headwise.view(model, TEXT, part="decoder")
    expected = model.module.generate(model.tokens(TEXT), max_new_tokens=texts.WRITTEN, do_sample=False)
    assert found.ids.tolist() == expected[0].tolist()


def test_the_heads_of_a_part_are_worth_what_silencing_them_does(model):
    found = headwise.view(model, TEXT, part="cross-attention", target=TARGET, importance="silence")
    inputs = texts.RunTexts(model.tokens(TEXT), texts.target_of(model, TARGET), "cross-attention").inputs
    losses = []
    for off in ({}, {found.names[1]: [2]}):
        with torch.no_grad(), headwise.silence(model.module, off):
            losses.append(float(texts.target_loss(model.module(**inputs, use_cache=False), inputs)))
    assert found.worth(1, 2) == pytest.approx(losses[1] - losses[0], abs=1e-5)


def test_parts_are_refused_where_there_are_none(model):
    with pytest.raises(OptionError, match="this model reads one text, so it has no parts"):
        headwise.view(load_builtin(), TEXT, part="decoder")
    with pytest.raises(OptionError, match="has no decoder that could read another"):
        headwise.view(load_builtin(), TEXT, target=TARGET)
    with pytest.raises(OptionError, match="part= and target= need an encoder–decoder model with its tokenizer"):
        headwise.view(load_builtin().gpt, torch.zeros(1, 3, dtype=torch.int64), part="decoder")
    with pytest.raises(OptionError, match="expected one of encoder, decoder, cross-attention"):
        headwise.view(model, TEXT, part="middle")


def test_the_command_shows_the_part_that_is_asked_for(tmp_path, capsys):
    translator("t5", tmp_path / "two")
    asked = ["view", TEXT, "--model", str(tmp_path / "two"), "--no-html"]
    assert main(asked) == 0
    told = capsys.readouterr()
    assert "(encoder)" in told.out
    assert "--part decoder shows how the decoder attends to its own text" in told.err
    assert main([*asked, "--part", "cross-attention", "--target", TARGET]) == 0
    told = capsys.readouterr()
    assert "2 layers × 3 heads · 6 tokens attending to 15" in told.out
    assert "the decoder reads" not in told.err
    assert main([*asked, "--part", "decoder"]) == 0
    assert "the decoder reads what the model writes" in capsys.readouterr().err
