"""Measure what ranks send and hold: collectives of tensor parallelism, peak memory of context parallelism, with gloo.

Memory is measured in two ways: the peak of all tensors, including weights and inputs (torch's record of every
allocation), and the growth of the process (the high-water mark of Linux). One step is forward and backward.

    python benchmarks/parallel.py | tee /dev/stderr | tail -1 > benchmarks/results/parallel-cpu.json
    python benchmarks/parallel.py --device cuda   # one step of the ring on one GPU, for benchmarks/scaling.py
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from harness import finish, memory, table
from harness import parser as harness_parser
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from headwise import MultiHeadAttention, Scoring, rotary
from headwise.attention.backends import Call
from headwise.cli.bench.measurement import interleaved, tensor_peak
from headwise.models import GPT, GPTConfig
from headwise.parallel import blocks, context_parallel, shard_sequence, tensor_parallel, unshard_sequence

T = 8192
LAYERS = {"layer (512, 8)": None, "layer (512, 8), 2 key/value heads": 2}


def layer_step(num_kv_heads: int | None, mesh) -> None:
    """One training step of one layer."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(512, 8, num_kv_heads=num_kv_heads, causal=True, position=rotary())
    length = T if mesh is None else T // mesh.size()
    layer = layer if mesh is None else context_parallel(layer, mesh)
    layer(torch.randn(1, length, 512, requires_grad=True)).sum().backward()


def gpt_step(mesh) -> None:
    """One training step of a small GPT."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=4096, d_model=256, num_heads=8, num_layers=4, context_length=T))
    length = T if mesh is None else T // mesh.size()
    gpt = gpt if mesh is None else context_parallel(gpt, mesh)
    tokens = torch.randint(4096, (1, length))
    torch.nn.functional.cross_entropy(gpt(tokens)[0], tokens[0]).backward()


STEPS: dict[str, Callable] = {name: lambda mesh, kv=kv: layer_step(kv, mesh) for name, kv in LAYERS.items()}
STEPS["GPT (256, 8), 4 blocks"] = gpt_step


def measure(mesh) -> dict[str, dict[str, float]]:
    """The peak memory and seconds of every step on this rank."""
    found = {}
    for name, step in STEPS.items():
        grown = memory(lambda step=step: step(mesh), "cpu")
        start = time.perf_counter()
        step(mesh)
        took = time.perf_counter() - start
        found[name] = {"tensors": tensor_peak(lambda step=step: step(mesh), "cpu"), "process": grown, "seconds": took}
    return found


def agree(mesh) -> float:
    """The largest difference between a layer's output on several ranks and on one."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(512, 8, num_kv_heads=2, causal=True, position=rotary())
    x = torch.randn(1, 2048, 512)
    with torch.no_grad():
        expected = layer(x)
        found = unshard_sequence(context_parallel(layer, mesh)(shard_sequence(x, mesh)), mesh)
    return float((found - expected).abs().max())


def all_reduces(mesh) -> dict[str, int]:
    """The number of collectives of one layer with split heads, forward and backward."""
    layer = tensor_parallel(MultiHeadAttention(512, 8, causal=True), mesh)
    with CommDebugMode() as forward:
        output = layer(torch.randn(1, 64, 512, requires_grad=True))
    with CommDebugMode() as backward:
        output.sum().backward()
    return {"forward": forward.get_total_counts(), "backward": backward.get_total_counts()}


def work(rank: int, ranks: int, meeting: str, results) -> None:
    """Measure on one rank and put the results into the queue."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    error, counts = agree(mesh), all_reduces(mesh)
    results.put((rank, {"error": error, "all_reduces": counts, "memory": measure(mesh)}))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int) -> list[dict]:
    """The measurements of every rank."""
    context = multiprocessing.get_context("spawn")
    results, meeting = context.Queue(), str(Path(tempfile.mkdtemp()) / "meeting")
    processes = [context.Process(target=work, args=(rank, ranks, meeting, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(ranks)]


def ring_steps() -> None:
    """Measure one step of the ring on a GPU: two chunks of queries, each with one fully visible chunk of keys."""
    rows, cells = [], []
    for t in (1024, 4096, 16384, 65536):
        query, key, value, grad = (
            torch.randn(1, heads, t // 2, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8, 32)
        )
        engine = blocks.engine_for(Call(query, key, value, Scoring(), 0.0), t, t)
        piece, met = blocks.Piece(range(t // 2), range(t // 2), "all"), blocks.Met(query, key, value)
        output, lse = engine.forward(piece, met)
        known = blocks.Known(output, lse, grad)
        into = blocks.Gradients(*(torch.zeros_like(x, dtype=torch.float32) for x in met), [])
        total, total_lse = torch.zeros_like(output, dtype=torch.float32), lse.clone()

        def forward(engine=engine, piece=piece, met=met, total=total, total_lse=total_lse) -> None:
            for _ in range(2):
                blocks.merge(total, total_lse, *engine.forward(piece, met))

        def backward(engine=engine, piece=piece, met=met, known=known, into=into) -> None:
            for _ in range(2):
                engine.backward(piece, met, known, into)

        times = interleaved({"forward": forward, "backward": backward}, "cuda", rounds=20, seconds=4)
        row = {"t": t, "H": 32, "Hkv": 8, "D": 128, **{name: time["ms"] for name, time in times.items()}}
        row |= {"forward TFLOP/s": 2 * t**2 * 32 * 128 / row["forward"] / 1e9}
        row |= {"backward TFLOP/s": 5 * t**2 * 32 * 128 / row["backward"] / 1e9}
        rows.append(row)
        cells.append([str(t), *(f"{row[name]:.3g}" for name in list(row)[4:])])
    table("one step of the ring, bfloat16, 32 heads of width 128, 8 key/value heads", cells, ["t", *list(rows[0])[4:]])
    finish("parallel", "cuda", rows)


def main() -> None:
    """Measure, and print the results."""
    given = harness_parser(__doc__)
    given.add_argument("--ranks", type=int, default=4)
    given = given.parse_args()
    if given.device == "cuda":
        ring_steps()
        return
    torch.set_num_threads(1)
    alone, together = measure(None), on_ranks(given.ranks)
    rows, cells = [], []
    for name, one in alone.items():
        worst = {key: max(rank["memory"][name][key] for rank in together) for key in one}
        rows.append({"step": name, "T": T, "ranks": given.ranks, "one": one, "worst rank": worst})
        sizes = [f"{one[key]:.0f} → {worst[key]:.0f} MiB" for key in ("tensors", "process")]
        sizes.insert(1, f"{worst['tensors'] / one['tensors']:.2f}×")
        cells.append([name, *sizes, f"{one['seconds']:.2f} → {worst['seconds']:.2f} s"])
    head = ["step", "peak of tensors", "share", "growth of the process", "time, all ranks on this machine"]
    table(f"T = {T} on one rank and on each of {given.ranks}", cells, head)
    counts, error = together[0]["all_reduces"], max(rank["error"] for rank in together)
    print(f"\ncollectives of a layer with split heads: {counts}; largest difference with a split sequence: {error:.1e}")
    rows.append({"step": "one layer, tensor parallel", "ranks": given.ranks, "collectives": counts})
    finish("parallel", "cpu", rows)


if __name__ == "__main__":
    main()
