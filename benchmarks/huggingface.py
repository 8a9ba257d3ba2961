"""Measure the cost of attentions in a transformers model: one forward pass of a Llama (4 layers, width 1024, 16 heads).

    python benchmarks/huggingface.py                  the CPU: float32, T = 2048
    python benchmarks/huggingface.py --device cuda    the GPU: bfloat16, T = 8192

`sdpa` returns no attentions, `eager` dense tensors, and `headwise` attention maps. Outputs are compared before timing.
"""

import sys

import torch
import transformers
from harness import finish, memory, parser, table

import headwise.huggingface  # noqa: F401 - registers attn_implementation="headwise"
from headwise.cli.bench.measuring import interleaved

LENGTH = {"cpu": 2048, "cuda": 8192}


def model_with(implementation: str, device: str) -> torch.nn.Module:
    """The same random model with the given attention implementation."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=1024,
        num_attention_heads=16,
        num_hidden_layers=4,
        intermediate_size=2816,
        vocab_size=8192,
        max_position_embeddings=LENGTH[device],
    )
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = transformers.LlamaModel._from_config(config, attn_implementation=implementation, dtype=dtype)
    return model.to(device).eval()


def main() -> None:
    """Compare the outputs, measure, and print."""
    options = parser(__doc__).parse_args()
    device, T = options.device, LENGTH[options.device]
    ids = torch.randint(0, 8192, (1, T), generator=torch.Generator().manual_seed(0)).to(device)
    models = {name: model_with(name, device) for name in ("sdpa", "headwise", "eager")}
    runs = {
        "sdpa, no attentions": lambda: models["sdpa"](ids, use_cache=False),
        "headwise, no attentions": lambda: models["headwise"](ids, use_cache=False),
        "headwise, attentions": lambda: models["headwise"](ids, use_cache=False, output_attentions=True),
        "eager, attentions": lambda: models["eager"](ids, use_cache=False, output_attentions=True),
    }
    with torch.no_grad():
        states = {name: model(ids, use_cache=False).last_hidden_state.float() for name, model in models.items()}
        for name, state in states.items():
            error = (state - states["eager"]).norm() / states["eager"].norm()
            if not error < (1e-4 if device == "cpu" else 5e-2):
                sys.exit(f"{name}: relative difference {error:.3g} from eager")
        extra = {name: memory(run, device) for name, run in runs.items()}
        times = interleaved(runs, device, rounds=20, seconds=max(options.seconds, 40.0 if device == "cpu" else 3.0))
    base = times["sdpa, no attentions"]["ms"]
    lines = [[name, f"{t['ms']:.2f}", f"{t['ms'] / base:.3f}×", f"{t['spread']:.0%}"] for name, t in times.items()]
    table(f"Llama with 4 layers, T = {T}", lines, ["", "ms", "relative to sdpa", "spread"])
    finish("huggingface", device, [{"T": T, "times": times, "extra MiB": extra}])


if __name__ == "__main__":
    main()
