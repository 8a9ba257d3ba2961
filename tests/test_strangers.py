"""Files from strangers: whatever is in them, there is one clear error, early; nothing runs, hangs or grows."""

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import headwise
from headwise import AttentionMap, CheckpointError, HeadwiseError, OptionError, Scoring, causal
from headwise.cli import main
from headwise.errors import printable
from headwise.models import builtin, open_model
from headwise.models.checkpoint import open_checkpoint

ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e\r"


@pytest.fixture
def safetensors():
    return pytest.importorskip("safetensors.torch")


# Saved maps ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, safetensors):
    B, H, T, D = 1, 2, 5, 3
    torch.manual_seed(0)
    weights = AttentionMap(torch.randn(B, H, T, D), torch.randn(B, H, T, D), Scoring(causal()))
    weights.save(tmp_path / "map.safetensors")
    return tmp_path / "map.safetensors"


def refused(path):
    """Whether loading raises our error; any other error fails the test."""
    try:
        AttentionMap.load(path)
    except HeadwiseError:
        return True
    return False


def test_a_thousand_damaged_maps_raise_our_error(saved, tmp_path):
    good, draw = saved.read_bytes(), random.Random(7)  # noqa: S311
    other, told = tmp_path / "damaged.safetensors", 0
    for trial in range(1000):
        data = bytearray(good)
        if trial % 3 == 0:
            del data[draw.randrange(len(data)) :]
        elif trial % 3 == 1:
            for _ in range(draw.randrange(1, 4)):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        else:
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
        other.write_bytes(data)
        told += refused(other) or bytes(data) == good
    assert told == 1000


def rewritten(safetensors, saved, change):
    """The map with changed tensors and metadata, and without a checksum, as a stranger would write it."""
    from safetensors import safe_open

    with safe_open(saved, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = {name: text for name, text in file.metadata().items() if name != "checksum"}
    tensors, metadata = change(dict(tensors), dict(metadata))
    safetensors.save_file(tensors, saved, metadata)
    return saved


CHANGES = {
    "no query": lambda t, m: ({n: x for n, x in t.items() if "query" not in n}, m),
    "renamed": lambda t, m: ({f"{n}.x": x for n, x in t.items()}, m),
    "integers": lambda t, m: ({n: x.to(torch.int32) for n, x in t.items()}, m),
    "other dtypes": lambda t, m: ({n: x.double() if "key" in n else x for n, x in t.items()}, m),
    "flat": lambda t, m: ({n: x.flatten() for n, x in t.items()}, m),
    "narrow keys": lambda t, m: ({n: x[..., :2].clone() if "key" in n else x for n, x in t.items()}, m),
    "three heads": lambda t, m: ({n: x.repeat(1, 3, 1, 1) if "key" in n else x for n, x in t.items()}, m),
    "no plan": lambda t, m: (t, {n: x for n, x in m.items() if n != "plan"}),
    "no frame": lambda t, m: (t, {n: x for n, x in m.items() if n != "frame"}),
    "plan is text": lambda t, m: (t, m | {"plan": "hello"}),
    "deep plan": lambda t, m: (t, m | {"plan": "[" * 100_000}),
    "deep whole plan": lambda t, m: (t, m | {"plan": '["list",[[0,' * 3000 + "0" + "]]]" * 3000}),
    "frame of words": lambda t, m: (t, m | {"frame": '["a", "b", "c", 1]'}),
    "endless frame": lambda t, m: (t, m | {"frame": "[[0,9,1,2],[0,9,1,2],[0,9,1,2],5,5,5]"}),
    "unknown class": lambda t, m: (t, m | {"plan": '["object", "os.system", []]'}),
    "long number": lambda t, m: (t, m | {"frame": "9" * 5000}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_map_whose_parts_do_not_fit_is_refused(safetensors, saved, change):
    assert refused(rewritten(safetensors, saved, change))


def test_a_map_without_a_checksum_and_a_map_on_disk_that_is_replaced_are_read(safetensors, saved):
    before = AttentionMap.load(saved)
    again = AttentionMap.load(rewritten(safetensors, saved, lambda t, m: (t, m)))
    assert torch.equal(again[:], before[:])
    saved.write_bytes(b"")  # a map that is loaded does not depend on its file
    assert before[0, 0, 4].sum() == pytest.approx(1)


def test_a_pipe_or_a_missing_file_is_no_map(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("pipe", "nothing"):
        with pytest.raises(CheckpointError, match="there is no such file"):
            AttentionMap.load(tmp_path / f"{name}.safetensors")


# Checkpoints --------------------------------------------------------------------------------------------------------


def layer_tensors(prefix="layers.0.self_attn."):
    layer = torch.nn.MultiheadAttention(12, 3)
    return {prefix + name: x.detach().clone() for name, x in layer.state_dict().items()}


def test_a_layer_number_of_five_thousand_digits_is_refused(tmp_path, safetensors, capsys):
    safetensors.save_file(layer_tensors("layers." + "7" * 5000 + ".self_attn."), tmp_path / "a.safetensors")
    assert main(["inspect", str(tmp_path / "a.safetensors"), "--heads", "3"]) == 2
    assert "a tensor whose name is 5,0" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["config", "index", "metadata"])
def test_deep_json_is_refused(tmp_path, safetensors, where):
    deep = "[" * 200_000
    metadata = {"format": "headwise gpt 1", "config": deep} if where == "metadata" else {}
    safetensors.save_file(layer_tensors(), tmp_path / "model.safetensors", metadata)
    if where != "metadata":
        (tmp_path / {"config": "config.json", "index": "model.safetensors.index.json"}[where]).write_text(deep)
    with pytest.raises(CheckpointError, match="JSON"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".safetensors.index.json"])
def test_a_pipe_is_refused_and_does_not_hang(tmp_path, suffix):
    os.mkfifo(tmp_path / f"model{suffix}")
    for path in (tmp_path / f"model{suffix}", tmp_path):
        with pytest.raises(CheckpointError, match="is not a file; expected a regular file"):
            open_checkpoint(path)


def test_a_pipe_of_text_is_refused_with_the_way_that_works(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    assert main(["view", "--file", str(tmp_path / "pipe")]) == 2
    assert "pass - instead" in capsys.readouterr().err


def compressed(path):
    """A torch file whose zeros are deflated: a thousandth of its size."""
    torch.save({"w": torch.zeros(1_500_000)}, path)
    with zipfile.ZipFile(path) as stored:
        parts = {part.filename: stored.read(part) for part in stored.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as small:
        for name, data in parts.items():
            small.writestr(name, data)


def expanded(path):
    torch.save({"w": torch.zeros(1).expand(300_000_000)}, path)


class Bytes:
    def __reduce__(self):
        return bytearray, (3_000_000_000,)


def reserving(path):
    torch.save({"w": torch.zeros(2), "n": Bytes()}, path)


def reserving_in_the_old_format(path):
    torch.save({"w": torch.zeros(2), "n": Bytes()}, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [compressed, expanded, reserving, reserving_in_the_old_format])
def test_a_small_torch_file_cannot_grow(tmp_path, write):
    path = tmp_path / "small.pt"
    write(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(CheckpointError, match=r"is compressed|would grow|empty buffer of any size"):
        open_checkpoint(path)


def test_the_usual_torch_files_are_read(tmp_path):
    for new in (True, False):
        torch.save(layer_tensors(), tmp_path / "a.pt", _use_new_zipfile_serialization=new)
        assert len(open_checkpoint(tmp_path / "a.pt", num_heads=3).layers) == 1


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_mapped_file_that_becomes_shorter_is_an_error_and_no_signal(tmp_path, safetensors, suffix):
    path = tmp_path / f"model.{suffix}"
    (safetensors.save_file if suffix == "safetensors" else torch.save)(layer_tensors(), path)
    found = open_checkpoint(path, num_heads=3)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=r"bytes when it was opened and has [\d,]+ now; open it again"):
        found.read("layers.0.self_attn")


def test_a_truncated_or_lying_safetensors_file_is_refused(tmp_path, safetensors):
    path = tmp_path / "model.safetensors"
    safetensors.save_file(layer_tensors(), path)
    good = path.read_bytes()
    for data in (good[: len(good) // 2], good[:7], struct.pack("<Q", 2**60) + good[8:], b""):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            open_checkpoint(path)


# Code in a model's folder -------------------------------------------------------------------------------------------

MAP = {"AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_is_never_run_even_if_standard_input_says_yes(tmp_path, where):
    pytest.importorskip("transformers")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "unheard-of", "auto_map": MAP} if where == "config.json" else config)
    )
    if where != "config.json":
        (tmp_path / where).write_text(json.dumps({"auto_map": MAP}))
    (tmp_path / "tokenizer.json").write_bytes((builtin.FOLDER / "tokenizer.json").read_bytes())
    command = [sys.executable, "-m", "headwise", "view", "a text", "--model", str(tmp_path), "--no-html"]
    run = subprocess.run(command, input="y\n" * 9, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert run.returncode == 2
    assert "that would run Python code from its folder (auto_map), which headwise never does" in run.stderr
    assert not (tmp_path / "ran").exists()


def test_a_known_model_with_code_beside_it_is_opened_with_the_class_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=24, num_attention_heads=3, num_hidden_layers=1, intermediate_size=8, vocab_size=8192
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"auto_map": MAP})
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "tokenizer.json").write_bytes((builtin.FOLDER / "tokenizer.json").read_bytes())
    assert type(open_model(tmp_path).module).__module__.startswith("transformers.models.llama")
    assert not (tmp_path / "ran").exists()


# What is printed ----------------------------------------------------------------------------------------------------


def test_characters_that_steer_a_terminal_are_written_as_escapes():
    assert printable(f"a{ESCAPES}é漢\n") == "a\\x1b[2J\\x1b]0;owned\\x07\\u202e\\x0dé漢\\x0a"
    assert printable("one\n\ttwo\x9b", lines=True) == "one\n\ttwo\\x9b"
    assert printable("\U000e0001") == "\\U000e0001"


def is_clean(text):
    return all(letter.isprintable() or letter in "\n\xa0" for letter in text)


def test_a_survey_prints_names_and_reasons_without_escape_codes(tmp_path, capsys):
    (tmp_path / f"bad{ESCAPES}.txt").write_bytes(b"\0")
    (tmp_path / "a.jsonl").write_text(json.dumps({f"key{ESCAPES}": 1}) + "\n")
    (tmp_path / "good.txt").write_text("It was late.")
    assert main(["survey", str(tmp_path), "--context", "16"]) == 3
    told, chatter = capsys.readouterr()
    assert "bad\\x1b[2J" in told
    assert is_clean(told)
    assert is_clean(chatter)
    assert main(["survey", str(tmp_path / f"nothing{ESCAPES}.txt")]) == 2
    assert is_clean(capsys.readouterr().err)


def test_inspect_prints_names_of_layers_without_escape_codes(tmp_path, safetensors, capsys):
    safetensors.save_file(layer_tensors(f"layers.0.{ESCAPES}."), tmp_path / "a.safetensors")
    for heads in ([], ["--heads", "3"]):
        main(["inspect", str(tmp_path / "a.safetensors"), *heads])
        told, chatter = capsys.readouterr()
        assert "\\x1b[2J" in told
        assert is_clean(told)
        assert is_clean(chatter)


def test_a_view_prints_texts_and_names_without_escape_codes(capsys):
    assert main(["view", f"The captain {ESCAPES} looked.", "--no-html", "--plain"]) == 0
    assert is_clean(capsys.readouterr().out)
    layer = torch.nn.Sequential(torch.nn.Embedding(7, 12))
    layer.add_module(f"name{ESCAPES}".replace(".", ""), headwise.MultiHeadAttention(12, 3))
    shown = headwise.view(layer, torch.arange(5)[None])
    from headwise.view.color import palette
    from headwise.view.terminal import drawn_layer

    text = drawn_layer(shown, 0, 80, 24, palette(sys.stdout, plain=True))
    assert "name\\x1b[2J" in text
    assert is_clean(text)


OUTPUTS = {
    "survey": (["survey", "README.md", "--html"], "headwise.cli.survey.open_model"),
    "survey --out": (["survey", "README.md", "--out"], "headwise.study.survey.job.SurveyJob.run_here"),
    "view": (["view", "a text", "--html"], "headwise.cli.view.open_model"),
    "steps": (["steps", "--html"], "headwise.cli.steps.trace"),
    "bench": (["bench", "--out"], "headwise.cli.bench._measure"),
    "bench --plot": (["bench", "--plot"], "headwise.cli.bench._measure"),
}


@pytest.mark.parametrize("verb", OUTPUTS)
@pytest.mark.parametrize("target", ["a folder", "a pipe", "in a folder that does not exist"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(verb, target, tmp_path, capsys, monkeypatch):
    arguments, work = OUTPUTS[verb]
    suffix = ".svg" if "plot" in verb else ".json"
    os.mkfifo(tmp_path / f"pipe{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    name = {"a folder": f"folder{suffix}", "a pipe": f"pipe{suffix}"}.get(target, f"absent/a{suffix}")
    monkeypatch.setattr(work, None, raising=False)
    assert main([*arguments, str(tmp_path / name)]) == 2
    words = {"a folder": "is a folder; expected", "a pipe": "is a pipe or a device"}.get(target, "there is no folder")
    assert words in capsys.readouterr().err


def test_a_survey_that_is_a_pipe_or_nested_too_deeply_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(OptionError, match="is not a file"):
        headwise.Survey.load(tmp_path / "pipe.json")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match="is not a survey that headwise wrote"):
        headwise.Survey.load(tmp_path / "deep.json")


def test_a_pickle_in_a_checkpoint_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "a.pt").write_bytes(pickle.dumps({"w": Evil()}, protocol=2))
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        open_checkpoint(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()
