"""The table of paths, fastest first. Each says what it can run and, if it cannot, why not."""

from headwise.backends.base import Backend, Call
from headwise.backends.blocks import Blocks
from headwise.backends.flex import Flex
from headwise.backends.rows import Rows
from headwise.backends.sdpa import Sdpa
from headwise.backends.whole import Whole

BACKENDS: tuple[Backend, ...] = (Blocks(), Flex(), Sdpa(), Rows(), Whole())


def choose(call: Call) -> Backend:
    """The first backend of the table that takes the call."""
    for backend in BACKENDS:
        if backend.refuses(call) is None:
            return backend
    raise AssertionError("the reference refuses nothing")


__all__ = ["BACKENDS", "Backend", "Call", "choose"]
