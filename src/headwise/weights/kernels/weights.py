"""The row log-sum-exp, and the dense weights.

`log_sum_exp_kernel` computes the normalizer of every query if fused attention did not return it: one walk over
the keys with a running maximum, as in the online softmax of Milakov and Gimelshein (2018). A row that sees no key gets
minus infinity. Compare with `scores.logsumexp(-1)`.

`weights_kernel` computes and writes every weight once. A program has one block of queries and one block of keys of one
head; blocks that no query sees become zeros without a product. Compare with `reference.attend`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_norm, log2_scores, reach, to_head, to_sample, visible


@triton.jit
def log_sum_exp_kernel(
    query, key, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp (B, H, T)."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)

    rows = first + tl.arange(0, BM)
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    position = rows + offset
    lo, clean_lo, clean_hi, hi = reach(
        first, tl.minimum(first + BM, T) - 1, offset, left, right, S, BN, OPEN, KEYS or OPEN or DOCUMENTS
    )
    running_max = tl.full((BM,), HIDDEN, tl.float32)
    running_sum = tl.zeros((BM,), tl.float32)
    for phase in tl.static_range(3):
        if phase == 0:
            begin, end = lo, clean_lo
        elif phase == 1:
            begin, end = clean_lo, clean_hi
        else:
            begin, end = clean_hi, hi
        for start in range(begin, end, BN):
            cols = start + tl.arange(0, BN)
            k = load_block(key, start, k_row, S, BN, D, WIDTH, phase != 1)
            x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED)
            if phase != 1:
                seen = visible(position[:, None], cols[None, :], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
                x = tl.where(seen, x, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(x, 1))
            running_sum = running_sum * tl.exp2(running_max - new_max) + tl.sum(tl.exp2(x - new_max[:, None]), 1)
            running_max = new_max
    log2_sum = running_max + tl.log2(tl.where(running_sum > 0, running_sum, 1.0))
    result = tl.where(running_sum > 0, log2_sum * 0.6931471805599453, float("-inf"))
    tl.store(lse + flat.to(tl.int64) * T + rows, result, mask=rows < T)


@triton.jit
def weights_kernel(
    query, key, lse, weights,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch,
    first_key, count, across,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights (B, H, T, count) of the keys from `first_key` on; `across` is the number of blocks in a row of them."""
    first = tl.program_id(0) // across * BM
    place = tl.program_id(0) % across * BN
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)

    rows, places = first + tl.arange(0, BM), place + tl.arange(0, BN)
    position, cols = rows + offset, first_key + places
    start = first_key + place
    last = tl.minimum(first + BM, T) - 1
    p = tl.zeros((BM, BN), tl.float32)
    if OPEN or ((start <= last + offset + right) & (start + BN > first + offset - left)):
        q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
        k = load_block(key, start, k_row, S, BN, D, WIDTH, True)
        norm = log2_norm(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
        x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
        seen = visible(position[:, None], cols[None, :], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
        p = tl.exp2(tl.where(seen, x, HIDDEN))
    out = weights + (flat.to(tl.int64) * T + rows)[:, None] * count + places[None, :]
    tl.store(out, p.to(weights.dtype.element_ty), mask=(rows < T)[:, None] & (places < count)[None, :])
