"""`headwise inspect` on real files."""

import json

import pytest
import torch
from torch import nn

from headwise.cli import main

E, H = 48, 6


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.pt"
    torch.save(nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, batch_first=True), 12).state_dict(), path)
    return str(path)


def test_layers_that_are_alike_share_a_row(weights, capsys):
    assert main(["inspect", weights, "--heads", "6"]) == 0
    out = capsys.readouterr().out
    assert "layers.{0–11}.self_attn" in out
    assert "48 → 6×8 → 48" in out
    assert "12 attention layers, 112,896 parameters, float32; cache 4.5 KiB per token" in out


def test_unknown_heads_are_asked_for(weights, capsys):
    assert main(["inspect", weights]) == 2
    out = capsys.readouterr().out
    assert "layers.0.self_attn and 11 more" in out
    assert "Pass --heads." in out


def test_json_names_every_layer(weights, capsys):
    assert main(["inspect", weights, "--heads", "6", "--tokens", "10", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [layer["name"] for layer in told["layers"]] == [f"layers.{i}.self_attn" for i in range(12)]
    assert told["layers"][3]["cache_bytes"] == 10 * 2 * E * 4
    assert told["layers"][3]["options"] == "biases"


def test_a_file_without_attention_ends_with_two(tmp_path, capsys):
    torch.save(nn.Linear(3, 5).state_dict(), tmp_path / "linear.pt")
    assert main(["inspect", str(tmp_path / "linear.pt")]) == 2
    assert "no attention layer among the 2 tensors" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nowhere.pt"], ["x", "--heads", "0"]])
def test_bad_input_ends_with_two(arguments, capsys):
    try:
        status = main(["inspect", *arguments])
    except SystemExit as stop:  # argparse's own way
        status = stop.code
    assert status == 2
    assert "Traceback" not in capsys.readouterr().err
