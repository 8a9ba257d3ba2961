"""Switches for a built-in causal mask: in the constructor, in the call, and one that nobody turns on."""

import ast
import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from headwise.check.arguments import parameters_of
from headwise.check.binding import Bound
from headwise.check.calls import make_inputs
from headwise.check.faults.mask_meaning import (
    MaskTrial,
    agree,
    is_boolean,
    is_causal_switch,
    measured,
)
from headwise.check.faults.questions import lines_run, triangle_line
from headwise.check.faults.scores import leak_words
from headwise.check.faults.stages import stage_findings
from headwise.check.mistakes import Finding, Found, Note, error_words
from headwise.check.objects import FunctionWithWeights, signature
from headwise.check.reading import AttentionReading, pattern, read
from headwise.check.trace import error_line, is_deliberate

CAUSAL_FLAGS = ("causal", "is_causal", "masked", "mask", "use_mask", "causal_mask", "apply_mask", "use_causal_mask")
CAUSAL_MISTAKES = {
    "full": "causal-ignored", "future": "causal-inverted", "later": "causal-inverted",
    "strict": "causal-off-by-one", "ahead": "causal-off-by-one",
}  # fmt: skip


def constructor_switch(bound: Bound, reading: AttentionReading | None) -> Found:
    """A constructor argument that switches a causal mask on must do what it says."""
    if reading is None or reading.scores is None or bound.built.config is not None:
        return
    parameters = {p.name: p for p in parameters_of(bound.case.target)}
    for name in CAUSAL_FLAGS:
        p = parameters.get(name)
        if p is not None and (is_boolean(p) or p.default is p.empty):
            with contextlib.suppress(Exception):  # it was not made to be switched, or the switch needs more arguments
                thing = bound.rebuilt(**{name: True})
                try:
                    other = _called_causally(bound, thing)
                except Exception as error:
                    yield from _of_longest_only(bound, thing, name, error)
                    return
                yield from _switched(other, name)
                yield from _masked_beside(bound, reading, other, name)
                yield from _still_causal(bound.called(thing=bound.rebuilt(**{name: False})), name)
            return


def _of_longest_only(bound: Bound, thing: object, name: str, error: Exception) -> Iterator[Finding]:
    """A causal mask that fits inputs of the greatest length only; nothing where those fail as well."""
    bound.of_length(bound.sizes.context, thing=thing)
    words = f"with {name}=True, {bound.sizes.T} tokens raise {error_words(error)}; {bound.sizes.context} tokens work"
    yield Finding("buffer-not-sliced", words, error_line(error, bound.case.filename))


def _still_causal(off: Bound, name: str) -> Iterator[Finding]:
    """A causal mask that cannot be switched off."""
    seen = read(off)
    if seen is not None and seen.pattern == "causal" and "causal" in name:
        line = seen.core.mask_line() or triangle_line(off.case, seen) or seen.core.softmax_line
        line = off.case.condition_around(line, name) or line
        yield Finding("option-ignored", f"it is causal with {name}=False as well", line)


def _called_causally(bound: Bound, thing: object) -> Bound:
    """The call of a causal object; without a memory that may be left out, where it refuses one."""
    try:
        return bound.called(thing=thing)
    except Exception:
        form = bound.form_alone()
        if form is None:
            raise
        return bound.called(thing=thing, form=form, inputs=make_inputs(form, bound.sizes))


def _masked_beside(bound: Bound, reading: AttentionReading, other: Bound, name: str) -> Iterator[Finding]:
    """A mask argument of an object that is causal by its constructor."""
    usable = [a for a in measured(bound, reading) if a.meaning in ("keep", "drop")]
    tried = usable[0].first(usable[0].meaning) if usable else None
    if tried is None or tried.meant is None or reading.pattern != "full":
        return
    both = other.called({usable[0].name: tried.mask.clone()})
    core = MaskTrial(bound, reading, usable[0].name).same_arrangement(both)
    visible = (tried.meant if usable[0].meaning == "keep" else ~tried.meant) & torch.ones_like(tried.meant).tril()
    if core is not None and not agree(core.weights.nan_to_num() > 1e-30, visible):
        skipped = lines_run(other) - lines_run(both)  # lines that made the causal mask
        line = bound.case.line_with(rf"\b(if|elif)\b.*\b{usable[0].name}\b") if skipped else None
        line = line or core.mask_line(other.trace)
        yield Finding("masks-combined", f"{usable[0].name} beside {name}=True", line)


def causal_off(bound: Bound, reading: AttentionReading | None) -> Found:
    """A causal mask that is off by default must be on in a file that trains to predict the next token."""
    flag = next(
        (p.name for p in parameters_of(bound.case.target) if p.name in CAUSAL_FLAGS and p.default is False), None
    )
    if flag is None or reading is None or reading.pattern != "full" or bound.case.loaded is None:
        return
    tree = bound.case.whole_tree
    names = [p.name for p in parameters_of(bound.case.target)]
    name = getattr(bound.case.target, "__name__", "")
    made = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == name]
    off = [n for n in made if len(n.args) <= names.index(flag) and not {flag, None} & {k.arg for k in n.keywords}]
    shifted = _line_of_shifted_targets(tree)
    if made and len(off) == len(made) and flag not in _set_later(tree) and shifted is not None:
        words = (
            f"{flag} is False by default and nothing in this file sets it, and line {shifted} predicts the next token"
        )
        yield Finding("causal-off", words, off[0].lineno)


def _set_later(tree: ast.AST) -> set[str]:
    """Attributes that are assigned on something other than self."""
    targets = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in targets if getattr(n.value, "id", "") != "self"}


def _line_of_shifted_targets(tree: ast.AST) -> int | None:
    """The line of `x[:, 1:]` where the same function also reads `x[:, :-1]`: what follows is predicted."""
    for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
        found: dict[str, dict[str, int]] = {}
        for node in (n for n in ast.walk(function) if isinstance(n, ast.Subscript)):
            axes = ast.unparse(node.slice).replace(" ", "").strip("()").split(",")
            if axes[-1] in ("1:", ":-1"):
                found.setdefault(ast.unparse(node.value), {})[axes[-1]] = node.lineno
        line = next((lines["1:"] for lines in found.values() if len(lines) == 2), None)
        if line is not None:
            return line
    return None


def call_switch(bound: Bound, reading: AttentionReading | None) -> Found:
    """An argument of the call that switches a causal mask on must do what it says."""
    parameters = [] if isinstance(bound.thing, FunctionWithWeights) else signature(bound.thing)
    name = next((p.name for p in parameters if is_causal_switch(p)), None)
    if name is None:
        return
    try:
        other = bound.called({name: True})
    except Exception as error:
        if not is_deliberate(error):
            words = f"with {name}=True: {type(error).__name__}: {error}".splitlines()[0][:160]
            yield Finding("mask-crashes", words, error_line(error, bound.case.filename))
        return
    if reading is None or reading.pattern != "causal" or "causal" not in name:
        yield from _switched(other, name)
        return
    line = reading.core.mask_line() or reading.core.softmax_line
    line = bound.case.condition_around(line, name) or bound.case.enclosing_condition(line) or line
    seen = read(other)
    if seen is not None and seen.pattern == "full":
        words = f"it is causal with {name}=False, and not with {name}=True"
        yield Finding("causal-ignored", words, line)
    else:
        yield from _switched(other, name)
        yield Finding("option-ignored", f"it is causal with {name}=False as well", line)


def _switched(other: Bound, name: str) -> Found:
    """What is wrong with a call that should be causal."""
    seen, words = read(other), f"with {name}=True"
    found = [] if seen is None else [f for f in stage_findings(other, seen) if f.severity == "wrong"]
    yield from (replace(f, detail=f"{f.detail} ({words})") for f in found)
    if found:
        return
    if seen is None or seen.scores is None:
        yield Note("untried", f"what {name}=True does to the result")
        return
    line = triangle_line(other.case, seen) or seen.core.mask_line() or seen.core.softmax_line
    if line not in lines_run(other):
        line = other.case.enclosing_condition(line) or line
    line = other.case.idle_line() or line
    mistake = CAUSAL_MISTAKES.get(pattern(seen.scores.visible))
    if seen.scores.after == "masked":
        yield Finding("mask-after-softmax", words, line)
    elif seen.scores.leaks:
        yield Finding("mask-leaks", f"{words}: {leak_words(seen.scores)}", line)
    elif mistake is not None and (mistake != "causal-ignored" or "causal" in name):  # `mask=True` may mean another mask
        yield Finding(mistake, words, line)
