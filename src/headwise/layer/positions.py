"""Rotary positions: each pair of numbers in a head is rotated by an angle proportional to the token's position.

The dot product of two rotated heads then depends on their distance alone. Pairs rotate at different speeds, pair i by
`base ** (-2i / width)` per token; a scaling slows them down, so that a model can read longer texts than in training.
"""

import abc
import dataclasses
import math

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.masks import Composite


class Scaling(Composite, abc.ABC):
    """How the speeds of a rotary change for longer texts. A subclass defines `speeds`."""

    attention_factor = 1.0  # rotated heads are multiplied by this

    @abc.abstractmethod
    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        """The new speeds, (width / 2,)."""


@dataclasses.dataclass(frozen=True)
class Rotary(Composite):
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

    def speeds(self, D: int, device: torch.device | None = None) -> Tensor:
        """Radians per position of every pair, (width / 2,), float64."""
        width = D if self.width is None else self.width
        speeds = self.base ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
        return speeds if self.scaling is None else self.scaling.speeds(speeds, self.base)

    def turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads (B, H, T, D) rotated according to their positions, (T,) or (B, T).

        >>> x = torch.randn(1, 2, 5, 8)
        >>> rotary().turn(x, torch.arange(5)).shape
        torch.Size([1, 2, 5, 8])
        """
        D = heads.shape[3]
        precise = torch.promote_types(heads.dtype, torch.float32)
        factor = 1.0 if self.scaling is None else self.scaling.attention_factor
        # A compiler would fuse the table into the rotation, and compute float64 cosines for every head of every sample.
        opaque = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
        table = (angle_table if opaque else _angle_table)(positions, self.speeds(D, heads.device), factor, precise)
        cos, sin = (table[:, :, None] if table.dim() == 4 else table).unbind()  # (T, w/2) or (B, 1, T, w/2)
        turned, rest = heads.split((2 * cos.shape[-1], D - 2 * cos.shape[-1]), dim=-1)
        turned = (_turn_neighbors if self.interleaved else _turn_halves)(turned.to(precise), cos, sin).to(heads.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat([turned, rest], -1)


def _angle_table(positions: Tensor, speeds: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Cosines and sines of all angles, (2, T, w/2) or (2, B, T, w/2), computed in float64 whatever the `dtype`."""
    angles = positions.to(torch.float64)[..., None] * speeds
    return (torch.stack([angles.cos(), angles.sin()]) * factor).to(dtype)


angle_table = torch.library.custom_op("headwise::angle_table", _angle_table, mutates_args=())


@angle_table.register_fake
def _(positions: Tensor, speeds: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    return speeds.new_empty((2, *positions.shape, speeds.shape[0]), dtype=dtype)


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
        scaling: `linear(8)`, `ntk(8)`, `yarn(...)` or `llama3(...)`.
    """
    _positive("base", base)
    if scaling is not None and not isinstance(scaling, Scaling):
        raise OptionError(f"rotary(scaling={scaling!r}): expected linear(...), ntk(...), yarn(...) or llama3(...).")
    return Rotary(float(base), width, interleaved, scaling)


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
    original_length: int
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
    original_length: int

    def speeds(self, speeds: Tensor, base: float) -> Tensor:
        turns = self.original_length * speeds / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # 1: as trained, 0: slower by the factor
        return speeds * kept + speeds / self.factor * (1 - kept)


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
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    grown = usual if attention_factor is None else _positive("attention_factor", attention_factor)
    return Yarn(_positive("factor", factor), original_length, beta_fast, beta_slow, truncate, grown)


def llama3(
    factor: float = 8.0, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0, original_length: int = 8192
) -> Scaling:
    """Llama 3.1: pairs with few turns within `original_length` are slowed down, with a smooth transition.

    Args:
        factor: how many times slower.
        low_freq_factor: pairs with fewer turns than this are slowed down by the full factor.
        high_freq_factor: pairs with more turns than this keep their speed.
        original_length: the length the model was first trained on.
    """
    if not low_freq_factor < high_freq_factor:
        raise OptionError(
            f"llama3(low_freq_factor={low_freq_factor}, high_freq_factor={high_freq_factor}): expected the first to be "
            f"smaller."
        )
    return Llama3(_positive("factor", factor), low_freq_factor, high_freq_factor, original_length)


def check_positions(name: str, positions: object, B: int, T: int, device: torch.device) -> Tensor:
    """`positions` as whole numbers (T,) or (B, T) on `device`."""
    found = positions if isinstance(positions, Tensor) else torch.as_tensor(positions)
    if found.is_floating_point() or found.dtype == torch.bool or tuple(found.shape) not in ((T,), (B, T), (1, T)):
        raise ShapeError(
            f"{name} of shape {tuple(found.shape)} and {found.dtype}; expected whole numbers of shape (T,) = ({T},) or "
            f"(B, T) = ({B}, {T})."
        )
    return found.to(device)


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name}={value!r}: expected a number above 0.")
    return float(value)
