"""The arguments of one call of a layer: which is which, whether they fit, and nested tensors packed into one row."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, Unpack, overload

import torch
from torch import Tensor

from headwise import shapes
from headwise.errors import OptionError, ShapeError
from headwise.layer.cache import KVCache, Memory
from headwise.masks import Mask, documents
from headwise.weights import AttentionMap

Positions = Tensor | Sequence[int] | None


class CallOptions(TypedDict, total=False):
    """The keyword-only arguments of a call."""

    attn_bias: Tensor | None
    causal: bool | None
    positions: Positions
    key_positions: Positions
    cache: KVCache | None
    lengths: Sequence[int] | Tensor | None


class LayerCall(Protocol):
    """The types of a call of a layer: a tensor, or with `return_weights=True` a pair."""

    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor | Memory | KVCache | Mask | None = ...,
        value: Tensor | None = ...,
        mask: Mask | Tensor | None = ...,
        *,
        return_weights: Literal[False] | None = ...,
        **options: Unpack[CallOptions],
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
        query: Tensor,
        key: Tensor | Memory | KVCache | Mask | None = ...,
        value: Tensor | None = ...,
        mask: Mask | Tensor | None = ...,
        *,
        return_weights: Literal[True],
        **options: Unpack[CallOptions],
    ) -> tuple[Tensor, AttentionMap]: ...


class LayerInputs(NamedTuple):
    """What one call of a layer receives; `MultiHeadAttention.forward` describes each argument."""

    query: Tensor
    key: Tensor | Memory | KVCache | None = None
    value: Tensor | None = None
    mask: Mask | Tensor | None = None
    attn_bias: Tensor | None = None
    causal: bool | None = None
    positions: Positions = None
    key_positions: Positions = None
    cache: KVCache | None = None
    lengths: Sequence[int] | Tensor | None = None
    shares: bool = False  # whether another layer has appended these tokens to the cache
    offsets: Tensor | None = None  # (B + 1,): where each sample starts, if they were packed into one row

    @property
    def crossing(self) -> bool:
        """Whether the keys come from another input than the queries."""
        return self.key is not None and self.key is not self.query and not self.shares

    def resolved(self) -> "LayerInputs":
        """The same inputs after telling `mha(x, mask)` from `mha(x, key)` and checking the cache."""
        inputs = self
        if isinstance(self.key, KVCache):
            return self._sharing(self.key)
        if self.key is not None and self.value is None and not isinstance(self.key, Memory):
            inputs = self._key_or_mask(self.key)
        if self.cache is not None or self.lengths is not None:
            _check_cached(self.cache, inputs.key)
        return inputs

    def _key_or_mask(self, second: Tensor | Mask) -> "LayerInputs":
        """In `mha(x, second)`, a tensor of three dimensions is a key; anything else is a mask."""
        if isinstance(second, Tensor) and second.dim() == 3 and second.dtype != torch.bool:
            return self._replace(value=second)
        if self.mask is not None:
            given = f"a {type(second).__name__}"
            if isinstance(second, Tensor):
                given = f"a tensor of shape {tuple(second.shape)} and {second.dtype}"
            raise ShapeError(
                f"the second argument is not a key (B, S, E) but {given}, and a mask is given as well. Pass one mask, "
                f"as mask=."
            )
        return self._replace(key=None, mask=second)

    def _sharing(self, cache: KVCache) -> "LayerInputs":
        """In `mha(x, cache)`, the keys and values are those that another layer has appended for the same tokens."""
        for name in ("value", "cache", "key_positions"):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name}= does not go with mha(x, cache), which reads the keys and values that another layer has "
                    f"appended. Leave it out; to append, pass mha(x, cache=cache)."
                )
        return self._replace(key=None, cache=cache, shares=True)

    # Samples of different lengths without padding.

    def packed(self, context_length: int | None, always: Mask | None, numbered: bool) -> "LayerInputs":
        """The samples of a jagged nested tensor (B, *, E) in one row, where each sample sees only itself.

        Args:
            context_length: the longest sample to accept.
            always: the layer's own mask.
            numbered: whether to number the tokens of each sample from 0, for a rotary.
        """
        self._check_nested(always)
        x = self.query
        if x.lengths() is not None:  # type: ignore[attr-defined]
            x = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)  # without the holes
        offsets: Tensor = x.offsets()  # type: ignore[attr-defined]
        lengths, tokens = offsets.diff(), x.values()
        total, longest = tokens.shape[0], int(lengths.max()) if lengths.numel() else 0
        if context_length is not None and longest > context_length:
            raise ShapeError(
                f"the longest sample has {longest} tokens and this layer was made for context_length="
                f"{context_length}. Make it longer, or leave context_length out."
            )
        samples = torch.arange(len(lengths), device=tokens.device)
        ids = torch.repeat_interleave(samples, lengths, output_size=total)
        positions = torch.arange(total, device=tokens.device) - offsets[:-1][ids] if numbered else None
        return LayerInputs(tokens[None], mask=documents(ids), causal=self.causal, positions=positions, offsets=offsets)

    def _check_nested(self, always: Mask | None) -> None:
        x = self.query
        if x.layout != torch.jagged or x.dim() != 3 or x._ragged_idx != 1:  # type: ignore[attr-defined]
            raise ShapeError(
                "a nested tensor that is not (B, *, E) in jagged layout; expected "
                "torch.nested.nested_tensor([(t, E), ...], layout=torch.jagged)."
            )
        if self.key is not None and self.key is not x:
            raise OptionError("nested tensors are for self-attention: mha(x). Pad them for mha(query, key, value).")
        for name in ("value", "mask", "attn_bias", "positions", "key_positions", "cache", "lengths"):
            if getattr(self, name) is not None:
                raise OptionError(
                    f"{name}= does not go with a nested tensor: leave it out. The layer's own mask and causal= apply."
                )
        if always is not None and not always.banded:
            raise OptionError(
                f"this layer's mask {always!r} refers to single keys by number, and packing renumbers them. Pad the "
                f"samples, or use masks that depend on distance alone: causal(), window(...)."
            )


def _check_cached(cache: KVCache | None, key: object) -> None:
    if cache is None:
        raise OptionError(
            "lengths= says how many tokens enter a cache, and no cache= is given. To hide padding, pass "
            "mask=padding(lengths)."
        )
    if not isinstance(cache, KVCache):
        raise OptionError(f"cache={type(cache).__name__}: expected a KVCache, from layer.make_cache(batch).")
    if key is not None:
        raise OptionError(
            "a cache is for self-attention, and a separate key is given. Project an encoder's output once with "
            "layer.remember(memory) and pass that as key."
        )


def misfit(name: str, x: Any, width: int, option: str) -> Exception:
    """The error for an input that is not (B, T, width)."""
    if isinstance(x, Mask):
        return ShapeError(f"{name} is the mask {x!r}; pass it as mask=.")
    shapes.check_tensor(name, x)
    if x.dim() == 2 and not x.is_floating_point():
        return ShapeError(
            f"{name} of shape {tuple(x.shape)} and {x.dtype}: token ids must go through an embedding first; expected "
            f"(B, T, {width})."
        )
    if x.dim() != 3:
        cure = "For one sequence without a batch axis pass x[None]." if name == "query" else "Pass a mask as mask=."
        return ShapeError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; expected 3, (B, T, {width}). {cure}"
        )
    cure = "" if name == "query" else " A mask (B, T, S) is passed as mask=mask[:, None]."
    return ShapeError(
        f"{name} of shape {tuple(x.shape)} is {x.shape[2]} wide; this layer was made for {option}={width}.{cure}"
    )


def check_keys(query: Tensor, key: Tensor, value: Tensor, d_key: int, d_value: int) -> None:
    """Raise unless separate keys and values fit the layer's widths and the query's batch."""
    for name, x, width in (("key", key, d_key), ("value", value, d_value)):
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width:
            raise misfit(name, x, width, f"d_{name}")
    shapes.check_alike(query=query, key=key, value=value)
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        raise ShapeError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}: expected "
            f"(B, T, E), (B, S, E), (B, S, E) with one batch size B, and as many values as keys."
        )


def check_memory(query: Tensor, memory: Memory, value: object, stored: tuple[int, int, int]) -> None:
    """Raise unless remembered keys fit the query and the layer, which stores (heads, key_dim, value_dim)."""
    if value is not None:
        raise OptionError("value is given together with remembered keys, which include their values. Leave it out.")
    heads, key_dim, _ = stored
    if memory.key.shape[0] != query.shape[0] or memory.key.shape[1::2] != (heads, key_dim):
        raise ShapeError(
            f"remembered keys of shape {tuple(memory.key.shape)} do not fit a query of {query.shape[0]} samples "
            f"and {heads} key heads {key_dim} wide. Make them with this layer's remember(...)."
        )


def check_length(most: int, T: int, S: int, cache: KVCache | None) -> None:
    """Raise if a text is longer than the layer was made for; the capacity of a static cache does not count."""
    longest = T if cache is not None and cache.static else max(T, S)
    if longest > most:
        raise ShapeError(
            f"the sequence has {longest} tokens and this layer was made for context_length={most}. Make it longer, or "
            f"leave context_length out: nothing is allocated for it."
        )
