"""Mistakes with masks. What a mask argument means is measured: which shapes it takes, and whether 1 keeps a key.

None of the usual meanings is wrong. A mask that does nothing, acts after the softmax or meets the wrong sample is.
"""

import ast
import contextlib
import inspect
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headwise.check.arguments import parameters_of, plain
from headwise.check.binding import Bound
from headwise.check.calls import FunctionWithWeights, call_parameters, signature
from headwise.check.code.intent import stated_meaning
from headwise.check.faults.crashes import Function, definition_of
from headwise.check.faults.portability import half_precision
from headwise.check.faults.stages import stage_findings
from headwise.check.fits import same, side_by_side
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.reading import AttentionReading, pattern, read
from headwise.check.trace import Core, error_line, find_attention, is_deliberate
from headwise.check.vocabulary import call_role

SECONDS = 6.0  # for one argument; a typical one takes half a second
LENGTHS = "(B,) lengths"
PLAIN_ERRORS = (AttributeError, NameError, TypeError, KeyError)
MEANING = {"keep": "1 = keep", "drop": "1 = mask out", "additive": "added to the scores"}
WRONG_MEANING = {
    "after": "mask-after-softmax", "discarded": "mask-discarded", "wrong sample": "mask-wrong-sample",
    "transposed": "mask-transposed", "scaled": "mask-scaled", "queries": "mask-on-queries",
    "some heads": "mask-some-heads", "uncausal": "mask-replaces-causal", "either": "masks-combined",
    "one more": "mask-off-by-one", "one less": "mask-off-by-one",
}  # fmt: skip
# A comment that says the mask is left out; 忽略, 省略 and 未使用 mean ignored, omitted and unused.
LEFT_OUT = re.compile(
    r"#[^\n]*(?:mask[^\n]*(?:ignor|not used|unused|忽略|省略|未使用)|(?:ignor|unused|忽略|省略)[^\n]*mask)",
    re.IGNORECASE,
)
CAUSAL_FLAGS = ("causal", "is_causal", "masked", "mask", "use_mask", "causal_mask", "apply_mask", "use_causal_mask")
CAUSAL_MISTAKES = {
    "full": "causal-ignored", "future": "causal-inverted", "later": "causal-inverted",
    "strict": "causal-off-by-one", "ahead": "causal-off-by-one",
}  # fmt: skip


@dataclass
class TriedMask:
    """One mask that was passed, and what it did."""

    shape: str
    mask: Tensor
    # keep, drop, additive, none, leaks, after, discarded, wrong sample, transposed, queries, some heads, nan, other;
    # empty if it raised
    meaning: str = ""
    error: Exception | None = None
    line: int | None = None
    seen: Tensor | None = None  # (B, H, T, S), True where a key had weight
    meant: Tensor | None = None  # what the mask should mean, True = visible
    modified: bool = False  # the call wrote into the mask
    raised: bool = False  # the keys that remain have equal weights, whatever the scores


@dataclass
class MaskArgument:
    """What is known about one mask argument."""

    name: str
    layout: str
    tried: list[TriedMask] = field(default_factory=list)

    @property
    def meaning(self) -> str:
        """The meaning that works for most shapes."""
        usual = [t.meaning for t in self.tried if t.meaning in MEANING]
        return max(MEANING, key=usual.count) if usual else ""

    def shapes(self) -> list[str]:
        """The shapes that work with this meaning."""
        return list(dict.fromkeys(t.shape for t in self.tried if t.meaning == self.meaning and t.error is None))

    def first(self, meaning: str, shape: str | None = None) -> TriedMask | None:
        """The first mask with this meaning, of this shape where one is given."""
        return next((t for t in self.tried if t.meaning == meaning and shape in (None, t.shape)), None)

    def words(self) -> str:
        """`mask: 1 = keep, shapes (B,1,T,S) (T,S)`"""
        if not self.tried:
            return f"{self.name}: not judged, {self.layout}"
        if self.shapes() == [LENGTHS]:
            return f"{self.name}: how many keys of each sample are real"
        meaning = MEANING.get(self.meaning, "what it does could not be determined")
        return f"{self.name}: {meaning}" + (f", shapes {' '.join(self.shapes())}" if self.shapes() else "")


def measured(bound: Bound, reading: AttentionReading | None) -> list[MaskArgument]:
    """Every mask argument that is not a flag; measured once and kept in the reading."""
    if reading is None or reading.scores is None:
        return []
    if reading.mask_arguments is None:
        flags = {p.name for p in call_parameters(bound.thing) if is_boolean(p)}  # `mask=True` is a switch
        names = [name for name in bound.form.masks[:3] if name not in flags]
        reading.mask_arguments = [_measure(bound, reading, name) for name in names]
        others = (_measure(bound, reading, name) for name in _unknown_arguments(bound))
        reading.mask_arguments += [argument for argument in others if argument.meaning]
    return reading.mask_arguments


def _unknown_arguments(bound: Bound) -> list[str]:
    """Optional arguments whose names say nothing: each may be a mask."""
    held = {*bound.form.roles, *bound.form.masks, *bound.form.fixed}
    parameters = [p for p in call_parameters(bound.thing) if p.default is None and p.name not in held]
    return [p.name for p in parameters if call_role(p.name) is None and not is_boolean(p)][:2]


def is_boolean(p: inspect.Parameter) -> bool:
    """Whether an argument is a flag."""
    return isinstance(p.default, bool) or re.search(r"\bbool\b", str(p.annotation)) is not None


def _measure(bound: Bound, reading: AttentionReading, name: str) -> MaskArgument:
    argument = MaskArgument(name, bound.form.layout)
    if bound.form.layout not in ("batch first", "batch second"):
        return argument
    trial = MaskTrial(bound, reading, name)
    deadline = time.process_time() + SECONDS
    for shape, mask, meant in shaped_masks(*reading.core.weights.shape):
        if time.process_time() > deadline:
            break
        if shape.endswith("B)") and argument.meaning:
            break
        for dtype in (torch.bool, torch.float64, torch.int64):
            argument.tried.append(trial(shape, mask.to(dtype), meant))
            if argument.tried[-1].meaning in MEANING:
                break
        else:
            added = trial(shape, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9), meant)
            if added.meaning == "keep":
                added.meaning = _added_meaning(trial, shape, mask, meant)
                argument.tried.append(added)
    if not argument.meaning:
        B, H, T, S = reading.core.weights.shape
        lengths = 1 + torch.arange(B) % (S - 1)
        meant = (torch.arange(S) < lengths[:, None])[:, None, None].expand(B, H, T, S)
        tried = trial(LENGTHS, lengths, meant)
        if off := _near_length(tried, lengths):
            tried.meaning, tried.line = off, _compared_line(tried, bound, name) or tried.line
        argument.tried += [tried] if tried.meaning in ("keep", "one more", "one less") else []
    return argument


def _added_meaning(trial: "MaskTrial", shape: str, mask: Tensor, meant: Tensor) -> str:
    """additive, or scaled where small numbers are added to the scores with a factor."""
    generator = torch.Generator().manual_seed(23)
    small = torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    return "scaled" if trial(shape, small, meant).meaning == "scaled" else "additive"


def _compared_line(tried: TriedMask, bound: Bound, name: str) -> int | None:
    """The line that compares a length with the numbers of the keys."""
    with contextlib.suppress(Exception):
        nodes = bound.called({name: tried.mask.clone()}).trace.nodes
        return next((n.line for n in nodes if n.op in ("lt", "le", "gt", "ge") and n.line is not None), None)
    return None


def _near_length(tried: TriedMask, lengths: Tensor) -> str:
    """Whether one key too many or too few is visible everywhere."""
    if tried.seen is None:
        return ""
    S = tried.seen.shape[-1]
    for name, off in (("one more", 1), ("one less", -1)):
        wanted = (torch.arange(S) < lengths[:, None] + off)[:, None, None].expand_as(tried.seen)
        if _agree(tried.seen, wanted):
            return name
    return ""


def shaped_masks(B: int, H: int, T: int, S: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(shape in words, mask as passed, what it should mean as (B, H, T, S)).

    The rows and samples of a mask all differ, and no row hides all or nothing.
    """
    generator = torch.Generator().manual_seed(3)
    full = torch.rand(B, T, S, generator=generator) > 0.5
    full[:, torch.arange(T), torch.arange(T) % S] = True
    full[:, torch.arange(T), (torch.arange(T) + 1) % S] = False
    keys = torch.rand(B, S, generator=generator) > 0.5
    keys[:, 0], keys[:, 1] = True, False
    by_sample = full[:, None].expand(B, H, T, S)
    by_key, shared = keys[:, None, None, :].expand(B, H, T, S), full[0].expand(B, H, T, S)
    yield "(B,1,T,S)", full[:, None], by_sample
    yield "(B,1,1,S)", keys[:, None, None], by_key
    yield "(T,S)", full[0], shared
    yield "(1,1,T,S)", full[:1, None], shared
    yield "(B,T,S)", full, by_sample
    yield "(B,1,S)", keys[:, None], by_key
    yield "(B,S)", keys, by_key
    yield "(B,H,T,S)", by_sample.contiguous(), by_sample
    yield "(1,T,S)", full[:1], shared
    yield "(T,S,B)", full.permute(1, 2, 0).contiguous(), by_sample


@dataclass
class MaskTrial:
    """Passes masks to one argument and finds out what they do to the weights."""

    bound: Bound
    reading: AttentionReading
    name: str

    def __call__(self, shape: str, mask: Tensor, meant: Tensor) -> TriedMask:
        """One call with a mask of this shape that should mean `meant` (B, H, T, S)."""
        tried = TriedMask(shape, mask.clone(), meant=meant)
        try:
            other = self.bound.called({self.name: mask})
        except Exception as error:
            tried.error, tried.line = error, error_line(error, self.bound.case.filename)
            return tried
        tried.modified = not torch.equal(mask, tried.mask)
        core = self.same_arrangement(other)
        if core is None or core.weights.shape != self.reading.core.weights.shape:
            tried.meaning = "other"
            return tried
        tried.seen = core.weights.nan_to_num() > 1e-30
        tried.meaning = self._meaning(core, meant, tried.mask)
        tried.raised = tried.meaning in ("keep", "drop") and _are_even(core.weights)
        moved = tried.meaning in ("wrong sample", "transposed", "queries")
        tried.line = core.mask_line(self.bound.trace, moves=moved)
        before, after = self.bound.output, other.output
        if tried.meaning in MEANING and not self._is_explained(core, after):
            tried.meaning = "other"  # the weights are right, but not what is made of them
        if tried.meaning != "none":
            return tried
        if before is not None and after is not None and not same(before.nan_to_num(), after.nan_to_num()):
            tried.meaning = "other"  # it acts elsewhere, perhaps on the output
        elif (discarded := core.discarded_mask()) is not None:
            tried.meaning, tried.line = "discarded", discarded.line
        return tried

    def same_arrangement(self, other: Bound) -> Core | None:
        """The attention of another call, with batch and heads read as before."""
        nodes = find_attention(other.trace)
        cores = () if nodes is None else nodes.arrangements(*other.inputs.query.shape[:2])
        return next((core for core in cores if core.order == self.reading.core.order), None)

    def _is_explained(self, core: Core, output: Tensor | None) -> bool:
        """Whether the output follows from these weights as it did without a mask."""
        out = self.reading.output
        if out is None or not out.last or out.before or out.merge != "heads" or output is None:
            return output is not None
        merged = side_by_side(core.weights.nan_to_num() @ core.value)
        expected = merged @ out.fit.weight.T + out.fit.bias
        expected = expected + out.residual * self.bound.inputs.query if out.residual else expected
        rows = torch.isfinite(output).all(-1) & torch.isfinite(core.weights).all(-1).all(1)
        rows = rows & (output != 0).any(-1)  # rows of padding may be cleared
        return expected.shape == output.shape and same(expected[rows], output[rows], 1e-6)

    def _meaning(self, core: Core, meant: Tensor, mask: Tensor) -> str:
        scores, weights = self.reading.scores, core.weights.nan_to_num()
        assert scores is not None  # noqa: S101 - masks are measured only where scores were read
        if same(weights, self.reading.core.weights.nan_to_num()):
            return "none"
        base, seen = scores.visible, weights > 1e-30
        kept, hidden = _agree(seen, meant & base), _agree(seen, ~meant & base)
        if scores.axis == "keys" and core.softmax is not None and (kept or hidden):
            before = (core.softmax.nan_to_num() > 1e-30) & base
            sums = weights.sum(-1)
            if bool(before.eq(base).all()) and not torch.allclose(sums, torch.ones_like(sums)):
                return "after"
        if kept or hidden:
            return "keep" if kept else "drop"
        if not bool(torch.isfinite(core.weights).all()):
            place = _misplaced(seen, meant, base)
            return place if place in ("queries", "transposed") else "nan"
        if bool(seen.eq(base).all()):
            factor = self._factor(core, mask)
            return "leaks" if factor is None else "additive" if abs(factor - 1) < 1e-6 else "scaled"
        return _misplaced(seen, meant, base)

    def _factor(self, core: Core, mask: Tensor) -> float | None:
        """The factor with which the mask was added to the logits, up to a constant for each row; None for no such."""
        change = core.weights.clamp_min(1e-300).log() - self.reading.core.weights.clamp_min(1e-300).log()
        change = change - change.mean(-1, keepdim=True)
        for shaped in (mask.double(), mask.double().unsqueeze(1)):
            with contextlib.suppress(RuntimeError):
                wide = shaped.expand(change.shape)
                wide = wide - wide.mean(-1, keepdim=True)
                factor = float((change * wide).sum() / (wide * wide).sum().clamp_min(1e-300))
                if abs(factor) > 1e-9 and same(change, factor * wide, 1e-6):
                    return factor
        return None


def _are_even(weights: Tensor) -> bool:
    """Whether every row with several visible keys gives them the same weight: a large number replaced the scores."""
    seen = weights > 1e-30
    counts = seen.sum(-1, keepdim=True)
    rows = (counts > 1).expand_as(seen)
    even = (1 / counts.double()).expand_as(seen)[rows & seen]
    return bool(rows.any()) and torch.allclose(weights[rows & seen].double(), even)


def _agree(seen: Tensor, meant: Tensor) -> bool:
    """Whether they are equal in every row in which some key is visible."""
    rows = meant.any(-1)
    return bool(rows.any()) and bool((seen[rows] == meant[rows]).all())


def _misplaced(seen: Tensor, meant: Tensor, base: Tensor) -> str:
    """Where a mask went that did not hide the keys it names: other axes, some heads only, or another sample."""
    by_key = bool((meant == meant[:, :, :1]).all())
    if not bool(base.all()) and (_agree(seen, meant) or _agree(seen, ~meant)):
        return "uncausal"
    if not bool(base.all()) and (_agree(seen, meant | base) or _agree(seen, ~meant | base)):
        return "either"
    for wanted in (meant, ~meant):
        square = wanted.shape[-1] == wanted.shape[-2]
        if by_key and square and _agree_as_padding(seen, wanted, base):
            return "keep" if wanted is meant else "drop"
        if by_key and square and _hides_rows(seen, wanted, base):
            return "queries"
        if not by_key and square and _agree(seen, wanted.mT & base):
            return "transposed"
        heads = [_agree(seen[:, h], (wanted & base)[:, h]) for h in range(seen.shape[1])]
        idle = [bool(seen[:, h].eq(base[:, h]).all()) for h in range(seen.shape[1])]
        if any(heads) and all(a or b for a, b in zip(heads, idle, strict=True)):
            return "some heads"
    return _of_another_sample(seen, meant, base)


def _agree_as_padding(seen: Tensor, meant: Tensor, base: Tensor) -> bool:
    """Whether keys are hidden from every query that is itself visible, as where padding hides rows as well."""
    rows = meant[:, :, 0].unsqueeze(-1).expand_as(meant)
    kept = (meant & base)[rows]
    return bool((seen[rows] == kept).all()) and bool(kept.any())


def _hides_rows(seen: Tensor, meant: Tensor, base: Tensor) -> bool:
    """Whether queries that the mask names see nothing or everything alike, and others see all they saw before."""
    rows = meant[:, :, 0]  # (B, H, T) as if the mask were about queries
    return bool((seen[rows] == base[rows]).all()) and not bool(seen.eq(meant & base).all())


def _of_another_sample(seen: Tensor, meant: Tensor, base: Tensor) -> str:
    """`wrong sample` where every table belongs to some sample of the mask, but not to its own."""
    got = seen.flatten(0, 1).flatten(1)
    for wanted in (meant & base, ~meant & base):
        if bool((got[:, None] == wanted[:, 0].flatten(1)[None]).all(-1).any(-1).all()):
            return "wrong sample"
    return "other"


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
        yield from _against_words(argument, bound)
        found = [*_misused(argument, reading), *_overwritten(argument), *_raised(argument)]
        if not argument.meaning and not found:
            found += _without_effect(argument, bound, reading)
        yield from found
        three = re.search(r"dim(\(\))?\s*==\s*3|len\(\w+\.shape\)\s*==\s*3", bound.case.source) is not None
        if argument.meaning and (three or not any("(B" in shape for shape in argument.shapes())):
            found += _by_head_instead(argument, bound, reading)
            yield from found
        if argument.meaning:
            yield Note("good", argument.words())
        elif not found:
            yield Note("untried", f"what the argument {argument.name} does")


def _against_words(argument: MaskArgument, bound: Bound) -> Iterator[Finding]:
    """A mask must mean what the file says about it."""
    stated = stated_meaning(bound.case, argument.name)
    if stated is None or argument.meaning not in MEANING or argument.meaning == stated.meaning:
        return
    found, said = MEANING[argument.meaning], MEANING[stated.meaning]
    words = f"argument {argument.name}: {found}, where {stated.place} says {said}"
    tried = argument.first(argument.meaning)
    yield Finding("mask-convention", words, tried.line if tried is not None else None)


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
                if core is not None and _agree(core.weights.nan_to_num() > 1e-30, swapped):
                    words = (
                        f"argument {argument.name}: with {H} samples and {H} heads, the mask of sample 1 reaches head 1"
                    )
                    return [Finding("mask-wrong-sample", words, core.mask_line(bound.trace))]
    return []


def _overwritten(argument: MaskArgument) -> Iterator[Finding]:
    """A call must not write into the mask it is given."""
    tried = next((t for t in argument.tried if t.modified), None)
    if tried is not None:
        yield Finding("input-modified", f"the argument {argument.name} has different values after the call", tried.line)


def _misused(argument: MaskArgument, reading: AttentionReading) -> Iterator[Finding]:
    by_sample = any(t.meaning in ("keep", "drop") and t.shape.startswith("(B") for t in argument.tried)
    for meaning, name in WRONG_MEANING.items():
        tried = argument.first(meaning)
        other = (meaning == "wrong sample" and by_sample) or (meaning == "queries" and argument.meaning != "")
        if tried is not None and not other:
            words = f"argument {argument.name}, shape {tried.shape}{_example(tried)}"
            yield Finding(name, words, tried.line or reading.core.softmax_line)


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


def _without_effect(argument: MaskArgument, bound: Bound, reading: AttentionReading) -> Iterator[Finding]:
    meanings = {t.meaning for t in argument.tried if t.error is None}
    tried = argument.first("leaks") or argument.first("nan")
    if not meanings:
        yield from _crash(argument)
    elif tried is not None and tried.meaning == "leaks" and meanings <= {"leaks", "none", "other"}:
        words = f"argument {argument.name}, shape {tried.shape}: hidden keys keep some weight"
        yield Finding("mask-leaks", words, tried.line or reading.core.softmax_line)
    elif tried is not None and meanings <= {"nan", "none"}:
        words = f"argument {argument.name}, shape {tried.shape}: the weights are NaN"
        yield Finding("mask-nan", words, tried.line or reading.core.softmax_line)
    elif meanings == {"none"} and "mask" in plain(argument.name) and "head" not in plain(argument.name):
        words = f"argument {argument.name}: no mask that it accepts changes any weight"
        admitted = _is_admitted(bound, reading, argument.name)
        line = _unused_line(bound, argument)
        yield Finding("mask-ignored", words, line, severity="fragile" if admitted else "")
    else:
        yield from _same_for_all(argument, reading)


def _unused_line(bound: Bound, argument: MaskArgument) -> int | None:
    """Where a mask gets lost: a statement whose result is dropped, a branch that is empty or never taken."""
    tree = ast.parse(bound.case.source)
    uses = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == argument.name]
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.If) and argument.name in ast.unparse(n)]
    dropped = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and any(u in ast.walk(n) for u in uses)]
    empty = [n.body[0] for n in inside if len(n.body) == 1 and isinstance(n.body[0], ast.Pass)]
    for found in (dropped, empty, inside):
        if found:
            return found[-1].lineno
    return bound.case.line_with(rf"\b{argument.name}\b")


def _same_for_all(argument: MaskArgument, reading: AttentionReading) -> Iterator[Finding]:
    """Different masks that all have one and the same effect."""
    tables = [t for t in argument.tried if t.meaning == "other"]
    seen = [t.seen for t in tables if t.seen is not None]
    meant = [t.meant for t in tables if t.meant is not None]
    different = bool(seen) and any(not torch.equal(table, meant[0]) for table in meant)
    if different and all(torch.equal(table, seen[0]) for table in seen):
        words = f"argument {argument.name}: {len(seen)} different masks, one pattern of visible keys"
        yield Finding(
            "mask-content-ignored", f"{words} ({pattern(seen[0])})", tables[0].line or reading.core.softmax_line
        )


def combined_masks(bound: Bound, reading: AttentionReading | None) -> Found:
    """Two mask arguments together must hide what either hides."""
    usable = [a for a in measured(bound, reading) if a.meaning in ("keep", "drop")]
    if reading is None or not usable:
        return
    yield from _with_causal(bound, reading, usable[0])
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
    if core is not None and not _agree(core.weights.nan_to_num() > 1e-30, both):
        yield Finding("masks-combined", words, core.mask_line())


def _with_causal(bound: Bound, reading: AttentionReading, argument: MaskArgument) -> Iterator[Finding]:
    """A mask together with a flag for a causal one."""
    parameters = [] if isinstance(bound.thing, FunctionWithWeights) else signature(bound.thing)
    flag = next((p.name for p in parameters if is_causal_switch(p)), None)
    tried = argument.first(argument.meaning)
    if flag is None or tried is None or tried.meant is None or reading.pattern != "full":
        return
    try:
        other = bound.called({argument.name: tried.mask.clone(), flag: True})
    except Exception:  # it is refused, as by torch's fused attention
        return
    core = MaskTrial(bound, reading, argument.name).same_arrangement(other)
    visible = (tried.meant if argument.meaning == "keep" else ~tried.meant) & torch.ones_like(tried.meant).tril()
    if core is not None and not _agree(core.weights.nan_to_num() > 1e-30, visible):
        line = bound.case.condition_around(core.mask_line(bound.trace), argument.name) or core.mask_line(bound.trace)
        yield Finding("masks-combined", f"{argument.name} and {flag}=True together", line)


def _crash(argument: MaskArgument) -> Iterator[Finding]:
    """An error that no shape of the mask avoids."""
    sure = [t for t in argument.tried if isinstance(t.error, NameError) or "module 'torch" in str(t.error)]
    places = {t.line for t in argument.tried}
    same_place = "mask" in plain(argument.name) and len(places) == 1 and None not in places
    if (
        sure
        or same_place
        or all(isinstance(t.error, PLAIN_ERRORS) or "ambiguous" in str(t.error) for t in argument.tried)
    ):
        first = (sure or argument.tried)[0]
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
        yield Finding("no-return", f"without {names[0]}, it returns None", bound.case.line_with(r"^\s+return\b"))
        return
    failed = next((f for f in bound.failures if f.line is not None and f.called is not None), None)
    if names and failed is not None:
        words = f"{names[0]}=None, its default, raises {type(failed.error).__name__}: {failed.error}"
        line = bound.case.condition_around(failed.line, "") or failed.line
        yield Finding("option-crashes", words, line)


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
            words = "its sample becomes NaN" if alone else "the whole batch becomes NaN"
            yield Finding("nan-empty-row", words, reading.core.softmax_line)
            return


def half_precision_masks(bound: Bound, reading: AttentionReading | None) -> Found:
    """The number that hides a key must fit into float16."""
    for argument in measured(bound, reading):
        tried = argument.first(argument.meaning) if argument.meaning else None
        if tried is not None and tried.shape != LENGTHS:
            mask = tried.mask.half() if tried.mask.is_floating_point() else tried.mask
            found = half_precision(bound, reading, {argument.name: mask})
            yield from (f for f in found if isinstance(f, Finding) and f.name == "half-fill")


def constructor_switch(bound: Bound, reading: AttentionReading | None) -> Found:
    """A constructor argument that switches a causal mask on must do what it says."""
    if reading is None or reading.scores is None or bound.built.config is not None:
        return
    parameters = {p.name: p for p in parameters_of(bound.case.target)}
    for name in CAUSAL_FLAGS:
        p = parameters.get(name)
        if p is not None and (is_boolean(p) or p.default is p.empty):
            with contextlib.suppress(Exception):  # it was not made to be switched, or the switch needs more arguments
                other = bound.called(thing=bound.rebuilt(**{name: True}))
                yield from _switched(other, name)
                yield from _masked_beside(bound, reading, other, name)
            return


def _masked_beside(bound: Bound, reading: AttentionReading, other: Bound, name: str) -> Iterator[Finding]:
    """A mask argument of an object that is causal by its constructor."""
    usable = [a for a in measured(bound, reading) if a.meaning in ("keep", "drop")]
    tried = usable[0].first(usable[0].meaning) if usable else None
    if tried is None or tried.meant is None or reading.pattern != "full":
        return
    both = other.called({usable[0].name: tried.mask.clone()})
    core = MaskTrial(bound, reading, usable[0].name).same_arrangement(both)
    visible = (tried.meant if usable[0].meaning == "keep" else ~tried.meant) & torch.ones_like(tried.meant).tril()
    if core is not None and not _agree(core.weights.nan_to_num() > 1e-30, visible):
        line = bound.case.line_with(rf"\b(if|elif)\b.*\b{usable[0].name}\b") or core.mask_line(bound.trace)
        yield Finding("masks-combined", f"{usable[0].name} beside {name}=True", line)


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
    yield from _switched(other, name)
    if reading is not None and reading.pattern == "causal" and "causal" in name:
        line = reading.core.mask_line() or reading.core.softmax_line
        line = bound.case.condition_around(line, "") or line
        yield Finding("option-ignored", f"it is causal with {name}=False as well", line)


def is_causal_switch(p: inspect.Parameter) -> bool:
    """Whether a flag, off by default, switches a causal mask on."""
    word = plain(p.name)
    named = "causal" in word or word in ("mask", "masked", "usemask", "applymask", "lookahead")
    return is_boolean(p) and p.default is not True and named


def _switched(other: Bound, name: str) -> Iterator[Finding]:
    """What is wrong with a call that should be causal."""
    seen, words = read(other), f"with {name}=True"
    found = [] if seen is None else [f for f in stage_findings(other, seen) if f.severity == "wrong"]
    yield from (replace(f, detail=f"{f.detail} ({words})") for f in found)
    if found or seen is None or seen.scores is None:
        return
    line = next((n.line for n in seen.core.trace.nodes if n.op in ("tril", "triu") and n.line is not None), None)
    line = line or seen.core.mask_line() or seen.core.softmax_line
    mistake = CAUSAL_MISTAKES.get(pattern(seen.scores.visible))
    if seen.scores.after == "masked":
        yield Finding("mask-after-softmax", words, line)
    elif seen.scores.leaks:
        yield Finding("mask-leaks", f"{words}: future scores are set to a number near zero", line)
    elif mistake is not None and (mistake != "causal-ignored" or "causal" in name):  # `mask=True` may mean another mask
        yield Finding(mistake, words, line)
