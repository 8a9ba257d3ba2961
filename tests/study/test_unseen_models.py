"""Every method of a study on models that nothing in headwise knows by name: it works, or says what it cannot do.

The truth is transformers' eager attention: its dense weights, and its own modules.
"""

import copy

import pytest
import torch

from headwise import (
    OptionError,
    freeze,
    gate,
    head_kinds,
    importance,
    logit_attribution,
    patch,
    silence,
    trace,
    watch,
    why,
)
from headwise.study.importance import WAYS, mean_cross_entropy
from headwise.study.outputs import derangement
from tiny_models import ALL, LAYERS, H, inputs_of, states, unseen

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
B, T = 2, 13
UNKNOWN_PROJECTION = {"bitnet"}  # it normalizes what heads read before the output projection
GATES = {"afmoe": "gates every number that a head reads", "laguna": None}  # between heads and their output projection
NOT_SUMS = {"gemma2": "caps"}
every = pytest.mark.parametrize(("family", "kind"), ALL, ids=[kind for _, kind in ALL])
causal = pytest.mark.parametrize("kind", [kind for family, kind in ALL if family == "CausalLM"])


def call(model, inputs):
    """The tensor that matters in what the model makes of the inputs."""
    with torch.no_grad():
        return states(model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs))


def recorded(model, inputs):
    with watch(model, outputs=True) as seen:
        call(model, inputs)
    return seen


def squares(output, _):
    return states(output).square().flatten(1).mean(1)


def loose(model):
    """Tolerances: some models compute in float32, and norms of float64 models often do, too."""
    double = next(model.parameters()).dtype == torch.float64
    return {"atol": 1e-5, "rtol": 1e-5} if double else {"atol": 2e-3, "rtol": 2e-3}


@every
def test_heads_read_and_write_what_the_eager_model_does(family, kind):
    model, eager, inputs = unseen(family, kind), unseen(family, kind, "eager"), inputs_of(family, B, T)
    seen = recorded(model, inputs)
    torch.testing.assert_close(call(model, inputs), call(eager, inputs), **loose(model))
    for layer in seen.outputs.in_order:
        value = layer.value.repeat_interleave(layer.shape[1] // layer.value.shape[1], 1)
        torch.testing.assert_close(layer.weights.to_tensor() @ value, layer.read, **loose(model))
        if kind in UNKNOWN_PROJECTION:
            with pytest.raises(OptionError, match=r"normalize or gate it first.*by_value\(projected=False\)"):
                layer.written()
            layer.by_value(projected=False).received()
        else:
            torch.testing.assert_close(layer.written().sum(1) + layer.bias, projected(layer), **loose(model))
            torch.testing.assert_close(
                layer.contributions().received().sum(-1), layer.read.new_full(layer.read.shape[:2], layer.read.shape[2])
            )
        assert kind in UNKNOWN_PROJECTION or (layer.gate is not None) == (kind in GATES)


def projected(layer):
    """What the module that receives the heads' reading makes of it."""
    with torch.no_grad():
        return layer._projection.module.forward(layer.handed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", GATES)
def test_gated_heads_write_what_the_eager_model_projects(kind):
    model, eager, inputs = unseen("CausalLM", kind), unseen("CausalLM", kind, "eager"), inputs_of("CausalLM", B, T)
    seen, outputs = recorded(model, inputs), {}
    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
        for name, module in eager.named_modules()
        if name.endswith("o_proj")
    ]
    call(eager, inputs)
    for hook in hooks:
        hook.remove()
    for name, layer in seen.outputs.items():
        torch.testing.assert_close(layer.written().sum(1) + layer.bias, outputs[f"{name}.o_proj"], **loose(model))
        value = layer.value.repeat_interleave(H // layer.value.shape[1], 1)
        each = torch.einsum("bhtd,bhsd,hde->bhtse", layer.gate, value, layer._out)  # what a key adds for a query
        taken = torch.einsum("bhts,bhtse->bhtse", layer.weights.to_tensor(), each)
        whole = layer.written()
        shares = torch.einsum("bhtse,bhte->bhts", taken, whole) / whole.square().sum(-1, keepdim=True)
        torch.testing.assert_close(layer.contributions()[:], shares, **loose(model))
        torch.testing.assert_close(layer.contributions(rows=[2, 5])[:], shares[:, :, [2, 5]], **loose(model))
        with pytest.raises(OptionError, match=r"by a gate before its output projection.*Use written\(\)"):
            _ = layer.out
        if GATES[kind] is None:  # one factor for a head changes no shares
            norms = taken.norm(dim=-1)
            torch.testing.assert_close(layer.by_value()[:], norms / norms.sum(-1, keepdim=True), **loose(model))
        else:
            with pytest.raises(OptionError, match=rf"{GATES[kind]}.*Use by_value\(projected=False\)"):
                layer.by_value()


def test_open_contexts_do_not_see_how_gates_are_tried():
    model, inputs = copy.deepcopy(unseen("CausalLM", "laguna")), inputs_of("CausalLM", B, T)
    name = "model.layers.1.self_attn"
    with silence(model, {"model.layers.0.self_attn": 2}), torch.no_grad(), watch(model, outputs=True) as seen:
        model(inputs)
        with gate(model, {name: torch.zeros(H)}):
            written = seen.outputs[name].written()
        assert [len(calls) for calls in seen.calls.values()] == [1] * LAYERS
        assert len(seen.outputs.in_order) == LAYERS
    assert written.any()


def test_a_layer_that_mixes_its_heads_is_not_called_gated():
    model = unseen("CausalLM", "llama")
    layer = model.model.layers[1].self_attn
    seen = recorded(model, inputs_of("CausalLM", B, T))
    written = seen.outputs["model.layers.1.self_attn"].written()
    with torch.no_grad(), watch(model, outputs=True) as again:
        hook = layer.o_proj.register_forward_pre_hook(lambda module, args: (args[0].roll(4, -1),), prepend=True)
        model(inputs_of("CausalLM", B, T))
    with pytest.raises(OptionError, match="normalize or gate it first"):
        again.outputs["model.layers.1.self_attn"].written()
    hook.remove()
    with watch(model, outputs=True) as last:
        call(model, inputs_of("CausalLM", B, T))
    torch.testing.assert_close(last.outputs["model.layers.1.self_attn"].written(), written)


@pytest.mark.parametrize("by", WAYS)
def test_importance_where_rows_are_windows_of_images(by):
    torch.manual_seed(7)
    kind = {"embed_dim": 12, "depths": [1, 1], "num_heads": [2, 3], "window_size": 3, "image_size": 24, "patch_size": 2}
    config = transformers.AutoConfig.for_model("swin", **kind)
    model = transformers.AutoModel.from_config(config, attn_implementation="headwise").double().eval()
    inputs = {"pixel_values": torch.randn(3, 3, 24, 24).double()}
    found = importance(model, inputs, by=by, loss=squares, controls=1)
    name, whole = next(iter(found)), squares(model(**inputs), None)
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(**inputs)
    assert seen[name].shape[0] == 3 * 16
    if by == "gradient":
        factors = torch.ones(2).double().requires_grad_()
        with gate(model, {name: factors}):
            expected = -torch.autograd.grad(squares(model(**inputs), None).sum(), factors)[0]
        torch.testing.assert_close(found[name].sum(0).to(expected), expected, atol=1e-6, rtol=1e-5)
        return
    if by == "patch":
        order = derangement(3, 0)
        with torch.no_grad(), watch(model, outputs=True) as other:
            model(pixel_values=inputs["pixel_values"][order])
        source = other.outputs
    else:
        source = seen.outputs.mean() if by == "mean" else {name: torch.zeros(1, 2, 1, 1)}
    with torch.no_grad(), patch(model, source, {name: 1}):
        expected = squares(model(**inputs), None) - whole
    torch.testing.assert_close(found[name][:, 1].to(expected), expected, atol=1e-6, rtol=1e-5)


@every
def test_interventions_agree_with_each_other_and_leave_nothing(family, kind):
    model, inputs = unseen(family, kind), inputs_of(family, B, T)
    seen, whole = recorded(model, inputs), call(model, inputs)
    for name, layer in (next(iter(seen.outputs.items())), list(seen.outputs.items())[-1]):
        heads = layer.shape[1]
        factors = torch.ones(heads).to(layer.read)
        factors[[1, 3]] = 0
        found = []
        for context in (
            silence(model, {name: [1, 3]}),
            gate(model, {name: factors}),
            patch(model, {name: torch.zeros(1, heads, 1, 1)}, {name: [1, 3]}),
            silence(model, {name: [1, 3]}, positions=slice(None)),
        ):
            with context:
                found.append(call(model, inputs))
        assert not torch.allclose(found[0], whole)
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], **loose(model))
    for context in (patch(model, seen), freeze(model, seen)):
        with context:
            torch.testing.assert_close(call(model, inputs), whole, **loose(model))
    assert torch.equal(call(model, inputs), whole)
    assert not any(m._forward_hooks or m._forward_pre_hooks or "_attached" in vars(m) for m in model.modules())


@every
def test_frozen_heads_read_values_by_the_dense_weights_of_another_run(family, kind):
    model, inputs, others = unseen(family, kind), inputs_of(family, B, T), inputs_of(family, B, T, seed=1)
    before = recorded(model, others)
    name = next(iter(before))
    with freeze(model, before, {name: 2}):
        layer = recorded(model, inputs).outputs[name]
    group = layer.shape[1] // layer.value.shape[1]
    dense = before[name].to_tensor()[:, 2] @ layer.value[:, 2 // group]
    torch.testing.assert_close(layer.read[:, 2], dense, **loose(model))


@every
@pytest.mark.parametrize("by", WAYS)
def test_importance_is_removing_one_head_at_a_time(family, kind, by):
    model, inputs = unseen(family, kind), inputs_of(family, B, T)
    loss = mean_cross_entropy if family == "CausalLM" else squares
    found = importance(model, inputs, by=by, loss=None if family == "CausalLM" else squares, controls=1)
    assert sum(x.shape[1] for x in found.values()) >= 2 * H
    name = list(found)[-2]
    if by == "gradient":
        factors = torch.ones(H).to(next(model.parameters())).requires_grad_()
        with gate(model, {name: factors}):
            output = model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs)
            expected = -torch.autograd.grad(loss(output, inputs).sum(), factors)[0]
        torch.testing.assert_close(found[name].sum(0).to(expected), expected, **loose(model))
        return
    outputs = recorded(model, inputs).outputs
    source = {"silence": {name: torch.zeros(1, H, 1, 1)}, "mean": outputs.mean(), "patch": outputs.resampled()}[by]
    with torch.no_grad(), patch(model, source, {name: 3}):
        output = model(inputs) if isinstance(inputs, torch.Tensor) else model(**inputs)
    torch.testing.assert_close(found[name][:, 3], loss(output, inputs) - found.loss, **loose(model))


@causal
def test_answers_are_traced_and_kinds_are_found(kind):
    model, tokens = unseen("CausalLM", kind), inputs_of("CausalLM", 1, T)
    found = trace(model, tokens, (9, 11), draws=1)
    assert all(scores.isfinite().all() and scores.any() for scores in found.scores.values())
    kinds = head_kinds(model, samples=2, length=5, lengths=(18,))
    assert set(kinds) >= {"induction", "previous", "sink", "retrieval"}


@causal
def test_parts_sum_to_the_logit(kind):
    model, tokens = unseen("CausalLM", kind), inputs_of("CausalLM", B, T)
    if kind in NOT_SUMS:
        with pytest.raises(OptionError, match=NOT_SUMS[kind]):
            logit_attribution(model, tokens, 5)
        return
    found = logit_attribution(model, tokens, 5)
    torch.testing.assert_close(found.total, call(model, tokens)[:, -1, 5], **loose(model))
    total = sum(x.sum(1) for x in found.heads.values()) + sum(found.rest.values())
    torch.testing.assert_close(total, found.total)


@pytest.mark.parametrize(("family", "kind"), [x for x in ALL if x[0] in ("CausalLM", "MaskedLM")], ids=lambda x: x)
def test_parts_sum_to_the_score(family, kind):
    model, tokens = unseen(family, kind), inputs_of(family, 1, T)
    name = list(recorded(model, tokens))[-1]
    if kind in NOT_SUMS:
        with pytest.raises(OptionError, match=NOT_SUMS[kind]):
            why(model, tokens, name, 1, 5, 3)
        return
    found = why(model, tokens, name, 1, 5, 3)
    assert sum(":" in part for part in found.parts) == H * (len(recorded(model, tokens)) - 1)
    query, key = recorded(model, tokens)[name]._query, recorded(model, tokens)[name]._key
    group = H // key.shape[1]
    expected = recorded(model, tokens)[name]._scoring.scale_for(query.shape[3]) * (
        query[0, 1, 5] @ key[0, 1 // group, 3]
    )
    assert found.matrix.sum().item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    assert found.matrix[:-1, :-1].abs().sum() > 0
