"""Compare the layer with torch.nn.MultiheadAttention, a hand-wired fused module and the textbook class.

python benchmarks/layer.py                  CPU: three sizes, two dtypes, causal or not, inference and training
python benchmarks/layer.py --device cuda    one GPU: bfloat16 causal, eager and compiled
python benchmarks/layer.py --overhead       the overhead of a call with one token
python benchmarks/layer.py --latent         decoding with latent attention, against its absorbed form written by hand
"""

import time

import harness
import torch
from torch import Tensor, nn

import headwise
from headwise import reference
from headwise.cli.bench import measurement
from headwise.cli.bench.peers.torch_layers import HandWired, TorchLayer
from headwise.cli.bench.sweep import step
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
    x = torch.randn(B, T, E, device=device, dtype=measurement.DTYPES[dtype])
    modules = {n: m.to(device, x.dtype) for n, m in candidates(size, causal, slow and not compiled).items()}
    with torch.no_grad():
        check({n: m.eval() for n, m in modules.items()}, x, causal)
    results = []
    for train in (False, True):
        calls = {n: m.train(train) for n, m in modules.items()}
        if compiled:
            calls = {n: torch.compile(m) for n, m in calls.items()}
        with torch.set_grad_enabled(train):
            times = measurement.interleaved(
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
        times = {n: measurement.summary(v) for n, v in values.items()}
        ours = times["headwise"]["ms"]
        rows = [
            [n, f"{t['ms'] * 1e3:.1f}", f"±{t['spread'] / 2:.0%}", f"{ours / t['ms']:.2f}×"] for n, t in times.items()
        ]
        label = "call, training" if train else "call, inference"
        harness.table(f"B=1, T=1, d=64, H=4, {label}", rows, ["", "µs", "", "headwise relative to it"])
        results += [{"size": (1, 1, 64, 4), "mode": label, "name": n, **t} for n, t in times.items()]
    return results


class AbsorbedByHand(nn.Module):
    """One step of decoding with latent attention, as DeepSeek's own code writes it: two caches, five einsums."""

    def __init__(self, layer: nn.Module, batch: int, room: int) -> None:
        super().__init__()
        self.rule, self.parts, self.H = layer._projections, layer._modules, layer.num_heads
        like = layer.out_proj.weight
        self.latents = like.new_zeros(batch, room, self.rule.kv_rank)
        self.turned = like.new_zeros(batch, room, self.rule.rotary_dim)
        self.scale = self.rule.head_dim**-0.5
        pairs = torch.arange(0, self.rule.rotary_dim, 2, dtype=torch.float64, device=like.device)
        angles = torch.arange(room, device=like.device)[:, None] * 10000.0 ** -(pairs / self.rule.rotary_dim)
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        self.length = 0

    def turn(self, x: Tensor) -> Tensor:
        """(B, T, ..., rotary_dim) at the next positions, in neighboring pairs."""
        rows = slice(self.length, self.length + x.shape[1])
        shape = (x.shape[1], *([1] * (x.dim() - 3)), -1)
        cos, sin = self.cos[rows].view(shape), self.sin[rows].view(shape)
        a, b = x.float()[..., 0::2], x.float()[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The output (B, T, E) of new tokens, each of which sees all tokens so far and those before it."""
        rule, parts, T, stop = self.rule, self.parts, x.shape[1], self.length + x.shape[1]
        q = parts["q_b_proj"](parts["q_a_norm"](parts["q_a_proj"](x))).unflatten(-1, (self.H, -1))
        own, turned = q.split((rule.nope_dim, rule.rotary_dim), -1)
        low, shared = parts["kv_a_proj"](x).split((rule.kv_rank, rule.rotary_dim), -1)
        self.latents[:, self.length : stop] = parts["kv_a_norm"](low)
        self.turned[:, self.length : stop] = self.turn(shared)
        up = parts["kv_b_proj"].weight.unflatten(0, (self.H, -1))
        own = torch.einsum("bthn,hnc->bthc", own, up[:, : rule.nope_dim])
        scores = torch.einsum("bthc,bsc->bths", own, self.latents[:, :stop])
        scores = scores + torch.einsum("bthr,bsr->bths", self.turn(turned), self.turned[:, :stop])
        scores = scores * self.scale
        if T > 1:
            hidden = torch.ones(T, stop, dtype=torch.bool, device=x.device).triu(stop - T + 1)
            scores = scores.masked_fill(hidden[:, None], float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        read = torch.einsum("bths,bsc->bthc", weights, self.latents[:, :stop])
        read = torch.einsum("bthc,hvc->bthv", read, up[:, rule.nope_dim :])
        return parts["out_proj"](read.flatten(2))


LATENT = {  # (E, H, q_rank, kv_rank), batches, cache lengths, dtypes
    "cpu": ((1024, 16, 384, 512), (1, 4), (256, 1024, 4096), ("float32", "bfloat16")),
    "cuda": ((7168, 128, 1536, 512), (1, 16), (1024, 8192, 32768), ("bfloat16",)),
}


@torch.no_grad()
def latent(device: str, seconds: float) -> list:
    """One token at several lengths of the cache: our layer against the absorbed form written by hand."""
    (E, H, q_rank, kv_rank), batches, lengths, dtypes = LATENT[device]
    rule = headwise.latent(kv_rank, q_rank=q_rank, nope_dim=128, rotary_dim=64, value_dim=128)
    options = {"causal": True, "bias": False, "position": headwise.rotary(interleaved=True), "projections": rule}
    results = []
    for dtype in dtypes:
        where = {"device": device, "dtype": measurement.DTYPES[dtype]}
        layer = headwise.MultiHeadAttention(E, H, **options, **where).eval()
        for B, length in [(B, length) for B in batches for length in lengths]:
            hand, cache = AbsorbedByHand(layer, B, length + 1), layer.make_cache(B, capacity=length + 1)
            text, x = torch.randn(B, length, E, **where), torch.randn(B, 1, E, **where)
            for part in text.split(128, dim=1):
                layer(part, cache=cache)
                hand(part)
                hand.length += part.shape[1]

            def step(x: Tensor = x, cache: headwise.KVCache = cache, layer: nn.Module = layer) -> Tensor:
                y = layer(x, cache=cache)
                cache.rollback(1)  # so that every step is at the same length
                return y

            truth = layer.to(torch.float64)(torch.cat([text, x], 1).double())[:, -1:] if device == "cpu" else None
            layer.to(where["dtype"])
            if truth is not None:
                harness.agree("headwise", step(), truth, hand(x))
            else:
                torch.testing.assert_close(step(), hand(x), rtol=0.05, atol=0.02)
            calls = {"headwise": step, "by hand": lambda hand=hand, x=x: hand(x)}
            times = measurement.interleaved(calls, device, seconds=seconds)
            ours = times["headwise"]["ms"]
            rows = [
                [n, f"{t['ms']:.3f}", f"±{t['spread'] / 2:.0%}", f"{ours / t['ms']:.2f}×"] for n, t in times.items()
            ]
            title = f"one token, E={E}, H={H}, kv_rank={kv_rank}, {dtype}, B={B}, {length} tokens in the cache"
            harness.table(title, rows, ["", "ms", "", "headwise relative to it"])
            setting = {"size": (B, length, E, H), "dtype": dtype, "mode": "latent decoding"}
            results += [{**setting, "name": name, **entry} for name, entry in times.items()]
    return results


def main() -> None:
    """Measure, and print the results."""
    parser = harness.parser(__doc__)
    parser.add_argument("--overhead", action="store_true", help="measure only the overhead of a call")
    parser.add_argument("--latent", action="store_true", help="measure only decoding with latent attention")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    if options.latent:
        results += latent(options.device, options.seconds)
    elif options.device == "cpu":
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
