import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise import DeviceError, MaskError, attend, causal, chunks, dense, documents, padding, prefix, window
from headwise.masks import as_mask


def table(mask, T, S=None):
    return mask.to_tensor(T, S)[0, 0].int().tolist()


def test_causal_by_hand():
    assert table(causal(), 3) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_causal_is_aligned_to_the_lower_right():
    assert table(causal(), 2, 4) == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_causal_with_more_queries_than_keys_leaves_the_first_rows_empty():
    assert table(causal(), 4, 2) == [[0, 0], [0, 0], [1, 0], [1, 1]]


def test_window_counts_distance_and_not_the_query_itself():
    assert table(window(1, 1), 4) == [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert table(window(1), 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_padding_by_lengths_from_either_side():
    right, left = padding([1, 3]), padding([1, 3], side="left")
    assert right.to_tensor(1, 3)[:, 0, 0].int().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert left.to_tensor(1, 3)[:, 0, 0].int().tolist() == [[0, 0, 1], [1, 1, 1]]


def test_padding_by_key_mask_of_any_numeric_type():
    keys = torch.tensor([[1, 1, 0], [0, 1, 1]])
    for dtype in (torch.bool, torch.int64, torch.float32):
        assert padding(keys.to(dtype)).to_tensor(2, 3)[:, 0, 1].int().tolist() == keys.tolist()


def test_documents_by_ids_by_lengths_and_with_a_cache():
    assert table(documents([7, 7, 2]), 3) == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert table(documents(lengths=[2, 1]), 3) == [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    assert table(documents([7, 7, 2]), 2, 3) == [[1, 1, 0], [0, 0, 1]]  # the last two positions ask


def test_queries_before_the_first_key_belong_to_no_document():
    assert table(documents([5, 5]), 3, 2) == [[0, 0], [1, 1], [1, 1]]


def test_prefix_for_all_and_per_sample():
    assert table(causal() | prefix(2), 3) == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert prefix(torch.tensor([0, 2])).to_tensor(1, 3)[:, 0, 0].int().tolist() == [[0, 0, 0], [1, 1, 0]]


def test_dense_takes_two_and_four_dimensions():
    pattern = torch.rand(5, 7) > 0.5
    assert torch.equal(dense(pattern).to_tensor(5, 7)[0, 0], pattern)
    assert dense(torch.rand(2, 1, 1, 7) > 0.5).to_tensor(5, 7).shape == (2, 1, 5, 7)


MASKS = {
    "causal": lambda: causal(),
    "window": lambda: window(3, 1),
    "causal & window": lambda: causal() & window(2),
    "prefix": lambda: causal() | prefix(3),
    "chunks": lambda: chunks(4),
    "causal & chunks": lambda: causal() & chunks(5),
    "lengths": lambda: padding(torch.tensor([5, 11])),
    "left padding": lambda: padding([4, 9], side="left") & causal(),
    "key mask": lambda: padding(torch.rand(2, 13) > 0.4),
    "documents": lambda: documents(torch.arange(13) // 4) & causal(),
    "documents per sample": lambda: documents(torch.arange(26).view(2, 13) // 5),
    "dense": lambda: dense(torch.rand(2, 3, 11, 13) > 0.5),
    "not": lambda: ~(causal() & window(2)),
}


@pytest.mark.parametrize("kind", MASKS)
def test_every_tile_is_the_piece_of_the_whole(kind):
    mask = MASKS[kind]()
    whole = mask.to_tensor(11, 13)
    for rows in (slice(0, 11), slice(3, 7), slice(10, 11), slice(4, 4), slice(-3, None), slice(9, 99), slice(1, 9, 2)):
        for cols in (slice(0, 13), slice(2, 5), slice(12, 13), slice(-5, -1), slice(20, 30)):
            assert torch.equal(mask.tile(rows, cols, 11, 13), whole[:, :, rows, cols])


@pytest.mark.parametrize("kind", MASKS)
def test_key_range_never_leaves_out_a_visible_key(kind):
    mask = MASKS[kind]()
    whole = mask.to_tensor(11, 13)
    for start in range(0, 11, 3):
        stop = min(start + 3, 11)
        lo, hi = mask.key_range(start, stop, 11, 13)
        outside = torch.ones(13, dtype=torch.bool)
        outside[lo:hi] = False
        assert not whole[:, :, start:stop][..., outside].any()


@pytest.mark.parametrize("kind", MASKS)
def test_what_a_mask_claims_about_itself_is_true(kind):
    mask = MASKS[kind]()
    whole = mask.to_tensor(11, 13)
    if mask.sees_self:
        assert whole.diagonal(offset=2, dim1=-2, dim2=-1).all()
    if mask.banded:
        assert torch.equal(whole[0, 0, 1:, 1:], whole[0, 0, :-1, :-1])
    assert not mask.hides_nothing(11, 13) or whole.all()


FORMS = [
    causal(),
    window(3, 1),
    window(2, 2),
    prefix(2),
    chunks(2),
    documents([0, 0, 1, 1, 1]),
    ~window(1, 1),
    causal() | prefix(2),
]


@pytest.mark.parametrize("T", [1, 3, 5, 8])
@pytest.mark.parametrize("pair", [(a, b) for a in FORMS for b in FORMS], ids=str)
def test_claims_of_combined_masks_hold_at_every_length(pair, T):
    S = 5
    for mask in (pair[0] & pair[1], pair[0] | pair[1], ~(pair[0] & pair[1])):
        whole = mask.to_tensor(T, S)[0, 0]
        if mask.sees_self and T <= S:
            assert whole.diagonal(offset=S - T).all()
        assert not mask.hides_nothing(T, S) or whole.all()
        if mask.banded and T > 1:
            assert torch.equal(whole[1:, 1:], whole[:-1, :-1])
        for start in range(T):
            lo, hi = mask.key_range(start, start + 1, T, S)
            assert not whole[start, :lo].any()
            assert not whole[start, hi:].any()


@pytest.mark.parametrize(
    ("mask", "B", "T", "S"),
    [
        (padding(torch.empty(0, dtype=torch.long)), 0, 3, 5),
        (padding([]), 0, 3, 5),
        (documents(torch.empty(0, dtype=torch.long)) & causal(), 2, 3, 0),
        (padding(torch.ones(2, 0)), 2, 3, 0),
    ],
    ids=repr,
)
def test_masks_of_size_zero_work(mask, B, T, S):
    query, key = torch.randn(B, 1, T, 4), torch.randn(B, 1, S, 4)
    output, weights = attend(query, key, key, mask=mask, return_weights=True)
    assert output.shape == (B, 1, T, 4)
    assert weights.shape == (B, 1, T, S)


def test_dense_and_prefix_take_lists():
    assert table(dense([[1, 0], [1, 1]]), 2) == [[1, 0], [1, 1]]
    assert prefix([0, 2]).to_tensor(1, 3)[:, 0, 0].int().tolist() == [[0, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("kind", MASKS)
def test_masks_survive_copy_and_pickle(kind):
    mask = MASKS[kind]()
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), mask.to("cpu")):  # noqa: S301
        assert torch.equal(other.to_tensor(11, 13), mask.to_tensor(11, 13))
        assert repr(other) == repr(mask)


@given(T=st.integers(1, 9), S=st.integers(1, 9), left=st.integers(0, 10), right=st.integers(0, 10))
def test_masks_that_say_they_hide_nothing_hide_nothing(T, S, left, right):
    for mask in (causal(), window(left, right), prefix(left), causal() | prefix(left), causal() & window(left, right)):
        if mask.hides_nothing(T, S):
            assert mask.to_tensor(T, S).all()


@given(T=st.integers(1, 9), S=st.integers(1, 9), left=st.integers(0, 4))
def test_de_morgan(T, S, left):
    a, b = causal(), window(left, left)
    assert torch.equal((~(a & b)).to_tensor(T, S), (~a | ~b).to_tensor(T, S))


def test_printing_a_mask_draws_it():
    assert str(dense(torch.tensor([[1, 0], [1, 1]]))) == "■·\n■■"
    assert str(causal()).splitlines()[0] == "■·······"
    assert padding([2, 4]).draw(1, 4, sample=1) == "■■■■"


def test_large_masks_are_drawn_in_blocks():
    picture = causal().draw(1000, width=10).splitlines()
    assert picture[0] == "▒·········"
    assert picture[-1] == "■■■■■■■■■▒"


def test_repr_says_how_the_mask_was_made():
    assert repr((causal() | prefix(3)) & ~window(2, 1)) == "(causal() | prefix(3)) & ~window(2, 1)"
    assert repr(causal() & window(4)) == "causal() & window(4)"


def test_zero_one_masks_of_floats_and_integers_work():
    for dtype in (torch.float32, torch.int64, torch.float16):
        assert torch.equal(dense(torch.ones(3, 3).tril().to(dtype)).to_tensor(3), causal().to_tensor(3))


def test_additive_mask_is_refused_with_the_cure():
    additive = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
    with pytest.raises(MaskError, match=r"from -inf to 0.*pass them as attn_bias="):
        dense(additive)


def test_negative_large_numbers_are_refused_too():
    with pytest.raises(MaskError, match=r"from -1e\+09 to 0.*attn_bias="):
        attend(*(torch.randn(1, 1, 3, 4),) * 3, mask=torch.full((3, 3), -1e9).triu(1))


def test_mask_that_could_be_read_two_ways_is_never_guessed():
    with pytest.raises(MaskError, match=r"B = T = 5 could be \(T, S\) or \(B, S\).*dense\(mask\).*padding\(mask\)"):
        as_mask(torch.ones(5, 7), B=5, T=5, S=7)
    assert as_mask(dense(torch.ones(5, 7)), B=5, T=5, S=7) is not None
    assert as_mask(torch.ones(1, 7), B=1, T=1, S=7) is not None  # both readings mean the same


def test_mask_per_sample_is_refused_with_the_cure():
    with pytest.raises(MaskError, match=r"\(2, 7\) is \(B, S\).*padding\(mask\)"):
        as_mask(torch.ones(2, 7), B=2, T=5, S=7)


def test_mask_of_the_wrong_size_is_refused_with_both_sizes():
    with pytest.raises(MaskError, match=r"\(4, 7\) does not fit: expected \(T, S\) = \(5, 7\)"):
        as_mask(torch.ones(4, 7), B=2, T=5, S=7)
    with pytest.raises(MaskError, match="made for 3 samples"):
        padding([1, 2, 3]).check(2, 1, 5, 7, torch.device("cpu"))
    with pytest.raises(MaskError, match="made for 4 keys"):
        documents([0, 0, 1, 1]).check(2, 1, 5, 7, torch.device("cpu"))


def test_three_dimensional_mask_is_refused_with_both_readings():
    with pytest.raises(MaskError, match=r"\(B, T, S\) or \(H, T, S\).*mask\[:, None\].*mask\[None\]"):
        dense(torch.ones(2, 5, 7))


@pytest.mark.parametrize("shape", [(7,), (), (1, 1, 1, 5, 7)])
def test_mask_of_other_dimensions_is_refused(shape):
    with pytest.raises(MaskError, match=r"expected \(T, S\) or \(B or 1, H or 1, T or 1, S or 1\)"):
        dense(torch.ones(shape))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: window(-1), r"window\(back\)=-1: expected a whole number from 0 up"),
        (lambda: window(1.5), r"window\(back\)=1.5"),
        (lambda: window("2"), r"window\(back\)='2'"),
        (lambda: window(2, True), r"window\(ahead\)=True"),
        (lambda: prefix(2.5), r"prefix=2.5"),
        (lambda: padding([-1, 3]), "counts start at 0, and -1"),
        (lambda: padding("3"), r"padding\('3'\): expected a tensor or a list"),
        (lambda: padding(None), r"padding\(None\): expected"),
        (lambda: padding(3), r"padding\(\(\) of torch.int64\)"),
        (lambda: documents(lengths=[-1, 7]), "counts start at 0"),
        (lambda: documents(lengths=[2.5, 2]), r"documents\(lengths=\(2,\) of torch.float32\)"),
        (lambda: documents(lengths=[[3], [2]]), r"documents\(lengths=\(2, 1\)"),
        (lambda: torch.ones(3, 3).bool() & causal(), r"mask & Tensor"),
        (lambda: causal().tile(slice(None, None, -1), slice(None), 3, 3), "positive step"),
        (lambda: prefix(-2), r"prefix=-2"),
        (lambda: chunks(0), r"chunks\(0\): expected a whole number from 1 up"),
        (lambda: prefix(torch.tensor([0.5])), r"prefix\(\(1,\) of torch.float32\)"),
        (lambda: padding(torch.tensor([1.5, 2.0])), r"\(2,\) of torch.float32.*lengths"),
        (lambda: padding([1], side="top"), r"side='top'.*right.*left"),
        (lambda: padding(torch.ones(2, 3) * 0.5), "only 0 .hidden. and 1"),
        (lambda: documents(), "exactly one of ids and lengths"),
        (lambda: documents([1], lengths=[1]), "exactly one of ids and lengths"),
        (lambda: documents(torch.ones(3)), r"documents\(\(3,\) of torch.float32\)"),
        (lambda: dense(torch.ones(2, 2, dtype=torch.complex64)), "complex64"),
        (lambda: causal() & torch.ones(3, 3), r"mask & Tensor.*dense"),
        (lambda: causal() | 3, r"mask \| int"),
        (lambda: (padding([1, 2]) & padding([1, 2, 3])).to_tensor(3), "for 2 samples and .* for 3"),
        (lambda: as_mask("causal", 1, 1, 1), "mask is a str"),
    ],
    ids=lambda x: "" if callable(x) else x,
)
def test_bad_masks_say_what_was_given(make, message):
    with pytest.raises(MaskError, match=message):
        make()


def test_mask_on_another_device_is_refused_with_the_cure():
    with pytest.raises(DeviceError, match=r"is on cpu and the query on meta.*mask.to\('meta'\)"):
        padding([1, 2]).check(2, 1, 3, 3, torch.device("meta"))


def test_the_callers_mask_is_never_changed():
    mask = torch.ones(5, 5).tril()
    before = mask.clone()
    attend(*(torch.randn(2, 3, 5, 7),) * 3, mask=mask)
    assert torch.equal(mask, before)
