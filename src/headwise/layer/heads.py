"""Heads between projection and attention: normalised, turned by a rotary, or remembered from an encoder."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.layer import inputs
from headwise.layer.cache import KVCache, Memory
from headwise.layer.positions import Rotary, check_positions
from headwise.layer.projecting import Three, heads_apart

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention

Places = Tensor | Sequence[int] | None


def silenced(read: Tensor, heads: Sequence[int]) -> Tensor:
    """What the heads have read (B, H, T, D), with zeros in place of some of them; see `silence.py`."""
    if max(heads) >= read.shape[1]:
        raise OptionError(f"silence(head {max(heads)}): this layer has {read.shape[1]} heads, from 0 up.")
    return read.index_fill(1, torch.tensor(heads, device=read.device), 0.0)


def remember(layer: "MultiHeadAttention", key: Tensor, value: Tensor | None, positions: Places) -> Memory:
    """See `MultiHeadAttention.remember`."""
    value = key if value is None else value
    inputs.check_memory(layer, key, key, value)
    k, v = heads_apart(layer, k=key, v=value)
    k = k if layer.k_norm is None else layer.k_norm(k)
    if isinstance(layer.position, Rotary):
        if positions is None:
            raise OptionError("this layer has a rotary: pass remember(memory, positions=...), where the keys stand.")
        k = layer.position.turn(k, check_positions("positions", positions, k.shape[0], k.shape[2], k.device))
    return Memory(k, v)


def with_memory(layer: "MultiHeadAttention", query: Tensor, memory: Memory, value: Tensor | None) -> Three:
    """Query heads, and the keys and values that `remember` has projected."""
    if value is not None:
        raise OptionError("value is given beside remembered keys, which bring their values along. Leave it out.")
    if not isinstance(query, Tensor) or query.dim() != 3 or query.shape[2] != layer.d_in:
        raise inputs.misfit("query", query, layer.d_in, "d_in")
    if memory.key.shape[0] != query.shape[0] or memory.key.shape[1::2] != (layer.num_kv_heads, layer.head_dim):
        raise ShapeError(
            f"remembered keys of shape {tuple(memory.key.shape)} do not fit a query of {query.shape[0]} samples "
            f"and {layer.num_kv_heads} key heads {layer.head_dim} wide. Make them with this layer's remember(...)."
        )
    return heads_apart(layer, q=query)[0], *memory


def shape(
    layer: "MultiHeadAttention",
    q: Tensor,
    k: Tensor,
    positions: Places,
    key_positions: Places,
    cache: KVCache | None,
    crossing: bool,
    remembered: bool,
) -> tuple[Tensor, Tensor]:
    """Queries and keys normalised and turned; remembered keys are so already."""
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), k if remembered or layer.k_norm is None else layer.k_norm(k)
    if not isinstance(layer.position, Rotary):
        if positions is not None or key_positions is not None:
            raise OptionError(
                "positions are for a rotary, and this layer has none. Leave them out; masks, ALiBi and relative "
                "biases go by the order of queries and keys."
            )
        return q, k
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    if crossing and (positions is None or (key_positions is None) != remembered):
        raise OptionError(
            "cross-attention with a rotary: pass positions= for the queries and key_positions= for the keys (with "
            "remembered keys, remember(memory, positions=...)), for only you know how the two texts are aligned."
        )
    if positions is None:
        at = torch.arange(T, device=q.device) if cache is None else cache.next_positions(T)
    else:
        at = check_positions("positions", positions, B, T, q.device)
    if remembered:
        return layer.position.turn(q, at), k
    keys_at = at if key_positions is None else check_positions("key_positions", key_positions, B, S, k.device)
    return layer.position.turn(q, at), layer.position.turn(k, keys_at)
