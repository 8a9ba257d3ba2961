"""Tiles are exact at every zoom, against sums over the dense matrix in float64; visible keys are those of the mask."""

import pytest
import torch

from headwise import (
    AttentionMap,
    OptionError,
    Scoring,
    ShapeError,
    causal,
    dense,
    documents,
    padding,
    prefix,
    sink,
    window,
)
from headwise.view import pictures
from headwise.view.pictures import KINDS, SIDE, levels, pixels, reach, span_at, tile

SETTINGS = {
    "causal": ((2, 2, 613, 613), causal()),
    "window": ((2, 1, 701, 701), causal() & window(37)),
    "grouped": ((6, 3, 541, 541), causal()),
    "cross, more keys": ((2, 2, 307, 1031), None),
    "cross, more queries": ((2, 2, 1031, 307), None),
    "short": ((3, 3, 13, 13), causal()),
    "rows that see nothing": ((2, 2, 29, 17), causal()),
}


def made(name):
    (H, Hkv, T, S), mask = SETTINGS[name]
    query, key = torch.randn(1, H, T, 5).double() * 2, torch.randn(1, Hkv, S, 5).double()
    return AttentionMap(query, key, Scoring(mask=mask))


def dense_picture(weights, span, kind):
    """The plain formula over the whole matrix: (H, rows, cols)."""
    T, S = weights.shape[2:]
    matrix = (weights.without(sink(1)) if kind == "rest" else weights).to_tensor()[0]
    seen = weights.select(heads=0)._source().scores()[0, 0] > -torch.inf
    if kind == "peak":
        return torch.nn.functional.max_pool2d(matrix, span, ceil_mode=True)
    of_row, of_col = groups(T, span), groups(S, span)
    if kind == "uniform":
        pairs = of_row @ seen.double() @ of_col.T
        return of_row @ (matrix * seen.sum(-1, keepdim=True)) @ of_col.T / pairs.clamp(min=1)
    return (of_row / of_row.sum(-1, keepdim=True)) @ matrix @ of_col.T


def groups(count, span):
    """Which of `count` things fall into each group of `span`, (groups, count) of 0 and 1."""
    return torch.nn.functional.one_hot(torch.arange(count) // span).T.double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SETTINGS)
def test_tiles_of_every_level_are_the_dense_picture(name, kind):
    weights = made(name)
    H, T, S = weights.shape[1:]
    for level in range(levels(T, S) + 1):
        span = span_at(level, T, S)
        if span == 1:
            continue  # single weights have a test of their own
        expected = dense_picture(weights, span, kind)
        torch.testing.assert_close(pixels(weights, span, range(S), kind), expected)
        for row in range(2**level):
            for col in range(2**level):
                found = tile(weights, H - 1, level, row, col, kind)
                part = expected[H - 1, row * SIDE : (row + 1) * SIDE, col * SIDE : (col + 1) * SIDE]
                assert found.shape == (SIDE, SIDE)
                torch.testing.assert_close(found[: part.shape[0], : part.shape[1]], part)
                assert found[part.shape[0] :].sum() == found[:, part.shape[1] :].sum() == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_the_deepest_level_is_single_weights(name):
    weights = made(name)
    H, T, S = weights.shape[1:]
    deepest = levels(T, S)
    row, col = (T - 1) // SIDE, min(S - 1, T) // SIDE
    at = slice(row * SIDE, (row + 1) * SIDE), slice(col * SIDE, (col + 1) * SIDE)
    for kind, expected in (("mass", weights), ("rest", weights.without(sink(1))), ("peak", weights)):
        part = expected[0, H - 1, *at]
        found = tile(weights, H - 1, deepest, row, col, kind)
        torch.testing.assert_close(found[: part.shape[0], : part.shape[1]], part)


def test_a_row_of_pixels_sums_to_one_at_every_level():
    weights = made("causal")
    for level in range(levels(613, 613) + 1):
        picture = pixels(weights, span_at(level, 613, 613), range(613))
        torch.testing.assert_close(picture.sum(-1), torch.ones(picture.shape[:2]).double())


def test_even_attention_is_one_times_uniform_everywhere_it_is_seen():
    weights = AttentionMap(torch.zeros(1, 1, 300, 2), torch.zeros(1, 1, 300, 2), Scoring(mask=causal()))
    picture = pixels(weights, span_at(0, 300, 300), range(300), "uniform")[0]
    torch.testing.assert_close(picture, torch.ones(150, 150).tril())


@pytest.mark.parametrize(("T", "S", "expected"), [(1, 1, 0), (256, 3, 0), (257, 3, 1), (3, 513, 2), (16384, 16384, 6)])
def test_levels_hold_the_longer_side(T, S, expected):
    assert levels(T, S) == expected


def test_a_tile_does_the_work_of_its_window_alone(monkeypatch):
    weights = made("cross, more keys").clone()
    weights.log_sum_exp()
    seen = []
    take = pictures.PooledCells.take
    monkeypatch.setattr(pictures.PooledCells, "take", lambda self, tile: (seen.append(tile.cols), take(self, tile))[1])
    tile(weights, 0, levels(307, 1031), 1, 2)
    assert min(cols.start for cols in seen) >= 512
    assert max(cols.stop for cols in seen) <= 768


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2, 0, 0), "level 2: a map of 300 × 300 has levels 0 to 1"),
        ((0, 1, 2, 0), r"tile \(2, 0\) of level 1: there are 2 × 2"),
        ((0, 0, 0, 0, "glow"), "kind 'glow': expected one of mass, rest, peak, uniform"),
    ],
)
def test_what_is_not_there_is_refused(arguments, message):
    weights = AttentionMap(torch.randn(1, 2, 300, 3), torch.randn(1, 2, 300, 3))
    with pytest.raises(OptionError, match=message):
        tile(weights, *arguments)


def test_one_sample_is_expected():
    with pytest.raises(ShapeError, match="2 samples"):
        tile(AttentionMap(torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)), 0, 0, 0, 0)


@pytest.mark.parametrize("strength", [0, 3, 30], ids=["weak", "strong", "nearly all"])
def test_the_map_without_its_first_key_follows_from_the_known_log_sum_exp(strength):
    T = 211
    query, key = torch.randn(1, 3, T, 5), torch.randn(1, 3, T, 5)
    query[..., 0], key[..., 0] = 1.0, 0.0
    key[:, :, 0, 0] = strength * 5**0.5  # adds `strength` to the score of the first key
    weights = AttentionMap(query, key, Scoring(mask=causal()))
    found = weights._without_first()
    expected = AttentionMap(query.double(), key.double(), Scoring(mask=causal())).without(sink(1))
    torch.testing.assert_close(found[:].double(), expected[:], atol=1e-6, rtol=2e-5)
    assert not found[0, :, 0].any()  # the first query has nothing else to see


@pytest.mark.parametrize("span", [1, 4, 16])
def test_a_window_is_pooled_like_the_whole_map(span):
    weights = AttentionMap(torch.randn(1, 3, 64, 5) * 2, torch.randn(1, 3, 128, 5))
    whole = weights.pooled(64 // span, 128 // span)[0]
    torch.testing.assert_close(pixels(weights, span, range(128)), whole)
    part = pixels(weights.select(rows=slice(16, 48)), span, range(32, 96))
    torch.testing.assert_close(part, whole[:, 16 // span : 48 // span, 32 // span : 96 // span])


QUERIES, KEYS = 53, 71
MASKS = {
    "everything": (QUERIES, KEYS, None, True),
    "causal": (QUERIES, QUERIES, causal(), True),
    "causal, more keys": (QUERIES, KEYS, causal(), True),
    "causal, some see nothing": (KEYS, QUERIES, causal(), True),
    "window": (QUERIES, QUERIES, causal() & window(7), True),
    "both sides": (QUERIES, QUERIES, window(3, 5), True),
    "documents": (QUERIES, QUERIES, causal() & documents(lengths=[19, 34]), None),
    "prefix": (QUERIES, QUERIES, causal() | prefix(11), None),
    "padding": (QUERIES, QUERIES, padding([47]), None),
    "holes": (QUERIES, KEYS, dense(torch.arange(QUERIES * KEYS).view(QUERIES, KEYS) % 3 > 0), False),
}


@pytest.mark.parametrize("name", MASKS)
def test_first_last_and_number_are_those_of_the_dense_mask(name, monkeypatch):
    queries, keys, mask, by_rule = MASKS[name]
    weights = AttentionMap(torch.randn(1, 3, queries, 5), torch.randn(1, 3, keys, 5), Scoring(mask=mask))
    looked = []
    original = pictures._reach_of
    monkeypatch.setattr(pictures, "_reach_of", lambda *given: looked.append(1) or original(*given))
    found = reach(weights)
    seen = weights._source().scores()[0, 0] > -torch.inf
    numbers = torch.arange(keys)
    assert found.count[0].tolist() == seen.sum(-1).tolist()
    for query in range(queries):
        there = numbers[seen[query]]
        assert int(found.first[0, query]) == (int(there[0]) if len(there) else keys)
        assert int(found.last[0, query]) == (int(there[-1]) if len(there) else -1)
    if by_rule is not None:
        assert bool(looked) is not by_rule
