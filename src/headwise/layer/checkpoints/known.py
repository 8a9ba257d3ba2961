"""The layouts that are known, by the names their tensors have; where two share a name, the first is asked first."""

import re

from headwise.layer.checkpoints.forms import HeadByHead, SideBySide
from headwise.layer.checkpoints.layouts import (
    T5_TABLE,
    Fused,
    Gpt2,
    HeadList,
    Kernels,
    KeysWithValues,
    Layout,
    Linears,
    Torch,
    XTransformers,
)


def by_prefix(pattern: str) -> re.Pattern[str]:
    """Where the layers of a known model stand."""
    return re.compile(rf"(^|.*\.){pattern}")


HEADWISE = Fused("qkv_proj", ("out_proj",), HeadByHead(), title="headwise.MultiHeadAttention", order="head by head")
NEOX = Fused(
    "query_key_value",
    ("dense",),
    HeadByHead(),
    title="query_key_value of GPT-NeoX, Falcon and BLOOM",
    order="head by head",
    home=by_prefix(r"(layers\.\d+\.attention|h\.\d+\.self_attention)\."),
    turned=True,
)


def side_by_side(name: str, *outs: str, turned: bool = False) -> Fused:
    """A fused projection with all queries first."""
    return Fused(name, outs, SideBySide(), title=f"{name}, {outs[0]}", order="side by side", turned=turned)


def textbook(query: str, key: str, value: str) -> Linears:
    """Names that books and courses give."""
    return Linears(query, key, value, title=f"{query}, {key}, {value}")


def nested(model: str, name: str) -> Linears:
    """Three projections in a module of their own, the last one in the next."""
    parts = (f"{name}.query", f"{name}.key", f"{name}.value")
    return Linears(*parts, ("output.dense",), title=f"{model}'s {parts[0]}, output.dense", complete=True)


LAYOUTS: tuple[Layout, ...] = (
    HEADWISE,
    side_by_side("qkv_proj", "out_proj"),
    HeadList("W_query", "W_key", "W_value"),
    HeadList("query", "key", "value"),
    HeadList("W_q", "W_k", "W_v"),
    Torch("in_proj_weight"),
    Torch("q_proj_weight"),
    Gpt2(),
    NEOX,
    side_by_side("query_key_value", "dense", turned=True),
    side_by_side("qkv_proj", "o_proj", turned=True),  # Phi-3
    side_by_side("qkv", "proj", "out_proj", "out"),  # timm
    side_by_side("Wqkv", "Wo", "out_proj", turned=True),  # ModernBERT
    Fused("wqkv", ("wo",), HeadByHead(), title="wqkv of InternLM 2", order="head by head", turned=True),
    side_by_side("wqkv", "wo", turned=True),
    side_by_side("to_qkv", "to_out.0", "to_out"),
    nested("BERT", "self"),
    nested("ViT", "attention"),
    Linears("q_lin", "k_lin", "v_lin", ("out_lin",), title="DistilBERT's q_lin, out_lin"),
    XTransformers(),
    KeysWithValues("to_q", "to_kv", ("to_out.0", "to_out")),
    textbook("W_query", "W_key", "W_value"),
    Linears("W_q", "W_k", "W_v", ("W_o", "out_proj", "proj", "fc_out", "fc"), title="W_q, W_k, W_v"),
    textbook("q_proj", "k_proj", "v_proj"),
    Linears("q", "k", "v", ("o", "proj", "out_proj", "out"), more={T5_TABLE: "position.weight"}),
    Linears("wq", "wk", "wv", ("wo",), complete=True),
    textbook("Wq", "Wk", "Wv"),
    textbook("w_q", "w_k", "w_v"),
    textbook("W_Q", "W_K", "W_V"),
    textbook("w_qs", "w_ks", "w_vs"),
    textbook("query", "key", "value"),
    textbook("queries", "keys", "values"),
    Linears("q_linear", "k_linear", "v_linear", ("out", "out_linear", "out_proj", "fc"), title="q_linear, k_linear"),
    Linears("linears.0", "linears.1", "linears.2", ("linears.3",), title="four linears in a list"),
    Kernels("attention_output", "."),
    Kernels("attention_output", "/"),
    Kernels("out", "."),
    Kernels("out", "/"),
)
