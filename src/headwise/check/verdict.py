"""The whole judgment: bind, read, look for faults, prove, decide. For a file, of the attention that is found in it."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headwise.check.arguments import constructor_role
from headwise.check.assignment.comparison import find_assignment
from headwise.check.assignment.deviations import add_unbound
from headwise.check.binding import Bound, Failure
from headwise.check.calls import PLAIN
from headwise.check.challenge import Claim
from headwise.check.code.candidates import NAME, candidates
from headwise.check.code.case import Case
from headwise.check.code.loader import Loaded, load
from headwise.check.code.source import MULTI
from headwise.check.faults import FAULTS, IF_NOTHING_IS_WRONG, ONLY_IF_RIGHT, Examination, own_fault
from headwise.check.faults.chunks import in_one_chunk
from headwise.check.faults.crashes import judge_unbound
from headwise.check.faults.questions import SINGLE, WEIGHTLESS
from headwise.check.faults.spelling import misspelled_base, text_mistakes
from headwise.check.faults.tables import with_fitting_tables
from headwise.check.mistakes import Finding, settled
from headwise.check.objects import tensors
from headwise.check.proof import TOLERANCE, prediction_error, reference_output
from headwise.check.reading import AttentionReading
from headwise.check.report import POSITIVE, Report
from headwise.check.search import bind, bind_as_told
from headwise.check.sizes import CallSizes
from headwise.check.templates import write
from headwise.check.unfinished.cores import core_report, is_core
from headwise.check.unfinished.fragments import fragments
from headwise.check.unfinished.progress import review
from headwise.errors import OptionError

SINGLE_NAME = re.compile(r"single|one_?head", re.IGNORECASE)
CANDIDATES = 3  # that are tried before giving up
UNDEFINED = re.compile(
    r"AttributeError: module 'torch|TypeError: (module\(\)|Module\.__init__\(\)) takes"
)  # nothing of ours raises these
# What is not said to be right beside a mistake, by how it starts.
DENIED = {
    "softmax-axis": ("rows sum", "softmax"), "contiguous": ("head split", "head merge"),
    "form-mask": ("mask",), "mask-convention": ("mask",), "widths-confused": ("head",), "size-fixed": ("batches",),
}  # fmt: skip
DENIED |= dict.fromkeys(("scale-after-softmax", "mask-after-softmax"), ("rows sum",))
AT_RANDOM, UNDETERMINED = ("layers-in-forward", "dropout-in-eval"), "what it does could not be determined"
IN_OTHER_CALLS = ("mask-", "dropout-", "cache", "buffer-", "weights-")  # what the traced call does not show
ELSEWHERE = {"attends-over-heads", "attends-over-features", "attends-over-batch"}
DENIED |= dict.fromkeys(ELSEWHERE, ("mask",))
TURNED = ("split-view", "merge-view", "attends-over-heads", "attends-over-features")  # where a transpose is missing
ALWAYS_SAID = set(FAULTS)  # what the others measure is a part of the certificate, and means little outside it
STAGES = 5  # queries, keys, values, scores and output
RANK = {"right": 3, "variant": 3, "partial": 3, "wrong": 2, "unfinished": 2, "unknown": 0}


def judge(case: Case, build: str | None = None, call: str | None = None, solution: bool = False) -> Report:
    """The report on one class, function or object, built and called as told or as found out."""
    start = time.monotonic()
    if build is None and call is None and is_core(case):
        return core_report(case, lambda layer: judge(layer, solution=solution))
    if found := text_mistakes(case):
        return _located(Report("wrong", case.name, findings=found, file=case.filename or ""), case)
    case.progress("binding")
    failures: list[Failure] = []
    whole = False
    bound = None if build is None and call is None else bind_as_told(case, build, call)
    if bound is None:
        bound, failures = bind(case)
    if bound is not None and bound.output is None:
        bound = _of_other_length(bound)
    if bound is not None and _is_last_resort(bound):
        report = judge_unbound(case, None, bound.failures)
    elif bound is None or bound.output is None:
        report = judge_unbound(case, bound, failures or (bound.failures if bound else []))
        add_unbound(report, case)
    else:
        report, whole = _judge_bound(bound)
    report = report if whole else review(case, report)
    _located(report, case)
    report.assumed = list(getattr(case.target, "assumed", ()))
    if case.assignment is not None:
        report.compared = case.assignment.asked
        report.fits = case.assignment.fits(report) if report.verdict in POSITIVE else ""
    if solution and case.assignment is not None:
        report.solution = case.assignment.solution()
    elif solution:
        report.solution = write(_style(bound, report))
    report.file = case.filename or ""
    report.left_out = [] if case.loaded is None else case.loaded.origin.left_out
    report.replaced = [] if case.loaded is None else list(_replaced(case))
    report.seconds = time.monotonic() - start
    return report


def _replaced(case: Case) -> Iterator[str]:
    """What Python has forgotten, because something later in the file has the same name."""
    assert case.loaded is not None  # noqa: S101 - only files are asked
    for name, lost, counts in case.replaced():
        places = [case.loaded.origin.place(line) for line in (lost, counts)]
        yield f"the first {name} ({places[0]}), which the one in {places[1]} replaces"


def _located(report: Report, case: Case) -> Report:
    """The report with the text of every line, and the cell of a notebook."""
    for finding in report.findings:
        finding.text = finding.text or case.text(finding.line)
        if case.loaded is not None:
            case.loaded.origin.locate(finding)
    if report.stops is not None and case.loaded is not None:
        report.ending = case.loaded.origin.place(report.stops)
    return report


def _of_other_length(bound: Bound) -> Bound:
    """The same where the output has as many rows as a learned parameter, in place of as many as tokens."""
    form = replace(bound.form, other_length=True)
    output = form.result(bound.returned, bound.inputs)
    rows = {size for t in tensors(bound.thing).values() for size in t.shape[:-1]}
    learned = output is not None and output.shape[1] in rows - {bound.sizes.E, bound.sizes.H}
    return replace(bound, form=form, output=output) if learned and bound.form.layout == PLAIN else bound


def _style(bound: Bound | None, report: Report) -> str:
    """The style of a solution: as many inputs as the learner's class takes, causal only if theirs is meant to be."""
    if bound is None or bound.form.cross:
        return "separate"
    causal = "a built-in causal mask" in report.variants or "causal" in bound.case.name.lower()
    return "fused" if causal or any(f.name.startswith("causal-") for f in report.wrong) else "einsum"


def _is_last_resort(bound: Bound) -> bool:
    """Whether only an unusual layout runs, where the usual call attends between tokens and fails afterwards."""
    late = any(f.attended and f.natural and not f.guessed and not f.deliberate for f in bound.failures)
    return (bound.form.layout != PLAIN and late) or _is_narrowed(bound)


def _is_narrowed(bound: Bound) -> bool:
    """Whether it runs only with the width of a head for its width, where the usual call fails after a projection."""
    given, narrow = bound.built.arguments, {bound.sizes.D, CallSizes().D}
    if not any(constructor_role(n) == "width" and v in narrow for n, v in given.items()):
        return False
    late = (f for f in bound.failures if f.bare and f.projected and not f.deliberate)
    return any("cannot be multiplied" not in str(f.error) for f in late)


def _judge_bound(bound: Bound) -> tuple[Report, bool]:
    """The report on a call that gave an output, and whether all of it was read in a layout that only this call has."""
    name = "forward" if isinstance(bound.thing, torch.nn.Module) else "call"
    layout = "" if bound.form.layout == PLAIN else f", {bound.form.layout}"
    report = Report("unknown", bound.built.text, f"{name}({bound.form.words()}){layout}")
    try:
        bound.case.progress("comparing")
        bound, reading = with_fitting_tables(*in_one_chunk(bound))
        report.subject = bound.built.text
        found = Examination()
        found.ask(bound, reading, FAULTS)
        if not found.wrong:
            found.ask(bound, reading, IF_NOTHING_IS_WRONG)
        _take(report, found)
        _blame_lost_turn(report, bound.case)
        _decide(report, bound, reading)
        if report.verdict in ("right", "variant", "partial"):
            found.ask(bound, reading, ONLY_IF_RIGHT)
            report.findings = settled(found.findings)
            report.evidence = Claim(bound, reading)
    except Exception as error:  # a fault of the checker must never read as a fault of the learner
        return Report("unknown", report.subject, report.call, doubts=[own_fault(error)]), False
    read = reading is not None and reading.between_tokens and reading.understood == STAGES
    return report, read and bound.form.layout != PLAIN


def _take(report: Report, found: Examination) -> None:
    """Write findings, notes and the certificate into the report."""
    report.findings = settled(found.findings)
    lists = {"mask": report.masks, "variant": report.variants, "good": report.good, "doubt": report.doubts}
    for note in dict.fromkeys(found.notes):
        if note.kind in lists:
            lists[note.kind].append(note.words)
    if any(finding.name in ELSEWHERE for finding in report.wrong):  # a mask of tokens × tokens hides nothing there
        report.masks = []
    if any(finding.name in AT_RANDOM for finding in report.wrong):  # no two calls agree, so nothing can be measured
        report.masks = [words for words in report.masks if not words.endswith(UNDETERMINED)]
    if report.wrong:
        report.good = [words for words in found.good(ALWAYS_SAID) if not _is_denied(words, report)]
    report.certificate = found.certificate()


def _blame_lost_turn(report: Report, case: Case) -> None:
    """Axes that are mixed up, where the call that should turn them stands in the file and its result is thrown away."""
    lines = (case.discarded_line(turn) for turn in ("transpose", "permute", "swapaxes"))
    lost = next((line for line in lines if line is not None), None)
    for finding in report.findings if lost is not None else ():
        if finding.name in TURNED:
            finding.detail = f"the result of {case.text(lost)} is not assigned; {finding.detail}"
            finding.line = lost


def _is_denied(words: str, report: Report) -> bool:
    """Whether a mistake says the opposite."""
    if words.startswith("scale 1/") and any(finding.name.startswith("scale-") for finding in report.wrong):
        return True  # right at one size only
    return any(words.startswith(start) for finding in report.wrong for start in DENIED.get(finding.name, ()))


def _decide(report: Report, bound: Bound, reading: AttentionReading | None) -> None:
    """The verdict: wrong with a mistake, unknown with a doubt, right only with every item of the certificate."""
    if report.wrong:
        report.verdict = "wrong"
        _show_difference(report, bound, reading, None if reading is None else prediction_error(bound, reading))
    elif report.doubts:
        report.verdict = "unknown"
    elif any(item.status == "not judged" for item in report.certificate):
        report.verdict = "partial"
    else:
        report.verdict = "variant" if report.variants else "right"


def _show_difference(report: Report, bound: Bound, reading: AttentionReading | None, error: float | None) -> None:
    """The first difference from the reference, and whether the named changes explain all of it."""
    changes = [finding for finding in report.wrong if finding.mistake.step]
    others = [finding for finding in report.wrong if finding not in changes]
    if reading is None or not changes or not all(finding.name.startswith(IN_OTHER_CALLS) for finding in others):
        return  # the reference is computed with what was read, so another mistake in this call is in both
    expected = reference_output(bound, reading)
    if expected is not None and bound.output is not None and expected.shape == bound.output.shape:
        differs = (expected - bound.output).abs() > 1e-6
        if differs.any():
            index = tuple(int(i) for i in differs.nonzero()[0])
            report.difference = (
                f"output[{', '.join(map(str, index))}] is {float(bound.output[index]):.4f}, "
                f"the reference gives {float(expected[index]):.4f}"
            )
    if report.difference and error is not None and error < TOLERANCE:
        report.proof = f"{_changed(report, changes)} (largest difference {error:.0e})"


def _changed(report: Report, changes: list[Finding]) -> str:
    """Which changes make the traced call right; mistakes that it does not show stay."""
    one = "that one change" if len(changes) == 1 else f"these {len(changes)} changes together"
    if len(changes) == len(report.wrong):
        return f"with {one} the output equals the reference on new inputs"
    titles = " and ".join(f"“{finding.title}”" for finding in changes)
    rest = "the other mistake shows" if len(report.wrong) - len(changes) == 1 else "the other mistakes show"
    return f"without {titles}, this call gives what the reference gives on new inputs; {rest} in other calls"


def judge_file(
    path: Path,
    name: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    thorough: bool = True,
    build: str | None = None,
    call: str | None = None,
    solution: bool = False,
    form: str | None = None,
    against: str | None = None,
) -> Report:
    """The report on the best candidate in a file, or on the one named."""
    try:
        assignment = find_assignment(form, against)
    except OptionError as error:
        return Report("unknown", subject=path.name, file=str(path), doubts=[str(error)])
    progress("loading")
    loaded = load(path, name)
    answer = loaded.origin.answer(name)
    if answer is not None:
        return answer
    unknown = Report("unknown", subject=path.name, file=loaded.path, left_out=loaded.origin.left_out)
    found = fragments(loaded) or candidates(loaded)
    if name is None and (broken := _undefined(loaded, found)) is not None:
        return replace(broken, left_out=loaded.origin.left_out)
    if name is not None and name not in loaded.namespace:
        defined = ", ".join(other for other, _ in found) or "nothing that looks like attention"
        return Report("unknown", subject=name, doubts=[f"{path.name} defines no {name!r}; it defines {defined}"])
    if name is not None:
        found = [(name, loaded.namespace[name])]
    if not found:
        doubts = [loaded.origin.nothing]
        doubts += [f"{loaded.origin.place(line)} raises {words}" for line, words in loaded.problems[:3]]
        return replace(unknown, doubts=doubts)
    if assignment is not None and name is None:
        found = sorted(found, key=lambda pair: not assignment.preferred(pair[0]))
    cases = [Case(other, target, loaded.namespace, loaded, progress, thorough, assignment) for other, target in found]
    if build is None and call is None:
        return _best_report(cases, solution)
    try:
        return judge(cases[0], build, call, solution)
    except OptionError as error:
        return replace(unknown, subject=cases[0].name, doubts=[str(error)])


def _undefined(loaded: Loaded, found: list[tuple[str, Any]]) -> Report | None:
    """The report on a class that cannot even be defined, where the best candidate uses it or is a part of it."""
    best = loaded.definition(found[0][0]) if found else ""
    for name, (line, words) in loaded.undefined.items():
        parts = set(re.findall(r"\w+", loaded.definition(name)))  # a class that this one uses does not stand for it
        whole = [
            other for other, _ in found if other not in parts and MULTI.search(other) and not SINGLE_NAME.search(other)
        ]
        alone = NAME.search(name) is not None and not whole and (MULTI.search(name) or not found)
        if UNDEFINED.match(words) and (alone or re.search(rf"\b{name}\(", best)):
            finding = misspelled_base(words, line) or Finding(
                "crashes", f"when the class is defined: {words}"[:200], line
            )
            finding.text = loaded.line(line)
            loaded.origin.locate(finding)
            return Report("wrong", subject=name, file=loaded.path, findings=[finding])
    return None


def _best_report(cases: list[Case], solution: bool) -> Report:
    """The report on the first case that can be judged; a helper or a single head does not speak for the whole class."""
    reports: list[Report] = []
    for case in cases[:CANDIDATES]:
        case.progress(f"judging {case.name}")
        report = judge(case, solution=solution)
        reports.append(report)
        if report.verdict != "unknown" or (len(reports) == 1 and report.masks):
            break
    judged = [r for r in reports if r is reports[0] or r.verdict == "wrong" or WEIGHTLESS not in r.variants]
    best = max(judged, key=lambda r: RANK[r.verdict])
    best = reports[0] if best.verdict == "unknown" or _is_only_a_part(cases[0].name, best) else best
    best.others = [case.name for case in cases if not best.subject.startswith(case.name)][:3]
    return best


def _is_only_a_part(name: str, best: Report) -> bool:
    """Whether one head was judged in place of the class that puts heads together."""
    if not MULTI.search(name) or best.subject.startswith(name):
        return False
    return SINGLE in best.variants or (bool(best.wrong) and all(f.mistake.whole for f in best.wrong))
