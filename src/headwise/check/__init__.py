"""Judges anybody's multi-head attention: binds to it, compares it with the reference, and names the mistake.

The package can be called: `headwise.check(MyAttention)` and `headwise.check("attention.py")` give a `Report`.
"""

from typing import Any

from headwise.check.asking import check
from headwise.check.findings import Finding
from headwise.check.mistakes import MISTAKES, Mistake
from headwise.check.report import Report
from headwise.verbs import make_callable

__all__ = ["MISTAKES", "Finding", "Mistake", "Report", "check"]

make_callable(__name__, check)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext headwise.check` brings the cell magic `%%headwise_check`."""
    from headwise.check.magic import load

    load(shell)
