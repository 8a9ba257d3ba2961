"""How fast it is beside the fused layer, measured so that a busy machine makes nobody slow.

Both run in float32, in evaluation mode and without gradients, with the same causality and no mask. They take turns. In
every round each is timed with cold caches and then warm, and its best time must be much slower than the other's worst.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, Inputs, make_inputs
from headwise.check.code.names import names_used
from headwise.check.environment import quiet
from headwise.check.mistakes import Finding, Found
from headwise.check.objects import modules
from headwise.check.reading import AttentionReading

TIMED = 512  # tokens
ROUNDS = 5
WARM = 3  # calls in a round after the cold one
SLOWER = 2.5  # times as slow as the fused layer, in every round
NOISY = 0.6  # spread of the fused layer's own times, in parts of their median, from which on nothing is said
SCRATCH = 4 * 2**20  # numbers written to make the caches cold: 16 MiB
CONTEXTS = ("block_size", "context_length", "max_seq_len", "n_positions", "max_position_embeddings", "n_ctx")
CAUSAL = {"full": False, "causal": True}


class Times(NamedTuple):
    """Seconds that one party took in one round."""

    cold: float
    warm: list[float]


class Comparison(NamedTuple):
    """How many times as slow it is in the median, and at both ends of the spread over all rounds."""

    factor: float
    least: float
    most: float


def slower_than_fused(bound: Bound, reading: AttentionReading | None) -> Found:
    """A longer input should not take much more time than in the fused layer of the same size."""
    pattern = "" if reading is None else reading.pattern
    asked = bound.case.thorough and not bound.form.fixed_tensor and bound.form.layout == PLAIN
    if not asked or pattern not in CAUSAL or bound.repaired.lines:
        return
    try:
        with quiet(), torch.no_grad():
            found = compared(*_parties(bound, CAUSAL[pattern]))
    except Exception:  # anything can be raised by a learner's code; other faults have tried longer inputs
        return
    if found is None:
        return
    words = f"about {found.factor:.1f}× the time of the fused layer at {TIMED} tokens"
    words += f" ({found.least:.1f}× to {found.most:.1f}× in {ROUNDS} rounds, cold and warm)"
    if "scaled_dot_product_attention" not in names_used(bound.case.target):
        words += f"; the matrix of weights takes {2 * bound.sizes.H * TIMED**2 * 4 / 2**20:.0f} MiB"
    yield Finding("slow", words)


def _parties(bound: Bound, causal: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    """One call of theirs and one of the fused layer, with the same input."""
    from headwise.layer import MultiHeadAttention

    contexts = CONTEXTS if bound.built.config is not None else bound.built.names_with_role("context")
    thing = _with_context(bound, dict.fromkeys(contexts, TIMED))
    made = make_inputs(bound.form, replace(bound.sizes, B=2, T=TIMED, S=TIMED), dtype=torch.float32)
    inputs = Inputs(*(x.float() for x in made))
    fused = MultiHeadAttention(bound.sizes.E, bound.sizes.H, causal=causal, dtype=torch.float32).eval()
    return lambda: bound.form.call(thing, inputs), lambda: fused(inputs.query)


def _with_context(bound: Bound, contexts: dict[str, int]) -> Any:
    """The object in float32, made for a longer context where its constructor has one."""
    if contexts and isinstance(bound.case.target, type):
        thing = bound.built.remake(bound.case.target, bound.sizes, contexts)
    else:
        thing = copy.deepcopy(bound.thing)
    for module in modules(thing):
        module.float().eval()
    return thing


def compared(theirs: Callable[[], object], fused: Callable[[], object]) -> Comparison | None:
    """How much slower theirs is; None if a single round does not show it, or if the machine is too busy to tell."""
    theirs(), fused()  # what only a first call costs is not counted
    rounds: list[tuple[Times, Times]] = []
    for number in range(ROUNDS):
        if number % 2:
            ours, slow = timed(fused), timed(theirs)
        else:
            slow, ours = timed(theirs), timed(fused)
        rounds.append((slow, ours))
        if least_factor(slow, ours) < SLOWER:
            return None
    if is_noisy([seconds for _, ours in rounds for seconds in ours.warm]):
        return None
    warm = [median(slow.warm) / median(ours.warm) for slow, ours in rounds]
    most = max(max(slow.warm) / min(ours.warm) for slow, ours in rounds)
    return Comparison(median(warm), min(least_factor(*pair) for pair in rounds), most)


def least_factor(theirs: Times, fused: Times) -> float:
    """The lower end of how many times as slow it was in one round: its best time beside the worst of the other."""
    return min(theirs.cold / fused.cold, min(theirs.warm) / max(fused.warm))


def is_noisy(seconds: list[float]) -> bool:
    """Whether the same work took too many different times for a comparison."""
    return (max(seconds) - min(seconds)) > NOISY * median(seconds)


def timed(run: Callable[[], object]) -> Times:
    """The times of one call with cold caches and of some more."""
    torch.ones(SCRATCH)
    cold, *warm = [_seconds(run) for _ in range(1 + WARM)]
    return Times(cold, warm)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
