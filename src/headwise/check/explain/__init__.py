"""The cause of an error in a learner's code, from its traceback, the values that met there, and the text of the file.

`explained` has one reader for every kind of error; to add one, write a function `(Scene) → Finding | None` and put it
into `READERS`. Every axis of a test call has a size of its own, so a shape can be written with the names of its axes.
"""

import ast
import linecache
import traceback
from collections.abc import Callable, Collection

import torch

from headwise.check.explain.axes import elementwise, linear_layer, product, unsplit, view_sizes
from headwise.check.explain.kinds import (
    bare_super,
    condition,
    dropped_result,
    float_size,
    lost_turns,
    mask_of_numbers,
    missing_attribute,
    not_callable,
    number_for_tensor,
    returns_nothing,
    tensor_as_condition,
    trailing_comma,
    uncalled,
)
from headwise.check.explain.parts import (
    cut_parts,
    einsum_letters,
    list_for_tensor,
    own_arguments,
    swapped_arguments,
)
from headwise.check.explain.scene import Scene, nearest
from headwise.check.explain.shapes import shapes
from headwise.check.mistakes import Finding
from headwise.check.sizes import CallSizes
from headwise.check.trace import Trace

__all__ = ["condition", "explained", "nearest", "shapes_met"]

READERS: tuple[Callable[[Scene], Finding | None], ...] = (
    trailing_comma, dropped_result, lost_turns, returns_nothing, bare_super, tensor_as_condition, number_for_tensor,
    uncalled, not_callable, float_size, cut_parts, own_arguments, list_for_tensor, einsum_letters, linear_layer,
    view_sizes, elementwise, product, unsplit, mask_of_numbers, missing_attribute, swapped_arguments,
)  # fmt: skip


def explained(
    error: BaseException,
    filename: str | None,
    sizes: CallSizes,
    blamed: int | None = None,
    trace: Trace | None = None,
    taken: Collection[str] = (),
) -> Finding | None:
    """The cause of an error by name, with its line; None where it is none of those that are known."""
    scene = _scene(error, filename, sizes, blamed, trace, taken)
    if scene is None:
        return None
    with torch.no_grad():
        return next((found for reader in READERS if (found := reader(scene)) is not None), None)


def shapes_met(error: BaseException, filename: str | None, sizes: CallSizes) -> str:
    """The tensors of the statement that raised an error and their shapes; empty where it has none."""
    scene = _scene(error, filename, sizes)
    if scene is None:
        return ""
    with torch.no_grad():
        return shapes(scene)


def _scene(
    error: BaseException,
    filename: str | None,
    sizes: CallSizes,
    blamed: int | None = None,
    trace: Trace | None = None,
    taken: Collection[str] = (),
) -> Scene | None:
    frames = list(traceback.walk_tb(error.__traceback__))
    if filename is None or all(frame.f_code.co_filename != filename for frame, _ in frames):
        return None
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None
    return Scene(error, frames, filename, blamed, sizes, tree, trace, taken)
