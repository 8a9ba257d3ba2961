"""The mass of several narrow probes at once: each a band around the query within a range of keys.

The first tokens, the previous token, the neighbourhood: each concerns a block or two of keys per block of queries. One
program answers them all, so that queries are loaded once. Compare with `(weights * probe).sum(-1)`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_normalizer, log2_scores, to_head, to_sample, visible


@triton.jit
def bands_kernel(
    query, key, lse, mass, bands,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch, stride,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, COUNT: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The masses (COUNT, B, H, T) of `bands`, (COUNT, 4): left, right, first key, last key + 1."""
    first = tl.program_id(0) * BM
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    keys, open_keys, documents = to_sample(
        keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch
    )

    rows = first + tl.arange(0, BM)
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    norm = log2_normalizer(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
    position = rows + offset
    last = tl.minimum(first + BM, T) - 1
    for number in range(COUNT):
        band_left = tl.load(bands + number * 4)
        band_right = tl.load(bands + number * 4 + 1)
        lo = tl.maximum(tl.load(bands + number * 4 + 2), 0)
        hi = tl.minimum(tl.load(bands + number * 4 + 3), S)
        begin = tl.maximum(lo, first + offset - band_left)
        end = tl.minimum(hi, last + offset + band_right + 1)
        if not OPEN:
            begin = tl.maximum(begin, first + offset - left)
            end = tl.minimum(end, last + offset + right + 1)
        found = tl.zeros((BM,), tl.float32)
        for start in range(begin, end, BN):
            cols = start + tl.arange(0, BN)
            k = load_block(key, start, k_row, S, BN, D, WIDTH, True)
            x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
            seen = visible(
                position[:, None], cols[None, :], S, left, right, keys, open_keys, documents, KEYS, OPEN, DOCUMENTS
            )
            near = (cols[None, :] <= position[:, None] + band_right) & (cols[None, :] >= position[:, None] - band_left)
            seen = seen & near & (cols[None, :] < hi)
            found += tl.sum(tl.exp2(tl.where(seen, x, HIDDEN)), 1)
        tl.store(mass + tl.cast(number, tl.int64) * stride + flat.to(tl.int64) * T + rows, found, mask=rows < T)
