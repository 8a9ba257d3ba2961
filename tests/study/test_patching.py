"""Patches, gates and frozen patterns do what replacing the tensors by hand does, and leave nothing behind."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from headwise import (
    MultiHeadAttention,
    OptionError,
    ShapeError,
    freeze,
    gate,
    importance,
    patch,
    reference,
    silence,
    watch,
)
from tiny_models import E, H, V, states, tiny

B, T, D = 2, 7, 4
KINDS = ["builtin", "gpt2", "llama", "bert", "bart"]


def run(model, x, **how):
    with torch.no_grad():
        return states(model(x, **how))


def record(model, x):
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(x)
    return seen


@pytest.fixture(params=KINDS)
def model(request):
    return tiny(request.param)


@pytest.fixture
def texts():
    return torch.randint(3, V, (B, T)), torch.randint(3, V, (B, T))


def test_a_run_patched_with_all_of_another_gives_its_heads(model, texts):
    first, second = texts
    seen = record(model, second)
    with patch(model, seen):
        again = record(model, first)
    for name, layer in again.outputs.items():
        torch.testing.assert_close(layer.read, seen.outputs[name].read)
    plain = run(model, first)
    with patch(model, record(model, first)):
        torch.testing.assert_close(run(model, first), plain)


def test_a_patch_reaches_only_its_heads_and_positions(model, texts):
    first, second = texts
    seen, before = record(model, second), record(model, first)
    name = next(iter(seen))
    with patch(model, seen, {name: [1, 4]}, positions=[2, -1]):
        after = record(model, first)
    expected = before.outputs[name].read.clone()
    for head in (1, 4):
        expected[:, head, [2, -1]] = seen.outputs[name].read[:, head, [2, -1]]
    torch.testing.assert_close(after.outputs[name].read, expected)
    assert not torch.allclose(run(model, first), run(model, second))


def test_a_patch_by_the_mean_is_the_mean_everywhere(model, texts):
    seen = record(model, texts[0])
    name = list(seen)[-1]
    with patch(model, seen.outputs.mean(), {name: 3}):
        after = record(model, texts[1])
    mean = seen.outputs[name].read[:, 3].mean((0, 1))
    torch.testing.assert_close(after.outputs[name].read[:, 3], mean.expand(B, T, D))


def test_gates_of_zero_and_one_silence_and_leave(model, texts):
    x, name = texts[0], list(record(model, texts[0]))[-1]
    gates, plain = torch.ones(H, dtype=torch.float64), run(model, x)
    with gate(model, {name: gates}):
        torch.testing.assert_close(run(model, x), plain)
    gates[2] = 0
    with silence(model, {name: 2}):
        expected = run(model, x)
    with gate(model, {name: gates}):
        torch.testing.assert_close(run(model, x), expected)


def test_every_sample_of_a_batch_has_its_own_gates(model):
    x = torch.randint(3, V, (1, T)).expand(H, T)
    name = next(iter(record(model, x)))
    with gate(model, {name: 1 - torch.eye(H, dtype=torch.float64)}):
        found = run(model, x)
    for head in range(H):
        with silence(model, {name: head}):
            torch.testing.assert_close(found[head], run(model, x[:1])[0])


def test_the_gradient_of_a_gate_is_the_product_of_output_and_gradient(model, texts):
    name = next(iter(record(model, texts[0])))
    gates = torch.ones(B, H, dtype=torch.float64, requires_grad=True)
    with gate(model, {name: gates}), watch(model, outputs=True) as seen:
        loss = states(model(texts[0])).square().mean()
    read = seen.outputs[name].read
    slope, found = torch.autograd.grad(loss, [read, gates])
    torch.testing.assert_close(found, (read * slope).sum((2, 3)))


def test_frozen_patterns_read_new_values(texts):
    first, second = (torch.randn(B, T, E, dtype=torch.float64) for _ in texts)
    layer = MultiHeadAttention(E, H, num_kv_heads=2, causal=True, out_proj=False).double()
    seen = record(layer, second)
    value = record(layer, first).outputs[""].value
    with freeze(layer, seen):
        found = run(layer, first)
    expected = seen[""].to_tensor() @ value.repeat_interleave(3, 1)
    torch.testing.assert_close(found, expected.transpose(1, 2).flatten(2))
    with freeze(layer, seen, {"": [1]}):
        some = run(layer, first)
    plain = run(layer, first)
    torch.testing.assert_close(some[..., D : 2 * D], found[..., D : 2 * D])
    torch.testing.assert_close(some[..., 2 * D :], plain[..., 2 * D :])


def test_a_model_whose_patterns_are_frozen_to_its_own_does_not_change(model, texts):
    seen, plain = record(model, texts[0]), run(model, texts[0])
    with freeze(model, seen):
        torch.testing.assert_close(run(model, texts[0]), plain)


def test_interventions_compose_in_the_order_they_open(texts):
    model = tiny("llama")
    x, name = texts[0], "model.layers.1.self_attn"
    seen = record(model, texts[1])
    with patch(model, seen, {name: [0]}), gate(model, {name: torch.full((H,), 2.0).double()}):
        read = record(model, x).outputs[name].read
    torch.testing.assert_close(read[:, 0], 2 * seen.outputs[name].read[:, 0])
    with gate(model, {name: torch.full((H,), 2.0).double()}), patch(model, seen, {name: [0]}):
        read = record(model, x).outputs[name].read
    torch.testing.assert_close(read[:, 0], seen.outputs[name].read[:, 0])


def test_nothing_is_left_after_an_exception(model, texts):
    plain, seen = run(model, texts[0]), record(model, texts[1])
    with pytest.raises(RuntimeError, match="stop"), patch(model, seen), freeze(model, seen):
        raise RuntimeError("stop")
    assert not any("_attached" in vars(module) for module in model.modules())
    torch.testing.assert_close(run(model, texts[0]), plain)


class Thrice(torch.nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return self.shared(self.shared(self.shared(x)))


def every_way(model, x):
    """A context that silences by gates and by a patch of zeros."""

    @contextlib.contextmanager
    def both(model, heads):
        gates = {name: torch.zeros(H).double() for name in heads}
        zeros = {name: torch.zeros(1, H, 1, D).double() for name in heads}
        with gate(model, gates), patch(model, zeros, heads):
            yield

    return both


def test_calls_of_a_shared_layer_are_layers_of_their_own():
    model = Thrice(MultiHeadAttention(E, H).double())
    first, second = (torch.randn(B, T, E).double() for _ in range(2))
    seen = record(model, first)
    assert list(seen.outputs) == list(seen) == ["shared@0", "shared@1", "shared@2"]
    assert seen.outputs["shared"] is seen.outputs["shared@2"]
    with patch(model, seen), watch(model, outputs=True) as after, torch.no_grad():
        model(second)
    for name, layer in after.outputs.items():
        torch.testing.assert_close(layer.read, seen.outputs[name].read)
    with freeze(model, seen):
        torch.testing.assert_close(run(model, first), model(first).detach())
    found = importance(model, first, by="silence", loss=lambda y, _: y.square().mean((1, 2)), controls=0)
    assert list(found) == list(seen)
    with silence(model, {"shared@1": 4}), torch.no_grad():
        base = found["shared@1"][:, 4] + found.loss
        torch.testing.assert_close(model(first).square().mean((1, 2)), base)


def test_single_calls_of_a_shared_layer_can_change():
    shared = MultiHeadAttention(E, H).double()
    x = torch.randn(B, T, E).double()
    with torch.no_grad():
        once = shared(x)
        model = Thrice(shared)
        quiet = shared(shared.out_proj.bias.expand(B, T, E))
        for context in (silence, every_way(model, x)):
            with context(model, {"shared@1": range(H)}):
                torch.testing.assert_close(model(x), quiet)
                torch.testing.assert_close(model(x), quiet)  # in every pass
        torch.testing.assert_close(model(x), shared(shared(once)))


def test_heads_stay_silent_while_a_model_generates():
    model = tiny("llama")
    x, name = torch.randint(3, V, (1, 5)), "model.layers.2.self_attn"
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with silence(model, {name: range(H)}, positions=slice(None)):
        quiet = model.generate(x, **options)
    with gate(model, {name: torch.zeros(H).double()}), watch(model, outputs=True) as seen:
        assert torch.equal(model.generate(x, **options), quiet)
    assert len(seen.outputs.calls[name]) == 6
    assert all(not call.read.any() for call in seen.outputs.calls[name])
    assert not torch.equal(model.generate(x, **options), quiet)
    with patch(model, seen, {name: [0]}):
        model.generate(x, **options)


def test_interventions_hold_in_one_thread_or_task_only(texts):
    model, x = tiny("builtin"), texts[0]
    plain, gates = run(model, x), {"blocks.1.attention": torch.zeros(H).double()}
    with ThreadPoolExecutor(1) as pool, gate(model, gates):
        assert torch.equal(pool.submit(run, model, x).result(), plain)
        changed = run(model, x)

    async def both():
        async def inside():
            with gate(model, gates):
                await asyncio.sleep(0.01)
                return run(model, x)

        async def outside():
            await asyncio.sleep(0.005)
            return run(model, x)

        return await asyncio.gather(inside(), outside())

    inner, outer = asyncio.run(both())
    assert torch.equal(inner, changed)
    assert torch.equal(outer, plain)
    assert not torch.allclose(changed, plain)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda m, s: patch(m, s, {"blocks.9.attention": 0}), "'blocks.9.attention' is not a headwise layer"),
        (lambda m, s: patch(m, {}, {"blocks.1.attention": 0}), "source has nothing for 'blocks.1.attention'"),
        (lambda m, s: patch(m, 3), "expected another run"),
        (lambda m, s: freeze(m, 3), "expected another run"),
        (lambda m, s: gate(m, {"blocks.1.attention": 0.5}), "tensor of factors"),
        (lambda m, s: patch(m, s, {"blocks.1.attention": [6]}), "one of 0 to 5"),
    ],
    ids=["layer", "source", "type", "frozen type", "factor", "head"],
)
def test_what_cannot_be_done_is_refused_at_once(ask, words):
    model = tiny("builtin")
    with pytest.raises(OptionError, match=words):
        ask(model, record(model, torch.randint(V, (B, T))))


def test_shapes_that_do_not_fit_are_refused_with_both():
    model = tiny("builtin")
    seen, x = record(model, torch.randint(V, (B, T))), torch.randint(V, (B, T + 1))
    with pytest.raises(ShapeError, match=r"\(2, 6, 7, 4\).*\(2, 6, 8, 4\)"), patch(model, seen):
        run(model, x)
    with pytest.raises(ShapeError, match=r"\(2, 6, 7, 7\).*\(2, 6, 8, 8\)"), freeze(model, seen):
        run(model, x)
    with (
        pytest.raises(ShapeError, match=r"\(5,\).*\(6,\)"),
        gate(model, {"blocks.0.attention": torch.ones(5)}),
    ):
        run(model, x)
    with (
        pytest.raises(OptionError, match=r"position \[9\].*has 8"),
        silence(model, {"blocks.0.attention": 1}, positions=[9]),
    ):
        run(model, x)


def test_the_reference_agrees_with_a_silent_position():
    layer = MultiHeadAttention(E, H, out_proj=False).double()
    x = torch.randn(B, T, E).double()
    with torch.no_grad(), watch(layer) as seen:
        layer(x)
    with silence(layer, {"": 2}, positions=slice(3, None)):
        found = run(layer, x).unflatten(2, (H, D))
    value = record(layer, x).outputs[""].value
    read, _ = reference.attend(seen[""]._query, seen[""]._key, value)
    read[:, 2, 3:] = 0
    torch.testing.assert_close(found, read.transpose(1, 2))
