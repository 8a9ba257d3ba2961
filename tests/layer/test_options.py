"""Every option of a modern layer against the reference in float64, with the formulae written out."""

import itertools
import math

import pytest
import torch
from torch import nn

from closeness import assert_close_to_truth
from headwise import (
    CheckpointError,
    MultiHeadAttention,
    Norms,
    OptionError,
    RelativeBias,
    Scoring,
    ShapeError,
    alibi,
    attend,
    causal,
    documents,
    explain,
    linear,
    llama3,
    ntk,
    padding,
    prefix,
    reference,
    rotary,
    window,
    yarn,
)
from headwise.attention.backends import BACKENDS, Call
from headwise.layer import positions
from headwise.weights.scoring import bucket_of

B, H, HKV, T, D = 2, 6, 3, 13, 8


def heads(T=T, S=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    S = T if S is None else S
    shapes = ((B, H, T, D), (B, HKV, S, D), (B, HKV, S, D))
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def dense_alibi(T, S):
    distance = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    return -alibi(H).table.double()[:, None, None] * distance


@pytest.mark.parametrize("lengths", [(13, 13), (5, 17), (1, 11), (700, 700)], ids=str)
def test_alibi_takes_slope_times_distance_from_every_score(lengths):
    T, S = lengths
    tensors = heads(T, S)
    output, weights = attend(*tensors, mask=causal(), relative=alibi(H), return_weights=True)
    bias = dense_alibi(T, S)[None]
    truth, exact = reference.attend(*tensors, visible=causal().to_tensor(T, S), bias=bias)
    assert_close_to_truth(output, truth)
    assert_close_to_truth(weights[:, :, : min(T, 40)], exact[:, :, : min(T, 40)])
    assert_close_to_truth(weights.received().total, exact.sum(-2))


def test_published_slopes_for_heads_between_powers_of_two():
    assert alibi(6).table.tolist() == pytest.approx([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


def test_buckets_hold_near_distances_one_by_one_and_far_ones_by_octaves():
    ahead = torch.arange(-200, 201)
    both = bucket_of(ahead, 32, 128, True)
    assert both[200].item() == 0
    assert both[200 - 7 : 200].tolist() == [7, 6, 5, 4, 3, 2, 1]
    assert both[201:208].tolist() == [17, 18, 19, 20, 21, 22, 23]
    assert both[0].item() == 15
    assert both[-1].item() == 31
    one_way = bucket_of(ahead, 32, 128, False)
    assert (one_way[200:] == 0).all()
    assert one_way[0].item() == 31
    assert (one_way[:200].diff() <= 0).all()


def test_a_relative_bias_learns_through_output_and_map():
    module = RelativeBias(H, num_buckets=8, max_distance=20, dtype=torch.float64)
    tensors = heads()
    output, weights = attend(*tensors, relative=module(), return_weights=True)
    index = bucket_of(torch.arange(T) - torch.arange(T)[:, None], 8, 20, True)
    bias = module.weight[index].permute(2, 0, 1)[None]
    truth, exact = reference.attend(*tensors, bias=bias)
    assert_close_to_truth(output, truth)
    for ours, theirs in (
        (output, truth),
        (weights.entropy(), torch.special.entr(exact).sum(-1)),
        (weights[0, 1], exact[0, 1]),
    ):
        ours, theirs = (
            torch.autograd.grad(x.square().sum(), module.weight, retain_graph=True)[0] for x in (ours, theirs)
        )
        assert_close_to_truth(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 1.5}, {"sinks": True}, {"relative": True}, {"softcap": 2.0, "sinks": True, "relative": True}],
    ids=str,
)
@pytest.mark.parametrize("mask", ["causal", "window", "padding", "documents", "nothing"])
def test_soft_cap_sinks_and_distances_meet_every_mask(options, mask):
    made = {"causal": causal(), "window": causal() & window(3), "padding": padding([13, 5]), "nothing": None}
    made["documents"] = causal() & documents(lengths=[4, 6, 3])
    given = {
        "softcap": options.get("softcap"),
        "sinks": torch.randn(H, dtype=torch.float64) if "sinks" in options else None,
    }
    relative = alibi(H) if "relative" in options else None
    tensors = heads()
    visible = None if made[mask] is None else made[mask].to_tensor(T)
    bias = dense_alibi(T, T)[None] if relative else None
    truth, exact = reference.attend(*tensors, visible=visible, bias=bias, **given)
    expected = torch.autograd.grad(truth.square().sum(), tensors)
    for backend in BACKENDS:
        call = Call(*tensors, Scoring(made[mask], relative=relative, **given), 0.0)
        if backend.refuses(call):
            continue
        output = backend.run(call)
        assert_close_to_truth(output, truth)
        for ours, theirs in zip(torch.autograd.grad(output.square().sum(), tensors), expected, strict=True):
            assert_close_to_truth(ours, theirs)
    _, weights = attend(*tensors, mask=made[mask], relative=relative, return_weights=True, **given)
    assert_close_to_truth(weights[:], exact)


def test_rows_in_many_blocks_give_the_same_gradients(monkeypatch):
    from headwise.attention.backends import dense

    tensors, sinks = heads(67), torch.randn(H, dtype=torch.float64, requires_grad=True)
    whole = attend(*tensors, causal=True, softcap=3.0, sinks=sinks)
    expected = torch.autograd.grad(whole.square().sum(), [*tensors, sinks])
    monkeypatch.setattr(dense, "BLOCK_BYTES", B * H * 67 * 8 * 7)  # seven rows a block
    blocks = attend(*tensors, causal=True, softcap=3.0, sinks=sinks)
    assert_close_to_truth(blocks, whole)
    for ours, theirs in zip(torch.autograd.grad(blocks.square().sum(), [*tensors, sinks]), expected, strict=True):
        assert_close_to_truth(ours, theirs)


def complex_rotation(x, positions, base=10000.0, interleaved=False, speeds=None):
    """Rotary as a product of complex numbers."""
    width = x.shape[-1]
    speeds = base ** (-torch.arange(0, width, 2).double() / width) if speeds is None else speeds
    turn = torch.polar(
        torch.ones(len(positions), len(speeds), dtype=torch.float64), positions.double()[:, None] * speeds
    )
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    return turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_is_a_product_of_complex_numbers(interleaved):
    x, positions = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.tensor([0, 3, 1000, 7, 2])
    turned = rotary(500.0, interleaved=interleaved).turn(x, positions)
    assert_close_to_truth(turned, complex_rotation(x, positions, 500.0, interleaved))


def test_rotary_turns_only_its_width():
    x, positions = torch.randn(1, 2, 5, 12, dtype=torch.float64), torch.arange(5)
    turned = rotary(width=4).turn(x, positions)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert_close_to_truth(turned[..., :4], complex_rotation(x[..., :4], positions))


def test_turned_dot_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind(0)
    rule = rotary()
    products = [
        (rule.turn(q, torch.tensor([a])) * rule.turn(k, torch.tensor([b]))).sum() for a, b in ((7, 3), (1007, 1003))
    ]
    assert products[0].item() == pytest.approx(products[1].item(), rel=1e-9)


def test_scalings_slow_down_the_pairs_they_should():
    speeds = rotary().speeds(64)
    assert torch.allclose(rotary(scaling=linear(4)).speeds(64), speeds / 4)
    slowed = rotary(scaling=ntk(4)).speeds(64)
    assert torch.allclose(slowed, (10000 * 4 ** (64 / 62)) ** (-torch.arange(0, 64, 2).double() / 64))
    llama = rotary(500000.0, scaling=llama3(8, original_length=8192)).speeds(128) / rotary(500000.0).speeds(128)
    assert llama[0].item() == 1
    assert llama[-1].item() == pytest.approx(1 / 8)
    assert (llama.diff() <= 0).all()
    scaled = rotary(scaling=yarn(4, 2048))
    share = scaled.speeds(64) / speeds
    assert share[0].item() == 1
    assert share[-1].item() == pytest.approx(1 / 4)
    assert scaled.scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    x = torch.randn(1, 1, 3, 64, dtype=torch.float64)
    assert_close_to_truth(scaled.turn(x, torch.zeros(3).long()), x * scaled.scaling.attention_factor)


def by_hand(layer, x, turn=None, visible=None, **scoring):
    """The layer's own weights through the reference."""
    weights, biases = layer.projections()
    q, k, v = (
        nn.functional.linear(x, w, b).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        for w, b in zip(weights, biases, strict=True)
    )
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if turn is not None:
        q, k = turn(q), turn(k)
    read, _ = reference.attend(q, k, v, visible=visible, **scoring)
    return layer.out_proj(read.transpose(1, 2).flatten(2))


def test_a_layer_turns_queries_and_keys_and_takes_position_ids():
    layer = MultiHeadAttention(48, H, num_kv_heads=HKV, causal=True, position=rotary(), dtype=torch.float64)
    x, positions = torch.randn(B, T, 48, dtype=torch.float64), torch.randperm(100)[:T]
    visible = causal().to_tensor(T)
    assert_close_to_truth(layer(x), by_hand(layer, x, lambda h: complex_rotation(h, torch.arange(T)), visible))
    truth = by_hand(layer, x, lambda h: complex_rotation(h, positions), visible)
    assert_close_to_truth(layer(x, positions=positions), truth)
    assert_close_to_truth(layer(x, positions=positions.expand(B, T)), truth)


def test_heads_may_be_wider_than_the_model_shared_out():
    layer = MultiHeadAttention(20, 3, head_dim=8, dtype=torch.float64)
    assert layer.q_norm is None
    assert layer.out_proj.weight.shape == (20, 24)
    x = torch.randn(B, T, 20, dtype=torch.float64)
    assert_close_to_truth(layer(x), by_hand(layer, x))
    assert MultiHeadAttention(20, 3, head_dim=8, out_proj=False)(x.float()).shape == (B, T, 24)
    assert "head_dim=8" in repr(layer)


@pytest.mark.parametrize("kind", ["head", "width", nn.LayerNorm], ids=str)
def test_queries_and_keys_are_normalised_before_they_meet(kind):
    layer = MultiHeadAttention(48, H, num_kv_heads=HKV, qk_norm=kind, position=rotary(), dtype=torch.float64)
    for parameter in (*layer.q_norm.parameters(), *layer.k_norm.parameters()):
        nn.init.uniform_(parameter, 0.5, 2)
    x = torch.randn(B, T, 48, dtype=torch.float64)
    assert_close_to_truth(layer(x), by_hand(layer, x, lambda h: complex_rotation(h, torch.arange(T))))
    if kind == "head":
        q = torch.randn(B, H, T, D, dtype=torch.float64)
        expected = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.q_norm.weight
        assert_close_to_truth(layer.q_norm(q), expected)


def test_a_layer_learns_its_sinks_and_caps_its_scores():
    layer = MultiHeadAttention(48, H, causal=True, softcap=2.0, sinks=True, scale=0.5, dtype=torch.float64)
    assert (layer.softcap, layer.scale) == (2.0, 0.5)
    assert layer.state_dict()["sinks"].shape == (H,)
    nn.init.normal_(layer.sinks)
    x = torch.randn(B, T, 48, dtype=torch.float64)
    output, weights = layer(x, return_weights=True)
    truth = by_hand(layer, x, visible=causal().to_tensor(T), softcap=2.0, sinks=layer.sinks, scale=0.5)
    assert_close_to_truth(output, truth)
    assert (weights.sum(-1) < 1).all()
    output.sum().backward()
    assert layer.sinks.grad.abs().sum() > 0


def test_layers_may_share_one_relative_bias():
    shared = RelativeBias(H, dtype=torch.float64)
    layers = [MultiHeadAttention(48, H, position=shared, scale=1.0, dtype=torch.float64) for _ in range(2)]
    assert layers[0].position is layers[1].position
    assert "position.weight" in layers[0].state_dict()
    x = torch.randn(B, T, 48, dtype=torch.float64)
    index = bucket_of(torch.arange(T) - torch.arange(T)[:, None], 32, 128, True)
    bias = shared.weight[index].permute(2, 0, 1)[None]
    assert_close_to_truth(layers[1](x), by_hand(layers[1], x, bias=bias, scale=1.0))


def test_projections_have_the_biases_that_are_named():
    layer = MultiHeadAttention(48, H, bias={"q", "v", "out"}, dtype=torch.float64)
    assert layer.k_proj.bias is None
    assert layer.q_proj.bias is not None
    x = torch.randn(B, T, 48, dtype=torch.float64)
    assert_close_to_truth(layer(x), by_hand(layer, x))


def test_jagged_tensors_give_what_each_sample_gives_alone():
    layer = MultiHeadAttention(48, H, causal=True, position=rotary(), dtype=torch.float64)
    samples = [torch.randn(n, 48, dtype=torch.float64) for n in (5, 1, 11)]
    nested = torch.nested.nested_tensor(samples, layout=torch.jagged)
    output = layer(nested)
    assert output.is_nested
    for sample, found in zip(samples, output.unbind(), strict=True):
        assert_close_to_truth(found, layer(sample[None])[0])
    _, weights = layer(nested, return_weights=True)
    assert weights.shape == (1, H, 17, 17)


BAD = {
    "odd width": (lambda: MultiHeadAttention(48, 6, position=rotary(width=3)), "rotary\\(width=3\\) and heads 8 wide"),
    "rotary too wide": (lambda: MultiHeadAttention(48, 6, position=rotary(width=10)), "even width from 2 to 8"),
    "no position": (lambda: MultiHeadAttention(48, 6, position="rope"), "position='rope': expected rotary"),
    "heads of slopes": (lambda: MultiHeadAttention(48, 6, position=alibi(4)), "made for 4 heads and there are 6"),
    "slopes twice": (lambda: alibi(4, slopes=[1.0]), "exactly one of num_heads and slopes"),
    "base": (lambda: rotary(-1), "base=-1: expected a number above 0"),
    "scaling": (lambda: rotary(scaling=8), "scaling=8\\): expected linear"),
    "buckets": (lambda: RelativeBias(4, num_buckets=6), "num_buckets=6: expected a multiple of 4"),
    "max distance": (lambda: RelativeBias(4, max_distance=8), "max_distance=8.*more than 8"),
    "norm": (lambda: MultiHeadAttention(48, 6, qk_norm="rms"), "qk_norm='rms': expected 'head'"),
    "bias names": (lambda: MultiHeadAttention(48, 6, bias={"query"}), "out of q, k, v, out"),
    "softcap": (lambda: MultiHeadAttention(48, 6, softcap=-1), "softcap=-1: expected a number above 0"),
    "scale": (lambda: MultiHeadAttention(48, 6, scale=0.0), "scale=0.0: expected a number above 0"),
    "sinks": (lambda: MultiHeadAttention(48, 6, sinks=torch.zeros(6)), "expected True or False"),
    "positions unused": (
        lambda: MultiHeadAttention(48, 6)(torch.randn(1, 5, 48), positions=range(5)),
        "positions are for a rotary",
    ),
    "positions shape": (
        lambda: MultiHeadAttention(48, 6, position=rotary())(torch.randn(1, 5, 48), positions=[1, 2]),
        "expected whole numbers of shape \\(T,\\) = \\(5,\\)",
    ),
    "cross rotary": (
        lambda: MultiHeadAttention(48, 6, position=rotary())(torch.randn(1, 5, 48), torch.randn(1, 7, 48)),
        "Only you know",
    ),
    "relative": (lambda: attend(*heads(), relative=3), "relative=3: expected alibi"),
    "nested mask": (
        lambda: MultiHeadAttention(48, 6)(
            torch.nested.nested_tensor([torch.randn(3, 48)], layout=torch.jagged), mask=causal()
        ),
        "mask= does not go with a nested tensor",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_refused_with_what_was_given(case):
    call, message = BAD[case]
    with pytest.raises((OptionError, ShapeError), match=message):
        call()


def test_a_large_dense_tensor_is_warned_of_once(monkeypatch):
    from headwise.attention import backends

    monkeypatch.setattr(backends, "LARGE", 2**20)
    monkeypatch.setattr(backends, "_warned", set())
    query = torch.randn(1, 1, 4096, 8)
    mask = torch.rand(4096, 4096) > 0.5
    with pytest.warns(UserWarning, match="takes 0.1 GiB for one T×S tensor"):
        attend(query, query, query, mask=mask, dropout=0.1)
    attend(query, query, query, mask=mask, dropout=0.1)


def test_a_single_query_under_a_window_reads_only_the_window():
    from headwise.attention.backends.sdpa import without_far_keys

    query, key = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 100, 8)
    call = Call(query, key, key, Scoring(causal() & window(9)), 0.0)
    assert without_far_keys(call).key.shape[2] == 10
    truth, _ = reference.attend(query, key, key, visible=(causal() & window(9)).to_tensor(1, 100))
    torch.testing.assert_close(attend(query, key, key, mask=causal() & window(9)), truth)


def test_documents_on_the_cpu_know_which_keys_they_need():
    mask = causal() & documents(torch.tensor([[3, 3, 1, 1, 1, 7, 3]]))
    for start, stop in itertools.combinations(range(8), 2):
        lo, hi = mask.key_range(start, stop, 7, 7)
        seen = mask.tile(slice(start, stop), slice(None), 7, 7)
        assert not seen[..., :lo].any()
        assert not seen[..., hi:].any()
    assert mask.key_range(3, 5, 7, 7) == (2, 5)


def test_jagged_tensors_with_holes_and_masks_that_name_keys():
    layer = MultiHeadAttention(48, H, context_length=8, dtype=torch.float64)
    x = torch.randn(2, 8, 48, dtype=torch.float64)
    holes = torch.nested.narrow(x, 1, torch.tensor([0, 0]), torch.tensor([3, 8]), layout=torch.jagged)
    first, second = layer(holes).unbind()
    assert_close_to_truth(first, layer(x[:1, :3])[0])
    assert_close_to_truth(second, layer(x[1:])[0])
    assert explain(layer, holes).path == "sdpa"
    with pytest.raises(ShapeError, match="the longest sample has 9 tokens"):
        layer(torch.nested.nested_tensor([torch.randn(9, 48, dtype=torch.float64)], layout=torch.jagged))
    with pytest.raises(OptionError, match="refers to single keys"):
        MultiHeadAttention(48, H, mask=causal() | prefix(3))(holes)
    with pytest.raises(ShapeError, match=r"not \(B, \*, E\)"):
        layer(holes.transpose(1, 2))


def test_slopes_survive_a_layer_built_on_meta():
    state = MultiHeadAttention(48, H, position=alibi(H)).state_dict()
    layer = MultiHeadAttention(48, H, position=alibi(H), device="meta")
    layer.load_state_dict(state, assign=True)
    assert layer(torch.randn(1, 3, 48)).isfinite().all()
    assert (
        MultiHeadAttention(48, H, position=alibi(H)).to("meta").to_empty(device="cpu").position.table.isfinite().all()
    )


def test_an_option_set_later_acts():
    layer, x = MultiHeadAttention(48, H, dtype=torch.float64), torch.randn(1, 5, 48, dtype=torch.float64)
    layer.position = rotary()
    assert_close_to_truth(layer(x), by_hand(layer, x, lambda h: complex_rotation(h, torch.arange(5))))


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": "head"},
        {"qk_norm": "width"},
        {"sinks": True},
        {"position": RelativeBias(H)},
        {"bias": {"q", "v"}},
    ],
    ids=lambda options: next(iter(options)),  # printed, a set has another order in every process
)
def test_our_own_weights_come_back_with_their_options(options):
    layer, x = MultiHeadAttention(48, H, **options), torch.randn(1, 5, 48)
    again = MultiHeadAttention.from_state_dict(layer.state_dict(), H, **options)
    torch.testing.assert_close(again(x), layer(x))


def test_options_that_a_checkpoint_lacks_or_nobody_asked_for_are_named():
    plain = MultiHeadAttention(48, H).state_dict()
    with pytest.raises(CheckpointError, match="holds no sinks"):
        MultiHeadAttention.from_state_dict(plain, H, sinks=True)
    normed = MultiHeadAttention(48, H, qk_norm="head").state_dict()
    with pytest.raises(CheckpointError, match="holds k_norm.weight: pass the option it belongs to, qk_norm="):
        MultiHeadAttention.from_state_dict(normed, H)


def test_long_rows_work_under_functional_transforms():
    q, k, v = (torch.randn(1, 4, 2304, 8) for _ in range(3))
    gradient = torch.func.grad(lambda q: attend(q, k, v, softcap=5.0).sum())(q)
    assert gradient.shape == q.shape


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(8), Norms(torch.nn.RMSNorm(8))], ids=["norm", "Norms"])
def test_a_norm_that_is_made_already_is_refused(norm):
    with pytest.raises(OptionError, match=r"expected a function from a width to a module.*nn.LayerNorm instead of"):
        MultiHeadAttention(24, 3, qk_norm=norm)


def test_queries_and_keys_share_one_table_of_angles(monkeypatch):
    made, plain = [], positions._angle_table
    monkeypatch.setattr(positions, "_angle_table", lambda *given: made.append(given) or plain(*given))
    MultiHeadAttention(12, 3, position=rotary())(torch.randn(2, 5, 12))
    assert len(made) == 1


@pytest.mark.parametrize("method", ["turn", "encode_query", "encode_key"])
def test_a_rotary_that_overrides_a_method_is_used_as_it_is(method):
    class Mine(positions.Rotary):
        pass

    def doubled(self, heads, at):
        return 2 * getattr(positions.Rotary, method)(self, heads, at)

    setattr(Mine, method, doubled)
    layer = MultiHeadAttention(12, 3, position=rotary()).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    _, plain = layer(x, return_weights=True)
    layer.position = Mine()
    _, changed = layer(x, return_weights=True)
    factor = 4 if method == "turn" else 2
    torch.testing.assert_close(changed[:], (plain[:].log() * factor).softmax(-1))


def test_changing_the_speeds_of_a_rotary_in_place_changes_no_other():
    before = rotary().speeds(8, torch.device("cpu"))
    rotary().speeds(8, torch.device("cpu")).zero_()
    torch.testing.assert_close(rotary().speeds(8, torch.device("cpu")), before)
