"""Catches `output, attention = mha(x)`, which would unpack the batch: a call without `return_weights` is one tensor.

Python itself refuses to unpack a tensor of three or more samples into two names, so only a batch of exactly two would
be unpacked silently. `check_not_unpacked` looks at the instruction that follows the call in the caller's
frame. It raises only if the layer itself was called there, by name: `list(map(mha, inputs))` is left alone.
"""

import dis
import sys
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from headwise.errors import ShapeError

MODULE_CALL = torch_module.__file__  # the frames of `nn.Module.__call__`
MOST_PLACES = 4096

Names = tuple[str, ...]
# By id of the code and offset: the code itself, so that its id is not reused, and the name whose call is unpacked.
_places: dict[tuple[int, int], tuple[CodeType, Names | None]] = {}


def check_not_unpacked(layer: nn.Module, output: Tensor) -> None:
    """Raise if the caller of `layer` unpacks its `output`, one tensor of two samples, as if it were a pair.

    To be called from `forward`. It takes 0.4 µs for a call that it has seen before.
    """
    try:
        frame = sys._getframe(4)  # above this one: forward, two frames of `nn.Module.__call__`, and the caller
    except ValueError:
        return
    if frame.f_code.co_filename == MODULE_CALL and frame.f_back is not None:  # a module with hooks has a third one
        frame = frame.f_back
    code, offset = frame.f_code, frame.f_lasti
    found = _places.get((id(code), offset))
    if found is None:
        if len(_places) >= MOST_PLACES:
            _places.clear()
        found = _places[id(code), offset] = (code, unpacked_names(code, offset))
    if found[1] is not None and _is_plain(layer, output) and _named(frame, found[1]) is layer:
        name = ".".join(found[1])
        raise ShapeError(
            f"{name}(...) returned one tensor of shape {tuple(output.shape)}, and unpacking it into two names would "
            f"take its two samples apart. For the pair write output, weights = {name}(..., return_weights=True); for "
            f"the samples, {name}(...).unbind()."
        )


def unpacked_names(code: CodeType, offset: int) -> Names | None:
    """The dotted name whose call at `offset` is unpacked into two names right away; None for any other instruction.

    >>> code = compile("output, attention = block.mha(x)", "", "exec")
    >>> [names for i in range(0, len(code.co_code), 2) if (names := unpacked_names(code, i))][:1]
    [('block', 'mha')]
    """
    steps = list(dis.get_instructions(code))
    at = max((i for i, step in enumerate(steps) if step.offset <= offset), default=-1)
    if not 0 <= at < len(steps) - 1 or not steps[at].opname.startswith("CALL"):
        return None
    if steps[at + 1].opname != "UNPACK_SEQUENCE" or steps[at + 1].arg != 2:
        return None
    start = _start(steps[at])
    callee = [step for step in steps[:at] if start is not None and _start(step) == start and step.opname != "PUSH_NULL"]
    if not callee or not callee[0].opname.startswith(("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")):
        return None
    first = callee[0].argval
    names = [first[0] if isinstance(first, tuple) else first]
    for step in callee[1:]:
        if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        names.append(step.argval)
    return tuple(names)


def _start(step: dis.Instruction) -> tuple[int, int] | None:
    """Where the expression of an instruction starts in the source, as line and column."""
    where = step.positions
    if where is None or where.lineno is None or where.col_offset is None:
        return None
    return where.lineno, where.col_offset


def _is_plain(layer: nn.Module, output: Tensor) -> bool:
    """Whether the caller gets this very tensor: torch calls the layer, no hook replaces it, and nothing traces it."""
    if not sys._getframe(3).f_code.co_filename == sys._getframe(4).f_code.co_filename == MODULE_CALL:
        return False
    hooks = (*layer._forward_hooks.values(), *torch_module._global_forward_hooks.values())
    untouched = all(getattr(hook, "keeps_output", False) for hook in hooks)
    return untouched and type(output) is Tensor and torch._C._functorch.peek_interpreter_stack() is None


def _named(frame: FrameType, names: Names) -> object:
    """What a dotted name refers to in a frame, read without running properties."""
    value: Any = frame.f_locals.get(names[0], frame.f_globals.get(names[0]))
    for name in names[1:]:
        held = getattr(value, "__dict__", {})
        value = held.get(name, held.get("_modules", {}).get(name))
    return value
