"""What a file says of its masks, in words, by an example or by a branch of its own, must hold."""

import contextlib
import re
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.check.binding import Bound
from headwise.check.code.example import example_shape
from headwise.check.code.intent import (
    stated_meaning,
    stated_shapes,
    states_boolean,
    states_integers,
)
from headwise.check.faults.mask_meaning import (
    MEANING,
    MaskArgument,
    MaskTrial,
    TriedMask,
)
from headwise.check.faults.questions import lines_run
from headwise.check.mistakes import Finding
from headwise.check.reading import AttentionReading
from headwise.check.trace import COMPARES


def against_words(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> Iterator[Finding]:
    """A mask must mean what the file says about it."""
    stated = stated_meaning(bound.case, argument.name)
    if stated is None or argument.meaning not in MEANING or argument.meaning == stated.meaning:
        return
    found, said = MEANING[argument.meaning], MEANING[stated.meaning]
    words = f"argument {argument.name}: {found}, where {stated.place} says {said}"
    yield Finding("mask-convention", words, line_of_meaning(argument, bound, reading))


def line_of_meaning(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> int | None:
    """The line that compares or inverts a mask, or else applies it; numbers show more steps than bits."""
    tried = argument.first(argument.meaning)
    if tried is None or tried.meant is None:
        return None
    usual = lines_run(bound)
    for mask in (tried.mask.double(), tried.mask):
        with contextlib.suppress(Exception):  # it takes no numbers
            nodes = bound.called({argument.name: mask.clone()}).trace.nodes
            turned = [n for n in nodes if n.op in COMPARES and n.line is not None and n.line not in usual]
            if turned:
                return next((n for n in turned if _is_inverse(n.value, mask)), turned[0]).line
    numbers = MaskTrial(bound, reading, argument.name)(tried.shape, tried.mask.double(), tried.meant)
    return numbers.line if numbers.meaning == tried.meaning else tried.line


def _is_inverse(value: Tensor, mask: Tensor) -> bool:
    """Whether a table is True exactly where a mask is zero."""
    return value.numel() == mask.numel() and bool((value.flatten() == (mask.flatten() == 0)).all())


def without_own_branch(argument: MaskArgument, bound: Bound) -> list[Finding]:
    """A mask of the shape that a comment states, or of the axes or type that the code asks for, must work."""
    example, said = example_shape(bound.case, argument.name), stated_shapes(bound.case, argument.name)
    for stated in [*said, *([example] if example is not None else [])]:
        tried = [t for t in argument.tried if t.shape == stated.meaning]
        if tried and all(t.error is not None for t in tried):
            words = f"argument {argument.name}, shape {stated.meaning}, as {stated.place} says"
            words += f": {type(tried[0].error).__name__}: {tried[0].error}"
            line = _widened_before(bound, argument, tried[0]) or tried[0].line
            remark = stated.line and "#" in bound.case.text(stated.line)
            prepared = remark and argument.meaning and bound.case.users()  # the callers may change its shape
            contradicted = said and stated is example  # an example that its own text contradicts
            against = "fragile" if contradicted or prepared else ""
            return [Finding("mask-crashes", words.splitlines()[0][:200], line, severity=against)]
    if (table := _lost_queries(argument)) is not None:
        words = f"argument {argument.name}: shape (B,1,S) works, shape (B,T,S) raises {type(table.error).__name__}"
        line = _moving_line(bound, argument)
        return [Finding("mask-crashes", f"{words}: {table.error}".splitlines()[0][:200], line)]
    source, names = bound.case.source, rf"(?:{argument.name}|\w*mask\w*)"
    widened = re.search(rf"\b{names}\s*=\s*{names}(\.unsqueeze\(|\[[^\]]*None)", source) is not None
    axes = re.findall(
        rf"\b{names}\.(?:dim\(\)|ndim)\s*==\s*(\d)|len\({names}\.(?:shape|size\(\))\)\s*==\s*(\d)",
        source if widened else "",
    )
    for count in sorted({int(a or b) for a, b in axes}):
        whole = "(B,T,S)" if count == 3 else None  # the one with a row for every query of every sample
        tried = [t for t in argument.tried if t.mask.dim() == count and t.shape in (whole or t.shape,)]
        if tried and all(t.error is not None for t in tried):
            words = (
                f"argument {argument.name}, shape {tried[0].shape}: {type(tried[0].error).__name__}: {tried[0].error}"
            )
            line = bound.case.line_with(rf"\b{names}\s*=\s*{names}\W") or tried[0].line
            return [Finding("mask-crashes", words.splitlines()[0][:200], line)]
    if (refused := _refused_booleans(argument, bound)) is not None:
        return [refused]
    if re.search(rf"{names}\.dtype\s*(==|is|!=)\s*torch\.bool", source):
        tried = [t for t in argument.tried if t.mask.dtype == torch.bool and t.error is None]
        leaks = next((t for t in tried if t.meaning in ("leaks", "additive")), None)
        if leaks is not None and not any(t.meaning in ("keep", "drop") for t in tried):
            words = f"argument {argument.name}, shape {leaks.shape}, of booleans"
            return [Finding("mask-leaks", words, bound.case.line_with(r"masked_fill|where\(") or leaks.line)]
    return []


def _refused_booleans(argument: MaskArgument, bound: Bound) -> Finding | None:
    """A mask of booleans that raises in every shape, where the text asks for booleans and numbers work."""
    said = states_boolean(bound.case, argument.name)
    tried = [t for t in argument.tried if t.mask.dtype == torch.bool]
    numbers = any(t.mask.dtype != torch.bool and t.error is None for t in argument.tried)
    if said is None or not tried or not numbers or argument.meaning not in ("keep", "drop"):
        return None
    if not all(isinstance(t.error, RuntimeError | TypeError) for t in tried):
        return None
    shape = next((t for t in tried if t.shape in argument.shapes()), tried[0])
    words = f"argument {argument.name}, of booleans, as line {said} says: {type(shape.error).__name__}: {shape.error}"
    return Finding("mask-crashes", words.splitlines()[0][:200], shape.line)


def _widened_before(bound: Bound, argument: MaskArgument, tried: TriedMask) -> int | None:
    """The last line that adds an axis to a mask, in a call that then raises."""
    with contextlib.suppress(Exception):
        bound.called({argument.name: tried.mask.clone()})
    nodes = [] if bound.last_trace is None else bound.last_trace.nodes
    wider = [n.line for n in nodes if n.op == "unsqueeze" and n.line is not None and n.line not in lines_run(bound)]
    return wider[-1] if wider else None


def inverting_line(tried: TriedMask, bound: Bound, name: str) -> int | None:
    """The line that compares or inverts a mask, in a call with it."""
    nodes = bound.called({name: tried.mask.clone()}).trace.nodes
    return next((n.line for n in nodes if n.op in COMPARES and n.line is not None), None)


def of_integers(argument: MaskArgument, bound: Bound) -> Iterator[Finding]:
    """A mask of whole numbers must mean what one of booleans means, at least where the file says that it holds them."""
    first = next((t for t in argument.tried if t.of_integers), None)
    if first is not None:
        said = states_integers(bound.case, argument.name)
        words = f"argument {argument.name}, shape {first.shape}" + (f", as line {said} says" if said else "")
        line = inverting_line(first, bound, argument.name) or first.line
        yield Finding("mask-integers", words, line, severity="wrong" if said else "")


def _lost_queries(argument: MaskArgument) -> TriedMask | None:
    """A mask with a row for every query that raises, where one with an axis for queries is all that works."""
    tried = next((t for t in argument.tried if t.shape == "(B,T,S)"), None)
    return tried if argument.shapes() == ["(B,1,S)"] and tried is not None and tried.error is not None else None


def _moving_line(bound: Bound, argument: MaskArgument) -> int | None:
    """The line that gives a mask its axes, or else that applies it."""
    tried = argument.first(argument.meaning)
    if tried is None:
        return None
    nodes = bound.called({argument.name: tried.mask.clone()}).trace.nodes
    return next((n.line for n in nodes if n.op in ("unsqueeze", "view") and n.line not in lines_run(bound)), tried.line)
