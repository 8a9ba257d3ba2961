"""What ranks move and hold: collectives of tensor parallel, bytes and peak memory of context parallel, on gloo.

Memory is counted twice: what tensors took at their peak, weights and inputs included (torch's own record of every
allocation), and what the process grew by (Linux' high-water mark). One step is forward and backward.

    python benchmarks/parallel.py | tee /dev/stderr | tail -1 > benchmarks/results/parallel-cpu.json
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from harness import finish, memory, table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from headwise import MultiHeadAttention, rotary
from headwise.models import GPT, GPTConfig
from headwise.parallel import context_parallel, shard_sequence, tensor_parallel, unshard_sequence

T = 8192
LAYERS = {"layer (512, 8)": None, "layer (512, 8), 2 key/value heads": 2}


def peak(run: Callable[[], object]) -> float:
    """MiB that tensors take at their peak while `run` runs, counted from nothing."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    held = most = 0
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most / 2**20


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
    """Peak memory and seconds of every step, on this rank."""
    found = {}
    for name, step in STEPS.items():
        grown = memory(lambda step=step: step(mesh), "cpu")
        start = time.perf_counter()
        step(mesh)
        took = time.perf_counter() - start
        found[name] = {"tensors": peak(lambda step=step: step(mesh)), "process": grown, "seconds": took}
    return found


def agree(mesh) -> float:
    """The largest difference of a layer's output from that on one process."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(512, 8, num_kv_heads=2, causal=True, position=rotary())
    x = torch.randn(1, 2048, 512)
    with torch.no_grad():
        expected = layer(x)
        found = unshard_sequence(context_parallel(layer, mesh)(shard_sequence(x, mesh)), mesh)
    return float((found - expected).abs().max())


def all_reduces(mesh) -> dict[str, int]:
    """Collectives of one layer with shared heads, forwards and backwards."""
    layer = tensor_parallel(MultiHeadAttention(512, 8, causal=True), mesh)
    with CommDebugMode() as forward:
        output = layer(torch.randn(1, 64, 512, requires_grad=True))
    with CommDebugMode() as backward:
        output.sum().backward()
    return {"forward": forward.get_total_counts(), "backward": backward.get_total_counts()}


def work(rank: int, ranks: int, meeting: str, results) -> None:
    """One rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    error, counts = agree(mesh), all_reduces(mesh)
    results.put((rank, {"error": error, "all_reduces": counts, "memory": measure(mesh)}))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(ranks: int) -> list[dict]:
    """What every rank measured."""
    context = multiprocessing.get_context("spawn")
    results, meeting = context.Queue(), str(Path(tempfile.mkdtemp()) / "meeting")
    processes = [context.Process(target=work, args=(rank, ranks, meeting, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(ranks)]


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args()
    torch.set_num_threads(1)
    alone, together = measure(None), on_ranks(given.ranks)
    rows, cells = [], []
    for name, one in alone.items():
        worst = {key: max(rank["memory"][name][key] for rank in together) for key in one}
        rows.append({"step": name, "T": T, "ranks": given.ranks, "one": one, "worst rank": worst})
        sizes = [
            f"{one[key]:.0f} → {worst[key]:.0f} MiB ({worst[key] / one[key]:.2f}×)" for key in ("tensors", "process")
        ]
        cells.append([name, *sizes, f"{one['seconds']:.2f} → {worst['seconds']:.2f} s"])
    head = ["step", "tensors at their peak", "growth of the process", "time, all ranks on this machine"]
    table(f"T = {T} on one rank and on each of {given.ranks}", cells, head)
    counts, error = together[0]["all_reduces"], max(rank["error"] for rank in together)
    print(f"\ncollectives of a layer with shared heads: {counts}; sequence over ranks, largest difference: {error:.1e}")
    rows.append({"step": "one layer, tensor parallel", "ranks": given.ranks, "collectives": counts})
    finish("parallel", "cpu", rows)


if __name__ == "__main__":
    main()
