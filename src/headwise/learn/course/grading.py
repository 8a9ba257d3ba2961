"""How an answer is graded: part by part, by what it computes, in any style.

A part that is a function is tried on tensors. A class goes to the checker, which finds its weights itself; the parts of
such an exercise are steps of attention, and a finding of the checker fails the part whose step it concerns.
"""

import contextlib
import dataclasses
import difflib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise
from headwise.check import Finding, Report, check
from headwise.learn.course.exercise import (
    CACHE_STEP,
    DocumentedCall,
    Exercise,
    MissingNameError,
    Part,
    Space,
    WrongPartError,
    needs,
)
from headwise.learn.course.reach import Failure, failure_in, steps_before

COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")
CHECK_SECONDS = 20.0  # for the checker, which takes two
INSTALLED = (str(Path(headwise.__file__).parent), str(Path(torch.__file__).parent), os.__file__[:-5], "<frozen")
UNWRITTEN = "it is not written yet"
NOT_REACHED = "not reached, because an earlier step fails"
SEES_LATER = "a token sees later ones"
PIECES = {
    1: "the projections", 2: "the split", 3: "the transpose", 4: "the scores", 5: "the mask", 6: "the scale",
    7: "the softmax", 8: "the weighted values", 9: "the merge", 10: "the output projection", CACHE_STEP: "the cache",
}  # fmt: skip
RESIDUAL = "the input is added to the output (residual)"
ROLES = ("wrong-role", "no-qkv-proj", "one-projection")  # made where q, k and v are made, or where they are used
WIDTHS = re.compile(r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)")
NOT_TRIED = "not tried, because the previous step did not finish"
# The step of attention that a mistake of the checker belongs to, by the first words of its name.
STEPS = {
    "causal-cache": CACHE_STEP, "layers-in-list": 1,
    "no-qkv-proj": 1, "one-projection": 1, "wrong-role": 1, "split": 2, "heads-share": 2, "attends-over": 3,
    "mask": 5, "causal": 5, "buffer": 5, "scale": 6, "softmax": 7, "dropout": 8, "merge": 9, "heads-averaged": 9,
    "too-wide": 9, "contiguous": 9, "no-out-proj": 10, "layers-in-forward": 10, "cache": CACHE_STEP,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PartResult:
    """Whether a part is right, and what is wrong with it."""

    name: str
    right: bool
    words: str = ""


@dataclasses.dataclass(frozen=True)
class Grade:
    """The result of an exercise, part by part; `report` is what the checker says in full, `note` what else happened."""

    results: tuple[PartResult, ...]
    report: str = ""
    note: str = ""

    @property
    def right(self) -> bool:
        """Whether every part is right."""
        return all(result.right for result in self.results)

    @property
    def next(self) -> PartResult | None:
        """The first part that is not right."""
        return next((result for result in self.results if not result.right), None)

    @property
    def share(self) -> float:
        """The share of parts that are right."""
        return sum(result.right for result in self.results) / len(self.results)

    def sentence(self) -> str:
        """The grade in words.

        >>> Grade((PartResult("the scores", True), PartResult("the mask", False, "it hides the past"))).sentence()
        'One of two steps is right; the next is the mask: it hides the past'
        """
        count, right, following = len(self.results), sum(r.right for r in self.results), self.next
        if following is None:
            return "Right: " + ("the only step." if count == 1 else f"all {COUNTS[count]} steps.")
        steps = "step" if count == 1 else "steps"
        verb = "is" if right < 2 else "are"
        head = f"{COUNTS[right].capitalize()} of {COUNTS[count]} {steps} {verb} right"
        return f"{head}; the next is {following.name}" + (f": {following.words}" if following.words else "")

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        results = [dataclasses.asdict(result) for result in self.results]
        return {"results": results, "report": self.report, "note": self.note}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Grade":
        """The grade that `to_dict` wrote as `data`."""
        return cls(tuple(PartResult(**result) for result in data["results"]), data["report"], data["note"])


Limit = Callable[[float], contextlib.AbstractContextManager[Any]]


class EndlessPartError(WrongPartError):
    """A part did not end."""


def grade(
    exercise: Exercise,
    space: Space,
    *,
    progress: Callable[[str], None] = lambda _: None,
    limited: Limit = contextlib.nullcontext,
    missing: str = "{} is not defined",
) -> Grade:
    """Grade the names that an answer defines, such as `globals()` of a notebook. The code runs in this process.

    Args:
        exercise: what to grade.
        space: the names.
        progress: called with the name of every part before it is tried.
        limited: makes a context that raises `EndlessPartError` after so many seconds. Later parts are then not tried.
        missing: what to say of a name that the answer does not define.
    """
    judge = _Judge(exercise, space, limited, missing)
    results: list[PartResult] = []
    stopped = ""
    for part in exercise.parts:
        progress(part.name)
        try:
            words = stopped or judge.words(part)
        except EndlessPartError as failure:
            words, stopped = str(failure), NOT_TRIED
        results.append(PartResult(part.name, not words, words))
    return Grade(tuple(results), "" if judge.report is None else str(judge.report))


class _Judge:
    """Says what is wrong with the parts of one answer; the checker is asked once, by the first part that needs it."""

    def __init__(self, exercise: Exercise, space: Space, limited: Limit, missing: str) -> None:
        self.exercise, self.space, self.limited, self.missing = exercise, space, limited, missing
        self.report: Report | None = None
        self.told: set[Failure] = set()

    def words(self, part: Part) -> str:
        """What is wrong with a part, or nothing."""
        if part.test is None:
            return self._by_checker(part)
        words, failure = self._tried(functools.partial(part.test, self.space))
        if words == UNWRITTEN or self.exercise.judged not in self.space:
            return words
        if failure is not None and self._is_told(failure):
            return NOT_REACHED
        named = self._checked[1]
        if failure is not None and failure == self._crash[1]:
            return words
        if words and named:
            return f"{words}; the checker names this cause: {next(iter(named.values()))}"
        return words or named.get(part.name, "")

    def _is_told(self, failure: Failure) -> bool:
        """Whether an earlier part has failed at this place; otherwise it is remembered."""
        known = failure in self.told
        self.told.add(failure)
        return known

    def _tried(self, test: Callable[[], None]) -> tuple[str, Failure | None]:
        """What a test says, and where the learner's code raised an error."""
        try:
            with self.limited(self.exercise.seconds), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                test()
        except EndlessPartError:
            raise
        except MissingNameError as missing:
            return self.missing.format(missing), None
        except WrongPartError as failure:
            return str(failure), None
        except NotImplementedError:
            return UNWRITTEN, None
        except SystemExit:
            return "it exits Python with exit() or quit()", None
        except Exception as error:  # whatever the learner's code raises
            where = failure_in(error.__traceback__, INSTALLED)
            return f"it raises {type(error).__name__}: {_explained(str(error))}{place(error)}", where
        return "", None

    @functools.cached_property
    def _crash(self) -> tuple[str, Failure | None]:
        """What a call as documented says that ends in an error or gives something else, and where the error is."""
        name, call = self.exercise.judged, self.exercise.call
        if call is None:
            return "", None
        words, failure = self._tried(functools.partial(_as_documented, needs(self.space, str(name)), call))
        given = " and ".join(map(str, call.inputs))
        return (f"{words}; it was given {given}" if words.startswith("it raises") else words), failure

    @functools.cached_property
    def _checked(self) -> tuple[Report | None, dict[str, str]]:
        """What the checker reports on the class, and what is wrong by the name of a part."""
        name = self.exercise.judged
        if name is None or name not in self.space:
            return None, {}
        with self.limited(CHECK_SECONDS), torch.random.fork_rng(devices=[]):
            self.report = report = check(self.space[name])
        found = [finding for finding in report.wrong if finding.name not in self.exercise.ignores]
        words: dict[str, str] = {}
        if report.verdict != "unfinished" and self._crash[0].startswith("it raises"):
            return report, self._stopped(found)
        for finding in _causes(found):
            words.setdefault(self._owner(_step(finding), finding.text, finding.name), _words(finding))
        if not found and report.verdict != "unfinished" and self._crash[0]:
            words[self._owner(STEPS["causal"] if self._crash[0].startswith(SEES_LATER) else 0, "", "")] = self._crash[0]
        if not words and RESIDUAL in report.variants:
            words[self._asked[-1].name] = f"{RESIDUAL}; exercise 12 does that, around the layer"
        return report, words

    def _stopped(self, found: list[Finding]) -> dict[str, str]:
        """What is wrong, by part, with a class that raises an error: what comes after it was not reached."""
        said, failure = self._crash
        here = [f for f in found if failure is not None and f.line == failure.line]
        named = next((f for f in here if f.name != "crashes"), None)
        step = 0 if named is None else _step(named)
        with self.limited(CHECK_SECONDS), torch.random.fork_rng(devices=[]):
            done = set() if failure is None else steps_before(self.space[str(self.exercise.judged)], failure)
        undone = [part for part in self._asked if step in part.steps or (not step and not done.issuperset(part.steps))]
        owner = (undone or self._asked[-1:])[0]
        if owner is not self._asked[0] and owner.steps == (10,) and self._is_too_wide(said):
            owner = self._asked[self._asked.index(owner) - 1]
        words = {part.name: NOT_REACHED for part in self._asked[self._asked.index(owner) :]}
        if failure is not None and self._is_told(failure):
            return words
        return words | {owner.name: said if named is None else _words(named)}

    def _is_too_wide(self, said: str) -> bool:
        """Whether an error says that something other than d_model numbers reached the last layer."""
        call, widths = self.exercise.call, WIDTHS.search(said)
        return call is not None and widths is not None and int(widths[1]) != call.sizes[0]

    @property
    def _asked(self) -> list[Part]:
        """The parts that the checker judges."""
        return [part for part in self.exercise.parts if part.test is None]

    def _owner(self, step: int, text: str, mistake: str) -> str:
        """The part that a mistake belongs to: by its step, or by the line it is on if it can be in several steps."""
        roles = mistake.startswith(ROLES)
        if not step or roles:
            parts = [part for part in self._asked if not roles or {1, 4, 8} & {*part.steps}]
            best = max(parts, key=lambda part: _likeness(part.line, text))
            if _likeness(best.line, text) > 0.4:
                return best.name
        return next((part.name for part in self.exercise.parts if step in part.steps), self._asked[-1].name)

    def _by_checker(self, part: Part) -> str:
        words = self._tried(functools.partial(needs, self.space, str(self.exercise.judged)))[0]
        if words:
            return words
        report, named = self._checked
        assert report is not None  # noqa: S101 - the class exists
        if report.verdict == "unfinished":
            done = {int(step.partition(" ")[0]) for step in report.done}
            return _unwritten(part, done)
        if part.name in named:
            return named[part.name]
        if report.verdict == "unknown" and not named:
            return "; ".join(report.doubts) or "the checker does not understand this class"
        return ""


def _unwritten(part: Part, done: set[int]) -> str:
    """Which steps of a part are not written yet, or nothing."""
    left = [step for step in part.steps if step not in done]
    if part.steps and not left:
        return ""
    if len(left) == len(part.steps):
        return UNWRITTEN
    verb = "is" if len(left) == 1 else "are"
    return f"{' and '.join(PIECES[step] for step in left)} {verb} not written yet"


def _causes(found: list[Finding]) -> list[Finding]:
    """The findings without those that follow from another: a projection in a wrong role leaves another one unused."""
    roles = [finding for finding in found if finding.name.startswith(ROLES)]
    kept = [finding for finding in found if finding not in roles[1:]]
    return [finding for finding in kept if finding.name != "unused-projection"] or kept


def _as_documented(made: Callable[..., Any], call: DocumentedCall) -> None:
    """Call a class as its docstring says; the checker is content with any way to call it."""
    layer = made(*call.sizes).eval()
    with torch.no_grad():
        found = layer(*(torch.randn(shape) for shape in call.inputs))
    output = found[0] if isinstance(found, tuple) else found
    if tuple(output.shape) != call.output:
        given = ", ".join(map(str, call.inputs))
        raise WrongPartError(f"the call gives shape {tuple(output.shape)} for {given}; expected {call.output}")
    if call.causal:
        _hides_later_tokens(layer, call)


def _hides_later_tokens(layer: Callable[..., Any], call: DocumentedCall) -> None:
    """Fail if an output changes with a later token. A mask that the caller must pass is another exercise."""
    x = torch.randn(call.inputs[0])
    changed = torch.cat([x[:, :-1], torch.randn_like(x[:, -1:])], 1)
    with torch.no_grad():
        found = [layer(given) for given in (x, changed)]
    before, after = (output[0] if isinstance(output, tuple) else output for output in found)
    if not torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5):
        raise WrongPartError(
            f"{SEES_LATER}: called with x alone, its earlier outputs change with the last token. Make the causal mask "
            "in forward; masks that the caller passes come in exercise 8"
        )


def _likeness(line: str, text: str) -> float:
    """How much of a line of code is in another one, from 0 to 1, word by word."""
    words, other = (re.findall(r"\w+|[@*/+-]", code) for code in (line, text.partition("#")[0]))
    matched = difflib.SequenceMatcher(None, words, other).get_matching_blocks()
    return 2 * sum(block.size for block in matched) / (len(words) + len(other) or 1)


def _explained(error: str) -> str:
    """An error of torch, with what the sizes in it are."""
    widths = WIDTHS.search(error)
    return error if widths is None else f"{error}: {widths[1]} numbers reach a layer that takes {widths[2]}"


def _step(finding: Finding) -> int:
    return next((step for start, step in STEPS.items() if finding.name.startswith(start)), 0)


def _words(finding: Finding) -> str:
    where = "" if finding.line is None else f" ({finding.place})"
    detail = f": {finding.detail}" if finding.detail else ""
    return f"{finding.title}{detail}{where}"


def place(error: BaseException) -> str:
    """The line of the learner's code that raised the error."""
    frame, line = error.__traceback__, None
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        line = line if name.startswith(INSTALLED) else frame.tb_lineno
        frame = frame.tb_next
    return "" if line is None else f" (line {line})"
