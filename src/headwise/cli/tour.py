"""`headwise tour`: the ten steps on real tensors, the fused layer against the reference, and its speed."""

import argparse
from typing import Any

import torch
from torch import Tensor

from headwise import reference, shapes
from headwise.cli.bench.measurement import interleaved
from headwise.cli.bench.peers import OURS, peer_named
from headwise.cli.bench.sweep import candidate
from headwise.cli.bench.workload import Problem, Workload
from headwise.cli.console import add_json, print_json, say
from headwise.errors import HeadwiseError
from headwise.layer import MultiHeadAttention
from headwise.learn.steps import Explained, explain_steps, layer_projections
from headwise.masks import Mask, causal, documents, padding, prefix, window

EXAMPLES = """examples:
  headwise tour
  headwise tour --heads 2 --width 8 --tokens 4 --no-speed
  headwise tour --json --no-speed
"""
PEERS = {"headwise": OURS, "nn.MultiheadAttention": "nn.MHA", "the textbook's class": "textbook class"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this verb."""
    parser.add_argument("--tokens", type=int, default=6, metavar="T", help="sequence length of the small example")
    parser.add_argument("--width", type=int, default=12, metavar="E", help="its model width")
    parser.add_argument("--heads", type=int, default=3, metavar="H", help="its attention heads")
    parser.add_argument("--no-speed", action="store_true", help="skip the timing, which takes a few seconds")
    add_json(parser, "text")


def run(options: argparse.Namespace) -> int:
    """Print the tour as text or as JSON."""
    shapes.check_size("--tokens", options.tokens)
    torch.manual_seed(0)
    layer = MultiHeadAttention(options.width, options.heads, causal=True)
    x, visible = torch.randn(1, options.tokens, options.width), causal().to_tensor(options.tokens)
    steps = explain_steps({"x": x}, layer_projections(layer), layer.num_heads, visible=visible)
    agreement = [agree(*setting) for setting in SETTINGS]
    speed = None if options.no_speed else measure()
    if options.json:
        print_json({"steps": [step.to_dict() for step in steps], "agreement": agreement, "speed": speed})
        return 0
    show_steps(steps, layer)
    show_agreement(agreement)
    show_masks()
    if speed is not None:
        show_speed(speed)
    return 0


def show_steps(steps: list[Explained], layer: MultiHeadAttention) -> None:
    """Print one line per step, then the weights of the first head."""
    _, T, E = steps[-1].after["output"].shape
    print(f"READ: ten steps, {T} tokens of width {E}, {layer.num_heads} heads of width {layer.head_dim}, causal\n")
    for step in steps:
        (names, shape), *_ = step.shapes()[1].items()
        print(f"  {step.number:>2}  {step.name:<16} {names} {shape}\n      {step.operation}")
    weights = next(step for step in steps if step.name == "softmax").after["weights"][0, 0]
    print(f"\n  weights of head 0: a row is a query and sums to 1{', first ten' if T > 10 else ''}")
    for row in weights[:10, :10].tolist():
        print("    " + " ".join("  ·  " if w == 0 else f"{w:.3f}" for w in row))


SETTINGS: list[tuple[str, torch.dtype, Mask | None, int, int | None]] = [
    ("no mask", torch.float32, None, 67, None),
    ("causal", torch.float32, causal(), 384, None),
    ("causal, 2 key/value heads", torch.float32, causal(), 67, 2),
    ("window(16)", torch.float32, window(16), 384, None),
    ("padding, one sample empty", torch.float32, padding([0, 50]), 67, None),
    ("causal", torch.bfloat16, causal(), 128, None),
]


def agree(name: str, dtype: torch.dtype, mask: Mask | None, T: int, kv_heads: int | None) -> dict[str, Any]:
    """Largest error of the fused layer and of plain PyTorch against the float64 reference."""
    layer = MultiHeadAttention(96, 6, num_kv_heads=kv_heads, dtype=dtype)
    x = torch.randn(2, T, 96, dtype=dtype)
    visible = None if mask is None else mask.to_tensor(T)

    def by_reference(precision: torch.dtype) -> Tensor:
        y = x.to(precision)
        linears = layer_projections(layer, precision)
        return reference.multi_head_attention(y, y, y, linears, 6, kv_heads, visible=visible)[0].double()

    with torch.no_grad():
        truth, plain, fused = by_reference(torch.float64), by_reference(dtype), layer(x, mask=mask).double()
    errors = {"headwise": (fused - truth).abs().max().item(), "plain": (plain - truth).abs().max().item()}
    return {"setting": name, "dtype": str(dtype).removeprefix("torch."), "tokens": T, "error": errors}


def show_agreement(rows: list[dict[str, Any]]) -> None:
    """Print one line per setting."""
    print("\nRUN: the fused layer against the float64 reference, largest error of the output\n")
    print(f"  {'':<27} {'dtype':<9} {'T':>4}  {'headwise':>9} {'plain PyTorch':>14}")
    for row in rows:
        ours, plain = row["error"]["headwise"], row["error"]["plain"]
        print(f"  {row['setting']:<27} {row['dtype']:<9} {row['tokens']:>4}  {ours:9.1e} {plain:14.1e}")


def show_masks() -> None:
    """Print four masks side by side."""
    drawn = [causal(), window(2), causal() | prefix(3), causal() & documents(lengths=[3, 5])]
    names = ["causal()", "window(2)", "causal() | prefix(3)", "causal() & documents(...)"]
    print("\nMASKS: a query per row, a key per column, ■ may attend\n")
    widths = [max(len(name), 8) for name in names]
    for line in [names, *zip(*(str(mask).splitlines() for mask in drawn), strict=True)]:
        print("  " + "  ".join(part.ljust(width) for part, width in zip(line, widths, strict=True)).rstrip())


def measure(size: tuple[int, int, int, int] = (4, 512, 768, 12), rounds: int = 9) -> dict[str, Any]:
    """Median milliseconds of one causal inference pass; candidates take turns, with the same weights."""
    B, T, E, H = size
    say(f"timing {rounds} rounds ...")
    problem = Problem(Workload(E, H, batch=B))
    trials = {name: candidate(peer_named(peer), problem).trial(T) for name, peer in PEERS.items()}
    for name, trial in trials.items():
        wrong = trial.judge().wrong
        if wrong is not None:
            raise HeadwiseError(f"{name}: {wrong}.")
    times = interleaved({name: trial.run for name, trial in trials.items()}, rounds=rounds, least=rounds, warm=1)
    return {"size": list(size), "ms": {name: times[name]["ms"] for name in times}}


def show_speed(speed: dict[str, Any]) -> None:
    """Print one bar per candidate."""
    B, T, E, H = speed["size"]
    threads = torch.get_num_threads()
    device = f"{threads} CPU thread{'' if threads == 1 else 's'}, torch {torch.__version__}"
    print(f"\nSPEED: one causal pass, float32, batch {B}, {T} tokens, width {E}, {H} heads\n       {device}\n")
    longest = max(speed["ms"].values())
    for name, ms in speed["ms"].items():
        bar = "█" * max(1, round(20 * ms / longest))
        ratio = f"headwise takes {speed['ms']['headwise'] / ms:.2f}×"
        print(f"  {name:<22} {ms:7.1f} ms  {'' if name == 'headwise' else ratio:<20}  {bar}")
