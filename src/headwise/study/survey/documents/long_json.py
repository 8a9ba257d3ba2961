"""The text in one field of a JSON object that is too long for memory, such as a whole book on one line of JSONL.

`json` needs the line, its characters and the result at the same time. Here the object is read twice, a block at a time:
`find_text` checks all of it and says where the text is, and `text_chunks` decodes the text.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

DEEPEST = 500  # nested lists and objects
LONGEST_WORD = 8192  # bytes of a number, or of a name that is kept
LOOKAHEAD = 16  # bytes that one character and its escape sequence fit in

# Complete characters of a string: plain, in UTF-8, or escaped. Half a surrogate pair is not a character.
CHARACTERS = re.compile(
    rb"""(?: [\x20\x21\x23-\x5b\x5d-\x7f]++
    | [\xc2-\xdf][\x80-\xbf] | \xe0[\xa0-\xbf][\x80-\xbf] | [\xe1-\xec\xee\xef][\x80-\xbf]{2}
    | \xed[\x80-\x9f][\x80-\xbf] | \xf0[\x90-\xbf][\x80-\xbf]{2} | [\xf1-\xf3][\x80-\xbf]{3}
    | \xf4[\x80-\x8f][\x80-\xbf]{2}
    | \\["\\/bfnrt] | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
    | \\u(?:[0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}) )*+""",
    re.VERBOSE,
)
WORD = re.compile(rb"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|NaN|-?Infinity")
SPACE = re.compile(rb"[ \t\r\n]*")
KINDS = {ord("{"): "dict", ord("["): "list", ord("t"): "bool", ord("f"): "bool", ord("n"): "null"}
QUOTE, COMMA, COLON, OPEN, CLOSE = b'",:{}'

Read = Callable[[int, int], bytes]


class TextPlace(NamedTuple):
    """Where the text is: after the opening quotation mark; and its size in bytes of UTF-8."""

    start: int
    size: int
    blank: bool


def find_text(read: Read, start: int, stop: int, field: str) -> TextPlace | str:
    """Where the text of a field is, or the reason why there is none. The whole object is checked."""
    try:
        return _Scanner(read, start, stop).object_text(field)
    except ValueError as error:
        return f"not JSON: {error}"


def text_chunks(read: Read, start: int, stop: int) -> Iterator[bytes]:
    """The text that begins at `start`, as UTF-8."""
    return _Scanner(read, start, stop).string()


class _Scanner:
    """Reads forward through the bytes between two places of a file."""

    def __init__(self, read: Read, start: int, stop: int, block: int = 2**16) -> None:
        self.read, self.next, self.stop, self.block = read, start, stop, block
        self.held, self.at = b"", 0  # bytes in memory, and the place in them

    @property
    def place(self) -> int:
        return self.next - len(self.held) + self.at

    def fill(self, enough: int) -> None:
        """Hold at least this many bytes from here on, or all that there are."""
        if len(self.held) - self.at >= enough or self.next >= self.stop:
            return
        end = min(self.stop, self.next + max(self.block, enough))
        self.held, self.at = self.held[self.at :] + self.read(self.next, end), 0
        self.next = end

    def peek(self) -> int:
        """The next byte that is not white space, or -1."""
        while True:
            self.fill(1)
            self.at = SPACE.match(self.held, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.held) or self.next >= self.stop:
                return self.held[self.at] if self.at < len(self.held) else -1

    def expect(self, byte: int) -> None:
        if self.peek() != byte:
            raise ValueError(f"expected {chr(byte)} at byte {self.place}")
        self.at += 1

    def string(self) -> Iterator[bytes]:
        """A string after its opening quotation mark, decoded, in chunks of UTF-8."""
        while True:
            self.fill(LOOKAHEAD)
            end = CHARACTERS.match(self.held, self.at).end()  # type: ignore[union-attr]
            if end > self.at:
                chunk, self.at = self.held[self.at : end], end
                yield json.loads(b'"%b"' % chunk).encode() if b"\\" in chunk else chunk
            elif self.at < len(self.held) and self.held[self.at] == QUOTE:
                self.at += 1
                return
            else:
                raise ValueError(f"no whole character of a string at byte {self.place}")

    def name(self) -> str:
        """The name of a field and the colon after it; only the beginning of a very long name."""
        self.expect(QUOTE)
        kept = b""
        for chunk in self.string():
            kept += chunk[: LONGEST_WORD - len(kept)]
        self.expect(COLON)
        return kept.decode("utf-8", "ignore")

    def value(self) -> None:
        """Any value, which is checked and not kept."""
        awaited: list[int] = []  # the brackets that close what is open
        while True:
            first = self.peek()
            if first in (OPEN, ord("[")):
                self.at += 1
                awaited.append(first + 2)  # } is { + 2, and ] is [ + 2
                if len(awaited) > DEEPEST:
                    raise ValueError(f"more than {DEEPEST} brackets are open at byte {self.place}")
                if self.peek() != awaited[-1]:
                    if first == OPEN:
                        self.name()
                    continue
            elif first == QUOTE:
                self.at += 1
                for _ in self.string():
                    pass
            else:
                self.word()
            while awaited and self.peek() == awaited[-1]:
                self.at += 1
                awaited.pop()
            if not awaited:
                return
            self.expect(COMMA)
            if awaited[-1] == CLOSE:
                self.name()

    def word(self) -> None:
        """A number, or a word such as true."""
        self.fill(LONGEST_WORD)
        found = WORD.match(self.held, self.at)
        if found is None or found.end() - self.at >= LONGEST_WORD:
            raise ValueError(f"expected a value at byte {self.place}")
        self.at = found.end()

    def object_text(self, field: str) -> TextPlace | str:
        if self.peek() != OPEN:
            return "not a JSON object"
        self.at += 1
        names: list[str] = []
        found: TextPlace | str | None = None
        is_last = self.peek() == CLOSE
        while not is_last:
            name = self.name()
            names = [*names, name][:5]
            if name == field:
                found = self.text()  # of two fields with one name, the last counts
            else:
                self.value()
            is_last = self.peek() == CLOSE
            if not is_last:
                self.expect(COMMA)
        self.at += 1
        if self.peek() != -1:
            raise ValueError(f"more data at byte {self.place}")
        there = ", ".join(map(repr, names)) or "none"
        return found or f"no field {field!r} (found: {there}); choose one with --column"

    def text(self) -> TextPlace | str:
        """Where the text begins, and how long it is; or what else is there."""
        first = self.peek()
        if first != QUOTE:
            self.value()
            return f"not text but {KINDS.get(first, 'a number')}"
        self.at += 1
        start, size, blank = self.place, 0, True
        for chunk in self.string():
            size += len(chunk)
            blank = blank and not chunk.decode().strip()
        return TextPlace(start, size, blank)
