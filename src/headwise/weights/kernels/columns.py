"""Key-major pass: what every key receives, and the pooled picture.

A program has one block of keys of one head and walks over the query blocks that see it. The log-sum-exp of every query
is known, so each weight is final when it is computed: sums over queries stay in registers, and nothing is written per
pair. Picture cells need one atomic addition per 16 keys and query block (summing whole tiles would make all warps wait
for each other, which was measured to be 13 % slower).

If cells divide blocks or the reverse (ALIGNED), blocks follow memory; otherwise blocks are cut at cell borders.
Compare with `reference.attend(...)[1].sum(-2)`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, load_block, log2_norm, log2_scores, reach, to_head, to_sample, visible


@triton.jit
def border(cell, size, cells):
    """The first of `size` indices in `cell`. 64-bit arithmetic: fine pictures of long sequences would overflow."""
    return ((tl.cast(cell, tl.int64) * size + cells - 1) // cells).to(tl.int32)


@triton.jit
def cell_of(index, size, cells):
    """The cell of an index."""
    return (tl.cast(index, tl.int64) * cells // size).to(tl.int32)


@triton.jit
def columns_kernel(
    query, key, lse, received, counts, picture, peaks,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap, left, right,
    keys, open_keys, documents, keys_batch, open_batch, documents_batch,
    R, C, row_blocks, col_blocks,
    D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PICTURE: tl.constexpr, PEAKS: tl.constexpr, ALIGNED: tl.constexpr, STRIPS: tl.constexpr, BUNCH: tl.constexpr,
    COUNT: tl.constexpr, KEYS: tl.constexpr, OPEN: tl.constexpr, DOCUMENTS: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What every key receives (B, H, S), how many see it, and the cells of a picture (B, H, R, C)."""
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    lse += flat.to(tl.int64) * T
    picture += flat.to(tl.int64) * R * C
    peaks += flat.to(tl.int64) * R * C
    tables = to_sample(keys, open_keys, documents, flat // H, keys_batch, open_batch, documents_batch)

    if ALIGNED:
        first = tl.program_id(0) * BN
        end_col = S
        cell_col = 0
    else:  # col_blocks blocks to a column of cells
        cell_col = tl.program_id(0) // col_blocks
        first = border(cell_col, S, C) + tl.program_id(0) % col_blocks * BN
        end_col = border(cell_col + 1, S, C)
    cols = first + tl.arange(0, BN)
    k = load_block(key, first, k_row, end_col, BN, D, WIDTH, True)
    last = tl.minimum(first + BN, end_col) - 1
    # Key j is visible to the queries i with j − right <= i + offset <= j + left.
    lo, clean_lo, clean_hi, hi = reach(
        first, last, -offset, right, left, T, BM, OPEN,
        KEYS or OPEN or DOCUMENTS or (not ALIGNED) or (first + BN > S),
    )  # fmt: skip
    total = tl.zeros((BN,), tl.float32)
    count = tl.zeros((BN,), tl.float32)
    if ALIGNED:
        begin, stop = lo, hi
    else:  # walk over cells, row_blocks blocks to each
        begin = cell_of(lo, T, R) * row_blocks * BM
        stop = tl.where(hi > lo, (cell_of(hi - 1, T, R) + 1) * row_blocks * BM, begin)
        clean_lo = begin
        clean_hi = begin

    for phase in tl.static_range(3):
        if phase == 0:
            phase_lo, phase_hi = begin, clean_lo
        elif phase == 1:
            phase_lo, phase_hi = clean_lo, clean_hi
        else:
            phase_lo, phase_hi = clean_hi, stop
        for step in range(phase_lo, phase_hi, BM):
            if ALIGNED:
                start = step
                end_row = T
                cell_row = 0
            else:
                cell_row = step // BM // row_blocks
                start = border(cell_row, T, R) + step // BM % row_blocks * BM
                end_row = border(cell_row + 1, T, R)
            rows = start + tl.arange(0, BM)
            q = load_block(query, start, q_row, end_row, BM, D, WIDTH, phase != 1)
            if phase == 1:
                norm = log2_norm(tl.load(lse + rows))
            else:
                norm = log2_norm(tl.load(lse + rows, mask=rows < end_row, other=float("-inf")))
            x = log2_scores(tl.dot(k, tl.trans(q), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[None, :]
            if phase != 1:
                position = (rows + offset)[None, :]
                seen = visible(position, cols[:, None], S, left, right, tables, KEYS, OPEN, DOCUMENTS)
                seen = seen & (rows[None, :] < end_row) & (cols[:, None] < end_col)
                x = tl.where(seen, x, HIDDEN)
                if COUNT and (KEYS or OPEN or DOCUMENTS):
                    count += tl.sum(seen.to(tl.float32), 1)
            p = tl.exp2(x)  # (BN, BM)
            if PICTURE and ALIGNED and STRIPS > 1:  # several rows of cells in one block
                strips = tl.sum(tl.reshape(p, (BN, STRIPS, BM // STRIPS)), 2)
                total += tl.sum(strips, 1)
                cells = tl.sum(tl.reshape(strips, (BN // BUNCH, BUNCH, STRIPS)), 1)
                r = start // (T // R) + tl.arange(0, STRIPS)
                c = (first + tl.arange(0, BN // BUNCH) * BUNCH) // (S // C)
                tl.atomic_add(
                    picture + r[None, :] * C + c[:, None],
                    cells,
                    mask=(r[None, :] < R) & (c[:, None] < C),
                    sem="relaxed",
                )
            else:
                block = tl.sum(p, 1)
                total += block
                if PICTURE:
                    bunches = tl.sum(tl.reshape(block, (BN // BUNCH, BUNCH)), 1)
                    if ALIGNED:
                        c = (first + tl.arange(0, BN // BUNCH) * BUNCH) // (S // C)
                        tl.atomic_add(picture + start // (T // R) * C + c, bunches, mask=c < C, sem="relaxed")
                    else:
                        c = tl.zeros((BN // BUNCH,), tl.int32) + cell_col
                        tl.atomic_add(picture + cell_row * C + c, bunches, sem="relaxed")
                if PEAKS:  # never ALIGNED; weights are not negative, so their bits are ordered like integers
                    top = tl.max(tl.max(p, 1), 0)
                    tl.atomic_max(peaks + cell_row * C + cell_col, top.to(tl.int32, bitcast=True), sem="relaxed")
    out = flat.to(tl.int64) * S + cols
    tl.store(received + out, total, mask=cols < end_col)
    if COUNT:
        if not (KEYS or OPEN or DOCUMENTS):  # for a band it is known
            low = tl.minimum(tl.maximum(cols - right - offset, 0), T)
            high = tl.minimum(tl.maximum(cols + left - offset + 1, 0), T)
            count = (high - low).to(tl.float32)
        tl.store(counts + out, count, mask=cols < end_col)
