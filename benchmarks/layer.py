"""Compare the layer with torch.nn.MultiheadAttention, a hand-wired fused module and the textbook class.

python benchmarks/layer.py                  CPU: three sizes, two dtypes, causal or not, inference and training
python benchmarks/layer.py --device cuda    one GPU: bfloat16 causal, eager and compiled
python benchmarks/layer.py --overhead       the overhead of a call with one token
"""

import time

import harness
import torch
from torch import Tensor, nn

import headwise
from headwise import reference
from headwise.cli.bench import measuring
from headwise.cli.bench.layers import step
from headwise.cli.bench.peers.by_hand import HandWired
from headwise.cli.bench.peers.torch_layer import TorchLayer
from headwise.textbook import HeadsAtOnce

CPU_SIZES = [(4, 128, 768, 12), (4, 512, 768, 12), (1, 2048, 1024, 16)]
GPU_SIZES = [(8, 1024, 768, 12), (4, 4096, 2048, 16), (1, 16384, 4096, 32)]


def candidates(size: tuple[int, int, int, int], causal: bool, with_slow: bool) -> dict[str, nn.Module]:
    """All candidates, with the same weights."""
    _, T, E, H = size
    ours = headwise.MultiHeadAttention(E, H, causal=causal)
    (wq, wk, wv), (bq, bk, bv) = ours.projections()
    hand, torch_mha = HandWired(E, H, causal), TorchLayer(E, H, tokens=T, causal=causal, weights=False)
    for linear in (hand.qkv.weight, torch_mha.mha.in_proj_weight):
        linear.data.copy_(torch.cat([wq, wk, wv]))
    for bias in (hand.qkv.bias, torch_mha.mha.in_proj_bias):
        bias.data.copy_(torch.cat([bq, bk, bv]))
    for out in (hand.out, torch_mha.mha.out_proj):
        out.load_state_dict(ours.out_proj.state_dict())
    result: dict[str, nn.Module] = {"headwise": ours, "hand-wired": hand, "nn.MultiheadAttention": torch_mha}
    if with_slow:
        with_weights = TorchLayer(E, H, tokens=T, causal=causal, weights=True)
        with_weights.load_state_dict(torch_mha.state_dict())
        result["nn.MHA with weights"] = with_weights
        if causal:  # the textbook class is always causal
            textbook = HeadsAtOnce(E, E, T, 0.0, H, qkv_bias=True)
            for name, w, b in (("W_query", wq, bq), ("W_key", wk, bk), ("W_value", wv, bv)):
                getattr(textbook, name).load_state_dict({"weight": w, "bias": b})
            textbook.out_proj.load_state_dict(ours.out_proj.state_dict())
            result["textbook class"] = textbook
    return result


def check(modules: dict[str, nn.Module], x: Tensor, causal: bool) -> None:
    """Compare every candidate with the float64 reference, on at most 256 tokens of one sample."""
    x = x[:1, :256]
    ours = modules["headwise"]
    weights, biases = ours.projections()
    last = (ours.out_proj.weight, ours.out_proj.bias)
    pairs = [*zip(weights, biases, strict=True), last]
    visible = headwise.causal().to_tensor(x.shape[1], device=x.device) if causal else None
    outputs = []
    for dtype in (torch.float64, x.dtype):
        linears = tuple(reference.Linear(w.to(dtype), b.to(dtype)) for w, b in pairs)
        y = x.to(dtype)
        outputs.append(reference.multi_head_attention(y, y, y, linears, ours.num_heads, visible=visible)[0])
    for name, module in modules.items():
        harness.agree(name, module(x), *outputs)


def compare(
    size: tuple[int, int, int, int], dtype: str, device: str, causal: bool, compiled: bool, seconds: float
) -> list:
    """The result rows for one size, dtype and mask."""
    B, T, E, _ = size
    slow = device == "cpu" or T < 16384
    x = torch.randn(B, T, E, device=device, dtype=measuring.DTYPES[dtype])
    modules = {n: m.to(device, x.dtype) for n, m in candidates(size, causal, slow and not compiled).items()}
    with torch.no_grad():
        check({n: m.eval() for n, m in modules.items()}, x, causal)
    results = []
    for train in (False, True):
        calls = {n: m.train(train) for n, m in modules.items()}
        if compiled:
            calls = {n: torch.compile(m) for n, m in calls.items()}
        with torch.set_grad_enabled(train):
            times = measuring.interleaved(
                {n: step(m, x, backward=train) for n, m in calls.items()}, device, seconds=seconds
            )
        label = f"{'forward+backward' if train else 'forward'}{', compiled' if compiled else ''}"
        setting = {"size": size, "dtype": dtype, "causal": causal, "mode": label}
        results += [{**setting, "name": name, **entry} for name, entry in times.items()]
        ours = times["headwise"]["ms"]
        rows = [[n, f"{t['ms']:.3f}", f"±{t['spread'] / 2:.0%}", f"{ours / t['ms']:.2f}×"] for n, t in times.items()]
        title = f"(B,T,d,H) = {size}, {dtype}, {'causal' if causal else 'no mask'}, {label}"
        harness.table(title, rows, ["", "ms", "", "headwise relative to it"])
    return results


def overhead(rounds: int = 200, calls: int = 100) -> list:
    """The time of a call with one token, which is almost entirely overhead."""
    x = torch.randn(1, 1, 64)
    results = []
    for train in (False, True):
        modules = {n: m.train(train) for n, m in candidates((1, 1, 64, 4), False, False).items()}
        mha = modules["nn.MultiheadAttention"].mha  # call it directly, because our wrapper adds 2 µs
        modules["nn.MultiheadAttention"] = lambda x, mha=mha: mha(x, x, x, need_weights=False)

        def many(module: nn.Module) -> float:
            start = time.perf_counter()
            for _ in range(calls):
                module(x)
            return (time.perf_counter() - start) / calls * 1e3

        with torch.set_grad_enabled(train):
            values = {n: [many(m) for _ in range(3)] and [] for n, m in modules.items()}
            for _ in range(rounds):
                for name, module in modules.items():
                    values[name].append(many(module))
        times = {n: measuring.summary(v) for n, v in values.items()}
        ours = times["headwise"]["ms"]
        rows = [
            [n, f"{t['ms'] * 1e3:.1f}", f"±{t['spread'] / 2:.0%}", f"{ours / t['ms']:.2f}×"] for n, t in times.items()
        ]
        label = "call, training" if train else "call, inference"
        harness.table(f"B=1, T=1, d=64, H=4, {label}", rows, ["", "µs", "", "headwise relative to it"])
        results += [{"size": (1, 1, 64, 4), "mode": label, "name": n, **t} for n, t in times.items()]
    return results


def main() -> None:
    """Measure, and print the results."""
    parser = harness.parser(__doc__)
    parser.add_argument("--overhead", action="store_true", help="measure only the overhead of a call")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    if options.device == "cpu":
        results += overhead()
        if not options.overhead:
            for size in CPU_SIZES:
                for dtype in ("float32", "bfloat16"):
                    for causal in (False, True):
                        results += compare(size, dtype, "cpu", causal, False, options.seconds)
    else:
        for size in GPU_SIZES:
            for compiled in (False, True):
                results += compare(size, "bfloat16", "cuda", True, compiled, options.seconds)
    harness.finish("layer", options.device, results)


if __name__ == "__main__":
    main()
