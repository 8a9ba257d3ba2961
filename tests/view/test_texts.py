"""Encoder–decoder models: every part is shown, with a text for the decoder or with what the model writes."""

import pytest
import torch

import headwise
from headwise import OptionError, load_builtin
from headwise.cli import main
from headwise.models.text_model import TokenCodec
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
    assert f" do with “{TEXT[:20] if part == 'encoder' else TARGET + '”'}" in found.heading
    assert (f", attending to “{TEXT[:20]}" in found.heading) == (part == "cross-attention")


def test_what_a_tokenizer_adds_around_a_text_is_known_by_its_place():
    codec = TokenCodec(lambda text: [int(word) for word in text.split()], before=(1,), after=(2,))
    ids, target = torch.tensor([[1, 1, 7, 2, 2]]), torch.tensor([[0, 1, 7, 2]])
    assert texts.RunTexts(ids).view(codec)["around"] == (1, 1)
    assert texts.RunTexts(ids[:, 2:4]).view(codec)["around"] == (0, 1)
    assert texts.RunTexts(ids, target, "encoder").view(codec)["around"] == (1, 1)
    assert texts.RunTexts(ids, target, "decoder").view(codec)["around"] == (2, 0)
    crossed = texts.RunTexts(ids, target, "cross-attention").view(codec)
    assert (crossed["around"], crossed["key_around"]) == ((2, 0), (1, 1))


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


def test_both_sides_of_cross_attention_join_the_parts_of_a_character(byte_model, tmp_path, browser):
    found = headwise.view(byte_model, "東京 😀 שלום", part="cross-attention", target="Le 東京 chat.")
    assert "attending to “東京 😀 שלום”" in found.heading
    assert found.key_labels[:4] == ["東¹", "東²", "東³", "京¹"]
    assert found.to_dict()["key_starts"][:7] == [0, 0, 0, 3, 3, 3, 6]
    page = browser.new_page()
    page.goto(f"file://{found.save(tmp_path / 'heads.html')}")
    page.locator(".head").first.wait_for()
    assert page.locator(".text .block").nth(1).inner_text() == "東京 😀 שלום"
    assert page.evaluate("document.getElementById('headwise').headwise.side.manifest.keyLabels")[:2] == ["東¹", "東²"]
    page.close()


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory):
    """A model whose tokens are single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("bytes")
    letters = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = translator("t5", folder)
    config = model.module.config
    config.vocab_size, config.decoder_start_token_id, config.pad_token_id = len(letters), 0, 0
    type(model.module)._from_config(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return headwise.models.open_model(folder, both=True)


def test_parts_of_characters_are_labelled_by_their_bytes_and_cannot_be_appended(byte_model):
    from headwise.view.serve.models import _likeliest

    ids = byte_model.codec.encode("東A")
    assert [byte_model.codec.label(token) for token in ids] == ["‹E6›", "‹9D›", "‹B1›", "A"]
    logits = torch.full((258,), -9.0)
    logits[ids] = torch.tensor([4.0, 3.0, 2.0, 1.0])
    found = _likeliest(byte_model, logits, torch.tensor([ids]))
    assert [one.id for one in found[:4]] == list(ids)
    assert [one.text for one in found[:4]] == ["", "", "", "A"]
    assert len({one.token for one in found[:4]}) == 4
