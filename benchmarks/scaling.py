"""Estimate a training step on 8, 64 and 512 GPUs with 128k and 1M tokens: bytes sent, memory and time.

    python benchmarks/scaling.py     # rewrites the tables of docs/scaling.md

The compute speeds were measured on an H200 (`benchmarks/results/`). Network speeds cannot be measured on one GPU; they
are the assumptions in `Links`. Every figure follows from these by a formula and, for the ring, by simulation.
"""

import dataclasses
import functools
import itertools
import json
import math
from pathlib import Path

from headwise.learn import CONFIGS

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling tables -->", "<!-- end of scaling tables -->"
MEMORY_BEGIN, MEMORY_END = "<!-- memory table -->", "<!-- end of memory table -->"
MODEL = CONFIGS["llama-3.1-8b"]
HALF, SINGLE = 2, 4  # bytes of a bfloat16 and of a float32
STATE = 16  # bytes per weight in training: weight and gradient in bfloat16; master copy and two moments in float32


@dataclasses.dataclass(frozen=True)
class Links:
    """Assumptions about a cluster: bytes per second that a GPU sends in one direction, and latency in seconds."""

    node: int = 8  # GPUs
    inside: float = 450e9  # fourth-generation NVLink
    between: float = 50e9  # one 400 Gbit/s adapter per GPU
    latency: float = 10e-6
    memory: float = 141e9  # bytes of an H200


LINKS = Links()


@dataclasses.dataclass(frozen=True)
class Plan:
    """T tokens, with the sequence split over `cp` ranks and the heads over `tp` ranks."""

    T: int
    cp: int
    tp: int = 1

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.cp * self.tp

    @property
    def t(self) -> int:
        """Tokens per rank."""
        return self.T // self.cp

    @property
    def ring(self) -> float:
        """Bytes per second of the slowest link of the ring."""
        return LINKS.inside if self.gpus <= LINKS.node else LINKS.between

    @property
    def name(self) -> str:
        """The layout in words."""
        heads = f"heads over {self.tp}" if self.tp > 1 else ""
        sequence = f"sequence over {self.cp}" if self.cp > 1 else ""
        return ", ".join(part for part in (heads, sequence) if part)


@functools.cache
def measured() -> dict[str, list[tuple[float, float]]]:
    """Pairs of tokens per rank and seconds of one ring step, for 32 heads of width 128 and 8 key/value heads."""
    rows = json.loads((RESULTS / "parallel-h200.json").read_text())["rows"]
    return {way: [(row["t"], row[way] / 1e3) for row in rows] for way in ("forward", "backward")}


@functools.cache
def product_rate() -> float:
    """Operations per second of projections: 8·T·E² operations take the time of a layer minus that of its attention."""
    layers = json.loads((RESULTS / "layer-h200.json").read_text())["rows"]
    wanted = {"size": [1, 16384, 4096, 32], "mode": "forward", "name": "headwise"}
    layer = next(row["ms"] for row in layers if all(row.get(k) == v for k, v in wanted.items()))
    options = json.loads((RESULTS / "options-h200.json").read_text())["rows"]
    core = next(row["times"] for row in options if row.get("title", "").startswith("documents of 1024 (1, 32, 16384"))
    return 8 * 16384 * 4096**2 / ((layer - core["SDPA, full causal"]["ms"]) / 1e3)


def step_seconds(way: str, t: float, tp: int) -> float:
    """The time of one ring step, which is half of t×t scores: a power law between measured lengths, t² beyond them.

    A share of the heads takes the same share of the time, but no step takes less than the shortest measured one, which
    is dominated by launches.
    """
    points = measured()[way]
    (a, x), (b, y) = next((pair for pair in itertools.pairwise(points) if t <= pair[1][0]), points[-2:])
    slope = 2.0 if t > b else math.log(y / x) / math.log(b / a)
    start, time = (b, y) if t > b else (a, x)
    return max(time * (t / start) ** slope / tp, points[0][1])


def best_rate(way: str) -> float:
    """Operations per second of the fastest measured ring step."""
    operations = {"forward": 2, "backward": 5}[way] * MODEL.num_heads * MODEL.head_dim
    return max(operations * t**2 / time for t, time in measured()[way])


def hop_bytes(way: str, plan: Plan) -> float:
    """Bytes that a rank sends in one hop: key and value; in the backward pass also their gradients, in float32."""
    numbers = 2 * plan.t * MODEL.num_kv_heads / plan.tp * MODEL.head_dim
    return numbers * (HALF if way == "forward" else HALF + SINGLE)


def shares(cp: int, rank: int, step: int, balanced: bool) -> float:
    """The work of a rank at one step of the causal ring, in units of half a t×t block."""
    owner = (rank - step) % cp
    if not balanced:  # one chunk per rank, in order
        return 2.0 * (owner < rank) + 1.0 * (owner == rank)
    ours, theirs = ((r, 2 * cp - 1 - r) for r in (rank, owner))
    return sum((q > k) + 0.5 * (q == k) for q in ours for k in theirs) / 2


def ring_seconds(way: str, plan: Plan, balanced: bool = True) -> float:
    """The attention of one layer around the ring: ranks send while they compute, and wait for a block if necessary."""
    work, cp = step_seconds(way, plan.t, plan.tp), plan.cp
    hop = hop_bytes(way, plan) / plan.ring + LINKS.latency
    done, here = [0.0] * cp, [0.0] * cp
    for step in range(cp):
        start = [max(a, b) for a, b in zip(done, here, strict=True)]
        done = [start[r] + work * shares(cp, r, step, balanced) for r in range(cp)]
        here = [max(start[r], start[r - 1]) + hop for r in range(cp)]  # both must have reached the hop
    return max(done)


def layer_weights() -> float:
    """The number of weights of one block: projections and the three feed-forward matrices."""
    E, H, Hkv, D = MODEL.d_model, MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim
    return E * (2 * H + 2 * Hkv) * D + 3 * E * MODEL.feed_forward


@dataclasses.dataclass(frozen=True)
class Step:
    """One training step: seconds, seconds at full speed, bytes sent per layer, and bytes held."""

    seconds: float
    ideal: float
    ring_bytes: float
    reduce_bytes: float
    memory: float


def step_of(plan: Plan) -> Step:
    """The step of a plan that recomputes blocks, shards weights over all ranks (FSDP), and gathers them per block."""
    E, L, tp = MODEL.d_model, MODEL.layers, plan.tp
    products = 2 * layer_weights() * plan.t / tp / product_rate()
    ring = {way: ring_seconds(way, plan) for way in ("forward", "backward")}
    reduce = 2 * (tp - 1) / tp * plan.t * E * HALF  # bytes of one all-reduce; a block needs two per pass
    reducing = reduce / LINKS.inside + (LINKS.latency if tp > 1 else 0)
    weights = layer_weights() / tp * HALF
    gathering = weights / plan.ring if plan.cp > 1 else 0.0
    forward = max(products + ring["forward"] + 2 * reducing, gathering)
    backward = max(forward + 2 * products + ring["backward"] + 2 * reducing, 2 * gathering)
    head = 6 * MODEL.vocabulary * E * plan.t / tp / product_rate()
    scores = plan.T * plan.t * MODEL.num_heads / tp * MODEL.head_dim
    attention = 2 * 2 * scores / best_rate("forward") + 5 * scores / best_rate("backward")
    return Step(
        seconds=L * (forward + backward) + head,
        ideal=L * (4 * products + attention) + head,
        ring_bytes=(plan.cp - 1) * (2 * hop_bytes("forward", plan) + hop_bytes("backward", plan)),
        reduce_bytes=6 * reduce,
        memory=memory_of(plan),
    )


def memory_of(plan: Plan) -> float:
    """Bytes per GPU: state, weights of two blocks, inputs of all blocks, activations of one block, data in transit."""
    E, H, Hkv, D, tp, t = MODEL.d_model, MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim, plan.tp, plan.t
    state = STATE * MODEL.parameters / plan.gpus
    gathered = 2 * layer_weights() / tp * HALF
    inputs = MODEL.layers * t * E * HALF
    block = 2 * t * HALF * (3 * E + ((2 * H + 2 * Hkv) * D + 3 * MODEL.feed_forward) / tp)  # and its gradients
    travelling = 3 * t * Hkv / tp * D * (HALF + SINGLE) + 2 * t * H / tp * D * SINGLE if plan.cp > 1 else 0
    return state + gathered + inputs + block + travelling


def plans(T: int) -> list[Plan]:
    """The layouts to compare for T tokens."""
    found = []
    for gpus in (8, 64, 512):
        found += [Plan(T, gpus), Plan(T, gpus // 8, 8)]
    return found


def big_table() -> list[str]:
    """A table of all plans at both lengths."""
    head = ["tokens", "GPUs", "layout", "tokens per rank", "ring, per layer", "all-reduce, per layer", "memory", "step"]
    lines = ["| " + " | ".join([*head, "of full speed"]) + " |", "|---" * (len(head) + 1) + "|"]
    for T in (2**17, 2**20):
        for plan in plans(T):
            step = step_of(plan)
            full = " (does not fit)" if step.memory > LINKS.memory else ""
            cells = [f"{T // 1024}k", plan.gpus, plan.name, plan.t, size(step.ring_bytes), size(step.reduce_bytes)]
            cells += [size(step.memory) + full, f"{step.seconds:.3g} s", f"{step.ideal / step.seconds:.0%}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def break_even(way: str, bandwidth: float) -> int | None:
    """The fewest tokens per rank for which a hop takes no longer than the computation; None if any number does."""

    def hidden(t: int) -> bool:
        return hop_bytes(way, Plan(t, 1)) / bandwidth + LINKS.latency <= step_seconds(way, t, 1)

    return next((t + 64 for t in range(2**16, 0, -64) if not hidden(t)), None)


def pays_table() -> list[str]:
    """A table of where computation hides the ring's communication, for both links."""
    lines = ["| link | pass | minimum tokens per rank | maximum ranks at 128k | at 1024k |", "|---|---|---|---|---|"]
    for name, bandwidth in (("inside a node", LINKS.inside), ("between nodes", LINKS.between)):
        for way in ("forward", "backward"):
            t = break_even(way, bandwidth)
            gb = f"{name}, {bandwidth / 1e9:.0f} GB/s"
            most = ("any", "any", "any") if t is None else (t, 2**17 // t, 2**20 // t)
            lines.append(f"| {gb} | {way} | " + " | ".join(map(str, most)) + " |")
    return lines


def order_table() -> list[str]:
    """A table that compares one contiguous chunk per rank with two chunks, one from each end."""
    lines = ["| tokens | ranks | one chunk per rank | one from each end | |", "|---|---|---|---|---|"]
    for T, cp in ((2**17, 8), (2**20, 8), (2**20, 64)):
        row, ends = (ring_seconds("forward", Plan(T, cp), balanced) for balanced in (False, True))
        lines.append(f"| {T // 1024}k | {cp} | {row * 1e3:.3g} ms | {ends * 1e3:.3g} ms | {ends / row:.2f}× |")
    return lines


def size(count: float) -> str:
    """A number of bytes with a readable unit."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB" if count else "0"


def tables() -> str:
    """The tables of the page, with their text."""
    gpu = json.loads((RESULTS / "parallel-h200.json").read_text())
    steps = ", ".join(f"{row['t']}: {row['forward']:.3g} and {row['backward']:.3g} ms" for row in gpu["rows"])
    parts = [
        BEGIN,
        "",
        f"Measured ({gpu['device']}, torch {gpu['torch']}, commit {gpu['commit']}): projections at "
        f"{product_rate() / 1e12:.0f} TFLOP/s; one step of the ring, forward and backward, by tokens per rank: "
        f"{steps}. Full speed means the speed of the fastest of these steps.",
        "",
        f"Assumed: {LINKS.node} GPUs per node, {LINKS.inside / 1e9:.0f} GB/s per GPU within a node and "
        f"{LINKS.between / 1e9:.0f} GB/s between nodes, {LINKS.latency * 1e6:.0f} µs per message, "
        f"{LINKS.memory / 1e9:.0f} GB of memory per GPU.",
        "",
        *big_table(),
        "",
        "The limits within which computation hides a hop:",
        "",
        *pays_table(),
        "",
        "The forward pass of one layer with two ways to assign chunks to ranks (simulated):",
        "",
        *order_table(),
        "",
        END,
    ]
    return "\n".join(parts)


def memory_table() -> str:
    """The measured memory per rank."""
    data = json.loads((RESULTS / "parallel-cpu.json").read_text())
    lines = [MEMORY_BEGIN, "", f"{data['device']}, torch {data['torch']}, commit {data['commit']}:", ""]
    lines += ["| step | one rank | each of 4 ranks | |", "|---|---|---|---|"]
    for row in data["rows"]:
        if "one" in row:
            one, each = row["one"]["tensors"], row["worst rank"]["tensors"]
            lines.append(f"| {row['step']} | {one:.0f} MiB | {each:.0f} MiB | {each / one:.2f}× |")
    return "\n".join([*lines, "", MEMORY_END])


def main() -> None:
    """Rewrite the tables of the page."""
    text = PAGE.read_text()
    for new, begin, end in ((memory_table(), MEMORY_BEGIN, MEMORY_END), (tables(), BEGIN, END)):
        text = text[: text.index(begin)] + new + text[text.index(end) + len(end) :]
    PAGE.write_text(text)
    print(tables())


if __name__ == "__main__":
    main()
