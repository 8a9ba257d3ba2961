"""Finds out how to build and call somebody's attention, by names first and by trying then."""

import collections
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check import building, core, layouts
from headwise.check.attempt import Attempt, Failure
from headwise.check.bound import Bound
from headwise.check.calling import Form, forms, leaves, make_inputs
from headwise.check.configs import Config
from headwise.check.mending import mended
from headwise.check.names import constructor_role, value_for
from headwise.check.repairs import Repaired, error_line
from headwise.check.sizes import SMALL, Sizes, batch_for
from headwise.check.stubs import Stub
from headwise.check.subject import FunctionWithWeights, entry, modules, prepare, tensors
from headwise.check.trace import PRODUCTS, TooLongError, Trace
from headwise.check.usage import globals_read

SECONDS = 8.0  # of processor time, for all attempts together
SIZES = ("width", "heads", "context", "head_width", "batch")
FORMS_OF_A_LAYOUT = 3  # another layout is tried with the likeliest calls only
WIDEST = 2048  # of a width that a class fixes by itself
MANY = 150  # attempts that raised, after which no other will help


def bind(
    target: Any,
    namespace: MutableMapping[str, Any],
    filename: str | None,
    late: Callable[[str], bool] | None = None,
) -> tuple[Bound | None, list[Failure]]:
    """The best way found, and every attempt that raised. None where nothing ran."""
    attempt = Attempt(target, namespace, filename, [], time.process_time() + SECONDS, late)
    best, best_rank = None, 0
    for sizes in itertools.chain(_sizes_to_try(namespace), _small(attempt), _expected_sizes(attempt)):
        for bound in _all(attempt, sizes):
            rank = _rank(bound)
            if rank > best_rank:
                best, best_rank = bound, rank
            if rank == 4:
                break
        if best_rank >= 3:
            break
    if time.process_time() > attempt.deadline:  # not everything was tried, so that an input of another form might pass
        for failure in attempt.failures:
            failure.projected = False
    if best is not None:
        best.failures = attempt.failures
    return best, attempt.failures


def _sizes_to_try(namespace: MutableMapping[str, Any]) -> Iterator[Sizes]:
    """Ours, written into the module's own constants; then the module's own."""
    _stand_in(namespace, Sizes())
    own = _constants(namespace)
    _write(namespace, Sizes())
    yield Sizes()
    namespace.update(own)
    width = max((v for k, v in own.items() if constructor_role(k) == "width"), default=0)
    heads = next((v for k, v in own.items() if constructor_role(k) == "heads"), 0)
    context = next((v for k, v in own.items() if constructor_role(k) == "context"), 16)
    if 0 < width <= 1024 and heads and width % heads == 0:
        yield Sizes(B=batch_for(width), H=heads, E=width, context=context)


def _constants(namespace: MutableMapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in namespace.items() if type(value) is int and constructor_role(name) in SIZES}


def _stand_in(namespace: MutableMapping[str, Any], sizes: Sizes) -> None:
    """Sizes and configurations that a file imports from another one, which is not here, by what their names mean."""
    for name, value in list(namespace.items()):
        if isinstance(value, Stub):
            role = constructor_role(name)
            if role is not None:
                namespace[name] = value_for(role, sizes)
            elif building.is_configuration(name):
                namespace[name] = Config(sizes)


def _write(namespace: MutableMapping[str, Any], sizes: Sizes) -> None:
    for name in _constants(namespace):
        namespace[name] = int(value_for(str(constructor_role(name)), sizes))


def _small(attempt: Attempt) -> Iterator[Sizes]:
    """For code that loops over single numbers: the same with fewer of them."""
    if attempt.too_long:
        attempt.too_long, attempt.deadline = False, time.process_time() + SECONDS
        _write(attempt.namespace, SMALL)
        yield SMALL


def _expected_sizes(attempt: Attempt) -> Iterator[Sizes]:
    """Sizes that the class fixes by itself: its own heads, or what most of its linear layers take."""
    attempt.deadline = max(attempt.deadline, time.process_time() + SECONDS / 2)
    for heads, width in dict.fromkeys(attempt.shapes):
        if 8 <= width <= WIDEST:
            yield Sizes(B=batch_for(width), H=heads, E=width)
    counts = collections.Counter(attempt.widths)
    for width, _ in counts.most_common(2):
        if width != Sizes().E and 8 <= width <= 1024:
            heads = 4 if width % 4 == 0 else next((h for h in (3, 2) if width % h == 0), 1)
            yield Sizes(B=batch_for(width), H=heads, E=width)


def _all(attempt: Attempt, sizes: Sizes) -> Iterator[Bound]:
    for built in _built(attempt, sizes):
        repaired = Repaired()
        thing = _make(attempt, built, sizes, repaired)
        if time.process_time() > attempt.deadline or len(attempt.failures) > MANY:
            return
        if thing is None:
            continue
        for form in forms(thing, sizes):
            if time.process_time() > attempt.deadline or attempt.too_long:
                return
            bound = try_form(attempt, thing, built, form, sizes, repaired)
            if bound is None:
                continue
            yield bound
            other = _other_layout(bound)
            if other is not None:
                second = try_form(attempt, thing, built, replace(form, layout=other), sizes, repaired)
                if second is not None:
                    yield second
        yield from _of_stored_length(attempt, thing, built, sizes, repaired)
        yield from _of_other_layout(attempt, thing, built, sizes, repaired)


def _of_stored_length(
    attempt: Attempt, thing: Any, built: building.Built, sizes: Sizes, repaired: Repaired
) -> Iterator[Bound]:
    for length, layout in _fitting_lengths(attempt, thing, sizes):
        fixed = replace(sizes, T=length, context=length)
        for form in forms(thing, fixed):
            bound = try_form(attempt, thing, built, replace(form, layout=layout), fixed, repaired)
            if bound is not None:
                yield bound
                break


def _fitting_lengths(attempt: Attempt, thing: Any, sizes: Sizes) -> Iterator[tuple[int, str]]:
    """Lengths of stored masks, and the one that a constant of the module fixes, also without a batch."""
    yield from ((length, layouts.PLAIN) for length in stored_lengths(thing, sizes))
    read = globals_read(attempt.target)
    if any(constructor_role(n) == "context" and type(attempt.namespace.get(n)) is int for n in read):
        yield from ((sizes.context, layout) for layout in (layouts.PLAIN, "unbatched"))


def _of_other_layout(
    attempt: Attempt, thing: Any, built: building.Built, sizes: Sizes, repaired: Repaired
) -> Iterator[Bound]:
    for layout in layouts.OTHERS:
        T = layouts.tokens_of(layout, sizes.T)
        fitting = replace(sizes, T=T, S=T + 2, context=64) if T != sizes.T else sizes
        for form in itertools.islice(forms(thing, fitting), FORMS_OF_A_LAYOUT):
            if time.process_time() > attempt.deadline or attempt.too_long:
                return
            bound = try_form(attempt, thing, built, replace(form, layout=layout), fitting, repaired)
            if bound is not None:
                yield bound
                break


def stored_lengths(thing: Any, sizes: Sizes) -> list[int]:
    """Sizes of stored square tables: an input of that length passes where a mask is used whole."""
    tables = [b for m in modules(thing) for b in m.buffers()] + [
        t for m in modules(thing) for t in vars(m).values() if isinstance(t, Tensor)
    ]
    square = {b.shape[-1] for b in tables if b.dim() >= 2 and b.shape[-1] == b.shape[-2] and 1 < b.shape[-1] <= 64}
    return sorted(square - {sizes.T})


def _built(attempt: Attempt, sizes: Sizes) -> Iterator[building.Built]:
    target = attempt.target
    if inspect.isclass(target):
        yield from building.attempts(target, attempt.namespace, sizes)
    elif inspect.isfunction(target):
        wrapped = FunctionWithWeights(target, sizes)
        names = ", ".join(inspect.signature(target).parameters)
        if wrapped.held or wrapped.constants:
            yield building.Built(lambda: FunctionWithWeights(target, sizes), f"{target.__name__}({names})", {})
        yield building.Built(lambda: target, f"{target.__name__}({names})", {})
    else:
        yield building.Built(lambda: target, type(target).__name__, {})


def _make(attempt: Attempt, built: building.Built, sizes: Sizes, repaired: Repaired) -> Any:
    def build() -> Any:
        thing = built.make()
        if entry(thing) is None:
            raise TypeError(f"{built.text} has no forward")
        prepare(thing)
        return thing

    try:
        torch.manual_seed(0)
        thing = mended(build, None, attempt, sizes, repaired)
    except MemoryError:
        raise  # trying again in another way would not help
    except Exception as error:  # whatever a learner's code raises is a result
        line = error_line(error, attempt.filename)
        attempt.failures.append(Failure(built.text, None, error, line, repaired, built.certain))
        return None
    attempt.widths += [m.in_features for m in modules(thing) if isinstance(m, nn.Linear)][:50]
    attempt.shapes += _own_heads(thing, sizes)
    return thing


def _own_heads(thing: Any, sizes: Sizes) -> list[tuple[int, int]]:
    """(heads, width) where an object's attributes say other than what we asked for."""
    held = {constructor_role(k): v for k, v in getattr(thing, "__dict__", {}).items() if type(v) is int}
    heads, each = held.get("heads"), held.get("head_width")
    return [(heads, heads * each)] if heads and each and heads * each != sizes.E and heads != sizes.H else []


def try_form(
    attempt: Attempt, thing: Any, built: building.Built, form: Form, sizes: Sizes, repaired: Repaired
) -> Bound | None:
    """One call, traced; None where it raises, which is written down."""
    inputs = make_inputs(form, sizes)
    trace = Trace(attempt.filename)

    def call() -> Any:
        nonlocal trace
        trace = Trace(attempt.filename)
        with torch.no_grad(), trace:
            return form.call(thing, inputs)

    try:
        returned = mended(call, thing, attempt, sizes, repaired)
    except MemoryError:
        raise  # trying again in another way would not help
    except TooLongError:
        attempt.too_long = sizes != SMALL
        return None
    except Exception as error:  # whatever a learner's code raises is a result
        projected = any(node.op in PRODUCTS for node in trace.nodes)
        failure = Failure(built.text, form.words(), error, error_line(error, attempt.filename), repaired)
        width = "shapes cannot be multiplied" in str(error)  # perhaps by a size that we guessed
        failure.natural = form.natural and (built.certain or (projected and not width))
        failure.guessed, failure.projected = form.fixed_tensor, projected
        # The numbers of a configuration may belong together in another way than we think.
        sizes_known = built.guessed <= 1 and built.config is None
        failure.attended = sizes_known and form.layout == layouts.PLAIN and _attended(trace, sizes)
        failure.without = bool(form.fixed) and all(value is None for value in form.fixed.values())
        attempt.failures.append(failure)
        return None
    trace.returned = [trace.source(leaf) for leaf in leaves(returned)]
    output = form.result(returned, inputs)
    space, filename = attempt.namespace, attempt.filename
    return Bound(thing, attempt.target, built, form, sizes, space, filename, repaired, inputs, trace, returned, output)


def _attended(trace: Trace, sizes: Sizes) -> bool:
    """Whether weights between tokens were made."""
    return any(node.value.shape[-2:] == (sizes.T, sizes.T) for node in core.softmax_nodes(trace))


def _rank(bound: Bound) -> int:
    """4: attention between tokens, and an output; 3: some attention and an output; 2: an output; 1: it ran.

    An attempt with a length fitted to a stored mask ranks 3: another way may do without.
    """
    parts = core.find(bound.trace)
    if parts is None:
        return 2 if bound.output is not None and tensors(bound.thing) else 1
    lengths = _lengths(bound, parts)
    if bound.output is None:
        return 2
    if bound.form.fixed_tensor and not _informed(parts):
        return 2
    widened = bound.form.fixed_tensor and parts.softmax[0].value.dim() > 4  # by a mask of too many axes
    fitted = bound.form.layout == layouts.PLAIN and bound.sizes.T != Sizes().T
    return 4 if lengths == (bound.sizes.T, bound.sizes.T) and not widened and not fitted else 3


def _informed(parts: core.Parts) -> bool:
    """Whether weights are numbers and depend on the scores: a mask that we passed may have hidden every key."""
    weights = parts.softmax[0].value
    return bool(torch.isfinite(weights).all()) and float(weights.std()) > 1e-9


def _lengths(bound: Bound, parts: core.Parts) -> tuple[int, int] | None:
    B = bound.inputs.query.shape[0]
    arranged = next(iter(core.arrangements(parts, B)), None)
    return None if arranged is None else (arranged.weights.shape[-2], arranged.weights.shape[-1])


def _other_layout(bound: Bound) -> str | None:
    """Attention that runs along the batch may mean that the batch is expected second."""
    parts = core.find(bound.trace)
    if parts is None or bound.form.layout != layouts.PLAIN:
        return None
    sizes = parts.softmax[0].value.shape
    return "batch second" if sizes[-1] == bound.sizes.B or bound.sizes.B in sizes[-2:] else None
