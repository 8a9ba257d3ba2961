"""Judge public graders by generated mistakes: which do they accept, and what does the checker say of the same files?

    python benchmarks/graders.py --graders ../graders                        # every assignment, 80 wrong mutants each
    python benchmarks/graders.py --graders ../graders --only deepml --show   # one, with every mutant it accepts

The graders belong to others and are not part of this repository. Collect their tests into a folder that has one script
for each, `run_torchcode.py`, `run_torchleet.py`, `run_deepml.py`, `run_leetgpu.py`, `run_arena.py`, `run_cs336.py`:

    python run_torchcode.py ANSWER.py [task]        # exit status 0: accepted, anything else: rejected

The tasks are `mha`, `causal_attention`, `gqa`, `cross_attention` (TorchCode), `multi_head_attention` and
`grouped_query_attention` (TorchLeet); the other scripts have one. A grader whose script is missing, or that rejects our
right answer, is left out.

Mutants are made of our own right answers (`mutants/graded/`). Only those count that run and are wrong: beside the
original, with the same parameters, they differ in a result, a gradient, or the inputs that they accept. The same seed
gives the same mutants. The checker judges them only where it calls our right answer RIGHT: other forms (NumPy, weights
passed as arguments, layers made inside a function) count as not judged. The last line is one JSON object.
"""

import argparse
import importlib
import random
import re
import runpy
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from harness import finish, table
from mutants.assignments import ASSIGNMENTS, Assignment, answer_to
from mutants.compare import Original
from mutants.mutate import Mutant, mutate
from mutants.pool import FAILED, forked
from mutants.run import judge
from mutants.truth import SECONDS, Truth, truth_beside

VERDICTS = {"right": ("right", "variant"), "partial": ("partial",), "wrong": ("wrong",)}
HEAD = [
    "",
    "wrong mutants",
    "without an error",
    "accepted",
    "RIGHT",
    "AS FAR AS TESTED",
    "WRONG",
    "not judged",
    "our right answer",
]
BATCH = 40
RAISES = "an error at some inputs"
SUBJECTS = {  # of the text that was changed; the first that fits
    "gradient": r"detach|requires_grad",
    "mask": r"mask|tril|triu|inf|diagonal|future|causal",
    "scale": r"sqrt|\*\*\s*-?0?\.5",
    "softmax": r"softmax|\bexp\b|\bsum\(|\.max\(|weights /",
    "head split and merge": r"transpose|view|reshape|permute|concatenate|slice|repeat|\bhead\b|->",
    "projections": r"[Ww]_|Linear|_proj|\bb_|Parameter",
    "head width": r"d_k|d_head",
    "weighted sum": r"@|matmul|bmm|einsum",
}


@dataclass
class Result:
    """The wrong mutants of one answer, with what was said of each."""

    name: str
    mutants: list[tuple[Mutant, Truth]]
    accepted: list[bool] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    own: str = ""  # the checker's verdict on the right answer

    def chosen(self, name: str) -> list[tuple[Mutant, Truth]]:
        """The mutants that the grader accepts, or those with a verdict of the checker."""
        marks = self.accepted if name == "accepted" else [verdict in VERDICTS[name] for verdict in self.verdicts]
        return [pair for pair, mark in zip(self.mutants, marks, strict=True) if mark]

    def counts(self) -> dict[str, Any]:
        """The figures of a row."""
        found = {name: len(self.chosen(name)) for name in ("accepted", *VERDICTS)}
        rest = len(self.mutants) - sum(found[name] for name in VERDICTS)
        silent = sum(subject(*pair) != RAISES for pair in self.mutants)
        return {"mutants": len(self.mutants), "silent": silent, **found, "not judged": rest, "own": self.own}

    def kinds(self) -> dict[str, tuple[int, int]]:
        """By subject: how many mutants the grader accepts, and of how many."""
        every = Counter(subject(*pair) for pair in self.mutants)
        accepted = Counter(subject(*pair) for pair in self.chosen("accepted"))
        order = sorted(every, key=lambda kind: -accepted[kind])
        return {kind: (accepted[kind], every[kind]) for kind in order}


def subject(mutant: Mutant, truth: Truth) -> str:
    """What a mistake is about."""
    if "gradient" in truth.reason or "detached" in truth.reason:
        return "gradient"
    if "changes its inputs" in truth.reason:
        return "inputs overwritten"
    if "raises" in truth.reason:
        return RAISES
    line = mutant.source.splitlines()[mutant.line - 1]
    for text in (f"{mutant.before} {mutant.after}", line):
        for name, pattern in SUBJECTS.items():
            if re.search(pattern, text):
                return name
    return "other"


# Mutants.


def stratified(name: str, seed: int) -> list[Mutant]:
    """All mutants of an answer in random order, one of each operator in turn."""
    draw = random.Random(f"{name} {seed}")  # noqa: S311 - a sample, not a secret
    groups: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutate(answer_to(name), name):
        groups[mutant.operator].append(mutant)
    for group in groups.values():
        draw.shuffle(group)
    ranked = [(place, mutant) for group in groups.values() for place, mutant in enumerate(group)]
    return [mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0])]


def wrong_mutants(name: str, options: argparse.Namespace) -> Iterator[tuple[Mutant, Truth]]:
    """Mutants that run and are wrong, with the reason."""
    right = Original(ASSIGNMENTS[name].driver, answer_to(name))
    order = stratified(name, options.seed)
    for start in range(0, len(order), BATCH):
        batch = order[start : start + BATCH]
        work = dict(forked(lambda mutant: list(truth_beside(right, mutant.source)), batch, options.workers, SECONDS))
        for number, mutant in enumerate(batch):
            label = work[number] or ["not runnable"]  # no answer in time
            if FAILED in label:
                raise RuntimeError(f"{mutant.describe()}: {label}")
            if label[0] == "wrong":
                yield mutant, Truth(*label)


# Graders and the checker.


def graded(task: tuple[Path, Assignment, str, str]) -> bool:
    """Whether a grader accepts a text. Runs in a child."""
    graders, assignment, folder, source = task
    path = Path(folder) / "answer.py"
    path.write_text(source, encoding="utf-8")
    script = graders / f"run_{assignment.grader}.py"
    sys.path.insert(0, str(graders))
    sys.argv = [str(script), str(path), *filter(None, [assignment.task])]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end.code in (0, None)
    return True


def accepted(name: str, sources: list[str], options: argparse.Namespace) -> list[bool]:
    """Whether the grader accepts each text; one that gives no answer in time is rejected."""
    with tempfile.TemporaryDirectory(prefix="graders-") as folder:
        tasks = []
        for number, source in enumerate(sources):
            (Path(folder) / str(number)).mkdir()
            tasks.append((options.graders, ASSIGNMENTS[name], f"{folder}/{number}", source))
        found = dict(forked(graded, tasks, options.workers, SECONDS))
    return [found[number] is True for number in range(len(sources))]


def verdicts(sources: list[str], workers: int) -> list[str]:
    """What the checker calls each text."""
    with tempfile.TemporaryDirectory(prefix="graders-") as folder:
        found = dict(forked(judge, [(folder, source) for source in sources], workers, SECONDS))
    return [(found[number] or {}).get("verdict", "unknown") for number in range(len(sources))]


def obstacle(name: str, options: argparse.Namespace) -> str:
    """Why a grader cannot be judged; empty if it can."""
    script = options.graders / f"run_{ASSIGNMENTS[name].grader}.py"
    if not script.exists():
        return f"there is no {script.name}"
    return "" if accepted(name, [answer_to(name)], options)[0] else "it does not accept our right answer here"


def measured(name: str, options: argparse.Namespace) -> Result:
    """One grader beside the checker."""
    pairs = [pair for pair, _ in zip(wrong_mutants(name, options), range(options.wrong), strict=False)]
    sources = [mutant.source for mutant, _ in pairs]
    (own,) = verdicts([answer_to(name)], options.workers)
    judged = own in VERDICTS["right"]  # else the checker has nothing to say about this form
    said = verdicts(sources, options.workers) if judged else [""] * len(sources)
    return Result(name, pairs, accepted(name, sources, options), said, own)


# Printing.


def show(result: Result) -> None:
    """Every mutant that the grader accepts, and that the checker calls RIGHT or RIGHT AS FAR AS TESTED."""
    for name in ("accepted", "right", "partial"):
        print(f"\n== {result.name}: {name}")
        for mutant, truth in result.chosen(name):
            print(f"{subject(mutant, truth)} · {mutant.describe()} · {truth.reason}")


def row(result: Result) -> list[str]:
    """A row of the table."""
    return [result.name, *map(str, result.counts().values())]


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graders", type=Path, required=True, help="the folder with run_<grader>.py")
    parser.add_argument("--only", action="append", choices=list(ASSIGNMENTS))
    parser.add_argument("--wrong", type=int, default=80, help="so many wrong mutants of each answer (default 80)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--show", action="store_true", help="list the mutants that are accepted")
    return parser.parse_args()


def main() -> None:
    """Make mutants, find the truth, ask the graders and the checker."""
    options = parsed()
    options.graders = options.graders.resolve()
    torch.set_num_threads(1)
    for module in ("numpy", "einops", "headwise.check.verdict"):  # once, before the forks
        importlib.import_module(module)
    results, missing = [], {}
    for name in options.only or ASSIGNMENTS:
        if reason := obstacle(name, options):
            missing[name] = reason
            continue
        results.append(measured(name, options))
        print(f"{name}: {results[-1].counts()}", file=sys.stderr, flush=True)
    for result in results if options.show else ():
        show(result)
    table("wrong mutants, those that the grader accepts, and the checker's verdicts", [row(r) for r in results], HEAD)
    kinds = [[r.name, ", ".join(f"{kind} {a}/{n}" for kind, (a, n) in r.kinds().items() if a)] for r in results]
    table("kinds of mistake accepted", kinds, ["", "accepted/mutants of that kind"])
    table("left out", [list(pair) for pair in missing.items()] or [["none", ""]], ["", "why"])
    finish("graders", "cpu", [{"grader": r.name, **r.counts(), "kinds": r.kinds()} for r in results])


if __name__ == "__main__":
    main()
