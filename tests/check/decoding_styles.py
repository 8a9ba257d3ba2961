"""Attention in parts and in steps: chunks, online softmax, caches, windows, prefixes, documents, position tables."""

ONLINE = """\
import torch
from torch import nn


class StreamingAttention(nn.Module):
    '''Keys arrive in tiles; the softmax is renormalized as they come.'''

    def __init__(self, width, num_heads, tile=2):
        super().__init__()
        self.num_heads, self.tile = num_heads, tile
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        q = q / q.shape[-1] ** 0.5
        best = torch.full_like(q[..., :1], float("-inf"))
        norm = torch.zeros_like(best)
        result = torch.zeros_like(q)
        for start in range(0, k.shape[2], self.tile):
            logits = q @ k[:, :, start : start + self.tile].mT
            largest = logits.amax(-1, keepdim=True).maximum(best)
            decay = (best - largest).exp()
            p = (logits - largest).exp()
            norm = decay * norm + p.sum(-1, keepdim=True)
            result = decay * result + p @ v[:, :, start : start + self.tile]
            best = largest
        return self.to_out((result / norm).transpose(1, 2).flatten(2))
"""

CHUNKS = """\
import torch
from torch import nn


class BlockwiseSelfAttention(nn.Module):
    def __init__(self, d_model, n_heads, query_chunk=3):
        super().__init__()
        self.n_heads, self.query_chunk = n_heads, query_chunk
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = (w(x).view(B, T, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        rows = []
        for first in range(0, T, self.query_chunk):
            some = q[:, :, first : first + self.query_chunk]
            scores = some @ k.transpose(2, 3) / some.shape[-1] ** 0.5
            index = torch.arange(first, first + some.shape[2], device=x.device)
            later = torch.arange(T, device=x.device) > index[:, None]
            rows.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v)
        return self.wo(torch.cat(rows, 2).transpose(1, 2).reshape(B, T, E))
"""

CAPPED = """\
import torch
from torch import nn


class CappedAttention(nn.Module):
    def __init__(self, dim, heads, cap=20.0):
        super().__init__()
        self.heads, self.cap = heads, cap
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask=None):
        '''mask: (batch, tokens, tokens), 1 = hide'''
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / q.shape[-1] ** 0.5
        s = self.cap * torch.tanh(s / self.cap)
        if mask is not None:
            s = s.masked_fill(mask.bool().unsqueeze(1), -torch.inf)
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""

PER_HEAD = """\
import torch
from torch import nn


class ExplicitHeads(nn.Module):
    def __init__(self, config):
        super().__init__()
        wide, self.count = config["d_out"], config["num_heads"]
        self.each = wide // self.count
        self.keys = nn.Linear(config["d_in"], wide)
        self.queries = nn.Linear(config["d_in"], wide)
        self.values = nn.Linear(config["d_in"], wide)
        self.mix = nn.Linear(wide, wide)

    def forward(self, x):
        b, t, _ = x.shape
        k, q, v = self.keys(x), self.queries(x), self.values(x)
        heads = x[..., :0]
        for h in range(self.count):
            part = slice(h * self.each, (h + 1) * self.each)
            weights = (q[..., part] @ k[..., part].mT / self.each ** 0.5).softmax(-1)
            mine = v[..., part]
            heads = torch.cat([heads, weights @ mine], -1)
        return self.mix(heads.view(b, t, self.count * self.each))
"""

TABLE = """\
import torch
from torch import nn


class BiasedAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, reach=20):
        super().__init__()
        self.num_heads, self.reach = num_heads, reach
        self.table = nn.Embedding(2 * reach + 1, num_heads)
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        at = torch.arange(N, device=x.device)
        away = at[:, None] - at
        bias = self.table(away.clamp(-self.reach, self.reach) + self.reach)
        bias = bias.permute(2, 0, 1)
        scores = q @ k.transpose(-1, -2) * (C // self.num_heads) ** -0.5 + bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""

PAST = """\
import torch
from torch import nn


class StepwiseAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, past=None):
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        kept = (k, v)
        T, S = q.shape[2], k.shape[2]
        visible = torch.ones(T, S, dtype=torch.bool, device=x.device)
        visible = visible.tril(S - T)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), kept
"""

PLACED = """\
import torch
from torch import nn


def turn(x, angles):
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class ServingAttention(nn.Module):
    def __init__(self, dim, n_heads, max_batch_size=4, max_seq_len=64):
        super().__init__()
        self.n_heads, head = n_heads, dim // n_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        rates = 10000.0 ** (-torch.arange(0, head, 2).double() / head)
        self.register_buffer("angles", torch.outer(torch.arange(max_seq_len).double(), rates), persistent=False)
        for name in ("old_k", "old_v"):
            self.register_buffer(name, torch.zeros(max_batch_size, n_heads, max_seq_len, head), persistent=False)

    @torch.inference_mode()
    def forward(self, x, start_pos=0):
        B, T, E = x.shape
        end = start_pos + T
        q, k, v = (w(x).view(B, T, self.n_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        angles = self.angles[start_pos:end]
        q, k = turn(q, angles), turn(k, angles)
        self.old_k[:B, :, start_pos:end] = k
        self.old_v[:B, :, start_pos:end] = v
        k, v = self.old_k[:B, :, :end], self.old_v[:B, :, :end]
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(start_pos + 1).bool(), -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""

KEEPING = """\
import torch
from torch import nn


class RememberingAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.seen = None

    def forward(self, x, use_cache=False):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        offset = 0
        if use_cache:
            if self.seen is not None:
                offset = self.seen[0].shape[2]
                k, v = torch.cat([self.seen[0], k], 2), torch.cat([self.seen[1], v], 2)
            self.seen = (k, v)
        place = torch.arange(k.shape[2], device=x.device)
        future = place > place[offset:, None]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(future, -torch.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""

GROWING = """\
import torch
from torch import nn


class LazyMaskAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("future", torch.zeros(0, 0, dtype=torch.bool), persistent=False)

    def hidden(self, n):
        if len(self.future) < n:
            self.future = torch.ones(n, n, dtype=torch.bool, device=self.future.device).triu(1)
        return self.future[:n, :n]

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(self.hidden(T), -torch.inf).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, T, E))
"""

WINDOW = """\
import torch
import torch.nn.functional as F
from torch import nn


class BandedAttention(nn.Module):
    '''A query sees itself and `span - 1` tokens before it.'''

    def __init__(self, dim, heads, span=7):
        super().__init__()
        self.heads, self.span = heads, span
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        back = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
        near = (back >= 0) & (back < self.span)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        return self.proj(y.transpose(1, 2).reshape(B, T, E))
"""

PREFIX = """\
import torch
from torch import nn


class PrefixAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, prefix_lengths=None):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        place = torch.arange(T, device=x.device)
        seen = (place <= place[:, None]).expand(B, 1, T, T)
        if prefix_lengths is not None:
            inside = place < prefix_lengths[:, None]
            inside = inside[:, None, None, :]
            seen = seen | inside
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""

DOCUMENTS = """\
import torch
from torch import nn


class PackedDocuments(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, segment_ids=None):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if segment_ids is not None:
            alike = segment_ids[:, None, :] == segment_ids[:, :, None]
            seen = seen & alike[:, None]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))
"""

COUNTED = """\
import torch
from torch import nn


class CountedAttention(nn.Module):
    '''Softmax in float32, for models that run in bfloat16 or half precision.'''

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).to(torch.promote_types(x.dtype, torch.float32))
        real = torch.ones(B, 1, 1, T, dtype=torch.bool, device=x.device)
        if lengths is not None:
            real = (torch.arange(T, device=x.device) < lengths[:, None])[:, None, None]
        scores = scores.masked_fill(~real, -torch.inf)
        p = scores.softmax(-1)
        p = p.to(v.dtype)
        return self.proj((p @ v).transpose(1, 2).reshape(B, T, E))
"""

WRAPPED = """\
import torch
from torch import nn


class EncoderAttention(nn.Module):
    '''Batch-first. pad_mask is (batch, tokens), True for real tokens.'''

    def __init__(self, width, heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x, pad_mask=None):
        hidden = None
        if pad_mask is not None:
            hidden = pad_mask == 0
        out, _ = self.inner(x, x, x, key_padding_mask=hidden)
        return out
"""

BERT = """\
import torch
from torch import nn


class TinyRobertaSelfAttention(nn.Module):
    '''attention_mask is added to the scores: 0 to keep, a very negative number to hide.'''

    def __init__(self, hidden_size, num_attention_heads):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.all_head_size = hidden_size
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (f(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
                   for f in (self.query, self.key, self.value))
        scores = q @ k.mT / self.attention_head_size ** 0.5
        if attention_mask is not None:
            scores = scores + attention_mask
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
"""
