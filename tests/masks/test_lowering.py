import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from headwise import causal, dense, documents, padding, prefix, reference, window
from headwise.masks.lowering import additive, block_mask, lower, may_empty_a_row, simplify


@pytest.mark.parametrize(
    ("mask", "T", "S", "kind"),
    [
        (None, 5, 7, "nothing"),
        (causal(), 5, 5, "causal"),
        (causal(), 1, 7, "nothing"),  # the last query sees every key
        (causal(), 5, 7, "bias"),  # torch's flag is aligned to the upper left
        (causal() & window(9), 5, 5, "causal"),  # the window is wider than the sequence
        (causal() & window(2), 5, 5, "bias"),
        (causal() & window(9, 0), 5, 5, "causal"),
        (window(4), 5, 5, "causal"),
        (window(3), 5, 5, "bias"),
        (causal() & causal(), 5, 5, "causal"),
        (window(6, 6), 5, 7, "nothing"),
        (prefix(7), 5, 7, "nothing"),
        (padding([3, 5]), 5, 7, "bias"),
    ],
    ids=repr,
)
def test_masks_lower_to_the_cheapest_form(mask, T, S, kind):
    assert lower(mask, T, S).kind == kind


def test_bias_has_the_dtype_asked_for_and_true_infinities():
    bias = lower(causal(), 3, 5, dtype=torch.float16).bias
    assert bias.dtype == torch.float16
    assert torch.equal(bias == 0, causal().to_tensor(3, 5))
    assert torch.equal(bias.isinf(), ~causal().to_tensor(3, 5))


def test_simplify_keeps_meaning():
    mask = causal() & window(20) & padding([3, 4, 5])
    assert torch.equal(simplify(mask, 5, 5).to_tensor(5), mask.to_tensor(5))
    assert repr(simplify(mask, 5, 5)).startswith("causal() & padding")


@given(T=st.integers(1, 9), S=st.integers(1, 9), left=st.integers(0, 10), right=st.integers(0, 10))
def test_simplify_never_changes_a_tile(T, S, left, right):
    for mask in (window(left, right), causal() & window(left, right), window(left, right) & causal() & prefix(left)):
        simple = simplify(mask, T, S)
        shown = torch.ones(1, 1, T, S, dtype=torch.bool) if simple is None else simple.to_tensor(T, S)
        assert torch.equal(shown, mask.to_tensor(T, S))


def test_empty_rows_are_ruled_out_only_where_that_is_certain():
    assert not may_empty_a_row(causal() & window(2), 5, 7)
    assert may_empty_a_row(causal(), 7, 5)
    assert may_empty_a_row(padding([0, 3]) & causal(), 5, 5)
    assert not may_empty_a_row(None, 5, 5)


@pytest.mark.parametrize(
    "mask",
    [
        causal(),
        causal() & window(20),
        causal() | prefix(9),
        padding([100, 131]) & causal(),
        documents(torch.arange(137) // 50),
        dense(torch.rand(139, 137) > 0.3),
    ],
    ids=repr,
)
def test_block_mask_means_the_same_to_flex_attention(mask):
    query, key, value = torch.randn(2, 1, 139, 16), torch.randn(2, 1, 137, 16), torch.randn(2, 1, 137, 16)
    blocks = block_mask(mask, 139, 137)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        output = flex_attention(query, key, value, block_mask=blocks)
    truth, _ = reference.attend(query, key, value, visible=mask.to_tensor(139, 137))
    torch.testing.assert_close(output, truth)


def test_additive_matches_visibility():
    visible = torch.rand(3, 4) > 0.5
    assert torch.equal(additive(visible, torch.float64).isfinite(), visible)
