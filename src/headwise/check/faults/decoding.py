"""Decoding in steps: a cache that grows over several calls, and state that one call leaves to the next."""

import contextlib
import copy
import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from headwise.check.arguments import parameters_of
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, Inputs, leaves
from headwise.check.environment import forget, mutable_defaults, restored_defaults
from headwise.check.faults.mask_meaning import is_boolean
from headwise.check.faults.options import (
    POSITION,
    cache_arguments,
    cache_candidates,
    is_position,
    is_stacked,
    optional_arguments,
)
from headwise.check.faults.parts import odd_line
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import signature
from headwise.check.reading import AttentionReading
from headwise.check.trace import Trace, error_line
from headwise.check.vocabulary import plain

FEW = 2  # samples
STEP = re.compile(r"^(step|decode(step|one|token)?|forwardstep|onestep|nexttoken|infer(step)?|stepforward)$")
CACHED = re.compile(r"cache|decod|increment")
RESET = re.compile(r"^(reset|clear|empty|init)\w*(cache|state|memory)?$")


def extended_cache(bound: Bound, reading: AttentionReading | None) -> Found:
    """A cache that was extended by one call must serve the next one as well."""
    names = cache_arguments(bound)
    flags = {p.name: True for p in optional_arguments(bound) if is_boolean(p) and "cache" in plain(p.name)}
    if len(names) != 1 or bound.output is None or bound.case.never_reads(names[0]):
        return
    if "memory" in bound.form.roles.values():
        return  # a memory is not extended
    T = bound.sizes.T
    for first in _caches(_returned(bound, slice(0, T - 2), flags), T - 2):
        given = flags | {names[0]: first}
        second = _returned(bound, slice(T - 2, T - 1), given)
        kept = next((cache for held in (T - 1, 1) for cache in _caches(second, held)), None)  # 1: only the new token
        if kept is not None:
            yield from _last_token(bound, flags | {names[0]: kept})
            return


def _returned(bound: Bound, part: slice, given: dict[str, Any]) -> Any:
    """What a call with some of the tokens returns; None where it raises: the protocol is another one."""
    try:
        return bound.call(Inputs(*(x[:, part] for x in bound.inputs)), given)
    except Exception:
        return None


def _caches(returned: Any, length: int) -> Iterator[Any]:
    """Parts of what was returned that hold keys and values of exactly this many tokens."""
    for part in cache_candidates(returned, length):
        held = [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]
        if (len(held) == 2 or is_stacked(part)) and all(leaf.dim() >= 3 for leaf in held):
            yield part


def _last_token(bound: Bound, given: dict[str, Any]) -> Found:
    """The last token with a cache that was extended once, compared with the call that had all tokens."""
    whole, last = bound.output, Inputs(*(x[:, -1:] for x in bound.inputs))
    assert whole is not None  # noqa: S101 - the caller has asked
    try:
        out = bound.form.result(bound.call(last, given), last)
    except Exception as error:
        words = f"with a cache that was extended once: {type(error).__name__}: {error}".splitlines()[0][:200]
        yield Finding("cache-differs", words, error_line(error, bound.case.filename))
        return
    if out is not None and same(out, whole[:, -1:]):
        yield Note("good", "a cache that was extended twice")
    elif out is not None:
        gap = float((out - whole[:, -1:]).abs().max())
        words = f"with a cache that was extended once, the next token differs by up to {gap:.3g}"
        yield Finding("cache-differs", words, bound.case.packing_line())


def positioned_cache(bound: Bound, reading: AttentionReading | None) -> Found:
    """With a cache inside and the position of the first token as an argument, steps must give what one call gives."""
    names = [p.name for p in signature(bound.thing) if is_position(p)]
    names += [n for n, value in bound.form.fixed.items() if POSITION.fullmatch(plain(n)) and type(value) is int]
    if not names or bound.output is None or bound.form.layout != PLAIN:
        return
    if _is_relative(bound, names[0]):
        yield Note("good", f"{names[0]}: only distances count")
        return
    cut, thing = bound.sizes.T - 1, copy.deepcopy(bound.thing)
    few = bound.inputs.of_samples(FEW)  # a cache that was made in advance may have room for a few samples only
    first, last = (Inputs(*(x[:, part] for x in few)) for part in (slice(0, cut), slice(cut, None)))
    bound.output_of(first, {names[0]: 0}, thing)
    try:
        other = bound.called({names[0]: cut}, thing=thing, inputs=last)
    except Exception as error:
        yield Note("untried", f"{names[0]}={cut}: {type(error).__name__}: {error}".splitlines()[0][:160])
        return
    whole, alone = bound.output[:FEW, cut:], bound.output_of(last)
    if other.output is None or (alone is not None and same(other.output, alone)):
        yield Note("untried", f"the argument {names[0]}")
    elif same(other.output, whole):
        yield Note("good", f"{names[0]}: same result token by token")
    else:
        gap = float((other.output - whole).abs().nan_to_num().max())
        words = f"after {cut} tokens, with {names[0]}={cut}, the next one differs by up to {gap:.3g}"
        line = odd_line(bound.trace, other.trace, range(cut, cut + 1), cut + 1)
        yield Finding("cache-differs", words, line)


def _is_relative(bound: Bound, name: str) -> bool:
    """Whether another first position changes the steps of a call and not its result, as with rotary positions."""
    try:
        moved = bound.called({name: 3}, thing=copy.deepcopy(bound.thing))
    except Exception:  # it takes another value
        return False
    steps = zip(bound.trace.nodes, moved.trace.nodes, strict=False)
    changed = any(a.value.shape == b.value.shape and not torch.equal(a.value, b.value) for a, b in steps)
    return changed and bound.gives(moved.output)


def stepwise(bound: Bound, reading: AttentionReading | None) -> Found:
    """A method that takes one token after another must give what forward gives for all of them."""
    if reading is None or reading.pattern != "causal" or not isinstance(bound.thing, nn.Module):
        return
    for name, method in vars(type(bound.thing)).items():
        if not STEP.search(plain(name)) or name.startswith("__") or not inspect.isfunction(method):
            continue
        free = [p for p in list(inspect.signature(method).parameters.values())[1:] if p.default is p.empty]
        if len(free) == 1:
            yield from _stepped(bound, name)


def pieces(bound: Bound, reading: AttentionReading | None) -> Found:
    """An object that remembers earlier calls until it is reset must give for pieces what it gives for the whole."""
    form, whole = bound.form, bound.output
    switched = [p.name for p in parameters_of(bound.case.target) if _is_cache_switch(p)]
    thing = bound.rebuilt(**dict.fromkeys(switched, True)) if switched else copy.deepcopy(bound.thing)
    if switched and isinstance(bound.thing, nn.Module):
        thing.load_state_dict(bound.thing.state_dict(), strict=False)
    if whole is None or bound.sizes.T < 4 or not forget(thing):
        return
    form = replace(form, fixed=form.fixed | {p.name: True for p in signature(thing) if _is_cache_switch(p)})
    T, outputs, trace = bound.sizes.T, [], Trace(bound.case.filename)
    cuts = (slice(0, T - 2), slice(T - 2, T - 1), slice(T - 1, T))  # the second piece shows what the first one left
    for part in cuts:
        trace = Trace(bound.case.filename)
        inputs = Inputs(*(x[:, part] for x in bound.inputs))
        try:
            with bound.running(), torch.no_grad(), trace:
                outputs.append(form.result(form.unguarded(thing, inputs.copied()), inputs))
        except Exception as error:
            words = f"in pieces, without a reset in between: {type(error).__name__}: {error}".splitlines()[0][:200]
            yield Finding("cache-differs", words, error_line(error, bound.case.filename))
            return
    alone = [bound.output_of(Inputs(*(x[:, part] for x in bound.inputs))) for part in cuts]
    if all(a is not None and b is not None and same(a, b) for a, b in zip(alone, outputs, strict=True)):
        return  # nothing is remembered in evaluation mode
    wrong = [p for p, out in zip(cuts, outputs, strict=True) if out is None or not same(out, whole[:, p])]
    if not wrong:
        yield Note("good", "in pieces: same result")
        return
    words = f"tokens given piece by piece get another result than together, from token {wrong[0].start} on"
    yield Finding("cache-differs", words, bound.case.line_of_state())


def _is_cache_switch(p: inspect.Parameter) -> bool:
    """Whether an argument of a constructor or call switches a cache on."""
    return p.default is False and CACHED.search(plain(p.name)) is not None


def _stepped(bound: Bound, name: str) -> Found:
    thing, whole = copy.deepcopy(bound.thing), bound.output
    for other in (other for other in vars(type(thing)) if RESET.search(plain(other))):
        with contextlib.suppress(Exception):  # it takes arguments
            getattr(thing, other)()
    outputs, trace = [], Trace(bound.case.filename)
    for token in range(bound.sizes.T):
        trace = Trace(bound.case.filename)
        try:
            with bound.running(), torch.no_grad(), trace:
                returned = getattr(thing, name)(bound.inputs.query[:, token : token + 1].clone())
        except Exception as error:
            yield Note("untried", f"{name}(one token): {type(error).__name__}: {error}".splitlines()[0][:160])
            return
        outputs.append(next(iter(leaves(returned)), torch.empty(0)))
    one = whole is not None and all(out.shape == whole[:, :1].shape for out in outputs)
    if not one or whole is None:
        yield Note("untried", f"what {name} returns")
        return
    wrong = [t for t, out in enumerate(outputs) if not same(out, whole[:, t : t + 1])]
    if not wrong:
        yield Note("good", f"{name}: same result token by token")
        return
    gap = float((outputs[wrong[0]] - whole[:, wrong[0] : wrong[0] + 1]).abs().nan_to_num().max())
    words = f"{name} gives token {wrong[0]} another result than forward, by up to {gap:.3g}"
    line = next((n.outermost for n in trace.softmax_nodes()), None)
    yield Finding("cache-differs", words, line or trace.last_line())


def changed_defaults(bound: Bound, reading: AttentionReading | None) -> Found:
    """A list or dictionary that is the default of an argument must not be changed by a call: all calls share it."""
    defaults = mutable_defaults(bound.thing)
    before = {name: copy.copy(default) for name, default in defaults.items()}
    with contextlib.suppress(Exception), restored_defaults(bound.thing), bound.running(), torch.no_grad():
        bound.form.unguarded(bound.thing, bound.inputs.copied())
        changed = [name for name, default in defaults.items() if len(default) != len(before[name])]
        if changed:
            words = f"the default of {changed[0]} is one object for all calls, and a call changes it"
            line = bound.case.line_with(rf"\bdef\b.*\b{changed[0]}\b|^\s*{changed[0]}\b.*=")
            yield Finding("remembers-calls", words, line)
