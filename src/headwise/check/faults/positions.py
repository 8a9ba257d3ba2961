"""Tables of learned biases by position: read at a length that reaches beyond their ends."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.binding import Bound
from headwise.check.faults.questions import of_stages
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import modules
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import Node

LENGTHS = (101, 37, 16)  # the first that runs; a distance of 100 is beyond most tables


@of_stages
def position_tables(bound: Bound, reading: AttentionReading) -> Found:
    """A table of biases by position must tell visible keys apart, and keys before a query from keys after it."""
    if reading.scores is None or (
        reading.scores.bias is None and not reading.scores.relative and not _looked_up(bound)
    ):
        return
    longer = _longer(bound)
    seen = None if longer is None else read(longer)
    if longer is None or seen is None:
        return
    for node, table in _tables(longer, longer.inputs.query.shape[1]):
        visible = seen.visible[0, 0]
        if _is_constant(table, visible):
            words = f"with {len(visible)} tokens, it is the same for every key that a query may see"
            yield Finding("bias-constant", words, _flattening_line(longer, node, visible) or node.line)
            return
        if (pair := _wrapped(table)) is not None:
            words = (
                f"with {len(visible)} tokens, a key {pair[0]} before the query has the bias of one {pair[1]} after it"
            )
            before = [
                longer.trace.nodes[p] for p in node.parents if not longer.trace.nodes[p].value.is_floating_point()
            ]
            yield Finding("bias-wraps", words, before[-1].line if before else node.line)
            return
    yield Note("good", "biases by position for longer inputs")


@of_stages
def idle_tables(bound: Bound, reading: AttentionReading) -> Found:
    """Numbers that are stored and added to the scores must change the weights."""
    held = [(n, b) for m in modules(bound.thing) for n, b in m.named_buffers(recurse=False)]
    for name, table in held if reading.core.trace is bound.trace else ():
        line = _vain_line(bound, reading, table) if table.is_floating_point() and table.numel() > 1 else None
        if line is not None:
            yield Finding("bias-constant", f"other numbers in {name} give the same result", line)
            return


def _vain_line(bound: Bound, reading: AttentionReading, table: Tensor) -> int | None:
    """The line that adds to the scores what follows from a table, where other numbers in it change nothing."""
    kept = table.clone()
    noise = torch.rand(table.shape, generator=torch.Generator().manual_seed(29), dtype=torch.float64) + 0.1
    try:
        table.add_(noise.to(table.dtype))
        other = bound.called()
    except Exception:  # these numbers are refused
        return None
    finally:
        table.copy_(kept)
    if not bound.gives(other.output) or len(other.trace.nodes) != len(bound.trace.nodes):
        return None
    before = {n.index for n in reading.core.before_softmax()}
    pairs = zip(bound.trace.nodes, other.trace.nodes, strict=True)
    moved = [a for a, b in pairs if a.value.shape == b.value.shape and not torch.equal(a.value, b.value)]
    added = [n.line for n in moved if n.index in before and n.op.rstrip("_") in ("add", "sub")]
    return added[0] if added else None


def _looked_up(bound: Bound) -> bool:
    return any(True for _ in _tables(bound, bound.inputs.query.shape[1]))


def _longer(bound: Bound) -> Bound | None:
    """The longest of some calls that run."""
    for length in LENGTHS:
        with contextlib.suppress(Exception):  # it does not take so many tokens
            return bound.of_length(length)
    return None


def _tables(bound: Bound, T: int) -> Iterator[tuple[Node, Tensor]]:
    """Learned numbers that are looked up for every query and key, as (T, T, anything)."""
    for node in bound.trace.nodes:
        axes = [axis for axis, size in enumerate(node.value.shape) if size == T]
        if node.op in ("index", "embedding") and len(axes) == 2 and node.value.is_floating_point():
            yield node, node.value.movedim(axes, (0, 1)).reshape(T, T, -1)


def _is_constant(table: Tensor, visible: Tensor) -> bool:
    """Whether every row has one value wherever a key is visible."""
    rows = [row[seen] for row, seen in zip(table, visible, strict=True) if int(seen.sum()) > 1]
    return bool(rows) and all(same(row, row[:1].expand_as(row)) for row in rows)


def _wrapped(table: Tensor) -> tuple[int, int] | None:
    """A distance before and one after the query with one bias, where near keys on both sides have different ones."""
    T = len(table)
    by_distance = {d: table.diagonal(d) for d in range(1 - T, T)}
    if not all(same(line, line[:, :1].expand_as(line)) for line in by_distance.values()):
        return None  # it is not a matter of distance
    value = {d: line[:, 0] for d, line in by_distance.items()}
    if any(torch.equal(value[d], value[-d]) for d in (1, 2)) or torch.equal(value[1], value[2]):
        return None
    after = {tuple(value[d].tolist()): d for d in range(T - 1, 0, -1)}
    return next(((d, after[key]) for d in range(1, T) if (key := tuple(value[-d].tolist())) in after), None)


def _flattening_line(bound: Bound, node: Node, visible: Tensor) -> int | None:
    """The first line on the way to the index that gives all visible keys of a row one number."""
    T = len(visible)
    behind = [*bound.trace.ancestors([node.index])]
    whole = [n for n in reversed(behind) if tuple(n.value.shape) == (T, T) and n.index != node.index]
    flat = (n.line for n in whole if _is_constant(n.value.reshape(T, T, 1).double(), visible))
    return next(flat, None)
