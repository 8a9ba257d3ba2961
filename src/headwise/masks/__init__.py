"""Which keys a query may see: what a mask is, the kinds there are, and probes, which are masks that ask.

Imports nothing of ours but errors.
"""

from headwise.masks.kinds import (
    Causal,
    Dense,
    Documents,
    KeyMask,
    Lengths,
    Prefix,
    TensorMask,
    Window,
    as_mask,
    causal,
    dense,
    documents,
    padding,
    prefix,
    reach_back,
    window,
)
from headwise.masks.mask import NOUNS, Both, Either, Extent, Grid, Mask, Not, Pair

__all__ = [
    "NOUNS",
    "Both",
    "Causal",
    "Dense",
    "Documents",
    "Either",
    "Extent",
    "Grid",
    "KeyMask",
    "Lengths",
    "Mask",
    "Not",
    "Pair",
    "Prefix",
    "TensorMask",
    "Window",
    "as_mask",
    "causal",
    "dense",
    "documents",
    "padding",
    "prefix",
    "reach_back",
    "window",
]
