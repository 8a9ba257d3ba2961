"""Work done in forked children, one for each task, so that torch is imported once and no mutant can do harm."""

import json
import os
import resource
import selectors
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MEMORY = 8 * 2**30  # address space of a child
FAILED = "failed"
GRACE = 5.0  # seconds after the alarm before a child is killed


class TooLong(BaseException):
    """Raised by the alarm in a child."""


def forked(work: Callable[[Any], Any], tasks: Iterable[Any], workers: int, seconds: float) -> Iterator[tuple[int, Any]]:
    """The number and the result (JSON) of each task as it comes; None where there was no answer in time."""
    waiting = list(enumerate(tasks))[::-1]
    running: dict[int, tuple[int, int, float]] = {}  # by pipe: task, process, start
    heard: dict[int, bytes] = {}
    ready = selectors.DefaultSelector()
    while waiting or running:
        while waiting and len(running) < workers:
            number, task = waiting.pop()
            pipe, process = _start(work, task, seconds)
            running[pipe], heard[pipe] = (number, process, time.monotonic()), b""
            ready.register(pipe, selectors.EVENT_READ)
        for key, _ in ready.select(0.2):
            data = os.read(key.fd, 1 << 16)
            heard[key.fd] += data
            if not data:
                number, process, _ = running.pop(key.fd)
                ready.unregister(key.fd)
                os.close(key.fd)
                os.waitpid(process, 0)
                yield number, json.loads(heard.pop(key.fd) or "null")
        for _, process, start in running.values():
            if time.monotonic() - start > seconds + GRACE:
                os.kill(process, signal.SIGKILL)


def _start(work: Callable[[Any], Any], task: Any, seconds: float) -> tuple[int, int]:
    """A child at work: the pipe that its answer comes from, and its number."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # newer Pythons warn of threads; a child computes in one of its own
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        os.close(writing)
        return reading, process
    try:
        os.close(reading)
        _limit(seconds)
        answer = json.dumps(_answer(work, task)).encode()
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)  # without the parent's exit handlers


def _answer(work: Callable[[Any], Any], task: Any) -> Any:
    """The result of a task, None if it took too long, or a word about its failure."""
    try:
        return work(task)
    except TooLong:
        return None
    except Exception as error:
        step = traceback.extract_tb(error.__traceback__)[-1]
        return {FAILED: f"{type(error).__name__}: {error} ({Path(step.filename).name}, line {step.lineno})"}


def _limit(seconds: float) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, _raise_too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _raise_too_long(*_: Any) -> None:
    raise TooLong
