"""Judges a file: loads it, picks the attention in it, and judges that."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headwise.check.candidates import MULTI, candidates
from headwise.check.case import Case
from headwise.check.findings import Finding
from headwise.check.judging import judge
from headwise.check.loading import Loaded, load
from headwise.check.report import Report
from headwise.check.telling import told
from headwise.errors import OptionError

WEIGHTLESS = "it has no weights of its own"
OF_A_PART = {"no-out-proj", "too-wide", "single-head"}  # what a part cannot be blamed for
TRIES = 3  # candidates before giving up
RANK = {"right": 3, "variant": 3, "wrong": 2, "unknown": 0}


def judge_file(
    path: Path,
    name: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
    thorough: bool = True,
    build: str | None = None,
    call: str | None = None,
    solution: bool = False,
) -> Report:
    """The report of the best candidate, or of the one named."""
    progress("loading")
    loaded = load(path)
    if loaded.syntax is not None:
        return _syntax(loaded)
    found = candidates(loaded)
    if found and not re.search(r"\btorch|\bnn\.|\bF\.", loaded.source):
        reason = "nothing in this file uses PyTorch, and only PyTorch can be judged"
        return Report("unknown", subject=path.name, doubts=[reason], file=loaded.path)
    if name is not None:
        if name not in loaded.namespace:
            return Report(
                "unknown", subject=name, doubts=[f"{path.name} defines no {name!r}; it defines {_listed(found)}"]
            )
        found = [(name, loaded.namespace[name], 100)]
    if not found:
        return _nothing_found(loaded)
    if build is not None or call is not None:
        return _as_told(loaded, found[0], build, call, progress, thorough, solution)
    return _best(loaded, found, progress, thorough, solution)


def _as_told(
    loaded: Loaded,
    found: tuple[str, Any, int],
    build: str | None,
    call: str | None,
    progress: Callable[[str], None],
    thorough: bool,
    solution: bool,
) -> Report:
    case = Case(found[0], found[1], loaded.namespace, loaded, progress, thorough)
    try:
        return judge(case, told(case, build, call), solution)
    except OptionError as error:
        return Report("unknown", subject=found[0], doubts=[str(error)], file=loaded.path)


def _best(
    loaded: Loaded,
    found: list[tuple[str, Any, int]],
    progress: Callable[[str], None],
    thorough: bool,
    solution: bool,
) -> Report:
    reports = []
    for index, (name, target, _) in enumerate(found[:TRIES]):
        progress(f"judging {name}")
        report = judge(Case(name, target, loaded.namespace, loaded, progress, thorough), None, solution)
        reports.append(report)
        if report.verdict != "unknown" or (index == 0 and report.masks):
            break
    judged = [r for i, r in enumerate(reports) if i == 0 or not (r.verdict == "variant" and WEIGHTLESS in r.variants)]
    best = max(judged, key=lambda r: RANK[r.verdict])  # a helper without weights does not speak for a class
    best = reports[0] if RANK[best.verdict] == 0 or _only_a_part(found[0][0], best) else best
    best.others = [name for name, _, _ in found if not best.subject.startswith(name)][:3]
    return best


def _only_a_part(name: str, best: Report) -> bool:
    """Whether a part was judged in place of the class that puts heads together: it does not speak for it."""
    if not MULTI.search(name) or best.subject.startswith(name):
        return False
    wrong = {finding.name for finding in best.findings if finding.severity == "wrong"}
    return "a single head" in best.variants or (bool(wrong) and wrong <= OF_A_PART)


def _syntax(loaded: Loaded) -> Report:
    error = loaded.syntax
    assert error is not None  # noqa: S101
    finding = Finding("syntax", str(error.msg), error.lineno, loaded.line(error.lineno))
    return Report("wrong", subject=Path(loaded.path).name, findings=[finding], file=loaded.path)


def _nothing_found(loaded: Loaded) -> Report:
    report = Report("unknown", subject=Path(loaded.path).name, file=loaded.path)
    report.doubts.append("nothing in this file looks like attention; name the class with --name")
    report.doubts += [f"line {line} raises {words}" for line, words in loaded.problems[:3]]
    return report


def _listed(found: list[tuple[str, Any, int]]) -> str:
    return ", ".join(name for name, _, _ in found) or "nothing that looks like attention"
