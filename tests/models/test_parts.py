"""Positions, norms and gates of recent models: our layer with these parts is their attention in transformers."""

import functools
import math

import pytest
import torch
from torch import nn

from closeness import assert_close_to_truth
from headwise import (
    CacheError,
    MultiHeadAttention,
    Norms,
    OptionError,
    chunks,
    cosine,
    llama3,
    longrope,
    multi_axis_rotary,
    queries_only,
    rotary,
    temperature,
    window,
)
from headwise.layer.checkpoints import forms
from headwise.layer.norms import ZeroCentredNorm

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

E, H, HKV, D, T, V, B = 48, 6, 2, 8, 19, 67, 2
SMALL = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 1, "vocab_size": V, "intermediate_size": 32}
SMALL |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": HKV}
GROUPED = SMALL | {"head_dim": D}
OURS = {"num_kv_heads": HKV, "causal": True, "bias": False}
UNWEIGHTED = functools.partial(nn.RMSNorm, eps=1e-5, elementwise_affine=False)
LLAMA4 = GROUPED | {"intermediate_size_mlp": 32, "moe_layers": [], "rms_norm_eps": 1e-5}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.2, 1.9, 3.1, 7.0]
PHI3 = SMALL | {"max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "rope_theta": 10000.0}
GEMMA3N = GROUPED | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "sliding_window": 5}
GEMMA3N |= {"vocab_size_per_layer_input": V, "altup_num_inputs": 2}
GEMMA3N |= {"layer_types": ["sliding_attention"], "rms_norm_eps": 1e-6}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN3_NEXT = GROUPED | {"layer_types": ["full_attention"], "mlp_only_layers": [0], "head_dim": 16}
QWEN3_NEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}


def longrope_of(length):
    return PHI3 | {"rope_parameters": LONGROPE, "original_max_position_embeddings": length}


def ours_longrope(length):
    return OURS | {"position": rotary(scaling=longrope(64 / length, length, SHORT, LONG))}


# name: (the model's configuration, our options); the first word is the model's type
MODELS = {
    "llama4_text with a rotary": (
        LLAMA4 | {"no_rope_layers": [1], "attention_chunk_size": 7},
        OURS
        | {"position": rotary(500000.0, interleaved=True), "mask": chunks(7)}
        | {"qk_norm": Norms(UNWEIGHTED, UNWEIGHTED, after=True)},
    ),
    "llama4_text with scaling": (
        LLAMA4
        | {"no_rope_layers": [1], "use_qk_norm": False, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 64,
        }},
        OURS | {"position": rotary(500000.0, interleaved=True, scaling=llama3(
            16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_length=64
        ))},
    ),
    "llama4_text without a rotary": (
        LLAMA4 | {"no_rope_layers": [0], "floor_scale": 5, "attn_scale": 0.3},
        OURS | {"position": temperature(0.3, 5)},
    ),
    "ministral3": (
        GROUPED
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.4}
        | {"original_max_position_embeddings": 5}},
        OURS | {"position": rotary() + temperature(0.4, 5, first=0)},
    ),
    "phi3 of a short text": (longrope_of(32), ours_longrope(32)),
    "phi3 of a long text": (longrope_of(8), ours_longrope(8)),
    "qwen2_vl_text": (
        SMALL | {"rope_parameters": MROPE},
        OURS | {"bias": {"q", "k", "v"}, "position": multi_axis_rotary((2, 1, 1))},
    ),
    "qwen3_vl_text": (
        GROUPED | {"head_dim": 12, "rope_parameters": MROPE | {"mrope_section": [4, 1, 1], "mrope_interleaved": True}},
        OURS | {"head_dim": 12, "qk_norm": "head", "position": multi_axis_rotary((4, 1, 1), alternating=True)},
    ),
    "qwen3_next": (
        QWEN3_NEXT,
        OURS
        | {"head_dim": 16, "gate": "element", "position": rotary(width=4)}
        | {"qk_norm": functools.partial(ZeroCentredNorm, eps=1e-6)},
    ),
    "gemma3n_text": (
        GEMMA3N,
        OURS
        | {"mask": window(4), "position": rotary(), "qk_norm": Norms("head", "head", value="unweighted")}
        | {"scale": 1.0},
    ),
}  # fmt: skip


def model_of(kind, settings, dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    auto = transformers.AutoModel
    model = auto.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def listen(model, positions=None):
    """What goes into every attention of a model by its number, and what comes out."""
    seen = {}
    for number, block in enumerate(model.layers):

        def keep(module, args, kwargs, output, number=number):
            seen[number] = args[0] if args else kwargs["hidden_states"], output[0]

        block.self_attn.register_forward_hook(keep, with_kwargs=True)
    ids = torch.randint(3, V, (B, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=False)
    return seen


def state_of(module, layer):
    """The weights of an attention with Llama's names, as our layer stores them."""
    theirs = module.state_dict()
    if "qkv_proj.weight" in theirs:
        rows = [H * D, HKV * D, HKV * D]
        theirs |= zip(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight"), theirs["qkv_proj.weight"].split(rows), strict=True
        )
    if layer.gate is not None:
        query, gate = theirs["q_proj.weight"].unflatten(0, (H, 2, -1)).unbind(1)
        theirs |= {"q_proj.weight": query.flatten(0, 1), "gate.proj.weight": gate.flatten(0, 1)}
    theirs["out_proj.weight"] = theirs["o_proj.weight"]
    for name in ("weight", "bias"):
        if f"k_proj.{name}" in theirs:
            parts = [theirs[f"{part}_proj.{name}"] for part in "qkv"]
            theirs[f"qkv_proj.{name}"] = forms.pack(*parts, H, HKV)
    return {name: theirs[name] for name in layer.state_dict()}


@functools.cache
def held(name):
    """Our layer, what went into theirs, what came out, and the positions."""
    settings, options = MODELS[name]
    model = model_of(name.split()[0], settings)
    axes = getattr(options.get("position"), "axes", 1)
    positions = None
    if axes > 1:
        positions = torch.randint(0, 30, (axes, B, T), generator=torch.Generator().manual_seed(1)).sort(-1).values
    x, y = listen(model, positions)[0]
    layer = MultiHeadAttention(E, H, **options, dtype=torch.float64).eval()
    layer.load_state_dict(state_of(model.layers[0].self_attn, layer))
    return layer, x, y, positions


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_our_layer_is_the_attention_of(name):
    layer, x, y, positions = held(name)
    torch.testing.assert_close(layer(x, positions=positions), y, rtol=1e-4, atol=2e-5)  # they keep angles in float32


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_token_by_token_our_layer_is_the_attention_of(name, static):
    layer, x, y, positions = held(name)
    cache, steps = layer.make_cache(B, capacity=T if static else None, static=static), []
    first = 9 if name == "phi3 of a long text" else 1  # beyond the original length in one piece
    for part in (slice(0, first), *(slice(t, t + 1) for t in range(first, T))):
        at = None if positions is None else positions[..., part]
        steps.append(layer(x[:, part], cache=cache, positions=at))
    torch.testing.assert_close(torch.cat(steps, 1), y, rtol=1e-4, atol=2e-5)
    assert_close_to_truth(torch.cat(steps, 1), layer(x, positions=positions))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_maps_compiled_calls_and_packed_samples_agree_for(name):
    layer, x, _, positions = held(name)
    expected = layer(x, positions=positions)
    output, weights = layer(x, positions=positions, return_weights=True)
    torch.testing.assert_close(output, expected)
    assert_close_to_truth(weights.to_tensor().sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, positions=positions), expected)
    if layer.mask.banded:  # packing renumbers keys
        nested = torch.nested.nested_tensor([x[0], x[1, :11]], layout=torch.jagged)
        both = layer(nested).unbind()
        torch.testing.assert_close(both[0], layer(x[:1])[0])
        if not name.endswith("long text"):  # all samples of a call use the factors of the longest
            torch.testing.assert_close(both[1], layer(x[1:, :11])[0])


@torch.no_grad()
def test_cosine_attention_with_a_scale_per_head_is_that_of_swin_v2():
    from transformers.models.swinv2.modeling_swinv2 import Swinv2SelfAttention

    torch.manual_seed(0)
    config = transformers.Swinv2Config(qkv_bias=True, attention_probs_dropout_prob=0.0)
    theirs = Swinv2SelfAttention(config, E, H, (3, 5)).double().eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    theirs.logit_scale.copy_(torch.linspace(-1, 6, H)[:, None, None])  # the last is above the limit
    x = torch.randn(B, 15, E, dtype=torch.float64)
    table = theirs.continuous_position_bias_mlp(theirs.relative_coords_table).view(-1, H)
    bias = 16 * torch.sigmoid(table[theirs.relative_position_index.view(-1)].view(15, 15, H).permute(2, 0, 1))
    norms = cosine(limit=1 / 0.01)
    layer = MultiHeadAttention(
        E, H, bias={"q", "v"}, out_proj=False, qk_norm=norms, scale=1.0, dtype=torch.float64
    ).eval()
    state = {f"{part[0]}_proj.{kind}": getattr(getattr(theirs, part), kind)
             for part in ("query", "key", "value") for kind in ("weight", "bias")}  # fmt: skip
    state["q_norm.log_scale"] = theirs.logit_scale.flatten()
    layer.load_state_dict({name: x for name, x in state.items() if x is not None})
    assert math.exp(layer.q_norm.log_scale.max()) > layer.q_norm.limit
    torch.testing.assert_close(layer(x, attn_bias=bias[None]), theirs(x)[0])


SHARED = ["sliding_attention", "full_attention"] * 2


def gemma3n_layers(model):
    """Our layers for a Gemma 3n of two layers, and two that read the keys and values of these."""
    layers = []
    for number, kind in enumerate(SHARED):
        later = number >= 2
        options = OURS | {"scale": 1.0, "projections": queries_only() if later else None}
        options |= {"mask": window(4), "position": rotary()} if "sliding" in kind else {"position": rotary(1e6)}
        norms = Norms("head") if later else Norms("head", "head", value="unweighted")
        layer = MultiHeadAttention(E, H, **options, qk_norm=norms, dtype=torch.float64).eval()
        layer.load_state_dict(state_of(model.layers[number].self_attn, layer))
        layers.append(layer)
    return layers


@functools.cache
def sharing():
    settings = {"num_hidden_layers": 4, "layer_types": SHARED, "num_kv_shared_layers": 2}
    model = model_of("gemma3n_text", GEMMA3N | settings)
    return gemma3n_layers(model), listen(model)


@torch.no_grad()
def test_layers_that_make_queries_only_read_the_keys_of_an_earlier_layer_of_gemma3n():
    layers, seen = sharing()
    at = torch.arange(T)
    memories = [layers[i].remember(seen[i][0], positions=at) for i in range(2)]
    for number, layer in enumerate(layers):
        x, y = seen[number]
        torch.testing.assert_close(layer(x, memories[number % 2], positions=at), y, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_token_by_token_later_layers_of_gemma3n_read_an_earlier_layers_cache(static):
    layers, seen = sharing()
    caches = [layers[i].make_cache(B, capacity=T if static else None, static=static) for i in range(2)]
    steps = {number: [] for number in range(4)}
    for part in (slice(0, 3), *(slice(t, t + 1) for t in range(3, T))):
        for number, layer in enumerate(layers):
            x, cache = seen[number][0][:, part], caches[number % 2]
            steps[number].append(layer(x, cache=cache) if number < 2 else layer(x, cache))
    for number, found in steps.items():
        torch.testing.assert_close(torch.cat(found, 1), seen[number][1], rtol=1e-4, atol=2e-5)


@torch.no_grad()
def test_a_shared_cache_of_prompts_of_different_lengths_is_read_at_each_samples_own_end():
    (_, first, _, later), seen = sharing()
    x, z = seen[1][0], seen[3][0]
    cache = first.make_cache(B)
    first(x[:, :11], cache=cache, lengths=[11, 6])
    found, weights = later(z[:, :11], cache, lengths=[11, 6], return_weights=True)
    assert weights.shape == (B, H, 11, 11)
    for sample, length in enumerate((11, 6)):
        alone = first.make_cache(1)
        first(x[sample : sample + 1, :length], cache=alone)
        expected = later(z[sample : sample + 1, :length], alone)
        torch.testing.assert_close(found[sample : sample + 1, :length], expected)


@torch.no_grad()
def test_a_layer_of_queries_only_says_where_to_get_its_keys():
    layers, seen = sharing()
    x = seen[3][0]
    for call in (lambda: layers[3](x), lambda: layers[3](x, x), lambda: layers[3].remember(x)):
        with pytest.raises(OptionError, match="makes queries only. Pass the keys and values of another layer"):
            call()
    with pytest.raises(CacheError, match=r"holds \[0, 0\] tokens, and the queries are the last 19 of them"):
        layers[3](x, layers[1].make_cache(B))
    with pytest.raises(OptionError, match="cache= does not go with mha"):
        layers[3](x, layers[1].make_cache(B), cache=layers[1].make_cache(B))
