"""Row-major pass: entropy, peak and mean distance of every query, together with what every key receives.

A program has one block of queries of one head and walks over the key blocks they see. Sums stay within a warp where
possible, because a sum over the whole block makes all warps wait for each other:

    rows       accumulated in LANES columns, each held by one thread anyway, until the walk is over
    keys       summed over the queries of a warp, 16 at a time, then added by atomics
    picture    cells of at most 16 queries; cells within a block are stored, larger ones are added by atomics

The key-major pass of `columns.py` is faster for what keys receive alone. Together with other statistics this pass is
faster, because every weight is computed once. Compare with `reference.attend`.
"""

# mypy: ignore-errors
# ruff: noqa: E501
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_norm, log2_scores, reach, to_head, to_sample, visible


@triton.jit
def _larger(value, place, other, other_place):
    """The larger of two values and its place; the first if they are equal."""
    second = other > value
    return tl.where(second, other, value), tl.where(second, other_place, place)


@triton.jit
def rows_kernel(
    query, key, lse, entropy, peak, peak_key, distance, received, picture,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch,
    R, C, row_edge, col_edge, row_share,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    ENTROPY: tl.constexpr, PEAK: tl.constexpr, DISTANCE: tl.constexpr, BEHIND: tl.constexpr, NORMAL: tl.constexpr,
    RECEIVED: tl.constexpr, PICTURE: tl.constexpr, STRIP: tl.constexpr, BUNCH: tl.constexpr, OWNED: tl.constexpr,
    WIDE: tl.constexpr, WARPS: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Entropy, peak and distance (B, H, T); what keys receive (B, H, S); picture cells (B, H, R, C), row_edge × col_edge."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # under a causal mask the last rows take longest
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    received += flat.to(tl.int64) * S
    picture += flat.to(tl.int64) * R * C
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)

    rows = first + tl.arange(0, BM)
    out = flat.to(tl.int64) * T + rows
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    norm = log2_norm(tl.load(lse + out, mask=rows < T, other=float("-inf")))
    position = rows + offset
    place = position.to(tl.float32)
    lo, clean_lo, clean_hi, hi = reach(
        first, tl.minimum(first + BM, T) - 1, offset, left, right, S, BN, OPEN, KEYS or OPEN or DOCUMENTS
    )
    ramp = tl.arange(0, BN).to(tl.float32)
    lane_keys = tl.broadcast_to((tl.arange(0, BN // LANES) * LANES)[None, :, None], (BM, BN // LANES, LANES))
    mass = tl.zeros((BM, LANES), tl.float32)
    surprise = tl.zeros((BM, LANES), tl.float32)
    far = tl.zeros((BM, LANES), tl.float32)
    settled_mass = tl.zeros((BM, LANES), tl.float32)
    settled_surprise = tl.zeros((BM, LANES), tl.float32)
    settled_far = tl.zeros((BM, LANES), tl.float32)
    strip = tl.zeros((BM, LANES), tl.float32)
    best = tl.full((BM, LANES), HIDDEN, tl.float32)
    best_key = tl.zeros((BM, LANES), tl.int32)

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
            x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
            if phase != 1:
                seen = visible(position[:, None], cols[None, :], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
                x = tl.where(seen, x, HIDDEN)
            p = tl.exp2(x)
            here = tl.sum(tl.reshape(p, (BM, BN // LANES, LANES)), 1)
            mass += here
            if ENTROPY:
                surprise += tl.sum(tl.reshape(p * x, (BM, BN // LANES, LANES)), 1)
            if DISTANCE:  # as floats: converting every pair's integer to a float would cost as much as its exp2
                from_start = place - tl.cast(start, tl.float32)
                if phase == 1 and BEHIND:  # all keys are before the query: the distance splits at the block's first key
                    within = tl.sum(tl.reshape(p * ramp[None, :], (BM, BN // LANES, LANES)), 1)
                    far += from_start[:, None] * here - within
                else:
                    away = tl.abs(from_start[:, None] - ramp[None, :])
                    far += tl.sum(tl.reshape(p * away, (BM, BN // LANES, LANES)), 1)
            if PEAK:
                top, at = tl.reduce((tl.reshape(x, (BM, BN // LANES, LANES)), lane_keys), 1, _larger)
                best_key = tl.where(top > best, start + at, best_key)
                best = tl.maximum(top, best)
            if RECEIVED:
                parts = tl.sum(tl.sum(tl.reshape(p, (BM // WARPS // 16, WARPS, 16, BN)), 0), 1)
                places = tl.broadcast_to(cols[None, :], (WARPS, BN))
                tl.atomic_add(received + places, parts, mask=places < S, sem="relaxed")
            if PICTURE and WIDE:
                strip += here
                if ((start + BN) % col_edge == 0) | (start + BN >= end):
                    cells = tl.sum(tl.sum(tl.reshape(strip, (BM // 16, 16, LANES)), 2), 1) * row_share
                    r = (first + tl.arange(0, BM // 16) * 16) // row_edge
                    tl.atomic_add(picture + r.to(tl.int64) * C + start // col_edge, cells, mask=r < R, sem="relaxed")
                    strip = tl.zeros((BM, LANES), tl.float32)
            elif PICTURE:
                cells = tl.sum(tl.sum(tl.reshape(p, (BM // STRIP, STRIP, BN // BUNCH, BUNCH)), 3), 1) * row_share
                r = ((first + tl.arange(0, BM // STRIP) * STRIP) // row_edge)[:, None]
                c = ((start + tl.arange(0, BN // BUNCH) * BUNCH) // col_edge)[None, :]
                if OWNED:
                    tl.store(picture + r.to(tl.int64) * C + c, cells, mask=(r < R) & (c < C))
                else:
                    tl.atomic_add(picture + r.to(tl.int64) * C + c, cells, mask=(r < R) & (c < C), sem="relaxed")
            # A float that is added to thousands of times loses digits, so the sums are set aside every 32 blocks.
            if phase == 1:  # noqa: SIM102
                if start // BN % 32 == 0:
                    settled_mass += mass
                    settled_surprise += surprise
                    settled_far += far
                    mass = tl.zeros((BM, LANES), tl.float32)
                    surprise = tl.zeros((BM, LANES), tl.float32)
                    far = tl.zeros((BM, LANES), tl.float32)

    # A rounded log-sum-exp scales a whole row. Rows that must sum to 1 (no sinks) are rescaled.
    total = tl.sum(settled_mass + mass, 1)
    total = tl.where((total > 0) & NORMAL, total, 1.0)
    if ENTROPY:
        nats = -0.6931471805599453 * tl.sum(settled_surprise + surprise, 1)
        tl.store(entropy + out, nats / total + 0.6931471805599453 * tl.log2(total), mask=rows < T)
    if DISTANCE:
        tl.store(distance + out, tl.sum(settled_far + far, 1) / total, mask=rows < T)
    if PEAK:
        top = tl.max(best, 1)
        at = tl.min(tl.where(best == top[:, None], best_key + tl.arange(0, LANES)[None, :], S), 1)
        tl.store(peak + out, tl.exp2(top) / total, mask=rows < T)
        tl.store(peak_key + out, tl.where(top > HIDDEN, at, -1), mask=rows < T)
