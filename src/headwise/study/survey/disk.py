"""Files that are read while a survey runs: a failed read is tried again, and every block is verified.

A file is hashed in blocks when the survey begins. From then on a block either has the bytes it had then, or reading it
is an error, so a survey never mixes two versions of a file. Nothing is memory-mapped: a failing disk or a shortened
file raises an error, instead of a signal that ends the process.
"""

import errno
import hashlib
import io
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headwise.errors import HeadwiseError, OptionError

BLOCK = 2**18  # bytes that are read and hashed at a time
MARK = 16  # bytes of the hash of a block
KEPT = 4  # blocks of an open file that are kept in memory
WAITS = (0.02, 0.2)  # seconds before the second and the third attempt
LASTING = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP)  # waiting does not help

T = TypeVar("T")


class UnreadableError(HeadwiseError, OSError):
    """A file, or a part of one, could not be read at any attempt."""


class ChangedFileError(OptionError):
    """A file changed after the survey began."""


def retried(act: Callable[[], T], again: Callable[[], object] = lambda: None) -> T:
    """What `act` returns; if it fails, it is tried again a little later, after `again`."""
    for wait in WAITS:
        try:
            return act()
        except (OSError, ChangedFileError) as error:
            again()
            if not isinstance(error, OSError) or error.errno not in LASTING:
                time.sleep(wait)
    return act()


def why(error: OSError) -> str:
    """The reason of an error, without the path."""
    return error.strerror or str(error) or type(error).__name__


class SealedFile:
    """The bytes of a file as they are when it is sealed.

    Args:
        path: of the file.
        size: bytes that it must have.
    """

    __slots__ = ("_descriptor", "_kept", "marks", "path", "size")

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.marks: bytes | None = None  # the hashes of all blocks, once it is sealed
        self._descriptor: int | None = None
        self._kept: dict[int, bytes] = {}

    def seal(self, look: Callable[[bytes], object] = lambda block: None) -> str:
        """A digest of the content, which must not change from now on; `look` sees every block."""
        marks = bytearray()
        for number in range(-(-self.size // BLOCK)):
            block = self._block(number)
            marks += _mark(block)
            look(block)
        self._tried(self._check_size)
        self.marks = bytes(marks)
        return hashlib.sha256(self.marks).hexdigest()

    def read(self, start: int, stop: int) -> bytes:
        """The bytes from `start` up to `stop`."""
        start, stop = max(0, start), min(stop, self.size)
        if start >= stop:
            return b""
        first, last = start // BLOCK, (stop - 1) // BLOCK
        if first == last:
            return self._block(first)[start - first * BLOCK : stop - first * BLOCK]
        whole = io.BytesIO()  # its bytes are not copied at the end
        for number in range(first, last + 1):
            whole.write(self._block(number)[max(0, start - number * BLOCK) : stop - number * BLOCK])
        return whole.getvalue()

    def find(self, what: int, start: int, stop: int) -> int:
        """Where a byte is first found between two places, or -1."""
        while start < stop:
            end = min(stop, (start // BLOCK + 1) * BLOCK)
            place = self.read(start, end).find(what)
            if place >= 0:
                return start + place
            start = end
        return -1

    def count(self, what: bytes, start: int, stop: int) -> int:
        """How often a byte is found between two places."""
        return sum(self.read(at, min(at + BLOCK, stop)).count(what) for at in range(start, stop, BLOCK))

    def close(self) -> None:
        """Close the file and forget what was read; it can be read again."""
        self._kept.clear()
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _block(self, number: int) -> bytes:
        block = self._kept.get(number)
        if block is None:
            block = self._tried(lambda: self._fetch(number))
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = block
        return block

    def _tried(self, act: Callable[[], T]) -> T:
        try:
            return retried(act, self.close)
        except OSError as error:
            raise UnreadableError(error.errno, why(error), str(self.path)) from error

    def _fetch(self, number: int) -> bytes:
        start = number * BLOCK
        size = min(BLOCK, self.size - start)
        parts: list[bytes] = []
        while size:
            descriptor = self._open()
            os.lseek(descriptor, start, os.SEEK_SET)
            part = os.read(descriptor, size)
            if not part:
                self._check_size()
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
            parts.append(part)
            start, size = start + len(part), size - len(part)
        block = b"".join(parts)
        if self.marks is not None and _mark(block) != self.marks[number * MARK : (number + 1) * MARK]:
            raise ChangedFileError(
                f"{self.path} has changed since the survey began, and has other bytes from byte {number * BLOCK:,} on. "
                f"The files of a survey must not change; start it again."
            )
        return block

    def _open(self) -> int:
        if self._descriptor is None:
            # Without O_NONBLOCK, a pipe that took the place of the file would wait for a writer.
            descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            self._descriptor = descriptor
            self._check_size()
        return self._descriptor

    def _check_size(self) -> None:
        about = os.fstat(self._descriptor) if self._descriptor is not None else self.path.stat()
        if about.st_size != self.size or not stat.S_ISREG(about.st_mode):
            raise ChangedFileError(
                f"{self.path} had {self.size:,} bytes when the survey began and has {about.st_size:,} now. The files "
                f"of a survey must not change; start it again."
            )


def _mark(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=MARK).digest()
