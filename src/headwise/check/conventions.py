"""Measures what a mask argument means: which shapes it takes, and whether 1 keeps a key or hides it."""

import contextlib
import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.check import core as cores
from headwise.check import lines
from headwise.check.bound import Bound
from headwise.check.core import Core
from headwise.check.findings import Finding
from headwise.check.fits import same
from headwise.check.names import plain
from headwise.check.repairs import error_line
from headwise.check.stages import Reading
from headwise.check.subject import FunctionWithWeights, signature
from headwise.check.trace import Trace

SECONDS = 6.0  # for one argument; a typical one takes half a second
LENGTHS = "(B,) lengths"
TRUE_CRASH = (AttributeError, NameError, TypeError, KeyError)
MEANING = {"keep": "1 = keep", "drop": "1 = mask out", "additive": "added to the scores"}


@dataclass
class Tried:
    """One mask that was passed."""

    shape: str
    dtype: str
    meaning: str  # keep, drop, additive, none, wrong sample, after, other, or empty where it raised
    error: Exception | None = None
    line: int | None = None


@dataclass
class Convention:
    """What is known of one mask argument."""

    name: str
    tried: list[Tried] = field(default_factory=list)

    @property
    def meaning(self) -> str:
        """The meaning that works for most shapes."""
        good = [t.meaning for t in self.tried if t.meaning in MEANING]
        return max(MEANING, key=good.count) if good else ""

    def shapes(self) -> list[str]:
        """Shapes that work with this meaning."""
        return list(dict.fromkeys(t.shape for t in self.tried if t.meaning == self.meaning and t.error is None))

    def words(self) -> str:
        """`mask: 1 = keep, shapes (B,1,T,S) (T,S)`"""
        if self.shapes() == [LENGTHS]:
            return f"{self.name}: how many keys of each sample are real"
        meaning = MEANING.get(self.meaning, "no effect was measured")
        return f"{self.name}: {meaning}" + (f", shapes {' '.join(self.shapes())}" if self.shapes() else "")


def tables(B: int, T: int, S: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Visible keys for every sample and query, and for every sample: no two alike, no row all or nothing."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.rand(B, T, S, generator=generator) > 0.5
    full[:, torch.arange(T), torch.arange(T) % S] = True
    full[:, torch.arange(T), (torch.arange(T) + 1) % S] = False
    keys = torch.rand(B, S, generator=generator) > 0.5
    keys[:, 0], keys[:, 1] = True, False
    return full, keys


def shaped(B: int, H: int, T: int, S: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(words, mask as passed, what it should mean as (B, H, T, S))."""
    full, keys = tables(B, T, S)
    by_key = keys[:, None, None, :].expand(B, H, T, S)
    yield "(B,1,T,S)", full[:, None], full[:, None].expand(B, H, T, S)
    yield "(B,1,1,S)", keys[:, None, None], by_key
    yield "(T,S)", full[0], full[0].expand(B, H, T, S)
    yield "(1,1,T,S)", full[:1, None], full[0].expand(B, H, T, S)
    yield "(B,T,S)", full, full[:, None].expand(B, H, T, S)
    yield "(B,1,S)", keys[:, None], by_key
    yield "(B,S)", keys, by_key
    yield "(B,H,T,S)", full[:, None].expand(B, H, T, S).contiguous(), full[:, None].expand(B, H, T, S)
    yield "(1,T,S)", full[:1], full[0].expand(B, H, T, S)


def measure(bound: Bound, reading: Reading) -> list[Convention]:
    """Every mask argument that is no flag."""
    found = []
    for name in bound.form.masks[:3]:
        if not is_flag(bound, name):
            found.append(_measure(bound, reading, name))
    return found


def is_flag(bound: Bound, name: str) -> bool:
    """Whether `mask` is a switch (`mask=True`) rather than a tensor."""
    parameters = bound.thing.free() if isinstance(bound.thing, FunctionWithWeights) else signature(bound.thing)
    for p in parameters:
        if p.name == name:
            return isinstance(p.default, bool) or p.annotation in (bool, "bool")
    return False


def _measure(bound: Bound, reading: Reading, name: str) -> Convention:
    convention = Convention(name)
    B, H, T, S = reading.core.weights.shape
    if bound.form.layout not in ("batch first", "batch second"):
        return convention
    deadline = time.monotonic() + SECONDS
    for words, mask, meant in shaped(B, H, T, S):
        if time.monotonic() > deadline:
            break
        for dtype in (torch.bool, torch.float64, torch.int64):
            tried = _try(bound, reading, name, words, mask.to(dtype), meant)
            convention.tried.append(tried)
            if tried.meaning in MEANING:
                break
        if not any(t.shape == words and t.meaning in MEANING for t in convention.tried):
            added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)
            tried = _try(bound, reading, name, words, added, meant)
            if tried.meaning == "keep":
                tried.meaning, tried.dtype = "additive", "float 0/-1e9"
                convention.tried.append(tried)
    if not any(t.meaning in MEANING for t in convention.tried):
        _lengths(bound, reading, name, convention)
    return convention


def _lengths(bound: Bound, reading: Reading, name: str, convention: Convention) -> None:
    """Some take the number of valid keys of each sample."""
    B, H, T, S = reading.core.weights.shape
    lengths = 1 + torch.arange(B) % (S - 1)
    meant = (torch.arange(S) < lengths[:, None])[:, None, None].expand(B, H, T, S)
    tried = _try(bound, reading, name, LENGTHS, lengths, meant)
    if tried.meaning == "keep":
        convention.tried.append(tried)


def _try(bound: Bound, reading: Reading, name: str, words: str, mask: Tensor, meant: Tensor) -> Tried:
    tried = Tried(words, str(mask.dtype).removeprefix("torch."), "")
    before = mask.clone()
    try:
        returned, trace = bound.traced(bound.inputs, {name: mask})
    except Exception as error:
        tried.error, tried.line = error, error_line(error, bound.filename)
        return tried
    core = same_arrangement(trace, reading, bound)
    if core is None or core.weights.shape != reading.core.weights.shape:
        tried.meaning = "other"
        return tried
    tried.meaning = _meaning(core, reading, meant, before)
    output = bound.form.result(returned, bound.inputs)
    if tried.meaning == "none" and not _same_output(output, bound.output):
        tried.meaning = "other"  # it acts elsewhere, on the output perhaps
    if tried.meaning == "none" and (dead := lines.discarded_mask(trace, core)) is not None:
        tried.meaning, tried.line = "discarded", dead.line
    return tried


def _same_output(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or b is None or same(a.nan_to_num(), b.nan_to_num())


def same_arrangement(trace: Trace, reading: Reading, bound: Bound) -> Core | None:
    """The attention in another trace of the same object, batch and heads read as before."""
    parts = cores.find(trace)
    if parts is None:
        return None
    for core in cores.arrangements(parts, bound.inputs.query.shape[0]):
        if core.order == reading.core.order:
            return core
    return None


def _meaning(core: Core, reading: Reading, meant: Tensor, mask: Tensor) -> str:
    assert reading.scores is not None  # noqa: S101
    base = reading.scores.visible
    weights = core.weights
    if same(weights.nan_to_num(), reading.core.weights.nan_to_num()):
        return "none"
    seen = weights.nan_to_num() > 1e-30
    if reading.scores.axis == "keys" and core.softmax is not None:
        kept = (core.softmax.nan_to_num() > 1e-30) & base
        unchanged = bool(kept.eq(base).all()) and not _sums(weights)
        if unchanged and (_agrees(seen, meant & base) or _agrees(seen, ~meant & base)):
            return "after"
    if _agrees(seen, meant & base):
        return "keep"
    if _agrees(seen, ~meant & base):
        return "drop"
    if bool(seen.eq(base).all()):
        return "additive" if _added(core, reading, mask) else "leaks"
    return _elsewhere(seen, meant, base)


def _sums(weights: Tensor) -> bool:
    sums = weights.nan_to_num().sum(-1)
    return bool(torch.isclose(sums, torch.ones_like(sums)).all())


def _agrees(seen: Tensor, meant: Tensor) -> bool:
    """Equal wherever the meaning leaves a key to see."""
    rows = meant.any(-1)
    return bool(rows.any()) and bool((seen[rows] == meant[rows]).all())


def _added(core: Core, reading: Reading, mask: Tensor) -> bool:
    """Whether logits changed by the mask itself, up to a constant of each row."""
    change = core.weights.clamp_min(1e-300).log() - reading.core.weights.clamp_min(1e-300).log()
    for shaped_mask in (mask.double(), mask.double().unsqueeze(1)):
        with contextlib.suppress(RuntimeError):
            wide = shaped_mask.expand(change.shape)
            if same(change - change.mean(-1, keepdim=True), wide - wide.mean(-1, keepdim=True), 1e-6):
                return True
    return False


def _elsewhere(seen: Tensor, meant: Tensor, base: Tensor) -> str:
    """Whether every table is some sample's, only not its own."""
    wanted = (meant & base)[:, 0].flatten(1)
    hidden = (~meant & base)[:, 0].flatten(1)
    got = seen.flatten(0, 1).flatten(1)
    for tables_ in (wanted, hidden):
        if bool((got[:, None] == tables_[None]).all(-1).any(-1).all()):
            return "wrong sample"
    return "other"


def findings(conventions: list[Convention], bound: Bound, reading: Reading) -> list[Finding]:
    """What is wrong with the masks."""
    found: list[Finding] = []
    for convention in conventions:
        meanings = [t.meaning for t in convention.tried]
        if not convention.tried:
            continue
        for bad, name in (
            ("after", "mask-after-softmax"),
            ("discarded", "mask-discarded"),
            ("wrong sample", "mask-wrong-sample"),
        ):
            if bad in meanings and not (bad == "wrong sample" and _accepted_per_sample(convention)):
                tried = next(t for t in convention.tried if t.meaning == bad)
                node = reading.core.softmax_nodes[0]
                found.append(Finding(name, f"argument {convention.name}, shape {tried.shape}", tried.line or node.line))
        if convention.meaning or found:
            continue
        ran = [t for t in convention.tried if t.error is None]
        if not ran:
            found += _crash(convention)
        elif _leaks(ran):
            tried = next(t for t in ran if t.meaning == "leaks")
            detail = f"argument {convention.name}, shape {tried.shape}: hidden keys keep some weight"
            found.append(Finding("mask-leaks", detail, reading.core.softmax_nodes[0].line))
        elif all(t.meaning == "none" for t in ran) and _is_plain_mask(convention.name):
            found.append(
                Finding(
                    "mask-ignored", f"argument {convention.name}: every mask it takes leaves all weights as they were"
                )
            )
    return found


def _leaks(ran: list[Tried]) -> bool:
    """Every mask that does something leaves all keys in sight."""
    return {t.meaning for t in ran} <= {"leaks", "none"} and any(t.meaning == "leaks" for t in ran)


def _accepted_per_sample(convention: Convention) -> bool:
    return any(t.meaning in ("keep", "drop") and t.shape.startswith("(B") for t in convention.tried)


def _is_plain_mask(name: str) -> bool:
    return "mask" in plain(name) and "head" not in plain(name)


def _crash(convention: Convention) -> list[Finding]:
    """Errors that no shape can avoid."""
    errors = [t for t in convention.tried if t.error is not None]
    plain_faults = [t for t in errors if isinstance(t.error, TRUE_CRASH) or "ambiguous" in str(t.error)]
    if len(plain_faults) < len(errors) or not errors:
        return []
    first = plain_faults[0]
    return [Finding("mask-crashes", f"{type(first.error).__name__}: {first.error}", first.line)]


def empty_row(bound: Bound, reading: Reading, conventions: list[Convention]) -> Finding | None:
    """What a query gives that may see no key at all."""
    for convention in conventions:
        shape = next((s for s in convention.shapes() if s.startswith("(B") and s != LENGTHS), None)
        tried = next((t for t in convention.tried if t.shape == shape and t.meaning == convention.meaning), None)
        if shape is None or tried is None or convention.meaning not in ("keep", "drop"):
            continue
        mask = next(m for words, m, _ in shaped(*reading.core.weights.shape) if words == shape)
        hidden = torch.zeros_like(mask) if convention.meaning == "keep" else torch.ones_like(mask)
        hidden[1:] = ~hidden[1:]
        out = bound.output_of(bound.inputs, {convention.name: hidden.to(getattr(torch, tried.dtype))})
        if out is not None and torch.isnan(out).any():
            others = bool(torch.isfinite(out[1:]).all())
            detail = "its sample becomes NaN" if others else "the whole batch becomes NaN"
            return Finding("nan-empty-row", detail, reading.core.softmax_nodes[0].line)
    return None


def switches(bound: Bound) -> list[str]:
    """Arguments of the call that switch a causal mask on."""
    parameters = [] if isinstance(bound.thing, FunctionWithWeights) else signature(bound.thing)
    return [p.name for p in parameters if _switch(p)]


def _switch(p: inspect.Parameter) -> bool:
    word = plain(p.name)
    boolean = isinstance(p.default, bool) or p.annotation in (bool, "bool")
    return (
        boolean
        and p.default is not True
        and ("causal" in word or word in ("mask", "masked", "usemask", "applymask", "lookahead"))
    )
