"""`MultiHeadAttention`: every way to build and call it, against the reference in float64."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeness import assert_close_to_truth
from headwise import MultiHeadAttention, OptionError, ShapeError, causal, padding, prefix, reference, window

B, T, S = 2, 5, 7


def linears_of(layer, dtype=None):
    """The four projections as the reference takes them."""
    weights, biases = layer.projections()
    pairs = [*zip(weights, biases, strict=True)]
    if layer.out_proj is not None:
        pairs.append((layer.out_proj.weight, layer.out_proj.bias))

    def cast(x):
        return None if x is None else x.detach().to(dtype or x.dtype)

    linears = [reference.Linear(cast(w), cast(b)) for w, b in pairs]
    return (*linears, *(None,) * (4 - len(linears)))


def by_reference(layer, query, key=None, value=None, *, visible=None, bias=None, dtype=torch.float64):
    key = query if key is None else key
    value = key if value is None else value
    inputs = [x.to(dtype) for x in (query, key, value)]
    return reference.multi_head_attention(
        *inputs, linears_of(layer, dtype), layer.num_heads, layer.num_kv_heads, visible=visible, bias=bias
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kv_heads", [6, 3, 2, 1])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"bias": {"out"}}, {"out_proj": False}], ids=str)
def test_self_and_cross_attention_match_the_reference(dtype, kv_heads, options):
    layer = MultiHeadAttention(66, 6, num_kv_heads=kv_heads, dtype=dtype, **options)
    for length in (T, 67, 301):
        x, memory = torch.randn(B, length, 66).to(dtype), torch.randn(B, S, 66).to(dtype)
        for inputs in (
            (x,),
            (x, memory),
            (x, memory, memory + 1),
            (x, x, x),
            (x, x, memory.repeat(1, 50, 1)[:, :length]),
        ):
            truth, _ = by_reference(layer, *inputs)
            plain, _ = by_reference(layer, *inputs, dtype=dtype)
            for train, grad in itertools.product((True, False), (True, False)):
                with torch.set_grad_enabled(grad):
                    output = layer.train(train)(*inputs)
                assert_close_to_truth(output.detach(), truth, plain, factor=3)


@pytest.mark.parametrize("kv_heads", [6, 2])
def test_parameters_get_the_reference_gradients(kv_heads):
    layer = MultiHeadAttention(66, 6, num_kv_heads=kv_heads, causal=True, dtype=torch.float64)
    twin = copy.deepcopy(layer)
    x = torch.randn(B, 67, 66, dtype=torch.float64)
    layer(x).square().sum().backward()
    weights, biases = twin.projections()  # still part of the graph
    linears = [reference.Linear(w, b) for w, b in zip(weights, biases, strict=True)]
    linears.append(reference.Linear(twin.out_proj.weight, twin.out_proj.bias))
    output, _ = reference.multi_head_attention(x, x, x, tuple(linears), 6, kv_heads, visible=causal().to_tensor(67))
    output.square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, twin.get_parameter(name).grad)


@pytest.mark.parametrize(
    "widths", [{"d_key": 11}, {"d_key": 11, "d_value": 13}, {"d_value": 13}, {"d_in": 17}], ids=str
)
def test_inputs_of_different_widths(widths):
    layer = MultiHeadAttention(18, 3, d_out=19, dtype=torch.float64, **widths)
    query = torch.randn(B, T, layer.d_in, dtype=torch.float64)
    key = torch.randn(B, S, layer.d_key, dtype=torch.float64)
    value = torch.randn(B, S, layer.d_value, dtype=torch.float64)
    output, weights = layer(query, key, value, return_weights=True)
    truth, exact = by_reference(layer, query, key, value)
    assert output.shape == (B, T, 19)
    torch.testing.assert_close(output, truth)
    torch.testing.assert_close(weights[:], exact)


def test_second_argument_may_be_the_mask():
    layer = MultiHeadAttention(18, 3)
    x = torch.randn(B, T, 18)
    pattern = torch.ones(T, T).tril()
    expected = layer(x, mask=causal())
    for mask in (causal(), pattern, pattern.bool(), pattern[None, None]):
        torch.testing.assert_close(layer(x, mask), expected)
        torch.testing.assert_close(layer(x, x, x, mask), expected)


def test_layers_own_mask_joins_the_mask_of_the_call():
    layer = MultiHeadAttention(18, 3, causal=True, mask=window(2), dtype=torch.float64)
    x = torch.randn(B, T, 18, dtype=torch.float64)
    mask = padding([T, 2])
    visible = (causal() & window(2) & mask).to_tensor(T)
    torch.testing.assert_close(layer(x, mask=mask), by_reference(layer, x, visible=visible)[0])


def test_causal_can_be_asked_for_in_the_call_and_is_never_ignored():
    layer = MultiHeadAttention(18, 3, dtype=torch.float64)
    x = torch.randn(B, T, 18, dtype=torch.float64)
    truth, _ = by_reference(layer, x, visible=causal().to_tensor(T))
    for train, grad in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(layer.train(train)(x, causal=True), truth)


def test_causal_false_cannot_lift_a_causal_layer():
    with pytest.raises(OptionError, match=r"cannot undo .*causal=True"):
        MultiHeadAttention(18, 3, causal=True)(torch.randn(1, 4, 18), causal=False)


def test_causal_false_adds_nothing_to_another_mask():
    layer, x = MultiHeadAttention(18, 3, mask=window(1)), torch.randn(B, T, 18)
    assert torch.equal(layer(x, causal=False), layer(x))


def test_layers_mask_can_be_replaced_and_moves_with_the_layer():
    layer, x = MultiHeadAttention(18, 3, causal=True), torch.randn(B, T, 18)
    layer.mask = None
    assert torch.equal(layer(x), layer(x, attn_bias=torch.zeros(T, T)))
    layer.mask = padding([T, 3])
    torch.testing.assert_close(layer(x), layer(x, attn_bias=torch.zeros(T, T)))
    assert layer.to("meta")(x.to("meta")).is_meta
    assert layer.to_empty(device="cpu").mask.to_tensor(T).shape == (B, 1, T, T)  # what no state dict brings back


def test_weights_come_before_dropout_and_sum_to_one():
    layer = MultiHeadAttention(18, 3, dropout=0.5)
    x = torch.randn(B, T, 18)
    _, weights = layer(x, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, 3, T))
    torch.testing.assert_close(weights[:], layer.eval()(x, return_weights=True)[1][:])


def test_return_weights_can_be_the_layers_habit():
    layer = MultiHeadAttention(d_model=512, num_heads=8, return_weights=True)
    output, attention = layer(torch.randn(2, 10, 512))
    assert output.shape == (2, 10, 512)
    assert attention.shape == (2, 8, 10, 10)
    assert isinstance(layer(torch.randn(2, 10, 512), return_weights=False), torch.Tensor)


def test_bias_is_added_to_the_scores_and_learns():
    layer = MultiHeadAttention(18, 3, dtype=torch.float64)
    x = torch.randn(B, T, 18, dtype=torch.float64)
    bias = torch.randn(1, 3, T, T, dtype=torch.float64, requires_grad=True)
    output = layer(x, attn_bias=bias)
    torch.testing.assert_close(output, by_reference(layer, x, bias=bias)[0])
    output.sum().backward()
    assert bias.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("train", [True, False])
def test_fully_padded_sample_gives_the_output_bias_and_finite_gradients(dtype, train):
    layer = MultiHeadAttention(18, 3, dtype=dtype).train(train)
    for length in (T, 67, 301):
        layer.zero_grad()
        x = torch.randn(B, length, 18, dtype=dtype, requires_grad=True)
        output = layer(x, mask=padding([0, length]))
        torch.testing.assert_close(output[0], layer.out_proj.bias.expand(length, -1))
        output.float().square().sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
def test_empty_batch_and_empty_sequence(batch, length):
    layer = MultiHeadAttention(18, 3, causal=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert layer(torch.randn(batch, length, 18)).shape == (batch, length, 18)


def test_memory_of_length_zero_gives_the_output_bias():
    layer = MultiHeadAttention(18, 3)
    output = layer(torch.randn(B, T, 18), torch.randn(B, 0, 18))
    torch.testing.assert_close(output, layer.out_proj.bias.expand(B, T, -1))


def test_context_length_is_a_promise_and_costs_nothing():
    layer = MultiHeadAttention(18, 3, context_length=6)
    assert layer(torch.randn(1, 6, 18)).shape == (1, 6, 18)
    assert not list(layer.buffers())
    with pytest.raises(ShapeError, match=r"7 tokens .*context_length=6"):
        layer(torch.randn(1, 7, 18))
    with pytest.raises(ShapeError, match="9 tokens"):
        layer(torch.randn(1, 2, 18), torch.randn(1, 9, 18))


def test_sequences_of_any_length_work_without_a_context_length():
    layer = MultiHeadAttention(6, 3, causal=True)
    assert layer(torch.randn(1, 5000, 6)).shape == (1, 5000, 6)


def test_autocast_computes_in_half_precision():
    layer = MultiHeadAttention(66, 6, causal=True)
    for length in (T, 67, 301):
        x = torch.randn(B, length, 66)
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(x, mask=padding([length, 3]))
        truth, _ = by_reference(layer, x, visible=(causal() & padding([length, 3])).to_tensor(length))
        assert output.dtype == torch.bfloat16
        assert (output.double() - truth).abs().max() < 0.05


def test_copy_pickle_and_state_dict_keep_everything(tmp_path):
    layer = MultiHeadAttention(18, 6, num_kv_heads=3, causal=True, mask=prefix(3), dropout=0.3).eval()
    x = torch.randn(B, T, 18)
    expected = layer(x)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    fresh = MultiHeadAttention(18, 6, num_kv_heads=3, causal=True, mask=prefix(3), dropout=0.3).eval()
    fresh.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):  # noqa: S301
        torch.testing.assert_close(other(x), expected)


def test_meta_device_gives_shapes():
    with torch.device("meta"):
        layer = MultiHeadAttention(18, 3, causal=True)
        x = torch.randn(B, 301, 18)
    assert layer(x).device.type == "meta"
    assert layer(x, mask=causal() & window(3)).shape == (B, 301, 18)
    assert layer(x, return_weights=True)[1].shape == (B, 3, 301, 301)


def test_dtype_and_device_conversion():
    layer = MultiHeadAttention(18, 3).to(torch.bfloat16)
    assert layer(torch.randn(B, T, 18, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("grad", [True, False])
def test_hooks_on_projections_are_called(grad):
    layer = MultiHeadAttention(18, 3)
    seen = []
    layer.qkv_proj.register_forward_hook(lambda *_: seen.append("qkv"))
    layer.out_proj.register_forward_pre_hook(lambda *_: seen.append("out"))
    with torch.set_grad_enabled(grad):
        layer(torch.randn(B, T, 18))
    assert seen == ["qkv", "out"]


@pytest.mark.parametrize("grad", [True, False])
def test_patched_forward_of_a_projection_is_obeyed(grad):
    layer, x, memory = MultiHeadAttention(18, 3), torch.randn(B, T, 18), torch.randn(B, S, 18)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in (*twin.qkv_proj.parameters(), *twin.out_proj.parameters()):
            parameter.mul_(2)
    for linear in (layer.qkv_proj, layer.out_proj):
        linear.forward = lambda y, forward=linear.forward: 2 * forward(y)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(x), twin(x))
        torch.testing.assert_close(layer(x, memory), twin(x, memory))


def test_backward_hooks_on_the_fused_projection_see_cross_attention():
    layer, seen = MultiHeadAttention(18, 3), []
    layer.qkv_proj.register_full_backward_hook(lambda *_: seen.append(1))
    layer(torch.randn(B, T, 18, requires_grad=True), torch.randn(B, S, 18, requires_grad=True)).sum().backward()
    assert seen


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("grad", [True, False])
def test_projections_can_be_replaced_by_adapters(grad):
    layer = MultiHeadAttention(18, 3)
    x = torch.randn(B, T, 18)
    expected = 2 * layer(x)
    layer.out_proj = Doubled(layer.out_proj)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("grad", [True, False])
def test_adapter_on_the_fused_projection_acts_in_cross_attention_too(grad):
    layer = MultiHeadAttention(18, 6, num_kv_heads=3)
    doubled = copy.deepcopy(layer)
    with torch.no_grad():
        doubled.qkv_proj.weight.mul_(2)
        doubled.qkv_proj.bias.mul_(2)
    layer.qkv_proj = Doubled(layer.qkv_proj)
    x, memory = torch.randn(B, T, 18), torch.randn(B, S, 18)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(layer(x, memory), doubled(x, memory))
        torch.testing.assert_close(layer(x), doubled(x))


class Whole(Tensor):
    """A weight that knows only `F.linear` with all of its rows, as quantized weights do."""

    @staticmethod
    def __new__(cls, plain):
        made = Tensor._make_wrapper_subclass(cls, plain.shape, dtype=plain.dtype)
        made.plain = plain
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), options=None):
        if function is F.linear:
            return function(args[0], args[1].plain, *args[2:], **options or {})
        return super().__torch_function__(function, types, args, options or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), options=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].plain)
        raise NotImplementedError(f"{function} of a quantized weight")


@pytest.mark.parametrize("kv_heads", [6, 3])
def test_cross_attention_works_with_weights_that_cannot_be_sliced(kv_heads):
    layer = MultiHeadAttention(18, 6, num_kv_heads=kv_heads).eval()
    x, memory, value = torch.randn(B, T, 18), torch.randn(B, S, 18), torch.randn(B, S, 18)
    with torch.no_grad():
        expected = layer(x, memory), layer(x, memory, value), layer(x, layer.remember(memory))
        for linear in (layer.qkv_proj, layer.out_proj):
            linear.weight = nn.Parameter(Whole(linear.weight.data))
        with pytest.raises(NotImplementedError):
            layer.qkv_proj.weight[:3]
        found = layer(x, memory), layer(x, memory, value), layer(x, layer.remember(memory))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_cross_attention_on_a_fused_layer_copies_no_weight():
    layer = MultiHeadAttention(264, 6, num_kv_heads=3)
    x, memory = torch.randn(1, 1, 264), torch.randn(1, 2, 264)
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as seen:
        layer(x, memory)
    largest = max(event.cpu_memory_usage for event in seen.events())
    assert largest < layer.qkv_proj.weight.nbytes / 10


def test_fused_rows_are_whole_heads():
    # Half of the fused rows and half of the output columns are half of the heads: what tensor parallelism needs.
    layer = MultiHeadAttention(24, 6, num_kv_heads=2, bias=False, causal=True, dtype=torch.float64)
    x = torch.randn(B, T, 24, dtype=torch.float64)
    total = torch.zeros(B, T, 24, dtype=torch.float64)
    for part in range(2):
        half = MultiHeadAttention(
            12, 3, num_kv_heads=1, d_in=24, d_out=24, bias=False, causal=True, dtype=torch.float64
        )
        half.qkv_proj.weight.data = layer.qkv_proj.weight.data.chunk(2)[part]
        half.out_proj.weight.data = layer.out_proj.weight.data.chunk(2, dim=1)[part]
        total += half(x)
    torch.testing.assert_close(total, layer(x))


def test_repr_names_what_is_not_usual():
    text = repr(MultiHeadAttention(18, 6, num_kv_heads=3, d_key=5, causal=True, dropout=0.1, context_length=9))
    assert "18, 6, num_kv_heads=3, d_key=5, mask=causal(), dropout=0.1, context_length=9" in text
