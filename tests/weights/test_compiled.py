"""The compiled loop gives what the float64 tiles give, as exactly as plain float32; without it, tiles do the work."""

import platform
import subprocess

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise import (
    AttentionMap,
    Scoring,
    alibi,
    causal,
    documents,
    induction,
    local,
    padding,
    prefix,
    previous_token,
    same_token,
    sink,
    token_is,
    window,
)
from headwise.weights import compiled, readings
from headwise.weights.compiled import build
from headwise.weights.scoring import KeyBias

needs_compiler = pytest.mark.skipif(isinstance(build.library(), str), reason=f"no compiled loop: {build.library()}")
B, H, Hkv, D = 2, 6, 3, 13

SCORINGS = {
    "plain": lambda S: {},
    "causal": lambda S: {"mask": causal()},
    "window": lambda S: {"mask": window(7, 2)},
    "padding": lambda S: {"mask": causal() & padding([S, S // 3])},
    "left padding": lambda S: {"mask": padding([S // 2, S], side="left")},
    "nothing seen": lambda S: {"mask": padding([0, S])},
    "documents": lambda S: {"mask": documents(lengths=[S // 3, S - S // 3]) & causal()},
    "prefix": lambda S: {"mask": causal() | prefix(3)},
    "without the first": lambda S: {"mask": causal() & ~prefix(1)},
    "soft-cap": lambda S: {"softcap": 1.5, "mask": causal()},
    "sinks": lambda S: {"sinks": torch.randn(H), "mask": causal()},
    "ALiBi": lambda S: {"relative": alibi(H), "mask": causal()},
    "scale": lambda S: {"scale": 0.7},
    "by value": lambda S: {"relative": KeyBias(torch.randn(B, H, S)), "mask": causal()},
    "by value, ALiBi": lambda S: {"relative": KeyBias(torch.randn(B, H, S), alibi(H)), "softcap": 2.5},
}
LENGTHS = {"square": (131, 131), "cached": (67, 149), "more queries than keys": (79, 37), "one query": (1, 97)}


def made(name, T, S):
    """The map in float32 and in float64."""
    options = SCORINGS[name](S)
    query, key = torch.randn(B, H, T, D), torch.randn(B, Hkv, S, D)
    precise = dict(options)
    if "sinks" in options:
        precise["sinks"] = options["sinks"].double()
    if "relative" in options:
        precise["relative"] = options["relative"].map_tensors(torch.Tensor.double)
    return AttentionMap(query, key, Scoring(**options)), AttentionMap(query.double(), key.double(), Scoring(**precise))


def panel(weights):
    T, S = weights.shape[2:]
    ids = torch.arange(S) % 5
    probes = {
        "sink": sink(2),
        "previous": previous_token(),
        "near": local(3),
        "induction": induction(ids),
        "same": same_token(ids),
        "token": token_is(ids, [1, 3]),
        "document": documents(ids) & causal(),
    }
    found = weights.panel(
        entropy=True, peak=True, distance=True, histogram=True, received=True, masses=probes,
        pooled=(min(T, 7), min(S, 11)), pooled_peak=(min(T, 5), min(S, 3)), topk=min(S, 4),
    )  # fmt: skip
    named = {
        "entropy": found.entropy,
        "peak": found.peak.weight,
        "distance": found.distance,
        "histogram": found.histogram,
        "received": found.received.total,
        "count": found.received.count,
        "picture": found.pooled,
        "peaks": found.pooled_peak,
        "top": found.topk.weights,
        "log-sum-exp": weights.log_sum_exp().clamp(min=-99),
    }
    return named | found.masses, {"peak key": found.peak.key, "top keys": found.topk.keys}


@needs_compiler
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", SCORINGS)
def test_every_statistic_equals_that_of_the_float64_tiles(name, length):
    weights, precise = made(name, *LENGTHS[length])
    assert compiled.refuses(weights._source()) is None
    assert weights.explain() == "the compiled loop, in one pass over the weights"
    assert "float64" in compiled.refuses(precise._source())
    (found, keys), (expected, expected_keys) = panel(weights), panel(precise)
    for statistic, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), expected[statistic].double(), atol=3e-6, rtol=3e-6, msg=statistic)
    for statistic, value in keys.items():
        assert torch.equal(value, expected_keys[statistic]), statistic


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_read_as_float32(dtype):
    query, key = torch.randn(B, H, 41, D, dtype=dtype), torch.randn(B, Hkv, 53, D, dtype=dtype)
    weights, precise = (AttentionMap(*x, Scoring(causal())) for x in ((query, key), (query.double(), key.double())))
    assert compiled.refuses(weights._source()) is None
    torch.testing.assert_close(weights.entropy().double(), precise.entropy(), atol=3e-6, rtol=3e-6)


@needs_compiler
@settings(deadline=None)  # the machine may be busy
@given(
    st.integers(1, 150), st.integers(1, 150), st.integers(1, 3), st.integers(1, 40), st.integers(0, 50),
    st.booleans(), st.integers(1, 150), st.integers(1, 150),
)  # fmt: skip
def test_any_sizes(T, S, group, d, back, masked, rows, cols):
    query, key = torch.randn(1, 2 * group, T, d), torch.randn(1, 2, S, d)
    scoring = Scoring(window(back, 1)) if masked else Scoring()
    weights, precise = (AttentionMap(q, k, scoring) for q, k in ((query, key), (query.double(), key.double())))
    size = (min(rows, T), min(cols, S))
    for name in ("entropy", "received", "pooled"):
        asked = {name: size if name == "pooled" else True}
        found, expected = (getattr(x.panel(**asked), name) for x in (weights, precise))
        if name == "received":
            assert torch.equal(found.count.double(), expected.count)
            found, expected = found.total, expected.total
        torch.testing.assert_close(found.double(), expected, atol=5e-6, rtol=5e-6)


@needs_compiler
def test_parts_of_a_map_and_strided_tensors_are_read_in_place():
    packed = torch.randn(B, 59, 3, H, D)
    query, key, _ = packed.permute(2, 0, 3, 1, 4)
    weights = AttentionMap(query, key, Scoring(causal()))
    dense = AttentionMap(query.double(), key.double(), Scoring(causal())).to_tensor()
    entropy = torch.special.entr(dense).sum(-1)
    rows = torch.tensor([50, 3, 17, 58])
    part = weights.select(batch=[1], heads=[4, 0], rows=rows)
    assert compiled.refuses(part._source()) is None
    torch.testing.assert_close(part.entropy().double(), entropy[1:, [4, 0]][:, :, rows], atol=3e-6, rtol=3e-6)
    total = dense[1:, [4, 0]][:, :, rows].sum(-2)
    torch.testing.assert_close(part.received().total.double(), total, atol=3e-6, rtol=3e-6)
    turned = AttentionMap(query.mT.contiguous().mT, key, Scoring(causal()))
    torch.testing.assert_close(turned.entropy().double(), entropy, atol=3e-6, rtol=3e-6)


@needs_compiler
def test_the_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setattr(compiled, "LEAST_ROWS", 64)
    query, key = torch.randn(1, 3, 700, 31), torch.randn(1, 3, 700, 31)
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        weights = AttentionMap(query, key, Scoring(causal()))
        results.append(panel(weights)[0])
    for other in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, other[name]), name
    precise = panel(AttentionMap(query.double(), key.double(), Scoring(causal())))[0]
    torch.testing.assert_close(results[0]["picture"].double(), precise["picture"], atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(results[0]["peaks"].double(), precise["peaks"], atol=3e-6, rtol=3e-6)


@needs_compiler
def test_nan_is_not_hidden():
    query, key = torch.randn(1, 1, 70, D), torch.randn(1, 1, 70, D)
    query[0, 0, 40, 2] = torch.nan
    weights = AttentionMap(query, key, Scoring(causal()), torch.zeros(1, 1, 70))
    assert weights.entropy().isnan().nonzero()[:, 2].tolist() == [40]
    assert weights.received().total.isnan().sum() == 41


REFUSED = {
    "float64": (lambda x: AttentionMap(x.double(), x.double()), "need float64"),
    "bias": (lambda x: AttentionMap(x, x, Scoring(bias=torch.zeros(7, 7))), "need float64"),
    "score": (lambda x: AttentionMap(x, x, Scoring(score=lambda s, b, h, q, k: s)), "score function"),
    "mask": (lambda x: AttentionMap(x, x, Scoring(~window(1, 1))), "the mask ~window(1, 1)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_loop_cannot_do_is_said_and_done_by_tiles(case):
    make, reason = REFUSED[case]
    weights = make(torch.randn(1, 2, 7, 5))
    assert reason in compiled.refuses(weights._source())
    assert weights.explain().startswith("tiles in torch, because the compiled loop cannot run: ")
    assert reason in weights.explain()
    torch.testing.assert_close(weights.entropy(), torch.special.entr(weights.to_tensor()).sum(-1).to(weights.entropy()))


@needs_compiler
def test_a_subclass_with_another_take_is_not_given_the_sums_of_its_base():
    class Squares(readings.EntropyReading):
        def take(self, tile):
            self.sum[tile.heads, tile.rows] += tile.weights.square().sum(-1)

        def finish(self):
            return (readings.unflat(self.sum, self.source),)

    weights = AttentionMap(torch.randn(1, 2, 11, 5), torch.randn(1, 2, 11, 5))
    torch.testing.assert_close(weights.read(Squares())[0], weights.to_tensor().square().sum(-1))


# Building.


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As on a machine where nothing was built yet."""
    monkeypatch.setenv(build.FOLDER, str(tmp_path / "cache"))
    build.library.cache_clear()
    yield tmp_path / "cache"
    build.library.cache_clear()


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86 processors")
@pytest.mark.parametrize(
    ("flag", "lanes"), [("-march=x86-64-v3", 8), ("-march=x86-64", 4)], ids=["AVX2", "any x86-64 processor"]
)
def test_processors_with_narrower_registers_give_the_same(flag, lanes, fresh, monkeypatch):
    if lanes == 8 and "avx2" not in build._processor():
        pytest.skip("this processor has no AVX2")
    monkeypatch.setattr(build, "NATIVE", ((flag,),))
    assert build.library().headwise_lanes() == lanes
    for name in ("padding", "documents", "prefix", "soft-cap", "ALiBi"):
        test_every_statistic_equals_that_of_the_float64_tiles(name, "cached")


@needs_compiler
def test_the_library_is_built_once_and_found_again(fresh, monkeypatch):
    assert not isinstance(build.library(), str)
    (kept,) = fresh.iterdir()
    assert kept.suffix == ".so"
    build.library.cache_clear()
    monkeypatch.setattr(subprocess, "run", None)
    assert not isinstance(build.library(), str)


def test_without_a_compiler_tiles_do_the_work(fresh, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    weights = AttentionMap(torch.randn(1, 2, 11, 5), torch.randn(1, 2, 11, 5), Scoring(causal()))
    assert compiled.refuses(weights._source()) == "there is no C++ compiler (no-such-compiler)"
    torch.testing.assert_close(weights.entropy(), torch.special.entr(weights.to_tensor()).sum(-1))
    assert not fresh.exists()


def test_a_compiler_that_fails_leaves_nothing_behind(fresh, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setenv("CXX", str(broken))
    assert "could not build it: no such flag" in build.library()
    assert not list(fresh.iterdir())


def test_a_switch_turns_the_loop_off(fresh, monkeypatch):
    monkeypatch.setenv(build.SWITCH, "0")
    assert build.library() == "HEADWISE_COMPILED=0 switches it off"


@needs_compiler
def test_weights_by_value_are_read_by_the_loop_too():
    T, S, Dv = 61, 73, 3
    query, key, value = torch.randn(B, H, T, D), torch.randn(B, Hkv, S, D), torch.randn(B, Hkv, S, Dv)
    mask = causal() & padding([S, 53])
    heads, rows = [4, 1], slice(11, 59, 3)
    weights = AttentionMap(query, key, Scoring(mask)).by_value(value).select(batch=[1], heads=heads, rows=rows)
    assert compiled.refuses(weights._source()) is None
    plain = AttentionMap(query.double(), key.double(), Scoring(mask)).to_tensor()
    carried = plain * value.double().norm(dim=-1).repeat_interleave(H // Hkv, 1)[:, :, None]
    real = weights.real_tokens().queries[0]
    exact = (carried / carried.sum(-1, keepdim=True))[1][heads][:, rows] * real[:, None]
    torch.testing.assert_close(weights.entropy()[0].double(), torch.special.entr(exact).sum(-1), atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(weights.received().total[0].double(), exact.sum(1), atol=3e-6, rtol=3e-6)
