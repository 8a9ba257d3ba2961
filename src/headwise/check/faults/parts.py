"""Compares a call for some of the tokens with one for all of them, line by line."""

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.trace import Node, Trace


def by_line(trace: Trace) -> dict[int, list[Node]]:
    """The operations of every line of the learner's file."""
    found: dict[int, list[Node]] = {}
    for node in trace.nodes:
        if node.line is not None:
            found.setdefault(node.line, []).append(node)
    return found


def odd_line(whole: Trace, part: Trace, tokens: range, total: int, chunks: int = 1) -> int | None:
    """The first line whose result for these tokens is not their part of its result for all of them.

    Of several `chunks`, in each of which every line has run, these are the tokens of the second.
    """
    once, several = by_line(whole), by_line(part)
    for line, nodes in several.items():
        first = once.get(line, [])
        ran_once = chunks == 1 or len(nodes) == len(first)
        later = nodes if ran_once else nodes[len(nodes) // chunks :][: len(nodes) // chunks]
        same_steps = [n.op for n in first] == [n.op for n in later]
        alike = zip(first, later, strict=True) if same_steps else zip(first[-1:], later[-1:], strict=False)
        odd = [after for before, after in alike if not _is_part(after.value, before.value, tokens, total)]
        if odd:
            helped = len({node.outer for node in nodes}) > 1  # a helper that several lines call
            return odd[0].outer if helped else line
    return None


def _is_part(part: Tensor, whole: Tensor, tokens: range, total: int) -> bool:
    """Whether a result is the whole one, or its part for these tokens along some axis; True if unknown."""
    if part.dim() != whole.dim():
        return True
    found = [whole] if part.shape == whole.shape else [*_slices(part, whole, tokens, total)]
    return not found or any(torch.allclose(part.double(), x.double(), equal_nan=True) for x in found)


def _slices(part: Tensor, whole: Tensor, tokens: range, total: int) -> Iterator[Tensor]:
    """The parts of the whole for these tokens that have the right shape."""
    for axis in range(part.dim()):
        if part.shape[axis] == len(tokens) and whole.shape[axis] == total:
            piece = whole.narrow(axis, tokens.start, len(tokens))
            for other in range(part.dim()):  # keys up to these tokens
                if other != axis and piece.shape[other] == total and part.shape[other] == tokens.stop:
                    piece = piece.narrow(other, 0, tokens.stop)
            if piece.shape == part.shape:
                yield piece
