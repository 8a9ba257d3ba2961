import pytest
import torch

from headwise.learn.layout import key_operations, memory_text, picture, picture_text

B, T, H, D = 2, 5, 3, 7


def by_name(*sizes, **options):
    return {op.name: op for op in key_operations(*sizes, **options)}


def test_view_keeps_memory_and_splits_a_stride():
    view = by_name(B, T, H, D)["view"]
    assert view.shares
    assert view.copied == view.made == 0
    assert view.before.strides == (T * H * D, H * D, 1)
    assert view.after.strides == (T * H * D, H * D, D, 1)


def test_transpose_swaps_two_strides_and_moves_nothing():
    transpose = by_name(B, T, H, D)["transpose"]
    a, b, c, d = transpose.before.strides
    assert transpose.after.strides == (a, c, b, d)
    assert transpose.shares
    assert not transpose.after.contiguous
    assert memory_text(transpose) == "same memory, not contiguous"


def test_matmul_copies_heads_together_only_when_samples_are_several():
    several, one = by_name(B, T, H, D)["matmul"], by_name(1, T, H, D)["matmul"]
    assert several.copied == 2 * B * T * H * D * 4  # query and key
    assert one.copied == 0
    assert several.made == B * H * T * T * 4


def test_contiguous_copies_every_number_once():
    contiguous = by_name(B, T, H, D)["contiguous"]
    assert contiguous.copied == contiguous.made == B * T * H * D * 4
    assert not contiguous.before.contiguous
    assert contiguous.after.contiguous


def test_view_after_transpose_is_refused_by_torch():
    trap = by_name(B, T, H, D)["trap: view after transpose"]
    assert trap.after is None
    assert memory_text(trap) == "RuntimeError"


def test_view_instead_of_transpose_has_the_right_shape_and_other_strides():
    found = by_name(B, T, H, D)
    trap, right = found["trap: view instead of transpose"], found["transpose"]
    assert trap.after.shape == right.after.shape
    assert trap.after.strides != right.after.strides


@pytest.mark.parametrize("sizes", [(B, 1, H, D), (B, T, 1, D)], ids=["one token", "one head"])
def test_traps_are_left_out_where_they_do_no_harm(sizes):
    assert len(key_operations(*sizes)) == 4
    x = torch.randn(*sizes[:2], sizes[2] * D)
    torch.testing.assert_close(x.view(sizes[0], sizes[2], sizes[1], D), x.view(*sizes[:2], sizes[2], D).transpose(1, 2))


def test_layout_of_the_meta_device_is_that_of_real_memory():
    assert key_operations(B, T, H, D, "meta") == key_operations(B, T, H, D)


def test_picture_shows_a_head_made_of_every_token_and_one_made_of_the_first():
    seen = picture(2, 2, 3)
    assert seen.right == [[0, 1, 2], [6, 7, 8]]
    assert seen.wrong == [[0, 1, 2], [3, 4, 5]]
    assert "[[0, 1, 2], [6, 7, 8]]" in picture_text()
