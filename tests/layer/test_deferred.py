"""Deferred initialization: made on the meta device, given memory by `to_empty`, filled by `reset_parameters`."""

import functools

import pytest
import torch
from torch import nn

from headwise import (
    DeviceError,
    MultiHeadAttention,
    RelativeBias,
    alibi,
    attend,
    causal,
    compat,
    documents,
    padding,
    rotary,
    window,
)
from headwise.layer.norms import ZeroCentredNorm
from headwise.models import GPT, GPTConfig

E, H = 48, 6
LAYERS = {
    "plain": lambda: MultiHeadAttention(E, H),
    "separate": lambda: MultiHeadAttention(E, H, d_key=22),
    "alibi": lambda: MultiHeadAttention(E, H, causal=True, position=alibi(H)),
    "slopes": lambda: MultiHeadAttention(E, H, position=alibi(slopes=[0.5] * H)),
    "sinks": lambda: MultiHeadAttention(E, H, sinks=True, mask=window(3)),
    "relative bias": lambda: MultiHeadAttention(E, H, position=RelativeBias(H)),
    "rotary, norms": lambda: MultiHeadAttention(E, H, position=rotary(), qk_norm="head"),
    "another norm": lambda: MultiHeadAttention(E, H, qk_norm=functools.partial(ZeroCentredNorm, eps=1e-5)),
    "masks": lambda: MultiHeadAttention(E, H, mask=documents(lengths=[3, 4]) & padding([7, 5]) & causal()),
    "compat": lambda: compat.MultiheadAttention(E, H, batch_first=True),
}


def reset_all(model):
    """The recipe of torch's own documentation."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def call(layer, x):
    if isinstance(layer, compat.MultiheadAttention):
        return layer(x, x, x)[0]
    return layer(x, x[..., :22], x[..., :22]) if layer.d_key == 22 else layer(x)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_comes_back_from_the_meta_device_as_it_is_made(kind):
    torch.manual_seed(3)
    expected = LAYERS[kind]()
    with torch.device("meta"):
        layer = LAYERS[kind]()
    assert all(x.is_meta for x in layer.parameters())
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.constant_(parameter, torch.nan)  # what memory may hold
    reset_all(layer)
    x = torch.randn(2, 7, E)
    assert call(layer, x).isfinite().all()
    for (name, ours), theirs in zip(layer.named_parameters(), expected.parameters(), strict=True):
        assert ours.isfinite().all(), name
        if theirs.dim() == 2:  # drawn from one distribution
            assert ours.std().item() == pytest.approx(theirs.std().item(), rel=0.2), name
            assert ours.abs().max().item() == pytest.approx(theirs.abs().max().item(), rel=0.5), name
        elif theirs.unique().numel() == 1 and kind != "compat":
            torch.testing.assert_close(ours, theirs)
    layer.load_state_dict(expected.state_dict())
    torch.testing.assert_close(call(layer, x), call(expected, x))


def test_a_layer_resets_itself_and_leaves_a_shared_position_alone():
    shared = RelativeBias(H)
    layer, before = MultiHeadAttention(E, H, sinks=True, position=shared), shared.weight.clone()
    nn.init.ones_(layer.sinks)
    torch.manual_seed(3)
    layer.reset_parameters()
    assert layer.sinks.abs().sum() == 0
    torch.testing.assert_close(shared.weight, before)
    torch.manual_seed(3)
    fresh = MultiHeadAttention(E, H, sinks=True, position=shared)
    torch.testing.assert_close(layer.qkv_proj.weight, fresh.qkv_proj.weight)
    shared.reset_parameters()
    assert not torch.equal(shared.weight, before)


def test_a_model_resets_all_its_parts():
    config = GPTConfig(vocab_size=17, d_model=E, num_heads=H, num_layers=2, context_length=16)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    model.reset_parameters()
    expected = dict(GPT(config).named_parameters())
    for name, parameter in model.named_parameters():
        theirs = expected[name]
        assert parameter.isfinite().all(), name
        assert parameter.std().item() == pytest.approx(theirs.std().item(), rel=0.3), name
    assert model(torch.arange(11)[None]).isfinite().all()


def test_numbers_that_were_lost_on_the_meta_device_are_missed_by_name():
    with torch.device("meta"):
        layer = MultiHeadAttention(E, H, mask=documents(torch.arange(7) // 3))
    layer.to_empty(device="cpu")
    reset_all(layer)
    with pytest.raises(DeviceError, match="is on meta and the query on cpu"):
        layer(torch.randn(2, 7, E))
    with pytest.raises(DeviceError, match="its numbers are lost. Make it from numbers or from tensors outside"):
        layer.mask.to("cpu")
    layer.mask = documents(torch.arange(7) // 3)
    assert layer(torch.randn(2, 7, E)).isfinite().all()


def test_masks_and_slopes_of_numbers_fit_queries_on_the_meta_device():
    with torch.device("meta"):
        query = torch.empty(2, H, 7, 5)
        mask = documents(lengths=[3, 4]) & padding([7, 5])
        assert not any(x.is_meta for x in mask.tensors())
        output, weights = attend(query, query, query, mask=mask, relative=alibi(H), return_weights=True)
    assert output.is_meta
    assert weights.shape == (2, H, 7, 7)
