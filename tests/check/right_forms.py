"""Right attention in many hands: constructors, calls, layouts, masks and extras as people write them. All ours."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


def heads_of(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).flatten(2)


class KeepMask(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, q, k, v, mask=None):
        q, k, v = heads_of(self.wq(q), self.h), heads_of(self.wk(k), self.h), heads_of(self.wv(v), self.h)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.wo(joined(scores.softmax(-1) @ v))


class DropMask(KeepMask):
    def forward(self, query, key, value, attn_mask=None):
        return super().forward(query, key, value, None if attn_mask is None else ~attn_mask.bool())


class AdditiveMask(KeepMask):
    def forward(self, x, attention_mask=None):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        return self.wo(joined(F.softmax(scores, dim=-1) @ v))


class ValuesFirst(KeepMask):
    def forward(self, values, keys, query, mask):
        return super().forward(query, keys, values, mask)


class HeadsFirst(nn.Module):
    """Constructor (h, d_model, dropout), a list of four clones."""

    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        x = torch.matmul(self.dropout(scores.softmax(dim=-1)), value)
        return self.linears[-1](x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))


class Bookish(nn.Module):
    def __init__(self, d_in, d_out, context_length, dropout, num_heads, qkv_bias=False):
        super().__init__()
        self.num_heads, self.d_out = num_heads, d_out
        self.W_query, self.W_key, self.W_value = (nn.Linear(d_in, d_out, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x):
        b, t, _ = x.shape
        k, q, v = (heads_of(w(x), self.num_heads) for w in (self.W_key, self.W_query, self.W_value))
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:t, :t], -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out_proj((weights @ v).transpose(1, 2).contiguous().view(b, t, self.d_out))


@dataclass
class GPTConfig:
    block_size: int = 64
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True


class FromConfig(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.flash = getattr(config, "no_such_key", False)

    def forward(self, x):
        q, k, v = (heads_of(p, self.n_head) for p in self.c_attn(x).split(self.n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(joined(y))


class FromDictionary(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg["num_heads"]
        self.qkv = nn.Linear(cfg["emb_dim"], 3 * cfg["emb_dim"], bias=cfg.get("qkv_bias", False))
        self.proj = nn.Linear(cfg["emb_dim"], cfg["emb_dim"])

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(joined((q @ k.mT * (c // self.heads) ** -0.5).softmax(-1) @ v))


class OneHead(nn.Module):
    def __init__(self, n_embd, head_size):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(n_embd, head_size, bias=False) for _ in range(3))

    def forward(self, x):
        k, q, v = self.key(x), self.query(x), self.value(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        t = x.shape[1]
        wei = wei.masked_fill(torch.ones(t, t, device=x.device).tril() == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ v


class ListOfHeads(nn.Module):
    def __init__(self, n_embd, num_heads, head_size):
        super().__init__()
        self.heads = nn.ModuleList([OneHead(n_embd, head_size) for _ in range(num_heads)])
        self.proj = nn.Linear(num_heads * head_size, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([h(x) for h in self.heads], dim=-1))


class LoopOverHeads(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        outs = []
        for i in range(self.h):
            weights = (q[:, i] @ k[:, i].transpose(1, 2) / math.sqrt(q.size(-1))).softmax(-1)
            outs.append(weights @ v[:, i])
        return self.wo(torch.cat(outs, -1))


class FoldedIntoBatch(KeepMask):
    def fold(self, x):
        return heads_of(x, self.h).flatten(0, 1)

    def forward(self, queries, keys, values):
        b = queries.size(0)
        q, k, v = self.fold(self.wq(queries)), self.fold(self.wk(keys)), self.fold(self.wv(values))
        out = torch.bmm(torch.bmm(q, k.transpose(1, 2)).div(q.size(-1) ** 0.5).softmax(2), v)
        return self.wo(joined(out.unflatten(0, (b, self.h))))


class HeadsBeforeBatch(KeepMask):
    """Heads folded in front of the batch, by chunks."""

    def forward(self, x):
        q, k, v = (torch.cat(w(x).chunk(self.h, -1), 0) for w in (self.wq, self.wk, self.wv))
        out = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v
        return self.wo(torch.cat(out.chunk(self.h, 0), -1))


class RawParameters(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(dim, dim) * 0.02) for _ in range(4))

    def forward(self, x):
        q, k, v = (heads_of(x @ w, self.heads) for w in (self.q, self.k, self.v))
        return joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v) @ self.o


class FourAxes(nn.Module):
    """One parameter (3, heads, width, head width) and einsum all the way."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        d = embed_dim // num_heads
        self.w = nn.Parameter(torch.randn(3, num_heads, embed_dim, d))
        self.o = nn.Parameter(torch.randn(num_heads, d, embed_dim))
        self.scale = d**-0.5

    def forward(self, x):
        q, k, v = torch.einsum("bte,nhed->nbhtd", x, self.w)
        weights = torch.einsum("bhtd,bhsd->bhts", q * self.scale, k).softmax(-1)
        return torch.einsum("bhts,bhsd,hde->bte", weights, v, self.o)


class ByHand(KeepMask):
    """The softmax written out, with the row's largest score taken off."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.mT / q.size(-1) ** 0.5
        exps = (scores - scores.amax(-1, keepdim=True)).exp()
        return self.wo(joined(exps / exps.sum(-1, keepdim=True) @ v))


class Renormalised(KeepMask):
    """A causal mask after the softmax, and rows brought back to a sum of one: the same function."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) * torch.ones(x.size(1), x.size(1), device=x.device).tril()
        return self.wo(joined(weights / weights.sum(-1, keepdim=True) @ v))


class BatchSecond(KeepMask):
    def forward(self, x):
        t, n, e = x.shape
        q, k, v = (w(x).view(t, n * self.h, e // self.h).transpose(0, 1) for w in (self.wq, self.wk, self.wv))
        out = torch.bmm((torch.bmm(q, k.transpose(1, 2)) / q.size(-1) ** 0.5).softmax(-1), v)
        return self.wo(out.transpose(0, 1).reshape(t, n, e))


class WithoutBatch(KeepMask):
    def forward(self, x):
        t, e = x.shape
        q, k, v = (w(x).view(t, self.h, -1).transpose(0, 1) for w in (self.wq, self.wk, self.wv))
        return self.wo(((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(0, 1).reshape(t, e))


class Grouped(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.h, self.kv, d = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * d, bias=False)
        self.wk, self.wv = (nn.Linear(dim, n_kv_heads * d, bias=False) for _ in range(2))
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        q, k, v = heads_of(self.wq(x), self.h), heads_of(self.wk(x), self.kv), heads_of(self.wv(x), self.kv)
        k, v = (y.repeat_interleave(self.h // self.kv, 1) for y in (k, v))
        return self.wo(joined((q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v))


class MultiQuery(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, d = num_heads, d_model // num_heads
        self.q, self.k, self.v = nn.Linear(d_model, d_model), nn.Linear(d_model, d), nn.Linear(d_model, d)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = heads_of(self.q(x), self.h), self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)
        return self.out(joined((q @ k.mT * q.size(-1) ** -0.5).softmax(-1) @ v))


def turned(x, base=10000.0):
    t, d = x.shape[-2:]
    steps = torch.arange(max(t, d), device=x.device)
    angles = steps[:t, None] * base ** (-steps[:d:2] / d)
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Turned(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q), turned(k)
        return self.wo(joined(F.scaled_dot_product_attention(q, k, v)))


class TurnedFromOutside(KeepMask):
    def turn(self, x, freqs_cis):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * freqs_cis).flatten(3)

    def forward(self, x, freqs_cis, mask=None):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        q, k = (self.turn(y, freqs_cis) for y in (q, k))
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask == 0, -torch.inf)
        return self.wo(joined(scores.softmax(-1) @ v))


class ResidualAndNorm(KeepMask):
    def __init__(self, n_head, d_model, dropout=0.1):
        super().__init__(d_model, n_head)
        self.layer_norm, self.dropout = nn.LayerNorm(d_model), nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        return self.layer_norm(self.dropout(super().forward(q, k, v, mask)) + q)


class NormFirst(KeepMask):
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.norm(x)
        return super().forward(x, x, x)


class DistanceBias(KeepMask):
    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        t = torch.arange(x.size(1), device=x.device)
        slopes = 2.0 ** -torch.arange(1, self.h + 1, device=x.device)[:, None, None]
        return self.wo(joined((q @ k.mT / q.size(-1) ** 0.5 - slopes * (t[:, None] - t).abs()).softmax(-1) @ v))


class WithMemory(KeepMask):
    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        return super().forward(x, context, context, mask)


class KeyPadding(KeepMask):
    def forward(self, x, key_padding_mask=None):
        mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :].bool()
        return super().forward(x, x, x, mask)


class Lengths(KeepMask):
    def forward(self, queries, keys, values, valid_lens):
        mask = (
            None
            if valid_lens is None
            else (torch.arange(keys.size(1), device=keys.device) < valid_lens[:, None])[:, None, None]
        )
        return super().forward(queries, keys, values, mask)


class Switch(KeepMask):
    def __init__(self, d_model, num_heads, causal=False):
        super().__init__(d_model, num_heads)
        self.causal = causal

    def forward(self, x):
        t = x.size(1)
        return super().forward(x, x, x, torch.ones(t, t, device=x.device).tril() if self.causal else None)


class Wrapped(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(embed_dim, num_heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class ReturnsDictionary(KeepMask):
    def forward(self, x):
        return {"output": super().forward(x, x, x), "attention": None}


class Convolved(nn.Module):
    """Projections as convolutions of width one."""

    def __init__(self, channels, n_heads):
        super().__init__()
        self.h = n_heads
        self.q, self.k, self.v, self.o = (nn.Conv1d(channels, channels, 1) for _ in range(4))

    def forward(self, x):
        q, k, v = (heads_of(w(x.transpose(1, 2)).transpose(1, 2), self.h) for w in (self.q, self.k, self.v))
        return self.o(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v).transpose(1, 2)).transpose(1, 2)


class Plain:
    """No nn.Module at all."""

    def __init__(self, d_model, num_heads):
        self.h = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (torch.randn(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = (heads_of(x @ w, self.h) for w in (self.W_q, self.W_k, self.W_v))
        return joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v) @ self.W_o


def function_of_weights(x, W_q, W_k, W_v, W_o, num_heads):
    q, k, v = (heads_of(x @ w, num_heads) for w in (W_q, W_k, W_v))
    return joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v) @ W_o


class KeyTimesQuery(KeepMask):
    """Scores the other way round, softmax over the other axis, weights transposed: the same function."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        weights = (k @ q.mT / q.size(-1) ** 0.5).softmax(-2)
        return self.wo(joined(weights.mT @ v))


class ScaledBefore(KeepMask):
    """The scale on both sides of the product."""

    def forward(self, x):
        q, k, v = (heads_of(w(x), self.h) for w in (self.wq, self.wk, self.wv))
        d = q.size(-1) ** -0.25
        return self.wo(joined(((q * d) @ (k * d).mT).softmax(-1) @ v))


class WideHeads(nn.Module):
    def __init__(self, d_model, n_heads, d_k, d_v):
        super().__init__()
        self.h = n_heads
        self.q, self.k = (nn.Linear(d_model, n_heads * d_k) for _ in range(2))
        self.v, self.o = nn.Linear(d_model, n_heads * d_v), nn.Linear(n_heads * d_v, d_model)

    def forward(self, Q, K, V):
        q, k, v = heads_of(self.q(Q), self.h), heads_of(self.k(K), self.h), heads_of(self.v(V), self.h)
        return self.o(joined((q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v)), None


RIGHT = [
    KeepMask, DropMask, AdditiveMask, ValuesFirst, HeadsFirst, FromDictionary, LoopOverHeads, FoldedIntoBatch,
    HeadsBeforeBatch, RawParameters, FourAxes, ByHand, BatchSecond, WithoutBatch, WithMemory, KeyPadding,
    Lengths, Switch, Wrapped, ReturnsDictionary, Convolved, Plain, function_of_weights, KeyTimesQuery, ScaledBefore,
    WideHeads,
]  # fmt: skip
VARIANTS = {
    Grouped: "grouped heads",
    Bookish: "causal", FromConfig: "causal", ListOfHeads: "causal", Renormalised: "causal", MultiQuery: "multi-query",
    Turned: "rotary", TurnedFromOutside: "rotary", ResidualAndNorm: "follows", NormFirst: "normalized",
    DistanceBias: "bias", OneHead: "single head",
}  # fmt: skip
