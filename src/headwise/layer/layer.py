"""`MultiHeadAttention`: project, split, normalize and rotate, attend, merge, project."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from headwise import attention, masks, shapes
from headwise.attention.backends import Call, choose
from headwise.errors import OptionError, ShapeError
from headwise.layer import checkpoints, options
from headwise.layer.attached import Attached, Watcher
from headwise.layer.cache import KVCache, Memory
from headwise.layer.gates import Gate, gated, make_gate
from headwise.layer.inputs import LayerCall, LayerInputs, Positions, check_keys, check_length, check_memory, misfit
from headwise.layer.norms import Norm, Norms, make_norm
from headwise.layer.options import Widths
from headwise.layer.pages import PagePool
from headwise.layer.positions import PositionalEncoding, Steps, check_positions, for_heads
from headwise.layer.projections import Fused, Projections, Separate, Three, ThreeBiases, check_head_dim, project
from headwise.layer.storage import Format
from headwise.layer.unpacking import check_not_unpacked
from headwise.masks import Composite, Mask
from headwise.weights import AttentionMap, Scoring
from headwise.weights.score import Score, ScoreFunction
from headwise.weights.scoring import Relative


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

    def agreed(self, number: int) -> int:
        """The `number` of the first rank, on every rank that shares these heads; sampling needs it."""

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
        position: `rotary(...)`, `multi_axis_rotary(...)`, `temperature(...)`, `alibi(num_heads)`, a
            `RelativeBias(num_heads)`, which several layers may share, or your own `PositionalEncoding` or `Relative`.
        scale: above 0; what scores are multiplied by, `1 / sqrt(head_dim)` by default.
        softcap: above 0; scaled scores become softcap · tanh(score / softcap).
        sinks: learn an extra score per head that takes part in the softmax and has no value.
        score: a function of your own, (score, batch, head, query, key) -> score, on tensors that broadcast, applied
            after scale and soft-cap and before biases and masks. The layer trains the parameters of a module.
        qk_norm: normalize queries and keys: "head" (each head by itself), "width" (all heads together), "unweighted", a
            function from a width to a module, such as `nn.LayerNorm`, or `Norms(...)`, which can also normalize values.
        gate: multiply what heads read before the output projection by the sigmoid of a linear map of the input:
            "element" (a factor for every number) or "head" (one for each head); or a module or function that returns
            the factors.
        projections: how queries, keys and values are made from the input: one linear map each by default, or
            `latent(...)`, or your own subclass of `Projections`.
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
    v_norm: nn.Module | None
    gate: nn.Module | None
    sinks: nn.Parameter | None
    position: options.Position
    score: ScoreFunction | None
    _version = 2  # marks a state dict as ours: other libraries have a `qkv_proj`, too
    _attached: Attached | None = None  # set by `headwise.watch` and `headwise.silence`
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
        qk_norm: Norm = None,
        gate: Gate = None,
        projections: Projections | None = None,
        bias: bool | Collection[str] = True,
        out_proj: bool = True,
        context_length: int | None = None,
        return_weights: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        shapes.check_dtype(dtype)
        out_proj = shapes.check_flag("out_proj", out_proj)
        head_dim = check_head_dim(projections, head_dim)
        widths = Widths.complete(d_model, num_heads, num_kv_heads, head_dim, d_in, d_key, d_value, d_out)
        biases = options.biases(bias)
        if projections is None:
            alike = d_key is None and d_value is None and biases["q"] == biases["k"] == biases["v"]
            projections = Fused(widths.head_dim, widths.group) if alike else Separate(widths.head_dim)
        self._projections = projections.fitted(widths)
        # Most projections make whole keys and values, and need no further step; noting it saves a call its lookups.
        self._rewrites_calls = type(projections).call is not Projections.call
        self._rewrites_reads = type(projections).read is not Projections.read
        self.value_dim = self._projections.value_dim or widths.head_dim
        self.heads_width, self.group = widths.num_heads * self.value_dim, widths.group
        widths = widths if out_proj else widths.unmixed(d_out, self.heads_width)
        self.d_model, self.num_heads, self.num_kv_heads, self.head_dim = widths[:4]
        self.d_in, self.d_key, self.d_value, self.d_out = widths[4:]
        self.dropout = shapes.check_probability("dropout", dropout)
        self.context_length = None if context_length is None else shapes.check_size("context_length", context_length)
        self.return_weights = shapes.check_flag("return_weights", return_weights)
        self.causal = shapes.check_flag("causal", causal)
        self._scoring = options.scoring(scale, softcap)
        mask = options.check_mask(mask)
        self.mask = mask if not self.causal else masks.causal() if mask is None else masks.causal() & mask
        for name, module in self._projections.modules(widths, biases, device, dtype).items():
            self.register_module(name, module)
        out = nn.Linear(self.heads_width, self.d_out, biases["out"], device, dtype) if out_proj else None
        self.register_module("out_proj", out)
        self._make_options(position, Norms.of(qk_norm), shapes.check_flag("sinks", sinks), device, dtype)
        self.score = score
        rows = (self.d_in, self.num_heads, self.value_dim)
        self.register_module("gate", make_gate(gate, *rows, biases["q"], device, dtype))

    @property
    def fused(self) -> bool:
        """Whether queries, keys and values come from one linear map, `qkv_proj`."""
        return isinstance(self._projections, Fused)

    @property
    def mask(self) -> Mask | None:
        """The mask that applies to every call, in addition to the call's own."""
        return self._scoring.mask

    @mask.setter
    def mask(self, mask: Mask | None) -> None:
        self._scoring = dataclasses.replace(self._scoring, mask=options.check_mask(mask))
        lost = mask is not None and any(x.is_meta for x in mask.tensors())  # calls then say so
        self._mask_fits_all = mask is None or (mask.fits_all and not lost)

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
        if self.mask is not None and (moved := _moved(self.mask, device)) is not self.mask:
            self.mask = moved
        if (rule := self.__dict__.get("position")) is not None:  # a module has moved already
            self.__dict__["position"] = _moved(rule, device)
        score: Any = self.score
        if isinstance(score, Composite):
            self.__dict__["score"] = _moved(score, device)
        return self

    def reset_parameters(self) -> None:
        """Draw new weights, as the constructor does: after `to_empty`, for example. A position module, which several
        layers may share, is left as it is; it has a `reset_parameters` of its own."""
        position = self._modules.get("position")
        kept = {self} if position is None else {self, *position.modules()}
        for module in self.modules():
            if module not in kept and callable(reset := getattr(module, "reset_parameters", None)):
                reset()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "position":
            turned = self._projections.turned_dim
            options.check_position(value, self.num_heads, self.head_dim if turned is None else turned)
        if name == "score":
            options.check_score(value)
        super().__setattr__(name, value)
        if name in ("position", "sinks", "score", "q_norm", "k_norm", "v_norm"):
            self._note_options()

    def _note_options(self) -> None:
        """Note which steps a call needs beyond projection, mask and scale; most layers need none."""
        rule, modules = options.rule_of(self.position), self._modules
        self._encodes = isinstance(rule, PositionalEncoding)
        normalizes = any(modules.get(name) is not None for name in ("q_norm", "k_norm", "v_norm"))
        self._shapes_heads = self._encodes or normalizes
        score, sinks = self.__dict__.get("score") or modules.get("score"), self._parameters.get("sinks")
        self._extends_scoring = isinstance(rule, Relative) or sinks is not None or score is not None

    def _make_options(
        self,
        position: options.Position,
        norms: Norms,
        sinks: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.position = position
        rule = self.__dict__.get("position")
        if rule is not None and device is not None and torch.device(device).type != "meta":
            self.__dict__["position"] = rule.to(device)
        self._norm_after = norms.after
        sizes = {"q": (self.num_heads, self.head_dim), "k": (self.num_kv_heads, self.head_dim)}
        sizes["v"] = (self.num_kv_heads, self.value_dim)
        for (part, size), kind in zip(sizes.items(), (norms.query, norms.key, norms.value), strict=True):
            self.register_module(f"{part}_norm", make_norm(kind, *size, device, dtype))
        if not self._projections.makes_keys and (norms.key is not None or norms.value is not None):
            raise OptionError(
                f"qk_norm={norms.key or norms!r} with projections={self._projections!r}, which store less than whole "
                f"keys. Leave out qk_norm; latent(norm=...) normalizes what keys are made from."
            )
        learned = torch.zeros(self.num_heads, device=device, dtype=dtype) if sinks else None
        self.register_parameter("sinks", None if learned is None else nn.Parameter(learned))
        self._note_options()  # registering bypasses __setattr__

    def forward(
        self,
        query: Tensor,
        key: Tensor | Memory | KVCache | None = None,
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
            key: (B, S, d_key), or the result of `remember`; the query by default. `mha(x, cache)` reads the keys and
                values that another layer has appended for the same tokens. `mha(x, mask)` works, too: a second argument
                of three dimensions is a key, anything else a mask.
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
        if wanted is not True and wanted is not False:
            raise OptionError(f"return_weights={return_weights!r}: expected True or False.")
        watchers = () if self._attached is None else self._attached.watchers()
        if wanted or watchers:
            held = key if isinstance(key, KVCache) else cache
            read, weights = self._attend_and_look(call, held, watchers)
        else:
            read = choose(call).run(call) if self._spread is None else self._spread.attend(call)
        if self._attached is not None:
            read = self._attached.read(call, read)
        if self._rewrites_reads:
            read = self._projections.read(self._modules, call, read)
        gate = self._modules["gate"]
        read = read if gate is None else gated(read, gate(inputs.query))
        output = self._merge(read if self._attached is None else self._attached.handed(call, read))
        if inputs.offsets is not None:
            output = torch.nested.nested_tensor_from_jagged(output[0], inputs.offsets)
        if wanted:
            return output, weights
        if not is_compiling() and type(samples := output.size(0)) is int and samples == 2:
            check_not_unpacked(self, output)
        return output

    def plan(self, inputs: LayerInputs) -> Call:
        """The attention call that `forward` makes of these inputs: heads, scoring and dropout, ready to run."""
        if inputs.key is not None or inputs.cache is not None or inputs.lengths is not None:
            inputs = inputs.resolved()
        cache, packed = inputs.cache, inputs.offsets is not None
        if self._spread is not None:
            self._spread.check_call(crossing=inputs.crossing, cached=cache is not None, packed=packed)
        shared = cache.latest(inputs.query.shape[1], inputs.lengths) if cache is not None and inputs.shares else None
        if shared is not None:
            inputs = inputs._replace(key=Memory(shared.key, shared.value))
        q, k, v = self._project(inputs)
        if self._shapes_heads or inputs.positions is not None or inputs.key_positions is not None:
            q, k, v = self._shape_heads(q, k, v, inputs)
        new = (q.shape[2], inputs.lengths) if shared is None else (0, None)
        S = k.shape[2] if cache is None else cache.text_length(*new)
        if self.context_length is not None and not packed:
            check_length(self.context_length, q.shape[2], S, cache)
        scoring = self._call_scoring(q, S, inputs)
        if self._extends_scoring:
            scoring = self._extended(scoring, q, S)
        if cache is not None:  # after all checks: a refused call leaves the cache as it was
            cache.check_mask(scoring.mask, inputs.lengths)
            appended = cache.append(k, v, inputs.lengths) if shared is None else shared
            k, v, scoring = appended.key, appended.value, appended.scoring(scoring)
        call = Call(q, k, v, scoring, self.dropout if self.training else 0.0)
        return self._projections.call(self._modules, call) if self._rewrites_calls else call

    def _pack(self, inputs: LayerInputs) -> LayerInputs:
        """The samples of a nested query in one row."""
        if self.score is not None:
            raise OptionError(
                "a nested tensor is packed into one row, which renumbers samples and positions, and this layer's score "
                "function asks for them. Pad the samples and pass mask=padding(lengths)."
            )
        return inputs.packed(self.context_length, self.mask, numbered=self._encodes)

    # Project and split.

    def _project(self, inputs: LayerInputs) -> Three:
        """Query heads (B, H, T, D), and key and value heads as a cache stores them."""
        query, key, value = inputs.query, inputs.key, inputs.value
        if not isinstance(query, Tensor) or query.dim() != 3 or query.shape[2] != self.d_in:
            raise misfit("query", query, self.d_in, "d_in")
        if isinstance(key, Memory):
            check_memory(query, key, value, self._projections.stored(self.num_kv_heads, self.head_dim))
            return self._projections.queries(self._modules, query), *key
        if key is None and value is not None:
            raise ShapeError("value is given without key; pass mha(query, key, value), or mha(x).")
        if key is None or (key is query and value is query):
            if not self.d_in == self.d_key == self.d_value:
                raise ShapeError(
                    f"this layer takes queries {self.d_in} wide, keys {self.d_key} and values {self.d_value}, so one "
                    f"input cannot be all three. Pass mha(query, key, value)."
                )
            return self._projections.heads(self._modules, query)
        assert not isinstance(key, KVCache)  # noqa: S101 - `resolved` made it a memory
        value = key if value is None else value
        check_keys(query, key, value, self.d_key, self.d_value)
        return self._projections.cross(self._modules, query, key, value)

    # Normalize and encode positions.

    def _shape_heads(self, q: Tensor, k: Tensor, v: Tensor, inputs: LayerInputs) -> Three:
        """The heads after norms and positions; remembered keys and values have had both."""
        remembered, encoding = isinstance(inputs.key, Memory), self._encoding(q)
        if encoding is None and (inputs.positions is not None or inputs.key_positions is not None):
            raise OptionError(
                "positions are for a rotary or another encoding of queries and keys, and this layer has none. Leave "
                "them out: masks, ALiBi and relative biases follow the order of queries and keys."
            )
        steps: Steps = ()
        if encoding is not None:
            steps = self._steps(q, encoding, self._query_positions(q, inputs, remembered, encoding))
        q = self._shaped("q", q, steps)
        if remembered:
            return q, k, v
        if encoding is not None and inputs.key_positions is not None:
            steps = self._steps(k, encoding, self._checked("key_positions", inputs.key_positions, k, encoding))
        return q, self._shaped("k", k, steps), v if self.v_norm is None else self.v_norm(v)

    def _encoding(self, heads: Tensor) -> PositionalEncoding | None:
        """The layer's encoding of positions in queries and keys."""
        rule = options.rule_of(self.position) if self._encodes else None
        if not isinstance(rule, PositionalEncoding):
            return None
        return rule.to(heads.device) if heads.is_meta else rule

    def _steps(self, heads: Tensor, encoding: PositionalEncoding, at: Tensor) -> Steps:
        """The encodings of heads at these positions, one after the other, each with the positions that it takes."""
        D = self._projections.turned_dim or heads.shape[3]
        return [(one.prepared(place, D, heads.dtype), place) for one, place in encoding.each(at)]

    def _shaped(self, part: str, heads: Tensor, steps: Steps) -> Tensor:
        """Queries or keys after their norm and their position, in the layer's order."""
        norm = self._modules[f"{part}_norm"]
        if norm is not None and not self._norm_after:
            heads = norm(heads)
        for one, place in steps:
            encode = one.encode_query if part == "q" else one.encode_key
            # What changes queries alone is for the whole query; what changes keys, for the part that turns.
            if self._projections.turned_dim is None or not one.encodes_keys:
                heads = encode(heads, place)
            else:
                heads = self._projections.turned(heads, functools.partial(_encoded, encode, place))
        return norm(heads) if norm is not None and self._norm_after else heads

    @staticmethod
    def _checked(name: str, positions: Any, heads: Tensor, encoding: PositionalEncoding) -> Tensor:
        return check_positions(name, positions, heads.shape[0], heads.shape[2], heads.device, encoding.axes)

    def _query_positions(
        self, q: Tensor, inputs: LayerInputs, remembered: bool, encoding: PositionalEncoding
    ) -> Tensor:
        """The positions of the queries in the text, as the encoding takes them."""
        given, T = inputs.positions, q.shape[2]
        if given is None and self._spread is not None:
            given = self._spread.positions(q)
        keys_said = (inputs.key_positions is None) == remembered or not encoding.encodes_keys
        if inputs.crossing and (given is None or not keys_said):
            raise OptionError(
                "cross-attention with a rotary: pass positions= for the queries and key_positions= for the keys (with "
                "remembered keys, remember(memory, positions=...)). Only you know how the two texts are aligned."
            )
        if given is not None:
            return self._checked("positions", given, q, encoding)
        return for_heads(self._counted(T, inputs, q.device), encoding.axes)

    @staticmethod
    def _counted(T: int, inputs: LayerInputs, device: torch.device) -> Tensor:
        """The positions of T queries in the text, (T,) or (B, T): from 0, or as the cache counts."""
        if inputs.cache is None:
            return torch.arange(T, device=device)
        return inputs.cache.latest_positions(T, inputs.lengths) if inputs.shares else inputs.cache.next_positions(T)

    # Score.

    def _call_scoring(self, q: Tensor, S: int, inputs: LayerInputs) -> Scoring:
        """The layer's scoring together with the mask and bias of this call, checked against its sizes."""
        scoring, mask = self._scoring, self._scoring.mask
        if inputs.crossing:
            scoring = dataclasses.replace(scoring, cross=True)
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
        if shapes.check_flag("causal", inputs.causal):
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
        rule = options.rule_of(self.position)
        if not isinstance(rule, Relative):
            return None
        return rule if rule.table.device == device else rule.to(device)

    # Attend, merge and project.

    def _attend_and_look(
        self, call: Call, cache: KVCache | None, watchers: Sequence[Watcher]
    ) -> tuple[Tensor, AttentionMap]:
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
        for watcher in watchers:
            watcher(weights)
        return read, weights

    def _merge(self, read: Tensor) -> Tensor:
        """The output (B, T, d_out) from what the heads read, (B, H, T, Dv)."""
        B, _, T, _ = read.shape
        # (B, T, H·Dv): a view, since kernels write (B, T, H, Dv); for one token both orders are the same.
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
            dtype: the dtype of the keys by default: that of autocast where it is on, else the layer's.
        """
        static = shapes.check_flag("static", static)
        reach = None if static or capacity is not None else masks.reach_back(self.mask)
        where = self._where(device, dtype)
        heads, key_dim, value_dim = self._projections.stored(self.num_kv_heads, self.head_dim)
        options: dict[str, Any] = {"capacity": capacity, "window": reach, "static": static, "storage": storage}
        return KVCache(batch, heads, key_dim, value_dim=value_dim, **options, **where)

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
            dtype: the dtype of the keys by default: that of autocast where it is on, else the layer's.
        """
        heads, key_dim, value_dim = self._projections.stored(self.num_kv_heads, self.head_dim)
        where = self._where(device, dtype)
        return PagePool(pages, page_size, ((heads, key_dim), (heads, value_dim)), storage=storage, **where)

    def _where(self, device: torch.device | str | None, dtype: torch.dtype | None) -> dict[str, Any]:
        """The device and dtype of keys that this layer makes now, unless others are given."""
        shapes.check_dtype(dtype)
        like = next(self.parameters())
        device = like.device if device is None else torch.device(device)
        mixed = torch.is_autocast_enabled(device.type) and like.dtype != torch.float64  # autocast leaves float64 alone
        usual = torch.get_autocast_dtype(device.type) if mixed else like.dtype
        return {"device": device, "dtype": usual if dtype is None else dtype}

    def remember(self, key: Tensor, value: Tensor | None = None, *, positions: Positions = None) -> Memory:
        """The keys and values of an encoder's output, projected once for all later calls: `mha(x, memory)`.

        Args:
            key: (B, S, d_key).
            value: (B, S, d_value); the key by default.
            positions: the positions of the keys, (S,) or (B, S), for a rotary.
        """
        value = key if value is None else value
        check_keys(key, key, value, self.d_key, self.d_value)
        k, v = self._projections.keys_and_values(self._modules, key, value)
        encoding = self._encoding(k)
        steps: Steps = ()
        if encoding is not None and encoding.encodes_keys:
            if positions is None:
                raise OptionError(
                    "this layer has a rotary: pass remember(memory, positions=...), the positions of the keys."
                )
            steps = self._steps(k, encoding, self._checked("positions", positions, k, encoding))
        k, v = self._shaped("k", k, steps), v if self.v_norm is None else self.v_norm(v)
        return Memory(k, v)

    def projections(self) -> tuple[Three, ThreeBiases]:
        """Weights (H·D, d_in), (Hkv·D, d_key), (Hkv·D, d_value) of query, key and value, and their biases.

        Heads are in order, as in the textbooks, however the layer stores them.
        """
        return self._projections.weights(self._modules)

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
        made: dict[str, Any] = {"device": next(iter(found.state.values())).device, "dtype": widest}
        layer = cls(**made | checkpoints.merge(found.options, options))
        state = found.arranged(layer.fused)
        checkpoints.check_options(state, layer.state_dict())
        layer.load_state_dict(layer.state_dict() | state, strict=True)
        return layer

    def extra_repr(self) -> str:
        """The options that differ from their defaults."""
        rule = self.__dict__.get("position")  # a module prints itself
        usual = isinstance(self._projections, Fused | Separate)
        values = {  # the value, and the default
            "num_kv_heads": (self.num_kv_heads, self.num_heads),
            "d_in": (self.d_in, self.d_model),
            "d_key": (self.d_key, self.d_in),
            "d_value": (self.d_value, self.d_key),
            "d_out": (self.d_out, self.d_model),
            "head_dim": (None if not usual or self.heads_width == self.d_model else self.head_dim, None),
            "projections": (None if usual else repr(self._projections), None),
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


def _encoded(method: Callable[[Tensor, Tensor], Tensor], positions: Tensor, heads: Tensor) -> Tensor:
    return method(heads, positions)


def _moved(part: Any, device: torch.device) -> Any:
    """A mask or position on `device`; one whose numbers were lost on the meta device stays there, until it is used."""
    return part if any(x.is_meta for x in part.tensors()) else part.to(device)
