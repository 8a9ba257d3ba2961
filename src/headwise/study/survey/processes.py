"""The processes of a survey: which takes which unit, what all of them have done, and which writes the result.

Under torchrun they share torch's key-value store. A process takes the next unit whenever it is free, so a slow process
or a long document does not delay the others.
"""

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from headwise.errors import HeadwiseError, OptionError

POLL = 0.1  # seconds between two looks into the store


class Processes:
    """The processes that share the work of a survey: this one alone, unless a subclass knows others."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def claim(self) -> int:
        """The next number that no other process gets: 0, 1, 2, ..."""
        return self.count("claimed", 1) - 1

    def count(self, name: str, amount: int) -> int:
        """Add to a counter that all processes share, and return its value."""
        self._counts[name] += amount
        return self._counts[name]

    def run_first(self, prepare: Callable[[], None]) -> None:
        """Call `prepare` on the first process; the others wait for it."""
        prepare()

    def finish(self, meanwhile: Callable[[], None]) -> bool:
        """Report that this process is done. The first process waits for all, calling `meanwhile`, and gets True."""
        return True


class TorchrunProcesses(Processes):
    """Processes started by torchrun, which share a store that no other processes write to."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def count(self, name: str, amount: int) -> int:
        """Add to the shared counter."""
        return int(self.store.add(name, amount))

    def run_first(self, prepare: Callable[[], None]) -> None:
        """Call it on the first process; if it fails, the others exit without repeating the error."""
        if self.rank:
            self._wait("ready")
            if self.store.get("ready") != b"yes":
                raise SystemExit(2)
            return
        try:
            prepare()
        except HeadwiseError:
            self.store.set("ready", "no")
            raise
        self.store.set("ready", "yes")

    def finish(self, meanwhile: Callable[[], None]) -> bool:
        """Report it; the first process waits. If a process dies, torchrun stops every process."""
        if self.rank:
            self.store.set(f"done {self.rank}", "yes")
            return False
        for rank in range(1, self.size):
            self._wait(f"done {rank}", meanwhile)
        return True

    def _wait(self, key: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        while not self.store.check([key]):
            meanwhile()
            time.sleep(POLL)


def processes_from_environment() -> Processes:
    """The processes that torchrun started, or this process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    from torch import distributed

    if not distributed.is_available():
        raise OptionError("this torch is built without torch.distributed; run the survey as one process.")
    store, rank, size = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    own = distributed.PrefixStore(f"survey {shared_word(store, rank, size)}", store)  # type: ignore[attr-defined]
    return TorchrunProcesses(own, rank, size)


def shared_word(store: Any, rank: int, size: int) -> str:
    """A random word that the processes of this start share, and no earlier ones.

    When torchrun restarts processes, the store still holds the entries of the dead ones, and the number of restarts is
    not the same on every machine. So every process makes up a word; the first process answers each with its own word,
    and the echo proves that the other process is alive.
    """
    word = secrets.token_hex(8)
    if rank:
        while not store.check([f"answer to {word}"]):
            store.set(f"here is {rank}", word)
            time.sleep(POLL)
        answer = store.get(f"answer to {word}").decode()
        store.set(f"echo of {answer} by {word}", "")
        return str(answer)
    for other in range(1, size):
        theirs = ""
        while not theirs or not store.check([f"echo of {word} by {theirs}"]):
            if store.check([f"here is {other}"]):
                theirs = store.get(f"here is {other}").decode()
                store.set(f"answer to {theirs}", word)
            time.sleep(POLL)
    return word
