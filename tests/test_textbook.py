import pytest
import torch

from headwise import HeadCountError, MultiHeadAttention, ShapeError, textbook
from headwise.textbook import CausalHead, HeadsAtOnce, HeadsInAList

D_IN, D_OUT, LENGTH, HEADS = 7, 15, 13, 3


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_list_and_all_at_once_agree_with_shared_weights(qkv_bias):
    slow = HeadsInAList(D_IN, D_OUT, LENGTH, 0.0, HEADS, qkv_bias)
    fast = HeadsAtOnce.from_list(slow)
    x = torch.randn(2, 11, D_IN)
    torch.testing.assert_close(fast(x), slow(x))


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_all_at_once_goes_back_to_a_list(qkv_bias):
    fast = HeadsAtOnce(D_IN, D_OUT, LENGTH, 0.0, HEADS, qkv_bias)
    x = torch.randn(2, 11, D_IN)
    torch.testing.assert_close(fast.out_proj(fast.to_list()(x)), fast(x))


def test_one_head_is_a_list_of_one():
    head = CausalHead(D_IN, 5, LENGTH, 0.0)
    x = torch.randn(2, 11, D_IN)
    torch.testing.assert_close(HeadsInAList.from_heads(head)(x), head(x))
    torch.testing.assert_close(HeadsAtOnce.from_list(HeadsInAList.from_heads(head))(x), head(x))


def test_list_made_of_heads_has_their_biases():
    heads = [CausalHead(D_IN, 5, LENGTH, 0.0, qkv_bias=True) for _ in range(3)]
    x = torch.randn(2, 11, D_IN)
    expected = torch.cat([head(x) for head in heads], dim=-1)
    rung = HeadsInAList.from_heads(*heads)
    torch.testing.assert_close(rung(x), expected)
    torch.testing.assert_close(HeadsAtOnce.from_list(rung)(x), expected)


def test_list_returns_d_out_and_not_d_out_times_heads():
    assert HeadsInAList(D_IN, D_OUT, LENGTH, 0.0, HEADS)(torch.randn(2, 4, D_IN)).shape == (2, 4, D_OUT)


def test_last_rung_agrees_with_the_fused_layer():
    rung = HeadsAtOnce(D_IN, D_OUT, LENGTH, 0.0, HEADS)
    layer = MultiHeadAttention.from_state_dict(rung.state_dict(), num_heads=HEADS)
    x = torch.randn(2, LENGTH, D_IN)
    torch.testing.assert_close(layer(x), rung(x))


def test_dropout_acts_in_training_only():
    rung = HeadsAtOnce(D_IN, D_OUT, LENGTH, 0.5, HEADS)
    x = torch.randn(2, LENGTH, D_IN)
    assert not torch.equal(rung(x), rung(x))
    rung.eval()
    assert torch.equal(rung(x), rung(x))


@pytest.mark.parametrize("rung", [HeadsInAList, HeadsAtOnce])
def test_future_never_changes_the_past(rung):
    module = rung(D_IN, D_OUT, LENGTH, 0.0, HEADS)
    x = torch.randn(2, 11, D_IN)
    changed = x.clone()
    changed[:, 6:] = torch.randn(2, 5, D_IN)
    torch.testing.assert_close(module(x)[:, :6], module(changed)[:, :6])


@pytest.mark.parametrize("rung", [HeadsInAList, HeadsAtOnce])
def test_heads_that_do_not_divide_are_refused_with_the_numbers(rung):
    with pytest.raises(HeadCountError, match=r"d_out=15 cannot be cut into num_heads=4"):
        rung(D_IN, 15, LENGTH, 0.0, 4)


def test_longer_than_the_context_is_refused_with_the_cure():
    with pytest.raises(ShapeError, match=r"14 tokens and context_length is 13.*context_length=14"):
        HeadsAtOnce(D_IN, D_OUT, LENGTH, 0.0, HEADS)(torch.randn(1, 14, D_IN))


def test_unbatched_input_is_refused():
    with pytest.raises(ShapeError, match=r"shape \(4, 7\); expected 3 dimensions"):
        CausalHead(D_IN, D_OUT, LENGTH, 0.0)(torch.randn(4, 7))


def test_heads_of_two_shapes_make_no_list():
    with pytest.raises(ShapeError, match="agree in shape, bias and context length; head 0 maps 7 to 5"):
        HeadsInAList.from_heads(CausalHead(7, 5, 13, 0.0), CausalHead(7, 3, 13, 0.0))
    with pytest.raises(ShapeError, match="agree in shape, bias"):
        HeadsInAList.from_heads(CausalHead(7, 5, 13, 0.0), CausalHead(7, 5, 13, 0.0, qkv_bias=True))


@pytest.mark.parametrize("form", [textbook.MultiHeadAttn, textbook.Homework, textbook.CausalAttention])
def test_missing_arguments_are_named_with_the_class_that_was_called(form):
    with pytest.raises(
        TypeError, match=rf"{form.__name__}\(32, 4\): missing .*Expected {form.__name__}\(d_in, d_out, "
    ):
        form(32, 4)
