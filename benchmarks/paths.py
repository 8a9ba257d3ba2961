"""Measure every backend that can run a call, over a grid of calls, and mark the one that headwise chooses.

    python benchmarks/paths.py                  a small grid on the CPU, float32
    python benchmarks/paths.py --device cuda    masks × lengths × widths × batches × grouped heads on a GPU, bfloat16
    python benchmarks/paths.py --training       forward and backward pass

A row in which the chosen backend is more than 5 % slower than another one is marked with an exclamation mark; no row
should be. Every result is compared with the float64 reference, for sampled queries of one head, before it is timed.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from harness import finish, parser, table
from options import check, heads
from torch import Tensor

from headwise import Scoring, causal, documents, padding, window
from headwise.attention.backends import BACKENDS, FLASH, Backend, Call, choose
from headwise.attention.backends.flash import kernel
from headwise.attention.backends.flash.lowering import lower
from headwise.cli.bench.measurement import interleaved
from headwise.masks import Mask

SLOWER = 1.05
TOO_SLOW = {"rows", "reference"}  # they run everything, and are meant for what nothing else runs


def masks(T: int, B: int, device: str) -> dict[str, Mask | None]:
    """The kinds of masks; documents of different lengths, 512 to 1,536 tokens where there is room."""
    lengths = [T // 5, T // 3, T - T // 5 - T // 3]
    keep = torch.tensor([T - b * T // (2 * B) for b in range(B)], device=device)
    return {
        "none": None,
        "causal": causal(),
        "window 128": causal() & window(127),
        "window 1024": causal() & window(1023),
        "documents": causal() & documents(lengths=lengths).to(device),
        "padding": padding(keep),
    }


def grid(device: str) -> Iterator[tuple[str, Call]]:
    """The calls to measure."""
    sizes: dict[str, tuple[tuple[int, ...], ...]] = {
        "cpu": ((128, 1031), (64, 96), (1,), (8,)),
        "cuda": ((128, 1000, 2048, 5000, 16384, 65536), (64, 96, 128, 256), (1, 3), (16, 4)),
    }
    for T, D, B, kv_heads in itertools.product(*sizes[device]):
        if B * T > 2**16:
            continue
        tensors = heads(B, 16, T, D, kv_heads=kv_heads, device=device)
        for name, mask in masks(T, B, device).items():
            yield f"{name} {(B, 16, kv_heads, T, D)}", Call(*tensors, Scoring(mask), 0.0)
        if device == "cuda":
            sinks = torch.zeros(16, device=device)
            yield f"window 128, sinks {(B, 16, kv_heads, T, D)}", Call(*tensors, Scoring(window(127), sinks=sinks), 0.0)
            yield f"soft-cap {(B, 16, kv_heads, T, D)}", Call(*tensors, Scoring(causal(), softcap=50.0), 0.0)


def runnable(call: Call) -> list[Backend]:
    """The backends that accept a call, except those for what nothing else runs."""
    chosen = choose(call)
    able = [one for one in BACKENDS if one.name not in TOO_SLOW and one.refuses(call) is None]
    if call.query.is_cuda and FLASH not in able and kernel.installed() and not isinstance(lower(call), str):
        able.append(FLASH)  # it refuses small calls, and here is where that is judged
    return able if any(one.name == chosen.name for one in able) else [chosen, *able]


def training(backend: Backend, call: Call) -> Callable[[], object]:
    """Forward and backward pass."""
    tensors = [x.detach().requires_grad_() for x in call[:3]]
    slope = torch.ones_like(backend.run(call._replace(query=tensors[0], key=tensors[1], value=tensors[2])))

    def run() -> tuple[Tensor, ...]:
        output = backend.run(call._replace(query=tensors[0], key=tensors[1], value=tensors[2]))
        return torch.autograd.grad(output, tensors, slope)

    return run


def main() -> None:
    """Check, measure and print."""
    arguments = parser(__doc__)
    arguments.add_argument("--training", action="store_true", help="forward and backward pass")
    options = arguments.parse_args()
    rows, lines = [], []
    for title, call in grid(options.device):
        chosen = choose(call).name
        runs = {}
        for backend in runnable(call):
            check(f"{title} by {backend.name}", backend.run(call), list(call[:3]), call.scoring)
            plain = lambda backend=backend, call=call: backend.run(call)  # noqa: E731
            runs[backend.name] = training(backend, call) if options.training else plain
        with torch.set_grad_enabled(options.training):
            times = interleaved(runs, options.device, rounds=12, seconds=options.seconds)
        best = min(times, key=lambda name: times[name]["ms"])
        ratio = times[chosen]["ms"] / times[best]["ms"]
        lines.append(
            [title, chosen, f"{times[chosen]['ms']:.3f}", best, f"{ratio:.2f}×{'!' if ratio > SLOWER else ' '}"]
        )
        rows.append({"title": title, "chosen": chosen, "times": times})
    table(
        "chosen and fastest backend", lines, ["call (B, H, Hkv, T, D)", "chosen", "ms", "fastest", "chosen / fastest"]
    )
    finish("paths", options.device, rows)


if __name__ == "__main__":
    main()
