"""Judges anybody's multi-head attention: binds to it, compares it with the reference, and names the mistake.

The package can be called: `headwise.check(MyAttention)` and `headwise.check("attention.py")` give a `Report`.
"""

import sys
from types import ModuleType
from typing import Any

from headwise.check.findings import Finding
from headwise.check.mistakes import MISTAKES, Mistake
from headwise.check.report import Report

__all__ = ["MISTAKES", "Finding", "Mistake", "Report"]


class _Callable(ModuleType):
    """A package named like its only verb: calling it is asking."""

    def __call__(self, target: Any, **options: Any) -> Report:
        """A report on `target`; see `headwise.check.asking.check`."""
        from headwise.check.asking import check  # nothing of the checker is loaded before it is asked

        return check(target, **options)


sys.modules[__name__].__class__ = _Callable


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext headwise.check` brings the cell magic `%%headwise_check`."""
    from headwise.check.magic import load

    load(shell)
