"""What a layer's small options mean: biases of projections, norms of heads, positions, and what a scoring may say."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.layer.positions import Rotary
from headwise.shapes import check_factor
from headwise.weights import Scoring
from headwise.weights.relative import Relative, RelativeBias

PROJECTIONS = ("q", "k", "v", "out")
Norm = str | Callable[[int], nn.Module] | None
Position = Rotary | Relative | RelativeBias | None


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


class WidthNorm(nn.RMSNorm):
    """Root-mean-square normalisation of queries or keys (B, H, T, D), over all heads together."""

    def forward(self, x: Tensor) -> Tensor:
        """Heads of the same shape."""
        B, H, T, D = x.shape
        return super().forward(x.transpose(1, 2).reshape(B, T, H * D)).view(B, T, H, D).transpose(1, 2)


class ZeroCentredNorm(nn.RMSNorm):
    """Root-mean-square normalisation whose weight is stored as its difference from 1, as Gemma stores it.

    >>> ZeroCentredNorm(8).weight.sum().item()
    0.0
    """

    def reset_parameters(self) -> None:
        """Zeros: nothing is scaled."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised in float32 or better."""
        precise = torch.promote_types(x.dtype, torch.float32)
        weight = 1 + self.weight.to(precise)
        return torch.nn.functional.rms_norm(x.to(precise), self.normalized_shape, weight, self.eps).to(x.dtype)


def norm(
    qk_norm: Norm, heads: int, head_dim: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module | None:
    """The module that normalises queries or keys."""
    if qk_norm is None:
        return None
    if qk_norm == "head":
        return nn.RMSNorm(head_dim, eps=1e-6, device=device, dtype=dtype)
    if qk_norm == "width":
        return WidthNorm(heads * head_dim, eps=1e-6, device=device, dtype=dtype)
    over_width = getattr(qk_norm, "func", qk_norm) is WidthNorm  # perhaps a partial of it, with another eps
    made = qk_norm(heads * head_dim if over_width else head_dim) if callable(qk_norm) else None
    if not isinstance(made, nn.Module):
        raise OptionError(
            f"qk_norm={qk_norm!r}: expected 'head' (each head by itself, as Qwen 3 and Gemma 3), 'width' (all heads "
            f"together, as OLMo 2), or a function that makes a module for heads of a width, such as nn.LayerNorm."
        )
    return made.to(device=device, dtype=dtype)


def check_position(position: object, num_heads: int, head_dim: int) -> None:
    """Raise unless `position` is an option that fits this layer."""
    if isinstance(position, Rotary):
        position.check(head_dim)
    elif isinstance(position, Relative | RelativeBias):
        rule = position() if isinstance(position, RelativeBias) else position
        rule.check(num_heads, rule.table.device)
    elif position is not None:
        cure = " Did you forget the parentheses?" if callable(position) else ""
        raise OptionError(f"position={position!r}: expected rotary(...), alibi(...) or RelativeBias(...).{cure}")


def check_scoring(scoring: object) -> Scoring:
    """`scoring` as a layer may have it: what fits every call."""
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
        raise OptionError("Scoring(sinks=tensor) in a layer's scoring=: say sinks=True, then set layer.sinks.data.")
    return scoring
