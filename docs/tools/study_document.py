"""Writes the study in docs/heads.md from the built-in model: python docs/tools/study_document.py

12 texts of a start token and 64 random tokens, twice. Each condition replaces one head; controls replace every other
head of layers 0 to 4, one at a time. Importance is measured on these texts and on 12 passages of the page's text.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from heads_document import TEXT
from torch import Tensor

from headwise import gate, importance, induction, load_builtin, patch, silence, watch
from headwise.models import LanguageModel

DOCS = Path(__file__).parents[1]
BEGIN, END = "<!-- study table -->", "<!-- end of study table -->"
SAMPLES, LENGTH, HEADS = 12, 64, 8
FEEDER, FED = ("blocks.4.attention", 2), ("blocks.5.attention", (4, 6))


def repeats(seed: int = 1) -> Tensor:
    """Start tokens and random tokens, twice, (SAMPLES, 129)."""
    once = torch.randint(1, 8192, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(seed))
    return torch.cat([torch.zeros(SAMPLES, 1, dtype=torch.long), once, once], 1)


def passages(model: LanguageModel) -> Tensor:
    """Windows of 32 tokens of the page's text, (SAMPLES, 32)."""
    tokens = model.tokens(TEXT)[0]
    steps = torch.linspace(0, len(tokens) - 32, SAMPLES).long().tolist()
    return torch.stack([tokens[start : start + 32] for start in steps])


def measured(model: LanguageModel, tokens: Tensor) -> Tensor:
    """Induction weight of the two heads and the loss, on the second reading, for each text: (SAMPLES, 3)."""
    with torch.no_grad(), watch(model.gpt, layers=[FED[0]]) as seen:
        logits = model.gpt(tokens)
    mass = seen[FED[0]].mass(induction(tokens))[:, FED[1], LENGTH + 1 : -1].mean(2)
    each = F.cross_entropy(logits[:, LENGTH + 1 : -1].transpose(1, 2), tokens[:, LENGTH + 2 :], reduction="none")
    return torch.cat([mass, each.mean(1, keepdim=True)], 1)


def conditions(model: LanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    """What is measured in each condition, (texts, 3) each."""
    with torch.no_grad(), watch(model.gpt, outputs=True) as seen:
        model.gpt(tokens)
    name, head = FEEDER
    found = {"the whole model": measured(model, tokens)}
    with silence(model.gpt, {name: head}):
        found["4.2 silent"] = measured(model, tokens)
    with patch(model.gpt, seen.outputs.mean(), {name: head}):
        found["4.2 replaced by its mean"] = measured(model, tokens)
    with patch(model.gpt, seen.outputs.resampled(), {name: head}):
        found["4.2 from another text"] = measured(model, tokens)
    with gate(model.gpt, {name: torch.tensor([1.0, 1.0, 0.5] + [1.0] * 5)}):
        found["4.2 at half strength"] = measured(model, tokens)
    rows = []
    for layer in range(5):
        for other in range(HEADS):
            if (f"blocks.{layer}.attention", other) != FEEDER:
                with silence(model.gpt, {f"blocks.{layer}.attention": other}):
                    rows.append(measured(model, tokens).mean(0))
    found["one of the 39 other heads silent, mean"] = torch.stack(rows).mean(0, keepdim=True)
    worst = torch.stack([*torch.stack(rows).amin(0)[:2], torch.stack(rows).amax(0)[2]])
    found["the worst of these, column by column"] = worst[None]
    return found


def study(model: LanguageModel) -> str:
    """The table of the page and the lines below it."""
    lines = ["| | 5.4 induction | 5.6 induction | loss, nats |", "|---|---|---|---|"]
    for words, numbers in conditions(model, repeats()).items():
        mean, error = numbers.mean(0), numbers.std(0, correction=min(1, len(numbers) - 1)) / len(numbers) ** 0.5
        cells = [
            f"{m:.3f} ± {1.96 * e:.3f}" if len(numbers) > 1 else f"{m:.3f}" for m, e in zip(mean, error, strict=True)
        ]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    lines += [
        "",
        "| rank correlation of all 56 heads' importance | by gradient and by silence | by silence and by mean |",
    ]
    lines.append("|---|---|---|")
    for words, tokens in (("repeated random tokens", repeats()[:4, :]), ("passages", passages(model))):
        slopes, silent, mean = (
            importance(model.gpt, tokens, by=by, controls=0) for by in ("gradient", "silence", "mean")
        )
        lines.append(f"| {words} | {slopes.rank_correlation(silent):.2f} | {silent.rank_correlation(mean):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Write the study."""
    page = DOCS / "heads.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{study(load_builtin())}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
