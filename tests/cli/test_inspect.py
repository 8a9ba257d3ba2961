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


MODELS = {
    "llama4_text": (
        {"intermediate_size_mlp": 32, "moe_layers": [], "no_rope_layers": [1, 0], "attention_chunk_size": 4},
        [
            "causal, chunks(4), rotary(500000, neighbours), q/k norm after the position",
            "causal, temperature(0.1, 8192)",
        ],
    ),
    "qwen3_next": (
        {"layer_types": ["full_attention"] * 2, "mlp_only_layers": [0, 1], "head_dim": 16},
        ["causal, rotary(10000, first 4), q/k norm, gate per element"] * 2,
    ),
    "gemma3n_text": (
        {
            "num_kv_shared_layers": 1,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 67,
            "laurel_rank": 4,
        }
        | {"layer_types": ["full_attention"] * 2},
        [
            "causal, rotary(1e+06), scale 1, q/k norm, v norm",
            "causal, queries_only(), rotary(1e+06), scale 1, q norm",
        ],
    ),
    "qwen3_vl_text": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        ["causal, 3-axis rotary(10000), q/k norm"] * 2,
    ),
    "phi3": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}}
        | {"original_max_position_embeddings": 32, "max_position_embeddings": 64},
        ["causal, rotary(10000, longrope)"] * 2,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_layers_of_recent_models_are_named(kind, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    settings, words = MODELS[kind]
    small = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2, "vocab_size": 67, "head_dim": 8}
    small |= {"intermediate_size": 32, "num_key_value_heads": 2, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, **small | settings)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert [layer["options"] for layer in json.loads(capsys.readouterr().out)["layers"]] == words
