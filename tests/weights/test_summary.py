"""A summary names what a head does."""

import pytest
import torch

from headwise import AttentionMap, Scoring, causal, induction, reference, sink
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
    lines = str(summary).splitlines()
    assert len(lines) == 3
    assert lines[0].split()[:3] == ["head", "reading", "sink"]
    assert "first-token sink" in lines[1]


def reading(first, others, chance=None):
    return HeadSummary(0, traits(first, others, chance or {}), {}, others).reading


def test_the_sink_is_named_beside_what_else_a_head_does():
    assert reading(0.8, {"previous": 0.6}) == "first-token sink 0.80, else previous-token 0.60"
    assert reading(0.8, {"previous": 0.1}) == "first-token sink 0.80"
    assert reading(0.1, {"previous": 0.1}) == "mixed"


def test_what_even_attention_does_anyway_is_no_trait():
    assert reading(0.45, {"previous": 0.5}, {"sink": 0.3, "previous": 0.3}) == "mixed"
    assert reading(0.55, {"previous": 0.6}, {"sink": 0.3, "previous": 0.3}).startswith(
        "first-token sink 0.55, else prev"
    )
    assert reading(0.0, {"local": 1.0}, {"local": 1.0}) == "mixed", "1 says there is too little to tell"


def random_map(tokens):
    query, key = torch.randn(2, 1, 3, tokens, 8).unbind(0)
    return AttentionMap(query, key, Scoring(causal()))


@pytest.mark.parametrize("tokens", [1, 2, 5, 11, 16])
def test_in_a_short_text_nothing_is_local(tokens):
    names = [trait.name for head in random_map(tokens).summary(torch.arange(tokens)) for trait in head.traits]
    assert "local" not in names


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
