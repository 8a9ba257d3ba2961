"""Attention in unusual clothes, right and wrong: other layouts, required masks, grouped heads. All ours."""

import math

import torch
import torch.nn.functional as F
from right_forms import KeepMask, heads_of, joined
from torch import nn


class PaddingRequired(KeepMask):
    def forward(self, x, key_pad):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(key_pad[:, None, None, :], -torch.inf)
        self.seen = scores.softmax(-1)
        return self.wo(joined(self.seen @ v))


class MaskInFactNeeded(KeepMask):
    def forward(self, q, k, v, mask=None):
        return super().forward(q, k, v, mask.unsqueeze(1))


class ChannelsFirst(nn.Module):
    """Pointwise convolutions over (batch, channels, tokens), channels cut as (width, heads)."""

    def __init__(self, heads, channels):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Conv1d(channels, channels, 1) for _ in range(4))

    def forward(self, query, key, value):
        q, k, v = (f(x).unflatten(1, (-1, self.heads)) for f, x in ((self.q, query), (self.k, key), (self.v, value)))
        weights = (torch.einsum("bdht,bdhs->bhts", q, k) / q.size(1) ** 0.5).softmax(-1)
        return self.out(torch.einsum("bhts,bdhs->bdht", weights, v).flatten(1, 2))


class Pixels(nn.Module):
    """Attention between the pixels of an image (batch, channels, rows, columns)."""

    def __init__(self, channels, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        b, c, rows, columns = x.shape
        q, k, v = self.qkv(x).reshape(b, 3, self.num_heads, c // self.num_heads, rows * columns).unbind(1)
        weights = (q.mT @ k * (c // self.num_heads) ** -0.5).softmax(-1)
        return self.proj((v @ weights.mT).reshape(b, c, rows, columns))


class WidthOfHeads(KeepMask):
    """The third argument is the width of a head, whatever its name ends in."""

    def __init__(self, dim, heads=8, dim_heads=None):
        super().__init__(dim, heads)
        assert heads * (dim_heads or dim // heads) == dim


class NormThenFused(KeepMask):
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.norm(x)
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        return self.wo(joined(F.scaled_dot_product_attention(q, k, v)))


class ConfigurationAndSizes(KeepMask):
    def __init__(self, cfg, feature_size, n_head):
        super().__init__(feature_size, n_head)
        self.drop = nn.Dropout(cfg.dropout)


class OwnSizes(nn.Module):
    """Heads are fixed inside, so that only one width fits."""

    def __init__(self, hidden_size):
        super().__init__()
        self.num_heads, self.head_dim = 6, 16
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        q, k, v = (
            t.view(*t.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        return self.out(joined((q @ k.mT / self.head_dim**0.5).softmax(-1) @ v))


class RelativeTerm(KeepMask):
    """A second product, of queries and an embedding of positions, is added to the scores."""

    width = "head"

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.wp = nn.Linear(d_model, d_model, bias=False)
        self.u, self.w = (nn.Parameter(torch.randn(num_heads, 1, d_model // num_heads)) for _ in range(2))

    def forward(self, query, key, value, pos_embedding):
        q, k, v = heads_of(self.wq(query), self.h), heads_of(self.wk(key), self.h), heads_of(self.wv(value), self.h)
        positions = heads_of(self.wp(pos_embedding), self.h)
        scores = (q + self.u) @ k.mT + ((q + self.w) @ positions.mT).roll(1, -1)
        divisor = math.sqrt(q.size(-1) if self.width == "head" else query.size(-1))
        return self.wo(joined((scores / divisor).softmax(-1) @ v))


class RelativeTermTooNarrow(RelativeTerm):
    width = "model"


class Grouped(nn.Module):
    """Fewer key/value heads than heads, each repeated for its group."""

    def __init__(self, d_model, num_heads, num_kv_heads):
        super().__init__()
        self.h, self.kv, d = num_heads, num_kv_heads, d_model // num_heads
        self.wq, self.wo = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.wk, self.wv = nn.Linear(d_model, num_kv_heads * d), nn.Linear(d_model, num_kv_heads * d)

    def repeated(self, k, v):
        return k.repeat_interleave(self.h // self.kv, 1), v.repeat_interleave(self.h // self.kv, 1)

    def forward(self, x):
        k, v = self.repeated(heads_of(self.wk(x), self.kv), heads_of(self.wv(x), self.kv))
        return self.wo(joined(F.scaled_dot_product_attention(heads_of(self.wq(x), self.h), k, v)))


class GroupedInTwoOrders(Grouped):
    def repeated(self, k, v):
        return k.repeat_interleave(self.h // self.kv, 1), v.repeat(1, self.h // self.kv, 1, 1)


class GroupedForgotten(Grouped):
    def repeated(self, k, v):
        return k, v


class RoundedScores(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        return self.wo(joined((q @ k.mT // q.size(-1) ** 0.5).softmax(-1) @ v))


class NoSoftmax(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        return self.wo(joined(q @ k.mT / q.size(-1) ** 0.5 @ v))


class OneSoftmaxForAll(KeepMask):
    """Exponentials divided by the sum over queries and keys."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        raised = (q @ k.mT / q.size(-1) ** 0.5).exp()
        return self.wo(joined(raised / raised.sum((-1, -2), keepdim=True) @ v))


class FusedSeesTheFuture(KeepMask):
    """A fused call whose mask says who may look, given the table of who may not."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        hidden = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        return self.wo(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=hidden)))


class TurnedByHead(KeepMask):
    """The table of angles meets the axis of heads."""

    def forward(self, x, freqs_cis):
        q, k, v = (w(x).unflatten(-1, (self.h, -1)) for w in (self.wq, self.wk, self.wv))
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis[: self.h])
            for t in (q, k)
        )
        q, k, v = q.flatten(-2).transpose(1, 2), k.flatten(-2).transpose(1, 2), v.transpose(1, 2)
        return self.wo(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v))


class PaddingOfTheFirst(PaddingRequired):
    def forward(self, x, key_pad):
        return super().forward(x, key_pad[:1].expand_as(key_pad))


class KeysAsValues(KeepMask):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.unused, self.wv = self.wv, self.wk


class LoopedWithoutHeads(nn.Module):
    """Loops over single numbers, and reads an attribute that was never set."""

    def __init__(self, embed_size, num_heads):
        super().__init__()
        self.head_dim = embed_size // num_heads
        self.out = nn.Linear(embed_size, embed_size)

    def forward(self, x):
        b, t, e = x.shape
        parts = x.view(b, t, self.num_heads, self.head_dim)
        scores = torch.zeros(b, self.num_heads, t, t)
        for sample in range(b):
            for head in range(self.num_heads):
                for i in range(t):
                    for j in range(t):
                        scores[sample, head, i, j] = (parts[sample, i, head] * parts[sample, j, head]).sum()
        weights = (scores / self.head_dim**0.5).softmax(-1)
        return self.out(torch.einsum("bhts,bshd->bthd", weights, parts).reshape(b, t, e))


class NeedsAGraph(KeepMask):
    """An argument that no name explains, of a shape that nobody can guess."""

    def forward(self, x, adjacency):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.mT / q.size(-1) ** 0.5 + adjacency.view(2, 3, 5, 7).sum()
        return self.wo(joined(scores.softmax(-1) @ v))


class LooksAtValues(KeepMask):
    """Decides by a value in a tensor, which no graph can hold."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        if q.abs().max() > 1e9:
            raise ValueError("too large")
        return self.wo(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v))


class StoredTable(KeepMask):
    def __init__(self, d_model, num_heads, context_length):
        super().__init__(d_model, num_heads)
        self.register_buffer("hidden", torch.ones(context_length, context_length, dtype=torch.bool).triu(1))

    def forward(self, x):
        t = x.size(1)
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(self.hidden[:t, :t], -torch.inf)
        return self.wo(joined(scores.softmax(-1) @ v))


class InFloat32(nn.Module):
    """Computes in float32 whatever comes in."""

    def __init__(self, d_hid, n_head):
        super().__init__()
        self.n_head = n_head
        self.q, self.k, self.v, self.o = (nn.Linear(d_hid, d_hid) for _ in range(4))

    def forward(self, x):
        q, k, v = (heads_of(f(x).float(), self.n_head) for f in (self.q, self.k, self.v))
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        return self.o(joined(weights @ v).to(x.dtype))


class SharedQueryKey(nn.Module):
    """One projection for queries and keys, and none that lies idle."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.looking, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x):
        q, v = heads_of(self.looking(x), self.h), heads_of(self.value(x), self.h)
        return self.out(joined((q @ q.mT / math.sqrt(q.size(-1))).softmax(-1) @ v))


class FusedDropoutAlways(nn.Module):
    """The fused function is handed a probability that knows nothing of evaluation."""

    def __init__(self, dim, heads, attn_p=0.0):
        super().__init__()
        self.heads, self.attn_p = heads, attn_p
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        return self.proj(joined(F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_p)))


class CrossOfOneLength(nn.Module):
    """Cuts keys by the length of the queries."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, context):
        B, T, E = x.shape
        q, k, v = (
            f(y).view(B, T, self.heads, -1).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        weights = (q @ k.mT / math.sqrt(q.size(-1))).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(B, T, E))
