"""Multi-head attention you can read, run and see."""

from headwise import reference, textbook
from headwise.attention import attend
from headwise.errors import (
    CheckpointError,
    DeviceError,
    DtypeError,
    HeadCountError,
    HeadwiseError,
    MaskError,
    OptionError,
    ShapeError,
)
from headwise.explain import Explanation, explain
from headwise.layer import MultiHeadAttention
from headwise.mask_algebra import Mask
from headwise.masks import causal, dense, documents, padding, prefix, window
from headwise.scoring import Scoring

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DeviceError",
    "DtypeError",
    "Explanation",
    "HeadCountError",
    "HeadwiseError",
    "Mask",
    "MaskError",
    "MultiHeadAttention",
    "OptionError",
    "Scoring",
    "ShapeError",
    "attend",
    "causal",
    "dense",
    "documents",
    "explain",
    "padding",
    "prefix",
    "reference",
    "textbook",
    "window",
]
