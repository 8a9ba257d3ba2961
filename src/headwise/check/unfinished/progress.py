"""Judges work in progress: which of the ten steps exist and are right, and which one comes next.

The steps are those of `headwise steps`. Only code that is neither right nor complete gets here.
"""

import ast
import contextlib
import functools
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.check.binding import Bound, Instance
from headwise.check.calls import CallForm, forms, make_inputs
from headwise.check.code.case import Case
from headwise.check.faults import masks, stages
from headwise.check.faults.scores import masks_without_effect
from headwise.check.mistakes import Finding, Note, settled
from headwise.check.objects import METHODS
from headwise.check.proof import prediction_error
from headwise.check.reading import read
from headwise.check.report import Report
from headwise.check.search import Search
from headwise.check.trace import Trace, error_line
from headwise.check.unfinished.completion import Completed, Reached
from headwise.check.unfinished.fragments import helper_for, merge_heads, split_heads
from headwise.check.unfinished.placeholders import Gaps, gaps_of

MOST_CALLS = 24
MOST_FORMS = 12  # for one object: the first values of a required mask are those of which ones keep, then zeros
HELPED = {split_heads: {2, 3}, merge_heads: {9}}
QUESTIONS = (*stages.STAGES, masks_without_effect)
CORE = {4, 5, 6, 7, 8}  # the steps of a function of queries, keys and values


class Task(NamedTuple):
    """One of the ten steps: its name, the task, and a hint that does not give it away."""

    name: str
    task: str
    hint: str


STEPS = {
    1: Task("project", "project the input to queries, keys and values",
            "Make three linear layers in __init__ and apply each of them to its input in forward."),
    2: Task("split", "split queries, keys and values into heads",
            "Cut the last axis into two, (heads, head width); no number moves."),
    3: Task("transpose", "move the heads in front of the tokens",
            "The products must run over the last two axes, so the shape has to become (B, H, T, D)."),
    4: Task("scores", "compare every query with every key",
            "One product of queries and keys; the result has a row for each query and a column for each key."),
    5: Task("mask", "hide the keys that a query may not see",
            "Do it to the scores, before the softmax, with a number whose exponential is zero."),
    6: Task("scale", "scale the scores", "Think of how a sum of D products grows with D, the width of one head."),
    7: Task("softmax", "turn the scores into weights",
            "The weights of one query over all keys must sum to one: choose the axis accordingly."),
    8: Task("weighted values", "take the weighted sum of the values",
            "One product of weights and values for each head."),
    9: Task("concat", "merge the heads", "Undo step 3 first, then put the heads of a token side by side: (B, T, E)."),
    10: Task("project", "project the merged heads", "One more linear layer mixes what the heads found."),
}  # fmt: skip
RETURN = Task("return", "return the result", "Everything is computed; the caller has to get it.")
# Mistakes that only say that a step does not exist.
ABSENT = {"no-out-proj": 10, "scale-missing": 6, "mask-ignored": 5, "causal-ignored": 5, "single-head": 2,
          "softmax-missing": 7, "no-qkv-proj": 1}  # fmt: skip
# Mistakes that are not about a step, and that remain whatever is missing.
CARRIED = {"missing-import", "missing-super", "missing-attribute", "contiguous", "layers-in-list",
           "layers-in-forward"}  # fmt: skip
# Words of a doubt and the steps that are then not called right; any other doubt concerns all of them.
DOUBTED = {"of a head follows": {1, 2, 3}, "between projection and product": {1, 2, 3}, "the norm of": {1, 2, 3},
           "the scale of": {6}, "how weights follow": {4, 5, 6, 7}, "how the output follows": {9, 10}}  # fmt: skip
STEP_OF = {"split-view": 2, "merge-view": 9, "softmax-axis": 7, "heads-averaged": 9, "mask-discarded": 5}


@dataclass
class PartialRun:
    """One call that came as far as the code goes."""

    bound: Bound
    completed: Completed
    reached: Reached

    @property
    def hides_all(self) -> bool:
        """Whether the value of a required mask hid every key."""
        returned = self.bound.returned
        return bool(self.bound.form.fixed) and isinstance(returned, Tensor) and bool(returned.isnan().all())


def review(case: Case, report: Report) -> Report:
    """The report itself, or one that says how far unfinished code is right."""
    gaps = gaps_of(case) if report.verdict in ("wrong", "unknown", "partial") else Gaps()
    refused = next((gap.line for gap in gaps.found if gap.refuses and 5 in gap.steps), None)
    if report.verdict == "partial" and refused is not None and not any("1 " in words for words in report.masks):
        return _without_masks(report, refused)
    if report.verdict not in ("wrong", "unknown") or not (gaps.found or _may_end_early(case, report)):
        return report
    if any(f.name.startswith(("form-", "differs-")) for f in report.wrong):
        return report  # it was compared with an assignment or a reference
    if _lacks_forward(case) or _is_skeleton(gaps):
        return _begun(case, report)
    if report.cause == "no-return" and not gaps.found and _returns_somewhere(case):
        return report
    run = PartialSearch(case, gaps).furthest()
    if run is None or not _is_unfinished(run, gaps, report):
        return report
    return _judged(run, gaps, report)


def _without_masks(report: Report, line: int) -> Report:
    """Code that is right but for a mask, which it refuses as not yet implemented."""
    done = [f"{number} {step.name}" for number, step in STEPS.items() if number != 5]
    made = replace(report, verdict="unfinished", done=done, doubts=[], stops=line, certificate=[])
    made.next, made.hint = f"step 5, {STEPS[5].task}", STEPS[5].hint
    return made


def _may_end_early(case: Case, report: Report) -> bool:
    """Whether code without any placeholder may still end before the last step."""
    if _is_open_ended(case):
        return True
    whole = any(f.name == "no-return" and f.detail for f in report.wrong)  # nothing only where an option is left out
    return report.verdict == "unknown" or (report.cause == "no-return" and not whole)


def _is_open_ended(case: Case) -> bool:
    """Whether it is a row of statements outside any function, which may end with any step."""
    return getattr(case.target, "open_ended", False)


def _returns_somewhere(case: Case) -> bool:
    """Whether the method that takes the input returns something, only not on the path that was taken."""
    functions = [n for n in ast.walk(case.tree) if isinstance(n, ast.FunctionDef) and n.name in METHODS]
    return any(isinstance(n, ast.Return) and n.value is not None for f in functions for n in ast.walk(f))


def _lacks_forward(case: Case) -> bool:
    """Whether it is a class whose `forward` was not begun."""
    target = case.target
    return isinstance(target, type) and not any(name in vars(base) for base in _own_bases(target) for name in METHODS)


def _is_skeleton(gaps: Gaps) -> bool:
    """Whether neither the constructor nor the method that takes the input has a line of its own."""
    return "__init__" in gaps.empty and not gaps.empty.keys().isdisjoint(METHODS)


def _own_bases(target: type) -> Iterator[type]:
    return (base for base in target.__mro__ if base is not object and not base.__module__.startswith("torch."))


def _begun(case: Case, report: Report) -> Report:
    made = replace(report, verdict="unfinished", findings=[], doubts=[], tried=[])
    made.next, made.hint = f"step 1, {STEPS[1].task}, in a method forward", STEPS[1].hint
    if _has_layers(case):
        made.hint = "The layers are there; apply each of them to its input in a method named forward."
    return made


def _has_layers(case: Case) -> bool:
    """Whether the constructor makes layers or weights."""
    return case.line_with(r"\b(Linear|Parameter|Conv1d)\(") is not None


def _is_unfinished(run: PartialRun, gaps: Gaps, report: Report) -> bool:
    """Whether something is missing, rather than wrong: the source says so, or the call ends before the heads exist."""
    if gaps.open or any(gaps.names(ABSENT[f.name]) for f in report.wrong if f.name in ABSENT):
        return True
    if run.reached.stopped:
        return bool(gaps.found) or report.verdict == "unknown"
    if report.cause == "no-return" or _is_open_ended(run.bound.case):
        return run.reached.last < 10
    if run.reached.kind == "projections" and run.bound.trace.softmax_nodes():
        return False  # it goes on in a way that is not understood
    return run.reached.kind in ("projections", "scores", "weights") and run.reached.returned


# Running as far as it goes.


class PartialSearch(Search):
    """A search for the call that comes furthest."""

    def __init__(self, case: Case, gaps: Gaps) -> None:
        super().__init__(case)
        self.gaps = gaps
        self.supplied: set[int] = set()  # steps that helpers of ours do

    def furthest(self) -> PartialRun | None:
        best: PartialRun | None = None
        for run in itertools.islice(self._runs(), MOST_CALLS):
            if best is None or (run.reached.last, not run.hides_all) > (best.reached.last, not best.hides_all):
                best = run
            if not run.hides_all and (run.bound.form.natural or run.reached.last >= 4):
                break
        return best

    def _runs(self) -> Iterator[PartialRun]:
        for sizes in self._usual_sizes():
            for built in itertools.islice(self._builds(sizes), 6):
                with _forgiving(self.case.target):
                    instance = self._make(built, sizes)
                if instance is None:
                    continue
                self._help(instance)
                for form in itertools.islice(forms(instance.thing, sizes), MOST_FORMS):
                    yield from self._in_either_layout(instance, form)

    def _in_either_layout(self, instance: Instance, form: CallForm) -> Iterator[PartialRun]:
        """The call with the batch first; with the batch second where that comes further."""
        run = self._complete(instance, form)
        if run is None or run.reached.last == 0:
            second = self._complete(instance, replace(form, layout="batch second"))
            run = second if second is not None and (run is None or second.reached.last) else run
        if run is not None:
            yield run

    def _help(self, instance: Instance) -> None:
        """Give an object helpers in place of those that are empty and say by their name what they will do."""
        for name in self.gaps.empty:
            helper = helper_for(name)
            if helper is not None and hasattr(instance.thing, name):
                instance.thing.__dict__[name] = functools.partial(helper, instance.thing)
                self.supplied |= HELPED[helper]

    def _complete(self, instance: Instance, form: CallForm) -> PartialRun | None:
        completed = Completed(instance, self._is_gap)
        inputs, trace = make_inputs(form, instance.sizes), Trace(self.case.filename)

        def call() -> Any:
            nonlocal trace
            trace = Trace(self.case.filename)
            with torch.no_grad(), trace:
                return form.call(completed, inputs)

        try:
            returned = self._repairing(call, instance.sizes, instance.repaired, instance.thing)
        except Exception:  # a mistake of the learner's, which the ordinary judgment names
            return None
        trace.returned = []
        fields = vars(replace(instance, thing=completed))
        bound = Bound(
            **fields,
            case=self.case,
            form=form,
            inputs=inputs,
            trace=trace,
            returned=returned,
            output=form.result(returned, inputs),
        )
        completed.reached.steps -= self.supplied
        return PartialRun(bound, completed, completed.reached)

    def _is_gap(self, error: BaseException) -> bool:
        """Whether an error only says that something was not written yet."""
        if isinstance(error, NotImplementedError):
            return True
        words, line = str(error), error_line(error, self.case.filename) or 0
        if isinstance(error, NameError):
            return any(gap.open and gap.line <= line for gap in self.gaps.found)
        if isinstance(error, AttributeError) and "object has no attribute" in words and "NoneType" not in words:
            return self.gaps.inside("__init__") or "ellipsis" in words
        return self.gaps.open and ("NoneType" in words or "ellipsis" in words)


@contextlib.contextmanager
def _forgiving(target: Any) -> Iterator[None]:
    """A constructor that ends in NotImplementedError keeps what it has made."""
    original = vars(target).get("__init__") if isinstance(target, type) else None
    if original is None:
        yield
        return

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(NotImplementedError):
            original(self, *args, **kwargs)

    target.__init__ = init
    try:
        yield
    finally:
        target.__init__ = original


# Judging what exists.


def _judged(run: PartialRun, gaps: Gaps, before: Report) -> Report:
    found = _questioned(run)
    steps = _existing(run, found)
    absent = {ABSENT[f.name] for f in found.findings if f.name in ABSENT} - ({5} if found.causal else set())
    excused = {step for step in absent if step > max(steps - {step}, default=0) or step == 5 or gaps.names(step)}
    findings = [*_carried(before, gaps), *found.findings]
    wrong = settled(f for f in findings if f.severity == "wrong" and ABSENT.get(f.name, 0) not in excused)
    done = sorted(steps - absent - {STEP_OF.get(f.name, 6 if "scale" in f.name else 0) for f in wrong})
    report = Report("wrong" if wrong else "unfinished", run.bound.built.text, findings=wrong, seconds=before.seconds)
    report.call = f"forward({run.bound.form.words()})"
    report.masks = [note.words for note in found.of_kind("mask") if 5 in done]
    report.doubts = [note.words for note in found.of_kind("doubt")]
    _say_progress(report, run, done, 5 in absent)
    return report


def _say_progress(report: Report, run: PartialRun, done: list[int], masked: bool) -> None:
    step = _next(done, run, masked)
    words = STEPS.get(step, RETURN)
    report.done = [f"{number} {STEPS[number].name}" for number in done]
    report.next = f"step {step}, {words.task}" if step in STEPS else words.task
    report.hint, report.stops = words.hint, run.reached.line
    made = run.reached.streams
    if step == 1 and made in (1, 2):
        report.next += f" ({made} of the 3 {'is' if made == 1 else 'are'} there)"
        report.hint = "Apply a layer of its own to the input for each one that is missing, as you did before."
    elif step == 3 and run.reached.behind:
        report.next += f" (still behind them in {', and in '.join(run.reached.behind)})"
    elif step == 1 and _has_layers(run.bound.case):
        report.hint = "The layers are there; apply each of them to its input."


def _carried(before: Report, gaps: Gaps) -> Iterator[Finding]:
    """Mistakes of the ordinary judgment that have nothing to do with what is missing."""
    names = CARRIED - ({"missing-attribute", "missing-super"} if gaps.inside("__init__") else set())
    real = (finding for finding in before.wrong if finding.name in names)
    yield from (finding for finding in real if not re.search("NoneType|ellipsis", finding.detail))


@dataclass
class Questioned:
    """What the ordinary questions say about a completed call."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    causal: bool = False

    def of_kind(self, kind: str) -> list[Note]:
        return [note for note in self.notes if note.kind == kind]


def _questioned(run: PartialRun) -> Questioned:
    if run.bound.output is None:
        return Questioned()
    reading = read(run.bound)
    asked = [found for question in (*QUESTIONS, masks.mask_meanings) for found in question(run.bound, reading)]
    findings = [f for f in asked if isinstance(f, Finding) and _is_theirs(f, run)]
    notes = [f for f in asked if isinstance(f, Note)]
    error = None if reading is None else prediction_error(run.bound, reading)
    if error is not None and not error < 1e-6:
        notes.append(
            Note("doubt", f"on new inputs the completed result differs by {error:.2g} from what was understood")
        )
    return Questioned(findings, notes, reading is not None and reading.pattern == "causal")


def _is_theirs(finding: Finding, run: PartialRun) -> bool:
    """Whether a finding is about a step that the learner wrote."""
    if finding.name in ("no-qkv-proj", "one-projection", "wrong-role") and run.reached.streams < 3:
        return False
    step = ABSENT.get(finding.name) or STEP_OF.get(finding.name, 0)
    return step <= run.reached.last or finding.name in ABSENT or finding.name == "mask-discarded"


def _existing(run: PartialRun, found: Questioned) -> set[int]:
    """The steps that were found in the call and understood."""
    steps = set(run.reached.steps)
    if run.reached.last >= 4 and any(note.words.startswith("scale 1/√") for note in found.notes):
        steps.add(6)
    if found.causal or any(" a key" in note.words or "added" in note.words for note in found.of_kind("mask")):
        steps.add(5)
    for note in found.of_kind("doubt"):
        steps -= next((doubted for words, doubted in DOUBTED.items() if words in note.words), steps)
    if _is_core(run):
        return steps & CORE
    return steps if run.reached.streams >= 3 else steps - {1}


def _next(done: list[int], run: PartialRun, masked: bool) -> int:
    """The first step that is missing; the mask only where one can be passed, or is stored."""
    wanted = set(STEPS) if run.bound.form.masks or masked else set(STEPS) - {5}
    wanted &= CORE if _is_core(run) else wanted
    return min(wanted - set(done), default=11)


def _is_core(run: PartialRun) -> bool:
    return bool(getattr(run.completed.inner[0], "core", False))
