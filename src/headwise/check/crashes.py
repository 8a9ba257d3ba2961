"""What is said of something that never ran: the learner's error where that is certain, else what was tried."""

import re

from headwise.check.attempt import Failure
from headwise.check.bound import Bound
from headwise.check.case import Case
from headwise.check.findings import Finding, ranked
from headwise.check.repairs import Repaired
from headwise.check.report import Report
from headwise.check.stubs import Stub
from headwise.check.unset import faults_of_text
from headwise.check.usage import names_used

CERTAIN = (NameError, AttributeError, TypeError, IndexError, KeyError, UnboundLocalError, ZeroDivisionError)
CERTAIN_FAULTS = {"missing-import", "undefined-name", "missing-super", "missing-attribute", "no-return"}
ARGUMENTS = re.compile(r"(?:\w+\.)*(\w+)\(\) (?:missing|takes) ")
OUR_CALLS = {"forward", "__init__", "__call__"}
SEVERAL = 4  # guesses, of numbers and of None
# Perhaps we passed something of another kind.
OURS = (
    "values to unpack",
    "config has no",
    "NoneType",
    "Stub",
    "is not callable",
)


def not_bound(case: Case, bound: Bound | None, failures: list[Failure]) -> Report:
    """The report where no attempt gave an output."""
    report = Report("unknown", subject=case.name)
    report.tried = _attempts(failures)
    first = None if _incomplete(case) else _telling(failures)
    findings = case.findings + _failed_imports(case)
    if first is not None:
        findings += repairs_needed(first.repaired, case)
        report.subject = first.built
        report.call = "" if first.called is None else f"forward({first.called})"
        findings.append(_crash(first))
    elif bound is not None and bound.returned is None:
        findings += [*repairs_needed(bound.repaired, case), Finding("no-return")]
    elif bound is not None:
        findings += repairs_needed(bound.repaired, case)
        report.doubts.append("what it returns is not of the shape (batch, tokens, width)")
    known = {f.name for f in findings}
    findings += [f for f in faults_of_text(case) if f.name not in known] if first is None else []
    if any(f.name in CERTAIN_FAULTS for f in findings) or first is not None:
        report.verdict = "wrong" if any(f.severity == "wrong" for f in findings) else "unknown"
    report.findings = ranked(findings)
    return report


def _failed_imports(case: Case) -> list[Finding]:
    """What the class needs and nobody can import: gone from a package, or in a file that is not here."""
    failed = {} if case.loaded is None else case.loaded.failed_imports
    used = names_used(case.target)
    found = [Finding("missing-import", words, line) for name, (line, words) in failed.items() if name in used]
    return found[:1]


def _incomplete(case: Case) -> bool:
    """Whether it uses something that could not be imported."""
    return any(isinstance(case.namespace.get(name), Stub) for name in names_used(case.target))


def _attempts(failures: list[Failure]) -> list[str]:
    seen: dict[str, str] = {}
    for f in failures:
        words = f.built if f.called is None else f"{f.built} called with ({f.called})"
        seen.setdefault(
            words, f"{words}: {type(f.error).__name__}: {str(f.error).splitlines()[0][:100] if str(f.error) else ''}"
        )
    return list(seen.values())


def _telling(failures: list[Failure]) -> Failure | None:
    """The failure that is surely the learner's: in their lines, in the most natural attempt."""
    inside = [f for f in failures if f.line is not None]
    if not inside:
        return None
    calls = [f for f in inside if f.called is not None]
    if (sure := _after_attention(calls) or _own_call(calls)) is not None:
        return sure
    natural = [f for f in calls if f.natural]
    simple = [f for f in natural if f.projected and not f.guessed and "NoneType" not in str(f.error)]
    same_end = [f for f in natural if f.guessed and _end(f) in {_end(g) for g in calls if g.without}]
    natural = simple or same_end or natural
    if calls and not natural:
        return _whatever_we_pass(calls)
    first = natural[0] if natural else inside[0]
    if first.called is not None and not _form_is_certain(first, calls):
        return None
    kinds = {(type(f.error), str(f.error), f.line) for f in inside if "NoneType" not in str(f.error)}
    always = len(kinds) == 1 and isinstance(first.error, CERTAIN)
    if isinstance(first.error, AssertionError) or first.on_purpose or not (first.natural or always):
        return None
    if any(word in str(first.error) for word in OURS):
        return None
    if isinstance(first.error, CERTAIN) or "only one dimension" in str(first.error):
        return first
    return first if isinstance(first.error, RuntimeError | ValueError) and _natural(first) else None


def _own_call(calls: list[Failure]) -> Failure | None:
    """A function of the learner's own that is called with too few or too many arguments, whatever we pass."""
    found = [
        f
        for f in calls
        if isinstance(f.error, TypeError) and (m := ARGUMENTS.match(str(f.error))) and m[1] not in OUR_CALLS
    ]
    return found[0] if found and found[0].projected else None


def _after_attention(calls: list[Failure]) -> Failure | None:
    """An error behind the softmax: input and sizes were right as far as that. All that come so far must end alike."""
    late = [f for f in calls if f.attended and not f.guessed]
    if not late or len({_end(f) for f in late}) > 1:
        return None
    first = late[0]
    ours = isinstance(first.error, AssertionError) or first.on_purpose or any(w in str(first.error) for w in OURS)
    return None if ours else first


def _whatever_we_pass(calls: list[Failure]) -> Failure | None:
    """An error that does not depend on what had to be guessed: a name that nobody defines, or the same every time."""
    names = [f for f in calls if isinstance(f.error, NameError) and not isinstance(f.error, UnboundLocalError)]
    if names and names[0].projected:
        return names[0]
    ends = {(type(f.error), str(f.error), f.line) for f in calls}
    guesses = {f.built for f in calls}
    same = len(ends) == 1 and len(guesses) >= SEVERAL and isinstance(calls[0].error, CERTAIN)
    return calls[0] if same and not any(word in str(calls[0].error) for word in OURS) else None


def _form_is_certain(first: Failure, calls: list[Failure]) -> bool:
    """Whether the error cannot be ours: it does not depend on the input, or the input had passed a projection.

    Where a mask had to be guessed, the call without one must have ended in the same way.
    """
    if isinstance(first.error, NameError | AttributeError) and "NoneType" not in str(first.error):
        return True
    if all(str(f.error) == str(first.error) for f in calls):  # in every layout
        return True
    if first.guessed:
        without = [f for f in calls if f.without and (f.built, f.called) == (first.built, first.called)]
        ends = {_end(f) for f in without if f.projected} or {_end(f) for f in calls if f.natural}
        return _end(first) in ends if without else ends == {_end(first)}
    return first.projected or (isinstance(first.error, CERTAIN) and not isinstance(first.error, IndexError))


def _end(failure: Failure) -> tuple[type, int | None]:
    return type(failure.error), failure.line


def _natural(failure: Failure) -> bool:
    return "<" not in failure.built and "None" not in failure.built


def _crash(failure: Failure) -> Finding:
    error = failure.error
    words = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    if isinstance(error, NameError):
        return Finding("undefined-name", words, failure.line)
    if failure.called is not None and failure.in_constructor:
        return Finding("layers-in-forward", words, failure.line)
    if "view size is not compatible" in str(error):
        return Finding("contiguous", words, failure.line)
    if "before Module.__init__" in str(error):
        return Finding("missing-super", words, failure.line)
    if isinstance(error, AttributeError) and "object has no attribute" in str(error) and "Tensor" not in str(error):
        return Finding("missing-attribute", words, failure.line)
    return Finding("crashes", words, failure.line)


def repairs_needed(repaired: Repaired, case: Case) -> list[Finding]:
    """What had to be repaired before it ran; a name that the file assigns somewhere is no fault."""
    assigned = set() if case.loaded is None else case.loaded.assigned
    unknown = {name: line for name, line in repaired.names.items() if name not in assigned}
    found = [f for f in faults_of_text(case) if f.name == "missing-super"] or [Finding("missing-super")]
    found = found if repaired.super_missing else []
    if unknown:
        found.append(Finding("undefined-name", ", ".join(unknown), next(iter(unknown.values()))))
    if repaired.attributes:
        words = ", ".join(f"self.{name}" for name in repaired.attributes)
        found.append(Finding("missing-attribute", words, next(iter(repaired.attributes.values()))))
    if "contiguous" in repaired.lines:
        found.append(Finding("contiguous", "", repaired.lines["contiguous"]))
    if "cuda" in repaired.lines:
        found.append(Finding("cuda-only", "", repaired.lines["cuda"]))
    return found
