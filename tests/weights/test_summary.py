"""A summary names what a head does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headwise import AttentionMap, Scoring, attend, causal, induction, local, padding, reference, sink, window
from headwise.weights.summary import HeadSummary, traits

T, STRONG = 48, 30.0
IDS = torch.cat([torch.arange(T // 2), torch.arange(T // 2)])


def heads(*kinds):
    """A map whose heads look where each kind says, by one-hot positions as queries and keys."""
    position = torch.arange(T)
    wanted = {
        "previous": position - 1,
        "self": position,
        "first": torch.zeros(T, dtype=torch.long),
        "induction": torch.where(position >= T // 2, position - T // 2 + 1, 0),
        "far": (position - 11).clamp(min=0),
        "even": None,
    }
    eye = torch.eye(T)
    query = torch.stack(
        [torch.zeros(T, T) if wanted[k] is None else eye[wanted[k].clamp(min=0)] * STRONG for k in kinds]
    )
    return AttentionMap(query[None], eye.expand(1, len(kinds), T, T), Scoring(causal(), scale=1.0))


def test_readings_name_the_heads():
    summary = heads("previous", "self", "first", "even", "far").summary()
    words = [head.reading for head in summary]
    assert words[0].startswith("previous-token 1.00")
    assert words[1].startswith("own-token 1.00")
    assert words[2].startswith("first-token sink 1.00")
    assert words[3].startswith("broad 1.00")
    assert summary[4]["positional"] > 0.7
    assert len(summary) == 5


def test_induction_is_looked_for_when_tokens_are_given():
    weights = heads("induction", "previous")
    first, second = weights.summary(IDS)
    assert "induction" in first.reading
    assert first.without_first["induction"] > 0.4 > second.without_first["induction"]
    assert "induction" not in weights.summary()[0].numbers


def test_delimiters_are_looked_for_when_they_are_named():
    numbers = heads("first").summary(IDS, delimiters=[0])[0].numbers
    assert numbers["delimiter"] == pytest.approx(1.0, abs=1e-3)


def test_numbers_are_means_over_queries_with_a_choice():
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, T, 8), torch.randn(2, 3, T, 8)
    weights = AttentionMap(query, key, Scoring(causal()))
    _, truth = reference.attend(query, key, key, visible=causal().to_tensor(T))
    numbers = weights.summary()[1].numbers
    rows = truth[:, 1, 1:]
    assert numbers["sink"] == pytest.approx(rows[..., 0].mean().item(), rel=1e-4)
    entropy = torch.special.entr(rows).sum(-1) / torch.arange(2, T + 1).log()
    assert numbers["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert numbers["peak"] == pytest.approx(rows.amax(-1).mean().item(), rel=1e-4)
    rest = weights.without(sink(1))[:][:, 1, 2:]
    assert weights.summary()[1].without_first["peak"] == pytest.approx(rest.amax(-1).mean().item(), rel=1e-4)


def test_the_table_has_a_line_per_head_and_selected_heads_keep_their_number():
    summary = heads("previous", "self", "first").select(heads=[2, 0]).summary()
    assert [head.head for head in summary] == [2, 0]
    readings, numbers, _ = (part.splitlines() for part in str(summary).split("\n\n"))
    assert [line.split()[0] for line in readings] == ["head", "2", "0"]
    assert [line.split()[0] for line in numbers[1:]] == ["head", "2", "0"]
    assert "first-token sink" in readings[1]


def reading(first, others, chance=None):
    chance = chance or {}
    return HeadSummary(0, traits({"sink": first}, chance, others, chance), {}, others).reading


def test_the_sink_is_named_beside_what_else_a_head_does():
    assert reading(0.8, {"previous": 0.6}) == "first-token sink 0.80; rest: previous-token 0.60"
    assert reading(0.8, {"previous": 0.1}) == "first-token sink 0.80"
    assert reading(0.1, {"previous": 0.1}) == "mixed"


def test_what_even_attention_does_anyway_is_no_trait():
    assert reading(0.2, {"previous": 0.5}, {"previous": 0.3}) == "mixed"
    assert reading(0.2, {"previous": 0.6}, {"previous": 0.3}) == "previous-token 0.60"
    assert reading(0.0, {"local": 1.0}, {"local": 1.0}) == "mixed", "1 says there is too little to tell"
    assert reading(0.0, {"local": 0.99}, {"local": 0.49}) == "local 0.99"
    assert reading(0.0, {"local": 0.99}, {"local": 0.51}) == "mixed", "most keys are of this kind"


@pytest.mark.parametrize(("share", "printed"), [(0.2949, "0.29"), (0.2951, "0.30"), (0.31, "0.31")])
def test_a_head_is_a_sink_by_the_number_that_is_printed(share, printed):
    expected = f"first-token sink {printed}" if printed >= "0.30" else "mixed"
    assert reading(share, {}, {"sink": 0.24}) == expected
    assert reading(share, {}, {"sink": 0.26}) == "mixed", "a text so short that even attention comes near it"


def test_a_second_sink_is_no_part_of_the_rest():
    numbers = {"sink": 0.5, "second_sink": 0.4}
    head = HeadSummary(0, traits(numbers, {}, {}, {}), numbers, {})
    assert head.reading == "first-token sink 0.50; and second sink 0.40"


class SingleNumbers(TorchDispatchMode):
    """Counts how often one number is read from a tensor, for which a GPU would have to finish first."""

    read = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.read += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_more_heads_are_summarized_without_reading_more_numbers_one_by_one():
    counts = []
    for heads in (1, 7):
        query, key = torch.randn(2, 1, heads, T, 8).unbind(0)
        weights = AttentionMap(query, key, Scoring(causal()))
        with SingleNumbers() as numbers:
            weights.summary(IDS)
        counts.append(numbers.read)
    assert counts[0] == counts[1] < 20


def random_map(tokens):
    query, key = torch.randn(2, 1, 3, tokens, 8).unbind(0)
    return AttentionMap(query, key, Scoring(causal()))


@pytest.mark.parametrize("tokens", [1, 2, 5, 11, 16])
def test_in_a_short_text_nothing_is_local(tokens):
    names = [trait.name for head in random_map(tokens).summary(torch.arange(tokens)) for trait in head.traits]
    assert "local" not in names


@pytest.mark.parametrize(("tokens", "found"), [(29, False), (37, True)])
def test_a_head_that_looks_nearby_is_local_where_most_tokens_are_far(tokens, found):
    nearby = local(8).to_tensor(tokens, tokens).float() * 60
    weights = AttentionMap(torch.zeros(1, 1, tokens, 5), torch.zeros(1, 1, tokens, 5), Scoring(causal(), bias=nearby))
    assert (weights.summary()[0].kind == "local") == found


def test_local_is_a_mean_over_queries_that_see_keys_further_away():
    weights = random_map(17)
    dense = weights[0, 2]
    expected = torch.stack([dense[i, i - 8 : i + 1].sum() for i in range(9, 17)]).mean()
    assert weights.summary()[2]["local"] == pytest.approx(expected.item(), rel=1e-5)
    apart = weights.without(sink(1))[0, 2]
    expected = torch.stack([apart[i, i - 8 : i + 1].sum() for i in range(10, 17)]).mean()
    assert weights.summary()[2].without_first["local"] == pytest.approx(expected.item(), rel=1e-5)


def test_induction_is_a_mean_over_queries_whose_token_came_before():
    ids = torch.tensor([3, 5, 7, 11, 5, 13, 17, 5, 19, 23, 29, 7, 31])
    weights = random_map(len(ids))
    found = weights.summary(ids)[1]
    rows = [4, 7, 11]
    mass = weights.mass(induction(ids))[0, 1]
    assert found["induction"] == pytest.approx(mass[rows].mean().item(), rel=1e-5)
    assert found["induction"] > mass.mean().item(), "rows that cannot do it do not count"
    assert weights.summary(torch.arange(13))[1]["induction"] == 0.0


def test_a_head_is_called_inductive_though_few_tokens_repeat():
    ids = IDS.clone()
    ids[T // 2 + 6 :] = torch.arange(100, 100 + T // 2 - 6)
    first, second = heads("induction", "previous").summary(ids)
    assert first.kind == "induction"
    assert first["induction"] > 0.99
    assert second.kind == "previous-token"


def test_three_queries_are_too_few_for_a_name():
    assert all(head.kind == "mixed" for head in random_map(3).summary())


def test_apart_from_the_first_token_its_copies_have_nothing_to_look_back_at():
    ids = torch.tensor([3, 5, 7, 3, 11, 5, 13, 3, 17])
    weights = random_map(len(ids))
    rest = weights.without(sink(1))[0, 0]
    expected = (rest[5, 1] + rest[7, 3]) / 2  # the first copy of 3, at 3, sees only the one that is taken out
    assert weights.summary(ids)[0].without_first["same_token"] == pytest.approx(expected.item(), rel=1e-5)


# Readings of whole patterns: against plain formulas on dense weights.


def mapped(weights, mask=None, cross=False):
    """A map with these weights (H, T, S) or (B, H, T, S)."""
    weights = weights.double() if weights.dim() == 4 else weights.double()[None]
    S = weights.shape[-1]
    eye = torch.eye(S, dtype=torch.float64).expand(*weights.shape[:2], S, S)
    return AttentionMap(weights.clamp(min=1e-30).log(), eye, Scoring(mask, scale=1.0, cross=cross))


def one_to_one_of(dense, rows):
    """The mean largest weight, counting 0 where two of these rows share a key."""
    keys = dense.argmax(-1)
    single = [(keys[rows] == keys[i]).sum() == 1 for i in rows]
    return sum(float(dense[i].max()) * bool(one) for i, one in zip(rows, single, strict=True)) / len(rows)


def staircase_of(dense):
    """The heaviest chain of rows whose keys never go back, by trying every chain."""
    keys, weights = dense.argmax(-1).tolist(), dense.amax(-1).tolist()
    chains = [(0.0, -1)]
    for key, weight in zip(keys, weights, strict=True):
        chains += [(total + weight, key) for total, last in chains if last <= key]
    return max(total for total, _ in chains) / len(keys)


def test_a_permutation_is_one_to_one():
    torch.manual_seed(1)
    blurred = (30.0 * torch.eye(T)[torch.randperm(T)] + torch.randn(T, T)).softmax(-1)
    found = mapped(blurred[None]).summary()[0]
    assert found.kind == "one-to-one"
    assert found["one_to_one"] == pytest.approx(one_to_one_of(blurred, range(T)), rel=1e-6)
    reaction = mapped(torch.eye(11)[torch.randperm(11)][None] * 0.6 + 0.4 / 11, cross=True)
    assert reaction.summary()[0].kind == "one-to-one"


def test_one_to_one_is_the_largest_weight_of_queries_that_share_no_key():
    torch.manual_seed(2)
    dense = (3 * torch.randn(3, 19, 19).double()).masked_fill(~causal().to_tensor(19)[0], -torch.inf).softmax(-1)
    for head, found in enumerate(mapped(dense, causal()).summary()):
        assert found["one_to_one"] == pytest.approx(one_to_one_of(dense[head], range(1, 19)), rel=1e-9)


@pytest.mark.parametrize(
    ("queries", "keys"), [(13, 41), (29, 7)], ids=["frames for each token", "tokens for each frame"]
)
def test_a_staircase_of_cross_attention_is_monotone(queries, keys):
    torch.manual_seed(3)
    at = torch.arange(queries) * keys // queries
    dense = torch.eye(keys)[at] * 0.7 + 0.3 * torch.randn(queries, keys).softmax(-1)
    dense[queries // 2] = torch.eye(keys)[0]  # one token goes astray
    found = mapped(dense[None], cross=True).summary()[0]
    assert found.kind == "monotone"
    assert mapped(dense.flip(0)[None], cross=True).summary()[0].kind != "monotone", "downwards"
    assert mapped(dense[torch.randperm(queries)][None], cross=True).summary()[0].kind != "monotone"


def test_monotone_is_the_heaviest_chain_whose_keys_never_go_back():
    torch.manual_seed(4)
    dense = (2 * torch.randn(2, 3, 11, 7).double()).softmax(-1)
    found = mapped(dense, cross=True).summary()
    for head in range(3):
        expected = (staircase_of(dense[0, head]) + staircase_of(dense[1, head])) / 2
        assert found[head]["monotone"] == pytest.approx(expected, rel=1e-9)


def test_a_sink_is_no_staircase():
    last = torch.full((1, 23, 11), 0.01)
    last[..., -1] = 0.9
    found = mapped(last, cross=True).summary()[0]
    assert found["monotone"] == pytest.approx(0.9)
    assert found.kind == "second sink"


def test_a_second_sink_is_found_on_the_word_that_receives_most():
    dense = torch.full((2, T, T), 1.0, dtype=torch.float64)
    dense[0, :, 17] = 30.0
    dense = dense.masked_fill(~causal().to_tensor(T)[0], 0.0)
    dense = dense / dense.sum(-1, keepdim=True)
    weights = mapped(dense, causal())
    first, second = weights.summary()
    assert (first.kind, second.kind) == ("second sink", "broad")
    assert first["second_sink"] == pytest.approx(dense[0, 17:, 17].mean().item(), rel=1e-9)
    ids = torch.arange(T)
    assert weights.summary(ids, delimiters=[17])[0].kind != "second sink", "no ordinary word"
    late = dense[:1].clone()
    late[:, -6:] = torch.eye(T, dtype=torch.float64)[T - 6]  # only the last six queries see it
    assert mapped(late, causal()).summary()[0]["second_sink"] < 0.9


def test_cross_attention_has_no_previous_token_and_no_distance():
    torch.manual_seed(5)
    weights = AttentionMap(torch.randn(1, 3, 7, 8), torch.randn(1, 3, 11, 8), Scoring(cross=True))
    names = {"sink", "second_sink", "one_to_one", "monotone", "entropy", "peak"}
    assert set(weights.summary(torch.arange(11))[0].numbers) == names
    both = weights.summary(torch.arange(11), query_ids=torch.arange(7), delimiters=[3])
    assert set(both[0].numbers) == names | {"same_token", "induction", "delimiter"}
    plain = AttentionMap(torch.randn(1, 3, 7, 8), torch.randn(1, 3, 7, 8))
    assert "previous" in plain.summary()[0].numbers
    assert "previous" not in plain.summary(torch.arange(7), query_ids=torch.arange(7))[0].numbers


def test_cross_attention_finds_copies_on_the_other_side():
    target, source = torch.tensor([5, 6, 7, 8, 9, 5, 6]), torch.tensor([1, 7, 6, 5, 2, 9, 8, 5, 3])
    copies = (target[:, None] == source).double()
    after = torch.cat([torch.zeros(7, 1), copies[:, :-1]], 1)
    dense = torch.stack([copies, after]) * 9 + 0.1
    dense = dense / dense.sum(-1, keepdim=True)
    first, second = mapped(dense, cross=True).summary(source, query_ids=target)
    assert (first.kind, second.kind) == ("same-token", "induction")
    assert first["same_token"] == pytest.approx((dense[0] * copies).sum(-1).mean().item(), rel=1e-9)
    assert second["induction"] == pytest.approx((dense[1] * after).sum(-1).mean().item(), rel=1e-9)


MASKS = {"none": None, "causal": causal(), "window": causal() & window(3), "two-sided": window(2, 2), "sink": sink(2)}


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 19),
    st.sampled_from(sorted(MASKS)),
    st.booleans(),
    st.sampled_from([0.0, 1e-9, 1e-3, 0.1]),
    st.integers(0, 99),
)
def test_even_attention_has_no_name_but_broad(tokens, mask, cross, noise, seed):
    made = torch.Generator().manual_seed(seed)
    query = noise * torch.randn(2, 3, tokens, tokens, dtype=torch.float64, generator=made)
    eye = torch.eye(tokens, dtype=torch.float64).expand(2, 3, tokens, tokens)
    weights = AttentionMap(query, eye, Scoring(MASKS[mask], scale=1.0, cross=cross))
    ids = torch.randint(0, 5, (2, tokens), generator=made)
    options = {"query_ids": ids} if cross else {}
    for head in weights.summary(ids, delimiters=[1], **options):
        assert {trait.name for trait in head.traits} <= {"broad"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_first_token_is_left_out_without_another_pass(dtype):
    B, H, T = 2, 3, 67
    query, key = torch.randn(B, H, T, 5).to(dtype), torch.randn(B, H, T, 5).to(dtype)
    key[0, 0, 0], query[0, 0] = 9.0, 2 + query[0, 0].abs()  # nothing is left by the first key of this head
    mask = causal() & padding(torch.tensor([T, T - 7]))
    _, weights = attend(query, key, key, mask=mask, return_weights=True)
    found = weights._without_first()
    exact = weights.without(sink(1))
    error = (found.log_sum_exp() - exact.log_sum_exp()).nan_to_num(0.0, 0.0, 0.0).abs().max()
    assert error < (1e-12 if dtype == torch.float64 else 3e-5)  # scores reach 50
    assert torch.equal(found.log_sum_exp().isinf(), exact.log_sum_exp().isinf())


def test_the_table_fits_into_100_columns_and_says_what_readings_leave_out():
    torch.manual_seed(0)
    weights = AttentionMap(torch.randn(1, 3, 41, 7), torch.randn(1, 3, 41, 7), Scoring(causal()))
    summary = weights.summary(torch.arange(41) % 5, delimiters=[2])
    lines = repr(summary).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2] == f"   1  {summary[1].reading}"
    assert "Readings leave out the first token" in lines[-2]
    (top, bottom), row = lines[5:7], lines[8].split()
    assert top.split() == ["induc-", "same", "delim-", "second", "one", "to", "posit-"]
    assert bottom.split()[:7] == ["head", "sink", "previous", "self", "next", "local", "tion"]
    assert row == ["1", *(f"{x:.2f}" for x in summary[1].numbers.values())]
