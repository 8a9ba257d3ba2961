"""Statistics that only these tests know: a function of single weights, combined by query or by key."""

import pytest
import torch

from headwise import AttentionMap, OptionError, Scoring, alibi, attend, causal, padding, sink, window
from headwise.weights import Statistic, tiles

B, H, Hkv, T, S, D = 2, 6, 3, 13, 19, 5
IDS = torch.arange(S) * 7 % 5
SCORINGS = {
    "plain": lambda: Scoring(),
    "causal": lambda: Scoring(causal()),
    "padding": lambda: Scoring(causal() & padding([S, 0])),
    "ALiBi": lambda: Scoring(causal(), relative=alibi(H)),
    "sinks": lambda: Scoring(sinks=torch.randn(H)),
    "score": lambda: Scoring(score=lambda score, b, h, q, k: torch.where(k == 3, -torch.inf, score * 0.5)),
}
FUNCTIONS = {
    "square": lambda pair: pair.weight**2,
    "score": lambda pair: pair.weight * pair.score.clamp(min=-50),
    "log": lambda pair: pair.weight * pair.log_weight.clamp(min=-50),
    "far": lambda pair: pair.weight * (pair.distance > 3),
    "token": lambda pair: pair.weight * (pair.query_token == pair.key_token),
    "constant": lambda pair: torch.ones(()),
}
WHERE = {"everywhere": lambda: None, "band": lambda: window(2, 1), "first keys": lambda: sink(3)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(tiles.TILE, "cpu", 4 * 3 * 5)
    monkeypatch.setitem(tiles.COLUMNS, "cpu", 5)
    monkeypatch.setitem(tiles.ROWS, "cpu", (3, 4))


def made(name="causal", grad=False):
    query, key = torch.randn(B, H, T, D, dtype=torch.float64), torch.randn(B, Hkv, S, D, dtype=torch.float64)
    return AttentionMap(query.requires_grad_(grad), key.requires_grad_(grad), SCORINGS[name]())


def expected(weights, name, where):
    """The values of the function on dense weights, and where they count, each (B, H, T, S)."""
    dense = weights.to_tensor()
    scores = weights._source().scores().detach()
    seen = (scores > -torch.inf) & (True if where is None else where.to_tensor(T, S))
    position, key = torch.arange(T)[:, None] + S - T, torch.arange(S)
    logs = dense.clamp(min=1e-300).log().clamp(min=-50)
    values = {
        "square": dense**2,
        "score": dense * scores.clamp(min=-50),
        "log": dense * logs,
        "far": dense * (position - key > 3),
        "token": dense * (IDS[position] == IDS[key]),
        "constant": torch.ones_like(dense),
    }[name]
    return values, seen.expand(values.shape)


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_sums_counts_and_largest_values_equal_those_of_dense_weights(scoring, function, where, by):
    weights, axis = made(scoring), -1 if by == "query" else -2
    options = {"by": by, "where": WHERE[where](), "tokens": IDS}
    values, seen = expected(weights, function, options["where"])
    (total,) = weights.read(Statistic(FUNCTIONS[function], **options))
    torch.testing.assert_close(total, (values * seen).sum(axis))
    largest, place = weights.read(Statistic(FUNCTIONS[function], combine="max", **options))
    best = values.masked_fill(~seen, -torch.inf).amax(axis)
    torch.testing.assert_close(largest, torch.where(seen.any(axis), best, 0.0))
    assert torch.equal(place >= 0, seen.any(axis))
    found = values.gather(axis, place.clamp(min=0).unsqueeze(axis)).squeeze(axis)
    torch.testing.assert_close(torch.where(seen.any(axis), found, 0.0), largest)
    many = Statistic(lambda pair: FUNCTIONS[function](pair) > 0.05, combine="count", **options)
    assert torch.equal(weights.read(many)[0], ((values > 0.05) & seen).sum(axis))


@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("combine", ["sum", "max"])
def test_a_statistic_has_the_gradient_of_its_function(combine, by):
    if (combine, by) == ("max", "key"):
        pytest.skip("the largest value over queries has no gradient")
    weights = made(grad=True)
    options = {"combine": combine, "by": by, "where": window(4)}
    found = weights.read(Statistic(lambda pair: pair.weight**2 * pair.score, **options))[0]
    ours = torch.autograd.grad((found * torch.linspace(1, 2, found.shape[-1])).sum(), [weights._query, weights._key])
    dense, scores = weights.to_tensor(), weights._source().scores()
    seen = (scores > -torch.inf) & window(4).to_tensor(T, S)
    values = torch.where(seen, dense**2 * scores.masked_fill(~seen, 0.0), -torch.inf if combine == "max" else 0.0)
    axis = -1 if by == "query" else -2
    truth = values.amax(axis) if combine == "max" else values.sum(axis)
    truth = (truth * torch.linspace(1, 2, truth.shape[-1])).sum()
    for mine, theirs in zip(ours, torch.autograd.grad(truth, [weights._query, weights._key]), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_statistic_of_some_keys_skips_the_other_tiles():
    weights, seen = made(), []

    def function(pair):
        seen.append(pair.key.max().item())
        return pair.weight

    weights.read(Statistic(function, where=sink(2)))
    assert max(seen) < 5


def test_a_statistic_works_compiled_selected_and_in_sixteen_bits():
    weights = made()
    squares = Statistic(lambda pair: pair.weight**2)
    part = weights.select(heads=[4, 1], rows=[7, 2])
    torch.testing.assert_close(part.read(squares)[0], weights.to_tensor()[:, [4, 1]][:, :, [7, 2]].square().sum(-1))

    def concentration(query, key):
        return attend(query, key, key, causal=True, return_weights=True)[1].read(squares)[0]

    query, key = torch.randn(2, 1, 3, 7, 5)
    traced = torch.compile(concentration, fullgraph=True, backend="eager")(query, key)
    torch.testing.assert_close(traced, concentration(query, key))
    half = concentration(query.bfloat16(), key.bfloat16())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, traced, atol=0.05, rtol=0.05)


def test_bad_statistics_are_refused_with_what_was_expected():
    with pytest.raises(OptionError, match=r"Statistic\(3\): expected a function"):
        Statistic(3)
    with pytest.raises(
        OptionError, match=r"combine='mean', by='query'\): expected combine to be one of sum, max, count"
    ):
        Statistic(lambda pair: pair.weight, combine="mean")
    with pytest.raises(OptionError, match=r"gave \(2, 2\); expected a tensor that broadcasts to the weights"):
        made().read(Statistic(lambda pair: torch.zeros(2, 2)))
    with pytest.raises(OptionError, match="gave float; expected a tensor"):
        made().read(Statistic(lambda pair: 1.0))
    with pytest.raises(OptionError, match="4 tokens for 19 keys"):
        made().read(Statistic(lambda pair: pair.weight, tokens=[1, 2, 3, 4]))
