"""Arguments of the constructor that are no sizes: switches and modes, tried with every value that the code names."""

import inspect
import re
from dataclasses import replace

from headwise.check.arguments import constructor_role, parameters_of
from headwise.check.binding import Bound
from headwise.check.calls import PLAIN
from headwise.check.faults.masks import CAUSAL_FLAGS
from headwise.check.faults.options import doubts, returned_with
from headwise.check.faults.stages import stage_findings
from headwise.check.faults.training import unused_twins
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.reading import AttentionReading, read
from headwise.check.trace import error_line, is_deliberate
from headwise.check.vocabulary import plain


def constructor_options(bound: Bound, reading: AttentionReading | None) -> Found:
    """Every switch of the constructor must run in both positions and be right in both."""
    if reading is None or not isinstance(bound.case.target, type):
        return
    for name, value in _constructor_flags(bound).items():
        words = f"{name}={not value}"
        try:
            other = _built_with(bound, name, not value)
        except Exception as error:
            yield from _failed_option(bound, name, words, error)
            continue
        if plain(name) == "batchfirst" and not bound.gives(other.output):
            shape = "(batch, tokens, width)" if not value else "(tokens, batch, width)"
            said = f"{words}: an input of {shape} does not give the same result"
            yield Finding("option-ignored", said, bound.case.line_with(rf"\bself\.{name}\b(?!\s*=)"))
            continue
        if bound.gives(other.output):
            yield Note("good", words)
            yield from returned_with(other, name, not value)
            continue
        seen = read(other) if other.output is not None else None
        found = [] if seen is None else [f for f in stage_findings(other, seen) if f.severity == "wrong"]
        found = [f for f in found if _is_bias(name)] or ([] if found else unused_twins(other, seen))
        yield from (replace(finding, detail=f"{finding.detail} ({words})") for finding in found)
        proven = seen is not None and seen.understood == reading.understood and not list(doubts(other, seen))
        if not found:
            yield Note("good" if proven else "untried", words if proven else f"what {words} does to the result")


def _built_with(bound: Bound, name: str, value: bool) -> Bound:
    """The same class with one switch in another position, called; `batch_first` also says where the batch is."""
    layout = bound.form.layout
    if plain(name) == "batchfirst":
        layout = PLAIN if value else "batch second"
    return bound.called(thing=bound.rebuilt(**{name: value}), form=replace(bound.form, layout=layout))


def _failed_option(bound: Bound, name: str, words: str, error: Exception) -> Found:
    """An error is the learner's if it has nothing to do with what is passed or installed."""
    line = error_line(error, bound.case.filename)
    said = f"{words}: {type(error).__name__}: {error}".splitlines()[0][:160]
    own = _is_bias(name) or _is_own_error(bound, error) or (isinstance(error, RuntimeError) and bound.built.certain)
    if line is not None and not is_deliberate(error) and own:
        yield Finding("option-crashes", said, line)
    else:
        yield Note("untried", said)


def _constructor_flags(bound: Bound) -> dict[str, bool]:
    """Switches and their values, by name; only those for biases where a configuration holds them."""
    if bound.built.config is not None:
        return {name: True for name in bound.built.config.asked if _is_bias(name)} if bound.built.certain else {}
    flags = [p for p in parameters_of(bound.case.target) if isinstance(p.default, bool) or _is_bias(p.name)]
    values = {p.name: bound.built.arguments.get(p.name, p.default) for p in flags if p.name not in CAUSAL_FLAGS}
    return {name: value for name, value in values.items() if isinstance(value, bool)}


def _is_bias(name: str) -> bool:
    return constructor_role(name) == "bias" and not re.search(r"pos|rel|alibi|attn|attention|add", plain(name))


def _is_own_error(bound: Bound, error: Exception) -> bool:
    """Whether an error has nothing to do with what we pass or what is installed: an attribute of self, a local name."""
    missing = isinstance(error, AttributeError) and f"'{bound.case.name}' object has no" in str(error)
    return isinstance(error, UnboundLocalError) or missing


def own_defaults(bound: Bound, reading: AttentionReading | None) -> Found:
    """The constructor must accept its own defaults."""
    target, built = bound.case.target, bound.built
    unread = [p.name for p in parameters_of(target) if "scale" in plain(p.name) and bound.case.never_reads(p.name)]
    if unread:
        yield Finding("option-ignored", f"{unread[0]} is never read", bound.case.line_with("def __init__"))
    given = {p.name for p in parameters_of(target) if p.default is None and built.arguments.get(p.name) is not None}
    failed = next((f for f in bound.failures if f.called is None and f.natural and f.line and not f.deliberate), None)
    if given and failed is not None and not built.natural:
        words = f"{', '.join(sorted(given))}=None, the default: {type(failed.error).__name__}: {failed.error}"
        yield Finding("option-crashes", words.splitlines()[0][:160], failed.line)
    if not isinstance(target, type) or built.config is not None or not built.certain:
        return
    parameters = {p.name: p for p in parameters_of(target)}
    kept = {
        n: v for n, v in built.arguments.items() if n in parameters and parameters[n].default is inspect.Parameter.empty
    }
    sizes = {n: v for n, v in built.arguments.items() if n in parameters and type(parameters[n].default) is int}
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
