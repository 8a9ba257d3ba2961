import pytest
import torch

from headwise import MultiHeadAttention, Scoring, attend, causal, explain, padding, window
from headwise.attention.backends import Call
from headwise.attention.backends.blocks import QueryBlocks


def heads(T, S=None, dtype=torch.float32):
    return [torch.randn(2, 6, n, 16, dtype=dtype) for n in (T, S or T, S or T)]


@pytest.mark.parametrize(
    ("T", "S", "dtype", "mask", "path"),
    [
        (5, 5, torch.float32, None, "sdpa"),
        (400, 400, torch.float32, None, "sdpa"),
        (400, 400, torch.float32, causal(), "sdpa"),
        (512, 512, torch.float32, causal(), "blocks"),
        (1000, 1000, torch.float32, causal(), "sdpa"),
        (1000, 1000, torch.float32, causal() & window(50), "blocks"),
        (128, 128, torch.bfloat16, None, "float32"),
        (11, 40, torch.bfloat16, None, "sdpa"),
        (100, 100, torch.float16, causal(), "float32"),
        (1024, 1024, torch.bfloat16, causal() & window(50), "float32"),
        (300, 900, torch.float32, causal(), "sdpa"),
        (5, 0, torch.float32, None, "reference"),
    ],
    ids=str,
)
def test_the_table_decides(T, S, dtype, mask, path):
    q = torch.randn(2, 6, T, 16, dtype=dtype)
    k = torch.randn(2, 6, S, 16, dtype=dtype)
    assert explain(q, k, k, mask=mask).path == path


def test_explanation_says_why_each_faster_path_refused():
    told = explain(*heads(1000), mask=causal())
    assert told.path == "sdpa"
    assert told.kernel == "flash_attention"
    assert told.refused["blocks"] == "torch's own causal kernel is faster at this size"
    assert told.refused["flex"].startswith("it is for CUDA")
    assert str(told).splitlines() == [
        "path: sdpa (torch's fused scaled_dot_product_attention, kernel: flash_attention)",
        "mask: causal()",
        "refused: float32: it is for 16 bit on the CPU",
        "refused: selected: the mask is not a choice of blocks, blocks(...) & ...",
        "refused: blocks: torch's own causal kernel is faster at this size",
        "refused: flash: it is for CUDA",
        "refused: triangles: it is for CUDA",
        f"refused: flex: {told.refused['flex']}",
    ]


def test_explain_takes_a_layer_and_what_its_call_takes():
    layer = MultiHeadAttention(96, 6, causal=True, dropout=0.1)
    x = torch.randn(2, 512, 96)
    assert explain(layer.eval(), x).path == "blocks"
    training = explain(layer.train(), x)
    assert training.path == "sdpa"
    assert "dropout" in training.refused["blocks"]
    assert explain(layer, x, mask=padding([3, 512])).mask.startswith("causal() & padding")


def test_explain_takes_what_attend_takes():
    inputs = heads(128, dtype=torch.bfloat16)
    options = {
        "mask": window(3),
        "attn_bias": torch.zeros(128, 128),
        "dropout": 0.1,
        "scale": 0.5,
        "return_weights": True,
    }
    assert explain(*inputs, **options).path == "float32"
    attend(*inputs, **options)


def test_explain_takes_keywords_and_return_weights():
    q, k, v = heads(5)
    assert explain(query=q, key=k, value=v, return_weights=True).path == "sdpa"
    assert explain(MultiHeadAttention(96, 6), torch.randn(2, 5, 96), return_weights=True).path == "sdpa"


def test_bfloat16_is_widened_for_long_sequences_only_without_a_gradient():
    inputs = heads(700, dtype=torch.bfloat16)
    assert explain(*inputs).path == "float32"
    inputs[2].requires_grad_()
    assert explain(*inputs).path == "sdpa"
    assert explain(*(x[:, :, :500] for x in inputs)).path == "float32"


@pytest.fixture
def rounding_allowed():
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def test_the_switch_of_torch_allows_rounded_products(rounding_allowed):
    told = explain(*heads(128, dtype=torch.bfloat16))
    assert told.path == "blocks"
    assert told.refused["float32"] == "scores may be rounded, which is faster"
    assert explain(*heads(128, dtype=torch.float16)).path == "float32"


def test_too_many_scores_are_named_with_their_size(rounding_allowed):
    inputs = [torch.randn(40, 16, 512, 8, dtype=torch.bfloat16) for _ in range(3)]
    refusal = QueryBlocks().refuses(Call(*inputs, Scoring(), 0.0))
    assert "take 320 MiB in all, more than the limit of 128 MiB" in refusal
    assert explain(*inputs).path == "float32"


def test_blocks_say_why_they_refuse():
    reasons = {
        "too few queries": explain(*heads(5)),
        "no mask hides anything": explain(*heads(300)),
        "leaves most keys": explain(*heads(600), mask=window(400, 400)),
        "over all heads": explain(*heads(300), mask=window(20)),
    }
    for words, told in reasons.items():
        assert words in told.refused["blocks"]
