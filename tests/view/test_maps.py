"""Weights that are already numbers are looked at like any other."""

import re

import pytest
import torch

from headwise import OptionError, ShapeError, causal, view
from headwise.view.result import map_of
from headwise.view.terminal import drawn
from headwise.weights import AttentionMap, Scoring


def dense(B=1, H=3, T=11, S=11):
    query, key = torch.randn(B, H, T, 7, dtype=torch.float64), torch.randn(B, H, S, 7, dtype=torch.float64)
    return AttentionMap(query, key, Scoring(causal())).to_tensor()


def test_a_map_of_given_weights_gives_them_back_with_their_statistics():
    torch.manual_seed(0)
    weights = dense()
    found = map_of(weights)
    torch.testing.assert_close(found.to_tensor(), weights)
    torch.testing.assert_close(found.entropy(), torch.special.entr(weights).sum(-1))
    torch.testing.assert_close(found.received().total, weights.sum(-2))


def test_attentions_of_an_eager_model_can_be_viewed():
    torch.manual_seed(0)
    result = view([dense().float(), dense()[0].half()])
    assert result.sentence.startswith("2 layers × 3 heads · 11 tokens")


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.randn(1, 3, 5, 5), OptionError, "each row sums to 1"),
        (torch.eye(5), ShapeError, r"expected floats \(1, H, T, S\)"),
        (torch.eye(5, dtype=torch.int64).expand(1, 3, 5, 5), ShapeError, "torch.int64"),
    ],
    ids=["scores", "no heads", "whole numbers"],
)
def test_what_is_no_table_of_weights_is_refused(weights, error, message):
    with pytest.raises(error, match=message):
        view(weights)


@pytest.mark.parametrize("text", ["Hello", "The captain looked at the sea, and at the captain."])
@pytest.mark.parametrize("depth", [0, 24])
def test_numbers_of_heads_stand_over_their_cells(text, depth):
    from headwise import load_builtin
    from headwise.view.color import Palette

    shown = re.sub(r"\x1b\[[0-9;]*m", "", drawn(view(load_builtin(), text), 80, Palette(depth), 60))
    lines = shown.splitlines()
    place = next(i for i, line in enumerate(lines) if line.split() == [str(head) for head in range(8)])
    starts = [i for i, letter in enumerate(lines[place]) if letter != " "]
    for layer in range(7):
        row = lines[place + 1 + layer]
        assert row.split()[0] == str(layer)
        assert [i for i, letter in enumerate(row) if letter != " " and i > 3] == starts


def test_a_map_that_is_no_number_is_still_drawn():
    broken = torch.full((1, 2, 5, 3), float("nan"))
    assert "2 heads" in str(view(AttentionMap(broken, broken, Scoring(causal()))))
