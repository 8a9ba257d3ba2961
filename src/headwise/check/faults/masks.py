"""Mistakes with masks: without effect, after the softmax, for the wrong sample, axis or head, beside a causal one."""

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from headwise.check.arguments import call_role, plain
from headwise.check.binding import Bound
from headwise.check.calls import Inputs, make_inputs
from headwise.check.code.intent import (
    states_left_padding,
    states_mask_instead,
    states_no_nan,
)
from headwise.check.code.names import stand_ins_used
from headwise.check.explain import condition
from headwise.check.faults.crashes import Function, definition_of
from headwise.check.faults.mask_meaning import (
    LENGTHS,
    MaskArgument,
    MaskTrial,
    TriedMask,
    agree,
    is_causal_switch,
    measured,
    replaces_causal,
    shaped_masks,
)
from headwise.check.faults.mask_promises import against_words, inverting_line, of_integers, without_own_branch
from headwise.check.faults.portability import half_precision
from headwise.check.faults.questions import lines_run
from headwise.check.faults.stages import stage_findings
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note, error_words
from headwise.check.objects import FunctionWithWeights, signature
from headwise.check.proof import expected_output
from headwise.check.reading import AttentionReading, pattern, read
from headwise.check.trace import REPEATS, error_line, find_attention, is_deliberate

PLAIN_ERRORS = (AttributeError, NameError, TypeError, KeyError)
CHOSEN = re.compile(r"^(el)?if (not )?self\.(?!training\b)\w+")
MEMORY_MASK = re.compile(r"(context|memory|mem|enc|encoder|kv|keys?|source|src|cross|cond)\w*mask")
WRONG_MEANING = {
    "after": "mask-after-softmax", "discarded": "mask-discarded", "wrong sample": "mask-wrong-sample",
    "transposed": "mask-transposed", "scaled": "mask-scaled", "queries": "mask-on-queries",
    "both": "mask-empties-rows",
    "turned": "mask-turned",
    "some heads": "mask-some-heads", "uncausal": "mask-replaces-causal", "either": "masks-combined",
    "rescaled": "mask-rescales", "one more": "mask-off-by-one", "one less": "mask-off-by-one",
}  # fmt: skip
# A comment that says the mask is left out; 忽略, 省略 and 未使用 mean ignored, omitted and unused.
LEFT_OUT = re.compile(
    r"#[^\n]*(?:mask[^\n]*(?:ignor|not used|unused|忽略|省略|未使用)|(?:ignor|unused|忽略|省略)[^\n]*mask)",
    re.IGNORECASE,
)
JOINS = ("bitwise_", "logical_", "__or", "__and", "__xor")  # operations that put two masks together


def mask_meanings(bound: Bound, reading: AttentionReading | None) -> Found:
    """What every mask argument means."""
    for argument in measured(bound, reading):
        yield Note("mask", argument.words())


def mask_arguments(bound: Bound, reading: AttentionReading | None) -> Found:
    """A mask argument must hide keys before the softmax, in every head, for its own sample."""
    if reading is not None and not bound.form.masks:
        yield Note("absent", "it takes none")
    for argument in measured(bound, reading):
        assert reading is not None  # noqa: S101 - otherwise nothing is measured
        yield from against_words(argument, bound, reading)
        found = [*misused(argument, bound, reading), *_overwritten(argument, bound), *_raised(argument)]
        found += without_own_branch(argument, bound) if argument.meaning and not found else []
        excused = argument.first("uncausal") or (argument.first("queries") if _of_queries(argument, bound) else None)
        if not argument.meaning and not found and excused is None:
            found += _without_effect(argument, bound, reading)
        yield from found
        three = re.search(r"dim(\(\))?\s*==\s*3|len\(\w+\.shape\)\s*==\s*3", bound.case.source) is not None
        if argument.meaning and (three or not any("(B" in shape for shape in argument.shapes())):
            found += _by_head_instead(argument, bound, reading)
            yield from found
        yield from of_integers(argument, bound)
        if argument.meaning:
            yield Note("good", argument.words())
        elif not found:
            yield Note("untried", f"what the argument {argument.name} does")


def _raised(argument: MaskArgument) -> Iterator[Finding]:
    """A mask that raises the scores of the keys it names, so that they take the whole row."""
    tried = next((t for t in argument.tried if t.raised), None)
    if tried is not None:
        words = f"argument {argument.name}, shape {tried.shape}: the keys that it names take all the weight"
        yield Finding("mask-raises", words, tried.line)


def _by_head_instead(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> list[Finding]:
    """With as many samples as heads, a mask of every sample that reaches the head of the same number."""
    H = reading.core.weights.shape[1]
    few = bound.inputs.of_samples(H)
    if len(few.query) != H or H == 1:
        return []
    _, _, T, S = reading.core.weights.shape
    for shape, mask, meant in shaped_masks(H, H, T, S):
        if shape == "(B,T,S)":
            with contextlib.suppress(Exception):
                other = bound.called({argument.name: mask.double()}, inputs=few)
                core = MaskTrial(bound, reading, argument.name).same_arrangement(other)
                swapped = meant[:, 0].expand(H, *meant.shape[1:]) & reading.visible[:H]
                if core is not None and agree(core.weights.nan_to_num() > 1e-30, swapped):
                    words = (
                        f"argument {argument.name}: with {H} samples and {H} heads, the mask of sample 1 reaches head 1"
                    )
                    return [Finding("mask-wrong-sample", words, core.mask_line(bound.trace))]
    return []


def _overwritten(argument: MaskArgument, bound: Bound) -> Iterator[Finding]:
    """A call must not write into the mask it is given."""
    tried = next((t for t in argument.tried if t.modified), None)
    if tried is not None:
        nodes = bound.called({argument.name: tried.mask.clone()}).trace.nodes
        written = (n.line for n in nodes if n.op.endswith("_") and n.line not in (None, *lines_run(bound)))
        words = f"the argument {argument.name} has different values after the call"
        yield Finding("input-modified", words, next(written, tried.line))


def misused(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> Iterator[Finding]:
    """Masks that were tried and applied wrongly."""
    by_sample = any(t.meaning in ("keep", "drop") and t.shape.startswith("(B") for t in argument.tried)
    for meaning, name in WRONG_MEANING.items():
        tried = argument.first(meaning)
        other = (meaning == "wrong sample" and by_sample) or (meaning == "queries" and argument.meaning != "")
        other = other or (meaning == "uncausal" and _holds_causal(argument, bound))
        other = other or (meaning == "queries" and _of_queries(argument, bound))
        if tried is not None and not other:
            words = f"argument {argument.name}, shape {tried.shape}{_example(tried)}"
            only = f"{argument.name} is not None"
            line = bound.case.enclosing_condition(tried.line, only) if meaning == "some heads" else None
            line = inverting_line(tried, bound, argument.name) if meaning == "turned" else line
            yield Finding(name, words, line or tried.line or reading.core.softmax_line)


def _holds_causal(argument: MaskArgument, bound: Bound) -> bool:
    """Whether a mask is meant to bring the causal one with it: the file says so, or makes such masks."""
    named = rf"\bcausal_mask\s*=\s*{re.escape(argument.name)}\b"
    made = r"\b(?:def |=\s*(?:self\.)?)(?:_?create|_?update|_?make|_?prepare|_?build|_?get)_\w*causal\w*\("
    return (
        states_mask_instead(bound.case) is not None
        or re.search(named, bound.case.own) is not None
        or (bool(bound.case.users()) and re.search(made, bound.case.whole) is not None)
    )


def _of_queries(argument: MaskArgument, bound: Bound) -> bool:
    """Whether another mask is named for the memory, so that this one speaks of the tokens that ask."""
    others = [plain(name) for name in bound.form.masks if name != argument.name]
    return MEMORY_MASK.match(plain(argument.name)) is None and any(MEMORY_MASK.match(name) for name in others)


def _of_refused_memory(argument: MaskArgument, bound: Bound) -> bool:
    """Whether it is named for a memory that the class takes, and that it refused as it was built."""
    memory = any(call_role(p.name) == "memory" for p in signature(bound.thing)) and not bound.form.cross
    refused = any(f.deliberate and f.called is not None and argument.name in f.called for f in bound.failures)
    return memory and refused and MEMORY_MASK.match(plain(argument.name)) is not None


def _acts_beside(argument: MaskArgument, bound: Bound) -> bool:
    """Whether it has an effect where another mask, which hides nothing, is passed as well."""
    ones = torch.ones(bound.inputs.query.shape[:2], dtype=torch.bool)
    for other in (name for name in bound.form.masks if name != argument.name):
        alone = bound.output_of(bound.inputs, {other: ones.clone()})
        for tried in (t for t in argument.tried if t.error is None and t.shape == "(B,S)"):
            both = bound.output_of(bound.inputs, {other: ones.clone(), argument.name: tried.mask.clone()})
            if alone is not None and both is not None and not same(alone.nan_to_num(), both.nan_to_num()):
                return True
    return False


def _example(tried: TriedMask) -> str:
    """One place where the mask says something else than the weights."""
    if tried.seen is None or tried.meant is None:
        return ""
    wrong = (tried.seen != tried.meant).nonzero()
    if not len(wrong):
        return ""
    b, h, t, s = (int(i) for i in wrong[0])
    has = "has" if tried.seen[b, h, t, s] else "has no"
    return f": in head {h}, query {t} {has} weight on key {s}"


def _on_values(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> Finding | None:
    """A mask that sets the values of hidden keys to zero and leaves the weights as they are."""
    for tried in (t for t in argument.tried if t.error is None and t.meant is not None and t.mask.dim() > 1):
        other = bound.called({argument.name: tried.mask.clone()})
        core = MaskTrial(bound, reading, argument.name).same_arrangement(other)
        if core is None or core.weights.shape != reading.core.weights.shape or tried.meant is None:
            continue
        empty, hidden = (core.value == 0).all(-1), ~tried.meant.any(2)  # (B, H, S)
        visible = ~tried.meant.all(2)
        if hidden.any() and torch.equal(hidden, visible) and same(core.weights, reading.core.weights):
            inside = torch.equal(empty, hidden.expand(empty.shape)) or torch.equal(empty, ~hidden.expand(empty.shape))
            lines = [n.line for n in core.behind("value") if n.line not in (None, *lines_run(bound))]
            if inside and not (reading.core.value == 0).all(-1).any():
                words = f"argument {argument.name}, shape {tried.shape}: values become zero, the weights stay"
                return Finding("mask-on-values", words, next(iter(lines), tried.line))
    return None


def _without_effect(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> Iterator[Finding]:
    meanings = {t.meaning for t in argument.tried if t.error is None} - {"misfit"}
    if (emptied := _on_values(argument, bound, reading)) is not None:
        yield emptied
        return
    tried = argument.first("leaks") or argument.first("nan")
    needed = bound.form.fixed.get(argument.name) is not None  # what it takes is known, and is none of these
    if not meanings or (meanings == {"other"} and _usual_shapes_raise(argument)):
        added = reading.core.weights.shape[-1] > bound.inputs.key.shape[1]  # it may stand for the input's tokens alone
        yield from _crash(argument) if not (needed or added or _takes_object(argument, bound)) else ()
    elif tried is not None and tried.meaning == "leaks" and meanings <= {"leaks", "none", "other"}:
        words = f"argument {argument.name}, shape {tried.shape}"
        seen = read(bound.called({argument.name: tried.mask.clone()}))
        twice = seen is not None and seen.core.earlier_softmax() is not None
        line = seen.core.softmax_line if seen is not None and twice else tried.line or reading.core.softmax_line
        yield Finding("softmax-twice" if twice else "mask-leaks", words, line)
    elif tried is not None and meanings <= {"nan", "none"}:
        words = f"argument {argument.name}, shape {tried.shape}: the weights are NaN"
        core = MaskTrial(bound, reading, argument.name).same_arrangement(
            bound.called({argument.name: tried.mask.clone()})
        )
        filled = None if core is None else core.bad_fill_line()
        yield Finding("mask-nan", words, filled or tried.line or reading.core.softmax_line)
    elif meanings == {"none"} and "mask" in plain(argument.name) and "head" not in plain(argument.name):
        if _of_queries(argument, bound) or _acts_beside(argument, bound) or stand_ins_used(bound.case.target):
            return
        if _of_refused_memory(argument, bound):
            return
        words = f"argument {argument.name}: no mask that it accepts changes any weight"
        if _acts_in_a_new_object(argument, bound):
            words = f"after a call without {argument.name}, it has no effect; in a new object it has"
            yield Finding("remembers-calls", words, bound.case.line_of_state())
            return
        admitted = _is_admitted(bound, reading, argument.name)
        line = _unused_line(bound, argument)
        if CHOSEN.search(bound.case.text(line)) is not None and bound.case.condition_around(line, "self.") is not None:
            return  # an option of the constructor decides whether it is used
        yield Finding("mask-ignored", words, line, severity="fragile" if admitted else "")
    else:
        mixed = _mixes_samples(argument, bound)
        yield from [mixed] if mixed is not None else _same_for_all(argument, bound, reading)


def _acts_in_a_new_object(argument: MaskArgument, bound: Bound) -> bool:
    """Whether a mask changes the first result of an object that was never called."""
    if not isinstance(bound.case.target, type):
        return False
    for tried in (t for t in argument.tried if t.error is None and t.shape in ("(B,S)", "(B,1,T,S)", "(B,T,S)")):
        with contextlib.suppress(Exception):  # it cannot be made again
            thing = bound.rebuilt()
            thing.load_state_dict(bound.thing.state_dict(), strict=False)
            out = bound.output_of(bound.inputs, {argument.name: tried.mask.clone()}, thing)
            if out is not None and bound.output is not None and not same(out.nan_to_num(), bound.output.nan_to_num()):
                return True
    return False


def _mixes_samples(argument: MaskArgument, bound: Bound) -> Finding | None:
    """Whether the mask of one sample changes the result of another, for any meaning of the mask."""
    for tried in (t for t in argument.tried if t.error is None and t.shape.startswith("(B") and t.shape != LENGTHS):
        other = tried.mask.clone()
        other[0] = other[0].logical_not().to(other.dtype)
        first, second = (bound.output_of(bound.inputs, {argument.name: m.clone()}) for m in (tried.mask, other))
        if first is None or second is None:
            continue
        changed = (first.nan_to_num() - second.nan_to_num()).abs().flatten(1).amax(1) > 1e-9
        if changed[1:].any() and bound.repeats():
            words = f"argument {argument.name}, shape {tried.shape}: the mask of sample 0 changes the result of sample"
            line = _repeating_line(bound, argument, tried) or tried.line
            return Finding("mask-wrong-sample", f"{words} {int(changed[1:].nonzero()[0]) + 1}", line)
    return None


def _repeating_line(bound: Bound, argument: MaskArgument, tried: TriedMask) -> int | None:
    """The first line that repeats something in a call with this mask and not in one without."""
    usual = {n.line for n in bound.trace.nodes}
    nodes = bound.called({argument.name: tried.mask.clone()}).trace.nodes
    return next((n.line for n in nodes if n.op in REPEATS and n.line not in usual), None)


def _unused_line(bound: Bound, argument: MaskArgument) -> int | None:
    """Where a mask gets lost: a statement whose result is dropped, a branch that is empty or never taken."""
    tree = bound.case.tree
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == argument.name]
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.If) and argument.name in ast.unparse(n)]
    dropped = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and any(u in ast.walk(n) for u in uses)]
    empty = [n.body[0] for n in inside if len(n.body) == 1 and isinstance(n.body[0], ast.Pass)]
    for found in (dropped, empty):
        if found:
            return found[-1].lineno
    ran = _executed(bound, argument)
    skipped = bound.case.dead_branch() or bound.case.skipped_condition(argument.name, ran)
    if (line := bound.case.idle_line() or skipped) is not None:
        return line
    if (line := _vain_line(bound, argument)) is not None:
        return line
    nodes = find_attention(bound.trace)
    return bound.case.line_with(rf"\b{argument.name}\b") if nodes is None else nodes.softmax[0].outermost


def _vain_line(bound: Bound, argument: MaskArgument) -> int | None:
    """The last line that computes with scores only if there is a mask, although that changes nothing."""
    nodes, usual = find_attention(bound.trace), lines_run(bound)
    tried = next((t for t in argument.tried if t.error is None), None)
    if nodes is None or tried is None:
        return None
    size = nodes.softmax[0].value.numel()
    steps = bound.called({argument.name: tried.mask.clone()}).trace.nodes
    new = [n.line for n in steps if n.value.numel() == size and n.value.is_floating_point() and n.line not in usual]
    return next((line for line in reversed(new) if line is not None), None)


def _executed(bound: Bound, argument: MaskArgument) -> set[int]:
    """The lines that computed something in a call with this mask, of any number of axes that it takes."""
    found: set[int] = set()
    for tried in {t.mask.dim(): t for t in reversed(argument.tried) if t.error is None}.values():
        with contextlib.suppress(Exception):
            found |= lines_run(bound.called({argument.name: tried.mask.clone()}))
    return found


def _first_nan(argument: MaskArgument, bound: Bound) -> int | None:
    """The first line that computes something that is no number, in a call with a mask."""
    tried = next(t for t in argument.tried if t.seen is not None)
    nodes = bound.called({argument.name: tried.mask.clone()}).trace.nodes
    return next((n.line for n in nodes if n.value.is_floating_point() and bool(n.value.isnan().any())), None)


def _same_for_all(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> Iterator[Finding]:
    """Different masks that all have one and the same effect."""
    tables = [t for t in argument.tried if t.meaning == "other"]
    seen = [t.seen for t in tables if t.seen is not None]
    meant = [t.meant for t in tables if t.meant is not None]
    different = bool(seen) and any(not torch.equal(table, meant[0]) for table in meant)
    if different and not any(bool(table.any()) for table in seen) and (line := _first_nan(argument, bound)) is not None:
        words = f"argument {argument.name}, shape {tables[0].shape}: the scores are NaN from this line on"
        yield Finding("mask-nan", words, line)
    elif different and all(torch.equal(table, seen[0]) for table in seen):
        words = f"argument {argument.name}: {len(seen)} different masks, one pattern of visible keys"
        yield Finding(
            "mask-content-ignored", f"{words} ({pattern(seen[0])})", tables[0].line or reading.core.softmax_line
        )


def combined_masks(bound: Bound, reading: AttentionReading | None) -> Found:
    """Two mask arguments together must hide what either hides."""
    usable = [a for a in measured(bound, reading) if a.meaning in ("keep", "drop")]
    if reading is None or not measured(bound, reading):
        return
    yield from _with_causal(bound, reading, usable[0]) if usable else ()
    if len(usable) < 2:
        return
    tried = [argument.first(argument.meaning) for argument in usable[:2]]
    masks = {a.name: t.mask.clone() for a, t in zip(usable, tried, strict=False) if t is not None}
    words = f"{' and '.join(masks)} together"
    try:
        other = bound.called(masks)
    except Exception as error:
        line = error_line(error, bound.case.filename)
        yield Finding("masks-combined", f"{words}: {type(error).__name__}: {error}".splitlines()[0][:200], line)
        return
    core = MaskTrial(bound, reading, usable[0].name).same_arrangement(other)
    both = reading.visible
    for argument, one in zip(usable, tried, strict=False):
        if one is not None and one.meant is not None:
            both = both & (one.meant if argument.meaning == "keep" else ~one.meant)
    if core is not None and not agree(core.weights.nan_to_num() > 1e-30, both):
        lost = set().union(*(_executed(bound, argument) for argument in usable[:2])) - lines_run(other)
        line = bound.case.enclosing_condition(min(lost)) if lost else None
        joined = (n.line for n in reversed(other.trace.nodes) if n.op.startswith(JOINS) and len(n.parents) > 1)
        yield Finding("masks-combined", words, line or next(joined, None) or core.mask_line())


def _with_causal(bound: Bound, reading: AttentionReading, argument: MaskArgument) -> Iterator[Finding]:
    """A mask together with a flag for a causal one."""
    parameters = [] if isinstance(bound.thing, FunctionWithWeights) else signature(bound.thing)
    flag = next((p.name for p in parameters if is_causal_switch(p)), None)
    tried = argument.first(argument.meaning)
    if flag is None or tried is None or tried.meant is None or reading.pattern != "full":
        return
    try:
        bound.called({flag: True})  # where torch refuses this, the flag only says something of the mask
        other = bound.called({argument.name: tried.mask.clone(), flag: True})
    except Exception:  # it is refused, as by torch's fused attention
        return
    core = MaskTrial(bound, reading, argument.name).same_arrangement(other)
    visible = (tried.meant if argument.meaning == "keep" else ~tried.meant) & torch.ones_like(tried.meant).tril()
    if core is not None and not agree(core.weights.nan_to_num() > 1e-30, visible):
        line = bound.case.condition_around(core.mask_line(bound.trace), argument.name) or core.mask_line(bound.trace)
        yield Finding("masks-combined", f"{argument.name} and {flag}=True together", line)


def masks_elsewhere(bound: Bound, reading: AttentionReading | None) -> Found:
    """A mask must mean the same for inputs of other lengths, and where there are more keys than queries."""
    known = [a for a in measured(bound, reading) if a.meaning in ("keep", "drop")]
    known = [a for a in known if not replaces_causal(bound, a.name)]
    if reading is None or reading.pattern not in ("full", "causal") or bound.form.fixed or bound.length_fitted:
        return
    context = bound.sizes.context
    settings = [(replace(bound.sizes, T=context, S=context), False)]
    settings += [(bound.sizes, True)] if bound.form.cross and reading.pattern == "full" else []
    for argument in known:
        tried = argument.first(argument.meaning)
        for sizes, cross in settings:
            inputs = make_inputs(bound.form, sizes, seed=19, cross=cross)
            if tried is None or bound.output_of(inputs) is None:
                continue  # it does not take these lengths, mask or no mask
            T, S = inputs.query.shape[1], inputs.key.shape[1]
            yield from _masked_at(bound, reading, argument, tried, inputs, f"{T} queries and {S} keys")
        yield from _masked_at_equal_sizes(bound, reading, argument)


def _masked_at_equal_sizes(bound: Bound, reading: AttentionReading, argument: MaskArgument) -> Found:
    """With as many samples, queries and keys as heads, code that tells the axes of a mask by their sizes errs."""
    H = reading.core.weights.shape[1]
    inputs = make_inputs(bound.form, replace(bound.sizes, B=H, T=H, S=H), seed=23)
    if H == 1 or bound.output_of(inputs) is None:
        return
    made = {shape: mask.shape for shape, mask, _ in shaped_masks(H, H, H, H)}
    taken = [made.get(shape) for shape in argument.shapes()]
    for shape in argument.shapes():
        tried = argument.first(argument.meaning, shape)
        if tried is not None and shape in made and taken.count(made[shape]) == 1:  # else it may be either of two
            words = f"{H} samples, {H} heads and {H} tokens"
            found = list(_masked_at(bound, reading, argument, tried, inputs, words))
            yield from found
            if found:
                return


def _masked_at(
    bound: Bound, reading: AttentionReading, argument: MaskArgument, like: TriedMask, inputs: Inputs, words: str
) -> Found:
    """One call with a mask in the shape and type of another, for inputs of another length."""
    (B, T), S, H = inputs.query.shape[:2], inputs.key.shape[1], reading.core.weights.shape[1]
    made = {shape: (mask, meant) for shape, mask, meant in shaped_masks(B, H, T, S)}
    if like.shape not in made:
        return  # it is no table
    mask, meant = made[like.shape]
    expected = expected_output(reading, inputs, meant if argument.meaning == "keep" else ~meant)
    said = f"argument {argument.name}, shape {like.shape}, {words}"
    try:
        other = bound.called({argument.name: mask.to(like.mask.dtype)}, inputs=inputs)
    except Exception as error:
        if not is_deliberate(error) and isinstance(error, RuntimeError | IndexError):
            text = f"{said}: {type(error).__name__}: {error}".splitlines()[0][:200]
            yield Finding("mask-crashes", text, error_line(error, bound.case.filename))
        return
    if expected is None or other.output is None or not bool(torch.isfinite(expected).all()):
        return
    seen = meant if argument.meaning == "keep" else ~meant
    seen = seen.tril() if reading.pattern == "causal" else seen
    rows = seen.any(-1).all(1)  # in which every head sees a key
    if not same(expected[rows], other.output.nan_to_num()[rows], 1e-6):
        gap = float((expected - other.output).abs().nan_to_num().max())
        core = MaskTrial(bound, reading, argument.name).same_arrangement(other)
        line = None if core is None else core.mask_line(bound.trace)
        yield Finding("size-fixed", f"{said}: the result differs by up to {gap:.3g}", line or like.line)


def _usual_shapes_raise(argument: MaskArgument) -> bool:
    """Whether every mask that broadcasts to a table of queries × keys raises, at one line."""
    usual = [t for t in argument.tried if t.shape in ("(B,1,T,S)", "(B,1,1,S)", "(T,S)", "(B,T,S)", "(B,S)")]
    return bool(usual) and all(t.error is not None for t in usual) and len({t.line for t in usual}) == 1


def _takes_object(argument: MaskArgument, bound: Bound) -> bool:
    """Whether the code reads the mask from an attribute of the argument, as in `attn_mask.mask`."""
    for tried in (t for t in argument.tried if isinstance(t.error, AttributeError)):
        match = re.search(r"'Tensor' object has no attribute '(\w+)'", str(tried.error))
        if match and re.search(rf"mask\w*\.{match[1]}\b(?!\()", bound.case.text(tried.line)):
            return True
    return False


def _crash(argument: MaskArgument) -> Iterator[Finding]:
    """An error that no usual shape of the mask avoids."""
    tried = [t for t in argument.tried if t.error is not None and not is_deliberate(t.error)]
    sure = [t for t in argument.tried if isinstance(t.error, NameError) or "module 'torch" in str(t.error)]
    sure += [t for t in argument.tried if t.shape == LENGTHS and t.error is not None]
    places = {t.line for t in tried}
    same_place = len(places) == 1 and None not in places
    failed = len(tried) + sum(t.meaning == "misfit" for t in argument.tried)
    always = "mask" in plain(argument.name) and (same_place or failed == len(argument.tried))
    plainly = bool(tried) and all(isinstance(t.error, PLAIN_ERRORS) or "ambiguous" in str(t.error) for t in tried)
    if sure or plainly or (tried and always):
        likely = "(B,S)" if "pad" in plain(argument.name) else "(B,1,T,S)"
        first = next(iter([*sure, *(t for t in tried if t.shape == likely), *tried]))
        if first.error is not None and (words := condition(first.error)):
            yield Finding("tensor-as-condition", f"argument {argument.name}: {words}", first.line)
        else:
            yield Finding("mask-crashes", f"{type(first.error).__name__}: {first.error}", first.line)


def _is_admitted(bound: Bound, reading: AttentionReading, name: str) -> bool:
    """Whether a comment says that the mask is left out, or it is never read beside a built-in causal mask."""
    loaded = bound.case.loaded
    if loaded is not None and LEFT_OUT.search(loaded.source):
        return True
    return reading.pattern == "causal" and bound.case.never_reads(name)


def required_mask(bound: Bound, reading: AttentionReading | None) -> Found:
    """A mask that is None by default must accept None."""
    defaults = {p.name: p.default for p in signature(bound.thing)}
    names = [n for n in bound.form.fixed if n in bound.form.masks and defaults.get(n, 0) is None]
    if names and _returns_nothing(bound, names):
        yield Finding("no-return", f"without {names[0]}, it returns None", bound.case.return_line())
        return
    alone = _without(bound, names) if names else None
    if alone is not None:
        seen, words = read(alone), f"without {names[0]}"
        found = [f for f in stage_findings(alone, seen) if f.severity == "wrong"]
        yield from (replace(f, detail=f"{f.detail} ({words})") for f in found)
        if not found and seen is None:
            yield Note("untried", f"the call {words}")
        return
    failed = next((f for f in bound.failures if f.line is not None and f.called is not None), None)
    if names and failed is not None:
        inside = _set_inside(bound, failed.error)
        line = inside or bound.case.enclosing_condition(failed.line) or failed.line
        if re.search(rf"\b{names[0]}\b", bound.case.text(line)):
            words = f"{names[0]} is None unless it is given, and this line uses it as a tensor"
        else:
            words = f"{names[0]}=None, its default, raises {error_words(failed.error)}"
        words = f"without {names[0]}, this line is skipped, and its result is missing below" if inside else words
        yield Finding("option-crashes", words, line)


def _set_inside(bound: Bound, error: BaseException) -> int | None:
    """The line inside a condition, the only one that sets the local variable which a call has missed."""
    match = re.search(r"local variable '(\w+)'", str(error)) if isinstance(error, UnboundLocalError) else None
    name, tree = match[1] if match else None, bound.case.tree
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and any(ast.unparse(t) == name for t in n.targets)]
    found = [n for n in found if name not in {getattr(part, "id", "") for part in ast.walk(n.value)}]  # it reads itself
    return found[0].lineno if len(found) == 1 else None


def _without(bound: Bound, names: list[str]) -> Bound | None:
    """The call without these masks; None where it raises."""
    form = replace(bound.form, fixed={k: v for k, v in bound.form.fixed.items() if k not in names})
    with contextlib.suppress(Exception):  # it raises, which is another thing
        return bound.called(form=form)
    return None


def _returns_nothing(bound: Bound, names: list[str]) -> bool:
    """Whether the call without these masks runs and gives None."""
    form = replace(bound.form, fixed={k: v for k, v in bound.form.fixed.items() if k not in names})
    try:
        with bound.running(), torch.no_grad():
            return form.call(bound.thing, bound.inputs) is None
    except Exception:  # it raises, which is another thing
        return False


def misplaced_mask(bound: Bound, reading: AttentionReading | None) -> Found:
    """A mask must not be passed by position to another parameter of a function that has one called mask."""
    loaded = bound.case.loaded
    if loaded is None or reading is None or reading.scores is None:
        return
    tree = ast.parse(loaded.source)
    takes = {n.name: [a.arg for a in n.args.args] for n in ast.walk(tree) if isinstance(n, Function)}
    definition = definition_of(tree, getattr(bound.case.target, "__name__", ""))
    for call in ast.walk(definition) if definition is not None else ():
        if isinstance(call, ast.Call) and not any(isinstance(a, ast.Starred) for a in call.args):
            name = str(getattr(call.func, "attr", None) or getattr(call.func, "id", None))
            names = takes.get(name, [])
            names = names[1:] if isinstance(call.func, ast.Attribute) and names[:1] == ["self"] else names
            given = dict(zip(names, call.args, strict=False))
            by_name = {k.arg for k in call.keywords}
            for place, value in given.items():
                if isinstance(value, ast.Name) and value.id == "mask" and "mask" in set(names) - set(given) - by_name:
                    yield Finding("mask-misplaced", f"{name}(…) takes it as {place!r}", call.lineno)
                    return


def empty_row(bound: Bound, reading: AttentionReading | None) -> Found:
    """A query that may see no key must not give NaN."""
    for argument in measured(bound, reading):
        assert reading is not None  # noqa: S101 - otherwise nothing is measured
        shape = next((s for s in argument.shapes() if s.startswith("(B") and s != LENGTHS), None)
        tried = argument.first(argument.meaning, shape)
        if shape is None or tried is None or argument.meaning not in ("keep", "drop"):
            continue
        hidden = torch.full(tried.mask.shape, argument.meaning == "drop")
        hidden[1:] = ~hidden[1:]
        out = bound.output_of(bound.inputs, {argument.name: hidden.to(tried.mask.dtype)})
        if out is not None and torch.isnan(out).any():
            alone = bool(torch.isfinite(out[1:]).all())
            words = f"if every key of a sample is hidden, {'it' if alone else 'the whole batch'} becomes NaN"
            said = states_left_padding(bound.case) if reading.pattern == "causal" else None
            promised = states_no_nan(bound.case)
            if promised is not None:
                words += f", which line {promised} rules out"
                yield Finding("nan-empty-row", words, tried.line or reading.core.softmax_line, severity="wrong")
            elif said is None:
                yield Finding("nan-empty-row", words, reading.core.softmax_line)
            else:  # the first tokens see nothing but padding
                words += f"; padding comes first, as line {said} says, and then the first queries see no key"
                yield Finding("nan-empty-row", words, tried.line or reading.core.softmax_line, severity="wrong")
            return


def half_precision_masks(bound: Bound, reading: AttentionReading | None) -> Found:
    """The number that hides a key must fit into float16."""
    for argument in measured(bound, reading):
        tried = argument.first(argument.meaning) if argument.meaning else None
        if tried is not None and tried.shape != LENGTHS:
            mask = tried.mask.half() if tried.mask.is_floating_point() else tried.mask
            found = half_precision(bound, reading, {argument.name: mask})
            yield from (f for f in found if isinstance(f, Finding) and f.name == "half-fill")
