import torch
from torch import nn


class CrossAttention(nn.Module):
    """Attends to `context`, or to the input itself without one."""

    def __init__(self, query_dim, context_dim=None, heads=4, dim_head=16, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = query_dim if context_dim is None else context_dim
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def split(self, t):
        b, n, _ = t.shape
        return t.reshape(b, n, self.heads, -1).permute(0, 2, 1, 3)

    def forward(self, x, context=None, mask=None):
        if context is None:
            context = x
        q = self.split(self.to_q(x))
        k = self.split(self.to_k(context))
        v = self.split(self.to_v(context))

        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], float("-inf"))
        attn = sim.softmax(dim=-1)

        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        b, h, n, d = out.shape
        out = out.permute(0, 2, 1, 3).reshape(b, n, h * d)
        return self.to_out(out)
