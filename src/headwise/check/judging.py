"""The whole judgement of one class or function: bind, read, diagnose, measure masks, probe, decide."""

import re
import time
from dataclasses import replace

import torch

from headwise.check import (
    conventions,
    core,
    diagnosing,
    grouped,
    influence,
    layouts,
    probes,
    proof,
    robustness,
    solutions,
)
from headwise.check.attempt import Failure
from headwise.check.binding import bind
from headwise.check.bound import Bound
from headwise.check.calling import leaves, make_inputs
from headwise.check.case import Case
from headwise.check.crashes import not_bound, repairs_needed
from headwise.check.diagnosis import Diagnosis
from headwise.check.findings import Finding, ranked
from headwise.check.fits import same
from headwise.check.reading import read
from headwise.check.report import Report
from headwise.check.sizes import Sizes
from headwise.check.stages import Reading
from headwise.check.subject import signature
from headwise.check.unset import misplaced_mask, never_read
from headwise.check.usage import globals_read, names_used

MANY_OPERATIONS = 6000
COMMENT = re.compile(
    r"#[^\n]*(?:mask[^\n]*(?:ignor|not used|unused|忽略|省略|未使用)|(?:ignor|unused|忽略|省略)[^\n]*mask)",
    re.IGNORECASE,
)
TOLERANCE = 1e-6  # of a float64 prediction; scales given as float32 tensors cost 1e-7


def judge(case: Case, bound: Bound | None = None, solution: bool = False) -> Report:
    """The report."""
    start = time.monotonic()
    case.progress("binding")
    failures: list[Failure] = []
    if bound is None:
        late = None if case.loaded is None else case.loaded.late
        bound, failures = bind(case.target, case.namespace, case.filename, late)
    case.findings += _from_loading(case)
    if bound is None or bound.output is None:
        report = not_bound(case, bound, failures or (bound.failures if bound else []))
    else:
        report = _guarded(case, bound)
    for finding in report.findings:
        finding.text = finding.text or case.text(finding.line)
    if solution:
        report.solution = solutions.solution(bound)
    report.file = case.filename or ""
    report.seconds = time.monotonic() - start
    return report


def _from_loading(case: Case) -> list[Finding]:
    if case.loaded is None:
        return []
    used = names_used(case.target)
    missing = {n: line for n, line in case.loaded.missing_imports.items() if n in used or not used}
    found = [Finding("missing-import", ", ".join(sorted(missing)), min(missing.values()))] if missing else []
    demo = {n: line for n, line in globals_read(case.target).items() if n in case.loaded.only_in_main}
    if demo:
        words = f"{', '.join(demo)}: defined only under `if __name__ == '__main__'`"
        found.append(Finding("undefined-name", words, min(demo.values()), severity="fragile"))
    return found


def _guarded(case: Case, bound: Bound) -> Report:
    """A fault of the checker itself never reads as a fault of the learner."""
    try:
        return _bound(case, bound)
    except Exception as error:
        step = error.__traceback__
        while step is not None and step.tb_next is not None:
            step = step.tb_next
        place = "" if step is None else f" ({step.tb_frame.f_code.co_name}, line {step.tb_lineno})"
        doubt = f"a fault of the checker itself, please report it: {type(error).__name__}: {error}{place}"
        return Report("unknown", subject=bound.built.text, call=_call_words(bound), doubts=[doubt])


def _bound(case: Case, bound: Bound) -> Report:
    report = Report("unknown", subject=bound.built.text, call=_call_words(bound))
    case.progress("comparing")
    reading = read(bound)
    findings = case.findings + repairs_needed(bound.repaired, case) + _needs_a_mask(bound)
    result = Diagnosis()
    if reading is None and (bare := core.unnormalised(bound.trace, bound.inputs.query.shape[1])) is not None:
        result.wrong("softmax-missing", "scores are multiplied with the values as they are", bare.line)
    elif reading is None:
        result.findings += influence.findings(bound)
        result.doubts.append("no product of queries and keys that goes through a softmax to values was seen")
    else:
        result = diagnosing.diagnose(bound, reading)
    findings += result.findings + _unsliced(bound, result)
    if reading is not None and reading.scores is not None:
        case.progress("masks")
        measured = conventions.measure(bound, reading)
        report.masks = [c.words() if c.tried else f"{c.name}: not judged, {bound.form.layout}" for c in measured]
        findings += _admitted(case, conventions.findings(measured, bound, reading), result.visible)
        findings += misplaced_mask(case)
        findings += _mask_extras(bound, reading, measured)
    findings += _other_way(bound)
    case.progress("probing")
    findings += _probed(case, bound, reading)
    groups = grouped.offered(bound, reading)
    result.variants += [groups] if groups and not any(f.name.startswith("grouped") for f in findings) else []
    if reading is not None and _returns_weights(bound, reading):
        result.good.append("returned weights")
    report.findings = ranked(_settled(findings))
    report.variants, report.good, report.doubts = list(dict.fromkeys(result.variants)), result.good, result.doubts
    _decide(report, bound, reading, result)
    if report.verdict in ("right", "variant") and reading is not None:
        report.findings = ranked(report.findings + _robust(case, bound, reading))
    return report


def _admitted(case: Case, findings: list[Finding], visible: str) -> list[Finding]:
    """A mask that a comment says is left out, or beside one that is built in, is no mistake, only a trap."""
    said = case.loaded is not None and COMMENT.search(case.loaded.source)
    for finding in findings:
        name = finding.detail.removeprefix("argument ").partition(":")[0]
        if finding.name == "mask-ignored" and (said or (visible == "causal" and never_read(case, name))):
            finding.severity = "fragile"
    return findings


def _robust(case: Case, bound: Bound, reading: Reading) -> list[Finding]:
    found = robustness.beyond_the_buffer(bound, reading) + robustness.on_meta(bound)
    stands_in = case.loaded is not None and bool(case.loaded.missing_packages)  # ours may not compile
    return found + robustness.compiled(bound) if case.thorough and not stands_in else found


def _returns_weights(bound: Bound, reading: Reading) -> bool:
    """Whether the weights are returned as well, of every head or as their mean."""
    weights = reading.core.weights
    return any(same(leaf, weights) or same(leaf, weights.mean(1)) for leaf in leaves(bound.returned))


def _other_way(bound: Bound) -> list[Finding]:
    """Where keys may be left out, the call without them is another path through the code, and is judged as well."""
    optional = [p.name for p in signature(bound.thing) if p.name in bound.form.roles and p.default is None]
    alone = {n: r for n, r in bound.form.roles.items() if n not in optional}
    if not optional or not alone:
        return []
    other = replace(bound, form=replace(bound.form, roles=dict.fromkeys(alone, "self")))
    other.inputs = make_inputs(other.form, bound.sizes)
    try:
        returned, other.trace = other.traced(other.inputs)
    except Exception:
        return []
    other.output = other.form.result(returned, other.inputs)
    reading = read(other)
    found = [] if reading is None else diagnosing.diagnose(other, reading).findings
    for finding in found:
        finding.detail += f" (without {', '.join(optional)})"
    return found


def _call_words(bound: Bound) -> str:
    name = "forward" if isinstance(bound.thing, torch.nn.Module) else "call"
    layout = "" if bound.form.layout == "batch first" else f", {bound.form.layout}"
    return f"{name}({bound.form.words()}){layout}"


def _needs_a_mask(bound: Bound) -> list[Finding]:
    """A mask that is None by default, where None raises."""
    defaults = {p.name: p.default for p in signature(bound.thing)}
    names = [n for n in bound.form.fixed if n in bound.form.masks and defaults.get(n, 0) is None]
    failed = [f for f in bound.failures if f.line is not None and f.called is not None]
    if not names or not failed:
        return []
    return [
        Finding(
            "mask-crashes",
            f"{names[0]}=None, its default, raises {type(failed[0].error).__name__}: {failed[0].error}",
            failed[0].line,
            severity="fragile",
        )
    ]


def _unsliced(bound: Bound, result: Diagnosis) -> list[Finding]:
    """A context length that had to equal the input's, because a stored mask is used whole."""
    from headwise.check.names import constructor_role

    names = [k for k, v in bound.built.arguments.items() if constructor_role(k) == "context" and v == bound.sizes.T]
    if bound.built.config is not None and bound.built.config._sizes.context == bound.sizes.T:
        names = ["the context length"]
    if bound.form.layout == layouts.PLAIN and bound.sizes.T != Sizes().T:
        names = ["the size of a stored mask"]
    if not names:
        return []
    if result.visible == "full" and not result.findings:  # a table of positions, not of who sees whom
        result.variants.append("it takes inputs of one length only")
        return []
    failed = [
        f for f in bound.failures if f.called is not None and f.line is not None and isinstance(f.error, RuntimeError)
    ]
    line = failed[0].line if failed else None
    return [Finding("buffer-not-sliced", f"it runs only when {names[0]} equals the length of the input", line)]


def _mask_extras(bound: Bound, reading: Reading, measured: list[conventions.Convention]) -> list[Finding]:
    found = []
    empty = conventions.empty_row(bound, reading, measured)
    if empty is not None:
        found.append(empty)
    for convention in measured:
        tried = next((t for t in convention.tried if t.meaning == convention.meaning and t.meaning), None)
        if tried is not None and tried.shape != "(B,) lengths":
            mask = next(m for words, m, _ in conventions.shaped(*reading.core.weights.shape) if words == tried.shape)
            mask = mask.to(getattr(torch, tried.dtype.split()[0], torch.float16))
            mask = mask.half() if mask.is_floating_point() else mask
            found += [
                f for f in probes.half_precision(bound, reading, {convention.name: mask}) if f.name == "half-fill"
            ]
    return found


def _probed(case: Case, bound: Bound, reading: Reading | None) -> list[Finding]:
    found: list[Finding] = []
    for probe in probes.ALWAYS:
        if probe is probes.speed and not case.thorough:
            continue
        if probe in (probes.small_batch, probes.other_length) and bound.repaired.names:
            continue  # the names we supplied hold one size only
        if len(bound.trace.nodes) > MANY_OPERATIONS and probe not in (probes.layers_in_forward, probes.plain_tensors):
            continue  # loops over single numbers take seconds for every call
        found += probe(bound, reading)
        if any(f.name in ("layers-in-forward",) for f in found):
            break
    return found


def _settled(findings: list[Finding]) -> list[Finding]:
    """Without findings that only repeat another in other words."""
    names = {f.name for f in findings}
    gone: set[str] = set()
    if names & {
        "attends-over-batch",
        "scale-batch",
        "split-view",
        "merge-view",
        "layers-in-forward",
        "mask-wrong-sample",
    }:
        gone.add("batch-leak")
    if "no-out-proj" in names or "wrong-role" in names:
        gone.add("dead-parameter")
    if "wrong-role" in names and "one-projection" in names:
        three = any(f.detail.startswith("all three") for f in findings if f.name == "one-projection")
        gone |= {"wrong-role"} if three else set()
    if "mask-discarded" in names:
        gone |= {"mask-ignored", "causal-ignored"}
    if "layers-in-forward" in names:
        gone |= {"dropout-in-eval", "no-gradient"}
    if "too-wide" in names:
        gone.add("no-out-proj")
    if names & {"attends-over-heads", "attends-over-features"}:
        gone |= {"mask-ignored", "cross-length", "mask-crashes"}
    return [f for f in findings if f.name not in gone]


def _decide(report: Report, bound: Bound, reading: Reading | None, result: Diagnosis) -> None:
    wrong = [f for f in report.findings if f.severity == "wrong"]
    gap = None
    if reading is not None:
        gap = proof.proven(bound, reading, result)
        special = any(
            p is not None and (p.position or p.norm or p.then) for p in (reading.query, reading.key, reading.value)
        )
        special = special or (reading.scores is not None and reading.scores.relative)
        followed = reading.output is not None and not reading.output.last
        if gap is not None and not gap < TOLERANCE:
            report.doubts.append(f"fresh inputs differ by {gap:.2g} from what was understood")
        elif gap is None and not special and not followed and not wrong and not report.doubts:
            report.doubts.append("no prediction could be tested on fresh inputs")
    if wrong:
        report.verdict = "wrong"
        _explain(report, bound, reading, gap, wrong)
    elif report.doubts:
        report.verdict = "unknown"
    else:
        report.verdict = "variant" if report.variants else "right"


STAGE = {
    "scale-missing", "scale-d_model", "scale-batch", "scale-length", "scale-multiplied", "scale-no-sqrt",
    "scale-other", "scale-after-softmax", "softmax-axis", "split-view", "merge-view", "mask-after-softmax",
}  # fmt: skip


def _explain(report: Report, bound: Bound, reading: Reading | None, gap: float | None, wrong: list[Finding]) -> None:
    """The first difference from the reference, and whether the named changes explain all of it."""
    if reading is None or not {f.name for f in wrong} & STAGE:
        return
    should = proof.rightful(bound, reading)
    if should is not None and bound.output is not None and should.shape == bound.output.shape:
        apart = (should - bound.output).abs() > 1e-6
        if apart.any():
            index = tuple(int(i) for i in apart.nonzero()[0])
            report.difference = (
                f"output[{', '.join(map(str, index))}] is {float(bound.output[index]):.4f}, "
                f"the reference gives {float(should[index]):.4f}"
            )
    if gap is not None and gap < TOLERANCE:
        one = "that one change" if len([f for f in wrong if f.name in STAGE]) == 1 else "these changes"
        report.proof = f"with {one} the output equals the reference on fresh inputs (largest difference {gap:.0e})"
