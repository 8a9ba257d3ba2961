"""Arguments of the constructor that are no sizes: switches and modes, tried with every value that the code names."""

import ast
import contextlib
import difflib
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from headwise.check.arguments import constructor_role, parameters_of
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN
from headwise.check.code.choices import annotated, compared, kept_as
from headwise.check.code.example import example_arguments
from headwise.check.code.stubs import Stub
from headwise.check.configuration import ABSENT, KeyUses, as_dictionary, own_configuration, uses_of
from headwise.check.faults.causal import CAUSAL_FLAGS
from headwise.check.faults.crashes import EMPTY_VIEW
from headwise.check.faults.options import doubts, returned_with
from headwise.check.faults.questions import near, role_in
from headwise.check.faults.stages import stage_findings
from headwise.check.faults.training import unused_twins
from headwise.check.fits import same
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.objects import entry_code, tensors
from headwise.check.reading import AttentionReading, read
from headwise.check.ready_made import StandIn
from headwise.check.trace import error_line, is_deliberate
from headwise.check.vocabulary import MEMORY_WIDTH, plain

TRIALS = 16  # of all options together
# What an option may ask for: a step left out, shared weights, or a scale where its name speaks of one.
CHOSEN = re.compile(
    r"shared?|no-|one-|heads-(share|averaged)|single|unused|dead|dropout|too-wide|softmax-missing|window"
)
SCALED = re.compile(r"scal|temp|dot|cos|tau", re.IGNORECASE)
SHARED = re.compile(r"shar|tie|same|common|single", re.IGNORECASE)
BACKWARD = re.compile(r"rever|back|anti|future|right", re.IGNORECASE)
WINDOW = re.compile(r"window|lookback|radius|span")
ALMOST = 0.8  # likeness of a misspelled word
CUT_BEFORE = re.compile(r"^(Shifted)?Window(ed)?(Multi|Self|Att|MSA|MHA)", re.IGNORECASE)  # as in Swin
NARROW = 2  # tokens in a window
GUESSES = {"int": (2,), "float": (0.7,), "bool": (True,)}  # for an argument that is None by default
# Options that say from which input keys and values come.
STREAMS_CHOSEN = re.compile(r"selfatt|crossatt|encoderdecoder")


def constructor_options(bound: Bound, reading: AttentionReading | None) -> Found:
    """Every switch and mode of the constructor must run with each of its values and be right with each."""
    if reading is None or not isinstance(bound.case.target, type):
        return
    yield from _misspelled(bound)
    for name, value in itertools.islice(_settings(bound), TRIALS):
        try:
            other = _built_with(bound, name, value)
        except Exception as error:
            yield from _failed_option(bound, name, f"{name}={value!r}", error)
            continue
        yield from _judged(bound, reading, other, name, value)


def misread_keys(bound: Bound, reading: AttentionReading | None) -> Found:
    """A key of the file's own configuration must be read under its name, not replaced by a default."""
    config = bound.built.config
    if config is None:
        return
    given = [as_dictionary(value) for value in example_arguments(bound.case).values()]
    keys = {key for held in [own_configuration(bound.case.namespace), *given] for key in held}
    unread = {plain(key): key for key in keys - config.asked}
    for name in sorted(config.asked - keys):
        if plain(name) in unread:
            key = unread[plain(name)]
            words = f"the configuration has {key}; the code reads {name} and falls back on a default"
            yield Finding("option-ignored", words, bound.case.line_with(rf"\b{re.escape(name)}\b"))


def _misspelled(bound: Bound) -> Iterator[Finding]:
    """Modes whose default is none of the values that the code asks for, and almost one of them."""
    tree = bound.case.tree
    literals = compared(tree)
    for p in parameters_of(bound.case.target):
        values = [v for word in kept_as(tree, p.name) for v in literals.get(word, []) if type(v) is str]
        if isinstance(p.default, str) and p.default not in values:
            for value in difflib.get_close_matches(p.default, values, 1, ALMOST):
                words = f"{p.name}={p.default!r}, the default, is never compared with: the code asks for {value!r}"
                line = bound.case.line_with(rf"(==|!=|\bin\b|\bcase\b).*['\"]{re.escape(value)}['\"]")
                yield Finding("option-ignored", words, line)


def _line_without_bias(bound: Bound) -> int | None:
    """The first call that leaves out a bias, which what it calls takes."""
    for node in (n for n in ast.walk(bound.case.tree) if isinstance(n, ast.Call)):
        called = bound.case.namespace.get(ast.unparse(node.func))
        places = [p.name for p in parameters_of(called)] if inspect.isclass(called) else []
        given = {*places[: len(node.args)], *(k.arg for k in node.keywords)}
        if None not in given and any(_is_bias(name) for name in {*places} - given):
            return node.lineno
    return None


def _judged(bound: Bound, reading: AttentionReading, other: Bound, name: str, value: Any) -> Found:
    """What is wrong with the same class and another value of one option."""
    words = f"{name}={value!r}"
    if _is_bias(name) and (kept := _kept_bias(bound if value else other, name)) is not None:
        line = bound.case.line_of_attribute(kept.rpartition(".")[0])
        if re.search(r"\bbias\s*=\s*True\b", bound.case.text(line)):  # somebody wrote it down
            yield Note("untried", f"whether {kept} is meant to stay with {name}=False")
        else:
            yield Finding("option-ignored", f"{name}=False leaves {kept}", line)
        return
    if plain(name) == "batchfirst" and not bound.gives(other.output):
        shape = "(batch, tokens, width)" if value else "(tokens, batch, width)"
        said = f"{words}: an input of {shape} does not give the same result"
        yield Finding("option-ignored", said, bound.case.line_with(rf"\bself\.{name}\b(?!\s*=)"))
        return
    if bound.gives(other.output):
        if _is_bias(name) and len(tensors(other.thing)) == len(tensors(bound.thing)):
            line = bound.case.line_with(r"\bbias\s*=\s*(True|False)\b(?!.*def)") or _line_without_bias(bound)
            line = line or bound.case.line_with("def __init__")
            yield Finding("option-ignored", f"{words} adds no bias and removes none", line)
            return
        yield _without_effect(bound, name) or Note("good", words)
        yield from returned_with(other, name, value)
        return
    seen = read(other) if other.output is not None else None
    wrong = [] if seen is None else [f for f in stage_findings(other, seen) if f.severity == "wrong"]
    wrong = [f for f in wrong if not (f.name.startswith("scale-") and _has_the_same_scale(seen, reading))]
    wrong = [f for f in wrong if f.name != "wrong-role" or not STREAMS_CHOSEN.search(plain(name))]
    guessed = type(value) in (int, float)  # what such a number means is not known
    found = [f for f in wrong if not guessed and (_is_bias(name) or not _is_chosen(f, f"{name} {value}"))]
    found = found or ([] if wrong or guessed else unused_twins(other, seen))
    yield from (replace(finding, detail=f"{finding.detail} ({words})") for finding in found)
    proven = seen is not None and seen.understood == reading.understood and not list(doubts(other, seen))
    proven = proven or (_is_scale(seen, value) and len(wrong) == 1)
    if not found:
        yield Note("good" if proven else "untried", words if proven else f"what {words} does to the result")


def _without_effect(bound: Bound, name: str) -> Finding | Note | None:
    """What to say of an argument that changes nothing, where no line reads it: another value stands in its place."""
    if bound.built.config is not None or not bound.case.never_reads(name):
        return None
    line = bound.case.line_with(rf"\bself\.{name}\s*(:[^=]+)?=\s*(True|False|None|['\"])")
    if line is None:
        return Note("untried", f"{name}, which is never read")
    return Finding("option-ignored", f"{name} is never read: self.{name} is the same for all its values", line)


def stand_ins(bound: Bound, reading: AttentionReading | None) -> Iterator[Note]:
    """Parts that the caller hands over, which this file does not have."""
    for name, part in bound.built.arguments.items():
        if isinstance(part, StandIn):
            yield Note("untried", f"what the part {name} does: it was given one that changes nothing")


def windows(bound: Bound, reading: AttentionReading | None) -> Found:
    """A number that says how far a token sees must change what it sees."""
    if reading is None or not isinstance(bound.case.target, type) or bound.built.config is not None:
        return
    for p in parameters_of(bound.case.target):
        if type(p.default) is not int or not WINDOW.search(plain(p.name)):
            continue
        with contextlib.suppress(Exception):  # it is refused, or another argument must fit
            narrow, wide = (_of_window(bound, p.name, size) for size in (NARROW, bound.sizes.context))
            if narrow is not None and wide is not None and same(narrow, wide):
                if CUT_BEFORE.search(bound.case.name) and bound.case.never_reads_attribute(p.name):
                    yield Note("untried", f"{p.name}, which is never read: the caller may cut the windows")
                    return
                if _is_read_under_a_switch(bound, p.name):
                    yield Note("untried", f"{p.name}, which counts only with a switch that is off by default")
                    return
                words = f"{bound.sizes.context} tokens get the same result with {p.name}={NARROW} and without a limit"
                line = bound.case.line_of_attribute(p.name) or bound.case.line_with("def __init__")
                masked = reading.core.pattern_line(inverted=False) or reading.core.mask_line()
                yield Finding("option-ignored", words, masked or line)


def _is_read_under_a_switch(bound: Bound, name: str) -> bool:
    """Whether forward reads an attribute only where an argument that is off by default is on."""
    off = {p.name for p in parameters_of(bound.case.target) if p.default is False}
    branches = [n for n in ast.walk(bound.case.tree) if isinstance(n, ast.If | ast.IfExp)]
    switched = [n for n in branches if off & {getattr(part, "attr", "") for part in ast.walk(n.test)}]
    inside = {id(part) for n in switched for side in _sides(n.body) for part in ast.walk(side)}
    nodes = (n for n in ast.walk(bound.case.tree) if isinstance(n, ast.Attribute) and n.attr == name)
    read = [n for n in nodes if isinstance(n.ctx, ast.Load)]
    return bool(read) and all(id(n) in inside for n in read)


def _sides(body: ast.expr | list[ast.stmt]) -> list[Any]:
    return body if isinstance(body, list) else [body]


def _of_window(bound: Bound, name: str, size: int) -> Tensor | None:
    """The output for many tokens with the same weights and this window."""
    thing = bound.rebuilt(**{name: size})
    thing.load_state_dict(bound.thing.state_dict(), strict=False)
    return bound.of_length(bound.sizes.context, thing=thing).output


def _is_chosen(finding: Finding, words: str) -> bool:
    """Whether an option of this name and value may ask for what is otherwise a mistake."""
    if finding.name.startswith("scale"):
        return SCALED.search(words) is not None
    if finding.name == "wrong-role" and SHARED.search(words):
        return True
    backward = finding.name.startswith("causal") and BACKWARD.search(words) is not None
    return backward or CHOSEN.match(finding.name) is not None


def _has_the_same_scale(seen: AttentionReading | None, reading: AttentionReading) -> bool:
    """Whether scores have the factor that they had before, so that the option did not change it."""
    scores = (None if r is None else r.scores for r in (seen, reading))
    factors = [s.factor for s in scores if s is not None and near(s.after_factor, 1.0)]
    return len(factors) == 2 and near(*factors)


def _is_scale(seen: AttentionReading | None, value: Any) -> bool:
    """Whether the scores are multiplied with this number, or divided by it."""
    factor = None if seen is None or seen.scores is None else seen.scores.factor
    return factor is not None and type(value) in (int, float) and (near(factor, value) or near(factor, 1 / value))


def _built_with(bound: Bound, name: str, value: Any) -> Bound:
    """The same class with another value of one option, called; `batch_first` also says where the batch is."""
    layout = bound.form.layout
    if plain(name) == "batchfirst":
        layout = PLAIN if value else "batch second"
    return bound.called(thing=bound.rebuilt(**{name: value}), form=replace(bound.form, layout=layout))


def _settings(bound: Bound) -> Iterator[tuple[str, Any]]:
    """Options with the values to try: both positions of a switch, every value that the code compares a mode with."""
    if bound.built.config is not None:
        yield from _keys(bound)
        return
    tree, guessed = bound.case.tree, _asked_for(bound)
    literals = compared(tree)
    for p in parameters_of(bound.case.target):
        now = bound.built.arguments.get(p.name, p.default)
        names = kept_as(tree, p.name)
        if p.name not in CAUSAL_FLAGS and isinstance(now, bool):
            yield p.name, not now
        elif constructor_role(p.name) is None and (now is None or isinstance(now, str)):
            values = [v for word in names for v in literals.get(word, []) if type(v) is str]
            values = values or annotated(p.annotation)
            yield from ((p.name, value) for value in dict.fromkeys(values) if value != now)
            if not values and now is None and names & guessed and p.name not in bound.built.arguments:
                yield from _guess(bound, p)


def _guess(bound: Bound, p: inspect.Parameter) -> Iterator[tuple[str, Any]]:
    """A number for an argument that is None by default: the first with which it can be built and called."""
    kinds = [v for kind, values in GUESSES.items() if kind in str(p.annotation) for v in values]
    for value in kinds or [v for values in GUESSES.values() for v in values]:
        with contextlib.suppress(Exception):  # it is no such number
            _built_with(bound, p.name, value)
            yield p.name, value
            return


def _asked_for(bound: Bound) -> set[str]:
    """Names in the conditions of parts that never ran."""
    unrun = bound.case.coverage.unrun(bound.case.whole, entry_code(bound.thing))
    nodes = [n for part in unrun for test in part.tests for n in ast.walk(test)]
    return {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.id for n in nodes if isinstance(n, ast.Name)}


def _keys(bound: Bound) -> Iterator[tuple[str, Any]]:
    """The same for the keys of a configuration; only where every one of them is understood."""
    config = bound.built.config
    if config is None or not bound.built.certain:
        return
    uses = uses_of(bound.case.target)
    unrun = bool(bound.case.coverage.unrun(bound.case.whole, entry_code(bound.thing)))  # then a flag may lead there
    for name in sorted(config.asked):
        now = getattr(config, name, None)
        if isinstance(now, bool) and (_is_bias(name) or (unrun and _is_flag(uses, name))):
            yield name, not now
        if name in config.tested:
            yield name, ABSENT
        yield from ((name, value) for value in dict.fromkeys(uses.strings.get(name, [])) if value != now)


def _is_flag(uses: KeyUses, name: str) -> bool:
    """Whether code asks if a key is true, and a causal mask is not what it switches."""
    return "flag" in uses.kinds.get(name, ()) and name not in CAUSAL_FLAGS and "causal" not in name


def _failed_option(bound: Bound, name: str, words: str, error: Exception) -> Found:
    """An error is the learner's if it has nothing to do with what is passed or installed."""
    line = error_line(error, bound.case.filename)
    said = f"{words}: {type(error).__name__}: {error}".splitlines()[0][:160]
    own = _is_bias(name) or _is_own_error(bound, error) or (isinstance(error, RuntimeError) and bound.built.certain)
    if is_deliberate(error) and isinstance(error, ValueError | NotImplementedError | AssertionError):
        yield Note("good", f"{words} is refused")
    elif line is not None and not is_deliberate(error) and own and not EMPTY_VIEW.search(said):
        yield Finding("option-crashes", said, line)
    else:
        yield Note("untried", said)


def _is_bias(name: str) -> bool:
    return constructor_role(name) == "bias" and not re.search(
        r"pos|rel|alibi|attn|attention|add|separ|fuse|type|mode|init", plain(name)
    )


def _kept_bias(off: Bound, name: str) -> str | None:
    """A bias of query, key or value that is left without biases, where others are gone or the name means all three."""
    held = {n: role_in(n) for n, t in tensors(off.thing).items() if t.dim() == 1 and n.endswith(".bias")}
    left = {n: role for n, role in held.items() if role is not None}
    every = "qkv" in plain(name) or len(set(left.values())) < len({role_in(n) for n in tensors(off.thing)} - {None})
    return next(iter(left), None) if every else None


def _is_own_error(bound: Bound, error: Exception) -> bool:
    """Whether an error has nothing to do with what we pass or what is installed: an attribute of self, a local name."""
    missing = isinstance(error, AttributeError) and f"'{bound.case.name}' object has no" in str(error)
    return isinstance(error, NameError) or missing


def own_defaults(bound: Bound, reading: AttentionReading | None) -> Found:
    """The constructor must accept its own defaults."""
    target, built = bound.case.target, bound.built
    unread = [p.name for p in parameters_of(target) if "scale" in plain(p.name) and bound.case.never_reads(p.name)]
    if unread:
        yield Finding("option-ignored", f"{unread[0]} is never read", bound.case.line_with("def __init__"))
    none = [p.name for p in parameters_of(target) if p.default is None]
    optional = [n for n in none if constructor_role(n) not in ("width", "heads") or MEMORY_WIDTH.fullmatch(plain(n))]
    given = {name for name in optional if built.arguments.get(name) is not None}
    failed = next((f for f in bound.failures if f.called is None and f.natural and f.line and not f.deliberate), None)
    if given and failed is not None and not built.natural:
        words = f"{', '.join(sorted(given))}=None, the default: {type(failed.error).__name__}: {failed.error}"
        yield Finding("option-crashes", words.splitlines()[0][:160], failed.line)
    if not isinstance(target, type) or built.config is not None or not built.certain:
        return
    parameters = {p.name: p for p in parameters_of(target)}
    if any(isinstance(p.default, Stub) for p in parameters.values()):
        yield Note("untried", "its defaults, which come from a file that is not here")
        return
    kept = {
        n: v for n, v in built.arguments.items() if n in parameters and parameters[n].default is inspect.Parameter.empty
    }
    kinds = {n: type(parameters[n].default) for n in built.arguments if n in parameters}
    needed = {n for n in kinds if n in none and n not in optional}  # without them, it has no size
    sizes = {n: v for n, v in built.arguments.items() if kinds.get(n) in (int, tuple) or n in needed}
    if len(kept | sizes) == len(built.arguments) or not set(built.arguments) <= set(parameters):
        return
    try:
        thing = bound.rebuilt_from(kept | sizes)
        bound.call(bound.inputs, thing=thing)
    except Exception as error:
        if is_deliberate(error):
            return
        words = f"with its own defaults: {type(error).__name__}: {error}".splitlines()[0][:160]
        yield Finding("option-crashes", words, bound.case.line_with("def __init__"))
