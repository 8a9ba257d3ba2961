"""Generation: token by token, in chunks, in batches of different lengths, all equal to one full pass."""

import pytest
import torch
from torch import nn

from closeness import assert_close_to_truth
from headwise import (
    CacheError,
    KVCache,
    MultiHeadAttention,
    OptionError,
    RelativeBias,
    ShapeError,
    StaleMapError,
    alibi,
    causal,
    chunks,
    documents,
    explain,
    induction,
    latent,
    linear,
    llama3,
    padding,
    prefix,
    previous_token,
    rotary,
    sink,
    temperature,
    watch,
    window,
    yarn,
)

B, T, E, H = 3, 23, 48, 6


def by_position(score, batch, head, query, key):
    """Depends on every number but the sample, which is another one when a text stands alone."""
    return score * (1 + (query % 5) / 7) + (3 * key + 2 * head) % 11 / 5


class LearnedScore(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, 30))

    def forward(self, score, batch, head, query, key):
        return score + self.table[head, query] * self.table[head, key]


OPTIONS = {
    "plain": dict,
    "grouped": lambda: {"num_kv_heads": 2},
    "multi-query": lambda: {"num_kv_heads": 1},
    "rotary": lambda: {"position": rotary()},
    "rotary, neighbours, part of the head": lambda: {"position": rotary(width=4, interleaved=True)},
    "rotary, yarn": lambda: {"position": rotary(scaling=yarn(4, 8))},
    "rotary, llama 3": lambda: {"position": rotary(scaling=llama3(original_length=16)), "num_kv_heads": 3},
    "rotary, linear": lambda: {"position": rotary(scaling=linear(2)), "qk_norm": "head"},
    "alibi": lambda: {"position": alibi(H)},
    "relative bias": lambda: {"position": RelativeBias(H, num_buckets=8, max_distance=20, bidirectional=False)},
    "sinks and soft-cap": lambda: {"softcap": 1.5, "sinks": True},
    "norm over all heads": lambda: {"qk_norm": "width"},
    "window": lambda: {"mask": window(4)},
    "window, everything": lambda: {
        "mask": window(5), "position": rotary(), "softcap": 2.0, "sinks": True, "num_kv_heads": 2,
    },
    "window and alibi": lambda: {"mask": window(3), "position": alibi(H)},
    "wide heads": lambda: {"head_dim": 16, "bias": {"q", "out"}},
    "score": lambda: {"score": by_position},
    "score, window": lambda: {"score": by_position, "mask": window(4), "position": rotary(), "num_kv_heads": 2},
    "score, learned": lambda: {"score": LearnedScore(), "softcap": 2.0, "sinks": True, "position": alibi(H)},
    "score, latent": lambda: {
        "score": by_position, "bias": False, "position": rotary(),
        "projections": latent(5, nope_dim=6, rotary_dim=4, value_dim=3),
    },
    "sinks of the text": lambda: {"mask": window(4) | prefix(2)},
    "chunks": lambda: {"mask": chunks(5), "position": rotary() + temperature(0.5, 4)},
}  # fmt: skip


def layer_with(kind):
    torch.manual_seed(0)
    layer = MultiHeadAttention(E, H, causal=True, **OPTIONS[kind]()).double().eval()
    if layer.sinks is not None:
        nn.init.normal_(layer.sinks)
    return layer


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def x_of(length=T, seed=1):
    return torch.randn(B, length, E, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_token_by_token_equals_one_full_pass(kind, static):
    layer, x = layer_with(kind), x_of()
    cache = layer.make_cache(B, capacity=T + 2 if static else None, static=static)
    parts = [layer(x[:, :7], cache=cache), layer(x[:, 7:12], cache=cache)]
    parts += [layer(x[:, t : t + 1], cache=cache) for t in range(12, T)]
    assert_close_to_truth(torch.cat(parts, 1), layer(x))
    assert cache.lengths == [T] * B


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
def test_samples_of_different_length_share_a_batch(kind, static):
    layer, lengths = layer_with(kind), [5, 11, 8]
    prompts, more = x_of(11), x_of(6, seed=2)
    cache = layer.make_cache(B, capacity=20 if static else None, static=static)
    first = layer(prompts, cache=cache, lengths=lengths)
    rest = torch.cat([layer(more[:, t : t + 1], cache=cache) for t in range(6)], 1)
    for b, n in enumerate(lengths):
        alone = layer(torch.cat([prompts[b : b + 1, :n], more[b : b + 1]], 1))
        assert_close_to_truth(first[b, :n], alone[0, :n])
        assert_close_to_truth(rest[b], alone[0, n:])


@pytest.mark.parametrize("kind", ["rotary", "window, everything", "relative bias", "score, window", "score, learned"])
def test_maps_of_a_cached_step_are_rows_of_the_full_map(kind):
    layer, x = layer_with(kind), x_of()
    _, whole = layer(x, return_weights=True)
    cache = layer.make_cache(B)
    layer(x[:, :20], cache=cache)
    _, step = layer(x[:, 20:], cache=cache, return_weights=True)
    S = step.shape[3]
    assert_close_to_truth(step[:], whole[:, :, 20:, T - S :])
    cache.rollback(1)
    with pytest.raises(StaleMapError):
        step.entropy()


@pytest.mark.parametrize("kind", ["window", "score, window"])
def test_a_window_keeps_the_cache_bounded(kind):
    layer = layer_with(kind)
    cache = layer.make_cache(B)
    x = x_of(200)
    parts = [layer(x[:, t : t + 1], cache=cache) for t in range(200)]
    assert cache.room <= 2 * (4 + 64)
    assert_close_to_truth(torch.cat(parts, 1), layer(x))
    layer(x_of(100), cache=cache)
    layer(x[:, :1], cache=cache)
    assert cache.room <= 2 * (4 + 64)


def test_beams_are_reordered_and_drafts_rolled_back():
    layer = layer_with("rotary")
    x, y = x_of(9), x_of(4, seed=3)
    for static in (False, True):
        cache = layer.make_cache(B, capacity=30 if static else None, static=static)
        layer(x, cache=cache)
        layer(y, cache=cache)
        cache.rollback(4)
        cache.reorder([2, 0, 0])
        found = layer(y, cache=cache)
        assert_close_to_truth(found, layer(torch.cat([x[[2, 0, 0]], y], 1))[:, 9:])
        cache.rollback([1, 0, 4])
        assert cache.lengths == [12, 13, 9]
        found = layer(y[:, :1], cache=cache)
        for b, n in enumerate([12, 13, 9]):
            text = torch.cat([x[[2, 0, 0]], y], 1)[b : b + 1, :n]
            assert_close_to_truth(found[b], layer(torch.cat([text, y[b : b + 1, :1]], 1))[0, -1:])
        cache.reset()
        assert_close_to_truth(layer(x, cache=cache), layer(x))


def test_rollback_within_a_window_goes_as_far_as_keys_are_kept():
    layer = layer_with("window")
    cache = layer.make_cache(B)
    x = x_of(150)
    for t in range(150):
        layer(x[:, t : t + 1], cache=cache)
    cache.rollback(60)
    assert_close_to_truth(layer(x[:, 90:91], cache=cache), layer(x)[:, 90:91])
    with pytest.raises(CacheError, match="the window of 4 has dropped older keys"):
        cache.rollback(80)


@pytest.mark.parametrize("apart", [False, True], ids=["fused", "apart"])
def test_an_encoder_is_projected_once_for_all_tokens(apart):
    layer = MultiHeadAttention(E, H, num_kv_heads=2, qk_norm="head", **({"d_key": 40} if apart else {})).double()
    encoder, x = torch.randn(B, 17, 40 if apart else E, dtype=torch.float64), x_of()
    memory = layer.remember(encoder)
    mask = padding([17, 3, 9])
    assert_close_to_truth(layer(x, memory, mask=mask), layer(x, encoder, encoder, mask=mask))
    _, weights = layer(x[:, :1], memory, return_weights=True)
    assert weights.shape == (B, H, 1, 17)
    turning = MultiHeadAttention(E, H, position=rotary()).double()
    at, keys_at = torch.arange(T), torch.arange(17)
    encoder = torch.randn(B, 17, E, dtype=torch.float64)
    expected = turning(x, encoder, positions=at, key_positions=keys_at)
    assert_close_to_truth(turning(x, turning.remember(encoder, positions=keys_at), positions=at), expected)


def test_a_static_cache_compiles_without_recompiling_for_every_token():
    layer = MultiHeadAttention(E, H, causal=True, position=rotary(), mask=window(9)).eval()
    x = x_of().float()
    cache = layer.make_cache(B, capacity=32, static=True)
    layer(x[:, :5], cache=cache)
    step = torch.compile(lambda token: layer(token, cache=cache), backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    found = [step(x[:, t : t + 1].contiguous()) for t in range(5, T)]
    torch.testing.assert_close(torch.cat(found, 1), layer(x)[:, 5:], rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_cache_says_what_it_is():
    cache = KVCache(2, 4, 16, capacity=10)
    assert repr(cache) == "KVCache(B=2, Hkv=4, D=16, 0 tokens, room for 10, float32, cpu)"
    assert cache.nbytes == 2 * 2 * 4 * 10 * 16 * 4


def call(**options):
    layer = MultiHeadAttention(E, H, causal=True)
    x = torch.randn(B, 4, E)
    return layer(x, **options)


BAD = {
    "full": (lambda: call(cache=KVCache(B, H, 8, capacity=3)), CacheError, "holds 3 tokens and 4 are needed"),
    "full, static": (lambda: call(cache=KVCache(B, H, 8, capacity=3, static=True)), CacheError, "holds 3 tokens"),
    "batch": (lambda: call(cache=KVCache(2, H, 8)), CacheError, r"layer.make_cache\(3\)"),
    "dtype": (lambda: call(cache=KVCache(B, H, 8, dtype=torch.bfloat16)), CacheError, "the cache is torch.bfloat16"),
    "kind": (lambda: call(cache=[]), OptionError, "expected a KVCache"),
    "lengths alone": (lambda: call(lengths=[1, 2, 3]), OptionError, r"pass mask=padding\(lengths\)"),
    "lengths": (lambda: call(cache=KVCache(B, H, 8), lengths=[1, 2, 9]), CacheError, "3 whole numbers from 0 to 4"),
    "static": (lambda: KVCache(1, 2, 8, static=True), CacheError, "needs a capacity"),
    "reorder": (lambda: KVCache(2, 2, 8).reorder([0, 2]), ShapeError, "samples 0 to 1"),
    "rollback": (lambda: KVCache(2, 2, 8).rollback(1), CacheError, "not before token 0"),
    "keys": (
        lambda: call(key=torch.randn(B, 5, E), cache=KVCache(B, H, 8)),
        OptionError,
        "a cache is for self-attention",
    ),
    "memory": (
        lambda: call(key=MultiHeadAttention(E, 2).remember(torch.randn(B, 5, E))),
        ShapeError,
        "remembered keys",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_caches_are_refused_with_what_was_given(case):
    run, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        run()


def test_a_cache_in_training_is_refused():
    layer = MultiHeadAttention(E, H, causal=True)
    with torch.enable_grad(), pytest.raises(CacheError, match="stores no gradients"):
        layer(torch.randn(B, 4, E), cache=layer.make_cache(B))


def test_a_dense_mask_cannot_be_placed_among_samples_of_different_length():
    from headwise import MaskError, dense

    layer = MultiHeadAttention(E, H)
    cache = layer.make_cache(B)
    with pytest.raises(MaskError, match="lists its queries one by one"):
        layer(torch.randn(B, 4, E), cache=cache, lengths=[1, 2, 4], mask=dense(torch.ones(4, 4, dtype=torch.bool)))
    assert (causal() & window(3)).extent.queries is None


def test_statistics_of_cached_steps_know_where_queries_stand():
    layer, x = layer_with("rotary"), x_of(9)
    _, plain = layer(x, return_weights=True)
    _, static = layer(x, cache=layer.make_cache(B, capacity=32, static=True), return_weights=True)
    ids = torch.arange(32) % 3
    for ask in (
        lambda w: w.mass(previous_token()),
        lambda w: w.distance().mean,
        lambda w: w.distance().histogram[..., :4],
        lambda w: w.without(sink(1)).entropy(),
        lambda w: w.mass(induction(ids[: w.shape[3]])),
        lambda w: w.select(heads=[2, 4], rows=slice(3, 7)).distance().mean,
    ):
        assert_close_to_truth(ask(static), ask(plain))
    assert str(static.summary()) == str(plain.summary())


def test_masks_that_name_keys_hold_after_a_window_has_dropped_some():
    layer, x = layer_with("window"), x_of(200)
    keep, ids, bias = padding([150, 200, 33]), torch.arange(200) // 37, torch.randn(200, 200, dtype=torch.float64)
    cache = layer.make_cache(B)
    steps = [
        layer(x[:, t : t + 1], cache=cache, mask=keep & documents(ids[: t + 1]), attn_bias=bias[t : t + 1, : t + 1])
        for t in range(200)
    ]
    assert cache._dropped > 0
    assert_close_to_truth(torch.cat(steps, 1), layer(x, mask=keep & documents(ids), attn_bias=bias))


def test_a_refused_call_leaves_the_cache_as_it_was():
    for static in (False, True):
        layer, x = layer_with("plain"), x_of(5)
        cache = layer.make_cache(B, capacity=16, static=static)
        layer(x, cache=cache)
        with pytest.raises(ValueError, match="mask"):
            layer(x[:, :2], cache=cache, mask=torch.ones(2, 9))
        with pytest.raises(CacheError, match="whole numbers from 0 to 2"):
            layer(x[:, :2], cache=cache, lengths=[1, 2, -1])
        explain(layer, x, cache=cache)
        assert cache.lengths == [5] * B


def test_maps_of_a_growing_cache_stay_readable_until_it_is_rolled_back():
    layer, x = layer_with("rotary"), x_of(6)
    cache = layer.make_cache(B)
    with watch(layer) as seen:
        for t in range(6):
            layer(x[:, t : t + 1], cache=cache)
    _, whole = layer(x, return_weights=True)
    for t, weights in enumerate(seen.calls[""]):
        assert_close_to_truth(weights[:], whole[:, :, t : t + 1, : t + 1])
    cache.rollback(1)
    with pytest.raises(StaleMapError):
        seen.calls[""][0].entropy()
    with torch.inference_mode():
        cache = layer.make_cache(B)
        _, weights = layer(x, cache=cache, return_weights=True)
        cache.reset()
        with pytest.raises(StaleMapError):
            weights[:]


def test_padding_takes_no_room_in_a_full_cache():
    cache = KVCache(2, 2, 8, capacity=8)
    key = torch.randn(2, 2, 6, 8)
    cache.append(key, key, [2, 6])
    assert cache.append(key[:, :, :4], key[:, :, :4], [4, 2]).key.shape[2] == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_made_under_autocast_has_its_dtype(dtype, static):
    layer, x = MultiHeadAttention(E, H, causal=True, position=rotary()).eval(), torch.randn(B, 5, E)
    options = {"capacity": 8, "static": True} if static else {}
    with torch.no_grad(), torch.autocast("cpu", dtype):
        cache, expected = layer.make_cache(B, **options), layer(x)
        found = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(5)], 1)
        assert layer.make_cache(B, dtype=torch.float32).dtype == torch.float32
        assert layer.make_pool(3).layout.dtype == dtype
    assert cache.dtype == found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert layer.make_cache(B).dtype == torch.float32
    with torch.autocast("cpu", dtype):
        assert layer.double().make_cache(B).dtype == torch.float64


def test_a_window_of_one_token_and_a_capacity_beside_a_window():
    alone = MultiHeadAttention(E, H, causal=True, mask=window(0)).double()
    cache, x = alone.make_cache(B), x_of(70)
    parts = [alone(x[:, t : t + 1], cache=cache) for t in range(70)]
    assert_close_to_truth(torch.cat(parts, 1), alone(x))
    cache = layer_with("window").make_cache(B, capacity=8)
    with pytest.raises(CacheError, match="holds 8 tokens and 20"):
        layer_with("window")(x_of(20), cache=cache)


def test_context_length_counts_what_the_cache_and_the_encoder_hold():
    layer = MultiHeadAttention(E, H, context_length=8).double()
    cache = layer.make_cache(B)
    layer(x_of(8), cache=cache)
    with pytest.raises(ShapeError, match="the sequence has 9 tokens"):
        layer(x_of(1), cache=cache)
    with pytest.raises(ShapeError, match="the sequence has 9 tokens"):
        layer(x_of(1), layer.remember(x_of(9)))


def test_a_map_made_without_gradients_has_none():
    layer = layer_with("sinks and soft-cap")
    _, weights = layer(x_of(5), return_weights=True)
    with torch.enable_grad():
        assert not weights.requires_grad
        assert weights[0, 0].numpy().shape == (5, 5)


def test_a_cache_of_inference_mode_is_not_written_outside():
    layer = layer_with("plain")
    with torch.inference_mode():
        cache = layer.make_cache(B)
        layer(x_of(3), cache=cache)
    with pytest.raises(CacheError, match="inference_mode"):
        layer(x_of(1), cache=cache)


def test_a_cache_under_chunks_drops_old_keys_and_stays_exact():
    layer = MultiHeadAttention(E, H, causal=True, mask=chunks(3), position=rotary(), dtype=torch.float64).eval()
    x, cache = torch.randn(2, 300, E, dtype=torch.float64), layer.make_cache(2)
    steps = [layer(token[:, None], cache=cache) for token in x.unbind(1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x))
    assert cache.room < 200


def test_a_cache_that_drops_keys_is_refused_by_a_layer_that_sees_further():
    windowed = MultiHeadAttention(24, 3, causal=True, mask=window(4)).eval()
    whole, wider = (MultiHeadAttention(24, 3, causal=True, mask=mask).eval() for mask in (None, window(5)))
    x = torch.randn(2, 7, 24)
    with torch.no_grad():
        windowed(x, cache=windowed.make_cache(2))
        for layer, seen in ((whole, "all"), (wider, "5")):
            cache = windowed.make_cache(2)
            with pytest.raises(
                CacheError, match=f"drops keys more than 4 before a query, and here a query sees {seen}"
            ):
                layer(x, cache=cache)
            assert cache.lengths == [0, 0]
        whole(x, cache=windowed.make_cache(2, capacity=9))
