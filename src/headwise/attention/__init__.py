"""`attend(query, key, value)`: check the arguments, choose a backend, run it, return output and weights.

`backends/` holds the ways to compute attention. May import weights, masks, shapes and errors.
"""

from headwise.attention.attend import attend, check_scores, plan

__all__ = ["attend", "check_scores", "plan"]
