"""Arithmetic in sentences: read in any spelling, compared by what it computes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwise.learn.course.formula import expressions


def total(T, E, H):
    return 8 * T * E * E + 4 * T * T * E


@pytest.mark.parametrize(
    "text",
    [
        "8*n*d^2 + 4*n^2*d",
        "8 T d² + 4 T² d",
        "8LE**2 plus 4·L·L·E",
        "4 seq_len d_model (2 d_model + seq_len)",
        "4 T^2 H d_k + 8 T (H*d_k)^2",
        "8 × 1024 × 512 squared + 4 times 1024² times 512",
        "4,294,967,296",
        "4 294 967 296",
        "2^32",
        "4.29 GFLOPs",
        "4.295e9",
        "4.29 × 10⁹",
        "4.29 billion operations",
        "0.00429 TFLOPs",
        "2.15 billion multiply-adds",
        "2^31 MACs",
        "4 T E² + 2 T² E multiply-accumulates",
    ],
)
def test_spellings_of_one_formula_are_equal(text):
    assert expressions(text)[0].equals(total)


@pytest.mark.parametrize(
    "text", ["8 T d^2 + 2 T^2 d", "8 d T^2 + 4 d^2 T", "4,294,967,295", "4.92 G", "8*1024*512", "4.29 GMACs", "2^31"]
)
def test_other_formulas_are_not(text):
    assert not any(found.equals(total) for found in expressions(text))


def test_letters_are_compared_at_several_sizes():
    projections, scores = (lambda T, E, H: 8 * T * E * E), (lambda T, E, H: 4 * T * T * E)
    found = expressions("8 T E²")[0]
    assert found.equals(projections)
    assert not found.equals(scores), "both are 2,147,483,648 at T = 1024 and E = 512"


def test_words_end_an_expression():
    assert [found.text for found in expressions("QK^T takes 2·T²·E, (about 4*512 for the rest)")] == ["2·T²·E", "4*512"]
    assert expressions("there is no arithmetic here, 64-dimensional or not")[0].text == "64"


@given(st.text("0123456789nTdEH+-*/^()²., =", max_size=30))
def test_nothing_that_is_typed_raises(text):
    for found in expressions(text):
        found.equals(total)
