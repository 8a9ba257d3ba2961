"""Attention in styles beside the templates: raw parameters, functions, rotary groups, two masks, lengths, a cache."""

PARAMETERS = """\
import torch
import torch.nn as nn
from torch import einsum


class MHA(nn.Module):
    '''Multi-head attention with weight tensors instead of layers.'''

    def __init__(self, model_dim: int, n_heads: int, causal: bool = False):
        super().__init__()
        head_dim = model_dim // n_heads
        self.scale = head_dim ** -0.5
        self.causal = causal
        self.Wq = nn.Parameter(torch.empty(n_heads, model_dim, head_dim))
        self.Wk = nn.Parameter(torch.empty(n_heads, model_dim, head_dim))
        self.Wv = nn.Parameter(torch.empty(n_heads, model_dim, head_dim))
        self.Wo = nn.Parameter(torch.empty(n_heads, head_dim, model_dim))
        self.bo = nn.Parameter(torch.zeros(model_dim))
        for w in (self.Wq, self.Wk, self.Wv, self.Wo):
            nn.init.xavier_uniform_(w)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q = einsum("b t m, h m d -> b h t d", x, self.Wq)
        k = einsum("b s m, h m d -> b h s d", memory, self.Wk)
        v = einsum("b s m, h m d -> b h s d", memory, self.Wv)
        logits = einsum("b h t d, b h s d -> b h t s", q, k) * self.scale
        if self.causal:
            t, s = logits.shape[-2:]
            future = torch.ones(t, s, dtype=torch.bool, device=x.device).triu(s - t + 1)
            logits = logits.masked_fill(future, float("-inf"))
        probs = logits.softmax(-1)
        heads = einsum("b h t s, b h s d -> b h t d", probs, v)
        return einsum("b h t d, h d m -> b t m", heads, self.Wo) + self.bo
"""

FUNCTIONS = """\
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def scaled_dot_product_attention(q, k, v, mask=None, dropout=None):
    d_k = q.size(-1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    attn = F.softmax(scores, dim=-1)
    if dropout is not None:
        attn = dropout(attn)
    return attn @ v, attn


def split_heads(x, n):
    b, t, d = x.shape
    return x.view(b, t, n, d // n).transpose(1, 2)


def merge_heads(x):
    b, n, t, d = x.shape
    return x.transpose(1, 2).reshape(b, t, n * d)


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model=64, n_heads=8, dropout=0.1):
        super().__init__()
        assert d_model % n_heads == 0
        self.n_heads = n_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        q = split_heads(self.q_linear(q), self.n_heads)
        k = split_heads(self.k_linear(k), self.n_heads)
        v = split_heads(self.v_linear(v), self.n_heads)
        if mask is not None and mask.dim() == 3:
            mask = mask.unsqueeze(1)
        out, attn = scaled_dot_product_attention(q, k, v, mask, self.dropout)
        return self.out(merge_heads(out)), attn
"""

FUSED = """\
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


class SelfAttention(nn.Module):
    def __init__(self, d_embed, n_heads, in_proj_bias=True, out_proj_bias=True):
        super().__init__()
        self.in_proj = nn.Linear(d_embed, 3 * d_embed, bias=in_proj_bias)
        self.out_proj = nn.Linear(d_embed, d_embed, bias=out_proj_bias)
        self.n_heads = n_heads
        self.d_head = d_embed // n_heads
        self.attn_dropout = 0.1

    def forward(self, x, causal_mask=False):
        batch_size, seq_len, d_embed = x.shape
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        shape = (batch_size, seq_len, self.n_heads, self.d_head)
        q, k, v = (t.reshape(shape).transpose(1, 2) for t in (q, k, v))
        p = self.attn_dropout if self.training else 0.0
        out = sdpa(q, k, v, dropout_p=p, is_causal=causal_mask)
        out = out.transpose(1, 2).reshape(batch_size, seq_len, d_embed)
        return self.out_proj(out)
"""

ROTARY = """\
from dataclasses import dataclass

import torch
from torch import nn
import torch.nn.functional as F


@dataclass
class ModelArgs:
    dim: int = 512
    n_heads: int = 8
    n_kv_heads: int = 4
    max_seq_len: int = 128
    rope_theta: float = 10000.0


def rope_tables(length, dim, theta):
    inv = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angle = torch.outer(torch.arange(length).float(), inv)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.n_rep = args.n_heads // args.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.n_heads * self.head_dim, args.dim, bias=False)
        cos, sin = rope_tables(args.max_seq_len, self.head_dim, args.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q = rotate(q, self.cos[:T], self.sin[:T])
        k = rotate(k, self.cos[:T], self.sin[:T])
        k = k.repeat_interleave(self.n_rep, dim=1)
        v = v.repeat_interleave(self.n_rep, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))
"""

TWO_MASKS = """\
import math

import torch
from torch import nn


class Attention(nn.Module):
    '''Self-attention, or attention to an encoder's output.

    key_padding_mask: (batch, source length), True for padding
    attn_mask: (target length, source length), True where attention is not allowed
    '''

    def __init__(self, embed_dim, num_heads, dropout=0.0, kdim=None, vdim=None):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def _shape(self, x, bsz):
        x = x.view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(bsz * self.num_heads, -1, self.head_dim)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None, need_weights=False):
        bsz, tgt_len, _ = query.shape
        src_len = key.size(1)
        q = self._shape(self.q_proj(query), bsz) * self.head_dim ** -0.5
        k = self._shape(self.k_proj(key), bsz)
        v = self._shape(self.v_proj(value), bsz)
        scores = torch.bmm(q, k.transpose(1, 2)).view(bsz, self.num_heads, tgt_len, src_len)
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask, float("-inf"))
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        dropped = self.dropout(weights).view(bsz * self.num_heads, tgt_len, src_len)
        out = torch.bmm(dropped, v).view(bsz, self.num_heads, tgt_len, self.head_dim)
        out = out.transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim)
        out = self.out_proj(out)
        return (out, weights.mean(dim=1)) if need_weights else (out, None)
"""

STACKED = """\
import torch
from torch import Tensor, nn
import torch.nn.functional as F


class FusedWeightAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        E = query.shape[-1]
        wq, wk, wv = self.in_proj_weight.split(E)
        bq, bk, bv = self.in_proj_bias.split(E) if self.in_proj_bias is not None else (None, None, None)
        q, k, v = F.linear(query, wq, bq), F.linear(key, wk, bk), F.linear(value, wv, bv)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        score = q @ k.transpose(-1, -2) / (E / self.num_heads) ** 0.5
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
            score = score + attn_mask
        return self.out_proj((score.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""

LENGTHS = """\
import math
import torch
from torch import nn


def masked_softmax(X, valid_lens):
    if valid_lens is None:
        return nn.functional.softmax(X, dim=-1)
    shape = X.shape
    if valid_lens.dim() == 1:
        valid_lens = torch.repeat_interleave(valid_lens, shape[1])
    else:
        valid_lens = valid_lens.reshape(-1)
    X = X.reshape(-1, shape[-1])
    keep = torch.arange(shape[-1], device=X.device)[None, :] < valid_lens[:, None]
    X = X.masked_fill(~keep, -1e6)
    return nn.functional.softmax(X.reshape(shape), dim=-1)


class DotProductAttention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values, valid_lens=None):
        d = queries.shape[-1]
        scores = torch.bmm(queries, keys.transpose(1, 2)) / math.sqrt(d)
        self.attention_weights = masked_softmax(scores, valid_lens)
        return torch.bmm(self.dropout(self.attention_weights), values)


class MultiHeadAttention(nn.Module):
    def __init__(self, num_hiddens, num_heads, dropout, bias=False):
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        self.W_q = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_k = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_v = nn.Linear(num_hiddens, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    def fold(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])

    def unfold(self, X):
        X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2]).permute(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)

    def forward(self, queries, keys, values, valid_lens=None):
        queries = self.fold(self.W_q(queries))
        keys = self.fold(self.W_k(keys))
        values = self.fold(self.W_v(values))
        if valid_lens is not None:
            valid_lens = torch.repeat_interleave(valid_lens, repeats=self.num_heads, dim=0)
        output = self.attention(queries, keys, values, valid_lens)
        return self.W_o(self.unfold(output))
"""

CACHE = """\
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class AttnConfig:
    hidden: int
    n_head: int
    block: int = 64
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    use_bias: bool = True

    @property
    def head_dim(self):
        return self.hidden // self.n_head


class CausalAttention(nn.Module):
    def __init__(self, cfg: AttnConfig):
        super().__init__()
        self.cfg = cfg
        self.qkv = nn.Linear(cfg.hidden, 3 * cfg.hidden, bias=cfg.use_bias)
        self.proj = nn.Linear(cfg.hidden, cfg.hidden, bias=cfg.use_bias)
        self.attn_drop = nn.Dropout(cfg.attn_pdrop)
        self.resid_drop = nn.Dropout(cfg.resid_pdrop)
        self.register_buffer("tri", torch.ones(cfg.block, cfg.block).tril().bool())

    def forward(self, x, kv_cache=None, use_cache=False):
        n, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.cfg.n_head, self.cfg.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        if kv_cache is not None:
            k = torch.cat((kv_cache[0], k), dim=-2)
            v = torch.cat((kv_cache[1], v), dim=-2)
        s = k.size(-2)
        att = q @ k.transpose(-1, -2) / self.cfg.head_dim ** 0.5
        att = att.masked_fill(~self.tri[s - t:s, :s], float("-inf"))
        att = self.attn_drop(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).reshape(n, t, -1)
        y = self.resid_drop(self.proj(y))
        return (y, (k, v)) if use_cache else y
"""

LOOP = """\
import torch
import torch.nn as nn


class MultiHead(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.key = nn.Linear(embed_dim, embed_dim, bias=False)
        self.query = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value = nn.Linear(embed_dim, embed_dim, bias=False)
        self.proj = nn.Linear(embed_dim, embed_dim)
        self.attn_drop = nn.Dropout(dropout)

    def forward(self, x, mask=None, return_attention=False):
        outputs, maps = [], []
        qs = self.query(x).chunk(self.num_heads, dim=-1)
        ks = self.key(x).chunk(self.num_heads, dim=-1)
        vs = self.value(x).chunk(self.num_heads, dim=-1)
        for q, k, v in zip(qs, ks, vs):
            wei = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
            if mask is not None:
                wei = wei.masked_fill(mask == 0, float("-inf"))
            wei = self.attn_drop(wei.softmax(dim=-1))
            maps.append(wei)
            outputs.append(wei @ v)
        y = self.proj(torch.cat(outputs, dim=-1))
        if return_attention:
            return y, torch.stack(maps, dim=1)
        return y
"""

SWITCHES = """\
import torch
import torch.nn as nn


class PatchAttention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False, qk_norm=False, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q_norm(q)
        k = self.k_norm(k)
        attn = (q @ k.transpose(-2, -1) * self.head_dim ** -0.5).softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))
"""

LIKE_TORCH = """\
import torch
import torch.nn.functional as F
from torch import nn


class MultiheadAttention(nn.Module):
    \"\"\"Masks: True = not allowed to attend.\"\"\"

    def __init__(self, embed_dim, num_heads, dropout=0.0, batch_first=True):
        super().__init__()
        self.num_heads, self.head_dim, self.batch_first = num_heads, embed_dim // num_heads, batch_first
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.randn(3 * embed_dim, embed_dim) * 0.02)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, average_attn_weights=True):
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        B, T, E = query.shape
        parts = zip((query, key, value), self.in_proj_weight.chunk(3))
        q, k, v = (F.linear(x, w).view(B, -1, self.num_heads, self.head_dim).transpose(1, 2) for x, w in parts)
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        if key_padding_mask is not None:
            hidden = key_padding_mask[:, None, None, :].bool()
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        out = self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, E))
        if not self.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        return out, weights.mean(1) if average_attn_weights else weights
"""

HEAD_MASK = """\
import math

import torch
from torch import nn


class BertAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, head_mask=None):
        q, k, v = self.split(self.query(hidden_states)), self.split(self.key(hidden_states)), self.value(hidden_states)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = scores.softmax(-1)
        if head_mask is not None:
            probs = probs * head_mask
        context = probs @ self.split(v)
        return self.dense(context.permute(0, 2, 1, 3).flatten(2))
"""

WIDTHS = """\
import torch
from torch import einsum, nn


class CrossAttention(nn.Module):
    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64):
        super().__init__()
        inner = dim_head * heads
        context_dim = query_dim if context_dim is None else context_dim
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_kv = nn.Linear(context_dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        parts = (self.to_q(x), *self.to_kv(context).chunk(2, dim=-1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if mask is not None:
            mask = mask.unsqueeze(1)
            sim = sim.masked_fill(~mask.bool(), -torch.finfo(sim.dtype).max)
        out = einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))
"""

NAMED_CAUSAL = """\
import torch.nn as nn
import torch.nn.functional as F


class CausalSelfAttention(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.n_head, self.n_kv = config["n_head"], config.get("n_kv_head", config["n_head"])
        self.hd = config["n_embd"] // self.n_head
        self.c_attn = nn.Linear(config["n_embd"], (self.n_head + 2 * self.n_kv) * self.hd)
        self.c_proj = nn.Linear(config["n_embd"], config["n_embd"])

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split([self.n_head * self.hd, self.n_kv * self.hd, self.n_kv * self.hd], dim=-1)
        q = q.view(B, T, self.n_head, self.hd).transpose(1, 2)
        k = k.view(B, T, self.n_kv, self.hd).transpose(1, 2).repeat_interleave(self.n_head // self.n_kv, dim=1)
        v = v.view(B, T, self.n_kv, self.hd).transpose(1, 2).repeat_interleave(self.n_head // self.n_kv, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))
"""
