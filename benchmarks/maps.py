"""Measure the cost of looking at attention weights, relative to one forward pass of torch's fused attention.

    python benchmarks/maps.py                  the CPU: float32, causal, 2048 to 16384 tokens, 12 heads of 64
    python benchmarks/maps.py --processor 5    the same in processor time of one thread, for a machine that is busy
    python benchmarks/maps.py --model          the built-in model on the CPU: summaries of 256 tokens, the page of 16384
    python benchmarks/maps.py --model --text FILE    the same with the text of a file in place of repeated sentences
    python benchmarks/maps.py --device cuda    the GPU: bfloat16, causal, up to 131072 tokens
    python benchmarks/maps.py --device cuda --table    many shapes, relative to the fastest forward pass installed

Every result is first compared with the float64 reference, completely at a short length and in sampled rows at the long
one. The panel consists of entropy, peak, mean distance, the masses of four probes, received and a picture. Rows "by
tiles" are computed without the compiled loop.
"""

import contextlib
import statistics as averages
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import map_table
import torch
import torch.nn.functional as F
from harness import finish, memory, parser, table
from torch import Tensor

from headwise import (
    AttentionMap,
    MultiHeadAttention,
    Scoring,
    attend,
    causal,
    induction,
    load_builtin,
    local,
    offset,
    previous_token,
    reference,
    sink,
    view,
    watch,
)
from headwise.cli.bench.measurement import interleaved, summary
from headwise.weights import compiled

PROBES = {"sink": sink(4), "previous": previous_token(), "self": offset(0), "local": local(8)}
TEXT = "The captain looked at the sea, and the sea looked at the captain, who had seen it all before. He said nothing. "
SHAPES = {
    "cpu": [(1, 12, T, 64) for T in (2048, 8192, 16384)],
    "cuda": [(1, 32, 32768, 128), (1, 12, 8192, 64), (1, 32, 2048, 128)],
}
LAYERS = {"cpu": [(4, 512, 768, 12), (1, 2048, 1024, 16)], "cuda": [(8, 1024, 768, 12), (4, 4096, 2048, 16)]}
PICTURE = {"cpu": 64, "cuda": 256}


def inputs(shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))
    return query, key, value


def panel(weights: AttentionMap, size: int) -> object:
    """All statistics in one panel."""
    return weights.panel(entropy=True, peak=True, distance=True, received=True, masses=PROBES, pooled=(size, size))


def formulae(weights: Tensor, position: Tensor) -> dict[str, Tensor]:
    """Row statistics of dense weights (..., t, S)."""
    apart = (position[:, None] - torch.arange(weights.shape[-1], device=weights.device)).abs()
    return {
        "entropy": torch.special.entr(weights).sum(-1),
        "peak": weights.amax(-1),
        "distance": (weights * apart).sum(-1),
        "previous": (weights * (position[:, None] - torch.arange(weights.shape[-1], device=weights.device) == 1)).sum(
            -1
        ),
    }


def check(shape: tuple[int, ...], device: str, size: int) -> dict[str, float]:
    """Our errors relative to float64, and those of plain float32; exits if ours are far larger."""
    query, key, value = inputs(shape, device)
    T = shape[2]
    _, weights = attend(query, key, value, causal=True, return_weights=True)
    found = weights.panel(entropy=True, peak=True, distance=True, received=True, masses=PROBES, pooled=(size, size))
    rows = torch.linspace(1, T - 1, min(T - 1, 256)).long().to(device)
    visible = torch.arange(T, device=device) <= rows[:, None]
    errors = {}
    dense = {}
    for name, dtype in (("truth", torch.float64), ("plain", torch.float32)):
        _, dense[name] = reference.attend(
            query[:, :1, rows].to(dtype), key[:, :1].to(dtype), value[:, :1].to(dtype), visible=visible
        )
    ours = {
        "entropy": found.entropy,
        "peak": found.peak.weight,
        "distance": found.distance,
        "previous": found.masses["previous"],
    }
    truth, plain = (formulae(dense[name], rows) for name in ("truth", "plain"))
    for name, values in ours.items():
        error = (values[:, :1, rows].double() - truth[name]).norm() / truth[name].norm()
        rough = (plain[name].double() - truth[name]).norm() / truth[name].norm()
        errors[f"{name} error"], errors[f"{name} error of plain float32"] = error.item(), rough.item()
        if not error <= 10 * rough + 1e-5:
            sys.exit(f"{name}: relative error {error:.3g}, plain float32 has {rough:.3g}")
    total = found.received.total.double().sum().item() / (shape[0] * shape[1] * T)
    picture = found.pooled.double().sum(-1)
    if abs(total - 1) > 1e-4 or (picture - 1).abs().max() > 1e-4:
        sys.exit(f"received sums to {total} per query, picture rows to {picture.min()}..{picture.max()}; expected 1")
    return errors


def check_columns(device: str, size: int) -> None:
    """Compare all of received() and the picture with the dense matrix, at a length where it fits."""
    query, key, value = inputs((1, 2, 1024, 64), device)
    _, weights = attend(query, key, value, causal=True, return_weights=True)
    _, truth = reference.attend(
        *(x.double() for x in (query, key, value)), visible=causal().to_tensor(1024, device=device)
    )
    cells = truth.unflatten(-1, (size, -1)).sum(-1).unflatten(2, (size, -1)).mean(3)
    found = weights.panel(entropy=True, received=True, pooled=(size, size))
    for values, exact in (
        (weights.received().total, truth.sum(-2)),
        (found.received.total, truth.sum(-2)),
        (found.pooled, cells),
    ):
        error = (values.double() - exact).norm() / exact.norm()
        if not error < 2e-5:
            sys.exit(f"received or picture: relative error {error:.3g}")


def statistics(shape: tuple[int, ...], device: str, seconds: float, rounds: int = 0) -> dict[str, object]:
    """The times of all statistics, and the memory of the panel in addition to query, key and log-sum-exp."""
    size = PICTURE[device]
    errors = check(shape, device, size)
    query, key, value = inputs(shape, device)
    _, weights = attend(query, key, value, causal=True, return_weights=True)
    weights.log_sum_exp()
    ids = torch.randint(0, 500, (shape[2],), generator=torch.Generator().manual_seed(0)).to(device)
    runs = {
        "SDPA forward": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "received": weights.received,
        "entropy, received, picture": lambda: weights.panel(entropy=True, received=True, pooled=(size, size)),
        "panel": lambda: panel(weights, size),
        "entropy": weights.entropy,
        "distance": weights.distance,
        "topk(8)": lambda: weights.topk(8),
        "log-sum-exp": lambda: AttentionMap(query, key, Scoring(causal())).log_sum_exp(),
        "sink": lambda: weights.mass(sink(4)),
        "picture": lambda: weights.pooled(size, size),
        "induction": lambda: weights.mass(induction(ids)),
        "summary": lambda: weights.summary(ids),
    }
    if device == "cpu":
        names = ("entropy", "received", "picture", "entropy, received, picture", "panel")
        runs |= {f"{name}, by tiles": by_tiles(runs[name]) for name in names}
    with torch.no_grad():
        extra = memory(lambda: panel(weights, size), device)
        times = by_processor(runs, rounds) if rounds else interleaved(runs, device, rounds=40, seconds=seconds)
    return {"shape": shape, "times": times, "extra MiB": extra, **errors}


def by_tiles(run: Callable[[], object]) -> Callable[[], object]:
    """The same without the compiled loop."""

    def slow() -> object:
        with mock.patch.object(compiled, "refuses", return_value="it is switched off"):
            return run()

    return slow


def by_processor(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Like `interleaved`, in processor time, which hardly depends on what else the machine does."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            with processor(times[name]):
                run()
    return {name: summary([1000 * each for each in values]) for name, values in times.items()}


@contextlib.contextmanager
def processor(times: list[float]) -> Iterator[None]:
    """Adds the processor time of a block, in seconds."""
    start = time.process_time()
    yield
    times.append(time.process_time() - start)


def built_in(tokens: int, rounds: int, text: str | None) -> dict[str, object]:
    """The processor time of a forward pass of the built-in model, and of summaries and a page of the same text."""
    model = load_builtin()
    ids = model.tokens(TEXT * (tokens // 16) if text is None else text, most=10**9)[:, :tokens]
    if ids.shape[1] < tokens:
        sys.exit(f"the text has {ids.shape[1]} tokens; expected at least {tokens}.")
    forward: list[float] = []
    summaries: list[float] = []
    page: list[float] = []
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            with processor(forward):
                model.gpt(ids)
            with processor(summaries):
                with watch(model.gpt) as seen:
                    model.gpt(ids)
                for weights in seen.values():
                    weights.summary(ids[0])
            with processor(page):
                view(model, ids).save(Path(folder) / "page.html")
    base = averages.median(forward)
    ratios = {"watch and summary": averages.median(summaries) / base, "view and page": averages.median(page) / base}
    return {"tokens": ids.shape[1], "forward pass in seconds of processor time": base, **ratios}


def with_and_without(setting: tuple[int, ...], device: str, seconds: float) -> dict[str, object]:
    """The time of a layer with and without `return_weights`."""
    B, T, E, H = setting
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    layer = MultiHeadAttention(E, H, causal=True, device=device, dtype=dtype)
    x = torch.randn(B, T, E, device=device, dtype=dtype, requires_grad=True)

    def forward(wanted: bool) -> None:
        with torch.no_grad():
            layer(x, return_weights=wanted)

    def both(wanted: bool) -> None:
        output = layer(x, return_weights=wanted)
        (output[0] if wanted else output).sum().backward()

    runs = {
        "forward": lambda: forward(False),
        "forward with weights": lambda: forward(True),
        "forward+backward": lambda: both(False),
        "forward+backward with weights": lambda: both(True),
    }
    return {"setting": setting, "times": interleaved(runs, device, rounds=60, seconds=seconds)}


def longest() -> dict[str, object]:
    """The memory of the panel at 131,072 tokens and 32 heads, in addition to query, key and log-sum-exp."""
    query, key, value = inputs((1, 32, 131072, 128), "cuda")
    _, weights = attend(query, key, value, causal=True, return_weights=True)
    del value
    weights.log_sum_exp()
    return {"shape": (1, 32, 131072, 128), "extra MiB": memory(lambda: panel(weights, 256), "cuda")}


def main() -> None:
    """Check the results, measure, and print."""
    options = parser(__doc__)
    options.add_argument("--model", action="store_true", help="measure summaries and the page of the built-in model")
    options.add_argument("--text", type=Path, help="for --model: a file with the text to read")
    options.add_argument("--table", action="store_true", help="many shapes; on the CPU, small ones to see that it runs")
    options.add_argument("--processor", type=int, default=0, metavar="ROUNDS", help="processor time, this many rounds")
    options.add_argument("--tokens", type=int, nargs="*", help="lengths to measure instead")
    options = options.parse_args()
    device = options.device
    if options.model:
        text = None if options.text is None else options.text.read_text(encoding="utf-8")
        found = [built_in(256, 9, text), built_in(16384, 1, text)]
        for row in found:
            print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
        finish("maps", device, found)
        return
    check_columns(device, 64)
    if options.table:
        finish("map table", device, map_table.run(device, options.seconds))
        return
    rows: list[dict[str, object]] = []
    if options.processor:
        torch.set_num_threads(1)
    shapes = [(1, 12, T, 64) for T in options.tokens] if options.tokens else SHAPES[device]
    for setting in () if options.processor else LAYERS[device]:
        rows.append(with_and_without(setting, device, options.seconds))
        times = rows[-1]["times"]
        lines = [
            [name, f"{times[name]['ms']:.3f}", f"{times[name + ' with weights']['ms']:.3f}",
             f"{times[name + ' with weights']['ms'] / times[name]['ms']:.3f}×"]
            for name in ("forward", "forward+backward")
        ]  # fmt: skip
        table(f"layer {setting}, ms", lines, ["", "without weights", "with", "ratio"])
    for shape in shapes:
        seconds = options.seconds * (8 if device == "cpu" else 1)
        rows.append(statistics(shape, device, seconds, options.processor))
        times = rows[-1]["times"]
        base = times["SDPA forward"]["ms"]
        lines = [[name, f"{t['ms']:.3f}", f"{t['ms'] / base:.2f}×", f"{t['spread']:.0%}"] for name, t in times.items()]
        table(
            f"{shape}, panel takes {rows[-1]['extra MiB']:.0f} MiB extra",
            lines,
            ["", "ms", "relative to SDPA", "spread"],
        )
        for name, value in rows[-1].items():
            if name.endswith("error"):
                print(f"  {name} {value:.2g}, plain float32 {rows[-1][name + ' of plain float32']:.2g}")
    if device == "cuda":
        rows.append(longest())
        print(
            f"\n{rows[-1]['shape']}: the panel takes {rows[-1]['extra MiB']:.0f} MiB in addition to query, key and "
            "log-sum-exp"
        )
    finish("maps", device, rows)


if __name__ == "__main__":
    main()
