"""The options a layer is constructed with: widths, masks, biases, positions and scoring, checked."""

import difflib
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from headwise.errors import HeadCountError, OptionError, UnknownOptionError
from headwise.layer.positions import PositionalEncoding
from headwise.masks import Mask
from headwise.shapes import check_factor, check_size
from headwise.weights import Scoring
from headwise.weights.scoring import Relative

TEXTBOOK = ("d_in", "d_out", "context_length", "dropout", "num_heads", "qkv_bias")


def by_position(sizes: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Named arguments merged with positional ones, which are (d_model, num_heads) or in the textbook's order."""
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
    "attn_mask": "mask=~attn_mask if it is bool (here True means visible), bias=attn_mask if it is float",
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
    """Raise if an option is unknown, and say what it is called here."""
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


def check_scoring(scoring: object) -> Scoring:
    """`scoring`, refused where it holds something that belongs to a single call."""
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
        raise OptionError("Scoring(sinks=tensor) in a layer's scoring=: pass sinks=True, then set layer.sinks.data.")
    return scoring


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
        d_model: int | None,
        num_heads: int | None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        d_in: int | None = None,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
    ) -> Self:
        """All sizes; by default d_in is d_model, d_key is d_in, d_value is d_key, and d_out is d_model."""
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


def check_heads_divide(d_model: int, num_heads: int) -> None:
    """Raise unless `num_heads` divides `d_model`."""
    if d_model % num_heads:
        divisors = [n for n in range(1, d_model + 1) if d_model % n == 0]
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
