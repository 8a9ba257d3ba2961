"""Candidates over lengths: each is judged before it is timed, and leaves where it is wrong, too slow or too large."""

import dataclasses
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from headwise.cli.bench.machine import free_bytes
from headwise.cli.bench.measuring import Verdict, interleaved, tensor_peak, timed
from headwise.cli.bench.peers.peer import said
from headwise.learn.cost import human

ROUNDS, LEAST = 200, 3  # rounds of every candidate, at most and at least


class Trial(NamedTuple):
    """A candidate at one length: what is timed, and what judges its result."""

    run: Callable[[], object]
    judge: Callable[[], Verdict]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Something that can be run at any length.

    Args:
        name: what tables call it.
        trial: makes it ready for so many tokens.
        needs: bytes it is expected to take there.
        refuses: why it cannot be measured at all, if so.
    """

    name: str
    trial: Callable[[int], Trial]
    needs: Callable[[int], int] = lambda _tokens: 0
    refuses: str | None = None


class Effort(NamedTuple):
    """How much time may be spent, and whether anybody wants to hear of it."""

    seconds: float = 1.5  # on the rounds of one length
    limit: float = 1.5  # on one run of one candidate
    quiet: bool = False

    def tell(self, text: str) -> None:
        """Progress, to standard error."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)


class Found(NamedTuple):
    """Rows of what was measured, and who was left out, from which length on and why."""

    rows: list[dict[str, Any]]
    left_out: list[dict[str, Any]]


def sweep(candidates: Sequence[Candidate], lengths: Sequence[int], device: str, effort: Effort) -> Found:
    """Every candidate at every length, shortest first; who is left out stays out."""
    found = Found([], [{"name": c.name, "tokens": None, "why": c.refuses} for c in candidates if c.refuses is not None])
    inside = [c for c in candidates if c.refuses is None]
    for tokens in sorted(lengths):
        effort.tell(f"T={tokens}, candidates: {len(inside)}")
        trials: dict[str, Trial] = {}
        rows: dict[str, dict[str, Any]] = {}
        for candidate in list(inside):
            ready = _admitted(candidate, tokens, device, effort)
            if isinstance(ready, str):
                effort.tell(f"  {candidate.name}: {ready}")
                found.left_out.append({"name": candidate.name, "tokens": tokens, "why": ready})
                inside.remove(candidate)
            else:
                trials[candidate.name], rows[candidate.name] = ready
        runs = {name: trial.run for name, trial in trials.items()}
        times = interleaved(runs, device, ROUNDS, effort.seconds, least=LEAST, warm=0)
        found.rows.extend({"name": name, "tokens": tokens, **times[name], **row} for name, row in rows.items())
        _clear(device)
    return found


def _admitted(
    candidate: Candidate, tokens: int, device: str, effort: Effort
) -> tuple[Trial, dict[str, float | None]] | str:
    """The candidate made ready, with its error and its memory; or why it is left out."""
    needed, free = candidate.needs(tokens), free_bytes(device)
    if needed > free:
        return f"would take {human(needed, 'B', binary=True)}, and {human(free, 'B', binary=True)} are free"
    try:
        trial = candidate.trial(tokens)
        verdict = trial.judge()
        if verdict.wrong is not None:
            return verdict.wrong
        trial.run()
        took = timed(trial.run, device) / 1e3
        if took > effort.limit:  # once more, in case something else was in the way
            took = min(took, timed(trial.run, device) / 1e3)
        if took > effort.limit:
            return f"one run takes {took:.2g} s, the limit is {effort.limit:g} s"
        return trial, {"error": verdict.error, "MiB": tensor_peak(trial.run, device)}
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # noqa: BLE001, RUF100 - a peer may fail as it likes; the others go on
        return f"fails: {said(error)}"
    finally:
        _clear(device)


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
