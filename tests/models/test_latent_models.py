"""Multi-head latent attention in transformers: tiny random models, attention by attention, from disk and by hand."""

import pytest
import torch
from torch import nn

from headwise import CheckpointError, MultiHeadAttention, open_checkpoint

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

E, H, T, V = 35, 5, 13, 67
OWN, TURNED, DV, RANK, Q_RANK = 11, 6, 7, 19, 17
SMALL = {"hidden_size": E, "num_attention_heads": H, "num_key_value_heads": H, "num_hidden_layers": 2, "vocab_size": V}
SMALL |= {"intermediate_size": 23, "moe_intermediate_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL |= {"kv_lora_rank": RANK, "q_lora_rank": Q_RANK, "qk_nope_head_dim": OWN, "qk_rope_head_dim": TURNED}
SMALL |= {"v_head_dim": DV, "max_position_embeddings": 64}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 16}
DEEPSEEK = SMALL | EXPERTS
MODELS = {
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3, queries of full rank": ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek_v3, halves": ("deepseek_v3", DEEPSEEK | {"rope_interleave": False}),
    "deepseek_v3, biases": ("deepseek_v3", DEEPSEEK | {"attention_bias": True}),
    "deepseek_v3, biases, full rank": ("deepseek_v3", DEEPSEEK | {"attention_bias": True, "q_lora_rank": None}),
    "deepseek_v3, yarn": ("deepseek_v3", DEEPSEEK | {"rope_parameters": YARN}),
    "deepseek_v3, yarn with mscale": (
        "deepseek_v3", DEEPSEEK | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek_v3, yarn with two mscales": (
        "deepseek_v3", DEEPSEEK | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3}},
    ),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v2, full rank, yarn": (
        "deepseek_v2",
        DEEPSEEK | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "minicpm3": ("minicpm3", SMALL),
    "longcat_flash": (
        "longcat_flash",
        SMALL | {"num_layers": 1, "ffn_hidden_size": 23, "expert_ffn_hidden_size": 8, "moe_topk": 2, "head_dim": TURNED}
        | {"n_routed_experts": 4, "zero_expert_num": 2},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", DEEPSEEK | {"mlp_layer_types": ["dense", "dense"]}),
    "youtu": ("youtu", SMALL),
    "axk1": ("axk1", DEEPSEEK | {"mlp_layer_types": ["dense", "dense"]}),
    "mistral4": (
        "mistral4",
        DEEPSEEK
        | {"rope_parameters": YARN | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.7}},
    ),
    "kimi_linear": (
        "kimi_linear",
        DEEPSEEK | {"q_lora_rank": None, "mlp_layer_types": ["dense", "dense"], "head_dim": TURNED}
        | {"layer_types": ["full_attention", "full_attention"]},
    ),
}  # fmt: skip


def made(name):
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    dtype = torch.float32 if kind in ("longcat_flash", "kimi_linear") else torch.float64  # theirs know no float64
    model = transformers.AutoModel.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def attentions(model):
    """The attention modules of a model by name, and what went into and came out of each, whole and token by token."""
    modules = {name: x for name, x in model.named_modules() if hasattr(x, "kv_a_proj_with_mqa")}
    seen = {name: ([], []) for name in modules}

    def keep(name):
        def hook(module, args, kwargs, output):
            seen[name][0].append(args[0] if args else kwargs["hidden_states"])
            seen[name][1].append(output[0])

        return hook

    for name, module in modules.items():
        module.register_forward_hook(keep(name), with_kwargs=True)
    ids = torch.randint(3, V, (2, T), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(input_ids=ids)
        cache = None
        for t in range(T):
            cache = model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True).past_key_values
    return seen


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_layers_read_from_disk_are_the_latent_attention_of(name, tmp_path):
    model = made(name)
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    layers, seen = checkpoint.read_all(), attentions(model)
    assert sorted(layers) == sorted(seen)
    assert len(layers) == 2
    for told in checkpoint.layers:
        assert told.problem is None
        assert (told.num_heads, told.head_dim) == (H, OWN + TURNED)
        assert told.cache_bytes(10) == 10 * (RANK + TURNED) * told.dtype.itemsize
        layer, (inputs, outputs) = layers[told.name].eval(), seen[told.name]
        close = {"rtol": 1e-4, "atol": 1e-4}  # they keep angles, norms and softmax in float32
        torch.testing.assert_close(layer(inputs[0]), outputs[0], **close)
        cache = layer.make_cache(2)
        steps = [layer(x, cache=cache) for x in inputs[1:]]
        torch.testing.assert_close(torch.cat(steps, 1), torch.cat(outputs[1:], 1), **close)
        chunked = layer.make_cache(2)
        parts = [layer(x, cache=chunked) for x in inputs[0].split([6, 4, 3], dim=1)]
        torch.testing.assert_close(torch.cat(parts, 1), outputs[0], **close)


def test_written_back_files_are_the_same_to_the_bit_and_changes_are_written(tmp_path):
    from safetensors.torch import load_file

    made("deepseek_v3").to(torch.bfloat16).save_pretrained(tmp_path / "was")
    checkpoint = open_checkpoint(tmp_path / "was")
    layers = checkpoint.read_all(dtype=torch.float32)
    with torch.no_grad():
        layers["layers.1.self_attn"].kv_b_proj.weight.mul_(2)
    checkpoint.save(tmp_path / "now" / "model.safetensors", layers)
    was, now = (load_file(tmp_path / x / "model.safetensors") for x in ("was", "now"))
    assert list(was) == list(now)
    for name, tensor in was.items():
        factor = 2 if name == "layers.1.self_attn.kv_b_proj.weight" else 1
        assert tensor.dtype == now[name].dtype
        assert torch.equal(now[name], factor * tensor), name


OWN_CODE = {"q_a_proj": "wq_a", "q_a_layernorm": "q_norm", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a"}
OWN_CODE |= {"kv_a_layernorm": "kv_norm", "kv_b_proj": "wkv_b", "o_proj": "wo"}


@torch.no_grad()
def test_the_names_of_deepseeks_own_code_and_ours_are_read_too():
    state = made("deepseek_v3").get_submodule("layers.0.self_attn").state_dict()
    options = {"num_heads": H, "position": None, "causal": True}
    one = open_checkpoint(state, **options).read("")
    renamed = {f"{OWN_CODE[x.removesuffix('.weight')]}.weight": y for x, y in state.items()}
    x = torch.randn(2, T, E, dtype=torch.float64)
    for other in (renamed, one.state_dict()):
        torch.testing.assert_close(open_checkpoint(other, **options).read("")(x), one(x))
        torch.testing.assert_close(MultiHeadAttention.from_state_dict(other, **options)(x), one(x))


def test_what_the_tensors_do_not_say_or_that_does_not_fit_is_refused():
    state = made("deepseek_v3").get_submodule("layers.0.self_attn").state_dict()
    with pytest.raises(CheckpointError, match=r"do not determine position=.*interleaved=True"):
        open_checkpoint(state, num_heads=H).read("")
    with pytest.raises(CheckpointError, match="num_heads is not given"):
        open_checkpoint(state, position=None, causal=True).read("")
    with pytest.raises(CheckpointError, match="do not form 3 heads with a latent"):
        open_checkpoint(state, num_heads=3, position=None, causal=True).read("")
    indexed = state | {"indexer.wk.weight": torch.zeros(3, E)}
    with pytest.raises(CheckpointError, match=r"indexer.wk.weight would be lost"):
        open_checkpoint(indexed, num_heads=H, position=None, causal=True).read("")
    short = {name: x for name, x in state.items() if not name.startswith("q_b_proj")}
    with pytest.raises(CheckpointError, match=r"q_b_proj.weight is missing"):
        open_checkpoint(short, num_heads=H, position=None, causal=True).read("")
