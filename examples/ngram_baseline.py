"""Bits per byte of an n-gram byte model, the baseline for the small GPT.

    python examples/ngram_baseline.py texts/ --order 5

The model interpolates all orders with absolute discounting: n-grams that were seen give part of their count to the next
shorter context. The script reads the folder in the same way as `train_gpt.py`. It joins texts with the byte 0x1E, which
it does not score.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from train_gpt import SEPARATOR, read_texts

DISCOUNT = 0.75


def joined(texts: list[str], order: int) -> np.ndarray:
    """All bytes, with enough separators between texts that no n-gram spans two of them."""
    return np.frombuffer((SEPARATOR * (order - 1)).join(["", *texts]).encode("utf-8"), dtype=np.uint8)


def codes(data: np.ndarray, length: int) -> np.ndarray:
    """Every run of `length` bytes as one integer; run i ends at byte i + length - 1."""
    found = np.zeros(len(data) - length + 1, dtype=np.uint64)
    for offset in range(length):
        found = (found << np.uint64(8)) | data[offset : len(data) - length + 1 + offset].astype(np.uint64)
    return found


def looked_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of every wanted key, or 0 if the key is missing."""
    place = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)


def probabilities(train: np.ndarray, valid: np.ndarray, order: int) -> np.ndarray:
    """The probability of every byte of `valid` from position order - 1 on, given the bytes before it."""
    scored = np.full(len(valid) - order + 1, 1 / 256)
    for length in range(1, order + 1):
        print(f"counting runs of {length} ...", file=sys.stderr)
        grams, counts = np.unique(codes(train, length), return_counts=True)
        # The n-grams are sorted, so those of one context are adjacent.
        contexts, first = np.unique(grams >> np.uint64(8), return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(grams)))
        wanted = codes(valid, length)[order - length :]
        count = looked_up(grams, counts, wanted)
        total = looked_up(contexts, totals, wanted >> np.uint64(8))
        kind = looked_up(contexts, kinds, wanted >> np.uint64(8))
        seen = np.maximum(count - DISCOUNT, 0) + DISCOUNT * kind * scored
        scored = np.where(total > 0, seen / np.maximum(total, 1), scored)
    return scored


def main() -> None:
    """Count the training texts, then score the held-out texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="the folder of text")
    parser.add_argument("--order", type=int, default=5, help="length of the longest n-gram in bytes (default 5)")
    options = parser.parse_args()
    train = joined(read_texts(options.texts, False), options.order)
    valid = joined(read_texts(options.texts, True), options.order)
    scored = probabilities(train, valid, options.order)
    text = valid[options.order - 1 :] != ord(SEPARATOR)
    print(f"{options.order}-gram byte model: {-np.log2(scored[text]).mean():.4f} bits per byte")


if __name__ == "__main__":
    main()
