"""Padding changes no statistic and no reading: a padded batch says of each text what the text says alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import (
    AttentionMap,
    MultiHeadAttention,
    Scoring,
    causal,
    dense,
    documents,
    load_builtin,
    padding,
    previous_token,
    sink,
    token_is,
    watch,
    window,
)
from headwise.masks import Mask
from headwise.weights.padding import first_keys
from headwise.weights.summary import rows_of

H, D, PAD = 3, 5, 0


def texts(lengths, seed):
    """A query, a key and token ids for each text; tokens repeat, and the padding token is one of them."""
    made = torch.Generator().manual_seed(seed)
    heads = [torch.randn(2, H, n, D, dtype=torch.float64, generator=made) * 2 for n in lengths]
    return heads, [torch.randint(0, 4, (n,), generator=made) for n in lengths]


def padded(heads, ids, side):
    """The texts as a batch: junk in the padded places, and which places are real."""
    T = max(x.shape[2] for x in heads) + 2
    batch, tokens, real = torch.full((2, len(heads), H, T, D), 7.0).double(), torch.full((len(heads), T), PAD), []
    for i, x in enumerate(heads):
        n = x.shape[2]
        place = slice(T - n, T) if side == "left" else slice(0, n)
        batch[:, i, :, place], tokens[i, place] = x, ids[i]
        real.append(place)
    keep = torch.zeros(len(heads), T, dtype=torch.bool)
    for i, place in enumerate(real):
        keep[i, place] = True
    return batch, tokens, keep, real


STRUCTURES = {"bidirectional": None, "causal": causal(), "window": window(3, 2), "causal window": causal() & window(4)}
WAYS = {
    "padding": lambda mask, keep: joined(mask, padding(keep)),
    "lengths": lambda mask, keep: joined(mask, padding(keep.sum(-1), side="right" if keep[:, 0].all() else "left")),
    "dense": lambda mask, keep: dense(joined(mask, padding(keep)).to_tensor(keep.shape[1])),
}


def joined(mask, other):
    return other if mask is None else mask & other


def batch_scoring(structure, way, keep):
    mask = STRUCTURES[structure]
    if way == "additive":
        seen = joined(mask, padding(keep)).to_tensor(keep.shape[1])
        return Scoring(bias=torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf))
    return Scoring(WAYS[way](mask, keep))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 23), min_size=2, max_size=3),
    st.sampled_from(sorted(STRUCTURES)),
    st.sampled_from([*WAYS, "additive"]),
    st.sampled_from(["left", "right"]),
    st.integers(0, 99),
)
def test_a_padded_batch_reads_as_each_text_alone(lengths, structure, way, side, seed):
    heads, ids = texts(lengths, seed)
    (query, key), tokens, keep, real = padded(heads, ids, side)
    weights = AttentionMap(query, key, batch_scoring(structure, way, keep))
    assert torch.equal(weights.real_tokens().queries, keep)
    for i, place in enumerate(real):
        alone = AttentionMap(heads[i][0][None], heads[i][1][None], Scoring(STRUCTURES[structure]))
        one = weights.select(batch=[i])
        same_statistics(one, alone, place)
        for found, expected in zip(
            one.summary(tokens, delimiters=[3]), alone.summary(ids[i], delimiters=[3]), strict=True
        ):
            assert found.numbers == pytest.approx(expected.numbers, rel=1e-9, abs=1e-12)
            assert found.without_first == pytest.approx(expected.without_first, rel=1e-9, abs=1e-12)
            assert [trait.name for trait in found.traits] == [trait.name for trait in expected.traits]


def same_statistics(padded, alone, place):
    options = {"entropy": True, "peak": True, "distance": True, "histogram": True, "received": True}
    found, expected = (
        x.panel(**options, masses={"sink": sink(2), "previous": previous_token()}) for x in (padded, alone)
    )
    for name in ("entropy", "distance"):
        torch.testing.assert_close(getattr(found, name)[..., place], getattr(expected, name))
    torch.testing.assert_close(found.peak.weight[..., place], expected.peak.weight)
    torch.testing.assert_close(found.received.mean[..., place], expected.received.mean)
    torch.testing.assert_close(found.received.total.sum(-1), expected.received.total.sum(-1), msg="nothing outside")
    octaves = expected.histogram.shape[-1]
    torch.testing.assert_close(found.histogram[..., :octaves], expected.histogram)
    for name in found.masses:
        torch.testing.assert_close(found.masses[name][..., place], expected.masses[name])
    outside = torch.ones(padded.shape[2], dtype=torch.bool)
    outside[place] = False
    assert not found.entropy[..., outside].any()
    assert (found.peak.key[..., outside] == -1).all()


def test_the_numbers_of_a_batch_are_means_over_the_real_queries_of_all_texts():
    heads, ids = texts([7, 13, 11], 3)
    (query, key), tokens, keep, _ = padded(heads, ids, "left")
    batch = AttentionMap(query, key, Scoring(causal() & padding(keep))).summary(tokens)
    rows = [rows_of(AttentionMap(q[None], k[None], Scoring(causal())), own)[0] for (q, k), own in zip(heads, ids)]  # noqa: B905
    for name in ("sink", "previous", "same_token", "entropy", "one_to_one"):
        numbers = torch.cat([x.numbers[name][0, 1][x.choice.counted(name)[0, 1]] for x in rows])
        assert batch[1].numbers[name] == pytest.approx(numbers.mean().item(), rel=1e-9), name


def test_dense_weights_and_tensor_reductions_keep_padded_queries():
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, H, 7, D, dtype=torch.float64).unbind()
    weights = AttentionMap(query, key, Scoring(padding([4, 7])))
    whole = weights.to_tensor()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, H, 7, dtype=torch.float64))
    torch.testing.assert_close(weights.sum(-2), whole.sum(-2))
    torch.testing.assert_close(weights.max(-1).values, whole.amax(-1))
    assert not weights.received().total.allclose(whole.sum(-2))


def test_left_padding_leaves_the_sink_on_the_first_real_token():
    scores = torch.zeros(2, 1, 6, 6, dtype=torch.float64)
    scores[0, :, :, 3], scores[1, :, :, 0] = 50.0, 50.0
    eye = torch.eye(6, dtype=torch.float64).expand(2, 1, 6, 6)
    weights = AttentionMap(scores, eye, Scoring(causal() & padding([3, 6], side="left"), scale=1.0))
    assert weights.mass(sink(1))[0, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1])
    assert weights.select(batch=[0]).summary()[0]["sink"] == pytest.approx(1.0)
    assert weights.without(sink(1))[0, 0, 5].tolist() == pytest.approx([0, 0, 0, 0, 0.5, 0.5])


@pytest.mark.parametrize(
    "ways", [{"lengths": [3, 5, 2]}, {"ids": torch.tensor([[4, 4, 4, 1, 1, 1, 1, 1, 7, 7]])}], ids=str
)
def test_every_packed_text_has_a_first_token_of_its_own(ways):
    T, firsts = 10, [0, 3, 8]
    packed = documents(**ways)
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, H, T, D, dtype=torch.float64).unbind()
    weights = AttentionMap(query, key, Scoring(causal() & packed))
    whole = weights.to_tensor()
    torch.testing.assert_close(weights.mass(sink(1)), whole[..., firsts].sum(-1))
    torch.testing.assert_close(weights.mass(sink(2)), whole[..., [0, 1, 3, 4, 8, 9]].sum(-1))
    rest = whole.clone()
    rest[..., firsts] = 0
    rest = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(weights.without(sink(1)).to_tensor(), rest)
    counted = [i for i in range(T) if i not in firsts]
    expected = whole[..., firsts].sum(-1)[:, :, counted].mean(-1)[0]
    assert [head["sink"] for head in weights.summary()] == pytest.approx(expected.tolist())


def test_a_packed_text_begins_at_its_first_real_token():
    ids, real = torch.tensor([[5, 5, 5, 2, 2, 5, 5]]), torch.tensor([[False, True, True, False, True, True, True]])
    source = AttentionMap(torch.randn(1, H, 7, D), torch.randn(1, H, 7, D), Scoring(documents(ids)))._source()
    assert first_keys(source, real).tolist() == [[1, 1, 1, 4, 4, 1, 1]]
    assert first_keys(source, None).tolist() == [[0, 0, 0, 3, 3, 0, 0]]
    hidden = torch.tensor([[True, True, True, False, False, True, True]])
    assert first_keys(source, hidden).tolist() == [[0, 0, 0, 7, 7, 0, 0]]


def test_what_a_window_or_a_statistic_hides_is_no_padding():
    query, key = torch.randn(2, 1, H, 1, D)[:, :, :, :1], torch.randn(2, 1, H, 9, D)
    step = AttentionMap(query[0], key[0], Scoring(window(3)))
    assert step.real_tokens().keys.all()
    whole = AttentionMap(key[0], key[1])
    assert whole.without(sink(1)).real_tokens().queries.all()
    assert whole.without(token_is([1, 2, 1, 2, 1, 2, 1, 2, 1], [2])).real_tokens().queries.all()


def test_keys_of_another_text_say_nothing_about_queries():
    layer = MultiHeadAttention(12, 3).double()
    x, memory = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(2, 7, 12, dtype=torch.float64)
    weights = layer(x, memory, mask=padding([4, 7]), return_weights=True)[1]
    assert weights.real_tokens().queries.all()
    assert weights.real_tokens().keys.sum(-1).tolist() == [4, 7]


def test_in_cross_attention_a_query_that_may_see_no_key_is_padding():
    T, S, lengths = 5, 9, [3, 5]
    real = torch.arange(T) < torch.tensor(lengths)[:, None]
    query, key = torch.randn(2, H, T, D, dtype=torch.float64), torch.randn(2, H, S, D, dtype=torch.float64)
    for keys in (padding([6, 9]), padding([9, 9])):
        mask = keys & dense(real[:, None, :, None])
        weights = AttentionMap(query, key, Scoring(mask, cross=True))
        assert weights.real_tokens().queries.equal(real)
        for sample, length in enumerate(lengths):
            alone = AttentionMap(query[sample : sample + 1, :, :length], key[sample : sample + 1], Scoring(cross=True))
            if sample or keys.to_tensor(1, S).all():
                one = weights.select(batch=[sample])
                assert [x.numbers for x in one.summary()] == [pytest.approx(x.numbers) for x in alone.summary()]
        assert weights.select(batch=[0], rows=[1, 4]).real_tokens().queries.tolist() == [[True, False]]
    by_hand = AttentionMap(torch.randn(2, H, 5, D), torch.randn(2, H, 7, D), Scoring(padding([4, 7])))
    assert by_hand.real_tokens().queries.all()


class EvenKeys(Mask):
    """A mask that the package does not know. What it hides is padding, because it depends on the key alone."""

    by_key = True

    def visible(self, grid):
        return grid.col % 2 == 0


def test_a_mask_of_your_own_says_itself_what_is_padding():
    query, key = torch.randn(2, 1, H, 9, D).unbind()
    assert AttentionMap(query, key, Scoring(EvenKeys())).real_tokens().queries[0].tolist() == [True, False] * 4 + [True]
    EvenKeys.pads = False
    try:
        assert AttentionMap(query, key, Scoring(EvenKeys())).real_tokens().queries.all()
    finally:
        del EvenKeys.pads


def test_watching_with_statistics_leaves_padding_out():
    layer = MultiHeadAttention(12, 3).double().eval()
    x = torch.randn(1, 7, 12, dtype=torch.float64)
    junk = torch.cat([x, torch.randn(1, 4, 12, dtype=torch.float64)], 1)
    with torch.no_grad(), watch(layer, statistics={"received": True, "histogram": True}) as seen:
        layer(x)
        layer(junk, mask=padding([7]))
    alone, padded = seen.calls[""]
    torch.testing.assert_close(padded.received.total[..., :7], alone.received.total)
    torch.testing.assert_close(padded.histogram[..., : alone.histogram.shape[-1]], alone.histogram)


def test_the_built_in_model_reads_a_left_padded_text_as_without_padding():
    model = load_builtin()
    tokens = model.tokens("The sea, the sea, and the captain of the sea.")
    T = tokens.shape[1]
    wide = torch.cat([torch.zeros(1, 5, dtype=torch.int64), tokens], 1)
    keep = torch.arange(T + 5)[None] >= 5
    with torch.no_grad(), watch(model.gpt, layers=["blocks.0.attention"]) as seen:
        model.gpt(tokens)
        model.gpt(wide)
    alone, other = seen.calls["blocks.0.attention"]
    masked = AttentionMap(other._query, other._key, Scoring(causal() & padding(keep)))
    for found, expected in zip(masked.summary(wide[0]), alone.summary(tokens[0]), strict=True):
        assert found.numbers["sink"] == pytest.approx(expected.numbers["sink"], abs=1e-4)
        assert found.kind == expected.kind
