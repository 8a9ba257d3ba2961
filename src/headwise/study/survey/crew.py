"""The processes of a survey: who takes which unit, what all have done together, and who writes the result.

Under torchrun they share torch's own key-value store. Units are taken one by one as processes get free, so that a slow
process or a long document holds up nobody.
"""

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from headwise.errors import HeadwiseError, OptionError

PATIENCE = 0.1  # seconds between two looks at what others have said


class Crew(Protocol):
    """Processes that work together."""

    rank: int
    size: int

    def claim(self) -> int:
        """A number nobody else gets: 0, 1, 2, ..."""

    def count(self, name: str, amount: int) -> int:
        """Add to a number that all share, and see what it is."""

    def first(self, prepare: Callable[[], None]) -> None:
        """Let the first process do something before the others go on."""

    def done(self, meanwhile: Callable[[], None]) -> bool:
        """Say that this process has finished; True on the first, once all have. It waits, and does something else."""


class Alone:
    """One process."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def claim(self) -> int:
        """The next number."""
        return self.count("claimed", 1) - 1

    def count(self, name: str, amount: int) -> int:
        """Add up."""
        self._counts[name] += amount
        return self._counts[name]

    def first(self, prepare: Callable[[], None]) -> None:
        """Do it."""
        prepare()

    def done(self, meanwhile: Callable[[], None]) -> bool:
        """There is nobody to wait for."""
        return True


class Together:
    """Processes that torchrun started, through a store that all of them reach and nobody else writes."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def claim(self) -> int:
        """The next number of all."""
        return int(self.store.add("claimed", 1)) - 1

    def count(self, name: str, amount: int) -> int:
        """Add to the number of all."""
        return int(self.store.add(name, amount))

    def first(self, prepare: Callable[[], None]) -> None:
        """Do it on the first process; where that fails, the others end without saying the same again."""
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

    def done(self, meanwhile: Callable[[], None]) -> bool:
        """Say so; the first process waits for the others. One that dies is torchrun's to notice: it ends us all."""
        if self.rank:
            self.store.set(f"done {self.rank}", "yes")
            return False
        for rank in range(1, self.size):
            self._wait(f"done {rank}", meanwhile)
        return True

    def _wait(self, key: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        while not self.store.check([key]):
            meanwhile()
            time.sleep(PATIENCE)


def crew_from_environment() -> Crew:
    """The processes torchrun started, or this one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    from torch import distributed

    if not distributed.is_available():
        raise OptionError("this torch is built without torch.distributed; run the survey as one process.")
    store, rank, size = next(distributed.rendezvous("env://"))  # type: ignore[attr-defined]
    own = distributed.PrefixStore(f"survey {meet(store, rank, size)}", store)  # type: ignore[attr-defined]
    return Together(own, rank, size)


def meet(store: Any, rank: int, size: int) -> str:
    """A word that the processes of this very start share, and no others.

    When torchrun starts processes again, the store still holds what those before them said, and how often it has done
    so is not the same number on every machine. So every process makes up a word; the first answers to each with its
    own, and knows by the echo that it was no dead one's.
    """
    word = secrets.token_hex(8)
    if rank:
        while not store.check([f"answer to {word}"]):
            store.set(f"here is {rank}", word)
            time.sleep(PATIENCE)
        answer = store.get(f"answer to {word}").decode()
        store.set(f"echo of {answer} by {word}", "")
        return str(answer)
    for other in range(1, size):
        theirs = ""
        while not theirs or not store.check([f"echo of {word} by {theirs}"]):
            if store.check([f"here is {other}"]):
                theirs = store.get(f"here is {other}").decode()
                store.set(f"answer to {theirs}", word)
            time.sleep(PATIENCE)
    return word
