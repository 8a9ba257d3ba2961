"""The parts of the residual stream sum to logits and to scores, on models nobody listed; others are refused by name."""

import gc
import json

import pytest
import torch

from headwise import OptionError, load_builtin, logit_attribution, silence, watch, why
from headwise.study.residual import FrozenNorm, Stream
from tiny_models import CAUSAL, E, H, V, inputs_of, tiny, unseen

T = 7


@pytest.fixture(params=CAUSAL)
def model(request):
    return tiny(request.param)


@pytest.fixture
def tokens():
    return torch.randint(3, V, (2, T))


@pytest.mark.parametrize("against", [None, 9])
@pytest.mark.parametrize("position", [-1, 3])
def test_parts_sum_to_the_logit(model, tokens, against, position):
    found = logit_attribution(model, tokens, 5, against=against, position=position)
    with torch.no_grad():
        output = model(tokens)
        logits = (output if isinstance(output, torch.Tensor) else output.logits)[:, position]
    expected = logits[:, 5] - (0 if against is None else logits[:, against])
    torch.testing.assert_close(found.total, expected)
    total = sum(x.sum(1) for x in found.heads.values()) + sum(found.rest.values())
    torch.testing.assert_close(total, expected, atol=1e-6, rtol=1e-6)


def test_a_head_of_the_last_layer_adds_what_its_silence_takes_if_norms_are_frozen():
    """Written from the definition: logit = U · gain · (stream / rms), with the rms of the whole run."""
    model = tiny("builtin")
    tokens = torch.randint(3, V, (1, T))
    found = logit_attribution(model, tokens)
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(tokens)
    states = []
    hook = model.norm.register_forward_hook(lambda _, args, __: states.append(args[0]))
    with torch.no_grad():
        logits = model(tokens)
    hook.remove()
    rms = (states[0][0, -1].square().mean() + 1e-6).sqrt()
    target = logits[0, -1].argmax()
    for name, layer in seen.outputs.items():
        written = layer.read[0, :, -1] @ torch.eye(layer.shape[3]).double()
        by_head = torch.stack([written[h] @ layer.out[h] for h in range(H)])
        expected = (by_head / rms * model.norm.weight) @ model.embedding.weight[target]
        torch.testing.assert_close(found.heads[name][0], expected.detach())


def test_the_target_is_the_likeliest_token_by_default(model, tokens):
    found = logit_attribution(model, tokens)
    with torch.no_grad():
        output = model(tokens)
        logits = (output if isinstance(output, torch.Tensor) else output.logits)[:, -1]
    assert torch.equal(found.target, logits.argmax(-1))
    assert "head" in found.table(3)
    assert json.loads(json.dumps(found.to_json()))["total"] == found.total.tolist()


def test_a_score_is_the_sum_of_its_parts(model, tokens):
    name = list(logit_attribution(model, tokens[:1]).heads)[2]
    with torch.no_grad(), watch(model) as seen:
        model(tokens[:1])
    scores = seen[name]._source().scores()
    for head, query, key in ((1, 5, 3), (4, 6, 6), (0, 2, 0)):
        found = why(model, tokens[:1], name, head, query, key)
        assert found.matrix.sum().item() == pytest.approx(scores[0, head, query, key].item(), abs=1e-6)
        assert found.score == pytest.approx(scores[0, head, query, key].item())
        assert found.weight == pytest.approx(seen[name][0, head, query, key].item())
        assert sum(found.query.values()) == pytest.approx(sum(found.key.values()))
        embeddings = [part for part in found.parts if "emb" in part or "wte" in part or "wpe" in part]
        assert len(found.parts) == len(embeddings) + 2 * (H + 1) + 1
        assert embeddings


def test_the_previous_token_head_is_in_the_keys_of_the_induction_head():
    """On repeated random tokens, head 5.4's key reads what 4.2 wrote about the token before: the known circuit."""
    model = load_builtin().gpt
    once = torch.randint(1, 8192, (24,), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([torch.tensor([0]), once, once])[None]
    found = why(model, tokens, "blocks.5.attention", 4, 30, 30 - 23)
    assert found.weight > 0.8
    parts = {name: amount for name, amount in found.key.items() if ":" in name}
    assert max(parts, key=parts.get) == "blocks.4.attention:2"
    assert "blocks.4.attention:2" in found.table(5)
    assert json.loads(json.dumps(found.to_json()))["parts"] == found.parts


def test_a_post_norm_model_hands_parts_through_its_frozen_norms():
    """Written from BERT's definition: x₁ = norm₂(norm₁(x₀ + heads) + feed-forward), and layer 1's query is W x₁."""
    model, tokens = tiny("bert"), torch.randint(3, V, (1, T))
    with torch.no_grad(), watch(model, outputs=True) as seen:
        states = model(tokens, output_hidden_states=True).hidden_states
    first, second, head, query, key = *model.encoder.layer[:2], 2, 5, 3
    layer = seen.outputs["encoder.layer.0.attention.self"]

    def centered(x):
        return x - x.mean(-1, keepdim=True)

    def frozen(part, norm, whole):
        scale = (whole.var(-1, correction=0, keepdim=True) + norm.eps).rsqrt()
        return centered(part) * scale * norm.weight

    with torch.no_grad():
        added = states[0][0] + layer.written().sum(1)[0] + layer.bias
        middle = first.attention.output.LayerNorm(added)
        fed = first.output.dense(first.intermediate(middle))
        part = frozen(layer.written(heads=4)[0, 0], first.attention.output.LayerNorm, added)
        part = frozen(part, first.output.LayerNorm, middle + fed)
        size = slice(head * E // H, (head + 1) * E // H)
        source = (part @ second.attention.self.query.weight.T)[query, size]
        target = second.attention.self.key(states[1])[0, key, size]
    found = why(model, tokens, "encoder.layer.1.attention.self", head, query, key)
    expected = source @ target / (E // H) ** 0.5
    assert found.query["encoder.layer.0.attention.self:4"] == pytest.approx(expected.item(), rel=1e-6)
    assert "embeddings.position_embeddings" in found.parts


def test_calls_of_a_shared_layer_are_layers_of_their_own():
    model, tokens = unseen("MaskedLM", "albert"), inputs_of("MaskedLM", 1, T)
    with torch.no_grad(), watch(model) as seen:
        model(tokens)
    *_, before, last = seen
    found = why(model, tokens, last, 1, 4, 2)
    assert f"{before}:5" in found.parts
    assert found.score == pytest.approx(found.matrix.sum().item())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: tiny("bert"), "gives no logits"),
        (lambda: unseen("MaskedLM", "bert"), "'cls.predictions.transform.transform_act_fn' is nonlinear and comes"),
    ],
    ids=["no logits", "a nonlinear head"],
)
def test_models_whose_logits_are_no_sums_are_refused_by_name(model, words, tokens):
    with pytest.raises(OptionError, match=words):
        logit_attribution(model(), tokens)


def test_a_logit_that_a_function_changes_is_refused(tokens):
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda _, __, logits: 2 * (logits / 2).tanh())
    with pytest.raises(OptionError, match="still not a sum of what heads"):
        logit_attribution(model, tokens)


def test_a_block_that_scales_its_heads_is_followed(tokens):
    model = tiny("llama")
    layer = model.model.layers[1]
    layer.self_attn.register_forward_hook(lambda *call: (2 * call[2][0], *call[2][1:]))
    found = logit_attribution(model, tokens, 5)
    total = sum(x.sum(1) for x in found.heads.values()) + sum(found.rest.values())
    with torch.no_grad():
        torch.testing.assert_close(total, model(tokens).logits[:, -1, 5], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"position": 7}, r"position=7\): the text has 7 tokens"),
        ({"target": V}, f"token {V} is not in the vocabulary, from 0 to {V - 1}"),
        ({"target": torch.tensor([1, 2, 3])}, "3 tokens for 2 samples"),
    ],
    ids=["position", "token", "tokens"],
)
def test_places_and_tokens_that_do_not_exist_are_refused(given, words, tokens):
    with pytest.raises(OptionError, match=words):
        logit_attribution(tiny("builtin"), tokens, **given)


def test_a_place_outside_the_map_is_refused():
    with pytest.raises(OptionError, match=r"query=9, key=2\): the map is .* \(1, 6, 7, 7\)"):
        why(tiny("builtin"), torch.randint(V, (1, T)), "blocks.1.attention", 0, 9, 2)
    with pytest.raises(OptionError, match=r"head=6.*\(1, 6, 7, 7\)"):
        why(tiny("builtin"), torch.randint(V, (1, T)), "blocks.1.attention", 6, 3, 2)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(11), torch.nn.RMSNorm(11, eps=1e-5)], ids=["layer", "rms"])
def test_a_frozen_norm_is_the_norm_of_the_whole(norm):
    norm, x = norm.double(), torch.randn(2, 3, 11).double()
    torch.nn.init.normal_(norm.weight)
    frozen = FrozenNorm.of(norm, x, norm(x).detach())
    part = torch.randn(2, 3, 11).double()
    torch.testing.assert_close(frozen(x) + frozen.bias, norm(x).detach())
    torch.testing.assert_close(frozen(part) + frozen(x - part), frozen(x))
    assert FrozenNorm.of(torch.nn.GELU(), x, torch.nn.functional.gelu(x)) is None


def test_nothing_is_left_on_the_model(tokens):
    model = tiny("gpt2")
    Stream(model, tokens[:1]).parts(lambda output, _: output.logits[0, -1, :3])
    assert not any(m._forward_hooks or m._forward_pre_hooks or "_attached" in vars(m) for m in model.modules())
    with silence(model, {"transformer.h.2.attn": 1}):
        quiet = logit_attribution(model, tokens)
    assert not quiet.heads["transformer.h.2.attn"][:, 1].any()


def test_why_refuses_a_key_that_the_query_may_not_see():
    builtin = load_builtin()
    tokens = builtin.tokens("The captain looked at the sea.")
    with pytest.raises(OptionError, match=r"query=2, key=4\): this query may not attend to this key"):
        why(builtin.gpt, tokens, "blocks.5.attention", head=4, query=2, key=4)


def test_a_map_that_was_watched_knows_why(model, tokens):
    with torch.no_grad(), watch(model) as seen:
        model(tokens)
    name = list(seen)[-1]
    expected = why(model, tokens[1:], name, 4, 5, 3)
    whole = seen[name].why(5, 3, head=4, sample=1)
    part = seen[name].select(batch=[1], heads=[2, 4], rows=slice(3, 6)).why(2, 3, head=1)
    for found in (whole, part):
        assert found.parts == expected.parts
        torch.testing.assert_close(found.matrix, expected.matrix)
    assert seen[name].select(heads=4).why(5, 3, sample=1).score == pytest.approx(expected.score)


def test_a_map_without_a_model_says_how_to_ask_why(tokens):
    model = tiny("builtin")
    with torch.no_grad(), watch(model) as seen:
        model(tokens)
    weights = seen["blocks.1.attention"]
    with pytest.raises(OptionError, match=r"this map has 6 heads; pass head=, from 0 to 5"):
        weights.why(3, 2)
    with pytest.raises(OptionError, match=r"why\(query=7\).*\(2, 6, 7, 7\)"):
        weights.why(7, 2, head=1)
    with pytest.raises(OptionError, match=r"does not know its model. Take it from `with watch\(model\)"):
        weights.clone().why(3, 2, head=1)
    with torch.no_grad(), watch(model) as seen:
        model(tokens[:1], caches=model.make_caches())
    with pytest.raises(OptionError, match="had a cache or other objects among its arguments"):
        seen["blocks.1.attention"].why(3, 2, head=1)
    del model, seen
    gc.collect()
    with pytest.raises(OptionError, match="the model of this map does not exist anymore"):
        weights.why(3, 2, head=1)
