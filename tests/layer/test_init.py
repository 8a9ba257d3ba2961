"""Initial weights: those of `nn.Linear`, and on demand those of `nn.MultiheadAttention`."""

import math

import pytest
import torch
from torch import nn

from headwise import MultiHeadAttention, OptionError, latent
from headwise.layer.init import like_torch_

E, H = 66, 3


@pytest.mark.parametrize("options", [{}, {"kdim": 13, "vdim": 17}, {"bias": False}], ids=str)
def test_weights_equal_those_of_torch_with_the_same_seed(options):
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **options)
    widths = {"d_key": options.get("kdim"), "d_value": options.get("vdim")}
    layer = MultiHeadAttention(E, H, **widths, bias=options.get("bias", True))
    torch.manual_seed(5)
    assert like_torch_(layer) is layer
    expected = MultiHeadAttention.from_state_dict(theirs.state_dict(), H)
    assert layer.state_dict().keys() == expected.state_dict().keys()
    for name, found in layer.state_dict().items():
        assert torch.equal(found, expected.state_dict()[name]), name


def test_layers_that_torch_does_not_have_keep_its_bounds():
    layer = like_torch_(
        MultiHeadAttention(E, 6, num_kv_heads=2, bias={"q", "out"}, d_in=131, sinks=True, qk_norm="head")
    )
    rows = 6 * 11 + 2 * 2 * 11
    for weight in layer.projections()[0]:
        bound = math.sqrt(6 / (131 + rows))
        assert 0.95 * bound < weight.abs().max() <= bound
    assert layer.out_proj.weight.abs().max() <= 1 / math.sqrt(E)
    assert not layer.q_proj.bias.any()
    assert not layer.out_proj.bias.any()
    assert (layer.q_norm.weight == 1).all()


def test_weights_are_by_default_those_of_a_linear_layer():
    layer = MultiHeadAttention(E, H)
    for linear in (layer.qkv_proj, layer.out_proj):
        for parameter in linear.parameters():
            assert 0.8 / math.sqrt(E) < parameter.abs().max() <= 1 / math.sqrt(E)


def test_other_projections_are_refused():
    layer = MultiHeadAttention(64, 4, projections=latent(32, nope_dim=16))
    with pytest.raises(OptionError, match="not one matrix each"):
        like_torch_(layer)
