"""A correct attention class in the style of a learner, to try `headwise check` on."""

import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    """Multi-head attention with separate projections; a mask is 1 where a query may attend to a key."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, d_model // num_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.w_q(query)), self.split(self.w_k(key)), self.split(self.w_v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        heads = scores.softmax(dim=-1) @ v
        return self.w_o(heads.transpose(1, 2).reshape(query.shape))
