"""The sizes of a test call, and the value that a name of known meaning gets."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one test call, different for every axis, so that a tensor's shape says what its axes are.

    The batch is larger than the width, so that linear maps can be solved for exactly.
    """

    B: int = 53
    T: int = 5
    S: int = 7
    H: int = 4
    E: int = 32
    context: int = 16
    O: int = 0  # noqa: E741 - the output width, where it is not that of the input
    V: int = 0  # the width of a head's values, where it is not that of its keys

    @property
    def D(self) -> int:
        """The width of one head."""
        return self.out // self.H

    @property
    def Dv(self) -> int:
        """The width of one head's values."""
        return self.V or self.D

    @property
    def out(self) -> int:
        """The width of the output."""
        return self.O or self.E

    def named(self, shape: Iterable[int]) -> str:
        """A shape with the names of its axes, as far as their sizes tell.

        >>> CallSizes().named((53, 5, 32))
        '(53 samples, 5 tokens, width 32)'
        """
        return f"({', '.join(map(self.counted, shape))})"

    def counted(self, size: int) -> str:
        """The size of an axis with its name: "5 tokens", "head width 8"."""
        name = self.axis(size)
        return f"{name} {size}" if "width" in name else f"{size} {name}".rstrip()

    def axis(self, size: int) -> str:
        """The name of the axis that has this size in the call; empty where its size does not tell."""
        known = {
            self.D: "head width",
            self.H: "heads",
            self.E: "width",
            self.S: "keys",
            self.T: "tokens",
            self.B: "samples",
        }
        return "" if size == 1 else known.get(size, "")  # any axis may have been given the size 1


# Every size is different from the others of its setting, and heads are both more and fewer than the numbers in one.
OTHER_SIZES = (CallSizes(B=41, T=7, S=11, H=6, E=24, context=19), CallSizes(B=37, T=3, S=6, H=2, E=20, context=13))
# For pictures of 2 by 3 pixels: there, 2, 3 or 6 heads would look like an axis of the picture.
IN_PICTURES = (CallSizes(B=79, T=7, S=11, H=7, E=56, context=19), CallSizes(B=89, T=3, S=6, H=5, E=60, context=13))
SMALL = CallSizes(B=9, H=2, E=4)  # for code that loops over single numbers


def batch_for(width: int) -> int:
    """A prime batch size with enough samples at every position to solve for a linear map of this width."""
    least = width + 20 if width <= 256 else (width + 80) // 4  # wide layers are not tested for rotary positions
    candidate = least + 1 if least % 2 == 0 else least
    while any(candidate % factor == 0 for factor in range(2, int(candidate**0.5) + 1)):
        candidate += 2
    return candidate


def value_for(role: str, sizes: CallSizes) -> int | float | bool:
    """The value that a constructor argument of this meaning gets."""
    return {
        "width": sizes.E, "out_width": sizes.out, "heads": sizes.H, "head_width": sizes.D, "value_width": sizes.Dv,
        "context": sizes.context, "batch": sizes.B,
        "kv_heads": sizes.H,  # grouped heads then reduce to ordinary ones
        "dropout": 0.0, "bias": True,
    }[role]  # fmt: skip
