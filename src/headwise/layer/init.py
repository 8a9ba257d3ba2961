"""Initial weights.

A layer draws its weights as `nn.Linear` does: the weights and biases of every projection are uniform within
±1 / sqrt(inputs). Sinks start at 0, norms at 1. `like_torch_` draws them as `nn.MultiheadAttention` does. For anything
else, apply the functions of `torch.nn.init` to `layer.qkv_proj`, or to `q_proj`, `k_proj` and `v_proj`, and to
`out_proj`.
"""

import torch
from torch import Tensor, nn

from headwise.layer.checkpoints.forms import pack
from headwise.layer.layer import MultiHeadAttention


@torch.no_grad()
def like_torch_(layer: MultiHeadAttention) -> MultiHeadAttention:
    """`layer` with new weights, drawn as `nn.MultiheadAttention` draws its own: with the same seed, they are equal.

    Query, key and value weights are Xavier-uniform, as one matrix if their inputs have one width; output weights are
    uniform within ±1 / sqrt(inputs); biases are 0. Norms, gates, sinks and positions stay as they are.

    >>> layer = like_torch_(MultiHeadAttention(64, 4))
    >>> layer.out_proj.bias.abs().sum().item()
    0.0
    """
    parts, _ = layer.projections()
    if layer.out_proj is not None:
        layer.out_proj.reset_parameters()
        if layer.out_proj.bias is not None:
            layer.out_proj.bias.zero_()
    alike = layer.d_in == layer.d_key == layer.d_value
    drawn = _xavier(torch.cat(parts)).split([len(x) for x in parts]) if alike else tuple(map(_xavier, parts))
    names = ("qkv_proj",) if layer.fused else ("q_proj", "k_proj", "v_proj")
    q, k, v = drawn
    weights = (pack(q, k, v, layer.num_heads, layer.num_kv_heads),) if layer.fused else (q, k, v)
    for name, weight in zip(names, weights, strict=True):
        linear: nn.Linear = layer._modules[name]  # type: ignore[assignment]
        linear.weight.copy_(weight)
        if linear.bias is not None:
            linear.bias.zero_()
    return layer


def _xavier(like: Tensor) -> Tensor:
    return nn.init.xavier_uniform_(torch.empty_like(like))
