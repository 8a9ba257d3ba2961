"""Mistakes between scores and weights: softmax, scale, and the pattern of visible keys."""

import ast
import contextlib
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from headwise.check.arguments import OTHER_SIZES, constructor_role, parameters_of, plain
from headwise.check.binding import Bound
from headwise.check.code.choices import compared
from headwise.check.code.intent import states_other_scale, states_slopes, states_strict, states_unscaled
from headwise.check.faults.questions import PARTIAL, asked_heads, has_effect, listed, near, of_stages, triangle_line
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import modules, signature, tensors
from headwise.check.reading import AttentionReading, Scores, pattern, read
from headwise.check.trace import VIEWS, Core, Node

UNSCALED = "those that are kept do not grow by 1 / (1 − p)"
CAUSAL_NAME = re.compile(r"(?<!non)(?<!not)causal", re.IGNORECASE)
CAUSAL_TEXT = re.compile(
    r"(a |an |the )?((?!non|not)\w+[- ]){0,2}?(causal|masked (multi[- ]?head(ed)? )?(self[- ])?attention)\b"
    r"(?![^.]*\b(if|optional\w*|unless|when)\b)",
    re.IGNORECASE,
)
SCALES = re.compile(r"scal|multiplier|temperature")  # keys of a configuration
OTHER_SCALE = 0.37  # that no configuration has, and small enough that weights are not all zero or one
NEAR_ZERO = -5.0  # a score of this size still gets a visible share of a row
OTHER_AXES = ("scale-length", "scale-batch")  # the right formula for the size of another axis


@of_stages
def unread_scores(bound: Bound, reading: AttentionReading) -> Found:
    """Weights that do not follow from queries and keys."""
    if reading.scores is not None:
        return
    rounded, twice = reading.core.rounding(), reading.core.earlier_softmax()
    if twice is not None:
        words = "the result of one softmax goes through another"
        yield Finding("softmax-twice", words, twice.line)
    elif not bool(torch.isfinite(reading.core.weights).all()):
        first = bound.trace.first_infinite() if not _is_finite(reading.core.query, reading.core.key) else None
        if first is not None:
            yield Finding("not-finite", f"the first one is the result of {first.op.strip('_')}", first.line)
        rows = ~torch.isfinite(reading.core.weights).all(-1)
        words = f"without any mask argument, {int(rows.sum())} of {rows.numel()} rows of weights are NaN"
        yield Finding("mask-nan", words, reading.core.mask_line())
    elif (active := reading.core.activated_scores()) is not None:
        words = f"they go through {active.op.strip('_')} before the softmax"
        yield Finding("scores-activated", words, active.line)
    elif rounded is None:
        yield Note("doubt", "how weights follow from queries and keys")
    else:
        words = "scores are rounded to whole numbers before the softmax (// is a division that rounds down)"
        yield Finding("scale-other", words, rounded.line)


@of_stages
def shifted_softmax(bound: Bound, reading: AttentionReading) -> Found:
    """The number that a softmax by hand subtracts from a row must be the same for all keys of that row."""
    trace = bound.trace
    made = [n for n in trace.ancestors([n.index for n in reading.core.nodes.softmax]) if n.op in ("exp", "exp2")]
    for node in (trace.nodes[p] for n in made for p in n.parents[:1]):
        operands = [trace.nodes[p] for p in node.parents[:2]] if node.op.rstrip("_") == "sub" else []
        least = operands[1] if len(operands) == 2 else None
        if least is not None and least.op in ("amax", "max") and least.value.shape[-1] > 1 == least.value.shape[-2]:
            words = "the maximum that is subtracted is taken over queries, and differs from key to key"
            yield Finding("softmax-axis", words, least.line)
            return


def named_layers(thing: Any) -> list[tuple[str, nn.Module]]:
    """The layers of an object by name; none where it is no module."""
    return [*thing.named_modules()] if isinstance(thing, nn.Module) else []


def _is_finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


@of_stages
def softmax(bound: Bound, reading: AttentionReading) -> Found:
    """Weights must sum to one over the keys, and in evaluation mode nothing may happen to them afterwards."""
    scores, core = reading.scores, reading.core
    if scores is None:
        return
    if scores.axis == "keys":
        yield Note("good", "softmax axis")
    elif scores.axis == "queries" and scores.swapped and core.turned_after_softmax:
        words = "the softmax runs over the keys, and the product with the values sums over the queries"
        yield Finding("weights-transposed", words, core.reader("value").line)
    else:
        layer = next((n for n, m in named_layers(bound.thing) if isinstance(m, nn.Softmax)), None)
        made = None if layer is None else bound.case.line_of_attribute(layer.rpartition(".")[2])
        line = made if made is not None and "oftmax(" in bound.case.text(made) else core.softmax_line
        yield Finding("softmax-axis", f"weights sum to 1 over {scores.axis}, not over keys", line)
    if scores.empty is not None and int(scores.empty[0, 0].sum()) > 1:
        rows, line = int(scores.empty[0, 0].sum()), core.pattern_line(False, nan=True) or core.mask_line()
        if core.hides_rows():
            words = f"{rows} of {scores.empty.shape[-1]} queries see no key at all"
            yield Finding("mask-hides-all", words, triangle_line(bound.case, reading) or line or core.softmax_line)
        else:
            words = f"without any mask argument, {rows} rows of weights in a table are NaN"
            yield Finding("mask-nan", words, line or core.softmax_line)
    if scores.after == "random":
        line = bound.case.keyword_line(core.trace.dropout_line(), "drop|training")
        words = f"; {UNSCALED}" if near(scores.after_factor, 1.0) else ""
        yield Finding("dropout-in-eval", f"weights are dropped at random after eval(){words}", line)
    if scores.after == "masked":
        yield Finding("mask-after-softmax", "weights are replaced after the softmax", core.after_softmax_line())
    if scores.leaks:
        multiplied = (n.line for n in core.before_softmax() if n.op.startswith("mul") and len(n.parents) > 1)
        line = core.mask_line() or next(multiplied, None) or core.softmax_line
        yield Finding("mask-leaks", leak_words(scores), line)
    if scores.relative:
        yield Note("variant", "a relative position term is added to the scores")
        if not scores.relative_is_linear:
            yield Note("untried", "the term that is added to the scores")
    if scores.cap:
        yield Note("variant", f"scores are capped at ±{scores.cap:.4g} by a tanh")
    if scores.bias is not None and (step := _triangle_step(scores.bias)) is not None:
        words = f"{step:+.4g} is added to the scores of later tokens, which hides nothing"
        yield Finding("mask-leaks", words, core.bias_line())
    elif scores.bias is not None:
        yield Note("variant", "a bias by position is added to the scores")
        if _grows_with_distance(scores.bias, scores.visible[0]):
            words = "the bias grows with the distance, so that far tokens get more weight"
            yield Finding("bias-sign", words, core.slope_line() or core.bias_line())
        elif (slopes := _other_slopes(bound, scores)) is not None:
            numbers = ", ".join(f"{slope:.4g}" for slope in slopes.tolist()[:4])
            words = f"the slopes are {numbers}, …; those of ALiBi are {_numbers(_alibi_slopes(len(slopes)))}"
            yield Finding("bias-slopes", words, bound.case.line_with(r"2(\.0)?\s*\*\*|pow\(|exp2") or core.bias_line())
        elif (table := _table_of_heads(bound, scores.bias)) is not None:
            words = f"{table} has numbers for every head, and the bias is the same in all of them"
            yield Finding("bias-heads", words, core.bias_line())
        elif (viewed := _viewed_bias(scores, core)) is not None:
            words = "its table is (queries, keys, heads), and it is added as (heads, queries, keys) in the same order"
            yield Finding("bias-view", words, viewed.line)


def leak_words(scores: Scores) -> str:
    """Why a fill value does not hide the future."""
    if scores.fill is not None and scores.fill < NEAR_ZERO:
        return f"future scores are {scores.fill:.4g} in the softmax, which is not low enough: large scores can reach it"
    return "future scores are set to a number near zero"


def _triangle_step(bias: Tensor) -> float | None:
    """What is added for later tokens, where a bias (H, T, S) has one number for them and one for all others."""
    T, S = bias.shape[1:]
    later = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    if T < 3 or not bool(torch.isfinite(bias).all()):
        return None
    plain = bias - bias[:, :, :1]  # a number for every row changes nothing
    steps = plain[:, later]
    even = same(steps, steps[:, :1].expand_as(steps), 1e-9) and bool((plain[:, ~later].abs() < 1e-9).all())
    return float(steps[0, 0]) if even and float(steps[0, 0].abs()) > 1e-9 else None


def _alibi_slopes(H: int) -> Tensor:
    """The slopes of the paper, for a number of heads that is a power of two."""
    return 2.0 ** (-8.0 * torch.arange(1, H + 1, dtype=torch.float64) / H)


def _numbers(slopes: Tensor) -> str:
    return ", ".join(f"{slope:.4g}" for slope in slopes.tolist()[:4])


def _other_slopes(bound: Bound, scores: Scores) -> Tensor | None:
    """The slopes of a fixed bias by distance, where the text names those of the paper and they are others."""
    bias = scores.bias
    if bias is None or not states_slopes(bound.case) or len(bias) & (len(bias) - 1):
        return None
    slopes = _slopes(bias, scores.visible[0])
    if slopes is None or len(bias) == 1 or any(t.numel() == len(bias) for t in tensors(bound.thing).values()):
        return None
    found, usual = (-slopes).sort().values, _alibi_slopes(len(bias)).sort().values
    return None if torch.allclose(found.double(), usual, rtol=1e-3) else -slopes


def _table_of_heads(bound: Bound, bias: Tensor) -> str | None:
    """The stored numbers, with an axis of the heads, that make a bias which does not differ between heads."""
    H = len(bias)
    if H == 1 or not same(bias, bias[:1].expand_as(bias), 1e-9):
        return None
    held = {n: b for m in modules(bound.thing) for n, b in m.named_buffers()} | tensors(bound.thing)
    tables = [n for n, t in held.items() if H in t.shape and bound.sizes.E not in t.shape and t.is_floating_point()]
    return next((n for n in tables if has_effect(bound, held[n])), None)


def _viewed_bias(scores: Scores, core: Core) -> Node | None:
    """The view that gives a table (T, S, H) the shape of (H, T, S) where its axes should be permuted."""
    bias, nodes = scores.bias, core.trace.nodes
    assert bias is not None  # noqa: S101 - the caller has asked
    H, T, S = bias.shape
    for table in (n for n in nodes if n.op in ("embedding", "index") and n.value.shape[-3:] == (T, S, H)):
        held = table.value.reshape(-1, T, S, H)[0].to(bias.dtype)
        right, viewed = (_row_centered(x, scores.visible[0]) for x in (held.permute(2, 0, 1), held.reshape(H, T, S)))
        if H > 1 and same(bias, viewed, 1e-6) and not same(bias, right, 1e-6):
            reached = core.trace.reaches(table.index)
            views = (n for n in nodes if n.index in reached and n.op in VIEWS and n.value.shape[-3:] == (H, T, S))
            return next(views, table)
    return None


def _row_centered(bias: Tensor, visible: Tensor) -> Tensor:
    """A table minus the mean of every row, which a softmax cannot tell from it."""
    count = visible.sum(-1, keepdim=True).clamp_min(1)
    return (bias - (bias * visible).sum(-1, keepdim=True) / count) * visible


def _grows_with_distance(bias: Tensor, visible: Tensor) -> bool:
    """Whether a bias (H, T, S) is a positive multiple of the distance in every head, where a key is visible."""
    slopes = _slopes(bias, visible)
    return slopes is not None and bool((slopes > 1e-9).all())


def _slopes(bias: Tensor, visible: Tensor) -> Tensor | None:
    """The numbers that a bias (H, T, S) multiplies the distance with, one for every head; None where it does not."""
    H, T, S = bias.shape
    away = (torch.arange(T)[:, None] - torch.arange(S)).abs().to(bias.dtype).expand(H, T, S)
    away = _row_centered(away, visible)
    slopes = (away * bias).sum((1, 2)) / (away * away).sum((1, 2)).clamp_min(1e-300)
    return slopes if same(bias * visible, slopes[:, None, None] * away, 1e-6) else None


@of_stages
def scale(bound: Bound, reading: AttentionReading) -> Found:
    """Scores must be divided by √D; to give another scale a name of its own, add it to `_scale_name`."""
    scores, D = reading.scores, reading.core.query.shape[-1]
    if scores is None or any(p is not None and p.then == "norm" for p in (reading.query, reading.key)):
        return  # a norm decides the size of the scores
    if _has_learned_scale(bound, reading):
        yield Note("variant", "a learned scale")
        return
    if scores.by_head:
        yield Note("untried", "every head has its own scale, and no parameter explains it")
        return
    factors = [None if p is None else p.role.factor for p in (reading.query, reading.key)]
    total = scores.factor * math.prod(1.0 if factor is None else factor for factor in factors)
    right, after = 1 / math.sqrt(D), scores.after_factor
    line = reading.core.scale_line(total, right)
    if near(total, right):
        if near(after, 1.0):
            yield Note("good", f"scale 1/√{D}")
    elif near(total, 1.0) and (scores.bias is not None or _may_add_positions(bound)):
        yield Note("variant", "scores are not scaled but have a position bias (as in T5)")
    elif (said := states_other_scale(bound.case)) is not None:
        yield Note("variant", f"scores are scaled by {total:.4g} in place of 1/√{D}, as line {said} says")
    elif near(total, 1.0) and (said := states_unscaled(bound.case)) is not None:
        yield Note("variant", f"scores are not scaled, as line {said} says")
    elif None in factors:
        yield Note("doubt", f"the scale of the scores: {total:.4g} was measured where 1/√{D} = {right:.4g} is usual")
    elif D != bound.sizes.D and near(total, bound.sizes.D**-0.5) and bound.built.certain:
        yield from _other_head_width(bound, reading)  # the scale is right for the width that was asked for
    elif (chosen := _chosen_scale(bound, scores)) is not None:
        yield Note("variant", f"the scale is set by {chosen}")
    else:
        name, literal = _scale_name(total, D, bound)
        line = bound.case.line_of_size(line) or line if name in OTHER_AXES else line
        line = _line_of_stored_scale(bound, reading, right) or (near(total, 1.0) and bound.case.idle_line()) or line
        yield Finding(name, _scale_words(total, D, literal), line)
    if not near(after, 1.0) and scores.after != "random":
        words = f"weights are multiplied by {scores.after_factor:.4g} after the softmax"
        yield Finding("scale-after-softmax", words, reading.core.after_softmax_line())


def _chosen_scale(bound: Bound, scores: Scores) -> str | None:
    """The argument, with a number of its own as default, that decides the scale: another number gives another one."""
    parameters = parameters_of(bound.case.target) if isinstance(bound.case.target, type) else []
    for p in parameters:
        if "scal" in plain(p.name) and type(p.default) in (int, float) and p.default not in (0, 1):
            with contextlib.suppress(Exception):  # it cannot be changed
                seen = read(bound.called(thing=bound.rebuilt(**{p.name: 4 * p.default})))
                if seen is not None and seen.scores is not None and not near(seen.scores.factor, scores.factor):
                    return f"{p.name}, an argument of the constructor"
    config = bound.built.config
    for name in () if config is None else [name for name in config.asked if SCALES.search(plain(name))]:
        with contextlib.suppress(Exception):  # it cannot be changed
            seen = read(bound.called(thing=bound.rebuilt(**{name: OTHER_SCALE})))
            if seen is not None and seen.scores is not None and not near(seen.scores.factor, scores.factor):
                return f"{name} of the configuration"
    named = re.search(rf"\bconfig\.(\w*({SCALES.pattern})\w*)", bound.case.own) if bound.case.text_only else None
    return None if named is None else f"{named[1]} of the configuration"


def _other_head_width(bound: Bound, reading: AttentionReading) -> Found:
    """Heads of another width than asked for; where there are fewer or more of them, that has a name of its own."""
    H, D = reading.core.query.shape[1::2]
    if asked_heads(bound) in (None, H):
        owner = reading.projections["query"].role.names if "query" in reading.projections else []
        line = bound.case.size_line(owner[0]) if owner else reading.core.split_line()
        words = f"{H} heads of {D} numbers where {bound.sizes.D} were asked for"
        yield Finding("head-width", words, line)


def _line_of_stored_scale(bound: Bound, reading: AttentionReading, right: float) -> int | None:
    """The line of the constructor that computes a wrong scale, where the line that applies it only reads it."""
    text = bound.case.text(reading.core.scale_line())
    for name in re.findall(r"self\.(\w+)", text):
        value = next((v for m in modules(bound.thing) if (v := vars(m).get(name)) is not None), None)
        number = None if constructor_role(name) else _number(value)  # a size is not a scale
        scale, multiplied = "scal" in name.lower(), _is_multiplied(text, name)  # scores are multiplied with a scale
        halves = (right**0.5, right**-0.5) if text.count(f"self.{name}") > 1 else ()  # of queries and of keys
        good = (right, *halves) if scale and multiplied else (right, 1 / right, *halves)
        good = (1 / right, *halves) if not scale and not multiplied else good
        if number and not any(near(number, value) for value in good):
            stored = bound.case.line_of_attribute(name)
            copied = re.search(rf"self\.{name}\s*=\s*{name}\b", bound.case.text(stored)) is not None
            return (bound.case.line_with(rf"\(.*\b{name}\s*=[^=]") if copied else None) or stored
    return None


def _number(value: Any) -> float | None:
    """A single number, possibly in a tensor; None for anything else."""
    return float(value) if isinstance(value, int | float | Tensor) and torch.as_tensor(value).numel() == 1 else None


def _is_multiplied(text: str, name: str) -> bool:
    """Whether a line multiplies with an attribute rather than dividing by it."""
    return re.search(rf"/\s*(math\.sqrt\()?self\.{name}\b", text) is None


def _scale_name(total: float, D: int, bound: Bound) -> tuple[str, bool]:
    """The name of a wrong scale, and whether it is a number of the code: one that other sizes leave as it is."""
    E, (B, T) = bound.sizes.E, bound.inputs.query.shape[:2]
    name = next((name for name, value in _formulas(E, D, B, T).items() if near(total, value)), "scale-other")
    if near(total, 1.0) or total == 0:
        return ("scale-missing" if near(total, 1.0) else name), False
    other = _scale_elsewhere(bound)
    if other is None:
        return name, False
    elsewhere, formulas = other
    follows = name == "scale-other" or near(elsewhere, formulas[name])
    return (name if follows else "scale-other"), near(elsewhere, total)


def _formulas(E: int, D: int, B: int, T: int) -> dict[str, float]:
    """The factors of wrong formulas, by the names of the mistakes."""
    return {
        "scale-d_model": E**-0.5,
        "scale-multiplied": D**0.5,
        "scale-no-sqrt": 1 / D,
        "scale-batch": B**-0.5,
        "scale-length": T**-0.5,
    }


def _scale_elsewhere(bound: Bound) -> tuple[float, dict[str, float]] | None:
    """The factor of the scores at other sizes, and what wrong formulas give there; None where that says nothing."""
    with contextlib.suppress(Exception):  # its sizes are fixed
        other = None if bound.resizes else bound.resized(OTHER_SIZES[0])
        seen = None if other is None else read(other)
        if other is not None and seen is not None and seen.scores is not None:
            factors = [None if p is None else p.role.factor for p in (seen.query, seen.key)]
            known = [factor for factor in factors if factor is not None]
            total, D = seen.scores.factor * math.prod(known), seen.core.query.shape[-1]
            formulas = _formulas(other.sizes.E, D, *other.inputs.query.shape[:2])
            return None if near(total, D**-0.5) else (total, formulas)  # right there: another way through the code
    return None


def _scale_words(total: float, D: int, literal: bool) -> str:
    right = f"√{D} = {math.sqrt(D):.3f}, the root of the head width"
    if near(total, 1.0) or total == 0:
        return f"they should be divided by {right}"
    if near(total, math.sqrt(D)):
        return f"they are multiplied by {total:.4g}, where they should be divided by {right}"
    divisor, square = 1 / total, round(1 / total**2)
    root = square > 1 and divisor > 0 and near(divisor**2, square) and not near(divisor, round(divisor))
    if literal and math.isclose(divisor, math.sqrt(D), rel_tol=1e-2):  # right for these heads only
        return f"they are always divided by {divisor:.4g}, which is √{D}: a number written into the code"
    written = ", a number written into the code" if literal else ""
    return f"they are divided by {f'√{square} = ' if root else ''}{divisor:.4g}{written}, not by {right}"


def _has_learned_scale(bound: Bound, reading: AttentionReading) -> bool:
    """Whether the scale follows a parameter of one number, or of one for each head."""
    H = reading.core.weights.shape[1]
    small = [t for t in tensors(bound.thing).values() if t.numel() in {1, H} and t.requires_grad]
    return any(_scale_follows(bound, reading, parameter) for parameter in small)


def _scale_follows(bound: Bound, reading: AttentionReading, parameter: Tensor) -> bool:
    """Whether another value of this parameter gives another scale."""
    kept = parameter.data.clone()
    parameter.data.add_(0.25)
    try:
        other = read(bound.called())
    except Exception:  # anything can be raised by a learner's code
        return False
    finally:
        parameter.data.copy_(kept)
    before, after = reading.scores, None if other is None else other.scores
    if before is None or after is None:
        return False
    return before.by_head or not near(after.factor, before.factor)


def _may_add_positions(bound: Bound) -> bool:
    """Whether the class has a switch or an argument for a position bias, which is off here."""
    names = [p.name for p in signature(bound.thing) + parameters_of(bound.case.target)]
    return any(re.search(r"(pos|rel)\w*bias", plain(name)) for name in names)


@of_stages
def built_in_mask(bound: Bound, reading: AttentionReading) -> Found:
    """A pattern of visible keys must be causal, or at least not look like a causal mask gone wrong."""
    kind, line = reading.pattern, reading.core.mask_line() or reading.core.softmax_line
    made = reading.core.pattern_line(inverted=kind == "later")
    if kind == "causal":
        yield Note("variant", "a built-in causal mask")
    elif kind in ("future", "later"):
        triangle = triangle_line(bound.case, reading)
        where = made if reading.core.mask_is_turned() else triangle  # a table that is used as it was made
        yield Finding("causal-inverted", _reversed_words(reading), where or made or triangle or line)
    elif kind == "strict" and (said := states_strict(bound.case)) is not None:
        yield Note("variant", f"a built-in causal mask that hides a token from itself, as line {said} says")
    elif kind == "strict":
        where = triangle_line(bound.case, reading) or made or line
        yield Finding("causal-off-by-one", "a token does not see itself", where)
    elif kind == "ahead":
        where = triangle_line(bound.case, reading) or made or line
        yield Finding("causal-off-by-one", "a token sees the one after it", where)
    elif kind != "full":
        yield from _other_pattern(bound, reading, line)


def _line_of_flag(bound: Bound, line: int | None) -> int | None:
    """The line of an argument that switches a causal mask on in some calls only, in the call that starts here."""
    return bound.case.keyword_line(line, "causal")


def _reversed_words(reading: AttentionReading) -> str:
    """What the second query sees, as an example."""
    seen = reading.visible[0, 0][1].nonzero().flatten().tolist()
    tokens = "token" if len(seen) == 1 else "tokens"
    return f"token 1 sees {tokens} {listed([str(i) for i in seen])}, and not token 0" if seen else ""


def _other_pattern(bound: Bound, reading: AttentionReading, line: int | None) -> Found:
    """A pattern that is neither full nor causal: of some heads only, of the distance only, or unknown."""
    visible, made = reading.visible, reading.core.pattern_line(inverted=False)
    by_head = [pattern(visible[:, h : h + 1]) for h in range(visible.shape[1])]
    table = visible[0, 0]
    if len(set(by_head)) > 1 and {"full", "causal"} <= set(by_head):
        causal, full = by_head.index("causal"), by_head.index("full")
        yield Finding("mask-some-heads", f"head {causal} is causal, head {full} sees every token", line)
    elif bool((visible == table).all()) and is_of_distance(table):
        yield Note("variant", "a fixed window of visible keys")
        if bool(table.triu(1).any()) and says_causal(bound):
            yield Finding(
                "causal-ignored",
                "its text says so, and a token sees tokens after it",
                made or _line_of_flag(bound, line),
            )
    elif bool((visible == table).all()) and is_of_distance(table | torch.eye(len(table), dtype=torch.bool)):
        yield Finding("causal-off-by-one", "a token does not see itself", made or line)
    elif PARTIAL.search(getattr(bound.case.target, "__name__", "")):
        yield Note("variant", "a fixed pattern of visible keys")
    else:
        yield Note("variant", "a fixed pattern of visible keys")
        yield Note("untried", "its pattern of visible keys, which is not a known one")


def is_of_distance(table: Tensor) -> bool:
    """Whether a key is visible or not by its distance from the query alone, and every query sees itself."""
    T, S = table.shape
    lines = (table.diagonal(offset) for offset in range(1 - T, S))
    return T == S and bool(table.diagonal().all()) and all(bool((line == line[0]).all()) for line in lines)


@of_stages
def masks_without_effect(bound: Bound, reading: AttentionReading) -> Found:
    """A built-in mask must hide something."""
    scores, core = reading.scores, reading.core
    if scores is None or scores.leaks or scores.after == "random" or reading.pattern != "full":
        return
    discarded, idle = core.discarded_mask(), core.idle_mask()
    if discarded is not None:
        yield Finding("mask-discarded", "the masked scores are not assigned to anything", discarded.line)
    stored = _stores_a_triangle(bound) or _stores_a_constant_table(bound)
    built_in = idle is not None and (stored or core.is_of_positions(idle))
    constant = idle is not None and core.is_constant(idle) and not bound.form.masks
    forgotten = bound.case.uncalled_method(r"causal|mask")
    if discarded is None and idle is None and forgotten is not None and not bound.form.masks:
        yield Finding("causal-ignored", f"the method {forgotten[0]} is never called", forgotten[1])
    elif discarded is None and idle is None and _stores_a_triangle(bound) and not _may_be_switched(bound):
        inside = bound.case.line_in_training(r"\w*(mask|causal|tri[lu])\w*")
        words = "a triangular mask is stored and " + ("used in training mode only" if inside else "never used")
        where = inside or bound.case.idle_line() or _line_of_flag(bound, core.softmax_line)
        yield Finding("causal-ignored", words, where)
    elif discarded is None and idle is None and says_causal(bound):
        words = "its name or its text says so, and every token sees the tokens after it"
        flag = bound.case.line_with(r"is_causal\s*=\s*False")
        yield Finding(
            "causal-ignored", words, flag or bound.case.idle_line() or _line_of_flag(bound, core.softmax_line)
        )
    if idle is not None and not bound.form.fixed_tensor and (built_in or constant) and not _may_hide(bound):
        words = "a position mask is applied, but the slice that is used hides nothing"
        words = words if built_in else "a mask of sizes alone is applied, and it hides nothing"
        made = next((n for n in core.trace.nodes if n.op in ("tril", "triu")), None)
        empty = made is not None and len(made.value.unique()) == 1
        line = core.misaligned_position(idle) or (None if built_in else core.maker_line(idle)) or idle.line
        yield Finding("causal-ignored", words, made.line if made is not None and empty else line)


def says_causal(bound: Bound) -> bool:
    """Whether the name of a class, or the first words of its text, promise a causal mask that no argument can bring."""
    named = CAUSAL_NAME.search(getattr(bound.case.target, "__name__", "").replace("_", "")) is not None
    named = named or CAUSAL_TEXT.match(str(getattr(bound.case.target, "__doc__", "") or "").strip()) is not None
    config = [] if bound.built.config is None else bound.built.config.asked
    switched = _has_causal_switch(bound) or any("causal" in plain(name) for name in config)
    return named and not bound.form.masks and not switched


def _may_hide(bound: Bound) -> bool:
    """Whether the mask hides something in a longer input, or in a mode that an argument chooses."""
    tree = bound.case.tree
    literals = {name: [v for v in values if isinstance(v, str)] for name, values in compared(tree).items()}
    taken = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    return any(len(literals.get(name, [])) > 1 for name in taken) or _hides_in_longer_input(bound)


def _hides_in_longer_input(bound: Bound) -> bool:
    """Whether the pattern of visible keys is not full for an input of the greatest length, as with a wide window."""
    for length in (bound.sizes.context, 8 * bound.sizes.context):
        with contextlib.suppress(Exception):  # it does not take so many tokens
            seen = read(bound.of_length(length))
            if seen is not None and seen.pattern != "full":
                return True
    return False


def _has_causal_switch(bound: Bound) -> bool:
    """Whether an argument of the constructor or the call, or an attribute, may switch a mask on."""
    names = [p.name for p in signature(bound.thing) + parameters_of(bound.case.target)]
    held = [k for m in modules(bound.thing) for k, v in vars(m).items() if isinstance(v, bool) and k != "training"]
    names += [name for name in held if not bound.case.holds_constant(name)]
    return any(re.search(r"causal|mask|decoder|autoregress|flash|sdp", plain(name)) for name in names)


def _may_be_switched(bound: Bound) -> bool:
    """Whether an argument may switch a stored mask on: of the whole, or of a part that it calls."""
    inside = (m for m in modules(bound.thing) if not type(m).__module__.startswith("torch."))
    switches = (p.name for m in inside for p in signature(m) if isinstance(p.default, bool))
    return _has_causal_switch(bound) or any(re.search("causal|mask", plain(name)) for name in switches)


def _stores_a_constant_table(bound: Bound) -> bool:
    """Whether a buffer is a square table of one value, as a mask that lost its triangle."""
    tables = (b for m in modules(bound.thing) for b in m.buffers() if b.dim() >= 2 and b.shape[-1] == b.shape[-2] > 1)
    return any(bool((table == table.flatten()[0]).all()) for table in tables)


def _stores_a_triangle(bound: Bound) -> bool:
    tables = (b for m in modules(bound.thing) for b in m.buffers() if b.dim() >= 2 and b.shape[-1] == b.shape[-2] > 1)
    return any(bool((b == b.tril()).all()) != bool((b == b.triu()).all()) for b in tables)
