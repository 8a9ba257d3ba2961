"""`attend(query, key, value)`: check, choose a backend, run, wrap.

Imports weights, masks, shapes and errors.
"""

from headwise.attention.attend import attend, checked, run, scoring_for

__all__ = ["attend", "checked", "run", "scoring_for"]
