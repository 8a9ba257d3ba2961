"""Dropout: whether it acts at all, in training only, at the rate and in the place that its argument says."""

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from headwise.check.arguments import constructor_role, parameters_of
from headwise.check.binding import Bound
from headwise.check.faults.questions import near
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import modules
from headwise.check.reading import AttentionReading
from headwise.check.trace import RANDOM, Node
from headwise.check.vocabulary import plain

RATES = (0.37, 0.23, 0.11)  # that nobody writes into code
WEIGHT_RATE = re.compile(r"attn|attention|att")
OUTPUT_RATE = re.compile(r"resid|proj|out|hidden")


def dropout(bound: Bound, reading: AttentionReading | None) -> Found:
    """Two calls after eval() must agree, also with dropout configured; in training, dropout must do something."""
    line = bound.trace.dropout_line()
    if line is not None and bound.repeats() is False:
        line = bound.case.condition_around(line, "training") or bound.case.keyword_line(line, "drop|training")
        yield Finding("dropout-in-eval", "two calls with the same input differ", line)
        return
    dropping = with_dropout(bound)
    if dropping is None:
        if bound.repaired.super_missing:  # its layers cannot be made once more
            yield Note("untried", "dropout")
        else:
            yield Note("good", "it has no dropout")
        return
    if bound.repeats(dropping) is False:
        line = line or _line(bound, dropping)
        line = bound.case.condition_around(line, "training") or bound.case.keyword_line(line, "drop|training")
        yield Finding("dropout-in-eval", "with dropout 0.5, two calls after eval() differ", line)
        return
    if (idle := _idle_layer(bound, dropping)) is not None:
        yield idle
        return
    yield from _place_of_dropout(bound, reading, dropping)
    names = bound.built.names_with_role("dropout")
    unused = next((name for name in names if _has_no_effect(bound, name)), None)
    if unused is not None:
        line = _line_of_missing_dropout(bound, reading, unused, len(names))
        yield Finding("dropout-unused", f"with {unused}=0.5, two calls in training mode agree", line)
    else:
        yield from _other_rates(bound, reading, names)
    for name in names if len(names) > 1 else ():
        places = _dropout_lines(bound, name)
        if len(places) > 1:
            yield Finding("dropout-twice", f"{name} acts on lines {places[0]} and {places[1]}", places[1])


def _idle_layer(bound: Bound, dropping: Any) -> Finding | None:
    """A dropout layer with a rate of its own that the file makes and never reads."""
    layers = dropping.named_children() if isinstance(dropping, nn.Module) else ()
    for name, layer in layers:
        line = bound.case.line_of_attribute(name)
        own = isinstance(layer, nn.Dropout) and line is not None and not bound.built.names_with_role("dropout")
        if own and bound.case.never_reads_attribute(name):
            return Finding("dropout-unused", f"self.{name} is made and never called", line)
    return None


def dropped_late(bound: Bound, reading: AttentionReading | None) -> int | None:
    """The line on which dropout acts on the output, where it acts on the weights nowhere."""
    dropping = with_dropout(bound)
    return None if dropping is None else _late(bound, reading, dropping)


def _place_of_dropout(bound: Bound, reading: AttentionReading | None, dropping: Any) -> Iterator[Note]:
    """That dropout acts on the output only, where a reader may expect it on the weights."""
    if _late(bound, reading, dropping) is not None:
        yield Note("good", "dropout acts on the output, not on the weights")


def _late(bound: Bound, reading: AttentionReading | None, dropping: Any) -> int | None:
    with contextlib.suppress(Exception):
        thing = copy.deepcopy(dropping)
        train(thing)
        drawn = [n for n in bound.called(thing=thing).trace.nodes if n.op in RANDOM]
        table = () if reading is None else reading.core.weights.shape[-2:]
        late = bool(drawn) and bound.output is not None and drawn[-1].value.numel() == bound.output.numel()
        if late and reading is not None and not any(n.value.shape[-2:] == table for n in drawn):
            return drawn[-1].line
    return None


def _other_rates(bound: Bound, reading: AttentionReading | None, names: list[str]) -> Iterator[Finding]:
    """Every rate that the constructor is given must be one that acts, and act where its name says."""
    given = {name: RATES[index] for index, name in enumerate(names[: len(RATES)])}
    drawn = _drawn(bound, given)
    acting = {rate for rate, _ in drawn}
    for name, rate in given.items() if drawn else ():
        if not any(near(rate, other) for other in acting):
            words = f"with {name}={rate}, numbers are dropped with {_listed(acting)}"
            fixed = bound.case.line_with(r"Dropout\d?d?\(\s*(p\s*=\s*)?[\d.]")
            yield Finding("dropout-rate", words, fixed or drawn[-1][1].line)
            return
    if given and drawn and (left := _left_at_default(bound, acting - set(given.values()))) is not None:
        yield left
        return
    table = () if reading is None else reading.core.weights.shape[-2:]
    at = {name: [n for rate, n in drawn if near(rate, given[name])] for name in given}
    for name, nodes in at.items():
        others = [o for o in at if OUTPUT_RATE.search(plain(o)) and any(n.value.shape[-2:] == table for n in at[o])]
        early = WEIGHT_RATE.search(plain(name)) and not OUTPUT_RATE.search(plain(name))
        if early and others and not any(n.value.shape[-2:] == table for n in nodes):
            words = f"{others[0]} drops weights, and {name} does not"
            made = bound.case.line_with(rf"Dropout\([^)]*\b{others[0]}\b")
            yield Finding("dropout-rate", words, made or at[others[0]][0].line)
            return


def _left_at_default(bound: Bound, rates: set[float]) -> Finding | None:
    """A part of the object that takes a rate, is given none, and drops at its default."""
    children = bound.thing.named_children() if isinstance(bound.thing, nn.Module) else ()
    for name, part in children:
        own = type(part).__name__ in bound.case.namespace and not type(part).__module__.startswith("torch.")
        taken = [p for p in parameters_of(type(part)) if constructor_role(p.name) == "dropout"] if own else []
        for p in taken:
            if isinstance(p.default, float) and p.default > 0 and any(near(p.default, rate) for rate in rates):
                words = f"{type(part).__name__} is not given a rate and always drops with its default, {p.default:.4g}"
                return Finding("dropout-rate", words, bound.case.line_of_attribute(name))
    return None


def _drawn(bound: Bound, given: dict[str, float]) -> list[tuple[float, Node]]:
    """In training with these rates, the rate of every dropout of torch's own, and its operation."""
    with contextlib.suppress(Exception):
        thing = bound.rebuilt(**given)
        train(thing)
        nodes = bound.called(thing=thing).trace.nodes
        pairs = [(a, b) for a, b in itertools.pairwise(nodes) if a.op in RANDOM]
        if all(a.op == "bernoulli_" and b.op == "div_" and a.numbers == b.numbers for a, b in pairs):
            return [(1 - a.numbers[-1], a) for a, _ in pairs]  # what is kept is drawn, then divided by its share
    return []


def _listed(rates: set[float]) -> str:
    return " and ".join(f"{rate:.4g}" for rate in sorted(rates))


def _dropout_lines(bound: Bound, name: str) -> list[int]:
    """The lines that draw random numbers in training where only this argument asks for dropout."""
    with contextlib.suppress(Exception):
        thing = bound.rebuilt(**{name: 0.5})
        train(thing)
        nodes = bound.called(thing=thing).trace.nodes
        return list(dict.fromkeys(n.line for n in nodes if n.op in RANDOM and n.line is not None))
    return []


def _line_of_missing_dropout(bound: Bound, reading: AttentionReading | None, name: str, count: int) -> int | None:
    """Where a result is thrown away or dropout has no effect, or else where it should be: at weights or output."""
    if bound.case.never_reads(name):
        return bound.case.line_with(rf"\b{name}\b")
    called = bound.case.line_with(r"(self\.\w*drop\w*|F\.dropout|functional\.dropout)\(") if count == 1 else None
    line = bound.case.discarded_line("drop") or called or bound.case.idle_line()
    if line is not None or reading is None:
        return line or bound.case.line_with(rf"\b{name}\b")
    late = re.search(r"resid|proj|out|hidden", plain(name).replace("dropout", "")) is not None
    return reading.core.output_line() if late else reading.core.softmax_line


def _has_no_effect(bound: Bound, name: str) -> bool:
    """Whether two calls in training mode agree although this one argument asks for dropout."""
    with contextlib.suppress(Exception):
        thing = bound.rebuilt(**{name: 0.5})
        train(thing)
        return bound.repeats(thing) is True
    return False


def _line(bound: Bound, dropping: Any) -> int | None:
    with contextlib.suppress(Exception):
        return bound.called(thing=dropping).trace.dropout_line()
    return None


def with_dropout(bound: Bound) -> Any:
    """The same object with dropout 0.5: made so where its constructor has the argument, else with its layers set so."""
    names = bound.built.names_with_role("dropout")
    with contextlib.suppress(Exception):
        thing = bound.rebuilt(**dict.fromkeys(names, 0.5)) if names else copy.deepcopy(bound.thing)
        rates = {nn.Dropout: "p", nn.MultiheadAttention: "dropout"}
        layers = [(m, rate) for m in modules(thing) for kind, rate in rates.items() if isinstance(m, kind)]
        layers = [(m, rate) for m, rate in layers if rate == "p" or getattr(m, rate) > 0]
        for layer, rate in layers if not names else ():
            setattr(layer, rate, 0.5)
        return thing if names or layers else None
    return None


def train(thing: Any) -> None:
    """Switch every module to training mode."""
    for module in modules(thing):
        module.train()
