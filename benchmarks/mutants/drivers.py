"""How each style is built and called: sizes, masks, options, and where its projections lie. One table, `DRIVERS`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STYLES = Path(__file__).parent / "styles"
DROPOUT = 0.4


class Size(NamedTuple):
    """One setting. E = H * D unless the style can tell them apart; `model` is the width where it can."""

    B: int
    T: int
    S: int
    H: int
    Hkv: int
    D: int
    Dv: int
    model: int  # input width where it may differ from H * D
    other: int  # width of the context, or output width
    longest: int  # of the stored mask

    @property
    def E(self) -> int:
        """The width of all heads together."""
        return self.H * self.D


SIZES = (
    Size(B=2, T=5, S=7, H=6, Hkv=3, D=4, Dv=3, model=10, other=9, longest=11),
    Size(B=3, T=7, S=4, H=2, Hkv=1, D=6, Dv=5, model=16, other=14, longest=13),
    Size(B=1, T=1, S=3, H=4, Hkv=2, D=2, Dv=3, model=6, other=5, longest=9),
    Size(B=5, T=8, S=6, H=1, Hkv=1, D=10, Dv=7, model=9, other=4, longest=8),
    Size(B=4, T=9, S=2, H=12, Hkv=4, D=2, Dv=4, model=7, other=11, longest=17),
)


@dataclass
class Call:
    """One call: what is done with the module, and the tensors given to it."""

    name: str
    run: Callable[[nn.Module], Any]
    inputs: list[Tensor]
    masked: bool = False


@dataclass
class Inputs:
    """Random inputs of one size, the same for every mutant. `flip` names mask arguments that are given inverted."""

    size: Size
    dtype: torch.dtype = torch.float64
    flip: frozenset[str] = frozenset()
    copies: int = 0  # that many equal samples instead of a batch
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def x(self, length: int, width: int, second: bool = False) -> Tensor:
        """Tokens (B, length, width), or (length, B, width)."""
        x = torch.randn(1 if self.copies else self.size.B, length, width, generator=self.generator)
        x = x.expand(self.copies, -1, -1) if self.copies else x
        x = (x.transpose(0, 1) if second else x) * 1.5
        return x.contiguous().to(self.dtype).requires_grad_()

    def mask(self, name: str, *shape: int, hide: bool = False, empty: bool = False) -> Tensor:
        """A boolean mask; every row shows and hides a key if it can. `hide`: True hides. `empty`: a blind row."""
        keep = torch.rand(shape, generator=self.generator) < 0.6
        at = torch.randint(shape[-1], (*shape[:-1], 1), generator=self.generator)
        keep = keep.scatter(-1, (at + 1) % shape[-1], False).scatter(-1, at, True)
        if empty:
            keep[(-1,) * (len(shape) - 1)] = False
        if self.copies and shape[0] == self.size.B:
            keep = keep[:1].expand(self.copies, *shape[1:]).contiguous()
        return keep ^ hide ^ (name in self.flip)

    @property
    def B(self) -> int:
        """Samples in a batch."""
        return self.size.B


Slots = dict[str, list[tuple[Tensor, Tensor | None]]]


@dataclass
class Driver:
    """One style: its class, how to build it, how to call it, and its projections as rows of heads."""

    target: str
    build: Callable[[dict[str, Any], Size], nn.Module]
    calls: Callable[[Inputs], Iterator[Call]]
    slots: Callable[[nn.Module, Size], Slots] | None  # None: the call itself says which weights are whose
    masks: tuple[str, ...] = ()
    edges: Callable[[Inputs], Iterator[Call]] = lambda _: iter(())  # calls that only a sturdy class survives
    causal: bool = False  # built in
    rotary: bool = False
    states_shape: bool = False  # a comment says which shape a mask has


def triangle(T: int, S: int) -> Tensor:
    """True where a query may look: itself and before."""
    return torch.ones(T, S, dtype=torch.bool).tril(max(S - T, 0))


def _plain(*inputs: Tensor, name: str = "plain", **options: Any) -> Call:
    return Call(name, lambda m: m(*inputs, **options), list(inputs))


def _masked(*inputs: Tensor, name: str, **options: Any) -> Call:
    given = [v for v in options.values() if isinstance(v, Tensor)]
    return Call(name, lambda m: m(*inputs, **options), [*inputs, *given], masked=True)


# Calls.


def _self_only(i: Inputs, width: str = "E") -> Iterator[Call]:
    E = getattr(i.size, width)
    yield _plain(i.x(i.size.T, E))
    yield _plain(i.x(1, E), name="one token")
    yield _plain(i.x(2, E), name="two tokens")


def _beyond(i: Inputs, width: str = "E") -> Iterator[Call]:
    yield _plain(i.x(i.size.longest + 1, getattr(i.size, width)), name="too long")


def _three(i: Inputs, name: str, shapes: tuple[str, ...], width: str = "E", hide: bool = False) -> Iterator[Call]:
    """Calls with query, key, value: self, cross, three different tensors, and masks of the shapes named."""
    s, E = i.size, getattr(i.size, width)
    q, k, v = i.x(s.T, E), i.x(s.S, E), i.x(s.S, E)
    x = i.x(s.T, E)
    yield _plain(q, k, v, name="cross")
    yield Call("self", lambda m: m(x, x, x), [x])
    for shape in shapes:
        sizes = [{"B": i.B, "T": s.T, "S": s.S, "H": s.H, "1": 1}[letter] for letter in shape]
        yield _masked(q, k, v, name=f"mask {shape}", **{name: i.mask(name, *sizes, hide=hide)})
    if shapes:
        keep = (triangle(s.T, s.T) ^ hide ^ (name in i.flip))[None]
        yield Call("causal", lambda m: m(x, x, x, **{name: keep}), [x, keep], masked=True)
        whole = torch.full((1, s.T, s.T), (not hide) ^ (name in i.flip))
        yield Call("all visible", lambda m: m(x, x, x, **{name: whole}), [x, whole], masked=True)


def _empty_row(i: Inputs, name: str, hide: bool, width: str = "E") -> Iterator[Call]:
    s, E = i.size, getattr(i.size, width)
    q, k = i.x(s.T, E), i.x(s.S, E)
    yield _masked(q, k, k, name="blind query", **{name: i.mask(name, i.B, s.T, s.S, hide=hide, empty=True)})


def _einsum_calls(i: Inputs) -> Iterator[Call]:
    yield from _self_only(i, "model")
    yield _plain(i.x(i.size.T, i.size.model), name="causal", causal=True)


def _padded(i: Inputs) -> Iterator[Call]:
    yield from _self_only(i, "model")
    yield _masked(i.x(i.size.T, i.size.model), name="mask", mask=i.mask("mask", i.B, i.size.T))


def _additive(i: Inputs, keep: Tensor) -> Tensor:
    return torch.zeros(keep.shape, dtype=i.dtype).masked_fill(~keep, -1e4)


def _config_calls(i: Inputs) -> Iterator[Call]:
    s = i.size
    yield from _self_only(i)
    for shape in ((i.B, 1, 1, s.T), (i.B, 1, s.T, s.T), (s.T, s.T), (i.B, s.H, s.T, s.T)):
        added = _additive(i, i.mask("attention_mask", *shape))
        yield _masked(i.x(s.T, s.E), name=f"mask {len(shape)}", attention_mask=added)
    soft = torch.randn(i.B, s.H, s.T, s.T, generator=i.generator).to(i.dtype)
    soft = soft[:1].expand(i.copies, -1, -1, -1) if i.copies else soft
    yield _masked(i.x(s.T, s.E), name="bias", attention_mask=soft)


def _cached_calls(i: Inputs) -> Iterator[Call]:
    s = i.size
    x = i.x(s.T + 4, s.E)
    yield _plain(x, name="whole")
    yield _plain(i.x(1, s.E), name="one token")

    def continued(m: nn.Module, cuts: tuple[int, ...]) -> Any:
        outputs, past, start = [], None, 0
        for end in (*cuts, x.shape[1]):
            output, past = m(x[:, start:end], past)
            outputs.append(output)
            start = end
        return outputs, past

    for cuts in ((s.T,), (s.T, s.T + 1), (1, 2, 4)):
        yield Call(f"cut at {cuts}", partial(continued, cuts=cuts), [x])


def _grouped_calls(i: Inputs) -> Iterator[Call]:
    s = i.size
    yield from _self_only(i)
    for shape in ((i.B, 1, 1, s.T), (i.B, 1, s.T, s.T), (s.T, s.T)):
        yield _masked(i.x(s.T, s.E), name=f"mask {shape}", mask=i.mask("mask", *shape))
    yield _masked(i.x(s.T, s.E), name="causal", mask=triangle(s.T, s.T) ^ ("mask" in i.flip))


def _second_calls(i: Inputs) -> Iterator[Call]:
    s = i.size
    q, k, v = i.x(s.T, s.E, True), i.x(s.S, s.E, True), i.x(s.S, s.E, True)
    x = i.x(s.T, s.E, True)
    yield _plain(q, k, v, name="cross")
    yield Call("self", lambda m: m(x, x, x), [x])
    yield _masked(q, k, v, name="mask", attn_mask=_additive(i, i.mask("attn_mask", s.T, s.S)))
    causal = torch.zeros(s.T, s.T, dtype=i.dtype).masked_fill(~triangle(s.T, s.T), -torch.inf)
    yield Call("causal", lambda m: m(x, x, x, attn_mask=causal), [x, causal], masked=True)


def _cross_calls(i: Inputs) -> Iterator[Call]:
    s = i.size
    width = s.other if s.B % 2 else s.model
    x, context = i.x(s.T, s.model), i.x(s.S, width)
    yield _plain(x, context, name="context")
    yield _plain(i.x(1, s.model), context, name="one query")
    yield _masked(x, context, name="context, mask", mask=i.mask("mask", i.B, s.S))
    if width == s.model:
        yield _plain(x, name="alone")
        yield _masked(x, name="alone, mask", mask=i.mask("mask", i.B, s.T))


def _sdpa_calls(i: Inputs) -> Iterator[Call]:
    s = i.size
    yield from _self_only(i)
    yield _plain(i.x(s.T, s.E), name="causal", is_causal=True)
    for shape in ((i.B, 1, s.T, s.T), (s.T, s.T), (i.B, 1, 1, s.T)):
        yield _masked(i.x(s.T, s.E), name=f"mask {shape}", attn_mask=i.mask("attn_mask", *shape))
    soft = torch.randn(s.T, s.T, generator=i.generator).to(i.dtype)
    yield _masked(i.x(s.T, s.E), name="bias", attn_mask=soft)


def _padding_calls(i: Inputs) -> Iterator[Call]:
    s = i.size
    x = i.x(s.T, s.E)
    yield from _self_only(i)
    yield _plain(x, name="weights", need_weights=True)
    pad = i.mask("key_padding_mask", i.B, s.T, hide=True)
    yield _masked(x, name="padding", key_padding_mask=pad)
    causal = ~triangle(s.T, s.T) ^ ("attn_mask" in i.flip)
    yield _masked(x, name="causal", attn_mask=causal, need_weights=True)
    yield _masked(x, name="attn_mask", attn_mask=i.mask("attn_mask", s.T, s.T, hide=True))
    start = torch.zeros(i.copies or i.B, s.T, dtype=torch.bool)
    start[:, -1] = s.T > 1
    both = {"key_padding_mask": start ^ ("key_padding_mask" in i.flip), "attn_mask": causal}
    yield _masked(x, name="both", need_weights=True, **both)


# Projections, as rows of heads: query, key and value (heads * width, input), output transposed (heads * width, output).


def _named(q: str, k: str, v: str, o: str) -> Callable[[nn.Module, Size], Slots]:
    def slots(module: nn.Module, size: Size) -> Slots:
        layers = [module.get_submodule(name) for name in (q, k, v, o)]
        found: Slots = {role: [(w.weight, w.bias)] for role, w in zip("qkv", layers[:3], strict=True)}
        return found | {"o": [(layers[3].weight.T, None)]}

    return slots


def _fused(name: str, o: str) -> Callable[[nn.Module, Size], Slots]:
    def slots(module: nn.Module, size: Size) -> Slots:
        layer, out = module.get_submodule(name), module.get_submodule(o)
        biases = [None] * 3 if layer.bias is None else layer.bias.chunk(3)
        found: Slots = {r: [(w, b)] for r, w, b in zip("qkv", layer.weight.chunk(3), biases, strict=True)}
        return found | {"o": [(out.weight.T, None)]}

    return slots


def _einsum_slots(module: Any, size: Size) -> Slots:
    found: Slots = {role: [(w.T, None) for w in getattr(module, f"W_{role.upper()}")] for role in "qkv"}
    return found | {"o": [(w, None) for w in module.W_O]}


def _listed_slots(module: Any, size: Size) -> Slots:
    names = {"q": "query", "k": "key", "v": "value"}
    found: Slots = {r: [(getattr(h, n).weight, None) for h in module.heads] for r, n in names.items()}
    return found | {"o": [(module.proj.weight.T, None)]}


def _config(names: dict[str, Any], s: Size) -> nn.Module:
    config = names["AttentionConfig"](hidden_size=s.E, num_attention_heads=s.H, attention_dropout=DROPOUT)
    return names["SelfAttention"](config)


def _cross(names: dict[str, Any], s: Size) -> nn.Module:
    width = s.other if s.B % 2 else None  # without one, the context is as wide as the input
    return names["CrossAttention"](s.model, width, s.H, s.D, DROPOUT)


DRIVERS = {
    "separate": Driver(
        "MultiHeadAttention", lambda n, s: n["MultiHeadAttention"](s.E, s.H, dropout=DROPOUT),
        partial(_three, name="mask", shapes=("B11S", "B1TS", "TS", "1TS", "BHTS")),
        _named("W_q", "W_k", "W_v", "W_o"), ("mask",)),
    "fused_causal": Driver(
        "CausalSelfAttention", lambda n, s: n["CausalSelfAttention"](s.E, s.H, s.longest, DROPOUT, DROPOUT / 2),
        _self_only, _fused("c_attn", "c_proj"), edges=_beyond, causal=True),
    "einsum": Driver(
        "MultiHeadAttention", lambda n, s: n["MultiHeadAttention"](s.model, s.H, s.D), _einsum_calls, _einsum_slots),
    "rearranged": Driver(
        "Attention", lambda n, s: n["Attention"](s.model, s.H, s.D, DROPOUT), _padded, _fused("to_qkv", "to_out.0"),
        ("mask",), states_shape=True),
    "head_list": Driver(
        "MultiHeadAttention", lambda n, s: n["MultiHeadAttention"](s.E, s.H, s.longest, DROPOUT), _self_only,
        _listed_slots, edges=_beyond, causal=True),
    "config_driven": Driver("SelfAttention", _config, _config_calls, _named("query", "key", "value", "dense")),
    "kv_cache": Driver(
        "CachedAttention", lambda n, s: n["CachedAttention"](s.E, s.H), _cached_calls,
        _named("q_proj", "k_proj", "v_proj", "o_proj"), causal=True),
    "grouped": Driver(
        "GroupedQueryAttention", lambda n, s: n["GroupedQueryAttention"](s.E, s.H, s.Hkv), _grouped_calls,
        _named("q_proj", "k_proj", "v_proj", "o_proj"), ("mask",)),
    "batch_second": Driver(
        "SequenceFirstAttention", lambda n, s: n["SequenceFirstAttention"](s.E, s.H, DROPOUT), _second_calls,
        _named("q_proj", "k_proj", "v_proj", "out_proj")),
    "cross": Driver(
        "CrossAttention", _cross, _cross_calls,
        _named("to_q", "to_k", "to_v", "to_out.0"), ("mask",)),
    "book": Driver(
        "MultiHeadAttention",
        lambda n, s: n["MultiHeadAttention"](s.model, s.E, s.longest, DROPOUT, s.H, qkv_bias=s.B % 2 == 0),
        partial(_self_only, width="model"), _named("W_query", "W_key", "W_value", "out_proj"),
        edges=partial(_beyond, width="model"), causal=True),
    "sdpa": Driver(
        "MultiHeadAttention", lambda n, s: n["MultiHeadAttention"](s.E, s.H, DROPOUT), _sdpa_calls,
        _fused("qkv_proj", "out_proj"), ("attn_mask",)),
    "homework": Driver(
        "MultiHeadAttention", lambda n, s: n["MultiHeadAttention"](s.E, s.H, DROPOUT),
        partial(_three, name="mask", shapes=("BTS", "B1S", "1TS")), _named("wq", "wk", "wv", "dense"), ("mask",),
        partial(_empty_row, name="mask", hide=False)),
    "explicit_widths": Driver(
        "MultiHeadAttention", lambda n, s: n["MultiHeadAttention"](s.H, s.model, s.D, s.Dv, DROPOUT),
        partial(_three, name="mask", shapes=("BTS", "B1S", "1TS"), width="model", hide=True),
        _named("w_qs", "w_ks", "w_vs", "fc"), ("mask",), partial(_empty_row, name="mask", hide=True, width="model")),
    "key_padding": Driver(
        "MultiheadAttention", lambda n, s: n["MultiheadAttention"](s.E, s.H, DROPOUT), _padding_calls,
        _fused("in_proj", "out_proj"), ("key_padding_mask", "attn_mask"), states_shape=True),
    "rotary": Driver(
        "RotarySelfAttention", lambda n, s: n["RotarySelfAttention"](s.E, s.H, s.longest), _self_only,
        _named("wq", "wk", "wv", "wo"), edges=_beyond, causal=True, rotary=True),
}  # fmt: skip


def source_of(style: str) -> str:
    """The text of a style."""
    return (STYLES / f"{style}.py").read_text(encoding="utf-8")
