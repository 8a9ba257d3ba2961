"""`project`: a linear map of an input, at the least cost of calling it, with our words where it does not fit."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from headwise import shapes
from headwise.layer import arguments

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention


from collections.abc import Sequence
from typing import TYPE_CHECKING

from headwise.errors import OptionError, ShapeError
from headwise.layer.cache import KVCache, Memory
from headwise.layer.positions import Rotary, check_positions

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention


def project(linear: nn.Module, x: Tensor) -> Tensor:
    """`linear(x)`. In inference, a plain and unhooked `nn.Linear` is called without the 3 µs of a module call."""
    if torch.compiler.is_compiling():
        return linear(x)  # type: ignore[no-any-return]
    try:
        if torch.is_grad_enabled() or not is_plain(linear):
            return linear(x)  # type: ignore[no-any-return]
        parameters = linear._parameters
        return F.linear(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]
    except RuntimeError:  # torch has compared dtypes and devices for us; say in our words what is wrong
        if isinstance(linear, nn.Linear):
            shapes.check_alike(input=x, weight=linear.weight)
        raise


def is_plain(linear: nn.Module) -> bool:
    """Whether this is an `nn.Linear` as torch made it: not patched, not sharded, and nobody listens to its calls."""
    if type(linear) is not nn.Linear or "forward" in linear.__dict__ or "weight" not in linear._parameters:
        return False
    hooks = linear._forward_hooks or linear._forward_pre_hooks or _global_forward_hooks or _global_forward_pre_hooks
    return not (hooks or linear._backward_hooks or linear._backward_pre_hooks)


# Steps 1 to 3 of a layer: from inputs (B, T, E) to heads (B, H, T, D), as views of the projections.

Three = tuple[Tensor, Tensor, Tensor]


def heads_of(layer: "MultiHeadAttention", query: Tensor, key: Tensor | None, value: Tensor | None) -> Three:
    """Query (B, H, T, D), key and value (B, Hkv, S, D) of what a layer is called with."""
    arguments.check(layer, query, key, value)
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


# The head-major layout of a fused projection: head by head, the queries of a group, then its key, then its value.


def pack(query: Tensor, key: Tensor, value: Tensor, num_heads: int, num_kv_heads: int) -> Tensor:
    """Weights (H·D, E), (Hkv·D, E), (Hkv·D, E), or biases without E, as one head-major tensor.

    >>> q, k, v = torch.tensor([1, 2]), torch.tensor([10, 20]), torch.tensor([100, 200])
    >>> pack(q, k, v, num_heads=2, num_kv_heads=2).tolist()  # two heads of width 1
    [1, 10, 100, 2, 20, 200]
    """
    D = query.shape[0] // num_heads
    parts = [x.unflatten(0, (num_kv_heads, -1, D)) for x in (query, key, value)]
    return torch.cat(parts, dim=1).flatten(0, 2)


def unpack(packed: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three parts of a head-major tensor, heads in order: the inverse of `pack`."""
    group = num_heads // num_kv_heads
    q, k, v = packed.unflatten(0, (num_kv_heads, group + 2, -1)).split((group, 1, 1), dim=1)
    return q.flatten(0, 2), k.flatten(0, 2), v.flatten(0, 2)


# Heads between projection and attention: normalised, turned by a rotary, or remembered from an encoder.

Places = Tensor | Sequence[int] | None


def silenced(read: Tensor, heads: Sequence[int]) -> Tensor:
    """What the heads have read (B, H, T, D), with zeros in place of some of them; see `silence.py`."""
    if max(heads) >= read.shape[1]:
        raise OptionError(f"silence(head {max(heads)}): this layer has {read.shape[1]} heads, from 0 up.")
    return read.index_fill(1, torch.tensor(heads, device=read.device), 0.0)


def remember(layer: "MultiHeadAttention", key: Tensor, value: Tensor | None, positions: Places) -> Memory:
    """See `MultiHeadAttention.remember`."""
    value = key if value is None else value
    arguments.check_memory(layer, key, key, value)
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
        raise arguments.misfit("query", query, layer.d_in, "d_in")
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
