"""The model in the package is real: it writes English and has the heads that models of its kind have."""

import json
import shutil

import pytest
import torch

from headwise import CheckpointError, OptionError, ShapeError, induction, load_builtin, watch
from headwise.cli import main
from headwise.models import builtin, load

TEXT = (
    "It was a dark evening in November, and the rain fell upon the roofs of the town. Mr. Harding sat by the fire with "
    "a book upon his knee, but he did not read. He was thinking of the letter which had come that morning from his "
    "brother, and of what his sister would say when she heard of it. At last he rose and went to the window."
)


@pytest.fixture(scope="module")
def model():
    return load_builtin()


def test_english_is_likely_and_noise_is_not(model):
    tokens = model.tokens(TEXT)
    noise = tokens[:, torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(0))]
    bits = []
    for text in (tokens, noise):
        with torch.no_grad():
            loss = torch.nn.functional.cross_entropy(model.gpt(text[:, :-1])[0], text[0, 1:])
        bits.append(loss.item() * (text.shape[1] - 1) / len(TEXT.encode()) / 0.6931)
    assert bits[0] < 1.5
    assert bits[1] > 2.5


def test_it_has_heads_that_look_at_the_previous_token_and_heads_that_rest_on_the_first(model):
    tokens = model.tokens(TEXT)
    with torch.no_grad(), watch(model.gpt) as seen:
        model.gpt(tokens)
    heads = [head for weights in seen.values() for head in weights.summary(tokens[0]).heads]
    assert max(head["previous"] for head in heads) > 0.6
    assert max(head["sink"] for head in heads) > 0.6


def test_it_has_an_induction_head(model):
    once = torch.randint(1, 8192, (128,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.tensor([0]), once, once])
    with torch.no_grad(), watch(model.gpt) as seen:
        model.gpt(tokens[None])
    second = [weights.mass(induction(tokens))[0, :, 129:].mean(-1).max().item() for weights in seen.values()]
    assert max(second) > 0.4
    words = [str(weights.summary(tokens)) for weights in seen.values()]
    assert any("induction" in line.split("sink  previous")[-1] for line in words)


def test_any_text_comes_back_as_it_was(model):
    for text in ("Once upon a time", "naïve ☃ 漢字 \x00\x1e", " leading", "tabs\tand\nlines"):
        tokens = model.tokens(text)
        assert model.tokenizer.decode(tokens[0, 1:].tolist()) == text
        assert len(model.pieces(tokens)) == tokens.shape[1]


def test_streamed_pieces_join_to_the_text_written(model):
    pieces = list(model.stream("The snow ☃", 12, seed=5))
    assert "The snow ☃" + "".join(pieces) == model.write("The snow ☃", 12, seed=5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.tokens(""), OptionError, "text='': expected a text of at least one character"),
        (lambda m: m.tokens(3), OptionError, "text=3"),
        (lambda m: m.tokens("word " * 2000), ShapeError, r"2003 tokens long.*trained on 1024.*most=2003"),
        (lambda m: m.write("", 3), OptionError, "at least one character"),
    ],
)
def test_bad_text_is_refused(call, error, message, model):
    with pytest.raises(error, match=message):
        call(model)


def test_a_text_beyond_the_context_is_written_on_from_its_end(model):
    assert len(model.write("word " * 2000, 3, temperature=0)) > 10_000


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(builtin.FOLDER, tmp_path / "model")


def test_a_damaged_file_is_noticed(folder):
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-100] ^= 1
    (folder / "weights.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its checksum"):
        load(folder, checksums=builtin.CHECKSUMS)


def test_other_formats_missing_files_and_files_that_do_not_belong_together_are_refused(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "weights.safetensors")
    save_file(weights, folder / "weights.safetensors", metadata={"format": "headwise gpt 99"})
    with pytest.raises(CheckpointError, match="'headwise gpt 99'; this version of headwise reads 'headwise gpt 1'"):
        load(folder)
    sizes = {"vocab_size": 8192, "num_layers": 3}
    save_file(weights, folder / "weights.safetensors", {"format": builtin.FORMAT, "config": json.dumps(sizes)})
    with pytest.raises(CheckpointError, match="the weights do not fit the sizes"):
        load(folder)
    save_file(weights, folder / "weights.safetensors", {"format": builtin.FORMAT, "config": '{"vocab_size": 9}'})
    with pytest.raises(CheckpointError, match="the tokenizer has 8192 tokens and the weights 9"):
        load(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as a model"):
        load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json is not in"):
        load(folder)


def test_generate_prints_the_text_and_as_json(capsys):
    assert main(["generate", "Once upon a time", "--tokens", "8", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Once upon a time")
    assert main(["generate", "Once upon a time", "--tokens", "8", "--seed", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["text"] + told["continuation"] == said.rstrip("\n")


@pytest.mark.parametrize("arguments", [[""], ["a", "--temperature", "-1"], ["a", "--model", "nowhere"]])
def test_generate_refuses_bad_input(arguments, capsys):
    assert main(["generate", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("headwise generate: ")
