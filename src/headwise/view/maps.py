"""Attention maps to view: of one run of a model on a text, or of weights that are already at hand."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.models import TextModel
from headwise.study.watch import Watched, watch
from headwise.view.result import Progress
from headwise.weights import AttentionMap, Scoring

Layers = Collection[str] | Callable[[str], bool] | None
LOG_ZERO = -1e4  # in place of log 0: its exponential is 0 in every precision
NEAR_ONE = 0.02  # how far the sum of a row may be from 1; half precision rounds


class Collected(NamedTuple):
    """The maps of a model or of the caller by layer name, and what is known about their tokens."""

    maps: Mapping[str, AttentionMap]
    ids: Tensor | None
    words: Sequence[str] | None = None


def collected(model: Any, tokens: Any, layers: Layers, progress: Progress) -> Collected:
    """Run a model once and collect the maps of its layers, or take the maps that are given."""
    if isinstance(model, TextModel):
        ids = model.tokens(tokens, most=10**9) if isinstance(tokens, str) else _token_ids(tokens)
        _check_length(model, ids)
        return Collected(_watched(model.module, lambda: model.read(ids), layers, progress), ids, model.pieces(ids))
    if not isinstance(model, nn.Module):
        return Collected(_named(model), None if tokens is None else _token_ids(tokens))
    if tokens is None or isinstance(tokens, str):
        raise OptionError(f"view({type(model).__name__}): pass token ids, such as tokenizer(text).input_ids.")
    if not isinstance(tokens, Mapping):
        ids = _token_ids(tokens)
        return Collected(_watched(model, lambda: model(ids), layers, progress), ids)
    maps = _watched(model, lambda: model(**tokens), layers, progress)
    T, S = next(iter(maps.values())).shape[2:] if maps else (0, 0)
    given = tokens.get("input_ids") if T == S else None  # in cross-attention, the keys are another text
    return Collected(maps, None if given is None else _token_ids(given))


def _watched(
    model: nn.Module, run: Callable[[], object], layers: Layers, progress: Progress
) -> dict[str, AttentionMap]:
    """The maps of one run by layer; the last one of a layer that is called several times."""
    found = 0

    def count(weights: AttentionMap) -> AttentionMap:
        nonlocal found
        found += 1
        progress("reading", min(found, total), total)
        return weights

    training = model.training
    try:
        with torch.no_grad(), _watch(model, layers, count) as seen:
            total = len(seen._layers)
            model.eval()
            run()
    except IndexError as error:
        raise ShapeError(
            f"view({type(model).__name__}): {error}. Is the text longer than the model can read, or are there ids that "
            "its embedding does not have?"
        ) from error
    finally:
        model.train(training)
    return dict(seen)


def _watch(model: nn.Module, layers: Layers, each: Callable[[AttentionMap], AttentionMap]) -> Watched:
    """Watch the whole model; if some of its attention cannot be watched, the caller must choose the layers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if layers is None else "ignore", message=".*attends by itself")
        try:
            return watch(model, layers=layers, statistics=each)
        except UserWarning as warning:
            raise OptionError(f"view: {warning} Choose the layers to view with layers=[...].") from warning


def _check_length(model: TextModel, ids: Tensor) -> None:
    if model.limit is not None and ids.shape[1] > model.limit:
        raise ShapeError(
            f"the text is {ids.shape[1]:,} tokens long and the model can read {model.limit:,}. Shorten it, or pass "
            f"only the first tokens: view(model, model.tokens(text, most=10**9)[:, :{model.limit}])."
        )


def _token_ids(tokens: Any) -> Tensor:
    """Token ids as (1, T)."""
    found = torch.as_tensor(tokens)
    found = found[None] if found.dim() == 1 else found
    if found.dim() != 2 or found.shape[0] != 1 or found.shape[1] == 0 or found.is_floating_point():
        raise OptionError(f"tokens of shape {tuple(found.shape)}: expected integers (T,) or (1, T), at least one.")
    return found


def _named(maps: Any) -> Mapping[str, AttentionMap]:
    """Maps by layer name, from one map, a list or a mapping; plain tensors of weights become maps."""
    if isinstance(maps, AttentionMap | Tensor):
        maps = [maps]
    if isinstance(maps, Mapping):
        named = dict(maps)
    elif isinstance(maps, Sequence):
        named = {f"layer {i}": weights for i, weights in enumerate(maps)}
    else:
        raise OptionError(f"view({type(maps).__name__}): expected a model, or attention maps.")
    named = {name: map_of(weights) if isinstance(weights, Tensor) else weights for name, weights in named.items()}
    wrong = [type(weights).__name__ for weights in named.values() if not isinstance(weights, AttentionMap)]
    if wrong:
        raise OptionError(
            f"view: a {wrong[0]} is among the maps; expected AttentionMap, as return_weights=True gives, or weights "
            f"(1, H, T, S) as a tensor."
        )
    return named


def map_of(weights: Tensor) -> AttentionMap:
    """A map of given weights (H, T, S) or (1, H, T, S), such as those of `output_attentions=True`.

    A map is made of queries and keys. Here the queries are the logarithms of the weights and key j is unit vector j, so
    that query times key is the logarithm of a weight, and its softmax is the weight.

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
    if not bool(((sums - 1).abs() < NEAR_ONE).all()) or bool((precise < 0).any()):
        raise OptionError(
            f"the rows of these weights sum to {sums.min():.3g} up to {sums.max():.3g}: expected weights after the "
            "softmax, where each row sums to 1."
        )
    S = weights.shape[-1]
    keys = torch.eye(S, dtype=precise.dtype, device=precise.device).expand(*weights.shape[:2], S, S)
    return AttentionMap(precise.log().clamp(min=LOG_ZERO), keys, Scoring(scale=1.0))
