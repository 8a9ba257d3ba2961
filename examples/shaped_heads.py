"""Create attention maps of any length that resemble those of trained models, to try out and benchmark the page.

    python examples/shaped_heads.py --tokens 16384 --layers 4 --heads 8 heads.html

Queries and keys are constructed so that each head attends to one thing: the first token, the previous token, nearby
tokens, copies of the same token, the token after an earlier copy, a few marked tokens, or all tokens equally.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import headwise
from headwise import AttentionMap, Scoring, causal
from headwise.view import View

WIDTH = 64  # head dimension
WORDS = ["the", "captain", "looked", "at", "sea", "and", "boat", "boy", "said", "where", "was", "on"]
WORDS += ["of", "ship", "wind", "night", "old", "man", "hand", "door"]


def tokens(T: int) -> Tensor:
    """Random words with repeated passages."""
    ids = torch.randint(len(WORDS), (T,), generator=torch.Generator().manual_seed(0))
    half = T // 2
    ids[half : 2 * half] = ids[:half].roll(half // 3)
    return ids


def positions(T: int, shift: int, sharpness: float) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product is largest where the key is `shift` positions before the query."""
    place = torch.arange(T)[:, None].double()
    waves = torch.exp(-torch.arange(WIDTH // 2) * 9.0 / (WIDTH // 2)) * 3.0

    def turned(at: Tensor) -> Tensor:
        return torch.cat([(at * waves).cos(), (at * waves).sin()], -1).float()

    return turned(place - shift) * sharpness, turned(place)


def habits(ids: Tensor) -> list[Callable[[], tuple[Tensor, Tensor]]]:
    """Functions that return the query and key (T, 64) of one kind of head."""
    T = len(ids)
    table = torch.nn.functional.normalize(torch.randn(len(WORDS), WIDTH), dim=-1)
    before = torch.cat([ids[:1], ids[:-1]])
    noise = torch.randn(T, WIDTH) * 0.3

    def sink() -> tuple[Tensor, Tensor]:
        key = torch.randn(T, WIDTH) * 0.2
        key[0] = 4.0
        return torch.ones(T, WIDTH) * 0.25 + noise, key

    def marked() -> tuple[Tensor, Tensor]:
        key = torch.randn(T, WIDTH) * 0.4
        key[::97] += 1.5
        return torch.ones(T, WIDTH) * 0.5 + noise, key

    return [
        sink,
        lambda: positions(T, 1, 4.0),
        lambda: positions(T, 3, 1.2),
        lambda: (table[ids] * 60, table[ids]),
        lambda: (table[ids] * 60, table[before]),
        marked,
        lambda: (noise, noise),
        lambda: positions(T, 60, 2.0),
    ]


def shaped(T: int, layers: int, heads: int) -> View:
    """The view of a model with this many layers and heads on T tokens."""
    torch.manual_seed(0)
    ids = tokens(T)
    maps = []
    for layer in range(layers):
        kinds = habits(ids)
        made = [kinds[(head + layer) % len(kinds)]() for head in range(heads)]
        query, key = (torch.stack([pair[i] for pair in made])[None] for i in (0, 1))
        maps.append(AttentionMap(query, key, Scoring(mask=causal())))
    return headwise.view(maps, ids, words=[f" {WORDS[i]}" for i in ids.tolist()])


def main() -> None:
    """Create the maps, write the page, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="HTML file to write")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    options = parser.parse_args()
    start = time.perf_counter()
    path = shaped(options.tokens, options.layers, options.heads).save(options.page)
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
