"""`attend` on every path against the reference in float64."""

import itertools
import math

import pytest
import torch

from closeness import assert_close_to_truth
from headwise import attend, causal, chunks, dense, documents, explain, padding, prefix, reference, window
from headwise.attention.backends import BACKENDS, Call, blocks, shared
from headwise.weights import Scoring

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
B, H, D = 2, 6, 16

MASKS = {
    "none": lambda T, S: None,
    "causal": lambda T, S: causal(),
    "window": lambda T, S: causal() & window(11),
    "two-sided window": lambda T, S: window(3, 2),
    "padding": lambda T, S: padding(torch.tensor([S, max(S // 2, 1)])),
    "empty sample": lambda T, S: padding(torch.tensor([0, S])) & causal(),
    "documents": lambda T, S: documents(torch.arange(S) // 7) & causal(),
    "prefix": lambda T, S: causal() | prefix(3),
    "chunks": lambda T, S: causal() & chunks(5),
    "dense": lambda T, S: dense(torch.rand(B, 1, T, S, generator=torch.Generator().manual_seed(1)) > 0.5),
    "empty rows": lambda T, S: dense((torch.arange(T) % 3 != 1)[:, None].expand(T, S)),
}


@pytest.fixture(autouse=True)
def blocks_at_every_size(monkeypatch):
    """Blocks run from few queries on, so that small sizes test them; where they pay, test_explain.py says."""
    known = {place: rule._replace(queries=0, shortest=min(rule.shortest, 256)) for place, rule in blocks.TABLE.items()}
    monkeypatch.setattr(blocks, "TABLE", known)
    monkeypatch.setattr(blocks, "BIASED", tuple(rule._replace(queries=0) for rule in blocks.BIASED))


def inputs(dtype, T, S, Hkv, Dv=D, grad=True):
    shapes = [(B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, Dv)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad) for shape in shapes]


def truth_of(tensors, mask, dtype=torch.float64, bias=None):
    """Output and gradients of the reference, computed in `dtype`."""
    copies = [x.detach().to(dtype).requires_grad_() for x in tensors]
    T, S = copies[0].shape[2], copies[1].shape[2]
    visible = None if mask is None else mask.to_tensor(T, S)
    output, weights = reference.attend(*copies, visible=visible, bias=None if bias is None else bias.to(dtype))
    (output * slope(output)).sum().backward()
    return output, weights, [x.grad for x in copies]


def slope(output):
    """A fixed upstream gradient, the same in every dtype."""
    return torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)


LENGTHS = [(1, 1), (1, 7), (5, 5), (5, 7), (7, 5), (67, 67), (131, 67), (67, 131), (307, 307), (100, 307)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_output_and_gradients_match_the_reference(kind, dtype):
    for (T, S), Hkv in itertools.product(LENGTHS, (6, 3, 1)):
        if T > 200 and Hkv == 1:
            continue  # long and multi-query is covered by its two neighbours
        mask = MASKS[kind](T, S)
        tensors = inputs(dtype, T, S, Hkv)
        output = attend(*tensors, mask=mask)
        (output * slope(output)).sum().backward()
        truth, _, truth_grads = truth_of(tensors, mask)
        plain, _, plain_grads = truth_of(tensors, mask, dtype)
        assert output.dtype == dtype
        assert_close_to_truth(output, truth, plain)
        for x, exact, rough in zip(tensors, truth_grads, plain_grads, strict=True):
            assert_close_to_truth(x.grad, exact, rough, factor=3)


@pytest.mark.parametrize("kind", MASKS)
def test_products_that_may_round_are_as_good_as_plain_pytorch(kind):
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        mask, tensors = MASKS[kind](131, 131), inputs(torch.bfloat16, 131, 131, 3)
        assert explain(*tensors, mask=mask).path == "blocks"
        output = attend(*tensors, mask=mask)
        (output * slope(output)).sum().backward()
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)
    truth, _, truth_grads = truth_of(tensors, mask)
    plain, _, plain_grads = truth_of(tensors, mask, torch.bfloat16)
    assert_close_to_truth(output, truth, plain)
    for x, exact, rough in zip(tensors, truth_grads, plain_grads, strict=True):
        assert_close_to_truth(x.grad, exact, rough, factor=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_half_precision_rounds_only_its_result(kind, dtype):
    for T, S in [(19, 19), (67, 67), (53, 307)]:
        mask, tensors = MASKS[kind](T, S), inputs(dtype, T, S, 3, grad=False)
        tensors[0] *= 4
        truth, _, _ = truth_of(tensors, mask)
        assert_close_to_truth(attend(*tensors, mask=mask), truth, truth_of(tensors, mask, torch.float32)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["none", "padding", "empty sample", "dense"])
@pytest.mark.parametrize("T", [1, 3])
def test_values_that_are_part_of_the_keys_are_read_exactly(kind, dtype, T, monkeypatch):
    """As in absorbed latent attention, from a cache that has room for more."""
    monkeypatch.setattr(shared, "PART", 7 * D)  # so that a conversion takes several parts
    S, Dv = 67, D - 5
    for Hkv, per_head in itertools.product((1, 3), (False, True)):
        query = torch.randn(B, H, T, D, dtype=torch.float64).to(dtype)
        key = torch.randn(B, Hkv, S + 11, D, dtype=torch.float64).to(dtype)[:, :, :S]
        bias = torch.randn(1, H, T, S, dtype=torch.float64).to(dtype) if per_head else None
        mask = MASKS[kind](T, S)
        tensors = (query, key, key[..., :Dv])
        assert explain(*tensors, mask=mask, attn_bias=bias).path == "shared"
        output = attend(*tensors, mask=mask, attn_bias=bias)
        truth, _, _ = truth_of(tensors, mask, bias=bias)
        assert_close_to_truth(output, truth, truth_of(tensors, mask, dtype, bias)[0])


@pytest.mark.parametrize("kind", MASKS)
def test_inference_gives_what_training_gives(kind):
    for dtype, (T, S) in itertools.product((torch.float32, torch.bfloat16), LENGTHS):
        mask = MASKS[kind](T, S)
        tensors = inputs(dtype, T, S, 3)
        with torch.no_grad():
            inference = attend(*tensors, mask=mask)
        torch.testing.assert_close(inference, attend(*tensors, mask=mask).detach())


@pytest.mark.parametrize(
    "backend", [b for b in BACKENDS if b.name not in ("flash", "flex", "triangles", "selected")], ids=lambda b: b.name
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_path_gives_zeros_and_finite_gradients_to_a_row_that_sees_nothing(backend, dtype):
    if backend.name == "float32" and dtype.itemsize > 2:
        pytest.skip("it is for 16 bit")
    seen = 0
    for kind, T in itertools.product(("empty rows", "empty sample"), (5, 67, 307)):
        for mask in (MASKS[kind](T, T), MASKS[kind](T, T) & window(9)):
            tensors = inputs(dtype, T, T, 3, Dv=D - 3 if backend.name == "shared" else D)
            call = Call(*tensors, Scoring(mask), 0.0)
            if backend.refuses(call):
                continue
            seen += 1
            output = backend.run(call)
            empty = ~mask.to_tensor(T).any(-1).expand(B, H, T)
            assert empty.any()
            assert (output[empty] == 0).all()
            output.float().square().sum().backward()
            assert all(x.grad.isfinite().all() for x in tensors)
            assert (tensors[0].grad[empty] == 0).all()
    assert seen


def test_rows_without_a_key_stay_zero_with_dropout():
    mask = MASKS["empty rows"](67, 67)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = inputs(dtype, 67, 67, 3)
        output = attend(*tensors, mask=mask, dropout=0.5)
        output.float().square().sum().backward()
        assert (output[:, :, 1::3] == 0).all()
        assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_weights_are_exact_and_rebuild_the_output(kind, dtype):
    for T, S in [(5, 7), (67, 67)]:
        mask = MASKS[kind](T, S)
        tensors = inputs(dtype, T, S, 3)
        output, weights = attend(*tensors, mask=mask, return_weights=True)
        truth, exact, _ = truth_of(tensors, mask)
        assert weights.dtype == dtype
        assert_close_to_truth(weights[:], exact)
        assert_close_to_truth(output, truth, truth_of(tensors, mask, dtype)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_weights_in_half_precision_are_rounded_only_once(dtype):
    tensors = [x.detach() * 4 for x in inputs(dtype, 67, 67, 3)]  # large scores, whose rounding would show
    _, weights = attend(*tensors, return_weights=True)
    _, exact = reference.attend(*[x.double() for x in tensors])
    assert ((weights.double() - exact).abs() <= torch.finfo(dtype).eps * exact + 1e-6).all()


def test_a_bias_is_added_and_learns():
    for (T, S), shape in itertools.product([(5, 7), (67, 67), (307, 307)], [(1, 1), (B, H), (1, H)]):
        tensors = inputs(torch.float64, T, S, 3)
        bias = torch.randn(*shape, T, S, dtype=torch.float64, requires_grad=True)
        twin = bias.detach().clone().requires_grad_()
        mask = causal()
        output = attend(*tensors, mask=mask, attn_bias=bias)
        output.square().sum().backward()
        expected, _ = reference.attend(*tensors, visible=mask.to_tensor(T, S), bias=twin)
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(bias.grad, twin.grad)


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 5, 7), (2, 1, 1, 7), (1, 6, 5, 1), (1, 7)], ids=str)
def test_a_bias_may_be_one_for_all_along_any_axis(shape):
    tensors = inputs(torch.float64, 5, 7, 3)
    bias = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(attend(*tensors, attn_bias=bias), reference.attend(*tensors, bias=bias)[0])


def test_a_bias_of_another_dtype_is_cast_and_never_misread():
    # torch's own CPU kernel reads a float32 bias beside float64 queries as garbage from 16 tokens on.
    tensors = inputs(torch.float64, 67, 67, 3)
    bias = torch.randn(67, 67)
    torch.testing.assert_close(attend(*tensors, attn_bias=bias), reference.attend(*tensors, bias=bias.double())[0])


def test_bias_of_minus_infinity_everywhere_gives_zeros():
    for dtype in (torch.float32, torch.bfloat16):
        tensors = inputs(dtype, 67, 67, 6)
        bias = torch.zeros(67, 67, dtype=dtype)
        bias[3] = -math.inf
        output = attend(*tensors, attn_bias=bias)
        output.float().sum().backward()
        assert (output[:, :, 3] == 0).all()
        assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize("Dv", [1, 5, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_values_may_be_wider_or_narrower_than_keys(Dv, dtype):
    for T in (5, 67, 307):
        tensors = inputs(dtype, T, T, 3, Dv=Dv)
        truth, _, _ = truth_of(tensors, causal())
        assert_close_to_truth(attend(*tensors, causal=True), truth, truth_of(tensors, causal(), dtype)[0])


def test_scale_can_be_chosen():
    tensors = inputs(torch.float64, 67, 67, 6)
    for dtype in (torch.float64, torch.bfloat16):
        cast = [x.to(dtype) for x in tensors]
        truth = reference.attend(*[x.to(dtype).double() for x in tensors], scale=0.05)[0]
        assert_close_to_truth(attend(*cast, scale=0.05), truth, reference.attend(*cast, scale=0.05)[0])


def test_causal_flag_and_causal_mask_are_one():
    for T, S in LENGTHS:
        tensors = inputs(torch.float32, T, S, 3)
        assert torch.equal(attend(*tensors, causal=True), attend(*tensors, mask=causal()))


def test_causal_flag_is_never_lost_beside_another_mask():
    tensors = inputs(torch.float64, 5, 5, 3)
    mask = padding([5, 3])
    torch.testing.assert_close(attend(*tensors, causal=True, mask=mask), attend(*tensors, mask=causal() & mask))


@pytest.mark.parametrize(("batch", "T", "S"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_axes_of_size_zero_work(batch, T, S, dtype):
    query = torch.randn(batch, H, T, D, dtype=dtype, requires_grad=True)
    key = torch.randn(batch, 3, S, D, dtype=dtype, requires_grad=True)
    for mask in (None, causal()):
        output, weights = attend(query, key, key, mask=mask, return_weights=True)
        assert output.shape == (batch, H, T, D)
        assert weights.shape == (batch, H, T, S)
        assert (output == 0).all()
        output.sum().backward()
        assert query.grad.isfinite().all()


@pytest.mark.parametrize("kind", MASKS)
def test_gradcheck_in_float64(kind):
    for T, S in [(3, 4), (4, 3)]:
        mask = dense(MASKS[kind](T, S).to_tensor(T, S)) if kind != "none" else None
        tensors = [
            torch.randn(2, h, n, 3, dtype=torch.float64, requires_grad=True) for h, n in ((2, T), (1, S), (1, S))
        ]
        assert torch.autograd.gradcheck(lambda q, k, v, m=mask: attend(q, k, v, mask=m), tensors)
        assert torch.autograd.gradcheck(
            lambda q, k, v, m=mask: attend(q, k, v, mask=m, return_weights=True)[1][:], tensors
        )


def test_gradcheck_through_query_blocks():
    tensors = [torch.randn(1, 1, 131, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = causal() & window(5)
    assert explain(*tensors, mask=mask).path == "blocks"
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mask=mask), tensors, fast_mode=True)


def test_blocks_at_both_edges_of_a_window_are_not_mixed_up():
    # First and last block see equally many keys, at different distances.
    tensors = inputs(torch.float64, 384, 384, 6, grad=False)
    mask = window(9, 9)
    assert explain(*tensors, mask=mask).path == "blocks"
    torch.testing.assert_close(attend(*tensors, mask=mask), reference.attend(*tensors, visible=mask.to_tensor(384))[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_that_hide_everything_give_zero_gradients_to_all(dtype):
    for T, mask in itertools.product((5, 67, 301), (prefix(0), causal() & prefix(0))):
        tensors = inputs(dtype, T, T, 3)
        output = attend(*tensors, mask=mask)
        assert (output == 0).all()
        output.sum().backward()
        assert all((x.grad == 0).all() for x in tensors[1:])


def test_large_finite_bias_does_not_turn_into_a_mask_in_float16():
    tensors = inputs(torch.float16, 5, 5, 6, grad=False)
    bias = torch.zeros(5, 5)
    bias[0] = -1e9
    output, weights = attend(*tensors, attn_bias=bias, return_weights=True)
    # A constant added to a whole row changes nothing; -1e9 rounded to minus infinity would hide the row.
    plain, plain_weights = attend(*tensors, return_weights=True)
    torch.testing.assert_close(weights[:], plain_weights[:], rtol=0.02, atol=0.01)
    torch.testing.assert_close(output, plain, rtol=0.02, atol=0.01)


def test_half_precision_never_overflows_through_the_mask():
    for dtype in (torch.float16, torch.bfloat16):
        tensors = [x * 30 for x in inputs(dtype, 67, 67, 6, grad=False)]
        output = attend(*tensors, mask=causal() & window(3))
        assert output.isfinite().all()


def test_dropout_keeps_the_mean_and_drops_the_asked_share():
    query, key = torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 64, 8)
    value = torch.eye(64)[None, None]  # the output is then the row of weights itself
    for dtype in (torch.float32, torch.bfloat16):
        wide = [x.to(dtype).expand(64, 6, -1, -1) for x in (query.expand(1, 1, 64, 8), key, value)]
        weights = attend(*wide, dropout=0.25).float()
        assert (weights == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
        assert weights.sum(-1).mean().item() == pytest.approx(1.0, abs=0.01)


def test_autocast_runs_in_half_precision_with_masks():
    tensors = inputs(torch.float32, 67, 67, 6)
    with torch.autocast("cpu", torch.bfloat16):
        output = attend(*tensors, mask=padding([30, 67]) & causal())
    truth, _, _ = truth_of(tensors, padding([30, 67]) & causal())
    assert (output.double() - truth).abs().max() < 0.05


def test_strided_views_need_no_copy():
    qkv = torch.randn(2, 67, 6, 3, 16, dtype=torch.float64)
    query, key, value = qkv.transpose(1, 2).unbind(3)
    expected = attend(query.contiguous(), key.contiguous(), value.contiguous(), causal=True)
    torch.testing.assert_close(attend(query, key, value, causal=True), expected)


def test_a_call_does_not_change_its_inputs():
    tensors = inputs(torch.bfloat16, 67, 67, 6)
    before = [x.detach().clone() for x in tensors]
    attend(*tensors, mask=causal()).sum().backward()
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))
