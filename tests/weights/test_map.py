"""An attention map gives what a dense tensor would give, and refuses what it cannot."""

import copy
import gc
import math
import pickle
import re
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closeness import assert_close_to_truth
from headwise import (
    AttentionMap,
    MapIndexError,
    MapSizeError,
    MaskError,
    MultiHeadAttention,
    OptionError,
    Scoring,
    StaleMapError,
    attend,
    causal,
    dense,
    documents,
    induction,
    padding,
    prefix,
    previous_token,
    reference,
    same_token,
    sink,
    window,
)
from headwise.errors import install_command
from headwise.layer.inputs import LayerInputs

B, H, Hkv, T, S, D = 2, 6, 3, 5, 11, 7


def made(mask=None, dtype=torch.float64, bias=None, softcap=None, sinks=None, sizes=(B, H, Hkv, T, S, D), grad=False):
    """A map and its dense truth."""
    b, h, hkv, t, s, d = sizes
    query, key = (torch.randn(b, n, m, d, dtype=dtype, requires_grad=grad) for n, m in ((h, t), (hkv, s)))
    visible = None if mask is None else mask.to_tensor(t, s)
    precise = [x.detach().double() for x in (query, key)]
    _, truth = reference.attend(
        *precise,
        precise[1],
        visible=visible,
        bias=None if bias is None else bias.double(),
        softcap=softcap,
        sinks=None if sinks is None else sinks.double(),
    )
    return AttentionMap(query, key, Scoring(mask, bias, None, softcap, sinks)), truth


INDICES = {
    "nothing": (),
    "a sample": 0,
    "a head": (1, 4),
    "a row": (1, -6, 2),
    "one weight": (0, 5, -1, 3),
    "slices": (slice(None), slice(1, 6, 2), slice(-3, None), slice(0, 20, 3)),
    "an ellipsis": (..., 2),
    "an ellipsis within": (0, ..., slice(1, 4)),
    "a list of heads": (0, [1, 5, 1]),
    "a tensor of rows": (slice(None), 2, torch.tensor([3, -1])),
    "an array of keys": (..., np.array([0, 10, 4])),
    "a bool mask of rows": (0, 0, torch.tensor([True, False, True, False, False])),
    "numbers of other kinds": (torch.tensor(1), np.int64(2)),
    "a truth value": (0, torch.tensor(False)),
    "two tensors": (0, slice(None), torch.tensor([0, 4]), torch.tensor([2, 3])),
    "a table of heads": (slice(None), torch.tensor([[0, 1], [4, 5]])),
    "a new axis": (None, 0, 3),
    "an empty slice": (slice(1, 1), ...),
    "an empty list": (0, [], 1),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_indexing_gives_what_the_dense_tensor_gives(index):
    weights, truth = made(causal() & window(6))
    expected = truth[index]
    assert weights[index].shape == expected.shape
    torch.testing.assert_close(weights[index], expected)


@given(st.data())
def test_any_block_is_the_dense_block(data):
    weights, truth = made(causal())
    index = []
    for size in weights.shape:
        bound = st.integers(-size - 2, size + 2) | st.none()
        steps = st.integers(1, 4) | st.none()
        item = st.builds(slice, bound, bound, steps) | st.integers(-size, size - 1)
        index.append(data.draw(item | st.lists(st.integers(-size, size - 1), max_size=3)))
    while sum(isinstance(item, list) for item in index) > 1:
        index[next(i for i, item in enumerate(index) if isinstance(item, list))] = slice(None)
    torch.testing.assert_close(weights[tuple(index)], truth[tuple(index)])


def test_bad_indices_say_what_is_there():
    weights, _ = made()
    for index, message in {
        (0, 6): "head 6 is out of range: the map has 6 heads, 0 to 5",
        (0, 0, -6): "query -6 is out of range: the map has 5 queries",
        (..., 11): "key 11 is out of range: the map has 11 keys",
        (-3,): "sample -3 is out of range: the map has 2 samples",
        (0, 0, 0, 0, 0): "with 5 indices: a map has 4 axes",
        (..., 0, ...): "only have one ellipsis",
        (0, 0.5): "out of range|float|valid indices",
    }.items():
        with pytest.raises(MapIndexError, match=message):
            weights[index]
    with pytest.raises(MapIndexError, match="the step must be above 0"):
        weights[::-1]
    with pytest.raises(MapIndexError, match="head 7 is out of range"):
        weights[0, [1, 7]]
    with pytest.raises(MapIndexError, match="mask of length 2: the map has 6 heads"):
        weights[0, torch.tensor([True, False])]
    with pytest.raises(IndexError):  # what a Python user would catch
        weights[2]
    with pytest.raises(TypeError, match="read only"):
        weights[0, 0, 0, 0] = 1.0


def test_map_describes_itself_without_computing(monkeypatch):
    weights, _ = made()
    monkeypatch.setattr(torch, "bmm", None)
    monkeypatch.setattr("headwise.weights.streaming.read", None)
    monkeypatch.setattr("headwise.weights.streaming.normalizer", None)
    assert repr(weights) == "AttentionMap(B=2, H=6, T=5, S=11, float64, cpu)"
    assert weights.shape == (2, 6, 5, 11)
    assert (weights.dtype, weights.device, weights.ndim, weights.dim()) == (torch.float64, torch.device("cpu"), 4, 4)
    assert (weights.size(-1), weights.numel(), len(weights)) == (11, 660, 6)
    assert "requires_grad" in repr(made(grad=True)[0])


def test_iterating_gives_a_map_of_each_head():
    weights, truth = made(causal())
    heads = list(weights)
    assert len(heads) == len(weights) == H
    for number, head in enumerate(heads):
        assert isinstance(head, AttentionMap)
        torch.testing.assert_close(head[:, 0], truth[:, number])


def test_torch_functions_work_on_a_map():
    weights, truth = made(causal())
    assert torch.allclose(weights, truth)
    assert torch.allclose(truth, weights)
    assert torch.equal(torch.argmax(weights, -1), truth.argmax(-1))
    for name in ("sum", "mean", "amax"):
        for dim in (0, 1, 2, 3, -1, -2, (1,), (2, 3)):
            for keepdim in (False, True):
                expected = getattr(truth, name)(dim, keepdim)
                torch.testing.assert_close(getattr(weights, name)(dim=dim, keepdim=keepdim), expected)
                torch.testing.assert_close(getattr(torch, name)(weights, dim, keepdim), expected)
    torch.testing.assert_close(weights.sum(), truth.sum())
    torch.testing.assert_close(torch.mean(weights), truth.mean())
    torch.testing.assert_close(weights.max(), truth.max())
    for dim in (-1, 1):
        found, expected = weights.max(dim=dim), truth.max(dim=dim)
        torch.testing.assert_close(found.values, expected.values)
        assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(torch.max(weights, truth * 2), truth * 2)
    torch.testing.assert_close(torch.stack([weights, weights]), torch.stack([truth, truth]))
    torch.testing.assert_close(weights.transpose(2, 3), truth.transpose(2, 3))
    torch.testing.assert_close(weights.float(), truth.float())


def test_arithmetic_works_on_a_map():
    weights, truth = made()
    value = torch.randn(S, 3, dtype=torch.float64)
    for found, expected in (
        (weights * 2, truth * 2),
        (1 - weights, 1 - truth),
        (weights @ value, truth @ value),
        (weights + weights, truth + truth),
        (truth - weights, torch.zeros_like(truth)),
        (-weights, -truth),
    ):
        torch.testing.assert_close(found, expected)
    assert (weights >= 0).all()
    assert (weights == weights).all()
    assert len({weights, weights}) == 1
    with pytest.raises(TypeError, match="ambiguous"):
        bool(weights)
    assert not hasattr(weights, "nonsense")


def test_numpy_reads_a_map():
    weights, truth = made(causal())
    np.testing.assert_allclose(np.asarray(weights), truth.numpy())
    assert np.array(weights, dtype=np.float32).dtype == np.float32
    np.testing.assert_allclose(weights.detach().cpu().numpy(), truth.numpy())
    np.testing.assert_allclose(np.mean(weights), truth.mean())
    with pytest.raises(ValueError, match="always a copy"):
        np.asarray(weights, copy=False)
    half = AttentionMap(torch.randn(1, 1, 3, 4).bfloat16(), torch.randn(1, 1, 3, 4).bfloat16())
    assert np.asarray(half).dtype == np.float32


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # torch's own, of the tensor
def test_matplotlib_draws_a_head():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    weights, truth = made(causal())
    image = plt.imshow(weights[0, 3])
    np.testing.assert_allclose(image.get_array(), truth[0, 3].numpy())
    plt.close("all")


def test_dense_tensor_is_refused_past_a_limit_with_the_size_and_the_cure():
    long = AttentionMap(
        torch.zeros(1, 32, 1, 8).expand(-1, -1, 65536, -1), torch.zeros(1, 32, 1, 8).expand(-1, -1, 65536, -1)
    )
    with pytest.raises(MapSizeError, match=r"to_tensor\(\) would take 512 GiB, more than the limit of 1 GiB.*pooled"):
        long.to_tensor()
    with pytest.raises(MemoryError, match=r"weights\[0\] would take 512 GiB"):
        long[0]
    with pytest.raises(MapSizeError):
        torch.allclose(long, torch.zeros(()))
    weights, truth = made()
    with pytest.raises(MapSizeError, match=r"5.156 KiB, more than the limit of 100 bytes"):
        weights.to_tensor(limit=100)
    torch.testing.assert_close(weights.to_tensor(limit=5280), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_as_exact_as_plain_float32(dtype):
    weights, truth = made(causal(), dtype, sizes=(1, 2, 1, 301, 301, 64))
    exact = [x.float() for x in (weights._query, weights._key)]
    _, plain = reference.attend(*exact, exact[1], visible=causal().to_tensor(301))
    assert weights[:].dtype == dtype
    assert_close_to_truth(weights[:], truth, plain)


def test_select_narrows_without_computing():
    mask = dense(torch.rand(B, H, T, S) > 0.3)
    weights, truth = made(mask, bias=torch.randn(B, H, T, S, dtype=torch.float64))
    for heads in (4, -1, slice(2, 4), slice(1, 4), [5, 0], torch.tensor([2])):
        for rows in (None, slice(1, None, 2), [4, 0], -2):
            part = weights.select(heads=heads, rows=rows)
            index_h = [heads] if isinstance(heads, int) else heads
            expected = truth[:, index_h]
            expected = expected if rows is None else expected[:, :, [rows] if isinstance(rows, int) else rows]
            torch.testing.assert_close(part[:], expected)
            torch.testing.assert_close(part.entropy(), torch.special.entr(expected).sum(-1))
            torch.testing.assert_close(part.mass(sink(2)), expected[..., :2].sum(-1))
    part = weights.select(batch=1, rows=slice(2, None)).select(heads=[3, 1], rows=[2, 0])
    torch.testing.assert_close(part[:], truth[1:][:, [3, 1]][:, :, [4, 2]])
    with pytest.raises(MapIndexError, match="head 6 is out of range"):
        weights.select(heads=6)
    with pytest.raises(MapIndexError, match="expected an int, a slice"):
        weights.select(rows="first")


def test_selected_rows_keep_their_place_for_probes_and_distances():
    weights, _ = made(causal(), sizes=(1, 2, 1, 40, 40, 8))
    part = weights.select(rows=[7, 30, 8])
    torch.testing.assert_close(part.mass(previous_token()), weights.mass(previous_token())[:, :, [7, 30, 8]])
    torch.testing.assert_close(part.distance().mean, weights.distance().mean[:, :, [7, 30, 8]])
    ids = torch.arange(40) % 9
    torch.testing.assert_close(part.mass(induction(ids)), weights.mass(induction(ids))[:, :, [7, 30, 8]])


def test_taking_a_probe_out_scales_the_rest_up_to_one():
    weights, truth = made(causal(), sizes=(2, 3, 3, 9, 9, 4))
    rest = weights.without(sink(1))
    expected = truth.clone()
    expected[..., 0] = 0
    expected = expected / expected.sum(-1, keepdim=True).clamp(min=1e-300)
    torch.testing.assert_close(rest[:], expected)


@pytest.mark.parametrize("form", ["detach", "cpu", "clone", "to", "save"])
def test_maps_are_kept_for_later(form, tmp_path):
    mask = (causal() & padding([11, 6])) | prefix(2) & documents(lengths=[4, 7]) & ~dense(torch.rand(T, S) > 0.9)
    weights, truth = made(
        mask, sinks=torch.randn(H, dtype=torch.float64), bias=torch.randn(T, S, dtype=torch.float64), grad=True
    )
    weights = weights.select(heads=[1, 4], rows=slice(1, 4))
    if form == "save":
        pytest.importorskip("safetensors")
        weights.save(tmp_path / "map.safetensors")
        kept = AttentionMap.load(tmp_path / "map.safetensors")
    else:
        kept = getattr(weights, form)(*(["cpu"] if form == "to" else []))
    torch.testing.assert_close(kept[:].detach(), truth[:, [1, 4], 1:4])
    torch.testing.assert_close(kept.entropy().detach(), weights.entropy().detach())
    assert kept.requires_grad == (form not in ("detach", "save"))


def test_loading_something_else_is_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not a saved attention map"):
        AttentionMap.load(tmp_path / "other.safetensors")


def test_missing_safetensors_is_named_with_its_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ImportError, match=re.escape(install_command("save"))):
        made()[0].save(tmp_path / "map.safetensors")


def test_a_map_never_shows_keys_that_were_overwritten():
    query, cache = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 9, 4)
    _, weights = attend(query, cache, cache, return_weights=True)
    kept, before = weights.clone(), weights[:]
    cache[:, :, 5] = 0.0
    for look in (
        lambda: weights[0],
        weights.entropy,
        weights.to_tensor,
        lambda: weights.select(heads=0),
        weights.clone,
    ):
        with pytest.raises(StaleMapError, match="changed in place"):
            look()
    torch.testing.assert_close(kept[:], before)
    mask = torch.ones(3, 9, dtype=torch.bool)
    _, weights = attend(query, cache, cache, mask=mask, return_weights=True)
    mask[0] = False
    with pytest.raises(StaleMapError):
        weights.peak()


def test_in_inference_mode_a_map_holds_its_own_copy():
    with torch.inference_mode():
        query, cache = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 9, 4)
        _, weights = attend(query, cache, cache, return_weights=True)
        before = weights[:]
        cache.zero_()
        torch.testing.assert_close(weights[:], before)


def test_gradients_of_single_weights_pass_gradcheck():
    def tile(query, key, bias, sinks):
        weights = AttentionMap(query, key, Scoring(causal() & padding([7, 1]), bias, None, 3.0, sinks))
        return weights[0, 2, 1:4, [0, 3]], weights[..., -1], weights[torch.tensor([0, 1]), 1, torch.tensor([2, 0]), 0]

    shapes = ((2, 4, 5, 3), (2, 2, 7, 3), (1, 4, 5, 7), (4,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(tile, inputs)
    assert torch.autograd.gradcheck(lambda *x: AttentionMap(x[0], x[1], Scoring(window(2, 2))).to_tensor(), inputs[:2])


def test_second_derivatives_are_refused_and_not_dropped():
    weights, _ = made(causal(), grad=True)
    with pytest.raises(OptionError, match="differentiated once"):
        torch.autograd.grad(weights.entropy().sum(), weights._query, create_graph=True)


def test_a_loss_on_a_statistic_trains_the_layer():
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(32, 2, causal=True), torch.randn(1, 24, 32)
    optimizer = torch.optim.Adam(layer.parameters(), 0.02)
    before = None
    for _ in range(30):
        _, weights = layer(x, return_weights=True)
        mass = weights.mass(previous_token()).mean()
        before = mass.item() if before is None else before
        optimizer.zero_grad()
        (-mass).backward()
        optimizer.step()
    assert mass.item() > before + 0.3


def test_output_and_weights_share_one_backward_pass():
    layer, x = MultiHeadAttention(32, 2, causal=True), torch.randn(1, 300, 32)
    output, weights = layer(x, return_weights=True)
    (output.sum() + weights.entropy().sum()).backward()
    grad = layer.qkv_proj.weight.grad.clone()
    layer.zero_grad()
    output, weights = layer(x, return_weights=True)
    entropy = torch.special.entr(weights.to_tensor().double()).sum()
    (output.sum() + entropy).backward()
    torch.testing.assert_close(grad, layer.qkv_proj.weight.grad, rtol=1e-3, atol=1e-3)


def test_a_map_can_be_read_after_its_graph_is_freed_but_not_trained():
    layer, x = MultiHeadAttention(32, 2), torch.randn(1, 6, 32)
    output, weights = layer(x, return_weights=True)
    output.sum().backward()
    assert weights.entropy().isfinite().all()
    with pytest.raises(RuntimeError, match="second time"):
        weights.entropy().sum().backward()


def test_weights_come_with_the_output_of_the_same_kernel():
    layer = MultiHeadAttention(96, 6, num_kv_heads=3, causal=True)
    x = torch.randn(2, 800, 96)
    output, weights = layer(x, return_weights=True)
    assert torch.equal(output, layer(x))
    assert weights._lse is not None, "the fused kernel's log-sum-exp was not taken"
    call = layer.plan(LayerInputs(x))
    _, truth = reference.attend(*(y.double() for y in call[:3]), visible=causal().to_tensor(800))
    torch.testing.assert_close(weights[:].double(), truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"mask": "window"}, {"dropout": 0.5}, {"attn_bias": True}, {"causal": True}, {}], ids=str
)
@pytest.mark.parametrize("length", [7, 300, 1100])
def test_every_path_hands_out_exact_weights(options, length):
    options = dict(options)
    query, key, value = (torch.randn(1, 2, length, 8, dtype=torch.float64) for _ in range(3))
    if "mask" in options:
        options["mask"] = causal() & window(30)
    if "attn_bias" in options:
        options["attn_bias"] = torch.randn(length, length, dtype=torch.float64)
    _, weights = attend(query, key, value, return_weights=True, **options)
    mask = causal() if "causal" in options else options.get("mask")
    visible = None if mask is None else mask.to_tensor(length)
    _, truth = reference.attend(query, key, value, visible=visible, bias=options.get("attn_bias"))
    torch.testing.assert_close(weights[0, :, -5:], truth[0, :, -5:])
    torch.testing.assert_close(weights.peak().weight, truth.amax(-1))


@pytest.mark.parametrize("sizes", [(0, 2, 1, 3, 5, 4), (1, 2, 1, 0, 5, 4), (1, 2, 1, 3, 0, 4)], ids=["B", "T", "S"])
def test_maps_of_size_zero_answer_with_nothing(sizes):
    weights, truth = made(causal(), sizes=sizes)
    assert weights[:].shape == truth.shape
    assert weights.to_tensor().shape == truth.shape
    assert weights.entropy().shape == truth.shape[:3]
    assert weights.received().total.shape == (*truth.shape[:2], truth.shape[3])
    assert weights.sum() == 0
    assert weights.pooled(2, 2).shape[:2] == truth.shape[:2]
    assert len(weights.summary().heads) == truth.shape[1]


def test_a_query_that_sees_nothing_has_zeros_everywhere():
    weights, _ = made(padding([3, 0]), sizes=(2, 2, 1, 3, 5, 4))
    assert (weights[1] == 0).all()
    assert (weights.entropy()[1] == 0).all()
    assert (weights.peak().weight[1] == 0).all()
    assert (weights.peak().key[1] == -1).all()
    assert (weights.topk(2).keys[1] == -1).all()
    assert (weights.log_sum_exp()[1] == -math.inf).all()
    assert weights.received().mean.isfinite().all()


def test_bad_questions_are_refused():
    weights, _ = made(causal())
    with pytest.raises(OptionError, match=r"topk\(12\): the map has 11 keys"):
        weights.topk(12)
    with pytest.raises(OptionError, match="topk"):
        weights.topk(0)
    with pytest.raises(OptionError, match="pooled rows=0"):
        weights.pooled(0, 4)
    with pytest.raises(MaskError, match="made for 7 keys.*have 11"):
        weights.mass(same_token(torch.arange(7)))
    with pytest.raises(MaskError, match="a probe is a mask, and Tensor was given"):
        weights.mass(torch.ones(T, S))
    with pytest.raises(TypeError, match="unexpected keyword"):
        weights.panel(entropie=True)


def test_a_map_keeps_nothing_alive_once_it_is_gone():
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    alive = weakref.ref(query)
    weights = AttentionMap(query, key)
    weights.entropy()
    del query, weights
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its attention
def test_maps_pass_through_compile_export_and_vmap():
    layer, x = MultiHeadAttention(24, 3, causal=True).eval(), torch.randn(2, 7, 24)
    _, weights = layer(x, return_weights=True)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, return_weights=True)[1][:], weights[:])
    program = torch.export.export(layer, (x,), {"return_weights": True})
    torch.testing.assert_close(program.module()(x, return_weights=True)[1][:], weights[:])
    stacked = torch.vmap(lambda y: layer(y[None], return_weights=True)[1])(x)
    torch.testing.assert_close(AttentionMap(stacked._query[1], stacked._key[1], stacked._scoring)[0], weights[1])
    leaves, spec = torch.utils._pytree.tree_flatten(weights)
    torch.testing.assert_close(torch.utils._pytree.tree_unflatten(leaves, spec)[:], weights[:])


def test_a_map_can_be_copied_and_pickled():
    query = torch.randn(1, 2, 5, 8).mul_(2)
    weights = AttentionMap(query, torch.randn(1, 2, 5, 8), Scoring(causal()))
    for copied in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):  # noqa: S301
        torch.testing.assert_close(copied[:], weights[:])


def test_what_a_map_hands_out_is_not_its_own():
    weights, truth = made(causal())
    weights.log_sum_exp().zero_()
    torch.testing.assert_close(weights[:], truth)


def test_maps_made_by_hand_are_checked():
    with pytest.raises(ValueError, match="query has 4 heads and key has 3"):
        AttentionMap(torch.randn(2, 4, 9, 16), torch.randn(2, 3, 9, 16))


def test_no_heads_and_many_heads():
    weights, _ = made(causal())
    assert weights.select(heads=[]).entropy().shape == (B, 0, T)
    many = AttentionMap(torch.randn(1, 600, 2, 8).bfloat16(), torch.randn(1, 300, 2, 8).bfloat16())
    torch.testing.assert_close(many.select(heads=slice(1, 600, 2))[0, 299], many[0, 599])


def test_methods_that_would_change_a_map_are_refused():
    weights, _ = made()
    with pytest.raises(TypeError, match="mul_ would change"):
        weights.mul_(2)
    with pytest.raises(MaskError, match="a probe is a mask"):
        weights.without(torch.ones(1))
    with pytest.raises(MapIndexError, match=r"select\(rows="):
        weights.select(rows=[[1]])


def test_a_mask_of_your_own_can_be_looked_at():
    class Odd(type(causal()).__mro__[1]):
        def visible(self, grid):
            return (grid.col % 2 == 0) | (grid.col == grid.position)

    weights, truth = made(Odd())
    torch.testing.assert_close(weights.detach()[:], truth)
    assert len(weights.summary().heads) == H


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min], ids=str)
def test_a_row_of_large_finite_bias_still_sums_to_one(low):
    query, key = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    bias = torch.zeros(9, 9)
    bias[3] = low
    bias[4, 2:] = low
    _, weights = attend(query, key, key, attn_bias=bias, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 9))
    torch.testing.assert_close(weights[:].sum(-1), torch.ones(1, 2, 9))
    assert (weights[0, :, 4, 2:] == 0).all()
    if low > -1e10:  # in float64 a constant added to a row changes nothing
        exact = [x.double() for x in (query, key)]
        _, truth = reference.attend(*exact, exact[1], bias=bias.double())
        torch.testing.assert_close(weights[:].double(), truth, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights.entropy().double(), torch.special.entr(truth).sum(-1), rtol=1e-4, atol=1e-5)


def test_long_rows_that_see_nothing_are_zero_too():
    query, key = torch.randn(2, 2, 300, 8), torch.randn(2, 2, 300, 8)
    _, weights = attend(query, key, key, mask=padding([0, 300]), return_weights=True)
    assert (weights.log_sum_exp()[0] == -math.inf).all()
    assert weights[0].abs().sum() == 0
    assert (weights.received().total[0] == 0).all()
    torch.testing.assert_close(weights[1].sum(-1), torch.ones(2, 300))


@pytest.mark.parametrize("size", [1, 4])
def test_single_weights_have_at_most_twice_the_error_of_plain_float32(size):
    T, D = 257, 64
    torch.manual_seed(0)
    query, key, value = size * torch.randn(1, 1, T, D), torch.randn(1, 1, T, D), torch.randn(1, 1, T, D)
    visible = causal().to_tensor(T)
    truth = reference.attend(query.double(), key.double(), value.double(), visible=visible)[1][0, 0]
    plain = reference.attend(query, key, value, visible=visible)[1][0, 0]
    weights = attend(query, key, value, causal=True, return_weights=True)[1]
    row, col = torch.tril_indices(T, T)
    found = weights[row * 0, row * 0, row, col]
    error, rough = ((x.double() - truth[row, col]).norm() for x in (found, plain[row, col]))
    assert error <= 2 * rough
