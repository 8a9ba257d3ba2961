"""Questions that need no match: one small function each, which answers with findings."""

import copy
import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.bound import Bound, double_by_default, quiet
from headwise.check.calling import Inputs, make_inputs
from headwise.check.conventions import switches
from headwise.check.findings import Finding
from headwise.check.fits import same
from headwise.check.grouped import grouped_heads
from headwise.check.lines import dropout_line
from headwise.check.names import constructor_role
from headwise.check.patterns import pattern
from headwise.check.reading import read
from headwise.check.repairs import Repairs, error_line, learner_line
from headwise.check.stages import Reading
from headwise.check.subject import modules, prepare, tensors
from headwise.check.usage import names_used

Probe = Callable[[Bound, Reading | None], list[Finding]]


def layers_in_forward(bound: Bound, reading: Reading | None) -> list[Finding]:
    """Parameters that come into being during a call."""
    born: list[int | None] = []
    original = nn.Parameter.__new__

    def counting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        born.append(learner_line(bound.filename))
        return original(cls, *args, **kwargs)

    nn.Parameter.__new__ = counting  # type: ignore[method-assign]
    try:
        bound.output_of(bound.inputs)
    finally:
        nn.Parameter.__new__ = original  # type: ignore[method-assign]
    return [Finding("layers-in-forward", f"{len(born)} parameters are made in one call", born[0])] if born else []


def evaluation(bound: Bound, reading: Reading | None) -> list[Finding]:
    """Two calls after eval() agree, also with dropout configured; and dropout does something in training."""
    findings: list[Finding] = []
    line = dropout_line(bound.trace)
    first, second = bound.output_of(bound.inputs), bound.output_of(bound.inputs)
    if first is not None and second is not None and not same(first.nan_to_num(), second.nan_to_num()):
        return [Finding("dropout-in-eval", "two calls with the same input differ", line)]
    wet = _with_dropout(bound)
    if wet is None:
        return findings
    first, second = bound.output_of(bound.inputs, thing=wet), bound.output_of(bound.inputs, thing=wet)
    if first is not None and second is not None and not same(first.nan_to_num(), second.nan_to_num()):
        return [Finding("dropout-in-eval", "with dropout 0.5, two calls after eval() differ", line)]
    for module in modules(wet):
        module.train()
    first, second = bound.output_of(bound.inputs, thing=wet), bound.output_of(bound.inputs, thing=wet)
    if first is not None and second is not None and same(first.nan_to_num(), second.nan_to_num()):
        findings.append(Finding("dropout-unused", "with dropout 0.5 two calls in training agree"))
    return findings


def _with_dropout(bound: Bound) -> Any:
    """The same object made with dropout one half, if its constructor knows dropout."""
    names = [k for k in bound.built.arguments if constructor_role(k) == "dropout"]
    if bound.built.config is not None:
        names = [k for k in bound.built.config.asked if constructor_role(k) == "dropout"]
    if not names:
        return None
    try:
        with quiet():
            wet = bound.again(**dict.fromkeys(names, 0.5))
            prepare(wet)
    except Exception:
        return None
    return wet


def gradients(bound: Bound, reading: Reading | None) -> list[Finding]:
    """Backward runs, and every parameter is part of the result."""
    named = {k: v for k, v in tensors(bound.thing).items() if v.requires_grad}
    for tensor in named.values():
        tensor.grad = None
    try:
        with Repairs(bound.filename, bound.repaired), quiet(), torch.enable_grad(), double_by_default():
            out = bound.form.result(bound.form.call(bound.thing, bound.inputs), bound.inputs)
            if out is None or not named:
                return []
            if not out.requires_grad:
                return [Finding("no-gradient", "the output does not require a gradient")]
            out.nan_to_num().pow(2).sum().backward()
    except RuntimeError as error:
        in_place = "modified by an inplace operation" in str(error)
        return (
            [Finding("backward-fails", str(error).split(":")[0][:150], error_line(error, bound.filename))]
            if in_place
            else []
        )
    except Exception:
        return []
    dead = [name for name, tensor in named.items() if tensor.grad is None]
    for tensor in named.values():
        tensor.grad = None
    return [Finding("dead-parameter", ", ".join(dead[:4]) + (" …" if len(dead) > 4 else ""))] if dead else []


def batch_leak(bound: Bound, reading: Reading | None) -> list[Finding]:
    """The first sample's result does not change when all others do."""
    if bound.form.layout == "unbatched":
        return []
    other = make_inputs(bound.form, bound.sizes, seed=11)
    mixed = Inputs(*(torch.cat([a[:1], b[1:]]) for a, b in zip(bound.inputs, other, strict=True)))
    if bound.inputs.key is bound.inputs.query:
        mixed = Inputs(mixed.query, mixed.query, mixed.query)
    first, second = bound.output_of(bound.inputs), bound.output_of(mixed)
    repeat = bound.output_of(bound.inputs)
    if first is None or second is None or repeat is None or not same(first.nan_to_num(), repeat.nan_to_num()):
        return []
    a, b = first[0].nan_to_num(), second[0].nan_to_num()
    if same(a, b):
        return []
    gap = float((a - b).abs().max())
    return [Finding("batch-leak", f"changing samples 1 to {len(first) - 1} changes sample 0 by up to {gap:.3g}")]


def small_batch(bound: Bound, reading: Reading | None) -> list[Finding]:
    """A batch of two gives what the large one gave; a batch of one as well."""
    if bound.form.layout != "batch first":
        return []
    whole = bound.output_of(bound.inputs)
    for count in (1, 2):
        part = Inputs(*(x[:count] for x in bound.inputs))
        try:
            out = bound.form.result(bound.call(part), part)
        except Exception as error:
            line = error_line(error, bound.filename)
            return [
                Finding(
                    "crashes", f"with a batch of {count}: {type(error).__name__}: {error}", line, severity="fragile"
                )
            ]
        if out is not None and whole is not None and not same(out.nan_to_num(), whole[:count].nan_to_num()):
            if not _steady(bound, whole):
                return []
            return [Finding("batch-leak", f"a batch of {count} gives another result for the same sample")]
    return []


def _steady(bound: Bound, before: Tensor) -> bool:
    again = bound.output_of(bound.inputs)
    return again is not None and same(again.nan_to_num(), before.nan_to_num())


def other_length(bound: Bound, reading: Reading | None) -> list[Finding]:
    """Keys of another length than the queries."""
    if not bound.form.cross or bound.form.fixed_tensor:
        return []
    inputs = make_inputs(bound.form, bound.sizes, seed=5, cross=True)
    lengths = f"{bound.sizes.T} queries, {bound.sizes.S} keys"
    severity = "wrong" if _only_cross(bound) else ""
    try:
        returned = bound.call(inputs)
    except Exception as error:
        line = error_line(error, bound.filename)
        return [Finding("cross-length", f"{lengths}: {type(error).__name__}: {error}", line, severity=severity)]
    if bound.form.result(returned, inputs) is None:
        return [Finding("cross-length", f"{lengths} give another shape", severity=severity)]
    return []


def _only_cross(bound: Bound) -> bool:
    """Whether it says by its name that it looks at another text, which is seldom as long as the first."""
    return "cross" in type(bound.thing).__name__.lower()


def half_precision(bound: Bound, reading: Reading | None, masks: dict[str, Any] | None = None) -> list[Finding]:
    """float16: runs, and gives numbers."""
    if not isinstance(bound.thing, nn.Module):
        return []
    try:
        half = copy.deepcopy(bound.thing).half()
        inputs = Inputs(*(x.half() for x in bound.inputs))
        with quiet(), torch.no_grad():
            bound.form.call(half, inputs, masks)
    except Exception as error:
        line = error_line(error, bound.filename)
        if "without overflow" in str(error) or "overflow" in str(error):
            return [Finding("half-fill", "float16 ends at 65504", line)]
        if "dtype" in str(error) or "Half" in str(error) or "same type" in str(error):
            return [Finding("half-fails", str(error).splitlines()[0][:120], line)]
    return []


def plain_tensors(bound: Bound, reading: Reading | None) -> list[Finding]:
    """Tensors and layers that the module does not know of, and whether it can move to another device."""
    if not isinstance(bound.thing, nn.Module):
        return []
    held = [
        (f"{path}.{name}".strip("."), part)
        for path, module in _fresh(bound).named_modules()
        for name, part in vars(module).items()
        if not name.startswith("_")
    ]
    found = [name for name, part in held if isinstance(part, Tensor) and not isinstance(part, nn.Parameter)]
    lists = [name for name, part in held if isinstance(part, list) and part and isinstance(part[0], nn.Module)]
    if lists:
        return [Finding("layers-in-list", ", ".join(lists))]
    if not found:
        return []
    stuck = _cannot_move(bound) and not any("device" in k for k in _constructor(bound))
    return [Finding("not-a-buffer", ", ".join(found[:3]), severity="wrong" if stuck else "fragile")]


def _fresh(bound: Bound) -> nn.Module:
    """A second object, never called: what a call leaves behind to look at later is no part of its state."""
    try:
        made = bound.built.make()
    except Exception:
        return bound.thing  # type: ignore[no-any-return]
    return made if isinstance(made, nn.Module) else bound.thing


def _constructor(bound: Bound) -> list[str]:
    try:
        return list(inspect.signature(bound.target).parameters)
    except (TypeError, ValueError):
        return []


def _cannot_move(bound: Bound) -> bool:
    """Whether a call fails after `.to(device)`: the meta device stands for any other."""
    try:
        moved = copy.deepcopy(bound.thing).to("meta")
        with quiet(), torch.no_grad():
            bound.form.call(moved, Inputs(*(x.to("meta") for x in bound.inputs)))
    except Exception as error:
        return "device" in str(error)
    return False


CONTEXTS = ("block_size", "context_length", "max_seq_len", "n_positions", "max_position_embeddings", "n_ctx")
CAUSAL_FLAGS = ("causal", "is_causal", "masked", "mask", "use_mask", "causal_mask", "apply_mask", "use_causal_mask")


def causal_switch(bound: Bound, reading: Reading | None) -> list[Finding]:
    """Where the constructor has a switch for a causal mask, it must do what it says."""
    if reading is None or reading.scores is None or bound.built.config is not None:
        return []
    try:
        parameters = inspect.signature(bound.target).parameters
    except (TypeError, ValueError):
        return []
    for name in CAUSAL_FLAGS:
        p = parameters.get(name)
        if p is None or not (isinstance(p.default, bool) or p.annotation is bool or p.default is p.empty):
            continue
        found = _switched(bound, {name: True})
        return [f for f in found if f.name != "causal-ignored" or "causal" in name]  # `mask=True` may mean another mask
    return []


def _switched(bound: Bound, change: dict[str, Any]) -> list[Finding]:
    try:
        with quiet():
            thing = bound.again(**change)
            prepare(thing)
        other = replace(bound, thing=thing)
        returned, trace = other.traced(bound.inputs)
        seen = read(other, trace, bound.form.result(returned, bound.inputs))
    except Exception:
        return []
    return judged_pattern(seen, f"with {next(iter(change))}=True")


def judged_pattern(seen: Reading | None, when: str) -> list[Finding]:
    """Findings about a pattern that should be causal."""
    if seen is None or seen.scores is None:
        return []
    kind, line = pattern(seen.scores.visible), seen.core.softmax_nodes[0].line
    if seen.scores.after == "masked":
        return [Finding("mask-after-softmax", when, line)]
    name = {"full": "causal-ignored", "future": "causal-inverted", "later": "causal-inverted",
            "strict": "causal-off-by-one", "ahead": "causal-off-by-one"}.get(kind)  # fmt: skip
    return [Finding(name, when, line)] if name else []


def call_switch(bound: Bound, reading: Reading | None) -> list[Finding]:
    """The same for a switch of the call."""
    for name in switches(bound):
        try:
            returned, trace = bound.traced(bound.inputs, {name: True})
            seen = read(bound, trace, bound.form.result(returned, bound.inputs))
        except Exception as error:
            line = error_line(error, bound.filename)
            if isinstance(error, NameError | AttributeError | TypeError):
                return [Finding("mask-crashes", f"with {name}=True: {type(error).__name__}: {error}", line)]
            return []
        found = judged_pattern(seen, f"with {name}=True")
        return [f for f in found if f.name != "causal-ignored" or "causal" in name]
    return []


def speed(bound: Bound, reading: Reading | None) -> list[Finding]:
    """How long one pass of a longer input takes, against the fused layer of the same size."""
    from headwise.layer import MultiHeadAttention

    T = 512
    names = {k: T for k in bound.built.arguments if constructor_role(k) == "context"}
    if bound.form.fixed_tensor or bound.form.layout != "batch first":
        return []
    if bound.built.config is not None:
        names = dict.fromkeys(CONTEXTS, T)
    try:
        with quiet():
            thing = bound.again(**names) if names and isinstance(bound.target, type) else copy.deepcopy(bound.thing)
            for module in modules(thing):
                module.float().eval()
        inputs = make_inputs(bound.form, replace(bound.sizes, B=2, T=T, S=T), dtype=torch.float32)
        theirs = _fastest(lambda: bound.call(inputs, thing=thing))
        fused = MultiHeadAttention(bound.sizes.E, bound.sizes.H, causal=True).eval()
        ours = _fastest(lambda: _no_grad(fused, inputs.query))
    except Exception:
        return []
    if theirs < 2.5 * ours:  # less may be noise
        return []
    detail = f"about {theirs / ours:.1f}× the time of the fused layer at {T} tokens"
    if "scaled_dot_product_attention" not in names_used(bound.target):
        detail += f"; the table of weights takes {2 * bound.sizes.H * T * T * 4 / 2**20:.0f} MiB"
    return [Finding("slow", detail)]


def _no_grad(layer: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return layer(x)


def _fastest(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


ALWAYS: tuple[Probe, ...] = (
    layers_in_forward, evaluation, gradients, batch_leak, small_batch, other_length, half_precision, plain_tensors,
    causal_switch, call_switch, grouped_heads, speed,
)  # fmt: skip
