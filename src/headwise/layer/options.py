"""The options a layer is constructed with: widths, masks, biases, positions and scoring, checked."""

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, ParamSpec, Self

from torch import nn

from headwise.attention.attend import CALLED_ELSEWHERE
from headwise.errors import HeadCountError, OptionError, UnknownOptionError, unknown_option
from headwise.layer.inputs import LayerInputs
from headwise.layer.positions import PositionalEncoding
from headwise.masks import Mask
from headwise.shapes import check_factor, check_size
from headwise.weights import Scoring
from headwise.weights.scoring import Relative

# What a layer's options are called elsewhere; the words of a call are in `headwise.attention`.
ELSEWHERE = {
    "embed_dim": "d_model=",
    "hidden_size": "d_model=",
    "n_embd": "d_model=",
    "dim": "d_model=",
    "n_heads": "num_heads=",
    "n_head": "num_heads=",
    "nhead": "num_heads=",
    "heads": "num_heads=",
    "h": "num_heads=",
    "num_attention_heads": "num_heads=",
    "n_kv_heads": "num_kv_heads=",
    "kv_heads": "num_kv_heads=",
    "num_key_value_heads": "num_kv_heads=",
    "num_query_groups": "num_kv_heads=",
    "dim_head": "head_dim=",
    "d_head": "head_dim=",
    "d_k": "head_dim=",
    "kdim": "d_key=",
    "vdim": "d_value=",
    "v_head_dim": "projections=latent(kv_rank, nope_dim=..., value_dim=v_head_dim)",
    "kv_lora_rank": "projections=latent(kv_lora_rank, nope_dim=...)",
    "q_lora_rank": "projections=latent(kv_rank, nope_dim=..., q_rank=q_lora_rank)",
    "qk_rope_head_dim": "projections=latent(kv_rank, nope_dim=..., rotary_dim=qk_rope_head_dim)",
    "qk_nope_head_dim": "projections=latent(kv_rank, nope_dim=qk_nope_head_dim)",
    "attn_output_gate": 'gate="element" or gate="head"',
    "batch_first": "not needed: the batch is always first",
    "attn_dropout": "dropout=",
    "attention_dropout": "dropout=",
    "attn_pdrop": "dropout=",
    "rope": "position=rotary(...)",
    "rotary": "position=rotary(...)",
    "rope_theta": "position=rotary(theta)",
    "rope_base": "position=rotary(base)",
    "pos_embeddings": "position=rotary(...)",
    "rotary_pos_emb": "position=rotary(...)",
    "alibi": "position=alibi(num_heads)",
    "alibi_slopes": "position=alibi(slopes=...)",
    "use_alibi": "position=alibi(num_heads)",
    "relative": "position=, as in position=alibi(num_heads)",
    "rel_pos_bias": "position=RelativeBias(num_heads)",
    "sliding_window": "mask=window(sliding_window - 1)",
    "window": "mask=window(back): as many keys before the query",
    "window_size": "mask=window(window_size - 1)",
    "max_seq_len": "context_length=, which allocates nothing; leave it out to accept any length",
    "max_position_embeddings": "context_length=, which allocates nothing; leave it out to accept any length",
    "block_size": "context_length=, which allocates nothing; leave it out to accept any length",
    "max_len": "context_length=, which allocates nothing; leave it out to accept any length",
    "qkv_bias": "bias={'out'} for qkv_bias=False, and bias=True for qkv_bias=True",
    "attention_bias": "bias=, True or False for all four projections",
    "use_bias": "bias=, True or False for all four projections",
    "out_bias": "bias={'q', 'k', 'v'} for out_bias=False",
    "add_bias_kv": "headwise.compat.MultiheadAttention(..., add_bias_kv=True), torch's own interface",
    "add_zero_attn": "sinks=True, one learned score per head that has no value; torch's own interface, with "
    "add_zero_attn=, is headwise.compat.MultiheadAttention",
    "scoring": "scale=, softcap= and sinks=True, each by itself",
    "attn_logit_softcapping": "softcap=",
    "logit_softcapping": "softcap=",
    "softmax_scale": "scale=",
    "scaling": "scale=",
    "sm_scale": "scale=",
    "attention_sinks": "sinks=True",
    "learnable_sink": "sinks=True",
    "q_norm": "qk_norm=, for queries and keys alike",
    "k_norm": "qk_norm=, for queries and keys alike",
    "qk_layernorm": "qk_norm=nn.LayerNorm",
    "flash": "not needed: the fastest kernel that fits runs; headwise.explain(layer, x) names it",
    "attn_implementation": "not needed: the fastest kernel that fits runs; headwise.explain(layer, x) names it",
}
TEXTBOOK = ("d_in", "d_out", "context_length", "dropout", "num_heads", "qkv_bias")
P = ParamSpec("P")


def explained(constructor: Callable[P, None]) -> Callable[P, None]:
    """The constructor of a layer; arguments that it does not take raise errors that name the right ones."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def checked(*args: P.args, **named: P.kwargs) -> None:
        try:
            signature.bind(*args, **named)
        except TypeError:
            raise _refused(args[1:], named, list(signature.parameters)[1:]) from None
        constructor(*args, **named)

    return checked


def unknown_in_call(name: str, known: Iterable[str], kind: type) -> UnknownOptionError:
    """The error for an option that a call of a layer of this `kind` does not have."""
    words = CALLED_ELSEWHERE
    if name not in words and name in inspect.signature(kind).parameters:
        words = {name: f"an option of the layer, {kind.__name__}(..., {name}=...)"}
    return unknown_option("a call", name, known, words)


def _refused(sizes: Sequence[object], named: Mapping[str, object], known: Sequence[str]) -> OptionError:
    """The error for arguments that do not fit the signature; `known` are its names, without self."""
    if _is_textbook(sizes, named):
        return OptionError(_instead_of_textbook(sizes, named))
    for name in named:
        if name not in known:
            of_calls = dict.fromkeys(LayerInputs._fields, "passed with each call, mha(x, ...)")
            return unknown_option("MultiHeadAttention", name, known, of_calls | CALLED_ELSEWHERE | ELSEWHERE)
    if len(sizes) > 2:
        cure = next((f", such as dropout={x!r}" for x in sizes[2:] if isinstance(x, float) and 0 <= x < 1), "")
        return OptionError(
            f"MultiHeadAttention got {len(sizes)} arguments by position; expected (d_model, num_heads). Name the "
            f"others{cure}."
        )
    for name, value in zip(known, sizes, strict=False):
        if name in named:
            return OptionError(f"{name} is given twice: {value!r} by position and {name}={named[name]!r}.")
    given = {**dict(zip(known, sizes, strict=False)), **named}
    return OptionError(
        f"MultiHeadAttention(d_model={given.get('d_model')}, num_heads={given.get('num_heads')}): both are needed, as "
        f"in MultiHeadAttention(512, 8)."
    )


def _is_textbook(sizes: Sequence[object], named: Mapping[str, object]) -> bool:
    """Whether these are the textbook's six sizes: by position, by name, or the first by position and others by name."""
    if not sizes:
        return "d_model" not in named and {"d_out", "num_heads"} <= named.keys()
    named_rest = len(sizes) > 2 or not named.keys().isdisjoint({"context_length", "dropout", "qkv_bias"})
    return len(sizes) in (5, 6) or (len(sizes) >= 2 and named_rest and "num_heads" in named)


def _instead_of_textbook(sizes: Sequence[object], named: Mapping[str, object]) -> str:
    """The error that shows how to write the textbook's sizes here."""
    given = {**dict(zip(TEXTBOOK, sizes, strict=False)), **named}
    d_in, d_out, context_length, dropout, num_heads, qkv_bias = (given.pop(name, None) for name in TEXTBOOK)
    here: dict[str, object] = {} if d_in in (None, d_out) else {"d_in": d_in}
    here |= {"causal": True} | ({} if context_length is None else {"context_length": context_length})
    here |= ({"dropout": dropout} if dropout else {}) | ({} if qkv_bias else {"bias": {"out"}}) | given
    shown = [repr(x) for x in sizes] + [f"{name}={value!r}" for name, value in named.items()]
    written = [f"{d_out!r}, {num_heads!r}"] + [f"{name}={value!r}" for name, value in here.items()]
    return (
        f"MultiHeadAttention({', '.join(shown)}): these are a textbook's sizes (d_in, d_out, context_length, dropout, "
        f"num_heads, qkv_bias=False). Write MultiHeadAttention({', '.join(written)}), which is causal and has the same "
        f"biases, or use headwise.textbook.Homework, which takes them as they are."
    )


def check_mask(mask: object) -> Mask | None:
    """`mask`, refused unless it is a mask that can apply to every call."""
    if mask is not None and not isinstance(mask, Mask):
        cure = "did you forget the parentheses? " if callable(mask) else ""
        raise OptionError(
            f"mask={type(mask).__name__}: expected a mask that fits every length, such as causal() & window(128); "
            f"{cure}Tensors are passed with each call."
        )
    return mask


PROJECTIONS = ("q", "k", "v", "out")
Position = PositionalEncoding | Relative | nn.Module | None


def biases(bias: bool | Collection[str]) -> dict[str, bool]:
    """Which projections have a bias.

    >>> biases({"q", "v", "out"})
    {'q': True, 'k': False, 'v': True, 'out': True}
    """
    if isinstance(bias, bool):
        return dict.fromkeys(PROJECTIONS, bias)
    if not isinstance(bias, set | frozenset | list | tuple) or not set(bias) <= set(PROJECTIONS):
        raise OptionError(
            f"bias={bias!r}: expected True, False, or the projections that have one, such as {{'q', 'v', 'out'}} out "
            f"of {', '.join(PROJECTIONS)}."
        )
    return {name: name in bias for name in PROJECTIONS}


def check_position(position: object, num_heads: int, head_dim: int) -> None:
    """Raise unless `position` is an encoding, a relative rule, or a module that returns one, and fits this layer."""
    rule = _returned(position) if isinstance(position, nn.Module) else position
    if isinstance(rule, PositionalEncoding):
        rule.check(head_dim)
    elif isinstance(rule, Relative):
        if rule.table.requires_grad and rule is position:
            raise OptionError(
                f"position={type(position).__name__}(...) has a table that requires a gradient, which the layer would "
                f"neither train nor save. Pass a module that holds the table as a parameter and returns this rule from "
                f"forward(), as RelativeBias does."
            )
        rule.check(num_heads, rule.table.device)
    elif position is not None:
        cure = " Did you forget the parentheses?" if callable(position) else ""
        raise OptionError(
            f"position={position!r}: expected rotary(...), alibi(...), RelativeBias(...), or your own subclass of "
            f"PositionalEncoding or Relative.{cure}"
        )


def rule_of(position: Position) -> PositionalEncoding | Relative | None:
    """The rule that a position stands for: itself, or what a module returns."""
    return position() if isinstance(position, nn.Module) else position


def _returned(position: nn.Module) -> PositionalEncoding | Relative:
    """The rule that a position module returns."""
    try:
        rule = position()
    except TypeError as error:
        raise OptionError(_expected_rule(position, f"calling it without arguments fails: {error}")) from error
    if not isinstance(rule, PositionalEncoding | Relative):
        raise OptionError(_expected_rule(position, f"it returned a {type(rule).__name__}"))
    return rule


def _expected_rule(position: nn.Module, found: str) -> str:
    name = type(position).__name__
    return (
        f"position={name}(...): expected a module whose forward() takes nothing and returns a PositionalEncoding or a "
        f"Relative; {found}."
    )


def scoring(scale: float | None, softcap: float | None) -> Scoring:
    """The scoring of every call of a layer; mask, sinks and position join it later."""
    check_factor("scale", scale, "1 / sqrt(D)")
    check_factor("softcap", softcap, "no cap")
    return Scoring(scale=scale, softcap=softcap)


def check_score(score: object) -> None:
    """Raise unless `score` is None or can be called; each call of the layer checks the rest."""
    if score is not None and (not callable(score) or isinstance(score, type)):
        cure = " Did you forget the parentheses?" if isinstance(score, type) else ""
        raise OptionError(
            f"score={score!r}: expected a function of (score, batch, head, query, key) that returns a score, or a "
            f"module or object that is called like that.{cure}"
        )


class Widths(NamedTuple):
    """All widths and head counts of one layer, checked."""

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
        """The width of all query heads together: d_model, unless head_dim was given."""
        return self.num_heads * self.head_dim

    @property
    def group(self) -> int:
        """How many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def complete(
        cls,
        d_model: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_in: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
    ) -> Self:
        """All sizes; by default d_in is d_model, d_key is d_in, d_value is d_key, and d_out is d_model."""
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

    def unmixed(self, d_out: int | None, width: int) -> Self:
        """The sizes without an output projection, which returns the heads side by side; `d_out` as given.

        Args:
            d_out: as given.
            width: of the values of all heads together.
        """
        if d_out not in (None, width):
            raise OptionError(
                f"out_proj=False returns the heads side by side, {width} wide, and d_out={d_out} asks for "
                f"another width. Leave out d_out, or keep the projection."
            )
        return self._replace(d_out=width)


FURTHEST = 4096  # from the number of heads given, a better one is not looked for


def check_heads_divide(d_model: int, num_heads: int) -> None:
    """Raise unless `num_heads` divides `d_model`."""
    if d_model % num_heads:
        divisors = [n for n in range(1, min(d_model, num_heads + FURTHEST) + 1) if d_model % n == 0]
        near = sorted(sorted(divisors, key=lambda n: abs(n - num_heads))[:3])
        raise HeadCountError(
            f"d_model={d_model} cannot be cut into num_heads={num_heads} equal heads ({d_model} / {num_heads} = "
            f"{d_model / num_heads:g}). Choose a num_heads that divides {d_model}, such as {', '.join(map(str, near))}."
        )


def check_heads_share(num_heads: int, num_kv_heads: int) -> None:
    """Raise unless `num_kv_heads` divides `num_heads`."""
    if num_heads % num_kv_heads:
        raise HeadCountError(
            f"num_heads={num_heads} query heads cannot share num_kv_heads={num_kv_heads} key/value heads evenly. "
            f"Choose a num_kv_heads that divides {num_heads}."
        )
