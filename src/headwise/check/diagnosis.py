"""What is wrong, what is special and what was not understood about one class."""

from dataclasses import dataclass, field

from headwise.check.bound import Bound
from headwise.check.findings import Finding
from headwise.check.names import constructor_role


@dataclass
class Diagnosis:
    """What is wrong, what is special, and what could not be explained."""

    findings: list[Finding] = field(default_factory=list)
    variants: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)  # stages that were not understood; any of them forbids "right"
    good: list[str] = field(default_factory=list)
    visible: str = "full"

    def wrong(self, name: str, detail: str = "", line: int | None = None) -> None:
        """Add a finding."""
        self.findings.append(Finding(name, detail, line))


def asked_heads(bound: Bound) -> int | None:
    """The number of heads the constructor was given."""
    given = [v for k, v in bound.built.arguments.items() if constructor_role(k) == "heads" and type(v) is int]
    if not given and bound.built.config is not None:
        given = [bound.sizes.H]
    return given[0] if given else None


def listed(words: list[str]) -> str:
    """`query, key and value`"""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
