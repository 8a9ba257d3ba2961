"""The runs of a server: one is executed, others wait, and finished ones are kept and refined while the server is idle.

The page of a long text is first made from a few of its queries, then from more, finally from all. A few heads are
measured at a time, so that the work can be stopped, or paused for a request, between them.
"""

import contextlib
import enum
import functools
import hashlib
import json
import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, OptionError
from headwise.models import TextModel
from headwise.models.text_model import TokenCodec
from headwise.view.carried import Carried
from headwise.view.data import WAYS, PageData
from headwise.view.pictures import LayerStatistics
from headwise.view.result import View, strongest
from headwise.view.serve.models import (
    Cancelled,
    HeadPairs,
    Models,
    Outcome,
    Worth,
    check_off,
    interruptible,
    run_model,
    vocabulary,
    worth_of_heads,
)
from headwise.view.serve.requests import Limits, Refusal, RunRequest
from headwise.view.texts import PARTS, RunTexts, part_of, target_of, text_of, written
from headwise.weights import AttentionMap
from headwise.weights.summary import HeadSummary, Summary

FIRST, SECOND = 256, 2048  # queries of the first pages of a long text; the last page uses all
LONG = 512  # tokens beyond which a text is long
PAIRS = 20
PORTION = 2**26  # weights that are measured without a pause
QUIET = 0.25  # seconds without a request after which refining continues
OFF_NAMED = 8  # heads that are switched off and named in a title
KNOWN = 64  # outcomes with all heads that are kept


class Stage(enum.StrEnum):
    """How far a run is."""

    WAITING = "waiting"
    WRITING = "writing"
    RUNNING = "running"
    MEASURING = "measuring"
    REFINING = "refining"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (Stage.FINISHED, Stage.CANCELLED, Stage.FAILED)


class Run:
    """A text, a model, and what is known about them. One thread works on it, others read it.

    Args:
        model: the name of the model.
        texts: what the model reads, and the part of it that is shown.
        codec: the text of its tokens.
        off: pairs of layer and head that are switched off.
        wants_maps: False for the outcome only.
        note: what the user should know about this text and this model.
        wants_sweep: whether to measure what each head is worth.
        title: what the page calls the model; its name by default.
    """

    def __init__(
        self,
        model: str,
        texts: RunTexts,
        codec: TokenCodec,
        off: HeadPairs = (),
        wants_maps: bool = True,
        note: str = "",
        wants_sweep: bool = False,
        title: str = "",
    ) -> None:
        self.id = secrets.token_urlsafe(12)
        self.model, self.title, self.texts, self.codec, self.off = model, title or model, texts, codec, tuple(off)
        self.written: str | None = None  # what the decoder reads, if the model wrote it
        self.wants_maps, self.note, self.wants_sweep = wants_maps, note, wants_sweep
        self.worth: Worth | None = None  # of its heads, if that was asked for
        self.stage, self.done = Stage.WAITING, 0.0
        self.maps: Mapping[str, AttentionMap] = {}
        self.carried: tuple[Carried, ...] | None = None
        self.outcome: Outcome | None = None
        self.with_all_heads: Outcome | None = None
        self.manifest: bytes | None = None
        self.rows = 0  # queries that the manifest was measured from
        self.version = 0  # of the manifest
        self.error: str | None = None
        self.stop = threading.Event()

    @property
    def T(self) -> int:
        return int(self.texts.queries.shape[1])

    @property
    def memory(self) -> int:
        """Bytes of its queries, keys and values, and of what its heads read; layers may share storage."""
        tensors = [tensor for weights in self.maps.values() for tensor in (weights._query, weights._key)]
        tensors += [tensor for found in self.carried or () for tensor in found.tensors]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        return sum(storage.nbytes() for storage in storages.values())

    def layer(self, index: int) -> AttentionMap:
        return list(self.maps.values())[index]

    def reached(self, stage: Stage, done: float = 0.0) -> None:
        """Record progress; raises if the run has been cancelled."""
        if self.stop.is_set():
            raise Cancelled
        self.stage, self.done = stage, done

    def to_dict(self) -> dict[str, Any]:
        """Its state as plain data."""
        return {
            "id": self.id,
            "model": self.model,
            "stage": self.stage,
            "done": round(self.done, 3),
            "tokens": self.T,
            "rows": [self.rows, self.T],
            "ready": self.manifest is not None or (not self.wants_maps and self.outcome is not None),
            "version": self.version,
            "off": [list(pair) for pair in self.off],
            "outcome": None if self.outcome is None else self.outcome.to_dict(),
            "with_all_heads": None if self.with_all_heads is None else self.with_all_heads.to_dict(),
            "effects": [] if self.worth is None else [list(effect) for effect in self.worth.effects],
            "way": None if self.worth is None else WAYS[self.worth.way],
            "by": None if self.worth is None else self.worth.way,
            "part": self.texts.part,
            "parts": list(PARTS) if self.texts.part else [],
            "written": self.written,
            "note": self.note,
            "error": self.error,
        }

    def measure(self) -> None:
        """Make the first page, quickly."""
        for _ in self._page(query_counts(self.T)[0], Stage.MEASURING):
            pass

    def refinements(self) -> Iterator[None]:
        """Make the page again from more queries, a few heads at a time, and finally from all of them."""
        for count in query_counts(self.T)[1:]:
            yield from self._page(count, Stage.REFINING)

    def _view(self, count: int) -> View:
        """Its maps, measured at `count` queries."""
        return View(self.maps, **self.texts.view(self.codec), model=self.title, queries=count, carried=self.carried)

    def _page(self, count: int, stage: Stage) -> Iterator[None]:
        """Measure all heads at `count` queries, then publish the page."""
        view = self._view(count)
        total, done = sum(weights.shape[1] for weights in view.maps), 0
        summaries, layers, pairs = [], [], []
        for layer, weights in enumerate(view.maps):
            heads: list[HeadSummary] = []
            parts: list[LayerStatistics] = []
            for portion in _portions(weights.shape[1], count * view.S):
                self.reached(stage, done / total)
                part = View(
                    {"": weights.select(heads=portion)}, None, view.ids, query_ids=view.query_ids, queries=count
                )
                pairs += [pair._replace(layer=layer, head=portion.start + pair.head) for pair in part.pairs(PAIRS)]
                heads += part.summaries[0]
                parts.append(LayerStatistics.of(part.sampled[0]).stretched(view.queries, view.T))
                done += portion.stop - portion.start
                yield
            summaries.append(Summary(tuple(heads)))
            layers.append(LayerStatistics.joined(parts))
        view.summaries, view._pairs = tuple(summaries), strongest(pairs)
        off = ", ".join(f"{layer}.{head}" for layer, head in self.off[:OFF_NAMED])
        data = PageData(view, f"{view.heading} without {off}" if off else "")
        for layer, statistics in enumerate(layers):
            data.add_layer(layer, statistics)
        self.manifest = json.dumps(data.to_dict(), separators=(",", ":")).encode()
        self.rows, self.version = count, self.version + 1
        yield


class Runs:
    """The runs, and the threads that execute and refine them.

    It is a context manager for work that has priority over refining, such as a picture that a page is waiting for.
    """

    def __init__(self, models: Models, limits: Limits) -> None:
        self.models, self.limits = models, limits
        self._kept: OrderedDict[str, Run] = OrderedDict()
        self._waiting: deque[Run] = deque()
        self._refining: dict[Run, Iterator[None]] = {}
        self._outcomes: OrderedDict[tuple[str, bytes], Outcome] = OrderedDict()
        self._written: OrderedDict[tuple[str, bytes], Tensor] = OrderedDict()
        self._changed = threading.Condition()
        self._closing = False
        self._answered_at, self._answering = 0.0, 0
        self._running: Run | None = None  # by the worker, which is the thread that executes runs
        self._worker: threading.Thread | None = None
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        """Start the threads: two, so that a new run never waits for the refining of an old one."""
        self._worker = self._start("headwise runs", self._work)
        self._start("headwise refining", self._refine)

    def _start(self, name: str, loop: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=loop, name=name, daemon=True)
        self._threads = [*(known for known in self._threads if known.is_alive()), thread]
        thread.start()
        return thread

    def close(self, seconds: float = 5.0) -> bool:
        """Stop everything and wait for it; False if a layer is still running after that time."""
        with self._changed:
            self._closing = True
            for run in self._kept.values():
                run.stop.set()
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def begin(self, request: RunRequest) -> Run:
        """Accept a run; it is executed when its turn comes."""
        name = self.models.name_of(request.model)
        self._check_queue()
        model = self.models[name]
        texts = _texts(model, request)
        length = max(ids.shape[1] for ids in (texts.ids, texts.target) if ids is not None)
        self._check_length(model, length)
        check_off(model, request.off, texts.part)
        title = f"{name} ({texts.part})" if texts.part else name
        run = Run(name, texts, model.codec, request.off, request.maps, _note(model, length), request.sweep, title)
        with self._changed:
            self._check_queue()
            self._kept[run.id] = run
            self._waiting.append(run)
            self._changed.notify_all()
        return run

    def _check_queue(self) -> None:
        if len(self._waiting) >= self.limits.waiting:
            raise Refusal(429, f"{self.limits.waiting} runs are already waiting, the limit. Try again later.", after=5)

    def _check_length(self, model: TextModel, length: int) -> None:
        most = self.limits.tokens if model.limit is None else min(self.limits.tokens, model.limit)
        if length > most:
            raise Refusal(413, f"the text is {length:,} tokens long, and the limit is {most:,}. Use a shorter text.")

    def __getitem__(self, id: str) -> Run:
        with self._changed:
            if id not in self._kept:
                raise Refusal(
                    404, f"there is no such run, or it was dropped: the last {self.limits.runs} runs are kept."
                )
            self._kept.move_to_end(id)
            return self._kept[id]

    def cancel(self, id: str) -> Run:
        """Stop a run and forget it. If it is being executed, another thread executes those that wait, at once.

        Its own thread ends with the operation that it is in: one layer's attention to a long text takes seconds.
        """
        run = self[id]
        run.stop.set()
        with self._changed:
            self._forget(run)
            left = sum(thread.is_alive() for thread in self._threads)
            if run is self._running and left < self.limits.threads:
                self._running = None
                self._worker = self._start("headwise runs", self._work)
            self._changed.notify_all()
        return run

    def __enter__(self) -> None:
        with self._changed:
            self._answering += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._answering -= 1
            self._answered_at = time.monotonic()
            self._changed.notify_all()

    def _work(self) -> None:
        """Open the first model before anyone waits for it, then execute one run after the other.

        It ends when another worker has taken over, since the run that this one executes was cancelled.
        """
        with contextlib.suppress(HeadwiseError):  # reported when the model is requested
            self.models[self.models.names[0]]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting)
                if self._closing:
                    return
                run = self._running = self._waiting.popleft()
            self._guarded(run, functools.partial(self._execute, run))
            with self._changed:
                if self._worker is not threading.current_thread():
                    return
                self._running = None
                self._changed.notify_all()

    def _refine(self) -> None:
        """Improve the page of the newest run, a portion at a time, while the server is idle."""
        while (found := self._when_quiet()) is not None:
            run, steps = found
            if not self._guarded(run, functools.partial(next, steps, Stage.FINISHED)):
                with self._changed:
                    self._refining.pop(run, None)

    def _when_quiet(self) -> tuple[Run, Iterator[None]] | None:
        """What to refine, once the server is idle; None when it closes."""
        with self._changed:
            while not self._closing:
                wait = self._answered_at + QUIET - time.monotonic()
                busy = self._running or self._waiting or self._answering or not self._refining
                if not busy and wait <= 0:
                    return next(reversed(self._refining.items()))
                self._changed.wait(None if busy else wait)
            return None

    def _execute(self, run: Run) -> None:
        model = self.models[run.model]
        if run.texts.part and run.texts.target is None:
            self._write(run, model)
        if run.wants_sweep:
            run.worth = worth_of_heads(model, run.texts, functools.partial(run.reached, Stage.RUNNING))
            run.reached(Stage.FINISHED, 1.0)
            return
        known = self._outcomes.get(_key(run))
        begin = 0.0
        if run.off and known is None:  # first the outcome to compare with
            half = lambda done: run.reached(Stage.RUNNING, done / 2)  # noqa: E731
            known = run_model(model, run.texts, maps=False, progress=half).outcome
            _remember(self._outcomes, _key(run), known)
            begin = 0.5
        run.with_all_heads = known

        def progress(done: float) -> None:
            run.reached(Stage.RUNNING, begin + (1 - begin) * done)

        ran = run_model(model, run.texts, run.off, maps=run.wants_maps, progress=progress)
        run.carried, run.maps, run.outcome = ran.carried, ran.maps, ran.outcome
        if not run.off:
            run.with_all_heads = run.outcome
            _remember(self._outcomes, _key(run), run.outcome)
        self._make_room(run)
        if run.wants_maps:
            run.measure()
        if not run.wants_maps or run.rows == run.T:
            run.reached(Stage.FINISHED, 1.0)
            return
        run.reached(Stage.REFINING)
        with self._changed:
            self._refining[run] = run.refinements()
            self._changed.notify_all()

    def _guarded(self, run: Run, work: Callable[[], object]) -> bool:
        """Do some work on a run and record how it ended; whether there is more to do."""
        try:
            run.reached(run.stage, run.done)
            if work() == Stage.FINISHED:
                run.reached(Stage.FINISHED, 1.0)
        except Cancelled:
            run.stage = Stage.CANCELLED
        except HeadwiseError as error:
            run.stage, run.error = Stage.FAILED, str(error)
        except Exception as error:
            # The message of an error may quote the text, so only its type and place are reported.
            run.stage, run.error = Stage.FAILED, f"an internal error of headwise ({type(error).__name__})."
            log_place("a run", error)
        return not run.stage.ended

    def _write(self, run: Run, model: TextModel) -> None:
        """Let the model write the text of its decoder, with all heads; a text is written once."""
        key = _key(run)
        found = self._written.get(key)
        if found is None:
            with interruptible(model, lambda _: run.reached(Stage.WRITING)):
                found = written(model, run.texts.ids)
            _remember(self._written, key, found)
        run.texts, run.written = run.texts._replace(target=found), text_of(model, found)

    def _make_room(self, newest: Run) -> None:
        """Forget the oldest runs beyond the limits on number and memory."""
        with self._changed:
            ended = [run for run in self._kept.values() if run is not newest and run not in self._waiting]
            for run in ended:
                held = sum(other.memory for other in self._kept.values())
                if len(self._kept) <= self.limits.runs and held <= self.limits.memory:
                    break
                run.stop.set()
                self._forget(run)

    def _forget(self, run: Run) -> None:
        self._kept.pop(run.id, None)
        self._refining.pop(run, None)
        if run in self._waiting:
            self._waiting.remove(run)
            run.stage = Stage.CANCELLED


def query_counts(T: int) -> list[int]:
    """The numbers of queries that successive pages are made from."""
    if T <= LONG:
        return [T]
    return [FIRST, SECOND, T] if T > 2 * SECOND else [FIRST, T]


def _portions(heads: int, weights: int) -> list[slice]:
    """Heads of `weights` weights each, in portions that take a fraction of a second."""
    size = max(1, PORTION // max(1, weights))
    return [slice(start, min(start + size, heads)) for start in range(0, heads, size)]


def log_place(what: str, error: BaseException) -> None:
    """Log that something failed and where, without anything that could quote a text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "an unknown place"
    logging.getLogger("headwise.view.serve").error("%s failed: %s at %s", what, type(error).__name__, place)


def _key(run: Run) -> tuple[str, bytes]:
    """Names a text and a model."""
    given = [None if ids is None else ids.tolist() for ids in run.texts[:2]]
    return run.model, hashlib.sha256(str(given).encode()).digest()


def _remember(known: "OrderedDict[tuple[str, bytes], Any]", key: tuple[str, bytes], value: Any) -> None:
    """Keep a value, and forget the oldest of too many."""
    known[key] = value
    while len(known) > KNOWN:
        known.popitem(last=False)


def _texts(model: TextModel, request: RunRequest) -> RunTexts:
    """What a request asks a model to read, and which part of it to show."""
    part = part_of(model, request.part)
    if request.target and not part:
        raise Refusal(422, "target: this model reads one text, so it has no decoder that could read another.")
    return RunTexts(_ids(model, request), target_of(model, request.target) if request.target else None, part)


def _ids(model: TextModel, request: RunRequest) -> Tensor:
    """The token ids of a request, (1, T)."""
    if request.text is not None:
        return model.tokens(request.text, most=10**9)
    ids = request.ids or ()
    if max(ids) >= vocabulary(model):
        raise OptionError(f"token {max(ids)}: this model has {vocabulary(model):,} tokens, counted from 0.")
    return torch.tensor([ids])


def _note(model: TextModel, length: int) -> str:
    if model.trained is None or length <= model.trained:
        return ""
    return (
        f"This model was trained on texts of {model.trained:,} tokens and this one has {length:,}: beyond the training "
        f"length, its heads are unreliable."
    )
