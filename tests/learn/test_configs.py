import dataclasses

import pytest
import torch

from headwise import OptionError
from headwise.learn import configs
from headwise.learn.configs import CONFIGS, find

TABLE = {  # as printed in courses and handbooks: model, (d_model, heads, head width)
    "bert-base": (768, 12, 64),
    "bert-large": (1024, 16, 64),
    "gpt2-small": (768, 12, 64),
    "gpt2-medium": (1024, 16, 64),
    "gpt2-large": (1280, 20, 64),
    "gpt2-xl": (1600, 25, 64),
    "gpt3": (12288, 96, 128),
}
every = pytest.mark.parametrize("config", CONFIGS.values(), ids=lambda config: config.name)


@pytest.mark.parametrize("name", TABLE)
def test_sizes_are_those_of_the_usual_table(name):
    config = find(name)
    assert (config.d_model, config.num_heads, config.head_dim) == TABLE[name]
    assert config.kind == "MHA"


def model_of(config):
    """The model itself in transformers, on the meta device."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": config.d_model, "num_attention_heads": config.num_heads, "num_hidden_layers": config.layers}
    sizes |= {"vocab_size": config.vocabulary, "intermediate_size": config.feed_forward}
    sizes |= {"max_position_embeddings": config.context, "pad_token_id": 0}
    grouped = sizes | {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
    family = config.name.split("-")[0]
    small = config.parameters < 5e9
    gpt2 = {"n_embd": config.d_model, "n_head": config.num_heads, "n_layer": config.layers}
    gpt2 |= {"n_positions": config.context, "vocab_size": config.vocabulary, "n_inner": config.feed_forward}
    scalar = 256 if config.scale is None else round(config.scale**-2)
    near = {"sliding_window": config.window}
    kinds = {
        "bert": ("Bert", "BertModel", sizes),
        "gpt2": ("GPT2", "GPT2LMHeadModel", gpt2),
        "gpt3": ("GPT2", "GPT2LMHeadModel", gpt2),
        "llama": ("Llama", "LlamaForCausalLM", grouped | {"tie_word_embeddings": small}),
        "mistral": ("Mistral", "MistralForCausalLM", grouped | near),
        "qwen": ("Qwen3", "Qwen3ForCausalLM", grouped | {"tie_word_embeddings": small}),
        "gemma": ("Gemma3Text", "Gemma3ForCausalLM", grouped | near | {"query_pre_attn_scalar": scalar}),
        "gpt": ("GptOss", "GptOssForCausalLM", grouped | near | {"num_local_experts": config.experts}),
    }
    kinds["phi"] = ("Phi3", "Phi3ForCausalLM", grouped)
    experts = {"num_local_experts": config.experts, "interleave_moe_layer_step": 1 if config.experts == 16 else 2}
    llama4 = grouped | experts | {"attention_chunk_size": config.window, "use_qk_norm": config.local_norms is not None}
    kinds["llama-4"] = ("Llama4Text", "Llama4ForCausalLM", llama4)
    prefix, head, given = kinds["llama-4" if config.name.startswith("llama-4") else family]
    with torch.device("meta"):
        return getattr(transformers, head)(getattr(transformers, f"{prefix}Config")(**given))


ATTENTION = {"bert": "attention", "gpt2": "attn", "gpt3": "attn"}


def attentions(model, config):
    name = ATTENTION.get(config.name.split("-")[0], "self_attn")
    return [module for path, module in model.named_modules() if path.endswith(f".{name}")]


@every
def test_parameters_are_those_of_the_model_in_transformers(config):
    model = model_of(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    found = attentions(model, config)
    assert len(found) == config.layers
    norm = 2 * config.d_model if config.name.startswith("bert") else 0  # there it holds the norm after it as well
    ours = sum(p.numel() for p in config.attention().parameters())
    assert {sum(p.numel() for p in module.parameters()) - norm for module in found} == {ours}


@pytest.mark.parametrize("name", ["mistral-7b", "gemma-3-4b", "gpt-oss-20b", "qwen-3-0.6b"])
def test_windowed_layers_are_those_of_the_model_in_transformers(name):
    config = find(name)
    model = model_of(config)
    for layer, attention in enumerate(attentions(model, config)):
        expected = config.window if config.windowed(layer) else None
        assert getattr(attention, "sliding_window", expected) == expected


@every
def test_scale_is_that_of_the_model_in_transformers(config):
    if config.name.startswith(("bert", "gpt2", "gpt3")):
        pytest.skip("they keep it inside the call")
    attention = attentions(model_of(config), config)[0]
    assert attention.scaling == pytest.approx(config.scale or config.head_dim**-0.5)


def test_layer_has_the_window_and_the_rotary_of_its_place():
    config = find("gemma-3-4b")
    near, far = config.attention(0), config.attention(5)
    assert near.position == config.local_rotary
    assert far.position == config.rotary
    assert near.mask.to_tensor(1030).sum(-1).max() == config.window
    assert far.mask.to_tensor(1030).sum(-1).max() == 1030


def test_windowed_layers_of_all_kinds_are_counted():
    counted = {name: find(name).windowed_layers for name in ("gpt2", "mistral-7b", "gemma-3-1b", "gpt-oss-120b")}
    assert counted == {"gpt2": 0, "mistral-7b": 32, "gemma-3-1b": 22, "gpt-oss-120b": 18}


@pytest.mark.parametrize("name", ["llama-4-scout", "llama-4-maverick"])
def test_layers_of_llama_4_alternate_as_in_transformers(name):
    config = find(name)
    for layer, theirs in enumerate(attentions(model_of(config), config)):
        ours = config.attention(layer)
        assert bool(theirs.use_rope) == config.windowed(layer) == (ours.position is config.local_rotary)
        assert hasattr(theirs, "qk_norm") == (ours.q_norm is not None)
        assert repr(ours.mask) == ("causal() & chunks(8192)" if theirs.use_rope else "causal()")
    told = " ".join(config.options())
    for word in ("36 of 48 layers see only their own chunk of 8192 keys", "temperature(0.1, 8192), rotary(500000"):
        assert word in told


def test_attention_runs_on_real_memory_too():
    config = dataclasses.replace(find("gpt-oss-20b"), d_model=13, num_heads=6, num_kv_heads=3, head_dim=4, window=3)
    layer = config.attention(device="cpu", dtype=torch.float64)
    output, weights = layer(torch.randn(2, 7, 13, dtype=torch.float64), return_weights=True)
    assert output.shape == (2, 7, 13)
    assert weights[0, 0, -1].count_nonzero() == 3
    assert weights[0, 0, -1].sum() < 1  # a sink takes its share


@every
def test_name_and_aliases_lead_to_the_configuration(config):
    for name in (config.name, *config.aliases, config.name.upper(), config.name.replace("-", "_")):
        assert find(name) is config


def test_no_two_models_share_a_name():
    names = [name for config in CONFIGS.values() for name in (config.name, *config.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("wrong", "right"), [("llama-3.1-8", "llama-3.1-8b"), ("gpt2-smal", "gpt2"), ("qwen", "qwen-3-0.6b")]
)
def test_unknown_model_is_refused_with_the_nearest_names_and_the_list(wrong, right):
    with pytest.raises(
        OptionError,
        match=rf"no model is called '{wrong}'. Did you mean .*{right}.*\? All of them: headwise cost --models",
    ):
        find(wrong)


def test_options_say_what_the_ten_steps_leave_out():
    told = " ".join(find("gemma-3-27b").options())
    for word in ("normalized", "base 1000000, 10000 in windowed", "52 of 62 layers", "1/√168, not 1/√128"):
        assert word in told
    assert "sink" in " ".join(find("gpt-oss-20b").options())
    assert find("gpt2").options() == ["learned positions are added to the input before step 1"]
    capped = dataclasses.replace(find("gpt2"), softcap=50.0)
    assert "±50" in " ".join(capped.options())


@pytest.mark.parametrize(("heads", "kv", "kind"), [(6, 6, "MHA"), (6, 3, "GQA"), (6, 1, "MQA"), (1, 1, "MHA")])
def test_kind_is_named_by_key_value_heads(heads, kv, kind):
    assert configs.kind_of(heads, kv) == kind


def test_only_names_of_the_list_are_suggested():
    with pytest.raises(OptionError, match=r"no model is called 'gpt9'. Did you mean gpt3 or gpt2\? All of them: "):
        find("gpt9")
