"""A right class of the kind that was judged, for those who ask for it."""

from headwise.check.bound import Bound
from headwise.check.templates import write


def solution(bound: Bound | None) -> str:
    """Source of a right class with the same kind of call."""
    cross = bound is not None and bound.form.cross
    return write("separate" if cross or bound is None else "fused")
