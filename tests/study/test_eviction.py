"""Eviction scores equal the papers' formulas on dense weights; what DropKV predicts is what dropping a key does."""

import pytest
import torch
import torch.nn.functional as F

from headwise import AttentionMap, OptionError, Scoring, causal, eviction_scores, reference
from headwise.weights import tiles

B, H, Hkv, T, D, Dv = 2, 6, 3, 23, 7, 5


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setitem(tiles.TILE, "cpu", 4 * 3 * 5)
    monkeypatch.setitem(tiles.COLUMNS, "cpu", 5)
    monkeypatch.setitem(tiles.ROWS, "cpu", (3, 4))


@pytest.fixture
def made():
    query = torch.randn(B, H, T, D).double()
    key, value = torch.randn(B, Hkv, T, D).double(), torch.randn(B, Hkv, T, Dv).double()
    output, truth = reference.attend(query, key, value, visible=causal().to_tensor(T, T))
    return AttentionMap(query, key, Scoring(causal())), value, output, truth


def grouped(scores):
    return scores.view(B, Hkv, H // Hkv, -1).mean(2)


def test_heavy_hitters_are_column_sums(made):
    weights, _, _, truth = made
    torch.testing.assert_close(eviction_scores(weights), grouped(truth.sum(2)))
    seen = torch.arange(T, 0, -1)
    torch.testing.assert_close(eviction_scores(weights, "observed"), grouped(truth.sum(2) / seen))


def test_snapkv_asks_the_last_queries_and_smooths(made):
    weights, _, _, truth = made
    mean = truth[:, :, -8:, :-8].mean(2)
    padded = F.pad(mean, (1, 1))
    smooth = grouped((padded[..., :-2] + padded[..., 1:-1] + padded[..., 2:]) / 3)
    found = eviction_scores(weights, "snapkv", window=8, kernel=3)
    torch.testing.assert_close(found[..., :-8], smooth)
    assert (found[..., -8:] == smooth.max()).all()


@pytest.mark.parametrize("given", [False, True])
def test_dropping_a_key_changes_outputs_by_its_score(made, given):
    """Not the formula but what it means: drop one key, normalize again, and measure the outputs."""
    weights, value, output, truth = made
    found = eviction_scores(weights, "dropkv", value=value, output=output if given else None)
    values = value.repeat_interleave(H // Hkv, 1)
    expected = torch.zeros(B, H, T).double()
    for key in range(T):
        rest = truth.clone()
        rest[..., key] = 0
        total = rest.sum(-1, keepdim=True)
        alone = total[..., 0] < 1e-12  # the only key of its row: nothing is left to compare
        changed = (rest / torch.where(total > 0, total, 1.0)) @ values
        expected[..., key] = (changed - output).square().sum(-1).masked_fill(alone, 0.0).sum(-1)
    torch.testing.assert_close(found, grouped(expected))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "magic"}, "expected one of h2o"),
        ({"method": "dropkv"}, "needs value="),
        ({"method": "snapkv", "window": 23}, "23 queries and 23 keys"),
        ({"method": "snapkv", "window": 4, "kernel": 4}, "odd"),
    ],
)
def test_what_cannot_be_scored_is_refused(made, options, words):
    with pytest.raises(OptionError, match=words):
        eviction_scores(made[0], **options)
