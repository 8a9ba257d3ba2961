"""Every fault that the checker looks for: one function `(bound, reading) → findings` each, in one ordered tuple.

To add a fault, write a function that yields `Finding("its-name", "measured values", line)`, put it into `FAULTS`, and
add its row to the table in `mistakes.py`, with the mistakes that it explains. Imports all of `check` but `verdict`.
"""

from collections.abc import Iterator

from headwise.check.binding import Bound
from headwise.check.faults import behavior, crashes, masks, portability, stages
from headwise.check.faults.stages import Fault
from headwise.check.mistakes import Finding, Found, Note
from headwise.check.reading import AttentionReading

__all__ = ["FAULTS", "ONLY_IF_RIGHT", "Fault", "find_faults"]


def assignment(bound: Bound, reading: AttentionReading | None) -> Found:
    """A class must have the form of the assignment, or give what the reference gives, where one was named."""
    if bound.case.assignment is not None:
        yield from bound.case.assignment.deviations(bound, reading)


# Of two mistakes that are equally serious, the first in this order is called the cause.
FAULTS: tuple[Fault, ...] = (
    crashes.supplied,
    crashes.repaired,
    masks.required_mask,
    *stages.STAGES,
    portability.unsliced_buffer,
    masks.mask_meanings,
    masks.mask_arguments,
    masks.misplaced_mask,
    masks.empty_row,
    masks.half_precision_masks,
    behavior.without_keys,
    behavior.layers_in_forward,
    behavior.dropout,
    behavior.gradients,
    behavior.batch_leak,
    behavior.small_batch,
    behavior.other_length,
    portability.half_precision,
    portability.unregistered_state,
    masks.constructor_switch,
    masks.call_switch,
    behavior.grouped_heads,
    portability.speed,
    behavior.returned_weights,
    portability.beyond_buffer,
    portability.meta_device,
    portability.compilation,
    assignment,
)
ONLY_IF_RIGHT = (portability.beyond_buffer, portability.meta_device, portability.compilation)
# Skipped for code that loops over single numbers, where every call takes seconds.
CALLS_AGAIN = (
    behavior.dropout,
    behavior.gradients,
    behavior.batch_leak,
    behavior.small_batch,
    behavior.other_length,
    portability.half_precision,
    masks.constructor_switch,
    masks.call_switch,
    behavior.grouped_heads,
    portability.speed,
)
MANY_OPERATIONS = 6000
PROGRESS = {masks.mask_meanings: "masks", behavior.without_keys: "probing"}  # what the user is told from here on


def find_faults(bound: Bound, reading: AttentionReading | None, right: bool = False) -> Iterator[Finding | Note]:
    """Everything that the faults find; with `right`, only by those that are asked of code that is right so far."""
    accepted = () if bound.case.assignment is None else bound.case.assignment.accepted(bound)
    slow = len(bound.trace.nodes) > MANY_OPERATIONS
    for fault in FAULTS:
        if (fault in ONLY_IF_RIGHT) == right and not (slow and fault in CALLS_AGAIN):
            if fault in PROGRESS:
                bound.case.progress(PROGRESS[fault])
            yield from (found for found in fault(bound, reading) if getattr(found, "name", "") not in accepted)
