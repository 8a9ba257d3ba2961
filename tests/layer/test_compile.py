"""torch.compile in one graph, dynamic lengths without a recompile storm, torch.export and ONNX."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

from headwise import (
    MultiHeadAttention,
    RelativeBias,
    alibi,
    attend,
    causal,
    documents,
    padding,
    prefix,
    rotary,
    window,
)

LENGTHS = (5, 7, 11, 67, 131, 301)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def count_graphs():
    """A backend that compiles nothing and counts how often it is asked to."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    return graphs, backend


LAYERS = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"causal": True, "num_kv_heads": 2},
    "window": {"causal": True, "mask": window(4)},
    "dropout": {"dropout": 0.1},
    "no bias": {"bias": False},
    "half": {"dtype": torch.bfloat16, "causal": True},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_one_graph_serves_every_length(kind):
    layer = MultiHeadAttention(66, 6, **LAYERS[kind]).eval()
    graphs, backend = count_graphs()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for length in LENGTHS:
        x = torch.randn(2, length, 66, dtype=layer.qkv_proj.weight.dtype)
        tolerance = {"rtol": 0.02, "atol": 0.02} if kind == "half" else {}
        torch.testing.assert_close(compiled(x), layer(x), **tolerance)
    assert len(graphs) <= 2  # one more where a window turns out wider than the sequence


@pytest.mark.parametrize("train", [True, False])
def test_automatic_dynamic_lengths_settle_after_two_graphs(train):
    layer = MultiHeadAttention(66, 6, causal=True).train(train)
    graphs, backend = count_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for length in LENGTHS:
        compiled(torch.randn(2, length, 66))
    assert len(graphs) == 2  # the first length, then any length


def test_masks_of_the_call_are_part_of_the_graph():
    layer = MultiHeadAttention(66, 6)
    graphs, backend = count_graphs()

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def run(x, lengths):
        return layer(x, mask=causal() & padding(lengths))

    for length in LENGTHS:
        x, lengths = torch.randn(2, length, 66), torch.tensor([length, 3])
        torch.testing.assert_close(run(x, lengths), layer(x, mask=causal() & padding(lengths)))
    assert len(graphs) == 1


def test_tensor_masks_of_bool_and_float_compile():
    layer = MultiHeadAttention(66, 6)
    _, backend = count_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x, mask = torch.randn(2, 7, 66), torch.ones(7, 7).tril()
    for given in (mask, mask.bool()):
        torch.testing.assert_close(compiled(x, mask=given), layer(x, mask=given))


def test_masks_may_come_after_the_length_became_dynamic():
    layer = MultiHeadAttention(66, 6)
    _, backend = count_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for length in (5, 7, 11):
        compiled(torch.randn(2, length, 66))
    x, mask = torch.randn(2, 7, 66), torch.ones(7, 7).tril()
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"context_length": 6}, lambda m, x: m(x), "7 tokens"),
        ({}, lambda m, x: m(x, value=x), "value is given without key"),
        ({}, lambda m, x: m(x, mask=padding(torch.ones(2, 9))), "made for 9 keys"),
        ({}, lambda m, x: m(x, x[:1]), "one batch size"),
    ],
    ids=["context", "value", "mask", "batch"],
)
def test_bad_input_is_refused_while_tracing(options, call, message):
    layer = MultiHeadAttention(66, 6, **options)
    _, backend = count_graphs()
    compiled = torch.compile(lambda x: call(layer, x), fullgraph=True, backend=backend)
    with pytest.raises(Exception, match=message):
        compiled(torch.randn(2, 7, 66))


def test_additive_mask_is_refused_in_a_compiled_graph_too():
    layer = MultiHeadAttention(66, 6)
    _, backend = count_graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    with pytest.raises(RuntimeError, match="pass an additive mask as attn_bias="):
        compiled(torch.randn(2, 7, 66), mask=torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf))


def test_cross_attention_and_weights_compile():
    layer = MultiHeadAttention(66, 6, d_key=22)
    _, backend = count_graphs()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    x, memory = torch.randn(2, 7, 66), torch.randn(2, 11, 22)
    (output, weights), (expected, exact) = (f(x, memory, return_weights=True) for f in (compiled, layer))
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(weights[:], exact[:])
    torch.testing.assert_close(weights.entropy(), exact.entropy())


def test_functional_form_compiles():
    _, backend = count_graphs()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    q, k = torch.randn(2, 6, 67, 16), torch.randn(2, 3, 71, 16)
    mask = causal() & documents(torch.arange(71) // 20)
    torch.testing.assert_close(compiled(q, k, k, mask=mask), attend(q, k, k, mask=mask))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while inductor starts
@pytest.mark.parametrize("train", [True, False])
def test_inductor_gives_the_same_output_and_gradients(train):
    layer = MultiHeadAttention(66, 6, causal=True, num_kv_heads=2).train(train)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for length in (5, 67):
        x = torch.randn(2, length, 66)
        layer.zero_grad()
        compiled(x).square().sum().backward()
        gradients = [p.grad.clone() for p in layer.parameters()]
        layer.zero_grad()
        layer(x).square().sum().backward()
        for got, parameter in zip(gradients, layer.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_length(strict):
    layer = MultiHeadAttention(66, 6, causal=True, num_kv_heads=3).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(layer, (torch.randn(2, 7, 66),), dynamic_shapes={"query": {1: length}}, strict=strict)
    for n in (2, 67, 1000):
        x = torch.randn(2, n, 66)
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("mask", [window(4), window(4, 3), prefix(5), causal() | prefix(3)], ids=repr)
def test_export_keeps_a_length_open_that_spans_the_mask(mask, strict):
    layer = MultiHeadAttention(66, 6, mask=mask).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(layer, (torch.randn(2, 7, 66),), dynamic_shapes={"query": {1: length}}, strict=strict)
    for n in (2, 5, 67):
        x = torch.randn(2, n, 66)
        torch.testing.assert_close(program.module()(x), layer(x))


def test_export_with_a_mask_and_a_memory():
    layer = MultiHeadAttention(66, 6).eval()
    x, memory, mask = torch.randn(2, 7, 66), torch.randn(2, 11, 66), torch.rand(2, 1, 1, 11) > 0.3
    program = torch.export.export(layer, (x, memory, memory, mask))
    torch.testing.assert_close(program.module()(x, memory, memory, mask), layer(x, memory, memory, mask))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"num_kv_heads": 2, "causal": True}], ids=str)
def test_onnx_runtime_gives_the_same_result(options, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    layer = MultiHeadAttention(66, 6, **options).eval()
    x = torch.randn(2, 7, 66)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        torch.onnx.export(
            layer,
            (x,),
            tmp_path / "layer.onnx",
            dynamo=True,
            dynamic_shapes={"query": {1: torch.export.Dim("length", min=2, max=4096)}},
            verbose=False,
        )
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    for n in (7, 67):
        x = torch.randn(2, n, 66)
        (output,) = session.run(None, {name: x.numpy()})
        np.testing.assert_allclose(output, layer(x).detach().numpy(), rtol=1e-4, atol=1e-5)


OPTIONS = {
    "rotary, norm": lambda: {"position": rotary(), "qk_norm": "head", "num_kv_heads": 2},
    "alibi, window": lambda: {"position": alibi(4), "mask": window(5)},
    "relative bias": lambda: {"position": RelativeBias(4, bidirectional=False)},
    "sinks, soft-cap": lambda: {"softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_layers_with_options_compile_whole_and_learn(kind):
    layer = MultiHeadAttention(32, 4, causal=True, **OPTIONS[kind]())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for T in (7, 11, 13):
        x = torch.randn(2, T, 32, requires_grad=True)
        expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
        found = torch.autograd.grad(compiled(x).square().sum(), [x, *layer.parameters()])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", OPTIONS)
def test_layers_with_options_survive_copies_pickles_and_state_dicts(kind):
    layer = MultiHeadAttention(32, 4, causal=True, **OPTIONS[kind]())
    x = torch.randn(2, 7, 32)
    expected = layer(x)
    again = pickle.loads(pickle.dumps(layer))  # noqa: S301
    fresh = MultiHeadAttention(32, 4, causal=True, **OPTIONS[kind]())
    fresh.load_state_dict(layer.state_dict())
    for other in (again, copy.deepcopy(layer), fresh):
        torch.testing.assert_close(other(x), expected)
