"""Other sizes: widths, heads, lengths and batches, fewer key/value heads than query heads."""

import contextlib
import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from headwise.check.arguments import OTHER_SIZES, CallSizes, area, batch_for, constructor_role, parameters_of, plain
from headwise.check.binding import Bound
from headwise.check.calls import PICTURES, PLAIN, Inputs, leaves, make_inputs, tokens_of
from headwise.check.code.intent import stated_window, states_one_length
from headwise.check.faults.chunks import judged_parts
from headwise.check.faults.questions import number_in_place_of_argument
from headwise.check.faults.scores import is_of_distance
from headwise.check.faults.stages import stage_findings
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import tensors
from headwise.check.proof import TOLERANCE, expected_output, prediction_error
from headwise.check.reading import AttentionReading, Projection, read
from headwise.check.sizes import IN_PICTURES
from headwise.check.trace import Core, error_line, find_attention, is_deliberate
from headwise.check.vocabulary import MEMORY_WIDTH, call_role

GROUPED = re.compile(r"group|gqa", re.IGNORECASE)
INNER_WIDTH = re.compile(r"hid(d?e?n)|inner|attn|attention|latent|proj")
GROUPS = 2  # key/value heads for six query heads
LONG = 257  # tokens, more than the chunks that people choose
HEAD_WIDTH = re.compile(r"dimhead|dhead|headdim|headsize|headwidth|^d_?k$|^keydim$|^qkdim$")
QUARTERED = 16  # numbers in a head of which a quarter can be rotated
MORE = 3  # numbers in a width that is changed alone
OUTPUT_WIDTH = 2  # more in every head than the input width has, in the settings in which they differ


def small_batch(bound: Bound, reading: AttentionReading | None) -> Found:
    """A batch of one or two must give what the large batch gave."""
    if bound.form.layout == "unbatched":
        yield Note("absent", "it takes no batch")
        return
    if bound.form.layout != PLAIN or bound.repaired.names:  # names that we supplied hold one size only
        return
    whole = bound.output_of(bound.inputs)
    for count in (1, 2):
        part = bound.inputs.of_samples(count)
        try:
            out = bound.form.result(bound.call(part), part)
        except Exception as error:
            words = f"with a batch of {count}: {type(error).__name__}: {error}".splitlines()[0][:200]
            yield Finding("size-fixed", words, error_line(error, bound.case.filename))
            return
        if whole is not None and out is not None and not same(out.nan_to_num(), whole[:count].nan_to_num()):
            if bound.repeats():
                yield Finding("batch-leak", f"a batch of {count} gives another result for the same sample")
            return
    yield Note("good", "batches of 1 and 2")


def other_length(bound: Bound, reading: AttentionReading | None) -> Found:
    """Keys of another length than the queries must work."""
    if bound.form.layout != PLAIN and not tensors(bound.thing):
        return  # which axes are tokens is a guess
    if not bound.form.cross or bound.form.fixed_tensor or bound.repaired.names:
        return
    if reading is not None and reading.pattern != "full":
        yield Note("good", "queries and keys are the same tokens")  # as a built-in causal mask says
        return
    inputs = make_inputs(bound.form, bound.sizes, seed=5, cross=True)
    words = f"{bound.sizes.T} queries, {bound.sizes.S} keys"
    severity = "wrong" if "cross" in type(bound.thing).__name__.lower() else ""  # then another length is the point
    by_role = {role: name for name, role in bound.form.roles.items()}
    if not severity and {"query", "key"} <= set(by_role):
        stated = states_one_length(bound.case, by_role["query"], by_role["key"])
        severity = "fragile" if stated is not None else ""
    try:
        other = bound.called(inputs=inputs)
    except Exception as error:
        words = f"{words}: {type(error).__name__}: {error}"
        yield Finding("cross-length", words, bound.blamed(error), severity=severity)
        return
    if other.output is None:
        named = [name for name, role in bound.form.roles.items() if role == "memory" and call_role(name) == "memory"]
        asks = any(leaf.dim() == 3 and leaf.shape[1] == bound.sizes.S for leaf in leaves(other.returned))
        if asks and not named and "memory" in bound.form.roles.values():
            yield Note("untried", "which of the inputs asks, and which is read")
        else:
            yield Finding("cross-length", f"{words} give another shape", severity=severity)
    elif reading is not None and reading.pattern == "full":
        expected = expected_output(reading, inputs)
        if expected is not None and not same(expected, other.output, 1e-6):
            gap = float((expected - other.output).abs().max())
            yield Finding("cross-length", f"{words}: the result differs by up to {gap:.3g}", severity=severity)


def other_lengths(bound: Bound, reading: AttentionReading | None) -> Found:
    """A single token and a longer input must work and give what the reference gives."""
    if bound.form.layout.startswith(PICTURES) or bound.length_fitted or has_area(bound):
        yield Note("good", "it takes one length")
        return
    for length in (1, 2, bound.sizes.context):
        try:
            other = bound.of_length(length)
        except Exception as error:
            words = f"{length} tokens: {type(error).__name__}: {error}".splitlines()[0][:200]
            if is_deliberate(error) or isinstance(error, AssertionError) or bound.form.fixed_tensor:
                yield Note("untried", words)
            else:
                yield _left_behind(bound, words, length) or Finding(
                    "size-fixed", words, error_line(error, bound.case.filename)
                )
            return
        yield from _of_window(bound, reading, other, list(_judged(bound, reading, other, length)))
    yield Note("good", f"1, 2 and {bound.sizes.context} tokens")
    yield from _long_input(bound, reading)


def _left_behind(bound: Bound, words: str, length: int) -> Finding | None:
    """Whether only an earlier call makes this length fail: a new object takes it."""
    try:
        bound.of_length(length, thing=bound.rebuilt())
    except Exception:  # it fails there as well
        return None
    line = bound.case.line_of_state()
    said = f"after a call with {bound.sizes.T} tokens, {words}; a new object takes them"
    return Finding("remembers-calls", said[:200], bound.case.enclosing_condition(line) or line)


def _long_input(bound: Bound, reading: AttentionReading | None) -> Found:
    """An input of many tokens, where that is accepted: chunks and windows show only there."""
    if bound.form.layout != PLAIN or bound.form.fixed or reading is None or reading.pattern not in ("full", "causal"):
        return
    inputs = make_inputs(bound.form, replace(bound.sizes, B=2, T=LONG, S=LONG), seed=9)
    try:
        other = bound.called(inputs=inputs)
    except Exception:  # it does not take so many
        return
    found = [] if other.output is None else list(_judged(bound, reading, other, LONG))
    yield from _of_window(bound, reading, other, found)


def _of_window(bound: Bound, reading: AttentionReading | None, other: Bound, found: list[Finding | Note]) -> Found:
    """What was found in a longer call; where a window explains it, that is a variant, as wide as the file says."""
    core = _core(other) if found else None
    table = None if core is None else core.weights[0, 0] > 0
    if core is not None and table is not None and reading is not None and _hides_less_at_first(reading, table):
        T, longer = bound.inputs.query.shape[1], len(table)
        words = f"with {T} tokens, a token sees all of them; with {longer}, it sees only itself and those before it"
        yield Finding("causal-some-lengths", words, core.sliced_mask_line() or core.pattern_line(inverted=False))
        return
    ahead = table is not None and bool(table.triu(1).any())
    causal = any(isinstance(f, Finding) and f.name == "causal-some-lengths" for f in found)
    if core is None or table is None or not is_of_distance(table) or bool(table.all()) or (ahead and causal):
        yield from found
        return
    yield Note("variant", "a fixed window of visible keys")
    wide, stated = int(table[-1].sum()), stated_window(bound.case, _settings(bound))
    if stated is not None and not ahead and wide != stated[1]:
        words = f"a token sees {wide} keys, where line {stated[2]} says {stated[1]} with {stated[0]}={stated[1]}"
        yield Finding("window-size", words, core.pattern_line(inverted=False) or core.mask_line())


def _hides_less_at_first(reading: AttentionReading, table: torch.Tensor) -> bool:
    """Whether tokens see later ones in a short input and none in a longer one, which no window does."""
    if reading.scores is None or table.dim() != 2 or bool(table.triu(1).any()):
        return False
    if len(table) <= reading.visible.shape[-2]:
        return False
    return bool(reading.visible[0, 0].triu(1).any()) and bool(table.diagonal().all())


def _settings(bound: Bound) -> dict[str, int]:
    """The whole numbers that the constructor was given, defaults included."""
    defaults = {p.name: p.default for p in parameters_of(bound.case.target)} | bound.built.arguments
    return {name: value for name, value in defaults.items() if type(value) is int}


def _core(other: Bound) -> Core | None:
    nodes = find_attention(other.trace)
    return None if nodes is None else next(nodes.arrangements(*other.inputs.query.shape[:2]), None)


def _judged(bound: Bound, reading: AttentionReading | None, other: Bound, length: int) -> Found:
    found = _judged_length(reading, other, length)
    yield from judged_parts(other, found) if bound.in_parts and length > bound.sizes.T else found


def _judged_length(reading: AttentionReading | None, other: Bound, length: int) -> Found:
    out, inputs = other.output, other.inputs
    if out is None:
        yield Finding("size-fixed", f"{length} tokens give another shape")
        return
    kind = "other" if reading is None else reading.pattern
    expected = expected_output(reading, inputs) if reading is not None and kind in ("full", "causal") else None
    if expected is not None and not same(expected, out, 1e-6):
        if kind == "full" and _has_own_pattern(other):
            yield Note("untried", f"which keys a token should see among {length}")
            return
        gap = float((expected - out).abs().nan_to_num().max())
        name = "causal-some-lengths" if kind == "causal" else "size-fixed"
        core = _core(other) if kind == "causal" else None
        line = None if core is None else core.pattern_line(inverted=False) or core.sliced_mask_line()
        yield Finding(name, f"with {length} tokens, the result differs from the reference by up to {gap:.3g}", line)
    elif not torch.isfinite(out).all() and (reading is None or reading.scores is None or reading.scores.empty is None):
        yield Finding("size-fixed", f"with {length} tokens, the result is not finite")


def _has_own_pattern(other: Bound) -> bool:
    """Whether everything is right but that some keys are hidden, as by a window or by tokens that see all."""
    seen = read(other)
    if seen is None or seen.understood < 5 or seen.scores is None or bool(seen.visible.all()):
        return False
    return not [f for f in stage_findings(other, seen) if f.severity == "wrong"]


# Other widths and numbers of heads.


def other_sizes(bound: Bound, reading: AttentionReading | None) -> Found:
    """At two more settings of all sizes, it must be read and proven like the first."""
    if reading is None or bound.repaired.names:
        return
    tried = [f"{bound.sizes.E} wide with {bound.sizes.H} heads"]
    as_wide = _tables_as_wide(bound)
    for sizes in _settings_for(bound):
        sizes = fitting(bound, sizes)
        try:
            other = bound.resized(sizes)
        except Exception as error:
            yield from _failed(bound, sizes, error)
            return
        if other is None:
            yield Note("untried", "its sizes cannot be chosen")
            return
        yield from _judged_size(other, other.sizes, reading)
        as_wide &= _tables_as_wide(other)
        tried.append(f"{other.sizes.E} wide with {other.sizes.H}")
    yield Note("good", ", ".join(tried))
    for name in sorted(as_wide):
        words = f"{name} has {bound.sizes.E} rows and columns, the width of the model: longer inputs do not fit"
        own = re.escape(name.rpartition(".")[2])
        yield Finding("size-fixed", words, bound.case.line_with(rf"[\"']{own}[\"']|self\.{own}\b"))
    if reading.output is None or reading.output.fit.weight.shape[0] in (
        bound.sizes.out,
        bound.sizes.out * bound.sizes.H,
    ):
        yield from _widths(bound)


def _settings_for(bound: Bound) -> tuple[CallSizes, ...]:
    """Settings in which no axis of the input has the size of another."""
    return IN_PICTURES if bound.form.layout.startswith(PICTURES) else OTHER_SIZES


def _tables_as_wide(bound: Bound) -> set[str]:
    """Stored masks, tables of two values, with as many rows and columns as the model is wide."""
    held = bound.thing.named_buffers() if isinstance(bound.thing, nn.Module) else ()
    wide = [(name, table) for name, table in held if tuple(table.shape[-2:]) == (bound.sizes.E, bound.sizes.E)]
    return {name for name, table in wide if len(table.unique()) == 2}


def has_area(bound: Bound) -> bool:
    """Whether the constructor takes the height and width of an area with as many places as there are tokens."""
    return area(bound.sizes.T) in [value for value in bound.built.arguments.values() if type(value) is tuple]


def fitting(bound: Bound, sizes: CallSizes) -> CallSizes:
    """The setting with a length that the layout or a stored mask needs."""
    if has_area(bound):
        return replace(sizes, T=2 * sizes.T)  # two rows, so that rows and columns differ
    if bound.length_fitted:
        chosen = bool(bound.built.names_with_role("context"))
        return replace(sizes, T=sizes.context if chosen else bound.sizes.T)
    return replace(sizes, T=min(sizes.T, bound.sizes.T) if bound.in_parts else tokens_of(bound.form.layout, sizes.T))


def _words(sizes: CallSizes) -> str:
    width = f"width {sizes.E}" if sizes.out == sizes.E else f"input width {sizes.E}, output width {sizes.out}"
    return f"with {width} and {sizes.H} heads"


def _failed(bound: Bound, sizes: CallSizes, error: Exception) -> Found:
    """An error at other sizes is the learner's if every argument was understood and the code did not refuse them."""
    words = f"{_words(sizes)}: {type(error).__name__}: {error}".splitlines()[0][:200]
    line = error_line(error, bound.case.filename)
    own = (bound.sizes.E, bound.sizes.H) != (CallSizes().E, CallSizes().H)  # the class itself fixes some size
    refused = is_deliberate(error) or isinstance(error, AssertionError)
    fixed = number_in_place_of_argument(bound.case) if own and not refused else None
    if fixed is not None:
        yield Finding("size-fixed", f"{fixed.words}; {_words(sizes)} it raises an error", fixed.line)
    elif line is None or own or refused or not bound.built.certain:
        yield Note("untried", words)
    else:
        yield Finding("size-fixed", words, line)


def _judged_size(other: Bound, sizes: CallSizes, first: AttentionReading) -> Found:
    seen = read(other)
    if seen is None or other.output is None or seen.understood < first.understood:
        yield Note("untried", f"{_words(sizes)}, it could not be read")
        return
    found = [f for f in stage_findings(other, seen) if f.severity == "wrong"]
    if any(f.name.startswith(("rotary", "head-width")) for f in found) and _is_right_with_wide_heads(other, sizes):
        yield Note("untried", f"{_words(sizes)}, of which a part is rotated")
        return
    yield from (replace(f, detail=f"{f.detail} ({_words(sizes)})") for f in found)
    if not found:
        error = prediction_error(other, seen)
        if error is not None and not error < TOLERANCE:
            yield Note("doubt", f"{_words(sizes)}, the output differs by {error:.2g} from what was understood")


def _is_right_with_wide_heads(other: Bound, sizes: CallSizes) -> bool:
    """Whether nothing is wrong where a part of every head can be rotated, as a quarter of its numbers."""
    width = QUARTERED * sizes.H
    with contextlib.suppress(Exception):  # it takes the other width only
        wide = other.resized(replace(sizes, E=width, B=batch_for(width)))
        seen = None if wide is None else read(wide)
        if wide is not None and seen is not None:
            return not any(f.severity == "wrong" for f in stage_findings(wide, seen))
    return False


def _widths(bound: Bound) -> Found:
    """Where the constructor takes an input and an output width, or widths of keys and values, they may differ."""
    asked = bound.built.arguments if bound.built.config is None else bound.built.config.asked
    roles = {constructor_role(name) for name in asked}
    sizes = _settings_for(bound)[0]
    if {"width", "out_width"} <= roles and _is_inner_width(bound):
        yield Note("untried", "which of the widths in the constructor is that of the input")
    elif {"width", "out_width"} <= roles:
        more = -OUTPUT_WIDTH if _all_of_it(bound) else OUTPUT_WIDTH  # wider than the input, a head has too few numbers
        wide = sizes.E + more * sizes.H
        yield from _different(bound, fitting(bound, replace(sizes, O=wide)), "")
        yield from _refused_width(bound, fitting(bound, replace(sizes, E=sizes.E + 1, O=wide)))
    elif {"head_width", "value_width"} <= roles:
        yield from _different(bound, fitting(bound, replace(sizes, V=sizes.D + 1)), "")
    yield from _ignored_heads(bound, asked)
    if bound.built.config is None:
        yield from _ignored_head_width(bound)
        yield from _other_memory(bound)


def _all_of_it(bound: Bound) -> bool:
    """Whether every head is as wide as the output was asked to be, as in a wrapper around a list of heads."""
    return bound.output is not None and bound.output.shape[-1] == bound.sizes.out * bound.sizes.H != bound.sizes.out


def _ignored_heads(bound: Bound, asked: Iterable[str]) -> Iterator[Finding]:
    """Where the width of a head has a name of its own, the number of heads must not follow from it alone."""
    roles = {role: [n for n in asked if constructor_role(n) == role] for role in ("heads", "head_width", "width")}
    if not all(roles.values()) or not all(HEAD_WIDTH.search(plain(name)) for name in roles["head_width"]):
        return
    fewer = bound.sizes.H // 2
    try:
        seen = read(bound.called(thing=bound.rebuilt(**dict.fromkeys(roles["heads"], fewer))))
    except Exception:  # the widths must fit together, as an error says
        return
    if seen is not None and seen.core.heads.shape[1] == bound.sizes.H != fewer:
        name, width = roles["heads"][0], roles["head_width"][0]
        words = f"with {name}={fewer}, there are still {bound.sizes.H} heads: as many as {width}={bound.sizes.D} gives"
        yield Finding("option-ignored", words, bound.case.line_with(rf"=.*\b{width}\b"))


def _ignored_head_width(bound: Bound) -> Found:
    """Where the constructor takes the width of a head beside that of the model, heads must have it."""
    names = [p.name for p in parameters_of(bound.case.target) if HEAD_WIDTH.search(plain(p.name))]
    asked = bound.sizes.D + MORE
    if not names or not {"width", "heads"} <= {constructor_role(p.name) for p in parameters_of(bound.case.target)}:
        return
    try:
        seen = read(bound.called(thing=bound.rebuilt(**dict.fromkeys(names, asked))))
    except Exception:  # the widths must fit together, as an error says
        return
    if seen is not None and seen.core.query.shape[-1] == bound.sizes.D:
        words = f"with {names[0]}={asked}, heads are still {bound.sizes.D} wide"
        line = bound.case.line_with(rf"^\s*(self\.)?{names[0]}\s*=[^=]") or bound.case.line_with("def __init__")
        yield Finding("option-ignored", words, line)


def _other_memory(bound: Bound) -> Found:
    """Where the constructor takes the width of a memory, keys and values must be made from that width."""
    names = [p.name for p in parameters_of(bound.case.target) if MEMORY_WIDTH.fullmatch(plain(p.name))]
    if len(names) != 1 or "memory" not in bound.form.roles.values() or constructor_role(names[0]) != "width":
        return
    width = bound.sizes.E + MORE
    wide = make_inputs(bound.form, replace(bound.sizes, E=width))
    inputs = Inputs(bound.inputs.query, wide.key, wide.value)
    words = f"with {names[0]}={width} for a width of {bound.sizes.E}"
    try:
        other = bound.called(thing=bound.rebuilt(**{names[0]: width}), inputs=inputs)
    except Exception as error:
        if not is_deliberate(error) and isinstance(error, RuntimeError):
            said = f"{words}: {type(error).__name__}: {error}".splitlines()[0][:200]
            line = next((bound.case.line_of_attribute(name) for name in _refusing_layer(error)), None)
            yield Finding("widths-confused", said, line or error_line(error, bound.case.filename))
        return
    seen = read(other)
    found = [] if seen is None else [f for f in stage_findings(other, seen) if f.severity == "wrong"]
    yield from (replace(f, detail=f"{f.detail} ({words})") for f in found)


def _refusing_layer(error: Exception) -> Iterator[str]:
    """The name of the linear layer that refuses its input."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = frame.f_locals.get("self")
        if isinstance(layer, nn.Linear) and frame.f_code.co_name == "forward":
            yield from _names_of(layer, error)


def _line_of_layer(bound: Bound, sizes: CallSizes, error: Exception) -> int | None:
    """The line that makes the linear layer whose input width is wrong; None where the input is to blame."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer, x = frame.f_locals.get("self"), frame.f_locals.get("input")
        if isinstance(layer, nn.Linear) and isinstance(x, torch.Tensor) and frame.f_code.co_name == "forward":
            if layer.in_features == x.shape[-1] or x.shape[-1] not in (sizes.E, sizes.H * sizes.Dv):
                return None
            return next((bound.case.line_of_attribute(name) for name in _names_of(layer, error)), None)
    return None


def _names_of(layer: nn.Module, error: Exception) -> Iterator[str]:
    """Names of a layer in the modules whose calls an error went through."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner is not layer:
            yield from (name for name, module in owner.named_modules() if module is layer and name)


def _refused_width(bound: Bound, sizes: CallSizes) -> Found:
    """An input width that is no multiple of the heads must not be refused: only the output width is split.

    Where other arguments say how wide the inputs are, as `q_dim` does, the width is that of all heads together.
    """
    given = bound.built.arguments.items()
    if any(value == bound.sizes.E and constructor_role(name) in ("head_width", "value_width") for name, value in given):
        return
    if _splits_input(bound, sizes):
        return
    try:
        bound.resized(sizes)
    except (AssertionError, ValueError) as error:
        if is_deliberate(error) or isinstance(error, AssertionError):
            words = f"{_words(sizes)}, which it refuses: {type(error).__name__}: {error}"[:160]
            yield Finding("widths-confused", words, error_line(error, bound.case.filename))
    except Exception:  # what raises otherwise has raised before
        return


def _splits_input(bound: Bound, sizes: CallSizes) -> bool:
    """Whether heads share the width of the input, whatever the width of the output is."""
    width = sizes.E - 1  # without the one more that made it refuse
    try:
        other = bound.resized(replace(sizes, E=width))
        seen = None if other is None else read(other)
    except Exception:  # what raises says nothing about heads
        return False
    return seen is not None and seen.core.query.shape[-1] * sizes.H == width


def _different(bound: Bound, sizes: CallSizes, severity: str) -> Found:
    what = _words(sizes) if sizes.out != sizes.E else f"with keys {sizes.D} wide and values {sizes.Dv}"
    try:
        other = bound.resized(sizes)
    except Exception as error:
        if not is_deliberate(error) and not isinstance(error, AssertionError):
            words = f"{what}: {type(error).__name__}: {error}".splitlines()[0][:200]
            line = _line_of_layer(bound, sizes, error) or error_line(error, bound.case.filename)
            yield Finding("widths-confused", words, line, severity=severity)
        return
    if other is None or other.output is None:
        return
    width = other.output.shape[-1]
    if sizes.out != sizes.E and width == sizes.E:  # projected back, perhaps on purpose
        yield Note("untried", f"whether the output should be as wide as the input: {what}, it is {width} wide")
        return
    if sizes.out != sizes.E and width != sizes.out * (sizes.H if _all_of_it(bound) else 1):
        yield Finding("widths-confused", f"{what}, the output is {width} wide", severity=severity)
        return
    seen = read(other)
    found = [] if seen is None else [f for f in stage_findings(other, seen) if f.severity == "wrong"]
    yield from (replace(f, detail=f"{f.detail} ({what})") for f in found)


def _is_inner_width(bound: Bound) -> bool:
    """Whether the width is named for what lies between input and output, which are both as wide as the other one."""
    named = {role: list(bound.built.names_with_role(role)) for role in ("width", "out_width")}
    if [len(names) for names in named.values()] != [1, 1] or not INNER_WIDTH.search(plain(named["width"][0])):
        return False
    wide = bound.sizes.E + OUTPUT_WIDTH * bound.sizes.H
    with contextlib.suppress(Exception):  # it does not take such an input
        thing = bound.rebuilt(**{named["out_width"][0]: wide})
        other = bound.called(thing=thing, inputs=make_inputs(bound.form, replace(bound.sizes, E=wide)))
        return other.returned is not None
    return False


# Fewer key/value heads than query heads.


def grouped_heads(bound: Bound, reading: AttentionReading | None) -> Found:
    """A class that takes a number of key/value heads must be right with half as many as query heads."""
    names, fewer = _kv_names(bound), bound.sizes.H // 2
    if not names or fewer < 2 or reading is None or reading.understood < 5:
        return
    found = _with_groups(bound, names, fewer)
    if not found:
        with contextlib.suppress(Exception):  # sizes that cannot be chosen are noted elsewhere
            wide = bound.resized(OTHER_SIZES[0])  # 6 heads: as many groups as heads in one would hide a wrong axis
            found = [] if wide is None else _with_groups(wide, names, GROUPS)
    yield from found
    if not any(finding.name.startswith("grouped") for finding in found):
        yield Note("variant", f"grouped heads (also tried with {names[0]}={fewer})")


def _with_groups(bound: Bound, names: list[str], fewer: int) -> list[Finding]:
    """What is wrong with this number of key/value heads."""
    try:
        other = bound.called(thing=bound.rebuilt(**dict.fromkeys(names, fewer)))
    except Exception as error:
        if isinstance(error, AssertionError) or is_deliberate(error):
            return []
        words = f"{names[0]}={fewer} for {bound.sizes.H} heads: {type(error).__name__}: {error}".splitlines()[0]
        is_the_point = GROUPED.search(getattr(bound.case.target, "__name__", "")) or "kv" in plain(names[0])
        severity, line = "wrong" if is_the_point else "", error_line(error, bound.case.filename)
        return [Finding("grouped-crashes", words[:200], line, severity=severity)]
    seen = read(other)
    return [] if seen is None else _judged_groups(other, seen, f"with {names[0]}={fewer}", fewer)


def _kv_names(bound: Bound) -> list[str]:
    config = bound.built.config
    numbers = [p.name for p in parameters_of(bound.case.target) if not isinstance(p.default, bool)]
    return [name for name in (numbers if config is None else config.asked) if constructor_role(name) == "kv_heads"]


def _judged_groups(bound: Bound, seen: AttentionReading, when: str, fewer: int) -> list[Finding]:
    found = [f for f in stage_findings(bound, seen) if f.severity == "wrong"]
    H = seen.core.weights.shape[1]
    usual = [h // (H // fewer) for h in range(H)]
    keys, values = _groups(seen.key, H), _groups(seen.value, H)
    if found or keys is None or values is None:
        return [replace(f, detail=f"{f.detail} ({when})") for f in found]
    line = seen.core.sharing_line("value" if keys == usual else "key")
    if keys != values:
        return [Finding("grouped-order", f"{when}: heads share keys as {keys} and values as {values}", line)]
    if keys != usual and len(set(keys)) == fewer:
        words = f"{when}: heads share keys and values as {keys}, where neighbors usually share"
        return [Finding("grouped-order", words, line)]
    return []


def _groups(part: Projection | None, H: int) -> list[int] | None:
    """For every head, the number of its group: heads with the same weights."""
    if part is None or part.split != "heads":
        return None
    blocks = list(torch.unbind(part.weight.unflatten(0, (H, -1))))
    first = [next(i for i, other in enumerate(blocks) if same(block, other, 1e-6)) for block in blocks]
    order = list(dict.fromkeys(first))
    return [order.index(i) for i in first]
