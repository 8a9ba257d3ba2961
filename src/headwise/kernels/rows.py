"""Row-major pass: entropy, peak and mean distance of every query, and on the way what every key receives.

A program owns one block of queries of one head and walks over the key blocks they see. Within a block of keys numbers are
first gathered into LANES columns, each of which one thread holds anyway, so that nothing is exchanged between threads
until the walk is over (measured 10 % faster than a full sum per block). The peak is remembered as its lane and block;
`peak_key.py` finds the one key among the few that share a lane.

What keys receive is added up by atomics, one coalesced row of them per block: for that alone the key-major pass of
`columns.py` is faster, beside the other statistics this is, because every weight is computed once. The picture rides
along where a block of queries lies in one row of its cells. Compare with `reference.attend`.
"""

# mypy: ignore-errors
# ruff: noqa: E501
import triton
import triton.language as tl

from headwise.kernels.tile import HIDDEN, load_block, log2_normalizer, log2_scores, reach, to_head, to_sample, visible


@triton.jit
def rows_kernel(
    query, key, lse, entropy, peak, peak_lane, distance, received, picture,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch, R, C,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LANES: tl.constexpr,
    ENTROPY: tl.constexpr, PEAK: tl.constexpr, DISTANCE: tl.constexpr, BEHIND: tl.constexpr, NORMAL: tl.constexpr,
    RECEIVED: tl.constexpr, PICTURE: tl.constexpr, BUNCH: tl.constexpr,
    KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Entropy, peak and distance (B, H, T); what keys receive (B, H, S) and picture cells (B, H, R, C)."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM  # under a causal mask the last rows take longest
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    received += flat.to(tl.int64) * S
    picture += flat.to(tl.int64) * R * C + first * R // T * C  # the block lies in one row of the picture
    keys, open_keys, documents = to_sample(
        keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch
    )

    rows = first + tl.arange(0, BM)
    q = load_block(query, first, q_row, T, BM, D, WIDTH, True)
    norm = log2_normalizer(tl.load(lse + flat.to(tl.int64) * T + rows, mask=rows < T, other=float("-inf")))
    position = rows + offset
    place = position.to(tl.float32)
    lo, clean_lo, clean_hi, hi = reach(
        first, tl.minimum(first + BM, T) - 1, offset, left, right, S, BN, OPEN, KEYS or OPEN or DOCUMENTS
    )
    ramp = tl.arange(0, BN).to(tl.float32)
    mass = tl.zeros((BM, LANES), tl.float32)
    surprise = tl.zeros((BM, LANES), tl.float32)
    far = tl.zeros((BM, LANES), tl.float32)
    best = tl.full((BM, LANES), HIDDEN, tl.float32)
    best_block = tl.zeros((BM, LANES), tl.int32)

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
                seen = visible(
                    position[:, None], cols[None, :], S, left, right, keys, open_keys, documents, KEYS, OPEN, DOCUMENTS
                )
                x = tl.where(seen, x, HIDDEN)
            p = tl.exp2(x)
            here = tl.sum(tl.reshape(p, (BM, BN // LANES, LANES)), 1)
            mass += here
            if ENTROPY:
                surprise += tl.sum(tl.reshape(p * x, (BM, BN // LANES, LANES)), 1)
            if DISTANCE:  # as floats: turning every pair's whole number into a float would cost as much as its exp2
                from_start = place - tl.cast(start, tl.float32)
                if phase == 1 and BEHIND:  # all keys lie behind: the distance splits at the block's first key
                    within = tl.sum(tl.reshape(p * ramp[None, :], (BM, BN // LANES, LANES)), 1)
                    far += from_start[:, None] * here - within
                else:
                    away = tl.abs(from_start[:, None] - ramp[None, :])
                    far += tl.sum(tl.reshape(p * away, (BM, BN // LANES, LANES)), 1)
            if PEAK:
                top = tl.max(tl.reshape(x, (BM, BN // LANES, LANES)), 1)
                better = top > best
                best_block = tl.where(better, start, best_block)
                best = tl.where(better, top, best)
            if RECEIVED:
                column = tl.sum(p, 0)
                tl.atomic_add(received + cols, column, mask=cols < S, sem="relaxed")
                if PICTURE:
                    bunches = tl.sum(tl.reshape(column, (BN // BUNCH, BUNCH)), 1)
                    c = (start + tl.arange(0, BN // BUNCH) * BUNCH) * C // S
                    tl.atomic_add(picture + c, bunches, mask=c < C, sem="relaxed")

    out = flat.to(tl.int64) * T + rows
    # A rounded log-sum-exp scales a whole row. Where rows are known to sum to 1 (no sinks) they are brought back to it.
    total = tl.sum(mass, 1)
    total = tl.where((total > 0) & NORMAL, total, 1.0)
    if ENTROPY:
        nats = -0.6931471805599453 * tl.sum(surprise, 1)
        tl.store(entropy + out, nats / total + 0.6931471805599453 * tl.log2(total), mask=rows < T)
    if DISTANCE:
        tl.store(distance + out, tl.sum(far, 1) / total, mask=rows < T)
    if PEAK:
        top = tl.max(best, 1)
        lane = tl.min(tl.where(best == top[:, None], tl.arange(0, LANES)[None, :], LANES), 1)
        block = tl.max(tl.where(tl.arange(0, LANES)[None, :] == lane[:, None], best_block, 0), 1)
        tl.store(peak + out, tl.exp2(top) / total, mask=rows < T)
        tl.store(peak_lane + out, tl.where(top > HIDDEN, block + lane, -1), mask=rows < T)
