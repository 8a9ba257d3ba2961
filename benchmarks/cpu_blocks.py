"""Measure where query blocks are faster on the CPU. The `blocks` backend chooses by a table of these measurements.

    python benchmarks/cpu_blocks.py             every length, dtype and mask, inference and training
    python benchmarks/cpu_blocks.py --short     three lengths
    python benchmarks/cpu_blocks.py --masks     masks that torch accepts only as a bias
    python benchmarks/cpu_blocks.py --selected  1/8 of the blocks of keys, chosen at random, by blocks(...)
    python benchmarks/cpu_blocks.py --heads     one sample with few heads, where starting blocks may cost too much

Each row compares one call of torch's fused kernel with blocks of several heights, computed by the fused kernel or by
matrix products. Queries, keys and values have the memory layout of the layer. Less than 1 means that blocks are faster.
"""

import argparse
import itertools
from collections.abc import Iterator

import harness
import torch

from headwise import Mask, blocks, causal, documents, padding, prefix, reference, window
from headwise.attention.backends import SELECTED, Call
from headwise.attention.backends.blocks import Rule, in_blocks
from headwise.attention.backends.sdpa import Sdpa
from headwise.cli.bench import measurement
from headwise.masks.selection import selection_in
from headwise.weights import Scoring

SIZES = [(4, 12, 64, 64), (4, 12, 128, 64), (4, 12, 256, 64), (4, 12, 384, 64), (4, 12, 512, 64), (2, 12, 768, 64)]
SIZES += [(1, 16, 1024, 64), (1, 16, 2048, 64)]
HEIGHTS = (64, 128, 256, 4096)


def layer_layout(B: int, H: int, T: int, D: int, dtype: torch.dtype, train: bool) -> torch.Tensor:
    """The output of a fused projection, (B, T, H, 3·D)."""
    return torch.randn(B, T, H, 3 * D, dtype=dtype).requires_grad_(train)


def run(qkv: torch.Tensor, way: str, rule: Rule | None, scoring: Scoring, gradient: torch.Tensor) -> torch.Tensor:
    """The output of one candidate, after its backward pass if gradients are needed."""
    D = qkv.shape[-1] // 3
    q, k, v = (x.transpose(1, 2) for x in qkv.split((D, D, D), dim=-1))
    if way == "fused, contiguous":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    call = Call(q, k, v, scoring, 0.0)
    whole = SELECTED if way == "selected" else Sdpa()
    output = whole.run(call) if rule is None else in_blocks(call, rule)
    if qkv.requires_grad:
        qkv.grad = None
        output.transpose(1, 2).backward(gradient)
    return output


def measure(
    size: tuple[int, int, int, int], dtype: str, mask: Mask | None, train: bool, seconds: float
) -> dict[str, float]:
    """The milliseconds of all candidates for one setting."""
    B, H, T, D = size
    qkv = layer_layout(*size, measurement.DTYPES[dtype], train)
    gradient = torch.randn(B, T, H, D, dtype=qkv.dtype)
    scoring = Scoring(mask)
    ways: dict[str, Rule | None] = {"fused": None, "fused, contiguous": None}
    if selection_in(mask) is not None:
        ways = {"fused": None, "selected": None}
    for engine in ("fused", "products") if "selected" not in ways else ():
        for rows in HEIGHTS:
            if rows < T or (rows == max(HEIGHTS) and engine == "products"):
                ways[f"{engine} {rows if rows < T else 'whole'}"] = Rule(engine, 1, 2**62, rows)
    q, k, v = (x.transpose(1, 2).detach() for x in qkv.split((D, D, D), dim=-1))
    visible = None if mask is None else mask.to_tensor(T)[:1]
    truth = reference.attend(q[:1].double(), k[:1].double(), v[:1].double(), visible=visible)[0]
    plain = reference.attend(q[:1], k[:1], v[:1], visible=visible)[0]
    with torch.set_grad_enabled(train):
        for way, rule in ways.items():
            harness.agree(way, run(qkv, way, rule, scoring, gradient)[:1], truth, plain)
        runs = {w: lambda w=w, r=r: run(qkv, w, r, scoring, gradient) for w, r in ways.items()}
        times = measurement.interleaved(runs, seconds=seconds)
    return {w: t["ms"] for w, t in times.items()}


def masks_for(B: int, T: int) -> dict[str, Mask]:
    """Masks that torch accepts only as a bias."""
    return {
        "window(128)": causal() & window(128),
        "window(T/4)": causal() & window(T // 4),
        "padding": causal() & padding([T - T // (i + 5) for i in range(B)]),
        "documents": causal() & documents(torch.arange(T) // 256),
        "prefix": causal() | prefix(T // 10),
    }


def show(title: str, measured: dict[str, dict[str, float]]) -> None:
    """Print a table with one line per setting and each candidate's time relative to torch's kernel."""
    ways = list(dict.fromkeys(way for times in measured.values() for way in times if way != "fused"))
    rows = [
        [label, f"{times['fused']:.2f}", *(f"{times[w] / times['fused']:.2f}" if w in times else "" for w in ways)]
        for label, times in measured.items()
    ]
    harness.table(title, rows, ["", "fused ms", *ways])


def settings(options: argparse.Namespace) -> Iterator[tuple[str, str, tuple[int, int, int, int], Mask | None]]:
    """The title, label, size and mask of every setting to measure."""
    if options.masks:
        for size in [(4, 12, 512, 64), (1, 12, 2048, 64)]:
            for name, mask in masks_for(size[0], size[2]).items():
                yield f"T = {size[2]}", name, size, mask
        return
    if options.selected:
        for T in (2048, 4096):
            n = T // 64
            for name, heads in (("one choice", 1), ("a choice by head", 8)):
                behind = torch.rand(1, heads, n, n) + torch.eye(n)  # own blocks first, then random earlier ones
                chosen = behind.masked_fill(~causal().to_tensor(n), -1.0).topk(n // 8).indices
                yield f"{name}, 1/8 of the blocks", f"T = {T}", (1, 8, T, 64), causal() & blocks(chosen, 64)
        return
    if options.heads:
        for name, mask in (("no mask", None), ("causal", causal()), ("window(31)", causal() & window(31))):
            for T, H in itertools.product((128, 256, 512), (1, 4, 12)):
                yield name, f"T = {T}, {H} heads", (1, H, T, 64), mask
        return
    for name, mask in (("no mask", None), ("causal", causal())):
        for size in SIZES:
            if not options.short or size[2] in (128, 512, 2048):
                yield name, f"T = {size[2]}", size, mask


def main() -> None:
    """Print one table per dtype, mask and mode."""
    parser = harness.parser(__doc__)
    parser.add_argument("--short", action="store_true", help="only T = 128, 512 and 2048")
    parser.add_argument("--masks", action="store_true", help="masks that torch accepts only as a bias")
    parser.add_argument("--selected", action="store_true", help="1/8 of the blocks of keys, by blocks(...)")
    parser.add_argument("--heads", action="store_true", help="one sample with few heads")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = []
    dtypes = ("float32",) if options.selected else ("float32", "bfloat16")
    for dtype, train in itertools.product(dtypes, (False, True)):
        tables: dict[str, dict[str, dict[str, float]]] = {}
        for title, label, size, mask in settings(options):
            times = measure(size, dtype, mask, train, options.seconds)
            full = f"{dtype}, {'forward+backward' if train else 'forward'}, {title}"
            tables.setdefault(full, {})[label] = times
            results.append({"setting": full, "at": label, **times})
        for title, measured in tables.items():
            show(title, measured)
    harness.finish("cpu_blocks", "cpu", results)


if __name__ == "__main__":
    main()
