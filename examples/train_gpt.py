"""Train the small GPT of `headwise.models` on a folder of text.

    python examples/train_gpt.py texts/ --out run --minutes 1                     a demonstration on the CPU
    python examples/train_gpt.py texts/ --out run --preset builtin --steps 6000   the built-in model, on one GPU

The folder contains `*.txt` or `*.txt.xz` files in UTF-8. The byte 0x1E separates texts within a file. Files with
"valid" in their name are held out. A stopped run that is started again with the same --out folder continues where it
stopped. On the CPU, the result is bitwise identical, because the data of a step depends only on the seed and the step
number.
"""

import argparse
import json
import lzma
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import documents
from headwise.models import GPT, GPTConfig

START = "<|start|>"
SEPARATOR = "\x1e"
IGNORED = -100  # a target that is not scored
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"d_model": 64, "num_heads": 4, "num_layers": 2, "context_length": 128, "vocab_size": 1024, "rows": 16},
    "builtin": {
        "d_model": 256,
        "num_heads": 8,
        "num_layers": 7,
        "context_length": 1024,
        "vocab_size": 8192,
        "rows": 128,
    },
}


# Text to tokens ------------------------------------------------------------------------------------------------------


def read_texts(folder: Path, held_out: bool) -> list[str]:
    """The held-out texts of the folder, or all others."""
    files = sorted(path for path in folder.iterdir() if path.name.endswith((".txt", ".txt.xz")))
    texts = []
    for path in files:
        if ("valid" in path.name) == held_out:
            raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
            texts += [text for text in raw.decode("utf-8").split(SEPARATOR) if text.strip()]
    if not texts:
        kind = 'whose name contains "valid"' if held_out else "to train on"
        sys.exit(f"{folder} contains no .txt or .txt.xz file {kind}.")
    return texts


def make_tokenizer(texts: list[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer, which can encode and decode any text without loss."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[START],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Corpus:
    """All texts as one sequence of tokens."""

    def __init__(self, texts: list[str], tokenizer: tokenizers.Tokenizer) -> None:
        pieces = [text[i : i + 100_000] for text in texts for i in range(0, len(text), 100_000)]
        ends = torch.tensor([len(text) for text in texts]).add(99_999).div(100_000, rounding_mode="floor").cumsum(0)
        encoded = [torch.tensor(x.ids, dtype=torch.int32) for x in tokenizer.encode_batch_fast(pieces)]
        lengths = torch.tensor([len(x) for x in encoded]).cumsum(0)
        self.tokens = torch.cat(encoded)
        self.ends = lengths[ends - 1]  # where each text ends
        self.begins = torch.cat([torch.zeros(1, dtype=torch.int64), self.ends[:-1]])
        self.bytes = sum(len(text.encode("utf-8")) for text in texts)


# Batches -------------------------------------------------------------------------------------------------------------


class Batches:
    """The batches of a run: rows with one window of one text, and rows packed with several short texts.

    Some of the short texts are repeated passages of words or random tokens. To predict a repetition, a head must find
    what followed last time. This creates induction heads, which form late when training on books alone.
    """

    def __init__(self, corpus: Corpus, config: GPTConfig, rows: int, repeated: float, seed: int) -> None:
        self.corpus, self.config, self.seed = corpus, config, seed
        sizes = corpus.ends - corpus.begins
        self.long = (sizes >= config.context_length).nonzero()[:, 0]
        share = sizes[self.long].sum() / sizes.sum()
        self.packed = max(1, round(rows * repeated)) if share > 0.5 else rows
        self.whole = rows - self.packed

    def at(self, step: int) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Tokens (B, T), targets (B, T) and, for packed rows, the text that each token belongs to."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        groups: list[tuple[Tensor, Tensor, Tensor | None]] = []
        if self.whole:
            rows = torch.stack([self.window(generator) for _ in range(self.whole)])
            groups.append((rows[:, :-1], rows[:, 1:], None))
        packed = [self.row(generator) for _ in range(self.packed)]
        tokens, targets, texts = (torch.stack(parts) for parts in zip(*packed, strict=True))
        return [*groups, (tokens, targets, texts)]

    def window(self, generator: torch.Generator) -> Tensor:
        """The start token followed by a window of one long text, (T + 1,)."""
        T = self.config.context_length
        text = self.long[pick(len(self.long), generator)]
        begin, end = int(self.corpus.begins[text]), int(self.corpus.ends[text])
        first = begin + pick(end - begin - T + 1, generator)
        window = self.corpus.tokens[first : first + T].long()
        return torch.cat([torch.tensor([self.config.start]), window])

    def row(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Short texts side by side until the row is full."""
        T = self.config.context_length
        tokens, targets, texts = [], [], []
        room = T
        while room > 0:
            piece, scored = self.piece(generator)
            text, target = piece[:-1][:room], piece[1:].where(scored[1:], IGNORED)[:room]
            tokens, targets = [*tokens, text], [*targets, target]
            texts.append(torch.full((len(text),), len(texts)))
            room -= len(text)
        return torch.cat(tokens), torch.cat(targets), torch.cat(texts)

    def piece(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A short text with its start token, and a mask of the tokens that are scored."""
        start = torch.tensor([self.config.start])
        kind, n = pick(3, generator), 16 + pick(self.config.context_length // 4, generator)
        if kind == 0:  # random tokens, repeated: only the repetition is predictable
            once = torch.randint(self.config.start + 1, self.config.vocab_size, (n,), generator=generator)
            times = 2 + pick(3, generator)
            return torch.cat([start, once.repeat(times)]), torch.arange(1 + n * times) > n
        text = pick(len(self.corpus.begins), generator)
        begin, end = int(self.corpus.begins[text]), int(self.corpus.ends[text])
        first = begin if end - begin <= n else begin + pick(end - begin - n, generator)
        once = self.corpus.tokens[first : min(first + n, end)].long()
        whole = torch.cat([start, once.repeat(2) if kind == 1 else once])
        return whole, torch.ones(len(whole), dtype=torch.bool)


def pick(below: int, generator: torch.Generator) -> int:
    """A random integer from 0 to below - 1."""
    return int(torch.randint(max(below, 1), (), generator=generator))


# Training ------------------------------------------------------------------------------------------------------------


def loss_of(model: Any, group: tuple[Tensor, Tensor, Tensor | None], device: torch.device) -> tuple[Tensor, Tensor]:
    """The summed loss of a group of rows, and the number of scored tokens."""
    tokens, targets, texts = (None if x is None else x.to(device, non_blocking=True) for x in group)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(tokens, None if texts is None else documents(texts))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, (targets != IGNORED).sum()


@torch.no_grad()
def bits_per_byte(
    model: Any, corpus: Corpus, config: GPTConfig, device: torch.device, most: int | None = None
) -> float:
    """Bits per byte of held-out text. Except at the start of a text, every token has at least half a context before it.

    Args:
        model: the model, compiled or not.
        corpus: the held-out texts.
        config: the sizes of the model.
        device: the device of the model.
        most: the approximate number of windows to evaluate, for a quick estimate; all by default.
    """
    T = config.context_length
    windows, scored = [], []
    for begin, end in zip(corpus.begins.tolist(), corpus.ends.tolist(), strict=True):
        for first in range(begin, end, T // 2):
            window = torch.full((T + 1,), config.start)
            there = corpus.tokens[first : min(first + T, end)].long()
            window[1 : len(there) + 1] = there
            counts = torch.zeros(T, dtype=torch.bool)
            counts[(0 if first == begin else T // 2) : len(there)] = True
            if counts.any():
                windows.append(window)
                scored.append(counts)
    chosen = range(0, len(windows), max(1, len(windows) // most) if most else 1)
    nats, count, rows = 0.0, 0, 32
    for i in range(0, len(chosen), rows):
        part = [chosen[j] for j in range(i, min(i + rows, len(chosen)))]
        part = part + part[:1] * (rows - len(part))  # one shape for the compiler; repeats are not scored
        batch = torch.stack([windows[j] for j in part])
        counts = torch.stack([scored[j] for j in part])
        counts[min(rows, len(chosen) - i) :] = False
        targets = batch[:, 1:].where(counts, IGNORED)
        loss, n = loss_of(model, (batch[:, :-1], targets, None), device)
        nats, count = nats + loss.item(), count + int(n)
    return nats / math.log(2) / count * (len(corpus.tokens) / corpus.bytes)


def learning_rate(step: int, steps: int, peak: float, warmup: int) -> float:
    """Linear warmup to the peak, then cosine decay to one hundredth of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.495 * (1 + math.cos(math.pi * min(share, 1.0))))


def make_optimizer(model: GPT, device: torch.device) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices but not on norms."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), fused=device.type == "cuda")


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write to a temporary file, then rename it, so that a kill leaves either the old checkpoint or the new one."""
    beside = path.with_suffix(".part")
    torch.save(state, beside)
    beside.replace(path)


def described(options: argparse.Namespace, config: GPTConfig) -> dict[str, Any]:
    """The settings that must not change when a run is resumed."""
    said = {name: getattr(options, name) for name in ("steps", "seed", "repeated", "learning_rate", "warmup", "rows")}
    return vars(config) | said


def flops_per_token(model: GPT) -> float:
    """Operations per token, forward and backward: 6 per weight, plus scores and weighted values under a causal mask."""
    config = model.config
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)  # shared embedding: once
    return 6.0 * weights + 6.0 * config.num_layers * config.d_model * config.context_length


def prepare(options: argparse.Namespace) -> tuple[tokenizers.Tokenizer, Corpus, Corpus, GPTConfig]:
    """The tokenizer, the training and held-out tokens, and the model's sizes."""
    preset = PRESETS[options.preset]
    print(f"reading {options.texts} ...", file=sys.stderr)
    texts, held_out = read_texts(options.texts, False), read_texts(options.texts, True)
    path = options.tokenizer or options.out / "tokenizer.json"
    if path.is_file():
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    else:
        print("training the tokenizer ...", file=sys.stderr)
        tokenizer = make_tokenizer(texts, preset["vocab_size"])
    tokenizer.save(str(options.out / "tokenizer.json"))
    print("encoding ...", file=sys.stderr)
    sizes = {name: size for name, size in preset.items() if name not in ("rows", "vocab_size")}
    config = GPTConfig(
        vocab_size=tokenizer.get_vocab_size(),
        position=options.position,
        start=tokenizer.token_to_id(START),
        dropout=options.dropout,
        **sizes,
    )
    return tokenizer, Corpus(texts, tokenizer), Corpus(held_out, tokenizer), config


def train(options: argparse.Namespace) -> None:
    """Train the model, evaluate it along the way, and save checkpoints."""
    options.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, corpus, held_out, config = prepare(options)
    torch.manual_seed(options.seed)
    model = GPT(config).to(device)
    optimizer = make_optimizer(model, device)
    rows = options.rows or PRESETS[options.preset]["rows"]
    batches = Batches(corpus, config, rows, options.repeated, options.seed)
    first, checkpoint = 0, options.out / "checkpoint.pt"
    if checkpoint.is_file():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        if state["run"] != described(options, config):
            sys.exit(f"{checkpoint} belongs to another run: {state['run']}. Change --out, or use the same options.")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"resuming at step {first}", file=sys.stderr)
    run = torch.compile(model) if device.type == "cuda" and not options.no_compile else model
    log = (options.out / "log.jsonl").open("a")

    def note(**what: Any) -> None:
        log.write(json.dumps(what) + "\n")
        log.flush()

    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(corpus.tokens):,} tokens, {rows} rows per step, {device}", file=sys.stderr)
    began, seen, last = time.perf_counter(), 0, time.perf_counter()
    step = first
    for step, groups in ahead(batches, first, options.steps):
        rate = learning_rate(step, options.steps, options.learning_rate, options.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(options.seed * 1_000_003 + step)  # so that dropout, too, depends only on the step
        parts = [loss_of(run, group, device) for group in groups]
        loss = sum(part[0] for part in parts) / sum(part[1] for part in parts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += rows * config.context_length
        done = step + 1
        if done % options.report == 0 or done == options.steps:
            value = loss.item()
            now = time.perf_counter()
            speed = seen / (now - last)
            left = (options.steps - done) * rows * config.context_length / speed
            use = f", {speed * flops_per_token(model) / options.peak_flops:.1%} of peak" if options.peak_flops else ""
            print(
                f"step {done}/{options.steps}  loss {value:.3f}  {speed:,.0f} tokens/s{use}  {left:.0f} s left",
                file=sys.stderr,
            )
            note(step=done, loss=value, rate=rate, norm=norm.item(), tokens_per_second=speed, seconds=now - began)
            last, seen = now, 0
        if done % options.evaluate == 0:
            model.eval()
            quick = bits_per_byte(run, held_out, config, device, most=320)
            model.train()
            print(f"step {done}  held-out bits per byte {quick:.4f} (a sample)", file=sys.stderr)
            note(step=done, bits_per_byte=quick, sample=True)
            last, seen = time.perf_counter(), 0
        over = options.minutes is not None and time.perf_counter() - began > 60 * options.minutes
        if done % options.keep == 0 or done == options.steps or over:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
            save_atomically(state | {"run": described(options, config)}, checkpoint)
            last, seen = time.perf_counter(), 0
        if over:
            break
    finish(model.eval(), run, held_out, tokenizer, options, note, step + 1)


def ahead(batches: Batches, first: int, steps: int) -> Iterator[tuple[int, Any]]:
    """Steps and their batches, which worker processes prepare while the device computes."""
    workers = min(8, (os.cpu_count() or 1) - 1) if torch.cuda.is_available() else 0
    loader = torch.utils.data.DataLoader(
        _Steps(batches, steps),
        batch_size=None,
        sampler=range(first, steps),
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=workers > 0,
    )
    yield from zip(range(first, steps), loader, strict=True)


class _Steps(torch.utils.data.Dataset[Any]):
    def __init__(self, batches: Batches, steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Any:
        return self.batches.at(step)


def finish(
    model: GPT, run: Any, held_out: Corpus, tokenizer: tokenizers.Tokenizer, options: Any, note: Any, steps: int
) -> None:
    """Evaluate the model, print samples, and save the weights."""
    from safetensors.torch import save_file

    device = next(model.parameters()).device
    reached = bits_per_byte(run, held_out, model.config, device)
    print(f"held-out bits per byte {reached:.4f}")
    note(step=steps, bits_per_byte=reached, sample=False)
    for text in ("Once upon a time", "The captain looked at the sea and"):
        ids = [model.config.start, *tokenizer.encode(text).ids]
        said = tokenizer.decode(model.generate(ids, 80, temperature=0.8, top_p=0.95, seed=0).tolist())
        print(f"--- {said}")
        note(step=steps, sample_text=said)
    weights = {name: tensor.to(torch.float16).cpu().contiguous() for name, tensor in model.state_dict().items()}
    config = json.dumps(vars(model.config) | {"steps": steps, "seed": options.seed})
    save_file(weights, options.out / "weights.safetensors", metadata={"format": "headwise gpt 1", "config": config})
    print(f"wrote {options.out / 'weights.safetensors'}")


def arguments() -> argparse.Namespace:
    """The command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="folder with text files")
    parser.add_argument("--out", type=Path, default=Path("run"), help="output folder (default run)")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes of the model (default tiny)")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps; the learning rate depends on them")
    parser.add_argument("--minutes", type=float, help="stop after this many minutes and save a checkpoint")
    parser.add_argument("--rows", type=int, help="rows per step (default from the preset)")
    parser.add_argument("--position", choices=("rotary", "learned"), default="rotary")
    parser.add_argument("--repeated", type=float, default=0.125, help="share of rows with repeated passages")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout on the output of sublayers (default 0)")
    parser.add_argument("--warmup", type=int, default=200, help="steps of learning rate warmup")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json to use instead of training one")
    parser.add_argument("--report", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--evaluate", type=int, default=500, help="steps between evaluations on held-out text")
    parser.add_argument("--keep", type=int, default=500, help="steps between checkpoints")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile on a GPU")
    parser.add_argument("--peak-flops", type=float, help="peak of the device, to report utilization; H200: 989e12")
    return parser.parse_args()


if __name__ == "__main__":
    train(arguments())
