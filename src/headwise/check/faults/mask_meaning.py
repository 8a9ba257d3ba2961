"""What a mask argument means, measured: which shapes it takes, and what happens to the weights of every head.

None of the usual meanings is wrong; `masks.py` says which of the others are.
"""

import contextlib
import inspect
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.check.binding import Bound
from headwise.check.fits import same, side_by_side
from headwise.check.objects import call_parameters
from headwise.check.reading import AttentionReading
from headwise.check.trace import Core, error_line, find_attention
from headwise.check.vocabulary import call_role, plain

JOINS = ("bitwise_and", "logical_and", "__and__", "mul")  # of two masks
SECONDS = 6.0  # for one argument; a typical one takes half a second
LENGTHS = "(B,) lengths"
LENGTH_MEANINGS = (
    "keep",
    "after",
    "one more",
    "one less",
    "wrong sample",
    "prefix",
    "queries",
)  # that are certain for a list of lengths
LENGTH_NAME = re.compile(r"len(s|gths?)?$")
PREFIX = re.compile(r"prefix|prompt|context|mem|cond")  # tokens that may all see each other
IDS = "(B,T) numbers of documents"
DOCUMENTS = re.compile(r"(doc|document|seg|segment|sample|seq|sequence|pack\w*)(ids?|idx|index|indices|s)")
MEANING = {
    "keep": "1 keeps a key, 0 hides it", "drop": "1 hides a key, 0 keeps it", "additive": "added to the scores",
    "prefix": "how many first tokens of each sample see each other",
}  # fmt: skip


@dataclass
class TriedMask:
    """One mask that was passed, and what it did."""

    shape: str
    mask: Tensor
    # keep, drop, additive, none, leaks, after, discarded, wrong sample, transposed, queries, some heads, turned in
    # some heads, nan, other;
    # misfit if the output has another shape, empty if it raised
    meaning: str = ""
    error: Exception | None = None
    line: int | None = None
    seen: Tensor | None = None  # (B, H, T, S), True where a key had weight
    meant: Tensor | None = None  # what the mask should mean, True = visible
    modified: bool = False  # the call wrote into the mask
    raised: bool = False  # the keys that remain have equal weights, whatever the scores
    of_integers: bool = False  # the same mask, of whole numbers in place of booleans, means something else


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

    @property
    def is_certain(self) -> bool:
        """Whether lengths or numbers of documents do something that is wrong for them."""
        return any(t.shape in (LENGTHS, IDS) and t.meaning in ("queries", "uncausal", "after") for t in self.tried)

    def shapes(self) -> list[str]:
        """The shapes that work with this meaning."""
        return list(dict.fromkeys(t.shape for t in self.tried if t.meaning == self.meaning and t.error is None))

    def first(self, meaning: str, shape: str | None = None) -> TriedMask | None:
        """The first mask with this meaning, of this shape where one is given."""
        return next((t for t in self.tried if t.meaning == meaning and shape in (None, t.shape)), None)

    def words(self) -> str:
        """`mask: 1 keeps a key, 0 hides it, in shapes (B,1,T,S) (T,S)`"""
        if not self.tried:
            return f"{self.name}: not judged, {self.layout}"
        if self.shapes() == [LENGTHS] and self.meaning == "keep":
            return f"{self.name}: how many keys of each sample are real"
        if self.shapes() == [IDS]:
            return f"{self.name}: the document that every token belongs to"
        meaning = MEANING.get(self.meaning, "what it does could not be determined")
        return f"{self.name}: {meaning}" + (f", in shapes {' '.join(self.shapes())}" if self.shapes() else "")


def measured(bound: Bound, reading: AttentionReading | None) -> list[MaskArgument]:
    """Every mask argument that is not a flag; measured once and kept in the reading."""
    if reading is None or reading.scores is None:
        return []
    if reading.mask_arguments is None:
        flags = {p.name for p in call_parameters(bound.thing) if is_boolean(p)}  # `mask=True` is a switch
        names = [name for name in bound.form.masks[:3] if name not in flags]
        reading.mask_arguments = [_measure(bound, reading, name) for name in names]
        others = (_measure(bound, reading, name) for name in _unknown_arguments(bound))
        reading.mask_arguments += [argument for argument in others if argument.meaning or argument.is_certain]
    return reading.mask_arguments


def _unknown_arguments(bound: Bound) -> list[str]:
    """Arguments whose names say nothing, optional or filled with a mask that hides nothing: each may be a mask."""
    held = {*bound.form.roles, *bound.form.masks, *bound.form.fixed}
    parameters = [p for p in call_parameters(bound.thing) if p.default is None and p.name not in held]
    unknown = [p.name for p in parameters if call_role(p.name) is None and not is_boolean(p)][:2]
    given = [name for name, value in bound.form.fixed.items() if isinstance(value, Tensor) and value.dim() > 1]
    return [name for name in given if call_role(name) is None and name not in bound.form.masks] + unknown


def replaces_causal(bound: Bound, name: str) -> bool:
    """Whether the code says that this mask takes the place of a causal one, which is there where no mask is given."""
    alone = not bound.form.cross and bound.case.is_causal_without(name)
    return alone or bound.case.replaces_missing(name)


def is_boolean(p: inspect.Parameter) -> bool:
    """Whether an argument is a flag."""
    return isinstance(p.default, bool) or re.search(r"\bbool\b", str(p.annotation)) is not None


def is_causal_switch(p: inspect.Parameter) -> bool:
    """Whether a flag, off by default, switches a causal mask on."""
    word = plain(p.name)
    named = "causal" in word or word in ("mask", "masked", "usemask", "applymask", "lookahead")
    return is_boolean(p) and p.default is not True and named


def _measure(bound: Bound, reading: AttentionReading, name: str) -> MaskArgument:
    argument = MaskArgument(name, bound.form.layout)
    if bound.form.layout not in ("batch first", "batch second"):
        return argument
    trial = MaskTrial(bound, reading, name)
    if LENGTH_NAME.search(plain(name)) and (raised := _refused_lengths(trial)) is not None:
        argument.tried.append(raised)
        return argument
    if DOCUMENTS.fullmatch(plain(name)):
        argument.tried.append(_of_documents(trial))
        return argument
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
            argument.tried += _added(trial, shape, mask, meant)
    first = argument.first(argument.meaning)
    if first is not None and first.mask.dtype == torch.bool and first.meant is not None:
        ones = trial(first.shape, first.mask.double(), first.meant)
        if ones.meaning != first.meaning:  # numbers take another branch
            argument.tried += _added(trial, first.shape, first.mask, first.meant)
        whole = trial(first.shape, first.mask.long(), first.meant)
        other = whole.error is None and whole.meaning not in (first.meaning, "additive")
        first.of_integers = first.meaning in ("keep", "drop") and other
    if not argument.meaning:
        B, H, T, S = reading.core.weights.shape
        lengths = 1 + torch.arange(B) % (S - 1)
        meant = (torch.arange(S) < lengths[:, None])[:, None, None].expand(B, H, T, S)
        tried = trial(LENGTHS, lengths, meant)
        if prefix := of_prefix(tried, lengths, reading, name):
            tried.meaning, tried.line = prefix, _widening_line(tried, bound, name) or tried.line
        elif off := _near_length(tried, lengths):
            tried.meaning, tried.line = off, _compared_line(tried, bound, name) or tried.line
        joined = tried.meaning in ("either", "uncausal") and not PREFIX.search(plain(name))
        argument.tried += [tried] if joined or tried.meaning in LENGTH_MEANINGS else []
    return argument


def _refused_lengths(trial: "MaskTrial") -> TriedMask | None:
    """A list of lengths that raises, where a list of as many numbers as tokens does not."""
    B, H, T, S = trial.reading.core.weights.shape
    lengths, meant = 1 + torch.arange(B) % (S - 1), torch.ones(B, H, T, S, dtype=torch.bool)
    tried = trial(LENGTHS, lengths, meant)
    if not isinstance(tried.error, RuntimeError) or "must match" not in str(tried.error):
        return None
    other = trial(LENGTHS, torch.full((S,), S), meant)
    return tried if other.error is None else None


def _of_documents(trial: "MaskTrial") -> TriedMask:
    """Numbers of documents, several of which share a sample: a token sees its own document only."""
    B, H, T, S = trial.reading.core.weights.shape
    starts = 1 + torch.arange(B)[:, None] % (T - 1)
    ids = (torch.arange(T) >= starts).long() + (torch.arange(T) >= starts + 2).long()
    tried = trial(IDS, ids, (ids[:, :, None] == ids[:, None])[:, None].expand(B, H, T, S))
    if tried.meaning == "uncausal":
        tried.line = _last_new_line(trial.bound, {trial.name: ids}) or tried.line
    return tried


def _last_new_line(bound: Bound, given: dict[str, Tensor]) -> int | None:
    """The last line that computes something in a call with these arguments, and nothing without."""
    usual = {n.line for n in bound.trace.nodes}
    new = [n.line for n in bound.called(given).trace.nodes if n.line is not None and n.line not in usual]
    return new[-1] if new else None


def of_prefix(tried: TriedMask, lengths: Tensor, reading: AttentionReading, name: str) -> str:
    """prefix where the first tokens see each other and the rest is causal; queries where they see all."""
    if tried.seen is None or "prefix" not in plain(name) or reading.pattern != "causal":
        return ""
    first = torch.arange(tried.seen.shape[-1]) < lengths[:, None]
    causal = reading.visible
    if agree(tried.seen, causal | first[:, None, None, :]):
        return "prefix"
    return "queries" if agree(tried.seen, causal | first[:, None, :, None]) else ""


def _widening_line(tried: TriedMask, bound: Bound, name: str) -> int | None:
    """The last line that adds an axis to a boolean table."""
    nodes = bound.called({name: tried.mask.clone()}).trace.nodes
    usual = {n.line for n in bound.trace.nodes}
    wider = [n.line for n in nodes if n.op == "unsqueeze" and n.value.dtype == torch.bool and n.line not in usual]
    return wider[-1] if wider else None


def _added(trial: "MaskTrial", shape: str, mask: Tensor, meant: Tensor) -> list[TriedMask]:
    """A mask of zeros and large negative numbers, if it is added to the scores."""
    added = trial(shape, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9), meant)
    if added.meaning == "keep":
        added.meaning = _added_meaning(trial, shape, mask, meant)
    return [added] if added.meaning in ("additive", "scaled", "rescaled", "uncausal") else []


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
        if agree(tried.seen, wanted):
            return name
    return ""


def shaped_masks(
    B: int, H: int, T: int, S: int, generator: torch.Generator | None = None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(shape in words, mask as passed, what it should mean as (B, H, T, S)).

    The rows and samples of a mask all differ, and no row hides all or nothing.
    """
    generator = generator or torch.Generator().manual_seed(3)
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
    yield "(B·H,T,S)", by_sample.flatten(0, 1), by_sample
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
            other = self.bound.called({self.name: mask}, thing=self._thing())
        except Exception as error:
            tried.error, tried.line = error, error_line(error, self.bound.case.filename)
            return tried
        tried.modified = not torch.equal(mask, tried.mask)
        core = self.same_arrangement(other)
        before, after = self.bound.output, other.output
        if before is None or after is None or before.shape != after.shape:
            tried.meaning = "misfit"
            return tried
        if core is None or core.weights.shape != self.reading.core.weights.shape or self._has_more_axes(core):
            tried.meaning = "other"
            return tried
        tried.seen = _finite(core.weights) > 1e-30
        tried.meaning = self._meaning(core, meant, tried.mask)
        tried.raised = tried.meaning in ("keep", "drop") and _are_even(core.weights)
        moved = tried.meaning in ("wrong sample", "transposed", "queries")
        late = tried.meaning == "after"
        tried.line = core.after_softmax_line() if late else core.mask_line(self.bound.trace, moves=moved)
        if tried.meaning == "both":
            joined = (n.line for n in other.trace.nodes if n.op in JOINS and n.value.dtype == torch.bool)
            tried.line = next((line for line in joined if line is not None), tried.line)
        if tried.meaning in ("keep", "drop") and self._changes_weights(core, tried.seen):
            tried.meaning = "rescaled"
        elif tried.meaning in MEANING and not self._is_explained(core, after):
            tried.meaning = "other"  # the weights are right, but not what is made of them
        if tried.meaning != "none":
            return tried
        if before is not None and after is not None and not same(before.nan_to_num(), after.nan_to_num()):
            tried.meaning = "other"  # it acts elsewhere, perhaps on the output
        elif (discarded := core.discarded_mask()) is not None:
            tried.meaning, tried.line = "discarded", discarded.line
        return tried

    def _thing(self) -> Any:
        """The object; where calls write into it, one that no earlier mask was passed to."""
        fresh = self.bound.uncalled() if self.bound.case.line_of_state() is not None else None
        return self.bound.thing if fresh is None else fresh

    def _has_more_axes(self, core: Core) -> bool:
        """Whether the mask has given the scores another axis: it fits by accident, where that axis has size one."""
        before, after = self.reading.core.nodes.softmax[0], core.nodes.softmax[0]
        return after.value.dim() > max(before.value.dim(), 4)

    def same_arrangement(self, other: Bound) -> Core | None:
        """The attention of another call, with batch and heads read as before."""
        nodes = find_attention(other.trace)
        cores = () if nodes is None else nodes.arrangements(*other.inputs.query.shape[:2])
        return next((core for core in cores if core.order == self.reading.core.order), None)

    def _changes_weights(self, core: Core, seen: Tensor) -> bool:
        """Whether visible keys have other weights, relative to each other, than without the mask."""
        scores = self.reading.scores
        if scores is None or scores.axis != "keys" or scores.after or scores.leaks:
            return False
        base, usual = self._usual()
        usual = usual.nan_to_num() * seen
        rows = (seen.sum(-1) > 1) & torch.isfinite(core.weights).all(-1) & (usual.sum(-1) > 1e-12)
        rows &= ~(seen & ~base).any(-1)  # where nothing was left to see, every key has some weight
        expected = usual[rows] / usual[rows].sum(-1, keepdim=True)
        return bool(rows.any()) and not same(core.weights[rows], expected, 1e-4) and not _are_even(core.weights)

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
        scores, weights = self.reading.scores, _finite(core.weights)
        assert scores is not None  # noqa: S101 - masks are measured only where scores were read
        if same(weights, _finite(self.reading.core.weights)):
            return "none"
        base, seen = self._usual()[0], weights > 1e-30
        kept, hidden = agree(seen, meant & base), agree(seen, ~meant & base)
        if scores.axis == "keys" and core.softmax is not None and (kept or hidden):
            before = (core.softmax.nan_to_num() > 1e-30) & base
            sums = weights.sum(-1)
            if bool(before.eq(base).all()) and not torch.allclose(sums, torch.ones_like(sums)):
                return "after"
        if kept or hidden:
            return "keep" if kept else "drop"
        if not bool(torch.isfinite(core.weights).all()):
            place = _misplaced(seen, meant, base)
            return {"queries": "queries", "transposed": "transposed", "keep": "both", "drop": "both"}.get(place, "nan")
        if bool(seen.eq(base).all()):
            factor = self._factor(core, mask)
            if factor is None and _evens_rows(weights, self._usual()[1], meant):
                return "queries"
            return "leaks" if factor is None else "additive" if abs(factor - 1) < 1e-6 else "scaled"
        return _misplaced(seen, meant, base)

    def _usual(self) -> tuple[Tensor, Tensor]:
        """What is visible without this mask, and the weights; a mask that replaces a causal one starts from all."""
        scores, core = self.reading.scores, self.reading.core
        assert scores is not None  # noqa: S101 - as in `_meaning`
        if not replaces_causal(self.bound, self.name):
            return scores.visible, core.weights
        bias = 0.0 if scores.bias is None else scores.bias
        return torch.ones_like(scores.visible), (scores.factor * core.query @ core.key.mT + bias).softmax(-1)

    def _factor(self, core: Core, mask: Tensor) -> float | None:
        """The factor with which the mask was added to the logits, up to a constant for each row; None for no such."""
        visible, usual = self._usual()
        change = _centered(core.weights.clamp_min(1e-300).log() - usual.clamp_min(1e-300).log(), visible)
        by_head = [mask.double().reshape(change.shape)] if mask.numel() == change.numel() else []  # (B·H, T, S)
        for shaped in (mask.double(), mask.double().unsqueeze(1), *by_head):
            with contextlib.suppress(RuntimeError):
                wide = _centered(shaped.expand(change.shape), visible)
                factor = float((change * wide).sum() / (wide * wide).sum().clamp_min(1e-300))
                if abs(factor) > 1e-9 and same(change, factor * wide, 1e-6):
                    return factor
        return None


def _finite(weights: Tensor) -> Tensor:
    """Weights with zero in place of what is no number: minus infinity after the softmax hides a key as well."""
    return weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _are_even(weights: Tensor) -> bool:
    """Whether every row with several visible keys gives them the same weight: a large number replaced the scores."""
    seen = weights > 1e-30
    counts = seen.sum(-1, keepdim=True)
    rows = (counts > 1).expand_as(seen)
    even = (1 / counts.double()).expand_as(seen)[rows & seen]
    return bool(rows.any()) and torch.allclose(weights[rows & seen].double(), even)


def agree(seen: Tensor, meant: Tensor) -> bool:
    """Whether they are equal in every row in which some key is visible."""
    rows = meant.any(-1)
    return bool(rows.any()) and bool((seen[rows] == meant[rows]).all())


def _misplaced(seen: Tensor, meant: Tensor, base: Tensor) -> str:
    """Where a mask went that did not hide the keys it names: other axes, some heads only, or another sample."""
    by_key = bool((meant == meant[:, :, :1]).all())
    if not bool(base.all()) and (agree(seen, meant) or agree(seen, ~meant)):
        return "uncausal"
    if not bool(base.all()) and (agree(seen, meant | base) or agree(seen, ~meant | base)):
        return "either"
    for wanted in (meant, ~meant):
        square = wanted.shape[-1] == wanted.shape[-2]
        if by_key and square and _agree_as_padding(seen, wanted, base):
            return "keep" if wanted is meant else "drop"
        if by_key and square and _hides_rows(seen, wanted, base):
            return "queries"
        if not by_key and square and agree(seen, wanted.mT & base):
            return "transposed"
        heads = [agree(seen[:, h], (wanted & base)[:, h]) for h in range(seen.shape[1])]
        turned = [agree(seen[:, h], (~wanted & base)[:, h]) for h in range(seen.shape[1])]
        if any(heads) and any(turned) and all(a or b for a, b in zip(heads, turned, strict=True)):
            return "turned"
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


def _evens_rows(weights: Tensor, usual: Tensor, meant: Tensor) -> bool:
    """Whether a mask of keys changed the queries that it names, and them alone, to equal weights for all keys."""
    if weights.shape[-1] != weights.shape[-2] or not bool((meant == meant[:, :, :1]).all()):
        return False
    even = torch.full_like(weights, 1 / weights.shape[-1])
    named = (rows.unsqueeze(-1) for rows in (meant[:, :, 0], ~meant[:, :, 0]))
    return any(same(weights, torch.where(rows, usual, even)) for rows in named)


def _of_another_sample(seen: Tensor, meant: Tensor, base: Tensor) -> str:
    """`wrong sample` where every table belongs to some sample of the mask, but not to its own."""
    got = seen.flatten(0, 1).flatten(1)
    for wanted in (meant & base, ~meant & base):
        if bool((got[:, None] == wanted[:, 0].flatten(1)[None]).all(-1).any(-1).all()):
            return "wrong sample"
    return "other"


def _centered(table: Tensor, visible: Tensor) -> Tensor:
    """A table without the mean of the visible keys in each row, and zero for the keys that are hidden."""
    inside = visible.expand(table.shape)
    mean = table.where(inside, 0.0).sum(-1, keepdim=True) / inside.sum(-1, keepdim=True).clamp_min(1)
    return (table - mean).where(inside, 0.0)
