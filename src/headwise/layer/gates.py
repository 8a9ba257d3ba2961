"""Gates: what the heads read is multiplied, number by number or head by head, before the output projection.

A gate is a module that is called with the query input (B, T, d_in). It returns the factors, (B, T, H · D) or (B, T, H).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError

Gate = str | nn.Module | Callable[[Tensor], Tensor] | None
KINDS = ("element", "head")


class OutputGate(nn.Module):
    """The sigmoid of a linear map of the input: a factor for every number that heads read, or one for each head.

    >>> gate = OutputGate(32, 4, 8)
    >>> gate(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])

    Args:
        d_in: width of the input.
        num_heads: query heads.
        head_dim: width of what a head reads; 1 for one factor per head.
        bias: whether the linear map has a bias.
        activation: the function that makes factors of its results.
    """

    def __init__(
        self,
        d_in: int,
        num_heads: int,
        head_dim: int = 1,
        *,
        bias: bool = False,
        activation: Callable[[Tensor], Tensor] = torch.sigmoid,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.proj = nn.Linear(d_in, num_heads * head_dim, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Draw the weights again."""
        self.proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """The factors for an input `x`, (B, T, H · D), or (B, T, H) for one per head."""
        return self.activation(self.proj(x))


class FunctionGate(nn.Module):
    """A gate that is a plain function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """The factors that the function gives."""
        return self.function(x)

    def extra_repr(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", repr(self.function))


def make_gate(
    gate: Gate,
    d_in: int,
    num_heads: int,
    head_dim: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module | None:
    """The module of a layer's `gate=`."""
    if gate is None or isinstance(gate, nn.Module):
        return gate
    if isinstance(gate, str) and gate in KINDS:
        width = head_dim if gate == "element" else 1
        return OutputGate(d_in, num_heads, width, bias=bias, device=device, dtype=dtype)
    if isinstance(gate, type) or not callable(gate):
        cure = " Did you forget the parentheses?" if isinstance(gate, type) else ""
        raise OptionError(
            f"gate={gate!r}: expected 'element' (a factor for every number, as Qwen3-Next), 'head' (one for each head) "
            f"or a module or function from the input (B, T, d_in) to factors (B, T, H · D) or (B, T, H).{cure}"
        )
    return FunctionGate(gate)


def gated(read: Tensor, factors: Tensor) -> Tensor:
    """What the heads read (B, H, T, D), multiplied by factors (B, T, H · D) or (B, T, H)."""
    B, H, T, D = read.shape
    if factors.shape not in ((B, T, H * D), (B, T, H)):
        raise ShapeError(
            f"the gate returned factors of shape {tuple(factors.shape)}; expected (B, T, H · D) = ({B}, {T}, {H * D}) "
            f"or (B, T, H) = ({B}, {T}, {H})."
        )
    by_head: Tensor = factors.to(read.dtype).unflatten(-1, (H, -1))  # (B, T, H, D or 1)
    return read * by_head.transpose(1, 2)
