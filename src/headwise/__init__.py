"""Multi-head attention you can read, run and see."""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:  # what type checkers and editors see; at run time a name is imported when it is first used
    from headwise import reference, textbook
    from headwise.attention.attend import attend
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
    from headwise.layer.gates import OutputGate
    from headwise.layer.latent import latent
    from headwise.layer.norms import HeadScale, Norms, cosine
    from headwise.layer.pages import PagePool
    from headwise.layer.positions import (
        PositionalEncoding,
        linear,
        llama3,
        longrope,
        multi_axis_rotary,
        ntk,
        rotary,
        temperature,
        yarn,
    )
    from headwise.layer.projections import Projections
    from headwise.layer.replacement import Replaced, replace
    from headwise.layer.sharing import queries_only
    from headwise.masks import Mask, blocks, causal, chunks, dense, documents, padding, prefix, probes, window
    from headwise.masks.probes import induction, local, offset, previous_token, same_token, sink, token_is
    from headwise.models import load_builtin
    from headwise.models.checkpoint import AttentionLayer, Checkpoint, open_checkpoint
    from headwise.study.eviction import eviction_scores
    from headwise.study.evidence import Evidence, evidence
    from headwise.study.importance import Importance, importance
    from headwise.study.interventions import Intervention, Silenced, freeze, gate, patch, silence
    from headwise.study.kinds import HeadKinds, head_kinds
    from headwise.study.outputs import HeadOutputs
    from headwise.study.residual import LogitAttribution, Why, logit_attribution, why
    from headwise.study.survey import Survey, survey
    from headwise.study.trace import AnswerTrace, trace
    from headwise.study.watch import Watched, watch
    from headwise.view import view
    from headwise.weights import AttentionMap, Scoring
    from headwise.weights.panel import Panel
    from headwise.weights.scoring import RelativeBias, alibi
    from headwise.weights.summary import HeadSummary, Summary


# Where each public name is defined. A test checks that this table, the imports above and `__all__` agree.
_HOMES = {
    "attention.attend": "attend",
    "check": "check",
    "errors": "CacheError CheckpointError DeviceError DtypeError HeadCountError HeadwiseError "
    "MapIndexError MapSizeError MaskError MissingExtraError OptionError ShapeError StaleMapError UnknownOptionError",
    "layer": "MultiHeadAttention",
    "layer.cache": "KVCache Memory",
    "layer.explain": "Explanation explain",
    "layer.gates": "OutputGate",
    "layer.latent": "latent",
    "layer.norms": "HeadScale Norms cosine",
    "layer.pages": "PagePool",
    "layer.positions": "PositionalEncoding linear llama3 longrope multi_axis_rotary ntk rotary temperature yarn",
    "layer.projections": "Projections",
    "layer.replacement": "Replaced replace",
    "layer.sharing": "queries_only",
    "masks": "Mask blocks causal chunks dense documents padding prefix window",
    "masks.probes": "induction local offset previous_token same_token sink token_is",
    "models": "load_builtin",
    "models.checkpoint": "AttentionLayer Checkpoint open_checkpoint",
    "study.eviction": "eviction_scores",
    "study.evidence": "Evidence evidence",
    "study.importance": "Importance importance",
    "study.interventions": "Intervention Silenced freeze gate patch silence",
    "study.kinds": "HeadKinds head_kinds",
    "study.outputs": "HeadOutputs",
    "study.residual": "LogitAttribution Why logit_attribution why",
    "study.survey": "Survey survey",
    "study.trace": "AnswerTrace trace",
    "study.watch": "Watched watch",
    "view": "view",
    "weights": "AttentionMap Scoring",
    "weights.panel": "Panel",
    "weights.scoring": "RelativeBias alibi",
    "weights.summary": "HeadSummary Summary",
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
# Modules that are attributes of headwise; the name of the last two is shorter here than their own.
_ROOMS = (
    "attention",
    "errors",
    "layer",
    "learn",
    "masks",
    "models",
    "parallel",
    "shapes",
    "study",
    "textbook",
    "weights",
)
_MODULES = {name: name for name in (*_ROOMS, "reference")} | {
    "compat": "layer.compat",
    "probes": "masks.probes",
}


class _Root(ModuleType):
    """Keeps `headwise.check` and `headwise.view` functions: importing the package of that name would replace them."""

    def __setattr__(self, name: str, value: object) -> None:
        is_hidden = isinstance(value, ModuleType) and _HOME.get(name) == name
        super().__setattr__(name, getattr(value, name) if is_hidden else value)


sys.modules[__name__].__class__ = _Root


def __getattr__(name: str) -> object:
    """Import a public name or a module when it is first used: torch takes a second or two, and `--help` needs none."""
    if name in _MODULES:
        value: object = importlib.import_module(f"headwise.{_MODULES[name]}")
    elif name in _HOME:
        value = getattr(importlib.import_module(f"headwise.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'headwise' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: object) -> None:
    """`%load_ext headwise` adds the cell magic `%%headwise_check`."""
    from headwise.check import load_ipython_extension as load

    load(shell)


__all__ = [
    "AnswerTrace",
    "AttentionLayer",
    "AttentionMap",
    "CacheError",
    "Checkpoint",
    "CheckpointError",
    "DeviceError",
    "DtypeError",
    "Evidence",
    "Explanation",
    "HeadCountError",
    "HeadKinds",
    "HeadOutputs",
    "HeadScale",
    "HeadSummary",
    "HeadwiseError",
    "Importance",
    "Intervention",
    "KVCache",
    "LogitAttribution",
    "MapIndexError",
    "MapSizeError",
    "Mask",
    "MaskError",
    "Memory",
    "MissingExtraError",
    "MultiHeadAttention",
    "Norms",
    "OptionError",
    "OutputGate",
    "PagePool",
    "Panel",
    "PositionalEncoding",
    "Projections",
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
    "Why",
    "alibi",
    "attend",
    "blocks",
    "causal",
    "check",
    "chunks",
    "compat",
    "cosine",
    "dense",
    "documents",
    "eviction_scores",
    "evidence",
    "explain",
    "freeze",
    "gate",
    "head_kinds",
    "importance",
    "induction",
    "latent",
    "linear",
    "llama3",
    "load_builtin",
    "local",
    "logit_attribution",
    "longrope",
    "multi_axis_rotary",
    "ntk",
    "offset",
    "open_checkpoint",
    "padding",
    "patch",
    "prefix",
    "previous_token",
    "probes",
    "queries_only",
    "reference",
    "replace",
    "rotary",
    "same_token",
    "silence",
    "sink",
    "survey",
    "temperature",
    "textbook",
    "token_is",
    "trace",
    "view",
    "watch",
    "why",
    "window",
    "yarn",
]
