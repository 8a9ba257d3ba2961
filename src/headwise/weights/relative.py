"""Scores that depend on the distance between query and key: ALiBi, and learned buckets as in T5.

Both add a number per head and distance to the scaled score. They are kept as a rule and a small table, never as a T×S
tensor: a kernel, a tile or a single weight asks for the numbers it needs.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.masks import Grid
from headwise.shapes import check_size


@dataclasses.dataclass(frozen=True, eq=False)
class Relative(abc.ABC):
    """What is added to a score for its distance. `table` holds its numbers, some for each of H heads."""

    table: Tensor

    @abc.abstractmethod
    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        """The addend at these indices, broadcasting to the tile; differentiable in the table."""

    @property
    @abc.abstractmethod
    def num_heads(self) -> int:
        """How many heads the table is for."""

    def with_table(self, table: Tensor) -> Self:
        """The same rule with other numbers."""
        return dataclasses.replace(self, table=table)

    def check(self, H: int, device: torch.device) -> None:
        """Raise unless this fits H heads on `device`."""
        name = {"Slopes": "alibi(...)", "Buckets": "RelativeBias(...)"}.get(type(self).__name__, "relative")
        if self.num_heads != H:
            raise ShapeError(f"{name} was made for {self.num_heads} heads and there are {H}. Make it for {H}.")
        if self.table.device != device:
            raise ShapeError(f"{name} is on {self.table.device} and the query on {device}; move one with .to(...).")


@dataclasses.dataclass(frozen=True, eq=False)
class Slopes(Relative):
    """ALiBi: −slope · distance. `table` is (H,)."""

    @property
    def num_heads(self) -> int:
        return self.table.shape[0]

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        return self.table.to(dtype)[grid.head] * -(grid.position - grid.col).abs().to(dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Buckets(Relative):
    """T5: one number per head and bucket of distances. `table` is (buckets, H)."""

    max_distance: int = 128
    bidirectional: bool = True

    @property
    def num_heads(self) -> int:
        return self.table.shape[1]

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        bucket = bucket_of(grid.col - grid.position, self.table.shape[0], self.max_distance, self.bidirectional)
        return self.table.to(dtype)[bucket, grid.head]


def bucket_of(ahead: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of every distance `ahead` (key minus query), as T5 counts them.

    Half of the buckets hold one distance each; the others grow like the logarithm up to `max_distance`.

    >>> bucket_of(torch.tensor([0, -1, -8, -500, 3]), buckets=32, max_distance=128, bidirectional=True).tolist()
    [0, 1, 8, 15, 19]
    """
    first = torch.zeros_like(ahead)
    if bidirectional:
        buckets //= 2
        first = (ahead > 0) * buckets
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    exact = buckets // 2
    share = (distance.clamp(min=exact).float() / exact).log() / math.log(max_distance / exact)
    far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return first + torch.where(distance < exact, distance, far)


def alibi(num_heads: int | None = None, *, slopes: Tensor | Sequence[float] | None = None) -> Slopes:
    """ALiBi: every score loses slope · distance, with one slope per head.

    Args:
        num_heads: gives the published slopes: 2^(−8/H), 2^(−16/H), ...; between powers of two, those of the next
            smaller one and every second of the next larger.
        slopes: (H,), instead of these.

    >>> alibi(4).table.tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if (num_heads is None) == (slopes is None):
        raise OptionError("alibi(): pass either num_heads or slopes=, one of the two.")
    if slopes is None:
        return Slopes(torch.tensor(_published(check_size("num_heads", num_heads))))
    table = torch.as_tensor(slopes, dtype=torch.get_default_dtype() if not isinstance(slopes, Tensor) else None)
    if table.dim() != 1 or not table.is_floating_point():
        raise ShapeError(f"slopes of shape {tuple(table.shape)} and {table.dtype}; expected one float per head, (H,).")
    return Slopes(table)


def _published(H: int) -> list[float]:
    whole = 2 ** int(math.log2(H))
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    between = [2 ** (-4 * (i + 1) / whole) for i in range(0, 2 * whole, 2)]
    return slopes + between[: H - whole]


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distances, as in T5. Layers may share one: pass the same module to each.

    >>> bias = RelativeBias(8, num_buckets=32, max_distance=128, bidirectional=False)
    >>> bias.weight.shape
    torch.Size([32, 8])

    Args:
        num_heads: query heads.
        num_buckets: at least 4 if `bidirectional`, else 2.
        max_distance: from here on all distances share the last bucket.
        bidirectional: whether keys ahead get buckets of their own; a decoder has none.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, buckets = check_size("num_heads", num_heads), check_size("num_buckets", num_buckets)
        fewest = 4 if bidirectional else 2
        if buckets < fewest or buckets % fewest:
            raise OptionError(f"num_buckets={num_buckets}: expected a multiple of {fewest}, such as 32.")
        self.max_distance, self.bidirectional = check_size("max_distance", max_distance), bool(bidirectional)
        exact = buckets // fewest
        if self.max_distance <= exact:
            raise OptionError(
                f"max_distance={max_distance}: the first {exact} distances have a bucket each, so expected more than "
                f"{exact}."
            )
        self.weight = nn.Parameter(torch.empty(buckets, H, device=device, dtype=dtype))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self) -> Buckets:
        """What a scoring takes."""
        return Buckets(self.weight, self.max_distance, self.bidirectional)

    def extra_repr(self) -> str:
        """The options."""
        buckets, H = self.weight.shape
        return f"{H}, num_buckets={buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"


def apart(relative: Relative | None) -> Any:
    """A description without tensors, for saving; `together` makes the rule of it and its table."""
    if isinstance(relative, Slopes):
        return ("Slopes",)
    if isinstance(relative, Buckets):
        return ("Buckets", relative.max_distance, relative.bidirectional)
    return None


def together(table: Tensor, description: Any) -> Relative:
    """The inverse of `apart`."""
    name, *options = description
    return Slopes(table) if name == "Slopes" else Buckets(table, *options)
