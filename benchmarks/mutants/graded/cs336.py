import math

import torch


def run_scaled_dot_product_attention(Q, K, V, mask=None):
    d_k = Q.shape[-1]
    scores = Q @ K.transpose(-2, -1) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return weights @ V


def run_multihead_self_attention(
    d_model, num_heads, q_proj_weight, k_proj_weight, v_proj_weight, o_proj_weight, in_features
):
    B, T, _ = in_features.shape
    d_k = d_model // num_heads
    q = (in_features @ q_proj_weight.T).view(B, T, num_heads, d_k).transpose(1, 2)
    k = (in_features @ k_proj_weight.T).view(B, T, num_heads, d_k).transpose(1, 2)
    v = (in_features @ v_proj_weight.T).view(B, T, num_heads, d_k).transpose(1, 2)
    causal = torch.ones(T, T, device=in_features.device).tril().bool()
    heads = run_scaled_dot_product_attention(q, k, v, causal)
    output = heads.transpose(1, 2).reshape(B, T, d_model)
    return output @ o_proj_weight.T
