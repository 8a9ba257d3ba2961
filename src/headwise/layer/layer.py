"""`MultiHeadAttention`: project, split, normalize and rotate, attend, merge, project."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from headwise import attention, masks, shapes
from headwise.attention.backends import Call, choose
from headwise.errors import OptionError, ShapeError
from headwise.layer import checkpoints, options
from headwise.layer.cache import KVCache, Memory
from headwise.layer.checkpoints.forms import unpack
from headwise.layer.inputs import LayerCall, LayerInputs, Positions, check_keys, check_length, misfit
from headwise.layer.options import Widths
from headwise.layer.pages import PagePool
from headwise.layer.positions import Rotary, check_positions
from headwise.layer.storage import Format
from headwise.masks import Composite, Extent, Mask
from headwise.weights import AttentionMap, Scoring
from headwise.weights.score import Score, ScoreFunction
from headwise.weights.scoring import Relative

Three = tuple[Tensor, Tensor, Tensor]
ThreeBiases = Three | tuple[None, None, None]


class Distribution(Protocol):
    """How a layer runs with its heads or its sequence spread over ranks; implemented in `headwise.parallel`."""

    @property
    def heads(self) -> Any:
        """Which heads this rank holds; None for all. Only `headwise.parallel` reads it."""

    @property
    def order(self) -> Any:
        """How the sequence is laid out over ranks; None if it is not. Only `headwise.parallel` reads it."""

    @property
    def ring(self) -> str | None:
        """How keys travel between ranks, in words; None if every rank holds all keys."""

    def sizes(self, sizes: Sequence[int]) -> tuple[int, int, int, int]:
        """(B, H, T, S) over all ranks, from this rank's; masks and biases refer to these."""

    def positions(self, query: Tensor) -> Tensor | None:
        """The positions of this rank's queries in the text; None if the whole text is here."""

    def check_call(self, *, crossing: bool, cached: bool, packed: bool) -> None:
        """Raise if this kind of call cannot be distributed."""

    def local(self, call: Call) -> Call:
        """The call restricted to this rank's heads."""

    def attend(self, call: Call) -> Tensor:
        """What this rank's queries and heads read, (B, H, t, Dv)."""

    def attend_and_look(self, call: Call) -> tuple[Tensor, AttentionMap]:
        """The same, with the map of this rank's queries and heads."""


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

    Args:
        d_model: width of all heads together, and the default width of input and output.
        num_heads: query heads; must divide `d_model`.
        num_kv_heads: key/value heads; must divide `num_heads`. Fewer means grouped-query, 1 multi-query attention.
        head_dim: width of a head, `d_model / num_heads` by default. If given, `d_model` is only the width of input and
            output.
        d_in: width of the query input, and the default width of the key and value inputs.
        d_key: width of the key input. Giving it marks the layer as one for cross-attention: its query, key and value
            projections are stored separately, so that no call has to slice a fused one.
        d_value: width of the value input, `d_key` by default.
        d_out: width of the output.
        causal: hide the keys after each query.
        mask: a mask that applies to every call, in addition to the call's own.
        dropout: probability of dropping an attention weight in training.
        position: `rotary(...)`, `alibi(num_heads)`, a `RelativeBias(num_heads)`, which several layers may share, or
            your own subclass of `Rotary` or `Relative`.
        scale: above 0; what scores are multiplied by, `1 / sqrt(head_dim)` by default.
        softcap: above 0; scaled scores become softcap · tanh(score / softcap).
        sinks: learn an extra score per head that takes part in the softmax and has no value.
        score: a function of your own, (score, batch, head, query, key) -> score, on tensors that broadcast, applied
            after scale and soft-cap and before biases and masks. The layer trains the parameters of a module.
        qk_norm: normalize queries and keys: "head" (each head by itself), "width" (all heads together), or a function
            from a width to a module, such as `nn.LayerNorm`.
        bias: whether the projections have a bias, or which of them do, such as {"q", "v", "out"}. If query, key and
            value differ in this, they are stored separately.
        out_proj: False leaves out the output projection: the heads are returned side by side, unmixed.
        context_length: longest sequence to accept. Nothing is allocated for it.
        return_weights: the default for calls.
        device: of the parameters.
        dtype: of the parameters.
    """

    out_proj: nn.Linear | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    sinks: nn.Parameter | None
    position: options.Position
    score: ScoreFunction | None
    _version = 2  # marks a state dict as ours: other libraries have a `qkv_proj`, too
    _watchers: tuple[Callable[[AttentionMap], None], ...] = ()  # called with every map; set by `headwise.watch`
    _silent: tuple[int, ...] = ()  # heads that are switched off; set by `headwise.silence`
    _spread: Distribution | None = None  # set by `headwise.parallel`
    if TYPE_CHECKING:  # what editors and type checkers see; torch declares a call of anything, returning anything
        __call__: LayerCall

    @options.explained
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_in: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
        causal: bool = False,
        mask: Mask | None = None,
        dropout: float = 0.0,
        position: options.Position = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        score: ScoreFunction | None = None,
        qk_norm: options.Norm = None,
        bias: bool | Collection[str] = True,
        out_proj: bool = True,
        context_length: int | None = None,
        return_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        widths = Widths.complete(d_model, num_heads, num_kv_heads, head_dim, d_in, d_key, d_value, d_out)
        widths = widths if out_proj else widths.unmixed(d_out)
        self.d_model, self.num_heads, self.num_kv_heads, self.head_dim = widths[:4]
        self.d_in, self.d_key, self.d_value, self.d_out = widths[4:]
        self.heads_width, self.group = widths.heads_width, widths.group
        self.dropout = shapes.check_probability("dropout", dropout)
        self.context_length = None if context_length is None else shapes.check_size("context_length", context_length)
        self.return_weights = options.check_flag("return_weights", return_weights)
        self.causal = options.check_flag("causal", causal)
        self._scoring = options.scoring(scale, softcap)
        mask = options.check_mask(mask)
        self.mask = mask if not self.causal else masks.causal() if mask is None else masks.causal() & mask
        biases = options.biases(bias)
        self.fused = d_key is None and d_value is None and biases["q"] == biases["k"] == biases["v"]
        self._make_projections(biases, out_proj, device, dtype)
        self.score = score
        self._make_options(position, qk_norm, options.check_flag("sinks", sinks), device, dtype)

    @property
    def mask(self) -> Mask | None:
        """The mask that applies to every call, in addition to the call's own."""
        return self._scoring.mask

    @mask.setter
    def mask(self, mask: Mask | None) -> None:
        self._scoring = dataclasses.replace(self._scoring, mask=options.check_mask(mask))
        self._mask_fits_all = mask is None or mask.extent == Extent()

    @property
    def scale(self) -> float | None:
        """What scores are multiplied by; None for `1 / sqrt(head_dim)`."""
        return self._scoring.scale

    @property
    def softcap(self) -> float | None:
        """The limit of scores, which a tanh keeps them below; None for no limit."""
        return self._scoring.softcap

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the tensors of the mask and the position along with the parameters."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = next(self.parameters()).device
        if device.type == "meta":  # these numbers are not in the state dict, so nothing could restore them
            return self
        if self.mask is not None and (moved := self.mask.to(device)) is not self.mask:
            self.mask = moved
        if (rule := self.__dict__.get("position")) is not None:  # a module has moved already
            self.__dict__["position"] = rule.to(device)
        if isinstance(self.score, Composite):
            self.score = self.score.to(device)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "position":
            options.check_position(value, self.num_heads, self.head_dim)
        if name == "score":
            options.check_score(value)
        super().__setattr__(name, value)
        if name in ("position", "sinks", "score", "q_norm", "k_norm"):
            self._note_options()

    def _note_options(self) -> None:
        """Note which steps a call needs beyond projection, mask and scale; most layers need none."""
        position, modules = self.__dict__.get("position"), self._modules
        rotary, relative = isinstance(position, Rotary), isinstance(position, Relative) or bool(modules.get("position"))
        self._shapes_heads = rotary or any(modules.get(name) is not None for name in ("q_norm", "k_norm"))
        score = self.__dict__.get("score") or modules.get("score")
        self._extends_scoring = relative or self._parameters.get("sinks") is not None or score is not None

    def _make_projections(
        self, biases: dict[str, bool], out_proj: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        kv_width = self.num_kv_heads * self.head_dim
        if self.fused:
            # Rows head by head, (Hkv, group + 2, D): the queries of a group, its key, its value. So a slice of rows
            # is a set of whole heads, which is what tensor parallelism needs.
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
        sinks: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.position = position
        rule = self.__dict__.get("position")
        if rule is not None and device is not None and torch.device(device).type != "meta":
            self.__dict__["position"] = rule.to(device)
        self.register_module("q_norm", options.norm(qk_norm, self.num_heads, self.head_dim, device, dtype))
        self.register_module("k_norm", options.norm(qk_norm, self.num_kv_heads, self.head_dim, device, dtype))
        learned = torch.zeros(self.num_heads, device=device, dtype=dtype) if sinks else None
        self.register_parameter("sinks", None if learned is None else nn.Parameter(learned))
        self._note_options()  # registering bypasses __setattr__

    def forward(
        self,
        query: Tensor,
        key: Tensor | Memory | None = None,
        value: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        causal: bool | None = None,
        positions: Tensor | Sequence[int] | None = None,
        key_positions: Tensor | Sequence[int] | None = None,
        cache: KVCache | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        return_weights: bool | None = None,
        **unknown: Any,
    ) -> Tensor | tuple[Tensor, AttentionMap]:
        """The output (B, T, d_out); with `return_weights` also the weights (B, H, T, S) before dropout, as an
        `AttentionMap`. The same kernel runs in both cases: weights are computed only when they are read.

        Args:
            query: (B, T, d_in).
            key: (B, S, d_key), or the result of `remember`; the query by default. `mha(x, mask)` works, too: a second
                argument of three dimensions is a key, anything else a mask.
            value: (B, S, d_value); the key by default.
            mask: a mask, or a tensor of bool or 0/1 (True may attend), (T, S) or (B or 1, H or 1, T or 1, S or 1).
            attn_bias: float, of the same shapes, added to the scaled scores.
            causal: True hides the keys after each query in this call.
            positions: the positions of the queries in the text, (T,) or (B, T), for a rotary; by default 0, 1, 2, ...,
                continuing after the tokens in the cache. In self-attention they apply to the keys as well.
            key_positions: the positions of the keys, needed in cross-attention with a rotary.
            cache: from `make_cache`. It takes in the new keys and values, and the queries see all it holds.
            lengths: (B,), with a cache: how many of a sample's T tokens are real; the rest is padding on the right.
            return_weights: whether to return the weights; the layer's `return_weights` by default.
            unknown: refused; the error says what the option is called here.

        A jagged nested tensor (B, *, d_in) works as query: its samples are packed, and no padding is computed.
        """
        if unknown:
            raise options.unknown_in_call(next(iter(unknown)), inspect.signature(self.forward).parameters, type(self))
        inputs = LayerInputs(query, key, value, mask, attn_bias, causal, positions, key_positions, cache, lengths)
        inputs = self._pack(inputs) if isinstance(query, Tensor) and query.is_nested else inputs
        call = self.plan(inputs)
        wanted = self.return_weights if return_weights is None else return_weights
        if wanted or self._watchers:
            read, weights = self._attend_and_look(call, cache)
        else:
            read = choose(call).run(call) if self._spread is None else self._spread.attend(call)
        output = self._merge(read)
        if inputs.offsets is not None:
            output = torch.nested.nested_tensor_from_jagged(output[0], inputs.offsets)
        return (output, weights) if wanted else output

    def plan(self, inputs: LayerInputs) -> Call:
        """The attention call that `forward` makes of these inputs: heads, scoring and dropout, ready to run."""
        if inputs.key is not None or inputs.cache is not None or inputs.lengths is not None:
            inputs = inputs.resolved()
        cache, packed = inputs.cache, inputs.offsets is not None
        if self._spread is not None:
            self._spread.check_call(crossing=inputs.crossing, cached=cache is not None, packed=packed)
        q, k, v = self._project(inputs)
        if self._shapes_heads or inputs.positions is not None or inputs.key_positions is not None:
            q, k = self._normalize_and_rotate(q, k, inputs)
        S = k.shape[2] if cache is None else cache.text_length(q.shape[2], inputs.lengths)
        if self.context_length is not None and not packed:
            check_length(self.context_length, q.shape[2], S, cache)
        scoring = self._call_scoring(q, S, inputs)
        if self._extends_scoring:
            scoring = self._extended(scoring, q, S)
        if cache is not None:  # after all checks: a refused call leaves the cache as it was
            cache.check_mask(scoring.mask, inputs.lengths)
            appended = cache.append(k, v, inputs.lengths)
            k, v, scoring = appended.key, appended.value, appended.scoring(scoring)
        return Call(q, k, v, scoring, self.dropout if self.training else 0.0)

    def _pack(self, inputs: LayerInputs) -> LayerInputs:
        """The samples of a nested query in one row."""
        if self.score is not None:
            raise OptionError(
                "a nested tensor is packed into one row, which renumbers samples and positions, and this layer's score "
                "function asks for them. Pad the samples and pass mask=padding(lengths)."
            )
        return inputs.packed(self.context_length, self.mask, numbered=isinstance(self.position, Rotary))

    # Project and split.

    def _project(self, inputs: LayerInputs) -> Three:
        """Query heads (B, H, T, D), key and value heads (B, Hkv, S, D)."""
        query, key, value = inputs.query, inputs.key, inputs.value
        if not isinstance(query, Tensor) or query.dim() != 3 or query.shape[2] != self.d_in:
            raise misfit("query", query, self.d_in, "d_in")
        if isinstance(key, Memory):
            return self._project_with_memory(query, key, value)
        if key is None and value is not None:
            raise ShapeError("value is given without key; pass mha(query, key, value), or mha(x).")
        if key is None or (key is query and value is query):
            if self.fused:
                return self._project_fused(query)
            if not self.d_in == self.d_key == self.d_value:
                raise ShapeError(
                    f"this layer takes queries {self.d_in} wide, keys {self.d_key} and values {self.d_value}, so one "
                    f"input cannot be all three. Pass mha(query, key, value)."
                )
            key = value = query
        else:
            value = key if value is None else value
            check_keys(query, key, value, self.d_key, self.d_value)
        q, k, v = self._project_apart(q=query, k=key, v=value)
        return q, k, v

    def _project_fused(self, x: Tensor) -> Three:
        """The heads of self-attention from one matrix product."""
        B, T, _ = x.shape
        D, Hkv, group = self.head_dim, self.num_kv_heads, self.group
        qkv = project(self._modules["qkv_proj"], x)  # self.qkv_proj would take 0.6 µs to look up
        if group == 1 and not torch.is_grad_enabled():  # three views in one call; one token needs no transpose
            split = qkv.view(B, Hkv, 3, 1, D) if T == 1 else qkv.view(B, T, Hkv, 3, D).permute(0, 2, 3, 1, 4)
            q, k, v = split.unbind(2)
            return q, k, v
        # Split before transposing, so that one contiguous copy joins the three gradients.
        q, k, v = qkv.view(B, T, Hkv, (group + 2) * D).split((group * D, D, D), dim=-1)
        q = q if group == 1 else q.reshape(B, T, self.num_heads, D)  # a copy: no view can join separate groups
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _project_apart(self, **inputs: Tensor) -> list[Tensor]:
        """The heads of separate inputs, which are given by their roles `q`, `k` and `v`."""
        counts = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        if not self.fused:
            return [_split(project(self._modules[f"{role}_proj"], x), counts[role]) for role, x in inputs.items()]
        if not is_plain(self.qkv_proj):  # an adapter or a hook must see every input
            return [self._project_fused(x)["qkv".index(role)] for role, x in inputs.items()]
        shapes.check_alike(input=next(iter(inputs.values())), weight=self.qkv_proj.weight)
        linears = dict(zip("qkv", zip(*self.projections(), strict=True), strict=True))  # copies the whole weight
        return [_split(F.linear(x, *linears[role]), counts[role]) for role, x in inputs.items()]

    def _project_with_memory(self, query: Tensor, memory: Memory, value: Tensor | None) -> Three:
        """Query heads, and the keys and values that `remember` has projected."""
        if value is not None:
            raise OptionError("value is given beside remembered keys, which include their values. Leave it out.")
        if memory.key.shape[0] != query.shape[0] or memory.key.shape[1::2] != (self.num_kv_heads, self.head_dim):
            raise ShapeError(
                f"remembered keys of shape {tuple(memory.key.shape)} do not fit a query of {query.shape[0]} samples "
                f"and {self.num_kv_heads} key heads {self.head_dim} wide. Make them with this layer's remember(...)."
            )
        return self._project_apart(q=query)[0], *memory

    # Normalize and rotate.

    def _normalize_and_rotate(self, q: Tensor, k: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """Queries and keys after norms and rotary; remembered keys have had both."""
        remembered, position = isinstance(inputs.key, Memory), self.position
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None or remembered else self.k_norm(k)
        if not isinstance(position, Rotary):
            if inputs.positions is not None or inputs.key_positions is not None:
                raise OptionError(
                    "positions are for a rotary, and this layer has none. Leave them out: masks, ALiBi and relative "
                    "biases follow the order of queries and keys."
                )
            return q, k
        position = position.to(q.device) if q.is_meta else position
        at = self._query_positions(q, inputs, remembered)
        if remembered:
            return position.turn(q, at), k
        given = inputs.key_positions
        keys_at = at if given is None else check_positions("key_positions", given, k.shape[0], k.shape[2], k.device)
        return position.turn(q, at), position.turn(k, keys_at)

    def _query_positions(self, q: Tensor, inputs: LayerInputs, remembered: bool) -> Tensor:
        """The positions of the queries in the text, (T,) or (B, T)."""
        given, T = inputs.positions, q.shape[2]
        if given is None and self._spread is not None:
            given = self._spread.positions(q)
        if inputs.crossing and (given is None or (inputs.key_positions is None) != remembered):
            raise OptionError(
                "cross-attention with a rotary: pass positions= for the queries and key_positions= for the keys (with "
                "remembered keys, remember(memory, positions=...)). Only you know how the two texts are aligned."
            )
        if given is not None:
            return check_positions("positions", given, q.shape[0], T, q.device)
        return torch.arange(T, device=q.device) if inputs.cache is None else inputs.cache.next_positions(T)

    # Score.

    def _call_scoring(self, q: Tensor, S: int, inputs: LayerInputs) -> Scoring:
        """The layer's scoring together with the mask and bias of this call, checked against its sizes."""
        scoring, mask = self._scoring, self._scoring.mask
        if mask is not None and q.is_meta:
            mask = mask.to(q.device)
            scoring = dataclasses.replace(scoring, mask=mask)
        plain = inputs.mask is None and inputs.attn_bias is None and inputs.causal is None
        if plain and self._spread is None and self._mask_fits_all:
            return scoring
        sizes = (q.shape[0], q.shape[1], q.shape[2], S)
        sizes = sizes if self._spread is None else self._spread.sizes(sizes)
        if plain:
            if mask is not None and not self._mask_fits_all:
                mask.check(*sizes, q.device)
            return scoring
        if inputs.causal is False and self.causal:
            raise OptionError(
                "causal=False cannot undo the causal=True this layer was made with. Make the layer without it."
            )
        if options.check_flag("causal", inputs.causal):
            mask = masks.causal() if mask is None else mask & masks.causal()
        joined = attention.check_scores(sizes, q.device, inputs.mask, inputs.attn_bias, mask)
        return dataclasses.replace(scoring, mask=joined, bias=inputs.attn_bias)

    def _extended(self, scoring: Scoring, q: Tensor, S: int) -> Scoring:
        """The scoring of a call with what the layer adds to it: sinks, relative positions, a score function."""
        found = dataclasses.replace(scoring, sinks=self.sinks, relative=self._relative(q.device), score=self.score)
        sizes = (q.shape[0], q.shape[1], q.shape[2], S)
        return found.settled(sizes if self._spread is None else self._spread.sizes(sizes), q.device, q.dtype)

    def _relative(self, device: torch.device) -> Relative | None:
        """The rule that adds to a score by distance."""
        position = self.position
        rule = position() if isinstance(position, nn.Module) else position
        if not isinstance(rule, Relative):
            return None
        return rule if rule.table.device == device else rule.to(device)

    # Attend, merge and project.

    def _attend_and_look(self, call: Call, cache: KVCache | None) -> tuple[Tensor, AttentionMap]:
        """What the heads read, and the map, after showing it to the watchers."""
        if self._spread is None:
            read, lse = choose(call).run_with_lse(call)
            weights = AttentionMap(call.query, call.key, call.scoring, lse)
        else:
            read, weights = self._spread.attend_and_look(call)
        if cache is not None and cache.overwrites:
            weights = weights._of_cache(cache)
        if self._extends_scoring and not torch.is_grad_enabled():
            weights = weights.detach()  # computed without gradients, though sinks or a relative bias require one
        for watcher in self._watchers:
            watcher(weights)
        return read, weights

    def _merge(self, read: Tensor) -> Tensor:
        """The output (B, T, d_out) from what the heads read, (B, H, T, D)."""
        read = silenced(read, self._silent) if self._silent else read
        B, _, T, _ = read.shape
        # (B, T, H·D): a view, since kernels write (B, T, H, D); for one token both orders are the same.
        output = read.reshape(B, 1, self.heads_width) if T == 1 else read.transpose(1, 2).flatten(2)
        out_proj = self._modules["out_proj"]
        return output if out_proj is None else project(out_proj, output)

    # Caches, memory, and weights of other libraries.

    def make_cache(
        self,
        batch: int,
        *,
        capacity: int | None = None,
        static: bool = False,
        storage: str | Format | PagePool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache for this layer: `mha(x, cache=cache)`. Under a causal sliding window its size is bounded.

        Args:
            batch: number of samples.
            capacity: the most tokens it can hold, none of which is dropped; without it, the cache grows as needed.
            static: keep shapes constant, for `torch.compile` and CUDA graphs.
            storage: "int8" or "fp8" to keep 8 bits per number, or a pool of pages from `make_pool`.
            device: the layer's device by default.
            dtype: the layer's dtype by default; under autocast, pass the autocast dtype.
        """
        like = next(self.parameters())
        reach = None if static or capacity is not None else masks.reach_back(self.mask)
        where: dict[str, Any] = {"device": device or like.device, "dtype": dtype or like.dtype}
        options: dict[str, Any] = {"capacity": capacity, "window": reach, "static": static, "storage": storage}
        return KVCache(batch, self.num_kv_heads, self.head_dim, **options, **where)

    def make_pool(
        self,
        pages: int,
        page_size: int = 16,
        *,
        storage: str | Format | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> PagePool:
        """Pages for the caches of this layer, and of all layers with the same heads: `make_cache(B, storage=pool)`.

        Args:
            pages: how many.
            page_size: tokens in a page.
            storage: "int8" or "fp8" to keep 8 bits per number.
            device: the layer's device by default.
            dtype: the layer's dtype by default.
        """
        like = next(self.parameters())
        sizes = ((self.num_kv_heads, self.head_dim),) * 2
        where: dict[str, Any] = {"device": device or like.device, "dtype": dtype or like.dtype}
        return PagePool(pages, page_size, sizes, storage=storage, **where)

    def remember(self, key: Tensor, value: Tensor | None = None, *, positions: Positions = None) -> Memory:
        """The keys and values of an encoder's output, projected once for all later calls: `mha(x, memory)`.

        Args:
            key: (B, S, d_key).
            value: (B, S, d_value); the key by default.
            positions: the positions of the keys, (S,) or (B, S), for a rotary.
        """
        value = key if value is None else value
        check_keys(key, key, value, self.d_key, self.d_value)
        k, v = self._project_apart(k=key, v=value)
        k = k if self.k_norm is None else self.k_norm(k)
        if isinstance(self.position, Rotary):
            if positions is None:
                raise OptionError(
                    "this layer has a rotary: pass remember(memory, positions=...), the positions of the keys."
                )
            k = self.position.turn(k, check_positions("positions", positions, k.shape[0], k.shape[2], k.device))
        return Memory(k, v)

    def projections(self) -> tuple[Three, ThreeBiases]:
        """Weights (H·D, d_in), (Hkv·D, d_key), (Hkv·D, d_value) of query, key and value, and their biases.

        Heads are in order, as in the textbooks, however the layer stores them.
        """
        if not self.fused:
            linears = (self.q_proj, self.k_proj, self.v_proj)
            return tuple(x.weight for x in linears), tuple(x.bias for x in linears)  # type: ignore[return-value]
        weights = unpack(self.qkv_proj.weight, self.num_heads, self.num_kv_heads)
        bias: Tensor | None = self.qkv_proj.bias
        return weights, (None, None, None) if bias is None else unpack(bias, self.num_heads, self.num_kv_heads)

    @classmethod
    def from_state_dict(
        cls,
        state_dict: Mapping[str, Tensor],
        num_heads: int | None = None,
        *,
        prefix: str = "",
        layout: str | None = None,
        **options: Any,
    ) -> Self:
        """A layer with the weights of another library's attention, whose output it reproduces up to rounding.

        Known layouts: those of textbooks, `torch.nn.MultiheadAttention`, GPT-2, GPT-NeoX, Falcon, BERT, ViT, Llama, T5,
        x-transformers, Keras, and our own; `headwise.open_checkpoint` reads whole models.

        Args:
            state_dict: a mapping from names to tensors.
            num_heads: needed unless the tensors imply it, as lists of heads, Keras kernels and sinks do.
            prefix: the part before the layer's own names, such as "blocks.0.attention.".
            layout: "head by head" or "side by side", if the order of a fused projection is ambiguous.
            options: further arguments of the layer. Pass here what no tensor holds: `dropout`, and `causal` or `mask`
                unless a causal mask is stored. Options cannot change what the tensors determine.
        """
        found = checkpoints.read(state_dict, num_heads, prefix, options.get("num_kv_heads"), layout)
        found.check_said(options)
        widest = functools.reduce(torch.promote_types, [x.dtype for x in found.state.values()])
        made: dict[str, Any] = {"device": found.state["q_proj.weight"].device, "dtype": widest}
        layer = cls(**made | checkpoints.merge(found.options, options))
        state = found.arranged(layer.fused)
        checkpoints.check_options(state, layer.state_dict())
        layer.load_state_dict(layer.state_dict() | state, strict=True)
        return layer

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        rule = self.__dict__.get("position")  # a module prints itself
        values = {  # the value, and the default
            "num_kv_heads": (self.num_kv_heads, self.num_heads),
            "d_in": (self.d_in, self.d_model),
            "d_key": (self.d_key, self.d_in),
            "d_value": (self.d_value, self.d_key),
            "d_out": (self.d_out, self.d_model),
            "head_dim": (None if self.heads_width == self.d_model else self.head_dim, None),
            "mask": (None if self.mask is None else repr(self.mask), None),
            "position": (None if rule is None else type(rule).__name__.lower(), None),
            "softcap": (self.softcap, None),
            "scale": (self.scale, None),
            "sinks": (self.sinks is not None, False),
            "score": (self.__dict__.get("score") and Score(self.__dict__["score"]).name, None),
            "dropout": (self.dropout, 0.0),
            "context_length": (self.context_length, None),
        }
        different = [(name, value) for name, (value, default) in values.items() if value != default]
        words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in different]
        return ", ".join([f"{self.d_model}, {self.num_heads}", *words])


def _split(x: Tensor, heads: int) -> Tensor:
    """(B, T, heads · D) as (B, heads, T, D)."""
    parts: Tensor = x.unflatten(-1, (heads, -1))
    return parts.transpose(1, 2)


def project(linear: Any, x: Tensor) -> Tensor:
    """`linear(x)`. In inference, a plain `nn.Linear` without hooks is run without the 3 µs of a module call."""
    if torch.compiler.is_compiling():
        return linear(x)  # type: ignore[no-any-return]
    try:
        if torch.is_grad_enabled() or not is_plain(linear):
            return linear(x)  # type: ignore[no-any-return]
        parameters = linear._parameters
        return F.linear(x, parameters["weight"], parameters["bias"])
    except RuntimeError:  # torch compares dtypes and devices; on a mismatch, our error says how to fix it
        if isinstance(linear, nn.Linear):
            shapes.check_alike(input=x, weight=linear.weight)
        raise


def is_plain(linear: nn.Module) -> bool:
    """Whether this is an unmodified `nn.Linear`: not patched, not sharded, and without hooks."""
    if type(linear) is not nn.Linear or "forward" in linear.__dict__ or "weight" not in linear._parameters:
        return False
    hooks = linear._forward_hooks or linear._forward_pre_hooks or _global_forward_hooks or _global_forward_pre_hooks
    return not (hooks or linear._backward_hooks or linear._backward_pre_hooks)


def silenced(read: Tensor, heads: Sequence[int]) -> Tensor:
    """What the heads read (B, H, T, D), with zeros for the given heads."""
    if max(heads) >= read.shape[1]:
        raise OptionError(f"silence(head {max(heads)}): this layer has {read.shape[1]} heads, from 0 up.")
    return read.index_fill(1, torch.tensor(heads, device=read.device), 0.0)
