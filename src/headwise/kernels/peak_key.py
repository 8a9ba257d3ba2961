"""Which key holds the peak of a query, among the few that `rows.py` leaves open.

A program takes BM queries and all CANDIDATES of each, key `lane + c · LANES` for c = 0, 1, ..., and scores them again in
float32. Compare with `weights.argmax(-1)`.
"""

# mypy: ignore-errors
# ruff: noqa: E501
import triton
import triton.language as tl

from headwise.kernels.tile import to_head, to_sample, visible


@triton.jit
def peak_key_kernel(
    query, key, peak_lane, peak_key,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, CANDIDATES: tl.constexpr, LANES: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The key (B, H, T) of every peak, from its lane."""
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    keys, open_keys, documents = to_sample(
        keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch
    )

    pair = tl.arange(0, BM * CANDIDATES)
    row = tl.program_id(0) * BM + pair // CANDIDATES
    lane = tl.load(peak_lane + flat.to(tl.int64) * T + row, mask=row < T, other=-1)
    col = lane + pair % CANDIDATES * LANES
    seen = visible(
        (row + offset)[:, None], col[:, None], S, left, right, keys, open_keys, documents, KEYS, OPEN, DOCUMENTS
    )
    seen = tl.reshape(seen, (BM * CANDIDATES,)) & (lane >= 0)
    width = tl.arange(0, WIDTH)
    inside = seen[:, None] & (width[None, :] < D)
    q = tl.load(query + row.to(tl.int64)[:, None] * q_row + width[None, :], mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key + col.to(tl.int64)[:, None] * k_row + width[None, :], mask=inside, other=0.0).to(tl.float32)
    score = tl.where(seen, tl.sum(q * k, 1), float("-inf"))  # scale and soft-cap keep the order
    score = tl.reshape(score, (BM, CANDIDATES))
    top = tl.max(score, 1)
    choice = tl.min(tl.where(score == top[:, None], tl.reshape(col, (BM, CANDIDATES)), S), 1)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    tl.store(peak_key + flat.to(tl.int64) * T + rows, tl.where(top > float("-inf"), choice, -1), mask=rows < T)
