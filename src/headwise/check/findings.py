"""One finding: a named mistake, where it is, and the evidence."""

from dataclasses import dataclass, field
from typing import Any

from headwise.check.mistakes import MISTAKES

ORDER = {"wrong": 0, "fragile": 1, "slow": 2, "style": 3}


@dataclass
class Finding:
    """What was found. `detail` holds the measured values; the general words are in the table of mistakes."""

    name: str
    detail: str = ""
    line: int | None = None
    text: str = ""  # the learner's line
    severity: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.severity = self.severity or MISTAKES[self.name].severity

    @property
    def title(self) -> str:
        """What is the case."""
        return MISTAKES[self.name].title

    @property
    def why(self) -> str:
        """What it does."""
        return MISTAKES[self.name].why

    @property
    def hint(self) -> str:
        """One next step."""
        return MISTAKES[self.name].hint

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name, "severity": self.severity, "title": self.title, "detail": self.detail, "line": self.line,
            "text": self.text, "why": self.why, "hint": self.hint,
        }  # fmt: skip


def ranked(findings: list[Finding]) -> list[Finding]:
    """Most serious first, each name once."""
    seen: set[tuple[str, int | None]] = set()
    kept = []
    for finding in sorted(findings, key=lambda f: ORDER[f.severity]):
        key = (finding.name, None)
        if key not in seen:
            seen.add(key)
            kept.append(finding)
    return kept
