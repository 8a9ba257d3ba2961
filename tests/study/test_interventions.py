"""A silent head adds nothing: the same as a model whose output projection has zeros in that head's columns."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import headwise
from headwise import MultiHeadAttention, OptionError, compat, load_builtin, replace, silence, watch


def zeroed(layer, heads):
    """A copy whose output projection ignores these heads."""
    layer = copy.deepcopy(layer)
    width = layer.head_dim
    with torch.no_grad():
        for head in heads:
            layer.out_proj.weight[:, head * width : (head + 1) * width] = 0
    return layer


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "head_dim": 5}, {"d_key": 24}], ids=["plain", "gqa", "apart"]
)
@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_silent_head_is_one_with_zeros_in_the_output_projection(options, length, gradients):
    layer = MultiHeadAttention(24, 6, causal=True, **options).double().eval()
    x = torch.randn(2, length, 24, dtype=torch.float64)
    with torch.set_grad_enabled(gradients), silence(layer, {"": [1, 4]}):
        found = layer(x)
    torch.testing.assert_close(found, zeroed(layer, [1, 4])(x))
    assert not torch.allclose(found, layer(x))


@pytest.mark.parametrize("wanted", [False, True])
def test_torchs_interface_falls_silent_too_also_past_its_shortcut(wanted):
    layer = compat.MultiheadAttention(12, 3, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    with torch.no_grad(), silence(layer, {"": 2}):
        found, _ = layer(x, x, x, need_weights=wanted)
    torch.testing.assert_close(found, zeroed(layer, [2])(x, x, x)[0])


def test_a_layer_of_torchs_encoder_falls_silent():
    old = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 12)
    replace(old)
    with torch.no_grad():
        with silence(old, {"self_attn": [0]}):
            found = old(x)
        quiet = copy.deepcopy(old)
        quiet.self_attn = zeroed(old.self_attn, [0])
        torch.testing.assert_close(found, quiet(x))
        assert not torch.allclose(found, old(x))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_heads_of_transformers_models_fall_silent(kind):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("headwise.huggingface")
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model(kind, vocab_size=31, **sizes)
    model = transformers.AutoModel.from_config(config, attn_implementation="headwise").eval()
    ids = torch.randint(31, (1, 7))
    name = {"llama": "layers.1.self_attn", "gpt2": "h.1.attn", "bert": "encoder.layer.1.attention.self"}[kind]
    quiet = copy.deepcopy(model)
    with torch.no_grad():
        if kind == "llama":
            quiet.layers[1].self_attn.o_proj.weight[:, 8:16] = 0
        elif kind == "gpt2":
            quiet.h[1].attn.c_proj.weight[8:16] = 0  # its projections are stored the other way round
        else:
            quiet.encoder.layer[1].attention.output.dense.weight[:, 8:16] = 0
        with silence(model, {name: [1]}):
            found = model(ids).last_hidden_state
        torch.testing.assert_close(found, quiet(ids).last_hidden_state)
        assert not torch.allclose(found, model(ids).last_hidden_state)
        with (
            pytest.raises(OptionError, match="this layer has 3 heads|one of 0 to 2"),
            silence(model, {name: [5]}),
        ):
            model(ids)


def test_nothing_is_left_on_the_model_and_contexts_nest():
    gpt = load_builtin().gpt
    ids = torch.arange(5, 16)[None]
    layer = gpt.blocks[2].attention
    with torch.no_grad():
        plain = gpt(ids)
        with silence(gpt, {"blocks.2.attention": [1]}) as outer:
            with silence(gpt, {"blocks.2.attention": [3]}):
                assert layer._attached.silent() == (1, 3)
            assert layer._attached.silent() == (1,)
            assert repr(outer) == "Silenced({'blocks.2.attention': (1,)})"
        assert "_attached" not in vars(layer)
        assert torch.equal(gpt(ids), plain)
        assert torch.backends.mha.get_fastpath_enabled()


def test_a_silent_head_still_looks():
    layer = MultiHeadAttention(24, 3).eval()
    x = torch.randn(1, 5, 24)
    with silence(layer, {"": [1]}), watch(layer) as seen:
        layer(x)
    torch.testing.assert_close(seen[""][:], layer(x, return_weights=True)[1][:])


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ({"nowhere": [0]}, "'nowhere' is not a headwise layer of this model; there are \\[''\\]"),
        ({"": [3]}, "3\\): expected one of 0 to 2"),
        ({"": [-1]}, "-1\\): expected one of 0 to 2"),
        ({"": [True]}, "True\\): expected one of 0 to 2"),
        ([("", 0)], "expected heads by layer"),
    ],
)
def test_what_cannot_be_silenced_is_refused(heads, words):
    with pytest.raises(OptionError, match=words):
        silence(MultiHeadAttention(24, 3), heads)


def test_a_model_without_our_attention_is_refused():
    with pytest.raises(OptionError, match=r"silence\(Linear\): there is no headwise attention"):
        silence(nn.Linear(2, 3), {})
    with pytest.raises(OptionError, match="expected a torch.nn.Module"):
        silence(load_builtin(), {})


def test_logits_of_a_part_are_those_of_the_model():
    gpt = headwise.load_builtin().gpt
    ids = torch.arange(5, 16)[None]
    with torch.no_grad():
        torch.testing.assert_close(gpt.logits(gpt.features(ids)[:, 3:7]), gpt(ids)[:, 3:7])


def test_heads_are_silent_in_one_thread_and_not_in_another():
    layer, x = MultiHeadAttention(24, 3).eval(), torch.randn(1, 5, 24)
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        plain = layer(x)
        with silence(layer, {"": [0, 2]}):
            assert torch.equal(pool.submit(torch.no_grad()(layer), x).result(), plain)
            assert not torch.allclose(layer(x), plain)
        assert torch.equal(layer(x), plain)
