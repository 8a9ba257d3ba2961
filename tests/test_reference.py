import math
from pathlib import Path

import pytest
import torch

from headwise import reference
from headwise.reference import Linear, Step


def test_two_tokens_by_hand():
    # One head, width 1: scores are q·k = [[0, 0], [0, ln 3]], so the second row is [1/4, 3/4].
    query = torch.tensor([[[[0.0], [1.0]]]])
    key = torch.tensor([[[[0.0], [math.log(3)]]]])
    value = torch.tensor([[[[4.0, 0.0], [8.0, 1.0]]]])
    output, weights = reference.attend(query, key, value)
    torch.testing.assert_close(weights, torch.tensor([[[[0.5, 0.5], [0.25, 0.75]]]]))
    torch.testing.assert_close(output, torch.tensor([[[[6.0, 0.5], [7.0, 0.75]]]]))


def test_causal_mask_by_hand():
    value = torch.tensor([[[[2.0], [4.0], [9.0]]]])
    flat = torch.zeros(1, 1, 3, 1)
    output, weights = reference.attend(flat, flat, value, visible=torch.ones(3, 3, dtype=torch.bool).tril())
    torch.testing.assert_close(output.flatten(), torch.tensor([2.0, 3.0, 5.0]))
    assert weights[0, 0, 0].tolist() == [1.0, 0.0, 0.0]


def test_scale_is_one_over_the_root_of_the_head_width():
    query = key = torch.full((1, 1, 2, 4), 1.0)
    key = key.clone()
    key[0, 0, 1] = 0
    _, weights = reference.attend(query, key, key)
    torch.testing.assert_close(weights[0, 0, 0, 0], torch.tensor(math.exp(2) / (math.exp(2) + 1)))  # 4 / sqrt(4) = 2


def test_grouped_heads_share_keys_in_order():
    query = torch.randn(2, 6, 5, 7)
    key, value = torch.randn(2, 3, 4, 7), torch.randn(2, 3, 4, 11)
    output, _ = reference.attend(query, key, value)
    for head in range(6):
        alone, _ = reference.attend(
            query[:, head : head + 1], key[:, head // 2 : head // 2 + 1], value[:, head // 2 : head // 2 + 1]
        )
        torch.testing.assert_close(output[:, head : head + 1], alone)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_that_sees_no_key_gives_zeros_and_finite_gradients(dtype):
    query, key, value = (torch.randn(2, 3, 5, 7, dtype=dtype, requires_grad=True) for _ in range(3))
    visible = torch.rand(2, 1, 5, 5) > 0.4
    visible[:, :, 2] = False
    output, weights = reference.attend(query, key, value, visible=visible)
    assert (output[:, :, 2] == 0).all()
    assert (weights[:, :, 2] == 0).all()
    with torch.autograd.detect_anomaly(check_nan=True):
        output.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


def test_bias_of_minus_infinity_hides_like_a_mask():
    query, key, value = (torch.randn(2, 3, 5, 7) for _ in range(3))
    visible = torch.rand(5, 5) > 0.5
    visible[1] = False
    bias = torch.zeros(5, 5).masked_fill(~visible, -math.inf)
    for with_mask, with_bias in zip(
        reference.attend(query, key, value, visible=visible),
        reference.attend(query, key, value, bias=bias),
        strict=True,
    ):
        torch.testing.assert_close(with_mask, with_bias)


def test_ten_steps_hand_out_named_tensors_with_the_shapes_of_the_guide():
    x = torch.randn(4, 10, 24)
    eye = Linear(torch.eye(24))
    steps: list[Step] = []
    output, weights = reference.multi_head_attention(x, x, x, (eye, eye, eye, eye), num_heads=3, steps=steps)
    names = [(step.number, step.name) for step in steps]
    assert names == [
        (1, "project"),
        (2, "split"),
        (3, "transpose"),
        (4, "scores"),
        (5, "mask"),
        (6, "scale"),
        (7, "softmax"),
        (8, "weighted values"),
        (9, "concat"),
        (10, "project"),
    ]
    shapes = [tuple(next(iter(step.tensors.values())).shape) for step in steps]
    square = (4, 3, 10, 10)
    split = [(4, 10, 24), (4, 10, 3, 8), (4, 3, 10, 8)]
    assert shapes == [*split, square, square, square, square, (4, 3, 10, 8), (4, 10, 24), (4, 10, 24)]
    assert steps[6].tensors["weights"] is weights
    assert steps[9].tensors["output"] is output


def test_reference_imports_nothing_of_ours():
    source = Path(reference.__file__).read_text()
    assert "from headwise" not in source
    assert "import headwise" not in source
