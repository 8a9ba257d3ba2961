"""`MultiHeadAttention`: project, split, attend, merge, project."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import attention, checkpoints, masks, packing, shapes
from headwise.backends import Call, choose
from headwise.errors import OptionError, ShapeError
from headwise.map import AttentionMap
from headwise.mask_algebra import Extent, Mask
from headwise.projection import is_plain, project
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
        d_in: width of the query input, and of key and value input unless these are given.
        d_key: width of the key input. Giving it marks a layer for cross-attention: its three projections are stored
            apart, so that no call has to cut the fused one.
        d_value: width of the value input; as `d_key` unless given.
        d_out: width of the output.
        causal: hide from every query the keys after it.
        mask: a mask that every call obeys, in addition to its own.
        dropout: probability with which an attention weight is dropped in training.
        bias: whether projections have a bias; `qkv_bias` decides for the first three alone.
        out_proj: False leaves out the last projection: the heads are returned side by side, unmixed.
        context_length: longest sequence to accept. Nothing is allocated for it.
        return_weights: what calls return unless they say otherwise.
    """

    out_proj: nn.Linear | None
    _watchers: tuple[Callable[[AttentionMap], None], ...] = ()  # see `watch.py`

    def __init__(
        self,
        *sizes: Any,
        d_model: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        d_in: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
        causal: bool | None = None,
        mask: Mask | None = None,
        dropout: float | None = None,
        bias: bool = True,
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
        widths = Widths.complete(d_model, num_heads, num_kv_heads, d_in, d_key, d_value, d_out)
        if not out_proj and widths.d_out != widths.d_model:
            raise OptionError(
                f"out_proj=False returns the heads side by side, {d_model} wide, and d_out={d_out} asks for another "
                f"width. Leave out d_out, or keep the projection."
            )
        self.d_model, self.num_heads, self.num_kv_heads, self.d_in, self.d_key, self.d_value, self.d_out = widths
        self.head_dim, self.group = widths.head_dim, widths.group
        self.dropout = shapes.check_probability("dropout", 0.0 if dropout is None else dropout)
        self.context_length = None if context_length is None else shapes.check_size("context_length", context_length)
        self.return_weights = return_weights
        self.causal = bool(causal)
        self.mask = _constant_mask(self.causal, mask)
        self.fused = d_key is None and d_value is None
        self._make_projections(bias if qkv_bias is None else qkv_bias, bias if out_proj else None, device, dtype)

    @property
    def mask(self) -> Mask | None:
        """What every call obeys, in addition to its own mask."""
        return self._scoring.mask

    @mask.setter
    def mask(self, mask: Mask | None) -> None:
        self._scoring = Scoring(mask)
        self._mask_fits_all = mask is None or mask.extent == Extent()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the mask's tensors along with the parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.mask is not None and self.mask.tensors():
            self.mask = self.mask.to(next(self.parameters()).device)
        return self

    def _make_projections(
        self, qkv_bias: bool, out_bias: bool | None, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        """The linear maps; without the last one where `out_bias` is None."""
        kv_width = self.num_kv_heads * self.head_dim
        if self.fused:
            # Rows head by head, (Hkv, group + 2, D): the queries of a group, its key, its value. A slice of rows is
            # then a set of whole heads, which is what tensor parallelism cuts.
            self.qkv_proj = nn.Linear(self.d_in, self.d_model + 2 * kv_width, qkv_bias, device, dtype)
        else:
            self.q_proj = nn.Linear(self.d_in, self.d_model, qkv_bias, device, dtype)
            self.k_proj = nn.Linear(self.d_key, kv_width, qkv_bias, device, dtype)
            self.v_proj = nn.Linear(self.d_value, kv_width, qkv_bias, device, dtype)
        out = None if out_bias is None else nn.Linear(self.d_model, self.d_out, out_bias, device, dtype)
        self.register_module("out_proj", out)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Tensor | None = None,
        causal: bool | None = None,
        return_weights: bool | None = None,
    ) -> Tensor | tuple[Tensor, AttentionMap]:
        """The output (B, T, d_out); with `return_weights` also the weights (B, H, T, S) from before dropout, as an
        `AttentionMap`: the same kernel runs, and weights are computed only where they are looked at.

        Args:
            query: (B, T, d_in).
            key: (B, S, d_key); the query itself unless given. `mha(x, mask)` works too: what has three dimensions is
                a key, anything else a mask.
            value: (B, S, d_value); the key unless given.
            mask: a mask, or a tensor of bool or 0/1 (True may attend), (T, S) or (B or 1, H or 1, T or 1, S or 1).
            bias: float of the same shapes, added to the scaled scores.
            causal: True hides from every query the keys after it in this call.
            return_weights: as the layer was made, unless given.
        """
        call = self.plan(query, key, value, mask, bias=bias, causal=causal)
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
        output = heads.reshape(B, 1, self.d_model) if T == 1 else heads.transpose(1, 2).flatten(2)
        out_proj = self._modules["out_proj"]
        if out_proj is not None:
            output = project(out_proj, output)
        return (output, weights) if wanted else output

    def plan(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        bias: Tensor | None = None,
        causal: bool | None = None,
    ) -> Call:
        """The attention call that `forward` makes of these inputs: heads, scoring and dropout, ready to run."""
        if key is not None and value is None:
            key, value, mask = _key_or_mask(key, mask)
        q, k, v = self._heads(query, key, value)
        scoring = self._scoring
        if mask is not None or bias is not None or causal is not None:
            scoring = self._call_scoring(q, k, mask, bias, causal)
        elif not self._mask_fits_all and self.mask is not None:
            self.mask.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
        return Call(q, k, v, scoring, self.dropout if self.training else 0.0)

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
        return (
            q.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2),
            k.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2),
            v.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2),
        )

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
        return attention.scoring_for(q, k, mask, bias, always, None)

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
        if self.mask is not None:
            parts.append(f"mask={self.mask!r}")
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
