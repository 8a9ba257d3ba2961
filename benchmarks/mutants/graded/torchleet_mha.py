import math

import torch
import torch.nn as nn


def multi_head_attention(q, k, v, num_heads, d_model, mask=None):
    w_q = nn.Linear(d_model, d_model, bias=False)
    w_k = nn.Linear(d_model, d_model, bias=False)
    w_v = nn.Linear(d_model, d_model, bias=False)
    w_o = nn.Linear(d_model, d_model, bias=False)
    B, T, _ = q.shape
    S = k.shape[1]
    d_head = d_model // num_heads
    query = w_q(q).view(B, T, num_heads, d_head).transpose(1, 2)
    key = w_k(k).view(B, S, num_heads, d_head).transpose(1, 2)
    value = w_v(v).view(B, S, num_heads, d_head).transpose(1, 2)
    scores = query @ key.transpose(-2, -1) / math.sqrt(d_head)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    output = (weights @ value).transpose(1, 2).reshape(B, T, d_model)
    return w_o(output)
