import torch
import torch.nn as nn
from torch import einsum


class Attention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.W_Q = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_K = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_V = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_model, cfg.d_head))
        self.W_O = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, cfg.d_model))
        self.b_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
        self.b_K = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
        self.b_V = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head))
        self.b_O = nn.Parameter(torch.zeros(cfg.d_model))
        for weight in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(weight, std=cfg.init_range)
        self.register_buffer("IGNORE", torch.tensor(float("-inf")))

    def forward(self, x):
        q = einsum("bte,hed->bhtd", x, self.W_Q) + self.b_Q[:, None, :]
        k = einsum("bse,hed->bhsd", x, self.W_K) + self.b_K[:, None, :]
        v = einsum("bse,hed->bhsd", x, self.W_V) + self.b_V[:, None, :]
        scores = einsum("bhtd,bhsd->bhts", q, k) / self.cfg.d_head**0.5
        pattern = self.apply_causal_mask(scores).softmax(dim=-1)
        z = einsum("bhts,bhsd->bhtd", pattern, v)
        return einsum("bhtd,hde->bte", z, self.W_O) + self.b_O

    def apply_causal_mask(self, attn_scores):
        T, S = attn_scores.shape[-2:]
        future = torch.triu(torch.ones(T, S, device=attn_scores.device), diagonal=1).bool()
        return attn_scores.masked_fill(future, self.IGNORE)
