"""Train the small GPT with our layer, `nn.MultiheadAttention` and a hand-wired block, and compare loss and throughput.

    python benchmarks/train.py texts/                    the CPU: two layers, width 64
    python benchmarks/train.py texts/ --device cuda      the GPU: the sizes of the built-in model, bfloat16, compiled

All models start from the same weights, read the same batches and take turns. The script first compares the loss curves
over the first 200 steps. They may differ about as much as two runs of one model with reordered rows, which differ only
by rounding. Only then does it report speeds. Positions are learned, because all three support that.
"""

import copy
import importlib.util
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from harness import finish, parser, table
from torch import Tensor, nn

from headwise.models import GPT, GPTConfig

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
STEPS = {"cpu": 40, "cuda": 200}
ROWS = {"cpu": 8, "cuda": 128}
YARDSTICK = "hand-wired, rows in another order"
ROUNDS = 10  # the models take turns; the first turn compiles and is not timed


class TorchBlock(nn.Module):
    """`nn.MultiheadAttention` in place of our layer."""

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
    """A fused projection and torch's attention, without checks."""

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
    """A copy of the model with other attention layers that have the same weights."""
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


class Learner:
    """One model with its optimizer, trained a few steps at a time."""

    def __init__(self, model: GPT, device: torch.device, script: Any, turned: bool = False) -> None:
        self.model, self.device, self.script, self.turned = model.to(device), device, script, turned
        self.optimizer = script.make_optimizer(model, device)
        self.run = torch.compile(model) if device.type == "cuda" else model
        self.losses: list[Tensor] = []

    def learn(self, batches: Any) -> float:
        """Train on these batches and return the tokens per second."""
        wait(self.device)
        began = time.perf_counter()
        for batch in batches:
            for group in self.optimizer.param_groups:
                group["lr"] = self.script.learning_rate(len(self.losses), 2000, 1e-3, 100)
            rows = [part if part is None else part.flip(0) for part in batch] if self.turned else batch
            total, count = self.script.loss_of(self.run, rows, self.device)
            loss = total / count
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())
        wait(self.device)
        return sum(batch[0].numel() for batch in batches) / (time.perf_counter() - began)


def wait(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def prepared(options: Any, script: Any, device: torch.device) -> tuple[GPT, list[Any]]:
    """The initial model and the batches of all steps."""
    preset = dict(script.PRESETS["builtin" if device.type == "cuda" else "tiny"])
    texts = script.read_texts(options.texts, device.type == "cpu")
    vocab_size, _ = preset.pop("vocab_size"), preset.pop("rows")
    given = options.tokenizer and tokenizers.Tokenizer.from_file(str(options.tokenizer))
    tokenizer = given or script.make_tokenizer(texts, vocab_size)
    config = GPTConfig(tokenizer.get_vocab_size(), position="learned", **preset)
    made = script.Batches(script.Corpus(texts, tokenizer), config, ROWS[device.type], 0.0, seed=0)
    torch.manual_seed(0)
    return GPT(config), [made.at(step)[0] for step in range(STEPS[device.type])]


def main() -> None:
    """Train the models in turns, compare them, and print the results."""
    options_parser = parser(__doc__)
    options_parser.add_argument("texts", type=Path)
    options_parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of training one")
    options = options_parser.parse_args()
    script, device = example(), torch.device(options.device)
    model, batches = prepared(options, script, device)
    kinds = {"headwise": None, "hand-wired": HandWired, "nn.MultiheadAttention": TorchBlock}
    learners = {name: Learner(with_blocks(model, kind), device, script) for name, kind in kinds.items()}
    learners[YARDSTICK] = Learner(with_blocks(model, HandWired), device, script, turned=True)
    speeds: dict[str, list[float]] = {name: [] for name in learners}
    size = len(batches) // ROUNDS
    for i in range(0, len(batches), size):
        for name, learner in learners.items():
            speeds[name].append(learner.learn(batches[i : i + size]))
        print(f"{i + size} of {len(batches)} steps", file=sys.stderr)
    report(learners, {name: median(found[1:]) for name, found in speeds.items()}, options.device)


def apart_by(losses: list[float], others: list[float]) -> float:
    """The largest difference between two curves at any step."""
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def report(learners: dict[str, Learner], speeds: dict[str, float], device: str) -> None:
    """Check that the loss curves agree, then report the speeds."""
    curves = {name: torch.stack(learner.losses).tolist() for name, learner in learners.items()}
    lines, rows = [], []
    rounding = apart_by(curves[YARDSTICK], curves["hand-wired"])
    print(f"one model with reordered rows: loss curves differ by at most {rounding:.4f} nats")
    for name, losses in curves.items():
        apart = apart_by(losses, curves["headwise"])
        if apart > max(0.01, 2 * rounding):
            sys.exit(
                f"{name}: the loss curve differs from ours by {apart:.3f} nats; rounding alone gives {rounding:.3f}"
            )
        ratio = speeds["headwise"] / speeds[name]
        lines.append([name, f"{losses[-1]:.3f}", f"{apart:.4f}", f"{speeds[name]:,.0f}", f"{ratio:.3f}×"])
        rows.append({"block": name, "loss": losses[-1], "apart": apart, "tokens_per_second": speeds[name]})
    steps = len(curves["headwise"])
    table(f"small GPT, {steps} steps", lines, ["", "loss", "difference", "tokens/s", "speedup of headwise"])
    finish("train", device, rows)


if __name__ == "__main__":
    main()
