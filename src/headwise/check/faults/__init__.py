"""Every fault that the checker looks for: one function `(bound, reading) → findings` each, in one ordered tuple.

To add a fault, write a function that yields `Finding("its-name", "measured values", line)`, put it into a tuple below
and under its item of the certificate, and add its row to the table in `mistakes.py`, with the mistakes that it
explains. Imports all of `check` but `verdict`.
"""

import traceback
from collections.abc import Collection, Iterable

from headwise.check.binding import Bound
from headwise.check.faults import (
    behavior,
    branches,
    callers,
    causal,
    chunks,
    crashes,
    decoding,
    dropout,
    masks,
    options,
    portability,
    positions,
    settings,
    sizes,
    speed,
    stages,
    training,
    weights,
)
from headwise.check.faults.questions import Fault
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.reading import AttentionReading
from headwise.check.report import Item

__all__ = ["CERTIFICATE", "FAULTS", "IF_NOTHING_IS_WRONG", "ONLY_IF_RIGHT", "Examination", "Fault", "own_fault"]


def assignment(bound: Bound, reading: AttentionReading | None) -> Found:
    """A class must have the form of the assignment, or give what the reference gives, where one was named."""
    if bound.case.assignment is not None:
        yield from bound.case.assignment.deviations(bound, reading)


# Of two mistakes that are equally serious, the first in this order is called the cause.
FAULTS: tuple[Fault, ...] = (
    crashes.supplied,
    crashes.repaired,
    masks.required_mask,
    behavior.stated_layout,
    training.layers_in_forward,
    *stages.STAGES,
    weights.changed_weights,
    portability.unsliced_buffer,
    masks.mask_meanings,
    masks.mask_arguments,
    masks.misplaced_mask,
    masks.empty_row,
    masks.half_precision_masks,
    options.without_keys,
    behavior.unmodified_inputs,
    decoding.changed_defaults,
    behavior.repeated_calls,
    dropout.dropout,
    training.training_mode,
    training.gradients,
    behavior.batch_leak,
    sizes.small_batch,
    sizes.other_length,
    portability.half_precision,
    portability.unregistered_state,
    causal.constructor_switch,
    causal.call_switch,
    causal.causal_off,
    sizes.grouped_heads,
    behavior.returned_tuple,
    behavior.returned_weights,
    assignment,
)
# These are asked only if nothing is wrong so far: most mistakes would show up in them again.
IF_NOTHING_IS_WRONG: tuple[Fault, ...] = (
    stages.fresh_inputs,
    behavior.influence,
    masks.combined_masks,
    masks.masks_elsewhere,
    options.options,
    settings.own_defaults,
    settings.misread_keys,
    settings.constructor_options,
    settings.windows,
    settings.stand_ins,
    chunks.chunks,
    positions.position_tables,
    positions.idle_tables,
    options.caches,
    decoding.extended_cache,
    decoding.positioned_cache,
    decoding.stepwise,
    decoding.pieces,
    stages.unused_results,
    stages.unused_tables,
    behavior.globals_in_place_of_arguments,
    sizes.other_lengths,
    sizes.other_sizes,
    portability.other_device,
    branches.hidden_branches,
    branches.every_branch,
    callers.callers,
)
ONLY_IF_RIGHT: tuple[Fault, ...] = (
    portability.beyond_buffer,
    portability.meta_device,
    speed.slower_than_fused,
    portability.compilation,
)
# What must be verified before anything is called right.
CERTIFICATE: dict[str, tuple[Fault, ...]] = {
    "matches the reference on fresh inputs": (
        *stages.STAGES,
        weights.changed_weights,
        stages.fresh_inputs,
        stages.unused_results,
        stages.unused_tables,
    ),
    "matches the reference at three sizes": (sizes.other_sizes, sizes.grouped_heads),
    "every output depends on exactly the tokens it may see": (behavior.influence, behavior.batch_leak),
    "optional arguments, with and without": (
        masks.required_mask,
        options.without_keys,
        options.options,
        settings.own_defaults,
        settings.misread_keys,
        settings.constructor_options,
        settings.windows,
        settings.stand_ins,
        options.caches,
        decoding.extended_cache,
        decoding.positioned_cache,
        decoding.stepwise,
        decoding.pieces,
        causal.call_switch,
        causal.constructor_switch,
    ),
    "masks, for every head, query and key": (
        masks.mask_arguments,
        masks.misplaced_mask,
        masks.combined_masks,
        masks.masks_elsewhere,
        portability.unsliced_buffer,
    ),
    "training mode: finite, and equal to evaluation on average": (training.training_mode, training.layers_in_forward),
    "evaluation mode: repeated calls agree": (dropout.dropout,),
    "gradients reach every weight": (training.gradients,),
    "returned weights are the ones that were used": (behavior.returned_tuple, behavior.returned_weights),
    "a second call gives the same result, and inputs are not modified": (
        behavior.unmodified_inputs,
        decoding.changed_defaults,
        behavior.repeated_calls,
    ),
    "other lengths and batch sizes": (
        behavior.stated_layout,
        sizes.small_batch,
        sizes.other_length,
        sizes.other_lengths,
        chunks.chunks,
        positions.position_tables,
        positions.idle_tables,
    ),
    "every branch was taken": (branches.hidden_branches, branches.every_branch),
    "nothing is read from outside the class": (
        crashes.supplied,
        crashes.repaired,
        behavior.globals_in_place_of_arguments,
    ),
}
# Skipped for code that loops over single numbers, where every call takes seconds.
CALLS_AGAIN = {*FAULTS, *IF_NOTHING_IS_WRONG, *ONLY_IF_RIGHT} - {
    crashes.supplied,
    crashes.repaired,
    *stages.STAGES,
    stages.fresh_inputs,
    masks.mask_meanings,
    masks.mask_arguments,
    behavior.returned_weights,
}
MANY_OPERATIONS = 6000
PROGRESS = {masks.mask_meanings: "masks", options.without_keys: "probing"}  # what the user is told from here on


def own_fault(error: Exception) -> str:
    """An error of the checker, in words that ask for a report."""
    step = traceback.extract_tb(error.__traceback__)[-1]
    place = f"({step.name}, line {step.lineno})"
    return f"a fault of the checker itself, please report it: {type(error).__name__}: {error} {place}"


class Examination:
    """What every fault has found so far."""

    def __init__(self) -> None:
        self.by_fault: dict[Fault, list[Finding | Note]] = {}

    @property
    def findings(self) -> list[Finding]:
        return [f for found in self.by_fault.values() for f in found if isinstance(f, Finding)]

    @property
    def notes(self) -> list[Note]:
        return [n for found in self.by_fault.values() for n in found if isinstance(n, Note)]

    @property
    def wrong(self) -> bool:
        """Whether a mistake was found."""
        return any(finding.severity == "wrong" for finding in self.findings)

    def good(self, faults: Collection[Fault]) -> list[str]:
        """What these faults found to be right, where the same one found nothing wrong."""
        asked = [found for fault, found in self.by_fault.items() if fault in faults]
        right = [f for f in asked if not any(isinstance(r, Finding) and r.severity == "wrong" for r in f)]
        words = (r.words for found in right for r in found if isinstance(r, Note) and r.kind == "good")
        return list(dict.fromkeys(words))

    def ask(self, bound: Bound, reading: AttentionReading | None, faults: Iterable[Fault]) -> None:
        """Run these faults, in order."""
        slow = len(bound.trace.nodes) > MANY_OPERATIONS
        accepted = () if bound.case.assignment is None else bound.case.assignment.accepted(bound)
        for fault in faults:
            if slow and fault in CALLS_AGAIN:
                self.by_fault[fault] = [Note("untried", "one call takes too long")]
                continue
            if fault in PROGRESS:
                bound.case.progress(PROGRESS[fault])
            try:
                found = list(fault(bound, reading))
            except Exception as error:  # a fault of the checker must never read as a fault of the learner
                memory = "allocate memory" in str(error) or isinstance(error, MemoryError)
                found = [Note("untried", "it needs too much memory") if memory else Note("doubt", own_fault(error))]
            self.by_fault[fault] = [result for result in found if getattr(result, "name", "") not in accepted]

    def certificate(self) -> list[Item]:
        """Every item with its status."""
        return [self._item(name, faults) for name, faults in CERTIFICATE.items()]

    def _item(self, name: str, faults: tuple[Fault, ...]) -> Item:
        found = [result for fault in faults for result in self.by_fault.get(fault, [])]
        notes = [result for result in found if isinstance(result, Note)]
        words = {kind: [n.words for n in notes if n.kind == kind] for kind in ("untried", "doubt", "good", "absent")}
        if any(isinstance(result, Finding) and result.severity == "wrong" for result in found):
            return Item(name, "failed")
        open_questions = list(dict.fromkeys(words["untried"] + words["doubt"]))
        if open_questions or any(fault not in self.by_fault for fault in faults):
            return Item(name, "not judged", "; ".join(open_questions))
        if words["absent"] and not words["good"]:
            return Item(name, "does not apply", "; ".join(dict.fromkeys(words["absent"])))
        return Item(name, "verified", ", ".join(dict.fromkeys(words["good"])))
