"""`open_model` opens every kind of model, on disk and in memory, and says what is wrong with the others."""

import json

import pytest
import torch

import headwise
from headwise import CheckpointError, OptionError, ShapeError, open_checkpoint, view
from headwise.cli import main
from headwise.models import LanguageModel, TextModel, load_builtin, open_model

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
    words = (["[CLS]"] if framed else []) + TEXT.split() + (["[SEP]"] if framed else [])
    assert "".join(sight.tokens) == " ".join(words), "with the spaces of the text"
    assert [token.strip() for token in sight.tokens] == words
    assert TEXT in sight.heading
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
    assert "".join(json.loads(told.out)["tokens"]) == TEXT
    assert told.err == "", "transformers reports nothing"
    assert main(["view", f"{TEXT} {TEXT} {TEXT}", "--model", str(path), "--no-html"]) == 2
    assert "18 tokens long and the model can read 13. Show its beginning with --tokens 13" in capsys.readouterr().err
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
    with pytest.raises(OptionError, match="produces no tokens for it"):
        model.tokens("  ")
    assert "GPT2LMHeadModel" in repr(model)


class Evil:
    """Unpickling it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return self.path.write_text, ("code ran",)


def as_torch_files(path, shards=1):
    """The same folder with its weights as pytorch_model.bin, or as several with an index."""
    from safetensors.torch import load_file

    weights = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    if shards == 1:
        torch.save(weights, path / "pytorch_model.bin")
        return path
    files = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    places = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        torch.save({name: x for name, x in weights.items() if places[name] == file}, path / file)
    index = {"metadata": {}, "weight_map": places}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return path


def as_trainer_folder(path):
    """The same folder with what transformers' Trainer saves beside the weights."""
    torch.save(Evil(path / "ran"), path / "training_args.bin")
    for name in ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_0.pth", "optimizer.bin"):
        torch.save({"state": {0: torch.ones(3)}}, path / name)
    (path / "trainer_state.json").write_text("{}")
    return path


@pytest.mark.parametrize("trainer", [False, True], ids=["plain", "trainer"])
@pytest.mark.parametrize("shards", [0, 1, 3], ids=["safetensors", "bin", "sharded bin"])
def test_every_kind_of_weights_gives_the_same_maps_and_layers(shards, trainer, folder, capsys):
    path = folder("llama")
    expected = view(open_model(path), TEXT).maps
    layers = [layer.name for layer in open_checkpoint(path).layers]
    path = as_torch_files(path, shards) if shards else path
    path = as_trainer_folder(path) if trainer else path
    for weights, truth in zip(view(open_model(path), TEXT).maps, expected, strict=True):
        assert torch.equal(weights[:], truth[:])
    assert [layer.name for layer in open_checkpoint(path).layers] == layers
    capsys.readouterr()
    assert main(["inspect", str(path), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["layers"]) == 2
    assert not (path / "ran").exists()


def test_sharded_torch_files_are_written_back_with_their_index(folder, tmp_path):
    path = as_torch_files(folder("llama"), 3)
    checkpoint = open_checkpoint(path)
    layers = checkpoint.read_all()
    name = "model.layers.1.self_attn"
    layers[name].out_proj.weight.data += 1
    with pytest.raises(CheckpointError, match="several files; name a folder"):
        checkpoint.save(tmp_path / "one.bin", layers)
    checkpoint.save(tmp_path / "new", layers)
    again = open_checkpoint(tmp_path / "new")
    assert len(list((tmp_path / "new").glob("*.bin"))) == 3
    for key, tensor in checkpoint.source.items():
        assert torch.equal(again.source[key], tensor + (key == f"{name}.o_proj.weight"))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_torch_file_that_holds_code_is_refused_and_not_run(shards, folder):
    path = as_torch_files(folder("llama"), shards)
    file = sorted(path.glob("pytorch_model*.bin"))[-1]
    torch.save({"w": Evil(path / "ran")}, file)
    for look in (open_model, open_checkpoint):
        with pytest.raises(CheckpointError, match=f"{file.name} holds more than tensors.*would run code"):
            look(path)
    assert not (path / "ran").exists()


def test_a_gguf_file_is_refused_with_the_command_that_converts_it(folder, capsys):
    path = folder("llama")
    (path / "model.safetensors").rename(path / "tiny.gguf")
    command = r"tiny.gguf is a GGUF file.*pip install transformers gguf.*python -c .*gguf_file='tiny.gguf'"
    for what in (path, path / "tiny.gguf"):
        for look in (open_model, open_checkpoint):
            with pytest.raises(CheckpointError, match=command):
                look(what)
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=command):
        open_model(path)
    assert main(["inspect", str(path)]) == 2
    assert main(["view", TEXT, "--model", str(path / "tiny.gguf")]) == 2
    assert capsys.readouterr().err.count("gguf_file='tiny.gguf'") == 2


def test_a_file_of_weights_opens_its_folder_if_it_has_all_a_model_needs(folder):
    path = folder("llama")
    assert open_model(path / "model.safetensors").name == path.name
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors is a file without a config.json.*headwise inspect"):
        open_model(path / "model.safetensors")


def test_models_in_memory_are_opened_with_their_tokenizer(folder):
    path = folder("bert")
    expected = open_model(path)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(framed=True))
    model = transformers.BertModel.from_pretrained(path, attn_implementation="headwise").eval()
    for tokens in (fast, tokenizer(framed=True)):
        found = open_model(model, tokens)
        assert torch.equal(found.tokens(TEXT), expected.tokens(TEXT))
        assert (
            found.pieces(found.tokens(TEXT))
            == expected.pieces(expected.tokens(TEXT))
            == ["[CLS]", *(f" {word}" for word in TEXT.split()), " [SEP]"]
        )
        assert (found.codec.before, found.codec.after, found.limit) == ((1,), (2,), 13)
    by_letter = open_model(model, lambda text: [ord(x) % 11 for x in text], name="letters")
    assert by_letter.tokens("ab").tolist() == [[9, 10]]
    assert by_letter.pieces(torch.tensor([9, 10])) == ["9", "10"]
    assert (by_letter.name, open_model(model, fast).name) == ("letters", "BertModel")
    assert len(view(by_letter, "ab").maps) == 2


def test_a_text_model_is_taken_as_it_is_and_changed_in_a_copy():
    model = load_builtin()
    assert open_model(model) is model
    assert open_model("builtin").fingerprint() == model.fingerprint()
    other = open_model(model, lambda text: [7], name="other")
    assert isinstance(other, LanguageModel)
    assert (other.name, model.name, other.tokens("a").tolist()) == ("other", "builtin", [[7]])
    assert model.tokens("a").shape == (1, 2)


def test_what_is_no_model_is_refused(tmp_path):
    with pytest.raises(OptionError, match='object of type int is given; expected "builtin", a folder'):
        open_model(7)
    with pytest.raises(OptionError, match="Linear is given without a tokenizer"):
        open_model(torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"there is no folder .*nowhere; expected \"builtin\""):
        open_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"weights.safetensors is not in .*config.json"):
        open_model(tmp_path)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("kind", ["bloom", "gptj", "deberta"])
def test_models_with_attention_in_their_own_code_are_refused_by_name(kind, tmp_path):
    transformers.AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=f"{kind} computes attention in its own code"):
        open_model(tmp_path)


def test_an_encoder_decoder_is_opened_as_its_encoder_as_a_whole_or_refused(folder):
    import headwise.huggingface

    path = folder("t5")
    whole = transformers.T5ForConditionalGeneration.from_pretrained(path, attn_implementation="headwise").eval()
    found = [
        open_model(path),
        open_model(whole, tokenizer()),
        open_model(whole.get_encoder(), tokenizer(), encoder=False),
    ]
    assert len({type(model.module) for model in found}) == 1
    for model in (path, whole):
        with pytest.raises(CheckpointError, match=r"encoder–decoder, which reads two texts.*get_encoder\(\)"):
            open_model(model, tokenizer() if model is whole else None, encoder=False)
        both = open_model(model, tokenizer() if model is whole else None, both=True)
        assert type(both.module) is type(whole)
        ids = both.tokens(TEXT)
        assert both.decoder_tokens(ids).tolist() == [[whole.config.decoder_start_token_id, *ids[0, :-1].tolist()]]
    one, two = (headwise.survey(each, texts=[TEXT], tokenize=tokenizer()) for each in (whole.get_encoder(), whole))
    assert len(one.layers) < len(two.layers)
    with pytest.raises(OptionError, match="is not an encoder–decoder model: it reads one text"):
        found[0].decoder_tokens(ids)


def test_view_serve_and_survey_read_the_same_model(folder):
    from headwise.view.serve.models import Models

    path = folder("roberta")
    served = Models([str(path)])[path.name]
    assert type(served) is type(open_model(path)) is TextModel
    assert (served.context, served.trained) == (13, 15), "RoBERTa has two positions that no token takes"
    found = headwise.survey(path, texts=[TEXT])
    assert found.settings["context"] == 13
    assert found.layers == view(served, TEXT).names


def test_code_beside_a_model_is_never_run(folder):
    path = folder("llama")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.MineConfig"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "configuration_mine.py").write_text(f"open({str(path / 'ran')!r}, 'w')")
    with pytest.raises(CheckpointError, match="cannot be read as a transformers model"):
        open_model(path)
    assert not (path / "ran").exists()


@pytest.mark.parametrize("source", ["builtin", "folder"])
def test_our_own_models_are_inspected_without_saying_the_heads(source, capsys):
    from headwise.models import builtin

    model = load_builtin()
    checkpoint = open_checkpoint("builtin" if source == "builtin" else builtin.FOLDER)
    layer = checkpoint.read("blocks.4.attention").float()
    x = torch.randn(1, 9, 256)
    torch.testing.assert_close(layer(x), model.gpt.blocks[4].attention(x))
    assert main(["inspect", "builtin", "--json"]) == 0
    assert [layer["heads"] for layer in json.loads(capsys.readouterr().out)["layers"]] == [8] * 7
