"""Questions asked of what is right: does it compile as one graph, run on the meta device, and outgrow a stored mask?"""

import contextlib
import copy
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise.check.binding import stored_lengths
from headwise.check.bound import Bound, double_by_default, quiet
from headwise.check.calling import Inputs, make_inputs
from headwise.check.findings import Finding
from headwise.check.fits import same
from headwise.check.patterns import pattern
from headwise.check.reading import read
from headwise.check.repairs import error_line, on_purpose
from headwise.check.stages import Reading

COMPILING = 6.0  # seconds of processor time
BEYOND = 3  # tokens more than a stored mask holds


def compiled(bound: Bound) -> list[Finding]:
    """`torch.compile` takes it as one graph and gives the same result."""
    if not isinstance(bound.thing, nn.Module) or bound.repaired.lines:
        return []
    thing = copy.deepcopy(bound.thing)
    try:
        with quiet(), torch.no_grad(), double_by_default(), _bounded(COMPILING):
            thing.compile(backend="eager", fullgraph=True)
            output = bound.form.result(bound.form.call(thing, bound.inputs), bound.inputs)
    except TimeoutError:
        return []
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return [Finding("compile-fails", f"{type(error).__name__}: {words[:140]}", error_line(error, bound.filename))]
    finally:
        torch.compiler.reset()
    expected = bound.output
    if output is not None and expected is not None and not same(output.nan_to_num(), expected.nan_to_num(), 1e-6):
        return [Finding("compile-fails", "the compiled module gives another result")]
    return []


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """A TimeoutError after so much processor time; without a limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def on_meta(bound: Bound) -> list[Finding]:
    """Made and called without memory, as large models are planned."""
    if not isinstance(bound.thing, nn.Module) or not isinstance(bound.target, type):
        return []
    inputs = Inputs(*(x.to("meta", torch.float32) for x in bound.inputs))
    step = "made"
    try:
        with quiet(), torch.no_grad(), torch.device("meta"):
            thing = bound.built.make()
            step = "called"
            bound.form.call(thing, inputs)
    except Exception as error:
        words = str(error).splitlines()[0][:120] if str(error) else ""
        line = error_line(error, bound.filename)
        return [Finding("meta-fails", f"when it is {step}: {type(error).__name__}: {words}", line)]
    return []


def beyond_the_buffer(bound: Bound, reading: Reading) -> list[Finding]:
    """An input longer than a stored mask: refused in words, or handled, and not cut in silence."""
    lengths = [n for n in stored_lengths(bound.thing, bound.sizes) if n >= bound.sizes.context]
    if bound.form.fixed_tensor or bound.form.layout != "batch first" or not lengths or reading.scores is None:
        return []
    T = lengths[-1] + BEYOND
    longer = replace(bound, sizes=replace(bound.sizes, T=T, S=T))
    longer.inputs = make_inputs(longer.form, longer.sizes)
    try:
        returned, longer.trace = longer.traced(longer.inputs)
    except Exception as error:
        if isinstance(error, AssertionError) or on_purpose(error):
            return []
        words = f"{T} tokens, a stored mask of {lengths[-1]}: {type(error).__name__}"
        return [Finding("beyond-buffer", words, error_line(error, bound.filename))]
    longer.output = longer.form.result(returned, longer.inputs)
    seen = read(longer)
    before = pattern(reading.scores.visible)
    if longer.output is None or seen is None or seen.scores is None or pattern(seen.scores.visible) == before:
        return []
    words = f"at {T} tokens, a stored mask of {lengths[-1]}: a token no longer sees what it should ({before})"
    return [Finding("beyond-buffer", words)]
