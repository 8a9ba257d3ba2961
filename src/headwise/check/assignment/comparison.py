"""Compares a class with anybody's reference: the same constructor, call, parameters, inputs and masks, in float64.

`Reference` holds the other class, built and called once; `Pairing` says how a learner's class is built and called like
it. Whatever then differs is a finding, with the first differing index and both values.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwise.check.arguments import CallSizes, StandInConfig, constructor_role, parameters_of, value_for
from headwise.check.assignment.deviations import Assigned
from headwise.check.assignment.forms import REQUIRED, find_form
from headwise.check.assignment.solutions import as_written, blueprint_of, is_plain
from headwise.check.assignment.transfer import copy_parameters
from headwise.check.binding import Bound
from headwise.check.calls import CallForm, Inputs, make_inputs, prepare
from headwise.check.code.candidates import candidates
from headwise.check.code.case import Case
from headwise.check.code.loader import load
from headwise.check.faults.mask_meaning import measured
from headwise.check.faults.mask_promises import line_of_meaning
from headwise.check.mistakes import ORDER, Finding, Found, Note, error_words
from headwise.check.objects import call_parameters, described
from headwise.check.reading import AttentionReading, read
from headwise.check.report import Report
from headwise.check.search import bind
from headwise.check.templates import write
from headwise.errors import OptionError

SETTINGS = (CallSizes(B=47, T=6, S=4, H=3, E=27, context=13), CallSizes(B=31, T=3, S=8, H=2, E=20, context=11))
LENGTHS_TRIED = (1, 4, 9)  # tokens, at the first setting
TOLERANCE = 1e-6
NOT_PLAIN = "# Plain attention with the reference's signature; what the reference adds to it is left out.\n"
SIZES = ("width", "out_width", "heads", "kv_heads", "head_width", "value_width", "context", "batch")


def find_assignment(form: str | None, against: Any) -> "Assigned | Reference | None":
    """What a class must also fit: a form by its name, a reference, or nothing."""
    if form is not None and against is not None:
        raise OptionError("pass either form or against, not both.")
    if form is not None:
        return Assigned(find_form(form))
    return None if against is None else find_reference(against)


def find_reference(against: Any) -> "Reference":
    """The reference at "file.py:Class", or the class, function or object itself."""
    case = _case_in_file(str(against)) if isinstance(against, str | Path) else _live_case(against)
    bound, failures = bind(case)
    if bound is None or bound.output is None:
        first = next((failure.error for failure in failures if failure.natural), None) or ValueError("nothing ran")
        raise OptionError(f"the reference {case.name} cannot be called: {type(first).__name__}: {first}")
    return Reference(case.name, bound)


def _live_case(target: Any) -> Case:
    from headwise.check import namespace

    if not (callable(target) or isinstance(target, nn.Module)):
        raise OptionError(
            f"{target!r} cannot be a reference; pass a class, an object that can be called, or file.py:Class."
        )
    name = str(getattr(target, "__name__", type(target).__name__))
    return Case(name, target, namespace(target), thorough=False)


def _case_in_file(words: str) -> Case:
    file, colon, name = words.rpartition(":")
    path = Path(file if colon and name.isidentifier() else words)
    if not path.is_file():
        raise OptionError(f"there is no reference file {path}; write it as file.py:Class.")
    loaded = load(path)
    error = loaded.origin.error
    if error is not None:
        raise OptionError(f"the reference {path.name} is not valid Python: {error.msg}, line {error.lineno}")
    found = dict(candidates(loaded))
    if path != Path(words):
        if name not in loaded.namespace:
            defined = ", ".join(found) or "nothing that looks like attention"
            raise OptionError(f"the reference {path.name} defines no {name!r}; it defines {defined}")
        found = {name: loaded.namespace[name]}
    if not found:
        raise OptionError(f"nothing in the reference {path.name} looks like attention; write it as {path.name}:Class.")
    name, target = next(iter(found.items()))
    return Case(name, target, loaded.namespace, loaded, thorough=False)


@dataclass
class Reference:
    """Somebody's class, function or object that another one must agree with."""

    name: str
    bound: Bound

    @cached_property
    def reading(self) -> AttentionReading | None:
        """What was understood of it."""
        return read(self.bound)

    @property
    def asked(self) -> str:
        """What a class is compared with, in words."""
        return f"the reference {self.bound.built.text} · forward({self.bound.form.words()})"

    def fits(self, report: Report) -> str:
        """What was compared, where nothing but names and parameters differs."""
        other = "; the signatures differ" if any(f.name.startswith("form-") for f in report.findings) else ""
        return f"gives what the reference {self.name} gives, with the same parameters{other}"

    def preferred(self, name: str) -> bool:
        """Whether a class has the name of the reference."""
        return name == self.name

    def accepted(self, bound: Bound) -> tuple[str, ...]:
        """No mistake: whatever the reference does, the ordinary verdict stays."""
        return ()

    def unbound(self, case: Case) -> Iterator[Finding]:
        """Nothing is known about a class that could not be called."""
        return iter(())

    def deviations(self, bound: Bound, reading: AttentionReading | None) -> Found:
        """Everything in which a class differs from the reference."""
        pairing = Pairing(self, bound)
        found: dict[str, Finding] = {}
        notes: list[Note] = []
        for thing in [*pairing.signature_findings(), *pairing.compared()]:
            if isinstance(thing, Note):
                notes.append(thing)
            elif thing.name in found:
                first = found[thing.name]
                first.detail += f"; {thing.detail}"
                first.severity = min(first.severity, thing.severity, key=ORDER.index)
            else:
                found[thing.name] = thing
        yield from found.values()
        yield from notes
        wrong = any(finding.severity == "wrong" for finding in found.values())
        if not wrong and not any(note.kind == "doubt" for note in notes):
            yield Note("good", f"equals {self.name} ({pairing.calls} calls)")

    def solution(self) -> str:
        """A right class with the constructor, call, return values and mask of the reference."""
        blueprint = blueprint_of(self.bound, self.reading)
        if blueprint is None:
            return write("separate" if self.bound.form.cross else "fused")
        return ("" if is_plain(self.reading) else NOT_PLAIN) + blueprint.source()


@dataclass
class Pairing:
    """A learner's class built and called as the reference is, where it can be."""

    reference: Reference
    bound: Bound
    calls: int = 0

    # Building.

    @cached_property
    def building(self) -> str:
        """How the learner's class takes the reference's arguments: names, positions, or own where it does not."""
        if not inspect.isclass(self.reference.bound.case.target) or not inspect.isclass(self.bound.case.target):
            return "own"
        given, found = self.reference.bound.built.arguments, parameters_of(self.bound.case.target)
        needed = {p.name for p in found if p.default is REQUIRED}
        if set(given) <= {p.name for p in found} and needed <= set(given):
            return "names"
        places = parameters_of(self.reference.bound.case.target)[: len(given)]
        fits = [p.name for p in places] == list(given) and needed <= {p.name for p in found[: len(given)]}
        roles = zip(given, found, strict=False)
        same = len(given) <= len(found) and all(constructor_role(a) == constructor_role(b.name) for a, b in roles)
        return "positions" if fits and same else "own"

    def signature_findings(self) -> Iterator[Finding]:
        """A constructor or call that takes other arguments than the reference's, or in another order."""
        theirs, ours = self.reference.bound, self.bound
        if inspect.isclass(theirs.case.target) and inspect.isclass(ours.case.target):
            takes = parameters_of(theirs.case.target), parameters_of(ours.case.target)
            if self.building != "names" or not _same_order(*takes):
                words = f"the reference has {_written(theirs, takes[0])}; this is {_written(ours, takes[1])}"
                severity = "wrong" if self.building == "own" else "fragile"
                yield Finding("form-constructor", words, _line(ours, "__init__"), severity=severity)
        takes = call_parameters(theirs.thing), call_parameters(ours.thing)
        if self.calling != "names" or not _same_order(*takes):
            names = [", ".join(p.name for p in side) for side in takes]
            words = f"the reference has forward({names[0]}); this is forward({names[1]})"
            severity = "wrong" if self.calling == "own" else "fragile"
            yield Finding("form-call", words, _line(ours, "forward"), severity=severity)

    def _built_alike(self, arguments: dict[str, Any], sizes: CallSizes) -> Any:
        if self.building == "names":
            return _made(self.bound, arguments)
        if self.building == "positions":
            names = [p.name for p in parameters_of(self.bound.case.target)]
            return _made(self.bound, dict(zip(names, arguments.values(), strict=False)))
        return _made(self.bound, _resized(self.bound, sizes))

    # Calling.

    @cached_property
    def calling(self) -> str:
        """How the learner's class takes the reference's call: names, positions, or own where it does not."""
        form = self.reference.bound.form
        theirs, found = call_parameters(self.reference.bound.thing), call_parameters(self.bound.thing)
        given = [*form.roles, *form.fixed]
        needed = {p.name for p in found if p.default is REQUIRED}
        if {*given, *form.masks} <= {p.name for p in found} and needed <= set(given):
            return "names"
        alike = dict(zip((p.name for p in theirs), (p.name for p in found), strict=False))
        return "positions" if {*given, *form.masks} <= set(alike) and needed <= {alike[n] for n in given} else "own"

    @cached_property
    def form(self) -> CallForm:
        """The reference's call in the learner's names."""
        form = self.reference.bound.form
        if self.calling == "names":
            return form
        if self.calling == "own":
            return self.bound.form
        theirs, found = call_parameters(self.reference.bound.thing), call_parameters(self.bound.thing)
        alike = dict(zip((p.name for p in theirs), (p.name for p in found), strict=False))
        return replace(
            form,
            roles={alike[name]: role for name, role in form.roles.items()},
            fixed={alike[name]: value for name, value in form.fixed.items()},
            masks=tuple(alike[name] for name in form.masks),
            positional=(),
        )

    # Comparing.

    def compared(self) -> Found:
        """Outputs at several sizes, with the same parameters, inputs and masks, up to the first that differs."""
        fixed = not inspect.isclass(self.reference.bound.case.target)
        for sizes in (None,) if fixed else (None, *SETTINGS):
            found = list(self._compared_at(sizes))
            yield from found
            if any(isinstance(f, Note) or f.severity == "wrong" for f in found):
                return

    def _compared_at(self, sizes: CallSizes | None) -> Found:
        theirs = self._reference_at(sizes)
        if theirs is None:
            return
        at = f"with {theirs.sizes.H} heads of {theirs.sizes.E // theirs.sizes.H}"
        try:
            ours = self._learner_at(theirs, sizes)
        except Exception as error:  # whatever a learner's code raises is a result
            words = f"{at}, this raises {error_words(error)}"
            yield Finding("differs-from-reference", words, _line(self.bound, "forward"))
            return
        transfer = copy_parameters(theirs, ours)
        if transfer.different:
            yield Finding("differs-from-reference", transfer.different, _line(self.bound, "__init__"))
            return
        if transfer.problem:
            yield Note("doubt", f"not compared with {self.reference.name}: {transfer.problem}")
            return
        if transfer.unequal and sizes is None:
            yield Finding("form-parameters", transfer.words(), _line(self.bound, "__init__"))
        yield from self._values(theirs, ours, at, first=sizes is None)

    def _reference_at(self, sizes: CallSizes | None) -> Bound | None:
        """The reference, built and called at these sizes; None where it does not take them."""
        try:
            theirs = self.reference.bound
            used = sizes or theirs.sizes
            thing = (
                _made(theirs, _resized(theirs, used), seed=5) if inspect.isclass(theirs.case.target) else theirs.thing
            )
            return theirs.called(thing=thing, sizes=used, inputs=make_inputs(theirs.form, used, seed=11))
        except Exception:  # the reference is not on trial
            return None

    def _learner_at(self, theirs: Bound, sizes: CallSizes | None) -> Bound:
        live = not inspect.isclass(self.reference.bound.case.target) or not inspect.isclass(self.bound.case.target)
        arguments = {} if live else _resized(self.reference.bound, sizes or self.reference.bound.sizes)
        thing = self.bound.thing if live else self._built_alike(arguments, theirs.sizes)
        return self.bound.called(thing=thing, sizes=theirs.sizes, inputs=theirs.inputs, form=self.form)

    def _values(self, theirs: Bound, ours: Bound, at: str, first: bool) -> Found:
        found = list(self._one_call(theirs, ours, theirs.inputs, at))
        if first and not found:
            for T in LENGTHS_TRIED:
                inputs = make_inputs(theirs.form, replace(theirs.sizes, T=T, B=3), seed=T, cross=T > 1)
                found += self._one_call(theirs, ours, inputs, f"with {T} tokens")
            found += self._in_training(theirs, ours)
        yield from found[:1]
        if first:
            yield from self._conventions(theirs, ours) if found else self._masked(theirs, ours)

    def _conventions(self, theirs: Bound, ours: Bound) -> Iterator[Finding]:
        """What is hidden without a mask and what a mask means, where results cannot be compared."""
        readings = read(theirs), read(ours)
        patterns = [None if reading is None else reading.pattern for reading in readings]
        if None not in patterns and patterns[0] != patterns[1]:
            words = f"visible keys without a mask: {patterns[0]} in the reference, {patterns[1]} here"
            yield Finding("form-mask", words, _line(ours, "forward"))
        for a, b in zip(measured(theirs, readings[0]), measured(ours, readings[1]), strict=False):
            if a.meaning and b.meaning and a.meaning != b.meaning:
                yield Finding("form-mask", f"the reference has {a.words()}; here {b.words()}", _line(ours, "forward"))

    def _one_call(
        self,
        theirs: Bound,
        ours: Bound,
        inputs: Inputs,
        at: str,
        masks: tuple[dict[str, Any], dict[str, Any]] = ({}, {}),
    ) -> Iterator[Finding]:
        """One call of both."""
        try:
            wanted = theirs.call(inputs, masks[0])
        except Exception:  # the reference does not take this
            return
        self.calls += 1
        name = "form-mask" if masks[0] else "differs-from-reference"
        try:
            got = ours.call(inputs, masks[1])
        except Exception as error:  # whatever a learner's code raises is a result
            words = f"{at}, this raises {error_words(error)}"
            yield Finding(name, words, _line(ours, "forward"))
            return
        yield from _differences(wanted, got, at, name, _line(ours, "forward"))

    def _in_training(self, theirs: Bound, ours: Bound) -> Iterator[Finding]:
        """Without dropout, training changes nothing; with it, both are random or neither is."""
        modes = [m for b in (theirs, ours) if isinstance(b.thing, nn.Module) for m in b.thing.modules()]
        for module in modes:
            module.training = True
        found = list(self._one_call(theirs, ours, theirs.inputs, "in training mode"))
        for module in modes:
            module.training = False
        yield from found
        names = [b.built.names_with_role("dropout") for b in (theirs, ours)]
        if not found and names[0] and inspect.isclass(theirs.case.target) and inspect.isclass(ours.case.target):
            random = [_is_random(b, chosen) for b, chosen in zip((theirs, ours), names, strict=True)]
            if None not in random and random[0] != random[1]:
                words = "with dropout 0.5 in training mode, " + (
                    "only the reference is random" if random[0] else "only this is random"
                )
                yield Finding("differs-from-reference", words, _line(ours, "forward"))

    def _masked(self, theirs: Bound, ours: Bound) -> Iterator[Finding]:
        """Every mask that the reference takes, passed to both."""
        for place, argument in enumerate(measured(theirs, read(theirs))):
            if place >= len(ours.form.masks):
                words = f"the reference takes {argument.name} ({argument.words()}); this takes no such mask"
                yield Finding("form-mask", words, _line(ours, "forward"))
                return
            mine = argument.name if argument.name in ours.form.masks else ours.form.masks[place]
            for tried in argument.tried:
                if tried.error is None:
                    kind = str(tried.mask.dtype).removeprefix("torch.")
                    at = f"with {argument.name} of shape {tried.shape} and type {kind}"
                    pair = {argument.name: tried.mask}, {mine: tried.mask}
                    found = next(self._one_call(theirs, ours, theirs.inputs, at, pair), None)
                    if found is not None:
                        found.line = self._mask_line(mine) or found.line
                        found.detail += self._meanings(argument.words(), mine)
                        yield found
                        return

    def _mask_line(self, name: str) -> int | None:
        """The line that applies the learner's mask."""
        reading = read(self.bound)
        known = (a for a in measured(self.bound, reading) if a.name == name and a.meaning)
        return None if reading is None else next((line_of_meaning(a, self.bound, reading) for a in known), None)

    def _meanings(self, theirs: str, mine: str) -> str:
        own = [a.words() for a in measured(self.bound, read(self.bound)) if a.name == mine]
        said = [words.partition(", in shapes")[0] for words in (theirs, *own)]
        return f" (reference {said[0]}" + (f"; here {said[1]})" if own else ")")


def _resized(bound: Bound, sizes: CallSizes) -> dict[str, Any]:
    """The arguments that an object was made with, for other sizes."""
    built, old = bound.built, bound.sizes

    def fitted(name: str, value: Any) -> Any:
        role = constructor_role(name)
        if built.config is not None and value is built.config:
            return StandInConfig(sizes, built.config._own, built.config._extra)
        return value_for(role, sizes) if role in SIZES and value == value_for(role, old) else value

    return {name: fitted(name, value) for name, value in built.arguments.items()}


def _made(bound: Bound, arguments: dict[str, Any], seed: int = 0) -> Any:
    with bound.running():
        thing = bound.case.target(**arguments)
        prepare(thing, bound.sizes, seed)
    return thing


def _is_random(bound: Bound, names: list[str]) -> bool | None:
    """Whether two calls in training mode with dropout differ; None where it cannot be made so."""
    try:
        thing = bound.rebuilt(**dict.fromkeys(names, 0.5))
        thing.train()
        first, second = (bound.form.result(bound.call(bound.inputs, thing=thing), bound.inputs) for _ in range(2))
    except Exception:  # some constructors take no dropout of 0.5
        return None
    return None if first is None or second is None else not torch.equal(first, second)


def _same_order(theirs: list[inspect.Parameter], ours: list[inspect.Parameter]) -> bool:
    """Whether arguments by position mean the same: the reference's first, then whatever else has a default."""
    return [p.name for p in ours][: len(theirs)] == [p.name for p in theirs]


def _written(bound: Bound, parameters: list[inspect.Parameter]) -> str:
    return f"{bound.case.name}({', '.join(as_written(p) for p in parameters)})"


def _line(bound: Bound, method: str) -> int | None:
    code = getattr(getattr(bound.case.target, method, bound.case.target), "__code__", None)
    return code.co_firstlineno if code is not None and code.co_filename == bound.case.filename else None


def _differences(wanted: Any, got: Any, at: str, name: str, line: int | None) -> Iterator[Finding]:
    """The first difference in structure or values between what two calls returned."""
    theirs, ours = tree_leaves(wanted), tree_leaves(got)
    shapes = [[tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in side] for side in (theirs, ours)]
    if shapes[0] != shapes[1] or isinstance(wanted, Tensor) != isinstance(got, Tensor):
        yield Finding(
            "form-return", f"{at}, the reference returns {described(wanted)}; this returns {described(got)}", line
        )
        return
    for place, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if isinstance(a, Tensor) and (words := _first_difference(a, b, place if len(theirs) > 1 else None)):
            yield Finding(name, f"{at}, {words}", line)
            return


def _first_difference(wanted: Tensor, got: Tensor, place: int | None) -> str:
    """`output[0, 1, 2] is 0.1234, the reference gives 0.4321`; empty where they agree."""
    a, b = wanted.double(), got.double()
    close = torch.isclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if bool(close.all()):
        return ""
    index = tuple(int(i) for i in (~close).nonzero()[0])
    what = "output" if place is None else f"returned[{place}]"
    gap = float((a - b)[~close].abs().nan_to_num().max())
    where = f"{what}[{', '.join(map(str, index))}]"
    return (
        f"{where} is {float(b[index]):.4f}, the reference gives {float(a[index]):.4f} "
        f"({int((~close).sum())} of {close.numel()} numbers differ, by up to {gap:.2g})"
    )
