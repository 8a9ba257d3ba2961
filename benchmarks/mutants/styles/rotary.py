import torch
import torch.nn as nn


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotarySelfAttention(nn.Module):
    """Causal self-attention; queries and keys are turned by an angle that grows with the position."""

    def __init__(self, dim, n_heads, max_seq_len=64, base=10000.0):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

        freqs = 1.0 / (base ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        angles = torch.outer(torch.arange(max_seq_len).float(), freqs)
        angles = torch.cat((angles, angles), dim=-1)  # (max_seq_len, head_dim)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def apply_rotary(self, x):
        T = x.size(-2)
        return x * self.cos[:T] + rotate_half(x) * self.sin[:T]

    def forward(self, x):
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        q, k = self.apply_rotary(q), self.apply_rotary(k)

        scores = (q @ k.transpose(-2, -1)) / (self.head_dim**0.5)
        causal = torch.ones(T, T, device=x.device).tril().bool()
        scores = scores.masked_fill(~causal, float("-inf"))
        out = torch.softmax(scores, dim=-1) @ v
        out = out.transpose(1, 2).contiguous().view(B, T, C)
        return self.wo(out)
