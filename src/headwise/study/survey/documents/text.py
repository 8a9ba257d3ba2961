"""Text files, and the check that a file is text."""

import codecs
from collections.abc import Iterator
from functools import partial

from headwise.study.survey.documents.document import Document, border
from headwise.study.survey.documents.sources import FileSource
from headwise.study.survey.tally import Skipped

BOM = "\ufeff"


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
