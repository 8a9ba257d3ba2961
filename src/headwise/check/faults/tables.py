"""Rotary tables that we pass: in the layout that a class is written for."""

import contextlib

from headwise.check.binding import Bound
from headwise.check.calls import other_tables
from headwise.check.faults.stages import STAGES
from headwise.check.mistakes import Finding, Note
from headwise.check.reading import AttentionReading, read
from headwise.check.rotary import layouts_told


def with_fitting_tables(bound: Bound, reading: AttentionReading | None) -> tuple[Bound, AttentionReading | None]:
    """The same with rotary tables in the layout in which no stage is wrong, unless the file makes others itself."""
    told = set() if bound.case.loaded is None else layouts_told(bound.case.loaded.source)
    forms = [*other_tables(bound.form, bound.thing, bound.sizes)]
    if not forms or not _is_troubled(bound, reading):
        return bound, reading
    for form, layouts in forms:
        if told and not layouts <= told | {"once"}:
            continue
        with contextlib.suppress(Exception):  # tables of this shape are refused
            other = bound.called(form=form)
            seen = read(other)
            if other.rank >= bound.rank and not _is_troubled(other, seen):
                return other, seen
    return bound, reading


def _is_troubled(bound: Bound, reading: AttentionReading | None) -> bool:
    """Whether a stage is wrong or not understood."""
    found = [result for fault in STAGES for result in fault(bound, reading)]
    wrong = any(isinstance(result, Finding) and result.severity == "wrong" for result in found)
    return wrong or any(isinstance(result, Note) and result.kind in ("doubt", "untried") for result in found)
