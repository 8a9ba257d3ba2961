import math

import torch
import torch.nn as nn


def grouped_query_attention(q, k, v, num_query_heads, num_query_groups, d_model, mask=None):
    assert num_query_heads % num_query_groups == 0
    d_head = d_model // num_query_heads
    w_q = nn.Linear(d_model, d_model, bias=False)
    w_k = nn.Linear(d_model, num_query_groups * d_head, bias=False)
    w_v = nn.Linear(d_model, num_query_groups * d_head, bias=False)
    w_o = nn.Linear(d_model, d_model, bias=False)
    B, T, _ = q.shape
    S = k.shape[1]
    query = w_q(q).view(B, T, num_query_heads, d_head).transpose(1, 2)
    key = w_k(k).view(B, S, num_query_groups, d_head).transpose(1, 2)
    value = w_v(v).view(B, S, num_query_groups, d_head).transpose(1, 2)
    repeats = num_query_heads // num_query_groups
    key = key.repeat_interleave(repeats, dim=1)
    value = value.repeat_interleave(repeats, dim=1)
    scores = query @ key.transpose(-2, -1) / math.sqrt(d_head)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    output = (weights @ value).transpose(1, 2).reshape(B, T, d_model)
    return w_o(output)
