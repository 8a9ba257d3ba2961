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

from collections.abc import Callable, Collection
from typing import NamedTuple, Self

from torch import nn

from headwise.errors import HeadCountError
from headwise.layer.positions import Rotary
from headwise.shapes import check_factor, check_size
from headwise.weights import Scoring
from headwise.weights.relative import Relative, RelativeBias

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


# What a layer's small options mean: biases of projections, norms of heads, positions, and what a scoring may say.

PROJECTIONS = ("q", "k", "v", "out")
Norm = str | Callable[[int], nn.Module] | None
Position = Rotary | Relative | RelativeBias | None


def biases(bias: bool | Collection[str], qkv_bias: bool | None) -> dict[str, bool]:
    """Which projections have a bias.

    >>> biases({"q", "v", "out"}, None)
    {'q': True, 'k': False, 'v': True, 'out': True}
    """
    if isinstance(bias, bool):
        first = bias if qkv_bias is None else bool(qkv_bias)
        return {"q": first, "k": first, "v": first, "out": bias}
    if isinstance(bias, str) or not isinstance(bias, Collection) or not set(bias) <= set(PROJECTIONS):
        raise OptionError(
            f"bias={bias!r}: expected True, False, or the projections that have one, such as {{'q', 'v', 'out'}} out "
            f"of {', '.join(PROJECTIONS)}."
        )
    if qkv_bias is not None:
        raise OptionError(f"bias={bias!r} names the projections, and qkv_bias={qkv_bias} as well. Leave out qkv_bias.")
    return {name: name in bias for name in PROJECTIONS}


class WidthNorm(nn.RMSNorm):
    """Root-mean-square normalisation of queries or keys (B, H, T, D), over all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        """Heads of the same shape."""
        B, H, T, D = x.shape
        return super().forward(x.transpose(1, 2).reshape(B, T, H * D)).view(B, T, H, D).transpose(1, 2)


class ZeroCentredNorm(nn.RMSNorm):
    """Root-mean-square normalisation whose weight is stored as its difference from 1, as Gemma stores it.

    >>> ZeroCentredNorm(8).weight.sum().item()
    0.0
    """

    def reset_parameters(self) -> None:
        """Zeros: nothing is scaled."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised in float32 or better."""
        precise = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(precise)
        return torch.nn.functional.rms_norm(x.to(precise), self.normalized_shape, weight, self.eps).to(x.dtype)


def norm(
    qk_norm: Norm, heads: int, head_dim: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module | None:
    """The module that normalises queries or keys."""
    if qk_norm is None:
        return None
    if qk_norm == "head":
        return nn.RMSNorm(head_dim, eps=1e-6, device=device, dtype=dtype)
    if qk_norm == "width":
        return WidthNorm(heads * head_dim, eps=1e-6, device=device, dtype=dtype)
    over_width = getattr(qk_norm, "func", qk_norm) is WidthNorm  # perhaps a partial of it, with another eps
    made = qk_norm(heads * head_dim if over_width else head_dim) if callable(qk_norm) else None
    if not isinstance(made, nn.Module):
        raise OptionError(
            f"qk_norm={qk_norm!r}: expected 'head' (each head by itself, as Qwen 3 and Gemma 3), 'width' (all heads "
            f"together, as OLMo 2), or a function that makes a module for heads of a width, such as nn.LayerNorm."
        )
    return made.to(device=device, dtype=dtype)


def check_position(position: object, num_heads: int, head_dim: int) -> None:
    """Raise unless `position` is an option that fits this layer."""
    if isinstance(position, Rotary):
        position.check(head_dim)
    elif isinstance(position, Relative | RelativeBias):
        rule = position() if isinstance(position, RelativeBias) else position
        rule.check(num_heads, rule.table.device)
    elif position is not None:
        cure = " Did you forget the parentheses?" if callable(position) else ""
        raise OptionError(f"position={position!r}: expected rotary(...), alibi(...) or RelativeBias(...).{cure}")


def check_scoring(scoring: object) -> Scoring:
    """`scoring` as a layer may have it: what fits every call."""
    if not isinstance(scoring, Scoring):
        raise OptionError(f"scoring={scoring!r}: expected Scoring(softcap=..., sinks=True, scale=...).")
    check_factor("scale", scoring.scale, "1 / sqrt(D)")
    check_factor("softcap", scoring.softcap, "no cap")
    given = {"mask": scoring.mask, "bias": scoring.bias, "relative": scoring.relative, "positions": scoring.positions}
    for name, value in given.items():
        if value is not None:
            place = {"mask": "as mask=", "relative": "as position="}.get(name, "with each call")
            raise OptionError(f"Scoring({name}=...) in a layer's scoring=: pass it {place} instead.")
    if isinstance(scoring.sinks, Tensor):
        raise OptionError("Scoring(sinks=tensor) in a layer's scoring=: say sinks=True, then set layer.sinks.data.")
    return scoring


# How wide everything in a layer is, and into how many heads it is cut.


class Widths(NamedTuple):
    """The sizes of one layer, complete and checked."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_in: int  # input of the query
    d_key: int
    d_value: int
    d_out: int

    @property
    def heads_width(self) -> int:
        """All query heads together: d_model, unless heads were given a width of their own."""
        return self.num_heads * self.head_dim

    @property
    def group(self) -> int:
        """How many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def complete(
        cls,
        d_model: int | None,
        num_heads: int | None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_in: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
    ) -> Self:
        """All sizes from those given: an input is as wide as its neighbour before, the output as all heads."""
        if d_model is None or num_heads is None:
            raise OptionError(
                f"MultiHeadAttention(d_model={d_model}, num_heads={num_heads}): both are needed, as in "
                f"MultiHeadAttention(512, 8)."
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        d_in = d_model if d_in is None else d_in
        d_key = d_in if d_key is None else d_key
        d_value = d_key if d_value is None else d_value
        d_out = d_model if d_out is None else d_out
        if head_dim is None:
            check_heads_divide(check_size("d_model", d_model), check_size("num_heads", num_heads))
            head_dim = d_model // num_heads
        given = (d_model, num_heads, num_kv_heads, head_dim, d_in, d_key, d_value, d_out)
        result = cls(*(check_size(name, size) for name, size in zip(cls._fields, given, strict=True)))
        check_heads_share(result.num_heads, result.num_kv_heads)
        return result

    def unmixed(self, d_out: int | None) -> Self:
        """The same without an output projection, where `d_out` was given: the output is the heads side by side."""
        if d_out not in (None, self.heads_width):
            raise OptionError(
                f"out_proj=False returns the heads side by side, {self.heads_width} wide, and d_out={d_out} asks for "
                f"another width. Leave out d_out, or keep the projection."
            )
        return self._replace(d_out=self.heads_width)


def check_heads_divide(d_model: int, num_heads: int) -> None:
    """Raise unless heads are equally wide."""
    if d_model % num_heads:
        divisors = [n for n in range(1, d_model + 1) if d_model % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - num_heads))[:3])
        raise HeadCountError(
            f"d_model={d_model} cannot be cut into num_heads={num_heads} equal heads ({d_model} / {num_heads} = "
            f"{d_model / num_heads:g}). Choose a num_heads that divides {d_model}, such as {', '.join(map(str, near))}."
        )


def check_heads_share(num_heads: int, num_kv_heads: int) -> None:
    """Raise unless equally many query heads share each key/value head."""
    if num_heads % num_kv_heads:
        raise HeadCountError(
            f"num_heads={num_heads} query heads cannot share num_kv_heads={num_kv_heads} key/value heads evenly. "
            f"Choose a num_kv_heads that divides {num_heads}."
        )
