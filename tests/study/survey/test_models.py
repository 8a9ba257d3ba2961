"""What can be surveyed: the built-in model, a folder of ours, any transformers model on disk, of one text or of two."""

import pytest
import torch

import headwise
from headwise import CheckpointError
from headwise.models import builtin, open_model
from tiny_models import unseen

TEXT = "The captain looked at the sea, and the sea looked at the captain. " * 3


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def words(transformers):
    """A tokenizer that puts a token before and one after every text."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(builtin.FOLDER / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="A $0 B", special_tokens=[("A", 1), ("B", 2)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def folder_of(transformers, words, path, kind, **sizes):
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=24, num_attention_heads=3, num_hidden_layers=2, vocab_size=8192, intermediate_size=16,
        max_position_embeddings=64, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModel.from_config(config).save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.mark.parametrize(("kind", "sizes"), [("llama", {"num_key_value_heads": 1}), ("bert", {})])
def test_a_transformers_model_on_disk_is_surveyed(transformers, words, tmp_path, kind, sizes):
    folder = folder_of(transformers, words, tmp_path / kind, kind, **sizes)
    subject = open_model(folder)
    assert (subject.name, subject.codec.before, subject.codec.after, subject.context) == (kind, (1,), (2,), 64)
    survey = headwise.survey(folder, texts=[TEXT], context=19)
    assert len(survey.heads) == 6
    tokens = len(words(TEXT, add_special_tokens=False).input_ids)
    assert survey.counts["tokens"] == tokens + 2 * survey.counts["windows"]
    ids = words(TEXT[:60]).input_ids
    with torch.no_grad(), headwise.watch(subject.module) as seen:
        subject.module(torch.tensor([ids]))
    truth = list(seen.values())[1].summary(ids)[2]
    found = headwise.survey(folder, texts=[TEXT[:60]]).head(1, 2)
    assert found.reading == truth.reading
    assert found.numbers == pytest.approx(truth.numbers, rel=1e-4, abs=1e-6)
    assert (found["next"] > 0) == (kind == "bert")


def test_a_model_that_also_reads_images_is_opened_with_its_head_and_surveyed(transformers, words, tmp_path):
    small = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    text = small | {"vocab_size": 8192, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64}
    config = transformers.Gemma3Config(text_config=text, vision_config=small | {"image_size": 12, "patch_size": 4})
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "gemma3")
    words.save_pretrained(tmp_path / "gemma3")
    subject = open_model(tmp_path / "gemma3")
    tokens = torch.tensor([words(TEXT).input_ids[:20]])
    assert subject.context == 64
    assert subject.module(tokens).logits.shape == (1, 20, 8192)
    assert headwise.trace(subject, tokens, (15, 17), draws=1).tests["passages"] == 1
    survey = headwise.survey(tmp_path / "gemma3", texts=[TEXT], context=19, by="contribution", importance=True)
    assert len(survey.heads) == 6


@pytest.mark.parametrize("by", ["value", "contribution"])
@pytest.mark.parametrize("kind", ["afmoe", "laguna", "bitnet"])
def test_gates_and_norms_between_heads_and_their_projection_are_surveyed(transformers, words, kind, by):
    model = unseen("CausalLM", kind)
    subject = open_model(model, lambda text: [3 + ord(letter) % 28 for letter in text])
    text = "The sea, the sea."
    survey = headwise.survey(subject, texts=[text], by=by)
    with torch.no_grad(), headwise.watch(model, outputs=True) as seen:
        model(torch.tensor([subject.codec.encode(text)]))
        layer = list(seen.outputs.values())[1]
        if kind == "laguna" or (kind, by) == ("afmoe", "contribution"):  # a trial, which this context does not see
            assert layer.gate is not None
            found = layer.by_value() if by == "value" else layer.contributions()
        else:
            found = (layer.by_value if by == "value" else layer.contributions)(projected=False)
        assert [len(calls) for calls in seen.calls.values()] == [1, 1, 1]
    received = found.received() if by == "contribution" else found.received().total
    first = (received[0, 2, 0].item() - 1) / (len(text) - 1)  # of all queries but the first, which sees one key
    assert survey.head(1, 2)["sink"] == pytest.approx(first, abs=1e-4)


def test_opening_a_transformers_model_says_nothing(transformers, words, tmp_path, capfd):
    folder = folder_of(transformers, words, tmp_path / "bert", "bert")
    capfd.readouterr()
    open_model(folder)
    assert capfd.readouterr() == ("", "")


def test_a_transformers_model_without_some_of_its_weights_is_refused(transformers, words, tmp_path):
    folder = folder_of(transformers, words, tmp_path / "llama", "llama")
    files = pytest.importorskip("safetensors.torch")
    weights = files.load_file(folder / "model.safetensors")
    del weights["layers.1.self_attn.q_proj.weight"]
    files.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 of the model's weights are not in its files, such as layers\.1\."):
        open_model(folder)


def test_a_model_in_memory_is_surveyed_with_its_tokenizer(transformers, words, tmp_path):
    folder = folder_of(transformers, words, tmp_path / "llama", "llama")
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="headwise").eval()
    assert headwise.survey(model, texts=[TEXT], tokenize=words).heads == headwise.survey(folder, texts=[TEXT]).heads


def test_a_folder_of_ours_is_surveyed(tiny, tiny_folder):
    assert headwise.survey(tiny_folder, texts=[TEXT]).heads == headwise.survey(tiny, texts=[TEXT]).heads


# Encoder–decoder models ---------------------------------------------------------------------------------------------

PAIR = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3, "encoder_ffn_dim": 16,
    "decoder_attention_heads": 3, "decoder_ffn_dim": 16, "max_position_embeddings": 64, "decoder_start_token_id": 7,
}  # fmt: skip
PAIRS = {
    "t5": {
        "d_model": 24, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 2, "num_heads": 3,
        "decoder_start_token_id": 7, "pad_token_id": 0,
    },
    "bart": PAIR,
    "marian": PAIR | {"pad_token_id": 0},
}  # fmt: skip


def pair_of(transformers, kind):
    """A small encoder–decoder model with random and sharp weights: one layer reads, two write."""
    import headwise.huggingface  # noqa: F401

    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, vocab_size=8192, **PAIRS[kind])
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="headwise").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    return model


@pytest.mark.parametrize("kind", PAIRS)
def test_both_halves_of_an_encoder_decoder_model_are_surveyed(transformers, words, kind):
    model = pair_of(transformers, kind)
    survey = headwise.survey(model, texts=[TEXT[:60]], tokenize=words)
    ids = torch.tensor([words(TEXT[:60]).input_ids])
    decoded = torch.cat([torch.tensor([[7]]), ids[:, :-1]], 1)
    with torch.no_grad(), headwise.watch(model) as seen:
        model(input_ids=ids, decoder_input_ids=decoded)
    assert len(survey.layers) == 5
    assert [name.split(".")[name.startswith("model.")] for name in survey.layers] == ["encoder"] + 4 * ["decoder"]
    crossing = [name for name in survey.layers if "encoder_attn" in name or "EncDec" in name]
    assert len(crossing) == 2
    for name in survey.layers:
        cross = name in crossing
        own = ids if name == survey.layers[0] or cross else decoded
        truth = seen[name].summary(own[0], query_ids=decoded[0] if cross else None)
        for head in truth:
            found = survey.head(name, head.head)
            assert found.reading == head.reading
            assert found.numbers == pytest.approx(head.numbers, rel=1e-5, abs=1e-7)
            assert ("monotone" in found.numbers, "previous" in found.numbers) == (cross, not cross)
    assert "–" in str(survey), "cross-attention has no previous token"
    assert survey.layers[3] in survey.to_html()


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_evidence_of_cross_attention_quotes_both_texts(transformers, words, kind):
    model = pair_of(transformers, kind)
    survey = headwise.survey(model, texts=[TEXT[:60]], tokenize=words)
    ids = words(TEXT[:60]).input_ids
    decoded = [7, *ids[:-1]]
    for passage in survey.evidence(survey.layers[-1], 1, "peak"):
        assert passage.tokens[passage.marks[0]] == decoded[passage.query]
        assert passage.tokens[passage.marks[1]] == ids[passage.key]
        assert -1 in passage.tokens


@pytest.mark.parametrize("by", ["value", "contribution"])
def test_what_encoder_decoder_models_write_is_surveyed(transformers, words, by):
    survey = headwise.survey(
        pair_of(transformers, "bart"), texts=[TEXT], tokenize=words, context=19, by=by, importance=True
    )
    assert len(survey.heads) == 15
    assert all(head["importance"] >= abs(head["effect"]) for head in survey.heads)
    assert any(head["importance"] > 0 for head in survey.heads)


def test_an_encoder_decoder_model_on_disk_is_surveyed(transformers, words, tmp_path):
    model = pair_of(transformers, "t5").float().requires_grad_(False)  # as it is opened
    model.save_pretrained(tmp_path / "t5")
    words.save_pretrained(tmp_path / "t5")
    survey = headwise.survey(tmp_path / "t5", texts=[TEXT], context=19, importance=True)
    assert survey.heads == headwise.survey(model, texts=[TEXT], tokenize=words, context=19, importance=True).heads


def test_a_model_that_hears_is_refused(transformers, words):
    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3}
    config = transformers.WhisperConfig(
        vocab_size=8192, decoder_attention_heads=3, encoder_ffn_dim=16, decoder_ffn_dim=16, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, **sizes,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    with pytest.raises(CheckpointError, match="WhisperForConditionalGeneration reads input_features, not text"):
        headwise.survey(model, texts=[TEXT], tokenize=words)


def test_models_that_cannot_be_surveyed_say_why(transformers, words, tmp_path):
    folder = folder_of(transformers, words, tmp_path / "llama", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="so the model cannot read text. Save the model's tokenizer there"):
        open_model(folder)
    transformers.T5Config(d_model=8, num_layers=1, num_heads=2, d_ff=8, vocab_size=9).save_pretrained(tmp_path / "t5")
    with pytest.raises(
        CheckpointError, match=r"t5 is an encoder–decoder, which reads two texts at once.*model.get_encoder\(\)"
    ):
        open_model(tmp_path / "t5", encoder=False)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read as a transformers model"):
        open_model(folder)
    with pytest.raises(CheckpointError, match="there is no folder nowhere"):
        open_model("nowhere")
