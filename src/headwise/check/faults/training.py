"""How it trains: both modes agree, all weights get gradients, and no call makes layers."""

import contextlib
import copy
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.binding import Bound
from headwise.check.calls import Inputs
from headwise.check.faults.dropout import train, with_dropout
from headwise.check.faults.mask_meaning import measured
from headwise.check.faults.questions import OUTPUT_NAME, idle_role, role_in
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import modules, tensors
from headwise.check.reading import AttentionReading
from headwise.check.trace import PRODUCTS, RANDOM, error_line, find_attention, is_deliberate, learner_line

ROLES = ("query", "key", "value")
TWINS = (("q", "k", "v"), ("query", "key", "value"), ("queries", "keys", "values"), ("Q", "K", "V"))
DRAWS = 600  # samples of one input, which differ only by what dropout leaves out
SMALL = 1e-5  # relative change of weights, far above rounding
STEPS = 3  # of training, from the values that the constructor gives
STEP = 1e-4  # of finite differences, of fourth order
SIGMAS = 7.0  # a mean this far from the expected value is no accident, of some thousand numbers
OTHER_MODES = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
# Operations whose gradient is computed from their own result.
KEPT_FOR_BACKWARD = {"_softmax", "_log_softmax", "exp", "tanh", "sigmoid", "relu", "sqrt", "rsqrt"}


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


def training_mode(bound: Bound, reading: AttentionReading | None) -> Found:
    """Without dropout, training must equal evaluation; with it, results must be finite and equal on average."""
    found: list[Finding | Note] = list(_without_dropout(bound, [m for m in _usable_masks(bound, reading) if m]))
    dropping = None if found else with_dropout(bound)
    if dropping is not None:
        train(dropping)
        found += _finite_in_training(bound, reading, dropping)
        found += _equal_on_average(bound, reading, dropping) if not found and reading is not None else []
    yield from found


def _without_dropout(bound: Bound, masks: list[dict[str, Tensor]]) -> Iterator[Finding | Note]:
    """The result in training mode with all dropout set to zero."""
    if not isinstance(bound.thing, nn.Module) or any(isinstance(m, OTHER_MODES) for m in modules(bound.thing)):
        return
    try:
        thing = copy.deepcopy(bound.thing)
        train(thing)
        drops = [m for m in modules(thing) if isinstance(m, nn.Dropout)]
        if any(layer.p >= 1 for layer in drops):
            yield from _drops_all(bound, thing)
            return
        for module in drops:
            module.p = 0.0
        other = bound.called(thing=thing)
        masked = [(given, bound.output_of(bound.inputs, given, thing)) for given in masks]
    except Exception as error:
        words = f"after train(): {type(error).__name__}: {error}".splitlines()[0][:160]
        if is_deliberate(error) or isinstance(error, AssertionError):
            yield Note("untried", words)
        else:
            yield Finding("training-differs", words, error_line(error, bound.case.filename))
        return
    random = any(node.op in RANDOM for node in other.trace.nodes) and bound.repeats(thing) is not True
    if not random and bound.output is not None and other.output is not None and not _agree(other.output, bound.output):
        gap = _gap(other.output, bound.output)
        line = _branch(bound, other)
        line = bound.case.condition_around(line, "training") or line or bound.case.line_with(r"self\.training")
        yield Finding("training-differs", f"without dropout, the results differ by up to {gap:.3g}", line)
        return
    for given, output in masked if not random else ():
        calm = bound.output_of(bound.inputs, given)
        if calm is not None and output is not None and not _agree(output, calm):
            words = f"without dropout, with {next(iter(given))}, the results differ by up to {_gap(output, calm):.3g}"
            yield Finding("training-differs", words, bound.case.line_with(r"self\.training"))
            return


def _drops_all(bound: Bound, thing: Any) -> Iterator[Finding]:
    """A probability of one, which only a probability to keep would have as its default."""
    names = [n for n, m in thing.named_modules() if isinstance(m, nn.Dropout) and m.p >= 1]
    words = f"{names[0]} drops everything in training: p=1"
    yield Finding("dropout-biased", words, bound.case.line_of_attribute(names[0]))


def _branch(bound: Bound, other: Bound) -> int | None:
    """The first line that only one of two calls has executed."""
    first, second = ({n.outermost for n in b.trace.nodes if n.outermost} for b in (bound, other))
    return min(first ^ second, default=None)


def _agree(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and same(a.nan_to_num(), b.nan_to_num())


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().nan_to_num().max()) if a.shape == b.shape else float("nan")


def _finite_in_training(bound: Bound, reading: AttentionReading | None, dropping: Any) -> Iterator[Finding]:
    """No NaN in training, with and without a mask, unless evaluation gives it as well."""
    for masks in _usable_masks(bound, reading):
        calm = bound.output_of(bound.inputs, masks)
        with contextlib.suppress(Exception):
            other = bound.called(masks, thing=dropping)
            if masks and (line := _line_of_dropped_scores(other)) is not None:
                words = f"with {next(iter(masks))}, scores are set to zero at random before the softmax"
                yield Finding("dropout-on-scores", words, line)
                return
            if calm is None or other.output is None or not bool(torch.isfinite(calm).all()):
                continue
            if not bool(torch.isfinite(other.output).all()):
                when = f" and the argument {next(iter(masks))}" if masks else ""
                bad = int((~torch.isfinite(other.output)).sum())
                words = f"with dropout 0.5{when}, {bad} of {other.output.numel()} numbers are not finite"
                yield Finding(_cause_of_nan(other), words, other.trace.dropout_line())
                return


def _cause_of_nan(other: Bound) -> str:
    return "nan-in-training" if _line_of_dropped_scores(other) is None else "dropout-on-scores"


def _line_of_dropped_scores(other: Bound) -> int | None:
    """The last line that draws random numbers between the scores and the softmax."""
    nodes = find_attention(other.trace)
    behind = () if nodes is None else other.trace.ancestors(nodes.softmax[0].parents, PRODUCTS)
    return next((n.line for n in behind if n.op in RANDOM), None)


def _usable_masks(bound: Bound, reading: AttentionReading | None) -> Iterator[dict[str, Tensor]]:
    """No mask, then one for every mask argument that works."""
    yield {}
    for argument in measured(bound, reading):
        tried = argument.first(argument.meaning) if argument.meaning else None
        if tried is not None:
            yield {argument.name: tried.mask.clone()}


def _equal_on_average(bound: Bound, reading: AttentionReading, dropping: Any) -> Found:
    """Many draws for one input: weights and output must have the mean that evaluation gives."""
    if bound.form.fixed_tensor or bound.form.layout == "unbatched":
        return
    try:
        many = bound.called(thing=dropping, inputs=_repeated(bound.inputs))
        calm = bound.called(thing=_still(dropping), inputs=_repeated(bound.inputs, 2))
    except Exception:  # it does not take so many samples
        yield Note("untried", "the average over many draws")
        return
    if (before := _line_of_dropped_scores(many)) is not None:
        words = "scores are set to zero at random before the softmax"
        yield Finding("dropout-on-scores", words, before)
    elif (dropped := _dropped_projection(many)) is not None:
        found: list[Finding | Note] = list(_another_mean(many, calm, dropped))
        yield from found or [Note("untried", f"the average over many draws: line {dropped} drops queries or keys")]
    elif _starts_early(many):
        yield Note("untried", "the average over many draws, because dropout comes before the scores")
    elif _is_linear(many, reading):
        yield from _another_mean(many, calm, _dropping_line(many))


def _another_mean(many: Bound, calm: Bound, line: int | None) -> Iterator[Finding]:
    """Whether the mean over many draws differs from what evaluation gives."""
    if many.output is None or calm.output is None:
        return
    mean, error = _mean_and_error(many.output)
    if ((mean - calm.output[0]).abs() > SIGMAS * error + 1e-7).any():
        ratio = float((mean * calm.output[0]).sum() / calm.output[0].pow(2).sum())
        words = f"over {DRAWS} draws with dropout 0.5, the mean output is {ratio:.2f} times that of evaluation"
        yield Finding("dropout-biased", words, line)


def _dropped_projection(many: Bound) -> int | None:
    """The line that drops numbers of queries or keys, between their projection and the scores."""
    nodes = find_attention(many.trace)
    behind = () if nodes is None else many.trace.ancestors(nodes.scores[0].operand_nodes[-2:], PRODUCTS)
    return next((n.line for n in behind if n.op in RANDOM), None)


def _starts_early(many: Bound) -> bool:
    """Whether something random happens before the first softmax."""
    first = next((n.index for n in many.trace.nodes if n.op in RANDOM), None)
    softmax = min((n.index for n in many.trace.softmax_nodes()), default=0)
    return first is not None and first < softmax


def _dropping_line(many: Bound) -> int | None:
    """The line that multiplies with random zeros, or else that draws them."""
    drawn = next((n for n in many.trace.nodes if n.op in RANDOM), None)
    if drawn is None:
        return None
    used = (many.trace.nodes[i] for i in sorted(many.trace.reaches(drawn.index)) if i != drawn.index)
    steps = (n.line for n in used if n.op.rstrip("_") in ("mul", "masked_fill", "where") and n.line is not None)
    return next(steps, drawn.line)


def _repeated(inputs: Inputs, count: int = DRAWS) -> Inputs:
    made = {id(x): x[:1].repeat(count, 1, 1) for x in inputs}
    return Inputs(*(made[id(x)] for x in inputs))


def _still(thing: Any) -> Any:
    """A copy in evaluation mode."""
    other = copy.deepcopy(thing)
    for module in modules(other):
        module.eval()
    return other


def _is_linear(many: Bound, reading: AttentionReading) -> bool:
    """Whether all randomness meets the output by linear steps only, so that means must agree."""
    out = reading.output
    if out is None or out.before or out.after or not out.last:
        return False
    softmax = min((n.index for n in many.trace.softmax_nodes()), default=reading.core.nodes.softmax[0].index)
    first = next((n.index for n in many.trace.nodes if n.op in RANDOM), None)
    return first is not None and first > softmax


def _mean_and_error(draws: Tensor) -> tuple[Tensor, Tensor]:
    return draws.mean(0), draws.std(0) / len(draws) ** 0.5


# Gradients.


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
            line = error_line(error, bound.case.filename) or _line_in_place(bound)
            yield Finding("backward-fails", str(error).split(":")[0][:150], line)
        else:
            yield Note("untried", f"backward raises {type(error).__name__}")
        return
    if not named:
        yield Note("absent", "it has no weights")
    elif out is not None and out.is_inference():  # unlike `no_grad`, that mode is for nothing else
        yield Note("variant", "it is made for inference only (torch.inference_mode)")
    elif out is not None and not out.requires_grad:
        yield Finding("no-gradient", "the output does not require a gradient", _cut_line(bound))
    elif out is not None:
        found = list(_without_gradient(bound, named, reading)) or wrong_slope(bound)
        found = found or list(_behind_masks(bound, reading))
        yield from found or _stuck(bound)
    for tensor in named.values():
        tensor.grad = None


def _line_in_place(bound: Bound) -> int | None:
    """The line that overwrites a result which its own gradient needs, or else the last that overwrites anything."""
    nodes = bound.trace.nodes
    written = [n for n in nodes if n.op.endswith("_") and n.value.is_floating_point() and n.parents and n.line]
    needed = [n for n in written if nodes[n.parents[0]].op in KEPT_FOR_BACKWARD]
    return next((n.line for n in [*needed, *reversed(written)]), None)


def unused_twins(bound: Bound, reading: AttentionReading | None) -> list[Finding]:
    """Layers that no call uses, where the same layer for another role is used: `k_norm` beside `q_norm`."""
    named = {k: v for k, v in tensors(bound.thing).items() if v.requires_grad}
    live = {name.partition(".")[0] for name, tensor in named.items() if _matters(bound, tensor)}
    idle = [name for name in named if name.partition(".")[0] not in live]
    twins = [name for name in idle if _has_used_twin(name, set(named) - set(idle))]
    if not twins:
        return []
    line = _line_of_second_use(bound, twins[0].partition(".")[0], live) or _line_of_absence(bound, reading, twins[0])
    return [Finding("unused-projection", _some(twins), line)]


def _line_of_second_use(bound: Bound, idle: str, live: set[str]) -> int | None:
    """The line that calls the twin of an idle layer a second time, in place of it."""
    lines: dict[str, list[int | None]] = {}
    twins = [name for name in live if _has_used_twin(idle, {name})]
    layers = [(name, getattr(bound.thing, name, None)) for name in twins]
    hooks = [
        layer.register_forward_hook(
            lambda *_, name=name: lines.setdefault(name, []).append(learner_line(bound.case.filename))
        )
        for name, layer in layers
        if isinstance(layer, nn.Module)
    ]
    bound.output_of(bound.inputs)
    for hook in hooks:
        hook.remove()
    return next((called[-1] for called in lines.values() if len(called) > 1), None)


def _without_gradient(bound: Bound, named: dict[str, Tensor], reading: AttentionReading | None) -> Iterator[Finding]:
    dead = {name: tensor for name, tensor in named.items() if tensor.grad is None or _is_idle(bound, tensor)}
    cut = [name for name, tensor in dead.items() if _matters(bound, tensor)]
    cut += [name for name, tensor in named.items() if name not in dead and _has_cut_rows(bound, tensor)]
    if cut:
        yield Finding("gradient-cut", _some(cut), _cut_line(bound))
    unused = [name for name in dead if name not in cut]
    named_so = [n for n in unused if role_in(n) or OUTPUT_NAME.search(n.partition(".")[0])]
    layers = {n.partition(".")[0] for n in unused if named[n].dim() > 1} if _has_every_map(reading) else set()
    projections = [n for n in named_so if n.partition(".")[0] not in layers]  # whole layers are left over
    projections += [n for n in unused if n not in projections and _has_used_twin(n, set(named) - set(dead))]
    maps = [] if reading is None else [*reading.projections.values(), reading.output]
    makers = {n for part in maps if part is not None for n in part.role.names}  # not a table of which few rows are read
    projections += [n for n in makers & set(named) - set(dead) - set(cut) if _has_idle_rows(named[n], reading)]
    if projections:
        live = {n.partition(".")[0] for n in named if n not in dead}
        line = _line_of_second_use(bound, projections[0].partition(".")[0], live)
        line = line or _line_of_absence(bound, reading, projections[0])
        sure = "" if bound.built.certain else "fragile"  # a number of layers that was guessed may be too large
        yield Finding("unused-projection", _some(projections), line, severity=sure)
    elif unused:
        yield Finding("dead-parameter", _some(unused))


def _stuck(bound: Bound) -> Iterator[Finding]:
    """Weights that stay at zero in a few steps of training from the values that the constructor gives them."""
    if not isinstance(bound.case.target, type) or not isinstance(bound.thing, nn.Module):
        return
    with contextlib.suppress(Exception):  # it cannot be made again, or trains otherwise
        with bound.running():
            thing = bound.built.remake(bound.case.target, bound.sizes, {}).double()
        zero = {name: p for name, p in thing.named_parameters() if p.requires_grad and p.dim() > 1 and not p.any()}
        for _ in range(STEPS if len(zero) > 1 else 0):
            with bound.running(), torch.enable_grad():
                out = bound.form.result(bound.form.call(thing, bound.inputs), bound.inputs)
            if out is None:
                return
            thing.zero_grad()
            (out - 1).pow(2).sum().backward()
            with torch.no_grad():
                for parameter in thing.parameters():
                    parameter -= 1e-3 * (0 if parameter.grad is None else parameter.grad)
        stuck = [n for n, p in zero.items() if p.grad is not None and not p.any() and not p.grad.any()]
        if len(stuck) > 1 and all(_matters(bound, tensors(bound.thing)[name]) for name in stuck):
            words = f"{_some(stuck)} are all zero after {STEPS} steps of training"
            yield Finding(
                "never-learns",
                words,
                bound.case.line_with(r"zeros?_\(|constant_\(|fill_\(|\.zero_\(|Parameter\(\s*torch\.zeros"),
            )


def _is_idle(bound: Bound, tensor: Tensor) -> bool:
    """Whether a parameter takes part, with a gradient of exactly zero, and has no effect at all."""
    return tensor.grad is not None and not bool(tensor.grad.any()) and not _matters(bound, tensor, exact=True)


def _has_used_twin(name: str, used: set[str]) -> bool:
    """Whether the same layer for another role is used: `q_norm`, where `k_norm` is idle."""
    owner, _, rest = name.partition(".")
    words = re.split(r"(_)", owner)
    for i, word in enumerate(words):
        for role in next((set(family) - {word} for family in TWINS if word in family), set()):
            if ".".join(["".join([*words[:i], role, *words[i + 1 :]]), rest]).rstrip(".") in used:
                return True
    return False


def _role_of_twin(name: str) -> str | None:
    """Which of query, key and value a part of a layer's name stands for, as in `k_norm`."""
    words = name.partition(".")[0].split("_")
    return next((ROLES[family.index(w)] for w in words for family in TWINS if w in family), None)


def _behind_masks(bound: Bound, reading: AttentionReading | None) -> Iterator[Finding]:
    """A call with a mask takes another path, on which the gradient may be cut."""
    for masks in _usable_masks(bound, reading):
        with contextlib.suppress(Exception):  # it was called with this mask before
            for finding in wrong_slope(bound.called(masks)) if masks else ():
                yield replace(finding, detail=f"{finding.detail} (with {next(iter(masks))})")


def wrong_slope(bound: Bound) -> list[Finding]:
    """Whether the gradient of the input is the slope that finite differences give, along one direction."""
    if any(n.value.dtype in (torch.float32, torch.float16, torch.bfloat16) for n in bound.trace.nodes):
        return []  # it computes in lower precision, which finite differences would blow up
    if any(n.op in RANDOM for n in bound.trace.nodes):
        return []  # two calls differ
    directions = _directions(bound.inputs)
    try:
        expected, closer = (_difference(bound, directions, step) / step for step in (STEP, STEP / 8))
        leaves = {id(x): x.clone().requires_grad_() for x in bound.inputs}
        with bound.running(), torch.enable_grad():
            inputs = Inputs(*(leaves[id(x)] for x in bound.inputs))
            out = bound.form.result(bound.form.call(bound.thing, inputs, _copied(bound.given), as_is=True), inputs)
            if out is None or out.is_inference():
                return []
            if not out.requires_grad:
                return [Finding("no-gradient", "the output does not require a gradient", _cut_line(bound))]
            slopes = torch.autograd.grad(out.mul(_weights(out)).sum(), list(leaves.values()), allow_unused=True)
    except Exception:  # it writes in place, which has a name of its own
        return []
    pairs = zip(slopes, leaves, strict=True)
    found = sum(float((slope * directions[x]).sum()) for slope, x in pairs if slope is not None)
    if math.isnan(expected) or abs(found - expected) <= 1e-5 * (abs(found) + abs(expected)) + 1e-7:
        return []
    if abs(expected - closer) > 0.1 * abs(found - expected):
        return []  # a kink, as of a relu, has no slope
    words = f"the gradient of the input is {found:.4g} along one direction, finite differences give {expected:.4g}"
    return [Finding("gradient-cut", words, _cut_line(bound))]


def _directions(inputs: Inputs) -> dict[int, Tensor]:
    """A random direction for every input; a tensor in several roles has one."""
    generator = torch.Generator().manual_seed(19)
    return {id(x): torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in inputs}


def _difference(bound: Bound, directions: dict[int, Tensor], step: float) -> float:
    """How much the sum changes along a step, from four values."""
    moved = [_summed(bound, directions, times * step) for times in (1, -1, 2, -2)]
    return (8 * (moved[0] - moved[1]) - (moved[2] - moved[3])) / 12


def _summed(bound: Bound, directions: dict[int, Tensor], step: float) -> float:
    """A weighted sum of the output after a step of all inputs along their directions."""
    moved = {id(x): x + step * directions[id(x)] for x in bound.inputs}
    changed = Inputs(*(moved[id(x)] for x in bound.inputs))
    out = bound.form.result(bound.call(changed, _copied(bound.given)), changed)
    return 0.0 if out is None else float(out.mul(_weights(out)).sum())


def _copied(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, in tensors of their own: learners write in place."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}


def _weights(out: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)


def _line_of_absence(bound: Bound, reading: AttentionReading | None, name: str) -> int | None:
    """The line where a projection should have been used."""
    if reading is None:
        return bound.case.line_of_attribute(name)
    role, left = role_in(name), idle_role(bound, reading)
    if role is None and left is not None:
        return reading.core.use_line(left)
    if role is None and (own := _role_of_twin(name)) is not None:
        return reading.core.last_step(own)
    if role is None:
        return reading.core.output_line() if OUTPUT_NAME.search(name.partition(".")[0]) else reading.core.score_line
    return reading.core.projection_line(role)


def _has_idle_rows(tensor: Tensor, reading: AttentionReading | None) -> bool:
    """Whether at least a head's rows of a matrix get no gradient: one of its parts is never used."""
    if tensor.dim() != 2 or tensor.grad is None or reading is None:
        return False
    return int((tensor.grad == 0).all(1).sum()) >= reading.core.query.shape[-1] * reading.core.query.shape[1]


def _has_cut_rows(bound: Bound, tensor: Tensor) -> bool:
    """Whether rows without any gradient change the output: those of queries and keys in one layer for all three."""
    if tensor.dim() < 2 or tensor.grad is None:
        return False
    rows = (tensor.grad.flatten(1) == 0).all(1)
    return bool(rows.any()) and _matters(bound, tensor, rows)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "")


def _matters(bound: Bound, tensor: Tensor, rows: Tensor | None = None, exact: bool = False) -> bool:
    """Whether the output changes with this parameter, or with these rows of it; `exact` counts rounding as change."""
    kept = tensor.data.clone()
    if rows is None:
        tensor.data.mul_(1.5).add_(0.1)
    else:  # a small change: a unit that a relu keeps at zero stays there
        tensor.data[rows] *= 1 + SMALL
    try:
        other = bound.output_of(bound.inputs)
    finally:
        tensor.data.copy_(kept)
    if other is None or bound.output is None:
        return False
    return not torch.equal(other, bound.output) if exact else not _agree(other, bound.output)


def _has_every_map(reading: AttentionReading | None) -> bool:
    """Whether queries, keys, values and the output are all made by weights of their own: others are left over."""
    if reading is None or reading.understood < 5 or reading.output is None:
        return False
    maps = [part.weight for part in reading.projections.values()]
    apart = all(a.shape != b.shape or not same(a, b) for a, b in itertools.combinations(maps, 2))
    roles = [*(part.role for part in reading.projections.values()), reading.output.role]
    makers = {name for role in roles[:-1] for name in role.names}
    return apart and all(role.names for role in roles) and makers.isdisjoint(roles[-1].names)


def _cut_line(bound: Bound) -> int | None:
    """The line that cuts the gradient, where an operation says so."""
    return bound.case.line_with(
        r"\.detach\w*\(|\.data\b|no_grad|inference_mode|round\(|\.item\(|\.numpy\(|requires_grad"
    )
