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

# Sums along the walk. A matrix product leaves a row of a tile with four threads, of which each holds every fourth pair
# of columns. What each has found is a lane, so that no thread waits for another before the walk is over. Sums are
# compensated (Kahan): a float that is added to thousands of times would lose digits.


@triton.jit
def in_lanes(values):
    """The sums of a tile (BO, BW) in each lane, (BO, 4)."""
    parts = tl.reshape(values, (values.shape[0], values.shape[1] // 8, 4, 2))
    return tl.sum(tl.sum(parts, 3), 1)


@triton.jit
def sum_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return tl.zeros((BO, 4), tl.float32), tl.zeros((BO, 4), tl.float32)


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
    """Values that are 0 where the weight is."""
    return _add(sums, in_lanes(VALUE(pair)))


@triton.jit
def few_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return (tl.zeros((BO, 4), tl.float32),)


@triton.jit
def few_step(sums, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    """Values of a few tiles, whose sum needs no compensation."""
    return (sums[0] + in_lanes(VALUE(pair)),)


@triton.jit
def seen_step(sums, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    """Any values; with SIZE 1, those that are not 0 are counted."""
    values = _values(VALUE, pair, 0.0, HIDES)
    if SIZE:
        values = (values != 0).to(tl.float32)
    return _add(sums, in_lanes(values))


@triton.jit
def distance_step(sums, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    """Σ w·|p − k|. In inner tiles all keys are on one side of the query, so that only Σ w·k is added up by pair."""
    if HIDES:
        far = in_lanes(pair.weight * tl.abs(pair.distance))
    else:
        BO: tl.constexpr = pair.weight.shape[0]
        BW: tl.constexpr = pair.weight.shape[1]
        parts = tl.reshape(pair.weight, (BO, BW // 8, 4, 2))
        ramp = tl.arange(0, BW // 8)[:, None, None] * 8 + tl.arange(0, 2)[None, None, :]  # the same in all lanes
        along = tl.sum(tl.sum(parts * ramp.to(tl.float32)[None, :, :, :], 3), 1)
        first = place.first + place.offset - place.start + tl.arange(0, BO)[:, None] - 2 * tl.arange(0, 4)[None, :]
        far = tl.abs(first.to(tl.float32) * in_lanes(pair.weight) - along)
    return _add(sums, far)


@triton.jit
def _store(values, out, place):
    """One value for each index of the program's axis."""
    index = place.first + tl.arange(0, values.shape[0])
    tl.store(out + place.flat.to(tl.int64) * place.own_size + index, values, mask=index < place.own_size)


@triton.jit
def sum_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    _store(tl.sum(sums[0], 1), out[0], place)


@triton.jit
def mean_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    _store(tl.sum(sums[0], 1) / total, out[0], place)


@triton.jit
def entropy_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    _store((tl.log2(total) - tl.sum(sums[0], 1) / total) * LN_2, out[0], place)


@triton.jit
def nothing_end(sums, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    """Nothing is stored: what was found is used elsewhere or has been stored already."""


@triton.jit
def weight_of(pair):
    return pair.weight


@triton.jit
def surprise_of(pair):
    return pair.weight * pair.log2_weight


# The largest value, and where it is: in each of 8 lanes, so that the places within a tile are constants.


@triton.jit
def largest_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return tl.full((BO, 8), float("-inf"), tl.float32), tl.full((BO, 8), -1, tl.int32)


@triton.jit
def _larger(value, place, other, other_place):
    """The larger of two values and its place; of equal ones the first."""
    second = other > value
    return tl.where(second, other, value), tl.where(second, other_place, place)


@triton.jit
def largest_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    best, where = found
    values = _values(VALUE, pair, float("-inf"), HIDES)
    shape: tl.constexpr = (values.shape[0], values.shape[1] // 8, 8)
    steps = tl.broadcast_to((tl.arange(0, values.shape[1] // 8) * 8)[None, :, None], shape)
    top, at = tl.reduce((tl.reshape(values, shape), steps), 1, _larger)
    return tl.maximum(best, top), tl.where(top > best, place.start + at, where)


@triton.jit
def _largest(found):
    """The largest of the lanes and where it is; -1 if nothing was seen."""
    best, where = found
    top = tl.max(best, 1)
    at = tl.min(tl.where((best == top[:, None]) & (where >= 0), where + tl.arange(0, 8)[None, :], LAST), 1)
    return top, tl.where(at < LAST, at, -1)


@triton.jit
def log_weight_of(pair):
    return pair.log2_weight


@triton.jit
def largest_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    top, at = _largest(found)
    _store(tl.where(at >= 0, top, 0.0), out[0], place)
    _store(at, out[1], place)


@triton.jit
def peak_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    top, at = _largest(found)
    _store(tl.where(at >= 0, tl.exp2(top) / total, 0.0), out[0], place)
    _store(at, out[1], place)


# A number that at least k of a row's log2 weights reach, a little below the k-th largest: of the largest weights in
# every column of the tiles, the k-th largest. VALUE is k, SIZE the width of a tile.


@triton.jit
def bound_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return (tl.full((BO, SIZE), HIDDEN, tl.float32),)


@triton.jit
def bound_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    return (tl.maximum(found[0], pair.log2_weight),)


@triton.jit
def bound_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    best = found[0]
    for _ in range(VALUE - 1):
        best = tl.where(best == tl.max(best, 1)[:, None], HIDDEN, best)
    _store(tl.max(best, 1) - 0.001, out[0], place)


# The k largest weights and where they are, unsorted; VALUE is k, SIZE the next power of two.


@triton.jit
def top_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    """Only weights above a bound enter. Slots beyond the requested k hold plus infinity: nothing replaces them."""
    index = place.first + tl.arange(0, BO)
    bound = tl.load(out[2] + place.flat.to(tl.int64) * place.own_size + index, mask=index < place.own_size, other=0.0)
    used = (tl.arange(0, SIZE) < VALUE)[None, :]
    return tl.where(used, tl.maximum(bound, HIDDEN)[:, None], float("inf")), tl.full((BO, SIZE), -1, tl.int32)


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
    tl.store(out[0] + at, tl.where(found[1] >= 0, tl.exp2(found[0]), 0.0), mask=valid)
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
    _store(lse, out[0], place)


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


# The cells of a picture, of any size, for a walk over keys: `out` is the picture (B, H, R, C), R and C. A warp holds
# strips of SIZE queries that lie in at most two rows of cells each. Each part is added to its cell by an atomic.


@triton.jit
def border(cell, size, cells):
    """The first of `size` indices in `cell`; `cells` is at most MOST_CELLS, so this fits into 32 bits."""
    return cell * (size // cells) + (cell * (size % cells) + cells - 1) // cells


@triton.jit
def _strips(place, out, SIZE: tl.constexpr, BO: tl.constexpr):
    """Where the row of cells of each strip is, whether there is one, and which of the queries lie in it.

    And which strips go on in the next row, and whether any does.
    """
    begins = place.first + tl.arange(0, BO // SIZE) * SIZE
    cell = (begins.to(tl.int64) * out[1] // place.own_size).to(tl.int32)
    at = out[0] + (place.flat.to(tl.int64) * out[1] + cell) * out[2]
    ends = border(cell + 1, place.own_size, out[1])
    held = (begins[:, None] + tl.arange(0, SIZE)[None, :] < ends[:, None]).to(tl.float32)
    cut = (ends < begins + SIZE) & (cell + 1 < out[1])
    return at, cell < out[1], held, cut, tl.max(cut.to(tl.int32), 0) > 0


# Cells as long as one tile or several: each row is added up before it goes to its cell. VALUE is how many tiles.


@triton.jit
def whole_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return _strips(place, out, SIZE, BO), tl.zeros((BO, 4), tl.float32), 0


@triton.jit
def _flush(strips, rows, col, out):
    """Add what the rows have of one column of cells."""
    at, fits, held, cut, split = strips
    at += col
    parts = tl.reshape(rows, (held.shape[0], held.shape[1], 4))
    tl.atomic_add(at, tl.sum(tl.sum(parts * held[:, :, None], 2), 1), mask=fits, sem="relaxed")
    if split:
        tl.atomic_add(at + out[2], tl.sum(tl.sum(parts * (1 - held)[:, :, None], 2), 1), mask=cut, sem="relaxed")


@triton.jit
def whole_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    strips, rows, col = found
    now = place.start // (pair.weight.shape[1] * VALUE)
    if now != col:
        _flush(strips, rows, col, out)
        rows = tl.zeros_like(rows)
    return strips, rows + in_lanes(pair.weight), now


@triton.jit
def whole_end(found, total, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr):
    _flush(found[0], found[1], found[2], out)


# Several cells in a tile: a matrix product with 0 and 1 adds them up. `out` also has the column of cells of every key.
# VALUE is the most columns there can be in a tile.


@triton.jit
def mixed_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return _strips(place, out, SIZE, BO)


@triton.jit
def _mixed(strips, pair, place, out, VALUE: tl.constexpr, EXACT: tl.constexpr):
    at, fits, held, cut, split = strips
    there, end = place.start + tl.arange(0, pair.weight.shape[1]), place.walk_size
    own = tl.load(out[3] + there, mask=there < end, other=-1)
    last = tl.load(out[3] + tl.minimum(place.start + pair.weight.shape[1], end) - 1)
    cols = tl.load(out[3] + place.start) + tl.arange(0, VALUE)
    # Triton 3.6 reads the factor wrongly unless keys lie next to each other in memory: hence the transposed view.
    inside = own[None, :] == cols[:, None]
    if EXACT:
        sums = tl.dot(pair.weight, tl.trans(inside.to(tl.float32)), input_precision="ieee")
    else:  # a weight as two numbers of 11 bits, scaled so that small ones keep them
        scaled, inside = pair.weight * 32768, tl.trans(inside.to(tl.float16))
        high = scaled.to(tl.float16)
        sums = tl.dot((scaled - high.to(tl.float32)).to(tl.float16), inside, tl.dot(high, inside)) * (1 / 32768)
    parts, here = tl.reshape(sums, (held.shape[0], held.shape[1], VALUE)), at[:, None] + cols[None, :]
    some = (cols <= last)[None, :]
    tl.atomic_add(here, tl.sum(parts * held[:, :, None], 1), mask=fits[:, None] & some, sem="relaxed")
    if split:
        rest = tl.sum(parts * (1 - held)[:, :, None], 1)
        tl.atomic_add(here + out[2], rest, mask=cut[:, None] & some, sem="relaxed")
    return strips


@triton.jit
def mixed_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    return _mixed(found, pair, place, out, VALUE, False)


@triton.jit
def exact_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    """The same for float32 inputs, whose products take no 16-bit numbers."""
    return _mixed(found, pair, place, out, VALUE, True)


# Pictures of the largest weights: a tile is cut where cells end. Weights are not negative, so their bits are ordered
# like integers.


@triton.jit
def peaks_start(place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, BO: tl.constexpr):
    return _strips(place, out, SIZE, BO), 0, 0


@triton.jit
def peaks_step(found, pair, place, out, VALUE: tl.constexpr, SIZE: tl.constexpr, HIDES: tl.constexpr):
    strips, cell, stop = found
    at, fits, held, cut, _ = strips
    BW: tl.constexpr = pair.weight.shape[1]
    there = place.start + tl.arange(0, BW)
    low, end = place.start, tl.minimum(place.start + BW, place.walk_size)
    if low < end:  # always; see `top_step`
        while low < end:
            while stop <= low:
                cell = tl.where(stop > 0, cell + 1, cell)
                stop = border(cell + 1, place.walk_size, out[2])
            inside = ((there >= low) & (there < stop)).to(tl.float32)[None, :]
            values = tl.reshape(tl.max(pair.weight * inside, 1), held.shape)
            own, rest = tl.max(values * held, 1), tl.max(values * (1 - held), 1)
            here = at + cell
            tl.atomic_max(here, own.to(tl.int32, bitcast=True), mask=fits, sem="relaxed")
            tl.atomic_max(here + out[2], rest.to(tl.int32, bitcast=True), mask=cut, sem="relaxed")
            low = stop
    return strips, cell, stop
