"""What can be surveyed: the built-in model, a folder of ours, any transformers model on disk."""

import pytest
import torch

import headwise
from headwise import CheckpointError
from headwise.models import builtin, open_model

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
