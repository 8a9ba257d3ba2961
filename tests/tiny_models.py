"""Tiny models of every kind that studies must work on: ours, and transformers' with random weights, in float64."""

import pytest
import torch

from headwise.models.gpt import GPT, GPTConfig

V, E, H, LAYERS = 31, 24, 6, 3
WIDTHS = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": LAYERS, "intermediate_size": 16}
CONFIGS = {
    "gpt2": {"n_embd": E, "n_head": H, "n_layer": LAYERS},
    "llama": WIDTHS | {"num_key_value_heads": 2},
    "bert": WIDTHS,
    "gpt_neox": WIDTHS,
}
PAIR = {"d_model": E, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": H, "decoder_ffn_dim": 16}
CONFIGS["bart"] = PAIR | {"decoder_attention_heads": H, "encoder_ffn_dim": 16, "max_position_embeddings": 40}
CAUSAL = ("builtin", "gpt2", "llama", "gpt_neox")


def tiny(kind):
    """A model in float64, in evaluation, on headwise."""
    torch.manual_seed(1)
    if kind == "builtin":
        return GPT(GPTConfig(V, E, H, LAYERS, 64)).double().eval()
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    config = transformers.AutoConfig.for_model(kind, vocab_size=V, pad_token_id=0, eos_token_id=2, **CONFIGS[kind])
    if kind in CAUSAL:
        auto = transformers.AutoModelForCausalLM
    else:
        auto = transformers.AutoModelForSeq2SeqLM if kind == "bart" else transformers.AutoModel
    model = auto.from_config(config, attn_implementation="headwise").double().eval()
    with torch.no_grad():  # larger than at the start of training, so that heads differ
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)
    return model


def states(output):
    """The tensor that matters in what a model returns."""
    if isinstance(output, torch.Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output.last_hidden_state
