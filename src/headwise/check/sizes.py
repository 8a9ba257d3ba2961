"""The sizes of a test call: a different number for every axis, so that a tensor's shape says what its axes are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Sizes of one test call. The batch is larger than the width, so that linear maps can be solved for exactly."""

    B: int = 53
    T: int = 5
    S: int = 7
    H: int = 4
    E: int = 32
    context: int = 16

    @property
    def D(self) -> int:
        """Width of one head."""
        return self.E // self.H


SMALL = Sizes(B=9, H=2, E=4)  # for code that loops over single numbers


def batch_for(width: int) -> int:
    """A prime larger than the width by some margin: enough samples at every position to solve for a linear map."""
    least = width + 20 if width <= 256 else (width + 80) // 4  # wide layers are not tested for turns by position
    candidate = least + 1 if least % 2 == 0 else least
    while any(candidate % factor == 0 for factor in range(2, int(candidate**0.5) + 1)):
        candidate += 2
    return candidate
