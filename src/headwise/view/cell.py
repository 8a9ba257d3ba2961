"""One weight, and what can be said of it."""

from typing import NamedTuple

import torch

from headwise.weights import AttentionMap


class Cell(NamedTuple):
    """How one query looks at one key.

    weight: the share of the query's attention.
    logit: the score it comes from, minus infinity where the key is hidden.
    rank: 1 for the key the query looks at most; hidden keys come last.
    visible: how many keys the query sees; with even attention each would get 1 / visible.
    """

    weight: float
    logit: float
    rank: int
    visible: int

    @property
    def times_uniform(self) -> float:
        """How many times the even share the weight is."""
        return self.weight * self.visible


def cell(weights: AttentionMap, head: int, query: int, key: int) -> Cell:
    """One weight of a map of one sample, for the work of its row.

    >>> weights = AttentionMap(torch.zeros(1, 3, 8, 5), torch.zeros(1, 3, 8, 5))
    >>> cell(weights, 2, 6, 4)
    Cell(weight=0.125, logit=0.0, rank=1, visible=8)
    """
    with torch.no_grad():
        row = weights.detach().select(heads=[head], rows=[query])
        scores = row._source().scores()[0, 0, 0]
    rank = 1 + int((scores > scores[key]).sum())
    return Cell(float(row[0, 0, 0, key]), float(scores[key]), rank, int((scores > -torch.inf).sum()))
