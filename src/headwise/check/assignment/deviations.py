"""Compares a class with an assignment by making the assignment's own example calls.

Whatever makes such a call fail or give something else is wrong; other names inside are fragile.
"""

import dis
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.arguments import CallSizes, constructor_role, parameters_of
from headwise.check.assignment.forms import REQUIRED, Assignment
from headwise.check.assignment.solutions import as_written
from headwise.check.binding import Bound
from headwise.check.calls import Inputs, leaves, prepare
from headwise.check.code.case import Case
from headwise.check.environment import quiet
from headwise.check.faults.dropout import dropped_late
from headwise.check.faults.mask_meaning import measured
from headwise.check.faults.mask_promises import line_of_meaning
from headwise.check.faults.output import head_merge, is_list_of_heads
from headwise.check.faults.questions import WEIGHTLESS, listed
from headwise.check.faults.stages import stage_findings
from headwise.check.mistakes import Finding, Found, Note, error_words
from headwise.check.objects import call_parameters, described, entry, modules
from headwise.check.reading import AttentionReading, read
from headwise.check.report import Report
from headwise.check.trace import error_line

PARTS = {
    "form-constructor": "constructor", "form-call": "call", "form-return": "return value", "form-mask": "mask",
}  # fmt: skip
RESIDUAL = "the input is added to the output (residual)"
ON_WEIGHTS = "dropout on the weights; here it acts on what is made with them"
MIXING = ("split-view", "merge-view", "softmax-axis", "attends-over-heads", "attends-over-batch", "batch-leak")
WRAPPER_LACKS = ("too-wide", "no-out-proj")  # mistakes anywhere but in a document that shows such a wrapper


@dataclass(frozen=True)
class Assigned:
    """An assignment as the checker asks for it."""

    form: Assignment

    @property
    def asked(self) -> str:
        """What a class is compared with, in words."""
        return f"{self.form.title}: {self.form.built} · {self.form.called}"

    def fits(self, report: Report) -> str:
        """What was compared, and what differs; nothing of a function without weights."""
        if WEIGHTLESS in report.variants:
            return ""
        differs = {finding.name for finding in report.findings}
        kept = {name: words for name, words in PARTS.items() if not (report.assumed and name == "form-constructor")}
        fitting = [words for name, words in kept.items() if name not in differs]
        other = [words for name, words in kept.items() if name in differs]
        said = f"; what differs: {listed(other)}" if other else ""
        said += "; the names differ" if "form-name" in differs else ""
        said += f"; but {RESIDUAL}, so the result is another" if RESIDUAL in report.variants else ""
        return f"fits {self.form.title}: {listed(fitting)}{said}" if fitting else ""

    def preferred(self, name: str) -> bool:
        """Whether a class has the name that the document gives it."""
        return name in self.form.classes

    def deviations(self, bound: Bound, reading: AttentionReading | None) -> Found:
        """Everything in which a class differs from the document."""
        if getattr(bound.case.target, "core", False):
            return _of_function(self.form, bound, reading)
        return Deviations(self.form, bound, reading).findings()

    def unbound(self, case: Case) -> Iterator[Finding]:
        """The error that the document's own example raises in a class that could not be called in any other way."""
        return iter(()) if getattr(case.target, "core", False) else _example_error(self.form, case)

    def accepted(self, bound: Bound) -> tuple[str, ...]:
        """Mistakes that the document itself asks for."""
        return WRAPPER_LACKS if self.form.is_wrapper(bound.thing) else ()

    def solution(self) -> str:
        """A right class in this form."""
        return self.form.solution()


def add_unbound(report: Report, case: Case) -> None:
    """Add the error of the assignment's own example to the report on a class that could not be called."""
    if case.assignment is not None and report.verdict == "unknown":
        report.findings += case.assignment.unbound(case)
        report.verdict = "wrong" if report.wrong else report.verdict


Problem = tuple[str, str]  # severity and words


@dataclass
class Deviations:
    """One class beside one document."""

    form: Assignment
    bound: Bound
    reading: AttentionReading | None

    def findings(self) -> Found:
        """One finding for each kind of deviation, with all that was seen of it."""
        named = list(self._name_problems())
        for name, place, problems in (
            ("form-constructor", self._line_of("__init__"), [] if self._is_fragment else self.constructor_problems),
            ("form-width", self._width_line, [] if self._is_fragment else self._width_problems()),
            ("form-call", self._line_of("forward"), self.call_problems),
            ("form-return", self._return_line(), self._return_problems()),
            ("form-mask", self._mask_line(), self._mask_problems()),
            ("form-dropout", self._late_dropout, [("wrong", ON_WEIGHTS)] if self._late_dropout else []),
            ("form-name", named[0][0] if named else None, [problem for _, problem in named]),
        ):
            found = list(problems)
            if found:
                severity = "wrong" if any(kind == "wrong" for kind, _ in found) else found[0][0]
                words = dict.fromkeys(words for kind, words in found if kind == severity)
                yield Finding(name, f"{self.form.title} has {'; '.join(words)}", place, severity=severity)
        if not self.form.is_wrapper(self.bound.thing) and self._lacks_projection:
            lacks = f"{self.form.title} has one; the heads of the list are returned side by side"
            yield Finding("no-out-proj", lacks, self._return_line())
        if self.form.is_wrapper(self.bound.thing) and not self._merges_wrongly:
            yield Note("variant", f"a list of heads side by side without an output projection, as in {self.form.title}")

    @cached_property
    def _late_dropout(self) -> int | None:
        """The line where dropout acts on the output, if the document has it on the weights."""
        return dropped_late(self.bound, self.reading) if "dropout" in self.form.constructor else None

    @property
    def _lacks_projection(self) -> bool:
        """Whether it is a list of heads that leaves out the projection on purpose, which the document has."""
        output = None if self.reading is None else self.reading.output
        return self.reading is not None and output is not None and output.role.plain and is_list_of_heads(self.reading)

    @property
    def _merges_wrongly(self) -> bool:
        """Whether the heads are not side by side, which has a name of its own."""
        return any(isinstance(found, Finding) for found in head_merge(self.bound, self.reading))

    @property
    def _is_fragment(self) -> bool:
        """Whether only a method was given, and everything around it was assumed."""
        return bool(getattr(self.bound.case.target, "assumed", ()))

    # The constructor.

    @property
    def owner(self) -> type | None:
        """The class; None for a function."""
        target = self.bound.case.target
        if inspect.isclass(target):
            return target
        return None if inspect.isfunction(target) else type(target)

    @cached_property
    def constructor_problems(self) -> list[Problem]:
        """What is wrong with the constructor."""
        if self.owner is None:
            return [("wrong", f"a class {self.form.built}; this is a function")]
        given, found = list(self.form.constructor), parameters_of(self.owner)
        asked = f"{self.form.built}; this is {self.owner.__name__}({', '.join(as_written(p) for p in found)})"
        broken = [words for how in self.form.examples if (words := self._build_problem(how))]
        broken = broken or self._default_problems(found)
        if broken:
            return [("wrong", f"{asked}: {broken[0]}")]
        if [p.name for p in found][: len(given)] != given:
            other = "position" if "names" in self.form.examples else "name"
            return [("fragile", f"{asked}: a call by {other} does not mean the same")]
        return []

    def _build_problem(self, how: str) -> str:
        """Why the document's example does not build the class that was asked for; empty if it does."""
        values = self.form.values(self.bound.sizes)
        args, named = ([], values) if how == "names" else (list(values.values()), {})
        text = f"({', '.join(f'{k}={v}' for k, v in named.items()) or ', '.join(map(str, args))})"
        assert self.owner is not None  # noqa: S101 - functions were refused above
        try:
            taken = inspect.signature(self.owner).bind(*args, **named).arguments
        except (TypeError, ValueError) as error:
            known = {constructor_role(p.name) for p in parameters_of(self.owner)}
            lacks = [name for name in values if constructor_role(name) not in known]
            return f"it takes no {' and no '.join(lacks)}" if lacks else f"{text} raises TypeError: {error}"
        if [constructor_role(name) for name in taken] == [constructor_role(name) for name in values]:
            return ""
        return self._other_problem(text, lambda: self.owner(*args, **named))  # type: ignore[misc]

    def _other_problem(self, text: str, make: Callable[[], Any]) -> str:
        """Why an object is not the one that was asked for, where the names of the parameters do not tell."""
        try:
            with self.bound.running():
                thing = make()
                prepare(thing)
            again = self.bound.called(thing=thing)
        except Exception as error:  # whatever a learner's code raises is a result
            return f"{text} raises {error_words(error)}"
        seen = read(again)
        heads = None if seen is None else seen.core.heads.shape[1]
        if heads is not None and heads != self.bound.sizes.H:
            return f"{text} makes {heads} heads where {self.bound.sizes.H} were asked for"
        return ""

    def _width_problems(self) -> Iterator[Problem]:
        """Why the output does not get a width of its own, where the document has one parameter for each."""
        wide = [name for name in self.form.constructor if constructor_role(name) in ("width", "out_width")]
        repaired = self.bound.repaired
        if self.owner is None or len(wide) < 2 or repaired.super_missing or repaired.attributes:
            return
        if any(severity == "wrong" for severity, _ in self.constructor_problems):
            return
        width = (self.bound.sizes.D + 1) * self.bound.sizes.H
        values = list((self.form.values(self.bound.sizes) | {wide[-1]: width}).values())
        expected = width * (self.bound.sizes.H if self.form.is_wrapper(self.bound.thing) else 1)
        try:
            with self.bound.running(), torch.no_grad():
                thing = self.owner(*values)
                prepare(thing)
                returned = self.bound.form.call(thing, self.bound.inputs)
        except Exception:  # where widths are confused, that has a name and a line of its own
            return
        output = self.bound.form.result(returned, self.bound.inputs)
        got = None if output is None else output.shape[-1]
        if got != expected:
            given = f"{wide[0]}={self.bound.sizes.E}, {wide[-1]}={width} and {self.bound.sizes.H} heads"
            yield "wrong", f"an output of width {expected} for {given}; here it is {got} wide"

    @property
    def _width_line(self) -> int | None:
        """The line that makes the list of heads, or the constructor."""
        listed = self.form.is_wrapper(self.bound.thing)
        return (self.bound.case.line_of_attribute(self.form.wrapper) if listed else None) or self._line_of("__init__")

    def _default_problems(self, found: list[inspect.Parameter]) -> list[str]:
        """Parameters whose default is not the document's."""
        defaults = {p.name: p.default for p in found}
        return [
            f"{name} is {defaults[name]} by default"
            for name, default in self.form.constructor.items()
            if default is not REQUIRED and name in defaults and defaults[name] != default
        ]

    # The call.

    @cached_property
    def inputs(self) -> Inputs:
        """The traced inputs, as many as the document passes."""
        query, key, value = self.bound.inputs
        return Inputs(query, query, query) if len(self.form.inputs) == 1 else Inputs(query, key, value)

    def _example(self, inputs: Inputs, *mask: Tensor) -> Any:
        """What the document's example call returns."""
        method = entry(self.bound.thing)
        assert method is not None  # noqa: S101 - it was bound
        with self.bound.running(), torch.no_grad():
            return method(*inputs[: len(self.form.inputs)], *mask)

    @cached_property
    def example(self) -> Any:
        """What the example call without a mask returns, or the error that it raises."""
        return _outcome(lambda: self._example(self.inputs))

    def _binds(self, count: int) -> bool:
        """Whether the call takes so many positional arguments and needs no more."""
        parameters = call_parameters(self.bound.thing)
        places = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        return count <= len(places) and all(p.default is not REQUIRED for p in parameters if p not in places[:count])

    @cached_property
    def call_problems(self) -> list[Problem]:
        """What is wrong with the call."""
        return list(self._call_problems())

    def _call_problems(self) -> Iterator[Problem]:
        form, count = self.form, len(self.form.inputs)
        words = f"{form.called}; this is forward({', '.join(as_written(p) for p in call_parameters(self.bound.thing))})"
        if not self._binds(count):
            yield "wrong", f"{words}: a call with {', '.join(form.inputs)} alone fails"
        elif form.mask and not self._binds(count + 1):
            yield "wrong", f"{words}: there is no place for a mask after {form.inputs[-1]}"
        elif isinstance(self.example, Exception):
            if not self._default_fails():
                yield "wrong", f"{words}: the example call raises {error_words(self.example)}"
        elif not self._same_as_own_call():
            yield "wrong", f"{words}: by position, {', '.join(form.inputs)} are taken in other roles"

    def _default_fails(self) -> bool:
        """Whether the call without optional arguments fails in the same way, which has a name of its own."""
        plain = replace(self.bound.form, fixed={})
        with self.bound.running(), torch.no_grad():
            own = _outcome(lambda: plain.call(self.bound.thing, self.bound.inputs))
        return isinstance(own, Exception) and error_words(own) == error_words(self.example)

    def _same_as_own_call(self) -> bool:
        """Whether arguments by position have the roles that their names have here."""
        own = [self.bound.output_of(self.inputs) for _ in range(2)]
        output = self.bound.form.result(self.example, self.inputs)
        if own[0] is None or own[1] is None or output is None or not _equal(own[0], own[1]):
            return True  # nothing can be compared; random results have a finding of their own
        return _equal(output, own[0])

    # What it returns.

    def _return_problems(self) -> Iterator[Problem]:
        runs = self._binds(len(self.form.inputs)) and not isinstance(self.example, Exception)
        returned = self.example if runs else self.bound.returned
        B, T = self.bound.inputs.query.shape[:2]
        S, H = self.inputs.key.shape[1], self.bound.sizes.H
        words = f"{self.form.returned}; this returns {described(returned, self.bound.sizes)}"
        if not self.form.weights:
            if not isinstance(returned, Tensor) or returned.shape[:2] != (B, T):
                yield "wrong", words
        elif not isinstance(returned, tuple | list) or len(returned) != 2 or len(leaves(returned)) != 2:
            yield "wrong", words
        elif returned[0].shape[:2] != (B, T) or tuple(returned[1].shape) != (B, H, T, S):
            yield "wrong", f"{words}, not ((B, T, E), (B, H, T, S)) = (({B}, {T}, …), ({B}, {H}, {T}, {S}))"

    # Masks.

    def _mask_problems(self) -> Iterator[Problem]:
        if self.reading is not None and any(f.name in MIXING for f in stage_findings(self.bound, self.reading)):
            if self.form.causal and self.reading.pattern == "full":
                yield "wrong", "a causal mask of its own; here a token sees later ones"
            measured_here = measured(self.bound, self.reading) if self.form.mask else []
            for argument in (a for a in measured_here if a.meaning == "drop"):
                here = argument.words().partition(", in shapes")[0]
                yield "wrong", f"{self.form.mask}: 1 keeps a key, 0 hides it; here {here}"
            return  # tokens are mixed whatever the mask hides, and that has a name of its own
        if not self._binds(len(self.form.inputs)) or isinstance(self.example, Exception):
            own = _outcome(lambda: self.bound.call(self.bound.inputs))
            hides = isinstance(own, Exception) or self._hides_future(self.bound.call, self.bound.inputs)
        else:
            hides = self._hides_future(self._example, self.inputs)
        if self.form.causal and not hides:
            yield "wrong", "a causal mask of its own; here a token sees later ones"
        elif hides and not self.form.causal:
            yield "wrong", f"no causal mask of its own, only {self.form.mask}; here a token never sees later ones"
        elif self.form.mask and not self.call_problems:
            yield from self._argument_problems()

    def _mask_line(self) -> int | None:
        """The line that applies a mask, or forward where none does."""
        if self.reading is None:
            return self._line_of("forward")
        known = (a for a in measured(self.bound, self.reading) if a.meaning)
        applied = (line_of_meaning(argument, self.bound, self.reading) for argument in known)
        return next(applied, None) or self.reading.core.pattern_line(inverted=False) or self._line_of("forward")

    def _hides_future(self, call: Callable[..., Any], inputs: Inputs, *mask: Tensor) -> bool:
        """Whether the last token changes no output but its own."""
        changed = Inputs(*(torch.cat([x[:, :-1], x[:, -1:] + 1.0], 1) for x in inputs))
        with torch.random.fork_rng():  # dropout that never stops draws the same numbers for both
            results = []
            for some in (inputs, changed):
                torch.manual_seed(0)
                results.append(self.bound.form.result(call(some, *mask), some))
        before, after = results
        return before is None or after is None or _equal(before[:, :-1], after[:, :-1])

    def _argument_problems(self) -> Iterator[Problem]:
        """A lower triangle of ones must hide the future, in every type and shape that broadcasts to (B, H, T, S)."""
        T, B = self.bound.sizes.T, self.bound.inputs.query.shape[0]
        lower = torch.ones(T, T, dtype=torch.float64).tril()
        kinds = {
            "(T, T) floats": lower,
            "(T, T) booleans": lower.bool(),
            "(B, 1, T, T) booleans": lower.bool().expand(B, 1, T, T),
        }
        tried = {words: _outcome(lambda m=mask: self._hides_future(self._example, self.inputs, m))  # type: ignore[misc]
                 for words, mask in kinds.items()}  # fmt: skip
        failed = {words: outcome for words, outcome in tried.items() if outcome is not True}
        broken = len(failed) == len(kinds) or (self.form.mask_example and next(iter(kinds)) in failed)
        if failed:
            words, outcome = next(iter(failed.items()))
            why = "does not hide the future"
            if isinstance(outcome, Exception):
                why = f"raises {error_words(outcome).rstrip('.')}; mask == 0 takes numbers and booleans"
            asked = f"{self.form.mask}: 1 keeps a key, 0 hides it, broadcast to (B, H, T, S)"
            yield (
                "wrong" if broken else "fragile",
                f"{asked}; here a lower triangle of ones, {words}, {why}{self._measured_mask()}",
            )

    def _measured_mask(self) -> str:
        place = [p.name for p in call_parameters(self.bound.thing)][len(self.form.inputs)]
        known = [argument.words() for argument in measured(self.bound, self.reading) if argument.name == place]
        return f" ({known[0].partition(', in shapes')[0]})" if known else ""

    # Names.

    def _name_problems(self) -> Iterator[tuple[int | None, Problem]]:
        """Other names than the document's, each with the line where it stands."""
        form, thing = self.form, self.bound.thing
        if self.owner is not None and not self._is_fragment:
            if self.owner.__name__ not in form.classes:
                words = f"class {' or '.join(form.classes)}, here {self.owner.__name__}"
                yield self.bound.case.line_with(rf"^class {self.owner.__name__}\b"), (form.naming, words)
            missing = [name for name in self._inner_names() if not self._has(name)]
            if missing:
                held = [name for name, _ in thing.named_children()] if isinstance(thing, nn.Module) else []
                words = f"{', '.join(f'self.{name}' for name in missing)}, not found here" + (
                    f" among {', '.join(held)}" if held else ""
                )
                yield self._line_of("__init__"), (form.naming, words)
        taken = [p.name for p in call_parameters(thing)][: len(form.call)]
        if taken != list(form.call) and not self.call_problems:
            words = f"arguments {', '.join(form.call)}, here {', '.join(taken)}"
            yield self._line_of("forward"), (form.naming, words)

    def _inner_names(self) -> list[str]:
        form = self.form
        if form.is_wrapper(self.bound.thing):
            return [form.wrapper]
        extra = [*(["dropout"] if "dropout" in form.constructor else []), *([form.buffer] if form.buffer else [])]
        return [*form.sizes, *form.layers, *extra, *form.methods]

    def _has(self, name: str) -> bool:
        spelled = (name, self.form.spellings.get(name, name))
        held = next((getattr(self.bound.thing, n) for n in spelled if hasattr(self.bound.thing, n)), None)
        if name in self.form.layers:
            return isinstance(held, nn.Module | Tensor)
        if name == self.form.buffer:
            return isinstance(held, Tensor) and any(held is b for m in modules(self.bound.thing) for b in m.buffers())
        return callable(held) if name in self.form.methods else held is not None

    # Lines.

    def _line_of(self, method: str) -> int | None:
        return _line_of(self.bound.case, method)

    def _return_line(self) -> int | None:
        code = getattr(getattr(self.owner, "forward", None), "__code__", None)
        steps = [] if code is None else [s for s in dis.get_instructions(code) if s.opname.startswith("RETURN")]
        lines = [s.positions.lineno for s in steps if s.positions is not None and s.positions.lineno is not None]
        return lines[-1] if lines and self._line_of("forward") is not None else self._line_of("forward")


def _line_of(case: Case, method: str) -> int | None:
    """The line of a method's definition; None where it is in another file, as an inherited one is."""
    target = case.target
    owner = target if inspect.isclass(target) or inspect.isfunction(target) else type(target)
    code = getattr(getattr(owner, method, owner), "__code__", None)
    return None if code is None or code.co_filename != case.filename else code.co_firstlineno


def _of_function(form: Assignment, bound: Bound, reading: AttentionReading | None) -> Iterator[Finding]:
    """A function of queries, keys and values where the document has a class: only its mask can be compared."""
    function = bound.case.target.function
    if not hasattr(function, "assumed"):  # it was written as a function, and not put together from a fragment
        words = f"{form.title} has a class {form.built} with {form.called}; this is a function"
        yield Finding("form-constructor", words, function.__code__.co_firstlineno)
    for argument in measured(bound, reading) if form.mask else ():
        if argument.meaning == "drop":
            here = argument.words().partition(", in shapes")[0]
            said = f"{form.title} has {form.mask}: 1 keeps a key, 0 hides it; here {here}"
            yield Finding("form-mask", said, None if reading is None else line_of_meaning(argument, bound, reading))


def _outcome(work: Callable[[], Any]) -> Any:
    """The result, or the error: whatever a learner's code raises is a result."""
    try:
        return work()
    except Exception as error:
        return error


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-7, atol=1e-9, equal_nan=True)


def _example_error(form: Assignment, case: Case) -> Iterator[Finding]:
    """The document's example in single precision, exactly as it stands there."""
    if not inspect.isclass(case.target) or (case.loaded is not None and case.loaded.failed_imports):
        return
    sizes, place = CallSizes(B=2), "form-constructor"
    values = form.values(sizes)
    try:
        with quiet(), torch.no_grad():
            built = case.target(**values) if form.examples[0] == "names" else case.target(*values.values())
            place = "form-call"
            method = entry(built)
            if method is not None:
                method(*(torch.randn(sizes.B, sizes.T, sizes.E) for _ in form.inputs))
    except NotImplementedError:
        return
    except Exception as error:  # whatever a learner's code raises is a result
        if "Stub" not in str(error):
            example = form.built if place == "form-constructor" else form.called
            line = error_line(error, case.filename) or _line_of(
                case, "__init__" if place == "form-constructor" else "forward"
            )
            words = f"{form.title} has {example}; here that raises {error_words(error)}"
            yield Finding(place, words, line)
