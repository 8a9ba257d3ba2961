"""Code that takes queries or keys chunk by chunk: read as one chunk, then proven to give the same for several."""

import inspect
import itertools
import re

from torch import nn

from headwise.check.arguments import parameters_of, plain
from headwise.check.binding import Bound
from headwise.check.faults.parts import by_line, odd_line
from headwise.check.faults.questions import influence
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import Node, Trace, error_line

CHUNK = re.compile(r"chunk|block|tile|bucket")
WHOLE = 512  # a chunk that holds every input
SMALL = 3  # tokens in a chunk, where no chunk but the last is shorter
LARGE = 16  # tokens in a chunk, of a default that is tried too
PARTS = 4  # chunks that are compared with the whole


def in_one_chunk(bound: Bound) -> tuple[Bound, AttentionReading | None]:
    """The same class with chunks that hold the whole input, where attention is read only then."""
    reading = read(bound)
    names = _chunk_sizes(bound)
    if (reading is not None and reading.between_tokens) or not names or bound.built.config is not None:
        return bound, reading
    built = bound.built.changed(bound.case.target, dict.fromkeys(names, WHOLE))
    try:
        other = bound.called(thing=bound.rebuilt(**dict.fromkeys(names, WHOLE)), built=built)
    except Exception:  # a chunk must divide the length, or has another meaning
        return bound, reading
    seen = read(other)
    return (other, seen) if seen is not None and seen.between_tokens else (bound, reading)


def _chunk_sizes(bound: Bound) -> dict[str, int]:
    """Arguments of the constructor that say how many tokens are computed at once, and their defaults."""
    parameters = parameters_of(bound.case.target) if inspect.isclass(bound.case.target) else []
    sized = {p.name: p.default for p in parameters if CHUNK.search(plain(p.name)) and type(p.default) is int}
    return {name: size for name, size in sized.items() if bound.built.arguments.get(name, WHOLE) == WHOLE}


def chunks(bound: Bound, reading: AttentionReading | None) -> Found:
    """The result must not depend on how many tokens are computed at once."""
    names = _chunk_sizes(bound)
    if reading is None or not names or not isinstance(bound.thing, nn.Module) or bound.built.config is not None:
        return
    try:
        whole = bound.rebuilt(**dict.fromkeys(names, WHOLE))
        whole.load_state_dict(bound.thing.state_dict(), strict=False)
    except Exception:  # it is the size of a table
        return
    if not bound.gives(bound.output_of(bound.inputs, thing=whole)):
        return  # they are no chunks of one computation
    for size in dict.fromkeys((SMALL, *(n for n in names.values() if n <= LARGE))):
        thing = bound.rebuilt(**dict.fromkeys(names, size))
        thing.load_state_dict(bound.thing.state_dict(), strict=False)
        longer = bound.of_length(PARTS * size, thing=whole)
        words = f"{PARTS * size} tokens with {next(iter(names))}={size}"
        try:
            other = longer.called(thing=thing)
        except Exception as error:
            said = f"{words}: {type(error).__name__}: {error}".splitlines()[0][:200]
            yield Finding("chunks-differ", said, error_line(error, bound.case.filename))
            return
        if other.output is None or longer.output is None or not same(other.output, longer.output):
            if not _depends_on_others(other, size):
                yield Note("untried", f"what {next(iter(names))} does to the result")
                return
            words = f"{words} give a different result than one chunk"
            yield Finding("chunks-differ", words, _line(longer, other, size))
            return
    yield Note("good", f"{next(iter(names))} does not change the result")


def _depends_on_others(parts: Bound, size: int) -> bool:
    """Whether tokens of one chunk influence another, unlike where attention is meant to stay inside a block."""
    moved = influence(parts)
    return moved is None or bool(moved[size:, :size].any())


def _line(whole: Bound, parts: Bound, size: int) -> int | None:
    """The line that goes wrong in the second chunk: a running sum, or else the first that is no part of the whole.

    Of two running sums, the one that is not rescaled where the other is comes first.
    """
    lines = by_line(parts.trace)
    sums = {line: kind for line, nodes in lines.items() if (kind := _running_sum(nodes, parts.trace))}
    if sums:
        return next((line for line, kind in sums.items() if kind == "plain"), max(sums))
    return odd_line(whole.trace, parts.trace, range(size, 2 * size), PARTS * size, chunks=PARTS)


def _running_sum(nodes: list[Node], trace: Trace) -> str:
    """plain or rescaled, where a line adds to what it computed for the chunk before; otherwise empty."""
    added = [n for n in nodes if n.op.rstrip("_") == "add"]
    for before, after in itertools.pairwise(added):
        if before.index in after.parents:
            return "plain"
        scaled = [trace.nodes[p] for p in after.parents if trace.nodes[p].op.rstrip("_") == "mul"]
        if any(before.index in n.parents for n in scaled):
            return "rescaled"
    return ""
