"""FlashAttention-4: what calls mean to it, when it is asked, and that it is never believed without a trial."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from attention import flash_library
from headwise.attention.backends import BACKENDS, Call
from headwise.attention.backends.dense import Whole
from headwise.attention.backends.flash import FlashKernel, kernel, trial
from headwise.attention.backends.flash.lowering import Band, layout, lower
from headwise.errors import install_command
from headwise.masks import causal, dense, documents, padding, prefix, window
from headwise.weights import Scoring
from headwise.weights.scoring import alibi

B, H, HKV, T, D, DV = 2, 6, 3, 23, 8, 16
IDS = torch.tensor([[5] * 7 + [1] * 3 + [2] * 13, [0] * 11 + [4] * 12])
MASKS = {
    "none": None,
    "causal": causal(),
    "window": window(4),
    "window ahead": window(4, 3),
    "causal window": causal() & window(5, 2),
    "documents": documents(lengths=[7, 5, 11]),
    "causal documents": causal() & documents(IDS),
    "window documents": window(3) & documents(IDS),
    "lengths": padding([23, 9]),
    "a sample without keys": padding([0, 17]),
}


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The library's functions by matrix products."""
    monkeypatch.setattr(kernel, "library", lambda: flash_library)
    trial.failure.cache_clear()
    yield flash_library
    trial.failure.cache_clear()


def make_call(S=T, *, dtype=torch.float64, sizes=(B, H, HKV, T, D, DV), **scoring):
    b, h, hkv, t, d, dv = sizes
    torch.manual_seed(3)
    shapes = ((b, h, t, d), (b, hkv, S, d), (b, hkv, S, dv))
    heads = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
    return Call(*heads, Scoring(**scoring), 0.0)


def gradients(output, call):
    inputs = [x for x in (*call[:3], call.scoring.sinks) if x is not None]
    return torch.autograd.grad(output.square().sum(), inputs)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("options", ["plain", "softcap", "sinks"])
def test_output_log_sum_exp_and_gradients_equal_the_reference(name, options):
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True) if options == "sinks" else None
    call = make_call(mask=MASKS[name], softcap=2.0 if options == "softcap" else None, sinks=sinks, scale=0.3)
    output, lse = FlashKernel().run_with_lse(call)
    expected = Whole().run(call)
    torch.testing.assert_close(output, expected)
    for one, other in zip(gradients(output, call), gradients(expected, call), strict=True):
        torch.testing.assert_close(one, other)
    if name in ("lengths", "a sample without keys"):
        assert lse is None
    else:
        dense_lse = torch.logsumexp(attend_scores(call), -1)
        torch.testing.assert_close(lse.double(), dense_lse)
        assert not lse.requires_grad


def attend_scores(call):
    """Masked scores, with the sinks as one more key."""
    query, key, _, scoring, _ = call
    scores = query @ key.repeat_interleave(H // HKV, 1).mT * scoring.scale
    scores = scoring.softcap * torch.tanh(scores / scoring.softcap) if scoring.softcap else scores
    if scoring.mask is not None:
        scores = scores.masked_fill(~scoring.mask.to_tensor(T, T), -torch.inf)
    if scoring.sinks is None:
        return scores
    return torch.cat([scores, scoring.sinks[:, None, None].expand(B, H, T, 1)], -1)


@pytest.mark.parametrize("mask", [None, causal(), window(6), window(6, 2)])
def test_fewer_queries_than_keys_are_aligned_with_the_last_key(mask):
    call = make_call(S=31, mask=mask)
    torch.testing.assert_close(FlashKernel().run(call), Whole().run(call))


def test_a_compiled_graph_contains_it_as_one_operator():
    call = make_call(mask=window(4), sinks=torch.randn(H, dtype=torch.float64, requires_grad=True))

    def run(query, key, value, sinks):
        return FlashKernel().run(Call(query, key, value, Scoring(window(4), sinks=sinks), 0.0))

    output = torch.compile(run, backend="aot_eager", fullgraph=True)(*call[:3], call.scoring.sinks)
    expected = Whole().run(call)
    torch.testing.assert_close(output, expected)
    for one, other in zip(gradients(output, call), gradients(expected, call), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("starts", [None, torch.tensor([0, 9, 23, 46], dtype=torch.int32)])
def test_the_operators_describe_their_results_truly(starts):
    call = make_call(dtype=torch.float32)
    given = (*call[:3], torch.randn(H, requires_grad=True), starts, None, 0.4, 0.0, None, 0, 23)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.headwise.flash_attention.default, given, test_utils=tests)


@pytest.mark.parametrize(
    ("mask", "band"),
    [
        (causal(), Band(None, 0)),
        (window(4, 2), Band(4, 2)),
        (window(9, 5) & window(4), Band(4, 0)),
        (causal() & window(99), Band(None, 0)),
        (window(99, 99), Band()),
    ],
)
def test_masks_by_position_become_one_band(mask, band):
    assert lower(make_call(mask=mask)).band == band


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (make_call(bias=torch.zeros(T, T)), "no bias"),
        (make_call(relative=alibi(H)), "no bias"),
        (make_call(score=lambda score, *_: score), "no bias"),
        (make_call(mask=dense(torch.ones(T, T, dtype=torch.bool).tril())), "no form of dense"),
        (make_call(mask=causal() | prefix(3)), "no form of"),
        (make_call(mask=padding([9, 23], side="left")), "no form of padding"),
        (make_call(mask=causal() & padding([9, 23])), "from the last real key"),
        (make_call(S=19, mask=causal()), "see no key"),
        (make_call(S=31, mask=documents(lengths=[20, 11])), "as many keys as queries"),
        (make_call(mask=documents([0] * 9 + [1] * 9 + [0] * 5)), "not in one piece"),
    ],
)
def test_what_it_does_not_know_it_refuses(call, reason):
    assert reason in lower(call)


def test_the_layout_of_documents_is_found_once(monkeypatch):
    from headwise.attention.backends.flash import lowering

    calls = []
    monkeypatch.setattr(lowering, "layout", lambda *given: calls.append(given) or layout(*given))
    mask = documents(IDS.clone())
    for _ in range(3):
        lower(make_call(mask=mask))
    assert len(calls) == 1
    mask.ids[1, 11] = 0
    lower(make_call(mask=mask))
    assert len(calls) == 2


def test_an_id_may_return_in_another_sample():
    starts, longest = layout(torch.tensor([[7, 7, 8], [8, 7, 7]]), 2)
    assert starts.tolist() == [0, 2, 3, 4, 6]
    assert longest == 2


LARGE = (1, 8, 1, 8192, 128, 128)


def large_call(**scoring):
    b, h, hkv, t, d, dv = LARGE
    return Call(
        torch.empty(b, h, t, d, dtype=torch.bfloat16, device="meta"),
        torch.empty(b, hkv, t, d, dtype=torch.bfloat16, device="meta"),
        torch.empty(b, hkv, t, dv, dtype=torch.bfloat16, device="meta"),
        Scoring(**scoring),
        0.0,
    )


def test_only_calls_with_enough_work_go_to_the_library():
    asked = FlashKernel()
    assert not isinstance(asked.meaning(large_call(mask=causal())), str)
    assert not isinstance(asked.meaning(large_call(mask=window(1023))), str)
    small = make_call(dtype=torch.bfloat16, mask=causal())
    assert "too little" in asked.meaning(small)
    few = large_call(mask=causal())._replace(query=torch.empty(1, 8, 1, 128, dtype=torch.bfloat16, device="meta"))
    assert "too little" in asked.meaning(few)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"query": torch.empty(1, 8, 8192, 128, device="meta")}, "16 bit"),
        ({"value": torch.empty(1, 1, 8192, 260, dtype=torch.bfloat16, device="meta")}, "head dimensions"),
        ({"value": torch.empty(1, 1, 8192, 0, dtype=torch.bfloat16, device="meta")}, "size 0"),
    ],
)
def test_unsupported_options_fall_back_with_a_reason(change, reason):
    assert reason in FlashKernel().meaning(large_call()._replace(**change))


def test_it_stands_before_the_other_kernels_for_cuda():
    names = [one.name for one in BACKENDS]
    assert names.index("flash") < names.index("triangles") < names.index("flex") < names.index("sdpa")
    assert "CUDA" in FlashKernel().refuses(make_call())


def test_without_the_extra_the_reason_names_the_install_command(monkeypatch):
    monkeypatch.setattr(kernel, "installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    call = large_call(mask=causal())
    pretend = type("Pretend", (), {"is_cuda": True, "device": torch.device("cuda:0")})()
    monkeypatch.setattr(FlashKernel, "meaning", lambda self, _: lower(call))
    assert install_command("flash") in FlashKernel().refuses(call._replace(query=pretend))


KIND = trial.Specialization(torch.bfloat16, torch.device("cpu"), (64, 64), 3, False, False, True, False, False, False)


def test_a_kernel_that_agrees_with_the_reference_is_used():
    changes = [
        {},
        {"back": True},
        {"back": True, "ahead": False},
        {"ahead": False},
        {"documents": True},
        {"ahead": False, "lengths": True},
        {"sinks": True},
        {"softcap": True},
    ]
    for change in changes:
        assert trial.failure(KIND._replace(**change)) is None, change


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch, library):
    right = library.one_sample

    def off_by_one(query, key, value, sinks, scale, softcap, band):
        return right(query, key, value, sinks, scale, softcap, (band[0], None if band[1] is None else band[1] + 1))

    monkeypatch.setattr(library, "one_sample", off_by_one)
    assert "its output differs from the reference" in trial.failure(KIND)


def test_a_kernel_with_wrong_gradients_is_not_used(monkeypatch, library):
    right = library._flash_attn_bwd

    def late(*given, **options):
        query, key, value = right(*given, **options)
        return query, key * 1.1, value

    monkeypatch.setattr(library, "_flash_attn_bwd", late)
    assert "its gradient of the key differs from the reference" in trial.failure(KIND)


def test_a_kernel_that_raises_is_not_used(monkeypatch, library):
    monkeypatch.setattr(library, "_flash_attn_fwd", lambda *_, **__: None)
    assert "its kernel failed: TypeError" in trial.failure(KIND)


COMPILE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from headwise.attention.backends.flash import kernel

def check(D, sinks, starts, lengths, softcap, back, ahead):
    with FakeTensorMode(), torch.no_grad():
        heads = [torch.empty(3, n, 1031, D, dtype=torch.bfloat16, device="cuda") for n in (20, 5, 5)]
        sink = torch.empty(20, device="cuda") if sinks else None
        start = torch.empty(8, dtype=torch.int32, device="cuda") if starts else None
        length = torch.empty(3, dtype=torch.int32, device="cuda") if lengths else None
        rest = (0.1, softcap, back, ahead, 500)
        output, lse = kernel.forward(*heads, sink, start, length, *rest)
        assert output.shape == heads[0].shape and lse.shape == (3, 20, 1031), (output.shape, lse.shape)
        found = kernel.backward(output, *heads, output, lse, sink, start, length, *rest)
        assert [x.shape for x in found[:3]] == [x.shape for x in heads]
        assert not sinks or found[3].shape == (20,)

check(128, False, False, False, 0.0, None, 0)
check(64, True, False, False, 0.0, 127, 0)
check(256, False, False, False, 50.0, 4095, 0)
check(96, False, True, False, 0.0, None, 0)
check(64, False, False, True, 0.0, None, None)
print("compiled")
"""


@pytest.mark.skipif(not kernel.installed(), reason="flash-attn-4 is not installed")
def test_the_library_itself_compiles_every_form_of_a_call_for_hopper():
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(COMPILE)],
        env=os.environ | target,
        capture_output=True,
        text=True,
    )
    assert ran.stdout.endswith("compiled\n"), ran.stderr[-3000:]
