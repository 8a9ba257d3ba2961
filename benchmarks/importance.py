"""What importance costs: one head at a time in a loop, a sweep, and the gradient.

    python benchmarks/importance.py [--repeats 3] [--folder FOLDER of a causal transformers model]

Processor time, in turns, the median of the repeats. Sweep and loop are compared before they are timed: they measure the
same silences. The work of both is matrix products; a sweep leaves out the layers before the one it changes.
"""

import statistics
import time
from collections.abc import Callable, Iterator

import torch
from harness import finish, parser, table
from torch import Tensor, nn

from headwise import importance, load_builtin, silence, watch
from headwise.study.importance import mean_cross_entropy

Case = tuple[str, nn.Module, Tensor]


def cases(folder: str | None) -> Iterator[Case]:
    """Models and tokens."""
    yield "built-in, 4 × 49 tokens", load_builtin().gpt, torch.randint(1, 8192, (4, 49))
    import transformers

    import headwise.huggingface  # noqa: F401 - registers attn_implementation="headwise"

    if folder is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="headwise").eval()
        yield (
            f"{model.config.model_type} in the folder, 4 × 128",
            model,
            torch.randint(3, model.config.vocab_size, (4, 128)),
        )
    config = transformers.GPT2Config()
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="headwise").eval()
    yield "GPT-2 with random weights, 1 × 64", model, torch.randint(0, config.vocab_size, (1, 64))


@torch.no_grad()
def loop(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """What silencing each head adds to the loss, one pass per head."""
    with watch(model) as seen:
        base = mean_cross_entropy(model(tokens), tokens)
    found = {}
    for name, weights in seen.items():
        rows = []
        for head in range(weights.shape[1]):
            with silence(model, {name: head}):
                rows.append(mean_cross_entropy(model(tokens), tokens) - base)
        found[name] = torch.stack(rows, 1)
    return found


def seconds(run: Callable[[], object]) -> float:
    """Processor time of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measured(model: nn.Module, tokens: Tensor, repeats: int) -> dict[str, float]:
    """Seconds by way."""
    expected, found = loop(model, tokens), importance(model, tokens, by="silence", controls=0)
    for name, effects in expected.items():
        torch.testing.assert_close(found[name], effects, atol=1e-4, rtol=1e-3)
    ways = {
        "loop": lambda: loop(model, tokens),
        "sweep": lambda: importance(model, tokens, by="silence", controls=0),
        "gradient": lambda: importance(model, tokens, controls=0),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, run in ways.items():
            times[way].append(seconds(run))
    return {way: statistics.median(x) for way, x in times.items()}


def main() -> None:
    """Print the table and the JSON line."""
    options = parser(__doc__)
    options.add_argument("--folder", help="a causal transformers model")
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    torch.manual_seed(0)
    rows = []
    for name, model, tokens in cases(given.folder):
        rows.append({"model": name, **measured(model, tokens, given.repeats)})
        print(rows[-1], flush=True)
    cells = [
        [r["model"], *(f"{r[w]:.2f} s" for w in ("loop", "sweep", "gradient")), f"{r['loop'] / r['sweep']:.2f}×"]
        for r in rows
    ]
    table("Importance of all heads", cells, ["", "loop", "sweep", "gradient", "loop / sweep"])
    finish("importance", "cpu", rows)


if __name__ == "__main__":
    main()
