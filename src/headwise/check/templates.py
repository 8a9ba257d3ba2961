"""Writes the source of attention classes, right or with named mistakes, in four styles, for the tests and the quiz."""

import re
from collections.abc import Iterator

from headwise.errors import OptionError

# A slot is {name:text}, with the right text; {name} repeats it.
SLOT = re.compile(r"\{(\w+)(?::([^}]*))?\}")

SEPARATE = """\
{imports:import math
import torch
from torch import nn
}

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.1):
        {super:super().__init__()}
        {sizes:self.num_heads, self.head_dim = num_heads, d_model // num_heads}
        {qkv_layers:self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))}
        {out_layer:self.w_o = nn.Linear(d_model, d_model)}
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        {batch:batch = query.size(0)}
        q = {project_q:self.w_q(query)}{split:.view(batch, -1, self.num_heads, self.head_dim).transpose(1, 2)}
        k = {project_k:self.w_k(key)}{split}
        v = {project_v:self.w_v(value)}{split}
        scores = torch.matmul(q, k.transpose(-2, -1)){scale: / math.sqrt(self.head_dim)}
        if mask is not None:
            {mask:scores = scores.masked_fill(mask == 0, float("-inf"))}
        weights = torch.softmax(scores, dim={axis:-1}){after:}
        weights = {drop:self.dropout(weights)}
        heads = torch.matmul(weights, v)
        merged = heads{merge:.transpose(1, 2).contiguous().view(batch, -1, self.num_heads * self.head_dim)}
        return {out:self.w_o(merged)}
"""

FUSED = """\
{imports:import torch
import torch.nn as nn
from torch.nn import functional as F
}

class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, block_size, dropout=0.0):
        {super:super().__init__()}
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.drop = dropout
        {buffer:self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)))}

    def forward(self, x):
        B, T, C = x.size()
        D = C // self.n_head
        q, k, v = {qkv:self.c_attn(x).split(C, dim=2)}
        k = k{split:.view(B, T, self.n_head, D).transpose(1, 2)}
        q = q{split}
        v = v{split}
        att = (q @ k.transpose(-2, -1)){scale: * D ** -0.5}
        {mask:att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))}
        att = F.softmax(att, dim={axis:-1}){after:}
        att = {drop:F.dropout(att, self.drop, self.training)}
        y = att @ v
        y = y{merge:.transpose(1, 2).reshape(B, T, C)}
        return {out:self.c_proj(y)}
"""

LISTED = """\
{imports:import torch
import torch.nn as nn
import torch.nn.functional as F
}

class Head(nn.Module):
    def __init__(self, width, head_size):
        super().__init__()
        self.query = nn.Linear(width, head_size, bias=False)
        self.key = nn.Linear(width, head_size, bias=False)
        self.value = nn.Linear(width, head_size, bias=False)
        self.head_size = head_size

    def forward(self, x, mask=None):
        {names:B, T, C = x.shape}
        scores = torch.einsum("bqd,bkd->bqk", {q:self.query(x)}, {k:self.key(x)}){scale: * self.head_size ** -0.5}
        if mask is not None:
            {mask:scores = scores.masked_fill(mask == 0, -1e9)}
        weights = scores.softmax({axis:dim=-1}){after:}
        weights = {drop:weights}
        return torch.einsum("bqk,bkd->bqd", weights, {v:self.value(x)})


class MultiHead(nn.Module):
    def __init__(self, embed_dim, heads):
        {super:super().__init__()}
        {heads:self.heads = nn.ModuleList([Head(embed_dim, embed_dim // heads) for _ in range(heads)])}
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        y = {cat:torch.cat([head(x, mask) for head in self.heads], dim=-1)}
        return {out:self.out(y)}
"""

EINSUM = """\
{imports:import torch
from torch import nn
}

class EinsumAttention(nn.Module):
    def __init__(self, dim, n_heads, max_len=16):
        {super:super().__init__()}
        self.n_heads, self.scale = n_heads, {scale:(dim // n_heads) ** -0.5}
        head = {head:dim // n_heads}
        self.q, self.k, self.v = (nn.Parameter(torch.randn(n_heads, dim, head) * 0.02) for _ in range(3))
        self.o = nn.Parameter(torch.randn(n_heads, head, dim) * 0.02)
        {buffer:self.max_len = max_len}

    def forward(self, x, mask=None):
        {names:b, t, e = x.shape}
        q = {q:torch.einsum("bte,hed->bhtd", x, self.q)}
        k = {k:torch.einsum("bte,hed->bhtd", x, self.k)}
        v = {v:torch.einsum("bte,hed->bhtd", x, self.v)}
        scores = torch.einsum("{scores:bhtd,bhsd->bhts}", q, k) * self.scale
        if mask is not None:
            {mask:scores = scores.masked_fill(~mask.bool(), float("-inf"))}
        weights = scores.softmax({axis:dim=-1}){after:}
        weights = {drop:weights}
        heads = torch.einsum("{values:bhts,bhsd->bhtd}", weights, v)
        return {out:torch.einsum("bhtd,hde->bte", heads, self.o)}
"""

STYLES = {"separate": SEPARATE, "fused": FUSED, "listed": LISTED, "einsum": EINSUM}

CAUSAL = "mask = torch.ones(x.size(1), x.size(1))"
CAUSAL_HERE = "batch = query.size(0)\n        mask = torch.ones(query.size(1), key.size(1))"
STORED = 'self.register_buffer("seen", torch.ones(12, 12).tril())'


def _scale(separate: str, fused: str, listed: str) -> dict[str, dict[str, str]]:
    return {"separate": {"scale": separate}, "fused": {"scale": fused}, "listed": {"scale": listed}}


# Mistake → style → the slots that it changes; a style that is not listed cannot show it.
SPOILED_SLOTS: dict[str, dict[str, dict[str, str]]] = {
    "scale-missing": _scale("", "", ""),
    "scale-d_model": _scale(" / math.sqrt(query.size(-1))", " * C ** -0.5", " * C ** -0.5"),
    "scale-batch": _scale(" / math.sqrt(batch)", " * B ** -0.5", " * B ** -0.5"),
    "scale-length": _scale(" / math.sqrt(query.size(1))", " * T ** -0.5", " * T ** -0.5"),
    "scale-multiplied": _scale(" * math.sqrt(self.head_dim)", " * D ** 0.5", " * self.head_size ** 0.5"),
    "scale-no-sqrt": _scale(" / self.head_dim", " / D", " / self.head_size"),
    "scale-after-softmax": {
        "einsum": {"scale": "1.0", "after": " * (e // self.n_heads) ** -0.5"},
        "separate": {"scale": "", "after": " / math.sqrt(self.head_dim)"},
        "fused": {"scale": "", "after": " * D ** -0.5"},
        "listed": {"scale": "", "after": " * self.head_size ** -0.5"},
    },
    "softmax-axis": {"separate": {"axis": "-2"}, "fused": {"axis": "1"}, "listed": {"axis": "dim=0"}},
    "split-view": {
        "einsum": {k: f"torch.einsum('bte,hed->bthd', x, self.{k}).reshape(b, self.n_heads, t, -1)" for k in "qkv"},
        "separate": {"split": ".view(batch, self.num_heads, -1, self.head_dim)"},
        "fused": {"split": ".reshape(B, self.n_head, T, D)"},
    },
    "merge-view": {
        "einsum": {"out": "heads.reshape(b, t, e) @ self.o.flatten(0, 1)"},
        "separate": {"merge": ".reshape(batch, -1, self.num_heads * self.head_dim)"},
        "fused": {"merge": ".contiguous().view(B, T, C)"},
        "listed": {"cat": "torch.stack([head(x, mask) for head in self.heads], 1).reshape(x.shape)"},
    },
    "attends-over-heads": {
        "einsum": {"scores": "bhtd,bgtd->bthg", "values": "bthg,bgtd->bhtd"},
        "separate": {"split": ".view(batch, -1, self.num_heads, self.head_dim)",
                     "merge": ".reshape(batch, -1, self.num_heads * self.head_dim)"},
        "fused": {"split": ".view(B, T, self.n_head, D)", "merge": ".reshape(B, T, C)", "mask": "pass"},
    },
    "no-out-proj": {"separate": {"out": "merged"}, "fused": {"out": "y"}, "listed": {"out": "y"}},
    "no-qkv-proj": {
        "einsum": dict.fromkeys("qkv", "x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)"),
        "separate": {"project_q": "query", "project_k": "key", "project_v": "value"},
        "fused": {"qkv": "x, x, x"},
    },
    "one-projection": {
        "separate": {"project_k": "self.w_q(key)", "project_v": "self.w_q(value)"},
        "fused": {"qkv": "(self.c_attn(x)[..., :C],) * 3"},
        "listed": {"k": "self.query(x)", "v": "self.query(x)"},
    },
    "wrong-role": {
        "einsum": {"v": 'torch.einsum("bte,hed->bhtd", x, self.k)'},
        "separate": {"project_v": "self.w_k(value)"},
        "listed": {"v": "self.key(x)"},
    },
    "heads-share-weights": {
        "separate": {"split": "[..., : self.head_dim].unsqueeze(1).expand(-1, self.num_heads, -1, -1)"},
        "fused": {"split": "[..., :D].unsqueeze(1).expand(-1, self.n_head, -1, -1)"},
        "listed": {"heads": "self.heads = nn.ModuleList([Head(embed_dim, embed_dim // heads)] * heads)"},
    },
    "heads-averaged": {
        "separate": {"merge": ".mean(1).repeat(1, 1, self.num_heads)"},
        "fused": {"merge": ".sum(1).repeat(1, 1, self.n_head)"},
        "listed": {"cat": "sum(head(x, mask) for head in self.heads).repeat(1, 1, len(self.heads))"},
    },
    "mask-ignored": {
        "einsum": {"mask": "mask = mask.bool()"},
        "separate": {"mask": "pass"},
        "listed": {"cat": "torch.cat([head(x) for head in self.heads], dim=-1)"},
    },
    "mask-discarded": {
        "separate": {"mask": 'scores.masked_fill(mask == 0, float("-inf"))'},
        "fused": {"mask": 'att.masked_fill(self.bias[:T, :T] == 0, float("-inf"))'},
        "listed": {"mask": "scores.masked_fill(mask == 0, -1e9)"},
    },
    "mask-after-softmax": {
        "separate": {"mask": "pass", "drop": "weights if mask is None else weights.masked_fill(mask == 0, 0.0)"},
        "fused": {"mask": "pass", "drop": "att.masked_fill(self.bias[:T, :T] == 0, 0.0)"},
        "listed": {"mask": "pass", "drop": "weights if mask is None else weights * (mask != 0)"},
    },
    "mask-leaks": {
        "separate": {"mask": "scores = scores.masked_fill(mask == 0, 1e-9)"},
        "fused": {"mask": "att = att.masked_fill(self.bias[:T, :T] == 0, 0.0)"},
        "listed": {"mask": "scores = scores * (mask != 0)"},
        "einsum": {"mask": "scores = scores.masked_fill(~mask.bool(), -1e-9)"},
    },
    "mask-wrong-sample": {
        "einsum": {"mask": "scores = scores.masked_fill(~mask.bool().roll(2, 0), -1e9)"},
        "separate": {"mask": 'scores = scores.masked_fill(mask.roll(1, 0) == 0, float("-inf"))'},
        "listed": {"mask": "scores = scores.masked_fill(mask.flip(0) == 0, -1e9)"},
    },
    "mask-crashes": {
        "einsum": {"mask": 'scores = scores.masked_fil(~mask.bool(), float("-inf"))'},
        "separate": {"mask": "scores = scores.mask_fill(mask == 0, -1e9)"},
        "listed": {"mask": "scores = scores.masked_fill(mask.equal_zero(), -1e9)"},
    },
    "causal-inverted": {
        "separate": {"batch": CAUSAL_HERE + ".triu()"},
        "einsum": {"names": CAUSAL + ".triu(1)"},
        "fused": {"mask": 'att = att.masked_fill(self.bias[:T, :T] == 1, float("-inf"))'},
        "listed": {"names": "T = x.size(1); mask = torch.triu(torch.ones(T, T))"},
    },
    "causal-off-by-one": {
        "separate": {"batch": CAUSAL_HERE + ".tril(1)"},
        "einsum": {"names": CAUSAL + ".tril(1)"},
        "fused": {"mask": 'att = att.masked_fill(self.bias[:T, :T].tril(-1) == 0, -1e9)'},
        "listed": {"names": "T = x.size(1); mask = torch.ones(T, T).tril(1)"},
    },
    "dropout-in-eval": {
        "separate": {"drop": "torch.nn.functional.dropout(weights, 0.1)"},
        "fused": {"drop": "F.dropout(att, 0.1)"},
        "listed": {"drop": "nn.Dropout(0.2)(weights)"},
    },
    "layers-in-forward": {
        "separate": {"out": "nn.Linear(merged.size(-1), merged.size(-1))(merged)"},
        "fused": {"out": "nn.Linear(C, C)(y)"},
        "listed": {"out": "nn.Linear(y.size(-1), y.size(-1))(y)"},
    },
    "layers-in-list": {
        "separate": {"qkv_layers": "self.w = [nn.Linear(d_model, d_model) for _ in range(3)]",
                     "project_q": "self.w[0](query)",
                     "project_k": "self.w[1](key)", "project_v": "self.w[2](value)"},
        "einsum": {"buffer": "self.more = [nn.Linear(dim, dim)]",
                   "out": 'self.more[0](torch.einsum("bhtd,hde->bte", heads, self.o))'},
        "listed": {"heads": "self.heads = [Head(embed_dim, embed_dim // heads) for _ in range(heads)]"},
    },
    "not-a-buffer": {
        "einsum": {"scale": "torch.tensor([dim // n_heads]) ** -0.5"},
        "separate": {"out_layer": "self.w_o = nn.Linear(d_model, d_model)\n"
                     "        self.scale = torch.full((1,), self.head_dim ** 0.5)", "scale": " / self.scale"},
        "fused": {"buffer": "self.bias = torch.tril(torch.ones(block_size, block_size))"},
    },
    "buffer-not-sliced": {
        "fused": {"mask": 'att = att.masked_fill(self.bias == 0, float("-inf"))'},
        "separate": {"sizes": "self.num_heads, self.head_dim = num_heads, d_model // num_heads\n        " + STORED,
                     "batch": "batch = query.size(0)\n        mask = self.seen"},
        "einsum": {"buffer": STORED, "names": "b, t, e = x.shape\n        mask = self.seen"},
    },
    "undefined-name": {
        "separate": {"batch": "pass",
                     "split": ".view(batch_size, -1, self.num_heads, self.head_dim).transpose(1, 2)",
                     "merge": ".transpose(1, 2).contiguous().view(batch_size, -1, self.num_heads * self.head_dim)"},
        "fused": {"merge": ".transpose(1, 2).reshape(B, seq_len, C)"},
        "listed": {"scale": " * head_size ** -0.5"},
    },
    "missing-attribute": {
        "separate": {"sizes": "self.num_heads, self.dim_head = num_heads, d_model // num_heads"},
        "fused": {"split": ".view(B, T, self.num_heads, D).transpose(1, 2)"},
        "listed": {"scale": " * self.head_dim ** -0.5"},
    },
    "missing-import": {
        "separate": {"imports": "import torch\nfrom torch import nn\n"},
        "fused": {"imports": "import torch\nimport torch.nn as nn\n"},
        "listed": {"imports": "import torch\n"},
    },
    "missing-super": {style: {"super": "pass"} for style in ("separate", "fused", "listed")},
    "contiguous": {
        "separate": {"merge": ".transpose(1, 2).view(batch, -1, self.num_heads * self.head_dim)"},
        "fused": {"merge": ".transpose(1, 2).view(B, T, C)"},
        "listed": {"v": "self.value(x).mT.contiguous().mT.view(B * T, -1).view(B, T, -1)"},
    },
    "no-gradient": {
        "einsum": {"out": "torch.einsum('bhtd,hde->bte', heads.detach(), self.o.data)"},
        "separate": {"out": "self.w_o(merged).detach()"},
        "fused": {"out": "self.c_proj(y).data"},
        "listed": {"out": "self.out(y).detach()"},
    },
    "too-wide": {
        "separate": {"sizes": "self.num_heads, self.head_dim = num_heads, d_model",
                     "qkv_layers": "self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, num_heads * d_model)"
                     " for _ in range(3))", "out": "merged"},
        "einsum": {"head": "dim", "scale": "dim ** -0.5", "out": "heads.transpose(1, 2).flatten(2)"},
        "listed": {
            "heads": "self.heads = nn.ModuleList(Head(embed_dim, embed_dim) for _ in range(heads))", "out": "y",
        },
    },
}  # fmt: skip


def write(style: str = "separate", *mistakes: str, **slots: str) -> str:
    """The source of a class in a style, with the named mistakes and changed slots in it.

    >>> "math.sqrt" in write("separate"), "math.sqrt" in write("separate", "scale-missing")
    (True, False)
    """
    chosen: dict[str, str] = {}
    for name in mistakes:
        if style not in SPOILED_SLOTS.get(name, {}):
            raise OptionError(f"style {style!r} cannot show {name!r}; it can show {', '.join(shown_by(style))}.")
        chosen |= SPOILED_SLOTS[name][style]
    chosen |= slots
    return SLOT.sub(lambda slot: chosen.setdefault(slot[1], slot[2]), STYLES[style])


def shown_by(style: str) -> Iterator[str]:
    """Names of the mistakes that a style can show."""
    return (name for name, changes in SPOILED_SLOTS.items() if style in changes)
