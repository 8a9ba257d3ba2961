"""A head's attention by distance: the mass in every octave.

Row-major. A block of keys within one octave of all queries only adds to sums in registers, which are added to their bin
when the octave changes. Blocks that span several octaves are summed bin by bin.
Compare with the weights summed where 2**(b−1) <= |position − key| < 2**b.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_norm, log2_scores, reach, to_head, to_sample, visible


@triton.jit
def octave(distance):
    """0 for distance 0, else 1 + floor(log2(distance)); exact, because integers up to 2**24 are exact floats."""
    exponent = (distance.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(distance == 0, 0, exponent)


@triton.jit
def histogram_kernel(
    query, key, lse, histogram, bins,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Weights summed per octave of distance, (B, H, bins)."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)
    histogram += flat * bins

    rows = first + tl.arange(0, BM)
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    norm = log2_norm(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
    position = rows + offset
    last = tl.minimum(first + BM, T) - 1
    lo, _, _, hi = reach(first, last, offset, left, right, S, BN, OPEN, True)
    pending = tl.zeros((BM,), tl.float32)  # mass of the current bin
    pending_bin = 0
    for start in range(lo, hi, BN):
        cols = start + tl.arange(0, BN)
        k = load_block(key, start, k_row, S, BN, D, WIDTH, True)
        x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
        seen = visible(position[:, None], cols[None, :], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
        p = tl.exp2(tl.where(seen, x, HIDDEN))
        behind = first + offset - (start + BN - 1)  # the smallest distance, if all keys are before the queries
        ahead = start - (last + offset)
        nearest = tl.maximum(tl.maximum(behind, ahead), 0)
        farthest = tl.maximum(tl.maximum(first + BM - 1 + offset - start, start + BN - 1 - first - offset), 0)
        near_bin = octave(nearest)
        far_bin = octave(farthest)
        if near_bin != pending_bin or far_bin != near_bin:
            tl.atomic_add(histogram + pending_bin, tl.sum(pending, 0), sem="relaxed")
            pending = tl.zeros((BM,), tl.float32)
            pending_bin = near_bin
        if far_bin == near_bin:
            pending += tl.sum(p, 1)
        else:
            own = octave(tl.abs(position[:, None] - cols[None, :]))
            for bin in range(near_bin, tl.minimum(far_bin + 1, bins)):
                mass = tl.sum(tl.sum(tl.where(own == bin, p, 0.0), 1), 0)
                tl.atomic_add(histogram + bin, mass, sem="relaxed")
    tl.atomic_add(histogram + pending_bin, tl.sum(pending, 0), sem="relaxed")
