"""Importance by every method equals removing one head at a time by hand; gradients are those of the papers."""

import json

import pytest
import torch

from headwise import (
    OptionError,
    ShapeError,
    evidence,
    importance,
    load_builtin,
    logit_attribution,
    patch,
    silence,
    trace,
    watch,
)
from headwise.study.importance import Importance, drawn_heads, mean_cross_entropy
from tiny_models import CAUSAL, H, V, states, tiny

B, T = 3, 7


def squares(output, _):
    """A loss of any model: the mean square of its output."""
    return states(output).square().flatten(1).mean(1)


@pytest.fixture(params=["builtin", "gpt2", "llama", "bert", "bart"])
def model(request):
    return tiny(request.param)


@pytest.fixture
def tokens():
    return torch.randint(3, V, (B, T))


def one_by_one(model, tokens, context):
    """What each head adds to the loss, one pass per head."""
    with torch.no_grad():
        base = squares(model(tokens), None)
        with watch(model) as seen:
            model(tokens)
        found = {}
        for name in seen:
            rows = []
            for head in range(H):
                with context({name: head}):
                    rows.append(squares(model(tokens), None) - base)
            found[name] = torch.stack(rows, 1)
    return found


def record(model, tokens):
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(tokens)
    return seen


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, effects in expected.items():
        torch.testing.assert_close(found[name], effects)


def test_silencing_many_heads_in_one_pass_is_silencing_each(model, tokens):
    found = importance(model, tokens, by="silence", loss=squares, controls=0, batch=11)
    assert_same(found, one_by_one(model, tokens, lambda heads: silence(model, heads)))


def test_replacing_by_the_mean_is_patching_each_with_it(model, tokens):
    mean = record(model, tokens).outputs.mean()
    found = importance(model, tokens, by="mean", loss=squares, controls=0, batch=2)
    assert_same(found, one_by_one(model, tokens, lambda heads: patch(model, mean, heads)))


def test_patching_is_patching_each_with_the_other_run(model, tokens):
    other = torch.randint(3, V, (B, T))
    seen = record(model, other)
    found = importance(model, tokens, by="patch", source=other, loss=squares, controls=0)
    assert_same(found, one_by_one(model, tokens, lambda heads: patch(model, seen, heads)))


def test_the_gradient_is_that_of_michel(model, tokens):
    """Σ ⟨output of the head, ∂L/∂output⟩, for every sample; removing the head lowers the loss by it, to first order."""
    with watch(model, outputs=True) as seen:
        loss = squares(model(tokens), None)
    reads = [layer.read for layer in seen.outputs.values()]
    slopes = torch.autograd.grad(loss.sum(), reads)
    found = importance(model, tokens, loss=squares, controls=2)
    for name, read, slope in zip(seen.outputs, reads, slopes, strict=True):
        torch.testing.assert_close(found[name].double(), -(read * slope).sum((2, 3)).detach(), atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found.scores[name], found[name].abs().mean(0))
    assert found.passes == 1


def test_controls_are_random_subspaces_as_wide_as_a_head(tokens):
    model = tiny("builtin")
    found = importance(model, tokens, by="silence", loss=squares, controls=3, seed=4)
    again = importance(model, tokens, by="silence", loss=squares, controls=3, seed=4, batch=5)
    slopes = importance(model, tokens, by="gradient", loss=squares, controls=3, seed=4)
    for name in found:
        assert found.controls[name].shape == slopes.controls[name].shape == (B, 3)
        torch.testing.assert_close(found.controls[name], again.controls[name])
        assert found.controls[name].abs().min() > 0
        # The heads share all directions evenly, so on average a random subspace removes 1/H of each of them.
    whole = importance(model, tokens, loss=squares, controls=400)
    for name in whole:
        torch.testing.assert_close(
            whole.controls[name].mean(1), whole[name].mean(1), atol=0.2 * whole.controls[name].std().item(), rtol=0
        )


@pytest.mark.parametrize("kind", CAUSAL)
def test_models_that_predict_the_next_token_have_a_usual_loss(kind, tokens):
    model = tiny(kind)
    found = importance(model, tokens, controls=0)
    with torch.no_grad():
        torch.testing.assert_close(found.loss, mean_cross_entropy(model(tokens), tokens))
    padded = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if kind != "builtin":
        assert_same(importance(model, padded, controls=0), dict(found))


def test_padding_is_left_out_of_the_usual_loss():
    model = tiny("llama")
    tokens = torch.randint(3, V, (2, T))
    real = torch.ones_like(tokens)
    real[1, 5:] = 0
    found = importance(model, {"input_ids": tokens, "attention_mask": real}, by="silence", controls=0)
    short = importance(model, tokens[1:, :5], by="silence", controls=0)
    for name in found:
        torch.testing.assert_close(found[name][1:], short[name])


@pytest.mark.parametrize("kind", ["bert", "bart"])
def test_models_that_do_not_predict_the_next_token_ask_for_a_loss(kind, tokens):
    with pytest.raises(OptionError, match=r"Pass loss=, a function"):
        importance(tiny(kind), tokens)


def test_a_loss_that_is_one_number_for_the_batch_is_refused(tokens):
    with pytest.raises(ShapeError, match=r"expected one number for each of 3 samples"):
        importance(tiny("builtin"), tokens, loss=lambda output, _: output.mean())


def test_an_unknown_method_is_refused(tokens):
    with pytest.raises(OptionError, match=r"by='magic'.*'gradient', 'silence'"):
        importance(tiny("builtin"), tokens, by="magic")
    with pytest.raises(OptionError, match="needs source="):
        importance(tiny("builtin"), tokens[:1], by="patch")


def test_a_result_tells_its_heads_in_words_numbers_and_a_picture(tokens):
    found = importance(tiny("builtin"), tokens, controls=2)
    lines = found.table(4).splitlines()
    assert len(lines) == 5
    assert "blocks." in lines[1]
    data = json.loads(json.dumps(found.to_json()))
    assert len(data["heads"]) == 3 * H
    assert data["heads"][0]["effect"] == pytest.approx(found["blocks.0.attention"][:, 0].mean().item())
    assert repr(found) == "Importance(by='gradient', 18 heads in 3 layers, 3 samples)"
    pytest.importorskip("matplotlib").use("agg")
    assert found.plot().get_xlabel() == "head"


def test_the_picture_of_all_heads_has_room_for_the_names_of_its_layers():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    scores = {f"model.layers.{layer}.self_attn": torch.rand(8) for layer in range(7)}
    axes = drawn_heads(scores, "a score")
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_yticklabels()] == list(scores)
    assert min(label.get_window_extent().x0 for label in axes.get_yticklabels()) >= 0
    pyplot.close(axes.figure)


def test_rank_correlation_is_spearmans():
    def made(numbers):
        return Importance("silence", {"a": torch.tensor([numbers])}, {"a": torch.zeros(1, 0)}, torch.zeros(1), 1)

    assert made([1.0, 2.0, 3.0]).rank_correlation(made([10.0, 20.0, 21.0])) == pytest.approx(1)
    assert made([1.0, 2.0, 3.0]).rank_correlation(made([5.0, -4.0, 3.0])) == pytest.approx(-1)
    # by hand: ranks 0, 1.5, 1.5, 3 against 0, 1, 2, 3
    assert made([1.0, 2.0, 2.0, 4.0]).rank_correlation(made([1.0, 2.0, 3.0, 4.0])) == pytest.approx(0.9486833)


def test_gradient_and_silencing_agree_on_the_built_in_model():
    once = torch.randint(1, 8192, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.zeros(2, 1, dtype=torch.long), once, once], 1)
    model = load_builtin().gpt
    slopes, removed = (importance(model, tokens, by=by, controls=0) for by in ("gradient", "silence"))
    assert slopes.rank_correlation(removed) > 0.9


def test_texts_and_unknown_layers_are_refused_in_words():
    builtin = load_builtin()
    with pytest.raises(OptionError, match=r"importance\(tokens='hello'\): expected token ids"):
        importance(builtin.gpt, "hello")
    found = importance(builtin.gpt, builtin.tokens("The captain looked at the sea."), controls=1)
    with pytest.raises(OptionError, match=r"'blocks.9.attention'\]: not a layer of this model; there are \['blocks.0"):
        found["blocks.9.attention"]
    with pytest.raises(OptionError, match=r"one text is given; expected several"):
        evidence(builtin, "one text")


def test_a_model_that_computes_without_gradients_is_told_to_silence(tokens):
    model = tiny("llama")
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda _, __, output: output.detach())
    with pytest.raises(OptionError, match=r"no gradient in the heads of 'model.layers.0.self_attn'.*by='silence'"):
        importance(model, tokens)
    with torch.no_grad(), pytest.raises(OptionError, match="'gradient' cannot follow the answer"):
        trace(tiny_without_gradients(), tokens[:1], (4, 6), passages=[(0, 2), (2, 4)])


def tiny_without_gradients():
    """A model whose first layer runs without gradients."""
    model = tiny("llama")
    layer = model.model.layers[0]
    layer.forward = torch.no_grad()(layer.forward)
    return model


def test_samples_that_have_no_loss_are_refused():
    with pytest.raises(OptionError, match="samples of 1 token have no next token"):
        importance(tiny("llama"), torch.tensor([[3], [4]]))
    with pytest.raises(OptionError, match=r"\(0, 7\)\): there are no samples"):
        importance(tiny("llama"), torch.zeros(0, 7, dtype=torch.long))


@pytest.mark.parametrize("kind", CAUSAL)
def test_tokens_outside_the_vocabulary_are_refused(kind, tokens):
    model = tiny(kind)
    tokens[1, 2] = V
    for call in (importance, logit_attribution, lambda m, t: trace(m, t[1:2], (4, 6))):
        with pytest.raises(OptionError, match=rf"token {V} is outside the model's vocabulary, from 0 to {V - 1}"):
            call(model, tokens)


def test_every_head_has_an_effect_and_its_spread(tokens):
    found = importance(tiny("gpt2"), tokens, controls=0)
    effects = found["transformer.h.1.attn"][:, 4].double()
    effect, error = found.heads["transformer.h.1.attn", 4]
    assert effect == pytest.approx(effects.mean().item())
    assert error == pytest.approx(effects.std().item() / B**0.5)
    assert len(found.heads) == 3 * H
    assert "nan" not in importance(tiny("gpt2"), tokens[:1], controls=0).table()
