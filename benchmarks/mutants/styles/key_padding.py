import math

import torch
from torch import Tensor, nn


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = dropout

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = k.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        v = v.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

        scores = q @ k.mT / math.sqrt(self.head_dim)
        hidden = torch.zeros(batch, 1, length, length, dtype=torch.bool, device=x.device)
        if attn_mask is not None:
            hidden = hidden | attn_mask
        if key_padding_mask is not None:  # (batch, length), True for padding
            hidden = hidden | key_padding_mask[:, None, None, :]
        scores = scores.masked_fill(hidden, float("-inf"))

        weights = scores.softmax(dim=-1)
        dropped = nn.functional.dropout(weights, p=self.dropout, training=self.training)
        output = (dropped @ v).transpose(1, 2).flatten(2)
        output = self.out_proj(output)
        if need_weights:
            return output, weights
        return output
