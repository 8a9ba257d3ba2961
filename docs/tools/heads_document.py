"""Writes the table and the pictures of docs/heads.md from the built-in model: python docs/tools/heads_document.py"""

from collections.abc import Mapping
from pathlib import Path

import torch
from pictures import maps
from torch import Tensor

from headwise import AttentionMap, load_builtin, watch
from headwise.models import LanguageModel

DOCS = Path(__file__).parents[1]
BEGIN, END = "<!-- heads table -->", "<!-- end of heads table -->"
TEXT = (
    "It was a dark evening in November, and the rain fell upon the roofs of the town. Mr. Harding sat by the fire with "
    "a book upon his knee, but he did not read. He was thinking of the letter which had come that morning from his "
    "brother, and of what his sister would say when she heard of it. At last he rose and went to the window."
)
TOLD = ((4, 2), (5, 4), (5, 6))  # layer and head
Maps = Mapping[str, AttentionMap]


def english(model: LanguageModel) -> Tensor:
    """The tokens of an English passage, (T,)."""
    return model.tokens(TEXT)[0]


def repeated() -> Tensor:
    """A start token and 64 random tokens, twice, (129,)."""
    once = torch.randint(1, 8192, (64,), generator=torch.Generator().manual_seed(0))
    return torch.cat([torch.tensor([0]), once, once])


def look(model: LanguageModel, tokens: Tensor) -> Maps:
    """The maps of all layers."""
    with torch.no_grad(), watch(model.gpt) as seen:
        model.gpt(tokens[None])
    return seen


def table(model: LanguageModel) -> str:
    """The table of the page: what each of its heads attends to."""
    lines = ["| head | text | first token | previous token | induction | reading |", "|---|---|---|---|---|---|"]
    for name, tokens in (("a passage", english(model)), ("64 random tokens, twice", repeated())):
        seen = look(model, tokens)
        for layer, head in TOLD:
            told = seen[f"blocks.{layer}.attention"].summary(tokens)[head]
            numbers = " | ".join(f"{told[key]:.2f}" for key in ("sink", "previous", "induction"))
            lines.append(f"| {layer}.{head} | {name} | {numbers} | {told.reading} |")
    return "\n".join(lines)


def pictures(model: LanguageModel) -> dict[str, str]:
    """The pictures by file name."""
    first, second = look(model, english(model)), look(model, repeated())
    size = 48
    atlas = [
        (f"{layer}.{head}", picture)
        for layer, weights in enumerate(first.values())
        for head, picture in enumerate(weights.pooled(size)[0])
    ]
    few = [
        (f"{layer}.{head}, {name}", seen[f"blocks.{layer}.attention"][0, head])
        for name, seen in (("a passage", first), ("tokens twice", second))
        for layer, head in TOLD
    ]
    return {
        "heads_atlas.svg": maps(atlas, 8, 72, "all heads of the built-in model on a passage"),
        "heads_three.svg": maps(few, 3, 220, "three heads on a passage and on random tokens that repeat", labels=13),
    }


def with_table(page: str, new: str) -> str:
    """The text of the page with a new table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Write the table and the pictures."""
    model, page = load_builtin(), DOCS / "heads.md"
    page.write_text(with_table(page.read_text(encoding="utf-8"), table(model)), encoding="utf-8")
    for name, picture in pictures(model).items():
        (DOCS / "images" / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
