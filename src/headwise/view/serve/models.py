"""The models a server offers: named once, opened when first asked for."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.errors import CheckpointError, OptionError
from headwise.models import LanguageModel, TextModel, open_model
from headwise.study.silence import silence
from headwise.study.watch import attention_layers, watch
from headwise.view.serve.requests import Refusal
from headwise.weights import AttentionMap


class Models:
    """Models by the name a page shows: "builtin", or that of their folder.

    Args:
        paths: "builtin" or folders, the first is the one a page begins with.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths: dict[str, str] = {}
        self._open: dict[str, TextModel] = {}
        self._lock = threading.Lock()
        for path in dict.fromkeys(paths):
            if path != "builtin" and not Path(path).is_dir():
                raise CheckpointError(f"there is no folder {path}; expected builtin, or the folder of a model.")
            self._paths[self._free_name(path)] = path
        if not self._paths:
            raise OptionError("no model is named; pass --model builtin or the folder of one.")

    def _free_name(self, path: str) -> str:
        """The last part of the path; two of the same name are numbered."""
        name = path if path == "builtin" else Path(path).resolve().name or "model"
        count = sum(known == name or known.startswith(f"{name} (") for known in self._paths)
        return name if count == 0 else f"{name} ({count + 1})"

    @property
    def names(self) -> list[str]:
        """In the order they were given."""
        return list(self._paths)

    def add(self, name: str, model: TextModel) -> None:
        """Offer a model that is there already."""
        self._paths[name], self._open[name] = name, model

    def name_of(self, name: str | None) -> str:
        """The name, the first unless given; refused where there is none."""
        if name is None:
            return self.names[0]
        if name not in self._paths:
            raise Refusal(404, f"there is no model of this name; there are {', '.join(self.names)}.")
        return name

    def __getitem__(self, name: str) -> TextModel:
        """The model, opened now if it is not yet."""
        with self._lock:
            if name not in self._open:
                self._open[name] = open_model(self._paths[name])
            return self._open[name]

    def told(self) -> list[dict[str, Any]]:
        """What a page needs to offer them."""
        return [{"name": name, "open": name in self._open} for name in self.names]


# What a model makes of a text: its loss, and what it expects to follow.

CHUNK = 1024  # tokens whose logits are in memory at a time
LOGIT_BYTES = 2**30  # that a transformers model may write for the loss: it gives all logits at once, or the last
LIKELIEST = 10


class Next(NamedTuple):
    """A token that may follow, and how likely it is."""

    token: str
    probability: float


class Outcome(NamedTuple):
    """What a model makes of a text.

    Args:
        loss: nats per token, of every token but the first given those before it; None where there is none.
        next: the likeliest tokens to follow.
        missing: why something is not given.
    """

    loss: float | None
    next: tuple[Next, ...] = ()
    missing: str | None = None


def outcome(model: TextModel, ids: Tensor) -> Outcome:
    """Run the model once over (1, T)."""
    if isinstance(model, LanguageModel):
        return _of_ours(model, ids)
    if not hasattr(model.module, "lm_head") and getattr(model.module, "get_output_embeddings", lambda: None)() is None:
        model.read(ids)
        return Outcome(None, missing="This model does not write: it has no next token, and no loss.")
    return _of_transformers(model, ids)


def vocabulary(model: TextModel) -> int:
    """How many tokens the model knows."""
    module: Any = model.module
    table = module.embedding if isinstance(model, LanguageModel) else module.get_input_embeddings()
    return int(table.weight.shape[0])


def _of_ours(model: LanguageModel, ids: Tensor) -> Outcome:
    """The logits are made in parts: all of a long text would take gigabytes."""
    hidden = model.gpt.features(ids)[0]
    total, count = 0.0, ids.shape[1] - 1
    for start in range(0, count, CHUNK):
        targets = ids[0, start + 1 : start + 1 + CHUNK]
        logits = model.gpt.logits(hidden[start : start + len(targets)])
        total += float(F.cross_entropy(logits, targets, reduction="sum"))
    return Outcome(total / count if count else None, _likeliest(model, model.gpt.logits(hidden[-1])))


def _of_transformers(model: TextModel, ids: Tensor) -> Outcome:
    length = ids.shape[1]
    fits = length * vocabulary(model) * 4 <= LOGIT_BYTES
    logits = model.module(input_ids=ids, use_cache=False, **({} if fits else {"logits_to_keep": 1})).logits[0].float()
    following = _likeliest(model, logits[-1])
    if not fits:
        return Outcome(None, following, f"No loss: the logits of {length:,} tokens would take too much memory.")
    loss = float(F.cross_entropy(logits[:-1], ids[0, 1:])) if length > 1 else None
    return Outcome(loss, following)


def _likeliest(model: TextModel, logits: Tensor) -> tuple[Next, ...]:
    found = logits.float().softmax(-1).topk(min(LIKELIEST, logits.shape[-1]))
    return tuple(map(Next, model.pieces(found.indices), found.values.tolist()))


# One run of a model over a text: its maps and its outcome, with progress by layer, and stopped between layers.

Pairs = Sequence[tuple[int, int]]


class Stopped(Exception):  # noqa: N818 - nothing is wrong: somebody has cancelled
    """The look is not wanted any more."""


def run(
    model: TextModel, ids: Tensor, off: Pairs = (), *, maps: bool = True, told: Callable[[float], None] = lambda _: None
) -> tuple[dict[str, AttentionMap], Outcome]:
    """The maps of all layers in order, and the outcome. Nothing T×T is made.

    Args:
        model: the model.
        ids: (1, T).
        off: pairs of layer and head that are silent meanwhile.
        maps: False for the outcome alone.
        told: called before each layer with the share that is done; what it raises ends the run.
    """
    names = list(attention_layers(model.module, "serve"))
    silent: dict[str, list[int]] = {}
    for layer, head in off:
        silent.setdefault(names[layer], []).append(head)
    with torch.no_grad(), contextlib.ExitStack() as contexts:
        contexts.enter_context(_between_layers(model, told))
        if silent:
            contexts.enter_context(silence(model.module, silent))
        seen = contexts.enter_context(watch(model.module)) if maps else {}
        found = outcome(model, ids)
    told(1.0)
    return {name: seen[name].detach() for name in names if name in seen}, found


@contextlib.contextmanager
def _between_layers(model: TextModel, told: Callable[[float], None]) -> Iterator[None]:
    layers = list(attention_layers(model.module, "serve").values())

    def before(index: int) -> Callable[..., None]:
        return lambda *_: told(index / len(layers))

    handles = [layer.register_forward_pre_hook(before(i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_off(model: TextModel, off: Pairs) -> None:
    """Refuse layers and heads that are not there."""
    layers = list(attention_layers(model.module, "serve").values())
    for layer, head in off:
        if layer >= len(layers):
            raise OptionError(f"layer {layer}: this model has {len(layers)}, counted from 0.")
        most = heads_of(layers[layer])
        if most is not None and head >= most:
            raise OptionError(f"head {layer}.{head}: this layer has {most} heads, counted from 0.")


def heads_of(layer: Any) -> int | None:
    """How many heads an attention has, where it says so."""
    config = getattr(layer, "config", None)
    for found in (getattr(layer, "num_heads", None), getattr(config, "num_attention_heads", None)):
        if isinstance(found, int):
            return found
    return None
