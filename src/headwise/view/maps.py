"""From a model and a text to a sight: run the model once, collect the maps."""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError
from headwise.models import TextModel
from headwise.study.watch import Watched, watch
from headwise.view.result import Progress, Sight, silent
from headwise.weights import AttentionMap, Scoring

Layers = Collection[str] | Callable[[str], bool] | None


def view(
    model: Any,
    tokens: Any = None,
    *,
    words: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    layers: Layers = None,
    queries: int | None = None,
    progress: Progress = silent,
) -> Sight:
    """What every head of a model does with one text.

    >>> from headwise import load_builtin
    >>> sight = view(load_builtin(), "The captain looked at the sea.")
    >>> sight.sentence.split(" · ")[:2]
    ['7 layers × 8 heads', '8 tokens']

    Args:
        model: the built-in model or its like, with a text; a model on headwise layers or a transformers model on
            `attn_implementation="headwise"`, with token ids; or maps: one, a list, or by name, also as plain tensors
            (1, H, T, S), such as the `attentions` of an eager model.
        tokens: the text, or token ids (T,) or (1, T); or everything the model is called with, by name.
        words: what each query token stands for; numbers unless given.
        keys: what each key token stands for, in cross-attention.
        layers: names of the layers to see, or a function that says which; all unless given. An encoder and decoder have
            layers of different sizes, of which one kind can be seen at a time.
        queries: take numbers and small pictures from this many queries, evenly spread, and say so; from all unless
            given. The time is that many times T instead of T times T.
        progress: called with what is being done, how much of it is done, and of how much.
    """
    told: dict[str, Any] = {"queries": queries, "progress": progress}
    if isinstance(model, TextModel):
        ids = model.tokens(tokens, most=10**9) if isinstance(tokens, str) else _ids(tokens)
        _check_length(model, ids)
        maps = _maps(model.module, lambda: model.read(ids), layers, progress)
        return Sight(maps, model.pieces(ids) if words is None else words, ids, **told)
    if isinstance(model, nn.Module):
        if tokens is None or isinstance(tokens, str):
            raise OptionError(f"view({type(model).__name__}): pass token ids, such as tokenizer(text).input_ids.")
        if isinstance(tokens, Mapping):
            maps = _maps(model, lambda: model(**tokens), layers, progress)
            T, S = next(iter(maps.values())).shape[2:] if maps else (0, 0)
            own = tokens.get("input_ids") if T == S else None  # the keys of cross-attention are another text
            return Sight(maps, words, None if own is None else _ids(own), keys, **told)
        ids = _ids(tokens)
        return Sight(_maps(model, lambda: model(ids), layers, progress), words, ids, keys, **told)
    return Sight(_named(model), words, None if tokens is None else _ids(tokens), keys, **told)


def _maps(model: nn.Module, run: Callable[[], object], layers: Layers, progress: Progress) -> dict[str, AttentionMap]:
    """The maps of one run, by layer; of a layer that is called several times the last."""
    found = 0

    def seen_one(weights: AttentionMap) -> AttentionMap:
        nonlocal found
        found += 1
        progress("reading", min(found, count), count)
        return weights

    training = model.training
    try:
        with torch.no_grad(), _watch(model, layers, seen_one) as seen:
            count = len(seen._layers)
            model.eval()
            run()
    except IndexError as error:
        raise ShapeError(
            f"view({type(model).__name__}): {error}. Are there more tokens than it can read, or ids that its embedding "
            "does not have?"
        ) from error
    finally:
        model.train(training)
    return dict(seen)


def _watch(model: nn.Module, layers: Layers, each: Callable[[AttentionMap], AttentionMap]) -> Watched:
    """A watch over all of the model; one that would miss some of it is refused unless the others are asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error" if layers is None else "ignore", message=".*attends by itself")
        try:
            return watch(model, layers=layers, statistics=each)
        except UserWarning as told:
            raise OptionError(f"view: {told} Choose the layers that are, with layers=[...].") from told


def _check_length(model: TextModel, ids: Tensor) -> None:
    if model.limit is not None and ids.shape[1] > model.limit:
        raise ShapeError(
            f"the text is {ids.shape[1]:,} tokens long and the model can read {model.limit:,}. Shorten it, or pass the "
            f"first tokens alone: view(model, model.tokens(text, most=10**9)[:, :{model.limit}])."
        )


def _ids(tokens: Any) -> Tensor:
    found = torch.as_tensor(tokens)
    found = found[None] if found.dim() == 1 else found
    if found.dim() != 2 or found.shape[0] != 1 or found.shape[1] == 0 or found.is_floating_point():
        raise OptionError(f"tokens of shape {tuple(found.shape)}: expected whole numbers (T,) or (1, T), at least one.")
    return found


def _named(maps: Any) -> Mapping[str, AttentionMap]:
    """Maps by the names of their layers."""
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


# Weights that somebody already has as numbers, to look at like any other map.

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
