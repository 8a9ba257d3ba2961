"""`MultiHeadAttention`: project, split, attend, merge, project."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import attention, checkpoints, masks, options, packing, ragged, shapes
from headwise.backends import Call, choose
from headwise.cache import KVCache, Memory
from headwise.errors import OptionError, ShapeError
from headwise.map import AttentionMap
from headwise.mask_algebra import Extent, Mask
from headwise.positions import Rotary, check_positions
from headwise.projection import is_plain, project
from headwise.relative import Relative, RelativeBias
from headwise.scoring import Scoring
from headwise.widths import Widths

Three = tuple[Tensor, Tensor, Tensor]
ThreeBiases = Three | tuple[None, None, None]


class MultiHeadAttention(nn.Module):
    """Multi-head attention with one fused projection and a fused kernel.

    >>> mha = MultiHeadAttention(512, 8)
    >>> x, memory = torch.randn(2, 10, 512), torch.randn(2, 7, 512)
    >>> mha(x).shape  # self-attention
    torch.Size([2, 10, 512])
    >>> mha(x, memory, memory).shape  # cross-attention
    torch.Size([2, 10, 512])
    >>> output, weights = mha(x, mask=masks.causal(), return_weights=True)
    >>> weights.shape
    torch.Size([2, 8, 10, 10])

    By position it takes `(d_model, num_heads)`, or the textbook's `(d_in, d_out, context_length, dropout, num_heads,
    qkv_bias)`, the last of which may be named. Where widths are named the textbook's way (`d_out` and no `d_model`),
    its defaults hold: causal, and no QKV bias.

    Args:
        d_model: width of all heads together, and of input and output unless these are given.
        num_heads: query heads; must divide `d_model`.
        num_kv_heads: key/value heads; must divide `num_heads`. Fewer means grouped-query, 1 multi-query attention.
        head_dim: width of a head; `d_model / num_heads` unless given. Then `d_model` is only what goes in and out.
        d_in: width of the query input, and of key and value input unless these are given.
        d_key: width of the key input. Giving it marks a layer for cross-attention: its three projections are stored
            apart, so that no call has to cut the fused one.
        d_value: width of the value input; as `d_key` unless given.
        d_out: width of the output.
        causal: hide from every query the keys after it.
        mask: a mask that every call obeys, in addition to its own.
        dropout: probability with which an attention weight is dropped in training.
        position: `rotary(...)`, `alibi(num_heads)` or a `RelativeBias(num_heads)`, which layers may share.
        scoring: `Scoring(softcap=50.0, sinks=True, scale=0.1)`: what else becomes of a score; sinks=True are learned.
        qk_norm: normalise queries and keys: "head" (each head by itself), "width" (all heads together), or a function
            that makes a module for heads of a width, such as `nn.LayerNorm`.
        bias: whether projections have a bias, or which, such as {"q", "v", "out"}; `qkv_bias` decides for the first
            three alone. Different ones for q, k and v are stored apart.
        out_proj: False leaves out the last projection: the heads are returned side by side, unmixed.
        context_length: longest sequence to accept. Nothing is allocated for it.
        return_weights: what calls return unless they say otherwise.
    """

    out_proj: nn.Linear | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    sinks: nn.Parameter | None
    position: options.Position
    _watchers: tuple[Callable[[AttentionMap], None], ...] = ()  # see `watch.py`

    def __init__(
        self,
        *sizes: Any,
        d_model: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_in: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
        causal: bool | None = None,
        mask: Mask | None = None,
        position: options.Position = None,
        scoring: Scoring | None = None,
        qk_norm: options.Norm = None,
        dropout: float | None = None,
        bias: bool | Collection[str] = True,
        qkv_bias: bool | None = None,
        out_proj: bool = True,
        context_length: int | None = None,
        return_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        named: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, "d_in": d_in, "d_out": d_out}
        named |= {"context_length": context_length, "dropout": dropout, "qkv_bias": qkv_bias}
        named = _by_position(sizes, named)
        d_model, num_heads, d_in, d_out, context_length, dropout, qkv_bias = named.values()
        if d_model is None and d_out is not None:
            d_model = d_out
            causal = True if causal is None else causal
            qkv_bias = False if qkv_bias is None else qkv_bias
        widths = Widths.complete(d_model, num_heads, num_kv_heads, head_dim, d_in, d_key, d_value, d_out)
        if not out_proj and d_out not in (None, widths.heads_width):
            raise OptionError(
                f"out_proj=False returns the heads side by side, {widths.heads_width} wide, and d_out={d_out} asks for "
                f"another width. Leave out d_out, or keep the projection."
            )
        self.d_model, self.num_heads, self.num_kv_heads, self.head_dim = widths[:4]
        self.d_in, self.d_key, self.d_value, self.d_out = widths[4:]
        self.d_out = self.d_out if out_proj else widths.heads_width
        self.heads_width, self.group = widths.heads_width, widths.group
        self.dropout = shapes.check_probability("dropout", 0.0 if dropout is None else dropout)
        self.context_length = None if context_length is None else shapes.check_size("context_length", context_length)
        self.return_weights = return_weights
        self.causal = bool(causal)
        self._scoring = Scoring() if scoring is None else options.check_scoring(scoring)
        self.mask = _constant_mask(self.causal, mask)
        biases = options.biases(bias, qkv_bias)
        self.fused = d_key is None and d_value is None and biases["q"] == biases["k"] == biases["v"]
        self._make_projections(biases, out_proj, device, dtype)
        self._make_options(position, qk_norm, device, dtype)

    @property
    def mask(self) -> Mask | None:
        """What every call obeys, in addition to its own mask."""
        return self._scoring.mask

    @mask.setter
    def mask(self, mask: Mask | None) -> None:
        self._scoring = dataclasses.replace(self._scoring, mask=mask)
        self._mask_fits_all = mask is None or mask.extent == Extent()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the mask's tensors and the slopes along with the parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(self.parameters()).device
        if self.mask is not None and self.mask.tensors():
            self.mask = self.mask.to(device)
        if isinstance(self.position, Relative):
            self.position = self.position.with_table(self.position.table.to(device))
        return self

    def _make_projections(
        self, biases: dict[str, bool], out_proj: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """The linear maps."""
        kv_width = self.num_kv_heads * self.head_dim
        if self.fused:
            # Rows head by head, (Hkv, group + 2, D): the queries of a group, its key, its value. A slice of rows is
            # then a set of whole heads, which is what tensor parallelism cuts.
            self.qkv_proj = nn.Linear(self.d_in, self.heads_width + 2 * kv_width, biases["q"], device, dtype)
        else:
            self.q_proj = nn.Linear(self.d_in, self.heads_width, biases["q"], device, dtype)
            self.k_proj = nn.Linear(self.d_key, kv_width, biases["k"], device, dtype)
            self.v_proj = nn.Linear(self.d_value, kv_width, biases["v"], device, dtype)
        out = nn.Linear(self.heads_width, self.d_out, biases["out"], device, dtype) if out_proj else None
        self.register_module("out_proj", out)

    def _make_options(
        self,
        position: options.Position,
        qk_norm: options.Norm,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Positions, norms and sinks."""
        options.check_position(position, self.num_heads, self.head_dim)
        if isinstance(position, Relative) and device is not None:
            position = position.with_table(position.table.to(device))
        self.position = position
        self.register_module("q_norm", options.norm(qk_norm, self.num_heads, self.head_dim, device, dtype))
        self.register_module("k_norm", options.norm(qk_norm, self.num_kv_heads, self.head_dim, device, dtype))
        learned = torch.zeros(self.num_heads, device=device, dtype=dtype) if self._scoring.sinks else None
        self.register_parameter("sinks", None if learned is None else nn.Parameter(learned))
        # What a call must look at beside mask and scale; most layers have none of it.
        self._shapes_heads = isinstance(position, Rotary) or qk_norm is not None
        self._extends_scoring = learned is not None or isinstance(position, Relative | RelativeBias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | Memory | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Tensor | None = None,
        causal: bool | None = None,
        positions: Tensor | Sequence[int] | None = None,
        key_positions: Tensor | Sequence[int] | None = None,
        cache: KVCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        return_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, AttentionMap]:
        """The output (B, T, d_out); with `return_weights` also the weights (B, H, T, S) from before dropout, as an
        `AttentionMap`: the same kernel runs, and weights are computed only where they are looked at.

        Args:
            query: (B, T, d_in).
            key: (B, S, d_key); the query itself unless given; or what `remember` made of it. `mha(x, mask)` works too:
                what has three dimensions is a key, anything else a mask.
            value: (B, S, d_value); the key unless given.
            mask: a mask, or a tensor of bool or 0/1 (True may attend), (T, S) or (B or 1, H or 1, T or 1, S or 1).
            bias: float of the same shapes, added to the scaled scores.
            causal: True hides from every query the keys after it in this call.
            positions: where queries stand in the text, (T,) or (B, T), for a rotary; 0, 1, 2, ... after what the cache
                holds, unless given. In self-attention also those of the keys.
            key_positions: the same for keys, needed in cross-attention with a rotary.
            cache: from `make_cache`; the new keys and values are taken in, and queries see all of them.
            lengths: (B,), with a cache: how many of a sample's T tokens are real; the rest is padding on the right.
            return_weights: as the layer was made, unless given.

        A jagged nested tensor (B, *, d_in) works as query: its samples are packed, and no padding is computed.
        """
        if isinstance(query, Tensor) and query.is_nested:
            refused = {"value": value, "mask": mask, "bias": bias, "positions": positions, "cache": cache}
            packed = ragged.Packed.of(query, key, **refused, key_positions=key_positions, lengths=lengths)
            at = packed.positions if isinstance(self.position, Rotary) else None
            found = self(packed.tokens, mask=packed.mask, positions=at, causal=causal, return_weights=return_weights)
            return (packed.nested(found[0]), found[1]) if isinstance(found, tuple) else packed.nested(found)
        extra: dict[str, Any] = {"positions": positions, "key_positions": key_positions}
        extra |= {"cache": cache, "lengths": lengths}
        call = self.plan(query, key, value, mask, bias=bias, causal=causal, **extra)
        wanted = self.return_weights if return_weights is None else return_weights
        if wanted or self._watchers:
            heads, lse = choose(call).run_with_lse(call)
            weights = AttentionMap(call.query, call.key, call.scoring, lse)
            for watcher in self._watchers:
                watcher(weights)
        else:
            heads = choose(call).run(call)
        B, _, T, _ = heads.shape
        # (B, T, H·D): a view, since kernels write (B, T, H, D); for one token both orders are the same.
        output = heads.reshape(B, 1, self.heads_width) if T == 1 else heads.transpose(1, 2).flatten(2)
        out_proj = self._modules["out_proj"]
        if out_proj is not None:
            output = project(out_proj, output)
        return (output, weights) if wanted else output

    def plan(
        self,
        query: Tensor,
        key: Tensor | Memory | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Tensor | None = None,
        causal: bool | None = None,
        positions: Tensor | Sequence[int] | None = None,
        key_positions: Tensor | Sequence[int] | None = None,
        cache: KVCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
    ) -> Call:
        """The attention call that `forward` makes of these inputs: heads, scoring and dropout, ready to run."""
        memory = key if isinstance(key, Memory) else None
        if memory is None and key is not None and value is None:
            key, value, mask = _key_or_mask(key, mask)  # type: ignore[arg-type]
        if cache is not None or lengths is not None:
            _check_cached(cache, lengths, key)
        q, k, v = self._heads(query, key, value) if memory is None else self._with_memory(query, memory, value)  # type: ignore[arg-type]
        if self._shapes_heads or positions is not None or key_positions is not None:
            crossing = memory is not None or (key is not None and key is not query)
            q, k = self._shaped(q, k, positions, key_positions, cache, crossing, memory is not None)
        appended = None
        if cache is not None:
            appended = cache.append(k, v, lengths)
            k, v = appended.key, appended.value
        scoring = self._scoring
        if mask is not None or bias is not None or causal is not None:
            scoring = self._call_scoring(q, k, mask, bias, causal)
        elif not self._mask_fits_all and self.mask is not None:
            self.mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
        if appended is not None and appended.positions is not None:
            scoring = dataclasses.replace(scoring, mask=appended.mask(scoring.mask), positions=appended.positions)
        if self._extends_scoring:
            rule = self.position() if isinstance(self.position, RelativeBias) else self.position
            scoring = dataclasses.replace(
                scoring, sinks=self.sinks, relative=rule if isinstance(rule, Relative) else None
            )
        return Call(q, k, v, scoring, self.dropout if self.training else 0.0)

    def make_cache(
        self,
        batch: int,
        *,
        capacity: int | None = None,
        static: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache for this layer: `mha(x, cache=cache)`. Under a causal sliding window it stays bounded.

        Args:
            batch: samples.
            capacity: most tokens; it grows without end unless given.
            static: keep shapes constant, for `torch.compile` and CUDA graphs.
            device: the layer's own unless given.
            dtype: likewise; name the autocast dtype where the layer runs under autocast.
        """
        like = next(self.parameters())
        reach = None if static else masks.reach_back(self.mask)
        return KVCache(
            batch,
            self.num_kv_heads,
            self.head_dim,
            capacity=capacity if reach is None else None,
            window=reach,
            static=static,
            device=like.device if device is None else device,
            dtype=like.dtype if dtype is None else dtype,
        )

    def remember(
        self, key: Tensor, value: Tensor | None = None, *, positions: Tensor | Sequence[int] | None = None
    ) -> Memory:
        """Keys and values of an encoder's output, projected once: `mha(x, memory)` for every further token.

        Args:
            key: (B, S, d_key).
            value: (B, S, d_value); the key unless given.
            positions: where the keys stand, (S,) or (B, S), for a rotary.
        """
        value = key if value is None else value
        self._check_memory(key, key, value)
        if self.fused and not is_plain(self.qkv_proj):
            k, v = self._fused_heads(key)[1], self._fused_heads(value)[2]
        elif self.fused:
            (_, *weights), (_, *biases) = self.projections()
            k, v = (
                self._split(F.linear(*x), self.num_kv_heads) for x in zip((key, value), weights, biases, strict=True)
            )
        else:
            k, v = (self._split(project(*x), self.num_kv_heads) for x in ((self.k_proj, key), (self.v_proj, value)))
        k = k if self.k_norm is None else self.k_norm(k)
        if isinstance(self.position, Rotary):
            if positions is None:
                raise OptionError(
                    "this layer has a rotary: pass remember(memory, positions=...), where the keys stand."
                )
            k = self.position.turn(k, check_positions("positions", positions, k.shape[0], k.shape[2], k.device))
        return Memory(k, v)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        """(B, T, heads · D) as (B, heads, T, D)."""
        split: Tensor = x.unflatten(-1, (heads, self.head_dim))
        return split.transpose(1, 2)

    def _with_memory(self, query: Tensor, memory: Memory, value: Tensor | None) -> Three:
        """Query heads, and the keys and values that `remember` has projected."""
        if value is not None:
            raise OptionError("value is given beside remembered keys, which bring their values along. Leave it out.")
        if not isinstance(query, Tensor) or query.dim() != 3 or query.shape[2] != self.d_in:
            raise _misfit("query", query, self.d_in, "d_in")
        if memory.key.shape[0] != query.shape[0] or memory.key.shape[1::2] != (self.num_kv_heads, self.head_dim):
            raise ShapeError(
                f"remembered keys of shape {tuple(memory.key.shape)} do not fit a query of {query.shape[0]} samples "
                f"and {self.num_kv_heads} key heads {self.head_dim} wide. Make them with this layer's remember(...)."
            )
        if self.fused and not is_plain(self.qkv_proj):
            return self._fused_heads(query)[0], *memory
        if self.fused:
            weights, biases = self.projections()
            return self._split(F.linear(query, weights[0], biases[0]), self.num_heads), *memory
        return self._split(project(self.q_proj, query), self.num_heads), *memory

    def _shaped(
        self,
        q: Tensor,
        k: Tensor,
        positions: Tensor | Sequence[int] | None,
        key_positions: Tensor | Sequence[int] | None,
        cache: KVCache | None,
        crossing: bool,
        remembered: bool,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys normalised and turned; remembered keys are so already."""
        if self.q_norm is not None:
            q, k = self.q_norm(q), k if remembered or self.k_norm is None else self.k_norm(k)
        if not isinstance(self.position, Rotary):
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
            return self.position.turn(q, at), k
        keys_at = at if key_positions is None else check_positions("key_positions", key_positions, B, S, k.device)
        return self.position.turn(q, at), self.position.turn(k, keys_at)

    def _heads(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Three:
        """Steps 1 to 3: query (B, H, T, D), key and value (B, Hkv, S, D), as views of the projections."""
        self._check(query, key, value)
        if self.fused and (key is None or (key is query and value is query)):
            return self._fused_heads(query)
        key = query if key is None else key
        value = key if value is None else value
        if self.fused and not is_plain(self.qkv_proj):  # an adapter or a hook must see every input
            return self._fused_heads(query)[0], self._fused_heads(key)[1], self._fused_heads(value)[2]
        if self.fused:  # cut the fused weight: a copy as large as the weight
            shapes.check_alike(input=query, weight=self.qkv_proj.weight)
            weights, biases = self.projections()
            q, k, v = map(F.linear, (query, key, value), weights, biases)
        else:
            q, k, v = project(self.q_proj, query), project(self.k_proj, key), project(self.v_proj, value)
        return self._split(q, self.num_heads), self._split(k, self.num_kv_heads), self._split(v, self.num_kv_heads)

    def _fused_heads(self, x: Tensor) -> Three:
        """Heads of self-attention out of one matrix product."""
        B, T, _ = x.shape
        D, Hkv, group = self.head_dim, self.num_kv_heads, self.group
        linear = self._modules["qkv_proj"]  # self.qkv_proj would take 0.6 µs to look up
        qkv = project(linear, x)  # type: ignore[arg-type]
        if group == 1 and not torch.is_grad_enabled():  # three views in one call; one token needs no transpose
            split = qkv.view(B, Hkv, 3, 1, D) if T == 1 else qkv.view(B, T, Hkv, 3, D).permute(0, 2, 3, 1, 4)
            q, k, v = split.unbind(2)
            return q, k, v
        # Split first and transpose then, so that one contiguous copy joins the three gradients.
        q, k, v = qkv.view(B, T, Hkv, (group + 2) * D).split((group * D, D, D), dim=-1)
        q = q if group == 1 else q.reshape(B, T, self.num_heads, D)  # groups lie apart: no view can join them
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def projections(self) -> tuple[Three, ThreeBiases]:
        """Weights (H·D, d_in), (Hkv·D, d_key), (Hkv·D, d_value) of query, key and value, and their biases.

        Heads in order, as in the textbooks, however this layer stores them.
        """
        if not self.fused:
            linears = (self.q_proj, self.k_proj, self.v_proj)
            return tuple(x.weight for x in linears), tuple(x.bias for x in linears)  # type: ignore[return-value]
        weights = packing.unpack(self.qkv_proj.weight, self.num_heads, self.num_kv_heads)
        bias: Tensor | None = self.qkv_proj.bias
        if bias is None:
            return weights, (None, None, None)
        return weights, packing.unpack(bias, self.num_heads, self.num_kv_heads)

    def _call_scoring(
        self, q: Tensor, k: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, causal: bool | None
    ) -> Scoring:
        """The scoring of one call: what the layer always hides, and what this call adds."""
        always = self.mask
        if causal is False and self.causal:
            raise OptionError(
                "causal=False cannot lift what this layer was made with (causal=True). Make the layer without it."
            )
        if causal:
            always = masks.causal() if always is None else always & masks.causal()
        found = attention.scoring_for(q, k, mask, bias, always, None)
        return dataclasses.replace(self._scoring, mask=found.mask, bias=found.bias)

    def _check(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> None:
        """Raise unless the inputs have shapes that fit this layer and each other."""
        if not isinstance(query, Tensor) or query.dim() != 3 or query.shape[2] != self.d_in:
            raise _misfit("query", query, self.d_in, "d_in")
        longest = query.shape[1]
        if key is not None and not (key is query and value is query):
            longest = max(longest, self._check_memory(query, key, key if value is None else value))
        elif key is None and value is not None:
            raise ShapeError("value is given without key; pass mha(query, key, value), or mha(x).")
        elif not self.d_in == self.d_key == self.d_value:
            raise ShapeError(
                f"this layer takes queries {self.d_in} wide, keys {self.d_key} and values {self.d_value}, so one input "
                f"cannot be all three. Pass mha(query, key, value)."
            )
        if self.context_length is not None and longest > self.context_length:
            raise ShapeError(
                f"the sequence has {longest} tokens and this layer was made for context_length="
                f"{self.context_length}. Make it longer, or leave context_length out: nothing is allocated for it."
            )

    def _check_memory(self, query: Tensor, key: Tensor, value: Tensor) -> int:
        """S, after checking keys and values of their own."""
        for name, x, width in (("key", key, self.d_key), ("value", value, self.d_value)):
            if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width:
                raise _misfit(name, x, width, f"d_{name}")
        shapes.check_alike(query=query, key=key, value=value)
        if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
            raise ShapeError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}: expected "
                f"(B, T, E), (B, S, E), (B, S, E) with one batch size B, and as many values as keys."
            )
        return key.shape[1]

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        num_heads: int | None = None,
        *,
        prefix: str = "",
        **options: Any,
    ) -> Self:
        """A layer with the weights of somebody's attention, giving the same output to rounding.

        Known layouts: `W_q, W_k, W_v, W_o`; `W_query, W_key, W_value, out_proj` with or without its mask buffer; a list
        `heads.0.W_query, ...` without output projection; `torch.nn.MultiheadAttention`; and our own.

        Args:
            state_dict: names to tensors.
            num_heads: needed where the layout does not tell it; only a list of heads does.
            prefix: where the layer's names begin, such as "blocks.0.attention.".
            options: further arguments of the layer. What is no tensor must be said here: `dropout`, and `causal` or
                `mask` unless a causal mask is stored. What the tensors determine cannot be changed by options.
        """
        found = checkpoints.read(state_dict, num_heads, prefix, options.get("num_kv_heads"))
        first = found.state["q_proj.weight"]
        arguments: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
        layer = cls(**arguments | checkpoints.merge(found.options, options))
        layer.load_state_dict(checkpoints.arrange(found, layer.fused), strict=True)
        return layer

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        parts = [f"{self.d_model}, {self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        for name, usual in (
            ("d_in", self.d_model),
            ("d_key", self.d_in),
            ("d_value", self.d_key),
            ("d_out", self.d_model),
        ):
            if getattr(self, name) != usual:
                parts.append(f"{name}={getattr(self, name)}")
        if self.heads_width != self.d_model:
            parts.append(f"head_dim={self.head_dim}")
        if self.mask is not None:
            parts.append(f"mask={self.mask!r}")
        if self.position is not None and not isinstance(self.position, nn.Module):
            parts.append(f"position={type(self.position).__name__.lower()}")
        if self._scoring.softcap is not None:
            parts.append(f"softcap={self._scoring.softcap:g}")
        if self._scoring.scale is not None:
            parts.append(f"scale={self._scoring.scale:g}")
        if self.sinks is not None:
            parts.append("sinks=True")
        if self.dropout:
            parts.append(f"dropout={self.dropout:g}")
        if self.context_length is not None:
            parts.append(f"context_length={self.context_length}")
        return ", ".join(parts)


TEXTBOOK = ("d_in", "d_out", "context_length", "dropout", "num_heads", "qkv_bias")


def _by_position(sizes: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
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


def _constant_mask(causal: bool, mask: Mask | None) -> Mask | None:
    if mask is not None and not isinstance(mask, Mask):
        raise OptionError(
            f"mask={type(mask).__name__}: a layer's own mask must fit every length; pass a mask such as causal(), and "
            f"tensors with the call."
        )
    if not causal:
        return mask
    return masks.causal() if mask is None else masks.causal() & mask


def _key_or_mask(
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


def _check_cached(cache: KVCache | None, lengths: object, key: object) -> None:
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


def _misfit(name: str, x: Any, width: int, option: str) -> Exception:
    if isinstance(x, Mask):
        return ShapeError(f"{name} is the mask {x!r}; pass it as mask=.")
    shapes.check_tensor(name, x)
    if x.dim() != 3:
        cure = "For one sequence without a batch axis pass x[None]." if name == "query" else "A mask goes into mask=."
        return ShapeError(
            f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; expected 3, (B, T, {width}). {cure}"
        )
    cure = "" if name == "query" else " A mask (B, T, S) is passed as mask=mask[:, None]."
    return ShapeError(
        f"{name} of shape {tuple(x.shape)} is {x.shape[2]} wide; this layer was made for {option}={width}.{cure}"
    )
