"""Texts cut into windows that a model can read, and windows of one length put together."""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from headwise.errors import OptionError
from headwise.study.survey.documents import Bad
from headwise.study.survey.subject import Subject

BUFFERED = 8  # full batches of tokens that may wait for others of their length


class Window(NamedTuple):
    """Tokens to read at once, and how to report their document."""

    ids: list[int]
    refused: Callable[[str], Bad]


def cut(ids: list[int], subject: Subject, context: int) -> list[list[int]]:
    """Tokens in as few windows as they take, all of about one length, each with what a text begins and ends with.

    >>> from torch import nn
    >>> cut([5, 6, 7, 8, 9], Subject("", nn.Identity(), list, before=(1,)), context=4)
    [[1, 5, 6], [1, 7, 8, 9]]
    """
    room = context - len(subject.before) - len(subject.after)
    count = -(-len(ids) // room)
    edges = [len(ids) * k // count for k in range(count + 1)] if count else []
    return [[*subject.before, *ids[a:b], *subject.after] for a, b in pairwise(edges)]


def check_context(context: int | None, subject: Subject, most: int) -> int:
    """How many tokens a window has: what was asked for, or the model's own up to `most`."""
    least = len(subject.before) + len(subject.after) + 1
    if context is None:
        return min(most, subject.context or most)
    if context < least or context > (subject.context or context):
        bound = f" to {subject.context}, which {subject.name} was made for" if subject.context else " or more"
        raise OptionError(f"context={context}: expected {least}{bound}.")
    return context


def batches(windows: Iterable[Window], size: int, context: int) -> Iterator[list[Window]]:
    """Up to `size` windows of one length at a time. Nothing is padded, and few wait."""
    waiting: dict[int, list[Window]] = {}
    tokens = 0
    for window in windows:
        length = len(window.ids)
        same = waiting.setdefault(length, [])
        same.append(window)
        tokens += length
        if len(same) == size:
            yield waiting.pop(length)
            tokens -= length * size
        elif tokens > BUFFERED * size * context:
            yield from waiting.values()
            waiting, tokens = {}, 0
    yield from waiting.values()
