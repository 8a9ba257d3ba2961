"""Kernels give what tiles in float64 give; on CPU tensors under Triton's interpreter: TRITON_INTERPRET=1 pytest."""

import dataclasses
import os

import pytest
import torch

import kernel_calls

pytest.importorskip("triton")

import triton
import triton.language as tl  # noqa: F401 - the interpreter wants it next to functions that it runs

from headwise import (
    OptionError,
    attend,
    causal,
    dense,
    induction,
    local,
    padding,
    prefix,
    previous_token,
    same_token,
    sink,
    token_is,
    window,
)
from headwise.attention.backends import triangles
from headwise.weights import Statistic, kernels, readings
from headwise.weights.kernels import launch
from headwise.weights.structure import structure_of
from headwise.weights.tiles import TileWalk

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="compiled for the GPU")]),
]
# (B, H, Hkv, T, S, D): ragged, aligned with blocks, cached, grouped, odd widths
SIZES = {
    "ragged": (2, 2, 1, 37, 37, 16),
    "aligned": (1, 1, 1, 64, 64, 32),
    "cached": (1, 2, 2, 33, 129, 24),
    "more queries than keys": (1, 1, 1, 75, 40, 16),
    "one query": (1, 2, 1, 1, 127, 16),
}
LARGE = {
    "ragged": (2, 4, 2, 1023, 1023, 64),
    "aligned": (1, 4, 1, 1024, 1024, 64),
    "cached": (2, 2, 2, 129, 1500, 64),
    "more queries than keys": (2, 2, 1, 600, 333, 64),
    "one query": (1, 2, 1, 1, 127, 64),
    "tiny": (1, 2, 1, 3, 5, 64),
}


def compare(source, questions, tolerance=2e-5):
    """Every reading through kernels, and through tiles in float64."""
    sinks = source.scoring.sinks
    scoring = dataclasses.replace(source.scoring, sinks=None if sinks is None else sinks.double())
    precise = dataclasses.replace(source, query=source.query.double(), key=source.key.double(), scoring=scoring)
    lse = precise.log_sum_exp = TileWalk(precise).log_sum_exp()
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(kernels.log_sum_exp(source).double(), lse, **close)
    dense = precise.block(slice(None)).weights
    for cols in (range(source.shape[3]), range(1, source.shape[3] - 1)):
        some = kernels.weights(source, lse, cols, torch.float32)
        torch.testing.assert_close(some, dense[..., cols.start : cols.stop], **close)
    expected = TileWalk(precise).read(lse, questions())
    found = kernels.read(source, lse, questions())
    assert len(found) == len(expected), "kernels refused a reading"
    for number, reading in enumerate(questions()):
        for got, want in zip(found[number], expected[number], strict=True):
            if got.dtype == torch.int64:  # equal weights may lie on different keys
                assert (got == want).float().mean() > 0.99, type(reading).__name__
            else:
                name = type(reading).__name__
                torch.testing.assert_close(got, want, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", kernel_calls.MASKS)
@pytest.mark.parametrize("size", LARGE)
def test_kernels_give_what_tiles_give(size, mask, device):
    if device == "cpu" and size not in SIZES:
        pytest.skip("small enough to be covered by the others")
    B, H, Hkv, T, S, D = (SIZES if device == "cpu" else LARGE)[size]
    made = kernel_calls.MASKS[mask](B, T, S)
    if made is not None:
        made = made.to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    source = kernel_calls.source(B, H, Hkv, T, S, D, made, dtype, device=device)
    compare(source, lambda: kernel_calls.everything(S, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [23, 64, 96, 128, 256])
def test_heads_of_any_width(width, device):
    T, dtype = (37, torch.float32) if device == "cpu" else (515, torch.bfloat16)
    source = kernel_calls.source(1, 2, 1, T, T, width, causal(), dtype, device=device)
    compare(source, lambda: kernel_calls.everything(T, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{"softcap": 1.5}, {"dtype": torch.float16}, {"dtype": torch.float32, "hkv": 2}], ids=str
)
def test_options_of_scoring_reach_the_kernels(options, device):
    options = dict(options)
    T = 40 if device == "cpu" else 700
    source = kernel_calls.source(
        1, 2, options.pop("hkv", 1), T, T, 16, causal(), **{"dtype": torch.float32, "device": device, **options}
    )
    compare(source, lambda: kernel_calls.everything(T, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("T", "size"), [(128, (16, 8)), (97, (2, 31)), (67, (1, 1)), (31, (31, 17)), (131, (5, 7)), (67, (50, 3))], ids=str
)
def test_pictures_of_any_size_come_with_and_without_other_statistics(T, size, device):
    source = kernel_calls.source(1, 1, 1, T, T, 16, causal(), torch.float32, device=device)
    compare(source, lambda: [readings.PooledReading(*size), readings.PooledPeakReading(*size)])
    compare(
        source, lambda: [readings.EntropyReading(), readings.PooledReading(*size), readings.PooledPeakReading(*size)]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_heads_may_lie_anywhere_in_memory(device):
    source = kernel_calls.source(2, 2, 2, 37, 37, 16, causal(), torch.float32, device=device)
    packed = torch.stack([source.query, source.key], 3).transpose(1, 2).contiguous()  # (B, T, H, 2, D)
    query, key = packed.transpose(1, 2).unbind(3)
    assert not query.is_contiguous()
    moved = type(source)(query, key, source.scoring, source.frame)
    compare(moved, lambda: [readings.EntropyReading(), readings.ReceivedReading()])


@pytest.mark.parametrize("device", DEVICES)
def test_part_of_the_rows_keeps_its_place(device):
    source = kernel_calls.source(1, 2, 1, 60, 60, 16, causal(), torch.float32, device=device)
    part = source.narrowed(range(1), range(1, 2), range(20, 50))
    compare(part, lambda: kernel_calls.everything(60, device))


def test_masks_become_structures_or_are_left_to_tiles():
    source = kernel_calls.source(2, 2, 1, 9, 9, 16)
    known = structure_of(causal() & ~prefix(1) & prefix(7) & padding([3, 5]), source)
    assert (known.right, known.first, known.stop) == (0, 1, 7)
    assert known.keys.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0, 0]]
    assert structure_of(causal() | prefix(2), source).open_keys.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert structure_of(dense(torch.rand(9, 9) > 0.5), source) is None
    assert structure_of(~causal(), source) is None
    assert structure_of((causal() | prefix(2)) & local(3), source) is None
    assert structure_of(same_token(torch.arange(9)) & induction(torch.arange(9)), source) is None


@pytest.mark.parametrize("device", DEVICES)
def test_sinks_are_part_of_the_row_and_keys_of_other_tokens_may_be_hidden(device):
    T = 41 if device == "cpu" else 641
    ids = torch.arange(T, device=device) % 3
    source = kernel_calls.source(1, 2, 1, T, T, 16, same_token(ids) & causal(), torch.float32, device=device)
    source.scoring = dataclasses.replace(source.scoring, sinks=torch.tensor([0.5, -1.0], device=device))
    compare(source, lambda: kernel_calls.everything(T, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("T", [29, 131], ids=str)
def test_several_probes_of_any_place_share_a_walk(T, device, monkeypatch):
    """A probe of few keys, wherever they are, is narrow; others are wide. Each splits the walk at other tiles."""
    monkeypatch.setattr(launch, "NEAR", 8)
    ids = torch.arange(T, device=device) % 5
    probes = (
        sink(3), previous_token(), local(3), prefix(70) & ~prefix(66), ~sink(2), window(9, 2), window(60, 60),
        induction(ids) & ~sink(1), same_token(ids) & window(7, 7), prefix(T // 2), ~prefix(T // 3) & causal(),
        local(2) | sink(4), previous_token() | token_is(ids, [3]),
    )  # fmt: skip
    for mask in (None, causal() & window(50)):
        source = kernel_calls.source(1, 1, 1, T, T, 16, mask, torch.float32, device=device)
        compare(source, lambda: [readings.MassReading(probe) for probe in probes])
        compare(source, lambda: [readings.MassReading(probe) for probe in (sink(3), local(2))])


def test_one_walk_answers_a_panel_and_two_a_few_keys_with_what_keys_receive(monkeypatch):
    walks = []
    monkeypatch.setattr(launch, "launch", lambda kernel, grid, arguments, options: walks.append(options))
    source = kernel_calls.source(1, 2, 1, 4096, 4096, 16, causal(), torch.float32)
    kernels.read(source, torch.zeros(1, 2, 4096), kernel_calls.panel(4096, "cpu"))
    assert [(walk["BY_KEY"], walk["FULL"]) for walk in walks] == [(False, True)]
    walks.clear()
    kernels.read(source, torch.zeros(1, 2, 4096), [readings.MassReading(sink(1)), readings.ReceivedReading()])
    assert [(walk["BY_KEY"], walk["FULL"]) for walk in walks] == [(False, False), (True, True)]


def causal_part(heads, scale):
    """What the fused kernel gives, by a plain formula; key/value heads repeated."""
    query, key, value = (x.double() for x in heads)
    scores = triangle(query @ repeated(key, query).mT * scale)
    return triangles.TrianglePart(
        (scores.softmax(-1) @ repeated(value, query)).to(heads[0].dtype), scores.logsumexp(-1).float()
    )


def causal_gradients(known, lse, scale):
    """The backward pass of the fused kernel, which takes output and log-sum-exp as given."""
    grad, query, key, value, output = (x.double() for x in known)
    keys, values = repeated(key, query), repeated(value, query)
    weights = (triangle(query @ keys.mT * scale) - lse).exp()
    inner = weights * (grad @ values.mT - (grad * output).sum(-1, keepdim=True)) * scale
    grouped = (x.unflatten(1, (key.shape[1], -1)).sum(2) for x in (inner.mT @ query, weights.mT @ grad))
    return tuple(x.to(known[0].dtype) for x in (inner @ keys, *grouped))


def triangle(scores):
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


def repeated(x, query):
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1; the real kernels run in test_gpu.py")
@pytest.mark.parametrize(("T", "size"), [(22, 11), (31, 7), (29, 13), (5 * 7, 7)])
@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
def test_two_triangles_are_a_window(T, size, layout, monkeypatch):
    for function in (causal_part, causal_gradients):
        monkeypatch.setattr(triangles, function.__name__, function)
    B, H, Hkv, D = 2, 6, 3, 5
    torch.manual_seed(0)
    shapes = [(B, T, heads, D) for heads in (H, Hkv, Hkv)]
    made = [torch.randn(shape).transpose(1, 2) for shape in shapes]
    made = [x.contiguous() if layout == "heads first" else x for x in made]
    ours = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in made]
    theirs = [x.double().requires_grad_() for x in made]
    output, lse = triangles.TwoTriangles.apply(*ours, size, D**-0.5)
    expected, weights = attend(*theirs, mask=causal() & window(size - 1), return_weights=True)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), weights.log_sum_exp().detach(), rtol=1e-5, atol=1e-5)
    seed = torch.randn_like(output)
    output.backward(seed)
    expected.backward(seed.double())
    for mine, truth in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), truth.grad, rtol=1e-5, atol=1e-5)


# Statistics that only these tests know: plain arithmetic, so that the same function is for torch and for Triton.


def squares(pair):
    return pair.weight * pair.weight


def far_score(pair):
    return pair.score * (pair.distance > 3)


def copies(pair):
    return pair.weight * (pair.query_token == pair.key_token) - 0.25 * (pair.position > pair.key + 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by", ["query", "key"])
@pytest.mark.parametrize("combine", ["sum", "max", "count"])
def test_a_statistic_of_your_own_runs_in_the_walk(combine, by, device):
    T = 37 if device == "cpu" else 1043
    ids = torch.arange(2 * T, device=device).view(2, T) * 7 % 5
    for where in (None, sink(3), same_token(ids) & window(5, 2)):
        mask = causal() & padding(torch.tensor([T, T - 11], device=device))
        source = kernel_calls.source(2, 1, 1, T, T, 16, mask, torch.float32, device=device)
        options = {"combine": combine, "by": by, "where": where, "tokens": ids}
        made = [Statistic(f, **options, kernel=triton.jit(f)) for f in (squares, far_score, copies)]
        compare(source, lambda made=made: [*made, readings.ReceivedReading()])


def test_without_a_kernel_a_statistic_is_left_to_tiles_and_no_other_thing_is_taken_for_one():
    source = kernel_calls.source(1, 2, 1, 9, 9, 16, None, torch.float32)
    assert kernels.read(source, torch.zeros(1, 2, 9), [Statistic(squares)]) == {}
    with pytest.raises(OptionError, match=r"kernel=.*decorated with @triton\.jit"):
        Statistic(squares, kernel=squares)


class Halved(readings.EntropyReading):
    def finish(self):
        return (super().finish()[0] / 2,)


class Backwards(type(causal())):
    def visible(self, grid):
        return grid.col >= grid.position


def test_subclasses_of_readings_and_masks_are_left_to_tiles():
    source = kernel_calls.source(1, 2, 1, 9, 9, 16, None, torch.float32)
    assert kernels.read(source, torch.zeros(1, 2, 9), [Halved()]) == {}
    assert structure_of(Backwards(), source) is None
    assert structure_of(Backwards() & causal(), source) is None
