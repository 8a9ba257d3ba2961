"""Visible keys are counted in closed form as they would be one by one."""

import pytest
import torch

from headwise import (
    AttentionMap,
    Scoring,
    causal,
    chunks,
    dense,
    documents,
    induction,
    local,
    padding,
    prefix,
    same_token,
    sink,
    token_is,
    window,
)
from headwise.masks import Mask
from headwise.weights.counting import code_reach, true_in_columns, true_in_rows
from headwise.weights.source import Source

B, H = 2, 3
MASKS = {
    "none": lambda T, S: None,
    "causal": lambda T, S: causal(),
    "window": lambda T, S: window(4, 2),
    "padding": lambda T, S: causal() & padding([S, S // 3]),
    "left padding": lambda T, S: causal() & padding([S // 2, S], side="left"),
    "documents": lambda T, S: causal() & documents(torch.randint(0, 3, (B, S))),
    "prefix": lambda T, S: (window(2) | prefix(3)) & padding([S, S // 2]),
    "prefix in documents": lambda T, S: (causal() | prefix(5)) & documents(lengths=[S // 3, S - S // 3]),
    "chunks": lambda T, S: causal() & chunks(5),
    "by head": lambda T, S: dense(torch.rand(B, H, T, S) > 0.4),
    "not": lambda T, S: ~window(1, 1),
}
PROBES = {
    "all": lambda S: None,
    "sink": lambda S: sink(2),
    "near": lambda S: local(3),
    "induction": lambda S: induction(torch.randint(0, 4, (S,))),
    "same token": lambda S: same_token(torch.randint(0, 4, (B, S)) * 10**12),
    "token": lambda S: token_is(torch.randint(0, 4, (S,)), [1, 2]),
}
LENGTHS = {"square": (23, 23), "cached": (7, 29), "more queries than keys": (19, 11), "one query": (1, 17)}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", MASKS)
def test_counts_equal_those_of_the_dense_mask(name, length):
    T, S = LENGTHS[length]
    mask = MASKS[name](T, S)
    source = AttentionMap(torch.randn(B, H, T, 5), torch.randn(B, H, S, 5), Scoring(mask))._source()
    seen = torch.ones(B, H, T, S, dtype=torch.bool) if mask is None else mask.to_tensor(T, S).expand(B, H, T, S)
    assert torch.equal(source.queries_seeing(), seen.sum(2))
    probes = [make(S) for make in PROBES.values()]
    for probe, count in zip(probes, source.keys_seen_each(probes), strict=True):
        hits = seen if probe is None else seen & probe.to_tensor(T, S)
        assert torch.equal(count, hits.sum(3))
        assert torch.equal(source.keys_seen(probe), hits.sum(3))
        assert torch.equal(source.keys_seen(probe, first=2), hits[..., :2].sum(3))
    part = source.narrowed(torch.tensor([1]), range(H), torch.arange(T).flip(0)[::2])
    assert torch.equal(part.keys_seen(), seen[1:, :, torch.arange(T).flip(0)[::2]].sum(3))
    assert torch.equal(part.queries_seeing(), seen[1:, :, torch.arange(T).flip(0)[::2]].sum(2))


def test_counting_keys_of_a_long_text_looks_at_no_pair(monkeypatch):
    T = 30_011
    ids = torch.randint(0, 100, (T,))
    source = AttentionMap(torch.randn(1, 1, T, 2), torch.randn(1, 1, T, 2), Scoring(causal()))._source()
    monkeypatch.setattr(Source, "visible", None)
    assert torch.equal(source.keys_seen()[0, 0], torch.arange(1, T + 1))
    assert source.keys_seen(same_token(ids)).sum() == sum(n * (n - 1) // 2 for n in ids.bincount().tolist())


def test_no_queries_and_no_keys_are_counted():
    for T, S in ((0, 5), (5, 0), (0, 0)):
        source = AttentionMap(torch.randn(1, 2, T, 3), torch.randn(1, 2, S, 3), Scoring(causal()))._source()
        assert source.keys_seen().tolist() == [[[0] * T] * 2]
        assert source.queries_seeing().tolist() == [[[0] * S] * 2]


@pytest.mark.parametrize("shape", [(1, 1), (7, 1031), (131, 1024), (2, 3, 259, 17), (5, 0), (0, 5)], ids=str)
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_counting_eight_entries_at_a_time_is_exact(shape, share):
    seen = torch.rand(shape) <= share
    assert torch.equal(true_in_rows(seen), seen.sum(-1))
    assert torch.equal(true_in_columns(seen), seen.sum(-2))
    assert torch.equal(true_in_rows(seen.transpose(-1, -2)), seen.sum(-2))


def test_a_mask_without_a_closed_form_is_looked_at_once_for_all_probes():
    looks = []

    class Odd(Mask):
        def visible(self, grid):
            looks.append(grid)
            return (grid.position - grid.col) % 3 != 1

    T = 29
    source = AttentionMap(torch.randn(1, 2, T, 5), torch.randn(1, 2, T, 5), Scoring(Odd()))._source()
    source.keys_seen_each([None, local(3), same_token(torch.arange(T) % 5)])
    assert len(looks) == 1
    source.keys_seen()
    assert len(looks) == 1


@pytest.mark.parametrize("samples", [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_codes_reach_from_the_first_to_the_last_of_the_same_and_all_in_between_only_if_all_are_the_same(samples):
    own = torch.randint(-1, 4, (samples[0], 9))
    others = torch.randint(0, 4, (samples[1], 13)).where(torch.rand(samples[1], 13) > 0.2, -2)
    others[-1, 4:9] = 3
    found = code_reach(own, others)
    for sample in range(max(samples)):
        mine, theirs = own[sample % len(own)], others[sample % len(others)]
        for i, code in enumerate(mine.tolist()):
            places = (theirs == code).nonzero().flatten().tolist() if code >= 0 else []
            some = (places[0], places[-1] + 1) if places else (13, 0)
            whole = some if len(places) == some[1] - some[0] else (13, 0)
            assert found[sample, :, i].tolist() == [*some, *whole]
