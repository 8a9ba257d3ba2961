import math

import torch


def causal_attention(Q, K, V):
    T = Q.shape[1]
    d_k = Q.shape[-1]
    scores = torch.bmm(Q, K.transpose(1, 2)) / math.sqrt(d_k)
    mask = torch.triu(torch.ones(T, T, device=Q.device), diagonal=1).bool()
    scores = scores.masked_fill(mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, V)
