"""What heads write, summed over heads, is what their layer adds; found on models whose names nobody listed."""

import pytest
import torch
from torch import nn

from headwise import MultiHeadAttention, OptionError, StaleMapError, compat, rotary, watch
from tiny_models import E, H, tiny

B, T, D = 2, 7, 4


def written_by_hand(model, kind, x):
    """The modules that transformers' code calls the output projections, and what each puts out."""
    ends = ("out_proj", "c_proj", "o_proj", "attention.output.dense", "attention.dense")
    found, hooks = {}, []
    for name, module in model.named_modules():
        if name.endswith(ends) and "mlp" not in name:
            hooks.append(module.register_forward_hook(lambda m, _, y, name=name: found.update({name: (m, y)})))
    model(x)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kind", ["builtin", "gpt2", "llama", "bert", "gpt_neox", "bart"])
def test_what_heads_write_sums_to_the_output_of_their_projection(kind):
    model = tiny(kind)
    x = torch.randint(3, 31, (B, T))
    with torch.no_grad():
        with watch(model, outputs=True) as seen:
            model(x)
        expected = written_by_hand(model, kind, x)
    assert len(seen.outputs) == len(expected) == len(seen)
    for layer, (module, output) in zip(seen.outputs.values(), expected.values(), strict=True):
        bias = 0 if getattr(module, "bias", None) is None else module.bias
        assert layer.read.shape == (B, H, T, D)
        torch.testing.assert_close(layer.written().sum(1) + bias, output)
        torch.testing.assert_close(layer.norms(), layer.written().norm(dim=-1))
        torch.testing.assert_close(layer.written(heads=[4, 1], rows=-1), layer.written()[:, [4, 1], -1:])
        read = layer.weights.to_tensor() @ layer.value.repeat_interleave(H // layer.value.shape[1], 1)
        torch.testing.assert_close(layer.read, read)
        by_value = layer.by_value().to_tensor()
        scaled = layer.weights.to_tensor() * torch.einsum(
            "bhsd,hde->bhse", layer.value.repeat_interleave(H // layer.value.shape[1], 1), layer.out
        ).norm(dim=-1).unsqueeze(2)
        torch.testing.assert_close(by_value, scaled / scaled.sum(-1, keepdim=True))
        torch.testing.assert_close(layer.contributions().mass_on([(0, T)])[..., 0], torch.ones(B, H, T).double())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_layer_that_wraps_its_projection_is_understood():
    class Adapted(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.down, self.up = inner, nn.Linear(E, 2, bias=False), nn.Linear(2, E, bias=False)

        def forward(self, x):
            return self.inner(x) + self.up(self.down(x))

    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj = Adapted(attention.o_proj).double()
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(torch.randint(31, (B, T)))
    layer = seen.outputs["model.layers.1.self_attn"]
    merged = layer.read.transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.written().sum(1), attention.o_proj(merged).detach())


def test_a_projection_that_is_not_linear_is_refused_by_name():
    model = tiny("llama")
    attention = model.model.layers[1].self_attn
    attention.o_proj = nn.Sequential(nn.RMSNorm(E), attention.o_proj).double()
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(torch.randint(31, (B, T)))
    assert seen.outputs["model.layers.0.self_attn"].out.shape == (H, D, E)
    with pytest.raises(OptionError, match=r"output projection of 'model.layers.1.self_attn' is not known"):
        seen.outputs["model.layers.1.self_attn"].written()


def test_a_layer_without_a_projection_writes_what_it_reads():
    layer = MultiHeadAttention(E, H, out_proj=False).double()
    with watch(layer, outputs=True) as seen:
        output = layer(torch.randn(B, T, E).double())
    torch.testing.assert_close(seen.outputs[""].written().sum(1), output)


def test_torchs_interface_hands_out_what_heads_write():
    layer, x = compat.MultiheadAttention(E, H, batch_first=True).double().eval(), torch.randn(B, T, E).double()
    with torch.no_grad(), watch(layer, outputs=True) as seen:
        output, _ = layer(x, x, x)
    torch.testing.assert_close(seen.outputs[""].written().sum(1) + layer.out_proj.bias, output)


def test_what_heads_read_has_a_gradient():
    model = tiny("builtin")
    with watch(model, outputs=True) as seen:
        loss = model(torch.randint(31, (B, T))).square().mean()
    grads = torch.autograd.grad(loss, [layer.read for layer in seen.outputs.values()])
    assert all(grad.abs().sum() > 0 for grad in grads)


def test_the_mean_and_another_sample_of_the_batch_are_sources():
    model = tiny("builtin")
    with torch.no_grad(), watch(model, outputs=True) as seen:
        model(torch.randint(31, (3, T)))
    read = seen.outputs["blocks.1.attention"].read
    torch.testing.assert_close(seen.outputs.mean()["blocks.1.attention"], read.mean((0, 2), keepdim=True))
    (other,) = seen.outputs.resampled(seed=5)["blocks.1.attention"]
    assert not any(torch.equal(a, b) for a, b in zip(other, read, strict=True))
    assert sorted(x.sum().item() for x in other) == sorted(x.sum().item() for x in read)


def test_values_behind_a_gate_or_in_a_generation_step_are_refused():
    gated = MultiHeadAttention(E, H, gate="element", causal=True, position=rotary()).double()
    with watch(gated, outputs=True) as seen:
        gated(torch.randn(B, T, E).double())
    with pytest.raises(OptionError, match="multiplies what heads read by a gate"):
        seen.outputs[""].by_value()
    plain = MultiHeadAttention(E, H, causal=True)
    with torch.no_grad(), watch(plain, outputs=True) as seen:
        cache = plain.make_cache(B)
        plain(torch.randn(B, T, E), cache=cache)
        plain(torch.randn(B, 1, E), cache=cache)
    assert seen.outputs[""].read.shape == (B, H, 1, D)
    with pytest.raises(OptionError, match="generation step"):
        seen.outputs[""].contributions()


def test_values_that_changed_since_are_refused():
    layer = MultiHeadAttention(E, H, bias=False).double()
    with torch.no_grad(), watch(layer, outputs=True) as seen:
        layer(torch.randn(B, T, E).double())
        seen.outputs[""].value.zero_()
        with pytest.raises(StaleMapError, match="changed in place"):
            seen.outputs[""].by_value()


def test_outputs_that_were_not_asked_for_are_refused():
    layer = MultiHeadAttention(E, H)
    with watch(layer) as seen:
        layer(torch.randn(B, T, E))
    with pytest.raises(OptionError, match=r"outputs=True"):
        seen.outputs  # noqa: B018
