"""What a layer is made and called with: which argument is which, and whether it fits, said in our words where not."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headwise import masks, shapes
from headwise.errors import OptionError, ShapeError, UnknownOptionError
from headwise.layer.cache import KVCache
from headwise.masks import Mask

if TYPE_CHECKING:
    from headwise.layer.layer import MultiHeadAttention

TEXTBOOK = ("d_in", "d_out", "context_length", "dropout", "num_heads", "qkv_bias")


def by_position(sizes: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Named arguments and those given by position, as (d_model, num_heads) or in the textbook's order, together."""
    plain = len(sizes) < 2 or (len(sizes) == 2 and named["num_heads"] is None)
    names = ("d_model", "num_heads") if plain else TEXTBOOK
    if len(sizes) > len(names) or (not plain and len(sizes) < 5 and named["num_heads"] is None):
        raise OptionError(
            f"MultiHeadAttention got {len(sizes)} positional arguments; expected (d_model, num_heads), or the "
            f"textbook's (d_in, d_out, context_length, dropout, num_heads[, qkv_bias])."
        )
    for name, value in zip(names, sizes, strict=False):
        if named[name] is not None:
            raise OptionError(f"{name} is given twice: {value!r} by position and {name}={named[name]!r}.")
    return named | dict(zip(names, sizes, strict=False))


ELSEWHERE = {
    "embed_dim": "d_model=",
    "hidden_size": "d_model=",
    "n_heads": "num_heads=",
    "nhead": "num_heads=",
    "kdim": "d_key=",
    "vdim": "d_value=",
    "batch_first": "nothing: the batch is always first",
    "attn_mask": "mask=~attn_mask if it is bool (True sees here), bias=attn_mask if it is float",
    "key_padding_mask": "mask=padding(~key_padding_mask), True for real tokens",
    "attention_mask": "mask=padding(attention_mask), 1 for real tokens",
    "need_weights": "return_weights=",
    "average_attn_weights": "return_weights=True and weights.mean(1)",
    "is_causal": "causal=",
    "softcap": "scoring=Scoring(softcap=...)",
    "sinks": "scoring=Scoring(sinks=True)",
    "scale": "scoring=Scoring(scale=...)",
}


def check_known(what: str, unknown: dict[str, Any], known: Iterable[str]) -> None:
    """Raise if there are options nobody knows, with the name they have here."""
    if not unknown:
        return
    name = next(iter(unknown))
    near = difflib.get_close_matches(name, list(known), 1)
    cure = f"Here it is {ELSEWHERE[name]}." if name in ELSEWHERE else f"Did you mean {near[0]}=?" if near else ""
    raise UnknownOptionError(f"{what} has no option {name}=. {cure}".rstrip())


def check_flag(name: str, value: object) -> bool:
    """`value` as True or False, refused if it is anything else."""
    if value is not None and value is not True and value is not False:
        raise OptionError(f"{name}={value!r}: expected True or False.")
    return bool(value)


def constant_mask(causal: bool, mask: object) -> Mask | None:
    """The mask that every call of a layer obeys."""
    if mask is not None and not isinstance(mask, Mask):
        cure = "did you forget the parentheses? " if callable(mask) else ""
        raise OptionError(
            f"mask={type(mask).__name__}: expected a mask that fits every length, such as causal() & window(128); "
            f"{cure}Tensors are passed with each call."
        )
    if not causal:
        return mask
    return masks.causal() if mask is None else masks.causal() & mask


def key_or_mask(
    second: Tensor | Mask, mask: Mask | Tensor | None
) -> tuple[Tensor | None, Tensor | None, Mask | Tensor | None]:
    """key, value and mask of `mha(x, second)`: what has three dimensions is a key, anything else a mask."""
    if isinstance(second, Tensor) and second.dim() == 3 and second.dtype != torch.bool:
        return second, second, mask
    if mask is not None:
        raise ShapeError(
            f"the second argument is not a key (B, S, E) but {_describe(second)}, and a mask is given as well. "
            f"Pass one mask, as mask=."
        )
    return None, None, second


def check_cached(cache: KVCache | None, key: object) -> None:
    """Raise unless cache and lengths go with this call."""
    if cache is None:
        raise OptionError("lengths= says how many tokens enter a cache, and no cache= is given. To hide padding, pass "
                          "mask=padding(lengths).")  # fmt: skip
    if not isinstance(cache, KVCache):
        raise OptionError(f"cache={type(cache).__name__}: expected a KVCache, from layer.make_cache(batch).")
    if key is not None:
        raise OptionError(
            "a cache is for self-attention, and keys of their own are given. Project an encoder's output once with "
            "layer.remember(memory) and pass that as key."
        )


def _describe(x: object) -> str:
    return f"a tensor of shape {tuple(x.shape)} and {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def misfit(name: str, x: Any, width: int, option: str) -> Exception:
    """What is wrong with an input that is not (B, T, width)."""
    if isinstance(x, Mask):
        return ShapeError(f"{name} is the mask {x!r}; pass it as mask=.")
    shapes.check_tensor(name, x)
    if x.dim() == 2 and not x.is_floating_point():
        return ShapeError(
            f"{name} of shape {tuple(x.shape)} and {x.dtype}: token ids must go through an embedding first; expected "
            f"(B, T, {width})."
        )
    if x.dim() != 3:
        cure = "For one sequence without a batch axis pass x[None]." if name == "query" else "A mask goes into mask=."
        return ShapeError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; expected 3, (B, T, {width}). {cure}"
        )
    cure = "" if name == "query" else " A mask (B, T, S) is passed as mask=mask[:, None]."
    return ShapeError(
        f"{name} of shape {tuple(x.shape)} is {x.shape[2]} wide; this layer was made for {option}={width}.{cure}"
    )


def check(layer: "MultiHeadAttention", query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
    """Raise unless the inputs have shapes that fit this layer and each other."""
    if not isinstance(query, Tensor) or query.dim() != 3 or query.shape[2] != layer.d_in:
        raise misfit("query", query, layer.d_in, "d_in")
    if key is not None and not (key is query and value is query):
        check_memory(layer, query, key, key if value is None else value)
    elif key is None and value is not None:
        raise ShapeError("value is given without key; pass mha(query, key, value), or mha(x).")
    elif not layer.d_in == layer.d_key == layer.d_value:
        raise ShapeError(
            f"this layer takes queries {layer.d_in} wide, keys {layer.d_key} and values {layer.d_value}, so one input "
            f"cannot be all three. Pass mha(query, key, value)."
        )


def check_length(most: int, query: Tensor, S: int, cache: KVCache | None) -> None:
    """Raise if a text is longer than the layer was made for; the room of a static cache is no text."""
    longest = query.shape[1] if cache is not None and cache.static else max(query.shape[1], S)
    if longest > most:
        raise ShapeError(
            f"the sequence has {longest} tokens and this layer was made for context_length={most}. Make it longer, or "
            f"leave context_length out: nothing is allocated for it."
        )


def check_memory(layer: "MultiHeadAttention", query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless keys and values of their own fit."""
    for name, x, width in (("key", key, layer.d_key), ("value", value, layer.d_value)):
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width:
            raise misfit(name, x, width, f"d_{name}")
    shapes.check_alike(query=query, key=key, value=value)
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        raise ShapeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}: expected "
            f"(B, T, E), (B, S, E), (B, S, E) with one batch size B, and as many values as keys."
        )
