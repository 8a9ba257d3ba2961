"""The `Attention` of x-transformers, flash and plain. Its projections have no biases."""

from torch import nn

from headwise.cli.bench.peers.peer import fill, load
from headwise.cli.bench.setting import Setting, Weights


def x_transformers(setting: Setting, weights: Weights, _tokens: int, *, flash: bool) -> nn.Module:
    """One attention module."""
    module: nn.Module = load("x_transformers").Attention(
        setting.d_model, heads=setting.heads, dim_head=setting.head_dim, causal=setting.causal, flash=flash
    )
    for name, given in zip(("to_q", "to_k", "to_v", "to_out"), weights, strict=True):
        fill(module.get_submodule(name), given)  # type: ignore[arg-type]
    return module
