import numpy as np


def compute_qkv(X, W_q, W_k, W_v):
    Q = X @ W_q
    K = X @ W_k
    V = X @ W_v
    return Q, K, V


def self_attention(Q, K, V):
    d_k = Q.shape[1]
    scores = Q @ K.T / np.sqrt(d_k)
    scores = scores - scores.max(axis=1, keepdims=True)
    weights = np.exp(scores)
    weights = weights / weights.sum(axis=1, keepdims=True)
    return weights @ V


def multi_head_attention(Q, K, V, n_heads):
    d_k = Q.shape[1] // n_heads
    outputs = []
    for i in range(n_heads):
        head = slice(i * d_k, (i + 1) * d_k)
        outputs.append(self_attention(Q[:, head], K[:, head], V[:, head]))
    return np.concatenate(outputs, axis=1)
