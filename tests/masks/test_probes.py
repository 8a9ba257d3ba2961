"""Probes are masks that ask questions."""

import pytest
import torch

from headwise import MaskError, induction, local, offset, previous_token, same_token, sink, token_is
from headwise.masks.probes import Match


def drawn(probe, T=6, S=None):
    return probe.draw(T, S).splitlines()


def test_positions():
    assert drawn(previous_token(), 3) == ["···", "■··", "·■·"]
    assert drawn(offset(-1), 3) == ["·■·", "··■", "···"]
    assert drawn(offset(0), 2, 4) == ["··■·", "···■"]
    assert drawn(sink(2), 2, 4) == ["■■··", "■■··"]
    assert drawn(local(1), 3) == ["■■·", "■■■", "·■■"]


def test_tokens():
    ids = [5, 6, 5, 6, 6]
    assert drawn(same_token(ids), 5) == ["·····", "·····", "■····", "·■···", "·■·■·"]
    assert drawn(induction(ids), 5) == ["·····", "·····", "·■···", "··■··", "··■·■"]
    assert drawn(token_is(ids, 6), 1, 5) == ["·■·■■"]
    assert drawn(token_is(ids, [5, 7]), 1, 5) == ["■·■··"]


def test_tokens_may_differ_by_sample():
    ids = torch.tensor([[1, 1, 2], [1, 2, 2]])
    for probe in (same_token(ids), induction(ids), token_is(ids, 2)):
        assert probe.extent.batch == 2
        assert probe.to_tensor(3).shape == (2, 1, 3, 3)
    assert same_token(ids).to_tensor(3)[:, 0].nonzero().tolist() == [[0, 1, 0], [1, 2, 1]]


def test_probes_combine_with_masks_and_move():
    probe = same_token([1, 1, 1]) & ~sink(1)
    assert drawn(probe, 3) == ["···", "···", "·■·"]
    assert isinstance(probe.to("cpu").a, Match)
    assert repr(same_token([1, 2])) == "same_token(ids of shape (1, 2))"
    assert repr(offset(3)) == "offset(3)"
    assert token_is([1, 2], 1).by_key


@pytest.mark.parametrize(
    "probe", [offset(2), offset(-3), same_token(torch.arange(9) % 2), induction(torch.arange(9) % 3)]
)
@pytest.mark.parametrize("lengths", [(9, 9), (4, 9), (12, 9)], ids=str)
def test_key_range_covers_all_the_keys_it_can_be_true_at(probe, lengths):
    T, S = lengths
    table = probe.to_tensor(T, S)[0, 0]
    for start in range(T):
        for stop in range(start + 1, T + 1):
            lo, hi = probe.key_range(start, stop, T, S)
            outside = torch.ones(S, dtype=torch.bool)
            outside[lo:hi] = False
            assert not table[start:stop, outside].any()


def test_bad_tokens_are_refused():
    for make in (same_token, induction, lambda ids: token_is(ids, 1)):
        with pytest.raises(MaskError, match="whole numbers of shape"):
            make(torch.randn(4))
        with pytest.raises(MaskError, match="whole numbers of shape"):
            make(torch.zeros(1, 2, 3, dtype=torch.long))
        with pytest.raises(MaskError, match="expected token ids"):
            make("the cat")
    with pytest.raises(MaskError, match="token_is"):
        token_is([1, 2], "the")
    with pytest.raises(MaskError, match="expected a whole number"):
        offset(0.5)
