"""Texts for surveys, and the truth about them."""

import random

import torch

from headwise import watch
from headwise.study.survey.corpus import cut

WORDS = ["the", "captain", "looked", "at", "sea", "and", "said", "nothing", "for", "a", "while", "then", "rain", "fell"]


def sentence(words, seed):
    draw = random.Random(seed)  # noqa: S311
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "."


def dense_windows(model, texts, context):
    """Every window's tokens, and its weights layer by layer: a list of (H, T, T)."""
    found = []
    for text in texts:
        for ids in cut(model.codec.encode(text), model.codec, context):
            with torch.no_grad(), watch(model.gpt) as seen:
                model.gpt(torch.tensor([ids]))
            found.append((torch.tensor(ids), [weights[:][0] for weights in seen.values()]))
    return found
