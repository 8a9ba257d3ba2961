"""How far a survey is, on standard error: rate and remaining time."""

import sys
import time
from typing import TextIO

OFTEN, SELDOM = 0.5, 10.0  # seconds between two lines, on a terminal and in a log


class Progress:
    """Tells of bytes, tokens and documents as they are done.

    Args:
        total: bytes of the corpus.
        before: bytes that an earlier run has done.
        stream: where to; None says nothing.
    """

    def __init__(self, total: float, before: float, stream: TextIO | None = None) -> None:
        self.total, self.before, self.stream = max(total, 1.0), before, stream
        self.live = stream is not None and stream.isatty()
        self.start = self.told = time.monotonic()

    def tell(self, done: float, tokens: int, documents: int, *, last: bool = False) -> None:
        """What this run has done, if it is time to say so."""
        now = time.monotonic()
        if self.stream is None or (not last and now - self.told < (OFTEN if self.live else SELDOM)):
            return
        self.told = now
        text = line(self.total, self.before, done, tokens, documents, now - self.start)
        end = "\n" if last or not self.live else ""
        print(f"\r\033[K{text}" if self.live else text, end=end, file=self.stream, flush=True)


def line(total: float, before: float, done: float, tokens: int, documents: int, seconds: float) -> str:
    """All of it in one line.

    >>> line(1e6, 0, 25e4, 50_000, 12, 10.0)
    '25 % · 12 documents · 50,000 tokens, 5,000 a second · about 30 s left'
    """
    share = min(1.0, (before + done) / total)
    rate = tokens / max(seconds, 1e-9)
    left = max(0.0, total - before - done) * seconds / done if done else None
    remaining = "" if left is None or share >= 1 else f" · about {duration(left)} left"
    return f"{share:.0%}".replace("%", " %") + (
        f" · {many(documents, 'document')} · {tokens:,} tokens, {rate:,.0f} a second{remaining}"
    )


def many(count: int, noun: str) -> str:
    """A number and what it counts: "1 document", "1,200 documents"."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever says it best."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def standard_error(rank: int) -> TextIO | None:
    """Where the first process tells of progress."""
    return sys.stderr if rank == 0 else None
