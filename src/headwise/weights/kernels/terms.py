"""What the walk computes, each statistic as a term of a few small functions.

    START   what is carried from tile to tile
    STEP    what one tile adds to it: it gets the pairs of the tile and combines them along the walk
    VALUE   what one pair contributes, for terms that add such values or find the largest
    END     what is stored when the walk is over
    SIZE    a number the functions need

A term also says where it can be nonzero, by a rule (a band around the query, a range of keys) and by codes of queries
and keys that must be equal. STEP and END get the tensors of the term as `out`.
"""

# mypy: ignore-errors
# ruff: noqa: D103 - each group of functions has one comment
import triton
import triton.language as tl

from headwise.weights.kernels.tile import HIDDEN, LN_2, SEEN

LAST = tl.constexpr(2**31 - 1)  # after every index

# Sums along the walk. They are compensated (Kahan): a float that is added to thousands of times would lose digits.


@triton.jit
def sum_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return tl.zeros((BO,), tl.float32), tl.zeros((BO,), tl.float32)


@triton.jit
def _add(sums, added):
    total, excess = sums
    exact = added - excess
    new = total + exact
    return new, (new - total) - exact


@triton.jit
def _values(VALUE: tl.constexpr, pair, hidden, HIDES: tl.constexpr):
    """The values of pairs as floats, and `hidden` for pairs that are hidden."""
    values = tl.broadcast_to(VALUE(pair).to(tl.float32), pair.weight.shape)
    if HIDES:
        values = tl.where(pair.log2_weight > SEEN, values, hidden)
    return values


@triton.jit
def sum_step(sums, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    """With SIZE 1, values that are not 0 are counted."""
    values = _values(VALUE, pair, 0.0, HIDES)
    if SIZE:
        values = (values != 0).to(tl.float32)
    return _add(sums, tl.sum(values, 1))


@triton.jit
def sum_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    index = place.first + tl.arange(0, sums[0].shape[0])
    tl.store(out[0] + place.flat.to(tl.int64) * place.own_size + index, sums[0], mask=index < place.own_size)


@triton.jit
def mean_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    sum_end((sums[0] / total, total), total, place, out, VALUE, SIZE)


@triton.jit
def entropy_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    nats = -LN_2 * sums[0] / total + LN_2 * tl.log2(total)
    sum_end((nats, total), total, place, out, VALUE, SIZE)


@triton.jit
def nothing_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    """Nothing is stored: what was found is used elsewhere or has been stored already."""


@triton.jit
def weight_of(pair):
    return pair.weight


@triton.jit
def surprise_of(pair):
    return pair.weight * pair.log2_weight


@triton.jit
def distance_of(pair):
    return pair.weight * tl.abs(pair.distance)


# The largest value, and where it is.


@triton.jit
def largest_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return tl.full((BO,), float("-inf"), tl.float32), tl.full((BO,), -1, tl.int32)


@triton.jit
def largest_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    best, where = found
    values = _values(VALUE, pair, float("-inf"), HIDES)
    top = tl.max(values, 1)
    there = place.start + tl.arange(0, values.shape[1])
    at = tl.min(tl.where(values == top[:, None], there[None, :], LAST), 1)  # of equal values the first
    return tl.maximum(best, top), tl.where(top > best, at, where)


@triton.jit
def log_weight_of(pair):
    return pair.log2_weight


@triton.jit
def largest_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    index = place.first + tl.arange(0, found[0].shape[0])
    at = place.flat.to(tl.int64) * place.own_size + index
    tl.store(out[0] + at, tl.where(found[1] >= 0, found[0], 0.0), mask=index < place.own_size)
    tl.store(out[1] + at, found[1], mask=index < place.own_size)


@triton.jit
def peak_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    largest_end((tl.exp2(found[0]) / total, found[1]), total, place, out, VALUE, SIZE)


# The k largest weights and where they are, unsorted; VALUE is k, SIZE the next power of two.


@triton.jit
def top_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    """Slots beyond the requested k hold plus infinity, so that nothing replaces them."""
    unused = tl.where(tl.arange(0, SIZE) < VALUE, HIDDEN, float("inf"))
    return tl.zeros((BO, SIZE), tl.float32) + unused[None, :], tl.zeros((BO, SIZE), tl.int32) - 1


@triton.jit
def top_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    """While some query has a weight above the smallest of its k, take the largest; rare after the first tiles."""
    best, where = found
    x = pair.log2_weight
    there, slots = (place.start + tl.arange(0, x.shape[1]))[None, :], tl.arange(0, SIZE)[None, :]
    top, worst = tl.max(x, 1), tl.min(best, 1)
    if tl.max((top > worst).to(tl.int32), 0) > 0:  # Triton pipelines no loop that has another one in its body
        while tl.max((top > worst).to(tl.int32), 0) > 0:
            enters = (top > worst)[:, None]
            at = tl.min(tl.where(x == top[:, None], there, LAST), 1)[:, None]
            leaves = tl.min(tl.where(best == worst[:, None], slots, SIZE), 1)[:, None]
            replaced = enters & (slots == leaves)
            best, where = tl.where(replaced, top[:, None], best), tl.where(replaced, at, where)
            x = tl.where(enters & (there == at), HIDDEN, x)
            top, worst = tl.max(x, 1), tl.min(best, 1)
    return best, where


@triton.jit
def top_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    index, slots = place.first + tl.arange(0, found[0].shape[0]), tl.arange(0, SIZE)[None, :]
    at = (place.flat.to(tl.int64) * place.own_size + index)[:, None] * VALUE + slots
    valid = (index < place.own_size)[:, None] & (slots < VALUE)
    tl.store(out[0] + at, tl.exp2(found[0]), mask=valid)
    tl.store(out[1] + at, found[1], mask=valid)


# The log-sum-exp, by a running maximum: Milakov and Gimelshein (2018). A row that sees no key gets minus infinity.


@triton.jit
def lse_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return tl.full((BO,), HIDDEN, tl.float32), tl.zeros((BO,), tl.float32)


@triton.jit
def lse_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    running_max, running_sum = found
    x = pair.log2_weight
    if HIDES:
        x = tl.where(x > SEEN, x, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(x, 1))
    running_sum = running_sum * tl.exp2(running_max - new_max) + tl.sum(tl.exp2(x - new_max[:, None]), 1)
    return new_max, running_sum


@triton.jit
def lse_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    running_max, running_sum = found
    log2_sum = running_max + tl.log2(tl.where(running_sum > 0, running_sum, 1.0))
    lse = tl.where(running_sum > 0, log2_sum * LN_2, float("-inf"))
    sum_end((lse, lse), total, place, out, VALUE, SIZE)


# Attention by octave of distance, for a walk over keys. A tile within one octave only adds to sums in registers, which
# are added to their octave when it changes. VALUE is the number of octaves.


@triton.jit
def octave(distance):
    """0 for distance 0, else 1 + floor(log2(distance)); exact, because integers up to 2**24 are exact floats."""
    exponent = (distance.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(distance == 0, 0, exponent)


@triton.jit
def octave_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return tl.zeros((BO,), tl.float32), 0


@triton.jit
def octave_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    pending, bin = found
    BO: tl.constexpr = pair.weight.shape[0]
    BW: tl.constexpr = pair.weight.shape[1]
    histogram, start, low = out[0] + place.flat * VALUE, place.start, place.first + place.offset
    high = low + BO - 1
    near_bin = octave(tl.maximum(tl.maximum(low - start - (BW - 1), start - high), 0))
    far_bin = octave(tl.maximum(high - start, start - low + (BW - 1)))
    if (near_bin != bin) | (far_bin != near_bin):
        tl.atomic_add(histogram + bin, tl.sum(pending, 0), sem="relaxed")
        pending, bin = tl.zeros((BO,), tl.float32), near_bin
    if far_bin == near_bin:
        pending += tl.sum(pair.weight, 1)
    else:
        own = octave(tl.abs((low + tl.arange(0, BO))[:, None] - (start + tl.arange(0, BW))[None, :]))
        for each in range(near_bin, tl.minimum(far_bin + 1, VALUE)):
            mass = tl.sum(tl.sum(tl.where(own == each, pair.weight, 0.0), 1), 0)
            tl.atomic_add(histogram + each, mass, sem="relaxed")
    return pending, bin


@triton.jit
def octave_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    tl.atomic_add(out[0] + place.flat * VALUE + found[1], tl.sum(found[0], 0), sem="relaxed")


# Sums across the walk: what every key receives, while programs walk over keys. Summed over the 16 queries that a warp
# holds, then added by atomics: a sum over the block would make all warps wait for each other. SIZE is the
# number of warps.


@triton.jit
def across_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return (0,)


@triton.jit
def across_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    BO: tl.constexpr = pair.weight.shape[0]
    BW: tl.constexpr = pair.weight.shape[1]
    parts = tl.sum(tl.sum(tl.reshape(VALUE(pair), (BO // SIZE // 16, SIZE, 16, BW)), 0), 1)
    there = tl.broadcast_to((place.start + tl.arange(0, BW))[None, :], (SIZE, BW))
    at = out[0] + place.flat.to(tl.int64) * place.walk_size + there
    tl.atomic_add(at, parts, mask=there < place.walk_size, sem="relaxed")
    return found


# The cells of a picture, of any size: `out` is the picture (B, H, R, C), the number of cells along the program's axis
# and along the walk, and the strides of both. Along the walk, a tile is cut where cells end. Along the other axis, a
# warp holds strips of SIZE indices that lie in at most two cells each. Each part is added to its cell by an atomic, or
# raises it if VALUE says that the picture shows the largest weights.


@triton.jit
def border(cell, size, cells):
    """The first of `size` indices in `cell`; `cells` is at most MOST_CELLS, so this fits into 32 bits."""
    return cell * (size // cells) + (cell * (size % cells) + cells - 1) // cells


@triton.jit
def cells_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    """The cell of each strip, which of its indices lie in it, whether others lie in the next; the cell of the walk."""
    begins = place.first + tl.arange(0, BO // SIZE) * SIZE
    cell = (begins.to(tl.int64) * out[1] // place.own_size).to(tl.int32)
    ends = border(cell + 1, place.own_size, out[1])
    held = (begins[:, None] + tl.arange(0, SIZE)[None, :] < ends[:, None]).to(tl.float32)
    return cell, held, ends < begins + SIZE, 0, 0


@triton.jit
def _to_cells(at, step, values, held, fits, spills, LARGEST: tl.constexpr):
    """Add a value for each index of the program's axis to its cell at `at`, or to the next one, `step` further."""
    values = tl.reshape(values, held.shape)
    if LARGEST:  # weights are not negative, so their bits are ordered like integers
        tl.atomic_max(at, tl.max(values * held, 1).to(tl.int32, bitcast=True), mask=fits, sem="relaxed")
        rest = tl.max(values * (1 - held), 1).to(tl.int32, bitcast=True)
        tl.atomic_max(at + step, rest, mask=spills, sem="relaxed")
    else:
        tl.atomic_add(at, tl.sum(values * held, 1), mask=fits, sem="relaxed")
        tl.atomic_add(at + step, tl.sum(values * (1 - held), 1), mask=spills, sem="relaxed")


@triton.jit
def cells_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    own_cell, held, cut, cell, stop = found
    BW: tl.constexpr = pair.weight.shape[1]
    picture, own_cells, cells, own_stride, stride = out
    here = picture + place.flat.to(tl.int64) * own_cells * cells + own_cell.to(tl.int64) * own_stride
    fits, spills = own_cell < own_cells, cut & (own_cell + 1 < own_cells)
    low, end = place.start, tl.minimum(place.start + BW, place.walk_size)
    if low < end:  # always; see `top_step`
        while stop <= low:
            cell = tl.where(stop > 0, cell + 1, cell)
            stop = border(cell + 1, place.walk_size, cells)
    if stop >= end:  # the tile lies in one cell
        values = tl.max(pair.weight, 1) if VALUE else tl.sum(pair.weight, 1)
        _to_cells(here + cell * stride, own_stride, values, held, fits, spills, VALUE)
    else:
        there = place.start + tl.arange(0, BW)
        while low < end:
            inside = ((there >= low) & (there < stop)).to(tl.float32)[None, :]
            values = tl.max(pair.weight * inside, 1) if VALUE else tl.sum(pair.weight * inside, 1)
            _to_cells(here + cell * stride, own_stride, values, held, fits, spills, VALUE)
            low = stop
            if low < end:
                cell += 1
                stop = border(cell + 1, place.walk_size, cells)
    return own_cell, held, cut, cell, stop
