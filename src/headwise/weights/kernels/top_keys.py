"""The k largest weights of every query and where they are, unsorted.

Row-major. Every query keeps its K largest so far. A block of keys is searched only while it has a weight above the smallest
of them, which is rare after the first blocks. Compare with `weights.topk(k)`.
"""

# mypy: ignore-errors
# ruff: noqa: E501
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_norm, log2_scores, reach, to_head, to_sample, visible


@triton.jit
def top_keys_kernel(
    query, key, lse, weights, places,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch, wanted,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, K: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The largest weights and their keys, (B, H, T, wanted) each."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)

    rows = first + tl.arange(0, BM)
    slots = tl.arange(0, K)
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    norm = log2_norm(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
    position = rows + offset
    lo, _, _, hi = reach(first, tl.minimum(first + BM, T) - 1, offset, left, right, S, BN, OPEN, True)
    # Slots beyond the requested k hold plus infinity, so that nothing replaces them.
    best = tl.zeros((BM, K), tl.float32) + tl.where(slots < wanted, HIDDEN, float("inf"))[None, :]
    best_key = tl.zeros((BM, K), tl.int32) - 1
    for start in range(lo, hi, BN):
        cols = start + tl.arange(0, BN)
        k = load_block(key, start, k_row, S, BN, D, WIDTH, True)
        x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
        seen = visible(position[:, None], cols[None, :], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
        x = tl.where(seen & (rows[:, None] < T), x, HIDDEN)
        top = tl.max(x, 1)
        worst = tl.min(best, 1)
        while tl.max((top > worst).to(tl.int32), 0) > 0:
            enters = top > worst
            at = tl.min(tl.where(x == top[:, None], cols[None, :], S), 1)
            leaves = tl.min(tl.where(best == worst[:, None], slots[None, :], K), 1)
            replaced = enters[:, None] & (slots[None, :] == leaves[:, None])
            best = tl.where(replaced, top[:, None], best)
            best_key = tl.where(replaced, at[:, None], best_key)
            x = tl.where(enters[:, None] & (cols[None, :] == at[:, None]), HIDDEN, x)
            top = tl.max(x, 1)
            worst = tl.min(best, 1)
    out = (flat.to(tl.int64) * T + rows[:, None]) * wanted + slots[None, :]
    valid = (rows[:, None] < T) & (slots[None, :] < wanted)
    tl.store(weights + out, tl.exp2(best), mask=valid)
    tl.store(places + out, best_key, mask=valid)
