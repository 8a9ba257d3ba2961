"""`replace` changes the class of layers, proves that numbers stay, and puts everything back where they do not."""

import copy

import pytest
import torch
from torch import nn

from headwise import HeadwiseError, OptionError, compat
from headwise.layer.replacement import Replaced, replace

B, T, S, H, E = 2, 5, 7, 3, 33


def encoder(**options):
    layer = nn.TransformerEncoderLayer(E, H, 13, dtype=torch.float64, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_every_layer_of_a_model_becomes_ours_and_the_output_stays():
    model = nn.Transformer(E, H, 1, 2, 13, dtype=torch.float64).eval()
    source, target = torch.randn(S, B, E, dtype=torch.float64), torch.randn(T, B, E, dtype=torch.float64)
    before = model(source, target)
    done = replace(model, probe=(source, target))
    assert done.names == (
        "encoder.layers.0.self_attn",
        "decoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
        "decoder.layers.1.self_attn",
        "decoder.layers.1.multihead_attn",
    )
    assert all(type(model.get_submodule(name)) is compat.MultiheadAttention for name in done.names)
    assert done.difference < 1e-12
    torch.testing.assert_close(model(source, target), before)


def test_parameters_hooks_modes_and_the_optimizer_stay():
    model = encoder(dropout=0.0)
    model.layers[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, attention = dict(model.named_parameters()), model.layers[0].self_attn
    calls = []
    attention.register_forward_hook(lambda *_: calls.append(1))
    replace(model)
    assert not calls  # the proof runs past hooks
    assert model.layers[0].self_attn is attention
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert [layer.self_attn.training for layer in model.layers] == [True, False]
    assert model.layers[0].training
    old = attention.in_proj_weight.detach().clone()
    model(torch.randn(T, B, E, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    assert calls == [1]
    assert not torch.equal(attention.in_proj_weight, old)


def test_random_numbers_and_the_fast_path_setting_stay():
    model = encoder()
    state = torch.get_rng_state()
    replace(model, probe=torch.randn(T, B, E, dtype=torch.float64, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_model_itself_may_be_the_layer():
    layer = nn.MultiheadAttention(E, H)
    assert replace(layer).names == ("",)
    assert type(layer) is compat.MultiheadAttention


def test_a_layer_in_two_places_is_replaced_once_and_stays_shared():
    shared = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"first": shared, "second": shared})
    assert replace(model).names == ("first",)
    assert model["first"] is model["second"] is shared


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True},
        {"kdim": 13, "vdim": 17, "bias": False},
        {"add_bias_kv": True, "add_zero_attn": True, "dropout": 0.5},
    ],
    ids=["plain", "batch first", "widths", "added keys"],
)
def test_layers_of_every_kind_and_dtype_pass_the_proof(options, dtype):
    done = replace(nn.MultiheadAttention(E, H, dtype=dtype, **options))
    assert done.difference < torch.finfo(dtype).eps * 16


def test_a_probe_may_be_a_tensor_or_a_dict():
    x = torch.randn(T, B, E, dtype=torch.float64)
    for probe in (x, (x,), {"src": x, "mask": nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)}):
        assert replace(encoder(), probe=probe).difference < 1e-12


def test_random_models_see_the_same_random_numbers_before_and_after():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(E, H)

        def forward(self, x):
            return self.attention(x + torch.randn_like(x), x, x)

    assert replace(Noisy(), probe=torch.randn(T, B, E)).difference < 1e-5


@pytest.mark.parametrize("wrong_with_weights", [True, False])
def test_a_layer_that_differs_is_left_as_it_was(monkeypatch, wrong_with_weights):
    def wrong(self, *args, **kwargs):
        output, weights = nn.MultiheadAttention.forward(self, *args, **kwargs)
        return output * (1.01 if kwargs["need_weights"] == wrong_with_weights else 1), weights

    monkeypatch.setattr(compat.MultiheadAttention, "forward", wrong)
    model = encoder()
    with pytest.raises(
        OptionError, match=r"layer 'layers.0.self_attn': torch and headwise differ by 0.0.*float64.*1.4"
    ):
        replace(model)
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    assert model.training


@pytest.mark.parametrize("fault", ["numbers", "shape", "exception"])
def test_a_model_that_differs_is_put_back(monkeypatch, fault):
    real = compat.MultiheadAttention.forward

    def wrong(self, query, *args, **kwargs):  # only for the probe's length: each layer alone passes
        output, weights = real(self, query, *args, **kwargs)
        if query.shape[0] != 11:
            return output, weights
        if fault == "exception":
            raise ZeroDivisionError
        return (output + 1, weights) if fault == "numbers" else (output[:1], weights)

    monkeypatch.setattr(compat.MultiheadAttention, "forward", wrong)
    model = nn.ModuleList([nn.MultiheadAttention(E, H)])
    model.forward = lambda x: model[0](x, x, x)
    error = ZeroDivisionError if fault == "exception" else OptionError
    with pytest.raises(error):
        replace(model, probe=torch.randn(11, B, E))
    assert type(model[0]) is nn.MultiheadAttention


def test_what_torch_makes_nan_is_not_compared():
    model = nn.MultiheadAttention(E, H, batch_first=True)
    padding = torch.tensor([[False] * T, [True] * T])
    x = torch.randn(B, T, E)
    replace(model, probe={"query": x, "key": x, "value": x, "key_padding_mask": padding})
    assert model(x, x, x, key_padding_mask=padding)[1][1].eq(0).all()


class MyAttention(nn.MultiheadAttention):
    pass


def test_subclasses_are_left_alone_and_named():
    model = nn.ModuleList([nn.MultiheadAttention(E, H), MyAttention(E, H), compat.MultiheadAttention(E, H)])
    done = replace(model)
    assert (done.names, done.left_alone) == (("0",), ("1",))
    assert type(model[1]) is MyAttention
    assert "left alone: '1'" in repr(done)


def test_the_result_says_what_was_done():
    assert repr(Replaced(("a", "b"), (), 1.25e-7)) == (
        "Replaced(2 layers: 'a', 'b', largest relative difference 1.2e-07)"
    )
    assert repr(replace(encoder(), check=False)) == (
        "Replaced(2 layers: 'layers.0.self_attn', 'layers.1.self_attn', not checked)"
    )
    assert "'3' and 2 more, not" in repr(Replaced(tuple("012345"), (), None))


def test_replaced_models_copy_and_save(tmp_path):
    model = encoder().eval()
    replace(model)
    x = torch.randn(T, B, E, dtype=torch.float64)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert type(other.layers[0].self_attn) is compat.MultiheadAttention
        torch.testing.assert_close(other(x), model(x))


def test_a_layer_on_the_meta_device_is_refused_or_taken_unchecked():
    model = nn.MultiheadAttention(E, H, device="meta")
    with pytest.raises(OptionError, match="layer '' is on the meta device.*check=False"):
        replace(model)
    assert replace(model, check=False).difference is None


def test_bad_input_is_refused():
    ours, patched = compat.MultiheadAttention(E, H), nn.MultiheadAttention(E, H)
    patched.forward = lambda *_: None
    broken = nn.MultiheadAttention(E, H)
    nn.init.constant_(broken.in_proj_weight, torch.nan)
    for model, options, message in (
        ("model", {}, r"replace\(str\): expected a torch.nn.Module"),
        (nn.Linear(3, 5), {}, "replace.Linear.: looked for.*found none; 0 are headwise's already, 0 are of a subclass"),
        (ours, {}, "1 are headwise's already"),
        (MyAttention(E, H), {}, "1 are of a subclass"),
        (patched, {}, "layer '' has a forward attached to the object itself"),
        (broken, {}, "layer '': torch's numbers are all NaN"),
        (encoder(), {"probe": torch.ones(1), "check": False}, "the probe would not be used"),
    ):
        with pytest.raises(HeadwiseError, match=message):
            replace(model, **options)
