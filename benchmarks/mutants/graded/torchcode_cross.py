import math

import torch
import torch.nn as nn


class MultiHeadCrossAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, x_q, x_kv):
        B, T, E = x_q.shape
        S = x_kv.shape[1]
        q = self.W_q(x_q).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(x_kv).view(B, S, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(x_kv).view(B, S, self.num_heads, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        weights = scores.softmax(dim=-1)
        output = torch.matmul(weights, v).transpose(1, 2).contiguous().view(B, T, E)
        return self.W_o(output)
