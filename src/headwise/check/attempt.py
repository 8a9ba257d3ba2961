"""Attempts to build and call: what they share, and how one failed."""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from headwise.check.repairs import Repaired, in_a_constructor, on_purpose


@dataclass
class Failure:
    """One attempt that raised."""

    built: str
    called: str | None  # None: it failed in the constructor
    error: BaseException
    line: int | None
    repaired: Repaired = field(default_factory=Repaired)
    natural: bool = True  # nothing was passed that we had to guess, and every key of a configuration was known
    on_purpose: bool = False
    in_constructor: bool = False
    guessed: bool = False  # a mask or table of some shape had to be passed
    without: bool = False  # everything optional in meaning was None
    projected: bool = False  # the input had passed a projection: its form was right
    attended: bool = False  # it came as far as weights between tokens, with one size at most that was guessed

    def __post_init__(self) -> None:
        """Keep what the traceback tells, and not the traceback: its frames hold every tensor of the call."""
        self.on_purpose, self.in_constructor = on_purpose(self.error), in_a_constructor(self.error)
        self.error.__traceback__ = self.error.__context__ = self.error.__cause__ = None


@dataclass
class Attempt:
    """Everything that attempts share."""

    target: Any
    namespace: MutableMapping[str, Any]
    filename: str | None
    failures: list[Failure] = field(default_factory=list)
    deadline: float = 0.0
    late: Callable[[str], bool] | None = None  # defines a name by a statement of the file that was left out
    widths: list[int] = field(default_factory=list)  # inputs that linear layers of built objects expect
    shapes: list[tuple[int, int]] = field(default_factory=list)  # (heads, width) that built objects say they have
    too_long: bool = False  # a call made so many operations that smaller sizes are needed
