"""One layer is the attention of every known model: tiny random models of transformers, attention by attention."""

import pytest
import torch

from closeness import assert_close_to_truth
from headwise import MultiHeadAttention, RelativeBias, alibi, linear, llama3, rotary, window, yarn
from headwise.layer.checkpoints import forms

transformers = pytest.importorskip("transformers")

E, H, T, V = 48, 6, 19, 67
SMALL = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 1, "vocab_size": V, "intermediate_size": 32}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}


def linears(module, names):
    return [getattr(module, name) for name in names]


def llama_names(module):
    return linears(module, ["q_proj", "k_proj", "v_proj", "o_proj"])


def split_rows(module, name, out, order):
    """Three linears out of a fused one, whose rows `order` puts into (3, H·D)."""
    fused = getattr(module, name)
    weight, bias = fused.weight, fused.bias
    weight = weight.T if type(fused).__name__ == "Conv1D" else weight
    parts = order(weight)
    biases = (None,) * 3 if bias is None else order(bias[:, None])
    made = []
    for part, shift in zip(parts, biases, strict=True):
        one = torch.nn.Linear(part.shape[1], part.shape[0], shift is not None, dtype=part.dtype)
        one.weight.data = part.contiguous()
        if shift is not None:
            one.bias.data = shift[:, 0].contiguous()
        made.append(one)
    last = getattr(module, out)
    if type(last).__name__ == "Conv1D":
        plain = torch.nn.Linear(*last.weight.shape, dtype=last.weight.dtype)
        plain.weight.data, plain.bias.data = last.weight.T.contiguous(), last.bias.data
        last = plain
    return [*made, last]


def head_by_head(x):
    return [part.flatten(0, 1) for part in x.unflatten(0, (H, 3, -1)).unbind(1)]


# model type: (config, attention's path in the model, its four linears, our options, its norms or other parameters)
MODELS = {
    "gpt2": (
        {"n_embd": E, "n_head": H, "n_layer": 1, "vocab_size": V},
        "transformer.h.0.attn",
        lambda m: split_rows(m, "c_attn", "c_proj", lambda w: w.chunk(3)),
        lambda: {"causal": True},
        None,
    ),
    "bert": (
        SMALL, "encoder.layer.0.attention.self",
        lambda m: [*linears(m, ["query", "key", "value"]), None],
        lambda: {"out_proj": False}, None,
    ),
    "t5": (
        {"d_model": E, "num_heads": H, "d_kv": 16, "num_layers": 1, "vocab_size": V, "d_ff": 32, "pad_token_id": 0},
        "encoder.block.0.layer.0.SelfAttention",
        lambda m: linears(m, ["q", "k", "v", "o"]),
        lambda: {"head_dim": 16, "bias": False, "position": RelativeBias(H), "scale": 1.0},
        lambda ours, m: ours.position.weight.data.copy_(m.relative_attention_bias.weight),
    ),
    "llama": (
        GROUPED | {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            },
            "max_position_embeddings": 128,
        },
        "model.layers.0.self_attn", llama_names,
        lambda: {
            "num_kv_heads": 2, "causal": True, "bias": False,
            "position": rotary(500000.0, scaling=llama3(original_length=16)),
        }, None,
    ),
    "mistral": (
        GROUPED | {"sliding_window": 5}, "model.layers.0.self_attn", llama_names,
        lambda: {"num_kv_heads": 2, "causal": True, "mask": window(4), "bias": False, "position": rotary()}, None,
    ),
    "gemma2": (
        GROUPED
        | {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 5, "layer_types": ["sliding_attention"]},
        "model.layers.0.self_attn", llama_names,
        lambda: {
            "num_kv_heads": 2, "head_dim": 16, "causal": True, "mask": window(4), "bias": False,
            "position": rotary(), "softcap": 50.0, "scale": 20**-0.5,
        }, None,
    ),
    "gemma3_text": (
        GROUPED | {"query_pre_attn_scalar": 20, "layer_types": ["full_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }},
        "model.layers.0.self_attn", llama_names,
        lambda: {
            "num_kv_heads": 2, "causal": True, "bias": False, "qk_norm": "head",
            "position": rotary(1e6, scaling=linear(8)), "scale": 20**-0.5,
        },
        lambda ours, m: [
            getattr(ours, name).weight.data.copy_(1 + getattr(m, name).weight) for name in ("q_norm", "k_norm")
        ],
    ),
    "qwen3": (
        GROUPED, "model.layers.0.self_attn", llama_names,
        lambda: {"num_kv_heads": 2, "causal": True, "bias": False, "qk_norm": "head", "position": rotary()},
        lambda ours, m: [
            getattr(ours, name).weight.data.copy_(getattr(m, name).weight) for name in ("q_norm", "k_norm")
        ],
    ),
    "olmo2": (
        GROUPED, "model.layers.0.self_attn", llama_names,
        lambda: {"num_kv_heads": 2, "causal": True, "bias": False, "qk_norm": "width", "position": rotary()},
        lambda ours, m: [
            getattr(ours, name).weight.data.copy_(getattr(m, name).weight) for name in ("q_norm", "k_norm")
        ],
    ),
    "gpt_oss": (
        GROUPED | {
            "sliding_window": 5, "layer_types": ["sliding_attention"], "num_local_experts": 2, "num_experts_per_tok": 1,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "rope_theta": 150000.0, "original_max_position_embeddings": 64,
            },
        },
        "model.layers.0.self_attn", llama_names,
        lambda: {
            "num_kv_heads": 2, "causal": True, "mask": window(4), "sinks": True,
            "position": rotary(150000.0, scaling=yarn(32, 64, truncate=False)),
        },
        lambda ours, m: ours.sinks.data.copy_(m.sinks),
    ),
    "falcon": (
        SMALL | {"alibi": True, "bias": True, "multi_query": False, "new_decoder_architecture": False},
        "transformer.h.0.self_attention",
        lambda m: split_rows(m, "query_key_value", "dense", head_by_head),
        # Falcon scales what it adds for the distance as well.
        lambda: {"causal": True, "position": alibi(slopes=alibi(H).table * (E // H) ** -0.5)}, None,
    ),
    "bloom": (
        SMALL | {"n_head": H}, "transformer.h.0.self_attention",
        lambda m: split_rows(m, "query_key_value", "dense", head_by_head),
        lambda: {"causal": True, "position": alibi(H)}, None,
    ),
    "gptj": (
        {"n_embd": E, "n_head": H, "n_layer": 1, "rotary_dim": 4, "vocab_size": V},
        "transformer.h.0.attn", lambda m: linears(m, ["q_proj", "k_proj", "v_proj", "out_proj"]),
        lambda: {"causal": True, "bias": False, "position": rotary(width=4, interleaved=True)}, None,
    ),
}  # fmt: skip


def attention_of(kind):
    """A random model's attention, what went into it, and what came out."""
    settings, path, *_ = MODELS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    dtype = torch.float32 if kind == "gpt_oss" else torch.float64  # its experts know no float64
    path_in_torch = "sdpa" if kind == "falcon" else "eager"  # its eager path adds the slopes twice
    head = transformers.AutoModelForCausalLM if path.startswith(("model.", "transformer.")) else transformers.AutoModel
    model = head.from_config(config, attn_implementation=path_in_torch, dtype=dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module, seen = model.get_submodule(path), {}

    def keep(module, args, kwargs, output):
        seen["x"] = args[0] if args else kwargs["hidden_states"]
        seen["y"] = (output[0] if isinstance(output, tuple) else output) - (args[1] if kind == "bloom" else 0)

    module.register_forward_hook(keep, with_kwargs=True)
    ids = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, **({"decoder_input_ids": ids} if kind == "t5" else {}))
    return module, seen["x"], seen["y"]


def ours_for(kind, module, dtype=torch.float64):
    _, _, four, options, more = MODELS[kind]
    layer = MultiHeadAttention(E, H, **options(), dtype=dtype).eval()
    *first, out = four(module)
    for name in ("weight", "bias"):
        parts = [getattr(x, name) for x in first]
        if layer.fused and parts[0] is not None:
            packed = forms.pack(*parts, layer.num_heads, layer.num_kv_heads)
            getattr(layer.qkv_proj, name).data.copy_(packed)
        elif not layer.fused:
            for x, mine in zip(parts, (layer.q_proj, layer.k_proj, layer.v_proj), strict=True):
                if x is not None:
                    getattr(mine, name).data.copy_(x)
        if out is not None and getattr(out, name) is not None:
            getattr(layer.out_proj, name).data.copy_(getattr(out, name))
    if more is not None:
        more(layer, module)
    return layer


@pytest.mark.parametrize("kind", MODELS)
@torch.no_grad()
def test_our_layer_is_the_attention_of(kind):
    module, x, y = attention_of(kind)
    layer = ours_for(kind, module, x.dtype)
    assert x.shape == (2, T, E)
    torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=2e-5)  # they keep angles in float32
    if layer.causal:
        cache = layer.make_cache(2)
        steps = [layer(x[:, t : t + 1], cache=cache) for t in range(T)]
        assert_close_to_truth(torch.cat(steps, 1), layer(x))


@torch.no_grad()
def test_our_layers_are_the_three_attentions_of_whisper():
    config = transformers.WhisperConfig(
        d_model=E,
        encoder_attention_heads=H,
        decoder_attention_heads=H,
        encoder_layers=1,
        decoder_layers=1,
        vocab_size=V,
        num_mel_bins=5,
        max_source_positions=11,
        max_target_positions=T,
        pad_token_id=0,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    model = transformers.WhisperModel._from_config(config, attn_implementation="eager", dtype=torch.float64).eval()
    seen = {}

    def keep(name):
        def hook(module, args, kwargs, output):
            seen[name] = (args[0] if args else kwargs["hidden_states"], kwargs.get("key_value_states"), output[0])

        return hook

    places = {
        "encoder": model.encoder.layers[0].self_attn,
        "decoder": model.decoder.layers[0].self_attn,
        "cross": model.decoder.layers[0].encoder_attn,
    }
    for name, module in places.items():
        module.register_forward_hook(keep(name), with_kwargs=True)
    model(torch.randn(2, 5, 22, dtype=torch.float64), decoder_input_ids=torch.randint(3, V, (2, T)))
    for name, module in places.items():
        x, memory, y = seen[name]
        layer = MultiHeadAttention(E, H, bias={"q", "v", "out"}, causal=name == "decoder", dtype=torch.float64)
        layer.load_state_dict(module.state_dict())
        found = layer(x) if memory is None else layer(x, layer.remember(memory))
        assert_close_to_truth(found, y)
