"""The calls, shapes and counts of the five documents people learn from, as they write them."""

import pytest
import torch

import headwise
from headwise import MultiHeadAttention
from headwise.textbook import HeadsAtOnce, HeadsInAList
from textbook_forms import CourseStep, Handbook, Homework, Interview


def test_course_step_constructor_call_and_shapes():
    mha = MultiHeadAttention(d_model=512, num_heads=8, return_weights=True)
    output, attention = mha(torch.randn(2, 10, 512))
    assert output.shape == (2, 10, 512)
    assert attention.shape == (2, 8, 10, 10)


def test_course_step_with_its_mask_gives_the_same_numbers():
    theirs = CourseStep(18, 3)
    ours = MultiHeadAttention.from_state_dict(theirs.state_dict(), num_heads=3, return_weights=True)
    x, mask = torch.randn(2, 5, 18), torch.ones(5, 5).tril()
    for got, expected in zip(ours(x, mask), theirs(x, mask), strict=True):
        torch.testing.assert_close(got[:], expected)


@pytest.mark.parametrize("rung", [HeadsAtOnce, HeadsInAList])
def test_book_section_constructor_by_position(rung):
    assert rung(768, 768, 1024, 0.1, 12)(torch.randn(2, 50, 768)).shape == (2, 50, 768)


@pytest.mark.parametrize("rung", [HeadsAtOnce])
def test_homework_guide_example(rung):
    mha = rung(d_in=768, d_out=768, context_length=1024, dropout=0.1, num_heads=12, qkv_bias=False)
    output = mha(torch.randn(4, 100, 768))
    assert output.shape == (4, 100, 768)
    assert not output.isnan().any()


def test_homework_guide_numbers():
    theirs = Homework(18, 18, 16, 0.0, 3)
    ours = MultiHeadAttention.from_state_dict(theirs.state_dict(), num_heads=3)
    x = torch.randn(2, 16, 18)
    torch.testing.assert_close(ours(x), theirs(x))


def test_interview_example_with_its_float_causal_mask():
    d_model, num_heads = 512, 8
    query, key, value = (torch.randn(2, 10, d_model) for _ in range(3))
    mha = MultiHeadAttention(d_model, num_heads)
    assert mha(query, key, value).shape == (2, 10, 512)
    causal_mask = torch.tril(torch.ones(10, 10))
    torch.testing.assert_close(mha(query, key, value, causal_mask), mha(query, key, value, causal=True))


def test_interview_parameter_count():
    count = sum(p.numel() for p in MultiHeadAttention(512, 8).parameters())
    assert count == sum(p.numel() for p in Interview(512, 8).parameters()) == 4 * (512 * 512 + 512) == 1_050_624


def test_interview_mask_forms_give_the_same_numbers():
    theirs = Interview(18, 3)
    ours = MultiHeadAttention.from_state_dict(theirs.state_dict(), num_heads=3)
    query, memory = torch.randn(2, 5, 18), torch.randn(2, 7, 18)
    for shape in ((5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (2, 3, 5, 7), (2, 1, 5, 7)):
        mask = (torch.rand(shape) > 0.3).float()
        mask[..., 0] = 1  # their class gives NaN for a row that sees nothing, ours zeros
        torch.testing.assert_close(ours(query, memory, memory, mask), theirs(query, memory, memory, mask))


def test_handbook_example_and_weights():
    mha = MultiHeadAttention(d_model=512, num_heads=8, return_weights=True)
    x = torch.randn(2, 10, 512)
    output, weights = mha(x, x, x)
    assert (output.shape, weights.shape) == ((2, 10, 512), (2, 8, 10, 10))
    theirs = Handbook(512, 8)
    ours = MultiHeadAttention.from_state_dict(theirs.state_dict(), num_heads=8)
    for got, expected in zip(ours(x, x, x, return_weights=True), theirs(x, x, x), strict=True):
        torch.testing.assert_close(got[:], expected)


@pytest.mark.parametrize(
    ("d_model", "heads", "head_dim"),
    [(768, 12, 64), (1024, 16, 64), (1280, 20, 64), (1600, 25, 64), (12288, 96, 128)],
    ids=["BERT-Base, GPT-2 Small", "BERT-Large, GPT-2 Medium", "GPT-2 Large", "GPT-2 XL", "GPT-3"],
)
def test_configurations_of_known_models(d_model, heads, head_dim):
    with torch.device("meta"):
        layer = MultiHeadAttention(d_model, heads)
    assert layer.head_dim == head_dim
    assert sum(p.numel() for p in layer.parameters()) == 4 * d_model * (d_model + 1)


def test_public_names_are_there():
    assert all(hasattr(headwise, name) for name in headwise.__all__)
