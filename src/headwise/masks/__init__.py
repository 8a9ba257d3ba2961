"""Masks, which say which keys a query may see: the class, the kinds, their lowering for backends, and probes.

Imports shapes and errors.
"""

from headwise.masks.composite import Composite
from headwise.masks.kinds import (
    Causal,
    Documents,
    Lengths,
    Prefix,
    Window,
    as_mask,
    causal,
    chunks,
    dense,
    documents,
    padding,
    prefix,
    reach_back,
    window,
)
from headwise.masks.mask import Both, Either, Extent, Grid, Mask
from headwise.masks.selection import Blocks, blocks

__all__ = [
    "Blocks",
    "Both",
    "Causal",
    "Composite",
    "Documents",
    "Either",
    "Extent",
    "Grid",
    "Lengths",
    "Mask",
    "Prefix",
    "Window",
]
__all__ += ["as_mask", "blocks", "causal", "chunks", "dense", "documents", "padding", "prefix", "reach_back", "window"]
