"""A text on its way to the model, and how a long one is cut into passages."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from headwise.study.survey.tally import Skipped

LONG = 2**20  # bytes; a longer line or value is not held in memory as a whole


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


def unit_count(size: int, step: int) -> int:
    """The number of units in a file of `size` bytes."""
    return max(1, -(-size // step))
