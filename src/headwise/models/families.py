"""Families of models: what a configuration says about attention that tensors do not: heads, positions, masks, scales.

A configuration is the dictionary in the `config.json` beside the weights, with transformers' names.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from headwise.errors import CheckpointError
from headwise.layer.latent import RMS, latent
from headwise.layer.norms import Norms, WidthNorm, ZeroCentredNorm
from headwise.layer.positions import (
    PositionalEncoding,
    Scaling,
    linear,
    llama3,
    longrope,
    multi_axis_rotary,
    rotary,
    temperature,
    yarn,
)
from headwise.layer.sharing import queries_only
from headwise.masks import chunks, window
from headwise.models.builtin import FORMAT
from headwise.weights.scoring import RelativeBias, alibi

Config = Mapping[str, Any]
Options = dict[str, Any]


class LayerPlace(NamedTuple):
    """Where a layer is in its model, from its name."""

    number: int
    decoder: bool
    cross: bool

    @classmethod
    def of(cls, name: str) -> "LayerPlace":
        """The place of a layer with a `name` such as "decoder.layers.3.encoder_attn"."""
        number = NUMBER.search(name)
        return cls(int(number[2]) if number else 0, "decoder" in name, is_cross(name))


# The number of a layer, not a number in the name of a model ("t5.", "0.auto_model.").
NUMBER = re.compile(r"(^|\.)(?:layers?|h|blocks?|albert_layers)\.(\d+)\.")


def is_cross(name: str) -> bool:
    """Whether a layer is cross-attention."""
    return re.search(r"encoder_attn|EncDecAttention|cross_?attention", name) is not None


def stack_of(name: str) -> str:
    """The prefix that all layers of a stack share, such as "encoder.block."."""
    number = NUMBER.search(name)
    return name[: number.start(2)] if number else ""


def options(config: Config, name: str, given: Mapping[str, Any] | None = None) -> Options:
    """Arguments for `MultiHeadAttention`, as far as the configuration of a known family determines them.

    Args:
        config: the configuration.
        name: the layer's name.
        given: the user's options, of which num_heads is used if the configuration lacks it.
    """
    config, place = _part(config, name), LayerPlace.of(name)
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        return {key: value for key, value in _heads(config, place).items() if value is not None}
    config = {**DEFAULTS.get(kind, {}), **{key: value for key, value in config.items() if value is not None}}
    if given and given.get("num_heads") is not None:
        config.setdefault("num_attention_heads", given["num_heads"])
    for key in ("clip_qkv", "use_bidirectional_attention", "use_qk_norm", "qk_layernorm"):
        if config.get(key) and (kind, key) != ("llama4_text", "use_qk_norm"):
            raise CheckpointError(f"{kind!r} with {key}={config[key]}: our layer does not support this.")
    try:
        dropout = _first(config, "attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
        found = {**_heads(config, place), "dropout": dropout, **FAMILIES[kind](config, place)}
    except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"the configuration of {kind!r} lacks what its attention needs, or has an unknown form ({error!r}). "
            f"Pass a complete config=, or config={{}} and every option yourself."
        ) from error
    if place.cross:
        found |= {"causal": False, "position": None}
    return {key: value for key, value in found.items() if value is not None or key == "position"}


def known(config: Config, name: str) -> bool:
    """Whether the family of this layer is known."""
    return str(_part(config, name).get("model_type")) in FAMILIES


def unknown(config: Config, name: str) -> str | None:
    """The family of this layer if it is named but not known, else None."""
    kind = _part(config, name).get("model_type", config.get("model_type"))
    return None if kind is None or str(kind) in FAMILIES else str(kind)


def _part(config: Config, name: str) -> Config:
    """The part of a composite configuration (text, vision, audio) that describes this layer."""
    parts = [key for key, value in config.items() if key.endswith("_config") and isinstance(value, Mapping)]
    if not parts:
        return config
    words = set(re.split(r"[._]", name))
    for key in parts:
        if any(word in words for word in PARTS.get(key, (key.removesuffix("_config"),))):
            return config[key]  # type: ignore[no-any-return]
    plain = words.isdisjoint(word for key in PARTS if key != "text_config" for word in PARTS[key])
    if plain and config.get("model_type") in FLAT:
        return {**config, "model_type": f"{config['model_type']}_text"}
    return config["text_config"] if "text_config" in parts and plain and "model" in words else {}


FLAT = ("qwen2_vl", "qwen2_5_vl")  # older configurations of these describe the text beside vision_config


PARTS = {
    "text_config": ("text", "language"),
    "vision_config": ("vision", "visual"),
    "audio_config": ("audio",),
    "qformer_config": ("qformer",),
}


def _first(config: Config, *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _heads(config: Config, place: LayerPlace) -> Options:
    side = "decoder_attention_heads" if place.decoder else "encoder_attention_heads"
    heads = _first(config, "num_attention_heads", "n_head", "n_heads", "num_heads", side, "attention_heads")
    return {"num_heads": heads, "num_kv_heads": _first(config, "num_key_value_heads")}


def _head_dim(config: Config) -> int:
    width = _first(config, "hidden_size", "n_embd", "d_model")
    heads = _first(config, "num_attention_heads", "n_head", "n_heads")
    return int(_first(config, "head_dim") or width // heads)


# Positions ---------------------------------------------------------------------------------------------------------


def _rope(config: Config, layer_type: str) -> Mapping[str, Any]:
    """The rotary parameters of a layer under current names; older configurations use other names."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if layer_type in rope or "full_attention" in rope:
        rope = dict(rope.get(layer_type) or rope.get("full_attention") or {})
    if layer_type == "sliding_attention" and "rope_local_base_freq" in config and not config.get("rope_parameters"):
        return {"rope_theta": config["rope_local_base_freq"], "rope_type": "default"}
    rope.setdefault("rope_theta", _first(config, "rope_theta", "rotary_emb_base") or 10000.0)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("partial_rotary_factor", _first(config, "partial_rotary_factor", "rotary_pct") or 1.0)
    return rope


def _rotary(config: Config, layer_type: str = "full_attention", interleaved: bool = False) -> PositionalEncoding:
    rope, D = _rope(config, layer_type), _head_dim(config)
    width = int(D * rope.get("partial_rotary_factor", 1.0))
    options: Options = {"width": None if width == D else width, "interleaved": interleaved}
    options["scaling"] = _scaling(rope, config)
    base, sections, beta = rope["rope_theta"], rope.get("mrope_section"), rope.get("llama_4_scaling_beta")
    if sections:
        turns = not str(config.get("model_type")).startswith("qwen2")  # from Qwen3-VL on, the axes take turns
        return multi_axis_rotary(sections, base, alternating=turns, **options)
    if beta:
        return rotary(base, **options) + temperature(beta, rope["original_max_position_embeddings"], first=0)
    return rotary(base, **options)


def _scaling(rope: Mapping[str, Any], config: Config) -> Scaling | None:
    """The scaling of the rotary angles."""
    kind = rope["rope_type"]
    original = rope.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind in ("default", "mrope"):
        return None
    if kind in ("longrope", "su"):
        return _longrope(rope, config)
    if kind == "linear":
        return linear(rope["factor"])
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        return llama3(rope["factor"], low_freq_factor=low, high_freq_factor=high, original_length=int(original or 8192))
    if kind == "yarn":
        grown, everywhere = rope.get("mscale"), rope.get("mscale_all_dim")
        factor = _growth(rope["factor"], grown) / _growth(rope["factor"], everywhere) if grown and everywhere else None
        return yarn(
            rope["factor"],
            int(original or 0),
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            attention_factor=rope.get("attention_factor") or factor,
            truncate=rope.get("truncate", True),
        )
    raise CheckpointError(
        f"the configuration asks for rotary positions of type {kind!r}, which our layer does not support (it "
        f"supports default, linear, llama3, yarn and longrope). Pass position= to choose another."
    )


def _longrope(rope: Mapping[str, Any], config: Config) -> Scaling:
    """Phi-3 writes the original length beside the other parameters, and the factor is the ratio of the two lengths."""
    length = int(_first(config, "original_max_position_embeddings") or rope["original_max_position_embeddings"])
    factor = rope.get("factor") or config["max_position_embeddings"] / length
    factors = rope["short_factor"], rope["long_factor"]
    return longrope(factor, length, *factors, attention_factor=rope.get("attention_factor"))


def _growth(factor: float, share: float) -> float:
    """How much YaRN makes heads grow for texts that are `factor` times longer."""
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


# Families ----------------------------------------------------------------------------------------------------------


def encoder(config: Config, place: LayerPlace) -> Options:
    """BERT and others: every token attends to every token; BERT can also be a decoder."""
    return {"causal": bool(config.get("is_decoder")) or None, "position": None}


def decoder(config: Config, place: LayerPlace) -> Options:
    """OPT and others: causal, with positions added to the input."""
    return {"causal": True, "position": None}


def pair(config: Config, place: LayerPlace) -> Options:
    """BART and others: an encoder, and a decoder that also attends to it."""
    return {"causal": place.decoder or None, "position": None}


def headwise_gpt(config: Config, place: LayerPlace) -> Options:
    """The built-in model and models that `examples/train_gpt.py` wrote."""
    return {"causal": True, "position": rotary() if config["position"] == "rotary" else None}


def gpt2(config: Config, place: LayerPlace) -> Options:
    """GPT-2: the scale can be switched off, or shrink with depth."""
    D = _head_dim(config)
    scale = D**-0.5 if config.get("scale_attn_weights", True) else 1.0
    if config.get("scale_attn_by_inverse_layer_idx"):
        scale /= place.number + 1
    return decoder(config, place) | {"scale": None if scale == D**-0.5 else scale}


def gpt_neo(config: Config, place: LayerPlace) -> Options:
    """GPT-Neo: no scale; every second layer has a sliding window."""
    kinds = config.get("attention_layers") or [kind for some, n in config["attention_types"] for kind in some * n]
    near = window(int(config["window_size"]) - 1) if kinds[place.number] == "local" else None
    return decoder(config, place) | {"scale": 1.0, "mask": near}


def gptj(config: Config, place: LayerPlace) -> Options:
    """GPT-J: rotary positions on interleaved pairs, in part of each head."""
    return {"causal": True, "position": rotary(width=config.get("rotary_dim"), interleaved=True)}


def bloom(config: Config, place: LayerPlace) -> Options:
    """BLOOM: ALiBi."""
    return {"causal": True, "position": alibi(int(_first(config, "n_head", "num_attention_heads")))}


def falcon(config: Config, place: LayerPlace) -> Options:
    """Falcon: rotary, or ALiBi that is scaled with the scores; one key/value head, or several."""
    H = int(_first(config, "num_attention_heads", "n_head"))
    some = _first(config, "num_kv_heads", "n_head_kv") if config.get("new_decoder_architecture") else None
    kv_heads = some or (1 if config.get("multi_query", True) and not config.get("new_decoder_architecture") else H)
    slopes = alibi(slopes=alibi(H).table * _head_dim(config) ** -0.5)
    position = slopes if config.get("alibi") else _rotary(config)
    return {"causal": True, "num_kv_heads": int(kv_heads), "position": position}


def t5(config: Config, place: LayerPlace) -> Options:
    """T5: no scale; a learned bias by distance, shared by all layers of a stack."""
    if place.cross:
        return {"scale": 1.0}
    bias = RelativeBias(
        int(config["num_heads"]),
        num_buckets=config.get("relative_attention_num_buckets", 32),
        max_distance=config.get("relative_attention_max_distance", 128),
        bidirectional=not place.decoder,
    )
    return {"causal": place.decoder or None, "scale": 1.0, "position": bias}


NORMS = {"head": nn.RMSNorm, "width": WidthNorm, "zero-centred": ZeroCentredNorm}


def llama(
    config: Config, place: LayerPlace, *, interleaved: bool = False, norm: str | None = None, turned: str = "all"
) -> Options:
    """Llama and others: rotary positions and grouped heads; some have windows, soft-caps, sinks and norms of heads, and
    some have a rotary only in layers with a window (`turned="sliding"`)."""
    kind = _layer_type(config, place)
    rotates = _is_turned(config, place) and (turned == "all" or kind == "sliding_attention" or not _slides(config))
    return {
        "causal": True,
        "mask": window(int(config["sliding_window"]) - 1) if kind == "sliding_attention" else None,
        "position": _rotary(config, kind, interleaved) if rotates else None,
        "qk_norm": norm and functools.partial(NORMS[norm], eps=config.get("rms_norm_eps", 1e-6)),
        **_scores(config),
    }


def _slides(config: Config) -> bool:
    """Whether the model has a window at all."""
    return bool(config.get("sliding_window")) and config.get("use_sliding_window") is not False


def _is_turned(config: Config, place: LayerPlace) -> bool:
    """Whether a layer has a rotary; some models leave it out of some layers."""
    every, skipped = config.get("no_rope_layer_interval"), config.get("no_rope_layers")
    return bool(skipped[place.number]) if skipped else not every or (place.number + 1) % every != 0


def llama4(config: Config, place: LayerPlace) -> Options:
    """Llama 4: layers with a rotary see chunks of the text and are normalized after it; others have a temperature."""
    found, kinds = llama(config, place, interleaved=True), config.get("layer_types")
    if not _is_turned(config, place):
        tuned = config.get("attn_temperature_tuning", True)
        return found | {"position": temperature(config["attn_scale"], config["floor_scale"]) if tuned else None}
    chunked, size = not kinds or kinds[place.number] == "chunked_attention", config.get("attention_chunk_size")
    norm = _unweighted(config) if config.get("use_qk_norm", True) else None
    return found | {"mask": chunks(size) if chunked and size else None, "qk_norm": Norms(norm, norm, after=True)}


def gemma3n(config: Config, place: LayerPlace) -> Options:
    """Gemma 3n: values are normalized, too; the last layers read the keys and values of earlier ones."""
    found = llama(config, place, norm="head") | {"scale": 1.0}
    norm, first = found["qk_norm"], config["num_hidden_layers"] - config["num_kv_shared_layers"]
    if place.number >= first > 0:
        return found | {"qk_norm": Norms(norm), "projections": queries_only()}
    return found | {"qk_norm": Norms(norm, norm, _unweighted(config))}


def _unweighted(config: Config) -> Callable[[int], nn.Module]:
    return functools.partial(nn.RMSNorm, eps=config.get("rms_norm_eps", 1e-6), elementwise_affine=False)


class GrownNorm(nn.RMSNorm):
    """Root-mean-square normalization whose result is multiplied by a constant, as LongCat-Flash does by
    sqrt(hidden size / width)."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__(width, eps=1e-6)
        self.growth = math.sqrt(hidden_size / width)

    def forward(self, x: Tensor) -> Tensor:
        """The normalized vector, grown."""
        return super().forward(x) * self.growth


def deepseek(config: Config, place: LayerPlace, *, interleaved: bool | None = None, turned: bool = True) -> Options:
    """DeepSeek V2, V3 and others: multi-head latent attention; some norms grow, and YaRN changes the scale."""
    own, turned_dim, q_rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config.get("q_lora_rank")
    value_dim = _first(config, "v_head_dim") or config["hidden_size"] // config["num_attention_heads"]
    grown = config.get("model_type") == "longcat_flash"
    norm = functools.partial(GrownNorm, hidden_size=config["hidden_size"]) if grown else RMS
    sizes = {"nope_dim": own, "rotary_dim": turned_dim, "value_dim": value_dim, "q_rank": q_rank}
    rope = _rope({**config, "partial_rotary_factor": None}, "full_attention")
    everywhere = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    scale = (own + turned_dim) ** -0.5 * _growth(rope["factor"], everywhere) ** 2 if everywhere else None
    pairs = bool(config.get("rope_interleave", True)) if interleaved is None else interleaved
    position: PositionalEncoding | None = None
    if turned:
        position = rotary(rope["rope_theta"], interleaved=pairs, scaling=_scaling(rope, config))
        if beta := rope.get("llama_4_scaling_beta"):
            position = position + temperature(beta, int(rope["original_max_position_embeddings"]), first=0)
    return {
        "causal": True,
        "num_kv_heads": None,
        "projections": latent(config["kv_lora_rank"], norm=norm, **sizes),
        "position": position,
        "scale": scale,
        # A map of full rank has no bias; otherwise the tensors say it.
        "bias": {"k", "v", "out"} if config.get("attention_bias") and q_rank is None else None,
    }


def modernbert(config: Config, place: LayerPlace) -> Options:
    """ModernBERT: an encoder with rotary positions; most layers have a local window."""
    kinds, every = config.get("layer_types"), config.get("global_attn_every_n_layers", 3)
    usual = "sliding_attention" if place.number % every else "full_attention"
    kind = kinds[place.number] if kinds else usual
    reach = int(config["local_attention"]) // 2
    bases = {"sliding_attention": "local_rope_theta", "full_attention": "global_rope_theta"}
    if config.get("rope_parameters") is None:
        config = {**config, "rope_theta": config[bases[kind]]}
    return {"mask": window(reach, reach) if kind == "sliding_attention" else None, "position": _rotary(config, kind)}


def _layer_type(config: Config, place: LayerPlace) -> str:
    """Whether a layer has full or sliding-window attention: as listed, or by the model's default."""
    kinds = config.get("layer_types")
    if kinds:
        return str(kinds[place.number])
    if not _slides(config):
        return "full_attention"
    family = str(config.get("model_type"))
    if family.startswith("qwen") and place.number < config.get("max_window_layers", 0):
        return "full_attention"
    periods = {"gemma2": 2, "gpt_oss": 2, "vaultgemma": 2, "cohere2": 4, "exaone4": 4, "olmo3": 4, "gemma3n_text": 5}
    pattern = config.get("sliding_window_pattern") or periods.get(family, 6 if family == "gemma3_text" else None)
    if isinstance(pattern, str):  # such as "LLLG", where G is a global layer
        return "full_attention" if pattern[place.number % len(pattern)] == "G" else "sliding_attention"
    period = pattern
    return "full_attention" if period and (place.number + 1) % period == 0 else "sliding_attention"


def _scores(config: Config) -> Options:
    """Scale, soft-cap and sinks."""
    given = config.get("query_pre_attn_scalar")
    scale = config.get("attention_multiplier") if given is None else given**-0.5
    sinks = config.get("model_type") == "gpt_oss"
    return {"scale": scale, "softcap": config.get("attn_logit_softcapping"), "sinks": sinks}


# Defaults of the families, for keys that a configuration leaves out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"rotary_pct": 0.25},
    "phi": {"partial_rotary_factor": 0.5},
    "stablelm": {"partial_rotary_factor": 0.25},
    "nemotron": {"partial_rotary_factor": 0.5},
    "gemma2": {"query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "sliding_window": 4096, "head_dim": 256},
    "gemma3_text": {
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma3n_text": {
        "sliding_window": 512,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 35,
        "num_kv_shared_layers": 15,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "llama4_text": {
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "no_rope_layer_interval": 4,
        "attn_scale": 0.1,
        "floor_scale": 8192,
    },
    "phi3": {"max_position_embeddings": 4096},
    "ministral3": {"head_dim": 128, "num_key_value_heads": 8},
    "qwen3_next": {"partial_rotary_factor": 0.25, "head_dim": 256, "num_key_value_heads": 2},
    "qwen3_5_text": {"partial_rotary_factor": 0.25, "head_dim": 256},
    "qwen2_vl_text": {"use_sliding_window": False, "max_window_layers": 80},
    "qwen2_5_vl_text": {"use_sliding_window": False, "max_window_layers": 80},
    "qwen3_vl_text": {"rope_theta": 500000.0, "head_dim": 128},
    "gemma": {"head_dim": 256},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "smollm3": {"no_rope_layer_interval": 4, "rope_theta": 2e6, "use_sliding_window": False},
    "modernbert": {"local_rope_theta": 10000.0, "global_rope_theta": 160000.0, "local_attention": 128},
    "gpt_oss": {"sliding_window": 128, "rope_theta": 150000.0, "head_dim": 64},
    "gpt_neo": {"window_size": 256, "attention_types": [[["global", "local"], 12]]},
    "bloom": {"n_head": 8},
    "gptj": {"rotary_dim": 64},
    "llama": {"num_attention_heads": 32, "hidden_size": 4096},
    "granite": {"attention_multiplier": 1.0},
    "t5": {"num_heads": 8},
    "mt5": {"num_heads": 6},
    "cohere": {"rope_theta": 500000.0},
    "olmo2": {"rms_norm_eps": 1e-5},
}

FAMILIES: dict[str, Callable[[Config, LayerPlace], Options]] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "albert"), encoder),
    **dict.fromkeys(("vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model"), encoder),
    **dict.fromkeys(("siglip_text_model", "wav2vec2", "hubert"), encoder),
    **dict.fromkeys(("bert-generation", "data2vec-text", "ernie", "layoutlm", "rembert"), encoder),
    "roberta-prelayernorm": encoder,
    **dict.fromkeys(("opt", "clip_text_model", "xglm", "biogpt", "ctrl", "nemotron_h"), decoder),
    **dict.fromkeys(("bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100"), pair),
    **dict.fromkeys(("blenderbot-small", "mvp", "plbart"), pair),
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "gemma", "gemma2", "phi", "phi3", "stablelm"), llama),
    **dict.fromkeys(("olmo", "gpt_oss", "granite", "starcoder2", "smollm3", "nemotron", "gpt_neox"), llama),
    **dict.fromkeys(("ministral3", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_moe"), llama),
    **dict.fromkeys(("arcee", "aria_text", "cwm", "granitemoe", "granitemoeshared", "hyperclovax", "jais2"), llama),
    **dict.fromkeys(("ministral", "modernbert-decoder", "phimoe", "seed_oss", "solar_open", "vaultgemma"), llama),
    "glm4_moe": llama,
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text"), functools.partial(llama, norm="head")),
    **dict.fromkeys(("apertus", "dots1", "hy_v3", "kolibri1", "mellum"), functools.partial(llama, norm="head")),
    **dict.fromkeys(("flex_olmo", "minimax_m2", "olmo3", "olmoe"), functools.partial(llama, norm="width")),
    **dict.fromkeys(("exaone4", "exaone_moe"), functools.partial(llama, norm="head", turned="sliding")),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "helium"), functools.partial(llama, interleaved=True)),
    **dict.fromkeys(("cohere2", "cohere2_moe"), functools.partial(llama, interleaved=True, turned="sliding")),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text"), functools.partial(llama, norm="zero-centred")),
    "llama4_text": llama4,
    "gemma3n_text": gemma3n,
    "olmo2": functools.partial(llama, norm="width"),
    "gemma3_text": functools.partial(llama, norm="zero-centred"),
    "cohere": functools.partial(llama, interleaved=True),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite", "youtu", "axk1", "mistral4"), deepseek),
    **dict.fromkeys(("deepseek_v2", "longcat_flash"), functools.partial(deepseek, interleaved=True)),
    "minicpm3": functools.partial(deepseek, interleaved=False),
    "kimi_linear": functools.partial(deepseek, turned=False),
    "gpt2": gpt2,
    FORMAT: headwise_gpt,
    "gpt_neo": gpt_neo,
    "gptj": gptj,
    "bloom": bloom,
    "falcon": falcon,
    "t5": t5,
    "mt5": t5,
    "whisper": lambda config, place: pair(config, place) | {"bias": {"q", "v", "out"}},  # keys have none
    "modernbert": modernbert,
}
