"""Whether a model computes numbers: a head whose weights are NaN would only seem to do nothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headwise.errors import HeadwiseError
from headwise.study.watch import watch


class NotFiniteError(HeadwiseError, ArithmeticError):
    """A model produced numbers that are infinite or NaN."""


def nan_told(name: str, number: int, more: int = 0) -> str:
    """What to say of the first layer whose weights are NaN, if so many `more` follow."""
    others = f" and {more} more" if more else ""
    return (
        f"attention weights of {name} (layer {number}){others} are NaN: the model computes numbers that are not finite "
        f"from there on."
    )


def check_finite(model: nn.Module, run: Callable[[], Any], verb: str) -> None:
    """Raise if the attention weights of some layer are NaN while `run` runs the model; errors begin with `verb`."""
    with torch.no_grad(), watch(model, statistics=lambda weights: bool(weights.entropy().isnan().any())) as seen:
        run()
    names = list(seen)
    broken = [number for number, name in enumerate(names) if seen[name]]
    if broken:
        raise NotFiniteError(f"{verb}: {nan_told(names[broken[0]], broken[0], len(broken) - 1)}")
