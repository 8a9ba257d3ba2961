"""Where else it runs: half precision, other devices, the meta device, compiled, beyond a stored mask."""

import contextlib
import copy
import importlib
import re
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headwise.check.arguments import WINDOW, parameters_of
from headwise.check.binding import Bound, stored_lengths
from headwise.check.calls import PLAIN, Inputs, make_inputs
from headwise.check.code.names import globals_read
from headwise.check.environment import double_by_default, quiet
from headwise.check.faults.mask_meaning import measured
from headwise.check.faults.questions import listed
from headwise.check.faults.stages import stage_findings
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import signature
from headwise.check.reading import AttentionReading, pattern, read
from headwise.check.trace import error_line, is_deliberate, learner_line
from headwise.check.vocabulary import plain

COMPILING = 6.0  # seconds of processor time
DYNAMO = "torch._dynamo"
HALF = re.compile(r"half|b?float16|\bb?fp?16\b|mixed precision", re.IGNORECASE)
FLOAT16 = re.compile(r"(?<!b)(float16|fp16)\b|\bhalf[- ]precision", re.IGNORECASE)
BEYOND = 3  # tokens more than a stored mask holds


def unsliced_buffer(bound: Bound, reading: AttentionReading | None) -> Found:
    """A stored mask must be sliced to the length of the input."""
    names = ["the size of a stored mask"] if bound.length_fitted else bound.built.fixed_context(bound.sizes.T)
    if not names:
        return
    window = all(WINDOW.search(plain(name)) for name in names)
    if (reading is None or reading.pattern == "full") and (window or not stage_findings(bound, reading)):
        yield Note("variant", "it takes inputs of one length only")  # a table of positions, not a mask
        return
    if (outside := _length_from_outside(bound)) is not None:
        yield outside
        return
    words = f"it runs only when {names[0]} equals the length of the input"
    yield Finding("buffer-not-sliced", words, _line_at_another_length(bound))


def _length_from_outside(bound: Bound) -> Finding | None:
    """A variable of the module that stands for the length: with another value of it, another length runs."""
    space, T = bound.case.namespace, bound.sizes.T
    read = {n: line for n, line in globals_read(bound.case.target).items() if type(space.get(n)) is int}
    for name in (n for n in read if space[n] == T):
        if not _runs_with(bound, name, T - 1):  # the length has another cause
            continue
        beside = [n for n, line in read.items() if line == read[name]]
        verb = "are" if len(beside) > 1 else "is"
        words = f"{listed(beside)} {verb} set outside the class; it runs only for as many tokens as {name} says"
        return Finding("reads-globals", words, read[name])
    return None


def _runs_with(bound: Bound, name: str, T: int) -> bool:
    """Whether another length runs as soon as a variable of the module has that value."""
    space = bound.case.namespace
    kept, space[name] = space[name], T
    with contextlib.suppress(Exception):  # anything can be raised by a learner's code
        bound.of_length(T)
        space[name] = kept
        return True
    space[name] = kept
    return False


def _line_at_another_length(bound: Bound) -> int | None:
    """The line that raises with one token less, or else that of the first attempt that failed."""
    try:
        bound.of_length(bound.sizes.T - 1)
    except Exception as error:
        return error_line(error, bound.case.filename)
    failed = (f for f in bound.failures if f.called is not None and isinstance(f.error, RuntimeError))
    return next((f.line for f in failed if f.line is not None), None)


def half_precision(bound: Bound, reading: AttentionReading | None, masks: dict[str, Tensor] | None = None) -> Found:
    """It must run in float16."""
    if not isinstance(bound.thing, nn.Module):
        return
    try:
        half = copy.deepcopy(bound.thing).half()
        with quiet(), torch.no_grad():
            bound.form.call(half, Inputs(*(x.half() for x in bound.inputs)), masks)
    except Exception as error:
        line, words = error_line(error, bound.case.filename), str(error)
        if "overflow" in words:
            severity = "wrong" if _is_made_half(bound) or _promises_half(bound, FLOAT16) else ""
            filled = re.search(r"fill|where|full|mask", bound.case.text(line)) is not None
            words = "the largest float16 is 65504"
            yield Finding("half-fill" if filled else "half-fails", words, line, severity=severity)
        elif "dtype" in words or "Half" in words or "same type" in words:
            severity = "wrong" if masks is None and (_promises_half(bound) or _is_made_half(bound)) else ""
            yield Finding("half-fails", words.splitlines()[0][:120], line, severity=severity)


def _is_made_half(bound: Bound) -> bool:
    """Whether its weights are in half precision as the constructor makes them."""
    with contextlib.suppress(Exception):  # it needs what only our environment gives
        return any(p.dtype == torch.float16 for p in bound.built.make().parameters())
    return False


def _promises_half(bound: Bound, said: re.Pattern[str] = HALF) -> bool:
    """Whether the docstring or the name of the class says that it is made for half precision."""
    target = bound.case.target
    words = f"{getattr(target, '__name__', '')} {vars(target).get('__doc__') if isinstance(target, type) else ''}"
    return said.search(words) is not None


def unregistered_state(bound: Bound, reading: AttentionReading | None) -> Found:
    """Tensors and layers must be registered with the module."""
    if not isinstance(bound.thing, nn.Module):
        return
    made = _never_called(bound)
    held = [*_held(made)]
    plain = [name for name, part in held if isinstance(part, Tensor) and not isinstance(part, nn.Parameter)]
    known = {id(parameter) for parameter in made.parameters()}
    lists = [name for name, part in held if isinstance(part, list) and any(_is_lost(layer, known) for layer in part)]
    if lists:
        yield Finding("layers-in-list", ", ".join(lists), bound.case.line_of_attribute(lists[0]))
    elif plain and (loose := _random(bound, plain)):
        yield Finding("weights-unregistered", ", ".join(loose[:3]), bound.case.line_of_attribute(loose[0]))
    elif plain:
        stuck = not any("device" in p.name for p in parameters_of(bound.case.target)) and not _can_move(bound)
        severity, line = "wrong" if stuck else "fragile", bound.case.line_of_attribute(plain[0])
        yield Finding("not-a-buffer", ", ".join(plain[:3]), line, severity=severity)


def _is_lost(layer: Any, known: set[int]) -> bool:
    """Whether this is a layer whose parameters are not among these."""
    return isinstance(layer, nn.Module) and not known.issuperset(id(p) for p in layer.parameters())


def _random(bound: Bound, names: list[str]) -> list[str]:
    """The matrices among these that are random: two new objects hold different ones."""
    first, second = (dict(_held(_never_called(bound))) for _ in range(2))
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return [n for n, (a, b) in pairs.items() if a is not None and b is not None and a.dim() > 1 and not a.equal(b)]


def _held(thing: nn.Module) -> Iterator[tuple[str, Any]]:
    """Everything in the attributes of a module and of those inside, by name."""
    for path, module in thing.named_modules():
        yield from ((f"{path}.{k}".strip("."), part) for k, part in vars(module).items() if not k.startswith("_"))


def _never_called(bound: Bound) -> nn.Module:
    """A second object that was never called: what a call stores for later inspection is not part of its state."""
    with contextlib.suppress(Exception):
        made = bound.built.make()
        if isinstance(made, nn.Module):
            return made
    return bound.thing  # type: ignore[no-any-return]


def _can_move(bound: Bound) -> bool:
    """Whether a call works after `.to(device)`; the meta device stands for any other."""
    try:
        moved = copy.deepcopy(bound.thing).to("meta")
        with quiet(), torch.no_grad(), without_dynamo():
            bound.form.call(moved, Inputs(*(x.to("meta") for x in bound.inputs)))
    except Exception as error:
        return "device" not in str(error)
    return True


# These run only if nothing else is wrong.


def beyond_buffer(bound: Bound, reading: AttentionReading | None) -> Found:
    """An input longer than a stored mask must be handled or rejected, not silently cut off."""
    lengths = [n for n in stored_lengths(bound.thing, bound.sizes) if n >= bound.sizes.context]
    if bound.form.fixed_tensor or bound.form.layout != PLAIN or not lengths:
        return
    if reading is None or reading.scores is None:
        return
    T = lengths[-1] + BEYOND
    sizes = replace(bound.sizes, T=T, S=T)
    try:
        longer = bound.called(sizes=sizes, inputs=make_inputs(bound.form, sizes))
    except Exception as error:
        if not isinstance(error, AssertionError) and not is_deliberate(error):
            words = f"{T} tokens, a stored mask of {lengths[-1]}: {type(error).__name__}"
            yield Finding("beyond-buffer", words, error_line(error, bound.case.filename))
        return
    seen, before = read(longer), pattern(reading.scores.visible)
    if longer.output is None or seen is None or seen.scores is None or pattern(seen.scores.visible) == before:
        return
    words = f"at {T} tokens, a stored mask of {lengths[-1]}: a token no longer sees what it should ({before})"
    yield Finding("beyond-buffer", words)


def meta_device(bound: Bound, reading: AttentionReading | None) -> Found:
    """It must be possible to build and call it without memory, as large models are planned."""
    if not isinstance(bound.thing, nn.Module) or not isinstance(bound.case.target, type):
        return
    inputs = Inputs(*(x.to("meta", torch.float32) for x in bound.inputs))
    step = "built"
    try:
        with quiet(), torch.no_grad(), torch.device("meta"), without_dynamo():
            thing = bound.built.make()
            step = "called"
            bound.form.call(thing, inputs)
    except Exception as error:
        words = str(error).splitlines()[0][:120] if str(error) else ""
        words = f"when it is {step}: {type(error).__name__}: {words}"
        yield Finding("meta-fails", words, error_line(error, bound.case.filename))


def other_device(bound: Bound, reading: AttentionReading | None) -> Found:
    """Tensors that a call makes must be on the device of the input; the meta device stands for any other."""
    if not isinstance(bound.thing, nn.Module) or bound.repaired.lines:
        return
    moved = copy.deepcopy(bound.thing).to("meta")
    for given in _device_calls(bound, reading):
        devices = TwoDevices(bound.case.filename)
        with contextlib.suppress(Exception), quiet(), torch.no_grad(), double_by_default(), without_dynamo(), devices:
            on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.items()}
            bound.form.call(moved, Inputs(*(x.to("meta") for x in bound.inputs)), on_meta)
        if devices.line is not None:
            words = f"line {devices.used} then computes with it" if devices.used != devices.line else ""
            yield Finding("device-fixed", words, devices.line)
            return


def _device_calls(bound: Bound, reading: AttentionReading | None) -> Iterator[dict[str, Any]]:
    """A plain call, one with every flag, and one with every mask that is understood."""
    yield {}
    yield from ({p.name: True} for p in signature(bound.thing) if p.default is False)
    for argument in measured(bound, reading):
        tried = argument.first(argument.meaning) if argument.meaning else None
        if tried is not None:
            yield {argument.name: tried.mask}


class TwoDevices(TorchDispatchMode):
    """Notes the first operation that computes with tensors of two devices, and where the one on the CPU was made.

    A single number may be anywhere, and so may the indices of `x[index]`; copies are there to change the device.
    """

    ALLOWED = ("copy_", "_to_copy", "index", "index_put_", "index_put", "_unsafe_index", "_index_put_impl_")

    def __init__(self, filename: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.filename = filename
        self.line: int | None = None
        self.used: int | None = None
        self._made: dict[int, int | None] = {}
        self._kept: list[Tensor] = []  # an id is unique only while its object lives

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, as for `Trace`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves([args, kwargs or {}]) if isinstance(leaf, Tensor)]
        here = [t for t in given if t.device.type == "cpu"]
        placed = [t for t in here if t.dim() and id(t) in self._made]
        mixed = len(here) < len(given) and func.overloadpacket.__name__ not in self.ALLOWED
        if placed and mixed and self.line is None:
            self.line, self.used = self._made[id(placed[0])], learner_line(self.filename)
        result = func(*args, **(kwargs or {}))
        made = next((self._made[id(t)] for t in here if id(t) in self._made), None) or learner_line(self.filename)
        for out in tree_leaves(result):
            if isinstance(out, Tensor) and out.device.type == "cpu" and (placed or not given):
                self._made[id(out)] = made
                self._kept.append(out)
        return result


def compilation(bound: Bound, reading: AttentionReading | None) -> Found:
    """`torch.compile` must take it as one graph and give the same result."""
    stands_in = bound.case.loaded is not None and bool(bound.case.loaded.finder.missing)  # ours may not compile
    if not bound.case.thorough or stands_in or not isinstance(bound.thing, nn.Module) or bound.repaired.lines:
        return
    thing = copy.deepcopy(bound.thing)
    try:
        with quiet(), torch.no_grad(), double_by_default(), _time_limit(COMPILING):
            thing.compile(backend="eager", fullgraph=True)
            output = bound.form.result(bound.form.call(thing, bound.inputs), bound.inputs)
    except TimeoutError:
        return
    except Exception as error:
        words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        words = f"{type(error).__name__}: {words[:140]}"
        yield Finding("compile-fails", words, error_line(error, bound.case.filename))
        return
    finally:
        torch.compiler.reset()
    expected = bound.output
    if output is not None and expected is not None and not same(output.nan_to_num(), expected.nan_to_num(), 1e-6):
        yield Finding("compile-fails", "the compiled module gives another result")


class LateDynamo(ModuleType):
    """Stands for `torch._dynamo`, which takes a second to import, until more than `disable` is asked of it."""

    def __init__(self) -> None:
        super().__init__(DYNAMO)
        self.asked: list[Any] = []

    def disable(self, function: Any, *args: Any, **options: Any) -> Any:
        """The function itself: nothing is being compiled."""
        self.asked.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(DYNAMO) is self:
            del sys.modules[DYNAMO]
        return getattr(importlib.import_module(DYNAMO), name)


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Operations on the meta device ask torch to import its compiler, only to keep it away from them. They need not."""
    if DYNAMO in sys.modules:
        yield
        return
    stand_in = sys.modules[DYNAMO] = LateDynamo()
    torch._dynamo = stand_in
    try:
        yield
    finally:
        if sys.modules.get(DYNAMO) is stand_in:
            del sys.modules[DYNAMO], torch._dynamo
        for function in stand_in.asked:
            vars(function).pop("__dynamo_disable", None)  # where torch keeps the answer


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError after so much processor time; has no effect outside the main thread."""
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
