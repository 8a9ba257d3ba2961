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


class FewerKeysForgotten(Grouped):
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


class NormedPixels(Pixels):
    """A norm over groups of channels first, the input added last, weights in single precision."""

    def __init__(self, channels, num_heads):
        super().__init__(channels, num_heads)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x):
        b, c, rows, columns = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, 3, self.num_heads, -1, rows * columns).unbind(1)
        weights = (q.mT @ k * (c // self.num_heads) ** -0.5).float().softmax(-1)
        return x + self.proj((v @ weights.mT).reshape(b, c, rows, columns))


class GroupsFromDict(nn.Module):
    """A dictionary of options with words of its own."""

    def __init__(self, settings: dict):
        super().__init__()
        self.heads, groups = settings["n_heads"], settings.get("number_of_groups", 0)
        assert self.heads % groups == 0
        width, self.shared = settings["n_emb"], self.heads // groups
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, width // self.shared) for _ in range(2))

    def forward(self, x):
        q = heads_of(self.q(x), self.heads)
        k, v = (heads_of(f(x), self.heads // self.shared) for f in (self.k, self.v))
        k, v = (part.repeat_interleave(self.shared, 1) for part in (k, v))
        return self.out(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v))


class NormedAndTurned(nn.Module):
    """Heads are normalised without weights, then turned by position."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim // num_heads, elementwise_affine=False)

    def turned(self, x):
        steps = torch.arange(max(x.shape[-2:]), device=x.device)
        angles = steps[: x.size(-2), None] * 0.1 ** steps[: x.size(-1) // 2]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x):
        q, k, v = (heads_of(part, self.num_heads) for part in self.qkv(x).chunk(3, -1))
        q, k = self.turned(self.norm(q)), self.turned(self.norm(k))
        return self.proj(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class SharedValuesAveraged(nn.Module):
    """Interpretable attention: one projection of values for all heads, whose mean is projected."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.q, self.k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v, self.out = nn.Linear(d_model, d_model // num_heads), nn.Linear(d_model // num_heads, d_model)

    def forward(self, x):
        q, k = heads_of(self.q(x), self.h), heads_of(self.k(x), self.h)
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return self.out((weights @ self.v(x).unsqueeze(1)).mean(1))


class UnscaledBesidePositions(nn.Module):
    """As in T5: no scale, and a bias by position that the first layer makes and others are handed."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x, position_bias=None):
        q, k, v = (heads_of(f(x), self.h) for f in (self.q, self.k, self.v))
        scores = q @ k.mT if position_bias is None else q @ k.mT + position_bias
        return self.o(joined(scores.softmax(-1) @ v))


class PooledUnlessOne(nn.Module):
    """A ratio that asks for square inputs, unless it is one."""

    def __init__(self, dim, num_heads, ratio=2):
        super().__init__()
        self.h, self.ratio = num_heads, ratio
        self.q, self.kv, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.pool = nn.Conv2d(dim, dim, ratio, ratio)

    def forward(self, x):
        B, T, E = x.shape
        y = x
        if self.ratio > 1:
            side = int(T**0.5)
            y = self.pool(x.mT.reshape(B, E, side, side)).flatten(2).mT
        q, (k, v) = heads_of(self.q(x), self.h), (heads_of(part, self.h) for part in self.kv(y).chunk(2, -1))
        return self.out(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v))


class WidthKeptAsParameter(nn.Module):
    """The width of a head is a parameter that does not learn."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.h = num_heads
        self.d = nn.Parameter(torch.tensor(float(dim // num_heads)), requires_grad=False)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(part, self.h) for part in self.qkv(x).chunk(3, -1))
        return self.out(joined((q @ k.mT / self.d.sqrt()).softmax(-1) @ v))


class OneEntryOfTheMask(nn.Module):
    """Reads a single entry of its triangle."""

    def __init__(self, dim, num_heads, max_len=64):
        super().__init__()
        self.h = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("visible", torch.ones(max_len, max_len).tril())

    def forward(self, x):
        t = x.size(1)
        q, k, v = (heads_of(part, self.h) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(self.visible[t, t] == 0, -torch.inf)
        return self.out(joined(scores.softmax(-1) @ v))


class HeadsReturnedApart(KeepMask):
    def forward(self, x):
        breakpoint()
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v


class SoftmaxMadeWrongly(KeepMask):
    def forward(self, q, k, v, mask=None):
        q, k, v = (heads_of(w(x), self.h) for w, x in ((self.wq, q), (self.wk, k), (self.wv, v)))
        scores = q @ k.mT / q.size(-1) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.wo(joined(nn.Softmax(scores, dim=-1) @ v))


class NormedQuery(KeepMask):
    """A norm of the query alone, the input added at last."""

    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, q, k, v, mask=None):
        return q + super().forward(self.norm(q), k, v, mask)


class NormedAfterPixels(Pixels):
    def __init__(self, channels, num_heads):
        super().__init__(channels, num_heads)
        self.after = nn.GroupNorm(4, channels)

    def forward(self, x):
        return x + self.after(super().forward(x))


class FaintFuture(nn.Module):
    """Hides by a number that is small enough."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.h = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (heads_of(part, self.h) for part in self.qkv(x).chunk(3, -1))
        future = torch.ones(x.size(1), x.size(1), dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / q.size(-1) ** 0.5).masked_fill(future, -100.0)
        return self.out(joined(scores.softmax(-1) @ v))
