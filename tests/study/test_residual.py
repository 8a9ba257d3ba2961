"""The parts of the residual stream sum to logits and to scores, on models nobody listed; others are refused by name."""

import json

import pytest
import torch

from headwise import OptionError, load_builtin, logit_attribution, silence, watch, why
from headwise.study.residual import FrozenNorm, Stream
from tiny_models import CAUSAL, H, V, tiny

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
        assert len(found.parts) == 1 + 2 * (H + 2) + 1


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


@pytest.mark.parametrize(
    ("kind", "words"),
    [("bart", "does not add what its heads write"), ("bert", "gives no logits")],
)
def test_models_without_such_a_stream_are_refused_by_name(kind, words, tokens):
    with pytest.raises(OptionError, match=words):
        logit_attribution(tiny(kind), tokens)


def test_a_block_that_scales_its_heads_is_refused(tokens):
    model = tiny("llama")
    layer = model.model.layers[1]
    layer.self_attn.register_forward_hook(lambda *call: (2 * call[2][0], *call[2][1:]))
    with pytest.raises(OptionError, match=r"block 'model.layers.1' does not add"):
        logit_attribution(model, tokens)


def test_queries_that_are_normalized_are_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model("qwen3", vocab_size=V, num_key_value_heads=2, head_dim=4, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="headwise").double().eval()
    with pytest.raises(OptionError, match="are not linear in its input"):
        why(model, torch.randint(V, (1, T)), "model.layers.1.self_attn", 0, 3, 2)


def test_a_place_outside_the_map_is_refused():
    with pytest.raises(OptionError, match=r"positions \[9, 2\]: the text has 7 tokens"):
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
    Stream(model, tokens, [-1])
    assert not any(m._forward_hooks or m._forward_pre_hooks or "_attached" in vars(m) for m in model.modules())
    with silence(model, {"transformer.h.2.attn": 1}):
        quiet = logit_attribution(model, tokens)
    assert not quiet.heads["transformer.h.2.attn"][:, 1].any()


def test_why_refuses_a_key_that_the_query_may_not_see():
    builtin = load_builtin()
    tokens = builtin.tokens("The captain looked at the sea.")
    with pytest.raises(OptionError, match=r"query=2, key=4\): this query may not attend to this key"):
        why(builtin.gpt, tokens, "blocks.5.attention", head=4, query=2, key=4)
