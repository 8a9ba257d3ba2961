"""`compat.MultiheadAttention` against `torch.nn.MultiheadAttention` in float64: the same numbers, or a named reason."""

import copy
import inspect
import itertools
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

from headwise import DeviceError, DtypeError, HeadCountError, HeadwiseError, MaskError, OptionError, ShapeError, compat

B, T, S, H, D = 2, 5, 7, 3, 11
E, KDIM, VDIM = H * D, 13, 17


def pair(seed=0, training=False, **options):
    """Torch's layer and ours, made alike."""
    options = {"dtype": torch.float64} | options
    layers = []
    for kind in (nn.MultiheadAttention, compat.MultiheadAttention):
        torch.manual_seed(seed)
        layers.append(kind(E, H, **options).train(training))
    for layer in layers:  # torch starts biases at zero, where a forgotten one would not be noticed
        for parameter in (layer.in_proj_bias, layer.out_proj.bias):
            if parameter is not None:
                torch.manual_seed(seed + 1)
                nn.init.normal_(parameter)
    return layers


def inputs(layer, unbatched=False, dtype=torch.float64):
    shapes = ((T, layer.embed_dim), (S, layer.kdim), (S, layer.vdim))
    if unbatched:
        return [torch.randn(shape, dtype=dtype) for shape in shapes]
    tensors = [torch.randn(B, *shape, dtype=dtype) for shape in shapes]
    return tensors if layer.batch_first else [x.transpose(0, 1) for x in tensors]


def table(kind, *shape):
    """A mask in torch's meaning that leaves every row its first key."""
    if kind == "float":
        return torch.randn(shape, dtype=torch.float64)
    hidden = torch.rand(shape) > 0.6
    hidden[..., 0] = False
    return hidden


ATTN_MASKS = {
    "no mask": lambda B: None,
    "bool 2-D": lambda B: table("bool", T, S),
    "bool 3-D": lambda B: table("bool", B * H, T, S),
    "float 2-D": lambda B: table("float", T, S),
    "float 3-D": lambda B: table("float", B * H, T, S),
}
PADDING_MASKS = {
    "no padding": lambda *shape: None,
    "bool padding": lambda *shape: table("bool", *shape),
    "float padding": lambda *shape: table("float", *shape),
}
OPTIONS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "widths": {"kdim": KDIM, "vdim": VDIM},
    "widths, batch first, no bias": {"kdim": KDIM, "vdim": VDIM, "batch_first": True, "bias": False},
    "bias kv": {"add_bias_kv": True},
    "zero attn": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
}


def assert_same(torchs, ours, query, key, value, **call):
    """Outputs, weights and all gradients of both layers."""
    results = []
    for layer in (torchs, ours):
        layer.zero_grad()
        leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Support for mismatched")  # torch's, of bool beside float
            output, weights = layer(*leaves, **call)
        loss = (output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).sum()
        loss = loss if weights is None else loss + weights.square().sum()
        loss.backward()
        results.append([output, weights, *(x.grad for x in leaves), *(p.grad for p in layer.parameters())])
    for expected, found in zip(*results, strict=True):
        assert (expected is None) == (found is None)
        if expected is not None:
            assert found.shape == expected.shape
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("unbatched", [False, True], ids=["batch", "one sequence"])
@pytest.mark.parametrize("padding", PADDING_MASKS)
@pytest.mark.parametrize("mask", ATTN_MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_weights_and_gradients_are_torchs(options, mask, padding, unbatched):
    torchs, ours = pair(**OPTIONS[options])
    tensors = inputs(torchs, unbatched)
    masks = {
        "attn_mask": ATTN_MASKS[mask](1 if unbatched else B),
        "key_padding_mask": PADDING_MASKS[padding](*((S,) if unbatched else (B, S))),
    }
    for weights in ({"need_weights": False}, {"average_attn_weights": True}, {"average_attn_weights": False}):
        assert_same(torchs, ours, *tensors, **masks, **weights)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_one_tensor_for_all_three_gives_torchs_numbers(native, training):
    for batch_first, need_weights, heads in itertools.product((True, False), (True, False), (2, 3)):
        layers = [
            kind(6, heads, batch_first=batch_first, dtype=torch.float64).train(training)
            for kind in (nn.MultiheadAttention, compat.MultiheadAttention)
        ]
        layers[1].load_state_dict(layers[0].state_dict())
        x, memory = torch.randn(B, T, 6, dtype=torch.float64), torch.randn(B, T, 6, dtype=torch.float64)
        torch.backends.mha.set_fastpath_enabled(native)
        try:
            for grad, key in itertools.product((True, False), (x, memory)):
                with torch.set_grad_enabled(grad):
                    expected, found = (layer(x, key, key, need_weights=need_weights) for layer in layers)
                torch.testing.assert_close(found[0], expected[0])
                torch.testing.assert_close(found[1], expected[1])
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_the_native_kernel_of_torch_is_used_for_weights_without_a_mask(monkeypatch):
    calls = []
    native = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: calls.append(1) or native(*args))
    layer = compat.MultiheadAttention(6, 2, batch_first=True).eval()
    x, mask = torch.randn(B, T, 6), torch.zeros(T, T, dtype=torch.bool)
    with torch.no_grad():
        layer(x, x, x, need_weights=False)
        layer(x, x, x, attn_mask=mask)
        assert not calls
        layer(x, x, x)
        assert calls


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("options", ["plain", "batch first", "both"])
def test_the_causal_promise_means_what_it_means_to_torch(options, need_weights):
    torchs, ours = pair(**OPTIONS[options])
    query, key, value = inputs(torchs)
    mask = torch.ones(T, S, dtype=torch.bool).triu(1)
    padding = table("bool", B, S)
    padding[:, 0] = False
    call = {"need_weights": need_weights, "is_causal": True}
    assert_same(torchs, ours, query, key, value, attn_mask=mask, **call)
    assert_same(torchs, ours, query, key, value, attn_mask=mask, key_padding_mask=padding, **call)
    assert_same(torchs, ours, query, query, query, attn_mask=mask[:, :T], **call)


def test_a_promised_causal_mask_is_not_looked_at():
    _, ours = pair(batch_first=True)
    x = torch.randn(B, T, E, dtype=torch.float64)
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    expected = ours(x, x, x, attn_mask=causal, need_weights=False)[0]
    found = ours(x, x, x, attn_mask=torch.full_like(causal, True), need_weights=False, is_causal=True)[0]
    torch.testing.assert_close(found, expected)
    with pytest.raises(MaskError, match=r"attn_mask of shape \(3, 3\)"):  # with weights it is looked at
        ours(x, x, x, attn_mask=causal[:3, :3], is_causal=True)


def test_masks_carry_gradients():
    torchs, ours = pair()
    tensors, grads = inputs(torchs), []
    for layer, need_weights in itertools.product((torchs, ours), (True, False)):
        torch.manual_seed(5)
        mask, padding = (table("float", *shape).requires_grad_() for shape in ((T, S), (B, S)))
        output, _ = layer(*tensors, attn_mask=mask, key_padding_mask=padding, need_weights=need_weights)
        output.square().sum().backward()
        grads.append((mask.grad, padding.grad))
    for found in grads[1:]:
        torch.testing.assert_close(found, grads[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_lower_precision_is_as_near_to_the_truth_as_torchs(dtype, need_weights):
    exact, _ = pair(batch_first=True)
    torchs, ours = (layer.to(dtype) for layer in pair(batch_first=True))
    x = torch.randn(B, 67, E, dtype=torch.float64)
    mask = torch.ones(67, 67, dtype=torch.bool).triu(1)
    truth, theirs, found = (
        layer(x.to(layer.in_proj_weight.dtype), *[x.to(layer.in_proj_weight.dtype)] * 2, attn_mask=mask)[0].double()
        for layer in (exact, torchs, ours)
    )
    eps = torch.finfo(dtype).eps
    assert (found - truth).abs().max() <= 2 * (theirs - truth).abs().max() + 2 * eps


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", ["no mask", "bool", "float"])
def test_large_weights_come_from_a_lazy_map_and_are_the_same(monkeypatch, kind, average):
    torchs, ours = pair()
    tensors = inputs(torchs)
    mask = None if kind == "no mask" else table(kind, B * H, T, S)
    monkeypatch.setattr(compat, "LARGE", 0)
    monkeypatch.setattr(compat, "_with_dense_weights", None)  # must not be called
    with torch.no_grad():
        expected = torchs(*tensors, attn_mask=mask, average_attn_weights=average)
        torch.testing.assert_close(ours(*tensors, attn_mask=mask, average_attn_weights=average), expected)
    with torch.inference_mode():
        found = ours(*tensors, attn_mask=mask, average_attn_weights=average)
        torch.testing.assert_close(found[1], expected[1])


def test_averaged_weights_never_exist_for_all_heads_together():
    """The largest tensor alive is the average itself, not one for each of 64 heads."""
    layer = compat.MultiheadAttention(64, 64, batch_first=True).eval()
    x = torch.randn(1, 600, 64)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(y.numel() for y in torch.utils._pytree.tree_leaves(result) if isinstance(y, torch.Tensor))
            return result

    with torch.no_grad(), Sizes():
        layer(x, x, x, key_padding_mask=torch.zeros(1, 600, dtype=torch.bool))
    assert max(sizes) < 64 * 600 * 600 / 8


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_same_seed_drops_the_same_weights(need_weights):
    torchs, ours = pair(training=True, dropout=0.3, batch_first=True)
    tensors = inputs(torchs)
    results = []
    for layer in (torchs, ours):
        torch.manual_seed(7)
        results.append(layer(*tensors, need_weights=need_weights))
    torch.testing.assert_close(results[1], results[0])
    if need_weights:  # torch's weights are those from after dropout, and so ours are here
        assert (results[1][1] == 0).any() or results[1][1].sum(-1).ne(1).any()


def test_dropout_of_everything_is_left_to_torch():
    for training in (True, False):
        torchs, ours = pair(training=training, dropout=1.0)
        tensors = inputs(torchs)
        torch.testing.assert_close(ours(*tensors), torchs(*tensors))


# What torch answers with NaN.


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_query_that_sees_no_key_reads_zeros_and_torch_gives_nan(monkeypatch, kind, lazy):
    monkeypatch.setattr(compat, "LARGE", 0 if lazy else compat.LARGE)
    torchs, ours = pair(batch_first=True)
    tensors = inputs(torchs)
    hidden = torch.zeros(T, S, dtype=torch.bool)
    hidden[2] = True
    if kind == "float":
        hidden = torch.zeros(T, S, dtype=torch.float64).masked_fill(hidden, -math.inf)
    with torch.set_grad_enabled(not lazy):
        expected, torchs_weights = torchs(*tensors, attn_mask=hidden, average_attn_weights=False)
        output, weights = ours(*tensors, attn_mask=hidden, average_attn_weights=False)
        without = ours(*tensors, attn_mask=hidden, need_weights=False)[0]
    assert expected[:, 2].isnan().all()
    assert torchs_weights[:, :, 2].isnan().all()
    assert (weights[:, :, 2] == 0).all()
    torch.testing.assert_close(output[:, 2], ours.out_proj.bias.expand(B, E))
    torch.testing.assert_close(without, output)
    rest = [0, 1, 3, 4]
    torch.testing.assert_close(output[:, rest], expected[:, rest])


def test_an_empty_sample_leaves_all_gradients_finite_where_torchs_are_nan():
    torchs, ours = pair()
    padding = torch.tensor([[False] * S, [True] * S])
    for layer, finite in ((torchs, False), (ours, True)):
        layer(*inputs(layer), key_padding_mask=padding)[0].sum().backward()
        assert layer.in_proj_weight.grad.isfinite().all() == finite


def test_keys_that_options_add_are_seen_where_all_others_are_hidden():
    torchs, ours = pair(add_bias_kv=True)
    hidden = torch.ones(T, S, dtype=torch.bool)
    assert_same(torchs, ours, *inputs(torchs), attn_mask=hidden)


# What old code relies on.


def test_constructor_and_call_have_torchs_signature():
    for name in ("__init__", "forward"):
        torchs, ours = (
            inspect.signature(getattr(kind, name)).parameters
            for kind in (nn.MultiheadAttention, compat.MultiheadAttention)
        )
        assert [(p.name, p.default, p.kind) for p in ours.values()] == [
            (p.name, p.default, p.kind) for p in torchs.values()
        ]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_seed_gives_torchs_parameters_and_state_dict(options):
    torchs, ours = pair(**OPTIONS[options])
    assert isinstance(ours, nn.MultiheadAttention)
    assert repr(ours) == repr(torchs)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    torch.testing.assert_close(dict(ours.state_dict()), dict(torchs.state_dict()))


def test_checkpoints_load_both_ways_and_layers_pickle(tmp_path):
    torchs, _ = pair(kdim=KDIM)
    torch.save(torchs.state_dict(), tmp_path / "layer.pt")
    other = compat.MultiheadAttention(E, H, kdim=KDIM, dtype=torch.float64)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    torchs.load_state_dict(other.state_dict())
    tensors = inputs(torchs)
    for layer in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other))):  # noqa: S301 - our own
        torch.testing.assert_close(layer(*tensors), torchs(*tensors))


def test_a_layer_from_before_torch_had_separate_widths_loads():
    layer = compat.MultiheadAttention(E, H)
    state = layer.__dict__ | {}
    del state["_qkv_same_embed_dim"]
    old = compat.MultiheadAttention.__new__(compat.MultiheadAttention)
    old.__setstate__(state)
    assert old._qkv_same_embed_dim


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_transformers_give_the_same_numbers_with_it(monkeypatch, training, batch_first):
    options = {"d_model": 8, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 13}
    options |= {"batch_first": batch_first, "dtype": torch.float64, "dropout": 0.2}
    torchs = nn.Transformer(**options).train(training)
    monkeypatch.setattr(nn.modules.transformer, "MultiheadAttention", compat.MultiheadAttention)
    ours = nn.Transformer(**options).train(training)
    assert type(ours.encoder.layers[0].self_attn) is compat.MultiheadAttention
    ours.load_state_dict(torchs.state_dict())
    source, target = torch.randn(B, S, 8, dtype=torch.float64), torch.randn(B, T, 8, dtype=torch.float64)
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    padding = torch.arange(S) >= torch.tensor([[S], [4]])
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    call = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
    for grad in (True, False):
        results = []
        for model in (torchs, ours):
            torch.manual_seed(11)
            with torch.set_grad_enabled(grad):
                results.append(model(source, target, src_key_padding_mask=padding, **call))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("options", ["plain", "widths", "both"])  # without bias torch's class does not script either
def test_torchscript_compiles_torchs_own_forward(options):
    torchs, ours = pair(**OPTIONS[options])
    tensors = inputs(torchs)
    for scripted in (torch.jit.script(ours), torch.jit.script(nn.ModuleList([ours]))[0]):
        torch.testing.assert_close(scripted(*tensors), torchs(*tensors))
    traced = torch.jit.trace(ours, tensors)
    torch.testing.assert_close(traced(*tensors), torchs(*tensors))
    assert type(ours) is compat.MultiheadAttention


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_take_torchs_native_kernel():
    layers = [kind(6, 2, batch_first=True).eval() for kind in (nn.MultiheadAttention, compat.MultiheadAttention)]
    layers[1].load_state_dict(layers[0].state_dict())
    nested = torch.nested.nested_tensor([torch.randn(5, 6), torch.randn(3, 6)])
    with torch.no_grad():
        expected, found = (layer(nested, nested, nested, need_weights=False)[0] for layer in layers)
    assert found.is_nested
    torch.testing.assert_close(found.to_padded_tensor(0.0), expected.to_padded_tensor(0.0))
    with pytest.raises(AssertionError, match="does not support NestedTensor outside of its fast path"):
        layers[1](nested, nested, nested)


def test_tensor_subclasses_see_torchs_function():
    class Loud(torch.Tensor):
        seen = ()

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Loud.seen = (*Loud.seen, func)
            return super().__torch_function__(func, types, args, kwargs or {})

    _, ours = pair()
    query, key, value = inputs(ours)
    ours(query.as_subclass(Loud), key, value)
    assert nn.functional.multi_head_attention_forward in Loud.seen


def test_a_default_device_leaves_the_work_to_our_core():
    _, ours = pair()
    hidden = torch.ones(T, S, dtype=torch.bool)
    with torch.device("cpu"):
        assert (ours(*inputs(ours), attn_mask=hidden)[1] == 0).all()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["no mask", "bool", "float"])
def test_it_compiles_without_a_graph_break(kind, need_weights):
    for training in (True, False):
        torch.compiler.reset()
        _, ours = pair(batch_first=True, training=training)
        tensors = inputs(ours)
        mask = None if kind == "no mask" else table(kind, T, S)
        compiled = torch.compile(ours, fullgraph=True, backend="eager")
        found = compiled(*tensors, attn_mask=mask, need_weights=need_weights)
        torch.testing.assert_close(found, ours(*tensors, attn_mask=mask, need_weights=need_weights))


def test_weights_and_output_are_twice_differentiable():
    layer = compat.MultiheadAttention(4, 2, dtype=torch.float64)
    mask = torch.tensor([[False, True, False], [True, True, True]])
    tensors = [torch.randn(n, 1, 4, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    assert torch.autograd.gradgradcheck(lambda *x: layer(*x, attn_mask=mask), tensors)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, on the first use of jvp
def test_forward_mode_and_vmap_go_through():
    torchs, ours = pair()
    tensors = inputs(torchs)
    tangents = [torch.randn_like(x) for x in tensors]
    torch.testing.assert_close(
        torch.func.jvp(lambda *x: ours(*x), tuple(tensors), tuple(tangents)),
        torch.func.jvp(lambda *x: torchs(*x), tuple(tensors), tuple(tangents)),
    )
    many = [torch.stack([x, 2 * x]) for x in tensors]
    mask = table("bool", T, S)
    found = torch.func.vmap(lambda *x: ours(*x, attn_mask=mask))(*many)
    torch.testing.assert_close(found[0][1], ours(*(2 * x for x in tensors), attn_mask=mask)[0])


def test_autocast_gives_torchs_dtypes():
    torchs, ours = pair(dtype=torch.float32, add_bias_kv=True)
    tensors = inputs(torchs, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for need_weights in (True, False):
            expected, found = (layer(*tensors, need_weights=need_weights) for layer in (torchs, ours))
            assert found[0].dtype == expected[0].dtype
            torch.testing.assert_close(found[0], expected[0], atol=0.03, rtol=0.03)
            if need_weights:
                assert found[1].dtype == expected[1].dtype


def test_a_mask_of_another_float_dtype_is_added_all_the_same():
    torchs, ours = pair()
    tensors, mask = inputs(torchs), table("float", T, S).float()
    for need_weights in (True, False):
        expected = torchs(*tensors, attn_mask=mask.double(), need_weights=need_weights)[0]
        torch.testing.assert_close(ours(*tensors, attn_mask=mask, need_weights=need_weights)[0], expected)


@pytest.mark.parametrize("sizes", [(0, T, S), (B, 0, S), (B, T, 0)], ids=["no sample", "no query", "no key"])
def test_empty_axes_give_empty_or_zero_results(sizes):
    _, ours = pair(batch_first=True)
    batch, queries, keys = sizes
    query, key = torch.randn(batch, queries, E).double(), torch.randn(batch, keys, E).double()
    for need_weights in (True, False):
        masks = {
            "key_padding_mask": torch.zeros(batch, keys, dtype=torch.bool),
            "attn_mask": torch.zeros(queries, keys),
        }
        output, weights = ours(query, key, key, need_weights=need_weights, **masks)
        torch.testing.assert_close(output, ours.out_proj.bias.expand(batch, queries, E) if not keys else output)
        assert output.shape == (batch, queries, E)
        assert weights is None or weights.shape == sizes


# What is refused.


def test_constructors_refuse_what_makes_no_layer():
    for error, options, message in (
        (ValueError, {"embed_dim": 0}, "embed_dim=0: expected a whole number from 1 up"),
        (OptionError, {"num_heads": 1.5}, "num_heads=1.5"),
        (OptionError, {"kdim": -3}, "kdim=-3"),
        (OptionError, {"dropout": 1.1}, "dropout=1.1: expected a probability from 0 to 1"),
        (HeadCountError, {"num_heads": 4}, "embed_dim=33 and num_heads=4: embed_dim must be divisible by num_heads"),
        (AssertionError, {"num_heads": 4}, "Pass a number of heads that divides 33"),
    ):
        with pytest.raises(error, match=message):
            compat.MultiheadAttention(**({"embed_dim": E, "num_heads": H} | options))


@pytest.mark.parametrize(
    ("errors", "changes", "message"),
    [
        ((DtypeError,), {"key": [1.0]}, "key is a list; expected a torch.Tensor"),
        ((DtypeError,), {"attn_mask": [[True]]}, "attn_mask is a list"),
        (
            (ShapeError, AssertionError),
            {"key": (S, E)},
            r"expected `key` and `value` to be 3-D but found 2-D and 3-D.*Given: query \(2, 5, 33\), key \(7, 33\)",
        ),
        ((ShapeError, AssertionError), {"query": (E,)}, r"but received 1-D query.*Expected: query \(B, T, 33\)"),
        ((ShapeError, AssertionError), {"query": (B, T, 4)}, r"wrong width. Given: query \(2, 5, 4\)"),
        ((ShapeError, RuntimeError), {"value": (B, S, 4)}, r"Expected: .*value \(B, S, 33\), or all three without B"),
        ((ShapeError, RuntimeError), {"query": (3, T, E)}, "batch sizes differ.*batch_first=True"),
        ((ShapeError, AssertionError), {"value": (B, 3, E)}, "every key needs one value"),
        ((DtypeError,), {"query": torch.ones(B, T, E).long()}, "query is torch.int64"),
        ((DtypeError,), {"query": torch.ones(B, T, E).double()}, "query is torch.float64 and key torch.float32"),
        ((MaskError, AssertionError), {"attn_mask": torch.ones(T, S).byte()}, "only bool and floating types of attn_m"),
        ((MaskError, AssertionError), {"key_padding_mask": torch.ones(B, S).int()}, r"pass key_padding_mask.bool\(\)"),
        ((MaskError, RuntimeError), {"attn_mask": torch.ones(S, T)}, r"attn_mask of shape \(7, 5\): exp.*= \(5, 7\)"),
        ((MaskError, RuntimeError), {"attn_mask": torch.ones(B, T, S)}, r"\(B·H, T, S\) = \(6, 5, 7\)"),
        ((MaskError, AssertionError), {"key_padding_mask": torch.ones(S, B)}, r"of shape \(7, 2\): .* = \(2, 7\)"),
        ((DeviceError,), {"attn_mask": torch.ones(T, S, device="meta")}, "bias is on meta"),
        ((OptionError, RuntimeError), {"is_causal": True}, "is_causal=True without attn_mask.*generate_square"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_input_is_refused_in_our_family_and_in_torchs(errors, changes, message):
    layer = compat.MultiheadAttention(E, H, batch_first=True)
    given = {"query": (B, T, E), "key": (B, S, E), "value": (B, S, E)} | changes
    given = {name: torch.randn(x) if isinstance(x, tuple) else x for name, x in given.items()}
    for training, need_weights in itertools.product((True, False), (True, False)):
        with torch.set_grad_enabled(training), pytest.raises(HeadwiseError, match=message) as caught:
            layer.train(training)(**given, need_weights=need_weights)
        assert all(isinstance(caught.value, error) for error in errors)


def test_unbatched_masks_are_checked_too():
    _, ours = pair()
    tensors = inputs(ours, unbatched=True)
    with pytest.raises(MaskError, match=r"key_padding_mask of shape \(5,\): expected \(B, S\) = \(1, 7\), without B"):
        ours(*tensors, key_padding_mask=torch.zeros(T, dtype=torch.bool))
    with pytest.raises(AssertionError, match=r"Expected `attn_mask` shape to be \(3, 5, 7\)"):
        ours(*tensors, attn_mask=torch.zeros(2 * H, T, S))


def test_a_layer_of_another_dtype_says_so():
    _, ours = pair(dtype=torch.float32)
    with pytest.raises(DtypeError, match="input is torch.float64 and weight torch.float32"):
        ours(*inputs(ours))
