"""What a survey reads: documents, and what could not be read."""

import dataclasses
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from headwise.errors import OptionError


class Bad(NamedTuple):
    """What was skipped: where, and why. `line` counts from 1: the line of a text, the row of a table."""

    file: str
    line: int | None
    reason: str
    documents: int = 1  # how many were lost

    @property
    def place(self) -> str:
        """Such as "corpus.jsonl:17"."""
        return self.file if self.line is None else f"{self.file}:{self.line}"


class Document(NamedTuple):
    """A text, or a passage of one that is too long to be read at once."""

    text: str
    refused: Callable[[str], Bad]  # a reason, with the place of the document
    number: int = 0  # of the passage in its document
    passages: int = 1


class Source(Protocol):
    """A file, cut into units that are read apart from each other, in any order and by any process."""

    name: str
    size: int  # bytes

    @property
    def units(self) -> int:
        """How many there are."""

    def read(self, unit: int) -> Iterator[Document | Bad]:
        """The documents of a unit."""

    def close(self) -> None:
        """Forget what was kept open; the source can be read again."""


def unit_count(size: int, step: int) -> int:
    """How many units a file of so many bytes makes."""
    return max(1, -(-size // step))


@dataclasses.dataclass(eq=False, slots=True)
class MappedFile:
    """A file that is looked at where it lies. A unit is about `step` bytes of it; see `Source`."""

    path: Path
    name: str
    size: int
    step: int

    @property
    def units(self) -> int:
        """How many steps there are, one at least."""
        return unit_count(self.size, self.step)

    def read(self, unit: int) -> Iterator[Document | Bad]:
        """The documents of a unit; of a file that cannot be read, the first says why."""
        if not self.size:
            yield Bad(self.name, None, "empty")
            return
        try:
            with mapped(self.path, self.size) as data:
                yield from self.found(data, unit)
        except OSError as error:
            if unit == 0:
                yield Bad(self.name, None, f"cannot be read: {error.strerror}")

    def found(self, data: mmap.mmap, unit: int) -> Iterator[Document | Bad]:
        """The documents of a unit, among the bytes of the file."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is kept open."""


@contextmanager
def mapped(path: Path, size: int) -> Iterator[mmap.mmap]:
    """The bytes of a file, which are read from the disk as they are looked at."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if len(data) != size:
            raise OptionError(
                f"{path} had {size:,} bytes when the survey began and has {len(data):,} now. A survey needs files that "
                f"stay as they are; start it again."
            )
        yield data


def count_lines(data: mmap.mmap, start: int, stop: int) -> int:
    """How many lines end between two bytes."""
    block = 2**20
    return sum(data[at : min(at + block, stop)].count(b"\n") for at in range(start, stop, block))
