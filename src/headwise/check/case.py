"""One thing to judge and where it comes from."""

import inspect
import linecache
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from headwise.check.findings import Finding
from headwise.check.loading import Loaded


def _nothing(_: str) -> None:
    """No progress."""


@dataclass
class Case:
    """One thing to judge and where it comes from."""

    name: str
    target: Any
    namespace: MutableMapping[str, Any]
    loaded: Loaded | None = None
    progress: Callable[[str], None] = _nothing
    thorough: bool = True
    findings: list[Finding] = field(default_factory=list)

    @property
    def filename(self) -> str | None:
        """The file whose lines are reported."""
        if self.loaded is not None:
            return self.loaded.path
        owner = self.target if inspect.isclass(self.target) or inspect.isfunction(self.target) else type(self.target)
        for method in (owner, getattr(owner, "forward", None), getattr(owner, "__init__", None)):
            if inspect.isfunction(method):
                return method.__code__.co_filename
        return None

    def text(self, line: int | None) -> str:
        """That line of the file."""
        if self.loaded is not None:
            return self.loaded.line(line)
        return "" if line is None or self.filename is None else linecache.getline(self.filename, line).strip()
