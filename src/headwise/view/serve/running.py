"""One run of a model over a text: its maps and its outcome, with progress by layer, and stopped between layers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.models import TextModel
from headwise.study.interventions import silence
from headwise.study.watch import attention_layers, watch
from headwise.view.serve.outcomes import Outcome, outcome
from headwise.weights import AttentionMap

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
