"""Attention as courses and interviews ask for it: the parameter names and call forms people have, in our own words."""

import torch
import torch.nn.functional as F
from torch import nn


def scores_to_output(query, key, value, hidden=None):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    weights = F.softmax(scores, dim=-1)
    return weights @ value, weights


class FourLinears(nn.Module):
    """W_q, W_k, W_v, W_o."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, query, key, value, mask):
        heads = (self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value)))
        output, weights = scores_to_output(*heads, None if mask is None else mask == 0)
        return self.W_o(output.transpose(1, 2).flatten(2)), weights


class CourseStep(FourLinears):
    """Call form (x, mask), returns output and weights."""

    def forward(self, x, mask=None):
        return self.attend(x, x, x, mask)


class Interview(FourLinears):
    """Call form (Q, K, V, mask), returns the output."""

    def forward(self, Q, K, V, mask=None):
        return self.attend(Q, K, V, mask)[0]


class Handbook(FourLinears):
    """Call form (query, key, value, mask), returns output and weights."""

    def forward(self, query, key, value, mask=None):
        return self.attend(query, key, value, mask)


class Homework(nn.Module):
    """W_query, W_key, W_value, out_proj and a float mask buffer that marks the future with 1."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(context_length, context_length).triu(1))

    def forward(self, x):
        heads = (
            w(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for w in (self.W_query, self.W_key, self.W_value)
        )
        output, _ = scores_to_output(*heads, self.mask[: x.shape[1], : x.shape[1]].bool())
        return self.out_proj(output.transpose(1, 2).flatten(2))


class BookSection(Homework):
    """The same names in another document."""


class Minimal(nn.Module):
    """The quick-reference form: W_q, W_k, W_v, proj and a mask buffer."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.h = num_heads
        self.W_q, self.W_k, self.W_v = (nn.Linear(d_in, d_out, bias=qkv_bias) for _ in range(3))
        self.proj = nn.Linear(d_out, d_out)
        self.register_buffer("mask", torch.ones(context_length, context_length).triu(1))

    def forward(self, x):
        heads = (w(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for w in (self.W_q, self.W_k, self.W_v))
        output, _ = scores_to_output(*heads, self.mask[: x.shape[1], : x.shape[1]].bool())
        return self.proj(output.transpose(1, 2).flatten(2))


class OneHead(nn.Module):
    """A causal head with a mask buffer of its own."""

    def __init__(self, d_in, d_out, context_length, dropout, qkv_bias=False):
        super().__init__()
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=qkv_bias) for _ in range(3))
        self.register_buffer("mask", torch.ones(context_length, context_length).triu(1))

    def forward(self, x):
        heads = (self.W_query(x), self.W_key(x), self.W_value(x))
        return scores_to_output(*heads, self.mask[: x.shape[1], : x.shape[1]].bool())[0]


class Wrapper(nn.Module):
    """The naive list of heads, each as wide as d_out, so that the output is num_heads times as wide."""

    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.heads = nn.ModuleList(OneHead(d_in, d_out, context_length, dropout, qkv_bias) for _ in range(num_heads))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], dim=-1)
