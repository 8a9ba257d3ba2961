"""Layers and models over ranks do what they do on one, by real processes."""

import pytest

import on_ranks
from ranks import Ranks


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("name", on_ranks.NAMES)
def test_heads_shared_by_two_ranks_learn_as_on_one_with_one_all_reduce_each_way(two, name):
    assert two.run(on_ranks.heads_are_shared_out, name) == [(1, 1), (1, 1)]


@pytest.mark.parametrize("name", ["grouped", "sinks", "relative"])
def test_heads_shared_by_four_ranks_learn_as_on_one(four, name):
    assert four.run(on_ranks.heads_are_shared_out, name) == [(1, 1)] * 4


@pytest.mark.parametrize("name", ["plain", "grouped", "alibi", "sinks", "relative", "qk_norm"])
def test_a_map_covers_the_heads_of_its_rank_and_is_gathered_whole(two, name):
    two.run(on_ranks.maps_cover_the_heads_of_a_rank, name)


def test_masks_and_biases_are_given_for_all_heads(two):
    two.run(on_ranks.masks_and_biases_of_all_heads_are_cut)


def test_a_model_with_shared_heads_generates_the_same_text(four):
    four.run(on_ranks.a_model_generates_with_its_cache_shared_out)


@pytest.mark.parametrize("name", on_ranks.NAMES)
def test_a_sequence_on_two_ranks_learns_as_on_one(two, name):
    two.run(on_ranks.the_sequence_is_shared_out, name, "plain")


@pytest.mark.parametrize("mask", on_ranks.MASKS)
@pytest.mark.parametrize("name", ["grouped", "sinks", "softcap"])
def test_a_sequence_on_four_ranks_obeys_masks_of_the_whole(four, name, mask):
    four.run(on_ranks.the_sequence_is_shared_out, name, mask)


def test_a_bias_over_ranks_is_given_for_the_whole_text(two):
    two.run(on_ranks.a_bias_is_given_for_the_whole_text)


@pytest.mark.parametrize("mask", ["causal", "documents", "empty rows", "heads"])
@pytest.mark.parametrize("name", ["grouped", "sinks", "alibi"])
def test_statistics_are_exact_over_a_text_no_rank_holds(four, name, mask):
    four.run(on_ranks.statistics_of_a_text_no_rank_holds, name, mask)


def test_heads_and_sequence_are_shared_out_together(four):
    four.run(on_ranks.both_at_once)


def test_a_model_learns_from_a_text_no_rank_holds(two):
    two.run(on_ranks.a_model_learns_a_text_no_rank_holds)


def test_what_one_rank_cannot_answer_is_said_with_a_cure(two):
    said = two.run(on_ranks.what_one_rank_cannot_answer_is_said)[0]
    import pprint

    pprint.pprint(said, width=200)
