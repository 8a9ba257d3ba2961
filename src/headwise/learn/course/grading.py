"""How an answer is graded: part by part, by what it computes, in any style.

A part that is a function is tried on tensors. A class goes to the checker, which finds its weights itself; the parts of
such an exercise are steps of attention, and a finding of the checker fails the part whose step it concerns.
"""

import contextlib
import dataclasses
import difflib
import functools
import linecache
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from headwise.check import Finding, Report, check
from headwise.check.faults.scores import UNSCALED
from headwise.check.report import POSITIVE
from headwise.learn.course.exercise import CACHE_STEP, WAITS, Exercise, Part, Space, needs, returned
from headwise.learn.course.reach import report_with, steps_before, steps_there
from headwise.learn.course.trial import (
    SEES_EARLIER,
    SEES_LATER,
    UNWRITTEN,
    WIDTHS,
    EndlessPartError,
    ErrorPlace,
    Limit,
    PartTrial,
    as_documented,
)

COUNTS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight")
CHECK_SECONDS = 20.0  # for the checker, which takes two
NOT_REACHED = "not reached, because of the error"
NOT_JUDGED = "not judged, because of the error"
PIECES = {
    1: "the projections", 2: "the split", 3: "the transpose", 4: "the scores", 5: "the mask", 6: "the scale",
    7: "the softmax", 8: "the weighted values", 9: "the merge", 10: "the output projection", CACHE_STEP: "the cache",
}  # fmt: skip
RESIDUAL = "the input is added to the output (residual)"
PRODUCT = re.compile(r"@|\b(matmul|einsum|bmm|scaled_dot_product_attention)\b")  # where q, k and v are used
ROLES = ("wrong-role", "no-qkv-proj", "one-projection")  # made where q, k and v are made, or where they are used
FOLLOWING = ("unused-projection", "no-gradient")
# Findings that say more than the error they lead to, and errors that are about the shape of the input.
CLEARER = ("missing-super", "missing-import", "missing-base", "size-fixed")
OF_SHAPES = ("it raises RuntimeError", "it raises ValueError", "it raises IndexError")
FLOW = (1, 2, 3, 4, 6, 5, 7, 8, 9, 10)  # the steps, in the order in which most answers do them
NOT_TRIED = "not tried, because the previous step did not finish"
SAME_CAUSE = "for the same reason"
WAITING = (NOT_REACHED, NOT_JUDGED, NOT_TRIED, SAME_CAUSE, WAITS)
# The step of attention that a mistake of the checker belongs to, by the first words of its name.
STEPS = {
    "causal-cache": CACHE_STEP, "layers-in-list": 1,
    "no-qkv-proj": 1, "one-projection": 1, "wrong-role": 1, "split": 2, "heads-share": 2, "attends-over": 3,
    "mask": 5, "causal": 5, "buffer": 5, "scale": 6, "softmax": 7, "dropout": 8, "merge": 9, "heads-averaged": 9,
    "too-wide": 9, "contiguous": 9, "no-out-proj": 10, "layers-in-forward": 10, "cache": CACHE_STEP,
}  # fmt: skip
# A number that is right at the sizes of the checker and is written into the code.
FIXED = re.compile(r"they are divided by ([\d.]+), not by (√\d+) = \1\b.*")
WHY = {"mask-leaks": "; exp(0) is 1, and only exp(−∞) is 0"}  # what to add to a finding, by its name


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
        """The first part that is not right, of those that were reached if there are any."""
        wrong = [result for result in self.results if not result.right]
        return next((result for result in wrong if result.words not in WAITING), wrong[0] if wrong else None)

    @property
    def share(self) -> float:
        """The share of parts that are right."""
        return sum(result.right for result in self.results) / len(self.results)

    def sentence(self) -> str:
        """The grade in words.

        >>> Grade((PartResult("the scores", True), PartResult("the mask", False, "it hides the past"))).sentence()
        'One of two steps is right; the next is "the mask": it hides the past'
        """
        count, right, following = len(self.results), sum(r.right for r in self.results), self.next
        if following is None:
            return "Right: " + ("the only step." if count == 1 else f"all {COUNTS[count]} steps.")
        steps = "step" if count == 1 else "steps"
        verb = "is" if right < 2 else "are"
        head = f"{COUNTS[right].capitalize()} of {COUNTS[count]} {steps} {verb} right"
        return f'{head}; the next is "{following.name}"' + (f": {following.words}" if following.words else "")

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        results = [dataclasses.asdict(result) for result in self.results]
        return {"results": results, "report": self.report, "note": self.note}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Grade":
        """The grade that `to_dict` wrote as `data`."""
        return cls(tuple(PartResult(**result) for result in data["results"]), data["report"], data["note"])


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


class WatchedSpace(dict[str, Any]):
    """The names of an answer, which can tell what was taken from them."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.used: list[Any] = []

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        self.used.append(found)
        return found

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Any]]:
        """A list of what is taken."""
        used: list[Any] = []
        self.used = used
        yield used
        self.used = []  # what is taken later belongs to nobody


class _Judge:
    """Says what is wrong with the parts of one answer; the checker is asked once, by the first part that needs it."""

    def __init__(self, exercise: Exercise, space: Space, limited: Limit, missing: str) -> None:
        self.exercise, self.space, self.limited, self.missing = exercise, WatchedSpace(space), limited, missing
        self.report: Report | None = None
        self.cause, self.cause_part = "", ""  # what the checker finds first, and the part that it belongs to
        self.cause_told = False  # by a part that it leads to
        self.stopped = ""  # the part in which the class raises an error
        self.told: set[ErrorPlace | str] = set()  # errors, by place or, outside the learner's code, by words
        self.right: list[types.FunctionType] = []  # functions that parts have found right

    def words(self, part: Part) -> str:
        """What is wrong with a part, or nothing."""
        words = self._first_words(part)
        if words or part.last is None:
            return words
        tried = self._tried(functools.partial(part.last, self.space))
        return "" if tried.raised else tried.words

    def _first_words(self, part: Part) -> str:
        if part.test is None:
            return self._by_checker(part)
        with self.space.watched() as used:
            tried = _of_nothing(self._tried(functools.partial(part.test, self.space)), used)
        by_class = self.space.get(str(self.exercise.judged)) in used
        if tried.raised and self._is_told(tried):
            return NOT_REACHED
        if not tried.words:
            self.right += [found for found in used if isinstance(found, types.FunctionType)]
        if tried.words == UNWRITTEN or self.exercise.judged not in self.space:
            return tried.words
        named = self._checked[1]
        if tried.failure is not None and tried.failure == self._call.failure:
            return tried.words
        if tried.words and self.cause and by_class and not (self._is_tested(self.cause_part) or tried.raised):
            if part.steps:  # it has steps of its own, and the mistake is in another
                return WAITS
            self.cause_told = True
            return f"{tried.words}; the cause may be that {self.cause}"
        return tried.words or named.get(part.name, "")

    def _is_tested(self, name: str) -> bool:
        """Whether a part has a test of its own, which tells its mistakes: they are not the cause of what others say."""
        return any(part.name == name and part.test is not None for part in self.exercise.parts)

    def _is_told(self, tried: PartTrial) -> bool:
        """Whether an earlier part has raised this error; otherwise it is remembered."""
        known = (tried.failure or tried.words) in self.told
        self.told.add(tried.failure or tried.words)
        return known

    def _tried(self, test: Callable[[], None]) -> PartTrial:
        with self.limited(self.exercise.seconds), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return PartTrial.of(test, self._missing, self.exercise.axes)

    def _missing(self, name: str) -> str:
        """What to say of a name that the answer does not define; an answer may have it under another one."""
        meant = _meant(name, self.space, self.exercise.skeleton)
        return self.missing.format(name) + (f"; is {meant} meant to be it?" if meant else "")

    @functools.cached_property
    def _call(self) -> PartTrial:
        """What a call as documented says."""
        call = self.exercise.call
        if call is None or self.exercise.judged not in self.space:
            return PartTrial()
        tried = self._tried(functools.partial(as_documented, self.space[str(self.exercise.judged)], call))
        if tried.raised and tried.words.startswith(OF_SHAPES):
            given = " and ".join(map(str, call.inputs))
            return dataclasses.replace(tried, words=f"{tried.words}, for an input of {given}")
        return tried

    @functools.cached_property
    def _checked(self) -> tuple[Report, dict[str, str]]:
        """What the checker reports on the class, and what is wrong by the name of a part."""
        with self.limited(CHECK_SECONDS), torch.random.fork_rng(devices=[]):
            self.report = report = check(self.space[str(self.exercise.judged)])
        found = [finding for finding in report.wrong if not self._is_ignored(finding)]
        if report.verdict != "unfinished" and self._call.failure is not None:
            return report, self._stopped(found)
        words: dict[str, str] = {}
        for finding in _causes(found):
            told = self._placed(finding)
            owner = self._owner(finding)
            if not self.cause:
                self.cause, self.cause_part = _words(told), owner
            words.setdefault(owner, _words(told))
        if self._call.selfless:
            first, *others = (part.name for part in self._asked)
            self.stopped = first
            return report, dict.fromkeys(others, NOT_REACHED) | {first: self._call.words}
        if self._call.raised and report.verdict != "unfinished":  # an error of our call, not of the learner's code
            words |= self._another_call()
        elif not found and report.verdict != "unfinished" and self._call.words:
            words[self._of_call()] = self._call.words
        if report.verdict != "unfinished" and not self._call.raised:
            self._leave_out(words, found)
        if not words and RESIDUAL in report.variants:
            words[self._asked[-1].name] = f"{RESIDUAL}; exercise 12 does that, around the layer"
        if not (words or found) and report.verdict in POSITIVE and self.exercise.early is not None:
            lacks, has = self.exercise.early
            said = (*report.variants, *(finding.title for finding in report.wrong))
            if not any(words_on_it.startswith(lacks) for words_on_it in said):
                words[self._at_step(STEPS["scale"])] = has
        return report, words

    def _is_ignored(self, finding: Finding) -> bool:
        """Whether a finding is of another exercise, or of a causal mask that should not be there at all."""
        follows = "causal" in finding.name or finding.detail.startswith("argument mask")
        hides = self._call.words.startswith(SEES_EARLIER)
        said = finding.name in self.exercise.ignores and UNSCALED not in finding.detail
        return (hides and follows) or said

    def _of_call(self) -> str:
        """The part to which belongs what a call as documented says."""
        if self._call.words.startswith(SEES_LATER):
            return self._at_step(STEPS["causal"])
        scores = self._with_step(4) if self._call.words.startswith(SEES_EARLIER) else None
        return (scores or self._asked[-1]).name

    def _leave_out(self, words: dict[str, str], found: list[Finding]) -> None:
        """Give no credit for a step that is not there, if the class does something else than all of them."""
        said = "" if self._call.words.startswith(SEES_LATER) else self._call.words  # a wrong shape, or no tensor
        if said or any(_step(finding) == 0 for finding in found) or (found and self._uncalled):
            with self.limited(CHECK_SECONDS), torch.random.fork_rng(devices=[]):
                there = steps_there(self.space[str(self.exercise.judged)])
            placed = {1} if any(finding.name.startswith(ROLES) for finding in found) else set[int]()
            missing = [] if there is None else [p for p in self._asked if not (there | placed) & {*p.steps}]
            if said and missing:
                words.setdefault(missing[0].name, said)
            elif missing and missing[0].name not in words:  # what nothing else places
                placeless = next((_words(finding) for finding in found if _step(finding) == 0), "")
                words |= {name: WAITS for name, told in words.items() if told == placeless} | {
                    missing[0].name: placeless
                }
            for part in missing:
                words.setdefault(part.name, WAITS)
        hiding = self._with_step(STEPS["causal"])
        if hiding is not None and any(finding.name.startswith("attends-over") for finding in found):
            words.setdefault(hiding.name, WAITS)  # between other things than tokens, nothing can be hidden

    def _another_call(self) -> dict[str, str]:
        """What is said, by part, of a class that is made or called in another way than the exercise says."""
        call, hiding = self.exercise.call, self._with_step(STEPS["causal"])
        assert call is not None  # noqa: S101 - it was tried
        sizes, given = ", ".join(map(str, call.sizes)), " and ".join(map(str, call.inputs))
        said = f"the exercise makes {self.exercise.judged}({sizes}) and calls it with {given}: {self._call.words}"
        unknown = {hiding.name: NOT_JUDGED} if call.causal and hiding is not None else {}
        self.stopped = self._asked[0].name
        return unknown | {self.stopped: f"{said}. Keep its signature"}

    def _placed(self, finding: Finding) -> Finding:
        """A finding without its line if that is in a function that another part has found right."""
        lines = {line for function in self.right for *_, line in function.__code__.co_lines()}
        return dataclasses.replace(finding, line=None) if finding.line in lines else finding

    def _stopped(self, found: list[Finding]) -> dict[str, str]:
        """What is wrong, by part, with a class that raises an error: steps that it does not come to are not reached."""
        said, failure = self._call.words, self._call.failure
        line = None if failure is None else failure.line
        named = next((f for f in found if f.name in CLEARER or (_step(f) and f.line == line)), None)
        done = self._done
        open_steps, following = self._around_error
        first = following if named is None or not _step(named) else _step(named)
        late = set(FLOW[FLOW.index(first) :]) - (done if first == following else set())
        owner = self._stopping(first)
        before = self._asked[: self._asked.index(owner)]
        words = {
            part.name: NOT_JUDGED if part in before else NOT_REACHED
            for part in self._asked
            if (late | open_steps) & {*part.steps} or not part.steps
        }
        self.stopped = owner.name
        judged = {part.name: told for part in before if (told := self._without_error(part)) and part.name in words}
        return words | judged | {owner.name: said if named is None else _words(named)}

    @property
    def _around_error(self) -> tuple[set[int], int]:
        """The steps before the error that are not done rightly, and the step in which it is as far as steps can tell.

        That is the one after the last that is done, or one before it if its line is more like the one that failed.
        """
        asked = [step for step in FLOW if self._with_step(step)]
        last = max((asked.index(step) for step in asked if step in self._done), default=-1)
        skipped = {step for step in asked[: last + 1] if step not in self._done}
        following = asked[min(last + 1, len(asked) - 1)]
        failure = self._call.failure
        parts = [part for part in self._asked if (skipped | {following}) & {*part.steps}]
        line = "" if failure is None else linecache.getline(failure.filename, failure.line)
        alike = _most_alike(parts, line) if skipped else None
        step = following if alike is None else next(n for n in asked if n in {*alike.steps} & (skipped | {following}))
        return {n for n in skipped if asked.index(n) < asked.index(step)}, step

    def _without_error(self, part: Part) -> str:
        """What is wrong with a part before an error, if the error is a name whose meaning is clear."""
        return next((_words(f) for f in self._repaired if _step(f) in part.steps), "")

    @functools.cached_property
    def _repaired(self) -> list[Finding]:
        """The findings on the class with the name that is meant in the place of the one that fails."""
        call = self._call
        if call.failure is None or not call.meant:
            return []
        with self.limited(CHECK_SECONDS), torch.random.fork_rng(devices=[]):
            report = report_with(self.space[str(self.exercise.judged)], call.failure, call.meant)
        return [] if report is None else [f for f in report.wrong if f.name not in self.exercise.ignores]

    @functools.cached_property
    def _done(self) -> set[int]:
        """The steps that the class does rightly before it raises an error."""
        if self._call.failure is None:
            return set()
        with self.limited(CHECK_SECONDS), torch.random.fork_rng(devices=[]):
            return steps_before(self.space[str(self.exercise.judged)], self._call.failure)

    def _stopping(self, step: int) -> Part:
        """The part in which a class raises an error, at this step as far as is known."""
        failure, owner = self._call.failure, self._with_step(step) or self._asked[-1]
        if failure is not None and not self._done:  # nothing is known but the text of the line
            return _most_alike(self._asked, linecache.getline(failure.filename, failure.line)) or owner
        widths, call = WIDTHS.search(self._call.error), self.exercise.call
        came_wrong = widths is not None and call is not None and int(widths[1]) != call.sizes[0]
        before = self._asked.index(owner) - 1
        return self._asked[before] if came_wrong and owner.steps == (10,) and before >= 0 else owner

    @property
    def _asked(self) -> list[Part]:
        """The parts that the checker judges."""
        return [part for part in self.exercise.parts if part.test is None]

    def _with_step(self, step: int) -> Part | None:
        return next((part for part in self._asked if step in part.steps), None)

    def _owner(self, finding: Finding) -> str:
        """The part that a mistake belongs to: by its step or, if it can be in several steps, by its line."""
        if finding.name.startswith(ROLES):
            is_use = PRODUCT.search(finding.text) is not None and not self._uncalled
            return self._at_step((8 if finding.detail.removeprefix("the ").startswith("value") else 4) if is_use else 1)
        if _step(finding):
            return self._at_step(_step(finding))
        alike = self._raising_at(finding.line) or _most_alike(self._asked, finding.text)
        return (alike or self._asked[-1]).name

    def _raising_at(self, line: int | None) -> Part | None:
        """The part whose own test raises an error on a line."""
        for part in self.exercise.parts if line is not None else ():
            with contextlib.suppress(EndlessPartError):
                failure = None if part.test is None else self._tried(functools.partial(part.test, self.space)).failure
                if failure is not None and failure.line == line:
                    return part
        return None

    def _at_step(self, step: int) -> str:
        """The part with this step or, if there is none, with one before it."""
        before = [*FLOW[: FLOW.index(step) + 1]] if step in FLOW else [step]
        found = (part.name for step in reversed(before) for part in self.exercise.parts if step in part.steps)
        return next(found, self._asked[-1].name)

    @functools.cached_property
    def _uncalled(self) -> bool:
        """Whether the class has a matrix that a call as documented does not use."""
        call, called, layers = self.exercise.call, set[torch.nn.Module](), set[torch.nn.Module]()
        if call is None:
            return False

        def watched() -> None:
            layer = self.space[str(self.exercise.judged)](*call.sizes)
            layers.update(module for module in layer.modules() if isinstance(module, torch.nn.Linear))
            for module in layers:
                module.register_forward_hook(lambda module, *_: called.add(module))
            layer(*(torch.randn(shape) for shape in call.inputs))

        self._tried(watched)
        return bool(layers - called)

    def _by_checker(self, part: Part) -> str:
        missing = self._tried(functools.partial(needs, self.space, str(self.exercise.judged))).words
        if missing:
            return missing
        report, named = self._checked
        if report.verdict == "unfinished":
            if (said := _without_forward(self.space[str(self.exercise.judged)])) is not None:
                return said
            done = {int(step.partition(" ")[0]) for step in report.done}
            return _unwritten(part, done)
        words = named.get(part.name, "")
        if words == self.cause and self.cause_told:
            return SAME_CAUSE
        if part.name == self.stopped and self._is_told(self._call):
            return NOT_REACHED
        if report.verdict == "unknown" and not named:
            return "; ".join(report.doubts) or "the checker does not understand this class"
        return words


def _meant(name: str, space: Space, skeleton: str) -> str | None:
    """The definition of an answer that a missing name may be: the one spelled alike, or the only one to spare."""
    kind = type if name[:1].isupper() else types.FunctionType
    own = [n for n, made in space.items() if isinstance(made, kind) and made.__module__ == space.get("__name__")]
    spare = {other.lower(): other for other in own if not re.search(rf"\b(class|def) {other}\b", skeleton)}
    alike = difflib.get_close_matches(name.lower(), spare, 1, 0.6)
    if not alike and len(spare) == 1:  # unless another name is meant that is spelled more like it
        asked = re.findall(r"\b(?:class|def) (\w+)", skeleton)
        alike = [other for other in spare if not difflib.get_close_matches(other, map(str.lower, asked), 1, 0.6)]
    return next((spare[other] for other in alike), None)


def _of_nothing(tried: PartTrial, used: list[Any]) -> PartTrial:
    """A trial that fails on a None of a function, with the name and the line of that function."""
    ours = tried.raised and tried.failure is None and "'NoneType'" in tried.words
    if not (ours or tried.words.endswith(returned(None))) or not used:
        return tried
    called = getattr(used[-1], "forward", used[-1])
    code = getattr(called, "__code__", None)
    line = "" if code is None else f" (line {code.co_firstlineno})"
    return PartTrial(f"{used[-1].__name__} returns {returned(None)}{line}")


def _without_forward(made: Any) -> str | None:
    """What to say of a class that has no forward of its own; None if it has one."""
    if getattr(made, "forward", None) is not torch.nn.Module.forward:
        return None
    alike = difflib.get_close_matches("forward", vars(made), 1)
    return "there is no method forward" + (f"; is {alike[0]} meant to be it?" if alike else "")


def _unwritten(part: Part, done: set[int]) -> str:
    """Which steps of a part are not written yet, or nothing."""
    left = [step for step in part.steps if step not in done]
    if part.steps and not left:
        return ""
    if len(left) == len(part.steps):
        return UNWRITTEN
    verb = "is" if len(left) == 1 and not PIECES[left[0]].endswith("s") else "are"
    return f"{' and '.join(PIECES[step] for step in left)} {verb} not written yet"


def _causes(found: list[Finding]) -> list[Finding]:
    """The findings without those that follow from another: a projection in a wrong role leaves another without use."""
    roles = [finding for finding in found if finding.name.startswith(ROLES)]
    kept = [finding for finding in found if finding not in roles[1:]]
    return [finding for finding in kept if finding.name not in FOLLOWING] or kept


def _most_alike(parts: list[Part], text: str) -> Part | None:
    """The part whose line is most like this one, if it is at all."""
    best = max(parts, key=lambda part: _likeness(part.line, text))
    return best if _likeness(best.line, text) > 0.4 else None


def _likeness(line: str, text: str) -> float:
    """How much of a line of code is in another one, from 0 to 1, word by word."""
    words, other = (re.findall(r"\w+|[@*/+-]", code) for code in (line, text.partition("#")[0]))
    matched = difflib.SequenceMatcher(None, words, other).get_matching_blocks()
    return 2 * sum(block.size for block in matched) / (len(words) + len(other) or 1)


def _step(finding: Finding) -> int:
    return next((step for start, step in STEPS.items() if finding.name.startswith(start)), 0)


def _words(finding: Finding) -> str:
    told = FIXED.sub(r"they are always divided by \1, which is \2 and does not follow the head width", finding.detail)
    detail = f": {told}" if told else ""
    return f"{finding.title}{detail}{WHY.get(finding.name, '')}{_place(finding)}"


def _place(finding: Finding) -> str:
    return "" if finding.line is None else f" ({finding.place})"
