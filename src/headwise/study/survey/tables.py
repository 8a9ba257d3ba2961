"""Parquet: one document a row, in a column of text."""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from headwise.errors import need
from headwise.study.survey.documents import Bad, Document, unit_count
from headwise.study.survey.texts import checked


class Part(NamedTuple):
    """Some rows of a row group, counted within it, and how many rows are before the group."""

    group: int
    first: int
    last: int
    before: int


class TableFile:
    """A Parquet file. A unit is about `step` bytes of rows; only its column of text is read, batch by batch."""

    def __init__(self, path: Path, name: str, size: int, step: int, column: str) -> None:
        self.path, self.name, self.size, self.column = path, name, size, column
        self._arrow = need("pyarrow", "survey", "Parquet files")
        self._parquet = need("pyarrow.parquet", "survey", "Parquet files")
        self.parts: list[Part] = []
        self.problem: str | None = None
        try:
            self._plan(step)
        except (self._arrow.ArrowException, OSError) as error:
            self.problem = f"cannot be read as Parquet: {brief(error)}"
        self._reader: Rows | None = None

    @property
    def units(self) -> int:
        """Groups of rows; one that tells why, where there are none."""
        return max(1, len(self.parts))

    def read(self, unit: int) -> Iterator[Document | Bad]:
        """The documents of some rows."""
        if self.problem is not None:
            yield Bad(self.name, None, self.problem)
            return
        part = self.parts[unit]
        row = part.before + part.first + 1
        try:
            if self._reader is None:
                self._reader = Rows(self._parquet.ParquetFile(self.path), self.column)
            values = self._reader.take(part)
        except (self._arrow.ArrowException, OSError) as error:
            self.close()
            rows = part.last - part.first
            yield Bad(self.name, row, f"{rows} rows from here cannot be read: {brief(error)}", rows)
            return
        for number, value in enumerate(values, row):
            try:
                yield checked(value.as_py(), partial(Bad, self.name, number))
            except UnicodeDecodeError as error:
                yield Bad(self.name, number, f"no text in UTF-8: {error.reason}")

    def close(self) -> None:
        """Let the file go."""
        if self._reader is not None:
            self._reader.file.close()
            self._reader = None

    def _plan(self, step: int) -> None:
        """Which rows make a unit, from what the file says of itself."""
        with self._parquet.ParquetFile(self.path) as file:
            schema, about = file.schema_arrow, file.metadata
            if self.column not in schema.names:
                self.problem = f"no column {self.column!r} ({', '.join(schema.names[:5])}); --column names another"
            elif not is_text(self._arrow.types, schema.field(self.column).type):
                self.problem = f"column {self.column!r} is no text but {schema.field(self.column).type}"
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
                self.parts += [Part(number, a, b, before) for a, b in pairwise(edges) if b > a]
                before += group.num_rows


class Rows:
    """Walks forward through the rows of a file, so that no more than a batch of them is in memory."""

    def __init__(self, file: Any, column: str) -> None:
        self.file, self.column = file, column
        self.group, self.at = -1, 0
        self.batches: Iterator[Any] = iter(())
        self.rest: Any = ()  # of the batch that was read last

    def take(self, part: Part) -> list[Any]:
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


def is_text(types: Any, kind: Any) -> bool:
    """Whether a column of this type holds text."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def brief(error: BaseException) -> str:
    """The first line of what another library says."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
