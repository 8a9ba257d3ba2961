"""Multi-head attention you can read, run and see."""

import importlib

from headwise import reference, textbook
from headwise.attention import attend
from headwise.check import check
from headwise.errors import (
    CacheError,
    CheckpointError,
    DeviceError,
    DtypeError,
    HeadCountError,
    HeadwiseError,
    MapIndexError,
    MapSizeError,
    MaskError,
    MissingExtraError,
    OptionError,
    ShapeError,
    StaleMapError,
    UnknownOptionError,
)
from headwise.layer import MultiHeadAttention, compat
from headwise.layer.cache import KVCache, Memory
from headwise.layer.explain import Explanation, explain
from headwise.layer.positions import linear, llama3, ntk, rotary, yarn
from headwise.layer.replacement import Replaced, replace
from headwise.masks import Mask, causal, dense, documents, padding, prefix, probes, window
from headwise.masks.probes import induction, local, offset, previous_token, same_token, sink, token_is
from headwise.models import load_builtin
from headwise.models.checkpoint import AttentionLayer, Checkpoint, open_checkpoint
from headwise.study.interventions import Silenced, silence
from headwise.study.survey import Survey, survey
from headwise.study.watch import Watched, watch
from headwise.view import view
from headwise.weights import AttentionMap, Scoring
from headwise.weights.panel import Panel
from headwise.weights.scoring import RelativeBias, alibi
from headwise.weights.summary import HeadSummary, Summary

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import `headwise.parallel` on first use: torch's distributed tensors take a second to import."""
    if name == "parallel":
        return importlib.import_module("headwise.parallel")
    raise AttributeError(f"module 'headwise' has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """`%load_ext headwise` adds the cell magic `%%headwise_check`."""
    from headwise.check import load_ipython_extension as load

    load(shell)


__all__ = [
    "AttentionLayer",
    "AttentionMap",
    "CacheError",
    "Checkpoint",
    "CheckpointError",
    "DeviceError",
    "DtypeError",
    "Explanation",
    "HeadCountError",
    "HeadSummary",
    "HeadwiseError",
    "KVCache",
    "MapIndexError",
    "MapSizeError",
    "Mask",
    "MaskError",
    "Memory",
    "MissingExtraError",
    "MultiHeadAttention",
    "OptionError",
    "Panel",
    "RelativeBias",
    "Replaced",
    "Scoring",
    "ShapeError",
    "Silenced",
    "StaleMapError",
    "Summary",
    "Survey",
    "UnknownOptionError",
    "Watched",
    "alibi",
    "attend",
    "causal",
    "check",
    "compat",
    "dense",
    "documents",
    "explain",
    "induction",
    "linear",
    "llama3",
    "load_builtin",
    "local",
    "ntk",
    "offset",
    "open_checkpoint",
    "padding",
    "prefix",
    "previous_token",
    "probes",
    "reference",
    "replace",
    "rotary",
    "same_token",
    "silence",
    "sink",
    "survey",
    "textbook",
    "token_is",
    "view",
    "watch",
    "window",
    "yarn",
]
