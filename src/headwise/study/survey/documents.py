"""Documents from files: plain text, JSONL and Parquet, and texts in memory.

Every file is a `DocumentSource`, cut into units that can be read independently, in any order and by any process. A file
is sealed when the survey begins: its content is hashed, and every later read must find the same bytes.
"""

import abc
import codecs
import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from headwise.errors import HeadwiseError, OptionError, need
from headwise.study.survey.disk import BLOCK, SealedFile, UnreadableError, why
from headwise.study.survey.long_json import find_text, text_chunks
from headwise.study.survey.tally import Skipped

LONG = 2**20  # bytes; a longer line or value is not held in memory as a whole
LONGEST = 2**28  # bytes of one line of JSONL
BOM = "\ufeff"
NEWLINE = ord("\n")
LOST = "cannot be read: "  # begins the state of a file that could not be sealed


class LongText(NamedTuple):
    """A text that is not in memory: its size in bytes of UTF-8, and a function that reads it from the beginning."""

    size: int
    chunks: Callable[[], Iterable[bytes]]


class Document(NamedTuple):
    """A text, or one passage of a text that is too long to read at once."""

    text: str | LongText
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

    def parts(self, step: int) -> Iterator[str]:
        """The text in passages of about `step` bytes."""
        if isinstance(self.text, LongText):
            return cut_passages(self.text.chunks(), self.text.size, step)
        return passages(self.text, step)


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


def unit_count(size: int, step: int) -> int:
    """The number of units in a file of `size` bytes."""
    return max(1, -(-size // step))


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


# Plain text ---------------------------------------------------------------------------------------------------------


class TextFile(FileSource):
    """A text file, which is one document; a unit is a passage of about `step` bytes."""

    __slots__ = ("_problem",)

    def _sealed(self) -> str:
        check = TextCheck()
        digest = self.file.seal(check.look)
        check.look(b"", final=True)
        self._problem = self._named(check)
        return digest

    def documents(self, unit: int) -> Iterator[Document | Skipped]:
        if self._problem is None:
            start, stop = (self._border(number) for number in (unit, unit + 1))
            text = self.file.read(start, stop).decode("utf-8").removeprefix(BOM)
            yield Document(text, partial(Skipped, self.name, None), unit, self.units)
        elif unit == 0:
            yield self._problem

    def _border(self, number: int) -> int:
        at, far = self.size * number // self.units, self.size // self.units // 4
        if number in (0, self.units):
            return at
        start = max(0, at - max(far, 4))
        return border(self.file.read(start, at + 1), start, at, far)

    def _named(self, check: "TextCheck") -> Skipped | None:
        """Why this is not text; the whole file is checked before any of it counts."""
        if check.null is not None:
            return Skipped(self.name, None, f"binary: a zero at byte {check.null}")
        if check.wrong is not None:
            where, reason = check.wrong
            line = 1 + self.file.count(b"\n", 0, where)
            return Skipped(self.name, line, f"not UTF-8 text: {reason} at byte {where}")
        return Skipped(self.name, None, "empty: only white space") if check.blank else None


class TextCheck:
    """Looks at a file block by block: whether it is text."""

    def __init__(self) -> None:
        self.null: int | None = None  # where the first zero is
        self.wrong: tuple[int, str] | None = None  # where it is not UTF-8, and why
        self.blank = True
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._at = 0

    def look(self, block: bytes, final: bool = False) -> None:
        """Look at the next block."""
        at, self._at = self._at, self._at + len(block)
        if self.null is None and (null := block.find(b"\0")) >= 0:
            self.null = at + null
        if self.wrong is not None:
            return
        before = len(self._decoder.getstate()[0])  # bytes of a character that began in the last block
        try:
            text = self._decoder.decode(block, final)
        except UnicodeDecodeError as error:
            self.wrong = at - before + error.start, error.reason
            return
        self.blank = self.blank and not text.strip(f"{BOM} \t\r\n")


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


def passages(text: str, step: int) -> Iterator[str]:
    """A long text in passages of about `step` bytes."""
    if len(text) * 4 <= step:
        yield text
        return
    data = text.encode("utf-8")
    yield from cut_passages([data], len(data), step)


def cut_passages(chunks: Iterable[bytes], size: int, step: int) -> Iterator[str]:
    """The same for a text of `size` bytes of UTF-8 that comes in chunks; one passage is in memory at a time."""
    count, rest = unit_count(size, step), iter(chunks)
    held, base = bytearray(), 0  # the bytes from `base` on
    for number in range(1, count):
        at, far = size * number // count, size // count // 4
        while base + len(held) <= at:
            held += next(rest)
        end = border(held, base, at, far)
        yield held[: end - base].decode("utf-8")
        del held[: end - base]
        base = end
    for chunk in rest:
        held += chunk
    yield held.decode("utf-8")


def border(held: bytes | bytearray, base: int, at: int, far: int) -> int:
    """A good place to cut at most `far` before `at`: after a line, else before a space, else between characters.

    Args:
        held: the bytes of the text from `base` on, up to and with the one at `at`.
        base: where they begin.
        at: where an even cut would be.
        far: how far away the cut may be.
    """
    place = at - base
    start = max(0, place - far)
    if (line := held.rfind(b"\n", start, place)) >= 0:
        return base + line + 1
    if (space := held.rfind(b" ", start, place)) >= 0:
        return base + space
    while held[place] & 0xC0 == 0x80:  # inside a character of several bytes
        place -= 1
    return base + place


# JSONL --------------------------------------------------------------------------------------------------------------


class LinesFile(FileSource):
    """A JSONL file, one document per line: `{"text": "..."}`. A unit is the lines that begin within `step` bytes."""

    __slots__ = ("_counted", "column")

    def __init__(self, path: Path, name: str, size: int, step: int, column: str) -> None:
        super().__init__(path, name, size, step)
        self.column = column
        self._counted = (0, 0)  # a byte where a line begins, and the number of lines before it

    def documents(self, unit: int) -> Iterator[Document | Skipped]:
        first, last = (self.size * edge // self.units for edge in (unit, unit + 1))
        for start, stop in self._lines(first, last):
            document = self._document(start, stop) if stop - start <= LONG else self._long_document(start, stop)
            if document is not None:
                yield document

    def _lines(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Start and end of every line that begins between two bytes."""
        start = 0 if first == 0 else self.file.find(NEWLINE, first - 1, last - 1) + 1
        if first and not start:
            return
        while start < last:
            stop = self.file.find(NEWLINE, start, self.size)
            stop = self.size if stop < 0 else stop
            yield start, stop
            start = stop + 1

    def _document(self, start: int, stop: int) -> Document | Skipped | None:
        """The document of a line; None if the line is blank."""
        if stop - start > LONGEST:
            return self._too_long(start, stop)
        try:
            line = self.file.read(start, stop).decode("utf-8-sig" if start == 0 else "utf-8")
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

    def _long_document(self, start: int, stop: int) -> Document | Skipped:
        """The document of a line that is not held in memory."""
        if stop - start > LONGEST:
            return self._too_long(start, stop)
        inner = start + 3 * (start == 0 and self.file.read(0, 3) == BOM.encode())
        found = find_text(self.file.read, inner, stop, self.column)
        if isinstance(found, str):
            return self._skipped(start, found)
        if found.blank:
            return self._skipped(start, "empty")
        text = LongText(found.size, lambda: text_chunks(self.file.read, found.start, stop))
        return Document(text, partial(self._skipped, start))

    def _too_long(self, start: int, stop: int) -> Skipped:
        return self._skipped(start, f"a line of {stop - start:,} bytes; the limit is {LONGEST:,}")

    def _skipped(self, start: int, reason: str) -> Skipped:
        """The report about a line. Lines are counted only now, starting from the last one that was reported."""
        at, before = self._counted if self._counted[0] <= start else (0, 0)
        before += self.file.count(b"\n", at, start)
        self._counted = (start, before)
        return Skipped(self.name, before + 1, reason)


# Parquet ------------------------------------------------------------------------------------------------------------


class RowRange(NamedTuple):
    """Some rows of a row group, counted within it, and the number of rows before the group."""

    group: int
    first: int
    last: int
    before: int


class TableFile(FileSource):
    """A Parquet file, one document a row. A unit is about `step` bytes of rows; only the text column is read."""

    __slots__ = ("_arrow", "_parquet", "_reader", "column", "problem", "ranges")

    def __init__(self, path: Path, name: str, size: int, step: int, column: str) -> None:
        super().__init__(path, name, size, step)
        self.column = column
        self._arrow = need("pyarrow", "survey", "Parquet files")
        self._parquet = need("pyarrow.parquet", "survey", "Parquet files")
        self._reader: RowReader | None = None
        try:
            self.ranges, self.problem = self._planned()
        except UnreadableError as error:
            self.ranges, self.problem = [], f"{LOST}{why(error)}"
        self.close()

    @property
    def units(self) -> int:
        return max(1, len(self.ranges))  # without ranges, one unit says why

    def seal(self) -> str:
        if self.problem is not None and self.problem.startswith(LOST):
            self._state = self.problem
            return self.problem
        return super().seal()

    def documents(self, unit: int) -> Iterator[Document | Skipped]:
        if self.problem is not None:
            yield Skipped(self.name, None, self.problem)
            return
        part = self.ranges[unit]
        row = part.before + part.first + 1
        try:
            if self._reader is None:
                self._reader = RowReader(self._open(), self.column)
            values = self._reader.take(part)[::-1]
        except HeadwiseError:
            self.close()
            raise
        except (self._arrow.ArrowException, OSError) as error:
            self.close()
            rows = part.last - part.first
            yield Skipped(self.name, row, f"{rows} rows from here {LOST}{_brief(error)}", rows)
            return
        while values:  # a value is freed before the model reads its text
            yield from self._document(values, partial(Skipped, self.name, row))
            row += 1

    def lost(self, unit: int, reason: str) -> Skipped:
        if not self.ranges:
            return Skipped(self.name, None, f"{LOST}{reason}")
        part = self.ranges[unit]
        rows = part.last - part.first
        return Skipped(self.name, part.before + part.first + 1, f"{rows} rows from here {LOST}{reason}", rows)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.file.close()
            self._reader = None
        super().close()

    def _sealed(self) -> str:
        digest = self.file.seal()
        if self._planned() != (self.ranges, self.problem):
            raise OptionError(f"{self.file.path} has changed since the survey began; start it again.")
        return digest

    def _document(self, values: list[Any], skipped: Callable[[str], Skipped]) -> Iterator[Document | Skipped]:
        """The document of the last value, which is removed from the list."""
        value = getattr(values[-1], "value", values[-1])  # the value of a dictionary's entry
        buffer = value.as_buffer() if value is not None and value.is_valid else None
        if buffer is not None and buffer.size > LONG:
            del value
            values.pop()
            with tempfile.TemporaryFile() as copy:
                problem = _copy_text(memoryview(buffer), copy)
                size = buffer.size
                del buffer
                self._arrow.default_memory_pool().release_unused()
                text = LongText(size, partial(_blocks, copy))
                yield Document(text, skipped) if problem is None else skipped(problem)
            return
        try:
            yield Document.checked(values.pop().as_py(), skipped)
        except UnicodeDecodeError as error:
            yield skipped(f"not UTF-8 text: {error.reason}")

    def _open(self) -> Any:
        """The file for pyarrow, which reads it through the sealed file and only as far as it needs."""
        source = self._arrow.PythonFile(ReadAdapter(self.file), mode="r")
        return self._parquet.ParquetFile(source, pre_buffer=False, buffer_size=BLOCK)

    def _planned(self) -> tuple[list[RowRange], str | None]:
        """Which rows make a unit, from the file's metadata; or the problem with the file."""
        try:
            with self._open() as file:
                problem = self._problem_of(file)
                return ([], problem) if problem is not None else (self._ranges_of(file.metadata), None)
        except UnreadableError:
            raise
        except (self._arrow.ArrowException, OSError) as error:
            return [], f"cannot be read as Parquet: {_brief(error)}"

    def _problem_of(self, file: Any) -> str | None:
        schema = file.schema_arrow
        if self.column not in schema.names:
            return f"no column {self.column!r} (found: {', '.join(schema.names[:5])}); choose one with --column"
        if not _is_text(self._arrow.types, schema.field(self.column).type):
            return f"column {self.column!r} is not text but {schema.field(self.column).type}"
        return None if file.metadata.num_rows else "empty: no rows"

    def _ranges_of(self, about: Any) -> list[RowRange]:
        names = [about.schema.column(i).path for i in range(about.num_columns)]
        place, before, ranges = names.index(self.column), 0, []
        for number in range(about.num_row_groups):
            group = about.row_group(number)
            units = min(unit_count(group.column(place).total_uncompressed_size, self.step), max(1, group.num_rows))
            edges = [group.num_rows * k // units for k in range(units + 1)]
            ranges += [RowRange(number, a, b, before) for a, b in pairwise(edges) if b > a]
            before += group.num_rows
        return ranges


class ReadAdapter(io.RawIOBase):
    """A sealed file as the file object that pyarrow expects."""

    def __init__(self, file: SealedFile) -> None:
        self.file, self.at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.file.size}[whence]
        return self.at

    def read(self, size: int = -1) -> bytes:
        stop = self.file.size if size < 0 else self.at + size
        found = self.file.read(self.at, stop)
        self.at += len(found)
        return found


class RowReader:
    """Reads forward through the rows of a file, with at most one batch of them in memory."""

    def __init__(self, file: Any, column: str) -> None:
        self.file, self.column = file, column
        self.rest: Any = ()  # of the last batch read
        self.batches: Iterator[Any] = iter(())
        self._begin(-1, 0)

    def take(self, part: RowRange) -> list[Any]:
        """The values of some rows."""
        if part.group != self.group or part.first < self.at:
            self._begin(part.group, part.last - part.first)
        found: list[Any] = []
        while self.at < part.last:
            if not len(self.rest):
                self.rest = next(self.batches).column(0)
            skip = max(0, min(part.first - self.at, len(self.rest)))
            keep = min(part.last - self.at, len(self.rest))
            found.extend(self.rest[skip:keep])
            self.at += keep
            self.rest = self.rest[keep:] if keep < len(self.rest) else ()
        if self.at >= self.file.metadata.row_group(part.group).num_rows:
            self._begin(-1, 0)  # frees what pyarrow holds of the row group
        return found

    def _begin(self, group: int, size: int) -> None:
        self.group, self.at, self.rest = group, 0, ()
        self.batches = iter(())
        if group >= 0:
            self.batches = self.file.iter_batches(size, row_groups=[group], columns=[self.column], use_threads=False)


def _copy_text(data: memoryview, copy: IO[bytes]) -> str | None:
    """Copy a text to a temporary file, block by block; or say why it is not text."""
    check = TextCheck()
    for at in range(0, len(data), BLOCK):
        block = bytes(data[at : at + BLOCK])
        check.look(block)
        copy.write(block)
    check.look(b"", final=True)
    if check.wrong is not None:
        return f"not UTF-8 text: {check.wrong[1]} at byte {check.wrong[0]}"
    return "empty" if check.blank else None


def _blocks(copy: IO[bytes]) -> Iterator[bytes]:
    copy.seek(0)
    while block := copy.read(BLOCK):
        yield block


def _is_text(types: Any, kind: Any) -> bool:
    """Whether a column of this Arrow type holds text."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _brief(error: BaseException) -> str:
    """The first line of another library's error."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
