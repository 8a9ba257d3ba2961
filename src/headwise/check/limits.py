"""What a learner's code may use: set in its own process before anything else is imported."""

import contextlib
import ctypes
import resource
import socket
import sys
from typing import Any

MEMORY = 6 * 2**30  # address space; torch alone maps more than 2 GiB
FILES = 64 * 2**20
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def apply(seconds: float) -> None:
    """Limits on processor time, memory and files, and no network."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CPU, (int(4 * seconds) + 1, int(4 * seconds) + 2))
    for kind, limit in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_FSIZE, FILES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS refuses some
            resource.setrlimit(kind, (limit, limit))
    no_network()


def no_network() -> None:
    """An empty network namespace where the kernel allows one; in any case sockets that refuse."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET)
    socket.socket.connect = _refuse  # type: ignore[method-assign]
    socket.socket.connect_ex = _refuse  # type: ignore[method-assign]
    socket.socket.sendto = _refuse  # type: ignore[method-assign]
    socket.getaddrinfo = _refuse
    socket.create_connection = _refuse


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OSError("the checker runs without a network")
