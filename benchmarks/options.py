"""Measure the cost of options (windows, documents, generation, soft-cap, ALiBi) relative to the best of torch for each.

    python benchmarks/options.py                  the CPU, float32
    python benchmarks/options.py --device cuda    the GPU, bfloat16

Every output is first compared with the float64 reference, for sampled queries of one head.
"""

import sys
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import finish, parser, table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise import Scoring, alibi, attend, causal, documents, explain, reference, window
from headwise.cli.bench.measuring import interleaved
from headwise.masks import Grid, Mask

Runs = dict[str, Callable[[], object]]
DECODE = [(1, 32, 8, 131072, 128), (16, 32, 8, 8192, 128), (64, 32, 8, 2048, 128)]


def heads(*shape: int, kv_heads: int | None = None, keys: int | None = None, device: str) -> list[Tensor]:
    """Query, key and value."""
    B, H, T, D = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(B, H, T, D), *[(B, kv_heads or H, keys or T, D)] * 2]
    return [torch.randn(size, generator=generator, device=device).to(dtype) for size in sizes]


def check(name: str, output: Tensor, tensors: list[Tensor], scoring: Scoring) -> None:
    """Exit unless sampled queries of the first head are right."""
    query, key, value = tensors
    T, S = query.shape[2], key.shape[2]
    rows = torch.linspace(0, T - 1, min(T, 64)).long().to(query.device)
    grid = Grid(*(torch.zeros(1, 1, 1, 1, dtype=torch.long, device=query.device),) * 2, rows[:, None],
                torch.arange(S, device=query.device), T, S)  # fmt: skip
    visible = None if scoring.mask is None else scoring.mask.visible(grid)
    bias = scoring.bias_at(grid, torch.float64)
    truth, _ = reference.attend(
        query[:1, :1, rows].double(), key[:1, :1].double(), value[:1, :1].double(),
        visible=visible, bias=bias, softcap=scoring.softcap,
    )  # fmt: skip
    error = (output[:1, :1, rows].double() - truth).norm() / truth.norm()
    if not error < (1e-2 if query.dtype == torch.bfloat16 else 1e-5):
        sys.exit(f"{name}: relative error {error:.3g} against the float64 reference")


def decode(device: str) -> list[tuple[str, Runs, dict[str, object]]]:
    """One new token per sample, with a long cache of grouped heads."""
    cases = []
    for B, H, kv_heads, S, D in DECODE:
        tensors = heads(B, H, 1, D, kv_heads=kv_heads, keys=S, device=device)
        check("decode", attend(*tensors, causal=True), tensors, Scoring())
        gigabytes = 2 * B * kv_heads * S * D * 2 / 1e9
        runs: Runs = {"headwise": lambda tensors=tensors: attend(*tensors, causal=True)}
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            if usable(backend, tensors):
                runs[f"SDPA {backend.name.split('_')[0].lower()}"] = by_sdpa(backend, tensors)
        cases.append((f"decode (B, H, Hkv, S, D) = {(B, H, kv_heads, S, D)}", runs, {"gigabytes": gigabytes}))
    return cases


def by_sdpa(backend: SDPBackend, tensors: list[Tensor]) -> Callable[[], object]:
    """torch's attention with one of its kernels."""

    def run() -> object:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors, enable_gqa=True)

    return run


def usable(backend: SDPBackend, tensors: list[Tensor]) -> bool:
    """Whether this kernel of torch supports these heads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch explains at length why it cannot
        try:
            by_sdpa(backend, tensors)()
        except RuntimeError:
            return False
    return True


def masked(title: str, shape: tuple[int, ...], mask: Mask, device: str, padded: int = 0) -> tuple[str, Runs, dict]:
    """A mask compared with full causal attention and, for documents, with padding to a common length."""
    tensors = heads(*shape, device=device)
    check(title, attend(*tensors, mask=mask), tensors, Scoring(mask))
    runs: Runs = {
        "headwise": lambda: attend(*tensors, mask=mask),
        "SDPA, full causal": lambda: F.scaled_dot_product_attention(*tensors, is_causal=True),
    }
    if padded:
        count, longest = padded
        batch = heads(count, shape[1], longest, shape[3], device=device)
        runs["SDPA, padded"] = lambda: F.scaled_dot_product_attention(*batch, is_causal=True)
    return f"{title} {shape}, path {explain(*tensors, mask=mask).path}", runs, {}


def document_lengths(T: int) -> list[int]:
    """The lengths of documents with 512 to 1536 tokens, 1024 on average, and T tokens in total."""
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < T:
        lengths.append(min(int(torch.randint(512, 1537, (1,), generator=generator)), T - sum(lengths)))
    return lengths


def scored(shape: tuple[int, ...]) -> list[tuple[str, Runs, dict]]:
    """Soft-cap and ALiBi compared with hand-written, compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tensors = heads(*shape, device="cuda")
    T, slopes = shape[2], alibi(shape[1]).with_table(alibi(shape[1]).table.cuda())
    blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, T, T, device="cuda")
    table_ = slopes.table

    def direct(mod: Callable[..., Tensor]) -> Tensor:
        return flex_attention(*tensors, score_mod=mod, block_mask=blocks)

    flex = torch.compile(direct, dynamic=False)
    options = {"soft-cap": {"softcap": 50.0}, "ALiBi": {"relative": slopes}}
    mods = {
        "soft-cap": lambda score, b, h, i, j: 50.0 * torch.tanh(score / 50.0),
        "ALiBi": lambda score, b, h, i, j: score + table_[h] * (j - i),
    }
    cases = []
    for name, given in options.items():
        check(name, attend(*tensors, causal=True, **given), tensors, Scoring(causal(), **given))
        runs: Runs = {
            "headwise": lambda given=given: attend(*tensors, causal=True, **given),
            "FlexAttention": lambda mod=mods[name]: flex(mod),
        }
        cases.append((f"{name} {shape}", runs, {}))
    return cases


def cases(device: str) -> list[tuple[str, Runs, dict]]:
    """The cases to measure on this device."""
    if device == "cpu":
        lengths = document_lengths(8192)
        packed = causal() & documents(lengths=lengths)
        return [
            masked("window 256", (1, 8, 8192, 64), causal() & window(255), device),
            masked("documents of 1024", (1, 8, 8192, 64), packed, device, (len(lengths), max(lengths))),
        ]
    lengths = document_lengths(16384)
    packed = causal() & documents(lengths=lengths).to("cuda")
    return [
        *decode(device),
        masked("window 4096", (1, 32, 32768, 128), causal() & window(4095), device),
        masked("documents of 1024", (1, 32, 16384, 128), packed, device, (len(lengths), max(lengths))),
        *scored((4, 16, 4096, 128)),
    ]


def main() -> None:
    """Check the results, measure, and print."""
    options = parser(__doc__).parse_args()
    rows: list[dict[str, object]] = []
    for title, runs, about in cases(options.device):
        with torch.no_grad():
            times = interleaved(runs, options.device, rounds=30, seconds=options.seconds)
        ours = times["headwise"]["ms"]
        lines = []
        for name, time in times.items():
            rate = [f"{about['gigabytes'] / time['ms']:.2f} TB/s"] if about else []
            lines.append([name, f"{time['ms']:.3f}", f"{time['ms'] / ours:.2f}×", f"{time['spread']:.0%}", *rate])
        head = ["", "ms", "relative to ours", "spread", *(["read"] if about else [])]
        table(title, lines, head)
        rows.append({"title": title, "times": times, **about})
    finish("options", options.device, rows)


if __name__ == "__main__":
    main()
