"""Training the small GPT with our layer, with `nn.MultiheadAttention` and with a hand-wired block: loss and throughput.

    python benchmarks/train.py texts/                    the CPU: two layers, 64 wide
    python benchmarks/train.py texts/ --device cuda      the GPU: the sizes of the built-in model, bfloat16, compiled

All start from the same weights and read the same batches. The loss curves are compared before speeds are told: they
must overlap over the first 200 steps. Positions are learned, which all three know.
"""

import copy
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import finish, parser, table
from torch import Tensor, nn

from headwise.models import GPT, GPTConfig

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
STEPS = {"cpu": 40, "cuda": 200}
ROWS = {"cpu": 8, "cuda": 128}


class TorchBlock(nn.Module):
    """`nn.MultiheadAttention` in the place of our layer."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(ours.d_model, ours.num_heads, bias=False, batch_first=True)
        (q, k, v), _ = ours.projections()
        self.inner.in_proj_weight.data = torch.cat([q, k, v]).detach().clone()
        self.inner.out_proj.weight.data = ours.out_proj.weight.detach().clone()

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Causal self-attention."""
        hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return self.inner(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]


class HandWired(nn.Module):
    """A fused projection and torch's attention, with no checks."""

    def __init__(self, ours: Any) -> None:
        super().__init__()
        self.heads = ours.num_heads
        self.qkv, self.out = (nn.Linear(ours.d_model, n * ours.d_model, bias=False) for n in (3, 1))
        (q, k, v), _ = ours.projections()
        self.qkv.weight.data = torch.cat([q, k, v]).detach().clone()
        self.out.weight.data = ours.out_proj.weight.detach().clone()

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        """Causal self-attention."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def with_blocks(model: GPT, kind: type[nn.Module] | None) -> GPT:
    """A copy of the model with other attentions of the same weights."""
    other = copy.deepcopy(model)
    for block in other.blocks:
        if kind is not None:
            block.attention = kind(block.attention)
    return other


def example() -> Any:
    """The training script as a module."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def curve(model: GPT, batches: Any, device: torch.device, steps: int, script: Any) -> tuple[list[float], float]:
    """Losses of the first steps, and tokens per second over their second half."""
    optimizer = script.make_optimizer(model, device)
    run = torch.compile(model) if device.type == "cuda" else model
    losses, middle = [], 0.0
    for step in range(steps):
        if step == steps // 2:
            wait(device)
            middle = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = script.learning_rate(step, 2000, 1e-3, 100)
        total, count = script.loss_of(run, batches[step], device)
        loss = total / count
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    wait(device)
    tokens = sum(batches[step][0].numel() for step in range(steps // 2, steps))
    return torch.stack(losses).tolist(), tokens / (time.perf_counter() - middle)


def wait(device: torch.device) -> None:
    """Until everything that was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Train three times, compare, print."""
    options_parser = parser(__doc__)
    options_parser.add_argument("texts", type=Path)
    options_parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to use instead of making one")
    options = options_parser.parse_args()
    script, device = example(), torch.device(options.device)
    preset = dict(script.PRESETS["builtin" if device.type == "cuda" else "tiny"])
    texts = script.read_texts(options.texts, True)
    tokenizer = script.make_tokenizer(texts, preset.pop("vocab_size"))
    preset.pop("rows")
    config = GPTConfig(tokenizer.get_vocab_size(), position="learned", **preset)
    made = script.Batches(script.Corpus(texts, tokenizer), config, ROWS[device.type], 0.0, seed=0)
    batches = [made.at(step)[0] for step in range(STEPS[device.type])]
    torch.manual_seed(0)
    model = GPT(config).to(device)
    kinds = {"headwise": None, "hand-wired": HandWired, "nn.MultiheadAttention": TorchBlock}
    curves = {}
    for name, kind in kinds.items():
        curves[name] = curve(with_blocks(model, kind).to(device), batches, device, STEPS[device.type], script)
    ours, speed = curves["headwise"]
    lines = []
    for name, (losses, tokens) in curves.items():
        apart = max(abs(a - b) for a, b in zip(losses, ours, strict=True))
        if apart > 0.05:
            sys.exit(f"{name}: the loss curve is {apart:.3f} nats away from ours")
        lines.append([name, f"{losses[-1]:.3f}", f"{apart:.4f}", f"{tokens:,.0f}", f"{speed / tokens:.2f}×"])
    table(f"small GPT, {STEPS[device.type]} steps", lines, ["", "loss", "apart", "tokens/s", "ours faster"])
    rows = [
        {"block": name, "loss": losses[-1], "tokens_per_second": tokens} for name, (losses, tokens) in curves.items()
    ]
    finish("train", options.device, rows)


if __name__ == "__main__":
    main()
