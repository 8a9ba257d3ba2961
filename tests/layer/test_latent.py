"""Multi-head latent attention: plain and absorbed form, with every cache, against attention written out in float64."""

import copy
import math

import pytest
import torch
from torch import nn

import headwise
from closeness import assert_close_to_truth
from headwise import MultiHeadAttention, OptionError, causal, explain, latent, rotary, window
from headwise.layer.inputs import LayerInputs
from headwise.layer.latent import Absorbed, Latent

B, T, E, H = 2, 13, 35, 3
RANK, OWN, TURNED, DV = 19, 7, 4, 5
FORMS = {
    "queries from the input": {},
    "queries of low rank": {"q_rank": 11},
    "values wider than keys": {"value_dim": 17},
    "no norms": {"norm": None, "q_rank": 11},
    "no position": {"rotary_dim": 0},
}


def layer_of(form="queries of low rank", dtype=torch.float64, **options):
    torch.manual_seed(0)
    sizes = {"nope_dim": OWN, "rotary_dim": TURNED, "value_dim": DV} | FORMS[form]
    position = rotary(interleaved=True) if sizes["rotary_dim"] else None
    options = {"causal": True, "position": position} | options
    layer = MultiHeadAttention(E, H, projections=latent(RANK, **sizes), dtype=dtype, **options).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def x_of(tokens=T, batch=B):
    return torch.randn(batch, tokens, E, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def turned(x, at):
    """Neighboring pairs turned by their positions `at` (T,), written with complex numbers."""
    if not x.shape[-1]:
        return x
    speeds = 10000.0 ** -(torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones(()).double(), at[:, None] * speeds)).flatten(-2)


def by_hand(layer, x, visible=None):
    """The output and the dense weights, from the parameters alone."""
    p, rule = dict(layer.named_parameters()), layer._projections

    def linear(name, y):
        y = y @ p[f"{name}.weight"].T
        return y + p[f"{name}.bias"] if f"{name}.bias" in p else y

    def norm(name, y):
        return y if f"{name}.weight" not in p else y * (y.square().mean(-1, True) + 1e-6).rsqrt() * p[f"{name}.weight"]

    at = torch.arange(x.shape[1], dtype=torch.float64)
    q = linear("q_proj", x) if rule.q_rank is None else linear("q_b_proj", norm("q_a_norm", linear("q_a_proj", x)))
    low = linear("kv_a_proj", x)
    pairs = linear("kv_b_proj", norm("kv_a_norm", low[..., :RANK])).unflatten(-1, (H, -1)).transpose(1, 2)
    shared = turned(low[..., RANK:], at)[:, None].expand(-1, H, -1, -1)
    q = q.unflatten(-1, (H, -1)).transpose(1, 2)
    q = torch.cat([q[..., :OWN], turned(q[..., OWN:], at)], -1)
    k, v = torch.cat([pairs[..., :OWN], shared], -1), pairs[..., OWN:]
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    below = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if visible is None else visible
    weights = scores.masked_fill(~below, -math.inf).softmax(-1)
    return linear("out_proj", (weights @ v).transpose(1, 2).flatten(2)), weights


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_output_and_weights_are_those_written_out(form):
    layer, x = layer_of(form), x_of()
    output, weights = by_hand(layer, x)
    found, lazy = layer(x, return_weights=True)
    torch.testing.assert_close(found, output)
    torch.testing.assert_close(lazy.to_tensor(), weights)
    torch.testing.assert_close(lazy.entropy(), -(weights * weights.clamp(min=1e-300).log()).sum(-1))


CUTS = {"token by token": [1] * T, "in chunks": [5, 3, 4, 1], "a prompt, then tokens": [9, 1, 1, 1, 1], "whole": [T]}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@torch.no_grad()
def test_with_a_cache_output_and_weights_stay_the_same(form, cut, static):
    layer, x = layer_of(form), x_of()
    output, weights = by_hand(layer, x)
    cache = layer.make_cache(B, capacity=T + 6 if static else None, static=static)
    for first, part in zip(torch.tensor([0, *CUTS[cut]]).cumsum(0).tolist(), x.split(CUTS[cut], dim=1), strict=False):
        found, lazy = layer(part, cache=cache, return_weights=True)
        stop = first + part.shape[1]
        torch.testing.assert_close(found, output[:, first:stop])
        seen = lazy.to_tensor()
        torch.testing.assert_close(seen[..., :stop], weights[:, :, first:stop, :stop])
        assert not seen[..., stop:].any()


def test_decoding_is_absorbed_and_a_prompt_is_not():
    rule = latent(512, nope_dim=128, rotary_dim=64, value_dim=128)
    assert isinstance(rule, Latent)
    assert [rule._absorbs(1, S) for S in (1, 2, 100, 10**6)] == [False, True, True, True]
    assert [rule._absorbs(t, 4096) for t in (2, 64, 128, 256, 4096)] == [True, True, True, False, False]
    layer, x = layer_of(), x_of()
    with torch.no_grad():
        cache = layer.make_cache(B)
        assert not isinstance(layer.plan(LayerInputs(x, cache=cache)), Absorbed)
        call = layer.plan(LayerInputs(x[:, :1], cache=cache))
        again = layer.plan(LayerInputs(x[:, :1], cache=cache))
    assert isinstance(call, Absorbed)
    assert call.key.shape == (B, 1, T + 1, RANK + TURNED)
    assert call.value.data_ptr() == call.key.data_ptr() == again.key.data_ptr()  # the cache itself: nothing is copied


@pytest.mark.parametrize("queries", [1, 2, 5])
@torch.no_grad()
def test_both_forms_give_the_same_map_under_any_mask(queries, monkeypatch):
    for options in ({"causal": True}, {"causal": False}, {"causal": True, "mask": window(6)}):
        maps = []
        for absorbs in (False, True):
            monkeypatch.setattr(Latent, "_absorbs", lambda self, T, S, absorbs=absorbs: absorbs)
            layer, x = layer_of(**options), x_of()
            cache = layer.make_cache(B)
            layer(x, cache=cache)
            output, weights = layer(x_of(queries), cache=cache, return_weights=True)
            maps.append([output, weights.to_tensor(), weights.entropy(), weights.peak(), weights.topk(2)[0]])
        for plain, absorbed in zip(*maps, strict=True):
            torch.testing.assert_close(absorbed, plain)


@torch.no_grad()
def test_a_cache_holds_the_latent_and_the_shared_key_alone():
    layer = layer_of(dtype=torch.float32)
    cache = layer.make_cache(B, capacity=32)
    assert cache.nbytes == B * 32 * (RANK + TURNED) * 4
    layer(x_of().float(), cache=cache)
    assert cache.lengths == [T] * B


@torch.no_grad()
def test_samples_of_different_lengths_rollback_and_reorder():
    layer, x = layer_of(), x_of(T)
    for static in (False, True):
        cache = layer.make_cache(B, capacity=2 * T if static else None, static=static)
        layer(x[:, :7], cache=cache, lengths=[7, 4])
        step = layer(torch.stack([x[0, 7:9], x[1, 4:6]]), cache=cache)
        torch.testing.assert_close(step[0], by_hand(layer, x[:1, :9])[0][0, 7:])
        torch.testing.assert_close(step[1], by_hand(layer, x[1:, :6])[0][0, 4:])
        cache.rollback([2, 1])
        cache.reorder([1, 0])
        step = layer(torch.stack([x[1, 5:6], x[0, 7:8]]), cache=cache)
        torch.testing.assert_close(step[0], by_hand(layer, x[1:, :6])[0][0, 5:])
        torch.testing.assert_close(step[1], by_hand(layer, x[:1, :8])[0][0, 7:])


@torch.no_grad()
def test_under_a_window_the_cache_is_bounded():
    layer, x = layer_of(mask=window(9)), x_of(300)
    cache = layer.make_cache(B)
    steps = torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], 1)
    torch.testing.assert_close(steps, layer(x))
    assert cache.nbytes < B * 200 * (RANK + TURNED) * 8


def test_gradients_of_both_forms_are_those_of_the_formula(monkeypatch):
    layer, x, memory = layer_of(causal=False, position=None), x_of(), x_of(31)
    found = []
    for absorbs in (False, True):
        monkeypatch.setattr(Latent, "_absorbs", lambda self, T, S, absorbs=absorbs: absorbs)
        layer.zero_grad()
        output = layer(x, layer.remember(memory))
        torch.testing.assert_close(output, layer(x, memory))
        output.square().sum().backward()
        found.append({name: parameter.grad.clone() for name, parameter in layer.named_parameters()})
    torch.testing.assert_close(*found)
    monkeypatch.undo()
    layer = layer_of()
    layer.zero_grad()
    by_hand(layer, x)[0].square().sum().backward()
    truth = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    layer(x).square().sum().backward()
    torch.testing.assert_close({name: parameter.grad for name, parameter in layer.named_parameters()}, truth)


@pytest.mark.parametrize(
    "option", [{"softcap": 3.0}, {"sinks": True}, {"scale": 0.3}], ids=["softcap", "sinks", "scale"]
)
@torch.no_grad()
def test_scoring_options_apply_in_both_forms(option):
    layer, x = layer_of(**option), x_of()
    cache = layer.make_cache(B)
    steps = [layer(part, cache=cache, return_weights=True) for part in x.split(1, dim=1)]
    output, weights = layer(x, return_weights=True)
    assert_close_to_truth(torch.cat([y for y, _ in steps], 1), output)
    torch.testing.assert_close(steps[-1][1].to_tensor(), weights.to_tensor()[:, :, -1:])
    assert not torch.allclose(output, layer_of()(x))


@torch.no_grad()
def test_watch_silence_and_explain_know_latent_layers():
    layer, x = layer_of(), x_of()
    cache = layer.make_cache(B)
    layer(x, cache=cache)
    assert explain(layer, x).path == "sdpa"
    assert explain(layer, x[:, :1], cache=cache).path == "shared"
    assert cache.lengths == [T] * B
    with headwise.watch(layer) as seen:
        layer(x)
    assert next(iter(seen.values())).shape == (B, H, T, T)
    with headwise.silence(layer, {"": [1]}):
        quiet, step = layer(x), layer(x[:, :1], cache=layer.make_cache(B))
    values = by_hand(layer, x)[0] - layer.out_proj.bias
    assert not torch.allclose(quiet - layer.out_proj.bias, values)
    torch.testing.assert_close(step, quiet[:, :1])


@torch.no_grad()
def test_compiled_layers_give_the_same():
    layer, x = layer_of(dtype=torch.float32), x_of().float()
    expected = layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    cache = layer.make_cache(B, capacity=32, static=True)
    steps = [compiled(x[:, :6], cache=cache), *(compiled(x[:, t : t + 1], cache=cache) for t in range(6, T))]
    torch.testing.assert_close(torch.cat(steps, 1), expected)


@torch.no_grad()
def test_exported_layers_give_the_same_at_any_length():
    layer, x = layer_of(dtype=torch.float32), x_of().float()
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(layer, (x,), dynamic_shapes=({1: tokens},))
    longer = x_of(29).float()
    torch.testing.assert_close(program.module()(longer), layer(longer))


@torch.no_grad()
def test_autocast_runs_both_forms_in_half_precision():
    layer, x = layer_of(dtype=torch.float32), x_of().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = layer.make_cache(B, dtype=torch.bfloat16)
        steps = torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], 1)
        whole = layer(x)
    assert whole.dtype == steps.dtype == torch.bfloat16
    for found in (whole, steps):
        assert (found.float() - layer(x)).abs().max() < 0.1 * layer(x).abs().max()


@torch.no_grad()
def test_half_precision_is_as_exact_decoding_as_whole():
    layer, x = layer_of(dtype=torch.bfloat16), x_of().bfloat16()
    truth = copy.deepcopy(layer).double()(x.double())
    cache = layer.make_cache(B)
    steps = torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], 1)
    errors = [(found.double() - truth).abs().max() for found in (layer(x), steps)]
    assert errors[1] < 3 * errors[0]


@torch.no_grad()
def test_a_replaced_projection_is_used():
    layer, x = layer_of(), x_of()
    before = by_hand(layer, x)[0]

    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 2 * self.inner(x)

    layer.kv_b_proj = Doubled(layer.kv_b_proj)
    cache = layer.make_cache(B)
    steps = torch.cat([layer(part, cache=cache) for part in x.split(1, dim=1)], 1)
    torch.testing.assert_close(steps, layer(x))
    assert not torch.allclose(steps, before)


def test_state_copies_and_printing():
    layer, x = layer_of(), x_of()
    twin = MultiHeadAttention(E, H, causal=True, position=layer.position, projections=layer._projections).double()
    twin.load_state_dict(layer.state_dict())
    for other in (twin, copy.deepcopy(layer)):
        torch.testing.assert_close(other(x), layer(x))
    assert "projections=latent(19, q_rank=11, nope_dim=7, rotary_dim=4, value_dim=5)" in repr(layer)
    assert layer.head_dim == OWN + TURNED
    assert layer.value_dim == DV
    assert layer.out_proj.in_features == H * DV
    bare = MultiHeadAttention(E, H, projections=latent(RANK, nope_dim=OWN, value_dim=DV), out_proj=False)
    assert bare(x.float()).shape == (B, T, H * DV)


REFUSED = {
    "num_kv_heads": ({"num_kv_heads": 1}, "num_kv_heads=1 and projections=latent.*Leave out num_kv_heads"),
    "head_dim": ({"head_dim": 8}, "head_dim=8.*latent.*makes heads 11 wide"),
    "d_value": ({"d_key": 7, "d_value": 5}, "d_key=7, d_value=5.*one input"),
    "bias": ({"bias": {"q", "k"}}, "keys and values come from one linear map"),
    "position": ({"position": rotary(width=6)}, "rotary.width=6. and heads 4 wide"),
    "norm": ({"qk_norm": "head"}, "qk_norm='head'.*latent.*norm="),
    "kind": ({"projections": "latent"}, "projections='latent': expected latent"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_fit_are_refused(name):
    options, message = REFUSED[name]
    given = {"projections": latent(RANK, nope_dim=OWN, rotary_dim=TURNED)} | options
    with pytest.raises(OptionError, match=message):
        MultiHeadAttention(E, H, **given)


def test_calls_that_do_not_fit_are_refused():
    layer, x = layer_of(), x_of()
    with pytest.raises(OptionError, match="keys and values from one input, and two are given"):
        layer(x, x.clone(), x.clone(), positions=range(T), key_positions=range(T))
    with pytest.raises(OptionError, match="not one matrix each"):
        layer.projections()
    with pytest.raises(OptionError, match="kv_rank=0"):
        latent(0, nope_dim=3)
    with pytest.raises(OptionError, match=r"latent\(norm='rms'\): expected a function"):
        MultiHeadAttention(E, H, projections=latent(RANK, nope_dim=OWN, norm="rms"))


class Shifted(headwise.Projections):
    """Your own projections: the key is that of the token before."""

    head_dim = 5

    def modules(self, widths, biases, device, dtype):
        where = {"device": device, "dtype": dtype}
        return {name: nn.Linear(E, widths.num_heads * self.head_dim, bias=False, **where) for name in ("to_q", "to_kv")}

    def queries(self, modules, x):
        return modules["to_q"](x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_and_values(self, modules, key, value):
        k = modules["to_kv"](key.roll(1, 1)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return k, k


def test_projections_of_your_own_work():
    layer, x = MultiHeadAttention(E, H, projections=Shifted(), causal=True), x_of().float()
    output, weights = layer(x, return_weights=True)
    assert output.shape == (B, T, E)
    q, k, v = (
        part(layer._modules)
        for part in (
            lambda m: Shifted().queries(m, x),
            *(lambda m, i=i: Shifted().keys_and_values(m, x, x)[i] for i in (0, 1)),
        )
    )
    expected = headwise.attend(q, k, v, mask=causal()).transpose(1, 2).flatten(2)
    torch.testing.assert_close(output, layer.out_proj(expected))
    assert sorted(name for name, _ in layer.named_children()) == ["out_proj", "to_kv", "to_q"]
    assert weights.shape == (B, H, T, T)
