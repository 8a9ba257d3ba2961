"""The cause of an error in a learner's code, from its traceback, the values that met there, and the text of the file.

`explained` has one reader for every kind of error; to add one, write a function `(Scene) → Finding | None` and put it
into `READERS`. Every axis of a test call has a size of its own, so a shape can be written with the names of its axes.
"""

import ast
import linecache
import traceback
from collections.abc import Callable

import torch

from headwise.check.explain.axes import product, view_sizes
from headwise.check.explain.kinds import (
    bare_super,
    condition,
    float_size,
    missing_attribute,
    number_for_tensor,
    tensor_as_condition,
    uncalled,
)
from headwise.check.explain.scene import Scene, nearest
from headwise.check.mistakes import Finding
from headwise.check.sizes import CallSizes

__all__ = ["condition", "explained", "nearest"]

READERS: tuple[Callable[[Scene], Finding | None], ...] = (
    bare_super, tensor_as_condition, number_for_tensor, uncalled, float_size, view_sizes, product, missing_attribute,
)  # fmt: skip


def explained(
    error: BaseException, filename: str | None, sizes: CallSizes, blamed: int | None = None
) -> Finding | None:
    """The cause of an error by name, with its line; None where it is none of those that are known."""
    steps = [(f, n) for f, n in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename == filename]
    if filename is None or not steps:
        return None
    try:
        scene = Scene(error, *steps[-1], blamed, sizes, ast.parse("".join(linecache.getlines(filename))))
    except (SyntaxError, ValueError):
        return None
    with torch.no_grad():
        return next((found for reader in READERS if (found := reader(scene)) is not None), None)
