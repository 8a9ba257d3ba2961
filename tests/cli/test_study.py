"""`headwise heads` and `headwise trace` print what the functions of Python give, and refuse bad requests."""

import json

import pytest
import torch

from headwise import head_kinds, load_builtin, trace
from headwise.cli import main

TEXT = "The dog was named Barnaby. The sea was calm. The sun was low. He called his dog, Barnaby"


def test_heads_prints_what_head_kinds_finds(capsys):
    assert main(["heads", "builtin", "--samples", "2", "--length", "16", "--lengths", "40", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = head_kinds(load_builtin(), samples=2, length=16, lengths=(40,))
    assert data == {"model": "builtin", **found.to_json()} | {"model": data["model"]}
    assert data["kinds"]["previous"][0]["layer"] == "blocks.4.attention"


@pytest.mark.parametrize("span", ["Barnaby", "last words", "tokens"])
def test_trace_finds_the_answer_by_its_words_or_its_tokens(span, capsys):
    model = load_builtin()
    tokens = model.tokens(TEXT)
    words = [model.codec.decode(token) for token in tokens[0].tolist()]
    stop = len(words)
    start = max(i for i in range(stop) if "".join(words[i:]).strip() == "Barnaby")
    given = {"Barnaby": "Barnaby", "last words": "Barnaby", "tokens": f"{start}:{stop}"}[span]
    assert main(["trace", "builtin", TEXT, "--answer", given, "--draws", "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    expected = trace(model, tokens, (start, stop), draws=2)
    assert data["answer"] == [start, stop]
    assert data["scores"] == {method: pytest.approx(x.tolist()) for method, x in expected.scores.items()}
    assert data["tests"]["gradient"] == pytest.approx(expected.tests["gradient"])


@pytest.mark.parametrize(
    ("room", "arguments"),
    [("trace", ["builtin", TEXT, "--answer", "Barnaby"]), ("heads", ["builtin", "--samples", "2", "--length", "8"])],
)
def test_layers_whose_weights_are_nan_are_named(room, arguments, monkeypatch, capsys):
    model = load_builtin()
    torch.nn.init.constant_(model.gpt.blocks[4].attention.out_proj.weight, float("nan"))
    monkeypatch.setattr(f"headwise.cli.{room}.open_model", lambda name, **_: model)
    assert main([room, *arguments]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "attention weights of blocks.5.attention (layer 5) and 1 more are NaN" in told


def test_trace_lets_the_model_answer(capsys, tmp_path):
    assert main(["trace", "builtin", TEXT, "--new", "3", "--draws", "1", "--html", str(tmp_path / "trace.html")]) == 0
    out = capsys.readouterr().out
    model = load_builtin()
    tokens = model.tokens(TEXT)
    answer = model.gpt.generate(tokens[0], 3, temperature=0)[-3:]
    assert f"answer: {''.join(map(model.codec.decode, answer.tolist())).strip()}" in out
    page = (tmp_path / "trace.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "<h2>Gradient</h2>" in page


def test_a_long_text_is_traced_past_the_trained_length(capsys, monkeypatch):
    model = load_builtin()
    text = "The sea was calm. " * 220
    assert model.tokens(text, most=9999).shape[1] > 1024
    arguments = ["trace", "builtin", text, "--new", "2", "--draws", "1", "--methods", "attention,contributions"]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    assert "the model was trained on 1024 at a time" in captured.err
    assert "passages with smaller shares" in captured.out
    assert len(captured.out.splitlines()) <= 24


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "pass a text"),
        ([TEXT, "--answer", "whale"], "these words are not in the text"),
        ([TEXT, "--answer", "3:99"], "(3, 99)"),
        ([TEXT, "--methods", "magic"], "Known: rollout"),
        ([TEXT, "--draws", "0"], "--draws"),
        ([TEXT, "--answer", ""], "these words are not in the text"),
        ([TEXT, "--methods", ""], "Known: rollout"),
        (["a b", "--answer", "b"], "the prompt before the answer has"),
    ],
    ids=["no text", "other words", "too far", "method", "draws", "empty", "no method", "short"],
)
def test_trace_says_what_is_wrong(arguments, words, capsys):
    assert main(["trace", "builtin", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_heads_says_what_is_wrong(capsys):
    assert main(["heads", "builtin", "--lengths", "few"]) == 2
    assert "expected whole numbers" in capsys.readouterr().err


def test_a_folder_of_transformers_is_opened(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<s>", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<s>"))  # noqa: S106
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model("llama", vocab_size=12, num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["trace", str(tmp_path), "a b c d e f a b c d", "--new", "2", "--draws", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 12
    assert main(["heads", str(tmp_path), "--samples", "2", "--length", "4", "--lengths", ""]) == 0
    assert "sink" in capsys.readouterr().out


def test_a_trace_prints_whole_characters(capsys):
    text = "海は静かでした。犬の名前はバーナビーでした。空は青い。彼は犬を呼びました。"
    assert main(["trace", "builtin", text, "--answer", "呼びました", "--draws", "1"]) == 0
    out = capsys.readouterr().out
    assert "\ufffd" not in out
    assert "犬の名前はバーナビーでした。" in out
    assert "answer: 呼びました" in out
