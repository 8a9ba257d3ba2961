"""Names the pattern of who sees whom."""

import torch
from torch import Tensor


def pattern(visible: Tensor) -> str:
    """Of a (B, H, T, S) table: full, causal, strict, ahead, future, past-only mistakes, or other."""
    T, S = visible.shape[-2:]
    table = visible[0, 0]
    if not bool((visible == table).all()):
        return "other"
    if bool(table.all()):
        return "full"
    if T != S:
        return "other"
    ones = torch.ones(T, S, dtype=torch.bool)
    shapes = {
        "causal": ones.tril(),
        "strict": ones.tril(-1),
        "ahead": ones.tril(1),
        "future": ones.triu(),
        "later": ones.triu(1),
    }
    for name, expected in shapes.items():
        rows = expected.any(-1)  # a row that sees nothing is filled evenly by some, with NaN by others
        if bool((table[rows] == expected[rows]).all()):
            return name
    if bool((table <= ones.tril()).all()):
        return "causal and more"
    return "other"
