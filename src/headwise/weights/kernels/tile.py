"""What all kernels share: the keys that a block of queries sees, loading a block, and log2 weights.

Weights are powers of two: log2(weight) = score · log2(e) − normalizer, one fused multiply-add and one exp2.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

HIDDEN = tl.constexpr(-1e30)  # log2 of a hidden weight: finite, so that 2**HIDDEN · HIDDEN is 0 and not NaN
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def to_head(query, key, flat, H, group, q_batch, q_head, k_batch, k_head):
    """Pointers to the query and key heads of program `flat` of B·H. 64-bit arithmetic: offsets may exceed 2**31."""
    batch, head = (flat // H).to(tl.int64), flat % H
    query += batch * q_batch + head.to(tl.int64) * q_head
    key += batch * k_batch + (head // group).to(tl.int64) * k_head
    return query, key


@triton.jit
def to_sample(keys, open_keys, documents, batch, keys_batch, open_batch, documents_batch):
    """Pointers to one sample's tables."""
    return keys + batch * keys_batch, open_keys + batch * open_batch, documents + batch * documents_batch


@triton.jit
def visible(position, col, S, left, right, tables, KEYS, OPEN, DOCUMENTS):
    """Where the query at `position` sees key `col`; both are 2-D and broadcast with each other.

    (Within the band, or an open key), and an allowed key, and of the same document.
    """
    keys, open_keys, documents = tables
    inside = (col >= 0) & (col < S)
    seen = (col <= position + right) & (col >= position - left)
    if OPEN:
        seen = seen | (tl.load(open_keys + col, mask=inside, other=0) != 0)
    if KEYS:
        seen = seen & (tl.load(keys + col, mask=inside, other=0) != 0)
    if DOCUMENTS:
        placed = (position >= 0) & (position < S)
        own = tl.load(documents + position, mask=placed, other=0)
        theirs = tl.load(documents + col, mask=inside, other=0)
        seen = seen & placed & (own == theirs)
    return seen & inside


@triton.jit
def reach(first, last, shift, behind, ahead, size, BLOCK: tl.constexpr, EVERYWHERE, UNCLEAR):
    """The range to walk for the indices `first..last` of the other axis: (lo, clean_lo, clean_hi, hi).

    Index i sees j if i + shift − behind <= j <= i + shift + ahead. All such j are within lo..hi. Between clean_lo and
    clean_hi, which are multiples of BLOCK from lo, every pair is visible and needs no mask.
    """
    lo = tl.minimum(tl.maximum(first + shift - behind, 0), size) // BLOCK * BLOCK
    hi = tl.minimum(last + shift + ahead + 1, size)
    if EVERYWHERE:
        lo = 0
        hi = size
    hi = tl.maximum(hi, lo)
    clean_lo = tl.maximum(last + shift - behind, lo)
    clean_hi = tl.minimum(first + shift + ahead + 1, hi)
    if UNCLEAR:
        clean_hi = lo
    clean_lo = tl.minimum((clean_lo + BLOCK - 1) // BLOCK * BLOCK, (hi + BLOCK - 1) // BLOCK * BLOCK)
    clean_hi = tl.maximum(clean_hi // BLOCK * BLOCK, clean_lo)
    return lo, clean_lo, clean_hi, hi


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
