"""The dense weights, each computed and written once.

A program has one block of queries and one block of keys of one head; blocks that no query sees become zeros without a
product. Compare with `reference.attend`.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from headwise.weights.kernels.tile import (
    FIRST,
    HIDDEN,
    LEFT,
    RIGHT,
    STOP,
    allows,
    load_block,
    load_norm,
    load_open,
    load_rule,
    log2_scores,
    same_code,
    to_head,
)


@triton.jit
def weights_kernel(
    query, key, lse, weights, tables, numbers, first_key, count, across,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap,
    CODES: tl.constexpr, OPEN: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BO: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Weights (B, H, T, count) of the keys from `first_key` on; `across` is the number of blocks in a row of them."""
    first, place = tl.program_id(0) // across * BO, tl.program_id(0) % across * BW
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    rule = load_rule(numbers, 0)

    rows, places = first + tl.arange(0, BO), place + tl.arange(0, BW)
    start, cols = first_key + place, first_key + places
    last = tl.minimum(first + BO, T) - 1
    p = tl.zeros((BO, BW), tl.float32)
    if OPEN or ((start <= last + offset + rule[1]) & (start + BW > first + offset - rule[0])):
        q = load_block(query, first, q_row, T, BO, D, WIDTH, True)
        k = load_block(key, start, k_row, S, BW, D, WIDTH, True)
        norm = load_norm(lse + flat.to(tl.int64) * T, rows, T, True)
        x = log2_scores(tl.dot(q, tl.trans(k), input_precision=PRECISION), scale2, softcap, CAPPED) - norm[:, None]
        seen = allows(rule, (rows + offset)[:, None], cols[None, :], LEFT | RIGHT | FIRST | STOP)
        if OPEN:
            seen = seen | load_open(tables[1], flat // H, cols, S, False)
        if CODES:
            seen = seen & same_code(tables[0], flat // H, rows, cols, T, S, False, True)
        p = tl.exp2(tl.where(seen, x, HIDDEN))
    out = weights + (flat.to(tl.int64) * T + rows)[:, None] * count + places[None, :]
    tl.store(out, p.to(weights.dtype.element_ty), mask=(rows < T)[:, None] & (places < count)[None, :])
