"""Norms of heads: how a layer normalizes its queries, keys and values before attention.

`qk_norm=` takes the name of a norm, a function that makes one, or `Norms(...)`, which has more options: different norms
for queries, keys and values, and whether they come before or after the position.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.errors import OptionError

Kind = str | Callable[[int], nn.Module] | None


class WidthNorm(nn.RMSNorm):
    """Root-mean-square normalization of queries or keys (B, H, T, D) over all heads together."""

    mixes_heads = True  # so heads cannot be divided over ranks

    @classmethod
    def for_heads(cls, heads: int, width: int, **options: Any) -> "WidthNorm":
        """The norm of `heads` heads of this width, with the `options` of `nn.RMSNorm`."""
        return cls(heads * width, **options)

    def forward(self, x: Tensor) -> Tensor:
        """The normalized heads, in the same shape."""
        B, H, T, D = x.shape
        return super().forward(x.transpose(1, 2).reshape(B, T, H * D)).view(B, T, H, D).transpose(1, 2)


class ZeroCentredNorm(nn.RMSNorm):
    """Root-mean-square normalization whose weight is stored minus 1, as in Gemma.

    >>> ZeroCentredNorm(8).weight.sum().item()
    0.0
    """

    def reset_parameters(self) -> None:
        """Set the weight to zeros, which scales nothing."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The normalized heads, computed in float32 or better."""
        precise = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(precise)
        return F.rms_norm(x.to(precise), self.normalized_shape, weight, self.eps).to(x.dtype)


class UnitNorm(nn.Module):
    """Each head divided by its length, so that a score is a cosine. It has no weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Heads of length 1."""
        return F.normalize(x, dim=-1)


class HeadScale(nn.Module):
    """Queries normalized, and multiplied by a factor that each head learns, so that no kernel has to know about it.

    >>> scale = HeadScale(3, 8, start=10.0)
    >>> scale(torch.randn(2, 3, 5, 8)).norm(dim=-1).mean().item()
    10.0

    Args:
        heads: number of heads.
        width: width of a head.
        start: the factor before training.
        limit: the largest factor.
        norm: a function from a width to the norm that comes first; division by the length by default.
    """

    sharded = ("log_scale",)  # parameters with an axis for heads, the first

    def __init__(
        self,
        heads: int,
        width: int,
        *,
        start: float = 1.0,
        limit: float = math.inf,
        norm: Callable[[int], nn.Module] = UnitNorm,
    ) -> None:
        super().__init__()
        if not 0 < start <= limit:
            raise OptionError(f"HeadScale(start={start}, limit={limit}): expected 0 < start <= limit.")
        self.start, self.limit = float(start), float(limit)
        self.norm = norm(width)
        self.log_scale = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    @classmethod
    def for_heads(cls, heads: int, width: int, **options: Any) -> "HeadScale":
        """The scale of `heads` heads of this width, with the `options` of the constructor."""
        return cls(heads, width, **options)

    def reset_parameters(self) -> None:
        """Set every factor to its start."""
        nn.init.constant_(self.log_scale, math.log(self.start))

    def forward(self, x: Tensor) -> Tensor:
        """The heads `x` (B, H, T, D), scaled."""
        own: Tensor = self.log_scale
        own = own.to_local() if hasattr(own, "to_local") else own  # of this rank's heads
        own = own.to(torch.promote_types(own.dtype, torch.float32))
        factor = (own if self.limit == math.inf else own.clamp(max=math.log(self.limit))).exp()
        scaled: Tensor = self.norm(x) * factor[:, None, None]
        return scaled.to(x.dtype)


@dataclasses.dataclass(frozen=True)
class Norms:
    """The norms of a layer: `MultiHeadAttention(512, 8, qk_norm=Norms("head", "head", value="unweighted"))`.

    Each is None or one of

    - "head": root-mean-square norm of each head by itself, with a weight (Qwen 3)
    - "width": of all heads together (OLMo 2)
    - "unweighted": of each head by itself, without a weight (Llama 4)
    - a function from the width of a head to a module, such as `nn.LayerNorm`. If it has a method `for_heads`, that is
      called with the number of heads and their width instead.

    Args:
        query: the norm of queries.
        key: the norm of keys.
        value: the norm of values.
        after: whether queries and keys are normalized after their position is encoded (Llama 4) instead of before.
    """

    query: Kind = None
    key: Kind = None
    value: Kind = None
    after: bool = False

    @classmethod
    def of(cls, qk_norm: "Norm") -> "Norms":
        """What a layer was given as `qk_norm=`, which may name one norm for queries and keys."""
        return qk_norm if isinstance(qk_norm, Norms) else cls(qk_norm, qk_norm)


Norm = Kind | Norms


def cosine(start: float = 10.0, limit: float = 100.0) -> Norms:
    """Cosine attention with a learned scale per head (Swin v2): `MultiHeadAttention(..., qk_norm=cosine(), scale=1.0)`.

    Args:
        start: the scale before training.
        limit: the largest scale.
    """
    return Norms(functools.partial(HeadScale, start=start, limit=limit), UnitNorm)


def make_norm(
    kind: Kind, heads: int, width: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module | None:
    """The module that normalizes heads (B, H, T, D)."""
    if kind is None:
        return None
    named = {
        "head": functools.partial(nn.RMSNorm, eps=1e-6),
        "width": functools.partial(WidthNorm, eps=1e-6),
        "unweighted": functools.partial(nn.RMSNorm, eps=1e-6, elementwise_affine=False),
    }
    if isinstance(kind, nn.Module):
        raise OptionError(
            f"qk_norm={type(kind).__name__}(...): expected a function from a width to a module, because queries and "
            f"keys need one each: pass nn.LayerNorm instead of nn.LayerNorm(8), or functools.partial for its options."
        )
    make: Any = named.get(kind) if isinstance(kind, str) else kind
    func, args, keywords = getattr(make, "func", make), getattr(make, "args", ()), getattr(make, "keywords", {})
    if hasattr(func, "for_heads"):
        made = func.for_heads(heads, width, *args, **keywords)
    else:
        made = make(width) if callable(make) else None
    if not isinstance(made, nn.Module):
        raise OptionError(
            f"qk_norm={kind!r}: expected 'head' (each head by itself, as Qwen 3 and Gemma 3), 'width' (all heads "
            f"together, as OLMo 2), 'unweighted' (as Llama 4), Norms(...), or a function from a width to a module, "
            f"such as nn.LayerNorm."
        )
    return made.to(device=device, dtype=dtype)
