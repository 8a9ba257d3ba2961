"""JSONL files: one document per line."""

import json
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from headwise.study.survey.documents.document import LONG, Document, LongText
from headwise.study.survey.documents.long_json import find_text, text_chunks
from headwise.study.survey.documents.sources import FileSource
from headwise.study.survey.documents.text import BOM
from headwise.study.survey.tally import Skipped

LONGEST = 2**28  # bytes of one line of JSONL
NEWLINE = ord("\n")


class LinesFile(FileSource):
    """A JSONL file, one document per line: `{"text": "..."}`. A unit is the lines that begin within `step` bytes."""

    __slots__ = ("_block", "_ends", "column")

    def __init__(self, path: Path, name: str, size: int, step: int, column: str) -> None:
        super().__init__(path, name, size, step)
        self.column = column
        self._block, self._ends = 1, array("q", [0])  # bytes of a block, and how many lines end before each

    def _sealed(self) -> str:
        ends = array("q", [0])

        def look(block: bytes) -> None:
            self._block = max(self._block, len(block))
            ends.append(ends[-1] + block.count(b"\n"))

        digest = self.file.seal(look)
        self._ends = ends
        return digest

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
        """The report about a line; lines are counted within its block only."""
        number, _ = divmod(start, self._block)
        before = self._ends[number] + self.file.count(b"\n", number * self._block, start)
        return Skipped(self.name, before + 1, reason)
