"""Arguments of the call that are optional: keys, flags and caches, each tried with and without."""

import ast
import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from headwise.check.arguments import constructor_role, parameters_of, value_for
from headwise.check.binding import Bound
from headwise.check.calls import Inputs, leaves, make_inputs
from headwise.check.code.intent import states_pieces
from headwise.check.explain import condition
from headwise.check.faults.behavior import ASKS, judged_weights, usable_masks
from headwise.check.faults.chunks import is_chunk_size
from headwise.check.faults.mask_meaning import MaskTrial, is_boolean, is_causal_switch, measured
from headwise.check.faults.parts import odd_line
from headwise.check.faults.questions import triangle_line
from headwise.check.faults.stages import STAGES, stage_findings
from headwise.check.faults.training import wrong_slope
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import FunctionWithWeights, signature
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import error_line, is_deliberate
from headwise.check.vocabulary import call_role, plain

# Where in the text the first token of a call stands.
POSITION = re.compile(r"start|startpos(ition)?|(pos(ition)?)?offset|(input|cur|current)pos|(cache|past)len(gth)?")
SINGLE = 1e-5  # of results that went through single precision, as an explicit softmax may
INPUT_ROLES = ("query", "key", "value", "self", "memory")


def without_keys(bound: Bound, reading: AttentionReading | None) -> Found:
    """Where keys are optional, the call without them takes another path through the code and must be right as well."""
    form = bound.form_alone()
    if form is None:
        return
    optional = [name for name in bound.form.roles if name not in form.roles]
    words = f"without {', '.join(optional)}"
    try:
        other = bound.called(form=form, inputs=make_inputs(form, bound.sizes))
    except Exception as error:
        others = [p.name for p in optional_arguments(bound) if call_role(p.name) in ("key", "value", "memory")]
        if is_deliberate(error):
            yield Note("good", f"{', '.join(optional)} cannot be left out")
        elif others:
            yield Note("untried", f"{words}, as {', '.join(others)} may stand in its place")
        else:
            said = f"{words}: {type(error).__name__}: {error}".splitlines()[0][:160]
            yield Finding("option-crashes", said, error_line(error, bound.case.filename))
        return
    seen = read(other)
    for finding in () if seen is None else stage_findings(other, seen):
        yield replace(finding, detail=f"{finding.detail} ({words})")
    if not other.gives(bound.output_of(other.inputs)) and list(doubts(other, seen)):
        yield Note("untried", f"{words}, the result is not that of the input in their place")
    yield from (replace(finding, detail=f"{finding.detail} ({words})") for finding in wrong_slope(other))


def options(bound: Bound, reading: AttentionReading | None) -> Found:
    """Every other optional argument must run and leave the result as it is, or do something that is known."""
    found = False
    masks = _known_masks(bound, reading)
    for p in (p for p in optional_arguments(bound) if p.name not in masks):
        found = True
        if is_boolean(p):
            yield from _switched(bound, reading, p)
        elif bound.case.never_reads(p.name):
            yield Note("good", f"{p.name}, which is never read")
        elif call_role(p.name) in INPUT_ROLES and (crash := _refuses_inputs(bound, p)) is not None:
            yield crash
        elif not is_cache(p.name) and not is_position(p) and not is_chunk_size(p):
            known = _is_added(bound, reading, p.name) or _changes_nothing(bound, p)
            yield Note("good", p.name) if known else _weighing_heads(bound, reading, p)
    if not found and not bound.form.masks:
        yield Note("absent", "it takes none")


def optional_arguments(bound: Bound) -> list[inspect.Parameter]:
    """Optional arguments that are neither inputs nor masks."""
    if isinstance(bound.thing, FunctionWithWeights):
        return []
    parameters = [p for p in signature(bound.thing) if p.default is not p.empty]
    return [p for p in parameters if p.name not in {*bound.form.roles, *bound.form.masks, *bound.form.fixed}]


def _known_masks(bound: Bound, reading: AttentionReading | None) -> set[str]:
    """Arguments that were found to be masks, whatever their names."""
    return {argument.name for argument in measured(bound, reading) if argument.meaning}


def _is_added(bound: Bound, reading: AttentionReading | None, name: str) -> bool:
    """Whether a table passed as this argument is added to the scores."""
    if reading is None or reading.scores is None or "bias" not in plain(name):
        return False
    B, H, T, S = reading.core.weights.shape
    table = torch.randn(1, H, T, S, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    trial = MaskTrial(bound, reading, name)
    return any(
        trial(shape, bias, table > 0).meaning == "additive"
        for shape, bias in (("(1,H,T,S)", table), ("(B,H,T,S)", table.repeat(B, 1, 1, 1)), ("(H,T,S)", table[0]))
    )


def _changes_nothing(bound: Bound, p: inspect.Parameter) -> bool:
    """Whether the argument takes the value that it stands for anyway, such as positions counted from zero."""
    T, B = bound.sizes.T, bound.inputs.query.shape[0]
    values: list[Any]
    if call_role(p.name) == "position":
        values = [torch.arange(T), torch.arange(T)[None], torch.arange(T).expand(B, T)]
    elif constructor_role(p.name) == "dropout":
        values = [torch.nn.Dropout(0.5).eval(), 0.0]
    else:
        return False
    outputs = (bound.output_of(bound.inputs, {p.name: value}) for value in values)
    return any(out is not None and bound.output is not None and same(out, bound.output) for out in outputs)


def _refuses_inputs(bound: Bound, p: inspect.Parameter) -> Finding | None:
    """The error that an optional input raises, of the length of the queries as of another one."""
    errors = []
    for length in (bound.sizes.T, bound.sizes.S):
        memory = torch.randn(bound.inputs.query.shape[0], length, bound.sizes.E, dtype=bound.inputs.query.dtype)
        errors.append(_error_with(bound, bound.inputs, {p.name: memory}))
        bits = torch.ones(memory.shape[:2], dtype=torch.bool)  # or it may be a mask, whatever its name
        errors += [_error_with(bound, bound.inputs, {p.name: bits})] if length == bound.sizes.T else []
    first = errors[0]
    if first is None or any(e is None or is_deliberate(e) or isinstance(e, AssertionError) for e in errors):
        return None
    if "values to unpack" in str(first) or bound.case.takes_apart(p.name):  # several tensors, such as keys and values
        return None
    line = error_line(first, bound.case.filename)
    words = f"{p.name}: {condition(first) or f'{type(first).__name__}: {first}'}".splitlines()[0][:160]
    return (
        None if line is None else Finding("tensor-as-condition" if condition(first) else "option-crashes", words, line)
    )


def _weighing_heads(bound: Bound, reading: AttentionReading | None, p: inspect.Parameter) -> Finding | Note:
    """Whether the argument multiplies every head with a number of its own, as a mask for heads must."""
    unknown = Note("untried", f"the argument {p.name}")
    if reading is None or call_role(p.name) != "head_mask":
        return unknown
    heads, idle = reading.core.heads, None
    factors = torch.linspace(0, 1, heads.shape[1], dtype=heads.dtype)
    for shape in ((1, -1, 1, 1), (-1,), (-1, 1, 1)):
        with contextlib.suppress(Exception):  # it takes another shape
            other = bound.called({p.name: factors.reshape(shape).clone()})
            core = MaskTrial(bound, reading, p.name).same_arrangement(other)
            if core is not None and same(core.heads, heads * factors[:, None, None]):
                return Note("good", p.name)
            idle = idle or (other if bound.gives(other.output) else None)
    if idle is None:
        return unknown
    new = {n.line for n in idle.trace.nodes} - {n.line for n in bound.trace.nodes} - {None}
    line = max((line for line in new if line is not None), default=None) or bound.case.line_with(rf"\b{p.name}\b")
    return Finding("option-ignored", f"a {p.name} that hides a head leaves the output as it is", line)


def _switched(bound: Bound, reading: AttentionReading | None, p: inspect.Parameter) -> Found:
    try:
        other = bound.called({p.name: not p.default}, thing=copy.deepcopy(bound.thing))
    except Exception as error:
        words = f"{p.name}={not p.default}: {type(error).__name__}: {error}".splitlines()[0][:160]
        line = error_line(error, bound.case.filename)
        excused = isinstance(error, ImportError) or ("require" in str(error) and "grad" in str(error))  # ours have none
        if is_deliberate(error) or excused or line is None or p.default is None:
            yield Note("untried", words)
        else:
            yield Finding("option-crashes", words, line)
        return
    if other.output is None:
        yield Note("untried", f"what {p.name}={not p.default} returns")
    elif (
        is_causal_switch(p)
        or _is_full_without(other, p)
        or (bound.output is not None and same(other.output, bound.output, SINGLE))
    ):
        yield Note("good", p.name)
        yield from returned_with(other, p.name, not p.default, usable_masks(bound, reading))
        yield from _asked_for_weights(bound, other, p)
        yield from _beside_masks(bound, reading, p)
    elif ASKS.search(plain(p.name)) and bound.output is not None and bound.repeats():
        gap = float((other.output - bound.output).abs().nan_to_num().max())
        words = f"{p.name}={not p.default} changes the output by up to {gap:.3g}"
        new = {n.line for n in other.trace.nodes} ^ {n.line for n in bound.trace.nodes}
        yield Finding("paths-differ", words, bound.case.condition_around(max(filter(None, new), default=None), p.name))
    else:
        yield Note("untried", f"what {p.name}={not p.default} does to the result")


def _beside_masks(bound: Bound, reading: AttentionReading | None, p: inspect.Parameter) -> Iterator[Finding]:
    """A flag that does not change the result must not change it with a mask either."""
    if not bound.gives(bound.output_of(bound.inputs, {p.name: not p.default})):
        return
    for given in usable_masks(bound, reading):
        alone = bound.output_of(bound.inputs, dict(given))
        both = bound.output_of(bound.inputs, given | {p.name: not p.default})
        if alone is not None and both is not None and not same(alone.nan_to_num(), both.nan_to_num()):
            words = f"{next(iter(given))} and {p.name}={not p.default} together"
            yield Finding("masks-combined", words, bound.case.line_with(rf"\bif\b.*\b{p.name}\b"))


def _is_full_without(other: Bound, p: inspect.Parameter) -> bool:
    """Whether a causal flag that is on by default gives full attention, rightly, when it is off."""
    seen = read(other) if p.default is True and "causal" in plain(p.name) else None
    wrong = [] if seen is None else [f for f in stage_findings(other, seen) if f.severity == "wrong"]
    return seen is not None and seen.pattern == "full" and not wrong


def _asked_for_weights(bound: Bound, other: Bound, p: inspect.Parameter) -> Found:
    """A flag that asks for weights must add something to what is returned."""
    counts = [len(leaves(b.returned)) for b in (bound, other)]
    without, asked = reversed(counts) if p.default is True else counts
    always = asked == without > 1 and not bound.case.never_reads(p.name)  # as where it asks for those of every head
    if asked <= without and not always and ASKS.search(plain(p.name)) and "average" not in plain(p.name):
        if asked == without > 1 and bound.case.takes_what_it_ignores():
            yield Note("untried", f"{p.name}, which no line reads: weights are returned in any case")
            return
        line = bound.case.dead_branch() or bound.case.line_with(rf"\bif\b.*\b{p.name}\b")
        line = line or bound.case.return_line()
        yield Finding("option-ignored", f"{p.name}: {asked} tensors are returned with it, {without} without", line)


def returned_with(other: Bound, name: str, value: Any = True, masks: list[dict[str, Any]] | None = None) -> Found:
    """What is wrong with weights that are returned only with this flag."""
    for found in judged_weights(other, read(other), masks):
        if isinstance(found, Finding):
            yield replace(found, detail=f"with {name}={value}: {found.detail}")
        elif found.kind == "untried":
            yield Note("untried", f"with {name}={value}, {found.words}")


def doubts(other: Bound, seen: AttentionReading | None) -> Iterator[Finding | Note]:
    """What speaks against the result of a call: mistakes and steps that were not understood."""
    for fault in STAGES:
        for found in fault(other, seen):
            if found.kind in ("doubt", "untried") if isinstance(found, Note) else found.severity == "wrong":
                yield found


# Caches: tokens given one after another must get the same result as all at once.


def is_cache(name: str) -> bool:
    """Whether an argument is a cache of keys and values, by its name."""
    word = plain(name)
    return "cache" in word or "past" in word or word in ("kv", "memory", "state")


def cache_arguments(bound: Bound) -> list[str]:
    """The arguments that take a cache: optional ones, and those that a caller without a cache passes None."""
    found = [p.name for p in optional_arguments(bound) if is_cache(p.name) and not is_boolean(p)]
    return found + [n for n, value in bound.form.fixed.items() if value is None and is_cache(n)]


def is_position(p: inspect.Parameter) -> bool:
    """Whether an argument is the position of the first token, zero or nothing by default."""
    return (p.default is None or type(p.default) is int) and POSITION.fullmatch(plain(p.name)) is not None


def caches(bound: Bound, reading: AttentionReading | None) -> Found:
    """A cache that a call returns, given to the next call, must give the same result."""
    names = cache_arguments(bound)
    flags = {p.name: True for p in optional_arguments(bound) if is_boolean(p) and "cache" in plain(p.name)}
    if not names and flags:
        yield from _kept_inside(bound, flags)
    if not names or call_role(names[0]) in INPUT_ROLES:
        return
    if (form := bound.form_alone()) is not None:  # a cache holds the tokens before; those of a memory are all there
        yield from _beside_memory(bound, names[0], flags)
        with contextlib.suppress(Exception):  # it cannot be called without the memory
            bound = bound.called(form=form, inputs=make_inputs(form, bound.sizes))
    if bound.case.never_reads(names[0]):
        if any(cache_candidates(bound.returned, bound.sizes.T)):
            words = f"a cache is returned, and the argument {names[0]} is never read"
            yield Finding("cache-differs", words, bound.case.line_with(rf"\b{names[0]}\b"))
        return
    tried = [result for cut in (bound.sizes.T - 1, 2) if (result := _continued(bound, names, flags, cut))]
    wrong = next((result for result in tried if isinstance(result, Finding)), None)
    if not tried and (kept := _in_an_object(bound, names[0], flags)) is not None:
        yield kept
        return
    wrong = wrong or (None if tried else _refused(bound, names, flags))
    if wrong is not None:
        yield wrong
    elif tried:
        yield Note("good", f"{names[0]}: same result token by token")
        yield from _several_after(bound, names, flags)
        yield from _grouped_cache(bound, names, flags)
    else:
        yield Note("untried", f"the argument {names[0]}")


def _beside_memory(bound: Bound, name: str, flags: dict[str, Any]) -> Found:
    """Queries in two parts, with one memory and one cache, must get what they get together, where that runs."""
    cut = bound.sizes.T - 1
    first, rest = (bound.inputs._replace(query=bound.inputs.query[:, part]) for part in (slice(cut), slice(cut, None)))
    for make in (*_cache_makers(bound), dict, list):
        with contextlib.suppress(Exception):  # it is another kind of object, or the cache has another place
            held = make()
            bound.call(first, flags | {name: held})
            out = bound.output_of(rest, flags | {name: held})
            if out is not None and bound.output is not None and same(out, bound.output[:, cut:]):
                yield Note("good", f"{name}, with the memory")
            return


def _in_an_object(bound: Bound, name: str, flags: dict[str, Any]) -> Finding | Note | None:
    """A cache that calls write into: a dictionary, a list, or an object of a class in the file."""
    for make in (*_cache_makers(bound), dict, list):
        with contextlib.suppress(Exception):  # it is another kind of object
            cuts = [_split_at(bound, name, flags, make, cut) for cut in (bound.sizes.T - 1, 2)]
            wrong = next((result for result in cuts if isinstance(result, Finding)), None)
            return wrong or (Note("good", f"{name}: same result token by token") if None not in cuts else None)
    return None


def _cache_makers(bound: Bound) -> Iterator[Callable[[], Any]]:
    """Classes of the file and methods of the object that make a cache, with sizes by the meaning of their names."""
    classes = [c for n, c in bound.case.namespace.items() if inspect.isclass(c) and "cache" in n.lower()]
    names = [n for n, f in vars(type(bound.thing)).items() if "cache" in n.lower() and callable(f)]
    sizes = replace(bound.sizes, B=bound.inputs.query.shape[0])
    for make in (*classes, *(getattr(bound.thing, name) for name in names if not name.startswith("__"))):
        needed = [p.name for p in parameters_of(make) if p.default is p.empty]
        roles = {name: constructor_role(name) for name in needed}
        if all(role is not None for role in roles.values()):
            yield functools.partial(make, **{name: value_for(role, sizes) for name, role in roles.items() if role})


def _split_at(bound: Bound, name: str, flags: dict[str, Any], make: Any, cut: int) -> Finding | Note | None:
    """Tokens before and after a cut, with one cache object; None where that changes nothing."""
    first, rest = (Inputs(*(x[:, part] for x in bound.inputs)) for part in (slice(0, cut), slice(cut, None)))
    with bound.running():
        held = make()
    bound.call(first, flags | {name: held})
    other = bound.called(flags | {name: held}, inputs=rest)
    if other.output is None or bound.output is None or same(other.output, _alone(bound, rest, flags)):
        return None
    if same(other.output, bound.output[:, cut:]):
        return Note("good", name)
    if cut < bound.sizes.T - 1 and not _is_causal_here(bound):
        return Note("good", name)  # without a causal mask, the first tokens did not see the rest
    gap = float((other.output - bound.output[:, cut:]).abs().nan_to_num().max())
    seen = read(other)
    line = None if seen is None else triangle_line(bound.case, seen) or seen.core.mask_line()
    words = f"after {cut} tokens in {name}, the next ones differ by up to {gap:.3g}"
    return Finding("cache-differs", words, line)


def _is_causal_here(bound: Bound) -> bool:
    seen = read(bound)
    return seen is not None and seen.pattern == "causal"


def _several_after(bound: Bound, names: list[str], flags: dict[str, Any]) -> Found:
    """Several tokens after a cache must not raise an error where one does not."""
    first, rest = (Inputs(*(x[:, part] for x in bound.inputs)) for part in (slice(0, 2), slice(2, None)))
    errors = [_error_with(bound, rest, given) for given in _givens(bound.call(first, flags), names, flags, 2)]
    if errors and all(error is not None and not is_deliberate(error) for error in errors):
        yield Note("untried", f"{rest.query.shape[1]} tokens after a cache raise {type(errors[0]).__name__}")


def _error_with(bound: Bound, inputs: Inputs, given: dict[str, Any]) -> Exception | None:
    """What a call raises."""
    try:
        bound.call(inputs, given)
    except Exception as error:
        return error
    return None


def _grouped_cache(bound: Bound, names: list[str], flags: dict[str, Any]) -> Found:
    """With fewer key/value heads than query heads, the cache must still give the same result."""
    kv, fewer = bound.built.names_with_role("kv_heads"), bound.sizes.H // 2
    if not kv or fewer < 1:
        return
    words = f"with {kv[0]}={fewer}"
    try:
        other = bound.called(thing=bound.rebuilt(**dict.fromkeys(kv, fewer)))
        result = _continued(other, names, flags, bound.sizes.T - 1) or _refused(other, names, flags)
    except Exception:  # it does not take so few, which is asked elsewhere
        return
    if isinstance(result, Finding):
        yield replace(result, detail=f"{words}: {result.detail}")
    elif result is None:
        yield Note("untried", f"{words}, the argument {names[0]}")


def _mask_beside_cache(bound: Bound, flags: dict[str, Any]) -> list[Finding]:
    """A mask that is larger than the input and cut to it must be cut to the rows of the new tokens with a cache."""
    T, context = bound.sizes.T, bound.sizes.context
    large = torch.ones(context, context, dtype=torch.float64).tril()
    for name in bound.form.masks:
        for mask in (large, large[None], large[None, None]):
            first, cut = (bound.output_of(bound.inputs, {name: m}) for m in (mask.clone(), mask[..., :T, :T].clone()))
            if first is None or cut is None or not same(first.nan_to_num(), cut.nan_to_num()) or bound.gives(first):
                continue  # it takes masks of the size of the input only
            thing, last = _fresh(bound), Inputs(*(x[:, T - 1 :] for x in bound.inputs))
            bound.output_of(Inputs(*(x[:, : T - 1] for x in bound.inputs)), flags | {name: mask.clone()}, thing)
            words = f"with a cache of {T - 1} tokens and {name} of shape {tuple(mask.shape)}, the next token"
            try:
                other = bound.called(flags | {name: mask.clone()}, thing=thing, inputs=last)
            except Exception as error:
                said = f"{words} raises {type(error).__name__}: {error}".splitlines()[0][:200]
                return [Finding("cache-differs", said, error_line(error, bound.case.filename))]
            if other.output is None or not same(other.output.nan_to_num(), first[:, T - 1 :].nan_to_num()):
                usual = {n.line for n in bound.trace.nodes}
                cuts = [n.line for n in other.trace.nodes if n.op == "slice" and n.line and n.line not in usual]
                shape = next((tuple(leaf.shape) for leaf in leaves(other.returned)), ())
                said = f"{words} gives {shape[1]} rows" if len(shape) > 1 and shape[1] != 1 else f"{words} differs"
                return [Finding("cache-differs", said, cuts[-1] if cuts else None)]
    return []


def _fresh(bound: Bound) -> Any:
    """An object with the same weights that was never called, or a copy where none can be made."""
    with contextlib.suppress(Exception):
        thing = bound.rebuilt()
        thing.load_state_dict(bound.thing.state_dict())
        return thing
    return copy.deepcopy(bound.thing)


def _kept_inside(bound: Bound, flags: dict[str, Any]) -> Found:
    """A cache that the object keeps itself: the last token after the others must get what it gets among them."""
    cut, whole = bound.sizes.T - 1, bound.output
    thing = copy.deepcopy(bound.thing)  # which was called without the cache: that must leave nothing behind
    parts = [Inputs(*(x[:, part] for x in bound.inputs)) for part in (slice(0, cut), slice(cut, None))]
    bound.output_of(parts[0], flags, thing)
    try:
        last = bound.called(flags, thing=thing, inputs=parts[1])
    except Exception as error:
        yield Note("untried", f"{next(iter(flags))}: {type(error).__name__}: {error}".splitlines()[0][:160])
        return
    out, alone = last.output, bound.output_of(parts[1])
    if out is None or whole is None or alone is None or same(out, alone):
        yield Note("untried", f"what {next(iter(flags))} keeps")
    elif same(out, whole[:, cut:]):
        wrong = [*_mask_beside_cache(bound, flags), *_in_pieces(bound, flags)]
        yield from wrong
        if not wrong:
            yield Note("good", f"{next(iter(flags))}: same result token by token")
    else:
        gap = float((out - whole[:, cut:]).abs().nan_to_num().max())
        if _is_right_when_new(bound, flags, parts):
            words = f"a call without {next(iter(flags))} leaves its tokens for the next call with it"
            yield Finding("remembers-calls", words, bound.case.line_of_state())
            return
        seen = read(last)
        line = odd_line(bound.trace, last.trace, range(cut, cut + 1), bound.sizes.T)
        line = line or (None if seen is None else triangle_line(bound.case, seen) or seen.core.mask_line())
        yield Finding(
            "cache-differs", f"after {cut} tokens in the cache, the next one differs by up to {gap:.3g}", line
        )


def _in_pieces(bound: Bound, flags: dict[str, Any]) -> Found:
    """Several tokens after a cache that the object keeps: what they get among all tokens, or it is not promised."""
    cut, thing, words = 2, _fresh(bound), f"with {next(iter(flags))}, 3 tokens after 2"
    first, rest = (Inputs(*(x[:, part] for x in bound.inputs)) for part in (slice(0, cut), slice(cut, None)))
    bound.output_of(first, flags, thing)
    try:
        other = bound.called(flags, thing=thing, inputs=rest)
    except Exception as error:
        yield Note("untried", f"{words} raise {type(error).__name__}")
        return
    if bound.output is None or other.output is None or same(other.output, bound.output[:, cut:]):
        return
    if states_pieces(bound.case) is None:
        yield Note("untried", f"{words}, which get another result")
        return
    seen = read(other)
    line = None if seen is None else triangle_line(bound.case, seen) or seen.core.mask_line()
    yield Finding("causal-cache", f"{words} get another result than among all of them", line)


def _is_right_when_new(bound: Bound, flags: dict[str, Any], parts: list[Inputs]) -> bool:
    """Whether the last token after the others gets the right result from an object that was never called before."""
    with contextlib.suppress(Exception):  # it cannot be made again
        thing = bound.rebuilt()
        thing.load_state_dict(bound.thing.state_dict(), strict=False)
        bound.output_of(parts[0], flags, thing)
        out = bound.output_of(parts[1], flags, thing)
        return out is not None and bound.output is not None and same(out, bound.output[:, -1:])
    return False


def _continued(bound: Bound, names: list[str], flags: dict[str, Any], cut: int) -> Finding | Note | None:
    """The last tokens computed with the cache of the first; None where the protocol is not understood."""
    first = Inputs(*(x[:, :cut] for x in bound.inputs))
    rest = Inputs(*(x[:, cut:] for x in bound.inputs))
    whole = bound.output
    try:
        returned = bound.call(first, flags)
    except Exception:
        return None
    for given in _givens(returned, names, flags, cut):
        out = bound.output_of(rest, given)  # None, perhaps because the argument takes something else
        if out is None or whole is None or out.shape != whole[:, cut:].shape:
            continue
        if same(out, whole[:, cut:]):
            return Note("good", names[0])
        single = cut == bound.sizes.T - 1  # the last token sees all others, causal or not
        gap = float((out[:, -1] - whole[:, -1]).abs().max())
        if single and not same(out, _alone(bound, rest, flags)):
            if (hidden := _hidden_from_last(bound, rest, given)) is not None:
                return hidden
            other, T = bound.called(given, inputs=rest), bound.sizes.T
            line = odd_line(bound.trace, other.trace, range(cut, T), T) or _joining_line(bound, rest, given)
            return Finding(
                "cache-differs", f"after a cache of {cut} tokens, the next one differs by up to {gap:.3g}", line
            )
    return None


def _givens(returned: Any, names: list[str], flags: dict[str, Any], cut: int) -> Iterator[dict[str, Any]]:
    """The arguments of the next call, with everything that a call has returned and that may be its cache."""
    for held in cache_candidates(returned, cut):
        several = isinstance(held, tuple | list) and len(held) == len(names) > 1
        yield flags | (dict(zip(names, held, strict=True)) if several else {names[0]: held})


def _hidden_from_last(bound: Bound, rest: Inputs, given: dict[str, Any]) -> Finding | None:
    """Whether the last token, which may see all, does not see every key of the cache."""
    seen = read(bound.called(given, inputs=rest))
    if seen is None or seen.core.weights.shape[-1] != bound.sizes.T:
        return None
    unseen = (seen.core.weights[0, 0, -1].nan_to_num() == 0).nonzero().flatten().tolist()
    if not unseen:
        return None
    words = f"after a cache of {bound.sizes.T - 1} tokens, the next one does not see key {unseen[0]}"
    T = bound.sizes.T
    line = odd_line(bound.trace, seen.core.trace, range(T - 1, T), T)
    return Finding("causal-cache", words, line or _row_line(bound, seen) or seen.core.mask_line())


def _row_line(bound: Bound, seen: AttentionReading) -> int | None:
    """The line that numbers the queries, or that takes rows of a stored mask."""
    return bound.case.line_with(r"\b(rows?|q_pos|query_pos\w*|i)\b\s*=.*arange") or None


def _asks_for_more(bound: Bound, flag: str) -> bool:
    """Whether a condition of the code asks for something else beside this flag, as in `self.is_decoder and flag`."""
    tests = [n.test for n in ast.walk(bound.case.tree) if isinstance(n, ast.If | ast.IfExp)]
    both = [test for test in tests if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And)]
    return any(flag in {getattr(value, "id", "") for value in test.values} for test in both)


def _refused(bound: Bound, names: list[str], flags: dict[str, Any]) -> Finding | None:
    """What happens to the one cache that a call itself returns, where its argument cannot take it or ignores it."""
    cut = bound.sizes.T - 1
    first, rest = (Inputs(*(x[:, part] for x in bound.inputs)) for part in (slice(0, cut), slice(cut, None)))
    try:
        returned = bound.call(first, flags)
    except Exception:  # the protocol is another one
        return None
    if flags and isinstance(returned, tuple | list) and any(part is None for part in returned):
        kept_in_object = any(re.search(rf"\b{re.escape(name)}\.update\(", bound.case.source) for name in names)
        if kept_in_object or _asks_for_more(bound, next(iter(flags))):
            return None
        line = bound.case.return_line(several=True)
        return Finding("cache-differs", f"with {next(iter(flags))}=True, None is returned in place of a cache", line)
    held = [part for part in cache_candidates(returned, cut) if any(part is own for own in returned)]
    if len(held) != 1 or len(names) != 1:
        return None
    words = f"passing the cache from a call of {cut} tokens to the next call"
    try:
        out = bound.form.result(bound.call(rest, flags | {names[0]: held[0]}), rest)
    except Exception as error:
        line, kind = error_line(error, bound.case.filename), "cache-differs"
        kind = "undefined-name" if type(error) is NameError else kind
        return Finding(kind, f"{words}: {type(error).__name__}: {error}".splitlines()[0][:200], line)
    if out is not None and same(out, _alone(bound, rest, flags)):
        given = bound.called(flags | {names[0]: held[0]}, inputs=rest)
        ran = {line for node in given.trace.nodes for line in node.stack}
        line = bound.case.skipped_condition(names[0], ran)
        line = line or bound.case.line_with(rf"\bif\b.*\b{names[0]}\b|\b{names[0]}\b")
        return Finding("cache-differs", f"{words} changes nothing", line)
    return None


def _joining_line(bound: Bound, rest: Inputs, given: dict[str, Any]) -> int | None:
    """The line that joins old and new, where its result is not found in the call with all tokens at once."""
    joined = [n for n in bound.called(given, inputs=rest).trace.nodes if n.op == "cat" and n.line is not None]
    whole = [n.value for n in bound.trace.nodes]
    wrong = [n.line for n in joined if not any(v.shape == n.value.shape and same(v, n.value) for v in whole)]
    return next(iter(wrong), bound.case.line_with(r"\bcat\(|\bconcat\w*\("))


def _alone(bound: Bound, rest: Inputs, flags: dict[str, Any]) -> Tensor:
    """The result for the rest without a cache: if a cache changes nothing, it was not understood as one."""
    out = bound.form.result(bound.call(rest, flags), rest)
    return torch.empty(0) if out is None else out


def cache_candidates(returned: Any, length: int) -> Iterator[Any]:
    """Parts of what was returned that hold keys and values of this length."""
    parts = list(returned) if isinstance(returned, tuple | list) else []
    parts = list(returned.values()) if isinstance(returned, dict) else parts
    for part in reversed(parts):
        held = [leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)]
        if (len(held) >= 2 or is_stacked(part)) and all(leaf.dim() >= 3 and length in leaf.shape for leaf in held):
            yield part
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() == 4]
    if len(tensors) >= 2:
        yield tuple(tensors[-2:])


def is_stacked(part: Any) -> bool:
    """Whether this is one tensor of keys and values, (2, B, H, S, D) or (B, 2, H, S, D)."""
    return isinstance(part, Tensor) and part.dim() == 5 and 2 in part.shape[:2]
