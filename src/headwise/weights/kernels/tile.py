"""What the kernels share: loading a block, log2 weights, and which pairs of a query and a key a rule allows.

Weights are powers of two: log2(weight) = score · log2(e) − normalizer, one fused multiply-add and one exp2.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108 - Triton would compile both sides of a ternary
import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # log2 of a hidden weight: finite, so that 2**HIDDEN · HIDDEN is 0 and not NaN
SEEN = tl.constexpr(-5e29)  # log2 of a weight that is not hidden is above this
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head):
    """Pointers to the query and key heads of program `flat` of B·H. 64-bit arithmetic: offsets may exceed 2**31."""
    batch, head = (flat // H).to(tl.int64), flat % H
    query += batch * q_batch + head.to(tl.int64) * q_head
    key += batch * k_batch + (head // group).to(tl.int64) * k_head
    return query, key


@triton.jit
def load_block(
    pointer, start, stride, end, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr
):
    """BLOCK rows from `start` of a matrix D wide, padded with zeros to WIDTH and, if RAGGED, beyond row `end`."""
    index, width = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    # 64-bit arithmetic once for the block; offsets within it are the same for all blocks and are computed once.
    places = pointer + tl.cast(start, tl.int64) * stride + (index[:, None] * stride + width[None, :])
    if RAGGED:
        return tl.load(places, mask=(start + index[:, None] < end) & (width[None, :] < D), other=0.0)
    if D < WIDTH:
        return tl.load(places, mask=width[None, :] < D, other=0.0)
    return tl.load(places)


@triton.jit
def log2_scores(product, scale2, softcap, CAPPED: tl.constexpr):
    """Scores times log2(e), from dot products; `scale2` holds that factor."""
    if CAPPED:  # cap · tanh(score / cap), tanh written with exp2
        tanh = 1 - 2 / (1 + tl.exp2(product * (2 * scale2 / softcap)))
        return softcap * LOG2_E * tanh
    return product * scale2


@triton.jit
def log2_norm(lse):
    """The row normalizer; a row that sees nothing gets one that makes all its weights 0."""
    return tl.where(lse == float("-inf"), 1e30, lse * LOG2_E)


@triton.jit
def load_norm(lse, rows, T, RAGGED: tl.constexpr):
    """The normalizers of some rows; beyond the last, if RAGGED, one that makes all weights 0."""
    if RAGGED:
        return log2_norm(tl.load(lse + rows, mask=rows < T, other=float("-inf")))
    return log2_norm(tl.load(lse + rows))


@triton.jit
def load_rule(numbers, index):
    """(left, right, first, stop): position p may see key j if p − left <= j <= p + right and first <= j < stop."""
    at = numbers + index * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


LEFT, RIGHT, FIRST, STOP = (tl.constexpr(1 << i) for i in range(4))  # what has to be tested of a rule


@triton.jit
def allows(rule, position, col, TESTS: tl.constexpr):
    """Where a rule allows the query at `position` to see key `col`; both are 2-D and broadcast with each other."""
    left, right, first, stop = rule
    seen = tl.full((1, 1), True, tl.int1)
    if LEFT & TESTS:
        seen = seen & (col >= position - left)
    if RIGHT & TESTS:
        seen = seen & (col <= position + right)
    if FIRST & TESTS:
        seen = seen & (col >= first)
    if STOP & TESTS:
        seen = seen & (col < stop)
    return seen


@triton.jit
def load_reach(table, batch, index, size):
    """What a block can reach by its codes and what all of it reaches: (some_lo, some_hi, all_lo, all_hi)."""
    at, inside = table[0] + batch * table[1] + index, index < size
    some_lo, some_hi = tl.load(at, mask=inside, other=1 << 30), tl.load(at + size, mask=inside, other=0)
    all_lo = tl.load(at + 2 * size, mask=inside, other=0)
    all_hi = tl.load(at + 3 * size, mask=inside, other=1 << 30)
    return tl.min(some_lo, 0), tl.max(some_hi, 0), tl.max(all_lo, 0), tl.min(all_hi, 0)


@triton.jit
def load_codes(table, batch, rows, cols, T, S, BY_KEY: tl.constexpr, RAGGED: tl.constexpr):
    """The codes of some queries and keys, 2-D, so that comparing them gives a tile. See `launch.Codes`.

    Unless RAGGED, there are no indices beyond the last one along the walk.
    """
    asked, offered, asked_batch, offered_batch = table
    asked, offered = asked + batch * asked_batch + rows, offered + batch * offered_batch + cols
    if RAGGED or not BY_KEY:
        own = tl.load(asked, mask=rows < T, other=-1)
    else:
        own = tl.load(asked)
    if RAGGED or BY_KEY:
        theirs = tl.load(offered, mask=cols < S, other=-2)
    else:
        theirs = tl.load(offered)
    if BY_KEY:
        return own[None, :], theirs[:, None]
    else:  # noqa: RET505 - Triton would compile a return after this as well
        return own[:, None], theirs[None, :]


@triton.jit
def load_open(table, batch, cols, S, BY_KEY: tl.constexpr):
    """Which keys are open to every query, as one axis of a tile."""
    opened = tl.load(table[0] + batch * table[1] + cols, mask=cols < S, other=0) != 0
    if BY_KEY:
        return opened[:, None]
    else:  # noqa: RET505
        return opened[None, :]


@triton.jit
def same_code(table, batch, rows, cols, T, S, BY_KEY: tl.constexpr, RAGGED: tl.constexpr):
    """Where the code of a query equals that of a key."""
    asked, offered = load_codes(table, batch, rows, cols, T, S, BY_KEY, RAGGED)
    return asked == offered
