"""Tiny models of every kind that studies must work on: ours, and transformers' with random weights, in float64."""

import functools

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


# Models that nothing in headwise knows by name -----------------------------------------------------------------------

PLAIN = WIDTHS | {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = PLAIN | {"num_key_value_heads": 2, "head_dim": 4}
LATENT = PLAIN | {"num_key_value_heads": H, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 5, "n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
GATED = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "sliding_window": 5}
SPEECH = PAIR | {
    "vocab_size": V,
    "encoder_ffn_dim": 16,
    "decoder_attention_heads": H,
    "num_mel_bins": 8,
    "pad_token_id": 0,
}
SPEECH |= {"max_source_positions": 10, "max_target_positions": 20, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = WIDTHS | {"image_size": 12, "patch_size": 4}
TWO_TEXTS = CONFIGS["bart"] | {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TWO_TEXTS |= {"decoder_start_token_id": 1, "forced_eos_token_id": None}
ZOO = {
    "CausalLM": {
        "gpt2": CONFIGS["gpt2"] | {"vocab_size": V},
        "llama": GROUPED,
        "mistral": GROUPED | {"sliding_window": 5},
        "mixtral": GROUPED | {"num_local_experts": 2},
        "qwen2": GROUPED,
        "qwen2_moe": GROUPED
        | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
        | {"shared_expert_intermediate_size": 16},  # it makes a mask of a window of 0 tokens, which no layer uses
        "qwen3": GROUPED,
        "gemma": GROUPED,
        "gemma2": GROUPED | {"sliding_window": 5},
        "gemma3_text": GROUPED | {"sliding_window": 5},
        "phi": PLAIN,
        "phi3": GROUPED,
        "gpt_neox": PLAIN,
        "opt": PLAIN | {"ffn_dim": 16, "word_embed_proj_dim": E},
        "gpt_oss": GROUPED
        | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "olmo2": GROUPED,
        "cohere": GROUPED,
        "granite": GROUPED,
        "stablelm": GROUPED,
        "bitnet": GROUPED,
        "ctrl": CONFIGS["gpt2"] | {"vocab_size": V, "dff": 16, "n_positions": 64},  # it scales embeddings in place
        "jamba": GROUPED | {"attn_layer_period": 2, "attn_layer_offset": 0, "num_experts": 2, "mamba_dt_rank": 4},
        "minimax": GROUPED
        | {"num_local_experts": 2, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "afmoe": GROUPED | GATED,  # a gate for every number that a head reads
        "laguna": GROUPED | GATED | {"gating": "per-head", "shared_expert_intermediate_size": 16},
        "longcat_flash": LATENT
        | {"q_lora_rank": 16, "num_layers": 2, "ffn_hidden_size": 16, "expert_ffn_hidden_size": 16}
        | {"zero_expert_num": 1, "num_experts_per_tok": 2, "head_dim": 4},
        "deepseek_v2": LATENT | {"q_lora_rank": None, "head_dim": 4},
        "deepseek_v3": LATENT | {"q_lora_rank": 16},
    },
    "MaskedLM": {
        "bert": PLAIN,
        "roberta": PLAIN | {"max_position_embeddings": 40},
        "distilbert": {"dim": E, "n_heads": H, "n_layers": 2, "hidden_dim": 16, "vocab_size": V},
        "albert": PLAIN | {"embedding_size": 16},
        "electra": PLAIN | {"embedding_size": E},
        "modernbert": PLAIN | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    },
    "Seq2SeqLM": {
        "t5": {"d_model": E, "num_heads": H, "d_kv": 4, "num_layers": 2, "vocab_size": V, "d_ff": 16, "pad_token_id": 0}
        | {"decoder_start_token_id": 0},
        "bart": TWO_TEXTS,
    },
    "SpeechSeq2Seq": {"whisper": SPEECH},
    "": {"vit": IMAGE, "dinov2": IMAGE},
}
ALL = [(family, kind) for family, kinds in ZOO.items() for kind in kinds]


@functools.cache
def unseen(family, kind, implementation="headwise"):
    """A model of transformers with random weights, in float64 if it can compute so; not to be changed."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    auto = getattr(transformers, f"AutoModelFor{family}" if family else "AutoModel")
    config = transformers.AutoConfig.for_model(kind, **ZOO[family][kind])
    model = auto.from_config(config, attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise if parameter.dim() > 1 else 0.5 + 0.1 * noise)
    mixes = any("Experts" in type(module).__name__ for module in model.modules())  # torch has no float64 for these
    return model if mixes else model.double()


def inputs_of(family, B, T, seed=0):
    """A batch that models of a family read."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, V, (B, T), generator=generator)
    if family == "Seq2SeqLM":
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, : T - 4].flip(1)}
    if family == "SpeechSeq2Seq":
        sound = torch.randn(B, 8, 20, generator=generator).double()
        return {"input_features": sound, "decoder_input_ids": tokens}
    if family == "":
        return {"pixel_values": torch.randn(B, 3, 12, 12, generator=generator).double()}
    return tokens
