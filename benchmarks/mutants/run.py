"""Judge generated mistakes with the checker, and compare its verdicts with the truth found by execution.

    python benchmarks/mutants/run.py --sample 300               # a sample of every style and operator
    python benchmarks/mutants/run.py --style sdpa --running     # one style, without mutants that cannot run at all
    python benchmarks/mutants/run.py --sample 300 --show wrong-called-right
    python benchmarks/mutants/run.py --sample 0 --pairs 10      # two mistakes at once, ten of every style

The unmutated styles are always judged too. Truth is remembered in scratch/. The last line is one JSON object.
"""

import argparse
import difflib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from harness import finish, table

from mutants.drivers import DRIVERS, source_of
from mutants.expected import accepted_lines, fits
from mutants.mutate import Mutant, mutants, pairs
from mutants.operators import OPERATORS
from mutants.pool import FAILED, forked
from mutants.truth import LABELS, Truth, truths

VERDICTS = ("right", "variant", "partial", "wrong", "unknown")
RIGHT = ("right", "variant")
SECONDS = 240.0  # for one judgment on a busy machine


class Judged(NamedTuple):
    """A mutant with its truth and what the checker said."""

    mutant: Mutant
    truth: Truth
    said: dict[str, Any]

    @property
    def verdict(self) -> str:
        """The checker's."""
        return str(self.said["verdict"])

    @property
    def is_named(self) -> bool:
        """Whether the cause describes the mistake."""
        return fits(self.mutant, self.truth.reason, self.said["cause"])

    @property
    def is_located(self) -> bool:
        """Whether the line of the cause is one that was changed, or where the change shows."""
        return self.said["line"] in accepted_lines(self.mutant, self.truth.reason)


def originals() -> list[Mutant]:
    """The styles as they are."""
    return [Mutant(style, "original", 0, (), "", "", source_of(style)) for style in DRIVERS]


def stratified(options: argparse.Namespace) -> Iterator[Mutant]:
    """Mutants in random order, one of each style and operator in turn."""
    groups: dict[tuple[str, str], list[Mutant]] = defaultdict(list)
    for style in options.style or DRIVERS:
        for mutant in mutants(style):
            if not options.operator or mutant.operator in options.operator:
                groups[style, mutant.operator].append(mutant)
    draw = random.Random(options.seed)  # noqa: S311 - a sample, not a secret
    for group in groups.values():
        draw.shuffle(group)
    waiting = list(groups.values())
    while waiting:
        draw.shuffle(waiting)
        for group in waiting:
            yield group.pop()
        waiting = [group for group in waiting if group]


def sample(options: argparse.Namespace) -> list[tuple[Mutant, Truth]]:
    """The mutants to judge, with their truth."""
    order = list(stratified(options))
    wanted = len(order) if options.sample is None else options.sample
    chosen: list[tuple[Mutant, Truth]] = []
    while order and len(chosen) < wanted:
        batch, order = order[: max(wanted - len(chosen), 16)], order[max(wanted - len(chosen), 16) :]
        labeled = zip(batch, truths(batch, options.workers), strict=True)
        chosen += [(m, t) for m, t in labeled if not options.running or t.label != "not runnable"]
    extra = originals() if not options.style else [m for m in originals() if m.style in options.style]
    for style in options.style or DRIVERS:
        extra += pairs(style, options.pairs, options.seed) if options.pairs else []
    return [*chosen[:wanted], *zip(extra, truths(extra, options.workers), strict=True)]


def judge(task: tuple[str, str]) -> dict[str, Any]:
    """What the checker says about a text. Runs in a child."""
    from headwise.check.verdict import judge_file

    folder, source = task
    path = Path(folder) / f"attention_{os.getpid()}.py"
    path.write_text(source, encoding="utf-8")
    start = time.monotonic()
    report = judge_file(path, thorough=False)  # speed and compilation change no verdict
    finding = next(iter(report.wrong), None)
    return {
        "verdict": report.verdict,
        "cause": report.cause,
        "line": finding.line if finding else None,
        "findings": [f"{f.severity} {f.name} line {f.line}: {f.detail}" for f in report.findings],
        "doubts": report.doubts,
        "variants": report.variants,
        "subject": f"{report.subject} · {report.call}",
        "seconds": time.monotonic() - start,
    }


NOTHING = {
    "verdict": "unknown",
    "cause": None,
    "line": None,
    "findings": [],
    "variants": [],
    "subject": "",
    "seconds": 0,
}


def judgments(chosen: list[tuple[Mutant, Truth]], workers: int) -> list[Judged]:
    """The checker's word on each mutant."""
    said: dict[int, Any] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tasks = [(folder, mutant.source) for mutant, _ in chosen]
        for number, answer in forked(judge, tasks, workers, SECONDS):
            failure = "out of time" if answer is None else answer.get(FAILED)
            said[number] = {**NOTHING, "doubts": [f"no answer: {failure}"]} if failure else answer
            print(f"\r{len(said)}/{len(tasks)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [Judged(*pair, said[number]) for number, pair in enumerate(chosen)]


# Figures.

SHOWN: dict[str, Callable[[Judged], bool]] = {
    "wrong-called-right": lambda j: j.truth.label in ("wrong", "not runnable") and j.verdict in RIGHT,
    "wrong-called-partial": lambda j: j.truth.label in ("wrong", "not runnable") and j.verdict == "partial",
    "right-called-wrong": lambda j: j.truth.label == "equivalent" and j.verdict == "wrong",
    "right-called-partial": lambda j: j.truth.label == "equivalent" and j.verdict == "partial",
    "not-judged": lambda j: j.truth.label != "not runnable" and j.verdict == "unknown",
    "no-answer": lambda j: "no answer" in " ".join(j.said["doubts"]) or "fault of the checker" in str(j.said["doubts"]),
    "cause": lambda j: j.truth.label in ("wrong", "not runnable") and j.verdict == "wrong" and not j.is_named,
    "line": lambda j: j.truth.label in ("wrong", "not runnable") and j.verdict == "wrong" and not j.is_located,
    "convention": lambda j: j.truth.label == "convention",
    "fragile": lambda j: j.truth.label == "fragile",
}


def share(part: list[Judged], whole: list[Judged]) -> float:
    """A percentage; 0 of nothing."""
    return round(100 * len(part) / len(whole), 2) if whole else 0.0


def rates(judged: list[Judged]) -> dict[str, float]:
    """The figures to reach, in percent."""
    wrong = [j for j in judged if j.truth.label == "wrong"]
    dead = [j for j in judged if j.truth.label == "not runnable"]
    right = [j for j in judged if j.truth.label == "equivalent"]
    running = [j for j in judged if j.truth.label != "not runnable"]
    blamed = [j for j in wrong + dead if j.verdict == "wrong"]
    return {
        "wrong called RIGHT": share([j for j in wrong if j.verdict in RIGHT], wrong),
        "not runnable called RIGHT": share([j for j in dead if j.verdict in RIGHT], dead),
        "right called WRONG": share([j for j in right if j.verdict == "wrong"], right),
        "judged of what runs": share([j for j in running if j.verdict != "unknown"], running),
        "partial of what runs": share([j for j in running if j.verdict == "partial"], running),
        "cause": share([j for j in blamed if j.is_named], blamed),
        "line": share([j for j in blamed if j.is_located], blamed),
        "line that was changed": share([j for j in blamed if j.said["line"] in j.mutant.lines], blamed),
    }


def confusion(judged: list[Judged]) -> dict[str, Counter[str]]:
    """Verdicts counted by truth."""
    counts: dict[str, Counter[str]] = {label: Counter() for label in LABELS}
    for j in judged:
        counts[j.truth.label][j.verdict] += 1
    return counts


def show(j: Judged) -> None:
    """One case: what was changed, what is true, what was said."""
    print(f"\n{j.mutant.describe()}\n  truth    {j.truth.label}: {j.truth.reason}")
    print(f"  verdict  {j.verdict} · {j.said['subject']}")
    for kind in ("findings", "doubts", "variants"):
        for words in j.said[kind]:
            print(f"  {kind[:-1]:<8} {words}")
    old, new = source_of(j.mutant.style).splitlines(), j.mutant.source.splitlines()
    for line in list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]:
        print(f"    {line}")


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, help="so many mutants, drawn evenly (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--style", action="append", choices=list(DRIVERS))
    parser.add_argument("--operator", action="append", choices=list(OPERATORS))
    parser.add_argument("--pairs", type=int, default=0, help="so many mutants of each style with two mistakes")
    parser.add_argument("--running", action="store_true", help="leave out mutants that raise in every call")
    parser.add_argument("--truth", action="store_true", help="only count the truth, without the checker")
    parser.add_argument("--show", action="append", choices=list(SHOWN), default=[])
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--save", type=Path, help="write every case to this JSON file")
    parser.add_argument("--load", type=Path, help="count the cases of a saved file instead of running the checker")
    return parser.parse_args()


def load(path: Path, workers: int) -> list[Judged]:
    """Cases saved before, with the truth found anew."""
    rows = json.loads(path.read_text())
    found = [Mutant(**{k: v for k, v in row.items() if k not in ("truth", "said")}) for row in rows]
    return [Judged(m, t, row["said"]) for m, t, row in zip(found, truths(found, workers), rows, strict=True)]


def save(path: Path, judged: list[Judged]) -> None:
    """Write every case."""
    rows = [{**asdict(j.mutant), "truth": j.truth, "said": j.said} for j in judged]
    path.write_text(json.dumps(rows, indent=1))


def main() -> None:
    """Generate, find the truth, judge, compare."""
    options = parsed()
    torch.set_num_threads(1)
    judged = load(options.load, options.workers) if options.load else []
    chosen = [(j.mutant, j.truth) for j in judged] or sample(options)
    truth = Counter(label for _, (label, _) in chosen)
    if options.truth:
        table("truth", [[label, str(truth[label])] for label in LABELS], ["", "mutants"])
        finish("mutants", "cpu", [{"truth": truth}])
        return
    judged = judged or judgments(chosen, options.workers)
    for name in options.show:
        print(f"\n== {name}")
        for j in filter(SHOWN[name], judged):
            show(j)
    counts = confusion(judged)
    rows = [[label, *(str(counts[label][v]) for v in VERDICTS), str(truth[label])] for label in LABELS]
    table("truth (rows) and verdict (columns)", rows, ["", *VERDICTS, "all"])
    figures = rates(judged)
    table("percent", [[name, f"{value:.1f}"] for name, value in figures.items()], ["", "%"])
    if options.save:
        save(options.save, judged)
    finish("mutants", "cpu", [{"confusion": counts, "rates": figures}])


if __name__ == "__main__":
    main()
