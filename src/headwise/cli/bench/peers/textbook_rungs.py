"""The rungs of `headwise.textbook`, and our layer, which is the step after the last."""

import torch
from torch import nn

from headwise.cli.bench.peers.peer import fill
from headwise.cli.bench.setting import Setting, Weights
from headwise.layer import MultiHeadAttention
from headwise.textbook import HeadsAtOnce


def heads_at_once(setting: Setting, weights: Weights, tokens: int) -> HeadsAtOnce:
    """The vectorised class: one matrix for all heads, a T×T tensor."""
    E = setting.d_model
    rung = HeadsAtOnce(E, E, tokens, 0.0, setting.heads, qkv_bias=True).to(setting.torch_dtype)
    for linear, given in zip((rung.W_query, rung.W_key, rung.W_value, rung.out_proj), weights, strict=True):
        fill(linear, given)
    return rung


def heads_in_a_list(setting: Setting, weights: Weights, tokens: int) -> nn.Module:
    """The naive wrapper: one head after the other. It has no output projection, so one comes after it."""
    whole = heads_at_once(setting, weights, tokens)
    return nn.Sequential(whole.to_list(), whole.out_proj)


def ours(setting: Setting, weights: Weights, _tokens: int) -> MultiHeadAttention:
    """The fused layer."""
    names = ("W_query", "W_key", "W_value", "out_proj")
    state: dict[str, torch.Tensor] = {}
    for name, (weight, bias) in zip(names, weights, strict=True):
        state |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    return MultiHeadAttention.from_state_dict(state, num_heads=setting.heads, causal=setting.causal)
