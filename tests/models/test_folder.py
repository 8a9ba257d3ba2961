"""Transformers models in a folder: opened from disk alone, looked at, and refused with what is missing."""

import json

import pytest
import torch

from headwise import CheckpointError, OptionError, ShapeError, view
from headwise.cli import main
from headwise.models import TextModel, load_builtin, open_model

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "[CLS]", "[SEP]", "the", "captain", "looked", "at", "sea", "a"]
SIZES = {"vocab_size": 11, "hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
TEXT = "the captain looked at the sea"


def tokenizer(framed=False):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, WORDS[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if framed:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return made


KINDS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=12, n_head=3, n_layer=2, vocab_size=11, n_positions=13)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, intermediate_size=8, num_key_value_heads=1, max_position_embeddings=13)
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, intermediate_size=8, max_position_embeddings=13)
    ),
    "roberta": lambda: transformers.RobertaModel(
        transformers.RobertaConfig(**SIZES, intermediate_size=8, max_position_embeddings=15, pad_token_id=1)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=11, d_model=12, d_kv=4, d_ff=8, num_heads=3, num_layers=2, decoder_start_token_id=0
        )
    ),
}
LIMITS = {"gpt2": 13, "llama": None, "bert": 13, "roberta": 13, "t5": None}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes a model of a kind into a folder, without a way to the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def write(kind="gpt2"):
        KINDS[kind]().save_pretrained(tmp_path)
        tokenizer(framed=kind in ("bert", "roberta")).save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_opened_and_seen(kind, folder):
    model = open_model(folder(kind))
    assert isinstance(model, TextModel)
    assert model.limit == LIMITS[kind]
    sight = view(model, TEXT)
    framed = kind in ("bert", "roberta")
    assert sight.tokens == (["[CLS]"] if framed else []) + TEXT.split() + (["[SEP]"] if framed else [])
    assert sight.sentence.startswith(f"2 layers × 3 heads · {len(sight.tokens)} tokens")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_weights_are_those_of_eager_attention(kind, folder):
    path = folder(kind)
    model = open_model(path)
    ids = model.tokens(TEXT)
    eager = type(model.module).from_pretrained(path, attn_implementation="eager", local_files_only=True).eval()
    with torch.no_grad():
        expected = eager(ids, output_attentions=True).attentions
    for weights, truth in zip(view(model, TEXT).maps, expected, strict=True):
        torch.testing.assert_close(weights[:], truth, atol=1e-6, rtol=1e-5)


def test_no_logits_are_made(folder, monkeypatch):
    model = open_model(folder("llama"))
    monkeypatch.setattr(model.module.lm_head, "forward", lambda *_: pytest.fail("T·V logits"))
    view(model, TEXT)
    own = load_builtin()
    monkeypatch.setattr(own.gpt, "logits", lambda *_: pytest.fail("T·V logits"))
    view(own, "Once upon a time")


def test_the_verb_takes_a_folder(folder, capsys, tmp_path, monkeypatch):
    path = folder("gpt2")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["view", TEXT, "--model", str(path), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["tokens"] == TEXT.split()
    assert told.err == "", "transformers reports nothing"
    assert main(["view", f"{TEXT} {TEXT} {TEXT}", "--model", str(path), "--no-html"]) == 2
    assert "18 tokens long and the model can read 13. Look at its beginning with --tokens 13" in capsys.readouterr().err
    assert main(["view", f"{TEXT} {TEXT} {TEXT}", "--model", str(path), "--no-html", "--tokens", "13"]) == 0


def test_a_model_that_can_read_no_more_is_refused_in_python_too(folder):
    with pytest.raises(ShapeError, match="18 tokens long and the model can read 13"):
        view(open_model(folder("gpt2")), f"{TEXT} {TEXT} {TEXT}")


def test_tokens_beyond_the_table_are_told(folder):
    model = open_model(folder("gpt2"))
    with pytest.raises(ShapeError, match="beyond its tables"):
        view(model, torch.tensor([3, 11]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json is not in .*tokenizer.save_pretrained"),
        (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json cannot be read as a tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "holds no weights; expected .*model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no"), "cannot be read as a transformers model"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as a transformers model"),
        (lambda f: (f / "config.json").write_text('{"model_type": "none"}'), "cannot be read as a transformers model"),
    ],
)
def test_a_spoiled_folder_is_refused(spoil, message, folder):
    path = folder("gpt2")
    spoil(path)
    with pytest.raises(CheckpointError, match=message):
        open_model(path)


def test_weights_that_are_missing_are_not_drawn_at_random(folder):
    from safetensors.torch import load_file, save_file

    path = folder("gpt2")
    weights = load_file(path / "model.safetensors")
    del weights["transformer.h.1.attn.c_attn.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 of the model's weights are not in its files.*h\.1\.attn\.c_attn"):
        open_model(path)


def test_a_text_without_tokens_is_refused(folder):
    model = open_model(folder("gpt2"))
    with pytest.raises(OptionError, match="at least one character"):
        model.tokens("")
    with pytest.raises(OptionError, match="makes no token of it"):
        model.tokens("  ")
    assert "GPT2LMHeadModel" in repr(model)
