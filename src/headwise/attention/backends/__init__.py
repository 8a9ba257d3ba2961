"""The table of paths, fastest first. Each says what it can run and, if it cannot, why not."""

import warnings

import torch

from headwise.attention.backends.base import Backend, Call
from headwise.attention.backends.blocks import SHORTEST, Blocks
from headwise.attention.backends.dense import Rows, Whole
from headwise.attention.backends.flex import Flex
from headwise.attention.backends.sdpa import Sdpa
from headwise.attention.backends.triangles import Triangles

SDPA = Sdpa()
BACKENDS: tuple[Backend, ...] = (Blocks(), Triangles(), Flex(), SDPA, Rows(), Whole())


def choose(call: Call) -> Backend:
    """The first backend of the table that takes the call; warns, once, where that takes a large T×S tensor."""
    if (call.query.is_cuda or _short(call)) and call.ordinary and _filled(call):
        return SDPA  # what the table would say, at a tenth of the cost: a GPU waits for its next kernel meanwhile
    for backend in BACKENDS:
        if backend.refuses(call) is None:
            warn_of_size(backend, call)
            return backend
    raise AssertionError("the reference refuses nothing")


def _short(call: Call) -> bool:
    """Whether there are too few queries for blocks; while compiling, a length must not be looked at."""
    return not torch.compiler.is_compiling() and call.query.size(2) < SHORTEST


def _filled(call: Call) -> bool:
    return bool(call.query.numel() and call.value.numel())


LARGE = 2**30
_warned: set[str] = set()


def warn_of_size(backend: Backend, call: Call) -> None:
    """Say so where a path makes a tensor of T·S numbers that takes over 1 GiB."""
    if torch.compiler.is_compiling():  # asked first: looking at a length would fix it into the graph
        return
    if call.query.shape[2] * call.key.shape[2] < 2**24 or backend.name in _warned:
        return
    size = backend.dense_bytes(call)
    if size > LARGE:
        _warned.add(backend.name)
        B, H, T, _ = call.query.shape
        warnings.warn(
            f"attention of (B, H, T, S) = {(B, H, T, call.key.shape[2])} runs by {backend.summary}, which takes "
            f"{size / 2**30:.1f} GiB for one T×S tensor. headwise.explain(...) says why faster paths refuse; masks "
            f"such as causal() & window(...) or documents(...) need no such tensor. Said once.",
            stacklevel=4,
        )


__all__ = ["BACKENDS", "Backend", "Call", "choose"]
