"""Encodings of positions: what a layer does to queries and keys according to where their tokens are in the text.

`PositionalEncoding` is the protocol: a layer calls `encode_query` and `encode_key`, and knows nothing else about it.

A rotary rotates each pair of numbers in a head by an angle proportional to the token's position. The dot product of two
rotated heads then depends on their distance alone. Pairs rotate at different speeds, pair i by `base ** (-2i / width)`
per token; a scaling slows them down, so that a model can read longer texts than in training. In a multi-axis rotary, a
position consists of several numbers, such as time, height and width, and each pair follows one of them. A temperature
scales queries by their position and leaves keys alone.
"""

import abc
import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.masks import Composite
from headwise.shapes import as_numbers, check_flag, check_size

MOST_SPEEDS = 64  # kept, of different rotaries and devices


class PositionalEncoding(Composite):
    """What a layer does to its queries and keys by position. A subclass overrides `encode_query`, `encode_key` or both.

    >>> class Fading(PositionalEncoding):
    ...     def encode_key(self, heads, positions):
    ...         return heads * 0.999 ** positions[..., None]
    >>> fading = Fading()
    >>> fading.encodes_queries, fading.encodes_keys
    (False, True)

    Tensors among its attributes move and save with the layer. To learn them, write a module whose `forward()` returns
    the encoding.
    """

    @property
    def axes(self) -> int:
        """How many numbers one position consists of, 1 for a text."""
        return 1

    @property
    def by_length(self) -> bool:
        """Whether a token is encoded differently if the text is longer."""
        return False

    @property
    def encodes_queries(self) -> bool:
        """Whether queries are changed."""
        return type(self).encode_query is not PositionalEncoding.encode_query

    @property
    def encodes_keys(self) -> bool:
        """Whether keys are changed."""
        return type(self).encode_key is not PositionalEncoding.encode_key

    def check(self, D: int) -> None:
        """Raise unless heads of width `D` can be encoded."""

    def describe(self) -> str:
        """The encoding in a few words, for tables."""
        return type(self).__name__.lower()

    def encode_query(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Query heads (B, H, T, D) at these positions.

        Args:
            heads: (B, H, T, D).
            positions: (T,), or (B, 1, T) if samples differ, so that `positions[..., None]` goes with heads. Several
                axes come first: (axes, T) or (axes, B, 1, T).
        """
        return heads

    def encode_key(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Key heads (B, Hkv, S, D) at these positions, as in `encode_query`."""
        return heads

    def each(self, positions: Tensor) -> "Steps":
        """The encodings that this one consists of, each with those `positions` that it takes."""
        return ((self, positions),)

    def prepared(self, positions: Tensor, D: int, dtype: torch.dtype) -> "PositionalEncoding":
        """The same encoding for queries and keys at these positions alone, with what they share computed once; heads
        are `D` wide. By default the encoding itself."""
        return self

    def __add__(self, other: object) -> "PositionalEncoding":
        """Both encodings, this one first: `rotary() + temperature()`."""
        return Combined((self, other)) if isinstance(other, PositionalEncoding) else NotImplemented


Steps = Sequence[tuple[PositionalEncoding, Tensor]]


@dataclasses.dataclass(frozen=True)
class Combined(PositionalEncoding):
    """Several encodings, one after the other; made by `+`. In a multi-axis one, the others follow the first axis."""

    parts: tuple[PositionalEncoding, ...]

    def __post_init__(self) -> None:
        if len(several := {part.axes for part in self.parts} - {1}) > 1:
            raise OptionError(f"encodings of {sorted(several)} axes cannot be added: expected one number of axes.")

    @property
    def axes(self) -> int:
        return max(part.axes for part in self.parts)

    @property
    def by_length(self) -> bool:
        return any(part.by_length for part in self.parts)

    @property
    def encodes_queries(self) -> bool:
        return any(part.encodes_queries for part in self.parts)

    @property
    def encodes_keys(self) -> bool:
        return any(part.encodes_keys for part in self.parts)

    def check(self, D: int) -> None:
        for part in self.parts:
            part.check(D)

    def describe(self) -> str:
        return " + ".join(part.describe() for part in self.parts)

    def each(self, positions: Tensor) -> Steps:
        mine = [(part, positions if part.axes == self.axes else positions[0]) for part in self.parts]
        return [pair for part, place in mine for pair in part.each(place)]

    def encode_query(self, heads: Tensor, positions: Tensor) -> Tensor:
        for part, place in self.each(positions):
            heads = part.encode_query(heads, place)
        return heads

    def encode_key(self, heads: Tensor, positions: Tensor) -> Tensor:
        for part, place in self.each(positions):
            heads = part.encode_key(heads, place)
        return heads


class Scaling(Composite, abc.ABC):
    """How the speeds of a rotary change for longer texts. A subclass defines `speeds`."""

    attention_factor = 1.0  # rotated heads are multiplied by this

    @abc.abstractmethod
    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        """The new speeds, (width / 2,)."""

    def at(self, speeds: Tensor, positions: Tensor) -> Tensor:
        """The speeds for a call with these positions, if they depend on the length of the text."""
        return speeds

    @property
    def by_length(self) -> bool:
        """Whether speeds depend on the length of the text."""
        return type(self).at is not Scaling.at

    def check(self, pairs: int) -> None:
        """Raise unless `pairs` pairs can be scaled."""


@dataclasses.dataclass(frozen=True)
class Rotary(PositionalEncoding):
    """Rotary positions, made by `rotary`. A subclass may override `speeds`, or `turn` as a whole."""

    base: float = 10000.0
    width: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def check(self, D: int) -> None:
        """Raise unless heads of width `D` can be rotated."""
        width = D if self.width is None else self.width
        if not 0 < width <= D or width % 2:
            given = f"rotary(width={self.width})" if self.width is not None else "rotary() of the whole head"
            raise OptionError(f"{given} and heads {D} wide: expected an even width from 2 to {D}.")
        if self.scaling is not None:
            self.scaling.check(width // 2)

    @property
    def by_length(self) -> bool:
        return self.scaling is not None and self.scaling.by_length

    def describe(self) -> str:
        """Such as "rotary(10000, first 32, yarn)"."""
        part = f", first {self.width}" if self.width is not None else ""
        scaled = f", {type(self.scaling).__name__.lower()}" if self.scaling is not None else ""
        return f"rotary({self.base:g}{part}{scaled}{', neighbours' if self.interleaved else ''})"

    def speeds(self, D: int, device: torch.device | None = None) -> Tensor:
        """Radians per position of every pair, (width / 2,), float64."""
        width = D if self.width is None else self.width
        speeds = plain_speeds(self.base, width, device)
        return speeds if self.scaling is None else self.scaling.speeds(speeds, self.base)

    def places(self, positions: Tensor, pairs: int) -> Tensor:
        """The position that each pair follows, (..., T, pairs), or (..., T, 1) if it is the same for all."""
        return positions[..., None]

    def encode_query(self, heads: Tensor, positions: Tensor) -> Tensor:
        return self.turn(heads, positions)

    def encode_key(self, heads: Tensor, positions: Tensor) -> Tensor:
        return self.turn(heads, positions)

    def turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads (B, H, T, D) rotated according to their positions: (T,), (B, T) or (B, 1, T), after an axis for axes.

        >>> x = torch.randn(1, 2, 5, 8)
        >>> rotary().turn(x, torch.arange(5)).shape
        torch.Size([1, 2, 5, 8])
        """
        D, precise = heads.shape[3], torch.promote_types(heads.dtype, torch.float32)
        return self.turned(heads, *self.angles(positions, D, precise, heads.device))

    def angles(self, positions: Tensor, D: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines for heads `D` wide at these positions, (T, w/2) or (B, 1, T, w/2)."""
        speeds, factor = self.speeds(D, device), 1.0
        if self.scaling is not None:
            speeds, factor = self.scaling.at(speeds, positions), self.scaling.attention_factor
        places = self.places(positions, speeds.shape[0])
        # A compiler would fuse the table into the rotation, and compute float64 cosines for every head of every sample.
        opaque = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        table = (angle_table if opaque else _angle_table)(places, speeds, factor, dtype)
        cos, sin = (table[:, :, None] if table.dim() == 4 else table).unbind()
        return cos, sin

    def turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads (B, H, T, D) rotated by these angles."""
        turns, D = _turn_neighbors if self.interleaved else _turn_halves, heads.shape[3]
        if 2 * cos.shape[-1] == D:
            return turns(heads.to(cos.dtype), cos, sin).to(heads.dtype)
        part, rest = heads.split((2 * cos.shape[-1], D - 2 * cos.shape[-1]), dim=-1)
        return torch.cat([turns(part.to(cos.dtype), cos, sin).to(heads.dtype), rest], -1)

    def prepared(self, positions: Tensor, D: int, dtype: torch.dtype) -> PositionalEncoding:
        own = type(self)
        if own.turn is not Rotary.turn or own.encode_query is not Rotary.encode_query:
            return self
        if own.encode_key is not Rotary.encode_key:
            return self
        precise = torch.promote_types(dtype, torch.float32)
        return _Angles(self, *self.angles(positions, D, precise, positions.device))


@dataclasses.dataclass(frozen=True)
class _Angles(PositionalEncoding):
    """A rotary at certain positions."""

    rule: Rotary
    cos: Tensor
    sin: Tensor

    def encode_query(self, heads: Tensor, positions: Tensor) -> Tensor:
        if torch.promote_types(heads.dtype, torch.float32) != self.cos.dtype:
            return self.rule.turn(heads, positions)
        return self.rule.turned(heads, self.cos, self.sin)

    def encode_key(self, heads: Tensor, positions: Tensor) -> Tensor:
        return self.encode_query(heads, positions)


_plain_speeds: dict[tuple[float, int, torch.device], Tensor] = {}  # a call would spend a fifth of its time on them


def plain_speeds(base: float, width: int, device: torch.device | None) -> Tensor:
    """Radians per position of every pair without scaling, (width / 2,), float64."""
    known = None if device is None or torch.compiler.is_compiling() else _plain_speeds.get((base, width, device))
    if known is not None:
        return known.clone()
    speeds = base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    if device is not None and type(speeds) is Tensor and not torch.compiler.is_compiling():
        if len(_plain_speeds) >= MOST_SPEEDS:
            _plain_speeds.clear()
        _plain_speeds[base, width, device] = speeds.clone()
    return speeds


def _angle_table(places: Tensor, speeds: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of all angles, (2, T, w/2) or (2, B, T, w/2), computed in float64 whatever the `dtype`."""
    angles = places.to(torch.float64) * speeds
    table = torch.stack([angles.cos(), angles.sin()])
    return (table if factor == 1.0 else table * factor).to(dtype)


angle_table = torch.library.custom_op("headwise::angle_table", _angle_table, mutates_args=())


@angle_table.register_fake
def _(places: Tensor, speeds: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    return speeds.new_empty((2, *places.shape[:-1], speeds.shape[0]), dtype=dtype)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs made of number i and number i + width/2."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _turn_neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs made of numbers 2i and 2i + 1."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def rotary(
    base: float = 10000.0, *, width: int | None = None, interleaved: bool = False, scaling: Scaling | None = None
) -> Rotary:
    """Rotary positions for a layer: `MultiHeadAttention(512, 8, position=rotary())`.

    Args:
        base: speeds run from 1 down to nearly 1 / base.
        width: how many numbers of a head are rotated, from the first; all by default.
        interleaved: pair neighboring numbers (GPT-J, RoFormer) instead of the two halves (Llama, GPT-NeoX).
        scaling: `linear(8)`, `ntk(8)`, `yarn(...)`, `llama3(...)` or `longrope(...)`.
    """
    return Rotary(_positive("base", base), *_pairs(width, interleaved), _check_scaling(scaling))


def _pairs(width: int | None, interleaved: bool) -> tuple[int | None, bool]:
    return None if width is None else check_size("width", width), check_flag("interleaved", interleaved)


def _check_scaling(scaling: object) -> Scaling | None:
    if scaling is not None and not isinstance(scaling, Scaling):
        raise OptionError(
            f"rotary(scaling={scaling!r}): expected linear(...), ntk(...), yarn(...), llama3(...) or longrope(...)."
        )
    return scaling


@dataclasses.dataclass(frozen=True)
class MultiAxisRotary(Rotary):
    """Made by `multi_axis_rotary`."""

    sections: tuple[int, ...] = ()
    alternating: bool = False

    @property
    def axes(self) -> int:
        return len(self.sections)

    def describe(self) -> str:
        return f"{self.axes}-axis {super().describe()}"

    def check(self, D: int) -> None:
        super().check(D)
        pairs = (D if self.width is None else self.width) // 2
        if sum(self.sections) != pairs:
            raise OptionError(
                f"multi_axis_rotary(sections={self.sections}) adds up to {sum(self.sections)} pairs, and "
                f"{2 * pairs} rotated numbers of a head make {pairs}. Choose sections that add up to {pairs}."
            )

    def places(self, positions: Tensor, pairs: int) -> Tensor:
        pair = torch.arange(pairs, device=positions.device)
        if self.alternating:
            axis = pair % self.axes
            for i, n in enumerate(self.sections):
                axis = torch.where((axis == i) & (pair >= n * self.axes), 0, axis)
        else:
            axis = torch.zeros_like(pair)
            for end in itertools.accumulate(self.sections[:-1]):
                axis = axis + (pair >= end)
        return positions.index_select(0, axis).movedim(0, -1)  # (..., T, pairs)


def multi_axis_rotary(
    sections: Sequence[int],
    base: float = 10000.0,
    *,
    alternating: bool = False,
    width: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
) -> MultiAxisRotary:
    """Rotary positions with several axes, such as time, height and width of a picture in a text.

    Calls of the layer take `positions=` of shape (axes, T) or (axes, B, T). Text has the same number on every axis: the
    default, which gives the same as `rotary(base)`.

    Args:
        sections: how many pairs follow each axis, such as (16, 24, 24); they add up to half the rotated width.
        base: as in `rotary`.
        alternating: whether the axis changes from pair to pair (Qwen3-VL), the first axis taking what the others leave,
            instead of section by section (Qwen2-VL).
        width: as in `rotary`.
        interleaved: as in `rotary`.
        scaling: as in `rotary`.
    """
    counts = tuple(check_size("a section", n) for n in sections) if isinstance(sections, Sequence) else ()
    if len(counts) < 2:
        raise OptionError(
            f"multi_axis_rotary(sections={sections!r}): expected two or more numbers of pairs, such as (16, 24, 24); "
            f"for one axis use rotary(...)."
        )
    pairs = _pairs(width, interleaved)
    alternating = check_flag("alternating", alternating)
    return MultiAxisRotary(_positive("base", base), *pairs, _check_scaling(scaling), counts, alternating)


@dataclasses.dataclass(frozen=True)
class Temperature(PositionalEncoding):
    """Made by `temperature`."""

    scale: float = 0.1
    every: int = 8192
    first: int = 1

    def describe(self) -> str:
        return f"temperature({self.scale:g}, {self.every})"

    def encode_query(self, heads: Tensor, positions: Tensor) -> Tensor:
        precise = torch.promote_types(heads.dtype, torch.float32)
        steps = ((positions + self.first) // self.every).to(precise)
        return (heads.to(precise) * (1 + self.scale * steps.log1p())[..., None]).to(heads.dtype)


def temperature(scale: float = 0.1, every: int = 8192, *, first: int = 1) -> Temperature:
    """Queries grow with their position, so that attention stays sharp in long texts; keys are left alone.

    The query at position p is multiplied by 1 + scale · ln(1 + floor((p + first) / every)). Llama 4 has it in layers
    without a rotary; `rotary(...) + temperature(...)` is Ministral 3.

    Args:
        scale: how much it grows.
        every: how many tokens have the same factor.
        first: the number of the first token, 1 in Llama 4 and 0 in Ministral 3.
    """
    return Temperature(_positive("scale", scale), check_size("every", every), _from_zero("first", first))


@dataclasses.dataclass(frozen=True)
class LinearScaling(Scaling):
    """Made by `linear`."""

    factor: float

    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        return speeds / self.factor


@dataclasses.dataclass(frozen=True)
class Ntk(Scaling):
    """Made by `ntk`."""

    factor: float

    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        # The slowest pair becomes `factor` times slower; the fastest keeps its speed.
        share = torch.arange(len(speeds), dtype=speeds.dtype, device=speeds.device) / max(len(speeds) - 1, 1)
        return speeds * self.factor**-share


@dataclasses.dataclass(frozen=True)
class Yarn(Scaling):
    """Made by `yarn`."""

    factor: float
    original_length: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float = 1.0

    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        def pair(turns: float) -> float:
            """The index, as a fraction, of the pair that makes `turns` turns within the original length."""
            return len(speeds) * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(base)

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(speeds) - 1)
        place = torch.arange(len(speeds), dtype=speeds.dtype, device=speeds.device)
        slow = ((place - low) / max(high - low, 1e-3)).clamp(0, 1)  # 0: as trained, 1: slower by the factor
        return speeds * (1 - slow) + speeds / self.factor * slow


@dataclasses.dataclass(frozen=True)
class Llama3(Scaling):
    """Made by `llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: float

    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        turns = self.original_length * speeds / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / max(high - low, 1e-9)).clamp(0, 1)  # 1: as trained, 0: slower by the factor
        return speeds * kept + speeds / self.factor * (1 - kept)


@dataclasses.dataclass(frozen=True, eq=False)
class LongRope(Scaling):
    """Made by `longrope`."""

    short: Tensor
    long: Tensor
    original_length: int
    attention_factor: float = 1.0

    def check(self, pairs: int) -> None:
        if not len(self.short) == len(self.long) == pairs:
            raise OptionError(
                f"longrope with {len(self.short)} short and {len(self.long)} long factors, for a rotary of {pairs} "
                f"pairs: expected one factor for each pair."
            )

    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        return speeds / self.short

    def at(self, speeds: Tensor, positions: Tensor) -> Tensor:
        longer = (positions >= self.original_length).any()
        return torch.where(longer, speeds * (self.short / self.long), speeds)


def linear(factor: float) -> Scaling:
    """A scaling that makes all pairs `factor` times slower: positions are interpolated."""
    return LinearScaling(_positive("factor", factor))


def ntk(factor: float) -> Scaling:
    """A scaling that makes the slowest pair `factor` times slower and keeps the fastest ("NTK-aware")."""
    return Ntk(_positive("factor", factor))


def yarn(
    factor: float,
    original_length: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> Scaling:
    """YaRN: fast pairs keep their speed, slow ones are interpolated, and heads are scaled up a little.

    Args:
        factor: how many times longer texts may be.
        original_length: the length the model was trained on.
        beta_fast: pairs with more turns than this within `original_length` keep their speed.
        beta_slow: pairs with fewer turns than this become `factor` times slower.
        attention_factor: scale of rotated heads; 0.1 · ln(factor) + 1 by default.
        truncate: whether the two limits are rounded to whole pairs (not in gpt-oss).
    """
    usual = 0.1 * math.log(factor) + 1 if _positive("factor", factor) > 1 else 1.0
    grown = usual if attention_factor is None else _positive("attention_factor", attention_factor)
    length, fast, slow = (
        _positive(name, value)
        for name, value in (("original_length", original_length), ("beta_fast", beta_fast), ("beta_slow", beta_slow))
    )
    if not slow < fast:
        raise OptionError(f"yarn(beta_fast={beta_fast}, beta_slow={beta_slow}): expected the second to be smaller.")
    return Yarn(float(factor), length, fast, slow, check_flag("truncate", truncate), grown)


def llama3(
    factor: float = 8.0, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0, original_length: int = 8192
) -> Scaling:
    """Llama 3.1: pairs with few turns within `original_length` are slowed down, with a smooth transition. If the two
    limits are equal, as in Llama 4 Scout, there is no transition.

    Args:
        factor: how many times slower.
        low_freq_factor: pairs with fewer turns than this are slowed down by the full factor.
        high_freq_factor: pairs with more turns than this keep their speed.
        original_length: the length the model was first trained on.
    """
    if not _positive("low_freq_factor", low_freq_factor) <= _positive("high_freq_factor", high_freq_factor):
        raise OptionError(
            f"llama3(low_freq_factor={low_freq_factor}, high_freq_factor={high_freq_factor}): expected the first to be "
            f"no larger."
        )
    length = _positive("original_length", original_length)
    return Llama3(_positive("factor", factor), low_freq_factor, high_freq_factor, length)


def longrope(
    factor: float,
    original_length: int,
    short: Sequence[float],
    long: Sequence[float],
    *,
    attention_factor: float | None = None,
) -> Scaling:
    """LongRoPE (Phi-3): each pair is slowed down by its own factor, one for short texts and another for long ones.

    A call uses the long factors if one of its positions is at or beyond `original_length`. Keys that are already in a
    cache stay as they are, so when a text grows beyond that length, start again with an empty cache, as transformers
    does in `generate`.

    Args:
        factor: how many times longer texts may be.
        original_length: the length up to which the short factors apply.
        short: factors for short texts, one for each pair.
        long: factors for long texts.
        attention_factor: scale of rotated heads; sqrt(1 + ln(factor) / ln(original_length)) by default.
    """
    length = check_size("original_length", original_length)
    usual = (
        math.sqrt(1 + math.log(factor) / math.log(length)) if _positive("factor", factor) > 1 and length > 1 else 1.0
    )
    grown = usual if attention_factor is None else _positive("attention_factor", attention_factor)
    return LongRope(_factors(short), _factors(long), length, grown)


def _factors(factors: Sequence[float]) -> Tensor:
    """On the CPU even under another default device, which may be meta; they move with the layer."""
    if not isinstance(factors, list | tuple):
        raise OptionError(f"longrope(short={factors!r}), or long: expected a list with one number for each pair.")
    return torch.tensor([_positive("a factor", x) for x in factors], dtype=torch.float64, device="cpu")


def check_positions(name: str, positions: object, B: int, T: int, device: torch.device, axes: int = 1) -> Tensor:
    """`positions` as an encoding takes them, from whole numbers (T,) or (B, T), with several axes (axes, [B,] T)."""
    found = positions if isinstance(positions, Tensor) else as_numbers(name, positions)
    lead = () if axes == 1 else (axes,)
    if (
        found.is_floating_point()
        or found.dtype == torch.bool
        or tuple(found.shape) not in ((T,), (*lead, T), (*lead, B, T), (*lead, 1, T))
    ):
        names = "(T,) = {} or (B, T) = {}" if axes == 1 else "(axes, T) = {} or (axes, B, T) = {}"
        raise ShapeError(
            f"{name} of shape {tuple(found.shape)} and {found.dtype}; expected whole numbers of shape "
            f"{names.format((*lead, T), (*lead, B, T))}."
        )
    found = found.to(device)
    return for_heads(found, axes) if found.dim() == 1 or axes == 1 else found if found.dim() == 2 else found[:, :, None]


def for_heads(positions: Tensor, axes: int) -> Tensor:
    """Positions (T,) or (B, T) in a text as an encoding takes them: (T,) or (B, 1, T), the same on every axis."""
    positions = positions if positions.dim() == 1 else positions[:, None]
    return positions if axes == 1 else positions.expand(axes, *positions.shape)


def _from_zero(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptionError(f"{name}={value!r}: expected a whole number from 0 up.")
    return value


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name}={value!r}: expected a number above 0.")
    return float(value)
