"""Parquet files: one document per row."""

import io
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from headwise.errors import HeadwiseError, OptionError, need
from headwise.study.survey.disk import BLOCK, SealedFile, UnreadableError, why
from headwise.study.survey.documents.document import LONG, Document, LongText, unit_count
from headwise.study.survey.documents.sources import LOST, FileSource
from headwise.study.survey.documents.text import TextCheck
from headwise.study.survey.tally import Skipped


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
