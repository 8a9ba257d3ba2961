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
    two.assert_that(on_ranks.maps_cover_the_heads_of_a_rank, name)


def test_masks_and_biases_are_given_for_all_heads(two):
    two.assert_that(on_ranks.masks_and_biases_of_all_heads_are_cut)


def test_a_model_with_shared_heads_generates_the_same_text(four):
    four.assert_that(on_ranks.a_model_generates_with_its_cache_shared_out)


def test_ranks_that_share_heads_draw_the_same_tokens_without_a_seed(four):
    four.assert_that(on_ranks.a_model_without_a_seed_draws_the_same_tokens_on_every_rank)


def test_the_rest_of_a_model_is_cut_by_torchs_own_plans(two):
    two.assert_that(on_ranks.the_rest_of_a_model_is_cut_by_torchs_own_plans)


@pytest.mark.parametrize("name", on_ranks.NAMES)
def test_a_sequence_on_two_ranks_learns_as_on_one(two, name):
    two.assert_that(on_ranks.the_sequence_is_shared_out, name, "plain")


def test_a_sequence_of_a_latent_layer_on_two_ranks_learns_as_on_one(two):
    two.assert_that(on_ranks.the_sequence_is_shared_out, "latent", "documents")


@pytest.mark.parametrize("mask", on_ranks.MASKS)
@pytest.mark.parametrize("name", ["grouped", "sinks", "softcap"])
def test_a_sequence_on_four_ranks_obeys_masks_of_the_whole(four, name, mask):
    four.assert_that(on_ranks.the_sequence_is_shared_out, name, mask)


def test_every_rank_has_the_same_to_do_under_a_causal_mask(four):
    T = 40
    assert four.run(on_ranks.scores_under_a_causal_mask) == [T * T / 2 / 4] * 4


def test_a_bias_over_ranks_is_given_for_the_whole_text(two):
    two.assert_that(on_ranks.a_bias_is_given_for_the_whole_text)


@pytest.mark.parametrize("mask", ["causal", "documents", "empty rows", "heads"])
@pytest.mark.parametrize("name", ["grouped", "sinks", "alibi"])
def test_statistics_are_exact_over_a_text_no_rank_holds(four, name, mask):
    four.assert_that(on_ranks.statistics_of_a_text_no_rank_holds, name, mask)


def test_heads_and_sequence_are_shared_out_together(four):
    four.assert_that(on_ranks.both_at_once)


def test_a_model_learns_from_a_text_no_rank_holds(two):
    two.assert_that(on_ranks.a_model_learns_a_text_no_rank_holds)


def test_what_one_rank_cannot_answer_is_said_with_a_cure(two):
    said = two.run(on_ranks.what_one_rank_cannot_answer_is_said)[0]
    several = "the keys of this map are on several ranks"
    cure = "weights.select(heads=...).gather()"
    for name in ("index", "element", "dense", "columns", "kept"):
        assert several in said[name]
        assert cure in said[name]
    expected = {
        "cross": "does not support cross-attention",
        "cache": "generate with tensor_parallel",
        "nested": "pass mask=documents(...)",
        "dropout": "dropout=0.5 on attention weights",
        "twice": "layer '' is already divided over a sequence",
        "learned": "Use one with position='rotary'",
        "by length": "rotary(10000, longrope), depends on the length of the text",
        "length": "13 tokens cannot be cut into 4 equal chunks, two for each of 2 ranks. Pad it to 16",
        "odd": "this rank was given 5 tokens; expected two chunks",
        "uneven": "the ranks selected [4, 3] of the queries or heads",
    }
    for name, part in expected.items():
        assert part in said[name]


REFUSED = {
    "five": ("HeadCountError", "has 2 key/value heads and the mesh 4 ranks", "init_device_mesh('cuda', (n, 2)"),
    "width": ("OptionError", "qk_norm='width', which normalizes all heads together"),
    "open": ("OptionError", "out_proj=False: its output would be one rank's heads only"),
    "adapter": ("OptionError", "qkv_proj is a Adapter, and only a plain nn.Linear"),
    "gate": ("OptionError", "a gate of its own, Linear", "Use gate='element', gate='head' or an OutputGate"),
    "latent": ("OptionError", "latent(6, nope_dim=6, rotary_dim=0, value_dim=6), whose maps cannot be cut", "context"),
    "twice": ("OptionError", "is already divided over ranks"),
    "none": ("OptionError", "tensor_parallel(Linear): there is no headwise.MultiHeadAttention"),
    "mesh": ("OptionError", "the mesh has 2 axes, of shape (2, 2); expected one: mesh['a']"),
    "no mesh": ("OptionError", "tensor_parallel(mesh=int): expected a DeviceMesh of one axis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_cannot_be_cut_are_refused_with_a_cure_and_stay_as_they_were(four, name):
    kind, *parts = REFUSED[name]
    (said,) = set(four.run(on_ranks.refused, name))
    assert said.startswith(f"{kind}: ")
    for part in parts:
        assert part in said


@pytest.mark.parametrize("name", ["mask", "position", "learned position", "score"])
def test_masks_positions_scores_and_statistics_of_your_own_work_over_ranks(two, name):
    two.assert_that(on_ranks.what_the_tests_define_is_shared_out, name)


def test_a_statistic_that_ranks_cannot_merge_is_refused_by_name(two):
    (said,) = set(two.run(on_ranks.what_ranks_cannot_merge))
    assert "Unmerged combines queries, and the queries of this map are on 2 ranks. Set Unmerged.merged to" in said


def test_batches_over_ranks_take_the_steps_of_one(two):
    two.assert_that(on_ranks.batches_are_shared_out)


def test_weights_over_ranks_take_the_steps_of_one(two):
    two.assert_that(on_ranks.weights_are_shared_out)
    two.assert_that(on_ranks.a_layer_alone_is_sharded_with_its_sinks)


def test_a_model_made_on_the_meta_device_is_sharded_and_then_filled(two):
    two.assert_that(on_ranks.a_model_made_without_numbers_is_sharded_and_then_filled)


def test_heads_and_batches_over_ranks_agree_with_one(four):
    four.assert_that(on_ranks.heads_and_batches_are_shared_out)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # by torch, of the one process that reads alone
@pytest.mark.parametrize("kind", ["heads", "weights"])
def test_a_checkpoint_of_two_ranks_is_read_by_one_and_by_four(two, four, tmp_path, kind):
    folder = str(tmp_path / "checkpoint")
    said = two.run(on_ranks.saved, folder, kind)
    assert said[0] == pytest.approx(said[1], rel=1e-12)
    assert on_ranks.loaded(folder, "alone") == pytest.approx(said[0], rel=1e-12)
    for other in ("heads", "weights"):
        assert four.run(on_ranks.loaded, folder, other) == pytest.approx([said[0]] * 4, rel=1e-12)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activations_computed_again_are_seen_once(two, use_reentrant):
    two.assert_that(on_ranks.activations_computed_again_by, use_reentrant)


def test_a_call_over_ranks_is_explained(two):
    two.assert_that(on_ranks.paths_are_explained)
