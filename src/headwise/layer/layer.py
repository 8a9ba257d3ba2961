"""`MultiHeadAttention`: project, split, attend, merge, project."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from headwise import attention, masks, shapes
from headwise.attention.backends import Call, choose
from headwise.errors import OptionError
from headwise.layer import arguments, checkpoints, projection, ragged
from headwise.layer.arguments import Widths
from headwise.layer.cache import KVCache, Memory
from headwise.layer.positions import Rotary
from headwise.layer.projection import Three, heads_of, project
from headwise.masks import Extent, Mask
from headwise.weights import AttentionMap, Scoring
from headwise.weights.relative import Relative, RelativeBias

if TYPE_CHECKING:
    from headwise.parallel.shards import Sharding as Spread

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
        sizes: widths by position, as said above.
        unknown: refused, with the name an option has here.
    """

    out_proj: nn.Linear | None
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    sinks: nn.Parameter | None
    position: arguments.Position
    _version = 2  # by which a state dict is known as ours: others call a projection `qkv_proj` too
    _watchers: tuple[Callable[[AttentionMap], None], ...] = ()  # see `watch.py`
    _silent: tuple[int, ...] = ()  # heads that are switched off; see `silence.py`
    _spread: "Spread | None" = None  # which other ranks compute along; see `parallel`

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
        position: arguments.Position = None,
        scoring: Scoring | None = None,
        qk_norm: arguments.Norm = None,
        dropout: float | None = None,
        bias: bool | Collection[str] = True,
        qkv_bias: bool | None = None,
        out_proj: bool = True,
        context_length: int | None = None,
        return_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            arguments.check_known("MultiHeadAttention", unknown, inspect.signature(type(self)).parameters)
        super().__init__()
        named: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, "d_in": d_in, "d_out": d_out}
        named |= {"context_length": context_length, "dropout": dropout, "qkv_bias": qkv_bias}
        named = arguments.by_position(sizes, named)
        d_model, num_heads, d_in, d_out, context_length, dropout, qkv_bias = named.values()
        if d_model is None and d_out is not None:
            d_model = d_out
            causal = True if causal is None else causal
            qkv_bias = False if qkv_bias is None and isinstance(bias, bool) else qkv_bias
        widths = Widths.complete(d_model, num_heads, num_kv_heads, head_dim, d_in, d_key, d_value, d_out)
        widths = widths if out_proj else widths.unmixed(d_out)
        self.d_model, self.num_heads, self.num_kv_heads, self.head_dim = widths[:4]
        self.d_in, self.d_key, self.d_value, self.d_out = widths[4:]
        self.heads_width, self.group = widths.heads_width, widths.group
        self.dropout = shapes.check_probability("dropout", 0.0 if dropout is None else dropout)
        self.context_length = None if context_length is None else shapes.check_size("context_length", context_length)
        self.return_weights = return_weights
        self.causal = arguments.check_flag("causal", causal)
        self._scoring = Scoring() if scoring is None else arguments.check_scoring(scoring)
        self.mask = arguments.constant_mask(self.causal, mask)
        biases = arguments.biases(bias, qkv_bias)
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
        if device.type == "meta":  # numbers that no state dict brings back stay where they are
            return self
        if self.mask is not None and self.mask.tensors():
            self.mask = self.mask.to(device)
        if isinstance(self.position, Relative):
            self.position = self.position.to(device)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("position", "sinks", "q_norm"):
            self._note_options()

    def _note_options(self) -> None:
        """What a call must look at beside mask and scale; most layers have none of it."""
        position, modules = self.__dict__.get("position"), self.__dict__.get("_modules", {})
        position = modules.get("position") if position is None else position
        self._shapes_heads = isinstance(position, Rotary) or modules.get("q_norm") is not None
        learned = self.__dict__.get("_parameters", {}).get("sinks")
        self._extends_scoring = learned is not None or isinstance(position, Relative | RelativeBias)

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
        position: arguments.Position,
        qk_norm: arguments.Norm,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Positions, norms and sinks."""
        arguments.check_position(position, self.num_heads, self.head_dim)
        if isinstance(position, Relative) and device is not None and torch.device(device).type != "meta":
            position = position.to(device)
        self.position = position
        self.register_module("q_norm", arguments.norm(qk_norm, self.num_heads, self.head_dim, device, dtype))
        self.register_module("k_norm", arguments.norm(qk_norm, self.num_kv_heads, self.head_dim, device, dtype))
        learned = torch.zeros(self.num_heads, device=device, dtype=dtype) if self._scoring.sinks else None
        self.register_parameter("sinks", None if learned is None else nn.Parameter(learned))
        self._note_options()

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
        **unknown: Any,
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
            unknown: refused, with the name an option has here.

        A jagged nested tensor (B, *, d_in) works as query: its samples are packed, and no padding is computed.
        """
        if unknown:
            arguments.check_known("a call", unknown, inspect.signature(self.forward).parameters)
        packed = None
        if isinstance(query, Tensor) and query.is_nested:
            refused = {"value": value, "mask": mask, "bias": bias, "positions": positions, "cache": cache}
            packed = ragged.Packed.of(self, query, key, **refused, key_positions=key_positions, lengths=lengths)
            query, key, mask, positions = packed.tokens, None, packed.mask, packed.positions
        call = self.plan(
            query, key, value, mask, bias=bias, causal=causal, positions=positions, key_positions=key_positions,
            cache=cache, lengths=lengths, packed=packed is not None,
        )  # fmt: skip
        wanted = self.return_weights if return_weights is None else return_weights
        if wanted or self._watchers:
            read, weights = self._attend_and_look(call, cache)
        else:
            read = choose(call).run(call) if self._spread is None else self._spread.attend(call)
        output = self._merged(read)
        output = output if packed is None else packed.nested(output)
        return (output, weights) if wanted else output

    def _attend_and_look(self, call: Call, cache: KVCache | None) -> tuple[Tensor, AttentionMap]:
        """What the heads read, and the map, which watchers are shown."""
        if self._spread is None:
            read, lse = choose(call).run_with_lse(call)
            weights = AttentionMap(call.query, call.key, call.scoring, lse)
        else:
            read, weights = self._spread.attend_and_look(call)
        if cache is not None:
            weights = weights._of_cache(cache)
        if self._extends_scoring and not torch.is_grad_enabled():
            weights = weights.detach()  # made without gradients, though sinks or a relative bias have one
        for watcher in self._watchers:
            watcher(weights)
        return read, weights

    def _merged(self, read: Tensor) -> Tensor:
        """The output (B, T, d_out) of what the heads read, (B, H, T, D)."""
        if self._silent:
            read = projection.silenced(read, self._silent)
        B, _, T, _ = read.shape
        # (B, T, H·D): a view, since kernels write (B, T, H, D); for one token both orders are the same.
        output = read.reshape(B, 1, self.heads_width) if T == 1 else read.transpose(1, 2).flatten(2)
        out_proj = self._modules["out_proj"]
        return output if out_proj is None else project(out_proj, output)

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
        packed: bool = False,
    ) -> Call:
        """The attention call that `forward` makes of these inputs: heads, scoring and dropout, ready to run.

        It takes what `forward` takes: `query`, `key`, `value`, `mask`, `bias`, `causal`, `positions`, `key_positions`,
        `cache` and `lengths`; and `packed`, whether the query is samples in a row, made of a nested tensor.
        """
        memory = key if isinstance(key, Memory) else None
        if memory is None and key is not None and value is None:
            key, value, mask = arguments.key_or_mask(key, mask)  # type: ignore[arg-type]
        if cache is not None or lengths is not None:
            arguments.check_cached(cache, key)
        crossing = memory is not None or (key is not None and key is not query)
        if self._spread is not None:
            self._spread.check_call(crossing=crossing, cached=cache is not None, packed=packed)
        if memory is None:
            q, k, v = heads_of(self, query, key, value)  # type: ignore[arg-type]
        else:
            q, k, v = projection.with_memory(self, query, memory, value)
        if self._spread is not None and positions is None and isinstance(self.position, Rotary):
            positions = self._spread.positions(q)
        if self._shapes_heads or positions is not None or key_positions is not None:
            q, k = projection.shape(self, q, k, positions, key_positions, cache, crossing, memory is not None)
        S = k.shape[2] if cache is None else cache.text_length(q.shape[2], lengths)
        if self.context_length is not None and not packed:
            arguments.check_length(self.context_length, query, S, cache)
        sizes = (q.shape[0], q.shape[1], q.shape[2], S)
        sizes = sizes if self._spread is None else self._spread.sizes(sizes)
        scoring = self._scoring
        if q.is_meta and self.mask is not None:
            scoring = dataclasses.replace(scoring, mask=self.mask.to(q.device))
        if mask is not None or bias is not None or causal is not None:
            scoring = self._call_scoring(sizes, q.device, scoring.mask, mask, bias, causal)
        elif not self._mask_fits_all and scoring.mask is not None:
            scoring.mask.check(*sizes, q.device)
        if cache is not None:  # after all checks: a call that is refused leaves the cache as it was
            cache.check_mask(scoring.mask, lengths)
            appended = cache.append(k, v, lengths)
            k, v, scoring = appended.key, appended.value, appended.scoring(scoring)
        if self._extends_scoring:
            scoring = dataclasses.replace(scoring, sinks=self.sinks, relative=self._relative(q.device))
        return Call(q, k, v, scoring, self.dropout if self.training else 0.0)

    def _relative(self, device: torch.device) -> Relative | None:
        """What is added for distances."""
        rule = self.position() if isinstance(self.position, RelativeBias) else self.position
        if not isinstance(rule, Relative):
            return None
        return rule if rule.table.device == device else rule.to(device)

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
            capacity: most tokens, none of which is dropped; it grows without end unless given.
            static: keep shapes constant, for `torch.compile` and CUDA graphs.
            device: the layer's own unless given.
            dtype: likewise; name the autocast dtype where the layer runs under autocast.
        """
        like = next(self.parameters())
        reach = None if static or capacity is not None else masks.reach_back(self.mask)
        return KVCache(
            batch,
            self.num_kv_heads,
            self.head_dim,
            capacity=capacity,
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
        return projection.remember(self, key, value, positions)

    def projections(self) -> tuple[Three, ThreeBiases]:
        """Weights (H·D, d_in), (Hkv·D, d_key), (Hkv·D, d_value) of query, key and value, and their biases.

        Heads in order, as in the textbooks, however this layer stores them.
        """
        if not self.fused:
            linears = (self.q_proj, self.k_proj, self.v_proj)
            return tuple(x.weight for x in linears), tuple(x.bias for x in linears)  # type: ignore[return-value]
        weights = projection.unpack(self.qkv_proj.weight, self.num_heads, self.num_kv_heads)
        bias: Tensor | None = self.qkv_proj.bias
        if bias is None:
            return weights, (None, None, None)
        return weights, projection.unpack(bias, self.num_heads, self.num_kv_heads)

    def _call_scoring(
        self,
        sizes: Sequence[int],
        device: torch.device,
        always: Mask | None,
        mask: Mask | Tensor | None,
        bias: Tensor | None,
        causal: bool | None,
    ) -> Scoring:
        """The scoring of one call: what the layer always hides, and what this call adds."""
        if causal is False and self.causal:
            raise OptionError(
                "causal=False cannot lift what this layer was made with (causal=True). Make the layer without it."
            )
        if arguments.check_flag("causal", causal):
            always = masks.causal() if always is None else always & masks.causal()
        found = attention.scoring_for(sizes, device, mask, bias, always, None)
        return dataclasses.replace(self._scoring, mask=found.mask, bias=found.bias)

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
        """A layer with the weights of somebody's attention, giving the same output to rounding.

        Known layouts: those of textbooks, `torch.nn.MultiheadAttention`, GPT-2, GPT-NeoX, Falcon, BERT, ViT, Llama, T5,
        x-transformers, Keras, and our own; `headwise.open_checkpoint` reads whole models.

        Args:
            state_dict: names to tensors.
            num_heads: needed where the tensors do not tell it, as lists of heads, Keras kernels and sinks do.
            prefix: where the layer's names begin, such as "blocks.0.attention.".
            layout: "head by head" or "side by side", where the order of a fused projection is ambiguous.
            options: further arguments of the layer. What is no tensor must be said here: `dropout`, and `causal` or
                `mask` unless a causal mask is stored. What the tensors determine cannot be changed by options.
        """
        found = checkpoints.read(state_dict, num_heads, prefix, options.get("num_kv_heads"), layout)
        checkpoints.check_said(found, options)
        widest = functools.reduce(torch.promote_types, [x.dtype for x in found.state.values()])
        made: dict[str, Any] = {"device": found.state["q_proj.weight"].device, "dtype": widest}
        layer = cls(**made | checkpoints.merge(found.options, options))
        state = checkpoints.arrange(found, layer.fused)
        checkpoints.check_options(state, layer.state_dict())
        layer.load_state_dict(layer.state_dict() | state, strict=True)
        return layer

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        turned = self.position is not None and not isinstance(self.position, nn.Module)
        said = {  # the value, and what need not be said
            "num_kv_heads": (self.num_kv_heads, self.num_heads),
            "d_in": (self.d_in, self.d_model),
            "d_key": (self.d_key, self.d_in),
            "d_value": (self.d_value, self.d_key),
            "d_out": (self.d_out, self.d_model),
            "head_dim": (None if self.heads_width == self.d_model else self.head_dim, None),
            "mask": (None if self.mask is None else repr(self.mask), None),
            "position": (type(self.position).__name__.lower() if turned else None, None),
            "softcap": (self._scoring.softcap, None),
            "scale": (self._scoring.scale, None),
            "sinks": (self.sinks is not None, False),
            "dropout": (self.dropout, 0.0),
            "context_length": (self.context_length, None),
        }
        different = [(name, value) for name, (value, usual) in said.items() if value != usual]
        words = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in different]
        return ", ".join([f"{self.d_model}, {self.num_heads}", *words])
