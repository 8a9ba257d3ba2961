"""What must hold for any sizes: hypothesis looks for a counterexample."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import MultiHeadAttention, attend, causal, documents, padding, prefix, reference, window

sizes = st.fixed_dictionaries(
    {
        "B": st.integers(1, 3),
        "Hkv": st.integers(1, 3),
        "group": st.integers(1, 3),
        "T": st.integers(1, 70),
        "S": st.integers(1, 70),
        "D": st.integers(1, 9),
        "Dv": st.integers(1, 9),
    }
)
mask_kinds = st.sampled_from(["none", "causal", "window", "padding", "documents", "prefix", "not", "dense"])


def build_mask(kind, B, T, S, n):
    return {
        "none": lambda: None,
        "causal": lambda: causal(),
        "window": lambda: window(n, n // 2),
        "padding": lambda: padding(torch.arange(B) * n % (S + 1)),
        "documents": lambda: documents(torch.arange(S) // (n + 1)) & causal(),
        "prefix": lambda: causal() | prefix(n),
        "not": lambda: ~window(n),
        "dense": lambda: padding(torch.rand(B, S) > 0.5) | window(n, n),
    }[kind]()


def tensors(B, Hkv, group, T, S, D, Dv, dtype=torch.float64):
    shapes = [(B, Hkv * group, T, D), (B, Hkv, S, D), (B, Hkv, S, Dv)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@settings(deadline=None, max_examples=150)
@given(size=sizes, kind=mask_kinds, n=st.integers(0, 20))
def test_any_sizes_and_masks_match_the_reference(size, kind, n):
    q, k, v = tensors(**size)
    mask = build_mask(kind, size["B"], size["T"], size["S"], n)
    output, weights = attend(q, k, v, mask=mask, return_weights=True)
    visible = None if mask is None else mask.to_tensor(size["T"], size["S"])
    truth, exact = reference.attend(q, k, v, visible=visible)
    torch.testing.assert_close(output, truth)
    torch.testing.assert_close(weights[:], exact)


@settings(deadline=None, max_examples=60)
@given(size=sizes, kind=mask_kinds, n=st.integers(0, 20))
def test_rows_sum_to_one_or_to_nothing(size, kind, n):
    q, k, v = tensors(**size)
    mask = build_mask(kind, size["B"], size["T"], size["S"], n)
    _, weights = attend(q, k, v, mask=mask, return_weights=True)
    total = weights.sum(-1)
    assert (((total - 1).abs() < 1e-9) | (total == 0)).all()
    assert (weights >= 0).all()


@settings(deadline=None, max_examples=40)
@given(size=sizes, data=st.data())
def test_without_a_mask_the_order_of_keys_does_not_matter(size, data):
    q, k, v = tensors(**size)
    order = torch.tensor(data.draw(st.permutations(range(size["S"]))))
    torch.testing.assert_close(attend(q, k[:, :, order], v[:, :, order]), attend(q, k, v))


@settings(deadline=None, max_examples=40)
@given(B=st.integers(1, 3), T=st.integers(2, 80), data=st.data())
def test_layer_without_a_mask_is_permutation_equivariant(B, T, data):
    layer = MultiHeadAttention(6, 3, dtype=torch.float64)
    x = torch.randn(B, T, 6, dtype=torch.float64)
    order = torch.tensor(data.draw(st.permutations(range(T))))
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])


@settings(deadline=None, max_examples=40)
@given(T=st.integers(2, 320), data=st.data(), dtype=st.sampled_from([torch.float64, torch.bfloat16]))
def test_the_past_never_changes_when_the_future_does(T, data, dtype):
    layer = MultiHeadAttention(6, 3, causal=True, dtype=dtype)
    now = data.draw(st.integers(1, T - 1))
    x = torch.randn(2, T, 6, dtype=dtype)
    changed = x.clone()
    changed[:, now:] = 1e3
    torch.testing.assert_close(
        layer(changed)[:, :now], layer(x)[:, :now], rtol=0, atol=1e-12 if dtype.itemsize == 8 else 0
    )


@settings(deadline=None, max_examples=40)
@given(S=st.integers(2, 80), data=st.data())
def test_padding_never_leaks(S, data):
    lengths = [data.draw(st.integers(0, S)), data.draw(st.integers(0, S))]
    layer = MultiHeadAttention(6, 3, dtype=torch.float64)
    x = torch.randn(2, S, 6, dtype=torch.float64)
    changed = x.clone()
    for sample, length in enumerate(lengths):
        changed[sample, length:] = 1e3
    before, after = layer(x, mask=padding(lengths)), layer(changed, mask=padding(lengths))
    for sample, length in enumerate(lengths):
        torch.testing.assert_close(after[sample, :length], before[sample, :length])


@settings(deadline=None, max_examples=30)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_packed_documents_are_as_if_alone(lengths):
    layer = MultiHeadAttention(6, 3, causal=True, dtype=torch.float64)
    x = torch.randn(1, sum(lengths), 6, dtype=torch.float64)
    together = layer(x, mask=documents(lengths=lengths))
    alone = torch.cat([layer(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(together, alone)


@settings(deadline=None, max_examples=30)
@given(T=st.integers(1, 100))
def test_samples_of_a_batch_do_not_meet(T):
    layer = MultiHeadAttention(6, 3, dtype=torch.float64)
    x = torch.randn(3, T, 6, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.cat([layer(sample[None]) for sample in x]))


@settings(deadline=None, max_examples=30)
@given(T=st.integers(1, 90), cut=st.integers(0, 90))
def test_queries_may_come_late_as_with_a_cache(T, cut):
    # Bottom-right alignment: asking only the last queries gives the last rows of asking all.
    cut = min(cut, T - 1)
    q, k, v = tensors(2, 2, 2, T, T, 5, 7)
    for mask in (causal(), causal() & window(4), documents(torch.arange(T) // 5) & causal()):
        torch.testing.assert_close(attend(q[:, :, cut:], k, v, mask=mask), attend(q, k, v, mask=mask)[:, :, cut:])
