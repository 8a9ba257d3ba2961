"""Whole models on disk: every attention layer is found, gives what the model gives, and is written back to the bit."""

import json

import pytest
import torch
from torch import nn

from headwise import CheckpointError, MultiHeadAttention, open_checkpoint, queries_only, rotary

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

T, E, H, V = 11, 48, 6, 67
PLAIN = {"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2, "vocab_size": V, "intermediate_size": 32}
PLAIN |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = PLAIN | {"num_key_value_heads": 2, "head_dim": 8}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 15e4}
YARN |= {"original_max_position_embeddings": 64}
IMAGE = {"image_size": 12, "patch_size": 4, "hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2}
IMAGE |= {"intermediate_size": 32}
PAIR = {"d_model": E, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": H, "vocab_size": V}
PAIR |= {"decoder_attention_heads": H, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 40}
PAIR |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SLIDING = ["sliding_attention", "full_attention"]
FALCON = PLAIN | {"bias": True, "new_decoder_architecture": False}
MODELS = {
    "gpt2": (
        "gpt2",
        {"n_embd": E, "n_head": H, "n_layer": 2, "vocab_size": V, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gpt_neox": ("gpt_neox", PLAIN),
    "gptj": ("gptj", {"n_embd": E, "n_head": H, "n_layer": 2, "vocab_size": V, "rotary_dim": 4}),
    "gpt_neo": (
        "gpt_neo",
        {"hidden_size": E, "num_heads": H, "num_layers": 2, "vocab_size": V, "window_size": 4}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "falcon of one key head": ("falcon", FALCON | {"multi_query": True}),
    "falcon of all key heads": ("falcon", FALCON | {"multi_query": False, "alibi": True}),
    "falcon of some key heads": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "bloom": ("bloom", {"hidden_size": E, "n_head": H, "n_layer": 2, "vocab_size": V}),
    "opt": ("opt", PLAIN | {"ffn_dim": 32, "word_embed_proj_dim": E}),
    "llama": ("llama", GROUPED | {"rope_parameters": LLAMA3, "max_position_embeddings": 128}),
    "mistral": ("mistral", GROUPED | {"sliding_window": 5}),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", GROUPED),
    "gemma": ("gemma", GROUPED | {"head_dim": 16}),
    "gemma2": ("gemma2", GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": SLIDING}),
    "gemma3": ("gemma3_text", GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 20, "layer_types": SLIDING}),
    "phi": ("phi", PLAIN | {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", GROUPED),
    "stablelm": ("stablelm", GROUPED),
    "cohere": ("cohere", GROUPED),
    "olmo2": ("olmo2", GROUPED),
    "gpt_oss": (
        "gpt_oss",
        GROUPED
        | {"sliding_window": 5, "layer_types": SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"rope_parameters": YARN},
    ),
    "granite": ("granite", GROUPED | {"attention_multiplier": 0.3}),
    "starcoder2": ("starcoder2", GROUPED),
    "smollm3": ("smollm3", GROUPED | {"no_rope_layers": [1, 0]}),
    "nemotron": ("nemotron", GROUPED),
    "bert": ("bert", PLAIN),
    "roberta": ("roberta", PLAIN | {"max_position_embeddings": 40}),
    "distilbert": ("distilbert", {"dim": E, "n_heads": H, "n_layers": 2, "hidden_dim": 32, "vocab_size": V}),
    "electra": ("electra", PLAIN | {"embedding_size": E}),
    "albert": ("albert", PLAIN | {"embedding_size": 16, "num_hidden_layers": 1}),
    "modernbert": ("modernbert", PLAIN | {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}),
    "vit": ("vit", IMAGE),
    "deit": ("deit", IMAGE),
    "dinov2": ("dinov2", IMAGE),
    "clip": ("clip_vision_model", IMAGE),
    "siglip": ("siglip_vision_model", IMAGE),
    "t5": (
        "t5",
        {"d_model": E, "num_heads": H, "d_kv": 16, "num_layers": 2, "vocab_size": V, "d_ff": 32, "pad_token_id": 0},
    ),
    "mt5": (
        "mt5",
        {"d_model": E, "num_heads": H, "d_kv": 16, "num_layers": 2, "vocab_size": V, "d_ff": 32, "pad_token_id": 0},
    ),
    "bart": ("bart", PAIR),
    "mbart": ("mbart", PAIR),
    "marian": ("marian", PAIR),
    "pegasus": ("pegasus", PAIR),
    "blenderbot": ("blenderbot", PAIR),
    "m2m_100": ("m2m_100", PAIR),
    "xglm": ("xglm", {"d_model": E, "attention_heads": H, "num_layers": 2, "ffn_dim": 32, "vocab_size": V}),
    "mixtral": ("mixtral", GROUPED | {"num_local_experts": 2}),
    "qwen3_moe": ("qwen3_moe", GROUPED | {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}),
    "olmo": ("olmo", GROUPED),
    "camembert": ("camembert", PLAIN | {"max_position_embeddings": 40}),
    "xlm-roberta": ("xlm-roberta", PLAIN | {"max_position_embeddings": 40}),
    "clip text": ("clip_text_model", PLAIN | {"max_position_embeddings": 40}),
    "wav2vec2": (
        "wav2vec2",
        PLAIN
        | {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_conv_pos_embeddings": 4}
        | {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2},
    ),
    "hubert": (
        "hubert",
        PLAIN
        | {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_conv_pos_embeddings": 4}
        | {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2},
    ),
    "whisper": ("whisper", PAIR | {"num_mel_bins": 5, "max_source_positions": 11}),
}

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.2, 1.9, 3.1, 7.0]}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
MODELS |= {
    "phi3 of short texts": (
        "phi3",
        GROUPED
        | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32, "max_position_embeddings": 128},
    ),
    "phi3 of long texts": (
        "phi3",
        GROUPED | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8, "max_position_embeddings": 128},
    ),
    "llama4": (
        "llama4_text",
        GROUPED
        | {"intermediate_size_mlp": 32, "moe_layers": [], "no_rope_layers": [1, 0], "attention_chunk_size": 4}
        | {"floor_scale": 3, "attn_scale": 0.3},
    ),
    "ministral3": (
        "ministral3",
        GROUPED
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.4}
        | {"original_max_position_embeddings": 5}},
    ),
    "qwen3_next": (
        "qwen3_next",
        GROUPED | {"layer_types": ["full_attention"] * 2, "mlp_only_layers": [0, 1], "head_dim": 16},
    ),
    "qwen3_5": (
        "qwen3_5_text",
        GROUPED
        | {"layer_types": ["full_attention"] * 2, "head_dim": 16, "attention_bias": True}
        | {"rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}},
    ),
    "gemma3n": (
        "gemma3n_text",
        GROUPED
        | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "laurel_rank": 4, "sliding_window": 5}
        | {"vocab_size_per_layer_input": V, "altup_num_inputs": 2, "layer_types": SLIDING},
    ),
    "qwen2_vl": ("qwen2_vl_text", PLAIN | {"num_key_value_heads": 2, "rope_parameters": MROPE}),
    "qwen2_5_vl": ("qwen2_5_vl_text", PLAIN | {"num_key_value_heads": 2, "rope_parameters": MROPE}),
    "qwen3_vl": ("qwen3_vl_text", GROUPED | {"rope_parameters": MROPE | {"mrope_interleaved": True}}),
}  # fmt: skip
# Families that differ from those above in little, each with the settings that its configuration has.
SMALL = GROUPED | {"n_embd": E, "n_head": H, "n_layer": 2, "dff": 32, "ffn_dim": 32, "sliding_window": 5}
SMALL |= PAIR | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL |= {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SMALL |= {"embedding_size": E, "num_logits_to_keep": 1}
FURTHER = [
    *("apertus", "arcee", "aria_text", "bert-generation", "biogpt", "blenderbot-small", "cohere2", "cohere2_moe"),
    *("ctrl", "cwm", "data2vec-text", "dots1", "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
    *("flex_olmo", "glm", "glm4", "glm4_moe", "granitemoe", "granitemoeshared", "helium", "hy_v3", "hyperclovax"),
    *("jais2", "kolibri1", "layoutlm", "mellum", "minimax_m2", "ministral", "modernbert-decoder", "mvp"),
    *("olmo3", "olmoe", "phimoe", "plbart", "qwen2_moe", "rembert", "roberta-prelayernorm", "seed_oss"),
    *("solar_open", "vaultgemma"),
]
WINDOWED = ("cohere2", "cohere2_moe", "cwm", "exaone4", "exaone_moe", "olmo3", "modernbert-decoder", "vaultgemma")


def fitting(kind):
    """The small settings that a family knows; those with a window have it in one layer of two."""
    usual = transformers.AutoConfig.for_model(kind)
    mixed = {"layer_types": SLIDING} if kind in WINDOWED else {}
    return {name: value for name, value in SMALL.items() if hasattr(usual, name)} | mixed


MODELS |= {kind: (kind, None) for kind in FURTHER}

PAIRS = ("t5", "mt5", "bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100", "whisper")
PAIRS += ("blenderbot-small", "mvp", "plbart")


def made(name):
    kind, settings = MODELS[name]
    settings = fitting(kind) if settings is None else settings
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    no_float64 = ("gpt_oss", "mixtral", "qwen3_moe", "xglm")  # experts, and a mask filled with too small a number
    dtype = torch.float32 if kind in (*no_float64, *FURTHER) else torch.float64
    path = "sdpa" if kind == "falcon" else "eager"  # its eager path adds the slopes twice
    model = transformers.AutoModel.from_config(config, attn_implementation=path, dtype=dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def inputs(model):
    ids = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(0))
    dtype = next(model.parameters()).dtype
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 12, 12, dtype=dtype)}
    if model.config.model_type in ("wav2vec2", "hubert"):
        return {"input_values": torch.randn(2, 60, dtype=dtype)}
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(2, 5, 22, dtype=dtype), "decoder_input_ids": ids}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def listen(model, checkpoint):
    """What goes into the query and key projections of every layer, and what comes out of its last one."""
    seen = {}
    for prefix, site in checkpoint._sites.items():
        layout, names = site.layout, {x: y.shape for x, y in checkpoint._names.part(prefix).items()}
        if prefix == "head.attention.":
            continue
        theirs = {ours: rule.theirs[0] for rule in layout.rules(names) for ours in rule.ours}
        modules = {part: prefix + theirs[f"{part}_proj.weight"].removesuffix(".weight") for part in ("q", "k", "out")}
        kept = seen[prefix[:-1]] = {}

        def keep(module, args, output, kept=kept, part=None):
            kept[part] = output if part == "out" else args[0]

        for part, path in modules.items():
            hook = lambda m, a, o, kept=kept, part=part: keep(m, a, o, kept, part)  # noqa: E731
            model.get_submodule(path).register_forward_hook(hook)
    with torch.no_grad():
        model(**inputs(model))
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_layers_read_from_disk_are_the_attention_of(name, tmp_path):
    model = made(name)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    seen, layers = listen(model, open_checkpoint(model)), checkpoint.read_all()
    assert len(layers) == ({"albert": 1, "siglip": 3} | dict.fromkeys(PAIRS, 6)).get(name, 2)
    for layer in checkpoint.layers:
        if layer.name == "head.attention":  # a torch.nn.MultiheadAttention, whose linears cannot be listened to
            continue
        called = layer.name.replace("encoder.layer.", "layers.")  # in memory, vision models have other names
        x, memory, y = (seen[layer.name if layer.name in seen else called][part] for part in ("q", "k", "out"))
        attention = layers[layer.name].eval()
        with torch.no_grad():
            found = attention(x) if memory is x else attention(x, attention.remember(memory))
        torch.testing.assert_close(found.reshape(y.shape), y, rtol=1e-4, atol=2e-5)  # they keep angles in float32
        assert layer.problem is None
        assert (layer.num_heads, layer.num_kv_heads) == (attention.num_heads, attention.num_kv_heads)


@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox", "falcon of some key heads", "llama", "gemma3", "t5", "whisper", "qwen3_next"]
)
def test_written_back_files_are_the_same_to_the_bit(name, tmp_path):
    model = made(name).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "was")
    checkpoint = open_checkpoint(tmp_path / "was")
    layers = checkpoint.read_all(dtype=torch.float32)
    checkpoint.save(tmp_path / "now" / "model.safetensors", layers)
    from safetensors.torch import load_file

    was, now = (load_file(tmp_path / x / "model.safetensors") for x in ("was", "now"))
    assert list(was) == list(now)
    assert all(was[x].dtype == now[x].dtype and torch.equal(was[x], now[x]) for x in was)


def test_sharded_safetensors_are_read_lazily_and_written_as_shards(tmp_path):
    model = made("llama")
    model.save_pretrained(tmp_path / "was", max_shard_size="20KB")
    assert len(list((tmp_path / "was").glob("*.safetensors"))) > 2
    checkpoint = open_checkpoint(tmp_path / "was")
    layers = checkpoint.read_all()
    with torch.no_grad():
        layers["layers.1.self_attn"].out_proj.weight.mul_(2)
    checkpoint.save(tmp_path / "now", layers)
    again = transformers.AutoModel.from_pretrained(tmp_path / "now").state_dict()
    for name, tensor in model.state_dict().items():
        factor = 2 if name == "layers.1.self_attn.o_proj.weight" else 1
        assert torch.equal(again[name], factor * tensor), name


def test_only_the_tensors_of_the_layer_asked_for_are_read(tmp_path, monkeypatch):
    made("llama").save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    read = []
    get = type(checkpoint.source).__getitem__
    monkeypatch.setattr(type(checkpoint.source), "__getitem__", lambda self, name: read.append(name) or get(self, name))
    checkpoint.read("layers.1.self_attn")
    assert sorted(read) == [f"layers.1.self_attn.{x}_proj.weight" for x in "koqv"]


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"model": s, "step": 3, "loss": 0.5}], ids=["plain", "wrapped"]
)
def test_torch_files_are_read_and_written(wrap, tmp_path):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, batch_first=True), 2).eval()
    torch.save(wrap(model.state_dict()), tmp_path / "was.pt")
    checkpoint = open_checkpoint(tmp_path / "was.pt", num_heads=H)
    layers = checkpoint.read_all()
    x = torch.randn(2, T, E)
    for name, layer in layers.items():
        torch.testing.assert_close(layer(x), model.get_submodule(name)(x, x, x)[0])
    checkpoint.save(tmp_path / "now.pt", layers)
    was, now = (torch.load(tmp_path / x, weights_only=True) for x in ("was.pt", "now.pt"))
    assert list(was) == list(now)
    if "model" in was:
        assert (now["step"], now["loss"]) == (3, 0.5)
        was, now = was["model"], now["model"]
    assert all(torch.equal(was[x], now[x]) for x in was)


def test_a_transformer_of_torch_has_its_three_kinds_of_layers_found():
    model = nn.Transformer(E, H, 1, 1, 32, batch_first=True)
    names = [layer.name for layer in open_checkpoint(model, num_heads=H).layers]
    assert names == ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]


def random(shapes):
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def by_hand(x, wq, wk, wv, wo, key_of_head):
    """Plain attention, head by head: weights (H, E, D), (Hkv, E, D), (Hkv, E, D) and (H, D, E)."""
    total = 0
    for head in range(wq.shape[0]):
        kv = key_of_head(head)
        scores = (x @ wq[head]) @ (x @ wk[kv]).mT / wq.shape[2] ** 0.5
        total = total + scores.softmax(-1) @ (x @ wv[kv]) @ wo[head]
    return total


def heads_of(weight, heads):
    """(H·D, E) as (H, E, D)."""
    return weight.unflatten(0, (heads, -1)).mT


@pytest.mark.parametrize("dot", [".", "/"])
@pytest.mark.parametrize("out", ["attention_output", "out"])
def test_keras_kernels_with_heads_as_an_axis(dot, out):
    D = 5
    state = random(
        {f"layer_0{dot}query{dot}kernel": (E, H, D), f"layer_0{dot}key{dot}kernel": (E, 2, D)}
        | {f"layer_0{dot}value{dot}kernel": (E, 2, D), f"layer_0{dot}{out}{dot}kernel": (H, D, E)}
    )
    checkpoint = open_checkpoint(state)
    layer = checkpoint.read("layer_0")
    x = torch.randn(2, T, E, dtype=torch.float64)
    q, k, v, o = state.values()
    expected = by_hand(x, *(w.transpose(0, 1) for w in (q, k, v)), o, lambda head: head // 3)
    torch.testing.assert_close(layer(x), expected)
    with torch.no_grad():
        layer.qkv_proj.weight.neg_()
        layer.out_proj.weight.neg_()
    written = checkpoint.state_dict({"layer_0": layer})
    assert all(torch.equal(written[name], -state[name]) for name in state)


@pytest.mark.parametrize("kv_heads", [6, 2, 1])
def test_x_transformers_share_keys_in_turns(kv_heads):
    state = random(
        {"0.to_q.weight": (H * 8, E), "0.to_k.weight": (kv_heads * 8, E), "0.to_v.weight": (kv_heads * 8, E)}
        | {"0.to_out.weight": (E, H * 8)}
    )
    checkpoint = open_checkpoint(state, num_heads=H)
    layer = checkpoint.read("0")
    q, k, v, o = state.values()
    x = torch.randn(2, T, E, dtype=torch.float64)
    kernels = heads_of(q, H), heads_of(k, kv_heads), heads_of(v, kv_heads), o.T.unflatten(0, (H, -1))
    torch.testing.assert_close(layer(x), by_hand(x, *kernels, lambda head: head % kv_heads))
    with torch.no_grad():
        layer.qkv_proj.weight.neg_()
        layer.out_proj.weight.neg_()
    written = checkpoint.state_dict({"0": layer})
    assert all(torch.equal(written[name], -state[name]) for name in state)


@pytest.mark.parametrize(
    "names",
    [
        ("qkv", "proj"), ("to_qkv", "to_out.0"), ("Wqkv", "out_proj"), ("qkv_proj", "o_proj"), ("wqkv", "wo"),
        ("c_attn", "c_proj"),
    ],
)  # fmt: skip
def test_fused_projections_side_by_side(names):
    fused, out = names
    state = random({f"{fused}.weight": (3 * E, E), f"{fused}.bias": (3 * E,), f"{out}.weight": (E, E)})
    layer = open_checkpoint(state, num_heads=H, position=None, causal=False, layout="side by side").read("")
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    theirs.in_proj_weight.data, theirs.in_proj_bias.data = state[f"{fused}.weight"], state[f"{fused}.bias"]
    theirs.out_proj.weight.data = state[f"{out}.weight"]
    x = torch.randn(2, T, E, dtype=torch.float64)
    torch.testing.assert_close(layer(x), theirs(x, x, x)[0])


def test_a_projection_for_keys_and_values_together():
    state = random({"to_q.weight": (E, E), "to_kv.weight": (2 * E, E), "to_out.weight": (E, E)})
    apart = state | dict(zip(("to_k.weight", "to_v.weight"), state["to_kv.weight"].chunk(2), strict=True))
    del apart["to_kv.weight"]
    x = torch.randn(2, T, E, dtype=torch.float64)
    first, second = (open_checkpoint(s, num_heads=H).read("") for s in (state, apart))
    torch.testing.assert_close(first(x), second(x))


@pytest.mark.parametrize(
    "names",
    ["W_q W_k W_v W_o", "w_q w_k w_v w_o", "W_Q W_K W_V W_O", "wq wk wv wo", "w_qs w_ks w_vs fc", "Wq Wk Wv Wo",
     "queries keys values fc_out", "query key value proj", "q_linear k_linear v_linear out", "q k v proj",
     "linears.0 linears.1 linears.2 linears.3", "W_query W_key W_value out_proj", "q_lin k_lin v_lin out_lin"],
)  # fmt: skip
def test_names_of_textbooks(names):
    parts = names.split()
    state = random({f"block.{part}.weight": (E, E) for part in parts})
    checkpoint = open_checkpoint(state, num_heads=H, position=None, causal=False)
    layer = checkpoint.read("block")
    kernels = [heads_of(state[f"block.{part}.weight"], H) for part in parts[:3]]
    x = torch.randn(2, T, E, dtype=torch.float64)
    out = state[f"block.{parts[3]}.weight"].T.unflatten(0, (H, -1))
    torch.testing.assert_close(layer(x), by_hand(x, *kernels, out, lambda head: head))
    written = checkpoint.state_dict({"block": layer})
    assert list(written) == list(state)
    assert all(torch.equal(written[name], state[name]) for name in state)


def test_a_fused_projection_whose_order_is_not_told_is_refused():
    state = random({"qkv_proj.weight": (3 * E, E), "out_proj.weight": (E, E)})
    checkpoint = open_checkpoint(state, num_heads=H)
    assert "may hold its rows head by head" in checkpoint.layers[0].problem
    with pytest.raises(CheckpointError, match='may hold its rows head by head.*or side by side.*layout="head by head"'):
        checkpoint.read("")
    x = torch.randn(2, T, E, dtype=torch.float64)
    one, other = (
        open_checkpoint(state, num_heads=H, layout=f"{order}").read("") for order in ("head by head", "side by side")
    )
    assert not torch.allclose(one(x), other(x))
    with pytest.raises(CheckpointError, match="layout='rows': expected"):
        open_checkpoint(state, num_heads=H, layout="rows").read("")


def test_our_own_layer_and_somebody_elses_of_the_same_names_are_told_apart():
    class Theirs(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv_proj, self.out_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

        def forward(self, x):
            q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, -1))
            merged = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.out_proj(merged)

    x = torch.randn(2, T, E)
    for module in (Theirs(), MultiHeadAttention(E, H)):
        torch.testing.assert_close(open_checkpoint(module, num_heads=H).read("")(x), module(x))
        torch.testing.assert_close(MultiHeadAttention.from_state_dict(module.state_dict(), H)(x), module(x))


def test_query_key_value_outside_a_known_model_is_ambiguous():
    state = random({"block.query_key_value.weight": (3 * E, E), "block.dense.weight": (E, E)})
    with pytest.raises(CheckpointError, match=r"block: query_key_value.weight may hold its rows"):
        open_checkpoint(state).read("block")


def test_what_tensors_do_not_tell_must_be_said():
    state = random({f"{part}_proj.weight": (E, E) for part in "qkvo"})
    checkpoint = open_checkpoint(state, num_heads=H)
    assert "do not determine position=; models with these names rotate" in checkpoint.layers[0].problem
    with pytest.raises(CheckpointError, match=r"do not determine position=.*position=rotary\(base\).*position=None"):
        checkpoint.read("")
    assert checkpoint.read("", position=rotary(), causal=True).position == rotary()
    t5 = random({f"{part}.weight": (E, E) for part in "qkvo"})
    with pytest.raises(CheckpointError, match=r"do not determine scale=; T5 does not scale"):
        open_checkpoint(t5, num_heads=H).read("")
    assert open_checkpoint(t5, num_heads=H, scale=1.0).read("").scale == 1.0


class Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda p: torch.save({"w": Evil()}, p / "a.pt"),
            "holds more than tensors, or is not a torch file: reading it would run code",
        ),
        (lambda p: (p / "a.pt").write_bytes(b"no zip, no pickle"), r"holds more than tensors|cannot be read"),
        (lambda p: (p / "a.pt").write_bytes(b""), "cannot be read as a torch file"),
        (lambda p: torch.save({"epoch": 3}, p / "a.pt"), r"is a dict of int; expected a state dict"),
        (lambda p: torch.save([torch.ones(2)], p / "a.pt"), "is a list; expected a state dict"),
        (lambda p: (p / "a.safetensors").write_bytes(b"12345678901"), "cannot be read as safetensors"),
        (lambda p: (p / "a.safetensors.index.json").write_text("{"), "cannot be read as JSON"),
        (lambda p: (p / "a.safetensors.index.json").write_text("[1]"), "holds a list; expected a JSON object"),
        (
            lambda p: (p / "a.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../../secret"}})),
            "expected a file in the same folder",
        ),
        (
            lambda p: (p / "a.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "b.safetensors"}})),
            "names b.safetensors, which is not in",
        ),
        (lambda p: (p / "a.txt").write_text("weights"), r"holds no weights"),
        (lambda p: [torch.save({}, p / f"{x}.pt") for x in "ab"], r"holds several: a.pt, b.pt.*name the file itself"),
    ],
)
def test_files_that_cannot_be_read_are_refused(write, message, tmp_path, capsys):
    write(tmp_path)
    with pytest.raises(CheckpointError, match=f"(?s){message}"):
        open_checkpoint(tmp_path)
    assert "never be printed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, "a int is given; expected a path"),
        ("nowhere.pt", "nowhere.pt does not exist"),
        ({"a": 1}, "the dictionary is a dict of int"),
        ({}, "the dictionary is a dict; expected a state dict"),
    ],
)
def test_sources_that_are_none_are_refused(source, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(source)


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"onnx")
    with pytest.raises(CheckpointError, match=r"expected .safetensors"):
        open_checkpoint(tmp_path / "model.onnx")


def test_layers_that_do_not_fit_are_not_written():
    state = random({f"W_{part}.weight": (E, E) for part in "qkvo"})
    checkpoint = open_checkpoint(state, num_heads=H)
    with pytest.raises(CheckpointError, match=r"q_proj.weight has shape \(24, 24\) in the layer; the checkpoint has"):
        checkpoint.state_dict({"": MultiHeadAttention(24, H, bias=False)})
    with pytest.raises(CheckpointError, match="no attention layer 'other'; found"):
        checkpoint.state_dict({"other": MultiHeadAttention(E, H, bias=False)})


def test_a_model_without_attention_has_no_layers():
    checkpoint = open_checkpoint(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)))
    assert checkpoint.layers == ()
    with pytest.raises(CheckpointError, match="no attention layer was found among 4 tensors"):
        checkpoint.read_all()


def test_a_rotary_scaling_that_depends_on_the_text_is_refused():
    state = random({f"layers.0.self_attn.{part}_proj.weight": (E, E) for part in "qkvo"})
    config = {"model_type": "llama", "num_attention_heads": H, "hidden_size": E}
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    checkpoint = open_checkpoint(state, config=config)
    assert "rotary positions of type 'dynamic'" in checkpoint.layers[0].problem
    with pytest.raises(CheckpointError, match="Pass position= to choose another"):
        checkpoint.read("layers.0.self_attn")


def test_layers_describe_themselves_before_anything_is_read(tmp_path):
    made("gemma3").save_pretrained(tmp_path)
    near, far = open_checkpoint(tmp_path).layers
    assert (near.num_heads, near.num_kv_heads, near.head_dim) == (6, 2, 8)
    assert far.cache_bytes(1000) == 2 * 2 * 8 * 8 * 1000
    assert near.cache_bytes(1000) == 2 * 2 * 8 * 8 * 5, "its window keeps five tokens"
    assert near.parameters == sum(x.numel() for x in open_checkpoint(tmp_path).read(near.name).parameters())


def llama_state(layers=2):
    names = [f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(layers) for part in "qkvo"]
    return random({name: (16 if name[-13] in "kv" else E, E) for name in names})


LLAMA = {"model_type": "llama", "num_attention_heads": H, "num_key_value_heads": 2, "hidden_size": E}


@pytest.mark.parametrize("part", "qkvo")
def test_a_missing_tensor_of_a_known_model_is_named(part):
    state = llama_state(3)
    del state[f"model.layers.1.self_attn.{part}_proj.weight"]
    checkpoint = open_checkpoint(state, config=LLAMA)
    assert len(checkpoint.layers) == 3
    with pytest.raises(CheckpointError, match=f"{part}_proj.weight is missing|the output projection is missing"):
        checkpoint.read_all()


@pytest.mark.parametrize("name", ["t5", "modernbert", "gpt2"])
@pytest.mark.parametrize("prefix", ["t5.", "0.auto_model.", "gpt2.transformer.", "module."])
def test_numbers_in_a_models_own_name_are_no_layers(name, prefix):
    model = made(name)
    state = {prefix + x: tensor for x, tensor in model.state_dict().items()}
    plain, other = open_checkpoint(model).read_all(), open_checkpoint(state, config=model.config.to_dict()).read_all()
    x = torch.randn(1, T, E, dtype=torch.float64)
    for layer in plain:
        assert torch.equal(plain[layer].eval()(x), other[prefix + layer].eval()(x))


# Configurations as older files have them: keys are left out where the family has a default, or have older names.
OLD = {
    "gpt_neox": ({}, ["rope_parameters"]),
    "phi": ({}, ["rope_parameters", "partial_rotary_factor"]),
    "stablelm": ({}, ["rope_parameters"]),
    "nemotron": ({}, ["rope_parameters"]),
    "smollm3": (
        {"no_rope_layers": None, "rope_theta": 5e6, "rope_parameters": {"rope_theta": 2e6}},
        ["no_rope_layers"],
    ),
    "gpt_neo": ({}, ["attention_layers"]),
    "modernbert": ({}, ["rope_parameters", "layer_types"]),
    "qwen2": ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, ["layer_types"]),
    "gemma2": ({"query_pre_attn_scalar": 256, "layer_types": None}, ["layer_types", "query_pre_attn_scalar"]),
}


@pytest.mark.parametrize("name", OLD)
def test_a_configuration_that_leaves_a_key_out_means_the_familys_default(name, monkeypatch):
    settings, gone = OLD[name]
    kind, usual = MODELS[name]
    usual = {key: value for key, value in usual.items() if key not in gone}
    monkeypatch.setitem(MODELS, name, (kind, usual | {key: x for key, x in settings.items() if x is not None}))
    model = made(name)
    config = {key: value for key, value in model.config.to_dict().items() if key not in gone}
    new, old = (open_checkpoint(model.state_dict(), config=x).read_all() for x in (model.config.to_dict(), config))
    x = torch.randn(1, T, E, dtype=torch.float64)
    for layer in new:
        torch.testing.assert_close(old[layer](x), new[layer](x))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"clip_qkv": 8.0}, "clip_qkv=8.0: our layer does not support this"),
        (LLAMA | {"model_type": "gemma3_text", "use_bidirectional_attention": True}, "does not support this"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "lacks what its attention needs.*'factor'"),
        (LLAMA | {"model_type": "smollm3", "no_rope_layers": [1]}, "lacks what its attention needs"),
        ({"model_type": "strange", "num_attention_heads": H, "num_key_value_heads": 2}, "'strange' is not known"),
    ],
)
def test_configurations_we_cannot_follow_are_refused(config, message):
    checkpoint = open_checkpoint(llama_state(), config=config)
    assert all(layer.problem for layer in checkpoint.layers[1:])
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_all()


def test_parts_of_a_model_of_several_have_their_own_configuration():
    state = random(
        {f"visual.blocks.0.attn.{x}.weight": (E if x == "proj" else 3 * E, E) for x in ("qkv", "proj")}
        | {f"qformer.layer.0.attention.self.{x}.weight": (E, E) for x in ("query", "key", "value")}
        | {"qformer.layer.0.attention.output.dense.weight": (E, E)}
    ) | llama_state(1)
    text = LLAMA | {"num_attention_heads": 12}
    config = {"model_type": "several", "text_config": text, "vision_config": {"num_heads": 3}}
    config["qformer_config"] = {"num_attention_heads": 4, "model_type": "bert"}
    heads = {layer.name.split(".")[0]: layer.num_heads for layer in open_checkpoint(state, config=config).layers}
    assert heads == {"visual": 3, "qformer": 4, "model": 12}


def test_a_layer_that_is_another_is_not_written():
    checkpoint = open_checkpoint(random({f"W_{part}.weight": (E, E) for part in "qkvo"}), num_heads=H)
    with pytest.raises(CheckpointError, match="the layer has k_proj.bias, out_proj.bias.*would lose them"):
        checkpoint.state_dict({"": MultiHeadAttention(E, H)})
    with pytest.raises(CheckpointError, match="num_heads is 3 in the layer, here 6"):
        checkpoint.state_dict({"": MultiHeadAttention(E, 3, bias=False)})
    with pytest.raises(CheckpointError, match="meta device"):
        checkpoint.state_dict({"": MultiHeadAttention(E, H, bias=False, device="meta")})
    with pytest.raises(CheckpointError, match="is a Linear; expected a MultiHeadAttention"):
        checkpoint.state_dict({"": nn.Linear(3, 3)})


def test_what_is_written_is_a_copy():
    checkpoint = open_checkpoint(random({f"W_{part}.weight": (E, E) for part in "qkvo"}), num_heads=H)
    layer = checkpoint.read("")
    with torch.no_grad():
        layer.out_proj.weight.mul_(2)
        written = checkpoint.state_dict({"": layer})
        before = written["W_o.weight"].clone()
        layer.out_proj.weight.zero_()
    assert torch.equal(written["W_o.weight"], before)


def test_the_bias_that_layers_share_is_read_and_written_once():
    model = made("t5").to(torch.bfloat16)
    checkpoint = open_checkpoint(model)
    first, last = "encoder.block.0.layer.0.SelfAttention", "encoder.block.1.layer.0.SelfAttention"
    layers = checkpoint.read_all(dtype=torch.float32)
    assert layers[first].position is layers[last].position
    assert layers[first].position.weight.dtype == torch.float32
    assert checkpoint.read(last).position is not layers[last].position
    with torch.no_grad():
        layers[last].position.weight.add_(1.0)
    written = checkpoint.state_dict({last: layers[last]})
    name = f"{first}.relative_attention_bias.weight"
    assert torch.equal(written[name], (model.state_dict()[name].float() + 1).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query.bias": (8, 6)}, "expected heads of one width"),
        ({"attention_output.kernel": (8, 6, E)}, "expected heads of one width"),
        ({"key.kernel": (E, 3, 16)}, "expected heads of one width"),
        ({"key.kernel": (E, E)}, r"key.kernel has shape \(48, 48\); expected \(E, H, D\)"),
    ],
)
def test_kernels_that_do_not_fit_each_other_are_refused(change, message):
    shapes = {"query.kernel": (E, 6, 8), "key.kernel": (E, 6, 8), "value.kernel": (E, 6, 8)}
    state = random(shapes | {"attention_output.kernel": (6, 8, E)} | change)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(state).read("")


def test_mixed_and_quantised_tensors():
    state = random({f"W_{part}.weight": (E, E) for part in "qkvo"})
    mixed = {name: tensor.half() if "W_q" in name else tensor.float() for name, tensor in state.items()}
    assert open_checkpoint(mixed, num_heads=H).read("").qkv_proj.weight.dtype == torch.float32
    small = {name: tensor.to(torch.int8) for name, tensor in state.items()}
    with pytest.raises(CheckpointError, match=r"W_q.weight is torch.int8, quantized; dequantize"):
        open_checkpoint(small, num_heads=H).read("")


def test_buffers_that_old_files_hold_are_left_alone():
    model = made("gpt_neox")
    state = model.state_dict()
    for i in range(2):
        state[f"layers.{i}.attention.bias"] = torch.ones(1, 1, 16, 16).tril().bool()
        state[f"layers.{i}.attention.masked_bias"] = torch.tensor(-1e9)
        state[f"layers.{i}.attention.rotary_emb.inv_freq"] = torch.ones(1)
    checkpoint = open_checkpoint(dict(state), config=model.config.to_dict())
    layers = checkpoint.read_all()
    assert checkpoint.layers[0].parameters == sum(x.numel() for x in layers["layers.0.attention"].parameters())
    assert list(checkpoint.state_dict(layers)) == list(state)
    bert = made("bert")
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): x for name, x in bert.state_dict().items()}
    assert len(open_checkpoint(old, config=bert.config.to_dict()).read_all()) == 2


@pytest.mark.parametrize(
    "shapes",
    [
        {"qkv.weight": (36, 12), "qkv.bias": (16,), "proj.weight": (12, 12)},
        {"to_q.weight": (12, 12), "to_kv.weight": (1, 12), "to_out.weight": (12, 12)},
        {"to_q.weight": (12, 12), "to_k.weight": (4, 12), "to_v.weight": (4, 12), "to_out.weight": (12,)},
        {"W_q.weight": (0, 12), "W_k.weight": (0, 12), "W_v.weight": (0, 12)},
        {"c_attn.weight": (12, 36), "c_attn.bias": (), "c_proj.weight": (12, 12)},
        {"c_attn.weight": (12, 36), "bias": (), "c_proj.weight": (12, 12)},
        {"W_q.weight": (12, 12), "W_k.weight": (12, 12), "W_v.weight": (12, 12), "mask": ()},
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused_in_words(shapes):
    checkpoint = open_checkpoint(random(shapes), num_heads=3)
    assert checkpoint.layers[0].problem
    assert checkpoint.layers[0].cache_bytes() is None
    with pytest.raises(CheckpointError):
        checkpoint.read("")


def test_saving_where_it_was_read_and_elsewhere(tmp_path):
    model = made("llama")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "one")
    many, one = open_checkpoint(tmp_path / "many"), open_checkpoint(tmp_path / "one")
    many.save(tmp_path / "many", many.read_all())
    one.save(tmp_path / "one", one.read_all())
    for folder in ("many", "one"):
        again = open_checkpoint(tmp_path / folder)
        assert all(torch.equal(again.source[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match=r"is several files; name a folder"):
        many.save(tmp_path / "x.safetensors", {})
    with pytest.raises(CheckpointError, match=r"written as a .safetensors file"):
        one.save(tmp_path / "x.pt", {})
    with pytest.raises(CheckpointError, match=r"written as a .pt or"):
        open_checkpoint(model).save(tmp_path / "x.safetensors", {})


def test_an_index_that_does_not_belong_to_its_files_is_refused(tmp_path):
    made("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    index = next(tmp_path.glob("*.index.json"))
    told = json.loads(index.read_text())
    shards = list(told["weight_map"].values())
    gone = next(name for name, shard in told["weight_map"].items() if shards.count(shard) > 1)
    place = told["weight_map"].pop(gone)
    index.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=f"holds {gone}, which the index does not name"):
        open_checkpoint(tmp_path)
    told["weight_map"] |= {gone: place, "other": place}
    index.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="does not hold other"):
        open_checkpoint(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match='has no "weight_map"'):
        open_checkpoint(tmp_path)


def test_metas_own_names_ask_for_neighbours():
    state = random({f"layers.0.attention.w{part}.weight": (E, E) for part in "qkvo"})
    with pytest.raises(CheckpointError, match=r"rotary\(base, interleaved=True\)"):
        open_checkpoint(state, num_heads=H).read("layers.0.attention")


@pytest.mark.parametrize("extra", [False, True], ids=["without keys", "with keys that are not used"])
@torch.no_grad()
def test_the_last_layers_of_gemma3n_are_read_as_layers_without_keys(extra, monkeypatch):
    kind, settings = MODELS["gemma3n"]
    shared = {"num_hidden_layers": 4, "layer_types": SLIDING * 2, "num_kv_shared_layers": 2}
    monkeypatch.setitem(MODELS, "gemma3n", (kind, settings | shared))
    model = made("gemma3n")
    state = model.state_dict()
    if extra:  # as in the published files
        for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            state |= {f"layers.{i}.self_attn.{name}": state[f"layers.1.self_attn.{name}"].clone() for i in (2, 3)}
    seen = {}
    for number, block in enumerate(model.layers):
        keep = lambda m, a, k, o, n=number: seen.update({n: (a[0] if a else k["hidden_states"], o[0])})  # noqa: E731
        block.self_attn.register_forward_hook(keep, with_kwargs=True)
    model(**inputs(model))
    checkpoint = open_checkpoint(dict(state), config=model.config.to_dict())
    assert [layer.cache_bytes(3) for layer in checkpoint.layers] == [768, 768, 0, 0]
    assert all(layer.problem is None for layer in checkpoint.layers)
    layers = list(checkpoint.read_all().values())
    caches = [layers[i].make_cache(2) for i in range(2)]
    for number, layer in enumerate(layers):
        x, y = seen[number]
        found = layer(x, cache=caches[number]) if number < 2 else layer(x, caches[number - 2])
        torch.testing.assert_close(found, y, rtol=1e-4, atol=2e-5)
    written = checkpoint.state_dict(checkpoint.read_all())
    assert all(torch.equal(written[name], state[name]) for name in state)


def test_a_layer_without_keys_is_read_only_if_it_is_meant_to_be():
    state = random({"q_proj.weight": (E, E), "o_proj.weight": (E, E)})
    with pytest.raises(CheckpointError, match=r"no k_proj and no v_proj; if it reads those of another layer"):
        open_checkpoint(state, num_heads=H, causal=True, position=None).read("")
    options = {"causal": True, "position": None, "projections": queries_only(), "num_kv_heads": 2}
    layer = open_checkpoint(state, num_heads=H, **options).read("")
    assert sorted(layer.state_dict()) == ["out_proj.weight", "q_proj.weight"]


def test_a_gate_in_the_query_projection_is_told_by_its_rows():
    state = random({"q_proj.weight": (2 * E, E), "k_proj.weight": (16, E), "v_proj.weight": (16, E)})
    state |= random({"o_proj.weight": (E, E)})
    layer = MultiHeadAttention.from_state_dict(state, H, causal=True, position=None)
    assert (layer.gate.proj.weight.shape, layer.num_kv_heads, layer.head_dim) == ((E, E), 2, 8)
    again = MultiHeadAttention.from_state_dict(layer.state_dict(), H, causal=True)
    x = torch.randn(2, T, E, dtype=torch.float64)
    torch.testing.assert_close(again(x), layer(x))
    query, gate = state["q_proj.weight"].unflatten(0, (H, 2, 8)).unbind(1)
    plain = MultiHeadAttention.from_state_dict(
        state | {"q_proj.weight": query.flatten(0, 1)}, H, causal=True, position=None
    )
    plain.out_proj = None
    expected = (plain(x) * torch.sigmoid(x @ gate.flatten(0, 1).T)) @ state["o_proj.weight"].T
    torch.testing.assert_close(layer(x), expected)
