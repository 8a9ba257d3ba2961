"""One walk over the weights of a head for any number of statistics.

A program has a block of queries and walks over the keys they see, or (BY_KEY) a block of keys and walks over the
queries that see them. The log-sum-exp of every query is known, so each weight is final when it is computed, and nothing
is written per pair. TERMS are the statistics, each a few small functions; see `terms.py`.

Most tiles are *inner*: the mask hides nothing of them, and every term either wants all of the tile or none of it. They
need no tests of positions. The others are *edges*: the diagonal, the ends of a window or of a document, the first keys
if a term looks at those. A term that can be nonzero only near the diagonal or in a few keys (NARROW) runs in edges
alone, and a walk of such terms skips all inner tiles. A term may also have a shorter formula for tiles that lie on one
side of some place (CUT), which makes edges of the tiles there. Compare with `reference.attend` and a formula.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005, SIM102, SIM108 - Triton knows neither starred tuples nor tensors in a ternary
from typing import NamedTuple

import triton
import triton.language as tl

from headwise.weights.kernels.tile import (
    HIDDEN,
    LN_2,
    allows,
    load_block,
    load_codes,
    load_norm,
    load_open,
    load_reach,
    load_rule,
    log2_scores,
    same_code,
    to_head,
)

EVERYWHERE, NARROW, WIDE, CUT = (tl.constexpr(i) for i in range(4))


class WeightPair(NamedTuple):
    """Pairs of a query and a key, as the function of a term gets them; everything broadcasts to `weight`.

    The names are those of `statistic.Pairs`. Positions, keys and distances are float32, which is exact and saves a
    conversion per pair. Tokens are those of the term, if it has any.
    """

    weight: tl.tensor
    log2_weight: tl.tensor
    log_weight: tl.tensor
    score: tl.tensor
    position: tl.tensor
    key: tl.tensor
    distance: tl.tensor
    query_token: tl.tensor
    key_token: tl.tensor


class TilePlace(NamedTuple):
    """Where a tile is: the first index of the program's block, that of the tile along the walk, and the sizes of both.

    `flat` is the head, counted over all samples, and `offset` the position of the first query.
    """

    first: tl.tensor
    start: tl.tensor
    flat: tl.tensor
    own_size: tl.tensor
    walk_size: tl.tensor
    offset: tl.tensor


# The parts of a term in TERMS.
START, STEP, VALUE, END, SIZE, REACH, TESTS, TABLE, OPENED, TOKENS = (tl.constexpr(i) for i in range(10))


@triton.jit
def pair_of(weight, log2_weight, level, position, key, tokens):
    """The pairs of a tile; `level` is the log2 of what weights were divided by."""
    place, col = position.to(tl.float32), key.to(tl.float32)
    log_weight, score = log2_weight * LN_2, (log2_weight + level) * LN_2
    return WeightPair(weight, log2_weight, log_weight, score, place, col, place - col, tokens[0], tokens[1])


@triton.jit
def span_of(rule, low, high, shift, size, BY_KEY: tl.constexpr):
    """What a block with positions `low..high` can reach under a rule, and what all of the block reaches.

    Returns (some_lo, some_hi, all_lo, all_hi), indices along the walk; ranges may be empty.
    """
    left, right, first, stop = rule
    if BY_KEY:  # key j is visible to positions from j − right to j + left
        some_lo, some_hi = low - right, high + left + 1
        all_lo, all_hi = high - right, low + left + 1
        outside = (high < first) | (low >= stop)
        inside = (low >= first) & (high < stop)
        some_hi = tl.where(outside, some_lo, some_hi)
        all_hi = tl.where(inside, all_hi, all_lo)
    else:
        some_lo, some_hi = tl.maximum(low - left, first), tl.minimum(high + right + 1, stop)
        all_lo, all_hi = tl.maximum(high - left, first), tl.minimum(low + right + 1, stop)
    some_lo, some_hi = tl.maximum(some_lo - shift, 0), tl.minimum(some_hi - shift, size)
    all_lo, all_hi = tl.maximum(all_lo - shift, 0), tl.minimum(all_hi - shift, size)
    return some_lo, tl.maximum(some_hi, some_lo), all_lo, tl.maximum(all_hi, all_lo)


@triton.jit
def up(index, BLOCK: tl.constexpr):
    """The next multiple of BLOCK."""
    return (index + BLOCK - 1) // BLOCK * BLOCK


@triton.jit
def run_from(start, spans, inner_lo, inner_hi, hi, TERMS: tl.constexpr, BW: tl.constexpr):
    """Where the run of tiles from `start` on ends, and whether they are edges; `spans` are those of the terms."""
    edge = (start < inner_lo) | (start + BW > inner_hi)
    edge_stop = tl.where(start < inner_lo, up(inner_lo, BW), tl.where(edge, hi, start + BW))
    inner_stop = inner_hi // BW * BW
    for f in tl.static_range(len(TERMS)):
        if TERMS[f][REACH] == NARROW or TERMS[f][REACH] == CUT:
            lo, stop = spans[f]
            here = (lo < start + BW) & (stop > start) & (lo < stop)
            edge = edge | here
            edge_stop = tl.where(here, tl.maximum(edge_stop, up(stop, BW)), edge_stop)
            later = (lo >= start + BW) & (lo < stop)
            inner_stop = tl.where(later, tl.minimum(inner_stop, lo // BW * BW), inner_stop)
    return tl.minimum(tl.where(edge, edge_stop, inner_stop), hi), edge


@triton.jit
def add_term(
    found, pairs, place, rows, cols, position, col, tables, numbers, out, H, T, S,
    TERMS: tl.constexpr, F: tl.constexpr, BY_KEY: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What one term has found after one more tile, given the weights, their log2 and what they were divided by."""
    weight, x, level = pairs
    batch = place.flat // H
    if EDGE and (TERMS[F][REACH] == NARROW or TERMS[F][REACH] == WIDE):
        wanted = allows(load_rule(numbers, F + 1), position, col, TERMS[F][TESTS])
        if TERMS[F][OPENED] > 0:
            wanted = wanted | load_open(tables[TERMS[F][OPENED]], batch, cols, S, BY_KEY)
        weight, x = tl.where(wanted, weight, 0.0), tl.where(wanted, x, HIDDEN)
    if TERMS[F][TABLE] > 0:
        wanted = same_code(tables[TERMS[F][TABLE]], batch, rows, cols, T, S, BY_KEY, EDGE)
        weight, x = tl.where(wanted, weight, 0.0), tl.where(wanted, x, HIDDEN)
    tokens = position, col
    if TERMS[F][TOKENS] > 0:
        tokens = load_codes(tables[TERMS[F][TOKENS]], batch, rows, cols, T, S, BY_KEY, EDGE)
    pair = pair_of(weight, x, level, position, col, tokens)
    return TERMS[F][STEP](found, pair, place, out, TERMS[F][VALUE], TERMS[F][SIZE], EDGE or TERMS[F][TABLE] > 0)


@triton.jit
def add_tile(
    found, spans, place, mine, norm, walk, walk_row, lse, tables, numbers, outs, H, scale2, softcap,
    TERMS: tl.constexpr, TESTED: tl.constexpr, BY_KEY: tl.constexpr, SCORES: tl.constexpr, CODES: tl.constexpr,
    OPEN: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, BO: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """What the terms have found after one more tile."""
    theirs = load_block(walk, place.start, walk_row, place.walk_size, BW, D, WIDTH, EDGE)
    x = log2_scores(tl.dot(mine, tl.trans(theirs), input_precision=PRECISION), scale2, softcap, CAPPED)
    index, there, batch = place.first + tl.arange(0, BO), place.start + tl.arange(0, BW), place.flat // H
    if BY_KEY:
        rows, cols, T, S = there, index, place.walk_size, place.own_size
        position, col = (rows + place.offset)[None, :], cols[:, None]
        level = load_norm(lse, there, T, EDGE)[None, :]
    else:
        rows, cols, T, S = index, there, place.own_size, place.walk_size
        position, col = (rows + place.offset)[:, None], cols[None, :]
        level = norm[:, None]
    if not SCORES:
        x = x - level
    if EDGE:
        seen = allows(load_rule(numbers, 0), position, col, TESTED)
        if OPEN:
            seen = seen | load_open(tables[1], batch, cols, S, BY_KEY)
        if CODES:
            seen = seen & same_code(tables[0], batch, rows, cols, T, S, BY_KEY, True)
        x = tl.where(seen, x, HIDDEN)
    pairs = tl.exp2(x), x, level
    new = ()
    for f in tl.static_range(len(TERMS)):
        got = found[f]
        if TERMS[f][REACH] != NARROW:
            got = add_term(
                got, pairs, place, rows, cols, position, col, tables, numbers, outs[f], H, T, S,
                TERMS, f, BY_KEY, EDGE,
            )  # fmt: skip
        elif EDGE:
            if (spans[f][0] < place.start + BW) & (spans[f][1] > place.start):
                got = add_term(
                    got, pairs, place, rows, cols, position, col, tables, numbers, outs[f], H, T, S,
                    TERMS, f, BY_KEY, EDGE,
                )  # fmt: skip
        new = new + (got,)
    return new


@triton.jit
def walk_kernel(
    query, key, lse, outs, tables, numbers,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    H, group, T, S, offset, scale2, softcap,
    TERMS: tl.constexpr, DIGEST: tl.constexpr, TESTED: tl.constexpr, BY_KEY: tl.constexpr, SCORES: tl.constexpr,
    NORMAL: tl.constexpr, FULL: tl.constexpr, RUNS: tl.constexpr, CODES: tl.constexpr, OPEN: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BO: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """Every term of TERMS, into its tensors in `outs`.

    DIGEST changes with the source of the terms, which Triton's cache on disk would not notice. SCORES: there is no
    log-sum-exp, so terms get scores. NORMAL: rows sum to 1, and the first term is their mass. FULL: some term is not
    NARROW. RUNS: the most runs of tiles there can be. `tables`: codes, open keys and reach of the mask, then those of
    the terms.
    """
    flat = tl.program_id(1)
    query, key = to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head)
    lse += flat.to(tl.int64) * T
    if BY_KEY:
        own, own_row, own_size, own_shift = key, k_row, S, 0
        walk, walk_row, walk_size, shift = query, q_row, T, offset
        first = tl.program_id(0) * BO
    else:
        own, own_row, own_size, own_shift = query, q_row, T, offset
        walk, walk_row, walk_size, shift = key, k_row, S, 0
        first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BO  # under a causal mask the last rows take longest
    mine = load_block(own, first, own_row, own_size, BO, D, WIDTH, True)
    if BY_KEY or SCORES:
        norm = tl.zeros((BO,), tl.float32)
    else:
        norm = load_norm(lse, first + tl.arange(0, BO), T, True)

    # The range to walk over, and the part of it where nothing has to be tested.
    low, high = first + own_shift, tl.minimum(first + BO, own_size) - 1 + own_shift
    lo, hi, inner_lo, inner_hi = span_of(load_rule(numbers, 0), low, high, shift, walk_size, BY_KEY)
    if OPEN:
        lo, hi, inner_hi = 0, walk_size, inner_lo
    if CODES:
        reach = load_reach(tables[2], flat // H, first + tl.arange(0, BO), own_size)
        lo, hi = tl.maximum(lo, reach[0]), tl.minimum(hi, reach[1])
        hi, inner_lo, inner_hi = tl.maximum(lo, hi), tl.maximum(inner_lo, reach[2]), tl.minimum(inner_hi, reach[3])
        inner_hi = tl.maximum(inner_lo, inner_hi)
    if BY_KEY:  # keys beyond the last one must be hidden
        inner_hi = tl.where(first + BO <= own_size, inner_hi, inner_lo)
    place = TilePlace(first, first, flat, own_size, walk_size, offset)
    found, spans, some_lo, some_hi = (), (), hi, lo
    for f in tl.static_range(len(TERMS)):
        span = span_of(load_rule(numbers, f + 1), low, high, shift, walk_size, BY_KEY)
        spans = spans + ((span[0], span[1]),)
        if TERMS[f][REACH] == WIDE:
            inner_lo, inner_hi = tl.maximum(inner_lo, span[2]), tl.minimum(inner_hi, span[3])
        if (TERMS[f][REACH] == NARROW or TERMS[f][REACH] == WIDE) and TERMS[f][OPENED] == 0:
            some_lo, some_hi = tl.minimum(some_lo, span[0]), tl.maximum(some_hi, span[1])
        else:
            some_lo, some_hi = lo, hi
        found = found + (TERMS[f][START](place, outs[f], TERMS[f][VALUE], TERMS[f][SIZE], BO),)
    lo, hi = tl.maximum(lo, some_lo), tl.minimum(hi, some_hi)  # what no term looks at is skipped
    if not FULL:  # and what lies between
        inner_lo, inner_hi = 0, up(hi, BW)

    start = lo // BW * BW
    # Triton pipelines loops inside a `for` but not inside a `while`, so this counts: an edge at both ends and at every
    # narrow term, and inner tiles between them.
    for _ in range(RUNS):
        if start < hi:
            stop, edge = run_from(start, spans, inner_lo, inner_hi, hi, TERMS, BW)
            if edge:
                for at in tl.range(start, stop, BW, num_stages=1):  # few tiles: keep shared memory for the others
                    tile = TilePlace(first, at, flat, own_size, walk_size, offset)
                    found = add_tile(
                        found, spans, tile, mine, norm, walk, walk_row, lse, tables, numbers, outs, H, scale2, softcap,
                        TERMS, TESTED, BY_KEY, SCORES, CODES, OPEN, CAPPED, PRECISION, True, D, WIDTH, BO, BW,
                    )  # fmt: skip
            elif FULL:
                for at in range(start, stop, BW):
                    tile = TilePlace(first, at, flat, own_size, walk_size, offset)
                    found = add_tile(
                        found, spans, tile, mine, norm, walk, walk_row, lse, tables, numbers, outs, H, scale2, softcap,
                        TERMS, TESTED, BY_KEY, SCORES, CODES, OPEN, CAPPED, PRECISION, False, D, WIDTH, BO, BW,
                    )  # fmt: skip
            start = stop

    total = tl.full((BO,), 1.0, tl.float32)
    if NORMAL:  # a rounded log-sum-exp scales a whole row; rows that must sum to 1 are rescaled
        mass = tl.sum(found[0][0], 1)
        total = tl.where(mass > 0, mass, 1.0)
    for f in tl.static_range(len(TERMS)):
        TERMS[f][END](found[f], total, place, outs[f], TERMS[f][VALUE], TERMS[f][SIZE])
