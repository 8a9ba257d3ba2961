"""Where query blocks pay on the CPU: the measurements behind the table in `backends/blocks.py`.

    python benchmarks/cpu_blocks.py             every length, dtype and mask, inference and training
    python benchmarks/cpu_blocks.py --short     three lengths

Each row compares one call of torch's fused kernel with blocks of several heights through either engine, on queries,
keys and values laid out as the layer lays them out. Smaller than 1 means blocks are faster.
"""

import harness
import torch

from headwise import causal, reference
from headwise.backends import Call
from headwise.backends.blocks import Rule, in_blocks
from headwise.backends.sdpa import Sdpa
from headwise.scoring import Scoring

SIZES = [(4, 12, 64, 64), (4, 12, 128, 64), (4, 12, 256, 64), (4, 12, 384, 64), (4, 12, 512, 64), (2, 12, 768, 64)]
SIZES += [(1, 16, 1024, 64), (1, 16, 2048, 64)]
HEIGHTS = (64, 128, 256, 4096)


def layer_layout(B: int, H: int, T: int, D: int, dtype: torch.dtype, train: bool) -> torch.Tensor:
    """A fused projection's output (B, T, H, 3·D)."""
    return torch.randn(B, T, H, 3 * D, dtype=dtype).requires_grad_(train)


def run(qkv: torch.Tensor, way: str, rule: Rule | None, scoring: Scoring, gradient: torch.Tensor) -> torch.Tensor:
    """One pass by one way."""
    D = qkv.shape[-1] // 3
    q, k, v = (x.transpose(1, 2) for x in qkv.split((D, D, D), dim=-1))
    if way == "fused, contiguous":
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    call = Call(q, k, v, scoring, 0.0)
    output = Sdpa().run(call) if rule is None else in_blocks(call, rule)
    if qkv.requires_grad:
        qkv.grad = None
        output.transpose(1, 2).backward(gradient)
    return output


def measure(
    size: tuple[int, int, int, int], dtype: str, masked: bool, train: bool, seconds: float
) -> dict[str, object]:
    """All ways for one setting."""
    B, H, T, D = size
    qkv = layer_layout(*size, harness.DTYPES[dtype], train)
    gradient = torch.randn(B, T, H, D, dtype=qkv.dtype)
    scoring = Scoring(causal() if masked else None)
    ways: dict[str, Rule | None] = {"fused": None, "fused, contiguous": None}
    for engine in ("fused", "products"):
        for rows in HEIGHTS:
            if rows < T or (rows == max(HEIGHTS) and engine == "products"):
                ways[f"{engine} {rows if rows < T else 'whole'}"] = Rule(engine, 1, 2**62, rows)
    q, k, v = (x.transpose(1, 2).detach() for x in qkv.split((D, D, D), dim=-1))
    visible = scoring.visible(T, T, q.device)
    truth = reference.attend(q[:1].double(), k[:1].double(), v[:1].double(), visible=visible)[0]
    plain = reference.attend(q[:1], k[:1], v[:1], visible=visible)[0]
    with torch.set_grad_enabled(train):
        for way, rule in ways.items():
            harness.agree(way, run(qkv, way, rule, scoring, gradient)[:1], truth, plain)
        runs = {w: lambda w=w, r=r: run(qkv, w, r, scoring, gradient) for w, r in ways.items()}
        times = harness.interleaved(runs, seconds=seconds)
    return {w: t["ms"] for w, t in times.items()}


def main() -> None:
    """Print one table per dtype, mask and mode."""
    parser = harness.parser(__doc__)
    parser.add_argument("--short", action="store_true", help="only T = 128, 512 and 2048")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = [s for s in SIZES if s[2] in (128, 512, 2048)] if options.short else SIZES
    results = []
    for dtype in ("float32", "bfloat16"):
        for masked in (False, True):
            for train in (False, True):
                rows, head = [], ["T", "fused, ms"]
                for size in sizes:
                    times = measure(size, dtype, masked, train, options.seconds)
                    setting = {"size": size, "dtype": dtype, "causal": masked, "train": train}
                    results.append({**setting, **times})
                    head = head if len(head) > len(times) else ["T", "fused, ms", *list(times)[1:]]
                    ratios = {w: f"{t / times['fused']:.2f}" for w, t in times.items()}
                    rows.append([str(size[2]), f"{times['fused']:.2f}", ratios])
                names = list(dict.fromkeys(w for row in rows for w in row[2] if w != "fused"))
                lines = [[row[0], row[1], *(row[2].get(name, "") for name in names)] for row in rows]
                title = f"{dtype}, {'causal' if masked else 'no mask'}, {'forward+backward' if train else 'forward'}"
                harness.table(title, lines, ["T", "fused ms", *names])
    harness.finish("cpu_blocks", "cpu", results)


if __name__ == "__main__":
    main()
