"""The table of backends, fastest first. Each one says which calls it can run and, if not, why not."""

import warnings

import torch

from headwise.attention.backends.base import Backend, Call
from headwise.attention.backends.blocks import QueryBlocks
from headwise.attention.backends.dense import RowByRow, Whole
from headwise.attention.backends.flash import FlashKernel
from headwise.attention.backends.flex import FlexKernel
from headwise.attention.backends.sdpa import Ordinary, Sdpa
from headwise.attention.backends.selected import SelectedBlocks
from headwise.attention.backends.shared import SharedKeys
from headwise.attention.backends.triangles import Triangles
from headwise.attention.backends.widened import SHORTEST, Widened

BLOCKS, ORDINARY, SDPA, SELECTED, SHARED = QueryBlocks(), Ordinary(), Sdpa(), SelectedBlocks(), SharedKeys()
FLASH = FlashKernel()
WIDENED = Widened([SELECTED, BLOCKS, SDPA, SHARED])
ON_CPU: tuple[Backend, ...] = (WIDENED, SELECTED, BLOCKS)
BACKENDS: tuple[Backend, ...] = (*ON_CPU, FLASH, Triangles(), FlexKernel(), SDPA, SHARED, RowByRow(), Whole())


def choose(call: Call) -> Backend:
    """The first backend of the table that accepts the call; warns once if it needs a large T×S tensor."""
    query = call.query
    if call.ordinary and query.numel() and call.value.numel():
        # The table's own answer at a tenth of the cost, during which a GPU would wait for its next kernel. A compiled
        # graph must not look at the length, which would fix it.
        short = not torch.compiler.is_compiling() and query.size(2) < SHORTEST
        if query.is_cuda:
            return FLASH if FLASH.may_pay(call) and FLASH.refuses(call) is None else ORDINARY
        if short or (WIDENED.refuses(call) and BLOCKS.refuses(call)):
            return ORDINARY
    for backend in BACKENDS:
        if backend.refuses(call) is None:
            warn_of_size(backend, call)
            return backend
    raise AssertionError("the reference accepts every call")


LARGE = 2**30
_warned: set[str] = set()


def warn_of_size(backend: Backend, call: Call) -> None:
    """Warn if a backend makes a T×S tensor of more than 1 GiB."""
    if torch.compiler.is_compiling():  # first, because looking at a length would fix it into the graph
        return
    if call.query.shape[2] * call.key.shape[2] < 2**24 or backend.name in _warned:
        return
    size = backend.dense_bytes(call)
    if size > LARGE:
        _warned.add(backend.name)
        B, H, T, _ = call.query.shape
        warnings.warn(
            f"attention of (B, H, T, S) = {(B, H, T, call.key.shape[2])} runs by {backend.summary}, which takes "
            f"{size / 2**30:.1f} GiB for one T×S tensor. headwise.explain(...) says why faster backends refuse; masks "
            f"such as causal() & window(...) or documents(...) need no such tensor. This warning is shown once.",
            stacklevel=4,
        )


__all__ = ["BACKENDS", "Backend", "Call", "choose"]
