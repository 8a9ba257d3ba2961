import torch
from torch import einsum, nn


class MultiHeadAttention(nn.Module):
    """Attention with one weight tensor per role: (heads, d_model, d_head)."""

    def __init__(self, d_model: int, n_heads: int, d_head: int):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_K = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        for weight in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: torch.Tensor, causal: bool = False) -> torch.Tensor:
        q = einsum("bte,hed->bhtd", x, self.W_Q)
        k = einsum("bse,hed->bhsd", x, self.W_K)
        v = einsum("bse,hed->bhsd", x, self.W_V)

        scores = einsum("bhtd,bhsd->bhts", q, k) / self.d_head**0.5
        if causal:
            T = x.shape[1]
            future = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), diagonal=1)
            scores = scores.masked_fill(future, float("-inf"))
        pattern = scores.softmax(dim=-1)

        z = einsum("bhts,bhsd->bhtd", pattern, v)
        return einsum("bhtd,hde->bte", z, self.W_O) + self.b_O
