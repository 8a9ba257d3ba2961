"""JSONL: one document a line, `{"text": "..."}`."""

import dataclasses
import json
import mmap
from collections.abc import Iterator
from functools import partial

from headwise.study.survey.documents import Bad, Document, MappedFile, count_lines, mapped
from headwise.study.survey.texts import checked

LONGEST = 2**28  # bytes of one line


@dataclasses.dataclass(eq=False, slots=True)
class LinesFile(MappedFile):
    """A file of lines. A unit is the lines that begin within about `step` bytes: nothing before it need be read."""

    column: str
    _counted: tuple[int, int] = (0, 0)  # a byte where a line begins, and how many lines are before it

    def found(self, data: mmap.mmap, unit: int) -> Iterator[Document | Bad]:
        """The documents of the lines that begin in a span."""
        first, last = (self.size * edge // self.units for edge in (unit, unit + 1))
        for start, stop in beginnings(data, first, last):
            document = self._line(data, start, stop)
            if document is not None:
                yield document

    def _line(self, data: mmap.mmap, start: int, stop: int) -> Document | Bad | None:
        """The document of a line; None for a blank one, which is none."""
        if stop - start > LONGEST:
            return self._bad(start, f"a line of {stop - start:,} bytes; {LONGEST:,} are the most")
        try:
            line = data[start:stop].decode("utf-8-sig" if start == 0 else "utf-8")
            if not line.strip():
                return None
            record = json.loads(line)
        except UnicodeDecodeError as error:
            return self._bad(start, f"no text in UTF-8: {error.reason} at byte {start + error.start}")
        except json.JSONDecodeError as error:
            return self._bad(start, f"no JSON: {error.msg} at character {error.pos}")
        except (ValueError, RecursionError) as error:
            return self._bad(start, f"no JSON that can be read: {error}")
        if not isinstance(record, dict):
            return self._bad(start, f"no JSON object but {type(record).__name__}")
        if self.column not in record:
            there = ", ".join(map(repr, list(record)[:5])) or "none"
            return self._bad(start, f"no {self.column!r} among its fields ({there}); --column names another")
        return checked(record[self.column], partial(self._bad, start))

    def _bad(self, start: int, reason: str) -> Bad:
        """What was wrong, with the number of the line: lines are counted only now, from the last that was asked for."""
        at, before = self._counted if self._counted[0] <= start else (0, 0)
        with mapped(self.path, self.size) as data:
            before += count_lines(data, at, start)
        self._counted = (start, before)
        return Bad(self.name, before + 1, reason)


def beginnings(data: mmap.mmap, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Start and end of every line that begins in a span of bytes."""
    start = 0 if first == 0 else data.find(b"\n", first - 1, last - 1) + 1
    if first and not start:
        return
    while start < last:
        stop = data.find(b"\n", start)
        stop = len(data) if stop < 0 else stop
        yield start, stop
        start = stop + 1
