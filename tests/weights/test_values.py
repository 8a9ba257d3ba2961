"""What weights carry equals its dense definition: value norms, contributions, weighted sums over queries, spans."""

import pytest
import torch
from torch import Tensor

from headwise import AttentionMap, OptionError, Scoring, ShapeError, alibi, causal, dense, padding, reference, sink
from headwise.weights import tiles

B, H, Hkv, D, Dv, E = 2, 6, 3, 7, 5, 11
LENGTHS = {"square": (23, 23), "cached": (13, 29), "cross": (19, 11), "one query": (1, 17)}
SCORINGS = {
    "plain": lambda T, S: {},
    "causal": lambda T, S: {"mask": causal()},
    "padded": lambda T, S: {"mask": padding([S, S // 3])},
    "by head": lambda T, S: {"mask": dense(torch.rand(B, H, T, S) > 0.4)},
    "bias": lambda T, S: {"bias": torch.randn(1, H, T, S, dtype=torch.float64)},
    "soft-cap": lambda T, S: {"softcap": 1.5, "mask": causal()},
    "sinks": lambda T, S: {"sinks": torch.randn(H, dtype=torch.float64)},
    "nothing seen": lambda T, S: {"mask": padding([0, S])},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles so small that every length has ragged ones."""
    monkeypatch.setitem(tiles.TILE, "cpu", 4 * 3 * 5)
    monkeypatch.setitem(tiles.COLUMNS, "cpu", 5)
    monkeypatch.setitem(tiles.ROWS, "cpu", (3, 4))


def made(scoring, length, grad=False):
    """A map, its dense weights from the reference, values, and an output projection."""
    T, S = LENGTHS[length]
    options = SCORINGS[scoring](T, S)
    query = torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=grad)
    key = torch.randn(B, Hkv, S, D, dtype=torch.float64, requires_grad=grad)
    value = torch.randn(B, Hkv, S, Dv, dtype=torch.float64, requires_grad=grad)
    mask = options.pop("mask", None)
    visible = None if mask is None else mask.to_tensor(T, S)
    output, truth = reference.attend(query, key, value, visible=visible, **options)
    out = torch.randn(H, Dv, E, dtype=torch.float64)
    return AttentionMap(query, key, Scoring(mask, **options)), truth, value, output, out


def counted(dense, weights):
    """Dense numbers without those of padded queries, which statistics leave out."""
    return dense * weights.real_tokens().queries[:, None, :, None]


def by_norm(truth: Tensor, value: Tensor, out: Tensor | None) -> Tensor:
    """Kobayashi's weights: alpha · ‖f(x)‖, each row divided by its sum."""
    value = value.repeat_interleave(H // Hkv, 1)
    vectors = value if out is None else torch.einsum("bhsd,hde->bhse", value, out)
    scaled = truth * vectors.norm(dim=-1)[:, :, None]
    total = scaled.sum(-1, keepdim=True)
    return scaled / torch.where(total > 0, total, 1.0)


def shares(truth: Tensor, value: Tensor, output: Tensor, out: Tensor | None) -> Tensor:
    """The part of the output that points along it, key by key."""
    value = value.repeat_interleave(H // Hkv, 1)
    if out is not None:
        value, output = (torch.einsum("bhsd,hde->bhse", x, out) for x in (value, output))
    size = (output**2).sum(-1, keepdim=True)
    return truth * (output @ value.transpose(2, 3)) / torch.where(size > 0, size, 1.0)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_map_by_value_is_weights_times_norms_with_rows_that_sum_to_one(scoring, length, projected):
    weights, truth, value, _, out = made(scoring, length)
    expected = by_norm(truth, value, out if projected else None)
    found = weights.by_value(value, out if projected else None)
    torch.testing.assert_close(found.to_tensor(), expected)
    expected = counted(expected, weights)
    torch.testing.assert_close(found.received().total, expected.sum(2))
    torch.testing.assert_close(found.mass(sink(2)), expected[..., :2].sum(-1))


def test_values_of_selected_heads_weigh_a_selected_map():
    weights, truth, value, _, _ = made("by head", "square")
    part = weights.select(batch=[1], heads=[4, 1], rows=slice(3, None)).by_value(value[1:, [2, 0]])
    torch.testing.assert_close(part.to_tensor(), by_norm(truth, value, None)[1:, [4, 1], 3:])


def test_a_map_by_value_adds_to_a_relative_bias():
    query, key, value = (torch.randn(B, H, 9, D, dtype=torch.float64) for _ in range(3))
    weights = AttentionMap(query, key, Scoring(causal(), relative=alibi(H)))
    truth = weights.to_tensor() * value.norm(dim=-1)[:, :, None]
    torch.testing.assert_close(weights.by_value(value).to_tensor(), truth / truth.sum(-1, keepdim=True))


def test_a_map_by_value_has_gradients_in_query_key_and_value():
    weights, truth, value, _, out = made("causal", "square", grad=True)
    leaves = (weights._query, weights._key, value)
    expected = torch.autograd.grad((by_norm(truth, value, out) ** 2).sum(2).sum(), leaves, retain_graph=True)
    found = torch.autograd.grad((weights.by_value(value, out).to_tensor() ** 2).sum(), leaves, retain_graph=True)
    streamed = torch.autograd.grad(weights.by_value(value, out).received().total.square().sum(), leaves)
    torch.testing.assert_close(found, expected)
    dense_sum = by_norm(*_again(weights, value), value, out).sum(2).square().sum()
    torch.testing.assert_close(streamed, torch.autograd.grad(dense_sum, leaves))


def _again(weights, value):
    T, S = weights.shape[2:]
    return (reference.attend(weights._query, weights._key, value, visible=causal().to_tensor(T, S))[1],)


def test_a_value_of_zero_has_no_weight():
    weights, _, value, _, _ = made("plain", "square")
    value[:, :, 4] = 0
    found = weights.by_value(value).to_tensor()
    assert found[..., 4].max() < 1e-300
    assert found.isfinite().all()


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_contributions_are_the_parts_of_the_output_along_it(scoring, length, projected):
    weights, truth, value, output, out = made(scoring, length)
    out = out if projected else None
    expected = shares(truth, value, output, out)
    for found in (weights.contributions(value, out=out), weights.contributions(value, output, out)):
        torch.testing.assert_close(found.to_tensor(), expected)
    torch.testing.assert_close(found[1, 2, -1], expected[1, 2, -1])
    T, S = LENGTHS[length]
    expected, factors = counted(expected, weights), torch.randn(B, T, dtype=torch.float64)
    torch.testing.assert_close(found.received(), expected.sum(2))
    torch.testing.assert_close(found.received(factors), (expected * factors[:, None, :, None]).sum(2))
    torch.testing.assert_close(found.mass(sink(3)), expected[..., :3].sum(-1))
    torch.testing.assert_close(found.mass_on([(0, 2), (1, S)])[..., 1], expected[..., 1:].sum(-1))
    if scoring not in ("padded", "nothing seen"):  # there, the mean of a picture is over real queries
        torch.testing.assert_close(found.pooled(1, 1)[..., 0, 0], expected.sum(-1).mean(-1))


def test_contributions_of_a_row_sum_to_one():
    weights, _, value, _, _ = made("sinks", "square")
    torch.testing.assert_close(weights.contributions(value).mass_on([(0, 23)]), torch.ones(B, H, 23, 1).double())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_keys_receive_from_queries_by_their_factors(scoring, length):
    weights, truth, _, _, _ = made(scoring, length)
    T, _ = LENGTHS[length]
    for factors in (torch.randn(T).double(), torch.rand(B, T).double(), torch.randn(B, H, T).double()):
        each = factors if factors.dim() == 3 else factors.view(-1, 1, T)
        found = weights.received(factors)
        torch.testing.assert_close(found.total, (counted(truth, weights) * each[..., None]).sum(2))
        torch.testing.assert_close(found.count, weights.received().count)


def test_queries_with_a_factor_of_zero_give_nothing():
    weights, truth, _, _, _ = made("causal", "cached")
    rows = torch.rand(B, H, 13).double()
    rows[0, 2, 5] = 0
    torch.testing.assert_close(weights.received(rows).total, (truth * rows[..., None]).sum(2))
    assert not weights.received(torch.zeros(13)).total.any()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_mass_on_spans_sums_over_their_keys(scoring, length):
    weights, truth, _, _, _ = made(scoring, length)
    S, truth = LENGTHS[length][1], counted(truth, weights)
    found = weights.mass_on([(0, 3), slice(2, S), range(4, 4), (7, 9)])
    expected = [truth[..., :3], truth[..., 2:], truth[..., :0], truth[..., 7:9]]
    torch.testing.assert_close(found, torch.stack([x.sum(-1) for x in expected], -1))
    assert weights.mass_on([]).shape == (*weights.shape[:3], 0)


def test_mass_on_spans_and_weighted_sums_have_gradients():
    weights, truth, _, _, _ = made("causal", "square", grad=True)
    leaves, rows = (weights._query, weights._key), torch.randn(23).double()
    for found, expected in (
        (weights.mass_on([(2, 9), (0, 4)]), torch.stack([truth[..., 2:9].sum(-1), truth[..., :4].sum(-1)], -1)),
        (weights.received(rows).total, (truth * rows[:, None]).sum(2)),
    ):
        torch.testing.assert_close(
            torch.autograd.grad(found.square().sum(), leaves),
            torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True),
        )


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda w: w.mass_on([(3, 30)]), r"span \(3, 30\).*<= 23"),
        (lambda w: w.mass_on("all"), "list of spans"),
        (lambda w: w.mass_on([slice(0, 9, 2)]), "expected"),
    ],
    ids=["too far", "no list", "a step"],
)
def test_spans_that_do_not_fit_are_refused(ask, words):
    with pytest.raises(OptionError, match=words):
        ask(made("plain", "square")[0])


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda w, v: w.by_value(v[:, :, 1:]), r"\(2, 3, 22, 5\).*\(2, 6, 23, Dv\)"),
        (lambda w, v: w.by_value(v, torch.zeros(6, 4, 11)), r"\(6, 4, 11\).*\(6, 5, E\)"),
        (lambda w, v: w.received(torch.ones(4)), r"\(4,\).*\(23,\)"),
        (lambda w, v: w.contributions(v, v), r"output.*\(2, 6, 23, 5\)"),
    ],
    ids=["value", "projection", "factors", "output"],
)
def test_shapes_that_do_not_fit_are_refused_with_both(ask, words):
    weights, _, value, _, _ = made("plain", "square")
    with pytest.raises(ShapeError, match=words):
        ask(weights, value)
