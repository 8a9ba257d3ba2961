"""`MultiheadAttention`: the interface of `torch.nn.MultiheadAttention` on our core.

>>> mha = MultiheadAttention(8, 2, batch_first=True)
>>> x = torch.randn(3, 5, 8)
>>> output, weights = mha(x, x, x, key_padding_mask=torch.zeros(3, 5, dtype=torch.bool))
>>> output.shape, weights.shape
(torch.Size([3, 5, 8]), torch.Size([3, 5, 5]))

Here, and only here, masks mean what torch means by them: True hides.
"""

import math
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import attention, masks, shapes
from headwise.attention.backends import Call, choose
from headwise.errors import HeadCountError, MaskError, OptionError, ShapeError
from headwise.layer.attached import Attached
from headwise.masks import Mask
from headwise.weights import AttentionMap, Scoring

Three = tuple[Tensor, Tensor, Tensor]
Result = tuple[Tensor, Tensor | None]

LARGE = 2**26  # bytes of all weights; beyond this they are averaged head by head and never exist all at once


def _renamed(function: Any, name: str) -> Any:
    """A copy of `function` under another name. TorchScript identifies functions by name, and could not tell torch's
    `forward` from ours."""
    copy = types.FunctionType(function.__code__, function.__globals__, name, function.__defaults__)
    copy.__annotations__ = function.__annotations__
    return copy


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` on our core: same constructor, call, parameters, state dict and results.

    It is a subclass, so code that checks for torch's class, reads its parameters or loads its checkpoints still works.
    See torch's documentation for the arguments; `headwise.replace` puts it into an existing model.

    Intended differences:

    - A query that sees no key reads zeros and has weights of zero. Torch returns NaN, which spreads to the gradients of
      other samples.
    - `is_causal=True` without `attn_mask` is always an error. Torch ignores it in evaluation.
    - A float mask may have another dtype than the query, and a bool mask may be combined with a float mask. Torch
      fails, warns, or (float64 queries with a float32 mask) is silently wrong.
    - Many weights, if no gradient flows through them, are averaged head by head.
    - Errors say what was given, what was expected and how to fix it. They are also of the types that torch raises.

    Torch's own code handles TorchScript (scripted or traced), nested tensors, arguments that override
    `__torch_function__`, `dropout=1`, and the calls for weights without a mask that torch would run with its native
    inference kernel (`torch.backends.mha.set_fastpath_enabled(False)` turns that off).
    In evaluation, the fast path of `nn.TransformerEncoderLayer` reads the parameters of its attention and calls no
    `forward`, so NaN remains NaN there.

    >>> encoder = nn.TransformerEncoderLayer(8, 2)
    >>> encoder.self_attn = MultiheadAttention(8, 2)
    >>> encoder(torch.randn(5, 3, 8)).shape
    torch.Size([5, 3, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
        for name, size in sizes.items():
            if size is not None:
                shapes.check_size(name, size)
        if embed_dim % num_heads:
            raise DivisionError(
                f"embed_dim={embed_dim} and num_heads={num_heads}: embed_dim must be divisible by num_heads. "
                f"Pass a number of heads that divides {embed_dim}."
            )
        if not 0 <= dropout <= 1:
            raise OptionError(f"dropout={dropout!r}: expected a probability from 0 to 1.")
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    _attached: Attached | None = None  # set by `headwise.watch` and `headwise.silence`
    _torch_forward = _renamed(nn.MultiheadAttention.forward, "_torch_forward")

    def reset_parameters(self) -> None:
        """Draw new weights, as the constructor does."""
        self.out_proj.reset_parameters()
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and with `need_weights` the weights, as torch's class returns them.

        Args:
            query: (T, B, E), (B, T, E) with `batch_first`, or (T, E) for one sequence.
            key: likewise with S and `kdim`.
            value: likewise with S and `vdim`.
            key_padding_mask: (B, S), or (S,); bool, True for keys to hide, or float to add to the scores.
            need_weights: also return the weights, (B, T, S) or (B, H, T, S); in training, after dropout.
            attn_mask: (T, S) or (B·H, T, S); bool, True where a query must not attend, or float to add to the scores.
            average_attn_weights: False returns the weights of each head.
            is_causal: promises that `attn_mask` is the causal mask, so that it need not be read.
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return self._torch_forward(  # type: ignore[no-any-return]
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        return self._forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )

    @torch.jit.unused
    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        given = (query, key, value, key_padding_mask, attn_mask)
        masked = key_padding_mask is not None or attn_mask is not None
        by_torch = self._is_torchs(given)
        # torch's rule for when to trust the flag and ignore the mask
        causal = is_causal and key_padding_mask is None and not need_weights
        if not by_torch:
            self._check_inputs(query, key, value, key_padding_mask, attn_mask, is_causal)
            self._check_masks(query, key, key_padding_mask, None if causal else attn_mask)
            touched = self._attached is not None
            by_torch = need_weights and not masked and not touched and self._runs_natively(query, key, value)
        if by_torch:
            result: Result = self._torch_forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average, is_causal
            )
            return result
        batched = query.dim() == 3
        q, k, v = self._heads(query, key, value)
        scoring = self._scoring(q, k, key_padding_mask, None if causal else attn_mask, causal)
        attached = self._attached
        for watcher in () if attached is None else attached.watchers():
            watcher(AttentionMap(q, k, scoring))
        heads, weights = _attended(q, k, v, scoring, self._dropout(), need_weights, average)
        if attached is not None:
            call = Call(q, k, v, scoring, self._dropout())
            heads = attached.handed(call, attached.read(call, heads))
        output = self._joined(heads, batched)
        return output, weights if batched or weights is None else weights[0]

    # Calls that torch's own code handles.

    def _is_torchs(self, given: tuple[Any, ...]) -> bool:
        """Whether torch must run this call, because our core does not support its kind of input."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        return (
            torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            or any(x.is_nested for x in tensors)
            or self._dropout() >= 1
            or any(_overrides(x) for x in (*tensors, *self._own_tensors()))
        )

    def _runs_natively(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether torch would run this call, if nothing is masked, with its native inference kernel."""
        return (
            torch.backends.mha.get_fastpath_enabled()
            and query is key
            and key is value
            and query.dim() == 3
            and self.batch_first
            and not self.training
            and not torch.is_autocast_enabled(query.device.type)
            and not torch.compiler.is_compiling()
            and not _learns(query, *self._own_tensors())
        )

    def _own_tensors(self) -> tuple[Tensor | None, ...]:
        return *self._parameters.values(), self.out_proj.weight, self.out_proj.bias

    def _dropout(self) -> float:
        return self.dropout if self.training else 0.0

    # What a call may be given.

    def _check_inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        """Raise unless inputs and masks have types and sizes that fit the layer and each other."""
        inputs = {"query": query, "key": key, "value": value}
        for name, x in inputs.items():
            shapes.check_tensor(name, x)
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            _check_mask_dtype(name, mask)
        try:
            _torch_shape_check(query, key, value, key_padding_mask, attn_mask, self.num_heads)
        except AssertionError as error:  # torch's message, which old code may match, and ours
            raise InputShapeError(f"{error}. {self._expected(inputs)}") from error
        widths = (self.embed_dim, self.kdim, self.vdim)
        if any(x.shape[-1] != width for x, width in zip(inputs.values(), widths, strict=True)):
            raise InputShapeError(f"an input has the wrong width. {self._expected(inputs)}")
        batch = slice(1) if self.batch_first else slice(1, 2)
        if query.dim() == 3 and not query.shape[batch] == key.shape[batch] == value.shape[batch]:
            raise InputShapeError(f"the batch sizes differ. {self._expected(inputs)}")
        if key.shape[:-1] != value.shape[:-1]:
            raise InputShapeError(f"every key needs one value, and their numbers differ. {self._expected(inputs)}")
        shapes.check_alike(**inputs)
        shapes.check_alike(input=query, weight=self.out_proj.weight)
        if is_causal and attn_mask is None:
            raise CausalFlagError(
                "is_causal=True without attn_mask: the flag only promises that attn_mask is the causal mask. Pass "
                "attn_mask=nn.Transformer.generate_square_subsequent_mask(T) as well."
            )

    def _check_masks(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> None:
        """Raise unless masks have the shapes that torch accepts."""
        length = 1 if self.batch_first and query.dim() == 3 else 0
        T, S = query.shape[length], key.shape[length]
        B = 1 if query.dim() == 2 else query.shape[1 - length]
        if key_padding_mask is not None and tuple(key_padding_mask.shape) != ((B, S) if query.dim() == 3 else (S,)):
            raise PaddingMaskError(
                f"key_padding_mask of shape {tuple(key_padding_mask.shape)}: expected (B, S) = {(B, S)}, without B "
                f"for one sequence, and True for keys to hide. {self._layout()}"
            )
        shape = (T, S) if attn_mask is None or attn_mask.dim() == 2 else (B * self.num_heads, T, S)
        if attn_mask is not None and tuple(attn_mask.shape) != shape:
            raise AttentionMaskError(
                f"attn_mask of shape {tuple(attn_mask.shape)}: expected (T, S) = {(T, S)}, or one for each head of "
                f"each sample, (B·H, T, S) = {(B * self.num_heads, T, S)}. {self._layout()}"
            )

    def _expected(self, inputs: dict[str, Tensor]) -> str:
        given = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs.items())
        order = "(B, T, {})" if self.batch_first else "(T, B, {})"
        wanted = ", ".join(
            f"{name} {order.format(width).replace('T', letter)}"
            for name, width, letter in zip(inputs, (self.embed_dim, self.kdim, self.vdim), "TSS", strict=True)
        )
        return f"Given: {given}. Expected: {wanted}, or all three without B. {self._layout()}"

    def _layout(self) -> str:
        return (
            f"This layer has batch_first={self.batch_first}; if the axes of your tensors are in the other order, "
            f"pass batch_first={not self.batch_first} when you make it."
        )

    # From inputs to heads and back.

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> Three:
        """Query (B, H, T, D), key and value (B, H, S, D), including the keys that options add."""
        q, k, v = (self._split(x) for x in self._projected(query, key, value))
        extra_keys, extra_values = [], []
        if self.bias_k is not None and self.bias_v is not None:
            shape = (1, self.num_heads, 1, self.head_dim)
            extra_keys.append(self.bias_k.to(k.dtype).view(shape).expand(k.shape[0], -1, -1, -1))
            extra_values.append(self.bias_v.to(v.dtype).view(shape).expand(v.shape[0], -1, -1, -1))
        if self.add_zero_attn:
            zeros = k.new_zeros(k.shape[0], self.num_heads, 1, self.head_dim)
            extra_keys.append(zeros)
            extra_values.append(zeros)
        if extra_keys:
            k, v = torch.cat([k, *extra_keys], dim=2), torch.cat([v, *extra_values], dim=2)
        return q, k, v

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> Three:
        """The three projections, each in the layout of its input; one product if the inputs are one tensor."""
        E, bias = self.embed_dim, self.in_proj_bias
        if not self._qkv_same_embed_dim:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None, None, None) if bias is None else bias.chunk(3)
            return tuple(map(F.linear, (query, key, value), weights, biases))  # type: ignore[return-value]
        weight = self.in_proj_weight
        if query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, dim=-1)  # type: ignore[return-value]
        if key is value:
            k, v = F.linear(key, weight[E:], None if bias is None else bias[E:]).chunk(2, dim=-1)
            return F.linear(query, weight[:E], None if bias is None else bias[:E]), k, v
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), weight.chunk(3), biases))  # type: ignore[return-value]

    def _split(self, x: Tensor) -> Tensor:
        """(B, H, T, D), a view of (T, B, E), (B, T, E) or (T, E)."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _joined(self, heads: Tensor, batched: bool) -> Tensor:
        """The output, in the layout of the query: the merged heads, projected."""
        weight, bias = self.out_proj.weight, self.out_proj.bias
        if batched and self.batch_first and not self.training:
            return F.linear(heads.transpose(1, 2).flatten(2), weight, bias)  # a view, since kernels write (B, T, H, D)
        # In training, torch's memory layout: with the same seed, a dropout that follows then drops the same values.
        output = F.linear(heads.permute(2, 0, 1, 3).flatten(2), weight, bias)  # (T, B, E)
        return output[:, 0] if not batched else output.transpose(0, 1) if self.batch_first else output

    # From torch's masks to ours.

    def _scoring(
        self, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, causal: bool
    ) -> Scoring:
        """The scoring for torch's masks: bool hides, float is added, and keys that options add are visible to all."""
        B, H, T, S = *q.shape[:3], k.shape[2]
        extra = (0, (self.bias_k is not None) + self.add_zero_attn)
        mask, bias = _top_left_causal(T, S, q.device) if causal else None, None
        if attn_mask is not None:
            table = F.pad(attn_mask, extra)
            table = table[None, None] if table.dim() == 2 else table.unflatten(0, (B, H))  # (B or 1, H or 1, T, S)
            mask, bias = (masks.dense(~table), None) if table.dtype == torch.bool else (None, table)
        if key_padding_mask is not None:
            keys = F.pad(key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask[None], extra)  # (B, S)
            if keys.dtype == torch.bool:
                mask = masks.padding(~keys) if mask is None else mask & masks.padding(~keys)
            else:
                bias = keys[:, None, None] if bias is None else bias + keys[:, None, None]
        return Scoring(attention.check_scores((B, H, T, S), q.device, mask, bias), bias)


def _overrides(x: Tensor | None) -> bool:
    """Whether the class of `x` overrides torch functions. Torch's own test is also true inside every
    `with torch.device(...)`, which is a mode."""
    if x is None or type(x) in (Tensor, nn.Parameter):
        return False
    return type(x).__torch_function__ is not torch._C._disabled_torch_function_impl


def _top_left_causal(T: int, S: int, device: torch.device) -> Mask:
    """The mask of torch's flag: query i sees keys up to i, even if there are more keys than queries."""
    return masks.causal() if T == S else masks.dense(torch.ones(T, S, dtype=torch.bool, device=device).tril())


def _learns(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, dropout: float, need_weights: bool, average: bool
) -> Result:
    """What the heads read (B, H, T, D), and the weights if requested, (B, T, S) or (B, H, T, S)."""
    if not need_weights:
        call = Call(q, k, v, scoring, dropout)
        return choose(call).run(call), None
    size = q.shape[:3].numel() * k.shape[2] * q.element_size()
    if dropout or size <= LARGE or not _is_plain_inference(q, k, scoring):
        heads, weights = _with_dense_weights(q, k, v, scoring, dropout)
        return heads, weights.mean(1) if average else weights
    heads, lazy = attention.attend(q, k, v, mask=scoring.mask, attn_bias=scoring.bias, return_weights=True)
    # The caller requested the tensor, however large it is.
    return heads, _mean_over_heads(lazy) if average else lazy.to_tensor(limit=sys.maxsize)


def _is_plain_inference(q: Tensor, k: Tensor, scoring: Scoring) -> bool:
    """Whether only values are needed: no gradient of any kind, no graph, no autocast."""
    return not (
        _learns(q, k, scoring.bias)
        or _is_transformed()
        or torch.is_autocast_enabled(q.device.type)
        or torch.autograd.forward_ad._current_level >= 0
    )


def _with_dense_weights(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, dropout: float) -> tuple[Tensor, Tensor]:
    """Plain products. The caller receives the weights, so they exist anyway; this way they support dropout, and
    gradients of any order."""
    (B, H, T, D), S = q.shape, k.shape[2]
    flat_query, flat_key = (q * scoring.scale_for(D)).reshape(B * H, T, D), k.reshape(B * H, S, D)
    bias, empty = scoring.additive(q, S), None
    if bias is None or not S:
        scores = flat_query @ flat_key.transpose(1, 2)
    else:
        empty = _empty_rows(bias)
        bias = bias if empty is None else bias.masked_fill(empty, 0.0)
        flat_bias = bias[0] if bias.shape[:2] == (1, 1) else bias.expand(B, H, T, S).reshape(B * H, T, S)
        scores = torch.baddbmm(flat_bias, flat_query, flat_key.transpose(1, 2))  # the product itself adds it
    weights = scores.view(B, H, T, S).softmax(-1)
    weights = weights if empty is None else weights.masked_fill(empty, 0.0)  # sees no key: zeros
    weights = F.dropout(weights, dropout) if dropout else weights
    return weights @ v, weights


def _empty_rows(bias: Tensor) -> Tensor | None:
    """True for queries that see no key, (B or 1, H or 1, T, 1); None if there are known to be none."""
    empty = (bias == -math.inf).all(-1, keepdim=True)
    may_look = empty.is_cpu and type(empty) is Tensor and not _is_transformed()
    return None if may_look and not empty.any() else empty


def _is_transformed() -> bool:
    """Whether torch is compiling, exporting or transforming this code, so that values are not available."""
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def _mean_over_heads(weights: AttentionMap) -> Tensor:
    """The mean (B, T, S), computed one head at a time."""
    B, H, T, S = weights.shape
    total = torch.zeros(B, T, S, dtype=torch.promote_types(weights.dtype, torch.float32), device=weights.device)
    for head in weights:
        total += head.to_tensor(limit=sys.maxsize)[:, 0]
    return (total / H).to(weights.dtype)


# Errors of a call: each is both ours and of a type that torch raises.

_torch_shape_check: Any = F._mha_shape_check  # type: ignore[attr-defined]


class InputShapeError(ShapeError, AssertionError, RuntimeError):
    """A `ShapeError` that code written for torch's class also catches; torch raises either of the other two."""


class PaddingMaskError(MaskError, AssertionError):
    """A `MaskError` that code written for torch's class also catches."""


class AttentionMaskError(MaskError, RuntimeError):
    """A `MaskError` that code written for torch's class also catches."""


class CausalFlagError(OptionError, RuntimeError):
    """An `OptionError` that code written for torch's class also catches."""


class DivisionError(HeadCountError, AssertionError):
    """A `HeadCountError` that code written for torch's class also catches."""


def _check_mask_dtype(name: str, mask: Tensor | None) -> None:
    if mask is None:
        return
    shapes.check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise PaddingMaskError(
            f"{name} is {mask.dtype}; only bool and floating types of {name} are supported: True hides, a float is "
            f"added to the scores. If 1 hides here, pass {name}.bool()."
        )
