"""Differential attention (Ye et al. 2024), composed of parts: one attention map minus λ times another.

    python examples/differential_attention.py

Heads come in pairs: head i and head i + H/2 read the same values, two heads wide, and what the second reads is
subtracted from what the first reads. The two maps are those of an ordinary layer, so rotary, caches, masks, `watch` and
`silence` work as always. Only three things are new: values that are shared by a pair, λ, and a norm for each pair.
"""

import math

import torch
from torch import Tensor, nn

import headwise
from headwise import MultiHeadAttention
from headwise.layer.projections import Modules, Separate


class PairedValues(Separate):
    """Query, key and value projections whose value heads are joined in pairs, i and i + Hkv/2."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim)
        self.value_dim = 2 * head_dim

    def keys_and_values(self, modules: Modules, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        k, v = super().keys_and_values(modules, key, value)
        pairs = torch.cat(v.chunk(2, dim=1), -1)  # (B, Hkv/2, S, 2D)
        return k, pairs.repeat(1, 2, 1, 1)  # once for the first heads of the pairs, once for the second


class DifferentialAttention(nn.Module):
    """Attention with the difference of two maps.

    Args:
        d_model: width of input and output.
        num_heads: query heads, two for each pair.
        depth: number of this layer in its model, from 0; the first λ grows with it.
        options: of `MultiHeadAttention`, such as num_kv_heads, causal and position.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, depth: int = 0, eps: float = 1e-5, bias=False, **options
    ) -> None:
        super().__init__()
        D = d_model // num_heads
        paired = PairedValues(D)
        self.maps = MultiHeadAttention(d_model, num_heads, bias=bias, out_proj=False, projections=paired, **options)
        where = {"device": options.get("device"), "dtype": options.get("dtype")}
        self.start = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.lambda_q = nn.Parameter(0.1 * torch.randn(2, D, **where))
        self.lambda_k = nn.Parameter(0.1 * torch.randn(2, D, **where))
        self.norm = nn.RMSNorm(2 * D, eps=eps, elementwise_affine=False)
        self.out_proj = nn.Linear(d_model, d_model, bias, **where)

    def forward(self, x: Tensor, **call) -> Tensor:
        """The output (B, T, d_model); `call` are arguments of the layer, such as a cache."""
        read = self.maps(x, **call).unflatten(-1, (2, self.maps.num_heads // 2, -1))  # (B, T, 2, H/2, 2D)
        first, second = read.unbind(2)
        difference = first - self.factor() * second
        return self.out_proj(((1 - self.start) * self.norm(difference)).flatten(2))

    def factor(self) -> Tensor:
        """λ, learned as a difference of two exponentials."""
        one, other = (self.lambda_q * self.lambda_k).sum(-1).exp()
        return one - other + self.start


if __name__ == "__main__":
    torch.manual_seed(0)
    layer = DifferentialAttention(64, 8, num_kv_heads=4, causal=True, position=headwise.rotary()).eval()
    x = torch.randn(1, 200, 64)
    with torch.no_grad(), headwise.watch(layer) as watched:
        output = layer(x)
    weights = watched["maps"].to_tensor()
    difference = weights[:, :4] - layer.factor() * weights[:, 4:]
    print(f"output {tuple(output.shape)} from {watched['maps']!r}")
    print(f"factor {layer.factor().item():.3f}, rows sum to {difference.sum(-1).mean().item():.3f}")

    cache = layer.maps.make_cache(1)
    with torch.no_grad():
        steps = [layer(token[:, None], cache=cache) for token in x.unbind(1)]
    print(f"token by token, the largest difference is {(torch.cat(steps, 1) - output).abs().max().item():.1e}")
