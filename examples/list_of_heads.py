"""Two ways to write several heads in one file: a list of heads, and one class for all of them; they agree.

python examples/list_of_heads.py
"""

import torch
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """One causal head, d_in to d_out."""

    def __init__(self, d_in: int, d_out: int, context_length: int) -> None:
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=False) for _ in range(3))
        self.register_buffer("future", torch.ones(context_length, context_length, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_in) to (B, T, d_out)"""
        query, key, value = self.W_query(x), self.W_key(x), self.W_value(x)
        scores = query @ key.transpose(-2, -1) / key.shape[-1] ** 0.5
        T = x.shape[1]
        return scores.masked_fill(self.future[:T, :T], -torch.inf).softmax(-1) @ value


class HeadList(nn.Module):
    """Independent heads, each d_out wide, side by side: the output is num_heads · d_out wide."""

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(CausalAttention(d_in, d_out, context_length) for _ in range(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, d_in) to (B, T, num_heads · d_out)"""
        return torch.cat([head(x) for head in self.heads], dim=-1)


def main() -> None:
    """Compare the list with one layer that holds the same weights."""
    from headwise import MultiHeadAttention

    torch.manual_seed(0)
    x, wrapper = torch.randn(2, 6, 32), HeadList(32, 16, context_length=8, num_heads=4)
    stacked = {
        f"{ours}.weight": torch.cat([getattr(head, theirs).weight for head in wrapper.heads])
        for ours, theirs in (("q_proj", "W_query"), ("k_proj", "W_key"), ("v_proj", "W_value"))
    }
    layer = MultiHeadAttention.from_state_dict(stacked, num_heads=4, out_proj=False, causal=True)
    gap = (layer(x) - wrapper(x)).abs().max().item()
    print(f"a list of 4 heads of 16 and one layer: outputs {tuple(wrapper(x).shape)}, largest difference {gap:.0e}")


if __name__ == "__main__":
    main()
