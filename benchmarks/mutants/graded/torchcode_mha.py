import math

import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, Q, K, V):
        B, T, E = Q.shape
        S = K.shape[1]
        q = self.W_q(Q).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(K).view(B, S, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(V).view(B, S, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        weights = torch.softmax(scores, dim=-1)
        output = (weights @ v).transpose(1, 2).reshape(B, T, E)
        return self.W_o(output)
