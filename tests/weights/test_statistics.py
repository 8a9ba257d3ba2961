"""Every statistic equals the plain formula on dense weights: any mask and option, any cut into tiles, with gradient."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise import (
    AttentionMap,
    Scoring,
    causal,
    dense,
    documents,
    induction,
    local,
    offset,
    padding,
    prefix,
    previous_token,
    reference,
    same_token,
    sink,
    token_is,
    window,
)
from headwise.weights import compiled, tiles

B, H, Hkv, D = 2, 6, 3, 7


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that every length has ragged ones."""
    monkeypatch.setitem(tiles.TILE, "cpu", 4 * 3 * 5)
    monkeypatch.setitem(tiles.COLUMNS, "cpu", 5)
    monkeypatch.setitem(tiles.ROWS, "cpu", (3, 4))


SCORINGS = {
    "plain": lambda T, S: {},
    "causal": lambda T, S: {"mask": causal()},
    "window": lambda T, S: {"mask": causal() & window(4)},
    "two-sided window": lambda T, S: {"mask": window(3, 2)},
    "padding": lambda T, S: {"mask": causal() & padding([S, S // 3])},
    "left padding": lambda T, S: {"mask": padding([S // 2, S], side="left")},
    "nothing seen": lambda T, S: {"mask": padding([0, S])},
    "documents": lambda T, S: {"mask": documents(lengths=[S // 3, S - S // 3]) & causal()},
    "prefix": lambda T, S: {"mask": causal() | prefix(3)},
    "not": lambda T, S: {"mask": ~window(1, 1)},
    "dense by head": lambda T, S: {"mask": dense(torch.rand(B, H, T, S) > 0.4)},
    "bias": lambda T, S: {"bias": torch.randn(1, H, T, S, dtype=torch.float64), "mask": causal()},
    "bias that hides": lambda T, S: {
        "bias": torch.zeros(T, S).masked_fill(torch.rand(T, S) > 0.6, -torch.inf).double()
    },
    "soft-cap": lambda T, S: {"softcap": 1.5, "mask": causal()},
    "sinks": lambda T, S: {"sinks": torch.randn(H, dtype=torch.float64), "mask": causal()},
    "scale": lambda T, S: {"scale": 1.7},
}
LENGTHS = {"square": (23, 23), "cached": (13, 29), "more queries than keys": (19, 11), "one query": (1, 17)}


def made(name, T, S, grad=False):
    options = SCORINGS[name](T, S)
    query = torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=grad)
    key = torch.randn(B, Hkv, S, D, dtype=torch.float64, requires_grad=grad)
    mask = options.pop("mask", None)
    visible = None if mask is None else mask.to_tensor(T, S)
    _, truth = reference.attend(query, key, key, visible=visible, **options)
    seen = torch.ones(B, H, T, S, dtype=torch.bool) if visible is None else visible.expand(B, H, T, S)
    if "bias" in options:
        seen = seen & (options["bias"] > -torch.inf)
    real = real_queries(name, T, S)[:, None, :, None]  # a padded query counts as one that sees no key
    return AttentionMap(query, key, Scoring(mask, **options)), truth * real, seen & real


REAL_KEYS = {  # of both samples: the first and the last + 1
    "padding": lambda S: ((0, S), (0, S // 3)),
    "left padding": lambda S: ((S - S // 2, S), (0, S)),
    "nothing seen": lambda S: ((0, 0), (0, S)),
}


def real_queries(name, T, S):
    """Which queries are not padding; without a mask of positions, only if there are as many keys as queries."""
    real = torch.ones(B, T, dtype=torch.bool)
    if name in REAL_KEYS and (T == S or name == "padding"):
        for sample, (first, end) in enumerate(REAL_KEYS[name](S)):
            position = torch.arange(T) + S - T
            real[sample] = ((position >= first) & (position < end)) | (position < 0)
    return real


def plain(name, truth, seen, T, S):
    """The statistics of dense weights, by formulae that share nothing with ours."""
    first = torch.tensor([a for a, _ in REAL_KEYS.get(name, lambda S: ((0, S),) * B)(S)])[:, None, None, None]
    position, key = torch.arange(T)[:, None] + S - T, torch.arange(S)
    if name == "documents":  # each has a first token
        first = torch.where(key < S // 3, 0, S // 3)
    apart = (position - key).abs()
    ids = torch.arange(S) % 5
    own = ids[position.clamp(min=0)]
    before = torch.cat([torch.tensor([-1]), ids[:-1]])
    masses = {
        "previous": position - key == 1,
        "next": position - key == -1,
        "self": apart == 0,
        "sink": (key >= first) & (key < first + 3),
        "local": apart <= 2,
        "same": (own == ids) & (key < position),
        "induction": (own == before) & (key <= position),
        "token": (ids == 1) | (ids == 4),
        "mask": (position >= key) & (apart < 4),
    }
    return {
        "entropy": torch.special.entr(truth).sum(-1),
        "distance": (truth * apart).sum(-1),
        "peak": truth.amax(-1),
        "total": truth.sum(-2),
        "mean": truth.sum(-2) / seen.sum(-2).clamp(min=1),
        "topk": truth.topk(3).values,
        "masses": {name: (truth * where).sum(-1) for name, where in masses.items()},
    }


def probes(S):
    ids = torch.arange(S) % 5
    return {
        "previous": previous_token(),
        "next": offset(-1),
        "self": offset(0),
        "sink": sink(3),
        "local": local(2),
        "same": same_token(ids),
        "induction": induction(ids),
        "token": token_is(ids, [1, 4]),
        "mask": causal() & window(3),
    }


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", SCORINGS)
def test_statistics_are_those_of_the_dense_weights(name, lengths):
    T, S = LENGTHS[lengths]
    weights, truth, seen = made(name, T, S)
    expected = plain(name, truth, seen, T, S)
    panel = weights.panel(
        entropy=True, peak=True, distance=True, histogram=True, received=True, masses=probes(S), pooled=(3, 4), topk=3
    )
    torch.testing.assert_close(panel.entropy, expected["entropy"])
    torch.testing.assert_close(panel.distance, expected["distance"])
    torch.testing.assert_close(panel.peak.weight, expected["peak"])
    found = truth.gather(-1, panel.peak.key.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(found, expected["peak"])
    assert ((panel.peak.key == -1) == ~seen.any(-1)).all()
    torch.testing.assert_close(panel.received.total, expected["total"])
    torch.testing.assert_close(panel.received.mean, expected["mean"])
    torch.testing.assert_close(panel.topk.weights, expected["topk"])
    torch.testing.assert_close(
        truth.gather(-1, panel.topk.keys.clamp(min=0)) * (panel.topk.keys >= 0), expected["topk"]
    )
    for key, mass in expected["masses"].items():
        torch.testing.assert_close(panel.masses[key], mass, msg=lambda text, key=key: f"{key}: {text}")
    torch.testing.assert_close(weights.entropy(), expected["entropy"])
    torch.testing.assert_close(weights.log_sum_exp().exp().isfinite().all(), torch.tensor(True))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("size", [(1, 1), (3, 4), (7, 5), (50, 50)], ids=str)
def test_pictures_sum_over_keys_and_average_over_queries(size, lengths):
    T, S = LENGTHS[lengths]
    weights, truth, _ = made("causal", T, S)
    R, C = min(size[0], T), min(size[1], S)
    rows, cols = torch.arange(T) * R // T, torch.arange(S) * C // S
    picture, peaks = weights.pooled(*size), weights.pooled(*size, peak=True)
    assert picture.shape == (B, H, R, C)
    for r in range(R):
        for c in range(C):
            part = truth[:, :, rows == r][..., cols == c]
            torch.testing.assert_close(picture[:, :, r, c], part.sum(-1).mean(-1))
            torch.testing.assert_close(peaks[:, :, r, c], part.amax((-1, -2)))
    rows_that_see = truth.sum(-1).mean() > 0.999
    if rows_that_see:
        torch.testing.assert_close(picture.sum(-1), torch.ones(B, H, R, dtype=torch.float64))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_histogram_counts_octaves_of_distance(lengths):
    T, S = LENGTHS[lengths]
    weights, truth, _ = made("two-sided window" if lengths == "square" else "plain", T, S)
    apart = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    found = weights.distance()
    assert found.edges.tolist()[:6] == [0, 1, 2, 4, 8, 16][: len(found.edges)]
    assert len(found.edges) == found.histogram.shape[-1] + 1
    for b in range(found.histogram.shape[-1]):
        inside = (apart >= found.edges[b]) & (apart < found.edges[b + 1])
        torch.testing.assert_close(found.histogram[..., b], (truth * inside).sum((-1, -2)) / T)
    torch.testing.assert_close(found.histogram.sum(-1), truth.sum((-1, -2)) / T)


QUESTIONS = {
    "entropy": lambda w: w.entropy(),
    "peak": lambda w: w.peak().weight,
    "distance": lambda w: w.distance().mean,
    "histogram": lambda w: w.distance().histogram,
    "received": lambda w: w.received().mean,
    "topk": lambda w: w.topk(2).weights,
    "mass": lambda w: w.mass(previous_token()),
    "pooled": lambda w: w.pooled(2, 3),
    "log-sum-exp": lambda w: w.log_sum_exp(),
    "row sums": lambda w: w.sum(-1),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_statistics_have_the_gradient_of_their_formula(question):
    def ask(query, key, bias, sinks):
        scoring = Scoring(causal() & padding([7, 4]), bias, None, 3.0, sinks)
        return QUESTIONS[question](AttentionMap(query, key, scoring).select(rows=slice(1, None)))

    shapes = ((2, 4, 5, 3), (2, 2, 7, 3), (1, 4, 5, 7), (4,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(ask, inputs)


def test_gradients_take_blocks_of_rows(monkeypatch):
    weights, truth, _ = made("causal", 23, 23, grad=True)
    inputs = (weights._query, weights._key)
    slope = torch.linspace(-1, 1, 23, dtype=torch.float64)  # every row its own, so that no block can take another's
    expected = torch.autograd.grad((torch.special.entr(truth.clamp(min=1e-300)).sum(-1) * slope).sum(), inputs)
    monkeypatch.setattr("headwise.weights.streaming.BLOCK_BYTES", B * H * 23 * 8 * 4)  # four rows at a time
    found = torch.autograd.grad((weights.entropy() * slope).sum(), inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_are_at_most_twice_those_of_plain_float32(dtype):
    T = 700
    query, key = (torch.randn(1, 3, T, 64).to(dtype) * 2 for _ in range(2))
    weights = AttentionMap(query, key, Scoring(causal()))
    visible = causal().to_tensor(T)
    exact = [x.double() for x in (query, key)]
    _, truth = reference.attend(*exact, exact[1], visible=visible)
    rough = [x.float() for x in (query, key)]
    _, dense32 = reference.attend(*rough, rough[1], visible=visible)
    apart = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    panel = weights.panel(entropy=True, peak=True, distance=True, received=True, pooled=(64, 64))
    for found, formula in (
        (panel.entropy, lambda w: torch.special.entr(w).sum(-1)),
        (panel.peak.weight, lambda w: w.amax(-1)),
        (panel.distance, lambda w: (w * apart).sum(-1)),
        (panel.received.total, lambda w: w.sum(-2)),
    ):
        error, allowed = (found - formula(truth)).norm(), (formula(dense32) - formula(truth)).norm()
        assert found.dtype == torch.float32
        assert error <= 2 * allowed, f"{error:.3g} against {allowed:.3g}"


def test_memory_stays_within_the_tile_budget(monkeypatch):
    monkeypatch.setattr(compiled, "refuses", lambda source: "it is switched off")
    T, seen = 3000, []
    query, key = torch.randn(1, 2, T, 8), torch.randn(1, 2, T, 8)
    empty = torch.empty

    def counted(*args, **kwargs):
        result = empty(*args, **kwargs)
        seen.append(result.numel())
        return result

    monkeypatch.setattr(torch, "empty", counted)
    AttentionMap(query, key, Scoring(causal())).panel(entropy=True, received=True, pooled=(16, 16))
    assert max(seen) <= 3 * tiles.TILE["cpu"] < T * T


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_any_sizes(T, S, group, hkv, d, masked):
    query, key = torch.randn(1, group * hkv, T, d, dtype=torch.float64), torch.randn(1, hkv, S, d, dtype=torch.float64)
    mask = causal() if masked else None
    weights = AttentionMap(query, key, Scoring(mask))
    _, truth = reference.attend(query, key, key, visible=None if mask is None else mask.to_tensor(T, S))
    torch.testing.assert_close(weights.entropy(), torch.special.entr(truth).sum(-1))
    torch.testing.assert_close(weights.received().total, truth.sum(-2))
    torch.testing.assert_close(weights.topk(S).weights, truth.sort(-1, descending=True).values)
    torch.testing.assert_close(weights.pooled(T, S), truth)
