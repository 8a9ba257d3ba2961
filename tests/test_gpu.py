"""The same promises on CUDA. Skipped without a GPU; run with `pytest -m gpu`."""

import itertools

import pytest
import torch

from closeness import assert_close_to_truth
from headwise import (
    MultiHeadAttention,
    Scoring,
    alibi,
    attend,
    blocks,
    causal,
    dense,
    documents,
    explain,
    induction,
    padding,
    prefix,
    previous_token,
    reference,
    rotary,
    sink,
    window,
)
from headwise.attention.backends import Call
from headwise.weights import Statistic
from headwise.weights.source import Source

pytestmark = pytest.mark.gpu

B, H, D = 2, 6, 64
CUDA = "cuda"
MASKS = {
    "none": lambda T, S: None,
    "causal": lambda T, S: causal(),
    "window": lambda T, S: causal() & window(11),
    "padding": lambda T, S: padding(torch.tensor([S, max(S // 2, 1)], device=CUDA)),
    "empty sample": lambda T, S: padding(torch.tensor([0, S], device=CUDA)) & causal(),
    "documents": lambda T, S: documents(torch.arange(S, device=CUDA) // 7) & causal(),
    "prefix": lambda T, S: causal() | prefix(3),
    "dense": lambda T, S: dense(torch.rand(B, 1, T, S, device=CUDA) > 0.5),
    "empty rows": lambda T, S: dense((torch.arange(T, device=CUDA) % 3 != 1)[:, None].expand(T, S)),
}


def by_reference(tensors, mask, dtype):
    copies = [x.detach().to(dtype).requires_grad_() for x in tensors]
    T, S = copies[0].shape[2], copies[1].shape[2]
    visible = None if mask is None else mask.to_tensor(T, S, device=CUDA)
    output, _ = reference.attend(*copies, visible=visible)
    output.backward(slope(output))
    return output.detach(), [x.grad for x in copies]


def slope(output):
    return torch.linspace(-1, 1, output.numel(), device=CUDA, dtype=torch.float64).view(output.shape).to(output.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", MASKS)
def test_output_and_gradients_match_the_reference(kind, dtype):
    lengths = [(1, 1), (1, 7), (5, 7), (7, 5), (128, 128), (127, 129), (129, 127), (301, 301)]
    for (T, S), Hkv in itertools.product(lengths, (6, 3, 1)):
        shapes = [(B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, D)]
        tensors = [torch.randn(s, device=CUDA, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
        mask = MASKS[kind](T, S)
        output = attend(*tensors, mask=mask)
        output.backward(slope(output))
        truth, truth_grads = by_reference(tensors, mask, torch.float64)
        plain, plain_grads = by_reference(tensors, mask, dtype)
        assert_close_to_truth(output.detach(), truth, plain, factor=3)
        for x, exact, rough in zip(tensors, truth_grads, plain_grads, strict=True):
            assert_close_to_truth(x.grad, exact, rough, factor=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_rows_that_see_nothing_are_zero_with_finite_gradients(dtype, dropout):
    for kind, T, Hkv in itertools.product(("empty rows", "empty sample"), (5, 128, 301), (6, 2)):
        shapes = [(B, H, T, D), (B, Hkv, T, D), (B, Hkv, T, D)]
        tensors = [torch.randn(s, device=CUDA, dtype=dtype, requires_grad=True) for s in shapes]
        mask = MASKS[kind](T, T)
        output = attend(*tensors, mask=mask, dropout=dropout)
        empty = ~mask.to_tensor(T, device=CUDA).any(-1).expand(B, H, T)
        assert (output[empty] == 0).all()
        output.float().square().sum().backward()
        assert all(x.grad.isfinite().all() for x in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("batch", "T", "S"), [(0, 5, 7), (2, 0, 7), (2, 5, 0)])
def test_axes_of_size_zero_work(batch, T, S, dtype):
    query = torch.randn(batch, H, T, D, device=CUDA, dtype=dtype, requires_grad=True)
    key = torch.randn(batch, H, S, D, device=CUDA, dtype=dtype)
    output = attend(query, key, key, causal=True)
    assert output.shape == (batch, H, T, D)
    output.sum().backward()
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_learns(dtype, alone):
    tensors = [torch.randn(B, H, 128, D, device=CUDA, dtype=dtype).requires_grad_(not alone) for _ in range(3)]
    bias = torch.randn(1, H, 128, 128, device=CUDA, dtype=dtype, requires_grad=True)
    twin = bias.detach().double().requires_grad_()
    attend(*tensors, attn_bias=bias, causal=True).sum().backward()
    visible = causal().to_tensor(128, device=CUDA)
    reference.attend(*[x.detach().double() for x in tensors], bias=twin, visible=visible)[0].sum().backward()
    assert (bias.grad.double() - twin.grad).abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-3)


def test_long_causal_attention_makes_no_square_matrix():
    T = 16384
    for S in (T, T + 64):  # with more keys than queries as well
        query = torch.randn(1, 4, T, D, device=CUDA, dtype=torch.bfloat16)
        key = torch.randn(1, 4, S, D, device=CUDA, dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(query, key, key, causal=True)
        assert torch.cuda.max_memory_allocated() - before < 64 * 2**20  # one T×T bias would be 512 MiB


def test_masks_do_not_wait_for_the_device():
    layer = MultiHeadAttention(384, 6, causal=True, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(B, 128, 384, device=CUDA, dtype=torch.bfloat16)
    mask = padding(torch.tensor([100, 128], device=CUDA)) & documents(torch.arange(128, device=CUDA) // 50)
    layer(x, mask=mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, mask=mask).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert layer.qkv_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"mask": window(20)}], ids=str)
def test_compiled_layer_matches_eager_at_every_length(options):
    torch.compiler.reset()
    layer = MultiHeadAttention(384, 6, causal=True, device=CUDA, dtype=torch.bfloat16, **options)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for T in (64, 128, 301):
        x = torch.randn(B, T, 384, device=CUDA, dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0.02, atol=0.02)


def test_autocast_runs_the_fused_kernel():
    layer = MultiHeadAttention(384, 6, causal=True, device=CUDA)
    x = torch.randn(B, 128, 384, device=CUDA)
    with torch.autocast(CUDA, torch.bfloat16):
        output = layer(x, mask=padding(torch.tensor([100, 128], device=CUDA)))
    expected = layer(x, mask=padding(torch.tensor([100, 128], device=CUDA)))
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), expected, rtol=0.05, atol=0.02)


def test_explain_names_the_kernel_and_the_refusals():
    tensors = [torch.randn(B, H, 128, D, device=CUDA, dtype=torch.bfloat16) for _ in range(3)]
    fused = explain(*tensors, causal=True)
    assert fused.path == "sdpa"
    assert fused.kernel in ("cudnn_attention", "flash_attention")
    single = explain(*[x.float() for x in tensors], causal=True)
    assert single.kernel == "efficient_attention"
    assert "sdpa flash" in single.refused
    assert "FlashAttention" in explain(tensors[0][:, :, :64], *tensors[1:], causal=True).kernel


def test_mask_on_the_cpu_is_refused_with_the_cure():
    tensors = [torch.randn(B, H, 8, D, device=CUDA) for _ in range(3)]
    with pytest.raises(ValueError, match=r"mask\.to"):
        attend(*tensors, mask=padding([3, 5]))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("group", [1, 3])
def test_maps_and_statistics_match_the_reference(kind, group):
    T = 401
    mask = MASKS[kind](T, T)
    query = torch.randn(B, H, T, D, device=CUDA, dtype=torch.bfloat16)
    key, value = (torch.randn(B, H // group, T, D, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    _, weights = attend(query, key, value, mask=mask, return_weights=True)
    visible = None if mask is None else mask.to_tensor(T, T, device=CUDA)
    _, whole = reference.attend(query.double(), key.double(), value.double(), visible=visible)
    truth = whole if visible is None else whole * visible.any(-2)[..., None]  # without padded queries
    panel = weights.panel(entropy=True, peak=True, distance=True, received=True, pooled=(7, 5), topk=4)
    apart = (torch.arange(T, device=CUDA)[:, None] - torch.arange(T, device=CUDA)).abs()
    for found, exact in (
        (panel.entropy, torch.special.entr(truth).sum(-1)),
        (panel.peak.weight, truth.amax(-1)),
        (panel.distance, (truth * apart).sum(-1)),
        (panel.received.total, truth.sum(-2)),
        (panel.topk.weights, truth.topk(4).values),
    ):
        torch.testing.assert_close(found.double(), exact, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(weights[0, 1, 50:60].double(), whole[0, 1, 50:60], rtol=0.01, atol=1e-5)


@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("T", [2347, 4096])
def test_pictures_and_probes_of_any_size_match_the_reference(T, width):
    query = torch.randn(1, 4, T, width, device=CUDA, dtype=torch.bfloat16)
    key, value = (torch.randn(1, 2, T, width, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    ids = torch.randint(0, 50, (T,), device=CUDA)
    _, weights = attend(query, key, value, causal=True, return_weights=True)
    _, truth = reference.attend(
        query.double(), key.double(), value.double(), visible=causal().to_tensor(T, device=CUDA)
    )
    probes = {"sink": sink(4), "previous": previous_token(), "induction": induction(ids), "others": ~sink(1)}
    panel = weights.panel(entropy=True, histogram=True, masses=probes, pooled=(251, 67), pooled_peak=(5, 1000))
    for name, probe in probes.items():
        exact = (truth * probe.to_tensor(T, device=CUDA)).sum(-1)
        torch.testing.assert_close(panel.masses[name].double(), exact, rtol=3e-5, atol=3e-5)
        torch.testing.assert_close(weights.mass(probe).double(), exact, rtol=3e-5, atol=3e-5)
    assert (panel.histogram.double().sum(-1) - 1).abs().max() < 1e-4
    place = torch.arange(T, device=CUDA)
    for found, (R, C) in ((panel.pooled, (251, 67)), (weights.pooled(67, 251), (67, 251))):
        rows = torch.zeros(1, 4, R, T, device=CUDA, dtype=torch.float64).index_add(2, place * R // T, truth)
        cells = torch.zeros(1, 4, R, C, device=CUDA, dtype=torch.float64).index_add(3, place * C // T, rows)
        exact = cells / (place * R // T).bincount(minlength=R)[:, None]
        torch.testing.assert_close(found.double(), exact, rtol=3e-5, atol=3e-6)
    assert panel.pooled_peak.amax().double().item() == pytest.approx(truth.amax().item(), rel=1e-4)


def test_a_statistic_of_your_own_runs_on_cuda_with_and_without_a_kernel():
    triton = pytest.importorskip("triton")
    T = 1111
    query, key, value = (torch.randn(B, H, T, D, device=CUDA, dtype=torch.bfloat16) for _ in range(3))
    _, weights = attend(query, key, value, causal=True, return_weights=True)
    truth = weights.to_tensor().double()
    for by, axis in (("query", -1), ("key", -2)):
        for kernel in (None, triton.jit(squares)):
            found = weights.read(Statistic(squares, by=by, kernel=kernel))[0]
            torch.testing.assert_close(found.double(), truth.square().sum(axis), rtol=2e-2, atol=1e-4)


def squares(pair):
    return pair.weight * pair.weight


def test_counting_visible_keys_twice_launches_nothing_the_second_time():
    T = 2048
    mask = dense(torch.rand(1, 1, T, T, device=CUDA) > 0.5)
    source = Source.whole(*(torch.randn(1, 2, T, D, device=CUDA) for _ in range(2)), Scoring(mask))
    assert (source.keys_seen()[0, 0] == mask.to_tensor(T, device=CUDA)[0, 0].sum(-1)).all()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    source.keys_seen()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_log_sum_exp_is_taken_from_the_fused_kernel_and_maps_train():
    layer = MultiHeadAttention(384, 6, causal=True, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(2, 1024, 384, device=CUDA, dtype=torch.bfloat16)
    output, weights = layer(x, return_weights=True)
    assert weights._lse is not None
    (output.float().sum() + weights.entropy().sum()).backward()
    assert layer.qkv_proj.weight.grad.isfinite().all()
    kept = weights.detach().cpu()
    torch.testing.assert_close(kept[0, 0, :9].float(), weights[0, 0, :9].detach().cpu().float(), rtol=0.02, atol=1e-4)


def test_maps_of_float32_and_float64_and_bias_on_cuda():
    for dtype in (torch.float32, torch.float64):
        query, key, value = (torch.randn(1, 2, 300, 32, device=CUDA, dtype=dtype) for _ in range(3))
        for options in ({"causal": True}, {"attn_bias": torch.randn(300, 300, device=CUDA, dtype=dtype)}):
            _, weights = attend(query, key, value, return_weights=True, **options)
            visible = causal().to_tensor(300, device=CUDA) if "causal" in options else None
            exact = [t.double() for t in (query, key, value)]
            bias = options.get("attn_bias")
            _, truth = reference.attend(*exact, visible=visible, bias=None if bias is None else bias.double())
            torch.testing.assert_close(
                weights.entropy().double(), torch.special.entr(truth).sum(-1), rtol=1e-5, atol=1e-5
            )
            torch.testing.assert_close(weights.received().total.double(), truth.sum(-2), rtol=1e-5, atol=1e-5)


FLEX = {
    "window": lambda T: ({"mask": causal() & window(300)}, {}),
    "documents, soft-cap": lambda T: (
        {"mask": causal() & documents(torch.arange(T, device=CUDA) // 411), "softcap": 2.0},
        {"softcap": 2.0},
    ),
    "padding with an empty sample, sinks": lambda T: (
        {"mask": padding(torch.tensor([T - 99, 0], device=CUDA)), "sinks": torch.linspace(-2, 2, H, device=CUDA)},
        {"sinks": torch.linspace(-2, 2, H, device=CUDA)},
    ),
    "alibi": lambda T: ({"mask": causal(), "relative": slopes()}, {"bias": slopes_at(T)}),
}


def slopes():
    rule = alibi(H)
    return rule.with_table(rule.table.to(CUDA))


def slopes_at(T):
    place = torch.arange(T, device=CUDA)
    return -slopes().table.double()[:, None, None] * (place[:, None] - place).abs()


@pytest.mark.parametrize("kind", FLEX)
def test_flex_attention_gives_what_the_reference_gives(kind):
    T, Hkv, dtype = 1100, 3, torch.bfloat16
    ours, theirs = FLEX[kind](T)
    shapes = [(B, H, T, D), (B, Hkv, T, D), (B, Hkv, T, D)]
    tensors = [torch.randn(s, device=CUDA).to(dtype).requires_grad_() for s in shapes]
    assert explain(*tensors, **ours).path == "flex"
    output, weights = attend(*tensors, return_weights=True, **ours)
    output.backward(slope(output))
    found = {}
    for name, precision in (("truth", torch.float64), ("plain", dtype)):
        copies = [x.detach().to(precision).requires_grad_() for x in tensors]
        options = {k: x.to(precision) if isinstance(x, torch.Tensor) else x for k, x in theirs.items()}
        read, exact = reference.attend(*copies, visible=ours["mask"].to_tensor(T, device=CUDA), **options)
        read.backward(slope(read))
        found[name] = (read.detach(), [x.grad for x in copies], exact.detach())
    truth, plain = found["truth"], found["plain"]
    assert_close_to_truth(output.detach(), truth[0], plain[0], factor=3)
    for x, exact, rough in zip(tensors, truth[1], plain[1], strict=True):
        assert_close_to_truth(x.grad, exact, rough, factor=4)
    torch.testing.assert_close(weights[0, 1, 1000:1010].double(), truth[2][0, 1, 1000:1010], rtol=2e-2, atol=1e-4)


def test_a_static_cache_runs_in_a_cuda_graph():
    layer = MultiHeadAttention(
        256, 8, num_kv_heads=2, causal=True, position=rotary(), device=CUDA, dtype=torch.bfloat16
    )
    x = torch.randn(2, 20, 256, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        cache = layer.make_cache(2, capacity=64, static=True)
        layer(x[:, :10], cache=cache)
        step = torch.compile(lambda token: layer(token, cache=cache), mode="reduce-overhead", fullgraph=True)
        found = []
        for t in range(10, 20):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(step(x[:, t : t + 1].contiguous()).clone())
        torch.testing.assert_close(torch.cat(found, 1), layer(x)[:, 10:], rtol=2e-2, atol=2e-2)
        assert cache.lengths == [20, 20]


@pytest.mark.parametrize("kind", ["all", "causal", "some"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("cudnn", [True, False])
def test_pieces_of_a_ring_agree_with_the_reference(kind, dtype, cudnn):
    from headwise.parallel import blocks

    Hkv, T = 3, 257
    mask = {"all": None, "causal": causal(), "some": causal() & window(31)}[kind]
    query, key, value, grad = (torch.randn(B, h, T, D, device=CUDA, dtype=dtype) for h in (H, Hkv, Hkv, H))
    found = {}
    for name, precision in (("found", dtype), ("truth", torch.float64)):
        met = blocks.Met(*(x.to(precision) for x in (query, key, value)))
        call = Call(*met, Scoring(mask=mask), 0.0)
        engine = blocks.engine_for(call, T, T)
        engine.cudnn = cudnn
        on_kernels = name == "found" and dtype != torch.float32
        assert type(engine) is (blocks.CudaEngine if on_kernels else blocks.ProductEngine)
        piece = blocks.Piece(range(T), range(T), kind)
        output, lse = engine.forward(piece, met)
        into = blocks.Gradients(*(torch.zeros_like(x, dtype=lse.dtype) for x in met), [])
        part_of_more = torch.nn.functional.pad(lse, (0, 5))[:, :, :T]  # as a chunk of a rank's rows is
        known = blocks.Known(output, part_of_more, grad.to(precision))
        engine.backward(piece, met, known, into)
        found[name] = (output, lse, *into[:3])
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4}[dtype]
    for ours, truth in zip(found["found"], found["truth"], strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize(("dtype", "T", "size"), [(torch.bfloat16, 4096, 2048), (torch.float16, 5001, 2111)])
def test_a_long_window_runs_as_two_triangles_and_gives_what_the_reference_gives(dtype, T, size, layout):
    Hkv, D = 3, 128
    shapes = [(B, T, heads, D) for heads in (H, Hkv, Hkv)]
    made = [torch.randn(shape, device=CUDA).to(dtype).transpose(1, 2) for shape in shapes]
    tensors = [(x.contiguous() if layout == "heads first" else x).detach().requires_grad_() for x in made]
    mask = causal() & window(size - 1)
    assert explain(*tensors, mask=mask).path in ("flash", "triangles")
    output, weights = attend(*tensors, mask=mask, return_weights=True)
    output.backward(slope(output))
    found = {}
    for name, precision in (("truth", torch.float64), ("plain", dtype)):
        copies = [x.detach().to(precision).requires_grad_() for x in tensors]
        read, exact = reference.attend(*copies, visible=mask.to_tensor(T, device=CUDA))
        read.backward(slope(read))
        found[name] = (read.detach(), [x.grad for x in copies], exact.detach()[:, :, ::97])
        del read, exact
    truth, plain = found["truth"], found["plain"]
    assert_close_to_truth(output.detach(), truth[0], plain[0], factor=3)
    for x, exact, rough in zip(tensors, truth[1], plain[1], strict=True):
        assert_close_to_truth(x.grad, exact, rough, factor=3)
    torch.testing.assert_close(weights[:, :, ::97].double(), truth[2], rtol=1e-2, atol=1e-5)


def tilted(score, batch, head, query, key):
    return torch.where((query + key) % 7 == 0, -torch.inf, (score * 0.5 + 0.1 * head + (key % 3)).to(score.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_score_function_runs_on_flex_attention_and_its_maps_by_tiles(dtype):
    T = 1100
    q, k, v = (torch.randn(B, n, T, D, device=CUDA, dtype=dtype) for n in (H, 3, 3))
    assert explain(q, k, v, score=tilted, causal=True).path == "flex"
    output, weights = attend(q, k, v, score=tilted, causal=True, return_weights=True)
    visible = causal().to_tensor(T, device=CUDA)
    truth, dense_weights = reference.attend(q.double(), k.double(), v.double(), visible=visible, score=tilted)
    plain, _ = reference.attend(q, k, v, visible=visible, score=tilted)
    assert_close_to_truth(output, truth, plain)
    assert (weights[0, :2].double() - dense_weights[0, :2]).abs().max() < (1e-4 if dtype == torch.float32 else 1e-2)
    assert (weights.received().total.double() - dense_weights.sum(2)).abs().max() < 1e-2


def test_a_learned_score_function_has_its_gradient():
    T = 1100
    table = torch.randn(H, T, device=CUDA, requires_grad=True)
    q, k, v = (torch.randn(B, H, T, D, device=CUDA) for _ in range(3))

    def learned(score, batch, head, query, key):
        return score + table[head, (query - key).abs()]

    found = torch.autograd.grad(attend(q, k, v, score=learned).sum(), table)[0]
    wanted = torch.autograd.grad(reference.attend(q, k, v, score=learned)[0].sum(), table)[0]
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


def test_chosen_blocks_run_on_flex_attention():
    T = 1500
    chosen = torch.rand(1, H, 24, 24, device=CUDA).topk(5).indices
    mask = causal() & (blocks(chosen, 64, key_blocks=24) | window(63))
    q, k, v = (torch.randn(B, H, T, D, device=CUDA) for _ in range(3))
    assert explain(q, k, v, mask=mask).path == "flex"
    visible = mask.to_tensor(T, device=CUDA)
    truth, _ = reference.attend(q.double(), k.double(), v.double(), visible=visible)
    assert_close_to_truth(attend(q, k, v, mask=mask), truth, reference.attend(q, k, v, visible=visible)[0])


FLASH_CALLS = {
    "causal": lambda T: {"mask": causal()},
    "window": lambda T: {"mask": window(127)},
    "window ahead": lambda T: {"mask": window(60, 33)},
    "sinks": lambda T: {"mask": window(127), "sinks": torch.randn(20, device=CUDA, requires_grad=True)},
    "softcap": lambda T: {"mask": causal(), "softcap": 30.0},
    "documents": lambda T: {"mask": causal() & documents(lengths=[T // 3, 1, T - T // 3 - 1]).to(CUDA)},
    "padding": lambda T: {"mask": padding(torch.tensor([T, 0, T // 2], device=CUDA))},
}


@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("kind", FLASH_CALLS)
def test_flash_attention_4_matches_the_reference_forward_and_backward(kind, D):
    from headwise.attention.backends.dense import Whole
    from headwise.attention.backends.flash import FlashKernel, kernel, trial

    if not kernel.installed():
        pytest.skip("flash-attn-4 is not installed")
    T = 1031
    drawn = [torch.randn(3, T, n, D, device=CUDA, dtype=torch.bfloat16).transpose(1, 2) for n in (20, 5, 5)]
    scoring = Scoring(**FLASH_CALLS[kind](T))
    call = Call(*(x.requires_grad_() for x in drawn), scoring, 0.0)
    how = FlashKernel().meaning(call)
    if isinstance(how, str):
        pytest.fail(how)
    assert trial.failure(trial.Specialization.of(call, how, torch.bfloat16)) is None
    output, lse = FlashKernel().run_with_lse(call)
    inputs = [*drawn, *([] if scoring.sinks is None else [scoring.sinks])]
    found = torch.autograd.grad(output, inputs, slope(output))
    precise = [x.detach().double().requires_grad_() for x in inputs]
    options = FLASH_CALLS[kind](T) | ({"sinks": precise[3]} if len(precise) > 3 else {})
    truth = Whole().run(Call(*precise[:3], Scoring(**options), 0.0))
    expected = torch.autograd.grad(truth, precise, slope(truth))
    for one, other in zip((output, *found), (truth, *expected), strict=True):
        assert (one - other).abs().max() < 0.02 * other.abs().max()
    assert lse is None or lse.isfinite().all()
