"""What a corpus is made of: sources of documents, each cut into units that any process can read in any order.

A file is sealed when the survey begins: its content is hashed, and every later read must find the same bytes.
"""

import abc
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from headwise.errors import OptionError
from headwise.study.survey.disk import SealedFile, UnreadableError, why
from headwise.study.survey.documents.document import Document, unit_count
from headwise.study.survey.tally import Skipped

LOST = "cannot be read: "  # begins the state of a file that could not be sealed


class DocumentSource(abc.ABC):
    """A file, cut into units."""

    name: str
    size: int  # bytes

    @property
    @abc.abstractmethod
    def units(self) -> int:
        """How many units there are, at least one."""

    @abc.abstractmethod
    def read(self, unit: int) -> Iterator[Document | Skipped]:
        """The documents of a unit. If it cannot be read, an `UnreadableError`."""

    def seal(self) -> str:
        """What the content is from now on, in words that change with it."""
        return ""

    def accept(self, state: str) -> None:  # noqa: B027 - most have nothing to compare
        """Take over what the first process has sealed."""

    def lost(self, unit: int, reason: str) -> Skipped:
        """The report about a unit that cannot be read."""
        return Skipped(self.name, None, reason)

    def close(self) -> None:  # noqa: B027 - most keep nothing open
        """Close the file; it can be read again."""


class MissingSource(DocumentSource):
    """Something in a folder that is not read, and why."""

    size, units = 0, 1

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        yield Skipped(self.name, None, self.reason)

    def seal(self) -> str:
        return self.reason


class TextList(DocumentSource):
    """Texts in memory; a unit is a few of them."""

    name = "texts"

    def __init__(self, texts: Sequence[str], step: int) -> None:
        self.texts, self.starts, room = texts, [0], step
        sizes = [len(text) if isinstance(text, str) else 0 for text in self.texts]
        self.size = sum(sizes)
        for i, size in enumerate(sizes):
            if room <= 0:
                self.starts.append(i)
                room = step
            room -= size

    @property
    def units(self) -> int:
        return len(self.starts)

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        stop = self.starts[unit + 1] if unit + 1 < self.units else len(self.texts)
        for i in range(self.starts[unit], stop):
            yield Document.checked(self.texts[i], partial(Skipped, self.name, i + 1))

    def seal(self) -> str:
        parts = b"\0".join(str(text).encode("utf-8", "surrogatepass") for text in self.texts)
        return hashlib.sha256(parts).hexdigest()


class FileSource(DocumentSource):
    """A file on disk; a unit is about `step` bytes of it."""

    __slots__ = ("_state", "file", "name", "step")

    def __init__(self, path: Path, name: str, size: int, step: int) -> None:
        self.file, self.name, self.step = SealedFile(path, size), name, step
        self._state: str | None = None  # as the first process has sealed it

    @property
    def size(self) -> int:  # type: ignore[override]
        return self.file.size

    @property
    def units(self) -> int:
        return unit_count(self.size, self.step)

    def seal(self) -> str:
        try:
            self._state = f"{self.size} bytes, {self._sealed()}"
        except UnreadableError as error:
            self._state = f"{LOST}{why(error)}"
        self.close()
        return self._state

    def accept(self, state: str) -> None:
        self._state = state

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        if self._state is not None and self._state.startswith(LOST):
            if unit == 0:
                yield Skipped(self.name, None, self._state)
            return
        if not self.size:
            yield Skipped(self.name, None, "empty")
            return
        if self.file.marks is None:
            self._check_seal()
        yield from self.documents(unit)

    @abc.abstractmethod
    def documents(self, unit: int) -> Iterator[Document | Skipped]:
        """The documents of a unit of the sealed file."""

    def lost(self, unit: int, reason: str) -> Skipped:
        first, last = (self.size * edge // self.units for edge in (unit, unit + 1))
        where = f"bytes {first:,} to {last:,} " if self.units > 1 else ""
        return Skipped(self.name, None, f"{where}{LOST}{reason}")

    def close(self) -> None:
        self.file.close()

    def _sealed(self) -> str:
        """The digest of the content."""
        return self.file.seal()

    def _check_seal(self) -> None:
        """Seal a file that another process has sealed before."""
        state = f"{self.size} bytes, {self._sealed()}"
        if self._state not in (None, state):
            raise OptionError(
                f"{self.file.path} has changed since the survey began. The files of a survey must not change; start it "
                f"again."
            )
