"""How it behaves when it is called again: gradients, evaluation mode, other batches, other lengths, grouped heads."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.arguments import constructor_role, parameters_of
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN, Inputs, leaves, make_inputs, modules, signature, tensors
from headwise.check.faults.stages import stage_findings
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.reading import AttentionReading, Projection, read
from headwise.check.trace import error_line, is_deliberate, learner_line

GROUPED = re.compile(r"group|gqa", re.IGNORECASE)


def _steady(a: Tensor | None, b: Tensor | None) -> bool | None:
    """Whether two outputs agree; None where one of them is missing."""
    return None if a is None or b is None else same(a.nan_to_num(), b.nan_to_num())


def without_keys(bound: Bound, reading: AttentionReading | None) -> Found:
    """Where keys are optional, the call without them takes another path through the code and must be right as well."""
    optional = [p.name for p in signature(bound.thing) if p.name in bound.form.roles and p.default is None]
    alone = {n: r for n, r in bound.form.roles.items() if n not in optional}
    if not optional or not alone:
        return
    form = replace(bound.form, roles=dict.fromkeys(alone, "self"))
    try:
        other = bound.called(form=form, inputs=make_inputs(form, bound.sizes))
    except Exception:
        return
    for finding in stage_findings(other, seen) if (seen := read(other)) is not None else ():
        yield replace(finding, detail=f"{finding.detail} (without {', '.join(optional)})")


def layers_in_forward(bound: Bound, reading: AttentionReading | None) -> Found:
    """A call must not create parameters."""
    created: list[int | None] = []
    original = nn.Parameter.__new__

    def counting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        created.append(learner_line(bound.case.filename))
        return original(cls, *args, **kwargs)

    nn.Parameter.__new__ = counting  # type: ignore[method-assign]
    try:
        bound.output_of(bound.inputs)
    finally:
        nn.Parameter.__new__ = original  # type: ignore[method-assign]
    if created:
        yield Finding("layers-in-forward", f"one call creates {len(created)} parameters", created[0])


def dropout(bound: Bound, reading: AttentionReading | None) -> Found:
    """Two calls after eval() must agree, also with dropout configured; in training, dropout must do something."""
    line = bound.trace.dropout_line()
    if _repeats(bound, bound.thing) is False:
        yield Finding("dropout-in-eval", "two calls with the same input differ", line)
        return
    dropping = _with_dropout(bound)
    if dropping is None:
        return
    if _repeats(bound, dropping) is False:
        yield Finding("dropout-in-eval", "with dropout 0.5, two calls after eval() differ", line)
        return
    for module in modules(dropping):
        module.train()
    if _repeats(bound, dropping):
        yield Finding("dropout-unused", "with dropout 0.5, two calls in training mode agree")


def _repeats(bound: Bound, thing: Any) -> bool | None:
    """Whether two calls give the same output; None where one gives none."""
    return _steady(bound.output_of(bound.inputs, thing=thing), bound.output_of(bound.inputs, thing=thing))


def _with_dropout(bound: Bound) -> Any:
    """The same object made with dropout 0.5, if its constructor has a dropout argument."""
    names = bound.built.names_with_role("dropout")
    try:
        return bound.rebuilt(**dict.fromkeys(names, 0.5)) if names else None
    except Exception:
        return None


def gradients(bound: Bound, reading: AttentionReading | None) -> Found:
    """Backward must run, and every parameter must be part of the result."""
    named = {k: v for k, v in tensors(bound.thing).items() if v.requires_grad}
    for tensor in named.values():
        tensor.grad = None
    try:
        with bound.running(), torch.enable_grad():
            out = bound.form.result(bound.form.call(bound.thing, bound.inputs), bound.inputs)
            if out is not None and out.requires_grad and named:
                out.nan_to_num().pow(2).sum().backward()
    except Exception as error:
        if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
            yield Finding("backward-fails", str(error).split(":")[0][:150], error_line(error, bound.case.filename))
        return
    if out is None or not named:
        return
    if not out.requires_grad:
        yield Finding("no-gradient", "the output does not require a gradient")
        return
    dead = [name for name, tensor in named.items() if tensor.grad is None]
    for tensor in named.values():
        tensor.grad = None
    if dead:
        yield Finding("dead-parameter", ", ".join(dead[:4]) + (" …" if len(dead) > 4 else ""))


def batch_leak(bound: Bound, reading: AttentionReading | None) -> Found:
    """The first sample's result must not change when all others do."""
    if bound.form.layout == "unbatched":
        return
    other = make_inputs(bound.form, bound.sizes, seed=11)
    mixed = Inputs(*(torch.cat([a[:1], b[1:]]) for a, b in zip(bound.inputs, other, strict=True)))
    if bound.inputs.key is bound.inputs.query:
        mixed = Inputs(mixed.query, mixed.query, mixed.query)
    first, second, again = (bound.output_of(inputs) for inputs in (bound.inputs, mixed, bound.inputs))
    if first is None or second is None or not _steady(first, again):
        return
    a, b = first[0].nan_to_num(), second[0].nan_to_num()
    if not same(a, b):
        gap = float((a - b).abs().max())
        yield Finding("batch-leak", f"changing samples 1 to {len(first) - 1} changes sample 0 by up to {gap:.3g}")


def small_batch(bound: Bound, reading: AttentionReading | None) -> Found:
    """A batch of one or two must give what the large batch gave."""
    if bound.form.layout != PLAIN or bound.repaired.names:  # names that we supplied hold one size only
        return
    whole = bound.output_of(bound.inputs)
    for count in (1, 2):
        part = Inputs(*(x[:count] for x in bound.inputs))
        try:
            out = bound.form.result(bound.call(part), part)
        except Exception as error:
            words = f"with a batch of {count}: {type(error).__name__}: {error}"
            yield Finding("crashes", words, error_line(error, bound.case.filename), severity="fragile")
            return
        if whole is not None and _steady(out, whole[:count]) is False:
            if _steady(bound.output_of(bound.inputs), whole):
                yield Finding("batch-leak", f"a batch of {count} gives another result for the same sample")
            return


def other_length(bound: Bound, reading: AttentionReading | None) -> Found:
    """Keys of another length than the queries must work."""
    if not bound.form.cross or bound.form.fixed_tensor or bound.repaired.names:
        return
    inputs = make_inputs(bound.form, bound.sizes, seed=5, cross=True)
    words = f"{bound.sizes.T} queries, {bound.sizes.S} keys"
    severity = "wrong" if "cross" in type(bound.thing).__name__.lower() else ""  # then another length is the point
    try:
        returned = bound.call(inputs)
    except Exception as error:
        words = f"{words}: {type(error).__name__}: {error}"
        yield Finding("cross-length", words, error_line(error, bound.case.filename), severity=severity)
        return
    if bound.form.result(returned, inputs) is None:
        yield Finding("cross-length", f"{words} give another shape", severity=severity)


def returned_weights(bound: Bound, reading: AttentionReading | None) -> Found:
    """Whether the weights are returned as well, of every head or as their mean."""
    weights = None if reading is None else reading.core.weights
    if weights is not None and any(same(t, weights) or same(t, weights.mean(1)) for t in leaves(bound.returned)):
        yield Note("good", "returned weights")


# Fewer key/value heads than query heads.


def grouped_heads(bound: Bound, reading: AttentionReading | None) -> Found:
    """A class that takes a number of key/value heads must be right with half as many as query heads."""
    names, fewer = _kv_names(bound), bound.sizes.H // 2
    if not names or fewer < 2 or reading is None or reading.understood < 5:
        return
    try:
        other = bound.called(thing=bound.rebuilt(**dict.fromkeys(names, fewer)))
    except Exception as error:
        found = []
        if not isinstance(error, AssertionError) and not is_deliberate(error):
            words = f"{names[0]}={fewer} for {bound.sizes.H} heads: {type(error).__name__}: {error}".splitlines()[0]
            is_the_point = GROUPED.search(getattr(bound.case.target, "__name__", ""))
            severity, line = "wrong" if is_the_point else "", error_line(error, bound.case.filename)
            found = [Finding("grouped-crashes", words[:200], line, severity=severity)]
    else:
        seen = read(other)
        found = [] if seen is None else _judged_groups(other, seen, f"with {names[0]}={fewer}", fewer)
    yield from found
    if not any(finding.name.startswith("grouped") for finding in found):
        yield Note("variant", f"grouped heads (also tried with {names[0]}={fewer})")


def _kv_names(bound: Bound) -> list[str]:
    config = bound.built.config
    names = [p.name for p in parameters_of(bound.case.target)] if config is None else config.asked
    return [name for name in names if constructor_role(name) == "kv_heads"]


def _judged_groups(bound: Bound, seen: AttentionReading, when: str, fewer: int) -> list[Finding]:
    found = [f for f in stage_findings(bound, seen) if f.severity == "wrong"]
    H, line = seen.core.weights.shape[1], seen.core.score_line
    keys, values = _groups(seen.key, H), _groups(seen.value, H)
    if found or keys is None or values is None:
        return [replace(f, detail=f"{f.detail} ({when})") for f in found]
    if keys != values:
        return [Finding("grouped-order", f"{when}: heads share keys as {keys} and values as {values}", line)]
    if keys != [h // (H // fewer) for h in range(H)] and len(set(keys)) == fewer:
        words = f"{when}: heads share keys and values as {keys}, where neighbors usually share"
        return [Finding("grouped-order", words, line, severity="fragile")]
    return []


def _groups(part: Projection | None, H: int) -> list[int] | None:
    """For every head, the number of its group: heads with the same weights."""
    if part is None or part.split != "heads":
        return None
    blocks = list(torch.unbind(part.weight.unflatten(0, (H, -1))))
    first = [next(i for i, other in enumerate(blocks) if same(block, other, 1e-6)) for block in blocks]
    order = list(dict.fromkeys(first))
    return [order.index(i) for i in first]
