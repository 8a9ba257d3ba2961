"""What was computed from masks is remembered, until they change or are gone."""

import gc

import pytest
import torch

from headwise import AttentionMap, Scoring, causal, dense, previous_token
from headwise.masks import Mask
from headwise.weights.memory import BoundedMemory
from headwise.weights.source import COUNTS

B, H, T, S, D = 2, 3, 5, 7, 11


class Counted(Mask):
    """A mask without a closed form that counts how often it is looked at."""

    looks = 0

    def visible(self, grid):
        type(self).looks += 1
        return (grid.position * 3 + grid.col) % 4 > 0


@pytest.fixture(autouse=True)
def empty():
    COUNTS.kept.clear()


def made(mask, length=S):
    return AttentionMap(torch.randn(B, H, T, D), torch.randn(B, H, length, D), Scoring(mask))


def test_visible_keys_of_an_unusual_mask_are_counted_once():
    mask, probe = Counted(), previous_token()
    truth = mask.to_tensor(T, S)
    looks = []
    for source in (made(mask)._source(), made(mask)._source()):
        assert (source.keys_seen() == truth.sum(-1)).all()
        assert (source.queries_seeing() == truth.sum(-2)).all()
        assert (source.keys_seen(probe) == (truth & probe.to_tensor(T, S)).sum(-1)).all()
        looks.append(Counted.looks)
    assert looks[0] == looks[1], "the second map counted again"
    longer = made(mask, S + 4)._source()
    assert (longer.keys_seen() == mask.to_tensor(T, S + 4).sum(-1)).all()
    part = made(mask).select(rows=slice(2, 4))._source()
    assert (part.keys_seen() == truth.sum(-1)[..., 2:4]).all()


def test_a_mask_or_bias_that_changed_in_place_is_counted_again():
    table = torch.rand(T, S) > 0.5
    mask, bias = dense(table), torch.zeros(T, S)
    assert (made(mask)._source().keys_seen() == mask.to_tensor(T, S).sum(-1)).all()
    next(iter(mask.tensors())).logical_not_()
    assert (made(mask)._source().keys_seen() == mask.to_tensor(T, S).sum(-1)).all()
    for column in (1, 2):
        bias[:, column] = -torch.inf
        source = AttentionMap(torch.randn(B, H, T, D), torch.randn(B, H, S, D), Scoring(bias=bias))._source()
        assert (source.keys_seen() == S - column).all()


def test_it_forgets_the_oldest_and_keeps_no_mask_alive():
    memory, masks = BoundedMemory(most=2), [dense(torch.ones(T, S, dtype=torch.bool)) for _ in range(3)]
    for number, mask in enumerate(masks):
        assert memory.get([mask, None], "key", lambda number=number: number) == number
    assert memory.get([masks[2]], "key", lambda: "again") == 2
    assert memory.get([masks[0]], "key", lambda: "again") == "again"
    assert len(memory.kept) == 2
    owners = [ref for refs, _ in memory.kept.values() for ref in refs]
    del masks, mask
    gc.collect()
    assert all(ref() is None for ref in owners)
    with torch.inference_mode():
        mask = dense(torch.ones(T, S, dtype=torch.bool))
        assert [memory.get([mask], "key", lambda n=n: n) for n in range(2)] == [0, 1], "changes cannot be noticed there"


def test_a_map_of_a_new_mask_is_never_taken_for_an_old_one():
    for _ in range(50):  # objects that take the place of others in memory
        table = torch.rand(T, S) > 0.3
        assert (made(causal() & dense(table))._source().keys_seen() == (table & causal().to_tensor(T, S)).sum(-1)).all()
