"""Weights that somebody already has as numbers, to look at like any other map.

A map is made of queries and keys. Those of given weights are their logarithms, and one axis for every key: query times
key is then the logarithm of the weight, and its softmax the weight itself.
"""

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.weights import AttentionMap, Scoring

NOTHING = -1e4  # the logarithm of a weight that is 0: its exponential is 0 in every precision
NEAR = 0.02  # how far a row's sum may be from 1; half precision rounds


def map_of(weights: Tensor) -> AttentionMap:
    """A map of weights (H, T, S) or (1, H, T, S), as `output_attentions=True` gives them.

    >>> map_of(torch.eye(3).expand(1, 2, 3, 3)).entropy().sum().item()
    0.0
    """
    weights = weights[None] if weights.dim() == 3 else weights
    if weights.dim() != 4 or not weights.is_floating_point():
        raise ShapeError(
            f"weights {tuple(weights.shape)} of {weights.dtype}: expected floats (1, H, T, S) or (H, T, S)."
        )
    precise = weights.detach().to(torch.promote_types(weights.dtype, torch.float32))
    sums = precise.sum(-1)
    if not bool(((sums - 1).abs() < NEAR).all()) or bool((precise < 0).any()):
        raise OptionError(
            f"rows of these weights sum to {sums.min():.3g} up to {sums.max():.3g}: expected weights after the "
            "softmax, each row with sum 1."
        )
    S = weights.shape[-1]
    keys = torch.eye(S, dtype=precise.dtype, device=precise.device).expand(*weights.shape[:2], S, S)
    return AttentionMap(precise.log().clamp(min=NOTHING), keys, Scoring(scale=1.0))
