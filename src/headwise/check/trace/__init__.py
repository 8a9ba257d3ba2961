"""Records every operation of a call and finds the attention in it, whatever the coding style.

`recorder` records; `finder` picks the softmax and the products around it; `core` arranges them as (B, H, T, S) and says
on which line of the learner's file each stage happens. Imports nothing of ours.
"""

from headwise.check.trace.core import Core
from headwise.check.trace.finder import AttentionNodes, find_attention, unnormalized_scores
from headwise.check.trace.recorder import (
    ARITHMETIC,
    COMPARES,
    PARTS,
    PRODUCTS,
    RANDOM,
    REPEATS,
    SWAPS,
    VIEWS,
    Node,
    TooLongError,
    Trace,
    error_line,
    in_layer_constructor,
    is_deliberate,
    learner_line,
)

__all__ = [
    "ARITHMETIC", "COMPARES", "PARTS", "PRODUCTS", "RANDOM", "REPEATS", "SWAPS", "VIEWS", "AttentionNodes", "Core",
    "Node", "TooLongError", "Trace", "error_line", "find_attention", "in_layer_constructor", "is_deliberate",
    "learner_line", "unnormalized_scores",
]  # fmt: skip
