"""Texts for surveys."""

import random

WORDS = ["the", "captain", "looked", "at", "sea", "and", "said", "nothing", "for", "a", "while", "then", "rain", "fell"]


def sentence(words, seed):
    draw = random.Random(seed)  # noqa: S311
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "."
