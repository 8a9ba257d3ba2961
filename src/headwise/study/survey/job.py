"""A survey from beginning to end, on one process or several: take units, measure them, write the result.

`SurveyJob` runs a survey, `Processes` hands out the units of work, and `ProgressLine` reports. Under torchrun the
processes share torch's key-value store. A process takes the next unit whenever it is free, so a slow process or a long
document does not delay the others.
"""

import dataclasses
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import nn

from headwise.errors import HeadwiseError, OptionError
from headwise.models.text_model import TextModel
from headwise.shapes import check_size
from headwise.study.finite import NotFiniteError
from headwise.study.survey.corpus import Corpus, TokenWindow, batches, cut, open_corpus, text_corpus
from headwise.study.survey.disk import UnreadableError, retried, why
from headwise.study.survey.journal import (
    Journal,
    JournalError,
    check_free,
    clear,
    digest,
    prepare,
    sealed_files,
    writing,
)
from headwise.study.survey.measures import LayerSums, Measures
from headwise.study.survey.passages import Passage, Passages, StrongQuery, remembering
from headwise.study.survey.result import Survey, check_path, many
from headwise.study.survey.tally import Skipped, Tally

CONTEXT = 1024  # tokens of a window by default, if the model can read that many
BYTES_PER_TOKEN = 4  # roughly; a unit then holds about as much text as one batch of full windows
OFTEN, SELDOM = 0.5, 10.0  # seconds between two progress lines, on a terminal and in a log
POLL = 0.1  # seconds between two reads of the store
BEAT = 2.0  # seconds between two signs of life of a process
QUIET = 60.0  # seconds without one, after which a process counts as stopped
DONE = object()  # what the first process answers if the survey is finished already


class LostTextError(OptionError):
    """A strict survey met a text that cannot be read."""


class Processes:
    """The processes that share the work of a survey: this one alone, unless a subclass adds others."""

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

    def run_first(self, prepare: Callable[[], object]) -> bool:
        """Whether there is work to do: what `prepare` says on the first process; the others wait for it."""
        return prepare() is not DONE

    def finish(self, meanwhile: Callable[[], None]) -> bool:
        """Report that this process is done. The first process waits for all, calling `meanwhile`, and gets True."""
        return True


class TorchrunProcesses(Processes):
    """Processes started by torchrun, which share a store that no other processes write to."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        if rank:
            threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """Show that this process runs: one that is stopped, or whose machine is gone, shows nothing."""
        with suppress(RuntimeError):  # the store is closed when the first process ends
            while True:
                self.store.add(f"alive {self.rank}", 1)
                time.sleep(BEAT)

    def count(self, name: str, amount: int) -> int:
        return int(self.store.add(name, amount))

    def run_first(self, prepare: Callable[[], object]) -> bool:
        if self.rank:
            self._wait("ready")
            answer = self.store.get("ready")
            if answer == b"no":
                raise SystemExit(2)  # the first process reports the error
            return bool(answer == b"yes")
        try:
            is_work = prepare() is not DONE
        except HeadwiseError:
            self.store.set("ready", "no")
            raise
        self.store.set("ready", "yes" if is_work else "done")
        return is_work

    def finish(self, meanwhile: Callable[[], None]) -> bool:
        if self.rank:
            self.store.set(f"done {self.rank}", "yes")
            return False
        for rank in range(1, self.size):  # if one dies, torchrun stops every process
            self._wait(f"done {rank}", meanwhile, rank)
        return True

    def _wait(self, key: str, meanwhile: Callable[[], None] = lambda: None, rank: int | None = None) -> None:
        """Wait until `key` is set, for as long as process `rank` shows that it runs."""
        beats, since = -1, time.monotonic()
        while not self.store.check([key]):
            meanwhile()
            time.sleep(POLL)
            if rank is not None and beats != (beats := self.count(f"alive {rank}", 0)):
                since = time.monotonic()
            if rank is not None and time.monotonic() - since > QUIET:
                raise OptionError(
                    f"process {rank} of {self.size} has shown no sign of life for {QUIET:.0f} s: it was stopped, or "
                    f"its machine does not respond. Finished work is in the journals: end it, and start again with "
                    f"--resume."
                )


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


class ProgressLine:
    """Reports progress, rate and remaining time on a stream.

    Args:
        total: bytes of the corpus.
        before: bytes that an earlier run has done.
        stream: where to write; None writes nothing.
    """

    def __init__(self, total: float, before: float, stream: TextIO | None = None) -> None:
        self.total, self.before, self.stream = max(total, 1.0), before, stream
        self.live = stream is not None and stream.isatty()
        self.start = self.shown = time.monotonic()

    def show(self, done: float, tokens: int, documents: int, *, last: bool = False) -> None:
        """Write what this run has done so far, if the last line was long enough ago."""
        now = time.monotonic()
        if self.stream is None or (not last and now - self.shown < (OFTEN if self.live else SELDOM)):
            return
        self.shown = now
        text = self._line(done, tokens, documents, now - self.start)
        end = "\n" if last or not self.live else ""
        print(f"\r\033[K{text}" if self.live else text, end=end, file=self.stream, flush=True)

    def _line(self, done: float, tokens: int, documents: int, seconds: float) -> str:
        share = min(1.0, (self.before + done) / self.total)
        rate = tokens / max(seconds, 1e-9)
        left = max(0.0, self.total - self.before - done) * seconds / done if done else None
        remaining = "" if left is None or share >= 1 else f" · about {_duration(left)} left"
        counts = f"{many(documents, 'document')} · {tokens:,} tokens, {rate:,.0f} per second"
        return f"{100 * share:.0f} % · {counts}{remaining}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


@dataclasses.dataclass(frozen=True, eq=False)
class SurveyJob:
    """What is surveyed, and how."""

    model: TextModel
    corpus: Corpus
    context: int
    batch: int
    settings: dict[str, Any]  # what the result depends on
    strict: bool = False  # what cannot be read ends the survey
    measures: Measures = dataclasses.field(default_factory=Measures)

    @classmethod
    def of(
        cls,
        model: TextModel,
        paths: Iterable[str | Path] | None,
        *,
        texts: Iterable[str] | None = None,
        context: int | None = None,
        batch: int = 8,
        column: str = "text",
        strict: bool = False,
        measures: Measures | None = None,
    ) -> Self:
        """Check the options and find the documents; see `headwise.survey`."""
        context, measures = _checked_context(context, model), measures or Measures()
        step = BYTES_PER_TOKEN * context * check_size("batch", batch)
        if (paths is None) == (texts is None):
            raise OptionError("no documents are given; pass the paths of files, or texts=[...].")
        corpus = open_corpus(paths, step, column) if paths is not None else text_corpus(texts or (), step)
        measures.check(model)
        settings = {"model": model.name, "fingerprint": model.fingerprint(), "context": context, "batch": batch}
        settings |= {"column": column, "device": model.device.type, **measures.settings}
        return cls(model, corpus, context, batch, settings, strict, measures)

    def run(
        self,
        out: Path | None = None,
        *,
        processes: Processes | None = None,
        resume: bool = False,
        every: float = 10.0,
        stream: TextIO | None = None,
    ) -> Survey | None:
        """The survey, written to `out`; None on processes other than the first."""
        processes = processes or Processes()
        if out is None and processes.size > 1:
            raise OptionError("several processes need --out, because they keep their journals beside it.")
        if out is not None:
            self._check_out(out)
        folder = None if out is None else journal_folder(out)
        if not processes.run_first(lambda: self._begin(out, folder, resume)):
            return Survey.load(out) if processes.rank == 0 and out is not None else None
        if processes.rank and folder is not None:
            self.corpus.accept(sealed_files(folder))
        with Journal(folder, processes.rank, self._journal_settings(), len(self.corpus), every) as journal:
            report = self._work(processes, journal, stream)
            if not processes.finish(meanwhile=report):
                return None
            report(last=True)
            found = Survey(self.settings, self.corpus.entries, journal.whole())
            if out is not None:
                with writing(out):
                    retried(lambda: found.save(out))
            journal.remove()
            return found

    def _begin(self, out: Path | None, folder: Path | None, resume: bool) -> object:
        """What the first process does before the others: seal the files and make the folder of journals."""
        if folder is not None:
            check_free(folder, resume=resume)
        self.corpus.seal()
        if out is None or folder is None:
            return None
        if resume and self._is_finished(out):
            clear(folder)
            return DONE
        prepare(folder, self._journal_settings(), self.corpus.state, resume=resume)
        return None

    def _journal_settings(self) -> dict[str, Any]:
        return {**self.settings, "files": digest(self.corpus.state), "torch": torch.__version__}

    def _check_out(self, out: Path) -> None:
        check_path(out)
        if str(out.resolve()) in self.corpus.paths:
            raise OptionError(f"out={str(out)!r} is one of the files to survey; expected another name.")

    def _work(self, processes: Processes, journal: Journal, stream: TextIO | None) -> Callable[..., None]:
        """Take units until there are none left. Returns a function that reports the progress of all processes."""
        corpus = self.corpus
        before = sum(corpus.bytes_of(unit) for unit, done in enumerate(journal.done) if done)
        progress = ProgressLine(corpus.size, before, stream)

        def report(last: bool = False, done: float = 0, tokens: int = 0, documents: int = 0) -> None:
            counts = {"bytes": round(done), "tokens": tokens, "documents": documents}
            progress.show(*(processes.count(name, amount) for name, amount in counts.items()), last=last)

        try:
            while (unit := processes.claim()) < len(corpus):
                if journal.done[unit]:
                    continue
                tally = self.tally_of(unit, journal.tally.passages)
                journal.add(unit, tally)
                report(done=corpus.bytes_of(unit), tokens=tally.counts["tokens"], documents=tally.counts["documents"])
        except HeadwiseError:  # keep what is done; an interrupt may have come while something was being added
            with suppress(JournalError):
                journal.save()
            raise
        finally:
            corpus.close()
        journal.save()
        return report

    def tally_of(self, unit: int, known: Passages | None = None) -> Tally:
        """What one unit adds to the survey. It depends on the unit and the job alone.

        A unit counts as a whole or, if a part of it cannot be read, not at all.

        Args:
            unit: its number.
            known: passages that were found before; weaker ones are left out, since they would not be kept.
        """
        tally = Tally(self.measures.evidence)
        try:
            with evaluating(self.model.module):
                for windows in batches(self._windows(unit, tally), self.batch, self.context):
                    self._count(windows, tally, known or Passages())
        except UnreadableError as error:
            tally = Tally()
            self._skip(self.corpus.lost(unit, why(error)), tally)
        return tally

    def _windows(self, unit: int, tally: Tally) -> Iterator[TokenWindow]:
        """The windows of a unit; documents read and skipped are counted on the way."""
        codec, step, place = (
            self.model.codec,
            BYTES_PER_TOKEN * self.context * self.batch,
            self.corpus.number_in_file(unit),
        )
        numbers = count()
        for document in self.corpus.read(unit):
            if isinstance(document, Skipped):
                self._skip(document, tally)
                continue
            windows = 0
            for passage in document.parts(step):
                for ids in cut(list(codec.encode(passage)), codec, self.context):
                    windows += 1
                    yield TokenWindow(ids, document.skipped, place, next(numbers))
            if not windows and document.passages == 1:
                self._skip(document.skipped("the tokenizer produces no tokens for it"), tally)
            elif document.number == 0:
                tally.counts["documents"] += 1
                tally.counts["cut"] += windows > 1 or document.passages > 1

    def _count(self, windows: list[TokenWindow], tally: Tally, known: Passages) -> None:
        """Measure windows and add the sums; if numbers are not finite, measure each window separately."""
        try:
            ids = [window.ids for window in windows]
            found = self.measures.of(self.model, ids, self.context, [known, tally.passages])
        except NotFiniteError as error:
            if len(windows) > 1:
                for window in windows:
                    self._count([window], tally, known)
                return
            tally.counts["windows lost"] += 1
            self._skip(windows[0].skipped(f"{error} in one of its windows")._replace(documents=0), tally)
            return
        for layer, sums in found.items():
            tally.add_layer(layer, sums.fields)
            self._quote(layer, sums, windows, tally)
        tally.counts["windows"] += len(windows)
        tally.counts["tokens"] += sum(len(window.ids) for window in windows)

    def _quote(self, layer: str, sums: LayerSums, windows: list[TokenWindow], tally: Tally) -> None:
        """Keep the passages in which the heads of a layer were strongest."""
        for (head, number), candidates in sums.strongest.items():
            for candidate in candidates:
                passage = self._passage(candidate, sums, windows[candidate.window])
                tally.passages.add((layer, head, number), passage)

    def _passage(self, found: StrongQuery, sums: LayerSums, window: TokenWindow) -> Passage:
        file, line, *_ = window.skipped("")
        words = found.quote.words(sums.texts[found.window], remembering(self.model.codec))
        place = (file, line, window.unit, window.number, found.query, found.key)
        return Passage(found.score, found.weight, *place, words, found.tokens, found.quote.marks)

    def _skip(self, skipped: Skipped, tally: Tally) -> None:
        """Count what is skipped, with its name; in a strict survey it is an error."""
        if self.strict:
            raise LostTextError(
                f"{skipped.place}: {skipped.reason}. Without --strict, the survey skips it and goes on."
            )
        tally.counts["skipped"] += skipped.documents
        tally.skip([skipped])

    def _is_finished(self, out: Path) -> bool:
        """Whether `out` already holds the result of this survey."""
        if not out.is_file() or journal_folder(out).exists():
            return False
        found = Survey.load(out)
        return found.settings == self.settings and found.corpus == self.corpus.entries


def _checked_context(context: int | None, model: TextModel) -> int:
    """The number of tokens in a window: as given, or the model's own up to `CONTEXT`."""
    if context is None:
        return min(CONTEXT, model.context or CONTEXT)
    least = len(model.codec.before) + len(model.codec.after) + 1
    if context < least or context > (model.context or context):
        bound = f" to {model.context}, the context of {model.name}" if model.context else " or more"
        raise OptionError(f"context={context}: expected {least}{bound}.")
    return context


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards every submodule is in the mode it was in, even after an error."""
    modes = [(each, each.training) for each in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def journal_folder(out: Path) -> Path:
    """Where the journals of an unfinished survey are."""
    return out.with_name(f"{out.name}.journal")
