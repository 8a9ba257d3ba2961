"""Steps 1 to 3 of a layer: from inputs (B, T, E) to heads (B, H, T, D), as views of the projections."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import shapes
from headwise.layer import inputs
from headwise.layer.projection import is_plain, project

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention

Three = tuple[Tensor, Tensor, Tensor]


def heads_of(layer: "MultiHeadAttention", query: Tensor, key: Tensor | None, value: Tensor | None) -> Three:
    """Query (B, H, T, D), key and value (B, Hkv, S, D) of what a layer is called with."""
    inputs.check(layer, query, key, value)
    if layer.fused and (key is None or (key is query and value is query)):
        return heads_at_once(layer, query)
    key = query if key is None else key
    q, k, v = heads_apart(layer, q=query, k=key, v=key if value is None else value)
    return q, k, v


def heads_at_once(layer: "MultiHeadAttention", x: Tensor) -> Three:
    """Heads of self-attention out of one matrix product."""
    B, T, _ = x.shape
    D, Hkv, group = layer.head_dim, layer.num_kv_heads, layer.group
    linear = layer._modules["qkv_proj"]  # layer.qkv_proj would take 0.6 µs to look up
    qkv = project(linear, x)  # type: ignore[arg-type]
    if group == 1 and not torch.is_grad_enabled():  # three views in one call; one token needs no transpose
        split = qkv.view(B, Hkv, 3, 1, D) if T == 1 else qkv.view(B, T, Hkv, 3, D).permute(0, 2, 3, 1, 4)
        q, k, v = split.unbind(2)
        return q, k, v
    # Split first and transpose then, so that one contiguous copy joins the three gradients.
    q, k, v = qkv.view(B, T, Hkv, (group + 2) * D).split((group * D, D, D), dim=-1)
    q = q if group == 1 else q.reshape(B, T, layer.num_heads, D)  # groups lie apart: no view can join them
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def heads_apart(layer: "MultiHeadAttention", **given: Tensor) -> list[Tensor]:
    """Heads of inputs of their own, by their roles `q`, `k` and `v`, those that are given and in their order."""
    counts = {"q": layer.num_heads, "k": layer.num_kv_heads, "v": layer.num_kv_heads}
    if not layer.fused:
        linears = layer._modules
        return [_split(project(linears[f"{role}_proj"], x), counts[role]) for role, x in given.items()]  # type: ignore[arg-type]
    if not is_plain(layer.qkv_proj):  # an adapter or a hook must see every input
        return [heads_at_once(layer, x)["qkv".index(role)] for role, x in given.items()]
    shapes.check_alike(input=next(iter(given.values())), weight=layer.qkv_proj.weight)
    cut = dict(zip("qkv", zip(*layer.projections(), strict=True), strict=True))  # a copy as large as the weight
    return [_split(F.linear(x, *cut[role]), counts[role]) for role, x in given.items()]


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads · D) as (B, heads, T, D)."""
    parts: Tensor = x.unflatten(-1, (heads, -1))
    return parts.transpose(1, 2)
