"""How much context the built-in model uses: python docs/tools/context_study.py TEXT

The loss of 64 tokens at eight places of a text, if the model reads only so many tokens before them. A trace cannot find
support in tokens that the model does not use.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from headwise import load_builtin

COUNT, PLACES, FIRST, LENGTHS = 64, 8, 16448, (64, 256, 512, 1024, 2048, 4096, 8192)


def main() -> None:
    """Print a table of losses by the length of the context."""
    model = load_builtin()
    text = Path(sys.argv[1]).read_text(encoding="utf-8")[:600_000]
    tokens = model.tokens(text, most=sys.maxsize)[0]
    stops = torch.linspace(FIRST, len(tokens), PLACES).long().tolist()
    print("| tokens before | loss of the next 64 tokens |")
    print("|---|---|")
    for length in LENGTHS:
        losses = []
        for stop in stops:
            part = torch.cat([torch.tensor([model.gpt.config.start]), tokens[stop - COUNT - length : stop]])[None]
            with torch.no_grad():
                logits = model.gpt.logits(model.gpt.features(part)[:, -COUNT - 1 : -1])
            losses.append(F.cross_entropy(logits[0], part[0, -COUNT:]))
        numbers = torch.stack(losses)
        print(f"| {length:,} | {numbers.mean():.2f} ± {1.96 * numbers.std() / PLACES**0.5:.2f} |", flush=True)


if __name__ == "__main__":
    main()
