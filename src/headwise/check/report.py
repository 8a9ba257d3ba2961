"""What the checker says: a verdict, what was understood, the findings, and what was measured."""

import re
import textwrap
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from headwise.check.jail import missing
from headwise.check.mistakes import MISTAKES, Finding
from headwise.errors import printable

EXIT = {"right": 0, "variant": 0, "wrong": 1, "partial": 2, "unfinished": 2, "unknown": 2}
POSITIVE = ("right", "variant", "partial")
WORDS = {
    "right": "RIGHT", "variant": "RIGHT", "partial": "RIGHT AS FAR AS TESTED", "wrong": "WRONG",
    "unfinished": "UNFINISHED", "unknown": "CANNOT JUDGE",
}  # fmt: skip
MARKS = {"verified": "✓", "not judged": "?", "does not apply": "–", "failed": "✗"}
LABEL = {"wrong": "WRONG", "fragile": "FRAGILE", "slow": "SLOW", "style": "STYLE"}
INDENT = " " * 8
OWN = "*"  # marks what is known only from the process that ran the file
FOOTNOTE = "* tested only inside the process that ran your file; the rest was checked again from outside"
EQUAL = "equals the reference with your own weights"


@dataclass
class Item:
    """One item of the certificate: what was asked, and whether it was verified."""

    name: str
    status: str  # verified, failed, not judged, does not apply
    words: str = ""
    own: bool = False  # only the process that ran the file says so

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Item":
        """The item that was written as plain data."""
        name, words = (_of_shape(data[key], SHAPES[str], key) for key in ("name", "words"))
        return cls(name, _one_of(data["status"], MARKS), words, _of_shape(data.get("own", False), SHAPES[bool], "own"))

    def __str__(self) -> str:
        status = "not judged: " if self.status == "not judged" else ""
        own = OWN if self.own and not status else ""
        return f"{MARKS[self.status]} {status}{self.name}{own}{': ' + self.words if self.words else ''}"


@dataclass
class Report:
    """The result of a check. `str(report)` is the text, `report.to_dict()` plain data, `report.exit_code` 0, 1 or 2."""

    verdict: str  # right, variant (right, but more or less than plain attention), partial, wrong, unknown
    subject: str = ""  # MultiHeadAttention(d_model=32, num_heads=4)
    call: str = ""  # forward(query, key, value, mask)
    masks: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    own_variants: list[str] = field(default_factory=list)  # those that only the process that ran the file reports
    good: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    certificate: list[Item] = field(default_factory=list)
    difference: str = ""  # the first differing index with both values
    proof: str = ""
    tried: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # further candidates in the file
    file: str = ""
    seconds: float = 0.0
    in_process: bool = False
    jail: list[str] = field(default_factory=list)  # the layers of the jail that were active while a file ran
    compared: str = ""  # the assignment or reference that it had to fit
    fits: str = ""  # what of it was compared, where it fits
    solution: str = ""
    replaced: list[str] = field(default_factory=list)  # definitions that a later one of the same name replaces
    left_out: list[str] = field(default_factory=list)  # cells and blocks that are not valid Python
    done: list[str] = field(default_factory=list)  # of unfinished code: the steps that are right, as "4 scores"
    next: str = ""  # the step that comes next
    hint: str = ""  # for that step
    stops: int | None = None  # the line where the code ends
    ending: str = ""  # the same in words, where a notebook counts the lines of its cell
    assumed: list[str] = field(default_factory=list)  # what a fragment uses and does not define
    evidence: Any = field(default=None, repr=False, compare=False)  # the live object and its reading, until it is sent

    @property
    def exit_code(self) -> int:
        """0 right, 1 wrong, 2 not judged or not completely."""
        return EXIT[self.verdict]

    @property
    def wrong(self) -> list[Finding]:
        """The findings that make it wrong."""
        return [finding for finding in self.findings if finding.severity == "wrong"]

    @property
    def cause(self) -> str | None:
        """The name of the first mistake that makes it wrong."""
        return next((finding.name for finding in self.wrong), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        findings = [finding.to_dict() for finding in self.findings]
        plain = asdict(replace(self, evidence=None, findings=[]))
        del plain["evidence"]
        return plain | {"findings": findings, "exit_code": self.exit_code, "cause": self.cause}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Report":
        """The report that `to_dict` wrote as `data`. A stranger may have sent it: anything else is a `ValueError`."""
        made = cls(_one_of(data["verdict"], EXIT))
        for plain in fields(cls):
            if plain.type in SHAPES and plain.name in data:
                setattr(made, plain.name, _of_shape(data[plain.name], SHAPES[plain.type], plain.name))
        made.certificate = [Item.from_dict(item) for item in data.get("certificate", [])]
        made.findings = [_finding(found) for found in data.get("findings", [])]
        return made

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """The text, line by line."""
        out = [f"{self.subject} · {self.call}" if self.call else self.subject] if self.subject else []
        out += [f"against {self.compared}"] if self.compared else []
        out += [f"{INDENT}assumed: {words}" for words in self.assumed]
        out += [f"mask    argument {line}" for line in self.masks]
        out += self._verdict_lines()
        for finding in self.wrong:
            out += _finding_lines(finding)
        out += [f"{INDENT}first difference: {self.difference}"] if self.difference else []
        out += [INDENT + self.proof] if self.proof else []
        for finding in self.findings:
            out += _finding_lines(finding) if finding.severity != "wrong" else []
        shown = self.verdict in ("wrong", "unknown")  # otherwise the certificate says it
        out += [f"OK      {' · '.join(self.good)}"] if self.good and shown else []
        if self.others:
            out.append(f"{INDENT}also in this file, not judged: {', '.join(self.others)} (choose with --name)")
        out += [f"{INDENT}not judged: {words}" for words in self.replaced[:3]]
        out += [f"{INDENT}left out, not valid Python: {piece}" for piece in self.left_out[:3]]
        return [printable(line) for line in out + self._jail_lines()]  # lines quote the file

    def _jail_lines(self) -> list[str]:
        """Which layers of the jail were active, and what the code could still have done."""
        if not self.jail:
            return []
        could = missing(self.jail)
        return [f"jail    {', '.join(self.jail)}" + (f"; the code could {' and '.join(could)}" if could else "")]

    def _verdict_lines(self) -> list[str]:
        if self.verdict in ("right", "variant", "partial"):
            named = [words + OWN if words in self.own_variants else words for words in self.variants]
            words = f"a known variant: {'; '.join(named)}" if named else EQUAL
            label = "RIGHT   " if self.verdict != "partial" else "RIGHT AS FAR AS TESTED  "
            lines = [label + words, *(INDENT + str(item) for item in self.certificate)]
            lines += [f"{INDENT}{MARKS['verified']} {self.fits}{'' if self.in_process else OWN}"] if self.fits else []
            marked = (
                self.fits
                or self.own_variants
                or any(item.own and item.status != "not judged" for item in self.certificate)
            )
            return [*lines, INDENT + FOOTNOTE] if marked and not self.in_process else lines
        if self.verdict == "wrong":
            return [f"{INDENT}a variant: {'; '.join(self.variants)}"] if self.variants else []
        if self.verdict == "unfinished":
            return self._progress_lines()
        lines = ["CANNOT JUDGE: the code may be right or wrong"]
        lines += [f"{INDENT}not understood: {doubt}" for doubt in self.doubts]
        lines += [f"{INDENT}tried: {attempt}" for attempt in self.tried[:5]]
        if self.tried:
            lines.append(f'{INDENT}tell the checker how: --build "MyClass(512, 8)" --call "m(x, x, x, mask)"')
        return lines

    def _progress_lines(self) -> list[str]:
        """How far it is right and what comes next."""
        lines = [f"UNFINISHED  {steps_in_words(self.done)}; next: {self.next}"]
        lines += [f"{INDENT}not understood: {doubt}" for doubt in self.doubts]
        lines += [] if self.stops is None else [f"{INDENT}it ends at {self.ending or f'line {self.stops}'}"]
        return [*lines, f"{INDENT}hint: {self.hint}"]


def wrapped(line: str, width: int) -> list[str]:
    """A line of a report in lines that fit; what follows is indented like the words of the first.

    >>> wrapped("WRONG   scores are not scaled", 20)
    ['WRONG   scores are', '        not scaled']
    """
    start = re.match(r" *(?:[✓?–✗] |why:  |next: |(?:[A-Z]+|mask|jail) +)?", line)
    indent = " " * max(len(INDENT), start.end() if start else 0)
    made = textwrap.wrap(
        line, max(width, 2 * len(indent)), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        drop_whitespace=True,
    )  # fmt: skip
    return made or [""]


def steps_in_words(done: list[str]) -> str:
    """Steps as ranges.

    >>> steps_in_words(["1 project", "2 split", "4 scores"])
    'steps 1 to 2 and 4 are right (project, split, scores)'
    """
    if not done:
        return "no step is complete yet"
    numbers = [int(step.partition(" ")[0]) for step in done]
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    names = ", ".join(step.partition(" ")[2] for step in done)
    return f"step {listed} is right ({names})" if len(numbers) == 1 else f"steps {listed} are right ({names})"


SHAPES: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    float: lambda value: isinstance(value, int | float),
    int | None: lambda value: value is None or type(value) is int,
    list[str]: lambda value: isinstance(value, list) and all(isinstance(part, str) for part in value),
}


def _of_shape(value: Any, fits: Callable[[Any], bool], name: str) -> Any:
    if not fits(value):
        raise ValueError(f"a report whose {name} is {str(value)[:80]!r}")
    return value


def _one_of(word: Any, known: Collection[str]) -> str:
    if not isinstance(word, str) or word not in known:
        raise ValueError(f"a report that says {str(word)[:80]!r}, which is none of {', '.join(known)}")
    return word


def _finding(data: dict[str, Any]) -> Finding:
    """A finding from plain data: its name is in the table, which has all general words."""
    name, severity = _one_of(data["name"], MISTAKES), _one_of(data["severity"], LABEL)
    detail, text = (_of_shape(data[key], SHAPES[str], key) for key in ("detail", "text"))
    line, cell, count = (
        _of_shape(data.get(key), SHAPES[int | None], key) for key in ("line", "cell", "execution_count")
    )
    return Finding(name, detail, line, text, severity, cell, count)


def _finding_lines(finding: Finding) -> list[str]:
    head = f"{LABEL[finding.severity]:<8}{finding.title}"
    lines = [head + (f": {finding.detail}" if finding.detail else "")]
    if finding.line is not None:
        lines.append(f"{INDENT}{finding.place}" + (f": {finding.text}" if finding.text else ""))
    if finding.severity == "wrong":
        lines += [f"{INDENT}why:  {finding.why}", f"{INDENT}next: {finding.hint}"]
    elif finding.severity == "fragile":
        lines.append(f"{INDENT}next: {finding.hint}")
    return lines
