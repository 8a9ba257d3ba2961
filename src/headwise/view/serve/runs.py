"""All looks of a server: one is worked at, others wait, finished ones are kept and refined while nobody asks."""

import contextlib
import functools
import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headwise.errors import HeadwiseError, OptionError
from headwise.models import TextModel
from headwise.view.serve import run as stages
from headwise.view.serve.models import Models, Outcome, Stopped, check_off, run, vocabulary
from headwise.view.serve.requests import Asked, Limits, Refusal
from headwise.view.serve.run import Look, first_picture, refinements

QUIET = 0.25  # seconds without a question after which refining goes on
KNOWN = 64  # outcomes with all heads that are remembered


class Looks:
    """The looks, and the thread that works at them."""

    def __init__(self, models: Models, limits: Limits) -> None:
        self.models, self.limits = models, limits
        self._kept: OrderedDict[str, Look] = OrderedDict()
        self._waiting: deque[Look] = deque()
        self._refining: list[tuple[Look, Iterator[None]]] = []
        self._outcomes: OrderedDict[tuple[str, bytes], Outcome] = OrderedDict()
        self._changed = threading.Condition()
        self._closing = False
        self._asked_at, self._answering, self._working = 0.0, 0, False
        # Two threads, so that a new look never waits for the refining of an old one.
        works = {"headwise looks": self._work, "headwise refining": self._refine}
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]

    def open(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float = 5.0) -> bool:
        """Stop everything, and wait for it; False where a layer runs on."""
        with self._changed:
            self._closing = True
            for look in self._kept.values():
                look.stop.set()
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def begin(self, asked: Asked) -> Look:
        """Take on a look; it is worked at when its turn comes."""
        name = self.models.name_of(asked.model)
        self._check_queue()
        model = self.models[name]
        ids = _ids(model, asked)
        self._check_length(model, ids.shape[1])
        check_off(model, asked.off)
        look = Look(name, ids, model.pieces(ids), asked.off, asked.maps, _note(model, ids.shape[1]))
        with self._changed:
            self._check_queue()
            self._kept[look.id] = look
            self._waiting.append(look)
            self._changed.notify_all()
        return look

    def _check_queue(self) -> None:
        if len(self._waiting) >= self.limits.waiting:
            raise Refusal(429, f"{self.limits.waiting} looks are waiting already, the limit. Try again later.", after=5)

    def _check_length(self, model: TextModel, length: int) -> None:
        most = self.limits.tokens if model.limit is None else min(self.limits.tokens, model.limit)
        if length > most:
            raise Refusal(413, f"the text is {length:,} tokens long, and the limit is {most:,}. Bring a shorter one.")

    def __getitem__(self, id: str) -> Look:
        with self._changed:
            if id not in self._kept:
                raise Refusal(404, f"there is no such look, or not any more: the last {self.limits.looks} are kept.")
            self._kept.move_to_end(id)
            return self._kept[id]

    def cancel(self, id: str) -> Look:
        """End the work at a look, and forget it."""
        look = self[id]
        look.stop.set()
        with self._changed:
            self._forget(look)
            self._changed.notify_all()
        return look

    # Who waits for a picture comes before refining.

    def __enter__(self) -> None:
        with self._changed:
            self._answering += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._answering -= 1
            self._asked_at = time.monotonic()
            self._changed.notify_all()

    # The threads.

    def _work(self) -> None:
        """Look after look."""
        self._warm_up()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting)
                if self._closing:
                    return
                look = self._waiting.popleft()
                self._working = True
            self._guarded(look, functools.partial(self._look, look))
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _warm_up(self) -> None:
        """Open the first model before somebody waits for it; what is wrong with it is told when it is asked for."""
        with contextlib.suppress(HeadwiseError):
            self.models[self.models.names[0]]

    def _refine(self) -> None:
        """Better pictures of the newest look, a portion at a time, while nobody asks for anything."""
        while (found := self._when_quiet()) is not None:
            look, steps = found
            if not self._guarded(look, functools.partial(next, steps, stages.FINISHED)):
                with self._changed:
                    self._refining = [pair for pair in self._refining if pair[0] is not look]

    def _when_quiet(self) -> tuple[Look, Iterator[None]] | None:
        """What is to be refined, once there is time for it; None when all ends."""
        with self._changed:
            while not self._closing:
                wait = self._asked_at + QUIET - time.monotonic()
                busy = self._working or self._waiting or self._answering or not self._refining
                if not busy and wait <= 0:
                    return self._refining[-1]
                self._changed.wait(None if busy else wait)
            return None

    def _look(self, look: Look) -> None:
        model = self.models[look.model]
        known = self._all_heads(look)
        if look.off and known is None:  # what it is compared with comes first
            _, known = run(model, look.ids, maps=False, told=lambda done: look.reached(stages.RUNNING, done / 2))
            self._remember(look, known)
        begin = 0.5 if look.off and look.with_all_heads is None else 0.0
        look.with_all_heads = known

        def told(done: float) -> None:
            look.reached(stages.RUNNING, begin + (1 - begin) * done)

        look.maps, look.outcome = run(model, look.ids, look.off, maps=look.wants_maps, told=told)
        if not look.off:
            look.with_all_heads = look.outcome
            self._remember(look, look.outcome)
        if look.wants_maps:
            self._make_room(look)
            first_picture(look)
        if look.wants_maps and look.rows < look.T:
            self._begin_refining(look)
        else:
            look.reached(stages.FINISHED, 1.0)

    def _begin_refining(self, look: Look) -> None:
        look.reached(stages.REFINING)
        with self._changed:
            self._refining = [*self._refining, (look, refinements(look))]
            self._changed.notify_all()

    def _guarded(self, look: Look, work: Callable[[], object]) -> bool:
        """Do a piece of work at a look, and note how it ended; whether there is more."""
        try:
            look.reached(look.stage, look.done)
            if work() == stages.FINISHED:
                look.reached(stages.FINISHED, 1.0)
        except Stopped:
            look.stage = stages.CANCELLED
        except HeadwiseError as error:
            look.stage, look.error = stages.FAILED, str(error)
        except Exception as error:
            # The words of an error may hold a part of the text, so only its kind and place are told.
            look.stage, look.error = stages.FAILED, f"an error of headwise itself ({type(error).__name__})."
            tell_place("a look", error)
        return look.stage not in stages.ENDED

    # What is remembered.

    def _all_heads(self, look: Look) -> Outcome | None:
        return self._outcomes.get(_key(look))

    def _remember(self, look: Look, outcome: Outcome) -> None:
        self._outcomes[_key(look)] = outcome
        while len(self._outcomes) > KNOWN:
            self._outcomes.popitem(last=False)

    def _make_room(self, newest: Look) -> None:
        """Forget the oldest looks beyond the number and the memory that may be kept."""
        with self._changed:
            ended = [look for look in self._kept.values() if look is not newest and look not in self._waiting]
            for look in ended:
                held = sum(other.memory for other in self._kept.values())
                if len(self._kept) <= self.limits.looks and held <= self.limits.memory:
                    break
                look.stop.set()
                self._forget(look)

    def _forget(self, look: Look) -> None:
        self._kept.pop(look.id, None)
        self._refining = [pair for pair in self._refining if pair[0] is not look]
        if look in self._waiting:
            self._waiting.remove(look)
            look.stage = stages.CANCELLED


def tell_place(what: str, error: BaseException) -> None:
    """Log that something went wrong and where, and nothing that could hold a part of a text."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else "an unknown place"
    logging.getLogger("headwise.view.serve").error("%s failed: %s at %s", what, type(error).__name__, place)


def _key(look: Look) -> tuple[str, bytes]:
    return look.model, hashlib.sha256(str(look.ids.tolist()).encode()).digest()


def _ids(model: TextModel, asked: Asked) -> Tensor:
    """The tokens of what is asked, (1, T)."""
    if asked.text is not None:
        return model.tokens(asked.text, most=10**9)
    ids = asked.ids or ()
    if max(ids) >= vocabulary(model):
        raise OptionError(f"token {max(ids)}: this model has {vocabulary(model):,}, counted from 0.")
    return torch.tensor([ids])


def _note(model: TextModel, length: int) -> str:
    if model.trained is None or length <= model.trained:
        return ""
    return f"This model was made for {model.trained:,} tokens and reads {length:,}: beyond, it is out of its depth."
