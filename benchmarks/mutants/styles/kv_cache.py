import math
from typing import Optional, Tuple

import torch
from torch import nn


class CachedAttention(nn.Module):
    """Causal attention that can continue from the keys and values of earlier tokens."""

    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.o_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, x: torch.Tensor, past: Optional[Tuple[torch.Tensor, torch.Tensor]] = None
    ) -> Tuple[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
        bsz, seq_len, _ = x.shape
        q = self.q_proj(x).reshape(bsz, seq_len, self.n_heads, self.d_head).transpose(1, 2)
        k = self.k_proj(x).reshape(bsz, seq_len, self.n_heads, self.d_head).transpose(1, 2)
        v = self.v_proj(x).reshape(bsz, seq_len, self.n_heads, self.d_head).transpose(1, 2)

        if past is not None:
            past_k, past_v = past
            k = torch.cat([past_k, k], dim=2)
            v = torch.cat([past_v, v], dim=2)
        total_len = k.size(2)
        offset = total_len - seq_len

        rows = torch.arange(seq_len, device=x.device).unsqueeze(1) + offset
        cols = torch.arange(total_len, device=x.device).unsqueeze(0)
        allowed = cols <= rows

        scores = q @ k.transpose(2, 3) / math.sqrt(self.d_head)
        scores = scores.masked_fill(~allowed, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        out = out.transpose(1, 2).reshape(bsz, seq_len, -1)
        return self.o_proj(out), (k, v)
