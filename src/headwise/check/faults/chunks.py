"""Code that takes queries or keys chunk by chunk: read as one chunk, then proven to give the same for several."""

import contextlib
import inspect
import itertools
import re
from dataclasses import replace

from torch import nn

from headwise.check.arguments import parameters_of, plain
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, make_inputs
from headwise.check.faults.parts import by_line, odd_line
from headwise.check.faults.questions import influence
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import call_parameters
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import Node, Trace, error_line

CHUNK = re.compile(r"chunk|block|tile|bucket")
PARTWISE = re.compile(r"\brange\([^,()]*,[^()]*(\([^()]*\))?,|\.(split|chunk)\(")  # loops with a step, and pieces
WHOLE = 512  # a chunk that holds every input
SMALL = 3  # tokens in a chunk, where no chunk but the last is shorter
LARGE = 16  # tokens in a chunk, of a default that is tried too
PARTS = 4  # chunks that are compared with the whole
FEW = 3  # tokens that fit into any chunk


def in_one_chunk(bound: Bound) -> tuple[Bound, AttentionReading | None]:
    """The same class with chunks that hold the whole input, where attention is read only then.

    Where no argument of the constructor says how large a chunk is, the input is as short as a chunk may be.
    """
    reading = read(bound)
    if reading is not None and reading.between_tokens:
        return bound, reading
    for attempt in (_of_large_chunks, _of_few_tokens):
        with contextlib.suppress(Exception):  # a chunk must divide the length, or has another meaning
            other = attempt(bound)
            seen = None if other is None else read(other)
            if other is not None and seen is not None and seen.between_tokens:
                return other, seen
    return bound, reading


def _of_large_chunks(bound: Bound) -> Bound | None:
    """The same class, made with chunks that hold every input."""
    names = _chunk_sizes(bound)
    if not names or bound.built.config is not None:
        return None
    built = bound.built.changed(bound.case.target, dict.fromkeys(names, WHOLE))
    return bound.called(thing=bound.rebuilt(**dict.fromkeys(names, WHOLE)), built=built)


def _of_few_tokens(bound: Bound) -> Bound | None:
    """The same object, called with a few tokens, where the code takes tokens part by part."""
    if bound.form.layout != PLAIN or bound.form.fixed or not PARTWISE.search(bound.case.source):
        return None
    sizes = replace(bound.sizes, T=FEW)
    return bound.called(sizes=sizes, in_parts=True, inputs=make_inputs(bound.form, sizes))


def _chunk_sizes(bound: Bound) -> dict[str, int]:
    """Arguments of the constructor that say how many tokens are computed at once, and their defaults."""
    parameters = parameters_of(bound.case.target) if inspect.isclass(bound.case.target) else []
    sized = {p.name: p.default for p in parameters if is_chunk_size(p)}
    return {name: size for name, size in sized.items() if bound.built.arguments.get(name, WHOLE) == WHOLE}


def is_chunk_size(p: inspect.Parameter) -> bool:
    """Whether an argument says how many tokens are computed at once."""
    return type(p.default) is int and CHUNK.search(plain(p.name)) is not None


def chunks(bound: Bound, reading: AttentionReading | None) -> Found:
    """The result must not depend on how many tokens are computed at once."""
    for p in filter(is_chunk_size, call_parameters(bound.thing)):
        yield _of_call(bound, p.name)
    yield from _of_constructor(bound, reading)


def _of_call(bound: Bound, name: str) -> Finding | Note:
    """Chunks of several sizes, where the call takes their size."""
    longer = bound.of_length(LARGE)
    for size in (SMALL, WHOLE):
        words = f"{LARGE} tokens with {name}={size}"
        try:
            other = longer.called({name: size})
        except Exception as error:
            said = f"{words}: {type(error).__name__}: {error}".splitlines()[0][:200]
            return Finding("chunks-differ", said, error_line(error, bound.case.filename))
        if not longer.gives(other.output):
            if not _depends_on_others(longer):
                return Note("untried", f"what {name} does to the result")
            return Finding("chunks-differ", f"{words} give a different result", line_of_parts(other))
    return Note("good", f"{name} does not change the result")


def _of_constructor(bound: Bound, reading: AttentionReading | None) -> Found:
    """Chunks of several sizes, where the constructor takes their size."""
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
            if not _depends_on_others(other):
                yield Note("untried", f"what {next(iter(names))} does to the result")
                return
            words = f"{words} give a different result than one chunk"
            yield Finding("chunks-differ", words, _line(longer, other, size))
            return
    yield Note("good", f"{next(iter(names))} does not change the result")


def judged_parts(longer: Bound, found: Found) -> Found:
    """What was found for an input of several parts; blocks that keep to themselves are a pattern, not a mistake."""
    for result in found:
        if isinstance(result, Note):
            yield result
        elif _depends_on_others(longer):
            yield Finding("chunks-differ", result.detail, line_of_parts(longer))
        else:
            yield Note("untried", "which keys a token should see in another part of the input")


def line_of_parts(parts: Bound) -> int | None:
    """The line that carries a sum from one part to the next, or else that puts the parts together."""
    joined = [n for n in parts.trace.nodes if n.op in ("cat", "stack") and len(n.parents) > 1]
    most = max(joined, key=lambda n: len(n.parents), default=None)
    return _line_of_sum(parts.trace) or (None if most is None else most.line)


def _depends_on_others(parts: Bound) -> bool:
    """Whether the first token influences the last, unlike where attention is meant to stay inside a block."""
    moved = influence(parts)
    return moved is None or bool(moved[-1, 0])


def _line(whole: Bound, parts: Bound, size: int) -> int | None:
    """The line that goes wrong in the second chunk: a running sum, or else the first that is no part of the whole."""
    odd = odd_line(whole.trace, parts.trace, range(size, 2 * size), PARTS * size, chunks=PARTS)
    return _line_of_sum(parts.trace) or odd


def _line_of_sum(trace: Trace) -> int | None:
    """The line of a running sum; of two, the one that is not rescaled where the other is."""
    sums = {line: kind for line, nodes in by_line(trace).items() if (kind := _running_sum(nodes, trace))}
    return next((line for line, kind in sums.items() if kind == "plain"), max(sums, default=None))


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
