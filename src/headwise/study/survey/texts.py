"""Text files: one document each, read in passages."""

import codecs
import dataclasses
import mmap
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from headwise.study.survey.documents import Bad, Document, MappedFile, count_lines, unit_count

BLOCK = 2**20  # bytes looked at together
BOM = "\ufeff"


@dataclasses.dataclass(eq=False, slots=True)
class TextFile(MappedFile):
    """A file of text. A unit is a passage of about `step` bytes."""

    _problem: Bad | None = None
    _judged: bool = False

    def found(self, data: mmap.mmap, unit: int) -> Iterator[Document | Bad]:
        """A passage; of a file that is no text, the first unit says why."""
        if not self._judged:
            self._problem, self._judged = self._judge(data), True
        if self._problem is None:
            start, stop = passage(data, unit, self.units)
            text = data[start:stop].decode("utf-8").removeprefix(BOM)
            yield Document(text, partial(Bad, self.name, None), unit, self.units)
        elif unit == 0:
            yield self._problem

    def _judge(self, data: mmap.mmap) -> Bad | None:
        """Why this is no text: the whole of it is looked at before any of it counts."""
        null = data.find(b"\0")
        if null >= 0:
            return Bad(self.name, None, f"binary: a zero at byte {null}")
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
                return Bad(self.name, line, f"no text in UTF-8: {error.reason} at byte {where}")
            blank = blank and not text.strip(f"{BOM} \t\r\n")
        return Bad(self.name, None, "empty: nothing but white space") if blank else None


@dataclasses.dataclass(eq=False)
class TextList:
    """Texts that are in memory, a few to a unit."""

    texts: Sequence[str]
    step: int
    name: str = "texts"

    def __post_init__(self) -> None:
        self.size = sum(len(text) for text in self.texts if isinstance(text, str))
        self.starts, room = [0], self.step
        for i, text in enumerate(self.texts):
            if room <= 0:
                self.starts.append(i)
                room = self.step
            room -= len(text) if isinstance(text, str) else 0

    @property
    def units(self) -> int:
        """Groups of texts."""
        return len(self.starts)

    def read(self, unit: int) -> Iterator[Document | Bad]:
        """The texts of a group."""
        stop = self.starts[unit + 1] if unit + 1 < self.units else len(self.texts)
        for i in range(self.starts[unit], stop):
            yield checked(self.texts[i], partial(Bad, self.name, i + 1))

    def close(self) -> None:
        """Nothing is open."""


def checked(text: object, refused: Callable[[str], Bad]) -> Document | Bad:
    """What a line or a row holds as a document, if it is one."""
    if not isinstance(text, str):
        return refused(f"no text but {'nothing' if text is None else type(text).__name__}")
    if not text.strip():
        return refused("empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return refused(f"half a character, a lone surrogate, at character {error.start}")
    return Document(text, refused)


def passage(data: mmap.mmap | bytes, number: int, count: int) -> tuple[int, int]:
    """Where one of `count` passages of about equal length begins and ends."""
    return _border(data, number, count), _border(data, number + 1, count)


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


def _border(data: mmap.mmap | bytes, number: int, count: int) -> int:
    """A place near the even cut where a text can be parted: after a line, else before a space, else between letters."""
    at, far = len(data) * number // count, len(data) // count // 4
    if number in (0, count):
        return at
    line = data.rfind(b"\n", at - far, at)
    if line >= 0:
        return line + 1
    space = data.rfind(b" ", at - far, at)
    if space >= 0:
        return space
    while data[at] & 0xC0 == 0x80:  # inside a character of several bytes
        at -= 1
    return at
