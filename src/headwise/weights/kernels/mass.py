"""The share of every query's attention on keys where a probe is True.

`mass_kernel` takes one probe, as a second structure next to the mask's, and visits only the key blocks that both can
reach. `bands_kernel` takes several narrow probes at once, each a band around the query within a range of keys: the
first tokens, the previous token, the neighborhood. Each covers a block or two of keys per block of queries, so one
program loads the queries once for all of them. Compare with `(weights * probe).sum(-1)`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_norm, log2_scores, to_head, to_sample, visible


@triton.jit
def mass_kernel(
    query, key, lse, mass,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch,
    probe_left, probe_right, probe_lo, probe_hi,
    probe_keys, probe_open, probe_documents, probe_keys_batch, probe_open_batch, probe_documents_batch,
    asked, offered, asked_batch, offered_batch,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PROBE_KEYS: tl.constexpr, PROBE_OPEN: tl.constexpr, PROBE_DOCUMENTS: tl.constexpr, MATCH: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The mass (B, H, T) of one probe."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)
    batch = flat // H
    probe_tables = to_sample(
        probe_keys, probe_open, probe_documents, batch, probe_keys_batch, probe_open_batch, probe_documents_batch
    )

    rows = first + tl.arange(0, BM)
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    norm = log2_norm(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
    position = rows + offset
    last = tl.minimum(first + BM, T) - 1
    lo, hi = probe_lo, tl.minimum(probe_hi, S)
    if not OPEN:
        lo = tl.maximum(lo, first + offset - left)
        hi = tl.minimum(hi, last + offset + right + 1)
    if not PROBE_OPEN:
        lo = tl.maximum(lo, first + offset - probe_left)
        hi = tl.minimum(hi, last + offset + probe_right + 1)
    if MATCH:
        wanted = tl.load(asked + batch * asked_batch + position, mask=(position >= 0) & (position < S), other=-1)
    found = tl.zeros((BM,), tl.float32)
    for start in range(tl.maximum(lo, 0), hi, BN):
        cols = start + tl.arange(0, BN)
        k = load_block(key, start, k_row, S, BN, D, WIDTH, True)
        x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
        seen = visible(position[:, None], cols[None, :], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
        seen = seen & visible(
            position[:, None], cols[None, :], S, probe_left, probe_right, probe_tables,
            PROBE_KEYS, PROBE_OPEN, PROBE_DOCUMENTS,
        )  # fmt: skip
        if MATCH:
            offer = tl.load(offered + batch * offered_batch + cols, mask=cols < S, other=-2)
            seen = seen & (wanted[:, None] == offer[None, :])
        found += tl.sum(tl.exp2(tl.where(seen, x, HIDDEN)), 1)
    tl.store(mass + flat.to(tl.int64) * T + rows, found, mask=rows < T)


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
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)

    rows = first + tl.arange(0, BM)
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    norm = log2_norm(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
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
            seen = visible(position[:, None], cols[None, :], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
            near = (cols[None, :] <= position[:, None] + band_right) & (cols[None, :] >= position[:, None] - band_left)
            seen = seen & near & (cols[None, :] < hi)
            found += tl.sum(tl.exp2(tl.where(seen, x, HIDDEN)), 1)
        tl.store(mass + tl.cast(number, tl.int64) * stride + flat.to(tl.int64) * T + rows, found, mask=rows < T)
