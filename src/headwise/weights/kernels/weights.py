"""The weights themselves, for whoever wants them dense: every number computed once and written once.

A program owns one block of queries and one block of keys of one head. Blocks that nobody sees are written as zeros
without a product. Compare with `reference.attend`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_normalizer, log2_scores, to_head, to_sample, visible


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
    keys, open_keys, documents = to_sample(
        keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch
    )

    rows, places = first + tl.arange(0, BM), place + tl.arange(0, BN)
    position, cols = rows + offset, first_key + places
    start = first_key + place
    last = tl.minimum(first + BM, T) - 1
    p = tl.zeros((BM, BN), tl.float32)
    if OPEN or ((start <= last + offset + right) & (start + BN > first + offset - left)):
        q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
        k = load_block(key, start, k_row, S, BN, D, WIDTH, True)
        norm = log2_normalizer(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
        x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
        seen = visible(
            position[:, None], cols[None, :], S, left, right, keys, open_keys, documents, KEYS, OPEN, DOCUMENTS
        )
        p = tl.exp2(tl.where(seen, x, HIDDEN))
    out = weights + (flat.to(tl.int64) * T + rows)[:, None] * count + places[None, :]
    tl.store(out, p.to(weights.dtype.element_ty), mask=(rows < T)[:, None] & (places < count)[None, :])
