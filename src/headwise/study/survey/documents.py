"""Documents from files: plain text, JSONL and Parquet, and texts in memory.

Every file is a `DocumentSource`, cut into units that can be read independently, in any order and by any process.
"""

import abc
import codecs
import dataclasses
import json
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import OptionError, need
from headwise.study.survey.tally import Skipped

BLOCK = 2**20  # bytes decoded at a time
LONGEST = 2**28  # bytes of one line of JSONL
BOM = "\ufeff"


class Document(NamedTuple):
    """A text, or one passage of a text that is too long to read at once."""

    text: str
    skipped: Callable[[str], Skipped]  # makes the report if the document is skipped, from the reason
    number: int = 0  # of the passage in its document
    passages: int = 1

    @classmethod
    def checked(cls, text: object, skipped: Callable[[str], Skipped]) -> "Document | Skipped":
        """The text of a line or a row as a document, or why it is not one."""
        if not isinstance(text, str):
            return skipped(f"not text but {'null' if text is None else type(text).__name__}")
        if not text.strip():
            return skipped("empty")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return skipped(f"half a character (a lone surrogate) at character {error.start}")
        return cls(text, skipped)


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
        """The documents of a unit; if the file cannot be read, the first unit says why."""

    def close(self) -> None:  # noqa: B027 - most keep nothing open
        """Close the file; it can be read again."""


def unit_count(size: int, step: int) -> int:
    """The number of units in a file of `size` bytes."""
    return max(1, -(-size // step))


@dataclasses.dataclass(eq=False, slots=True)
class MappedFile(DocumentSource):
    """A memory-mapped file; a unit is about `step` bytes of it."""

    path: Path
    name: str
    size: int
    step: int

    @property
    def units(self) -> int:
        return unit_count(self.size, self.step)

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        if not self.size:
            yield Skipped(self.name, None, "empty")
            return
        try:
            with mapped(self.path, self.size) as data:
                yield from self.documents(data, unit)
        except OSError as error:
            if unit == 0:
                yield Skipped(self.name, None, f"cannot be read: {error.strerror}")

    def documents(self, data: mmap.mmap, unit: int) -> Iterator[Document | Skipped]:
        """The documents of a unit, given the bytes of the file."""
        raise NotImplementedError


@contextmanager
def mapped(path: Path, size: int) -> Iterator[mmap.mmap]:
    """The bytes of a file, read from disk as they are used."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if len(data) != size:
            raise OptionError(
                f"{path} had {size:,} bytes when the survey began and has {len(data):,} now. The files of a survey "
                f"must not change; start it again."
            )
        yield data


def count_lines(data: mmap.mmap, start: int, stop: int) -> int:
    """How many lines end between two bytes."""
    return sum(data[at : min(at + BLOCK, stop)].count(b"\n") for at in range(start, stop, BLOCK))


# Plain text ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class TextFile(MappedFile):
    """A text file, which is one document; a unit is a passage of about `step` bytes."""

    _problem: Skipped | None = None
    _checked: bool = False

    def documents(self, data: mmap.mmap, unit: int) -> Iterator[Document | Skipped]:
        if not self._checked:
            self._problem, self._checked = self._check(data), True
        if self._problem is None:
            start, stop = passage(data, unit, self.units)
            text = data[start:stop].decode("utf-8").removeprefix(BOM)
            yield Document(text, partial(Skipped, self.name, None), unit, self.units)
        elif unit == 0:
            yield self._problem

    def _check(self, data: mmap.mmap) -> Skipped | None:
        """Why this is not text; the whole file is checked before any of it counts."""
        null = data.find(b"\0")
        if null >= 0:
            return Skipped(self.name, None, f"binary: a zero at byte {null}")
        decoder = codecs.getincrementaldecoder("utf-8")()
        blank = True
        for at in range(0, len(data), BLOCK):
            block = data[at : at + BLOCK]
            before = len(decoder.getstate()[0])  # bytes of a character that began in the last block
            try:
                text = decoder.decode(block, final=at + BLOCK >= len(data))
            except UnicodeDecodeError as error:
                where = at - before + error.start
                line = 1 + count_lines(data, 0, where)
                return Skipped(self.name, line, f"not UTF-8 text: {error.reason} at byte {where}")
            blank = blank and not text.strip(f"{BOM} \t\r\n")
        return Skipped(self.name, None, "empty: only white space") if blank else None


@dataclasses.dataclass(eq=False)
class TextList(DocumentSource):
    """Texts in memory; a unit is a few of them."""

    texts: Sequence[str]
    step: int
    name: str = "texts"

    def __post_init__(self) -> None:
        sizes = [len(text) if isinstance(text, str) else 0 for text in self.texts]
        self.size = sum(sizes)
        self.starts, room = [0], self.step
        for i, size in enumerate(sizes):
            if room <= 0:
                self.starts.append(i)
                room = self.step
            room -= size

    @property
    def units(self) -> int:
        return len(self.starts)

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        stop = self.starts[unit + 1] if unit + 1 < self.units else len(self.texts)
        for i in range(self.starts[unit], stop):
            yield Document.checked(self.texts[i], partial(Skipped, self.name, i + 1))


def passages(text: str, step: int) -> Iterator[str]:
    """A long text in passages of about `step` bytes."""
    if len(text) * 4 <= step:
        yield text
        return
    data = text.encode("utf-8")
    count = unit_count(len(data), step)
    for number in range(count):
        start, stop = passage(data, number, count)
        yield data[start:stop].decode("utf-8")


def passage(data: mmap.mmap | bytes, number: int, count: int) -> tuple[int, int]:
    """Where one of `count` passages of about equal length begins and ends."""
    return _border(data, number, count), _border(data, number + 1, count)


def _border(data: mmap.mmap | bytes, number: int, count: int) -> int:
    """A good place to cut near the even one: after a line, else before a space, else between characters."""
    at, far = len(data) * number // count, len(data) // count // 4
    if number in (0, count):
        return at
    if (line := data.rfind(b"\n", at - far, at)) >= 0:
        return line + 1
    if (space := data.rfind(b" ", at - far, at)) >= 0:
        return space
    while data[at] & 0xC0 == 0x80:  # inside a character of several bytes
        at -= 1
    return at


# JSONL --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class LinesFile(MappedFile):
    """A JSONL file, one document per line: `{"text": "..."}`. A unit is the lines that begin within `step` bytes."""

    column: str
    _counted: tuple[int, int] = (0, 0)  # a byte where a line begins, and the number of lines before it

    def documents(self, data: mmap.mmap, unit: int) -> Iterator[Document | Skipped]:
        first, last = (self.size * edge // self.units for edge in (unit, unit + 1))
        for start, stop in _lines(data, first, last):
            if (document := self._document(data, start, stop)) is not None:
                yield document

    def _document(self, data: mmap.mmap, start: int, stop: int) -> Document | Skipped | None:
        """The document of a line; None if the line is blank."""
        if stop - start > LONGEST:
            return self._skipped(start, f"a line of {stop - start:,} bytes; the limit is {LONGEST:,}")
        try:
            line = data[start:stop].decode("utf-8-sig" if start == 0 else "utf-8")
            if not line.strip():
                return None
            record = json.loads(line)
        except UnicodeDecodeError as error:
            return self._skipped(start, f"not UTF-8 text: {error.reason} at byte {start + error.start}")
        except json.JSONDecodeError as error:
            return self._skipped(start, f"not JSON: {error.msg} at character {error.pos}")
        except (ValueError, RecursionError) as error:
            return self._skipped(start, f"not readable JSON: {error}")
        if not isinstance(record, dict):
            return self._skipped(start, f"not a JSON object but a {type(record).__name__}")
        if self.column not in record:
            there = ", ".join(map(repr, list(record)[:5])) or "none"
            return self._skipped(start, f"no field {self.column!r} (found: {there}); choose one with --column")
        return Document.checked(record[self.column], partial(self._skipped, start))

    def _skipped(self, start: int, reason: str) -> Skipped:
        """The report about a line. Lines are counted only now, starting from the last one that was reported."""
        at, before = self._counted if self._counted[0] <= start else (0, 0)
        with mapped(self.path, self.size) as data:
            before += count_lines(data, at, start)
        self._counted = (start, before)
        return Skipped(self.name, before + 1, reason)


def _lines(data: mmap.mmap, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Start and end of every line that begins between two bytes."""
    start = 0 if first == 0 else data.find(b"\n", first - 1, last - 1) + 1
    if first and not start:
        return
    while start < last:
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        yield start, stop
        start = stop + 1


# Parquet ------------------------------------------------------------------------------------------------------------


class RowRange(NamedTuple):
    """Some rows of a row group, counted within it, and the number of rows before the group."""

    group: int
    first: int
    last: int
    before: int


class TableFile(DocumentSource):
    """A Parquet file, one document a row. A unit is about `step` bytes of rows; only the text column is read."""

    def __init__(self, path: Path, name: str, size: int, step: int, column: str) -> None:
        self.path, self.name, self.size, self.column = path, name, size, column
        self._arrow = need("pyarrow", "survey", "Parquet files")
        self._parquet = need("pyarrow.parquet", "survey", "Parquet files")
        self.ranges: list[RowRange] = []
        self.problem: str | None = None
        try:
            self._plan(step)
        except (self._arrow.ArrowException, OSError) as error:
            self.problem = f"cannot be read as Parquet: {_brief(error)}"
        self._reader: RowReader | None = None

    @property
    def units(self) -> int:
        return max(1, len(self.ranges))  # without ranges, one unit says why

    def read(self, unit: int) -> Iterator[Document | Skipped]:
        if self.problem is not None:
            yield Skipped(self.name, None, self.problem)
            return
        part = self.ranges[unit]
        row = part.before + part.first + 1
        try:
            if self._reader is None:
                self._reader = RowReader(self._parquet.ParquetFile(self.path), self.column)
            values = self._reader.take(part)
        except (self._arrow.ArrowException, OSError) as error:
            self.close()
            rows = part.last - part.first
            yield Skipped(self.name, row, f"{rows} rows from here cannot be read: {_brief(error)}", rows)
            return
        for number, value in enumerate(values, row):
            try:
                yield Document.checked(value.as_py(), partial(Skipped, self.name, number))
            except UnicodeDecodeError as error:
                yield Skipped(self.name, number, f"not UTF-8 text: {error.reason}")

    def close(self) -> None:
        if self._reader is not None:
            self._reader.file.close()
            self._reader = None

    def _plan(self, step: int) -> None:
        """Decide which rows make a unit, from the file's metadata."""
        with self._parquet.ParquetFile(self.path) as file:
            schema, about = file.schema_arrow, file.metadata
            if self.column not in schema.names:
                there = ", ".join(schema.names[:5])
                self.problem = f"no column {self.column!r} (found: {there}); choose one with --column"
            elif not _is_text(self._arrow.types, schema.field(self.column).type):
                self.problem = f"column {self.column!r} is not text but {schema.field(self.column).type}"
            elif not about.num_rows:
                self.problem = "empty: no rows"
            if self.problem is not None:
                return
            names = [about.schema.column(i).path for i in range(about.num_columns)]
            place, before = names.index(self.column), 0
            for number in range(about.num_row_groups):
                group = about.row_group(number)
                units = min(unit_count(group.column(place).total_uncompressed_size, step), max(1, group.num_rows))
                edges = [group.num_rows * k // units for k in range(units + 1)]
                self.ranges += [RowRange(number, a, b, before) for a, b in pairwise(edges) if b > a]
                before += group.num_rows


class RowReader:
    """Reads forward through the rows of a file, with at most one batch of them in memory."""

    def __init__(self, file: Any, column: str) -> None:
        self.file, self.column = file, column
        self.group, self.at = -1, 0
        self.batches: Iterator[Any] = iter(())
        self.rest: Any = ()  # of the last batch read

    def take(self, part: RowRange) -> list[Any]:
        """The values of some rows."""
        if part.group != self.group or part.first < self.at:
            size = part.last - part.first
            self.batches = self.file.iter_batches(size, row_groups=[part.group], columns=[self.column])
            self.group, self.at, self.rest = part.group, 0, ()
        found: list[Any] = []
        while self.at < part.last:
            if not len(self.rest):
                self.rest = next(self.batches).column(0)
            skip = max(0, min(part.first - self.at, len(self.rest)))
            keep = min(part.last - self.at, len(self.rest))
            found.extend(self.rest[skip:keep])
            self.at += keep
            self.rest = self.rest[keep:]
        return found


def _is_text(types: Any, kind: Any) -> bool:
    """Whether a column of this Arrow type holds text."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _brief(error: BaseException) -> str:
    """The first line of another library's error."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
