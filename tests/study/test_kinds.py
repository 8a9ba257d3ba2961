"""Heads of known kinds are found by experiment, on models made to have them and on the built-in one."""

import json

import pytest
import torch

from headwise import AttentionMap, OptionError, head_kinds, load_builtin
from headwise.study.kinds import HeadKinds
from tiny_models import tiny


@pytest.fixture(scope="module")
def found():
    return head_kinds(load_builtin(), samples=5, lengths=(64, 96), depths=(0.2, 0.8))


def first(found, kind):
    row = found.of(kind)[0]
    return row["layer"], row["head"]


def test_the_heads_of_the_built_in_model_are_found(found):
    assert {(row["layer"], row["head"]) for row in found.of("induction")[:2]} == {
        ("blocks.5.attention", 4),
        ("blocks.5.attention", 6),
    }
    assert first(found, "previous") == ("blocks.4.attention", 2)
    assert {(row["layer"], row["head"]) for row in found.of("retrieval")[:2]} == {
        ("blocks.5.attention", 4),
        ("blocks.5.attention", 6),
    }
    assert found.copied > 0.8
    assert found.of("sink")[0]["score"] > 0.3
    assert found.of("induction")[2]["high"] < 0.2


def test_the_head_that_feeds_the_induction_heads_is_confirmed_against_controls(found):
    assert len(found.circuits) == 2
    for circuit in found.circuits:
        assert (circuit["from_layer"], circuit["from_head"]) == ("blocks.4.attention", 2)
        assert circuit["confirmed"]
        assert circuit["after"] < 0.7 < 0.85 < circuit["control"] <= circuit["before"] + 0.02


def test_scores_are_means_of_dense_weights(monkeypatch):
    """Every score again, from whole matrices, by sums that share nothing with the probes."""
    model = load_builtin()
    seen = {}
    panel = AttentionMap.panel

    def spy(self, **options):
        if self.shape[1] == 8:  # the others are uniform maps of one head
            seen[len(seen)] = self.to_tensor()
        return panel(self, **options)

    monkeypatch.setattr(AttentionMap, "panel", spy)
    found = head_kinds(model, samples=2, length=9, lengths=())
    for layer, weights in enumerate(list(seen.values())[:7]):
        name = f"blocks.{layer}.attention"
        queries = torch.arange(10, 18)  # start token, nine tokens, then their copies but the last
        torch.testing.assert_close(found.scores["induction"][name], weights[:, :, queries, queries - 8].mean(-1))
        torch.testing.assert_close(found.scores["duplicate"][name], weights[:, :, queries, queries - 9].mean(-1))
        rows = torch.arange(1, 19)
        torch.testing.assert_close(found.scores["previous"][name], weights[:, :, rows, rows - 1].mean(-1))
        torch.testing.assert_close(found.scores["sink"][name], weights[:, :, 1:, 0].mean(-1))


def test_an_interval_is_two_standard_errors_to_each_side():
    scores = torch.tensor([[0.2], [0.4], [0.6]])
    (row,) = HeadKinds({"induction": {"a": scores}}, [], None).of("induction")
    error = 0.2 / 3**0.5
    assert row["score"] == pytest.approx(0.4)
    assert (row["low"], row["high"]) == pytest.approx((0.4 - 1.96 * error, 0.4 + 1.96 * error))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bart"])
def test_any_model_can_be_tried(kind):
    found = head_kinds(tiny(kind), samples=2, length=7, lengths=(24, 32))
    expected = {"induction", "duplicate", "previous", "sink"}
    expected |= {"retrieval"} if kind in ("llama", "gpt2") else {"alignment"} if kind == "bart" else set()
    assert set(found) == expected
    if kind == "bart":
        assert all("encoder_attn" in name for name in found.scores["alignment"])
        assert not any("encoder_attn" in name for name in found.scores["induction"])
    assert json.loads(json.dumps(found.to_json()))["kinds"]["sink"]
    assert "sink" in found.table()


def test_needles_hide_in_a_natural_text_too():
    model = load_builtin()
    text = model.tokens("It was a dark evening in November, and the rain fell upon the roofs of the town. " * 4)
    found = head_kinds(model, samples=2, lengths=(64,), haystack=text)
    assert first(found, "retrieval")[0] == "blocks.5.attention"


def test_what_cannot_be_tried_is_refused():
    with pytest.raises(OptionError, match=r"lengths=12\): a needle takes 17"):
        head_kinds(tiny("builtin"), samples=2, length=7, lengths=(12,))
    with pytest.raises(OptionError, match=r"haystack has 5 tokens, and 47"):
        head_kinds(tiny("builtin"), samples=2, length=7, lengths=(64,), haystack=torch.arange(5))
    with pytest.raises(OptionError, match=r"expected one of induction"):
        head_kinds(tiny("builtin"), samples=2, length=7, lengths=()).of("magic")


def test_a_model_without_its_tokenizer_is_tried_with_the_same_start():
    model = load_builtin()
    whole, bare = (head_kinds(x, samples=2, length=9, lengths=()) for x in (model, model.gpt))
    without = head_kinds(model.gpt, samples=2, length=9, lengths=(), before=())
    assert whole.to_json() == bare.to_json()
    assert whole.before == (0,)
    assert "every text tried begins with token 0 of the vocabulary" in whole.table()
    assert without.before == ()
    assert "every text tried begins with no start token" in without.table()


def test_only_heads_above_uniform_attention_are_of_a_kind():
    scores = {"sink": {"x": torch.tensor([[0.5, 0.2], [0.5, 0.2]])}, "previous": {"x": torch.tensor([[0.2, 0.0]] * 2)}}
    found = HeadKinds(scores, [], None, {"sink": 0.1, "previous": 0.25})
    assert [row["head"] for row in found.found("sink")] == [0]
    assert found.found("previous") == []
    table = found.table().splitlines()
    assert "previous   none found (the largest score: 0.0, 0.200)" in table
    assert any(line.startswith("sink       0.0    0.500") for line in table)


def test_uniform_scores_are_those_of_a_head_that_attends_to_all_alike(found):
    """By hand: the query at i sees i + 1 keys, one of which is the first."""
    T = 65  # a start token and 32 tokens, twice
    assert found.uniform["sink"] == pytest.approx(sum(1 / (i + 1) for i in range(1, T)) / (T - 1))
    assert found.uniform["previous"] == pytest.approx(found.uniform["sink"])
    queries = range(33, 64)
    assert found.uniform["induction"] == pytest.approx(sum(1 / (i + 1) for i in queries) / len(queries))
    assert not found.found("duplicate")
