"""Rotary tables for classes that take them in a call, in every usual layout."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headwise.check.sizes import CallSizes

TWICE = re.compile(r"\b(cat|concat|concatenate)\(\s*[\[(]\s*([\w.]+),\s*\2\s*[\])]")  # cat((angles, angles), -1)
NEIGHBORS = re.compile(r"repeat_interleave\(|\bstack\(\s*[\[(]\s*([\w.]+),\s*\1\s*[\])]|\brepeat\(.*\(\w+ r\)")


def rotary_tables(word: str, sizes: CallSizes) -> Iterator[Any]:
    """Tables of rotations, likeliest first; `word` says whether only cosines or sines are wanted."""
    if word in ("cos", "sin"):
        yield from (pair[word == "sin"] for pair in rotary_pairs(sizes))
        return
    angles = _angles(sizes)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = rotary_pairs(sizes)
    yield from (None, turns, *itertools.islice(pairs, 1), angles)
    yield from (turns[None], turns[None, None], angles[None], *pairs)


def rotary_pairs(sizes: CallSizes) -> Iterator[tuple[Tensor, Tensor]]:
    """Cosines and sines: of halves, of neighbors, or once for two numbers; with one batch, without, for all heads."""
    angles = _angles(sizes)
    widths = (torch.cat([angles, angles], -1), angles.repeat_interleave(2, -1), angles)
    for several in ((widths[:1], ((1,), ())), (widths[1:], ((1,), ())), (widths, ((1, 1), (sizes.B,)))):
        for table, axes in itertools.product(*several):
            whole = table.expand(*axes, *table.shape).contiguous()
            yield whole.cos(), whole.sin()


def _angles(sizes: CallSizes) -> Tensor:
    """(T, D / 2)"""
    angles = torch.arange(sizes.T)[:, None] / 10000 ** (torch.arange(0, sizes.D, 2) / sizes.D)
    return angles.double()


def layout_of(table: Tensor) -> str:
    """Which numbers of a head a table turns together: halves, neighbors, or one angle for two numbers."""
    half = table.shape[-1] // 2
    if half and torch.equal(table[..., :half], table[..., half:]):
        return "halves"
    return "neighbors" if half and torch.equal(table[..., ::2], table[..., 1::2]) else "once"


def layouts_told(source: str) -> set[str]:
    """The layouts of the tables that a file makes itself; empty where it makes none."""
    written = [line for line in source.splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(written)
    return {name for name, pattern in (("halves", TWICE), ("neighbors", NEIGHBORS)) if pattern.search(text)}
