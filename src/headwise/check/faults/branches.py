"""Branches that no call has taken so far: ways to take them, and what is left in the end."""

import ast
import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, Inputs
from headwise.check.code.choices import compared
from headwise.check.coverage import CodePart
from headwise.check.faults.options import doubts
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import entry_code, signature
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import error_line, is_deliberate
from headwise.check.vocabulary import call_role

SHOWN = 3  # parts that never ran, in the words of the certificate
ADMINISTRATION = re.compile(r"^_|init|reset|repr|load|save|prune|fuse|count|num_|flops|freeze|config|from_|tie|quant")
SAME = re.compile(r"flash|fused|sdpa|fast|effic|kernel|native|optim", re.IGNORECASE)
FUSED = "scaled_dot_product_attention"


def hidden_branches(bound: Bound, reading: AttentionReading | None) -> Found:
    """Branches that depend on what no argument says: a switch inside the object, a fused function, a lone sample."""
    if reading is None or bound.output is None or not _unrun(bound):
        return
    yield from _switches(bound)
    yield from _without_fused(bound)
    yield from _alone(bound)
    yield from _call_modes(bound, reading)


def _unrun(bound: Bound) -> list[CodePart]:
    coverage = bound.case.coverage
    return (
        [] if coverage.blocked or not bound.case.source else coverage.unrun(bound.case.whole, entry_code(bound.thing))
    )


def _tests(bound: Bound) -> list[ast.AST]:
    """Everything in the conditions of parts that never ran."""
    return [node for part in _unrun(bound) for test in part.tests for node in ast.walk(test)]


def _switches(bound: Bound) -> Found:
    """Attributes that are True or False, set by the class itself: another way to the same result."""
    if not isinstance(bound.thing, nn.Module):
        return
    names = {n.attr for n in _tests(bound) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "self"}
    for name in sorted(names - {"training"}):
        now = vars(bound.thing).get(name)
        if isinstance(now, bool) and name not in bound.built.arguments:
            thing = copy.deepcopy(bound.thing)
            setattr(thing, name, not now)
            found = _same_result(bound, thing, f"self.{name}={not now}")
            blamed = SAME.search(name) is not None  # two ways to one result; others may ask for another input
            yield from (
                f if blamed or isinstance(f, Note) else Note("untried", f"self.{name}={not now}") for f in found
            )


def _without_fused(bound: Bound) -> Found:
    """Where the class asks whether torch has fused attention: the way that it takes without."""
    if "hasattr" not in bound.case.source or FUSED not in bound.case.source:
        return
    fused = getattr(F, FUSED)
    delattr(F, FUSED)
    try:
        thing = bound.rebuilt()
        thing.load_state_dict(bound.thing.state_dict(), strict=False)
        yield from _same_result(bound, thing, f"without torch's {FUSED}")
    except Exception as error:
        yield Note("untried", f"without torch's {FUSED}: {type(error).__name__}: {error}".splitlines()[0][:160])
    finally:
        setattr(F, FUSED, fused)


def _same_result(bound: Bound, thing: Any, words: str) -> Found:
    """Another way through the code must lead to the same result."""
    try:
        other = bound.called(thing=thing)
    except Exception as error:
        yield Note("untried", f"{words}: {type(error).__name__}: {error}".splitlines()[0][:160])
        return
    if bound.gives(other.output):
        yield Note("good", words)
        return
    seen = read(other)
    wrong = [] if seen is None else [f for f in doubts(other, seen) if isinstance(f, Finding)]
    yield from (replace(finding, detail=f"{finding.detail} ({words})") for finding in wrong)
    if not wrong:
        yield Note("untried", f"what {words} does to the result")


def _alone(bound: Bound) -> Found:
    """Where the code asks how many axes its input has: one sample without a batch must get the same result."""
    asked = [n for n in _tests(bound) if isinstance(n, ast.Attribute) and n.attr in ("dim", "ndim", "shape", "size")]
    inputs = {getattr(n.value, "id", "") for n in asked} & {*bound.form.roles, "batched", "is_batched"}
    batched = any(isinstance(n, ast.Name) and "batched" in n.id for n in _tests(bound))
    if bound.form.layout != PLAIN or bound.form.fixed or bound.output is None or not (inputs or batched):
        return
    form = replace(bound.form, layout="unbatched")
    first = Inputs(*(x[:1] for x in bound.inputs))
    try:
        with bound.running(), torch.no_grad():
            out = form.result(form.call(bound.thing, first), first)
    except Exception as error:
        if not is_deliberate(error):
            yield Note("untried", f"one sample without a batch: {type(error).__name__}: {error}".splitlines()[0][:160])
        return
    if out is None or not same(out.nan_to_num(), bound.output[:1].nan_to_num()):
        yield Note("untried", "what one sample without a batch gives")
    else:
        yield Note("good", "one sample without a batch")


def _call_modes(bound: Bound, reading: AttentionReading) -> Found:
    """Arguments of the call that are compared with texts or numbers: each of these must run."""
    literals = compared(bound.case.tree)
    for p in signature(bound.thing):
        values = [v for v in literals.get(p.name, []) if type(v) is type(p.default) and v != p.default]
        for value in values if p.name not in bound.form.roles and not isinstance(p.default, bool) else ():
            yield from _with_argument(bound, reading, p.name, value)


def _with_argument(bound: Bound, reading: AttentionReading, name: str, value: Any) -> Iterator[Finding | Note]:
    words = f"{name}={value!r}"
    try:
        other = bound.called({name: value})
    except Exception as error:
        said = f"{words}: {type(error).__name__}: {error}".splitlines()[0][:160]
        own = isinstance(error, UnboundLocalError | NameError | AttributeError) and not is_deliberate(error)
        yield Finding("option-crashes", said, error_line(error, bound.case.filename)) if own else Note("untried", said)
        return
    seen = read(other)
    known = bound.gives(other.output) or (
        seen is not None and seen.understood == reading.understood and not list(doubts(other, seen))
    )
    yield Note("good" if known else "untried", words if known else f"what {words} does to the result")


def every_branch(bound: Bound, reading: AttentionReading | None) -> Found:
    """Every part of the functions that a call runs must have run: nothing is known about the others."""
    coverage = bound.case.coverage
    if coverage.blocked or not coverage.ran or not bound.case.source:
        yield Note("absent", "not measured: " + ("a debugger is active" if coverage.blocked else "it has no source"))
        return
    unrun, idle = _unrun(bound), _idle_methods(bound)
    if idle:
        yield Note("untried", "; ".join(f"{name} was never called" for name in idle[:SHOWN]))
    if not unrun and not idle:
        yield Note("good", "every line and both sides of every condition ran")
        return
    words = "; ".join(f"{_lines_of(part)} never ran" for part in unrun[:SHOWN])
    if not unrun:
        return
    yield Note("untried", words + (f"; and {len(unrun) - SHOWN} more" if len(unrun) > SHOWN else ""))


def _idle_methods(bound: Bound) -> list[str]:
    """Methods of the class that compute with its layers and that no call has reached."""
    if not isinstance(bound.thing, nn.Module):
        return []
    layers = {name.partition(".")[0] for name, _ in bound.thing.named_parameters()}
    methods = [f for f in vars(type(bound.thing)).values() if inspect.isfunction(f)]
    idle = [f for f in methods if f.__code__ not in bound.case.coverage.ran and not ADMINISTRATION.search(f.__name__)]
    idle = [f for f in idle if f.__code__.co_filename == bound.case.filename and _takes_input(f)]
    return [f.__name__ for f in idle if layers & set(f.__code__.co_names)]


def _takes_input(method: Any) -> bool:
    names = list(inspect.signature(method).parameters)[1:]
    return any(call_role(name) in ("self", "query") or name.startswith("tok") for name in names)


def _lines_of(part: CodePart) -> str:
    first, last = part.node.lineno, part.node.end_lineno
    return f"line {first}" if first == last else f"lines {first} to {last}"
