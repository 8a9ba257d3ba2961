"""Every method of a study on models that nothing in headwise knows by name: it works, or says what it cannot do.

The truth is transformers' eager attention: its dense weights, and its own modules.
"""

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
from tiny_models import ALL, H, inputs_of, states, unseen

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
B, T = 2, 13
UNKNOWN_PROJECTION = {"bitnet"}  # it normalizes what heads read before the output projection
NOT_SUMS = {"gemma2": "caps", "bitnet": "multiply parts of the stream"}  # its norm is inside the feed-forward network
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


def projected(layer):
    """What the module that receives the heads' reading makes of it."""
    with torch.no_grad():
        return layer._projection.module.forward(layer.read.transpose(1, 2).flatten(2))


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
